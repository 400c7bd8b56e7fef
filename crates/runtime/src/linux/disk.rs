//! What serve does for the `df` inside: says where a session's numbers are, and how much room the storage
//! has.
//!
//! One file of the engine in its folder of sockets holds that room, rewritten in place: inits keep it open
//! for longer than a `serve` lives. Invariant: it holds one number of fixed width, so that whoever reads it
//! in the middle of a write reads a number. Answered inside by `init::disk`.

use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use bivouac_types::id::SessionId;

use crate::DiskLevel;
use crate::pool::quota::Level;
use crate::pool::{Kind, Pool};
use crate::proto::DiskPlan;

/// Name of the file.
pub(super) const SPACE: &str = "space";
/// Bytes that a launch may need for its folders, when a session has no room of its own left.
pub(super) const TO_START: u64 = 2 << 20;

pub(super) fn level(level: Level) -> DiskLevel {
    DiskLevel { charged: level.charged, limit: level.limit }
}

/// Where the numbers of a session are. `None`: its disk is not limited here, and `df` inside tells of the
/// whole storage.
pub(super) fn plan(pool: &Pool, session: &SessionId, run_dir: &Path) -> Option<DiskPlan> {
    let group = pool.quota_group(Kind::Session, session.as_str()).ok()??;
    let text = |path: &Path| path.to_string_lossy().into_owned();
    Some(DiskPlan { group: text(&group), space: text(&run_dir.join(SPACE)) })
}

/// Writes how much room the storage has.
///
/// # Errors
/// As statvfs(3) and pwrite(2).
pub(super) fn tell(run_dir: &Path, pool: &Pool) -> io::Result<()> {
    let free = pool.space()?.free;
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600);
    let file = file.open(run_dir.join(SPACE))?;
    file.write_all_at(format!("{free:020}\n").as_bytes(), 0)
}
