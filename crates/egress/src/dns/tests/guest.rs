//! What a guest can find out, and what a name server can find out about a guest.

use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use bivouac_types::id::SessionId;
use hickory_proto::op::{Edns, Message, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::opt::{EdnsCode, EdnsOption};
use hickory_proto::rr::{DNSClass, Name as WireName, RData, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, mpsc};

use super::super::fake::{
    Policy, Server, alias, answer, fence, ip, name, record, resolver, run, stub,
};
use super::super::{Family, Outcome, Resolver, Rules, Stub, Transport, serve_tcp, serve_udp};
use crate::broker::{Datagrams, Received, Receiving};
use crate::reason::{Reason, Verdict};

const GOOD: &str = "203.0.113.10";
const GOOD_V6: &str = "2001:db8::10";

fn query(name: &str, kind: RecordType, edns: Option<u16>) -> Message {
    let mut message = Message::query();
    message.metadata.id = 0x4242;
    message.metadata.recursion_desired = true;
    let name = WireName::from_ascii(format!("{name}.")).unwrap();
    message.add_query(Query::query(name, kind));
    if let Some(size) = edns {
        let mut edns = Edns::new();
        edns.set_max_payload(size);
        message.set_edns(edns);
    }
    message
}

async fn ask(stub: &Stub, name: &str, kind: RecordType) -> Message {
    let query = query(name, kind, Some(1232)).to_vec().unwrap();
    let bytes = stub.answer(&query, Transport::Datagram).await.expect("an answer");
    let message = Message::from_vec(&bytes).expect("a well-formed answer");
    assert_eq!(message.metadata.id, 0x4242);
    assert_eq!(message.queries.len(), 1, "the question goes back");
    message
}

fn addresses(message: &Message) -> Vec<IpAddr> {
    let address = |data: &RData| match data {
        RData::A(a) => IpAddr::V4(a.0),
        RData::AAAA(aaaa) => IpAddr::V6(aaaa.0),
        other => panic!("told {other:?}"),
    };
    message.answers.iter().map(|record| address(&record.data)).collect()
}

fn told(addresses_of: &Message) -> Vec<String> {
    addresses(addresses_of).iter().map(ToString::to_string).collect()
}

/// Code and text of the extended error.
fn extended(message: &Message) -> (u16, String) {
    let options = message.edns.as_ref().expect("EDNS is answered with EDNS");
    match options.option(EdnsCode::Unknown(15)) {
        Some(EdnsOption::Unknown(15, data)) => {
            let code = u16::from_be_bytes([data[0], data[1]]);
            (code, String::from_utf8(data[2..].to_vec()).unwrap())
        }
        other => panic!("no extended error but {other:?}"),
    }
}

async fn ok_zone() -> Server {
    Server::zone(&[("ok.test", 30, ip(GOOD)), ("ok.test", 30, ip(GOOD_V6))]).await
}

#[test]
fn case_64_a_denied_name_never_leaves() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, resolver) = stub(&server, fence(&[]), &policy);
        for name in ["6f6e65.evil.test", "evil.test", "ok.test.evil.test", "notok.test", "test"] {
            for kind in [RecordType::A, RecordType::AAAA, RecordType::TXT, RecordType::NULL] {
                let got = ask(&stub, name, kind).await;
                assert_eq!(got.metadata.response_code, ResponseCode::NXDomain, "{name}");
                assert!(got.answers.is_empty());
                let (code, text) = extended(&got);
                assert_eq!(code, 17);
                assert!(text.contains("domain_not_listed"), "{text}");
                assert!(text.contains(&format!("allow: [\"{name}\"]")), "{text}");
            }
        }
        assert_eq!(server.heard(), []);
        assert_eq!(resolver.asked(), 0);
        let lines = policy.take_lines();
        assert_eq!(lines.len(), 20, "one line per query");
        for line in lines {
            assert_eq!((line.verdict, line.reason), (Verdict::Deny, Reason::DomainNotListed));
            assert!(line.host.is_some() && line.protocol.is_some());
        }
        // The control: the same stub does ask for what is listed.
        assert_eq!(told(&ask(&stub, "ok.test", RecordType::A).await), [GOOD]);
        assert_eq!(server.heard().len(), 1);
    });
}

