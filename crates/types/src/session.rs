//! Sessions and the one table of what may follow what.
//!
//! ```text
//!   pending -> running -> snapshotting -> stopped
//!      |          |   \-> stopping ----/
//!      v          v
//!    failed    aborted
//! ```
//!
//! Invariant: every status change of every session goes through [`SessionStatus::next`]; the store
//! writes it by compare-and-set.

use serde::{Deserialize, Serialize};

use crate::id::{SandboxId, SessionId, SnapshotId};
use crate::{Millis, policy::NetworkPolicy, sandbox::Resources};

/// Where a session is in its life. The words are the API's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionStatus {
    /// Recorded, not yet launched.
    Pending,
    /// Commands can run.
    Running,
    /// Being stopped without a snapshot.
    Stopping,
    /// Being stopped, a snapshot is taken first.
    Snapshotting,
    /// Ended in order.
    Stopped,
    /// Never ran: the launch failed.
    Failed,
    /// Ended by a fault: its processes are gone though nobody asked.
    Aborted,
}

/// What can happen to a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SessionEvent {
    /// Init answered.
    Launched,
    /// A launch step failed, or the engine died before it ended.
    LaunchFailed,
    /// Someone asked for a stop without a snapshot, or the time was over.
    Stop,
    /// As `Stop`, and the filesystem is kept.
    StopWithSnapshot,
    /// Everything of it is gone and what was to be kept is kept.
    Ended,
    /// Its shim or init died.
    Lost,
}

/// A change that the table does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a session that is {from:?} cannot take {event:?}")]
pub struct IllegalTransition {
    /// Status before.
    pub from: SessionStatus,
    /// What was tried.
    pub event: SessionEvent,
}

impl SessionStatus {
    /// Every status, for tests and schemas.
    pub const ALL: [Self; 7] = [
        Self::Pending,
        Self::Running,
        Self::Stopping,
        Self::Snapshotting,
        Self::Stopped,
        Self::Failed,
        Self::Aborted,
    ];

    /// The status after `event`.
    ///
    /// # Errors
    /// [`IllegalTransition`] when the table has no such edge.
    pub fn next(self, event: SessionEvent) -> Result<Self, IllegalTransition> {
        use SessionEvent as E;
        match (self, event) {
            (Self::Pending, E::Launched) => Ok(Self::Running),
            (Self::Pending, E::LaunchFailed) => Ok(Self::Failed),
            // A stop may overtake a launch: the launch's end then finds the session stopping.
            (Self::Pending | Self::Running, E::Stop) => Ok(Self::Stopping),
            (Self::Running, E::StopWithSnapshot) => Ok(Self::Snapshotting),
            (Self::Stopping | Self::Snapshotting, E::Ended) => Ok(Self::Stopped),
            (Self::Running, E::Lost) => Ok(Self::Aborted),
            (from, event) => Err(IllegalTransition { from, event }),
        }
    }

    /// No event leads out of it.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Stopped | Self::Failed | Self::Aborted)
    }

    /// On the way from running to stopped.
    #[must_use]
    pub fn is_ending(self) -> bool {
        matches!(self, Self::Stopping | Self::Snapshotting)
    }

    /// The API's word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Snapshotting => "snapshotting",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Aborted => "aborted",
        }
    }

    /// Reads the API's word.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|s| s.as_str() == text)
    }
}

