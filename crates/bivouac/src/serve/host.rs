//! Whether this machine can run sandboxes: what `serve` insists on and what `doctor` tells.
//!
//! Invariant: nothing is changed by looking, and every finding that is not fine says how to mend it.
//! Reads `/proc`, `/sys` and `/etc` below a root, so tests plant files.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use bivouac_runtime::pool::{self, CheckState, PoolMode};
use serde::Serialize;

/// Oldest kernel.
const KERNEL: (u32, u32) = (6, 12);
/// First id that sandboxes get.
const FIRST_ID: u64 = 1 << 30;
/// Ids that all ranges take together (32,768 ranges of 65,536).
const ALL_IDS: u64 = 32_768 * 65_536;
/// Free bytes under which no sandbox should start.
const LEAST_SPACE: u64 = 2 << 30;
/// Free bytes under which it gets tight.
const GOOD_SPACE: u64 = 10 << 30;
/// Magic number of overlayfs.
const OVERLAYFS: u64 = 0x794c_7630;
/// Programs that the engine runs, and the packages that bring them.
const TOOLS: [(&str, &str); 1] = [("mkfs.btrfs", "btrfs-progs")];

/// How a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Fine.
    Ok,
    /// Works, with less.
    Warn,
    /// Does not work.
    Fail,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it is.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// How to mend it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

impl Check {
    /// A finding that is fine.
    pub fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: Status::Ok, found: found.into(), mend: None }
    }

    /// A finding that takes something away.
    pub fn warn(name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { name, status: Status::Warn, found: found.into(), mend: Some(mend.into()) }
    }

    /// A finding that stops the engine.
    pub fn fail(name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { name, status: Status::Fail, found: found.into(), mend: Some(mend.into()) }
    }
}

/// The machine, below a root.
#[derive(Debug)]
pub struct Host {
    root: PathBuf,
    release: String,
    is_root: bool,
}

impl Host {
    /// The machine that we run on.
    #[must_use]
    pub fn real() -> Self {
        Self {
            root: PathBuf::from("/"),
            release: rustix::system::uname().release().to_string_lossy().into_owned(),
            is_root: rustix::process::geteuid().is_root(),
        }
    }

    /// What the engine cannot start without, with its volumes kept in this mode (absent: what the data folder
    /// has, else the best that can be had).
    #[must_use]
    pub fn required(&self, data_dir: &Path, pool: Option<PoolMode>) -> Vec<Check> {
        let has = pool::show(data_dir).ok().and_then(|shown| shown.mode);
        let pool = pool.or(has);
        let mut checks = vec![self.user(), self.kernel()];
        checks.extend([self.root_folder(), self.usr()]);
        checks.extend(self.filesystems(pool));
        checks.extend([
            self.loop_devices(pool),
            self.cgroups(),
            self.user_namespaces(),
            self.seccomp(),
        ]);
        checks.extend(self.tools(pool));
        checks.push(self.space(data_dir));
        checks
    }

    /// Everything that `doctor` looks at.
    #[must_use]
    pub fn all(&self, data_dir: &Path) -> Vec<Check> {
        let mut checks = self.required(data_dir, None);
        checks.push(self.storage(data_dir));
        checks.extend([self.nested_namespaces(), self.fuse(), self.ids(), self.processes()]);
        checks.extend([self.resolver(), self.roots()]);
        checks
    }

    /// Where the names that sandboxes reach are looked up.
    fn resolver(&self) -> Check {
        const NAME: &str = "resolver";
        let found: Vec<String> =
            super::egress::read_resolvers(&self.root).iter().map(ToString::to_string).collect();
        if self.read("etc/resolv.conf").is_some_and(|text| text.contains("nameserver")) {
            return Check::ok(NAME, found.join(", "));
        }
        let found = format!("/etc/resolv.conf names none, so {} is asked", found.join(", "));
        Check::warn(NAME, found, "give the engine one: bivouac serve --resolver ADDR")
    }

