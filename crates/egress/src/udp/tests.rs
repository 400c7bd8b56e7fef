//! Datagram flows over real sockets on loopback.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use bivouac_types::id::SessionId;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{FLOWS, Relay};
use crate::audit::Kind;
use crate::broker::{Datagrams, Received, Receiving};
use crate::dial::Dial;
use crate::dns::fake::{Policy, fence, run};
use crate::dns::{Resolver, Rules};
use crate::reason::{Reason, Verdict};

type Datagram = (Vec<u8>, SocketAddr, SocketAddr);

/// The gate's socket: what the guest sends comes out of a channel, what it is sent goes into one.
struct Line {
    sent: RefCell<Option<mpsc::UnboundedReceiver<Datagram>>>,
    answers: mpsc::UnboundedSender<Datagram>,
}

impl Datagrams for Line {
    fn recv<'a>(&'a self, into: &'a mut [u8]) -> Receiving<'a> {
        Box::pin(async move {
            let mut sent = self.sent.borrow_mut().take().expect("one reader");
            let got = sent.recv().await;
            *self.sent.borrow_mut() = Some(sent);
            let Some((bytes, from, to)) = got else { return Err(io::ErrorKind::BrokenPipe.into()) };
            into[..bytes.len()].copy_from_slice(&bytes);
            Ok(Received { len: bytes.len(), from, to })
        })
    }

    fn send(&self, bytes: &[u8], to: SocketAddr, from: SocketAddr) -> io::Result<()> {
        self.answers.send((bytes.to_vec(), to, from)).map_err(io::Error::other)
    }
}

struct Set {
    relay: Rc<Relay>,
    policy: Rc<Policy>,
    guest: mpsc::UnboundedSender<Datagram>,
    answers: mpsc::UnboundedReceiver<Datagram>,
    line: Rc<Line>,
}

impl Set {
    fn new(gaps: &[&str]) -> Self {
        let policy = Policy::new(&[]);
        let rules: Rc<dyn Rules> = Rc::<Policy>::clone(&policy);
        let dial = Rc::new(Dial::new(fence(gaps), Resolver::new(vec![])));
        let number = Cell::new(0);
        let numbers = Rc::new(move || {
            number.set(number.get() + 1);
            number.get()
        });
        let relay = Relay::new(dial, rules, SessionId::new(0, [3; 10]), numbers);
        let (guest, sent) = mpsc::unbounded_channel();
        let (answers, get) = mpsc::unbounded_channel();
        let line = Rc::new(Line { sent: RefCell::new(Some(sent)), answers });
        let gate: Rc<dyn Datagrams> = Rc::<Line>::clone(&line);
        tokio::task::spawn_local(Rc::clone(&relay).run(gate));
        Self { relay, policy, guest, answers: get, line }
    }

    fn send(&self, bytes: &[u8], from: u16, to: SocketAddr) {
        self.guest.send((bytes.to_vec(), guest(from), to)).unwrap();
    }

    async fn answer(&mut self) -> Datagram {
        timeout(Duration::from_secs(10), self.answers.recv()).await.expect("an answer").unwrap()
    }

    /// Waits until there is a line of this kind, and takes all.
    async fn lines(&self, kind: Kind, count: usize) -> Vec<crate::audit::Line> {
        for _ in 0..1000 {
            let there = self.policy.lines.borrow().iter().filter(|l| l.kind == kind).count();
            if there >= count {
                return self.policy.take_lines();
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        panic!("no {count} lines of {kind:?}: {:?}", self.policy.take_lines());
    }
}

fn guest(port: u16) -> SocketAddr {
    SocketAddr::new("10.0.0.2".parse().unwrap(), port)
}

/// A server that answers each datagram with the sender's port and the same bytes.
async fn echo() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::task::spawn_local(async move {
        let mut buffer = vec![0; 65_535];
        while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
            let mut answer = from.port().to_be_bytes().to_vec();
            answer.extend(&buffer[..length]);
            socket.send_to(&answer, from).await.unwrap();
        }
    });
    address
}

const LOOPBACK: &[&str] = &["127.0.0.0/8"];

