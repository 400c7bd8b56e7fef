//! What callers ask of sessions: look, stop, give more time. (Their policies are in `egress`.)
//!
//! Invariant: a stop is idempotent, and parallel stops of one session share one result. The steps
//! themselves are in `lifecycle`.

use std::sync::Arc;

use bivouac_store::{Position, SortKey};
use bivouac_types::access::Verb;
use bivouac_types::id::SessionId;
use bivouac_types::name::Namespace;
use bivouac_types::sandbox::MAX_TIMEOUT_MS;
use bivouac_types::session::{Session, SessionStatus};
use futures_util::FutureExt;

use crate::Engine;
use crate::api::{ListChildren, Page, Principal, Stopped, View};
use crate::cursor;
use crate::error::{Error, ErrorKind};
use crate::inner::{Change, Inner, SharedStop, locked};
use crate::lifecycle::Keep;

/// Smallest extension, ms.
const MIN_EXTENSION_MS: i64 = 1000;

impl Inner {
    /// Stops a session; all who ask while it is being stopped get the same answer.
    pub(crate) async fn stop_shared(self: &Arc<Self>, id: &SessionId) -> Result<Stopped, Error> {
        let shared: SharedStop = {
            let mut stops = locked(&self.stops);
            let shared = stops.entry(id.clone()).or_insert_with(|| {
                let inner = Arc::clone(self);
                let id = id.clone();
                async move {
                    let worker = Arc::clone(&inner);
                    let wanted = id.clone();
                    let work = async move {
                        let result = worker.stop_now(&wanted).await;
                        worker.counters.note(crate::Operation::Stop, &result);
                        locked(&worker.stops).remove(&wanted);
                        result
                    };
                    let result = inner.run(work).await;
                    locked(&inner.stops).remove(&id);
                    result
                }
                .boxed()
                .shared()
            });
            shared.clone()
        };
        shared.await
    }

    async fn stop_now(self: &Arc<Self>, id: &SessionId) -> Result<Stopped, Error> {
        let row = self.known_session(id).await?;
        let sandbox = &row.session.sandbox_id;
        self.overtake_launch(id).await?;
        let _held = self.sandbox_locks.lock(sandbox.as_str()).await;
        let (row, snapshot) = self.end_session(id, Keep::AsConfigured).await?;
        let sandbox = self.known_sandbox(sandbox).await?.sandbox;
        Ok(Stopped { session: row.session, sandbox, snapshot })
    }

    /// A change of a running session's row.
    async fn change_running(
        &self,
        team: &str,
        id: &SessionId,
        mut change: impl FnMut(&mut Session) -> Result<(), Error>,
    ) -> Result<Session, Error> {
        let (_, _) = self.present(team, id).await?;
        let (row, _) = self
            .change_session(id, |row| {
                if row.session.status != SessionStatus::Running {
                    return Err(Error::not_running(&row.session));
                }
                change(&mut row.session)?;
                Ok(Change::Write)
            })
            .await?;
        Ok(row.session)
    }
}

impl Engine {
    /// Sessions of a namespace, newest first; of one sandbox, if it is named.
    ///
    /// # Errors
    /// 400 for a bad limit or cursor.
    pub async fn sessions(
        &self,
        who: &Principal,
        ns: &Namespace,
        query: ListChildren,
    ) -> Result<Page<Session>, Error> {
        who.may(Verb::Read, ns)?;
        let (filter, limit) = self.inner.child_filter("sessions", ns, &query).await?;
        let rows = self.inner.db.sessions(&filter).await?;
        let (rows, next) = cursor::page(rows, limit, "sessions", query.ascending, |row| Position {
            key: SortKey::Int(row.session.created_at),
            id: row.session.id.as_str().to_owned(),
        });
        Ok(Page { items: rows.into_iter().map(|row| row.session).collect(), next })
    }

    /// A session with its sandbox and routes; it need not be the newest.
    ///
    /// # Errors
    /// 404.
    pub async fn session(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
    ) -> Result<View, Error> {
        let row = self.inner.session_for(who, &[Verb::Read], team, id).await?;
        let sandbox = self.inner.known_sandbox(&row.session.sandbox_id).await?.sandbox;
        let routes = self.inner.routes(&sandbox.id).await?;
        Ok(View { sandbox, session: row.session, routes, resumed: false })
    }

    /// Stops a session and answers when it is stopped. A persistent sandbox is kept in a snapshot
    /// first. Stopping one that has ended answers it as it is.
    ///
    /// # Errors
    /// 404.
    pub async fn stop(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
    ) -> Result<Stopped, Error> {
        self.inner.session_for(who, &[Verb::Write], team, id).await?;
        tracing::info!(by = %who.name, session = %id, "stop");
        self.inner.stop_shared(id).await
    }

    /// Gives a running session more time.
    ///
    /// # Errors
    /// 400 for less than a second, or when the whole would pass the maximum; 410 or 422 when the
    /// session does not run.
    pub async fn extend_timeout(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        by_ms: i64,
    ) -> Result<Session, Error> {
        self.inner.check_session(who, &[Verb::Write], team, id).await?;
        if by_ms < MIN_EXTENSION_MS {
            let message =
                format!("Invalid duration: must be at least {MIN_EXTENSION_MS} ms, got {by_ms}");
            return Err(Error::invalid(message));
        }
        tracing::debug!(by = %who.name, session = %id, by_ms, "extend timeout");
        let (live, row) = self.inner.present(team, id).await?;
        // Where a rule ends it, the time that it has lived for so far is no bound.
        let ruled = self.inner.life_of(&live).await?.idle_stop_ms.is_some();
        self.inner.activity.touch(&row.session.sandbox_id);
        self.inner
            .change_running(team, id, |session| {
                let total = session.timeout_ms.saturating_add(by_ms);
                let bounded = if ruled { by_ms } else { total };
                if bounded > MAX_TIMEOUT_MS {
                    let message = format!(
                        "The timeout of session {id} would be {total} ms; at most {MAX_TIMEOUT_MS} ms are allowed"
                    );
                    return Err(Error::new(ErrorKind::Invalid, "sandbox_timeout_invalid", message));
                }
                session.timeout_ms = total;
                Ok(())
            })
            .await
    }
}
