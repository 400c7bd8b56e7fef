//! Forks: new sandboxes that begin where another one is, one or hundreds by one call.
//!
//! A running source is not stopped: one live snapshot is taken, in no list, from which all of them start
//! and which goes when none of them would any more.
//!
//! Invariant: the sandboxes of one call come to be at once or not at all. Until all of them run they are
//! [`Deleting::Unborn`]: in no list, and removed by the next start if this process ends. Called by the
//! engine's own calls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bivouac_store::{Deleting, Durability, SnapshotRow};
use bivouac_types::access::Verb;
use bivouac_types::id::{SandboxId, SnapshotId};
use bivouac_types::name::{Namespace, check_sandbox_name};
use bivouac_types::sandbox::Sandbox;
use bivouac_types::session::SessionStatus;
use bivouac_types::snapshot::Purpose;
use futures_util::StreamExt;

use crate::api::{ForkMany, ForkSandbox, Forked, Principal, View};
use crate::commands::check_key;
use crate::error::{Error, ErrorKind};
use crate::fault::FaultPoint;
use crate::holds::Hold;
use crate::inner::Inner;
use crate::lifecycle::chain;
use crate::live::Take;
use crate::resolve::{Plan, parse_snapshot};
use crate::{Engine, Operation};

/// Most sandboxes of one call.
const MAX_FORKS: u32 = 1_000;
/// How many are launched at the same time.
const PARALLEL: usize = 16;
/// Held while there are sandboxes that are not born yet.
pub(crate) const UNBORN: &str = "unborn";

/// What forks start from.
struct Origin {
    /// The source, with what is in force in it.
    sandbox: Sandbox,
    snapshot: Option<SnapshotRow>,
    /// Keeps the snapshot while they are made.
    _hold: Option<Hold>,
}

/// Names of the forks: the one that was given, numbered when there are several.
fn names(name: Option<&str>, count: u32) -> Result<Vec<Option<String>>, Error> {
    let Some(name) = name else { return Ok(vec![None; count as usize]) };
    if count == 1 {
        check_sandbox_name(name)?;
        return Ok(vec![Some(name.to_owned())]);
    }
    // The longest of them, which is the last one.
    check_sandbox_name(&format!("{name}-{count}"))?;
    Ok((1..=count).map(|n| Some(format!("{name}-{n}"))).collect())
}

impl Inner {
    /// Finds or takes what the forks start from.
    async fn origin(
        self: &Arc<Self>,
        ns: &Namespace,
        source: &str,
        spec: &ForkMany,
    ) -> Result<Origin, Error> {
        let found = self.named(ns, source).await?.sandbox;
        if let Some(text) = &spec.snapshot {
            return self.origin_at(ns, found, Some(parse_snapshot(text)?)).await;
        }
        if spec.live == Some(false) {
            let current = found.current_snapshot_id.clone();
            return self.origin_at(ns, found, current).await;
        }
        let _held = self.sandbox_locks.lock(found.id.as_str()).await;
        let mut sandbox = self.named(ns, source).await?.sandbox;
        let row = self.known_session(&sandbox.current_session_id).await?;
        if row.session.status != SessionStatus::Running {
            if spec.live == Some(true) {
                return Err(Error::not_running(&row.session));
            }
            let current = sandbox.current_snapshot_id.clone();
            return self.origin_at(ns, sandbox, current).await;
        }
        let take = Take { purpose: Purpose::Fork, labels: BTreeMap::new(), expiration_ms: 0 };
        let (snapshot, hold) = self.take_live(&row, take).await?;
        drop(self.measure_soon(&snapshot.snapshot.id));
        // What it may reach at this moment, not what it would with its next start.
        let session = row.session;
        sandbox.policy = session.policy_before.unwrap_or(session.policy);
        Ok(Origin { sandbox, snapshot: Some(snapshot), _hold: Some(hold) })
    }

