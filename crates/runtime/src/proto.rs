//! Frames between serve, shim, init and the zygotes, and how they travel.
//!
//! A frame is a header (length of the JSON, length of the tail, number of descriptors), the JSON of
//! one message, and a tail of raw bytes. Descriptors travel as ancillary data of the frame's first
//! byte. Invariant: a reader never keeps more than its cap of unread bytes or [`MAX_FDS`]
//! descriptors, whatever the other side sends. Frames from init are untrusted input.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bivouac_types::command::{CommandEnd, ExecFailure};
use bivouac_types::id::CommandId;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::io::unix::AsyncFd;

use crate::linux::cgroup::Hierarchies;
use crate::spare::SparePlan;
use crate::{DialTo, ExecSpec, FileError, LaunchSpec, ListenAt, Progress, StdinErrorKind, TtySize};

/// Most descriptors in one frame.
pub(crate) const MAX_FDS: usize = 16;
/// Cap of a frame from serve: arguments and environment of a command are at most 2 MiB.
pub(crate) const TRUSTED_CAP: usize = 16 << 20;
/// Cap of a frame from init.
pub(crate) const GUEST_CAP: usize = 64 << 10;
/// Version of the frames between serve and shims; a shim of another version is not adopted.
pub(crate) const VERSION: u32 = 2;

/// What shims of this version understand besides what [`VERSION`] says. A frame that an older shim does not
/// know ends its connection, and with that the session: serve looks at the level first. 1: drives. 2: terminals,
/// passed standard input and output, doors, SFTP.
pub(crate) const LEVEL: u32 = 2;

const HEADER: usize = 12;
/// Largest buffer that a reader keeps between frames.
const KEPT: usize = 64 << 10;

/// serve → shim zygote: start a shim. Carries the control socket.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ShimStart {
    pub spec: LaunchSpec,
    pub plan: LaunchPlan,
    /// A [`ShimSecrets`] follows on the control socket.
    #[serde(default)]
    pub egress: bool,
}

/// serve → shim, on the control socket, before anything else. The tail is the configuration of the
/// egress broker. It holds secrets, so it must not pass through the zygote: what that has once read,
/// every later shim has in its memory.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ShimSecrets {}

/// What serve prepared for a launch, besides the specification.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LaunchPlan {
    /// The session's subvolume in the pool; holds one upper and work folder per layer.
    pub upper: String,
    /// Lower folders of the image and where they go.
    pub layers: Vec<Layer>,
    /// How this kernel takes those layers.
    #[serde(default)]
    pub way: crate::linux::overlay::Way,
    /// How this kernel steers what the sandbox sends to its gate.
    #[serde(default)]
    pub capture: crate::linux::steer::Way,
    /// Folder of the session's command logs.
    pub logs: String,
    /// Drives that the sandbox has from the start.
    #[serde(default)]
    pub drives: Vec<PlannedDrive>,
    /// Folder of trust layers: see [`crate::linux::trust`].
    #[serde(default)]
    pub trust: String,
    /// Most bytes of logs.
    pub log_cap: u64,
    /// Socket on which the shim listens for a restarted serve.
    pub socket: String,
    /// Socket of the init zygote.
    pub init_zygote: String,
    /// Name of the engine's control group, one level under each hierarchy's root.
    pub cgroup: String,
    /// Where those hierarchies are.
    pub hierarchies: Hierarchies,
    /// How a sandbox sees its own resources.
    pub view: crate::linux::view::ViewPlan,
    /// By what the sandbox's `df` is told; absent where nothing limits its disk.
    #[serde(default)]
    pub disk: Option<DiskPlan>,
    /// Text of /etc/machine-id.
    pub machine_id: String,
    /// Fault point to hit: see [`crate::fault`].
    pub fault: Option<crate::fault::Armed>,
    /// Whether the shim tells of what goes well.
    #[serde(default)]
    pub log_debug: bool,
}

/// Where the numbers of a session's disk are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DiskPlan {
    /// Folder of its quota group, in sysfs.
    pub group: String,
    /// File in which serve writes what the storage has left.
    pub space: String,
}

