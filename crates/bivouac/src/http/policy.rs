//! Additions of ours about egress: a sandbox's policy as a whole, what it does to a request, what a run
//! needs, and the audit lines of what was decided.
//!
//! Invariant: no header value is ever answered; a change is answered when the running session's broker
//! has it. Asked by `bivouac policy`.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bivouac_engine::{AuditLog, AuditQuery, Explained, Learned, PolicyEdit, PolicyState, Target};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::ndjson::{KEEP_ALIVE, json_line};
use super::requests::draft;
use super::scope::{Call, Seg, session_id};

/// How often an open session's stream says that it is still there.
const BEAT: Duration = Duration::from_secs(5);
/// Most entries of one edit.
const MAX_TARGETS: usize = 100;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(show, replace, edit))
        .routes(routes!(explain))
        .routes(routes!(learn, learned))
        .routes(routes!(log))
}

/// A sandbox's policy.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct PolicyBody {
    /// The sandbox's name.
    sandbox: String,
    /// `allow-all`, `deny-all` or `custom`.
    mode: &'static str,
    /// As a request would write it, header values hidden: in force in the running session, else what the
    /// next session starts with.
    #[schema(value_type = Object)]
    policy: Value,
    /// What the next session starts with, where that is something else.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    next: Option<Value>,
    /// The running session.
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<String>,
    /// Grows with each change of the running session's policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<u64>,
    /// The session is open because somebody learns what it needs.
    learning: bool,
    /// This call changed something.
    changed: bool,
    /// Flows that this call cut.
    cut: u64,
}

impl PolicyBody {
    fn new(name: String, state: PolicyState) -> Self {
        use bivouac_types::policy::NetworkPolicy;
        let mode = match state.policy {
            NetworkPolicy::AllowAll => "allow-all",
            NetworkPolicy::DenyAll => "deny-all",
            NetworkPolicy::Custom(_) => "custom",
        };
        let (session, generation) = state.running.map(|(id, n)| (id.to_string(), n)).unzip();
        Self {
            sandbox: name,
            mode,
            next: (state.next != state.policy).then(|| state.next.request_form()),
            policy: state.policy.request_form(),
            session,
            generation,
            learning: state.learning,
            changed: state.changed,
            cut: state.cut,
        }
    }
}

/// Entries to add to a policy or to take out of it.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct EditBody {
    /// Hosts (`HOST`, `*.HOST`, `HOST:PORT`) and ranges (`ADDRESS`, `ADDRESS/BITS`).
    #[serde(default)]
    allow: Vec<String>,
    /// The same, not to be reached any more.
    #[serde(default)]
    deny: Vec<String>,
}

impl EditBody {
    fn checked(&self) -> Result<PolicyEdit, ApiError> {
        Ok(PolicyEdit { allow: targets("allow", &self.allow)?, deny: targets("deny", &self.deny)? })
    }
}

fn targets(field: &str, texts: &[String]) -> Result<Vec<Target>, ApiError> {
    if texts.len() > MAX_TARGETS {
        return Err(ApiError::field(field, format!("at most {MAX_TARGETS} entries")));
    }
    let read = |(i, text): (usize, &String)| {
        Target::parse(text).map_err(|why| ApiError::field(&format!("{field}[{i}]"), why))
    };
    texts.iter().enumerate().map(read).collect()
}

/// A request that might be made.
#[derive(Debug, Deserialize, ToSchema)]
struct ExplainRequest {
    url: String,
    /// `GET` when absent.
    method: Option<String>,
}

/// What would happen to a request.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct ExplainBody {
    url: String,
    method: String,
    /// Whether it would leave the sandbox.
    allowed: bool,
    /// The word for it, as in audit lines.
    reason: String,
    /// Entry of the policy that decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    entry: Option<String>,
    /// Rule of that entry, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<usize>,
    /// What is done to it, in words.
    handling: String,
    /// Arguments of `bivouac policy` that would allow it.
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

impl ExplainBody {
    fn new(url: String, method: String, of: Explained) -> Self {
        let Explained { allowed, reason, entry, rule, handling, hint } = of;
        Self { url, method, allowed, reason: reason.as_str(), entry, rule, handling, hint }
    }
}

/// What a run needs.
#[derive(Debug, Serialize, ToSchema)]
struct LearnedBody {
    /// The smallest policy that allows what was reached, as a request would write it.
    #[schema(value_type = Object)]
    policy: Value,
    /// What that policy cannot say, or what should be looked at.
    notes: Vec<String>,
}

impl From<Learned> for LearnedBody {
    fn from(of: Learned) -> Self {
        Self { policy: of.policy.request_form(), notes: of.notes }
    }
}

/// Show a sandbox's policy; values of headers are hidden
#[utoipa::path(get, path = "/bivouac/v1/sandboxes/{name}/policy", tag = "bivouac",
    params(("name" = String, Path)), responses((status = 200, body = PolicyBody)))]
async fn show(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<PolicyBody>, ApiError> {
    let state = app.engine.policy(&call.who, &call.namespace(None)?, &name).await?;
    Ok(Json(PolicyBody::new(name, state)))
}

/// Replace a sandbox's policy, in its running session at once and for those to come
#[utoipa::path(put, path = "/bivouac/v1/sandboxes/{name}/policy", tag = "bivouac",
    params(("name" = String, Path)), request_body = Object,
    responses((status = 200, body = PolicyBody)))]
