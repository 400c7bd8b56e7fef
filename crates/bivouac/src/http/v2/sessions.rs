//! Sessions: list, get, stop, extend, policy, snapshot.

use axum::Extension;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use bivouac_engine::ListChildren;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::App;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::interactive;
use crate::http::requests::{expiration, policy};
use crate::http::scope::{Call, Seg, session_id};
use crate::http::stand_in::StandsIn;
use crate::http::views::{
    self, Pagination, RouteView, SandboxView, SessionBody, SessionView, SnapshotView,
};

/// Most items of a page.
pub(super) const MAX_LIMIT: u32 = 50;
/// Least time that a session can be given, ms.
const MIN_EXTENSION_MS: i64 = 1000;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(get))
        .routes(routes!(stop))
        .routes(routes!(extend_timeout))
        .routes(routes!(network_policy))
        .routes(routes!(snapshot))
        .routes(routes!(interactive))
}

/// Answer with a page of sessions.
#[derive(Debug, Serialize, ToSchema)]
struct SessionsBody {
    sessions: Vec<SessionView>,
    pagination: Pagination,
}

/// Answer with a session and its routes.
#[derive(Debug, Serialize, ToSchema)]
struct SessionAndRoutes {
    session: SessionView,
    routes: Vec<RouteView>,
}

/// Answer to a stop.
#[derive(Debug, Serialize, ToSchema)]
struct StoppedBody {
    session: SessionView,
    sandbox: SandboxView,
    /// The one that this stop took.
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<SnapshotView>,
}

/// Answer to a snapshot.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SnapshotAndSession {
    pub(crate) snapshot: SnapshotView,
    pub(crate) session: SessionView,
}

/// How much longer a session may live.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ExtendBody {
    /// ms, 1000 or more.
    duration: i64,
}

impl ExtendBody {
    pub(crate) fn checked(&self) -> Result<i64, ApiError> {
        if self.duration < MIN_EXTENSION_MS {
            let reason = format!("must be at least {MIN_EXTENSION_MS} ms, got {}", self.duration);
            return Err(ApiError::field("duration", reason));
        }
        Ok(self.duration)
    }
}

/// How long a snapshot is kept.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct SnapshotRequest {
    /// ms; 0 is never.
    expiration: Option<i64>,
}

impl SnapshotRequest {
    pub(crate) fn checked(&self) -> Result<Option<i64>, ApiError> {
        self.expiration.map(expiration).transpose()
    }
}

/// Reads the query of a list of sessions or snapshots.
pub(super) fn children(call: &Call) -> Result<ListChildren, ApiError> {
    Ok(ListChildren {
        sandbox_name: call.owned("name"),
        limit: call.limit(MAX_LIMIT)?,
        cursor: call.owned("cursor"),
        ascending: call.ascending()?,
        since: None,
        until: None,
        label: None,
    })
}

/// List sessions
#[utoipa::path(get, path = "/v2/sandboxes/sessions", tag = "sessions",
    params(("name" = Option<String>, Query, description = "of this sandbox only"),
        ("limit" = Option<u32>, Query), ("cursor" = Option<String>, Query),
        ("sortOrder" = Option<String>, Query)),
    responses((status = 200, body = SessionsBody)))]
async fn list(State(app): State<App>, call: Call) -> Result<Json<SessionsBody>, ApiError> {
    let (namespace, query) = (call.namespace(None)?, children(&call)?);
    let page = app.engine.sessions(&call.who, &namespace, query).await?;
    let sessions = page.items.iter().map(SessionView::from).collect();
    Ok(Json(SessionsBody { sessions, pagination: Pagination::of(&page) }))
}

/// Show a session
#[utoipa::path(get, path = "/v2/sandboxes/sessions/{id}", tag = "sessions",
    params(("id" = String, Path)), responses((status = 200, body = SessionAndRoutes)))]
async fn get(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
) -> Result<Json<SessionAndRoutes>, ApiError> {
    let view = app.engine.session(&call.who, &call.team()?, &session_id(&id)?).await?;
    let session = SessionView::from(&view.session).of(&view.sandbox);
    Ok(Json(SessionAndRoutes { session, routes: views::routes(&view.routes) }))
}

