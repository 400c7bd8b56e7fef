//! Snapshots' records. A record outlives the data: `deleted` and `failed` ones stay for readers.
//!
//! Invariant: a snapshot of which a session that runs would start again does not expire, and one that live
//! forks start from goes only when no sandbox would start from it: both are conditions of the statement
//! that ends it.

use std::collections::BTreeMap;

use bivouac_types::Millis;
use bivouac_types::id::{SandboxId, SessionId, SnapshotId};
use bivouac_types::name::Namespace;
use bivouac_types::snapshot::{Purpose, Snapshot, SnapshotStatus};
use sqlx::AssertSqlSafe;

use crate::db::{Db, Tx};
use crate::error::StoreError;
use crate::row::{Reader, to_json, word};
use crate::sessions::ChildFilter;

const TABLE: &str = "snapshots";
const COLUMNS: &str = "id, team, project, node, sandbox_id, sandbox_name, source_session_id, \
    status, image, runtime, region, size_bytes, automatic, parent_id, expiration_ms, expires_at, \
    created_at, updated_at, last_used_at, labels, purpose, stall_us, measured";
/// A sandbox that is not at rest would start from it again.
const BUSY: &str = "EXISTS (SELECT 1 FROM sandboxes b WHERE b.current_snapshot_id = snapshots.id \
    AND b.deleting <> 1 AND b.deleting <> 2 AND b.status NOT IN ('stopped', 'failed', 'aborted'))";
/// A sandbox would start from it.
const WANTED: &str = "EXISTS (SELECT 1 FROM sandboxes b WHERE b.current_snapshot_id = snapshots.id \
    AND b.deleting <> 1 AND b.deleting <> 2)";

/// A snapshot and what only the engine knows of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRow {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// Whose it is.
    pub namespace: Namespace,
    /// The node that holds its data.
    pub node: String,
    /// The sandbox that it was taken of; that one may be gone.
    pub sandbox_id: SandboxId,
}

fn status_word(status: SnapshotStatus) -> &'static str {
    match status {
        SnapshotStatus::Created => "created",
        SnapshotStatus::Deleted => "deleted",
        SnapshotStatus::Failed => "failed",
    }
}

fn parse_status(text: &str) -> Option<SnapshotStatus> {
    let all = [SnapshotStatus::Created, SnapshotStatus::Deleted, SnapshotStatus::Failed];
    all.into_iter().find(|s| status_word(*s) == text)
}

fn read(row: &sqlx::any::AnyRow) -> Result<SnapshotRow, StoreError> {
    let r = Reader { row, table: TABLE };
    let snapshot = Snapshot {
        id: r.parsed("id", SnapshotId::parse)?,
        source_session_id: r.parsed("source_session_id", SessionId::parse)?,
        sandbox_name: r.text("sandbox_name")?,
        status: r.parsed("status", |t| word(parse_status(t), t))?,
        image: r.text("image")?,
        runtime: r.text("runtime")?,
        region: r.text("region")?,
        size_bytes: r.int("size_bytes")?,
        automatic: r.flag("automatic")?,
        parent_id: r.parsed_opt("parent_id", SnapshotId::parse)?,
        expiration_ms: r.int("expiration_ms")?,
        expires_at: r.int_opt("expires_at")?,
        created_at: r.int("created_at")?,
        updated_at: r.int("updated_at")?,
        last_used_at: r.int_opt("last_used_at")?,
        labels: r.json("labels")?,
        purpose: r.parsed("purpose", |t| word(Purpose::parse(t), t))?,
        stall_us: r.int("stall_us")?,
        measured: r.flag("measured")?,
    };
    Ok(SnapshotRow {
        snapshot,
        namespace: Namespace { team: r.text("team")?, project: r.text("project")? },
        node: r.text("node")?,
        sandbox_id: r.parsed("sandbox_id", SandboxId::parse)?,
    })
}

