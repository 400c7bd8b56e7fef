//! Puts the layers of an image on each other and writes the tree as one file. In the worker of builds.
//!
//! Invariants: a layer's bytes are hashed as they are unpacked, to the last one, and the hash is what the
//! configuration names, or there is no image; times that come from this run do not get into the tree, so
//! the same layers make the same file. Called by `build::worker`.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

use aws_lc_rs::digest::{Context, SHA256};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Timespec, Timestamps, utimensat};

use super::{Task, finish};
use crate::archive::{Limits, Unpacker, Whiteouts, decompressor};
use crate::image::blobs::written;
use crate::image::build::scratch;
use crate::image::build::worker::{RESULT, Teller, Times, write_image};

/// Bounds of all layers together. The bytes are fewer than the scratch file system has room for.
const LIMITS: Limits = Limits { bytes: 14 << 30, entries: 2_000_000, path: 4096, depth: 128 };
/// Time of whatever no layer has a time for: the first of 2020.
const EPOCH: i64 = 1_577_836_800;

/// Hashes what is read through it.
struct Hashed<R> {
    inner: R,
    hash: Context,
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.hash.update(&buffer[..length]);
        Ok(length)
    }
}

/// Makes the image in the working folder.
///
/// # Errors
/// Which layer, and why.
pub(in crate::image) fn build(teller: &Teller, work: &Path, task: &Task) -> io::Result<()> {
    teller.step("making room");
    let scratch = scratch::mount(work)?;
    let tree = scratch.join("tree");
    // Nanoseconds: a layer of this very second is not taken for this run's. By the clock that file systems
    // take, which is some milliseconds behind the other.
    let begin = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
    std::fs::create_dir(&tree)?;
    let root = open_root(&tree)?;
    let mut unpacker = Unpacker::new(root.try_clone()?, LIMITS, Whiteouts::Apply);
    let mut left_out = [0u64; 3];
    let count = task.layers.len();
    for (number, (layer, diff_id)) in task.layers.iter().zip(&task.diff_ids).enumerate() {
        teller.step(format!("unpacking layer {} of {count}", number + 1));
        let failed = |e: &dyn std::fmt::Display| {
            io::Error::other(format!("layer {} of {count} ({}): {e}", number + 1, layer.digest))
        };
        let file = File::open(&layer.file).map_err(|e| failed(&e))?;
        let plain = decompressor(file, layer.media_type.as_deref()).map_err(|e| failed(&e))?;
        let mut hashed = Hashed { inner: plain, hash: Context::new(&SHA256) };
        let stat = unpacker.layer(&mut hashed).map_err(|e| failed(&e))?;
        for (sum, more) in left_out.iter_mut().zip([stat.devices, stat.xattrs, stat.ids]) {
            *sum += more;
        }
        // What is behind the archive's end counts for the hash too; it is bounded as all that is unpacked.
        io::copy(&mut hashed.by_ref().take(LIMITS.bytes), &mut io::sink())
            .map_err(|e| failed(&e))?;
        let found = written(hashed.hash.finish().as_ref());
        if found != *diff_id {
            let text =
                format!("its bytes are {found}, and the image's configuration names {diff_id}");
            return Err(failed(&text));
        }
        teller.done(u32::try_from(50 + 750 * (number + 1) / count).unwrap_or(800));
    }
    unpacker.finish().map_err(crate::archive::ArchiveError::into_io)?;
    let [devices, xattrs, ids] = left_out;
    if devices + xattrs + ids > 0 {
        teller.step(format!(
            "left out {devices} devices and {xattrs} attributes; {ids} files belong to nobody"
        ));
    }
    teller.step("settling users, folders and times");
    finish::finish(root, &task.config)?;
    let newest = settle_times(&tree, begin)?;
    teller.done(850);
    teller.step("writing the image");
    write_image(&tree, &work.join(RESULT), Times::Latest(newest.saturating_add(1)))?;
    teller.done(980);
    Ok(())
}

fn open_root(tree: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(tree, flags, Mode::empty())?)
}

/// What was made or changed since `begin` gets one fixed time. A tree that nobody else writes to. Answers the
/// newest time in it, seconds since 1970.
fn settle_times(path: &Path, begin: Timespec) -> io::Result<i64> {
    use std::os::unix::fs::MetadataExt as _;
    let meta = std::fs::symlink_metadata(path)?;
    let mut newest = EPOCH;
    if meta.is_dir() {
        for entry in std::fs::read_dir(path)? {
            newest = newest.max(settle_times(&entry?.path(), begin)?);
        }
    }
    if (meta.mtime(), meta.mtime_nsec()) < (begin.tv_sec, begin.tv_nsec) {
        return Ok(newest.max(meta.mtime()));
    }
    let at = Timespec { tv_sec: EPOCH, tv_nsec: 0 };
    let times = Timestamps { last_access: at, last_modification: at };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(newest)
}
