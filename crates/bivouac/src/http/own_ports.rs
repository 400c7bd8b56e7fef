//! Additions of ours about ports: what listens in a sandbox, who may come, links, tunnels. Below
//! `/api/bivouac/v1`.
//!
//! Invariant: a handler reads a request, makes one call of the engine and shows the result; a tunnel is agreed
//! to when the port has answered. Asked by `bivouac ports`, `open` and `forward`.

use axum::Json;
use axum::extract::{Request, State};
use axum::response::Response;
use bivouac_engine::{DialTo, Link, Port};
use bivouac_types::Millis;
use futures_util::FutureExt as _;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::scope::{Call, Seg};
use super::tunnel;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(publish))
        .routes(routes!(link))
        .routes(routes!(revoke))
        .routes(routes!(open_tunnel))
}

/// A port of a sandbox.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PortView {
    port: u16,
    /// It has a route of its own.
    declared: bool,
    /// Something listens on it.
    listening: bool,
    /// Where it listens: `127.0.0.1`, `0.0.0.0`, `::`.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    /// Process id inside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    /// Name of the program that listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<String>,
    /// Where a browser goes.
    url: String,
    /// Open to everybody.
    public: bool,
}

impl From<Port> for PortView {
    fn from(of: Port) -> Self {
        let Port { port, declared, listening, address, pid, program, url, public } = of;
        Self { port, declared, listening, address, pid, program, url, public }
    }
}

/// Ports of a sandbox, by number.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PortsBody {
    ports: Vec<PortView>,
}

/// Answer with one port.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PortBody {
    port: PortView,
}

/// Ports of a sandbox: declared ones, and those that something listens on
#[utoipa::path(get, path = "/bivouac/v1/sandboxes/{name}/ports", tag = "bivouac",
    params(("name" = String, Path)), responses((status = 200, body = PortsBody)))]
async fn list(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<PortsBody>, ApiError> {
    let ports = app.engine.ports(&call.who, &call.namespace(None)?, &name).await?;
    Ok(Json(PortsBody { ports: ports.into_iter().map(PortView::from).collect() }))
}

/// Who may come.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PublishBody {
    /// Everybody; else only who shows a token, a link or its cookie.
    public: bool,
}

/// Open a port to everybody, or close it again: then what strangers have open is cut
#[utoipa::path(put, path = "/bivouac/v1/sandboxes/{name}/ports/{port}", tag = "bivouac",
    params(("name" = String, Path), ("port" = u16, Path)), request_body = PublishBody,
    responses((status = 200, body = PortBody)))]
async fn publish(
    State(app): State<App>,
    call: Call,
    Seg((name, port)): Seg<(String, String)>,
    JsonBody(body): JsonBody<PublishBody>,
) -> Result<Json<PortBody>, ApiError> {
    let (namespace, port) = (call.namespace(None)?, number("port", &port)?);
    let port = app.engine.publish_port(&call.who, &namespace, &name, port, body.public).await?;
    Ok(Json(PortBody { port: port.into() }))
}

/// What a link is to be.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct LinkBody {
    /// ms that it is good for; absent is twelve hours.
    ttl: Option<Millis>,
}

/// A link that lets its holder in.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct LinkView {
    /// With what lets in: a secret until it expires.
    url: String,
    /// Unix ms.
    expires_at: Millis,
    port: u16,
}

impl From<Link> for LinkView {
    fn from(of: Link) -> Self {
        let Link { url, expires_at, port } = of;
        Self { url, expires_at, port }
    }
}

/// Make a link that lets its holder in to a port
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/ports/{port}/link", tag = "bivouac",
    params(("name" = String, Path), ("port" = u16, Path)), request_body = LinkBody,
    responses((status = 200, body = LinkView)))]
async fn link(
    State(app): State<App>,
    call: Call,
    Seg((name, port)): Seg<(String, String)>,
    JsonBody(body): JsonBody<LinkBody>,
) -> Result<Json<LinkView>, ApiError> {
    let (namespace, port) = (call.namespace(None)?, number("port", &port)?);
    let link = app.engine.link_port(&call.who, &namespace, &name, port, body.ttl).await?;
    Ok(Json(link.into()))
}

/// Whose links are to be worth nothing.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct RevokeBody {
    /// Of this port; absent is of all.
    port: Option<u16>,
}

/// Answer to a revocation.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RevokedBody {
    /// How many routes that was for.
    routes: u64,
}

/// Make links and cookies worthless; what came in by them is cut
#[utoipa::path(post, path = "/bivouac/v1/sandboxes/{name}/ports/revoke", tag = "bivouac",
    params(("name" = String, Path)), request_body = RevokeBody,
    responses((status = 200, body = RevokedBody)))]
async fn revoke(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<RevokeBody>,
) -> Result<Json<RevokedBody>, ApiError> {
    let namespace = call.namespace(None)?;
    let routes = app.engine.revoke_links(&call.who, &namespace, &name, body.port).await?;
    Ok(Json(RevokedBody { routes }))
}

/// Connect to a port of a sandbox: bytes both ways after `Upgrade: bivouac-tunnel`
#[utoipa::path(get, path = "/bivouac/v1/sandboxes/{name}/tunnel", tag = "bivouac",
    params(("name" = String, Path), ("port" = u16, Query),
        ("wake" = Option<bool>, Query, description = "start it if it does not run")),
    responses((status = 101, description = "bytes of the connection")))]
async fn open_tunnel(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let port = number("port", call.text("port").unwrap_or_default())?;
    let (namespace, wake) = (call.namespace(None)?, call.flag("wake")?);
    // A request that is none of a tunnel's starts nothing.
    let (response, stream) = tunnel::accept(request)?;
    let to = DialTo::Port(port);
    let dialed = app.engine.dial(&call.who, &namespace, &name, &to, wake).await?;
    let ended = app.engine.ended(&call.who).boxed();
    tokio::spawn(async move {
        let carried = async { tunnel::carry(stream.await?, dialed).await };
        tokio::select! {
            carried = carried => if let Err(error) = carried {
                tracing::debug!(%error, "a tunnel broke");
            },
            () = ended => {}
        }
    });
    Ok(response)
}

/// A port's number.
fn number(field: &str, text: &str) -> Result<u16, ApiError> {
    let port = text.parse().ok().filter(|port| *port > 0);
    port.ok_or_else(|| ApiError::field(field, "must be 1 to 65535"))
}
