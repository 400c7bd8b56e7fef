//! Extended headers (POSIX.1-2001, "pax"): records, and the maps of sparse files in them.
//!
//! Read here and not by the `tar` crate, which ends a record at the first line feed: a capability of two
//! bits can hold one. Invariant: a record that is given twice, or that another reader would understand in
//! another way, is refused.

use super::{ArchiveError, refused};

/// Record of an export of ours: the folder hides what is below it.
pub(crate) const OPAQUE: &str = "BIVOUAC.opaque";
/// In front of the name of an extended attribute.
pub(crate) const XATTR: &[u8] = b"SCHILY.xattr.";
/// The attribute of file capabilities.
pub(crate) const CAPABILITY: &[u8] = b"security.capability";
/// Longest name of an extended attribute (attr(7)).
const XATTR_NAME: usize = 255;
/// Longest value of one.
const XATTR_VALUE: usize = 64 << 10;
/// Most pieces of a sparse file.
const PIECES: usize = 1 << 20;
/// Largest file, holes counted.
pub(crate) const LARGEST: u64 = 1 << 44;

/// A moment: seconds and nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Time {
    pub(crate) seconds: i64,
    pub(crate) nanos: u32,
}

/// Extended attributes: name and value.
pub(crate) type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// A piece of a sparse file that holds data: offset and length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) at: u64,
    pub(crate) length: u64,
}

/// What the extended header of an entry says.
#[derive(Debug, Default)]
pub(crate) struct Pax {
    pub(crate) path: Option<Vec<u8>>,
    pub(crate) link: Option<Vec<u8>>,
    pub(crate) size: Option<u64>,
    pub(crate) uid: Option<u64>,
    pub(crate) gid: Option<u64>,
    pub(crate) mtime: Option<Time>,
    pub(crate) xattrs: Xattrs,
    /// Extended attributes that are not kept.
    pub(crate) dropped: u64,
    pub(crate) opaque: bool,
    pub(crate) sparse: Sparse,
}

/// Records of a sparse file, of formats 0.1 and 1.0 of GNU tar.
#[derive(Debug, Default)]
pub(crate) struct Sparse {
    major: Option<u64>,
    minor: Option<u64>,
    pub(crate) name: Option<Vec<u8>>,
    real: Option<u64>,
    map: Option<Vec<u8>>,
}

/// Which of the two formats a sparse file is in.
pub(crate) enum SparseKind {
    /// The map is in the header.
    Header(Vec<Piece>, u64),
    /// The map is in front of the data.
    Data(u64),
}

/// A record: its key and its value.
type Record<'a> = (&'a [u8], &'a [u8]);

/// The records of a header.
fn records(mut data: &[u8]) -> Result<Vec<Record<'_>>, &'static str> {
    const DAMAGED: &str = "has a damaged extended header";
    let mut out = Vec::new();
    while !data.is_empty() {
        let space = data.iter().take(20).position(|b| *b == b' ').ok_or(DAMAGED)?;
        let length = decimal(&data[..space]).and_then(|n| usize::try_from(n).ok());
        let length = length.filter(|n| *n > space + 2 && *n <= data.len()).ok_or(DAMAGED)?;
        let (record, rest) = data.split_at(length);
        let text = record[space + 1..].strip_suffix(b"\n").ok_or(DAMAGED)?;
        let equals = text.iter().position(|b| *b == b'=').filter(|at| *at > 0).ok_or(DAMAGED)?;
        out.push((&text[..equals], &text[equals + 1..]));
        data = rest;
    }
    Ok(out)
}

/// A decimal number of digits alone.
pub(crate) fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 20 || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Seconds with a fraction, as `-12.5`.
fn time(text: &[u8]) -> Option<Time> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mut halves = text.splitn(2, |b| *b == b'.');
    let whole = i64::try_from(decimal(halves.next()?)?).ok().filter(|s| *s < 1 << 40)?;
    let fraction = halves.next().unwrap_or(b"0");
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digits = fraction.iter().copied().chain(std::iter::repeat(b'0')).take(9);
    let nanos = digits.fold(0u32, |sum, digit| sum * 10 + u32::from(digit - b'0'));
    Some(match (negative, nanos) {
        (false, _) => Time { seconds: whole, nanos },
        (true, 0) => Time { seconds: -whole, nanos },
        (true, _) => Time { seconds: -whole - 1, nanos: 1_000_000_000 - nanos },
    })
}

