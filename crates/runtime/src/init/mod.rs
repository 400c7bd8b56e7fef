//! PID 1 of a sandbox: builds its root, starts commands, reaps, runs file operations.
//!
//! Single-threaded, no async runtime, holds no secret. Invariant: it ends when its shim does, and
//! with it everything inside; it answers each `Exec` with exactly one of `Spawned` and `ExecFailed`,
//! and each `Spawned` with one `Exited`. Whatever the guest does to the tree, a step that is not
//! needed for running commands is allowed to fail.

mod disk;
mod doors;
mod drives;
pub(crate) mod exec;
pub(crate) mod files;
mod identity;
mod listeners;
mod root;
mod sftp;
mod terminal;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use bivouac_types::id::CommandId;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{WaitOptions, WaitStatus};

use crate::proto::{self, Assembler, Frame, FromInit, TRUSTED_CAP, ToInit};
use crate::sys;

/// User id and group id of the default user of every sandbox.
pub(crate) const DEFAULT_USER: u32 = 1000;

/// Control group descriptors that init keeps: see `linux/cgroup.rs`.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// Version 2 folder for the leaves of commands.
    pub run: Option<OwnedFd>,
    /// `cgroup.procs` outside of `run`, where there is room when it is full, and of `run`.
    pub pids: Option<[OwnedFd; 2]>,
    /// That outside is version 2's `relief`.
    pub relief: bool,
}

/// Runs as PID 1 until the shim goes away.
pub(crate) fn run(socket: &OwnedFd) -> ! {
    // Every error here ends init, which ends the sandbox: the shim reports it.
    let code = match serve(socket) {
        Ok(()) => 0,
        Err(_) => 1,
    };
    sys::exit_now(code)
}

fn serve(socket: &OwnedFd) -> io::Result<()> {
    let mut assembler = Assembler::new(TRUSTED_CAP);
    let Some(Frame {
        message: ToInit::Prepare { hostname, shm_bytes, disk }, fds: mut homes, ..
    }) = proto::receive(socket, &mut assembler)?
    else {
        return Ok(());
    };
    let counters = disk.and_then(|limit| {
        let (space, folder) = (homes.pop()?, homes.pop()?);
        disk::Counters::open(&folder, space, limit).ok()
    });
    // A failure is told when there is someone to hear it.
    let prepared = root::prepare(&hostname, shm_bytes, &homes, counters);
    drop(homes);
    let Some(Frame { message: ToInit::Go(config), mut fds, .. }) =
        proto::receive(socket, &mut assembler)?
    else {
        return Ok(());
    };
    let built = prepared.and_then(|prepared| root::build(&config, &mut fds, prepared));
    let root::Built { groups, desk, pts } = match built {
        Ok(built) => built,
        Err(e) => {
            let failed =
                FromInit::Failed { step: e.step.to_owned(), message: e.source.to_string() };
            return proto::send(socket, &failed, &[]);
        }
    };
    drop(fds);
    let signals = sys::signal_fd(&[libc::SIGCHLD])?;
    let making = if config.fresh { identity::renew() } else { None };
    if making.is_none() {
        proto::send(socket, &FromInit::Ready, &[])?;
    }
    let (commands, starting, leaves) = (HashMap::new(), Vec::new(), Vec::new());
    let dials = doors::Dials::default();
    Init { socket, groups, desk, pts, making, commands, starting, leaves, dials }
        .work(&signals, &mut assembler)
}

/// A command whose process may not have executed its program yet.
struct Starting {
    command: CommandId,
    pid: i32,
    report: OwnedFd,
    terminal: Option<OwnedFd>,
}

/// A command that runs.
struct Running {
    command: CommandId,
    /// The master of its terminal, if it has one.
    terminal: Option<OwnedFd>,
}

struct Init<'a> {
    socket: &'a OwnedFd,
    groups: Groups,
    /// Who answers `df`.
    desk: Option<disk::Desk>,
    /// The file system of terminals.
    pts: OwnedFd,
    /// What has to be there before the sandbox is ready: it is made while `df` is answered already, since
    /// programs ask that at their start.
    making: Option<identity::Making>,
    /// Running commands by pid.
    commands: HashMap<i32, Running>,
    starting: Vec<Starting>,
    /// Leaves whose command has ended and whose folder is still there.
    leaves: Vec<String>,
    /// Connections that are being made.
    dials: doors::Dials,
}

