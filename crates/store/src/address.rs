//! Where the database is.
//!
//! Owns: [`Address`], the meaning of `--database`. Invariant: what it shows (`Display`, `Debug`)
//! names a file, or host and database, and never a password, a user or an option of the address.
//! Called by the composition root, which gets it from a flag or the environment.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use sqlx::ConnectOptions;
use sqlx::any::AnyConnectOptions;

use crate::error::StoreError;

/// What an address of PostgreSQL may say after its `?`. Everything else is refused: sqlx would only
/// log it, value included.
const OPTIONS: [&str; 9] =
    ["host", "port", "user", "password", "dbname", "sslmode", "sslrootcert", "sslcert", "sslkey"];

/// Where the database is: a file of SQLite, or a database of a PostgreSQL server.
#[derive(Clone)]
pub struct Address(pub(crate) Kind);

#[derive(Clone)]
pub(crate) enum Kind {
    Sqlite(PathBuf),
    Postgres(Postgres),
}

/// A database of a server.
#[derive(Clone)]
pub(crate) struct Postgres {
    pub(crate) options: AnyConnectOptions,
    /// For messages.
    pub(crate) place: String,
    password: bool,
}

impl Address {
    /// A file of SQLite.
    #[must_use]
    pub fn file(path: &Path) -> Self {
        Self(Kind::Sqlite(path.to_owned()))
    }

    /// Reads `sqlite:PATH` or `postgres://[USER[:PASSWORD]@][HOST[:PORT]]/DATABASE[?OPTION=…]`. A
    /// socket's folder goes into `?host=/FOLDER`. What is left out comes from `PGHOST`, `PGPORT`,
    /// `PGUSER`, `PGPASSWORD`, `PGPASSFILE`, `PGDATABASE` and `PGSSLMODE`, as with psql.
    ///
    /// # Errors
    /// [`StoreError::Unsupported`]; its text never repeats what could be a secret.
    pub fn parse(url: &str) -> Result<Self, StoreError> {
        let bad = |text: &str| StoreError::Unsupported(text.to_owned());
        if let Some(path) = url.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() || path.contains('?') || path.starts_with(":memory") {
                return Err(bad("write sqlite:PATH of a file"));
            }
            return Ok(Self::file(Path::new(path)));
        }
        if !(url.starts_with("postgres://") || url.starts_with("postgresql://")) {
            return Err(bad("write sqlite:PATH of a file, or postgres://USER@HOST/DATABASE"));
        }
        sqlx::any::install_default_drivers();
        // The parser's error names a character, not the text.
        let options = AnyConnectOptions::from_str(url).map_err(|error| {
            StoreError::Unsupported(format!("this is no address of PostgreSQL: {error}"))
        })?;
        let url = options.database_url.clone();
        let mut host = url.host_str().unwrap_or("").to_owned();
        let mut port = url.port().map(|p| p.to_string());
        let mut database = url.path().trim_start_matches('/').to_owned();
        let mut password = url.password().is_some();
        for (key, value) in url.query_pairs() {
            match &*key {
                "host" => host = value.into_owned(),
                "port" => port = Some(value.into_owned()),
                "dbname" => database = value.into_owned(),
                "password" => password = true,
                key if OPTIONS.contains(&key) => {}
                _ => {
                    return Err(StoreError::Unsupported(format!(
                        "an option after '?' in the address of PostgreSQL is not known; there are: {}",
                        OPTIONS.join(", ")
                    )));
                }
            }
        }
        if host.contains('%') {
            host = "a socket".to_owned();
        }
        let port = port.map(|p| format!(":{p}")).unwrap_or_default();
        let place = format!("postgres://{host}{port}/{database}");
        // Statements are not for the log: they hold names and variables of users.
        let options = options.disable_statement_logging();
        Ok(Self(Kind::Postgres(Postgres { options, place, password })))
    }

    /// Whether the address itself holds a password: then it must not be an argument of a process,
    /// which everybody on the machine can read.
    #[must_use]
    pub fn has_password(&self) -> bool {
        matches!(&self.0, Kind::Postgres(Postgres { password: true, .. }))
    }

    /// The same place with another file, for a relative path.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match &self.0 {
            Kind::Sqlite(path) => Some(path),
            Kind::Postgres(_) => None,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Sqlite(path) => path.display().fmt(f),
            Kind::Postgres(server) => f.write_str(&server.place),
        }
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_holds_no_secret() {
        let cases = [
            ("postgres://u:hunter2@h:5433/d?sslmode=require", "postgres://h:5433/d", true),
            ("postgresql://u@h/d", "postgres://h/d", false),
            ("postgres:///d?host=/run/x&user=u&password=hunter2", "postgres:///run/x/d", true),
            ("postgres://u@%2Frun%2Fx/d", "postgres://a socket/d", false),
        ];
        for (url, shown, password) in cases {
            let address = Address::parse(url).unwrap();
            assert_eq!(address.to_string(), shown);
            assert_eq!(format!("{address:?}"), format!("Address({shown})"));
            assert_eq!(address.has_password(), password);
        }
    }

    #[test]
    fn what_is_no_address_is_refused_without_repeating_it() {
        let bad = [
            "mysql://user:hunter2@host/db",
            "sqlite:",
            "",
            "/x/y.db",
            "sqlite::memory:",
            "sqlite:x?mode=ro",
            "postgres:hunter2",
            "postgres://h:hunter2/d",
            "postgres://h/d?pass=hunter2",
            "postgres://h/d?options=-c%20x=hunter2",
        ];
        for url in bad {
            let error = Address::parse(url).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
