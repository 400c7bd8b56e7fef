//! Requests to registries: whom the engine connects to, over what, and what goes along.
//!
//! Invariants: the address that is connected to is the one that was judged; TLS is verified against the host's
//! roots and the operator's, and a failure of that is never answered by plain HTTP; plain HTTP goes to
//! loopback, or where the caller said so; a login or a token goes to the one origin that it is for, and no
//! redirect carries it elsewhere; what a registry names (redirects, places of tokens) may be as private as
//! itself, not more. Called by `registry`.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bivouac_egress::address::{Fence, unmap};
use bivouac_types::policy::Cidr;
use bivouac_types::secret::Secret;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper::header::{HOST, HeaderMap, HeaderName, HeaderValue, LOCATION, USER_AGENT};
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

/// How long a connection, or the head of an answer, may take.
const TIME: Duration = Duration::from_secs(30);
/// How long an answer may be silent.
const SILENCE: Duration = Duration::from_secs(60);
/// Most redirects of one request.
const MAX_REDIRECTS: usize = 5;

/// Private ranges: where registries of companies are.
const PRIVATE: [&str; 5] =
    ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"];
const LOOPBACK: [&str; 2] = ["127.0.0.0/8", "::1/128"];

/// How far inside an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reach {
    Public,
    Private,
    Loopback,
}

/// Why a request got no answer. The text is a clause after the place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WireError {
    /// It will not help to ask again.
    Refused(String),
    /// It may help to ask again.
    Broken(String),
    /// TLS was offered, and the other side does not speak it.
    NoTls,
}

/// Who answers a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) tls: bool,
    /// Without the brackets of IPv6.
    host: String,
    port: u16,
}

impl Origin {
    /// Of `HOST[:PORT]`.
    pub(crate) fn new(tls: bool, authority: &str) -> Result<Self, String> {
        let scheme = if tls { "https" } else { "http" };
        Ok(Url::parse(&format!("{scheme}://{authority}/"))?.origin)
    }

    pub(crate) fn is_loopback(&self) -> bool {
        self.host == "localhost"
            || self.host.parse::<IpAddr>().is_ok_and(|ip| unmap(ip).is_loopback())
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let default = if self.tls { 443 } else { 80 };
        let host =
            if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        if self.port == default { f.write_str(&host) } else { write!(f, "{host}:{}", self.port) }
    }
}

/// A place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Url {
    pub(crate) origin: Origin,
    /// Path and query.
    pub(crate) path: String,
}

impl Url {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong = "is no http:// or https:// address";
        let text = text.split('#').next().unwrap_or_default();
        let uri: Uri = text.parse().map_err(|_| wrong)?;
        let tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(wrong.to_owned()),
        };
        let authority = uri.authority().ok_or(wrong)?;
        if authority.as_str().contains('@') {
            return Err("holds a user name or password".to_owned());
        }
        let host =
            authority.host().trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
        if host.is_empty() {
            return Err(wrong.to_owned());
        }
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let path = uri.path_and_query().map_or("/", |p| p.as_str()).to_owned();
        Ok(Self { origin: Origin { tls, host, port }, path })
    }

    /// Where a redirect leads.
    fn join(&self, location: &str) -> Result<Self, String> {
        if location.contains("://") {
            return Self::parse(location);
        }
        if location.starts_with("//") {
            let scheme = if self.origin.tls { "https:" } else { "http:" };
            return Self::parse(&format!("{scheme}{location}"));
        }
        let path = if location.starts_with('/') {
            location.to_owned()
        } else {
            let folder = self.path.split('?').next().unwrap_or_default();
            let folder = folder.rsplit_once('/').map_or("", |(folder, _)| folder);
            format!("{folder}/{location}")
        };
        Ok(Self { origin: self.origin.clone(), path })
    }
}

