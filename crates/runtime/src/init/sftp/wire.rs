//! Packets of SFTP version 3: reading what a client sent, writing what it gets.
//!
//! Pure: bytes in, values out. Invariant: nothing that a client sends is believed; a packet is read whole or is
//! malformed, and no count or length in it makes anything larger than the packet itself. Names are bytes, as the
//! kernel has them. Called by the server in `mod.rs`.

/// Longest packet that is read, without its length: as OpenSSH's.
pub(super) const MAX_PACKET: usize = 256 << 10;
/// Most bytes of one read or write: what fits into a packet beside its head.
pub(super) const MAX_DATA: usize = MAX_PACKET - 1024;
/// The version that is spoken.
pub(super) const VERSION: u32 = 3;

/// Wants to read.
pub(super) const READ: u32 = 1;
/// Wants to write.
pub(super) const WRITE: u32 = 2;
/// Every write goes to the end.
pub(super) const APPEND: u32 = 4;
/// Made when missing.
pub(super) const CREAT: u32 = 8;
/// Emptied.
pub(super) const TRUNC: u32 = 16;
/// An error when it is there.
pub(super) const EXCL: u32 = 32;

const HAS_SIZE: u32 = 1;
const HAS_OWNER: u32 = 2;
const HAS_MODE: u32 = 4;
const HAS_TIMES: u32 = 8;
const HAS_EXTENDED: u32 = 1 << 31;

/// Codes of a status packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Code {
    Ok = 0,
    Eof = 1,
    NoSuchFile = 2,
    PermissionDenied = 3,
    Failure = 4,
    BadMessage = 5,
    Unsupported = 8,
}

/// What a client says or is told of a file. Absent: not said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Attrs {
    pub size: Option<u64>,
    /// User and group.
    pub owner: Option<(u32, u32)>,
    /// Type and permissions.
    pub mode: Option<u32>,
    /// Access and change of the content, seconds.
    pub times: Option<(u32, u32)>,
}

/// The packet is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed;

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ask<'a> {
    Open {
        path: &'a [u8],
        flags: u32,
        attrs: Attrs,
    },
    Close {
        handle: &'a [u8],
    },
    Read {
        handle: &'a [u8],
        offset: u64,
        length: u32,
    },
    Write {
        handle: &'a [u8],
        offset: u64,
        data: &'a [u8],
    },
    Lstat {
        path: &'a [u8],
    },
    Fstat {
        handle: &'a [u8],
    },
    Setstat {
        path: &'a [u8],
        attrs: Attrs,
    },
    Fsetstat {
        handle: &'a [u8],
        attrs: Attrs,
    },
    Opendir {
        path: &'a [u8],
    },
    Readdir {
        handle: &'a [u8],
    },
    Remove {
        path: &'a [u8],
    },
    Mkdir {
        path: &'a [u8],
        attrs: Attrs,
    },
    Rmdir {
        path: &'a [u8],
    },
    Realpath {
        path: &'a [u8],
    },
    Stat {
        path: &'a [u8],
    },
    Rename {
        from: &'a [u8],
        to: &'a [u8],
    },
    Readlink {
        path: &'a [u8],
    },
    /// In the order in which OpenSSH sends them, whatever the draft says.
    Symlink {
        target: &'a [u8],
        link: &'a [u8],
    },
    Extended(Extended<'a>),
    /// A kind of packet, or of extension, that is not known.
    Unknown,
}

