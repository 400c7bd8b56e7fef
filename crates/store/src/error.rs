//! What the database can answer instead of what was asked.

/// Which uniqueness was violated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unique {
    /// The name of a sandbox or drive in its namespace.
    Name,
    /// The idempotency key of a create.
    CreateKey,
    /// A route's subdomain.
    Subdomain,
    /// An id range among sessions that are not settled.
    IdRange,
    /// The idempotency key of a command in its session.
    CommandKey,
    /// The name of a terminal among those that run in a session.
    Terminal,
    /// The name of a token.
    TokenName,
    /// Anything else, an id for example.
    Other,
}

/// The database did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The address names a database that this version cannot use.
    #[error("{0}")]
    Unsupported(String),
    /// Another engine uses it.
    #[error(
        "another engine uses the database {place}: one engine at a time; stop that one, or name another database with --database (an engine whose host lost its power is noticed within a minute)"
    )]
    InUse {
        /// Which, without credentials.
        place: String,
    },
    /// Another engine has taken it over while the connections of this one were cut.
    #[error("another engine has taken the database over; end this one")]
    TakenOver,
    /// The server does not answer, or the connection was cut. Nothing was written: a transaction
    /// ends with its connection, and what could be sent again was, until the patience ended.
    #[error("the database is away: cannot {what}")]
    Away {
        /// What was being done.
        what: &'static str,
        /// The cause.
        #[source]
        source: sqlx::Error,
    },
    /// The connection was cut between a commit and its answer.
    #[error("the database went away before it answered a commit")]
    Unsure {
        /// The cause.
        #[source]
        source: sqlx::Error,
    },
    /// A text holds what the database cannot keep (a NUL); nothing was written.
    #[error("a text holds a NUL")]
    BadText,
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
    /// The vault's key cannot be used.
    #[error("the vault's key {file} {reason}")]
    VaultKey {
        /// Which file.
        file: String,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// Something cannot be sealed or opened; the sentence holds no secret.
    #[error("the vault: {0}")]
    Vault(String),
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

/// Whether a connection is gone, or none can be had. (SQLite never says so.)
pub(crate) fn away(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::Protocol(_) => true,
        // Lost connections, no resources, a server that ends, starts or takes nobody in, a limit of
        // time.
        sqlx::Error::Database(db) => db.code().is_some_and(|code| {
            ["08", "53", "57P0"].iter().any(|class| code.len() == 5 && code.starts_with(class))
                || ["25P03", "55000", "57014"].contains(&&*code)
        }),
        _ => false,
    }
}

impl StoreError {
    /// Sorts a failed statement: a uniqueness that was violated is an answer, not a fault.
    pub(crate) fn sql(what: &'static str, source: sqlx::Error) -> Self {
        if away(&source) {
            return Self::Away { what, source };
        }
        let sqlx::Error::Database(db) = &source else { return Self::Sql { what, source } };
        if db.is_unique_violation() {
            // SQLite names the columns in its text, PostgreSQL the index.
            let text = format!("{} {}", db.message(), db.constraint().unwrap_or(""));
            return Self::Taken(Unique::of(&text));
        }
        // Something that this belongs to has gone, or (PostgreSQL) two transactions waited for each
        // other or for a lock, and this one was ended.
        let code = db.code();
        let code = code.as_deref().unwrap_or("");
        if db.is_foreign_key_violation() || ["40001", "40P01", "55P03"].contains(&code) {
            return Self::Changed { what: format!("what was looked at to {what}") };
        }
        if code == "22021" {
            return Self::BadText;
        }
        Self::Sql { what, source }
    }

    /// Whether the row changed since it was read: read again and retry.
    #[must_use]
    pub fn is_changed(&self) -> bool {
        matches!(self, Self::Changed { .. })
    }

    /// Whether the database is away, as opposed to having said no.
    #[must_use]
    pub fn is_away(&self) -> bool {
        matches!(self, Self::Away { .. } | Self::Unsure { .. } | Self::TakenOver)
    }
}

impl Unique {
    fn of(text: &str) -> Self {
        let has = |part: &str| text.contains(part);
        if has("create_key") {
            Self::CreateKey
        } else if ["sandboxes.name", "sandboxes_name", "drives.name", "drives_name"]
            .iter()
            .any(|name| has(name))
        {
            Self::Name
        } else if has("routes.subdomain") || has("routes_pkey") {
            Self::Subdomain
        } else if has("id_range") {
            Self::IdRange
        } else if has("idempotency_key") {
            Self::CommandKey
        } else if has("commands.terminal") || has("commands_terminal") {
            Self::Terminal
        } else if has("tokens.name") || has("tokens_name") {
            Self::TokenName
        } else {
            Self::Other
        }
    }
}
