//! The view of a sandbox's own resources, from the host's side: mounts the FUSE file system that
//! `crate::view` serves, and hands each launch its folder of it, its control groups read-only, and its
//! CPUs.
//!
//! The control groups that are shown are the kernel's own, cloned from the host's mounts: runtimes
//! look for that type of file system. Invariant: what a launch gets shows its own session only; all
//! that is left on the host is one mount in the data folder and, on version 1 hosts, one empty group
//! per controller that sessions have no group of. Called by serve (start, stop) and by the shim.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, RawDir};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount,
    open_tree,
};
use serde::{Deserialize, Serialize};

use super::cgroup::SessionGroups;
use crate::LaunchSpec;
use crate::proto::LaunchPlan;
use crate::sys;
use crate::view::{ALWAYS, PINNED, allowed_cpus, cpus_of, folder_name};

/// Where init puts the folder of the view: beside the complete proc, 0700.
pub(crate) const INSIDE: &str = "/run/bivouac/view";
/// Where control groups are shown inside.
pub(crate) const GROUPS: &str = "/sys/fs/cgroup";
/// Name of the mount point in the data folder.
const FOLDER: &str = "view";

/// What every launch of an engine needs to know of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ViewPlan {
    /// The mount point. `None`: this host has no FUSE, and sandboxes see the host's numbers.
    files: Option<PathBuf>,
    /// Version 1 hierarchies that programs size themselves by.
    legacy: Vec<Legacy>,
}

/// A version 1 hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Legacy {
    root: PathBuf,
    controllers: Vec<String>,
}

/// Controllers whose version 1 files are shown: those that JVMs, Go and libuv look for.
const SHOWN: [&str; 5] = ["memory", "cpu", "cpuacct", "cpuset", "pids"];

impl Legacy {
    fn has(&self, controller: &str) -> bool {
        self.controllers.iter().any(|c| c == controller)
    }

    /// Whether sessions have a group of their own in it.
    fn by_session(&self) -> bool {
        ["memory", "cpu", "pids"].iter().any(|c| self.has(c))
    }

    /// The group that a session's init is in.
    fn folder(&self, engine: &str, session: &str) -> PathBuf {
        let engine = self.root.join(engine);
        if !self.by_session() {
            engine
        } else if self.has("pids") {
            engine.join(session).join("run")
        } else {
            engine.join(session)
        }
    }

    /// Name of its folder inside, as on the host.
    fn name(&self) -> String {
        let name = self.root.file_name().map(|name| name.to_string_lossy().into_owned());
        name.unwrap_or_else(|| self.controllers.join(","))
    }
}

fn legacy_of(mountinfo: &str) -> Vec<Legacy> {
    let mut found: Vec<Legacy> = Vec::new();
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (Some(at), Some(root)) = (left.split(' ').nth(4), left.split(' ').nth(3)) else {
            continue;
        };
        let mut right = right.split(' ');
        let (kind, options) = (right.next(), right.nth(1).unwrap_or(""));
        let shown = options.split(',').filter(|o| SHOWN.contains(o));
        let controllers: Vec<String> = shown.map(str::to_owned).collect();
        let known = found.iter().any(|l| l.controllers == controllers);
        if kind == Some("cgroup") && root == "/" && !controllers.is_empty() && !known {
            found.push(Legacy { root: PathBuf::from(at), controllers });
        }
    }
    found
}