    /// What certificates of destinations are checked against.
    fn roots(&self) -> Check {
        const NAME: &str = "roots";
        let told = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from).filter(|_| self.is_real());
        let Some(file) = super::egress::store(&self.root, told) else {
            let found = "no root certificates: sandboxes reach nothing over intercepted TLS";
            return Check::warn(NAME, found, "apt install ca-certificates");
        };
        let shown = file.display();
        let read = fs::read(&file).map_err(anyhow::Error::from);
        match read.and_then(|pem| super::egress::count(&pem)) {
            Ok(0) => Check::warn(
                NAME,
                format!("{shown} holds no certificate"),
                "apt install --reinstall ca-certificates",
            ),
            Ok(count) => Check::ok(NAME, format!("{count} in {shown}")),
            Err(error) => Check::warn(
                NAME,
                format!("{shown} cannot be used: {error}"),
                "apt install --reinstall ca-certificates",
            ),
        }
    }

    fn is_real(&self) -> bool {
        self.root == Path::new("/")
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(path)).ok()
    }

    fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.trim().parse().ok()
    }

    fn user(&self) -> Check {
        if self.is_root {
            Check::ok("user", "root")
        } else {
            let found = "not root: the engine makes mounts, namespaces and control groups";
            Check::fail("user", found, "use sudo (an engine without root is a later capability)")
        }
    }

    fn kernel(&self) -> Check {
        let found = format!("Linux {}", self.release);
        if version(&self.release).is_some_and(|found| found >= KERNEL) {
            return Check::ok("kernel", found);
        }
        let found = format!(
            "{found}: {}.{} or newer is needed, the first that mounts an image from its file, and \
             the oldest that sandboxes are tested on",
            KERNEL.0, KERNEL.1
        );
        let mend = "Debian 13 has one; on Debian 12: apt install -t bookworm-backports \
            linux-image-amd64, then reboot";
        Check::fail("kernel", found, mend)
    }

    /// The kernel makes no user namespace for a process in a `chroot`.
    fn root_folder(&self) -> Check {
        const NAME: &str = "root folder";
        let same = |a: &str, b: &str| -> Option<bool> {
            use std::os::unix::fs::MetadataExt as _;
            let (a, b) = (fs::metadata(self.path(a)).ok()?, fs::metadata(self.path(b)).ok()?);
            Some((a.dev(), a.ino()) == (b.dev(), b.ino()))
        };
        let mounts = self.read("proc/self/mountinfo").unwrap_or_default();
        let shared = same("proc/1/ns/mnt", "proc/self/ns/mnt").unwrap_or(false);
        let moved = shared && same("proc/1/root", "") == Some(false);
        if moved || !has_root_mount(&mounts) {
            let found = "changed by chroot: the kernel refuses user namespaces there";
            return Check::fail(NAME, found, "run the engine outside, or enter by pivot_root");
        }
        Check::ok(NAME, "not changed")
    }

    /// The `host` image maps the owners of `/usr`.
    fn usr(&self) -> Check {
        let kind = rustix::fs::statfs(self.path("usr")).map(|stat| stat.f_type.cast_unsigned());
        usr_on(kind.unwrap_or_default())
    }

    fn filesystems(&self, pool: Option<PoolMode>) -> Vec<Check> {
        let known = self.read("proc/filesystems").unwrap_or_default();
        let built_in = |name: &str| known.split_whitespace().any(|word| word == name);
        let check = |check: &'static str, name: &str, needed: bool| {
            if built_in(name) {
                return Check::ok(check, "there");
            }
            if self.has_module(name) {
                return Check::ok(check, "there as a module, loaded at first use");
            }
            let mend = format!("modprobe {name}, or a kernel that has it (Debian's have)");
            if needed {
                Check::fail(check, format!("this kernel has no {name}"), mend)
            } else {
                let found = format!("this kernel has no {name}: images other than 'host' need it");
                Check::warn(check, found, mend)
            }
        };
        vec![
            check("overlay", "overlay", true),
            for_pool(check("btrfs", "btrfs", true), pool, &[PoolMode::Loop, PoolMode::Native]),
            check("erofs", "erofs", false),
        ]
    }

    /// Whether the running kernel can load a module `name`.
    fn has_module(&self, name: &str) -> bool {
        let file = format!("/{name}.ko");
        let list = self.read(&format!("lib/modules/{}/modules.dep", self.release));
        list.unwrap_or_default().lines().any(|line| {
            line.split(':').next().is_some_and(|path| {
                path.contains(&file)
                    && path.rsplit('/').next().is_some_and(|last| {
                        last == &file[1..]
                            || last.strip_prefix(&file[1..]).is_some_and(|r| r.starts_with('.'))
                    })
            })
        })
    }

    fn loop_devices(&self, pool: Option<PoolMode>) -> Check {
        if self.path("dev/loop-control").exists() {
            return Check::ok("loop devices", "there");
        }
        let found = "no /dev/loop-control: the pool is a file that is mounted through one";
        for_pool(Check::fail("loop devices", found, "modprobe loop"), pool, &[PoolMode::Loop])
    }

    /// How volumes are kept.
    fn storage(&self, data_dir: &Path) -> Check {
        const NAME: &str = "storage";
        let shown = match pool::show(data_dir) {
            Ok(shown) => shown,
            Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
                return Check::warn(NAME, e.to_string(), "run doctor as the engine's user");
            }
            Err(e) => return Check::fail(NAME, e.to_string(), "mend the named file"),
        };
        let Some(mode) = shown.mode else {
            return Check::ok(NAME, "no pool yet: the first start of the engine makes one");
        };
        let mut found = match &shown.storage {
            Some(storage) => {
                format!("{mode}, {} of {} MiB used", storage.used >> 20, storage.size >> 20)
            }
            None => format!("{mode}, not mounted"),
        };
        if let Some(check) = &shown.check {
            found = format!("{found}; {}", check.in_words());
            match check.state {
                CheckState::Damaged => {
                    let mend = "save what matters (bivouac cp), look at the kernel's log and the disk, and begin \
                                with a new data folder: docs/storage.md";
                    return Check::fail(NAME, found, mend);
                }
                CheckState::Failed => {
                    let mend = "start the engine again: it checks once more";
                    return Check::warn(NAME, found, mend);
                }
                CheckState::Running | CheckState::Clean => {}
            }
        }
        if mode == PoolMode::Folder {
            let found = format!("{found}; disk limits do not hold, snapshots and forks copy files");
            let mend = "bivouac pool migrate --to loop, where btrfs can be had";
            return Check::warn(NAME, found, mend);
        }
        if shown.storage.is_some_and(|storage| !storage.limits) {
            let found = format!("{found}; disk limits do not hold: quotas are not simple quotas");
            return Check::warn(NAME, found, "a kernel that has simple quotas (6.12 has them)");
        }
        Check::ok(NAME, found)
    }

    fn cgroups(&self) -> Check {
        const NAME: &str = "control groups";
        let mounts = self.read("proc/self/mountinfo").unwrap_or_default();
        let layout = Layout::read(&mounts, |at| {
            self.read(&format!("{}/cgroup.controllers", at.trim_start_matches('/')))
        });
        let missing = layout.missing();
        let found = layout.to_string();
        if !missing.is_empty() {
            let found = format!("{found}; missing: {}", missing.join(", "));
            let mend = "give the machine these controllers (kernel command line \
                cgroup_enable=memory, or systemd.unified_cgroup_hierarchy=1)";
            return Check::fail(NAME, found, mend);
        }
        if layout.v2.is_none() {
            let mend = "mount -t cgroup2 none /sys/fs/cgroup/unified, or \
                systemd.unified_cgroup_hierarchy=1 on the kernel command line";
            let found =
                format!("{found}: no v2, which sandboxes are born in, frozen and killed by");
            return Check::fail(NAME, found, mend);
        }
        Check::ok(NAME, found)
    }

    fn user_namespaces(&self) -> Check {
        const NAME: &str = "user namespaces";
        let most = self.number("proc/sys/user/max_user_namespaces");
        match (self.path("proc/self/ns/user").exists(), most) {
            (false, _) => {
                let mend = "a kernel with CONFIG_USER_NS (Debian's have it)";
                Check::fail(NAME, "this kernel has none", mend)
            }
            (true, Some(0)) => {
                let mend = "sysctl user.max_user_namespaces=65536";
                Check::fail(NAME, "switched off: user.max_user_namespaces is 0", mend)
            }
            (true, Some(most)) if most < 1_000 => Check::warn(
                NAME,
                format!("user.max_user_namespaces is {most}: one per sandbox is needed"),
                "sysctl user.max_user_namespaces=65536",
            ),
            (true, _) => Check::ok(NAME, "there"),
        }
    }

    /// Sandboxes inside of sandboxes (bwrap, rootless podman, a browser's own).
    fn nested_namespaces(&self) -> Check {
        const NAME: &str = "nested sandboxes";
        if self.number("proc/sys/kernel/unprivileged_userns_clone") == Some(0) {
            let found = "kernel.unprivileged_userns_clone is 0: bwrap and browsers fail inside";
            return Check::warn(NAME, found, "sysctl kernel.unprivileged_userns_clone=1");
        }
        if self.number("proc/sys/kernel/apparmor_restrict_unprivileged_userns") == Some(1) {
            let found = "AppArmor restricts user namespaces: bwrap and browsers may fail inside";
            return Check::warn(
                NAME,
                found,
                "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
            );
        }
        Check::ok(NAME, "allowed")
    }

    fn fuse(&self) -> Check {
        const NAME: &str = "own numbers";
        if self.path("dev/fuse").exists() {
            return Check::ok(NAME, "/dev/fuse is there");
        }
        let found = "no /dev/fuse: sandboxes see the host's memory, load and CPUs in /proc";
        Check::warn(NAME, found, "modprobe fuse (Debian's kernels have it)")
    }

    fn seccomp(&self) -> Check {
        let status = self.read("proc/self/status").unwrap_or_default();
        if status.lines().any(|line| line.starts_with("Seccomp:")) {
            Check::ok("seccomp", "there")
        } else {
            let mend = "a kernel with CONFIG_SECCOMP_FILTER (Debian's have it)";
            Check::fail("seccomp", "this kernel has none", mend)
        }
    }

    fn tools(&self, pool: Option<PoolMode>) -> Vec<Check> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = TOOLS.iter().map(|(tool, package)| self.tool(&path, tool, package));
        found.map(|check| for_pool(check, pool, &[PoolMode::Loop])).collect()
    }

    fn tool(&self, path: &OsStr, tool: &'static str, package: &str) -> Check {
        // A plain user's PATH often lacks these two; the engine looks there too.
        let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from);
        let found = std::env::split_paths(path)
            .chain(usual)
            .map(|folder| self.root.join(folder.strip_prefix("/").unwrap_or(&folder)).join(tool))
            .find(|file| file.is_file());
        match found {
            Some(file) => Check::ok(tool, file.display().to_string()),
            None => Check::fail(
                tool,
                format!("{tool} is not installed"),
                format!("apt install {package}"),
            ),
        }
    }

    fn space(&self, data_dir: &Path) -> Check {
        const NAME: &str = "space";
        let Some((folder, free)) = free_bytes(data_dir) else {
            let found = format!("cannot tell how much is free at {}", data_dir.display());
            return Check::warn(NAME, found, "check the folder with: df");
        };
        let found = format!(
            "{}.{} GB free at {}",
            free / 1_000_000_000,
            free / 100_000_000 % 10,
            folder.display()
        );
        let mend = "free some, or choose another disk with --data-dir";
        match free {
            _ if free < LEAST_SPACE => Check::fail(NAME, format!("only {found}"), mend),
            _ if free < GOOD_SPACE => Check::warn(NAME, format!("only {found}"), mend),
            _ => Check::ok(NAME, found),
        }
    }

    /// Nobody else may own ids of our ranges.
    fn ids(&self) -> Check {
        const NAME: &str = "ids";
        let ours = FIRST_ID..FIRST_ID + ALL_IDS;
        let mut clash = Vec::new();
        for file in ["etc/subuid", "etc/subgid"] {
            for line in self.read(file).unwrap_or_default().lines() {
                let mut fields = line.split(':');
                let who = fields.next().unwrap_or_default();
                let mut number =
                    || fields.next().and_then(|field| field.trim().parse::<u64>().ok());
                if let (Some(start), Some(count)) = (number(), number())
                    && start < ours.end
                    && start.saturating_add(count) > ours.start
                {
                    clash.push(format!("{who} in /{file}"));
                }
            }
        }
        if clash.is_empty() {
            return Check::ok(NAME, format!("{} to {} are free", ours.start, ours.end - 1));
        }
        let found = format!("ids of sandboxes are given to: {}", clash.join(", "));
        let mend = format!("move those ranges below {FIRST_ID}, or above {}", ours.end - 1);
        Check::fail(NAME, found, mend)
    }

    fn processes(&self) -> Check {
        const NAME: &str = "process ids";
        match self.number("proc/sys/kernel/pid_max") {
            Some(most) if most < 131_072 => Check::warn(
                NAME,
                format!("kernel.pid_max is {most}: all sandboxes share it"),
                "sysctl kernel.pid_max=4194304",
            ),
            Some(most) => Check::ok(NAME, format!("up to {most}")),
            None => Check::ok(NAME, "no limit is told"),
        }
    }
}

