//! Storage as a whole: limits, use, what is there; and what serve does for the `df` inside.
//!
//! `df` is told by the session's quota group and by one file of the engine in its folder of sockets, which
//! holds what the storage has left. It is rewritten in place: inits keep it open for longer than a `serve` lives. Invariant: it holds one number of fixed width, so that whoever reads it
//! in the middle of a write reads a number. Answered inside by `init::disk`.

use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use async_trait::async_trait;
use bivouac_types::id::SessionId;

use super::{LinuxRuntime, blocking};
use crate::pool::quota::Level;
use crate::pool::{Kind, Pool};
use crate::proto::DiskPlan;
use crate::{
    DiskFit, DiskLevel, Drives, Holdings, Runtime, RuntimeError, Stored, StoredKind, StoredUsage,
};

/// Name of the file.
pub(super) const SPACE: &str = "space";
/// Bytes that a launch may need for its folders, when a session has no room of its own left.
pub(super) const TO_START: u64 = 2 << 20;

fn level(level: Level) -> DiskLevel {
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

/// The volume that something is, if it is one.
fn volume_of(kind: StoredKind) -> Option<Kind> {
    match kind {
        StoredKind::Session => Some(Kind::Session),
        StoredKind::Snapshot => Some(Kind::Snapshot),
        StoredKind::Drive => Some(Kind::Drive),
        StoredKind::View => Some(Kind::View),
        StoredKind::Logs | StoredKind::Trust => None,
    }
}

/// Names in a folder that are ids of sessions.
fn sessions_in(folder: &Path) -> io::Result<Vec<String>> {
    let names = std::fs::read_dir(folder)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<_>>>()?;
    Ok(names.into_iter().filter(|name| SessionId::parse(name).is_ok()).collect())
}

#[async_trait]
impl Holdings for LinuxRuntime {
    async fn disk_level(&self, session: &SessionId) -> Result<Option<DiskLevel>, RuntimeError> {
        let (pool, name) = (self.pool.clone(), session.as_str().to_owned());
        let look = move || Ok(pool.level(Kind::Session, &name)?.map(level));
        blocking(format!("look at the disk of {session}"), look).await
    }

    async fn fit_disk(
        &self,
        session: &SessionId,
        bytes: u64,
    ) -> Result<Option<DiskFit>, RuntimeError> {
        let (pool, name) = (self.pool.clone(), session.as_str().to_owned());
        let fit = move || {
            let fit = pool.fit_limit(Kind::Session, &name, bytes)?;
            Ok(fit.map(|(written, at)| DiskFit { written, level: level(at) }))
        };
        blocking(format!("fit the disk limit of {session}"), fit).await
    }

    async fn tell_space(&self) -> Result<(), RuntimeError> {
        let (pool, run_dir) = (self.pool.clone(), self.run_dir.clone());
        blocking("tell of the storage's room", move || tell(&run_dir, &pool)).await
    }

    async fn stored(&self) -> Result<Vec<Stored>, RuntimeError> {
        // Processes, groups and sockets of a session are as much as its files.
        let sessions = self.list().await?;
        let (snapshots, drives) = (self.snapshots().await?, self.drives().await?);
        let pool = self.pool.clone();
        let rest = blocking("look at what is stored", move || {
            let logs = pool.logs("");
            Ok((pool.names(Kind::View)?, sessions_in(&logs)?, sessions_in(&pool.trust())?))
        });
        let (views, logs, trust) = rest.await?;
        let all = [
            (StoredKind::Session, sessions.iter().map(ToString::to_string).collect()),
            (StoredKind::Snapshot, snapshots),
            (StoredKind::Drive, drives),
            (StoredKind::View, views),
            (StoredKind::Logs, logs),
            (StoredKind::Trust, trust),
        ];
        let all = all.into_iter().flat_map(|(kind, names): (_, Vec<String>)| {
            names.into_iter().map(move |name| Stored { kind, name })
        });
        Ok(all.collect())
    }

    async fn stored_usage(&self, of: &Stored) -> Result<Option<StoredUsage>, RuntimeError> {
        let (pool, name, kind) = (self.pool.clone(), of.name.clone(), of.kind);
        let measure = move || {
            let measured = match volume_of(kind) {
                Some(kind) => pool.usage(kind, &name),
                None if kind == StoredKind::Logs => pool.folder_usage(&pool.logs(&name)),
                None => pool.folder_usage(&pool.trust().join(&name)),
            };
            match measured {
                Ok(u) => Ok(Some(StoredUsage { bytes: u.bytes, unique_bytes: u.unique_bytes })),
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(e) => Err(e),
            }
        };
        blocking(format!("measure {} {}", of.kind.as_str(), of.name), measure).await
    }

    async fn remove_stored(&self, of: &Stored) -> Result<(), RuntimeError> {
        match (of.kind, SessionId::parse(&of.name)) {
            (StoredKind::Session, Ok(id)) => self.remove(&id).await,
            (StoredKind::Logs, Ok(id)) => self.remove_logs(&id).await,
            (StoredKind::Trust, Ok(id)) => {
                let folder = self.pool.trust().join(id.as_str());
                blocking(format!("remove the certificates of {id}"), move || {
                    match std::fs::remove_dir_all(&folder) {
                        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
                        _ => Ok(()),
                    }
                })
                .await
            }
            (StoredKind::Snapshot, _) => self.remove_snapshot(&of.name).await,
            (StoredKind::Drive, _) => self.remove_drive(&of.name).await,
            (StoredKind::View, _) => self.remove_view(&of.name).await,
            // No name that `stored` answers.
            (StoredKind::Session | StoredKind::Logs | StoredKind::Trust, Err(_)) => Ok(()),
        }
    }
}
