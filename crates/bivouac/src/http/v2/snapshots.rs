//! Snapshots: list, get, delete, ancestry.

use axum::Json;
use axum::extract::State;
use bivouac_engine::TreeQuery;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::sessions::children;
use crate::http::App;
use crate::http::error::ApiError;
use crate::http::scope::{Call, Seg, snapshot_id};
use crate::http::views::{SnapshotBody, SnapshotView, SnapshotsBody, TreeBody};

/// Most levels of one page of an ancestry.
const MAX_LEVELS: u32 = 10;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(tree)).routes(routes!(get, delete))
}

/// List snapshots
#[utoipa::path(get, path = "/v2/sandboxes/snapshots", tag = "snapshots",
    params(("name" = Option<String>, Query, description = "of this sandbox only"),
        ("limit" = Option<u32>, Query), ("cursor" = Option<String>, Query),
        ("sortOrder" = Option<String>, Query),
        ("labels" = Option<String>, Query, description = "one label, key:value; ours")),
    responses((status = 200, body = SnapshotsBody)))]
async fn list(State(app): State<App>, call: Call) -> Result<Json<SnapshotsBody>, ApiError> {
    let (namespace, mut query) = (call.namespace(None)?, children(&call)?);
    query.label = match call.text("labels").map(|text| text.split_once(':')) {
        None => None,
        Some(Some((key, value))) => Some((key.to_owned(), value.to_owned())),
        Some(None) => return Err(ApiError::field("labels", "must be key:value")),
    };
    let page = app.engine.snapshots(&call.who, &namespace, query).await?;
    Ok(Json(SnapshotsBody::from(&page)))
}

/// Walk through a snapshot's ancestors (`sortOrder=desc`) or descendants
#[utoipa::path(get, path = "/v2/sandboxes/snapshots/tree", tag = "snapshots",
    params(("snapshotId" = String, Query), ("limit" = Option<u32>, Query, description = "1 to 10"),
        ("cursor" = Option<String>, Query), ("sortOrder" = Option<String>, Query)),
    responses((status = 200, body = TreeBody)))]
async fn tree(State(app): State<App>, call: Call) -> Result<Json<TreeBody>, ApiError> {
    // A page's `next` is the snapshot that the next one starts at, whichever way it comes back.
    let Some(start) = call.text("cursor").or_else(|| call.text("snapshotId")) else {
        return Err(ApiError::field("snapshotId", "is missing"));
    };
    let query = TreeQuery {
        snapshot_id: snapshot_id(start)?,
        limit: call.limit(MAX_LEVELS)?,
        ascending: call.ascending()?,
    };
    let tree = app.engine.snapshot_tree(&call.who, &call.namespace(None)?, query).await?;
    Ok(Json(TreeBody::from(&tree)))
}

/// Show a snapshot
#[utoipa::path(get, path = "/v2/sandboxes/snapshots/{id}", tag = "snapshots",
    params(("id" = String, Path)), responses((status = 200, body = SnapshotBody)))]
async fn get(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
) -> Result<Json<SnapshotBody>, ApiError> {
    let snapshot = app.engine.snapshot_by_id(&call.who, &call.team()?, &snapshot_id(&id)?).await?;
    Ok(Json(SnapshotBody { snapshot: SnapshotView::from(&snapshot) }))
}

/// Delete a snapshot
#[utoipa::path(delete, path = "/v2/sandboxes/snapshots/{id}", tag = "snapshots",
    params(("id" = String, Path)), responses((status = 200, body = SnapshotBody)))]
async fn delete(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
) -> Result<Json<SnapshotBody>, ApiError> {
    let snapshot = app.engine.delete_snapshot(&call.who, &call.team()?, &snapshot_id(&id)?).await?;
    Ok(Json(SnapshotBody { snapshot: SnapshotView::from(&snapshot) }))
}
