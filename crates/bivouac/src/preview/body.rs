//! Bodies on their way through, in both directions: as they are, as fast as the slower side.
//!
//! Invariants: a body is neither kept nor changed; one that is not whole ends with an error and not with an end; an
//! answer is cut when its pass is over, and keeps its sandbox from being idle until then. Made by `preview::carry`.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bivouac_engine::ActivityHold;
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::time::Instant;

use super::pool::{Key, Open, Pool, Sender};

/// How far a request's body has come.
#[derive(Debug)]
pub(super) struct Progress {
    last: Mutex<Instant>,
    done: AtomicBool,
}

impl Progress {
    fn touch(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// How long nothing of it has been sent.
    pub(super) fn silent(&self) -> Duration {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }
}

/// The body of a request.
pub(super) struct Upload {
    body: Body,
    /// Nothing is asked of the client before that.
    leave: Option<BoxFuture<'static, ()>>,
    progress: Arc<Progress>,
}

impl Upload {
    /// Takes a body, whose first byte is asked for when `leave` says so.
    pub(super) fn new(body: Body, leave: Option<BoxFuture<'static, ()>>) -> (Self, Arc<Progress>) {
        let done = AtomicBool::new(body.is_end_stream());
        let progress = Arc::new(Progress { last: Mutex::new(Instant::now()), done });
        (Self { body, leave, progress: Arc::clone(&progress) }, progress)
    }

    /// No body.
    pub(super) fn none() -> Self {
        Self::new(Body::empty(), None).0
    }
}

impl HttpBody for Upload {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(leave) = &mut self.leave {
            std::task::ready!(leave.poll_unpin(context));
            self.leave = None;
        }
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(context));
        match &frame {
            Some(Ok(_)) => {
                self.progress.touch();
                if self.body.is_end_stream() {
                    self.progress.done.store(true, Ordering::Release);
                }
            }
            Some(Err(_)) => {}
            None => self.progress.done.store(true, Ordering::Release),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A connection and where it goes when its answer is whole.
pub(super) struct Back {
    pub(super) pool: Arc<Pool>,
    pub(super) key: Key,
    pub(super) sender: Sender,
    pub(super) progress: Arc<Progress>,
}

/// The body of an answer.
pub(super) struct Download {
    body: Incoming,
    back: Option<Back>,
    over: BoxFuture<'static, ()>,
    _hold: ActivityHold,
    _open: Open,
}

impl Download {
    pub(super) fn new(
        body: Incoming,
        back: Back,
        over: BoxFuture<'static, ()>,
        hold: ActivityHold,
        open: Open,
    ) -> Self {
        let mut new = Self { body, back: Some(back), over, _hold: hold, _open: open };
        if new.body.is_end_stream() {
            new.whole();
        }
        new
    }

    /// The connection is free, if the request has gone out whole as well.
    fn whole(&mut self) {
        let Some(Back { pool, key, sender, progress }) = self.back.take() else { return };
        if progress.is_done() {
            pool.give_back(key, sender);
        }
    }
}

impl HttpBody for Download {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.back.is_some() && self.over.poll_unpin(context).is_ready() {
            self.back = None;
            let error = std::io::Error::other("the route was closed");
            return Poll::Ready(Some(Err(axum::Error::new(error))));
        }
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(context));
        match frame {
            Some(Ok(frame)) => {
                if self.body.is_end_stream() {
                    self.whole();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Some(Err(error)) => {
                self.back = None;
                Poll::Ready(Some(Err(axum::Error::new(error))))
            }
            None => {
                self.whole();
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
