//! The values that callers give to and get from [`crate::Engine`].
//!
//! Owns: requests, views and pages. Invariant: plain data, no decision is made here; defaults are
//! filled in by the module that acts. Built by HTTP and the command line.

use std::collections::BTreeMap;

use bivouac_types::Millis;
use bivouac_types::access::{Grant, Verb};
use bivouac_types::command::{Command, Stream};
use bivouac_types::drive::Mounts;
use bivouac_types::id::SnapshotId;
use bivouac_types::life::LifeChange;
use bivouac_types::name::Namespace;
use bivouac_types::policy::Draft;
use bivouac_types::sandbox::{KeepLastSnapshots, Resources, Route, Sandbox, Source};
use bivouac_types::secret::Secret;
use bivouac_types::session::Session;
use bivouac_types::snapshot::Snapshot;

use crate::credentials::CredentialSpec;
use crate::error::{Error, ErrorKind};
use crate::uses::note_check;

/// Who asks. Every call takes one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// For logs and audit; `local` is the holder of the engine's own token.
    pub name: String,
    /// Id of the token that it showed; `None` is the engine's own.
    pub token: Option<String>,
    /// Its rights.
    pub grant: Grant,
}

impl Principal {
    /// The holder of the engine's own token.
    #[must_use]
    pub fn local() -> Self {
        Self { name: "local".to_owned(), token: None, grant: Grant::all() }
    }

    /// Checks a right. What is in a namespace that it has no right in does not exist for it: the caller says so
    /// of the thing that was asked for.
    ///
    /// # Errors
    /// 404 for a namespace that it does not see; 403 for a verb that it has not.
    pub fn may(&self, verb: Verb, ns: &Namespace) -> Result<(), Error> {
        self.may_any(&[verb], ns)
    }

    /// As [`Principal::may`]: any of these rights will do.
    ///
    /// # Errors
    /// As [`Principal::may`].
    pub fn may_any(&self, verbs: &[Verb], ns: &Namespace) -> Result<(), Error> {
        self.may_see(verbs, ns, || {
            let Namespace { team, project } = ns;
            Error::not_found(format!("Namespace '{team}/{project}' was not found."))
        })
    }

    /// As [`Principal::may_any`], of something in that namespace: `unknown` is what is said when there is no such
    /// thing, and to one who does not see the namespace.
    ///
    /// # Errors
    /// `unknown`'s; 403.
    pub fn may_see(
        &self,
        verbs: &[Verb],
        ns: &Namespace,
        unknown: impl FnOnce() -> Error,
    ) -> Result<(), Error> {
        if !self.grant.sees(ns) {
            return Err(unknown());
        }
        if let Some(verb) = verbs.first() {
            note_check(*verb, Some(ns));
        }
        if verbs.iter().any(|verb| self.grant.has(*verb)) {
            return Ok(());
        }
        Err(self.lacks(verbs))
    }

    /// Checks a right for lists that show what somebody sees, wherever it is.
    ///
    /// # Errors
    /// 403.
    pub fn may_somewhere(&self, verb: Verb) -> Result<(), Error> {
        note_check(verb, None);
        if self.grant.has(verb) { Ok(()) } else { Err(self.lacks(&[verb])) }
    }

    fn lacks(&self, verbs: &[Verb]) -> Error {
        let wanted: Vec<&str> = verbs.iter().map(|verb| verb.as_str()).collect();
        let message = format!(
            "The token '{}' does not have the right '{}'; one that has it is made by 'bivouac token create'.",
            self.name,
            wanted.join("' or '")
        );
        Error::new(ErrorKind::Forbidden, "forbidden", message).with("right", wanted.join(","))
    }

    /// Checks that somebody may do what concerns the engine as a whole.
    ///
    /// # Errors
    /// 403.
    pub fn may_rule(&self) -> Result<(), Error> {
        note_check(Verb::Admin, None);
        if self.grant.rules() {
            return Ok(());
        }
        let message = format!(
            "The token '{}' does not have the right 'admin', which this takes: it concerns the whole engine.",
            self.name
        );
        Err(Error::new(ErrorKind::Forbidden, "forbidden", message).with("right", "admin"))
    }
}

