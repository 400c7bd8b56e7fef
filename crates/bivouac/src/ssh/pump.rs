//! Bytes between a channel and what is inside: pipes, sockets.
//!
//! Invariants: what is sent waits for the channel's window, so nothing piles up here; the end of one direction is
//! told and leaves the other open; a channel that is gone ends both. Used by `session` and `forward`.

use std::io;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use russh::server::Msg;
use russh::{ChannelId, ChannelWriteHalf};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::feed::{Feed, Feeds};

/// Bytes that are read at once.
const PIECE: usize = 32 << 10;
/// Below so much room another piece is made.
const LEAST: usize = 4 << 10;

/// A channel's both directions; with it goes its feed.
#[derive(Debug)]
pub(super) struct Line {
    feeds: Arc<Feeds>,
    pub(super) feed: Arc<Feed>,
    write: ChannelWriteHalf<Msg>,
}

impl Drop for Line {
    fn drop(&mut self) {
        self.feeds.forget(self.write.id());
    }
}

/// Which of a command's outputs it is, as SSH numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    /// Standard output.
    Plain,
    /// Standard error.
    Error,
}

/// The channel is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Closed;

impl Line {
    /// Takes the writing half of a channel whose data the handler puts into feeds.
    pub(super) fn new(feeds: &Arc<Feeds>, write: ChannelWriteHalf<Msg>) -> Self {
        let feed = feeds.of(write.id());
        Self { feeds: Arc::clone(feeds), feed, write }
    }

    pub(super) fn id(&self) -> ChannelId {
        self.write.id()
    }

    /// Sends, as the client's window lets it.
    pub(super) async fn send(&self, output: Output, data: Bytes) -> Result<(), Closed> {
        let sent = async {
            match output {
                Output::Plain => self.write.data_bytes(data).await,
                Output::Error => self.write.extended_data_bytes(1, data).await,
            }
        };
        tokio::select! {
            sent = sent => sent.map_err(|_| Closed),
            () = self.feed.closed() => Err(Closed),
        }
    }

    /// Sends all that comes, until it ends.
    pub(super) async fn send_all(
        &self,
        output: Output,
        mut from: impl AsyncRead + Unpin,
    ) -> Result<(), Closed> {
        let mut room = BytesMut::with_capacity(PIECE);
        loop {
            if room.capacity() - room.len() < LEAST {
                room.reserve(PIECE);
            }
            let read = tokio::select! {
                read = from.read_buf(&mut room) => read,
                () = self.feed.closed() => return Err(Closed),
            };
            // A socket that the other side has reset has said all that it will.
            let Ok(1..) = read else { return Ok(()) };
            self.send(output, room.split().freeze()).await?;
        }
    }

    /// Hands on all that the client sends, until it ends; what cannot be handed on is taken for nothing.
    pub(super) async fn take_all(&self, mut to: impl AsyncWrite + Unpin) {
        let giving = async {
            while let Some(data) = self.feed.next().await {
                to.write_all(&data).await?;
            }
            to.shutdown().await
        };
        let given: io::Result<()> = tokio::select! {
            given = giving => given,
            () = self.feed.abandoned() => Ok(()),
        };
        drop(to);
        if given.is_err() {
            self.feed.discard().await;
        }
    }

    /// Carries both directions until both have ended or the channel is gone, and closes it.
    pub(super) async fn carry(
        self,
        from: impl AsyncRead + Unpin,
        to: impl AsyncWrite + Unpin,
    ) -> Self {
        let out = async {
            if self.send_all(Output::Plain, from).await.is_ok() {
                let _ = self.write.eof().await;
            }
        };
        tokio::join!(out, self.take_all(to));
        self
    }

    /// Tells the client how a command ended, and closes the channel.
    pub(super) async fn exit(self, status: u32) {
        let told = async {
            self.write.eof().await?;
            self.write.exit_status(status).await?;
            self.write.close().await
        };
        tokio::select! {
            _ = told => {}
            () = self.feed.closed() => {}
        }
    }

    /// Closes the channel.
    pub(super) async fn close(self) {
        tokio::select! {
            _ = self.write.close() => {}
            () = self.feed.closed() => {}
        }
    }
}
