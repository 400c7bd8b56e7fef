//! Environments in rows: people put passwords there, so they are sealed.
//!
//! Invariant: a row that is written holds no variable in clear text. Rows of the time before the vault do;
//! they are read as they are, and sealed when they are next written. Called by `sandboxes` and `sessions`.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use bivouac_types::secret::Secret;

use crate::error::StoreError;
use crate::row::to_json;
use crate::vault::{Vault, locked};

type Env = BTreeMap<String, String>;

/// Seals the variables of a row; none is nothing to seal.
pub(crate) fn seal(
    vault: &OnceLock<Vault>,
    table: &'static str,
    id: &str,
    env: &Env,
) -> Result<Option<String>, StoreError> {
    if env.is_empty() {
        return Ok(None);
    }
    let text = Secret::new(to_json(table, env)?);
    vault.get().ok_or_else(locked)?.seal(&[table, "env", id], text.expose()).map(Some)
}

/// The variables of a row, sealed or of the time before.
pub(crate) fn open(
    vault: &OnceLock<Vault>,
    table: &'static str,
    id: &str,
    clear: Env,
    sealed: Option<String>,
) -> Result<Env, StoreError> {
    let Some(sealed) = sealed else { return Ok(clear) };
    let text = vault.get().ok_or_else(locked)?.open(&[table, "env", id], &sealed)?;
    serde_json::from_str(text.expose())
        .map_err(|_| StoreError::Corrupt { table, why: "sealed_env: no map of texts".to_owned() })
}
