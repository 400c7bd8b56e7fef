//! The hash of a tree: what a copy is compared by.
//!
//! Names, kinds, owners, modes, times of change, attributes, which names are one file, and all data that is
//! not zero, so that a hole is the same as zeroes on disk. Invariant: equal trees have equal hashes on any
//! file system; no link is followed. Called by `migrate`.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use super::copy::attributes;
use super::walk::{Step, Walk};

/// Data is looked at in blocks of this size.
const BLOCK: usize = 4096;
/// Blocks that are read at once.
const READ: usize = 256 * BLOCK;
/// Times outside of this are kept by some file systems only (ext4: 1901 to 2446), seconds.
const TIMES: (i64, i64) = (-(1 << 31), 15_032_385_535);

/// The hash of what is in a folder, and of the folder's own attributes. Names at the top that are to
/// `skip` are left out.
///
/// # Errors
/// As openat(2).
pub(super) fn tree(top: OwnedFd, skip: &dyn Fn(&CStr) -> bool) -> io::Result<blake3::Hash> {
    let mut digest = Digest {
        hash: blake3::Hasher::new(),
        seen: HashMap::new(),
        buffer: vec![0; READ],
        list: vec![0; 64 << 10],
        value: vec![0; 64 << 10],
    };
    let mut walk = Walk::new(top)?;
    while let Some(step) = walk.next()? {
        match step {
            Step::Up => {
                let stat = rustix::fs::fstat(walk.folder())?;
                digest.tag(b"up");
                digest.stat(&stat);
                let path = format!("/proc/self/fd/{}", walk.folder().as_raw_fd());
                digest.attributes(&CString::new(path)?, true)?;
                walk.leave()?;
            }
            Step::Entry(name, _) if walk.depth() == 1 && skip(&name) => {}
            Step::Entry(name, stat) => {
                digest.tag(name.as_bytes());
                if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                    walk.enter(&name)?;
                } else {
                    digest.entry(walk.folder(), &name, &stat)?;
                }
            }
        }
    }
    Ok(digest.hash.finalize())
}

struct Digest {
    hash: blake3::Hasher,
    /// The place in the tree of the first name of each file that has several.
    seen: HashMap<(u64, u64), u64>,
    buffer: Vec<u8>,
    list: Vec<u8>,
    value: Vec<u8>,
}

impl Digest {
    fn tag(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.hash.update(bytes);
    }

    fn number(&mut self, number: u64) {
        self.hash.update(&number.to_le_bytes());
    }

    fn stat(&mut self, stat: &Stat) {
        let seconds = stat.st_mtime.clamp(TIMES.0, TIMES.1);
        let numbers = [stat.st_mode, stat.st_uid, stat.st_gid].map(u64::from);
        for number in numbers {
            self.number(number);
        }
        self.number(seconds as u64);
        if seconds == stat.st_mtime {
            self.number(stat.st_mtime_nsec);
        }
    }

    fn entry(&mut self, folder: BorrowedFd<'_>, name: &CStr, stat: &Stat) -> io::Result<()> {
        let kind = FileType::from_raw_mode(stat.st_mode);
        self.stat(stat);
        let whiteout = kind == FileType::CharacterDevice && stat.st_rdev == 0;
        if stat.st_nlink > 1 && !whiteout {
            let next = self.seen.len() as u64;
            let first = *self.seen.entry((stat.st_dev, stat.st_ino)).or_insert(next);
            self.number(first);
            if first != next {
                return Ok(());
            }
        }
        match kind {
            FileType::RegularFile => {
                self.number(stat.st_size as u64);
                self.data(folder, name)?;
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(folder, name, Vec::new())?;
                self.tag(target.as_bytes());
            }
            _ => self.number(stat.st_rdev),
        }
        let mut path = format!("/proc/self/fd/{}/", folder.as_raw_fd()).into_bytes();
        path.extend_from_slice(name.to_bytes());
        self.attributes(&CString::new(path)?, false)
    }

    /// The last part of the path is followed for folders only: theirs is a descriptor of ours.
    fn attributes(&mut self, path: &CStr, folder: bool) -> io::Result<()> {
        let listed = match folder {
            true => rustix::fs::listxattr(path, &mut self.list),
            false => rustix::fs::llistxattr(path, &mut self.list),
        };
        let len = match listed {
            Err(Errno::OPNOTSUPP) => 0,
            other => other?,
        };
        let mut names: Vec<CString> = attributes(&self.list[..len]).map(CStr::to_owned).collect();
        names.sort_unstable();
        for name in names {
            let len = match folder {
                true => rustix::fs::getxattr(path, &name, &mut self.value)?,
                false => rustix::fs::lgetxattr(path, &name, &mut self.value)?,
            };
            let value = blake3::hash(&self.value[..len]);
            self.tag(name.as_bytes());
            self.hash.update(value.as_bytes());
        }
        self.tag(b"");
        Ok(())
    }

    fn data(&mut self, folder: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let flags = flags | OFlags::NOATIME | OFlags::CLOEXEC;
        let file = rustix::fs::openat(folder, name, flags, Mode::empty())?;
        let mut at = 0;
        loop {
            let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(Errno::NXIO) => break,
                Err(e) => return Err(e.into()),
            };
            at = rustix::fs::seek(&file, SeekFrom::Hole(start))?;
            // Whole blocks, wherever this file system's own begin.
            let from = start - start % BLOCK as u64;
            at = at.next_multiple_of(BLOCK as u64);
            self.range(file.as_fd(), from, at)?;
        }
        self.tag(b"end");
        Ok(())
    }

    fn range(&mut self, file: BorrowedFd<'_>, start: u64, end: u64) -> io::Result<()> {
        let mut at = start;
        while at < end {
            let wanted = usize::try_from(end - at).unwrap_or(READ).min(READ);
            let got = fill(file, &mut self.buffer[..wanted], at)?;
            for (index, block) in self.buffer[..got].chunks(BLOCK).enumerate() {
                if block.iter().any(|byte| *byte != 0) {
                    self.hash.update(&(at + (index * BLOCK) as u64).to_le_bytes());
                    self.hash.update(block);
                }
            }
            if got < wanted {
                return Ok(());
            }
            at += got as u64;
        }
        Ok(())
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(file: BorrowedFd<'_>, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match rustix::io::pread(file, &mut buffer[done..], at + done as u64)? {
            0 => break,
            got => done += got,
        }
    }
    Ok(done)
}
