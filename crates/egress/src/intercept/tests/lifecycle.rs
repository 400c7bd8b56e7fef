//! Cases 15 to 17, 121 to 123 and 129: handshakes, keep-alive, policies that change.

use std::rc::Rc;

use http::{Request, Response};
use rustls::pki_types::ServerName;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::world::*;
use crate::reason::{Reason, Verdict};
use crate::trust::Authority;

const CANARY: &str = "Bearer canary-0123456789";

#[test]
fn case_17_and_129_a_client_that_does_not_trust_the_authority_gets_nothing() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let log = world.at("ok.test", &["http/1.1"], |_| Response::new(text(""))).await;
        let other = Authority::new(&session(2), Authority::UNKNOWN_LIFE).expect("an authority");
        for pem in [other.pem(), &world.root.pem] {
            let tcp = world.tcp(Some("ok.test"), 443).await;
            let met = world.handshake(tcp, "ok.test", client_of(pem, &["http/1.1"])).await;
            assert!(met.is_err());
            world.ended(Reason::TlsClientRejectedCa).await;
            world.ends.borrow_mut().clear();
        }
        assert!(log.borrow().is_empty() && world.around.dialled.borrow().is_empty());
    });
}

#[test]
fn case_15_no_early_data() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        world.at("ok.test", &["http/1.1"], |_| Response::new(text(""))).await;
        let mut config = (*world.client(&["http/1.1"])).clone();
        config.enable_early_data = true;
        let config = std::sync::Arc::new(config);
        for round in 0..2 {
            let tcp = world.tcp(Some("ok.test"), 443).await;
            let server = ServerName::try_from("ok.test").expect("a name");
            let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::clone(&config));
            let mut stream = connector
                .connect_with(server, tcp, |session| {
                    assert!(
                        session.early_data().is_none(),
                        "early data is offered in round {round}"
                    );
                })
                .await
                .expect("a handshake");
            let bytes = "GET / HTTP/1.1\r\nHost: ok.test\r\nConnection: close\r\n\r\n";
            stream.write_all(bytes.as_bytes()).await.expect("sent");
            assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 200 "));
            let resumed = stream.get_ref().1.handshake_kind();
            let want = if round == 0 {
                rustls::HandshakeKind::Full
            } else {
                rustls::HandshakeKind::Resumed
            };
            assert_eq!(resumed, Some(want));
        }
    });
}

#[test]
fn case_16_a_ticket_is_for_one_name() {
    run(|| async {
        let world = World::new(&json!({"allow": {
            "ok.test": [{"transform": [{"headers": {"authorization": CANARY}}]}],
            "two.test": [{"transform": [{"headers": {"authorization": CANARY}}]}]
        }}));
        for host in ["ok.test", "two.test"] {
            world.at(host, &["http/1.1"], |_| Response::new(text(""))).await;
        }
        let config = world.client(&["http/1.1"]);
        // The client takes a ticket for one name along to the other: same store, same key.
        let store = std::sync::Arc::new(Confused::default());
        let mut config = (*config).clone();
        config.resumption = rustls::client::Resumption::store(store);
        let config = std::sync::Arc::new(config);
        for (host, kind) in [
            ("ok.test", rustls::HandshakeKind::Full),
            ("ok.test", rustls::HandshakeKind::Resumed),
            ("two.test", rustls::HandshakeKind::Full),
        ] {
            let tcp = world.tcp(Some(host), 443).await;
            let mut stream = world
                .handshake(tcp, host, std::sync::Arc::clone(&config))
                .await
                .expect("a handshake");
            let bytes = format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
            stream.write_all(bytes.as_bytes()).await.expect("sent");
            assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 200 "), "{host}");
            assert_eq!(stream.get_ref().1.handshake_kind(), Some(kind), "{host}");
        }
    });
}

/// A client's store that gives the last ticket for any name.
#[derive(Debug, Default)]
struct Confused {
    ticket: std::sync::Mutex<Option<rustls::client::Tls13ClientSessionValue>>,
}

