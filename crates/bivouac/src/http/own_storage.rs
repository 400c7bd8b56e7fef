//! Additions of ours about storage: what things take on disk, and what is kept for nobody.

use axum::Json;
use axum::extract::State;
use bivouac_engine::{Collected, DiskUsage, UsageOf};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::scope::Call;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(usage)).routes(routes!(gc))
}

/// What a sandbox, snapshot or drive takes on disk.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct UsageBody {
    /// `session` (a sandbox that runs), `snapshot` or `drive`; absent when nothing is on disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    /// Its id.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// Bytes of its files; of a sandbox and a snapshot over the image.
    bytes: u64,
    /// Bytes that nothing else shares: what would come back if it were removed. Absent when the storage
    /// cannot tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_bytes: Option<u64>,
    /// Most bytes that it may hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    limit_bytes: Option<u64>,
}

impl UsageBody {
    fn new(of: DiskUsage) -> Self {
        let DiskUsage { measured, usage, limit } = of;
        let (kind, id) = measured.map(|m| (m.kind.as_str(), m.name)).unzip();
        let (bytes, unique_bytes) = (usage.bytes, usage.unique_bytes);
        Self { kind, id, bytes, unique_bytes, limit_bytes: limit }
    }
}

/// Show what a sandbox, snapshot or drive takes on disk
///
/// One of the parameters names what. The numbers come from a walk through its files.
#[utoipa::path(get, path = "/bivouac/v1/usage", tag = "bivouac",
    params(("sandbox" = Option<String>, Query), ("snapshot" = Option<String>, Query),
        ("drive" = Option<String>, Query)),
    responses((status = 200, body = UsageBody)))]
async fn usage(State(app): State<App>, call: Call) -> Result<Json<UsageBody>, ApiError> {
    let of = match (call.owned("sandbox"), call.owned("snapshot"), call.owned("drive")) {
        (Some(name), None, None) => UsageOf::Sandbox(name),
        (None, Some(id), None) => UsageOf::Snapshot(
            bivouac_types::id::SnapshotId::parse(&id)
                .map_err(|error| ApiError::field("snapshot", error.to_string()))?,
        ),
        (None, None, Some(name)) => UsageOf::Drive(name),
        _ => return Err(ApiError::invalid("Name one of sandbox, snapshot and drive.")),
    };
    let usage = app.engine.disk_usage(&call.who, &call.namespace(None)?, of).await?;
    Ok(Json(UsageBody::new(usage)))
}

/// What to do with what nobody wants.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct GcRequest {
    /// Only tell.
    #[serde(default)]
    dry_run: bool,
}

/// What was found, and what was done about it.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct GcBody {
    /// Nothing was changed.
    dry_run: bool,
    /// What is kept for nobody.
    orphans: Vec<OrphanView>,
    /// Records whose data is gone.
    damage: Vec<DamageView>,
    /// Things without a record that are too young to be told from those that are being made.
    young: usize,
    /// Header values that no policy named any more and that were removed.
    header_values: u64,
    /// Bytes that came back, or would.
    freed_bytes: u64,
}

/// Something that is kept for nobody.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct OrphanView {
    /// What it is: session, snapshot, drive, view, logs, certificates, image lease.
    kind: &'static str,
    id: String,
    /// Why nobody wants it.
    reason: &'static str,
    /// Bytes of its files.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    /// Bytes that nothing else shares.
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_bytes: Option<u64>,
    removed: bool,
    /// Why it could not be removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A record whose data is gone.
#[derive(Debug, Serialize, ToSchema)]
struct DamageView {
    kind: &'static str,
    id: String,
    /// What is wrong.
    what: String,
}

impl GcBody {
    fn new(dry_run: bool, found: Collected) -> Self {
        let freed = |usage: &Option<bivouac_engine::StoredUsage>| {
            usage.map_or(0, |usage| usage.unique_bytes.unwrap_or(usage.bytes))
        };
        let counted = found.orphans.iter().filter(|one| dry_run || one.removed);
        let freed_bytes = counted.map(|one| freed(&one.usage)).sum();
        let orphans = found.orphans.into_iter().map(|one| OrphanView {
            kind: one.kind,
            id: one.name,
            reason: one.reason,
            bytes: one.usage.map(|usage| usage.bytes),
            unique_bytes: one.usage.and_then(|usage| usage.unique_bytes),
            removed: one.removed,
            error: one.error,
        });
        let damage = found.damage.into_iter();
        Self {
            dry_run,
            orphans: orphans.collect(),
            damage: damage.map(|d| DamageView { kind: d.kind, id: d.name, what: d.what }).collect(),
            young: found.young,
            header_values: found.values,
            freed_bytes,
        }
    }
}

/// Remove what the host keeps for nobody
///
/// Sessions, snapshots, drives, logs and certificates without a record, and images that are kept from being
/// removed although nothing lies on them. Records whose data is gone are told, and marked. What is younger
/// than the oldest operation in the middle of its steps is left alone.
#[utoipa::path(post, path = "/bivouac/v1/gc", tag = "bivouac",
    request_body = GcRequest, responses((status = 200, body = GcBody)))]
async fn gc(
    State(app): State<App>,
    call: Call,
    JsonBody(request): JsonBody<GcRequest>,
) -> Result<Json<GcBody>, ApiError> {
    let found = app.engine.collect_garbage(&call.who, request.dry_run).await?;
    Ok(Json(GcBody::new(request.dry_run, found)))
}
