//! The life of one connection: judged, dialled, carried, written down.
//!
//! Invariant: no byte of a guest leaves before [`FlowGuard::decide`] has accepted the decision that
//! allows it, and from then on the whole of the work ends when the flow is cut. Each connection writes
//! one line when it is decided and, if it was let through, one when it ends.
//!
//! Called by the accept loops ([`super::accept`]).

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bivouac_types::id::SessionId;
use bytes::Bytes;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout_at};

use super::desk::Desk;
use super::force::{Force, Reach};
use super::hear::{Heard, Hearing, Mouthful};
use super::judge::{self, Early, Late, Refusal};
use super::relay::{Buffers, End, Patience, relay, reset};
use super::teach::Lesson;
use crate::address::Fence;
use crate::audit::{Kind, Line};
use crate::canonical::Name;
use crate::classify::First;
use crate::dns::{Stub, serve_tcp};
use crate::flows::{Facts, FlowGuard, Guest, Handling, Socket};
use crate::intercept::{Current, Interception};
use crate::reason::{Reason, Verdict};

/// Under a catch-all entry: how long a client may be silent before the destination is dialled beside
/// listening to it. Clients that speak first spare the destination a connection that nobody uses.
const SILENCE: Duration = Duration::from_millis(20);
/// Postgres' request for TLS, and the answers to it.
const POSTGRES_TLS: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];

/// How long a guest or a destination may take to say what is waited for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadlines {
    /// The first bytes of a guest.
    pub(super) hello: Duration,
    /// A Postgres server's word about TLS.
    pub(super) postgres: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self { hello: Duration::from_secs(5), postgres: Duration::from_secs(10) }
    }
}

/// What connections need.
pub(super) struct Works {
    pub(super) session: SessionId,
    pub(super) sandbox: String,
    pub(super) force: Rc<Force>,
    pub(super) fence: Fence,
    pub(super) own: Vec<IpAddr>,
    pub(super) desk: Rc<Desk>,
    pub(super) reach: Rc<Reach>,
    pub(super) stub: Rc<Stub>,
    pub(super) interception: Rc<Interception>,
    pub(super) buffers: Rc<Buffers>,
    pub(super) mouthful: Rc<Mouthful>,
    pub(super) patience: Patience,
    pub(super) deadlines: Deadlines,
}

impl fmt::Debug for Works {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Works").field("session", &self.session).finish_non_exhaustive()
    }
}

/// How the work on a connection ended.
enum Over {
    /// There is nothing to add to the lines that are written: it was refused, say.
    Told,
    /// It was let through and ended.
    Ended { reason: Reason, error: Option<String> },
    /// It was allowed and came to nothing.
    Failed { reason: Reason, error: String },
}

/// One connection.
struct Case<'a> {
    works: &'a Works,
    flow: FlowGuard,
    asked: SocketAddr,
    /// The decision, as it is to be written; filled in as more is known.
    line: RefCell<Line>,
    /// Whether the decision line was written.
    told: Cell<bool>,
    /// Whether a Postgres client was told that TLS is spoken. The server has to be asked first then, also
    /// if the policy changes in between.
    postgres: Cell<bool>,
    /// Whether it asked for GSS encryption before.
    gss: Cell<bool>,
}

impl Works {
    /// Serves a connection from accept to close.
    pub(super) async fn serve(&self, stream: TcpStream, flow: FlowGuard) {
        let asked = flow.facts().asked;
        let mut line =
            Line::new(self.session.clone(), Kind::Connect, Verdict::Allow, Reason::Closed);
        line.flow = Some(flow.id());
        line.asked = Some(asked.to_string());
        let case = Case {
            works: self,
            flow,
            asked,
            line: RefCell::new(line),
            told: Cell::new(false),
            postgres: Cell::new(false),
            gss: Cell::new(false),
        };
        let socket = Socket::new(stream, case.flow.clone());
        let over = tokio::select! {
            biased;
            reason = case.flow.cut() => Err(reason),
            over = case.work(socket) => Ok(over),
        };
        // Here every socket of the flow is closed.
        case.write_end(over);
    }

    /// Writes down a connection that is refused before anything is known about it.
    pub(super) fn refuse(&self, stream: &TcpStream, asked: SocketAddr, flow: u64, reason: Reason) {
        reset(stream);
        let mut line = Line::new(self.session.clone(), Kind::Connect, Verdict::Deny, reason);
        line.flow = Some(flow);
        line.asked = Some(asked.to_string());
        self.desk.note_now(line);
    }
}

