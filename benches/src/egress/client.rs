//! The client of the egress rows: `bivouac-bench load …`, run inside the sandbox and, for comparison,
//! on the host.
//!
//! Invariant: the same program with the same arguments asks on both sides; it prints one JSON line, and
//! an answer that it did not expect is an error, not a figure. Requests are HTTP/1.1 written by hand, so
//! that the client takes as little of the two CPUs as can be.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::origin::{CREDENTIAL, WITH};
use crate::stats::Samples;

/// How long anything may take before it counts as broken.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where to, and by which name.
#[derive(Debug, Clone, Args)]
pub(crate) struct Whereto {
    /// Address and port
    #[arg(long)]
    to: SocketAddr,
    /// Server name
    #[arg(long)]
    name: String,
    /// PEM of the roots that are trusted
    #[arg(long)]
    roots: PathBuf,
}

/// What is done.
#[derive(Debug, Subcommand)]
pub(crate) enum Load {
    /// Requests on kept connections
    Requests {
        #[command(flatten)]
        whereto: Whereto,
        /// At the same time
        #[arg(long)]
        connections: usize,
        /// How long
        #[arg(long)]
        millis: u64,
        /// Send the credential, for a run without a proxy that adds it
        #[arg(long)]
        own: bool,
    },
    /// Full TLS handshakes, each on a new connection
    Handshakes {
        #[command(flatten)]
        whereto: Whereto,
        /// At the same time
        #[arg(long)]
        connections: usize,
        /// How long
        #[arg(long)]
        millis: u64,
    },
    /// One stream of bytes
    Bytes {
        /// Address and port
        #[arg(long)]
        to: SocketAddr,
        /// Send a TLS hello for this name first
        #[arg(long)]
        hello: Option<String>,
        /// How many MiB
        #[arg(long)]
        mib: u64,
    },
    /// One query after the other
    Dns {
        /// Server; without it the first of /etc/resolv.conf
        #[arg(long)]
        to: Option<SocketAddr>,
        /// What is asked for
        #[arg(long)]
        name: String,
        /// How often
        #[arg(long)]
        count: usize,
    },
    /// Connections that do nothing, until all are closed from the other side
    Hold {
        /// Address and port
        #[arg(long)]
        to: SocketAddr,
        /// How many
        #[arg(long)]
        count: usize,
        /// With TLS and one request each: server name
        #[arg(long, requires = "roots")]
        name: Option<String>,
        /// PEM of the roots that are trusted
        #[arg(long)]
        roots: Option<PathBuf>,
    },
}

/// Does it.
pub(crate) fn run(load: &Load) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let told = runtime.block_on(async {
        match load {
            Load::Requests { whereto, connections, millis, own } => {
                requests(whereto, *connections, Duration::from_millis(*millis), *own).await
            }
            Load::Handshakes { whereto, connections, millis } => {
                handshakes(whereto, *connections, Duration::from_millis(*millis)).await
            }
            Load::Bytes { to, hello, mib } => bytes(*to, hello.as_deref(), mib << 20).await,
            Load::Dns { to, name, count } => dns(*to, name, *count).await,
            Load::Hold { to, count, name, roots } => {
                let tls = match (name, roots) {
                    (Some(name), Some(roots)) => {
                        Some(Whereto { to: *to, name: name.clone(), roots: roots.clone() })
                    }
                    _ => None,
                };
                hold(*to, *count, tls).await
            }
        }
    })?;
    println!("{told}");
    Ok(())
}

