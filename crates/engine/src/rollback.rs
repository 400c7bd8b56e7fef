//! Going back: a sandbox starts from an earlier snapshot and stays the same sandbox.
//!
//! Invariant: a crash at any step leaves the state from before or the one that was asked for, never a third
//! one. So with `discard` the way back is written before anything is stopped; without, the stop that keeps
//! the present state is recorded before the sandbox is turned to the other. Called by the engine's own call.

use std::sync::Arc;

use bivouac_store::{Durability, SandboxRow, SnapshotRow};
use bivouac_types::access::Verb;
use bivouac_types::id::SnapshotId;
use bivouac_types::name::Namespace;
use bivouac_types::session::SessionStatus;
use bivouac_types::snapshot::{Purpose, Snapshot};

use crate::api::{Principal, Rollback, RolledBack, View};
use crate::error::{Error, ErrorKind};
use crate::fault::FaultPoint;
use crate::inner::{Inner, busy};
use crate::lifecycle::Keep;
use crate::resolve::parse_snapshot;
use crate::{Engine, Operation};

/// How often a step is tried anew when somebody else changed the sandbox.
const ATTEMPTS: u32 = 20;

impl Inner {
    /// The snapshot that was asked for, else the last that was taken of the sandbox.
    async fn rollback_target(
        &self,
        ns: &Namespace,
        sandbox: &SandboxRow,
        wanted: Option<&str>,
    ) -> Result<SnapshotRow, Error> {
        if let Some(text) = wanted {
            return self.usable_snapshot(&ns.team, &parse_snapshot(text)?).await;
        }
        let now = self.now();
        let taken = self.db.snapshots_of(&sandbox.sandbox.id).await?;
        let last = taken.into_iter().find(|row| {
            row.snapshot.purpose == Purpose::Kept
                && row.snapshot.expires_at.is_none_or(|at| at > now)
        });
        if let Some(last) = last {
            return Ok(last);
        }
        match &sandbox.sandbox.current_snapshot_id {
            // What it was made from.
            Some(id) => self.usable_snapshot(&ns.team, id).await,
            None => {
                let name = &sandbox.sandbox.name;
                let message = format!(
                    "Sandbox '{name}' has no snapshot to go back to: none was taken of it, and it was made \
                     from an image."
                );
                Err(Error::new(ErrorKind::Conflict, "no_snapshot", message))
            }
        }
    }

    /// Has a sandbox start from a snapshot next; on disk when it answers.
    async fn turn_to(&self, sandbox: &SandboxRow, to: &SnapshotRow) -> Result<SandboxRow, Error> {
        let id = &to.snapshot.id;
        for _ in 0..ATTEMPTS {
            let mut row = self.known_sandbox(&sandbox.sandbox.id).await?;
            let (s, now) = (&mut row.sandbox, self.now());
            s.current_snapshot_id = Some(id.clone());
            s.image.clone_from(&to.snapshot.image);
            s.updated_at = now;
            let mut tx = self.db.begin(Durability::Power).await?;
            match tx.update_sandbox(&mut row).await {
                Ok(()) => {}
                Err(error) if error.is_changed() => continue,
                Err(error) => return Err(error.into()),
            }
            if !tx.use_snapshot(id, now).await? {
                return Err(Error::no_snapshot(id.as_str()));
            }
            tx.commit().await?;
            self.expiry_changed.notify_one();
            self.forks_changed.notify_one();
            return Ok(row);
        }
        Err(busy(&format!("sandbox '{}'", sandbox.sandbox.name)))
    }

