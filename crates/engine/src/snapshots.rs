//! Snapshots: take, find, delete, evict, walk.
//!
//! Invariant: a record says `created` only while its data is there; deletion is recorded first and
//! the data removed after it, so what a crash leaves is data without a usable record, which the
//! orphan reconciler removes. Data never depends on a parent's: any snapshot may be deleted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bivouac_store::{ChildFilter, Durability, Position, SnapshotRow, SortKey};
use bivouac_types::access::Verb;
use bivouac_types::id::{SandboxId, SessionId, SnapshotId};
use bivouac_types::name::Namespace;
use bivouac_types::session::{Session, SessionStatus};
use bivouac_types::snapshot::{Purpose, Snapshot, SnapshotStatus, check_labels};

use crate::Engine;
use crate::api::{ListChildren, Page, Principal, Tree, TreeNode, TreeQuery};
use crate::cursor;
use crate::error::Error;
use crate::fault::FaultPoint;
use crate::inner::{Inner, busy};
use crate::lifecycle::Keep;

/// Longest time to keep, ms (ten years).
const MAX_EXPIRATION_MS: i64 = 3_650 * 86_400_000;
/// How long lists still show a snapshot after it was deleted, ms (a day): clients look there for what
/// became of one, and show it with its status.
const SHOW_DELETED_MS: i64 = 86_400_000;
/// How often a change of labels is tried again when another one was quicker.
const ATTEMPTS: u32 = 20;
/// Siblings that a node of a tree shows, and up to which they are counted.
const SIBLINGS: usize = 10;

/// Checks a time to keep: 0 is for ever.
pub(crate) fn check_expiration(field: &str, ms: i64) -> Result<i64, Error> {
    if (0..=MAX_EXPIRATION_MS).contains(&ms) {
        Ok(ms)
    } else {
        Err(Error::invalid(format!(
            "Invalid {field}: must be 0 (never) to {MAX_EXPIRATION_MS} ms, got {ms}"
        )))
    }
}

impl Inner {
    /// A snapshot of the namespace's team that can be started from.
    pub(crate) async fn usable_snapshot(
        &self,
        team: &str,
        id: &SnapshotId,
    ) -> Result<SnapshotRow, Error> {
        let now = self.now();
        match self.db.snapshot(id).await? {
            Some(row)
                if row.namespace.team == team
                    && row.snapshot.status == SnapshotStatus::Created
                    && row.snapshot.expires_at.is_none_or(|at| at > now) =>
            {
                Ok(row)
            }
            _ => Err(Error::no_snapshot(id.as_str())),
        }
    }

    /// Records that a snapshot is deleted, then removes its data. Again for one that is recorded as
    /// deleted already.
    pub(crate) async fn drop_snapshot(&self, id: &SnapshotId) -> Result<(), Error> {
        let mut tx = self.db.begin(Durability::Power).await?;
        tx.end_snapshot(id, SnapshotStatus::Deleted, self.now()).await?;
        tx.commit().await?;
        self.remove_data(FaultPoint::SnapshotDeleteIntent, std::slice::from_ref(id)).await?;
        self.images_changed.notify_one();
        self.reach(FaultPoint::SnapshotDataGone).await
    }

    /// Removes the data of snapshots whose records say that they are deleted.
    async fn remove_data(&self, before: FaultPoint, ids: &[SnapshotId]) -> Result<(), Error> {
        let work = async {
            self.reach(before).await?;
            for id in ids {
                self.runtime.remove_snapshot(id.as_str()).await?;
            }
            Ok(())
        };
        let result = work.await;
        if result.is_err() {
            self.leftovers.store(true, Ordering::Release);
        }
        result
    }

    /// Applies `keepLastSnapshots` of a sandbox: those that fall out go, or are left to expire. One that a
    /// sandbox would start from stays; what live forks start from is not counted.
    pub(crate) async fn evict(&self, sandbox: &SandboxId) -> Result<(), Error> {
        self.evict_behind(sandbox, 0).await
    }

