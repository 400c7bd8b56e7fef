//! Sessions: one run of a sandbox each.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use bivouac_types::Millis;
use bivouac_types::drive::Mounts;
use bivouac_types::id::{SandboxId, SessionId, SnapshotId};
use bivouac_types::name::Namespace;
use bivouac_types::policy::NetworkPolicy;
use bivouac_types::sandbox::Resources;
use bivouac_types::session::{Session, SessionStatus};
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;

use crate::db::{Db, Tx};
use crate::env;
use crate::error::StoreError;
use crate::page::{Position, Where};
use crate::row::{Reader, to_json, word};
use crate::vault::Vault;

const TABLE: &str = "sessions";
const COLUMNS: &str = "id, sandbox_id, sandbox_name, team, project, node, first, status, \
    generation, config, timeout_ms, source_snapshot_id, id_range, reason, requested_at, \
    created_at, updated_at, started_at, requested_stop_at, stopped_at, aborted_at, \
    snapshotted_at, active_cpu_ms, closing_snapshot_id, closing_automatic, \
    closing_expiration_ms, settled";

/// The intent to keep a session's file system at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Closing {
    /// The snapshot that is taken.
    pub snapshot_id: SnapshotId,
    /// By a stop, a timeout or a fault; not by a user's call.
    pub automatic: bool,
    /// It keeps what a rollback leaves.
    pub rollback: bool,
    /// How long it is kept after its last use, ms; 0 is for ever.
    pub expiration_ms: i64,
}

/// A session and what only the engine knows of it.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionRow {
    /// The session.
    pub session: Session,
    /// Whose it is.
    pub namespace: Namespace,
    /// The run that the create made.
    pub first: bool,
    /// The snapshot that its end takes or took.
    pub closing: Option<Closing>,
    /// Nothing of it is left on its node, and its id range is free.
    pub settled: bool,
}

#[derive(Serialize, Deserialize)]
struct Config {
    resources: Resources,
    cwd: String,
    runtime: String,
    image: String,
    region: String,
    /// Of the time before the vault.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sealed_env: Option<String>,
    #[serde(default, skip_serializing_if = "Mounts::is_empty")]
    mounts: Mounts,
    policy: NetworkPolicy,
    /// Absent in records of the time before policies were in force.
    #[serde(default)]
    policy_generation: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    policy_before: Option<NetworkPolicy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    paused_at: Option<Millis>,
    #[serde(default)]
    paused_ms: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keep_until: Option<Millis>,
}

/// Which sessions or snapshots to list.
#[derive(Debug, Clone)]
pub struct ChildFilter {
    /// Only of this namespace.
    pub namespace: Namespace,
    /// Only of this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Only of sandboxes that had this name.
    pub sandbox_name: Option<String>,
    /// Made at this time or later.
    pub since: Option<Millis>,
    /// Made before this time.
    pub until: Option<Millis>,
    /// Oldest first.
    pub ascending: bool,
    /// Only behind this row.
    pub after: Option<Position>,
    /// At most so many.
    pub limit: i64,
}

impl ChildFilter {
    pub(crate) fn conditions(&self) -> Result<Where, StoreError> {
        let mut conditions = Where::new();
        conditions.and("team = ?", self.namespace.team.clone())?;
        conditions.and("project = ?", self.namespace.project.clone())?;
        if let Some(id) = &self.sandbox {
            conditions.and("sandbox_id = ?", id.as_str().to_owned())?;
        }
        if let Some(name) = &self.sandbox_name {
            conditions.and("sandbox_name = ?", name.clone())?;
        }
        if let Some(since) = self.since {
            conditions.and("created_at >= ?", since)?;
        }
        if let Some(until) = self.until {
            conditions.and("created_at < ?", until)?;
        }
        Ok(conditions)
    }
}