    async fn go_back(
        self: &Arc<Self>,
        ns: &Namespace,
        name: &str,
        spec: Rollback,
    ) -> Result<RolledBack, Error> {
        let id = self.named(ns, name).await?.sandbox.id;
        let _held = self.sandbox_locks.lock(id.as_str()).await;
        let mut sandbox = self.named(ns, name).await?;
        let mut session = self.known_session(&sandbox.sandbox.current_session_id).await?;
        if session.session.status != SessionStatus::Running && !session.settled {
            // An earlier call was interrupted in the middle: nobody else goes on with it now.
            self.settle_any(&session.session.id).await?;
            sandbox = self.named(ns, name).await?;
            session = self.known_session(&sandbox.sandbox.current_session_id).await?;
        }
        if sandbox.sandbox.ephemeral {
            let message =
                format!("Sandbox '{name}' is ephemeral: it has one session and no other.");
            return Err(Error::new(ErrorKind::Conflict, "ephemeral", message));
        }
        let to = self.rollback_target(ns, &sandbox, spec.snapshot.as_deref()).await?;
        // No image: nothing has changed yet.
        self.image(&to.snapshot.image).await?;
        let _hold = self.holds.hold(to.snapshot.id.as_str());
        let running =
            session.session.status == SessionStatus::Running && self.still_runs(&session).await?;
        if !running {
            let sandbox = self.turn_to(&sandbox, &to).await?;
            let view = self.view(sandbox.sandbox, false).await?;
            return Ok(RolledBack { view, to: to.snapshot, kept: None });
        }
        let kept = self.leave_state(&sandbox, &session.session.id, &to, spec.discard).await?;
        let view = self.start_from(&sandbox, &to.snapshot.id).await?;
        self.reach(FaultPoint::RollbackRunning).await?;
        Ok(RolledBack { view, to: to.snapshot, kept })
    }

    /// Ends the session, keeps its state unless that is not wanted, and turns the sandbox to `to`.
    async fn leave_state(
        self: &Arc<Self>,
        sandbox: &SandboxRow,
        session: &bivouac_types::id::SessionId,
        to: &SnapshotRow,
        discard: bool,
    ) -> Result<Option<Snapshot>, Error> {
        if discard {
            self.turn_to(sandbox, to).await?;
            self.reach(FaultPoint::RollbackTurned).await?;
            self.end_session(session, Keep::Nothing).await?;
            return Ok(None);
        }
        let (_, kept) = self.end_session(session, Keep::Rollback).await?;
        self.reach(FaultPoint::RollbackKept).await?;
        self.turn_to(sandbox, to).await?;
        self.reach(FaultPoint::RollbackTurned).await?;
        Ok(kept)
    }

    async fn start_from(
        self: &Arc<Self>,
        sandbox: &SandboxRow,
        to: &SnapshotId,
    ) -> Result<View, Error> {
        for _ in 0..ATTEMPTS {
            let row = self.known_sandbox(&sandbox.sandbox.id).await?;
            match self.start_again(row).await {
                Ok(Some(view)) => return Ok(view),
                Ok(None) => {}
                Err(mut error) => {
                    error.message = format!(
                        "Sandbox '{}' is at {to} now and could not be started: {}",
                        sandbox.sandbox.name, error.message
                    );
                    return Err(error);
                }
            }
        }
        Err(busy(&format!("sandbox '{}'", sandbox.sandbox.name)))
    }
}

impl Engine {
    /// Has a sandbox go back to a snapshot. Its name, routes and configuration stay; one that runs does so
    /// again from there, one that is stopped stays stopped. What it leaves is kept as a snapshot, unless
    /// `discard`.
    ///
    /// # Errors
    /// 404, 409 without a snapshot to go back to, 410 for a snapshot that is gone, 429 when the host is full.
    pub async fn rollback(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        spec: Rollback,
    ) -> Result<RolledBack, Error> {
        who.may(Verb::Write, ns)?;
        if let Some(text) = &spec.snapshot {
            self.inner.check_snapshot(who, &ns.team, &parse_snapshot(text)?).await?;
        }
        self.inner.check_open()?;
        // Before anything is stopped: it starts again at once.
        self.inner.admit().await?;
        tracing::info!(by = %who.name, sandbox = %name, discard = spec.discard, "rollback");
        let inner = Arc::clone(&self.inner);
        let (ns, name) = (ns.clone(), name.to_owned());
        let work = async move { inner.go_back(&ns, &name, spec).await };
        self.inner.run(self.inner.counted(Operation::Rollback, work)).await
    }
}
