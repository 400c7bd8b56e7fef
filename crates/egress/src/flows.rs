//! The table of live flows: what was decided about each, and how to end it.
//!
//! Owns: the generation of the policy in force, the facts of every connection between accept and close,
//! its byte counters, and [`Guest`], the guest's half of a connection. Invariant: a flow whose facts
//! were written under an older policy does not begin ([`FlowGuard::decide`] refuses, and the caller
//! judges again), and a flow that [`Flows::sweep`] cuts has closed its sockets before the returned
//! [`Sweep`] is over. So no flow outlives a policy that forbids it, whatever it was waiting for.
//!
//! Called by [`crate::broker`] for every connection and by [`crate::intercept`] for every request.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::canonical::Name;
use crate::policy::Site;
use crate::reason::Reason;

/// How a connection is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Handling {
    /// Nothing is decided yet: no byte of it has left.
    Judging,
    /// A DNS query over TCP: the stub answers, nothing is dialled.
    Dns,
    /// Everything may pass: to the address that the guest asked for.
    Open,
    /// `subnets.allow` lists the address that the guest asked for.
    Subnet,
    /// Only a catch-all entry lets it through, to the address that the guest asked for.
    Raw,
    /// TLS to a listed name, unseen, to the broker's own resolution of the name.
    Pass,
    /// As [`Handling::Pass`], behind Postgres' request for TLS.
    Postgres,
    /// TLS that the broker ends, because a rule has to see requests.
    Intercept,
    /// Plain HTTP, each request judged by its `Host`.
    PlainHttp,
}

/// What was decided about a connection, and from what.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The address that the guest asked for.
    pub asked: SocketAddr,
    /// The name that decided, when one did.
    pub name: Option<Name>,
    /// What is done.
    pub handling: Handling,
    /// Entry of the policy that decided, as the user wrote it.
    pub entry: Option<Arc<str>>,
    /// Addresses that bytes go to.
    pub dialled: Option<SocketAddr>,
    /// Generation of the policy that decided.
    pub generation: u64,
}

/// A request that is under way on an intercepted connection.
#[derive(Debug, Clone)]
pub struct Ongoing {
    /// The entry that it was judged by.
    pub site: Arc<Site>,
    /// The name that it is for.
    pub name: Name,
    /// The port that it is for.
    pub port: u16,
    /// Number of the rule that acted, from 0.
    pub rule: Option<usize>,
    /// When that rule ends, ms since the epoch.
    pub expires_at: Option<u64>,
    /// Where it was sent.
    pub dialled: Option<IpAddr>,
}

/// The policy changed while it was being asked: judge again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the policy changed while the flow was judged")]
pub struct Stale;

#[derive(Debug)]
struct Entry {
    id: u64,
    facts: RefCell<Facts>,
    ongoing: RefCell<BTreeMap<u64, Ongoing>>,
    next_ongoing: Cell<u64>,
    cut: Cell<Option<Reason>>,
    cut_now: Notify,
    /// Sweeps that wait for this flow to be gone.
    waiting: RefCell<Vec<Rc<Waiting>>>,
    up: Cell<u64>,
    down: Cell<u64>,
    began: Instant,
}

#[derive(Debug, Default)]
struct Waiting {
    left: Cell<usize>,
    gone: Notify,
}

#[derive(Debug, Default)]
struct Table {
    generation: Cell<u64>,
    next: Cell<u64>,
    live: RefCell<BTreeMap<u64, Rc<Entry>>>,
    most: Cell<usize>,
    up: Cell<u64>,
    down: Cell<u64>,
    /// When the first rule ends that a request uses; told to whoever waits for it.
    earliest: Cell<Option<u64>>,
    earlier: Notify,
    /// Told when the last flow has ended.
    emptied: Notify,
}

/// The live flows of a session.
#[derive(Debug, Clone, Default)]
pub struct Flows(Rc<Table>);

