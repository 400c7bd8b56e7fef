//! Certificates for the inside of a sandbox: a layer of its root between what it writes and its image.
//!
//! Owns the folder of a session in the pool's `trust`, one tree per layer of the image, with the session's
//! authority at the places where distributions look for local ones, and the image's bundles with it at
//! their end. As a *lower* layer of the overlay it is under no path a mount, so that
//! `update-ca-certificates` can rename its result into place, and nothing of it is ever in the upper:
//! no snapshot holds it. Reading a bundle costs memory that the kernel can take back; a bundle shares its
//! blocks with the image's copy, so making one writes a page.
//!
//! When the guest's root makes the bundle anew, its own is in the upper and would hide the layer's. So
//! at the next launch the guest's is put aside ([`ASIDE`]), in the same folder, and is what the layer's
//! is made of. The places of authorities have a twin with the ending that `update-ca-certificates`
//! takes, so a bundle made inside has the session's authority too; that one is in the upper, at the wish
//! of the sandbox's root, and a later launch leaves it out.
//!
//! Invariant: names in the upper and in the image are the guest's or the image's: they are resolved below
//! the tree that they are in, and never through a link in the upper. Called by the launch.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};

mod jks;

use super::rootfs::{at, upper_name};
use crate::keeper::Trust;
use crate::proto::Layer;

/// Places of the session's authority.
const ANCHORS: &[&str] = &[
    "/etc/pki/ca-trust/source/anchors/vercel-proxy-ca.pem",
    "/usr/local/share/ca-certificates/vercel-proxy-ca.pem",
    // Debian's and Alpine's tool takes this ending alone.
    "/usr/local/share/ca-certificates/vercel-proxy-ca.crt",
];
/// Bundles of distributions, where the image has them; links lead to the file itself.
const BUNDLES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/var/lib/ca-certificates/ca-bundle.pem",
];
/// Java's stores of distributions. One is made only where there is one: nobody else reads 200 KB of it.
const STORES: &[&str] = &[
    "/etc/ssl/certs/java/cacerts",
    "/etc/pki/ca-trust/extracted/java/cacerts",
    "/var/lib/ca-certificates/java-cacerts",
];
/// Aliases of certificates that sessions put into stores: by this code, and by Debian's tool, which names
/// them by the file of the place above.
const OURS: &[&str] = &["bivouac-session-", "bivouac-operator-", "vercel-proxy-ca"];
/// Ending of a guest's own bundle that was put aside.
const ASIDE: &str = ".own";
/// A bundle that is longer stays as it is: no host trusts so many.
const MAX_BUNDLE: u64 = 4 << 20;
/// In front of the session's authority, so that a later session finds it in a bundle made inside.
const MARK: &str = "# Authority of one session of this sandbox\n";
/// Mode of a folder, but for those that the image has with another one.
const FOLDER: u32 = 0o755;
/// Copies of bundles end at a multiple of this.
const BLOCK: usize = 4096;
/// Folder of copies of images' bundles, in the pool.
const BASES: &str = "bases";

/// Where the layers are.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    /// The pool's folder for them.
    pub trust: &'a Path,
    /// The session's name.
    pub session: &'a str,
    /// The session's subvolume.
    pub upper: &'a Path,
}

