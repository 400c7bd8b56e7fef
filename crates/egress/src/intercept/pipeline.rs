//! One request: judged, changed, sent, answered.
//!
//! Invariant: the policy that is asked is the one in force when the request is noted as under way, and
//! what is sent is what was matched: the canonical path, the query and headers as the rule saw them,
//! less what may not cross. Called by [`super::connection`] for each request that the parser gives.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bivouac_types::id::ValueId;
use bivouac_types::policy::{Action, HeaderSet, Response as Ready};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Uri, Version};
use hyper::body::Incoming;
use tokio::sync::Notify;

use super::body::{Body, Held};
use super::budget::REQUEST;
use super::check::{self, Scheme, Wants};
use super::headers::{self, Secrets};
use super::ledger::{Ledger, describe};
use super::refuse::Refusal;
use super::scan::{Busy, Watch};
use super::upstream::{Key, Tasks, failed};
use super::{Interception, forward, sign, upgrade};
use crate::audit::Line;
use crate::canonical::{Host, Name};
use crate::flows::{FlowGuard, Ongoing};
use crate::message::Value;
use crate::policy::{Address, Named, RequestView, Site};
use crate::reason::{Reason, Verdict};

/// How long a destination may think before it answers: models think for minutes.
const ANSWER_TIME: Duration = Duration::from_secs(15 * 60);
/// Most interim answers before the final one.
const MOST_INTERIM: u32 = 8;
/// Heads up to this size are in the room of their connection.
const USUAL_HEAD: usize = 4 * 1024;
/// Longest method and path in an audit line.
const MOST_METHOD: usize = 32;
const MOST_PATH: usize = 2048;
/// How often a request is judged again because the policy changed meanwhile.
const MOST_JUDGED: u32 = 16;

/// A guest's connection, as its requests see it.
pub(super) struct Visit {
    pub(super) context: Rc<Interception>,
    pub(super) flow: FlowGuard,
    pub(super) scheme: Scheme,
    /// The name that the connection is for; plain HTTP has none.
    pub(super) name: Option<Name>,
    pub(super) port: u16,
    pub(super) watch: Rc<Watch>,
    pub(super) requests: Cell<u64>,
    /// What the connection goes on with once HTTP has ended.
    pub(super) tunnel: RefCell<Option<upgrade::Tunnel>>,
    pub(super) tasks: Tasks,
}

/// What was decided about a request.
struct Judged {
    name: Name,
    site: Option<Arc<Site>>,
    rule: Option<usize>,
    generation: u64,
    path: String,
}

/// A request as it goes out.
pub(super) struct Out {
    pub(super) key: Key,
    pub(super) method: Method,
    /// Path and query.
    pub(super) target: String,
    /// What `Host` or `:authority` say.
    pub(super) authority: HeaderValue,
    pub(super) headers: HeaderMap,
    pub(super) secrets: Secrets,
    pub(super) trailers: bool,
}