/// What is missing stops only those modes of the pool that need it. Where none was asked for, plain folders
/// take their place.
fn for_pool(check: Check, pool: Option<PoolMode>, needed_by: &[PoolMode]) -> Check {
    match pool {
        _ if check.status != Status::Fail => check,
        Some(mode) if needed_by.contains(&mode) => check,
        Some(mode) => {
            let found = format!("{}; a pool of the mode {mode} does without", check.found);
            Check { status: Status::Ok, found, mend: None, ..check }
        }
        None => {
            let found = format!(
                "{}; without it volumes are plain folders, disk limits do not hold and copies are slow",
                check.found
            );
            Check { status: Status::Warn, found, ..check }
        }
    }
}

/// What a `/usr` on a file system with this magic number is good for.
fn usr_on(magic: u64) -> Check {
    const NAME: &str = "/usr";
    if magic == OVERLAYFS {
        let found = "on overlayfs, whose ids the kernel cannot map: this is a container";
        return Check::fail(NAME, found, "run the engine on the machine itself");
    }
    Check::ok(NAME, "can be mapped")
}

/// Below a `chroot` into a plain folder no mount is at `/`.
fn has_root_mount(mountinfo: &str) -> bool {
    mountinfo.lines().any(|line| line.split(' ').nth(4) == Some("/"))
}

