//! `bivouac image build`: from the machine's own apt and npm to an image file.
//!
//! The caller's process holds the lock, listens to signals, names the file by its content and publishes
//! it. The work itself is done by a process of its own (`worker`) as PID 1 of new pid and mount
//! namespaces. Invariant: however either of them ends, nothing is left but a folder `build-*.tmp`, which
//! the next build removes: no process, no mount, no loop device, no half image. Called by `bivouac image`.

mod debian;
mod finish;
mod node;
mod scratch;
mod tool;
pub(crate) mod worker;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};

use super::folder::Held;
use super::{ImageFolder, Manifest, UNIVERSAL};
use crate::sys;

/// `argv[0]` of the worker.
pub(crate) const WORKER: &str = "bivouac-image-build";
/// Free space that a build needs beside the images, bytes: the tree, the packages and the result.
pub const NEEDED_BYTES: u64 = 6 << 30;
/// Lines of the log that are shown when a build fails.
const SHOWN_LINES: usize = 25;

/// The programs of the host that a build runs, and the Debian package of each.
const TOOLS: &[(&str, &str)] = &[
    ("mmdebstrap", "mmdebstrap"),
    ("apt-get", "apt"),
    ("mkfs.erofs", "erofs-utils"),
    ("mkfs.btrfs", "btrfs-progs"),
    ("npm", "npm"),
    ("chroot", "coreutils"),
    ("mount", "mount"),
];

/// How a build is going.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Progress {
    /// Another build is at work; its process, when it is known.
    Waiting(Option<i32>),
    /// A step begins.
    Step(String),
    /// Of all the work, so many thousandths are done.
    Done(u32),
}

/// What became of a build.
#[derive(Debug)]
pub enum Built {
    /// An image of this recipe was there.
    Already(Manifest),
    /// It was built.
    New(Manifest),
}

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// This machine lacks something.
    #[error("{0}")]
    Unfit(String),
    /// A step failed; the end of what its programs said.
    #[error("{message}")]
    Failed {
        /// Which step, and why.
        message: String,
        /// The end of the log.
        log: String,
    },
    /// A signal arrived. Everything is removed.
    #[error("interrupted: nothing is left of the build")]
    Interrupted(i32),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// From the worker: how it goes, then how it ended.
#[derive(Debug, Serialize, Deserialize)]
enum Report {
    Progress(Progress),
    End(Result<Contents, String>),
}

/// What the worker put into the file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Contents {
    debian: String,
    runtimes: BTreeMap<String, String>,
    tools: BTreeMap<String, String>,
}

/// Builds the universal image, unless one of the same recipe is there (`again` builds it all the same).
/// The process must have one thread.
///
/// # Errors
/// What is missing, or the step that failed; nothing half-made is left.
pub fn universal(
    folder: &ImageFolder,
    again: bool,
    mut tell: impl FnMut(Progress),
) -> Result<Built, BuildError> {
    folder.ensure()?;
    let signals = sys::signal_fd(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])?;
    let lock = take_lock(folder, &signals, &mut tell)?;
    folder.sweep_locked(&lock)?;
    let recipe = recipe();
    if !again
        && let Some(there) = folder.find(UNIVERSAL)?
        && there.recipe == recipe
        && folder.check(&there).is_ok()
    {
        return Ok(Built::Already(there));
    }
    check_tools()?;
    check_room(folder.path())?;
    let work = folder.make_work(&lock)?;
    let made = build(folder, &lock, &work, recipe, &signals, &mut tell);
    let removed = std::fs::remove_dir_all(&work);
    let manifest = made?;
    removed?;
    Ok(Built::New(manifest))
}

fn take_lock(
    folder: &ImageFolder,
    signals: &OwnedFd,
    tell: &mut impl FnMut(Progress),
) -> Result<Held, BuildError> {
    let mut told = false;
    loop {
        match folder.try_lock_build()? {
            Ok(held) => return Ok(held),
            Err(holder) if !told => {
                told = true;
                tell(Progress::Waiting(holder));
            }
            Err(_) => {}
        }
        wait(signals, None, Some(Duration::from_millis(200)))?;
    }
}

