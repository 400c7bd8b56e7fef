//! The HTTP door: the Vercel Sandbox API over the engine, with additions of ours.
//!
//! Owns: paths, wire shapes, credentials, limits of requests. Invariant: no decision is made here;
//! a handler reads a request, makes one call of the engine and shows the result. Every path below
//! `/api` needs the token and is in the OpenAPI document.
//!
//! Called by `serve`, which gives it an [`Engine`] and a listener. Names of routes never get here: `preview`.

mod account;
mod auth;
mod body;
mod error;
mod files;
mod interactive;
mod issuer;
mod live;
mod metrics;
mod ndjson;
mod openapi;
mod own;
mod own_archives;
mod own_drives;
mod own_images;
mod own_pause;
mod own_ports;
mod own_state;
mod own_storage;
mod own_terminals;
mod own_tokens;
mod policy;
mod requests;
mod runs;
mod scope;
mod secrets;
mod server;
mod socket;
mod stand_in;
mod trace;
pub(crate) mod tunnel;
mod unread;
mod uses;
mod v1;
mod v2;
mod views;

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware;
use axum::routing::get;
use axum::{Json, Router};
use bivouac_engine::Engine;
use bivouac_types::Millis;
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub use server::serve;
pub use stand_in::{StandIn, stand_in};
pub use trace::VERSION_HEADER;
pub(crate) use tunnel::PROTOCOL as TUNNEL;

use crate::preview::{self, Preview};
use crate::uses::UseLog;
use error::ApiError;

/// What the engine tells about itself.
#[derive(Clone)]
pub struct EngineInfo {
    /// Version of the executable.
    pub version: String,
    /// Process id of the engine.
    pub pid: u32,
    /// This host's name.
    pub node: String,
    /// Where all state is.
    pub data_dir: String,
    /// When the engine started.
    pub started_at: Millis,
    /// How clients reach it under the original's names, with `--clients-tls`.
    pub clients_tls: Option<StandIn>,
}

impl fmt::Debug for EngineInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineInfo").field("node", &self.node).finish_non_exhaustive()
    }
}

/// What the router needs besides the engine.
#[derive(Clone)]
pub struct HttpConfig {
    /// The log of uses, for administrators.
    pub uses: Arc<UseLog>,
    /// For `/api/bivouac/v1/engine`.
    pub info: EngineInfo,
}

impl fmt::Debug for HttpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpConfig").field("info", &self.info).finish_non_exhaustive()
    }
}

/// What every handler can reach.
#[derive(Clone)]
pub(crate) struct App(Arc<Parts>);

pub(crate) struct Parts {
    engine: Arc<Engine>,
    uses: Arc<UseLog>,
    refusals: uses::Refusals,
    info: EngineInfo,
    document: OnceLock<Value>,
    times: metrics::RequestTimes,
    tickets: interactive::Tickets,
}

impl Deref for App {
    type Target = Parts;
    fn deref(&self) -> &Parts {
        &self.0
    }
}

/// Every path of the API with its description.
fn api() -> OpenApiRouter<App> {
    let api = OpenApiRouter::new()
        .merge(v2::routes())
        .merge(v1::routes())
        .merge(account::routes())
        .merge(own::routes())
        .merge(own_archives::routes())
        .merge(own_drives::routes())
        .merge(own_images::routes())
        .merge(own_pause::routes())
        .merge(own_ports::routes())
        .merge(own_state::routes())
        .merge(own_storage::routes())
        .merge(own_tokens::routes())
        .merge(own_terminals::routes())
        .merge(live::routes())
        .merge(secrets::routes())
        .merge(policy::routes())
        .routes(routes!(openapi::serve));
    OpenApiRouter::new().nest("/api", api)
}

/// The document that describes the API, as `/api/openapi.json` answers it.
pub fn openapi_document() -> Value {
    openapi::document(&api().split_for_parts().1)
}

/// The routers of an engine.
#[derive(Debug)]
pub struct Doors {
    /// The API below `/api`, `/health`, and `/metrics` for those who have the token.
    pub api: Router,
    /// `/metrics` alone, for whoever reaches it.
    pub metrics: Router,
    /// Routes into sandboxes alone, for `--preview-listen`.
    pub preview: Router,
}

/// The routers, of which the second one is for `--metrics-listen`.
pub fn doors(engine: Arc<Engine>, config: HttpConfig) -> Doors {
    let HttpConfig { uses, info } = config;
    let refusals = uses::Refusals::default();
    let (document, times) = (OnceLock::new(), metrics::RequestTimes::default());
    let routes = Preview::new(engine.clone());
    let tickets = interactive::Tickets::default();
    let app = App(Arc::new(Parts { engine, uses, refusals, info, document, times, tickets }));
    let metrics = Router::new().route("/metrics", get(metrics::serve)).with_state(app.clone());
    // Outermost: whatever is a route's passes nothing that is the API's.
    let choose = middleware::from_fn_with_state(routes, preview::choose);
    let api = api_router(app).layer(choose.clone());
    let preview = Router::new().fallback(preview::misdirected).layer(choose);
    Doors { api, metrics, preview }
}

/// The router: the API below `/api`, `/health` and `/metrics`.
pub fn router(engine: Arc<Engine>, config: HttpConfig) -> Router {
    doors(engine, config).api
}

fn api_router(app: App) -> Router {
    let (api, description) = api().split_for_parts();
    // Set once, before anybody can ask.
    let _ = app.document.set(openapi::document(&description));
    api.merge(issuer::routes())
        .route("/health", get(health))
        .route("/interactive/{session}", get(interactive::connect))
        .route("/metrics", get(metrics::serve))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(app.clone(), auth::require))
        .layer(middleware::from_fn_with_state(app.clone(), metrics::observe))
        .layer(middleware::from_fn(unread::read_away))
        .layer(middleware::from_fn(trace::request))
        .with_state(app)
}

async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

async fn unknown_path(request: Request) -> ApiError {
    let path: String = request.uri().path().chars().take(200).collect();
    ApiError::not_found(format!("There is no path {path}; /api/openapi.json lists them all."))
}

async fn wrong_method(request: Request) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("{path} does not take {method}; /api/openapi.json lists what it takes.");
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

#[cfg(test)]
mod tests;