/// Answers a request. There is always an answer.
pub(super) async fn answer(visit: Rc<Visit>, request: Request<Incoming>) -> Response<Body> {
    visit.requests.set(visit.requests.get() + 1);
    let version = request.version();
    let http1 = version != Version::HTTP_2;
    let busy = if http1 { Busy::counted(&visit.watch) } else { Busy::new(&visit.watch) };
    let (parts, body) = request.into_parts();
    let mut ledger = Ledger::new(&visit.context, &visit.flow, 0);
    let scheme = visit.scheme;
    ledger.note(|line| {
        line.method = Some(parts.method.as_str().chars().take(MOST_METHOD).collect());
        line.protocol = Some(scheme.as_str().to_owned());
        line.intercepted = scheme == Scheme::Https;
        line.host_from = Some(if scheme == Scheme::Https { "sni" } else { "host" }.to_owned());
        line.host = visit.name.as_ref().map(ToString::to_string);
    });
    let upgrading = parts.headers.contains_key(header::UPGRADE);
    let mut held = Held {
        lease: None,
        ledger,
        secrets: Secrets::default(),
        busy: Some(busy),
        room: Vec::new(),
    };
    let mut response = match respond(&visit, parts, body, &mut held).await {
        Ok(Answer::Made(response)) => response,
        Ok(Answer::Passed(response)) => {
            let (parts, incoming) = response.into_parts();
            Response::from_parts(parts, Body::down(incoming, held, &visit.context.budget))
        }
        Err(refusal) => {
            held.ledger.refused(&refusal);
            refusal.answer(http1)
        }
    };
    // Bytes behind a request for an upgrade were not read as HTTP: nothing follows but the upgrade.
    let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    if version == Version::HTTP_10 || (upgrading && !switched && version == Version::HTTP_11) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// An answer of ours, or the destination's, whose body is still to come.
pub(super) enum Answer {
    Made(Response<Body>),
    Passed(Response<Incoming>),
}

async fn respond(
    visit: &Rc<Visit>,
    parts: Parts,
    body: Incoming,
    held: &mut Held,
) -> Result<Answer, Refusal> {
    if parts.version == Version::HTTP_2 {
        held.room.push(visit.context.budget.room(REQUEST).ok_or_else(no_room)?);
    }
    make_room(visit, &parts.headers, held)?;
    let (wants, name) = check::request(&parts, visit.scheme, visit.name.as_ref(), visit.port)?;
    held.ledger.note(|line| line.host = Some(name.to_string()));
    let judged = judge(visit, &parts, name, &mut held.ledger)?;
    let action = match (&judged.site, judged.rule) {
        (Some(site), Some(rule)) => site.rules.get(rule).map(|r| r.action.clone()),
        _ => None,
    };
    // Nothing is ever put into plain HTTP: there only an answer of ours counts.
    let action = match action {
        Some(Action::Respond(ready)) => {
            note_rule(held, &judged, Verdict::Deny, Reason::RuleResponse);
            return ready_answer(&ready, held).map(Answer::Made);
        }
        other => other.filter(|_| visit.scheme == Scheme::Https),
    };
    let body = Body::up(body, Rc::clone(held.ledger.meter()), &visit.context.budget);
    let mut out = outgoing(visit, &parts, &judged);
    let body = match action {
        None => {
            let reason = if judged.site.as_ref().is_some_and(|s| !s.rules.is_empty()) {
                Reason::NoRuleMatched
            } else {
                Reason::DomainListed
            };
            held.ledger.note(|line| line.reason = reason);
            out.headers = headers::request(&parts.headers, &[], false);
            body
        }
        Some(Action::Transform { headers }) => {
            note_rule(held, &judged, Verdict::Allow, Reason::RuleTransform);
            transform(visit, &parts, &headers, &mut out).await?;
            body
        }
        Some(Action::Sign(rule)) => {
            note_rule(held, &judged, Verdict::Allow, Reason::RuleSign);
            out.headers = headers::request(&parts.headers, &[], true);
            sign::sign(visit, &rule, &parts.headers, &mut out, body).await?
        }
        Some(Action::Forward { url }) => {
            note_rule(held, &judged, Verdict::Allow, Reason::RuleForward);
            out.headers = headers::request(&parts.headers, &[], true);
            forward::forward(visit, &judged.name, &url, &mut out).await?;
            body
        }
        Some(Action::Respond(_)) => return Err(failed(Reason::RuleResponse, "no answer was made")),
    };
    held.secrets = out.secrets.clone();
    if wants == Wants::WebSocket {
        return upgrade::open(visit, &parts, out, held).await;
    }
    let response = send(visit, out, body, held).await?;
    make_room(visit, response.headers(), held)?;
    pass(response, held).map(Answer::Passed)
}

/// Takes room for a head that is larger than those that connections have room for.
fn make_room(visit: &Visit, headers: &HeaderMap, held: &mut Held) -> Result<(), Refusal> {
    let size: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if size > USUAL_HEAD {
        // As it came, and as it goes on.
        let room = visit.context.budget.room(2 * size);
        held.room.push(room.ok_or_else(no_room)?);
    }
    Ok(())
}

/// What there is for buffers is used up.
pub(super) fn no_room() -> Refusal {
    let what = "the session's connections use all the memory there is for them";
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, Reason::Limit, what)
        .hint("close connections that are not read, or open fewer at once")
}