/// A connector that never resumes: each handshake is a whole one.
fn connector(roots: &PathBuf) -> Result<TlsConnector> {
    let mut trusted = rustls::RootCertStore::empty();
    for root in
        CertificateDer::pem_file_iter(roots).with_context(|| format!("read {}", roots.display()))?
    {
        trusted.add(root?)?;
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(trusted)
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    tls.resumption = rustls::client::Resumption::disabled();
    Ok(TlsConnector::from(Arc::new(tls)))
}

async fn connect(to: SocketAddr, name: &str, tls: &TlsConnector) -> Result<TlsStream<TcpStream>> {
    let open = async {
        let stream = TcpStream::connect(to).await?;
        stream.set_nodelay(true)?;
        tls.connect(ServerName::try_from(name.to_owned())?, stream).await.map_err(Into::into)
    };
    tokio::time::timeout(PATIENCE, open).await.context("no TLS connection in time")?
}

/// Sends a request and reads its answer, which must carry the credential.
async fn ask(stream: &mut TlsStream<TcpStream>, request: &[u8], buffer: &mut [u8]) -> Result<()> {
    stream.write_all(request).await?;
    stream.flush().await?;
    let mut have = 0;
    loop {
        let n = stream.read(&mut buffer[have..]).await?;
        ensure!(n > 0, "closed amid an answer: {}", String::from_utf8_lossy(&buffer[..have]));
        have += n;
        let Some(end) = super::find(&buffer[..have], b"\r\n\r\n") else { continue };
        if have >= end + 4 + 64 {
            let body = &buffer[end + 4..have];
            // Proxies write the head anew; the body says whether the origin saw the credential.
            ensure!(
                WITH.ends_with(body),
                "an answer of another kind: {}",
                String::from_utf8_lossy(&buffer[..have])
            );
            return Ok(());
        }
    }
}

fn request(name: &str, own: bool) -> Vec<u8> {
    let mut text = format!("GET /v1/some/path?with=a-query HTTP/1.1\r\nhost: {name}\r\n");
    text.push_str("user-agent: bivouac-bench\r\naccept: */*\r\n");
    if own {
        text.push_str(&format!("authorization: {CREDENTIAL}\r\n"));
    }
    text.push_str("\r\n");
    text.into_bytes()
}

async fn requests(
    whereto: &Whereto,
    connections: usize,
    time: Duration,
    own: bool,
) -> Result<serde_json::Value> {
    let tls = connector(&whereto.roots)?;
    let request = request(&whereto.name, own);
    let mut buffer = vec![0; 4096];
    let mut streams = Vec::new();
    for _ in 0..connections {
        let mut stream = connect(whereto.to, &whereto.name, &tls).await?;
        ask(&mut stream, &request, &mut buffer).await?;
        streams.push(stream);
    }
    let (begin, mut tasks) = (Instant::now(), tokio::task::JoinSet::new());
    for mut stream in streams {
        let request = request.clone();
        tasks.spawn(async move {
            let (mut buffer, mut times) = (vec![0; 4096], Vec::new());
            while begin.elapsed() < time {
                let one = Instant::now();
                ask(&mut stream, &request, &mut buffer).await?;
                times.push(one.elapsed().as_secs_f64() * 1e6);
            }
            anyhow::Ok(times)
        });
    }
    let mut times = Vec::new();
    while let Some(done) = tasks.join_next().await {
        times.extend(done??);
    }
    let seconds = begin.elapsed().as_secs_f64();
    let samples: Samples = times.into_iter().collect();
    ensure!(!samples.is_empty(), "not one request ended in {time:?}");
    Ok(json!({
        "count": samples.len() + connections, "seconds": seconds,
        "rate": samples.len() as f64 / seconds, "p50": samples.median(), "p99": samples.at(0.99),
    }))
}

async fn handshakes(
    whereto: &Whereto,
    connections: usize,
    time: Duration,
) -> Result<serde_json::Value> {
    let tls = connector(&whereto.roots)?;
    let (begin, mut tasks) = (Instant::now(), tokio::task::JoinSet::new());
    for _ in 0..connections {
        let (tls, whereto) = (tls.clone(), whereto.clone());
        tasks.spawn(async move {
            let mut count = 0u64;
            while begin.elapsed() < time {
                drop(connect(whereto.to, &whereto.name, &tls).await?);
                count += 1;
            }
            anyhow::Ok(count)
        });
    }
    let mut count = 0;
    while let Some(done) = tasks.join_next().await {
        count += done??;
    }
    let seconds = begin.elapsed().as_secs_f64();
    Ok(json!({ "count": count, "seconds": seconds, "rate": count as f64 / seconds }))
}

/// The bytes of a client's first message.
fn hello(name: &str) -> Result<Vec<u8>> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = ServerName::try_from(name.to_owned())?;
    let mut connection = rustls::ClientConnection::new(Arc::new(tls), name)?;
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes)?;
    Ok(bytes)
}

