//! The volumes of sessions: one upper and one work folder for each layer of the image.
//!
//! Invariant: a session's volume is ready for its overlays when it has been made; nothing is left of one
//! that could not be made. Called by `linux`.

use std::io;
use std::path::PathBuf;

use super::{Kind, Pool, named};
use crate::linux::rootfs;

impl Pool {
    pub(crate) fn session(&self, name: &str) -> PathBuf {
        self.volume(Kind::Session, name)
    }

    /// Makes a session's volume: empty, or from a snapshot.
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
        match from {
            None => self.make_volume(Kind::Session, name)?,
            Some(snapshot) => {
                self.copy_volume((Kind::Snapshot, snapshot), (Kind::Session, name), false)?;
            }
        }
        let made = self.ready_session(name, layers, limit);
        if made.is_err() {
            let _ = self.remove_volume(Kind::Session, name);
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
        self.limit_volume(Kind::Session, name, limit)
            .map(drop)
            .map_err(|e| named("set the disk limit", e))
    }

    /// Deletes a session's volume. Idempotent.
    ///
    /// # Errors
    /// As the file system's.
    pub(crate) fn remove_session(&self, name: &str) -> io::Result<()> {
        match std::fs::remove_dir_all(self.trust().join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        self.remove_volume(Kind::Session, name)
    }

    /// Keeps the session's volume as a snapshot. On disk when this returns.
    ///
    /// # Errors
    /// `NotFound` when the session has no volume and there is no snapshot of that name yet.
    pub(crate) fn snapshot(&self, session: &str, name: &str) -> io::Result<()> {
        self.copy_volume((Kind::Session, session), (Kind::Snapshot, name), true)
    }

    pub(crate) fn has_snapshot(&self, name: &str) -> bool {
        self.volume(Kind::Snapshot, name).is_dir()
    }

    /// Deletes a snapshot. Idempotent.
    ///
    /// # Errors
    /// As the file system's.
    pub(crate) fn remove_snapshot(&self, name: &str) -> io::Result<()> {
        self.remove_volume(Kind::Snapshot, name)
    }

    /// Bytes of the files in a snapshot's uppers.
    ///
    /// # Errors
    /// As openat(2).
    pub(crate) fn snapshot_bytes(&self, name: &str) -> io::Result<u64> {
        Ok(self.walk_volume(Kind::Snapshot, name, false)?.bytes)
    }
}
