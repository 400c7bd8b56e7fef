//! Additions of ours about principals: tokens, who asks, and the log of uses. Below `/api/bivouac/v1`.
//!
//! Invariant: a token is in the answer to the call that made it and in no other. Asked by `bivouac token` and, for
//! a token that is not the engine's own, by every verb that names no namespace.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bivouac_engine::{Error, MadeToken, NewToken, Token};
use bivouac_types::access::{Grant, Reach, Verb};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::broadcast;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::ndjson::KEEP_ALIVE;
use super::scope::{Call, Seg};

/// Lines that are shown when nobody says how many.
const SHOWN: u32 = 100;
/// Most lines of one answer.
const MOST: u32 = 10_000;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(revoke))
        .routes(routes!(whoami))
        .routes(routes!(access_log))
}

/// A token, without its secret half.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TokenView {
    /// Its public half: what stands in it behind `bvt_`.
    id: String,
    /// Its name; behind the name of the token that made it, if one did.
    name: String,
    /// `TEAM/PROJECT`, `TEAM/*` or `*`.
    namespaces: Vec<String>,
    /// `read`, `exec`, `preview`, `write`, `policy`, `admin`.
    verbs: Vec<String>,
    /// Id of the token that made it; absent is the engine's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    made_by: Option<String>,
    created_at: i64,
    /// From when on it counts no more, ms since the epoch; absent is never.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    revoked_at: Option<i64>,
    /// To the minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_used_at: Option<i64>,
}

fn words(grant: &Grant) -> (Vec<String>, Vec<String>) {
    let namespaces = grant.namespaces.iter().map(ToString::to_string).collect();
    (namespaces, grant.verbs.iter().map(ToString::to_string).collect())
}

impl From<Token> for TokenView {
    fn from(token: Token) -> Self {
        let (namespaces, verbs) = words(&token.grant);
        Self {
            id: token.id,
            name: token.name,
            namespaces,
            verbs,
            made_by: token.made_by,
            created_at: token.created_at,
            expires_at: token.expires_at,
            revoked_at: token.revoked_at,
            last_used_at: token.last_used_at,
        }
    }
}

/// A token that is wanted.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct NewTokenBody {
    /// 1 to 64 letters, digits, `.`, `_` and `-`.
    name: String,
    /// `TEAM/PROJECT`, `TEAM/*` or `*`.
    namespaces: Vec<String>,
    /// `read`, `exec`, `preview`, `write`, `policy`, `admin`.
    verbs: Vec<String>,
    /// From when on it counts no more, ms since the epoch; absent is with the token that makes it, if that ends.
    expires_at: Option<i64>,
}

/// Answer with a new token.
#[derive(Serialize, ToSchema)]
pub(crate) struct NewTokenAnswer {
    token: TokenView,
    /// The token itself. It is told once: keep it.
    secret: String,
}

/// Answer with tokens.
#[derive(Debug, Serialize, ToSchema)]
struct TokensBody {
    tokens: Vec<TokenView>,
}

/// Answer with tokens that were taken back.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RevokedTokensBody {
    /// The one that was named, then those that it made.
    tokens: Vec<TokenView>,
    /// How many SSH keys went with them.
    ssh_keys: u64,
}

/// Who asks.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct WhoamiBody {
    /// `local` is the engine's own token.
    name: String,
    /// Id of the token; absent is the engine's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    namespaces: Vec<String>,
    verbs: Vec<String>,
    /// What is meant when a call names no team.
    team: String,
    /// What is meant when a call names no project.
    project: String,
    /// From when on the token counts no more, ms since the epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<i64>,
}

/// Make a token; its secret is in this answer and nowhere else
///
/// Nobody hands on what he has not: the rights and the expiry lie within those of the token that asks.
#[utoipa::path(post, path = "/bivouac/v1/tokens", tag = "tokens", request_body = NewTokenBody,
    responses((status = 201, body = NewTokenAnswer)))]
async fn create(
    State(app): State<App>,
    call: Call,
    JsonBody(body): JsonBody<NewTokenBody>,
) -> Result<(StatusCode, [(header::HeaderName, HeaderValue); 1], Json<NewTokenAnswer>), ApiError> {
    let reaches = body.namespaces.iter().map(|text| Reach::parse(text));
    let verbs = body.verbs.iter().map(|text| Verb::parse(text));
    let grant = Grant {
        namespaces: reaches.collect::<Result<BTreeSet<_>, _>>()?,
        verbs: verbs.collect::<Result<BTreeSet<_>, _>>()?,
    };
    let new = NewToken { name: body.name, grant, expires_at: body.expires_at };
    let MadeToken { token, secret } = app.engine.create_token(&call.who, new).await?;
    let answer = NewTokenAnswer { token: token.into(), secret: secret.expose().to_owned() };
    let unkept = [(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))];
    Ok((StatusCode::CREATED, unkept, Json(answer)))
}