/// Asks the policy in force, and notes the request as under way in the same moment.
fn judge(visit: &Visit, parts: &Parts, name: Name, ledger: &mut Ledger) -> Result<Judged, Refusal> {
    for _ in 0..MOST_JUDGED {
        let current = (visit.context.setup.current)();
        ledger.note(|line| line.generation = current.generation);
        let site = match current.policy.named(&name, visit.port) {
            Named::Deny(reason) => {
                let hint = current.policy.hint_for_name(&name, visit.port).map(|h| h.line());
                return Err(not_allowed(&name, reason, hint));
            }
            Named::Pass { entry, .. } => {
                ledger.note(|line| line.entry = Some(entry.to_string()));
                None
            }
            Named::Intercept(site) => {
                ledger.note(|line| line.entry = Some(site.entry.to_string()));
                Some(site)
            }
        };
        if visit.scheme == Scheme::Http && !current.policy.plain_http() {
            return Err(not_allowed(&name, Reason::PlainHttp, None));
        }
        let path = check::path(parts.uri.path(), site.as_deref())?;
        ledger.note(|line| line.path = Some(path.chars().take(MOST_PATH).collect()));
        let view = RequestView {
            method: parts.method.as_str(),
            path: &path,
            query: parts.uri.query(),
            headers: &parts.headers,
        };
        let matched = site.as_ref().and_then(|s| s.first_match(&view, now_ms()));
        let rule = matched.as_ref().map(|(number, _)| *number);
        if let Some(site) = &site {
            let ongoing = Ongoing {
                site: Arc::clone(site),
                name: name.clone(),
                port: visit.port,
                rule,
                expires_at: matched.as_ref().and_then(|(_, rule)| rule.expires_at),
                dialled: None,
            };
            match visit.flow.begin(current.generation, ongoing) {
                Ok(in_flight) => ledger.began(in_flight),
                Err(_) if visit.flow.is_cut().is_some() => break,
                Err(_) => continue,
            }
        }
        return Ok(Judged { name, site, rule, generation: current.generation, path });
    }
    let what = "the policy changed while the request was judged";
    Err(Refusal::new(StatusCode::FORBIDDEN, Reason::PolicyChanged, what).closing())
}

fn not_allowed(name: &Name, reason: Reason, hint: Option<String>) -> Refusal {
    let (message, hint) = if reason == Reason::PlainHttp {
        let hint = "use https, or set \"plainHttp\": true in the network policy";
        ("plain HTTP is not let through by name".to_owned(), Some(hint.to_owned()))
    } else {
        (format!("the sandbox's network policy does not let requests to {name} through"), hint)
    };
    let mut refusal = Refusal::new(StatusCode::FORBIDDEN, reason, message).closing();
    refusal.hint = hint;
    refusal
}

fn note_rule(held: &mut Held, judged: &Judged, verdict: Verdict, reason: Reason) {
    let rule = judged.rule;
    let credential = judged
        .site
        .as_ref()
        .zip(rule)
        .and_then(|(site, n)| site.rules.get(n))
        .and_then(|r| r.credential.clone());
    held.ledger.note(|line: &mut Line| {
        line.verdict = verdict;
        line.reason = reason;
        line.rule = rule;
        line.credential = credential;
    });
}

/// The request as it goes to its own destination, without headers yet.
fn outgoing(visit: &Visit, parts: &Parts, judged: &Judged) -> Out {
    let mut target = judged.path.clone();
    if let Some(query) = parts.uri.query() {
        target.push('?');
        target.push_str(query);
    }
    let authority = authority_text(judged.name.as_str(), visit.port, visit.scheme.default_port());
    Out {
        key: Key {
            host: Host::Name(judged.name.clone()),
            port: visit.port,
            scheme: visit.scheme.as_str(),
            http1: false,
            generation: judged.generation,
            credential: Vec::new(),
            forward: false,
        },
        method: parts.method.clone(),
        target,
        authority,
        headers: HeaderMap::new(),
        secrets: Secrets::default(),
        trailers: headers::wants_trailers(&parts.headers),
    }
}

/// A host as `Host` says it.
pub(super) fn authority_text(host: &str, port: u16, default: u16) -> HeaderValue {
    let text = if port == default { host.to_owned() } else { format!("{host}:{port}") };
    // A canonical name has no byte that a header could not hold.
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("invalid"))
}

/// Sets the headers of a rule.
async fn transform(
    visit: &Visit,
    parts: &Parts,
    sets: &[HeaderSet],
    out: &mut Out,
) -> Result<(), Refusal> {
    let mut values = Vec::with_capacity(sets.len());
    for set in sets {
        let name = HeaderName::from_bytes(set.name.as_bytes())
            .map_err(|_| no_credential(format!("'{}' is no header name", set.name)))?;
        let value = value(visit, &set.value).await?;
        out.key.credential.push((set.value.clone(), value.version));
        values.push((name, secret_header(&set.name, value.text.expose())?));
    }
    let names: Vec<_> = values.iter().map(|(name, _)| name.clone()).collect();
    out.headers = headers::request(&parts.headers, &names, true);
    for (name, value) in values {
        if name == header::HOST {
            // A pinned host: it says which of a server's sites is meant, and is no secret.
            crate::canonical::authority(value.as_bytes())
                .map_err(|e| no_credential(format!("the value for 'host' {e}")))?;
            out.authority = HeaderValue::from_bytes(value.as_bytes())
                .map_err(|_| no_credential("the value for 'host' is no host"))?;
            continue;
        }
        if framing(&name) {
            return Err(no_credential(format!("a rule may not set '{name}'")));
        }
        out.secrets.add(&value);
        out.headers.insert(name, value);
    }
    Ok(())
}

