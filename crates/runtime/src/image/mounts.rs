//! The built images that an engine uses: leased in their folder, each mounted once below `<data>/mounts`.
//!
//! An image is mounted when the first session needs it. The mount stays while sessions may need it, also
//! without `serve`: the next `serve` finds it, and so shares the pages that the kernel has cached.
//! Invariant: what is mounted is leased; what an upper lies on (the engine says which those are) stays
//! leased, mounted or not. Called by `linux`.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

use super::{ImageFolder, Manifest};

/// What statfs says of EROFS.
const EROFS_MAGIC: u64 = 0xE0F5_E1E2;
/// How often an unmount is tried while the kernel still lets go of the last session.
const TRIES: u32 = 40;
/// A folder that changed so recently may change again without another time.
const SETTLED: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug)]
pub(crate) struct ImageMounts {
    folder: ImageFolder,
    /// Where they are mounted.
    root: PathBuf,
    data_dir: PathBuf,
    /// Name of the engine in leases.
    engine: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Images that this process has leased and mounted: by reference, with the mark of the last use.
    ready: BTreeMap<String, (Manifest, u64)>,
    mark: u64,
    /// The images of the folder, as of the folder's time.
    listed: Option<(SystemTime, Vec<Manifest>)>,
}

fn at(what: impl std::fmt::Display, e: impl Into<io::Error>) -> io::Error {
    let e = e.into();
    io::Error::new(e.kind(), format!("{what}: {e}"))
}

impl ImageMounts {
    /// Mounts nothing yet. Removes what interrupted builds left in the folder.
    ///
    /// # Errors
    /// As mkdir.
    pub(crate) fn open(images: &Path, data_dir: &Path, engine: &str) -> io::Result<Self> {
        let root = data_dir.join("mounts");
        match std::fs::DirBuilder::new().mode(0o700).create(&root) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            other => other.map_err(|e| at(root.display(), e))?,
        }
        let folder = ImageFolder::new(images);
        if let Err(error) = folder.sweep() {
            tracing::warn!(%error, "what an interrupted build left cannot be removed");
        }
        let data_dir = data_dir.to_owned();
        Ok(Self { folder, root, data_dir, engine: engine.to_owned(), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the images are.
    pub(crate) fn folder(&self) -> &ImageFolder {
        &self.folder
    }

    /// All images of the folder, the newest first.
    ///
    /// # Errors
    /// As [`ImageFolder::list`].
    pub(crate) fn list(&self) -> io::Result<Vec<Manifest>> {
        let changed = std::fs::metadata(self.folder.path()).and_then(|meta| meta.modified()).ok();
        if let (Some(changed), Some((then, list))) = (changed, &self.state().listed)
            && changed == *then
        {
            return Ok(list.clone());
        }
        let list = self.folder.list()?;
        let settled = |changed: &SystemTime| changed.elapsed().is_ok_and(|age| age > SETTLED);
        self.state().listed = changed.filter(settled).map(|changed| (changed, list.clone()));
        Ok(list)
    }

    /// The image of a name or reference.
    ///
    /// # Errors
    /// The folder cannot be read, or the image's file is missing or damaged.
    pub(crate) fn find(&self, wanted: &str) -> io::Result<Option<Manifest>> {
        let fits = |m: &Manifest| m.name == wanted || m.reference() == wanted;
        let Some(found) = self.list()?.into_iter().find(fits) else { return Ok(None) };
        self.folder.check(&found)?;
        Ok(Some(found))
    }

    fn place(&self, manifest: &Manifest) -> PathBuf {
        self.root.join(manifest.stem().chars().take(32).collect::<String>())
    }

    /// Where the tree of an image is, leased and mounted. `None`: there is no such image.
    ///
    /// # Errors
    /// The file is missing or damaged, or the kernel cannot mount it.
    pub(crate) fn tree(&self, reference: &str) -> io::Result<Option<PathBuf>> {
        let Some(manifest) = self.find(reference)? else { return Ok(None) };
        // Held to the end: two launches must not mount it twice.
        let mut state = self.state();
        self.folder.lease(&manifest, &self.engine, &self.data_dir)?;
        let place = self.place(&manifest);
        if !is_mounted(&place) {
            match std::fs::DirBuilder::new().mode(0o700).create(&place) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                other => other.map_err(|e| at(place.display(), e))?,
            }
            mount(&self.folder.file(&manifest), &place)?;
        }
        state.mark += 1;
        let mark = state.mark;
        state.ready.insert(manifest.reference(), (manifest, mark));
        Ok(Some(place))
    }

    /// As [`ImageMounts::tree`], for an image that this process has mounted already. Microseconds.
    pub(crate) fn mounted_tree(&self, reference: &str) -> Option<PathBuf> {
        let mut state = self.state();
        state.mark += 1;
        let mark = state.mark;
        let (manifest, used) = state.ready.get_mut(reference)?;
        let place = self.place(manifest);
        // Somebody may have unmounted it: an overlay over an empty folder would be no error.
        is_mounted(&place).then(|| {
            *used = mark;
            place
        })
    }

    /// References of the images that this engine keeps, and the present moment for
    /// [`ImageMounts::release`].
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(crate) fn kept(&self) -> io::Result<(u64, Vec<String>)> {
        let mark = self.state().mark;
        let leased = self.folder.leased_by(&self.engine)?;
        Ok((mark, leased.iter().map(Manifest::reference).collect()))
    }

    /// Lets go of images that no upper lies on. One that was asked for since `mark` is kept: its upper may
    /// be newer than the caller's knowledge.
    ///
    /// # Errors
    /// The folder cannot be read, or a lease not be removed.
    pub(crate) fn release(&self, mark: u64, unused: &[String]) -> io::Result<()> {
        let mut state = self.state();
        for manifest in self.folder.leased_by(&self.engine)? {
            let reference = manifest.reference();
            let newer = state.ready.get(&reference).is_some_and(|(_, last)| *last > mark);
            if newer || !unused.contains(&reference) {
                continue;
            }
            // Still mounted below a session that is on its way out: at the next look.
            if unmount_at(&self.place(&manifest), TRIES).is_ok() {
                state.ready.remove(&reference);
                self.folder.end_lease(&manifest, &self.engine)?;
                tracing::info!(image = reference, "no sandbox uses it any more");
            }
        }
        Ok(())
    }

    /// Unmounts everything. Leases stay.
    ///
    /// # Errors
    /// `ResourceBusy` while a session uses an image.
    pub(crate) fn close(&self) -> io::Result<()> {
        let mut state = self.state();
        state.ready.clear();
        for entry in std::fs::read_dir(&self.root).map_err(|e| at(self.root.display(), e))? {
            unmount_at(&entry?.path(), TRIES)?;
        }
        Ok(())
    }
}

fn is_mounted(place: &Path) -> bool {
    rustix::fs::statfs(place).is_ok_and(|stat| stat.f_type.cast_unsigned() == EROFS_MAGIC)
}

/// Unmounts and removes the folder, if there is one.
fn unmount_at(place: &Path, tries: u32) -> io::Result<()> {
    for left in (0..tries).rev() {
        if !is_mounted(place) {
            break;
        }
        match unmount(place, UnmountFlags::NOFOLLOW) {
            Err(rustix::io::Errno::BUSY) if left > 0 => {
                std::thread::sleep(Duration::from_millis(25));
            }
            other => other.map_err(|e| at(format!("unmount {}", place.display()), e))?,
        }
    }
    match std::fs::remove_dir(place) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(at(place.display(), e)),
        _ => Ok(()),
    }
}

