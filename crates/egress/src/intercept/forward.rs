//! Requests that a rule sends to the user's own proxy, with a token that says where they come from.
//!
//! Invariant: what the guest itself said under the names of these headers is gone before; the token goes
//! to the proxy that the rule names and nowhere else, over verified TLS. Wire format:
//! reference/egress.md §1.6. Called by [`super::pipeline`].

use http::header::{HeaderName, HeaderValue};
use http::{StatusCode, Uri};

use super::pipeline::{Out, Visit, authority_text, secret_header};
use super::refuse::Refusal;
use super::upstream::failed;
use crate::canonical::{self, Host, Name};
use crate::reason::Reason;

const HOST: HeaderName = HeaderName::from_static("vercel-forwarded-host");
const SCHEME: HeaderName = HeaderName::from_static("vercel-forwarded-scheme");
const PORT: HeaderName = HeaderName::from_static("vercel-forwarded-port");
const PATH: HeaderName = HeaderName::from_static("vercel-forwarded-path");
const TOKEN: HeaderName = HeaderName::from_static("vercel-sandbox-oidc-token");

/// A proxy's URL, read.
pub(super) struct Proxy {
    host: Host,
    port: u16,
    /// Without a slash at the end.
    path: String,
    pub(super) audience: String,
}

pub(super) fn proxy(url: &str) -> Result<Proxy, Refusal> {
    let bad = |what: &str| failed(Reason::RuleForward, format!("the rule's forwardURL {what}"));
    let uri: Uri = url.parse().map_err(|_| bad("is no URL"))?;
    if uri.scheme_str() != Some("https") || uri.query().is_some() {
        return Err(bad("must be https and have no query"));
    }
    let authority = uri.authority().ok_or_else(|| bad("has no host"))?;
    let (host, port) =
        canonical::authority(authority.as_str().as_bytes()).map_err(|e| bad(&e.to_string()))?;
    let port = port.unwrap_or(443);
    let path = uri.path().trim_end_matches('/').to_owned();
    let origin = authority_text(&host_text(&host), port, 443);
    let origin = origin.to_str().map_err(|_| bad("has no valid host"))?;
    let audience = format!("https://{origin}{path}");
    Ok(Proxy { host, port, path, audience })
}

fn host_text(host: &Host) -> String {
    match host {
        Host::Name(name) => name.to_string(),
        Host::Ip(std::net::IpAddr::V6(ip)) => format!("[{ip}]"),
        Host::Ip(ip) => ip.to_string(),
    }
}

/// Turns a request into one for the proxy.
pub(super) async fn forward(
    visit: &Visit,
    name: &Name,
    url: &str,
    out: &mut Out,
) -> Result<(), Refusal> {
    let proxy = proxy(url)?;
    let token = visit.context.setup.tokens.get(&proxy.audience).await.map_err(|why| {
        let what = format!("there is no identity token for the proxy now: {why}");
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, Reason::CredentialUnavailable, what)
            .hint("try again in a moment: tokens are signed by the engine, which may be restarting")
    })?;
    let token = secret_header(TOKEN.as_str(), token.text.expose())?;
    let port = visit.port.to_string();
    let text = |value: &str| {
        HeaderValue::from_str(value).map_err(|_| Refusal::invalid("the target cannot be sent on"))
    };
    out.headers.insert(HOST, text(name.as_str())?);
    out.headers.insert(SCHEME, HeaderValue::from_static("https"));
    out.headers.insert(PORT, text(&port)?);
    out.headers.insert(PATH, text(&out.target)?);
    out.secrets.add(&token);
    out.headers.insert(TOKEN, token);
    out.authority = authority_text(&host_text(&proxy.host), proxy.port, 443);
    out.target = format!("{}{}", proxy.path, out.target);
    out.key.host = proxy.host;
    out.key.port = proxy.port;
    // What a forward proxy has to be able to speak.
    out.key.http1 = true;
    out.key.forward = true;
    out.trailers = false;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_known_by_origin_and_path() {
        let of = |url| proxy(url).map(|p| (p.audience, p.port, p.path)).expect(url);
        let want = |a: &str, port, p: &str| (a.to_owned(), port, p.to_owned());
        assert_eq!(of("https://p.test/proxy/"), want("https://p.test/proxy", 443, "/proxy"));
        assert_eq!(of("https://p.test"), want("https://p.test", 443, ""));
        assert_eq!(of("https://P.test:8443/a/b"), want("https://p.test:8443/a/b", 8443, "/a/b"));
        for bad in ["http://p.test/", "https://p.test/?q", "https://u@p.test/", "/proxy", ""] {
            assert!(proxy(bad).is_err(), "{bad}");
        }
    }
}