fn framing(name: &HeaderName) -> bool {
    [
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::TE,
        header::TRAILER,
    ]
    .contains(name)
}

/// A value of the vault, now.
pub(super) async fn value(visit: &Visit, id: &ValueId) -> Result<Value, Refusal> {
    visit.context.setup.values.get(id).await.map_err(no_credential)
}

/// A secret as a header's value: one line, and marked.
pub(super) fn secret_header(name: &str, text: &str) -> Result<HeaderValue, Refusal> {
    let good = HeaderValue::from_str(text).ok().filter(|_| text.is_ascii());
    let mut value = good.ok_or_else(|| {
        no_credential(format!("the value for '{name}' holds a character that a header cannot hold"))
    })?;
    value.set_sensitive(true);
    Ok(value)
}

pub(super) fn no_credential(message: impl Into<String>) -> Refusal {
    failed(Reason::CredentialUnavailable, message)
        .hint("look at the secret that the rule names: `bivouac secret ls`")
}

fn ready_answer(ready: &Ready, held: &mut Held) -> Result<Response<Body>, Refusal> {
    let broken = |_| failed(Reason::RuleResponse, "the rule's answer is not one of HTTP");
    let status = StatusCode::from_u16(ready.status_code)
        .map_err(|_| failed(Reason::RuleResponse, "the rule's answer has no valid status"))?;
    let bytes = ready.body.clone().unwrap_or_default().into_bytes();
    held.ledger.note(|line| line.status = Some(ready.status_code));
    held.ledger.meter().down.set(bytes.len() as u64);
    let mut response = Response::new(Body::full(bytes.into()));
    *response.status_mut() = status;
    for (name, value) in &ready.headers {
        let name = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| failed(Reason::RuleResponse, "the rule's answer has an invalid header"))?;
        if framing(&name) {
            continue;
        }
        response.headers_mut().insert(name, HeaderValue::from_str(value).map_err(broken)?);
    }
    if let Some(kind) = &ready.content_type {
        let kind = HeaderValue::from_str(kind).map_err(broken)?;
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    held.ledger.complete();
    Ok(response)
}

/// Sends it, again on a fresh connection when a kept one turns out to be closed.
async fn send(
    visit: &Visit,
    out: Out,
    mut body: Body,
    held: &mut Held,
) -> Result<Response<Incoming>, Refusal> {
    let pool = &visit.context.pool;
    for attempt in 0.. {
        let mut lease = pool.lease(&visit.context, &out.key, attempt > 0).await?;
        note_dialled(visit, held, lease.address)?;
        let empty = http_body(&body);
        let (request, flood) = shape(&out, lease.http2(), body)?;
        let sent = in_time(&flood, lease.send(request)).await?;
        match sent {
            Ok(response) => {
                held.lease = Some(lease);
                return Ok(response);
            }
            Err((_, Some(unsent))) if attempt < 2 && lease.reused => body = unsent.into_body(),
            // The destination closed a kept connection while the request was on its way.
            Err((e, None))
                if attempt < 2
                    && lease.reused
                    && empty
                    && !e.is_parse()
                    && out.method.is_idempotent() =>
            {
                body = Body::empty();
            }
            Err((e, _)) => {
                let what = format!("the destination did not answer as HTTP does: {}", describe(&e));
                return Err(failed(Reason::UpstreamProtocol, what));
            }
        }
    }
    Err(failed(Reason::UpstreamUnreachable, "the destination closes each connection"))
}

/// The answer to a request, unless the destination makes it wait for ever.
pub(super) async fn in_time<T>(
    flood: &Flood,
    answer: impl Future<Output = T>,
) -> Result<T, Refusal> {
    tokio::select! {
        biased;
        () = flood.over() => {
            Err(failed(Reason::UpstreamProtocol, "the destination sends interim answers without end"))
        }
        answer = tokio::time::timeout(ANSWER_TIME, answer) => answer.map_err(|_| {
            let what = "the destination did not answer in time";
            Refusal::new(StatusCode::GATEWAY_TIMEOUT, Reason::UpstreamUnreachable, what)
        }),
    }
}

