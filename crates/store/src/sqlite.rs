//! SQLite: a file beside the engine's other data.
//!
//! Owns: how its connections are opened. Invariant: a new file can be read by its owner only, and a
//! file that is not ours is not changed. Called by `db`.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use sqlx::any::{AnyConnectOptions, AnyPoolOptions, AnyRow};
use sqlx::{AnyPool, ConnectOptions, Connection, Executor, Row};

use crate::error::StoreError;
use crate::migrations;

/// Connections that only read.
const READERS: u32 = 4;
/// A commit is in the kernel: it survives the process.
const NORMAL: &str = "PRAGMA synchronous = NORMAL";
/// A commit syncs the log, and with it all that was committed before.
const FULL: &str = "PRAGMA synchronous = FULL";
/// Variable that leaves one kind of flush out (`records` here), with which a test sees that its search
/// for what a power cut loses can find something.
const LOSE: &str = "BIVOUAC_TEST_LOSE";

/// The connections to a file.
pub(crate) struct Pools {
    pub(crate) write: AnyPool,
    pub(crate) write_durable: AnyPool,
    pub(crate) read: AnyPool,
}

/// Opens or makes the file, and brings its schema up to date.
pub(crate) async fn open(path: &Path) -> Result<Pools, StoreError> {
    sqlx::any::install_default_drivers();
    let place = path.display().to_string();
    let open = |source| StoreError::Open { place: place.clone(), source };
    create_private(path).map_err(|e| open(sqlx::Error::Io(e)))?;
    let options = options(path).map_err(open)?;
    check_owner(&options, &place).await?;
    let write = pool(1, options.clone(), NORMAL).await.map_err(open)?;
    let mut connection = write.acquire().await.map_err(open)?;
    migrations::run(&mut connection, &place).await?;
    drop(connection);
    let durable =
        if std::env::var(LOSE).is_ok_and(|told| told == "records") { NORMAL } else { FULL };
    let write_durable = pool(1, options.clone(), durable).await.map_err(open)?;
    let read = pool(READERS, options, NORMAL).await.map_err(open)?;
    Ok(Pools { write, write_durable, read })
}

/// SQLite gives its side files the mode of the main one, so that one is made private first.
fn create_private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = std::fs::OpenOptions::new();
    options.create(true).append(true).mode(0o600);
    options.open(path).map(drop)
}

fn options(path: &Path) -> Result<AnyConnectOptions, sqlx::Error> {
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
        .acquire_timeout(Duration::from_secs(30))
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
    migrations::check_owner(&names.map_err(open)?, place)
}
