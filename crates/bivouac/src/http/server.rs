//! The loop that accepts connections, plain or over TLS.
//!
//! Owns: limits that concern a connection and not a request. Invariant: a peer that sends nothing
//! holds a connection only for a limited time; a shutdown waits for open answers, also only for a
//! limited time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt as _;

use crate::preview::Peer;

/// Longest time for the head of a request, and for a kept connection without one. Longer than
/// clients keep an unused connection, so that it is they who close.
const HEAD_TIMEOUT: Duration = Duration::from_secs(100);
/// How long open answers may go on after a shutdown has begun.
const GRACE: Duration = Duration::from_secs(5);
/// Pause after an accept that failed for want of something (mostly file descriptors).
const PAUSE: Duration = Duration::from_millis(100);

/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How often a silent HTTP/2 connection is asked whether somebody is there.
const PING: Duration = Duration::from_secs(30);

/// Serves `app` until `shutdown` resolves, then ends open connections. With an acceptor, over TLS.
pub async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    app: Router,
    shutdown: impl Future<Output = ()> + Send,
) {
    let door = Door::new(app, tls);
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        match accepted {
            Ok((stream, from)) => door.connect(stream, from),
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    drop(listener);
    if tokio::time::timeout(GRACE, door.open.shutdown()).await.is_err() {
        tracing::info!("answers that were still open have been cut");
    }
}

/// What every connection needs.
struct Door {
    app: Router,
    tls: Option<TlsAcceptor>,
    http1: Arc<auto::Builder<TokioExecutor>>,
    http2: Arc<auto::Builder<TokioExecutor>>,
    open: GracefulShutdown,
}

impl Door {
    fn new(app: Router, tls: Option<TlsAcceptor>) -> Self {
        let mut http1 = auto::Builder::new(TokioExecutor::new()).http1_only();
        http1.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
        let mut http2 = auto::Builder::new(TokioExecutor::new()).http2_only();
        http2.http2().timer(TokioTimer::new()).keep_alive_interval(PING).keep_alive_timeout(PING);
        let open = GracefulShutdown::new();
        Self { app, tls, http1: Arc::new(http1), http2: Arc::new(http2), open }
    }

    fn connect(&self, stream: TcpStream, from: SocketAddr) {
        // Small records must not wait for more to come.
        let _ = stream.set_nodelay(true);
        let peer = Peer { address: from, tls: self.tls.is_some() };
        let (app, open) = ((self.app.clone(), peer), self.open.watcher());
        let (http1, http2) = (self.http1.clone(), self.http2.clone());
        let Some(tls) = self.tls.clone() else {
            tokio::spawn(converse(stream, http1, app, open));
            return;
        };
        tokio::spawn(async move {
            match tokio::time::timeout(HANDSHAKE, tls.accept(stream)).await {
                Ok(Ok(stream)) => {
                    let second = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                    converse(stream, if second { http2 } else { http1 }, app, open).await;
                }
                Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                Err(_) => tracing::debug!("a TLS handshake took too long"),
            }
        });
    }
}

async fn converse<S>(
    stream: S,
    builder: Arc<auto::Builder<TokioExecutor>>,
    (app, peer): (Router, Peer),
    open: Watcher,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let app = app.map_request(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        request
    });
    let service = TowerToHyperService::new(app);
    let connection =
        builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
    if let Err(error) = open.watch(connection).await {
        tracing::debug!(%error, "a connection ended with an error");
    }
}
