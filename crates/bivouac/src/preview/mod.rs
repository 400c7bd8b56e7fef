//! The way of browsers to the ports of sandboxes: a reverse proxy of our own.
//!
//! Owns: the choice by the `Host` header, and the order of steps from there (find the route, let in, wake, carry).
//! Invariants: a name of a route never leads to the API, and the API's names never to a route; nobody is let in
//! but by a pass of the engine's; what lets somebody in never reaches the program, and what a client says about
//! itself in our headers does not either. The engine decides, this carries. Called by `http`, as its outermost
//! layer, and by `serve` for the listener of `--preview-listen`.

mod body;
mod carry;
mod gate;
mod headers;
mod host;
mod pages;
mod pool;
mod tls;
mod wake;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use bivouac_engine::{Clock as _, Engine, PreviewRoute, SystemClock, Use};
use bivouac_types::access::Verb;
use tokio::time::Instant;

pub use tls::{PreviewTls, TlsFiles};

use gate::Verdict;
use host::{Aim, Aimed};
use pages::Asker;
use pool::Pool;
use wake::Waking;

/// Who is at the other end of a connection. Put into every request by the listener.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    /// Its address.
    pub(crate) address: SocketAddr,
    /// The connection is TLS, and it is ours.
    pub(crate) tls: bool,
}

/// Most uses that are remembered as written down.
const MOST_NOTED: usize = 4096;
/// How long a use stands for those after it, ms.
const NOTED_MS: i64 = 60_000;

/// Route, who, how it came out.
type Noted = (String, Option<String>, u16);

/// The proxy.
pub(crate) struct Preview {
    engine: Arc<Engine>,
    /// `--preview-domain`, without a port.
    domain: Option<String>,
    pool: Arc<Pool>,
    waking: Waking,
    /// When a use was last written down, by route and by who.
    noted: Mutex<HashMap<Noted, i64>>,
}

impl std::fmt::Debug for Preview {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Preview").field("domain", &self.domain).finish_non_exhaustive()
    }
}

impl Preview {
    /// A proxy for the routes of an engine.
    pub(crate) fn new(engine: Arc<Engine>) -> Arc<Self> {
        let domain = engine.config().preview_domain.as_deref().map(|domain| {
            let name = domain.rsplit_once(':').map_or(domain, |(name, _)| name);
            name.to_ascii_lowercase()
        });
        let pool = Pool::new();
        Arc::new(Self { engine, domain, pool, waking: Waking::default(), noted: Mutex::default() })
    }

    /// Answers a request for a route.
    async fn serve(self: Arc<Self>, aimed: Aimed, request: Request) -> Response {
        let asker = Asker::of(&request);
        if request.method() == Method::CONNECT {
            let status = StatusCode::METHOD_NOT_ALLOWED;
            return asker.refuse(status, "method_not_allowed", "A route takes no CONNECT.");
        }
        let route = match self.engine.preview_route(&aimed.label).await {
            Ok(Some(route)) => route,
            Ok(None) => return asker.unknown(&aimed.name),
            Err(error) => return asker.failed(&error),
        };
        let (mut parts, body) = request.into_parts();
        let secure = aimed.secure(&parts);
        let pass = match gate::judge(&self.engine, &route, &mut parts, &aimed, secure).await {
            Ok(Verdict::In(pass)) => pass,
            Ok(Verdict::Clean { location, cookie }) => return cleaned(&location, cookie),
            Ok(Verdict::Out(why)) => {
                self.note(&route, None, why.status().as_u16(), &parts);
                return asker.closed(&route, &why);
            }
            Err(error) => return asker.failed(&error),
        };
        self.note(&route, pass.who().map(|who| (who, pass.reason())), 200, &parts);
        let way = match self.way(&pass, &asker).await {
            Ok(way) => way,
            Err(response) => return response,
        };
        carry::carry(&self, way, pass, asker, &aimed, secure, Request::from_parts(parts, body))
            .await
    }

    /// Takes a use down: once a minute for a route and whoever comes.
    fn note(
        &self,
        route: &PreviewRoute,
        who: Option<(&bivouac_engine::Principal, &'static str)>,
        status: u16,
        parts: &axum::http::request::Parts,
    ) {
        let now = SystemClock.now();
        let key = (route.label.clone(), who.map(|(who, _)| who.name.clone()), status);
        {
            let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
            match noted.get(&key) {
                Some(at) if now - at < NOTED_MS => return,
                _ => {}
            }
            if noted.len() >= MOST_NOTED {
                noted.retain(|_, at| now - *at < NOTED_MS);
                // Still full: invented by somebody who has many names of routes. The line is more worth.
                if noted.len() >= MOST_NOTED {
                    noted.clear();
                }
            }
            noted.insert(key, now);
        }
        let what = |reason: &str| format!("port {} by {reason}", route.port);
        let mut one = match who {
            Some((who, reason)) => Use::new(who, "preview", what(reason)),
            None if status == 200 => Use::of_nobody("preview", what("public")),
            None => Use::of_nobody("preview", what("nothing")),
        };
        one = one.on(&route.namespace, route.name.clone()).outcome(status);
        one.verb = Some(Verb::Preview);
        if let Some(peer) = parts.extensions.get::<Peer>() {
            one = one.from(&peer.address.ip());
        }
        self.engine.audit(one);
    }
}

/// Sends a browser from a link to the address without it, with a cookie instead.
fn cleaned(location: &str, cookie: Option<String>) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::FOUND;
    let headers = response.headers_mut();
    if let Ok(location) = HeaderValue::from_str(location) {
        headers.insert(header::LOCATION, location);
    }
    if let Some(mut cookie) = cookie.and_then(|cookie| HeaderValue::from_str(&cookie).ok()) {
        cookie.set_sensitive(true);
        headers.insert(header::SET_COOKIE, cookie);
    }
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

/// Takes requests for routes out of the way of the API.
pub(crate) async fn choose(
    State(preview): State<Arc<Preview>>,
    request: Request,
    next: Next,
) -> Response {
    match host::aim(&request, preview.domain.as_deref()) {
        Aim::Api => next.run(request).await,
        // Big, and debug builds keep it on the stack of whatever awaits it.
        Aim::Route(aimed) => Box::pin(preview.serve(aimed, request)).await,
        Aim::Bad(why) => Asker::of(&request).refuse(StatusCode::BAD_REQUEST, "bad_request", why),
    }
}

/// For a listener that has routes only: every other name is somebody else's.
pub(crate) async fn misdirected(request: Request) -> Response {
    let why = "Only routes of sandboxes are served here; the API has an address of its own.";
    Asker::of(&request).refuse(StatusCode::MISDIRECTED_REQUEST, "misdirected", why)
}

/// How long a program may let us wait for its head, counted from the last byte that was sent to it.
const HEAD: std::time::Duration = std::time::Duration::from_secs(300);

/// How long until `at`.
fn left(at: Instant) -> std::time::Duration {
    at.saturating_duration_since(Instant::now())
}
