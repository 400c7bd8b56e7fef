//! Cases 5, 6 and 54 to 62: HTTP/2 and gRPC.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, Version};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::world::*;
use crate::intercept::upstream::Tasks;
use crate::reason::Reason;

const CANARY: &str = "Bearer canary-0123456789";

async fn world(alpn: &[&str]) -> (Rc<World>, Log) {
    let world = World::new(&inject("authorization", CANARY));
    let log = world.at("ok.test", alpn, |_| Response::new(text("fine"))).await;
    (world, log)
}

#[test]
fn either_protocol_is_translated_into_the_other() {
    run(|| async {
        for (down, up) in
            [("h2", "h2"), ("h2", "http/1.1"), ("http/1.1", "h2"), ("http/1.1", "http/1.1")]
        {
            let (world, log) = world(&[up]).await;
            let (mut asker, target) = match down {
                "h2" => (world.asker2("ok.test").await, "https://ok.test/a?b"),
                _ => (world.asker("ok.test").await, "/a?b"),
            };
            let mut request = Request::post(target).header("cookie", "a=1");
            request = if down == "h2" {
                request.header("cookie", "b=2")
            } else {
                request.header("host", "ok.test")
            };
            let got = asker.send(request.body("body").expect("")).await;
            assert_eq!((got.status, got.body.as_str()), (200, "fine"), "{down} {up}");
            let seen = log.borrow()[0].clone();
            let version = if up == "h2" { Version::HTTP_2 } else { Version::HTTP_11 };
            assert_eq!(seen.version, version);
            assert_eq!((seen.target.as_str(), &seen.body[..]), ("/a?b", &b"body"[..]));
            assert_eq!(seen.header("authorization"), Some(CANARY));
            if up == "h2" {
                assert_eq!(seen.authority.as_deref(), Some("ok.test"));
                assert_eq!(seen.header("host"), None);
            } else {
                assert_eq!(seen.header("host"), Some("ok.test"));
            }
            if (down, up) == ("h2", "http/1.1") {
                assert_eq!(seen.header("cookie"), Some("a=1; b=2"));
            }
        }
    });
}

#[test]
fn case_5_6_and_55_each_stream_is_for_the_connections_own_host() {
    run(|| async {
        let (world, log) = world(&["h2"]).await;
        let mut asker = world.asker2("ok.test").await;
        for bad in
            ["https://evil.test/", "https://ok.test:8443/", "https://x@ok.test/", "https://127.1/"]
        {
            let got = asker.send(Request::get(bad).body("").expect("")).await;
            assert_eq!((got.status, got.deny()), (421, "authority_mismatch"), "{bad}");
        }
        let two = Request::get("https://ok.test/").header("host", "evil.test").body("").expect("");
        assert_eq!(asker.send(two).await.status, 421);
        assert!(log.borrow().is_empty());
        // The connection goes on.
        let got = asker.send(Request::get("https://ok.test/").body("").expect("")).await;
        assert_eq!(got.status, 200);
        assert_eq!(log.borrow().len(), 1);
    });
}

#[test]
fn case_56_another_scheme() {
    run(|| async {
        let (world, log) = world(&["h2"]).await;
        let mut asker = world.asker2("ok.test").await;
        let got = asker.send(Request::get("http://ok.test/").body("").expect("")).await;
        assert_eq!((got.status, got.deny()), (400, "http_invalid"));
        assert!(log.borrow().is_empty());
    });
}

/// A frame of HTTP/2.
pub(super) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    let mut out = length[1..].to_vec();
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend(payload);
    out
}

/// A header field as a literal that is not indexed.
pub(super) fn literal(name: &str, value: &str) -> Vec<u8> {
    let mut out = vec![0];
    for text in [name, value] {
        assert!(text.len() < 127);
        out.push(u8::try_from(text.len()).expect("short"));
        out.extend(text.as_bytes());
    }
    out
}

pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

#[test]
fn case_54_56_and_57_malformed_streams() {
    run(|| async {
        let (world, log) = world(&["h2"]).await;
        let good =
            [(":method", "GET"), (":scheme", "https"), (":authority", "ok.test"), (":path", "/")];
        let mut cases: Vec<Vec<(&str, &str)>> = vec![
            [&good[..], &[(":authority", "evil.test")]].concat(),
            [&good[..], &[("transfer-encoding", "chunked")]].concat(),
            [&good[..], &[("connection", "close")]].concat(),
            [&good[..], &[("Upper", "x")]].concat(),
            [&good[..], &[("a:b", "x")]].concat(),
            [&good[..], &[("a", "x\r\ny: z")]].concat(),
            [&good[..], &[("content-length", "5")]].concat(),
            [&good[..], &[("te", "gzip")]].concat(),
        ];
        for (name, value) in [
            (":path", "*"),
            (":path", "https://evil.test/"),
            (":path", "/a b"),
            (":path", ""),
            (":method", "CONNECT"),
        ] {
            cases.push(good.iter().map(|f| if f.0 == name { (name, value) } else { *f }).collect());
        }
        let websocket = [(":method", "CONNECT"), (":protocol", "websocket")];
        cases.push([&websocket[..], &good[1..]].concat());
        for case in cases {
            let mut stream = world.tls("ok.test", &["h2"]).await;
            let block: Vec<u8> = case.iter().flat_map(|(n, v)| literal(n, v)).collect();
            let bytes = [PREFACE, &frame(4, 0, 0, &[]), &frame(1, 5, 1, &block)].concat();
            stream.write_all(&bytes).await.expect("sent");
            // Whatever is answered, it ends: the stream is reset, refused, or the connection is closed.
            assert!(refused(&mut stream).await, "{case:?}");
        }
        assert!(log.borrow().is_empty(), "{:?}", log.borrow());
    });
}

