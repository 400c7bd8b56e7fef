//! Tokens of principals.
//!
//! Invariant: a token's secret half is never here, only its hash; a token that is revoked stays so, and what
//! hangs on it goes in the same transaction. Called by the engine's `access`.

use std::collections::BTreeSet;

use bivouac_types::Millis;
use bivouac_types::access::Grant;
use sqlx::any::AnyRow;

use crate::db::{Db, Durability};
use crate::error::StoreError;
use crate::row::{Reader, to_json};

const TABLE: &str = "tokens";

/// A token, without its secret half.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRow {
    /// Its public half.
    pub id: String,
    /// What it is called; unique among those that are not revoked.
    pub name: String,
    /// Hash of its secret half, in hexadecimal digits.
    pub hash: String,
    /// Its rights.
    pub grant: Grant,
    /// The token that made it; empty is the engine's own.
    pub made_by: String,
    /// When it was made.
    pub created_at: Millis,
    /// From when on it counts no more.
    pub expires_at: Option<Millis>,
    /// When it was taken back.
    pub revoked_at: Option<Millis>,
    /// When it was last shown, to the minute.
    pub last_used_at: Option<Millis>,
}

fn read(row: &AnyRow) -> Result<TokenRow, StoreError> {
    let r = Reader { row, table: TABLE };
    Ok(TokenRow {
        id: r.text("id")?,
        name: r.text("name")?,
        hash: r.text("hash")?,
        grant: Grant { namespaces: r.json("namespaces")?, verbs: r.json("verbs")? },
        made_by: r.text("made_by")?,
        created_at: r.int("created_at")?,
        expires_at: r.int_opt("expires_at")?,
        revoked_at: r.int_opt("revoked_at")?,
        last_used_at: r.int_opt("last_used_at")?,
    })
}

impl Db {
    /// Every token that is kept, revoked and expired ones too, the oldest first.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn tokens(&self) -> Result<Vec<TokenRow>, StoreError> {
        let sql = "SELECT id, name, hash, namespaces, verbs, made_by, created_at, expires_at, revoked_at, \
                   last_used_at FROM tokens ORDER BY created_at, id";
        let rows = sqlx::query(sql)
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list tokens", e))?;
        rows.iter().map(read).collect()
    }

    /// Keeps a new token, even when the power is lost. One of the same name that has expired gives its name up.
    ///
    /// # Errors
    /// [`StoreError::Taken`] with `TokenName` when one of that name counts.
    pub async fn put_token(&self, token: &TokenRow) -> Result<(), StoreError> {
        let mut tx = self.begin(Durability::Power).await?;
        let sql = "UPDATE tokens SET revoked_at = expires_at \
                   WHERE name = $1 AND revoked_at IS NULL AND expires_at <= $2";
        sqlx::query(sql)
            .bind(token.name.clone())
            .bind(token.created_at)
            .execute(&mut *tx.inner)
            .await
            .map_err(|e| StoreError::sql("free the name of a token", e))?;
        sqlx::query(
            "INSERT INTO tokens (id, name, hash, namespaces, verbs, made_by, created_at, expires_at, \
             revoked_at, last_used_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
        )
        .bind(token.id.clone())
        .bind(token.name.clone())
        .bind(token.hash.clone())
        .bind(to_json(TABLE, &token.grant.namespaces)?)
        .bind(to_json(TABLE, &token.grant.verbs)?)
        .bind(token.made_by.clone())
        .bind(token.created_at)
        .bind(token.expires_at)
        .bind(token.revoked_at)
        .bind(token.last_used_at)
        .execute(&mut *tx.inner)
        .await
        .map_err(|e| StoreError::sql("keep a token", e))?;
        tx.commit().await
    }

    /// Revokes tokens, all or none, and removes the SSH keys that have their rights. On disk when it answers.
    /// Answers how many keys.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn revoke_tokens(
        &self,
        ids: &BTreeSet<String>,
        now: Millis,
    ) -> Result<u64, StoreError> {
        let mut tx = self.begin(Durability::Power).await?;
        let mut keys = 0;
        for id in ids {
            let sql = "UPDATE tokens SET revoked_at = $1 WHERE id = $2 AND revoked_at IS NULL";
            sqlx::query(sql)
                .bind(now)
                .bind(id.clone())
                .execute(&mut *tx.inner)
                .await
                .map_err(|e| StoreError::sql("revoke a token", e))?;
            let done = sqlx::query("DELETE FROM ssh_keys WHERE token_id = $1")
                .bind(id.clone())
                .execute(&mut *tx.inner)
                .await
                .map_err(|e| StoreError::sql("remove the keys of a token", e))?;
            keys += done.rows_affected();
        }
        tx.commit().await?;
        Ok(keys)
    }

    /// Notes that a token was shown.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn note_token_used(&self, id: &str, now: Millis) -> Result<(), StoreError> {
        let sql = "UPDATE tokens SET last_used_at = $1 \
                   WHERE id = $2 AND (last_used_at IS NULL OR last_used_at < $1)";
        let statement = sqlx::query(sql).bind(now).bind(id.to_owned());
        self.write_one("note the use of a token", statement).await
    }

    /// Forgets tokens that ended before `before`, and SSH keys of tokens that are not kept.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn forget_tokens(&self, before: Millis) -> Result<(), StoreError> {
        let mut tx = self.begin(Durability::Process).await?;
        sqlx::query("DELETE FROM tokens WHERE revoked_at < $1 OR expires_at < $1")
            .bind(before)
            .execute(&mut *tx.inner)
            .await
            .map_err(|e| StoreError::sql("forget tokens", e))?;
        let sql =
            "DELETE FROM ssh_keys WHERE token_id <> '' AND token_id NOT IN (SELECT id FROM tokens)";
        sqlx::query(sql)
            .execute(&mut *tx.inner)
            .await
            .map_err(|e| StoreError::sql("forget the keys of tokens", e))?;
        tx.commit().await
    }
}
