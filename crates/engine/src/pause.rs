//! Pause and resume with memory: a sandbox stands still, with everything that runs in it.
//!
//! Invariants: the record says it first, in both directions, and whoever adopts the session makes the host as
//! the record says (`adopt`): recorded as paused is frozen, anything else goes on. So a call that was cut off
//! before its answer has either come to pass or is settled at the next start. Whoever needs the sandbox lets it
//! go on ([`Inner::working`]); what only needs its files, its broker or its end does not. Called by the engine's
//! own calls and by the idle rule.

use std::sync::Arc;

use bivouac_runtime::RuntimeError;
use bivouac_store::SessionRow;
use bivouac_types::access::Verb;
use bivouac_types::id::SessionId;
use bivouac_types::name::Namespace;
use bivouac_types::session::{Session, SessionStatus};

use crate::Engine;
use crate::api::Principal;
use crate::error::{Error, ErrorKind};
use crate::fault::FaultPoint;
use crate::inner::{Change, Inner, Live};
use crate::lifecycle::chain;

/// A sandbox that stands still, or goes on.
#[derive(Debug, Clone)]
pub struct Paused {
    /// Its session.
    pub session: Session,
    /// Bytes of its memory that were moved to swap by this call.
    pub paged_out: Option<u64>,
}

impl Inner {
    /// Lets a session go on, if it stands still. Takes the lock of its sandbox; callers at the same time do it
    /// once.
    pub(crate) async fn unpause_session(self: &Arc<Self>, id: &SessionId) -> Result<(), Error> {
        let Some(live) = self.live(id).filter(|live| live.is_paused()) else { return Ok(()) };
        let inner = Arc::clone(self);
        // In a task of its own: one that is recorded as going on must not be left standing.
        let work = async move {
            let sandbox = live.row().session.sandbox_id;
            let _held = inner.sandbox_locks.lock(sandbox.as_str()).await;
            inner.unpause_held(&live).await.map(drop)
        };
        self.run(work).await
    }

    /// The same. Holds the lock.
    pub(crate) async fn unpause_held(
        self: &Arc<Self>,
        live: &Arc<Live>,
    ) -> Result<SessionRow, Error> {
        let known = live.row();
        if known.session.paused_at.is_none() {
            return Ok(known);
        }
        let (id, now) = (known.session.id.clone(), self.now());
        let (row, written) = self
            .change_session_from(Some(known), &id, |row| {
                let s = &mut row.session;
                if s.status != SessionStatus::Running || s.paused_at.is_none() {
                    return Ok(Change::Leave);
                }
                s.end_pause(now);
                Ok(Change::Write)
            })
            .await?;
        if !written {
            return Ok(row);
        }
        let recorded = self.reach(FaultPoint::UnpauseRecorded).await;
        // Whatever went wrong: the record says that it goes on.
        let going = self.thaw(&live.handle).await;
        self.activity.touch(&row.session.sandbox_id);
        recorded?;
        going?;
        tracing::info!(session = %id, "goes on");
        self.reach(FaultPoint::UnpauseGoesOn).await?;
        Ok(row)
    }

    /// Has a running session stand still. Holds the lock. What fails half way is undone; one that stood still
    /// before does so afterwards.
    pub(crate) async fn pause_held(
        self: &Arc<Self>,
        live: &Arc<Live>,
        deep: bool,
    ) -> Result<Paused, Error> {
        let (known, now) = (live.row(), self.now());
        let id = known.session.id.clone();
        let (row, begun) = self
            .change_session_from(Some(known), &id, |row| {
                if row.session.status != SessionStatus::Running {
                    return Err(Error::not_running(&row.session));
                }
                if row.session.paused_at.is_some() {
                    return Ok(Change::Leave);
                }
                row.session.pause(now);
                Ok(Change::Write)
            })
            .await?;
        match self.stand_still(live, begun, deep).await {
            Ok(paged_out) => {
                if begun {
                    tracing::info!(session = %id, deep, "paused");
                }
                Ok(Paused { session: row.session, paged_out })
            }
            Err(error) => {
                if begun && let Err(undo) = self.unpause_held(live).await {
                    tracing::error!(session = %id, cause = %chain(&undo), "cannot take a pause back yet");
                }
                Err(error)
            }
        }
    }

