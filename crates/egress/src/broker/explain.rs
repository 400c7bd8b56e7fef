//! What would happen to a request, without sending it.
//!
//! Invariant: asks the same functions that decide about real connections, in the same order; never
//! resolves a name and never dials. Called by the broker, and by the engine for sandboxes that rest.

use std::net::SocketAddr;

use bivouac_types::policy::Action;
use http::HeaderMap;

use super::judge::{self, Early, HTTP, Late, Refusal};
use crate::address::Fence;
use crate::canonical::{self, Host};
use crate::classify::{First, Hello};
use crate::flows::Handling;
use crate::message::Explained;
use crate::policy::{Compiled, Mode, Named, RequestView, Site};
use crate::reason::Reason;

/// Answers for a request of this method to this URL, at this moment. Headers are unknown, so rules that
/// look at headers are taken as not matching.
///
/// # Errors
/// A sentence about the URL or the method.
pub fn explain(
    policy: &Compiled,
    fence: &Fence,
    url: &str,
    method: &str,
    now_ms: u64,
) -> Result<Explained, String> {
    let url = Url::parse(url)?;
    if method.is_empty() || !method.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
        return Err(format!("{method:?} is no HTTP method: write GET, POST or the like"));
    }
    let hint = policy.hint(&url.host, url.port).map(|hint| hint.to_string());
    let denied = |refusal: Refusal| Explained {
        allowed: false,
        reason: refusal.reason,
        entry: refusal.entry.map(|e| e.to_string()),
        rule: None,
        handling: match refusal.detail {
            Some(detail) => format!("refused: {detail}"),
            None => format!("refused: {}", super::denial::explain(refusal.reason)),
        },
        hint: (refusal.reason != Reason::AddressForbidden).then(|| hint.clone()).flatten(),
    };
    let name = match &url.host {
        Host::Ip(ip) => {
            let asked = SocketAddr::new(*ip, url.port);
            match judge::by_address(policy, fence, &[], asked) {
                Early::Deny(refusal) => return Ok(denied(refusal)),
                Early::Dns => {
                    return Ok(plain(Reason::Closed, None, "answered by the broker as DNS"));
                }
                Early::Direct { handling, reason, entry } => {
                    let how = match handling {
                        Handling::Subnet => "passes unseen to the address, whatever it carries",
                        _ => "passes unseen to the address",
                    };
                    return Ok(plain(reason, entry.as_deref(), how));
                }
                Early::Look => {}
            }
            None
        }
        Host::Name(_) if policy.mode() == Mode::DenyAll => {
            return Ok(denied(Refusal::of(Reason::DenyAll)));
        }
        Host::Name(_) if policy.mode() == Mode::AllowAll => {
            return Ok(plain(Reason::AllowAll, None, "passes unseen"));
        }
        Host::Name(name) => Some(name),
    };
    let hello = |name: Option<String>| First::Tls(Hello { name, encrypted: false, tls13: true });
    let first = if url.tls { hello(name.map(ToString::to_string)) } else { First::Http };
    Ok(match judge::by_first(policy, url.port, Some(&first)) {
        Late::Deny(refusal) if refusal.reason == Reason::NoServerName => {
            denied(Refusal { reason: Reason::AddressNotListed, ..refusal })
        }
        Late::Deny(refusal) => denied(refusal),
        Late::Pass { reason, entry, .. } => plain(reason, Some(&entry), "passes unseen"),
        Late::Raw(entry) => plain(
            Reason::CatchAll,
            Some(&entry),
            "passes unseen, to the address that the client resolved",
        ),
        Late::Intercept { site, .. } => by_rules(&site, &url, method, now_ms),
        Late::PlainHttp => match name.map(|name| policy.named(name, HTTP)) {
            Some(Named::Deny(reason)) => denied(Refusal::of(reason)),
            Some(Named::Pass { reason, entry }) => {
                plain(reason, Some(&entry), "passes as plain HTTP, by its Host; nothing is set")
            }
            Some(Named::Intercept(site)) => plain(
                Reason::DomainListed,
                Some(&site.entry),
                "passes as plain HTTP, by its Host; rules never act on plain HTTP",
            ),
            None => denied(Refusal::of(Reason::AddressNotListed)),
        },
    })
}

fn plain(reason: Reason, entry: Option<&str>, handling: &str) -> Explained {
    Explained {
        allowed: true,
        reason,
        entry: entry.map(str::to_owned),
        rule: None,
        handling: handling.to_owned(),
        hint: None,
    }
}

fn by_rules(site: &Site, url: &Url, method: &str, now_ms: u64) -> Explained {
    let mut found = plain(
        Reason::NoRuleMatched,
        Some(&site.entry),
        "is decrypted, matches no rule and passes unchanged",
    );
    let path = match site.path(&url.path) {
        Ok(path) => path,
        Err(why) => {
            found.allowed = false;
            found.reason = Reason::PathAmbiguous;
            found.handling = format!("refused: {why}");
            return found;
        }
    };
    let headers = HeaderMap::new();
    let view = RequestView { method, path: &path, query: url.query.as_deref(), headers: &headers };
    let Some((number, rule)) = site.first_match(&view, now_ms) else { return found };
    found.rule = Some(number);
    let from = rule.credential.as_ref().map(|c| format!(" (credential {c})")).unwrap_or_default();
    (found.reason, found.handling) = match &rule.action {
        Action::Transform { headers } => {
            let names: Vec<_> = headers.iter().map(|h| h.name.to_ascii_lowercase()).collect();
            (Reason::RuleTransform, format!("sets {}{from}", names.join(", ")))
        }
        Action::Sign(_) => (Reason::RuleSign, format!("is signed again for AWS{from}")),
        Action::Forward { url } => (Reason::RuleForward, format!("is sent to {url}")),
        Action::Respond(response) => {
            found.allowed = false;
            (Reason::RuleResponse, format!("is answered by the rule with {}", response.status_code))
        }
    };
    found
}

