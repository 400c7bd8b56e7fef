//! PostgreSQL: a server that other things may use as well, and that can go away.
//!
//! Owns: how its connections are opened, and the rule that one engine at a time uses a database.
//! Every connection of an engine holds a lock of the database, shared among them; an engine starts
//! only when it can have it alone for a moment, writes its mark then, and each later connection looks
//! for the mark. Invariant: so a connection of an engine never works on a database that another one
//! has taken over, whatever was cut or restarted in between. What is here and in `sqlite` is all that
//! knows which database it is; statements and schema are the same text. Called by `db`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::any::{AnyConnectOptions, AnyPoolOptions, AnyRow};
use sqlx::{AnyConnection, AnyPool, ConnectOptions, Connection, Error, Executor, Row};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::address::Postgres;
use crate::error::{StoreError, away};
use crate::migrations;

/// Connections that read, and as many that write.
const CONNECTIONS: u32 = 8;
/// How long work waits for a server that is away before it is told so.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
/// How long a start waits for the connections of an engine that was killed to be noticed as dead.
const SUCCESSION: Duration = Duration::from_secs(5);
/// Between two looks at the connection that keeps the database ours.
const WATCH: Duration = Duration::from_secs(2);
/// How long an answer may take: the server's own limit comes first, unless it hangs or is cut off.
pub(crate) const ANSWER: Duration = Duration::from_secs(35);
/// Between two tries to connect.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// Limits that keep a dead client or a stuck statement from holding locks of others, and ours from
/// waiting for ever. A host that lost its power is noticed within a minute.
const SETTINGS: &str = "SET application_name = 'bivouac'; SET statement_timeout = '30s'; \
    SET lock_timeout = '10s'; SET idle_in_transaction_session_timeout = '60s'; \
    SET tcp_keepalives_idle = 30; SET tcp_keepalives_interval = 10; SET tcp_keepalives_count = 3; \
    SET client_min_messages = 'warning'";
/// What is there already is no news at each start.
const QUIET: &str = "SET client_min_messages = 'warning'";
/// SQLite's order of text, under its name.
const COLLATION: &str = "CREATE COLLATION IF NOT EXISTS \"BINARY\" (LOCALE = 'C')";
const TAKE: &str = "SELECT CASE WHEN pg_try_advisory_lock(7070, 1) THEN 1 ELSE 0 END";
const SHARE: &str = "SELECT pg_advisory_lock_shared(7070, 1)";
const GIVE: &str = "SELECT CASE WHEN pg_advisory_unlock(7070, 1) THEN 1 ELSE 0 END";
const MARK: &str = "INSERT INTO bivouac (key, value) \
    VALUES ('engine', CAST(gen_random_uuid() AS TEXT)) \
    ON CONFLICT (key) DO UPDATE SET value = excluded.value RETURNING value";
const READ_MARK: &str = "SELECT value FROM bivouac WHERE key = 'engine'";

/// The connections to a server.
pub(crate) struct Pools {
    pub(crate) write: AnyPool,
    pub(crate) read: AnyPool,
    pub(crate) keeper: Keeper,
}

/// Keeps one connection open as long as the engine runs, so that the database stays ours while there
/// is nothing to do.
#[derive(Debug)]
pub(crate) struct Keeper {
    task: JoinHandle<()>,
    taken: Arc<AtomicBool>,
}