impl Db {
    async fn snapshots_by(
        &self,
        tail: &str,
        value: String,
    ) -> Result<Vec<SnapshotRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM snapshots WHERE {tail}");
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(value)
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("read snapshots", e))?;
        rows.iter().map(read).collect()
    }

    /// A snapshot by its id.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotRow>, StoreError> {
        Ok(self.snapshots_by("id = $1", id.as_str().to_owned()).await?.pop())
    }

    /// Usable snapshots that were taken of a sandbox, newest first; what live forks start from included.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn snapshots_of(&self, sandbox: &SandboxId) -> Result<Vec<SnapshotRow>, StoreError> {
        let tail = "sandbox_id = $1 AND status = 'created' ORDER BY created_at DESC, id DESC";
        self.snapshots_by(tail, sandbox.as_str().to_owned()).await
    }

    /// Usable snapshots whose session started from `parent`, newest first.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn snapshot_children(
        &self,
        parent: &SnapshotId,
    ) -> Result<Vec<SnapshotRow>, StoreError> {
        let tail = "parent_id = $1 AND status = 'created' ORDER BY created_at DESC, id DESC";
        self.snapshots_by(tail, parent.as_str().to_owned()).await
    }

    /// Usable snapshots whose data is on a node.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn snapshots_on(&self, node: &str) -> Result<Vec<SnapshotRow>, StoreError> {
        self.snapshots_by("node = $1 AND status = 'created' ORDER BY id", node.to_owned()).await
    }

    /// Usable snapshots of a node whose size is still an estimate.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn unmeasured_snapshots(&self, node: &str) -> Result<Vec<SnapshotRow>, StoreError> {
        let tail = "measured = 0 AND status = 'created' AND node = $1 ORDER BY id";
        self.snapshots_by(tail, node.to_owned()).await
    }

    /// Ids of a node's snapshots for live forks from which no sandbox would start.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn unwanted_fork_snapshots(&self, node: &str) -> Result<Vec<SnapshotId>, StoreError> {
        let sql = format!(
            "SELECT id FROM snapshots WHERE purpose = 'fork' AND status = 'created' \
             AND node = $1 AND NOT {WANTED} ORDER BY id"
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(node.to_owned())
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list snapshots of forks", e))?;
        rows.iter()
            .map(|row| Reader { row, table: TABLE }.parsed("id", SnapshotId::parse))
            .collect()
    }

    /// Usable snapshots whose time is over at `now`, a hundred at most. One from which a sandbox that is
    /// not at rest would start again is in use.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn snapshots_expired(&self, now: Millis) -> Result<Vec<SnapshotRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM snapshots WHERE status = 'created' AND expires_at <= $1 \
             AND NOT {BUSY} ORDER BY expires_at, id LIMIT 100"
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(now)
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list expired snapshots", e))?;
        rows.iter().map(read).collect()
    }

    /// When the next usable snapshot that is not in use expires.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn next_snapshot_expiry(&self) -> Result<Option<Millis>, StoreError> {
        let sql = format!(
            "SELECT expires_at FROM snapshots WHERE status = 'created' \
             AND expires_at IS NOT NULL AND NOT {BUSY} ORDER BY expires_at LIMIT 1"
        );
        let row = sqlx::query(AssertSqlSafe(sql))
            .fetch_optional(self.reader())
            .await
            .map_err(|e| StoreError::sql("find the next expiry", e))?;
        match row {
            Some(row) => Reader { row: &row, table: TABLE }.int_opt("expires_at"),
            None => Ok(None),
        }
    }

    /// One page of snapshots that are usable, failed, or were deleted at `deleted_since` or later;
    /// those deleted before, and those that live forks start from, are found by id only. With `label`,
    /// only those that have it.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn snapshots(
        &self,
        filter: &ChildFilter,
        deleted_since: Millis,
        label: Option<&(String, String)>,
    ) -> Result<Vec<SnapshotRow>, StoreError> {
        let mut conditions = filter.conditions()?;
        conditions.and_plain("purpose <> 'fork'");
        if let Some((key, value)) = label {
            // Quotes inside of a JSON text are escaped: this can only be the whole pair.
            let pair = to_json(TABLE, &BTreeMap::from([(key, value)]))?;
            let pair = pair.trim_start_matches('{').trim_end_matches('}').to_owned();
            conditions.and("labels <> replace(labels, ?, '')", pair)?;
        }
        conditions.and("(status <> 'deleted' OR updated_at >= ?)", deleted_since)?;
        conditions.after("created_at", filter.after.as_ref(), filter.ascending)?;
        let (tail, arguments) = conditions.finish("created_at", filter.ascending, filter.limit)?;
        let sql = format!("SELECT {COLUMNS} FROM snapshots{tail}");
        let rows = sqlx::query_with(AssertSqlSafe(sql), arguments)
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list snapshots", e))?;
        rows.iter().map(read).collect()
    }
}