/// One overlay of a root: a read-only folder and the place inside where it appears.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layer {
    /// Folder on the host.
    pub lower: String,
    /// Absolute path inside; the first layer is `/`.
    pub at: String,
}

/// A drive of a launch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlannedDrive {
    /// Its files, a folder on the host.
    pub data: String,
    /// Absolute path inside.
    pub at: String,
}

/// serve → shim.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToShim {
    /// Start a program. With three descriptors, those are its standard input, output and error.
    Exec { request: u64, spec: Box<ExecSpec> },
    /// Signal a command's process group.
    Signal { request: u64, command: CommandId, signal: i32 },
    /// Write standard input; the bytes are the tail.
    Stdin { request: u64, command: CommandId, offset: Option<u64>, close: bool },
    /// Run a file operation; carries its data and result descriptors. Not answered here.
    File { op: FileOp },
    /// Tell a command's terminal its size.
    Resize { request: u64, command: CommandId, size: TtySize },
    /// Connect or listen inside; carries the socket on which init, or a child of it, answers [`DoorReply`].
    Door { op: DoorOp },
    /// Everything inside is about to be killed by order: commands that end now were stopped.
    Stopping { request: u64 },
    /// A message to the egress broker; it is the tail.
    Egress { request: u64 },
}

/// shim → serve.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromShim {
    /// The launch ended; the first frame of a new shim.
    Launched(Result<Steps, LaunchError>),
    /// First frame on each connection made later.
    Hello {
        version: u32,
        commands: Vec<(CommandId, Progress)>,
        /// Since when those run that run, ms. A shim of an earlier release does not tell.
        #[serde(default)]
        ages: BTreeMap<CommandId, u64>,
        /// What it understands besides: see [`LEVEL`].
        #[serde(default)]
        level: u32,
    },
    /// Answer to a request.
    Reply { request: u64, result: Result<u64, ShimError> },
    /// A command's log grew or the command ended.
    Changed { command: CommandId, progress: Progress },
    /// The egress broker's answer to a request; it is the tail.
    EgressReply { request: u64 },
    /// What the egress broker says unasked; it is the tail.
    Egress,
    /// Init is gone; the shim ends after this.
    Gone,
}

/// Steps of a launch and how long each took, µs.
pub(crate) type Steps = Vec<(String, u64)>;

/// Why a launch failed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LaunchError {
    pub step: String,
    pub message: String,
}

/// A refusal by the shim.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum ShimError {
    Exec { failure: ExecFailure, message: String },
    NoCommand,
    NoTerminal,
    Stdin { kind: StdinErrorKind, written: u64, message: String },
    Gone,
    Other(String),
}

/// serve → init zygote, the first frame. Carries the listener for shims.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct InitZygoteStart {
    /// Keep spares, made with this.
    pub spares: Option<SparePlan>,
}

/// shim → init zygote, one frame on a connection.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToZygote {
    /// Give me a spare. Answered by [`SpareGiven`].
    Take,
    /// Make an init yourself. Carries what [`InitStart`] says, and is answered by [`InitStarted`].
    Start(InitStart),
}

/// init zygote → shim. Carries the spare's socket when there is one.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SpareGiven {
    /// Name of its control groups.
    pub name: Option<String>,
}

/// shim → init zygote or spare: make an init. Carries the socket for it and, where there is one, the
/// version 2 control group to be born in.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct InitStart {
    /// First host id of the sandbox's range.
    pub first_id: u32,
    /// Id that owns the user namespace.
    pub owner: u32,
    /// A control group descriptor is attached.
    pub in_cgroup: bool,
}

/// init zygote → shim. Carries the pidfd when it worked.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct InitStarted {
    pub result: Result<i32, String>,
}

