//! Commands of `/v1`: a blocking run has no output in its stream; it is asked for afterwards.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::App;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::requests::CommandRequest;
use crate::http::runs::{self, Target};
use crate::http::scope::{Call, Seg, command_id};
use crate::http::v2::commands::KillBody;
use crate::http::views::CommandBody;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(start))
        .routes(routes!(get))
        .routes(routes!(logs))
        .routes(routes!(kill))
}

/// Start a command; with `wait` the answer is a stream of two JSON lines, its begin and its end
#[utoipa::path(post, path = "/v1/sandboxes/{id}/cmd", tag = "v1",
    params(("id" = String, Path)), request_body = CommandRequest,
    responses((status = 200, body = CommandBody,
        description = "with `wait`: application/x-ndjson")))]
async fn start(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<CommandRequest>,
) -> Result<Response, ApiError> {
    let target = Target::new(&call, &id, true)?;
    runs::start(&app, &call, target, body).await
}

/// Show a command; with `wait=true` once it has ended
#[utoipa::path(get, path = "/v1/sandboxes/{id}/cmd/{cmd}", tag = "v1",
    params(("id" = String, Path), ("cmd" = String, Path), ("wait" = Option<bool>, Query)),
    responses((status = 200, body = CommandBody)))]
async fn get(
    State(app): State<App>,
    call: Call,
    Seg((id, cmd)): Seg<(String, String)>,
) -> Result<Response, ApiError> {
    let target = Target::new(&call, &id, true)?;
    runs::get(&app, &call, target, command_id(&cmd)?).await
}

/// A command's output from its start until its end, as JSON lines
#[utoipa::path(get, path = "/v1/sandboxes/{id}/cmd/{cmd}/logs", tag = "v1",
    params(("id" = String, Path), ("cmd" = String, Path)),
    responses((status = 200, body = String, content_type = "application/x-ndjson")))]
async fn logs(
    State(app): State<App>,
    call: Call,
    Seg((id, cmd)): Seg<(String, String)>,
) -> Result<Response, ApiError> {
    let target = Target::new(&call, &id, true)?;
    runs::logs(&app, &call, &target, &command_id(&cmd)?).await
}

/// Send a signal to a command's process group. The path has no `cmd` segment
#[utoipa::path(post, path = "/v1/sandboxes/{id}/{cmd}/kill", tag = "v1",
    params(("id" = String, Path), ("cmd" = String, Path)), request_body = KillBody,
    responses((status = 200, body = CommandBody)))]
async fn kill(
    State(app): State<App>,
    call: Call,
    Seg((id, cmd)): Seg<(String, String)>,
    JsonBody(body): JsonBody<KillBody>,
) -> Result<Json<CommandBody>, ApiError> {
    let target = Target::new(&call, &id, true)?;
    let (cmd, signal) = (command_id(&cmd)?, body.checked()?);
    let Target { who, team, session, .. } = &target;
    let command = app.engine.kill_command(who, team, session, &cmd, signal).await?;
    Ok(Json(target.view(&command)))
}
