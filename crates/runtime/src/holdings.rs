//! What a host keeps for sandboxes, as a whole: what is there, what it takes, what is left.
//!
//! Owns: what the engine asks a [`Runtime`](crate::Runtime) about limits, use and leftovers. Invariant:
//! everything that a runtime keeps on disk for a session, snapshot or drive is among [`Holdings::stored`], so
//! that what no record wants can be found. Called by the engine; implemented by `linux` and `sim`.

use async_trait::async_trait;
use bivouac_types::id::SessionId;

use crate::RuntimeError;

/// What a session's disk is charged for, and the most that it may be charged for. What it starts from is
/// charged to others, and what it wrote stays charged while a snapshot keeps it: only the difference of
/// the two numbers says something about the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskLevel {
    /// Bytes.
    pub charged: u64,
    /// Bytes.
    pub limit: u64,
}

impl DiskLevel {
    /// Bytes that the session may still write.
    #[must_use]
    pub fn left(self) -> u64 {
        self.limit.saturating_sub(self.charged)
    }
}

/// What a walk found, and what was made of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskFit {
    /// Bytes that the session holds over its image.
    pub written: u64,
    /// How it stands now.
    pub level: DiskLevel,
}

/// Kinds of things that are kept on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StoredKind {
    /// What a session wrote, its processes, control groups and sockets.
    Session,
    /// A snapshot's data.
    Snapshot,
    /// A drive's data.
    Drive,
    /// A session's private copy of a drive.
    View,
    /// Logs of a session's commands, and its audit lines.
    Logs,
    /// Certificates for the inside of a session.
    Trust,
}

impl StoredKind {
    /// Its name for users.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Snapshot => "snapshot",
            Self::Drive => "drive",
            Self::View => "view",
            Self::Logs => "logs",
            Self::Trust => "certificates",
        }
    }
}

/// Something that is kept.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stored {
    /// What it is.
    pub kind: StoredKind,
    /// Its name: an id, of a view with more behind it.
    pub name: String,
}

/// What something takes on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoredUsage {
    /// Bytes of its files.
    pub bytes: u64,
    /// Bytes that nothing else shares: what comes back when it is removed. `None`: this storage cannot tell.
    pub unique_bytes: Option<u64>,
}

/// The part of a [`Runtime`](crate::Runtime) that knows its storage.
#[async_trait]
pub trait Holdings: Send + Sync {
    /// How a running session's disk stands, without a walk through it. `None`: this host does not count.
    async fn disk_level(&self, session: &SessionId) -> Result<Option<DiskLevel>, RuntimeError>;
    /// Walks through what a running session has on its disk and sets what it may still write so that it may
    /// hold `bytes` in all. `None`: this host does not limit.
    async fn fit_disk(
        &self,
        session: &SessionId,
        bytes: u64,
    ) -> Result<Option<DiskFit>, RuntimeError>;
    /// Tells running sandboxes how much room the storage has left, for their `df`.
    async fn tell_space(&self) -> Result<(), RuntimeError>;
    /// Everything that is kept here.
    async fn stored(&self) -> Result<Vec<Stored>, RuntimeError>;
    /// What something takes, by a walk through it. `None`: it is gone.
    async fn stored_usage(&self, of: &Stored) -> Result<Option<StoredUsage>, RuntimeError>;
    /// Removes something that is kept. Idempotent.
    async fn remove_stored(&self, of: &Stored) -> Result<(), RuntimeError>;
}