fn once<T>(slot: &mut Option<T>, value: Option<T>, key: &[u8]) -> Result<(), String> {
    let key = String::from_utf8_lossy(key);
    let Some(value) = value else { return Err(format!("has a wrong '{key}' record")) };
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(format!("has two '{key}' records")),
    }
}

impl Pax {
    /// Reads the header of one entry.
    pub(crate) fn parse(data: &[u8]) -> Result<Self, String> {
        let mut pax = Self::default();
        for (key, value) in records(data)? {
            let text = || (!value.contains(&0)).then(|| value.to_vec());
            let number = || decimal(value);
            match key {
                b"path" => once(&mut pax.path, text(), key)?,
                b"linkpath" => once(&mut pax.link, text(), key)?,
                b"size" => once(&mut pax.size, number(), key)?,
                b"uid" => once(&mut pax.uid, number(), key)?,
                b"gid" => once(&mut pax.gid, number(), key)?,
                // What cannot be told is no reason to refuse: 1970.
                b"mtime" => once(&mut pax.mtime, Some(time(value).unwrap_or_default()), key)?,
                b"GNU.sparse.major" => once(&mut pax.sparse.major, number(), key)?,
                b"GNU.sparse.minor" => once(&mut pax.sparse.minor, number(), key)?,
                b"GNU.sparse.name" => once(&mut pax.sparse.name, text(), key)?,
                b"GNU.sparse.realsize" | b"GNU.sparse.size" => {
                    once(&mut pax.sparse.real, number(), key)?;
                }
                b"GNU.sparse.map" => once(&mut pax.sparse.map, text(), key)?,
                // A count that the map tells, too.
                b"GNU.sparse.numblocks" => {}
                _ if key.starts_with(b"GNU.sparse.") => {
                    return Err("is a sparse file in a format of before 2006".to_owned());
                }
                _ if key == OPAQUE.as_bytes() => pax.opaque = value == b"1",
                _ => {
                    if let Some(name) = key.strip_prefix(XATTR) {
                        pax.xattr(name, value)?;
                    } else if key.starts_with(b"LIBARCHIVE.xattr.") {
                        // Its writer gives the other form beside it.
                    }
                }
            }
        }
        Ok(pax)
    }

    fn xattr(&mut self, name: &[u8], value: &[u8]) -> Result<(), String> {
        let user = name.len() > b"user.".len() && name.starts_with(b"user.");
        if !user && name != CAPABILITY {
            self.dropped += 1;
            return Ok(());
        }
        if name.contains(&0) || name.len() > XATTR_NAME || value.len() > XATTR_VALUE {
            return Err("has an extended attribute that is too long".to_owned());
        }
        if name == CAPABILITY && !is_capability(value) {
            return Err("has file capabilities that are none".to_owned());
        }
        if self.xattrs.iter().any(|(known, _)| known == name) {
            return Err("has an extended attribute twice".to_owned());
        }
        self.xattrs.push((name.to_owned(), value.to_owned()));
        Ok(())
    }

    /// Checks a header that holds for all that follow: what would change their names, sizes or content is
    /// refused, for readers differ in what they make of it.
    pub(crate) fn check_global(data: &[u8]) -> Result<(), String> {
        for (key, _) in records(data)? {
            let telling = [&b"path"[..], b"linkpath", b"size", b"uid", b"gid"].contains(&key)
                || [XATTR, b"GNU.", b"LIBARCHIVE.xattr.", b"BIVOUAC."]
                    .iter()
                    .any(|p| key.starts_with(p));
            if telling {
                let key = String::from_utf8_lossy(key);
                return Err(format!("has a '{key}' record for all entries"));
            }
        }
        Ok(())
    }
}

impl Sparse {
    /// What kind of sparse file it is, if it is one.
    pub(crate) fn kind(&self) -> Result<Option<SparseKind>, String> {
        let real = || {
            let real = self.real.ok_or("is a sparse file without a size")?;
            if real > LARGEST { Err("is a sparse file of more than 16 TiB") } else { Ok(real) }
        };
        match (self.major, self.minor, &self.map) {
            (None, None, None) if self.real.is_none() && self.name.is_none() => Ok(None),
            (Some(1), Some(0), None) => Ok(Some(SparseKind::Data(real()?))),
            (None | Some(0), None | Some(1), Some(map)) => {
                let numbers = map.split(|b| *b == b',').map(decimal);
                let numbers: Option<Vec<u64>> = numbers.take(2 * PIECES + 2).collect();
                let pieces = pieces(&numbers.ok_or("is a sparse file with a damaged map")?)?;
                Ok(Some(SparseKind::Header(pieces, real()?)))
            }
            _ => Err("is a sparse file in an unknown format".to_owned()),
        }
    }
}

