//! Sandboxes as Linux sees them: launch, adopt, run commands, move files, stop.
//!
//! Owns: namespaces, mounts, control groups, id ranges, the storage pool, the shim and init roles
//! and their frames. Invariant: everything that a launch made is undone when it fails, and all of a
//! session is gone when `stop` has answered. The only crate with `unsafe` (in `sys`). Called by
//! `engine` through the two traits below and by the executable's `main` for the roles.

pub mod archive;
mod audit;
mod doors;
mod drives;
pub mod fault;
pub mod gate;
mod guest;
mod holdings;
pub mod image;
mod init;
pub mod keeper;
pub mod linux;
mod log;
pub mod pool;
mod proto;
pub mod roles;
mod shim;
pub mod sim;
mod spare;
mod sys;
mod view;
mod zygote;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use async_trait::async_trait;
use bivouac_types::command::{CommandEnd, ExecFailure};
use bivouac_types::id::{CommandId, SessionId};
use bivouac_types::meter::Times;
use bivouac_types::secret::Secret;
pub use bivouac_types::terminal::TtySize;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};

pub use doors::{DialTo, ListenAt, Listener, Listening};
pub use drives::{DriveEntry, DriveMount, DriveUsage, Drives, EntryKind};
pub use guest::{GuestListener, GuestStream};
pub use holdings::{DiskFit, DiskLevel, Holdings, Stored, StoredKind, StoredUsage};

/// Limits of one session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes of memory, everything counted.
    pub memory_bytes: u64,
    /// Virtual CPUs: CPU time per wall time. More than the host has is accepted.
    pub vcpus: u32,
    /// Processes and threads.
    pub pids: u32,
    /// Bytes that the sandbox may write over its image.
    pub disk_bytes: u64,
}

/// Everything that a launch needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchSpec {
    /// The session; names its folders, sockets and control groups.
    pub session: SessionId,
    /// Host name inside, 63 bytes at most.
    pub hostname: String,
    /// Name of an image that the runtime has (see [`Runtime::image`]).
    pub image: String,
    /// Snapshot that the upper starts from; absent is an empty upper.
    pub from_snapshot: Option<String>,
    /// Bytes that the snapshot already holds (counted against `disk_bytes`).
    pub snapshot_bytes: u64,
    /// The snapshot is another sandbox's: what tells machines apart is made anew before anything runs.
    #[serde(default)]
    pub fresh: bool,
    /// Limits in force.
    pub limits: Limits,
    /// Index of the id range.
    pub id_range: u32,
    /// Working folder, made at launch when missing.
    pub cwd: String,
    /// Drives that it has from the start.
    #[serde(default)]
    pub mounts: Vec<DriveMount>,
    /// Id of the request that asked for it, for the log.
    #[serde(default)]
    pub request: Option<String>,
    /// What the session's egress broker starts with, in its own words. It holds secrets: it travels
    /// beside the specification and never in it. Absent: the gate stays closed.
    #[serde(skip)]
    pub egress: Option<Secret>,
}

/// A started program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecSpec {
    /// The command; names its log.
    pub command: CommandId,
    /// Executable and arguments.
    pub argv: Vec<String>,
    /// Complete environment.
    pub env: BTreeMap<String, String>,
    /// Absolute working folder.
    pub cwd: String,
    /// As root of the sandbox instead of the default user.
    pub root: bool,
    /// SIGKILL for the whole tree after so many ms.
    pub timeout_ms: Option<u64>,
    /// Keep standard input open.
    pub attach_stdin: bool,
    /// On a terminal of this size: its output is one stream, kept from its end only (see [`TTY_LOG`]), and its
    /// input stays open.
    #[serde(default)]
    pub tty: Option<TtySize>,
    /// Id of the request that asked for it, for the log.
    #[serde(default)]
    pub request: Option<String>,
}