fn check_tools() -> Result<(), BuildError> {
    let mut missing: Vec<&str> = TOOLS
        .iter()
        .filter(|(program, _)| tool::find(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if !Path::new("/usr/share/keyrings/debian-archive-keyring.gpg").exists() {
        missing.push("debian-archive-keyring");
    }
    if missing.is_empty() {
        return Ok(());
    }
    let text = format!(
        "programs that build the image are missing: install them with `apt install {}`",
        missing.join(" ")
    );
    Err(BuildError::Unfit(text))
}

fn check_room(path: &Path) -> Result<(), BuildError> {
    let stat = rustix::fs::statvfs(path).map_err(io::Error::from)?;
    let free = stat.f_bavail * stat.f_frsize;
    if free >= NEEDED_BYTES {
        return Ok(());
    }
    let text = format!(
        "a build needs {} MB free in {}, and {} MB are: make room, or choose another folder with \
         --images",
        NEEDED_BYTES / 1_000_000,
        path.display(),
        free / 1_000_000
    );
    Err(BuildError::Unfit(text))
}

/// Hash of everything that this version tells a build.
fn recipe() -> String {
    let mut hash = blake3::Hasher::new();
    hash.update(b"universal 1");
    debian::describe(&mut hash);
    node::describe(&mut hash);
    finish::describe(&mut hash);
    hash.finalize().to_hex()[..16].to_owned()
}

fn build(
    folder: &ImageFolder,
    lock: &Held,
    work: &Path,
    recipe: String,
    signals: &OwnedFd,
    tell: &mut impl FnMut(Progress),
) -> Result<Manifest, BuildError> {
    let log = work.join("build.log");
    let mut worker = Worker::start(work, lock, &log)?;
    let ended = worker.follow(signals, tell);
    // Before the folder goes: it works in there.
    worker.end();
    let contents = match ended? {
        Some(Ok(contents)) => contents,
        Some(Err(message)) => return Err(failed(message, &log)),
        None => return Err(failed("the build's process ended unexpectedly".to_owned(), &log)),
    };
    let file = work.join(worker::RESULT);
    tell(Progress::Step("naming it by its content".to_owned()));
    let (digest, bytes) = digest(&file)?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let manifest = Manifest {
        name: UNIVERSAL.to_owned(),
        digest,
        bytes,
        built_at: i64::try_from(now.as_millis()).unwrap_or(i64::MAX),
        recipe,
        architecture: debian::architecture().to_owned(),
        debian: contents.debian,
        default_runtime: node::DEFAULT.to_owned(),
        runtimes: contents.runtimes,
        tools: contents.tools,
    };
    folder.publish(&manifest, &file)?;
    tell(Progress::Done(1000));
    Ok(manifest)
}

fn failed(message: String, log: &Path) -> BuildError {
    let text = std::fs::read(log).unwrap_or_default();
    let text = tool::without_passwords(&String::from_utf8_lossy(&text));
    let lines: Vec<&str> = text.lines().collect();
    let log = lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n");
    BuildError::Failed { message, log }
}

/// Hash and size of a file, which is on disk when this returns.
fn digest(path: &Path) -> io::Result<(String, u64)> {
    let file = File::open(path)?;
    file.sync_all()?;
    let mut hash = blake3::Hasher::new();
    let bytes = io::copy(&mut BufReader::with_capacity(1 << 20, &file), &mut hash)?;
    Ok((format!("blake3:{}", hash.finalize().to_hex()), bytes))
}

/// Waits for the socket or a signal. A signal is an error.
fn wait(
    signals: &OwnedFd,
    socket: Option<&UnixStream>,
    limit: Option<Duration>,
) -> Result<(), BuildError> {
    let mut polled = vec![PollFd::new(signals, PollFlags::IN)];
    polled.extend(socket.map(|socket| PollFd::new(socket, PollFlags::IN)));
    let limit = limit.map(|limit| Timespec {
        tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    match rustix::event::poll(&mut polled, limit.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(io::Error::from(e).into()),
    }
    if polled[0].revents().is_empty() {
        return Ok(());
    }
    // struct signalfd_siginfo begins with the signal's number.
    let mut info = [0u8; 128];
    rustix::io::read(signals, &mut info).map_err(io::Error::from)?;
    let number = u32::from_ne_bytes([info[0], info[1], info[2], info[3]]);
    Err(BuildError::Interrupted(i32::try_from(number).unwrap_or(libc::SIGTERM)))
}

/// The worker's process, as its starter sees it.
struct Worker {
    child: Child,
    socket: Option<UnixStream>,
}

impl Worker {
    /// Starts it with the lock in its hands too: nobody else builds until it is gone, even if we die.
    fn start(work: &Path, lock: &Held, log: &Path) -> io::Result<Self> {
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
        Ok(Self { child, socket: Some(ours) })
    }

    /// Passes its progress on until it says how it ended. `None`: it just ended.
    fn follow(
        &mut self,
        signals: &OwnedFd,
        tell: &mut impl FnMut(Progress),
    ) -> Result<Option<Result<Contents, String>>, BuildError> {
        let Some(socket) = &self.socket else { return Ok(None) };
        let mut lines = BufReader::new(socket.try_clone()?);
        loop {
            if lines.buffer().is_empty() {
                wait(signals, Some(socket), None)?;
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
    fn end(&mut self) {
        self.socket = None;
        let _ = self.child.wait();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

/// The place of a program's folder in the tree, for those that run inside.
fn inside(tree: &Path, path: &str) -> PathBuf {
    tree.join(path.trim_start_matches('/'))
}
