//! The folder of built images, which the engines of one machine share.
//!
//! ```text
//! universal-<digest>.erofs   the tree, never written again
//! universal-<digest>.json    its manifest: an image exists exactly while this does
//! oci<name>-<digest>.…       the same of one that was imported or pulled: a hash stands for its name
//! leases/<digest>/<engine>   uppers of that engine lie on the image
//! blobs/                     pieces of images as registries have them (`blobs`)
//! build.lock, folder.lock    one build at a time; one change of the above at a time
//! build-<pid>.tmp/           a build at work
//! import-<pid>-<n>.tmp/      an import at work, as long as its `lock` is held
//! ```
//!
//! Two names of the same tree are two links of one file: it goes with the last of them.
//!
//! Invariant: a manifest is written last and removed first, so whatever a crash leaves is either a whole
//! image or rubbish that [`ImageFolder::sweep`] removes; an image with a lease is never removed. Called by
//! the build, by the mounts and by `bivouac image`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use bivouac_types::oci::{self, ImageConfig};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::blobs::Blobs;

const BUILD_LOCK: &str = "build.lock";
const FOLDER_LOCK: &str = "folder.lock";
const LEASES: &str = "leases";
/// What a digest begins with.
const ALGORITHM: &str = "blake3:";
/// Longest manifest that is read.
const MAX_MANIFEST: u64 = 1 << 20;

/// What is known of a built image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Its name; a later build of the same name is another version of it.
    pub name: String,
    /// `blake3:` and the hash of the file, hexadecimal.
    pub digest: String,
    /// Size of the file, bytes.
    pub bytes: u64,
    /// When it was built, ms since 1970.
    pub built_at: i64,
    /// Hash of what the build was told: an engine with another one would build another image.
    pub recipe: String,
    /// As Debian calls it: `amd64`, `arm64`.
    pub architecture: String,
    /// Debian's version inside.
    pub debian: String,
    /// Runtime that is first on PATH when none is asked for.
    pub default_runtime: String,
    /// Runtimes and the version of each.
    pub runtimes: BTreeMap<String, String>,
    /// Other programs and the version of each.
    pub tools: BTreeMap<String, String>,
    /// Where it came from, if it was imported or pulled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oci: Option<Origin>,
}

/// Where an image came from that was not built here.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Origin {
    /// The reference that was asked for, or the file that was imported.
    pub source: String,
    /// Digest of the image's manifest, when it had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// Digest of the index that the manifest was chosen from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<String>,
    /// Digest of its configuration.
    pub config_digest: String,
    /// Its layers, the lowest first.
    pub layers: Vec<OriginLayer>,
    /// How it is to be run.
    pub config: ImageConfig,
    /// `blake3:` and the hash of the file alone; the image's digest is over the configuration too.
    pub file_digest: String,
}

/// One layer of an image that was not built here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OriginLayer {
    /// Hash of it as it came.
    pub digest: String,
    /// Bytes of it as it came.
    pub size: u64,
}

impl Manifest {
    /// The name with the digest: names this version for ever.
    #[must_use]
    pub fn reference(&self) -> String {
        format!("{}@{}", self.name, self.digest)
    }

    pub(crate) fn stem(&self) -> String {
        match &self.oci {
            None => format!("{}-{}", self.name, self.hex()),
            // Any text may be in such a name, but none that leads somewhere.
            Some(_) => format!("oci{}-{}", self.name_hash(), self.hex()),
        }
    }

    fn name_hash(&self) -> String {
        blake3::hash(self.name.as_bytes()).to_hex()[..16].to_owned()
    }

    /// Two names of one tree are kept, and let go of, each by itself.
    fn lease_name(&self) -> String {
        match &self.oci {
            None => self.hex().to_owned(),
            Some(_) => format!("{}-{}", self.hex(), self.name_hash()),
        }
    }

    fn hex(&self) -> &str {
        self.digest.strip_prefix(ALGORITHM).unwrap_or_default()
    }

    /// Names come from file content: they must not lead out of the folder.
    fn is_sound(&self) -> bool {
        let word = |text: &str| {
            !text.is_empty()
                && text.len() <= 64
                && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        };
        let named = match &self.oci {
            None => word(&self.name),
            Some(_) if oci::is_reference(&self.name) => {
                oci::Reference::parse(&self.name).is_ok_and(|read| read.to_string() == self.name)
            }
            Some(_) => oci::check_local_name(&self.name).is_ok(),
        };
        named && self.hex().len() == 64 && word(self.hex())
    }
}

/// Who keeps an image: an engine with uppers on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    /// Data folder of the engine.
    pub data_dir: PathBuf,
    dev: u64,
    inode: u64,
}

