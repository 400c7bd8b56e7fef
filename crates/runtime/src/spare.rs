//! Spares: processes that wait, before any session wants them, where an init has to be born.
//!
//! Moving a process between version 1 control groups waits for a grace period of the kernel, several
//! milliseconds on a quiet host; a new network namespace takes half of one. So the init zygote keeps a
//! few processes that have both behind them: each sits in version 1 groups of its own and in a ready
//! gate namespace, whose sockets it has made. A launch takes one, gives its groups the session's name, and has it clone the
//! init, which thereby is born in them. Then the spare ends.
//!
//! Invariant: a spare holds nothing of any session until it is taken, serves one launch, and ends when
//! its socket closes. Where limits are version 2's there are no spares: there an init is born in its
//! group anyway. Called by the init zygote ([`Shelf`], [`run`]) and by the launch ([`take`]).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::gate::{Parts, Shape};
use crate::linux::cgroup::{Hierarchies, SPARE_PREFIX};
use crate::linux::netns;
use crate::linux::steer::Way;
use crate::proto::{self, Assembler, Frame, InitStart, SpareGiven, TRUSTED_CAP, ToZygote};
use crate::sys::{self, Cloned};
use crate::zygote;

/// How many wait. A burst that takes more launches without.
const SPARES: usize = 4;
/// When the shelf is filled again: not while the launch that took one still needs the CPUs.
const REFILL: Duration = Duration::from_millis(10);

/// What spares are made with.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct SparePlan {
    pub hierarchies: Hierarchies,
    /// The engine's folder in each hierarchy.
    pub cgroup: String,
    /// How gates are steered.
    pub capture: Way,
}

/// spare → shim, its first frame. Carries the gate namespace and the gate's sockets when it worked.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SpareReady {
    pub result: Result<Shape, String>,
}

/// The zygote's spares.
pub(crate) struct Shelf {
    plan: Option<SparePlan>,
    waiting: VecDeque<Waiting>,
    made: u64,
    refill_at: Instant,
    open: bool,
}

struct Waiting {
    name: String,
    socket: OwnedFd,
}

impl Shelf {
    /// An empty shelf.
    pub(crate) fn new(plan: Option<SparePlan>) -> Self {
        let plan = plan.filter(|plan| plan.hierarchies.moves_wait());
        Self { plan, waiting: VecDeque::new(), made: 0, refill_at: Instant::now(), open: true }
    }

    /// How long the zygote may sleep. `None`: for ever.
    pub(crate) fn patience(&self) -> Option<Duration> {
        let short = self.open && self.plan.is_some() && self.waiting.len() < SPARES;
        short.then(|| self.refill_at.saturating_duration_since(Instant::now()))
    }

    /// Makes one spare if one is wanted and it is time.
    pub(crate) fn refill(&mut self) {
        if self.patience() != Some(Duration::ZERO) {
            return;
        }
        let Some(plan) = &self.plan else { return };
        self.made += 1;
        let name = format!("{}{}", prefix(), self.made);
        match make(plan, &name) {
            Ok(socket) => self.waiting.push_back(Waiting { name, socket }),
            // A host that cannot have one now may be able to later; launches go on without.
            Err(_) => self.refill_at = Instant::now() + Duration::from_secs(1),
        }
    }

    /// Gives the oldest away.
    pub(crate) fn give(&mut self, stream: &UnixStream) -> io::Result<()> {
        self.refill_at = Instant::now() + REFILL;
        match self.waiting.pop_front() {
            Some(Waiting { name, socket }) => {
                let given = SpareGiven { name: Some(name) };
                proto::send(stream, &given, &[socket.as_fd()])
            }
            None => proto::send(stream, &SpareGiven { name: None }, &[]),
        }
    }

    /// Lets all go, makes no more, and removes the groups of those that have ended. To be called
    /// again until nothing is left.
    pub(crate) fn close(&mut self) {
        self.waiting.clear();
        self.open = false;
        if let Some(plan) = &self.plan {
            plan.hierarchies.remove_spares(&plan.cgroup, &prefix());
        }
    }
}

/// Names of this zygote's spares: another one's may still be in use.
fn prefix() -> String {
    format!("{SPARE_PREFIX}{}-", std::process::id())
}

fn make(plan: &SparePlan, name: &str) -> io::Result<OwnedFd> {
    let (ours, theirs) = proto::pair()?;
    if matches!(sys::clone_into(0, None)?, Cloned::Child) {
        sys::reset_signals_of_role();
        let done = zygote::keep_only(&theirs).and_then(|socket| run(plan, name, &socket));
        sys::exit_now(i32::from(done.is_err()));
    }
    Ok(ours)
}

/// The spare's own life.
fn run(plan: &SparePlan, name: &str, socket: &OwnedFd) -> io::Result<()> {
    let entered = plan.hierarchies.enter_spare(&plan.cgroup, name);
    let (namespace, parts) = match entered.and_then(|()| netns::new_gate(plan.capture)) {
        Ok(gate) => gate,
        Err(e) => {
            let ready = SpareReady { result: Err(e.to_string()) };
            return proto::send(socket, &ready, &[]);
        }
    };
    let mut fds = vec![namespace.as_fd()];
    fds.extend(parts.borrow());
    proto::send(socket, &SpareReady { result: Ok(parts.shape) }, &fds)?;
    // The shim's alone from here on: they keep the gate, and its program.
    drop((namespace, parts));
    let mut assembler = Assembler::new(TRUSTED_CAP);
    let Some(Frame { message, fds, .. }) = proto::receive::<InitStart>(socket, &mut assembler)?
    else {
        return Ok(());
    };
    zygote::answer(socket, zygote::clone_init(&message, fds, zygote::Parent::Zygote))
}

/// A spare that was taken for a launch.
#[derive(Debug)]
pub(crate) struct Spare {
    /// Name of its groups.
    pub name: String,
    /// Takes an `InitStart`.
    pub socket: OwnedFd,
    /// Its gate namespace.
    pub namespace: OwnedFd,
    /// The gate's sockets.
    pub gate: Parts,
}

/// Asks the zygote for one. `None`: there is none just now.
///
/// # Errors
/// When the zygote is gone.
pub(crate) fn take(init_zygote: &str) -> io::Result<Option<Spare>> {
    let zygote = UnixStream::connect(init_zygote)?;
    proto::send(&zygote, &ToZygote::Take, &[])?;
    let mut assembler = Assembler::new(TRUSTED_CAP);
    let gone = || io::Error::other("the init zygote is gone");
    let given: Frame<SpareGiven> = proto::receive(&zygote, &mut assembler)?.ok_or_else(gone)?;
    let (Some(name), Some(socket)) = (given.message.name, given.fds.into_iter().next()) else {
        return Ok(None);
    };
    let mut assembler = Assembler::new(TRUSTED_CAP);
    // One that died, or that the host refused something, is as good as none.
    let ready = proto::receive::<SpareReady>(&socket, &mut assembler).ok().flatten();
    Ok(ready.and_then(|Frame { message, fds, .. }| {
        let (shape, mut fds) = (message.result.ok()?, fds.into_iter());
        let namespace = fds.next()?;
        let gate = Parts { shape, fds: fds.collect() };
        Some(Spare { name, socket, namespace, gate })
    }))
}
