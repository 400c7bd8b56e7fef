//! Snapshots that leave this engine and come from others.
//!
//! Invariants: an archive holds what its sandbox changed of its image and words about it, and nothing else of
//! this engine: no policy, no secret, no variable. A record of an imported snapshot is written when its data is
//! whole and on disk, and the image under it is the one that it was taken of, or the one that the caller insists
//! on. What an import leaves that is interrupted is a session or a snapshot without a record, held while it is
//! made: `gc` takes the rest. Called by HTTP.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bivouac_runtime::archive::{
    ArchiveError, FORMAT, Format, Incoming, Limits, Manifest, ManifestImage,
};
use bivouac_runtime::{Completion, FileReader, Image, RuntimeError, SnapshotStat};
use bivouac_store::{Durability, SnapshotRow};
use bivouac_types::access::Verb;
use bivouac_types::id::{SessionId, SnapshotId};
use bivouac_types::name::{Namespace, check_sandbox_name};
use bivouac_types::snapshot::{Purpose, Snapshot, SnapshotStatus, check_labels};
use tokio::sync::OwnedSemaphorePermit;

use crate::Engine;
use crate::api::Principal;
use crate::error::{Error, ErrorKind};
use crate::fault::FaultPoint;
use crate::inner::Inner;
use crate::resolve::{CWD, REGION};
use crate::snapshots::check_expiration;

/// Most entries of an archive. Each file counts twice: nearly each has a header of extensions.
const MAX_ENTRIES: u64 = 8_000_000;
/// Longest name and deepest folder of an entry: those of an export, and a layer's folder in front.
const MAX_PATH: usize = (16 << 10) + 8;
const MAX_DEPTH: usize = 1001;
/// Most exports and imports at once: each has a compressor, two threads and a pipe of its own.
pub(crate) const MOST_ARCHIVES: usize = 8;
/// Longest word of a manifest that becomes part of a record.
const MAX_WORD: usize = 200;
/// Name of the sandbox of a snapshot whose archive tells none that a sandbox could have.
const NAMELESS: &str = "imported";

/// How a snapshot is to be taken in.
#[derive(Debug, Clone, Default)]
pub struct ImportSpec {
    /// Name of its sandbox, for lists. Absent: what the archive says.
    pub name: Option<String>,
    /// Labels, over those that the archive has.
    pub labels: BTreeMap<String, String>,
    /// The image to put it on, whatever it was taken of.
    pub onto: Option<String>,
    /// How long it is kept after its last use, ms; absent is for ever.
    pub expiration_ms: Option<i64>,
}

/// What becomes of an archive that cannot be taken.
fn refusal(error: ArchiveError) -> Error {
    let sentence = |error: &ArchiveError| {
        let text = error.to_string();
        let mut letters = text.chars();
        let first: String = letters.next().into_iter().flat_map(char::to_uppercase).collect();
        format!("{first}{}.", letters.as_str())
    };
    match error {
        ArchiveError::Refused(_) => {
            Error::new(ErrorKind::Invalid, "archive_refused", sentence(&error))
        }
        ArchiveError::TooLarge(_) => {
            Error::new(ErrorKind::Invalid, "archive_too_large", sentence(&error))
        }
        ArchiveError::Read(ref cause) if cause.kind() == std::io::ErrorKind::StorageFull => {
            Error::new(ErrorKind::TooMany, "no_capacity", cause.to_string()).because(error)
        }
        ArchiveError::Read(_) => {
            Error::new(ErrorKind::Invalid, "archive_unreadable", sentence(&error))
        }
        ArchiveError::Host { ref source, .. } => match source.kind() {
            std::io::ErrorKind::QuotaExceeded => {
                let message = "The archive holds more than a sandbox may write over its image.";
                Error::new(ErrorKind::Invalid, "archive_too_large", message).because(error)
            }
            std::io::ErrorKind::StorageFull => {
                let message = "The storage is full; remove sandboxes or snapshots, or make room.";
                Error::new(ErrorKind::TooMany, "no_capacity", message).because(error)
            }
            _ => Error::internal("The archive could not be written to disk; see the engine's log.")
                .because(error),
        },
    }
}

/// A word of a stranger that is short and plain, or nothing.
fn word(text: &str) -> &str {
    let plain = text.len() <= MAX_WORD && text.chars().all(|c| c.is_ascii_graphic());
    if plain { text } else { "" }
}

