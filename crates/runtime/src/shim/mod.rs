//! The host-side process of one session: launches it, then keeps its pipes, logs and standard inputs,
//! so that `serve` can end and come back.
//!
//! After the launch it gives up root, and nearly everything else: see [`confine`].
//! Invariant: it ends when init is gone; every command whose program ran has an end record in its log
//! by then. All change of the session happens in its one thread. Called by the shim zygote.

mod command;
pub(crate) mod confine;
mod door;
mod journal;
mod terminal;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::rc::Rc;

use bivouac_types::command::{EndReason, ExecFailure};
use bivouac_types::id::CommandId;
use rustix::fs::{Mode, OFlags};
use tokio::io::Interest;

use self::command::Running;
use self::door::Doors;
use self::journal::{About, Journal, Level};
use self::terminal::Master;
use crate::audit::{AuditEnd, AuditLog};
use crate::fault::{Armed, Point};
use crate::keeper::{Deliver, GateKeeper, Outbox, Prepared};
use crate::linux::cgroup::Counters;
use crate::linux::launch::{self, Started};
use crate::proto::{
    self, Assembler, Channel, Frame, FromInit, FromShim, GUEST_CAP, LaunchError, ShimSecrets,
    ShimStart, TRUSTED_CAP,
};
use crate::{Progress, sys};

/// Ended commands that the shim still answers for; older ones are in their logs alone.
const REMEMBERED: usize = 1000;
/// How long a failed accept of a serve rests.
const ACCEPT_AGAIN: std::time::Duration = std::time::Duration::from_millis(200);

/// From this size on a buffer is mapped by itself. Those for whole datagrams are larger, and rest in most
/// sessions.
const BUFFER: i32 = 48 << 10;

/// The shim's own control group.
///
/// # Errors
/// As mkdir(2) and open(2).
pub(crate) fn own_group(start: &ShimStart) -> io::Result<OwnedFd> {
    let plan = &start.plan;
    let groups = plan.hierarchies.session(&plan.cgroup, start.spec.session.as_str());
    groups.make_shim(confine::MEMORY)?;
    let folder = groups.shim();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(&folder, flags, Mode::empty())?)
}

/// Launches the session and serves it until it ends.
pub(crate) fn run(start: &ShimStart, control: OwnedFd, keeper: &dyn GateKeeper) -> ! {
    let _ = rustix::thread::set_name(c"bivouac-shim");
    let _ = rustix::process::setsid();
    sys::map_buffers_from(BUFFER);
    // Whatever serve's is: what the launch makes is for the inside.
    rustix::process::umask(Mode::from_raw_mode(0o022));
    match prepare(start, &control, keeper) {
        Err(error) => {
            let said = format!("launch failed at step {}: {}", error.step, error.message);
            let about = About { request: start.spec.request.as_deref(), ..About::default() };
            Journal::of(start).say(Level::Warn, &said, about);
            let _ = proto::send(&control, &FromShim::Launched(Err(error)), &[]);
            sys::exit_now(1)
        }
        Ok(ready) => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let code = runtime.map_or(1, |runtime| {
                let local = tokio::task::LocalSet::new();
                local.block_on(&runtime, serve(ready, control, start)).map_or(1, |()| 0)
            });
            // Not by unwinding: reads that were left to a thread would hold the end back.
            sys::exit_now(code)
        }
    }
}

/// What a launched shim works with.
struct Ready {
    started: Started,
    logs: OwnedFd,
    log_cap: u64,
    listener: UnixListener,
    keeper: Option<Box<dyn Prepared>>,
}

/// Has the keeper made ready whose configuration follows on the control socket.
fn prepare_keeper(control: &OwnedFd, keeper: &dyn GateKeeper) -> io::Result<Box<dyn Prepared>> {
    let mut assembler = Assembler::new(TRUSTED_CAP);
    let Some(Frame { message: ShimSecrets {}, tail, .. }) =
        proto::receive(control, &mut assembler)?
    else {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
    };
    keeper.prepare(&tail)
}

