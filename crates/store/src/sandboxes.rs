//! Sandboxes and their tags.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use bivouac_types::Millis;
use bivouac_types::access::Reach;
use bivouac_types::drive::Mounts;
use bivouac_types::id::{SandboxId, SessionId, SnapshotId};
use bivouac_types::life::{Life, Restarts};
use bivouac_types::name::Namespace;
use bivouac_types::policy::NetworkPolicy;
use bivouac_types::sandbox::{KeepLastSnapshots, Resources, Sandbox};
use bivouac_types::session::SessionStatus;
use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;

use crate::db::{Db, Tx};
use crate::env;
use crate::error::StoreError;
use crate::page::{Position, Where};
use crate::row::{Reader, to_json, word};
use crate::vault::Vault;

const TABLE: &str = "sandboxes";
const COLUMNS: &str = "id, team, project, name, ephemeral, persistent, config, current_session_id, \
    current_snapshot_id, status, status_updated_at, generation, created_at, updated_at, \
    total_active_cpu_ms, total_duration_ms, create_key, deleting";

/// Whether a sandbox is on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deleting {
    /// It is not.
    No,
    /// It is; its snapshots stay.
    Yes,
    /// It is, and snapshots that only it needs go with it.
    WithOrphans,
    /// It is one of several that one call makes and has not answered yet: all come to be at once, or none.
    Unborn,
}

/// A sandbox and what only the engine knows of it.
#[derive(Debug, Clone, PartialEq)]
pub struct SandboxRow {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// Idempotency key of its create.
    pub create_key: Option<String>,
    /// The intent to delete it.
    pub deleting: Deleting,
}

/// What SQL need not look at.
#[derive(Serialize, Deserialize)]
struct Config {
    resources: Resources,
    timeout_ms: i64,
    ports: Vec<u16>,
    /// Of the time before the vault.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sealed_env: Option<String>,
    tags: BTreeMap<String, String>,
    image: String,
    runtime: String,
    cwd: String,
    policy: NetworkPolicy,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    snapshot_expiration_ms: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keep_last: Option<KeepLastSnapshots>,
    #[serde(default, skip_serializing_if = "Mounts::is_empty")]
    mounts: Mounts,
    #[serde(default)]
    life: Life,
    #[serde(default)]
    restarts: Restarts,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    network_id: Option<String>,
    region: String,
    failover_regions: Vec<String>,
}

/// What a list is sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SandboxOrder {
    /// Time of creation.
    #[default]
    CreatedAt,
    /// Name.
    Name,
    /// When the status changed.
    StatusUpdatedAt,
    /// Id of the current snapshot; those without come first.
    CurrentSnapshotId,
}

impl SandboxOrder {
    fn column(self) -> &'static str {
        match self {
            Self::CreatedAt => "created_at",
            Self::Name => "name",
            Self::StatusUpdatedAt => "status_updated_at",
            Self::CurrentSnapshotId => "COALESCE(current_snapshot_id, '')",
        }
    }
}

/// Which sandboxes to list. Those that are being deleted are never listed.
#[derive(Debug, Clone, Default)]
pub struct SandboxFilter {
    /// Only of this namespace.
    pub namespace: Option<Namespace>,
    /// Only of namespaces that these cover.
    pub within: Option<Vec<Reach>>,
    /// Only names that start so.
    pub name_prefix: Option<String>,
    /// Only with this tag.
    pub tag: Option<(String, String)>,
    /// The order.
    pub order: SandboxOrder,
    /// Its direction.
    pub ascending: bool,
    /// Only behind this row.
    pub after: Option<Position>,
    /// At most so many.
    pub limit: i64,
}

/// The condition for namespaces that one of `reaches` covers.
fn within(conditions: &mut Where, reaches: &[Reach]) -> Result<String, StoreError> {
    let mut any = vec!["1 = 0".to_owned()];
    for reach in reaches {
        any.push(match reach {
            Reach::Everything => "1 = 1".to_owned(),
            Reach::Team(team) => format!("team = {}", conditions.push(team.clone())?),
            Reach::Project(ns) => {
                let team = conditions.push(ns.team.clone())?;
                let project = conditions.push(ns.project.clone())?;
                format!("(team = {team} AND project = {project})")
            }
        });
    }
    Ok(format!("({})", any.join(" OR ")))
}

