//! The folder of built images, which the engines of one machine share.
//!
//! ```text
//! universal-<digest>.erofs   the tree, never written again
//! universal-<digest>.json    its manifest: an image exists exactly while this does
//! leases/<digest>/<engine>   uppers of that engine lie on the image
//! build.lock, folder.lock    one build at a time; one change of the above at a time
//! build-<pid>.tmp/           a build at work
//! ```
//!
//! Invariant: a manifest is written last and removed first, so whatever a crash leaves is either a whole
//! image or rubbish that [`ImageFolder::sweep`] removes; an image with a lease is never removed. Called by
//! the build, by the mounts and by `bivouac image`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

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
}

impl Manifest {
    /// The name with the digest: names this version for ever.
    #[must_use]
    pub fn reference(&self) -> String {
        format!("{}@{}", self.name, self.digest)
    }

    pub(crate) fn stem(&self) -> String {
        format!("{}-{}", self.name, self.hex())
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
        word(&self.name) && self.hex().len() == 64 && word(self.hex())
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
    pub(crate) fn ensure(&self) -> io::Result<()> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&self.path)
            .map_err(|e| named(&self.path, e))?;
        self.check_owner()
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
        std::fs::rename(file, &target).map_err(|e| named(&target, e))?;
        let text = serde_json::to_vec_pretty(manifest)?;
        write_durably(&self.manifest_file(manifest), &text)
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
        self.path.join(LEASES).join(manifest.hex())
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

    /// Removes what interrupted builds and removals left, unless a build is at work.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn sweep(&self) -> io::Result<()> {
        if !self.path.exists() || self.check_owner().is_err() {
            return Ok(());
        }
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
mod tests {
    use super::*;

    fn manifest(name: &str, fill: char, built_at: i64, bytes: u64) -> Manifest {
        Manifest {
            name: name.to_owned(),
            digest: format!("{ALGORITHM}{}", fill.to_string().repeat(64)),
            bytes,
            built_at,
            recipe: "r".to_owned(),
            architecture: "amd64".to_owned(),
            debian: "13.0".to_owned(),
            default_runtime: "node24".to_owned(),
            runtimes: BTreeMap::new(),
            tools: BTreeMap::new(),
        }
    }

    struct Bed {
        _dir: tempfile::TempDir,
        folder: ImageFolder,
        data: PathBuf,
    }

    impl Bed {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let folder = ImageFolder::new(dir.path().join("images"));
            folder.ensure().unwrap();
            let data = dir.path().join("data");
            std::fs::create_dir(&data).unwrap();
            Self { _dir: dir, folder, data }
        }

        fn publish(&self, name: &str, fill: char, built_at: i64) -> Manifest {
            let manifest = manifest(name, fill, built_at, 4);
            let file = self.folder.path().join("made");
            std::fs::write(&file, "tree").unwrap();
            self.folder.publish(&manifest, &file).unwrap();
            manifest
        }

        fn names(&self) -> Vec<String> {
            let entries = std::fs::read_dir(self.folder.path()).unwrap();
            let mut names: Vec<String> = entries
                .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
                .filter(|name| !name.ends_with(".lock") && name != LEASES)
                .collect();
            names.sort();
            names
        }
    }

    #[test]
    fn the_newest_of_a_name_is_the_one_that_is_meant() {
        let bed = Bed::new();
        assert!(bed.folder.list().unwrap().is_empty());
        let old = bed.publish("universal", 'a', 1);
        let new = bed.publish("universal", 'b', 2);
        let other = bed.publish("other", 'c', 3);
        let find = |wanted: &str| bed.folder.find(wanted).unwrap();
        assert_eq!(find("universal"), Some(new.clone()));
        assert_eq!(find(&old.reference()), Some(old.clone()));
        assert_eq!(find(&old.digest), Some(old));
        assert_eq!(find("other"), Some(other));
        assert_eq!(find("nope"), None);
        bed.folder.check(&new).unwrap();
    }

    #[test]
    fn a_missing_folder_has_no_images() {
        let dir = tempfile::tempdir().unwrap();
        let folder = ImageFolder::new(dir.path().join("none"));
        assert!(folder.list().unwrap().is_empty());
        folder.sweep().unwrap();
        assert!(!folder.path().exists(), "a look makes nothing");
    }

    #[test]
    fn a_damaged_file_is_told() {
        let bed = Bed::new();
        let image = bed.publish("universal", 'a', 1);
        std::fs::write(bed.folder.file(&image), "tre").unwrap();
        let said = bed.folder.check(&image).unwrap_err().to_string();
        assert!(said.contains("damaged") && said.contains("bivouac image rm"), "{said}");
        std::fs::remove_file(bed.folder.file(&image)).unwrap();
        let said = bed.folder.check(&image).unwrap_err().to_string();
        assert!(said.contains("gone"), "{said}");
    }

