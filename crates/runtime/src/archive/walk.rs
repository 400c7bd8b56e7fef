//! Walks a tree and writes it into a tar: a whole one, or an upper with what it changed.
//!
//! An upper is walked beside an overlay of it and its image: the upper says what was changed and what was
//! removed, the overlay what it looks like. For a file whose mode alone was changed is without content in
//! the upper (metacopy), and a folder that was renamed is there as a name that points at the image
//! (redirect). Such a folder is written whole. Invariant: both are read-only and nobody writes to them; no link
//! in them is followed and nothing but regular files and folders is opened. Names are in order, so that
//! equal trees make equal archives.

use std::collections::HashMap;
use std::io::{self, Read as _, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, SeekFrom, Stat};
use rustix::io::Errno;

use super::pax::{CAPABILITY, Piece, Time, Xattrs};
use super::read::{Entry, Kind, Name};
use super::write::Writer;
use super::{shown, tree};

/// Deepest tree, and longest name in it, that is written: what an import takes back.
pub(crate) const DEPTH: usize = 1000;
pub(crate) const PATH: usize = 16 << 10;
/// What overlayfs calls a folder that was renamed.
const REDIRECT: &str = "trusted.overlay.redirect";
/// What it calls a file whose content is in a lower layer.
const METACOPY: &str = "trusted.overlay.metacopy";
/// In front of names of removed files in OCI layers.
const MARK: &[u8] = b".wh.";
/// Holes below this size are written as zeros.
const HOLE: u64 = 64 << 10;

/// In which words removed files and opaque folders are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Marks {
    /// As overlayfs has them: see [`super::Whiteouts::Overlay`].
    Overlay,
    /// As OCI layers have them.
    Oci,
}

/// What was left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LeftOut {
    /// Sockets and devices.
    pub(crate) special: u64,
    /// Extended attributes that are not carried.
    pub(crate) xattrs: u64,
    /// Files of a session that only their mode is left of: see [`Walk::upper`].
    pub(crate) session: u64,
}

impl LeftOut {
    /// Adds what was left out elsewhere.
    pub(crate) fn add(&mut self, more: Self) {
        self.special += more.special;
        self.xattrs += more.xattrs;
        self.session += more.session;
    }
}

/// A folder in the middle of being walked.
struct Level {
    /// Absent below a folder that is written whole.
    upper: Option<OwnedFd>,
    shown: OwnedFd,
    names: std::vec::IntoIter<Vec<u8>>,
    /// Length of its path.
    path: usize,
}

/// See the module.
pub(crate) struct Walk<'a, W> {
    writer: &'a mut Writer<W>,
    marks: Marks,
    path: Vec<u8>,
    /// Files with several names: how they were called first, and how many of their names are to come.
    links: HashMap<(u64, u64), (Vec<u8>, u64)>,
    left_out: LeftOut,
    buffer: Vec<u8>,
}

impl<'a, W: Write> Walk<'a, W> {
    /// Writes below `prefix`: nothing, or a path.
    pub(crate) fn new(writer: &'a mut Writer<W>, marks: Marks, prefix: &[u8]) -> Self {
        Self {
            writer,
            marks,
            path: prefix.to_vec(),
            links: HashMap::new(),
            left_out: LeftOut::default(),
            buffer: vec![0u8; 256 << 10],
        }
    }

    /// Writes what an upper changed. `shown` is the overlay of it and its image alone: what a session had
    /// between them (certificates) is not there, so files of it whose mode was changed cannot be shown and
    /// are left out.
    ///
    /// # Errors
    /// With the file's name.
    pub(crate) fn upper(self, upper: &OwnedFd, shown: &OwnedFd) -> io::Result<LeftOut> {
        self.run(Some(upper), shown)
    }

    /// Writes a whole tree.
    ///
    /// # Errors
    /// With the file's name.
    pub(crate) fn whole(self, shown: &OwnedFd) -> io::Result<LeftOut> {
        self.run(None, shown)
    }

    fn run(mut self, upper: Option<&OwnedFd>, shown: &OwnedFd) -> io::Result<LeftOut> {
        // What is given may be a mount, of which nothing but its place is open.
        let shown = tree::again(shown)?;
        let upper = upper.map(tree::again).transpose()?;
        let stat = rustix::fs::fstat(&shown)?;
        let entry = self.folder_entry(&stat, shown.as_fd(), false)?;
        self.write(&entry)?;
        let mut stack = vec![self.level(upper, shown)?];
        while let Some(top) = stack.last_mut() {
            self.path.truncate(top.path);
            let Some(name) = top.names.next() else {
                stack.pop();
                continue;
            };
            if !self.path.is_empty() {
                self.path.push(b'/');
            }
            self.path.extend_from_slice(&name);
            if self.path.len() > PATH || stack.len() > DEPTH {
                return Err(self.failed(io::Error::other("it is too deep to be exported")));
            }
            let Some(top) = stack.last() else { break };
            let next = self.step(top, &name).map_err(|e| self.failed(e))?;
            stack.extend(next);
        }
        self.writer.finish_entry()?;
        Ok(self.left_out)
    }

