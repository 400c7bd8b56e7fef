//! The files of a drive, without a sandbox: list a folder, read a file, write one.
//!
//! Invariant: nobody writes here while a sandbox has the drive mounted for writing; looking is always allowed,
//! and sees what is on the drive at that moment. Paths are the runtime's to resolve: no link is followed.

use std::sync::Arc;

use bivouac_runtime::{
    Completion, DriveEntry, FileError, FileErrorKind, FileReader, FileWriter, RuntimeError,
};
use bivouac_types::access::Verb;
use bivouac_types::name::Namespace;

use crate::Engine;
use crate::api::Principal;
use crate::error::Error;

/// Most entries of a folder that are listed.
const MAX_ENTRIES: usize = 10_000;

impl Engine {
    /// Lists a folder of a drive: at most 10,000 entries, and whether there are more.
    ///
    /// # Errors
    /// 404 for the drive or the path, 400 for something else than a folder and for a link on the way.
    pub async fn list_drive_files(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        path: &str,
    ) -> Result<(Vec<DriveEntry>, bool), Error> {
        who.may(Verb::Read, ns)?;
        let id = self.inner.drive_named(ns, name).await?.drive.id;
        Ok(self.inner.runtime.list_drive(id.as_str(), path, MAX_ENTRIES).await?)
    }

    /// Opens a regular file of a drive.
    ///
    /// # Errors
    /// As [`Engine::list_drive_files`].
    pub async fn read_drive_file(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        path: &str,
    ) -> Result<FileReader, Error> {
        who.may(Verb::Read, ns)?;
        let id = self.inner.drive_named(ns, name).await?.drive.id;
        Ok(self.inner.runtime.read_drive(id.as_str(), path).await?)
    }

    /// Opens the way in for a file of `size` bytes. It is on disk when the completion answers.
    ///
    /// # Errors
    /// 404 for the drive, 409 while a sandbox has it mounted for writing. What is wrong with the path or the
    /// content comes from [`FileWriter`]'s completion.
    pub async fn write_drive_file(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        (path, size, mode): (&str, u64, u32),
    ) -> Result<FileWriter, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        let drive = self.inner.drive_named(ns, name).await?.drive;
        if drive.writer.is_some() {
            return Err(self.inner.held(&drive).await?);
        }
        tracing::info!(by = %who.name, drive = %name, "write a file of a drive");
        let FileWriter { data, done } =
            self.inner.runtime.write_drive(drive.id.as_str(), path, size, mode).await?;
        let inner = Arc::clone(&self.inner);
        let done = Completion::new(async move {
            done.wait().await?;
            let failed = |error| RuntimeError::Io {
                what: "note that a drive was written".to_owned(),
                source: std::io::Error::other(error),
            };
            // A sandbox that has had it meanwhile may have let go of it again: what was written here is then in
            // a copy that is gone.
            let now = inner.db.drive(&drive.id).await.map_err(failed)?;
            if now.is_none_or(|now| now.drive.fence != drive.fence) {
                let message = format!(
                    "drive '{}' was taken by a sandbox while a file was written: write it again when it is free",
                    drive.name
                );
                return Err(FileError { kind: FileErrorKind::Busy, message }.into());
            }
            inner.db.note_filled(&drive.id, inner.now()).await.map_err(failed)
        });
        Ok(FileWriter { data, done })
    }
}
