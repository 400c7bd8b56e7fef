//! What is dialled, what is not, and in which order.

use std::cell::{Cell, RefCell};
use std::future::pending;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use hickory_proto::op::ResponseCode;
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::{Checked, Dial, DialError, Dialer, System, ordered};
use crate::dns::fake::{Server, alias, answer, fence, ip, name, record, resolver, run};
use crate::dns::{Family, Resolver};
use crate::reason::{Reason, Verdict};

const LOOPBACK: &str = "127.0.0.0/8";

/// What an address does when it is dialled.
#[derive(Clone, Copy)]
enum Does {
    Connect,
    Refuse,
    Nothing,
}

/// A dialer that notes every address and plays the rest of the world.
struct Played {
    dialled: RefCell<Vec<SocketAddr>>,
    own: Vec<IpAddr>,
    does: Box<dyn Fn(IpAddr) -> Does>,
    listener: SocketAddr,
}

impl Dialer for Played {
    fn connect(&self, to: Checked) -> LocalBoxFuture<'static, io::Result<TcpStream>> {
        self.dialled.borrow_mut().push(to.address());
        let listener = self.listener;
        let does = (self.does)(to.address().ip());
        async move {
            match does {
                Does::Connect => TcpStream::connect(listener).await,
                Does::Refuse => Err(io::ErrorKind::ConnectionRefused.into()),
                Does::Nothing => pending().await,
            }
        }
        .boxed_local()
    }

    fn datagrams(&self, to: Checked) -> io::Result<UdpSocket> {
        System.datagrams(to)
    }

    fn is_own(&self, ip: IpAddr) -> io::Result<bool> {
        Ok(self.own.contains(&ip))
    }
}

struct Set {
    dial: Dial,
    played: Rc<Played>,
    resolver: Rc<Resolver>,
    _listener: TcpListener,
}

impl Set {
    async fn new(
        server: &Server,
        gaps: &[&str],
        own: &[&str],
        does: impl Fn(IpAddr) -> Does + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let played = Rc::new(Played {
            dialled: RefCell::default(),
            own: own.iter().map(|ip| ip.parse().unwrap()).collect(),
            does: Box::new(does),
            listener: listener.local_addr().unwrap(),
        });
        let resolver = resolver(vec![server.address]);
        let dialer: Rc<dyn Dialer> = Rc::<Played>::clone(&played);
        let dial = Dial::with(fence(gaps), Rc::clone(&resolver), dialer);
        Self { dial, played, resolver, _listener: listener }
    }

    fn dialled(&self) -> Vec<String> {
        self.played.dialled.take().iter().map(ToString::to_string).collect()
    }
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn nothing_denied(_: IpAddr) -> bool {
    false
}

async fn zone(addresses: &[&str]) -> Server {
    let records: Vec<_> = addresses.iter().map(|a| ("ok.test", 30, ip(a))).collect();
    Server::zone(&records).await
}

#[test]
fn case_69_private_answers_are_never_dialled() {
    run(async {
        for private in
            ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "fd00::1", "::ffff:10.0.0.1"]
        {
            let server = zone(&[private]).await;
            let set = Set::new(&server, &[], &[], |_| Does::Connect).await;
            let error =
                set.dial.to_name(&name("ok.test"), 443, &nothing_denied, None).await.unwrap_err();
            assert_eq!(error.reason(), Reason::NameResolvesForbidden, "{private}: {error}");
            assert!(set.dialled().is_empty(), "{private}");
        }
    });
}