/// What OpenSSH added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Extended<'a> {
    PosixRename { from: &'a [u8], to: &'a [u8] },
    Hardlink { from: &'a [u8], to: &'a [u8] },
    Fsync { handle: &'a [u8] },
    Statvfs { path: &'a [u8] },
    Fstatvfs { handle: &'a [u8] },
    Lsetstat { path: &'a [u8], attrs: Attrs },
    ExpandPath { path: &'a [u8] },
    Limits,
}

/// What the server says that it can besides.
pub(super) const EXTENSIONS: [(&str, &str); 8] = [
    ("posix-rename@openssh.com", "1"),
    ("statvfs@openssh.com", "2"),
    ("fstatvfs@openssh.com", "2"),
    ("hardlink@openssh.com", "1"),
    ("fsync@openssh.com", "1"),
    ("lsetstat@openssh.com", "1"),
    ("limits@openssh.com", "1"),
    ("expand-path@openssh.com", "1"),
];

/// A packet of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Packet<'a> {
    /// The first: its version.
    Init(u32),
    /// Every other: its number and what it asks.
    Request(u32, Result<Ask<'a>, Malformed>),
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(n).ok_or(Malformed)?;
        self.0 = rest;
        Ok(head)
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        let bytes = self.take(4)?.try_into().map_err(|_| Malformed)?;
        Ok(u32::from_be_bytes(bytes))
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        let bytes = self.take(8)?.try_into().map_err(|_| Malformed)?;
        Ok(u64::from_be_bytes(bytes))
    }

    fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let length = self.u32()? as usize;
        self.take(length)
    }

    fn attrs(&mut self) -> Result<Attrs, Malformed> {
        let flags = self.u32()?;
        let mut attrs = Attrs::default();
        if flags & HAS_SIZE != 0 {
            attrs.size = Some(self.u64()?);
        }
        if flags & HAS_OWNER != 0 {
            attrs.owner = Some((self.u32()?, self.u32()?));
        }
        if flags & HAS_MODE != 0 {
            attrs.mode = Some(self.u32()?);
        }
        if flags & HAS_TIMES != 0 {
            attrs.times = Some((self.u32()?, self.u32()?));
        }
        if flags & HAS_EXTENDED != 0 {
            // Each takes eight bytes at least, so a large count ends at the packet's end.
            for _ in 0..self.u32()? {
                self.string()?;
                self.string()?;
            }
        }
        Ok(attrs)
    }
}

/// Reads a packet, without its length.
///
/// # Errors
/// One that has not even a number to answer to.
pub(super) fn read(bytes: &[u8]) -> Result<Packet<'_>, Malformed> {
    let mut reader = Reader(bytes);
    let kind = reader.byte()?;
    let number = reader.u32()?;
    if kind == 1 {
        return Ok(Packet::Init(number));
    }
    Ok(Packet::Request(number, ask(kind, &mut reader)))
}

fn ask<'a>(kind: u8, r: &mut Reader<'a>) -> Result<Ask<'a>, Malformed> {
    Ok(match kind {
        3 => Ask::Open { path: r.string()?, flags: r.u32()?, attrs: r.attrs()? },
        4 => Ask::Close { handle: r.string()? },
        5 => Ask::Read { handle: r.string()?, offset: r.u64()?, length: r.u32()? },
        6 => Ask::Write { handle: r.string()?, offset: r.u64()?, data: r.string()? },
        7 => Ask::Lstat { path: r.string()? },
        8 => Ask::Fstat { handle: r.string()? },
        9 => Ask::Setstat { path: r.string()?, attrs: r.attrs()? },
        10 => Ask::Fsetstat { handle: r.string()?, attrs: r.attrs()? },
        11 => Ask::Opendir { path: r.string()? },
        12 => Ask::Readdir { handle: r.string()? },
        13 => Ask::Remove { path: r.string()? },
        14 => Ask::Mkdir { path: r.string()?, attrs: r.attrs()? },
        15 => Ask::Rmdir { path: r.string()? },
        16 => Ask::Realpath { path: r.string()? },
        17 => Ask::Stat { path: r.string()? },
        18 => Ask::Rename { from: r.string()?, to: r.string()? },
        19 => Ask::Readlink { path: r.string()? },
        20 => Ask::Symlink { target: r.string()?, link: r.string()? },
        200 => extended(r)?,
        _ => Ask::Unknown,
    })
}