    fn failed(&self, error: io::Error) -> io::Error {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return error;
        }
        io::Error::new(error.kind(), format!("'{}': {error}", shown(&self.path)))
    }

    fn level(&self, upper: Option<OwnedFd>, shown: OwnedFd) -> io::Result<Level> {
        let listed = upper.as_ref().unwrap_or(&shown);
        let mut names = Vec::new();
        let mut dir = Dir::new(tree::again(listed)?)?;
        while let Some(entry) = dir.read().transpose()? {
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                names.push(name.to_vec());
            }
        }
        names.sort_unstable();
        Ok(Level { upper, shown, names: names.into_iter(), path: self.path.len() })
    }

    /// Writes one name; a folder is the next level.
    fn step(&mut self, level: &Level, name: &[u8]) -> io::Result<Option<Level>> {
        if self.marks == Marks::Oci && name.starts_with(MARK) {
            let text = "OCI layers cannot hold names that begin with '.wh.': export it as tar.zst";
            return Err(io::Error::other(text));
        }
        let upper = match &level.upper {
            None => None,
            Some(upper) => {
                let Some(stat) = tree::look(upper.as_fd(), name)? else { return Ok(None) };
                if tree::is_whiteout(&stat) {
                    self.removed(&stat)?;
                    return Ok(None);
                }
                Some((upper, stat))
            }
        };
        let stat = match rustix::fs::statat(&level.shown, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::IO | Errno::NOENT) if self.is_shell(upper, name)? => {
                self.left_out.session += 1;
                return Ok(None);
            }
            Err(e) => return Err(e.into()),
        };
        if tree::kind(&stat) == FileType::Directory {
            return self
                .folder(upper.map(|(upper, _)| upper.as_fd()), level.shown.as_fd(), name)
                .map(Some);
        }
        self.other(&stat, level.shown.as_fd(), name)?;
        Ok(None)
    }

    /// Whether a file of the upper has no content of its own.
    fn is_shell(&self, upper: Option<(&OwnedFd, Stat)>, name: &[u8]) -> io::Result<bool> {
        let Some((upper, stat)) = upper else { return Ok(false) };
        if tree::kind(&stat) != FileType::RegularFile {
            return Ok(false);
        }
        let file = open_file(upper.as_fd(), name)?;
        Ok(get(file.as_fd(), METACOPY)?.is_some())
    }

    fn removed(&mut self, stat: &Stat) -> io::Result<()> {
        let mut entry = entry_of(stat, self.path.clone(), Kind::Char(0, 0));
        if self.marks == Marks::Oci {
            let at = self.path.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1);
            let name = [&self.path[..at], MARK, &self.path[at..]].concat();
            entry = Entry {
                name: Name::trusted(name),
                kind: Kind::File { size: 0, pieces: None },
                mode: 0o644,
                ..entry
            };
        }
        // Of these nothing but the name counts.
        (entry.uid, entry.gid, entry.mtime) = (0, 0, Time::default());
        self.write(&entry)
    }

    fn folder(
        &mut self,
        upper: Option<BorrowedFd<'_>>,
        shown: BorrowedFd<'_>,
        name: &[u8],
    ) -> io::Result<Level> {
        let shown = tree::open_folder(shown, name)?;
        let stat = rustix::fs::fstat(&shown)?;
        let mut upper = upper.map(|upper| tree::open_folder(upper, name)).transpose()?;
        let mut opaque = false;
        if let Some(folder) = &upper {
            let renamed = get(folder.as_fd(), REDIRECT)?.is_some();
            opaque =
                renamed || get(folder.as_fd(), tree::OPAQUE)?.is_some_and(|value| value == b"y");
            if renamed {
                // What is in it is elsewhere in the image: all of it is written here.
                upper = None;
            }
        }
        let entry = self.folder_entry(&stat, shown.as_fd(), opaque)?;
        self.write(&entry)?;
        if opaque && self.marks == Marks::Oci {
            let name = [&self.path[..], b"/.wh..wh..opq"].concat();
            let kind = Kind::File { size: 0, pieces: None };
            let mark = Entry { mode: 0o644, mtime: Time::default(), ..entry_of(&stat, name, kind) };
            self.write(&Entry { uid: 0, gid: 0, ..mark })?;
        }
        self.level(upper, shown)
    }

    fn folder_entry(
        &mut self,
        stat: &Stat,
        folder: BorrowedFd<'_>,
        opaque: bool,
    ) -> io::Result<Entry> {
        let xattrs = self.xattrs(folder)?;
        let opaque = opaque && self.marks == Marks::Overlay;
        Ok(Entry { xattrs, opaque, ..entry_of(stat, self.path.clone(), Kind::Folder) })
    }

    /// Writes what is no folder.
    fn other(&mut self, stat: &Stat, folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
        let kind = tree::kind(stat);
        if stat.st_nlink > 1 {
            let id = (stat.st_dev, stat.st_ino);
            if let Some((first, more)) = self.links.get_mut(&id) {
                let target = Name::trusted(first.clone());
                *more -= 1;
                if *more == 0 {
                    self.links.remove(&id);
                }
                return self.write(&entry_of(stat, self.path.clone(), Kind::Hard(target)));
            }
            let links = !matches!(
                kind,
                FileType::Socket | FileType::CharacterDevice | FileType::BlockDevice
            );
            if links {
                self.links.insert(id, (self.path.clone(), u64::from(stat.st_nlink as u32) - 1));
            }
        }
        match kind {
            FileType::RegularFile => self.file(stat, open_file(folder, name)?),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(folder, name, Vec::new())?.into_bytes();
                self.write(&entry_of(stat, self.path.clone(), Kind::Symlink(target)))
            }
            FileType::Fifo => self.write(&entry_of(stat, self.path.clone(), Kind::Fifo)),
            // Sockets end with their program, devices are the host's.
            _ => {
                self.left_out.special += 1;
                Ok(())
            }
        }
    }

    fn file(&mut self, stat: &Stat, file: OwnedFd) -> io::Result<()> {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let xattrs = self.xattrs(file.as_fd())?;
        let holes = size > HOLE && (stat.st_blocks as u64).saturating_mul(512) < size;
        let pieces = if holes { pieces(file.as_fd(), size)? } else { None };
        let kind = Kind::File { size, pieces: pieces.clone() };
        self.write(&Entry { xattrs, ..entry_of(stat, self.path.clone(), kind) })?;
        let file = std::fs::File::from(file);
        match pieces {
            None => self.copy(&file, Piece { at: 0, length: size }),
            Some(pieces) => pieces.into_iter().try_for_each(|piece| self.copy(&file, piece)),
        }
    }

    fn copy(&mut self, mut file: &std::fs::File, piece: Piece) -> io::Result<()> {
        if piece.length == 0 {
            return Ok(());
        }
        rustix::fs::seek(file, SeekFrom::Start(piece.at))?;
        let mut left = piece.length;
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(self.buffer.len());
            let count = file.read(&mut self.buffer[..most])?;
            if count == 0 {
                return Err(io::Error::other("it became shorter while it was read"));
            }
            left -= count as u64;
            self.writer.content(&self.buffer[..count])?;
        }
        Ok(())
    }

    fn write(&mut self, entry: &Entry) -> io::Result<()> {
        self.writer.entry(entry)
    }

    /// The extended attributes that are carried, in order.
    fn xattrs(&mut self, file: BorrowedFd<'_>) -> io::Result<Xattrs> {
        let mut out = Xattrs::new();
        for name in tree::xattr_names(file)? {
            let bytes = name.as_bytes();
            if bytes.starts_with(b"user.") || bytes == CAPABILITY {
                if let Some(value) = get(file, &*name)? {
                    out.push((bytes.to_vec(), value));
                }
            } else if !bytes.starts_with(b"trusted.") {
                self.left_out.xattrs += 1;
            }
        }
        out.sort_unstable();
        Ok(out)
    }
}

