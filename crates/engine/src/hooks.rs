//! Hooks: commands of the user's that the engine runs by itself.
//!
//! There is one: `preStop` runs inside before a session ends that leaves something (a stop by whomever, a
//! snapshot that ends it, a rollback that keeps the present state), not before a deletion. Invariant: it is an
//! ordinary command with a record and a log; whatever becomes of it, the end goes on; it is waited for no longer
//! than its limit and a little. Called by `lifecycle`, with the sandbox's lock held.

use std::collections::BTreeMap;
use std::sync::Arc;

use bivouac_store::{SandboxRow, SessionRow};
use bivouac_types::Millis;
use bivouac_types::access::Verb;
use bivouac_types::command::{Command, CommandEnd, CommandSpec, EndReason};
use bivouac_types::id::SessionId;
use bivouac_types::life::{Hook, LifeChange};
use bivouac_types::name::Namespace;

use crate::Engine;
use crate::api::{Principal, Stopped};
use crate::error::Error;
use crate::fault::FaultPoint;
use crate::inner::{Inner, Live, locked};
use crate::lifecycle::chain;

/// `$0` of the hook: what `ps` shows it by.
pub(crate) const PRE_STOP: &str = "pre-stop";
/// How long after its limit a hook is waited for, ms: the shim has killed it by then.
const GRACE_MS: Millis = 5_000;

/// How a hook failed, for the user.
fn failure(end: &CommandEnd, limit_ms: u64) -> Option<String> {
    match (end.reason, end.exit_code) {
        (Some(EndReason::Timeout), _) => Some(format!("it took longer than {limit_ms} ms")),
        (_, Some(0)) => None,
        (_, Some(code)) => Some(format!("exit code {code}")),
        (_, None) => Some("its end is not known".to_owned()),
    }
}

impl Inner {
    /// Runs what a sandbox wants done before its session ends. Answers what is to be said of a failure.
    pub(crate) async fn before_stop(
        self: &Arc<Self>,
        sandbox: &SandboxRow,
        row: &SessionRow,
    ) -> Result<Option<String>, Error> {
        let Some(hook) = &sandbox.sandbox.life.pre_stop else { return Ok(None) };
        let id = &row.session.id;
        let Some(live) = self.live(id).filter(|live| !*live.handle.gone().borrow()) else {
            return Ok(None);
        };
        let mut skip = live.skip_hooks.subscribe();
        if *skip.borrow() {
            return Ok(None);
        }
        let limit = Millis::try_from(hook.timeout_ms).unwrap_or(Millis::MAX);
        let until = self.now().saturating_add(limit).saturating_add(GRACE_MS);
        let mut gone = live.handle.gone();
        let failed = tokio::select! {
            failed = Box::pin(self.run_hook(&live, hook)) => failed,
            () = self.clock.sleep_until(until) => Some(format!("it did not end within {limit} ms")),
            // The sender is part of `live`.
            _ = skip.wait_for(|skip| *skip) => Some("it was cut off".to_owned()),
            _ = gone.wait_for(|gone| *gone) => Some("its sandbox ended".to_owned()),
        };
        self.reach(FaultPoint::HookEnded).await?;
        Ok(failed.map(|why| {
            tracing::warn!(session = %id, %why, "the pre-stop hook failed");
            format!("it was stopped, and its pre-stop hook failed: {why}")
        }))
    }

    /// Answers why it failed, if it did.
    async fn run_hook(self: &Arc<Self>, live: &Arc<Live>, hook: &Hook) -> Option<String> {
        let ended = async {
            let row = self.unpause_held(live).await?;
            let spec = CommandSpec {
                program: "sh".to_owned(),
                args: vec!["-c".to_owned(), hook.command.clone(), PRE_STOP.to_owned()],
                cwd: None,
                env: BTreeMap::new(),
                sudo: false,
                timeout_ms: Some(hook.timeout_ms),
                attach_stdin: false,
                tty: None,
                terminal: None,
            };
            let command = self.start(live, &row, spec, None).await?;
            Ok::<_, Error>(self.end_of(live, &command).await)
        };
        match ended.await {
            Ok(end) => end.as_ref().map_or_else(
                || Some("its end is not known".to_owned()),
                |end| failure(end, hook.timeout_ms),
            ),
            Err(error) => {
                tracing::warn!(session = %live.handle.session(), cause = %chain(&error), "cannot run a hook");
                Some(error.message)
            }
        }
    }

    /// How a command that was just started ends.
    async fn end_of(&self, live: &Arc<Live>, command: &Command) -> Option<CommandEnd> {
        let running = locked(&live.commands).get(&command.id).cloned();
        let Some(mut running) = running else {
            return self.db.command(&command.session_id, &command.id).await.ok()??.command.end;
        };
        let seen = running.progress.wait_for(|p| p.end.is_some()).await.ok()?;
        seen.end.clone()
    }
}

impl Principal {
    /// Whether it may have the engine run what a change says: to run something inside takes that right.
    ///
    /// # Errors
    /// 403, 404.
    pub(crate) fn may_hook(&self, life: &LifeChange, ns: &Namespace) -> Result<(), Error> {
        if matches!(life.pre_stop, Some(Some(_))) { self.may(Verb::Exec, ns) } else { Ok(()) }
    }
}

impl Engine {
    /// As [`Engine::stop`], without the hook that the sandbox wants run before; one that runs is cut off.
    ///
    /// # Errors
    /// 404.
    pub async fn stop_without_hook(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
    ) -> Result<Stopped, Error> {
        self.inner.check_session(who, &[Verb::Write], team, id).await?;
        if let Some(live) = self.inner.live(id) {
            live.skip_hooks.send_replace(true);
        }
        self.stop(who, team, id).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_not_run_anything_inside_sets_no_hook() {
        let ns = Namespace { team: "a".to_owned(), project: "b".to_owned() };
        let mut who = Principal::local();
        who.grant.verbs = [Verb::Write].into();
        let hook = Hook { command: "id".to_owned(), timeout_ms: 1_000 };
        let set = LifeChange { pre_stop: Some(Some(hook)), ..LifeChange::default() };
        assert_eq!(who.may_hook(&set, &ns).unwrap_err().kind, crate::ErrorKind::Forbidden);
        let cleared = LifeChange { pre_stop: Some(None), ..LifeChange::default() };
        who.may_hook(&cleared, &ns).unwrap();
        who.grant.verbs.insert(Verb::Exec);
        who.may_hook(&set, &ns).unwrap();
    }

    #[test]
    fn failures_are_told_in_words() {
        let end = |exit_code, reason| CommandEnd { exit_code, duration_ms: 1, reason };
        assert_eq!(failure(&end(Some(0), None), 5), None);
        assert_eq!(failure(&end(Some(3), None), 5).as_deref(), Some("exit code 3"));
        let late = failure(&end(Some(137), Some(EndReason::Timeout)), 5);
        assert_eq!(late.as_deref(), Some("it took longer than 5 ms"));
        assert!(failure(&end(None, Some(EndReason::Lost)), 5).is_some());
    }
}
