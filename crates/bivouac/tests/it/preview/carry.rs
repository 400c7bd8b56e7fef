//! What goes through: heads, bodies, streams, upgrades.

use std::time::Duration;

use bivouac_testkit::{LONG, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Site, read, says, websocket};

#[tokio::test]
async fn heads_go_through_and_what_is_forged_does_not() {
    let site = Site::new("prev-heads").await;
    let forged = "X-Forwarded-For: 9.9.9.9\r\nX-Forwarded-Host: evil\r\nX-Forwarded-Proto: https\r\n\
        X-Forwarded-Prefix: /x\r\nForwarded: for=9.9.9.9\r\nX-Real-IP: 9.9.9.9\r\nX-Vercel-Id: 1\r\n\
        X-Bivouac-User: root\r\nProxy-Authorization: x\r\nProxy-Connection: x\r\nTE: gzip\r\n\
        Keep-Alive: timeout=9\r\nConnection: X-Gone\r\nX-Gone: 1\r\nX-Stays: 1\r\n";
    let got = site.token("GET", "/echo?a=%2F&b", forged).await;
    let mut seen = got.is(200).seen();
    assert_eq!(seen.remove(0), "get /echo?a=%2f&b http/1.1");
    seen.sort();
    let port = site.address().port();
    let host = &site.host;
    let wanted = [
        format!("host: {host}"),
        "x-forwarded-for: 127.0.0.1".to_owned(),
        format!("x-forwarded-host: {host}"),
        "x-forwarded-proto: http".to_owned(),
        "x-stays: 1".to_owned(),
    ];
    assert_eq!(seen, wanted, "{port}");
    assert_eq!(got.json()["peer"], "127.0.0.1");
    assert_eq!(got.header("x-own"), Some("1"));
    let cookies = site.token("GET", "/cookies", "").await;
    let lines: Vec<&str> =
        cookies.is(200).head.lines().filter(|l| l.starts_with("set-cookie")).collect();
    assert_eq!(lines, ["set-cookie: a=1"]);
    assert_eq!(cookies.header("alt-svc"), None);
}

#[tokio::test]
async fn answers_of_every_kind() {
    let site = Site::new("prev-answers").await;
    let head = site.token("HEAD", "/echo", "").await;
    assert!(head.is(200).header("content-length").unwrap().parse::<usize>().unwrap() > 50);
    let same = site.token("GET", "/not-modified", "If-None-Match: \"x\"\r\n").await;
    assert_eq!(same.is(304).header("etag"), Some("\"x\""));
    let part = site.token("GET", "/range", "Range: bytes=1-3\r\n").await;
    assert_eq!(
        (part.is(206).text().as_str(), part.header("content-range")),
        ("bcd", Some("bytes 1-3/5"))
    );
    let trailers = site.token("GET", "/trailers", "TE: trailers\r\n").await;
    let text = trailers.is(200).text().to_ascii_lowercase();
    assert!(text.contains("hello") && text.contains("x-sum: 5"), "{text}");
    assert_eq!(site.token("GET", "/hints", "").await.is(200).text(), "after hints");
    assert!(site.token("GET", "/no-length", "").await.is(200).text().contains("until the end"));
    assert!(site.token("GET", "/old", "").await.is(200).text().contains("old"));
    let body = "Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\n";
    let request = format!(
        "POST /echo HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nx-bivouac-token: {}\r\n{body}\r\n\
         5\r\nhello\r\n0\r\nX-Sum: 5\r\n\r\n",
        site.host, site.server.token
    );
    let got = read(&mut site.raw(request.as_bytes()).await, false).await;
    assert_eq!(
        (got.is(200).json()["length"].as_u64(), &got.json()["trailers"][0]),
        (Some(5), &"x-sum: 5".into())
    );
    let empty = site.token("POST", "/echo", "Content-Length: 0\r\n").await;
    assert!(empty.is(200).seen().contains(&"content-length: 0".to_owned()), "{:?}", empty.seen());
}

