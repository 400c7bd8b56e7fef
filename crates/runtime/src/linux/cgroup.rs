//! Control groups: limits, freeze, kill, usage; version 2, version 1 and hybrid hosts.
//!
//! Owns, in each hierarchy that it uses, the folder `<engine>/<session>` (limits) and its child
//! `run` (init and the commands), and in version 2 `<engine>/shim-<session>`. Freeze, kill, birth
//! and CPU time are always version 2's; memory, pids and cpu limits are version 2's where the
//! controllers are there and version 1's else. Invariant: nothing outside of `<engine>` is written,
//! but a controller may be enabled for the children of the version 2 root. Called by the shim
//! (make), by serve (freeze, kill, remove) and by `doctor` (detect).
//!
//! Why `run`: it holds the process limit, its parent a little more. When a fork bomb has filled
//! `run`, init still finds room in the parent for the next command. Version 2 allows no process in a
//! group that has groups with controllers; there the room is in `relief`, empty but for that moment.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::{Limits, Usage};

/// Processes that fit beside a full `run`.
const PID_RESERVE: u32 = 32;
/// Length of the CPU quota's period, µs.
const PERIOD_US: u64 = 100_000;
/// Version 2's sibling of `run`.
const RELIEF: &str = "relief";
/// Name of a group that waits for a session begins so.
pub(crate) const SPARE_PREFIX: &str = "spare-";
/// Takes the processes of a visible root that cannot keep them.
const OTHERS: &str = "bivouac-others";
const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];

/// Where the hierarchies of this host are mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hierarchies {
    /// The version 2 root.
    pub unified: PathBuf,
    /// Controllers that version 2 has.
    pub unified_controllers: Vec<String>,
    /// Version 1 roots by controller.
    pub legacy: BTreeMap<String, PathBuf>,
}

impl Hierarchies {
    /// Looks at this host's mounts.
    ///
    /// # Errors
    /// When version 2 is not mounted, or a controller that limits need is nowhere.
    pub fn detect() -> io::Result<Self> {
        Self::parse(&std::fs::read_to_string("/proc/self/mountinfo")?, |unified| {
            std::fs::read_to_string(unified.join("cgroup.controllers"))
        })
    }

