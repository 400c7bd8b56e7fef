//! One request into a sandbox and its answer back; after `Upgrade`, bytes both ways.
//!
//! Invariants: what goes in is one HTTP/1.1 request whose framing is ours (hyper's), whatever form it came in, so
//! nothing can be hidden in it; time limits are for connects and heads, never for bodies; everything ends when the
//! pass does. Called by `preview`.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, Version, header};
use axum::response::Response;
use bivouac_engine::{ActivityHold, Error, Pass, Reached};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use hyper::body::{Body as _, Incoming};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional_with_sizes;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use super::body::{Back, Download, Progress, Upload};
use super::host::Aimed;
use super::pages::Asker;
use super::pool::{Key, Open, Pool, Sender, connect};
use super::{HEAD, Peer, Preview, headers};

/// Code of the engine's error that says that nobody answered a connection.
pub(super) const NOT_LISTENING: &str = "not_listening";
/// How long a client that waits for leave to send waits for the program's word: then it gets ours (RFC 9110
/// §10.1.1 lets programs be silent).
const CONTINUE: Duration = Duration::from_secs(1);
/// Bytes in hand for each direction of an upgraded connection.
const BUFFER: usize = 64 << 10;

/// Why there is no answer.
enum Broken {
    Engine(Error),
    Http(hyper::Error),
}

/// A request that is ready to go in.
struct Prepared {
    request: hyper::Request<Upload>,
    progress: Arc<Progress>,
    /// The client's end, if it wants its connection changed.
    upgrade: Option<OnUpgrade>,
}

/// Carries a request in, and its answer back.
pub(super) async fn carry(
    preview: &Arc<Preview>,
    reached: Reached,
    pass: Pass,
    asker: Asker,
    aimed: &Aimed,
    secure: bool,
    request: Request,
) -> Response {
    let route = Arc::clone(pass.route());
    let key = (reached.session.clone(), route.port);
    let Some(open) = preview.pool.open(&key) else {
        let (status, code) = (StatusCode::SERVICE_UNAVAILABLE, "too_many");
        return asker.refuse(status, code, "This port has too many requests in hand; try again.");
    };
    let hold = reached.hold();
    let Prepared { request, progress, upgrade } = prepare(request, aimed, secure);
    let mut over = preview.engine.over(&pass).boxed();
    let patience = preview.waking.until(&route);
    let answer = {
        let patience = patience.filter(|_| !asker.navigates);
        let exchange = exchange(&preview.pool, &reached, &key, request, patience);
        tokio::pin!(exchange);
        loop {
            tokio::select! {
                answer = &mut exchange => break answer,
                () = &mut over => return asker.closed(&route, &super::gate::Closed::Nothing),
                () = tokio::time::sleep(HEAD) => if progress.silent() >= HEAD {
                    return asker.late(&route);
                }
            }
        }
    };
    let (mut response, sender) = match answer {
        Ok(answer) => answer,
        Err(Broken::Engine(error)) if error.code == NOT_LISTENING => {
            return match patience {
                Some(_) if asker.navigates => asker.waiting(&route),
                _ => asker.not_listening(&route),
            };
        }
        Err(Broken::Engine(error)) => return asker.failed(&error),
        // The client's own body broke off, or was none.
        Err(Broken::Http(error)) if error.is_user() => {
            let why =
                "The body of the request is not whole, or not in the form that its head tells.";
            return asker.refuse(StatusCode::BAD_REQUEST, "bad_request", why);
        }
        Err(Broken::Http(error)) => return asker.broken(&route, told(&error)),
    };
    *response.version_mut() = Version::HTTP_11;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let Some(client) = upgrade else {
            return asker.broken(&route, "wants another protocol, which nobody asked for");
        };
        let tunnel = Tunnel { over, gone: reached.gone(), hold, open };
        return switch(response, client, tunnel);
    }
    let (mut parts, body) = response.into_parts();
    headers::drop_hop(&mut parts.headers);
    for name in [header::PROXY_AUTHENTICATE, header::ALT_SVC] {
        parts.headers.remove(name);
    }
    headers::drop_our_cookie(&mut parts.headers);
    let back = Back { pool: Arc::clone(&preview.pool), key, sender, progress };
    let body = Download::new(body, back, over, hold, open);
    Response::from_parts(parts, Body::new(body))
}

/// What is said of a program that does not keep to HTTP.
fn told(error: &hyper::Error) -> &'static str {
    if error.is_parse() || error.is_parse_too_large() || error.is_parse_status() {
        "has answered something that is no HTTP, or has too long a head"
    } else if error.is_incomplete_message() || error.is_closed() || error.is_canceled() {
        "has closed the connection without an answer"
    } else {
        "has broken off the connection"
    }
}

