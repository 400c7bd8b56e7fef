//! Snapshots: immutable filesystem states. They belong to a namespace, not to the sandbox that
//! made them.

use serde::{Deserialize, Serialize};

use crate::Millis;
use crate::id::{SessionId, SnapshotId};

/// Whether a snapshot can be used. The words are the API's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotStatus {
    /// Usable.
    Created,
    /// Gone: its data is deleted or about to be.
    Deleted,
    /// Never came to be.
    Failed,
}

/// A snapshot's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// The session whose upper it is.
    pub source_session_id: SessionId,
    /// Name of the sandbox at that time.
    pub sandbox_name: String,
    /// Whether it can be used.
    pub status: SnapshotStatus,
    /// Name of the image under it.
    pub image: String,
    /// `node24` and the like, for sandboxes made from it.
    pub runtime: String,
    /// Region of the session that it was taken of; clients demand one.
    pub region: String,
    /// Bytes of the files in its upper, by a walk of the tree.
    pub size_bytes: i64,
    /// Made by a stop or timeout, not by a user's call.
    pub automatic: bool,
    /// Snapshot that its session was started from.
    pub parent_id: Option<SnapshotId>,
    /// How long it is kept after its last use, ms; 0 is for ever.
    pub expiration_ms: i64,
    /// When it will be removed; absent is never.
    pub expires_at: Option<Millis>,
    /// When it was made.
    pub created_at: Millis,
    /// Last write.
    pub updated_at: Millis,
    /// Last time that a session was started from it.
    pub last_used_at: Option<Millis>,
}