impl Flows {
    /// An empty table for at most `most` flows.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let flows = Self::default();
        flows.0.most.set(most);
        flows
    }

    /// Generation of the policy in force.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.0.generation.get()
    }

    /// From now on nothing begins that was judged under an older policy.
    pub fn set_generation(&self, generation: u64) {
        self.0.generation.set(generation);
    }

    /// How many flows live.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.live.borrow().len()
    }

    /// Whether no flow lives.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes from and to the guest since the session began.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.0.up.get(), self.0.down.get())
    }

    /// A number for a flow that is not in the table: one that is refused at once, a query, a datagram.
    pub fn number(&self) -> u64 {
        let id = self.0.next.get() + 1;
        self.0.next.set(id);
        id
    }

    /// Takes a connection in, undecided. `None` when the table is full.
    #[must_use]
    pub fn register(&self, asked: SocketAddr) -> Option<FlowGuard> {
        if self.len() >= self.0.most.get() {
            return None;
        }
        let id = self.number();
        let entry = Rc::new(Entry {
            id,
            facts: RefCell::new(Facts {
                asked,
                name: None,
                handling: Handling::Judging,
                entry: None,
                dialled: None,
                generation: self.generation(),
            }),
            ongoing: RefCell::default(),
            next_ongoing: Cell::new(0),
            cut: Cell::new(None),
            cut_now: Notify::new(),
            waiting: RefCell::default(),
            up: Cell::new(0),
            down: Cell::new(0),
            began: Instant::now(),
        });
        self.0.live.borrow_mut().insert(id, Rc::clone(&entry));
        Some(FlowGuard(Rc::new(Held { entry, table: Rc::clone(&self.0) })))
    }

    /// Resolves when the last of the live flows has ended.
    pub async fn emptied(&self) {
        self.0.emptied.notified().await;
    }

    /// Cuts each flow for which `keep` says no. Flows that are still judged are left: they judge again
    /// when they see the new generation. What is cut is gone when the [`Sweep`] is over.
    pub fn sweep(&self, reason: Reason, keep: &dyn Fn(&Facts, &[Ongoing]) -> bool) -> Sweep {
        let waiting = Rc::new(Waiting::default());
        let live: Vec<_> = self.0.live.borrow().values().map(Rc::clone).collect();
        let mut cut = 0;
        for entry in live {
            let kept = {
                let facts = entry.facts.borrow();
                let ongoing: Vec<_> = entry.ongoing.borrow().values().cloned().collect();
                facts.handling == Handling::Judging || keep(&facts, &ongoing)
            };
            if kept {
                continue;
            }
            cut += u64::from(entry.cut.get().is_none());
            waiting.left.set(waiting.left.get() + 1);
            entry.waiting.borrow_mut().push(Rc::clone(&waiting));
            entry.cut(reason);
        }
        Sweep { cut, waiting }
    }

    /// When the first rule ends that a request under way uses, ms since the epoch. Looks at all flows.
    #[must_use]
    pub fn next_expiry(&self) -> Option<u64> {
        let ends =
            |entry: &Rc<Entry>| entry.ongoing.borrow().values().filter_map(|o| o.expires_at).min();
        let next = self.0.live.borrow().values().filter_map(ends).min();
        self.0.earliest.set(next);
        next
    }

    /// Resolves when a request begins whose rule ends before what [`Flows::next_expiry`] said.
    pub async fn earlier_expiry(&self) {
        self.0.earlier.notified().await;
    }
}

/// A sweep that is under way: what it cut is told to end, and is waited for.
#[derive(Debug)]
pub struct Sweep {
    /// Flows that were cut.
    pub cut: u64,
    waiting: Rc<Waiting>,
}

impl Sweep {
    /// Returns when every flow that was cut has closed its sockets, or says how many have not within
    /// `limit`: that would be a fault of ours, and the caller must not hang on it.
    ///
    /// # Errors
    /// The number of flows that still hold their sockets.
    pub async fn over(self, limit: Duration) -> Result<u64, usize> {
        let wait = async {
            loop {
                let gone = self.waiting.gone.notified();
                if self.waiting.left.get() == 0 {
                    return;
                }
                gone.await;
            }
        };
        match tokio::time::timeout(limit, wait).await {
            Ok(()) => Ok(self.cut),
            Err(_) => Err(self.waiting.left.get()),
        }
    }
}

