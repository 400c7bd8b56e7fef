//! Drives as a host has them: volumes beside the sandboxes, mounted into them.
//!
//! Owns: what the engine asks a [`Runtime`](crate::Runtime) about drives. Invariant: a drive's data is in one
//! volume whose name is the drive's; whoever had it mounted before [`Drives::fence_drive`] answered can write
//! to it no more, whatever it still holds open. Called by the engine; implemented by `linux` and `sim`.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::{FileReader, FileWriter, RuntimeError};

/// A drive that a session has, or is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveMount {
    /// Absolute path inside, without links, `.` and `..`.
    pub at: String,
    /// The drive's name here: its id.
    pub drive: String,
    /// Name of the private copy that is mounted instead of it: the session's id, a dot, a number.
    pub view: Option<String>,
    /// Most bytes that it may hold.
    pub max_bytes: u64,
}

/// What a drive holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriveUsage {
    /// Bytes of its files, by a walk of the tree.
    pub bytes: u64,
    /// Bytes that nothing else shares: what its removal would free. `None`: this storage cannot tell.
    pub unique_bytes: Option<u64>,
}

/// What an entry of a folder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link. It is shown and never followed.
    Link,
    /// A pipe, socket or device.
    Other,
}

/// An entry of a folder of a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveEntry {
    /// Its name; bytes that are no UTF-8 are replaced.
    pub name: String,
    /// What it is.
    pub kind: EntryKind,
    /// Bytes of a file.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// User and group, as they are inside.
    pub owner: (u32, u32),
    /// Last change, ms.
    pub modified_at: i64,
    /// Where a link leads.
    pub target: Option<String>,
}

/// The part of a [`Runtime`](crate::Runtime) that keeps drives.
#[async_trait]
pub trait Drives: Send + Sync {
    /// Makes the data of a drive: empty, or a copy of another one at this moment. What an earlier attempt
    /// left is removed first. On disk when it answers.
    async fn make_drive(
        &self,
        drive: &str,
        from: Option<&str>,
        max_bytes: u64,
    ) -> Result<(), RuntimeError>;
    /// Deletes a drive's data. Idempotent.
    async fn remove_drive(&self, drive: &str) -> Result<(), RuntimeError>;
    /// Every drive that has data here.
    async fn drives(&self) -> Result<Vec<String>, RuntimeError>;
    /// What a drive holds.
    async fn drive_usage(&self, drive: &str) -> Result<DriveUsage, RuntimeError>;
    /// Puts a copy of a drive in its place, and removes the old one: what still has the old one mounted or a
    /// file of it open writes into nothing from then on. All that was written before is in it, and on disk.
    async fn fence_drive(&self, drive: &str, max_bytes: u64) -> Result<(), RuntimeError>;
    /// Deletes a session's private copy of a drive. Idempotent.
    async fn remove_view(&self, view: &str) -> Result<(), RuntimeError>;
    /// Lists a folder of a drive. `path` is relative to the drive's root, or absolute there; links are not
    /// followed. At most `most` entries, sorted by name; whether there are more.
    async fn list_drive(
        &self,
        drive: &str,
        path: &str,
        most: usize,
    ) -> Result<(Vec<DriveEntry>, bool), RuntimeError>;
    /// Opens a regular file of a drive; links are not followed.
    async fn read_drive(&self, drive: &str, path: &str) -> Result<FileReader, RuntimeError>;
    /// Opens the way in for a file of `size` bytes, which belongs to the default user. Folders on the way
    /// are made. It is in place, and on disk, when the writer's completion answers; shorter or longer
    /// content leaves what was there before.
    async fn write_drive(
        &self,
        drive: &str,
        path: &str,
        size: u64,
        mode: u32,
    ) -> Result<FileWriter, RuntimeError>;
}
