//! Additions of ours about states of sandboxes: snapshots of running ones, forks by the hundred, the way
//! back, labels. Below `/api/bivouac/v1`.
//!
//! Invariant: a handler reads a request, makes one call of the engine and shows the result. Asked by
//! `bivouac snapshot`, `fork`, `rollback` and `snapshots label`.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use bivouac_engine::{ForkMany, Forked, Rollback, TakeSnapshot};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::requests::{ForkBody, expiration};
use super::scope::{Call, Seg, snapshot_id};
use super::v2::sessions::SnapshotAndSession;
use super::views::{SessionView, SnapshotBody, SnapshotView, ViewBody};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(snapshot))
        .routes(routes!(forks))
        .routes(routes!(rollback))
        .routes(routes!(label))
}

/// What a snapshot is to be.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct TakeSnapshotBody {
    /// The sandbox goes on; else it stops and starts from the snapshot next.
    #[serde(default)]
    live: bool,
    /// What is written on it.
    #[serde(default)]
    labels: BTreeMap<String, String>,
    /// ms after its last use; 0 is never. Absent: as the sandbox says.
    expiration: Option<i64>,
}

/// Keep a running sandbox's filesystem as a snapshot; with `live` it goes on
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/snapshots", tag = "bivouac",
    params(("name" = String, Path)), request_body = TakeSnapshotBody,
    responses((status = 201, body = SnapshotAndSession)))]
async fn snapshot(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<TakeSnapshotBody>,
) -> Result<(StatusCode, Json<SnapshotAndSession>), ApiError> {
    let spec = TakeSnapshot {
        live: body.live,
        labels: body.labels,
        expiration_ms: body.expiration.map(expiration).transpose()?,
    };
    let namespace = call.namespace(None)?;
    let (snapshot, session) = app.engine.take_snapshot(&call.who, &namespace, &name, spec).await?;
    let (snapshot, session) = (SnapshotView::from(&snapshot), SessionView::from(&session));
    Ok((StatusCode::CREATED, Json(SnapshotAndSession { snapshot, session })))
}

/// Which forks are wanted.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct ForksBody {
    /// How many, 1 to 1,000; absent is 1.
    count: Option<u32>,
    /// Name of the one, or of all of them with `-1` and so on behind it. Absent: generated names.
    name: Option<String>,
    /// From the present state of a running source (`true`) or from its current snapshot (`false`). Absent:
    /// from the present state if it runs.
    live: Option<bool>,
    /// From this snapshot instead.
    snapshot_id: Option<String>,
    /// What is to differ from the source, for all of them: the fields of a fork but for the name.
    overrides: Option<ForkBody>,
}

/// Answer with new forks.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ForksAnswer {
    /// What they start from; absent is the source's image.
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<SnapshotView>,
    /// All of them, in the order of their numbers.
    sandboxes: Vec<ViewBody>,
    /// Credentials of the source that are bound to somebody else: the forks have none of them.
    needs_auth: Vec<String>,
}

impl From<&Forked> for ForksAnswer {
    fn from(forked: &Forked) -> Self {
        Self {
            snapshot: forked.snapshot.as_ref().map(SnapshotView::from),
            sandboxes: forked.sandboxes.iter().map(ViewBody::from).collect(),
            needs_auth: forked.needs_auth.clone(),
        }
    }
}

/// Make sandboxes that begin where another one is: all of them, or none
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/forks", tag = "bivouac",
    params(("name" = String, Path, description = "the source")), request_body = ForksBody,
    responses((status = 201, body = ForksAnswer)))]
async fn forks(
    State(app): State<App>,
    call: Call,
    Seg(source): Seg<String>,
    JsonBody(body): JsonBody<ForksBody>,
) -> Result<(StatusCode, Json<ForksAnswer>), ApiError> {
    let overrides = match body.overrides {
        Some(overrides) => overrides.spec(None)?,
        None => bivouac_engine::ForkSandbox::default(),
    };
    if overrides.name.is_some() {
        return Err(ApiError::field("overrides.name", "stands beside overrides, as name"));
    }
    if overrides.update.current_snapshot_id.is_some() {
        let reason = "stands beside overrides, as snapshotId";
        return Err(ApiError::field("overrides.currentSnapshotId", reason));
    }
    let spec = ForkMany {
        count: body.count.unwrap_or(1),
        name: body.name,
        live: body.live,
        snapshot: body.snapshot_id,
        overrides,
        idempotency_key: call.idempotency_key.clone(),
    };
    let namespace = call.namespace(None)?;
    let forked = app.engine.forks(&call.who, &namespace, &source, spec).await?;
    Ok((StatusCode::CREATED, Json(ForksAnswer::from(&forked))))
}

/// Where a sandbox is to go back to.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RollbackBody {
    /// Absent: the last snapshot that was taken of it.
    snapshot_id: Option<String>,
    /// Do not keep the present state.
    #[serde(default)]
    discard: bool,
}

/// Answer to a rollback.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RollbackAnswer {
    #[serde(flatten)]
    view: ViewBody,
    /// Where it is now.
    snapshot: SnapshotView,
    /// The state that it left.
    #[serde(skip_serializing_if = "Option::is_none")]
    kept: Option<SnapshotView>,
}

/// Have a sandbox go back to a snapshot; what it leaves is kept unless `discard`
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/rollback", tag = "bivouac",
    params(("name" = String, Path)), request_body = RollbackBody,
    responses((status = 200, body = RollbackAnswer)))]
async fn rollback(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<RollbackBody>,
) -> Result<Json<RollbackAnswer>, ApiError> {
    let spec = Rollback { snapshot: body.snapshot_id, discard: body.discard };
    let namespace = call.namespace(None)?;
    let done = app.engine.rollback(&call.who, &namespace, &name, spec).await?;
    Ok(Json(RollbackAnswer {
        view: ViewBody::from(&done.view),
        snapshot: SnapshotView::from(&done.to),
        kept: done.kept.as_ref().map(SnapshotView::from),
    }))
}

/// What is to be written on a snapshot.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct LabelBody {
    /// A text sets a label, null removes it; all others stay.
    labels: BTreeMap<String, Option<String>>,
}

/// Change the labels of a snapshot
#[utoipa::path(patch, path = "/bivouac/v1/snapshots/{id}", tag = "bivouac",
    params(("id" = String, Path)), request_body = LabelBody,
    responses((status = 200, body = SnapshotBody)))]
async fn label(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<LabelBody>,
) -> Result<Json<SnapshotBody>, ApiError> {
    let (team, id) = (call.team()?, snapshot_id(&id)?);
    let snapshot = app.engine.label_snapshot(&call.who, &team, &id, &body.labels).await?;
    Ok(Json(SnapshotBody { snapshot: SnapshotView::from(&snapshot) }))
}