impl Keeper {
    /// Whether another engine has taken the database over.
    pub(crate) fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Acquire)
    }

    /// Lets the database go.
    pub(crate) async fn close(&self) {
        self.task.abort();
        while !self.task.is_finished() {
            sleep(Duration::from_millis(1)).await;
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Opens the database, brings its schema up to date, and takes it.
pub(crate) async fn open(server: &Postgres) -> Result<Pools, StoreError> {
    let place = &server.place;
    let open = |source| StoreError::Open { place: place.clone(), source };
    let mut connection = connect(&server.options).await.map_err(open)?;
    check(&mut connection, place).await?;
    take(&mut connection, place).await?;
    connection.execute(QUIET).await.map_err(open)?;
    // Without the limits of a statement: a migration may take its time.
    connection.execute(COLLATION).await.map_err(open)?;
    migrations::run(&mut connection, place).await?;
    let row = connection.fetch_one(MARK).await.map_err(open)?;
    let mark: Arc<str> = row.try_get::<String, _>(0).map_err(open)?.into();
    connection.execute(SETTINGS).await.map_err(open)?;
    connection.execute(SHARE).await.map_err(open)?;
    connection.execute(GIVE).await.map_err(open)?;
    let taken = Arc::new(AtomicBool::new(false));
    let write = pool(&server.options, &mark, &taken);
    let read = pool(&server.options, &mark, &taken);
    let task = tokio::spawn(keep(connection, server.clone(), mark, Arc::clone(&taken)));
    Ok(Pools { write, read, keeper: Keeper { task, taken } })
}

/// One connection. A server that is just starting is waited for; one that is not there is not.
async fn connect(options: &AnyConnectOptions) -> Result<AnyConnection, Error> {
    let until = Instant::now() + PATIENCE;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let tried = tokio::time::timeout(left, options.connect()).await;
        match tried.unwrap_or(Err(Error::PoolTimedOut)) {
            Err(Error::Database(error)) if error.code().as_deref() == Some("57P03") => {
                sleep(PAUSE).await;
            }
            other => return other,
        }
    }
}

/// Refuses a database in which there is something else, or whose text is not Unicode.
async fn check(connection: &mut AnyConnection, place: &str) -> Result<(), StoreError> {
    let open = |source| StoreError::Open { place: place.to_owned(), source };
    let row =
        connection.fetch_one("SELECT current_setting('server_encoding')").await.map_err(open)?;
    let encoding: String = row.try_get(0).map_err(open)?;
    if encoding != "UTF8" {
        return Err(StoreError::Unsupported(format!(
            "the database {place} has the encoding {encoding}; make one with UTF8: \
             createdb --template template0 --encoding UTF8 NAME"
        )));
    }
    let tables: Vec<AnyRow> = connection
        .fetch_all(
            "SELECT CAST(tablename AS TEXT) FROM pg_tables \
             WHERE schemaname = current_schema() ORDER BY 1",
        )
        .await
        .map_err(open)?;
    let names: Result<Vec<String>, _> = tables.iter().map(|row| row.try_get(0)).collect();
    migrations::check_owner(&names.map_err(open)?, place)
}

/// Takes the database for this engine alone.
async fn take(connection: &mut AnyConnection, place: &str) -> Result<(), StoreError> {
    let open = |source| StoreError::Open { place: place.to_owned(), source };
    let until = Instant::now() + SUCCESSION;
    loop {
        let row = connection.fetch_one(TAKE).await.map_err(open)?;
        if row.try_get::<i32, _>(0).map_err(open)? == 1 {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(StoreError::InUse { place: place.to_owned() });
        }
        sleep(PAUSE).await;
    }
}

/// Makes a new connection one of ours, or fails. `false`: another engine has the database.
async fn join(connection: &mut AnyConnection, mark: &str) -> Result<bool, Error> {
    connection.execute(SETTINGS).await?;
    connection.execute(SHARE).await?;
    let row = connection.fetch_optional(READ_MARK).await?;
    Ok(row.map(|row| row.try_get::<String, _>(0)).transpose()?.as_deref() == Some(mark))
}

fn pool(options: &AnyConnectOptions, mark: &Arc<str>, taken: &Arc<AtomicBool>) -> AnyPool {
    let (mark, taken) = (Arc::clone(mark), Arc::clone(taken));
    AnyPoolOptions::new()
        .max_connections(CONNECTIONS)
        // A first statement that fails says the same, and is sent again.
        .test_before_acquire(false)
        .idle_timeout(Duration::from_secs(600))
        .acquire_timeout(PATIENCE)
        .after_connect(move |connection, _| {
            let (mark, taken) = (Arc::clone(&mark), Arc::clone(&taken));
            Box::pin(async move {
                if join(connection, &mark).await? {
                    return Ok(());
                }
                taken.store(true, Ordering::Release);
                Err(Error::PoolClosed)
            })
        })
        .connect_lazy_with(options.clone())
}

/// Holds the first connection, and opens another when it is cut.
async fn keep(first: AnyConnection, server: Postgres, mark: Arc<str>, taken: Arc<AtomicBool>) {
    let mut held = Some(first);
    loop {
        sleep(WATCH).await;
        if let Some(connection) = &mut held {
            match connection.ping().await {
                Ok(()) => continue,
                Err(error) => {
                    tracing::warn!(%error, database = %server.place, "the database is away");
                    held = None;
                }
            }
        }
        let Ok(mut connection) = server.options.connect().await else { continue };
        match join(&mut connection, &mark).await {
            Ok(true) => {
                tracing::info!(database = %server.place, "the database is back");
                held = Some(connection);
            }
            Ok(false) => {
                tracing::error!(
                    database = %server.place,
                    "another engine has taken the database over; end this one"
                );
                taken.store(true, Ordering::Release);
                return;
            }
            Err(error) => {
                tracing::warn!(%error, away = away(&error), "the database does not answer yet");
            }
        }
    }
}

/// Waits for an answer, but not for ever.
pub(crate) async fn answer<T>(work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    tokio::time::timeout(ANSWER, work).await.unwrap_or(Err(Error::PoolTimedOut))
}
