//! A small world: a broker's worth of surroundings, origins that write down what reaches them, guests.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bivouac_types::id::{SessionId, ValueId};
use bivouac_types::policy::NetworkPolicy;
use bivouac_types::secret::Secret;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, Version};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rcgen::{CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::LocalSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::audit::Line;
use crate::canonical::{Host, Name};
use crate::flows::{Facts, Flows, Guest, Handling};
use crate::intercept::upstream::Tasks;
use crate::intercept::{Connect, Current, Ended, Interception, Local, Setup, Tokens, Values};
use crate::message::Value;
use crate::policy::Compiled;
use crate::reason::Reason;
use crate::trust::{Authority, Roots};

/// How long anything may take before a test fails.
pub(super) const LONG: Duration = Duration::from_secs(20);

/// Runs a test in a thread of its own kind: everything local.
pub(super) fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let local = LocalSet::new();
    runtime.block_on(local.run_until(async {
        tokio::time::timeout(LONG, test()).await.expect("the test ends in time");
    }));
}

pub(super) fn name(text: &str) -> Name {
    match crate::canonical::host(text.as_bytes()).expect("a name") {
        Host::Name(name) => name,
        Host::Ip(_) => panic!("{text} is an address"),
    }
}

pub(super) fn session(n: u8) -> SessionId {
    SessionId::new(1, [n; 10])
}

/// The roots that origins' certificates come from.
pub(super) struct TestRoot {
    issuer: Issuer<'static, KeyPair>,
    pub(super) pem: String,
}

impl TestRoot {
    pub(super) fn new() -> Rc<Self> {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, "test root");
        let pem = params.self_signed(&key).expect("a root").pem();
        Rc::new(Self { issuer: Issuer::new(params, key), pem })
    }

    /// TLS of an origin.
    pub(super) fn server(
        &self,
        host: &str,
        alpn: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> Arc<ServerConfig> {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec![host.to_owned()]).expect("a name");
        change(&mut params);
        let leaf = params.signed_by(&key, &self.issuer).expect("a leaf");
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], der)
            .expect("a certificate");
        config.alpn_protocols = alpn.iter().map(|a| a.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}

/// What reached an origin.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) method: String,
    pub(super) target: String,
    pub(super) authority: Option<String>,
    pub(super) version: Version,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) trailers: Option<HeaderMap>,
    /// Number of the connection.
    pub(super) connection: usize,
}

impl Seen {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|v| v.to_str().expect("text"))
    }
}

pub(super) type Log = Rc<RefCell<Vec<Seen>>>;
pub(super) type OutBody =
    http_body_util::combinators::UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;

pub(super) fn text(body: impl Into<Bytes>) -> OutBody {
    Full::new(body.into()).map_err(|e| match e {}).boxed_unsync()
}

/// An origin that answers with `answer` and writes requests down. Without TLS when `tls` is absent.
pub(super) async fn origin(
    tls: Option<Arc<ServerConfig>>,
    answer: impl Fn(&Seen) -> Response<OutBody> + 'static,
) -> (SocketAddr, Log) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let log = Log::default();
    let (kept, answer) = (Rc::clone(&log), Rc::new(answer));
    tokio::task::spawn_local(async move {
        let count = Cell::new(0);
        while let Ok((tcp, _)) = listener.accept().await {
            count.set(count.get() + 1);
            // Hundreds of senders that nobody reads must not fill the kernel's memory for TCP.
            rustix::net::sockopt::set_socket_send_buffer_size(&tcp, 128 * 1024).expect("a size");
            let (number, tls) = (count.get(), tls.clone());
            let (log, answer) = (Rc::clone(&kept), Rc::clone(&answer));
            tokio::task::spawn_local(async move {
                let service = service_fn(move |request| {
                    serve(request, number, Rc::clone(&log), Rc::clone(&answer))
                });
                let Some(tls) = tls else {
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(tcp), service)
                        .await;
                    return;
                };
                let Ok(stream) = TlsAcceptor::from(tls).accept(tcp).await else { return };
                let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                let io = TokioIo::new(stream);
                if h2 {
                    let _ = hyper::server::conn::http2::Builder::new(Tasks::default())
                        .serve_connection(io, service)
                        .await;
                } else {
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(io, service)
                        .await;
                }
            });
        }
    });
    (address, log)
}

