//! Additions of ours about snapshots: as archives, out and in. Below `/api/bivouac/v1`.
//!
//! Invariant: nothing of an archive is held in memory or on disk on its way through; a client that goes away
//! ends both sides. Asked by `bivouac snapshots export` and `import`.

use std::collections::BTreeMap;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use bivouac_engine::{Error, Format, ImportSpec};
use rustix::pipe::{PipeFlags, pipe_with};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::error::ApiError;
use super::files;
use super::requests::expiration;
use super::scope::{Call, Seg, snapshot_id};
use super::views::{SnapshotBody, SnapshotView};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(export)).routes(routes!(import))
}

/// The form of an archive: what it is called, how its file ends, what it is.
fn format_of(word: &str) -> Option<(Format, &'static str, &'static str)> {
    match word {
        "tar.zst" => Some((Format::TarZst, "tar.zst", "application/zstd")),
        "oci" => Some((Format::Oci, "oci.tar", "application/x-tar")),
        _ => None,
    }
}

/// Read a snapshot as an archive: what it changed of its image, or the whole as an OCI image
#[utoipa::path(get, path = "/bivouac/v1/snapshots/{id}/export", tag = "bivouac",
    params(("id" = String, Path),
        ("format" = Option<String>, Query, description = "tar.zst (the default) or oci")),
    responses((status = 200, description = "the archive, as it is made", content_type = "application/zstd",
        body = Vec<u8>)))]
async fn export(
    State(app): State<App>,
    call: Call,
    Seg(id): Seg<String>,
) -> Result<Response, ApiError> {
    let (id, team) = (snapshot_id(&id)?, call.team()?);
    let Some((format, ending, kind)) = format_of(call.text("format").unwrap_or("tar.zst")) else {
        return Err(ApiError::field("format", "must be 'tar.zst' or 'oci'"));
    };
    let reader = app.engine.export_snapshot(&call.who, &team, &id, format).await?;
    let mut response = files::download(reader)?;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    // An id is letters, digits and underscores.
    if let Ok(name) = HeaderValue::from_str(&format!("attachment; filename=\"{id}.{ending}\"")) {
        headers.insert(header::CONTENT_DISPOSITION, name);
    }
    Ok(response)
}

/// Take in the archive of a snapshot; answers when it is whole and on disk
#[utoipa::path(post, path = "/bivouac/v1/snapshots/import", tag = "bivouac",
    params(("name" = Option<String>, Query, description = "name of its sandbox, for lists"),
        ("labels" = Option<String>, Query, description = "a JSON object of texts, over the archive's own"),
        ("onto" = Option<String>, Query, description = "the image to put it on, whatever it was taken of"),
        ("expiration" = Option<i64>, Query, description = "ms after its last use; 0 is never")),
    request_body(content = Vec<u8>, content_type = "application/zstd"),
    responses((status = 201, body = SnapshotBody)))]
async fn import(
    State(app): State<App>,
    call: Call,
    request: Request,
) -> Result<(StatusCode, Json<SnapshotBody>), ApiError> {
    let labels: BTreeMap<String, String> = match call.text("labels") {
        None => BTreeMap::new(),
        Some(text) => serde_json::from_str(text)
            .map_err(|_| ApiError::field("labels", "must be a JSON object of texts"))?,
    };
    let spec = ImportSpec {
        name: call.owned("name"),
        labels,
        onto: call.owned("onto"),
        expiration_ms: call.number("expiration")?.map(expiration).transpose()?,
    };
    let namespace = call.namespace(None)?;
    let body: Body = request.into_body();
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)
        .map_err(|e| Error::internal("The host has no pipe left.").because(e))?;
    let work = app.engine.import_snapshot(&call.who, &namespace, spec, read);
    let snapshot = files::pour(body, write, work).await?;
    let snapshot = SnapshotView::from(&snapshot);
    Ok((StatusCode::CREATED, Json(SnapshotBody { snapshot })))
}