/// Mounts the file itself, without a loop device.
fn mount(file: &Path, place: &Path) -> io::Result<()> {
    let name = file.display();
    let fs = fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC)
        .map_err(|e| at("this kernel has no EROFS (try modprobe erofs)", e))?;
    fsconfig_set_string(fs.as_fd(), "source", file).map_err(|e| at(&name, e))?;
    fsconfig_set_flag(fs.as_fd(), "ro").map_err(|e| at(&name, e))?;
    fsconfig_create(fs.as_fd()).map_err(|e| {
        let said = log_of(fs.as_fd());
        let why = match e {
            rustix::io::Errno::NOTBLK => {
                "this kernel mounts EROFS from devices only: Linux 6.12 with \
                 CONFIG_EROFS_FS_BACKED_BY_FILE is needed"
            }
            rustix::io::Errno::INVAL | rustix::io::Errno::UCLEAN | rustix::io::Errno::OPNOTSUPP => {
                "it is damaged, or of a kind that this kernel does not know: remove it with `bivouac image \
                 rm`, then build it again"
            }
            _ => "it cannot be mounted",
        };
        at(format!("{name}: {why}{said}"), e)
    })?;
    // Set-user-id programs count inside, by the overlay's own flags, and never out here.
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    let mount =
        fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).map_err(|e| at(&name, e))?;
    move_mount(mount.as_fd(), "", CWD, place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(|e| at(place.display(), e))
}

