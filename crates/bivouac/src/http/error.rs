//! Errors as clients see them: `{"error": {"code", "message", …}}`.
//!
//! Owns: the map from the engine's kinds to statuses. Invariant: a cause goes to the log and never
//! to the client; a refusal that the client caused is never a 5xx, because the official clients
//! repeat those. Called by every handler through `?`.

use std::error::Error as _;
use std::fmt::Write as _;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bivouac_engine::{Error, ErrorKind};
use bivouac_types::name::Invalid;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Body of every answer that is not a success.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    pub(crate) error: ErrorFields,
}

/// What went wrong.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorFields {
    /// Stable, for programs.
    pub(crate) code: &'static str,
    /// For people.
    pub(crate) message: String,
    /// More fields that belong to the code, for example `bytesWritten`.
    #[serde(flatten)]
    #[schema(value_type = std::collections::BTreeMap<String, Value>)]
    pub(crate) detail: Map<String, Value>,
}

/// A refusal on its way to the client.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    fields: ErrorFields,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let fields = ErrorFields { code, message: message.into(), detail: Map::new() };
        Self { status, fields }
    }

    /// 400 `bad_request`.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    /// 400 `bad_request` that names the field.
    pub(crate) fn field(name: &str, reason: impl Into<String>) -> Self {
        Invalid::new(name, reason).into()
    }

    /// 404 `not_found`.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    pub(crate) fn code(&self) -> &'static str {
        self.fields.code
    }

    pub(crate) fn message(&self) -> &str {
        &self.fields.message
    }

    /// The body alone, for answers whose status line is already sent.
    pub(crate) fn into_body(self) -> ErrorBody {
        ErrorBody { error: self.fields }
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let status = match error.kind {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::Unauthorized => StatusCode::UNAUTHORIZED,
            ErrorKind::Forbidden => StatusCode::FORBIDDEN,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Gone => StatusCode::GONE,
            ErrorKind::Transition => StatusCode::UNPROCESSABLE_ENTITY,
            ErrorKind::TooMany => StatusCode::TOO_MANY_REQUESTS,
            ErrorKind::Timeout => StatusCode::GATEWAY_TIMEOUT,
            ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        if error.kind == ErrorKind::Internal {
            tracing::error!(code = error.code, cause = chain(&error), "{}", error.message);
        } else if error.source.is_some() {
            tracing::debug!(code = error.code, cause = chain(&error), "{}", error.message);
        }
        Self {
            status,
            fields: ErrorFields { code: error.code, message: error.message, detail: error.detail },
        }
    }
}

impl From<Invalid> for ApiError {
    fn from(invalid: Invalid) -> Self {
        Self::invalid(invalid.to_string())
    }
}

/// The causes, outermost first.
fn chain(error: &Error) -> String {
    let (mut text, mut next) = (String::new(), error.source());
    while let Some(cause) = next {
        let _ = write!(text, "{}{cause}", if text.is_empty() { "" } else { ": " });
        next = cause.source();
    }
    text
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = self.status;
        let mut response = (status, Json(self.into_body())).into_response();
        let headers = response.headers_mut();
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::SERVICE_UNAVAILABLE {
            // Official clients wait this long, then repeat.
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_status_and_extra_fields_are_flat() {
        for (kind, status) in [
            (ErrorKind::Invalid, 400),
            (ErrorKind::Unauthorized, 401),
            (ErrorKind::Forbidden, 403),
            (ErrorKind::NotFound, 404),
            (ErrorKind::Conflict, 409),
            (ErrorKind::Gone, 410),
            (ErrorKind::Transition, 422),
            (ErrorKind::TooMany, 429),
            (ErrorKind::Internal, 500),
            (ErrorKind::Unavailable, 503),
            (ErrorKind::Timeout, 504),
        ] {
            let error = Error::new(kind, "some_code", "Something.").with("bytesWritten", 3);
            let error = ApiError::from(error.because(std::io::Error::other("the secret cause")));
            assert_eq!(error.status.as_u16(), status);
            let body = serde_json::to_value(error.into_body()).unwrap();
            let wanted = serde_json::json!({"error":
                {"code": "some_code", "message": "Something.", "bytesWritten": 3}});
            assert_eq!(body, wanted);
        }
    }
}