#[test]
fn case_65_a_tunnel_below_a_wildcard_is_slow_and_seen() {
    run(async {
        let server = Server::new(|query, _| {
            vec![answer(query, ResponseCode::NXDomain, vec![]).to_vec().unwrap()]
        })
        .await;
        let policy = Policy::new(&["ok.test"]);
        let resolver = Resolver::with(vec![server.address], 1, 10, || true);
        let rules: Rc<dyn Rules> = Rc::<Policy>::clone(&policy);
        let session = SessionId::new(0, [1; 10]);
        let stub = Stub::new(Rc::clone(&resolver), fence(&[]), rules, session);
        let mut limited = 0;
        for n in 0..40 {
            let got = ask(&stub, &format!("{n:x}.ok.test"), RecordType::A).await;
            if got.metadata.response_code == ResponseCode::ServFail {
                limited += 1;
            }
        }
        let heard = server.heard().len();
        assert!((10..20).contains(&heard), "{heard} names left");
        assert_eq!(heard + limited, 40);
        let lines = policy.take_lines();
        let over = lines.iter().filter(|line| line.reason == Reason::Limit).count();
        assert_eq!(over, limited);
        assert_eq!(lines.len(), 40);
    });
}

#[test]
fn case_66_only_addresses_are_told() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        for kind in [
            RecordType::TXT,
            RecordType::NULL,
            RecordType::ANY,
            RecordType::CNAME,
            RecordType::HTTPS,
            RecordType::SVCB,
            RecordType::MX,
            RecordType::SRV,
            RecordType::NS,
            RecordType::SOA,
            RecordType::PTR,
            RecordType::AXFR,
            RecordType::Unknown(65_280),
        ] {
            let got = ask(&stub, "ok.test", kind).await;
            assert_eq!(got.metadata.response_code, ResponseCode::NoError, "{kind}");
            assert!(got.answers.is_empty(), "{kind}");
            assert!(extended(&got).1.starts_with("query_type"), "{kind}");
        }
        let mut chaos = query("ok.test", RecordType::A, Some(1232));
        chaos.queries[0].set_query_class(DNSClass::CH);
        let bytes = stub.answer(&chaos.to_vec().unwrap(), Transport::Datagram).await.unwrap();
        let got = Message::from_vec(&bytes).unwrap();
        assert_eq!(got.metadata.response_code, ResponseCode::Refused);
        assert_eq!(server.heard(), []);
        assert!(policy.take_lines().iter().all(|line| line.reason == Reason::QueryType));
    });
}

#[test]
fn reverse_names_do_not_exist_and_never_leave() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["arpa", "onion", "invalid"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        for name in ["10.113.0.203.in-addr.arpa", "8.b.d.0.1.0.0.2.ip6.arpa", "x.onion", "invalid"]
        {
            let got = ask(&stub, name, RecordType::PTR).await;
            assert_eq!(got.metadata.response_code, ResponseCode::NXDomain, "{name}");
            let got = ask(&stub, name, RecordType::A).await;
            assert_eq!(got.metadata.response_code, ResponseCode::NXDomain, "{name}");
        }
        assert_eq!(server.heard(), []);
    });
}

#[test]
fn localhost_is_the_sandbox_itself() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&[]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        for name in ["localhost", "LocalHost", "app.localhost"] {
            assert_eq!(told(&ask(&stub, name, RecordType::A).await), ["127.0.0.1"]);
            assert_eq!(told(&ask(&stub, name, RecordType::AAAA).await), ["::1"]);
            let other = ask(&stub, name, RecordType::TXT).await;
            assert_eq!(other.metadata.response_code, ResponseCode::NoError);
            assert!(other.answers.is_empty());
        }
        let got = ask(&stub, "notlocalhost", RecordType::A).await;
        assert_eq!(got.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(server.heard(), []);
    });
}

