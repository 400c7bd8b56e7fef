//! The reader: entries of a tar stream, each with everything that is said of it.
//!
//! Takes headers apart with the `tar` crate and does the rest itself: that crate's iterator ends a record
//! of an extended header at a line feed, and obeys a size that it cannot be asked about. Invariant: memory
//! is bounded, every byte that is read was counted against the limits before, and names are plain: relative,
//! without `.`, `..`, empty parts and zero bytes.

use std::io::{self, Read};

use tar::{EntryType, GnuExtSparseHeader, Header};

use super::pax::{self, Pax, Piece, SparseKind, Time, Xattrs};
use super::{ArchiveError, Limits, refused};

/// Size of everything in a tar.
const BLOCK: usize = 512;
/// Most bytes of an extended header. The kernel gives a file no more than 64 KiB of attributes.
const MAX_EXTENSION: u64 = 1 << 20;
/// Longest target of a symlink (PATH_MAX, without the zero).
const MAX_TARGET: usize = 4095;
/// From here on a size does not fit into a header's octal digits.
const OCTAL: u64 = 1 << 33;
/// What may stand behind the end: padding of whole records.
const MAX_PADDING: u64 = 64 << 20;

/// A checked name: parts joined by `/`. Empty is the root itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name(Vec<u8>);

impl Name {
    /// A name of ours, as it is.
    pub(crate) fn trusted(raw: Vec<u8>) -> Self {
        Self(raw)
    }

    /// Checks a name.
    pub(crate) fn new(raw: &[u8], limits: &Limits) -> Result<Self, ArchiveError> {
        if raw.contains(&0) {
            return Err(refused(raw, "has a zero byte in its name"));
        }
        if raw.len() > limits.path {
            return Err(refused(raw, format!("has a name of more than {} bytes", limits.path)));
        }
        let mut out = Vec::with_capacity(raw.len());
        let mut depth = 0;
        for part in raw.split(|b| *b == b'/') {
            match part {
                b"" | b"." => {}
                b".." => return Err(refused(raw, "has '..' in its name")),
                part if part.len() > 255 => {
                    return Err(refused(raw, "has a part of more than 255 bytes in its name"));
                }
                part => {
                    depth += 1;
                    if !out.is_empty() {
                        out.push(b'/');
                    }
                    out.extend_from_slice(part);
                }
            }
        }
        if depth > limits.depth {
            return Err(refused(raw, format!("is below more than {} folders", limits.depth)));
        }
        Ok(Self(out))
    }

    /// The whole.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Its parts.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|b| *b == b'/').filter(|part| !part.is_empty())
    }

    /// Parent and last part; nothing of the root.
    pub(crate) fn split(&self) -> Option<(&[u8], &[u8])> {
        if self.0.is_empty() {
            return None;
        }
        Some(match self.0.iter().rposition(|b| *b == b'/') {
            Some(at) => (&self.0[..at], &self.0[at + 1..]),
            None => (&[], &self.0),
        })
    }
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// With its size, and the pieces that hold data if it is sparse.
    File {
        size: u64,
        pieces: Option<Vec<Piece>>,
    },
    Folder,
    /// Its text.
    Symlink(Vec<u8>),
    /// Another name of an earlier entry.
    Hard(Name),
    Fifo,
    /// Major and minor number.
    Char(u32, u32),
    Block,
}

/// An entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: Name,
    pub(crate) kind: Kind,
    /// Permissions and set-id bits.
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    pub(crate) mtime: Time,
    pub(crate) xattrs: Xattrs,
    /// Extended attributes that were left out.
    pub(crate) dropped: u64,
    /// See [`pax::OPAQUE`].
    pub(crate) opaque: bool,
}

/// Extensions that came before an entry's own header.
#[derive(Debug, Default)]
struct Before {
    pax: Option<Pax>,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
}

impl Before {
    fn is_empty(&self) -> bool {
        self.pax.is_none() && self.long_name.is_none() && self.long_link.is_none()
    }
}

