//! Headers on their way: what ends here, what is ours to say.
//!
//! Invariants: nothing that a client says in a header that we set, or that lets it in, reaches a program; headers
//! of one connection stay on it (RFC 9110 §7.6.1). Called by `preview`.

use std::net::IpAddr;

use axum::http::header::{self, Entry};
use axum::http::{HeaderMap, HeaderName, HeaderValue};

/// The header that a token may come in.
pub(super) const TOKEN: &str = "x-bivouac-token";
/// The cookie that a link is turned into.
pub(super) const COOKIE: &str = "_bivouac";

/// Headers of one connection, whatever `Connection` says.
static HOP: [HeaderName; 6] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("http2-settings"),
];

/// Beginnings of names that only proxies and we have a say in.
const OURS: [&str; 5] = ["x-forwarded-", "x-bivouac-", "x-vercel-", "proxy-", "x-real-ip"];

/// Takes away what belongs to the connection.
pub(super) fn drop_hop(headers: &mut HeaderMap) {
    let mut named: Vec<HeaderName> = Vec::new();
    for value in headers.get_all(header::CONNECTION) {
        let Ok(text) = value.to_str() else { continue };
        named.extend(text.split(',').filter_map(|name| name.trim().parse().ok()));
    }
    for name in named.iter().filter(|name| **name != header::HOST).chain(&HOP) {
        headers.remove(name);
    }
}

/// Takes away what a client must not say, after [`drop_hop`].
pub(super) fn drop_forged(headers: &mut HeaderMap) {
    let ours = |name: &&HeaderName| {
        OURS.iter().any(|start| name.as_str().starts_with(start)) || *name == header::FORWARDED
    };
    let forged: Vec<HeaderName> = headers.keys().filter(ours).cloned().collect();
    for name in forged {
        headers.remove(name);
    }
}

/// Says where a request came from.
pub(super) fn add_ours(headers: &mut HeaderMap, from: Option<IpAddr>, host: &str, secure: bool) {
    let mut set = |name: &'static str, text: &str| {
        if let Ok(value) = HeaderValue::from_str(text) {
            headers.insert(HeaderName::from_static(name), value);
        }
    };
    if let Some(from) = from {
        // An address of the other family in its own form.
        set("x-forwarded-for", &from.to_canonical().to_string());
    }
    set("x-forwarded-host", host);
    set("x-forwarded-proto", if secure { "https" } else { "http" });
}

/// Whether the client takes trailers: the one thing of `TE` that goes on.
pub(super) fn takes_trailers(headers: &HeaderMap) -> bool {
    let says = |value: &HeaderValue| {
        let text = value.to_str().unwrap_or_default();
        text.split(',').any(|part| part.trim().eq_ignore_ascii_case("trailers"))
    };
    headers.get_all(header::TE).iter().any(says)
}

/// What a request wants its connection changed to, if it is something that can be carried: HTTP of another
/// version would be requests that nobody looks at.
pub(super) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asks = headers.get_all(header::CONNECTION).iter().any(|value| {
        let text = value.to_str().unwrap_or_default();
        text.split(',').any(|part| part.trim().eq_ignore_ascii_case("upgrade"))
    });
    let mut wanted = headers.get_all(header::UPGRADE).iter();
    let (first, second) = (wanted.next()?, wanted.next());
    let text = first.to_str().ok()?.trim().to_ascii_lowercase();
    let one = !text.is_empty() && !text.contains(',') && second.is_none();
    let http = text.starts_with("h2")
        || text.starts_with("h3")
        || text.starts_with("http")
        || text.starts_with("tls");
    (asks && one && !http).then(|| first.clone())
}

/// Takes our cookies out of a request's and answers them; the others are left as they are.
pub(super) fn take_cookies(headers: &mut HeaderMap) -> Vec<String> {
    /// Most of ours that are looked at: a program of a neighbour may have set some more.
    const MOST: usize = 8;
    let mut ours = Vec::new();
    let mut kept: Vec<u8> = Vec::new();
    let mut found = false;
    // HTTP/2 sends each cookie in a header of its own; HTTP/1.1 takes one.
    let lines = headers.get_all(header::COOKIE).iter().count();
    for value in headers.get_all(header::COOKIE) {
        for pair in value.as_bytes().split(|b| *b == b';') {
            let pair = pair.trim_ascii();
            let name = pair.split(|b| *b == b'=').next().unwrap_or_default().trim_ascii();
            if name == COOKIE.as_bytes() {
                found = true;
                let text = pair.get(COOKIE.len()..).and_then(|rest| std::str::from_utf8(rest).ok());
                if let Some(text) = text.filter(|_| ours.len() < MOST) {
                    ours.push(text.trim_start_matches([' ', '=']).to_owned());
                }
            } else if !pair.is_empty() {
                if !kept.is_empty() {
                    kept.extend_from_slice(b"; ");
                }
                kept.extend_from_slice(pair);
            }
        }
    }
    if !found && lines < 2 {
        return ours;
    }
    headers.remove(header::COOKIE);
    if !kept.is_empty()
        && let Ok(mut value) = HeaderValue::from_bytes(&kept)
    {
        value.set_sensitive(true);
        headers.insert(header::COOKIE, value);
    }
    ours
}