fn config_of(s: &Session, vault: &OnceLock<Vault>) -> Result<String, StoreError> {
    let config = Config {
        resources: s.resources,
        cwd: s.cwd.clone(),
        runtime: s.runtime.clone(),
        image: s.image.clone(),
        region: s.region.clone(),
        env: BTreeMap::new(),
        sealed_env: env::seal(vault, TABLE, s.id.as_str(), &s.env)?,
        mounts: s.mounts.clone(),
        policy: s.policy.clone(),
        policy_generation: s.policy_generation,
        policy_before: s.policy_before.clone(),
        paused_at: s.paused_at,
        paused_ms: s.paused_ms,
        keep_until: s.keep_until,
    };
    to_json(TABLE, &config)
}

/// 0 by a user's call, 1 by itself, 2 for a rollback.
fn closing_number(closing: Option<&Closing>) -> i64 {
    match closing {
        Some(closing) if closing.rollback => 2,
        Some(closing) => i64::from(closing.automatic),
        None => 0,
    }
}

fn read(row: &sqlx::any::AnyRow, vault: &OnceLock<Vault>) -> Result<SessionRow, StoreError> {
    let r = Reader { row, table: TABLE };
    let config: Config = r.json("config")?;
    let env = env::open(vault, TABLE, &r.text("id")?, config.env, config.sealed_env)?;
    let id_range = r.int("id_range")?;
    let session = Session {
        id: r.parsed("id", SessionId::parse)?,
        sandbox_id: r.parsed("sandbox_id", SandboxId::parse)?,
        sandbox_name: r.text("sandbox_name")?,
        status: r.parsed("status", |t| word(SessionStatus::parse(t), t))?,
        generation: r.int("generation")?,
        resources: config.resources,
        timeout_ms: r.int("timeout_ms")?,
        cwd: config.cwd,
        runtime: config.runtime,
        image: config.image,
        env,
        mounts: config.mounts,
        policy: config.policy,
        policy_generation: config.policy_generation,
        policy_before: config.policy_before,
        paused_at: config.paused_at,
        paused_ms: config.paused_ms,
        keep_until: config.keep_until,
        source_snapshot_id: r.parsed_opt("source_snapshot_id", SnapshotId::parse)?,
        id_range: u32::try_from(id_range)
            .map_err(|e| StoreError::Corrupt { table: TABLE, why: format!("id_range: {e}") })?,
        node: r.text("node")?,
        region: config.region,
        reason: r.text_opt("reason")?,
        requested_at: r.int("requested_at")?,
        created_at: r.int("created_at")?,
        updated_at: r.int("updated_at")?,
        started_at: r.int_opt("started_at")?,
        requested_stop_at: r.int_opt("requested_stop_at")?,
        stopped_at: r.int_opt("stopped_at")?,
        aborted_at: r.int_opt("aborted_at")?,
        snapshotted_at: r.int_opt("snapshotted_at")?,
        active_cpu_ms: r.int_opt("active_cpu_ms")?,
    };
    let closing = match r.parsed_opt("closing_snapshot_id", SnapshotId::parse)? {
        Some(snapshot_id) => Some(Closing {
            snapshot_id,
            automatic: r.int("closing_automatic")? == 1,
            rollback: r.int("closing_automatic")? == 2,
            expiration_ms: r.int("closing_expiration_ms")?,
        }),
        None => None,
    };
    Ok(SessionRow {
        session,
        namespace: Namespace { team: r.text("team")?, project: r.text("project")? },
        first: r.flag("first")?,
        closing,
        settled: r.flag("settled")?,
    })
}