/// An answer whose body is still to come.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    body: Incoming,
    driving: JoinHandle<()>,
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.driving.abort();
    }
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The next bytes; none at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, WireError> {
        loop {
            let frame = tokio::time::timeout(SILENCE, self.body.frame()).await;
            let silent = || WireError::Broken(format!("fell silent for {} s", SILENCE.as_secs()));
            match frame.map_err(|_| silent())? {
                None => return Ok(None),
                Some(Err(error)) => return Err(broken(&error)),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// All of it, if it is short.
    pub(crate) async fn whole(mut self, most: usize) -> Result<Vec<u8>, WireError> {
        let mut all = Vec::new();
        while let Some(bytes) = self.next().await? {
            if all.len() + bytes.len() > most {
                return Err(WireError::Refused(format!("gave an answer of over {most} bytes")));
            }
            all.extend_from_slice(&bytes);
        }
        Ok(all)
    }
}

fn broken(error: &hyper::Error) -> WireError {
    WireError::Broken(format!("broke the connection: {error}"))
}

/// One request.
pub(crate) struct Ask<'a> {
    pub(crate) url: &'a Url,
    pub(crate) headers: Vec<(HeaderName, String)>,
    /// Value of `Authorization`, for the origin of `url` alone.
    pub(crate) authorization: Option<&'a Secret>,
    /// The most private address that may answer; absent: any that may be asked at all.
    pub(crate) most: Option<Reach>,
    /// Whether redirects are followed.
    pub(crate) follow: bool,
    /// Whether plain HTTP may go elsewhere than to loopback.
    pub(crate) insecure: bool,
}

/// The way to registries.
pub(crate) struct Wire {
    tls: Arc<ClientConfig>,
    everywhere: Fence,
    public: Fence,
}

impl Wire {
    pub(crate) fn new(tls: Arc<ClientConfig>) -> Self {
        let ranges = PRIVATE.iter().chain(&LOOPBACK).filter_map(|range| Cidr::parse(range).ok());
        Self { tls, everywhere: Fence::new(ranges.collect()), public: Fence::default() }
    }

    /// How far inside an address is; why it is never asked.
    fn reach(&self, ip: IpAddr) -> Result<Reach, &'static str> {
        if let Some(what) = self.everywhere.forbidden(ip) {
            return Err(what);
        }
        Ok(match self.public.forbidden(ip) {
            None => Reach::Public,
            Some(_) if unmap(ip).is_loopback() => Reach::Loopback,
            Some(_) => Reach::Private,
        })
    }

    /// Asks, and answers with the last of the redirects, and how far inside the first that answered is.
    pub(crate) async fn get(&self, ask: Ask<'_>) -> Result<(Answer, Reach), WireError> {
        let mut url = ask.url.clone();
        let mut first = None;
        for _ in 0..=MAX_REDIRECTS {
            let home = url.origin == ask.url.origin;
            let authorization = ask.authorization.filter(|_| home);
            let most = first.or(ask.most);
            let step = self.once(&ask, &url, authorization, most).await;
            let (answer, reach) = step.map_err(|error| match error {
                WireError::Refused(why) if !home => {
                    WireError::Refused(format!("redirects to {}, which {why}", url.origin))
                }
                WireError::Broken(why) if !home => {
                    WireError::Broken(format!("redirects to {}, which {why}", url.origin))
                }
                error => error,
            })?;
            let first = *first.get_or_insert(reach);
            let location = match answer.status {
                301 | 302 | 303 | 307 | 308 if ask.follow => answer.header(LOCATION.as_str()),
                _ => return Ok((answer, first)),
            };
            let next = url
                .join(location.unwrap_or_default())
                .map_err(|why| WireError::Refused(format!("redirects to what {why}")))?;
            if url.origin.tls && !next.origin.tls {
                return Err(WireError::Refused(format!(
                    "redirects from https to http at {}",
                    next.origin
                )));
            }
            url = next;
        }
        Err(WireError::Refused(format!("redirects more than {MAX_REDIRECTS} times")))
    }

    async fn once(
        &self,
        ask: &Ask<'_>,
        url: &Url,
        authorization: Option<&Secret>,
        most: Option<Reach>,
    ) -> Result<(Answer, Reach), WireError> {
        let origin = &url.origin;
        if !origin.tls && !ask.insecure && !origin.is_loopback() {
            let why = "is asked over https only (plain http goes to loopback, or with --insecure)";
            return Err(WireError::Refused(why.to_owned()));
        }
        let late = |_| WireError::Broken(format!("did not answer within {} s", TIME.as_secs()));
        let (stream, reach) =
            tokio::time::timeout(TIME, self.connect(origin, most)).await.map_err(late)??;
        let answer = if origin.tls {
            let name = ServerName::try_from(origin.host.clone()).map_err(|_| {
                WireError::Refused("has a name that no certificate can have".to_owned())
            })?;
            let shake = TlsConnector::from(Arc::clone(&self.tls)).connect(name, stream);
            let stream = tokio::time::timeout(TIME, shake)
                .await
                .map_err(late)?
                .map_err(|e| tls_error(&e))?;
            tokio::time::timeout(TIME, send(stream, ask, url, authorization))
                .await
                .map_err(late)??
        } else {
            tokio::time::timeout(TIME, send(stream, ask, url, authorization))
                .await
                .map_err(late)??
        };
        Ok((answer, reach))
    }

    async fn connect(
        &self,
        origin: &Origin,
        most: Option<Reach>,
    ) -> Result<(TcpStream, Reach), WireError> {
        let unreached =
            |error: std::io::Error| WireError::Broken(format!("could not be reached: {error}"));
        let found = tokio::net::lookup_host((origin.host.as_str(), origin.port))
            .await
            .map_err(unreached)?;
        let mut allowed: Vec<(SocketAddr, Reach)> = Vec::new();
        let mut why = None;
        for at in found {
            match self.reach(at.ip()) {
                Err(what) => why = Some(format!("is at {}, which is never asked: {what}", at.ip())),
                Ok(reach) if most.is_some_and(|most| reach > most) => {
                    why = Some(format!(
                        "is at {}, further inside than the registry that names it",
                        at.ip()
                    ));
                }
                Ok(reach) => allowed.push((at, reach)),
            }
        }
        if allowed.is_empty() {
            let why = why.unwrap_or_else(|| "has no address".to_owned());
            return Err(WireError::Refused(why));
        }
        let mut last = None;
        for (at, reach) in allowed {
            match TcpStream::connect(at).await {
                Ok(stream) => {
                    let _ = stream.set_nodelay(true);
                    return Ok((stream, reach));
                }
                Err(error) => last = Some(error),
            }
        }
        Err(unreached(last.unwrap_or_else(|| std::io::Error::other("no address"))))
    }
}

