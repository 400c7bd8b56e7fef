//! Secrets, header values of policies and the keys of identity tokens: sealed rows.
//!
//! Invariant: what is written is sealed for its own row and version, and only [`Secret`]s come out.
//! Called by the engine's vault.

use std::collections::BTreeSet;

use bivouac_types::Millis;
use bivouac_types::id::ValueId;
use bivouac_types::name::Namespace;
use bivouac_types::secret::Secret;
use sqlx::AssertSqlSafe;
use sqlx::any::AnyRow;

use crate::db::{Db, Durability, Tx};
use crate::error::StoreError;
use crate::row::Reader;

const SECRETS: &str = "secrets";
const VALUES: &str = "policy_values";
const KEYS: &str = "issuer_keys";
const COLUMNS: &str = "team, project, name, kind, version, created_at, updated_at";

/// What may be told of a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretRow {
    /// Where it belongs.
    pub namespace: Namespace,
    /// Its name.
    pub name: String,
    /// What kind of source it has: `literal`, `env` and so on.
    pub kind: String,
    /// Grows with each change.
    pub version: i64,
    /// When it was first set.
    pub created_at: Millis,
    /// When it was last set.
    pub updated_at: Millis,
}

fn read(row: &AnyRow) -> Result<SecretRow, StoreError> {
    let r = Reader { row, table: SECRETS };
    Ok(SecretRow {
        namespace: Namespace { team: r.text("team")?, project: r.text("project")? },
        name: r.text("name")?,
        kind: r.text("kind")?,
        version: r.int("version")?,
        created_at: r.int("created_at")?,
        updated_at: r.int("updated_at")?,
    })
}

/// The AAD of a secret's row.
fn bound<'a>(ns: &'a Namespace, name: &'a str, version: &'a str) -> [&'a str; 5] {
    [SECRETS, &ns.team, &ns.project, name, version]
}

impl Db {
    /// A mark of the whole database.
    pub(crate) async fn mark(&self, key: &str) -> Result<Option<String>, StoreError> {
        let row = sqlx::query("SELECT value FROM bivouac WHERE key = $1")
            .bind(key.to_owned())
            .fetch_optional(self.reader())
            .await
            .map_err(|e| StoreError::sql("read a mark", e))?;
        row.map(|row| Reader { row: &row, table: "bivouac" }.text("value")).transpose()
    }

    /// Sets a mark that is not there yet.
    pub(crate) async fn set_mark(&self, key: &str, value: &str) -> Result<(), StoreError> {
        let mut tx = self.begin(Durability::Power).await?;
        sqlx::query("INSERT INTO bivouac (key, value) VALUES ($1, $2)")
            .bind(key.to_owned())
            .bind(value.to_owned())
            .execute(&mut *tx.inner)
            .await
            .map_err(|e| StoreError::sql("set a mark", e))?;
        tx.commit().await
    }

    /// Sets a secret, new or not. Kept even when the power is lost: nobody has a copy.
    ///
    /// # Errors
    /// [`StoreError`]; [`StoreError::Changed`] when it was set at the same time.
    pub async fn put_secret(
        &self,
        ns: &Namespace,
        name: &str,
        kind: &str,
        content: &Secret,
        now: Millis,
    ) -> Result<SecretRow, StoreError> {
        let mut tx = self.begin(Durability::Power).await?;
        let old = tx.secret_row(ns, name).await?;
        let version = old.as_ref().map_or(1, |row| row.version + 1);
        let sealed =
            self.vault()?.seal(&bound(ns, name, &version.to_string()), content.expose())?;
        let done = sqlx::query(
            "INSERT INTO secrets (team, project, name, kind, sealed, version, created_at, updated_at) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $7) \
             ON CONFLICT (team, project, name) DO UPDATE SET kind = $4, sealed = $5, version = $6, \
             updated_at = $7 WHERE secrets.version = $8",
        )
        .bind(ns.team.clone())
        .bind(ns.project.clone())
        .bind(name.to_owned())
        .bind(kind.to_owned())
        .bind(sealed)
        .bind(version)
        .bind(now)
        .bind(version - 1)
        .execute(&mut *tx.inner)
        .await
        .map_err(|e| StoreError::sql("set a secret", e))?;
        if done.rows_affected() == 0 {
            return Err(StoreError::Changed { what: "the secret".to_owned() });
        }
        tx.commit().await?;
        Ok(SecretRow {
            namespace: ns.clone(),
            name: name.to_owned(),
            kind: kind.to_owned(),
            version,
            created_at: old.map_or(now, |row| row.created_at),
            updated_at: now,
        })
    }

