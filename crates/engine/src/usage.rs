//! What sandboxes, snapshots and drives take on disk.
//!
//! Invariant: numbers come from a walk through the files at the time of the question, never from a record.
//! Called by clients that show them.

use bivouac_runtime::{Stored, StoredKind, StoredUsage};
use bivouac_types::access::Verb;
use bivouac_types::id::SnapshotId;
use bivouac_types::name::Namespace;
use bivouac_types::session::SessionStatus;

use crate::Engine;
use crate::api::Principal;
use crate::error::Error;

/// What is asked about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UsageOf {
    /// A sandbox by name: what it holds now, or would start from.
    Sandbox(String),
    /// A snapshot.
    Snapshot(SnapshotId),
    /// A drive by name or id.
    Drive(String),
}

/// What something takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskUsage {
    /// What was measured: a session, a snapshot or a drive; absent when there is nothing on disk.
    pub measured: Option<Stored>,
    /// Bytes of its files over the image, and those that nothing else shares.
    pub usage: StoredUsage,
    /// Most bytes that it may hold; a snapshot has no limit.
    pub limit: Option<u64>,
}

impl Engine {
    /// What a sandbox, snapshot or drive takes on disk, by a walk through it.
    ///
    /// # Errors
    /// 404; a tree that changes too fast to be read.
    pub async fn disk_usage(
        &self,
        who: &Principal,
        ns: &Namespace,
        of: UsageOf,
    ) -> Result<DiskUsage, Error> {
        who.may(Verb::Read, ns)?;
        if let UsageOf::Snapshot(id) = &of {
            self.inner.check_snapshot(who, &ns.team, id).await?;
        }
        let inner = &self.inner;
        let (stored, limit) = match of {
            UsageOf::Sandbox(name) => {
                let sandbox = inner.named(ns, &name).await?.sandbox;
                let session = inner.known_session(&sandbox.current_session_id).await?.session;
                let running = session.status == SessionStatus::Running;
                // What a change of its size says is the next session's.
                let resources = if running { session.resources } else { sandbox.resources };
                let limit = Some(inner.disk_of(&resources));
                if running {
                    let name = session.id.as_str().to_owned();
                    (Some(Stored { kind: StoredKind::Session, name }), limit)
                } else {
                    let name = sandbox.current_snapshot_id.map(|id| id.as_str().to_owned());
                    (name.map(|name| Stored { kind: StoredKind::Snapshot, name }), limit)
                }
            }
            UsageOf::Snapshot(id) => {
                let row = inner.usable_snapshot(&ns.team, &id).await?;
                let name = row.snapshot.id.as_str().to_owned();
                (Some(Stored { kind: StoredKind::Snapshot, name }), None)
            }
            UsageOf::Drive(name) => {
                let (view, usage) = self.drive_usage(who, ns, &name).await?;
                let name = view.drive.id.as_str().to_owned();
                return Ok(DiskUsage {
                    measured: Some(Stored { kind: StoredKind::Drive, name }),
                    usage: StoredUsage { bytes: usage.bytes, unique_bytes: usage.unique_bytes },
                    limit: u64::try_from(view.drive.max_bytes).ok(),
                });
            }
        };
        let Some(stored) = stored else {
            let usage = StoredUsage { bytes: 0, unique_bytes: Some(0) };
            return Ok(DiskUsage { measured: None, usage, limit });
        };
        match inner.runtime.stored_usage(&stored).await? {
            Some(usage) => Ok(DiskUsage { measured: Some(stored), usage, limit }),
            None => Err(Error::not_found(format!(
                "The data of {} {} is gone.",
                stored.kind.as_str(),
                stored.name
            ))),
        }
    }
}
