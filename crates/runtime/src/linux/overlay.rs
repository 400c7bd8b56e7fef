//! The overlays of a sandbox's root, out of detached mounts, in the way that this kernel takes them.
//!
//! Kernels from 6.15 on take the layers as descriptors of detached mounts. Before, an overlay wants the
//! names of layers that are attached in the caller's mount namespace (6.12, Debian 13's, refuses
//! everything else). They get a namespace that lives for this alone, and names below `/proc/self/fd`.
//! Invariant: nothing is attached in the host's mount namespace, and no option holds a host path, in
//! either way. Which way it is, [`probe`] finds out once; called by serve. [`make`] is called by the
//! shim, single-threaded.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
    fsconfig_create, fsconfig_set_fd, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
    mount_change, move_mount,
};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use serde::{Deserialize, Serialize};

use super::rootfs::{at, clone_tree, upper_name, work_name};
use crate::sys;

/// How layers are handed to the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Way {
    /// As descriptors of mounts that are attached nowhere.
    #[default]
    Detached,
    /// By name, while they are attached in a mount namespace of the launch's own.
    Attached,
}

/// Tries the ways, the better one first, with folders of the pool as layers.
///
/// # Errors
/// A sentence for the operator: without one of them every launch would fail.
pub(crate) fn probe(scratch: &Path) -> io::Result<Way> {
    for name in ["lower", "u0", "w0"] {
        std::fs::create_dir_all(scratch.join(name))?;
    }
    let folder = scratch.to_owned();
    // A thread of its own: the way by name changes the namespace of who goes it.
    let tried = std::thread::spawn(move || {
        let first = attempt(&folder, Way::Detached);
        let Err(first) = first else { return Ok(Way::Detached) };
        attempt(&folder, Way::Attached).map(|()| Way::Attached).map_err(|second| (first, second))
    })
    .join();
    std::fs::remove_dir_all(scratch)?;
    let tried = tried.map_err(|_| io::Error::other("the probe of overlays has panicked"))?;
    tried.map_err(|(first, second)| {
        let text = format!(
            "this kernel cannot mount a sandbox's root: an overlay of detached mounts ({first}), or of \
             mounts in a namespace of their own ({second}); Linux 6.12 and 6.18 are known to work"
        );
        io::Error::new(second.kind(), text)
    })
}

fn attempt(scratch: &Path, way: Way) -> io::Result<()> {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let session = clone_tree(&text(scratch))?;
    let lower = clone_tree(&text(&scratch.join("lower")))?;
    make(way, session.as_fd(), &[vec![lower]]).map(drop)
}

/// One overlay for each stack of lower mounts, the uppermost first, with the upper and work folder of the same number in `session`.
/// All are detached, going in and coming out.
///
/// # Errors
/// With the step. The process may then be left in another mount namespace: it must end.
pub(crate) fn make(
    way: Way,
    session: BorrowedFd<'_>,
    stacks: &[Vec<OwnedFd>],
) -> io::Result<Vec<OwnedFd>> {
    let all = || {
        let each = stacks.iter().enumerate();
        each.map(|(index, stack)| {
            one(way, session, index, stack).map_err(|e| at(&format!("layer {index}"), &e))
        })
        .collect()
    };
    match way {
        Way::Detached => all(),
        Way::Attached => in_own_namespace(|| {
            let lowers = stacks.iter().flatten().map(AsFd::as_fd);
            attach(std::iter::once(session).chain(lowers)).and_then(|()| all())
        }),
    }
}

/// Does something in a mount namespace that ends with it. The overlays have copies of their layers by then.
fn in_own_namespace<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    // The thread's own: its siblings stay where they are.
    let home = rustix::fs::open("/proc/thread-self/ns/mnt", flags, Mode::empty())?;
    sys::unshare(UnshareFlags::NEWNS).map_err(|e| at("own mount namespace", &e))?;
    let made = work();
    move_into_link_name_space(home.as_fd(), Some(LinkNameSpaceType::Mount))
        .map_err(|e| at("return from the own mount namespace", &e.into()))?;
    made
}

/// Attaches layers in this thread's mount namespace, out of everybody's sight.
fn attach<'a>(layers: impl Iterator<Item = BorrowedFd<'a>>) -> io::Result<()> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).map_err(|e| at("private mounts", &e.into()))?;
    for mount in layers {
        // Where does not matter, they are found by descriptor; this folder every host has.
        move_mount(mount, "", CWD, "/usr", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
            .map_err(|e| at("attach a layer", &e.into()))?;
    }
    Ok(())
}