    /// As [`Inner::evict`], with so many kept beyond those that are to be kept.
    pub(crate) async fn evict_behind(&self, sandbox: &SandboxId, more: usize) -> Result<(), Error> {
        let Some(row) = self.db.sandbox(sandbox).await? else { return Ok(()) };
        let Some(keep) = row.sandbox.keep_last else { return Ok(()) };
        let count = usize::try_from(keep.count).unwrap_or(usize::MAX).saturating_add(more);
        let mut all = self.db.snapshots_of(sandbox).await?;
        all.retain(|row| row.snapshot.purpose != Purpose::Fork);
        let (kept, fallen) = all.split_at(count.min(all.len()));
        let now = self.now();
        let mut gone = Vec::new();
        if keep.delete_evicted.unwrap_or(true) {
            for row in fallen {
                let id = &row.snapshot.id;
                let held = self.holds.is_held(id.as_str());
                if !held && !self.db.snapshot_is_current(id, None).await? {
                    gone.push(id.clone());
                }
            }
        }
        let mut tx = self.db.begin(Durability::Power).await?;
        for id in &gone {
            tx.end_snapshot(id, SnapshotStatus::Deleted, now).await?;
        }
        if let Some(expiration) = keep.expiration {
            for row in kept {
                tx.set_snapshot_expiration(&row.snapshot.id, expiration, now).await?;
            }
        }
        tx.commit().await?;
        self.expiry_changed.notify_one();
        self.remove_data(FaultPoint::EvictRecorded, &gone).await
    }

    /// Deletes the snapshots of a sandbox that no other sandbox would start from.
    pub(crate) async fn drop_orphan_snapshots(&self, sandbox: &SandboxId) -> Result<(), Error> {
        for row in self.db.snapshots_of(sandbox).await? {
            let id = &row.snapshot.id;
            let held = self.holds.is_held(id.as_str());
            if !held && !self.db.snapshot_is_current(id, Some(sandbox)).await? {
                self.drop_snapshot(id).await?;
            }
        }
        Ok(())
    }

    /// Snapshots a running session on a user's call, which stops it.
    async fn take_snapshot(
        self: &Arc<Self>,
        team: &str,
        id: &SessionId,
        expiration_ms: Option<i64>,
    ) -> Result<(Snapshot, Session), Error> {
        let row = self.session_row(team, id).await?;
        let _held = self.sandbox_locks.lock(row.session.sandbox_id.as_str()).await;
        let row = self.session_row(team, id).await?;
        if row.session.status != SessionStatus::Running {
            return Err(Error::not_running(&row.session));
        }
        let (row, taken) = self.end_session(id, Keep::Snapshot { expiration_ms }).await?;
        match taken {
            Some(snapshot) => Ok((snapshot, row.session)),
            None => Err(Error::not_running(&row.session)),
        }
    }

    /// Changes the labels of a usable snapshot.
    pub(crate) async fn label(
        &self,
        id: &SnapshotId,
        change: impl Fn(&mut BTreeMap<String, String>),
    ) -> Result<Snapshot, Error> {
        for _ in 0..ATTEMPTS {
            let found = self.db.snapshot(id).await?.map(|row| row.snapshot);
            let Some(mut snapshot) = found.filter(|s| s.status == SnapshotStatus::Created) else {
                return Err(Error::no_snapshot(id.as_str()));
            };
            let mut labels = snapshot.labels.clone();
            change(&mut labels);
            check_labels(&labels)?;
            let now = self.now();
            let mut tx = self.db.begin(Durability::Process).await?;
            let written = tx.set_snapshot_labels(id, &snapshot.labels, &labels, now).await?;
            tx.commit().await?;
            if written {
                snapshot.labels = labels;
                snapshot.updated_at = now;
                return Ok(snapshot);
            }
        }
        Err(busy(&format!("snapshot {id}")))
    }

    /// A snapshot of the team in any state, for somebody who sees where it is.
    async fn snapshot_for(
        &self,
        who: &Principal,
        verb: Verb,
        team: &str,
        id: &SnapshotId,
    ) -> Result<Snapshot, Error> {
        let unknown = || Error::not_found(format!("Snapshot {id} was not found."));
        match self.db.snapshot(id).await? {
            Some(row) if row.namespace.team == team => {
                who.may_see(&[verb], &row.namespace, unknown)?;
                Ok(row.snapshot)
            }
            _ => Err(unknown()),
        }
    }