/// Makes a tree for each layer of the image that needs one. Answers their paths, in the order of the
/// layers.
///
/// # Errors
/// With the file's name. What a guest has made impossible is no error: it is its own loss.
pub(crate) fn make(
    place: &Place<'_>,
    layers: &[Layer],
    trust: &Trust,
) -> io::Result<Vec<Option<String>>> {
    let folder = place.trust.join(place.session);
    make_folder(CWD, &folder)?;
    let authority = [MARK.as_bytes(), &ended(&trust.session)].concat();
    let tail = [&ended(&trust.extra)[..], &authority].concat();
    // Some clients are told of this file alone, beside roots of their own: it holds the operator's too.
    let anchors = [&authority[..], &ended(&trust.extra)].concat();
    let mut trees = Trees { place, layers, folder: folder.clone(), made: BTreeMap::new() };
    let mut system = None;
    for anchor in ANCHORS {
        let (index, name) = locate(layers, anchor);
        let tree = trees.tree(index)?;
        if let Some(name) = tree.canonical_new(name)? {
            // The tool that reads the other one wants a single certificate.
            let text = if anchor.ends_with(".pem") { &anchors } else { &authority };
            tree.file(&name, |file| write_all(file, text, 0))?;
        }
    }
    for bundle in BUNDLES {
        let (index, name) = locate(layers, bundle);
        let aside = trees.aside(index, name);
        let tree = trees.tree(index)?;
        if let Some(own) = aside {
            let own_text = ended(&without_mark(&own.text));
            let text = [&own_text[..], &tail].concat();
            tree.file(&own.name, |file| write_all(file, &text, 0))?;
            system.get_or_insert(System::Text(own_text));
        } else if let Some((base, name)) = tree.canonical(name)? {
            let base = cached(&place.trust.join(BASES), &base)?;
            tree.file(&name, |file| extend(file, &base, &tail))?;
            system.get_or_insert(System::File(base));
        }
    }
    for store in STORES {
        trees.java(store, system.as_ref(), trust)?;
    }
    for (folder, stat) in trees.made.values().flat_map(|tree| tree.copies.take()) {
        same(folder.as_fd(), &stat)?;
    }
    Ok((0..layers.len())
        .map(|index| trees.made.get(&index).map(|tree| tree.path.to_string_lossy().into_owned()))
        .collect())
}

/// The layer that a path is in, and the path below it.
fn locate<'a>(layers: &[Layer], path: &'a str) -> (usize, &'a str) {
    let inside = |layer: &Layer| {
        let prefix = layer.at.trim_end_matches('/');
        let rest = path.strip_prefix(prefix)?.strip_prefix('/')?;
        Some((prefix.len(), rest))
    };
    let best = layers
        .iter()
        .enumerate()
        .filter_map(|(index, layer)| inside(layer).map(|(length, rest)| (length, index, rest)));
    best.max_by_key(|(length, ..)| *length).map_or((0, path), |(_, index, rest)| (index, rest))
}

/// The trees of a session.
struct Trees<'a> {
    place: &'a Place<'a>,
    layers: &'a [Layer],
    folder: std::path::PathBuf,
    made: BTreeMap<usize, Tree>,
}

/// The bundle that programs of this sandbox use, without what the session adds.
enum System {
    Text(Vec<u8>),
    File(OwnedFd),
}

impl System {
    fn certificates(&self) -> io::Result<Vec<jks::Entry>> {
        match self {
            Self::Text(text) => Ok(jks::of_pem(text, "system-")),
            Self::File(file) => Ok(jks::of_pem(&read_all(file.as_fd(), MAX_BUNDLE)?, "system-")),
        }
    }
}

/// One tree, and the layer of the image that it goes over.
struct Tree {
    path: std::path::PathBuf,
    root: OwnedFd,
    lower: OwnedFd,
    /// Folders as in the image, and what they are there.
    copies: RefCell<Vec<(OwnedFd, Stat)>>,
}

/// A guest's own bundle.
struct Own {
    name: String,
    text: Vec<u8>,
}

