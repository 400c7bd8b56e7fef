//! What the engine has done since it started.
//!
//! Invariant: an operation is counted once, when its outcome is known, whether or not its caller is
//! still there to hear of it; the codes are the wire's, so there are few. Read through
//! [`Engine::meters`](crate::Engine::meters).

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Error;
use crate::inner::locked;

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A sandbox was asked for.
    Create,
    /// A copy of a sandbox was asked for.
    Fork,
    /// A stopped sandbox was to run again.
    Resume,
    /// A command was to start.
    Exec,
    /// A session was to stop.
    Stop,
    /// A snapshot was asked for.
    Snapshot,
    /// A sandbox was to go back to a snapshot.
    Rollback,
    /// A sandbox was to be deleted.
    Delete,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Create,
        Self::Fork,
        Self::Resume,
        Self::Exec,
        Self::Stop,
        Self::Snapshot,
        Self::Rollback,
        Self::Delete,
    ];

    /// Its word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Fork => "fork",
            Self::Resume => "resume",
            Self::Exec => "exec",
            Self::Stop => "stop",
            Self::Snapshot => "snapshot",
            Self::Rollback => "rollback",
            Self::Delete => "delete",
        }
    }
}

/// How often an operation came out how.
#[derive(Debug, Default)]
struct Tally {
    done: AtomicU64,
    failed: Mutex<BTreeMap<&'static str, u64>>,
}

/// A tally at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Count {
    /// What was asked for.
    pub operation: Operation,
    /// How often it was done.
    pub done: u64,
    /// How often it was refused or failed, by the wire's code.
    pub failed: Vec<(&'static str, u64)>,
}

/// One tally for each operation.
#[derive(Debug, Default)]
pub(crate) struct Counters([Tally; Operation::ALL.len()]);

impl Counters {
    pub(crate) fn note<T>(&self, operation: Operation, outcome: &Result<T, Error>) {
        let tally = &self.0[operation as usize];
        match outcome {
            Ok(_) => {
                tally.done.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => *locked(&tally.failed).entry(error.code).or_default() += 1,
        }
    }

    pub(crate) fn read(&self) -> Vec<Count> {
        let count = |operation: Operation| {
            let tally = &self.0[operation as usize];
            let failed = locked(&tally.failed).iter().map(|(code, n)| (*code, *n)).collect();
            Count { operation, done: tally.done.load(Ordering::Relaxed), failed }
        };
        Operation::ALL.into_iter().map(count).collect()
    }
}
