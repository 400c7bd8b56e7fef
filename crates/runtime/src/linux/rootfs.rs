//! The root of a sandbox, from the host's side: overlays and /dev as detached mounts, which init
//! puts in place inside.
//!
//! Invariant: every mount's ids are mapped, nothing is attached in the host's mount namespace, and
//! no option holds a host path (layers are handed over as descriptors). Recipes: substrate.md §4.3.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_fd,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, open_tree,
};

use crate::proto::Layer;
use crate::sys;

/// Character devices of every sandbox: name, major, minor. `fuse` and `net/tun` are there so that
/// fuse-overlayfs and taps of nested containers work; both are safe in a user namespace.
const DEVICES: &[(&str, u32, u32)] = &[
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
    ("fuse", 10, 229),
    ("net/tun", 10, 200),
];

const LINKS: &[(&str, &str)] = &[
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Detached mounts and the place of each inside.
pub(crate) type Mounts = Vec<(String, OwnedFd)>;

/// Mounts the layers and /dev.
///
/// # Errors
/// With the step and the layer.
pub(crate) fn mounts(upper: &str, layers: &[Layer], userns: BorrowedFd<'_>) -> io::Result<Mounts> {
    let session = clone_tree(upper)?;
    sys::idmap_mount(session.as_fd(), userns).map_err(|e| at("map the upper's ids", &e))?;
    let mut out = Vec::with_capacity(layers.len() + 1);
    for (index, layer) in layers.iter().enumerate() {
        let mount = overlay(session.as_fd(), index, layer, userns)
            .map_err(|e| at(&format!("overlay at {}", layer.at), &e))?;
        out.push((layer.at.clone(), mount));
    }
    out.push(("/dev".to_owned(), dev(userns).map_err(|e| at("/dev", &e))?));
    Ok(out)
}

/// Tries whether this kernel takes the layers of an overlay as descriptors of detached mounts, with a
/// folder of the pool as all of them. Older kernels refuse, and every launch would fail.
///
/// # Errors
/// A sentence for the operator.
pub(crate) fn probe(scratch: &std::path::Path) -> io::Result<()> {
    for name in ["lower", "u0", "w0"] {
        std::fs::create_dir_all(scratch.join(name))?;
    }
    let text = |path: &std::path::Path| path.to_string_lossy().into_owned();
    let tried = clone_tree(&text(scratch)).and_then(|session| {
        let lower = clone_tree(&text(&scratch.join("lower")))?;
        overlay_of(session.as_fd(), 0, lower.as_fd()).map(drop)
    });
    std::fs::remove_dir_all(scratch)?;
    tried.map_err(|e| {
        let text = format!(
            "this kernel cannot mount a sandbox's root (an overlay of detached mounts: {e}); a newer \
             one is needed, 6.18 is known to work"
        );
        io::Error::new(e.kind(), text)
    })
}

/// Name of a layer's upper folder in the session's subvolume.
pub(crate) fn upper_name(index: usize) -> String {
    format!("u{index}")
}

/// Name of a layer's work folder.
pub(crate) fn work_name(index: usize) -> String {
    format!("w{index}")
}

fn at(step: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{step}: {error}"))
}

fn clone_tree(path: &str) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(CWD, path, flags).map_err(|e| at(path, &e.into()))
}

fn overlay(
    session: BorrowedFd<'_>,
    index: usize,
    layer: &Layer,
    userns: BorrowedFd<'_>,
) -> io::Result<OwnedFd> {
    let lower = clone_tree(&layer.lower)?;
    sys::idmap_mount(lower.as_fd(), userns).map_err(|e| at("map the image's ids", &e))?;
    overlay_of(session, index, lower.as_fd())
}

/// The overlay of mounts that are ready.
fn overlay_of(session: BorrowedFd<'_>, index: usize, lower: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let folder = |name: String| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(session, &name, flags, Mode::empty())
            .map_err(|e| at(&name, &io::Error::from(e)))
    };
    let (upper, work) = (folder(upper_name(index))?, folder(work_name(index))?);
    let fs = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(fs.as_fd(), "source", "bivouac")?;
    fsconfig_set_fd(fs.as_fd(), "lowerdir+", lower)?;
    fsconfig_set_fd(fs.as_fd(), "upperdir", upper.as_fd())?;
    fsconfig_set_fd(fs.as_fd(), "workdir", work.as_fd())?;
    // Without `volatile` each copy-up syncs, and the end of the sandbox syncs the whole pool.
    fsconfig_set_flag(fs.as_fd(), "volatile")?;
    fsconfig_set_string(fs.as_fd(), "redirect_dir", "on")?;
    fsconfig_set_string(fs.as_fd(), "metacopy", "on")?;
    fsconfig_create(fs.as_fd())?;
    let mount = fsmount(
        fs.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_RELATIME,
    )?;
    // An overlay that cannot use its work folder mounts read-only without an error.
    let stat = rustix::fs::fstatvfs(&mount)?;
    if stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY) {
        return Err(io::Error::other("the overlay came up read-only: see the kernel's log"));
    }
    Ok(mount)
}

/// A /dev of the sandbox's own: its root may add to it, no other sandbox sees it.
fn dev(userns: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let fs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [("source", "dev"), ("size", "4m"), ("nr_inodes", "4096"), ("mode", "0755")]
    {
        fsconfig_set_string(fs.as_fd(), key, value)?;
    }
    fsconfig_create(fs.as_fd())?;
    let dev = fsmount(
        fs.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )?;
    for folder in ["pts", "shm", "mqueue", "net"] {
        rustix::fs::mkdirat(&dev, folder, Mode::from_raw_mode(0o755))?;
    }
    for &(name, major, minor) in DEVICES {
        let number = rustix::fs::makedev(major, minor);
        let mode = Mode::from_raw_mode(0o666);
        rustix::fs::mknodat(&dev, name, FileType::CharacterDevice, mode, number)?;
        // mknod obeys the umask.
        rustix::fs::chmodat(&dev, name, mode, AtFlags::empty())?;
    }
    for &(name, target) in LINKS {
        rustix::fs::symlinkat(target, &dev, name)?;
    }
    sys::idmap_mount(dev.as_fd(), userns)?;
    Ok(dev)
}
