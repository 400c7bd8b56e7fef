//! How the nouns look on the wire: reference/vercel-api.md §2.1.
//!
//! Invariant: an optional field is absent, never null, except `exitCode` and `pagination.next`: the
//! clients' validators refuse null. Times, durations and sizes are whole numbers. `runtime` is
//! always there, because older clients demand it. What the reference does not know is an addition
//! of ours: `image`, `reason`, `reasonText`, `team`, `project`, `pausedAt`, `pausedMs`, `life`, `restarts`.

use std::collections::BTreeMap;

use bivouac_engine::{Clock as _, Page, SystemClock, Tree, TreeNode, View};
use bivouac_types::Millis;
use bivouac_types::command::{Command, CommandEnd, EndReason};
use bivouac_types::drive::Mount;
use bivouac_types::image::plain;
use bivouac_types::name::Namespace;
use bivouac_types::sandbox::{KeepLastSnapshots, Route, Sandbox};
use bivouac_types::session::{Session, SessionStatus};
use bivouac_types::snapshot::{Snapshot, SnapshotStatus};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::own_pause::{LifeView, RestartsView};

/// The port that a client is told when it asks for an interactive session. Terminals arrive with a
/// later release over a socket of the engine; the official command line only refuses to go on
/// without a number here.
pub(crate) const INTERACTIVE_PORT: u16 = 7071;

/// One run of a sandbox.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SessionView {
    id: String,
    /// MB.
    memory: i64,
    vcpus: i64,
    region: String,
    runtime: String,
    image: String,
    /// Time allowed from the start, ms.
    timeout: i64,
    status: &'static str,
    requested_at: i64,
    created_at: i64,
    updated_at: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    started_at: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    requested_stop_at: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped_at: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aborted_at: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshotted_at: Option<i64>,
    /// From start to end, once it has ended, ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    duration: Option<i64>,
    cwd: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_snapshot_id: Option<String>,
    source_sandbox_name: String,
    /// Where its sandbox is at hand as well.
    #[serde(skip_serializing_if = "Option::is_none")]
    project_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    interactive_port: Option<u16>,
    #[schema(value_type = Object)]
    network_policy: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    active_cpu_duration_ms: Option<i64>,
    /// Why it failed or was lost, or what went wrong before it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Since when it stands still, with its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    paused_at: Option<i64>,
    /// How long it has stood still before, ms: that does not count.
    #[serde(skip_serializing_if = "Option::is_none")]
    paused_ms: Option<i64>,
}

impl From<&Session> for SessionView {
    fn from(s: &Session) -> Self {
        let ended = s.stopped_at.or(s.aborted_at);
        let duration = s.started_at.zip(ended).map(|(from, to)| (to - from).max(0));
        Self {
            id: s.id.to_string(),
            memory: s.resources.memory_mb,
            vcpus: s.resources.vcpus,
            region: s.region.clone(),
            runtime: s.runtime.clone(),
            image: plain(&s.image).to_owned(),
            timeout: s.timeout_ms,
            status: s.status.as_str(),
            requested_at: s.requested_at,
            created_at: s.created_at,
            updated_at: s.updated_at,
            started_at: s.started_at,
            requested_stop_at: s.requested_stop_at,
            stopped_at: s.stopped_at,
            aborted_at: s.aborted_at,
            snapshotted_at: s.snapshotted_at,
            duration,
            cwd: s.cwd.clone(),
            source_snapshot_id: s.source_snapshot_id.as_ref().map(ToString::to_string),
            source_sandbox_name: s.sandbox_name.clone(),
            project_id: None,
            interactive_port: None,
            network_policy: s.policy.read_back(),
            active_cpu_duration_ms: s.active_cpu_ms,
            reason: s.reason.clone(),
            paused_at: s.paused_at,
            paused_ms: (s.paused_ms > 0).then_some(s.paused_ms),
        }
    }
}

impl SessionView {
    /// Adds the project, which the Python client looks for in every session.
    pub(crate) fn of(mut self, sandbox: &Sandbox) -> Self {
        self.project_id = Some(sandbox.namespace.project.clone());
        self
    }

    /// Adds the port that the official command line demands of a create.
    pub(crate) fn interactive(mut self) -> Self {
        self.interactive_port = Some(INTERACTIVE_PORT);
        self
    }
}

