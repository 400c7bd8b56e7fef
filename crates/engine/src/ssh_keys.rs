//! Public keys for SSH: who is let in by which.
//!
//! Invariants: a key has the rights of the token that it was registered with, and counts as long as that does; a
//! key that somebody else registered is not taken over; whoever does not have a key does not see it. The keys are
//! read and checked by SSH, which knows their form: here they are texts. Called by HTTP and SSH.

use bivouac_store::SshKeyRow;
use bivouac_types::Millis;

use crate::Engine;
use crate::api::Principal;
use crate::error::{Error, ErrorKind};

/// Most keys of one principal.
const MAX_OF_ONE: usize = 100;
/// Longest name of a key.
const MAX_NAME: usize = 128;
/// How often a use is written down, ms.
const NOTE_MS: Millis = 60_000;

/// A key to be registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSshKey {
    /// What it is called.
    pub name: String,
    /// `SHA256:…`
    pub fingerprint: String,
    /// In OpenSSH's form, without a comment.
    pub public_key: String,
}

/// A registered key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SshKey {
    /// What it is called.
    pub name: String,
    /// `SHA256:…`
    pub fingerprint: String,
    /// In OpenSSH's form, without a comment.
    pub public_key: String,
    /// Id of the token whose rights it has; absent is the engine's own.
    pub token: Option<String>,
    /// When it was registered.
    pub created_at: Millis,
    /// When it last opened a connection, to the minute.
    pub last_used_at: Option<Millis>,
}

impl From<SshKeyRow> for SshKey {
    fn from(row: SshKeyRow) -> Self {
        let SshKeyRow { fingerprint, name, public_key, token_id, created_at, last_used_at } = row;
        let token = Some(token_id).filter(|id| !id.is_empty());
        Self { name, fingerprint, public_key, token, created_at, last_used_at }
    }
}

/// Whether somebody may see a key and remove it: his own, and all for who rules the engine.
fn has(who: &Principal, key: &SshKey) -> bool {
    who.token.is_none() || who.token == key.token
}

impl Engine {
    /// The keys that somebody registered, the oldest first; all of them for the holder of the engine's own token.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn ssh_keys(&self, who: &Principal) -> Result<Vec<SshKey>, Error> {
        let keys = self.inner.db.ssh_keys().await?;
        Ok(keys.into_iter().map(SshKey::from).filter(|key| has(who, key)).collect())
    }

    /// Registers a key with the caller's rights. One that he has registered already is answered as it is.
    ///
    /// # Errors
    /// 400 for a bad name; 409 for a key of somebody else, and for too many.
    pub async fn add_ssh_key(&self, who: &Principal, new: NewSshKey) -> Result<SshKey, Error> {
        let named = (1..=MAX_NAME).contains(&new.name.chars().count())
            && !new.name.chars().any(char::is_control);
        if !named {
            let message =
                format!("Invalid name: must have 1 to {MAX_NAME} characters, none of control");
            return Err(Error::invalid(message));
        }
        if let Some(key) = self.own_key(who, &new.fingerprint).await? {
            return Ok(key);
        }
        if self.ssh_keys(who).await?.iter().filter(|key| key.token == who.token).count()
            >= MAX_OF_ONE
        {
            let message =
                format!("{MAX_OF_ONE} SSH keys are registered already; remove one first.");
            return Err(Error::new(ErrorKind::Conflict, "conflict", message));
        }
        let row = SshKeyRow {
            fingerprint: new.fingerprint.clone(),
            name: new.name,
            public_key: new.public_key,
            token_id: who.token.clone().unwrap_or_default(),
            created_at: self.inner.now(),
            last_used_at: None,
        };
        let (inner, put) = (std::sync::Arc::clone(&self.inner), row.clone());
        self.inner.run(async move { Ok(inner.db.put_ssh_key(&put).await?) }).await?;
        tracing::info!(by = %who.name, key = %row.fingerprint, "SSH key registered");
        // Somebody may have been quicker with the same key.
        self.own_key(who, &new.fingerprint).await?.ok_or_else(|| no_key(&new.fingerprint))
    }

    async fn own_key(&self, who: &Principal, fingerprint: &str) -> Result<Option<SshKey>, Error> {
        let Some(key) = self.inner.db.ssh_key(fingerprint).await?.map(SshKey::from) else {
            return Ok(None);
        };
        if key.token == who.token {
            return Ok(Some(key));
        }
        let message = format!(
            "SSH key {fingerprint} is registered for another token: a key has the rights of one; make another key."
        );
        Err(Error::new(ErrorKind::Conflict, "ssh_key_taken", message))
    }

    /// Removes a key, by its fingerprint or name. Connections that it opened go on until they end.
    ///
    /// # Errors
    /// 404; 409 for a name of several.
    pub async fn remove_ssh_key(&self, who: &Principal, key: &str) -> Result<SshKey, Error> {
        let mut keys = self.ssh_keys(who).await?;
        keys.retain(|known| known.fingerprint == key || known.name == key);
        let [found] = <[SshKey; 1]>::try_from(keys).map_err(|keys| {
            if keys.is_empty() {
                return no_key(key);
            }
            let message =
                format!("{} SSH keys are called '{key}': name a fingerprint.", keys.len());
            Error::new(ErrorKind::Conflict, "conflict", message)
        })?;
        let (inner, fingerprint) = (std::sync::Arc::clone(&self.inner), found.fingerprint.clone());
        let gone =
            self.inner.run(async move { Ok(inner.db.remove_ssh_key(&fingerprint).await?) }).await?;
        if !gone {
            return Err(no_key(key));
        }
        tracing::info!(by = %who.name, key = %found.fingerprint, "SSH key removed");
        Ok(found)
    }

    /// Who comes with this key; the caller has seen the proof that it has it. `None`: nobody, or somebody whose
    /// token counts no more.
    ///
    /// # Errors
    /// [`Error`], for the database.
    pub async fn by_ssh_key(&self, fingerprint: &str) -> Result<Option<Principal>, Error> {
        let Some(key) = self.inner.db.ssh_key(fingerprint).await?.map(SshKey::from) else {
            return Ok(None);
        };
        Ok(self.principal_of(key.token.as_deref()).ok())
    }

    /// Notes that a key was used.
    pub fn note_ssh_key(&self, fingerprint: &str) {
        let (inner, fingerprint) = (std::sync::Arc::clone(&self.inner), fingerprint.to_owned());
        let now = inner.now();
        self.inner.spawn(async move {
            let known = inner.db.ssh_key(&fingerprint).await.ok().flatten();
            let recent = |at: Millis| now.saturating_sub(at) < NOTE_MS;
            if known.is_some_and(|key| !key.last_used_at.is_some_and(recent))
                && let Err(error) = inner.db.note_ssh_key_used(&fingerprint, now).await
            {
                tracing::debug!(%error, "the use of an SSH key could not be noted");
            }
        });
    }
}

fn no_key(key: &str) -> Error {
    let shown: String = key.chars().take(80).collect();
    Error::not_found(format!(
        "SSH key '{}' was not found; 'bivouac ssh-key ls' lists them.",
        shown.escape_debug()
    ))
}
