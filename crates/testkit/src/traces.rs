//! Everything that an engine can leave on a machine, as a set that can be compared.
//!
//! Invariant: each kind has a test that plants one leftover and sees it found
//! (`crates/bivouac/tests/it/traces.rs`). A search that finds nothing because it looks in the wrong
//! place would otherwise pass for ever. Called by the tests of leaks; needs
//! [`crate::exclusive`], since it looks at the whole machine.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::wait::eventually;

/// What kind of thing was left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A process of the product, or one that lives in another network or pid namespace than ours.
    Process,
    /// A mount that names the product or the data folder.
    Mount,
    /// A loop device over a file in the data folder.
    Loop,
    /// A control group whose path names the product, in any hierarchy.
    Cgroup,
    /// A network namespace: held by a process, by an open file or by a mount.
    NetNamespace,
    /// An entry below `/run/bivouac`.
    Run,
    /// A file or folder in the data folder.
    File,
}

/// One thing on the machine.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Trace {
    /// Its kind.
    pub kind: Kind,
    /// What it is called.
    pub what: String,
}

/// Everything at one moment.
#[derive(Debug, Clone)]
pub struct Traces {
    data: PathBuf,
    found: BTreeSet<Trace>,
}

impl Traces {
    /// Looks around. `data` is the engine's data folder, there or not.
    #[must_use]
    pub fn before(data: &Path) -> Self {
        let mut found = BTreeSet::new();
        let mut add = |kind, names: Vec<String>| {
            found.extend(names.into_iter().map(|what| Trace { kind, what }));
        };
        add(Kind::Process, processes());
        add(Kind::Mount, mounts(data));
        add(Kind::Loop, loop_devices(data).into_iter().map(|(d, f)| format!("{d} {f}")).collect());
        add(Kind::Cgroup, cgroups());
        add(Kind::NetNamespace, net_namespaces());
        add(Kind::Run, tree(Path::new("/run/bivouac"), &|_| true));
        add(Kind::File, tree(data, &is_kept_file));
        Self { data: data.to_owned(), found }
    }

    /// Everything that was seen.
    #[must_use]
    pub fn all(&self) -> &BTreeSet<Trace> {
        &self.found
    }

    /// What is there now and was not then.
    #[must_use]
    pub fn added(&self) -> Vec<Trace> {
        Self::before(&self.data).found.difference(&self.found).cloned().collect()
    }

    /// Waits until the machine holds nothing that it did not hold then. Some things go late: the
    /// kernel frees network namespaces in the background.
    ///
    /// # Panics
    /// When something is still there at the deadline.
    pub async fn assert_same_after(&self, deadline: Duration) {
        eventually("every trace to be gone", deadline, async || {
            let added = self.added();
            if added.is_empty() { Ok(()) } else { Err(added) }
        })
        .await;
    }
}

/// Ids of all processes.
pub(crate) fn pids() -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|e| e.file_name().to_str()?.parse().ok()).collect()
}

/// A process's name as the kernel keeps it (15 bytes).
pub(crate) fn name_of(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

fn namespace(pid: i32, kind: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()
}

/// Whether a zygote keeps this process for sessions to come. Those come and go while an engine runs;
/// one whose zygote is gone is a leftover like any other, and a zygote that stays is found itself.
fn is_spare(pid: i32) -> bool {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    let parent = parent.and_then(|parent| parent.trim().parse().ok());
    groups.contains("/spare-") && parent.is_some_and(|parent| name_of(parent) == ZYGOTE)
}

/// Whether this is the control group of a spare whose zygote lives: its name has the zygote's id.
fn is_group_of_spare(path: &str) -> bool {
    let mut parts = path.split('/').filter_map(|part| part.strip_prefix("spare-"));
    let zygote = parts.next().and_then(|rest| rest.split('-').next()?.parse().ok());
    zygote.is_some_and(|zygote| name_of(zygote) == ZYGOTE)
}

/// Name of the process that inits and spares come from.
const ZYGOTE: &str = "bivouac-init";

fn processes() -> Vec<String> {
    let own = (namespace_of_self("net"), namespace_of_self("pid"));
    pids()
        .into_iter()
        .filter(|pid| !is_spare(*pid))
        .filter_map(|pid| {
            let name = name_of(pid);
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // After the name: state, parent, …; the start time is field 22 of the whole line.
            let rest: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
            if rest.first() == Some(&"Z") && !name.starts_with("bivouac") {
                return None;
            }
            let elsewhere = (namespace(pid, "net"), namespace(pid, "pid"));
            let foreign =
                |mine: &Option<PathBuf>, its: &Option<PathBuf>| its.is_some() && mine != its;
            let inside = foreign(&own.0, &elsewhere.0) || foreign(&own.1, &elsewhere.1);
            let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            let ours = exe.file_name().is_some_and(|n| n.as_bytes().starts_with(b"bivouac"))
                || exe.as_os_str().as_bytes().starts_with(b"/memfd:bivouac");
            (inside || ours || name.starts_with("bivouac"))
                .then(|| format!("{pid} {name} started {}", rest.get(19).unwrap_or(&"?")))
        })
        .collect()
}

fn namespace_of_self(kind: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/self/ns/{kind}")).ok()
}

/// The fields of a line of mountinfo: root, mount point, type and source, octal escapes undone.
fn mountinfo() -> Vec<(String, String, String)> {
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let (front, back) = line.split_once(" - ")?;
            let front: Vec<&str> = front.split(' ').collect();
            Some((unescape(front.get(4)?), front[3].to_owned(), back.to_owned()))
        })
        .collect()
}

fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

fn mounts(data: &Path) -> Vec<String> {
    let data = data.to_string_lossy().into_owned();
    mountinfo()
        .into_iter()
        .map(|(point, root, rest)| format!("{point} {root} {rest}"))
        .filter(|line| line.contains(&data) || line.contains("bivouac"))
        .collect()
}

/// Mount points at or below the folder.
pub(crate) fn mount_points(data: &Path) -> Vec<PathBuf> {
    mountinfo()
        .into_iter()
        .map(|(point, ..)| PathBuf::from(point))
        .filter(|p| p.starts_with(data))
        .collect()
}

/// Loop devices over a file below the folder: device and file.
pub(crate) fn loop_devices(data: &Path) -> Vec<(String, String)> {
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let device = entry.file_name().to_str()?.to_owned();
            let file = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
            let file = file.trim_end().to_owned();
            (Path::new(file.trim_end_matches(" (deleted)")).starts_with(data))
                .then_some((device, file))
        })
        .collect()
}

fn cgroups() -> Vec<String> {
    let roots: BTreeSet<String> = mountinfo()
        .into_iter()
        .filter(|(_, _, rest)| rest.starts_with("cgroup ") || rest.starts_with("cgroup2 "))
        .map(|(point, ..)| point)
        .collect();
    let mut found = Vec::new();
    for root in roots {
        folders(Path::new(&root), &mut |path| {
            let text = path.to_string_lossy();
            if text.contains("bivouac") && !is_group_of_spare(&text) {
                found.push(text.into_owned());
            }
        });
    }
    found
}

fn folders(path: &Path, each: &mut dyn FnMut(&Path)) {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            each(&entry.path());
            folders(&entry.path(), each);
        }
    }
}

fn net_namespaces() -> Vec<String> {
    let mut found = BTreeSet::new();
    let mut hold = |link: &Path| {
        let link = link.to_string_lossy();
        if link.starts_with("net:[") {
            found.insert(link.into_owned());
        }
    };
    let nsfs = fs::metadata("/proc/self/ns/net").map(|m| m.dev()).unwrap_or_default();
    for pid in pids().into_iter().filter(|pid| !is_spare(*pid)) {
        if let Some(link) = namespace(pid, "net") {
            hold(&link);
        }
        for fd in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let Ok(link) = fs::read_link(fd.path()) else { continue };
            hold(&link);
            // Opened through a mount it is called by its path, and only its device tells.
            if link.is_absolute()
                && let Ok(file) = fs::metadata(fd.path())
                && file.dev() == nsfs
            {
                hold(Path::new(&format!("net:[{}]", file.ino())));
            }
        }
    }
    for (_, root, rest) in mountinfo() {
        if rest.starts_with("nsfs ") {
            hold(Path::new(&root));
        }
    }
    found.into_iter().collect()
}

/// The database's side files come and go with its connections; logs of the engine are its own. Copies of
/// images' bundles are a cache of the pool, one for each image in use, which every start empties.
fn is_kept_file(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let cached = path.parent().is_some_and(|folder| folder.ends_with("trust/bases"));
    !(cached || name.ends_with("-wal") || name.ends_with("-shm") || name.ends_with("-journal"))
}

/// Every path below a folder, links not followed.
fn tree(root: &Path, wanted: &dyn Fn(&Path) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![root.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if wanted(&entry.path()) {
                found.push(entry.path().to_string_lossy().into_owned());
            }
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                open.push(entry.path());
            }
        }
    }
    found
}
