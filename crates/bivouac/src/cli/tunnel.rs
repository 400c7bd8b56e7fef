//! The command line's end of a tunnel: bytes both ways over one connection to the engine.
//!
//! Invariant: what is answered is open from end to end; a refusal is the engine's error as of any other call.
//! Used by `forward` and `ssh`. The engine's half is `http::tunnel`.

use tokio::io::{AsyncRead, AsyncWrite};

use super::client::{CallError, Client};

/// Both directions of a tunnel.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

/// An open tunnel. A shutdown of its writing half is seen at the other end.
pub(crate) type Stream = Box<dyn Duplex>;

/// Opens the tunnel at a path below `/api`, in the client's namespace. The path may have a query.
///
/// # Errors
/// What the engine answered, or why it could not be reached.
pub(crate) async fn open(client: &Client, path: &str) -> Result<Stream, CallError> {
    Ok(Box::new(client.upgrade(path, crate::http::TUNNEL).await?))
}