    async fn origin_at(
        &self,
        ns: &Namespace,
        sandbox: Sandbox,
        snapshot: Option<SnapshotId>,
    ) -> Result<Origin, Error> {
        let Some(id) = snapshot else { return Ok(Origin { sandbox, snapshot: None, _hold: None }) };
        let hold = self.holds.hold(id.as_str());
        let snapshot = self.usable_snapshot(&ns.team, &id).await?;
        Ok(Origin { sandbox, snapshot: Some(snapshot), _hold: Some(hold) })
    }

    async fn fork_many(
        self: &Arc<Self>,
        who: &Principal,
        ns: &Namespace,
        source: &str,
        spec: ForkMany,
    ) -> Result<Forked, Error> {
        let names = names(spec.name.as_deref(), spec.count)?;
        let lock = spec.idempotency_key.as_ref();
        let lock = lock.map(|key| format!("fork {}/{} {key}", ns.team, ns.project));
        let _once = match &lock {
            Some(lock) => Some(self.key_locks.lock(lock).await),
            None => None,
        };
        if let Some(key) = &spec.idempotency_key
            && let Some(forked) = self.forked_before(ns, key, spec.count).await?
        {
            return Ok(forked);
        }
        let origin = match self.origin(ns, source, &spec).await {
            Ok(origin) => origin,
            Err(error) => {
                self.forks_changed.notify_one();
                return Err(error);
            }
        };
        let at = origin.snapshot.as_ref().map(|row| row.snapshot.clone());
        let made = async {
            self.reach(FaultPoint::ForkOrigin).await?;
            let overrides = ForkSandbox { name: None, idempotency_key: None, ..spec.overrides };
            let from = at.as_ref().map(|snapshot| &snapshot.id);
            let (plan, needs_auth) =
                self.plan_fork(who, ns, &origin.sandbox, from, overrides).await?;
            let plan = Plan { unborn: true, ..plan };
            let views = self.bear(ns, plan, names, spec.idempotency_key.as_deref()).await?;
            Ok::<_, Error>((views, needs_auth))
        };
        let made = made.await;
        drop(origin);
        self.forks_changed.notify_one();
        let (sandboxes, needs_auth) = made?;
        Ok(Forked { snapshot: at, sandboxes, needs_auth })
    }

    /// The sandboxes of an earlier call with the same key: all of them, or none were made.
    async fn forked_before(
        &self,
        ns: &Namespace,
        key: &str,
        count: u32,
    ) -> Result<Option<Forked>, Error> {
        let mut known: BTreeMap<String, Sandbox> = BTreeMap::new();
        for row in self.db.sandboxes_by_create_key_prefix(ns, &child_key(key, "")).await? {
            if row.deleting == Deleting::No {
                known.insert(row.create_key.unwrap_or_default(), row.sandbox);
            }
        }
        if known.is_empty() {
            return Ok(None);
        }
        let mut sandboxes = Vec::new();
        for n in 1..=count {
            if let Some(sandbox) = known.remove(&child_key(key, n)) {
                sandboxes.push(self.view(sandbox, false).await?);
            }
        }
        if sandboxes.is_empty() {
            return Ok(None);
        }
        let id = sandboxes[0].session.source_snapshot_id.clone();
        let snapshot = match id {
            Some(id) => self.db.snapshot(&id).await?.map(|row| row.snapshot),
            None => None,
        };
        Ok(Some(Forked { snapshot, sandboxes, needs_auth: Vec::new() }))
    }

