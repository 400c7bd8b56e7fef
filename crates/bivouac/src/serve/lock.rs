//! One engine per data folder: a lock that dies with its holder.
//!
//! Invariant: whoever holds [`FolderLock`] is the only engine on that folder. The kernel drops the
//! lock when the process ends, however it ends; the pid inside is only for messages.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Name of the engine's lock in the data folder.
pub const ENGINE_LOCK: &str = "engine.lock";
/// Name of the lock under which `bivouac run` starts an engine.
pub const START_LOCK: &str = "start.lock";

/// A held lock; dropped is released.
#[derive(Debug)]
pub struct FolderLock {
    _file: File,
}

/// Why a lock was not given.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds it; its pid, when it has written it already.
    #[error("another process holds the lock")]
    Held(Option<i32>),
    /// The file cannot be used.
    #[error("could not use the lock file")]
    Io(#[from] io::Error),
}

impl FolderLock {
    /// Takes the lock `name` in `data_dir` and writes our pid into it.
    ///
    /// # Errors
    /// [`LockError::Held`] with the holder's pid.
    pub fn take(data_dir: &Path, name: &str) -> Result<Self, LockError> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(data_dir.join(name))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(LockError::Held(holder(&mut file))),
            Err(error) => return Err(LockError::Io(error.into())),
        }
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())?;
        Ok(Self { _file: file })
    }
}

fn holder(file: &mut File) -> Option<i32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::tempdir;

    #[test]
    fn the_second_is_refused_and_told_the_holder() {
        let folder = tempdir().unwrap();
        let first = FolderLock::take(folder.path(), ENGINE_LOCK).unwrap();
        match FolderLock::take(folder.path(), ENGINE_LOCK) {
            Err(LockError::Held(pid)) => {
                assert_eq!(pid, i32::try_from(std::process::id()).ok());
            }
            other => panic!("expected a refusal, got {other:?}"),
        }
        drop(first);
        FolderLock::take(folder.path(), ENGINE_LOCK).unwrap();
    }
}
