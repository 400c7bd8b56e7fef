//! The life of a session: launch, stop, loss.
//!
//! Owns: every status change. (What callers ask about sessions is in `sessions`.) Invariants: the
//! change is an edge of [`SessionStatus::next`] and a compare-and-set; who does more than one step
//! holds the sandbox's lock; the intent (a status, the id of the closing snapshot) is written
//! before the deed, so each function here can be called again after a crash at any of its points
//! and goes on from there. Called by `sandboxes`, `snapshots`, `adopt` and the reconcilers.

use std::collections::BTreeMap;
use std::sync::Arc;

use bivouac_runtime::{Handle, LaunchSpec, Limits, MOUNT_STEP, RuntimeError};
use bivouac_store::{Closing, Deleting, Durability, SandboxRow, SessionRow, SnapshotRow};
use bivouac_types::Millis;
use bivouac_types::command::EndReason;
use bivouac_types::id::{SandboxId, SessionId, SnapshotId};
use bivouac_types::sandbox::DEFAULT_SNAPSHOT_EXPIRATION_MS;
use bivouac_types::secret::Secret;
use bivouac_types::session::{SessionEvent, SessionStatus};
use bivouac_types::snapshot::{Purpose, Snapshot, SnapshotStatus};

use crate::error::Error;
use crate::fault::FaultPoint;
use crate::inner::{Change, Inner, Live};
use crate::sources::Fetch;

/// What a stop is to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// What the sandbox says: a persistent one is kept.
    AsConfigured,
    /// A snapshot whatever the sandbox says, because a user asked for one.
    Snapshot {
        /// Asked for by the user, ms.
        expiration_ms: Option<i64>,
    },
    /// A snapshot of the state that a rollback leaves.
    Rollback,
    /// Nothing: the sandbox is being deleted, or goes back to an earlier state.
    Nothing,
}

/// Moves a row along an edge of the table.
fn advance(row: &mut SessionRow, event: SessionEvent) -> Result<SessionStatus, Error> {
    let before = row.session.status;
    row.session.status = before.next(event).map_err(|e| {
        Error::internal("A session was asked for a change that its state does not allow.")
            .because(e)
    })?;
    Ok(before)
}

impl Inner {
    /// Launches a session whose row is `pending`. Holds the sandbox's lock. On failure everything
    /// is undone: the first session of a sandbox takes the sandbox with it.
    pub(crate) async fn launch(
        self: &Arc<Self>,
        row: SessionRow,
        from: Option<&SnapshotRow>,
        fetch: Option<&Fetch>,
    ) -> Result<SessionRow, Error> {
        let point = if row.first { FaultPoint::CreateLaunched } else { FaultPoint::ResumeLaunched };
        let id = row.session.id.clone();
        let changes = self.secret_changes();
        let launched = match self.start_up(&row, from, fetch).await {
            Ok(handle) => match self.reach(point).await {
                Ok(()) => {
                    let fetched = fetch.is_some();
                    self.mark_running(&row, fetched).await.map(|marked| (handle, marked))
                }
                Err(error) => Err(error),
            },
            Err(error) => Err(error),
        };
        match launched {
            Ok((handle, (row, true))) => {
                let live = self.serve(row.clone(), handle);
                // One that changed before the session could be found was told to all but this one.
                self.follow_secrets(&live.handle, &row, changes).await;
                Ok(row)
            }
            Ok((handle, (row, false))) => {
                // A stop overtook the launch, and waits for the lock that is held here.
                self.finish_stop(row, Some(handle)).await?;
                Err(Error::stopped(&id, "it was stopped while it was starting"))
            }
            Err(error) => {
                tracing::warn!(session = %id, cause = %chain(&error), "launch failed");
                if let Err(undo) = self.launch_failed(&id, "it could not be started").await {
                    tracing::error!(session = %id, cause = %chain(&undo), "cannot undo a launch yet");
                }
                Err(error)
            }
        }
    }

