//! Cases 58, 94 and 133 of memory: readers that do not read, destinations that do not end, bodies that wait.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use http::Response;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::http2::{PREFACE, frame, literal};
use super::world::*;
use crate::intercept::budget::{FRAME, MOST_HELD, MOST_ROOM};
use crate::reason::Reason;

/// An answer that never ends.
fn endless() -> OutBody {
    let chunk = Bytes::from(vec![b'x'; 64 * 1024]);
    let frames = futures_util::stream::repeat_with(move || Ok(Frame::data(chunk.clone())));
    StreamBody::new(frames).boxed_unsync()
}

/// A guest's HTTP/2 connection with large windows, on which requests are sent and nothing is read.
async fn unread(world: &Rc<World>, streams: u32) -> tokio_rustls::client::TlsStream<TcpStream> {
    let mut stream = world.tls("ok.test", &["h2"]).await;
    let mut bytes = PREFACE.to_vec();
    bytes.extend(frame(4, 0, 0, &[0, 4, 0, 0x10, 0, 0]));
    bytes.extend(frame(8, 0, 0, &(1_u32 << 30).to_be_bytes()));
    let ask = [
        (":method", "GET"),
        (":scheme", "https"),
        (":authority", "ok.test"),
        (":path", "/endless"),
    ];
    let head: Vec<u8> = ask.iter().flat_map(|(name, value)| literal(name, value)).collect();
    for n in 0..streams {
        bytes.extend(frame(1, 5, 2 * n + 1, &head));
    }
    stream.write_all(&bytes).await.expect("sent");
    stream
}

