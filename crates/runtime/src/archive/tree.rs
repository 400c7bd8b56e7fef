//! Steps in a tree that an archive has made: one name at a time, from a descriptor of its folder.
//!
//! Invariant: no function here follows a link, leaves the file system of the root, or takes a name of
//! more than one part.

use std::collections::HashSet;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid,
};
use rustix::io::Errno;

use super::pax::Time;

/// What overlayfs calls a folder that hides what is below it.
pub(crate) const OPAQUE: &str = "trusted.overlay.opaque";

/// What is at a name.
pub(crate) fn look(folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<Option<Stat>> {
    match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

pub(crate) fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Whether it is overlayfs's mark of a removed file.
pub(crate) fn is_whiteout(stat: &Stat) -> bool {
    kind(stat) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Opens a folder in a folder, to read it and to set what is said of it.
pub(crate) fn open_folder(folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let strict = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    Ok(rustix::fs::openat2(folder, name, flags, Mode::empty(), strict)?)
}

/// Makes a folder and opens it.
pub(crate) fn make_folder(folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
    rustix::fs::mkdirat(folder, name, Mode::from_raw_mode(0o700))?;
    let made = open_folder(folder, name)?;
    // mkdir obeys the umask.
    rustix::fs::fchmod(&made, Mode::from_raw_mode(0o755))?;
    Ok(made)
}

/// Makes a file and opens it for writing.
pub(crate) fn make_file(folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(folder, name, flags, Mode::from_raw_mode(0o600))?)
}

/// Makes overlayfs's mark of a removed file.
pub(crate) fn make_whiteout(folder: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    Ok(rustix::fs::mknodat(folder, name, FileType::CharacterDevice, Mode::empty(), 0)?)
}

/// Hides what lower layers have below a folder.
pub(crate) fn make_opaque(folder: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::fs::fsetxattr(folder, OPAQUE, b"y", rustix::fs::XattrFlags::empty())?)
}

pub(crate) fn times(time: Time) -> Timestamps {
    let spec = Timespec { tv_sec: time.seconds, tv_nsec: i64::from(time.nanos) as _ };
    Timestamps { last_access: spec, last_modification: spec }
}

pub(crate) fn owner(uid: u32, gid: u32) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
}

/// Names of the extended attributes of an open file.
pub(crate) fn xattr_names(file: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
    let mut list = vec![0u8; 64 << 10];
    let length = match rustix::fs::flistxattr(file, &mut list[..]) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => 0,
        Err(e) => return Err(e.into()),
    };
    let names = list[..length].split_inclusive(|b| *b == 0);
    Ok(names.filter_map(|name| CString::from_vec_with_nul(name.to_vec()).ok()).collect())
}

/// Removes what is at a name, a folder with all that is in it.
pub(crate) fn remove(folder: BorrowedFd<'_>, name: &[u8], stat: &Stat) -> io::Result<()> {
    if kind(stat) == FileType::Directory {
        clear(open_folder(folder, name)?, &HashSet::new())?;
        rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)?;
    } else {
        rustix::fs::unlinkat(folder, name, AtFlags::empty())?;
    }
    Ok(())
}

/// A folder that is being cleared.
struct Open {
    dir: Dir,
    name: CString,
    /// Something stays in it, or it stays itself.
    stays: bool,
}

/// Empties a folder, but for the inodes to be kept and the folders above them. Answers whether something
/// stayed. As deep as the tree is, so many descriptors are open: the reader bounds both.
pub(crate) fn clear(folder: OwnedFd, keep: &HashSet<u64>) -> io::Result<bool> {
    let mut stack = vec![Open { dir: Dir::new(folder)?, name: CString::default(), stays: false }];
    loop {
        let Some(top) = stack.last_mut() else { return Ok(false) };
        let Some(entry) = top.dir.read().transpose()? else {
            let Some(done) = stack.pop() else { return Ok(false) };
            let Some(parent) = stack.last_mut() else { return Ok(done.stays) };
            if done.stays {
                parent.stays = true;
            } else {
                rustix::fs::unlinkat(parent.dir.fd()?, &done.name, AtFlags::REMOVEDIR)?;
            }
            continue;
        };
        let name = entry.file_name().to_owned();
        if matches!(name.as_bytes(), b"." | b"..") {
            continue;
        }
        let fd = top.dir.fd()?;
        let Some(stat) = look(fd, name.as_bytes())? else { continue };
        let kept = keep.contains(&stat.st_ino);
        if kind(&stat) == FileType::Directory {
            let dir = Dir::new(open_folder(fd, name.as_bytes())?)?;
            stack.push(Open { dir, name, stays: kept });
        } else if kept {
            top.stays = true;
        } else {
            rustix::fs::unlinkat(fd, &name, AtFlags::empty())?;
        }
    }
}

/// Gives folders their times, which writing into them has changed. Walks the whole tree.
pub(crate) fn set_folder_times(
    root: BorrowedFd<'_>,
    times_of: &std::collections::HashMap<u64, Time>,
) -> io::Result<()> {
    let mut stack = vec![Dir::new(open_folder(root, b".")?)?];
    loop {
        let Some(top) = stack.last_mut() else { return Ok(()) };
        let Some(entry) = top.read().transpose()? else {
            let fd = top.fd()?;
            let inode = rustix::fs::fstat(fd)?.st_ino;
            if let Some(time) = times_of.get(&inode) {
                rustix::fs::futimens(fd, &times(*time))?;
            }
            stack.pop();
            continue;
        };
        let name = entry.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        let fd = top.fd()?;
        let is_folder = match entry.file_type() {
            FileType::Unknown => look(fd, name)?.is_some_and(|s| kind(&s) == FileType::Directory),
            known => known == FileType::Directory,
        };
        if is_folder {
            let dir = Dir::new(open_folder(fd, name)?)?;
            stack.push(dir);
        }
    }
}

/// A second descriptor of a folder.
pub(crate) fn again(folder: &OwnedFd) -> io::Result<OwnedFd> {
    open_folder(folder.as_fd(), b".")
}
