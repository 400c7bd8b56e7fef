//! Volumes: folders of the pool that are copied, limited and removed as one.
//!
//! On btrfs a volume is a subvolume, and a copy is O(1) and shares what it has not written. Elsewhere it is a
//! folder; a copy is made beside and renamed when it is on disk, and what is removed goes by way of the
//! trash. Invariant: a
//! volume is there whole, or not at all. Called by `linux` and by the other files of `pool`.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{Mode, RenameFlags};

use super::{Kind, Pool, VolumeUsage, copy, folder, named, trash, walk};
use crate::sys::btrfs;

impl Pool {
    /// Where a volume is, made or not.
    pub(crate) fn volume(&self, kind: Kind, name: &str) -> PathBuf {
        self.root.join(kind.folder()).join(name)
    }

    fn parent(&self, kind: Kind) -> io::Result<OwnedFd> {
        folder(&self.root.join(kind.folder()))
    }

    fn open_volume(&self, kind: Kind, name: &str) -> io::Result<OwnedFd> {
        check_name(name)?;
        folder(&self.volume(kind, name))
    }

    /// Makes an empty volume. A drive is on disk when this returns.
    ///
    /// # Errors
    /// `AlreadyExists` when there is one.
    pub(crate) fn make_volume(&self, kind: Kind, name: &str) -> io::Result<()> {
        check_name(name)?;
        let parent = self.parent(kind)?;
        match self.is_btrfs() {
            true => btrfs::create_subvolume(parent.as_fd(), name),
            false => Ok(rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755))?),
        }
        .map_err(|e| named(format!("make {}/{name}", kind.folder()), e))?;
        // The others are worth nothing before they have been written; a drive is recorded as it is.
        if kind == Kind::Drive { self.flush() } else { Ok(()) }
    }

    /// Makes `to` a copy of the volume `from`, of this very moment. On disk when this returns. A snapshot
    /// that is there already stays as it is.
    ///
    /// # Errors
    /// `NotFound` when there is no such volume, `AlreadyExists` when `to` is there and no snapshot.
    pub(crate) fn copy_volume(
        &self,
        from: (Kind, &str),
        to: (Kind, &str),
        read_only: bool,
    ) -> io::Result<()> {
        let (kind, name) = to;
        check_name(name)?;
        let settled = kind == Kind::Snapshot;
        if settled && self.volume(kind, name).exists() {
            return Ok(());
        }
        let source = self.open_volume(from.0, from.1)?;
        let parent = self.parent(kind)?;
        let copied = match self.is_btrfs() {
            true => btrfs::snapshot_subvolume(source.as_fd(), parent.as_fd(), name, read_only),
            false => self.copy_folder(from.0, source, &parent, name),
        };
        match copied {
            Err(e) if settled && e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other.map_err(|e| {
                let (source, target) = (from.0.folder(), kind.folder());
                named(format!("copy {source}/{} to {target}/{name}", from.1), e)
            }),
        }
    }

    /// A copy that has its name when it is whole and on disk, and not before.
    fn copy_folder(
        &self,
        kind: Kind,
        source: OwnedFd,
        parent: &OwnedFd,
        name: &str,
    ) -> io::Result<()> {
        let unfinished = folder(&self.root.join(trash::UNFINISHED))?;
        let beside = trash::fresh();
        rustix::fs::mkdirat(&unfinished, &beside, Mode::RWXU)?;
        let copying = || {
            let target = rustix::fs::openat(&unfinished, &beside, walk::FOLDER, Mode::empty())?;
            let skip = |name: &CStr| is_work(kind, name);
            copy::tree(source, target.try_clone()?, &skip, &mut |_| Ok(()))?;
            if !crate::fault::loses("pool") {
                rustix::fs::syncfs(&target)?;
            }
            let flags = RenameFlags::NOREPLACE;
            rustix::fs::renameat_with(&unfinished, &beside, parent, name, flags)?;
            Ok(rustix::fs::fsync(parent)?)
        };
        let copied = copying();
        if copied.is_err() {
            // Renamed already, or not even to be moved: then the next start takes it.
            let _ = trash::throw(&self.root, &unfinished, &beside);
            self.wake_keeper();
        }
        copied
    }

    /// Removes a volume. Its space comes back in the background. Idempotent.
    ///
    /// # Errors
    /// As the file system's.
    pub(crate) fn remove_volume(&self, kind: Kind, name: &str) -> io::Result<()> {
        check_name(name)?;
        let parent = self.parent(kind)?;
        let removed = match self.is_btrfs() {
            true => btrfs::delete_subvolume(parent.as_fd(), name),
            false => trash::throw(&self.root, &parent, name).inspect(|()| self.wake_keeper()),
        };
        match removed {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other.map_err(|e| named(format!("remove {}/{name}", kind.folder()), e)),
        }
    }

    /// Limits the bytes that may be charged to a volume: see [`Pool::level`]. `false`: limits are not to
    /// be had in this mode.
    ///
    /// # Errors
    /// `NotFound` when there is no such volume.
    pub(crate) fn limit_volume(&self, kind: Kind, name: &str, bytes: u64) -> io::Result<bool> {
        let volume = self.open_volume(kind, name)?;
        if !self.limits {
            return Ok(false);
        }
        btrfs::limit_subvolume(volume.as_fd(), bytes)?;
        Ok(true)
    }

    /// What a volume takes, by a walk through it; of a session and its snapshots without the overlays'
    /// work folders.
    ///
    /// # Errors
    /// `NotFound` when there is no such volume.
    #[allow(dead_code, reason = "for the other parts of storage, which are being built on it")]
    pub(crate) fn usage(&self, kind: Kind, name: &str) -> io::Result<VolumeUsage> {
        self.walk_volume(kind, name, true)
    }

    pub(super) fn walk_volume(
        &self,
        kind: Kind,
        name: &str,
        unique: bool,
    ) -> io::Result<VolumeUsage> {
        let top = self.open_volume(kind, name)?;
        let skip = |name: &CStr| is_work(kind, name);
        walk::usage(top, unique, skip).map_err(|e| named(format!("{}/{name}", kind.folder()), e))
    }

    /// Answers when everything that was written so far is on disk.
    ///
    /// # Errors
    /// As syncfs(2).
    pub(crate) fn flush(&self) -> io::Result<()> {
        rustix::fs::syncfs(folder(&self.root)?)
            .map_err(|e| named(format!("sync {}", self.root.display()), e))
    }

    /// Names of the volumes of a kind.
    ///
    /// # Errors
    /// As read_dir.
    pub(crate) fn names(&self, kind: Kind) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(self.root.join(kind.folder()))?;
        entries.map(|e| Ok(e?.file_name().to_string_lossy().into_owned())).collect()
    }
}

/// Work folders of overlays: the kernel's, and of no use to anybody else.
pub(super) fn is_work(kind: Kind, name: &CStr) -> bool {
    matches!(kind, Kind::Session | Kind::Snapshot) && name.to_bytes().starts_with(b"w")
}

/// Names are ids that were checked long before; this is the last line.
pub(super) fn check_name(name: &str) -> io::Result<()> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
    if name.is_empty() || name.len() > 200 || name.starts_with('.') || !name.bytes().all(plain) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} is no volume")));
    }
    Ok(())
}