/// One run of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// The sandbox that it is a run of.
    pub sandbox_id: SandboxId,
    /// That sandbox's name.
    pub sandbox_name: String,
    /// Where it is in its life.
    pub status: SessionStatus,
    /// Grows by one with each write: the store's compare-and-set key.
    pub generation: i64,
    /// Virtual CPUs and memory of this run.
    pub resources: Resources,
    /// Total time allowed from `started_at` (or `created_at` before that), ms.
    pub timeout_ms: i64,
    /// Working folder of commands.
    pub cwd: String,
    /// `node24` and the like, or the image's name.
    pub runtime: String,
    /// Name of the image under the upper.
    pub image: String,
    /// Environment of every command of this run.
    pub env: std::collections::BTreeMap<String, String>,
    /// Drives that it was started with. (What it has now is the store's to tell.)
    pub mounts: crate::drive::Mounts,
    /// Policy in force.
    pub policy: NetworkPolicy,
    /// Grows with each change of `policy`: how broker and record know whose is newer.
    pub policy_generation: u64,
    /// While `policy learn` has the session open: the policy that comes back.
    pub policy_before: Option<NetworkPolicy>,
    /// Stands still since then, with its memory.
    pub paused_at: Option<Millis>,
    /// How long it has stood still before, ms: that time does not count.
    pub paused_ms: i64,
    /// Until then it counts as in use, whatever is seen of it.
    pub keep_until: Option<Millis>,
    /// Snapshot that the upper was made from.
    pub source_snapshot_id: Option<SnapshotId>,
    /// Index of the id range (DESIGN.md, *Runtime*); free again when the session has ended.
    pub id_range: u32,
    /// Host that runs it.
    pub node: String,
    /// The sandbox's region when the session was made; clients demand one.
    pub region: String,
    /// Why it failed or was aborted, for the user.
    pub reason: Option<String>,
    /// When the client asked.
    pub requested_at: Millis,
    /// When the row was made.
    pub created_at: Millis,
    /// Last write.
    pub updated_at: Millis,
    /// When init answered.
    pub started_at: Option<Millis>,
    /// When a stop was asked for.
    pub requested_stop_at: Option<Millis>,
    /// When it ended in order.
    pub stopped_at: Option<Millis>,
    /// When its loss was seen.
    pub aborted_at: Option<Millis>,
    /// When its closing snapshot was taken.
    pub snapshotted_at: Option<Millis>,
    /// CPU time used by everything in it, ms; written when it ends.
    pub active_cpu_ms: Option<i64>,
}

impl Session {
    /// When the time is over. (Of one that is paused: if it went on now.)
    #[must_use]
    pub fn deadline(&self) -> Millis {
        let began = self.started_at.unwrap_or(self.created_at);
        began.saturating_add(self.timeout_ms).saturating_add(self.paused_ms)
    }

    /// When the time is over, with a pause that lasts until `now` counted in.
    #[must_use]
    pub fn deadline_at(&self, now: Millis) -> Millis {
        let pause = self.paused_at.map_or(0, |at| now.saturating_sub(at).max(0));
        self.deadline().saturating_add(pause)
    }

    /// Stands still from `now` on. One that does so already does so since when it did.
    pub fn pause(&mut self, now: Millis) {
        self.paused_at.get_or_insert(now);
    }

    /// Goes on, or ends: the pause is over, and does not count.
    pub fn end_pause(&mut self, now: Millis) {
        if let Some(at) = self.paused_at.take() {
            self.paused_ms = self.paused_ms.saturating_add(now.saturating_sub(at).max(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENTS: [SessionEvent; 6] = [
        SessionEvent::Launched,
        SessionEvent::LaunchFailed,
        SessionEvent::Stop,
        SessionEvent::StopWithSnapshot,
        SessionEvent::Ended,
        SessionEvent::Lost,
    ];

    #[test]
    fn nothing_leaves_a_terminal_status() {
        for status in SessionStatus::ALL.into_iter().filter(|s| s.is_terminal()) {
            for event in EVENTS {
                assert!(status.next(event).is_err(), "{status:?} {event:?}");
            }
        }
    }

    proptest::proptest! {
        /// Whatever happens in whatever order: a session never comes back from its end, never
        /// runs twice, and is stopped only after someone asked.
        #[test]
        fn any_history_keeps_the_rules(events in proptest::collection::vec(0usize..6, 0..40)) {
            let mut status = SessionStatus::Pending;
            let (mut launches, mut asked) = (0, false);
            for index in events {
                let event = EVENTS[index];
                if let Ok(next) = status.next(event) {
                    assert!(!status.is_terminal());
                    launches += i32::from(next == SessionStatus::Running);
                    asked |= next.is_ending();
                    status = next;
                }
            }
            assert!(launches <= 1);
            assert!(status != SessionStatus::Stopped || asked);
        }

        #[test]
        fn words_read_back(index in 0usize..7) {
            let status = SessionStatus::ALL[index];
            assert_eq!(SessionStatus::parse(status.as_str()), Some(status));
        }
    }
}
