//! Snapshots: immutable filesystem states. They belong to a namespace, not to the sandbox that
//! made them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Millis;
use crate::id::{SessionId, SnapshotId};
use crate::name::Invalid;

/// Most labels of a snapshot.
const MAX_LABELS: usize = 32;

/// Whether a snapshot can be used. The words are the API's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotStatus {
    /// Usable.
    Created,
    /// Gone: its data is deleted or about to be.
    Deleted,
    /// Never came to be.
    Failed,
}

/// Why a snapshot was taken, when neither a user nor a stop asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// Somebody asked for it, or a stop keeps what there is.
    #[default]
    Kept,
    /// Live forks start from it. It is in no list, and goes when no sandbox would start from it any more.
    Fork,
    /// The state that a rollback left.
    Rollback,
}

impl Purpose {
    /// Its word; empty for [`Purpose::Kept`].
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kept => "",
            Self::Fork => "fork",
            Self::Rollback => "rollback",
        }
    }

    /// The purpose of a word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        [Self::Kept, Self::Fork, Self::Rollback].into_iter().find(|p| p.as_str() == word)
    }
}

/// A snapshot's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// The session whose upper it is.
    pub source_session_id: SessionId,
    /// Name of the sandbox at that time.
    pub sandbox_name: String,
    /// Whether it can be used.
    pub status: SnapshotStatus,
    /// Name of the image under it.
    pub image: String,
    /// `node24` and the like, for sandboxes made from it.
    pub runtime: String,
    /// Region of the session that it was taken of; clients demand one.
    pub region: String,
    /// Bytes of the files in its upper, by a walk of the tree; an estimate while that goes on.
    pub size_bytes: i64,
    /// The walk is done.
    pub measured: bool,
    /// Made by a stop or timeout, not by a user's call.
    pub automatic: bool,
    /// Snapshot that its session was started from.
    pub parent_id: Option<SnapshotId>,
    /// How long it is kept after its last use, ms; 0 is for ever.
    pub expiration_ms: i64,
    /// When it will be removed; absent is never.
    pub expires_at: Option<Millis>,
    /// When it was made.
    pub created_at: Millis,
    /// Last write.
    pub updated_at: Millis,
    /// Last time that a session was started from it, or that one which would start from it again ended.
    pub last_used_at: Option<Millis>,
    /// What its owner wrote on it.
    pub labels: BTreeMap<String, String>,
    /// Why it was taken.
    pub purpose: Purpose,
    /// How long its sandbox stood still for it, µs; 0 when it was stopped.
    pub stall_us: i64,
}

impl Snapshot {
    /// The same, to be kept so many ms after its last use; 0 is for ever.
    #[must_use]
    pub fn kept_for(mut self, expiration_ms: i64) -> Self {
        let since = self.last_used_at.unwrap_or(self.created_at);
        self.expiration_ms = expiration_ms;
        self.expires_at = (expiration_ms > 0).then(|| since.saturating_add(expiration_ms));
        self
    }
}

/// Checks labels of a snapshot: 32 at most, keys of 1 to 128 letters, digits and `._-/`, values of up to
/// 256 printable characters.
///
/// # Errors
/// [`Invalid`] that names the label.
pub fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Invalid> {
    if labels.len() > MAX_LABELS {
        let reason = format!("at most {MAX_LABELS} labels, got {}", labels.len());
        return Err(Invalid::new("labels", reason));
    }
    for (key, value) in labels {
        let good = |b: u8| b.is_ascii_alphanumeric() || b"._-/".contains(&b);
        let shown: String = key.chars().take(40).collect();
        let shown = shown.escape_debug();
        if key.is_empty() || key.len() > 128 || !key.bytes().all(good) {
            let reason =
                format!("'{shown}' is not a key: 1 to 128 letters, digits, '.', '_', '-' or '/'");
            return Err(Invalid::new("labels", reason));
        }
        if value.chars().count() > 256 || value.chars().any(char::is_control) {
            let reason = format!("the value of '{shown}' needs at most 256 printable characters");
            return Err(Invalid::new("labels", reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(key: &str, value: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(key.to_owned(), value.to_owned())])
    }

    #[test]
    fn labels_have_limits() {
        assert!(check_labels(&one("app.io/kind", &"é".repeat(256))).is_ok());
        assert!(check_labels(&one("k", "")).is_ok());
        for (key, value) in [("", "x"), ("a b", "x"), ("k", "a\nb"), (&"k".repeat(129), "x")] {
            assert!(check_labels(&one(key, value)).is_err(), "{key}");
        }
        assert!(check_labels(&one("k", &"é".repeat(257))).is_err());
        let many = |n: usize| (0..n).map(|i| (format!("k{i}"), String::new())).collect();
        assert!(check_labels(&many(32)).is_ok());
        assert!(check_labels(&many(33)).is_err());
    }

    #[test]
    fn purposes_have_words() {
        for purpose in [Purpose::Kept, Purpose::Fork, Purpose::Rollback] {
            assert_eq!(Purpose::parse(purpose.as_str()), Some(purpose));
        }
        assert_eq!(Purpose::parse("x"), None);
    }
}
