//! Settling what a crash, or an engine that was stopped, left behind.
//!
//! Invariant: after [`Inner::adopt_all`] every session of this node is either in service or ended,
//! or its trouble is logged and the orphan reconciler goes on with it. Called by `Engine::open`
//! before any request is taken, and piecewise by the orphan reconciler.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bivouac_runtime::Handle;
use bivouac_store::{Deleting, SessionRow};
use bivouac_types::command::{CommandEnd, EndReason};
use bivouac_types::id::{SandboxId, SessionId};
use bivouac_types::sandbox::Sandbox;
use bivouac_types::session::SessionStatus;
use futures_util::StreamExt;

use crate::error::Error;
use crate::forks::UNBORN;
use crate::inner::{Inner, Live, locked};
use crate::lifecycle::chain;
use crate::terminals::is_generated;

/// Sessions that are settled at the same time.
const PARALLEL: usize = 16;

impl Inner {
    /// Settles everything of this node. Fails only when the database does not answer.
    pub(crate) async fn adopt_all(self: &Arc<Self>) -> Result<(), Error> {
        let rows = self.db.unsettled_sessions(&self.config.node).await?;
        {
            let mut ranges = locked(&self.ranges);
            rows.iter().for_each(|row| ranges.mark(row.session.id_range));
        }
        futures_util::stream::iter(rows)
            .for_each_concurrent(PARALLEL, |row| self.settle_or_log(row))
            .await;
        self.finish_deletions(true).await?;
        self.end_forgotten_commands().await?;
        // Nothing of this engine is in the middle of anything yet.
        self.collect(false, false, None).await?;
        self.sweep_drives().await
    }

    /// Goes on with one session, whatever it is in the middle of. Takes the lock.
    pub(crate) async fn settle_or_log(self: &Arc<Self>, row: SessionRow) {
        let id = row.session.id.clone();
        let _held = self.sandbox_locks.lock(row.session.sandbox_id.as_str()).await;
        if let Err(error) = self.settle_any(&id).await {
            tracing::error!(session = %id, cause = %chain(&error), "cannot settle a session yet");
        }
    }

    /// Holds the lock.
    pub(crate) async fn settle_any(
        self: &Arc<Self>,
        id: &bivouac_types::id::SessionId,
    ) -> Result<(), Error> {
        let Some(row) = self.db.session(id).await?.filter(|row| !row.settled) else {
            return Ok(());
        };
        match row.session.status {
            SessionStatus::Pending => {
                self.launch_failed(id, "the engine ended while it was starting").await
            }
            SessionStatus::Running if self.runs(id) => Ok(()),
            SessionStatus::Running if self.live(id).is_some() => {
                self.lost(id, "its processes ended unexpectedly").await
            }
            SessionStatus::Running => self.adopt_session(row).await.map(drop),
            SessionStatus::Stopping | SessionStatus::Snapshotting => {
                let handle = self.live(id).map(|live| Arc::clone(&live.handle));
                self.finish_stop(row, handle).await.map(drop)
            }
            SessionStatus::Stopped | SessionStatus::Failed | SessionStatus::Aborted => {
                self.settle(row).await
            }
        }
    }

    /// The sandbox of an earlier create, unless its start was interrupted (the database went away):
    /// then that is undone.
    pub(crate) async fn undo_interrupted(
        self: &Arc<Self>,
        id: &SandboxId,
    ) -> Result<Option<Sandbox>, Error> {
        let _held = self.sandbox_locks.lock(id.as_str()).await;
        let Some(row) = self.db.sandbox(id).await?.filter(|row| row.deleting == Deleting::No)
        else {
            return Ok(None);
        };
        let session = self.known_session(&row.sandbox.current_session_id).await?.session;
        if session.status != SessionStatus::Pending {
            return Ok(Some(row.sandbox));
        }
        // Nobody holds the lock, so nobody launches it any more.
        self.launch_failed(&session.id, "its start was interrupted").await?;
        Ok(self.db.sandbox(id).await?.map(|row| row.sandbox))
    }

    /// Whether this process holds a session whose processes are there.
    pub(crate) fn runs(&self, id: &SessionId) -> bool {
        self.live(id).is_some_and(|live| !*live.handle.gone().borrow())
    }

