//! serve's connection to one shim: requests out, answers and changes in.
//!
//! Invariant: `gone` fires exactly when nothing can happen in the session any more: the shim said so,
//! or its connection broke. Called by the engine through [`Handle`].

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bivouac_types::command::{CommandEnd, EndReason, ExecFailure};
use bivouac_types::id::{CommandId, SessionId};
use bytes::Bytes;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::cgroup::SessionGroups;
use super::{doors, drives, swap, traffic};
use crate::pool::Pool;
use crate::proto::{
    Assembler, Channel, FileOp, FileReply, Frame, FromShim, ShimError, TRUSTED_CAP, ToShim,
};
use crate::{
    Completion, DialTo, DriveMount, ExecSpec, FileError, FileErrorKind, FileReader, FileWriter,
    Handle, ListenAt, Listener, Listening, Progress, RuntimeError, TtySize, Usage,
};

/// Unasked messages of the egress broker that wait for the engine; more are dropped.
const EGRESS_EVENTS: usize = 1024;
/// Longest result line of a file operation: it comes from inside the sandbox.
const MAX_REPLY: u64 = 64 << 10;
/// How long a request waits for a session that stands still: it is frozen for moments, or paused.
const FROZEN_PATIENCE: Duration = Duration::from_secs(30);
/// How often such a request looks.
const FROZEN_LOOK: Duration = Duration::from_secs(1);
/// How long a shim may take to hear that its session is to end.
const STOPPING_PATIENCE: Duration = Duration::from_secs(5);

/// A running session.
#[derive(Debug)]
pub(crate) struct LinuxHandle {
    session: SessionId,
    groups: SessionGroups,
    channel: Arc<Channel>,
    shared: Arc<Shared>,
    next: AtomicU64,
    pool: Arc<Pool>,
    /// What the shim understands.
    level: u32,
    /// Room for what goes in by TCP: see [`doors`].
    pub(super) dials: Semaphore,
    pub(super) children: Semaphore,
    /// Sockets inside that are the engine's own, by their inodes.
    own: Mutex<VecDeque<u64>>,
}

#[derive(Debug)]
struct Shared {
    waiting: Mutex<HashMap<u64, oneshot::Sender<Result<Answer, ShimError>>>>,
    commands: Mutex<HashMap<CommandId, Known>>,
    gone: watch::Sender<bool>,
    /// Taken by the first who asks.
    egress_events: Mutex<Option<mpsc::Receiver<Bytes>>>,
}

/// What the shim answered.
#[derive(Debug)]
enum Answer {
    /// To a request of its own.
    Number(u64),
    /// To a message for the egress broker. Not shown: see [`Shared`]'s users.
    Egress(Hidden),
}

/// Bytes that may hold secrets.
struct Hidden(Bytes);

impl std::fmt::Debug for Hidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// A command that the shim told of or was asked for.
#[derive(Debug)]
struct Known {
    progress: watch::Sender<Progress>,
    since: Instant,
}

impl Known {
    fn new(progress: Progress, since: Instant) -> Self {
        Self { progress: watch::Sender::new(progress), since }
    }

    /// The shim is gone: how an open command ended cannot be known any more.
    fn lose(&self) {
        self.progress.send_if_modified(|progress| {
            let open = progress.end.is_none();
            if open {
                let ran = self.since.elapsed().as_millis();
                progress.end = Some(CommandEnd {
                    exit_code: None,
                    duration_ms: i64::try_from(ran).unwrap_or(i64::MAX),
                    reason: Some(EndReason::Lost),
                });
            }
            open
        });
    }
}

/// What a shim says first on a connection.
#[derive(Debug)]
pub(crate) struct Greeting {
    commands: Vec<(CommandId, Progress)>,
    ages: BTreeMap<CommandId, u64>,
    level: u32,
}

