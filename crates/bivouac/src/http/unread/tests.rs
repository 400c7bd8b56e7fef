//! Around handlers that read nothing, a part, or all.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::http::StatusCode;
use axum::routing::post;
use axum::{Router, middleware};
use tower::ServiceExt as _;

use super::*;

const PIECES: usize = 50;

/// What the handlers were given, and how many pieces anybody took.
async fn call(path: &str, expect: bool) -> (StatusCode, usize) {
    let router = Router::new()
        .route("/nothing", post(|| async { StatusCode::GONE }))
        .route("/part", post(part))
        .route("/all", post(all))
        .layer(middleware::from_fn(read_away));
    let taken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&taken);
    let pieces = futures_util::stream::iter(0..PIECES).map(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Ok::<_, Infallible>(Bytes::from_static(&[7; 1000]))
    });
    let mut request = Request::post(path).body(Body::from_stream(pieces)).unwrap();
    if expect {
        request.headers_mut().insert(header::EXPECT, "100-continue".parse().unwrap());
    }
    let status = router.oneshot(request).await.unwrap().status();
    (status, taken.load(Ordering::Relaxed))
}

async fn part(body: Body) -> StatusCode {
    let first = body.into_data_stream().next().await.unwrap().unwrap();
    assert_eq!(first.len(), 1000);
    StatusCode::BAD_REQUEST
}

async fn all(body: Bytes) -> StatusCode {
    assert_eq!(body.len(), PIECES * 1000);
    StatusCode::OK
}

#[tokio::test]
async fn the_rest_is_read_before_the_answer() {
    assert_eq!(call("/nothing", false).await, (StatusCode::GONE, PIECES));
    assert_eq!(call("/part", false).await, (StatusCode::BAD_REQUEST, PIECES));
    assert_eq!(call("/all", false).await, (StatusCode::OK, PIECES));
    assert_eq!(call("/unknown", false).await, (StatusCode::NOT_FOUND, PIECES));
}

#[tokio::test]
async fn who_asks_for_leave_first_is_not_made_to_send() {
    assert_eq!(call("/nothing", true).await, (StatusCode::GONE, 0));
    assert_eq!(call("/part", true).await, (StatusCode::BAD_REQUEST, PIECES));
}

#[tokio::test]
async fn a_body_that_never_ends_does_not_hold_the_answer_for_ever() {
    tokio::time::pause();
    let router = Router::new()
        .route("/", post(|| async { StatusCode::GONE }))
        .layer(middleware::from_fn(read_away));
    let silent = futures_util::stream::pending::<Result<Bytes, Infallible>>();
    let request = Request::post("/").body(Body::from_stream(silent)).unwrap();
    assert_eq!(router.oneshot(request).await.unwrap().status(), StatusCode::GONE);
}