impl ViewPlan {
    /// Looks at this host's version 1 hierarchies and makes the engine's groups in those that sessions
    /// have none of. `files` is told later.
    ///
    /// # Errors
    /// With the folder's name.
    pub(crate) fn detect(engine: &str) -> io::Result<Self> {
        let legacy = legacy_of(&std::fs::read_to_string("/proc/self/mountinfo")?);
        for hierarchy in legacy.iter().filter(|l| !l.by_session()) {
            let folder = hierarchy.root.join(engine);
            match std::fs::create_dir(&folder) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(at(&folder, &e)),
                _ => {}
            }
            if hierarchy.has("cpuset") {
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let value = std::fs::read(hierarchy.root.join(file))?;
                    let file = folder.join(file);
                    std::fs::write(&file, value).map_err(|e| at(&file, &e))?;
                }
            }
        }
        Ok(Self { files: None, legacy })
    }

    /// Moves the init zygote into those groups: inits are born where it is, and nothing of the groups
    /// beside and above is visible from there.
    ///
    /// # Errors
    /// With the file's name.
    pub(crate) fn house(&self, engine: &str, zygote: u32) -> io::Result<()> {
        for hierarchy in self.legacy.iter().filter(|l| !l.by_session()) {
            let file = hierarchy.root.join(engine).join("cgroup.procs");
            std::fs::write(&file, zygote.to_string()).map_err(|e| at(&file, &e))?;
        }
        Ok(())
    }

    /// The same plan with the mount point.
    pub(crate) fn with_files(mut self, files: Option<PathBuf>) -> Self {
        self.files = files;
        self
    }

    /// Lets go of everything on the host, when no session is left.
    pub(crate) fn close(&self, engine: &str) {
        if let Some(files) = &self.files {
            unmount(files);
            let _ = std::fs::remove_dir(files);
        }
        for hierarchy in self.legacy.iter().filter(|l| !l.by_session()) {
            let folder = hierarchy.root.join(engine);
            // A zygote of an earlier serve may be on its way out.
            let _ = super::cgroup::until(Duration::from_secs(5), || {
                let inside = std::fs::read_to_string(folder.join("cgroup.procs"));
                for pid in inside.unwrap_or_default().lines() {
                    let _ = std::fs::write(hierarchy.root.join("cgroup.procs"), pid);
                }
                match std::fs::remove_dir(&folder) {
                    Err(e) if e.kind() == io::ErrorKind::ResourceBusy => Ok(false),
                    other => other.map(|()| true),
                }
            });
        }
    }
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Mounts a new view at its place in the data folder; answers that place and the descriptor to serve
/// it by. One that an earlier engine left is unmounted: sandboxes that use it keep it, and its server.
/// `None`: this host has no FUSE.
///
/// # Errors
/// With the step.
pub(crate) fn mount(data: &Path) -> io::Result<Option<(PathBuf, OwnedFd)>> {
    // First of all: it loads the module where that is none of the kernel's own, and so brings the device.
    let fs = match fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC) {
        Err(rustix::io::Errno::NODEV) => return Ok(None),
        other => other?,
    };
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let device = match rustix::fs::open("/dev/fuse", flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NODEV | rustix::io::Errno::NXIO) => {
            return Ok(None);
        }
        other => other.map_err(|e| at(Path::new("/dev/fuse"), &e.into()))?,
    };
    let place = data.join(FOLDER);
    unmount(&place);
    match std::fs::DirBuilder::new().mode(0o700).create(&place) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(at(&place, &e)),
        _ => {}
    }
    let fd = std::os::fd::AsRawFd::as_raw_fd(&device).to_string();
    for (key, value) in [
        ("source", "bivouac"),
        ("fd", fd.as_str()),
        ("rootmode", "40555"),
        ("user_id", "0"),
        ("group_id", "0"),
    ] {
        fsconfig_set_string(fs.as_fd(), key, value)?;
    }
    for flag in ["allow_other", "default_permissions", "ro"] {
        fsconfig_set_flag(fs.as_fd(), flag)?;
    }
    fsconfig_create(fs.as_fd())?;
    let mount = fsmount(
        fs.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_RDONLY
            | MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )?;
    move_mount(mount.as_fd(), "", CWD, &place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .map_err(|e| at(&place, &e.into()))?;
    Ok(Some((place, device)))
}

/// Takes the view out of the host's tree, with all that is stacked there.
fn unmount(place: &Path) {
    let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    while rustix::mount::unmount(place, flags).is_ok() {}
}

/// What a launch shows of its own resources.
#[derive(Debug, Default)]
pub(crate) struct View {
    /// Detached mounts and the place of each inside, as [`rootfs::Mounts`](super::rootfs::Mounts).
    pub mounts: Vec<(String, OwnedFd)>,
    /// Files of the folder at [`INSIDE`] and the places that they cover.
    pub cover: Vec<(String, String)>,
    /// CPUs that init and all its children run on; empty for all of them.
    pub cpus: Vec<u32>,
}