impl Trees<'_> {
    fn tree(&mut self, index: usize) -> io::Result<&Tree> {
        use std::collections::btree_map::Entry;
        match self.made.entry(index) {
            Entry::Occupied(tree) => Ok(tree.into_mut()),
            Entry::Vacant(empty) => {
                let path = self.folder.join(index.to_string());
                make_folder(CWD, &path)?;
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let open = |path: &Path| {
                    rustix::fs::open(path, flags, Mode::empty())
                        .map_err(|e| at(&path.to_string_lossy(), &e.into()))
                };
                let lower = open(Path::new(&self.layers[index].lower))?;
                let root = open(&path)?;
                let stat = rustix::fs::fstat(&lower)?;
                let copies = RefCell::new(vec![(root.try_clone()?, stat)]);
                Ok(empty.insert(Tree { root, lower, path, copies }))
            }
        }
    }

    /// Makes Java's store, if there is one.
    fn java(&mut self, store: &str, system: Option<&System>, trust: &Trust) -> io::Result<()> {
        let (index, name) = locate(self.layers, store);
        let own = self.aside(index, name);
        let tree = self.tree(index)?;
        // The name is the image's where it has the store, and this one where only the guest has it.
        let (name, image) = match (tree.canonical(name)?, &own) {
            (Some((file, name)), _) => (name, Some(file)),
            (None, Some(own)) => (own.name.clone(), None),
            (None, None) => return Ok(()),
        };
        let mut all = match system {
            Some(system) => system.certificates()?,
            None => Vec::new(),
        };
        let theirs = match (&own, &image) {
            (Some(own), _) => jks::read(&own.text),
            // What the image's says beside its bundle is the same, or was taken back.
            (None, Some(image)) if all.is_empty() => {
                jks::read(&read_all(image.as_fd(), MAX_BUNDLE)?)
            }
            _ => None,
        };
        all.extend(theirs.unwrap_or_default().into_iter().filter(|entry| {
            let alias = entry.alias.as_str();
            !OURS.iter().any(|ours| alias.contains(ours))
        }));
        if all.is_empty() {
            // In a form that is not known here, and nothing else to make it of: better as it is.
            let Some(own) = own else { return Ok(()) };
            return tree.file(&name, |file| write_all(file, &own.text, 0));
        }
        all.extend(jks::of_pem(&trust.extra, "bivouac-operator-"));
        all.extend(jks::of_pem(&trust.session, "bivouac-session-"));
        let text = jks::write(&all, now_ms());
        tree.file(&name, |file| write_all(file, &text, 0))
    }

    /// A bundle that the guest made, put aside now or by an earlier launch.
    fn aside(&self, index: usize, name: &str) -> Option<Own> {
        let (folder, file) = name.rsplit_once('/')?;
        let upper = self.place.upper.join(upper_name(index)).join("");
        let upper = rustix::fs::open(
            &upper,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .ok()?;
        // The upper is the guest's: no link in it is followed.
        let strict = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat2(&upper, folder, flags, Mode::empty(), strict).ok()?;
        let aside = format!("{file}{ASIDE}");
        if is_own(folder.as_fd(), file) {
            rustix::fs::renameat(&folder, file, &folder, &aside).ok()?;
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let own = rustix::fs::openat(&folder, &aside, flags, Mode::empty()).ok()?;
        let stat = rustix::fs::fstat(&own).ok()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return None;
        }
        let text = read_all(own.as_fd(), MAX_BUNDLE).ok()?;
        Some(Own { name: name.to_owned(), text })
    }
}

impl Tree {
    /// A file of the image, and its name without links.
    fn canonical(&self, name: &str) -> io::Result<Option<(OwnedFd, String)>> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let Ok(file) = rustix::fs::openat2(&self.lower, name, flags, Mode::empty(), inside) else {
            return Ok(None);
        };
        let stat = rustix::fs::fstat(&file)?;
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !regular || stat.st_size as u64 > MAX_BUNDLE {
            return Ok(None);
        }
        let name = self.name_of(file.as_fd())?;
        Ok(Some((file, name)))
    }

    /// The name without links of a file that need not exist.
    fn canonical_new(&self, name: &str) -> io::Result<Option<String>> {
        let (mut folder, mut rest) = match name.rsplit_once('/') {
            Some((folder, file)) => (folder, file.to_owned()),
            None => return Ok(Some(name.to_owned())),
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        loop {
            match rustix::fs::openat2(&self.lower, folder, flags, Mode::empty(), inside) {
                Ok(found) => {
                    let stat = rustix::fs::fstat(&found)?;
                    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                        return Ok(None);
                    }
                    let above = self.name_of(found.as_fd())?;
                    return Ok(Some(format!("{above}/{rest}").trim_start_matches('/').to_owned()));
                }
                Err(rustix::io::Errno::NOENT) => match folder.rsplit_once('/') {
                    Some((above, last)) => {
                        rest = format!("{last}/{rest}");
                        folder = above;
                    }
                    None => return Ok(Some(format!("{folder}/{rest}"))),
                },
                // A loop of links, a file on the way.
                Err(_) => return Ok(None),
            }
        }
    }

    fn name_of(&self, found: BorrowedFd<'_>) -> io::Result<String> {
        let path = |fd: BorrowedFd<'_>| {
            let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
            std::fs::read_link(link).map(|path| path.to_string_lossy().into_owned())
        };
        let (root, found) = (path(self.lower.as_fd())?, path(found)?);
        let name = found.strip_prefix(root.trim_end_matches('/'));
        let name = name.map(|name| name.trim_start_matches('/').to_owned());
        name.ok_or_else(|| io::Error::other(format!("{found} is not below {root}")))
    }

    /// Makes a file, and the folders above it as the image has them, and fills it. One that is there
    /// already stays: two names of one bundle.
    fn file(
        &self,
        name: &str,
        fill: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        let (folder, file) = name.rsplit_once('/').unwrap_or(("", name));
        let mut parent = self.root.try_clone()?;
        let mut above = String::new();
        for part in folder.split('/').filter(|part| !part.is_empty()) {
            if !above.is_empty() {
                above.push('/');
            }
            above.push_str(part);
            let fresh = make_folder(parent.as_fd(), Path::new(part))?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            parent = rustix::fs::openat(&parent, part, flags, Mode::empty())?;
            // The uppermost layer says how a folder is.
            if fresh
                && let Ok(stat) = rustix::fs::statat(&self.lower, &above, AtFlags::SYMLINK_NOFOLLOW)
            {
                self.copies.borrow_mut().push((parent.try_clone()?, stat));
            }
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o644);
        match rustix::fs::openat(&parent, file, flags, mode) {
            Err(rustix::io::Errno::EXIST) => Ok(()),
            Err(e) => Err(at(name, &e.into())),
            Ok(made) => {
                rustix::fs::fchmod(&made, mode)?;
                fill(made.as_fd()).map_err(|e| at(name, &e))
            }
        }
    }
}