fn entry_of(stat: &Stat, name: Vec<u8>, kind: Kind) -> Entry {
    Entry {
        name: Name::trusted(name),
        kind,
        mode: stat.st_mode & 0o7777,
        uid: u64::from(stat.st_uid),
        gid: u64::from(stat.st_gid),
        mtime: Time {
            seconds: stat.st_mtime,
            nanos: u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
        },
        xattrs: Xattrs::new(),
        dropped: 0,
        opaque: false,
    }
}

fn open_file(folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let strict = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let file = rustix::fs::openat2(folder, name, flags, Mode::empty(), strict)?;
    if tree::kind(&rustix::fs::fstat(&file)?) != FileType::RegularFile {
        return Err(io::Error::other("it is no regular file any more"));
    }
    Ok(file)
}

/// The value of an extended attribute, if it has it.
fn get(file: BorrowedFd<'_>, name: impl rustix::path::Arg + Copy) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0u8; 64 << 10];
    match rustix::fs::fgetxattr(file, name, &mut value[..]) {
        Ok(length) => {
            value.truncate(length);
            Ok(Some(value))
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Where a file has data; nothing when it has no hole worth the name.
fn pieces(file: BorrowedFd<'_>, size: u64) -> io::Result<Option<Vec<Piece>>> {
    let mut out: Vec<Piece> = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start.min(size),
            Err(Errno::NXIO) => break,
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(size);
        if end <= start {
            break;
        }
        match out.last_mut() {
            Some(last) if start - (last.at + last.length) < HOLE => last.length = end - last.at,
            _ => out.push(Piece { at: start, length: end - start }),
        }
        at = end;
    }
    if let Some(first) = out.first_mut()
        && first.at < HOLE
    {
        first.length += first.at;
        first.at = 0;
    }
    let stored: u64 = out.iter().map(|piece| piece.length).sum();
    Ok((stored + HOLE <= size).then_some(out))
}
