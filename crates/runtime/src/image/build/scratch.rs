//! Where the tree grows: a file system of the build's own, in a file without a name.
//!
//! A build makes and deletes tens of thousands of files, which some host file systems answer with minutes
//! of work (substrate.md §4.4). Invariant: mounted in the worker's namespace only, from a file that is
//! unlinked: both are gone with the worker. Called by the worker.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::tool;

/// Size of the file; sparse.
const SIZE: u64 = 16 << 30;

/// Mounts it below `work`.
///
/// # Errors
/// As mkfs and mount.
pub(in crate::image) fn mount(work: &Path) -> io::Result<PathBuf> {
    let (file, at) = (work.join("scratch.img"), work.join("scratch"));
    File::create(&file)?.set_len(SIZE)?;
    std::fs::create_dir(&at)?;
    tool::run(tool::command("mkfs.btrfs").args(["-q", "-m", "single", "-d", "single"]).arg(&file))?;
    // The loop device lets go of the file when it is unmounted. Nothing here outlives a crash, so nothing
    // needs to be on disk.
    let options = "loop,noatime,nobarrier,commit=300,nodatasum";
    tool::run(tool::command("mount").args(["-t", "btrfs", "-o", options]).arg(&file).arg(&at))?;
    std::fs::remove_file(&file)?;
    Ok(at)
}
