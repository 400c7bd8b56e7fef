//! The broker as a client of name servers that fail, lie and guess.

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name as WireName, Record, RecordType};
use tokio::net::UdpSocket;

use super::super::fake::{Asked, Server, alias, answer, ip, name, record, resolver, run};
use super::super::{Family, Outcome};

const GOOD: &str = "203.0.113.10";
const EVIL: &str = "203.0.113.66";

async fn found(servers: &[SocketAddr], of: &str) -> Outcome {
    resolver(servers.to_vec()).lookup(&name(of), Family::V4).await.outcome
}

fn is(outcome: &Outcome, address: &str) -> bool {
    let address: IpAddr = address.parse().unwrap();
    matches!(outcome, Outcome::Found(found) if **found == [address])
}

fn bytes(message: &Message) -> Vec<u8> {
    message.to_vec().unwrap()
}

fn says(query: &Message, address: &str) -> Message {
    let owner = query.queries[0].name().to_ascii();
    let records = vec![record(owner.trim_end_matches('.'), 30, ip(address))];
    answer(query, ResponseCode::NoError, records)
}

/// An address where no name server is.
async fn nobody() -> SocketAddr {
    UdpSocket::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

#[test]
fn what_is_not_the_answer_is_ignored() {
    run(async {
        let server = Server::new(|query, _| {
            let lie = says(query, EVIL);
            let mut id = lie.clone();
            id.metadata.id ^= 1;
            let mut other = lie.clone();
            other.queries =
                vec![Query::query(WireName::from_ascii("x.test.").unwrap(), RecordType::A)];
            let mut kind = lie.clone();
            kind.queries[0].set_query_type(RecordType::AAAA);
            let mut none = lie.clone();
            none.queries.clear();
            let mut question = lie.clone();
            question.metadata.message_type = hickory_proto::op::MessageType::Query;
            let lies = [id, other, kind, none, question];
            let mut all: Vec<_> = lies.iter().map(bytes).collect();
            all.push(vec![0; 3]);
            all.push(bytes(&says(query, GOOD)));
            all
        })
        .await;
        assert!(is(&found(&[server.address], "ok.test").await, GOOD));
        assert_eq!(server.heard().len(), 1, "the first good answer ends it");
    });
}

#[test]
fn an_answer_from_another_socket_is_not_heard() {
    run(async {
        let other = Rc::new(std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        let port = Rc::new(Cell::new(0));
        // A silent server that lets us see the source port through a second socket on the way.
        let front = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = front.local_addr().unwrap();
        let (spoof, seen) = (Rc::clone(&other), Rc::clone(&port));
        tokio::task::spawn_local(async move {
            let mut buffer = [0; 1500];
            let (length, from) = front.recv_from(&mut buffer).await.unwrap();
            seen.set(from.port());
            let query = Message::from_vec(&buffer[..length]).unwrap();
            // Right in everything but where it comes from.
            spoof.send_to(&bytes(&says(&query, EVIL)), from).unwrap();
            front.send_to(&bytes(&says(&query, GOOD)), from).await.unwrap();
        });
        assert!(is(&found(&[address], "ok.test").await, GOOD));
        assert_ne!(port.get(), 0);
    });
}

#[test]
fn a_guesser_sends_the_question_to_tcp() {
    run(async {
        let server = Server::new(|query, asked| {
            if asked.by_stream {
                return vec![bytes(&says(query, GOOD))];
            }
            (0..50u16)
                .map(|n| {
                    let mut guess = says(query, EVIL);
                    guess.metadata.id ^= n + 1;
                    bytes(&guess)
                })
                .collect()
        })
        .await;
        assert!(is(&found(&[server.address], "ok.test").await, GOOD));
        assert_eq!(server.heard().iter().filter(|asked| asked.by_stream).count(), 1);
    });
}

#[test]
fn an_answer_in_another_spelling_is_asked_for_again_by_tcp() {
    run(async {
        // An old server that gives names back in lower case, by both ways.
        let server = Server::new(|query, asked| {
            let mut got = says(query, if asked.by_stream { GOOD } else { EVIL });
            let lower = WireName::from_ascii(format!("{}.", asked.name)).unwrap();
            got.queries[0].set_name(lower);
            vec![bytes(&got)]
        })
        .await;
        // Long enough that no random spelling is all lower case.
        let long = "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz.ok.test";
        assert!(is(&found(&[server.address], long).await, GOOD));
    });
}

#[test]
fn spelling_and_id_are_random() {
    run(async {
        let seen = Rc::new(std::cell::RefCell::new(Vec::new()));
        let log = Rc::clone(&seen);
        let server = Server::new(move |query, _| {
            log.borrow_mut().push((query.metadata.id, query.queries[0].name().to_ascii()));
            vec![bytes(&says(query, GOOD))]
        })
        .await;
        for _ in 0..8 {
            found(&[server.address], "abcdefghijklmnopqrstuvwxyz.ok.test").await;
        }
        let mut ids: Vec<_> = seen.borrow().iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() >= 6, "{ids:?}");
        let mut names: Vec<_> = seen.borrow().iter().map(|(_, name)| name.clone()).collect();
        names.sort_unstable();
        names.dedup();
        assert!(names.len() >= 6, "{names:?}");
    });
}

#[test]
fn records_of_other_names_are_not_taken() {
    run(async {
        let server = Server::new(|query, _| {
            let mut message = answer(
                query,
                ResponseCode::NoError,
                vec![
                    record("evil.test", 30, ip(EVIL)),
                    record("sub.ok.test", 30, ip(EVIL)),
                    record("test", 30, ip(EVIL)),
                ],
            );
            message.add_additional(record("ok.test", 30, ip(EVIL)));
            message.add_authority(record("ok.test", 30, ip(EVIL)));
            vec![bytes(&message)]
        })
        .await;
        assert_eq!(found(&[server.address], "ok.test").await, Outcome::None { exists: true });
        // Nor later, for the names that were planted.
        let resolver = resolver(vec![server.address]);
        resolver.lookup(&name("ok.test"), Family::V4).await;
        let asked = resolver.asked();
        resolver.lookup(&name("evil.test"), Family::V4).await;
        assert_eq!(resolver.asked(), asked + 1, "nothing was kept of it");
    });
}

#[test]
fn aliases_are_followed_in_any_order_and_not_for_ever() {
    run(async {
        let chain: fn(&Asked) -> Vec<Record> = |asked| match asked.name.as_str() {
            "a.test" => vec![
                record("c.test", 30, ip(GOOD)),
                record("B.test", 30, alias("c.TEST")),
                record("a.TEST", 30, alias("b.test")),
            ],
            "loop.test" => vec![
                record("loop.test", 30, alias("pool.test")),
                record("pool.test", 30, alias("loop.test")),
            ],
            "dangling.test" => vec![record("dangling.test", 30, alias("gone.test"))],
            _ => vec![record("self.test", 30, alias("self.test"))],
        };
        let server = Server::new(move |query, asked| {
            vec![bytes(&answer(query, ResponseCode::NoError, chain(asked)))]
        })
        .await;
        assert!(is(&found(&[server.address], "a.test").await, GOOD));
        for none in ["loop.test", "self.test", "dangling.test"] {
            assert_eq!(found(&[server.address], none).await, Outcome::None { exists: true });
        }
        assert_eq!(server.heard().len(), 4, "no name that an alias gave is asked for");
    });
}

#[test]
fn what_is_cut_off_is_asked_for_by_tcp() {
    run(async {
        let server = Server::new(|query, asked| {
            if asked.by_stream {
                return vec![bytes(&says(query, GOOD))];
            }
            let mut cut = says(query, EVIL);
            cut.metadata.truncation = true;
            let mut cut = bytes(&cut);
            // In the middle of a record, as some do.
            cut.truncate(cut.len() - 3);
            vec![cut]
        })
        .await;
        assert!(is(&found(&[server.address], "ok.test").await, GOOD));
        let by: Vec<_> = server.heard().iter().map(|asked| asked.by_stream).collect();
        assert_eq!(by, [false, true]);
    });
}

#[test]
fn the_next_server_is_asked_when_one_fails_refuses_or_is_away() {
    run(async {
        let good = Server::new(|query, _| vec![bytes(&says(query, GOOD))]).await;
        for code in [ResponseCode::ServFail, ResponseCode::Refused] {
            let bad = Server::new(move |query, _| vec![bytes(&answer(query, code, vec![]))]).await;
            assert!(is(&found(&[bad.address, good.address], "ok.test").await, GOOD));
            assert_eq!(bad.heard().len(), 1);
        }
        let broken = Server::new(|query, _| {
            let mut cut = bytes(&says(query, EVIL));
            cut.truncate(cut.len() - 3);
            vec![cut]
        })
        .await;
        assert!(is(&found(&[broken.address, good.address], "ok.test").await, GOOD));
        assert!(is(&found(&[nobody().await, good.address], "ok.test").await, GOOD));
        let silent = Server::new(|_, _| vec![]).await;
        let resolver = resolver(vec![silent.address, good.address]);
        assert!(is(&resolver.lookup(&name("ok.test"), Family::V4).await.outcome, GOOD));
        // Who answered is asked first for a while.
        assert!(is(&resolver.lookup(&name("two.test"), Family::V4).await.outcome, GOOD));
        assert_eq!(silent.heard().len(), 1);
    });
}

#[test]
fn a_name_that_does_not_exist_is_an_answer_and_not_a_failure() {
    run(async {
        let first =
            Server::new(|query, _| vec![bytes(&answer(query, ResponseCode::NXDomain, vec![]))])
                .await;
        let second = Server::new(|query, _| vec![bytes(&says(query, EVIL))]).await;
        let servers = [first.address, second.address];
        assert_eq!(found(&servers, "ok.test").await, Outcome::None { exists: false });
        assert_eq!(second.heard(), []);
    });
}

#[test]
fn no_server_left_is_a_failure_with_a_reason() {
    run(async {
        let Outcome::Failed(why) = found(&[nobody().await], "ok.test").await else {
            panic!("found something at nobody's")
        };
        assert!(why.contains("127.0.0.1"), "{why}");
        assert!(matches!(found(&[], "ok.test").await, Outcome::Failed(_)));
    });
}

#[test]
fn a_server_from_before_edns_is_asked_without() {
    run(async {
        let server = Server::new(|query, asked| {
            if asked.edns {
                return vec![bytes(&answer(query, ResponseCode::FormErr, vec![]))];
            }
            vec![bytes(&says(query, GOOD))]
        })
        .await;
        assert!(is(&found(&[server.address], "ok.test").await, GOOD));
    });
}

#[test]
fn special_names_are_never_asked_for() {
    run(async {
        let server = Server::new(|query, _| vec![bytes(&says(query, EVIL))]).await;
        for special in ["localhost", "a.localhost", "1.in-addr.arpa", "a.ip6.arpa", "x.onion"] {
            let got = found(&[server.address], special).await;
            assert_eq!(got, Outcome::None { exists: false }, "{special}");
        }
        assert_eq!(server.heard(), []);
    });
}
