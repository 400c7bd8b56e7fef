//! The storage pool: where sandboxes' volumes, logs and certificates lie.
//!
//! Owns `<data>/pool` and what is mounted there, by the mode of the data folder (`record`): one btrfs file
//! system in a sparse file of the data folder (`loopfile`), a folder of a btrfs of its own (`native`), or a
//! folder of any file system, where copies are made file by file (`copy`, `trash`). In it a folder for each
//! kind of volume (`sessions/`, `snapshots/`, `drives/`, `views/`: `volumes`), `logs/`, `trust/` and
//! `images/`. Invariant: what is in a volume was made by a guest; nothing here follows a link in one. Called
//! by `linux`; `migrate` and `show` by the command line.

mod copy;
mod digest;
mod keeper;
mod loopfile;
mod migrate;
mod native;
pub(crate) mod quota;
mod record;
pub(crate) mod scrub;
mod sessions;
#[cfg(test)]
mod tests;
mod trash;
mod volumes;
mod walk;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxAttributes, StatxFlags};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree};
use serde::{Deserialize, Serialize};

use self::keeper::{Keeper, Work};
use self::loopfile::{LoopFile, Sizes};
pub use self::migrate::{Migrated, Shown, migrate, show};
pub use self::record::{CheckState, PoolCheck};
use crate::Space;
use crate::sys::{self, btrfs};

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

/// How a pool is to be opened.
#[derive(Debug, Clone, Default)]
pub struct PoolOptions {
    /// The mode; absent is what the data folder has, else the best that can be had.
    pub mode: Option<PoolMode>,
    /// Size of a new pool's file when a test wants another.
    pub first_bytes: Option<u64>,
}

impl PoolOptions {
    fn sizes(&self) -> Sizes {
        self.first_bytes.map_or(Sizes::USUAL, Sizes::from_first)
    }
}

/// The storage, as it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Storage {
    /// How volumes are kept.
    pub mode: PoolMode,
    /// Bytes that it may hold at present; a pool in a file grows.
    pub size: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes that may still be used, what the pool can grow by included.
    pub free: u64,
    /// Bytes of the data folder's file system that are left free.
    pub reserve: u64,
    /// Whether a sandbox's disk limit holds.
    pub limits: bool,
    /// What the last check found. Absent: none was needed.
    pub check: Option<PoolCheck>,
}

/// A pool in use.
#[derive(Debug)]
pub(crate) struct Pool {
    data: PathBuf,
    root: PathBuf,
    mode: PoolMode,
    file: LoopFile,
    /// Limits hold.
    limits: bool,
    keeper: OnceLock<Keeper>,
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
    /// When the mode is not the data folder's or cannot be had here, or the host has no room.
    pub(crate) fn open(data: &Path, options: &PoolOptions) -> io::Result<Self> {
        let has = record::mode(data)?;
        let mut pool = match (options.mode, has) {
            (Some(asked), Some(has)) if asked != has => return Err(other_mode(data, asked, has)),
            (Some(mode), _) | (None, Some(mode)) => Self::make(data, mode, options, has.is_none())?,
            (None, None) => Self::make_best(data, options)?,
        };
        if has.is_none() {
            record::set_mode(data, pool.mode)?;
        }
        migrate::settle(data, pool.mode)?;
        let mounted = is_mounted(&pool.root)?;
        let unclosed = record::mark_open(data)? && !mounted;
        if !mounted {
            pool.mount()?;
        }
        pool.ready()?;
        pool.tell();
        let check = pool.mode != PoolMode::Folder
            && (unclosed
                || record::check(data)?.is_some_and(|last| last.state != CheckState::Clean));
        let work = Work {
            data: pool.data.clone(),
            root: pool.root.clone(),
            mode: pool.mode,
            file: pool.file.clone(),
            check,
            leftovers: migrate::leftovers(data, pool.mode)?,
        };
        let _ = pool.keeper.set(Keeper::start(work)?);
        Ok(pool)
    }