/// The guest's end of a datagram socket of the gate.
struct Line {
    queries: tokio::sync::Mutex<mpsc::UnboundedReceiver<(Vec<u8>, SocketAddr, SocketAddr)>>,
    answers: mpsc::UnboundedSender<(Vec<u8>, SocketAddr, SocketAddr)>,
}

impl Datagrams for Line {
    fn recv<'a>(&'a self, into: &'a mut [u8]) -> Receiving<'a> {
        Box::pin(async move {
            let Some((bytes, from, to)) = self.queries.lock().await.recv().await else {
                return Err(io::ErrorKind::BrokenPipe.into());
            };
            let len = bytes.len().min(into.len());
            into[..len].copy_from_slice(&bytes[..len]);
            Ok(Received { len, from, to })
        })
    }

    fn send(&self, bytes: &[u8], to: SocketAddr, from: SocketAddr) -> io::Result<()> {
        self.answers.send((bytes.to_vec(), to, from)).map_err(io::Error::other)
    }
}

#[test]
fn case_67_any_resolver_is_this_one_by_datagram_and_by_stream() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        let (ask, queries) = mpsc::unbounded_channel();
        let (answers, mut get) = mpsc::unbounded_channel();
        let line = Rc::new(Line { queries: tokio::sync::Mutex::new(queries), answers });
        let serving = tokio::task::spawn_local(serve_udp(Rc::clone(&stub), line));
        let guest: SocketAddr = "10.0.0.2:40000".parse().unwrap();
        let resolver: SocketAddr = "9.9.9.9:53".parse().unwrap();
        let message = query("ok.test", RecordType::A, None).to_vec().unwrap();
        // The second is answered from the cache, on the spot.
        for _ in 0..2 {
            ask.send((message.clone(), guest, resolver)).unwrap();
            let (bytes, to, from) = get.recv().await.unwrap();
            assert_eq!((to, from), (guest, resolver), "the answer comes from whom was asked");
            assert_eq!(told(&Message::from_vec(&bytes).unwrap()), [GOOD]);
        }
        drop(ask);
        assert!(serving.await.unwrap().is_err(), "a broken socket is told");

        let (mut guest, gate) = tokio::io::duplex(64);
        let serving = tokio::task::spawn_local(async move { serve_tcp(&stub, gate).await });
        for kind in [RecordType::A, RecordType::AAAA] {
            let message = query("ok.test", kind, None).to_vec().unwrap();
            guest.write_u16(u16::try_from(message.len()).unwrap()).await.unwrap();
            guest.write_all(&message).await.unwrap();
            let length = guest.read_u16().await.unwrap();
            let mut bytes = vec![0; length.into()];
            guest.read_exact(&mut bytes).await.unwrap();
            assert_eq!(told(&Message::from_vec(&bytes).unwrap()).len(), 1);
        }
        drop(guest);
        serving.await.unwrap().unwrap();
    });
}

#[test]
fn case_76_a_long_message_by_stream_ends_the_connection() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        let (mut guest, gate) = tokio::io::duplex(64);
        let serving = tokio::task::spawn_local(async move { serve_tcp(&stub, gate).await });
        guest.write_u16(u16::MAX).await.unwrap();
        serving.await.unwrap().unwrap();
        assert!(guest.read_u8().await.is_err(), "closed without an answer");
    });
}

#[test]
fn case_69_addresses_that_may_not_be_dialled_are_not_told() {
    run(async {
        let private = [
            "127.0.0.1",
            "10.9.9.9",
            "192.168.1.1",
            "172.16.0.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "::1",
            "::",
            "fd00:ec2::254",
            "fe80::1",
            "::ffff:10.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "2002:a00:1::",
        ];
        for address in private {
            let kind = if address.contains(':') { RecordType::AAAA } else { RecordType::A };
            let server = Server::zone(&[("priv.ok.test", 30, ip(address))]).await;
            let policy = Policy::new(&["ok.test"]);
            let (stub, resolver) = stub(&server, fence(&[]), &policy);
            let got = ask(&stub, "priv.ok.test", kind).await;
            assert_eq!(got.metadata.response_code, ResponseCode::NXDomain, "{address}");
            assert!(got.answers.is_empty(), "{address}");
            let (code, text) = extended(&got);
            assert_eq!(code, 15, "{address}");
            assert!(text.starts_with("name_resolves_forbidden"), "{text}");
            let lines = policy.take_lines();
            assert_eq!(lines.len(), 1);
            assert_eq!(lines[0].reason, Reason::NameResolvesForbidden, "{address}");
            assert!(resolver.pinned(&name("priv.ok.test")).is_empty());
        }
    });
}