fn extended<'a>(r: &mut Reader<'a>) -> Result<Ask<'a>, Malformed> {
    Ok(Ask::Extended(match r.string()? {
        b"posix-rename@openssh.com" => Extended::PosixRename { from: r.string()?, to: r.string()? },
        b"hardlink@openssh.com" => Extended::Hardlink { from: r.string()?, to: r.string()? },
        b"fsync@openssh.com" => Extended::Fsync { handle: r.string()? },
        b"statvfs@openssh.com" => Extended::Statvfs { path: r.string()? },
        b"fstatvfs@openssh.com" => Extended::Fstatvfs { handle: r.string()? },
        b"lsetstat@openssh.com" => Extended::Lsetstat { path: r.string()?, attrs: r.attrs()? },
        b"expand-path@openssh.com" => Extended::ExpandPath { path: r.string()? },
        b"limits@openssh.com" => Extended::Limits,
        _ => return Ok(Ask::Unknown),
    }))
}

/// A packet for a client, with room for its length in front.
#[derive(Debug)]
pub(super) struct Reply(Vec<u8>);

impl Reply {
    fn new(kind: u8) -> Self {
        Self(vec![0, 0, 0, 0, kind])
    }

    fn answer(kind: u8, id: u32) -> Self {
        let mut reply = Self::new(kind);
        reply.u32(id);
        reply
    }

    /// The answer to the first packet.
    pub(super) fn version() -> Self {
        let mut reply = Self::answer(2, VERSION);
        for (name, version) in EXTENSIONS {
            reply.string(name.as_bytes());
            reply.string(version.as_bytes());
        }
        reply
    }

    pub(super) fn status(id: u32, code: Code, text: &str) -> Self {
        let mut reply = Self::answer(101, id);
        reply.u32(code as u32);
        reply.string(text.as_bytes());
        reply.string(b"");
        reply
    }

    pub(super) fn handle(id: u32, handle: &[u8]) -> Self {
        let mut reply = Self::answer(102, id);
        reply.string(handle);
        reply
    }

    /// A packet of data, to be filled by [`Self::room`].
    pub(super) fn data(id: u32) -> Self {
        let mut reply = Self::answer(103, id);
        reply.u32(0);
        reply
    }