/// List tokens: for an administrator all of them, else the one that asks and those that it made
#[utoipa::path(get, path = "/bivouac/v1/tokens", tag = "tokens",
    responses((status = 200, body = TokensBody)))]
async fn list(State(app): State<App>, call: Call) -> Result<Json<TokensBody>, ApiError> {
    let tokens = app.engine.tokens(&call.who).await?;
    Ok(Json(TokensBody { tokens: tokens.into_iter().map(TokenView::from).collect() }))
}

/// Take a token back, with those that it made and their SSH keys; what is open in their names is cut
#[utoipa::path(delete, path = "/bivouac/v1/tokens/{token}", tag = "tokens",
    params(("token" = String, Path, description = "name or id")),
    responses((status = 200, body = RevokedTokensBody)))]
async fn revoke(
    State(app): State<App>,
    call: Call,
    Seg(token): Seg<String>,
) -> Result<Json<RevokedTokensBody>, ApiError> {
    let gone = app.engine.revoke_token(&call.who, &token).await?;
    let tokens = gone.tokens.into_iter().map(TokenView::from).collect();
    Ok(Json(RevokedTokensBody { tokens, ssh_keys: gone.ssh_keys }))
}

/// Show who asks: the rights of the token
#[utoipa::path(get, path = "/bivouac/v1/whoami", tag = "tokens",
    responses((status = 200, body = WhoamiBody)))]
async fn whoami(State(app): State<App>, call: Call) -> Json<WhoamiBody> {
    let who = app.engine.whoami(&call.who);
    let (namespaces, verbs) = words(&who.principal.grant);
    let home = who.principal.grant.home(None);
    Json(WhoamiBody {
        name: who.principal.name,
        token: who.principal.token,
        namespaces,
        verbs,
        team: home.team,
        project: home.project,
        expires_at: who.expires_at,
    })
}

/// Show who used what: the last lines of the log of uses, oldest first; for administrators
#[utoipa::path(get, path = "/bivouac/v1/access-log", tag = "tokens",
    params(("limit" = Option<u32>, Query, description = "1 to 10,000, 100 by default"),
        ("token" = Option<String>, Query, description = "only of this one: name or id"),
        ("follow" = Option<bool>, Query, description = "then wait for more")),
    responses((status = 200, body = Object, content_type = "application/x-ndjson",
        description = "one use a line")))]
async fn access_log(State(app): State<App>, call: Call) -> Result<Response, ApiError> {
    call.who.may_rule()?;
    let limit = call.limit(MOST)?.unwrap_or(SHOWN) as usize;
    let (token, follow) = (call.owned("token"), call.flag("follow")?);
    let unread = |error: std::io::Error| {
        Error::internal("The log of uses cannot be read; see the engine's log.").because(error)
    };
    let log = Arc::clone(&app.uses);
    let filter = token.clone();
    let read = tokio::task::spawn_blocking(move || {
        let mut reading = log.read()?;
        let lines = reading.last(limit, |line| is_of(line, filter.as_deref()))?;
        Ok((lines, reading.next))
    });
    let read = read.await.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    let (lines, next) = read.map_err(unread)?;
    let old = stream::iter(lines).map(|line| Bytes::from(line + "\n"));
    let lines = old.map(Ok::<_, Infallible>);
    let body = match follow {
        true => Body::from_stream(lines.chain(coming(next, token))),
        false => Body::from_stream(lines),
    };
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// Whether a line is of that token, by its name or id.
fn is_of(line: &str, token: Option<&str>) -> bool {
    let Some(token) = token else { return true };
    let read: Value = serde_json::from_str(line).unwrap_or_default();
    read["principal"] == token || read["token"] == token
}

fn coming(
    next: broadcast::Receiver<Arc<str>>,
    token: Option<String>,
) -> impl stream::Stream<Item = Result<Bytes, Infallible>> + Send {
    stream::unfold((next, token), |(mut next, token)| async move {
        loop {
            let line = match tokio::time::timeout(KEEP_ALIVE, next.recv()).await {
                Err(_) => Bytes::from_static(b"\n"),
                Ok(Ok(line)) if is_of(&line, token.as_deref()) => Bytes::from(format!("{line}\n")),
                Ok(Ok(_)) => continue,
                Ok(Err(broadcast::error::RecvError::Lagged(count))) => {
                    Bytes::from(format!("{{\"dropped\":{count}}}\n"))
                }
                Ok(Err(broadcast::error::RecvError::Closed)) => return None,
            };
            return Some((Ok(line), (next, token)));
        }
    })
}