/// A sandbox to be made. Absent fields take the defaults of reference/vercel-api.md §2.2.
#[derive(Debug, Clone, Default)]
pub struct CreateSandbox {
    /// Its name. Absent in a create: a generated one; in a fork too.
    pub name: Option<String>,
    /// Made through /v1.
    pub ephemeral: bool,
    /// Whether a stop keeps the file system.
    pub persistent: Option<bool>,
    /// Virtual CPUs and memory.
    pub resources: Option<Resources>,
    /// Time that a session may live, ms.
    pub timeout_ms: Option<i64>,
    /// Ports that get a route.
    pub ports: Vec<u16>,
    /// Default environment of every command.
    pub env: BTreeMap<String, String>,
    /// Labels.
    pub tags: BTreeMap<String, String>,
    /// Image to start from.
    pub image: Option<String>,
    /// `node24` and the like; excludes `image`.
    pub runtime: Option<String>,
    /// Where the first files come from.
    pub source: Option<Source>,
    /// `Basic …`: what the source's host is shown while it is fetched. Never inside.
    pub source_login: Option<Secret>,
    /// Egress policy, with the header values that were in the request.
    pub policy: Option<Draft>,
    /// Ready-made credentials: they add to the policy.
    pub credentials: Vec<CredentialSpec>,
    /// Drives and their places.
    pub mounts: Mounts,
    /// Opaque, kept for clients.
    pub network_id: Option<String>,
    /// Opaque, kept for clients.
    pub region: Option<String>,
    /// Opaque, kept for clients.
    pub failover_regions: Vec<String>,
    /// How long automatic snapshots are kept after their last use, ms; 0 is for ever.
    pub snapshot_expiration_ms: Option<i64>,
    /// How many snapshots are kept.
    pub keep_last: Option<KeepLastSnapshots>,
    /// What ends and wakes it.
    pub life: LifeChange,
    /// A repeated call with the same key answers the first call's sandbox.
    pub idempotency_key: Option<String>,
}

/// Changes to a sandbox. `None`: as it is. Inner `None`: cleared.
#[derive(Debug, Clone, Default)]
pub struct UpdateSandbox {
    /// Whether a stop keeps the file system.
    pub persistent: Option<bool>,
    /// Virtual CPUs and memory.
    pub resources: Option<Resources>,
    /// Time that a session may live, ms.
    pub timeout_ms: Option<i64>,
    /// Ports that get a route.
    pub ports: Option<Vec<u16>>,
    /// Default environment of every command.
    pub env: Option<BTreeMap<String, String>>,
    /// Labels.
    pub tags: Option<BTreeMap<String, String>>,
    /// Egress policy, with the header values that were in the request.
    pub policy: Option<Draft>,
    /// Drives and their places, all of them.
    pub mounts: Option<Mounts>,
    /// Opaque, kept for clients.
    pub network_id: Option<Option<String>>,
    /// Opaque, kept for clients.
    pub region: Option<String>,
    /// Opaque, kept for clients.
    pub failover_regions: Option<Vec<String>>,
    /// How long automatic snapshots are kept after their last use, ms; 0 is for ever.
    pub snapshot_expiration_ms: Option<i64>,
    /// How many snapshots are kept.
    pub keep_last: Option<Option<KeepLastSnapshots>>,
    /// What ends and wakes it; in force at once.
    pub life: Option<LifeChange>,
    /// State that the next session starts from.
    pub current_snapshot_id: Option<String>,
    /// `node24` and the like; excludes `image`.
    pub runtime: Option<String>,
}

/// Overrides of a fork. `None`: copied from the source.
pub type ForkSandbox = UpdateSandboxWithName;
/// See [`ForkSandbox`].
#[derive(Debug, Clone, Default)]
pub struct UpdateSandboxWithName {
    /// Its name. Absent in a create: a generated one; in a fork too.
    pub name: Option<String>,
    /// Image to start from.
    pub image: Option<String>,
    /// The other overrides.
    pub update: UpdateSandbox,
    /// A repeated call with the same key answers the first call's sandbox.
    pub idempotency_key: Option<String>,
}

/// Several forks by one call.
#[derive(Debug, Clone, Default)]
pub struct ForkMany {
    /// How many, 1 to 1,000.
    pub count: u32,
    /// Name of the one, or the beginning of all their names (`NAME-1` and so on). Absent: generated ones.
    pub name: Option<String>,
    /// From the present state of a running source, or from its current snapshot. Absent: the first if it
    /// runs.
    pub live: Option<bool>,
    /// From this snapshot instead.
    pub snapshot: Option<String>,
    /// What is to differ from the source; its name and key do not count.
    pub overrides: ForkSandbox,
    /// A repeated call with the same key answers the first call's sandboxes.
    pub idempotency_key: Option<String>,
}