impl Init<'_> {
    fn work(mut self, signals: &OwnedFd, assembler: &mut Assembler) -> io::Result<()> {
        loop {
            while let Some(frame) = assembler.next::<ToInit>()? {
                self.handle(frame)?;
            }
            let (from_shim, children, called) = self.wait(signals)?;
            if let Some(desk) = &mut self.desk {
                desk.tend(called, &self.groups);
            }
            self.dials.tend();
            self.settle_started()?;
            if let Some(late) = self.making.take_if(|making| making.is_late()) {
                late.kill();
                self.send(&FromInit::Ready)?;
            }
            if children {
                let mut sink = [0u8; 1024];
                let _ = rustix::io::read(signals, &mut sink);
                self.reap()?;
            }
            if from_shim && !assembler.receive(self.socket.as_fd())? {
                return Ok(());
            }
        }
    }

    /// Sleeps until there is something to do: a frame, children that ended, a `df`, a connection.
    fn wait(&self, signals: &OwnedFd) -> io::Result<(bool, bool, bool)> {
        let mut polled =
            vec![PollFd::new(self.socket, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        let (listener, patience) = self.desk.as_ref().map_or((None, None), disk::Desk::waits_for);
        polled.extend(listener.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        let made = self.making.as_ref().map(identity::Making::left);
        let patience = patience.into_iter().chain(made).chain(self.dials.patience()).min();
        polled.extend(self.starting.iter().map(|s| PollFd::new(&s.report, PollFlags::IN)));
        polled.extend(self.dials.sockets().map(|fd| PollFd::new(fd, PollFlags::OUT)));
        let patience = patience.map(|patience| rustix::time::Timespec {
            tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(patience.subsec_nanos()),
        });
        match rustix::event::poll(&mut polled, patience.as_ref()) {
            Err(rustix::io::Errno::INTR) => return Ok((false, false, false)),
            other => other?,
        };
        let ready = |at: usize| !polled[at].revents().is_empty();
        Ok((ready(0), ready(1), listener.is_some() && polled[2].revents().contains(PollFlags::IN)))
    }

    fn send(&self, message: &FromInit) -> io::Result<()> {
        proto::send(self.socket, message, &[])
    }

    fn handle(&mut self, frame: Frame<ToInit>) -> io::Result<()> {
        match frame.message {
            ToInit::Prepare { .. } | ToInit::Go(_) => Ok(()),
            ToInit::Exec(spec) => {
                let command = spec.command.clone();
                match exec::start(&spec, frame.fds, &self.groups, &self.pts) {
                    Ok((pid, report, terminal)) => {
                        self.starting.push(Starting { command, pid, report, terminal });
                        Ok(())
                    }
                    Err(failed) => {
                        self.drop_leaf(exec::leaf(&command));
                        self.send(&FromInit::ExecFailed {
                            command,
                            failure: failed.failure,
                            errno: failed.errno,
                        })
                    }
                }
            }
            ToInit::Signal { command, signal } => {
                let mut running = self.commands.iter();
                let running = running.find(|(_, running)| running.command == command);
                if let Some((pid, Running { terminal: Some(master), .. })) = running {
                    terminal::signal(*pid, master, signal);
                    return Ok(());
                }
                let starting = self.starting.iter().find(|s| s.command == command).map(|s| s.pid);
                if let Some(pid) = running.map(|(pid, _)| *pid).or(starting) {
                    // The group first: it is the tree that the user means. A command that is still
                    // on its way to its own group is alone.
                    if sys::kill(-pid, signal).is_err() {
                        let _ = sys::kill(pid, signal);
                    }
                }
                Ok(())
            }
            ToInit::KillTree { command } => {
                self.kill_tree(&command);
                Ok(())
            }
            ToInit::File(op) => {
                files::start(&op, frame.fds);
                Ok(())
            }
            ToInit::Door(op) => {
                doors::start(op, frame.fds, &mut self.dials);
                Ok(())
            }
        }
    }

    /// Kills everything that a command started, also what left its process group.
    fn kill_tree(&self, command: &CommandId) {
        let by_group = self.groups.run.as_ref().is_some_and(|run| {
            let kill = format!("{}/cgroup.kill", exec::leaf(command));
            let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC;
            rustix::fs::openat(run, kill, flags, rustix::fs::Mode::empty())
                .and_then(|file| rustix::io::write(&file, b"1"))
                .is_ok()
        });
        if !by_group
            && let Some((pid, _)) = self.commands.iter().find(|(_, r)| r.command == *command)
        {
            let _ = sys::kill(-pid, libc::SIGKILL);
        }
    }

    /// Reads what starting commands reported: nothing and end of file is success.
    fn settle_started(&mut self) -> io::Result<()> {
        let mut waiting = Vec::new();
        for starting in std::mem::take(&mut self.starting) {
            match exec::outcome(&starting.report) {
                None => waiting.push(starting),
                Some(Ok(())) => {
                    let Starting { command, pid, terminal, .. } = starting;
                    let told = FromInit::Spawned { command: command.clone() };
                    let master: Vec<_> = terminal.iter().map(AsFd::as_fd).collect();
                    proto::send(self.socket, &told, &master)?;
                    self.commands.insert(pid, Running { command, terminal });
                }
                Some(Err(failed)) => {
                    self.drop_leaf(exec::leaf(&starting.command));
                    self.send(&FromInit::ExecFailed {
                        command: starting.command,
                        failure: failed.failure,
                        errno: failed.errno,
                    })?;
                }
            }
        }
        self.starting = waiting;
        Ok(())
    }

    fn reap(&mut self) -> io::Result<()> {
        // A process that ended has closed its report: settle before its end is looked at.
        self.settle_started()?;
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let pid = pid.as_raw_nonzero().get();
            if let Some(desk) = &mut self.desk {
                desk.ended(pid);
            }
            if self.making.take_if(|making| making.is(pid)).is_some() {
                self.send(&FromInit::Ready)?;
            }
            if self.starting.iter().any(|s| s.pid == pid) {
                // It executed its program and ended since the last look.
                self.settle_started()?;
            }
            if let Some(Running { command, .. }) = self.commands.remove(&pid) {
                let leaf = exec::leaf(&command);
                self.send(&FromInit::Exited { command, code: exit_code(status) })?;
                self.leaves.push(leaf);
            }
        }
        for leaf in std::mem::take(&mut self.leaves) {
            self.drop_leaf(leaf);
        }
        Ok(())
    }

    /// Removes a command's leaf, or keeps it in mind while processes of the command live on.
    fn drop_leaf(&mut self, leaf: String) {
        let Some(run) = &self.groups.run else { return };
        let removed = rustix::fs::unlinkat(run, &leaf, rustix::fs::AtFlags::REMOVEDIR);
        if removed == Err(rustix::io::Errno::BUSY) {
            self.leaves.push(leaf);
        }
    }
}

fn exit_code(status: WaitStatus) -> i32 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => -1,
    }
}