/// How far a command's output has come. The output itself is in the log.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Bytes of the log file that are complete records.
    pub log_bytes: u64,
    /// Where the first record begins that is still there: of a terminal, old output goes.
    #[serde(default)]
    pub log_start: u64,
    /// How it ended.
    pub end: Option<CommandEnd>,
}

/// One piece of a command's output, read from its log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogRecord {
    /// Bytes of a stream, in the order in which the shim read them.
    Data {
        /// Which stream.
        stream: bivouac_types::command::Stream,
        /// The bytes.
        bytes: bytes::Bytes,
    },
    /// The session's log space was used up: so many bytes of output are missing from here on.
    Cut,
    /// The command has ended; nothing follows.
    End(CommandEnd),
}

/// What a session used so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// CPU time of everything in it, ms.
    pub cpu_ms: u64,
    /// Memory in use now, bytes.
    pub memory_bytes: u64,
    /// Processes and threads now.
    pub pids: u64,
    /// How often the kernel killed a process at the memory limit.
    pub oom_kills: u64,
    /// How often the process limit refused a fork.
    pub pid_limit_hits: u64,
    /// What went through its network device; absent when that cannot be told.
    pub network: Option<Traffic>,
}

/// Bytes through a network device since its start, headers included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Traffic {
    /// What the sandbox got.
    pub received: u64,
    /// What the sandbox sent, refused or not.
    pub sent: u64,
}

/// How full the storage of sandboxes is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Space {
    /// Bytes in use.
    pub used: u64,
    /// Bytes that may still be used, by the storage's own size.
    pub free: u64,
}

/// What a snapshot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotStat {
    /// Bytes of the files in the upper, by a walk of the tree.
    pub bytes: u64,
}

/// A file operation that the sandbox answered with an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct FileError {
    /// What kind.
    pub kind: FileErrorKind,
    /// For the user: operation, path, cause.
    pub message: String,
}

/// Kinds of file errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileErrorKind {
    /// The path, or a folder on the way to it, is missing.
    NotFound,
    /// Something is there already.
    Exists,
    /// A folder was expected, or none was.
    WrongType,
    /// The disk limit is reached.
    NoSpace,
    /// Somebody uses it.
    Busy,
    /// The request itself is wrong: a bad path, a broken or hostile archive.
    Invalid,
    /// Anything else.
    Other,
}

/// Why the runtime could not do something.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The program could not start; nothing ran.
    #[error("{message}")]
    Exec {
        /// What kind.
        failure: ExecFailure,
        /// For the user: program, cause, hint.
        message: String,
    },
    /// A file operation failed inside the sandbox.
    #[error(transparent)]
    File(#[from] FileError),
    /// The session is not there any more: its shim or init is gone.
    #[error("session {0} is gone")]
    Gone(SessionId),
    /// No such command in this session.
    #[error("no command {0} in this session")]
    NoCommand(CommandId),
    /// Standard input cannot take this write.
    #[error("{message}")]
    Stdin {
        /// Which rule.
        kind: StdinErrorKind,
        /// Bytes that were received since the command's start.
        written: u64,
        /// For the user.
        message: String,
    },
    /// No such image; names the command that builds it.
    #[error("{0}")]
    NoImage(String),
    /// No such snapshot in the pool.
    #[error("snapshot {0} has no data in the pool")]
    NoSnapshot(String),
    /// A launch step failed; everything before it was undone.
    #[error("launch of {session} failed at step {step}: {message}")]
    Launch {
        /// The session.
        session: SessionId,
        /// The named step.
        step: String,
        /// The chain of causes.
        message: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, to which object.
        what: String,
        /// The cause.
        source: std::io::Error,
    },
}

/// Which rule of standard input was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StdinErrorKind {
    /// The command was not started with standard input attached.
    NotAttached,
    /// The command has ended, or closed its standard input.
    Closed,
    /// `offset` is beyond what was received.
    Gap,
    /// The program does not read.
    Stuck,
}

