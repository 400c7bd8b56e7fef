//! Snapshots of a running sandbox, which goes on.
//!
//! What was written is flushed first; then the sandbox stands still for as long as its upper takes to be
//! kept, which does not depend on how much there is. Its size is found out afterwards.
//!
//! Invariants: whatever happens between standing still and going on, the sandbox goes on: at once after an
//! error, at the next start after a crash (`adopt`). The data comes before the record, so a crash leaves
//! data that nobody knows, which the sweep removes. Called by the engine's own calls and by `forks`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bivouac_runtime::{Handle, RuntimeError};
use bivouac_store::{Durability, SessionRow, SnapshotRow};
use bivouac_types::Millis;
use bivouac_types::access::Verb;
use bivouac_types::id::SnapshotId;
use bivouac_types::name::Namespace;
use bivouac_types::sandbox::DEFAULT_SNAPSHOT_EXPIRATION_MS;
use bivouac_types::session::{Session, SessionStatus};
use bivouac_types::snapshot::{Purpose, Snapshot, check_labels};

use crate::api::{Principal, TakeSnapshot};
use crate::error::Error;
use crate::fault::FaultPoint;
use crate::holds::Hold;
use crate::inner::{Inner, Live};
use crate::lifecycle::{Keep, chain, snapshot_row};
use crate::snapshots::check_expiration;
use crate::{Engine, Operation};

/// How long an answer waits for the size of a snapshot: longer, and it carries an estimate.
const SIZE_PATIENCE: Duration = Duration::from_millis(250);
/// Between two attempts to let a sandbox go on, ms.
const THAW_AGAIN_MS: Millis = 1_000;

/// What a live snapshot is for.
pub(crate) struct Take {
    pub(crate) purpose: Purpose,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) expiration_ms: i64,
}

/// Microseconds since `begun`.
fn micros(begun: std::time::Instant) -> i64 {
    i64::try_from(begun.elapsed().as_micros()).unwrap_or(i64::MAX)
}

/// A moment to measure from.
#[expect(
    clippy::disallowed_methods,
    reason = "how long a sandbox stood still is told and never decided by; the clock has milliseconds"
)]
fn begin() -> std::time::Instant {
    std::time::Instant::now()
}

impl Inner {
    /// Takes a snapshot of a running session. Holds the sandbox's lock. The snapshot stays for as long as
    /// the answered hold at least.
    pub(crate) async fn take_live(
        self: &Arc<Self>,
        row: &SessionRow,
        take: Take,
    ) -> Result<(SnapshotRow, Hold), Error> {
        let session = &row.session.id;
        let Some(live) = self.live(session) else { return Err(Error::not_running(&row.session)) };
        let id = self.ids.snapshot(self.now())?;
        let hold = self.holds.hold(id.as_str());
        // What is left to flush while it stands still is what it writes from here on.
        self.runtime.flush().await?;
        let recorded = match self.keep_still(&live, &id).await {
            Ok(stall_us) => self.record_live(row, &id, take, stall_us).await,
            Err(error) => Err(error),
        };
        match recorded {
            Ok(record) => {
                self.reach(FaultPoint::LiveRecorded).await?;
                tracing::info!(%session, snapshot = %id, stall_us = record.snapshot.stall_us, "live snapshot");
                Ok((record, hold))
            }
            Err(error) => {
                // A record whose write was not confirmed may be there: its data stays then.
                if !matches!(self.db.snapshot(&id).await, Ok(None)) {
                    return Err(error);
                }
                if let Err(undo) = self.runtime.remove_snapshot(id.as_str()).await {
                    self.leftovers.store(true, std::sync::atomic::Ordering::Release);
                    tracing::error!(snapshot = %id, cause = %chain(&undo), "cannot remove half a snapshot yet");
                }
                Err(error)
            }
        }
    }

