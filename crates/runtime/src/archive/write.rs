//! The writer of tar streams: entries that every tar reads, the same bytes for the same entries.
//!
//! Invariant: what [`super::read`] reads of it is what was written. Sparse files are in the format of GNU tar
//! 1.0, all that a header has no room for is in extended headers.

use std::io::{self, Write};

use tar::{EntryType, Header};

use super::pax::{OPAQUE, Piece, XATTR};
use super::read::{Entry, Kind};

const BLOCK: u64 = 512;
/// Room for a name in a header.
const NAME: usize = 100;
/// From here on a number does not fit into seven octal digits.
const OCTAL_ID: u64 = 1 << 21;
/// From here on a size does not fit into eleven.
const OCTAL_SIZE: u64 = 1 << 33;

/// Writes entries, one after the other.
pub(crate) struct Writer<W> {
    out: W,
    /// Bytes of the present entry that are still to come.
    left: u64,
    padding: u64,
    entries: u64,
}

/// Records of an extended header.
#[derive(Default)]
struct Records(Vec<u8>);

impl Records {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        // The length counts its own digits.
        while length != rest + digits(length) {
            length = rest + digits(length);
        }
        self.0.extend_from_slice(length.to_string().as_bytes());
        self.0.push(b' ');
        self.0.extend_from_slice(key);
        self.0.push(b'=');
        self.0.extend_from_slice(value);
        self.0.push(b'\n');
    }
}

fn digits(number: usize) -> usize {
    number.to_string().len()
}

fn padding(size: u64) -> u64 {
    (BLOCK - size % BLOCK) % BLOCK
}

/// The map of a sparse file, in whole blocks.
fn map(pieces: &[Piece]) -> Vec<u8> {
    let mut out = format!("{}\n", pieces.len()).into_bytes();
    for piece in pieces {
        out.extend_from_slice(format!("{}\n{}\n", piece.at, piece.length).as_bytes());
    }
    let whole = out.len().next_multiple_of(BLOCK as usize);
    out.resize(whole, 0);
    out
}