async fn serve(
    request: Request<Incoming>,
    connection: usize,
    log: Log,
    answer: Rc<impl Fn(&Seen) -> Response<OutBody>>,
) -> Result<Response<OutBody>, hyper::Error> {
    let (parts, body) = request.into_parts();
    let all = body.collect().await?;
    let trailers = all.trailers().cloned();
    let seen = Seen {
        method: parts.method.to_string(),
        target: parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
        authority: parts.uri.authority().map(ToString::to_string),
        version: parts.version,
        headers: parts.headers,
        body: all.to_bytes(),
        trailers,
        connection,
    };
    log.borrow_mut().push(seen.clone());
    Ok(answer(&seen))
}

/// An origin that is spoken to in bytes: `talk` gets each connection.
pub(super) async fn raw_origin<F: Future<Output = ()> + 'static>(
    tls: Arc<ServerConfig>,
    talk: impl Fn(tokio_rustls::server::TlsStream<TcpStream>) -> F + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::task::spawn_local(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            if let Ok(stream) = TlsAcceptor::from(Arc::clone(&tls)).accept(tcp).await {
                tokio::task::spawn_local(talk(stream));
            }
        }
    });
    address
}

/// Reads until the empty line behind a head.
pub(super) async fn read_head(stream: &mut (impl AsyncReadExt + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&head).into_owned()
}

/// Values, tokens and addresses of the world.
#[derive(Default)]
pub(super) struct Surroundings {
    pub(super) values: RefCell<BTreeMap<ValueId, Result<Value, String>>>,
    pub(super) token: RefCell<Option<String>>,
    pub(super) asked: RefCell<Vec<String>>,
    pub(super) hosts: RefCell<HashMap<String, SocketAddr>>,
    pub(super) dialled: RefCell<Vec<String>>,
}

impl Values for Surroundings {
    fn get<'a>(&'a self, id: &'a ValueId) -> Local<'a, Result<Value, String>> {
        let value = self.values.borrow().get(id).cloned();
        Box::pin(async move { value.unwrap_or_else(|| Err("it is not there".to_owned())) })
    }
}

impl Tokens for Surroundings {
    fn get<'a>(&'a self, audience: &'a str) -> Local<'a, Result<Value, String>> {
        self.asked.borrow_mut().push(audience.to_owned());
        let token = self.token.borrow().clone();
        Box::pin(async move {
            let text = token.ok_or_else(|| "the engine is away".to_owned())?;
            Ok(Value { text: Secret::new(text), version: 1, expires_at: None })
        })
    }
}

impl Connect for Surroundings {
    fn to<'a>(
        &'a self,
        host: &'a Host,
        port: u16,
    ) -> Local<'a, Result<(TcpStream, SocketAddr), (Reason, String)>> {
        let key = match host {
            Host::Name(name) => format!("{name}:{port}"),
            Host::Ip(ip) => format!("{ip}:{port}"),
        };
        self.dialled.borrow_mut().push(key.clone());
        let address = self.hosts.borrow().get(&key).copied();
        Box::pin(async move {
            let address = address.ok_or((Reason::ResolveFailed, format!("no host {key}")))?;
            let stream = TcpStream::connect(address)
                .await
                .map_err(|e| (Reason::UpstreamUnreachable, e.to_string()))?;
            Ok((stream, address))
        })
    }
}

/// A broker's worth of surroundings around interception.
pub(super) struct World {
    pub(super) root: Rc<TestRoot>,
    pub(super) around: Rc<Surroundings>,
    pub(super) lines: Rc<RefCell<Vec<Line>>>,
    pub(super) ends: Rc<RefCell<Vec<Ended>>>,
    pub(super) flows: Flows,
    pub(super) interception: Rc<Interception>,
    pub(super) authority: Rc<Authority>,
    policy: Rc<RefCell<Current>>,
    /// Where the guests connect.
    front: RefCell<HashMap<(Option<String>, u16), SocketAddr>>,
}

impl World {
    pub(super) fn new(policy: &serde_json::Value) -> Rc<Self> {
        let root = TestRoot::new();
        let around = Rc::new(Surroundings::default());
        let compiled = compile(&around, policy);
        let policy = Rc::new(RefCell::new(Current { policy: Rc::new(compiled), generation: 1 }));
        let lines: Rc<RefCell<Vec<Line>>> = Rc::default();
        let flows = Flows::new(1000);
        flows.set_generation(1);
        let authority =
            Rc::new(Authority::new(&session(1), Authority::UNKNOWN_LIFE).expect("an authority"));
        let (pem, current, kept) = (root.pem.clone(), Rc::clone(&policy), Rc::clone(&lines));
        let interception = Interception::new(Setup {
            session: session(1),
            authority: Rc::clone(&authority),
            roots: Rc::new(Roots::new(Box::new(move || Ok(pem.clone().into_bytes())))),
            current: Box::new(move || current.borrow().clone()),
            values: Rc::clone(&around) as _,
            tokens: Rc::clone(&around) as _,
            connect: Rc::clone(&around) as _,
            record: Box::new(move |line| kept.borrow_mut().push(line)),
        });
        Rc::new(Self {
            root,
            around,
            lines,
            ends: Rc::default(),
            flows,
            interception,
            authority,
            policy,
            front: RefCell::default(),
        })
    }

