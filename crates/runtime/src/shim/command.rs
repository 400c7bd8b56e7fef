//! One command in the shim: its log, its standard input, its end.
//!
//! Invariant: what the program wrote before it ended is in the log before the end record, in the order
//! in which it was read; what background children write later is read and dropped, so that they are
//! never stopped by a full or closed pipe. Pipes are the shim's own, a terminal comes from init
//! ([`super::terminal`]), and what serve passes on is none of the shim's business but for its end. Owned by
//! the shim's loop.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bivouac_types::command::{ExecFailure, Stream};
use bivouac_types::id::CommandId;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::unix::pipe;
use tokio::sync::{Mutex, oneshot, watch};

use super::Shim;
use super::journal::{About, Level};
use super::terminal::Master;
use crate::log::ring::RingLog;
use crate::log::{LogWriter, MAX_PAYLOAD};
use crate::proto::{self, ShimError, ToInit};
use crate::{ExecSpec, Progress, StdinErrorKind, TTY_LOG, TtySize, sys};

/// How long a program may leave its standard input unread.
const STDIN_PATIENCE: Duration = Duration::from_secs(30);

/// What is kept of a terminal where the session's log space is used up: it must not end.
const SMALL_TTY_LOG: u64 = 64 << 10;

/// How a start came out, from init.
pub(super) type Outcome = Result<Option<Master>, (ExecFailure, i32)>;

/// Where output goes.
enum Log {
    /// All of it, up to the session's limit.
    Whole(LogWriter),
    /// A terminal's: its end. So much log space is taken for it.
    Latest(RingLog, u64),
}

/// A command and everything that is kept for it.
pub(super) struct Running {
    id: CommandId,
    log: RefCell<Option<Log>>,
    progress: RefCell<Progress>,
    started_at: Instant,
    outcome: RefCell<Option<oneshot::Sender<Outcome>>>,
    /// Exit code, once the process is gone.
    exit: watch::Sender<Option<i32>>,
    /// The end record is written, or there never will be one.
    ended: watch::Sender<bool>,
    timed_out: Cell<bool>,
    counters: (u64, u64),
    /// Id of the request that started it.
    request: Option<String>,
    stdin: Mutex<Stdin>,
    /// It has a terminal; which, once init has told, until its end.
    on_terminal: bool,
    terminal: RefCell<Option<Master>>,
}

enum Stdin {
    NotAttached,
    Open { pipe: Input, received: u64 },
    Closed { received: u64 },
}

/// What takes standard input.
enum Input {
    Pipe(pipe::Sender),
    Terminal(Master),
}

impl Input {
    async fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Pipe(pipe) => pipe.write(bytes).await,
            Self::Terminal(master) => master.write(bytes).await,
        }
    }
}

impl Running {
    /// Whether it is to have a terminal, and init has not told yet.
    pub(super) fn awaits_terminal(&self) -> bool {
        self.on_terminal && self.outcome.borrow().is_some()
    }

    /// Turns into its exit code, once the process is gone.
    pub(super) fn subscribe_exit(&self) -> watch::Receiver<Option<i32>> {
        self.exit.subscribe()
    }

    /// Tells its terminal's size.
    ///
    /// # Errors
    /// [`ShimError::NoTerminal`]. One that has ended needs no size any more.
    pub(super) fn resize(&self, size: TtySize) -> Result<u64, ShimError> {
        match &*self.terminal.borrow() {
            Some(master) => {
                master.resize(size).map(|()| 0).map_err(|e| ShimError::Other(e.to_string()))
            }
            None if self.on_terminal => Ok(0),
            None => Err(ShimError::NoTerminal),
        }
    }

    /// Init told how the start came out.
    pub(super) fn started(&self, outcome: Outcome) {
        if let Some(waiting) = self.outcome.borrow_mut().take() {
            let _ = waiting.send(outcome);
        }
    }

