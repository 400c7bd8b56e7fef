//! The pool's file: a sparse file with one btrfs file system, behind a loop device.
//!
//! Owns `<data>/pool.btrfs`. Invariant: the file is never attached to two loop devices and its file
//! system never mounted from two: that would destroy it. Who mounts looks first whether a device already
//! backs the file (by device and inode). Called by `pool` when the pool's mode is `Loop`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::mount::{FsOpenFlags, MountFlags, fsopen};

use super::migrate::reach;
use super::{RESERVE, folder, free_bytes, named, open, sync_folder};
use crate::sys::{btrfs, loopdev};

/// Makes file systems.
const MKFS: &str = "mkfs.btrfs";
/// A smaller step than this is not worth its transactions, bytes.
const LEAST_STEP: u64 = 64 << 20;
/// Where a btrfs has its name: in its first super block.
const MAGIC: (u64, &[u8; 8]) = ((64 << 10) + 0x40, b"_BHRfS_M");

/// How big the file is, and when it grows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Of a new file, bytes.
    first: u64,
    /// It grows by this, or by a quarter if that is more.
    step: u64,
    /// It grows when less is free in it.
    low: u64,
}

impl Sizes {
    pub(super) const USUAL: Self = Self { first: 16 << 30, step: 16 << 30, low: 6 << 30 };

    /// All in proportion to a first size, so that a test sees a small pool grow.
    pub(super) const fn from_first(first: u64) -> Self {
        Self { first, step: first, low: first / 2 }
    }
}

/// The file, made or not.
#[derive(Debug, Clone)]
pub(super) struct LoopFile {
    file: PathBuf,
    sizes: Sizes,
    /// Held by who grows it: by an older size it would be cut.
    growing: Arc<Mutex<()>>,
}

impl LoopFile {
    pub(super) fn new(file: PathBuf, sizes: Sizes) -> Self {
        Self { file, sizes, growing: Arc::default() }
    }

    pub(super) fn exists(&self) -> bool {
        self.file.exists()
    }