/// shim → init.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ToInit {
    /// Ready what needs nothing of the shim: the first frame, while the shim still works. Carries
    /// `cgroup.procs` of the version 1 groups that init belongs to; with `disk`, the sandbox's limit, behind
    /// them the folder of its quota group and a file that tells what the storage has left.
    Prepare { hostname: String, shm_bytes: u64, disk: Option<u64> },
    /// Build the root and go on. Carries the mounts in the order of `mounts`, then the control
    /// group folders that `cgroups` names.
    Go(Box<InitConfig>),
    /// Start a program. Carries stdin, stdout, stderr; nothing if it is to have a terminal.
    Exec(Box<ExecSpec>),
    /// Signal a command's process group.
    Signal { command: CommandId, signal: i32 },
    /// SIGKILL everything that a command started.
    KillTree { command: CommandId },
    /// Run a file operation. Carries its data and result descriptors.
    File(FileOp),
    /// Connect or listen. Carries the socket to answer on.
    Door(DoorOp),
}

/// What init needs to build its root.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct InitConfig {
    /// Where each attached mount goes; the first is the root.
    pub mounts: Vec<String>,
    /// Files of the view and the places that they cover.
    pub cover: Vec<(String, String)>,
    /// Contents of files in /etc that belong to this session.
    pub etc: BTreeMap<String, String>,
    /// Folders to be made for the default user when missing.
    pub folders: Vec<String>,
    /// The tree is another sandbox's: see `init/identity.rs`.
    #[serde(default)]
    pub fresh: bool,
    /// Which control group descriptors follow the mounts.
    pub cgroups: InitCgroups,
}

/// Control group descriptors that init keeps.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct InitCgroups {
    /// The version 2 folder in which each command gets a leaf of its own.
    pub leaves: bool,
    /// `cgroup.procs` of a group beside or above `run`, and of `run`: the way around a full one.
    pub pids: bool,
    /// That group is version 2's `relief`.
    pub relief: bool,
}

/// init → shim.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromInit {
    /// The root stands; commands can start.
    Ready,
    /// It does not.
    Failed { step: String, message: String },
    /// The program has been executed. Carries the master of its terminal, if it was to have one.
    Spawned { command: CommandId },
    /// It could not be.
    ExecFailed { command: CommandId, failure: ExecFailure, errno: i32 },
    /// Its process ended: exit code, 128+n for a signal.
    Exited { command: CommandId, code: i32 },
}

/// A file operation, done by a process inside the sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum FileOp {
    /// Write a regular file's content to the data descriptor.
    Read { path: String },
    /// Unpack the gzip tar that the data descriptor yields.
    Write { cwd: String },
    /// Make a folder.
    Mkdir { path: String, recursive: bool },
    /// Attach a mount, which comes instead of the data descriptor; then make the folders.
    Mount { at: String, folders: Vec<String> },
    /// Take the mount of that folder away.
    Unmount { at: String, dev: u64, ino: u64, force: bool },
    /// Serve SFTP on a socket, which comes instead of the data descriptor; answered when it is ready to.
    Sftp { root: bool, cwd: String },
}

/// What is done in the sandbox's own network.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum DoorOp {
    /// Connect, by init itself when the port is the sandbox's own.
    Dial(DialTo),
    /// Listen.
    Listen(ListenAt),
    /// Tell who listens.
    Listeners,
}

/// The one answer on the socket of a [`DoorOp`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum DoorReply {
    /// Carries the connected socket, or the one that listens.
    Open,
    /// Who listens.
    Listeners(Vec<Heard>),
    /// It failed.
    Failed(FileError),
}

/// One socket that listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Heard {
    pub listener: crate::Listener,
    /// By which serve knows its own.
    pub inode: u64,
}

/// One line of a file operation's result descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FileReply {
    /// The file is open; its content follows on the data descriptor.
    Opened { size: u64 },
    /// All is done.
    Done,
    /// It failed.
    Failed(FileError),
}

