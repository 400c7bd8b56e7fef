//! The two zygotes: single-threaded processes from which shims and inits are forked, so that a launch
//! costs a fork and idle memory is shared.
//!
//! They are separately executed, so that what a sandbox can learn of its init's memory layout says
//! nothing about its shim's. Invariant: they hold no secret, no environment, and no seeded random or
//! hash state. They end when serve and all their children are gone.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Uid, WaitOptions};
use rustix::thread::{CapabilitiesSecureBits, set_capabilities_secure_bits, set_thread_res_uid};

use crate::keeper::GateKeeper;
use crate::linux::idmap;
use crate::proto::{
    self, Assembler, Frame, InitStart, InitStarted, InitZygoteStart, ShimStart, TRUSTED_CAP,
    ToZygote,
};
use crate::spare::Shelf;
use crate::sys::{self, Cloned};
use crate::{init, shim};

/// `argv[0]` of the shim zygote.
pub(crate) const SHIM_ZYGOTE: &str = "bivouac-shim";
/// `argv[0]` of the init zygote. Its name is what `ps` shows for PID 1 inside.
pub(crate) const INIT_ZYGOTE: &str = "bivouac-init";

/// Reaps ended children; answers whether any are left.
fn children_left() -> bool {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some(_)) => {}
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

/// Waits until one of the descriptors is readable, or for so long. Answers which are.
fn wait_for(fds: &[&OwnedFd], limit: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut polled: Vec<PollFd<'_>> =
        fds.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
    let limit = limit.map(|limit| rustix::time::Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    });
    match rustix::event::poll(&mut polled, limit.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    Ok(polled.iter().map(|p| !p.revents().is_empty()).collect())
}

/// Reads and forgets pending signals.
fn drain(signals: &OwnedFd) {
    let mut sink = [0u8; 1024];
    let _ = rustix::io::read(signals, &mut sink);
}

/// Forks a shim for each frame on `control`.
///
/// # Errors
/// When the socket or poll fails.
pub(crate) fn run_shim_zygote(control: &OwnedFd, keeper: &dyn GateKeeper) -> io::Result<()> {
    let signals = sys::signal_fd(&[libc::SIGCHLD, libc::SIGINT, libc::SIGHUP])?;
    // Every shim has it from here.
    shim::confine::program()?;
    let mut assembler = Assembler::new(TRUSTED_CAP);
    let mut open = true;
    loop {
        if !children_left() && !open {
            return Ok(());
        }
        let ready =
            if open { wait_for(&[&signals, control], None)? } else { wait_for(&[&signals], None)? };
        if ready[0] {
            drain(&signals);
        }
        if ready.get(1) == Some(&true) {
            open = assembler.receive(control.as_fd())?;
        }
        while let Some(Frame { message, mut fds, .. }) = assembler.next::<ShimStart>()? {
            let Some(socket) = fds.pop() else { continue };
            start_shim(&message, &socket, keeper);
        }
    }
}

/// Forks one shim, into a control group of its own so that it can be found and killed.
fn start_shim(start: &ShimStart, socket: &OwnedFd, keeper: &dyn GateKeeper) {
    let group = shim::own_group(start);
    let cloned = group.and_then(|group| sys::clone_into(0, Some(group.as_fd())));
    match cloned {
        Ok(Cloned::Child) => {
            sys::reset_signals_of_role();
            match keep_only(socket) {
                Ok(socket) => shim::run(start, socket, keeper),
                Err(_) => sys::exit_now(1),
            }
        }
        Ok(Cloned::Parent { .. }) => {}
        Err(e) => {
            let error = proto::LaunchError { step: "shim".into(), message: e.to_string() };
            let _ = proto::send(socket, &proto::FromShim::Launched(Err(error)), &[]);
        }
    }
}

/// Clones an init for each connection to the listener.
///
/// # Errors
/// When the sockets or poll fail.
pub(crate) fn run_init_zygote(control: &OwnedFd) -> io::Result<()> {
    let signals = sys::signal_fd(&[libc::SIGCHLD, libc::SIGINT, libc::SIGHUP])?;
    // The owner of a user namespace is its creator's effective id. Capabilities must survive the
    // change of that id, since the same process then writes the maps.
    let bits = CapabilitiesSecureBits::NO_SETUID_FIXUP;
    set_capabilities_secure_bits(bits)?;
    // serve hands the listener over in the first frame.
    let mut assembler = Assembler::new(TRUSTED_CAP);
    let Some(Frame { message, mut fds, .. }) =
        proto::receive::<InitZygoteStart>(control, &mut assembler)?
    else {
        return Ok(());
    };
    let mut shelf = Shelf::new(message.spares);
    let listener = fds.pop().ok_or_else(|| io::Error::other("no listener"))?;
    let listener = UnixListener::from(listener);
    let listener_fd = listener.as_fd().try_clone_to_owned()?;
    let mut open = true;
    loop {
        let children = children_left();
        if !open {
            shelf.close();
            if !children {
                return Ok(());
            }
        }
        let ready = if open {
            wait_for(&[&signals, control, &listener_fd], shelf.patience())?
        } else {
            wait_for(&[&signals, &listener_fd], None)?
        };
        if ready[0] {
            drain(&signals);
        }
        if open && ready[1] {
            open = assembler.receive(control.as_fd())?;
        }
        if ready.last() == Some(&true) {
            let (stream, _) = listener.accept()?;
            // One bad shim must not end the zygote of all others.
            let _ = serve_shim(&stream, &mut shelf);
        } else if open {
            shelf.refill();
        }
    }
}