#[test]
fn readers_that_do_not_read_hold_a_bounded_sum_and_nobody_else_up() {
    run(|| async {
        let world = World::new(&inject("authorization", "canary"));
        let answer = |seen: &Seen| {
            let endless_one = seen.target == "/endless";
            Response::new(if endless_one { endless() } else { text("y".repeat(1 << 20)) })
        };
        world.at("ok.test", &["http/1.1"], answer).await;
        let budget = world.interception.budget.clone();
        let mut guests = Vec::new();
        for _ in 0..5 {
            guests.push(unread(&world, 80).await);
        }
        while budget.sums().1 <= MOST_HELD {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        // Somebody who reads gets all of it, beside them.
        for _ in 0..3 {
            let request = get("ok.test", "/whole").body("").expect("");
            let got = world.ask("ok.test", request).await;
            assert_eq!((got.status, got.body.len()), (200, 1 << 20));
            // One frame more for each of the answers.
            let most = MOST_HELD + (5 * 80 + 1) * FRAME;
            assert!(budget.sums().1 <= most, "{:?}", budget.sums());
        }
        // One of them reads: it gets far more than was on its way.
        let mut one = guests.pop().expect("one");
        let mut buffer = vec![0; 64 * 1024];
        let mut read = 0;
        while read < 16 << 20 {
            read += one.read(&mut buffer).await.expect("more");
        }
        drop((guests, one));
        loop {
            world.interception.trim();
            if budget.sums() == (0, 0) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
}

#[test]
fn connections_without_room_are_refused_and_others_go_on() {
    run(|| async {
        let world = World::new(&inject("authorization", "canary"));
        world.at("ok.test", &["http/1.1"], |_| Response::new(text("here"))).await;
        let mut kept = world.asker("ok.test").await;
        let ask = || get("ok.test", "/").body("").expect("");
        assert_eq!(kept.send(ask()).await.status, 200);
        let budget = world.interception.budget.clone();
        let all = budget.room(MOST_ROOM - budget.sums().0).expect("the rest");
        // Not even a handshake for a new one.
        let tcp = world.tcp(Some("ok.test"), 443).await;
        assert!(world.handshake(tcp, "ok.test", world.client(&["http/1.1"])).await.is_err());
        world.ended(Reason::Limit).await;
        // The one that is there goes on, by the connection that it has; a large head finds no room.
        assert_eq!(kept.send(ask()).await.status, 200);
        let large = get("ok.test", "/").header("x", "x".repeat(9000)).body("").expect("");
        let got = kept.send(large).await;
        assert_eq!((got.status, got.deny()), (503, "limit"));
        world.interception.forget();
        let got = kept.send(ask()).await;
        assert_eq!(
            (got.status, got.deny()),
            (200, ""),
            "an idle connection made room: {}",
            got.body
        );
        drop(all);
        assert_eq!(world.ask("ok.test", ask()).await.status, 200);
    });
}

#[test]
fn a_long_head_needs_room_of_its_own() {
    run(|| async {
        let world = World::new(&inject("authorization", "canary"));
        world.at("ok.test", &["http/1.1"], |_| Response::new(text("here"))).await;
        let head = |size| {
            format!(
                "GET / HTTP/1.1\r\nHost: ok.test\r\nConnection: close\r\nx: {}\r\n\r\n",
                "x".repeat(size)
            )
        };
        assert!(world.raw("ok.test", &head(40_000)).await.starts_with("HTTP/1.1 200 "));
        let budget = world.interception.budget.clone();
        let all = budget.room(MOST_ROOM - budget.sums().0 - 200_000).expect("the rest");
        let said = world.raw("ok.test", &head(40_000)).await;
        assert!(said.starts_with("HTTP/1.1 503 ") && said.contains("limit"), "{said}");
        drop(all);
        assert!(world.raw("ok.test", &head(40_000)).await.starts_with("HTTP/1.1 200 "));
    });
}

#[test]
fn interim_answers_of_http2_have_an_end() {
    run(|| async {
        let world = World::new(&inject("authorization", "canary"));
        let tls = world.root.server("ok.test", &["h2"], |_| ());
        let address = raw_origin(tls, |mut stream| async move {
            let mut preface = [0; 24];
            let _ = stream.read_exact(&mut preface).await;
            let _ = stream.write_all(&frame(4, 0, 0, &[])).await;
            // Until a request came.
            loop {
                let mut header = [0; 9];
                if stream.read_exact(&mut header).await.is_err() {
                    return;
                }
                let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
                let mut payload = vec![0; length as usize];
                let _ = stream.read_exact(&mut payload).await;
                if header[3] == 1 {
                    break;
                }
            }
            let one = frame(1, 4, 1, &literal(":status", "103"));
            while stream.write_all(&one).await.is_ok() {}
        })
        .await;
        world.place("ok.test", 443, address);
        let got = world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
        assert_eq!((got.status, got.deny()), (502, "upstream_protocol"));
        assert!(got.body.contains("interim"), "{}", got.body);
    });
}

#[test]
fn a_signed_body_gives_its_place_back_when_it_is_sent() {
    run(|| async {
        let host = "bucket.s3.eu-west-1.amazonaws.com";
        let keys = json!({"accessKeyId": "AKID", "secretAccessKey": "canary-secret-key"});
        let world = World::new(&json!({"allow": {host: [{"sign": {"aws": keys}}]}}));
        let log = world
            .at(host, &["http/1.1"], |_| {
                let never = futures_util::stream::pending().map(Ok::<_, std::convert::Infallible>);
                Response::new(StreamBody::new(never).map_err(|e| match e {}).boxed_unsync())
            })
            .await;
        // More than there are places; no answer ends.
        let mut waiting = Vec::new();
        for n in 0..7 {
            let mut stream = world.tls(host, &["http/1.1"]).await;
            let body = "b".repeat(100_000);
            let request = format!(
                "PUT /{n} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(request.as_bytes()).await.expect("sent");
            assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 200 "), "{n}");
            waiting.push(stream);
        }
        assert_eq!(log.borrow().len(), 7);
        assert!(log.borrow().iter().all(|seen| seen.body.len() == 100_000));
        assert_eq!(
            world.interception.buffers.available_permits(),
            crate::intercept::sign::MOST_BUFFERED
        );
    });
}
