//! Sandboxes of `/v1`: create, get, list, stop, extend, policy, snapshot, files.

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use bivouac_types::sandbox::Route;
use bivouac_types::session::Session;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{TimePagination, page_query, paginate};
use crate::http::App;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::requests::{CreateBody, policy};
use crate::http::runs::Target;
use crate::http::scope::{Call, Seg, session_id};
use crate::http::v2::files::{PathBody, archive_folder, make_folder, read_file, write_archive};
use crate::http::v2::sessions::{ExtendBody, SnapshotRequest};
use crate::http::views::{self, Empty, RouteView, SessionView, SnapshotView};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(get))
        .routes(routes!(stop))
        .routes(routes!(extend_timeout))
        .routes(routes!(network_policy))
        .routes(routes!(snapshot))
        .routes(routes!(mkdir))
        .routes(routes!(write))
        .routes(routes!(read))
}

/// Answer with a sandbox and its routes.
#[derive(Debug, Serialize, ToSchema)]
struct V1SandboxAndRoutes {
    sandbox: SessionView,
    routes: Vec<RouteView>,
}

impl V1SandboxAndRoutes {
    fn new(session: &Session, routes: &[Route]) -> Self {
        Self { sandbox: SessionView::from(session), routes: views::routes(routes) }
    }
}

/// Answer with a sandbox.
#[derive(Debug, Serialize, ToSchema)]
struct V1Sandbox {
    sandbox: SessionView,
}

impl From<&Session> for V1Sandbox {
    fn from(session: &Session) -> Self {
        Self { sandbox: SessionView::from(session) }
    }
}

/// Answer with a page of sandboxes.
#[derive(Debug, Serialize, ToSchema)]
struct V1Sandboxes {
    sandboxes: Vec<SessionView>,
    pagination: TimePagination,
}

/// Answer to a snapshot.
#[derive(Debug, Serialize, ToSchema)]
struct V1SnapshotAndSandbox {
    snapshot: SnapshotView,
    sandbox: SessionView,
}

/// Make a sandbox of one run
#[utoipa::path(post, path = "/v1/sandboxes", tag = "v1", request_body = CreateBody,
    responses((status = 200, body = V1SandboxAndRoutes)))]
async fn create(
    State(app): State<App>,
    call: Call,
    JsonBody(body): JsonBody<CreateBody>,
) -> Result<Json<V1SandboxAndRoutes>, ApiError> {
    let namespace = call.namespace(body.project_id.as_deref())?;
    let mut spec = body.spec(call.idempotency_key.clone())?;
    (spec.ephemeral, spec.persistent) = (true, Some(false));
    let view = app.engine.create(&call.who, &namespace, spec).await?;
    Ok(Json(V1SandboxAndRoutes::new(&view.session, &view.routes)))
}

/// List runs, newest first
#[utoipa::path(get, path = "/v1/sandboxes", tag = "v1",
    params(("limit" = Option<u32>, Query), ("since" = Option<i64>, Query, description = "ms"),
        ("until" = Option<i64>, Query, description = "ms, exclusive")),
    responses((status = 200, body = V1Sandboxes)))]
async fn list(State(app): State<App>, call: Call) -> Result<Json<V1Sandboxes>, ApiError> {
    let (namespace, (limit, query)) = (call.namespace(None)?, page_query(&call)?);
    let mut page = app.engine.sessions(&call.who, &namespace, query).await?;
    let pagination = paginate(&mut page.items, limit, |s| s.created_at);
    let sandboxes = page.items.iter().map(SessionView::from).collect();
    Ok(Json(V1Sandboxes { sandboxes, pagination }))
}

/// Show a run
#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "v1",
    params(("id" = String, Path)), responses((status = 200, body = V1SandboxAndRoutes)))]
async fn get(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
) -> Result<Json<V1SandboxAndRoutes>, ApiError> {
    let view = app.engine.session(&call.who, &call.team()?, &session_id(&id)?).await?;
    Ok(Json(V1SandboxAndRoutes::new(&view.session, &view.routes)))
}