    /// Launches, and fetches what is to be there before the session runs.
    async fn start_up(
        &self,
        row: &SessionRow,
        from: Option<&SnapshotRow>,
        fetch: Option<&Fetch>,
    ) -> Result<Arc<dyn Handle>, Error> {
        let Some(fetch) = fetch else {
            let mut spec = self.launch_spec(row, from, self.egress_of(row).await?);
            spec.mounts = self.launch_mounts(row).await?;
            let handle =
                self.runtime.launch(&spec).await.map_err(|error| launch_error(error, row))?;
            self.note_written(row).await?;
            return Ok(handle);
        };
        let mut open = row.clone();
        open.session.policy.clone_from(&fetch.policy);
        let mut spec = self.launch_spec(row, from, self.egress_of(&open).await?);
        spec.mounts = self.launch_mounts(row).await?;
        let handle = self.runtime.launch(&spec).await.map_err(|error| launch_error(error, row))?;
        self.note_written(row).await?;
        self.fetch(row, &handle, fetch).await?;
        let mut own = row.clone();
        own.session.policy_generation += 1;
        self.put_policy(&handle, &own).await?;
        Ok(handle)
    }

    /// Writes that init has answered. `false`: the session was not `pending` any more.
    async fn mark_running(
        &self,
        known: &SessionRow,
        fetched: bool,
    ) -> Result<(SessionRow, bool), Error> {
        let now = self.now();
        self.change_session_from(Some(known.clone()), &known.session.id, |row| {
            if row.session.status != SessionStatus::Pending {
                return Ok(Change::Leave);
            }
            advance(row, SessionEvent::Launched)?;
            row.session.started_at = Some(now);
            // While it fetched, another policy was in force: the broker has the second one now.
            row.session.policy_generation += u64::from(fetched);
            Ok(Change::Write)
        })
        .await
    }

    fn launch_spec(
        &self,
        row: &SessionRow,
        from: Option<&SnapshotRow>,
        egress: Secret,
    ) -> LaunchSpec {
        let s = &row.session;
        let memory_mb = u64::try_from(s.resources.memory_mb).unwrap_or(0);
        LaunchSpec {
            session: s.id.clone(),
            hostname: bivouac_types::name::hostname(&s.sandbox_name),
            image: s.image.clone(),
            from_snapshot: from.map(|f| f.snapshot.id.as_str().to_owned()),
            snapshot_bytes: from.map_or(0, |f| u64::try_from(f.snapshot.size_bytes).unwrap_or(0)),
            fresh: from.is_some_and(|f| f.sandbox_id != s.sandbox_id),
            limits: Limits {
                memory_bytes: memory_mb << 20,
                vcpus: u32::try_from(s.resources.vcpus).unwrap_or(1),
                pids: self.config.pids,
                disk_bytes: self.disk_of(&s.resources),
            },
            id_range: s.id_range,
            cwd: s.cwd.clone(),
            mounts: Vec::new(),
            request: crate::request::current(),
            egress: Some(egress),
        }
    }

    /// Takes a running session into service: it can be found, its end is noticed, its time runs.
    pub(crate) fn serve(self: &Arc<Self>, row: SessionRow, handle: Arc<dyn Handle>) -> Arc<Live> {
        let id = row.session.id.clone();
        let mut gone = handle.gone();
        let live = self.add_live(row.clone(), handle);
        self.set_deadline(&id, None, &row);
        self.attend(&live);
        let inner = Arc::clone(self);
        let sandbox = row.session.sandbox_id;
        self.spawn(async move {
            // A dropped sender means that the runtime has let go of it: as good as gone.
            let _ = gone.wait_for(|gone| *gone).await;
            let held = inner.sandbox_locks.lock(sandbox.as_str()).await;
            if let Err(error) = inner.lost(&id, "its processes ended unexpectedly").await {
                tracing::error!(session = %id, cause = %chain(&error), "cannot settle a lost session yet");
            }
            drop(held);
        });
        live
    }

    /// Settles a `pending` session that will not run, or one that a stop overtook. Holds the lock.
    pub(crate) async fn launch_failed(
        self: &Arc<Self>,
        id: &SessionId,
        why: &str,
    ) -> Result<(), Error> {
        let (row, _) = self
            .change_session(id, |row| {
                if row.session.status != SessionStatus::Pending {
                    return Ok(Change::Leave);
                }
                advance(row, SessionEvent::LaunchFailed)?;
                row.session.reason = Some(why.to_owned());
                Ok(Change::Write)
            })
            .await?;
        if row.session.status.is_ending() {
            self.finish_stop(row, None).await?;
            return Ok(());
        }
        if row.session.status == SessionStatus::Running {
            return self.undo_running(row, why).await;
        }
        self.settle(row).await
    }

