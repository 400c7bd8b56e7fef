//! What a running engine leaves in its data folder for clients: `engine.json` and `token`.
//!
//! Invariant: both are written whole or not at all (a new file, then a rename), and only by the
//! engine that holds the folder's lock. Read by the command line's `client`.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// `engine.json`: where the engine of a data folder is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineRecord {
    /// Its process.
    pub pid: i32,
    /// Where it listens: `127.0.0.1:7070`.
    pub address: String,
    /// Its version.
    pub version: String,
}

/// Name of the record in the data folder.
pub const ENGINE_FILE: &str = "engine.json";
/// Name of the token in the data folder.
pub const TOKEN_FILE: &str = "token";

impl EngineRecord {
    /// Reads the record. `None`: no engine wrote one, or the last one left in order.
    ///
    /// # Errors
    /// The file is there and cannot be read or is not a record.
    pub fn read(data_dir: &Path) -> io::Result<Option<Self>> {
        let bytes = match fs::read(data_dir.join(ENGINE_FILE)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        serde_json::from_slice(&bytes).map(Some).map_err(io::Error::from)
    }

    /// Writes the record.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self, data_dir: &Path) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(self)?;
        bytes.push(b'\n');
        write_private(&data_dir.join(ENGINE_FILE), &bytes)
    }

    /// Whether the process is still there.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let pid = rustix::process::Pid::from_raw(self.pid);
        // EPERM: there, and somebody else's.
        pid.is_some_and(|pid| {
            !matches!(rustix::process::test_kill_process(pid), Err(rustix::io::Errno::SRCH))
        })
    }
}

/// Removes the record. Idempotent.
pub fn remove_record(data_dir: &Path) -> io::Result<()> {
    match fs::remove_file(data_dir.join(ENGINE_FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Reads the token. `None`: no engine has started on this folder yet.
///
/// # Errors
/// The file is there and cannot be read, or is empty.
pub fn read_token(data_dir: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(data_dir.join(TOKEN_FILE)) {
        Ok(text) if text.trim().is_empty() => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "the token file is empty"))
        }
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads the token, or makes and keeps one at the first start.
///
/// # Errors
/// The file system's, or no randomness.
pub fn ensure_token(data_dir: &Path) -> io::Result<String> {
    if let Some(token) = read_token(data_dir)? {
        return Ok(token);
    }
    let mut random = [0u8; 32];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let token = format!("bvk_{}", hex(&random));
    write_private(&data_dir.join(TOKEN_FILE), format!("{token}\n").as_bytes())?;
    Ok(token)
}

/// Bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// Puts a file of mode 0600 in place, whole or not at all, and makes it last.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    // What a crash left of an earlier write.
    let _ = fs::remove_file(&new);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    match path.parent() {
        Some(folder) => fs::File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use tempfile::tempdir;

    #[test]
    fn the_token_is_made_once_and_private() {
        let folder = tempdir().unwrap();
        assert_eq!(read_token(folder.path()).unwrap(), None);
        let token = ensure_token(folder.path()).unwrap();
        assert_eq!(token.len(), 4 + 64);
        assert_eq!(ensure_token(folder.path()).unwrap(), token);
        let mode = fs::metadata(folder.path().join(TOKEN_FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::write(folder.path().join(TOKEN_FILE), "\n").unwrap();
        assert!(ensure_token(folder.path()).is_err(), "an empty token opens the door to everyone");
    }

    #[test]
    fn the_record_reads_back_and_knows_a_dead_process() {
        let folder = tempdir().unwrap();
        assert_eq!(EngineRecord::read(folder.path()).unwrap(), None);
        let pid = i32::try_from(std::process::id()).unwrap();
        let mut record =
            EngineRecord { pid, address: "127.0.0.1:7070".to_owned(), version: "0.1.0".to_owned() };
        record.write(folder.path()).unwrap();
        assert_eq!(EngineRecord::read(folder.path()).unwrap(), Some(record.clone()));
        assert!(record.is_alive());
        record.pid = i32::MAX;
        assert!(!record.is_alive());
        remove_record(folder.path()).unwrap();
        remove_record(folder.path()).unwrap();
        assert_eq!(EngineRecord::read(folder.path()).unwrap(), None);
    }
}
