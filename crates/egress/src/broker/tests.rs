//! A whole broker, without a gate's capture and without a network: the test says what address a
//! connection asks for, plays the outside behind the dialer, and reads every audit line.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use bivouac_types::id::{SessionId, ValueId};
use bivouac_types::policy::NetworkPolicy;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use serde_json::{Value as Json, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::spawn_local;
use tokio::time::timeout;

use super::*;
use crate::classify::tests::hello;
use crate::dial::Checked;
use crate::dns::fake::{Server, ip};
use crate::message::{Identity, PolicySet};

mod carry;
mod judged;
mod names;
mod swap;

/// Longest any test may take.
const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Steered {
    now: Cell<(bool, bool, bool)>,
    broken: Cell<bool>,
}

impl Steer for Steered {
    fn set(&self, tcp: bool, dns: bool, udp: bool) -> io::Result<()> {
        if self.broken.get() {
            return Err(io::Error::other("the map is gone"));
        }
        self.now.set((tcp, dns, udp));
        Ok(())
    }
}

#[derive(Default)]
struct Lines(RefCell<Vec<Line>>, Cell<bool>);

impl Sink for Lines {
    fn append(&self, line: &[u8]) {
        assert!(!self.1.replace(false), "the test wants this panic");
        self.0.borrow_mut().push(serde_json::from_slice(line).unwrap());
    }
}

/// The outside: addresses that somebody listens at, and all that was ever dialled.
#[derive(Default)]
struct Outside {
    at: RefCell<BTreeMap<SocketAddr, SocketAddr>>,
    dialled: RefCell<Vec<SocketAddr>>,
    /// Dials wait for this.
    slow: RefCell<Option<Rc<tokio::sync::Notify>>>,
}

impl Dialer for Outside {
    fn connect(&self, to: Checked) -> LocalBoxFuture<'static, io::Result<TcpStream>> {
        self.dialled.borrow_mut().push(to.address());
        let found = self.at.borrow().get(&to.address()).copied();
        let slow = self.slow.borrow().clone();
        async move {
            if let Some(slow) = slow {
                slow.notified().await;
            }
            match found {
                Some(at) => TcpStream::connect(at).await,
                None => Err(io::ErrorKind::ConnectionRefused.into()),
            }
        }
        .boxed_local()
    }

    fn datagrams(&self, _to: Checked) -> io::Result<UdpSocket> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn is_own(&self, _ip: IpAddr) -> io::Result<bool> {
        Ok(false)
    }
}

struct World {
    broker: Rc<Broker>,
    outside: Rc<Outside>,
    steered: Rc<Steered>,
    lines: Rc<Lines>,
    said: Rc<RefCell<Vec<FromBroker>>>,
    generation: Cell<u64>,
    /// Where the test's guests connect to.
    door: TcpListener,
    _names: Server,
}

fn run<T>(work: impl Future<Output = T>) -> T {
    crate::dns::fake::run(async { timeout(DEADLINE, work).await.expect("the test ends in time") })
}

fn policy(json: &Json) -> NetworkPolicy {
    let mut n = 0;
    let mut mint = || {
        n += 1;
        ValueId::new(n, [0; 10])
    };
    NetworkPolicy::parse("networkPolicy", json, &mut mint).unwrap().policy
}

fn allow_all() -> Json {
    json!({ "mode": "allow-all" })
}

fn deny_all() -> Json {
    json!({ "mode": "deny-all" })
}

fn patient() -> Tuning {
    Tuning { most: 10_000, ..Tuning::default() }
}

impl World {
    async fn new(first: &Json) -> Self {
        Self::with(first, patient()).await
    }

    async fn with(first: &Json, mut tuning: Tuning) -> Self {
        let names = Server::zone(&[
            ("ok.test", 60, ip("203.0.113.10")),
            ("other.test", 60, ip("203.0.113.11")),
            ("api.test", 60, ip("203.0.113.12")),
            ("priv.test", 60, ip("10.0.0.1")),
            ("six.test", 60, ip("2001:db8::10")),
        ])
        .await;
        let outside = Rc::new(Outside::default());
        let (steered, lines) = (Rc::new(Steered::default()), Rc::new(Lines::default()));
        let said = Rc::new(RefCell::new(Vec::new()));
        let session = SessionId::new(1, [7; 10]);
        let authority = Rc::new(Authority::new(&session, Authority::UNKNOWN_LIFE).unwrap());
        let identity = Identity {
            team: "t".to_owned(),
            project: "p".to_owned(),
            sandbox: "box".to_owned(),
            session,
        };
        tuning.dialer = Rc::clone(&outside) as _;
        let parts = Parts {
            config: Config {
                identity,
                resolvers: vec![names.address],
                allow_private: Vec::new(),
                roots: String::new(),
                extra_ca: String::new(),
                policy: PolicySet { generation: 1, policy: policy(first), values: BTreeMap::new() },
            },
            authority,
            roots: Rc::new(Roots::new(Box::new(|| Ok(Vec::new())))),
            gate: Gate {
                tcp: vec![std::net::TcpListener::bind("127.0.0.1:0").unwrap()],
                own: vec!["192.0.2.1".parse().unwrap()],
                dns: Vec::new(),
                udp: Vec::new(),
                steer: Rc::clone(&steered) as _,
            },
            out: {
                let said = Rc::clone(&said);
                Rc::new(move |message| said.borrow_mut().push(message))
            },
            sink: Rc::clone(&lines) as _,
        };
        let broker = Broker::start_with(parts, tuning).unwrap();
        let door = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self {
            broker,
            outside,
            steered,
            lines,
            said,
            generation: Cell::new(1),
            door,
            _names: names,
        }
    }

