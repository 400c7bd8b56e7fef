//! The storage pool: one btrfs file system in a sparse file of the data folder.
//!
//! Owns `<data>/pool.btrfs` and its mount at `<data>/pool`, with `sessions/` (one subvolume each),
//! `snapshots/`, `logs/`, `trust/` and `images/`. Invariant: the file is never attached to two loop devices and
//! its file system never mounted from two: that would destroy it. An engine that starts looks first
//! whether a device already backs the file (by device and inode). Called by `linux`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::Space;
use crate::linux::rootfs;
use crate::sys::{btrfs, loopdev};

/// Largest size of a new pool, bytes. The file is sparse: only what is written takes space.
const SIZE: u64 = 256 << 30;
/// Free space that stays on the host's file system, bytes.
pub const RESERVE: u64 = 2 << 30;
/// Deepest tree that a walk follows; deeper folders count as empty.
const MAX_DEPTH: usize = 2000;

/// A mounted pool.
#[derive(Debug)]
pub(crate) struct Pool {
    file: PathBuf,
    root: PathBuf,
}

fn named(what: impl std::fmt::Display, e: impl Into<io::Error>) -> io::Error {
    let e = e.into();
    io::Error::new(e.kind(), format!("{what}: {e}"))
}

fn open(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| named(path.display(), e))
}

fn folder(path: &Path) -> io::Result<OwnedFd> {
    open(path, OFlags::RDONLY | OFlags::DIRECTORY)
}

