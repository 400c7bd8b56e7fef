//! Servers that answer at every address of the world, and write down what they get.
//!
//! Ports 80 and 8080 speak HTTP/1.1, 443 and 8443 TLS with HTTP/1.1 or HTTP/2, all others that are
//! listed in [`RAW`] keep what comes and answer a greeting (the server speaks first). What an origin
//! answers is chosen by the path: see [`answer`].

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::Result;
use bytes::Bytes;
use futures_util::StreamExt as _;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::BadCertificate;

/// Ports where the server speaks first and keeps what comes.
const RAW: [u16; 7] = [22, 25, 53, 853, 5432, 6379, 9000];
/// Ports that speak HTTP/1.1 without TLS.
const PLAIN: [u16; 2] = [80, 8080];
/// Ports that speak TLS.
const TLS: [u16; 2] = [443, 8443];
/// UDP ports that echo.
const UDP: [u16; 3] = [123, 443, 9001];
/// Addresses at which they do: an answer leaves from the address that its socket is bound to.
const UDP_AT: [&str; 3] = ["198.51.100.10", "203.0.113.185", "203.0.113.186"];

/// What a server got: a request, or raw bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Address and port that it came to.
    pub at: SocketAddr,
    /// Server name of the TLS hello.
    pub sni: Option<String>,
    /// `HTTP/1.1`, `HTTP/2.0`, or `raw`.
    pub version: String,
    /// Method.
    pub method: String,
    /// Authority as the server saw it: `Host` or `:authority`.
    pub authority: String,
    /// Path and query.
    pub target: String,
    /// Headers in order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Body, or the raw bytes.
    pub body: Vec<u8>,
}

impl Seen {
    /// Values of a header.
    #[must_use]
    pub fn header(&self, name: &str) -> Vec<&str> {
        self.headers.iter().filter(|(n, _)| n == name).map(|(_, v)| v.as_str()).collect()
    }

    /// All of it as one text, to search in.
    #[must_use]
    pub fn text(&self) -> String {
        let headers: Vec<_> = self.headers.iter().map(|(n, v)| format!("{n}: {v}")).collect();
        let body = String::from_utf8_lossy(&self.body);
        let head = [&self.method, &self.authority, &self.target].map(String::as_str).join(" ");
        format!("{head}\n{}\n{body}", headers.join("\n"))
    }
}

/// Certificates of the world's root, made when they are asked for.
pub(super) struct Certificates {
    root: Issuer<'static, KeyPair>,
    pem: String,
    made: Mutex<HashMap<String, Arc<CertifiedKey>>>,
    bad: Mutex<HashMap<String, BadCertificate>>,
}

impl std::fmt::Debug for Certificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Certificates")
    }
}

impl Certificates {
    pub(super) fn new() -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut wanted = CertificateParams::new(Vec::new())?;
        wanted.distinguished_name.push(DnType::CommonName, "root of the test world");
        wanted.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        wanted.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let pem = wanted.self_signed(&key)?.pem();
        let root = Issuer::new(wanted, key);
        Ok(Self { root, pem, made: Mutex::default(), bad: Mutex::default() })
    }

    pub(super) fn root_pem(&self) -> &str {
        &self.pem
    }

    pub(super) fn spoil(&self, name: &str, how: BadCertificate) {
        self.bad.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), how);
        self.made.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }

    pub(super) fn pem_for(&self, names: &[&str]) -> Result<(String, String)> {
        let key = KeyPair::generate()?;
        let mut wanted =
            CertificateParams::new(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>())?;
        // Python 3.13 refuses a leaf that does not say who signed it.
        wanted.use_authority_key_identifier_extension = true;
        let certificate = wanted.signed_by(&key, &self.root)?;
        Ok((certificate.pem(), key.serialize_pem()))
    }

    fn make(&self, name: &str) -> Result<Arc<CertifiedKey>> {
        let bad = self.bad.lock().unwrap_or_else(PoisonError::into_inner).get(name).copied();
        let key = KeyPair::generate()?;
        let shown = if bad == Some(BadCertificate::WrongName) { "wrong.test" } else { name };
        let mut wanted = CertificateParams::new(vec![shown.to_owned()])?;
        wanted.use_authority_key_identifier_extension = true;
        if bad == Some(BadCertificate::Expired) {
            let day = Duration::from_secs(24 * 3600);
            wanted.not_before = (SystemTime::now() - 9 * day).into();
            wanted.not_after = (SystemTime::now() - day).into();
        }
        let certificate = match bad {
            Some(BadCertificate::SelfSigned) => wanted.self_signed(&key)?,
            _ => wanted.signed_by(&key, &self.root)?,
        };
        let private = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let private = rustls::crypto::aws_lc_rs::sign::any_supported_type(&private)?;
        Ok(Arc::new(CertifiedKey::new(vec![certificate.der().clone()], private)))
    }
}

