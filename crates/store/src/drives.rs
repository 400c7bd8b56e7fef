//! Drives, and what sessions have mounted of them.
//!
//! Invariant: a drive has at most one writer, who is taken by a compare-and-set and let go in the transaction
//! that settles the session (or ends a detach). Whoever mounts a drive in any mode moves its generation, so
//! that a delete, which compares that, never meets a mount.

use bivouac_types::Millis;
use bivouac_types::drive::{Drive, DriveMode};
use bivouac_types::id::{DriveId, SessionId};
use bivouac_types::name::Namespace;
use sqlx::AssertSqlSafe;

use crate::db::{Db, Tx};
use crate::error::StoreError;
use crate::page::{Position, Where};
use crate::row::{Reader, word};

const TABLE: &str = "drives";
const COLUMNS: &str = "id, team, project, name, node, region, max_bytes, initialized, parent_id, \
    root_id, writer_session_id, fence, generation, state, created_at, updated_at";
const MOUNTS: &str = "drive_mounts";
const MOUNT_COLUMNS: &str = "session_id, path, drive_id, mode, volume, state, created_at";

/// Where a drive is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriveState {
    /// Its data is being made. Nobody was told of it.
    Making,
    /// It can be used.
    Ready,
    /// Its data is being removed.
    Deleting,
}

impl DriveState {
    fn number(self) -> i64 {
        match self {
            Self::Making => 0,
            Self::Ready => 1,
            Self::Deleting => 2,
        }
    }

    fn of(number: i64) -> Option<Self> {
        [Self::Making, Self::Ready, Self::Deleting].into_iter().find(|s| s.number() == number)
    }
}

/// A drive and what only the engine knows of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveRow {
    /// The drive.
    pub drive: Drive,
    /// Where it is in its life.
    pub state: DriveState,
    /// Grows with each change: the compare-and-set key.
    pub generation: i64,
}

/// What is going on with a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountState {
    /// It was asked for and nobody was told of success.
    Attaching,
    /// It is there, or will be when its session runs.
    Mounted,
    /// It is to go, unless it is in use.
    Detaching,
    /// It is to go in any case.
    DetachingByForce,
}

impl MountState {
    fn number(self) -> i64 {
        match self {
            Self::Attaching => 0,
            Self::Mounted => 1,
            Self::Detaching => 2,
            Self::DetachingByForce => 3,
        }
    }

    fn of(number: i64) -> Option<Self> {
        [Self::Attaching, Self::Mounted, Self::Detaching, Self::DetachingByForce]
            .into_iter()
            .find(|s| s.number() == number)
    }
}

/// A drive that a session has mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveMountRow {
    /// The session.
    pub session_id: SessionId,
    /// Where inside.
    pub path: String,
    /// Which drive.
    pub drive_id: DriveId,
    /// How.
    pub mode: DriveMode,
    /// Name of what is mounted: the drive's id, or the name of the session's private copy.
    pub volume: String,
    /// What is going on with it.
    pub state: MountState,
    /// When it was asked for.
    pub created_at: Millis,
}

/// What a list of drives is sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DriveOrder {
    /// Time of creation.
    #[default]
    CreatedAt,
    /// Time of the last change.
    UpdatedAt,
    /// Name.
    Name,
}

impl DriveOrder {
    fn column(self) -> &'static str {
        match self {
            Self::CreatedAt => "created_at",
            Self::UpdatedAt => "updated_at",
            Self::Name => "name",
        }
    }
}

/// Which drives to list: those that can be used.
#[derive(Debug, Clone)]
pub struct DriveFilter {
    /// Of this namespace.
    pub namespace: Namespace,
    /// Only names that start so.
    pub name_prefix: Option<String>,
    /// The order.
    pub order: DriveOrder,
    /// Its direction.
    pub ascending: bool,
    /// Only behind this row.
    pub after: Option<Position>,
    /// At most so many.
    pub limit: i64,
}

