//! Which headers pass, in either direction.
//!
//! Invariant: what a rule sets is taken out of the guest's headers first, under every spelling that a
//! server may read as the same name; nothing that concerns one connection only, and nothing that claims
//! the broker's own voice, crosses it. Pure: called by [`super::pipeline`] and [`super::upgrade`].

use http::header::{self, HeaderMap, HeaderName, HeaderValue};

/// Headers that concern one connection.
const HOP: [HeaderName; 6] = [
    header::CONNECTION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];

/// Headers by which some servers take another method, path or host than the one that was matched; with
/// everything that begins with [`FORWARDED`], the sender's address among it.
const STEER: [&str; 8] = [
    "forwarded",
    "x-host",
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    "x-original-method",
    "x-original-url",
    "x-rewrite-url",
];
/// What proxies say of a request that they hand on.
const FORWARDED: &str = "x-forwarded-";

/// Replaces a value that may not be seen.
const REDACTED: HeaderValue = HeaderValue::from_static("[redacted]");
/// Shorter texts are no secrets, and would be found everywhere.
const SHORTEST_SECRET: usize = 6;

/// Names that the message's own `Connection` headers add to those that concern one connection.
fn listed(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(header::CONNECTION).iter();
    values
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .collect()
}

fn ours(name: &str) -> bool {
    name.starts_with("vercel-forwarded-")
        || name == "vercel-sandbox-oidc-token"
        || name.starts_with("x-bivouac-")
}

fn hop(name: &HeaderName, listed: &[HeaderName]) -> bool {
    HOP.contains(name)
        || listed.contains(name)
        || name.as_str().starts_with("proxy-")
        || name == "http2-settings"
}

/// One form for all spellings of a name that servers take for the same.
fn folded(name: &str) -> String {
    name.replace('_', "-")
}

/// Whether a server could take a request with this header for another one.
fn steers(name: &str) -> bool {
    name.contains('_') || name.starts_with(FORWARDED) || STEER.contains(&name)
}

/// The guest's headers that go on. `sets` are the names that the rule sets; `credentialed` says that a
/// rule adds something of worth, so that what could steer it elsewhere is dropped as well.
///
/// `Host` and `Content-Length` are not among them: the sender writes those for the message it sends.
pub(super) fn request(from: &HeaderMap, sets: &[HeaderName], credentialed: bool) -> HeaderMap {
    let listed = listed(from);
    let mut to = HeaderMap::with_capacity(from.keys_len() + sets.len());
    for (name, value) in from {
        let text = name.as_str();
        let dropped = hop(name, &listed)
            || ours(&folded(text))
            || name == header::HOST
            || name == header::CONTENT_LENGTH
            || name == header::EXPECT
            || sets.contains(name)
            || (credentialed && steers(text));
        if !dropped {
            to.append(name.clone(), value.clone());
        }
    }
    to
}

/// Whether the guest understands trailers, which gRPC servers insist on.
pub(super) fn wants_trailers(from: &HeaderMap) -> bool {
    let words = from.get_all(header::TE).iter().filter_map(|v| v.to_str().ok());
    words.flat_map(|v| v.split(',')).any(|w| w.trim().eq_ignore_ascii_case("trailers"))
}

/// The destination's headers that go on.
pub(super) fn response(from: &HeaderMap, secrets: &Secrets) -> HeaderMap {
    let listed = listed(from);
    let mut to = HeaderMap::with_capacity(from.keys_len());
    for (name, value) in from {
        let text = name.as_str();
        if hop(name, &listed) || name == header::ALT_SVC || text.starts_with("x-bivouac-") {
            continue;
        }
        to.append(name.clone(), if secrets.within(value) { REDACTED } else { value.clone() });
    }
    to
}

/// Trailers that go on: those of gRPC.
pub(super) fn trailers(from: &HeaderMap, secrets: &Secrets) -> HeaderMap {
    let mut to = HeaderMap::new();
    for (name, value) in from {
        if name.as_str().starts_with("grpc-") {
            to.append(name.clone(), if secrets.within(value) { REDACTED } else { value.clone() });
        }
    }
    to
}

/// What was put into a request and may not come back in the headers of its answer.
#[derive(Clone, Default)]
pub(super) struct Secrets(Vec<HeaderValue>);

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Secrets({})", self.0.len())
    }
}

impl Secrets {
    /// Remembers a value, and the part behind its scheme (`Bearer `, `Basic `, `token `).
    pub(super) fn add(&mut self, value: &HeaderValue) {
        let mut keep = |bytes: &[u8]| {
            if bytes.len() >= SHORTEST_SECRET
                && let Ok(mut part) = HeaderValue::from_bytes(bytes)
            {
                part.set_sensitive(true);
                self.0.push(part);
            }
        };
        keep(value.as_bytes());
        if let Some(space) = value.as_bytes().iter().position(|b| *b == b' ') {
            keep(value.as_bytes()[space + 1..].trim_ascii());
        }
    }

    fn within(&self, value: &HeaderValue) -> bool {
        let hay = value.as_bytes();
        self.0.iter().any(|needle| {
            let needle = needle.as_bytes();
            hay.len() >= needle.len() && hay.windows(needle.len()).any(|w| w == needle)
        })
    }
}

/// Joins the parts that HTTP/2 may cut a cookie into: HTTP/1 knows one header of that name.
pub(super) fn join_cookies(headers: &mut HeaderMap) {
    let mut parts = headers.get_all(header::COOKIE).iter();
    if parts.next().is_none() || parts.next().is_none() {
        return;
    }
    let all: Vec<_> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if let Ok(one) = HeaderValue::from_bytes(&all.join(&b"; "[..])) {
        headers.insert(header::COOKIE, one);
    }
}

#[cfg(test)]
mod tests;