impl Db {
    /// A session by its id.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn session(&self, id: &SessionId) -> Result<Option<SessionRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM sessions WHERE id = $1");
        let row = sqlx::query(AssertSqlSafe(sql))
            .bind(id.as_str().to_owned())
            .fetch_optional(self.reader())
            .await
            .map_err(|e| StoreError::sql("read a session", e))?;
        row.as_ref().map(|row| read(row, &self.vault)).transpose()
    }

    /// One page of sessions.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn sessions(&self, filter: &ChildFilter) -> Result<Vec<SessionRow>, StoreError> {
        let mut conditions = filter.conditions()?;
        conditions.after("created_at", filter.after.as_ref(), filter.ascending)?;
        let (tail, arguments) = conditions.finish("created_at", filter.ascending, filter.limit)?;
        let sql = format!("SELECT {COLUMNS} FROM sessions{tail}");
        let rows = sqlx::query_with(AssertSqlSafe(sql), arguments)
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list sessions", e))?;
        rows.iter().map(|row| read(row, &self.vault)).collect()
    }

    /// Every session of a node of which something may be left there, oldest first.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn unsettled_sessions(&self, node: &str) -> Result<Vec<SessionRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM sessions WHERE node = $1 AND settled = 0 \
             ORDER BY created_at, id"
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(node.to_owned())
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list unsettled sessions", e))?;
        rows.iter().map(|row| read(row, &self.vault)).collect()
    }

    /// Sessions of a sandbox of which something may be left on a node.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn unsettled_sessions_of(
        &self,
        sandbox: &SandboxId,
    ) -> Result<Vec<SessionRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM sessions WHERE sandbox_id = $1 AND settled = 0 ORDER BY id"
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(sandbox.as_str().to_owned())
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list a sandbox's unsettled sessions", e))?;
        rows.iter().map(|row| read(row, &self.vault)).collect()
    }

    /// Sessions that ended before `before` and are not the newest of their sandbox, a hundred at
    /// most.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn sessions_ended_before(
        &self,
        before: Millis,
    ) -> Result<Vec<SessionRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM sessions WHERE settled = 1 AND updated_at < $1 \
             AND id NOT IN (SELECT current_session_id FROM sandboxes) ORDER BY id LIMIT 100"
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(before)
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list old sessions", e))?;
        rows.iter().map(|row| read(row, &self.vault)).collect()
    }

    /// Removes a settled session with its commands.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn remove_session(&self, id: &SessionId) -> Result<(), StoreError> {
        let statement = sqlx::query("DELETE FROM sessions WHERE id = $1 AND settled = 1")
            .bind(id.as_str().to_owned());
        self.write_one("remove a session", statement).await
    }

    /// Ids of all sessions of a node that are recorded.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn session_ids_on(&self, node: &str) -> Result<Vec<SessionId>, StoreError> {
        let rows = sqlx::query("SELECT id FROM sessions WHERE node = $1")
            .bind(node.to_owned())
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list a node's sessions", e))?;
        rows.iter().map(|row| Reader { row, table: TABLE }.parsed("id", SessionId::parse)).collect()
    }

    /// Ids of all sessions of a sandbox.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn session_ids(&self, sandbox: &SandboxId) -> Result<Vec<SessionId>, StoreError> {
        let rows = sqlx::query("SELECT id FROM sessions WHERE sandbox_id = $1 ORDER BY id")
            .bind(sandbox.as_str().to_owned())
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list a sandbox's sessions", e))?;
        rows.iter().map(|row| Reader { row, table: TABLE }.parsed("id", SessionId::parse)).collect()
    }
}

