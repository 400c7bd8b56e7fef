//! `bivouac image build`: from the machine's own apt and npm to an image file.
//!
//! The caller's process holds the lock, listens to signals, names the file by its content and publishes
//! it. The work itself is done by a process of its own (`worker`) as PID 1 of new pid and mount
//! namespaces. Invariant: however either of them ends, nothing is left but a folder `build-*.tmp`, which
//! the next build removes: no process, no mount, no loop device, no half image. Called by `bivouac image`.

mod debian;
mod finish;
mod node;
pub(super) mod scratch;
pub(super) mod starter;
pub(super) mod tool;
pub(crate) mod worker;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::folder::Held;
use super::{ImageFolder, Manifest, UNIVERSAL};
use crate::sys;
use starter::{Job, Worker, wait};

/// `argv[0]` of the worker.
pub(crate) const WORKER: &str = starter::WORKER;
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
pub(super) struct Contents {
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
    check_room(folder.path(), NEEDED_BYTES)?;
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
        wait(Some(signals), None, Some(Duration::from_millis(200)))?;
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

/// Refuses when there is not so much free space in the folder.
pub(super) fn check_room(path: &Path, needed: u64) -> Result<(), BuildError> {
    let stat = rustix::fs::statvfs(path).map_err(io::Error::from)?;
    let free = stat.f_bavail * stat.f_frsize;
    if free >= needed {
        return Ok(());
    }
    let text = format!(
        "an image needs {} MB free in {}, and {} MB are: make room, or choose another folder with \
         --images",
        needed / 1_000_000,
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
    let mut worker = Worker::start(work, lock, &log, &Job::Universal)?;
    let ended = worker.follow(Some(signals), None, tell);
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
        oci: None,
    };
    folder.publish(&manifest, &file)?;
    tell(Progress::Done(1000));
    Ok(manifest)
}

/// The error of a worker, with the end of its log.
pub(super) fn failed(message: String, log: &Path) -> BuildError {
    let text = std::fs::read(log).unwrap_or_default();
    let text = tool::without_passwords(&String::from_utf8_lossy(&text));
    let lines: Vec<&str> = text.lines().collect();
    let log = lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n");
    BuildError::Failed { message, log }
}

/// Hash and size of a file, which is on disk when this returns.
pub(super) fn digest(path: &Path) -> io::Result<(String, u64)> {
    let file = File::open(path)?;
    file.sync_all()?;
    let mut hash = blake3::Hasher::new();
    let bytes = io::copy(&mut BufReader::with_capacity(1 << 20, &file), &mut hash)?;
    Ok((format!("blake3:{}", hash.finalize().to_hex()), bytes))
}

/// The place of a program's folder in the tree, for those that run inside.
fn inside(tree: &Path, path: &str) -> PathBuf {
    tree.join(path.trim_start_matches('/'))
}
