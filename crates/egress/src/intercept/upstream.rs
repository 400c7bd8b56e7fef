//! Connections to destinations: made, verified, kept for a moment, never shared across credentials.
//!
//! Owns the pool of one session. Invariant: a connection is used again only for the same host, port,
//! policy generation and credential values that it was made for; TLS is verified for the host's name,
//! and a failure of it ends the request. Called by [`super::pipeline`] and [`super::upgrade`].

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bivouac_types::id::ValueId;
use http::StatusCode;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsConnector;

use super::body::Body;
use super::budget::{FRAME, Room, TLS_KEPT, UPSTREAM};
use super::check::Scheme;
use super::interim::Interim;
use super::ledger::describe;
use super::pipeline::no_room;
use super::refuse::Refusal;
use super::{Connect, Interception};
use crate::canonical::Host;
use crate::reason::Reason;

/// How long a connection is kept when nobody uses it, and how many are.
const IDLE: Duration = Duration::from_secs(30);
const MOST_IDLE: usize = 64;
/// How long TLS may take.
const TLS_TIME: Duration = Duration::from_secs(10);
/// Longest head of an answer.
const MAX_HEAD: usize = 128 * 1024;
/// Room for one stream, and for all of a connection, in bytes.
/// Guests that do not read keep their streams' part of the connection's room.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOWS: &[(u32, usize)] =
    &[(4 * 1024 * 1024, 25), (1024 * 1024, 50), (65_535, 100)];

/// What a connection may be used for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) host: Host,
    pub(super) port: u16,
    pub(super) scheme: &'static str,
    pub(super) http1: bool,
    /// Addresses that a newer policy denies must not be reached through an old connection.
    pub(super) generation: u64,
    /// Values that requests on it carry, with their versions.
    pub(super) credential: Vec<(ValueId, u64)>,
    /// The proxy of a forward rule gets its connection to itself.
    pub(super) forward: bool,
}

/// Runs a session's futures in its thread and ends them with itself.
#[derive(Debug, Clone, Default)]
pub(super) struct Tasks(Rc<RefCell<JoinSet<()>>>);

impl Tasks {
    pub(super) fn spawn(&self, future: impl Future<Output = ()> + 'static) -> AbortHandle {
        let mut set = self.0.borrow_mut();
        while set.try_join_next().is_some() {}
        set.spawn_local(future)
    }
}

impl<F: Future<Output = ()> + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, future: F) {
        self.spawn(future);
    }
}

/// Either side of TLS: what a destination's connection is read and written through.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

/// A connection to a destination, not yet spoken over.
pub(super) struct Wire {
    pub(super) stream: Box<dyn Stream>,
    pub(super) address: SocketAddr,
    pub(super) http2: bool,
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("address", &self.address).finish_non_exhaustive()
    }
}

/// A destination's stream, read in small parts, so that frames have a bound.
struct Small<S>(S);

impl<S: AsyncRead + Unpin> AsyncRead for Small<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let most = into.remaining().min(FRAME);
        let mut part = ReadBuf::new(into.initialize_unfilled_to(most));
        let polled = Pin::new(&mut self.0).poll_read(cx, &mut part);
        let n = part.filled().len();
        into.advance(n);
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Small<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// Connects, and verifies.
pub(super) async fn wire(context: &Interception, key: &Key) -> Result<Wire, Refusal> {
    let connect: &dyn Connect = &*context.setup.connect;
    let connected = connect.to(&key.host, key.port).await;
    let (tcp, address) = connected.map_err(|(reason, message)| unreachable(reason, message))?;
    // Small requests must not wait for the answer to the one before.
    let _ = tcp.set_nodelay(true);
    if key.scheme == Scheme::Http.as_str() {
        return Ok(Wire { stream: Box::new(Small(tcp)), address, http2: false });
    }
    tls(context, key, tcp, address).await
}

