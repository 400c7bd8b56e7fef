//! A connection that can be cut from outside.
//!
//! The library owns its stream and ends when that does, so this is how a token's end, a login that takes too long
//! or the engine's end reaches it. Invariant: after the cut nothing is read or written any more. Used by `mod`.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// A stream and the token that cuts it.
#[derive(Debug)]
pub(super) struct Guarded<S> {
    inner: S,
    cut: CancellationToken,
    reading: Pin<Box<WaitForCancellationFutureOwned>>,
    writing: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<S> Guarded<S> {
    pub(super) fn new(inner: S, cut: &CancellationToken) -> Self {
        Self {
            inner,
            cut: cut.clone(),
            reading: Box::pin(cut.clone().cancelled_owned()),
            writing: Box::pin(cut.clone().cancelled_owned()),
        }
    }
}

fn cut_off() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "the connection was cut")
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.reading.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(cut_off()));
        }
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.writing.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(cut_off()));
        }
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.writing.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(cut_off()));
        }
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.cut.is_cancelled() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_cut_wakes_who_reads_and_stops_who_writes() {
        let (near, mut far) = tokio::io::duplex(64);
        let cut = CancellationToken::new();
        let mut guarded = Guarded::new(near, &cut);
        far.write_all(b"hi").await.unwrap();
        let mut got = [0u8; 2];
        guarded.read_exact(&mut got).await.unwrap();
        let reading = tokio::spawn(async move {
            let read = guarded.read(&mut [0u8; 1]).await.map_err(|e| e.kind());
            let written = guarded.write(b"x").await.map_err(|e| e.kind());
            (read, written)
        });
        tokio::task::yield_now().await;
        cut.cancel();
        let aborted = io::ErrorKind::ConnectionAborted;
        assert_eq!(reading.await.unwrap(), (Err(aborted), Err(aborted)));
    }
}
