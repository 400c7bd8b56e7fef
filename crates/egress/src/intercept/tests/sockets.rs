//! Cases 36, 60 and 61: WebSockets.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::world::*;
use crate::reason::{Reason, Verdict};

const CANARY: &str = "Bearer canary-0123456789";
/// Key and answer of RFC 6455.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";

fn handshake(more: &str) -> String {
    format!(
        "GET /socket HTTP/1.1\r\nHost: ok.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Key: {KEY}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: chat\r\n\r\n{more}"
    )
}

fn switching(accept: &str) -> String {
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: chat\r\nX-Echo: {CANARY}\r\n\r\n"
    )
}

type Heads = Rc<RefCell<Vec<String>>>;

/// An origin that gives this answer to a handshake and then sends back what it gets, in upper case.
async fn socket_origin(world: &World, answer: String) -> (Heads, Rc<Cell<usize>>) {
    let heads = Heads::default();
    let bytes = Rc::new(Cell::new(0));
    let (kept, count) = (Rc::clone(&heads), Rc::clone(&bytes));
    let tls = world.root.server("ok.test", &["http/1.1"], |_| ());
    let origin = raw_origin(tls, move |mut stream| {
        let (kept, count, answer) = (Rc::clone(&kept), Rc::clone(&count), answer.clone());
        async move {
            let head = read_head(&mut stream).await;
            kept.borrow_mut().push(head);
            if stream.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
            let mut buffer = [0; 1024];
            while let Ok(n) = stream.read(&mut buffer).await {
                if n == 0 {
                    break;
                }
                count.set(count.get() + n);
                if stream.write_all(&buffer[..n].to_ascii_uppercase()).await.is_err() {
                    break;
                }
            }
            let _ = stream.shutdown().await;
        }
    })
    .await;
    world.place("ok.test", 443, origin);
    (heads, bytes)
}

#[test]
fn case_60_a_websocket_is_judged_once_and_relayed_unseen() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let (heads, _) = socket_origin(&world, switching(ACCEPT)).await;
        let mut stream = world.tls("ok.test", &["http/1.1"]).await;
        stream.write_all(handshake("").as_bytes()).await.expect("sent");
        let head = read_head(&mut stream).await.to_ascii_lowercase();
        assert!(head.starts_with("http/1.1 101 "), "{head}");
        assert!(
            head.contains(&format!("sec-websocket-accept: {}", ACCEPT.to_ascii_lowercase())),
            "{head}"
        );
        assert!(
            head.contains("sec-websocket-protocol: chat") && head.contains("x-echo: [redacted]"),
            "{head}"
        );
        let sent = heads.borrow()[0].clone().to_ascii_lowercase();
        assert!(sent.contains(&CANARY.to_ascii_lowercase()), "{sent}");
        assert!(
            sent.contains("upgrade: websocket") && sent.contains("connection: upgrade"),
            "{sent}"
        );
        let mut echo = [0; 5];
        for _ in 0..3 {
            stream.write_all(b"h\x00llo").await.expect("sent");
            stream.read_exact(&mut echo).await.expect("an echo");
            assert_eq!(&echo, b"H\x00LLO");
        }
        stream.shutdown().await.expect("closed");
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
        let line = world.line(|l| l.status == Some(101)).await;
        assert_eq!((line.bytes_up, line.bytes_down), (Some(15), Some(15)));
        assert_eq!((line.verdict, line.reason), (Verdict::Allow, Reason::RuleTransform));
        assert_eq!(world.lines.borrow().len(), 1);
    });
}

#[test]
fn case_60_a_websocket_ends_when_its_flow_is_cut() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        socket_origin(&world, switching(ACCEPT)).await;
        let mut stream = world.tls("ok.test", &["http/1.1"]).await;
        stream.write_all(handshake("").as_bytes()).await.expect("sent");
        read_head(&mut stream).await;
        let swept = world.flows.sweep(Reason::PolicyChanged, &|_, ongoing| {
            assert_eq!(ongoing.len(), 1, "the handshake counts while the socket is open");
            false
        });
        assert_eq!(swept.over(LONG).await, Ok(1));
        assert!(world.flows.is_empty());
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
        let line = world.line(|l| l.verdict == Verdict::Cut).await;
        assert_eq!((line.reason, line.status), (Reason::PolicyChanged, Some(101)));
    });
}