    fn parse(
        mountinfo: &str,
        controllers: impl FnOnce(&Path) -> io::Result<String>,
    ) -> io::Result<Self> {
        let (mut unified, mut legacy) = (None, BTreeMap::new());
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let (Some(root), Some(at)) = (left.split(' ').nth(3), left.split(' ').nth(4)) else {
                continue;
            };
            let mut right = right.split(' ');
            let (kind, options) = (right.next(), right.nth(1).unwrap_or(""));
            match kind {
                Some("cgroup2") if root == "/" && unified.is_none() => {
                    unified = Some(PathBuf::from(at));
                }
                Some("cgroup") => {
                    for name in options.split(',').filter(|o| CONTROLLERS.contains(o)) {
                        legacy.insert(name.to_owned(), PathBuf::from(at));
                    }
                }
                _ => {}
            }
        }
        let unified = unified.ok_or_else(|| {
            io::Error::other(
                "no cgroup v2 hierarchy is mounted (mount -t cgroup2 none /sys/fs/cgroup)",
            )
        })?;
        let unified_controllers: Vec<String> =
            controllers(&unified)?.split_whitespace().map(str::to_owned).collect();
        for name in CONTROLLERS {
            if !legacy.contains_key(name) && !unified_controllers.iter().any(|c| c == name) {
                return Err(io::Error::other(format!(
                    "the {name} controller is in no mounted cgroup hierarchy"
                )));
            }
        }
        Ok(Self { unified, unified_controllers, legacy })
    }

    /// Whether limits of this controller are version 2's.
    fn unified_has(&self, controller: &str) -> bool {
        !self.legacy.contains_key(controller)
    }

    /// Controllers that version 2 limits by, as its `cgroup.subtree_control` takes them.
    fn unified_wanted(&self) -> String {
        let wanted = CONTROLLERS.iter().filter(|c| self.unified_has(c)).map(|c| format!("+{c}"));
        wanted.collect::<Vec<_>>().join(" ")
    }

    /// Folders of `<root>/<engine>` in every hierarchy that is used.
    fn engine_folders(&self, engine: &str) -> Vec<PathBuf> {
        let mut out = vec![self.unified.join(engine)];
        out.extend(self.legacy.values().map(|root| root.join(engine)));
        out.dedup();
        out
    }

    /// Makes the engine's own folders. Idempotent.
    ///
    /// # Errors
    /// With the folder's name.
    pub fn make_engine(&self, engine: &str) -> io::Result<()> {
        // What a zygote that was killed has left.
        self.remove_spares(engine, SPARE_PREFIX);
        for folder in self.engine_folders(engine) {
            make(&folder)?;
        }
        let wanted = self.unified_wanted();
        if !wanted.is_empty() {
            self.enable(&wanted)?;
            write(&self.unified.join(engine).join("cgroup.subtree_control"), &wanted)?;
        }
        Ok(())
    }

    /// Enables controllers for the children of the visible root. In a container that is a group like
    /// others, which may not have processes and pass controllers on: they move to a child of it, as
    /// every manager of groups in a container has to do.
    fn enable(&self, wanted: &str) -> io::Result<()> {
        let file = self.unified.join("cgroup.subtree_control");
        match std::fs::write(&file, wanted) {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => {}
            other => return other.map_err(|e| named(&file, &e)),
        }
        let others = self.unified.join(OTHERS);
        make(&others)?;
        // They may fork meanwhile.
        for _ in 0..100 {
            let inside = read(&self.unified.join("cgroup.procs"))?;
            for pid in inside.lines() {
                // Gone meanwhile, or of another pid namespace (0): the last attempt tells.
                let _ = std::fs::write(others.join("cgroup.procs"), pid);
            }
            if std::fs::write(&file, wanted).is_ok() {
                return Ok(());
            }
        }
        std::fs::write(&file, wanted).map_err(|e| {
            let text = format!(
                "{}: {e}: this control group has processes that cannot be moved out of it; start the \
                 engine where {} is the machine's root group, or one without foreign processes",
                file.display(),
                self.unified.display()
            );
            io::Error::new(e.kind(), text)
        })
    }

    /// Whether moving a process between groups is slow here: limits are version 1's, and such a move
    /// waits for a grace period of the kernel.
    #[must_use]
    pub(crate) fn moves_wait(&self) -> bool {
        !self.legacy.is_empty()
    }

    /// Version 1 roots, each once: controllers may share one.
    fn legacy_roots(&self) -> Vec<&PathBuf> {
        let mut roots: Vec<_> = self.legacy.values().collect();
        roots.sort();
        roots.dedup();
        roots
    }

    /// Makes version 1 groups of this name and moves this process into them.
    ///
    /// # Errors
    /// With the file's name.
    pub(crate) fn enter_spare(&self, engine: &str, name: &str) -> io::Result<()> {
        for root in self.legacy_roots() {
            let folder = root.join(engine).join(name);
            make(&folder)?;
        }
        for (controller, root) in &self.legacy {
            let mut folder = root.join(engine).join(name);
            if controller == "pids" {
                folder.push("run");
                make(&folder)?;
            }
            write(&folder.join("cgroup.procs"), "0")?;
        }
        Ok(())
    }

    /// Removes version 1 groups of spares that are gone: their names begin with `prefix`. Those that
    /// are in use stay.
    pub(crate) fn remove_spares(&self, engine: &str, prefix: &str) {
        for root in self.legacy_roots() {
            let entries = std::fs::read_dir(root.join(engine)).into_iter().flatten().flatten();
            for entry in entries.filter(|e| e.file_name().to_string_lossy().starts_with(prefix)) {
                let _ = std::fs::remove_dir(entry.path().join("run"));
                let _ = std::fs::remove_dir(entry.path());
            }
        }
    }

    /// Waits for the end of a zygote and of its spares, and removes what is left of their groups.
    ///
    /// # Errors
    /// When it does not end within 10 s.
    pub(crate) fn wait_for_spares(&self, engine: &str, ended: impl Fn() -> bool) -> io::Result<()> {
        until(Duration::from_secs(10), || Ok(ended()))?;
        self.remove_spares(engine, SPARE_PREFIX);
        Ok(())
    }

    /// Removes the engine's own folders when no session is left in them.
    pub fn remove_engine(&self, engine: &str) {
        self.remove_spares(engine, SPARE_PREFIX);
        for folder in self.engine_folders(engine) {
            let _ = std::fs::remove_dir(folder);
        }
    }

    /// Sessions of which a folder is left.
    ///
    /// # Errors
    /// When the engine's folder cannot be read.
    pub fn sessions(&self, engine: &str) -> io::Result<Vec<String>> {
        let mut out = Vec::new();
        for folder in self.engine_folders(engine) {
            let entries = match std::fs::read_dir(&folder) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other?,
            };
            for entry in entries {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    let name = entry.file_name().to_string_lossy().into_owned();
                    out.push(name.strip_prefix("shim-").unwrap_or(&name).to_owned());
                }
            }
        }
        out.sort();
        out.dedup();
        Ok(out)
    }

    /// The groups of one session.
    #[must_use]
    pub fn session(&self, engine: &str, session: &str) -> SessionGroups {
        SessionGroups {
            hierarchies: self.clone(),
            engine: engine.to_owned(),
            session: session.to_owned(),
        }
    }
}

