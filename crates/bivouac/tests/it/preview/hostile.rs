//! Clients that smuggle, programs that lie.

use super::{Site, read};

#[tokio::test]
async fn no_request_hides_in_another() {
    let site = Site::new("prev-smuggle").await;
    let head = format!(
        "POST /echo HTTP/1.1\r\nHost: {}\r\nx-bivouac-token: {}\r\n",
        site.host, site.server.token
    );
    let hidden = "GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n";
    for (more, what) in [
        (format!("Content-Length: 4\r\nContent-Length: 0\r\n\r\n{hidden}"), "two lengths"),
        (format!("Content-Length: 4, 0\r\n\r\n{hidden}"), "a list of lengths"),
        (format!("Content-Length: +4\r\n\r\n{hidden}"), "a sign"),
        (format!("Content-Length: 4\r\nTransfer-Encoding: gzip\r\n\r\n{hidden}"), "not chunked"),
        (
            format!("Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{hidden}"),
            "chunked not last",
        ),
        (
            format!("Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{hidden}"),
            "a space before the colon",
        ),
        (format!("X: 1\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{hidden}"), "a folded line"),
        (format!("Transfer-Encoding: chunked\r\n\r\nZZ\r\n{hidden}"), "a bad chunk"),
        (format!("Transfer-Encoding: chunked\r\n\r\n1;\n{hidden}"), "a bare line feed"),
    ] {
        let mut stream = site.raw(format!("{head}{more}").as_bytes()).await;
        let got = read(&mut stream, false).await;
        // Refused, or the connection ends; never two answers, and never the hidden one.
        assert!(got.status == 0 || got.status >= 400, "{what}: {} {}", got.head, got.text());
        let rest = read(&mut stream, false).await;
        assert_eq!(rest.status, 0, "{what}: {} {}", rest.head, rest.text());
    }
    // Both: the length does not count (RFC 9112 §6.3), and what follows is a request of its own, which shows no
    // token and stays out.
    let more = format!(
        "Content-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n\
        GET /hidden HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
        site.host
    );
    let mut stream = site.raw(format!("{head}{more}").as_bytes()).await;
    let first = read(&mut stream, false).await;
    let seen = first.is(200).seen();
    assert_eq!(first.json()["length"], 3);
    assert!(!seen.iter().any(|line| line.starts_with("content-length")), "{seen:?}");
    let second = read(&mut stream, false).await;
    assert!(second.status == 401 || second.status == 0, "{}", second.head);
    // HTTP of another version is not carried.
    let h2c = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n";
    let seen = site.token("GET", "/echo", h2c).await.is(200).seen();
    assert!(!seen.iter().any(|line| line.contains("h2c") || line.contains("http2")), "{seen:?}");
}

#[tokio::test]
async fn a_program_that_lies_is_told_on() {
    let site = Site::new("prev-lies").await;
    for path in ["/silent-close", "/garbage", "/huge-head", "/switch", "/two-lengths"] {
        let got = site.token("GET", path, "").await;
        assert_eq!(got.status, 502, "{path}: {} {}", got.head, got.text());
        assert_eq!(got.json()["error"]["code"], "bad_gateway");
    }
    // What is not whole does not look so.
    let early = site.token("GET", "/early-close", "").await;
    assert_eq!(
        (early.is(200).text().as_str(), early.header("content-length")),
        ("only this", Some("1000"))
    );
    let chunks = site.token("GET", "/bad-chunk", "").await;
    let text = chunks.is(200).text();
    assert!(text.contains("hello") && !text.ends_with("0\r\n\r\n"), "{text}");
    // And nothing of it is left for the next one.
    for _ in 0..5 {
        let _ = site.token("GET", "/echo", "").await.is(200);
    }
}
