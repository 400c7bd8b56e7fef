//! Archives without a kernel: the form is the real one, a snapshot is its names.

use std::io;
use std::os::fd::OwnedFd;

use async_trait::async_trait;
use bivouac_types::id::SessionId;
use rustix::pipe::PipeFlags;

use super::Sim;
use crate::archive::snapshot::Outgoing;
use crate::archive::{ArchiveError, Archives, Format, Incoming, Limits, Manifest};
use crate::{Completion, FileReader, RuntimeError, SnapshotStat};

#[async_trait]
impl Archives for Sim {
    async fn export(
        &self,
        name: &str,
        manifest: &Manifest,
        format: Format,
    ) -> Result<FileReader, RuntimeError> {
        let io = |source: io::Error| RuntimeError::Io { what: format!("export {name}"), source };
        let names = self.world().snapshots.get(name).cloned();
        let names = names.ok_or_else(|| RuntimeError::NoSnapshot(name.to_owned()))?;
        if format == Format::Oci {
            return Err(io(io::Error::other("a simulated image has no tree")));
        }
        let (data, out) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|e| io(e.into()))?;
        let manifest = manifest.clone();
        let work = tokio::task::spawn_blocking(move || {
            let mut archive = Outgoing::begin(std::fs::File::from(out), &manifest)?;
            names.iter().try_for_each(|name| archive.name(name))?;
            archive.end()
        });
        let done = Completion::new(async move {
            let what = "export a simulated snapshot".to_owned();
            let done = work.await.unwrap_or_else(|e| Err(io::Error::other(e)));
            done.map_err(|source| RuntimeError::Io { what, source })
        });
        Ok(FileReader { size: 0, data, done })
    }

    async fn open_archive(&self, data: OwnedFd, limits: Limits) -> Result<Incoming, ArchiveError> {
        let open = move || Incoming::open(std::fs::File::from(data), limits, || Ok(()));
        let opened = tokio::task::spawn_blocking(open).await;
        opened.unwrap_or_else(|e| Err(ArchiveError::Read(io::Error::other(e))))
    }

    async fn import(
        &self,
        archive: Incoming,
        _image: &str,
        scratch: &SessionId,
        name: &str,
    ) -> Result<SnapshotStat, ArchiveError> {
        self.plant_session(scratch);
        let read = tokio::task::spawn_blocking(move || archive.names()).await;
        let names = read.unwrap_or_else(|e| Err(ArchiveError::Read(io::Error::other(e))));
        self.world().sessions.remove(scratch);
        let names = names?;
        let bytes = names.len() as u64;
        self.world().snapshots.insert(name.to_owned(), names.into_iter().collect());
        Ok(SnapshotStat { bytes })
    }
}