async fn tls(
    context: &Interception,
    key: &Key,
    tcp: TcpStream,
    address: SocketAddr,
) -> Result<Wire, Refusal> {
    let config = context
        .setup
        .roots
        .client_config(key.http1)
        .map_err(|e| failed(Reason::UpstreamTls, e.to_string()))?;
    let name = match &key.host {
        Host::Name(name) => ServerName::try_from(name.as_str().to_owned())
            .map_err(|e| failed(Reason::UpstreamTls, e.to_string()))?,
        Host::Ip(ip) => ServerName::IpAddress((*ip).into()),
    };
    let handshake = TlsConnector::from(config).connect(name, tcp);
    let mut stream = match tokio::time::timeout(TLS_TIME, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(e)) => {
            let what = format!("TLS with {} failed: {}", host_text(&key.host), describe(&e));
            return Err(failed(Reason::UpstreamTls, what)
                .hint("the destination's certificate has to be good for its name; the firewall never goes on without"));
        }
        Err(_) => {
            let what = format!("{} did not answer to TLS in time", host_text(&key.host));
            return Err(failed(Reason::UpstreamTls, what));
        }
    };
    stream.get_mut().1.set_buffer_limit(Some(TLS_KEPT));
    let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    Ok(Wire { stream: Box::new(Small(stream)), address, http2 })
}

fn host_text(host: &Host) -> String {
    match host {
        Host::Name(name) => name.to_string(),
        Host::Ip(ip) => ip.to_string(),
    }
}

/// Something that was allowed failed on the way.
pub(super) fn failed(reason: Reason, message: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::BAD_GATEWAY, reason, message)
}

fn unreachable(reason: Reason, message: String) -> Refusal {
    let status = match reason {
        Reason::AddressForbidden | Reason::NameResolvesForbidden | Reason::SubnetDenied => {
            StatusCode::FORBIDDEN
        }
        _ => StatusCode::BAD_GATEWAY,
    };
    Refusal::new(status, reason, message)
}

/// Who can send a request.
enum Sender {
    Http1(http1::SendRequest<Body>),
    Http2(http2::SendRequest<Body>),
}

struct Idle {
    sender: http1::SendRequest<Body>,
    task: AbortHandle,
    address: SocketAddr,
    since: Instant,
}

struct Shared {
    sender: http2::SendRequest<Body>,
    address: SocketAddr,
    /// When it was last given out, and to how many it is now.
    since: Cell<Instant>,
    users: Rc<Cell<usize>>,
    /// How many may have their whole window unread before the others have none.
    most: usize,
}

/// The connections of a session.
#[derive(Default)]
pub(super) struct Pool {
    tasks: Tasks,
    idle: RefCell<HashMap<Key, Vec<Idle>>>,
    shared: RefCell<HashMap<Key, Shared>>,
    /// Connections that are being made, so that requests which come together share one of HTTP/2.
    making: RefCell<HashMap<Key, Rc<Notify>>>,
    reaping: Cell<bool>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}