impl Inner {
    /// A place for an export or an import, kept as long as it goes on.
    fn archive_place(&self) -> Result<OwnedSemaphorePermit, Error> {
        Arc::clone(&self.archives).try_acquire_owned().map_err(|_| {
            let message = format!(
                "{MOST_ARCHIVES} snapshots are being exported or imported, which is as many as may be at once; \
                 try again when one of them is done."
            );
            Error::new(ErrorKind::TooMany, "busy", message)
        })
    }

    /// What an archive of a snapshot says in front.
    async fn manifest(&self, row: &SnapshotRow) -> Result<Manifest, Error> {
        let s = &row.snapshot;
        let image = self.runtime.image(&s.image).await?;
        let session = self.db.session(&s.source_session_id).await?;
        Ok(Manifest {
            bivouac_snapshot: FORMAT,
            image: ManifestImage {
                name: image.name,
                reference: image.reference,
                digest: image.digest,
            },
            runtime: s.runtime.clone(),
            cwd: session.map_or_else(|| CWD.to_owned(), |row| row.session.cwd),
            name: s.sandbox_name.clone(),
            labels: s.labels.clone(),
            created_at: s.created_at,
        })
    }

    /// The image that an archive is put on.
    async fn image_of(&self, manifest: &Manifest, onto: Option<&str>) -> Result<Image, Error> {
        let wanted = &manifest.image;
        if let Some(onto) = onto {
            return Ok(self.runtime.image(onto).await?);
        }
        let (name, digest) = (word(&wanted.name), word(&wanted.digest));
        let found = match self.runtime.image(&wanted.reference).await {
            Ok(found) => Some(found),
            Err(RuntimeError::NoImage(_)) => None,
            Err(error) => return Err(error.into()),
        };
        if let Some(found) = found.as_ref().filter(|found| found.digest == wanted.digest) {
            return Ok(found.clone());
        }
        // The same one may be here under another name.
        let all = self.runtime.images().await?;
        if let Some(same) = all.into_iter().find(|image| image.digest == wanted.digest) {
            return Ok(same);
        }
        let insist = "or insist on one that is here with --onto IMAGE (files that the snapshot did not change \
                      are then that image's)";
        Err(match found {
            Some(found) => {
                let message = format!(
                    "The snapshot lies on another version of the image '{name}': on {digest}, and here is {}. \
                     Bring that version here, {insist}.",
                    found.digest
                );
                Error::new(ErrorKind::Conflict, "image_mismatch", message)
            }
            None => {
                let message = format!(
                    "The snapshot lies on the image '{name}' ({digest}), which is not on this machine: build, pull \
                     or import it first (bivouac image), {insist}."
                );
                Error::new(ErrorKind::NotFound, "image_not_found", message)
            }
        })
    }

    async fn take_in(
        self: &Arc<Self>,
        ns: &Namespace,
        spec: ImportSpec,
        data: OwnedFd,
    ) -> Result<Snapshot, Error> {
        self.admit().await?;
        let limits = Limits {
            bytes: self.config.disk_bytes,
            entries: MAX_ENTRIES,
            path: MAX_PATH,
            depth: MAX_DEPTH,
        };
        let archive = self.runtime.open_archive(data, limits).await.map_err(refusal)?;
        let image = self.image_of(&archive.manifest, spec.onto.as_deref()).await?;
        let mut row = self.imported_row(ns, &spec, &archive.manifest, &image)?;
        let scratch = row.snapshot.source_session_id.clone();
        let id = row.snapshot.id.clone();
        // Held before anything of them exists: see `gc`.
        let _held = (self.holds.hold(scratch.as_str()), self.holds.hold(id.as_str()));
        let kept = self.keep_import(archive, &image, &scratch, &id).await;
        match kept {
            Ok(stat) => row.snapshot.size_bytes = i64::try_from(stat.bytes).unwrap_or(i64::MAX),
            Err(error) => {
                self.drop_import(&scratch, &id).await;
                return Err(error);
            }
        }
        if let Err(error) = self.record_import(&row).await {
            // Whether the row is there decides whether the data is wanted.
            self.leftovers.store(true, Ordering::Release);
            return Err(error);
        }
        self.expiry_changed.notify_one();
        self.reach(FaultPoint::ImportRecorded).await?;
        Ok(row.snapshot)
    }

    async fn keep_import(
        &self,
        archive: Incoming,
        image: &Image,
        scratch: &SessionId,
        id: &SnapshotId,
    ) -> Result<SnapshotStat, Error> {
        let imported = self.runtime.import(archive, &image.reference, scratch, id.as_str()).await;
        let stat = imported.map_err(refusal)?;
        self.reach(FaultPoint::ImportUnpacked).await?;
        Ok(stat)
    }