/// A read-only overlay of layers that nobody changes, the uppermost first: what an upper looks like over its
/// image. Detached, going in and coming out.
///
/// # Errors
/// With the step. The thread may then be left in another mount namespace: it must end.
pub(crate) fn shown(way: Way, layers: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
    let mount = || {
        let fs = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(fs.as_fd(), "source", "bivouac")?;
        for layer in layers {
            match way {
                Way::Detached => fsconfig_set_fd(fs.as_fd(), "lowerdir+", *layer),
                Way::Attached => {
                    let name = format!("/proc/self/fd/{}", layer.as_raw_fd());
                    fsconfig_set_string(fs.as_fd(), "lowerdir+", name)
                }
            }
            .map_err(|e| at("lowerdir+", &e.into()))?;
        }
        // What an upper was written with has to be understood here, too.
        fsconfig_set_string(fs.as_fd(), "redirect_dir", "on")?;
        fsconfig_set_string(fs.as_fd(), "metacopy", "on")?;
        fsconfig_create(fs.as_fd()).map_err(|e| at("overlay", &e.into()))?;
        let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        Ok(fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
    };
    match way {
        Way::Detached => mount(),
        Way::Attached => in_own_namespace(|| attach(layers.iter().copied()).and_then(|()| mount())),
    }
}

fn one(way: Way, session: BorrowedFd<'_>, index: usize, stack: &[OwnedFd]) -> io::Result<OwnedFd> {
    let folder = |name: String| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(session, &name, flags, Mode::empty())
            .map_err(|e| at(&name, &io::Error::from(e)))
    };
    let (upper, work) = (folder(upper_name(index))?, folder(work_name(index))?);
    let fs = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(fs.as_fd(), "source", "bivouac")?;
    let lowers = stack.iter().map(|lower| ("lowerdir+", lower.as_fd()));
    for (key, layer) in lowers.chain([("upperdir", upper.as_fd()), ("workdir", work.as_fd())]) {
        match way {
            Way::Detached => fsconfig_set_fd(fs.as_fd(), key, layer),
            Way::Attached => {
                let name = format!("/proc/self/fd/{}", layer.as_raw_fd());
                fsconfig_set_string(fs.as_fd(), key, name)
            }
        }
        .map_err(|e| at(key, &e.into()))?;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The way by name works on every kernel, so it is tested on every kernel. Needs root.
    #[test]
    fn layers_by_name_leave_nothing_attached() {
        let scratch = std::env::temp_dir().join(format!("bivouac-overlay-{}", std::process::id()));
        for name in ["lower/sub", "u0", "w0", "u1", "w1"] {
            std::fs::create_dir_all(scratch.join(name)).unwrap();
        }
        std::fs::write(scratch.join("lower/sub/file"), "from below").unwrap();
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let folder = scratch.clone();
        let (mounts, attached) = std::thread::spawn(move || {
            let before = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
            let session = clone_tree(&text(&folder)).unwrap();
            let lower = clone_tree(&text(&folder.join("lower"))).unwrap();
            let lowers = [vec![lower.try_clone().unwrap()], vec![lower]];
            // The second layer cannot be attached again: one mount has one place.
            assert!(make(Way::Attached, session.as_fd(), &lowers).is_err());
            let after = std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
            let session = clone_tree(&text(&folder)).unwrap();
            let lowers =
                ["lower", "lower/sub"].map(|n| vec![clone_tree(&text(&folder.join(n))).unwrap()]);
            (make(Way::Attached, session.as_fd(), &lowers), before != after)
        })
        .join()
        .unwrap();
        assert!(!attached, "a failure leaves the namespace that it came from");
        let mounts = mounts.unwrap();
        let read = |mount: &OwnedFd, name: &str| {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let file = rustix::fs::openat(mount, name, flags, Mode::empty()).unwrap();
            std::io::read_to_string(std::fs::File::from(file)).unwrap()
        };
        assert_eq!(read(&mounts[0], "sub/file"), "from below");
        assert_eq!(read(&mounts[1], "file"), "from below");
        // Copied up, into the upper of its own number.
        let flags = OFlags::WRONLY | OFlags::TRUNC | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&mounts[1], "file", flags, Mode::empty()).unwrap();
        rustix::io::write(&file, b"mine").unwrap();
        drop((file, mounts));
        assert_eq!(std::fs::read_to_string(scratch.join("u1/file")).unwrap(), "mine");
        assert_eq!(std::fs::read_to_string(scratch.join("lower/sub/file")).unwrap(), "from below");
        let mounted = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounted.contains("bivouac-overlay-"), "{mounted}");
        std::fs::remove_dir_all(&scratch).unwrap();
    }

    #[test]
    fn this_kernel_has_a_way() {
        let scratch = std::env::temp_dir().join(format!("bivouac-probe-{}", std::process::id()));
        let way = probe(&scratch).unwrap();
        assert!(!scratch.exists());
        // Known of two kernels; of others either is right.
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        if release.starts_with("6.12.") {
            assert_eq!(way, Way::Attached);
        } else if release.starts_with("6.18.") {
            assert_eq!(way, Way::Detached);
        }
    }
}