/// The control groups of one session.
#[derive(Debug, Clone)]
pub struct SessionGroups {
    hierarchies: Hierarchies,
    engine: String,
    session: String,
}

/// Files that the shim keeps open to tell why a command ended.
#[derive(Debug)]
pub(crate) struct Counters {
    memory: OwnedFd,
    pids: OwnedFd,
}

impl Counters {
    /// How often the kernel killed at the memory limit, and how often the process limit refused.
    pub(crate) fn read(&self) -> (u64, u64) {
        (counter(&self.memory, "oom_kill"), counter(&self.pids, "max"))
    }
}

fn counter(file: &OwnedFd, key: &str) -> u64 {
    let mut buffer = [0u8; 512];
    let got = rustix::io::pread(file, &mut buffer, 0).unwrap_or(0);
    keyed(&String::from_utf8_lossy(&buffer[..got]), key)
}

/// The number behind `key` in a flat keyed file.
fn keyed(text: &str, key: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(name, _)| *name == key)
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

impl SessionGroups {
    /// Folder of version 2.
    pub(crate) fn unified(&self) -> PathBuf {
        self.hierarchies.unified.join(&self.engine).join(&self.session)
    }

    /// Folder of the shim's own group.
    pub(crate) fn shim(&self) -> PathBuf {
        self.hierarchies.unified.join(&self.engine).join(format!("shim-{}", self.session))
    }

    /// Makes the shim's own group. Its memory limit is version 2's alone: version 1 would have each shim
    /// moved, which waits for the kernel.
    ///
    /// # Errors
    /// With the file's name.
    pub(crate) fn make_shim(&self, memory: u64) -> io::Result<()> {
        let folder = self.shim();
        make(&folder)?;
        if self.hierarchies.unified_has("memory") {
            write(&folder.join("memory.max"), &memory.to_string())?;
            let _ = write(&folder.join("memory.swap.max"), "0");
        }
        Ok(())
    }

    /// Folder that has the memory limit, and whether that is version 2's.
    pub(crate) fn memory_folder(&self) -> (PathBuf, bool) {
        (self.folder("memory"), self.hierarchies.unified_has("memory"))
    }

    /// The version 2 folder that init was born in and stays in.
    pub(crate) fn init_folder(&self) -> PathBuf {
        self.unified().join("run")
    }

    /// Folder that counts init and the commands.
    pub(crate) fn pids_folder(&self) -> PathBuf {
        self.folder("pids").join("run")
    }

    fn folder(&self, controller: &str) -> PathBuf {
        match self.hierarchies.legacy.get(controller) {
            Some(root) => root.join(&self.engine).join(&self.session),
            None => self.unified(),
        }
    }