#[test]
fn datagrams_go_and_come_back_per_flow() {
    run(async {
        let server = echo().await;
        let mut set = Set::new(LOOPBACK);
        let mut ports = Vec::new();
        for (from, text) in [(1000, "one"), (2000, "two"), (1000, "three")] {
            set.send(text.as_bytes(), from, server);
            let (bytes, to, source) = set.answer().await;
            assert_eq!(&bytes[2..], text.as_bytes());
            assert_eq!((to, source), (guest(from), server), "from whom it was sent to");
            ports.push(u16::from_be_bytes([bytes[0], bytes[1]]));
        }
        assert_eq!(ports[0], ports[2], "one flow, one socket");
        assert_ne!(ports[0], ports[1]);
        assert_eq!(set.relay.flows(), 2);
        let lines = set.lines(Kind::Udp, 2).await;
        assert_eq!(lines.len(), 2);
        assert_eq!((lines[0].verdict, lines[0].reason), (Verdict::Allow, Reason::AllowAll));
        assert_eq!(set.relay.sweep(&|_| false), 2);
        assert_eq!(set.relay.flows(), 0, "before it returned");
        let lines = set.policy.take_lines();
        assert_eq!(lines.len(), 2);
        let first = lines.iter().find(|line| line.flow == Some(1)).unwrap();
        assert_eq!((first.verdict, first.reason), (Verdict::Cut, Reason::PolicyChanged));
        assert_eq!((first.bytes_up, first.bytes_down), (Some(8), Some(12)));
    });
}

#[test]
fn an_empty_and_a_large_datagram_pass() {
    run(async {
        let server = echo().await;
        let mut set = Set::new(LOOPBACK);
        for length in [0, 1, 1472, 9000, 60_000] {
            set.send(&vec![7; length], 1, server);
            assert_eq!(set.answer().await.0.len(), length + 2);
        }
    });
}

#[test]
fn what_may_not_be_dialled_is_not_sent_to_and_told_once() {
    run(async {
        // Not listed: loopback is the host's own.
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let set = Set::new(&[]);
        let to = server.local_addr().unwrap();
        let denied = [
            to,
            "10.0.0.1:123".parse().unwrap(),
            "169.254.169.254:80".parse().unwrap(),
            "224.0.0.251:5353".parse().unwrap(),
            "255.255.255.255:67".parse().unwrap(),
            "[fe80::1]:123".parse().unwrap(),
            "[::ffff:127.0.0.1]:123".parse().unwrap(),
        ];
        for to in denied {
            for _ in 0..5 {
                set.send(b"x", 1, to);
            }
        }
        let lines = set.lines(Kind::Udp, denied.len()).await;
        assert_eq!(lines.len(), denied.len(), "{lines:?}");
        for line in lines {
            assert_eq!((line.verdict, line.reason), (Verdict::Deny, Reason::AddressForbidden));
        }
        assert_eq!(set.relay.flows(), 0);
        let mut buffer = [0; 16];
        assert!(server.try_recv(&mut buffer).is_err(), "nothing arrived");
    });
}

#[test]
fn dns_and_other_modes_are_not_relayed() {
    run(async {
        let server = echo().await;
        let mut set = Set::new(LOOPBACK);
        set.send(b"x", 1, SocketAddr::new(server.ip(), 53));
        let lines = set.lines(Kind::Udp, 1).await;
        assert_eq!(lines[0].reason, Reason::Protocol);
        set.policy.relays.set(false);
        set.send(b"x", 1, server);
        set.lines(Kind::Udp, 1).await;
        assert_eq!(set.relay.flows(), 0);
        // Open again: the next datagram passes, although one was refused a moment ago.
        set.policy.relays.set(true);
        set.send(b"y", 1, server);
        assert_eq!(&set.answer().await.0[2..], b"y");
    });
}

#[test]
fn denied_ranges_hold_for_datagrams() {
    run(async {
        let server = echo().await;
        let set = Set::new(LOOPBACK);
        set.policy.denies.borrow_mut().push(server.ip());
        set.send(b"x", 1, server);
        let lines = set.lines(Kind::Udp, 1).await;
        assert_eq!(lines[0].reason, Reason::SubnetDenied);
    });
}

