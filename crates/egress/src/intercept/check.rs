//! Whether a parsed request is one that can be judged at all.
//!
//! Invariant: after [`request`] the request is for the host and port that the connection is for, its
//! method and path mean one thing, and it asks for no protocol but WebSocket. Pure; called by
//! [`super::pipeline`] before the policy is asked. Cases 31 to 35, 45, 50, 55 to 57 of
//! reference/egress.md §2.

use http::header::{self, HeaderMap};
use http::request::Parts;
use http::{Method, StatusCode, Version};

use super::refuse::Refusal;
use crate::canonical::{self, Host, Name};
use crate::policy::Site;
use crate::reason::Reason;

/// What the connection that a request came over says about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scheme {
    /// TLS that was ended here.
    Https,
    /// Plain HTTP.
    Http,
}

impl Scheme {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Https => "https",
            Self::Http => "http",
        }
    }

    pub(super) fn default_port(self) -> u16 {
        match self {
            Self::Https => 443,
            Self::Http => 80,
        }
    }
}

/// What the request asks of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wants {
    /// An answer.
    Answer,
    /// To go on as a WebSocket.
    WebSocket,
}

/// Checks everything but the path, and that the request is for this name; for plain HTTP, where the
/// connection has no name, answers the request's own.
pub(super) fn request(
    parts: &Parts,
    scheme: Scheme,
    name: Option<&Name>,
    port: u16,
) -> Result<(Wants, Name), Refusal> {
    method(parts)?;
    let http2 = parts.version == Version::HTTP_2;
    if http2 {
        if parts.uri.scheme_str() != Some(scheme.as_str()) {
            return Err(Refusal::invalid("':scheme' is not the scheme of the connection"));
        }
        if parts.extensions.get::<hyper::ext::Protocol>().is_some() {
            return Err(forbidden(
                "extended CONNECT is not possible through the sandbox's firewall",
            ));
        }
    } else if parts.uri.scheme().is_some_and(|s| s.as_str() != scheme.as_str()) {
        return Err(mismatch("the target's scheme is not that of the connection"));
    }
    if parts.version == Version::HTTP_09 || parts.version == Version::HTTP_3 {
        return Err(Refusal::invalid("the version is neither HTTP/1.1 nor HTTP/2"));
    }
    let asked = authority(parts, http2, port)?;
    if let Some(name) = name
        && *name != asked
    {
        let text = format!("the request is for {asked}, but its connection is for {name}");
        return Err(mismatch(&text));
    }
    expectation(&parts.headers)?;
    let wants = upgrade(parts, scheme)?;
    Ok((wants, asked))
}

fn method(parts: &Parts) -> Result<(), Refusal> {
    match &parts.method {
        &Method::CONNECT => {
            Err(forbidden("CONNECT is not possible through the sandbox's firewall").closing())
        }
        // Some servers answer with the request itself: with the credential in it.
        m if *m == Method::TRACE || m.as_str().eq_ignore_ascii_case("TRACK") => {
            Err(forbidden("TRACE would send the request's own headers back"))
        }
        _ => Ok(()),
    }
}

/// The one name that all places of the request agree on.
fn authority(parts: &Parts, http2: bool, port: u16) -> Result<Name, Refusal> {
    let mut found: Option<Name> = None;
    let mut agree = |bytes: &[u8], place: &str| -> Result<(), Refusal> {
        let (host, given) =
            canonical::authority(bytes).map_err(|e| mismatch(&format!("{place} {e}")))?;
        let Host::Name(name) = host else {
            return Err(mismatch(&format!("{place} is an address, not a name")));
        };
        // A port that is left out is the scheme's; many clients leave out others as well.
        if given.is_some_and(|p| p != port) {
            let text = format!("{place} names another port than the connection's, {port}");
            return Err(mismatch(&text));
        }
        match &found {
            Some(other) if *other != name => {
                Err(mismatch("the target and Host name different hosts"))
            }
            _ => {
                found = Some(name);
                Ok(())
            }
        }
    };
    let mut hosts = parts.headers.get_all(header::HOST).iter();
    let first = hosts.next();
    if hosts.next().is_some() {
        return Err(Refusal::invalid("there are two Host headers"));
    }
    if first.is_none() && !http2 {
        return Err(Refusal::invalid("there is no Host header"));
    }
    if let Some(host) = first {
        agree(host.as_bytes(), "Host")?;
    }
    if let Some(authority) = parts.uri.authority() {
        agree(authority.as_str().as_bytes(), "the target's authority")?;
    }
    found.ok_or_else(|| Refusal::invalid("the request names no host"))
}

fn expectation(headers: &HeaderMap) -> Result<(), Refusal> {
    let good = headers
        .get_all(header::EXPECT)
        .iter()
        .all(|v| v.as_bytes().eq_ignore_ascii_case(b"100-continue"));
    if good {
        return Ok(());
    }
    let what = "the only expectation that can be met is '100-continue'";
    Err(Refusal::new(StatusCode::EXPECTATION_FAILED, Reason::HttpInvalid, what).closing())
}

fn upgrade(parts: &Parts, scheme: Scheme) -> Result<Wants, Refusal> {
    let headers = &parts.headers;
    let mut asked = headers.get_all(header::UPGRADE).iter();
    let Some(first) = asked.next() else { return Ok(Wants::Answer) };
    let websocket = first.as_bytes().eq_ignore_ascii_case(b"websocket") && asked.next().is_none();
    if !websocket {
        // An offer that may be ignored; Java's client makes it with every plain request.
        let offer = first.as_bytes().eq_ignore_ascii_case(b"h2c");
        if offer && scheme == Scheme::Http && parts.version == Version::HTTP_11 {
            return Ok(Wants::Answer);
        }
        let what = "the only upgrade that the sandbox's firewall lets through is 'websocket'";
        return Err(forbidden(what).closing());
    }
    let listed = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .any(|w| w.trim().eq_ignore_ascii_case("upgrade"));
    let mut keys = headers.get_all(header::SEC_WEBSOCKET_KEY).iter();
    let one_key = keys.next().is_some() && keys.next().is_none();
    let version = headers.get(header::SEC_WEBSOCKET_VERSION).map(|v| v.as_bytes());
    let good = listed
        && one_key
        && version == Some(b"13")
        && parts.method == Method::GET
        && parts.version == Version::HTTP_11;
    if good {
        Ok(Wants::WebSocket)
    } else {
        Err(Refusal::invalid("this is no complete WebSocket handshake of version 13"))
    }
}

/// Reads the path as the site's rules have to see it.
pub(super) fn path(raw: &str, site: Option<&Site>) -> Result<String, Refusal> {
    let read = match site {
        Some(site) => site.path(raw),
        None => canonical::path(raw, false),
    };
    read.map_err(|e| {
        Refusal::new(StatusCode::BAD_REQUEST, Reason::PathAmbiguous, e.to_string())
            .hint("send the path in its plain form, without dot segments and encoded slashes")
    })
}

fn forbidden(what: &str) -> Refusal {
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, Reason::MethodForbidden, what)
}

fn mismatch(what: &str) -> Refusal {
    Refusal::new(StatusCode::MISDIRECTED_REQUEST, Reason::AuthorityMismatch, what)
        .hint("open a connection of its own for each host, with the host's name in TLS and in Host")
}