    /// Init told that the process is gone.
    pub(super) fn exited(&self, code: i32) {
        self.exit.send_if_modified(|exit| {
            let first = exit.is_none();
            exit.get_or_insert(code);
            first
        });
    }

    pub(super) fn progress(&self) -> Progress {
        self.progress.borrow().clone()
    }

    /// Waits for the end record.
    pub(super) async fn wait_end(&self) {
        let mut ended = self.ended.subscribe();
        let _ = ended.wait_for(|ended| *ended).await;
    }

    /// Writes standard input from `offset`; answers how many bytes were received since the start:
    /// clients take it as their next offset.
    pub(super) async fn write_stdin(
        &self,
        offset: Option<u64>,
        data: &[u8],
        close: bool,
    ) -> Result<u64, ShimError> {
        let refuse = |kind, written, message: &str| ShimError::Stdin {
            kind,
            written,
            message: message.to_owned(),
        };
        let mut stdin = self.stdin.lock().await;
        let mut received = match &*stdin {
            Stdin::NotAttached => {
                let text = "the command was not started with its standard input attached";
                return Err(refuse(StdinErrorKind::NotAttached, 0, text));
            }
            Stdin::Open { received, .. } | Stdin::Closed { received } => *received,
        };
        let offset = offset.unwrap_or(received);
        if offset > received {
            let text = format!("offset {offset} is beyond the {received} bytes received so far");
            return Err(refuse(StdinErrorKind::Gap, received, &text));
        }
        let known = usize::try_from(received - offset).unwrap_or(usize::MAX).min(data.len());
        if self.progress.borrow().end.is_some() {
            return Err(refuse(StdinErrorKind::Closed, received, "the command has ended"));
        }
        let mut rest = &data[known..];
        let mut failed = None;
        match &mut *stdin {
            Stdin::Open { pipe, received: total } => {
                while !rest.is_empty() {
                    match tokio::time::timeout(STDIN_PATIENCE, pipe.write(rest)).await {
                        Ok(Ok(n)) => {
                            received += n as u64;
                            *total = received;
                            rest = &rest[n..];
                        }
                        Ok(Err(_)) => {
                            failed = Some((StdinErrorKind::Closed, "the command closed its input"));
                            break;
                        }
                        Err(_) => {
                            let text = "the command has not read its input for 30 s";
                            failed = Some((StdinErrorKind::Stuck, text));
                            break;
                        }
                    }
                }
            }
            Stdin::Closed { .. } if !rest.is_empty() => {
                failed = Some((StdinErrorKind::Closed, "the command's input was closed before"));
            }
            _ => {}
        }
        if let Some((kind, text)) = failed {
            return Err(refuse(kind, received, text));
        }
        // A terminal's input has no end of its own: who wants to say so types it.
        if close && matches!(&*stdin, Stdin::Open { pipe: Input::Pipe(_), .. }) {
            *stdin = Stdin::Closed { received };
        }
        Ok(received)
    }

    /// Appends output.
    pub(super) fn output(&self, shim: &Shim, stream: Stream, bytes: &[u8]) {
        let mut progress = self.progress.borrow_mut();
        match self.log.borrow_mut().as_mut() {
            // A log that cannot even take its mark has lost output: the end record still follows,
            // and the reader sees the gap in the sequence.
            Some(Log::Whole(log)) => {
                if let Ok(used) = log.data(stream, bytes, shim.log_room()) {
                    shim.use_log(used);
                }
                progress.log_bytes = log.len();
            }
            Some(Log::Latest(log, _)) => {
                log.data(bytes);
                (progress.log_start, progress.log_bytes) = (log.start(), log.len());
            }
            None => {}
        }
        drop(progress);
        shim.changed(&self.id);
    }

