//! The part of the FUSE protocol that the view needs: requests out of bytes, answers into bytes.
//!
//! The kernel writes the requests, but a guest chooses numbers in them (offset, size, names), so
//! nothing here trusts a length. Invariant: no bytes make it panic. Layouts: linux/fuse.h.

use std::io;

/// Bytes that one request may have; the kernel wants room for its largest.
pub(super) const BUFFER: usize = 16 << 10;
/// Node id of the root folder.
pub(super) const ROOT: u64 = 1;

const IN_HEADER: usize = 40;
const MINOR: u32 = 31;
const DO_READDIRPLUS: u32 = 1 << 13;
/// Folders are listed without being opened: one question less in each launch.
const NO_OPENDIR: u32 = 1 << 24;
const DIRECT_IO: u32 = 1;

/// What the kernel asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ask {
    Init {
        major: u32,
        flags: u32,
    },
    Lookup {
        name: String,
    },
    Forget {
        count: u64,
    },
    BatchForget {
        nodes: Vec<(u64, u64)>,
    },
    Attributes,
    Open,
    Read {
        offset: u64,
        size: u32,
    },
    List {
        offset: u64,
        size: u32,
    },
    FileSystem,
    /// Release of a file: nothing is kept for it.
    Release,
    /// Wants no answer.
    Silent,
    Unknown,
}

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    pub unique: u64,
    pub node: u64,
    pub ask: Ask,
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(four.try_into().ok()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    let eight = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_ne_bytes(eight.try_into().ok()?))
}

impl Request {
    /// Reads one request. `None`: not one.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (opcode, unique, node) = (word(bytes, 4)?, long(bytes, 8)?, long(bytes, 16)?);
        let body = bytes.get(IN_HEADER..)?;
        let ask = match opcode {
            1 => Ask::Lookup { name: name(body)? },
            2 => Ask::Forget { count: long(body, 0)? },
            3 => Ask::Attributes,
            14 => Ask::Open,
            15 => Ask::Read { offset: long(body, 8)?, size: word(body, 16)? },
            17 => Ask::FileSystem,
            18 => Ask::Release,
            26 => Ask::Init { major: word(body, 0)?, flags: word(body, 12)? },
            // Interrupt, destroy: each request is answered at once, there is nothing to cut short.
            36 | 38 => Ask::Silent,
            42 => {
                let count = word(body, 0)? as usize;
                let nodes = body.get(8..)?.chunks_exact(16).take(count);
                Ask::BatchForget {
                    nodes: nodes.filter_map(|one| Some((long(one, 0)?, long(one, 8)?))).collect(),
                }
            }
            44 => Ask::List { offset: long(body, 8)?, size: word(body, 16)? },
            _ => Ask::Unknown,
        };
        Some(Self { unique, node, ask })
    }
}

fn name(body: &[u8]) -> Option<String> {
    let end = body.iter().position(|&byte| byte == 0)?;
    String::from_utf8(body[..end].to_vec()).ok()
}

/// A node as an answer tells of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Node {
    pub id: u64,
    pub folder: bool,
    /// Modification time, seconds.
    pub time: u64,
}

impl Node {
    fn attributes(self, out: &mut Vec<u8>) {
        let (mode, links) = if self.folder { (0o040_555, 2) } else { (0o100_444, 1) };
        // Inode, size, blocks, three times.
        for value in [self.id, 0, 0, self.time, self.time, self.time] {
            out.extend(value.to_ne_bytes());
        }
        // Three times' fractions, mode, links, owner, group, device, block size, flags.
        for value in [0u32, 0, 0, mode, links, 0, 0, 0, 4096, 0] {
            out.extend(value.to_ne_bytes());
        }
    }

    fn entry(self, out: &mut Vec<u8>) {
        // Node, generation, seconds that the name is kept, seconds that the attributes are.
        for value in [self.id, 0, 0, u64::from(u32::MAX)] {
            out.extend(value.to_ne_bytes());
        }
        for nanoseconds in [KEEP_NAMES_NS, 0] {
            out.extend(nanoseconds.to_ne_bytes());
        }
        self.attributes(out);
    }
}

/// How long names are kept: longer than a launch mostly needs them, and short, since the kernel drops
/// the node with the last mount only when its name has run out.
const KEEP_NAMES_NS: u32 = 100_000_000;

/// An answer's body.
pub(super) struct Answer(Vec<u8>);

impl Answer {
    /// To the first request. The kernel's minor version is above ours in every supported kernel.
    pub(super) fn init(flags: u32) -> Self {
        let mut out = Vec::with_capacity(64);
        for value in [7, MINOR, 0, flags & (DO_READDIRPLUS | NO_OPENDIR)] {
            out.extend(u32::to_ne_bytes(value));
        }
        // Background requests and their congestion threshold.
        for value in [16u16, 12] {
            out.extend(value.to_ne_bytes());
        }
        // Largest write, time granularity.
        for value in [4096u32, 1] {
            out.extend(value.to_ne_bytes());
        }
        out.resize(64, 0);
        Self(out)
    }

