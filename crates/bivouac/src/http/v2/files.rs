//! Files: mkdir, write, read.

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Deserialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::App;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::files;
use crate::http::requests::no_nul;
use crate::http::runs::Target;
use crate::http::scope::{Call, Seg};
use crate::http::views::Empty;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(mkdir)).routes(routes!(write)).routes(routes!(read))
}

/// A path in a sandbox.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct PathBody {
    path: String,
    /// Folder that a relative path is below; the session's by default.
    cwd: Option<String>,
    /// Of mkdir: make parents too, and take a folder that is there. False by default.
    recursive: Option<bool>,
}

impl PathBody {
    fn check(&self) -> Result<(), ApiError> {
        if self.path.is_empty() {
            return Err(ApiError::field("path", "must not be empty"));
        }
        no_nul("path", &self.path)?;
        self.cwd.as_deref().map_or(Ok(()), |cwd| no_nul("cwd", cwd))
    }
}

/// Makes a folder.
pub(crate) async fn make_folder(
    app: &App,
    target: &Target,
    body: &PathBody,
) -> Result<Json<Empty>, ApiError> {
    body.check()?;
    let Target { who, team, session, .. } = target;
    let (cwd, recursive) = (body.cwd.as_deref(), body.recursive.unwrap_or(false));
    app.engine.mkdir(who, team, session, &body.path, cwd, recursive).await?;
    Ok(Json(Empty {}))
}

/// Streams a gzip tar into a sandbox.
pub(crate) async fn write_archive(
    app: &App,
    target: &Target,
    cwd: Option<&str>,
    body: Body,
) -> Result<Json<Empty>, ApiError> {
    let Target { who, team, session, .. } = target;
    let writer = app.engine.write_files(who, team, session, cwd).await?;
    files::upload(body, writer).await?;
    Ok(Json(Empty {}))
}

/// Streams a file out of a sandbox.
pub(crate) async fn read_file(
    app: &App,
    target: &Target,
    body: &PathBody,
) -> Result<Response, ApiError> {
    body.check()?;
    let Target { who, team, session, .. } = target;
    let cwd = body.cwd.as_deref();
    let reader = app.engine.read_file(who, team, session, &body.path, cwd).await?;
    files::download(reader)
}

/// The folder that an archive's names are below: header `x-cwd`, percent-encoding undone by nobody.
pub(crate) fn archive_folder(request: &Request) -> Result<Option<String>, ApiError> {
    let Some(value) = request.headers().get("x-cwd") else { return Ok(None) };
    let text = std::str::from_utf8(value.as_bytes());
    let Ok(text) = text else { return Err(ApiError::field("x-cwd", "is not UTF-8 text")) };
    Ok(Some(text.to_owned()).filter(|text| !text.is_empty()))
}

/// Make a folder
#[utoipa::path(post, path = "/v2/sandboxes/sessions/{id}/fs/mkdir", tag = "files",
    params(("id" = String, Path)), request_body = PathBody,
    responses((status = 200, body = Empty)))]
async fn mkdir(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<PathBody>,
) -> Result<Json<Empty>, ApiError> {
    make_folder(&app, &Target::new(&call, &id, false)?, &body).await
}

/// Write the files of a gzip tar
#[utoipa::path(post, path = "/v2/sandboxes/sessions/{id}/fs/write", tag = "files",
    params(("id" = String, Path),
        ("x-cwd" = Option<String>, Header, description = "absolute folder that names are below")),
    request_body(content = Vec<u8>, content_type = "application/gzip"),
    responses((status = 200, body = Empty)))]
async fn write(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    request: Request,
) -> Result<Json<Empty>, ApiError> {
    let target = Target::new(&call, &id, false)?;
    let cwd = archive_folder(&request)?;
    write_archive(&app, &target, cwd.as_deref(), request.into_body()).await
}

/// Read a file
#[utoipa::path(post, path = "/v2/sandboxes/sessions/{id}/fs/read", tag = "files",
    params(("id" = String, Path)), request_body = PathBody,
    responses((status = 200, body = Vec<u8>, content_type = "application/octet-stream")))]
async fn read(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
    JsonBody(body): JsonBody<PathBody>,
) -> Result<Response, ApiError> {
    read_file(&app, &Target::new(&call, &id, false)?, &body).await
}
