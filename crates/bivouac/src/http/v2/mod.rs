//! `/v2`, with the creates of `/v3` and `/v4`: named sandboxes and their sessions.
//!
//! Thin: each handler reads its request, makes one call of the engine and shows the result.

pub(super) mod commands;
pub(super) mod drives;
pub(super) mod files;
pub(super) mod sandboxes;
pub(super) mod sessions;
mod snapshots;

use utoipa_axum::router::OpenApiRouter;

use super::App;

pub(crate) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .merge(sandboxes::routes())
        .merge(sessions::routes())
        .merge(commands::routes())
        .merge(files::routes())
        .merge(snapshots::routes())
        .merge(drives::routes())
}