/// Reads frames until the stream is refused; false when it is answered with success.
async fn refused(stream: &mut (impl AsyncReadExt + Unpin)) -> bool {
    loop {
        let mut head = [0; 9];
        if stream.read_exact(&mut head).await.is_err() {
            return true;
        }
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut payload = vec![0; length];
        if stream.read_exact(&mut payload).await.is_err() {
            return true;
        }
        match head[3] {
            // An answer: the indexed field 8 is status 200.
            1 => return payload.first() != Some(&0x88),
            3 | 7 => return true,
            _ => {}
        }
    }
}

#[test]
fn case_58_floods_end_the_connection() {
    run(|| async {
        let (world, _) = world(&["h2"]).await;
        let good =
            [(":method", "GET"), (":scheme", "https"), (":authority", "ok.test"), (":path", "/")];
        let block: Vec<u8> = good.iter().flat_map(|(n, v)| literal(n, v)).collect();
        // Streams that are reset as soon as they are opened.
        let mut rapid = Vec::new();
        for n in 0..2000u32 {
            rapid.extend(frame(1, 5, n * 2 + 1, &block));
            rapid.extend(frame(3, 0, n * 2 + 1, &8u32.to_be_bytes()));
        }
        // A header block without end.
        let mut endless = frame(1, 1, 1, &block);
        for _ in 0..400 {
            endless.extend(frame(9, 0, 1, &literal("x", &"y".repeat(120)).repeat(8)));
        }
        // One field, referred to again and again.
        let mut bomb = block.clone();
        bomb.extend([0x40, 1, b'x', 0x7f, 0x81, 0x1e]);
        bomb.extend([b'y'; 4000]);
        bomb.extend([0xbe; 12_000]);
        let bomb = frame(1, 5, 1, &bomb);
        for (what, flood) in [("rapid reset", rapid), ("continuation", endless), ("hpack", bomb)] {
            let stream = world.tls("ok.test", &["h2"]).await;
            let (mut from, mut to) = tokio::io::split(stream);
            let writer = tokio::task::spawn_local(async move {
                let _ = to.write_all(&[PREFACE, &frame(4, 0, 0, &[])].concat()).await;
                let _ = to.write_all(&flood).await;
                to
            });
            assert!(refused(&mut from).await, "{what}");
            drop(writer);
        }
        // Others are served meanwhile.
        let got = world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;
        assert_eq!(got.status, 200);
    });
}

#[test]
fn case_59_what_http2_allows_does_not_become_a_second_request_of_http1() {
    run(|| async {
        let (world, log) = world(&["http/1.1"]).await;
        let mut asker = world.asker2("ok.test").await;
        let body = "0\r\n\r\nGET /evil HTTP/1.1\r\nHost: evil.test\r\n\r\n";
        let request = Request::post("https://ok.test/1").body(body).expect("");
        assert_eq!(asker.send(request).await.status, 200);
        let request = Request::post("https://ok.test/2?a=%0d%0aX:y").body("").expect("");
        assert_eq!(asker.send(request).await.status, 200);
        let seen = log.borrow();
        assert_eq!(seen.len(), 2);
        assert_eq!(seen[0].body, body);
        assert_eq!(seen[1].target, "/2?a=%0d%0aX:y");
    });
}

fn grpc() -> Response<OutBody> {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().expect("a value"));
    trailers.insert("grpc-message", CANARY.parse().expect("a value"));
    trailers.insert("x-other", "gone".parse().expect("a value"));
    let frames = [Ok(Frame::data(Bytes::from_static(b"reply"))), Ok(Frame::trailers(trailers))];
    let body = StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync();
    Response::builder().header("content-type", "application/grpc").body(body).expect("an answer")
}