    /// Makes the groups and writes the limits; `owner` is the host id of the sandbox's root, which
    /// may make leaves below `run`. With a spare, its version 1 groups become the session's.
    ///
    /// # Errors
    /// With the file's name. What was made stays, for [`remove`](Self::remove).
    pub(crate) fn make(&self, limits: &Limits, owner: u32, spare: Option<&str>) -> io::Result<()> {
        let unified = self.unified();
        make(&unified)?;
        for root in self.hierarchies.legacy_roots().into_iter().filter(|_| spare.is_some()) {
            let folder = root.join(&self.engine);
            let from = folder.join(spare.unwrap_or_default());
            std::fs::rename(&from, folder.join(&self.session)).map_err(|e| named(&from, &e))?;
        }
        let run = unified.join("run");
        let (memory, pids, cpu) = (self.folder("memory"), self.folder("pids"), self.folder("cpu"));
        for folder in [&memory, &pids, &cpu] {
            make(folder)?;
        }
        // Programs inside see nothing above `run`: the limits that they size themselves by are there
        // too.
        let passed = self.hierarchies.unified_wanted();
        if !passed.is_empty() {
            write(&unified.join("cgroup.subtree_control"), &passed)?;
        }
        if self.hierarchies.unified_has("pids") {
            make(&unified.join(RELIEF))?;
        }
        make(&run)?;
        make(&pids.join("run"))?;
        if self.hierarchies.unified_has("memory") {
            for folder in [&memory, &run] {
                write(&folder.join("memory.max"), &limits.memory_bytes.to_string())?;
                // Swap would turn the memory limit into a promise about the disk.
                let _ = write(&folder.join("memory.swap.max"), "0");
            }
        } else {
            write(&memory.join("memory.limit_in_bytes"), &limits.memory_bytes.to_string())?;
        }
        let quota = u64::from(limits.vcpus) * PERIOD_US;
        if self.hierarchies.unified_has("cpu") {
            for folder in [&cpu, &run] {
                write(&folder.join("cpu.max"), &format!("{quota} {PERIOD_US}"))?;
            }
        } else {
            write(&cpu.join("cpu.cfs_period_us"), &PERIOD_US.to_string())?;
            write(&cpu.join("cpu.cfs_quota_us"), &quota.to_string())?;
        }
        write(&pids.join("pids.max"), &(limits.pids + PID_RESERVE).to_string())?;
        write(&pids.join("run/pids.max"), &limits.pids.to_string())?;
        // Leaves are many and short-lived; a bound keeps a guest from filling kernel memory.
        write(&run.join("cgroup.max.descendants"), "2000")?;
        for path in [run.clone(), run.join("cgroup.procs"), unified.join("cgroup.procs")] {
            std::os::unix::fs::chown(&path, Some(owner), Some(owner))
                .map_err(|e| named(&path, &e))?;
        }
        Ok(())
    }

    /// The version 2 folder that init is born in.
    ///
    /// # Errors
    /// When it is missing.
    pub(crate) fn birth(&self) -> io::Result<OwnedFd> {
        open(&self.unified().join("run"), rustix::fs::OFlags::DIRECTORY)
    }

    /// `cgroup.procs` of the version 1 groups that init belongs to. It moves itself, since the move
    /// waits for the kernel (a grace period), and the shim has other things to do meanwhile. Version 1
    /// judges by who opened the file.
    ///
    /// # Errors
    /// With the file's name.
    pub(crate) fn legacy_homes(&self) -> io::Result<Vec<OwnedFd>> {
        let homes = self.hierarchies.legacy.iter().map(|(controller, root)| {
            let mut folder = root.join(&self.engine).join(&self.session);
            if controller == "pids" {
                folder.push("run");
            }
            open(&folder.join("cgroup.procs"), rustix::fs::OFlags::WRONLY)
        });
        homes.collect()
    }

    /// Init's way around a full `run`: `cgroup.procs` of a group that is not full, and of `run`; and
    /// whether the first is `relief`. Version 1 takes the parent, version 2 allows no process there.
    ///
    /// # Errors
    /// When a file is missing.
    pub(crate) fn around_full(&self) -> io::Result<([OwnedFd; 2], bool)> {
        let (folder, relief) = (self.folder("pids"), self.hierarchies.unified_has("pids"));
        let outside = if relief { folder.join(RELIEF) } else { folder.clone() };
        let flags = rustix::fs::OFlags::WRONLY;
        let open = |folder: PathBuf| open(&folder.join("cgroup.procs"), flags);
        Ok(([open(outside)?, open(folder.join("run"))?], relief))
    }