/// The first two numbers of a kernel's release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Free bytes for us at the folder, or at the nearest one above it that exists.
fn free_bytes(folder: &Path) -> Option<(PathBuf, u64)> {
    let folder = folder.ancestors().find(|folder| folder.exists())?;
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some((folder.to_owned(), stat.f_bavail.saturating_mul(stat.f_frsize)))
}

/// Which controllers are where.
#[derive(Debug, PartialEq, Eq)]
struct Layout {
    /// Where v2 is, and its controllers.
    v2: Option<(String, Vec<String>)>,
    /// Controllers of v1.
    v1: Vec<String>,
}

impl Layout {
    fn read(mountinfo: &str, controllers: impl Fn(&str) -> Option<String>) -> Self {
        let mut layout = Self { v2: None, v1: Vec::new() };
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let Some(at) = left.split(' ').nth(4) else { continue };
            let mut right = right.split(' ');
            match right.next() {
                Some("cgroup2") if layout.v2.is_none() => {
                    let words = controllers(at).unwrap_or_default();
                    let words = words.split_whitespace().map(str::to_owned).collect();
                    layout.v2 = Some((at.to_owned(), words));
                }
                Some("cgroup") => {
                    let options = right.nth(1).unwrap_or_default();
                    let known = ["cpu", "cpuset", "memory", "pids", "freezer"];
                    let found = options.split(',').filter(|option| known.contains(option));
                    layout.v1.extend(found.map(str::to_owned));
                }
                _ => {}
            }
        }
        layout
    }

    fn missing(&self) -> Vec<&'static str> {
        let has = |name: &str| {
            let v2 = self.v2.iter().flat_map(|(_, names)| names);
            v2.chain(&self.v1).any(|found| found == name)
        };
        ["memory", "cpu", "pids"].into_iter().filter(|name| !has(name)).collect()
    }
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let v1 = self.v1.join(", ");
        match &self.v2 {
            Some((at, names)) if self.v1.is_empty() => {
                write!(f, "v2 at {at}: {}", names.join(", "))
            }
            Some((at, names)) if names.is_empty() => write!(f, "hybrid: {v1} by v1, v2 at {at}"),
            Some((at, names)) => {
                write!(f, "hybrid: {v1} by v1, {} by v2 at {at}", names.join(", "))
            }
            None if self.v1.is_empty() => f.write_str("none is mounted"),
            None => write!(f, "v1: {v1}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use tempfile::{TempDir, tempdir};

    use super::*;

    fn host(files: &[(&str, &str)]) -> (TempDir, Host) {
        let folder = tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = folder.path().to_owned();
        (folder, Host { root, release: "6.12.3-amd64".to_owned(), is_root: true })
    }

    #[test]
    fn kernels() {
        let (_keep, mut host) = host(&[]);
        assert_eq!(host.kernel().status, Status::Ok);
        for (release, status) in [
            ("6.11.9", Status::Fail),
            ("6.18.44-fc-v669", Status::Ok),
            ("7.0", Status::Ok),
            ("5.15", Status::Fail),
            ("odd", Status::Fail),
        ] {
            release.clone_into(&mut host.release);
            let check = host.kernel();
            assert_eq!(check.status, status, "{release}");
            assert_eq!(check.found.contains("6.12 or newer is needed"), status == Status::Fail);
        }
    }

    #[test]
    fn file_systems_may_be_modules() {
        let (_keep, host) = host(&[
            ("proc/filesystems", "nodev\toverlay\n\text4\n"),
            (
                "lib/modules/6.12.3-amd64/modules.dep",
                "kernel/fs/btrfs/btrfs.ko.xz: kernel/lib/xor.ko.xz\nkernel/fs/x/noterofs.ko:\n",
            ),
        ]);
        let status: Vec<_> = host.filesystems(None).iter().map(|check| check.status).collect();
        assert_eq!(status, [Status::Ok, Status::Ok, Status::Warn]);
    }

    #[test]
    fn what_the_pool_needs_is_what_its_mode_needs() {
        let (_keep, bare) = host(&[("proc/filesystems", "nodev\toverlay\n\text4\n")]);
        let found = |pool| {
            let btrfs = bare.filesystems(pool)[1].status;
            (btrfs, bare.loop_devices(pool).status)
        };
        assert_eq!(found(Some(PoolMode::Loop)), (Status::Fail, Status::Fail));
        assert_eq!(found(Some(PoolMode::Native)), (Status::Fail, Status::Ok));
        assert_eq!(found(Some(PoolMode::Folder)), (Status::Ok, Status::Ok));
        assert_eq!(found(None), (Status::Warn, Status::Warn));
        assert!(bare.loop_devices(None).found.contains("disk limits do not hold"));
    }

    #[test]
    fn control_group_layouts() {
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n";
        let v1 = "33 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            34 31 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
            35 31 0:33 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n\
            36 31 0:34 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n";
        let read =
            |text: &str, controllers: &str| Layout::read(text, |_| Some(controllers.to_owned()));
        let pure = read(v2, "cpu io memory pids\n");
        assert!(pure.missing().is_empty() && pure.to_string().starts_with("v2 at /sys/fs/cgroup"));
        assert_eq!(read(v2, "cpu pids").missing(), ["memory"]);
        let hybrid = read(&format!("{v1}{v2}"), "");
        assert!(hybrid.missing().is_empty());
        assert!(hybrid.to_string().starts_with("hybrid: memory, cpu, pids by v1"), "{hybrid}");
        assert!(read(v1, "").to_string().starts_with("v1: "));
        assert_eq!(read("", "").missing().len(), 3);
        // The runtime refuses to start without version 2, so this must not be a mere warning.
        let (_keep, old) = host(&[("proc/self/mountinfo", v1)]);
        assert_eq!(old.cgroups().status, Status::Fail);
        let (_keep, new) = host(&[
            ("proc/self/mountinfo", v2),
            ("sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n"),
        ]);
        assert_eq!(new.cgroups().status, Status::Ok);
    }

    #[test]
    fn switches_are_seen() {
        let (_keep, off) = host(&[
            ("proc/self/ns/user", ""),
            ("proc/sys/user/max_user_namespaces", "0\n"),
            ("proc/sys/kernel/unprivileged_userns_clone", "0\n"),
            ("proc/sys/kernel/pid_max", "32768\n"),
            ("proc/self/status", "Name:\tx\nSeccomp:\t0\n"),
        ]);
        assert_eq!(off.user_namespaces().status, Status::Fail);
        assert_eq!(off.nested_namespaces().status, Status::Warn);
        assert_eq!(off.processes().status, Status::Warn);
        assert_eq!(off.seccomp().status, Status::Ok);
        let (_keep, bare) = host(&[]);
        assert_eq!(bare.user_namespaces().status, Status::Fail);
        assert_eq!(bare.seccomp().status, Status::Fail);
        assert_eq!(bare.loop_devices(Some(PoolMode::Loop)).status, Status::Fail);
        assert_eq!(bare.nested_namespaces().status, Status::Ok);
        assert_eq!(bare.fuse().status, Status::Warn);
        let (_keep, fuse) = host(&[("dev/fuse", "")]);
        assert_eq!(fuse.fuse().status, Status::Ok);
    }

    #[test]
    fn foreign_id_ranges_are_found() {
        let ids = |text: &str| {
            let (_keep, host) = host(&[("etc/subuid", "me:100000:65536\n"), ("etc/subgid", text)]);
            host.ids().status
        };
        assert_eq!(ids(""), Status::Ok);
        assert_eq!(ids("big:1000000000:73741824\n"), Status::Ok, "ends right before ours");
        assert_eq!(ids("big:1000000000:73741825\n"), Status::Fail);
        assert_eq!(ids("big:1073741824:1\n"), Status::Fail);
        assert_eq!(ids("big:3221225472:10\n"), Status::Ok, "begins right behind ours");
        assert_eq!(ids("nonsense\n:\n"), Status::Ok);
    }

    #[test]
    fn chroots_and_containers_are_seen() {
        let root = ("proc/self/mountinfo", "26 1 254:0 / / rw - ext4 /dev/vda rw\n");
        let (_keep, plain) = host(&[root]);
        assert_eq!(plain.root_folder().status, Status::Ok);
        let below = ("proc/self/mountinfo", "30 26 0:26 / /proc rw - proc proc rw\n");
        let (_keep, folder) = host(&[below]);
        assert_eq!(folder.root_folder().status, Status::Fail, "into a folder");
        // PID 1 has the same mounts and another root.
        let (keep, moved) = host(&[root, ("proc/1/root/x", ""), ("proc/self/ns/mnt", "")]);
        fs::create_dir_all(keep.path().join("proc/1/ns")).unwrap();
        fs::hard_link(keep.path().join("proc/self/ns/mnt"), keep.path().join("proc/1/ns/mnt"))
            .unwrap();
        assert_eq!(moved.root_folder().status, Status::Fail, "into a mount");
        assert_eq!(usr_on(OVERLAYFS).status, Status::Fail);
        assert_eq!(usr_on(0xef53).status, Status::Ok);
    }

    #[test]
    fn what_egress_needs_is_looked_at() {
        let (_keep, bare) = host(&[]);
        assert_eq!(bare.resolver().status, Status::Warn);
        assert_eq!(bare.roots().status, Status::Warn);
        let (_keep, told) = host(&[
            ("etc/resolv.conf", "nameserver 192.0.2.1\n"),
            ("etc/ssl/certs/ca-certificates.crt", "no certificate\n"),
        ]);
        assert_eq!(told.resolver().found, "192.0.2.1:53");
        assert_eq!(told.roots().status, Status::Warn);
    }

    #[test]
    fn tools_and_space() {
        let (_keep, host) = host(&[("opt/bin/mkfs.btrfs", "")]);
        assert_eq!(host.tool(OsStr::new("/bin:/opt/bin"), "mkfs.btrfs", "p").status, Status::Ok);
        let missing = host.tool(OsStr::new("/bin"), "mkfs.btrfs", "btrfs-progs");
        assert_eq!(missing.mend.as_deref(), Some("apt install btrfs-progs"));
        let (folder, _) = free_bytes(Path::new("/no/such/folder")).unwrap();
        assert_eq!(folder, Path::new("/"));
    }

    #[test]
    fn what_is_not_fine_says_how_to_mend_it() {
        let (_keep, bare) = host(&[]);
        for check in bare.all(Path::new("/")) {
            assert_eq!(check.status == Status::Ok, check.mend.is_none(), "{check:?}");
        }
    }
}