fn encode(message: &impl Serialize, tail: &[u8], fds: usize) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec(message)?;
    let length = |n: usize| u32::try_from(n).map_err(|_| io::Error::other("frame too long"));
    let mut out = Vec::with_capacity(HEADER + json.len() + tail.len());
    out.extend(length(json.len())?.to_le_bytes());
    out.extend(length(tail.len())?.to_le_bytes());
    out.extend(length(fds)?.to_le_bytes());
    out.extend(json);
    out.extend(tail);
    Ok(out)
}

/// One sendmsg; the descriptors go with the first byte.
fn send_some(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors in one frame"));
    }
    let iov = [IoSlice::new(bytes)];
    Ok(rustix::net::sendmsg(socket, &iov, &mut control, SendFlags::NOSIGNAL)?)
}

/// Sends a frame on a blocking socket.
///
/// # Errors
/// As sendmsg(2).
pub(crate) fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let frame = encode(message, &[], fds.len())?;
    let mut rest = &frame[..];
    let mut fds = fds;
    while !rest.is_empty() {
        match send_some(socket.as_fd(), rest, fds) {
            Ok(n) => {
                rest = &rest[n..];
                fds = &[];
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// A received frame.
#[derive(Debug)]
pub(crate) struct Frame<T> {
    pub message: T,
    pub tail: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// Puts frames together from what a socket yields.
#[derive(Debug)]
pub(crate) struct Assembler {
    cap: usize,
    bytes: Vec<u8>,
    fds: VecDeque<OwnedFd>,
}

impl Assembler {
    /// An empty one that refuses frames over `cap` bytes.
    pub(crate) fn new(cap: usize) -> Self {
        Self { cap, bytes: Vec::new(), fds: VecDeque::new() }
    }

    /// One recvmsg. `Ok(false)`: the other side has closed.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let mut chunk = [0u8; 32 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut chunk)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        if self.fds.len() > 4 * MAX_FDS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors"));
        }
        self.bytes.extend_from_slice(&chunk[..got.bytes]);
        Ok(got.bytes > 0)
    }

    /// The next whole frame, if it is there.
    pub(crate) fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<Frame<T>>> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        if self.bytes.len() < HEADER {
            return Ok(None);
        }
        let field = |at: usize| {
            let mut word = [0u8; 4];
            word.copy_from_slice(&self.bytes[at..at + 4]);
            u32::from_le_bytes(word) as usize
        };
        let (json, tail, fds) = (field(0), field(4), field(8));
        let total = HEADER.saturating_add(json).saturating_add(tail);
        if total > self.cap || fds > MAX_FDS {
            return Err(invalid("frame over its cap"));
        }
        if self.bytes.len() < total {
            return Ok(None);
        }
        if self.fds.len() < fds {
            return Err(invalid("frame without its descriptors"));
        }
        let message = serde_json::from_slice(&self.bytes[HEADER..HEADER + json])?;
        let tail = self.bytes[HEADER + json..total].to_vec();
        self.bytes.drain(..total);
        if self.bytes.is_empty() && self.bytes.capacity() > KEPT {
            // One large frame does not cost its memory for ever.
            self.bytes = Vec::new();
        }
        Ok(Some(Frame { message, tail, fds: self.fds.drain(..fds).collect() }))
    }
}

/// Waits for one frame on a blocking socket. `None`: closed.
///
/// # Errors
/// As recvmsg(2); `InvalidData` for a broken frame.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: impl AsFd,
    assembler: &mut Assembler,
) -> io::Result<Option<Frame<T>>> {
    loop {
        if let Some(frame) = assembler.next()? {
            return Ok(Some(frame));
        }
        match assembler.receive(socket.as_fd()) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// The asynchronous side of a socket: many may send, one receives.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: AsyncFd<OwnedFd>,
    sending: tokio::sync::Mutex<()>,
}

impl Channel {
    /// Takes a stream socket over; makes it non-blocking.
    ///
    /// # Errors
    /// Outside of a tokio runtime, or when the socket cannot be watched.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let both = tokio::io::Interest::READABLE | tokio::io::Interest::WRITABLE;
        Ok(Self { socket: crate::sys::watch(socket, both)?, sending: tokio::sync::Mutex::new(()) })
    }

    /// Sends one frame whole.
    ///
    /// # Errors
    /// As sendmsg(2).
    pub(crate) async fn send(
        &self,
        message: &impl Serialize,
        tail: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let frame = encode(message, tail, fds.len())?;
        let _turn = self.sending.lock().await;
        let mut sent = 0;
        while sent < frame.len() {
            let mut ready = self.socket.writable().await?;
            let fds = if sent == 0 { fds } else { &[] };
            match ready.try_io(|s| send_some(s.as_fd(), &frame[sent..], fds)) {
                Ok(Ok(n)) => sent += n,
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(e)) => return Err(e),
                Err(_not_ready) => {}
            }
        }
        Ok(())
    }

    /// Waits for the next frame. `None`: closed.
    ///
    /// # Errors
    /// As recvmsg(2); `InvalidData` for a broken frame.
    pub(crate) async fn receive<T: DeserializeOwned>(
        &self,
        assembler: &mut Assembler,
    ) -> io::Result<Option<Frame<T>>> {
        loop {
            if let Some(frame) = assembler.next()? {
                return Ok(Some(frame));
            }
            let mut ready = self.socket.readable().await?;
            match ready.try_io(|s| assembler.receive(s.as_fd())) {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) => return Ok(None),
                Ok(Err(e)) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(e)) => return Err(e),
                Err(_not_ready) => {}
            }
        }
    }
}

