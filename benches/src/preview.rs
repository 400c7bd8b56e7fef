//! Routes into sandboxes: one stream through a route beside one through a plain relay, many short requests, many
//! at once.
//!
//! Invariant: the same program serves on both sides, and the same client reads; an answer that is not whole fails
//! the bench. Called by `main`; the program is `bivouac-bench inside serve`, the relay `inside relay`.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bivouac_testkit::TestSandbox;
use serde_json::json;

use crate::bench::Bench;
use crate::inside;
use crate::interrupt;
use crate::stats::Samples;

/// Where the program listens inside.
const PORT: u16 = 3000;
/// Clients that ask at the same time where short requests are counted.
const CLIENTS: usize = 8;
/// Requests that a page makes at once.
const MODULES: usize = 200;
const PIECE: usize = 256 << 10;

/// How much of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PreviewSize {
    pub(crate) rounds: usize,
    pub(crate) mib: usize,
    pub(crate) short: usize,
}

/// Serves until it is killed: `/bytes/N` is N MiB, everything else a short text.
pub(crate) fn serve(port: u16) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port))?;
    println!("{}", json!({ "port": listener.local_addr()?.port() }));
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        std::thread::spawn(move || while let Ok(true) = answer(&stream) {});
    }
    Ok(())
}

/// Reads one request and answers it. `false`: there is none any more.
fn answer(mut stream: &TcpStream) -> Result<bool> {
    let mut head = Vec::new();
    let mut byte = [0; 4096];
    while !head.ends_with(b"\r\n\r\n") {
        let length = stream.read(&mut byte)?;
        if length == 0 {
            return Ok(false);
        }
        head.extend_from_slice(&byte[..length]);
    }
    let text = String::from_utf8_lossy(&head);
    let path = text.split(' ').nth(1).unwrap_or_default();
    let mib = path.strip_prefix("/bytes/").and_then(|n| n.parse::<usize>().ok());
    let Some(mib) = mib else {
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")?;
        return Ok(true);
    };
    let size = mib << 20;
    stream.write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n").as_bytes())?;
    let piece = vec![0x5a; PIECE];
    for _ in 0..size / PIECE {
        stream.write_all(&piece)?;
    }
    Ok(true)
}

/// Passes connections on until it is killed: what one proxy process costs, whatever it does.
pub(crate) fn relay(to: u16) -> Result<()> {
    let threads =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    threads.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", json!({ "port": listener.local_addr()?.port() }));
        loop {
            let (mut here, _) = listener.accept().await?;
            tokio::spawn(async move {
                let mut there = tokio::net::TcpStream::connect(("127.0.0.1", to)).await?;
                here.set_nodelay(true)?;
                there.set_nodelay(true)?;
                tokio::io::copy_bidirectional_with_sizes(&mut here, &mut there, PIECE, PIECE).await
            });
        }
    })
}

/// A helper of ours on the host.
struct Helper {
    child: Child,
    port: u16,
}

impl Helper {
    fn start(args: &[&str]) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("inside")
            .args(args)
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        let out = child.stdout.take().context("its output")?;
        let mut helper = Self { child, port: 0 };
        let _ = std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line)?;
        let said: serde_json::Value = serde_json::from_str(&line)?;
        helper.port = u16::try_from(said["port"].as_u64().context("a port")?)?;
        Ok(helper)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A way to the program.
struct Way {
    at: SocketAddr,
    head: String,
}

impl Way {
    fn ask(&self, stream: &mut TcpStream, path: &str) -> Result<usize> {
        stream.write_all(format!("GET {path} HTTP/1.1\r\n{}\r\n", self.head).as_bytes())?;
        let mut buffer = vec![0; PIECE];
        let mut head = Vec::new();
        let end = loop {
            let length = stream.read(&mut buffer)?;
            ensure!(length > 0, "the connection ended");
            head.extend_from_slice(&buffer[..length]);
            if let Some(at) = head.windows(4).position(|four| four == b"\r\n\r\n") {
                break at;
            }
        };
        let text = String::from_utf8_lossy(&head[..end]).to_ascii_lowercase();
        ensure!(text.starts_with("http/1.1 200"), "{text}");
        let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.context("a length")?.trim().parse()?;
        let mut have = head.len() - end - 4;
        while have < length {
            let read = stream.read(&mut buffer)?;
            ensure!(read > 0, "{have} of {length} bytes came");
            have += read;
        }
        Ok(length)
    }