impl Tx<'_> {
    /// Adds a session.
    ///
    /// # Errors
    /// [`StoreError::Taken`] for an id range that is in use.
    pub async fn insert_session(&mut self, row: &SessionRow) -> Result<(), StoreError> {
        let s = &row.session;
        let config = config_of(s, &self.vault)?;
        let sql = format!(
            "INSERT INTO sessions ({COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, \
             $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27)"
        );
        sqlx::query(AssertSqlSafe(sql))
            .bind(s.id.as_str().to_owned())
            .bind(s.sandbox_id.as_str().to_owned())
            .bind(s.sandbox_name.clone())
            .bind(row.namespace.team.clone())
            .bind(row.namespace.project.clone())
            .bind(s.node.clone())
            .bind(i64::from(row.first))
            .bind(s.status.as_str())
            .bind(s.generation)
            .bind(config.clone())
            .bind(s.timeout_ms)
            .bind(s.source_snapshot_id.as_ref().map(|i| i.as_str().to_owned()))
            .bind(i64::from(s.id_range))
            .bind(s.reason.clone())
            .bind(s.requested_at)
            .bind(s.created_at)
            .bind(s.updated_at)
            .bind(s.started_at)
            .bind(s.requested_stop_at)
            .bind(s.stopped_at)
            .bind(s.aborted_at)
            .bind(s.snapshotted_at)
            .bind(s.active_cpu_ms)
            .bind(row.closing.as_ref().map(|c| c.snapshot_id.as_str().to_owned()))
            .bind(closing_number(row.closing.as_ref()))
            .bind(row.closing.as_ref().map_or(0, |c| c.expiration_ms))
            .bind(i64::from(row.settled))
            .execute(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("add a session", e))?;
        self.refresh_values(&row.namespace.team, &config, s.created_at).await
    }

    /// Writes a session that was read with status `before` at `row.session.generation`; the row
    /// then holds the next generation. The sandbox follows the status of its newest session.
    ///
    /// # Errors
    /// [`StoreError::Changed`] when status or generation differ now.
    pub async fn update_session(
        &mut self,
        before: SessionStatus,
        row: &mut SessionRow,
    ) -> Result<(), StoreError> {
        let s = &row.session;
        let done = sqlx::query(
            "UPDATE sessions SET status = $1, config = $2, timeout_ms = $3, reason = $4, \
             updated_at = $5, started_at = $6, requested_stop_at = $7, stopped_at = $8, \
             aborted_at = $9, snapshotted_at = $10, active_cpu_ms = $11, \
             closing_snapshot_id = $12, closing_automatic = $13, closing_expiration_ms = $14, \
             settled = $15, generation = generation + 1 \
             WHERE id = $16 AND status = $17 AND generation = $18 RETURNING generation",
        )
        .bind(s.status.as_str())
        .bind(config_of(s, &self.vault)?)
        .bind(s.timeout_ms)
        .bind(s.reason.clone())
        .bind(s.updated_at)
        .bind(s.started_at)
        .bind(s.requested_stop_at)
        .bind(s.stopped_at)
        .bind(s.aborted_at)
        .bind(s.snapshotted_at)
        .bind(s.active_cpu_ms)
        .bind(row.closing.as_ref().map(|c| c.snapshot_id.as_str().to_owned()))
        .bind(closing_number(row.closing.as_ref()))
        .bind(row.closing.as_ref().map_or(0, |c| c.expiration_ms))
        .bind(i64::from(row.settled))
        .bind(s.id.as_str().to_owned())
        .bind(before.as_str())
        .bind(s.generation)
        .fetch_optional(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("write a session", e))?;
        let Some(done) = done else {
            return Err(StoreError::Changed { what: format!("session {}", s.id) });
        };
        row.session.generation = Reader { row: &done, table: TABLE }.int("generation")?;
        if row.session.status != before {
            self.follow_status(&row.session).await?;
        }
        if row.settled {
            // Nothing of it runs: the drives that it had can be had by others.
            self.release_drives(&row.session.id, row.session.updated_at).await?;
        }
        Ok(())
    }

    async fn follow_status(&mut self, s: &Session) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE sandboxes SET status = $1, status_updated_at = $2, updated_at = $2, \
             generation = generation + 1 WHERE id = $3 AND current_session_id = $4",
        )
        .bind(s.status.as_str())
        .bind(s.updated_at)
        .bind(s.sandbox_id.as_str().to_owned())
        .bind(s.id.as_str().to_owned())
        .execute(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("write a sandbox's status", e))?;
        Ok(())
    }
}
