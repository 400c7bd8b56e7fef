//! What the database can answer instead of what was asked.

/// Which uniqueness was violated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unique {
    /// A sandbox name in its namespace.
    Name,
    /// The idempotency key of a create.
    CreateKey,
    /// A route's subdomain.
    Subdomain,
    /// An id range among sessions that are not settled.
    IdRange,
    /// The idempotency key of a command in its session.
    CommandKey,
    /// Anything else, an id for example.
    Other,
}

/// The database did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The address names a database that this version cannot use.
    #[error("{0}")]
    Unsupported(String),
    /// It cannot be opened.
    #[error("cannot open the database {place}")]
    Open {
        /// Which, without credentials.
        place: String,
        /// The cause.
        #[source]
        source: sqlx::Error,
    },
    /// It holds something that this program did not make.
    #[error(
        "{place} is not a Bivouac database ({found}); name another file with --database or --data-dir"
    )]
    Foreign {
        /// Which.
        place: String,
        /// What was found instead.
        found: String,
    },
    /// A newer version has written it.
    #[error(
        "{place} was written by a newer Bivouac (schema {found}, this one knows up to {known}); start that version or newer"
    )]
    Newer {
        /// Which.
        place: String,
        /// Its schema.
        found: i64,
        /// The newest that this program knows.
        known: i64,
    },
    /// A migration failed; nothing of it was kept.
    #[error("cannot bring the schema of {place} up to date")]
    Migrate {
        /// Which.
        place: String,
        /// The cause.
        #[source]
        source: sqlx::migrate::MigrateError,
    },
    /// The row changed since it was read: nothing was written.
    #[error("{what} changed in the meantime")]
    Changed {
        /// Which row.
        what: String,
    },
    /// The value is taken: nothing was written.
    #[error("already taken: {0:?}")]
    Taken(Unique),
    /// A row does not read back.
    #[error("unreadable row in {table}: {why}")]
    Corrupt {
        /// Which table.
        table: &'static str,
        /// What is wrong with it; never a value of a user.
        why: String,
    },
    /// A statement failed.
    #[error("database: cannot {what}")]
    Sql {
        /// What was being done.
        what: &'static str,
        /// The cause.
        #[source]
        source: sqlx::Error,
    },
}

impl StoreError {
    /// Sorts a failed statement: a uniqueness that was violated is an answer, not a fault.
    pub(crate) fn sql(what: &'static str, source: sqlx::Error) -> Self {
        if let sqlx::Error::Database(db) = &source
            && db.is_unique_violation()
        {
            // SQLite names the columns in its text, PostgreSQL the index.
            let text = format!("{} {}", db.message(), db.constraint().unwrap_or(""));
            let has = |part: &str| text.contains(part);
            return Self::Taken(if has("create_key") {
                Unique::CreateKey
            } else if has("sandboxes.name") || has("sandboxes_name") {
                Unique::Name
            } else if has("routes.subdomain") || has("routes_pkey") {
                Unique::Subdomain
            } else if has("id_range") {
                Unique::IdRange
            } else if has("idempotency_key") {
                Unique::CommandKey
            } else {
                Unique::Other
            });
        }
        Self::Sql { what, source }
    }

    /// Whether the row changed since it was read: read again and retry.
    #[must_use]
    pub fn is_changed(&self) -> bool {
        matches!(self, Self::Changed { .. })
    }
}