fn serve_shim(stream: &std::os::unix::net::UnixStream, shelf: &mut Shelf) -> io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut assembler = Assembler::new(TRUSTED_CAP);
    let Some(Frame { message, fds, .. }) = proto::receive::<ToZygote>(stream, &mut assembler)?
    else {
        return Ok(());
    };
    match message {
        ToZygote::Take => shelf.give(stream),
        ToZygote::Start(start) => answer(stream, clone_init(&start, fds, Parent::Caller)),
    }
}

/// Tells a shim how its init came out.
///
/// # Errors
/// When the shim is gone.
pub(crate) fn answer(socket: impl AsFd, made: io::Result<(i32, OwnedFd)>) -> io::Result<()> {
    match made {
        Ok((pid, pidfd)) => proto::send(socket, &InitStarted { result: Ok(pid) }, &[pidfd.as_fd()]),
        Err(e) => proto::send(socket, &InitStarted { result: Err(e.to_string()) }, &[]),
    }
}

/// Whose child an init is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parent {
    /// Of the process that clones it.
    Caller,
    /// Of the zygote, which reaps it: a spare ends right after the clone.
    Zygote,
}

/// Clones an init into its namespaces, and maps its ids.
///
/// # Errors
/// As clone3(2) and the writes of the maps.
pub(crate) fn clone_init(
    start: &InitStart,
    fds: Vec<OwnedFd>,
    parent: Parent,
) -> io::Result<(i32, OwnedFd)> {
    let mut fds = fds.into_iter();
    let socket = fds.next().ok_or_else(|| io::Error::other("no socket for init"))?;
    let group = fds.next().filter(|_| start.in_cgroup);
    let sibling = if parent == Parent::Zygote { libc::CLONE_PARENT } else { 0 };
    let namespaces = sibling
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWUTS
        | libc::CLONE_NEWIPC;
    let (mapped, tell) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    effective_user(start.owner)?;
    let cloned = sys::clone_into(namespaces as u64, group.as_ref().map(AsFd::as_fd));
    if matches!(cloned, Ok(Cloned::Child)) {
        become_init(&socket, &mapped);
    }
    effective_user(0)?;
    let Cloned::Parent { pid, pidfd } = cloned? else {
        return Err(io::Error::other("unreachable: the child does not return"));
    };
    let map = format!("0 {} {}\n", start.first_id, idmap::RANGE);
    if let Err(e) = idmap::write_maps(pid, &map) {
        let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
        return Err(e);
    }
    rustix::io::write(&tell, b"m")?;
    // A host without memory takes it from the sandboxes first.
    let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), "300");
    Ok((pid, pidfd))
}

/// The clone's way into init: keeps nothing but its socket. Waits until its ids are mapped.
fn become_init(socket: &OwnedFd, mapped: &OwnedFd) -> ! {
    sys::reset_signals_of_role();
    if rustix::io::read(mapped, &mut [0u8; 1]) != Ok(1) {
        sys::exit_now(1);
    }
    match keep_only(socket) {
        Ok(socket) => init::run(&socket),
        Err(_) => sys::exit_now(1),
    }
}

/// Closes everything that a fork of a zygote has of it, but for one socket and the standard files.
/// The zygote's own sockets above all: serve must see them close when the zygote dies.
///
/// # Errors
/// As dup2(2) and close_range(2).
pub(crate) fn keep_only(socket: &OwnedFd) -> io::Result<OwnedFd> {
    sys::dup_to(socket.as_fd(), 3)?;
    sys::close_from(4)?;
    sys::take_fd(3)
}

fn effective_user(id: u32) -> io::Result<()> {
    // Real and saved id stay root's, so that the way back is open.
    let (root, wanted) = (Uid::ROOT, Uid::from_raw(id));
    Ok(set_thread_res_uid(root, wanted, root)?)
}
