//! Drives: every call is refused, with a sentence that says so, until they arrive.

use axum::Json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::App;
use crate::http::error::ApiError;
use crate::http::scope::Call;
use crate::http::views::Empty;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(create, get, delete))
        .routes(routes!(fork))
}

fn later(call: &Call) -> Result<Json<Empty>, ApiError> {
    call.namespace(None)?;
    Err(ApiError::not_supported("Drives"))
}

/// List drives: arrives with a later release
#[utoipa::path(get, path = "/v2/sandboxes/drives", tag = "drives",
    responses((status = 200, body = Empty, description = "never in this release")))]
async fn list(call: Call) -> Result<Json<Empty>, ApiError> {
    later(&call)
}

/// Get or make a drive: arrives with a later release
#[utoipa::path(post, path = "/v2/sandboxes/drives/{name}", tag = "drives",
    params(("name" = String, Path)),
    responses((status = 200, body = Empty, description = "never in this release")))]
async fn create(call: Call) -> Result<Json<Empty>, ApiError> {
    later(&call)
}

/// Show a drive: arrives with a later release
#[utoipa::path(get, path = "/v2/sandboxes/drives/{name}", tag = "drives",
    params(("name" = String, Path)),
    responses((status = 200, body = Empty, description = "never in this release")))]
async fn get(call: Call) -> Result<Json<Empty>, ApiError> {
    later(&call)
}

/// Delete a drive: arrives with a later release
#[utoipa::path(delete, path = "/v2/sandboxes/drives/{name}", tag = "drives",
    params(("name" = String, Path)),
    responses((status = 200, body = Empty, description = "never in this release")))]
async fn delete(call: Call) -> Result<Json<Empty>, ApiError> {
    later(&call)
}

/// Fork a drive: arrives with a later release
#[utoipa::path(post, path = "/v2/sandboxes/drives/{name}/fork", tag = "drives",
    params(("name" = String, Path)),
    responses((status = 200, body = Empty, description = "never in this release")))]
async fn fork(call: Call) -> Result<Json<Empty>, ApiError> {
    later(&call)
}