    /// Makes all of them, or none.
    async fn bear(
        self: &Arc<Self>,
        ns: &Namespace,
        plan: Plan,
        names: Vec<Option<String>>,
        key: Option<&str>,
    ) -> Result<Vec<View>, Error> {
        let _hold = self.holds.hold(UNBORN);
        let failed = AtomicBool::new(false);
        let start = |(index, name): (u32, Option<String>)| {
            let key = key.map(|key| child_key(key, index));
            let plan = Plan { name: name.clone(), key, ..plan.clone() };
            let failed = &failed;
            async move {
                if failed.load(Ordering::Acquire) {
                    return None;
                }
                let made = Box::pin(self.start_new(ns, plan)).await;
                failed.fetch_or(made.is_err(), Ordering::AcqRel);
                Some((index, made.map_err(|error| (name, error))))
            }
        };
        let mut made: Vec<_> = futures_util::stream::iter((1..).zip(names))
            .map(start)
            .buffer_unordered(PARALLEL)
            .filter_map(std::future::ready)
            .collect()
            .await;
        made.sort_by_key(|(index, _)| *index);
        let wanted = made.len();
        let mut views = Vec::new();
        let mut first = None;
        for (index, outcome) in made {
            match outcome {
                Ok(view) => views.push(view),
                Err((name, error)) => drop(first.get_or_insert((index, name, error))),
            }
        }
        if let Some((index, name, error)) = first {
            self.undo(&views, false).await;
            return Err(of_child(error, index, name.as_deref(), wanted));
        }
        if let Err(error) = self.show(&views).await {
            self.undo(&views, false).await;
            return Err(error);
        }
        if let Err(error) = self.reach(FaultPoint::ForkShown).await {
            self.undo(&views, true).await;
            return Err(error);
        }
        Ok(views)
    }

    /// Makes sandboxes that all run ones like any other, at once.
    async fn show(&self, views: &[View]) -> Result<(), Error> {
        self.reach(FaultPoint::ForkStarted).await?;
        let mut tx = self.db.begin(Durability::Process).await?;
        for view in views {
            if !tx.bear_sandbox(&view.sandbox.id).await? {
                let name = &view.sandbox.name;
                let message = format!("Sandbox '{name}' was removed while its siblings were made.");
                return Err(Error::new(ErrorKind::Conflict, "conflict", message));
            }
        }
        Ok(tx.commit().await?)
    }

    /// Removes what was made, unless it is somebody else's: not `shown` and yet there. What resists is the
    /// reconciler's.
    async fn undo(self: &Arc<Self>, views: &[View], shown: bool) {
        let ids: Vec<SandboxId> = views.iter().map(|view| view.sandbox.id.clone()).collect();
        let remove = |id: SandboxId| async move {
            let row = self.db.sandbox(&id).await;
            let strange = matches!(&row, Ok(Some(row)) if row.deleting == Deleting::No);
            if strange && !shown {
                return;
            }
            if let Err(error) = self.remove_known(&id, Deleting::Yes).await {
                tracing::error!(sandbox = %id, cause = %chain(&error), "cannot remove a fork yet");
            }
        };
        futures_util::stream::iter(ids).for_each_concurrent(PARALLEL, remove).await;
    }

    /// Deletes snapshots that were taken for live forks and that no sandbox would start from.
    pub(crate) async fn drop_unwanted_forks(&self) -> Result<(), Error> {
        for id in self.db.unwanted_fork_snapshots(&self.config.node).await? {
            if self.holds.is_held(id.as_str()) {
                continue;
            }
            let mut tx = self.db.begin(Durability::Power).await?;
            let ended = tx.end_fork_snapshot(&id, self.now()).await?;
            tx.commit().await?;
            if ended {
                tracing::debug!(snapshot = %id, "no fork starts from it any more");
                self.drop_snapshot(&id).await?;
            }
        }
        Ok(())
    }
}

/// Idempotency key of one of several.
fn child_key(key: &str, n: impl std::fmt::Display) -> String {
    format!("{key}#{n}")
}

/// Says which of several it was.
fn of_child(mut error: Error, index: u32, name: Option<&str>, made: usize) -> Error {
    let name = name.map(|name| format!(" ('{name}')")).unwrap_or_default();
    error.message = format!(
        "Fork {index}{name} failed, and all {made} that were begun are removed again: {}",
        error.message
    );
    error
}