#[test]
fn case_69_of_a_mixed_answer_only_the_good_part_is_told() {
    run(async {
        let server = Server::zone(&[
            ("mix.ok.test", 30, ip("10.0.0.1")),
            ("mix.ok.test", 30, ip(GOOD)),
            ("mix.ok.test", 30, ip("203.0.113.66")),
        ])
        .await;
        let policy = Policy::new(&["ok.test"]);
        policy.denies.borrow_mut().push("203.0.113.66".parse().unwrap());
        let (stub, resolver) = stub(&server, fence(&[]), &policy);
        assert_eq!(told(&ask(&stub, "mix.ok.test", RecordType::A).await), [GOOD]);
        assert_eq!(resolver.pinned(&name("mix.ok.test")).len(), 1);
        // What the policy denies is withheld at once, although the answer is cached.
        policy.denies.borrow_mut().push(GOOD.parse().unwrap());
        let got = ask(&stub, "mix.ok.test", RecordType::A).await;
        assert_eq!(got.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(extended(&got).0, 17);
        assert_eq!(server.heard().len(), 1);
    });
}

#[test]
fn case_71_an_alias_is_judged_by_where_it_ends() {
    run(async {
        let server = Server::zone(&[
            ("out.ok.test", 30, alias("cdn.evil.test")),
            ("cdn.evil.test", 30, ip(GOOD)),
            ("in.ok.test", 30, alias("two.evil.test")),
            ("two.evil.test", 30, alias("priv.test")),
            ("priv.test", 30, ip("10.9.9.9")),
        ])
        .await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        let got = ask(&stub, "out.ok.test", RecordType::A).await;
        assert_eq!(told(&got), [GOOD]);
        assert_eq!(got.answers[0].name, got.queries[0].name().clone(), "told under the asked name");
        let got = ask(&stub, "in.ok.test", RecordType::A).await;
        assert_eq!(got.metadata.response_code, ResponseCode::NXDomain);
        // The alias's name itself is still denied.
        let got = ask(&stub, "cdn.evil.test", RecordType::A).await;
        assert_eq!(got.metadata.response_code, ResponseCode::NXDomain);
        assert_eq!(server.heard().len(), 2);
    });
}

#[test]
fn case_74_a_denial_is_final_for_stub_resolvers() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        let got = ask(&stub, "evil.test", RecordType::A).await;
        assert_eq!(got.metadata.response_code, ResponseCode::NXDomain);
        assert!(got.metadata.recursion_available && !got.metadata.authoritative);
    });
}

#[test]
fn case_76_a_flood_is_dropped_and_told_once() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        let rules: Rc<dyn Rules> = Rc::<Policy>::clone(&policy);
        let resolver = resolver(vec![server.address]);
        let session = SessionId::new(0, [1; 10]);
        let stub = Stub::with_limit(resolver, fence(&[]), rules, session, 1, 20);
        let message = query("evil.test", RecordType::A, None).to_vec().unwrap();
        let mut answered = 0;
        for _ in 0..500 {
            answered += usize::from(stub.answer(&message, Transport::Datagram).await.is_some());
        }
        assert!((20..40).contains(&answered), "{answered}");
        let lines = policy.take_lines();
        let drops = lines.iter().filter(|line| line.reason == Reason::Limit).count();
        assert!((1..=5).contains(&drops), "{drops} lines for {} drops", 500 - answered);
        assert_eq!(lines.len(), answered + drops);
    });
}

