//! Starting one command: a child that becomes the wanted user in the wanted folder and executes the
//! program, and a pipe on which it says why it could not; with a terminal of its own if it is to have one.
//!
//! Invariant: the program starts with descriptors 0 to 2 only, default signals, an empty signal mask,
//! a session of its own, and the environment that was asked for.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bivouac_types::command::ExecFailure;
use bivouac_types::id::CommandId;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};

use super::{DEFAULT_USER, Groups, terminal};
use crate::ExecSpec;
use crate::sys::{self, Cloned, Fork};

/// Why a command could not start.
#[derive(Debug, Clone, Copy)]
pub(super) struct Failed {
    pub failure: ExecFailure,
    pub errno: i32,
}

/// Where in the child it went wrong: the first byte of its report.
#[derive(Clone, Copy)]
enum Stage {
    Prepare = 1,
    Cwd = 2,
    Exec = 3,
}

/// Name of a command's leaf in the version 2 group.
pub(super) fn leaf(command: &CommandId) -> String {
    format!("c-{command}")
}

/// Starts the child. Answers its pid, the pipe on which it reports, and the master of its terminal.
///
/// # Errors
/// When no process can be made.
pub(super) fn start(
    spec: &ExecSpec,
    stdio: Vec<OwnedFd>,
    groups: &Groups,
    pts: &OwnedFd,
) -> Result<(i32, OwnedFd, Option<OwnedFd>), Failed> {
    let other = |e: io::Error| Failed {
        failure: ExecFailure::Other,
        errno: e.raw_os_error().unwrap_or(libc::EIO),
    };
    let program = Program::new(spec).map_err(other)?;
    let (stdio, master) = match spec.tty {
        None => (stdio, None),
        Some(size) => {
            let user = if spec.root { 0 } else { DEFAULT_USER };
            let pair = terminal::open(pts, user, size).map_err(other)?;
            (vec![pair.slave], Some(pair.master))
        }
    };
    // A terminal is all three.
    let stdio = match &stdio[..] {
        [one] if master.is_some() => [one.as_fd(); 3],
        [stdin, stdout, stderr] => [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
        _ => return Err(other(io::Error::from_raw_os_error(libc::EBADF))),
    };
    let flags = rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK;
    let (report, reporting) = rustix::pipe::pipe_with(flags).map_err(|e| other(e.into()))?;
    match make_process(&spec.command, groups) {
        Ok((Cloned::Child, way)) => {
            let (stage, error) = match way.finish(&spec.command, groups) {
                Ok(()) => program.become_it(stdio, reporting.as_fd()),
                Err(e) => (Stage::Prepare, e),
            };
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            let mut message = [stage as u8, 0, 0, 0, 0];
            message[1..].copy_from_slice(&errno.to_le_bytes());
            let _ = rustix::io::write(&reporting, &message);
            sys::exit_now(127)
        }
        Ok((Cloned::Parent { pid, .. }, _)) => Ok((pid, report, master)),
        Err(e) => {
            let errno = e.raw_os_error().unwrap_or(libc::EIO);
            let failure = match errno {
                libc::EAGAIN => ExecFailure::ProcessLimit,
                libc::ENOMEM => ExecFailure::OutOfMemory,
                _ => ExecFailure::Other,
            };
            Err(Failed { failure, errno })
        }
    }
}

/// What a child has reported so far: `None` is nothing yet.
pub(super) fn outcome(report: &OwnedFd) -> Option<Result<(), Failed>> {
    let mut message = [0u8; 5];
    match rustix::io::read(report, &mut message) {
        Ok(0) => Some(Ok(())),
        Ok(5) => {
            let errno = i32::from_le_bytes([message[1], message[2], message[3], message[4]]);
            Some(Err(Failed { failure: classify(message[0], errno), errno }))
        }
        Err(Errno::AGAIN | Errno::INTR) => None,
        Ok(_) | Err(_) => Some(Err(Failed { failure: ExecFailure::Other, errno: libc::EIO })),
    }
}

fn classify(stage: u8, errno: i32) -> ExecFailure {
    let exec = stage == Stage::Exec as u8;
    match errno {
        _ if stage == Stage::Cwd as u8 => ExecFailure::BadCwd,
        libc::ENOENT | libc::ENOTDIR if exec => ExecFailure::NotFound,
        libc::EACCES | libc::EPERM | libc::EISDIR if exec => ExecFailure::NotExecutable,
        libc::ENOEXEC if exec => ExecFailure::BadFormat,
        libc::E2BIG => ExecFailure::TooLong,
        libc::EAGAIN => ExecFailure::ProcessLimit,
        libc::ENOMEM => ExecFailure::OutOfMemory,
        _ => ExecFailure::Other,
    }
}

/// How a child was made, which it has to finish itself.
#[derive(Clone, Copy)]
enum Way {
    /// It is where it belongs.
    Straight,
    /// It is in the version 2 `relief`.
    Relief,
}

impl Way {
    /// Moves the child from `relief` to its leaf: a move, unlike a birth, does not ask the limit. In two
    /// steps, since only the shim's descriptor of `run` may be used from outside of `run`.
    fn finish(self, command: &CommandId, groups: &Groups) -> io::Result<()> {
        let (Self::Relief, Some([_, run]), Some(folder)) = (self, &groups.pids, &groups.run) else {
            return Ok(());
        };
        rustix::io::write(run, b"0")?;
        let leaf = format!("{}/cgroup.procs", leaf(command));
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let leaf = rustix::fs::openat(folder, leaf, flags, Mode::empty())?;
        rustix::io::write(&leaf, b"0")?;
        Ok(())
    }
}

/// Forks, into a leaf of its own where there is version 2, and past a full process limit where the
/// sandbox has filled it: the command that ends a fork bomb must be able to start.
fn make_process(command: &CommandId, groups: &Groups) -> io::Result<(Cloned, Way)> {
    let first = fork_into_leaf(command, groups);
    let full = matches!(&first, Err(e) if e.raw_os_error() == Some(libc::EAGAIN));
    let (true, Some([outside, run])) = (full, &groups.pids) else {
        return first.map(|cloned| (cloned, Way::Straight));
    };
    rustix::io::write(outside, b"0")?;
    let second = if groups.relief {
        fork_here().map(|cloned| (cloned, Way::Relief))
    } else {
        fork_into_leaf(command, groups).map(|cloned| (cloned, Way::Straight))
    };
    if !matches!(second, Ok((Cloned::Child, _))) {
        rustix::io::write(run, b"0")?;
    }
    second
}

fn fork_into_leaf(command: &CommandId, groups: &Groups) -> io::Result<Cloned> {
    if let Some(run) = &groups.run {
        let name = leaf(command);
        match rustix::fs::mkdirat(run, &name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let folder = rustix::fs::openat(run, &name, flags, Mode::empty())?;
                return sys::clone_single_threaded(0, Some(folder.as_fd()));
            }
            // Too many leaves (background processes of ended commands): go without one.
            Err(_) => {}
        }
    }
    fork_here()
}

