//! What a handler leaves of a request's body is read before the answer goes out.
//!
//! Invariant: a client that is still sending sees the answer. One that is cut off while it writes takes
//! that for a broken connection: the official SDK then repeats the call, and never gets to see the 410
//! that lets it resume a sandbox. What is read away is limited in bytes and in time.
//!
//! Called by the router, around every handler.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, BodyDataStream, HttpBody as _};
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::Stream;
use tokio::sync::oneshot;

/// Most bytes that are read away.
const MAX_BYTES: u64 = 1024 * 1024 * 1024;
/// How long that may take.
const MAX_TIME: Duration = Duration::from_secs(30);

/// Lends the body to the handler, and reads what comes back of it.
pub(crate) async fn read_away(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    if body.is_end_stream() {
        return next.run(Request::from_parts(parts, body)).await;
    }
    let asks_first = expects_continue(&parts.headers);
    let (back, mut left) = oneshot::channel();
    let lent = Lent { body: Some(body.into_data_stream()), asked: false, back: Some(back) };
    let response = next.run(Request::from_parts(parts, Body::from_stream(lent))).await;
    if let Ok((body, asked)) = left.try_recv() {
        // Who waits for leave to send has sent nothing, and needs no leave any more.
        if asked || !asks_first {
            let _ = tokio::time::timeout(MAX_TIME, drain(body)).await;
        }
    }
    response
}

fn expects_continue(headers: &HeaderMap) -> bool {
    let value = headers.get(header::EXPECT).and_then(|value| value.to_str().ok());
    value.is_some_and(|value| value.eq_ignore_ascii_case("100-continue"))
}

async fn drain(mut body: BodyDataStream) {
    let mut total = 0;
    while let Some(Ok(piece)) = body.next().await {
        total += piece.len() as u64;
        if total > MAX_BYTES {
            return;
        }
    }
}

/// A body that comes back when it is dropped before its end.
struct Lent {
    body: Option<BodyDataStream>,
    /// Whether anybody asked for its bytes.
    asked: bool,
    back: Option<oneshot::Sender<(BodyDataStream, bool)>>,
}

impl Stream for Lent {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.asked = true;
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let piece = body.poll_next_unpin(context);
        if matches!(piece, Poll::Ready(None | Some(Err(_)))) {
            self.body = None;
        }
        piece
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let (Some(body), Some(back)) = (self.body.take(), self.back.take()) {
            let _ = back.send((body, self.asked));
        }
    }
}

#[cfg(test)]
mod tests;