    /// Another policy, as the broker swaps it: nothing is cut by it here.
    pub(super) fn replace(&self, policy: &serde_json::Value) {
        let compiled = compile(&self.around, policy);
        let generation = self.policy.borrow().generation + 1;
        *self.policy.borrow_mut() = Current { policy: Rc::new(compiled), generation };
        self.flows.set_generation(generation);
    }

    pub(super) fn generation(&self) -> u64 {
        self.policy.borrow().generation
    }

    /// The value that a policy's header got.
    pub(super) fn set_values(&self, change: impl Fn(&mut Result<Value, String>)) {
        self.around.values.borrow_mut().values_mut().for_each(change);
    }

    /// Puts an origin of the test root at a name's port 443.
    pub(super) async fn at(
        &self,
        host: &str,
        alpn: &[&str],
        answer: impl Fn(&Seen) -> Response<OutBody> + 'static,
    ) -> Log {
        let (address, log) = origin(Some(self.root.server(host, alpn, |_| ())), answer).await;
        self.place(host, 443, address);
        log
    }

    pub(super) fn place(&self, host: &str, port: u16, address: SocketAddr) {
        self.around.hosts.borrow_mut().insert(format!("{host}:{port}"), address);
    }

    /// A guest's TCP connection to the broker, as if to this name and port; without a name it is plain.
    pub(super) async fn tcp(self: &Rc<Self>, host: Option<&str>, port: u16) -> TcpStream {
        let key = (host.map(str::to_owned), port);
        let known = self.front.borrow().get(&key).copied();
        if let Some(address) = known {
            return TcpStream::connect(address).await.expect("the broker");
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        self.front.borrow_mut().insert(key, address);
        let (world, host) = (Rc::downgrade(self), host.map(name));
        tokio::task::spawn_local(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let Some(world) = world.upgrade() else { return };
                let host = host.clone();
                tokio::task::spawn_local(async move { world.guest(tcp, host, port).await });
            }
        });
        TcpStream::connect(address).await.expect("the broker")
    }

    async fn guest(self: Rc<Self>, tcp: TcpStream, host: Option<Name>, port: u16) {
        let asked = SocketAddr::from(([203, 0, 113, 7], port));
        let flow = self.flows.register(asked).expect("room");
        flow.decide(Facts {
            asked,
            name: host.clone(),
            handling: if host.is_some() { Handling::Intercept } else { Handling::PlainHttp },
            entry: None,
            dialled: None,
            generation: self.flows.generation(),
        })
        .expect("in force");
        let guest = Guest::new(tcp, Bytes::new(), flow.clone());
        let serve = async {
            let interception = Rc::clone(&self.interception);
            match host {
                Some(name) => interception.serve_tls(guest, name, port).await,
                None => interception.serve_plain(guest, port).await,
            }
        };
        let ended = tokio::select! {
            biased;
            reason = flow.cut() => Ended { reason, error: None, requests: 0 },
            ended = serve => ended,
        };
        drop(flow);
        self.ends.borrow_mut().push(ended);
    }

    /// The client side of TLS as a guest has it.
    pub(super) fn client(&self, alpn: &[&str]) -> Arc<ClientConfig> {
        client_of(self.authority.pem(), alpn)
    }

    /// A guest's TLS connection.
    pub(super) async fn tls(
        self: &Rc<Self>,
        host: &str,
        alpn: &[&str],
    ) -> tokio_rustls::client::TlsStream<TcpStream> {
        let tcp = self.tcp(Some(host), 443).await;
        self.handshake(tcp, host, self.client(alpn)).await.expect("a handshake")
    }

    pub(super) async fn handshake(
        &self,
        tcp: TcpStream,
        host: &str,
        config: Arc<ClientConfig>,
    ) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
        let server = ServerName::try_from(host.to_owned()).expect("a name");
        TlsConnector::from(config).connect(server, tcp).await
    }

    /// Sends bytes over HTTP/1.1 and reads all that comes until the broker closes.
    pub(super) async fn raw(self: &Rc<Self>, host: &str, bytes: &str) -> String {
        let mut stream = self.tls(host, &["http/1.1"]).await;
        stream.write_all(bytes.as_bytes()).await.expect("sent");
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all).await;
        String::from_utf8_lossy(&all).into_owned()
    }

    /// Sends one request and gives the whole answer.
    pub(super) async fn ask(self: &Rc<Self>, host: &str, request: Request<&str>) -> Got {
        self.asker(host).await.send(request).await
    }

    /// A guest's HTTP/1.1 connection.
    pub(super) async fn asker(self: &Rc<Self>, host: &str) -> Asker {
        let stream = self.tls(host, &["http/1.1"]).await;
        let (sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.expect("HTTP/1");
        tokio::task::spawn_local(connection);
        Asker::Http1(sender)
    }

    /// A guest's HTTP/2 connection.
    pub(super) async fn asker2(self: &Rc<Self>, host: &str) -> Asker {
        let stream = self.tls(host, &["h2"]).await;
        let (sender, connection) =
            hyper::client::conn::http2::handshake(Tasks::default(), TokioIo::new(stream))
                .await
                .expect("HTTP/2");
        tokio::task::spawn_local(connection);
        Asker::Http2(sender)
    }

    /// Waits until the lines hold one for which `is` says yes.
    pub(super) async fn line(&self, is: impl Fn(&Line) -> bool) -> Line {
        loop {
            if let Some(line) = self.lines.borrow().iter().find(|l| is(l)) {
                return line.clone();
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until a connection ended for this reason.
    pub(super) async fn ended(&self, reason: Reason) -> Ended {
        loop {
            if let Some(end) = self.ends.borrow().iter().find(|e| e.reason == reason) {
                return end.clone();
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

fn compile(around: &Surroundings, policy: &serde_json::Value) -> Compiled {
    let next = Cell::new(around.values.borrow().len() as u64);
    let mut mint = || {
        next.set(next.get() + 1);
        ValueId::new(next.get(), [7; 10])
    };
    let draft = NetworkPolicy::parse("networkPolicy", policy, &mut mint).expect("a policy");
    for (id, secret) in draft.values {
        let value = Value { text: secret, version: 1, expires_at: None };
        around.values.borrow_mut().insert(id, Ok(value));
    }
    Compiled::new(&draft.policy).expect("a policy that compiles")
}

/// The client side of TLS of someone who trusts this PEM alone.
pub(super) fn client_of(pem: &str, alpn: &[&str]) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    for der in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        roots.add(der.expect("a certificate")).expect("a root");
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|a| a.as_bytes().to_vec()).collect();
    Arc::new(config)
}

/// A guest's HTTP client.
pub(super) enum Asker {
    Http1(hyper::client::conn::http1::SendRequest<Full<Bytes>>),
    Http2(hyper::client::conn::http2::SendRequest<Full<Bytes>>),
}

/// An answer, whole.
#[derive(Debug)]
pub(super) struct Got {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: String,
    pub(super) trailers: Option<HeaderMap>,
}

impl Got {
    pub(super) fn deny(&self) -> &str {
        self.headers.get("x-bivouac-deny").map_or("", |v| v.to_str().expect("text"))
    }
}

impl Asker {
    pub(super) async fn send(&mut self, request: Request<&str>) -> Got {
        self.try_send(request).await.expect("an answer")
    }

    pub(super) async fn try_send(&mut self, request: Request<&str>) -> Result<Got, hyper::Error> {
        let request = request.map(|b| Full::new(Bytes::copy_from_slice(b.as_bytes())));
        let response = match self {
            Self::Http1(sender) => {
                sender.ready().await?;
                sender.send_request(request).await?
            }
            Self::Http2(sender) => sender.send_request(request).await?,
        };
        let (parts, body) = response.into_parts();
        let all = body.collect().await?;
        let trailers = all.trailers().cloned();
        let body = String::from_utf8_lossy(&all.to_bytes()).into_owned();
        Ok(Got { status: parts.status.as_u16(), headers: parts.headers, body, trailers })
    }
}

/// A GET for HTTP/1.1.
pub(super) fn get(host: &str, target: &str) -> http::request::Builder {
    Request::get(target).header("host", host)
}

/// A policy whose only rule sets one header on every request to `ok.test`.
pub(super) fn inject(name: &str, value: &str) -> serde_json::Value {
    serde_json::json!({"allow": {"ok.test": [{"transform": [{"headers": {name: value}}]}]}})
}