fn read(row: &sqlx::any::AnyRow) -> Result<DriveRow, StoreError> {
    let r = Reader { row, table: TABLE };
    let state = r.int("state")?;
    let drive = Drive {
        id: r.parsed("id", DriveId::parse)?,
        namespace: Namespace { team: r.text("team")?, project: r.text("project")? },
        name: r.text("name")?,
        node: r.text("node")?,
        region: r.text("region")?,
        max_bytes: r.int("max_bytes")?,
        initialized: r.flag("initialized")?,
        parent_id: r.parsed_opt("parent_id", DriveId::parse)?,
        root_id: r.parsed_opt("root_id", DriveId::parse)?,
        writer: r.parsed_opt("writer_session_id", SessionId::parse)?,
        fence: r.int("fence")?,
        created_at: r.int("created_at")?,
        updated_at: r.int("updated_at")?,
    };
    let state = DriveState::of(state)
        .ok_or_else(|| StoreError::Corrupt { table: TABLE, why: format!("state: {state}") })?;
    Ok(DriveRow { drive, state, generation: r.int("generation")? })
}

fn read_mount(row: &sqlx::any::AnyRow) -> Result<DriveMountRow, StoreError> {
    let r = Reader { row, table: MOUNTS };
    let state = r.int("state")?;
    let state = MountState::of(state)
        .ok_or_else(|| StoreError::Corrupt { table: MOUNTS, why: format!("state: {state}") })?;
    Ok(DriveMountRow {
        session_id: r.parsed("session_id", SessionId::parse)?,
        path: r.text("path")?,
        drive_id: r.parsed("drive_id", DriveId::parse)?,
        mode: r.parsed("mode", |t| word(DriveMode::parse(t).ok(), t))?,
        volume: r.text("volume")?,
        state,
        created_at: r.int("created_at")?,
    })
}

impl Db {
    async fn drives_where(
        &self,
        what: &'static str,
        conditions: Where,
        limit: i64,
    ) -> Result<Vec<DriveRow>, StoreError> {
        let (tail, arguments) = conditions.finish("created_at", true, limit)?;
        let sql = format!("SELECT {COLUMNS} FROM drives{tail}");
        let rows = sqlx::query_with(AssertSqlSafe(sql), arguments)
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql(what, e))?;
        rows.iter().map(read).collect()
    }

    /// A drive by its id, in any state.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn drive(&self, id: &DriveId) -> Result<Option<DriveRow>, StoreError> {
        let mut conditions = Where::new();
        conditions.and("id = ?", id.as_str().to_owned())?;
        Ok(self.drives_where("read a drive", conditions, 1).await?.pop())
    }

    /// A drive by its name, in any state.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn drive_by_name(
        &self,
        ns: &Namespace,
        name: &str,
    ) -> Result<Option<DriveRow>, StoreError> {
        let mut conditions = Where::new();
        conditions.and("team = ?", ns.team.clone())?;
        conditions.and("project = ?", ns.project.clone())?;
        conditions.and("name = ?", name.to_owned())?;
        Ok(self.drives_where("find a drive by name", conditions, 1).await?.pop())
    }

    /// Every drive of a node, in any state.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn drives_on(&self, node: &str) -> Result<Vec<DriveRow>, StoreError> {
        let mut conditions = Where::new();
        conditions.and("node = ?", node.to_owned())?;
        self.drives_where("list the drives of a node", conditions, i64::MAX).await
    }

    /// One page of drives that can be used.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn drives(&self, filter: &DriveFilter) -> Result<Vec<DriveRow>, StoreError> {
        let mut conditions = Where::new();
        conditions.and("team = ?", filter.namespace.team.clone())?;
        conditions.and("project = ?", filter.namespace.project.clone())?;
        conditions.and("state = ?", DriveState::Ready.number())?;
        if let Some(prefix) = &filter.name_prefix {
            conditions.and("substr(name, 1, length(?)) = ?", prefix.clone())?;
        }
        let column = filter.order.column();
        conditions.after(column, filter.after.as_ref(), filter.ascending)?;
        let (tail, arguments) = conditions.finish(column, filter.ascending, filter.limit)?;
        let sql = format!("SELECT {COLUMNS} FROM drives{tail}");
        let rows = sqlx::query_with(AssertSqlSafe(sql), arguments)
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list drives", e))?;
        rows.iter().map(read).collect()
    }

    async fn mounts_where(
        &self,
        what: &'static str,
        column: &str,
        value: &str,
    ) -> Result<Vec<DriveMountRow>, StoreError> {
        let sql = format!(
            "SELECT {MOUNT_COLUMNS} FROM drive_mounts WHERE {column} = $1 ORDER BY session_id, path"
        );
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(value.to_owned())
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql(what, e))?;
        rows.iter().map(read_mount).collect()
    }

    /// What a session has mounted, by place.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn mounts_of(&self, session: &SessionId) -> Result<Vec<DriveMountRow>, StoreError> {
        self.mounts_where("read a session's drives", "session_id", session.as_str()).await
    }

    /// Who has a drive mounted.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn mounts_of_drive(&self, id: &DriveId) -> Result<Vec<DriveMountRow>, StoreError> {
        self.mounts_where("read a drive's mounts", "drive_id", id.as_str()).await
    }

    /// Mounts that are neither there nor gone.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn unsettled_mounts(&self) -> Result<Vec<DriveMountRow>, StoreError> {
        let sql = format!("SELECT {MOUNT_COLUMNS} FROM drive_mounts WHERE state <> 1");
        let rows = sqlx::query(AssertSqlSafe(sql))
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list unsettled mounts", e))?;
        rows.iter().map(read_mount).collect()
    }

    /// Writes that the drives that a session writes have been mounted once.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn note_written(&self, session: &SessionId, now: Millis) -> Result<(), StoreError> {
        let statement = sqlx::query(
            "UPDATE drives SET initialized = 1, updated_at = $1, generation = generation + 1 \
             WHERE writer_session_id = $2 AND initialized = 0",
        )
        .bind(now)
        .bind(session.as_str().to_owned());
        self.write_one("note that a drive was mounted", statement).await
    }

    /// The same of a drive that was written without a session.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn note_filled(&self, id: &DriveId, now: Millis) -> Result<(), StoreError> {
        let statement = sqlx::query(
            "UPDATE drives SET initialized = 1, updated_at = $1, generation = generation + 1 \
             WHERE id = $2",
        )
        .bind(now)
        .bind(id.as_str().to_owned());
        self.write_one("note that a drive was written", statement).await
    }
}