#[test]
fn case_61_without_a_valid_101_nothing_is_relayed() {
    run(|| async {
        for (answer, status) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_owned(), "200"),
            ("HTTP/1.1 426 Upgrade Required\r\nContent-Length: 0\r\n\r\n".to_owned(), "426"),
            (switching("AAAAAAAAAAAAAAAAAAAAAAAAAAA="), "502"),
            (switching(ACCEPT).replace("Upgrade: websocket", "Upgrade: other"), "502"),
            (switching(ACCEPT).replace("Sec-WebSocket-Accept", "X-Accept"), "502"),
        ] {
            let world = World::new(&inject("authorization", CANARY));
            let (_, bytes) = socket_origin(&world, answer.clone()).await;
            // Case 36: the guest does not wait for the answer.
            let early = "GET /evil HTTP/1.1\r\nHost: evil.test\r\n\r\n";
            let got = world.raw("ok.test", &handshake(early)).await;
            assert!(got.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}: {got}");
            assert!(got.to_ascii_lowercase().contains("connection: close"), "{got}");
            assert_eq!(got.matches("HTTP/1.1 ").count(), 1, "{got}");
            assert_eq!(bytes.get(), 0, "{answer}");
        }
    });
}

#[test]
fn case_36_bytes_that_come_early_wait_for_the_101() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let (_, bytes) = socket_origin(&world, switching(ACCEPT)).await;
        let mut stream = world.tls("ok.test", &["http/1.1"]).await;
        stream.write_all(handshake("early").as_bytes()).await.expect("sent");
        read_head(&mut stream).await;
        let mut echo = [0; 5];
        stream.read_exact(&mut echo).await.expect("an echo");
        assert_eq!((&echo, bytes.get()), (b"EARLY", 5));
    });
}

#[test]
fn handshakes_that_are_not_whole_are_refused() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let (heads, _) = socket_origin(&world, switching(ACCEPT)).await;
        let whole = handshake("");
        for bad in [
            whole.replace("GET", "POST"),
            whole.replace("Version: 13", "Version: 8"),
            whole.replace(KEY, "short"),
            whole.replace("Connection: Upgrade", "Connection: keep-alive"),
            whole.replace("HTTP/1.1", "HTTP/1.0"),
            whole.replace("Upgrade: websocket", "Upgrade: websocket\r\nContent-Length: 1"),
        ] {
            let got = world.raw("ok.test", &bad).await;
            assert!(got.starts_with("HTTP/1.") && got[8..].starts_with(" 400 "), "{bad}: {got}");
        }
        assert!(heads.borrow().is_empty());
    });
}

#[test]
fn an_unmatched_websocket_passes_without_credential() {
    run(|| async {
        let world = World::new(&json!({"allow": {"ok.test": [{
            "match": {"path": {"exact": "/other"}},
            "transform": [{"headers": {"authorization": CANARY}}]
        }]}}));
        let (heads, _) = socket_origin(&world, switching(ACCEPT)).await;
        let mut stream = world.tls("ok.test", &["http/1.1"]).await;
        stream.write_all(handshake("").as_bytes()).await.expect("sent");
        assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 101 "));
        assert!(!heads.borrow()[0].contains("canary"));
    });
}

#[test]
fn case_49_interim_answers_without_end_are_none_to_a_handshake_either() {
    run(|| async {
        let world = World::new(&inject("authorization", CANARY));
        let tls = world.root.server("ok.test", &["http/1.1"], |_| ());
        let origin = raw_origin(tls, |mut stream| async move {
            read_head(&mut stream).await;
            while stream.write_all(b"HTTP/1.1 103 Early Hints\r\n\r\n").await.is_ok() {
                let _ = stream.flush().await;
                tokio::task::yield_now().await;
            }
        })
        .await;
        world.place("ok.test", 443, origin);
        let mut guest = world.tls("ok.test", &["http/1.1"]).await;
        guest.write_all(handshake("").as_bytes()).await.expect("sent");
        let head = read_head(&mut guest).await;
        assert!(head.starts_with("HTTP/1.1 502"), "{head}");
    });
}
