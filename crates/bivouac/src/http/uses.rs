//! What is taken down of a request: the operation, its object and how it came out.
//!
//! Invariant: of a request only its method, the pattern of its path, the path's own segments, its id and the
//! caller's address are ever read here; no query, header value or body. Refusals of unknown tokens are written only
//! so often, so that nobody without a token can push the uses of others out of the file. Called by `auth`.

use std::sync::{Mutex, PoisonError};

use axum::extract::{MatchedPath, Request};
use axum::http::StatusCode;
use bivouac_engine::{Checked, Clock as _, Engine, Principal, SystemClock, Use};

use crate::preview::Peer;

/// How many refusals are written in a minute.
const REFUSALS: u32 = 60;
const MINUTE_MS: i64 = 60_000;

/// A request, as far as it is taken down.
#[derive(Debug)]
pub(crate) struct Asked {
    what: String,
    object: Option<String>,
    address: Option<String>,
}

impl Asked {
    pub(crate) fn of(request: &Request) -> Self {
        let path = request.uri().path();
        let pattern = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
        let peer = request.extensions().get::<Peer>();
        Self {
            what: format!("{} {}", request.method(), pattern.unwrap_or("(no such path)")),
            object: pattern.and_then(|pattern| object(pattern, path)),
            address: peer.map(|peer| peer.address.ip().to_string()),
        }
    }

    /// Its line.
    pub(crate) fn used(self, who: &Principal, checked: Checked, status: StatusCode) -> Use {
        let mut one = Use::new(who, "http", self.what).outcome(status.as_u16());
        one.object = self.object;
        one.address = self.address;
        one.verb = checked.verb;
        one.namespace = checked.namespace;
        one
    }
}

/// The segments that the pattern leaves open.
fn object(pattern: &str, path: &str) -> Option<String> {
    let open = pattern.split('/').zip(path.split('/')).filter(|(of, _)| of.starts_with('{'));
    let found: Vec<&str> = open.map(|(_, segment)| segment).collect();
    (!found.is_empty()).then(|| found.join("/"))
}

/// How many refusals were written of late.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<Window>);

#[derive(Debug, Default)]
struct Window {
    since: i64,
    written: u32,
    left_out: u64,
}

impl Refusals {
    /// Takes down that somebody was not let in.
    pub(crate) fn note(&self, engine: &Engine, asked: Asked, status: StatusCode) {
        let now = SystemClock.now();
        let Some(left_out) = self.admit(now) else { return };
        let mut one = Use::of_nobody("http", asked.what).outcome(status.as_u16());
        one.address = asked.address;
        if left_out > 0 {
            one.object = Some(format!("and {left_out} more before it"));
        }
        engine.audit(one);
    }

    /// How many were left out before this one; `None`: this one is, too.
    fn admit(&self, now: i64) -> Option<u64> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_sub(window.since) >= MINUTE_MS {
            window.since = now;
            window.written = 0;
        }
        if window.written >= REFUSALS {
            window.left_out += 1;
            return None;
        }
        window.written += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_is_what_the_pattern_leaves_open() {
        let of = |pattern, path| object(pattern, path).unwrap_or_default();
        assert_eq!(of("/api/v2/sandboxes/{name}", "/api/v2/sandboxes/box"), "box");
        assert_eq!(of("/a/{id}/cmd/{cmd}/logs", "/a/sbx_1/cmd/cmd_2/logs"), "sbx_1/cmd_2");
        assert_eq!(of("/api/v2/sandboxes", "/api/v2/sandboxes"), "");
    }

    #[test]
    fn a_flood_of_refusals_is_counted() {
        let refusals = Refusals::default();
        let written = (0..1000).filter(|_| refusals.admit(70_000).is_some()).count();
        assert_eq!(written, REFUSALS as usize);
        assert_eq!(refusals.admit(70_000 + MINUTE_MS), Some(1000 - u64::from(REFUSALS)));
        assert_eq!(refusals.admit(70_001 + MINUTE_MS), Some(0));
    }
}