    /// What may be told of the secrets of a namespace, by name.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn secrets(&self, ns: &Namespace) -> Result<Vec<SecretRow>, StoreError> {
        let sql =
            format!("SELECT {COLUMNS} FROM secrets WHERE team = $1 AND project = $2 ORDER BY name");
        let rows = sqlx::query(AssertSqlSafe(sql))
            .bind(ns.team.clone())
            .bind(ns.project.clone())
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list secrets", e))?;
        rows.iter().map(read).collect()
    }

    /// A secret with what it holds.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn secret(
        &self,
        ns: &Namespace,
        name: &str,
    ) -> Result<Option<(SecretRow, Secret)>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS}, sealed FROM secrets WHERE team = $1 AND project = $2 AND name = $3"
        );
        let row = sqlx::query(AssertSqlSafe(sql))
            .bind(ns.team.clone())
            .bind(ns.project.clone())
            .bind(name.to_owned())
            .fetch_optional(self.reader())
            .await
            .map_err(|e| StoreError::sql("read a secret", e))?;
        let Some(row) = row else { return Ok(None) };
        let known = read(&row)?;
        let sealed = Reader { row: &row, table: SECRETS }.text("sealed")?;
        let version = known.version.to_string();
        let content = self.vault()?.open(&bound(ns, name, &version), &sealed)?;
        Ok(Some((known, content)))
    }

    /// Whether there is a secret of that name.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn secret_is_there(&self, ns: &Namespace, name: &str) -> Result<bool, StoreError> {
        let sql = "SELECT name FROM secrets WHERE team = $1 AND project = $2 AND name = $3";
        let row = sqlx::query(sql)
            .bind(ns.team.clone())
            .bind(ns.project.clone())
            .bind(name.to_owned())
            .fetch_optional(self.reader())
            .await
            .map_err(|e| StoreError::sql("find a secret", e))?;
        Ok(row.is_some())
    }

    /// Removes a secret. `false`: there is none.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn remove_secret(&self, ns: &Namespace, name: &str) -> Result<bool, StoreError> {
        let mut tx = self.begin(Durability::Power).await?;
        let done =
            sqlx::query("DELETE FROM secrets WHERE team = $1 AND project = $2 AND name = $3")
                .bind(ns.team.clone())
                .bind(ns.project.clone())
                .bind(name.to_owned())
                .execute(&mut *tx.inner)
                .await
                .map_err(|e| StoreError::sql("remove a secret", e))?;
        tx.commit().await?;
        Ok(done.rows_affected() > 0)
    }

    /// The id of a header value: the same for the same text of the same team, so that a policy that is
    /// sent again has the ids that it had.
    ///
    /// # Errors
    /// [`StoreError::Vault`] when the vault is not unlocked.
    pub fn value_id(&self, team: &str, text: &Secret) -> Result<ValueId, StoreError> {
        let (millis, random) = self.vault()?.id(team, text.expose());
        Ok(ValueId::new(millis, random))
    }

    /// Seals header values of a policy, all or none. One that is there already is only young again.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn put_values<'a>(
        &self,
        team: &str,
        values: impl IntoIterator<Item = (&'a ValueId, &'a Secret)>,
        now: Millis,
    ) -> Result<(), StoreError> {
        let vault = self.vault()?;
        let mut tx = self.begin(Durability::Process).await?;
        for (id, text) in values {
            sqlx::query(
                "INSERT INTO policy_values (id, team, sealed, created_at) VALUES ($1, $2, $3, $4) \
                 ON CONFLICT (id) DO UPDATE SET created_at = $4 WHERE policy_values.team = $2",
            )
            .bind(id.as_str().to_owned())
            .bind(team.to_owned())
            .bind(vault.seal(&[VALUES, team, id.as_str()], text.expose())?)
            .bind(now)
            .execute(&mut *tx.inner)
            .await
            .map_err(|e| StoreError::sql("keep a header value", e))?;
        }
        tx.commit().await
    }

    /// A header value of a team.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn value(&self, team: &str, id: &ValueId) -> Result<Option<Secret>, StoreError> {
        let row = sqlx::query("SELECT sealed FROM policy_values WHERE id = $1 AND team = $2")
            .bind(id.as_str().to_owned())
            .bind(team.to_owned())
            .fetch_optional(self.reader())
            .await
            .map_err(|e| StoreError::sql("read a header value", e))?;
        let Some(row) = row else { return Ok(None) };
        let sealed = Reader { row: &row, table: VALUES }.text("sealed")?;
        self.vault()?.open(&[VALUES, team, id.as_str()], &sealed).map(Some)
    }

    /// Removes header values that are older than `before` and that no sandbox and no session that is
    /// not settled names. Answers how many.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn remove_unused_values(&self, before: Millis) -> Result<u64, StoreError> {
        // Asked for first: one that is sealed later is younger than `before`.
        let rows = sqlx::query("SELECT id FROM policy_values WHERE created_at < $1")
            .bind(before)
            .fetch_all(self.reader())
            .await
            .map_err(|e| StoreError::sql("list header values", e))?;
        let mut unused = BTreeSet::new();
        for row in &rows {
            unused.insert(Reader { row, table: VALUES }.parsed("id", ValueId::parse)?);
        }
        if unused.is_empty() {
            return Ok(0);
        }
        for sql in [
            "SELECT config FROM sandboxes WHERE config LIKE '%\"val_%'",
            "SELECT config FROM sessions WHERE settled = 0 AND config LIKE '%\"val_%'",
        ] {
            let rows = sqlx::query(sql)
                .fetch_all(self.reader())
                .await
                .map_err(|e| StoreError::sql("look for header values", e))?;
            for row in &rows {
                for id in named_values(&Reader { row, table: VALUES }.text("config")?) {
                    unused.remove(&id);
                }
            }
        }
        let mut tx = self.begin(Durability::Process).await?;
        let mut removed = 0;
        for id in &unused {
            // One that was kept again in the meantime stays.
            let sql = "DELETE FROM policy_values WHERE id = $1 AND created_at < $2";
            let done = sqlx::query(sql)
                .bind(id.as_str().to_owned())
                .bind(before)
                .execute(&mut *tx.inner)
                .await
                .map_err(|e| StoreError::sql("remove a header value", e))?;
            removed += done.rows_affected();
        }
        tx.commit().await?;
        Ok(removed)
    }

    /// The keys of identity tokens, the newest first.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn issuer_keys(&self) -> Result<Vec<(String, Secret)>, StoreError> {
        let rows =
            sqlx::query("SELECT id, sealed FROM issuer_keys ORDER BY created_at DESC, id DESC")
                .fetch_all(self.reader())
                .await
                .map_err(|e| StoreError::sql("read the keys of tokens", e))?;
        let vault = self.vault()?;
        rows.iter()
            .map(|row| {
                let r = Reader { row, table: KEYS };
                let id = r.text("id")?;
                let key = vault.open(&[KEYS, &id], &r.text("sealed")?)?;
                Ok((id, key))
            })
            .collect()
    }

    /// Keeps a key for identity tokens.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn put_issuer_key(
        &self,
        id: &str,
        key: &Secret,
        now: Millis,
    ) -> Result<(), StoreError> {
        let sealed = self.vault()?.seal(&[KEYS, id], key.expose())?;
        let mut tx = self.begin(Durability::Power).await?;
        sqlx::query("INSERT INTO issuer_keys (id, sealed, created_at) VALUES ($1, $2, $3)")
            .bind(id.to_owned())
            .bind(sealed)
            .bind(now)
            .execute(&mut *tx.inner)
            .await
            .map_err(|e| StoreError::sql("keep the key of tokens", e))?;
        tx.commit().await
    }
}