impl Engine {
    /// Makes one or several sandboxes that begin where another one is, with its configuration and the
    /// overrides over it. A running source is caught as it is and goes on; a stopped one gives its current
    /// snapshot. All of them, or none.
    ///
    /// # Errors
    /// 404 for the source, 410 or 422 when `live` is asked of one that does not run, else as
    /// [`Engine::create`].
    pub async fn forks(
        &self,
        who: &Principal,
        ns: &Namespace,
        source: &str,
        spec: ForkMany,
    ) -> Result<Forked, Error> {
        who.may(Verb::Write, ns)?;
        if spec.overrides.update.policy.is_some() {
            who.may(Verb::Policy, ns)?;
        }
        if spec.overrides.update.life.as_ref().is_some_and(|life| life.pre_stop.is_some()) {
            who.may(Verb::Exec, ns)?;
        }
        self.inner.check_pull(who, spec.overrides.image.as_deref()).await?;
        if spec.snapshot.is_some() && spec.live == Some(true) {
            let message = "Invalid snapshotId: a live fork starts from the present state";
            return Err(Error::invalid(message));
        }
        if let Some(text) = &spec.snapshot {
            self.inner.check_snapshot(who, &ns.team, &parse_snapshot(text)?).await?;
        }
        self.inner.check_open()?;
        check_key(spec.idempotency_key.as_deref())?;
        if !(1..=MAX_FORKS).contains(&spec.count) {
            let count = spec.count;
            let message = format!("Invalid count: must be 1 to {MAX_FORKS}, got {count}");
            return Err(Error::invalid(message));
        }
        self.inner.admit().await?;
        let inner = Arc::clone(&self.inner);
        let (who, ns, source) = (who.clone(), ns.clone(), source.to_owned());
        let work = async move {
            let forked = inner.fork_many(&who, &ns, &source, spec).await?;
            let count = forked.sandboxes.len();
            tracing::info!(by = %who.name, %source, count, "forked");
            Ok(forked)
        };
        self.inner.run(self.inner.counted(Operation::Fork, work)).await
    }

    /// Makes a sandbox from another's current snapshot (or image, while it has none) and its
    /// configuration, overrides laid over it. The source goes on.
    ///
    /// # Errors
    /// 404 for the source, else as [`Engine::create`].
    pub async fn fork(
        &self,
        who: &Principal,
        ns: &Namespace,
        source: &str,
        spec: ForkSandbox,
    ) -> Result<View, Error> {
        who.may(Verb::Write, ns)?;
        if spec.update.policy.is_some() {
            who.may(Verb::Policy, ns)?;
        }
        if spec.update.life.as_ref().is_some_and(|life| life.pre_stop.is_some()) {
            who.may(Verb::Exec, ns)?;
        }
        self.inner.check_pull(who, spec.image.as_deref()).await?;
        self.inner.check_open()?;
        check_key(spec.idempotency_key.as_deref())?;
        let inner = Arc::clone(&self.inner);
        let (who, by) = (who.clone(), who.name.clone());
        let (ns, source) = (ns.clone(), source.to_owned());
        let work = async move {
            let key = spec.idempotency_key.clone();
            let make = async {
                let from = inner.named(&ns, &source).await?.sandbox;
                let at = from.current_snapshot_id.clone();
                let _hold = at.as_ref().map(|id| inner.holds.hold(id.as_str()));
                let (plan, _) = inner.plan_fork(&who, &ns, &from, at.as_ref(), spec).await?;
                inner.start_new(&ns, plan).await
            };
            let view = inner.once(&ns, key, make).await?;
            tracing::info!(%by, %source, sandbox = %view.sandbox.name, "forked");
            Ok(view)
        };
        self.inner.run(self.inner.counted(Operation::Fork, work)).await
    }
}

#[cfg(test)]
mod tests {
    use super::names;

    #[test]
    fn several_are_numbered() {
        assert_eq!(names(None, 2).unwrap(), [None, None]);
        assert_eq!(names(Some("a"), 1).unwrap(), [Some("a".to_owned())]);
        assert_eq!(names(Some("a"), 2).unwrap(), [Some("a-1".to_owned()), Some("a-2".to_owned())]);
        assert!(names(Some("a/b"), 2).is_err());
        let long = "n".repeat(126);
        assert!(names(Some(&long), 9).is_ok());
        assert!(names(Some(&long), 10).is_err());
    }
}
