//! Which mode a data folder has, and whether the last engine closed its pool.
//!
//! Owns `<data>/pool.json` (the mode; written whole or not at all), `<data>/pool.open` (there while an
//! engine has the pool open) and `<data>/pool.check` (what the last check of the pool found). Invariant:
//! the place that `pool.json` names is the pool, and any other is left of a migration that was cut short.
//! Called by `pool` and `migrate`.

use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{PoolMode, named, sync_folder};

const MODE: &str = "pool.json";
const OPEN: &str = "pool.open";
const CHECK: &str = "pool.check";

#[derive(Serialize, Deserialize)]
struct Record {
    mode: PoolMode,
}

/// What is known of a pool's health.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolCheck {
    /// How it went.
    pub state: CheckState,
    /// When it began, ms since the epoch.
    pub started_at: i64,
    /// Bytes that were read and compared.
    pub bytes: u64,
    /// Blocks that were not what was written, or could not be read.
    pub errors: u64,
    /// What there is to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// How a check of a pool went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckState {
    /// It goes on, or was cut short together with its engine.
    Running,
    /// Everything is as it was written.
    Clean,
    /// Something is not.
    Damaged,
    /// It could not be done.
    Failed,
}

impl PoolCheck {
    /// For people.
    #[must_use]
    pub fn in_words(&self) -> String {
        let read = self.bytes >> 20;
        let note = self.note.as_deref().map(|note| format!(" ({note})")).unwrap_or_default();
        match self.state {
            CheckState::Running => format!("being checked after an unclean end{note}"),
            CheckState::Clean => {
                format!("checked after an unclean end: {read} MiB are whole{note}")
            }
            CheckState::Damaged => format!("damaged: {} errors in {read} MiB{note}", self.errors),
            CheckState::Failed => format!("could not be checked after an unclean end{note}"),
        }
    }
}

/// Where a mode keeps its volumes, in the data folder.
pub(super) fn place(data: &Path, mode: PoolMode) -> PathBuf {
    data.join(match mode {
        PoolMode::Loop => "pool.btrfs",
        PoolMode::Native => "pool.native",
        PoolMode::Folder => "pool.folder",
    })
}

/// The mode of a data folder. `None`: it has no pool yet.
///
/// # Errors
/// When the record cannot be read.
pub(super) fn mode(data: &Path) -> io::Result<Option<PoolMode>> {
    match read::<Record>(&data.join(MODE))? {
        Some(record) => Ok(Some(record.mode)),
        // Older engines knew one mode and recorded none.
        None if place(data, PoolMode::Loop).exists() => Ok(Some(PoolMode::Loop)),
        None => Ok(None),
    }
}

/// Makes this the mode of the data folder. On disk when it returns.
///
/// # Errors
/// The file system's.
pub(super) fn set_mode(data: &Path, mode: PoolMode) -> io::Result<()> {
    write(data, MODE, &Record { mode })
}

/// Marks the pool as open. Answers whether it was marked already: nobody closed it.
///
/// # Errors
/// The file system's.
pub(super) fn mark_open(data: &Path) -> io::Result<bool> {
    let path = data.join(OPEN);
    let marked = path.exists();
    if !marked {
        let made = std::fs::OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
        made.map_err(|e| named(path.display(), e))?.sync_all()?;
        sync_folder(data)?;
    }
    Ok(marked)
}

/// Takes the mark away, after everything is on disk.
pub(super) fn mark_closed(data: &Path) {
    // Left behind, it costs the next start a check.
    let _ = std::fs::remove_file(data.join(OPEN));
}

/// What the last check found. `None`: there was none.
///
/// # Errors
/// When the record cannot be read.
pub(super) fn check(data: &Path) -> io::Result<Option<PoolCheck>> {
    read(&data.join(CHECK))
}

/// Keeps what a check found.
///
/// # Errors
/// The file system's.
pub(super) fn set_check(data: &Path, check: &PoolCheck) -> io::Result<()> {
    write(data, CHECK, check)
}

/// Forgets it: it was of another pool.
pub(super) fn forget_check(data: &Path) {
    let _ = std::fs::remove_file(data.join(CHECK));
}

fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match std::fs::read(path) {
        Ok(text) => {
            let read = serde_json::from_slice(&text).map_err(io::Error::from);
            read.map(Some).map_err(|e| named(path.display(), e))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(named(path.display(), e)),
    }
}

fn write(data: &Path, name: &str, what: &impl Serialize) -> io::Result<()> {
    let (path, beside) = (data.join(name), data.join(format!("{name}.new")));
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(&beside).map_err(|e| named(beside.display(), e))?;
    let mut text = serde_json::to_vec(what)?;
    text.push(b'\n');
    file.write_all(&text)?;
    file.sync_all()?;
    std::fs::rename(&beside, &path).map_err(|e| named(path.display(), e))?;
    sync_folder(data)
}