    /// Opens what [`Counters`] reads.
    ///
    /// # Errors
    /// When a file is missing.
    pub(crate) fn counters(&self) -> io::Result<Counters> {
        let memory = if self.hierarchies.unified_has("memory") {
            self.folder("memory").join("memory.events")
        } else {
            self.folder("memory").join("memory.oom_control")
        };
        let flags = rustix::fs::OFlags::RDONLY;
        Ok(Counters {
            memory: open(&memory, flags)?,
            pids: open(&self.folder("pids").join("run/pids.events"), flags)?,
        })
    }

    /// What the session used so far.
    ///
    /// # Errors
    /// When the groups are gone.
    pub(crate) fn usage(&self) -> io::Result<Usage> {
        let unified = self.unified();
        let cpu = read(&unified.join("cpu.stat"))?;
        let (memory_file, oom_file) = if self.hierarchies.unified_has("memory") {
            ("memory.current", "memory.events")
        } else {
            ("memory.usage_in_bytes", "memory.oom_control")
        };
        let memory = self.folder("memory");
        let pids = self.folder("pids").join("run");
        let number = |text: String| text.trim().parse().unwrap_or(0);
        Ok(Usage {
            cpu_ms: keyed(&cpu, "usage_usec") / 1000,
            memory_bytes: number(read(&memory.join(memory_file))?),
            pids: number(read(&pids.join("pids.current"))?),
            oom_kills: keyed(&read(&memory.join(oom_file))?, "oom_kill"),
            pid_limit_hits: keyed(&read(&pids.join("pids.events"))?, "max"),
            network: None,
        })
    }

    /// Stops or continues every process. Answers when the kernel reports it.
    ///
    /// # Errors
    /// When the group is gone, or does not settle within 10 s.
    pub(crate) fn freeze(&self, frozen: bool) -> io::Result<()> {
        let unified = self.unified();
        write(&unified.join("cgroup.freeze"), if frozen { "1" } else { "0" })?;
        let wanted = u64::from(frozen);
        self.until(|| Ok(keyed(&read(&unified.join("cgroup.events"))?, "frozen") == wanted))
            .map_err(|e| named(&unified, &e))
    }

    /// Has the kernel take back all memory of the session that it can, to swap too; answers how many bytes
    /// less it has then.
    ///
    /// # Errors
    /// With the file's name.
    pub(crate) fn page_out(&self) -> io::Result<u64> {
        let memory = self.folder("memory");
        let used = || Ok::<_, io::Error>(self.usage()?.memory_bytes);
        let before = used()?;
        if !self.hierarchies.unified_has("memory") {
            // Whatever processes it has: this is asked of the group, not of them.
            write(&memory.join("memory.force_empty"), "0")?;
            return Ok(before.saturating_sub(used()?));
        }
        // Else nothing of it ever swaps: see `make`.
        let groups = [memory.clone(), self.unified().join("run")];
        let swap = |most: &str| {
            groups.iter().try_for_each(|folder| write(&folder.join("memory.swap.max"), most))
        };
        swap("max")?;
        let reclaimed = self.reclaim(&memory, before);
        swap("0")?;
        reclaimed?;
        Ok(before.saturating_sub(used()?))
    }

    /// Version 2's way, piece by piece: a wish that the kernel cannot fulfil whole is an error, so the last
    /// one ends it.
    fn reclaim(&self, memory: &Path, bytes: u64) -> io::Result<()> {
        const PIECE: u64 = 64 << 20;
        let file = memory.join("memory.reclaim");
        for _ in 0..=bytes / PIECE {
            match std::fs::write(&file, PIECE.to_string()) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(named(&file, &e)),
            }
        }
        Ok(())
    }

    /// Whether its processes are kept from running.
    pub(crate) fn is_frozen(&self) -> bool {
        let asked = read(&self.unified().join("cgroup.freeze"));
        asked.is_ok_and(|text| text.trim() == "1")
    }

    /// Kills every process and waits until none is left. Nothing to kill is success.
    ///
    /// # Errors
    /// When processes do not go away within 10 s.
    pub(crate) fn kill(&self) -> io::Result<()> {
        kill_folder(&self.unified())
    }

    /// Kills what is left of the shim, and removes its group.
    ///
    /// # Errors
    /// As [`kill`](Self::kill).
    pub(crate) fn remove_shim(&self) -> io::Result<()> {
        let shim = self.shim();
        kill_folder(&shim)?;
        remove(&shim)
    }

    /// Kills what is left and removes all folders of the session. Idempotent.
    ///
    /// # Errors
    /// With the folder's name.
    pub(crate) fn remove(&self) -> io::Result<()> {
        self.kill()?;
        let mut folders = vec![self.unified()];
        folders.extend(self.hierarchies.legacy.keys().map(|c| self.folder(c)));
        folders.dedup();
        for folder in folders {
            // Folders below it: `run`, its leaves, and whatever a guest with delegation made.
            remove_tree(&folder)?;
        }
        Ok(())
    }

    fn until(&self, done: impl Fn() -> io::Result<bool>) -> io::Result<()> {
        until(Duration::from_secs(10), done)
    }
}