impl ResolvesServerCert for Certificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let name = hello.server_name().unwrap_or("nameless.test").to_owned();
        if let Some(made) = self.made.lock().unwrap_or_else(PoisonError::into_inner).get(&name) {
            return Some(made.clone());
        }
        let made = self.make(&name).ok()?;
        self.made.lock().unwrap_or_else(PoisonError::into_inner).insert(name, made.clone());
        Some(made)
    }
}

/// All servers.
pub(super) struct Origins {
    certificates: Arc<Certificates>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

/// Where a request came in.
#[derive(Clone)]
struct Door {
    at: SocketAddr,
    sni: Option<String>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

type Body = BoxBody<Bytes, Infallible>;

impl Origins {
    pub(super) fn new(certificates: Arc<Certificates>, seen: Arc<Mutex<Vec<Seen>>>) -> Self {
        Self { certificates, seen }
    }

    /// Opens the sockets and serves.
    ///
    /// # Errors
    /// When a socket cannot be opened.
    pub(super) fn serve(self) -> Result<impl Future<Output = ()>> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(self.certificates.clone());
        tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let tls = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        let mut listeners = Vec::new();
        for port in RAW.into_iter().chain(PLAIN).chain(TLS) {
            for any in ["0.0.0.0", "::"] {
                // The name server has its own address on 53.
                if port == 53 && any == "0.0.0.0" {
                    continue;
                }
                listeners.push(listener(any, port)?);
            }
        }
        let mut echoes = Vec::new();
        for (at, port) in UDP_AT.into_iter().flat_map(|at| UDP.map(|port| (at, port))) {
            let socket = std::net::UdpSocket::bind((at, port))?;
            socket.set_nonblocking(true)?;
            echoes.push(UdpSocket::from_std(socket)?);
        }
        Ok(async move {
            for listener in listeners {
                let (tls, seen) = (tls.clone(), self.seen.clone());
                tokio::spawn(async move {
                    while let Ok((stream, _)) = listener.accept().await {
                        tokio::spawn(connection(stream, tls.clone(), seen.clone()));
                    }
                });
            }
            for socket in echoes {
                tokio::spawn(echo(socket, self.seen.clone()));
            }
            std::future::pending::<()>().await;
        })
    }
}

fn listener(any: &str, port: u16) -> Result<TcpListener> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
    let address: IpAddr = any.parse()?;
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    // A test's own server may take one address of the port.
    sockopt::set_socket_reuseport(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    rustix::net::bind(&socket, &SocketAddr::new(address, port))?;
    rustix::net::listen(&socket, 1024)?;
    Ok(TcpListener::from_std(std::net::TcpListener::from(socket))?)
}

async fn echo(socket: UdpSocket, seen: Arc<Mutex<Vec<Seen>>>) {
    let mut buffer = vec![0u8; 65_536];
    while let Ok((n, from)) = socket.recv_from(&mut buffer).await {
        let Ok(at) = socket.local_addr() else { return };
        note(&seen, raw(at, None, buffer[..n].to_vec()));
        let _ = socket.send_to(&buffer[..n], from).await;
    }
}

fn raw(at: SocketAddr, sni: Option<String>, body: Vec<u8>) -> Seen {
    let empty = String::new;
    Seen {
        at,
        sni,
        version: "raw".to_owned(),
        method: empty(),
        authority: empty(),
        target: empty(),
        headers: Vec::new(),
        body,
    }
}

fn note(seen: &Mutex<Vec<Seen>>, what: Seen) {
    seen.lock().unwrap_or_else(PoisonError::into_inner).push(what);
}

async fn connection(
    stream: TcpStream,
    tls: tokio_rustls::TlsAcceptor,
    seen: Arc<Mutex<Vec<Seen>>>,
) {
    let Ok(at) = stream.local_addr() else { return };
    let _ = stream.set_nodelay(true);
    let mut door = Door { at, sni: None, seen };
    if RAW.contains(&at.port()) {
        return speak_first(stream, door).await;
    }
    if PLAIN.contains(&at.port()) {
        return serve_http(TokioIo::new(stream), door).await;
    }
    match tls.accept(stream).await {
        Ok(stream) => {
            door.sni = stream.get_ref().1.server_name().map(str::to_owned);
            serve_http(TokioIo::new(stream), door).await;
        }
        // A client that gives up in the handshake has still told where it wanted to go.
        Err(_) => note(&door.seen, raw(at, None, b"tls handshake failed".to_vec())),
    }
}

async fn speak_first(mut stream: TcpStream, door: Door) {
    if stream.write_all(b"220 greeting of the raw server\r\n").await.is_err() {
        return;
    }
    let mut got = Vec::new();
    let mut buffer = [0u8; 4096];
    while let Ok(n) = stream.read(&mut buffer).await {
        if n == 0 {
            break;
        }
        got.extend(&buffer[..n]);
        if stream.write_all(&buffer[..n]).await.is_err() {
            break;
        }
    }
    note(&door.seen, raw(door.at, None, got));
}

async fn serve_http<S>(stream: TokioIo<S>, door: Door)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let service = hyper::service::service_fn(move |request| handle(request, door.clone()));
    let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
    let _ = server.serve_connection_with_upgrades(stream, service).await;
}