/// A file being read out of a sandbox.
#[derive(Debug)]
pub struct FileReader {
    /// Its size when it was opened, bytes.
    pub size: u64,
    /// A pipe that yields the content, then ends.
    pub data: OwnedFd,
    /// Completion: answers after the last byte; an error means that `data` was cut short.
    pub done: Completion,
}

/// A tar being written into a sandbox.
#[derive(Debug)]
pub struct FileWriter {
    /// A pipe that takes the gzip tar; close it to end.
    pub data: OwnedFd,
    /// Completion: answers when everything is written and owned by the default user.
    pub done: Completion,
}

/// The result of a file operation in flight.
pub struct Completion(std::pin::Pin<Box<dyn Future<Output = Result<(), RuntimeError>> + Send>>);

impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Completion")
    }
}

impl Completion {
    /// Wraps the future that knows the result.
    pub fn new(future: impl Future<Output = Result<(), RuntimeError>> + Send + 'static) -> Self {
        Self(Box::pin(future))
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// What the sandbox answered, or [`RuntimeError::Gone`].
    pub async fn wait(self) -> Result<(), RuntimeError> {
        self.0.await
    }
}

/// An image that sandboxes can start from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Its name.
    pub name: String,
    /// The name that means exactly this version of it, for ever: uppers are bound to that.
    pub reference: String,
    /// What it is made of, as a hash.
    pub digest: String,
    /// Whether the same image can be had on another host.
    pub replayable: bool,
    /// What it says itself of how it is to be run; empty for images of ours.
    #[serde(default)]
    pub config: bivouac_types::oci::ImageConfig,
}