    /// A launch that counts as failed and is recorded as running: the database wrote that, and went
    /// away before it said so. Holds the lock.
    async fn undo_running(self: &Arc<Self>, row: SessionRow, why: &str) -> Result<(), Error> {
        if !row.first {
            return self.lost(&row.session.id, why).await;
        }
        let sandbox = self.mark_deleting(&row.session.sandbox_id, Deleting::Yes).await?;
        self.finish_delete(&sandbox).await
    }

    /// Settles a session that has failed or was aborted: keeps what is to be kept, removes the rest.
    /// Holds the lock.
    pub(crate) async fn settle(self: &Arc<Self>, row: SessionRow) -> Result<(), Error> {
        if row.settled {
            return Ok(());
        }
        if row.session.status == SessionStatus::Failed {
            return self.settle_failed(row).await;
        }
        let id = row.session.id.clone();
        // Whatever still runs must not write into what is kept.
        let handle = self.live(&id).map(|live| Arc::clone(&live.handle));
        self.kill(handle.as_ref()).await?;
        self.end_commands(&row, EndReason::Lost).await?;
        self.remove_live(&id);
        let kept = self.keep_lost(&row).await?;
        self.runtime.remove(&id).await?;
        self.reach(FaultPoint::LostRemoved).await?;
        self.mark_settled(&id, kept.as_ref().map(|k| k.created_at)).await?;
        if kept.is_some() {
            // What a loss of power left may be torn: it does not take the place of what was kept before.
            self.evict_or_log(&row.session.sandbox_id, 1).await;
        } else {
            self.used_until_now(&row).await;
        }
        Ok(())
    }