    /// What a pool of this mode lies in, made if there is none yet.
    fn make(data: &Path, mode: PoolMode, options: &PoolOptions, fresh: bool) -> io::Result<Self> {
        let file = LoopFile::new(record::place(data, PoolMode::Loop), options.sizes());
        let root = data.join("pool");
        make_folder(&root, 0o700)?;
        match mode {
            PoolMode::Loop if file.exists() => {}
            PoolMode::Loop => match LoopFile::missing() {
                Some(why) => return Err(io::Error::new(io::ErrorKind::Unsupported, why)),
                None => file.format()?,
            },
            PoolMode::Native => {
                native::check(data, fresh)?;
                make_folder(&record::place(data, mode), 0o700)?;
            }
            PoolMode::Folder => make_folder(&record::place(data, mode), 0o700)?,
        }
        Ok(Self { data: data.to_owned(), root, mode, file, limits: false, keeper: OnceLock::new() })
    }

    /// A file with a btrfs, or, where that cannot be had, plain folders.
    fn make_best(data: &Path, options: &PoolOptions) -> io::Result<Self> {
        let made = match LoopFile::missing() {
            Some(why) => Err(io::Error::new(io::ErrorKind::Unsupported, why)),
            None => Self::make(data, PoolMode::Loop, options, true).and_then(|pool| {
                // Some hosts show loop devices and mount none of them.
                if !is_mounted(&pool.root)? {
                    pool.mount()?;
                }
                Ok(pool)
            }),
        };
        match made {
            // Nothing would be won: there is no room for folders either.
            Err(e) if e.kind() == io::ErrorKind::StorageFull => Err(e),
            Err(e) => {
                tracing::warn!(
                    "storage pool: no btrfs in a file here, so plain folders it is: {e}"
                );
                // Just made, and empty.
                let _ = std::fs::remove_file(record::place(data, PoolMode::Loop));
                Self::make(data, PoolMode::Folder, options, true)
            }
            made => made,
        }
    }

    fn mount(&self) -> io::Result<()> {
        match self.mode {
            PoolMode::Loop => self.file.mount(&self.root),
            mode => bind(&record::place(&self.data, mode), &self.root),
        }
    }

    /// Folders, quotas, and nothing of what an earlier engine did not finish.
    fn ready(&mut self) -> io::Result<()> {
        if self.mode != PoolMode::Folder {
            let root = folder(&self.root)?;
            // Turning on what is on already is an error that says nothing; the kernel's word counts.
            let _ = btrfs::enable_simple_quota(root.as_fd());
            self.limits = native::quota(&self.root)?.is_none_or(|kind| kind == "squota");
        }
        for name in ["logs", "images", "trust", "trust/bases"] {
            make_folder(&self.root.join(name), 0o711)?;
        }
        for kind in Kind::ALL {
            make_folder(&self.root.join(kind.folder()), 0o711)?;
        }
        if self.mode == PoolMode::Folder {
            for name in [trash::TRASH, trash::UNFINISHED] {
                make_folder(&self.root.join(name), 0o700)?;
            }
            trash::take_unfinished(&self.root)?;
        }
        // Copies of bundles of images that may be gone: made again when wanted.
        for entry in std::fs::read_dir(self.trust().join("bases"))? {
            let _ = std::fs::remove_file(entry?.path());
        }
        Ok(())
    }

    fn tell(&self) {
        match self.mode {
            PoolMode::Folder => tracing::warn!(
                "storage pool: plain folders in {}. Disk limits of sandboxes do NOT hold, and a snapshot, a \
                 fork or a start from one copies its files",
                record::place(&self.data, self.mode).display()
            ),
            mode => tracing::info!("storage pool: {mode} in {}", self.data.display()),
        }
        if self.mode != PoolMode::Folder && !self.limits {
            tracing::warn!("storage pool: no simple quotas here: disk limits do NOT hold");
        }
        let errors = folder(&self.root).and_then(|root| match self.mode {
            PoolMode::Folder => Ok(0),
            _ => btrfs::device_errors(root.as_fd(), 1),
        });
        if let Ok(errors @ 1..) = errors {
            tracing::error!(
                "storage pool: its file system has met {errors} errors of its device so far (btrfs device \
                 stats {})",
                self.root.display()
            );
        }
    }

