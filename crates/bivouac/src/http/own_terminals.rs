//! Additions of ours about terminals: list, open, sit down at, hang up. Below `/api/bivouac/v1`.
//!
//! Invariant: a handler reads a request, makes one call of the engine and shows the result; what an attachment
//! is refused for is an answer of HTTP, before it becomes a WebSocket. Asked by `bivouac shell` and its relatives.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::http::StatusCode;
use axum::response::Response;
use bivouac_engine::{Attached, Cursor, NewTerminal, Principal, Since, Terminal};
use bivouac_types::terminal::TtySize;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::interactive::not_a_socket;
use super::scope::{Call, Seg, command_id, session_id};
use super::socket::{self, Dialect};
use super::views::CommandView;

/// Bytes of output that are shown again to a client that does not say how many.
const SCROLLBACK: u64 = 64 << 10;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list, open))
        .routes(routes!(hang_up))
        .routes(routes!(attach))
        .routes(routes!(attach_again))
}

/// A terminal.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TerminalView {
    name: String,
    session_id: String,
    /// How many clients are attached.
    attached: u32,
    /// What runs on it.
    command: CommandView,
}

impl From<&Terminal> for TerminalView {
    fn from(of: &Terminal) -> Self {
        Self {
            name: of.name.clone(),
            session_id: of.session.to_string(),
            attached: of.attached,
            command: CommandView::from(&of.command),
        }
    }
}

/// Terminals that run, oldest first.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TerminalsBody {
    terminals: Vec<TerminalView>,
}

/// Answer with one terminal.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TerminalBody {
    terminal: TerminalView,
}

impl From<&Terminal> for TerminalBody {
    fn from(of: &Terminal) -> Self {
        Self { terminal: TerminalView::from(of) }
    }
}

/// A terminal to be opened.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct OpenBody {
    /// Absent: `t1`, `t2` and so on; such a terminal goes with its last client.
    name: Option<String>,
    /// Absent: the user's login shell.
    command: Option<String>,
    #[serde(default)]
    args: Vec<String>,
    cwd: Option<String>,
    /// `TERM` is `xterm-256color` if it is not in here.
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    sudo: bool,
    /// Characters in a line; absent is 80.
    cols: Option<i64>,
    /// Lines; absent is 24.
    rows: Option<i64>,
}

impl OpenBody {
    fn spec(self) -> Result<NewTerminal, ApiError> {
        let default = TtySize::default();
        let size = TtySize::new(
            self.cols.unwrap_or_else(|| default.cols.into()),
            self.rows.unwrap_or_else(|| default.rows.into()),
        )?;
        let program = self.command.unwrap_or_default();
        let Self { name, args, cwd, env, sudo, .. } = self;
        Ok(NewTerminal { name, program, args, cwd, env, sudo, size })
    }
}

/// Terminals of a sandbox that run
#[utoipa::path(get, path = "/bivouac/v1/sandboxes/{name}/terminals", tag = "bivouac",
    params(("name" = String, Path)), responses((status = 200, body = TerminalsBody)))]
async fn list(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<TerminalsBody>, ApiError> {
    let found = app.engine.terminals(&call.who, &call.namespace(None)?, &name).await?;
    Ok(Json(TerminalsBody { terminals: found.iter().map(TerminalView::from).collect() }))
}

/// Open a terminal; a sandbox that has stopped is started
///
/// 409 `terminal_exists` when one of that name runs.
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/terminals", tag = "bivouac",
    params(("name" = String, Path)), request_body = OpenBody,
    responses((status = 201, body = TerminalBody)))]
async fn open(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<OpenBody>,
) -> Result<(StatusCode, Json<TerminalBody>), ApiError> {
    let (namespace, new) = (call.namespace(None)?, body.spec()?);
    let opened = app.engine.open_terminal(&call.who, &namespace, &name, new).await?;
    Ok((StatusCode::CREATED, Json(TerminalBody::from(&opened))))
}

