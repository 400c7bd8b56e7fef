//! Named places at which a test can make the engine fail or die.
//!
//! Invariant: in a normal run a point costs one relaxed load. `BIVOUAC_TEST_FAULT` is
//! `engine.<name>:<fail|kill>:<file>`: when the point is reached for the first time, its name is
//! appended to the file, then the step fails, or the process ends at once. The points of a launch
//! are the runtime's, under the same variable.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::Error;

macro_rules! points {
    ($($(#[$doc:meta])* $variant:ident => $name:literal,)+) => {
        /// A step of an operation that has several. Each comes after the named thing is done.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum FaultPoint {
            $($(#[$doc])* $variant,)+
        }

        impl FaultPoint {
            /// All of them, in no promised order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name that tests use, without `engine.`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }
    };
}

points! {
    /// Create: sandbox, session and routes are recorded.
    CreateInserted => "create_inserted",
    /// Create: the session's init has answered.
    CreateLaunched => "create_launched",
    /// Create: the session is recorded as running.
    CreateRunning => "create_running",
    /// A failed launch is recorded.
    LaunchFailedRecorded => "launch_failed_recorded",
    /// What was left of a failed launch is removed.
    LaunchFailedRemoved => "launch_failed_removed",
    /// Resume: the new session is recorded.
    ResumeInserted => "resume_inserted",
    /// Resume: its init has answered.
    ResumeLaunched => "resume_launched",
    /// Resume: it is recorded as running.
    ResumeRunning => "resume_running",
    /// Stop: the intent is recorded.
    StopIntent => "stop_intent",
    /// Stop: nothing of the session runs any more.
    StopKilled => "stop_killed",
    /// Stop: how its commands ended is recorded.
    StopCommandsEnded => "stop_commands_ended",
    /// Stop: the snapshot's data is there.
    StopSnapshotTaken => "stop_snapshot_taken",
    /// Stop: the snapshot is recorded.
    StopSnapshotRecorded => "stop_snapshot_recorded",
    /// Stop: nothing is left of the session.
    StopRemoved => "stop_removed",
    /// Stop: it is recorded as stopped.
    StopEnded => "stop_ended",
    /// Eviction: the snapshots that fall out are recorded as deleted.
    EvictRecorded => "evict_recorded",
    /// A lost session is recorded as aborted.
    LostRecorded => "lost_recorded",
    /// Lost: the snapshot's data is there.
    LostSnapshotTaken => "lost_snapshot_taken",
    /// Lost: the snapshot is recorded.
    LostSnapshotRecorded => "lost_snapshot_recorded",
    /// Lost: nothing is left of the session.
    LostRemoved => "lost_removed",
    /// Delete: the intent is recorded.
    DeleteIntent => "delete_intent",
    /// Delete: the session is stopped.
    DeleteStopped => "delete_stopped",
    /// Delete: orphaned snapshots are gone.
    DeleteSnapshotsGone => "delete_snapshots_gone",
    /// Delete: logs are gone.
    DeleteLogsGone => "delete_logs_gone",
    /// Delete: the rows are gone.
    DeleteRowsGone => "delete_rows_gone",
    /// A new drive: the intent is recorded.
    DriveInserted => "drive_inserted",
    /// A new drive: its data is there.
    DriveMade => "drive_made",
    /// A new drive: it is recorded as usable.
    DriveReady => "drive_ready",
    /// Deletion of a drive: the intent is recorded.
    DriveDeleteIntent => "drive_delete_intent",
    /// Deletion of a drive: its data is gone.
    DriveDataGone => "drive_data_gone",
    /// Deletion of a drive: the record is gone.
    DriveRowGone => "drive_row_gone",
    /// Attach: the intent is recorded.
    AttachIntent => "attach_intent",
    /// Attach: it is mounted.
    AttachMounted => "attach_mounted",
    /// Attach: it is recorded as mounted.
    AttachRecorded => "attach_recorded",
    /// Detach: the intent is recorded.
    DetachIntent => "detach_intent",
    /// Detach: it is not mounted any more.
    DetachUnmounted => "detach_unmounted",
    /// Detach: whoever still has it open cannot reach it any more, or its private copy is gone.
    DetachFenced => "detach_fenced",
    /// Detach: recorded.
    DetachRecorded => "detach_recorded",
    /// Start of a command: it is recorded.
    CommandInserted => "command_inserted",
    /// Start of a command: the program runs.
    CommandStarted => "command_started",
    /// Pause: recorded, and it still runs.
    PauseRecorded => "pause_recorded",
    /// Pause: it stands still.
    PauseFrozen => "pause_frozen",
    /// Resume with memory: recorded, and it still stands.
    UnpauseRecorded => "unpause_recorded",
    /// Resume with memory: it goes on.
    UnpauseGoesOn => "unpause_goes_on",
    /// Stop: what its sandbox wants run before has ended.
    HookEnded => "hook_ended",
    /// Restart of a lost sandbox: the attempt is recorded.
    RestartRecorded => "restart_recorded",
    /// Live snapshot: the sandbox stands still.
    LiveFrozen => "live_frozen",
    /// Live snapshot: the data is there, the sandbox still stands.
    LiveKept => "live_kept",
    /// Live snapshot: the sandbox goes on, there is no record.
    LiveGoesOn => "live_goes_on",
    /// Live snapshot: recorded.
    LiveRecorded => "live_recorded",
    /// Forks: what they start from is there.
    ForkOrigin => "fork_origin",
    /// Forks: all of them run, none is shown.
    ForkStarted => "fork_started",
    /// Forks: all of them are shown.
    ForkShown => "fork_shown",
    /// Rollback: the state that it leaves is kept.
    RollbackKept => "rollback_kept",
    /// Rollback: the sandbox would start from where it is to go.
    RollbackTurned => "rollback_turned",
    /// Rollback: it runs from there.
    RollbackRunning => "rollback_running",
    /// Deletion of a snapshot: recorded.
    SnapshotDeleteIntent => "snapshot_delete_intent",
    /// Deletion of a snapshot: its data is gone.
    SnapshotDataGone => "snapshot_data_gone",
    /// Removal of what nobody wants: one thing is gone.
    GcRemoved => "gc_removed",
    /// Import of a snapshot: its data is there.
    ImportUnpacked => "import_unpacked",
    /// Import of a snapshot: it is recorded.
    ImportRecorded => "import_recorded",
}

/// What happens at the armed point.
#[derive(Debug, Clone)]
enum Action {
    Fail,
    Kill,
    /// Never goes on: what a test uses for a crash inside of its own process.
    #[cfg(test)]
    Hang(std::sync::Arc<tokio::sync::Notify>),
}

/// The armed point, if any.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// 0, or the index in [`FaultPoint::ALL`] plus one.
    armed: AtomicUsize,
    action: Mutex<Option<(Action, Option<String>)>>,
}

impl Faults {
    /// Reads the variable. Points of another crate arm nothing here.
    pub(crate) fn from_env() -> Self {
        let faults = Self::default();
        let Ok(text) = std::env::var("BIVOUAC_TEST_FAULT") else { return faults };
        let mut parts = text.splitn(3, ':');
        let (Some(point), Some(mode), Some(file)) = (parts.next(), parts.next(), parts.next())
        else {
            return faults;
        };
        let wanted = point.strip_prefix("engine.");
        if let Some(point) = FaultPoint::ALL.iter().find(|p| Some(p.name()) == wanted) {
            let action = if mode == "kill" { Action::Kill } else { Action::Fail };
            faults.arm(*point, action, Some(file.to_owned()));
        }
        faults
    }

    fn arm(&self, point: FaultPoint, action: Action, file: Option<String>) {
        let index = FaultPoint::ALL.iter().position(|p| *p == point).map_or(0, |i| i + 1);
        *self.action.lock().unwrap_or_else(PoisonError::into_inner) = Some((action, file));
        self.armed.store(index, Ordering::Release);
    }

    #[cfg(test)]
    pub(crate) fn fail_at(&self, point: FaultPoint) {
        self.arm(point, Action::Fail, None);
    }

    #[cfg(test)]
    pub(crate) fn hang_at(&self, point: FaultPoint) -> std::sync::Arc<tokio::sync::Notify> {
        let reached = std::sync::Arc::new(tokio::sync::Notify::new());
        self.arm(point, Action::Hang(std::sync::Arc::clone(&reached)), None);
        reached
    }

    /// Whether the armed point was not reached.
    #[cfg(test)]
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::Acquire) != 0
    }

    /// Passes a point: acts once if it is the armed one.
    pub(crate) async fn reach(&self, point: FaultPoint) -> Result<(), Error> {
        let armed = self.armed.load(Ordering::Relaxed);
        if armed == 0 || FaultPoint::ALL.get(armed - 1) != Some(&point) {
            return Ok(());
        }
        let taken = self.action.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.armed.store(0, Ordering::Release);
        let Some((action, file)) = taken else { return Ok(()) };
        if let Some(file) = file {
            let opened = std::fs::OpenOptions::new().create(true).append(true).open(file);
            if let Ok(mut file) = opened {
                let _ = writeln!(file, "engine.{}", point.name());
                let _ = file.sync_all();
            }
        }
        match action {
            Action::Fail => {
                let message = format!("A test made step engine.{} fail.", point.name());
                Err(Error::internal(message))
            }
            Action::Kill => std::process::abort(),
            #[cfg(test)]
            Action::Hang(reached) => {
                reached.notify_one();
                std::future::pending().await
            }
        }
    }
}
