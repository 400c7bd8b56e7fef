//! WebSockets: the handshake is a request like any other, what follows is relayed unseen.
//!
//! Invariant: nothing is relayed before the destination has answered with a valid 101 for the very key
//! that the guest sent (RFC 9931: bytes that come earlier wait, and are dropped when there is none); any
//! other answer closes the connection. Cases 36, 60 and 61 of reference/egress.md §2. Called by
//! [`super::pipeline`] for the handshake, by [`super::connection`] for what follows.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, Bytes};
use http::header::{self, HeaderMap, HeaderValue};
use http::request::Parts;
use http::{Response, StatusCode};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;

use super::body::{Body, Held};
use super::budget::{Room, UPSTREAM};
use super::headers;
use super::ledger::{Ledger, describe};
use super::pipeline::{Answer, Out, Visit, in_time, no_room, note_dialled, pass, shape_upgrade};
use super::refuse::Refusal;
use super::upstream::{self, Stream, failed};
use crate::reason::Reason;

/// What RFC 6455 appends to the key.
const SUFFIX: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
/// Buffer of each direction.
const BUFFER: usize = 16 * 1024;

type Upstream = http1::Parts<TokioIo<Box<dyn Stream>>>;

/// A destination that has agreed to go on as a WebSocket.
pub(super) struct Tunnel {
    upstream: oneshot::Receiver<Upstream>,
    _room: Room,
    ledger: Ledger,
}

impl std::fmt::Debug for Tunnel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tunnel").finish_non_exhaustive()
    }
}

/// Hands the handshake on.
pub(super) async fn open(
    visit: &Rc<Visit>,
    parts: &Parts,
    mut out: Out,
    held: &mut Held,
) -> Result<Answer, Refusal> {
    let accept = accept_key(&parts.headers)?;
    let room = visit.context.budget.room(2 * BUFFER + UPSTREAM).ok_or_else(no_room)?;
    out.key.http1 = true;
    out.headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    out.headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    let wire = upstream::wire(&visit.context, &out.key).await?;
    note_dialled(visit, held, wire.address)?;
    let broken = |e: hyper::Error| failed(Reason::UpstreamProtocol, describe(&e));
    let (mut sender, connection) =
        http1::handshake::<_, Body>(TokioIo::new(wire.stream)).await.map_err(broken)?;
    let (done, upstream) = oneshot::channel();
    // Ends with the guest's connection.
    visit.tasks.spawn(async move {
        if let Ok(parts) = connection.without_shutdown().await {
            let _ = done.send(parts);
        }
    });
    let (request, flood) = shape_upgrade(&out)?;
    let response = in_time(&flood, sender.send_request(request)).await?.map_err(broken)?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return pass(response, held).map(Answer::Passed);
    }
    let given = response.headers();
    let named = given.get(header::UPGRADE).map(HeaderValue::as_bytes);
    let websocket = named.is_some_and(|v| v.eq_ignore_ascii_case(b"websocket"));
    let mut keys = given.get_all(header::SEC_WEBSOCKET_ACCEPT).iter();
    let right = keys.next().is_some_and(|k| *k == accept) && keys.next().is_none();
    if !websocket || !right {
        let what = "the destination's answer to the WebSocket handshake is not valid";
        return Err(failed(Reason::UpstreamProtocol, what));
    }
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    *answer.headers_mut() = switched(given, held);
    let busy = held.busy.take();
    let mut ledger = Ledger::new(&visit.context, &visit.flow, 0);
    std::mem::swap(&mut ledger, &mut held.ledger);
    held.ledger.forget();
    ledger.note(|line| line.status = Some(101));
    *visit.tunnel.borrow_mut() = Some(Tunnel { upstream, ledger, _room: room });
    drop(busy);
    Ok(Answer::Made(answer))
}

fn switched(given: &HeaderMap, held: &Held) -> HeaderMap {
    let mut headers = headers::response(given, &held.secrets);
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers
}

fn accept_key(headers: &HeaderMap) -> Result<String, Refusal> {
    let key = headers
        .get(header::SEC_WEBSOCKET_KEY)
        .map(HeaderValue::as_bytes)
        .filter(|k| STANDARD.decode(k).is_ok_and(|raw| raw.len() == 16))
        .ok_or_else(|| Refusal::invalid("Sec-WebSocket-Key is not 16 bytes in Base64"))?;
    let mut hash = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA1_FOR_LEGACY_USE_ONLY);
    hash.update(key);
    hash.update(SUFFIX);
    Ok(STANDARD.encode(hash.finish().as_ref()))
}

impl Tunnel {
    /// Relays until either side has ended and the other has been told.
    pub(super) async fn relay<S: Stream>(self, guest: S, ahead: Bytes) {
        let Self { upstream, mut ledger, _room } = self;
        let Ok(upstream) = upstream.await else {
            ledger.note(|line| {
                line.error = Some("the destination closed after its answer".to_owned())
            });
            ledger.complete();
            return;
        };
        let meter = Rc::clone(ledger.meter());
        let (up, down) = (Rc::clone(&meter), meter);
        let mut guest = Counted { inner: guest, ahead, count: Box::new(move |n| add(&up.up, n)) };
        let mut far = Counted {
            inner: upstream.io.into_inner(),
            ahead: upstream.read_buf,
            count: Box::new(move |n| add(&down.down, n)),
        };
        let ended =
            tokio::io::copy_bidirectional_with_sizes(&mut guest, &mut far, BUFFER, BUFFER).await;
        if let Err(e) = ended {
            ledger.note(|line| line.error = Some(e.to_string()));
        }
        if ledger.flow_is_whole() {
            ledger.complete();
        }
    }
}

fn add(to: &std::cell::Cell<u64>, n: usize) {
    to.set(to.get() + n as u64);
}

/// A stream whose bytes are counted, with some that were read before.
struct Counted<S> {
    inner: S,
    ahead: Bytes,
    count: Box<dyn Fn(usize)>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if !self.ahead.is_empty() {
            let n = self.ahead.len().min(into.remaining());
            into.put_slice(&self.ahead[..n]);
            self.ahead.advance(n);
            (self.count)(n);
            return Poll::Ready(Ok(()));
        }
        let before = into.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(cx, into);
        (self.count)(into.filled().len() - before);
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