impl rustls::client::ClientSessionStore for Confused {
    fn set_kx_hint(&self, _: ServerName<'static>, _: rustls::NamedGroup) {}
    fn kx_hint(&self, _: &ServerName<'_>) -> Option<rustls::NamedGroup> {
        None
    }
    fn set_tls12_session(
        &self,
        _: ServerName<'static>,
        _: rustls::client::Tls12ClientSessionValue,
    ) {
    }
    fn tls12_session(&self, _: &ServerName<'_>) -> Option<rustls::client::Tls12ClientSessionValue> {
        None
    }
    fn remove_tls12_session(&self, _: &ServerName<'static>) {}
    fn insert_tls13_ticket(
        &self,
        _: ServerName<'static>,
        value: rustls::client::Tls13ClientSessionValue,
    ) {
        *self.ticket.lock().expect("a lock") = Some(value);
    }
    fn take_tls13_ticket(
        &self,
        _: &ServerName<'static>,
    ) -> Option<rustls::client::Tls13ClientSessionValue> {
        self.ticket.lock().expect("a lock").take()
    }
}

#[test]
fn case_122_each_request_of_a_kept_connection_is_judged_by_the_policy_in_force() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let log = world.at("ok.test", &["h2", "http/1.1"], |_| Response::new(text("fine"))).await;
        for http2 in [false, true] {
            log.borrow_mut().clear();
            world.replace(&inject("authorization", CANARY));
            let mut asker =
                if http2 { world.asker2("ok.test").await } else { world.asker("ok.test").await };
            let request = || {
                let target = if http2 { "https://ok.test/" } else { "/" };
                get("ok.test", target).body("").expect("")
            };
            assert_eq!(asker.send(request()).await.status, 200);
            // The rule goes away, and the connection is still there: no credential.
            world.replace(&json!({"allow": ["ok.test"]}));
            assert_eq!(asker.send(request()).await.status, 200);
            // The name goes away.
            world.replace(&json!({"allow": ["other.test"]}));
            let got = asker.send(request()).await;
            assert_eq!((got.status, got.deny()), (403, "domain_not_listed"));
            assert!(got.body.contains("hint"), "{}", got.body);
            let seen: Vec<_> =
                log.borrow().iter().map(|s| s.header("authorization").map(str::to_owned)).collect();
            assert_eq!(seen, [Some(CANARY.to_owned()), None]);
            assert_eq!(log.borrow().len(), 2);
        }
        assert_eq!(world.generation(), 7);
    });
}

#[test]
fn a_rule_that_has_ended_acts_no_more() {
    run(|| async {
        let past = 1_000_000_000_000u64;
        let rule = |end: u64| {
            json!({"allow": {"ok.test": [
                {"transform": [{"headers": {"authorization": CANARY}}], "expiresAt": end}
            ]}})
        };
        let world = World::new(&rule(4_000_000_000_000));
        let log = world.at("ok.test", &["http/1.1"], |_| Response::new(text(""))).await;
        world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
        world.replace(&rule(past));
        world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
        let seen: Vec<_> =
            log.borrow().iter().map(|s| s.header("authorization").is_some()).collect();
        assert_eq!(seen, [true, false]);
    });
}

