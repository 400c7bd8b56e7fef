//! The restart policy: what was lost is started again, from what was kept of it.
//!
//! A session is lost when its host restarts, or when its shim or init dies. Invariants: only the newest session
//! of a sandbox counts, and only one that nobody asked to end; each attempt is recorded before it is made, so
//! that one that takes the engine down is counted as well; attempts in a row come ever later and have an end,
//! and a start by a user begins anew. Run by the engine's reconcilers.

use std::sync::Arc;

use bivouac_store::{Deleting, SandboxRow, SessionRow};
use bivouac_types::Millis;
use bivouac_types::life::{MAX_RESTARTS, Restart, Restarts};
use bivouac_types::session::SessionStatus;

use crate::error::Error;
use crate::fault::FaultPoint;
use crate::inner::Inner;
use crate::lifecycle::chain;

/// The longest time between two looks, ms.
const LOOK_MS: Millis = 60_000;
/// Pause before the second attempt in a row, ms; each further one waits twice as long.
const FIRST_PAUSE_MS: Millis = 1_000;
/// The longest pause, ms.
const LONGEST_PAUSE_MS: Millis = 300_000;
/// A run that lasted for so long is no failure of the start before it, ms.
const LASTING_MS: Millis = 600_000;

/// When a sandbox that was lost is started again. `None`: not any more.
fn due(restarts: &Restarts, lasted_ms: Millis) -> Option<Millis> {
    let Some(last) = restarts.last_at else { return Some(0) };
    if lasted_ms >= LASTING_MS || restarts.in_a_row == 0 {
        return Some(0);
    }
    if restarts.gave_up() {
        return None;
    }
    let doubled = FIRST_PAUSE_MS << (restarts.in_a_row - 1).min(20);
    Some(last.saturating_add(doubled.min(LONGEST_PAUSE_MS)))
}

/// How long a session ran, ms.
fn lasted(row: &SessionRow) -> Millis {
    let s = &row.session;
    s.started_at.zip(s.aborted_at).map_or(0, |(from, to)| to.saturating_sub(from))
}

/// Whether a sandbox with this newest session is to be started again.
fn is_lost(sandbox: &SandboxRow, session: &SessionRow, node: &str) -> bool {
    let lost = matches!(session.session.status, SessionStatus::Aborted | SessionStatus::Failed);
    let s = &sandbox.sandbox;
    let wanted = s.life.restart == Restart::UnlessStopped && sandbox.deleting == Deleting::No;
    wanted && !s.ephemeral && lost && session.settled && session.session.node == node
}

pub(crate) async fn run(inner: Arc<Inner>) {
    loop {
        let next = match inner.restart_lost().await {
            Ok(next) => next,
            Err(error) => {
                tracing::error!(cause = %chain(&error), "cannot look for lost sandboxes yet");
                None
            }
        };
        let look = inner.now().saturating_add(LOOK_MS);
        tokio::select! {
            () = inner.clock.sleep_until(next.map_or(look, |next| next.min(look))) => {}
            () = inner.lost_changed.notified() => {}
        }
    }
}

impl Inner {
    /// Starts what is due. Answers when the next one is.
    async fn restart_lost(self: &Arc<Self>) -> Result<Option<Millis>, Error> {
        let mut soonest = None;
        for row in self.db.lost_sandboxes().await? {
            if self.is_closing() {
                return Ok(None);
            }
            let session = self.known_session(&row.sandbox.current_session_id).await?;
            let key = format!("restart {}", row.sandbox.id);
            if !is_lost(&row, &session, &self.config.node) || self.holds.is_held(&key) {
                continue;
            }
            let Some(at) = due(&row.sandbox.restarts, lasted(&session)) else { continue };
            if at > self.now() {
                soonest = Some(soonest.map_or(at, |other: Millis| other.min(at)));
                continue;
            }
            let worker = Arc::clone(self);
            let hold = self.holds.hold(&key);
            self.spawn(async move {
                let inner = Arc::clone(&worker);
                let name = row.sandbox.name.clone();
                if let Err(error) = worker.run(async move { inner.restart(&row).await }).await {
                    tracing::error!(sandbox = %name, cause = %chain(&error), "cannot start a lost sandbox again");
                }
                drop(hold);
                worker.lost_changed.notify_one();
            });
        }
        Ok(soonest)
    }

    /// Starts one again, if nobody else has done anything with it.
    async fn restart(self: &Arc<Self>, seen: &SandboxRow) -> Result<(), Error> {
        let id = &seen.sandbox.id;
        let _held = self.sandbox_locks.lock(id.as_str()).await;
        let Some(row) = self.db.sandbox(id).await? else { return Ok(()) };
        let session = self.known_session(&row.sandbox.current_session_id).await?;
        let now = self.now();
        let is_due = due(&row.sandbox.restarts, lasted(&session)).is_some_and(|at| at <= now);
        if !is_lost(&row, &session, &self.config.node) || !is_due {
            return Ok(());
        }
        let fresh = lasted(&session) >= LASTING_MS;
        let row = self
            .change_sandbox(id, |row| {
                let restarts = &mut row.sandbox.restarts;
                restarts.total = restarts.total.saturating_add(1);
                restarts.in_a_row = if fresh { 1 } else { restarts.in_a_row.saturating_add(1) };
                restarts.last_at = Some(now);
                Ok(true)
            })
            .await?;
        self.reach(FaultPoint::RestartRecorded).await?;
        let attempt = row.sandbox.restarts.in_a_row;
        let (name, why) = (row.sandbox.name.clone(), session.session.reason);
        tracing::warn!(sandbox = %name, attempt, why = why.as_deref(), "it was lost: starting it again");
        let last = attempt >= MAX_RESTARTS;
        let started = self.start_again(row).await;
        if last && started.is_err() {
            tracing::error!(sandbox = %name, attempt, "this was the last attempt: it stays stopped until it is started");
        }
        if let Some(view) = started? {
            tracing::info!(sandbox = %name, session = %view.session.id, "started again");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_come_ever_later_and_have_an_end() {
        let mut restarts = Restarts::default();
        assert_eq!(due(&restarts, 0), Some(0));
        restarts.last_at = Some(1_000_000);
        let pauses: Vec<Option<Millis>> = (1..=MAX_RESTARTS)
            .map(|in_a_row| {
                restarts.in_a_row = in_a_row;
                due(&restarts, 0).map(|at| at - 1_000_000)
            })
            .collect();
        let seconds = [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300];
        let mut wanted: Vec<_> = seconds.into_iter().map(|s| Some(s * 1_000)).collect();
        wanted.push(None);
        assert_eq!(pauses, wanted);
        assert_eq!(due(&restarts, LASTING_MS), Some(0), "it ran for long");
    }
}