impl Tx<'_> {
    /// Adds a snapshot; one that is there already stays as it is.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn insert_snapshot(&mut self, row: &SnapshotRow) -> Result<(), StoreError> {
        let s = &row.snapshot;
        let sql = format!(
            "INSERT INTO snapshots ({COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, \
             $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23) \
             ON CONFLICT (id) DO NOTHING"
        );
        sqlx::query(AssertSqlSafe(sql))
            .bind(s.id.as_str().to_owned())
            .bind(row.namespace.team.clone())
            .bind(row.namespace.project.clone())
            .bind(row.node.clone())
            .bind(row.sandbox_id.as_str().to_owned())
            .bind(s.sandbox_name.clone())
            .bind(s.source_session_id.as_str().to_owned())
            .bind(status_word(s.status))
            .bind(s.image.clone())
            .bind(s.runtime.clone())
            .bind(s.region.clone())
            .bind(s.size_bytes)
            .bind(i64::from(s.automatic))
            .bind(s.parent_id.as_ref().map(|i| i.as_str().to_owned()))
            .bind(s.expiration_ms)
            .bind(s.expires_at)
            .bind(s.created_at)
            .bind(s.updated_at)
            .bind(s.last_used_at)
            .bind(to_json(TABLE, &s.labels)?)
            .bind(s.purpose.as_str())
            .bind(s.stall_us)
            .bind(i64::from(s.measured))
            .execute(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("add a snapshot", e))?;
        Ok(())
    }

    /// Moves a usable snapshot to another status. Answers whether it was usable.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn end_snapshot(
        &mut self,
        id: &SnapshotId,
        status: SnapshotStatus,
        now: Millis,
    ) -> Result<bool, StoreError> {
        let done = sqlx::query(
            "UPDATE snapshots SET status = $1, updated_at = $2 \
             WHERE id = $3 AND status = 'created' RETURNING id",
        )
        .bind(status_word(status))
        .bind(now)
        .bind(id.as_str().to_owned())
        .fetch_optional(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("end a snapshot", e))?;
        Ok(done.is_some())
    }

    /// As [`Tx::end_snapshot`] with `deleted`, but only if its time is still over at `now`: a use
    /// in the meantime has moved it.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn expire_snapshot(
        &mut self,
        id: &SnapshotId,
        now: Millis,
    ) -> Result<bool, StoreError> {
        self.lock_snapshot(id).await?;
        let sql = format!(
            "UPDATE snapshots SET status = 'deleted', updated_at = $1 WHERE id = $2 \
             AND status = 'created' AND expires_at <= $1 AND NOT {BUSY} RETURNING id"
        );
        let done = sqlx::query(AssertSqlSafe(sql))
            .bind(now)
            .bind(id.as_str().to_owned())
            .fetch_optional(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("expire a snapshot", e))?;
        Ok(done.is_some())
    }

    /// Has others that use the row wait for this transaction, and this one for them: what it looks at in
    /// other tables afterwards is what they wrote.
    async fn lock_snapshot(&mut self, id: &SnapshotId) -> Result<(), StoreError> {
        sqlx::query("UPDATE snapshots SET updated_at = updated_at WHERE id = $1")
            .bind(id.as_str().to_owned())
            .execute(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("hold a snapshot", e))?;
        Ok(())
    }

    /// As [`Tx::end_snapshot`] with `deleted`, for one that live forks start from, and only if no sandbox
    /// would.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn end_fork_snapshot(
        &mut self,
        id: &SnapshotId,
        now: Millis,
    ) -> Result<bool, StoreError> {
        self.lock_snapshot(id).await?;
        let sql = format!(
            "UPDATE snapshots SET status = 'deleted', updated_at = $1 WHERE id = $2 \
             AND status = 'created' AND purpose = 'fork' AND NOT {WANTED} RETURNING id"
        );
        let done = sqlx::query(AssertSqlSafe(sql))
            .bind(now)
            .bind(id.as_str().to_owned())
            .fetch_optional(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("end a snapshot of forks", e))?;
        Ok(done.is_some())
    }

    /// Writes the size of a usable snapshot as a walk found it.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn set_snapshot_size(
        &mut self,
        id: &SnapshotId,
        bytes: i64,
    ) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE snapshots SET size_bytes = $1, measured = 1 \
             WHERE id = $2 AND status = 'created'",
        )
        .bind(bytes)
        .bind(id.as_str().to_owned())
        .execute(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("write a snapshot's size", e))?;
        Ok(())
    }

    /// Replaces the labels of a usable snapshot that was read with `before`. Answers whether it still had
    /// those.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn set_snapshot_labels(
        &mut self,
        id: &SnapshotId,
        before: &BTreeMap<String, String>,
        labels: &BTreeMap<String, String>,
        now: Millis,
    ) -> Result<bool, StoreError> {
        let done = sqlx::query(
            "UPDATE snapshots SET labels = $1, updated_at = $2 \
             WHERE id = $3 AND status = 'created' AND labels = $4 RETURNING id",
        )
        .bind(to_json(TABLE, labels)?)
        .bind(now)
        .bind(id.as_str().to_owned())
        .bind(to_json(TABLE, before)?)
        .fetch_optional(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("write a snapshot's labels", e))?;
        Ok(done.is_some())
    }

    /// Writes that a usable snapshot was used at `now`, which moves its expiry. Answers whether it
    /// was usable.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn use_snapshot(&mut self, id: &SnapshotId, now: Millis) -> Result<bool, StoreError> {
        let done = sqlx::query(
            "UPDATE snapshots SET last_used_at = $1, updated_at = $1, \
             expires_at = CASE WHEN expiration_ms = 0 THEN NULL ELSE $1 + expiration_ms END \
             WHERE id = $2 AND status = 'created' RETURNING id",
        )
        .bind(now)
        .bind(id.as_str().to_owned())
        .fetch_optional(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("use a snapshot", e))?;
        Ok(done.is_some())
    }

    /// Gives a usable snapshot another time to be kept.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn set_snapshot_expiration(
        &mut self,
        id: &SnapshotId,
        expiration_ms: i64,
        now: Millis,
    ) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE snapshots SET expiration_ms = $1, updated_at = $2, \
             expires_at = CASE WHEN $1 = 0 THEN NULL \
             ELSE COALESCE(last_used_at, created_at) + $1 END \
             WHERE id = $3 AND status = 'created'",
        )
        .bind(expiration_ms)
        .bind(now)
        .bind(id.as_str().to_owned())
        .execute(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("set a snapshot's expiration", e))?;
        Ok(())
    }
}