    /// Writes an empty file system beside, then renames it: a half-made pool is never used.
    ///
    /// # Errors
    /// When `mkfs.btrfs` is missing or fails, or the host has no room.
    pub(super) fn format(&self) -> io::Result<()> {
        let free = free_bytes(self.file.parent().unwrap_or(Path::new("/")))?;
        if free < 2 * RESERVE {
            let text = format!(
                "no room for the storage pool: {} MiB are free, at least {} are needed",
                free >> 20,
                (2 * RESERVE) >> 20
            );
            return Err(io::Error::new(io::ErrorKind::StorageFull, text));
        }
        let beside = self.file.with_extension("new");
        let file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&beside)
            .map_err(|e| named(beside.display(), e))?;
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o600))?;
        file.set_len(self.sizes.first.min(free - RESERVE) & !((1 << 20) - 1))?;
        let program = mkfs().unwrap_or_else(|| PathBuf::from(MKFS));
        let made = std::process::Command::new(program)
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
        mounted.map_err(|e| self.damaged(&e.into()))?;
        self.settle(at)
    }

    /// The file is no bigger than the device, nor that than the file system: a growth that was cut short
    /// is finished.
    fn settle(&self, root: &Path) -> io::Result<()> {
        let device = self.attached()?.ok_or_else(|| {
            io::Error::other(format!("no loop device backs {}", self.file.display()))
        })?;
        loopdev::follow_size(device.open.as_fd())
            .map_err(|e| named(format!("resize {}", device.path.display()), e))?;
        btrfs::resize_to_device(folder(root)?.as_fd())
            .map_err(|e| named(format!("grow the file system in {}", self.file.display()), e))
    }

    /// What a failed mount may mean, and what to do.
    fn damaged(&self, e: &io::Error) -> io::Error {
        let file = self.file.display();
        let why = match self.has_magic() {
            Ok(false) => "its first block is not that of a btrfs: it was overwritten or cut",
            _ => "the kernel's log (dmesg) says more",
        };
        let text = format!(
            "the pool {file} cannot be mounted: {e}; {why}. Nothing was changed. Look at it with `btrfs check \
             --readonly {file}`; files can be saved with `mount -o loop,ro,rescue=all {file} DIR`; an empty \
             pool is made when the file is moved away"
        );
        io::Error::new(e.kind(), text)
    }

    fn has_magic(&self) -> io::Result<bool> {
        let mut found = [0; 8];
        let file = open(&self.file, OFlags::RDONLY)?;
        Ok(rustix::io::pread(&file, &mut found[..], MAGIC.0)? == 8 && found == *MAGIC.1)
    }

    /// Of a new file when nothing else is wanted, bytes.
    pub(super) const fn first_size() -> u64 {
        Sizes::USUAL.first
    }

    /// Bytes in it that no new session may take.
    pub(super) const fn reserve(&self) -> u64 {
        self.sizes.first / 8
    }

    /// Bytes that can still be written in the pool, as far as is known: what the kernel shows as free,
    /// without what it has promised to writes that wait in memory.
    ///
    /// # Errors
    /// As statvfs(3).
    pub(super) fn room(root: &Path) -> io::Result<u64> {
        let name = btrfs::file_system(folder(root)?.as_fd())?;
        let promised =
            std::fs::read_to_string(format!("/sys/fs/btrfs/{name}/allocation/data/bytes_may_use"));
        let promised = promised.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        Ok(free_bytes(root)?.saturating_sub(promised))
    }

    /// Grows the file by a step, if it has less left than it should have. Answers its new size if it did.
    ///
    /// # Errors
    /// As the system calls.
    pub(super) fn grow_if_low(&self, root: &Path) -> io::Result<Option<u64>> {
        let _alone = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        if Self::room(root)? >= self.sizes.low {
            return Ok(None);
        }
        let now = std::fs::metadata(&self.file).map_err(|e| named(self.file.display(), e))?.len();
        let wanted = now + self.sizes.step.max(now / 4);
        let size = wanted.min(now + growth_left(&self.file)?) & !((1 << 20) - 1);
        if size < now + LEAST_STEP {
            return Ok(None);
        }
        let file = open(&self.file, OFlags::RDWR)?;
        rustix::fs::ftruncate(&file, size).map_err(|e| named(self.file.display(), e))?;
        // A file system that is bigger than its file could not be mounted after a power cut.
        rustix::fs::fsync(&file).map_err(|e| named(self.file.display(), e))?;
        reach("grown");
        self.settle(root)?;
        Ok(Some(size))
    }

    /// How long it takes at the least until the room is low, for a look in time.
    ///
    /// # Errors
    /// As statvfs(3).
    pub(super) fn next_look(&self, root: &Path) -> io::Result<Duration> {
        // Nobody writes faster than this through a loop device.
        const FASTEST: u64 = 4 << 30;
        let spare = Self::room(root)?.saturating_sub(self.sizes.low);
        // Low and not to be helped, for want of room on the host: no hurry.
        let ms = if spare == 0 { 1000 } else { (spare / (FASTEST / 1000)).clamp(100, 5000) };
        Ok(Duration::from_millis(ms))
    }

    /// Why there can be no such pool on this host. `None`: nothing is seen to be in the way.
    pub(super) fn missing() -> Option<String> {
        let control = open(Path::new("/dev/loop-control"), OFlags::RDWR);
        if let Err(e) = control.and_then(|control| loopdev::free_number(control.as_fd())) {
            return Some(format!("there are no loop devices: {e}"));
        }
        // Loads the module where there is one.
        if let Err(e) = fsopen("btrfs", FsOpenFlags::FSOPEN_CLOEXEC) {
            return Some(format!("this kernel has no btrfs: {e}"));
        }
        mkfs().is_none().then(|| format!("{MKFS} is not installed (Debian package btrfs-progs)"))
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

/// Bytes by which a pool's file may still grow: all that it could ever fill has to fit beside the reserve.
///
/// # Errors
/// As stat(2) and statvfs(3).
pub(super) fn growth_left(file: &Path) -> io::Result<u64> {
    let now = std::fs::metadata(file).map_err(|e| named(file.display(), e))?;
    let host = free_bytes(file.parent().unwrap_or(Path::new("/")))?;
    let most = (now.blocks() * 512).saturating_add(host.saturating_sub(RESERVE));
    Ok(most.saturating_sub(now.len()))
}

/// Where the program is. A PATH often lacks the folders of such.
fn mkfs() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut folders = std::env::split_paths(&path).chain(usual);
    folders.find_map(|folder| Some(folder.join(MKFS)).filter(|file| file.is_file()))
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
