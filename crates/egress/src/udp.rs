//! Relays datagrams, in allow-all alone: a flow is one socket of the guest talking to one address.
//!
//! Invariant: each flow has a socket of its own, connected to an address that `dial` checked, so what
//! comes back is from there; flows are bounded in number and rate and end when idle; none outlives a
//! policy that does not relay. DNS never passes here.
//!
//! Called by `broker`. What the other modes do about datagrams is the kernel's: refuse them.

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use bivouac_types::id::SessionId;
use lru::LruCache;
use rustix::net::SendFlags;
use tokio::net::UdpSocket;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::audit::{Kind, Line};
use crate::broker::Datagrams;
use crate::dial::Dial;
use crate::dns::{Bucket, Rules};
use crate::reason::{Reason, Verdict};

/// Most flows at once; one more ends the one that was quiet for longest.
const FLOWS: usize = 512;
/// New flows: a second, and in a burst.
const PER_SECOND: u32 = 100;
const BURST: u32 = 500;
/// How long a flow may be quiet: a question with an answer, a conversation.
const IDLE_ONCE: Duration = Duration::from_secs(30);
const IDLE: Duration = Duration::from_secs(60);
/// Denied destinations that are remembered, so that a stream of datagrams to one is one line.
const DENIED: usize = 256;
const DENIED_FOR: Duration = Duration::from_secs(10);
/// Largest datagram.
const LARGEST: usize = 65_535;
const DNS: u16 = 53;

type Ends = (SocketAddr, SocketAddr);

struct Flow {
    number: u64,
    /// The guest's socket, and what it sends to.
    ends: Ends,
    socket: UdpSocket,
    begun: Instant,
    last: Cell<Instant>,
    sent: Cell<(u64, u64)>,
    received: Cell<(u64, u64)>,
    over: Cell<bool>,
    end: Notify,
}

impl Flow {
    /// When it ends unless something happens.
    fn idle_at(&self) -> Instant {
        let once = self.sent.get().0 <= 1 && self.received.get().0 <= 1;
        self.last.get() + if once { IDLE_ONCE } else { IDLE }
    }

    fn count(&self, counter: &Cell<(u64, u64)>, length: usize) {
        let (datagrams, bytes) = counter.get();
        counter.set((datagrams + 1, bytes + length as u64));
        self.last.set(Instant::now());
    }
}

/// See the module.
pub struct Relay {
    dial: Rc<Dial>,
    rules: Rc<dyn Rules>,
    session: SessionId,
    numbers: Rc<dyn Fn() -> u64>,
    flows: RefCell<LruCache<Ends, Rc<Flow>>>,
    denied: RefCell<LruCache<SocketAddr, Instant>>,
    bucket: Bucket,
    /// Where datagrams from outside pass through: one is enough, since nothing waits while it is used.
    scratch: RefCell<Vec<u8>>,
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").field("flows", &self.flows.borrow().len()).finish_non_exhaustive()
    }
}

impl Relay {
    /// A relay; `numbers` gives each flow its number in the session.
    #[must_use]
    pub fn new(
        dial: Rc<Dial>,
        rules: Rc<dyn Rules>,
        session: SessionId,
        numbers: Rc<dyn Fn() -> u64>,
    ) -> Rc<Self> {
        Rc::new(Self {
            dial,
            rules,
            session,
            numbers,
            flows: RefCell::new(LruCache::unbounded()),
            denied: RefCell::new(LruCache::unbounded()),
            bucket: Bucket::new(PER_SECOND, BURST),
            scratch: RefCell::default(),
        })
    }

    /// Relays what arrives, for ever or until the socket fails.
    ///
    /// # Errors
    /// Of the gate's socket.
    pub async fn run(self: Rc<Self>, gate: Rc<dyn Datagrams>) -> io::Result<()> {
        let mut buffer = vec![0; LARGEST];
        loop {
            // A guest that sends without end must not keep the thread from everything else.
            tokio::task::consume_budget().await;
            let got = crate::broker::receive(&*gate, &mut buffer).await?;
            if let Some(bytes) = buffer.get(..got.len) {
                self.forward(&gate, bytes, (got.from, got.to));
            }
        }
    }

    /// Flows that live.
    #[must_use]
    pub fn flows(&self) -> usize {
        self.flows.borrow().len()
    }

    /// Ends the flows whose destination `keep` refuses, before it returns; answers how many.
    pub fn sweep(&self, keep: &dyn Fn(SocketAddr) -> bool) -> u64 {
        let gone: Vec<_> = self
            .flows
            .borrow()
            .iter()
            .filter(|((_, to), _)| !keep(*to))
            .map(|(_, flow)| Rc::clone(flow))
            .collect();
        for flow in &gone {
            self.end(flow, Verdict::Cut, Reason::PolicyChanged, None);
        }
        gone.len() as u64
    }

    fn forward(self: &Rc<Self>, gate: &Rc<dyn Datagrams>, bytes: &[u8], ends: Ends) {
        if !self.rules.relays() || ends.1.port() == DNS {
            // The kernel lets none in; what was under way when it closed ends here.
            return self.deny(ends, Reason::Protocol, None);
        }
        let known = self.flows.borrow_mut().get(&ends).cloned();
        let flow = match known {
            Some(flow) => flow,
            None => match self.open(gate, ends) {
                Some(flow) => flow,
                None => return,
            },
        };
        // Straight to the kernel: a new socket's readiness is not known to the runtime yet. What does
        // not fit into the queue is lost, as on any network.
        if rustix::net::send(&flow.socket, bytes, SendFlags::DONTWAIT).is_ok() {
            flow.count(&flow.sent, bytes.len());
        }
    }