    fn connect(&self) -> Result<TcpStream> {
        let stream = TcpStream::connect(self.at)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// MiB a second of one stream.
    fn rate(&self, mib: usize) -> Result<f64> {
        let mut stream = self.connect()?;
        let begin = Instant::now();
        let length = self.ask(&mut stream, &format!("/bytes/{mib}"))?;
        ensure!(length == mib << 20, "{length} bytes");
        Ok(mib as f64 / begin.elapsed().as_secs_f64())
    }

    /// Short requests a second, each on a connection of its own.
    fn short(&self, count: usize) -> Result<f64> {
        let begun = AtomicUsize::new(0);
        let failed: Mutex<Option<anyhow::Error>> = Mutex::new(None);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    while begun.fetch_add(1, Ordering::Relaxed) < count {
                        let done = self.connect().and_then(|mut stream| self.ask(&mut stream, "/"));
                        if let Err(error) = done {
                            *failed.lock().expect("no panic while held") = Some(error);
                            return;
                        }
                    }
                });
            }
        });
        match failed.into_inner().expect("no panic while held") {
            Some(error) => Err(error),
            None => Ok(count as f64 / begin.elapsed().as_secs_f64()),
        }
    }

    /// Milliseconds until a page has all its modules.
    fn page(&self) -> Result<f64> {
        let mut streams = (0..MODULES).map(|_| self.connect()).collect::<Result<Vec<_>>>()?;
        let begin = Instant::now();
        for (number, stream) in streams.iter_mut().enumerate() {
            stream.write_all(format!("GET /{number} HTTP/1.1\r\n{}\r\n", self.head).as_bytes())?;
        }
        for stream in &mut streams {
            let mut answer = Vec::new();
            let mut buffer = [0; 4096];
            while !answer.ends_with(b"ok") {
                let length = stream.read(&mut buffer)?;
                ensure!(length > 0, "{}", String::from_utf8_lossy(&answer));
                answer.extend_from_slice(&buffer[..length]);
            }
        }
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    }
}

/// All of it.
pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    let size = bench.size.preview;
    let body = json!({ "persistent": false, "ports": [PORT] });
    let sandbox = bench.client_threads.block_on(TestSandbox::create(&bench.client, body));
    bench.remember(&sandbox.session);
    let route = sandbox.view["routes"][0]["subdomain"].as_str().context("a route")?.to_owned();
    let port = PORT.to_string();
    bench.client_threads.block_on(async {
        inside::put(&sandbox).await?;
        let serve = [inside::PROGRAM, "inside", "serve", "--port", &port];
        let _ = sandbox.start(&serve, json!({})).await;
        anyhow::Ok(())
    })?;
    let head = format!("Host: {route}.localhost\r\nx-bivouac-token: {}\r\n", bench.server.token);
    let through = Way { at: bench.server.url.trim_start_matches("http://").parse()?, head };
    let until = Instant::now() + Duration::from_secs(30);
    while through.short(1).is_err() {
        ensure!(Instant::now() < until, "the program inside does not answer");
        std::thread::sleep(Duration::from_millis(50));
    }
    let origin = Helper::start(&["serve", "--port", "0"])?;
    let relay = Helper::start(&["relay", "--to", &origin.port.to_string()])?;
    let plain = Way {
        at: SocketAddr::from(([127, 0, 0, 1], relay.port)),
        head: "Host: localhost\r\n".to_owned(),
    };
    let mut rates = [Samples::default(), Samples::default()];
    let mut counts = [Samples::default(), Samples::default()];
    let mut pages = [Samples::default(), Samples::default()];
    for _ in 0..size.rounds {
        for (at, way) in [&through, &plain].into_iter().enumerate() {
            interrupt::check()?;
            rates[at].add(way.rate(size.mib)?);
            counts[at].add(way.short(size.short)?);
            pages[at].add(way.page()?);
        }
    }
    const PEER: &str = "one relay on loopback";
    let row = bench.row(
        "preview",
        format!("one stream of {} MiB through a route", size.mib),
        "MiB/s",
        &rates[0],
    );
    let ratio = rates[0].median() / rates[1].median();
    bench.add(row.versus(PEER, &rates[1]).want("≥ 0.8 × one relay on loopback", ratio >= 0.8));
    let row = bench.row(
        "preview",
        format!("{} short requests, a connection each", size.short),
        "1/s",
        &counts[0],
    );
    bench.add(row.versus(PEER, &counts[1]));
    let row =
        bench.row("preview", format!("{MODULES} requests at once, all answered"), "ms", &pages[0]);
    bench.add(row.versus(PEER, &pages[1]));
    drop((relay, origin));
    bench.client_threads.block_on(async {
        let gone = sandbox.delete().await;
        ensure!(gone.status == 200, "{gone}");
        Ok(())
    })
}