fn prepare(
    start: &ShimStart,
    control: &OwnedFd,
    keeper: &dyn GateKeeper,
) -> Result<Ready, LaunchError> {
    let plan = &start.plan;
    let step = |name: &str, e: io::Error| LaunchError { step: name.into(), message: e.to_string() };
    let reach =
        |point: Point| Armed::reach(plan.fault.as_ref(), point).map_err(|e| step(point.name(), e));
    reach(Point::Shim)?;
    let mut prepared = None;
    let trust = || {
        if !start.egress {
            return Ok(None);
        }
        let keeper = prepare_keeper(control, keeper)?;
        let trust = keeper.trust();
        prepared = Some(keeper);
        Ok(Some(trust))
    };
    let (started, (logs, listener)) = launch::launch(&start.spec, plan, trust, || {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let logs = rustix::fs::open(&plan.logs, flags, Mode::empty());
        let logs = logs.map_err(|e| step("logs", e.into()))?;
        let socket = |e: io::Error| step("shim socket", e);
        let listener = UnixListener::bind(Path::new(&plan.socket)).map_err(socket)?;
        listener.set_nonblocking(true).map_err(socket)?;
        Ok((logs, listener))
    })?;
    reach(Point::Listening)?;
    confine::confine(started.ids.owner, logs.as_fd()).map_err(|e| step("confine the shim", e))?;
    Ok(Ready { started, logs, log_cap: plan.log_cap, listener, keeper: prepared })
}

/// The session as the shim's tasks share it.
struct Shim {
    init: Channel,
    counters: Counters,
    logs: OwnedFd,
    log_room: Cell<u64>,
    commands: RefCell<HashMap<CommandId, Rc<Running>>>,
    ended: RefCell<std::collections::VecDeque<CommandId>>,
    stopping: Cell<bool>,
    doors: Doors,
    journal: Journal,
    egress: Option<Rc<dyn Deliver>>,
    outbox: Outbox,
}

async fn serve(ready: Ready, control: OwnedFd, start: &ShimStart) -> io::Result<()> {
    let Ready { started, logs, log_cap, listener, keeper } = ready;
    let Started { socket, pidfd, counters, steps, gate, .. } = started;
    let (outbox, audit) = (Outbox::default(), AuditLog::new(logs.try_clone()?));
    let (egress, _closed) = match keeper {
        Some(keeper) => {
            tokio::task::spawn_local(audit.clone().work());
            let end = Box::new(AuditEnd(audit.clone()));
            (Some(keeper.serve(gate, outbox.clone(), end)), None)
        }
        // Its namespace lives as long as it does, and the sandbox's network with that.
        None => (None, Some(gate)),
    };
    let shim = Rc::new(Shim {
        init: Channel::new(socket)?,
        counters,
        logs,
        log_room: Cell::new(log_cap),
        commands: RefCell::default(),
        ended: RefCell::default(),
        stopping: Cell::new(false),
        doors: Doors::default(),
        journal: Journal::of(start),
        egress,
        outbox,
    });
    let about = About {
        request: start.spec.request.as_deref(),
        took_us: Some(steps.iter().map(|(_, us)| us).sum()),
        ..About::default()
    };
    let first = Channel::new(control)?;
    first.send(&FromShim::Launched(Ok(steps)), &[], &[]).await?;
    shim.clone().open_door(first);
    // After the answer has gone out: nobody waits for a line.
    shim.journal.say(Level::Debug, "session launched", about);
    // The launch, and reading the broker's configuration, used more than the session will at rest.
    sys::give_back_memory();
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let accepting = shim.clone();
    tokio::task::spawn_local(async move {
        loop {
            // A guest can use up descriptors for a while; a serve that comes later must still get in.
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            };
            let opened = stream.into_std().and_then(|s| Channel::new(s.into()));
            if let Ok(channel) = opened {
                accepting.clone().open_door(channel);
            }
        }
    });
    shim.listen_to_init(pidfd).await;
    shim.finish().await;
    audit.flush();
    shim.journal.say(Level::Debug, "session ended", About::default());
    Ok(())
}

impl Shim {
    /// Reads init's frames until it is dead.
    async fn listen_to_init(self: &Rc<Self>, pidfd: OwnedFd) {
        let mut assembler = Assembler::new(GUEST_CAP);
        let dead = sys::watch(pidfd, Interest::READABLE);
        // Ends when it closes, or talks nonsense: an init that breaks the rules has broken its sandbox.
        while let Ok(Some(Frame { message, fds, .. })) = self.init.receive(&mut assembler).await {
            if let Err(e) = self.from_init(message, fds) {
                self.journal.say(
                    Level::Warn,
                    &format!("init breaks the rules: {e}"),
                    About::default(),
                );
                break;
            }
        }
        // Its namespace is empty only when the process itself is dead.
        if let Ok(dead) = dead {
            let _ = tokio::time::timeout(std::time::Duration::from_secs(10), dead.readable()).await;
        }
    }

