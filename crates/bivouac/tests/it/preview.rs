//! Routes into sandboxes through the front door: who is let in, what goes through and what does not.

mod access;
mod carry;
mod domain;
mod hostile;
mod life;
mod names;

use std::net::SocketAddr;
use std::time::Duration;

use bivouac_testkit::{Client, LONG, TestSandbox, eventually};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::Shared;

/// The program inside.
const APP: &str = include_str!("preview/app.py");

/// A sandbox whose program listens on a port, and the way there.
struct Site {
    server: Shared,
    client: Client,
    sandbox: TestSandbox,
    /// Of the declared port 3000.
    host: String,
}

/// An answer, read to its end.
#[derive(Debug)]
struct Got {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Got {
    fn header(&self, name: &str) -> Option<&str> {
        let found = self.head.lines().filter_map(|line| line.split_once(':'));
        found
            .filter(|(own, _)| own.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim())
            .next()
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{}", self.text()))
    }

    /// What the program saw, as `name: value` in small letters.
    fn seen(&self) -> Vec<String> {
        let told = self.json();
        let lines = told["head"].as_array().unwrap_or_else(|| panic!("{told}"));
        lines.iter().map(|line| line.as_str().unwrap().to_ascii_lowercase()).collect()
    }

    #[track_caller]
    fn is(&self, status: u16) -> &Self {
        assert_eq!(self.status, status, "{}\n{}", self.head, self.text());
        self
    }
}

async fn start_app(sandbox: &TestSandbox, port: u16, bind: &str) {
    let script = json!({ "env": { "APP": APP } });
    let line =
        format!("printf '%s' \"$APP\" > /tmp/app.py; exec python3 /tmp/app.py {port} {bind}");
    let _ = sandbox.start(&["sh", "-c", &line], script).await;
}

impl Site {
    async fn new(team: &str) -> Self {
        Self::with(team, json!({ "name": "site", "persistent": false, "ports": [3000] })).await
    }

    async fn with(team: &str, body: Value) -> Self {
        Self::on(crate::server().await, team, body).await
    }

    /// On a server of its own.
    async fn alone(team: &str) -> Self {
        let body = json!({ "name": "site", "persistent": false, "ports": [3000] });
        Self::on(crate::own_server().await, team, body).await
    }

    async fn on(server: crate::Shared, team: &str, body: Value) -> Self {
        let client = server.team(team);
        let sandbox = TestSandbox::create(&client, body).await;
        let subdomain = sandbox.view["routes"][0]["subdomain"].as_str().unwrap().to_owned();
        let host = format!("{subdomain}.localhost");
        let site = Self { server, client, sandbox, host };
        start_app(&site.sandbox, 3000, "127.0.0.1").await;
        eventually("the program listens", LONG, async || {
            let got = site.token("GET", "/alive", "").await;
            (got.status == 200).then_some(()).ok_or_else(|| got.text())
        })
        .await;
        site
    }

    fn address(&self) -> SocketAddr {
        self.server.url.trim_start_matches("http://").parse().unwrap()
    }

    fn own(&self, tail: &str) -> String {
        format!("/api/bivouac/v1/sandboxes/{}/{tail}", self.sandbox.name)
    }

    /// Sends exact bytes, on a connection of its own.
    async fn raw(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address()).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }

    /// A request with more lines in its head, and its whole answer.
    async fn ask(&self, method: &str, target: &str, more: &str) -> Got {
        let request = format!(
            "{method} {target} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{more}\r\n",
            self.host
        );
        read(&mut self.raw(request.as_bytes()).await, method == "HEAD").await
    }

    /// As [`Self::ask`], with the engine's token.
    async fn token(&self, method: &str, target: &str, more: &str) -> Got {
        let more = format!("x-bivouac-token: {}\r\n{more}", self.server.token);
        self.ask(method, target, &more).await
    }

    async fn publish(&self, public: bool) {
        let answer = self.client.put(&self.own("ports/3000"), &json!({ "public": public })).await;
        assert_eq!(answer.status, 200, "{answer}");
        assert_eq!(answer.json["port"]["public"], public);
    }

    /// The query of a link.
    async fn link(&self, body: Value) -> String {
        let answer = self.client.post(&self.own("ports/3000/link"), &body).await.ok();
        let url = answer["url"].as_str().unwrap().to_owned();
        let (base, query) = url.split_once("/?").unwrap();
        assert_eq!(base, format!("http://{}:{}", self.host, self.address().port()));
        query.to_owned()
    }

    /// A cookie that a link was turned into.
    async fn cookie(&self) -> String {
        let got = self.ask("GET", &format!("/x?{}", self.link(json!({})).await), "").await;
        let line = got.is(302).header("set-cookie").unwrap().to_owned();
        line.split(';').next().unwrap().to_owned()
    }
}

/// Reads an answer: to its length, its last chunk, or the end of the connection.
async fn read(stream: &mut TcpStream, head_only: bool) -> Got {
    tokio::time::timeout(Duration::from_secs(60), read_all(stream, head_only))
        .await
        .expect("an answer in time")
}

async fn read_all(stream: &mut TcpStream, head_only: bool) -> Got {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            // Interim answers are none.
            if bytes.starts_with(b"HTTP/1.1 1") && !bytes.starts_with(b"HTTP/1.1 101") {
                bytes.drain(..at + 4);
                continue;
            }
            break at;
        }
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return Got {
                status: 0,
                head: String::from_utf8_lossy(&bytes).into_owned(),
                body: Vec::new(),
            };
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut body = bytes.split_off(end + 4);
    let mut got = Got { status, head, body: Vec::new() };
    let length: Option<usize> = got.header("content-length").map(|text| text.parse().unwrap());
    let none = head_only || matches!(status, 204 | 304 | 101);
    while !none && length.is_none_or(|length| body.len() < length) {
        if length.is_none() && body.ends_with(b"0\r\n\r\n") {
            break;
        }
        if stream.read_buf(&mut body).await.unwrap_or(0) == 0 {
            break;
        }
    }
    got.body = body;
    got
}

/// Waits until a connection has ended, however it does.
async fn ended(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let end = async {
        loop {
            rest.clear();
            match stream.read_buf(&mut rest).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), end).await.expect("the connection is cut");
}

/// A WebSocket client's request.
fn websocket(host: &str, more: &str) -> String {
    format!(
        "GET /ws HTTP/1.1\r\nHost: {host}\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{more}\r\n"
    )
}

/// A masked text frame, and what comes back for it.
async fn says(stream: &mut TcpStream, text: &str) {
    let mut frame = vec![0x81, 0x80 | u8::try_from(text.len()).unwrap(), 1, 2, 3, 4];
    frame.extend(text.bytes().enumerate().map(|(i, b)| b ^ [1, 2, 3, 4][i % 4]));
    stream.write_all(&frame).await.unwrap();
    let mut back = vec![0; 2 + text.len()];
    stream.read_exact(&mut back).await.unwrap();
    assert_eq!(&back[2..], text.as_bytes());
}