    /// Takes a session that is recorded as running back into service, or settles its loss. Holds
    /// the lock. Answers whether it runs.
    pub(crate) async fn adopt_session(self: &Arc<Self>, row: SessionRow) -> Result<bool, Error> {
        let id = row.session.id.clone();
        let handle = self.runtime.adopt(&id).await?;
        let Some(handle) = handle.filter(|handle| !*handle.gone().borrow()) else {
            let why = "its processes were gone when the engine looked for them";
            self.lost(&id, why).await?;
            return Ok(false);
        };
        if row.session.paused_at.is_some() {
            // The engine before may have ended between the record and the deed.
            if let Err(error) = handle.freeze().await {
                tracing::error!(session = %id, cause = %chain(&error), "a paused sandbox may not stand still");
            }
        } else if let Err(error) = self.thaw(&handle).await {
            // Or while it stood still for a snapshot.
            tracing::error!(session = %id, cause = %chain(&error), "it may stand still for a while");
        }
        let live = self.serve(row, Arc::clone(&handle));
        self.adopt_commands(&live, &handle).await?;
        self.settle_mounts_or_log(&live).await;
        // A crash may lie between the record of a policy and its broker, or in the middle of a learning.
        self.agree_again(&live).await;
        self.close_adopted(&live).await;
        self.refresh_values(&live);
        tracing::info!(session = %id, "adopted");
        Ok(true)
    }

    async fn adopt_commands(
        self: &Arc<Self>,
        live: &Arc<Live>,
        handle: &Arc<dyn Handle>,
    ) -> Result<(), Error> {
        let session = handle.session();
        for open in self.db.commands(session, true).await? {
            let command = open.command;
            if let Some(progress) = handle.progress(&command.id) {
                let id = command.id.clone();
                let lonely = command.terminal.as_deref().is_some_and(is_generated);
                self.watch_command(live, command, progress);
                if lonely {
                    self.expect_client(live, &id);
                }
                continue;
            }
            let log = self.runtime.log_progress(session, &command.id).await.unwrap_or_default();
            match log.end {
                Some(end) => self.db.end_command(&command.id, &end).await?,
                // The row was written, the program never started, and nobody was told its id.
                None if log.log_bytes == 0 => self.db.remove_command(&command.id).await?,
                None => {
                    let duration_ms = self.now().saturating_sub(command.started_at);
                    let reason = Some(EndReason::Lost);
                    let end = CommandEnd { exit_code: None, duration_ms, reason };
                    self.db.end_command(&command.id, &end).await?;
                }
            }
        }
        Ok(())
    }

    /// Goes on with deletions. Without `wait`, those that somebody works on are left alone.
    pub(crate) async fn finish_deletions(self: &Arc<Self>, wait: bool) -> Result<(), Error> {
        let rows = self.db.sandboxes_being_deleted().await?;
        // Asked after the rows were read: those of a call that ended in between are born, or going.
        let unborn = !wait && self.holds.is_held(UNBORN);
        for row in rows {
            let id = row.sandbox.id;
            if unborn && row.deleting == Deleting::Unborn {
                continue;
            }
            let held = if wait {
                Some(self.sandbox_locks.lock(id.as_str()).await)
            } else {
                self.sandbox_locks.try_lock(id.as_str())
            };
            if held.is_none() {
                continue;
            }
            let going = self.db.sandbox(&id).await?.filter(|row| row.deleting != Deleting::No);
            let Some(row) = going else { continue };
            if let Err(error) = self.finish_delete(&row).await {
                tracing::error!(sandbox = %row.sandbox.name, cause = %chain(&error), "cannot finish a deletion yet");
            }
        }
        Ok(())
    }

    /// Ends commands whose session ended between the two writes.
    async fn end_forgotten_commands(&self) -> Result<(), Error> {
        for id in self.db.settled_with_open_commands().await? {
            if let Some(row) = self.db.session(&id).await? {
                self.end_commands(&row, EndReason::Lost).await?;
            }
        }
        Ok(())
    }

    /// Removes what the runtime has and no row knows, and marks snapshots whose data is missing: see `gc`.
    pub(crate) async fn sweep(&self) -> Result<(), Error> {
        let collected = self.collect(false, false, self.oldest_operation()).await?;
        if collected.young > 0 {
            // Somebody's, or left by somebody: the next pass can tell.
            self.leftovers.store(true, Ordering::Release);
        }
        self.sweep_drives().await
    }
}