#[test]
fn case_62_grpc() {
    run(|| async {
        let world = World::new(&json!({"allow": {"ok.test": [{
            "match": {"path": {"startsWith": "/pkg.Service/"}, "method": ["POST"]},
            "transform": [{"headers": {"authorization": CANARY}}]
        }]}}));
        let log = world.at("ok.test", &["h2"], |_| grpc()).await;
        let mut asker = world.asker2("ok.test").await;
        let request = Request::post("https://ok.test/pkg.Service/Method")
            .header("te", "trailers")
            .header("grpc-encoding", "identity")
            .header("content-type", "application/grpc")
            .body("call")
            .expect("");
        let got = asker.send(request).await;
        assert_eq!(got.body, "reply");
        let trailers = got.trailers.expect("trailers");
        assert_eq!(trailers["grpc-status"], "0");
        assert_eq!(trailers["grpc-message"], "[redacted]");
        assert!(!trailers.contains_key("x-other"));
        let seen = log.borrow()[0].clone();
        assert_eq!(seen.header("te"), Some("trailers"));
        assert_eq!(seen.header("grpc-encoding"), Some("identity"));
        assert_eq!(seen.header("authorization"), Some(CANARY));
    });
}

#[test]
fn frames_of_a_stream_pass_as_they_come() {
    events(true);
    events(false);
}

/// Sends events, each only when the one before has arrived.
fn events(http2: bool) {
    run(|| async move {
        let world = World::new(&inject("authorization", CANARY));
        let (send, receive) = tokio::sync::mpsc::channel::<Bytes>(1);
        let receive = Rc::new(std::cell::RefCell::new(Some(receive)));
        world
            .at("ok.test", if http2 { &["h2"] } else { &["http/1.1"] }, move |_| {
                let receive = receive.borrow_mut().take().expect("one request");
                let frames = futures_util::stream::unfold(receive, |mut receive| async move {
                    receive.recv().await.map(|b| (Ok(Frame::data(b)), receive))
                });
                Response::builder()
                    .header("content-type", "text/event-stream")
                    .body(StreamBody::new(frames).boxed_unsync())
                    .expect("an answer")
            })
            .await;
        let stream = world.tls("ok.test", if http2 { &["h2"] } else { &["http/1.1"] }).await;
        let io = TokioIo::new(stream);
        let target = if http2 { "https://ok.test/events" } else { "/events" };
        let request = Request::get(target).header("host", "ok.test");
        let request = request.body(http_body_util::Empty::<Bytes>::new()).expect("a request");
        // The sender is kept: without it the guest closes the connection.
        let (_sender, mut body): (Box<dyn std::any::Any>, _) = if http2 {
            let (mut sender, connection) =
                hyper::client::conn::http2::handshake(Tasks::default(), io).await.expect("HTTP/2");
            tokio::task::spawn_local(connection);
            let body = sender.send_request(request).await.expect("an answer").into_body();
            (Box::new(sender), body)
        } else {
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(io).await.expect("HTTP/1");
            tokio::task::spawn_local(connection);
            let body = sender.send_request(request).await.expect("an answer").into_body();
            (Box::new(sender), body)
        };
        for n in 0..5 {
            let event = Bytes::from(format!("data: {n}\n\n"));
            send.send(event.clone()).await.expect("sent");
            // The next event is sent only when this one has arrived: nothing may be held back.
            let frame = body.frame().await.expect("a frame").expect("no error");
            assert_eq!(frame.into_data().expect("data"), event);
        }
        drop(send);
        assert!(body.collect().await.expect("no error").to_bytes().is_empty());
        let line = world.line(|l| l.status == Some(200)).await;
        assert_eq!((line.bytes_down, line.reason), (Some(45), Reason::RuleTransform));
    });
}

#[test]
fn a_long_body_passes_in_bounded_memory() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let made = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&made);
        const CHUNK: usize = 64 * 1024;
        world
            .at("ok.test", &["h2"], move |_| {
                let count = Arc::clone(&count);
                let frames = futures_util::stream::unfold(0, move |n| {
                    let count = Arc::clone(&count);
                    async move {
                        if n == 1024 {
                            return None;
                        }
                        count.fetch_add(CHUNK, Ordering::Relaxed);
                        Some((Ok(Frame::data(Bytes::from(vec![b'x'; CHUNK]))), n + 1))
                    }
                });
                Response::new(StreamBody::new(frames).boxed_unsync())
            })
            .await;
        let stream = world.tls("ok.test", &["h2"]).await;
        let (mut sender, connection) =
            hyper::client::conn::http2::handshake(Tasks::default(), TokioIo::new(stream))
                .await
                .expect("HTTP/2");
        tokio::task::spawn_local(connection);
        let request = Request::get("https://ok.test/long")
            .body(http_body_util::Empty::<Bytes>::new())
            .expect("a request");
        let mut body = sender.send_request(request).await.expect("an answer").into_body();
        // A guest that does not read: the origin comes to rest with little more than the windows sent.
        let mut before = 0;
        loop {
            tokio::time::sleep(Duration::from_millis(50)).await;
            if made.load(Ordering::Relaxed) == before && before > 0 {
                break;
            }
            before = made.load(Ordering::Relaxed);
        }
        assert!(
            made.load(Ordering::Relaxed) < 16 * 1024 * 1024,
            "{} bytes are on their way",
            made.load(Ordering::Relaxed)
        );
        let mut got = 0;
        while let Some(frame) = body.frame().await {
            got += frame.expect("no error").into_data().map_or(0, |d| d.len());
        }
        assert_eq!(got, 1024 * CHUNK);
    });
}