impl Greeting {
    fn known(self) -> HashMap<CommandId, Known> {
        let now = Instant::now();
        let known = self.commands.into_iter().map(|(id, progress)| {
            let age = Duration::from_millis(self.ages.get(&id).copied().unwrap_or(0));
            let since = now.checked_sub(age).unwrap_or(now);
            (id, Known::new(progress, since))
        });
        known.collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing panics while it holds one of these; a poisoned map is still a map.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl LinuxHandle {
    /// Takes over a connection whose first frame was this greeting.
    pub(crate) fn new(
        session: SessionId,
        groups: SessionGroups,
        channel: Channel,
        assembler: Assembler,
        greeting: Greeting,
        pool: Arc<Pool>,
    ) -> Arc<Self> {
        let level = greeting.level;
        let channel = Arc::new(channel);
        let (events, taken) = mpsc::channel(EGRESS_EVENTS);
        let shared = Arc::new(Shared {
            waiting: Mutex::default(),
            commands: Mutex::new(greeting.known()),
            gone: watch::Sender::new(false),
            egress_events: Mutex::new(Some(taken)),
        });
        tokio::spawn(read(channel.clone(), shared.clone(), assembler, events));
        let next = AtomicU64::new(1);
        let (dials, children) = (Semaphore::new(doors::DIALS), Semaphore::new(doors::CHILDREN));
        let own = Mutex::default();
        let handle =
            Self { session, groups, channel, shared, next, pool, level, dials, children, own };
        Arc::new(handle)
    }

    pub(super) fn pool(&self) -> Arc<Pool> {
        self.pool.clone()
    }

    /// Refuses what the shim is too old for: it would end the session.
    pub(super) fn needs(&self, level: u32, what: &str) -> Result<(), RuntimeError> {
        if self.level >= level {
            return Ok(());
        }
        let message = format!(
            "this session was started by an earlier version of bivouac and cannot {what}: stop the \
             sandbox and start it again"
        );
        Err(FileError { kind: FileErrorKind::Invalid, message }.into())
    }

    pub(super) fn own(&self) -> std::sync::MutexGuard<'_, VecDeque<u64>> {
        lock(&self.own)
    }

    pub(super) fn is_gone(&self) -> bool {
        *self.shared.gone.borrow()
    }

    pub(super) fn gone_error(&self) -> RuntimeError {
        RuntimeError::Gone(self.session.clone())
    }

    /// Sends a frame that the shim does not answer itself.
    pub(super) async fn pass(
        &self,
        message: &ToShim,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), RuntimeError> {
        self.channel.send(message, &[], fds).await.map_err(|_| self.gone_error())
    }

    /// Waits for the inside, but not for ever for one that stands still.
    ///
    /// # Errors
    /// [`FileErrorKind::Busy`] when the session has been frozen all the time.
    pub(super) async fn unless_frozen<T>(
        &self,
        work: impl Future<Output = T>,
    ) -> Result<T, RuntimeError> {
        unless_frozen(&self.groups, work).await
    }

    /// Sends a request and waits for its answer.
    async fn ask(
        &self,
        tail: &[u8],
        message: impl FnOnce(u64) -> ToShim,
    ) -> Result<Result<u64, ShimError>, RuntimeError> {
        self.ask_with(tail, &[], message).await
    }

    async fn ask_with(
        &self,
        tail: &[u8],
        fds: &[BorrowedFd<'_>],
        message: impl FnOnce(u64) -> ToShim,
    ) -> Result<Result<u64, ShimError>, RuntimeError> {
        let answer = self.ask_any(tail, fds, message).await?;
        Ok(answer.map(|answer| match answer {
            Answer::Number(number) => number,
            Answer::Egress(_) => 0,
        }))
    }

    async fn ask_any(
        &self,
        tail: &[u8],
        fds: &[BorrowedFd<'_>],
        message: impl FnOnce(u64) -> ToShim,
    ) -> Result<Result<Answer, ShimError>, RuntimeError> {
        let request = self.next.fetch_add(1, Ordering::Relaxed);
        let (tell, told) = oneshot::channel();
        lock(&self.shared.waiting).insert(request, tell);
        // Looked at after the insert: the reader empties the map after it has set this.
        if *self.shared.gone.borrow() {
            lock(&self.shared.waiting).remove(&request);
            return Err(self.gone_error());
        }
        if self.channel.send(&message(request), tail, fds).await.is_err() {
            lock(&self.shared.waiting).remove(&request);
            return Err(self.gone_error());
        }
        told.await.map_err(|_| self.gone_error())
    }

    fn error(&self, command: &CommandId, error: ShimError) -> RuntimeError {
        match error {
            ShimError::Exec { failure, message } => RuntimeError::Exec { failure, message },
            ShimError::NoCommand => RuntimeError::NoCommand(command.clone()),
            ShimError::Stdin { kind, written, message } => {
                RuntimeError::Stdin { kind, written, message }
            }
            ShimError::NoTerminal => {
                let message = format!("command {command} has no terminal");
                FileError { kind: FileErrorKind::Invalid, message }.into()
            }
            ShimError::Gone => self.gone_error(),
            ShimError::Other(text) => RuntimeError::Io {
                what: format!("command {command}"),
                source: std::io::Error::other(text),
            },
        }
    }

    /// Starts a file operation: gives the sandbox one end of a data pipe and of a result socket.
    pub(super) async fn file(&self, op: FileOp, data: &OwnedFd) -> Result<Replies, RuntimeError> {
        let io = |e: std::io::Error| RuntimeError::Io { what: "file operation".into(), source: e };
        let (ours, theirs) = crate::proto::pair().map_err(io)?;
        let message = ToShim::File { op };
        let sent = self.channel.send(&message, &[], &[data.as_fd(), theirs.as_fd()]).await;
        sent.map_err(|_| self.gone_error())?;
        let stream = std::os::unix::net::UnixStream::from(ours);
        stream.set_nonblocking(true).map_err(io)?;
        let stream = tokio::net::UnixStream::from_std(stream).map_err(io)?;
        let reader = BufReader::new(stream);
        Ok(Replies { reader, session: self.session.clone(), groups: self.groups.clone() })
    }

    /// Starts a command: with the caller's standard input, output and error if there are any.
    async fn start(&self, spec: &ExecSpec, fds: &[BorrowedFd<'_>]) -> Result<(), RuntimeError> {
        let command = &spec.command;
        lock(&self.shared.commands)
            .insert(command.clone(), Known::new(Progress::default(), Instant::now()));
        let boxed = Box::new(spec.clone());
        let asked = self.ask_with(&[], fds, |request| ToShim::Exec { request, spec: boxed });
        let outcome = match self.unless_frozen(asked).await {
            Ok(Ok(Ok(_))) => return Ok(()),
            Ok(Ok(Err(ShimError::Exec { failure, message }))) => RuntimeError::Exec {
                failure,
                message: exec_message(spec, failure, cause(&message)),
            },
            Ok(Ok(Err(other))) => self.error(command, other),
            Ok(Err(e)) => e,
            Err(frozen) => {
                // Init has the request and would start it when it runs again: behind it comes its end.
                let (command, signal) = (command.clone(), libc::SIGKILL);
                let kill = ToShim::Signal { request: 0, command, signal };
                let _ = self.pass(&kill, &[]).await;
                frozen
            }
        };
        lock(&self.shared.commands).remove(command);
        Err(outcome)
    }
}

async fn unless_frozen<T>(
    groups: &SessionGroups,
    work: impl Future<Output = T>,
) -> Result<T, RuntimeError> {
    let mut work = std::pin::pin!(work);
    let mut still = Duration::ZERO;
    loop {
        if let Ok(done) = tokio::time::timeout(FROZEN_LOOK, &mut work).await {
            return Ok(done);
        }
        still = if groups.is_frozen() { still + FROZEN_LOOK } else { Duration::ZERO };
        if still >= FROZEN_PATIENCE {
            let message = "the sandbox is paused: resume it first".to_owned();
            return Err(FileError { kind: FileErrorKind::Busy, message }.into());
        }
    }
}

/// Result lines of one file operation.
#[derive(Debug)]
pub(super) struct Replies {
    reader: BufReader<tokio::net::UnixStream>,
    session: SessionId,
    groups: SessionGroups,
}

impl Replies {
    async fn next(&mut self) -> Result<FileReply, RuntimeError> {
        use tokio::io::AsyncReadExt;
        let mut line = Vec::new();
        let mut reader = (&mut self.reader).take(MAX_REPLY);
        let got = unless_frozen(&self.groups, reader.read_until(b'\n', &mut line)).await?;
        match got {
            Ok(n) if n > 0 && line.ends_with(b"\n") => serde_json::from_slice(&line)
                .map_err(|e| RuntimeError::Io { what: "file operation".into(), source: e.into() }),
            // Closed without a line: the process or the whole sandbox was killed.
            _ => Err(RuntimeError::Gone(self.session.clone())),
        }
    }

    pub(super) async fn done(mut self) -> Result<(), RuntimeError> {
        match self.next().await? {
            FileReply::Done => Ok(()),
            FileReply::Failed(error) => Err(error.into()),
            FileReply::Opened { .. } => Err(unexpected()),
        }
    }
}

fn unexpected() -> RuntimeError {
    FileError { kind: FileErrorKind::Other, message: "an unexpected answer".into() }.into()
}

/// Reads the shim's frames until it is gone.
async fn read(
    channel: Arc<Channel>,
    shared: Arc<Shared>,
    mut assembler: Assembler,
    events: mpsc::Sender<Bytes>,
) {
    let answer = |request: u64, answer: Result<Answer, ShimError>| {
        if let Some(waiting) = lock(&shared.waiting).remove(&request) {
            let _ = waiting.send(answer);
        }
    };
    while let Ok(Some(Frame { message, tail, .. })) = channel.receive(&mut assembler).await {
        match message {
            FromShim::Reply { request, result } => answer(request, result.map(Answer::Number)),
            FromShim::EgressReply { request } => {
                answer(request, Ok(Answer::Egress(Hidden(tail.into()))));
            }
            // An engine that does not listen must not stop the answers behind this.
            FromShim::Egress => drop(events.try_send(tail.into())),
            FromShim::Changed { command, progress } => {
                let ended = progress.end.is_some();
                let mut commands = lock(&shared.commands);
                if let Some(known) = commands.get(&command) {
                    known.progress.send_replace(progress);
                    // Those who follow hold a receiver; a late one reads the log.
                    if ended && commands.len() > 4096 {
                        commands.retain(|_, k| {
                            k.progress.borrow().end.is_none() || k.progress.receiver_count() > 0
                        });
                    }
                }
            }
            FromShim::Gone => break,
            FromShim::Hello { .. } | FromShim::Launched(_) => {}
        }
    }
    lock(&shared.commands).values().for_each(Known::lose);
    shared.gone.send_replace(true);
    lock(&shared.waiting).clear();
}

/// A sentence about a program that did not start.
fn exec_message(spec: &ExecSpec, failure: ExecFailure, cause: &str) -> String {
    let program = spec.argv.first().map(String::as_str).unwrap_or_default();
    match failure {
        ExecFailure::NotFound if program.contains(char::is_whitespace) => format!(
            "executable '{program}' not found: the command is run without a shell, so pass the \
             arguments separately or run it with sh -c"
        ),
        ExecFailure::NotFound => format!("executable '{program}' not found"),
        ExecFailure::NotExecutable => format!("'{program}' is not executable: {cause}"),
        ExecFailure::BadFormat => format!(
            "'{program}' is executable and has no format that the kernel runs: a script needs a \
             first line such as #!/bin/sh"
        ),
        ExecFailure::BadCwd => {
            format!("working directory '{}' cannot be entered: {cause}", spec.cwd)
        }
        ExecFailure::TooLong => "the arguments and the environment are too long together".into(),
        ExecFailure::ProcessLimit => {
            "the sandbox has reached its process limit: no further process can start".into()
        }
        ExecFailure::OutOfMemory => {
            "the sandbox has reached its memory limit: no further process can start".into()
        }
        ExecFailure::Other if spec.tty.is_some() && cause == no_terminal_left() => {
            "the sandbox has no terminal left: its programs have opened all that it may have".into()
        }
        ExecFailure::Other => format!("cannot run '{program}': {cause}"),
    }
}

#[async_trait]
impl Handle for LinuxHandle {
    fn session(&self) -> &SessionId {
        &self.session
    }

    async fn exec(&self, spec: &ExecSpec) -> Result<(), RuntimeError> {
        if spec.tty.is_some() {
            self.needs(2, "give a command a terminal")?;
        }
        self.start(spec, &[]).await
    }

    async fn exec_passed(&self, spec: &ExecSpec, stdio: [OwnedFd; 3]) -> Result<(), RuntimeError> {
        self.needs(2, "pass standard input and output on")?;
        let spec = ExecSpec { tty: None, attach_stdin: false, ..spec.clone() };
        for fd in &stdio {
            may_be_named(fd)?;
        }
        self.start(&spec, &stdio.each_ref().map(AsFd::as_fd)).await
    }

    async fn resize(&self, command: &CommandId, size: TtySize) -> Result<(), RuntimeError> {
        self.needs(2, "give a command a terminal")?;
        let message = |request| ToShim::Resize { request, command: command.clone(), size };
        let answer = self.ask(&[], message).await?;
        answer.map(drop).map_err(|e| self.error(command, e))
    }

    async fn dial(&self, to: &DialTo) -> Result<OwnedFd, RuntimeError> {
        self.dial_inside(to).await
    }

    async fn listen(&self, at: &ListenAt) -> Result<Listening, RuntimeError> {
        self.listen_inside(at).await
    }

    async fn listeners(&self) -> Result<Vec<Listener>, RuntimeError> {
        self.listeners_inside().await
    }

    async fn page_out(&self) -> Result<u64, RuntimeError> {
        let groups = self.groups.clone();
        let done = tokio::task::spawn_blocking(move || swap::page_out(&groups)).await;
        done.map_err(|e| RuntimeError::Io {
            what: format!("page out session {}", self.session),
            source: std::io::Error::other(e),
        })?
    }

    fn progress(&self, command: &CommandId) -> Option<watch::Receiver<Progress>> {
        lock(&self.shared.commands).get(command).map(|known| known.progress.subscribe())
    }

    async fn signal(&self, command: &CommandId, signal: i32) -> Result<(), RuntimeError> {
        let answer = self
            .ask(&[], |request| ToShim::Signal { request, command: command.clone(), signal })
            .await?;
        answer.map(|_| ()).map_err(|e| self.error(command, e))
    }

    async fn stdin(
        &self,
        command: &CommandId,
        offset: Option<u64>,
        data: Bytes,
        close: bool,
    ) -> Result<u64, RuntimeError> {
        let message = |request| ToShim::Stdin { request, command: command.clone(), offset, close };
        self.ask(&data, message).await?.map_err(|e| self.error(command, e))
    }

    async fn read_file(&self, path: &str) -> Result<FileReader, RuntimeError> {
        let (read, write) = pipe()?;
        let mut replies = self.file(FileOp::Read { path: path.to_owned() }, &write).await?;
        drop(write);
        match replies.next().await? {
            FileReply::Opened { size } => {
                let done = Completion::new(replies.done());
                Ok(FileReader { size, data: read, done })
            }
            FileReply::Failed(error) => Err(error.into()),
            FileReply::Done => Err(unexpected()),
        }
    }

    async fn write_files(&self, cwd: &str) -> Result<FileWriter, RuntimeError> {
        let (read, write) = pipe()?;
        let replies = self.file(FileOp::Write { cwd: cwd.to_owned() }, &read).await?;
        Ok(FileWriter { data: write, done: Completion::new(replies.done()) })
    }

    async fn mkdir(&self, path: &str, recursive: bool) -> Result<(), RuntimeError> {
        let (read, _write) = pipe()?;
        let op = FileOp::Mkdir { path: path.to_owned(), recursive };
        self.file(op, &read).await?.done().await
    }

    async fn attach_drive(&self, mount: &DriveMount, id_range: u32) -> Result<(), RuntimeError> {
        drives::attach(self, mount, id_range).await
    }

    async fn detach_drive(&self, mount: &DriveMount, force: bool) -> Result<(), RuntimeError> {
        drives::detach(self, mount, force).await
    }

    async fn freeze(&self) -> Result<(), RuntimeError> {
        self.blocking("freeze", |groups| groups.freeze(true)).await
    }

    async fn thaw(&self) -> Result<(), RuntimeError> {
        self.blocking("thaw", |groups| groups.freeze(false)).await
    }

    async fn kill(&self) -> Result<(), RuntimeError> {
        // The shim learns first that what ends now was stopped; without a shim nobody asks.
        // One that is held up is ended with its session.
        let stopping = self.ask(&[], |request| ToShim::Stopping { request });
        let _ = tokio::time::timeout(STOPPING_PATIENCE, stopping).await;
        self.blocking("kill", SessionGroups::kill).await?;
        let mut gone = self.shared.gone.subscribe();
        let limit = std::time::Duration::from_secs(15);
        // The shim writes the end records, then it goes.
        if tokio::time::timeout(limit, gone.wait_for(|gone| *gone)).await.is_err() {
            tracing::warn!(session = %self.session, "the shim did not end by itself");
            self.blocking("kill the shim", SessionGroups::remove_shim).await?;
        }
        Ok(())
    }

    async fn egress(&self, message: Bytes) -> Result<Bytes, RuntimeError> {
        let refused = |text: String| RuntimeError::Io {
            what: format!("egress broker of session {}", self.session),
            source: std::io::Error::other(text),
        };
        match self.ask_any(&message, &[], |request| ToShim::Egress { request }).await? {
            Ok(Answer::Egress(Hidden(reply))) => Ok(reply),
            Ok(Answer::Number(_)) => Err(refused("an unexpected answer".to_owned())),
            Err(ShimError::Gone) => Err(self.gone_error()),
            Err(ShimError::Other(text)) => Err(refused(text)),
            Err(_) => Err(refused("an unexpected refusal".to_owned())),
        }
    }

    fn egress_events(&self) -> mpsc::Receiver<Bytes> {
        lock(&self.shared.egress_events).take().unwrap_or_else(|| mpsc::channel(1).1)
    }

    async fn usage(&self) -> Result<Usage, RuntimeError> {
        let usage = self.groups.usage();
        let usage = usage.map_err(|e| RuntimeError::Io { what: "read usage".into(), source: e })?;
        let network = traffic::of_init(&self.groups.init_folder());
        Ok(Usage { network, ..usage })
    }

    fn gone(&self) -> watch::Receiver<bool> {
        self.shared.gone.subscribe()
    }
}

impl LinuxHandle {
    async fn blocking(
        &self,
        what: &str,
        work: impl FnOnce(&SessionGroups) -> std::io::Result<()> + Send + 'static,
    ) -> Result<(), RuntimeError> {
        let groups = self.groups.clone();
        let done = tokio::task::spawn_blocking(move || work(&groups)).await;
        let what = || format!("{what} session {}", self.session);
        match done {
            Ok(result) => result.map_err(|source| RuntimeError::Io { what: what(), source }),
            Err(e) => Err(RuntimeError::Io { what: what(), source: std::io::Error::other(e) }),
        }
    }
}

/// The kernel's word when it makes no more terminals.
fn no_terminal_left() -> String {
    cause(&std::io::Error::from_raw_os_error(libc::ENOSPC).to_string()).to_owned()
}

fn cause(message: &str) -> &str {
    message.split(" (os error").next().unwrap_or(message)
}

/// Lets a program open a pipe of the caller's by a name such as `/dev/stdin`: see the shim's own pipes.
fn may_be_named(fd: &OwnedFd) -> Result<(), RuntimeError> {
    let look = || -> std::io::Result<bool> {
        let kind = rustix::fs::FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode);
        if kind == rustix::fs::FileType::Fifo {
            rustix::fs::fchmod(fd, rustix::fs::Mode::from_raw_mode(0o666))?;
            return Ok(true);
        }
        Ok(kind == rustix::fs::FileType::Socket)
    };
    let io = |source| RuntimeError::Io { what: "pass standard input and output on".into(), source };
    match look().map_err(io)? {
        true => Ok(()),
        false => Err(io(std::io::Error::other("neither a pipe nor a socket"))),
    }
}

pub(super) fn pipe() -> Result<(OwnedFd, OwnedFd), RuntimeError> {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|e| RuntimeError::Io { what: "make a pipe".into(), source: e.into() })
}

/// Waits for a shim's `Hello` on a new connection.
pub(crate) async fn hello(
    channel: &Channel,
    assembler: &mut Assembler,
) -> std::io::Result<Greeting> {
    match channel.receive(assembler).await? {
        Some(Frame { message: FromShim::Hello { version, commands, ages, level }, .. })
            if version == crate::proto::VERSION =>
        {
            Ok(Greeting { commands, ages, level })
        }
        Some(_) => Err(std::io::Error::other("the shim speaks another version")),
        None => Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof)),
    }
}

/// An assembler for a shim's frames.
pub(crate) fn assembler() -> Assembler {
    Assembler::new(TRUSTED_CAP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_command_ran_for_as_long_as_it_did() {
        let (old, fresh) = (CommandId::new(1, [0; 10]), CommandId::new(2, [0; 10]));
        let commands =
            vec![(old.clone(), Progress::default()), (fresh.clone(), Progress::default())];
        let ages = BTreeMap::from([(old.clone(), 60_000)]);
        let known = Greeting { commands, ages, level: 0 }.known();
        known.values().for_each(Known::lose);
        let end = |id: &CommandId| known[id].progress.borrow().end.clone().unwrap();
        assert_eq!(end(&old).exit_code, None);
        assert_eq!(end(&old).reason, Some(EndReason::Lost));
        assert!(end(&old).duration_ms >= 60_000, "{:?}", end(&old));
        assert!(end(&fresh).duration_ms < 60_000, "{:?}", end(&fresh));
    }
}
