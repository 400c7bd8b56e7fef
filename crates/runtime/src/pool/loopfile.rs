//! The pool's file: a sparse file with one btrfs file system, behind a loop device.
//!
//! Owns `<data>/pool.btrfs`. Invariant: the file is never attached to two loop devices and its file
//! system never mounted from two: that would destroy it. Who mounts looks first whether a device already
//! backs the file (by device and inode). Called by `pool` when the pool's mode is `Loop`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::mount::MountFlags;

use super::{RESERVE, free_bytes, named, open, sync_folder};
use crate::sys::loopdev;

/// Largest size of a new pool, bytes. The file is sparse: only what is written takes space.
const SIZE: u64 = 256 << 30;

/// The file, made or not.
#[derive(Debug)]
pub(super) struct LoopFile {
    pub(super) file: PathBuf,
}

impl LoopFile {
    /// Writes an empty file system beside, then renames it: a half-made pool is never used.
    ///
    /// # Errors
    /// When `mkfs.btrfs` is missing or fails, or the host has no room.
    pub(super) fn format(&self) -> io::Result<()> {
        let free = free_bytes(self.file.parent().unwrap_or(Path::new("/")))?;
        if free < 2 * RESERVE {
            return Err(io::Error::other(format!(
                "no room for the storage pool: {} MiB are free, at least {} are needed",
                free >> 20,
                (2 * RESERVE) >> 20
            )));
        }
        let beside = self.file.with_extension("new");
        let file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&beside)
            .map_err(|e| named(beside.display(), e))?;
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o600))?;
        file.set_len(SIZE.min(free - RESERVE) & !((1 << 20) - 1))?;
        let made = std::process::Command::new("mkfs.btrfs")
            .args(["-q", "-f", "-m", "single", "-d", "single", "-L", "bivouac"])
            .arg(&beside)
            .stdin(std::process::Stdio::null())
            .output()
            .map_err(|e| named("mkfs.btrfs (Debian package btrfs-progs)", e))?;
        if !made.status.success() {
            let _ = std::fs::remove_file(&beside);
            let text = String::from_utf8_lossy(&made.stderr);
            return Err(io::Error::other(format!("mkfs.btrfs failed: {}", text.trim())));
        }
        file.sync_all()?;
        std::fs::rename(&beside, &self.file)?;
        self.file.parent().map_or(Ok(()), sync_folder)
    }

    /// Mounts it, from the device that has it already or from a new one.
    ///
    /// # Errors
    /// When no loop device can be had, or as mount(2).
    pub(super) fn mount(&self, at: &Path) -> io::Result<()> {
        let device = match self.attached()? {
            Some(device) => device,
            None => self.attach()?,
        };
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
        let options = match crate::fault::loses("pool") {
            false => c"discard=async,space_cache=v2",
            true => c"discard=async,space_cache=v2,nobarrier",
        };
        let mounted = rustix::mount::mount(&device.path, at, "btrfs", flags, options);
        // The device lets go of the file by itself when it is unmounted: it is set to.
        mounted.map_err(|e| named(format!("mount {}", self.file.display()), e))
    }

    /// Lets go of the device of an unmounted pool. Auto-clear acts at the last close; this also covers a
    /// device that was attached without it.
    ///
    /// # Errors
    /// When the devices cannot be looked at.
    pub(super) fn detach(&self) -> io::Result<()> {
        if let Some(device) = self.attached()? {
            let _ = loopdev::detach(device.open.as_fd());
        }
        Ok(())
    }

    /// The loop device that backs the file already.
    fn attached(&self) -> io::Result<Option<Device>> {
        let file = std::fs::metadata(&self.file)?;
        for entry in std::fs::read_dir("/sys/block")? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let busy = Path::new("/sys/block").join(&name).join("loop/backing_file").exists();
            if !name.starts_with("loop") || !busy {
                continue;
            }
            let path = Path::new("/dev").join(&name);
            let Ok(device) = open(&path, OFlags::RDONLY) else { continue };
            // Gone in between: not ours.
            let Ok((dev, inode)) = loopdev::backing(device.as_fd()) else { continue };
            if inode == file.ino() && dev == file.dev() {
                return Ok(Some(Device { path, open: device }));
            }
        }
        Ok(None)
    }

    fn attach(&self) -> io::Result<Device> {
        let control = open(Path::new("/dev/loop-control"), OFlags::RDWR)?;
        let name = self.file.to_string_lossy();
        // Others attach devices too: the free one may be taken when we get to it.
        for _ in 0..64 {
            let number = loopdev::free_number(control.as_fd())?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            make_node(&path, number)?;
            let device = open(&path, OFlags::RDWR)?;
            let direct = open(&self.file, OFlags::RDWR | OFlags::DIRECT);
            let (file, direct_io) = match direct {
                Ok(file) => (file, true),
                Err(_) => (open(&self.file, OFlags::RDWR)?, false),
            };
            match loopdev::attach(device.as_fd(), file.as_fd(), &name, direct_io) {
                Ok(()) => return Ok(Device { path, open: device }),
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {}
                Err(e) if direct_io && e.kind() == io::ErrorKind::InvalidInput => {
                    // The host's file system cannot do direct I/O to loop devices.
                    let file = open(&self.file, OFlags::RDWR)?;
                    match loopdev::attach(device.as_fd(), file.as_fd(), &name, false) {
                        Ok(()) => return Ok(Device { path, open: device }),
                        Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {}
                        Err(e) => return Err(named(path.display(), e)),
                    }
                }
                Err(e) => return Err(named(path.display(), e)),
            }
        }
        Err(io::Error::other("no loop device is free"))
    }
}

/// A loop device, held open so that it stays attached until it is mounted.
struct Device {
    path: PathBuf,
    open: OwnedFd,
}

/// Where no udev runs, a new loop device has no node yet.
fn make_node(path: &Path, number: u32) -> io::Result<()> {
    let mode = Mode::from_raw_mode(0o660);
    let device = rustix::fs::makedev(7, number);
    match rustix::fs::mknodat(CWD, path, FileType::BlockDevice, mode, device) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(e) => Err(named(path.display(), e)),
    }
}
