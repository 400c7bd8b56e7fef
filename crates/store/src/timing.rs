//! How long the database takes.
//!
//! Owns the clock around statements: reads go through [`Timed`], writes and transactions hold a
//! [`Since`]. Invariant: what is measured is the time until the answer is complete, the wait for a
//! connection included, and for writes not the wait for the turn.

use std::fmt;
use std::pin::Pin;

use bivouac_types::meter::{Histogram, Times};
use futures_util::{FutureExt, Stream, StreamExt, stream};
use sqlx::any::{AnyArguments, AnyRow};
use sqlx::{Any, AnyPool, Database, Either, Error, Execute, Executor, SqlStr};
use tokio::time::{Instant, sleep};

use crate::error::away;
use crate::postgres::{PATIENCE, PAUSE, answer};

type BoxFuture<'e, T> = Pin<Box<dyn Future<Output = T> + Send + 'e>>;
type Done = <Any as Database>::QueryResult;
type BoxStream<'e, T> = Pin<Box<dyn Stream<Item = T> + Send + 'e>>;

/// One histogram for each kind of work.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    pub(crate) read: Histogram,
    pub(crate) write: Histogram,
    pub(crate) transaction: Histogram,
}

impl Clocks {
    pub(crate) fn read_out(&self) -> [(&'static str, Times); 3] {
        [
            ("read", self.read.read()),
            ("write", self.write.read()),
            ("transaction", self.transaction.read()),
        ]
    }
}

/// Measures from its making to its end.
pub(crate) struct Since<'h> {
    begun: Instant,
    into: &'h Histogram,
}

impl<'h> Since<'h> {
    pub(crate) fn now(into: &'h Histogram) -> Self {
        Self { begun: Instant::now(), into }
    }
}

impl Drop for Since<'_> {
    fn drop(&mut self) {
        self.into.observe(self.begun.elapsed());
    }
}

/// The connections that read, with a clock around each statement.
#[derive(Clone, Copy)]
pub(crate) struct Timed<'p> {
    pub(crate) pool: &'p AnyPool,
    pub(crate) into: &'p Histogram,
    /// Whether a statement is sent again when its connection was cut.
    pub(crate) again: bool,
}

/// A copy of bound values, to send them again.
pub(crate) fn again(arguments: &AnyArguments) -> AnyArguments {
    let mut copy = AnyArguments::default();
    copy.values.0.clone_from(&arguments.values.0);
    copy
}

/// All rows of a statement that only reads. When the connection is cut, or the server is away for a
/// moment, it is sent again.
async fn patiently<'q, E: Execute<'q, Any>>(
    pool: &AnyPool,
    mut query: E,
) -> Result<Vec<AnyRow>, Error> {
    let arguments = query.take_arguments().map_err(Error::Encode)?.unwrap_or_default();
    let sql = query.sql();
    let until = Instant::now() + PATIENCE;
    loop {
        let once = sqlx::query_with(sql.clone(), again(&arguments));
        match answer(once.fetch_all(pool)).await {
            Err(e) if away(&e) && Instant::now() < until => sleep(PAUSE).await,
            other => return other,
        }
    }
}

impl fmt::Debug for Timed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Timed")
    }
}

impl<'p> Executor<'p> for Timed<'p> {
    type Database = Any;

    fn fetch_many<'e, 'q: 'e, E>(
        self,
        query: E,
    ) -> BoxStream<'e, Result<Either<Done, AnyRow>, Error>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Any>,
    {
        let since = Since::now(self.into);
        if self.again {
            let rows = async move {
                let _since = since;
                match patiently(self.pool, query).await {
                    Ok(rows) => rows.into_iter().map(|row| Ok(Either::Right(row))).collect(),
                    Err(error) => vec![Err(error)],
                }
            };
            return Box::pin(rows.map(stream::iter).flatten_stream());
        }
        // The closure holds the clock for as long as the rows come.
        Box::pin(self.pool.fetch_many(query).inspect(move |_| {
            let _ = &since;
        }))
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, Result<Option<AnyRow>, Error>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Any>,
    {
        let since = Since::now(self.into);
        if self.again {
            return Box::pin(async move {
                let _since = since;
                Ok(patiently(self.pool, query).await?.into_iter().next())
            });
        }
        let row = self.pool.fetch_optional(query);
        Box::pin(async move {
            let _since = since;
            row.await
        })
    }

    fn prepare_with<'e>(
        self,
        sql: SqlStr,
        parameters: &'e [<Any as Database>::TypeInfo],
    ) -> BoxFuture<'e, Result<<Any as Database>::Statement, Error>>
    where
        'p: 'e,
    {
        self.pool.prepare_with(sql, parameters)
    }
}
