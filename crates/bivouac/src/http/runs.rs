//! Starting, following and awaiting commands, for `/v1` and `/v2` alike.
//!
//! Invariant: once a command has started, the answer is a success: what goes wrong later is told
//! inside of the stream, because clients repeat a request that was answered by a 5xx.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use bivouac_engine::{Engine, Error, Output, Principal};
use bivouac_types::command::Command;
use bivouac_types::id::{CommandId, SessionId};
use futures_util::stream;

use super::App;
use super::error::ApiError;
use super::ndjson::{self, Encoding, Frame, Source};
use super::requests::CommandRequest;
use super::scope::Call;
use super::views::{CommandBody, CommandView};

/// Whose command, in whose words.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) who: Principal,
    pub(crate) team: String,
    pub(crate) session: SessionId,
    /// Fields are called as in `/v1`.
    pub(crate) v1: bool,
}

impl Target {
    pub(crate) fn new(call: &Call, session: &str, v1: bool) -> Result<Self, ApiError> {
        let session = super::scope::session_id(session)?;
        Ok(Self { who: call.who.clone(), team: call.team()?, session, v1 })
    }

    pub(crate) fn view(&self, command: &Command) -> CommandBody {
        let view = CommandView::from(command);
        CommandBody { command: if self.v1 { view.v1() } else { view } }
    }

    fn begun(&self, command: &Command) -> CommandView {
        let view = CommandView::begun(command);
        if self.v1 { view.v1() } else { view }
    }
}

/// `encoding` of the query: text unless `base64`.
pub(crate) fn encoding(call: &Call) -> Result<Encoding, ApiError> {
    match call.text("encoding") {
        None | Some("utf-8" | "utf8" | "text") => Ok(Encoding::Text),
        Some("base64") => Ok(Encoding::Base64),
        Some(_) => Err(ApiError::field("encoding", "must be 'text' or 'base64'")),
    }
}

/// Starts a command; with `wait` the answer is a stream that ends with it.
pub(crate) async fn start(
    app: &App,
    call: &Call,
    target: Target,
    body: CommandRequest,
) -> Result<Response, ApiError> {
    // The Python client says it in the query as well.
    let wait = body.wait.unwrap_or(false) || call.flag("wait")?;
    let logs = body.logs.unwrap_or(false) || call.flag("logs")?;
    let encoding = encoding(call)?;
    let (key, spec) = (call.idempotency_key.clone(), body.spec()?);
    let Target { who, team, session, .. } = &target;
    let command = app.engine.start_command(who, team, session, spec, key).await?;
    if !wait {
        return Ok(Json(target.view(&command)).into_response());
    }
    let frame = Frame::Run { begun: Box::new(target.begun(&command)), v1: target.v1 };
    let source = if logs {
        output(app.engine.follow(who, team, session, &command.id).await)
    } else {
        end(Arc::clone(&app.engine), target, command.id)
    };
    Ok(ndjson::respond(source, frame, encoding))
}

/// The log of a command, from its start until its end.
pub(crate) async fn logs(
    app: &App,
    call: &Call,
    target: &Target,
    command: &CommandId,
) -> Result<Response, ApiError> {
    let encoding = encoding(call)?;
    let Target { who, team, session, .. } = target;
    let follow = app.engine.follow(who, team, session, command).await?;
    Ok(ndjson::respond(output(Ok(follow)), Frame::Log, encoding))
}

/// A command's record; with `wait` once it has ended.
pub(crate) async fn get(
    app: &App,
    call: &Call,
    target: Target,
    id: CommandId,
) -> Result<Response, ApiError> {
    let Target { who, team, session, .. } = &target;
    // First of all a question that fails with a proper status.
    let command = app.engine.command(who, team, session, &id).await?;
    if command.end.is_some() || !call.flag("wait")? {
        return Ok(Json(target.view(&command)).into_response());
    }
    let engine = Arc::clone(&app.engine);
    Ok(ndjson::late_json(async move {
        let Target { who, team, session, .. } = &target;
        let command = engine.wait_command(who, team, session, &id).await?;
        Ok(target.view(&command))
    }))
}

fn output(follow: Result<bivouac_engine::Follow, Error>) -> Source {
    match follow {
        Ok(follow) => Box::pin(stream::unfold(follow, |mut follow| async move {
            follow.next().await.map(|item| (item, follow))
        })),
        Err(error) => Box::pin(stream::once(async { Err(error) })),
    }
}

fn end(engine: Arc<Engine>, target: Target, id: CommandId) -> Source {
    Box::pin(stream::once(async move {
        let Target { who, team, session, .. } = &target;
        let command = engine.wait_command(who, team, session, &id).await?;
        Ok(Output::End(Box::new(command)))
    }))
}
