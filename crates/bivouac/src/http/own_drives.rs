//! Additions of ours about drives: attach and detach on a running sandbox, what one holds, its files.
//!
//! Invariant: a file goes in whole or not at all: its size is told before its bytes. Asked by
//! `bivouac drive`.

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::Response;
use bivouac_engine::{Attachment, DriveEntry, EntryKind};
use bivouac_types::drive::{DriveMode, Mount};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::files;
use super::requests::{no_nul, place};
use super::scope::{Call, Seg};
use super::v2::drives::DriveView;

/// Permissions of a file that is given none.
const MODE: u32 = 0o644;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(attach))
        .routes(routes!(detach))
        .routes(routes!(usage))
        .routes(routes!(list))
        .routes(routes!(read, write))
}

/// Body of an attach.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct AttachBody {
    /// Name of the sandbox.
    sandbox: String,
    /// Absolute path inside.
    path: String,
    /// `read-write` (the default) or `snapshot`.
    mode: Option<String>,
}

/// Body of a detach.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DetachBody {
    /// Name of the sandbox.
    sandbox: String,
    /// Where it is, when it is at several places.
    path: Option<String>,
    /// Also when it is in use: what has it open is cut off from it, and goes on.
    force: Option<bool>,
}

/// Answer to an attach or a detach.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct AttachmentBody {
    drive: String,
    sandbox: String,
    path: String,
    /// `read-write` or `snapshot`.
    mode: &'static str,
    /// The running session has (or had) it, not only the next one.
    live: bool,
}

impl From<Attachment> for AttachmentBody {
    fn from(of: Attachment) -> Self {
        let Attachment { drive, sandbox, path, mode, live } = of;
        Self { drive, sandbox, path, mode: mode.as_str(), live }
    }
}

/// Answer with what a drive holds.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct DriveUsageBody {
    drive: DriveView,
    /// Bytes of its files.
    used_bytes: u64,
    /// Bytes that would come back if it were deleted; absent where this cannot be told.
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_bytes: Option<u64>,
}

/// An entry of a folder.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DriveEntryView {
    name: String,
    /// `file`, `folder`, `link` or `other`.
    kind: &'static str,
    size: u64,
    /// Permissions.
    mode: u32,
    uid: u32,
    gid: u32,
    modified_at: i64,
    /// Where a link leads; it is never followed.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
}

impl From<DriveEntry> for DriveEntryView {
    fn from(e: DriveEntry) -> Self {
        Self {
            name: e.name,
            kind: match e.kind {
                EntryKind::File => "file",
                EntryKind::Folder => "folder",
                EntryKind::Link => "link",
                EntryKind::Other => "other",
            },
            size: e.size,
            mode: e.mode,
            uid: e.owner.0,
            gid: e.owner.1,
            modified_at: e.modified_at,
            target: e.target,
        }
    }
}

/// Answer with a folder of a drive.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct DriveFilesBody {
    entries: Vec<DriveEntryView>,
    /// There are more than the 10,000 that are shown.
    more: bool,
}

/// Answer to a write.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct WrittenBody {
    path: String,
    size: u64,
}

fn path_of(call: &Call) -> Result<&str, ApiError> {
    let path = call.text("path").unwrap_or("/");
    no_nul("path", path)?;
    Ok(path)
}

/// Give a sandbox a drive, in its running session and for those to come
#[utoipa::path(post, path = "/bivouac/v1/drives/{name}/attach", tag = "drives",
    params(("name" = String, Path)), request_body = AttachBody,
    responses((status = 200, body = AttachmentBody)))]
async fn attach(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<AttachBody>,
) -> Result<Json<AttachmentBody>, ApiError> {
    let mode = body.mode.as_deref().map(DriveMode::parse).transpose()?.unwrap_or_default();
    let (namespace, mount) = (call.namespace(None)?, Mount { drive: name, mode });
    let path = place(&body.path);
    let done = app.engine.attach_drive(&call.who, &namespace, &body.sandbox, path, mount).await?;
    Ok(Json(done.into()))
}

/// Take a drive from a sandbox, in its running session and for those to come
#[utoipa::path(post, path = "/bivouac/v1/drives/{name}/detach", tag = "drives",
    params(("name" = String, Path)), request_body = DetachBody,
    responses((status = 200, body = AttachmentBody)))]
async fn detach(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<DetachBody>,
) -> Result<Json<AttachmentBody>, ApiError> {
    let namespace = call.namespace(None)?;
    let (path, force) = (body.path.as_deref().map(place), body.force.unwrap_or(false));
    let done =
        app.engine.detach_drive(&call.who, &namespace, &name, &body.sandbox, path, force).await?;
    Ok(Json(done.into()))
}

/// Show what a drive holds
#[utoipa::path(get, path = "/bivouac/v1/drives/{name}/usage", tag = "drives",
    params(("name" = String, Path)), responses((status = 200, body = DriveUsageBody)))]
async fn usage(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<DriveUsageBody>, ApiError> {
    let (view, usage) = app.engine.drive_usage(&call.who, &call.namespace(None)?, &name).await?;
    Ok(Json(DriveUsageBody {
        drive: DriveView::from(&view),
        used_bytes: usage.bytes,
        unique_bytes: usage.unique_bytes,
    }))
}

/// List a folder of a drive
#[utoipa::path(get, path = "/bivouac/v1/drives/{name}/files", tag = "drives",
    params(("name" = String, Path),
        ("path" = Option<String>, Query, description = "of the folder; the drive's root by default")),
    responses((status = 200, body = DriveFilesBody)))]
async fn list(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<DriveFilesBody>, ApiError> {
    let (namespace, path) = (call.namespace(None)?, path_of(&call)?);
    let (entries, more) = app.engine.list_drive_files(&call.who, &namespace, &name, path).await?;
    let entries = entries.into_iter().map(DriveEntryView::from).collect();
    Ok(Json(DriveFilesBody { entries, more }))
}

/// Read a file of a drive
#[utoipa::path(get, path = "/bivouac/v1/drives/{name}/file", tag = "drives",
    params(("name" = String, Path), ("path" = String, Query)),
    responses((status = 200, body = Vec<u8>, content_type = "application/octet-stream")))]
async fn read(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Response, ApiError> {
    let (namespace, path) = (call.namespace(None)?, path_of(&call)?);
    files::download(app.engine.read_drive_file(&call.who, &namespace, &name, path).await?)
}

/// Write a file of a drive that no sandbox has mounted for writing
#[utoipa::path(put, path = "/bivouac/v1/drives/{name}/file", tag = "drives",
    params(("name" = String, Path), ("path" = String, Query),
        ("mode" = Option<String>, Query, description = "permissions, octal; 644 by default")),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, body = WrittenBody)))]
async fn write(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    request: Request,
) -> Result<Json<WrittenBody>, ApiError> {
    let (namespace, path) = (call.namespace(None)?, path_of(&call)?);
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let Some(size) = length else {
        let message = "A file needs its size: send it with a Content-Length.";
        return Err(ApiError::new(StatusCode::LENGTH_REQUIRED, "length_required", message));
    };
    let mode = match call.text("mode") {
        None => MODE,
        Some(text) => u32::from_str_radix(text, 8)
            .ok()
            .filter(|mode| *mode <= 0o777)
            .ok_or_else(|| ApiError::field("mode", "must be octal, at most 777"))?,
    };
    let what = (path, size, mode);
    let writer = app.engine.write_drive_file(&call.who, &namespace, &name, what).await?;
    let path = path.to_owned();
    files::upload(request.into_body(), writer).await?;
    Ok(Json(WrittenBody { path, size }))
}