fn pieces(numbers: &[u64]) -> Result<Vec<Piece>, String> {
    let (pairs, rest) = numbers.as_chunks::<2>();
    if !rest.is_empty() || pairs.len() > PIECES {
        return Err("is a sparse file with a damaged map".to_owned());
    }
    Ok(pairs.iter().map(|[at, length]| Piece { at: *at, length: *length }).collect())
}

/// Reads a map that stands in front of the data: a count, then pairs, each number on a line.
pub(crate) fn map_of_data(
    mut line: impl FnMut() -> Result<u64, ArchiveError>,
    name: &[u8],
) -> Result<Vec<Piece>, ArchiveError> {
    let count = line()?;
    let count = usize::try_from(count).ok().filter(|count| *count <= PIECES);
    let count = count.ok_or_else(|| refused(name, "is a sparse file of too many pieces"))?;
    let mut out = Vec::new();
    for _ in 0..count {
        out.push(Piece { at: line()?, length: line()? });
    }
    Ok(out)
}

/// Checks that pieces are in order, inside of the file, and as long together as the data.
pub(crate) fn check_pieces(pieces: &[Piece], real: u64, stored: u64) -> Result<(), &'static str> {
    const DAMAGED: &str = "is a sparse file with a damaged map";
    let (mut end, mut sum) = (0u64, 0u64);
    for piece in pieces {
        if piece.at < end {
            return Err(DAMAGED);
        }
        end = piece.at.checked_add(piece.length).filter(|end| *end <= real).ok_or(DAMAGED)?;
        sum += piece.length;
    }
    if sum == stored { Ok(()) } else { Err(DAMAGED) }
}

/// Whether a value has the shape that the kernel gives file capabilities (versions 2 and 3).
fn is_capability(value: &[u8]) -> bool {
    let Some((magic, _)) = value.split_first_chunk::<4>() else { return false };
    let version = u32::from_le_bytes(*magic) & 0xff00_0000;
    match value.len() {
        20 => version == 0x0200_0000,
        24 => {
            // The root that it counts for has to be one of the sandbox's ids.
            let root: [u8; 4] = [value[20], value[21], value[22], value[23]];
            version == 0x0300_0000 && u32::from_le_bytes(root) < crate::linux::idmap::RANGE
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_with_line_feeds_are_whole() {
        let parsed = records(b"12 a=x\nyz=1\n10 b=cdef\n").unwrap();
        assert_eq!(parsed, [(&b"a"[..], &b"x\nyz=1"[..]), (b"b", b"cdef")]);
        for bad in
            [&b"3 a"[..], b"5 a=x\n", b"7 a=x\n", b"6 =xy\n", b" a=b\n", b"99 a=b\n", b"6 a=bc"]
        {
            assert!(records(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn times() {
        let at = |seconds, nanos| Some(Time { seconds, nanos });
        assert_eq!(time(b"12"), at(12, 0));
        assert_eq!(time(b"12.5"), at(12, 500_000_000));
        assert_eq!(time(b"-1.25"), at(-2, 750_000_000));
        assert_eq!(time(b"-3"), at(-3, 0));
        assert_eq!(time(b"1.0000000019"), at(1, 1));
        for bad in [&b""[..], b"x", b"1.x", b"99999999999999999999"] {
            assert_eq!(time(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn pieces_are_checked() {
        let piece = |at, length| Piece { at, length };
        assert!(check_pieces(&[piece(0, 5), piece(10, 5), piece(20, 0)], 20, 10).is_ok());
        assert!(check_pieces(&[piece(10, 5), piece(0, 5)], 20, 10).is_err());
        assert!(check_pieces(&[piece(0, 5), piece(4, 5)], 20, 10).is_err());
        assert!(check_pieces(&[piece(0, 21)], 20, 21).is_err());
        assert!(check_pieces(&[piece(u64::MAX, 2)], 20, 2).is_err());
        assert!(check_pieces(&[piece(0, 5)], 20, 6).is_err());
    }
}
