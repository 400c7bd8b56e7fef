//! From what a sandbox is to have mounted to the rows of its session and the mounts of its launch.
//!
//! Invariant: who is refused is told why, by name; the decision itself is the compare-and-set of the
//! transaction that records the session.

use bivouac_runtime::DriveMount;
use bivouac_store::{DriveMountRow, DriveRow, MountState, SessionRow};
use bivouac_types::drive::{Drive, DriveMode, Mounts};
use bivouac_types::id::SessionId;
use bivouac_types::name::Namespace;

use super::bytes;
use crate::error::{Error, ErrorKind};
use crate::inner::Inner;

/// Name of a session's private copy.
pub(super) fn view_name(session: &SessionId, index: usize) -> String {
    format!("{session}.{index}")
}

/// What the runtime is to mount.
pub(super) fn mount_of(row: &DriveMountRow, drive: &Drive) -> DriveMount {
    DriveMount {
        at: row.path.clone(),
        drive: row.drive_id.as_str().to_owned(),
        view: (row.mode == DriveMode::Snapshot).then(|| row.volume.clone()),
        max_bytes: bytes(drive.max_bytes),
    }
}

impl Inner {
    /// Refuses drives that are not there.
    pub(crate) async fn check_drives(&self, ns: &Namespace, mounts: &Mounts) -> Result<(), Error> {
        for mount in mounts.values() {
            self.drive_named(ns, &mount.drive).await?;
        }
        Ok(())
    }

    /// Refuses to mount a drive for reasons that can be told.
    pub(super) async fn check_mount(
        &self,
        row: &DriveRow,
        mode: DriveMode,
        region: &str,
    ) -> Result<(), Error> {
        let drive = &row.drive;
        let name = &drive.name;
        if drive.region != region {
            let message = format!(
                "Drive '{name}' is in region '{}' and the sandbox in '{region}': they have to be in the same.",
                drive.region
            );
            return Err(Error::invalid(message));
        }
        match mode {
            DriveMode::ReadWrite if drive.writer.is_some() => Err(self.held(drive).await?),
            DriveMode::Snapshot if !drive.initialized => {
                let message = format!(
                    "Drive '{name}' was never mounted read-write: there is nothing to take a snapshot of."
                );
                Err(Error::new(ErrorKind::Invalid, "drive_not_initialized", message))
            }
            _ => Ok(()),
        }
    }

    /// The rows of what a new session is to have.
    pub(crate) async fn wanted_mounts(
        &self,
        row: &SessionRow,
    ) -> Result<Vec<DriveMountRow>, Error> {
        let s = &row.session;
        let mut rows = Vec::with_capacity(s.mounts.len());
        for (index, (path, mount)) in s.mounts.iter().enumerate() {
            let found = self.drive_named(&row.namespace, &mount.drive).await?;
            self.check_mount(&found, mount.mode, &s.region).await?;
            let volume = match mount.mode {
                DriveMode::ReadWrite => found.drive.id.as_str().to_owned(),
                DriveMode::Snapshot => view_name(&s.id, index),
            };
            rows.push(DriveMountRow {
                session_id: s.id.clone(),
                path: path.clone(),
                drive_id: found.drive.id,
                mode: mount.mode,
                volume,
                state: MountState::Mounted,
                created_at: s.created_at,
            });
        }
        Ok(rows)
    }

    /// What a launch is to mount.
    pub(crate) async fn launch_mounts(&self, row: &SessionRow) -> Result<Vec<DriveMount>, Error> {
        if row.session.mounts.is_empty() {
            return Ok(Vec::new());
        }
        let mut mounts = Vec::new();
        for mount in self.db.mounts_of(&row.session.id).await? {
            let drive = self.db.drive(&mount.drive_id).await?;
            let drive = drive.ok_or_else(|| super::no_drive(mount.drive_id.as_str()))?.drive;
            mounts.push(mount_of(&mount, &drive));
        }
        Ok(mounts)
    }

    /// Writes that drives have had a writer: from now on there is something to take a snapshot of.
    pub(crate) async fn note_written(&self, row: &SessionRow) -> Result<(), Error> {
        let writes = row.session.mounts.values().any(|m| m.mode == DriveMode::ReadWrite);
        if writes {
            self.db.note_written(&row.session.id, self.now()).await?;
        }
        Ok(())
    }
}