#[tokio::test]
async fn a_client_that_waits_for_leave_gets_it_from_the_program() {
    let site = Site::new("prev-leave").await;
    let head = |path: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nx-bivouac-token: {}\r\nExpect: 100-continue\r\n\
             Content-Length: 4\r\n\r\n",
            site.host, site.server.token
        )
    };
    let mut stream = site.raw(head("/continue").as_bytes()).await;
    let mut leave = [0; 25];
    let _ = stream.read_exact(&mut leave).await.unwrap();
    assert_eq!(&leave, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"data").await.unwrap();
    assert_eq!(read(&mut stream, false).await.is(200).json()["length"], 4);
    // Declined: nothing was asked for.
    let got = read(&mut site.raw(head("/decline").as_bytes()).await, false).await;
    assert_eq!(got.is(413).text(), "no");
}

#[tokio::test]
async fn streams_come_as_they_are_made_and_big_bodies_both_ways() {
    let site = Site::new("prev-streams").await;
    let request = format!(
        "GET /events HTTP/1.1\r\nHost: {}\r\nx-bivouac-token: {}\r\n\r\n",
        site.host, site.server.token
    );
    let mut events = site.raw(request.as_bytes()).await;
    let mut text = String::new();
    let mut buffer = [0; 4096];
    // The program never ends: what is here came while it was being made.
    while !text.contains("data: 5") {
        let read = tokio::time::timeout(Duration::from_secs(20), events.read(&mut buffer)).await;
        let length = read.expect("more in time").unwrap();
        assert_ne!(length, 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..length]));
    }
    drop(events);
    let size = 50 << 20;
    let got = site.token("GET", &format!("/big?size={size}"), "").await;
    assert_eq!(got.is(200).body.len(), size);
    assert!(got.body.iter().enumerate().all(|(at, byte)| usize::from(*byte) == at % 256));
    let head = format!(
        "POST /take HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nx-bivouac-token: {}\r\n\
         Content-Length: {size}\r\n\r\n",
        site.host, site.server.token
    );
    let mut stream = site.raw(head.as_bytes()).await;
    let piece: Vec<u8> = (0..=255).cycle().take(1 << 16).collect();
    for _ in 0..size >> 16 {
        stream.write_all(&piece).await.unwrap();
    }
    let line = format!(
        "python3 -c 'import hashlib; print(hashlib.sha256(bytes(range(256)) * {}).hexdigest())'",
        size / 256
    );
    let ours = site.sandbox.sh(&line);
    assert_eq!(read(&mut stream, false).await.is(200).text(), ours.await.good());
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_the_program_and_not_our_memory() {
    let site = Site::new("prev-slow").await;
    let before = site.server.memory_kb("VmRSS").unwrap();
    let mut held = Vec::new();
    for _ in 0..20 {
        let request = format!(
            "GET /big?size=200000000 HTTP/1.1\r\nHost: {}\r\nx-bivouac-token: {}\r\n\r\n",
            site.host, site.server.token
        );
        let mut stream = site.raw(request.as_bytes()).await;
        let mut first = [0; 1024];
        assert_ne!(stream.read(&mut first).await.unwrap(), 0);
        held.push(stream);
    }
    let after = site.server.memory_kb("VmRSS").unwrap();
    // 20 of them have 4 GB to send.
    assert!(after < before + 100_000, "{before} {after}");
    drop(held);
    eventually("the program's threads end", LONG, async || {
        let alive: u32 = site.token("GET", "/alive", "").await.text().parse().unwrap();
        (alive <= 3).then_some(()).ok_or(alive)
    })
    .await;
}

#[tokio::test]
async fn websockets_and_two_hundred_at_once() {
    let site = Site::new("prev-many").await;
    let token = format!("x-bivouac-token: {}\r\n", site.server.token);
    let mut socket = site.raw(websocket(&site.host, &token).as_bytes()).await;
    let _ = read(&mut socket, true).await.is(101);
    for text in ["one", "two", "three"] {
        says(&mut socket, text).await;
    }
    let asks = (0..200).map(|number| {
        let (site, path) = (&site, format!("/echo?module={number}"));
        async move {
            let seen = site.token("GET", &path, "").await.is(200).seen();
            assert_eq!(seen[0], format!("get {path} http/1.1"));
        }
    });
    let _: Vec<()> = futures_util::future::join_all(asks).await;
    says(&mut socket, "still there").await;
}