fn config_of(s: &Sandbox, vault: &OnceLock<Vault>) -> Result<String, StoreError> {
    let config = Config {
        resources: s.resources,
        timeout_ms: s.timeout_ms,
        ports: s.ports.clone(),
        env: BTreeMap::new(),
        sealed_env: env::seal(vault, TABLE, s.id.as_str(), &s.env)?,
        tags: s.tags.clone(),
        image: s.image.clone(),
        runtime: s.runtime.clone(),
        cwd: s.cwd.clone(),
        policy: s.policy.clone(),
        snapshot_expiration_ms: s.snapshot_expiration_ms,
        keep_last: s.keep_last,
        mounts: s.mounts.clone(),
        life: s.life.clone(),
        restarts: s.restarts.clone(),
        network_id: s.network_id.clone(),
        region: s.region.clone(),
        failover_regions: s.failover_regions.clone(),
    };
    to_json(TABLE, &config)
}

fn read(row: &sqlx::any::AnyRow, vault: &OnceLock<Vault>) -> Result<SandboxRow, StoreError> {
    let r = Reader { row, table: TABLE };
    let config: Config = r.json("config")?;
    let env = env::open(vault, TABLE, &r.text("id")?, config.env, config.sealed_env)?;
    let sandbox = Sandbox {
        id: r.parsed("id", SandboxId::parse)?,
        namespace: Namespace { team: r.text("team")?, project: r.text("project")? },
        name: r.text("name")?,
        ephemeral: r.flag("ephemeral")?,
        persistent: r.flag("persistent")?,
        resources: config.resources,
        timeout_ms: config.timeout_ms,
        ports: config.ports,
        env,
        tags: config.tags,
        image: config.image,
        runtime: config.runtime,
        cwd: config.cwd,
        policy: config.policy,
        snapshot_expiration_ms: config.snapshot_expiration_ms,
        keep_last: config.keep_last,
        mounts: config.mounts,
        life: config.life,
        restarts: config.restarts,
        network_id: config.network_id,
        region: config.region,
        failover_regions: config.failover_regions,
        current_session_id: r.parsed("current_session_id", SessionId::parse)?,
        current_snapshot_id: r.parsed_opt("current_snapshot_id", SnapshotId::parse)?,
        status: r.parsed("status", |t| word(SessionStatus::parse(t), t))?,
        status_updated_at: r.int("status_updated_at")?,
        generation: r.int("generation")?,
        created_at: r.int("created_at")?,
        updated_at: r.int("updated_at")?,
        total_active_cpu_ms: r.int("total_active_cpu_ms")?,
        total_duration_ms: r.int("total_duration_ms")?,
    };
    let deleting = match r.int("deleting")? {
        0 => Deleting::No,
        1 => Deleting::Yes,
        2 => Deleting::WithOrphans,
        _ => Deleting::Unborn,
    };
    Ok(SandboxRow { sandbox, create_key: r.text_opt("create_key")?, deleting })
}

impl Db {
    async fn sandbox_where(
        &self,
        what: &'static str,
        conditions: Where,
    ) -> Result<Option<SandboxRow>, StoreError> {
        let (tail, arguments) = conditions.finish("created_at", true, 1)?;
        let sql = format!("SELECT {COLUMNS} FROM sandboxes{tail}");
        let row = sqlx::query_with(AssertSqlSafe(sql), arguments)
            .fetch_optional(self.reader())
            .await
            .map_err(|e| StoreError::sql(what, e))?;
        row.as_ref().map(|row| read(row, &self.vault)).transpose()
    }