/// Owner, mode and time of a folder, as the image has it. When all is in it: that changes its time.
fn same(folder: BorrowedFd<'_>, of: &Stat) -> io::Result<()> {
    use rustix::fs::{Gid, Timespec, Timestamps, Uid};
    // Fresh ones are root's, as nearly all are: each call costs the launch.
    if (of.st_uid, of.st_gid) != (0, 0) {
        let (uid, gid) = (Uid::from_raw(of.st_uid), Gid::from_raw(of.st_gid));
        rustix::fs::fchown(folder, Some(uid), Some(gid))?;
    }
    if of.st_mode & 0o7777 != FOLDER {
        rustix::fs::fchmod(folder, Mode::from_raw_mode(of.st_mode & 0o7777))?;
    }
    let time = Timespec { tv_sec: of.st_mtime, tv_nsec: of.st_mtime_nsec as _ };
    rustix::fs::futimens(folder, &Timestamps { last_access: time, last_modification: time })?;
    Ok(())
}

/// Whether the guest has a whole file of its own there: not a link, not the copy of attributes alone
/// that a change of mode leaves.
fn is_own(folder: BorrowedFd<'_>, file: &str) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::openat(folder, file, flags, Mode::empty()) else { return false };
    let regular = rustix::fs::fstat(&file)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
    let metacopy = rustix::fs::fgetxattr(&file, "trusted.overlay.metacopy", &mut [0u8; 64][..]);
    regular && metacopy == Err(rustix::io::Errno::NODATA)
}

/// Makes a folder; answers whether it was not there.
fn make_folder(below: BorrowedFd<'_>, name: &Path) -> io::Result<bool> {
    match rustix::fs::mkdirat(below, name, Mode::from_raw_mode(FOLDER)) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::EXIST) => Ok(false),
        Err(e) => Err(at(&name.to_string_lossy(), &e.into())),
    }
}

/// Now, ms since the epoch.
fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or_default()
}

/// With a line end at the end, unless it is empty.
fn ended(text: &[u8]) -> Vec<u8> {
    let mut text = text.to_vec();
    if text.last().is_some_and(|last| *last != b'\n') {
        text.push(b'\n');
    }
    text
}

/// Without the authorities of earlier sessions.
fn without_mark(text: &[u8]) -> Vec<u8> {
    const END: &[u8] = b"-----END CERTIFICATE-----";
    let find = |text: &[u8], what: &[u8]| text.windows(what.len()).position(|w| w == what);
    let (mut out, mut rest) = (Vec::with_capacity(text.len()), text);
    while let Some(start) = find(rest, MARK.as_bytes()) {
        out.extend_from_slice(&rest[..start]);
        let Some(end) = find(&rest[start..], END) else { return out };
        rest = &rest[start + end + END.len()..];
        rest = rest.strip_prefix(b"\n").unwrap_or(rest);
    }
    out.extend_from_slice(rest);
    out
}