/// Takes a program's answer for our cookie away: it would lock its own users out.
pub(super) fn drop_our_cookie(headers: &mut HeaderMap) {
    let Entry::Occupied(entry) = headers.entry(header::SET_COOKIE) else { return };
    let ours = |value: &HeaderValue| {
        let name = value.as_bytes().split(|b| *b == b'=' || *b == b';').next().unwrap_or_default();
        name.trim_ascii() == COOKIE.as_bytes()
    };
    if !entry.iter().any(ours) {
        return;
    }
    let kept: Vec<HeaderValue> = entry.iter().filter(|value| !ours(value)).cloned().collect();
    entry.remove_entry_mult();
    for value in kept {
        headers.append(header::SET_COOKIE, value);
    }
}

/// Takes our parameter out of a query. Answers its value, and what is left of the query.
pub(super) fn take_link(query: &str) -> (Option<String>, Option<String>) {
    let mut link = None;
    let mut kept: Vec<&str> = Vec::new();
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if decoded(name) == bivouac_engine::LINK_QUERY {
            link = Some(value.to_owned());
        } else {
            kept.push(pair);
        }
    }
    let rest = kept.join("&");
    let rest = (!kept.is_empty() && (link.is_none() || !rest.is_empty())).then_some(rest);
    (link, rest)
}

/// A name as a program would read it.
fn decoded(name: &str) -> String {
    let bytes = name.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = bytes.get(at + 1..at + 3).and_then(|hex| std::str::from_utf8(hex).ok());
        match (bytes[at], hex.and_then(|hex| u8::from_str_radix(hex, 16).ok())) {
            (b'%', Some(byte)) => {
                out.push(byte);
                at += 3;
            }
            (byte, _) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        headers
    }

    fn names(headers: &HeaderMap) -> Vec<&str> {
        headers.keys().map(HeaderName::as_str).collect()
    }

    #[test]
    fn what_belongs_to_the_connection_or_to_us_ends_here() {
        let mut headers = map(&[
            ("host", "a.localhost"),
            ("connection", "keep-alive, X-Secret, host"),
            ("connection", "x-other"),
            ("x-secret", "1"),
            ("x-other", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "gzip, trailers"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "h2c"),
            ("http2-settings", "AAA"),
            ("x-forwarded-for", "1.2.3.4"),
            ("X-Forwarded-Prefix", "/x"),
            ("forwarded", "for=1.2.3.4"),
            ("x-real-ip", "1.2.3.4"),
            ("x-bivouac-token", "t"),
            ("x-vercel-id", "t"),
            ("proxy-authorization", "t"),
            ("proxy-connection", "t"),
            ("accept", "*/*"),
        ]);
        assert!(takes_trailers(&headers));
        drop_hop(&mut headers);
        drop_forged(&mut headers);
        assert_eq!(names(&headers), ["host", "accept"]);
    }

    #[test]
    fn only_what_can_be_carried_is_an_upgrade() {
        let with = |connection: &str, wanted: &str| {
            upgrade(&map(&[("connection", connection), ("upgrade", wanted)])).is_some()
        };
        assert!(with("Upgrade", "websocket") && with("keep-alive, upgrade", "WebSocket"));
        for (connection, wanted) in [
            ("close", "websocket"),
            ("upgrade", "h2c"),
            ("upgrade, http2-settings", "H2C"),
            ("upgrade", "HTTP/2.0"),
            ("upgrade", "websocket, h2c"),
            ("upgrade", "TLS/1.0"),
            ("upgrade", ""),
        ] {
            assert!(!with(connection, wanted), "{connection} {wanted}");
        }
    }

    #[test]
    fn only_our_cookies_are_taken() {
        let mut headers = map(&[("cookie", "a=1; _bivouac=x.y; b=\"2\"; _bivouacs=3; =4")]);
        assert_eq!(take_cookies(&mut headers), ["x.y"]);
        assert_eq!(headers["cookie"], "a=1; b=\"2\"; _bivouacs=3; =4");
        let mut headers = map(&[("cookie", "_bivouac=x")]);
        assert_eq!(take_cookies(&mut headers), ["x"]);
        assert!(headers.is_empty());
        let mut headers = map(&[("cookie", "a=1"), ("cookie", "b=2"), ("cookie", "_bivouac=x")]);
        assert_eq!(take_cookies(&mut headers), ["x"]);
        assert_eq!(headers.get_all("cookie").iter().collect::<Vec<_>>(), ["a=1; b=2"]);
        let mut headers = map(&[("cookie", "a=1;b=2")]);
        assert!(take_cookies(&mut headers).is_empty());
        assert_eq!(headers["cookie"], "a=1;b=2", "as it was");
        let mut headers = map(&[("set-cookie", "a=1"), ("set-cookie", "_bivouac=; Max-Age=0")]);
        drop_our_cookie(&mut headers);
        assert_eq!(headers.get_all("set-cookie").iter().collect::<Vec<_>>(), ["a=1"]);
    }

    #[test]
    fn only_our_parameter_is_taken() {
        let of = |query: &str| take_link(query);
        assert_eq!(of("a=1&__bivouac=x.y&b"), (Some("x.y".to_owned()), Some("a=1&b".to_owned())));
        assert_eq!(of("%5f_bivouac=x"), (Some("x".to_owned()), None));
        assert_eq!(of("a=%zz&&b=%5"), (None, Some("a=%zz&&b=%5".to_owned())));
        assert_eq!(of(""), (None, Some(String::new())));
        assert_eq!(of("__bivouac=1&__bivouac=2").0.as_deref(), Some("2"));
    }
}
