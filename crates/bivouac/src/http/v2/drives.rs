//! Drives: list, get or make, show, delete, fork: reference/vercel-api.md §2.12. (What only we have is in
//! `own_drives`.)

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use bivouac_engine::{DriveView as View, ListDrives, NewDrive, Page, SortDrives};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::App;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::scope::{Call, Seg};
use crate::http::views::Pagination;

/// Most items of a page.
const MAX_LIMIT: u32 = 50;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(create, get, delete))
        .routes(routes!(fork))
}

/// A volume that outlives sandboxes.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DriveView {
    id: String,
    name: String,
    project_id: String,
    region: String,
    /// Most bytes that it may hold.
    max_size_bytes: i64,
    created_at: i64,
    updated_at: i64,
    /// The session that has it mounted for writing.
    #[serde(skip_serializing_if = "Option::is_none")]
    current_session_id: Option<String>,
    /// The sandbox of that session.
    #[serde(skip_serializing_if = "Option::is_none")]
    current_sandbox_name: Option<String>,
    /// The drive that it was forked from.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_drive_id: Option<String>,
    /// The first one of its ancestry.
    #[serde(skip_serializing_if = "Option::is_none")]
    root_drive_id: Option<String>,
    /// Whether it was ever mounted for writing, or written: only then are there snapshots of it.
    initialized: bool,
}

impl From<&View> for DriveView {
    fn from(view: &View) -> Self {
        let d = &view.drive;
        Self {
            id: d.id.to_string(),
            name: d.name.clone(),
            project_id: d.namespace.project.clone(),
            region: d.region.clone(),
            max_size_bytes: d.max_bytes,
            created_at: d.created_at,
            updated_at: d.updated_at,
            current_session_id: d.writer.as_ref().map(ToString::to_string),
            current_sandbox_name: view.writer.clone(),
            parent_drive_id: d.parent_id.as_ref().map(ToString::to_string),
            root_drive_id: d.root_id.as_ref().map(ToString::to_string),
            initialized: d.initialized,
        }
    }
}

/// Answer with a drive.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DriveBody {
    drive: DriveView,
}

impl DriveBody {
    fn of(view: &View) -> Self {
        Self { drive: view.into() }
    }
}

/// Answer with a page of drives.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DrivesBody {
    drives: Vec<DriveView>,
    pagination: Pagination,
}

impl From<&Page<View>> for DrivesBody {
    fn from(page: &Page<View>) -> Self {
        let drives = page.items.iter().map(DriveView::from).collect();
        Self { drives, pagination: Pagination::of(page) }
    }
}

/// Body of a get-or-create.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct CreateDriveBody {
    /// Id or slug.
    project_id: Option<String>,
    region: Option<String>,
    /// Bytes; 1 TiB by default.
    max_size_bytes: Option<i64>,
}

/// Body of a fork.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct ForkDriveBody {
    /// Id or slug.
    project_id: Option<String>,
    /// Of the new drive.
    name: String,
}

fn list_query(call: &Call) -> Result<ListDrives, ApiError> {
    let sort_by = match call.text("sortBy") {
        None | Some("createdAt") => SortDrives::CreatedAt,
        Some("updatedAt") => SortDrives::UpdatedAt,
        Some("name") => SortDrives::Name,
        Some(_) => {
            let reason = "must be 'createdAt', 'updatedAt' or 'name'";
            return Err(ApiError::field("sortBy", reason));
        }
    };
    Ok(ListDrives {
        limit: call.limit(MAX_LIMIT)?,
        cursor: call.owned("cursor"),
        sort_by,
        ascending: call.ascending()?,
        name_prefix: call.owned("namePrefix"),
    })
}

/// List drives
#[utoipa::path(get, path = "/v2/sandboxes/drives", tag = "drives",
    params(("limit" = Option<u32>, Query), ("cursor" = Option<String>, Query),
        ("sortBy" = Option<String>, Query, description = "createdAt, updatedAt or name"),
        ("sortOrder" = Option<String>, Query), ("namePrefix" = Option<String>, Query)),
    responses((status = 200, body = DrivesBody)))]
async fn list(State(app): State<App>, call: Call) -> Result<Json<DrivesBody>, ApiError> {
    let (namespace, query) = (call.namespace(None)?, list_query(&call)?);
    let page = app.engine.drives(&call.who, &namespace, query).await?;
    Ok(Json(DrivesBody::from(&page)))
}

/// Get a drive, or make it
#[utoipa::path(post, path = "/v2/sandboxes/drives/{name}", tag = "drives",
    params(("name" = String, Path)), request_body = CreateDriveBody,
    responses((status = 200, body = DriveBody, description = "it was there"),
        (status = 201, body = DriveBody, description = "it was made")))]
async fn create(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<CreateDriveBody>,
) -> Result<(StatusCode, Json<DriveBody>), ApiError> {
    let namespace = call.namespace(body.project_id.as_deref())?;
    let wanted = NewDrive { region: body.region, max_bytes: body.max_size_bytes };
    let (view, made) = app.engine.get_or_create_drive(&call.who, &namespace, &name, wanted).await?;
    let status = if made { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(DriveBody::of(&view))))
}

/// Show a drive, by name or id
#[utoipa::path(get, path = "/v2/sandboxes/drives/{name}", tag = "drives",
    params(("name" = String, Path)), responses((status = 200, body = DriveBody)))]
async fn get(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<DriveBody>, ApiError> {
    let view = app.engine.drive(&call.who, &call.namespace(None)?, &name).await?;
    Ok(Json(DriveBody::of(&view)))
}

/// Delete a drive and all that it holds
#[utoipa::path(delete, path = "/v2/sandboxes/drives/{name}", tag = "drives",
    params(("name" = String, Path)), responses((status = 200, body = DriveBody)))]
async fn delete(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<DriveBody>, ApiError> {
    let view = app.engine.delete_drive(&call.who, &call.namespace(None)?, &name).await?;
    Ok(Json(DriveBody::of(&view)))
}

/// Make a drive out of another one as it is at this moment
#[utoipa::path(post, path = "/v2/sandboxes/drives/{name}/fork", tag = "drives",
    params(("name" = String, Path)), request_body = ForkDriveBody,
    responses((status = 201, body = DriveBody)))]
async fn fork(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<ForkDriveBody>,
) -> Result<(StatusCode, Json<DriveBody>), ApiError> {
    let namespace = call.namespace(body.project_id.as_deref())?;
    let view = app.engine.fork_drive(&call.who, &namespace, &name, &body.name).await?;
    Ok((StatusCode::CREATED, Json(DriveBody::of(&view))))
}
