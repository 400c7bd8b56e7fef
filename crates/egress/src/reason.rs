//! Why something was let through or refused: one word per cause, the same in audit lines, denials,
//! metrics and documents.
//!
//! Invariant: the words are public interface; they are added to, never renamed.

use serde::{Deserialize, Serialize};

/// What happened to a flow, a query or a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It was let through.
    Allow,
    /// It was refused; no byte of it left.
    Deny,
    /// It was let through, and was cut later.
    Cut,
    /// It was allowed and failed: the destination, its name or its certificate.
    Error,
}

/// Why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The mode is allow-all.
    AllowAll,
    /// The mode is deny-all, or the policy lists nothing.
    DenyAll,
    /// The name is listed.
    DomainListed,
    /// The name is not listed.
    DomainNotListed,
    /// The address is in `subnets.allow`.
    SubnetAllowed,
    /// The address is in `subnets.deny`.
    SubnetDenied,
    /// The address is not listed, and the flow names no host.
    AddressNotListed,
    /// The address is denied above all policies: private, link-local, metadata, the host itself.
    AddressForbidden,
    /// Every address of the name is denied.
    NameResolvesForbidden,
    /// The name is no valid host name.
    NameInvalid,
    /// Only a catch-all entry lets through what names no host.
    CatchAll,
    /// TLS without a server name.
    NoServerName,
    /// The first bytes are no protocol that names its host.
    NotTls,
    /// The TLS hello is malformed, too long, or from an old version.
    HelloInvalid,
    /// The first bytes did not come in time.
    HelloTimeout,
    /// Plain HTTP, which no domain rule covers.
    PlainHttp,
    /// The server name is hidden (ECH) from a rule that needs it.
    EncryptedHello,
    /// The client did not accept the sandbox's CA.
    TlsClientRejectedCa,
    /// Kind of datagram or query that is never let through.
    Protocol,
    /// The DNS query type is not answered.
    QueryType,
    /// Too many flows, queries or bytes at once.
    Limit,
    /// `Host` or `:authority` is not the server name.
    AuthorityMismatch,
    /// The HTTP message is malformed or ambiguous.
    HttpInvalid,
    /// A method or upgrade that would leave the broker's sight.
    MethodForbidden,
    /// The path is ambiguous for a rule that looks at paths.
    PathAmbiguous,
    /// Headers too long, too many, or too slow.
    HeadersTooLarge,
    /// A rule set headers.
    RuleTransform,
    /// A rule signed the request.
    RuleSign,
    /// A rule sent it to a proxy.
    RuleForward,
    /// A rule answered it.
    RuleResponse,
    /// The domain has rules, and none matched.
    NoRuleMatched,
    /// The rule's secret cannot be had now.
    CredentialUnavailable,
    /// The rule has expired.
    CredentialExpired,
    /// A placeholder stands where no rule expects it.
    PlaceholderMisplaced,
    /// The policy changed.
    PolicyChanged,
    /// The name does not resolve.
    ResolveFailed,
    /// The destination does not answer or refuses.
    UpstreamUnreachable,
    /// The destination's certificate is not good for the name.
    UpstreamTls,
    /// The destination broke the protocol.
    UpstreamProtocol,
    /// Either side closed: an ordinary end.
    Closed,
}

impl Reason {
    /// The word itself.
    #[must_use]
    pub fn as_str(self) -> String {
        // The word is serde's: one list of them.
        serde_json::to_value(self)
            .ok()
            .and_then(|v| v.as_str().map(str::to_owned))
            .unwrap_or_default()
    }
}
