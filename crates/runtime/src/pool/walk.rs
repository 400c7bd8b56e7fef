//! What a tree that a guest has made takes on disk.
//!
//! Invariant: no link is followed, nothing but folders and regular files is opened, and a file with
//! several names counts once. Called by `pool`.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};

use super::VolumeUsage;
use crate::sys::fiemap;

/// How a folder of a guest's tree is opened.
pub(super) const FOLDER: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The names in a folder, the last one in the order of bytes first, without the two that every folder
/// has. Taken from the end, they come in order.
///
/// # Errors
/// As getdents(2).
pub(super) fn names(folder: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(folder)? {
        let name = entry?.file_name().to_owned();
        if !matches!(name.as_bytes(), b"." | b"..") {
            names.push(name);
        }
    }
    names.sort_unstable_by(|a, b| b.cmp(a));
    Ok(names)
}

/// A walk through a tree of any depth that holds one folder open: going up is "..", and the folder found
/// there must be the one that it came from.
pub(super) struct Walk {
    folder: OwnedFd,
    levels: Vec<Level>,
}

struct Level {
    /// Device and inode.
    id: (u64, u64),
    left: Vec<CString>,
}

/// What a walk comes by.
pub(super) enum Step {
    /// A name in the present folder. A folder is entered by [`Walk::enter`], or left out.
    Entry(CString, rustix::fs::Stat),
    /// The present folder is done; the walk goes up when it is asked again.
    Up,
}

impl Walk {
    /// # Errors
    /// As fstat(2) and getdents(2).
    pub(super) fn new(top: OwnedFd) -> io::Result<Self> {
        let mut walk = Self { folder: top, levels: Vec::new() };
        walk.push()?;
        Ok(walk)
    }

    fn push(&mut self) -> io::Result<()> {
        let stat = rustix::fs::fstat(&self.folder)?;
        let left = names(self.folder.as_fd())?;
        self.levels.push(Level { id: (stat.st_dev, stat.st_ino), left });
        Ok(())
    }

    /// How many folders deep the present one is: the topmost is 1.
    pub(super) fn depth(&self) -> usize {
        self.levels.len()
    }

    /// The present folder.
    pub(super) fn folder(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// The topmost folder, opened again.
    ///
    /// # Errors
    /// When the tree changes under the walk's feet.
    pub(super) fn top(&self) -> io::Result<OwnedFd> {
        let mut top = self.folder.try_clone()?;
        for level in self.levels.iter().rev().skip(1) {
            top = up(top.as_fd(), level.id)?;
        }
        Ok(top)
    }

    /// The next thing, or `None` behind the `Up` of the topmost folder.
    ///
    /// # Errors
    /// When the tree changes under the walk's feet.
    pub(super) fn next(&mut self) -> io::Result<Option<Step>> {
        loop {
            let Some(level) = self.levels.last_mut() else { return Ok(None) };
            let Some(name) = level.left.pop() else { return Ok(Some(Step::Up)) };
            match rustix::fs::statat(&self.folder, &name, AtFlags::SYMLINK_NOFOLLOW) {
                // Removed since it was listed.
                Err(rustix::io::Errno::NOENT) => {}
                other => return Ok(Some(Step::Entry(name, other?))),
            }
        }
    }

    /// Goes into a folder of the present one.
    ///
    /// # Errors
    /// As openat(2).
    pub(super) fn enter(&mut self, name: &CStr) -> io::Result<()> {
        self.folder = rustix::fs::openat(&self.folder, name, FOLDER, Mode::empty())?;
        self.push()
    }

    /// Leaves the present folder, after [`Step::Up`].
    ///
    /// # Errors
    /// When the folder was moved meanwhile.
    pub(super) fn leave(&mut self) -> io::Result<()> {
        self.levels.pop();
        let Some(above) = self.levels.last() else { return Ok(()) };
        self.folder = up(self.folder.as_fd(), above.id)?;
        Ok(())
    }
}

/// The folder above, which must be the expected one.
pub(super) fn up(folder: BorrowedFd<'_>, expected: (u64, u64)) -> io::Result<OwnedFd> {
    let above = rustix::fs::openat(folder, c"..", FOLDER, Mode::empty())?;
    let stat = rustix::fs::fstat(&above)?;
    if (stat.st_dev, stat.st_ino) != expected {
        return Err(io::Error::other("a folder was moved while its tree was being read"));
    }
    Ok(above)
}

/// What a tree takes, `skip`ped names of its topmost folder left out. Bytes that are shared with other
/// files are told where the file system knows.
///
/// # Errors
/// As openat(2).
pub(super) fn usage(
    top: OwnedFd,
    unique: bool,
    skip: impl Fn(&CStr) -> bool,
) -> io::Result<VolumeUsage> {
    let mut walk = Walk::new(top)?;
    let mut seen = HashSet::new();
    let mut usage = VolumeUsage { bytes: 0, unique_bytes: unique.then_some(0) };
    while let Some(step) = walk.next()? {
        let Step::Entry(name, stat) = step else {
            walk.leave()?;
            continue;
        };
        if walk.depth() == 1 && skip(&name) {
            continue;
        }
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => walk.enter(&name)?,
            FileType::RegularFile if stat.st_nlink <= 1 || seen.insert(stat.st_ino) => {
                let bytes = (stat.st_blocks as u64).saturating_mul(512);
                usage.bytes += bytes;
                if let Some(sum) = usage.unique_bytes
                    && bytes > 0
                {
                    usage.unique_bytes = unshared(walk.folder(), &name, bytes)?.map(|n| sum + n);
                }
            }
            _ => {}
        }
    }
    Ok(usage)
}

/// Bytes of a file that no other file shares. `None`: the file system cannot tell.
fn unshared(folder: BorrowedFd<'_>, name: &CStr, bytes: u64) -> io::Result<Option<u64>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match rustix::fs::openat(folder, name, flags | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => file,
        Err(rustix::io::Errno::NOENT) => return Ok(Some(0)),
        Err(e) => return Err(e.into()),
    };
    if !FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode).is_file() {
        return Ok(Some(0));
    }
    Ok(fiemap::shared_bytes(file.as_fd())?.map(|shared| bytes.saturating_sub(shared)))
}