    async fn record_import(&self, row: &SnapshotRow) -> Result<(), Error> {
        let mut tx = self.db.begin(Durability::Power).await?;
        tx.insert_snapshot(row).await?;
        Ok(tx.commit().await?)
    }

    /// Removes what an import has made that came to nothing.
    async fn drop_import(&self, scratch: &SessionId, id: &SnapshotId) {
        let removed = async {
            self.runtime.remove(scratch).await?;
            self.runtime.remove_snapshot(id.as_str()).await
        };
        if let Err(error) = removed.await {
            tracing::error!(snapshot = %id, %error, "what an import left cannot be removed yet");
            self.leftovers.store(true, Ordering::Release);
        }
    }

    /// The record of an imported snapshot. Its sandbox and session are nobody's: those of the engine that it
    /// came from mean nothing here, and one that is alive here must not own it.
    fn imported_row(
        &self,
        ns: &Namespace,
        spec: &ImportSpec,
        manifest: &Manifest,
        image: &Image,
    ) -> Result<SnapshotRow, Error> {
        let now = self.now();
        let told = Some(manifest.name.as_str()).filter(|name| check_sandbox_name(name).is_ok());
        let name = spec.name.as_deref().or(told).unwrap_or(NAMELESS);
        let mut labels = manifest.labels.clone();
        labels.extend(spec.labels.clone());
        check_labels(&labels)?;
        let runtime = match word(&manifest.runtime) {
            "" => "node24",
            known => known,
        };
        let snapshot = Snapshot {
            id: self.ids.snapshot(now)?,
            source_session_id: self.ids.session(now)?,
            sandbox_name: name.to_owned(),
            status: SnapshotStatus::Created,
            image: image.reference.clone(),
            runtime: runtime.to_owned(),
            region: REGION.to_owned(),
            size_bytes: 0,
            measured: true,
            automatic: false,
            parent_id: None,
            expiration_ms: 0,
            expires_at: None,
            created_at: now,
            updated_at: now,
            last_used_at: None,
            labels,
            purpose: Purpose::Kept,
            stall_us: 0,
        };
        Ok(SnapshotRow {
            snapshot: snapshot.kept_for(spec.expiration_ms.unwrap_or(0)),
            namespace: ns.clone(),
            node: self.config.node.clone(),
            sandbox_id: self.ids.sandbox(now)?,
        })
    }
}

impl Engine {
    /// Reads a snapshot as an archive. Equal snapshots make equal archives.
    ///
    /// # Errors
    /// 404 when its image is not here, 410 when it is deleted or unknown, 429 while too many go on.
    pub async fn export_snapshot(
        &self,
        who: &Principal,
        team: &str,
        id: &SnapshotId,
        format: Format,
    ) -> Result<FileReader, Error> {
        self.inner.check_snapshot(who, team, id).await?;
        self.inner.check_open()?;
        let row = self.inner.usable_snapshot(team, id).await?;
        let manifest = self.inner.manifest(&row).await?;
        let place = self.inner.archive_place()?;
        tracing::info!(by = %who.name, snapshot = %id, ?format, "export snapshot");
        let exported = self.inner.runtime.export(id.as_str(), &manifest, format).await?;
        // Kept until whoever reads it is done, or gone.
        let done = Completion::new(async move {
            let _place = place;
            exported.done.wait().await
        });
        Ok(FileReader { done, ..exported })
    }

    /// Takes in the archive of a snapshot out of a pipe; answers when it is whole and on disk. It is read as
    /// fast as it is written, and closed when it is refused.
    ///
    /// # Errors
    /// 400 for an archive that is cut off, changed, hostile or too large, 404 and 409 when the image that it
    /// needs is not here, 429 when there is no room, and while too many go on. Nothing is left of it then.
    pub async fn import_snapshot(
        &self,
        who: &Principal,
        ns: &Namespace,
        spec: ImportSpec,
        data: OwnedFd,
    ) -> Result<Snapshot, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        if let Some(name) = &spec.name {
            check_sandbox_name(name)?;
        }
        check_labels(&spec.labels)?;
        spec.expiration_ms.map(|ms| check_expiration("expiration", ms)).transpose()?;
        let place = self.inner.archive_place()?;
        tracing::info!(by = %who.name, "import snapshot");
        let inner = Arc::clone(&self.inner);
        let ns = ns.clone();
        let work = async move {
            let _place = place;
            inner.take_in(&ns, spec, data).await
        };
        self.inner.run(work).await
    }
}
