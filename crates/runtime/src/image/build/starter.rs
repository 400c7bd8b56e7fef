//! The worker's process as its starter sees it: what it is told, how it goes, how it is ended.
//!
//! Invariant: the worker has the lock in its hands too, so nobody takes its folder while it lives, even when the
//! starter dies; and it ends when the starter closes the socket. Called by builds and imports.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};

use super::{BuildError, Contents, Progress, Report, tool};
use crate::image::folder::Held;
use crate::image::oci::{Cancel, Task};

/// `argv[0]` of the worker.
pub(super) const WORKER: &str = "bivouac-image-build";
/// How soon a wish to end it early is seen.
const LOOK: Duration = Duration::from_millis(200);
/// Longest job.
const MAX_JOB: u32 = 4 << 20;

/// What the worker has to do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Job {
    /// The universal image.
    Universal,
    /// One of layers that are at hand.
    Oci(Task),
}

impl Job {
    fn send(&self, socket: &mut UnixStream) -> io::Result<()> {
        let text = serde_json::to_vec(self)?;
        let length = u32::try_from(text.len()).map_err(io::Error::other)?;
        socket.write_all(&length.to_le_bytes())?;
        socket.write_all(&text)
    }

    /// The worker's side.
    pub(super) fn receive(socket: &mut UnixStream) -> io::Result<Self> {
        let mut length = [0u8; 4];
        socket.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length);
        if length > MAX_JOB {
            return Err(io::Error::other("the job is too long"));
        }
        let mut text = vec![0u8; length as usize];
        socket.read_exact(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    }
}

/// Waits for the socket or a signal. A signal is an error; answers whether the socket has something.
pub(super) fn wait(
    signals: Option<&OwnedFd>,
    socket: Option<&UnixStream>,
    limit: Option<Duration>,
) -> Result<bool, BuildError> {
    let mut polled: Vec<_> =
        socket.map(|one| PollFd::new(one, PollFlags::IN)).into_iter().collect();
    polled.extend(signals.map(|one| PollFd::new(one, PollFlags::IN)));
    let limit = limit.map(|limit| Timespec {
        tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    match rustix::event::poll(&mut polled, limit.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(io::Error::from(e).into()),
    }
    let ready: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
    if let Some(signals) = signals.filter(|_| ready.last() == Some(&true)) {
        // struct signalfd_siginfo begins with the signal's number.
        let mut info = [0u8; 128];
        rustix::io::read(signals, &mut info).map_err(io::Error::from)?;
        let number = u32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
        return Err(BuildError::Interrupted(i32::try_from(number).unwrap_or(libc::SIGTERM)));
    }
    Ok(socket.is_some() && ready.first() == Some(&true))
}

/// See the module.
pub(crate) struct Worker {
    child: Child,
    socket: Option<UnixStream>,
}

impl Worker {
    /// Starts it with the lock in its hands too: nobody else builds until it is gone, even if we die.
    pub(crate) fn start(work: &Path, lock: &Held, log: &Path, job: &Job) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let log = File::options().create(true).append(true).open(log)?;
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0(WORKER)
            .env_clear()
            .envs(tool::environment(std::env::vars_os()))
            .current_dir(work)
            // Ctrl-C is for us: we end it.
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(lock.0.as_fd().try_clone_to_owned()?))
            .stderr(Stdio::from(log));
        let child = command.spawn()?;
        // The command holds the worker's end of the socket as long as it lives.
        drop(command);
        let mut worker = Self { child, socket: Some(ours) };
        if let Some(socket) = &mut worker.socket {
            job.send(socket)?;
        }
        Ok(worker)
    }

    /// Passes its progress on until it says how it ended. `None`: it just ended.
    pub(crate) fn follow(
        &mut self,
        signals: Option<&OwnedFd>,
        cancel: Option<&Cancel>,
        tell: &mut impl FnMut(Progress),
    ) -> Result<Option<Result<Contents, String>>, BuildError> {
        let Some(socket) = &self.socket else { return Ok(None) };
        let mut lines = BufReader::new(socket.try_clone()?);
        loop {
            while lines.buffer().is_empty() && !wait(signals, Some(socket), cancel.map(|_| LOOK))? {
                if cancel.is_some_and(Cancel::is_cancelled) {
                    return Err(BuildError::Interrupted(libc::SIGTERM));
                }
            }
            let mut line = String::new();
            if lines.read_line(&mut line)? == 0 {
                return Ok(None);
            }
            match serde_json::from_str(&line).map_err(io::Error::from)? {
                Report::Progress(progress) => tell(progress),
                Report::End(end) => return Ok(Some(end)),
            }
        }
    }

    /// Ends it and all that it started: it notices that the socket is closed. Answers when it is gone.
    pub(crate) fn end(&mut self) {
        self.socket = None;
        let _ = self.child.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}
