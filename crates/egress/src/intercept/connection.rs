//! A guest's connection from the first byte of TLS to the last of HTTP.
//!
//! Invariant: everything that a connection started ends with the future that serves it. Called by
//! [`super::Interception`].

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::AlertDescription;
use tokio::io::AsyncWriteExt;
use tokio_rustls::TlsAcceptor;

use super::body::Body;
use super::budget::{GUEST, TLS_KEPT};
use super::check::Scheme;
use super::ledger::{Ledger, describe};
use super::pipeline::{self, Visit};
use super::refuse::Refusal;
use super::scan::{MAX_HEADERS, Scan};
use super::upstream::Stream;
use super::{Ended, Interception, Local};
use crate::canonical::{Name, host};
use crate::flows::Guest;
use crate::reason::Reason;

/// How long the guest's side of the TLS handshake may take.
const TLS_TIME: Duration = Duration::from_secs(10);
/// How long HTTP/2 may rest without a request.
const IDLE_TIME: Duration = Duration::from_secs(300);
/// How long the last words may take.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// Room for one stream, and for all of a connection, in bytes.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOWS: &[(u32, usize)] =
    &[(1024 * 1024, 15), (256 * 1024, 40), (SMALLEST_WINDOW, 100)];
/// HTTP/2 has no smaller one.
const SMALLEST_WINDOW: u32 = 65_535;

/// Ends TLS for this name, and serves what is inside.
pub(super) async fn tls(context: Rc<Interception>, guest: Guest, name: Name, port: u16) -> Ended {
    let flow = guest.flow().clone();
    let Some(_room) = context.budget.room(GUEST) else { return full() };
    let config = match context.setup.authority.server_config_for(&name) {
        Ok(config) => config,
        Err(e) => return ended(Reason::Limit, e.to_string()),
    };
    let accepted = tokio::time::timeout(TLS_TIME, TlsAcceptor::from(config).accept(guest)).await;
    let mut stream = match accepted {
        Ok(Ok(stream)) => stream,
        Ok(Err(e)) => return refused_handshake(&e),
        Err(_) => return ended(Reason::HelloTimeout, "the guest did not finish the TLS handshake"),
    };
    stream.get_mut().1.set_buffer_limit(Some(TLS_KEPT));
    let (same, http2) = {
        let session = stream.get_ref().1;
        let said = session.server_name().and_then(|n| host(n.as_bytes()).ok());
        let same = matches!(said, Some(crate::canonical::Host::Name(said)) if said == name);
        (same, session.alpn_protocol() == Some(b"h2"))
    };
    if !same {
        return ended(Reason::HelloInvalid, "the server name was read in two ways");
    }
    let visit = visit(context, flow, Scheme::Https, Some(name), port);
    if http2 { serve_http2(stream, visit).await } else { serve_http1(stream, visit).await }
}

/// Serves plain HTTP.
pub(super) async fn plain(context: Rc<Interception>, guest: Guest, port: u16) -> Ended {
    let flow = guest.flow().clone();
    let Some(_room) = context.budget.room(GUEST) else { return full() };
    serve_http1(guest, visit(context, flow, Scheme::Http, None, port)).await
}

fn visit(
    context: Rc<Interception>,
    flow: crate::flows::FlowGuard,
    scheme: Scheme,
    name: Option<Name>,
    port: u16,
) -> Rc<Visit> {
    Rc::new(Visit {
        context,
        flow,
        scheme,
        name,
        port,
        watch: Rc::default(),
        requests: Cell::new(0),
        tunnel: RefCell::new(None),
        tasks: super::upstream::Tasks::default(),
    })
}

fn ended(reason: Reason, error: impl Into<String>) -> Ended {
    Ended { reason, error: Some(error.into()), requests: 0 }
}

fn full() -> Ended {
    ended(Reason::Limit, "the session's connections use all the memory there is for decryption")
}

/// Tells a client that does not trust the sandbox's authority from one that is broken.
fn refused_handshake(error: &std::io::Error) -> Ended {
    let cause = error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
    let rejected = match cause {
        Some(rustls::Error::AlertReceived(alert)) => matches!(
            alert,
            AlertDescription::BadCertificate
                | AlertDescription::UnknownCA
                | AlertDescription::CertificateUnknown
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateRevoked
                | AlertDescription::AccessDenied
        ),
        // Some clients just hang up on a certificate that they do not trust.
        None => error.kind() == std::io::ErrorKind::UnexpectedEof,
        Some(_) => false,
    };
    let reason = if rejected { Reason::TlsClientRejectedCa } else { Reason::HelloInvalid };
    ended(reason, describe(error))
}