async fn bytes(to: SocketAddr, name: Option<&str>, want: u64) -> Result<serde_json::Value> {
    let mut stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    if let Some(name) = name {
        stream.write_all(&hello(name)?).await?;
    }
    let mut buffer = vec![0; 256 * 1024];
    // The first MiB opens the windows and is not counted.
    let warm = 1 << 20;
    stream.write_u64(warm).await?;
    let mut begin = None;
    let mut have = 0u64;
    while have < warm + want {
        let n = tokio::time::timeout(PATIENCE, stream.read(&mut buffer)).await??;
        ensure!(n > 0, "closed after {have} bytes");
        have += n as u64;
        if have == warm && begin.is_none() {
            begin = Some(Instant::now());
            stream.write_u64(want).await?;
        }
    }
    let seconds = begin.context("no beginning")?.elapsed().as_secs_f64();
    Ok(json!({ "seconds": seconds, "gbits": want as f64 * 8e-9 / seconds }))
}

async fn dns(to: Option<SocketAddr>, name: &str, count: usize) -> Result<serde_json::Value> {
    let to = if let Some(to) = to {
        to
    } else {
        let text = std::fs::read_to_string("/etc/resolv.conf")?;
        let server = text.lines().find_map(|line| line.strip_prefix("nameserver "));
        SocketAddr::new(server.context("no name server in /etc/resolv.conf")?.trim().parse()?, 53)
    };
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(to).await?;
    let mut times = Samples::default();
    let mut buffer = [0; 1500];
    for n in 0..count {
        let id = u16::try_from(n % 65_536)?;
        let mut query = id.to_be_bytes().to_vec();
        query.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        for label in name.split('.') {
            query.push(u8::try_from(label.len())?);
            query.extend(label.as_bytes());
        }
        query.extend([0, 0, 1, 0, 1]);
        let begin = Instant::now();
        socket.send(&query).await?;
        let got = tokio::time::timeout(PATIENCE, socket.recv(&mut buffer)).await;
        let got = got.context("no answer of the name server")??;
        times.add(begin.elapsed().as_secs_f64() * 1e6);
        let answers = got >= 12 && buffer[..2] == query[..2] && buffer[3] & 15 == 0;
        ensure!(answers && buffer[7] > 0, "no address for {name}: {:?}", &buffer[..got.min(12)]);
    }
    Ok(json!({ "count": count, "p50": times.median(), "p99": times.at(0.99) }))
}

/// A connection that is held.
enum Held {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

async fn hold(to: SocketAddr, count: usize, tls: Option<Whereto>) -> Result<serde_json::Value> {
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard })?;
    let connector = tls.as_ref().map(|tls| connector(&tls.roots)).transpose()?;
    let mut held = Vec::new();
    let mut buffer = vec![0; 4096];
    for _ in 0..count {
        held.push(if let (Some(whereto), Some(connector)) = (&tls, &connector) {
            let mut stream = connect(to, &whereto.name, connector).await?;
            ask(&mut stream, &request(&whereto.name, false), &mut buffer).await?;
            Held::Tls(Box::new(stream))
        } else {
            let mut stream = TcpStream::connect(to).await?;
            // A byte that comes back: the flow lives on both sides of the broker.
            stream.write_u64(1).await?;
            stream.read_u8().await?;
            Held::Plain(stream)
        });
    }
    let mut tasks = tokio::task::JoinSet::new();
    for stream in held {
        tasks.spawn(async move {
            let mut byte = [0];
            match stream {
                Held::Plain(mut stream) => stream.read(&mut byte).await.unwrap_or(0),
                Held::Tls(mut stream) => stream.read(&mut byte).await.unwrap_or(0),
            }
        });
    }
    println!("{}", json!({ "held": count }));
    std::io::stdout().flush()?;
    let mut closed = 0;
    let mut first = None;
    let all = async {
        while let Some(done) = tasks.join_next().await {
            if done? > 0 {
                bail!("bytes on a connection that is only held");
            }
            first.get_or_insert_with(Instant::now);
            closed += 1;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        done = all => done?,
        () = tokio::time::sleep(2 * PATIENCE) => {}
    }
    let spread = first.map_or(0.0, |first| first.elapsed().as_secs_f64() * 1e3);
    Ok(json!({ "closed": closed, "spread": spread }))
}
