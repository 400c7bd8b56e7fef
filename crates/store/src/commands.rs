//! Commands. Their output is never here, and neither is their environment.

use bivouac_types::command::{Command, CommandEnd, EndReason};
use bivouac_types::id::{CommandId, SessionId};
use sqlx::AssertSqlSafe;

use crate::db::Db;
use crate::error::StoreError;
use crate::row::{Reader, to_json};

const TABLE: &str = "commands";
const COLUMNS: &str = "id, session_id, name, args, cwd, attach_stdin, started_at, ended, \
    exit_code, duration_ms, reason, idempotency_key, tty, terminal";

/// A command and what only the engine knows of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandRow {
    /// The command.
    pub command: Command,
    /// Idempotency key of its start.
    pub idempotency_key: Option<String>,
}

fn read(row: &sqlx::any::AnyRow) -> Result<CommandRow, StoreError> {
    let r = Reader { row, table: TABLE };
    let corrupt = |why: String| StoreError::Corrupt { table: TABLE, why };
    let end = if r.flag("ended")? {
        let exit_code = r.int_opt("exit_code")?.map(i32::try_from).transpose();
        let reason = match r.text_opt("reason")? {
            Some(text) => Some(
                serde_json::from_value::<EndReason>(text.into())
                    .map_err(|e| corrupt(format!("reason: {e}")))?,
            ),
            None => None,
        };
        Some(CommandEnd {
            exit_code: exit_code.map_err(|e| corrupt(format!("exit_code: {e}")))?,
            duration_ms: r.int("duration_ms")?,
            reason,
        })
    } else {
        None
    };
    let command = Command {
        id: r.parsed("id", CommandId::parse)?,
        session_id: r.parsed("session_id", SessionId::parse)?,
        name: r.text("name")?,
        args: r.json("args")?,
        cwd: r.text("cwd")?,
        attach_stdin: r.flag("attach_stdin")?,
        tty: r.flag("tty")?,
        terminal: r.text_opt("terminal")?,
        started_at: r.int("started_at")?,
        end,
    };
    Ok(CommandRow { command, idempotency_key: r.text_opt("idempotency_key")? })
}

impl Db {
    /// A command of a session.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn command(
        &self,
        session: &SessionId,
        id: &CommandId,
    ) -> Result<Option<CommandRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM commands WHERE id = $1 AND session_id = $2");
        let row = sqlx::query(AssertSqlSafe(sql))
            .bind(id.as_str().to_owned())
            .bind(session.as_str().to_owned())
            .fetch_optional(self.reader())
            .await
            .map_err(|e| StoreError::sql("read a command", e))?;
        row.as_ref().map(read).transpose()
    }

    /// The command that a start with this idempotency key made.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn command_by_key(
        &self,
        session: &SessionId,
        key: &str,
    ) -> Result<Option<CommandRow>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM commands WHERE session_id = $1 AND idempotency_key = $2"
        );
        let row = sqlx::query(AssertSqlSafe(sql))
            .bind(session.as_str().to_owned())
            .bind(key.to_owned())
            .fetch_optional(self.reader())
            .await
            .map_err(|e| StoreError::sql("find a command by its key", e))?;
        row.as_ref().map(read).transpose()
    }

    /// All commands of a session, newest first; or only those without an end.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn commands(
        &self,
        session: &SessionId,
        open_only: bool,
    ) -> Result<Vec<CommandRow>, StoreError> {
        let open = if open_only { " AND ended = 0" } else { "" };
        let sql =
            format!("SELECT {COLUMNS} FROM commands WHERE session_id = $1{open} ORDER BY id DESC");
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(session.as_str().to_owned())
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list commands", e))?;
        rows.iter().map(read).collect()
    }

    /// Sessions that are settled and still have a command without an end.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn settled_with_open_commands(&self) -> Result<Vec<SessionId>, StoreError> {
        let rows = sqlx::query(
            "SELECT DISTINCT s.id FROM sessions s JOIN commands c ON c.session_id = s.id \
             WHERE s.settled = 1 AND c.ended = 0",
        )
        .fetch_all(self.reader())
        .await
        .map_err(|e| StoreError::sql("list open commands", e))?;
        rows.iter().map(|row| Reader { row, table: TABLE }.parsed("id", SessionId::parse)).collect()
    }

    /// Adds a command.
    ///
    /// # Errors
    /// [`StoreError::Taken`] for a key in use.
    pub async fn insert_command(&self, row: &CommandRow) -> Result<(), StoreError> {
        let c = &row.command;
        let sql = format!(
            "INSERT INTO commands ({COLUMNS}) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, 0, NULL, NULL, NULL, $8, $9, $10) \
             ON CONFLICT (id) DO NOTHING"
        );
        let statement = sqlx::query(AssertSqlSafe(sql))
            .bind(c.id.as_str().to_owned())
            .bind(c.session_id.as_str().to_owned())
            .bind(c.name.clone())
            .bind(to_json(TABLE, &c.args)?)
            .bind(c.cwd.clone())
            .bind(i64::from(c.attach_stdin))
            .bind(c.started_at)
            .bind(row.idempotency_key.clone())
            .bind(i64::from(c.tty))
            .bind(c.terminal.clone());
        self.write_one("add a command", statement).await
    }

    /// Writes how a command ended, unless that is known already.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn end_command(&self, id: &CommandId, end: &CommandEnd) -> Result<(), StoreError> {
        let reason = match end.reason {
            Some(reason) => serde_json::to_value(reason)
                .ok()
                .and_then(|value| value.as_str().map(str::to_owned)),
            None => None,
        };
        let statement = sqlx::query(
            "UPDATE commands SET ended = 1, exit_code = $1, duration_ms = $2, reason = $3 \
             WHERE id = $4 AND ended = 0",
        )
        .bind(end.exit_code.map(i64::from))
        .bind(end.duration_ms)
        .bind(reason)
        .bind(id.as_str().to_owned());
        self.write_one("end a command", statement).await
    }

    /// Removes a command that never ran.
    ///
    /// # Errors
    /// [`StoreError::Sql`].
    pub async fn remove_command(&self, id: &CommandId) -> Result<(), StoreError> {
        let statement =
            sqlx::query("DELETE FROM commands WHERE id = $1").bind(id.as_str().to_owned());
        self.write_one("remove a command", statement).await
    }
}