type Service = Local<'static, Result<Response<Body>, Infallible>>;

fn service(visit: &Rc<Visit>) -> impl Fn(Request<Incoming>) -> Service + use<> {
    let visit = Rc::clone(visit);
    move |request| {
        let visit = Rc::clone(&visit);
        Box::pin(async move { Ok(pipeline::answer(visit, request).await) })
    }
}

async fn serve_http1<S: Stream + 'static>(stream: S, visit: Rc<Visit>) -> Ended {
    let scan = Scan::new(stream, Rc::clone(&visit.watch), &visit.context.budget);
    let connection = http1::Builder::new()
        .max_headers(MAX_HEADERS)
        .max_buf_size(super::scan::MAX_HEAD * 2)
        .header_read_timeout(None)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(scan), service_fn(service(&visit)));
    let parts = match connection.without_shutdown().await {
        Ok(parts) => parts,
        Err(e) => return finished(&visit, Some(&e)),
    };
    let mut scan = parts.io.into_inner();
    let tunnel = visit.tunnel.borrow_mut().take();
    if let Some(tunnel) = tunnel {
        tunnel.relay(scan, parts.read_buf).await;
        return finished(&visit, None);
    }
    // What the scanner refused never came to the parser: it is answered here.
    let fault = visit.watch.fault();
    if let Some(fault) = fault {
        let refusal = Refusal::from(fault);
        refused_line(&visit, &refusal);
        let words = async {
            let _ = scan.write_all(&refusal.bytes()).await;
            let _ = scan.shutdown().await;
        };
        let _ = tokio::time::timeout(LAST_WORDS, words).await;
    } else {
        let _ = tokio::time::timeout(LAST_WORDS, scan.shutdown()).await;
    }
    finished(&visit, None)
}

fn refused_line(visit: &Rc<Visit>, refusal: &Refusal) {
    visit.requests.set(visit.requests.get() + 1);
    let generation = (visit.context.setup.current)().generation;
    let mut ledger = Ledger::new(&visit.context, &visit.flow, generation);
    let scheme = visit.scheme;
    ledger.note(|line| {
        line.host = visit.name.as_ref().map(ToString::to_string);
        line.protocol = Some(scheme.as_str().to_owned());
        line.intercepted = scheme == Scheme::Https;
    });
    ledger.refused(refusal);
}

async fn serve_http2<S: Stream + 'static>(stream: S, visit: Rc<Visit>) -> Ended {
    let Some((_room, window)) = visit.context.budget.window(0, CONNECTION_WINDOWS) else {
        return full();
    };
    let mut connection = http2::Builder::new(visit.tasks.clone())
        .timer(TokioTimer::new())
        .max_concurrent_streams(100)
        .max_header_list_size(64 * 1024)
        .max_pending_accept_reset_streams(20)
        .max_local_error_reset_streams(64)
        .initial_stream_window_size(STREAM_WINDOW.min(window))
        .initial_connection_window_size(window)
        .max_send_buf_size(128 * 1024)
        .auto_date_header(false)
        .serve_connection(TokioIo::new(stream), service_fn(service(&visit)));
    let mut connection = Pin::new(&mut connection);
    let mut seen = 0;
    let served = loop {
        tokio::select! {
            served = &mut connection => break served,
            () = tokio::time::sleep(IDLE_TIME) => {
                if visit.watch.idle() && visit.requests.get() == seen {
                    connection.as_mut().graceful_shutdown();
                }
                seen = visit.requests.get();
            }
        }
    };
    finished(&visit, served.err().as_ref())
}

fn finished(visit: &Visit, error: Option<&hyper::Error>) -> Ended {
    // A guest that closes in the middle has its own line; it is no error of the connection.
    let error = error.filter(|e| !e.is_incomplete_message() && !e.is_closed());
    Ended {
        reason: if error.is_some() { Reason::HttpInvalid } else { Reason::Closed },
        error: error.map(|e| describe(e)),
        requests: visit.requests.get(),
    }
}