impl Entry {
    fn cut(&self, reason: Reason) {
        if self.cut.get().is_none() {
            self.cut.set(Some(reason));
        }
        self.cut_now.notify_waiters();
    }
}

/// A live flow. It is in the table until the last clone is dropped; whoever holds sockets of the flow
/// holds a clone, and drops the sockets first.
#[derive(Debug, Clone)]
pub struct FlowGuard(Rc<Held>);

#[derive(Debug)]
struct Held {
    entry: Rc<Entry>,
    table: Rc<Table>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let empty = {
            let mut live = self.table.live.borrow_mut();
            live.remove(&self.entry.id);
            live.is_empty()
        };
        if empty {
            self.table.emptied.notify_one();
        }
        for waiting in self.entry.waiting.borrow_mut().drain(..) {
            waiting.left.set(waiting.left.get() - 1);
            // Only the last one is waited for: a thousand need not wake the sweep a thousand times.
            if waiting.left.get() == 0 {
                waiting.gone.notify_waiters();
            }
        }
    }
}

impl FlowGuard {
    /// The flow's number in this session.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.0.entry.id
    }

    /// Writes down what was decided; from here on a sweep judges the flow by it. Nothing may be dialled
    /// before this succeeds, and everything after it has to end when [`FlowGuard::cut`] does.
    ///
    /// # Errors
    /// [`Stale`] when a newer policy is in force than the one that decided.
    pub fn decide(&self, facts: Facts) -> Result<(), Stale> {
        if facts.generation != self.0.table.generation.get() {
            return Err(Stale);
        }
        *self.0.entry.facts.borrow_mut() = facts;
        Ok(())
    }

    /// The facts as they are now.
    #[must_use]
    pub fn facts(&self) -> Facts {
        self.0.entry.facts.borrow().clone()
    }

    /// Notes where the bytes go.
    pub fn dialled(&self, to: SocketAddr) {
        self.0.entry.facts.borrow_mut().dialled = Some(to);
    }

    /// Notes a request that is under way, until the returned value is dropped. Together with the check
    /// of the generation it is atomic: a request judged under an older policy is refused.
    ///
    /// # Errors
    /// [`Stale`] when a newer policy is in force than `generation`.
    pub fn begin(&self, generation: u64, ongoing: Ongoing) -> Result<InFlight, Stale> {
        let entry = &self.0.entry;
        if generation != self.0.table.generation.get() || entry.cut.get().is_some() {
            return Err(Stale);
        }
        let table = &self.0.table;
        if let Some(end) = ongoing.expires_at
            && table.earliest.get().is_none_or(|earliest| end < earliest)
        {
            table.earliest.set(Some(end));
            table.earlier.notify_one();
        }
        let id = entry.next_ongoing.get() + 1;
        entry.next_ongoing.set(id);
        entry.ongoing.borrow_mut().insert(id, ongoing);
        Ok(InFlight { flow: self.clone(), id })
    }

    /// Resolves when the flow has to end now, with the reason.
    pub async fn cut(&self) -> Reason {
        loop {
            let now = self.0.entry.cut_now.notified();
            if let Some(reason) = self.0.entry.cut.get() {
                return reason;
            }
            now.await;
        }
    }

    /// Why the flow has to end, once it has to.
    #[must_use]
    pub fn is_cut(&self) -> Option<Reason> {
        self.0.entry.cut.get()
    }

    /// Ends the flow from inside.
    pub fn end(&self, reason: Reason) {
        self.0.entry.cut(reason);
    }

    /// Counts bytes from the guest.
    pub fn up(&self, bytes: u64) {
        self.0.entry.up.set(self.0.entry.up.get() + bytes);
        self.0.table.up.set(self.0.table.up.get() + bytes);
    }

    /// Counts bytes to the guest.
    pub fn down(&self, bytes: u64) {
        self.0.entry.down.set(self.0.entry.down.get() + bytes);
        self.0.table.down.set(self.0.table.down.get() + bytes);
    }

    /// Bytes from and to the guest.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.0.entry.up.get(), self.0.entry.down.get())
    }

    /// Since when it lives.
    #[must_use]
    pub fn began(&self) -> Instant {
        self.0.entry.began
    }
}