    /// Has a session stand still while its upper is kept. Answers for how long, µs. A paused one stays so.
    async fn keep_still(self: &Arc<Self>, live: &Live, id: &SnapshotId) -> Result<i64, Error> {
        let (handle, paused) = (&live.handle, live.is_paused());
        let begun = begin();
        let work = async {
            handle.freeze().await?;
            self.reach(FaultPoint::LiveFrozen).await?;
            self.runtime.keep(handle.session(), id.as_str()).await?;
            self.reach(FaultPoint::LiveKept).await
        };
        let kept = work.await;
        // Also after a freeze that failed: it may have come half way.
        let going = if paused { Ok(()) } else { self.thaw(handle).await };
        let stall_us = micros(begun);
        kept?;
        going?;
        self.reach(FaultPoint::LiveGoesOn).await?;
        Ok(stall_us)
    }

    /// Lets a session go on. If that fails it is tried until it works, or until the session has ended.
    pub(crate) async fn thaw(self: &Arc<Self>, handle: &Arc<dyn Handle>) -> Result<(), Error> {
        let error = match handle.thaw().await {
            Ok(()) => return Ok(()),
            Err(error @ RuntimeError::Gone(_)) => return Err(error.into()),
            Err(error) => error,
        };
        tracing::error!(session = %handle.session(), cause = %chain(&error), "cannot let a sandbox go on yet");
        let (inner, handle) = (Arc::clone(self), Arc::clone(handle));
        self.spawn(async move {
            let mut gone = handle.gone();
            let paused = || inner.live(handle.session()).is_some_and(|live| live.is_paused());
            while !*gone.borrow_and_update() && !paused() && handle.thaw().await.is_err() {
                inner.clock.sleep_until(inner.now().saturating_add(THAW_AGAIN_MS)).await;
            }
        });
        Err(error.into())
    }

    async fn record_live(
        &self,
        row: &SessionRow,
        id: &SnapshotId,
        take: Take,
        stall_us: i64,
    ) -> Result<SnapshotRow, Error> {
        let estimate = self.estimate(row).await?;
        let record = snapshot_row(row, id, self.now());
        let record = SnapshotRow {
            snapshot: Snapshot {
                size_bytes: estimate,
                measured: false,
                labels: take.labels,
                purpose: take.purpose,
                stall_us,
                ..record.snapshot.kept_for(take.expiration_ms)
            },
            ..record
        };
        let mut tx = self.db.begin(Durability::Power).await?;
        tx.insert_snapshot(&record).await?;
        tx.commit().await?;
        self.expiry_changed.notify_one();
        Ok(record)
    }

    /// About what a session's upper holds: what is counted, or what it started from where nothing is.
    async fn estimate(&self, row: &SessionRow) -> Result<i64, Error> {
        let level = self.runtime.disk_level(&row.session.id).await.ok().flatten();
        if let Some(level) = level {
            let held = self.disk_of(&row.session.resources).saturating_sub(level.left());
            return Ok(i64::try_from(held).unwrap_or(i64::MAX));
        }
        Ok(match &row.session.source_snapshot_id {
            Some(source) => self.db.snapshot(source).await?.map_or(0, |s| s.snapshot.size_bytes),
            None => 0,
        })
    }

    /// Finds out what a snapshot holds and writes it down; answers it.
    pub(crate) async fn measure_snapshot(&self, id: &SnapshotId) -> Result<i64, Error> {
        let stat = self.runtime.measure(id.as_str()).await?;
        let bytes = i64::try_from(stat.bytes).unwrap_or(i64::MAX);
        let mut tx = self.db.begin(Durability::Process).await?;
        tx.set_snapshot_size(id, bytes).await?;
        tx.commit().await?;
        Ok(bytes)
    }

