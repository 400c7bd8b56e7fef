//! Archives from strangers and for strangers: layers of images, snapshots on their way in and out.
//!
//! Owns: the reader of tar streams (`read`), the writer of trees ([`Unpacker`]), decompression with a
//! bound ([`decompressor`]); the way back, from trees (`walk`) to tar streams (`write`); the forms in which
//! snapshots travel (`snapshot`, `oci`). Invariant: an archive is hostile. No name in it leads anywhere but below the
//! root that the caller opened, no link in it is ever followed, nothing is written before it is counted
//! against [`Limits`], and what two programs could read in two ways is refused. Called by image import and
//! by the import of snapshots.
//!
//! What becomes of what an archive can hold:
//!
//! | in the archive | here |
//! | --- | --- |
//! | `..` in a name or in a hard link's target | refused |
//! | a leading `/`, `.` and empty parts | left out, as every tar does |
//! | a parent that is a link, file or device of the same layer | refused |
//! | the same of a lower layer | replaced by a folder, as an overlay of the layers would show it |
//! | the same name again | the later entry replaces the earlier one; two folders become one |
//! | a hard link to what is not there (yet), to a folder, through a link, out of the root | refused |
//! | a symlink | kept as text, wherever it leads |
//! | devices | left out and counted; of an upper, 0:0 is a whiteout |
//! | FIFOs, set-id bits, sparse files, `user.*` and `security.capability` | kept |
//! | all other extended attributes | left out and counted |
//! | ids above 65,535 | nobody's (65,534), without set-id bits and capabilities, and counted |
//! | sizes that contradict each other, records given twice, bytes behind the end | refused |

mod decompress;
pub(crate) mod oci;
mod pax;
pub(crate) mod read;
pub(crate) mod snapshot;
mod tree;
mod unpack;
pub(crate) mod walk;
pub(crate) mod write;

use std::io;
use std::os::fd::OwnedFd;

use async_trait::async_trait;
use bivouac_types::id::SessionId;

pub use decompress::decompressor;
pub use read::fuzz;
pub use snapshot::{FORMAT, Incoming, Manifest, ManifestImage};
pub use unpack::Unpacker;

use crate::{FileReader, RuntimeError, SnapshotStat};

/// In which form a snapshot leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A compressed tar of what it changed of its image: see `snapshot`.
    TarZst,
    /// A tar of an OCI layout: the image as a layer, the changes as another.
    Oci,
}

/// Snapshots on their way out and in. A part of [`crate::Runtime`].
#[async_trait]
pub trait Archives {
    /// Writes a snapshot into a pipe. Whoever closes the pipe ends it, and nothing is left.
    async fn export(
        &self,
        name: &str,
        manifest: &Manifest,
        format: Format,
    ) -> Result<FileReader, RuntimeError>;
    /// Begins to read an archive out of a pipe: answers what it says it is.
    async fn open_archive(&self, data: OwnedFd, limits: Limits) -> Result<Incoming, ArchiveError>;
    /// Unpacks the rest of it over an image and keeps it as snapshot `name`; on disk when it answers. Until
    /// then its data is a volume of the session `scratch`, which is gone afterwards; what a crash leaves is a
    /// session or a snapshot without a record, for the engine to remove.
    async fn import(
        &self,
        archive: Incoming,
        image: &str,
        scratch: &SessionId,
        name: &str,
    ) -> Result<SnapshotStat, ArchiveError>;
}

/// Bounds of one archive, or of all layers of an image together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the uncompressed stream, headers counted.
    pub bytes: u64,
    /// Entries, headers of extensions counted.
    pub entries: u64,
    /// Bytes of a name.
    pub path: usize,
    /// Folders in a name.
    pub depth: usize,
}

/// What marks of removed files become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whiteouts {
    /// Entries named `.wh.…` delete what lower layers made, as in OCI images.
    Apply,
    /// An upper as a snapshot's export writes it: devices 0:0 and folders with the record of an opaque
    /// one become what overlayfs knows. Names beginning with `.wh.` are names like others.
    Overlay,
}

/// What a layer held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerStat {
    /// Entries that were written or obeyed.
    pub entries: u64,
    /// Bytes of file content.
    pub bytes: u64,
    /// Marks of removed files.
    pub whiteouts: u64,
    /// Devices that were left out.
    pub devices: u64,
    /// Extended attributes that were left out.
    pub xattrs: u64,
    /// Entries whose owner is above what a sandbox has.
    pub ids: u64,
}

/// Why an archive was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// It cannot be read to its end: it is cut off, or no archive at all.
    #[error("the archive cannot be read: {0}")]
    Read(#[source] io::Error),
    /// Something in it is hostile, contradicts itself, or cannot be kept.
    #[error("the archive is refused: {0}")]
    Refused(String),
    /// It is larger than allowed.
    #[error("the archive is larger than allowed: {0}")]
    TooLarge(String),
    /// A system call failed on our side.
    #[error("{what}: {source}")]
    Host {
        /// What was being done, to which entry.
        what: String,
        /// The cause.
        source: io::Error,
    },
}

impl ArchiveError {
    /// The error as one of the standard library, for callers that have no words of their own.
    #[must_use]
    pub fn into_io(self) -> io::Error {
        let kind = match &self {
            Self::Read(e) => e.kind(),
            Self::Refused(_) | Self::TooLarge(_) => io::ErrorKind::InvalidData,
            Self::Host { source, .. } => source.kind(),
        };
        io::Error::new(kind, self)
    }
}

/// A name as people can read it: no control characters, not longer than a line.
pub(crate) fn shown(name: &[u8]) -> String {
    const LONGEST: usize = 160;
    let text = String::from_utf8_lossy(name);
    let mut out: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if text.chars().nth(LONGEST).is_some() {
        out.push('…');
    }
    if out.is_empty() { "/".to_owned() } else { out }
}

pub(crate) fn refused(name: &[u8], why: impl std::fmt::Display) -> ArchiveError {
    ArchiveError::Refused(format!("'{}' {why}", shown(name)))
}

#[cfg(test)]
mod tests;
