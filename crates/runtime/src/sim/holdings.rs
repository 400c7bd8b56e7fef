//! Storage without a kernel: a file takes a byte, and stays charged when it is removed, as one does that a
//! snapshot keeps.

use std::collections::BTreeSet;

use async_trait::async_trait;
use bivouac_types::id::SessionId;

use super::Sim;
use crate::{
    DiskFit, DiskLevel, Drives, Holdings, Runtime, RuntimeError, Stored, StoredKind, StoredUsage,
};

#[async_trait]
impl Holdings for Sim {
    async fn disk_level(&self, session: &SessionId) -> Result<Option<DiskLevel>, RuntimeError> {
        let world = self.world();
        let found = world.sessions.get(session);
        found.map(|s| Some(s.disk)).ok_or_else(|| RuntimeError::Gone(session.clone()))
    }

    async fn fit_disk(
        &self,
        session: &SessionId,
        bytes: u64,
    ) -> Result<Option<DiskFit>, RuntimeError> {
        let mut world = self.world();
        let found = world.sessions.get_mut(session);
        let found = found.ok_or_else(|| RuntimeError::Gone(session.clone()))?;
        let written = found.files.len() as u64;
        found.disk.limit = found.disk.charged + bytes.saturating_sub(written);
        found.fits += 1;
        Ok(Some(DiskFit { written, level: found.disk }))
    }

    async fn tell_space(&self) -> Result<(), RuntimeError> {
        Ok(())
    }

    async fn stored(&self) -> Result<Vec<Stored>, RuntimeError> {
        let drives = self.drives().await?;
        let world = self.world();
        let logs: BTreeSet<String> =
            world.logs.keys().map(|(session, _)| session.to_string()).collect();
        let sessions = world.sessions.keys().map(ToString::to_string);
        let all = [
            (StoredKind::Session, sessions.collect::<Vec<_>>()),
            (StoredKind::Snapshot, world.snapshots.keys().cloned().collect()),
            (StoredKind::Drive, drives),
            (StoredKind::View, world.drives.view_names()),
            (StoredKind::Logs, logs.into_iter().collect()),
        ];
        let all = all
            .into_iter()
            .flat_map(|(kind, names)| names.into_iter().map(move |name| Stored { kind, name }));
        Ok(all.collect())
    }

    async fn stored_usage(&self, of: &Stored) -> Result<Option<StoredUsage>, RuntimeError> {
        if of.kind == StoredKind::Drive {
            let there = self.drives().await?.contains(&of.name);
            let usage = if there { Some(self.drive_usage(&of.name).await?) } else { None };
            return Ok(usage.map(|u| StoredUsage { bytes: u.bytes, unique_bytes: u.unique_bytes }));
        }
        let world = self.world();
        let held = match of.kind {
            StoredKind::Session => SessionId::parse(&of.name)
                .ok()
                .and_then(|id| world.sessions.get(&id))
                .map(|session| session.files.len()),
            StoredKind::Snapshot => world.snapshots.get(&of.name).map(BTreeSet::len),
            _ => None,
        };
        // Nothing is shared here: a copy is a copy.
        Ok(held.map(|n| StoredUsage { bytes: n as u64, unique_bytes: Some(n as u64) }))
    }

    async fn remove_stored(&self, of: &Stored) -> Result<(), RuntimeError> {
        match (of.kind, SessionId::parse(&of.name)) {
            (StoredKind::Session, Ok(id)) => self.remove(&id).await,
            (StoredKind::Logs, Ok(id)) => self.remove_logs(&id).await,
            (StoredKind::Snapshot, _) => self.remove_snapshot(&of.name).await,
            (StoredKind::Drive, _) => self.remove_drive(&of.name).await,
            (StoredKind::View, _) => self.remove_view(&of.name).await,
            _ => Ok(()),
        }
    }
}
