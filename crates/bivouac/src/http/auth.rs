//! Who asks: the bearer token.
//!
//! Owns the way of a request past the door. Invariants: everything below `/api`, and `/metrics`, has passed
//! [`require`]; who the token stands for is the engine's to say; a use is taken down however it came out; when a
//! token is revoked or expires, what is still being answered in its name is cut.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bivouac_engine::{Engine, Principal};
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use hyper::body::{Frame, SizeHint};

use super::App;
use super::error::ApiError;
use super::uses::Asked;

/// Lets a request under `/api` or for `/metrics` through when it carries a token that counts.
pub(crate) async fn require(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let metrics = path == "/metrics";
    if !metrics && path != "/api" && !path.starts_with("/api/") {
        return next.run(request).await;
    }
    let asked = Asked::of(&request);
    let who = match authenticate(request.headers(), &app.engine) {
        Ok(who) => who,
        Err(error) => {
            let response = error.into_response();
            app.refusals.note(&app.engine, asked, response.status());
            return response;
        }
    };
    request.extensions_mut().insert(who.clone());
    // The engine's own token neither ends nor is taken back.
    let mut ended = who.token.is_some().then(|| app.engine.ended(&who).boxed());
    let work = async {
        if metrics && let Err(error) = who.may_rule() {
            return ApiError::from(error).into_response();
        }
        match &mut ended {
            None => next.run(request).await,
            Some(ended) => tokio::select! {
                response = next.run(request) => response,
                () = ended => no_more(&app.engine, &who).into_response(),
            },
        }
    };
    let (response, checked) = bivouac_engine::checked(work).await;
    app.engine.audit(asked.used(&who, checked, response.status()));
    match ended {
        Some(ended) if response.status() != StatusCode::SWITCHING_PROTOCOLS => {
            response.map(|body| Body::new(Cut { body, ended: Some(ended) }))
        }
        _ => response,
    }
}

/// What is said to somebody whose token ended in the middle.
fn no_more(engine: &Engine, who: &Principal) -> ApiError {
    match engine.principal_of(who.token.as_deref()) {
        Err(error) => error.into(),
        Ok(_) => ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", "The token has ended."),
    }
}

pub(super) fn authenticate(headers: &HeaderMap, engine: &Engine) -> Result<Principal, ApiError> {
    let Some(header) = headers.get(header::AUTHORIZATION) else {
        let message =
            "No credentials: send 'Authorization: Bearer <token>'; 'bivouac env' prints the token.";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message));
    };
    Ok(engine.authenticate(header.to_str().ok().and_then(bearer).unwrap_or_default())?)
}

fn bearer(header: &str) -> Option<&str> {
    let (scheme, rest) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| rest.trim())
}

/// An answer that breaks off when the token of whoever asked counts no more.
struct Cut {
    body: Body,
    ended: Option<BoxFuture<'static, ()>>,
}

impl HttpBody for Cut {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(ended) = &mut self.ended else { return Poll::Ready(None) };
        if ended.poll_unpin(cx).is_ready() {
            self.ended = None;
            self.body = Body::empty();
            // An error, so that nobody takes the answer for whole.
            let cut = io::Error::new(io::ErrorKind::PermissionDenied, "the token has ended");
            return Poll::Ready(Some(Err(axum::Error::new(cut))));
        }
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheme_is_bearer() {
        assert_eq!(bearer("Bearer abc"), Some("abc"));
        assert_eq!(bearer("bearer abc "), Some("abc"));
        for bad in ["Bearer", "abc", "Basic abc", ""] {
            assert_eq!(bearer(bad), None, "{bad}");
        }
        assert_eq!(bearer("Bearer "), Some(""), "which is nobody's token");
    }

    #[tokio::test]
    async fn an_answer_breaks_off_with_its_token() {
        use http_body_util::BodyExt as _;
        let (tell, told) = tokio::sync::oneshot::channel::<()>();
        let endless = futures_util::stream::once(async { Ok::<_, io::Error>(Bytes::from("a")) });
        let endless = futures_util::StreamExt::chain(endless, futures_util::stream::pending());
        let ended = Some(told.map(drop).boxed());
        let mut body = Cut { body: Body::from_stream(endless), ended };
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "a");
        assert!(body.frame().now_or_never().is_none(), "it goes on");
        tell.send(()).unwrap();
        assert!(body.frame().await.unwrap().is_err());
        assert!(body.frame().await.is_none());
    }
}