    /// Checks that somebody may start from a snapshot, or look into it, wherever in the team it is. One that is not
    /// there is for the caller to find out.
    pub(crate) async fn check_snapshot(
        &self,
        who: &Principal,
        team: &str,
        id: &SnapshotId,
    ) -> Result<(), Error> {
        match self.db.snapshot(id).await? {
            Some(row) if row.namespace.team == team => {
                who.may_see(&[Verb::Read], &row.namespace, || Error::no_snapshot(id.as_str()))
            }
            _ => Ok(()),
        }
    }

    async fn node(&self, who: &Principal, snapshot: Snapshot) -> Result<TreeNode, Error> {
        let mut siblings = Vec::new();
        if let Some(parent) = &snapshot.parent_id {
            let rows = self.db.snapshot_children(parent).await?;
            let seen = rows.into_iter().filter(|row| who.grant.sees(&row.namespace));
            siblings = seen.map(|r| r.snapshot).filter(|s| s.id != snapshot.id).collect();
        }
        let count = siblings.len() + 1;
        siblings.truncate(SIBLINGS);
        let count = if count > SIBLINGS { format!("{SIBLINGS}+") } else { count.to_string() };
        Ok(TreeNode { snapshot, siblings, count })
    }

    /// The next snapshot on a walk.
    async fn step(
        &self,
        who: &Principal,
        from: &Snapshot,
        ascending: bool,
    ) -> Result<Option<Snapshot>, Error> {
        let row = match (&from.parent_id, ascending) {
            (_, true) => {
                let children = self.db.snapshot_children(&from.id).await?;
                children.into_iter().find(|row| who.grant.sees(&row.namespace))
            }
            (Some(parent), false) => self.db.snapshot(parent).await?,
            (None, false) => None,
        };
        // The walk ends where somebody's sight does.
        Ok(row.filter(|row| who.grant.sees(&row.namespace)).map(|row| row.snapshot))
    }
}

impl Engine {
    /// Takes a snapshot of a running session, which stops it. The sandbox starts from it next.
    ///
    /// # Errors
    /// 400 for a bad expiration, 410 or 422 when the session does not run, 429 when the host is full.
    pub async fn snapshot(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        expiration_ms: Option<i64>,
    ) -> Result<(Snapshot, Session), Error> {
        self.inner.check_session(who, &[Verb::Write], team, id).await?;
        self.inner.check_open()?;
        let expiration_ms =
            expiration_ms.map(|ms| check_expiration("expiration", ms)).transpose()?;
        self.inner.admit().await?;
        tracing::info!(by = %who.name, session = %id, "snapshot");
        let inner = Arc::clone(&self.inner);
        let (team, id) = (team.to_owned(), id.clone());
        let work = async move { inner.take_snapshot(&team, &id, expiration_ms).await };
        self.inner.run(self.inner.counted(crate::Operation::Snapshot, work)).await
    }

    /// Snapshots of a namespace, newest first; of one sandbox, if it is named. Those that were deleted
    /// within the last day are among them and say so.
    ///
    /// # Errors
    /// 400 for a bad limit or cursor.
    pub async fn snapshots(
        &self,
        who: &Principal,
        ns: &Namespace,
        query: ListChildren,
    ) -> Result<Page<Snapshot>, Error> {
        who.may(Verb::Read, ns)?;
        let (filter, limit) = self.inner.child_filter("snapshots", ns, &query).await?;
        let deleted_since = self.inner.now().saturating_sub(SHOW_DELETED_MS);
        let label = query.label.as_ref();
        let rows = self.inner.db.snapshots(&filter, deleted_since, label).await?;
        let (rows, next) =
            cursor::page(rows, limit, "snapshots", query.ascending, |row| Position {
                key: SortKey::Int(row.snapshot.created_at),
                id: row.snapshot.id.as_str().to_owned(),
            });
        Ok(Page { items: rows.into_iter().map(|row| row.snapshot).collect(), next })
    }