/// A certificate that is not trusted stays a refusal; a server that speaks no TLS is another matter.
fn tls_error(error: &std::io::Error) -> WireError {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidMessage(_)) => WireError::NoTls,
        Some(error @ rustls::Error::InvalidCertificate(_)) => WireError::Refused(format!(
            "has a certificate that is not trusted here ({error}); --extra-ca of serve adds one"
        )),
        _ => WireError::Broken(format!("could not be talked to over TLS: {error}")),
    }
}

async fn send<S>(
    stream: S,
    ask: &Ask<'_>,
    url: &Url,
    authorization: Option<&Secret>,
) -> Result<Answer, WireError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|e| broken(&e))?;
    let driving = tokio::spawn(async move {
        let _ = connection.await;
    });
    let mut request = Request::get(&url.path)
        .header(HOST, url.origin.to_string())
        .header(USER_AGENT, concat!("bivouac/", env!("CARGO_PKG_VERSION")));
    for (name, value) in &ask.headers {
        request = request.header(name, value);
    }
    if let Some(value) = authorization {
        let mut value = HeaderValue::from_str(value.expose()).map_err(|_| {
            WireError::Refused(
                "cannot be sent this login: it holds what no header may hold".to_owned(),
            )
        })?;
        value.set_sensitive(true);
        request = request.header(hyper::header::AUTHORIZATION, value);
    }
    let request = request
        .body(Empty::<Bytes>::new())
        .map_err(|_| WireError::Refused("cannot be sent this request".to_owned()))?;
    let answer = match sender.send_request(request).await {
        Ok(answer) => answer,
        Err(error) => {
            driving.abort();
            return Err(broken(&error));
        }
    };
    let (head, body) = answer.into_parts();
    Ok(Answer { status: head.status.as_u16(), headers: head.headers, body, driving })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire() -> Wire {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        Wire::new(Arc::new(config))
    }

    #[test]
    fn addresses_are_public_private_loopback_or_never_asked() {
        let wire = wire();
        let reach = |ip: &str| wire.reach(ip.parse().unwrap());
        assert_eq!(reach("93.184.216.34"), Ok(Reach::Public));
        assert_eq!(reach("2600::1"), Ok(Reach::Public));
        for private in
            ["10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd12::1", "::ffff:10.0.0.1"]
        {
            assert_eq!(reach(private), Ok(Reach::Private), "{private}");
        }
        for loopback in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            assert_eq!(reach(loopback), Ok(Reach::Loopback), "{loopback}");
        }
        for never in [
            "169.254.169.254",
            "169.254.1.1",
            "fe80::1",
            "0.0.0.0",
            "::",
            "224.0.0.1",
            "255.255.255.255",
            "100.100.100.200",
            "168.63.129.16",
            "fd00:ec2::254",
            "::ffff:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
        ] {
            assert!(reach(never).is_err(), "{never}");
        }
    }

    #[test]
    fn redirects_lead_where_they_say() {
        let url = Url::parse("https://Example.com/v2/a/blobs/x?y=1#z").unwrap();
        assert_eq!(url.origin.to_string(), "example.com");
        assert_eq!(url.path, "/v2/a/blobs/x?y=1");
        assert_eq!(url.join("/b").unwrap().path, "/b");
        assert_eq!(url.join("b?c").unwrap().path, "/v2/a/blobs/b?c");
        assert_eq!(
            url.join("//other.example:8443/b").unwrap().origin.to_string(),
            "other.example:8443"
        );
        assert!(!url.join("http://example.com/b").unwrap().origin.tls);
        for bad in ["ftp://x/", "https://u:p@x/", "https:///x"] {
            assert!(Url::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(Origin::new(true, "[::1]:5000").unwrap().to_string(), "[::1]:5000");
        assert!(Origin::new(true, "[::1]:5000").unwrap().is_loopback());
        assert!(Origin::new(true, "localhost").unwrap().is_loopback());
        assert!(!Origin::new(true, "localhost.example").unwrap().is_loopback());
    }
}