#[test]
fn case_76_an_answer_fits_what_the_client_takes() {
    run(async {
        let many: Vec<(String, u32, RData)> =
            (0..40).map(|n| ("x".to_owned(), 30, ip(&format!("2001:db8::{n:x}")))).collect();
        let long = format!("{}.{}.ok.test", "a".repeat(63), "b".repeat(63));
        let zone: Vec<_> = many.iter().map(|(_, t, d)| (long.as_str(), *t, d.clone())).collect();
        let server = Server::zone(&zone).await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        let sizes = [(None, 512), (Some(1), 512), (Some(700), 700), (Some(65_535), 1232)];
        for (edns, limit) in sizes {
            let message = query(&long, RecordType::AAAA, edns).to_vec().unwrap();
            let bytes = stub.answer(&message, Transport::Datagram).await.unwrap();
            assert!(bytes.len() <= limit, "{} of {limit}", bytes.len());
            let got = Message::from_vec(&bytes).unwrap();
            assert_eq!(got.metadata.truncation, limit == 512, "{edns:?}");
            assert_eq!(got.edns.is_some(), edns.is_some());
            assert!(got.answers.len() <= 16, "few addresses, whatever there are");
            assert!(bytes.len() < 12 * message.len(), "nothing to gain by asking");
        }
        let message = query(&long, RecordType::AAAA, None).to_vec().unwrap();
        let bytes = stub.answer(&message, Transport::Stream).await.unwrap();
        let got = Message::from_vec(&bytes).unwrap();
        assert!(!got.metadata.truncation && got.answers.len() == 16);
    });
}

#[test]
fn deny_all_is_silent() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        policy.deny_all.set(true);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        for name in ["ok.test", "evil.test", "localhost", "1.in-addr.arpa"] {
            for kind in [RecordType::A, RecordType::TXT] {
                let message = query(name, kind, None).to_vec().unwrap();
                assert_eq!(stub.answer(&message, Transport::Datagram).await, None, "{name}");
                assert_eq!(stub.answer(&message, Transport::Stream).await, None, "{name}");
            }
        }
        assert_eq!(server.heard(), []);
        assert!(policy.take_lines().iter().all(|line| line.reason == Reason::DenyAll));
    });
}

#[test]
fn a_policy_that_changes_while_the_name_server_thinks_decides() {
    run(async {
        for deny_all in [false, true] {
            let asked = Rc::new(Notify::new());
            let heard = Rc::clone(&asked);
            let policy = Policy::new(&["ok.test"]);
            let changing = Rc::clone(&policy);
            let server = Server::new(move |query, _| {
                // While the answer is on its way.
                changing.zones.borrow_mut().clear();
                changing.deny_all.set(deny_all);
                heard.notify_one();
                let records = vec![record("ok.test", 30, ip(GOOD))];
                vec![answer(query, ResponseCode::NoError, records).to_vec().unwrap()]
            })
            .await;
            let (stub, resolver) = stub(&server, fence(&[]), &policy);
            let message = query("ok.test", RecordType::A, None).to_vec().unwrap();
            let got = stub.answer(&message, Transport::Datagram).await;
            asked.notified().await;
            if deny_all {
                assert_eq!(got, None);
            } else {
                let got = Message::from_vec(&got.unwrap()).unwrap();
                assert_eq!(got.metadata.response_code, ResponseCode::NXDomain);
            }
            assert!(resolver.pinned(&name("ok.test")).is_empty());
        }
    });
}

#[test]
fn ttls_are_clamped() {
    run(async {
        let server = Server::zone(&[
            ("zero.ok.test", 0, ip(GOOD)),
            ("day.ok.test", 86_400, ip(GOOD)),
            ("half.ok.test", 30, ip(GOOD)),
            ("chain.ok.test", 7, alias("day.ok.test")),
        ])
        .await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        for (name, ttl) in
            [("zero.ok.test", 5), ("day.ok.test", 60), ("half.ok.test", 30), ("chain.ok.test", 7)]
        {
            let got = ask(&stub, name, RecordType::A).await;
            // A second may have passed.
            assert!((ttl - 1..=ttl).contains(&got.answers[0].ttl), "{name}");
        }
    });
}