impl<W: Write> Writer<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, left: 0, padding: 0, entries: 0 }
    }

    /// Entries so far.
    pub(crate) fn entries(&self) -> u64 {
        self.entries
    }

    /// Where it writes.
    pub(crate) fn get_mut(&mut self) -> &mut W {
        &mut self.out
    }

    /// Begins an entry; the content of a file follows by [`Writer::content`], of a sparse one its pieces.
    ///
    /// # Errors
    /// As the output's.
    pub(crate) fn entry(&mut self, entry: &Entry) -> io::Result<()> {
        self.finish_entry()?;
        self.entries += 1;
        let mut header = Header::new_ustar();
        let mut records = Records::default();
        let mut name = entry.name.bytes().to_vec();
        let mut front = Vec::new();
        let (kind, size) = match &entry.kind {
            Kind::File { size, pieces: None } => (EntryType::Regular, *size),
            Kind::File { size, pieces: Some(pieces) } => {
                front = map(pieces);
                records.add(b"GNU.sparse.major", b"1");
                records.add(b"GNU.sparse.minor", b"0");
                records.add(b"GNU.sparse.name", &name);
                records.add(b"GNU.sparse.realsize", size.to_string().as_bytes());
                // What a tar that knows nothing of them calls what it makes of it.
                let stem: Vec<u8> = name.rsplit(|b| *b == b'/').next().unwrap_or(b"").to_vec();
                name = [b"GNUSparseFile.0/", &stem[..stem.len().min(80)]].concat();
                let stored: u64 = pieces.iter().map(|piece| piece.length).sum();
                (EntryType::Regular, stored + front.len() as u64)
            }
            Kind::Folder => {
                // The root is called so by every tar.
                name.extend_from_slice(if name.is_empty() { b"./" } else { b"/" });
                (EntryType::Directory, 0)
            }
            Kind::Symlink(target) => {
                link(&mut header, &mut records, target);
                (EntryType::Symlink, 0)
            }
            Kind::Hard(target) => {
                link(&mut header, &mut records, target.bytes());
                (EntryType::Link, 0)
            }
            Kind::Fifo => (EntryType::Fifo, 0),
            Kind::Char(major, minor) => {
                header.set_device_major(*major)?;
                header.set_device_minor(*minor)?;
                (EntryType::Char, 0)
            }
            Kind::Block => return Err(io::Error::other("block devices are not written")),
        };
        header.set_entry_type(kind);
        header.set_mode(entry.mode);
        if name.len() > NAME {
            records.add(b"path", &name);
            name.truncate(NAME);
        }
        header.as_old_mut().name[..name.len()].copy_from_slice(&name);
        numbers(entry, size, &mut header, &mut records);
        for (name, value) in &entry.xattrs {
            records.add(&[XATTR, name].concat(), value);
        }
        if entry.opaque {
            records.add(OPAQUE.as_bytes(), b"1");
        }
        self.extension(&records)?;
        header.set_cksum();
        self.out.write_all(header.as_bytes())?;
        self.out.write_all(&front)?;
        self.left = size - front.len() as u64;
        self.padding = padding(size);
        Ok(())
    }

    fn extension(&mut self, records: &Records) -> io::Result<()> {
        let size = records.0.len() as u64;
        if size == 0 {
            return Ok(());
        }
        let mut header = Header::new_ustar();
        let name = b"././@PaxHeader";
        header.as_old_mut().name[..name.len()].copy_from_slice(name);
        header.set_entry_type(EntryType::XHeader);
        for set in [Header::set_uid, Header::set_gid, Header::set_mtime] {
            set(&mut header, 0);
        }
        header.set_mode(0o644);
        header.set_size(size);
        header.set_cksum();
        self.out.write_all(header.as_bytes())?;
        self.out.write_all(&records.0)?;
        self.pad(padding(size))
    }

    fn pad(&mut self, bytes: u64) -> io::Result<()> {
        let zeros = [0u8; BLOCK as usize];
        self.out.write_all(&zeros[..bytes as usize])
    }

    /// Writes content of the present entry.
    ///
    /// # Errors
    /// As the output's, and when it is more than the entry said.
    pub(crate) fn content(&mut self, bytes: &[u8]) -> io::Result<()> {
        let left = self.left.checked_sub(bytes.len() as u64);
        self.left = left.ok_or_else(|| io::Error::other("more content than was announced"))?;
        self.out.write_all(bytes)
    }

    /// Ends the present entry.
    ///
    /// # Errors
    /// As the output's, and when content is missing.
    pub(crate) fn finish_entry(&mut self) -> io::Result<()> {
        if self.left > 0 {
            return Err(io::Error::other("less content than was announced"));
        }
        let padding = std::mem::take(&mut self.padding);
        self.pad(padding)
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// As the output's.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.finish_entry()?;
        self.pad(BLOCK)?;
        self.pad(BLOCK)?;
        Ok(self.out)
    }
}

fn link(header: &mut Header, records: &mut Records, target: &[u8]) {
    if target.len() > NAME {
        records.add(b"linkpath", target);
    }
    let short = &target[..target.len().min(NAME)];
    header.as_old_mut().linkname[..short.len()].copy_from_slice(short);
}

/// Owner, size and time, in the header or, where it has no room for them, in a record.
fn numbers(entry: &Entry, size: u64, header: &mut Header, records: &mut Records) {
    let mut number = |value: u64, most: u64, key: &[u8], set: fn(&mut Header, u64)| {
        let fits = value < most;
        if !fits {
            records.add(key, value.to_string().as_bytes());
        }
        set(header, if fits { value } else { 0 });
    };
    number(entry.uid, OCTAL_ID, b"uid", Header::set_uid);
    number(entry.gid, OCTAL_ID, b"gid", Header::set_gid);
    number(size, OCTAL_SIZE, b"size", Header::set_size);
    let time = entry.mtime;
    let whole = u64::try_from(time.seconds).ok().filter(|s| *s < OCTAL_SIZE);
    header.set_mtime(whole.unwrap_or(0));
    if whole.is_none() || time.nanos != 0 {
        // The fraction counts upwards; the text's sign holds for the whole of it.
        let total = i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos);
        let (sign, total) = (if total < 0 { "-" } else { "" }, total.unsigned_abs());
        let text = format!("{sign}{}.{:09}", total / 1_000_000_000, total % 1_000_000_000);
        records.add(b"mtime", text.as_bytes());
    }
}