#[test]
fn case_70_a_name_that_flips_has_no_gap() {
    run(async {
        let turn = Cell::new(0);
        let server = Server::new(move |query, _| {
            turn.set(turn.get() + 1);
            let address = if turn.get() <= 2 { "203.0.113.10" } else { "10.9.9.9" };
            let records = vec![record("flip.test", 0, ip(address))];
            vec![answer(query, ResponseCode::NoError, records).to_vec().unwrap()]
        })
        .await;
        let set = Set::new(&server, &[], &[], |_| Does::Connect).await;
        let flip = name("flip.test");
        for _ in 0..5 {
            let (_, to) = set.dial.to_name(&flip, 443, &nothing_denied, None).await.unwrap();
            assert_eq!(to, addr("203.0.113.10:443"));
        }
        // TTL 0 is 5 s here, and between check and connect nothing was asked.
        assert_eq!(server.heard().len(), 2, "one question per family");
        assert_eq!(set.dialled(), vec!["203.0.113.10:443"; 5]);
        // Later it has flipped, and that answer is judged as well.
        set.resolver.retain(&|_| false);
        let error = set.dial.to_name(&flip, 443, &nothing_denied, None).await.unwrap_err();
        assert_eq!(error.reason(), Reason::NameResolvesForbidden);
        assert!(set.dialled().is_empty());
    });
}

#[test]
fn case_71_an_alias_to_a_private_address_is_not_dialled() {
    run(async {
        let server = Server::zone(&[
            ("ok.test", 30, alias("other.test")),
            ("other.test", 30, ip("192.168.7.7")),
        ])
        .await;
        let set = Set::new(&server, &[], &[], |_| Does::Connect).await;
        let error = set.dial.to_name(&name("ok.test"), 1, &nothing_denied, None).await.unwrap_err();
        assert_eq!(error.reason(), Reason::NameResolvesForbidden);
        assert!(error.to_string().contains("192.168.7.7"), "{error}");
    });
}

#[test]
fn denied_ranges_hold_for_names_too() {
    run(async {
        let server = zone(&["203.0.113.10", "203.0.113.11"]).await;
        let set = Set::new(&server, &[], &[], |_| Does::Connect).await;
        let deny = |ip: IpAddr| ip == addr("203.0.113.10:1").ip();
        let (_, to) = set.dial.to_name(&name("ok.test"), 80, &deny, None).await.unwrap();
        assert_eq!(to, addr("203.0.113.11:80"));
        let error = set.dial.to_name(&name("ok.test"), 80, &|_| true, None).await.unwrap_err();
        assert_eq!(error.reason(), Reason::NameResolvesForbidden);
        assert_eq!(set.dialled(), ["203.0.113.11:80"]);
    });
}

#[test]
fn the_hosts_own_addresses_are_refused_unless_listed() {
    run(async {
        let server = zone(&["203.0.113.1", "203.0.113.10"]).await;
        let own = "203.0.113.1";
        let set = Set::new(&server, &[], &[own], |_| Does::Connect).await;
        for to in ["203.0.113.1:22", "[::ffff:203.0.113.1]:22", "[64:ff9b::203.0.113.1]:22"] {
            let error = set.dial.to_address(addr(to)).await.unwrap_err();
            assert_eq!(error.reason(), Reason::AddressForbidden, "{to}: {error}");
            assert!(error.to_string().contains("host itself"), "{error}");
        }
        let (_, to) = set.dial.to_name(&name("ok.test"), 22, &nothing_denied, None).await.unwrap();
        assert_eq!(to, addr("203.0.113.10:22"));
        assert_eq!(set.dialled(), ["203.0.113.10:22"]);

        let only = zone(&[own]).await;
        let set = Set::new(&only, &[], &[own], |_| Does::Connect).await;
        let error =
            set.dial.to_name(&name("ok.test"), 22, &nothing_denied, None).await.unwrap_err();
        assert_eq!(error.reason(), Reason::NameResolvesForbidden);

        let set = Set::new(&only, &["203.0.113.1/32"], &[own], |_| Does::Connect).await;
        set.dial.to_address(addr("203.0.113.1:22")).await.unwrap();
        assert_eq!(set.dialled(), ["203.0.113.1:22"]);
    });
}

#[test]
fn the_kernel_tells_which_addresses_are_its_own() {
    assert!(System.is_own(addr("127.0.0.1:0").ip()).unwrap());
    // Here the kernel's source is another own address: only binding shows it. A second address in the
    // network of an interface behaves in the same way.
    assert!(System.is_own(addr("127.0.0.2:0").ip()).unwrap());
    if let Ok(own) = System.is_own(addr("[::1]:0").ip()) {
        assert!(own);
    }
    // A documentation address: unreachable or elsewhere, but not here.
    assert!(!matches!(System.is_own(addr("192.0.2.77:0").ip()), Ok(true)));
    assert!(!matches!(System.is_own(addr("[2001:db8:77::1]:0").ip()), Ok(true)));
}