#[test]
fn case_121_a_cut_ends_what_is_under_way() {
    run(|| async {
        for http2 in [false, true] {
            let world = World::new(&inject("authorization", CANARY));
            // The origin answers with a head and a body that never ends.
            let tls = world.root.server("ok.test", &["http/1.1"], |_| ());
            let closed = Rc::new(tokio::sync::Notify::new());
            let told = Rc::clone(&closed);
            let origin = raw_origin(tls, move |mut stream| {
                let told = Rc::clone(&told);
                async move {
                    read_head(&mut stream).await;
                    let head = "HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nsome";
                    let _ = stream.write_all(head.as_bytes()).await;
                    let _ = stream.flush().await;
                    read_head(&mut stream).await;
                    told.notify_one();
                }
            })
            .await;
            world.place("ok.test", 443, origin);
            let mut asker =
                if http2 { world.asker2("ok.test").await } else { world.asker("ok.test").await };
            let target = if http2 { "https://ok.test/" } else { "/" };
            let asked = tokio::task::spawn_local(async move {
                asker.try_send(get("ok.test", target).body("").expect("")).await
            });
            // Under way: noted with its site and rule, and the address that it went to.
            loop {
                let seen = std::cell::Cell::new(false);
                let sweep = world.flows.sweep(Reason::PolicyChanged, &|_, ongoing| {
                    seen.set(ongoing.iter().any(|o| o.dialled.is_some() && o.rule == Some(0)));
                    !seen.get()
                });
                if seen.get() {
                    assert_eq!(sweep.over(LONG).await, Ok(1));
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
            assert!(asked.await.expect("no panic").is_err(), "the guest sees that it was cut");
            // The destination's connection is gone too.
            closed.notified().await;
            let line = world.line(|l| l.verdict == Verdict::Cut).await;
            assert_eq!(line.reason, Reason::PolicyChanged);
            assert!(world.flows.is_empty());
        }
    });
}

#[test]
fn case_123_a_range_that_is_denied_during_the_handshake_gets_no_request() {
    run(|| async {
        let socket = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                      Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
        for more in ["", socket] {
            let world = World::new(&inject("authorization", CANARY));
            let origin = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
            world.place("ok.test", 443, origin.local_addr().expect("an address"));
            let mut guest = world.tls("ok.test", &["http/1.1"]).await;
            let request = format!("GET / HTTP/1.1\r\nHost: ok.test\r\n{more}\r\n");
            guest.write_all(request.as_bytes()).await.expect("sent");
            let (tcp, _) = origin.accept().await.expect("dialled");
            // The same rule, so that a sweep leaves it; but where it leads is denied now.
            let mut denied = inject("authorization", CANARY);
            denied["subnets"] = json!({"deny": ["127.0.0.0/8"]});
            world.replace(&denied);
            let tls = world.root.server("ok.test", &["http/1.1"], |_| ());
            let accepted = tokio_rustls::TlsAcceptor::from(tls).accept(tcp).await;
            let mut stream = accepted.expect("a handshake");
            assert_eq!(read_head(&mut stream).await, "", "a denied address got the request");
            let head = read_head(&mut guest).await;
            assert!(head.starts_with("HTTP/1.1 403"), "{head}");
            assert!(head.contains("x-bivouac-deny: subnet_denied"), "{head}");
        }
    });
}

#[test]
fn a_session_that_rests_keeps_nothing_and_wakes_again() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let log = world.at("ok.test", &["h2"], |_| Response::new(text(""))).await;
        for _ in 0..3 {
            let request = Request::get("/").header("host", "ok.test").body("").expect("");
            assert_eq!(world.ask("ok.test", request).await.status, 200);
            world.interception.trim();
        }
        assert_eq!(log.borrow().len(), 3);
        let connections: Vec<_> = log.borrow().iter().map(|s| s.connection).collect();
        assert_eq!(connections, [1, 2, 3]);
    });
}

#[test]
fn a_kept_connection_that_the_destination_closed_is_replaced() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let tls = world.root.server("ok.test", &["http/1.1"], |_| ());
        let served = Rc::new(std::cell::Cell::new(0));
        let count = Rc::clone(&served);
        // Answers once on each connection, says that it keeps it, and closes.
        let origin = raw_origin(tls, move |mut stream| {
            let count = Rc::clone(&count);
            async move {
                read_head(&mut stream).await;
                count.set(count.get() + 1);
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
                let _ = stream.flush().await;
                // The next request is read and not answered.
                read_head(&mut stream).await;
            }
        })
        .await;
        world.place("ok.test", 443, origin);
        let mut asker = world.asker("ok.test").await;
        for n in 1..=5 {
            let got = asker.send(get("ok.test", "/").body("").expect("")).await;
            assert_eq!((got.status, served.get()), (200, n));
        }
    });
}