    /// A guest's connection that asks for this address.
    async fn ask(&self, asked: &str) -> TcpStream {
        let (near, far) =
            tokio::join!(TcpStream::connect(self.door.local_addr().unwrap()), self.door.accept());
        let works = &self.broker.works;
        accept::take(works, &self.broker.flows, far.unwrap().0, asked.parse().unwrap());
        near.unwrap()
    }

    /// Somebody who listens outside.
    async fn listen(&self, at: &str) -> TcpListener {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        self.outside.at.borrow_mut().insert(at.parse().unwrap(), listener.local_addr().unwrap());
        listener
    }

    async fn set(&self, json: &Json) -> Reply {
        self.generation.set(self.generation.get() + 1);
        let set = PolicySet {
            generation: self.generation.get(),
            policy: policy(json),
            values: BTreeMap::new(),
        };
        self.broker.deliver(ToBroker::Policy(set)).await
    }

    async fn cuts(&self, json: &Json) -> u64 {
        match self.set(json).await {
            Reply::Done { cut } => cut,
            other => panic!("{other:?}"),
        }
    }

    /// The lines of connections so far.
    fn lines(&self) -> Vec<Line> {
        let lines = self.lines.0.borrow();
        lines.iter().filter(|l| matches!(l.kind, Kind::Connect | Kind::End)).cloned().collect()
    }

    /// Waits for the `n`th line of a connection.
    async fn line(&self, n: usize) -> Line {
        until(|| self.lines().get(n).cloned()).await
    }

    fn dialled(&self) -> Vec<String> {
        self.outside.dialled.borrow().iter().map(ToString::to_string).collect()
    }

    /// A connection with these first bytes is refused, for this reason, and nothing is dialled.
    async fn refuses(&self, asked: &str, bytes: &[u8], reason: Reason) -> Vec<u8> {
        let before = (self.lines().len(), self.dialled().len());
        let mut guest = self.ask(asked).await;
        // The broker may refuse before it has read them.
        let _ = guest.write_all(bytes).await;
        let got = drain(&mut guest).await;
        let line = self.line(before.0).await;
        assert_eq!((line.verdict, line.reason), (Verdict::Deny, reason), "{asked} {line:?}");
        assert_eq!(self.lines().len(), before.0 + 1, "one line");
        assert_eq!(self.dialled().len(), before.1, "{asked} was dialled");
        got
    }

    /// A connection with these first bytes arrives at this listener, which gets exactly them; what it
    /// answers comes back.
    async fn passes(&self, asked: &str, bytes: &[u8], listener: &TcpListener) -> Line {
        let before = self.lines().len();
        let mut guest = self.ask(asked).await;
        guest.write_all(bytes).await.unwrap();
        let (mut origin, _) = listener.accept().await.unwrap();
        let mut got = vec![0; bytes.len()];
        origin.read_exact(&mut got).await.unwrap();
        assert_eq!(got, bytes);
        origin.write_all(b"pong").await.unwrap();
        drop(origin);
        assert_eq!(drain(&mut guest).await, b"pong");
        drop(guest);
        let line = self.line(before).await;
        assert_eq!(line.verdict, Verdict::Allow, "{line:?}");
        let end = self.line(before + 1).await;
        assert_eq!((end.kind, end.reason), (Kind::End, Reason::Closed), "{end:?}");
        assert_eq!((end.bytes_up, end.bytes_down), (Some(bytes.len() as u64), Some(4)));
        line
    }
}

/// What comes until the other side closes or resets.
async fn drain(stream: &mut TcpStream) -> Vec<u8> {
    let mut got = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(n) = stream.read(&mut piece).await {
        if n == 0 {
            break;
        }
        got.extend_from_slice(&piece[..n]);
    }
    got
}

/// Waits for something to be there; the test's deadline bounds it.
async fn until<T>(found: impl Fn() -> Option<T>) -> T {
    loop {
        if let Some(found) = found() {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The other side resets: not a mere end.
async fn assert_reset(stream: &mut TcpStream) {
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece).await {
            Ok(0) => panic!("an end instead of a reset"),
            Ok(_) => {}
            Err(error) => return assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        }
    }
}

/// Shows a figure to whoever asks for figures.
fn figure(text: &str) {
    if std::env::var_os("BIVOUAC_FIGURES").is_some() {
        io::Write::write_fmt(&mut io::stderr(), format_args!("{text}\n")).unwrap();
    }
}