#[test]
fn cases_79_80_81_addresses_above_all_policies_are_refused_in_every_form() {
    run(async {
        let server = zone(&[]).await;
        let set = Set::new(&server, &[], &[], |_| Does::Connect).await;
        for to in [
            "127.0.0.1:80",
            "0.0.0.0:80",
            "10.1.2.3:80",
            "169.254.169.254:80",
            "100.100.100.200:80",
            "224.0.0.1:80",
            "255.255.255.255:80",
            "[::]:80",
            "[::1]:80",
            "[::ffff:127.0.0.1]:80",
            "[64:ff9b::a9fe:a9fe]:80",
            "[2002:a00:1::]:80",
            "[fd00:ec2::254]:80",
            "[fe80::1]:80",
            "[ff02::1]:80",
        ] {
            let error = set.dial.to_address(addr(to)).await.unwrap_err();
            assert_eq!(error.reason(), Reason::AddressForbidden, "{to}: {error}");
            assert_eq!(error.verdict(), Verdict::Deny);
            assert_eq!(set.dial.datagrams(addr(to)).unwrap_err().reason(), error.reason());
        }
        assert!(set.dialled().is_empty());
        // A mapped address is dialled as what it is.
        set.dial.to_address(addr("[::ffff:203.0.113.9]:80")).await.unwrap();
        assert_eq!(set.dialled(), ["203.0.113.9:80"]);
    });
}

#[test]
fn the_next_address_is_tried_when_one_refuses_or_is_slow() {
    run(async {
        let server = zone(&["203.0.113.1", "203.0.113.2", "203.0.113.3"]).await;
        let set = Set::new(&server, &[], &[], |ip| match ip.to_string().as_str() {
            "203.0.113.1" => Does::Refuse,
            "203.0.113.2" => Does::Nothing,
            _ => Does::Connect,
        })
        .await;
        let (_, to) = set.dial.to_name(&name("ok.test"), 443, &nothing_denied, None).await.unwrap();
        assert_eq!(to, addr("203.0.113.3:443"));
        assert_eq!(set.dialled(), ["203.0.113.1:443", "203.0.113.2:443", "203.0.113.3:443"]);

        let set = Set::new(&server, &[], &[], |_| Does::Refuse).await;
        let error =
            set.dial.to_name(&name("ok.test"), 443, &nothing_denied, None).await.unwrap_err();
        assert_eq!(error.reason(), Reason::UpstreamUnreachable);
        assert!(error.to_string().contains("203.0.113.3:443"), "{error}");
    });
}

#[test]
fn a_dial_ends_even_if_nobody_answers() {
    run(async {
        let server = zone(&["203.0.113.1"]).await;
        let set = Set::new(&server, &[], &[], |_| Does::Nothing).await;
        let ok = name("ok.test");
        // The name is known before the clock stands still: no real socket waits then.
        set.dial.resolve(&ok, &nothing_denied, None).await.unwrap();
        let _ = set.resolver.lookup(&ok, Family::V6).await;
        tokio::time::pause();
        let start = tokio::time::Instant::now();
        let error = set.dial.to_name(&ok, 443, &nothing_denied, None).await.unwrap_err();
        assert_eq!(error.reason(), Reason::UpstreamUnreachable);
        let error = set.dial.to_address(addr("203.0.113.1:443")).await.unwrap_err();
        assert_eq!(error.reason(), Reason::UpstreamUnreachable);
        assert!(start.elapsed().as_secs() <= 21, "two deadlines");
    });
}

