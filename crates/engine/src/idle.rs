//! When a sandbox is idle, and what keeps it from being so.
//!
//! Invariants: a sandbox with an idle rule is ended by that rule and not by its session's time limit, which is
//! moved on for as long as the rule lasts; what was seen before this process began counts as seen at its begin,
//! so nothing is stopped because the engine was away. What counts as activity is told by [`crate::activity`] and
//! listed in docs/boxes.md. Asked by the reconcilers `idle` and `timeouts`.

use std::sync::Arc;

use bivouac_types::Millis;
use bivouac_types::access::Verb;
use bivouac_types::life::{IDLE_STOP_MS, Life};
use bivouac_types::name::Namespace;
use bivouac_types::sandbox::MAX_TIMEOUT_MS;
use bivouac_types::session::{Session, SessionStatus};

use crate::Engine;
use crate::api::Principal;
use crate::error::{Error, ErrorKind};
use crate::inner::{Change, Inner, Live, locked};

/// The least by which the limit of a session is moved on, ms: a rule of ten seconds must not write a record
/// every ten seconds.
const STEP_MS: Millis = 60_000;

impl Inner {
    /// The rules of the sandbox that a session is of.
    pub(crate) async fn life_of(&self, live: &Live) -> Result<Life, Error> {
        if let Some(life) = &*locked(&live.life) {
            return Ok(life.clone());
        }
        let read = self.known_sandbox(&live.row().session.sandbox_id).await?.sandbox.life;
        // A change since the read has put the newer ones there.
        Ok(locked(&live.life).get_or_insert(read).clone())
    }

    /// When a sandbox was last in use; the present while it is.
    pub(crate) fn last_used(&self, session: &Session) -> Millis {
        let seen = self.activity.last(&session.sandbox_id).unwrap_or(0);
        let kept = session.keep_until.unwrap_or(0);
        let began = session.started_at.unwrap_or(session.created_at);
        seen.max(kept).max(began).max(self.began_at)
    }

    /// Whether nothing has happened for so long.
    pub(crate) fn is_idle(&self, session: &Session, limit_ms: i64) -> bool {
        self.now().saturating_sub(self.last_used(session)) >= limit_ms
    }

    /// Moves the limit of a session on whose sandbox has an idle rule. `false`: it has none.
    pub(crate) async fn extend_for_idle(&self, live: &Live) -> Result<bool, Error> {
        let Some(limit) = self.life_of(live).await?.idle_stop_ms else { return Ok(false) };
        let now = self.now();
        let (row, _) = self
            .change_session_from(Some(live.row()), live.handle.session(), |row| {
                let s = &mut row.session;
                if s.status != SessionStatus::Running {
                    return Ok(Change::Leave);
                }
                // Behind the moment at which the rule itself would say that it is over.
                let until =
                    self.last_used(s).saturating_add(limit).max(now).saturating_add(STEP_MS);
                let more = until.saturating_sub(s.deadline_at(now)).max(0);
                s.timeout_ms = s.timeout_ms.saturating_add(more);
                Ok(if more > 0 { Change::Write } else { Change::Leave })
            })
            .await?;
        if row.session.status == SessionStatus::Running {
            self.set_deadline(&row.session.id, None, &row);
        }
        Ok(true)
    }

    async fn keep(
        self: &Arc<Self>,
        ns: &Namespace,
        name: &str,
        wanted_ms: Option<i64>,
    ) -> Result<Session, Error> {
        let sandbox = self.named(ns, name).await?.sandbox;
        let (live, row) = self.present(&ns.team, &sandbox.current_session_id).await?;
        let ruled = self.life_of(&live).await?.idle_stop_ms.is_some();
        let (now, id) = (self.now(), row.session.id.clone());
        let until = now.saturating_add(wanted_ms.unwrap_or(sandbox.timeout_ms));
        let (row, _) = self
            .change_session_from(Some(row), &id, |row| {
                let s = &mut row.session;
                if s.status != SessionStatus::Running {
                    return Err(Error::not_running(s));
                }
                let more = until.saturating_sub(s.deadline_at(now)).max(0);
                let total = s.timeout_ms.saturating_add(more);
                if total > MAX_TIMEOUT_MS && !ruled {
                    return Err(too_long(name, total));
                }
                s.timeout_ms = total;
                if wanted_ms.is_some() {
                    s.keep_until = s.keep_until.max(Some(until));
                }
                Ok(Change::Write)
            })
            .await?;
        self.activity.touch(&sandbox.id);
        Ok(row.session)
    }
}

fn too_long(name: &str, total: i64) -> Error {
    let message = format!(
        "The time limit of sandbox '{name}' would be {total} ms; at most {MAX_TIMEOUT_MS} ms are allowed, \
         unless it has an idle rule (bivouac set {name} --idle-stop 30m)"
    );
    Error::new(ErrorKind::Invalid, "sandbox_timeout_invalid", message)
}

impl Engine {
    /// Counts as use of a running sandbox. Its time is not over for so long from now on (absent: for as long as
    /// a session of it may live), and with `wanted_ms` its idle rule does not stop it before either.
    ///
    /// # Errors
    /// 400 for a time out of bounds, or when a sandbox without an idle rule would live for longer than a day;
    /// 403, 404; 410 or 422 when it does not run.
    pub async fn keep_alive(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        wanted_ms: Option<i64>,
    ) -> Result<Session, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        if let Some(ms) = wanted_ms
            && !(1_000..=*IDLE_STOP_MS.end()).contains(&ms)
        {
            let most = IDLE_STOP_MS.end();
            let message = format!("Invalid duration: must be 1000 to {most} ms, got {ms}");
            return Err(Error::invalid(message));
        }
        tracing::debug!(by = %who.name, sandbox = %name, ?wanted_ms, "keep alive");
        self.inner.keep(ns, name, wanted_ms).await
    }
}