/// Stop a session; answers when it has ended and what is to be kept is kept
///
/// With `hook` = false what the sandbox wants run before is left out, or cut off.
#[utoipa::path(post, path = "/v2/sandboxes/sessions/{id}/stop", tag = "sessions",
    params(("id" = String, Path)), responses((status = 200, body = StoppedBody)))]
async fn stop(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<Value>,
) -> Result<Json<StoppedBody>, ApiError> {
    let (team, id) = (call.team()?, session_id(&id)?);
    let stopped = if body["hook"] == false {
        app.engine.stop_without_hook(&call.who, &team, &id).await?
    } else {
        app.engine.stop(&call.who, &team, &id).await?
    };
    Ok(Json(StoppedBody {
        session: SessionView::from(&stopped.session).of(&stopped.sandbox),
        sandbox: SandboxView::with_session(&stopped.sandbox, &stopped.session),
        snapshot: stopped.snapshot.as_ref().map(SnapshotView::from),
    }))
}

/// Give a session more time
#[utoipa::path(post, path = "/v2/sandboxes/sessions/{id}/extend-timeout", tag = "sessions",
    params(("id" = String, Path)), request_body = ExtendBody,
    responses((status = 200, body = SessionBody)))]
async fn extend_timeout(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<ExtendBody>,
) -> Result<Json<SessionBody>, ApiError> {
    let (team, id, by) = (call.team()?, session_id(&id)?, body.checked()?);
    let session = app.engine.extend_timeout(&call.who, &team, &id, by).await?;
    Ok(Json(SessionBody { session: SessionView::from(&session) }))
}

/// Replace a session's network policy; answers when it is in force and what it forbids is cut
///
/// Values of `transform` headers are sealed and never read back. They may name secrets of the engine:
/// `${secret:NAME}`.
#[utoipa::path(post, path = "/v2/sandboxes/sessions/{id}/network-policy", tag = "sessions",
    params(("id" = String, Path)), request_body = Object,
    responses((status = 200, body = SessionBody)))]
async fn network_policy(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<Value>,
) -> Result<Json<SessionBody>, ApiError> {
    let (team, id, policy) = (call.team()?, session_id(&id)?, policy(&body)?);
    let session = app.engine.set_policy(&call.who, &team, &id, policy).await?;
    Ok(Json(SessionBody { session: SessionView::from(&session) }))
}

/// Keep a session's filesystem as a snapshot; the session stops
#[utoipa::path(post, path = "/v2/sandboxes/sessions/{id}/snapshot", tag = "sessions",
    params(("id" = String, Path)), request_body = SnapshotRequest,
    responses((status = 201, body = SnapshotAndSession)))]
async fn snapshot(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<SnapshotRequest>,
) -> Result<(StatusCode, Json<SnapshotAndSession>), ApiError> {
    let (team, id, expiration) = (call.team()?, session_id(&id)?, body.checked()?);
    let (snapshot, session) = app.engine.snapshot(&call.who, &team, &id, expiration).await?;
    let (snapshot, session) = (SnapshotView::from(&snapshot), SessionView::from(&session));
    Ok((StatusCode::CREATED, Json(SnapshotAndSession { snapshot, session })))
}

/// Where a terminal is opened, and what is shown there.
#[derive(Debug, Serialize, ToSchema)]
struct InteractiveBody {
    /// Of a WebSocket.
    url: String,
    /// Goes into its query as `token`; for one connection, and for a minute.
    token: String,
}

/// Get leave to open a terminal over a WebSocket
#[utoipa::path(post, path = "/v2/sandboxes/sessions/{id}/interactive", tag = "sessions",
    params(("id" = String, Path)), responses((status = 200, body = InteractiveBody)))]
async fn interactive(
    State(app): State<App>,
    call: Call,
    stands_in: Option<Extension<StandsIn>>,
    Seg(id): Seg<String>,
) -> Result<Json<InteractiveBody>, ApiError> {
    let (team, id) = (call.team()?, session_id(&id)?);
    app.engine.may_open_terminal(&call.who, &team, &id).await?;
    let url = interactive::url(&app.engine, stands_in.is_some(), &id);
    let token = app.tickets.issue(call.who, team, id)?;
    Ok(Json(InteractiveBody { url, token }))
}