async fn replace(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<Value>,
) -> Result<Json<PolicyBody>, ApiError> {
    let (namespace, draft) = (call.namespace(None)?, draft("policy", &body)?);
    let state = app.engine.replace_policy(&call.who, &namespace, &name, draft).await?;
    Ok(Json(PolicyBody::new(name, state)))
}

/// Add entries to a sandbox's policy, or take some out; its rules and their values stay
#[utoipa::path(patch, path = "/bivouac/v1/sandboxes/{name}/policy", tag = "bivouac",
    params(("name" = String, Path)), request_body = EditBody,
    responses((status = 200, body = PolicyBody)))]
async fn edit(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<EditBody>,
) -> Result<Json<PolicyBody>, ApiError> {
    let (namespace, change) = (call.namespace(None)?, body.checked()?);
    let state = app.engine.edit_policy(&call.who, &namespace, &name, change).await?;
    Ok(Json(PolicyBody::new(name, state)))
}

/// Say what would happen to a request; nothing is sent
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/policy/explain", tag = "bivouac",
    params(("name" = String, Path)), request_body = ExplainRequest,
    responses((status = 200, body = ExplainBody)))]
async fn explain(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<ExplainRequest>,
) -> Result<Json<ExplainBody>, ApiError> {
    let namespace = call.namespace(None)?;
    let (url, method) = (body.url, body.method.unwrap_or_else(|| "GET".to_owned()));
    let engine = &app.engine;
    let explained = engine.explain_policy(&call.who, &namespace, &name, &url, &method).await?;
    Ok(Json(ExplainBody::new(url, method, explained)))
}

/// Open a running session for as long as the answer is read, to learn what it needs
///
/// The answer has no end: its first record tells where the audit lines begin. The session gets its
/// policy back when the answer is left, by `DELETE`, or when the engine ends.
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/policy/learn", tag = "bivouac",
    params(("name" = String, Path)),
    responses((status = 200, body = Object, content_type = "application/x-ndjson",
        description = "one record, then blank lines")))]
async fn learn(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Response, ApiError> {
    let open = app.engine.learn(&call.who, &call.namespace(None)?, &name).await?;
    let told = json!({ "learning": true, "session": open.session(), "since": open.since() });
    let first = stream::once(async move { Ok::<_, Infallible>(json_line(&told)) });
    // The session is open for as long as hyper holds on to this.
    let beats = stream::unfold(open, |open| async move {
        tokio::time::sleep(BEAT).await;
        Some((Ok(Bytes::from_static(b"\n")), open))
    });
    Ok(lines(first.chain(beats)))
}

/// End the learning: the session has its policy back when this answers what the run needs
#[utoipa::path(delete, path = "/bivouac/v1/sandboxes/{name}/policy/learn", tag = "bivouac",
    params(("name" = String, Path),
        ("since" = Option<u64>, Query, description = "where the audit lines of the run begin")),
    responses((status = 200, body = LearnedBody)))]
async fn learned(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<LearnedBody>, ApiError> {
    let (namespace, since) = (call.namespace(None)?, offset(&call)?.unwrap_or(0));
    let learned = app.engine.learned(&call.who, &namespace, &name, since).await?;
    Ok(Json(learned.into()))
}

fn offset(call: &Call) -> Result<Option<u64>, ApiError> {
    let read = |text: &str| {
        text.parse().map_err(|_| ApiError::field("since", "must be the `next` of a line"))
    };
    call.text("since").map(read).transpose()
}

/// Read what a sandbox's egress broker decided, a line each
///
/// `next` of a line is where `since` goes on. A line of kind `dropped` with `lostBytes` stands where
/// lines had to make room for newer ones.
#[utoipa::path(get, path = "/bivouac/v1/sandboxes/{name}/egress-log", tag = "bivouac",
    params(("name" = String, Path),
        ("session" = Option<String>, Query, description = "of this session; else of the newest"),
        ("since" = Option<u64>, Query), ("follow" = Option<bool>, Query,
        description = "wait for more until the session has ended")),
    responses((status = 200, body = Object, content_type = "application/x-ndjson")))]
async fn log(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Response, ApiError> {
    let query = AuditQuery {
        session: call.text("session").map(session_id).transpose()?,
        since: offset(&call)?,
        follow: call.flag("follow")?,
    };
    let log = app.engine.egress_log(&call.who, &call.namespace(None)?, &name, query).await?;
    Ok(lines(audit(log, KEEP_ALIVE)))
}

/// One record a line, and a blank line now and then while there is none.
fn audit(log: AuditLog, keep_alive: Duration) -> impl Stream<Item = Result<Bytes, Infallible>> {
    stream::unfold(Some(log), move |log| async move {
        let mut log = log?;
        match tokio::time::timeout(keep_alive, log.next()).await {
            Err(_) => Some((Ok(Bytes::from_static(b"\n")), Some(log))),
            Ok(None) => None,
            Ok(Some(Ok(line))) => Some((Ok(json_line(&line)), Some(log))),
            Ok(Some(Err(error))) => {
                // The status line is gone; a record is what is left to say it.
                let body = ApiError::from(error).into_body();
                Some((Ok(json_line(&body)), None))
            }
        }
    })
}

fn lines(of: impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static) -> Response {
    let mut response = Body::from_stream(of).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
