//! Throw-away databases of a PostgreSQL server that `script/test` starts.
//!
//! Invariant: each test has a database of its own, and it is gone when its [`TestDatabase`] is
//! dropped, connections of a forgotten engine included. `BIVOUAC_TEST_POSTGRES` names the server (an
//! address of a database in which others may be made); `BIVOUAC_TEST_DATABASE=postgres` makes the
//! suites that can run on either database use it.

use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail, ensure};

/// Address of the server.
const SERVER: &str = "BIVOUAC_TEST_POSTGRES";
/// Which database the suites run on.
const CHOICE: &str = "BIVOUAC_TEST_DATABASE";

/// A database that is dropped with this.
#[derive(Debug)]
pub struct TestDatabase {
    server: String,
    name: String,
    url: String,
}

impl TestDatabase {
    /// A database for a test that needs PostgreSQL; nothing where no server is told.
    ///
    /// # Errors
    /// When `psql` cannot make it.
    pub fn new() -> Result<Option<Self>> {
        let Ok(server) = std::env::var(SERVER) else { return Ok(None) };
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("bivouac_test_{}_{number}", std::process::id());
        let url = in_database(&server, &name)?;
        // A killed run with the same process id may have left one.
        drop_database(&server, &name)?;
        query(&server, &format!("CREATE DATABASE {name}"))?;
        Ok(Some(Self { server, name, url }))
    }

    /// A database for a suite that runs on either, if PostgreSQL is chosen.
    ///
    /// # Errors
    /// When the choice is unknown or names no server, or the database cannot be made.
    pub fn chosen() -> Result<Option<Self>> {
        match std::env::var(CHOICE).as_deref() {
            Err(_) | Ok("sqlite") => Ok(None),
            Ok("postgres") => {
                let made = Self::new()?;
                Ok(Some(made.with_context(|| format!("{CHOICE}=postgres needs {SERVER}"))?))
            }
            Ok(other) => bail!("{CHOICE} is sqlite or postgres, not '{other}'"),
        }
    }

    /// Its address, for `--database`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Runs a statement in it and answers what psql prints: one line for each row.
    ///
    /// # Errors
    /// The statement's.
    pub fn query(&self, sql: &str) -> Result<String> {
        query(&self.url, sql)
    }

    /// Cuts every connection to it, as a restart of the server does.
    ///
    /// # Errors
    /// When psql fails.
    pub fn cut(&self) -> Result<usize> {
        let sql = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{}'",
            self.name
        );
        Ok(query(&self.server, &sql)?.trim().parse()?)
    }

    /// Takes new connections or refuses them, as a server that is away does. Its own statements come
    /// from another database.
    ///
    /// # Errors
    /// When psql fails.
    pub fn accept(&self, accept: bool) -> Result<()> {
        let sql = format!("ALTER DATABASE {} ALLOW_CONNECTIONS {accept}", self.name);
        query(&self.server, &sql).map(drop)
    }
}

impl Drop for TestDatabase {
    #[allow(clippy::print_stderr, reason = "what a person needs to see when a test fails")]
    fn drop(&mut self) {
        if let Err(error) = drop_database(&self.server, &self.name) {
            eprintln!("{} could not be dropped: {error:#}", self.name);
        }
    }
}

fn drop_database(server: &str, name: &str) -> Result<()> {
    query(server, &format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).map(drop)
}

fn query(url: &str, sql: &str) -> Result<String> {
    let Output { status, stdout, stderr } = Command::new("psql")
        .args(["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--dbname", url])
        .args(["--set", "ON_ERROR_STOP=1", "--command", sql])
        .env("PGOPTIONS", "-c client_min_messages=error")
        .stdin(Stdio::null())
        .output()
        .context("psql")?;
    ensure!(status.success(), "{sql}: {}", String::from_utf8_lossy(&stderr));
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// The server's address with another database.
fn in_database(server: &str, name: &str) -> Result<String> {
    let (base, options) = server.split_once('?').unwrap_or((server, ""));
    let (scheme, rest) = base.split_once("://").context("an address with a scheme")?;
    let host = rest.split_once('/').map_or(rest, |(host, _)| host);
    let mark = if options.is_empty() { "" } else { "?" };
    Ok(format!("{scheme}://{host}/{name}{mark}{options}"))
}

#[cfg(test)]
mod tests {
    use super::in_database;

    #[test]
    fn the_database_of_an_address_is_replaced() {
        let cases = [
            ("postgres:///postgres?host=/run/x&user=u", "postgres:///d?host=/run/x&user=u"),
            ("postgres://u@h:1/postgres", "postgres://u@h:1/d"),
            ("postgres://u@h", "postgres://u@h/d"),
        ];
        for (server, wanted) in cases {
            assert_eq!(in_database(server, "d").unwrap(), wanted);
        }
    }
}
