//! The root of a sandbox, from the host's side: overlays and /dev as detached mounts, which init
//! puts in place inside.
//!
//! Invariant: every mount's ids are mapped, nothing is attached in the host's mount namespace, and
//! no option holds a host path (see [`overlay`]). Recipes: substrate.md §4.3.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, FileType, Mode};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_string,
    fsmount, fsopen, open_tree,
};

use super::overlay::{self, Way};
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

/// Read-only folders of one overlay, the uppermost first, and the place inside where it appears.
#[derive(Debug)]
pub(crate) struct Stack {
    pub lowers: Vec<String>,
    pub at: String,
}

/// Mounts the overlays and /dev.
///
/// # Errors
/// With the step and the layer.
pub(crate) fn mounts(
    way: Way,
    upper: &str,
    stacks: &[Stack],
    userns: BorrowedFd<'_>,
) -> io::Result<Mounts> {
    let mapped = |path: &str| {
        let tree = clone_tree(path)?;
        sys::idmap_mount(tree.as_fd(), userns)
            .map_err(|e| at(&format!("map the ids of {path}"), &e))?;
        Ok::<_, io::Error>(tree)
    };
    let session = mapped(upper)?;
    let mut lowers = Vec::new();
    for stack in stacks {
        let stack = stack.lowers.iter().map(|lower| mapped(lower));
        lowers.push(stack.collect::<io::Result<Vec<_>>>()?);
    }
    let overlays = overlay::make(way, session.as_fd(), &lowers).map_err(|e| at("overlay", &e))?;
    let mut out: Mounts = stacks.iter().map(|stack| stack.at.clone()).zip(overlays).collect();
    out.push(("/dev".to_owned(), dev(userns).map_err(|e| at("/dev", &e))?));
    Ok(out)
}

/// Name of a layer's upper folder in the session's subvolume.
pub(crate) fn upper_name(index: usize) -> String {
    format!("u{index}")
}

/// Name of a layer's work folder.
pub(crate) fn work_name(index: usize) -> String {
    format!("w{index}")
}

pub(super) fn at(step: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{step}: {error}"))
}

pub(crate) fn clone_tree(path: &str) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(CWD, path, flags).map_err(|e| at(path, &e.into()))
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