/// A connection that a request has for itself, or a place on one of HTTP/2.
pub(super) struct Lease {
    sender: Option<Sender>,
    key: Key,
    pub(super) address: SocketAddr,
    /// Whether it was used before: then it may be found closed.
    pub(super) reused: bool,
    task: Option<AbortHandle>,
    users: Option<Rc<Cell<usize>>>,
    pool: Weak<Pool>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Lease {
    pub(super) fn http2(&self) -> bool {
        matches!(self.sender, Some(Sender::Http2(_)))
    }

    /// Sends, and waits for the head of the answer. What was not sent comes back.
    pub(super) async fn send(
        &mut self,
        request: http::Request<Body>,
    ) -> Result<http::Response<hyper::body::Incoming>, (hyper::Error, Option<http::Request<Body>>)>
    {
        let sent = match &mut self.sender {
            Some(Sender::Http1(sender)) => sender.try_send_request(request).await,
            Some(Sender::Http2(sender)) => sender.try_send_request(request).await,
            None => unreachable!("a lease has its sender until it is finished"),
        };
        sent.map_err(|mut e| {
            let request = e.take_message();
            (e.into_error(), request)
        })
    }

    /// The answer is complete; `sent` says that the request is too, so that the connection is between two
    /// messages and can be used again.
    pub(super) fn finish(mut self, sent: bool) {
        let Some(pool) = self.pool.upgrade() else { return };
        if sent
            && let Some(Sender::Http1(sender)) = self.sender.take()
            && let Some(task) = self.task.take()
        {
            pool.keep(self.key.clone(), sender, task, self.address);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A connection in the middle of a message is good for nothing, and may be stuck.
        if let Some(task) = self.task.take() {
            task.abort();
        }
        if let Some(users) = &self.users {
            users.set(users.get() - 1);
        }
    }
}

impl Pool {
    /// A connection for this key: one that waits, or a new one.
    pub(super) async fn lease(
        self: &Rc<Self>,
        context: &Interception,
        key: &Key,
        fresh: bool,
    ) -> Result<Lease, Refusal> {
        loop {
            if !fresh && let Some(lease) = self.waiting(key).await {
                return Ok(lease);
            }
            // Where HTTP/2 is spoken, whoever comes while the first connection is made waits for it.
            let making = self.making.borrow().get(key).map(Rc::clone);
            if let Some(making) = making.filter(|_| !fresh) {
                let made = making.notified();
                if self.making.borrow().contains_key(key) {
                    made.await;
                    if !self.shared.borrow().contains_key(key) {
                        return self.make(context, key).await;
                    }
                }
                continue;
            }
            let mark = Making::new(self, key);
            let made = self.make(context, key).await;
            drop(mark);
            return made;
        }
    }

    async fn waiting(self: &Rc<Self>, key: &Key) -> Option<Lease> {
        if let Some(shared) = self.shared.borrow().get(key)
            && !shared.sender.is_closed()
            && shared.users.get() < shared.most
        {
            shared.since.set(Instant::now());
            return Some(self.place(key, shared));
        }
        self.shared.borrow_mut().remove(key);
        loop {
            let mut idle = {
                let mut all = self.idle.borrow_mut();
                let of_key = all.get_mut(key)?;
                let Some(idle) = of_key.pop() else {
                    all.remove(key);
                    return None;
                };
                idle
            };
            // Its last message may be a moment from its end.
            let ready = tokio::time::timeout(Duration::from_millis(200), idle.sender.ready()).await;
            if matches!(ready, Ok(Ok(()))) && idle.since.elapsed() < IDLE {
                return Some(Lease {
                    sender: Some(Sender::Http1(idle.sender)),
                    key: key.clone(),
                    address: idle.address,
                    reused: true,
                    task: Some(idle.task),
                    users: None,
                    pool: Rc::downgrade(self),
                });
            }
            idle.task.abort();
        }
    }

    fn place(self: &Rc<Self>, key: &Key, shared: &Shared) -> Lease {
        shared.users.set(shared.users.get() + 1);
        Lease {
            sender: Some(Sender::Http2(shared.sender.clone())),
            key: key.clone(),
            address: shared.address,
            reused: true,
            task: None,
            users: Some(Rc::clone(&shared.users)),
            pool: Rc::downgrade(self),
        }
    }

    async fn make(self: &Rc<Self>, context: &Interception, key: &Key) -> Result<Lease, Refusal> {
        let room = self.room(context).await?;
        let wire = wire(context, key).await?;
        let address = wire.address;
        let broken = |e: hyper::Error| failed(Reason::UpstreamProtocol, describe(&e));
        if wire.http2 {
            let window = context.budget.window(0, CONNECTION_WINDOWS).ok_or_else(no_room)?;
            let most_window = window.1;
            let io = TokioIo::new(Interim::new(wire.stream));
            let (sender, connection) = http2::Builder::new(self.tasks.clone())
                .timer(TokioTimer::new())
                .initial_stream_window_size(STREAM_WINDOW.min(window.1))
                .initial_connection_window_size(window.1)
                .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
                .keep_alive_interval(Duration::from_secs(30))
                .keep_alive_timeout(Duration::from_secs(20))
                .handshake(io)
                .await
                .map_err(broken)?;
            self.tasks.spawn(async move {
                let _room = (room, window);
                let _ = connection.await;
            });
            let most = (most_window / STREAM_WINDOW).max(1) as usize;
            let (since, users) = (Cell::new(Instant::now()), Rc::default());
            let shared = Shared { sender, address, since, users, most };
            let mut lease = self.place(key, &shared);
            lease.reused = false;
            self.shared.borrow_mut().insert(key.clone(), shared);
            self.reap();
            return Ok(lease);
        }
        let io = TokioIo::new(wire.stream);
        let (sender, connection) =
            http1::Builder::new().max_buf_size(MAX_HEAD).handshake(io).await.map_err(broken)?;
        let task = self.tasks.spawn(async move {
            let _room = room;
            let _ = connection.await;
        });
        Ok(Lease {
            sender: Some(Sender::Http1(sender)),
            key: key.clone(),
            address,
            reused: false,
            task: Some(task),
            users: None,
            pool: Rc::downgrade(self),
        })
    }

    /// Room for one more connection; those that nobody uses make some.
    async fn room(&self, context: &Interception) -> Result<Room, Refusal> {
        if let Some(room) = context.budget.room(UPSTREAM) {
            return Ok(room);
        }
        self.trim();
        // What is ended lets go in its own turn.
        tokio::task::yield_now().await;
        context.budget.room(UPSTREAM).ok_or_else(no_room)
    }

    fn keep(
        self: &Rc<Self>,
        key: Key,
        sender: http1::SendRequest<Body>,
        task: AbortHandle,
        address: SocketAddr,
    ) {
        let mut idle = self.idle.borrow_mut();
        if idle.values().map(Vec::len).sum::<usize>() >= MOST_IDLE {
            task.abort();
            return;
        }
        idle.entry(key).or_default().push(Idle { sender, task, address, since: Instant::now() });
        drop(idle);
        self.reap();
    }

    /// Ends what nobody uses. There is no timer when there is nothing to end.
    fn reap(self: &Rc<Self>) {
        if self.reaping.replace(true) {
            return;
        }
        let pool = Rc::downgrade(self);
        self.tasks.spawn(async move {
            loop {
                tokio::time::sleep(IDLE / 3).await;
                let Some(pool) = pool.upgrade() else { return };
                if pool.sweep(IDLE) {
                    pool.reaping.set(false);
                    return;
                }
            }
        });
    }

    /// Ends what has not been used for so long; answers whether nothing is left.
    fn sweep(&self, age: Duration) -> bool {
        let mut idle = self.idle.borrow_mut();
        idle.retain(|_, of_key| {
            of_key.retain(|one| {
                let keep = one.since.elapsed() < age && !one.sender.is_closed();
                if !keep {
                    one.task.abort();
                }
                keep
            });
            !of_key.is_empty()
        });
        let mut shared = self.shared.borrow_mut();
        // Dropping the sender lets the streams on it end, and then the connection.
        shared.retain(|_, one| {
            if one.users.get() > 0 {
                one.since.set(Instant::now());
            }
            !one.sender.is_closed() && one.since.get().elapsed() < age
        });
        idle.is_empty() && shared.is_empty()
    }

    /// Ends all that nobody uses, now.
    pub(super) fn trim(&self) {
        self.sweep(Duration::ZERO);
        self.idle.borrow_mut().shrink_to_fit();
        self.shared.borrow_mut().shrink_to_fit();
    }
}

/// A connection of this key is being made, until this is dropped.
struct Making {
    pool: Rc<Pool>,
    key: Key,
}

impl Making {
    fn new(pool: &Rc<Pool>, key: &Key) -> Self {
        pool.making.borrow_mut().insert(key.clone(), Rc::default());
        Self { pool: Rc::clone(pool), key: key.clone() }
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if let Some(made) = self.pool.making.borrow_mut().remove(&self.key) {
            made.notify_waiters();
        }
    }
}