async fn handle(mut request: Request<Incoming>, door: Door) -> Result<Response<Body>, Infallible> {
    let upgrade = request.headers().get("upgrade").is_some_and(|u| u == "websocket");
    let upgraded = upgrade.then(|| hyper::upgrade::on(&mut request));
    let (parts, body) = request.into_parts();
    let text = |v: &hyper::header::HeaderValue| String::from_utf8_lossy(v.as_bytes()).into_owned();
    let host = parts.headers.get("host").map(text);
    let authority = parts.uri.authority().map(ToString::to_string).or(host).unwrap_or_default();
    let target = parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
    let mut seen = Seen {
        at: door.at,
        sni: door.sni.clone(),
        version: format!("{:?}", parts.version),
        method: parts.method.to_string(),
        authority,
        target: target.clone(),
        headers: parts.headers.iter().map(|(n, v)| (n.to_string(), text(v))).collect(),
        body: Vec::new(),
    };
    if !upgrade {
        seen.body = body.collect().await.map(|b| b.to_bytes().to_vec()).unwrap_or_default();
    }
    note(&door.seen, seen.clone());
    if let Some(upgraded) = upgraded {
        return Ok(websocket(upgraded, &parts.headers));
    }
    Ok(answer(&seen).await)
}

/// Agrees to the upgrade and sends back what comes, bytes as they are.
fn websocket(upgraded: hyper::upgrade::OnUpgrade, headers: &hyper::HeaderMap) -> Response<Body> {
    use base64::Engine as _;
    let key = headers.get("sec-websocket-key").map_or(&b""[..], |k| k.as_bytes());
    let joined = [key, b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"].concat();
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA1_FOR_LEGACY_USE_ONLY, &joined);
    let accept = base64::prelude::BASE64_STANDARD.encode(digest);
    tokio::spawn(async move {
        let Ok(upgraded) = upgraded.await else { return };
        let (mut from, mut to) = tokio::io::split(TokioIo::new(upgraded));
        let _ = tokio::io::copy(&mut from, &mut to).await;
    });
    let mut response = Response::new(full(""));
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    for (name, value) in
        [("upgrade", "websocket"), ("connection", "Upgrade"), ("sec-websocket-accept", &accept)]
    {
        if let Ok(value) = value.parse() {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

/// * `/status/N`: that status. `/redirect?to=URL`: 302. `/bytes/N`: so many bytes. `/slow/MS`: waits.
/// * `/sse/N`: N events, one each 20 ms. `/header/NAME/VALUE`: sets a response header.
/// * `/trailers`: a body and a `grpc-status` trailer. Anything else: a JSON text of what came, headers
///   included.
async fn answer(seen: &Seen) -> Response<Body> {
    let path = seen.target.split('?').next().unwrap_or_default();
    let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    let number = parts.get(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    let mut response = match parts[0] {
        "status" => {
            let mut response = Response::new(full("status as asked\n"));
            let status = u16::try_from(number).ok().and_then(|n| StatusCode::from_u16(n).ok());
            *response.status_mut() = status.unwrap_or(StatusCode::BAD_REQUEST);
            response
        }
        "redirect" => {
            let to = seen.target.split_once("to=").map_or("/", |(_, to)| to);
            let mut response = Response::new(full(""));
            *response.status_mut() = StatusCode::FOUND;
            if let Ok(to) = to.parse() {
                response.headers_mut().insert("location", to);
            }
            response
        }
        "bytes" => {
            let chunk = Bytes::from(vec![b'x'; 65_536]);
            let whole = number / 65_536;
            let rest = chunk.slice(..usize::try_from(number % 65_536).unwrap_or(0));
            let chunks = (0..whole).map(move |_| chunk.clone()).chain([rest]);
            let frames = chunks.map(|chunk| Ok(Frame::data(chunk)));
            Response::new(boxed(futures_util::stream::iter(frames)))
        }
        "slow" => {
            tokio::time::sleep(Duration::from_millis(number)).await;
            Response::new(full("late\n"))
        }
        "sse" => {
            let events = futures_util::stream::iter(0..number).then(|n| async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                Ok(Frame::data(Bytes::from(format!("data: {n}\n\n"))))
            });
            let mut response = Response::new(boxed(events));
            let kind = hyper::header::HeaderValue::from_static("text/event-stream");
            response.headers_mut().insert("content-type", kind);
            response
        }
        "header" => {
            let mut response = Response::new(full("header set\n"));
            let name = parts.get(1).and_then(|n| n.parse::<hyper::header::HeaderName>().ok());
            let value = parts.get(2).and_then(|v| v.parse().ok());
            if let (Some(name), Some(value)) = (name, value) {
                response.headers_mut().insert(name, value);
            }
            response
        }
        "trailers" => {
            let mut trailers = hyper::HeaderMap::new();
            trailers.insert("grpc-status", hyper::header::HeaderValue::from_static("0"));
            let frames = [Ok(Frame::data(Bytes::from("body"))), Ok(Frame::trailers(trailers))];
            Response::new(boxed(futures_util::stream::iter(frames)))
        }
        _ => Response::new(full(&described(seen))),
    };
    let at = seen.at.ip().to_string();
    if let Ok(at) = at.parse() {
        response.headers_mut().insert("x-origin-address", at);
    }
    response
}

fn described(seen: &Seen) -> String {
    let headers: serde_json::Map<String, serde_json::Value> =
        seen.headers.iter().map(|(n, v)| (n.clone(), v.as_str().into())).collect();
    serde_json::json!({
        "origin": seen.at.to_string(), "sni": seen.sni, "version": seen.version,
        "method": seen.method, "authority": seen.authority, "target": seen.target,
        "headers": headers, "bodyBytes": seen.body.len(),
    })
    .to_string()
}

fn full(text: &str) -> Body {
    Full::new(Bytes::from(text.to_owned())).boxed()
}

fn boxed(
    frames: impl futures_util::Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + Sync + 'static,
) -> Body {
    http_body_util::BodyExt::boxed(StreamBody::new(frames))
}
