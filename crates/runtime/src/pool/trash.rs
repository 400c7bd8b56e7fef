//! What is to go: folders that nothing names any more, emptied in the background.
//!
//! Owns the pool's `trash` and, for copies that are being made, `unfinished`, in the mode `Folder`.
//! Invariant: what is in either is of no use to anybody; no link in it is followed. Called by `volumes` and
//! by the keeper.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, FileType, Mode};
use rustix::io::Errno;

use super::walk::{FOLDER, names};
use super::{folder, named};

/// Folder of what is to go, in the pool.
pub(super) const TRASH: &str = "trash";
/// Folder of copies that are being made, in the pool.
pub(super) const UNFINISHED: &str = "unfinished";

/// A name that nothing in the trash has.
pub(super) fn fresh() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.unwrap_or_default().as_nanos();
    format!("{now:x}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Gives what earlier engines left unfinished to the trash. Before any copy of this one begins.
///
/// # Errors
/// As renameat(2).
pub(super) fn take_unfinished(root: &Path) -> io::Result<()> {
    let (from, to) = (folder(&root.join(UNFINISHED))?, folder(&root.join(TRASH))?);
    for name in names(from.as_fd())? {
        rustix::fs::renameat(&from, &name, &to, fresh())
            .map_err(|e| named(name.to_string_lossy(), e))?;
    }
    Ok(())
}

/// Moves a folder, with all that is in it, to the trash. `NotFound`: it is not there.
///
/// # Errors
/// As renameat(2).
pub(super) fn throw(root: &Path, from: &OwnedFd, name: &str) -> io::Result<()> {
    rustix::fs::renameat(from, name, folder(&root.join(TRASH))?, fresh())?;
    Ok(())
}

/// Empties the trash. `go_on` is asked before each step.
///
/// # Errors
/// As unlinkat(2).
pub(super) fn empty(root: &Path, go_on: &dyn Fn() -> bool) -> io::Result<()> {
    let trash = folder(&root.join(TRASH))?;
    clear(trash.as_fd(), go_on)
}

/// Removes all that is in a folder of ours. Folders in folders are moved up to it first: so nothing has to
/// be held or walked that a guest could have made deep.
///
/// # Errors
/// As unlinkat(2).
pub(super) fn clear(top: BorrowedFd<'_>, go_on: &dyn Fn() -> bool) -> io::Result<()> {
    while go_on() {
        let found = names(top)?;
        if found.is_empty() {
            return Ok(());
        }
        for name in found {
            if !go_on() {
                return Ok(());
            }
            if !remove_file(top, &name)? {
                flatten(top, &name, go_on)?;
            }
        }
    }
    Ok(())
}

/// Removes a folder's files and moves its folders up; then the folder is empty and goes.
fn flatten(top: BorrowedFd<'_>, name: &CStr, go_on: &dyn Fn() -> bool) -> io::Result<()> {
    let inner = rustix::fs::openat(top, name, FOLDER, Mode::empty())?;
    for name in names(inner.as_fd())? {
        if !go_on() {
            return Ok(());
        }
        if !remove_file(inner.as_fd(), &name)? {
            rustix::fs::renameat(&inner, &name, top, fresh())?;
        }
    }
    Ok(rustix::fs::unlinkat(top, name, AtFlags::REMOVEDIR)?)
}

/// `false`: it is a folder.
fn remove_file(folder: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
    let stat = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
        return Ok(false);
    }
    match rustix::fs::unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(e) => Err(e.into()),
    }
}