#[test]
fn a_quiet_flow_ends() {
    run(async {
        let server = echo().await;
        let mut set = Set::new(LOOPBACK);
        set.send(b"one-shot", 1, server);
        set.answer().await;
        for _ in 0..3 {
            set.send(b"talk", 2, server);
            set.answer().await;
        }
        set.policy.take_lines();
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(31)).await;
        tokio::time::resume();
        let lines = set.lines(Kind::End, 1).await;
        assert_eq!((lines[0].flow, lines[0].reason), (Some(1), Reason::Closed));
        assert_eq!(set.relay.flows(), 1);
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(30)).await;
        tokio::time::resume();
        let lines = set.lines(Kind::End, 1).await;
        assert_eq!((lines[0].flow, lines[0].bytes_up), (Some(2), Some(12)));
        assert_eq!(set.relay.flows(), 0);
    });
}

#[test]
fn flows_are_bounded_in_number_and_rate() {
    run(async {
        let server = echo().await;
        let set = Set::new(LOOPBACK);
        let gate: Rc<dyn Datagrams> = Rc::<Line>::clone(&set.line);
        tokio::time::pause();
        // In one instant: the burst and no more.
        for port in 1..=600 {
            set.relay.forward(&gate, b"x", (guest(port), server));
        }
        assert_eq!(set.relay.flows(), 500);
        let lines = set.policy.take_lines();
        let limited: Vec<_> = lines.iter().filter(|line| line.verdict == Verdict::Deny).collect();
        assert_eq!(limited.len(), 1, "told once");
        assert_eq!(limited[0].reason, Reason::Limit);
        // A second later there is room for a hundred more, and the oldest make it.
        tokio::time::advance(Duration::from_secs(1)).await;
        for port in 601..=700 {
            set.relay.forward(&gate, b"x", (guest(port), server));
        }
        assert_eq!(set.relay.flows(), FLOWS);
        let lines = set.policy.take_lines();
        let cut: Vec<_> = lines.iter().filter(|line| line.kind == Kind::End).collect();
        assert_eq!(cut.len(), 600 - FLOWS);
        assert!(cut.iter().all(|line| line.reason == Reason::Limit && line.flow <= Some(88)));
    });
}

#[test]
fn a_destination_that_is_away_does_not_end_a_flow() {
    run(async {
        let away = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let to = away.local_addr().unwrap();
        drop(away);
        let mut set = Set::new(LOOPBACK);
        set.send(b"x", 1, to);
        set.lines(Kind::Udp, 1).await;
        let back = UdpSocket::bind(to).await.unwrap();
        set.send(b"lost to the error that waits", 1, to);
        set.send(b"y", 1, to);
        let mut buffer = [0; 64];
        let (_, from) =
            timeout(Duration::from_secs(10), back.recv_from(&mut buffer)).await.unwrap().unwrap();
        back.send_to(b"z", from).await.unwrap();
        assert_eq!(set.answer().await.0, b"z");
        assert_eq!(set.relay.flows(), 1);
    });
}

/// A guest that sends without end: there is always one more, and nothing ever waits.
struct Endless(Cell<usize>);

/// So many that a broken loop ends as well.
const ENDLESS: usize = 20_000;

impl Datagrams for Endless {
    fn recv<'a>(&'a self, into: &'a mut [u8]) -> Receiving<'a> {
        self.0.set(self.0.get() + 1);
        if self.0.get() >= ENDLESS {
            return Box::pin(std::future::ready(Err(io::ErrorKind::BrokenPipe.into())));
        }
        into[0] = 0;
        let to = "10.0.0.1:123".parse().unwrap();
        Box::pin(std::future::ready(Ok(Received { len: 1, from: guest(1), to })))
    }

    fn send(&self, _: &[u8], _: SocketAddr, _: SocketAddr) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_flood_does_not_keep_the_thread() {
    run(async {
        let set = Set::new(&[]);
        let flood = Rc::new(Endless(Cell::new(0)));
        let gate: Rc<dyn Datagrams> = Rc::<Endless>::clone(&flood);
        let relaying = tokio::task::spawn_local(Rc::clone(&set.relay).run(gate));
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        assert!(flood.0.get() < ENDLESS, "nobody else had a turn during the flood");
        relaying.abort();
    });
}
