//! Cases of an origin that breaks the protocol, and of what is shared on the way to one: 36, 45, 49, 53,
//! 59, 61, 115. The origin answers with the test's own bytes and writes down every byte that it gets.

use std::process::{Child, Command, Stdio};

use bivouac_testkit::{LONG, TestSandbox, eventually};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::clients::fresh_address;
use crate::tools::{PLAYED, attack, raw_https, status};
use crate::{Bed, fresh};

const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";

/// `raw.py` at an address of its own, under a name of its own.
struct Raw {
    child: Child,
    root: TempDir,
    name: String,
}

impl Raw {
    /// `answers`: bytes by path. Without an entry a path is answered by an ordinary `plain`.
    async fn start(bed: &Bed, answers: &Value) -> Self {
        let root = tempfile::tempdir_in(bed.folder()).unwrap();
        let name = fresh("raw.test");
        let (certificate, key) = bed.certificate(&[&name]).unwrap();
        let pem = root.path().join("server.pem");
        std::fs::write(&pem, format!("{certificate}{key}")).unwrap();
        std::fs::write(root.path().join("answers.json"), answers.to_string()).unwrap();
        let address = fresh_address();
        bed.name(&name, &[&address]);
        let prefix = bed.far_prefix();
        let child = Command::new(&prefix[0])
            .args(&prefix[1..])
            .args(["python3", "-c", include_str!("raw.py")])
            .arg(&pem)
            .arg(root.path())
            .arg(&address)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let raw = Self { child, root, name };
        let ready = raw.root.path().join("ready");
        eventually("the origin", LONG, async || if ready.exists() { Ok(()) } else { Err("no") })
            .await;
        raw
    }

    /// What it got: number of the connection, and bytes.
    fn got(&self) -> Vec<(u64, String)> {
        let text = std::fs::read_to_string(self.root.path().join("got")).unwrap();
        let line = |line: &str| {
            let line: Value = serde_json::from_str(line).unwrap();
            (line["connection"].as_u64().unwrap(), line["data"].as_str().unwrap().to_owned())
        };
        text.lines().map(line).collect()
    }

    /// All bytes that it got, as one text.
    fn text(&self) -> String {
        self.got().into_iter().map(|(_, data)| data).collect()
    }

    /// Numbers of the connections on which a text came, in order.
    fn connections(&self, text: &str) -> Vec<u64> {
        self.got().into_iter().filter(|(_, data)| data.contains(text)).map(|(n, _)| n).collect()
    }

    async fn brokered(&self, bed: &Bed) -> (TestSandbox, String) {
        let canary = format!("canary-{}", self.name);
        let rule = json!([{"transform": [{"headers": {"authorization": canary}}]}]);
        (bed.sandbox(json!({"allow": {self.name.as_str(): rule}})).await, canary)
    }

