//! Drives put into a running sandbox, and taken out again.
//!
//! Each in a child of init, as file operations are: a path into a file system of the guest's can block for as
//! long as the guest wants. Invariant: the place is resolved in the sandbox's root without following links, so
//! a drive is where it was asked to be, or nowhere. Called by `files`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, UnmountFlags, move_mount};

use super::{DEFAULT_USER, root};
use crate::{FileError, FileErrorKind};

/// How often a place is resolved again that others disturb.
const TRIES: u32 = 10_000;

/// One step of the way, which must be a folder and no link.
fn step(folder: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    for _ in 0..TRIES {
        match rustix::fs::openat2(folder, name, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) => std::thread::yield_now(),
            // For a link as well, which is another sentence.
            Err(Errno::NOTDIR) if is_link(folder, name) => return Err(Errno::LOOP),
            other => return other,
        }
    }
    Err(Errno::AGAIN)
}

fn is_link(folder: &OwnedFd, name: &str) -> bool {
    rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
}

fn top() -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open("/", flags, Mode::empty())
}

/// The folder at `at`; with `make`, folders that are missing are made for the default user.
fn place(at: &str, make: bool) -> Result<OwnedFd, Errno> {
    let mut folder = top()?;
    for name in at.split('/').filter(|name| !name.is_empty()) {
        folder = match step(&folder, name) {
            Err(Errno::NOENT) if make => {
                match rustix::fs::mkdirat(&folder, name, Mode::from_raw_mode(0o755)) {
                    Ok(()) => {
                        let (uid, gid) = (Uid::from_raw(DEFAULT_USER), Gid::from_raw(DEFAULT_USER));
                        let flags = AtFlags::SYMLINK_NOFOLLOW;
                        rustix::fs::chownat(&folder, name, Some(uid), Some(gid), flags)?;
                    }
                    Err(Errno::EXIST) => {}
                    Err(e) => return Err(e),
                }
                step(&folder, name)?
            }
            other => other?,
        };
    }
    Ok(folder)
}

/// Attaches a detached mount; then makes `folders`, which it may have covered.
///
/// # Errors
/// `ELOOP` for a link on the way, `ENOTDIR` for something else than a folder; as move_mount(2).
pub(super) fn mount(at: &str, tree: &OwnedFd, folders: &[String]) -> io::Result<()> {
    let place = place(at, true)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(tree.as_fd(), "", place.as_fd(), "", flags)?;
    for folder in folders {
        // A drive may have something else there; commands will then say so.
        let _ = root::make_folder(folder);
    }
    Ok(())
}

/// Why a drive could not be mounted, for the user.
pub(super) fn refusal(at: &str, error: &io::Error) -> FileError {
    let text = match error.raw_os_error() {
        Some(libc::ELOOP) => "a link is on the way, and links are not followed".to_owned(),
        Some(libc::ENOTDIR) => "something else than a folder is on the way".to_owned(),
        _ => error.to_string().split(" (os error").next().unwrap_or_default().to_owned(),
    };
    let kind = FileErrorKind::Invalid;
    FileError { kind, message: format!("cannot mount a drive at '{at}': {text}") }
}

/// Takes the mount of the folder `dev`/`ino` away; answers whether it was there. With `force` also one that
/// is in use: what has it open keeps that.
///
/// # Errors
/// `EBUSY` when it is in use.
pub(super) fn unmount(at: &str, dev: u64, ino: u64, force: bool) -> io::Result<bool> {
    let found = match place(at, false) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(false),
        other => rustix::fs::fstat(&other?)?,
    };
    if (found.st_dev, found.st_ino) != (dev, ino) {
        return Ok(false);
    }
    let how = if force { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(at, how | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(true),
        // No mount is there after all.
        Err(Errno::INVAL | Errno::NOENT) => Ok(false),
        Err(e) => Err(e.into()),
    }
}
