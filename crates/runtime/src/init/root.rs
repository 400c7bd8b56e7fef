//! Building the root from inside: puts the shim's mounts in place, leaves the host's tree, mounts
//! what belongs to the sandbox's own namespaces, and bounds the process.
//!
//! Order matters: proc and sysfs can only be mounted while the host's are still visible, so they are
//! made detached before the pivot. See mount_namespaces(7), *Restrictions*.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, Uid};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

use super::disk::{Counters, Desk, Disk};
use super::{DEFAULT_USER, Groups, exec};
use crate::linux::{confine, view};
use crate::proto::InitConfig;

/// A second, complete proc: without one visible, a nested sandbox could not mount its own.
const COMPLETE_PROC: &str = "/run/bivouac/proc";
/// The same for sysfs.
const COMPLETE_SYS: &str = "/run/bivouac/sys";
/// Where the session's files are, in the closed folder.
const SESSION_FILES: &str = "/run/bivouac/etc";
/// Terminals of one sandbox: the host's kernel has some thousands for all of them.
const TERMINALS: &str = "256";
/// Files of proc that say more about the host than about the sandbox.
const MASKED: &[&str] = &["/proc/kcore", "/proc/keys", "/proc/timer_list"];

/// A step that failed.
#[derive(Debug)]
pub(super) struct BuildError {
    pub step: &'static str,
    pub source: io::Error,
}

trait Step<T> {
    fn step(self, step: &'static str) -> Result<T, BuildError>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, step: &'static str) -> Result<T, BuildError> {
        self.map_err(|e| BuildError { step, source: e.into() })
    }
}

/// What is ready before the shim has sent its mounts: file systems of this sandbox's own namespaces,
/// detached.
pub(super) struct Prepared {
    proc: OwnedFd,
    sysfs: OwnedFd,
    pts: OwnedFd,
    shm: OwnedFd,
    run: OwnedFd,
    queue: Option<OwnedFd>,
    /// What `df` is told by.
    disk: Option<Disk>,
}

/// What init works with when the root stands.
pub(super) struct Built {
    pub groups: Groups,
    /// Who answers `df`.
    pub desk: Option<Desk>,
    /// The sandbox's devpts.
    pub pts: OwnedFd,
}

/// Does everything that needs nothing of the shim.
pub(super) fn prepare(
    hostname: &str,
    shm_bytes: u64,
    homes: &[OwnedFd],
    disk: Option<Counters>,
) -> Result<Prepared, BuildError> {
    exec::become_user(0).step("become root of the sandbox")?;
    for home in homes {
        rustix::io::write(home, b"0").step("enter the control groups")?;
    }
    rustix::process::setsid().step("start a session")?;
    rustix::system::sethostname(hostname.as_bytes()).step("set the host name")?;
    let nodev = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID;
    let plain = nodev | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let read_only = plain | MountAttrFlags::MOUNT_ATTR_RDONLY;
    // Its files are devices, and its own.
    let terminals = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let shm = shm_bytes.to_string();
    let pts = [("ptmxmode", "0666"), ("mode", "0620"), ("gid", "5"), ("max", TERMINALS)];
    Ok(Prepared {
        proc: detached("proc", &[], plain).step("mount proc")?,
        sysfs: detached("sysfs", &[], read_only).step("mount sysfs")?,
        pts: detached("devpts", &pts, terminals).step("mount devpts")?,
        shm: detached("tmpfs", &[("size", &shm), ("mode", "1777")], nodev).step("mount shm")?,
        run: detached("tmpfs", &[("size", "64m"), ("mode", "0755")], nodev).step("mount /run")?,
        queue: detached("mqueue", &[], plain).ok(),
        disk: match disk {
            Some(counters) => {
                Some(Disk::new(detached("proc", &[], plain).step("mount proc")?, counters))
            }
            None => None,
        },
    })
}

