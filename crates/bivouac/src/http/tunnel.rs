//! Bytes both ways over one HTTP/1.1 connection: `Upgrade: bivouac-tunnel`.
//!
//! Owns: the server's half of the handshake, and the carrying of a connection into a sandbox over it.
//! Invariant: nothing is promised before what lies behind the tunnel is there; a tunnel ends with either of
//! its ends, and with the session. Called by handlers of ports and SSH; the other half is `cli::tunnel`.

use std::future::Future;
use std::io;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bivouac_engine::{Dialed, GuestStream};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes};

use super::error::ApiError;

/// Name of the protocol in `Upgrade`.
pub(crate) const PROTOCOL: &str = "bivouac-tunnel";
/// Bytes in hand for each direction.
const BUFFER: usize = 64 << 10;

/// The server's end of a tunnel.
pub(crate) type Stream = TokioIo<Upgraded>;

/// Agrees to a tunnel. The answer has to go out before the future gives the stream: a task of its own awaits
/// that.
///
/// # Errors
/// 426 for a request that does not ask for one.
pub(crate) fn accept(
    mut request: Request,
) -> Result<(Response, impl Future<Output = io::Result<Stream>> + Send + 'static), ApiError> {
    let asked = request.headers().get(header::UPGRADE).and_then(|value| value.to_str().ok());
    if !asked.is_some_and(|asked| asked.eq_ignore_ascii_case(PROTOCOL)) {
        let message = format!("This path is a tunnel: send 'Upgrade: {PROTOCOL}' over HTTP/1.1.");
        return Err(ApiError::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", message));
    }
    let upgrade = hyper::upgrade::on(&mut request);
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(PROTOCOL));
    let stream = async move { upgrade.await.map(TokioIo::new).map_err(io::Error::other) };
    Ok((response, stream))
}

/// Carries bytes between a tunnel and a connection into a sandbox until both have ended, or the session has.
pub(crate) async fn carry(
    mut stream: impl AsyncRead + AsyncWrite + Unpin + Send,
    dialed: Dialed,
) -> io::Result<()> {
    let Dialed { socket, hold, mut gone } = dialed;
    let mut inside = GuestStream::new(socket)?;
    let carried = tokio::select! {
        carried = copy_bidirectional_with_sizes(&mut stream, &mut inside, BUFFER, BUFFER) => carried.map(drop),
        // Half a connection stays open without end when the other side has been killed.
        _ = gone.wait_for(|gone| *gone) => Ok(()),
    };
    drop(hold);
    carried
}
