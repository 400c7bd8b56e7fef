//! What all operations share: rows, handles of living sessions, locks, tasks.
//!
//! Owns: [`Inner`] and [`Live`]. Invariant: a session has a [`Live`] exactly while this process
//! holds the handle of a session that is running or being ended; every write of a session goes
//! through here, so the copy in `Live` is never older than the last write of this process.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use bivouac_runtime::{Handle, Progress, Runtime};
use bivouac_store::{Db, Durability, SandboxRow, SessionRow, StoreError};
use bivouac_types::Millis;
use bivouac_types::access::Verb;
use bivouac_types::command::{Command, CommandEnd};
use bivouac_types::id::{CommandId, SandboxId, SessionId};
use bivouac_types::life::Life;
use bivouac_types::name::Namespace;
use bivouac_types::session::SessionStatus;
use futures_util::future::{BoxFuture, Shared};
use tokio::sync::{Notify, Semaphore, oneshot, watch};
use tokio::task::JoinSet;

use crate::EngineConfig;
use crate::access::Access;
use crate::activity::Activity;
use crate::api::{Principal, Stopped};
use crate::archives::MOST_ARCHIVES;
use crate::clock::Clock;
use crate::commands::told;
use crate::counters::{Counters, Operation};
use crate::egress::desk::{Desk, EgressCounters};
use crate::error::{Error, ErrorKind};
use crate::fault::{FaultPoint, Faults};
use crate::holds::Holds;
use crate::identity::Identity;
use crate::ids::Ids;
use crate::images::Images;
use crate::leases::Leases;
use crate::locks::Locks;
use crate::preview::Routes;
use crate::providers::outcalls::Outcalls;
use crate::secrets::Cache;
use crate::terminals::Seats;
use crate::uses::Uses;

/// How often a compare-and-set is tried again. Each failure means that another writer won.
const ATTEMPTS: u32 = 50;
/// How long a shutdown waits for operations.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

/// A stop that several callers wait for.
pub(crate) type SharedStop = Shared<BoxFuture<'static, Result<Stopped, Error>>>;

pub(crate) struct Inner {
    pub(crate) config: EngineConfig,
    pub(crate) db: Db,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) ids: Ids,
    pub(crate) faults: Faults,
    /// What names of routes lead to.
    pub(crate) routes: Routes,
    /// Who may ask.
    pub(crate) access: Access,
    /// Who asked for what, until it is written down.
    pub(crate) uses: Uses,
    /// When something last happened in each sandbox.
    pub(crate) activity: Arc<Activity>,
    /// When this process began.
    pub(crate) began_at: Millis,
    /// Who sits at which terminal.
    pub(crate) seats: Seats,
    pub(crate) live: RwLock<HashMap<SessionId, Arc<Live>>>,
    /// By sandbox id.
    pub(crate) sandbox_locks: Locks,
    /// By drive id, or by namespace and name.
    pub(crate) drive_locks: Locks,
    /// By idempotency key.
    pub(crate) key_locks: Locks,
    pub(crate) stops: Mutex<HashMap<SessionId, SharedStop>>,
    pub(crate) ranges: Mutex<Ranges>,
    pub(crate) deadlines: Mutex<BTreeSet<(Millis, SessionId)>>,
    pub(crate) deadlines_changed: Notify,
    pub(crate) expiry_changed: Notify,
    /// Something that lay on an image may be gone.
    pub(crate) images_changed: Notify,
    /// A sandbox may have left a snapshot that only live forks start from.
    pub(crate) forks_changed: Notify,
    /// A session may have been lost.
    pub(crate) lost_changed: Notify,
    /// What operations are in the middle of: not for reconcilers.
    pub(crate) holds: Holds,
    pub(crate) closing: AtomicBool,
    /// Data that no row wants could not be removed: the next pass of the orphan reconciler looks.
    pub(crate) leftovers: AtomicBool,
    pub(crate) leases: Mutex<Leases>,
    pub(crate) images: Images,
    pub(crate) counters: Counters,
    pub(crate) identity: Identity,
    /// What providers of secrets said.
    pub(crate) cache: Cache,
    pub(crate) outcalls: Outcalls,
    /// How often secrets have changed: what was resolved before a change may be out of date.
    pub(crate) secret_changes: AtomicU64,
    pub(crate) egress_counters: EgressCounters,
    /// Exports and imports that may go on at once.
    pub(crate) archives: Arc<Semaphore>,
    tasks: Mutex<JoinSet<()>>,
    /// Operations in the middle of their steps.
    at_work: watch::Sender<usize>,
    /// When they began.
    begun: Arc<Mutex<Begun>>,
}

