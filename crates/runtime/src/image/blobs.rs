//! Pieces of images as registries have them, kept by digest in the folder of images.
//!
//! ```text
//! blobs/sha256-<hex>        a whole piece; its time is that of its last use
//! blobs/sha256-<hex>.part   one that is being fetched, locked by whoever fetches it
//! ```
//!
//! Invariant: a piece gets its name when all of its bytes have been counted and hashed, so what has a name
//! is what the digest says. A part that a crash leaves is gone on with by the next fetch, or removed when it
//! is old. What is here can be had again: it may be removed at any time, but for parts in somebody's hands.
//! Called by the engine's registry client, by the import and by `bivouac image prune`.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{self, Context, SHA256};
use bivouac_types::oci::is_digest;
use rustix::fs::{FlockOperation, flock};

/// How many bytes of pieces are kept when no fetch needs them.
pub const KEPT_BYTES: u64 = 8 << 30;
/// A part that nobody has written to for so long is removed.
const PART_AGE: Duration = Duration::from_secs(24 * 3600);
/// A piece that was used so recently is kept: an image may be in the making out of it.
const IN_USE: Duration = Duration::from_secs(3600);

/// See the module.
#[derive(Debug, Clone)]
pub struct Blobs {
    folder: PathBuf,
}

/// What a look over the folder did, or would do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pruned {
    /// Pieces and parts that went.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of those that stay.
    pub kept_bytes: u64,
}

/// The hash of a whole text, as registries write it.
#[must_use]
pub fn sha256(bytes: &[u8]) -> String {
    written(digest::digest(&SHA256, bytes).as_ref())
}

pub(crate) fn written(hash: &[u8]) -> String {
    use std::fmt::Write as _;
    let mut text = String::from("sha256:");
    for byte in hash {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn at(path: &Path, e: impl Into<io::Error>) -> io::Error {
    let e = e.into();
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl Blobs {
    /// Those in a folder of images.
    pub(crate) fn of(images: &Path) -> Self {
        Self { folder: images.join("blobs") }
    }

    fn ensure(&self) -> io::Result<()> {
        match std::fs::DirBuilder::new().mode(0o700).create(&self.folder) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(at(&self.folder, e)),
            _ => Ok(()),
        }
    }

    /// Where a piece is, or would be.
    ///
    /// # Errors
    /// It is no digest.
    pub fn path(&self, digest: &str) -> io::Result<PathBuf> {
        if !is_digest(digest) {
            return Err(invalid("not a sha256 digest".to_owned()));
        }
        Ok(self.folder.join(digest.replace(':', "-")))
    }

    fn part(&self, digest: &str) -> io::Result<PathBuf> {
        Ok(self.path(digest)?.with_extension("part"))
    }

    /// A piece that is here, marked as used now.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn get(&self, digest: &str, size: u64) -> io::Result<Option<PathBuf>> {
        let path = self.path(digest)?;
        let meta = match std::fs::symlink_metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(|e| at(&path, e))?,
        };
        if !meta.is_file() || meta.len() != size {
            // Cut short by a crash of the host, or by somebody's hand: it is fetched again.
            std::fs::remove_file(&path).map_err(|e| at(&path, e))?;
            return Ok(None);
        }
        let file = File::options().write(true).open(&path).map_err(|e| at(&path, e))?;
        file.set_modified(SystemTime::now()).map_err(|e| at(&path, e))?;
        Ok(Some(path))
    }

    /// Takes a piece into one's hands, with what an earlier fetch left of it. `None`: somebody else has it
    /// in hand; look again in a moment.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn begin(&self, digest: &str, size: u64) -> io::Result<Option<Partial>> {
        self.ensure()?;
        let (path, target) = (self.part(digest)?, self.path(digest)?);
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path).map_err(|e| at(&path, e))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            other => other.map_err(|e| at(&path, e))?,
        }
        // Whoever had it may have given it its name, or removed it, since it was opened.
        let ours = file.metadata()?;
        match std::fs::symlink_metadata(&path) {
            Ok(now) if (now.dev(), now.ino()) == (ours.dev(), ours.ino()) => {}
            _ => return Ok(None),
        }
        let mut partial = Partial {
            file,
            path,
            target,
            digest: digest.to_owned(),
            size,
            have: 0,
            hash: Context::new(&SHA256),
        };
        partial.look()?;
        Ok(Some(partial))
    }

    /// Removes what is over `keep` bytes, the least recently used first, and old parts. With `dry`, only
    /// says what it would do.
    ///
    /// # Errors
    /// The folder cannot be read, or a file not be removed.
    pub fn prune(&self, keep: u64, dry: bool) -> io::Result<Pruned> {
        let entries = match std::fs::read_dir(&self.folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Pruned::default()),
            other => other.map_err(|e| at(&self.folder, e))?,
        };
        let now = SystemTime::now();
        let mut whole = Vec::new();
        let mut done = Pruned::default();
        for entry in entries {
            let path = entry?.path();
            let Ok(meta) = std::fs::symlink_metadata(&path) else { continue };
            let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if path.extension().is_none() {
                whole.push((used, meta.len(), path));
            } else if keep == 0 || now.duration_since(used).is_ok_and(|age| age > PART_AGE) {
                if is_free(&path) {
                    done.take(&path, meta.len(), dry)?;
                } else {
                    done.kept_bytes += meta.len();
                }
            } else {
                done.kept_bytes += meta.len();
            }
        }
        whole.sort_by_key(|(used, ..)| std::cmp::Reverse(*used));
        for (used, length, path) in whole {
            let resting = now.duration_since(used).is_ok_and(|age| age > IN_USE);
            if done.kept_bytes + length > keep && (resting || keep == 0) {
                done.take(&path, length, dry)?;
            } else {
                done.kept_bytes += length;
            }
        }
        Ok(done)
    }
}