/// Hang a terminal up: its program gets SIGHUP, and SIGKILL five seconds later
#[utoipa::path(delete, path = "/bivouac/v1/sandboxes/{name}/terminals/{terminal}", tag = "bivouac",
    params(("name" = String, Path), ("terminal" = String, Path)),
    responses((status = 200, body = TerminalBody)))]
async fn hang_up(
    State(app): State<App>,
    call: Call,
    Seg((name, terminal)): Seg<(String, String)>,
) -> Result<Json<TerminalBody>, ApiError> {
    let namespace = call.namespace(None)?;
    let left = app.engine.hang_up(&call.who, &namespace, &name, &terminal).await?;
    Ok(Json(TerminalBody::from(&left)))
}

/// Sit down at a terminal that runs, over a WebSocket
///
/// Binary frames are what is typed and what is shown. The client may send `{"type":"resize","cols","rows"}`. The
/// engine sends `attached` (terminal, session, command), `at` (a place in the output: what follows begins `skip`
/// bytes behind `at`), `cut` (output is missing from here), and at the end `exit` with `code` (null when it is not
/// known) and, if the program did not end by itself, `reason` and `reasonText`.
#[utoipa::path(get, path = "/bivouac/v1/sandboxes/{name}/terminals/{terminal}/attach", tag = "bivouac",
    params(("name" = String, Path), ("terminal" = String, Path),
        ("scrollback" = Option<u64>, Query, description = "bytes of output that are shown again")),
    responses((status = 101, description = "a WebSocket")))]
async fn attach(
    State(app): State<App>,
    call: Call,
    Seg((name, terminal)): Seg<(String, String)>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let (namespace, scrollback) = (call.namespace(None)?, whole(&call, "scrollback")?);
    let scrollback = scrollback.unwrap_or(SCROLLBACK);
    let upgrade = upgrade.map_err(|_| not_a_socket())?;
    let (who, engine) = (&call.who, &app.engine);
    let attached = engine.attach_terminal(who, &namespace, &name, &terminal, scrollback).await?;
    Ok(answer(app, call.who, upgrade, attached))
}

/// Sit down at a terminal by its ids, over a WebSocket, also at one that has ended
///
/// For clients that lost their connection: with `at` and `skip` the output goes on where they say they were.
#[utoipa::path(get, path = "/bivouac/v1/sessions/{session}/terminals/{command}/attach", tag = "bivouac",
    params(("session" = String, Path), ("command" = String, Path),
        ("scrollback" = Option<u64>, Query, description = "bytes of output that are shown again"),
        ("at" = Option<u64>, Query), ("skip" = Option<u64>, Query)),
    responses((status = 101, description = "a WebSocket")))]
async fn attach_again(
    State(app): State<App>,
    call: Call,
    Seg((session, command)): Seg<(String, String)>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let (session, command) = (session_id(&session)?, command_id(&command)?);
    let (scrollback, skip) = (whole(&call, "scrollback")?, whole(&call, "skip")?);
    let since = match whole(&call, "at")? {
        Some(at) => Since::Cursor(Cursor { at, skip: skip.unwrap_or(0) }),
        None => Since::Last(scrollback.unwrap_or(SCROLLBACK)),
    };
    let namespace = call.namespace(None)?;
    let upgrade = upgrade.map_err(|_| not_a_socket())?;
    let (who, engine) = (&call.who, &app.engine);
    let attached = engine.attach_again(who, &namespace, &session, &command, since).await?;
    Ok(answer(app, call.who, upgrade, attached))
}

fn answer(app: App, who: Principal, upgrade: WebSocketUpgrade, attached: Attached) -> Response {
    let carry = move |socket| socket::carry(app, who, socket, attached, Dialect::Own);
    socket::limited(upgrade).on_upgrade(carry)
}

/// A number that is not negative.
fn whole(call: &Call, name: &str) -> Result<Option<u64>, ApiError> {
    let Some(number) = call.number(name)? else { return Ok(None) };
    match u64::try_from(number) {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(ApiError::field(name, "must not be negative")),
    }
}
