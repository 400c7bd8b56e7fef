//! Commands: start, list, get, kill, logs, standard input.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::App;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::requests::CommandRequest;
use crate::http::runs::{self, Target};
use crate::http::scope::{Call, Seg, command_id};
use crate::http::views::{CommandBody, CommandView};

/// The signal of a kill that names none.
const SIGTERM: i32 = 15;
/// The highest signal.
const MAX_SIGNAL: i32 = 64;
/// Most bytes of one write to standard input.
const MAX_STDIN: usize = 1024 * 1024;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(start, list))
        .routes(routes!(get))
        .routes(routes!(kill))
        .routes(routes!(logs))
        .routes(routes!(stdin))
}

/// Answer with a session's commands.
#[derive(Debug, Serialize, ToSchema)]
struct CommandsBody {
    commands: Vec<CommandView>,
}

/// Which signal.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct KillBody {
    /// 1 to 64; SIGTERM (15) by default.
    signal: Option<i32>,
}

impl KillBody {
    pub(crate) fn checked(&self) -> Result<i32, ApiError> {
        let signal = self.signal.unwrap_or(SIGTERM);
        if (1..=MAX_SIGNAL).contains(&signal) {
            return Ok(signal);
        }
        Err(ApiError::field("signal", format!("must be 1 to {MAX_SIGNAL}, got {signal}")))
    }
}

/// Bytes for a command's standard input. Without any field: a probe.
#[derive(Debug, Deserialize, ToSchema)]
struct StdinBody {
    /// Base64, at most 1 MiB of bytes.
    data: Option<String>,
    /// Position of the first byte of `data` in all that was ever written.
    offset: Option<u64>,
    /// End the input after these bytes.
    close: Option<bool>,
}

/// Answer to a write to standard input.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct StdinWritten {
    command: CommandView,
    /// Bytes of the whole input received since the command's start: the next call's `offset`.
    bytes_written: u64,
}

/// Start a command; with `wait` the answer is a stream of JSON lines that ends with it
#[utoipa::path(post, path = "/v2/sandboxes/sessions/{id}/cmd", tag = "commands",
    params(("id" = String, Path), ("wait" = Option<bool>, Query), ("logs" = Option<bool>, Query),
        ("encoding" = Option<String>, Query, description = "of output: text or base64")),
    request_body = CommandRequest,
    responses((status = 200, body = CommandBody,
        description = "with `wait`: application/x-ndjson")))]
async fn start(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<CommandRequest>,
) -> Result<Response, ApiError> {
    let target = Target::new(&call, &id, false)?;
    runs::start(&app, &call, target, body).await
}

/// List a session's commands, newest first
#[utoipa::path(get, path = "/v2/sandboxes/sessions/{id}/cmd", tag = "commands",
    params(("id" = String, Path)), responses((status = 200, body = CommandsBody)))]
async fn list(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
) -> Result<Json<CommandsBody>, ApiError> {
    let Target { who, team, session, .. } = Target::new(&call, &id, false)?;
    let commands = app.engine.commands(&who, &team, &session).await?;
    Ok(Json(CommandsBody { commands: commands.iter().map(CommandView::from).collect() }))
}

/// Show a command; with `wait=true` once it has ended
#[utoipa::path(get, path = "/v2/sandboxes/sessions/{id}/cmd/{cmd}", tag = "commands",
    params(("id" = String, Path), ("cmd" = String, Path), ("wait" = Option<bool>, Query)),
    responses((status = 200, body = CommandBody)))]
async fn get(
    State(app): State<App>,
    call: Call,
    Seg((id, cmd)): Seg<(String, String)>,
) -> Result<Response, ApiError> {
    let target = Target::new(&call, &id, false)?;
    runs::get(&app, &call, target, command_id(&cmd)?).await
}

/// Send a signal to a command's process group
#[utoipa::path(post, path = "/v2/sandboxes/sessions/{id}/cmd/{cmd}/kill", tag = "commands",
    params(("id" = String, Path), ("cmd" = String, Path)), request_body = KillBody,
    responses((status = 200, body = CommandBody)))]
async fn kill(
    State(app): State<App>,
    call: Call,
    Seg((id, cmd)): Seg<(String, String)>,
    JsonBody(body): JsonBody<KillBody>,
) -> Result<Json<CommandBody>, ApiError> {
    let target = Target::new(&call, &id, false)?;
    let (cmd, signal) = (command_id(&cmd)?, body.checked()?);
    let Target { who, team, session, .. } = &target;
    let command = app.engine.kill_command(who, team, session, &cmd, signal).await?;
    Ok(Json(target.view(&command)))
}

/// A command's output from its start until its end, as JSON lines
#[utoipa::path(get, path = "/v2/sandboxes/sessions/{id}/cmd/{cmd}/logs", tag = "commands",
    params(("id" = String, Path), ("cmd" = String, Path),
        ("encoding" = Option<String>, Query, description = "of output: text or base64")),
    responses((status = 200, body = String, content_type = "application/x-ndjson")))]
async fn logs(
    State(app): State<App>,
    call: Call,
    Seg((id, cmd)): Seg<(String, String)>,
) -> Result<Response, ApiError> {
    let target = Target::new(&call, &id, false)?;
    runs::logs(&app, &call, &target, &command_id(&cmd)?).await
}

/// Write to a command's standard input
#[utoipa::path(post, path = "/v2/sandboxes/sessions/{id}/cmd/{cmd}/stdin", tag = "commands",
    params(("id" = String, Path), ("cmd" = String, Path)), request_body = StdinBody,
    responses((status = 200, body = StdinWritten)))]
async fn stdin(
    State(app): State<App>,
    call: Call,
    Seg((id, cmd)): Seg<(String, String)>,
    JsonBody(body): JsonBody<StdinBody>,
) -> Result<Json<StdinWritten>, ApiError> {
    let Target { who, team, session, .. } = Target::new(&call, &id, false)?;
    let cmd = command_id(&cmd)?;
    let (offset, close) = (body.offset, body.close.unwrap_or(false));
    let data = body.data.map_or(Ok(Bytes::new()), |text| decode(&text))?;
    let engine = &app.engine;
    let (command, bytes_written) =
        engine.write_stdin(&who, &team, &session, &cmd, offset, data, close).await?;
    Ok(Json(StdinWritten { command: CommandView::from(&command), bytes_written }))
}

fn decode(text: &str) -> Result<Bytes, ApiError> {
    let Ok(bytes) = STANDARD.decode(text) else {
        return Err(ApiError::field("data", "is not base64"));
    };
    if bytes.len() > MAX_STDIN {
        let reason = format!("at most {MAX_STDIN} bytes in one write, got {}", bytes.len());
        return Err(ApiError::field("data", reason));
    }
    Ok(bytes.into())
}