    /// Unmounts. The loop device goes with the last mount.
    ///
    /// # Errors
    /// `ResourceBusy` while a session still uses it.
    pub(crate) fn close(&self) -> io::Result<()> {
        if let Some(keeper) = self.keeper.get() {
            keeper.stop();
        }
        rustix::mount::unmount(&self.root, UnmountFlags::empty())
            .map_err(|e| named(format!("unmount {}", self.root.display()), e))?;
        if self.mode == PoolMode::Loop {
            self.file.detach()?;
        }
        record::mark_closed(&self.data);
        Ok(())
    }

    fn is_btrfs(&self) -> bool {
        self.mode != PoolMode::Folder
    }

    fn wake_keeper(&self) {
        if let Some(keeper) = self.keeper.get() {
            keeper.wake();
        }
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
        room(&self.data, self.mode).map(|(_, space)| space)
    }

    /// The storage, for people.
    ///
    /// # Errors
    /// As statvfs(3).
    pub(crate) fn storage(&self) -> io::Result<Storage> {
        storage(&self.data, self.mode, self.limits)
    }

    /// Refuses new work when the host is nearly full.
    ///
    /// # Errors
    /// A sentence for the user.
    pub(crate) fn admit(&self) -> io::Result<()> {
        let host = free_bytes(&self.data)?;
        let wanted = quota::reserve_of_test().unwrap_or(RESERVE);
        let mut room = vec![(host, wanted, "the data folder's file system")];
        if self.mode == PoolMode::Loop {
            if let Err(e) = self.file.grow_if_low(&self.root) {
                tracing::warn!("the storage pool cannot grow: {e}");
            }
            let reserve = RESERVE.min(self.file.reserve());
            room.push((free_bytes(&self.root)?, reserve, "the storage pool"));
        }
        for (free, reserve, what) in room {
            if free < reserve {
                return Err(io::Error::other(format!(
                    "{what} has {} MiB left and {} MiB are kept in reserve: remove sandboxes or \
                     snapshots, or make room",
                    free >> 20,
                    reserve >> 20
                )));
            }
        }
        Ok(())
    }
}

fn other_mode(data: &Path, asked: PoolMode, has: PoolMode) -> io::Error {
    let data = data.display();
    let text = format!(
        "the data folder {data} keeps its volumes in the mode '{has}', and '{asked}' was asked for: \
         `bivouac pool migrate --to {asked}` moves them, or leave --pool away"
    );
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Size of a mounted pool, and how full it is. What it can grow by is free.
fn room(data: &Path, mode: PoolMode) -> io::Result<(u64, Space)> {
    let root = data.join("pool");
    let stat = rustix::fs::statvfs(&root).map_err(|e| named(root.display(), e))?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    let growth = match mode {
        PoolMode::Loop => loopfile::growth_left(&record::place(data, mode))?,
        PoolMode::Native | PoolMode::Folder => 0,
    };
    let used = bytes(stat.f_blocks.saturating_sub(stat.f_bfree));
    let free = bytes(stat.f_bavail).saturating_add(growth);
    Ok((bytes(stat.f_blocks), Space { used, free }))
}

/// The storage of a mounted pool.
fn storage(data: &Path, mode: PoolMode, limits: bool) -> io::Result<Storage> {
    let (size, Space { used, free }) = room(data, mode)?;
    let check = record::check(data)?;
    Ok(Storage { mode, size, used, free, reserve: RESERVE, limits, check })
}

/// Whether something is mounted at a folder.
fn is_mounted(path: &Path) -> io::Result<bool> {
    let stat = rustix::fs::statx(folder(path)?, c"", AtFlags::EMPTY_PATH, StatxFlags::TYPE)?;
    Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// Mounts a folder at another one, with the same care as the file: no devices, no set-id programs.
fn bind(place: &Path, at: &Path) -> io::Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let mounting = || -> io::Result<()> {
        let tree = open_tree(CWD, place, flags)?;
        sys::careful_mount(tree.as_fd())?;
        move_mount(&tree, c"", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        Ok(())
    };
    mounting().map_err(|e| named(format!("mount {} at {}", place.display(), at.display()), e))
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
