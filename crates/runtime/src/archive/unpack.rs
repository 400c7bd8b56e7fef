//! The writer of trees: entries become files below a root descriptor.
//!
//! Invariant: see [`super`]. The root is a folder that nobody else writes to while it is filled. What a
//! layer makes, it never makes through what the same layer made before but folders.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::fs::{AtFlags, FileType, Mode, Stat, XattrFlags};
use rustix::io::Errno;

use super::pax::{self, Piece, Time};
use super::read::{Entry, Kind, Name, Reader};
use super::{ArchiveError, LayerStat, Limits, Whiteouts, refused, shown, tree};
use crate::linux::idmap::RANGE;

/// Whose files are that belong to nobody in a sandbox.
const NOBODY: u32 = 65_534;
/// What marks removed files in OCI layers.
const MARK: &[u8] = b".wh.";
/// What marks a folder that hides what lower layers have in it.
const OPAQUE_MARK: &[u8] = b".wh..wh..opq";
/// Marks of AUFS that say nothing about the tree.
const AUFS: &[u8] = b".wh..wh.";
/// Set-user-id and set-group-id.
const SET_ID: u32 = 0o6000;

/// Fills a folder out of layers, lowest first.
pub struct Unpacker {
    root: OwnedFd,
    whiteouts: Whiteouts,
    /// What is left of them.
    limits: Limits,
    /// Inodes that the present layer has made or named. Not kept of an upper, which has made everything.
    touched: HashSet<u64>,
    /// Times of folders, by inode: set at the end.
    times: HashMap<u64, Time>,
    /// The folder of the last entry: archives come folder by folder.
    last: Option<(Vec<u8>, Rc<OwnedFd>)>,
    stat: LayerStat,
    buffer: Vec<u8>,
}

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unpacker").field("stat", &self.stat).finish_non_exhaustive()
    }
}

/// Something that went wrong with an entry: whether the archive or the host is to blame, the number tells.
fn failed(what: &str, name: &[u8], error: impl Into<io::Error>) -> ArchiveError {
    let source: io::Error = error.into();
    let why = match source.raw_os_error() {
        Some(libc::ENAMETOOLONG) => "has a name that is too long",
        Some(libc::EMLINK) => "has more names than a file can have",
        Some(libc::EFBIG) => "is larger than a file can be",
        Some(libc::E2BIG | libc::ERANGE) => "has extended attributes that are too large",
        Some(libc::ELOOP | libc::EXDEV) => "leads through a link",
        _ => return ArchiveError::Host { what: format!("{what} '{}'", shown(name)), source },
    };
    refused(name, why)
}

impl Unpacker {
    /// Writes below `root`, which is empty or holds what lower layers made.
    #[must_use]
    pub fn new(root: OwnedFd, limits: Limits, whiteouts: Whiteouts) -> Self {
        Self {
            root,
            whiteouts,
            limits,
            touched: HashSet::new(),
            times: HashMap::new(),
            last: None,
            stat: LayerStat::default(),
            buffer: vec![0u8; 256 << 10],
        }
    }