    /// Lets `fill` write up to `length` bytes of a data packet.
    pub(super) fn room<E>(
        &mut self,
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<usize, E> {
        let start = self.0.len();
        self.0.resize(start + length, 0);
        let got = fill(&mut self.0[start..])?.min(length);
        self.0.truncate(start + got);
        let told = u32::try_from(got).unwrap_or(u32::MAX).to_be_bytes();
        self.0[start - 4..start].copy_from_slice(&told);
        Ok(got)
    }

    pub(super) fn attrs(id: u32, attrs: &Attrs) -> Self {
        let mut reply = Self::answer(105, id);
        reply.put_attrs(attrs);
        reply
    }

    /// A list of names, to be filled by [`Self::name`].
    pub(super) fn names(id: u32) -> Self {
        let mut reply = Self::answer(104, id);
        reply.u32(0);
        reply
    }

    /// One more name; `long` is a line as `ls -l` writes it.
    pub(super) fn name(&mut self, name: &[u8], long: &[u8], attrs: &Attrs) {
        let count = u32::from_be_bytes([self.0[9], self.0[10], self.0[11], self.0[12]]) + 1;
        self.0[9..13].copy_from_slice(&count.to_be_bytes());
        self.string(name);
        self.string(long);
        self.put_attrs(attrs);
    }

    /// The answer to an extension.
    pub(super) fn extended(id: u32, numbers: &[u64]) -> Self {
        let mut reply = Self::answer(201, id);
        for number in numbers {
            reply.0.extend(number.to_be_bytes());
        }
        reply
    }

    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_be_bytes());
    }

    fn string(&mut self, bytes: &[u8]) {
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.0.extend(bytes);
    }

    fn put_attrs(&mut self, attrs: &Attrs) {
        let flag = |said: bool, flag: u32| if said { flag } else { 0 };
        self.u32(
            flag(attrs.size.is_some(), HAS_SIZE)
                | flag(attrs.owner.is_some(), HAS_OWNER)
                | flag(attrs.mode.is_some(), HAS_MODE)
                | flag(attrs.times.is_some(), HAS_TIMES),
        );
        if let Some(size) = attrs.size {
            self.0.extend(size.to_be_bytes());
        }
        if let Some((user, group)) = attrs.owner {
            self.u32(user);
            self.u32(group);
        }
        if let Some(mode) = attrs.mode {
            self.u32(mode);
        }
        if let Some((access, change)) = attrs.times {
            self.u32(access);
            self.u32(change);
        }
    }

    /// How long it is by now.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The bytes to send.
    pub(super) fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len() - 4).unwrap_or(u32::MAX);
        self.0[..4].copy_from_slice(&length.to_be_bytes());
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(out: &mut Vec<u8>, bytes: &[u8]) {
        out.extend((bytes.len() as u32).to_be_bytes());
        out.extend(bytes);
    }

    #[test]
    fn a_request_reads_back() {
        let mut bytes = vec![3, 0, 0, 0, 7];
        text(&mut bytes, b"a\xffb");
        bytes.extend((WRITE | CREAT).to_be_bytes());
        bytes.extend(HAS_MODE.to_be_bytes());
        bytes.extend(0o640u32.to_be_bytes());
        let attrs = Attrs { mode: Some(0o640), ..Attrs::default() };
        let open = Ask::Open { path: b"a\xffb", flags: WRITE | CREAT, attrs };
        assert_eq!(read(&bytes), Ok(Packet::Request(7, Ok(open))));
        for end in 5..bytes.len() {
            assert_eq!(read(&bytes[..end]), Ok(Packet::Request(7, Err(Malformed))), "{end}");
        }
        assert_eq!(read(&bytes[..4]), Err(Malformed));
    }

    #[test]
    fn counts_and_lengths_are_not_believed() {
        let mut bytes = vec![9, 0, 0, 0, 1];
        text(&mut bytes, b"x");
        bytes.extend(HAS_EXTENDED.to_be_bytes());
        bytes.extend(u32::MAX.to_be_bytes());
        assert_eq!(read(&bytes), Ok(Packet::Request(1, Err(Malformed))));
        let mut bytes = vec![7, 0, 0, 0, 1];
        bytes.extend(u32::MAX.to_be_bytes());
        bytes.extend(b"short");
        assert_eq!(read(&bytes), Ok(Packet::Request(1, Err(Malformed))));
    }

    #[test]
    fn replies_have_their_length_in_front() {
        let mut reply = Reply::data(5);
        assert_eq!(reply.room::<()>(8, |room| Ok(room.len() - 3)), Ok(5));
        let bytes = reply.finish();
        assert_eq!(bytes[..4], ((bytes.len() - 4) as u32).to_be_bytes());
        assert_eq!(bytes[9..13], 5u32.to_be_bytes());
        assert_eq!(bytes.len(), 13 + 5);
        let mut names = Reply::names(1);
        names.name(b"a", b"a", &Attrs::default());
        names.name(b"b", b"b", &Attrs { size: Some(1), ..Attrs::default() });
        assert_eq!(names.finish()[9..13], 2u32.to_be_bytes());
    }

    proptest::proptest! {
        #[test]
        fn no_packet_upsets_the_reader(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
            let _ = read(&bytes);
            for kind in (3..=20).chain([200]) {
                let mut packet = vec![kind, 0, 0, 0, 1];
                packet.extend(&bytes);
                let read = read(&packet);
                let is_request = matches!(read, Ok(Packet::Request(1, _)));
                proptest::prop_assert!(is_request);
            }
        }
    }
}