    fn end(&self, shim: &Shim, code: i32) {
        let mut end = proto::ended(code, self.started_at);
        end.reason = shim.reason(self.counters, code, self.timed_out.get());
        let took_us = u64::try_from(end.duration_ms).ok().map(|ms| ms * 1000);
        let mut progress = self.progress.borrow_mut();
        match self.log.borrow_mut().take() {
            Some(Log::Whole(mut log)) => {
                let _ = log.end(&end);
                progress.log_bytes = log.len();
            }
            Some(Log::Latest(mut log, taken)) => {
                let _ = log.end(&end);
                progress.log_bytes = log.len();
                shim.give_log(taken.saturating_sub(log.kept()));
            }
            None => {}
        }
        self.terminal.take();
        progress.end = Some(end);
        drop(progress);
        shim.changed(&self.id);
        shim.remember(&self.id);
        self.ended.send_replace(true);
        let about = About { code: Some(code), took_us, ..self.about() };
        shim.journal.say(Level::Debug, "command ended", about);
    }

    /// Waits for the process's end and writes it down.
    async fn wait_and_end(&self, shim: &Shim) {
        let mut exit = self.exit.subscribe();
        let code = exit.wait_for(Option::is_some).await.map_or(-1, |c| c.unwrap_or(-1));
        self.end(shim, code);
    }

    /// Nobody may read standard input any more.
    async fn close_stdin(&self) {
        let mut stdin = self.stdin.lock().await;
        if let Stdin::Open { received, .. } = &*stdin {
            let received = *received;
            *stdin = Stdin::Closed { received };
        }
    }