/// A copy of an image's bundle in the pool, filled with line ends to whole blocks: what is written
/// behind them in a copy has nothing to be read first, which would wait for the disk.
fn cached(bases: &Path, bundle: &OwnedFd) -> io::Result<OwnedFd> {
    let stat = rustix::fs::fstat(bundle)?;
    let name = format!(
        "{:x}-{:x}-{:x}-{:x}.{:x}",
        stat.st_dev, stat.st_ino, stat.st_size, stat.st_ctime, stat.st_ctime_nsec
    );
    let (flags, file) = (OFlags::RDONLY | OFlags::CLOEXEC, bases.join(name));
    if let Ok(base) = rustix::fs::open(&file, flags, Mode::empty()) {
        return Ok(base);
    }
    let mut text = ended(&read_all(bundle.as_fd(), MAX_BUNDLE)?);
    text.resize(text.len().next_multiple_of(BLOCK), b'\n');
    // Several launches may be here at once.
    let beside = file.with_extension(format!("new-{}", std::process::id()));
    std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, &file))?;
    Ok(rustix::fs::open(&file, flags, Mode::empty())?)
}

/// Fills a file with another one, whose blocks it shares where the file system can, and a tail.
fn extend(file: BorrowedFd<'_>, base: &OwnedFd, tail: &[u8]) -> io::Result<()> {
    let length = rustix::fs::fstat(base)?.st_size as u64;
    if rustix::fs::ioctl_ficlone(file, base).is_err() {
        write_all(file, &read_all(base.as_fd(), MAX_BUNDLE)?, 0)?;
    }
    write_all(file, tail, length)
}