#[test]
fn what_is_no_name_does_not_exist() {
    run(async {
        let server = ok_zone().await;
        // A policy that resolves everything.
        let policy = Policy::new(&[""]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        let labels: [&[&[u8]]; 7] = [
            &[b"a.ok", b"test"],
            &[b"ok\0", b"test"],
            &[b"ok test"],
            &[b"*", b"ok", b"test"],
            &[b"203", b"0", b"113", b"66"],
            &["b\u{fc}cher".as_bytes(), b"test"],
            &[],
        ];
        for labels in labels {
            let mut message = query("ok.test", RecordType::A, Some(1232));
            let name = WireName::from_labels(labels.to_vec()).unwrap();
            message.queries[0].set_name(name);
            let bytes = stub.answer(&message.to_vec().unwrap(), Transport::Datagram).await.unwrap();
            let got = Message::from_vec(&bytes).unwrap();
            assert_eq!(got.metadata.response_code, ResponseCode::NXDomain, "{labels:?}");
            assert_eq!(got.queries, message.queries, "the question goes back as it came");
        }
        assert_eq!(server.heard(), []);
        assert!(policy.take_lines().iter().all(|line| line.reason == Reason::NameInvalid));
    });
}

#[test]
fn spelling_and_a_dot_make_no_other_name() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        for spelling in ["ok.test", "OK.test", "oK.TeSt"] {
            let got = ask(&stub, spelling, RecordType::A).await;
            assert_eq!(told(&got), [GOOD]);
            assert_eq!(got.queries[0].name().to_ascii(), format!("{spelling}."));
        }
        assert_eq!(server.heard().len(), 1, "one entry of the cache");
    });
}

#[test]
fn odd_messages_get_a_code_or_nothing() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        let code = async |bytes: Vec<u8>| {
            let got = stub.answer(&bytes, Transport::Datagram).await?;
            Some(u16::from(Message::from_vec(&got).unwrap().metadata.response_code))
        };
        let good = query("ok.test", RecordType::A, None);
        let mut update = good.clone();
        update.metadata.op_code = OpCode::Update;
        assert_eq!(code(update.to_vec().unwrap()).await, Some(4));
        let mut two = good.clone();
        two.queries.push(two.queries[0].clone());
        assert_eq!(code(two.to_vec().unwrap()).await, Some(1));
        let mut none = good.clone();
        none.queries.clear();
        assert_eq!(code(none.to_vec().unwrap()).await, Some(1));
        let mut cut = good.to_vec().unwrap();
        cut.truncate(20);
        assert_eq!(code(cut).await, Some(1));
        let mut response = good.to_vec().unwrap();
        response[2] |= 0x80;
        assert_eq!(code(response).await, None, "answers are not answered");
        assert_eq!(code(vec![1, 2, 3]).await, None);
        let mut future = good.clone();
        let mut edns = Edns::new();
        edns.set_version(1);
        future.set_edns(edns);
        let got = stub.answer(&future.to_vec().unwrap(), Transport::Datagram).await.unwrap();
        let got = Message::from_vec(&got).unwrap();
        assert_eq!(got.edns.unwrap().rcode_high(), 1, "BADVERS");
        assert_eq!(server.heard(), []);
    });
}

#[test]
fn a_failure_of_the_name_servers_is_told_without_them() {
    run(async {
        let server = Server::new(|query, _| {
            vec![answer(query, ResponseCode::ServFail, vec![]).to_vec().unwrap()]
        })
        .await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        let got = ask(&stub, "ok.test", RecordType::A).await;
        assert_eq!(got.metadata.response_code, ResponseCode::ServFail);
        let (_, text) = extended(&got);
        assert!(
            !text.contains("127.0.0.1"),
            "the host's name servers are its own business: {text}"
        );
        let lines = policy.take_lines();
        assert_eq!((lines[0].verdict, lines[0].reason), (Verdict::Error, Reason::ResolveFailed));
        assert!(lines[0].error.as_ref().unwrap().contains("127.0.0.1"), "the audit says which");
    });
}

