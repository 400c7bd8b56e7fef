//! The launch of a session, done by its shim while that is still single-threaded and privileged.
//!
//! ```text
//! Reserved -> Rooted -> Isolated -> Started
//! ```
//!
//! Each state is a type, so the order cannot be wrong. Invariant: what a step made is undone when a
//! later one fails: control groups by [`Reserved`]'s drop, mounts and namespaces by the end of the
//! processes that hold them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::cgroup::{Counters, SessionGroups};
use super::idmap::{self, IdRange};
use super::view::{self, View};
use super::{drives, netns, rootfs, trust};
use crate::LaunchSpec;
use crate::fault::{Armed, Point};
use crate::gate::{Gate, Parts};
use crate::keeper::Trust;
use crate::proto::{
    self, Assembler, DiskPlan, Frame, FromInit, GUEST_CAP, InitCgroups, InitConfig, InitStart,
    InitStarted, LaunchError, LaunchPlan, Steps, ToInit, ToZygote,
};
use crate::spare::{self, Spare};

/// How long init may take from `Go` to `Ready`.
const READY_MS: i64 = 20_000;

/// A running init, as the shim keeps it.
#[derive(Debug)]
pub(crate) struct Started {
    /// Frames to and from init.
    pub socket: OwnedFd,
    /// Readable when init is dead.
    pub pidfd: OwnedFd,
    /// Why a command may have ended.
    pub counters: Counters,
    /// Ids of the session.
    pub ids: IdRange,
    /// How long each step took.
    pub steps: Steps,
    /// What the sandbox sends arrives here. Keeps the gate's namespace; the shim is back in the host's.
    pub gate: Gate,
}

/// Runs all steps: `trust` while init is being cloned, and `meanwhile` when nothing is left to do but to
/// wait for init. `trust` answers certificates for the inside.
///
/// # Errors
/// The step's name and its chain of causes; everything is undone.
pub(crate) fn launch<T>(
    spec: &LaunchSpec,
    plan: &LaunchPlan,
    trust: impl FnOnce() -> io::Result<Option<Trust>>,
    meanwhile: impl FnOnce() -> Result<T, LaunchError>,
) -> Result<(Started, T), LaunchError> {
    let mut watch = Watch::new();
    let reserved = Reserved::new(spec, plan)?;
    watch.lap("control groups");
    let rooted = reserved.root(spec, plan, trust, &mut watch)?;
    let isolated = rooted.isolate(plan, &mut watch)?;
    let (mut started, done) = isolated.start(spec, plan, meanwhile)?;
    watch.lap("init builds its root");
    started.steps = watch.steps;
    Ok((started, done))
}

/// Times the steps.
struct Watch {
    last: Instant,
    steps: Steps,
}

impl Watch {
    fn new() -> Self {
        Self { last: Instant::now(), steps: Steps::new() }
    }

    fn lap(&mut self, step: &str) {
        let micros = u64::try_from(self.last.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.steps.push((step.to_owned(), micros));
        self.last = Instant::now();
    }
}

fn step<T>(name: &str, result: io::Result<T>) -> Result<T, LaunchError> {
    result.map_err(|e| LaunchError { step: name.to_owned(), message: e.to_string() })
}

fn reach(armed: Option<&Armed>, point: Point) -> Result<(), LaunchError> {
    step(point.name(), Armed::reach(armed, point))
}

/// Ids and control groups exist.
struct Reserved {
    ids: IdRange,
    groups: Undo,
    spare: Option<Spare>,
}

/// Removes the control groups unless the launch succeeds.
struct Undo {
    groups: SessionGroups,
    armed: bool,
}

impl Drop for Undo {
    fn drop(&mut self) {
        if self.armed {
            // What resists is found and removed by serve's reconciler.
            let _ = self.groups.remove();
        }
    }
}

impl Reserved {
    fn new(spec: &LaunchSpec, plan: &LaunchPlan) -> Result<Self, LaunchError> {
        let ids = step("id range", IdRange::of(spec.id_range))?;
        let groups = plan.hierarchies.session(&plan.cgroup, spec.session.as_str());
        let groups = Undo { groups, armed: true };
        let spare = step("spare", spare::take(&plan.init_zygote))?;
        let name = spare.as_ref().map(|spare| spare.name.as_str());
        step("control groups", groups.groups.make(&spec.limits, ids.first, name))?;
        reach(plan.fault.as_ref(), Point::Reserved)?;
        Ok(Self { ids, groups, spare })
    }