    /// A sandbox by its id.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn sandbox(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
        let mut conditions = Where::new();
        conditions.and("id = ?", id.as_str().to_owned())?;
        self.sandbox_where("read a sandbox", conditions).await
    }

    /// A sandbox by its name, also one that is being deleted.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn sandbox_by_name(
        &self,
        ns: &Namespace,
        name: &str,
    ) -> Result<Option<SandboxRow>, StoreError> {
        let mut conditions = Where::new();
        conditions.and("team = ?", ns.team.clone())?;
        conditions.and("project = ?", ns.project.clone())?;
        conditions.and("name = ?", name.to_owned())?;
        self.sandbox_where("find a sandbox by name", conditions).await
    }

    /// The sandbox that a create with this idempotency key made.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn sandbox_by_create_key(
        &self,
        ns: &Namespace,
        key: &str,
    ) -> Result<Option<SandboxRow>, StoreError> {
        let mut conditions = Where::new();
        conditions.and("team = ?", ns.team.clone())?;
        conditions.and("project = ?", ns.project.clone())?;
        conditions.and("create_key = ?", key.to_owned())?;
        self.sandbox_where("find a sandbox by its key", conditions).await
    }

    /// Sandboxes whose creates had an idempotency key that begins so.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn sandboxes_by_create_key_prefix(
        &self,
        ns: &Namespace,
        prefix: &str,
    ) -> Result<Vec<SandboxRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM sandboxes WHERE team = $1 AND project = $2 \
             AND substr(create_key, 1, length($3)) = $3 ORDER BY id"
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(ns.team.clone())
            .bind(ns.project.clone())
            .bind(prefix.to_owned())
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("find sandboxes by their keys", e))?;
        rows.iter().map(|row| read(row, &self.vault)).collect()
    }

    /// One page of sandboxes.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn sandboxes(&self, filter: &SandboxFilter) -> Result<Vec<SandboxRow>, StoreError> {
        let mut conditions = Where::new();
        conditions.and_plain("deleting = 0");
        if let Some(ns) = &filter.namespace {
            conditions.and("team = ?", ns.team.clone())?;
            conditions.and("project = ?", ns.project.clone())?;
        }
        if let Some(reaches) = &filter.within {
            let condition = within(&mut conditions, reaches)?;
            conditions.and_plain(&condition);
        }
        if let Some(prefix) = &filter.name_prefix {
            conditions.and("substr(name, 1, length(?)) = ?", prefix.clone())?;
        }
        if let Some((key, value)) = &filter.tag {
            let key = conditions.push(key.clone())?;
            let value = conditions.push(value.clone())?;
            conditions.and_plain(&format!(
                "EXISTS (SELECT 1 FROM sandbox_tags t WHERE t.sandbox_id = sandboxes.id \
                 AND t.key = {key} AND t.value = {value})"
            ));
        }
        let column = filter.order.column();
        conditions.after(column, filter.after.as_ref(), filter.ascending)?;
        let (tail, arguments) = conditions.finish(column, filter.ascending, filter.limit)?;
        let sql = format!("SELECT {COLUMNS} FROM sandboxes{tail}");
        let rows = sqlx::query_with(AssertSqlSafe(sql), arguments)
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list sandboxes", e))?;
        rows.iter().map(|row| read(row, &self.vault)).collect()
    }

    /// Sandboxes whose deletion was asked for and not finished, and those whose making was not.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn sandboxes_being_deleted(&self) -> Result<Vec<SandboxRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM sandboxes WHERE deleting <> 0 ORDER BY id");
        let rows = sqlx::query(AssertSqlSafe(sql))
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list deletions", e))?;
        rows.iter().map(|row| read(row, &self.vault)).collect()
    }

    /// Sandboxes whose newest session was lost or failed and that want to be started again then.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn lost_sandboxes(&self) -> Result<Vec<SandboxRow>, StoreError> {
        // A quote in somebody's own text is escaped in JSON: this is the field.
        let sql = format!(
            "SELECT {COLUMNS} FROM sandboxes WHERE ephemeral = 0 AND deleting = 0 \
             AND status IN ('failed', 'aborted') \
             AND config LIKE '%\"restart\":\"unless-stopped\"%' ORDER BY id"
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list lost sandboxes", e))?;
        rows.iter().map(|row| read(row, &self.vault)).collect()
    }

    /// Ephemeral sandboxes that ended before `before`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn ephemeral_ended_before(
        &self,
        before: Millis,
    ) -> Result<Vec<SandboxRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM sandboxes WHERE ephemeral = 1 AND deleting = 0 \
             AND status IN ('stopped', 'failed', 'aborted') AND status_updated_at < $1 \
             ORDER BY id LIMIT 100"
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(before)
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list ended sandboxes", e))?;
        rows.iter().map(|row| read(row, &self.vault)).collect()
    }

    /// Whether a sandbox other than `except` would start from this snapshot.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn snapshot_is_current(
        &self,
        snapshot: &SnapshotId,
        except: Option<&SandboxId>,
    ) -> Result<bool, StoreError> {
        let row = sqlx::query(
            "SELECT id FROM sandboxes WHERE current_snapshot_id = $1 AND id <> $2 \
             AND deleting <> 1 AND deleting <> 2 LIMIT 1",
        )
        .bind(snapshot.as_str().to_owned())
        .bind(except.map_or("", SandboxId::as_str).to_owned())
        .fetch_optional(self.reader())
        .await
        .map_err(|e| StoreError::sql("look for users of a snapshot", e))?;
        Ok(row.is_some())
    }

    /// Removes a sandbox with its sessions, commands, routes and tags. Its snapshots stay.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn remove_sandbox(&self, id: &SandboxId) -> Result<(), StoreError> {
        let statement =
            sqlx::query("DELETE FROM sandboxes WHERE id = $1").bind(id.as_str().to_owned());
        self.write_one("remove a sandbox", statement).await
    }
}