fn http_body(body: &Body) -> bool {
    hyper::body::Body::is_end_stream(body)
}

/// Notes where the request goes, for sweeps. A sweep that came while the connection was made did not know
/// it: so the policy in force is asked about the address in the same moment.
pub(super) fn note_dialled(
    visit: &Visit,
    held: &mut Held,
    address: std::net::SocketAddr,
) -> Result<(), Refusal> {
    held.ledger.note(|line| line.dialled = Some(address.to_string()));
    if let Some(in_flight) = held.ledger.in_flight() {
        in_flight.dialled(address.ip());
    }
    let current = (visit.context.setup.current)();
    if matches!(current.policy.address(address.ip()), Address::Denied { .. }) {
        let what = format!("the policy changed, and {} is in subnets.deny now", address.ip());
        return Err(Refusal::new(StatusCode::FORBIDDEN, Reason::SubnetDenied, what).closing());
    }
    Ok(())
}

/// Counts interim answers.
#[derive(Debug, Clone, Default)]
pub(super) struct Flood(Option<Arc<(AtomicU32, Notify)>>);

impl Flood {
    async fn over(&self) {
        match &self.0 {
            Some(both) => both.1.notified().await,
            None => std::future::pending().await,
        }
    }
}

/// The request in the form of the protocol that the connection speaks.
fn shape(out: &Out, http2: bool, body: Body) -> Result<(Request<Body>, Flood), Refusal> {
    let broken = || Refusal::invalid("the target cannot be sent on");
    let mut request = Request::new(body);
    *request.method_mut() = out.method.clone();
    let mut headers = out.headers.clone();
    if http2 {
        let authority = out.authority.to_str().map_err(|_| broken())?;
        let uri = Uri::builder().scheme(out.key.scheme).authority(authority);
        *request.uri_mut() = uri.path_and_query(&*out.target).build().map_err(|_| broken())?;
        *request.version_mut() = Version::HTTP_2;
        if out.trailers {
            headers.insert(header::TE, HeaderValue::from_static("trailers"));
        }
        *request.headers_mut() = headers;
        return Ok((request, Flood::default()));
    }
    *request.uri_mut() =
        Uri::builder().path_and_query(&*out.target).build().map_err(|_| broken())?;
    headers::join_cookies(&mut headers);
    headers.insert(header::HOST, out.authority.clone());
    *request.headers_mut() = headers;
    let flood = Arc::new((AtomicU32::new(0), Notify::new()));
    let count = Arc::clone(&flood);
    hyper::ext::on_informational(&mut request, move |_| {
        if count.0.fetch_add(1, Ordering::Relaxed) >= MOST_INTERIM {
            count.1.notify_one();
        }
    });
    Ok((request, Flood(Some(flood))))
}

/// The request for an upgrade in HTTP/1.1.
pub(super) fn shape_upgrade(out: &Out) -> Result<(Request<Body>, Flood), Refusal> {
    shape(out, false, Body::empty())
}

/// What of a destination's answer the guest gets.
pub(super) fn pass(
    mut response: Response<Incoming>,
    held: &mut Held,
) -> Result<Response<Incoming>, Refusal> {
    let headers = response.headers();
    if headers.contains_key(header::TRANSFER_ENCODING)
        && headers.contains_key(header::CONTENT_LENGTH)
    {
        let what = "the destination's answer has both Content-Length and Transfer-Encoding";
        return Err(failed(Reason::UpstreamProtocol, what));
    }
    match response.status() {
        StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            let what = "the destination asks for a proxy's credentials, and is no proxy";
            return Err(failed(Reason::UpstreamProtocol, what));
        }
        StatusCode::SWITCHING_PROTOCOLS => {
            let what = "the destination changes a protocol that nobody asked it to change";
            return Err(failed(Reason::UpstreamProtocol, what));
        }
        _ => {}
    }
    let status = response.status().as_u16();
    held.ledger.note(|line| line.status = Some(status));
    *response.headers_mut() = headers::response(response.headers(), &held.secrets);
    // The words behind the status are the destination's as well, and say nothing that the number does not.
    response.extensions_mut().remove::<hyper::ext::ReasonPhrase>();
    Ok(response)
}

/// Now, ms since the epoch.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
