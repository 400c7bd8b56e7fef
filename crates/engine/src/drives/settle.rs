//! What a crash or an error left of drives: goes on with it or takes it back.
//!
//! Invariant: everything here can be done again. A drive that is being made or deleted goes; a mount that is
//! neither there nor gone goes too, unless it was to be detached and is in use.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bivouac_store::{DriveState, Durability};
use bivouac_types::id::DriveId;

use crate::error::Error;
use crate::fault::FaultPoint;
use crate::inner::{Inner, Live};
use crate::lifecycle::chain;

impl Inner {
    /// Takes a drive back that could not be made; what cannot be taken back now is left to the reconciler.
    pub(super) async fn undo_drive(&self, id: &DriveId) {
        if let Err(error) = self.finish_drive(id).await {
            tracing::error!(drive = %id, cause = %chain(&error), "cannot take a drive back yet");
        }
    }

    /// Brings the end of a drive that is not usable to its end. Holds the lock of its id, or of its name while
    /// it is new.
    pub(super) async fn finish_drive(&self, id: &DriveId) -> Result<(), Error> {
        let gone = async {
            let Some(row) = self.db.drive(id).await?.filter(|row| row.state != DriveState::Ready)
            else {
                return Ok(());
            };
            let deleting = row.state == DriveState::Deleting;
            self.runtime.remove_drive(id.as_str()).await?;
            if deleting {
                self.reach(FaultPoint::DriveDataGone).await?;
            }
            let mut tx = self.db.begin(Durability::Power).await?;
            tx.remove_drive(id).await?;
            tx.commit().await?;
            if deleting { self.reach(FaultPoint::DriveRowGone).await } else { Ok(()) }
        };
        let gone = gone.await;
        if gone.is_err() {
            self.leftovers.store(true, Ordering::Release);
        }
        gone
    }

    /// Goes on with drives that are being made or deleted by nobody, and removes data that no record knows.
    /// The data is listed before the records are read, and a record is written before its data is made.
    pub(crate) async fn sweep_drives(&self) -> Result<(), Error> {
        let names = self.runtime.drives().await?;
        let rows = self.db.drives_on(&self.config.node).await?;
        for row in rows.iter().filter(|row| row.state != DriveState::Ready) {
            let d = &row.drive;
            let lock = super::name_lock(&d.namespace, &d.name);
            let (Some(_name), Some(_id)) =
                (self.drive_locks.try_lock(&lock), self.drive_locks.try_lock(d.id.as_str()))
            else {
                continue;
            };
            self.undo_drive(&d.id).await;
        }
        let known: HashSet<&str> = rows.iter().map(|row| row.drive.id.as_str()).collect();
        for name in names.iter().filter(|name| !known.contains(name.as_str())) {
            tracing::warn!(drive = %name, "removing the data of a drive that is not known");
            if let Err(error) = self.runtime.remove_drive(name).await {
                tracing::error!(drive = %name, cause = %chain(&error), "cannot remove it yet");
            }
        }
        let there: HashSet<&str> = names.iter().map(String::as_str).collect();
        let ready = rows.iter().filter(|row| row.state == DriveState::Ready);
        for row in ready.filter(|row| !there.contains(row.drive.id.as_str())) {
            // Made since the first look, or gone: whoever mounts it is told.
            if !self.runtime.drives().await?.iter().any(|name| name == row.drive.id.as_str()) {
                tracing::error!(drive = %row.drive.id, name = %row.drive.name, "the data of a drive is missing");
            }
        }
        Ok(())
    }

    /// Goes on with attaches and detaches that nobody works on.
    pub(crate) async fn settle_mounts(self: &Arc<Self>) -> Result<(), Error> {
        for row in self.db.unsettled_mounts().await? {
            let Some(live) = self.live(&row.session_id) else { continue };
            let sandbox = live.row().session.sandbox_id;
            let Some(_held) = self.sandbox_locks.try_lock(sandbox.as_str()) else { continue };
            self.settle_mounts_or_log(&live).await;
        }
        Ok(())
    }

    /// The same for one session. Holds the sandbox's lock.
    pub(crate) async fn settle_mounts_or_log(self: &Arc<Self>, live: &Arc<Live>) {
        if let Err(error) = self.settle_mounts_of(live).await {
            let id = live.row().session.id;
            tracing::error!(session = %id, cause = %chain(&error), "cannot settle its drives yet");
        }
    }
}