/// Whether nobody has a part in hand.
fn is_free(path: &Path) -> bool {
    File::open(path)
        .is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
}

impl Pruned {
    fn take(&mut self, path: &Path, length: u64, dry: bool) -> io::Result<()> {
        if !dry {
            match std::fs::remove_file(path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                other => other.map_err(|e| at(path, e))?,
            }
        }
        self.files += 1;
        self.bytes += length;
        Ok(())
    }
}

/// A piece that is being fetched. Dropped, what there is of it stays for the next fetch.
pub struct Partial {
    file: File,
    path: PathBuf,
    target: PathBuf,
    digest: String,
    size: u64,
    have: u64,
    hash: Context,
}

impl std::fmt::Debug for Partial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Partial").field("digest", &self.digest).finish_non_exhaustive()
    }
}

impl Partial {
    /// Hashes what an earlier fetch left.
    fn look(&mut self) -> io::Result<()> {
        let there = self.file.metadata().map_err(|e| at(&self.path, e))?.len();
        if there > self.size {
            return self.restart();
        }
        let mut buffer = vec![0u8; 256 << 10];
        loop {
            let length = self.file.read(&mut buffer).map_err(|e| at(&self.path, e))?;
            if length == 0 {
                return Ok(());
            }
            self.hash.update(&buffer[..length]);
            self.have += length as u64;
        }
    }

    /// How many bytes there are.
    #[must_use]
    pub fn have(&self) -> u64 {
        self.have
    }

    /// Forgets what there is.
    ///
    /// # Errors
    /// As truncate.
    pub fn restart(&mut self) -> io::Result<()> {
        use std::io::Seek as _;
        self.file.set_len(0).map_err(|e| at(&self.path, e))?;
        self.file.rewind().map_err(|e| at(&self.path, e))?;
        self.hash = Context::new(&SHA256);
        self.have = 0;
        Ok(())
    }