    /// Unpacks one layer, an uncompressed tar, over what is there. It is read to its end.
    ///
    /// # Errors
    /// What was written until then stays: the caller removes the whole tree.
    pub fn layer(&mut self, tar: impl Read) -> Result<LayerStat, ArchiveError> {
        let mut reader = Reader::new(tar, self.limits);
        self.begin();
        let done = loop {
            match reader.next() {
                Ok(Some(entry)) => {
                    if let Err(error) = self.entry(&entry, &mut reader) {
                        break Err(error);
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        // All layers share the limits.
        let (bytes, entries) = reader.counted();
        self.limits.bytes = self.limits.bytes.saturating_sub(bytes);
        self.limits.entries = self.limits.entries.saturating_sub(entries);
        done.map(|()| self.stat)
    }

    /// Gives folders the times that their entries told. To be called once, after the last layer.
    ///
    /// # Errors
    /// As openat(2).
    pub fn finish(mut self) -> Result<(), ArchiveError> {
        self.last = None;
        if self.times.is_empty() {
            return Ok(());
        }
        tree::set_folder_times(self.root.as_fd(), &self.times).map_err(|source| {
            ArchiveError::Host { what: "set the times of folders".to_owned(), source }
        })
    }

    /// A new layer begins.
    pub(crate) fn begin(&mut self) {
        self.touched.clear();
        self.stat = LayerStat::default();
    }

    /// What the present layer held so far.
    pub(crate) fn stat(&self) -> LayerStat {
        self.stat
    }

    /// Writes, or obeys, one entry.
    pub(crate) fn entry(
        &mut self,
        entry: &Entry,
        reader: &mut Reader<impl Read>,
    ) -> Result<(), ArchiveError> {
        self.stat.entries += 1;
        self.stat.xattrs += entry.dropped;
        let whole = entry.name.bytes();
        let Some((parent, name)) = entry.name.split() else { return self.root_entry(entry) };
        if self.whiteouts == Whiteouts::Apply && name.starts_with(MARK) {
            return self.mark(entry, parent, name);
        }
        if self.whiteouts == Whiteouts::Apply && entry.name.parts().any(|p| p.starts_with(MARK)) {
            if entry.name.parts().any(|part| part.starts_with(AUFS)) {
                return Ok(());
            }
            return Err(refused(whole, "is below a mark of a removed file"));
        }
        match &entry.kind {
            Kind::Char(0, 0) if self.whiteouts == Whiteouts::Overlay => {
                let folder = self.folder(parent)?;
                self.make_room(&folder, entry, name)?;
                tree::make_whiteout(folder.as_fd(), name)
                    .map_err(|e| failed("mark as removed", whole, e))?;
                self.touch(folder.as_fd(), name, whole)?;
                self.stat.whiteouts += 1;
                Ok(())
            }
            Kind::Char(..) | Kind::Block => {
                self.stat.devices += 1;
                Ok(())
            }
            Kind::Hard(target) => self.hard_link(entry, target, parent, name),
            _ => {
                let folder = self.folder(parent)?;
                self.make(entry, &folder, name, reader)
            }
        }
    }

    /// The root itself: its mode, owner and times.
    fn root_entry(&mut self, entry: &Entry) -> Result<(), ArchiveError> {
        if entry.kind != Kind::Folder {
            return Err(refused(b"", "is the root and no folder"));
        }
        let root = tree::again(&self.root).map_err(|e| failed("open", b"", e))?;
        self.set_folder(entry, &root)
    }

    fn make(
        &mut self,
        entry: &Entry,
        folder: &OwnedFd,
        name: &[u8],
        reader: &mut Reader<impl Read>,
    ) -> Result<(), ArchiveError> {
        let whole = entry.name.bytes();
        let there = self.make_room(folder, entry, name)?;
        match &entry.kind {
            Kind::Folder => {
                let made = match there {
                    Some(stat) if tree::kind(&stat) == FileType::Directory => {
                        tree::open_folder(folder.as_fd(), name)
                    }
                    _ => tree::make_folder(folder.as_fd(), name),
                };
                let made = made.map_err(|e| failed("make", whole, e))?;
                let hidden = there.is_some_and(|stat| tree::is_whiteout(&stat));
                if self.whiteouts == Whiteouts::Overlay && (entry.opaque || hidden) {
                    tree::make_opaque(made.as_fd()).map_err(|e| failed("make", whole, e))?;
                }
                return self.set_folder(entry, &made);
            }
            Kind::File { size, pieces } => {
                let file = tree::make_file(folder.as_fd(), name);
                let file = file.map_err(|e| failed("write", whole, e))?;
                let file = self.fill(file, *size, pieces.as_deref(), reader, whole)?;
                self.set_file(entry, &file)?;
            }
            Kind::Symlink(target) => {
                rustix::fs::symlinkat(target.as_slice(), folder, name)
                    .map_err(|e| failed("link", whole, e))?;
                self.set_special(entry, folder.as_fd(), name)?;
            }
            Kind::Fifo => {
                let mode = Mode::from_raw_mode(0o600);
                rustix::fs::mknodat(folder, name, FileType::Fifo, mode, 0)
                    .map_err(|e| failed("make", whole, e))?;
                self.set_special(entry, folder.as_fd(), name)?;
                let (mode, _) = self.permissions(entry);
                rustix::fs::chmodat(folder, name, Mode::from_raw_mode(mode), AtFlags::empty())
                    .map_err(|e| failed("set the mode of", whole, e))?;
            }
            // Handled by the caller.
            Kind::Hard(_) | Kind::Char(..) | Kind::Block => {}
        }
        self.touch(folder.as_fd(), name, whole)
    }

    /// Writes a file's content.
    fn fill(
        &mut self,
        file: OwnedFd,
        size: u64,
        pieces: Option<&[Piece]>,
        reader: &mut Reader<impl Read>,
        whole: &[u8],
    ) -> Result<OwnedFd, ArchiveError> {
        use std::os::unix::fs::FileExt as _;
        let file = std::fs::File::from(file);
        let error = |e: io::Error| failed("write", whole, e);
        let Some(pieces) = pieces else {
            let mut file = file;
            loop {
                let count = reader.body(&mut self.buffer)?;
                if count == 0 {
                    return Ok(file.into());
                }
                self.stat.bytes += count as u64;
                file.write_all(&self.buffer[..count]).map_err(error)?;
            }
        };
        file.set_len(size).map_err(error)?;
        for piece in pieces {
            let (mut at, end) = (piece.at, piece.at + piece.length);
            while at < end {
                let most = usize::try_from(end - at).unwrap_or(usize::MAX).min(self.buffer.len());
                let count = reader.body(&mut self.buffer[..most])?;
                if count == 0 {
                    return Err(refused(whole, "is a sparse file with a damaged map"));
                }
                file.write_all_at(&self.buffer[..count], at).map_err(error)?;
                self.stat.bytes += count as u64;
                at += count as u64;
            }
        }
        Ok(file.into())
    }

    fn hard_link(
        &mut self,
        entry: &Entry,
        target: &Name,
        parent: &[u8],
        name: &[u8],
    ) -> Result<(), ArchiveError> {
        let whole = entry.name.bytes();
        let missing = || {
            let target = shown(target.bytes());
            refused(whole, format!("is another name of '{target}', which is not there or no file"))
        };
        let (above, last) = target.split().ok_or_else(missing)?;
        if self.whiteouts == Whiteouts::Overlay
            && entry.name.parts().next() != target.parts().next()
        {
            // Each is an upper of its own.
            return Err(missing());
        }
        let source = self.find(above, whole)?.ok_or_else(missing)?;
        let stat = tree::look(source.as_fd(), last).map_err(|e| failed("look at", whole, e))?;
        let stat = stat.filter(|stat| {
            matches!(tree::kind(stat), FileType::RegularFile | FileType::Symlink | FileType::Fifo)
        });
        let stat = stat.ok_or_else(missing)?;
        let folder = self.folder(parent)?;
        if let Some(there) =
            tree::look(folder.as_fd(), name).map_err(|e| failed("look at", whole, e))?
            && there.st_ino == stat.st_ino
        {
            // One name of a file is already what the other one is to be.
            self.note(stat.st_ino);
            return Ok(());
        }
        self.make_room(&folder, entry, name)?;
        // Its folder may have been what was in the way.
        let source = self.find(above, whole)?.ok_or_else(missing)?;
        match rustix::fs::linkat(&source, last, &folder, name, AtFlags::empty()) {
            Err(Errno::NOENT) => return Err(missing()),
            other => other.map_err(|e| failed("link", whole, e))?,
        }
        self.touch(folder.as_fd(), name, whole)
    }

    /// An OCI mark of removed files.
    fn mark(&mut self, entry: &Entry, parent: &[u8], name: &[u8]) -> Result<(), ArchiveError> {
        let whole = entry.name.bytes();
        if !matches!(entry.kind, Kind::File { .. } | Kind::Hard(_)) {
            return Err(refused(whole, "is a mark of a removed file and no file itself"));
        }
        if name != OPAQUE_MARK && name.starts_with(AUFS) {
            return Ok(());
        }
        let removed = &name[MARK.len()..];
        if matches!(removed, b"" | b"." | b"..") {
            return Err(refused(whole, "marks no name as removed"));
        }
        self.stat.whiteouts += 1;
        let error = |e: io::Error| failed("remove", whole, e);
        // Of what is not there, nothing needs to be removed.
        let Some(folder) = self.find(parent, whole)? else { return Ok(()) };
        self.last = None;
        if name == OPAQUE_MARK {
            tree::clear(tree::again(&folder).map_err(error)?, &self.touched).map_err(error)?;
            return Ok(());
        }
        let Some(stat) = tree::look(folder.as_fd(), removed).map_err(error)? else { return Ok(()) };
        // A mark says nothing about what its own layer holds.
        let touched = self.touched.contains(&stat.st_ino);
        if tree::kind(&stat) == FileType::Directory {
            let inside = tree::open_folder(folder.as_fd(), removed).map_err(error)?;
            if !tree::clear(inside, &self.touched).map_err(error)? && !touched {
                rustix::fs::unlinkat(&*folder, removed, AtFlags::REMOVEDIR)
                    .map_err(|e| error(e.into()))?;
            }
        } else if !touched {
            rustix::fs::unlinkat(&*folder, removed, AtFlags::empty())
                .map_err(|e| error(e.into()))?;
        }
        Ok(())
    }

    /// The folder of an entry, made when it is missing.
    fn folder(&mut self, path: &[u8]) -> Result<Rc<OwnedFd>, ArchiveError> {
        if let Some((known, folder)) = &self.last
            && known == path
        {
            return Ok(Rc::clone(folder));
        }
        let error = |e: io::Error| failed("open the folder", path, e);
        let mut at = tree::again(&self.root).map_err(error)?;
        for part in path.split(|b| *b == b'/').filter(|part| !part.is_empty()) {
            let (next, fresh) = match tree::look(at.as_fd(), part).map_err(error)? {
                Some(stat) if tree::kind(&stat) == FileType::Directory => {
                    (tree::open_folder(at.as_fd(), part).map_err(error)?, false)
                }
                Some(stat) => {
                    let hidden = self.whiteouts == Whiteouts::Overlay && tree::is_whiteout(&stat);
                    if !hidden && self.has_made(stat.st_ino) {
                        return Err(refused(path, "leads through something that is no folder"));
                    }
                    tree::remove(at.as_fd(), part, &stat).map_err(error)?;
                    let made = tree::make_folder(at.as_fd(), part).map_err(error)?;
                    if hidden {
                        tree::make_opaque(made.as_fd()).map_err(error)?;
                    }
                    (made, true)
                }
                None => (tree::make_folder(at.as_fd(), part).map_err(error)?, true),
            };
            let inode = rustix::fs::fstat(&next).map_err(|e| error(e.into()))?.st_ino;
            self.note(inode);
            if fresh {
                // An inode that had another owner before.
                self.times.remove(&inode);
            }
            at = next;
        }
        let folder = Rc::new(at);
        self.last = Some((path.to_owned(), Rc::clone(&folder)));
        Ok(folder)
    }

    /// A folder that is there, on a way of folders alone.
    fn find(&self, path: &[u8], whole: &[u8]) -> Result<Option<Rc<OwnedFd>>, ArchiveError> {
        if let Some((known, folder)) = &self.last
            && known == path
        {
            return Ok(Some(Rc::clone(folder)));
        }
        let error = |e: io::Error| failed("look at", whole, e);
        let mut at = tree::again(&self.root).map_err(error)?;
        for part in path.split(|b| *b == b'/').filter(|part| !part.is_empty()) {
            match tree::look(at.as_fd(), part).map_err(error)? {
                Some(stat) if tree::kind(&stat) == FileType::Directory => {}
                _ => return Ok(None),
            }
            at = tree::open_folder(at.as_fd(), part).map_err(error)?;
        }
        Ok(Some(Rc::new(at)))
    }

    /// Removes what is in an entry's way, and answers what it was. Two folders become one.
    fn make_room(
        &mut self,
        folder: &OwnedFd,
        entry: &Entry,
        name: &[u8],
    ) -> Result<Option<Stat>, ArchiveError> {
        let error = |e: io::Error| failed("replace", entry.name.bytes(), e);
        let Some(stat) = tree::look(folder.as_fd(), name).map_err(error)? else { return Ok(None) };
        let is_folder = tree::kind(&stat) == FileType::Directory;
        if is_folder && entry.kind == Kind::Folder {
            return Ok(Some(stat));
        }
        tree::remove(folder.as_fd(), name, &stat).map_err(error)?;
        if is_folder {
            self.last = None;
        }
        Ok(Some(stat))
    }

    /// Whether the present layer has made an inode.
    fn has_made(&self, inode: u64) -> bool {
        self.whiteouts == Whiteouts::Overlay || self.touched.contains(&inode)
    }

    fn note(&mut self, inode: u64) {
        if self.whiteouts == Whiteouts::Apply {
            self.touched.insert(inode);
        }
    }

    fn touch(
        &mut self,
        folder: BorrowedFd<'_>,
        name: &[u8],
        whole: &[u8],
    ) -> Result<(), ArchiveError> {
        if self.whiteouts == Whiteouts::Apply
            && let Some(stat) = tree::look(folder, name).map_err(|e| failed("look at", whole, e))?
        {
            self.touched.insert(stat.st_ino);
        }
        Ok(())
    }

    /// Mode and owner as they count here.
    fn permissions(&self, entry: &Entry) -> (u32, (u32, u32)) {
        let own = |id: u64| u32::try_from(id).ok().filter(|id| *id < RANGE).unwrap_or(NOBODY);
        let mode = if foreign(entry) { entry.mode & !SET_ID } else { entry.mode };
        (mode, (own(entry.uid), own(entry.gid)))
    }

    fn set_file(&mut self, entry: &Entry, file: &OwnedFd) -> Result<(), ArchiveError> {
        self.set_open(entry, file)?;
        rustix::fs::futimens(file, &tree::times(entry.mtime))
            .map_err(|e| failed("set the times of", entry.name.bytes(), e))
    }

    fn set_folder(&mut self, entry: &Entry, folder: &OwnedFd) -> Result<(), ArchiveError> {
        let error = |e: io::Error| failed("set what is said of", entry.name.bytes(), e);
        // What another entry or a lower layer said of it does not count any more.
        for name in tree::xattr_names(folder.as_fd()).map_err(error)? {
            if name.as_bytes().starts_with(b"user.") {
                rustix::fs::fremovexattr(folder, &*name).map_err(|e| error(e.into()))?;
            }
        }
        self.set_open(entry, folder)?;
        let inode = rustix::fs::fstat(folder).map_err(|e| error(e.into()))?.st_ino;
        self.note(inode);
        self.times.insert(inode, entry.mtime);
        Ok(())
    }

    /// Owner first: a change of it takes set-id bits and capabilities away.
    fn set_open(&mut self, entry: &Entry, file: &OwnedFd) -> Result<(), ArchiveError> {
        let whole = entry.name.bytes();
        let (mode, (uid, gid)) = self.permissions(entry);
        self.stat.ids += u64::from(foreign(entry));
        let (uid, gid) = tree::owner(uid, gid);
        rustix::fs::fchown(file, uid, gid).map_err(|e| failed("set the owner of", whole, e))?;
        for (name, value) in &entry.xattrs {
            if name == pax::CAPABILITY && (foreign(entry) || entry.kind == Kind::Folder) {
                self.stat.xattrs += 1;
                continue;
            }
            match rustix::fs::fsetxattr(file, name.as_slice(), value, XattrFlags::empty()) {
                // This file system has less room for them than others.
                Err(Errno::NOSPC) if value.len() > 1024 => {
                    return Err(refused(whole, "has extended attributes that are too large"));
                }
                Err(Errno::INVAL) if name == pax::CAPABILITY => {
                    return Err(refused(whole, "has file capabilities that are none"));
                }
                other => other.map_err(|e| failed("set an extended attribute of", whole, e))?,
            }
        }
        rustix::fs::fchmod(file, Mode::from_raw_mode(mode))
            .map_err(|e| failed("set the mode of", whole, e))
    }

    /// Owner and times of what is not opened.
    fn set_special(
        &mut self,
        entry: &Entry,
        folder: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<(), ArchiveError> {
        let whole = entry.name.bytes();
        let (_, (uid, gid)) = self.permissions(entry);
        self.stat.ids += u64::from(foreign(entry));
        self.stat.xattrs += entry.xattrs.len() as u64;
        let (uid, gid) = tree::owner(uid, gid);
        let nofollow = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::chownat(folder, name, uid, gid, nofollow)
            .and_then(|()| rustix::fs::utimensat(folder, name, &tree::times(entry.mtime), nofollow))
            .map_err(|e| failed("set what is said of", whole, e))
    }
}

/// Whether it belongs to an id that no sandbox has.
fn foreign(entry: &Entry) -> bool {
    entry.uid >= u64::from(RANGE) || entry.gid >= u64::from(RANGE)
}