    fn about(&self) -> About<'_> {
        About { request: self.request.as_deref(), command: Some(&self.id), ..About::default() }
    }

    /// Since when it runs, ms.
    pub(super) fn age_ms(&self) -> u64 {
        u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Shim {
    /// Sends the command to init. The future that it answers waits for init's word.
    ///
    /// # Errors
    /// When the log or the pipes cannot be made, or init is gone.
    pub(super) async fn start(
        self: Rc<Self>,
        mut spec: ExecSpec,
        passed: Vec<OwnedFd>,
    ) -> Result<impl Future<Output = Result<u64, ShimError>>, ShimError> {
        let other = |e: io::Error| ShimError::Other(e.to_string());
        let id = spec.command.clone();
        if self.find(&id).is_some() {
            return Err(ShimError::Other(format!("command {id} exists already")));
        }
        let (ends, pipes) = match (spec.tty, passed.is_empty()) {
            (Some(_), true) => (Vec::new(), None),
            (None, false) => (passed, None),
            (None, true) => {
                let (ends, pipes) = Pipes::new(spec.attach_stdin).map_err(other)?;
                (ends, Some(pipes))
            }
            (Some(_), false) => {
                let text = "a terminal has no standard input of the caller's";
                return Err(ShimError::Other(text.to_owned()));
            }
        };
        let log = self.begin_log(&spec).map_err(other)?;
        let (stdin, outputs) = match pipes {
            None => (None, None),
            Some(Pipes { stdin, stdout, stderr }) => (stdin, Some([stdout, stderr])),
        };
        let (told, outcome) = oneshot::channel();
        let running = Rc::new(Running {
            id: id.clone(),
            log: RefCell::new(Some(log)),
            progress: RefCell::default(),
            started_at: Instant::now(),
            outcome: RefCell::new(Some(told)),
            exit: watch::Sender::new(None),
            ended: watch::Sender::new(false),
            timed_out: Cell::new(false),
            counters: self.counters(),
            // Not the sandbox's business.
            request: spec.request.take(),
            stdin: Mutex::new(match stdin {
                None => Stdin::NotAttached,
                Some(pipe) => Stdin::Open { pipe: Input::Pipe(pipe), received: 0 },
            }),
            on_terminal: spec.tty.is_some(),
            terminal: RefCell::default(),
        });
        self.commands.borrow_mut().insert(id.clone(), running.clone());
        let timeout = spec.timeout_ms.map(Duration::from_millis);
        let fds: Vec<_> = ends.iter().map(AsFd::as_fd).collect();
        let sent = self.tell_init(&ToInit::Exec(Box::new(spec)), &fds).await;
        if let Err(e) = sent {
            self.forget(&running);
            return Err(e);
        }
        drop(ends);
        Ok(async move {
            match outcome.await {
                Ok(Ok(terminal)) => {
                    self.journal.say(Level::Debug, "command started", running.about());
                    if let Some(master) = &terminal {
                        let pipe = Input::Terminal(master.clone());
                        *running.stdin.lock().await = Stdin::Open { pipe, received: 0 };
                        running.terminal.replace(Some(master.clone()));
                    }
                    self.keep_time(&running, timeout);
                    match (terminal, outputs) {
                        (Some(master), _) => self.supervise_terminal(running, master),
                        (None, Some(outputs)) => self.supervise(running, outputs),
                        (None, None) => self.supervise_passed(running),
                    }
                    Ok(0)
                }
                Ok(Err((failure, errno))) => {
                    self.forget(&running);
                    let message = io::Error::from_raw_os_error(errno).to_string();
                    Err(ShimError::Exec { failure, message })
                }
                Err(_) => {
                    self.forget(&running);
                    Err(ShimError::Gone)
                }
            }
        })
    }

    /// The command never ran: nothing of it stays, and nobody need wait for its end.
    fn forget(&self, running: &Running) {
        self.commands.borrow_mut().remove(&running.id);
        if let Some(Log::Latest(_, taken)) = running.log.borrow_mut().take() {
            self.give_log(taken);
        }
        self.remove_log(&running.id);
        running.ended.send_replace(true);
    }

    /// Makes the command's log.
    fn begin_log(&self, spec: &ExecSpec) -> io::Result<Log> {
        if spec.tty.is_none() {
            return Ok(Log::Whole(LogWriter::new(self.create_log(&spec.command)?)));
        }
        let room = self.log_room();
        let each = if room >= 2 * TTY_LOG { TTY_LOG } else { SMALL_TTY_LOG };
        let log = RingLog::create(self.logs.try_clone()?, &spec.command, each)?;
        let taken = room.min(2 * each);
        self.use_log(taken);
        Ok(Log::Latest(log, taken))
    }

    /// Keeps the time limit.
    fn keep_time(self: &Rc<Self>, running: &Rc<Running>, timeout: Option<Duration>) {
        if let Some(limit) = timeout {
            let (shim, running) = (self.clone(), running.clone());
            tokio::task::spawn_local(async move {
                let mut exit = running.exit.subscribe();
                let exited = exit.wait_for(Option::is_some);
                if tokio::time::timeout(limit, exited).await.is_err() {
                    running.timed_out.set(true);
                    let kill = ToInit::KillTree { command: running.id.clone() };
                    let _ = shim.tell_init(&kill, &[]).await;
                }
            });
        }
    }

    /// Reads the outputs, waits for the end.
    fn supervise(self: Rc<Self>, running: Rc<Running>, outputs: [OwnedFd; 2]) {
        let [stdout, stderr] = outputs;
        tokio::task::spawn_local(async move {
            let pumps = (
                pump(&self, &running, Stream::Stdout, stdout),
                pump(&self, &running, Stream::Stderr, stderr),
            );
            let (out, err) = tokio::join!(pumps.0, pumps.1);
            running.wait_and_end(&self).await;
            for rest in [out, err].into_iter().flatten() {
                tokio::task::spawn_local(drain(rest));
            }
            running.close_stdin().await;
        });
    }

    /// The same of a terminal.
    fn supervise_terminal(self: Rc<Self>, running: Rc<Running>, master: Master) {
        tokio::task::spawn_local(async move {
            let others = master.pump(&self, &running).await;
            running.wait_and_end(&self).await;
            if others {
                tokio::task::spawn_local(master.drain());
            }
            running.close_stdin().await;
        });
    }

    /// The same where the caller has the other ends.
    fn supervise_passed(self: Rc<Self>, running: Rc<Running>) {
        tokio::task::spawn_local(async move { running.wait_and_end(&self).await });
    }
}

/// Reads one output into the log until its end, or until the process is gone and the pipe is empty.
/// Answers the pipe when others still hold its other end.
async fn pump(
    shim: &Rc<Shim>,
    running: &Rc<Running>,
    stream: Stream,
    pipe: OwnedFd,
) -> Option<AsyncFd<OwnedFd>> {
    let pipe = sys::watch(pipe, Interest::READABLE).ok()?;
    let mut exit = running.exit.subscribe();
    let mut buffer = vec![0u8; MAX_PAYLOAD];
    // Bytes that were in the pipe when the process was gone: all that it can have written. A
    // background child may go on writing for ever.
    let mut rest: Option<usize> = None;
    loop {
        if rest.is_none() {
            tokio::select! {
                ready = pipe.readable() => { ready.ok()?.retain_ready(); }
                _ = exit.wait_for(Option::is_some) => {}
            }
            if exit.borrow().is_some() {
                rest = Some(sys::pending_bytes(pipe.get_ref().as_fd()).unwrap_or(0));
            }
        }
        let want = rest.map_or(buffer.len(), |rest| rest.min(buffer.len()));
        if want == 0 {
            return Some(pipe);
        }
        match rustix::io::read(pipe.get_ref(), &mut buffer[..want]) {
            Ok(0) => return None,
            Ok(n) => {
                running.output(shim, stream, &buffer[..n]);
                rest = rest.map(|rest| rest - n);
                // Other commands and requests get their turn.
                tokio::task::yield_now().await;
            }
            Err(rustix::io::Errno::AGAIN) if rest.is_some() => return Some(pipe),
            Err(rustix::io::Errno::AGAIN) => clear_ready(&pipe),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// Tells tokio that the pipe is empty, after a read that said so.
fn clear_ready(pipe: &AsyncFd<OwnedFd>) {
    use std::task::{Context, Poll, Waker};
    let mut context = Context::from_waker(Waker::noop());
    if let Poll::Ready(Ok(mut guard)) = pipe.poll_read_ready(&mut context) {
        guard.clear_ready();
    }
}

/// Keeps a pipe open and empty for the background children that write to it.
async fn drain(pipe: AsyncFd<OwnedFd>) {
    let mut buffer = vec![0u8; 16 << 10];
    while let Ok(mut ready) = pipe.readable().await {
        match ready.try_io(|pipe| Ok(rustix::io::read(pipe.get_ref(), &mut buffer)?)) {
            Ok(Ok(0)) => return,
            Ok(Err(e)) if e.kind() != io::ErrorKind::Interrupted => return,
            _ => {}
        }
    }
}

/// The shim's ends of a command's pipes.
struct Pipes {
    stdin: Option<pipe::Sender>,
    stdout: OwnedFd,
    stderr: OwnedFd,
}

/// A pipe that a program may open again by its name, as `/dev/stdout` or `/dev/stdin`: it belongs to
/// the shim's id, and only who holds it can name it.
fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    rustix::fs::fchmod(&read, rustix::fs::Mode::from_raw_mode(0o666))?;
    Ok((read, write))
}

impl Pipes {
    /// Makes them; answers the program's ends as well: standard input, output and error.
    fn new(attach_stdin: bool) -> io::Result<(Vec<OwnedFd>, Self)> {
        let output = || -> io::Result<(OwnedFd, OwnedFd)> {
            let (read, write) = pipe()?;
            rustix::io::ioctl_fionbio(&read, true)?;
            Ok((read, write))
        };
        let (input, stdin) = if attach_stdin {
            let (read, write) = pipe()?;
            rustix::io::ioctl_fionbio(&write, true)?;
            (read, Some(pipe::Sender::from_owned_fd(write)?))
        } else {
            // An empty pipe rather than /dev/null: the host's device would be the wrong one.
            (pipe()?.0, None)
        };
        let ((stdout, out), (stderr, err)) = (output()?, output()?);
        Ok((vec![input, out, err], Self { stdin, stdout, stderr }))
    }
}