#[test]
fn what_the_guest_was_told_is_preferred_and_what_it_asked_for_first() {
    run(async {
        let server = zone(&["203.0.113.1", "203.0.113.2", "2001:db8::1"]).await;
        let set = Set::new(&server, &[], &[], |_| Does::Connect).await;
        let ok = name("ok.test");
        set.resolver.pin(&ok, &[addr("203.0.113.2:1").ip()]);
        let all = set.dial.resolve(&ok, &nothing_denied, None).await.unwrap();
        let all: Vec<_> = all.iter().map(ToString::to_string).collect();
        assert_eq!(all, ["203.0.113.2", "2001:db8::1", "203.0.113.1"]);
        let asked = Some(addr("[2001:db8::1]:1").ip());
        let all = set.dial.resolve(&ok, &nothing_denied, asked).await.unwrap();
        assert_eq!(all[0].to_string(), "2001:db8::1");
        // An address that is not the name's is never dialled for it (cases 1 and 2).
        let other = addr("203.0.113.66:1").ip();
        let all = set.dial.resolve(&ok, &nothing_denied, Some(other)).await.unwrap();
        assert!(!all.contains(&other) && all.len() == 3);
    });
}

#[test]
fn a_pin_helps_when_name_servers_fail_and_is_checked_like_any_other() {
    run(async {
        let server = Server::new(|query, _| {
            vec![answer(query, ResponseCode::ServFail, vec![]).to_vec().unwrap()]
        })
        .await;
        let set = Set::new(&server, &[], &[], |_| Does::Connect).await;
        let ok = name("ok.test");
        let error = set.dial.to_name(&ok, 443, &nothing_denied, None).await.unwrap_err();
        assert_eq!((error.reason(), error.verdict()), (Reason::ResolveFailed, Verdict::Error));
        set.resolver.pin(&ok, &["203.0.113.5".parse().unwrap(), "10.0.0.1".parse().unwrap()]);
        let (_, to) = set.dial.to_name(&ok, 443, &nothing_denied, None).await.unwrap();
        assert_eq!(to, addr("203.0.113.5:443"));
        let error = set.dial.to_name(&ok, 443, &|_| true, None).await.unwrap_err();
        assert_eq!(error.reason(), Reason::NameResolvesForbidden);
    });
}

#[test]
fn localhost_is_not_dialled() {
    run(async {
        let server = zone(&["203.0.113.1"]).await;
        let set = Set::new(&server, &[LOOPBACK], &[], |_| Does::Connect).await;
        for local in ["localhost", "a.localhost"] {
            let error =
                set.dial.to_name(&name(local), 80, &nothing_denied, None).await.unwrap_err();
            assert_eq!(error.reason(), Reason::NameResolvesForbidden);
        }
        let error =
            set.dial.to_name(&name("x.onion"), 80, &nothing_denied, None).await.unwrap_err();
        assert!(matches!(error, DialError::Resolve { .. }));
        assert!(set.dialled().is_empty());
        assert_eq!(server.heard(), []);
    });
}

#[test]
fn a_real_connection_is_tuned_and_leads_where_it_was_checked_to() {
    run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let server = Server::zone(&[("ok.test", 30, ip("127.0.0.1"))]).await;
        let resolver = resolver(vec![server.address]);
        let dial = Dial::new(fence(&[LOOPBACK]), resolver);
        let (stream, at) =
            dial.to_name(&name("ok.test"), to.port(), &nothing_denied, None).await.unwrap();
        assert_eq!((at, stream.peer_addr().unwrap()), (to, to));
        assert!(stream.nodelay().unwrap());
        assert!(rustix::net::sockopt::socket_keepalive(&stream).unwrap());
        listener.accept().await.unwrap();
        drop(listener);
        let error = dial.to_address(to).await.unwrap_err();
        assert_eq!(error.reason(), Reason::UpstreamUnreachable);
    });
}

#[test]
fn families_take_turns() {
    let ips = |list: &[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
    let all = ips(&["203.0.113.1", "203.0.113.2", "203.0.113.2", "2001:db8::1", "2001:db8::2"]);
    let expected = ips(&["203.0.113.1", "2001:db8::1", "203.0.113.2", "2001:db8::2"]);
    assert_eq!(ordered(&all, None), expected);
    let expected = ips(&["2001:db8::2", "203.0.113.1", "2001:db8::1", "203.0.113.2"]);
    assert_eq!(ordered(&all, Some("2001:db8::2".parse().unwrap())), expected);
    assert!(ordered(&[], None).is_empty());
}
