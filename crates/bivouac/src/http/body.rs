//! JSON bodies.
//!
//! Invariant: an empty body is `{}` whatever its content type says (the official SDK sends one), a
//! body has a size and a time limit, and a refusal names the field and what is accepted there, never
//! the value: values may be secrets.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use serde::de::DeserializeOwned;

use super::error::ApiError;

/// Largest JSON body.
pub(crate) const MAX_JSON: usize = 4 * 1024 * 1024;
/// Longest time for a whole JSON body.
const MAX_TIME: Duration = Duration::from_secs(30);

/// A JSON body read into `T`.
#[derive(Debug)]
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let read = collect(request.into_body(), MAX_JSON);
        let Ok(bytes) = tokio::time::timeout(MAX_TIME, read).await else {
            let message = format!("The body did not arrive within {} s.", MAX_TIME.as_secs());
            return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", message));
        };
        parse(&bytes?).map(Self)
    }
}

async fn collect(mut body: Body, most: usize) -> Result<Bytes, ApiError> {
    let mut out = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::invalid("The body could not be read whole."))?;
        if let Ok(data) = frame.into_data() {
            if out.len() + data.len() > most {
                let message = format!("The body is larger than {most} bytes.");
                let status = StatusCode::PAYLOAD_TOO_LARGE;
                return Err(ApiError::new(status, "payload_too_large", message));
            }
            out.extend_from_slice(&data);
        }
    }
    Ok(out.freeze())
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = bytes.trim_ascii();
    // Serde would also read an object out of a list, by position.
    if bytes.starts_with(b"[") {
        return Err(ApiError::field("body", "expected an object"));
    }
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|e| explain(&e))?;
    if reader.end().is_err() {
        return Err(ApiError::invalid("The body holds more than one JSON value."));
    }
    Ok(value)
}

/// Serde's message without the value that it quotes.
fn explain(error: &serde_path_to_error::Error<serde_json::Error>) -> ApiError {
    let inner = error.inner();
    if inner.is_syntax() || inner.is_eof() {
        let (line, column) = (inner.line(), inner.column());
        return ApiError::invalid(format!(
            "The body is not JSON: error at line {line}, column {column}."
        ));
    }
    let path = error.path().to_string();
    let field = if path == "." { "body" } else { path.as_str() };
    let text = inner.to_string();
    let reason = if let Some(name) = text.strip_prefix("missing field `") {
        format!("'{}' is missing", name.split('`').next().unwrap_or_default())
    } else if let Some((_, wanted)) = text.rsplit_once(", expected ") {
        let wanted = wanted.split(" at line ").next().unwrap_or(wanted);
        // The name of a type of ours tells a client nothing.
        let wanted = if wanted.starts_with("struct ") { "an object" } else { wanted };
        format!("expected {wanted}")
    } else {
        "is not accepted".to_owned()
    };
    ApiError::field(field, reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::collections::BTreeMap;

    #[derive(Debug, Deserialize)]
    struct Inner {
        #[allow(dead_code)]
        vcpus: i64,
    }

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)]
    struct Outer {
        resources: Option<Inner>,
        env: Option<BTreeMap<String, String>>,
    }

    #[test]
    fn an_empty_body_is_an_empty_object() {
        for empty in ["", " \n", "{}"] {
            assert!(parse::<Outer>(empty.as_bytes()).is_ok());
        }
    }

    #[test]
    fn refusals_name_the_field_and_not_the_value() {
        for (body, wanted) in [
            (r#"{"resources":{"vcpus":"S3CRET"}}"#, "Invalid resources.vcpus: expected i64"),
            (r#"{"resources":{"vcpus":1.5}}"#, "Invalid resources.vcpus: expected i64"),
            (r#"{"resources":{}}"#, "Invalid resources: 'vcpus' is missing"),
            (r#"{"env":"S3CRET"}"#, "Invalid env: expected a map"),
            (r#"{"env":{"A":["S3CRET"]}}"#, "Invalid env.A: expected a string"),
            (r#"["S3CRET"]"#, "Invalid body: expected an object"),
            (r#""S3CRET, expected S3CRET""#, "Invalid body: expected an object"),
            (r#"{"resources":"S3CRET, expected S3CRET"}"#, "Invalid resources: expected an object"),
            ("{", "The body is not JSON: error at line 1, column 1."),
            ("{} {}", "The body holds more than one JSON value."),
        ] {
            let error = parse::<Outer>(body.as_bytes()).expect_err(body);
            assert!(error.message().starts_with(wanted), "{body}: {}", error.message());
            assert!(!error.message().contains("S3CRET"), "{}", error.message());
        }
    }

    #[tokio::test]
    async fn too_much_is_refused() {
        let body = Body::from(vec![b' '; 11]);
        assert_eq!(collect(body, 10).await.expect_err("limit").code(), "payload_too_large");
        assert!(collect(Body::from(vec![b' '; 10]), 10).await.is_ok());
    }
}
