//! Sandboxes: create, get, list, update, delete, fork.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use bivouac_engine::{CreateSandbox, ListSandboxes, Page, SortBy, View};
use bivouac_types::sandbox::Sandbox;
use bivouac_types::session::SessionStatus;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::App;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::requests::{CreateBody, ForkBody, UpdateBody};
use crate::http::scope::{Call, Seg};
use crate::http::views::{self, Pagination, RouteView, SandboxView, ViewBody};

/// Most items of a page.
const MAX_LIMIT: u32 = 50;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(create_v3))
        .routes(routes!(create_v4))
        .routes(routes!(get, update, delete))
        .routes(routes!(fork))
}

/// Answer with a page of sandboxes.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SandboxesBody {
    sandboxes: Vec<SandboxView>,
    pagination: Pagination,
}

impl SandboxesBody {
    pub(crate) fn new(page: &Page<Sandbox>, view: impl Fn(&Sandbox) -> SandboxView) -> Self {
        let sandboxes = page.items.iter().map(view).collect();
        Self { sandboxes, pagination: Pagination::of(page) }
    }
}

/// Answer with a sandbox alone.
#[derive(Debug, Serialize, ToSchema)]
struct SandboxBody {
    sandbox: SandboxView,
}

/// Answer to an update.
#[derive(Debug, Serialize, ToSchema)]
struct UpdatedBody {
    sandbox: SandboxView,
    routes: Vec<RouteView>,
}

/// Shows a new sandbox, with the port that the official command line insists on.
fn created(view: &View, interactive: bool) -> (StatusCode, Json<ViewBody>) {
    let mut body = ViewBody::from(view);
    if interactive {
        body.session = body.session.interactive();
    }
    (StatusCode::OK, Json(body))
}

async fn make(
    app: &App,
    call: &Call,
    body: CreateBody,
) -> Result<(StatusCode, Json<ViewBody>), ApiError> {
    let namespace = call.namespace(body.project_id.as_deref())?;
    let interactive = body.wants_interactive();
    let spec: CreateSandbox = body.spec(call.idempotency_key.clone())?;
    let view = app.engine.create(&call.who, &namespace, spec).await?;
    Ok(created(&view, interactive))
}

/// Make a sandbox and start its first session
///
/// `runtime` defaults to the runtime of the engine's default image.
#[utoipa::path(post, path = "/v2/sandboxes", tag = "sandboxes", request_body = CreateBody,
    responses((status = 200, body = ViewBody)))]
async fn create(
    State(app): State<App>,
    call: Call,
    JsonBody(body): JsonBody<CreateBody>,
) -> Result<(StatusCode, Json<ViewBody>), ApiError> {
    make(&app, &call, body).await
}

/// Make a sandbox from an image and start its first session
#[utoipa::path(post, path = "/v3/sandboxes", tag = "sandboxes", request_body = CreateBody,
    responses((status = 200, body = ViewBody)))]
async fn create_v3(
    State(app): State<App>,
    call: Call,
    JsonBody(body): JsonBody<CreateBody>,
) -> Result<(StatusCode, Json<ViewBody>), ApiError> {
    make(&app, &call, body).await
}

/// The same as `/v3/sandboxes`
#[utoipa::path(post, path = "/v4/sandboxes", tag = "sandboxes", request_body = CreateBody,
    responses((status = 200, body = ViewBody)))]
async fn create_v4(
    State(app): State<App>,
    call: Call,
    JsonBody(body): JsonBody<CreateBody>,
) -> Result<(StatusCode, Json<ViewBody>), ApiError> {
    make(&app, &call, body).await
}

/// Show a sandbox; with `resume=true` start a session if none runs
#[utoipa::path(get, path = "/v2/sandboxes/{name}", tag = "sandboxes",
    params(("name" = String, Path), ("resume" = Option<bool>, Query)),
    responses((status = 200, body = ViewBody)))]
