//! Public keys that may open SSH connections.
//!
//! Invariant: a key is one principal's; it goes with the token whose rights it has. Called by the engine's
//! `ssh_keys`.

use bivouac_types::Millis;
use sqlx::any::AnyRow;

use crate::db::{Db, Durability};
use crate::error::StoreError;
use crate::row::Reader;

const TABLE: &str = "ssh_keys";

/// A public key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SshKeyRow {
    /// `SHA256:…`, as OpenSSH writes it.
    pub fingerprint: String,
    /// What it is called.
    pub name: String,
    /// The key in OpenSSH's form, without a comment.
    pub public_key: String,
    /// The token whose rights it has; empty is the engine's own.
    pub token_id: String,
    /// When it was registered.
    pub created_at: Millis,
    /// When it last opened a connection, to the minute.
    pub last_used_at: Option<Millis>,
}

const COLUMNS: &str = "fingerprint, name, public_key, token_id, created_at, last_used_at";

fn read(row: &AnyRow) -> Result<SshKeyRow, StoreError> {
    let r = Reader { row, table: TABLE };
    Ok(SshKeyRow {
        fingerprint: r.text("fingerprint")?,
        name: r.text("name")?,
        public_key: r.text("public_key")?,
        token_id: r.text("token_id")?,
        created_at: r.int("created_at")?,
        last_used_at: r.int_opt("last_used_at")?,
    })
}

impl Db {
    /// Every key, the oldest first.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn ssh_keys(&self) -> Result<Vec<SshKeyRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM ssh_keys ORDER BY created_at, fingerprint");
        let rows = sqlx::query(sqlx::AssertSqlSafe(sql))
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list SSH keys", e))?;
        rows.iter().map(read).collect()
    }

    /// One key.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn ssh_key(&self, fingerprint: &str) -> Result<Option<SshKeyRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM ssh_keys WHERE fingerprint = $1");
        let row = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(fingerprint.to_owned())
            .fetch_optional(self.reader())
            .await
            .map_err(|e| StoreError::sql("look for an SSH key", e))?;
        row.as_ref().map(read).transpose()
    }

    /// Keeps a key, unless it is there. On disk when it answers.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn put_ssh_key(&self, key: &SshKeyRow) -> Result<(), StoreError> {
        let mut tx = self.begin(Durability::Power).await?;
        let sql = "INSERT INTO ssh_keys (fingerprint, name, public_key, token_id, created_at, last_used_at) \
                   VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (fingerprint) DO NOTHING";
        sqlx::query(sql)
            .bind(key.fingerprint.clone())
            .bind(key.name.clone())
            .bind(key.public_key.clone())
            .bind(key.token_id.clone())
            .bind(key.created_at)
            .bind(key.last_used_at)
            .execute(&mut *tx.inner)
            .await
            .map_err(|e| StoreError::sql("keep an SSH key", e))?;
        tx.commit().await
    }

    /// Forgets a key. Answers whether it was there.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn remove_ssh_key(&self, fingerprint: &str) -> Result<bool, StoreError> {
        let mut tx = self.begin(Durability::Power).await?;
        let done = sqlx::query("DELETE FROM ssh_keys WHERE fingerprint = $1")
            .bind(fingerprint.to_owned())
            .execute(&mut *tx.inner)
            .await
            .map_err(|e| StoreError::sql("remove an SSH key", e))?;
        tx.commit().await?;
        Ok(done.rows_affected() > 0)
    }

    /// Notes that a key opened a connection.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn note_ssh_key_used(&self, fingerprint: &str, at: Millis) -> Result<(), StoreError> {
        let sql = "UPDATE ssh_keys SET last_used_at = $1 \
                   WHERE fingerprint = $2 AND (last_used_at IS NULL OR last_used_at < $1)";
        let statement = sqlx::query(sql).bind(at).bind(fingerprint.to_owned());
        self.write_one("note the use of an SSH key", statement).await
    }
}