impl Lease {
    fn of(data_dir: &Path) -> io::Result<Self> {
        let meta = std::fs::metadata(data_dir)?;
        Ok(Self { data_dir: data_dir.to_owned(), dev: meta.dev(), inode: meta.ino() })
    }

    /// A data folder that was deleted, or made anew, has no uppers.
    fn is_live(&self) -> bool {
        match Self::of(&self.data_dir) {
            Ok(now) => now == *self,
            Err(e) => e.kind() != io::ErrorKind::NotFound,
        }
    }
}

/// Why an image was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// There is none.
    #[error("there is no such image")]
    Missing,
    /// Engines have sandboxes or snapshots on it.
    #[error("sandboxes or snapshots lie on it")]
    InUse(Vec<Lease>),
    /// The folder could not be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// See the module.
#[derive(Debug, Clone)]
pub struct ImageFolder {
    path: PathBuf,
}

/// A held lock; dropped is released.
#[derive(Debug)]
pub(crate) struct Held(pub(crate) File);

fn named(path: &Path, e: impl Into<io::Error>) -> io::Error {
    let e = e.into();
    io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

impl ImageFolder {
    /// The folder at `path`, which need not exist yet.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the folder, or checks that it is ours alone to write: what is in it is mounted as root.
    ///
    /// # Errors
    /// It belongs to somebody else, or others may write into it.
    pub fn ensure(&self) -> io::Result<()> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&self.path)
            .map_err(|e| named(&self.path, e))?;
        self.check_owner()
    }

    /// Whether there is room for layers of so many bytes and for the image that is made of them.
    ///
    /// # Errors
    /// A sentence.
    pub fn check_room(&self, layers: u64) -> Result<(), String> {
        let needed = layers.saturating_mul(4).saturating_add(1 << 30);
        super::build::check_room(&self.path, needed).map_err(|e| e.to_string())
    }

    fn check_owner(&self) -> io::Result<()> {
        let meta = std::fs::metadata(&self.path).map_err(|e| named(&self.path, e))?;
        let ours = meta.uid() == rustix::process::geteuid().as_raw();
        if ours && meta.mode() & 0o022 == 0 {
            return Ok(());
        }
        let text = format!(
            "the image folder {} can be written by other users: images are used as root (chown it to \
             root, chmod 755)",
            self.path.display()
        );
        Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
    }

    pub(crate) fn file(&self, manifest: &Manifest) -> PathBuf {
        self.path.join(format!("{}.erofs", manifest.stem()))
    }

    fn manifest_file(&self, manifest: &Manifest) -> PathBuf {
        self.path.join(format!("{}.json", manifest.stem()))
    }

    /// All images, the newest first.
    ///
    /// # Errors
    /// The folder or a manifest cannot be read, or is not ours. A missing folder has no images.
    pub fn list(&self) -> io::Result<Vec<Manifest>> {
        let entries = match std::fs::read_dir(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(|e| named(&self.path, e))?,
        };
        self.check_owner()?;
        let mut found = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "json")
                && let Some(manifest) = read_manifest(&path)?
            {
                found.push(manifest);
            }
        }
        found.sort_by(|a, b| b.built_at.cmp(&a.built_at).then_with(|| a.digest.cmp(&b.digest)));
        Ok(found)
    }

    /// The image of a name (its newest version), of `name@digest`, or of a digest.
    ///
    /// # Errors
    /// As [`ImageFolder::list`].
    pub fn find(&self, wanted: &str) -> io::Result<Option<Manifest>> {
        let fits = |m: &Manifest| m.name == wanted || m.digest == wanted || m.reference() == wanted;
        Ok(self.list()?.into_iter().find(fits))
    }

    /// Whether the file of an image is there and as long as it should be.
    ///
    /// # Errors
    /// A sentence that says what is wrong and how to mend it.
    pub fn check(&self, manifest: &Manifest) -> io::Result<()> {
        let file = self.file(manifest);
        let mend = format!(
            "remove it with `bivouac image rm {}`, then build it again",
            manifest.reference()
        );
        let found = match std::fs::symlink_metadata(&file) {
            Ok(found) => found,
            Err(e) => {
                let text = format!("the file of image {} is gone ({e}): {mend}", manifest.name);
                return Err(io::Error::new(e.kind(), text));
            }
        };
        if found.is_file() && found.len() == manifest.bytes {
            return Ok(());
        }
        let text = format!(
            "{} is damaged: {} bytes instead of {}; {mend}",
            file.display(),
            found.len(),
            manifest.bytes
        );
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }

    /// Makes an image known: its file is in place under a temporary name, and becomes part of the folder.
    pub(crate) fn publish(&self, manifest: &Manifest, file: &Path) -> io::Result<()> {
        let _held = self.lock_folder()?;
        let target = self.file(manifest);
        // The same again: what is there may be mounted, and its pages are in memory.
        let there = self.manifest_file(manifest).exists() && self.check(manifest).is_ok();
        if !there && !self.link_same(manifest, &target)? {
            std::fs::rename(file, &target).map_err(|e| named(&target, e))?;
        }
        let text = serde_json::to_vec_pretty(manifest)?;
        write_durably(&self.manifest_file(manifest), &text)
    }

    /// Makes an image known under another name than the one that it has. Answers false when there is no sound
    /// file of that tree any more.
    pub(crate) fn publish_again(&self, manifest: &Manifest) -> io::Result<bool> {
        let _held = self.lock_folder()?;
        let target = self.file(manifest);
        let there = self.manifest_file(manifest).exists() && self.check(manifest).is_ok();
        if !there && !self.link_same(manifest, &target)? {
            return Ok(false);
        }
        write_durably(&self.manifest_file(manifest), &serde_json::to_vec_pretty(manifest)?)?;
        Ok(true)
    }

    /// Takes the file of another name of the same tree. Under the folder's lock.
    fn link_same(&self, manifest: &Manifest, target: &Path) -> io::Result<bool> {
        let Some(origin) = &manifest.oci else { return Ok(false) };
        let same = |other: &Manifest| {
            other.stem() != manifest.stem()
                && other.bytes == manifest.bytes
                && other.oci.as_ref().is_some_and(|o| o.file_digest == origin.file_digest)
                && self.check(other).is_ok()
        };
        let Some(other) = self.list()?.into_iter().find(same) else { return Ok(false) };
        absent_is_fine(std::fs::remove_file(target)).map_err(|e| named(target, e))?;
        std::fs::hard_link(self.file(&other), target).map_err(|e| named(target, e))?;
        Ok(true)
    }

    /// Removes an image that nobody uses.
    ///
    /// # Errors
    /// [`RemoveError::InUse`] names the engines that have uppers on it.
    pub fn remove(&self, manifest: &Manifest) -> Result<(), RemoveError> {
        let _held = self.lock_folder()?;
        let leases = self.leases(manifest)?;
        if !leases.is_empty() {
            return Err(RemoveError::InUse(leases));
        }
        match std::fs::remove_file(self.manifest_file(manifest)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(RemoveError::Missing),
            other => other.map_err(|e| named(&self.manifest_file(manifest), e))?,
        }
        absent_is_fine(std::fs::remove_file(self.file(manifest)))?;
        absent_is_fine(std::fs::remove_dir_all(self.lease_dir(manifest)))?;
        Ok(())
    }

    fn lease_dir(&self, manifest: &Manifest) -> PathBuf {
        self.path.join(LEASES).join(manifest.lease_name())
    }

    /// The engines that have uppers on the image. Leases of data folders that are gone do not count.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn leases(&self, manifest: &Manifest) -> io::Result<Vec<Lease>> {
        let entries = match std::fs::read_dir(self.lease_dir(manifest)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut live = Vec::new();
        for entry in entries {
            let path = entry?.path();
            let text = match std::fs::read(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(|e| named(&path, e))?,
            };
            // Half-written is written by somebody who is about to use it.
            match serde_json::from_slice::<Lease>(&text) {
                Ok(lease) if !lease.is_live() => {}
                Ok(lease) => live.push(lease),
                Err(_) => live.push(Lease { data_dir: path, dev: 0, inode: 0 }),
            }
        }
        Ok(live)
    }

    /// Keeps the image for an engine, if it is there.
    ///
    /// # Errors
    /// `NotFound` when the image is not there (any more).
    pub(crate) fn lease(&self, manifest: &Manifest, engine: &str, data: &Path) -> io::Result<()> {
        self.check_owner()?;
        let _held = self.lock_folder()?;
        if !self.manifest_file(manifest).exists() {
            let text = format!("image {} was removed", manifest.name);
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        let folder = self.lease_dir(manifest);
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&folder)?;
        let path = folder.join(engine);
        // In place, under the lock: half a lease still keeps the image, and has the name by which its
        // engine finds it.
        let mut file = File::create(&path).map_err(|e| named(&path, e))?;
        file.write_all(&serde_json::to_vec(&Lease::of(data)?)?)?;
        file.sync_all()?;
        File::open(&folder)?.sync_all()
    }

    /// An engine has no upper on the image any more. Idempotent.
    pub(crate) fn end_lease(&self, manifest: &Manifest, engine: &str) -> io::Result<()> {
        absent_is_fine(std::fs::remove_file(self.lease_dir(manifest).join(engine)))
    }

    /// Images that this engine keeps.
    pub(crate) fn leased_by(&self, engine: &str) -> io::Result<Vec<Manifest>> {
        let mut all = self.list()?;
        all.retain(|manifest| self.lease_dir(manifest).join(engine).exists());
        Ok(all)
    }

    fn open_lock(&self, name: &str) -> io::Result<File> {
        let path = self.path.join(name);
        File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(|e| named(&path, e))
    }

    fn lock_folder(&self) -> io::Result<Held> {
        let file = self.open_lock(FOLDER_LOCK)?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(Held(file))
    }

    /// The lock of builds: held, or the process that holds it.
    pub(crate) fn try_lock_build(&self) -> io::Result<Result<Held, Option<i32>>> {
        let mut file = self.open_lock(BUILD_LOCK)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let text = io::read_to_string(&file).unwrap_or_default();
                return Ok(Err(text.trim().parse().ok()));
            }
            Err(e) => return Err(e.into()),
        }
        file.set_len(0)?;
        writeln!(file, "{}", std::process::id())?;
        Ok(Ok(Held(file)))
    }

    /// The folder in which the holder of the build's lock works. Made anew.
    pub(crate) fn make_work(&self, _held: &Held) -> io::Result<PathBuf> {
        let path = self.path.join(format!("build-{}.tmp", std::process::id()));
        absent_is_fine(std::fs::remove_dir_all(&path)).map_err(|e| named(&path, e))?;
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(|e| named(&path, e))?;
        Ok(path)
    }

    /// A folder for an import to work in, beside others, as long as the lock is held.
    pub(crate) fn make_import(&self) -> io::Result<(PathBuf, Held)> {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let _folder = self.lock_folder()?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = self.path.join(format!("import-{}-{number}.tmp", std::process::id()));
        absent_is_fine(std::fs::remove_dir_all(&path)).map_err(|e| named(&path, e))?;
        std::fs::DirBuilder::new().mode(0o700).create(&path).map_err(|e| named(&path, e))?;
        let file = File::create(path.join("lock")).map_err(|e| named(&path, e))?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok((path, Held(file)))
    }

    /// Removes what imports left that do not go on.
    fn sweep_imports(&self) -> io::Result<()> {
        let _folder = self.lock_folder()?;
        for entry in std::fs::read_dir(&self.path)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            if !(name.starts_with("import-") && name.ends_with(".tmp")) {
                continue;
            }
            let held = File::open(path.join("lock"))
                .is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_err());
            if !held {
                std::fs::remove_dir_all(&path).map_err(|e| named(&path, e))?;
            }
        }
        Ok(())
    }

    /// The pieces of images that are kept here.
    #[must_use]
    pub fn blobs(&self) -> Blobs {
        Blobs::of(&self.path)
    }

    /// Removes what interrupted builds and removals left, unless a build is at work, and what is left of
    /// imports that do not go on.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn sweep(&self) -> io::Result<()> {
        if !self.path.exists() || self.check_owner().is_err() {
            return Ok(());
        }
        self.sweep_imports()?;
        match self.try_lock_build()? {
            Ok(held) => self.sweep_locked(&held),
            Err(_) => Ok(()),
        }
    }

    pub(crate) fn sweep_locked(&self, _held: &Held) -> io::Result<()> {
        let _folder = self.lock_folder()?;
        for entry in std::fs::read_dir(&self.path)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            if name.starts_with("build-") && name.ends_with(".tmp") {
                std::fs::remove_dir_all(&path).map_err(|e| named(&path, e))?;
            } else if name.ends_with(".json.new")
                || (name.ends_with(".erofs") && !path.with_extension("json").exists())
            {
                std::fs::remove_file(&path).map_err(|e| named(&path, e))?;
            }
        }
        Ok(())
    }
}

/// A manifest under the name that it must have. `None`: another file of that ending, or just removed.
fn read_manifest(path: &Path) -> io::Result<Option<Manifest>> {
    let text = match std::fs::metadata(path).and_then(|meta| {
        if meta.len() > MAX_MANIFEST { Ok(Vec::new()) } else { std::fs::read(path) }
    }) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.map_err(|e| named(path, e))?,
    };
    let Ok(manifest) = serde_json::from_slice::<Manifest>(&text) else {
        tracing::warn!(path = %path.display(), "not the manifest of an image");
        return Ok(None);
    };
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    Ok((manifest.is_sound() && manifest.stem() == stem).then_some(manifest))
}

/// Writes beside, flushes and renames; the folder too is on disk when this returns.
fn write_durably(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    let written = (|| {
        let mut file = File::create(&beside)?;
        file.write_all(text)?;
        file.sync_all()?;
        std::fs::rename(&beside, path)?;
        File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
    })();
    written.map_err(|e| named(path, e))
}

#[cfg(test)]
mod tests;
