//! Who is let in to a route.
//!
//! Invariants: what lets somebody in is taken out of the request, whether it did or not; an authorization that is
//! not ours is the program's and left alone; a cookie counts only for pages of the same sandbox, because browsers
//! send it along for pages of its neighbours, who are strangers. Called by `preview`.

use std::sync::Arc;

use axum::http::request::Parts;
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use bivouac_engine::{Clock as _, Engine, Error, ErrorKind, Pass, PreviewRoute, Seal, SystemClock};

use super::headers::{self, COOKIE, TOKEN};
use super::host::{Aimed, label_of_origin};

/// What becomes of a request.
pub(super) enum Verdict {
    /// Goes in.
    In(Pass),
    /// Is a link: to be asked again without it.
    Clean {
        /// Where.
        location: String,
        /// What lets in there.
        cookie: Option<String>,
    },
    /// Stays out.
    Out(Closed),
}

/// Why a request stays out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closed {
    /// It shows nothing.
    Nothing,
    /// Its link has expired, or was revoked.
    Link,
    /// Its token is none of ours any more.
    Token,
    /// Its token does not have the right.
    Right,
    /// Its cookie was sent for a page of somebody else.
    Neighbour,
}

impl Closed {
    /// The answer's status.
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::Nothing | Self::Link | Self::Token => StatusCode::UNAUTHORIZED,
            Self::Right | Self::Neighbour => StatusCode::FORBIDDEN,
        }
    }
}

/// Lets a request in or not, and takes out of it what was meant for us.
///
/// # Errors
/// The engine cannot tell.
pub(super) async fn judge(
    engine: &Engine,
    route: &Arc<PreviewRoute>,
    parts: &mut Parts,
    aimed: &Aimed,
    secure: bool,
) -> Result<Verdict, Error> {
    let token = take_token(&mut parts.headers);
    let link = take_link(parts);
    let cookies = headers::take_cookies(&mut parts.headers);
    let mut why = Closed::Nothing;
    if let Some(token) = token {
        match principal(engine, route, &token) {
            Ok(pass) => return Ok(Verdict::In(pass)),
            Err(closed) => why = closed,
        }
    }
    if let Some(own) = bearer(&parts.headers).and_then(|text| engine.authenticate(text).ok()) {
        // Ours: not to be shown to the program, whatever comes of it.
        parts.headers.remove(header::AUTHORIZATION);
        match engine.pass_principal(route, own) {
            Ok(pass) => return Ok(Verdict::In(pass)),
            Err(error) => why = closed(&error),
        }
    }
    if let Some(link) = &link {
        match engine.pass_signed(route, Seal::Link, link)? {
            Some(pass) if !is_page(&parts.method) => return Ok(Verdict::In(pass)),
            Some(pass) => {
                let location = clean(parts, aimed, secure);
                let cookie = engine.preview_cookie(&pass)?;
                let cookie = cookie.map(|text| cookie_line(&text, pass.until(), secure));
                return Ok(Verdict::Clean { location, cookie });
            }
            None => why = Closed::Link,
        }
    }
    for text in &cookies {
        let Some(pass) = engine.pass_signed(route, Seal::Cookie, text)? else { continue };
        if neighbours(engine, route, parts, aimed).await? {
            why = Closed::Neighbour;
            break;
        }
        if link.is_some() && is_page(&parts.method) {
            return Ok(Verdict::Clean { location: clean(parts, aimed, secure), cookie: None });
        }
        return Ok(Verdict::In(pass));
    }
    Ok(engine.pass_public(route).map_or(Verdict::Out(why), Verdict::In))
}

fn principal(engine: &Engine, route: &Arc<PreviewRoute>, token: &str) -> Result<Pass, Closed> {
    let who = engine.authenticate(token).map_err(|_| Closed::Token)?;
    engine.pass_principal(route, who).map_err(|error| closed(&error))
}

/// A route of a namespace that somebody does not see looks to him as to a stranger.
fn closed(error: &Error) -> Closed {
    if error.kind == ErrorKind::Forbidden { Closed::Right } else { Closed::Nothing }
}

fn take_token(headers: &mut HeaderMap) -> Option<String> {
    let value = headers.remove(TOKEN)?;
    value.to_str().ok().map(|text| text.trim().to_owned())
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, rest) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| rest.trim())
}

/// Takes the signature of a link out of the target.
fn take_link(parts: &mut Parts) -> Option<String> {
    let query = parts.uri.query()?;
    let (link, rest) = headers::take_link(query);
    let link = link?;
    let path = parts.uri.path();
    let target = rest.map_or_else(|| path.to_owned(), |rest| format!("{path}?{rest}"));
    // Parts of a target that was one: it is one again.
    if let Ok(target) = target.parse::<PathAndQuery>() {
        let mut whole = std::mem::take(&mut parts.uri).into_parts();
        whole.path_and_query = Some(target);
        parts.uri = Uri::from_parts(whole).unwrap_or_default();
    }
    Some(link)
}

fn is_page(method: &Method) -> bool {
    method == Method::GET || method == Method::HEAD
}

/// The address without the signature. Absolute: a path that begins with two slashes would be a host.
fn clean(parts: &Parts, aimed: &Aimed, secure: bool) -> String {
    let scheme = if secure { "https" } else { "http" };
    let target = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
    format!("{scheme}://{}{target}", aimed.authority())
}

fn cookie_line(text: &str, until: Option<i64>, secure: bool) -> String {
    let age = until.map_or(0, |until| (until - SystemClock.now()).max(0) / 1000);
    let secure = if secure { "; Secure" } else { "" };
    format!("{COOKIE}={text}; Path=/; Max-Age={age}; HttpOnly; SameSite=Lax{secure}")
}

/// Whether a browser sends this for a page that is not of the same sandbox: neighbours are of the same site, so
/// `SameSite` does not hold them off.
async fn neighbours(
    engine: &Engine,
    route: &Arc<PreviewRoute>,
    parts: &Parts,
    aimed: &Aimed,
) -> Result<bool, Error> {
    let text = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
    if let Some(origin) = text("origin") {
        let domain = engine.config().preview_domain.as_deref();
        let domain = domain.map(|domain| domain.rsplit_once(':').map_or(domain, |(name, _)| name));
        let Some(label) = label_of_origin(origin, domain) else { return Ok(true) };
        if label == aimed.label {
            return Ok(false);
        }
        let other = engine.preview_route(&label).await?;
        return Ok(!other.is_some_and(|other| other.same_sandbox(route)));
    }
    let site = text("sec-fetch-site");
    let navigates = text("sec-fetch-mode") == Some("navigate") && is_page(&parts.method);
    Ok(matches!(site, Some("same-site" | "cross-site")) && !navigates)
}
