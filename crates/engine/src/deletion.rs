//! The deletion of sandboxes.
//!
//! Invariant: the intent is written first, and every step can be done again, so a deletion that was cut off is
//! gone on with by whoever finds it (`adopt`, the orphan reconciler). Called by `sandboxes`, `lifecycle` and the
//! reconcilers.

use std::sync::Arc;

use bivouac_store::{Deleting, SandboxRow};
use bivouac_types::id::SandboxId;
use bivouac_types::name::Namespace;
use bivouac_types::sandbox::Sandbox;
use bivouac_types::session::SessionStatus;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use crate::error::Error;
use crate::fault::FaultPoint;
use crate::inner::Inner;
use crate::lifecycle::Keep;

impl Inner {
    /// Writes the intent to delete. Answers the row with it.
    pub(crate) async fn mark_deleting(
        &self,
        id: &SandboxId,
        how: Deleting,
    ) -> Result<SandboxRow, Error> {
        self.change_sandbox(id, |row| {
            // A second call may add the orphans, and takes nothing back.
            let more = matches!(row.deleting, Deleting::No | Deleting::Unborn)
                || (row.deleting == Deleting::Yes && how == Deleting::WithOrphans);
            if more {
                row.deleting = how;
            }
            Ok(more)
        })
        .await
    }

    pub(crate) async fn remove(
        self: &Arc<Self>,
        ns: &Namespace,
        name: &str,
        how: Deleting,
    ) -> Result<Sandbox, Error> {
        let found = self.db.sandbox_by_name(ns, name).await?;
        let id = found.ok_or_else(|| Error::no_sandbox(name))?.sandbox.id;
        self.remove_known(&id, how).await
    }

    /// Deletes a sandbox that is there.
    pub(crate) async fn remove_known(
        self: &Arc<Self>,
        id: &SandboxId,
        how: Deleting,
    ) -> Result<Sandbox, Error> {
        let row = self.mark_deleting(id, how).await?;
        self.routes_of_changed(id);
        self.reach(FaultPoint::DeleteIntent).await?;
        self.overtake_launch(&row.sandbox.current_session_id).await?;
        let _held = self.sandbox_locks.lock(id.as_str()).await;
        match self.db.sandbox(id).await? {
            Some(row) => {
                self.finish_delete(&row).await?;
                let mut sandbox = row.sandbox;
                if !sandbox.status.is_terminal() {
                    sandbox.status = SessionStatus::Stopped;
                    sandbox.status_updated_at = self.now();
                }
                Ok(sandbox)
            }
            // Another delete was quicker.
            None => Ok(row.sandbox),
        }
    }

    /// Brings a deletion whose intent is recorded to its end. Holds the lock. (Boxed: it settles
    /// sessions, and settling a failed create deletes.)
    pub(crate) fn finish_delete<'a>(
        self: &'a Arc<Self>,
        row: &'a SandboxRow,
    ) -> BoxFuture<'a, Result<(), Error>> {
        async move {
            let id = &row.sandbox.id;
            for session in self.db.unsettled_sessions_of(id).await? {
                let session_id = session.session.id.clone();
                let closing = session.closing.clone();
                self.end_session(&session_id, Keep::Nothing).await?;
                if let Some(closing) = closing
                    && self.db.snapshot(&closing.snapshot_id).await?.is_none()
                {
                    self.runtime.remove_snapshot(closing.snapshot_id.as_str()).await?;
                }
            }
            self.reach(FaultPoint::DeleteStopped).await?;
            if row.deleting == Deleting::WithOrphans {
                self.drop_orphan_snapshots(id).await?;
            }
            self.reach(FaultPoint::DeleteSnapshotsGone).await?;
            for session in self.db.session_ids(id).await? {
                self.runtime.remove_logs(&session).await?;
            }
            self.reach(FaultPoint::DeleteLogsGone).await?;
            self.db.remove_sandbox(id).await?;
            self.routes_of_changed(id);
            self.activity.forget(id);
            self.images_changed.notify_one();
            self.forks_changed.notify_one();
            self.reach(FaultPoint::DeleteRowsGone).await
        }
        .boxed()
    }
}
