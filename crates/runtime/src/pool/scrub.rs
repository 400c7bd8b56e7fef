//! The check of a pool after an unclean end: everything is read and compared with its checksums, by a
//! process of its own with the least of priorities.
//!
//! A process, since the call cannot be interrupted: an engine in it would hold its lock until the end of it.
//! Invariant: the check ends when its starter does, or wants it to. Started by the pool's keeper; the role is
//! run through `roles`.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::folder;
use super::record::{CheckState, PoolCheck};
use crate::sys::{self, btrfs};

/// Name of the process.
pub(crate) const ROLE: &str = "bivouac-scrub";

#[derive(Serialize, Deserialize)]
enum Answer {
    Done { bytes: u64, errors: u64 },
    Failed(String),
}

/// The role: checks the pool whose path is its argument, and tells what it found.
///
/// # Errors
/// When the starter is gone.
pub(crate) fn run(control: &OwnedFd) -> io::Result<()> {
    let root = std::env::args_os().nth(1).unwrap_or_default();
    let root = folder(Path::new(&root))?;
    let mut socket = UnixStream::from(control.try_clone()?);
    let (mut watched, watching) = (socket.try_clone()?, root.try_clone()?);
    // Before the thread, so that it has the same.
    let _ = sys::idle_io();
    let _ = rustix::process::nice(19);
    std::thread::Builder::new().name("starter".to_owned()).spawn(move || {
        let _ = watched.read(&mut [0]);
        // It may be just about to begin with the next device.
        loop {
            let _ = btrfs::cancel_scrub(watching.as_fd());
            std::thread::sleep(Duration::from_millis(20));
        }
    })?;
    let answer = match scrub(&root) {
        Ok((bytes, errors)) => Answer::Done { bytes, errors },
        Err(e) if e.kind() == io::ErrorKind::Interrupted => return Ok(()),
        Err(e) => Answer::Failed(e.to_string()),
    };
    socket.write_all(&serde_json::to_vec(&answer)?)
}

fn scrub(root: &OwnedFd) -> io::Result<(u64, u64)> {
    let (mut bytes, mut errors) = (0, 0);
    for device in 1..=btrfs::last_device(root.as_fd())? {
        match btrfs::scrub(root.as_fd(), device) {
            Ok(found) => {
                bytes += found.bytes;
                errors += found.errors;
            }
            // One that was taken out.
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {}
            Err(e) => return Err(e),
        }
    }
    Ok((bytes, errors))
}

/// A check that goes on.
#[derive(Debug)]
pub(super) struct Scrub {
    socket: UnixStream,
    child: Child,
    started_at: i64,
}

impl Scrub {
    /// # Errors
    /// When no process can be started.
    pub(super) fn start(root: &Path) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let child = Command::new("/proc/self/exe")
            .arg0(ROLE)
            .arg(root)
            .env_clear()
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { socket: ours, child, started_at: now() })
    }

    /// What to tell of it while it goes on.
    pub(super) fn running(&self) -> PoolCheck {
        let (state, started_at) = (CheckState::Running, self.started_at);
        PoolCheck { state, started_at, bytes: 0, errors: 0, note: None }
    }

    /// What it found, once it has ended.
    pub(super) fn ended(&mut self) -> Option<PoolCheck> {
        let status = self.child.try_wait().ok()??;
        let mut text = Vec::new();
        let read = self.socket.read_to_end(&mut text);
        let answer = read.and_then(|_| Ok(serde_json::from_slice::<Answer>(&text)?));
        let (state, bytes, errors, note) = match answer {
            Ok(Answer::Done { bytes, errors: 0 }) => (CheckState::Clean, bytes, 0, None),
            Ok(Answer::Done { bytes, errors }) => {
                let note = "the kernel's log names the files; what is damaged reads as an error";
                (CheckState::Damaged, bytes, errors, Some(note.to_owned()))
            }
            Ok(Answer::Failed(why)) => (CheckState::Failed, 0, 0, Some(why)),
            Err(_) => (CheckState::Failed, 0, 0, Some(format!("it ended with {status}"))),
        };
        Some(PoolCheck { state, started_at: self.started_at, bytes, errors, note })
    }

    /// Ends it, wherever it is.
    pub(super) fn end(mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or_default()
}