impl Tx<'_> {
    /// Makes the values that a new row names young again, so that a removal which has looked at the rows
    /// before this one was there lets them be.
    pub(crate) async fn refresh_values(
        &mut self,
        team: &str,
        config: &str,
        now: Millis,
    ) -> Result<(), StoreError> {
        for id in named_values(config).collect::<BTreeSet<_>>() {
            let sql = "UPDATE policy_values SET created_at = $1 \
                       WHERE id = $2 AND team = $3 AND created_at < $1";
            sqlx::query(sql)
                .bind(now)
                .bind(id.as_str().to_owned())
                .bind(team.to_owned())
                .execute(&mut *self.inner)
                .await
                .map_err(|e| StoreError::sql("keep a header value", e))?;
        }
        Ok(())
    }

    async fn secret_row(
        &mut self,
        ns: &Namespace,
        name: &str,
    ) -> Result<Option<SecretRow>, StoreError> {
        let sql =
            format!("SELECT {COLUMNS} FROM secrets WHERE team = $1 AND project = $2 AND name = $3");
        let row = sqlx::query(AssertSqlSafe(sql))
            .bind(ns.team.clone())
            .bind(ns.project.clone())
            .bind(name.to_owned())
            .fetch_optional(&mut *self.inner)
            .await
            .map_err(|e| StoreError::sql("find a secret", e))?;
        row.as_ref().map(read).transpose()
    }
}

/// Ids of values in a row's JSON. One in a text of a user as well: it only keeps a value longer.
fn named_values(config: &str) -> impl Iterator<Item = ValueId> {
    config
        .split('"')
        .filter(|word| word.starts_with(ValueId::PREFIX))
        .filter_map(|word| ValueId::parse(word).ok())
}