/// Does the rest. Takes the descriptors that came with the configuration.
pub(super) fn build(
    config: &InitConfig,
    fds: &mut Vec<OwnedFd>,
    mut prepared: Prepared,
) -> Result<Built, BuildError> {
    if fds.len() < config.mounts.len() || config.mounts.is_empty() {
        return Err(io::Error::other("descriptors are missing")).step("receive the mounts");
    }
    let rest = fds.split_off(config.mounts.len());
    let mounts = std::mem::take(fds);
    let groups = take_groups(config, rest).step("receive the control groups")?;
    // Only now is the process in all of its control groups.
    crate::sys::unshare(rustix::thread::UnshareFlags::NEWCGROUP).step("own cgroup view")?;
    if let Some(disk) = &mut prepared.disk {
        // The overlays come first, then /dev.
        let overlays = config.mounts.iter().zip(&mounts).take_while(|(at, _)| *at != "/dev");
        overlays.for_each(|(_, mount)| disk.own(mount.as_fd()));
    }
    enter(&mounts[0]).step("enter the new root")?;
    let all = || config.mounts.iter().map(String::as_str).zip(&mounts).skip(1);
    for (at, mount) in all().filter(|(at, _)| *at != view::INSIDE && !at.starts_with(view::GROUPS))
    {
        place(mount, at).step("place a mount")?;
    }
    place(&prepared.proc, "/proc").step("place /proc")?;
    place(&prepared.sysfs, "/sys").step("place /sys")?;
    place_existing(&prepared.pts, "/dev/pts").step("place /dev/pts")?;
    place_existing(&prepared.shm, "/dev/shm").step("place /dev/shm")?;
    if let Some(queue) = &prepared.queue {
        let _ = place_existing(queue, "/dev/mqueue");
    }
    place(&prepared.run, "/run").step("place /run")?;
    complete_copies().step("place the complete proc")?;
    if let Some((_, files)) = all().find(|(at, _)| *at == view::INSIDE) {
        place(files, view::INSIDE).step("place the view")?;
        cover(&config.cover).step("cover proc with the view")?;
    }
    let groups_shown: Vec<_> = all().filter(|(at, _)| at.starts_with(view::GROUPS)).collect();
    show_groups(&groups_shown).step("show the control groups")?;
    mask();
    session_files(config).step("write the session's files")?;
    for folder in &config.folders {
        // The guest may have put something else there; commands will then say so.
        let _ = make_folder(folder);
    }
    let desk = finish(prepared.disk.take()).step("bound the process")?;
    Ok(Built { groups, desk, pts: prepared.pts })
}

fn take_groups(config: &InitConfig, rest: Vec<OwnedFd>) -> io::Result<Groups> {
    let mut rest = rest.into_iter();
    let mut next = || rest.next().ok_or_else(|| io::Error::other("a descriptor is missing"));
    let run = if config.cgroups.leaves { Some(next()?) } else { None };
    let pids = if config.cgroups.pids { Some([next()?, next()?]) } else { None };
    Ok(Groups { run, pids, relief: config.cgroups.relief })
}

/// A file system of this namespace, not attached anywhere yet.
fn detached(
    kind: &str,
    options: &[(&str, &str)],
    attributes: MountAttrFlags,
) -> io::Result<OwnedFd> {
    let fs = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(fs.as_fd(), "source", kind)?;
    for (key, value) in options {
        fsconfig_set_string(fs.as_fd(), *key, *value)?;
    }
    fsconfig_create(fs.as_fd())?;
    Ok(fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// Makes the mount the root and forgets the host's tree.
fn enter(root: &OwnedFd) -> io::Result<()> {
    // Any folder of the host's tree will do; this one every host has.
    attach(root, "/usr")?;
    rustix::process::fchdir(root)?;
    rustix::process::pivot_root(".", ".")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    Ok(())
}

fn attach(mount: &OwnedFd, at: &str) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(mount.as_fd(), "", CWD, at, flags)
        .map_err(|e| io::Error::new(io::Error::from(e).kind(), format!("{at}: {e}")))
}

/// Attaches at a folder, made when the guest has removed it.
fn place(mount: &OwnedFd, at: &str) -> io::Result<()> {
    match rustix::fs::mkdirat(CWD, at, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => {}
        Err(e) => return Err(io::Error::new(io::Error::from(e).kind(), format!("{at}: {e}"))),
    }
    attach(mount, at)
}

/// Attaches at a folder of a file system that cannot have folders made.
fn place_existing(mount: &OwnedFd, at: &str) -> io::Result<()> {
    attach(mount, at)
}

/// Copies of proc and sysfs from before anything covers them. The folder is closed to all but root.
fn complete_copies() -> io::Result<()> {
    let parent = Path::new(COMPLETE_PROC).parent().unwrap_or(Path::new("/"));
    rustix::fs::mkdirat(CWD, parent, Mode::from_raw_mode(0o700))?;
    for (from, to) in [("/proc", COMPLETE_PROC), ("/sys", COMPLETE_SYS)] {
        rustix::fs::mkdirat(CWD, to, Mode::from_raw_mode(0o700))?;
        bind(from, to)?;
    }
    // A nested sysfs may be no less restricted than what is visible, and newer versions of mount(8)
    // make it read-only a step too late. Nothing in it is writable for this root but its own network's.
    let flags = MountFlags::BIND | MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC;
    Ok(rustix::mount::mount_remount(COMPLETE_SYS, flags, "")?)
}

/// Binds files of the view over those that tell of the host.
fn cover(files: &[(String, String)]) -> io::Result<()> {
    for (file, place) in files {
        rustix::mount::mount_bind(format!("{}/{file}", view::INSIDE), place)
            .map_err(|e| io::Error::new(io::Error::from(e).kind(), format!("{place}: {e}")))?;
    }
    Ok(())
}

/// Puts the control groups where programs look for them: one version 2 group as it is, or a folder of
/// version 1 hierarchies.
fn show_groups(shown: &[(&str, &OwnedFd)]) -> io::Result<()> {
    if let [(at, only)] = shown
        && *at == view::GROUPS
    {
        return place_existing(only, at);
    }
    if shown.is_empty() {
        return Ok(());
    }
    let nodev = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID;
    let options = [("size", "64k"), ("nr_inodes", "64"), ("mode", "0555")];
    let folder = detached("tmpfs", &options, nodev | MountAttrFlags::MOUNT_ATTR_NOEXEC)?;
    place_existing(&folder, view::GROUPS)?;
    for (at, mount) in shown {
        place(mount, at)?;
        // A hierarchy of two controllers has the name of both, and one link for each.
        let name = at.rsplit('/').next().unwrap_or_default();
        for one in name.split(',').filter(|one| *one != name) {
            let _ = rustix::fs::symlinkat(name, &folder, one);
        }
    }
    let flags = MountFlags::BIND
        | MountFlags::RDONLY
        | MountFlags::NODEV
        | MountFlags::NOSUID
        | MountFlags::NOEXEC;
    Ok(rustix::mount::mount_remount(view::GROUPS, flags, "")?)
}

/// Tidiness, not a boundary: what cannot be masked stays as it is.
fn mask() {
    for path in MASKED {
        let _ = bind("/dev/null", path);
    }
    let read_only = MountAttrFlags::MOUNT_ATTR_RDONLY;
    if let Ok(empty) = detached("tmpfs", &[("size", "0"), ("mode", "0555")], read_only) {
        let _ = place_existing(&empty, "/sys/firmware");
    }
}

fn bind(from: &str, to: &str) -> io::Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    attach(&open_tree(CWD, from, flags)?, to)
}

