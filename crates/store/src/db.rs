//! Connections and transactions.
//!
//! Invariant: one writer at a time, so on SQLite no writer of this process meets another and a
//! transaction never fails half-way with "busy"; readers never wait for it (WAL). There are two
//! writing connections because how durable a commit is belongs to the connection.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use bivouac_types::meter::Times;
use sqlx::any::{AnyArguments, AnyConnectOptions, AnyPoolOptions, AnyRow};
use sqlx::migrate::MigrateError;
use sqlx::query::Query;
use sqlx::{Any, AnyPool, ConnectOptions, Connection, Executor, Row, Transaction};
use tokio::sync::{Mutex, MutexGuard};

use crate::error::StoreError;
use crate::migrations;
use crate::timing::{Clocks, Since, Timed};

/// Connections that only read.
const READERS: u32 = 4;
/// A commit is in the kernel: it survives the process.
const NORMAL: &str = "PRAGMA synchronous = NORMAL";
/// A commit syncs the log, and with it all that was committed before.
const FULL: &str = "PRAGMA synchronous = FULL";

/// What a commit survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// The end of the engine at any moment. Not the loss of the host's power: then the sessions
    /// that such rows speak of are gone too.
    Process,
    /// Loss of power as well: for what was promised to be kept (snapshots). Everything committed
    /// before is made durable with it.
    Power,
}

/// The engine's database.
#[derive(Debug, Clone)]
pub struct Db {
    /// Held by whoever writes.
    turn: Arc<Mutex<()>>,
    write: AnyPool,
    write_durable: AnyPool,
    read: AnyPool,
    clocks: Arc<Clocks>,
}

/// A transaction. Dropped without [`Tx::commit`], nothing of it was written.
pub struct Tx<'db> {
    pub(crate) inner: Transaction<'db, Any>,
    // After `inner`: the turn ends when the transaction has.
    _turn: MutexGuard<'db, ()>,
    _since: Since<'db>,
}

impl std::fmt::Debug for Tx<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tx")
    }
}

impl Db {
    /// Opens or makes the database that `url` names (`sqlite:/path/of/a/file`), and brings its
    /// schema up to date. A new file can be read by its owner only.
    ///
    /// # Errors
    /// An address of another kind, a file that is not ours or was written by a newer version, and
    /// every failure to open it.
    pub async fn open(url: &str) -> Result<Self, StoreError> {
        if url.starts_with("postgres:") || url.starts_with("postgresql:") {
            return Err(StoreError::Unsupported(
                "PostgreSQL as database arrives with the next release; this version keeps its \
                 state in SQLite: leave --database out, or give it a sqlite: address"
                    .to_owned(),
            ));
        }
        let Some(path) = url.strip_prefix("sqlite:").filter(|p| !p.is_empty()) else {
            return Err(StoreError::Unsupported(format!(
                "'{}' is not the address of a database: use sqlite:/path/of/a/file",
                url.split([':', '/']).next().unwrap_or("")
            )));
        };
        Self::open_file(Path::new(path.strip_prefix("//").unwrap_or(path))).await
    }

    /// Opens or makes the SQLite database in the file `path`; see [`Db::open`].
    ///
    /// # Errors
    /// As [`Db::open`].
    pub async fn open_file(path: &Path) -> Result<Self, StoreError> {
        sqlx::any::install_default_drivers();
        let place = path.display().to_string();
        let open = |source| StoreError::Open { place: place.clone(), source };
        create_private(path).map_err(|e| open(sqlx::Error::Io(e)))?;
        let options = sqlite_options(path).map_err(open)?;
        check_owner(&options, &place).await?;
        let write = pool(1, options.clone(), NORMAL).await.map_err(open)?;
        migrations::migrator().run(&write).await.map_err(|source| match source {
            MigrateError::VersionMissing(found) => {
                StoreError::Newer { place: place.clone(), found, known: migrations::NEWEST }
            }
            MigrateError::VersionMismatch(version) => StoreError::Foreign {
                place: place.clone(),
                found: format!("its schema step {version} differs from ours"),
            },
            source => StoreError::Migrate { place: place.clone(), source },
        })?;
        let write_durable = pool(1, options.clone(), FULL).await.map_err(open)?;
        let read = pool(READERS, options, NORMAL).await.map_err(open)?;
        Ok(Self { turn: Arc::default(), write, write_durable, read, clocks: Arc::default() })
    }