    pub(super) fn empty() -> Self {
        Self(Vec::new())
    }

    pub(super) fn entry(node: Node) -> Self {
        let mut out = Vec::with_capacity(128);
        node.entry(&mut out);
        Self(out)
    }

    pub(super) fn attributes(node: Node) -> Self {
        let mut out = Vec::with_capacity(104);
        out.extend(u64::from(u32::MAX).to_ne_bytes());
        out.extend([0; 8]);
        node.attributes(&mut out);
        Self(out)
    }

    /// Files are read past the page cache: their size is not known before.
    pub(super) fn opened() -> Self {
        let mut out = vec![0; 8];
        out.extend(DIRECT_IO.to_ne_bytes());
        out.extend([0; 4]);
        Self(out)
    }

    /// Part of a file.
    pub(super) fn data(text: &[u8], offset: u64, size: u32) -> Self {
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
        let until = from.saturating_add(size as usize).min(text.len());
        Self(text[from..until].to_vec())
    }

    /// Names of a folder with their nodes, from number `offset` on. Answers how many there are.
    pub(super) fn list(names: &[(&str, Node)], offset: u64, size: u32) -> (Self, u64) {
        let (mut out, mut told) = (Vec::new(), 0);
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, (name, node)) in names.iter().enumerate().skip(from) {
            let length = 128 + 24 + name.len().next_multiple_of(8);
            if out.len() + length > size as usize {
                break;
            }
            node.entry(&mut out);
            out.extend(node.id.to_ne_bytes());
            out.extend((index as u64 + 1).to_ne_bytes());
            out.extend((name.len() as u32).to_ne_bytes());
            // Type of the entry: a regular file.
            out.extend(8u32.to_ne_bytes());
            out.extend(name.as_bytes());
            out.resize(out.len().next_multiple_of(8), 0);
            told += 1;
        }
        (Self(out), told)
    }

    /// Sizes of the file system: none, as of every file system without a disk.
    pub(super) fn file_system() -> Self {
        let mut out = vec![0; 80];
        out[40..44].copy_from_slice(&4096u32.to_ne_bytes());
        out[44..48].copy_from_slice(&255u32.to_ne_bytes());
        out[48..52].copy_from_slice(&4096u32.to_ne_bytes());
        Self(out)
    }

    /// The whole answer.
    pub(super) fn frame(unique: u64, result: Result<Self, i32>) -> Vec<u8> {
        let (error, body) = match result {
            Ok(Self(body)) => (0, body),
            Err(errno) => (-errno, Vec::new()),
        };
        let mut out = Vec::with_capacity(16 + body.len());
        out.extend((16 + body.len() as u32).to_ne_bytes());
        out.extend(error.to_ne_bytes());
        out.extend(unique.to_ne_bytes());
        out.extend(body);
        out
    }
}

/// Whether the file system is gone: nobody can ask again.
pub(super) fn over(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENODEV)
}

/// Whether only one request failed: it was given up by who asked.
pub(super) fn passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR | libc::EAGAIN))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: Node = Node { id: 0x101, folder: false, time: 7 };

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = Request::parse(&bytes);
        }

        #[test]
        fn no_opcode_makes_it_panic(opcode: u32, body in proptest::collection::vec(0u8.., 0..200)) {
            let mut bytes = vec![0; IN_HEADER];
            bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
            bytes.extend(body);
            let _ = Request::parse(&bytes);
        }

        #[test]
        fn any_part_of_a_text(offset: u64, size: u32) {
            let Answer(part) = Answer::data(b"some text", offset, size);
            proptest::prop_assert!(part.len() <= 9 && part.len() <= size as usize);
        }
    }

    #[test]
    fn sizes_are_the_kernels() {
        assert_eq!(Answer::init(u32::MAX).0.len(), 64);
        assert_eq!(Answer::entry(NODE).0.len(), 128);
        assert_eq!(Answer::attributes(NODE).0.len(), 104);
        assert_eq!(Answer::opened().0.len(), 16);
        assert_eq!(Answer::file_system().0.len(), 80);
    }

    #[test]
    fn a_list_comes_in_parts() {
        let names = [("meminfo", NODE), ("stat", NODE), ("uptime", NODE)];
        let (all, told) = Answer::list(&names, 0, 4096);
        assert_eq!((all.0.len(), told), (3 * 160, 3));
        let (first, told) = Answer::list(&names, 0, 200);
        assert_eq!((first.0.len(), told), (160, 1));
        assert_eq!(Answer::list(&names, 3, 4096).1, 0);
        assert_eq!(Answer::list(&names, u64::MAX, 4096).1, 0);
    }
}
