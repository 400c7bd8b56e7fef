//! The loop that accepts connections.
//!
//! Owns: limits that concern a connection and not a request. Invariant: a peer that sends nothing
//! holds a connection only for a limited time; a shutdown waits for open answers, also only for a
//! limited time.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};

/// Longest time for the head of a request, and for a kept connection without one. Longer than
/// clients keep an unused connection, so that it is they who close.
const HEAD_TIMEOUT: Duration = Duration::from_secs(100);
/// How long open answers may go on after a shutdown has begun.
const GRACE: Duration = Duration::from_secs(5);
/// Pause after an accept that failed for want of something (mostly file descriptors).
const PAUSE: Duration = Duration::from_millis(100);

/// Serves `app` until `shutdown` resolves, then ends open connections.
pub async fn serve(listener: TcpListener, app: Router, shutdown: impl Future<Output = ()> + Send) {
    let mut builder = auto::Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    let (builder, open) = (Arc::new(builder), GracefulShutdown::new());
    tokio::pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        match accepted {
            Ok((stream, _)) => connect(stream, &app, &builder, &open),
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    drop(listener);
    if tokio::time::timeout(GRACE, open.shutdown()).await.is_err() {
        tracing::info!("answers that were still open have been cut");
    }
}

fn connect(
    stream: TcpStream,
    app: &Router,
    builder: &Arc<auto::Builder<TokioExecutor>>,
    open: &GracefulShutdown,
) {
    // Small records must not wait for more to come.
    let _ = stream.set_nodelay(true);
    let service = TowerToHyperService::new(app.clone());
    let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
    let connection = open.watch(connection);
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection ended with an error");
        }
    });
}
