//! Files in a running sandbox: read, write, make a folder.
//!
//! Invariant: the bytes go through a pipe between the caller and the sandbox; nothing is held here.
//! Paths are made absolute here and resolved inside of the sandbox only.

use bivouac_runtime::{FileReader, FileWriter};
use bivouac_types::access::Verb;
use bivouac_types::id::SessionId;

use crate::api::Principal;
use crate::error::Error;
use crate::{Engine, paths};

impl Engine {
    /// Opens a regular file. A relative `path` is below `cwd`, a relative `cwd` below the session's.
    ///
    /// # Errors
    /// 404 when it is missing, 400 for a folder, 410 or 422 when the session does not run.
    pub async fn read_file(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        path: &str,
        cwd: Option<&str>,
    ) -> Result<FileReader, Error> {
        self.inner.check_session(who, &[Verb::Read, Verb::Exec], team, id).await?;
        let (live, row) = self.inner.working(team, id).await?;
        let base = paths::absolute(&row.session.cwd, cwd.unwrap_or(""))?;
        let path = paths::file(&base, path)?;
        match self.inner.through(&live, live.handle.read_file(&path)).await {
            Ok(reader) => Ok(reader),
            Err(error) => Err(self.inner.refine(id, error).await),
        }
    }

    /// Opens the way in for a gzip tar that is unpacked below `cwd` (absent: the session's).
    ///
    /// # Errors
    /// 410 or 422 when the session does not run. What is wrong with the archive comes from
    /// [`FileWriter`]'s completion.
    pub async fn write_files(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        cwd: Option<&str>,
    ) -> Result<FileWriter, Error> {
        self.inner.check_session(who, &[Verb::Exec], team, id).await?;
        let (live, row) = self.inner.working(team, id).await?;
        let base = paths::absolute(&row.session.cwd, cwd.unwrap_or(""))?;
        match self.inner.through(&live, live.handle.write_files(&base)).await {
            Ok(writer) => Ok(writer),
            Err(error) => Err(self.inner.refine(id, error).await),
        }
    }

    /// Makes a folder.
    ///
    /// # Errors
    /// 400 when it exists or its parent is missing (unless `recursive`), 410 or 422 when the
    /// session does not run.
    pub async fn mkdir(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        path: &str,
        cwd: Option<&str>,
        recursive: bool,
    ) -> Result<(), Error> {
        self.inner.check_session(who, &[Verb::Exec], team, id).await?;
        let (live, row) = self.inner.working(team, id).await?;
        let base = paths::absolute(&row.session.cwd, cwd.unwrap_or(""))?;
        let path = paths::file(&base, path)?;
        match self.inner.through(&live, live.handle.mkdir(&path, recursive)).await {
            Ok(()) => Ok(()),
            Err(error) => {
                let mut error = self.inner.refine(id, error).await;
                // A missing parent is a wrong request here, not a missing resource.
                if error.kind == crate::ErrorKind::NotFound && error.code == "not_found" {
                    error = Error::invalid(error.message);
                }
                Err(error)
            }
        }
    }
}
