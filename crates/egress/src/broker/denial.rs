//! Denials that teach: what a guest reads when a request is refused.
//!
//! Invariant: says why and what would allow it, and nothing that the guest did not already know; text
//! from the guest is escaped by JSON and never becomes a header. Called by the broker for plain HTTP
//! and by [`crate::intercept`].

use serde::Serialize;

use crate::reason::Reason;

/// The header that names the reason.
pub const HEADER: &str = "x-bivouac-deny";

/// A denial.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Denial {
    /// Host that was asked for: a name, or an address.
    pub host: Option<String>,
    /// Port that was asked for.
    pub port: Option<u16>,
    /// Entry of the policy that decided.
    pub entry: Option<String>,
    /// What would allow it, as arguments of the command line.
    pub hint: Option<String>,
    /// More about this one, as a sentence.
    pub detail: Option<String>,
}

#[derive(Serialize)]
struct Body<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    code: &'static str,
    reason: Reason,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    entry: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'a str>,
}

/// What each reason means, and what to do.
#[must_use]
pub fn explain(reason: Reason) -> &'static str {
    match reason {
        Reason::DenyAll => "the policy of this sandbox lets nothing out",
        Reason::DomainNotListed => "the name is not in the policy of this sandbox",
        Reason::SubnetDenied => "the policy of this sandbox denies the address",
        Reason::AddressNotListed => "the address is not in the policy of this sandbox",
        Reason::AddressForbidden => {
            "the address is private, or belongs to the host or to its metadata service: no policy allows it"
        }
        Reason::NameResolvesForbidden => "every address of the name is denied",
        Reason::NameInvalid => "the name is no valid host name",
        Reason::NoServerName => "the TLS hello names no server",
        Reason::NotTls => {
            "the connection names no host: only TLS with a server name can be allowed by name"
        }
        Reason::HelloInvalid => "the TLS hello is malformed, too long or too old",
        Reason::HelloTimeout => "nothing that names a host was sent in time",
        Reason::PlainHttp => {
            "plain HTTP cannot be allowed by name: use https, or allow the address, or let the policy judge plain HTTP"
        }
        Reason::EncryptedHello => "the server name is hidden",
        Reason::Limit => "this sandbox has too many connections or queries at once",
        Reason::CredentialUnavailable => "the credential of the matching rule cannot be had now",
        Reason::CredentialExpired => "the credential of the matching rule has expired",
        Reason::PolicyChanged => "the policy changed",
        Reason::ResolveFailed => "the name does not resolve",
        Reason::UpstreamUnreachable => "the destination does not answer",
        Reason::UpstreamTls => "the destination's certificate is not good for the name",
        _ => "the request was refused by the egress policy of this sandbox",
    }
}

/// The JSON body of a denial.
#[must_use]
pub fn body(reason: Reason, denial: &Denial) -> Vec<u8> {
    let what = match (&denial.host, denial.port) {
        (Some(host), Some(port)) if host.contains(':') => format!("[{host}]:{port}: "),
        (Some(host), Some(port)) => format!("{host}:{port}: "),
        (Some(host), None) => format!("{host}: "),
        _ => String::new(),
    };
    let mut message = format!("{what}{}", explain(reason));
    if let Some(detail) = &denial.detail {
        message.push_str(" (");
        message.push_str(detail);
        message.push(')');
    }
    if let Some(hint) = &denial.hint {
        message.push_str("; to allow it, outside of the sandbox: ");
        message.push_str(hint);
    }
    let body = Body {
        error: Inner {
            code: "egress_denied",
            reason,
            message,
            host: denial.host.as_deref(),
            port: denial.port,
            entry: denial.entry.as_deref(),
            hint: denial.hint.as_deref(),
        },
    };
    // A structure of texts and numbers always serialises.
    let mut bytes = serde_json::to_vec_pretty(&body).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

/// A whole HTTP/1.1 answer that ends the connection.
#[must_use]
pub fn response(reason: Reason, denial: &Denial) -> Vec<u8> {
    let body = body(reason, denial);
    let mut out = format!(
        "HTTP/1.1 403 Forbidden\r\n{HEADER}: {}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n",
        reason.as_str(),
        body.len(),
    )
    .into_bytes();
    out.extend(body);
    out
}

/// The fatal TLS alert `access_denied`, as a record.
pub const ACCESS_DENIED: [u8; 7] = [0x15, 3, 3, 0, 2, 2, 49];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denial_says_why_and_what_next_and_cannot_be_split() {
        let denial = Denial {
            host: Some("x\r\ny: z\"".to_owned()),
            port: Some(80),
            hint: Some("bivouac policy allow NAME x".to_owned()),
            ..Denial::default()
        };
        let bytes = response(Reason::DomainNotListed, &denial);
        let text = String::from_utf8(bytes).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains("x-bivouac-deny: domain_not_listed"));
        assert!(!head.contains("y: z"));
        let json: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(json["error"]["reason"], "domain_not_listed");
        assert_eq!(json["error"]["host"], "x\r\ny: z\"");
        assert!(json["error"]["message"].as_str().unwrap().contains("bivouac policy allow"));
        assert!(head.contains(&format!("content-length: {}", body.len())));
    }
}
