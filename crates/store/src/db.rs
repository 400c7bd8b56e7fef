//! Connections and transactions.
//!
//! Invariant: on SQLite there is one writer at a time, so no writer of this process meets another and
//! a transaction never fails half-way with "busy"; readers never wait for it (WAL). There are two
//! writing connections there because how durable a commit is belongs to the connection. On PostgreSQL
//! writers go side by side, and each change is a compare-and-set of one statement. A connection that
//! was cut is replaced, and what is safe to send again is sent again: a read, the begin of a
//! transaction, and a single statement that says the same when it is done twice.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use bivouac_types::meter::Times;
use sqlx::any::AnyArguments;
use sqlx::query::Query;
use sqlx::{Any, AnyPool, Execute, Transaction};
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::{Instant, sleep};

use crate::address::{Address, Kind};
use crate::error::{StoreError, away};
use crate::postgres::{self, Keeper};
use crate::sqlite;
use crate::timing::{Clocks, Since, Timed, again};
use crate::vault::Vault;

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
    /// Held by whoever writes, where there may be one writer only.
    turn: Option<Arc<Mutex<()>>>,
    write: AnyPool,
    write_durable: AnyPool,
    read: AnyPool,
    clocks: Arc<Clocks>,
    /// For a server, which can go away.
    keeper: Option<Arc<Keeper>>,
    /// Opened once, by [`Db::unlock`].
    pub(crate) vault: Arc<OnceLock<Vault>>,
}

/// A transaction. Dropped without [`Tx::commit`], nothing of it was written.
pub struct Tx<'db> {
    pub(crate) inner: Transaction<'db, Any>,
    pub(crate) vault: Arc<OnceLock<Vault>>,
    // After `inner`: the turn ends when the transaction has.
    _turn: Option<MutexGuard<'db, ()>>,
    _since: Since<'db>,
}

impl std::fmt::Debug for Tx<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tx")
    }
}

impl Db {
    /// Opens the database at `address`, and brings its schema up to date. A file is made if it is
    /// not there, and can then be read by its owner only; a server's database has to be there, and
    /// is this process's alone until [`Db::close`] or its end.
    ///
    /// # Errors
    /// A database that is not ours or was written by a newer version, one that another engine uses,
    /// and every failure to open it.
    pub async fn open(address: &Address) -> Result<Self, StoreError> {
        match &address.0 {
            // Boxed: what opens is large, and what is built without optimisation larger.
            Kind::Sqlite(path) => Box::pin(Self::open_file(path)).await,
            Kind::Postgres(server) => {
                let postgres::Pools { write, read, keeper } =
                    Box::pin(postgres::open(server)).await?;
                Ok(Self {
                    turn: None,
                    write_durable: write.clone(),
                    write,
                    read,
                    clocks: Arc::default(),
                    keeper: Some(Arc::new(keeper)),
                    vault: Arc::default(),
                })
            }
        }
    }

    /// Opens or makes the SQLite database in the file `path`; see [`Db::open`].
    ///
    /// # Errors
    /// As [`Db::open`].
    pub async fn open_file(path: &Path) -> Result<Self, StoreError> {
        let sqlite::Pools { write, write_durable, read } = sqlite::open(path).await?;
        Ok(Self {
            turn: Some(Arc::default()),
            write,
            write_durable,
            read,
            clocks: Arc::default(),
            keeper: None,
            vault: Arc::default(),
        })
    }

    async fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        match &self.turn {
            Some(turn) => Some(turn.lock().await),
            None => None,
        }
    }

    /// Refuses to go on with a database that another engine has.
    fn check_ours(&self) -> Result<(), StoreError> {
        match &self.keeper {
            Some(keeper) if keeper.is_taken() => Err(StoreError::TakenOver),
            _ => Ok(()),
        }
    }

    /// Begins a transaction. A server that is away is waited for, a while.
    ///
    /// # Errors
    /// [`StoreError::Sql`], [`StoreError::Away`].
    pub async fn begin(&self, durability: Durability) -> Result<Tx<'_>, StoreError> {
        let pool = match durability {
            Durability::Process => &self.write,
            Durability::Power => &self.write_durable,
        };
        let turn = self.turn().await;
        let since = Since::now(&self.clocks.transaction);
        let until = Instant::now() + postgres::PATIENCE;
        let inner = loop {
            self.check_ours()?;
            match postgres::answer(pool.begin()).await {
                Ok(inner) => break inner,
                Err(e) if self.keeper.is_some() && away(&e) && Instant::now() < until => {
                    sleep(postgres::PAUSE).await;
                }
                Err(e) => {
                    self.check_ours()?;
                    return Err(StoreError::sql("begin a transaction", e));
                }
            }
        };
        Ok(Tx { inner, vault: Arc::clone(&self.vault), _turn: turn, _since: since })
    }

    /// One statement that is a transaction by itself: a quarter of the round trips. It must say the
    /// same when it is done twice: when the connection is cut, it is sent again.
    pub(crate) async fn write_one(
        &self,
        what: &'static str,
        mut statement: Query<'_, Any, AnyArguments>,
    ) -> Result<(), StoreError> {
        let _turn = self.turn().await;
        let _since = Since::now(&self.clocks.write);
        if self.keeper.is_none() {
            let done = statement.execute(&self.write).await;
            return done.map(drop).map_err(|e| StoreError::sql(what, e));
        }
        let bad = |e| StoreError::Sql { what, source: sqlx::Error::Encode(e) };
        let arguments = statement.take_arguments().map_err(bad)?.unwrap_or_default();
        let sql = statement.sql();
        let until = Instant::now() + postgres::PATIENCE;
        loop {
            self.check_ours()?;
            let (once, arguments) = (sql.clone(), again(&arguments));
            let sent = sqlx::query_with(once, arguments).execute(&self.write);
            match postgres::answer(sent).await {
                Ok(_) => return Ok(()),
                Err(e) if away(&e) && Instant::now() < until => sleep(postgres::PAUSE).await,
                Err(e) => {
                    self.check_ours()?;
                    return Err(StoreError::sql(what, e));
                }
            }
        }
    }

    /// Closes all connections; SQLite's log is folded into the file.
    pub async fn close(&self) {
        self.read.close().await;
        self.write_durable.close().await;
        self.write.close().await;
        if let Some(keeper) = &self.keeper {
            keeper.close().await;
        }
    }

    pub(crate) fn reader(&self) -> Timed<'_> {
        let again = self.keeper.is_some();
        Timed { pool: &self.read, into: &self.clocks.read, again }
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
    /// [`StoreError::Sql`]: nothing was written. [`StoreError::Unsure`]: the connection was cut
    /// before the answer.
    pub async fn commit(self) -> Result<(), StoreError> {
        postgres::answer(self.inner.commit()).await.map_err(|e| {
            if away(&e) {
                StoreError::Unsure { source: e }
            } else {
                StoreError::sql("commit a transaction", e)
            }
        })
    }
}