    /// Measures a snapshot in a task of its own. The answer can be waited for.
    pub(crate) fn measure_soon(
        self: &Arc<Self>,
        id: &SnapshotId,
    ) -> tokio::sync::oneshot::Receiver<i64> {
        let (answer, wait) = tokio::sync::oneshot::channel();
        let (inner, id) = (Arc::clone(self), id.clone());
        self.spawn(async move {
            let key = format!("measure {id}");
            if inner.holds.is_held(&key) {
                return;
            }
            let _hold = inner.holds.hold(&key);
            match inner.measure_snapshot(&id).await {
                Ok(bytes) => drop(answer.send(bytes)),
                // It is gone, or the reconciler tries again.
                Err(error) => {
                    tracing::debug!(snapshot = %id, cause = %chain(&error), "not measured");
                }
            }
        });
        wait
    }

    /// Measures what is not measured yet: an engine ended before it could.
    pub(crate) async fn measure_all(self: &Arc<Self>) -> Result<(), Error> {
        for row in self.db.unmeasured_snapshots(&self.config.node).await? {
            drop(self.measure_soon(&row.snapshot.id));
        }
        Ok(())
    }

    /// A user's live snapshot.
    async fn take_of_user(
        self: &Arc<Self>,
        ns: &Namespace,
        name: &str,
        spec: TakeSnapshot,
    ) -> Result<(Snapshot, Session), Error> {
        let sandbox = self.named(ns, name).await?.sandbox;
        let held = self.sandbox_locks.lock(sandbox.id.as_str()).await;
        let sandbox = self.known_sandbox(&sandbox.id).await?.sandbox;
        let row = self.known_session(&sandbox.current_session_id).await?;
        if row.session.status != SessionStatus::Running {
            return Err(Error::not_running(&row.session));
        }
        if !spec.live {
            let keep = Keep::Snapshot { expiration_ms: spec.expiration_ms };
            let (row, taken) = self.end_session(&row.session.id, keep).await?;
            let Some(taken) = taken else { return Err(Error::not_running(&row.session)) };
            let taken = if spec.labels.is_empty() {
                taken
            } else {
                self.label(&taken.id, |labels| labels.clone_from(&spec.labels)).await?
            };
            return Ok((taken, row.session));
        }
        let expiration = spec.expiration_ms.or(sandbox.snapshot_expiration_ms);
        let take = Take {
            purpose: Purpose::Kept,
            labels: spec.labels,
            expiration_ms: expiration.unwrap_or(DEFAULT_SNAPSHOT_EXPIRATION_MS),
        };
        let (mut record, hold) = self.take_live(&row, take).await?;
        drop(held);
        let measured = self.measure_soon(&record.snapshot.id);
        if let Ok(Ok(bytes)) = tokio::time::timeout(SIZE_PATIENCE, measured).await {
            record.snapshot.size_bytes = bytes;
            record.snapshot.measured = true;
        }
        // It is not for others to count it out before its taker has heard of it.
        if let Err(error) = self.evict(&sandbox.id).await {
            tracing::error!(sandbox = %sandbox.id, cause = %chain(&error), "cannot evict old snapshots yet");
        }
        drop(hold);
        Ok((record.snapshot, row.session))
    }
}

impl Engine {
    /// Takes a snapshot of a running sandbox. With `live` it goes on, and would start from what it would
    /// have started from before; else it stops and starts from the snapshot next.
    ///
    /// # Errors
    /// 400 for a bad label or expiration, 404, 410 or 422 when it does not run, 429 when the host is full.
    pub async fn take_snapshot(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        spec: TakeSnapshot,
    ) -> Result<(Snapshot, Session), Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        check_labels(&spec.labels)?;
        if let Some(ms) = spec.expiration_ms {
            check_expiration("expiration", ms)?;
        }
        self.inner.admit().await?;
        tracing::info!(by = %who.name, sandbox = %name, live = spec.live, "snapshot");
        let inner = Arc::clone(&self.inner);
        let (ns, name) = (ns.clone(), name.to_owned());
        let work = async move { inner.take_of_user(&ns, &name, spec).await };
        self.inner.run(self.inner.counted(Operation::Snapshot, work)).await
    }
}
