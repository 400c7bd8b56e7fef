//! The values that callers give to and get from [`crate::Engine`].
//!
//! Owns: requests, views and pages. Invariant: plain data, no decision is made here; defaults are
//! filled in by the module that acts. Built by HTTP and the command line.

use std::collections::BTreeMap;

use bivouac_types::Millis;
use bivouac_types::command::{Command, Stream};
use bivouac_types::id::SnapshotId;
use bivouac_types::policy::NetworkPolicy;
use bivouac_types::sandbox::{KeepLastSnapshots, Resources, Route, Sandbox, Source};
use bivouac_types::session::Session;
use bivouac_types::snapshot::Snapshot;

/// Who asks. Every call takes one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// For logs and audit; `local` is the holder of the engine's own token.
    pub name: String,
}

/// A sandbox to be made. Absent fields take the defaults of reference/vercel-api.md §2.2.
#[derive(Debug, Clone, Default)]
pub struct CreateSandbox {
    pub name: Option<String>,
    /// Made through /v1.
    pub ephemeral: bool,
    pub persistent: Option<bool>,
    pub resources: Option<Resources>,
    pub timeout_ms: Option<i64>,
    pub ports: Vec<u16>,
    pub env: BTreeMap<String, String>,
    pub tags: BTreeMap<String, String>,
    pub image: Option<String>,
    pub runtime: Option<String>,
    pub source: Option<Source>,
    pub policy: Option<NetworkPolicy>,
    pub network_id: Option<String>,
    pub region: Option<String>,
    pub failover_regions: Vec<String>,
    pub snapshot_expiration_ms: Option<i64>,
    pub keep_last: Option<KeepLastSnapshots>,
    /// A repeated call with the same key answers the first call's sandbox.
    pub idempotency_key: Option<String>,
}

/// Changes to a sandbox. `None`: as it is. Inner `None`: cleared.
#[derive(Debug, Clone, Default)]
pub struct UpdateSandbox {
    pub persistent: Option<bool>,
    pub resources: Option<Resources>,
    pub timeout_ms: Option<i64>,
    pub ports: Option<Vec<u16>>,
    pub env: Option<BTreeMap<String, String>>,
    pub tags: Option<BTreeMap<String, String>>,
    pub policy: Option<NetworkPolicy>,
    pub network_id: Option<Option<String>>,
    pub region: Option<String>,
    pub failover_regions: Option<Vec<String>>,
    pub snapshot_expiration_ms: Option<i64>,
    pub keep_last: Option<Option<KeepLastSnapshots>>,
    pub current_snapshot_id: Option<String>,
    pub runtime: Option<String>,
}

/// Overrides of a fork. `None`: copied from the source.
pub type ForkSandbox = UpdateSandboxWithName;
/// See [`ForkSandbox`].
#[derive(Debug, Clone, Default)]
pub struct UpdateSandboxWithName {
    pub name: Option<String>,
    pub image: Option<String>,
    pub update: UpdateSandbox,
    pub idempotency_key: Option<String>,
}

/// A sandbox with its newest session and its routes.
#[derive(Debug, Clone)]
pub struct View {
    pub sandbox: Sandbox,
    pub session: Session,
    pub routes: Vec<Route>,
    /// This call started the session.
    pub resumed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SortBy {
    #[default]
    CreatedAt,
    Name,
    StatusUpdatedAt,
    CurrentSnapshotId,
}

#[derive(Debug, Clone, Default)]
pub struct ListSandboxes {
    /// 1..=50; absent is 20.
    pub limit: Option<u32>,
    pub cursor: Option<String>,
    pub sort_by: SortBy,
    pub ascending: bool,
    pub name_prefix: Option<String>,
    pub tag: Option<(String, String)>,
    /// Every namespace (the command line's `ls -A`).
    pub all_namespaces: bool,
}

/// Lists of sessions and snapshots: newest first unless `ascending`.
#[derive(Debug, Clone, Default)]
pub struct ListChildren {
    pub sandbox_name: Option<String>,
    pub limit: Option<u32>,
    pub cursor: Option<String>,
    pub ascending: bool,
    /// /v1: created at or after, created before (ms).
    pub since: Option<Millis>,
    pub until: Option<Millis>,
}

#[derive(Debug, Clone)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Opaque; absent on the last page.
    pub next: Option<String>,
}

#[derive(Debug, Clone)]
pub struct Stopped {
    pub session: Session,
    pub sandbox: Sandbox,
    /// The one that this call took.
    pub snapshot: Option<Snapshot>,
}

/// A piece of a followed command.
#[derive(Debug, Clone)]
pub enum Output {
    Data {
        stream: Stream,
        bytes: bytes::Bytes,
    },
    /// Output is missing from here on: the session's log space was used up.
    Cut,
    /// The last item: the record with `end` set.
    End(Box<Command>),
}

/// A walk through the ancestry of a snapshot.
#[derive(Debug, Clone)]
pub struct TreeQuery {
    /// Where the walk starts; it is the first node of the answer. On later pages: `next` of the
    /// page before.
    pub snapshot_id: SnapshotId,
    /// 1..=10; absent is 10.
    pub limit: Option<u32>,
    /// Towards descendants (at a branch: the newest child) instead of ancestors.
    pub ascending: bool,
}

/// One level of a snapshot's ancestry.
#[derive(Debug, Clone)]
pub struct TreeNode {
    /// The snapshot on the walk's path.
    pub snapshot: Snapshot,
    /// Other snapshots with the same parent, newest first, ten at most.
    pub siblings: Vec<Snapshot>,
    /// How many have that parent, this one included: `"3"`, or `"10+"` past ten.
    pub count: String,
}

/// A page of a walk.
#[derive(Debug, Clone)]
pub struct Tree {
    /// The path, from the start of this page on.
    pub nodes: Vec<TreeNode>,
    /// The node that was asked for.
    pub anchor: TreeNode,
    /// Where the next page starts; absent at the end.
    pub next: Option<SnapshotId>,
}
