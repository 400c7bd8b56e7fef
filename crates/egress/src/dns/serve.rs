//! Brings the guest's messages to the stub and its answers back.
//!
//! Invariant: bounded in messages under way, connections, bytes of a message and time between them.
//! A lookup that waits for a name server holds up nobody else's.
//!
//! Called by `broker`, for port 53 of every address.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::stub::{Stub, Transport};
use crate::broker::Datagrams;

/// Longest message of a guest. A query is short; the rest is padding.
const MESSAGE: usize = 4096;
/// Queries that wait for a name server, by datagram.
const WAITING: usize = 256;
/// How long a connection may be silent, or be slow to take an answer.
const IDLE: Duration = Duration::from_secs(10);
/// Messages of one connection.
const PER_CONNECTION: usize = 1000;

/// Answers datagrams for ever, or until the socket fails.
///
/// # Errors
/// Of the socket, when it cannot be received from any more.
pub async fn serve_udp(stub: Rc<Stub>, datagrams: Rc<dyn Datagrams>) -> io::Result<()> {
    let waiting = Arc::new(Semaphore::new(WAITING));
    let mut buffer = vec![0; MESSAGE];
    loop {
        // A guest that asks without end must not keep the thread from everything else: a new policy, say.
        tokio::task::consume_budget().await;
        let got = crate::broker::receive(&*datagrams, &mut buffer).await?;
        let Some(message) = buffer.get(..got.len) else { continue };
        // An own copy: the answer may have to wait, the buffer may not.
        let message = message.to_vec();
        let stub = Rc::clone(&stub);
        let mut answering: Pin<Box<dyn Future<Output = Option<Vec<u8>>>>> =
            Box::pin(async move { stub.answer(&message, Transport::Datagram).await });
        // What is known or denied is answered at once and costs no task.
        match futures_util::poll!(answering.as_mut()) {
            Poll::Ready(answer) => reply(&*datagrams, answer, got.from, got.to),
            Poll::Pending => {
                // Too many wait already: the client asks again.
                let Ok(slot) = Arc::clone(&waiting).try_acquire_owned() else { continue };
                let datagrams = Rc::clone(&datagrams);
                tokio::task::spawn_local(async move {
                    let answer = answering.await;
                    reply(&*datagrams, answer, got.from, got.to);
                    drop(slot);
                });
            }
        }
    }
}

fn reply(datagrams: &dyn Datagrams, answer: Option<Vec<u8>>, guest: SocketAddr, asked: SocketAddr) {
    let Some(answer) = answer else { return };
    if let Err(error) = datagrams.send(&answer, guest, asked) {
        tracing::debug!(%error, "a DNS answer was not sent to the sandbox");
    }
}

/// Answers the messages of one connection to port 53, in order, until it ends or is idle.
///
/// # Errors
/// Of the connection; for the caller's line, there is nothing to do about it.
pub async fn serve_tcp(
    stub: &Stub,
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
) -> io::Result<()> {
    for _ in 0..PER_CONNECTION {
        let message = match timeout(IDLE, read(&mut stream)).await {
            Ok(message) => message?,
            Err(_) => return Ok(()),
        };
        let Some(message) = message else { return Ok(()) };
        let Some(answer) = stub.answer(&message, Transport::Stream).await else {
            return Ok(());
        };
        let length = u16::try_from(answer.len()).map_err(io::Error::other)?;
        let mut bytes = length.to_be_bytes().to_vec();
        bytes.extend(answer);
        match timeout(IDLE, stream.write_all(&bytes)).await {
            Ok(written) => written?,
            Err(_) => return Ok(()),
        }
    }
    Ok(())
}

/// The next message; none at the end of the stream, or when it is longer than any query.
async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let length = match stream.read_u16().await {
        Ok(length) => usize::from(length),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    if length > MESSAGE {
        return Ok(None);
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await?;
    Ok(Some(message))
}