/// What came of [`ForkMany`].
#[derive(Debug, Clone)]
pub struct Forked {
    /// What they start from; absent is the source's image.
    pub snapshot: Option<Snapshot>,
    /// All of them, in the order of their numbers.
    pub sandboxes: Vec<View>,
    /// Credentials of the source that are bound to somebody else: the forks have none of them.
    pub needs_auth: Vec<String>,
}

/// A snapshot of a running sandbox.
#[derive(Debug, Clone, Default)]
pub struct TakeSnapshot {
    /// The sandbox goes on.
    pub live: bool,
    /// What is written on it.
    pub labels: BTreeMap<String, String>,
    /// How long it is kept after its last use, ms; 0 is for ever; absent is as the sandbox says.
    pub expiration_ms: Option<i64>,
}

/// A way back.
#[derive(Debug, Clone, Default)]
pub struct Rollback {
    /// Where to; absent is the last snapshot that was taken of the sandbox.
    pub snapshot: Option<String>,
    /// Do not keep the present state.
    pub discard: bool,
}

/// What came of [`Rollback`].
#[derive(Debug, Clone)]
pub struct RolledBack {
    /// The sandbox as it is now.
    pub view: View,
    /// What it started from, or would.
    pub to: Snapshot,
    /// The state that it left.
    pub kept: Option<Snapshot>,
}

/// A sandbox with its newest session and its routes.
#[derive(Debug, Clone)]
pub struct View {
    /// The named thing.
    pub sandbox: Sandbox,
    /// Its newest session, or the one that was asked for.
    pub session: Session,
    /// Its ports.
    pub routes: Vec<Route>,
    /// This call started the session.
    pub resumed: bool,
}

/// What a list of sandboxes is sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SortBy {
    /// Time of creation.
    #[default]
    CreatedAt,
    /// Name.
    Name,
    /// When the status changed.
    StatusUpdatedAt,
    /// Id of the current snapshot.
    CurrentSnapshotId,
}

/// Which sandboxes to list: newest first unless told otherwise.
#[derive(Debug, Clone, Default)]
pub struct ListSandboxes {
    /// 1..=50; absent is 20.
    pub limit: Option<u32>,
    /// `next` of the page before.
    pub cursor: Option<String>,
    /// The order.
    pub sort_by: SortBy,
    /// Smallest or oldest first.
    pub ascending: bool,
    /// Only names that start so; needs `sort_by` = name.
    pub name_prefix: Option<String>,
    /// Only with this label.
    pub tag: Option<(String, String)>,
    /// Every namespace (the command line's `ls -A`).
    pub all_namespaces: bool,
}

/// Lists of sessions and snapshots: newest first unless `ascending`.
#[derive(Debug, Clone, Default)]
pub struct ListChildren {
    /// Only of this sandbox.
    pub sandbox_name: Option<String>,
    /// 1..=50; absent is 20.
    pub limit: Option<u32>,
    /// `next` of the page before.
    pub cursor: Option<String>,
    /// Smallest or oldest first.
    pub ascending: bool,
    /// /v1: created at or after, created before (ms).
    pub since: Option<Millis>,
    /// See `since`.
    pub until: Option<Millis>,
    /// Snapshots: only with this label.
    pub label: Option<(String, String)>,
}

/// One page of a list.
#[derive(Debug, Clone)]
pub struct Page<T> {
    /// The rows.
    pub items: Vec<T>,
    /// Opaque; absent on the last page.
    pub next: Option<String>,
}

/// A session that has been stopped.
#[derive(Debug, Clone)]
pub struct Stopped {
    /// Its newest session, or the one that was asked for.
    pub session: Session,
    /// The named thing.
    pub sandbox: Sandbox,
    /// The one that this call took.
    pub snapshot: Option<Snapshot>,
}

/// A piece of a followed command.
#[derive(Debug, Clone)]
pub enum Output {
    /// Bytes of a stream.
    Data {
        /// Which output.
        stream: Stream,
        /// As they were written.
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