    /// Has init cloned, and makes the root and the gate while that goes on: most of the time of both
    /// is the kernel's, on another CPU.
    fn root(
        mut self,
        spec: &LaunchSpec,
        plan: &LaunchPlan,
        trust: impl FnOnce() -> io::Result<Option<Trust>>,
        watch: &mut Watch,
    ) -> Result<Rooted, LaunchError> {
        let birth = step("control groups", self.groups.groups.birth())?;
        let (place, gate) = match self.spare.take() {
            Some(Spare { socket, namespace, gate, .. }) => {
                (Place::Spare(socket), Some((namespace, gate)))
            }
            None => {
                (Place::Homes(step("control groups", self.groups.groups.legacy_homes())?), None)
            }
        };
        let cloning = step("init", Cloning::start(spec, plan, self.ids, &birth, place))?;
        let userns = step("id map of mounts", idmap::mount_namespace(self.ids))?;
        watch.lap("id map of mounts");
        let trust = step("egress broker", trust())?;
        watch.lap("egress broker");
        let lowers = step("trust", trust_layers(spec, plan, trust))?;
        watch.lap("trust");
        let mounts = step("root", rootfs::mounts(plan.way, &plan.upper, &lowers, userns.as_fd()))?;
        watch.lap("overlays and /dev");
        let drives = step(crate::MOUNT_STEP, drives::trees(plan, userns.as_fd()))?;
        let view = step("view", view::of_session(spec, plan, &self.groups.groups))?;
        watch.lap("view of its resources");
        reach(plan.fault.as_ref(), Point::Rooted)?;
        Ok(Rooted { reserved: self, mounts, drives, view, birth, cloning, gate })
    }
}

/// The layers of the image, each with what goes over it.
fn trust_layers(
    spec: &LaunchSpec,
    plan: &LaunchPlan,
    trust: Option<Trust>,
) -> io::Result<Vec<rootfs::Stack>> {
    let made = match trust {
        None => vec![None; plan.layers.len()],
        Some(trust) => {
            let place = trust::Place {
                trust: plan.trust.as_ref(),
                session: spec.session.as_str(),
                upper: plan.upper.as_ref(),
            };
            trust::make(&place, &plan.layers, &trust)?
        }
    };
    let stacks = made.into_iter().zip(&plan.layers).map(|(over, layer)| rootfs::Stack {
        lowers: over.into_iter().chain([layer.lower.clone()]).collect(),
        at: layer.at.clone(),
    });
    Ok(stacks.collect())
}

/// The root is mounted, detached; init is being cloned.
struct Rooted {
    reserved: Reserved,
    mounts: rootfs::Mounts,
    drives: rootfs::Mounts,
    view: View,
    birth: OwnedFd,
    cloning: Cloning,
    /// A ready one: namespace and sockets.
    gate: Option<(OwnedFd, Parts)>,
}

impl Rooted {
    fn isolate(self, plan: &LaunchPlan, watch: &mut Watch) -> Result<Isolated, LaunchError> {
        let Self { reserved, mounts, drives, view, birth, cloning, gate } = self;
        let Reserved { ids, groups, .. } = reserved;
        let host = step("network", netns::current())?;
        let (namespace, parts) = step("gate", enter_gate(gate, plan))?;
        let gate = step("gate", parts.assemble())?;
        watch.lap("gate namespace");
        reach(plan.fault.as_ref(), Point::Gate)?;
        let (pid, init) = step("init", cloning.finish())?;
        watch.lap("wait for init's clone");
        step("view", view.pin(pid))?;
        reach(plan.fault.as_ref(), Point::Cloned)?;
        let own = step("network", network_of(pid))?;
        step("network", netns::connect_own(namespace.as_fd(), own.as_fd()))?;
        // What the shim dials leaves from the host.
        step("network", netns::enter(host.as_fd()))?;
        watch.lap("connect eth0");
        reach(plan.fault.as_ref(), Point::Isolated)?;
        Ok(Isolated { ids, groups, mounts, drives, view, gate, init, birth })
    }
}

/// Moves the process into the gate's namespace: a ready one, or one that is made here.
fn enter_gate(ready: Option<(OwnedFd, Parts)>, plan: &LaunchPlan) -> io::Result<(OwnedFd, Parts)> {
    let Some((namespace, parts)) = ready else { return netns::new_gate(plan.capture) };
    netns::enter(namespace.as_fd())?;
    Ok((namespace, parts))
}

/// A cloned init; ends with its socket.
struct Init {
    socket: OwnedFd,
    pidfd: OwnedFd,
}

/// Init waits in its namespaces and groups; its network is connected.
struct Isolated {
    ids: IdRange,
    groups: Undo,
    mounts: rootfs::Mounts,
    drives: rootfs::Mounts,
    view: View,
    gate: Gate,
    init: Init,
    birth: OwnedFd,
}

impl Isolated {
    fn start<T>(
        mut self,
        spec: &LaunchSpec,
        plan: &LaunchPlan,
        meanwhile: impl FnOnce() -> Result<T, LaunchError>,
    ) -> Result<(Started, T), LaunchError> {
        let (pids, relief) = step("control groups", self.groups.groups.around_full())?;
        let pids = Some(pids);
        let mounts = || self.mounts.iter().chain(&self.view.mounts);
        let config = InitConfig {
            mounts: mounts().map(|(at, _)| at.clone()).collect(),
            cover: self.view.cover.clone(),
            etc: session_files(spec, plan),
            folders: vec![spec.cwd.clone()],
            fresh: spec.fresh,
            cgroups: InitCgroups { leaves: true, pids: pids.is_some(), relief },
        };
        let mut fds: Vec<BorrowedFd<'_>> = mounts().map(|(_, fd)| fd.as_fd()).collect();
        fds.push(self.birth.as_fd());
        fds.extend(pids.iter().flatten().map(AsFd::as_fd));
        let go = ToInit::Go(Box::new(config));
        step("start init", proto::send(&self.init.socket, &go, &fds))?;
        let counters = step("control groups", self.groups.groups.counters())?;
        let done = meanwhile()?;
        wait_ready(&self.init.socket)?;
        drives::place(&self.init.socket, &self.drives, &spec.cwd)?;
        reach(plan.fault.as_ref(), Point::Started)?;
        self.groups.armed = false;
        let Init { socket, pidfd } = self.init;
        let steps = Steps::new();
        let ids = self.ids;
        Ok((Started { socket, pidfd, counters, ids, steps, gate: self.gate }, done))
    }
}

/// A process in all namespaces, asked of a spare or the init zygote, and not yet there.
struct Cloning {
    maker: OwnedFd,
    socket: OwnedFd,
}

/// How init gets into its version 1 control groups.
enum Place {
    /// It is born in them: this one clones it.
    Spare(OwnedFd),
    /// It moves itself: `cgroup.procs` of each.
    Homes(Vec<OwnedFd>),
}

impl Cloning {
    fn start(
        spec: &LaunchSpec,
        plan: &LaunchPlan,
        ids: IdRange,
        cgroup: &OwnedFd,
        place: Place,
    ) -> io::Result<Self> {
        let (socket, theirs) = proto::pair()?;
        // Waits in the socket until init exists.
        let hostname = spec.hostname.clone();
        let disk = plan.disk.as_ref().and_then(open_disk);
        let prepare = ToInit::Prepare {
            hostname,
            shm_bytes: spec.limits.memory_bytes / 2,
            disk: disk.is_some().then_some(spec.limits.disk_bytes),
        };
        let homes: &[OwnedFd] = if let Place::Homes(homes) = &place { homes } else { &[] };
        let homes: Vec<_> = homes.iter().chain(disk.iter().flatten()).map(AsFd::as_fd).collect();
        proto::send(&socket, &prepare, &homes)?;
        let start = InitStart { first_id: ids.first, owner: ids.owner, in_cgroup: true };
        let fds = [theirs.as_fd(), cgroup.as_fd()];
        let maker = match place {
            Place::Spare(maker) => {
                proto::send(&maker, &start, &fds)?;
                maker
            }
            Place::Homes(_) => {
                let zygote = std::os::unix::net::UnixStream::connect(&plan.init_zygote)?;
                proto::send(&zygote, &ToZygote::Start(start), &fds)?;
                zygote.into()
            }
        };
        Ok(Self { maker, socket })
    }