/// From the beginning, wherever the file was read before.
fn read_all(file: BorrowedFd<'_>, most: u64) -> io::Result<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::from(file.try_clone_to_owned()?);
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    let size = usize::try_from(file.metadata()?.len()).unwrap_or(most);
    let mut text = vec![0; size.min(most)];
    let mut done = 0;
    while done < text.len() {
        match file.read_at(&mut text[done..], done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    text.truncate(done);
    Ok(text)
}

fn write_all(file: BorrowedFd<'_>, bytes: &[u8], at: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(file, &bytes[done..], at + done as u64)? {
            0 => return Err(io::ErrorKind::StorageFull.into()),
            n => done += n,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(path: &Path) -> String {
        path.to_string_lossy().into_owned()
    }

    fn write(path: &Path, content: &str) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nsession\n-----END CERTIFICATE-----\n";

    /// The image's bundle, as a whole block.
    fn image() -> String {
        format!("image{}", "\n".repeat(BLOCK - 5))
    }

    fn trust() -> Trust {
        Trust { session: CERTIFICATE.into(), extra: b"extra".to_vec() }
    }

    /// A folder with an image of two layers, an upper, and the pool's folder for trust.
    struct World(tempfile::TempDir);

    impl World {
        fn new() -> Self {
            let world = Self(tempfile::tempdir().unwrap());
            for name in ["root/etc/ssl/certs", "usr", "upper/u0", "upper/u1", "trust/bases"] {
                std::fs::create_dir_all(world.at(name)).unwrap();
            }
            write(&world.at("root/etc/ssl/certs/ca-certificates.crt"), "image");
            std::os::unix::fs::symlink(
                "certs/ca-certificates.crt",
                world.at("root/etc/ssl/cert.pem"),
            )
            .unwrap();
            world
        }

        fn at(&self, name: &str) -> std::path::PathBuf {
            self.0.path().join(name)
        }

        fn make(&self, session: &str) -> Vec<Option<String>> {
            let layers = [("root", "/"), ("usr", "/usr")]
                .map(|(lower, at)| Layer { lower: text(&self.at(lower)), at: at.to_owned() });
            let (trust_folder, upper) = (self.at("trust"), self.at("upper"));
            let place = Place { trust: &trust_folder, session, upper: &upper };
            make(&place, &layers, &trust()).unwrap()
        }

        fn read(&self, name: &str) -> String {
            std::fs::read_to_string(self.at(name)).unwrap()
        }
    }

    #[test]
    fn bundles_and_anchors_are_in_the_layer_that_they_belong_to() {
        let world = World::new();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o2775);
        std::fs::create_dir_all(world.at("usr/local/share")).unwrap();
        std::fs::set_permissions(world.at("usr/local/share"), mode).unwrap();
        let made = world.make("one");
        assert_eq!(
            made,
            [Some(text(&world.at("trust/one/0"))), Some(text(&world.at("trust/one/1")))]
        );
        let bundle = world.read("trust/one/0/etc/ssl/certs/ca-certificates.crt");
        assert_eq!(bundle, format!("{}extra\n{MARK}{CERTIFICATE}", image()));
        // The link of the image leads there; a file in its place would hide it.
        assert!(!world.at("trust/one/0/etc/ssl/cert.pem").exists());
        let anchors = [
            "0/etc/pki/ca-trust/source/anchors/vercel-proxy-ca.pem",
            "1/local/share/ca-certificates/vercel-proxy-ca.pem",
            "1/local/share/ca-certificates/vercel-proxy-ca.crt",
        ];
        for anchor in anchors {
            let extra = if anchor.ends_with(".pem") { "extra\n" } else { "" };
            assert_eq!(
                world.read(&format!("trust/one/{anchor}")),
                format!("{MARK}{CERTIFICATE}{extra}")
            );
        }
        let folders = ["root/etc/ssl/certs", "trust/one/0/etc/ssl/certs"];
        let stats = folders.map(|name| rustix::fs::stat(world.at(name)).unwrap());
        assert_eq!(stats[0].st_mtime, stats[1].st_mtime);
        assert_eq!(stats[0].st_mtime_nsec, stats[1].st_mtime_nsec);
        let share = rustix::fs::stat(world.at("trust/one/1/local/share")).unwrap();
        assert_eq!(share.st_mode & 0o7777, 0o2775);
        // Again, out of the copy.
        assert_eq!(
            world.make("two"),
            [0, 1].map(|n| Some(text(&world.at(&format!("trust/two/{n}")))))
        );
        assert_eq!(world.read("trust/two/0/etc/ssl/certs/ca-certificates.crt"), bundle);
        assert_eq!(std::fs::read_dir(world.at("trust/bases")).unwrap().count(), 1);
    }

    #[test]
    fn a_bundle_of_the_guest_is_put_aside_and_used() {
        let world = World::new();
        let own = world.at("upper/u0/etc/ssl/certs/ca-certificates.crt");
        write(&own, &format!("mine\n{MARK}{}more", CERTIFICATE.replace("session", "earlier")));
        for session in ["one", "two"] {
            world.make(session);
            let bundle = format!("trust/{session}/0/etc/ssl/certs/ca-certificates.crt");
            assert_eq!(world.read(&bundle), format!("mine\nmore\nextra\n{MARK}{CERTIFICATE}"));
            assert!(!own.exists() && own.with_extension("crt.own").exists());
        }
        // A newer one takes its place.
        write(&own, "newer");
        world.make("three");
        let bundle = world.read("trust/three/0/etc/ssl/certs/ca-certificates.crt");
        assert_eq!(bundle, format!("newer\nextra\n{MARK}{CERTIFICATE}"));
    }

    #[test]
    fn links_of_the_guest_lead_nowhere() {
        let world = World::new();
        let secret = world.at("secret");
        std::fs::create_dir(&secret).unwrap();
        std::fs::write(secret.join("ca-certificates.crt"), "host").unwrap();
        let folder = world.at("upper/u0/etc/ssl/certs");
        // The folder is a link out; then the file is.
        std::fs::create_dir_all(folder.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(&secret, &folder).unwrap();
        world.make("one");
        assert!(secret.join("ca-certificates.crt").exists());
        std::fs::remove_file(&folder).unwrap();
        std::fs::create_dir(&folder).unwrap();
        for name in ["ca-certificates.crt", "ca-certificates.crt.own"] {
            std::os::unix::fs::symlink(secret.join("ca-certificates.crt"), folder.join(name))
                .unwrap();
        }
        world.make("two");
        for session in ["one", "two"] {
            let bundle = format!("trust/{session}/0/etc/ssl/certs/ca-certificates.crt");
            assert_eq!(world.read(&bundle), format!("{}extra\n{MARK}{CERTIFICATE}", image()));
        }
    }

    #[test]
    fn an_image_without_bundles_has_the_anchors_alone() {
        let world = World::new();
        std::fs::remove_dir_all(world.at("root/etc/ssl")).unwrap();
        // A file where a folder of an anchor should be.
        write(&world.at("root/etc/pki"), "");
        world.make("one");
        assert!(!world.at("trust/one/0/etc").exists());
        assert!(world.at("trust/one/1/local/share/ca-certificates/vercel-proxy-ca.pem").exists());
    }

    /// What has the form of a certificate, and says which one it is.
    fn der(what: &str) -> Vec<u8> {
        [&[0x30, what.len() as u8], what.as_bytes()].concat()
    }

    fn pem(what: &str) -> String {
        use base64::Engine as _;
        let text = base64::engine::general_purpose::STANDARD.encode(der(what));
        format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
    }

    impl World {
        fn make_with_java(&self, session: &str) {
            let layers = [Layer { lower: text(&self.at("root")), at: "/".to_owned() }];
            let (trust_folder, upper) = (self.at("trust"), self.at("upper"));
            let place = Place { trust: &trust_folder, session, upper: &upper };
            let trust = Trust { session: pem(session).into(), extra: pem("operator").into() };
            make(&place, &layers, &trust).unwrap();
        }

        /// The certificates of a session's store.
        fn store(&self, session: &str) -> Vec<String> {
            let name = format!("trust/{session}/0/etc/ssl/certs/java/cacerts");
            let entries = jks::read(&std::fs::read(self.at(&name)).unwrap()).unwrap();
            entries.iter().map(|e| String::from_utf8_lossy(&e.der[2..]).into_owned()).collect()
        }
    }

    #[test]
    fn java_has_a_store_of_the_bundle_where_there_is_java() {
        let world = World::new();
        write(
            &world.at("root/etc/ssl/certs/ca-certificates.crt"),
            &format!("{}{}", pem("a"), pem("b")),
        );
        world.make_with_java("none");
        assert!(!world.at("trust/none/0/etc/ssl/certs/java").exists());
        // In the image: what it holds beside the bundle was taken back.
        write(&world.at("root/etc/ssl/certs/java/cacerts"), "image's own");
        world.make_with_java("one");
        assert_eq!(world.store("one"), ["a", "b", "operator", "one"]);
        // Changed by the guest: it holds what the session put there, more, and a mark of Debian's tool.
        let entry =
            |alias: &str, what: &str| jks::Entry { alias: alias.to_owned(), der: der(what) };
        let mut own =
            jks::read(&std::fs::read(world.at("trust/one/0/etc/ssl/certs/java/cacerts")).unwrap())
                .unwrap();
        own.extend([entry("company", "company"), entry("debian:vercel-proxy-ca.pem", "earlier")]);
        let path = world.at("upper/u0/etc/ssl/certs/java/cacerts");
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, jks::write(&own, 0)).unwrap();
        for session in ["two", "three"] {
            world.make_with_java(session);
            assert_eq!(world.store(session), ["a", "b", "company", "operator", session]);
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_store_of_java_in_another_form_gives_way_to_the_bundle_or_stays() {
        let world = World::new();
        let path = world.at("upper/u0/etc/ssl/certs/java/cacerts");
        write(&path, "PKCS#12");
        // No bundle: it is all that there is.
        world.make_with_java("one");
        let made = "trust/one/0/etc/ssl/certs/java/cacerts";
        assert_eq!(world.read(made), "PKCS#12");
        write(&world.at("root/etc/ssl/certs/ca-certificates.crt"), &pem("a"));
        world.make_with_java("two");
        assert_eq!(world.store("two"), ["a", "operator", "two"]);
        // Only the image has one, in JKS, and no bundle.
        let world = World::new();
        let image = world.at("root/etc/ssl/certs/java/cacerts");
        write(&image, "");
        let entry = jks::Entry { alias: "i".to_owned(), der: der("image") };
        std::fs::write(&image, jks::write(&[entry], 0)).unwrap();
        world.make_with_java("three");
        assert_eq!(world.store("three"), ["image", "operator", "three"]);
    }
}