    /// Begins a transaction.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn begin(&self, durability: Durability) -> Result<Tx<'_>, StoreError> {
        let pool = match durability {
            Durability::Process => &self.write,
            Durability::Power => &self.write_durable,
        };
        let turn = self.turn.lock().await;
        let since = Since::now(&self.clocks.transaction);
        let begun = pool.begin().await;
        let inner = begun.map_err(|e| StoreError::sql("begin a transaction", e))?;
        Ok(Tx { inner, _turn: turn, _since: since })
    }

    /// One statement that is a transaction by itself: a quarter of the round trips.
    pub(crate) async fn write_one(
        &self,
        what: &'static str,
        statement: Query<'_, Any, AnyArguments>,
    ) -> Result<(), StoreError> {
        let _turn = self.turn.lock().await;
        let _since = Since::now(&self.clocks.write);
        statement.execute(&self.write).await.map_err(|e| StoreError::sql(what, e))?;
        Ok(())
    }

    /// Closes all connections; the log is folded into the file.
    pub async fn close(&self) {
        self.read.close().await;
        self.write_durable.close().await;
        self.write.close().await;
    }

    pub(crate) fn reader(&self) -> Timed<'_> {
        Timed { pool: &self.read, into: &self.clocks.read }
    }

    /// How long the database took, by kind of work: `read` and `write` are single statements,
    /// `transaction` is one from its begin to its end.
    #[must_use]
    pub fn times(&self) -> [(&'static str, Times); 3] {
        self.clocks.read_out()
    }
}

impl Tx<'_> {
    /// Makes it so.
    ///
    /// # Errors
    /// [`StoreError::Sql`]: nothing was written.
    pub async fn commit(self) -> Result<(), StoreError> {
        self.inner.commit().await.map_err(|e| StoreError::sql("commit a transaction", e))
    }
}

/// SQLite gives its side files the mode of the main one, so that one is made private first.
fn create_private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = std::fs::OpenOptions::new();
    options.create(true).append(true).mode(0o600);
    options.open(path).map(drop)
}

fn sqlite_options(path: &Path) -> Result<AnyConnectOptions, sqlx::Error> {
    let absolute: PathBuf = std::path::absolute(path).map_err(sqlx::Error::Io)?;
    // The address is parsed as a URL: what has a meaning there is escaped.
    let mut address = "sqlite://".to_owned();
    for byte in absolute.as_os_str().as_encoded_bytes() {
        match byte {
            b'/' | b'-' | b'_' | b'.' => address.push(char::from(*byte)),
            b if b.is_ascii_alphanumeric() => address.push(char::from(*b)),
            b => address.push_str(&format!("%{b:02X}")),
        }
    }
    AnyConnectOptions::from_str(&address)
}

async fn pool(
    size: u32,
    options: AnyConnectOptions,
    synchronous: &'static str,
) -> Result<AnyPool, sqlx::Error> {
    AnyPoolOptions::new()
        .max_connections(size)
        .min_connections(1)
        // A local file does not go away, and a test before each use costs a round trip.
        .test_before_acquire(false)
        .idle_timeout(None)
        .max_lifetime(None)
        .acquire_timeout(std::time::Duration::from_secs(30))
        .after_connect(move |connection, _| {
            Box::pin(async move {
                connection.execute("PRAGMA journal_mode = WAL").await?;
                connection.execute(synchronous).await?;
                Ok(())
            })
        })
        .connect_with(options)
        .await
}

/// Refuses a file in which there is something, but not our mark; it is not changed. (By a connection
/// of its own: a pool would try again and again to open a broken file.)
async fn check_owner(options: &AnyConnectOptions, place: &str) -> Result<(), StoreError> {
    let open = |source| StoreError::Open { place: place.to_owned(), source };
    let mut connection = options.connect().await.map_err(open)?;
    let tables: Vec<AnyRow> = connection
        .fetch_all("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        .await
        .map_err(open)?;
    connection.close().await.map_err(open)?;
    let names: Result<Vec<String>, _> = tables.iter().map(|row| row.try_get(0)).collect();
    let names = names.map_err(open)?;
    // A first start that was killed between two steps leaves an empty history behind.
    let ours = names.iter().any(|n| n == "bivouac");
    if ours || names.iter().all(|n| n == "_sqlx_migrations") {
        return Ok(());
    }
    let found = format!("it has a table '{}'", names[0]);
    Err(StoreError::Foreign { place: place.to_owned(), found })
}