impl Tx<'_> {
    /// Adds a drive.
    ///
    /// # Errors
    /// [`StoreError::Taken`] for a name that is in use.
    pub async fn insert_drive(&mut self, row: &DriveRow) -> Result<(), StoreError> {
        let d = &row.drive;
        let sql = format!(
            "INSERT INTO drives ({COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, \
             $12, $13, $14, $15, $16)"
        );
        sqlx::query(AssertSqlSafe(sql))
            .bind(d.id.as_str().to_owned())
            .bind(d.namespace.team.clone())
            .bind(d.namespace.project.clone())
            .bind(d.name.clone())
            .bind(d.node.clone())
            .bind(d.region.clone())
            .bind(d.max_bytes)
            .bind(i64::from(d.initialized))
            .bind(d.parent_id.as_ref().map(|i| i.as_str().to_owned()))
            .bind(d.root_id.as_ref().map(|i| i.as_str().to_owned()))
            .bind(d.writer.as_ref().map(|i| i.as_str().to_owned()))
            .bind(d.fence)
            .bind(row.generation)
            .bind(row.state.number())
            .bind(d.created_at)
            .bind(d.updated_at)
            .execute(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("add a drive", e))?;
        Ok(())
    }

    /// Moves a drive without a writer, read at `row.generation`, to another state.
    ///
    /// # Errors
    /// [`StoreError::Changed`] when it is not that generation any more.
    pub async fn move_drive(
        &mut self,
        row: &mut DriveRow,
        state: DriveState,
        now: Millis,
    ) -> Result<(), StoreError> {
        let done = sqlx::query(
            "UPDATE drives SET state = $1, updated_at = $2, generation = generation + 1 \
             WHERE id = $3 AND generation = $4 AND writer_session_id IS NULL RETURNING generation",
        )
        .bind(state.number())
        .bind(now)
        .bind(row.drive.id.as_str().to_owned())
        .bind(row.generation)
        .fetch_optional(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("move a drive", e))?;
        let Some(done) = done else {
            return Err(StoreError::Changed { what: format!("drive {}", row.drive.id) });
        };
        row.generation = Reader { row: &done, table: TABLE }.int("generation")?;
        row.state = state;
        Ok(())
    }

    /// Removes the record of a drive that is not in use.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn remove_drive(&mut self, id: &DriveId) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM drives WHERE id = $1 AND state <> 1")
            .bind(id.as_str().to_owned())
            .execute(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("remove a drive", e))?;
        Ok(())
    }

    /// Records a mount; of one for writing the session becomes the drive's writer.
    ///
    /// # Errors
    /// [`StoreError::Changed`] when it cannot be had (any more): somebody else writes, or it is gone, or there
    /// is nothing to take a copy of. [`StoreError::Taken`] when something is mounted there.
    pub async fn mount_drive(&mut self, row: &DriveMountRow) -> Result<(), StoreError> {
        let drive = row.drive_id.as_str().to_owned();
        let taken = match row.mode {
            DriveMode::ReadWrite => sqlx::query(
                "UPDATE drives SET writer_session_id = $1, fence = fence + 1, updated_at = $2, \
                 generation = generation + 1 \
                 WHERE id = $3 AND state = 1 AND writer_session_id IS NULL RETURNING fence",
            )
            .bind(row.session_id.as_str().to_owned())
            .bind(row.created_at)
            .bind(drive),
            DriveMode::Snapshot => sqlx::query(
                "UPDATE drives SET generation = generation + 1 \
                 WHERE id = $1 AND state = 1 AND initialized = 1 RETURNING fence",
            )
            .bind(drive),
        };
        let had = taken
            .fetch_optional(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("take a drive", e))?;
        if had.is_none() {
            return Err(StoreError::Changed { what: format!("drive {}", row.drive_id) });
        }
        let sql = format!(
            "INSERT INTO drive_mounts ({MOUNT_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7)"
        );
        sqlx::query(AssertSqlSafe(sql))
            .bind(row.session_id.as_str().to_owned())
            .bind(row.path.clone())
            .bind(row.drive_id.as_str().to_owned())
            .bind(row.mode.as_str())
            .bind(row.volume.clone())
            .bind(row.state.number())
            .bind(row.created_at)
            .execute(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("record a mount", e))?;
        Ok(())
    }

    /// Moves a mount from one state to another. Answers whether it was in the first one.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn move_mount(
        &mut self,
        row: &DriveMountRow,
        to: MountState,
    ) -> Result<bool, StoreError> {
        let done = sqlx::query(
            "UPDATE drive_mounts SET state = $1 WHERE session_id = $2 AND path = $3 AND state = $4 \
             RETURNING path",
        )
        .bind(to.number())
        .bind(row.session_id.as_str().to_owned())
        .bind(row.path.clone())
        .bind(row.state.number())
        .fetch_optional(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("move a mount", e))?;
        Ok(done.is_some())
    }

    /// Removes a mount; a session that wrote is the drive's writer no more.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn unmount_drive(
        &mut self,
        row: &DriveMountRow,
        now: Millis,
    ) -> Result<(), StoreError> {
        sqlx::query("DELETE FROM drive_mounts WHERE session_id = $1 AND path = $2")
            .bind(row.session_id.as_str().to_owned())
            .bind(row.path.clone())
            .execute(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("remove a mount", e))?;
        if row.mode == DriveMode::Snapshot {
            return Ok(());
        }
        sqlx::query(
            "UPDATE drives SET writer_session_id = NULL, updated_at = $1, \
             generation = generation + 1 WHERE id = $2 AND writer_session_id = $3",
        )
        .bind(now)
        .bind(row.drive_id.as_str().to_owned())
        .bind(row.session_id.as_str().to_owned())
        .execute(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("let go of a drive", e))?;
        Ok(())
    }

    /// Lets go of everything that a session has mounted: nothing of it runs any more.
    pub(crate) async fn release_drives(
        &mut self,
        session: &SessionId,
        now: Millis,
    ) -> Result<(), StoreError> {
        let done = sqlx::query("DELETE FROM drive_mounts WHERE session_id = $1")
            .bind(session.as_str().to_owned())
            .execute(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("remove a session's mounts", e))?;
        if done.rows_affected() == 0 {
            return Ok(());
        }
        sqlx::query(
            "UPDATE drives SET writer_session_id = NULL, updated_at = $1, \
             generation = generation + 1 WHERE writer_session_id = $2",
        )
        .bind(now)
        .bind(session.as_str().to_owned())
        .execute(&mut *self.inner)
        .await
        .map_err(|e| StoreError::sql("let go of a session's drives", e))?;
        Ok(())
    }
}