/// What the kernel wrote about the mount, if anything.
fn log_of(fs: std::os::fd::BorrowedFd<'_>) -> String {
    let mut text = String::new();
    let mut line = [0u8; 1024];
    while let Ok(length @ 1..) = rustix::io::read(fs, &mut line) {
        let said = String::from_utf8_lossy(&line[..length]);
        text.push_str(&format!(" ({})", said.trim().trim_start_matches("e ")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with one image of one file, and the data folder of an engine.
    struct Bed {
        _dir: tempfile::TempDir,
        images: ImageMounts,
        manifest: Manifest,
    }

    fn run(program: &str, args: &[&Path]) {
        let done = std::process::Command::new(program).args(args).output().unwrap();
        assert!(done.status.success(), "{program}: {}", String::from_utf8_lossy(&done.stderr));
    }

    impl Bed {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let (tree, file) = (dir.path().join("tree"), dir.path().join("made"));
            std::fs::create_dir(&tree).unwrap();
            std::fs::write(tree.join("hello"), "from the image").unwrap();
            run("mkfs.erofs", &[&file, &tree]);
            let images = dir.path().join("images");
            let folder = ImageFolder::new(&images);
            folder.ensure().unwrap();
            let manifest = Manifest {
                name: "universal".to_owned(),
                digest: format!("blake3:{}", "a".repeat(64)),
                bytes: std::fs::metadata(&file).unwrap().len(),
                built_at: 1,
                recipe: String::new(),
                architecture: String::new(),
                debian: String::new(),
                default_runtime: String::new(),
                runtimes: BTreeMap::new(),
                tools: BTreeMap::new(),
                oci: None,
            };
            folder.publish(&manifest, &file).unwrap();
            let data = dir.path().join("data");
            std::fs::create_dir(&data).unwrap();
            let images = ImageMounts::open(&images, &data, "engine").unwrap();
            Self { _dir: dir, images, manifest }
        }

        fn leased(&self) -> bool {
            !self.images.folder.leases(&self.manifest).unwrap().is_empty()
        }
    }

    impl Drop for Bed {
        fn drop(&mut self) {
            let _ = self.images.close();
        }
    }

    #[test]
    fn an_image_is_mounted_once_and_kept_while_it_is_needed() {
        let bed = Bed::new();
        let reference = bed.manifest.reference();
        assert_eq!(bed.images.find("universal").unwrap().as_ref(), Some(&bed.manifest));
        assert_eq!(bed.images.mounted_tree(&reference), None);
        assert!(!bed.leased(), "a look keeps nothing");
        let tree = bed.images.tree(&reference).unwrap().unwrap();
        assert_eq!(std::fs::read_to_string(tree.join("hello")).unwrap(), "from the image");
        assert!(std::fs::write(tree.join("hello"), "x").is_err(), "read-only");
        assert_eq!(bed.images.mounted_tree(&reference), Some(tree.clone()));
        assert_eq!(bed.images.tree(&reference).unwrap(), Some(tree.clone()));
        assert!(bed.leased());

        // Another engine's start on the same folder finds the mount.
        let data = bed.images.data_dir.clone();
        let next = ImageMounts::open(bed.images.folder.path(), &data, "engine").unwrap();
        assert_eq!(next.tree(&reference).unwrap(), Some(tree.clone()));

        // Asked for since the mark: kept.
        let (mark, kept) = bed.images.kept().unwrap();
        assert_eq!(kept, std::slice::from_ref(&reference));
        bed.images.mounted_tree(&reference).unwrap();
        bed.images.release(mark, &kept).unwrap();
        assert!(is_mounted(&tree) && bed.leased());
        // Used, or of no interest: kept.
        let (mark, kept) = bed.images.kept().unwrap();
        bed.images.release(mark, &[]).unwrap();
        assert!(is_mounted(&tree) && bed.leased());
        bed.images.release(mark, &kept).unwrap();
        assert!(!is_mounted(&tree) && !bed.leased());
        assert!(!tree.exists());
        assert_eq!(bed.images.mounted_tree(&reference), None);
    }

    #[test]
    fn one_that_is_busy_is_let_go_of_later() {
        let bed = Bed::new();
        let reference = bed.manifest.reference();
        let tree = bed.images.tree(&reference).unwrap().unwrap();
        let busy = std::fs::File::open(tree.join("hello")).unwrap();
        let (mark, kept) = bed.images.kept().unwrap();
        bed.images.release(mark, &kept).unwrap();
        assert!(is_mounted(&tree) && bed.leased(), "mounted is leased");
        drop(busy);
        bed.images.release(mark, &kept).unwrap();
        assert!(!bed.leased());
    }

    #[test]
    fn what_is_no_file_system_is_told_in_words() {
        let bed = Bed::new();
        let reference = bed.manifest.reference();
        let file = bed.images.folder.file(&bed.manifest);
        std::fs::write(&file, vec![7; usize::try_from(bed.manifest.bytes).unwrap()]).unwrap();
        let said = bed.images.tree(&reference).unwrap_err().to_string();
        assert!(said.contains("damaged") && said.contains("build it again"), "{said}");
        std::fs::remove_file(&file).unwrap();
        let said = bed.images.tree(&reference).unwrap_err().to_string();
        assert!(said.contains("is gone"), "{said}");
        assert_eq!(bed.images.tree("universal@blake3:00").unwrap(), None);
    }

    #[test]
    fn the_list_follows_the_folder() {
        let bed = Bed::new();
        assert_eq!(bed.images.list().unwrap().len(), 1);
        bed.images.folder.remove(&bed.manifest).unwrap();
        assert!(bed.images.list().unwrap().is_empty());
    }
}