    fn get(&self, path: &str) -> String {
        format!("GET {path} HTTP/1.1\\r\\nHost: {}\\r\\nConnection: close\\r\\n\\r\\n", self.name)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn case_49_answers_that_are_no_clean_http_become_a_502() {
    let bed = Bed::new().await;
    let fine = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine";
    let hints = "HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n";
    let bad = json!({
        "/end-both": "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "/end-negative": "HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nxx",
        "/end-two": "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        "/end-cr": "HTTP/1.1 200 OK\r\nX-A: b\rSet-Cookie: evil=1\r\nContent-Length: 0\r\n\r\n",
        "/end-nul": "HTTP/1.1 200 OK\r\nX-A: b\u{0}c\r\nContent-Length: 0\r\n\r\n",
        "/end-fold": "HTTP/1.1 200 OK\r\nX-A: b\r\n\tSet-Cookie: evil=1\r\nContent-Length: 0\r\n\r\n",
        "/end-ssh": "SSH-2.0-OpenSSH\r\n",
        "/end-nothing": "",
        "/end-101": "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        "/end-hints": hints.repeat(200) + fine,
        "/end-some-hints": hints.repeat(3) + fine,
        "/extra": format!("{fine}HTTP/1.1 200 OK\r\nSet-Cookie: evil=1\r\nContent-Length: 6\r\n\r\nsecond"),
    });
    let raw = Raw::start(&bed, &bad).await;
    let (sandbox, canary) = raw.brokered(&bed).await;
    for path in bad.as_object().unwrap().keys().filter(|p| p.starts_with("/end-")) {
        let answer = raw_https(&sandbox, &raw.name, &raw.get(path)).await;
        let wanted = if path == "/end-some-hints" { Some(200) } else { Some(502) };
        let got = answer["got"].as_str().unwrap();
        // Interim answers may be handed on or not: what counts is the last one.
        let last =
            got.rmatch_indices("HTTP/1.1 ").next().and_then(|(at, _)| got[at + 9..].get(..3));
        assert_eq!(last.and_then(|s| s.parse().ok()), wanted, "{path}: {answer}");
        assert!(!got.contains("evil=1") && !got.contains(&canary), "{path}: {answer}");
    }
    // Bytes behind an answer are no answer to the next request, of this connection or of another.
    let two =
        format!("GET /extra HTTP/1.1\\r\\nHost: {}\\r\\n\\r\\n{}", raw.name, raw.get("/next"));
    for bytes in [two, raw.get("/after")] {
        let answer = raw_https(&sandbox, &raw.name, &bytes).await;
        let got = answer["got"].as_str().unwrap();
        assert!(got.ends_with("plain") && !got.contains("second"), "{answer}");
    }
}

#[tokio::test]
async fn case_53_a_401_passes_and_a_407_does_not() {
    let bed = Bed::new().await;
    let raw = Raw::start(
        &bed,
        &json!({
            "/401": "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"inner\"\r\nProxy-Authenticate: Basic realm=\"stolen\"\r\nProxy-Connection: close\r\nAlt-Svc: h3=\":443\"\r\nContent-Length: 0\r\n\r\n",
            "/407": "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=\"stolen\"\r\nContent-Length: 0\r\n\r\n",
        }),
    )
    .await;
    let (sandbox, _) = raw.brokered(&bed).await;
    let answer = raw_https(&sandbox, &raw.name, &raw.get("/401")).await;
    let got = answer["got"].as_str().unwrap().to_lowercase();
    assert_eq!(status(&answer), Some(401), "{answer}");
    assert!(got.contains("realm=\"inner\""), "{answer}");
    for gone in ["stolen", "proxy-", "alt-svc"] {
        assert!(!got.contains(gone), "{gone}: {answer}");
    }
    let answer = raw_https(&sandbox, &raw.name, &raw.get("/407")).await;
    assert_eq!(status(&answer), Some(502), "{answer}");
    assert!(!answer["got"].as_str().unwrap().contains("stolen"), "{answer}");
}

#[tokio::test]
async fn cases_36_and_61_nothing_is_relayed_without_a_sound_101() {
    let bed = Bed::new().await;
    let switch = |accept: &str, to: &str| {
        format!(
            "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: {to}\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
        )
    };
    let right = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
    let raw = Raw::start(
        &bed,
        &json!({
            "/200": "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
            "/426": "HTTP/1.1 426 Upgrade Required\r\nContent-Length: 0\r\n\r\n",
            "/accept": switch("AAAAAAAAAAAAAAAAAAAAAAAAAAA=", "websocket"),
            "/other": switch(right, "other"),
            "/right": switch(right, "websocket"),
        }),
    )
    .await;
    let (sandbox, _) = raw.brokered(&bed).await;
    for (path, wanted) in
        [("/200", 200), ("/426", 426), ("/accept", 502), ("/other", 502), ("/right", 101)]
    {
        let mark = format!("early{}", path.replace('/', "-"));
        let bytes = format!(
            "GET {path} HTTP/1.1\\r\\nHost: {}\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n\
             Sec-WebSocket-Key: {KEY}\\r\\nSec-WebSocket-Version: 13\\r\\n\\r\\n\
             GET /{mark} HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n",
            raw.name
        );
        let answer = raw_https(&sandbox, &raw.name, &bytes).await;
        assert_eq!(status(&answer), Some(wanted), "{path}: {answer}");
        // The last one is the control: what is relayed is seen.
        assert_eq!(raw.text().contains(&mark), wanted == 101, "{path}: {answer}");
    }
}

#[tokio::test]
async fn case_45_an_expectation_is_met_once_and_not_handed_on() {
    let bed = Bed::new().await;
    let raw = Raw::start(&bed, &json!({})).await;
    let (sandbox, _) = raw.brokered(&bed).await;
    for (path, framing, body) in [
        ("/length", "Content-Length: 4", "body"),
        ("/chunks", "Transfer-Encoding: chunked", "4\\r\\nbody\\r\\n0\\r\\n\\r\\n"),
    ] {
        let bytes = format!(
            "POST {path} HTTP/1.1\\r\\nHost: {}\\r\\nExpect: 100-continue\\r\\n{framing}\\r\\nConnection: close\\r\\n\\r\\n{body}",
            raw.name
        );
        let answer = raw_https(&sandbox, &raw.name, &bytes).await;
        let got = answer["got"].as_str().unwrap();
        assert!(got.matches("HTTP/1.1 100 ").count() <= 1, "{path}: {answer}");
        assert_eq!(got.matches("HTTP/1.1 200 ").count(), 1, "{path}: {answer}");
    }
    let odd = format!(
        "POST /odd HTTP/1.1\\r\\nHost: {}\\r\\nExpect: 200-maybe\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n",
        raw.name
    );
    let answer = raw_https(&sandbox, &raw.name, &odd).await;
    assert!(status(&answer).is_some_and(|code| code != 100), "{answer}");
    let text = raw.text().to_lowercase();
    assert!(text.contains("post /length") && text.contains("post /chunks"), "{text}");
    assert!(!text.contains("expect:"), "{text}");
}

#[tokio::test]
async fn case_59_a_body_of_http2_stays_a_body_in_http1() {
    let bed = Bed::new().await;
    let raw = Raw::start(&bed, &json!({})).await;
    let (sandbox, canary) = raw.brokered(&bed).await;
    let inner = "0\r\n\r\nGET /evil HTTP/1.1\r\nHost: evil.test\r\n\r\n";
    let head = |path: &str| {
        json!([
            [":method", "POST"],
            [":scheme", "https"],
            [":authority", raw.name],
            [":path", path]
        ])
    };
    let escaped = inner.replace("\r\n", "\\r\\n");
    let mut with_length = head("/with-length");
    with_length.as_array_mut().unwrap().push(json!(["content-length", inner.len().to_string()]));
    for (path, headers) in [("/without", head("/without")), ("/with-length", with_length)] {
        let requests = json!([{"headers": headers, "data": escaped}]).to_string();
        let answer = attack(&sandbox, &["h2", PLAYED, &raw.name, &requests]).await;
        assert_eq!(answer["streams"][0]["status"], 200, "{answer}");
        eventually("the body", LONG, async || {
            let text = raw.text();
            let at = text.find(&format!("POST {path} ")).ok_or("not yet")?;
            let request = text[at..].to_lowercase();
            let chunk = format!("\r\n{:x}\r\n{}", inner.len(), inner.to_lowercase());
            let length = format!("content-length: {}\r\n", inner.len());
            let framed = request.contains(&chunk)
                || (request.contains(&length) && request.contains("get /evil"));
            if framed { Ok(()) } else { Err("not framed") }
        })
        .await;
    }
    // A path that would be two lines does not get so far.
    let requests = json!([{"headers": head("/x HTTP/1.1\\r\\nx-evil: 1\\r\\n\\r\\n")}]).to_string();
    let answer = attack(&sandbox, &["h2", PLAYED, &raw.name, &requests]).await;
    assert_ne!(answer["streams"][0]["status"], 200, "{answer}");
    assert!(!raw.text().contains("x-evil"));
    assert_eq!(raw.text().matches(&canary).count(), 2);
}

#[tokio::test]
async fn case_115_connections_are_shared_by_nobody_else() {
    let bed = Bed::new().await;
    let raw = Raw::start(&bed, &json!({})).await;
    let rule = |path: &str, value: &str| json!({"match": {"path": {"startsWith": path}}, "transform": [{"headers": {"authorization": value}}]});
    let policy =
        json!({"allow": {raw.name.as_str(): [rule("/a", "value-a"), rule("/b", "value-b")]}});
    let one = bed.sandbox(policy.clone()).await;
    let two = bed.sandbox(policy).await;
    let send = async |sandbox: &TestSandbox, path: &str| {
        let answer = raw_https(sandbox, &raw.name, &raw.get(path)).await;
        assert_eq!(status(&answer), Some(200), "{answer}");
        raw.connections(&format!("GET {path} ")).pop().unwrap()
    };
    let first = send(&one, "/a-first").await;
    // The control: the same value in the same sandbox goes on with the connection.
    assert_eq!(send(&one, "/a-again").await, first);
    let mut others = vec![first];
    for (sandbox, path) in [(&one, "/b"), (&one, "/none"), (&two, "/a-two"), (&two, "/none-two")] {
        let used = send(sandbox, path).await;
        assert!(!others.contains(&used), "{path} went by the connection of another: {others:?}");
        others.push(used);
    }
}