/// Polls with growing pauses until `done`.
pub(super) fn until(limit: Duration, done: impl Fn() -> io::Result<bool>) -> io::Result<()> {
    let deadline = Instant::now() + limit;
    let mut pause = Duration::from_micros(50);
    while !done()? {
        if Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "control group did not settle"));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(5));
    }
    Ok(())
}

fn kill_folder(folder: &Path) -> io::Result<()> {
    let missing = |e: &io::Error| e.kind() == io::ErrorKind::NotFound;
    match std::fs::write(folder.join("cgroup.kill"), "1") {
        Err(e) if missing(&e) => return Ok(()),
        other => other.map_err(|e| named(folder, &e))?,
    }
    // A frozen group is killed too; the kernel thaws what it kills.
    let events = folder.join("cgroup.events");
    until(Duration::from_secs(10), || match std::fs::read_to_string(&events) {
        Err(e) if missing(&e) => Ok(true),
        other => Ok(keyed(&other?, "populated") == 0),
    })
    .map_err(|e| named(folder, &e))
}

fn remove_tree(folder: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(|e| named(folder, &e))?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    remove(folder)
}

/// rmdir, patient: version 1 groups stay busy for a moment after their last process was reaped.
fn remove(folder: &Path) -> io::Result<()> {
    until(Duration::from_secs(10), || match std::fs::remove_dir(folder) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::ResourceBusy => Ok(false),
        Err(e) => Err(e),
    })
    .map_err(|e| named(folder, &e))
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn make(folder: &Path) -> io::Result<()> {
    match std::fs::create_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.map_err(|e| named(folder, &e)),
    }
}

fn write(file: &Path, text: &str) -> io::Result<()> {
    std::fs::write(file, text).map_err(|e| named(file, &e))
}

fn read(file: &Path) -> io::Result<String> {
    std::fs::read_to_string(file).map_err(|e| named(file, &e))
}

fn open(path: &Path, flags: rustix::fs::OFlags) -> io::Result<OwnedFd> {
    let flags = flags | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open(path, flags, rustix::fs::Mode::empty())
        .map_err(|e| named(path, &io::Error::from(e)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        35 31 0:32 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n";

    #[test]
    fn a_pure_version_2_host_is_recognised() {
        let found = Hierarchies::parse(V2, |_| Ok("cpuset cpu io memory pids\n".into())).unwrap();
        assert!(found.legacy.is_empty());
        assert!(found.unified_has("memory"));
    }

    #[test]
    fn a_hybrid_host_is_recognised() {
        let unified = V2.replace("/sys/fs/cgroup rw", "/sys/fs/cgroup/unified rw");
        let found = Hierarchies::parse(&(V1.to_owned() + &unified), |_| Ok("hugetlb".into()));
        let found = found.unwrap();
        assert_eq!(found.unified, Path::new("/sys/fs/cgroup/unified"));
        assert_eq!(found.legacy["cpu"], Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert!(!found.unified_has("pids"));
    }

    #[test]
    fn hosts_that_cannot_limit_are_refused() {
        assert!(Hierarchies::parse(V1, |_| Ok(String::new())).is_err());
        assert!(Hierarchies::parse(V2, |_| Ok("cpu memory".into())).is_err());
    }

    #[test]
    fn keyed_files() {
        assert_eq!(keyed("low 0\nmax 12\noom_kill 3\n", "oom_kill"), 3);
        assert_eq!(keyed("", "oom_kill"), 0);
        assert_eq!(keyed("max_x 9\n", "max"), 0);
    }
}