/// See the module.
pub(crate) struct Reader<R> {
    input: R,
    limits: Limits,
    /// Bytes and entries that were counted.
    bytes: u64,
    entries: u64,
    /// Bytes of the present entry that are not read yet, and of what fills its last block.
    left: u64,
    padding: u64,
    /// Off in fuzzing: nobody guesses a sum.
    sums: bool,
    ended: bool,
    hash: Option<Box<Hash>>,
}

/// Hashes of what was read: up to here, and up to the headers of the present entry.
struct Hash {
    here: blake3::Hasher,
    before: blake3::Hasher,
}

impl<R: Read> Reader<R> {
    /// Reads an uncompressed tar.
    pub(crate) fn new(input: R, limits: Limits) -> Self {
        Self {
            input,
            limits,
            bytes: 0,
            entries: 0,
            left: 0,
            padding: 0,
            sums: true,
            ended: false,
            hash: None,
        }
    }

    /// As [`Reader::new`], with [`Reader::hash_before`].
    pub(crate) fn hashing(input: R, limits: Limits) -> Self {
        let hash = Hash { here: blake3::Hasher::new(), before: blake3::Hasher::new() };
        Self { hash: Some(Box::new(hash)), ..Self::new(input, limits) }
    }

    /// Hash of everything in front of the present entry.
    pub(crate) fn hash_before(&self) -> Option<blake3::Hash> {
        self.hash.as_ref().map(|hash| hash.before.finalize())
    }