    #[test]
    fn what_an_engine_keeps_is_not_removed() {
        let bed = Bed::new();
        let image = bed.publish("universal", 'a', 1);
        bed.folder.lease(&image, "engine", &bed.data).unwrap();
        assert_eq!(bed.folder.leased_by("engine").unwrap(), std::slice::from_ref(&image));
        assert!(bed.folder.leased_by("another").unwrap().is_empty());
        match bed.folder.remove(&image) {
            Err(RemoveError::InUse(leases)) => assert_eq!(leases[0].data_dir, bed.data),
            other => panic!("{other:?}"),
        }
        bed.folder.end_lease(&image, "engine").unwrap();
        bed.folder.end_lease(&image, "engine").unwrap();
        bed.folder.remove(&image).unwrap();
        assert!(bed.names().is_empty(), "{:?}", bed.names());
        assert!(matches!(bed.folder.remove(&image), Err(RemoveError::Missing)));
        let said = bed.folder.lease(&image, "engine", &bed.data).unwrap_err();
        assert_eq!(said.kind(), io::ErrorKind::NotFound, "a removed image cannot be kept");
    }

    #[test]
    fn an_engine_whose_folder_is_gone_keeps_nothing() {
        let bed = Bed::new();
        let image = bed.publish("universal", 'a', 1);
        bed.folder.lease(&image, "engine", &bed.data).unwrap();
        std::fs::remove_dir(&bed.data).unwrap();
        assert!(bed.folder.leases(&image).unwrap().is_empty());
        // A lease that was cut short is one.
        std::fs::write(bed.folder.lease_dir(&image).join("cut"), "{").unwrap();
        assert!(matches!(bed.folder.remove(&image), Err(RemoveError::InUse(_))));
    }

    #[test]
    fn what_a_crash_left_is_removed_and_nothing_else() {
        let bed = Bed::new();
        let image = bed.publish("universal", 'a', 1);
        let path = bed.folder.path();
        std::fs::create_dir(path.join("build-1.tmp")).unwrap();
        std::fs::write(path.join("build-1.tmp/image.erofs"), "half").unwrap();
        std::fs::write(path.join(format!("universal-{}.erofs", "b".repeat(64))), "orphan").unwrap();
        std::fs::write(path.join("universal-x.json.new"), "{").unwrap();
        std::fs::write(path.join("notes.txt"), "mine").unwrap();
        let held = bed.folder.try_lock_build().unwrap().unwrap();
        bed.folder.sweep().unwrap();
        assert_eq!(bed.names().len(), 6, "a build is at work: {:?}", bed.names());
        drop(held);
        bed.folder.sweep().unwrap();
        let stem = image.stem();
        assert_eq!(
            bed.names(),
            ["notes.txt".to_owned(), format!("{stem}.erofs"), format!("{stem}.json")]
        );
    }

    #[test]
    fn a_second_build_is_told_who_is_first() {
        let bed = Bed::new();
        let held = bed.folder.try_lock_build().unwrap().unwrap();
        let holder = bed.folder.try_lock_build().unwrap().unwrap_err();
        assert_eq!(holder, i32::try_from(std::process::id()).ok());
        drop(held);
        bed.folder.try_lock_build().unwrap().unwrap();
    }

    #[test]
    fn a_manifest_cannot_lead_out_of_the_folder() {
        let bed = Bed::new();
        let mut evil = manifest("universal", 'a', 1, 4);
        evil.name = "../universal".to_owned();
        let text = serde_json::to_vec(&evil).unwrap();
        std::fs::write(bed.folder.path().join("x.json"), &text).unwrap();
        let honest = manifest("universal", 'a', 1, 4);
        // The content of one under the name of another.
        let name = format!("universal-{}.json", "b".repeat(64));
        std::fs::write(bed.folder.path().join(name), serde_json::to_vec(&honest).unwrap()).unwrap();
        std::fs::write(bed.folder.path().join("y.json"), "[]").unwrap();
        assert!(bed.folder.list().unwrap().is_empty());
    }

    #[test]
    fn a_folder_that_others_can_write_is_refused() {
        use std::os::unix::fs::PermissionsExt as _;
        let bed = Bed::new();
        bed.publish("universal", 'a', 1);
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(bed.folder.path(), open).unwrap();
        let said = bed.folder.list().unwrap_err().to_string();
        assert!(said.contains("other users"), "{said}");
    }
}