impl View {
    /// Keeps init, and so everything inside, to the session's CPUs. A bound on what it may use is the
    /// control groups' limit; this is what `nproc` shows.
    ///
    /// # Errors
    /// As sched_setaffinity(2).
    pub(crate) fn pin(&self, init: i32) -> io::Result<()> {
        let Some(pid) = rustix::thread::Pid::from_raw(init).filter(|_| !self.cpus.is_empty())
        else {
            return Ok(());
        };
        let mut set = rustix::thread::CpuSet::new();
        for &cpu in &self.cpus {
            set.set(cpu as usize);
        }
        Ok(rustix::thread::sched_setaffinity(Some(pid), &set)?)
    }
}

/// Readies the view of one session. Its control groups must exist.
///
/// # Errors
/// With the step: a server that is dead, above all.
pub(crate) fn of_session(
    spec: &LaunchSpec,
    plan: &LaunchPlan,
    groups: &SessionGroups,
) -> io::Result<View> {
    let mut view = View::default();
    let allowed = allowed_cpus();
    let (first, count) = share(spec, allowed.len());
    if count < allowed.len() {
        view.cpus = cpus_of(&allowed, first, count);
    }
    if let Some(files) = &plan.view.files {
        let path = files.join(folder_name(&spec.session, first, count));
        let folder = clone_tree(&path)?;
        know_names(&folder).map_err(|e| at(&path, &e))?;
        view.mounts.push((INSIDE.to_owned(), folder));
        let pinned = PINNED.iter().filter(|_| !view.cpus.is_empty());
        let cover = ALWAYS.iter().chain(pinned);
        view.cover = cover.map(|&(file, place)| (file.to_owned(), place.to_owned())).collect();
    }
    let run = groups.unified().join("run");
    if plan.view.legacy.is_empty() {
        view.mounts.push((GROUPS.to_owned(), read_only(&run)?));
        return Ok(view);
    }
    for hierarchy in &plan.view.legacy {
        let folder = hierarchy.folder(&plan.cgroup, spec.session.as_str());
        view.mounts.push((format!("{GROUPS}/{}", hierarchy.name()), read_only(&folder)?));
    }
    view.mounts.push((format!("{GROUPS}/unified"), read_only(&run)?));
    Ok(view)
}

/// Which of the CPUs a session has: neighbours by id range sit side by side.
fn share(spec: &LaunchSpec, allowed: usize) -> (usize, usize) {
    let count = (spec.limits.vcpus as usize).clamp(1, allowed.max(1));
    let first = (spec.id_range as usize).wrapping_mul(count).checked_rem(allowed).unwrap_or(0);
    (first, count)
}

fn clone_tree(path: &Path) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(CWD, path, flags).map_err(|e| at(path, &e.into()))
}

fn read_only(path: &Path) -> io::Result<OwnedFd> {
    let mount = clone_tree(path)?;
    let attributes = libc::MOUNT_ATTR_RDONLY
        | libc::MOUNT_ATTR_NOSUID
        | libc::MOUNT_ATTR_NODEV
        | libc::MOUNT_ATTR_NOEXEC;
    sys::restrict_mount(mount.as_fd(), attributes).map_err(|e| at(path, &e))?;
    Ok(mount)
}

/// Has the kernel learn all names of the folder with one request, so that init, which binds the files
/// a moment later, waits for none.
fn know_names(folder: &OwnedFd) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = rustix::fs::openat(folder, ".", flags, Mode::empty())?;
    let mut buffer = Vec::with_capacity(4096);
    let mut names = RawDir::new(&open, buffer.spare_capacity_mut());
    match names.next() {
        Some(entry) => entry.map(drop).map_err(io::Error::from),
        None => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_and_their_groups() {
        let text = "30 23 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
            33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
            35 31 0:32 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
            36 31 0:33 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n\
            37 31 0:34 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n\
            38 31 0:30 /docker /mnt/again rw - cgroup cgroup rw,memory\n";
        let found = legacy_of(text);
        let folders: Vec<String> =
            found.iter().map(|l| l.folder("e", "s").to_string_lossy().into_owned()).collect();
        assert_eq!(
            folders,
            [
                "/sys/fs/cgroup/memory/e/s",
                "/sys/fs/cgroup/cpu,cpuacct/e/s",
                "/sys/fs/cgroup/pids/e/s/run",
                "/sys/fs/cgroup/cpuset/e",
            ]
        );
        assert!(legacy_of("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n").is_empty());
    }
}