impl Tx<'_> {
    /// Adds a sandbox with its tags.
    ///
    /// # Errors
    /// [`StoreError::Taken`] for a name or key that is in use.
    pub async fn insert_sandbox(&mut self, row: &SandboxRow) -> Result<(), StoreError> {
        let s = &row.sandbox;
        let config = config_of(s, &self.vault)?;
        let sql = format!(
            "INSERT INTO sandboxes ({COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, \
             $11, $12, $13, $14, $15, $16, $17, $18)"
        );
        sqlx::query(AssertSqlSafe(sql))
            .bind(s.id.as_str().to_owned())
            .bind(s.namespace.team.clone())
            .bind(s.namespace.project.clone())
            .bind(s.name.clone())
            .bind(i64::from(s.ephemeral))
            .bind(i64::from(s.persistent))
            .bind(config.clone())
            .bind(s.current_session_id.as_str().to_owned())
            .bind(s.current_snapshot_id.as_ref().map(|i| i.as_str().to_owned()))
            .bind(s.status.as_str())
            .bind(s.status_updated_at)
            .bind(s.generation)
            .bind(s.created_at)
            .bind(s.updated_at)
            .bind(s.total_active_cpu_ms)
            .bind(s.total_duration_ms)
            .bind(row.create_key.clone())
            .bind(deleting_number(row.deleting))
            .execute(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("add a sandbox", e))?;
        self.refresh_values(&s.namespace.team, &config, s.created_at).await?;
        self.add_tags(&s.id, &s.tags).await
    }

    /// Writes a sandbox that was read at `row.sandbox.generation`; the row then holds the next one.
    ///
    /// # Errors
    /// [`StoreError::Changed`] when it is not that generation any more.
    pub async fn update_sandbox(&mut self, row: &mut SandboxRow) -> Result<(), StoreError> {
        let s = &row.sandbox;
        let done = sqlx::query(
            "UPDATE sandboxes SET persistent = $1, config = $2, current_session_id = $3, \
             current_snapshot_id = $4, status = $5, status_updated_at = $6, updated_at = $7, \
             deleting = $8, generation = generation + 1 \
             WHERE id = $9 AND generation = $10 RETURNING generation",
        )
        .bind(i64::from(s.persistent))
        .bind(config_of(s, &self.vault)?)
        .bind(s.current_session_id.as_str().to_owned())
        .bind(s.current_snapshot_id.as_ref().map(|i| i.as_str().to_owned()))
        .bind(s.status.as_str())
        .bind(s.status_updated_at)
        .bind(s.updated_at)
        .bind(deleting_number(row.deleting))
        .bind(s.id.as_str().to_owned())
        .bind(s.generation)
        .fetch_optional(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("write a sandbox", e))?;
        let Some(done) = done else {
            return Err(StoreError::Changed { what: format!("sandbox {}", s.id) });
        };
        row.sandbox.generation = Reader { row: &done, table: TABLE }.int("generation")?;
        let (id, tags) = (row.sandbox.id.clone(), row.sandbox.tags.clone());
        self.execute_for("DELETE FROM sandbox_tags WHERE sandbox_id = $1", &id).await?;
        self.add_tags(&id, &tags).await
    }

    /// Moves a sandbox to the snapshot that closed its session `session`, if that is still its
    /// newest session.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn move_current_snapshot(
        &mut self,
        sandbox: &SandboxId,
        session: &SessionId,
        snapshot: &SnapshotId,
        now: Millis,
    ) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE sandboxes SET current_snapshot_id = $1, updated_at = $2, \
             generation = generation + 1 WHERE id = $3 AND current_session_id = $4",
        )
        .bind(snapshot.as_str().to_owned())
        .bind(now)
        .bind(sandbox.as_str().to_owned())
        .bind(session.as_str().to_owned())
        .execute(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("move a sandbox to its snapshot", e))?;
        Ok(())
    }

    /// Makes a sandbox that was one of several in the making one like any other. Answers whether it was.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn bear_sandbox(&mut self, id: &SandboxId) -> Result<bool, StoreError> {
        let done = sqlx::query(
            "UPDATE sandboxes SET deleting = 0, generation = generation + 1 \
             WHERE id = $1 AND deleting = 3 RETURNING id",
        )
        .bind(id.as_str().to_owned())
        .fetch_optional(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("show a new sandbox", e))?;
        Ok(done.is_some())
    }

    /// Adds a session's use to the sums of its sandbox.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn add_totals(
        &mut self,
        sandbox: &SandboxId,
        cpu_ms: i64,
        duration_ms: i64,
    ) -> Result<(), StoreError> {
        sqlx::query(
            "UPDATE sandboxes SET total_active_cpu_ms = total_active_cpu_ms + $1, \
             total_duration_ms = total_duration_ms + $2, generation = generation + 1 \
             WHERE id = $3",
        )
        .bind(cpu_ms)
        .bind(duration_ms)
        .bind(sandbox.as_str().to_owned())
        .execute(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("add up a sandbox's use", e))?;
        Ok(())
    }

    async fn add_tags(
        &mut self,
        id: &SandboxId,
        tags: &BTreeMap<String, String>,
    ) -> Result<(), StoreError> {
        for (key, value) in tags {
            sqlx::query("INSERT INTO sandbox_tags (sandbox_id, key, value) VALUES ($1, $2, $3)")
                .bind(id.as_str().to_owned())
                .bind(key.clone())
                .bind(value.clone())
                .execute(&mut *self.inner)
                .await
                .map_err(|e| StoreError::sql("write tags", e))?;
        }
        Ok(())
    }

    /// Runs a statement whose only value is the sandbox's id.
    async fn execute_for(&mut self, sql: &'static str, id: &SandboxId) -> Result<(), StoreError> {
        sqlx::query(sql)
            .bind(id.as_str().to_owned())
            .execute(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("change what belongs to a sandbox", e))?;
        Ok(())
    }
}

fn deleting_number(deleting: Deleting) -> i64 {
    match deleting {
        Deleting::No => 0,
        Deleting::Yes => 1,
        Deleting::WithOrphans => 2,
        Deleting::Unborn => 3,
    }
}