/// Stop a run; answers when it has ended
#[utoipa::path(post, path = "/v1/sandboxes/{id}/stop", tag = "v1",
    params(("id" = String, Path)), responses((status = 200, body = V1Sandbox)))]
async fn stop(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(_): JsonBody<Value>,
) -> Result<Json<V1Sandbox>, ApiError> {
    let stopped = app.engine.stop(&call.who, &call.team()?, &session_id(&id)?).await?;
    Ok(Json(V1Sandbox::from(&stopped.session)))
}

/// Give a run more time
#[utoipa::path(post, path = "/v1/sandboxes/{id}/extend-timeout", tag = "v1",
    params(("id" = String, Path)), request_body = ExtendBody,
    responses((status = 200, body = V1Sandbox)))]
async fn extend_timeout(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<ExtendBody>,
) -> Result<Json<V1Sandbox>, ApiError> {
    let (team, id, by) = (call.team()?, session_id(&id)?, body.checked()?);
    let session = app.engine.extend_timeout(&call.who, &team, &id, by).await?;
    Ok(Json(V1Sandbox::from(&session)))
}

/// Replace a run's network policy
#[utoipa::path(post, path = "/v1/sandboxes/{id}/network-policy", tag = "v1",
    params(("id" = String, Path)), request_body = Object,
    responses((status = 200, body = V1Sandbox)))]
async fn network_policy(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<Value>,
) -> Result<Json<V1Sandbox>, ApiError> {
    let (team, id, policy) = (call.team()?, session_id(&id)?, policy(&body)?);
    let session = app.engine.set_policy(&call.who, &team, &id, policy).await?;
    Ok(Json(V1Sandbox::from(&session)))
}

/// Keep a run's filesystem as a snapshot; the run stops
#[utoipa::path(post, path = "/v1/sandboxes/{id}/snapshot", tag = "v1",
    params(("id" = String, Path)), request_body = SnapshotRequest,
    responses((status = 201, body = V1SnapshotAndSandbox)))]
async fn snapshot(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<SnapshotRequest>,
) -> Result<(StatusCode, Json<V1SnapshotAndSandbox>), ApiError> {
    let (team, id, expiration) = (call.team()?, session_id(&id)?, body.checked()?);
    let (snapshot, session) = app.engine.snapshot(&call.who, &team, &id, expiration).await?;
    let snapshot = SnapshotView::from(&snapshot).v1();
    let sandbox = SessionView::from(&session);
    Ok((StatusCode::CREATED, Json(V1SnapshotAndSandbox { snapshot, sandbox })))
}

/// Make a folder
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fs/mkdir", tag = "v1",
    params(("id" = String, Path)), request_body = PathBody,
    responses((status = 200, body = Empty)))]
async fn mkdir(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<PathBody>,
) -> Result<Json<Empty>, ApiError> {
    make_folder(&app, &Target::new(&call, &id, true)?, &body).await
}

/// Write the files of a gzip tar
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fs/write", tag = "v1",
    params(("id" = String, Path),
        ("x-cwd" = Option<String>, Header, description = "absolute folder that names are below")),
    request_body(content = Vec<u8>, content_type = "application/gzip"),
    responses((status = 200, body = Empty)))]
async fn write(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    request: Request,
) -> Result<Json<Empty>, ApiError> {
    let target = Target::new(&call, &id, true)?;
    let cwd = archive_folder(&request)?;
    write_archive(&app, &target, cwd.as_deref(), request.into_body()).await
}

/// Read a file
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fs/read", tag = "v1",
    params(("id" = String, Path)), request_body = PathBody,
    responses((status = 200, body = Vec<u8>, content_type = "application/octet-stream")))]
async fn read(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<PathBody>,
) -> Result<Response, ApiError> {
    read_file(&app, &Target::new(&call, &id, true)?, &body).await
}