#[test]
fn a_name_without_addresses_and_no_name_differ() {
    run(async {
        let server = Server::zone(&[("v4.ok.test", 30, ip(GOOD))]).await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        let got = ask(&stub, "v4.ok.test", RecordType::AAAA).await;
        assert_eq!(got.metadata.response_code, ResponseCode::NoError);
        let got = ask(&stub, "none.ok.test", RecordType::AAAA).await;
        assert_eq!(got.metadata.response_code, ResponseCode::NXDomain);
    });
}

#[test]
fn names_that_the_policy_lost_are_forgotten() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, resolver) = stub(&server, fence(&[]), &policy);
        ask(&stub, "ok.test", RecordType::A).await;
        let pinned = || resolver.pinned(&name("ok.test"));
        assert_eq!(pinned(), [GOOD.parse::<IpAddr>().unwrap()]);
        resolver.retain(&|name| name.as_str() == "ok.test");
        assert_eq!(pinned().len(), 1);
        resolver.retain(&|_| false);
        assert!(pinned().is_empty());
        let _ = resolver.lookup(&name("ok.test"), Family::V4).await;
        assert_eq!(server.heard().len(), 2, "asked again");
    });
}

#[test]
fn one_question_serves_all_who_wait() {
    run(async {
        let served = Rc::new(RefCell::new(0));
        let count = Rc::clone(&served);
        let server = Server::new(move |query, _| {
            *count.borrow_mut() += 1;
            let records = vec![record("ok.test", 30, ip(GOOD))];
            vec![answer(query, ResponseCode::NoError, records).to_vec().unwrap()]
        })
        .await;
        let resolver = resolver(vec![server.address]);
        let name = name("ok.test");
        let all = (0..50).map(|_| resolver.lookup(&name, Family::V4));
        for answer in futures_util::future::join_all(all).await {
            assert!(matches!(answer.outcome, Outcome::Found(_)));
        }
        assert_eq!(*served.borrow(), 1);
    });
}

#[test]
fn a_host_without_ipv6_tells_of_none() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        let rules: Rc<dyn Rules> = Rc::<Policy>::clone(&policy);
        let resolver = Resolver::with(vec![server.address], 100, 100, || false);
        let session = SessionId::new(0, [1; 10]);
        let stub = Stub::new(resolver, fence(&[]), rules, session);
        let got = ask(&stub, "ok.test", RecordType::AAAA).await;
        assert_eq!(got.metadata.response_code, ResponseCode::NoError, "the name exists");
        assert!(got.answers.is_empty());
        assert_eq!(server.heard(), []);
        assert_eq!(told(&ask(&stub, "ok.test", RecordType::A).await), [GOOD]);
    });
}

/// A guest that asks without end: there is always one more, and nothing ever waits.
struct Endless(std::cell::Cell<usize>);

/// So many that a broken loop ends as well.
const ENDLESS: usize = 20_000;

impl Datagrams for Endless {
    fn recv<'a>(&'a self, into: &'a mut [u8]) -> Receiving<'a> {
        self.0.set(self.0.get() + 1);
        if self.0.get() >= ENDLESS {
            return Box::pin(std::future::ready(Err(io::ErrorKind::BrokenPipe.into())));
        }
        into[0] = 0;
        let from = "10.0.0.2:40000".parse().unwrap();
        Box::pin(std::future::ready(Ok(Received {
            len: 1,
            from,
            to: "9.9.9.9:53".parse().unwrap(),
        })))
    }

    fn send(&self, _: &[u8], _: SocketAddr, _: SocketAddr) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn case_76_a_flood_does_not_keep_the_thread() {
    run(async {
        let server = ok_zone().await;
        let policy = Policy::new(&["ok.test"]);
        let (stub, _) = stub(&server, fence(&[]), &policy);
        let flood = Rc::new(Endless(std::cell::Cell::new(0)));
        let line: Rc<dyn Datagrams> = Rc::<Endless>::clone(&flood);
        let serving = tokio::task::spawn_local(serve_udp(stub, line));
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        assert!(flood.0.get() < ENDLESS, "nobody else had a turn during the flood");
        serving.abort();
    });
}
