//! What a guest is told when its request does not leave, or comes to nothing.
//!
//! Invariant: each such answer names its reason in the header `x-bivouac-deny` and says in its body what
//! is wrong and what can be done, and holds nothing secret. Called by everything in [`super`].

use http::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use serde_json::json;

use super::body::Body;
use super::scan::Fault;
use crate::reason::{Reason, Verdict};

/// The header that names the reason.
pub(super) const DENY: HeaderName = HeaderName::from_static("x-bivouac-deny");

/// Why a request is answered here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) reason: Reason,
    pub(super) message: String,
    pub(super) hint: Option<String>,
    /// Whether the connection is of no use any more.
    pub(super) close: bool,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, reason: Reason, message: impl Into<String>) -> Self {
        Self { status, reason, message: message.into(), hint: None, close: false }
    }

    /// A malformed or ambiguous message: nothing more is read from the connection.
    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Reason::HttpInvalid, message).closing()
    }

    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(super) fn closing(mut self) -> Self {
        self.close = true;
        self
    }

    /// Whether the policy refused, or something that was allowed failed.
    pub(super) fn verdict(&self) -> Verdict {
        match self.reason {
            Reason::ResolveFailed
            | Reason::UpstreamUnreachable
            | Reason::UpstreamTls
            | Reason::UpstreamProtocol
            | Reason::Closed => Verdict::Error,
            Reason::PolicyChanged => Verdict::Cut,
            _ => Verdict::Deny,
        }
    }

    fn code(&self) -> &'static str {
        match self.verdict() {
            Verdict::Error => "egress_failed",
            _ => "egress_denied",
        }
    }

    fn text(&self) -> Vec<u8> {
        let mut error = json!({
            "code": self.code(),
            "reason": self.reason.as_str(),
            "message": self.message,
        });
        if let Some(hint) = &self.hint {
            error["hint"] = json!(hint);
        }
        let mut text = json!({ "error": error }).to_string().into_bytes();
        text.push(b'\n');
        text
    }

    /// The answer. `http1` says whether the connection is closed by a header.
    pub(super) fn answer(&self, http1: bool) -> Response<Body> {
        let mut response = Response::new(Body::full(self.text().into()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Ok(reason) = HeaderValue::from_str(&self.reason.as_str()) {
            headers.insert(DENY, reason);
        }
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("5"));
        }
        if self.close && http1 {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// The same as bytes, for a connection whose parser has ended.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let text = self.text();
        let mut out = format!(
            "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\ncache-control: no-store\r\n{}: {}\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n",
            self.status.as_u16(),
            self.status.canonical_reason().unwrap_or("Error"),
            DENY,
            self.reason.as_str(),
            text.len(),
        )
        .into_bytes();
        out.extend_from_slice(&text);
        out
    }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
        let status = StatusCode::from_u16(fault.status).unwrap_or(StatusCode::BAD_REQUEST);
        Self::new(status, fault.reason, fault.message).closing()
    }
}
