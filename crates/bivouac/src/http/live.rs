//! Additions of ours that are about what runs now: what sessions use, and holding a sandbox.
//!
//! Invariant: nothing here changes a sandbox but the end of a hold, and that is the engine's doing.
//! Asked by `bivouac top` and `bivouac run`.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bivouac_engine::{Clock as _, SessionUse, SystemClock};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::error::ApiError;
use super::scope::{Call, Seg};

/// How often a hold says that it is still there. A peer that is gone without a word is found so.
const BEAT: Duration = Duration::from_secs(5);

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(stats)).routes(routes!(hold))
}

/// Answer with what running sessions use.
#[derive(Debug, Serialize, ToSchema)]
struct StatsBody {
    /// When the answer was made.
    at: i64,
    /// Sorted by namespace and name.
    stats: Vec<UseView>,
}

/// What a running session uses.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct UseView {
    team: String,
    project: String,
    /// The sandbox's name.
    sandbox: String,
    session: String,
    started_at: Option<i64>,
    /// Since when it stands still, with its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    paused_at: Option<i64>,
    /// When this was read.
    at: i64,
    /// CPU time so far, ms: two answers give a rate.
    cpu_ms: u64,
    vcpus: i64,
    memory_bytes: u64,
    memory_limit_bytes: i64,
    /// Processes and threads.
    pids: u64,
    pids_limit: u32,
    /// What it holds over its image, as its `df` says; absent where the host does not count.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_bytes: Option<u64>,
    disk_limit_bytes: u64,
    /// Bytes that its network device got since the session's start, headers included; absent when it cannot be
    /// told.
    #[serde(skip_serializing_if = "Option::is_none")]
    network_received_bytes: Option<u64>,
    /// Bytes that its network device sent, also of what was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    network_sent_bytes: Option<u64>,
    /// Commands that run.
    commands: usize,
    /// How often the kernel killed a process at the memory limit.
    oom_kills: u64,
    /// How often the process limit refused a new one.
    pids_limit_hits: u64,
}

impl UseView {
    fn new(of: SessionUse, pids_limit: u32) -> Self {
        let SessionUse { namespace, session, usage, disk_bytes, disk_limit, commands, at } = of;
        Self {
            team: namespace.team,
            project: namespace.project,
            sandbox: session.sandbox_name,
            session: session.id.to_string(),
            started_at: session.started_at,
            paused_at: session.paused_at,
            at,
            cpu_ms: usage.cpu_ms,
            vcpus: session.resources.vcpus,
            memory_bytes: usage.memory_bytes,
            memory_limit_bytes: session.resources.memory_mb << 20,
            pids: usage.pids,
            pids_limit,
            disk_bytes,
            disk_limit_bytes: disk_limit,
            network_received_bytes: usage.network.map(|n| n.received),
            network_sent_bytes: usage.network.map(|n| n.sent),
            commands,
            oom_kills: usage.oom_kills,
            pids_limit_hits: usage.pid_limit_hits,
        }
    }
}

/// Show what running sessions use; with `all=true` those of every namespace
#[utoipa::path(get, path = "/bivouac/v1/stats", tag = "bivouac",
    params(("all" = Option<bool>, Query)), responses((status = 200, body = StatsBody)))]
async fn stats(State(app): State<App>, call: Call) -> Result<Json<StatsBody>, ApiError> {
    let namespace = call.namespace(None)?;
    let of = (!call.flag("all")?).then_some(&namespace);
    let pids = app.engine.config().pids;
    let used = app.engine.usage(&call.who, of).await?;
    let stats = used.into_iter().map(|of| UseView::new(of, pids)).collect();
    Ok(Json(StatsBody { at: SystemClock.now(), stats }))
}

/// Hold a sandbox for as long as the answer is read
///
/// The answer has no end. When the last one of a sandbox has been left (by a program that ended, or a
/// connection that broke), the sandbox is deleted five seconds later, unless it is held again by then.
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/hold", tag = "bivouac",
    params(("name" = String, Path)),
    responses((status = 200, body = Object, content_type = "application/x-ndjson",
        description = "one record, then blank lines")))]
async fn hold(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Response, ApiError> {
    let lease = app.engine.hold(&call.who, &call.namespace(None)?, &name).await?;
    let first =
        stream::once(async { Ok::<_, Infallible>(Bytes::from_static(b"{\"held\":true}\n")) });
    // The lease is part of the stream: it goes when hyper lets go of that.
    let beats = stream::unfold(lease, |lease| async move {
        tokio::time::sleep(BEAT).await;
        Some((Ok(Bytes::from_static(b"\n")), lease))
    });
    let mut response = Body::from_stream(first.chain(beats)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}
