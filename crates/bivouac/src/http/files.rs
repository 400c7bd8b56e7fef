//! Files through HTTP: bodies of any size that are never held in memory.
//!
//! Owns: the copying between a body and the pipes of the runtime. Invariant: whoever cannot go on
//! ends both sides: a client that leaves ends the write, a sandbox that refuses ends the copying
//! (what is left of the body is `unread`'s), and a read that breaks off breaks the body off, so that
//! nobody takes a part for the whole.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bivouac_engine::{Error, FileReader, FileWriter};
use bivouac_runtime::RuntimeError;
use bytes::Bytes;
use futures_util::stream::{self, Stream};
use http_body_util::BodyExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe;

use super::error::ApiError;

/// Longest silence of a client in the middle of an upload.
const IDLE: Duration = Duration::from_secs(300);
/// One piece of a download: what a pipe holds.
const PIECE: usize = 64 * 1024;

/// Why the copying of a body ended early.
enum Broken {
    /// The sandbox's side does not take more; it knows why.
    Sandbox,
    /// The client's side.
    Client(ApiError),
}

/// Streams an archive into a sandbox; answers when it is written there.
pub(crate) async fn upload(mut body: Body, writer: FileWriter) -> Result<(), ApiError> {
    let FileWriter { data, done } = writer;
    let pipe = pipe::Sender::from_owned_fd(data).map_err(|e| host("open the pipe", e))?;
    let done = done.wait();
    tokio::pin!(done);
    // Both sides at once: a refusal must not wait for a client that waits for an answer.
    let outcome = tokio::select! {
        copied = copy(&mut body, pipe) => match copied {
            Ok(()) | Err(Broken::Sandbox) => done.await,
            // The pipe is closed by now: the archive ends in the middle, which undoes nothing and
            // is an error of its own; the client's is the one to tell.
            Err(Broken::Client(error)) => {
                let _ = done.await;
                return Err(error);
            }
        },
        result = &mut done => result,
    };
    outcome.map_err(refuse)
}

/// Streams a body into a pipe that `work` reads, and answers what that has made of it.
pub(crate) async fn pour<T>(
    mut body: Body,
    data: OwnedFd,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, ApiError> {
    let pipe = pipe::Sender::from_owned_fd(data).map_err(|e| host("open the pipe", e))?;
    tokio::pin!(work);
    let outcome = tokio::select! {
        copied = copy(&mut body, pipe) => match copied {
            Ok(()) | Err(Broken::Sandbox) => work.await,
            // What has come is not whole, and `work` has seen its end: the client's error is the one to tell.
            Err(Broken::Client(error)) => {
                let _ = work.await;
                return Err(error);
            }
        },
        result = &mut work => result,
    };
    Ok(outcome?)
}

async fn copy(body: &mut Body, mut pipe: pipe::Sender) -> Result<(), Broken> {
    loop {
        let Ok(frame) = tokio::time::timeout(IDLE, body.frame()).await else {
            let message = format!("The upload was silent for {} s.", IDLE.as_secs());
            let error = ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message);
            return Err(Broken::Client(error));
        };
        let data = match frame {
            None => return Ok(()),
            Some(Ok(frame)) => frame.into_data(),
            Some(Err(_)) => {
                let message = "The upload ended before its end.";
                return Err(Broken::Client(ApiError::invalid(message)));
            }
        };
        if let Ok(data) = data
            && pipe.write_all(&data).await.is_err()
        {
            return Err(Broken::Sandbox);
        }
    }
}

fn refuse(error: RuntimeError) -> ApiError {
    Error::from(error).into()
}

fn host(what: &str, source: io::Error) -> ApiError {
    refuse(RuntimeError::Io { what: what.to_owned(), source })
}

/// Streams a file out of a sandbox.
pub(crate) fn download(reader: FileReader) -> Result<Response, ApiError> {
    // Without a length: files of /proc have none, and a file may grow or shrink while it is read.
    // A body that breaks off is told by its framing.
    let mut response = Body::from_stream(pieces(reader)?).into_response();
    let kind = HeaderValue::from_static("application/octet-stream");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}

fn pieces(
    reader: FileReader,
) -> Result<impl Stream<Item = Result<Bytes, io::Error>> + Send, ApiError> {
    let FileReader { data, done, .. } = reader;
    let pipe = pipe::Receiver::from_owned_fd(data).map_err(|e| host("open the pipe", e))?;
    Ok(stream::unfold(Some((pipe, done)), |state| async move {
        let (mut pipe, done) = state?;
        let mut piece = Vec::with_capacity(PIECE);
        match pipe.read_buf(&mut piece).await {
            Ok(0) => match done.wait().await {
                Ok(()) => None,
                Err(error) => Some((Err(broken_off(&error)), None)),
            },
            Ok(_) => Some((Ok(piece.into()), Some((pipe, done)))),
            Err(error) => Some((Err(error), None)),
        }
    }))
}

fn broken_off(error: &RuntimeError) -> io::Error {
    tracing::warn!(%error, "a file broke off while it was read out of a sandbox");
    io::Error::other("the file broke off")
}

#[cfg(test)]
mod tests;
