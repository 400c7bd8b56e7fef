//! The storage pool: where sandboxes' volumes, logs and certificates lie.
//!
//! Owns `<data>/pool` and what is mounted there: one btrfs file system in a sparse file of the data folder
//! (`loopfile`). In it a folder for each [`Kind`] of volume (`sessions/`, `snapshots/`, `drives/`,
//! `views/`: `volumes`), `logs/`, `trust/` and `images/`. Invariant: what is in a volume was made by a
//! guest; nothing here follows a link in one. Called by `linux`.

mod loopfile;
pub(crate) mod quota;
mod sessions;
mod volumes;
mod walk;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};

use self::loopfile::LoopFile;
use crate::Space;
use crate::sys::btrfs;

/// Free space that stays on the host's file system, bytes.
pub const RESERVE: u64 = 2 << 30;

/// What a volume is for. Each kind has a folder of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(dead_code, reason = "drives are being built on it")]
pub(crate) enum Kind {
    /// The upper and work folders of a session.
    Session,
    /// A copy of a session's, which nobody writes.
    Snapshot,
    /// A volume that outlives sessions.
    Drive,
    /// A private copy of a drive, for one session.
    View,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Session, Self::Snapshot, Self::Drive, Self::View];

    const fn folder(self) -> &'static str {
        match self {
            Self::Session => "sessions",
            Self::Snapshot => "snapshots",
            Self::Drive => "drives",
            Self::View => "views",
        }
    }
}

/// How a data folder keeps its volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolMode {
    /// A btrfs of our own in a file.
    Loop,
    /// A btrfs that the data folder lies on, and that holds nothing else.
    Native,
    /// Plain folders on whatever the data folder lies on: copies take time and room, and no limit holds.
    Folder,
}

impl PoolMode {
    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::Native => "native",
            Self::Folder => "folder",
        }
    }
}

impl std::fmt::Display for PoolMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What a volume takes on disk, by a walk through it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VolumeUsage {
    /// Bytes of its files.
    pub(crate) bytes: u64,
    /// Bytes that no other volume shares: what comes back when it is removed. `None`: this file system
    /// cannot tell.
    pub(crate) unique_bytes: Option<u64>,
}

/// A pool in use.
#[derive(Debug)]
pub(crate) struct Pool {
    data: PathBuf,
    root: PathBuf,
    mode: PoolMode,
    file: LoopFile,
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

/// Makes a folder, unless it is there.
fn make_folder(path: &Path, mode: u32) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(mode).create(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.map_err(|e| named(path.display(), e)),
    }
}

/// Puts the names in a folder on disk.
fn sync_folder(path: &Path) -> io::Result<()> {
    rustix::fs::fsync(folder(path)?).map_err(|e| named(format!("sync {}", path.display()), e))
}

impl Pool {
    /// Makes the pool on first use, and mounts it unless it is.
    ///
    /// # Errors
    /// When btrfs, loop devices or `mkfs.btrfs` are missing, or the host has no room.
    pub(crate) fn open(data: &Path) -> io::Result<Self> {
        let pool = Self {
            data: data.to_owned(),
            root: data.join("pool"),
            mode: PoolMode::Loop,
            file: LoopFile { file: data.join("pool.btrfs") },
        };
        make_folder(&pool.root, 0o700)?;
        if !pool.file.file.exists() {
            pool.file.format()?;
        }
        if !pool.is_mounted()? {
            pool.file.mount(&pool.root)?;
        }
        // Turning on what is on already is an error that says nothing.
        let _ = btrfs::enable_simple_quota(folder(&pool.root)?.as_fd());
        for name in ["logs", "images", "trust", "trust/bases"] {
            make_folder(&pool.root.join(name), 0o711)?;
        }
        for kind in Kind::ALL {
            make_folder(&pool.root.join(kind.folder()), 0o711)?;
        }
        // Copies of bundles of images that may be gone: made again when wanted.
        for entry in std::fs::read_dir(pool.trust().join("bases"))? {
            let _ = std::fs::remove_file(entry?.path());
        }
        Ok(pool)
    }

    fn is_mounted(&self) -> io::Result<bool> {
        let root = std::fs::metadata(&self.root)?;
        let parent = std::fs::metadata(&self.data)?;
        Ok(root.dev() != parent.dev())
    }

    /// Unmounts. The loop device goes with the last mount.
    ///
    /// # Errors
    /// `ResourceBusy` while a session still uses it.
    pub(crate) fn close(&self) -> io::Result<()> {
        rustix::mount::unmount(&self.root, UnmountFlags::empty())
            .map_err(|e| named(format!("unmount {}", self.root.display()), e))?;
        self.file.detach()
    }

    /// How it keeps its volumes.
    #[allow(dead_code, reason = "for the other parts of storage, which are being built on it")]
    pub(crate) fn mode(&self) -> PoolMode {
        self.mode
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
        let host = free_bytes(&self.data)?;
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

/// Bytes that a file system has left for us.
///
/// # Errors
/// As statvfs(3).
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path).map_err(|e| named(path.display(), e))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
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