    fn finish(self) -> io::Result<(i32, Init)> {
        let gone = || io::Error::other("the process that clones init is gone");
        let mut assembler = Assembler::new(GUEST_CAP);
        let Frame { message, mut fds, .. }: Frame<InitStarted> =
            proto::receive(&self.maker, &mut assembler)?.ok_or_else(gone)?;
        let pid = message.result.map_err(io::Error::other)?;
        Ok((pid, Init { socket: self.socket, pidfd: fds.pop().ok_or_else(gone)? }))
    }
}

/// The quota group's folder and the file of what is left. `None`: not on this host; `df` inside then tells
/// of the whole storage.
fn open_disk(disk: &DiskPlan) -> Option<[OwnedFd; 2]> {
    use rustix::fs::{Mode, OFlags};
    let folder = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let group = rustix::fs::open(&disk.group, folder, Mode::empty()).ok()?;
    let file = OFlags::RDONLY | OFlags::CLOEXEC;
    Some([group, rustix::fs::open(&disk.space, file, Mode::empty()).ok()?])
}

fn network_of(pid: i32) -> io::Result<OwnedFd> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    let path = format!("/proc/{pid}/ns/net");
    Ok(rustix::fs::open(path, flags, rustix::fs::Mode::empty())?)
}

fn wait_ready(socket: &OwnedFd) -> Result<(), LaunchError> {
    let timeout = rustix::time::Timespec { tv_sec: READY_MS / 1000, tv_nsec: 0 };
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    let ready =
        step("start init", rustix::event::poll(&mut polled, Some(&timeout)).map_err(Into::into))?;
    if ready == 0 {
        return step("start init", Err(io::Error::from(io::ErrorKind::TimedOut)));
    }
    let mut assembler = Assembler::new(GUEST_CAP);
    match step("start init", proto::receive(socket, &mut assembler))? {
        Some(Frame { message: FromInit::Ready, .. }) => Ok(()),
        Some(Frame { message: FromInit::Failed { step, message }, .. }) => {
            Err(LaunchError { step, message })
        }
        Some(_) => step("start init", Err(io::Error::other("an unexpected frame"))),
        None => step("start init", Err(io::Error::other("init died while it built its root"))),
    }
}

/// Files in /etc that belong to the session, not to the tree.
fn session_files(spec: &LaunchSpec, plan: &LaunchPlan) -> BTreeMap<String, String> {
    let name = &spec.hostname;
    let hosts = format!(
        "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{name}\n"
    );
    // The gate is the name server; until the egress broker listens there it refuses every query.
    let resolver = "nameserver 10.254.0.1\noptions timeout:2 attempts:1\n";
    BTreeMap::from([
        ("hostname".to_owned(), format!("{name}\n")),
        ("hosts".to_owned(), hosts),
        ("machine-id".to_owned(), format!("{}\n", plan.machine_id)),
        ("resolv.conf".to_owned(), resolver.to_owned()),
    ])
}