/// Makes one HTTP/1.1 request of what came.
fn prepare(mut request: Request, aimed: &Aimed, secure: bool) -> Prepared {
    let one = request.version() == Version::HTTP_11;
    let wanted = headers::upgrade(request.headers()).filter(|_| one);
    let upgrade = wanted.is_some().then(|| hyper::upgrade::on(&mut request));
    let (mut parts, body) = request.into_parts();
    let host = parts.headers.get(header::HOST).cloned().or_else(|| {
        // HTTP/2 has it in the target only.
        let authority = parts.uri.authority()?;
        HeaderValue::from_str(authority.as_str()).ok()
    });
    let from = parts.extensions.get::<Peer>().map(|peer| peer.address.ip());
    let trailers = headers::takes_trailers(&parts.headers);
    let expects = one && expects_continue(&parts.headers) && !body.is_end_stream();
    headers::drop_hop(&mut parts.headers);
    headers::drop_forged(&mut parts.headers);
    headers::add_ours(&mut parts.headers, from, &aimed.authority(), secure);
    if let Some(host) = host {
        parts.headers.insert(header::HOST, host);
    }
    if !expects {
        parts.headers.remove(header::EXPECT);
    }
    match (wanted, trailers) {
        (Some(protocol), _) => {
            parts.headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
            parts.headers.insert(header::UPGRADE, protocol);
        }
        (None, true) => {
            parts.headers.insert(header::CONNECTION, HeaderValue::from_static("te"));
            parts.headers.insert(header::TE, HeaderValue::from_static("trailers"));
        }
        (None, false) => {}
    }
    let target = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let uri: Uri = target.parse().unwrap_or_default();
    let (word, leave) = leave(expects);
    let (upload, progress) = Upload::new(body, leave);
    let mut request = hyper::Request::new(upload);
    *request.method_mut() = parts.method;
    *request.uri_mut() = uri;
    *request.headers_mut() = parts.headers;
    if let Some(word) = word {
        let word = std::sync::Mutex::new(Some(word));
        hyper::ext::on_informational(&mut request, move |interim| {
            if interim.status() == StatusCode::CONTINUE
                && let Ok(mut word) = word.lock()
            {
                word.take();
            }
        });
    }
    Prepared { request, progress, upgrade }
}

fn expects_continue(headers: &HeaderMap) -> bool {
    headers.get(header::EXPECT).is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

/// What is dropped when the program says `100 Continue`, and what then lets the body be asked for.
fn leave(expects: bool) -> (Option<oneshot::Sender<()>>, Option<BoxFuture<'static, ()>>) {
    if !expects {
        return (None, None);
    }
    let (word, heard) = oneshot::channel::<()>();
    let leave = async move {
        let _ = tokio::time::timeout(CONTINUE, heard).await;
    };
    (Some(word), Some(leave.boxed()))
}

/// Sends a request over a connection that is there, or over a new one.
async fn exchange(
    pool: &Arc<Pool>,
    reached: &Reached,
    key: &Key,
    mut request: hyper::Request<Upload>,
    patience: Option<Instant>,
) -> Result<(hyper::Response<Incoming>, Sender), Broken> {
    let mut only_new = request.headers().contains_key(header::UPGRADE);
    loop {
        let kept = if only_new { None } else { pool.take(key) };
        let Some(mut sender) = kept else {
            let mut sender = connect(reached, patience).await.map_err(Broken::Engine)?;
            let sent = sender.try_send_request(request).await;
            return match sent {
                Ok(response) => Ok((response, sender)),
                Err(error) => Err(Broken::Http(error.into_error())),
            };
        };
        let again = again(&request);
        match sender.try_send_request(request).await {
            Ok(response) => return Ok((response, sender)),
            // The program has closed it meanwhile. What was not sent, or can be sent twice, is sent again.
            Err(mut error) => match (error.take_message(), again) {
                (Some(unsent), _) => request = unsent,
                (None, Some(again)) => {
                    request = again;
                    only_new = true;
                }
                (None, None) => return Err(Broken::Http(error.into_error())),
            },
        }
    }
}

/// A copy of a request that does no harm when it comes twice.
fn again(request: &hyper::Request<Upload>) -> Option<hyper::Request<Upload>> {
    let safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if !safe || !request.body().is_end_stream() {
        return None;
    }
    let mut copy = hyper::Request::new(Upload::none());
    copy.method_mut().clone_from(request.method());
    copy.uri_mut().clone_from(request.uri());
    copy.headers_mut().clone_from(request.headers());
    Some(copy)
}

/// What an upgraded connection lives by.
struct Tunnel {
    over: BoxFuture<'static, ()>,
    gone: watch::Receiver<bool>,
    hold: ActivityHold,
    open: Open,
}

/// Hands the program's agreement on, and carries what follows.
fn switch(mut response: hyper::Response<Incoming>, client: OnUpgrade, tunnel: Tunnel) -> Response {
    let program = hyper::upgrade::on(&mut response);
    let (mut parts, _) = response.into_parts();
    let protocol = parts.headers.get(header::UPGRADE).cloned();
    headers::drop_hop(&mut parts.headers);
    headers::drop_our_cookie(&mut parts.headers);
    parts.headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    if let Some(protocol) = protocol {
        parts.headers.insert(header::UPGRADE, protocol);
    }
    tokio::spawn(async move {
        let Tunnel { over, mut gone, hold, open } = tunnel;
        let carried = async {
            let (client, program) = tokio::try_join!(client, program)?;
            let (mut client, mut program) = (TokioIo::new(client), TokioIo::new(program));
            copy_bidirectional_with_sizes(&mut client, &mut program, BUFFER, BUFFER)
                .await
                .map_err(|error| tracing::debug!(%error, "an upgraded connection broke"))
                .ok();
            Ok::<(), hyper::Error>(())
        };
        tokio::select! {
            carried = carried => if let Err(error) = carried {
                tracing::debug!(%error, "a connection could not be upgraded");
            },
            () = over => {}
            _ = gone.wait_for(|gone| *gone) => {}
        }
        drop((hold, open));
    });
    Response::from_parts(parts, Body::empty())
}