    /// Reads of the input what counts.
    fn take(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.input.read(buffer) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(count) => {
                    if let Some(hash) = &mut self.hash {
                        hash.here.update(&buffer[..count]);
                    }
                    return Ok(count);
                }
                failed => return failed,
            }
        }
    }

    /// Bytes and entries that this reader has counted.
    pub(crate) fn counted(&self) -> (u64, u64) {
        (self.bytes, self.entries)
    }

    /// The next entry; the rest of the present one is passed over.
    ///
    /// # Errors
    /// Every one is the end: what comes behind it cannot be trusted.
    pub(crate) fn next(&mut self) -> Result<Option<Entry>, ArchiveError> {
        let entry = self.next_entry();
        self.ended |= !matches!(entry, Ok(Some(_)));
        entry
    }

    fn next_entry(&mut self) -> Result<Option<Entry>, ArchiveError> {
        if self.ended {
            return Ok(None);
        }
        let mut scratch = [0u8; 8192];
        while self.body(&mut scratch)? > 0 {}
        if let Some(hash) = &mut self.hash {
            hash.before.clone_from(&hash.here);
        }
        let mut before = Before::default();
        loop {
            let Some(block) = self.block(before.is_empty())? else { return Ok(None) };
            let header = Header::from_byte_slice(&block);
            self.entries += 1;
            if self.entries > self.limits.entries {
                let text = format!("more than {} entries", self.limits.entries);
                return Err(ArchiveError::TooLarge(text));
            }
            self.check_sum(header)?;
            if !self.extension(header, &mut before)? {
                return self.entry(header, before).map(Some);
            }
        }
    }

    /// Reads bytes of the present entry's data as they are stored; 0 at its end.
    ///
    /// # Errors
    /// As the input, also when it ends too early.
    pub(crate) fn body(&mut self, buffer: &mut [u8]) -> Result<usize, ArchiveError> {
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        if most == 0 {
            let padding = usize::try_from(std::mem::take(&mut self.padding)).unwrap_or(0);
            let mut rest = [0u8; BLOCK];
            self.fill(&mut rest[..padding])?;
            return Ok(0);
        }
        match self.take(&mut buffer[..most]).map_err(ArchiveError::Read)? {
            0 => Err(ArchiveError::Read(cut_off())),
            count => {
                self.left -= count as u64;
                Ok(count)
            }
        }
    }

    fn fill(&mut self, mut buffer: &mut [u8]) -> Result<(), ArchiveError> {
        while !buffer.is_empty() {
            match self.take(buffer).map_err(ArchiveError::Read)? {
                0 => return Err(ArchiveError::Read(cut_off())),
                count => buffer = &mut buffer[count..],
            }
        }
        Ok(())
    }

    /// Counts bytes before they are read.
    fn charge(&mut self, bytes: u64) -> Result<(), ArchiveError> {
        match self.bytes.checked_add(bytes).filter(|sum| *sum <= self.limits.bytes) {
            Some(sum) => {
                self.bytes = sum;
                Ok(())
            }
            None => {
                let text = format!("more than {} bytes", self.limits.bytes);
                Err(ArchiveError::TooLarge(text))
            }
        }
    }

    /// Charges what an entry holds and makes it what [`Reader::body`] reads.
    fn open_body(&mut self, size: u64) -> Result<(), ArchiveError> {
        let padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
        self.charge(size.saturating_add(padding))?;
        (self.left, self.padding) = (size, padding);
        Ok(())
    }

    /// The next header. Nothing at the end of the archive, which is marked by zeros or just there.
    fn block(&mut self, may_end: bool) -> Result<Option<[u8; BLOCK]>, ArchiveError> {
        let mut block = [0u8; BLOCK];
        let mut have = 0;
        while have < BLOCK {
            match self.take(&mut block[have..]).map_err(ArchiveError::Read)? {
                0 if have == 0 && may_end => return Ok(None),
                0 => return Err(ArchiveError::Read(cut_off())),
                count => have += count,
            }
        }
        self.charge(BLOCK as u64)?;
        if block.iter().any(|b| *b != 0) {
            return Ok(Some(block));
        }
        if !may_end {
            return Err(ArchiveError::Refused("it ends behind an extended header".to_owned()));
        }
        self.drain()?;
        Ok(None)
    }

    /// Reads what stands behind the end, so that checks of whoever reads below are made. More than zeros
    /// would be read by some programs.
    fn drain(&mut self) -> Result<(), ArchiveError> {
        let mut rest = [0u8; 8192];
        let mut seen = 0u64;
        loop {
            match self.input.read(&mut rest) {
                Ok(0) => return Ok(()),
                Ok(count) => {
                    seen += count as u64;
                    if seen > MAX_PADDING || rest[..count].iter().any(|b| *b != 0) {
                        let text = "it has something behind its end".to_owned();
                        return Err(ArchiveError::Refused(text));
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(ArchiveError::Read(e)),
            }
        }
    }

    fn check_sum(&self, header: &Header) -> Result<(), ArchiveError> {
        let bytes = header.as_bytes();
        let sum = |part: &[u8]| part.iter().map(|b| u32::from(*b)).sum::<u32>();
        let sum = sum(&bytes[..148]) + sum(&bytes[156..]) + 8 * u32::from(b' ');
        if !self.sums || header.cksum().is_ok_and(|told| told == sum) {
            return Ok(());
        }
        let first = self.entries == 1;
        let text = if first { "it is no tar archive" } else { "a header has a wrong sum" };
        Err(ArchiveError::Refused(text.to_owned()))
    }

    /// Takes in a header that belongs to the next entry. `false`: it is an entry's own.
    fn extension(&mut self, header: &Header, before: &mut Before) -> Result<bool, ArchiveError> {
        let kind = header.entry_type();
        let name = header.path_bytes().into_owned();
        let most = match kind {
            EntryType::XHeader | EntryType::XGlobalHeader => MAX_EXTENSION,
            EntryType::GNULongName => self.limits.path as u64 + 1,
            EntryType::GNULongLink => (self.limits.path.max(MAX_TARGET)) as u64 + 1,
            _ => return Ok(false),
        };
        let size = stored_size(header, None).map_err(|why| refused(&name, why))?;
        if size > most {
            return Err(refused(&name, format!("has an extended header of {size} bytes")));
        }
        self.open_body(size)?;
        let mut data = vec![0u8; usize::try_from(size).unwrap_or(0)];
        self.fill(&mut data)?;
        self.left = 0;
        self.body(&mut [])?;
        let twice = match kind {
            EntryType::XHeader => {
                let pax = Pax::parse(&data).map_err(|why| refused(&name, why))?;
                before.pax.replace(pax).is_some()
            }
            EntryType::XGlobalHeader => {
                Pax::check_global(&data).map_err(|why| refused(&name, why))?;
                false
            }
            EntryType::GNULongName => before.long_name.replace(text(data)).is_some(),
            _ => before.long_link.replace(text(data)).is_some(),
        };
        if twice { Err(refused(&name, "has two extended headers of a kind")) } else { Ok(true) }
    }

    fn entry(&mut self, header: &Header, before: Before) -> Result<Entry, ArchiveError> {
        let Before { pax, long_name, long_link } = before;
        let mut pax = pax.unwrap_or_default();
        let plain = header.path_bytes().into_owned();
        let refuse = |why: &str| refused(&plain, why);
        if (long_name.is_some() && pax.path.is_some())
            || (long_link.is_some() && pax.link.is_some())
        {
            return Err(refuse("has a long name in two ways"));
        }
        let sparse = pax.sparse.kind().map_err(|why| refused(&plain, why))?;
        let raw = pax
            .sparse
            .name
            .take()
            .or(pax.path.take())
            .or(long_name)
            .unwrap_or_else(|| plain.clone());
        let name = Name::new(&raw, &self.limits)?;
        let target = pax.link.take().or(long_link);
        let target = target.or_else(|| header.link_name_bytes().map(|t| t.into_owned()));
        let size = stored_size(header, pax.size).map_err(|why| refused(&raw, why))?;
        let old = header.as_old();
        let number = |told: io::Result<u64>, field: &[u8], what: &str| {
            or_blank(told, field).map_err(|_| refused(&raw, format!("has no readable {what}")))
        };
        let mode = number(header.mode().map(u64::from), &old.mode, "mode")? & 0o7777;
        let uid = pax.uid.map_or_else(|| number(header.uid(), &old.uid, "owner"), Ok)?;
        let gid = pax.gid.map_or_else(|| number(header.gid(), &old.gid, "group"), Ok)?;
        let seconds = || header.mtime().ok().and_then(|s| i64::try_from(s).ok());
        let seconds = || seconds().filter(|s| *s < 1 << 40).unwrap_or(0);
        let mtime = pax.mtime.unwrap_or_else(|| Time { seconds: seconds(), nanos: 0 });
        let kind = self.kind(header, size, sparse, target, &raw)?;
        Ok(Entry {
            name,
            kind,
            mode: mode as u32,
            uid,
            gid,
            mtime,
            xattrs: pax.xattrs,
            dropped: pax.dropped,
            opaque: pax.opaque,
        })
    }

    fn kind(
        &mut self,
        header: &Header,
        size: u64,
        sparse: Option<SparseKind>,
        target: Option<Vec<u8>>,
        raw: &[u8],
    ) -> Result<Kind, ArchiveError> {
        let kind = header.entry_type();
        let file =
            matches!(kind, EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse);
        // Programs differ in whether such a thing is a file.
        if file && raw.ends_with(b"/") && size > 0 {
            return Err(refused(raw, "is a file with the name of a folder"));
        }
        if !file && (size > 0 || sparse.is_some()) {
            return Err(refused(raw, "is no file and has content"));
        }
        let target = || {
            target
                .filter(|t| !t.is_empty())
                .ok_or_else(|| refused(raw, "is a link without a target"))
        };
        let device = |told: io::Result<Option<u32>>, field: &[u8]| {
            let told = told.map(|number| u64::from(number.unwrap_or_default()));
            let number = or_blank(told, field);
            number.map(|n| n as u32).map_err(|_| refused(raw, "has no readable device number"))
        };
        match kind {
            EntryType::Regular | EntryType::Continuous if raw.ends_with(b"/") => Ok(Kind::Folder),
            EntryType::Regular | EntryType::Continuous => {
                self.open_body(size)?;
                self.file(size, sparse, raw)
            }
            EntryType::GNUSparse if sparse.is_none() => self.old_sparse(header, size, raw),
            EntryType::Directory => Ok(Kind::Folder),
            EntryType::Symlink => {
                let target = target()?;
                if target.len() > MAX_TARGET || target.contains(&0) {
                    return Err(refused(raw, "is a link whose target is too long"));
                }
                Ok(Kind::Symlink(target))
            }
            EntryType::Link => Ok(Kind::Hard(Name::new(&target()?, &self.limits)?)),
            EntryType::Fifo => Ok(Kind::Fifo),
            EntryType::Char => {
                let bytes = header.as_bytes();
                let major = device(header.device_major(), &bytes[329..337])?;
                Ok(Kind::Char(major, device(header.device_minor(), &bytes[337..345])?))
            }
            EntryType::Block => Ok(Kind::Block),
            other => {
                let letter = other.as_byte().escape_ascii();
                Err(refused(raw, format!("is of the unknown kind '{letter}'")))
            }
        }
    }

    /// A file's pieces: as the header tells, or as stands in front of its data.
    fn file(
        &mut self,
        size: u64,
        sparse: Option<SparseKind>,
        raw: &[u8],
    ) -> Result<Kind, ArchiveError> {
        let (pieces, real) = match sparse {
            None => return Ok(Kind::File { size, pieces: None }),
            Some(SparseKind::Header(pieces, real)) => (pieces, real),
            Some(SparseKind::Data(real)) => {
                let pieces = pax::map_of_data(|| self.number(raw), raw)?;
                // The map fills whole blocks.
                let read = size - self.left;
                let rest = (BLOCK as u64 - read % BLOCK as u64) % BLOCK as u64;
                let mut filler = [0u8; BLOCK];
                let filler = &mut filler[..usize::try_from(rest.min(self.left)).unwrap_or(0)];
                self.fill(filler)?;
                self.left -= filler.len() as u64;
                (pieces, real)
            }
        };
        pax::check_pieces(&pieces, real, self.left).map_err(|why| refused(raw, why))?;
        Ok(Kind::File { size: real, pieces: Some(pieces) })
    }

    /// A number on a line of the present entry's data.
    fn number(&mut self, raw: &[u8]) -> Result<u64, ArchiveError> {
        let mut digits = [0u8; 20];
        let mut count = 0;
        let mut byte = [0u8];
        loop {
            if self.left == 0 {
                return Err(refused(raw, "is a sparse file with a damaged map"));
            }
            self.fill(&mut byte)?;
            self.left -= 1;
            match byte[0] {
                b'\n' => break,
                digit if count < digits.len() => {
                    digits[count] = digit;
                    count += 1;
                }
                _ => return Err(refused(raw, "is a sparse file with a damaged map")),
            }
        }
        let number = pax::decimal(&digits[..count]);
        number.ok_or_else(|| refused(raw, "is a sparse file with a damaged map"))
    }

    /// A sparse file of GNU tar's own format: the map is in the header and in blocks behind it.
    fn old_sparse(&mut self, header: &Header, size: u64, raw: &[u8]) -> Result<Kind, ArchiveError> {
        let damaged = || refused(raw, "is a sparse file with a damaged map");
        let gnu = header.as_gnu().ok_or_else(damaged)?;
        let real = gnu.real_size().ok().filter(|real| *real <= pax::LARGEST).ok_or_else(damaged)?;
        let mut pieces = Vec::new();
        let mut add = |list: &[tar::GnuSparseHeader]| {
            for piece in list.iter().filter(|piece| !piece.is_empty()) {
                let (at, length) = (piece.offset(), piece.length());
                pieces.push(Piece { at: at.ok()?, length: length.ok()? });
            }
            Some(())
        };
        add(&gnu.sparse).ok_or_else(damaged)?;
        let mut more = gnu.is_extended();
        while more {
            self.charge(BLOCK as u64)?;
            let mut extension = GnuExtSparseHeader::new();
            self.fill(extension.as_mut_bytes())?;
            add(extension.sparse()).ok_or_else(damaged)?;
            more = extension.is_extended();
        }
        self.open_body(size)?;
        pax::check_pieces(&pieces, real, size).map_err(|why| refused(raw, why))?;
        Ok(Kind::File { size: real, pieces: Some(pieces) })
    }
}

fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "it ends too early")
}