/// What is needed of a URL.
struct Url {
    tls: bool,
    host: Host,
    port: u16,
    path: String,
    query: Option<String>,
}

impl Url {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong =
            |why: &str| format!("{text:?} {why}: write https://HOST[:PORT][/PATH], or http://…");
        let (scheme, rest) = match text.split_once("://") {
            Some((scheme, rest)) => (scheme.to_ascii_lowercase(), rest),
            // A bare host is what most people have at hand.
            None => ("https".to_owned(), text),
        };
        let (tls, usual) = match scheme.as_str() {
            "https" | "wss" | "tls" => (true, 443),
            "http" | "ws" => (false, 80),
            _ => return Err(wrong("has an unknown scheme")),
        };
        let rest = rest.split('#').next().unwrap_or_default();
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, tail) = rest.split_at(end);
        let (host, port) = canonical::authority(authority.as_bytes())
            .map_err(|e| wrong(&format!("has a host that {e}")))?;
        let (path, query) = match tail.split_once('?') {
            Some((path, query)) => (path, Some(query.to_owned())),
            None => (tail, None),
        };
        let path = if path.is_empty() { "/".to_owned() } else { path.to_owned() };
        Ok(Self { tls, host, port: port.unwrap_or(usual), path, query })
    }
}

#[cfg(test)]
mod tests {
    use bivouac_types::id::ValueId;
    use bivouac_types::policy::NetworkPolicy;
    use serde_json::json;

    use super::*;

    fn ask(policy: &serde_json::Value, url: &str) -> Explained {
        let mut n = 0;
        let mut mint = || {
            n += 1;
            ValueId::new(n, [0; 10])
        };
        let draft = NetworkPolicy::parse("networkPolicy", policy, &mut mint).unwrap();
        let compiled = Compiled::new(&draft.policy).unwrap();
        explain(&compiled, &Fence::new(Vec::new()), url, "GET", 0).unwrap()
    }

    #[test]
    fn explains_what_connections_meet() {
        let policy = json!({
            "allow": {
                "ok.test": [],
                "api.test": [
                    { "match": { "path": { "startsWith": "/a" } },
                      "transform": [{ "headers": { "authorization": "x" } }] },
                    { "response": { "statusCode": 451 } },
                ],
            },
            "subnets": { "allow": ["203.0.113.0/24"], "deny": ["203.0.113.66/32"] },
        });
        let e = ask(&policy, "https://ok.test/");
        assert!(e.allowed && e.entry.as_deref() == Some("ok.test"), "{e:?}");
        let e = ask(&policy, "evil.test");
        assert!(!e.allowed && e.reason == Reason::DomainNotListed, "{e:?}");
        assert!(e.hint.unwrap().contains("evil.test"));
        let e = ask(&policy, "https://api.test/a?b");
        assert_eq!((e.reason, e.rule), (Reason::RuleTransform, Some(0)));
        assert_eq!(e.handling, "sets authorization");
        let e = ask(&policy, "https://api.test/b");
        assert_eq!((e.allowed, e.reason, e.rule), (false, Reason::RuleResponse, Some(1)));
        assert_eq!(ask(&policy, "http://ok.test/").reason, Reason::PlainHttp);
        assert_eq!(ask(&policy, "https://203.0.113.10").reason, Reason::SubnetAllowed);
        assert_eq!(ask(&policy, "https://203.0.113.66").reason, Reason::SubnetDenied);
        assert_eq!(ask(&policy, "https://2130706433/").reason, Reason::AddressForbidden);
        assert_eq!(ask(&policy, "https://8.8.8.8/").reason, Reason::AddressNotListed);
        assert_eq!(ask(&json!({ "mode": "deny-all" }), "https://ok.test").reason, Reason::DenyAll);
        assert_eq!(
            ask(&json!({ "mode": "allow-all" }), "https://ok.test").reason,
            Reason::AllowAll
        );
        assert_eq!(
            ask(&json!({ "mode": "allow-all" }), "http://169.254.169.254/").reason,
            Reason::AddressForbidden
        );
    }

    #[test]
    fn says_what_is_wrong_with_a_url() {
        let compiled = Compiled::new(&NetworkPolicy::AllowAll).unwrap();
        let fence = Fence::new(Vec::new());
        for url in ["", "ftp://ok.test", "https://a b/", "https://u@ok.test/", "https://ok.test:0/"]
        {
            assert!(explain(&compiled, &fence, url, "GET", 0).is_err(), "{url}");
        }
        assert!(explain(&compiled, &fence, "ok.test", "G T", 0).is_err());
    }
}
