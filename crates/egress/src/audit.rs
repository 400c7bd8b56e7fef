//! One JSON line per decision and per end of a flow.
//!
//! Invariant: a line holds no header value, no query value, no body and no secret. Lines go to an
//! [`Sink`], which is bounded; denials have a reserve of their own, and what was dropped is counted and
//! itself written down.

use bivouac_types::id::SessionId;
use serde::{Deserialize, Serialize};

use crate::reason::{Reason, Verdict};

/// What a line is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A DNS query.
    Dns,
    /// A TCP connection: one line when it is decided, one when it ends (`bytes_*`, `duration_ms`).
    Connect,
    /// The end of a TCP connection or datagram flow.
    End,
    /// A request that the broker saw.
    Http,
    /// A datagram flow.
    Udp,
    /// The policy was replaced.
    Policy,
    /// Lines were dropped.
    Dropped,
}

/// A line. Absent fields do not apply.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// When, ms since the epoch.
    pub at: u64,
    /// The session.
    pub session: SessionId,
    /// What the line is about.
    pub kind: Kind,
    /// Number of the flow in this session; the same in all its lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flow: Option<u64>,
    /// Generation of the policy that decided.
    pub generation: u64,
    /// What happened.
    pub verdict: Verdict,
    /// Why.
    pub reason: Reason,
    /// Host name, canonical.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Where the name comes from: `sni`, `host`, `dns`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_from: Option<String>,
    /// Address that the guest asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// Address that was dialled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dialled: Option<String>,
    /// `tls`, `http`, `postgres`, `raw`, `udp`, the query type of DNS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// Whether the broker decrypts it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub intercepted: bool,
    /// Entry of the policy that decided, as the user wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<String>,
    /// Number of the rule in that entry, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<usize>,
    /// Name of the credential that was used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<String>,
    /// Method of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Canonical path of a request, without the query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Status that the guest saw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Bytes from the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_up: Option<u64>,
    /// Bytes to the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_down: Option<u64>,
    /// How long, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    /// Lines that were dropped before this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped: Option<u64>,
    /// What went wrong, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Line {
    /// A line in which only what every line has is filled.
    #[must_use]
    pub fn new(session: SessionId, kind: Kind, verdict: Verdict, reason: Reason) -> Self {
        Self {
            at: 0,
            session,
            kind,
            flow: None,
            generation: 0,
            verdict,
            reason,
            host: None,
            host_from: None,
            asked: None,
            dialled: None,
            protocol: None,
            intercepted: false,
            entry: None,
            rule: None,
            credential: None,
            method: None,
            path: None,
            status: None,
            bytes_up: None,
            bytes_down: None,
            duration_ms: None,
            dropped: None,
            error: None,
        }
    }
}

/// Where lines are kept. The shim's is a pair of files beside the command logs.
pub trait Sink {
    /// Appends one line, with its line end. Never waits for long, never fails: what cannot be kept is
    /// counted by the sink.
    fn append(&self, line: &[u8]);
}