/// A host that can run sessions. `Linux` is the only implementation that users run.
#[async_trait]
pub trait Runtime: archive::Archives + Drives + Holdings + Send + Sync + std::fmt::Debug {
    /// Starts a session; answers when its init is ready.
    async fn launch(&self, spec: &LaunchSpec) -> Result<Arc<dyn Handle>, RuntimeError>;
    /// Finds a running session again after a restart of the engine. `None`: it is not alive.
    async fn adopt(&self, session: &SessionId) -> Result<Option<Arc<dyn Handle>>, RuntimeError>;
    /// Every session of which something is left here: process, control group, folder or socket.
    async fn list(&self) -> Result<Vec<SessionId>, RuntimeError>;
    /// Removes everything that is left of a session: kills, unmounts, deletes its upper, logs
    /// excepted. Idempotent; answers when it is gone.
    async fn remove(&self, session: &SessionId) -> Result<(), RuntimeError>;
    /// Removes the logs of a session's commands, and its audit lines. Idempotent.
    async fn remove_logs(&self, session: &SessionId) -> Result<(), RuntimeError>;
    /// Keeps the upper of a session, running or not, as snapshot `name`, and looks at what it holds.
    /// Idempotent by name.
    async fn snapshot(
        &self,
        session: &SessionId,
        name: &str,
    ) -> Result<SnapshotStat, RuntimeError> {
        self.keep(session, name).await?;
        self.measure(name).await
    }
    /// Keeps the upper of a session, running or not, as snapshot `name`; on disk when it answers. Takes as
    /// long for much as for little, but for what was written and not flushed. Idempotent by name.
    async fn keep(&self, session: &SessionId, name: &str) -> Result<(), RuntimeError>;
    /// What a snapshot holds: by a walk through it.
    async fn measure(&self, name: &str) -> Result<SnapshotStat, RuntimeError>;
    /// Brings to disk what sandboxes have written so far.
    async fn flush(&self) -> Result<(), RuntimeError>;
    /// Every snapshot in the pool.
    async fn snapshots(&self) -> Result<Vec<String>, RuntimeError>;
    /// Deletes a snapshot's data. Idempotent.
    async fn remove_snapshot(&self, name: &str) -> Result<(), RuntimeError>;
    /// Finds an image by name or reference.
    async fn image(&self, name: &str) -> Result<Image, RuntimeError>;
    /// Every image that can be had.
    async fn images(&self) -> Result<Vec<Image>, RuntimeError>;
    /// The folder that images are made in. `None`: this host makes none.
    fn image_folder(&self) -> Option<image::ImageFolder> {
        None
    }
    /// References of the images that are kept from being removed for this engine, and the present
    /// moment, for [`Runtime::release_images`].
    async fn kept_images(&self) -> Result<(u64, Vec<String>), RuntimeError> {
        Ok((0, Vec::new()))
    }
    /// Lets go of images that nothing lies on, but for those that a launch has asked for since `mark`.
    async fn release_images(&self, _mark: u64, _unused: &[String]) -> Result<(), RuntimeError> {
        Ok(())
    }
    /// Reads a command's log from a byte offset that was the end of a record (0 at first).
    /// Answers the records up to `until` bytes of the file, at most about 256 KiB of them, and the
    /// offset behind the last one.
    async fn read_log(
        &self,
        session: &SessionId,
        command: &CommandId,
        from: u64,
        until: u64,
    ) -> Result<(Vec<LogRecord>, u64), RuntimeError>;
    /// How far a command's log has come, from the file alone: for sessions that are not running.
    /// A log without an end record answers `end: None`.
    async fn log_progress(
        &self,
        session: &SessionId,
        command: &CommandId,
    ) -> Result<Progress, RuntimeError>;
    /// Reads audit lines of a session, running or not, from an offset that an earlier call answered (0 at
    /// first): whole lines, at most about 256 KiB of them, and the offset behind the last one. Old lines
    /// are dropped when new ones need their room: when the answered offset is further from `from` than
    /// the lines are long, so many bytes in front of them are lost.
    async fn read_audit(
        &self,
        _session: &SessionId,
        from: u64,
    ) -> Result<(Vec<u8>, u64), RuntimeError> {
        Ok((Vec::new(), from))
    }
    /// Lets go of what the engine holds on this host, when no session is left. For a clean end.
    async fn close(&self) -> Result<(), RuntimeError> {
        Ok(())
    }
    /// Refuses with a sentence for the user when the host has no room for another session.
    async fn admit(&self) -> Result<(), RuntimeError>;
    /// How full the storage is. `None`: there is nothing to measure.
    async fn space(&self) -> Result<Option<Space>, RuntimeError> {
        Ok(None)
    }
    /// How the storage is kept, and how full it is. `None`: there is nothing to tell.
    async fn storage(&self) -> Result<Option<pool::Storage>, RuntimeError> {
        Ok(None)
    }
    /// How long each step of the launches so far took.
    fn launch_times(&self) -> Vec<(String, Times)> {
        Vec::new()
    }
}

