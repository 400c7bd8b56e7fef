//! The schema's history, embedded. Forward only: a released file is never edited.

use sqlx::SqlSafeStr;
use sqlx::migrate::{Migration, MigrationType, Migrator};

/// Number, title and text of every step.
const STEPS: [(i64, &str, &str); 1] = [(1, "start", include_str!("../migrations/0001_start.sql"))];

/// The newest schema that this program knows.
pub(crate) const NEWEST: i64 = STEPS[STEPS.len() - 1].0;

/// All steps, ready to run.
pub(crate) fn migrator() -> Migrator {
    let steps = STEPS.iter().map(|(version, title, sql)| {
        let sql: &'static str = sql;
        Migration::new(*version, (*title).into(), MigrationType::Simple, sql.into_sql_str(), false)
    });
    Migrator::with_migrations(steps.collect())
}
