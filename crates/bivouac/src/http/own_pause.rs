//! Additions of ours about how long a sandbox lives: pause and resume with memory, keep-alive, and the shapes
//! of its rules, which are fields of create, update and fork. Below `/api/bivouac/v1`.
//!
//! Invariant: a handler reads a request, makes one call of the engine and shows the result; a rule that is not
//! told stays as it is. Asked by `bivouac pause`, `resume`, `keep-alive`, `create` and `set`.

use axum::Json;
use axum::extract::State;
use bivouac_engine::{Clock as _, Paused, SystemClock};
use bivouac_types::life::{DEFAULT_HOOK_MS, Hook, Life, LifeChange, Restart, Restarts};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::requests::nullable;
use super::scope::{Call, Seg};
use super::views::SessionView;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(pause)).routes(routes!(unpause)).routes(routes!(keep_alive))
}

/// A command that the engine runs by itself.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct HookBody {
    /// For `sh -c`.
    command: String,
    /// How long it may take, ms; 30000 by default.
    timeout_ms: Option<u64>,
}

/// Rules for the life of a sandbox: absent fields stay as they are, null clears.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct LifeBody {
    /// Stopped after so long without activity, ms.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<i64>)]
    idle_stop_ms: Option<Option<i64>>,
    /// Paused then, not stopped.
    idle_pause: Option<bool>,
    /// `no` or `unless-stopped`: whether a session that was lost is started again.
    #[schema(value_type = Option<String>)]
    restart: Option<Restart>,
    /// Whether a request to one of its ports, or an SSH connection, starts it.
    wake: Option<bool>,
    /// Runs inside before a session ends.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<HookBody>)]
    pre_stop: Option<Option<HookBody>>,
}

impl From<LifeBody> for LifeChange {
    fn from(body: LifeBody) -> Self {
        let hook = |h: HookBody| Hook {
            command: h.command,
            timeout_ms: h.timeout_ms.unwrap_or(DEFAULT_HOOK_MS),
        };
        Self {
            idle_stop_ms: body.idle_stop_ms,
            idle_pause: body.idle_pause,
            restart: body.restart,
            wake: body.wake,
            pre_stop: body.pre_stop.map(|given| given.map(hook)),
        }
    }
}

/// A command that the engine runs by itself.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HookView {
    command: String,
    timeout_ms: u64,
}

/// Rules for the life of a sandbox.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LifeView {
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_stop_ms: Option<i64>,
    idle_pause: bool,
    /// `no` or `unless-stopped`.
    #[schema(value_type = String)]
    restart: Restart,
    wake: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pre_stop: Option<HookView>,
}

impl LifeView {
    /// `None`: it has no rules.
    pub(crate) fn of(life: &Life) -> Option<Self> {
        let hook = |h: &Hook| HookView { command: h.command.clone(), timeout_ms: h.timeout_ms };
        (*life != Life::default()).then(|| Self {
            idle_stop_ms: life.idle_stop_ms,
            idle_pause: life.idle_pause,
            restart: life.restart,
            wake: life.wake,
            pre_stop: life.pre_stop.as_ref().map(hook),
        })
    }
}

/// What the restart policy of a sandbox has done.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RestartsView {
    /// How often it was started again.
    total: u64,
    /// The last ones in a row that did not last.
    in_a_row: u32,
    /// When the last one was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_at: Option<i64>,
    /// There were too many in a row: it stays as it is until somebody starts it.
    gave_up: bool,
}

impl RestartsView {
    /// `None`: it has done nothing.
    pub(crate) fn of(restarts: &Restarts) -> Option<Self> {
        (restarts.total > 0).then(|| Self {
            total: restarts.total,
            in_a_row: restarts.in_a_row,
            last_at: restarts.last_at,
            gave_up: restarts.gave_up(),
        })
    }
}

/// How a sandbox is to be paused.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PauseBody {
    /// Its memory is moved to swap as well.
    #[serde(default)]
    deep: bool,
}

