//! Additions of ours to the API, below `/api/bivouac/v1`: what the command line asks beyond the
//! public calls.

use axum::Json;
use axum::extract::State;
use bivouac_runtime::pool::{CheckState, Storage};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::error::ApiError;
use super::scope::Call;
use super::stand_in::StandIn;
use super::v2::sandboxes::{SandboxesBody, list_query, listed};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(engine)).routes(routes!(sandboxes))
}

/// The engine itself.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct EngineBody {
    version: String,
    /// Process id; this and what else tells of the host is told to administrators only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    /// This host's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_dir: Option<String>,
    /// Image of a create that names none.
    image: String,
    started_at: i64,
    /// How many sessions are alive.
    #[serde(skip_serializing_if = "Option::is_none")]
    sessions: Option<usize>,
    /// Images that a create may name.
    images: Vec<String>,
    /// How volumes are kept, and how full that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    storage: Option<StorageBody>,
    /// With `--clients-tls`: how clients reach it under the original's names.
    #[serde(skip_serializing_if = "Option::is_none")]
    clients_tls: Option<StandIn>,
}

/// How the engine keeps volumes.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct StorageBody {
    /// `loop` (a btrfs in a file, which grows), `native` (a btrfs of its own) or `folder` (plain folders).
    mode: &'static str,
    /// Bytes that it may hold at present.
    size: u64,
    /// Bytes in use.
    used: u64,
    /// Bytes that may still be used, what the pool can grow by included.
    free: u64,
    /// Bytes of the data folder's file system that are kept free.
    reserve: u64,
    /// Whether the disk limits of sandboxes hold.
    limits: bool,
    /// What the check after the last unclean end found, when there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<StorageCheckBody>,
}

/// A check of the storage: everything is read and compared with its checksums.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct StorageCheckBody {
    /// `running`, `clean`, `damaged` or `failed`.
    state: &'static str,
    started_at: i64,
    /// Bytes that were read and compared.
    bytes: u64,
    /// Blocks that are not what was written, or could not be read.
    errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

impl From<Storage> for StorageBody {
    fn from(storage: Storage) -> Self {
        let check = storage.check.map(|check| StorageCheckBody {
            state: match check.state {
                CheckState::Running => "running",
                CheckState::Clean => "clean",
                CheckState::Damaged => "damaged",
                CheckState::Failed => "failed",
            },
            started_at: check.started_at,
            bytes: check.bytes,
            errors: check.errors,
            note: check.note,
        });
        let Storage { mode, size, used, free, reserve, limits, .. } = storage;
        Self { mode: mode.name(), size, used, free, reserve, limits, check }
    }
}

/// Show the engine
#[utoipa::path(get, path = "/bivouac/v1/engine", tag = "bivouac",
    responses((status = 200, body = EngineBody)))]
async fn engine(State(app): State<App>, call: Call) -> Result<Json<EngineBody>, ApiError> {
    let info = &app.info;
    let rules = call.who.grant.rules();
    let storage = match rules {
        true => app.engine.storage().await?.map(StorageBody::from),
        false => None,
    };
    Ok(Json(EngineBody {
        version: info.version.clone(),
        pid: rules.then_some(info.pid),
        node: rules.then(|| info.node.clone()),
        data_dir: rules.then(|| info.data_dir.clone()),
        image: app.engine.default_image().await,
        started_at: info.started_at,
        sessions: rules.then(|| app.engine.live_sessions()),
        images: app.engine.images().await?,
        storage,
        clients_tls: info.clients_tls.clone(),
    }))
}

/// List sandboxes with their namespaces; with `all=true` those of every namespace
#[utoipa::path(get, path = "/bivouac/v1/sandboxes", tag = "bivouac",
    params(("all" = Option<bool>, Query), ("limit" = Option<u32>, Query),
        ("cursor" = Option<String>, Query), ("sortBy" = Option<String>, Query),
        ("sortOrder" = Option<String>, Query), ("namePrefix" = Option<String>, Query),
        ("tags" = Option<String>, Query)),
    responses((status = 200, body = SandboxesBody)))]
async fn sandboxes(State(app): State<App>, call: Call) -> Result<Json<SandboxesBody>, ApiError> {
    let (namespace, mut query) = (call.namespace(None)?, list_query(&call)?);
    query.all_namespaces = call.flag("all")?;
    let page = app.engine.list(&call.who, &namespace, query).await?;
    Ok(Json(SandboxesBody::new(&page, |sandbox| {
        listed(&app, sandbox).with_namespace(&sandbox.namespace)
    })))
}
