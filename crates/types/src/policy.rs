//! The egress policy as clients send it and as they read it back. Wire format:
//! reference/vercel-api.md §2.10. Meaning: reference/egress.md §1.
//!
//! Owns: the stored form ([`NetworkPolicy`]), its strict parser ([`NetworkPolicy::parse`]) and the
//! form that clients read ([`NetworkPolicy::read_back`]).
//!
//! Invariant: a policy holds no header value. The parser takes each value out of the request and puts
//! the id of a vault entry in its place; whoever parses hands the values ([`Draft::values`]) to the
//! vault. A stored policy is therefore safe to log, to show and to copy.
//!
//! Called by `http` (parse, read back), by `store` (as JSON), by `engine` and by the egress broker.

mod host;
mod keep;
mod parse;
mod read_back;
mod show;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::id::ValueId;
use crate::secret::Secret;

pub use host::{Cidr, HostPattern};
pub use keep::is_redacted;
pub use show::REDACTED;

/// Most entries of `allow`.
pub const MAX_DOMAINS: usize = 1000;
/// Most entries of each list of ranges.
pub const MAX_CIDRS: usize = 1000;
/// Most rules of one domain.
pub const MAX_RULES: usize = 100;
/// Most entries of one list or map inside a rule.
pub const MAX_RULE_ENTRIES: usize = 100;
/// Longest regular expression, bytes.
pub const MAX_REGEX: usize = 1024;
/// Longest text of any other matcher, header value or URL, bytes.
pub const MAX_TEXT: usize = 8192;
/// Longest body of a `response` rule, bytes.
pub const MAX_RESPONSE_BODY: usize = 65_536;

/// A sandbox's egress policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(tag = "mode", rename_all = "kebab-case")]
pub enum NetworkPolicy {
    /// Everything that is not denied above all policies.
    #[default]
    AllowAll,
    /// Nothing, DNS included.
    DenyAll,
    /// What it lists. An empty one is `DenyAll` under another name.
    Custom(CustomPolicy),
}

/// A list of what may be reached, and how requests to it are handled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct CustomPolicy {
    /// Names that may be reached. No name is in it twice.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub domains: Vec<Domain>,
    /// Ranges that may be reached whatever the name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow_cidrs: Vec<Cidr>,
    /// Ranges that may not be reached; they beat everything else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deny_cidrs: Vec<Cidr>,
    /// Judge plain HTTP on port 80 by its `Host`: an addition of ours, off by default. Nothing is ever
    /// injected there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub plain_http: bool,
    /// Answer every DNS query, not only those for listed names: what the original does for a policy
    /// that has only `subnets.allow`. Off by default, because it is a way out for data.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub open_dns: bool,
}

/// A policy that was just read, and the header values that were in it.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// The policy, in which each value is an id.
    pub policy: NetworkPolicy,
    /// Values by that id, as the client sent them: they may name secrets of the vault as
    /// `${secret:NAME}`.
    pub values: BTreeMap<ValueId, Secret>,
}

/// A name that may be reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Domain {
    /// The name or wildcard.
    pub host: HostPattern,
    /// On this port alone. Absent: on any port, and credentials on 443 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Tried in order; the first that matches acts. None: requests pass unseen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
}

impl Domain {
    /// The entry as it stands in a policy: `HOST` or `HOST:PORT`.
    #[must_use]
    pub fn entry(&self) -> String {
        match self.port {
            Some(port) => format!("{}:{port}", self.host),
            None => self.host.to_string(),
        }
    }
}

/// What happens to requests of a domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Which requests; absent is all.
    #[serde(default, rename = "match", skip_serializing_if = "Option::is_none")]
    pub matcher: Option<Match>,
    /// What is done to them.
    pub action: Action,
    /// Name of the credential that made this rule, for audit lines. An addition of ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<String>,
    /// Whose credential session this is; a fork by somebody else drops the rule. An addition of ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actor: Option<String>,
    /// From when on the rule acts no more, ms since the epoch. An addition of ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<u64>,
}

impl Rule {
    /// A rule that has no end and is nobody's.
    #[must_use]
    pub fn new(matcher: Option<Match>, action: Action) -> Self {
        Self { matcher, action, credential: None, actor: None, expires_at: None }
    }
}

/// A request header that a rule sets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderSet {
    /// As sent by the client.
    pub name: String,
    /// The value's entry in the vault.
    pub value: ValueId,
    /// Secrets that the value names, for whoever reads the policy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
}

/// How requests are signed again with AWS credentials (Signature Version 4).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AwsSign {
    /// The vault's entry: JSON with `accessKeyId`, `secretAccessKey` and perhaps `sessionToken`.
    pub value: ValueId,
    /// Secrets that the value names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<String>,
    /// Absent: taken from the host name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// Absent: taken from the host name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<String>,
}

/// What a rule does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Action {
    /// Sets request headers on the way out. Ids of values only: see the module's invariant.
    Transform {
        /// In the order in which they act, none twice (case aside): the last value of a name counts.
        headers: Vec<HeaderSet>,
    },
    /// Signs the request again. An addition of ours.
    Sign(AwsSign),
    /// Sends the request to the user's own proxy.
    Forward {
        /// An `https` URL without query and fragment.
        url: String,
    },
    /// Answers without asking the destination.
    Respond(Response),
}

/// A ready answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Response {
    /// 200 to 599.
    pub status_code: u16,
    /// Response headers; never the ones that frame the message.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    pub headers: std::collections::BTreeMap<String, String>,
    /// Body; only together with `content_type`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// Type of the body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
}

/// Which requests a rule is for: every given dimension has to agree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase")]
pub struct Match {
    /// The path, case-sensitive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<TextMatch>,
    /// One of these methods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub method: Vec<String>,
    /// All of these, each met by some entry of the query.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub query_string: Vec<EntryMatch>,
    /// All of these, each met by some header.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<EntryMatch>,
}

/// A test of one name-and-value pair; both halves have to agree on the same pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct EntryMatch {
    /// The name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<TextMatch>,
    /// The value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<TextMatch>,
}

/// A test of one text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TextMatch {
    /// The same text.
    Exact(String),
    /// Begins with it.
    StartsWith(String),
    /// Matches this expression somewhere.
    Regex(String),
}
