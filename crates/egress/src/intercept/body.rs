//! Bodies as they pass: counted, frame by frame, never collected.
//!
//! Invariant: a frame goes on as soon as it is there and no frame is held while another waits, so
//! streams stay live, and what is on its way is counted ([`super::budget`]), so memory is bounded; trailers
//! are dropped but for those of gRPC. What hangs on a body (the connection that it comes from, the request's
//! audit line) ends with it.

use std::cell::Cell;
use std::error::Error;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};

use super::budget::{Budget, Room, Tab};
use super::headers::{self, Secrets};
use super::ledger::Ledger;
use super::scan::Busy;
use super::upstream::Lease;

/// Why a body broke off.
pub(super) type Failure = Box<dyn Error + Send + Sync>;

/// Bytes of one request.
#[derive(Debug, Default)]
pub(super) struct Meter {
    pub(super) up: Cell<u64>,
    pub(super) down: Cell<u64>,
    /// Whether the guest's body was read to its end.
    pub(super) sent: Cell<bool>,
}

/// A body of either direction.
#[derive(Debug)]
pub(super) struct Body(Kind);

#[derive(Debug)]
enum Kind {
    Full(Option<Bytes>),
    Up(Box<Up>),
    Down(Box<Down>),
}

/// The guest's body on its way out.
#[derive(Debug)]
struct Up {
    inner: Incoming,
    meter: Rc<Meter>,
    tab: Tab,
}

/// The destination's body on its way in.
#[derive(Debug)]
struct Down {
    /// First, so that it is dropped before what hangs on it.
    inner: Incoming,
    held: Option<Held>,
    tab: Tab,
}

/// What ends with the body of an answer.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) lease: Option<Lease>,
    pub(super) ledger: Ledger,
    pub(super) secrets: Secrets,
    pub(super) busy: Option<Busy>,
    /// Room of the request, and of heads that are larger than usual.
    pub(super) room: Vec<Room>,
}

impl Body {
    pub(super) fn empty() -> Self {
        Self(Kind::Full(None))
    }

    pub(super) fn full(bytes: Bytes) -> Self {
        Self(Kind::Full(Some(bytes).filter(|b| !b.is_empty())))
    }

    pub(super) fn up(inner: Incoming, meter: Rc<Meter>, budget: &Budget) -> Self {
        if inner.is_end_stream() {
            meter.sent.set(true);
            return Self::empty();
        }
        Self(Kind::Up(Box::new(Up { inner, meter, tab: Tab::new(budget) })))
    }

    pub(super) fn down(inner: Incoming, held: Held, budget: &Budget) -> Self {
        let mut down = Down { inner, held: Some(held), tab: Tab::new(budget) };
        down.settle(false);
        Self(Kind::Down(Box::new(down)))
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        if self.inner.is_end_stream() {
            self.meter.sent.set(true);
        }
    }
}

impl Down {
    /// Lets go of what hangs on the body once it is complete.
    fn settle(&mut self, ended: bool) {
        if (ended || self.inner.is_end_stream())
            && let Some(mut held) = self.held.take()
        {
            held.ledger.complete();
            if let Some(lease) = held.lease.take() {
                lease.finish(held.ledger.meter().sent.get());
            }
        }
    }
}

impl Drop for Down {
    fn drop(&mut self) {
        self.settle(false);
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        match &mut self.0 {
            Kind::Full(bytes) => Poll::Ready(bytes.take().map(|b| Ok(Frame::data(b)))),
            Kind::Up(up) => up.poll(cx),
            Kind::Down(down) => down.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Kind::Full(bytes) => bytes.is_none(),
            Kind::Up(up) => up.inner.is_end_stream(),
            Kind::Down(down) => down.inner.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Kind::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64)),
            Kind::Up(up) => up.inner.size_hint(),
            Kind::Down(down) => down.inner.size_hint(),
        }
    }
}

type Polled = Poll<Option<Result<Frame<Bytes>, Failure>>>;

impl Up {
    fn poll(&mut self, cx: &mut Context<'_>) -> Polled {
        loop {
            if self.tab.poll_next(cx).is_pending() {
                return Poll::Pending;
            }
            let polled = Pin::new(&mut self.inner).poll_frame(cx);
            return match polled {
                Poll::Pending => Poll::Pending,
                Poll::Ready(None) => {
                    self.meter.sent.set(true);
                    Poll::Ready(None)
                }
                Poll::Ready(Some(Err(e))) => Poll::Ready(Some(Err(e.into()))),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => {
                        self.meter.up.set(self.meter.up.get() + data.len() as u64);
                        Poll::Ready(Some(Ok(Frame::data(self.tab.hold(data)))))
                    }
                    Err(frame) => match frame.into_trailers() {
                        Ok(trailers) => {
                            let kept = headers::trailers(&trailers, &Secrets::default());
                            if kept.is_empty() {
                                continue;
                            }
                            Poll::Ready(Some(Ok(Frame::trailers(kept))))
                        }
                        Err(_) => continue,
                    },
                },
            };
        }
    }
}

impl Down {
    fn poll(&mut self, cx: &mut Context<'_>) -> Polled {
        loop {
            if self.tab.poll_next(cx).is_pending() {
                return Poll::Pending;
            }
            let polled = Pin::new(&mut self.inner).poll_frame(cx);
            let out = match polled {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => {
                    self.settle(true);
                    return Poll::Ready(None);
                }
                Poll::Ready(Some(Err(e))) => {
                    if let Some(held) = &mut self.held {
                        held.ledger.broke(&e);
                    }
                    return Poll::Ready(Some(Err(e.into())));
                }
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => {
                        if let Some(held) = &self.held {
                            let down = &held.ledger.meter().down;
                            down.set(down.get() + data.len() as u64);
                        }
                        Frame::data(self.tab.hold(data))
                    }
                    Err(frame) => match (frame.into_trailers(), &self.held) {
                        (Ok(trailers), Some(held)) => {
                            let kept = headers::trailers(&trailers, &held.secrets);
                            if kept.is_empty() {
                                continue;
                            }
                            Frame::trailers(kept)
                        }
                        _ => continue,
                    },
                },
            };
            self.settle(false);
            return Poll::Ready(Some(Ok(out)));
        }
    }
}