    /// Takes a frame of init's. Descriptors come with nothing but the start of a command on a terminal.
    fn from_init(self: &Rc<Self>, message: FromInit, fds: Vec<OwnedFd>) -> io::Result<()> {
        match message {
            FromInit::Spawned { command } => {
                if let Some(running) = self.find(&command) {
                    let terminal = match running.awaits_terminal() {
                        true => Some(Master::take(fds)?),
                        false => None,
                    };
                    running.started(Ok(terminal));
                }
            }
            FromInit::ExecFailed { command, failure, errno } => {
                if let Some(running) = self.find(&command) {
                    running.started(Err((failure, errno)));
                }
            }
            FromInit::Exited { command, code } => {
                if let Some(running) = self.find(&command) {
                    running.exited(code);
                }
            }
            FromInit::Ready | FromInit::Failed { .. } => {}
        }
        Ok(())
    }

    fn find(&self, command: &CommandId) -> Option<Rc<Running>> {
        self.commands.borrow().get(command).cloned()
    }

    /// Init is gone: everything that ran was killed.
    async fn finish(self: &Rc<Self>) {
        let running: Vec<_> = self.commands.borrow().values().cloned().collect();
        for command in &running {
            command.started(Err((ExecFailure::Other, libc::ESRCH)));
            command.exited(128 + libc::SIGKILL);
        }
        for command in running {
            command.wait_end().await;
        }
        self.doors.close(&FromShim::Gone).await;
    }

    /// Publishes a change to whoever listens.
    fn changed(&self, command: &CommandId) {
        self.doors.changed(command);
    }

    /// A command has ended: keeps its state for a while.
    fn remember(&self, command: &CommandId) {
        let mut ended = self.ended.borrow_mut();
        ended.push_back(command.clone());
        if ended.len() > REMEMBERED
            && let Some(oldest) = ended.pop_front()
        {
            self.commands.borrow_mut().remove(&oldest);
        }
    }

    /// State of every command that is known here.
    fn progress(&self) -> Vec<(CommandId, Progress)> {
        let commands = self.commands.borrow();
        commands.iter().map(|(id, running)| (id.clone(), running.progress())).collect()
    }

    /// Since when the running commands run, ms.
    fn ages(&self) -> std::collections::BTreeMap<CommandId, u64> {
        let commands = self.commands.borrow();
        let running = commands.iter().filter(|(_, running)| running.progress().end.is_none());
        running.map(|(id, running)| (id.clone(), running.age_ms())).collect()
    }

    /// Takes log space for output; answers what is left.
    fn log_room(&self) -> u64 {
        self.log_room.get()
    }

    fn use_log(&self, bytes: u64) {
        self.log_room.set(self.log_room.get().saturating_sub(bytes));
    }

    fn give_log(&self, bytes: u64) {
        self.log_room.set(self.log_room.get().saturating_add(bytes));
    }

    fn counters(&self) -> (u64, u64) {
        self.counters.read()
    }

    /// What may have ended a command, or a part of it: what the kernel counted since it started.
    fn reason(&self, since: (u64, u64), code: i32, timed_out: bool) -> Option<EndReason> {
        if timed_out {
            return Some(EndReason::Timeout);
        }
        if self.stopping.get() && code == 128 + libc::SIGKILL {
            return Some(EndReason::SandboxStopped);
        }
        // Also of a command that says that all is well: a shell takes the code of a pipeline's last
        // program, whatever happened to the others.
        let now = self.counters();
        if now.0 > since.0 {
            Some(EndReason::OutOfMemory)
        } else if code != 0 && now.1 > since.1 {
            Some(EndReason::ProcessLimit)
        } else {
            None
        }
    }

    fn create_log(&self, command: &CommandId) -> io::Result<OwnedFd> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let name = crate::log_name(command);
        let mode = Mode::from_raw_mode(0o600);
        Ok(rustix::fs::openat(self.logs.as_fd(), name, flags, mode)?)
    }

    fn remove_log(&self, command: &CommandId) {
        let [first, second] = crate::log::ring::names(command);
        for name in [crate::log_name(command), first, second] {
            let _ = rustix::fs::unlinkat(self.logs.as_fd(), name, rustix::fs::AtFlags::empty());
        }
    }
}
