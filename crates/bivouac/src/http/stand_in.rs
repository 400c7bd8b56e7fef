//! The engine under the names of the original service (`--clients-tls`).
//!
//! Owns: which paths of those names are ours. Invariant: `vercel.com` is `/api` and its terminals and no more,
//! `oidc.vercel.com` is the identity issuer's documents and no more; everything else is a refusal
//! that says who answers, because nothing is ever passed on to the real hosts. Called by `serve`.

use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::error::ApiError;
use super::interactive;

/// What clients have to know of an engine that stands in for the original.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct StandIn {
    /// Where it listens.
    pub address: String,
    /// Names that have to lead there.
    pub hosts: Vec<String>,
    /// Certificate of the authority to trust, as PEM.
    pub ca: String,
}

/// The router as it is reached by those names.
pub fn stand_in(app: Router) -> Router {
    app.layer(middleware::from_fn(gate))
}

/// Mark of a request that came by those names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StandsIn;

async fn gate(mut request: Request, next: Next) -> Response {
    let name = host(&request);
    let path = request.uri().path();
    let ours = match name.as_str() {
        // Clients look whether a terminal's host is well before they connect to it.
        "vercel.com" => {
            path == "/api"
                || path.starts_with("/api/")
                || path == "/health"
                || path.starts_with(interactive::PATH)
        }
        // The issuer of a team is below the team's name.
        "oidc.vercel.com" => path.contains("/.well-known/") && !path.starts_with("/api/"),
        _ => {
            let message = "A bivouac engine answers here, for vercel.com and oidc.vercel.com only.";
            let status = StatusCode::MISDIRECTED_REQUEST;
            return ApiError::new(status, "misdirected", message).into_response();
        }
    };
    if ours {
        request.extensions_mut().insert(StandsIn);
        return next.run(request).await;
    }
    let path: String = path.chars().take(200).collect();
    ApiError::not_found(format!(
        "A bivouac engine answers here in place of {name} and has no {path}: the sandbox API is \
         https://vercel.com/api. Nothing was passed on; to reach the real {name}, take the name out \
         of /etc/hosts."
    ))
    .into_response()
}

/// The name that was asked for, in small letters and without a port.
fn host(request: &Request) -> String {
    let header = || request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    // HTTP/2 has it in the request's target only.
    let name = request.uri().authority().map(|a| a.as_str()).or_else(header).unwrap_or_default();
    name.strip_suffix(":443").unwrap_or(name).to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::routing::any;
    use tower::ServiceExt as _;

    use super::*;

    async fn status(target: &str, host: Option<&str>) -> u16 {
        let app = stand_in(Router::new().fallback(any(|| async { "reached" })));
        let mut request = Request::builder().uri(target);
        if let Some(host) = host {
            request = request.header(header::HOST, host);
        }
        app.oneshot(request.body(Body::empty()).unwrap()).await.unwrap().status().as_u16()
    }

    #[tokio::test]
    async fn only_what_is_ours_gets_in() {
        for (target, host, expected) in [
            ("/api/v2/user", Some("vercel.com"), 200),
            ("/api", Some("VERCEL.com:443"), 200),
            ("https://vercel.com/api/v2/user", None, 200),
            ("/.well-known/jwks", Some("oidc.vercel.com"), 200),
            ("/team/.well-known/openid-configuration", Some("oidc.vercel.com"), 200),
            ("/", Some("vercel.com"), 404),
            ("/apiary", Some("vercel.com"), 404),
            ("/health", Some("vercel.com"), 200),
            ("/interactive/sbx_1", Some("vercel.com"), 200),
            ("/interactive", Some("vercel.com"), 404),
            ("/interactive/sbx_1", Some("oidc.vercel.com"), 404),
            ("/health", Some("oidc.vercel.com"), 404),
            ("/.well-known/openid-configuration", Some("vercel.com"), 404),
            ("/", Some("oidc.vercel.com"), 404),
            ("/api/v2/user", Some("oidc.vercel.com"), 404),
            ("/api/.well-known/x", Some("oidc.vercel.com"), 404),
            ("/api/v2/user", Some("api.vercel.com"), 421),
            ("/api/v2/user", Some("vercel.com:8443"), 421),
            ("/api/v2/user", Some("127.0.0.1"), 421),
            ("/api/v2/user", None, 421),
        ] {
            assert_eq!(status(target, host).await, expected, "{target} {host:?}");
        }
    }
}