/// A number of a header. Some writers leave a zero out.
fn or_blank(told: io::Result<u64>, field: &[u8]) -> io::Result<u64> {
    let blank = field.iter().all(|b| matches!(b, 0 | b' '));
    if blank { Ok(0) } else { told }
}

/// A long name, which ends at its first zero byte.
fn text(mut data: Vec<u8>) -> Vec<u8> {
    let end = data.iter().position(|b| *b == 0).unwrap_or(data.len());
    data.truncate(end);
    data
}

/// The size of an entry's data. Header and record have to agree, unless the header has no room for it.
fn stored_size(header: &Header, record: Option<u64>) -> Result<u64, &'static str> {
    let told = or_blank(header.entry_size(), &header.as_old().size);
    let told = told.map_err(|_| "has no readable size");
    match record {
        None => told,
        Some(size) if size >= OCTAL || told == Ok(size) => Ok(size),
        Some(_) => Err("has two sizes that contradict each other"),
    }
}

/// A target for fuzzing: reads an archive whole, twice, and checks what the reader promises. Sums of headers
/// are not looked at.
///
/// # Panics
/// When a promise is broken.
pub fn fuzz(input: &[u8]) {
    const BOUNDS: Limits = Limits { bytes: 1 << 20, entries: 200, path: 512, depth: 16 };
    let run = |input: &mut dyn Read| {
        let mut reader = Reader { sums: false, ..Reader::new(input, BOUNDS) };
        let mut seen: Vec<(Entry, u64)> = Vec::new();
        let end = loop {
            let entry = match reader.next() {
                Ok(Some(entry)) => entry,
                Ok(None) => break None,
                Err(error) => break Some(error.to_string()),
            };
            let raw = entry.name.bytes();
            assert!(raw.len() <= BOUNDS.path && !raw.starts_with(b"/") && !raw.contains(&0));
            assert!(
                entry.name.parts().all(|part| part != b".." && part != b"." && part.len() <= 255)
            );
            assert!(entry.name.parts().count() <= BOUNDS.depth);
            assert!(entry.mode <= 0o7777);
            for (name, _) in &entry.xattrs {
                assert!(name.starts_with(b"user.") || name == pax::CAPABILITY);
            }
            let mut stored = 0;
            let mut buffer = [0u8; 1000];
            let failed = loop {
                match reader.body(&mut buffer) {
                    Ok(0) => break None,
                    Ok(count) => stored += count as u64,
                    Err(error) => break Some(error.to_string()),
                }
            };
            if let Kind::File { size, pieces } = &entry.kind
                && failed.is_none()
            {
                let sum = pieces.as_ref().map(|all| all.iter().map(|p| p.length).sum());
                assert_eq!(stored, sum.unwrap_or(*size));
            } else {
                assert!(failed.is_some() || stored == 0);
            }
            seen.push((entry, stored));
            if failed.is_some() {
                break failed;
            }
        };
        let (bytes, entries) = reader.counted();
        assert!(bytes <= BOUNDS.bytes && entries <= BOUNDS.entries + 1);
        (seen, end)
    };
    let whole = run(&mut { input });
    let (first, rest) = input.split_at(input.len() / 3);
    assert_eq!(whole, run(&mut first.chain(rest)), "read in pieces");
}