async fn get(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<ViewBody>, ApiError> {
    let (namespace, resume) = (call.namespace(None)?, call.flag("resume")?);
    let view = app.engine.get(&call.who, &namespace, &name, resume).await?;
    Ok(Json(ViewBody::from(&view)))
}

/// Reads the query of a list of sandboxes.
pub(crate) fn list_query(call: &Call) -> Result<ListSandboxes, ApiError> {
    let sort_by = match call.text("sortBy") {
        None | Some("createdAt") => SortBy::CreatedAt,
        Some("name") => SortBy::Name,
        Some("statusUpdatedAt") => SortBy::StatusUpdatedAt,
        Some("currentSnapshotId") => SortBy::CurrentSnapshotId,
        Some(_) => {
            let reason = "must be createdAt, name, statusUpdatedAt or currentSnapshotId";
            return Err(ApiError::field("sortBy", reason));
        }
    };
    if call.text("namePrefix").is_some() && sort_by != SortBy::Name {
        return Err(ApiError::field("namePrefix", "needs sortBy=name"));
    }
    let tag = match call.text("tags").map(|text| text.split_once(':')) {
        None => None,
        Some(Some((key, value))) => Some((key.to_owned(), value.to_owned())),
        Some(None) => return Err(ApiError::field("tags", "must be key:value")),
    };
    Ok(ListSandboxes {
        limit: call.limit(MAX_LIMIT)?,
        cursor: call.owned("cursor"),
        sort_by,
        ascending: call.ascending()?,
        name_prefix: call.owned("namePrefix"),
        tag,
        all_namespaces: false,
    })
}

/// Shows one of a list, with the end of its running session's time.
pub(crate) fn listed(app: &App, sandbox: &Sandbox) -> SandboxView {
    let running = sandbox.status == SessionStatus::Running;
    let deadline = running.then(|| app.engine.deadline(&sandbox.current_session_id)).flatten();
    let paused_at = running.then(|| app.engine.paused_at(&sandbox.current_session_id)).flatten();
    SandboxView::listed(sandbox, deadline, paused_at)
}

/// List sandboxes
#[utoipa::path(get, path = "/v2/sandboxes", tag = "sandboxes",
    params(("limit" = Option<u32>, Query, description = "1 to 50, 20 by default"),
        ("cursor" = Option<String>, Query), ("sortBy" = Option<String>, Query),
        ("sortOrder" = Option<String>, Query), ("namePrefix" = Option<String>, Query),
        ("tags" = Option<String>, Query, description = "one label, key:value")),
    responses((status = 200, body = SandboxesBody)))]
async fn list(State(app): State<App>, call: Call) -> Result<Json<SandboxesBody>, ApiError> {
    let (namespace, query) = (call.namespace(None)?, list_query(&call)?);
    let page = app.engine.list(&call.who, &namespace, query).await?;
    Ok(Json(SandboxesBody::new(&page, |sandbox| listed(&app, sandbox))))
}

/// Change a sandbox; its next session is started with the changes
#[utoipa::path(patch, path = "/v2/sandboxes/{name}", tag = "sandboxes",
    params(("name" = String, Path)), request_body = UpdateBody,
    responses((status = 200, body = UpdatedBody)))]
async fn update(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<UpdateBody>,
) -> Result<Json<UpdatedBody>, ApiError> {
    let (namespace, change) = (call.namespace(None)?, body.change()?);
    let view = app.engine.update(&call.who, &namespace, &name, change).await?;
    let sandbox = SandboxView::with_session(&view.sandbox, &view.session);
    Ok(Json(UpdatedBody { sandbox, routes: views::routes(&view.routes) }))
}

/// Delete a sandbox; a running session is stopped first
#[utoipa::path(delete, path = "/v2/sandboxes/{name}", tag = "sandboxes",
    params(("name" = String, Path), ("deleteOrphanSnapshots" = Option<bool>, Query)),
    responses((status = 200, body = SandboxBody)))]
async fn delete(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<SandboxBody>, ApiError> {
    let (namespace, orphans) = (call.namespace(None)?, call.flag("deleteOrphanSnapshots")?);
    let sandbox = app.engine.delete(&call.who, &namespace, &name, orphans).await?;
    Ok(Json(SandboxBody { sandbox: SandboxView::from(&sandbox) }))
}

/// Make a sandbox that starts as a copy of another
#[utoipa::path(post, path = "/v2/sandboxes/{name}/fork", tag = "sandboxes",
    params(("name" = String, Path, description = "the source")), request_body = ForkBody,
    responses((status = 200, body = ViewBody)))]
async fn fork(
    State(app): State<App>,
    call: Call,
    Seg(source): Seg<String>,
    JsonBody(body): JsonBody<ForkBody>,
) -> Result<(StatusCode, Json<ViewBody>), ApiError> {
    let namespace = call.namespace(None)?;
    let interactive = body.wants_interactive();
    let spec = body.spec(call.idempotency_key.clone())?;
    let view = app.engine.fork(&call.who, &namespace, &source, spec).await?;
    Ok(created(&view, interactive))
}
