//! The schema's history, embedded. Forward only: a released file is never edited.

use sqlx::migrate::{MigrateError, Migration, MigrationType, Migrator};
use sqlx::{AnyConnection, SqlSafeStr};

use crate::error::StoreError;

/// Number, title and text of every step.
const STEPS: [(i64, &str, &str); 5] = [
    (1, "start", include_str!("../migrations/0001_start.sql")),
    (2, "cascade and order", include_str!("../migrations/0002_cascade_and_order.sql")),
    (3, "vault", include_str!("../migrations/0003_vault.sql")),
    (4, "state outside", include_str!("../migrations/0004_state.sql")),
    (5, "boxes", include_str!("../migrations/0005_boxes.sql")),
];

/// The newest schema that this program knows.
const NEWEST: i64 = STEPS[STEPS.len() - 1].0;

fn migrator() -> Migrator {
    let steps = STEPS.iter().map(|(version, title, sql)| {
        let sql: &'static str = sql;
        Migration::new(*version, (*title).into(), MigrationType::Simple, sql.into_sql_str(), false)
    });
    Migrator::with_migrations(steps.collect())
}

/// Brings the schema up to date. On PostgreSQL one process at a time: sqlx takes a lock of the
/// database for it.
pub(crate) async fn run(connection: &mut AnyConnection, place: &str) -> Result<(), StoreError> {
    let place = place.to_owned();
    migrator().run(connection).await.map_err(|source| match source {
        MigrateError::VersionMissing(found) => StoreError::Newer { place, found, known: NEWEST },
        MigrateError::VersionMismatch(version) => StoreError::Foreign {
            place,
            found: format!("its schema step {version} differs from ours"),
        },
        source => StoreError::Migrate { place, source },
    })
}

/// Refuses a database with tables of which none is our mark.
pub(crate) fn check_owner(tables: &[String], place: &str) -> Result<(), StoreError> {
    // A first start that was killed between two steps leaves an empty history behind.
    if tables.iter().any(|n| n == "bivouac") || tables.iter().all(|n| n == "_sqlx_migrations") {
        return Ok(());
    }
    let found = format!("it has a table '{}'", tables[0]);
    Err(StoreError::Foreign { place: place.to_owned(), found })
}
