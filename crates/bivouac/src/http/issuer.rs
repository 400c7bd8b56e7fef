//! The documents of the identity tokens' issuer: discovery and keys.
//!
//! Invariant: they are public, need no token and hold no secret. Who verifies a token asks for them, under
//! the address that the token names: `<issuer>/.well-known/…`, and below a team's name for clients of the
//! original, whose issuers are `https://oidc.vercel.com/<team>`.

use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use bivouac_types::name::check_scope;
use serde_json::Value;

use super::App;
use super::error::ApiError;
use super::scope::Seg;

/// How long a verifier may keep the documents, s. Keys are added long before they sign.
const CACHE: &str = "public, max-age=300";

pub(super) fn routes() -> Router<App> {
    Router::new()
        .route("/.well-known/openid-configuration", get(discovery))
        .route("/.well-known/jwks", get(keys))
        .route("/{team}/.well-known/openid-configuration", get(team_discovery))
        .route("/{team}/.well-known/jwks", get(team_keys))
}

fn document(document: Value) -> Response {
    ([(header::CACHE_CONTROL, CACHE)], Json(document)).into_response()
}

async fn discovery(State(app): State<App>) -> Response {
    document(app.engine.openid_configuration(None))
}

async fn keys(State(app): State<App>) -> Result<Response, ApiError> {
    Ok(document(app.engine.jwks().await?))
}

async fn team_discovery(
    State(app): State<App>,
    Seg(team): Seg<String>,
) -> Result<Response, ApiError> {
    check_scope("team", &team)?;
    Ok(document(app.engine.openid_configuration(Some(&team))))
}

async fn team_keys(state: State<App>, Seg(team): Seg<String>) -> Result<Response, ApiError> {
    check_scope("team", &team)?;
    keys(state).await
}
