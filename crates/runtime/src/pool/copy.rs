//! A complete copy of a tree that a guest has made: on file systems that copy no volume by themselves.
//!
//! Kept are owners, modes, times, extended attributes (an overlay's and capabilities among them), names
//! of one file, whiteouts and holes; data is shared where the file system can (FICLONE). Invariant: no
//! link is followed and nothing outside of the two folders is touched, whatever the tree holds; two
//! folders are open at a time, so its depth has no limit. The caller copies to a place that nobody uses
//! yet, and renames. Called by `volumes` and `migrate`.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, SeekFrom, Stat, Timespec, Timestamps, Uid};
use rustix::io::Errno;

use super::walk::{FOLDER, Step, Walk, up};

/// Bytes that are copied at a time where the kernel cannot do it by itself.
const BUFFER: usize = 1 << 20;
/// Most bytes that the names or one value of attributes take.
const ATTRIBUTES: usize = 64 << 10;

/// Copies what is in the folder `from`, and the folder's own attributes, to the empty folder `to`. Names
/// at the top that are to `skip` are left out. `on` is asked before each entry and may end it all.
///
/// # Errors
/// The first thing that cannot be copied, with its path. `to` is then incomplete.
pub(super) fn tree(
    from: OwnedFd,
    to: OwnedFd,
    skip: &dyn Fn(&CStr) -> bool,
    on: &mut dyn FnMut(u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut copier = Copier {
        walk: Walk::new(from)?,
        to,
        above: Vec::new(),
        path: Vec::new(),
        links: None,
        seen: HashSet::new(),
        clones: true,
        buffer: Vec::new(),
        names: vec![0; ATTRIBUTES],
        value: vec![0; ATTRIBUTES],
    };
    let copied = copier.run(skip, on);
    let path = copier.path.join(&b'/');
    let path = String::from_utf8_lossy(&path).escape_debug().to_string();
    copied.map_err(|e| io::Error::new(e.kind(), format!("/{path}: {e}")))
}

struct Copier {
    walk: Walk,
    /// Where the walk's present folder goes.
    to: OwnedFd,
    /// Device and inode of the folders above `to`.
    above: Vec<(u64, u64)>,
    /// For messages.
    path: Vec<Vec<u8>>,
    /// A folder at the top of the copy with one name of each file that has several, while it lasts.
    links: Option<(OwnedFd, String)>,
    seen: HashSet<(u64, u64)>,
    /// The file systems can share data, as far as is known.
    clones: bool,
    buffer: Vec<u8>,
    names: Vec<u8>,
    value: Vec<u8>,
}

impl Copier {
    fn run(
        &mut self,
        skip: &dyn Fn(&CStr) -> bool,
        on: &mut dyn FnMut(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        while let Some(step) = self.walk.next()? {
            match step {
                Step::Up => self.leave()?,
                Step::Entry(name, _) if self.walk.depth() == 1 && skip(&name) => {}
                Step::Entry(name, stat) => {
                    on((stat.st_blocks as u64).saturating_mul(512))?;
                    self.path.push(name.as_bytes().to_vec());
                    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                        self.enter(&name)?;
                        continue;
                    }
                    self.entry(&name, &stat)?;
                    self.path.pop();
                }
            }
        }
        Ok(())
    }

    fn enter(&mut self, name: &CStr) -> io::Result<()> {
        // Closed until it is done; it then gets its own mode.
        rustix::fs::mkdirat(&self.to, name, Mode::RWXU)?;
        let inner = rustix::fs::openat(&self.to, name, FOLDER, Mode::empty())?;
        let outer = rustix::fs::fstat(&self.to)?;
        self.walk.enter(name)?;
        self.above.push((outer.st_dev, outer.st_ino));
        self.to = inner;
        Ok(())
    }

    /// The present folder is copied: its own attributes, which the copying has changed, and up.
    fn leave(&mut self) -> io::Result<()> {
        if self.walk.depth() == 1
            && let Some((links, name)) = self.links.take()
        {
            for link in super::walk::names(links.as_fd())? {
                rustix::fs::unlinkat(&links, &link, AtFlags::empty())?;
            }
            rustix::fs::unlinkat(&self.to, name, AtFlags::REMOVEDIR)?;
        }
        let from = self.walk.folder().try_clone_to_owned()?;
        let stat = rustix::fs::fstat(&from)?;
        self.dress(from.as_fd(), &self.to.try_clone()?, &stat)?;
        if let Some(above) = self.above.pop() {
            self.to = up(self.to.as_fd(), above)?;
        }
        self.walk.leave()?;
        self.path.pop();
        Ok(())
    }

    /// Everything but a folder.
    fn entry(&mut self, name: &CStr, stat: &Stat) -> io::Result<()> {
        let kind = FileType::from_raw_mode(stat.st_mode);
        // Whiteouts are all alike: the kernel gives them one inode to save space, with too many names.
        let whiteout = kind == FileType::CharacterDevice && stat.st_rdev == 0;
        let several = stat.st_nlink > 1 && !whiteout;
        let id = format!("{:x}-{:x}", stat.st_dev, stat.st_ino);
        if several && self.seen.contains(&(stat.st_dev, stat.st_ino)) {
            let to = self.to.try_clone()?;
            let (links, _) = self.links()?;
            return Ok(rustix::fs::linkat(links, &id, &to, name, AtFlags::empty())?);
        }
        match kind {
            FileType::RegularFile => self.file(name)?,
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(self.walk.folder(), name, Vec::new())?;
                rustix::fs::symlinkat(&target, &self.to, name)?;
                self.dress_node(name, stat, false)?;
            }
            kind => {
                let closed = Mode::RUSR | Mode::WUSR;
                rustix::fs::mknodat(&self.to, name, kind, closed, stat.st_rdev)?;
                self.dress_node(name, stat, true)?;
            }
        }
        if several {
            let to = self.to.try_clone()?;
            let (links, _) = self.links()?;
            rustix::fs::linkat(&to, name, links, &id, AtFlags::empty())?;
            self.seen.insert((stat.st_dev, stat.st_ino));
        }
        Ok(())
    }

    /// The folder of first names. It is in the copy itself: no name leads from one volume into another.
    fn links(&mut self) -> io::Result<&(OwnedFd, String)> {
        if self.links.is_none() {
            let mut top = self.to.try_clone()?;
            for above in self.above.iter().rev() {
                top = up(top.as_fd(), *above)?;
            }
            let mut name = String::from(".bivouac-links");
            // Names of the guest's that are copied later must not meet it either.
            let taken = super::walk::names(self.walk.top()?.as_fd())?;
            while taken.iter().any(|taken| taken.as_bytes() == name.as_bytes()) {
                name.push('_');
            }
            rustix::fs::mkdirat(&top, &name, Mode::RWXU)?;
            let links = rustix::fs::openat(&top, &name, FOLDER, Mode::empty())?;
            self.links = Some((links, name));
        }
        self.links.as_ref().ok_or_else(|| io::Error::other("no folder of first names"))
    }

    fn file(&mut self, name: &CStr) -> io::Result<()> {
        // Not a pipe, should one be there by now: it would have to wait for a writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let flags = flags | OFlags::CLOEXEC | OFlags::NOATIME;
        let from = rustix::fs::openat(self.walk.folder(), name, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&from)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::other("it was replaced while it was being copied"));
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let to = rustix::fs::openat(&self.to, name, flags, Mode::RUSR | Mode::WUSR)?;
        self.data(from.as_fd(), to.as_fd(), stat.st_size as u64)?;
        self.dress(from.as_fd(), &to, &stat)
    }

    fn data(&mut self, from: BorrowedFd<'_>, to: BorrowedFd<'_>, size: u64) -> io::Result<()> {
        if size == 0 {
            return Ok(());
        }
        if self.clones {
            match rustix::fs::ioctl_ficlone(to, from) {
                Ok(()) => return Ok(()),
                Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::NOTTY | Errno::NOSYS) => {
                    self.clones = false;
                }
                // This file alone, for example one whose data lies in its inode.
                Err(Errno::INVAL) => {}
                Err(e) => return Err(e.into()),
            }
        }
        let mut at = 0;
        while at < size {
            let start = match rustix::fs::seek(from, SeekFrom::Data(at)) {
                Ok(start) => start,
                // Nothing but a hole follows.
                Err(Errno::NXIO) => break,
                Err(e) => return Err(e.into()),
            };
            at = rustix::fs::seek(from, SeekFrom::Hole(start))?.min(size);
            self.range(from, to, start, at)?;
        }
        Ok(rustix::fs::ftruncate(to, size)?)
    }

    fn range(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        start: u64,
        end: u64,
    ) -> io::Result<()> {
        let (mut read, mut written) = (start, start);
        while read < end {
            let wanted = usize::try_from(end - read).unwrap_or(usize::MAX).min(1 << 30);
            let there = (Some(&mut read), Some(&mut written));
            match rustix::fs::copy_file_range(from, there.0, to, there.1, wanted) {
                // Cut short meanwhile: what is missing reads as zeroes.
                Ok(0) => return Ok(()),
                Ok(_) => continue,
                Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {}
                Err(e) => return Err(e.into()),
            }
            self.buffer.resize(BUFFER, 0);
            let wanted = usize::try_from(end - read).unwrap_or(BUFFER).min(BUFFER);
            let got = rustix::io::pread(from, &mut self.buffer[..wanted], read)?;
            if got == 0 {
                return Ok(());
            }
            let mut done = 0;
            while done < got {
                done += rustix::io::pwrite(to, &self.buffer[done..got], read + done as u64)?;
            }
            read += got as u64;
            written = read;
        }
        Ok(())
    }

    /// Owner, mode, attributes and times, in this order: each takes away something of those behind it.
    fn dress(&mut self, from: BorrowedFd<'_>, to: &OwnedFd, stat: &Stat) -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        rustix::fs::fchown(to, Some(uid), Some(gid))?;
        rustix::fs::fchmod(to, Mode::from_raw_mode(stat.st_mode & 0o7777))?;
        let len = rustix::fs::flistxattr(from, &mut self.names)?;
        for name in attributes(&self.names[..len]) {
            let len = rustix::fs::fgetxattr(from, name, &mut self.value)?;
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::fsetxattr(to, name, &self.value[..len], flags)
                .map_err(|e| refused(name, e))?;
        }
        Ok(rustix::fs::futimens(to, &times(stat))?)
    }

    /// As [`Copier::dress`], for what cannot be opened: by name, below the folders that are open.
    fn dress_node(&mut self, name: &CStr, stat: &Stat, mode: bool) -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
        let link = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::chownat(&self.to, name, Some(uid), Some(gid), link)?;
        let to = below(self.to.as_fd(), name)?;
        if mode {
            // No call changes the mode of a name without following it; here it is no link.
            let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
            rustix::fs::chmodat(&self.to, name, mode, AtFlags::empty())?;
        }
        let from = below(self.walk.folder(), name)?;
        let len = match rustix::fs::llistxattr(&from, &mut self.names) {
            Err(Errno::OPNOTSUPP) => 0,
            other => other?,
        };
        for name in attributes(&self.names[..len]) {
            let len = rustix::fs::lgetxattr(&from, name, &mut self.value)?;
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::lsetxattr(&to, name, &self.value[..len], flags)
                .map_err(|e| refused(name, e))?;
        }
        Ok(rustix::fs::utimensat(&self.to, name, &times(stat), link)?)
    }
}

/// The path of a name below an open folder, for calls that take no folder. The name itself is not
/// followed by those.
fn below(folder: BorrowedFd<'_>, name: &CStr) -> io::Result<CString> {
    let mut path = format!("/proc/self/fd/{}/", folder.as_raw_fd()).into_bytes();
    path.extend_from_slice(name.to_bytes());
    Ok(CString::new(path)?)
}

/// The names in a list of attributes, without btrfs's own (of compression), which others do not know.
pub(super) fn attributes(list: &[u8]) -> impl Iterator<Item = &CStr> {
    list.split_inclusive(|byte| *byte == 0)
        .filter_map(|name| CStr::from_bytes_with_nul(name).ok())
        .filter(|name| !name.to_bytes().starts_with(b"btrfs."))
}

fn refused(name: &CStr, e: Errno) -> io::Error {
    let e = io::Error::from(e);
    io::Error::new(e.kind(), format!("the attribute {} is not taken: {e}", name.to_string_lossy()))
}

fn times(stat: &Stat) -> Timestamps {
    let time = |sec, nsec| Timespec { tv_sec: sec, tv_nsec: nsec };
    Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec as _),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec as _),
    }
}