/// Files of this session on a file system of memory, put over those of the tree, so that no snapshot
/// ever holds them. On one that is attached: kernels before 6.15 bind nothing out of a detached one.
fn session_files(config: &InitConfig) -> io::Result<()> {
    rustix::fs::mkdirat(CWD, SESSION_FILES, Mode::from_raw_mode(0o755))?;
    for (name, content) in &config.etc {
        let (source, target) = (format!("{SESSION_FILES}/{name}"), format!("/etc/{name}"));
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::openat(CWD, &source, flags, Mode::from_raw_mode(0o644))?;
        std::fs::File::from(file).write_all(content.as_bytes())?;
        // A place to put it on, when the tree has none.
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let _ = rustix::fs::openat(CWD, &target, flags, Mode::from_raw_mode(0o644));
        // The guest owns its tree and may have made this impossible: its own loss.
        let _ = bind(&source, &target);
    }
    Ok(())
}

/// Makes a folder and its parents; what is made belongs to the default user.
pub(super) fn make_folder(path: &str) -> io::Result<()> {
    let mut at = String::new();
    for part in path.split('/').filter(|p| !p.is_empty()) {
        at.push('/');
        at.push_str(part);
        match rustix::fs::mkdirat(CWD, &at, Mode::from_raw_mode(0o755)) {
            Ok(()) => {
                let (uid, gid) = (Uid::from_raw(DEFAULT_USER), Gid::from_raw(DEFAULT_USER));
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                rustix::fs::chownat(CWD, &at, Some(uid), Some(gid), flags)?;
            }
            Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn finish(disk: Option<Disk>) -> io::Result<Option<Desk>> {
    use rustix::process::{DumpableBehavior, Resource, Rlimit};
    let files = rustix::process::getrlimit(Resource::Nofile);
    let all = Rlimit { current: files.maximum, maximum: files.maximum };
    rustix::process::setrlimit(Resource::Nofile, all)?;
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: None })?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    confine::drop_capabilities()?;
    let desk = match disk.map(Desk::open) {
        Some(Ok(desk)) => Some(desk),
        // This kernel hands nothing over, or an engine that is itself confined has a listener already.
        Some(Err(_)) | None => {
            confine::install(&confine::filter(confine::Statfs::Plain))?;
            None
        }
    };
    // The memory is a copy of the zygote's: not even the sandbox's root may look at it, or take
    // descriptors out of it.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(desk)
}