/// Begins of operations that have not ended.
#[derive(Debug, Default)]
struct Begun {
    next: u64,
    at: BTreeMap<u64, Millis>,
}

/// Counts one operation, until it is dropped.
struct AtWork {
    count: watch::Sender<usize>,
    begun: Arc<Mutex<Begun>>,
    number: u64,
}

impl Drop for AtWork {
    fn drop(&mut self) {
        locked(&self.begun).at.remove(&self.number);
        self.count.send_modify(|count| *count -= 1);
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("config", &self.config).finish_non_exhaustive()
    }
}

/// A running session of this process.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) handle: Arc<dyn Handle>,
    row: Mutex<SessionRow>,
    /// Commands whose end is not recorded yet.
    pub(crate) commands: Mutex<HashMap<CommandId, Running>>,
    /// How those ended that were open when the session did.
    pub(crate) ends: Mutex<HashMap<CommandId, CommandEnd>>,
    /// Turns true when all its commands have a recorded end.
    pub(crate) settled: watch::Sender<bool>,
    /// What its broker asks.
    pub(crate) desk: Desk,
    /// Whether it stands still, as `row` says.
    pub(crate) paused: watch::Sender<bool>,
    /// Its end is to come without hooks.
    pub(crate) skip_hooks: watch::Sender<bool>,
    /// The rules of its sandbox, once somebody has asked.
    pub(crate) life: Mutex<Option<Life>>,
    /// Not before this time does its idle rule act again.
    pub(crate) idle_again: AtomicI64,
}

/// A command whose end is not recorded yet.
#[derive(Debug, Clone)]
pub(crate) struct Running {
    pub(crate) command: Command,
    pub(crate) progress: watch::Receiver<Progress>,
}

impl Live {
    pub(crate) fn row(&self) -> SessionRow {
        locked(&self.row).clone()
    }

    /// Where it belongs.
    pub(crate) fn namespace(&self) -> Namespace {
        locked(&self.row).namespace.clone()
    }

    pub(crate) fn is_paused(&self) -> bool {
        *self.paused.borrow()
    }

    /// The command, if it has not been settled, with its end as far as it is known.
    pub(crate) fn running(&self, id: &CommandId) -> Option<Running> {
        let mut running = locked(&self.commands).get(id).cloned()?;
        running.command.end = told(running.progress.borrow().end.clone());
        Some(running)
    }
}

/// What to do with a row that was altered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing: it is as it should be.
    Leave,
    /// Write it.
    Write,
    /// Write it, and add its use to the sums of its sandbox.
    WriteAndAdd {
        /// CPU time, ms.
        cpu_ms: i64,
        /// Wall time, ms.
        lasted_ms: i64,
    },
}

/// Id ranges of this node.
#[derive(Debug)]
pub(crate) struct Ranges {
    used: BTreeSet<u32>,
    next: u32,
    count: u32,
}

impl Ranges {
    pub(crate) fn new(count: u32) -> Self {
        Self { used: BTreeSet::new(), next: 0, count }
    }

    pub(crate) fn mark(&mut self, index: u32) {
        self.used.insert(index);
    }

    pub(crate) fn free(&mut self, index: u32) {
        self.used.remove(&index);
    }

    /// The first free one behind the one given last, so that a range that was just freed is not
    /// given to the next session at once: what a fault left of the old one cannot meet the new one.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let found = (self.next..self.count)
            .chain(0..self.next.min(self.count))
            .find(|index| !self.used.contains(index))?;
        self.used.insert(found);
        self.next = (found + 1) % self.count.max(1);
        Some(found)
    }
}

