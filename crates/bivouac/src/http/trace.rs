//! One id for each request: in the log's span, in the answer, and on the way to the shim.
//!
//! Invariant: the span holds method and path; query, headers and bodies may hold secrets and stay
//! out of the log.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument as _;

/// The header that carries it.
static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The header that carries the engine's version, for clients of another one.
pub const VERSION_HEADER: &str = "x-bivouac-version";
/// Longest id that is taken over from a client.
const MAX_ID: usize = 128;

/// Runs a request in a span of its own.
pub(crate) async fn request(request: Request, next: Next) -> Response {
    let id = taken_over(request.headers()).unwrap_or_else(fresh);
    let shown = id.to_str().unwrap_or_default();
    let (method, path) = (request.method(), request.uri().path());
    let span = tracing::info_span!("request", id = shown, %method, path);
    let mut response = async {
        let response = bivouac_engine::for_request(shown, next.run(request)).await;
        tracing::debug!(status = response.status().as_u16(), "answered");
        response
    }
    .instrument(span)
    .await;
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID.clone(), id);
    let version = HeaderValue::from_static(env!("CARGO_PKG_VERSION"));
    headers.insert(HeaderName::from_static(VERSION_HEADER), version);
    response
}

fn taken_over(headers: &HeaderMap) -> Option<HeaderValue> {
    let id = headers.get(&REQUEST_ID)?;
    let good = |b: &u8| b.is_ascii_alphanumeric() || b"-_.:".contains(b);
    let bytes = id.as_bytes();
    ((1..=MAX_ID).contains(&bytes.len()) && bytes.iter().all(good)).then(|| id.clone())
}

fn fresh() -> HeaderValue {
    let mut bytes = [0u8; 8];
    // Without randomness the id is zero: a request must not fail for the want of a name.
    let _ = getrandom::fill(&mut bytes);
    let text = format!("req_{:016x}", u64::from_be_bytes(bytes));
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("req"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_harmless_ids_are_taken_over() {
        let with = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(&REQUEST_ID, HeaderValue::from_str(text).unwrap());
            taken_over(&headers).map(|id| id.to_str().unwrap().to_owned())
        };
        assert_eq!(with("abc-1.2:3_4").as_deref(), Some("abc-1.2:3_4"));
        for bad in ["", "a b", "a\"b", &"x".repeat(MAX_ID + 1)] {
            assert_eq!(with(bad), None, "{bad}");
        }
        assert_ne!(fresh(), fresh());
    }
}