    /// Takes the closing snapshot of a lost session, if there is anything to take it of.
    async fn keep_lost(&self, row: &SessionRow) -> Result<Option<Snapshot>, Error> {
        let Some(closing) = &row.closing else { return Ok(None) };
        if self.known_sandbox(&row.session.sandbox_id).await?.deleting != Deleting::No {
            return Ok(None);
        }
        if let Some(known) = self.db.snapshot(&closing.snapshot_id).await? {
            return Ok(Some(known.snapshot));
        }
        let id = &row.session.id;
        match self.runtime.snapshot(id, closing.snapshot_id.as_str()).await {
            Ok(stat) => {
                self.reach(FaultPoint::LostSnapshotTaken).await?;
                let snapshot = self.record_snapshot(row, closing, stat.bytes).await?;
                self.reach(FaultPoint::LostSnapshotRecorded).await?;
                Ok(Some(snapshot))
            }
            Err(error) if nothing_left(&error) => {
                tracing::warn!(session = %id, %error, "nothing is left to keep of a lost session");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn settle_failed(self: &Arc<Self>, row: SessionRow) -> Result<(), Error> {
        let id = row.session.id.clone();
        if row.first {
            // The create was never answered with success: the sandbox goes, its name is free.
            let mark = |row: &mut SandboxRow| {
                let fresh = row.deleting == Deleting::No;
                row.deleting = if fresh { Deleting::Yes } else { row.deleting };
                Ok(fresh)
            };
            self.change_sandbox(&row.session.sandbox_id, mark).await?;
        }
        self.reach(FaultPoint::LaunchFailedRecorded).await?;
        self.runtime.remove(&id).await?;
        self.reach(FaultPoint::LaunchFailedRemoved).await?;
        self.mark_settled(&id, None).await?;
        if row.first {
            let sandbox = self.known_sandbox(&row.session.sandbox_id).await?;
            self.finish_delete(&sandbox).await?;
        }
        Ok(())
    }

    /// Writes that nothing is left of a session that has failed or was aborted.
    async fn mark_settled(
        &self,
        id: &SessionId,
        snapshotted_at: Option<Millis>,
    ) -> Result<(), Error> {
        let (row, _) = self
            .change_session(id, |row| {
                if std::mem::replace(&mut row.settled, true) {
                    return Ok(Change::Leave);
                }
                let s = &mut row.session;
                s.snapshotted_at = snapshotted_at;
                Ok(match (s.started_at, s.aborted_at) {
                    (Some(start), Some(end)) => {
                        Change::WriteAndAdd { cpu_ms: 0, lasted_ms: end.saturating_sub(start) }
                    }
                    _ => Change::Write,
                })
            })
            .await?;
        self.free_range(row.session.id_range);
        Ok(())
    }

    /// A session's processes are gone. If nobody asked for that, it is aborted and settled. Holds
    /// the lock.
    pub(crate) async fn lost(self: &Arc<Self>, id: &SessionId, why: &str) -> Result<(), Error> {
        let Some(row) = self.db.session(id).await? else { return Ok(()) };
        if row.session.status != SessionStatus::Running {
            return Ok(());
        }
        let sandbox = self.known_sandbox(&row.session.sandbox_id).await?;
        let closing = self.closing(&sandbox, Keep::AsConfigured)?;
        let now = self.now();
        let (row, aborted) = self
            .change_session(id, |row| {
                if row.session.status != SessionStatus::Running {
                    return Ok(Change::Leave);
                }
                advance(row, SessionEvent::Lost)?;
                row.session.end_pause(now);
                row.session.aborted_at = Some(now);
                row.session.reason = Some(why.to_owned());
                row.closing.clone_from(&closing);
                Ok(Change::Write)
            })
            .await?;
        if aborted {
            tracing::warn!(session = %id, why, "session aborted");
            self.reach(FaultPoint::LostRecorded).await?;
            self.settle(row).await?;
            self.lost_changed.notify_one();
        }
        Ok(())
    }

    /// The snapshot that the end of a session takes.
    fn closing(&self, sandbox: &SandboxRow, keep: Keep) -> Result<Option<Closing>, Error> {
        let asked = match keep {
            Keep::Nothing => return Ok(None),
            _ if sandbox.deleting != Deleting::No => return Ok(None),
            Keep::AsConfigured if !sandbox.sandbox.persistent => return Ok(None),
            Keep::AsConfigured | Keep::Rollback => None,
            Keep::Snapshot { expiration_ms } => expiration_ms,
        };
        let configured = sandbox.sandbox.snapshot_expiration_ms;
        Ok(Some(Closing {
            snapshot_id: self.ids.snapshot(self.now())?,
            automatic: keep == Keep::AsConfigured,
            rollback: keep == Keep::Rollback,
            expiration_ms: asked.or(configured).unwrap_or(DEFAULT_SNAPSHOT_EXPIRATION_MS),
        }))
    }

    /// Ends a session that is pending or running; goes on with an end that has begun. Holds the
    /// lock. Answers the snapshot if this call took one.
    pub(crate) async fn end_session(
        self: &Arc<Self>,
        id: &SessionId,
        keep: Keep,
    ) -> Result<(SessionRow, Option<Snapshot>), Error> {
        let row = self.known_session(id).await?;
        let sandbox = self.known_sandbox(&row.session.sandbox_id).await?;
        let kept = keep != Keep::Nothing && sandbox.deleting == Deleting::No;
        let failed = if kept && row.session.status == SessionStatus::Running {
            Box::pin(self.before_stop(&sandbox, &row)).await?
        } else {
            None
        };
        let closing = self.closing(&sandbox, keep)?;
        let now = self.now();
        let (row, begun) = self
            .change_session_from(Some(row), id, |row| {
                let event = match row.session.status {
                    SessionStatus::Running if closing.is_some() => SessionEvent::StopWithSnapshot,
                    SessionStatus::Pending | SessionStatus::Running => SessionEvent::Stop,
                    _ => return Ok(Change::Leave),
                };
                row.closing = closing.clone().filter(|_| event == SessionEvent::StopWithSnapshot);
                row.session.requested_stop_at = Some(now);
                row.session.end_pause(now);
                if failed.is_some() {
                    row.session.reason.clone_from(&failed);
                }
                advance(row, event)?;
                Ok(Change::Write)
            })
            .await?;
        if begun {
            self.reach(FaultPoint::StopIntent).await?;
        }
        if row.session.status.is_ending() {
            let handle = self.live(id).map(|live| Arc::clone(&live.handle));
            return self.finish_stop(row, handle).await;
        }
        self.settle(row.clone()).await?;
        Ok((row, None))
    }

    /// Marks a `pending` session as to be stopped, without the lock that its launch holds: the
    /// launch finds it so and ends it.
    pub(crate) async fn overtake_launch(&self, id: &SessionId) -> Result<(), Error> {
        let now = self.now();
        self.change_session(id, |row| {
            if row.session.status != SessionStatus::Pending {
                return Ok(Change::Leave);
            }
            row.session.requested_stop_at = Some(now);
            advance(row, SessionEvent::Stop)?;
            Ok(Change::Write)
        })
        .await?;
        Ok(())
    }

    /// Brings a stop whose intent is recorded to its end. Holds the lock.
    pub(crate) async fn finish_stop(
        self: &Arc<Self>,
        row: SessionRow,
        handle: Option<Arc<dyn Handle>>,
    ) -> Result<(SessionRow, Option<Snapshot>), Error> {
        let id = row.session.id.clone();
        let sandbox = self.known_sandbox(&row.session.sandbox_id).await?;
        let handle = match handle {
            Some(handle) => Some(handle),
            None => self.runtime.adopt(&id).await?,
        };
        let cpu_ms = self.kill(handle.as_ref()).await?;
        self.reach(FaultPoint::StopKilled).await?;
        self.end_commands(&row, EndReason::SandboxStopped).await?;
        self.reach(FaultPoint::StopCommandsEnded).await?;
        let mut taken = None;
        if let Some(closing) = row.closing.as_ref().filter(|_| sandbox.deleting == Deleting::No) {
            taken = match self.db.snapshot(&closing.snapshot_id).await? {
                Some(known) => Some(known.snapshot),
                None => self.keep_stopped(&row, closing, handle.is_some()).await?,
            };
            self.reach(FaultPoint::StopSnapshotRecorded).await?;
        }
        self.runtime.remove(&id).await?;
        self.reach(FaultPoint::StopRemoved).await?;
        let row = self.stopped(&id, cpu_ms, taken.as_ref().map(|t| t.created_at)).await?;
        self.remove_live(&id);
        self.reach(FaultPoint::StopEnded).await?;
        if taken.is_some() {
            self.evict_or_log(&row.session.sandbox_id, 0).await;
        } else {
            self.used_until_now(&row).await;
        }
        Ok((row, taken))
    }

    /// A session has ended that left no snapshot: its sandbox would start from the same one again, whose
    /// use ends only now.
    async fn used_until_now(&self, row: &SessionRow) {
        let Some(source) = &row.session.source_snapshot_id else { return };
        let write = async {
            let mut tx = self.db.begin(Durability::Process).await?;
            tx.use_snapshot(source, self.now()).await?;
            tx.commit().await
        };
        if let Err(error) = write.await {
            tracing::warn!(snapshot = %source, %error, "could not note the end of a snapshot's use");
        }
        self.expiry_changed.notify_one();
        self.forks_changed.notify_one();
    }

    /// Takes the closing snapshot of a stop, and records it. `None`: the host lost its power before anything
    /// of the session had reached the disk, but not before its record had. `ran`: it ran until now.
    async fn keep_stopped(
        &self,
        row: &SessionRow,
        closing: &Closing,
        ran: bool,
    ) -> Result<Option<Snapshot>, Error> {
        let id = &row.session.id;
        match self.runtime.snapshot(id, closing.snapshot_id.as_str()).await {
            Ok(stat) => {
                self.reach(FaultPoint::StopSnapshotTaken).await?;
                Ok(Some(self.record_snapshot(row, closing, stat.bytes).await?))
            }
            Err(error) if !ran && nothing_left(&error) => {
                tracing::warn!(session = %id, %error, "nothing is left to keep of a session whose stop was cut off");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Snapshots that fall out are not worth failing a stop for: the next one tries again.
    async fn evict_or_log(&self, sandbox: &SandboxId, more: usize) {
        if let Err(error) = self.evict_behind(sandbox, more).await {
            tracing::error!(%sandbox, cause = %chain(&error), "cannot evict old snapshots yet");
        }
    }

    /// Kills everything in a session. Answers the CPU time that it used, if it could tell.
    async fn kill(&self, handle: Option<&Arc<dyn Handle>>) -> Result<Option<i64>, Error> {
        let Some(handle) = handle else { return Ok(None) };
        let usage = handle.usage().await.ok();
        match handle.kill().await {
            Ok(()) | Err(RuntimeError::Gone(_)) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(usage.map(|u| i64::try_from(u.cpu_ms).unwrap_or(i64::MAX)))
    }

    /// Records a snapshot whose data is there, as what its sandbox starts from next.
    async fn record_snapshot(
        &self,
        row: &SessionRow,
        closing: &Closing,
        bytes: u64,
    ) -> Result<Snapshot, Error> {
        let s = &row.session;
        let purpose = if closing.rollback { Purpose::Rollback } else { Purpose::Kept };
        let record = snapshot_row(row, &closing.snapshot_id, self.now());
        let record = SnapshotRow {
            snapshot: Snapshot {
                size_bytes: i64::try_from(bytes).unwrap_or(i64::MAX),
                automatic: closing.automatic,
                purpose,
                ..record.snapshot.kept_for(closing.expiration_ms)
            },
            ..record
        };
        // What a stop has promised to keep must survive a power cut as well.
        let mut tx = self.db.begin(Durability::Power).await?;
        tx.insert_snapshot(&record).await?;
        let (id, now) = (&record.snapshot.id, record.snapshot.created_at);
        tx.move_current_snapshot(&s.sandbox_id, &s.id, id, now).await?;
        tx.commit().await?;
        self.expiry_changed.notify_one();
        self.forks_changed.notify_one();
        Ok(record.snapshot)
    }

    /// Writes the end of a stop.
    async fn stopped(
        &self,
        id: &SessionId,
        cpu_ms: Option<i64>,
        snapshotted_at: Option<Millis>,
    ) -> Result<SessionRow, Error> {
        let now = self.now();
        let (row, _) = self
            .change_session(id, |row| {
                if !row.session.status.is_ending() {
                    return Ok(Change::Leave);
                }
                advance(row, SessionEvent::Ended)?;
                row.settled = true;
                let s = &mut row.session;
                s.stopped_at = Some(now);
                s.active_cpu_ms = cpu_ms;
                s.snapshotted_at = snapshotted_at;
                Ok(Change::WriteAndAdd {
                    cpu_ms: cpu_ms.unwrap_or(0),
                    lasted_ms: s.started_at.map_or(0, |start| now.saturating_sub(start)),
                })
            })
            .await?;
        self.free_range(row.session.id_range);
        self.images_changed.notify_one();
        Ok(row)
    }
}

/// A record of a session's snapshot, with nothing special about it: kept for ever, of unknown size.
pub(crate) fn snapshot_row(row: &SessionRow, id: &SnapshotId, now: Millis) -> SnapshotRow {
    let s = &row.session;
    let snapshot = Snapshot {
        id: id.clone(),
        source_session_id: s.id.clone(),
        sandbox_name: s.sandbox_name.clone(),
        status: SnapshotStatus::Created,
        image: s.image.clone(),
        runtime: s.runtime.clone(),
        region: s.region.clone(),
        size_bytes: 0,
        measured: true,
        automatic: false,
        parent_id: s.source_snapshot_id.clone(),
        expiration_ms: 0,
        expires_at: None,
        created_at: now,
        updated_at: now,
        last_used_at: None,
        labels: BTreeMap::new(),
        purpose: Purpose::Kept,
        stall_us: 0,
    };
    SnapshotRow {
        snapshot,
        namespace: row.namespace.clone(),
        node: s.node.clone(),
        sandbox_id: s.sandbox_id.clone(),
    }
}

/// Whether a snapshot failed because there is nothing to take it of.
fn nothing_left(error: &RuntimeError) -> bool {
    match error {
        RuntimeError::Gone(_) | RuntimeError::NoSnapshot(_) => true,
        RuntimeError::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
        _ => false,
    }
}

/// What the client hears of a failed launch; the log gets the whole chain.
fn launch_error(error: RuntimeError, row: &SessionRow) -> Error {
    match error {
        // What is in the way of a drive is the sandbox's own doing, and only its user can mend it.
        RuntimeError::Launch { ref step, ref message, .. } if step == MOUNT_STEP => {
            let name = &row.session.sandbox_name;
            let message = format!("Sandbox '{name}' could not be started: {message}.");
            Error::new(crate::ErrorKind::Invalid, "mount_failed", message).because(error)
        }
        RuntimeError::Launch { .. } | RuntimeError::Io { .. } => {
            let name = &row.session.sandbox_name;
            let step = match &error {
                RuntimeError::Launch { step, .. } => step.as_str(),
                _ => "prepare",
            };
            let message = format!(
                "Sandbox '{name}' could not be started (step {step}); nothing of it is left. \
                 The engine's log has the cause; `bivouac doctor` checks the host."
            );
            Error::new(crate::ErrorKind::Internal, "launch_failed", message).because(error)
        }
        other => other.into(),
    }
}

/// An error with all its causes, for the log.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