/// A request that is under way; dropping it ends that.
#[derive(Debug)]
pub struct InFlight {
    flow: FlowGuard,
    id: u64,
}

impl InFlight {
    /// Notes where the request was sent.
    pub fn dialled(&self, to: IpAddr) {
        if let Some(o) = self.flow.0.entry.ongoing.borrow_mut().get_mut(&self.id) {
            o.dialled = Some(to);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.flow.0.entry.ongoing.borrow_mut().remove(&self.id);
    }
}

/// A socket of a flow. When the flow was cut, dropping it sends a reset, so that the other side does
/// not take what it got for the whole.
#[derive(Debug)]
pub struct Socket {
    stream: TcpStream,
    flow: FlowGuard,
}

impl Socket {
    /// A socket of this flow.
    #[must_use]
    pub fn new(stream: TcpStream, flow: FlowGuard) -> Self {
        Self { stream, flow }
    }
}

impl std::ops::Deref for Socket {
    type Target = TcpStream;

    fn deref(&self) -> &TcpStream {
        &self.stream
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.flow.is_cut().is_some() {
            // Fails for a socket that is closed already, which is what is wanted.
            let _ = self.stream.set_zero_linger();
        }
    }
}

/// The guest's half of a connection: first the bytes that were read to classify it, then the socket.
/// Counts what passes. When the flow is cut, reads and writes fail, and dropping it sends a reset.
#[derive(Debug)]
pub struct Guest {
    socket: Socket,
    ahead: Bytes,
    cut: Cutting,
}

/// The wait for the cut, kept over polls.
struct Cutting(Pin<Box<dyn Future<Output = Reason>>>);

impl std::fmt::Debug for Cutting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cutting")
    }
}

impl Guest {
    /// Puts `ahead` before what the socket still brings.
    #[must_use]
    pub fn new(stream: TcpStream, ahead: Bytes, flow: FlowGuard) -> Self {
        Self::from_socket(Socket::new(stream, flow), ahead)
    }

    /// As [`Guest::new`].
    #[must_use]
    pub fn from_socket(socket: Socket, ahead: Bytes) -> Self {
        let waits = socket.flow.clone();
        waits.up(ahead.len() as u64);
        Self { socket, ahead, cut: Cutting(Box::pin(async move { waits.cut().await })) }
    }

    /// The flow.
    #[must_use]
    pub fn flow(&self) -> &FlowGuard {
        &self.socket.flow
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.flow().is_cut().is_some() || self.cut.0.as_mut().poll(cx).is_ready() {
            return Err(io::Error::new(io::ErrorKind::ConnectionReset, "the flow was cut"));
        }
        Ok(())
    }
}

impl AsyncRead for Guest {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_cut(cx)?;
        if !self.ahead.is_empty() {
            let n = self.ahead.len().min(into.remaining());
            into.put_slice(&self.ahead[..n]);
            self.ahead.advance(n);
            return Poll::Ready(Ok(()));
        }
        let before = into.filled().len();
        let polled = Pin::new(&mut self.socket.stream).poll_read(cx, into);
        self.flow().up((into.filled().len() - before) as u64);
        polled
    }
}

impl AsyncWrite for Guest {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_cut(cx)?;
        let polled = Pin::new(&mut self.socket.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(n)) = polled {
            self.flow().down(n as u64);
        }
        polled
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_cut(cx)?;
        let polled = Pin::new(&mut self.socket.stream).poll_write_vectored(cx, bufs);
        if let Poll::Ready(Ok(n)) = polled {
            self.flow().down(n as u64);
        }
        polled
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket.stream).poll_shutdown(cx)
    }
}
