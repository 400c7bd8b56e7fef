//! What the proxy says itself: small pages for browsers, JSON for everybody else.
//!
//! Invariant: no text of a request or a program gets into a page but escaped; a page loads nothing and is kept by
//! nobody. Called by `preview`.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::Response;
use bivouac_engine::{Error, ErrorKind, PreviewRoute};
use serde_json::json;

use super::gate::Closed;

/// How often a waiting page asks again, seconds.
const AGAIN: &str = "2";

/// What kind of answer a request can make use of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asker {
    /// A browser that goes to a page.
    pub(super) navigates: bool,
    head: bool,
}

impl Asker {
    pub(super) fn of(request: &Request) -> Self {
        let headers = request.headers();
        let page = matches!(*request.method(), Method::GET | Method::HEAD | Method::POST);
        Self { navigates: page && navigates(headers), head: request.method() == Method::HEAD }
    }

    fn answer(self, status: StatusCode, kind: &'static str, text: String) -> Response {
        let body = if self.head { Body::empty() } else { Body::from(text) };
        let mut response = Response::new(body);
        *response.status_mut() = status;
        let headers = response.headers_mut();
        for (name, value) in [
            (header::CONTENT_TYPE, kind),
            (header::CACHE_CONTROL, "no-store"),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (
                header::CONTENT_SECURITY_POLICY,
                "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
            ),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        response
    }

    fn json(self, status: StatusCode, code: &str, message: &str) -> Response {
        let text = json!({ "error": { "code": code, "message": message } }).to_string();
        self.answer(status, "application/json", text)
    }

    /// A page with a sentence, and the lines that help.
    fn page(self, status: StatusCode, title: &str, sentence: &str, lines: &[String]) -> Response {
        let lines: String =
            lines.iter().map(|line| format!("<pre>{}</pre>", escaped(line))).collect();
        let (title, sentence) = (escaped(title), escaped(sentence));
        let text = format!(
            "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
             <meta name=\"viewport\" content=\"width=device-width\"><style>body{{font:16px/1.5 system-ui,\
             sans-serif;max-width:38em;margin:12vh auto;padding:0 1em;color:#222;background:#fff}}\
             h1{{font-size:1.3em}}pre{{background:#f2f2f2;padding:.6em .8em;overflow-x:auto}}\
             @media(prefers-color-scheme:dark){{body{{color:#ddd;background:#181818}}\
             pre{{background:#2a2a2a}}}}</style></head><body><h1>{title}</h1><p>{sentence}</p>{lines}\
             </body></html>\n"
        );
        self.answer(status, "text/html; charset=utf-8", text)
    }

    fn say(
        self,
        status: StatusCode,
        code: &str,
        title: &str,
        sentence: &str,
        lines: &[String],
    ) -> Response {
        if self.navigates {
            return self.page(status, title, sentence, lines);
        }
        let message = match lines {
            [] => sentence.to_owned(),
            lines => format!("{sentence} {}", lines.join("; ")),
        };
        self.json(status, code, &message)
    }

    /// A refusal of no particular kind.
    pub(super) fn refuse(self, status: StatusCode, code: &str, sentence: &str) -> Response {
        let title = status.canonical_reason().unwrap_or("Not possible");
        self.say(status, code, title, sentence, &[])
    }

    /// There is no such route.
    pub(super) fn unknown(self, name: &str) -> Response {
        let name: String = name.chars().take(100).collect();
        let sentence = format!("No sandbox of this engine has a port under the name {name}.");
        let lines = ["bivouac ports NAME".to_owned()];
        self.say(StatusCode::NOT_FOUND, "not_found", "No such route", &sentence, &lines)
    }

    /// Somebody may not.
    pub(super) fn closed(self, route: &PreviewRoute, why: &Closed) -> Response {
        let sentence = match why {
            Closed::Nothing => "This port is private. Whoever may see it gets a link by:",
            Closed::Link => "This link has expired, or was revoked. A new one is made by:",
            Closed::Token => {
                "The token is not this engine's, or counts no more. A link is made by:"
            }
            Closed::Right => {
                "The token does not have the right 'preview' here. Whoever has it makes a link by:"
            }
            Closed::Neighbour => {
                "A page of another sandbox has asked for this; only pages of this one may. A link is \
                 made by:"
            }
        };
        let code =
            if why.status() == StatusCode::UNAUTHORIZED { "unauthorized" } else { "forbidden" };
        let lines = [format!("bivouac open {} {}", route.name, route.port)];
        let mut response = self.say(why.status(), code, "A private port", sentence, &lines);
        if why.status() == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer realm=\"bivouac\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }

    /// Nothing answers at the port.
    pub(super) fn not_listening(self, route: &PreviewRoute) -> Response {
        let (name, port) = (&route.name, route.port);
        let sentence = format!(
            "Nothing listens on port {port} in sandbox '{name}'. Start the program, and have it bind to \
             0.0.0.0 or 127.0.0.1. What does listen is told by:"
        );
        let lines = [format!("bivouac ports {name}")];
        let title = format!("Nothing on port {port}");
        self.say(StatusCode::BAD_GATEWAY, "not_listening", &title, &sentence, &lines)
    }

    /// What answers at the port does not do it in HTTP.
    pub(super) fn broken(self, route: &PreviewRoute, what: &str) -> Response {
        let sentence =
            format!("What listens on port {} in sandbox '{}' {what}.", route.port, route.name);
        self.say(StatusCode::BAD_GATEWAY, "bad_gateway", "No answer", &sentence, &[])
    }

    /// The program takes too long.
    pub(super) fn late(self, route: &PreviewRoute) -> Response {
        let sentence = format!(
            "What listens on port {} in sandbox '{}' has taken the request and not answered.",
            route.port, route.name
        );
        self.say(StatusCode::GATEWAY_TIMEOUT, "timeout", "No answer", &sentence, &[])
    }

    /// The sandbox does not run, and requests do not start it.
    pub(super) fn stopped(self, route: &PreviewRoute, why: &str) -> Response {
        let sentence = format!("Sandbox '{}' does not run: {why} It is started by:", route.name);
        let lines = [format!("bivouac start {}", route.name)];
        let title = "A stopped sandbox";
        let status = StatusCode::SERVICE_UNAVAILABLE;
        self.say(status, "sandbox_stopped", title, &sentence, &lines)
    }

    /// The sandbox is being started: the page asks again by itself.
    pub(super) fn waiting(self, route: &PreviewRoute) -> Response {
        let sentence = format!(
            "Sandbox '{}' is being started, and port {} waited for. This page looks again by itself.",
            route.name, route.port
        );
        let status = StatusCode::SERVICE_UNAVAILABLE;
        let mut response = self.say(status, "starting", "Starting", &sentence, &[]);
        let headers = response.headers_mut();
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static(AGAIN));
        if self.navigates {
            headers.insert(header::REFRESH, HeaderValue::from_static(AGAIN));
        }
        response
    }

    /// What the engine said of a try.
    pub(super) fn failed(self, error: &Error) -> Response {
        let status = match error.kind {
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::TooMany => StatusCode::TOO_MANY_REQUESTS,
            ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        if error.kind == ErrorKind::Internal {
            let cause = error.source.as_ref().map(ToString::to_string);
            tracing::error!(code = error.code, ?cause, "{}", error.message);
        }
        self.refuse(status, error.code, &error.message)
    }
}

fn navigates(headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    match text("sec-fetch-mode") {
        Some(mode) => mode == "navigate",
        None => text("accept").is_some_and(|accept| accept.contains("text/html")),
    }
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}