    async fn stand_still(
        &self,
        live: &Arc<Live>,
        begun: bool,
        deep: bool,
    ) -> Result<Option<u64>, Error> {
        if begun {
            self.reach(FaultPoint::PauseRecorded).await?;
        }
        live.handle.freeze().await?;
        if begun {
            self.reach(FaultPoint::PauseFrozen).await?;
        }
        if !deep {
            return Ok(None);
        }
        match live.handle.page_out().await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(RuntimeError::File(refused)) => {
                let state = if begun { "was not paused" } else { "stays paused, with its memory" };
                let name = &live.row().session.sandbox_name;
                let message = format!(
                    "Sandbox '{name}' {state}: {}. A pause that is not deep needs no swap.",
                    refused.message.trim_end_matches('.')
                );
                Err(Error::new(ErrorKind::Conflict, "cannot_page_out", message))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for work that needs the sandbox, and lets that go on should it be paused meanwhile: a pause that
    /// comes between the look at a session and the work in it must not keep the caller waiting for its end.
    pub(crate) async fn through<T>(
        self: &Arc<Self>,
        live: &Arc<Live>,
        work: impl Future<Output = T> + Send,
    ) -> T {
        let mut work = Box::pin(work);
        let mut paused = live.paused.subscribe();
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                // The sender is part of `live`.
                _ = paused.wait_for(|paused| *paused) => {}
            }
            let id = live.handle.session();
            if let Err(error) = self.unpause_session(id).await {
                tracing::warn!(session = %id, cause = %chain(&error), "work waits for a sandbox that stands still");
                return work.await;
            }
        }
    }

    /// The running session of a sandbox, for something that is done with its lock held.
    async fn standing(
        self: &Arc<Self>,
        ns: &Namespace,
        name: &str,
    ) -> Result<(crate::locks::Held, Arc<Live>), Error> {
        let id = self.named(ns, name).await?.sandbox.id;
        let held = self.sandbox_locks.lock(id.as_str()).await;
        let sandbox = self.named(ns, name).await?.sandbox;
        let mut row = self.known_session(&sandbox.current_session_id).await?;
        if row.session.status == SessionStatus::Running && !self.still_runs(&row).await? {
            row = self.known_session(&sandbox.current_session_id).await?;
        }
        match self.live(&row.session.id).filter(|_| row.session.status == SessionStatus::Running) {
            Some(live) => Ok((held, live)),
            None => Err(Error::not_running(&row.session)),
        }
    }
}

impl Engine {
    /// Has a sandbox stand still, with its memory: at once, however much runs in it. With `deep` its memory is
    /// moved to swap as well. The time does not count against its limit. One that is paused stays so.
    ///
    /// # Errors
    /// 404, 403; 410 or 422 when it does not run; 409 `cannot_page_out` where the host has no swap: then
    /// nothing has changed.
    pub async fn pause(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        deep: bool,
    ) -> Result<Paused, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        tracing::debug!(by = %who.name, sandbox = %name, deep, "pause");
        let inner = Arc::clone(&self.inner);
        let (ns, name) = (ns.clone(), name.to_owned());
        let work = async move {
            let (_held, live) = inner.standing(&ns, &name).await?;
            inner.pause_held(&live, deep).await
        };
        self.inner.run(work).await
    }

    /// Lets a paused sandbox go on where it stood. One that is not paused is left as it is.
    ///
    /// # Errors
    /// 404, 403; 410 or 422 when it does not run.
    pub async fn unpause(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
    ) -> Result<Paused, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        tracing::debug!(by = %who.name, sandbox = %name, "resume");
        let inner = Arc::clone(&self.inner);
        let (ns, name) = (ns.clone(), name.to_owned());
        let work = async move {
            let (_held, live) = inner.standing(&ns, &name).await?;
            let row = inner.unpause_held(&live).await?;
            Ok(Paused { session: row.session, paged_out: None })
        };
        self.inner.run(work).await
    }

    /// Since when a session of this process stands still: for lists, which carry no sessions.
    #[must_use]
    pub fn paused_at(&self, session: &SessionId) -> Option<bivouac_types::Millis> {
        self.inner.live(session)?.row().session.paused_at
    }
}