/// The named thing.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SandboxView {
    name: String,
    project_id: String,
    persistent: bool,
    created_at: i64,
    updated_at: i64,
    current_session_id: String,
    status: &'static str,
    status_updated_at: i64,
    region: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    failover_regions: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network_id: Option<String>,
    vcpus: i64,
    memory: i64,
    /// Most bytes over the image, from the next session on; absent is what the engine gives.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_bytes: Option<i64>,
    timeout: i64,
    cwd: String,
    runtime: String,
    image: String,
    #[schema(value_type = Object)]
    network_policy: Value,
    tags: BTreeMap<String, String>,
    /// Drives by their paths, for the next session.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    mounts: BTreeMap<String, MountView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot_expiration: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keep_last_snapshots: Option<KeepLastView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    current_snapshot_id: Option<String>,
    /// When the running session's time is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<i64>,
    total_active_cpu_duration_ms: i64,
    total_duration_ms: i64,
    /// Why the newest session failed or was lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Since when its running session stands still, with its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    paused_at: Option<i64>,
    /// What ends and wakes it, when it has rules for that.
    #[serde(skip_serializing_if = "Option::is_none")]
    life: Option<LifeView>,
    /// What its restart policy has done, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    restarts: Option<RestartsView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    team: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    project: Option<String>,
}

/// A drive of a sandbox.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MountView {
    drive: String,
    /// `read-write` or `snapshot`.
    mode: &'static str,
}

impl From<&Mount> for MountView {
    fn from(m: &Mount) -> Self {
        Self { drive: m.drive.clone(), mode: m.mode.as_str() }
    }
}

/// How many snapshots are kept.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeepLastView {
    count: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    expiration: Option<i64>,
    /// Whether those that fall out are deleted at once.
    delete_evicted: bool,
}

impl From<&KeepLastSnapshots> for KeepLastView {
    fn from(k: &KeepLastSnapshots) -> Self {
        // The default is told: the official SDK's own tests look for it.
        let delete_evicted = k.delete_evicted.unwrap_or(true);
        Self { count: k.count, expiration: k.expiration, delete_evicted }
    }
}

impl From<&Sandbox> for SandboxView {
    fn from(s: &Sandbox) -> Self {
        Self {
            name: s.name.clone(),
            project_id: s.namespace.project.clone(),
            persistent: s.persistent,
            created_at: s.created_at,
            updated_at: s.updated_at,
            current_session_id: s.current_session_id.to_string(),
            status: s.status.as_str(),
            status_updated_at: s.status_updated_at,
            region: s.region.clone(),
            failover_regions: s.failover_regions.clone(),
            network_id: s.network_id.clone(),
            vcpus: s.resources.vcpus,
            memory: s.resources.memory_mb,
            disk_bytes: s.resources.disk_bytes,
            timeout: s.timeout_ms,
            cwd: s.cwd.clone(),
            runtime: s.runtime.clone(),
            image: plain(&s.image).to_owned(),
            network_policy: s.policy.read_back(),
            tags: s.tags.clone(),
            mounts: s.mounts.iter().map(|(at, m)| (at.clone(), m.into())).collect(),
            snapshot_expiration: s.snapshot_expiration_ms,
            keep_last_snapshots: s.keep_last.as_ref().map(KeepLastView::from),
            current_snapshot_id: s.current_snapshot_id.as_ref().map(ToString::to_string),
            expires_at: None,
            total_active_cpu_duration_ms: s.total_active_cpu_ms,
            total_duration_ms: s.total_duration_ms,
            reason: None,
            paused_at: None,
            life: LifeView::of(&s.life),
            restarts: RestartsView::of(&s.restarts),
            team: None,
            project: None,
        }
    }
}

impl SandboxView {
    /// A sandbox of which the newest session is at hand.
    pub(crate) fn with_session(sandbox: &Sandbox, session: &Session) -> Self {
        let newest = session.id == sandbox.current_session_id;
        let running = newest && session.status == SessionStatus::Running;
        let expires_at = running.then(|| session.deadline_at(SystemClock.now()));
        let paused_at = session.paused_at.filter(|_| running);
        let reason = session.reason.clone().filter(|_| newest);
        Self { expires_at, paused_at, reason, ..Self::from(sandbox) }
    }

