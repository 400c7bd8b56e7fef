//! Snapshots of `/v1`.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{TimePagination, page_query, paginate};
use crate::http::App;
use crate::http::error::ApiError;
use crate::http::scope::{Call, Seg, snapshot_id};
use crate::http::views::{SnapshotBody, SnapshotView};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(get, delete))
}

/// Answer with a page of snapshots.
#[derive(Debug, Serialize, ToSchema)]
struct V1Snapshots {
    snapshots: Vec<SnapshotView>,
    pagination: TimePagination,
}

/// List snapshots, newest first
#[utoipa::path(get, path = "/v1/sandboxes/snapshots", tag = "v1",
    params(("limit" = Option<u32>, Query), ("since" = Option<i64>, Query, description = "ms"),
        ("until" = Option<i64>, Query, description = "ms, exclusive")),
    responses((status = 200, body = V1Snapshots)))]
async fn list(State(app): State<App>, call: Call) -> Result<Json<V1Snapshots>, ApiError> {
    let (namespace, (limit, query)) = (call.namespace(None)?, page_query(&call)?);
    let mut page = app.engine.snapshots(&call.who, &namespace, query).await?;
    let pagination = paginate(&mut page.items, limit, |s| s.created_at);
    let snapshots = page.items.iter().map(|s| SnapshotView::from(s).v1()).collect();
    Ok(Json(V1Snapshots { snapshots, pagination }))
}

/// Show a snapshot
#[utoipa::path(get, path = "/v1/sandboxes/snapshots/{id}", tag = "v1",
    params(("id" = String, Path)), responses((status = 200, body = SnapshotBody)))]
async fn get(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
) -> Result<Json<SnapshotBody>, ApiError> {
    let snapshot = app.engine.snapshot_by_id(&call.who, &call.team()?, &snapshot_id(&id)?).await?;
    Ok(Json(SnapshotBody { snapshot: SnapshotView::from(&snapshot).v1() }))
}

/// Delete a snapshot
#[utoipa::path(delete, path = "/v1/sandboxes/snapshots/{id}", tag = "v1",
    params(("id" = String, Path)), responses((status = 200, body = SnapshotBody)))]
async fn delete(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
) -> Result<Json<SnapshotBody>, ApiError> {
    let snapshot = app.engine.delete_snapshot(&call.who, &call.team()?, &snapshot_id(&id)?).await?;
    Ok(Json(SnapshotBody { snapshot: SnapshotView::from(&snapshot).v1() }))
}
