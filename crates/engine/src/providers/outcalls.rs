//! Calls that the engine itself makes to ask for a secret: JSON over HTTP/1.1.
//!
//! Invariants: TLS is verified against the host's roots (and the operator's); plain HTTP goes to loopback
//! only, unless the operator's own `VAULT_ADDR` says otherwise; no redirect is followed, no more than
//! [`MAX_ANSWER`] is read and nothing takes longer than [`TIME`]; an error never repeats an answer.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bivouac_types::secret::Secret;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use hyper::{Method, Request, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const TIME: Duration = Duration::from_secs(10);
const MAX_ANSWER: usize = 256 * 1024;
/// Where hosts keep their roots.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// How the engine calls out. TLS is set up at the first call.
#[derive(Debug, Default)]
pub(crate) struct Outcalls {
    extra: Option<PathBuf>,
    tls: OnceLock<Result<Arc<ClientConfig>, String>>,
}

/// One request.
pub(crate) struct Call {
    method: Method,
    url: String,
    body: Vec<u8>,
    headers: Vec<(&'static str, Secret)>,
}

impl Call {
    pub(crate) fn get(url: &str) -> Self {
        Self { method: Method::GET, url: url.to_owned(), body: Vec::new(), headers: Vec::new() }
    }

    pub(crate) fn post(url: &str, body: &Value) -> Self {
        let body = body.to_string().into_bytes();
        Self { method: Method::POST, url: url.to_owned(), body, headers: Vec::new() }
    }

    pub(crate) fn with(mut self, name: &'static str, value: Secret) -> Self {
        self.headers.push((name, value));
        self
    }

    /// Whether the address can be called: a sentence without a subject.
    pub(crate) fn check(&self) -> Result<(), String> {
        let target = Target::of(&self.url)?;
        let loopback = target.host == "localhost"
            || target.bare().parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
        if target.tls || loopback {
            return Ok(());
        }
        Err("must be https:// (http:// goes to loopback only)".to_owned())
    }
}

struct Target {
    tls: bool,
    host: String,
    port: u16,
    path: String,
}

impl Target {
    fn of(url: &str) -> Result<Self, String> {
        let wrong = "is no http:// or https:// address";
        let uri: Uri = url.parse().map_err(|_| wrong)?;
        let tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(wrong.to_owned()),
        };
        let authority = uri.authority().ok_or(wrong)?;
        if authority.as_str().contains('@') {
            return Err("must not hold a user name or password".to_owned());
        }
        let host = authority.host().to_owned();
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let path = uri.path_and_query().map_or("/", |p| p.as_str()).to_owned();
        Ok(Self { tls, host, port, path })
    }

    /// Without the brackets of IPv6.
    fn bare(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }
}

impl Outcalls {
    /// Also trusts the roots in a file.
    pub(crate) fn new(extra: Option<PathBuf>) -> Self {
        Self { extra, tls: OnceLock::new() }
    }

    /// How TLS is verified: against the host's roots and the operator's. The error is a clause.
    pub(crate) fn tls(&self) -> Result<Arc<ClientConfig>, String> {
        self.tls.get_or_init(|| roots(self.extra.as_deref())).clone()
    }

    /// Makes a call, answers status and JSON (null when the body is none).
    pub(crate) async fn json(&self, call: Call) -> Result<(u16, Value), String> {
        let target = Target::of(&call.url).map_err(|why| format!("its address {why}"))?;
        let place = format!("{}:{}", target.host, target.port);
        match tokio::time::timeout(TIME, self.exchange(call, target)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(why)) => Err(format!("{place} {why}")),
            Err(_) => Err(format!("{place} did not answer within {} s", TIME.as_secs())),
        }
    }

    async fn exchange(&self, call: Call, target: Target) -> Result<(u16, Value), String> {
        let unreached = |error: std::io::Error| format!("could not be reached: {error}");
        let found: Vec<SocketAddr> = tokio::net::lookup_host((target.bare(), target.port))
            .await
            .map_err(unreached)?
            .collect();
        let stream = TcpStream::connect(found.as_slice()).await.map_err(unreached)?;
        if !target.tls {
            return send(stream, call, &target).await;
        }
        let config = self.tls()?;
        let name = ServerName::try_from(target.bare().to_owned())
            .map_err(|_| "has a name that no certificate can have")?;
        let stream = TlsConnector::from(config)
            .connect(name, stream)
            .await
            .map_err(|error| format!("could not be talked to over TLS: {error}"))?;
        send(stream, call, &target).await
    }
}

async fn send<S>(stream: S, call: Call, target: &Target) -> Result<(u16, Value), String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let broken = |error: hyper::Error| format!("broke the connection: {error}");
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let driving = tokio::spawn(connection);
    let default = if target.tls { 443 } else { 80 };
    let host = match target.port {
        port if port == default => target.host.clone(),
        port => format!("{}:{port}", target.host),
    };
    let mut request = Request::builder()
        .method(call.method)
        .uri(&target.path)
        .header(HOST, host)
        .header(USER_AGENT, concat!("bivouac/", env!("CARGO_PKG_VERSION")));
    if !call.headers.iter().any(|(name, _)| *name == "accept") {
        request = request.header(ACCEPT, "application/json");
    }
    if !call.body.is_empty() {
        request = request.header(CONTENT_TYPE, "application/json");
    }
    for (name, value) in &call.headers {
        let mut value = HeaderValue::from_str(value.expose())
            .map_err(|_| format!("cannot be sent its {name}: it holds what no header may hold"))?;
        value.set_sensitive(true);
        request = request.header(*name, value);
    }
    let request = request
        .body(Full::new(Bytes::from(call.body)))
        .map_err(|_| "cannot be sent this request".to_owned())?;
    let answer = sender.send_request(request).await.map_err(broken)?;
    let status = answer.status().as_u16();
    let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
    driving.abort();
    let body = body.map_err(|_| "gave an answer that broke off or was too long".to_owned())?;
    Ok((status, serde_json::from_slice(&body.to_bytes()).unwrap_or(Value::Null)))
}

/// The roots of the host, and those of one more file.
fn roots(extra: Option<&Path>) -> Result<Arc<ClientConfig>, String> {
    let mut store = RootCertStore::empty();
    let host = BUNDLES.iter().map(Path::new).find(|path| path.is_file());
    for file in host.into_iter().chain(extra) {
        let found = CertificateDer::pem_file_iter(file)
            .map_err(|error| format!("cannot be verified: {} {error}", file.display()))?;
        // One that is not understood is not trusted.
        store.add_parsable_certificates(found.filter_map(Result::ok));
    }
    if store.is_empty() {
        return Err("cannot be verified: this host has no root certificates".to_owned());
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| format!("cannot be talked to over TLS: {error}"))?
        .with_root_certificates(store)
        .with_no_client_auth();
    Ok(Arc::new(config))
}