    fn open(self: &Rc<Self>, gate: &Rc<dyn Datagrams>, ends: Ends) -> Option<Rc<Flow>> {
        let now = Instant::now();
        if !self.bucket.take(now) {
            self.deny(ends, Reason::Limit, Some("too many new datagram flows".to_owned()));
            return None;
        }
        let inner = crate::address::unmap(ends.1.ip());
        if self.rules.denies(inner) {
            self.deny(ends, Reason::SubnetDenied, None);
            return None;
        }
        let socket = match self.dial.datagrams(ends.1) {
            Ok(socket) => socket,
            Err(error) => {
                self.tell(ends, error.verdict(), error.reason(), Some(error.to_string()));
                return None;
            }
        };
        let flow = Rc::new(Flow {
            number: (self.numbers)(),
            ends,
            socket,
            begun: now,
            last: Cell::new(now),
            sent: Cell::default(),
            received: Cell::default(),
            over: Cell::new(false),
            end: Notify::new(),
        });
        let oldest = {
            let mut flows = self.flows.borrow_mut();
            flows.put(ends, Rc::clone(&flow));
            if flows.len() > FLOWS { flows.pop_lru() } else { None }
        };
        if let Some((_, oldest)) = oldest {
            self.end(&oldest, Verdict::Cut, Reason::Limit, None);
        }
        let mut line = self.line(Kind::Udp, Verdict::Allow, Reason::AllowAll, ends);
        line.flow = Some(flow.number);
        line.dialled = flow.socket.peer_addr().ok().map(|to| to.to_string());
        self.rules.note(line);
        tokio::task::spawn_local(Rc::clone(self).answers(Rc::clone(gate), Rc::clone(&flow)));
        Some(flow)
    }

    /// Brings back what the destination sends, until the flow ends.
    async fn answers(self: Rc<Self>, gate: Rc<dyn Datagrams>, flow: Rc<Flow>) {
        while !flow.over.get() {
            // Nor must a destination that does.
            tokio::task::consume_budget().await;
            tokio::select! {
                biased;
                () = flow.end.notified() => {}
                ready = flow.socket.readable() => {
                    if let Err(error) = ready.and_then(|()| self.take(&*gate, &flow)) {
                        let error = Some(error.to_string());
                        self.end(&flow, Verdict::Error, Reason::UpstreamUnreachable, error);
                    }
                }
                () = sleep_until(flow.idle_at()) => {
                    if flow.idle_at() <= Instant::now() {
                        self.end(&flow, Verdict::Allow, Reason::Closed, None);
                    }
                }
            }
        }
    }

    /// Takes one datagram off the socket of a flow.
    fn take(&self, gate: &dyn Datagrams, flow: &Flow) -> io::Result<()> {
        let mut scratch = self.scratch.borrow_mut();
        scratch.resize(LARGEST, 0);
        match flow.socket.try_recv(&mut scratch) {
            Ok(length) => {
                flow.count(&flow.received, length);
                let (guest, asked) = flow.ends;
                if let Err(error) = gate.send(&scratch[..length], guest, asked) {
                    tracing::debug!(%error, "a datagram was not sent to the sandbox");
                }
                Ok(())
            }
            // Nobody listens there now. Somebody may later: the flow ends when it is idle.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionRefused
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Ends a flow, once.
    fn end(&self, flow: &Flow, verdict: Verdict, reason: Reason, error: Option<String>) {
        if flow.over.replace(true) {
            return;
        }
        flow.end.notify_one();
        self.flows.borrow_mut().pop(&flow.ends);
        if self.flows.borrow().is_empty() {
            // An idle session holds no buffer.
            if let Ok(mut scratch) = self.scratch.try_borrow_mut() {
                *scratch = Vec::new();
            }
        }
        let mut line = self.line(Kind::End, verdict, reason, flow.ends);
        line.flow = Some(flow.number);
        line.bytes_up = Some(flow.sent.get().1);
        line.bytes_down = Some(flow.received.get().1);
        line.duration_ms = u64::try_from(flow.begun.elapsed().as_millis()).ok();
        line.error = error;
        self.rules.note(line);
    }

    fn deny(&self, ends: Ends, reason: Reason, error: Option<String>) {
        self.tell(ends, Verdict::Deny, reason, error);
    }

    /// Writes down that there is no flow, once in a while per destination.
    fn tell(&self, ends: Ends, verdict: Verdict, reason: Reason, error: Option<String>) {
        let now = Instant::now();
        {
            let mut denied = self.denied.borrow_mut();
            if denied.get(&ends.1).is_some_and(|until| *until > now) {
                return;
            }
            denied.put(ends.1, now + DENIED_FOR);
            if denied.len() > DENIED {
                denied.pop_lru();
            }
        }
        let mut line = self.line(Kind::Udp, verdict, reason, ends);
        line.error = error;
        self.rules.note(line);
    }

    fn line(&self, kind: Kind, verdict: Verdict, reason: Reason, ends: Ends) -> Line {
        let mut line = Line::new(self.session.clone(), kind, verdict, reason);
        line.asked = Some(ends.1.to_string());
        line.protocol = Some("udp".to_owned());
        line
    }
}
