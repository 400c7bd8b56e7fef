//! One lock for the machine. Tests that look at *everything* (processes, loop devices, control
//! groups) must be alone; all others may run side by side.
//!
//! Invariant: a holder of [`exclusive`] is the only test of any test process on this machine that
//! has a server. A file lock, because test runners use threads and processes alike.

use std::fs::File;

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};

/// Held for as long as it lives.
#[derive(Debug)]
pub struct MachineLock {
    _file: File,
}

/// Waits for a place beside others.
///
/// # Errors
/// When the lock file cannot be opened or locked.
pub fn shared() -> Result<MachineLock> {
    take(FlockOperation::LockShared)
}

/// Waits until nobody else has a server, and keeps it so.
///
/// # Errors
/// When the lock file cannot be opened or locked.
pub fn exclusive() -> Result<MachineLock> {
    take(FlockOperation::LockExclusive)
}

fn take(how: FlockOperation) -> Result<MachineLock> {
    let path = std::env::temp_dir().join("bivouac-tests.lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("open {}", path.display()))?;
    flock(&file, how).with_context(|| format!("lock {}", path.display()))?;
    Ok(MachineLock { _file: file })
}