    /// A snapshot in any state: a deleted one says so.
    ///
    /// # Errors
    /// 404.
    pub async fn snapshot_by_id(
        &self,
        who: &Principal,
        team: &str,
        id: &SnapshotId,
    ) -> Result<Snapshot, Error> {
        self.inner.snapshot_for(who, Verb::Read, team, id).await
    }

    /// Writes labels on a snapshot: a value sets one, none removes it; all others stay.
    ///
    /// # Errors
    /// 400 for a bad label, 404, 410 when it is deleted.
    pub async fn label_snapshot(
        &self,
        who: &Principal,
        team: &str,
        id: &SnapshotId,
        labels: &BTreeMap<String, Option<String>>,
    ) -> Result<Snapshot, Error> {
        self.inner.check_open()?;
        self.inner.snapshot_for(who, Verb::Write, team, id).await?;
        tracing::info!(by = %who.name, snapshot = %id, "label snapshot");
        self.inner
            .label(id, |present| {
                for (key, value) in labels {
                    match value {
                        Some(value) => drop(present.insert(key.clone(), value.clone())),
                        None => drop(present.remove(key)),
                    }
                }
            })
            .await
    }

    /// Deletes a snapshot. Deleting it again answers the same.
    ///
    /// # Errors
    /// 404.
    pub async fn delete_snapshot(
        &self,
        who: &Principal,
        team: &str,
        id: &SnapshotId,
    ) -> Result<Snapshot, Error> {
        self.inner.check_open()?;
        self.inner.snapshot_for(who, Verb::Write, team, id).await?;
        tracing::info!(by = %who.name, snapshot = %id, "delete snapshot");
        let inner = Arc::clone(&self.inner);
        let wanted = id.clone();
        self.inner.run(async move { inner.drop_snapshot(&wanted).await }).await?;
        self.inner.snapshot_for(who, Verb::Write, team, id).await
    }

    /// Walks from a snapshot towards its ancestors, or its descendants. The walk also passes
    /// deleted ancestors: their place in the chain is known.
    ///
    /// # Errors
    /// 400 for a bad limit, 404.
    pub async fn snapshot_tree(
        &self,
        who: &Principal,
        ns: &Namespace,
        query: TreeQuery,
    ) -> Result<Tree, Error> {
        who.may(Verb::Read, ns)?;
        let limit = match query.limit.unwrap_or(10) {
            good @ 1..=10 => good as usize,
            bad => {
                return Err(Error::invalid(format!("Invalid limit: must be 1 to 10, got {bad}")));
            }
        };
        let start = self.snapshot_by_id(who, &ns.team, &query.snapshot_id).await?;
        let anchor = self.inner.node(who, start.clone()).await?;
        let mut nodes = vec![anchor.clone()];
        let mut at = start;
        let mut next = self.inner.step(who, &at, query.ascending).await?;
        while nodes.len() < limit
            && let Some(found) = next
        {
            nodes.push(self.inner.node(who, found.clone()).await?);
            at = found;
            next = self.inner.step(who, &at, query.ascending).await?;
        }
        Ok(Tree { nodes, anchor, next: next.map(|s| s.id) })
    }
}

impl Inner {
    /// What a list of sessions or snapshots asks of the database; one row more than the page.
    pub(crate) async fn child_filter(
        &self,
        list: &str,
        ns: &Namespace,
        query: &ListChildren,
    ) -> Result<(ChildFilter, usize), Error> {
        let limit = cursor::limit(query.limit)?;
        let after = cursor::read_opt(list, query.ascending, query.cursor.as_deref())?;
        // A name that is in use means that sandbox; else those that once had it.
        let sandbox = match &query.sandbox_name {
            Some(name) => self.db.sandbox_by_name(ns, name).await?.map(|row| row.sandbox.id),
            None => None,
        };
        let sandbox_name = query.sandbox_name.clone().filter(|_| sandbox.is_none());
        let filter = ChildFilter {
            namespace: ns.clone(),
            sandbox,
            sandbox_name,
            since: query.since,
            until: query.until,
            ascending: query.ascending,
            after,
            limit: i64::try_from(limit + 1).unwrap_or(i64::MAX),
        };
        Ok((filter, limit))
    }
}