    /// One of a list, which carries no sessions: `deadline` is the one of its running session, which stands
    /// still since `paused_at`.
    pub(crate) fn listed(
        sandbox: &Sandbox,
        deadline: Option<Millis>,
        paused_at: Option<Millis>,
    ) -> Self {
        Self { expires_at: deadline, paused_at, ..Self::from(sandbox) }
    }

    /// Adds the namespace, for lists over all of them.
    pub(crate) fn with_namespace(mut self, namespace: &Namespace) -> Self {
        self.team = Some(namespace.team.clone());
        self.project = Some(namespace.project.clone());
        self
    }
}

/// Where a port is reached.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RouteView {
    url: String,
    subdomain: String,
    port: u16,
}

impl From<&Route> for RouteView {
    fn from(r: &Route) -> Self {
        Self { url: r.url.clone(), subdomain: r.subdomain.clone(), port: r.port }
    }
}

pub(crate) fn routes(routes: &[Route]) -> Vec<RouteView> {
    routes.iter().map(RouteView::from).collect()
}

/// A command. In `/v1` the session's id is called `sandboxId`.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CommandView {
    id: String,
    name: String,
    args: Vec<String>,
    cwd: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox_id: Option<String>,
    /// The terminal that it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    terminal: Option<String>,
    /// Null while it runs.
    exit_code: Option<i32>,
    started_at: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_ms: Option<i64>,
    /// `timeout`, `out_of_memory`, `process_limit`, `sandbox_stopped` or `lost`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    reason: Option<EndReason>,
    /// The same as a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason_text: Option<&'static str>,
}

impl From<&Command> for CommandView {
    fn from(c: &Command) -> Self {
        let end = c.end.as_ref();
        let reason = end.and_then(|e: &CommandEnd| e.reason);
        Self {
            id: c.id.to_string(),
            name: c.name.clone(),
            args: c.args.clone(),
            cwd: c.cwd.clone(),
            session_id: Some(c.session_id.to_string()),
            sandbox_id: None,
            terminal: c.terminal.clone(),
            exit_code: end.and_then(|e| e.exit_code),
            started_at: c.started_at,
            duration_ms: end.map(|e| e.duration_ms),
            reason,
            reason_text: reason.map(explain),
        }
    }
}

impl CommandView {
    /// The command as it was when it began: how a stream's first record shows it, also when a
    /// repeated call finds it ended.
    pub(crate) fn begun(command: &Command) -> Self {
        let end = None;
        Self::from(&Command { end, ..command.clone() })
    }

    /// As `/v1` calls its fields.
    pub(crate) fn v1(mut self) -> Self {
        self.sandbox_id = self.session_id.take();
        self
    }
}

/// Why a command ended, as a sentence.
pub(crate) fn explain(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Timeout => "The command was killed because its timeout passed.",
        EndReason::OutOfMemory => {
            "The kernel killed a process of the sandbox because its memory limit was reached."
        }
        EndReason::ProcessLimit => {
            "The sandbox's limit of processes and threads was reached while the command ran."
        }
        EndReason::SandboxStopped => "The sandbox was stopped while the command ran.",
        EndReason::Lost => "The sandbox session was lost; how the command ended is not known.",
    }
}

/// An immutable filesystem state. In `/v1` the session's id is called `sourceSandboxId`.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SnapshotView {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_session_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_sandbox_id: Option<String>,
    source_sandbox_name: String,
    region: String,
    status: &'static str,
    size_bytes: i64,
    image: String,
    created_at: i64,
    updated_at: i64,
    /// Absent: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_used_at: Option<i64>,
    /// `automatic` or `manual`.
    creation_method: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_id: Option<String>,
    /// `sizeBytes` is an estimate: the walk that finds it out is still to come.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    size_estimated: bool,
    /// What is written on it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
    /// `rollback`: the state that a rollback left; `fork`: what live forks start from.
    #[serde(skip_serializing_if = "Option::is_none")]
    purpose: Option<&'static str>,
    /// How long its running sandbox stood still for it, µs.
    #[serde(skip_serializing_if = "Option::is_none")]
    stall_us: Option<i64>,
}