/// Forks into the groups of this process.
fn fork_here() -> io::Result<Cloned> {
    Ok(match sys::fork_single_threaded()? {
        Fork::Child => Cloned::Child,
        Fork::Parent(pid) => {
            let made = rustix::process::Pid::from_raw(pid)
                .ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
            let pidfd = rustix::process::pidfd_open(made, rustix::process::PidfdFlags::empty())?;
            Cloned::Parent { pid, pidfd }
        }
    })
}

/// A program with everything that its child needs, made before the fork.
struct Program {
    candidates: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
    cwd: CString,
    root: bool,
    on_terminal: bool,
}

impl Program {
    fn new(spec: &ExecSpec) -> io::Result<Self> {
        let text =
            |t: &str| CString::new(t).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL));
        let name = spec.argv.first().map(String::as_str).unwrap_or_default();
        let candidates = if name.contains('/') {
            vec![text(name)?]
        } else if name.is_empty() {
            vec![]
        } else {
            let path = spec.env.get("PATH").map(String::as_str).unwrap_or_default();
            path.split(':')
                .filter(|folder| !folder.is_empty())
                .map(|folder| text(&format!("{folder}/{name}")))
                .collect::<io::Result<_>>()?
        };
        Ok(Self {
            candidates,
            argv: spec.argv.iter().map(|a| text(a)).collect::<io::Result<_>>()?,
            env: spec
                .env
                .iter()
                .map(|(k, v)| text(&format!("{k}={v}")))
                .collect::<io::Result<_>>()?,
            cwd: text(&spec.cwd)?,
            root: spec.root,
            on_terminal: spec.tty.is_some(),
        })
    }

    /// The child's way to the program. Returns only with what stopped it.
    fn become_it(&self, stdio: [BorrowedFd<'_>; 3], report: BorrowedFd<'_>) -> (Stage, io::Error) {
        if let Err(e) = self.prepare(stdio, report) {
            return (Stage::Prepare, e);
        }
        if let Err(e) = rustix::process::chdir(&self.cwd) {
            return (Stage::Cwd, e.into());
        }
        (Stage::Exec, self.execute())
    }

    fn prepare(&self, stdio: [BorrowedFd<'_>; 3], _report: BorrowedFd<'_>) -> io::Result<()> {
        rustix::process::setsid()?;
        if self.on_terminal {
            rustix::process::ioctl_tiocsctty(stdio[0])?;
        }
        // Programs read the limits of the group that /proc/self/cgroup names. Of a leaf there are none:
        // with a view that starts at its leaf, a command looks at the session's.
        let _ = sys::unshare(rustix::thread::UnshareFlags::NEWCGROUP);
        for (number, fd) in (0..).zip(stdio) {
            sys::dup_to(fd, number)?;
        }
        // Everything else is close-on-exec.
        sys::reset_signals();
        rustix::process::umask(Mode::from_raw_mode(0o022));
        if !self.root {
            become_user(DEFAULT_USER)?;
        }
        Ok(())
    }

    /// execvpe's search, without its shell: the last telling error wins.
    fn execute(&self) -> io::Error {
        let mut result = io::Error::from_raw_os_error(libc::ENOENT);
        for path in &self.candidates {
            let error = sys::exec(path, &self.argv, &self.env);
            match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) => {}
                Some(libc::EACCES) => result = error,
                _ => return error,
            }
        }
        result
    }
}

/// Gives up root for a user with the same group and no others.
pub(super) fn become_user(id: u32) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(id), Gid::from_raw(id));
    rustix::thread::set_thread_groups(&[gid])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    Ok(())
}