impl Pool {
    /// Makes the pool on first use, and mounts it unless it is.
    ///
    /// # Errors
    /// When btrfs, loop devices or `mkfs.btrfs` are missing, or the host has no room.
    pub(crate) fn open(data: &Path) -> io::Result<Self> {
        let pool = Self { file: data.join("pool.btrfs"), root: data.join("pool") };
        match std::fs::DirBuilder::new().mode(0o700).create(&pool.root) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            other => other.map_err(|e| named(pool.root.display(), e))?,
        }
        if !pool.file.exists() {
            pool.format()?;
        }
        if !pool.is_mounted()? {
            pool.mount()?;
        }
        // Turning on what is on already is an error that says nothing.
        let _ = btrfs::enable_simple_quota(folder(&pool.root)?.as_fd());
        for name in ["sessions", "snapshots", "logs", "images", "trust", "trust/bases"] {
            match std::fs::DirBuilder::new().mode(0o711).create(pool.root.join(name)) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                other => other.map_err(|e| named(pool.root.join(name).display(), e))?,
            }
        }
        // Copies of bundles of images that may be gone: made again when wanted.
        for entry in std::fs::read_dir(pool.trust().join("bases"))? {
            let _ = std::fs::remove_file(entry?.path());
        }
        Ok(pool)
    }

    /// Writes an empty file system beside, then renames it: a half-made pool is never used.
    fn format(&self) -> io::Result<()> {
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
        std::fs::rename(&beside, &self.file)
    }

    fn is_mounted(&self) -> io::Result<bool> {
        let root = std::fs::metadata(&self.root)?;
        let parent = std::fs::metadata(self.root.parent().unwrap_or(Path::new("/")))?;
        Ok(root.dev() != parent.dev())
    }

    fn mount(&self) -> io::Result<()> {
        let device = match self.attached()? {
            Some(device) => device,
            None => self.attach()?,
        };
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
        let options = c"discard=async,space_cache=v2";
        let mounted = rustix::mount::mount(&device.path, &self.root, "btrfs", flags, options);
        // The device lets go of the file by itself when it is unmounted: it is set to.
        mounted.map_err(|e| named(format!("mount {}", self.file.display()), e))
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
                return Ok(Some(Device { path, _open: device }));
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
                Ok(()) => return Ok(Device { path, _open: device }),
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {}
                Err(e) if direct_io && e.kind() == io::ErrorKind::InvalidInput => {
                    // The host's file system cannot do direct I/O to loop devices.
                    let file = open(&self.file, OFlags::RDWR)?;
                    match loopdev::attach(device.as_fd(), file.as_fd(), &name, false) {
                        Ok(()) => return Ok(Device { path, _open: device }),
                        Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {}
                        Err(e) => return Err(named(path.display(), e)),
                    }
                }
                Err(e) => return Err(named(path.display(), e)),
            }
        }
        Err(io::Error::other("no loop device is free"))
    }

    /// Unmounts. The loop device goes with the last mount.
    ///
    /// # Errors
    /// `ResourceBusy` while a session still uses it.
    pub(crate) fn close(&self) -> io::Result<()> {
        rustix::mount::unmount(&self.root, UnmountFlags::empty())
            .map_err(|e| named(format!("unmount {}", self.root.display()), e))?;
        // Auto-clear acts at the last close; this also covers a device attached without it.
        if let Some(device) = self.attached()? {
            let _ = loopdev::detach(device._open.as_fd());
        }
        Ok(())
    }

    pub(crate) fn session(&self, name: &str) -> PathBuf {
        self.root.join("sessions").join(name)
    }

    pub(crate) fn logs(&self, session: &str) -> PathBuf {
        self.root.join("logs").join(session)
    }

    /// Folder of the sessions' trust layers: see [`crate::linux::trust`].
    pub(crate) fn trust(&self) -> PathBuf {
        self.root.join("trust")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// Makes a session's subvolume: empty, or from a snapshot.
    ///
    /// # Errors
    /// `NotFound` when the snapshot has no data. Nothing is left behind.
    pub(crate) fn make_session(
        &self,
        name: &str,
        from: Option<&str>,
        layers: usize,
        limit: u64,
    ) -> io::Result<()> {
        let sessions = folder(&self.root.join("sessions"))?;
        match from {
            None => btrfs::create_subvolume(sessions.as_fd(), name)?,
            Some(snapshot) => {
                let source = folder(&self.root.join("snapshots").join(snapshot))?;
                btrfs::snapshot_subvolume(source.as_fd(), sessions.as_fd(), name, false)?;
            }
        }
        let made = self.ready_session(name, layers, limit);
        if made.is_err() {
            let _ = btrfs::delete_subvolume(sessions.as_fd(), name);
        }
        made
    }

    fn ready_session(&self, name: &str, layers: usize, limit: u64) -> io::Result<()> {
        let path = self.session(name);
        for index in 0..layers {
            let upper = path.join(rootfs::upper_name(index));
            match std::fs::create_dir(&upper) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                other => other?,
            }
            // A work folder of an earlier mount carries the mark of a volatile overlay; its content
            // is the kernel's and of no use to another mount.
            let work = path.join(rootfs::work_name(index));
            match std::fs::remove_dir_all(&work) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
            std::fs::create_dir(&work)?;
        }
        btrfs::limit_subvolume(folder(&path)?.as_fd(), limit)
            .map_err(|e| named("set the disk limit", e))
    }

    /// Deletes a session's subvolume. Idempotent.
    ///
    /// # Errors
    /// As the ioctl.
    pub(crate) fn remove_session(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_dir_all(self.trust().join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        self.remove("sessions", name)
    }

    /// Keeps the session's subvolume as a read-only snapshot. On disk when this returns.
    ///
    /// # Errors
    /// `NotFound` when the session has no subvolume and there is no snapshot of that name yet.
    pub(crate) fn snapshot(&self, session: &str, name: &str) -> io::Result<()> {
        let target = self.root.join("snapshots").join(name);
        if target.exists() {
            return Ok(());
        }
        let source = folder(&self.session(session))?;
        let snapshots = folder(&self.root.join("snapshots"))?;
        match btrfs::snapshot_subvolume(source.as_fd(), snapshots.as_fd(), name, true) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    pub(crate) fn has_snapshot(&self, name: &str) -> bool {
        self.root.join("snapshots").join(name).is_dir()
    }

    /// Deletes a snapshot. Idempotent.
    ///
    /// # Errors
    /// As the ioctl.
    pub(crate) fn remove_snapshot(&self, name: &str) -> io::Result<()> {
        self.remove("snapshots", name)
    }

    fn remove(&self, kind: &str, name: &str) -> io::Result<()> {
        let parent = folder(&self.root.join(kind))?;
        match btrfs::delete_subvolume(parent.as_fd(), name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(|e| named(format!("{kind}/{name}"), e)),
        }
    }

    /// Names in one of the pool's folders.
    ///
    /// # Errors
    /// As read_dir.
    pub(crate) fn names(&self, kind: &str) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(self.root.join(kind))?;
        entries.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect()
    }

    /// Bytes of the files in a snapshot's uppers.
    ///
    /// # Errors
    /// As openat(2).
    pub(crate) fn snapshot_bytes(&self, name: &str) -> io::Result<u64> {
        let root = self.root.join("snapshots").join(name);
        let mut total = 0;
        for entry in std::fs::read_dir(&root)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with('u') {
                total += tree_bytes(&root, &entry.file_name())?;
            }
        }
        Ok(total)
    }

    /// Bytes that are charged to a session: what it has allocated over what it started from. `None`
    /// where this kernel does not show them.
    ///
    /// # Errors
    /// `NotFound` when the session has no subvolume.
    pub(crate) fn session_bytes(&self, name: &str) -> io::Result<Option<u64>> {
        let subvolume = folder(&self.session(name))?;
        let group = btrfs::quota_group(subvolume.as_fd())?;
        match std::fs::read_to_string(format!("/sys/fs/btrfs/{group}/referenced")) {
            Ok(text) => Ok(text.trim().parse().ok()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// How full the pool is.
    ///
    /// # Errors
    /// As statvfs(3).
    pub(crate) fn space(&self) -> io::Result<Space> {
        let stat = rustix::fs::statvfs(&self.root).map_err(|e| named(self.root.display(), e))?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        let used = bytes(stat.f_blocks.saturating_sub(stat.f_bfree));
        Ok(Space { used, free: bytes(stat.f_bavail) })
    }

    /// Refuses new work when the host is nearly full.
    ///
    /// # Errors
    /// A sentence for the user.
    pub(crate) fn admit(&self) -> io::Result<()> {
        let host = free_bytes(self.file.parent().unwrap_or(Path::new("/")))?;
        let inside = free_bytes(&self.root)?;
        for (free, what) in [(host, "the data folder's file system"), (inside, "the storage pool")]
        {
            if free < RESERVE {
                return Err(io::Error::other(format!(
                    "{what} has {} MiB left and {} MiB are kept in reserve: remove sandboxes or \
                     snapshots, or make room",
                    free >> 20,
                    RESERVE >> 20
                )));
            }
        }
        Ok(())
    }
}

/// A loop device, held open so that it stays attached until it is mounted.
struct Device {
    path: PathBuf,
    _open: OwnedFd,
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

/// Bytes that a file system has left for us.
///
/// # Errors
/// As statvfs(3).
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path).map_err(|e| named(path.display(), e))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Bytes of the files below a folder that a guest has made: no link is followed, nothing but folders
/// is opened, and a file with several names counts once.
fn tree_bytes(parent: &Path, name: &std::ffi::OsStr) -> io::Result<u64> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let parent = folder(parent)?;
    let top = rustix::fs::openat(&parent, name, flags, Mode::empty())?;
    let mut stack = vec![rustix::fs::Dir::new(top)?];
    let mut seen = std::collections::HashSet::new();
    let mut total = 0u64;
    while let Some(dir) = stack.last_mut() {
        let Some(entry) = dir.read().transpose()? else {
            stack.pop();
            continue;
        };
        let name = entry.file_name().to_owned();
        if name.as_bytes() == b"." || name.as_bytes() == b".." {
            continue;
        }
        let fd = dir.fd()?;
        let stat = rustix::fs::statat(fd, &name, AtFlags::SYMLINK_NOFOLLOW)?;
        let several = stat.st_nlink > 1;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if stack.len() < MAX_DEPTH => {
                let Some(dir) = stack.last() else { break };
                let next = rustix::fs::openat(dir.fd()?, &name, flags, Mode::empty())?;
                stack.push(rustix::fs::Dir::new(next)?);
            }
            FileType::RegularFile if !several || seen.insert(stat.st_ino) => {
                total += (stat.st_blocks as u64).saturating_mul(512);
            }
            _ => {}
        }
    }
    Ok(total)
}

/// Opens a command's log for reading, in a folder that belongs to a shim: nothing but a regular file
/// of that very folder is opened.
///
/// # Errors
/// `NotFound` when there is none.
pub(crate) fn open_log(logs: &Path, name: &str) -> io::Result<OwnedFd> {
    use rustix::fs::ResolveFlags;
    let folder = folder(logs)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    let file = rustix::fs::openat2(folder.as_fd(), name, flags, Mode::empty(), resolve)?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::other(format!("log {name} (fd {}) is no file", file.as_raw_fd())));
    }
    Ok(file)
}