impl From<&Snapshot> for SnapshotView {
    fn from(s: &Snapshot) -> Self {
        Self {
            id: s.id.to_string(),
            source_session_id: Some(s.source_session_id.to_string()),
            source_sandbox_id: None,
            source_sandbox_name: s.sandbox_name.clone(),
            region: s.region.clone(),
            status: match s.status {
                SnapshotStatus::Created => "created",
                SnapshotStatus::Deleted => "deleted",
                SnapshotStatus::Failed => "failed",
            },
            size_bytes: s.size_bytes,
            image: plain(&s.image).to_owned(),
            created_at: s.created_at,
            updated_at: s.updated_at,
            expires_at: s.expires_at,
            last_used_at: s.last_used_at,
            creation_method: if s.automatic { "automatic" } else { "manual" },
            parent_id: s.parent_id.as_ref().map(ToString::to_string),
            size_estimated: !s.measured,
            labels: s.labels.clone(),
            purpose: Some(s.purpose.as_str()).filter(|word| !word.is_empty()),
            stall_us: Some(s.stall_us).filter(|us| *us > 0),
        }
    }
}

impl SnapshotView {
    /// As `/v1` calls its fields.
    pub(crate) fn v1(mut self) -> Self {
        self.source_sandbox_id = self.source_session_id.take();
        self
    }
}

/// Where a list goes on.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Pagination {
    /// Items on this page.
    count: usize,
    /// Handed back as `cursor`; null on the last page.
    next: Option<String>,
}

impl Pagination {
    pub(crate) fn of<T>(page: &Page<T>) -> Self {
        Self { count: page.items.len(), next: page.next.clone() }
    }
}

/// Answer with a sandbox, its session and its routes.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ViewBody {
    pub(crate) sandbox: SandboxView,
    pub(crate) session: SessionView,
    pub(crate) routes: Vec<RouteView>,
    /// This call started the session.
    pub(crate) resumed: bool,
}

impl From<&View> for ViewBody {
    fn from(view: &View) -> Self {
        Self {
            sandbox: SandboxView::with_session(&view.sandbox, &view.session),
            session: SessionView::from(&view.session).of(&view.sandbox),
            routes: routes(&view.routes),
            resumed: view.resumed,
        }
    }
}

/// Answer with a command.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CommandBody {
    pub(crate) command: CommandView,
}

/// Answer with a session.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionBody {
    pub(crate) session: SessionView,
}

/// Answer with a snapshot.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SnapshotBody {
    pub(crate) snapshot: SnapshotView,
}

/// Answer with a page of snapshots.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SnapshotsBody {
    pub(crate) snapshots: Vec<SnapshotView>,
    pub(crate) pagination: Pagination,
}

impl From<&Page<Snapshot>> for SnapshotsBody {
    fn from(page: &Page<Snapshot>) -> Self {
        let snapshots = page.items.iter().map(SnapshotView::from).collect();
        Self { snapshots, pagination: Pagination::of(page) }
    }
}

/// One level of a snapshot's ancestry.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TreeNodeView {
    snapshot: SnapshotView,
    siblings: Vec<SnapshotView>,
    /// How many have the same parent, as text: `"3"` or `"10+"`.
    count: String,
}

impl From<&TreeNode> for TreeNodeView {
    fn from(node: &TreeNode) -> Self {
        Self {
            snapshot: SnapshotView::from(&node.snapshot),
            siblings: node.siblings.iter().map(SnapshotView::from).collect(),
            count: node.count.clone(),
        }
    }
}

/// Answer with a walk through a snapshot's ancestry.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TreeBody {
    snapshots: Vec<TreeNodeView>,
    anchor: TreeNodeView,
    pagination: Pagination,
}

impl From<&Tree> for TreeBody {
    fn from(tree: &Tree) -> Self {
        let next = tree.next.as_ref().map(ToString::to_string);
        Self {
            snapshots: tree.nodes.iter().map(TreeNodeView::from).collect(),
            anchor: TreeNodeView::from(&tree.anchor),
            pagination: Pagination { count: tree.nodes.len(), next },
        }
    }
}

/// Answer without content: `{}`.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Empty {}

#[cfg(test)]
mod tests;
