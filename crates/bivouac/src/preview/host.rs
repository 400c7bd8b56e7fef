//! Which name a request is for.
//!
//! Invariant: a name is made canonical here, once (small letters, no trailing dot, no port); two names in one
//! request that differ are refused, because whoever looks at the other one would decide otherwise. Called by
//! `preview`.

use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderValue, header};

use super::Peer;

/// What a request is for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Aim {
    /// No route.
    Api,
    /// A route.
    Route(Aimed),
    /// Cannot be told.
    Bad(&'static str),
}

/// A route as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Aimed {
    /// What stands before the domain. Not checked: more than one label leads nowhere.
    pub(super) label: String,
    /// The whole name, canonical.
    pub(super) name: String,
    /// With its port, as it was asked for.
    pub(super) port: Option<u16>,
    /// Below `--preview-domain`, not `localhost`.
    pub(super) public_domain: bool,
}

impl Aimed {
    /// Name and port, for a URL.
    pub(super) fn authority(&self) -> String {
        match self.port {
            Some(port) => format!("{}:{port}", self.name),
            None => self.name.clone(),
        }
    }

    /// Whether the browser speaks TLS: with us, or with the operator's proxy before us, which is how the domain
    /// is reached over a plain connection.
    pub(super) fn secure(&self, parts: &Parts) -> bool {
        self.public_domain || parts.extensions.get::<Peer>().is_some_and(|peer| peer.tls)
    }
}

/// A name out of `HOST` or `HOST:PORT`.
#[derive(Debug, PartialEq, Eq)]
struct Named {
    name: String,
    port: Option<u16>,
}

fn named(text: &str) -> Option<Named> {
    if text.contains(['@', '/', '\\', ' ', '\t', '#', '?']) {
        return None;
    }
    let (name, port) = if text.starts_with('[') {
        let end = text.find(']')?;
        (&text[..=end], text[end + 1..].strip_prefix(':'))
    } else {
        match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, None),
        }
    };
    let port = match port {
        None | Some("") => None,
        Some(port) if port.bytes().all(|b| b.is_ascii_digit()) => Some(port.parse().ok()?),
        Some(_) => return None,
    };
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    Some(Named { name, port })
}

/// Finds out what a request is for; `domain` is that of `--preview-domain`.
pub(super) fn aim(request: &Request, domain: Option<&str>) -> Aim {
    const UNCLEAR: Aim = Aim::Bad("The request does not say clearly which host it is for.");
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let (host, second) = (hosts.next(), hosts.next());
    if second.is_some() {
        return Aim::Bad("The request has more than one Host header.");
    }
    let host = match host.map(HeaderValue::to_str) {
        Some(Ok(text)) => match named(text) {
            Some(named) => Some(named),
            None => return UNCLEAR,
        },
        Some(Err(_)) => return UNCLEAR,
        None => None,
    };
    // HTTP/2's `:authority`, or the absolute form.
    let target = match request.uri().authority() {
        Some(authority) => match named(authority.as_str()) {
            Some(named) => Some(named),
            None => return UNCLEAR,
        },
        None => None,
    };
    let found = match (target, host) {
        (Some(target), Some(host)) if target.name != host.name => {
            return Aim::Bad("The request names two hosts.");
        }
        (Some(target), _) => target,
        (None, Some(host)) => host,
        (None, None) => return Aim::Api,
    };
    let below =
        |suffix: &str| found.name.strip_suffix(suffix)?.strip_suffix('.').map(str::to_owned);
    let (label, public_domain) = match (below("localhost"), domain.and_then(below)) {
        (_, Some(label)) => (label, true),
        (Some(label), None) => (label, false),
        (None, None) => return Aim::Api,
    };
    Aim::Route(Aimed { label, name: found.name, port: found.port, public_domain })
}

/// The label in an `Origin`, if that is a route's of the same engine.
pub(super) fn label_of_origin(origin: &str, domain: Option<&str>) -> Option<String> {
    let (scheme, rest) = origin.split_once("://")?;
    if scheme != "http" && scheme != "https" {
        return None;
    }
    let name = named(rest)?.name;
    let below = |suffix: &str| name.strip_suffix(suffix)?.strip_suffix('.').map(str::to_owned);
    domain.and_then(below).or_else(|| below("localhost"))
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn of(target: &str, hosts: &[&str]) -> Aim {
        let mut request = Request::builder().uri(target);
        for host in hosts {
            request = request.header(header::HOST, *host);
        }
        aim(&request.body(Body::empty()).unwrap(), Some("boxes.example"))
    }

    fn label(target: &str, hosts: &[&str]) -> Option<(String, bool)> {
        match of(target, hosts) {
            Aim::Route(aimed) => Some((aimed.label, aimed.public_domain)),
            Aim::Api => None,
            Aim::Bad(why) => panic!("{why}"),
        }
    }

    #[test]
    fn names_of_routes_in_every_form() {
        for host in [
            "sb-a.localhost",
            "sb-a.localhost:7070",
            "SB-A.LocalHost.",
            "sb-a.localhost.:80",
            "sb-a.localhost:",
        ] {
            assert_eq!(label("/x", &[host]), Some(("sb-a".to_owned(), false)), "{host}");
        }
        assert_eq!(label("/x", &["3--sb-a.Boxes.Example"]), Some(("3--sb-a".to_owned(), true)));
        assert_eq!(label("http://sb-a.localhost/x", &[]), Some(("sb-a".to_owned(), false)));
        let both = label("http://sb-a.localhost/x", &["SB-A.localhost:80"]);
        assert_eq!(both, Some(("sb-a".to_owned(), false)));
        // Two labels lead nowhere, and not to the API either.
        assert_eq!(label("/", &["a.b.localhost"]), Some(("a.b".to_owned(), false)));
        assert_eq!(label("/", &[".localhost"]), Some((String::new(), false)));
    }

    #[test]
    fn all_other_names_are_the_api_s() {
        for host in [
            "localhost",
            "localhost:7070",
            "127.0.0.1:7070",
            "[::1]:7070",
            "[::1]",
            "boxes.example",
            "xboxes.example",
            "notlocalhost",
            "localhost.example",
        ] {
            assert_eq!(label("/x", &[host]), None, "{host}");
        }
        assert_eq!(of("/", &[]), Aim::Api);
    }

    #[test]
    fn what_is_not_clear_is_refused() {
        for (target, hosts) in [
            ("/", &["a.localhost", "b.localhost"][..]),
            ("/", &["127.0.0.1", "b.localhost"]),
            ("http://127.0.0.1/", &["b.localhost"]),
            ("http://b.localhost/", &["127.0.0.1:7070"]),
            ("/", &["a.localhost:x"]),
            ("/", &["user@a.localhost"]),
            ("/", &["a.localhost/x"]),
            ("/", &["[::1"]),
            ("/", &["a.localhost:70000"]),
        ] {
            assert!(matches!(of(target, hosts), Aim::Bad(_)), "{target} {hosts:?}");
        }
    }

    #[test]
    fn origins() {
        let of = |text: &str| label_of_origin(text, Some("boxes.example"));
        assert_eq!(of("http://sb-a.localhost:7070").as_deref(), Some("sb-a"));
        assert_eq!(of("https://sb-a.boxes.example").as_deref(), Some("sb-a"));
        for other in ["null", "https://evil.example", "ftp://a.localhost", "http://localhost", ""] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