/// A running session.
#[async_trait]
pub trait Handle: Send + Sync + std::fmt::Debug {
    /// The session.
    fn session(&self) -> &SessionId;
    /// Starts a program; answers when it has been executed, or why not.
    async fn exec(&self, spec: &ExecSpec) -> Result<(), RuntimeError>;
    /// How far a command has come; changes wake the receiver. `None`: no such command.
    fn progress(&self, command: &CommandId) -> Option<watch::Receiver<Progress>>;
    /// Sends a signal to a command's process group. A command that has ended is left alone.
    async fn signal(&self, command: &CommandId, signal: i32) -> Result<(), RuntimeError>;
    /// Writes standard input. Bytes from `offset` on that were received already are skipped; answers
    /// how many bytes were received since the command's start.
    async fn stdin(
        &self,
        command: &CommandId,
        offset: Option<u64>,
        data: bytes::Bytes,
        close: bool,
    ) -> Result<u64, RuntimeError>;
    /// Opens a regular file inside. `path` is absolute.
    async fn read_file(&self, path: &str) -> Result<FileReader, RuntimeError>;
    /// Unpacks a gzip tar below the absolute folder `cwd`; files belong to the default user.
    async fn write_files(&self, cwd: &str) -> Result<FileWriter, RuntimeError>;
    /// Makes a folder that belongs to the default user. `path` is absolute.
    async fn mkdir(&self, path: &str, recursive: bool) -> Result<(), RuntimeError>;
    /// Mounts a drive, or a private copy of it, which is made here. `id_range` is the session's.
    async fn attach_drive(&self, mount: &DriveMount, id_range: u32) -> Result<(), RuntimeError>;
    /// Takes a drive's mount away; what was written to it is on disk then. One that is not there is
    /// success. With `force` also one that is in use: nothing is killed, and what is open stays so, hence
    /// [`Drives::fence_drive`]. The private copy stays.
    async fn detach_drive(&self, mount: &DriveMount, force: bool) -> Result<(), RuntimeError>;
    /// As [`Handle::exec`], with the caller's own standard input, output and error: nothing but the end goes to the
    /// log. The descriptors are pipes or sockets. `tty` and `attach_stdin` do not go with it.
    async fn exec_passed(&self, spec: &ExecSpec, stdio: [OwnedFd; 3]) -> Result<(), RuntimeError>;
    /// Tells a command's terminal its size. One that has ended is left alone; a command without a terminal
    /// is [`FileErrorKind::Invalid`].
    async fn resize(&self, command: &CommandId, size: TtySize) -> Result<(), RuntimeError>;
    /// Connects to a TCP port, from inside: what is not the sandbox's own goes through its policy. Answers a
    /// connected, non-blocking socket, to be carried by a [`GuestStream`]. Nobody listening is [`FileErrorKind::NotFound`].
    async fn dial(&self, to: &DialTo) -> Result<OwnedFd, RuntimeError>;
    /// Listens inside.
    async fn listen(&self, at: &ListenAt) -> Result<Listening, RuntimeError>;
    /// Which TCP ports are listened on inside, and by whom: at most 256, the lowest. What [`Handle::listen`]
    /// made is not among them.
    async fn listeners(&self) -> Result<Vec<Listener>, RuntimeError>;
    /// Starts a server of SFTP inside, as the default user or as root, in the absolute folder `cwd` (`/` if that
    /// cannot be entered). Answers a non-blocking socket that speaks it; the server ends when that closes.
    async fn sftp(&self, root: bool, cwd: &str) -> Result<OwnedFd, RuntimeError>;
    /// Moves the memory of a session, frozen or not, to swap; answers how many bytes. An error of the kind
    /// `Invalid` where the host has no swap.
    async fn page_out(&self) -> Result<u64, RuntimeError>;
    /// Stops every process from running, until `thaw`.
    async fn freeze(&self) -> Result<(), RuntimeError>;
    /// Lets them run again.
    async fn thaw(&self) -> Result<(), RuntimeError>;
    /// Kills everything inside; answers when no process is left. The upper stays for
    /// [`Runtime::snapshot`] until [`Runtime::remove`]. Open commands end with `SandboxStopped`.
    async fn kill(&self) -> Result<(), RuntimeError>;
    /// Sends a message to the session's egress broker and answers its reply. The runtime looks at
    /// neither.
    async fn egress(&self, message: bytes::Bytes) -> Result<bytes::Bytes, RuntimeError>;
    /// What the broker says unasked. The first call takes the receiver, with all that came before it;
    /// every later one answers a receiver that has ended.
    fn egress_events(&self) -> mpsc::Receiver<bytes::Bytes>;
    /// What it used so far.
    async fn usage(&self) -> Result<Usage, RuntimeError>;
    /// Turns true, once, when the session has ended by itself or by `kill`.
    fn gone(&self) -> watch::Receiver<bool>;
}

/// The step of a launch at which drives are mounted: its cause is told to the user.
pub const MOUNT_STEP: &str = "mount a drive";

/// Bytes of output that are kept of a terminal, at least; twice as many at most.
pub const TTY_LOG: u64 = 4 << 20;

/// File name of a command's log.
pub(crate) fn log_name(command: &CommandId) -> String {
    format!("{command}.log")
}