impl Case<'_> {
    async fn work(&self, socket: Socket) -> Over {
        let mut heard = Hearing::new(&self.works.mouthful);
        loop {
            let current = self.works.force.current();
            let early =
                judge::by_address(&current.policy, &self.works.fence, &self.works.own, self.asked);
            let decided = match early {
                Early::Deny(refusal) => {
                    return Box::pin(self.refuse(&socket, &mut heard, None, &refusal, &current))
                        .await;
                }
                Early::Dns => self.decide(&current, None, Handling::Dns, None).map(|()| Way::Dns),
                Early::Direct { .. } if self.postgres.get() => {
                    let error = "the policy changed amid a Postgres greeting".to_owned();
                    return fail(&socket, Reason::PolicyChanged, error);
                }
                Early::Direct { handling, reason, entry } => {
                    self.decide(&current, None, handling, entry).map(|()| {
                        self.say(reason, Some("raw"));
                        Way::Asked { upstream: None }
                    })
                }
                Early::Look => match Box::pin(self.look(&socket, &mut heard, &current)).await {
                    Ok(way) => Ok(way),
                    Err(Some(over)) => return over,
                    Err(None) => Err(crate::flows::Stale),
                },
            };
            // The policy changed meanwhile: nothing has left, so it is judged again.
            let Ok(way) = decided else { continue };
            return self.go(way, socket, heard).await;
        }
    }

    /// Takes a decision, if the policy that made it is still in force.
    fn decide(
        &self,
        current: &Current,
        name: Option<&Name>,
        handling: Handling,
        entry: Option<Arc<str>>,
    ) -> Result<(), crate::flows::Stale> {
        self.flow.decide(Facts {
            asked: self.asked,
            name: name.cloned(),
            handling,
            entry: entry.clone(),
            dialled: None,
            generation: current.generation,
        })?;
        let mut line = self.line.borrow_mut();
        line.generation = current.generation;
        line.entry = entry.map(|e| e.to_string());
        line.host = name.map(ToString::to_string);
        line.host_from = name.map(|_| "sni".to_owned());
        line.intercepted = matches!(handling, Handling::Intercept | Handling::PlainHttp);
        Ok(())
    }

    fn say(&self, reason: Reason, protocol: Option<&str>) {
        let mut line = self.line.borrow_mut();
        line.reason = reason;
        line.protocol = protocol.map(str::to_owned);
    }

    /// Decides by the first bytes. `Err(None)` is: judge again.
    async fn look(
        &self,
        socket: &Socket,
        heard: &mut Hearing,
        current: &Current,
    ) -> Result<Way, Option<Over>> {
        let until = Instant::now() + self.works.deadlines.hello;
        let mut upstream = None;
        loop {
            let postgres = self.postgres.get();
            let (found, connected) = match current.policy.catch_all(self.asked.port()) {
                // The entry lets anything through to where it wants to go: what the destination says
                // first can be waited for as well.
                Some(entry) if !postgres => {
                    self.decide(current, None, Handling::Raw, Some(entry)).map_err(|_| None)?;
                    self.hear_both(socket, heard, until).await
                }
                _ => (heard.first(socket, &self.works.buffers, until).await, None),
            };
            upstream = connected.or(upstream);
            let first = match found {
                Ok(Heard::First(first)) => Some(first),
                Ok(Heard::Late) => None,
                Ok(Heard::Closed) if heard.bytes().is_empty() => {
                    return Err(Some(self.gone(current)));
                }
                Ok(Heard::Closed) => Some(First::Unknown),
                Ok(Heard::Full) => {
                    let refusal = Refusal::of(Reason::Limit);
                    return Err(Some(self.refuse(socket, heard, None, &refusal, current).await));
                }
                Err(_) => return Err(Some(self.gone(current))),
            };
            let late = match &first {
                // By name only what comes after it can be judged. Under a catch-all it passes unseen.
                Some(First::Postgres | First::PostgresGss)
                    if current.policy.catch_all(self.asked.port()).is_none() && !postgres =>
                {
                    let gss = first == Some(First::PostgresGss);
                    self.greet_postgres(socket, heard, gss, until, current).await.map_err(Some)?;
                    continue;
                }
                other => judge::by_first(&current.policy, self.asked.port(), other.as_ref()),
            };
            return match late {
                Late::Deny(refusal) => {
                    let first = first.as_ref();
                    Err(Some(self.refuse(socket, heard, first, &refusal, current).await))
                }
                // By a policy that came into force since the client was told to speak TLS.
                Late::Raw(_) if postgres => {
                    let refusal = Refusal::of(Reason::NoServerName);
                    let first = first.as_ref();
                    Err(Some(self.refuse(socket, heard, first, &refusal, current).await))
                }
                Late::Raw(entry) => {
                    self.decide(current, None, Handling::Raw, Some(entry)).map_err(|_| None)?;
                    let protocol = match first {
                        Some(First::Tls(_)) => "tls",
                        Some(First::Http) => "http",
                        _ => "raw",
                    };
                    self.say(Reason::CatchAll, Some(protocol));
                    self.note_host(first.as_ref(), heard.bytes());
                    Ok(Way::Asked { upstream })
                }
                Late::Pass { name, reason, entry } => self
                    .passes(current, &name, reason, entry, postgres)
                    .map(|()| Way::Name { name, postgres })
                    .map_err(|_| None),
                // Rules do not see Postgres.
                Late::Intercept { name, site } if postgres => self
                    .passes(current, &name, Reason::DomainListed, Arc::clone(&site.entry), true)
                    .map(|()| Way::Name { name, postgres })
                    .map_err(|_| None),
                Late::Intercept { name, site } => {
                    let entry = Some(Arc::clone(&site.entry));
                    self.decide(current, Some(&name), Handling::Intercept, entry)
                        .map_err(|_| None)?;
                    self.say(Reason::DomainListed, Some("tls"));
                    Ok(Way::Intercept { name })
                }
                Late::PlainHttp => {
                    self.decide(current, None, Handling::PlainHttp, None).map_err(|_| None)?;
                    self.say(Reason::PlainHttp, Some("http"));
                    Ok(Way::PlainHttp)
                }
            };
        }
    }

    /// Plain HTTP that passes unseen: what its first bytes say of the host, for who reads the line. Nothing is
    /// decided by it. Only on the port where a policy could name it.
    fn note_host(&self, first: Option<&First>, heard: &[u8]) {
        if first != Some(&First::Http) || self.asked.port() != judge::HTTP {
            return;
        }
        if let Some(crate::canonical::Host::Name(name)) = super::teach::host_of(heard) {
            let mut line = self.line.borrow_mut();
            line.host = Some(name.to_string());
            line.host_from = Some("host".to_owned());
        }
    }

    /// Answers a Postgres client's request: yes to TLS, no to GSS encryption.
    async fn greet_postgres(
        &self,
        socket: &Socket,
        heard: &mut Hearing,
        gss: bool,
        until: Instant,
        current: &Current,
    ) -> Result<(), Over> {
        if heard.bytes().len() > 8 || (gss && self.gss.replace(true)) {
            // Bytes before the answer would be taken for what comes after it.
            let refusal = Refusal::of(Reason::NotTls);
            let first = Some(&First::Postgres);
            return Err(self.refuse(socket, heard, first, &refusal, current).await);
        }
        if self.answer(socket, if gss { b"N" } else { b"S" }, until).await.is_err() {
            return Err(self.gone(current));
        }
        heard.consume(8);
        self.postgres.set(!gss);
        Ok(())
    }

    fn passes(
        &self,
        current: &Current,
        name: &Name,
        reason: Reason,
        entry: Arc<str>,
        postgres: bool,
    ) -> Result<(), crate::flows::Stale> {
        let handling = if postgres { Handling::Postgres } else { Handling::Pass };
        self.decide(current, Some(name), handling, Some(entry))?;
        self.say(reason, Some(if postgres { "postgres" } else { "tls" }));
        Ok(())
    }

    /// Listens to the guest and, when it is silent, to the destination that it asked for. Only under a
    /// catch-all entry, and after the flow was decided by it.
    async fn hear_both(
        &self,
        guest: &TcpStream,
        heard: &mut Hearing,
        until: Instant,
    ) -> (io::Result<Heard>, Option<TcpStream>) {
        let hearing = heard.first(guest, &self.works.buffers, until);
        tokio::pin!(hearing);
        let silent = async {
            sleep(SILENCE).await;
            self.works.reach.address(self.asked).await
        };
        tokio::pin!(silent);
        let upstream = tokio::select! {
            biased;
            first = &mut hearing => return (first, None),
            dialled = &mut silent => match dialled {
                Ok(upstream) => upstream,
                // It may still turn out to be for a name; if not, the dial is tried again and tells why.
                Err(_) => return (hearing.await, None),
            },
        };
        tokio::select! {
            biased;
            first = &mut hearing => (first, Some(upstream)),
            _ = upstream.readable() => (Ok(Heard::First(First::Unknown)), Some(upstream)),
        }
    }

    /// Does what was decided. What is only one step of a life, or only of some lives, is boxed: a flow
    /// that is merely carried, for hours perhaps, must not keep room for it.
    async fn go(&self, way: Way, socket: Socket, mut heard: Hearing) -> Over {
        let works = self.works;
        match way {
            Way::Dns => {
                let guest = Guest::from_socket(socket, Bytes::new());
                // Each query has a line of its own; what ends the connection is of no interest.
                let _ = Box::pin(serve_tcp(&works.stub, guest)).await;
                Over::Told
            }
            Way::Intercept { name } => {
                self.tell();
                let guest = Guest::from_socket(socket, heard.take().into());
                let interception = Rc::clone(&works.interception);
                let serving = Box::pin(interception.serve_tls(guest, name, self.asked.port()));
                let end = serving.await;
                ended(end.reason, end.error)
            }
            Way::PlainHttp => {
                self.tell();
                let guest = Guest::from_socket(socket, heard.take().into());
                let interception = Rc::clone(&works.interception);
                let serving = Box::pin(interception.serve_plain(guest, self.asked.port()));
                let end = serving.await;
                ended(end.reason, end.error)
            }
            Way::Asked { upstream } => {
                let upstream = match upstream {
                    Some(upstream) => upstream,
                    None => match Box::pin(works.reach.address(self.asked)).await {
                        Ok(upstream) => upstream,
                        Err((reason, error)) => return fail(&socket, reason, error),
                    },
                };
                self.carry(socket, upstream, self.asked, heard).await
            }
            Way::Name { name, postgres } => {
                let port = self.asked.port();
                let dialling = works.reach.name(&name, port, Some(self.asked.ip()));
                let dialled = Box::pin(dialling).await;
                let (upstream, to) = match dialled {
                    Ok(dialled) => dialled,
                    Err((reason, error)) => return fail(&socket, reason, error),
                };
                // From here on a sweep knows where it leads.
                self.flow.dialled(to);
                if postgres && let Err(error) = self.ask_postgres(&upstream).await {
                    return fail(&socket, Reason::UpstreamProtocol, error);
                }
                self.carry(socket, upstream, to, heard).await
            }
        }
    }

    async fn carry(
        &self,
        guest: Socket,
        upstream: TcpStream,
        to: SocketAddr,
        mut heard: Hearing,
    ) -> Over {
        let upstream = Socket::new(upstream, self.flow.clone());
        self.flow.dialled(to);
        self.line.borrow_mut().dialled = Some(to.to_string());
        self.tell();
        let ahead = heard.take();
        let works = self.works;
        match relay(&guest, &upstream, ahead, &self.flow, &works.buffers, works.patience).await {
            End::Closed => ended(Reason::Closed, None),
            End::Broke(error) => ended(Reason::Closed, Some(error.to_string())),
            End::Stuck => ended(
                Reason::UpstreamUnreachable,
                Some(format!(
                    "the destination took no byte for {} s",
                    works.patience.stuck.as_secs()
                )),
            ),
        }
    }

    /// Asks a Postgres server for TLS.
    async fn ask_postgres(&self, upstream: &TcpStream) -> Result<(), String> {
        let until = Instant::now() + self.works.deadlines.postgres;
        self.answer(upstream, &POSTGRES_TLS, until).await.map_err(|e| e.to_string())?;
        let mut word = [0];
        loop {
            timeout_at(until, upstream.readable())
                .await
                .map_err(|_| "the server does not answer the request for TLS".to_owned())?
                .map_err(|e| e.to_string())?;
            match upstream.try_read(&mut word) {
                Ok(1) if word == *b"S" => return Ok(()),
                Ok(0) => return Err("the server closed instead of speaking TLS".to_owned()),
                Ok(_) => return Err("the server does not speak TLS".to_owned()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e.to_string()),
            }
        }
    }

    /// Writes a few bytes of ours.
    async fn answer(&self, to: &TcpStream, bytes: &[u8], until: Instant) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            timeout_at(until, to.writable()).await.map_err(io::Error::other)??;
            match to.try_write(rest) {
                Ok(n) => rest = &rest[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    async fn refuse(
        &self,
        socket: &TcpStream,
        heard: &mut Hearing,
        first: Option<&First>,
        refusal: &Refusal,
        current: &Current,
    ) -> Over {
        let works = self.works;
        // Written before the client is told, so that whoever sees the denial finds its line.
        let mut line = self.line.borrow().clone();
        line.generation = current.generation;
        line.verdict = Verdict::Deny;
        line.reason = refusal.reason;
        line.entry = refusal.entry.as_ref().map(ToString::to_string);
        line.host.clone_from(&refusal.name);
        line.host_from = refusal.name.as_ref().map(|_| "sni".to_owned());
        line.error.clone_from(&refusal.detail);
        let lesson = Lesson {
            refusal,
            first,
            port: self.asked.port(),
            policy: &current.policy,
            sandbox: &works.sandbox,
            buffers: &works.buffers,
        };
        let note = |seen: &super::teach::Taught| {
            line.protocol = seen.protocol.map(str::to_owned);
            if line.host.is_none() && seen.host.is_some() {
                line.host.clone_from(&seen.host);
                let tls = seen.protocol == Some("tls");
                line.host_from = Some(if tls { "sni" } else { "host" }.to_owned());
            }
            works.desk.note(line);
        };
        lesson.teach(socket, heard, note).await;
        self.told.set(true);
        Over::Told
    }

    /// The guest closed, or broke, before anything was decided.
    fn gone(&self, current: &Current) -> Over {
        let mut line = self.line.borrow().clone();
        line.generation = current.generation;
        line.verdict = Verdict::Deny;
        line.reason = Reason::Closed;
        self.works.desk.note(line);
        self.told.set(true);
        Over::Told
    }

    /// Writes the decision line of a connection that is let through.
    fn tell(&self) {
        self.told.set(true);
        self.works.desk.note(self.line.borrow().clone());
    }

    fn write_end(&self, over: Result<Over, Reason>) {
        if self.flow.facts().handling == Handling::Dns {
            return;
        }
        let mut line = self.line.borrow().clone();
        let (up, down) = self.flow.bytes();
        line.bytes_up = Some(up);
        line.bytes_down = Some(down);
        let took = self.flow.began().elapsed().as_millis();
        line.duration_ms = Some(u64::try_from(took).unwrap_or(u64::MAX));
        match over {
            Ok(Over::Told) => return,
            Ok(Over::Failed { reason, error }) => {
                line.verdict = verdict(reason);
                line.reason = reason;
                line.error = Some(error);
            }
            Ok(Over::Ended { reason, error }) => {
                line.kind = Kind::End;
                if reason != Reason::Closed {
                    line.verdict = Verdict::Error;
                }
                line.reason = reason;
                line.error = error;
            }
            Err(reason) => {
                if self.told.get() {
                    line.kind = Kind::End;
                } else {
                    // Cut while it was dialled: this is its one line.
                    line.generation = self.works.force.current().generation;
                }
                line.verdict = Verdict::Cut;
                line.reason = reason;
            }
        }
        self.works.desk.note(line);
    }
}

/// What was decided, with what it needs.
enum Way {
    Dns,
    Asked { upstream: Option<TcpStream> },
    Name { name: Name, postgres: bool },
    Intercept { name: Name },
    PlainHttp,
}

fn ended(reason: Reason, error: Option<String>) -> Over {
    Over::Ended { reason, error }
}

/// What a failed dial amounts to: some are refusals of ours.
fn verdict(reason: Reason) -> Verdict {
    match reason {
        Reason::AddressForbidden
        | Reason::NameResolvesForbidden
        | Reason::SubnetDenied
        | Reason::Limit => Verdict::Deny,
        _ => Verdict::Error,
    }
}

/// The destination cannot be had: the guest sees a reset.
fn fail(guest: &TcpStream, reason: Reason, error: String) -> Over {
    reset(guest);
    Over::Failed { reason, error }
}