/// A connected pair of stream sockets, close-on-exec.
///
/// # Errors
/// As socketpair(2).
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?)
}

/// How a command ended, as shim and serve exchange it.
pub(crate) fn ended(code: i32, started: std::time::Instant) -> CommandEnd {
    let duration_ms = i64::try_from(started.elapsed().as_millis()).unwrap_or(i64::MAX);
    CommandEnd { exit_code: Some(code), duration_ms, reason: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(bytes: &[u8], cap: usize) -> io::Result<usize> {
        let mut assembler = Assembler::new(cap);
        assembler.bytes.extend_from_slice(bytes);
        let mut frames = 0;
        while assembler.next::<FromInit>()?.is_some() {
            frames += 1;
        }
        Ok(frames)
    }

    proptest::proptest! {
        /// No bytes from init can make the shim panic.
        #[test]
        fn arbitrary_bytes_are_a_frame_or_an_error(bytes: Vec<u8>) {
            let _ = feed(&bytes, GUEST_CAP);
        }

        #[test]
        fn frames_arrive_whole_in_any_cut(cut in 1usize..40, count in 1usize..5) {
            let mut all = Vec::new();
            for _ in 0..count {
                let code = 7;
                let command = CommandId::new(1, [0; 10]);
                all.extend(encode(&FromInit::Exited { command, code }, b"tail", 0).unwrap());
            }
            let mut assembler = Assembler::new(GUEST_CAP);
            let mut got = 0;
            for chunk in all.chunks(cut) {
                assembler.bytes.extend_from_slice(chunk);
                while let Some(frame) = assembler.next::<FromInit>().unwrap() {
                    assert_eq!(frame.tail, b"tail");
                    got += 1;
                }
            }
            assert_eq!(got, count);
        }
    }

    #[test]
    fn a_frame_over_the_cap_is_refused_before_it_is_read() {
        let mut header = Vec::new();
        header.extend(u32::MAX.to_le_bytes());
        header.extend(u32::MAX.to_le_bytes());
        header.extend(0u32.to_le_bytes());
        assert!(feed(&header, GUEST_CAP).is_err());
    }

    #[test]
    fn descriptors_arrive_with_their_frame() {
        let (a, b) = pair().unwrap();
        let (pipe, _keep) = rustix::pipe::pipe().unwrap();
        send(&a, &FromInit::Ready, &[pipe.as_fd()]).unwrap();
        let mut assembler = Assembler::new(GUEST_CAP);
        let frame: Frame<FromInit> = receive(&b, &mut assembler).unwrap().unwrap();
        assert_eq!(frame.fds.len(), 1);
    }
}