/// Answer to a pause, or to the end of one.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PausedBody {
    /// The sandbox's name.
    sandbox: String,
    session: SessionView,
    /// Bytes of its memory that this call moved to swap.
    #[serde(skip_serializing_if = "Option::is_none")]
    paged_out_bytes: Option<u64>,
}

impl From<Paused> for PausedBody {
    fn from(of: Paused) -> Self {
        Self {
            sandbox: of.session.sandbox_name.clone(),
            session: SessionView::from(&of.session),
            paged_out_bytes: of.paged_out,
        }
    }
}

/// Have a running sandbox stand still, with its memory; that time does not count
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/pause", tag = "bivouac",
    params(("name" = String, Path)), request_body = PauseBody,
    responses((status = 200, body = PausedBody)))]
async fn pause(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<PauseBody>,
) -> Result<Json<PausedBody>, ApiError> {
    let namespace = call.namespace(None)?;
    Ok(Json(app.engine.pause(&call.who, &namespace, &name, body.deep).await?.into()))
}

/// Nothing to say.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct UnpauseBody {}

/// Let a paused sandbox go on where it stood
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/unpause", tag = "bivouac",
    params(("name" = String, Path)), request_body = UnpauseBody,
    responses((status = 200, body = PausedBody)))]
async fn unpause(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(UnpauseBody {}): JsonBody<UnpauseBody>,
) -> Result<Json<PausedBody>, ApiError> {
    let namespace = call.namespace(None)?;
    Ok(Json(app.engine.unpause(&call.who, &namespace, &name).await?.into()))
}

/// For how long a sandbox is to count as in use.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct KeepAliveBody {
    /// ms from now on; absent: as long as a session of it may live.
    duration_ms: Option<i64>,
}

/// Answer to a keep-alive.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeptBody {
    /// The sandbox's name.
    sandbox: String,
    session: SessionView,
    /// When its time is over now. An idle rule may end it before, and moves this on while it is in use.
    expires_at: i64,
}

/// Count as use of a running sandbox, and give it time
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/keep-alive", tag = "bivouac",
    params(("name" = String, Path)), request_body = KeepAliveBody,
    responses((status = 200, body = KeptBody)))]
async fn keep_alive(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<KeepAliveBody>,
) -> Result<Json<KeptBody>, ApiError> {
    let namespace = call.namespace(None)?;
    let session = app.engine.keep_alive(&call.who, &namespace, &name, body.duration_ms).await?;
    let expires_at = session.deadline_at(SystemClock.now());
    Ok(Json(KeptBody { sandbox: name, session: SessionView::from(&session), expires_at }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_not_told_stays_and_null_clears() {
        let read = |value| LifeChange::from(serde_json::from_value::<LifeBody>(value).unwrap());
        assert_eq!(read(json!({})), LifeChange::default());
        let all = read(json!({ "idleStopMs": 60_000, "restart": "unless-stopped", "wake": true,
            "preStop": { "command": "sync" } }));
        let mut life = Life::default();
        all.apply(&mut life);
        assert_eq!((life.idle_stop_ms, life.restart), (Some(60_000), Restart::UnlessStopped));
        assert_eq!(life.pre_stop.as_ref().map(|h| h.timeout_ms), Some(DEFAULT_HOOK_MS));
        let shown = serde_json::to_value(LifeView::of(&life)).unwrap();
        assert_eq!(shown["preStop"]["command"], "sync");
        read(json!({ "idleStopMs": null, "preStop": null, "restart": "no", "wake": false }))
            .apply(&mut life);
        assert_eq!(life, Life::default());
        assert!(LifeView::of(&life).is_none());
        assert!(serde_json::from_value::<LifeBody>(json!({ "idle": 1 })).is_err());
        assert!(serde_json::from_value::<LifeBody>(json!({ "restart": "always" })).is_err());
    }
}