    /// Writes the next bytes.
    ///
    /// # Errors
    /// `InvalidData` when they are more than there can be: nothing of it is kept.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.have + bytes.len() as u64 > self.size {
            let text =
                format!("{} is longer than the {} bytes that it must have", self.digest, self.size);
            self.discard()?;
            return Err(invalid(text));
        }
        self.file.write_all(bytes).map_err(|e| at(&self.path, e))?;
        self.hash.update(bytes);
        self.have += bytes.len() as u64;
        Ok(())
    }

    fn discard(&mut self) -> io::Result<()> {
        self.restart()?;
        std::fs::remove_file(&self.path).map_err(|e| at(&self.path, e))
    }

    /// Gives it its name, when its bytes are what they must be.
    ///
    /// # Errors
    /// `InvalidData` when they are not: nothing of it is kept. `UnexpectedEof` while some are missing: what there
    /// is stays.
    pub fn finish(mut self) -> io::Result<PathBuf> {
        if self.have < self.size {
            let text = format!("{} ends after {} of {} bytes", self.digest, self.have, self.size);
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        let found = written(self.hash.clone().finish().as_ref());
        if found != self.digest {
            let text = format!("{} is not what came: those bytes are {found}", self.digest);
            self.discard()?;
            return Err(invalid(text));
        }
        self.file.sync_all().map_err(|e| at(&self.path, e))?;
        std::fs::rename(&self.path, &self.target).map_err(|e| at(&self.target, e))?;
        if let Some(folder) = self.target.parent() {
            File::open(folder)?.sync_all()?;
        }
        Ok(self.target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bed() -> (tempfile::TempDir, Blobs) {
        let dir = tempfile::tempdir().unwrap();
        let blobs = Blobs::of(dir.path());
        (dir, blobs)
    }

    fn put(blobs: &Blobs, text: &[u8]) -> String {
        let digest = sha256(text);
        let mut partial = blobs.begin(&digest, text.len() as u64).unwrap().unwrap();
        partial.write(text).unwrap();
        partial.finish().unwrap();
        digest
    }

    #[test]
    fn the_hash_is_that_of_the_world() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(sha256(b""), empty);
    }

    #[test]
    fn a_piece_has_its_name_when_it_is_whole() {
        let (_dir, blobs) = bed();
        let digest = sha256(b"hello");
        assert_eq!(blobs.get(&digest, 5).unwrap(), None);
        let mut partial = blobs.begin(&digest, 5).unwrap().unwrap();
        partial.write(b"hel").unwrap();
        assert!(blobs.begin(&digest, 5).unwrap().is_none(), "in somebody's hands");
        assert_eq!(partial.finish().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(blobs.get(&digest, 5).unwrap(), None);
        // The next one goes on.
        let mut partial = blobs.begin(&digest, 5).unwrap().unwrap();
        assert_eq!(partial.have(), 3);
        partial.write(b"lo").unwrap();
        let path = partial.finish().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"hello");
        assert_eq!(blobs.get(&digest, 5).unwrap(), Some(path));
    }

    #[test]
    fn other_bytes_leave_nothing() {
        let (_dir, blobs) = bed();
        let digest = sha256(b"hello");
        let mut partial = blobs.begin(&digest, 5).unwrap().unwrap();
        partial.write(b"hallo").unwrap();
        assert_eq!(partial.finish().unwrap_err().kind(), io::ErrorKind::InvalidData);
        let mut partial = blobs.begin(&digest, 5).unwrap().unwrap();
        assert_eq!(partial.have(), 0);
        assert_eq!(partial.write(b"hello!").unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(partial);
        assert_eq!(std::fs::read_dir(&blobs.folder).unwrap().count(), 0);
        // One that lost its end on the disk is fetched again.
        put(&blobs, b"hello");
        std::fs::write(blobs.path(&digest).unwrap(), "hel").unwrap();
        assert_eq!(blobs.get(&digest, 5).unwrap(), None);
        assert!(blobs.get("sha256:../../x", 1).is_err());
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let (_dir, blobs) = bed();
        let (old, new) = (put(&blobs, b"old"), put(&blobs, b"new"));
        let age = |digest: &str, hours: u64| {
            let file = File::options().write(true).open(blobs.path(digest).unwrap()).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600)).unwrap();
        };
        assert_eq!(blobs.prune(3, true).unwrap().files, 0, "both are in use");
        age(&old, 5);
        age(&new, 4);
        let would = blobs.prune(3, true).unwrap();
        assert_eq!(would, Pruned { files: 1, bytes: 3, kept_bytes: 3 });
        assert_eq!(blobs.prune(3, false).unwrap(), would);
        assert_eq!(blobs.get(&old, 3).unwrap(), None);
        assert!(blobs.get(&new, 3).unwrap().is_some(), "and is used now");
        let held = blobs.begin(&old, 3).unwrap().unwrap();
        assert_eq!(blobs.prune(0, false).unwrap(), Pruned { files: 1, bytes: 3, kept_bytes: 0 });
        drop(held);
        assert_eq!(blobs.prune(0, false).unwrap().files, 1, "the part, when nobody has it");
    }
}