/// A mutex of this crate guards plain data that is whole after every statement.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    pub(crate) fn new(
        config: EngineConfig,
        db: Db,
        runtime: Arc<dyn Runtime>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let ranges = Mutex::new(Ranges::new(config.id_ranges));
        let outcalls = Outcalls::new(config.extra_ca.clone());
        let activity = Activity::new(Arc::clone(&clock));
        let began_at = clock.now();
        let access = Access::new(config.token.as_ref());
        Self {
            config,
            db,
            runtime,
            clock,
            access,
            uses: Uses::default(),
            activity,
            began_at,
            seats: Seats::default(),
            routes: Routes::default(),
            ids: Ids::default(),
            faults: Faults::from_env(),
            live: RwLock::default(),
            sandbox_locks: Locks::default(),
            drive_locks: Locks::default(),
            key_locks: Locks::default(),
            stops: Mutex::default(),
            ranges,
            deadlines: Mutex::default(),
            deadlines_changed: Notify::new(),
            expiry_changed: Notify::new(),
            images_changed: Notify::new(),
            forks_changed: Notify::new(),
            lost_changed: Notify::new(),
            holds: Holds::default(),
            closing: AtomicBool::new(false),
            leftovers: AtomicBool::new(false),
            leases: Mutex::default(),
            images: Images::default(),
            counters: Counters::default(),
            identity: Identity::default(),
            cache: Cache::default(),
            outcalls,
            secret_changes: AtomicU64::new(0),
            egress_counters: EgressCounters::default(),
            archives: Arc::new(Semaphore::new(MOST_ARCHIVES)),
            tasks: Mutex::default(),
            at_work: watch::Sender::new(0),
            begun: Arc::default(),
        }
    }

    pub(crate) fn now(&self) -> Millis {
        self.clock.now()
    }

    pub(crate) async fn reach(&self, point: FaultPoint) -> Result<(), Error> {
        self.faults.reach(point).await
    }

    /// Refuses new work while the engine is being shut down.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if self.closing.load(Ordering::Acquire) {
            let message = "The engine is shutting down; try again when it is back.";
            return Err(Error::new(ErrorKind::Unavailable, "shutting_down", message));
        }
        Ok(())
    }

    /// Starts a task that ends with the engine.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = locked(&self.tasks);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Ends all tasks where they stand.
    pub(crate) fn abort_tasks(&self) {
        locked(&self.tasks).abort_all();
    }

    fn begin(&self) -> AtWork {
        self.at_work.send_modify(|count| *count += 1);
        let mut begun = locked(&self.begun);
        let number = begun.next;
        begun.next += 1;
        begun.at.insert(number, self.now());
        drop(begun);
        AtWork { count: self.at_work.clone(), begun: Arc::clone(&self.begun), number }
    }

    /// When the oldest operation began that is in the middle of its steps.
    pub(crate) fn oldest_operation(&self) -> Option<Millis> {
        locked(&self.begun).at.values().min().copied()
    }

    /// Does work that has several steps to its end, whether or not the caller stays to hear of it.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Error> {
        let (answer, wait) = oneshot::channel();
        let counted = self.begin();
        // On the heap from here on: what is handed through this many functions must be small.
        let work = crate::request::carried(Box::pin(work));
        self.spawn(async move {
            let _counted = counted;
            // A caller that has left does not want the answer.
            let _ = answer.send(work.await);
        });
        wait.await.unwrap_or_else(|_| {
            Err(Error::internal(
                "The engine gave up in the middle; what was begun is settled when it starts again.",
            ))
        })
    }

    /// Counts how `work` comes out.
    pub(crate) fn counted<T: Send + 'static>(
        self: &Arc<Self>,
        operation: Operation,
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> impl Future<Output = Result<T, Error>> + Send + 'static {
        let inner = Arc::clone(self);
        let work = Box::pin(work);
        async move {
            let outcome = work.await;
            inner.counters.note(operation, &outcome);
            outcome
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    pub(crate) fn operations(&self) -> usize {
        *self.at_work.borrow()
    }

    /// Waits for operations in the middle of their steps, then ends all tasks. What takes too long
    /// is cut off where it stands, and settled at the next start.
    pub(crate) async fn finish_work(&self) {
        self.wait_idle().await;
        self.abort_tasks();
    }

    /// Waits, with patience, until no operation is in the middle of its steps.
    pub(crate) async fn wait_idle(&self) {
        let mut at_work = self.at_work.subscribe();
        let idle = at_work.wait_for(|count| *count == 0);
        if tokio::time::timeout(PATIENCE, idle).await.is_err() {
            tracing::warn!("operations are still at work; they are settled at the next start");
        }
    }

    pub(crate) fn live(&self, id: &SessionId) -> Option<Arc<Live>> {
        self.live.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// Takes a handle into service.
    pub(crate) fn add_live(&self, row: SessionRow, handle: Arc<dyn Handle>) -> Arc<Live> {
        let id = row.session.id.clone();
        let live = Arc::new(Live {
            paused: watch::Sender::new(row.session.paused_at.is_some()),
            skip_hooks: watch::Sender::new(false),
            life: Mutex::default(),
            idle_again: AtomicI64::new(0),
            handle,
            row: Mutex::new(row),
            commands: Mutex::default(),
            ends: Mutex::default(),
            settled: watch::Sender::new(false),
            desk: Desk::default(),
        });
        let mut map = self.live.write().unwrap_or_else(PoisonError::into_inner);
        map.insert(id, Arc::clone(&live));
        live
    }

    pub(crate) fn remove_live(&self, id: &SessionId) {
        self.live.write().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    pub(crate) fn live_count(&self) -> usize {
        self.live.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(crate) fn live_ids(&self) -> Vec<SessionId> {
        self.live.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// Brings the copy in [`Live`] and the deadline up to a row that was just written.
    pub(crate) fn note(&self, row: &SessionRow) {
        let Some(live) = self.live(&row.session.id) else { return };
        let before = {
            let mut held = locked(&live.row);
            if held.session.generation >= row.session.generation {
                return;
            }
            // In one step with the row: the second of two writes must not be told first.
            live.paused.send_replace(row.session.paused_at.is_some());
            std::mem::replace(&mut *held, row.clone())
        };
        self.set_deadline(&before.session.id, Some(before.session.deadline()), row);
    }

    /// Puts a session into the queue of deadlines while it runs and its time goes on, and out of it
    /// afterwards.
    pub(crate) fn set_deadline(&self, id: &SessionId, old: Option<Millis>, row: &SessionRow) {
        let mut queue = locked(&self.deadlines);
        if let Some(old) = old {
            queue.remove(&(old, id.clone()));
        }
        if row.session.status == SessionStatus::Running && row.session.paused_at.is_none() {
            queue.insert((row.session.deadline(), id.clone()));
            self.deadlines_changed.notify_one();
        }
    }

    pub(crate) fn free_range(&self, index: u32) {
        locked(&self.ranges).free(index);
    }

    /// The session, if it exists and is the team's.
    pub(crate) async fn session_row(
        &self,
        team: &str,
        id: &SessionId,
    ) -> Result<SessionRow, Error> {
        match self.db.session(id).await? {
            Some(row) if row.namespace.team == team => Ok(row),
            _ => Err(Error::no_session(id)),
        }
    }

    /// The session, if it is the team's and somebody who asks sees where it is and has one of these rights there.
    /// To one who does not see it, it is not there: the words are those for an unknown id.
    pub(crate) async fn session_for(
        &self,
        who: &Principal,
        verbs: &[Verb],
        team: &str,
        id: &SessionId,
    ) -> Result<SessionRow, Error> {
        let row = self.session_row(team, id).await?;
        who.may_see(verbs, &row.namespace, || Error::no_session(id))?;
        Ok(row)
    }

    /// Checks a right of somebody who asks for a session; cheap when it runs.
    pub(crate) async fn check_session(
        &self,
        who: &Principal,
        verbs: &[Verb],
        team: &str,
        id: &SessionId,
    ) -> Result<(), Error> {
        match self.live(id).map(|live| live.namespace()) {
            Some(ns) if ns.team == team => who.may_see(verbs, &ns, || Error::no_session(id)),
            Some(_) => Err(Error::no_session(id)),
            None => self.session_for(who, verbs, team, id).await.map(drop),
        }
    }

    /// A session that this process knows to exist.
    pub(crate) async fn known_session(&self, id: &SessionId) -> Result<SessionRow, Error> {
        self.db.session(id).await?.ok_or_else(|| Error::no_session(id))
    }

    pub(crate) async fn known_sandbox(&self, id: &SandboxId) -> Result<SandboxRow, Error> {
        let row = self.db.sandbox(id).await?;
        row.ok_or_else(|| Error::not_found("This sandbox was deleted in the meantime."))
    }

    /// Reads a session, lets `change` alter it, and writes it if it has not changed since; else
    /// again. Answers the row as it is now, and whether it was written.
    pub(crate) async fn change_session(
        &self,
        id: &SessionId,
        change: impl FnMut(&mut SessionRow) -> Result<Change, Error>,
    ) -> Result<(SessionRow, bool), Error> {
        self.change_session_from(None, id, change).await
    }

    /// As [`Inner::change_session`], beginning with a row that the caller has read or written just
    /// now. One that is old after all only costs another attempt, if `change` wants to write it.
    pub(crate) async fn change_session_from(
        &self,
        mut known: Option<SessionRow>,
        id: &SessionId,
        mut change: impl FnMut(&mut SessionRow) -> Result<Change, Error>,
    ) -> Result<(SessionRow, bool), Error> {
        for _ in 0..ATTEMPTS {
            let mut row = match known.take() {
                Some(row) => row,
                None => self.known_session(id).await?,
            };
            let before = row.session.status;
            let change = change(&mut row)?;
            if change == Change::Leave {
                return Ok((row, false));
            }
            row.session.updated_at = self.now();
            let mut tx = self.db.begin(Durability::Process).await?;
            match tx.update_session(before, &mut row).await {
                Ok(()) => {
                    if let Change::WriteAndAdd { cpu_ms, lasted_ms } = change {
                        tx.add_totals(&row.session.sandbox_id, cpu_ms, lasted_ms).await?;
                    }
                    tx.commit().await?;
                    self.note(&row);
                    return Ok((row, true));
                }
                Err(e) if e.is_changed() => {}
                Err(e) => return Err(e.into()),
            }
        }
        Err(busy(&format!("session {id}")))
    }

    /// As [`Inner::change_session`], for a sandbox.
    pub(crate) async fn change_sandbox(
        &self,
        id: &SandboxId,
        mut change: impl FnMut(&mut SandboxRow) -> Result<bool, Error>,
    ) -> Result<SandboxRow, Error> {
        for _ in 0..ATTEMPTS {
            let mut row = self.known_sandbox(id).await?;
            if !change(&mut row)? {
                return Ok(row);
            }
            row.sandbox.updated_at = self.now();
            let mut tx = self.db.begin(Durability::Process).await?;
            match tx.update_sandbox(&mut row).await {
                Ok(()) => {
                    tx.commit().await?;
                    return Ok(row);
                }
                Err(e) if e.is_changed() => {}
                Err(e) => return Err(e.into()),
            }
        }
        Err(busy(&format!("sandbox {id}")))
    }
}

/// Too many others write the same row.
pub(crate) fn busy(what: &str) -> Error {
    let message = format!("Too many changes of {what} at once; try again.");
    Error::new(ErrorKind::TooMany, "busy", message)
        .because(StoreError::Changed { what: what.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::Ranges;

    #[test]
    fn a_freed_range_is_given_again_only_after_the_others() {
        let mut ranges = Ranges::new(3);
        ranges.mark(1);
        assert_eq!(ranges.take(), Some(0));
        ranges.free(0);
        assert_eq!(ranges.take(), Some(2));
        assert_eq!(ranges.take(), Some(0));
        assert_eq!(ranges.take(), None);
        ranges.free(1);
        assert_eq!(ranges.take(), Some(1));
        assert_eq!(Ranges::new(0).take(), None);
    }
}
