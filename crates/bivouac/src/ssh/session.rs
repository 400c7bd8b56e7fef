//! One session channel: a shell, a command or SFTP in a sandbox.
//!
//! Invariants: with a terminal it is a terminal of the engine, which others can see and, when it has a name, attach
//! to; without one the program has pipes that lead straight here, so nothing is kept and output waits for the
//! client; how it ended is told after its last byte; a command whose client has gone is hung up. Started by
//! `handler`.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bivouac_engine::{Attached, Error, ErrorKind, NewTerminal, Passed, TerminalInput};
use bivouac_types::command::{Command, CommandEnd, CommandSpec, EndReason};
use bivouac_types::id::{CommandId, SessionId};
use bivouac_types::terminal::{TtySize, check_terminal_name};
use bytes::Bytes;
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::sync::{mpsc, watch};

use super::agent::Agent;
use super::connection::{Shared, User};
use super::pump::{Line, Output};

/// Names a terminal that is attached to, or opened if it does not run.
pub(super) const TERMINAL: &str = "BIVOUAC_TERMINAL";
/// Output that somebody who attaches sees of before, bytes.
const SCROLLBACK: u64 = 64 << 10;
/// Exit status of what could not be done, as OpenSSH's own.
const FAILED: u32 = 255;
/// What is typed to end input at a terminal.
const END_OF_INPUT: &[u8] = b"\x04";
/// How often it is typed again.
const END_AGAIN: std::time::Duration = std::time::Duration::from_millis(500);
const HANG_UP: i32 = 1;
/// Becomes the user's shell, which is bash where there is one.
const LOGIN_SHELL: &str =
    "SHELL=$(command -v bash || command -v sh) && export SHELL && exec \"$SHELL\" -l";
/// The same with a command of the client's.
const BY_SHELL: &str =
    "SHELL=$(command -v bash || command -v sh) && export SHELL && exec \"$SHELL\" -c \"$1\"";

/// What the client wants on the channel.
#[derive(Debug)]
pub(super) enum What {
    Shell,
    Command(String),
    Sftp,
}

impl What {
    fn word(&self) -> &'static str {
        match self {
            Self::Shell => "shell",
            Self::Command(_) => "exec",
            Self::Sftp => "sftp",
        }
    }

    /// What `sh` is told, to become the user's shell.
    fn args(&self) -> Vec<String> {
        let args: &[&str] = match self {
            Self::Command(text) => &["-c", BY_SHELL, "sh", text],
            _ => &["-c", LOGIN_SHELL],
        };
        args.iter().map(|arg| (*arg).to_owned()).collect()
    }
}

/// A channel whose client has said all that it wants.
pub(super) struct Start {
    pub(super) shared: Arc<Shared>,
    pub(super) user: User,
    pub(super) line: Line,
    pub(super) what: What,
    pub(super) env: BTreeMap<String, String>,
    /// It has a terminal.
    pub(super) pty: bool,
    pub(super) size: watch::Receiver<TtySize>,
    pub(super) signals: mpsc::Receiver<i32>,
    /// The client's agent is to be reachable.
    pub(super) agent: bool,
    /// Something to be told first.
    pub(super) notice: Option<String>,
}

/// Why there is no exit status.
enum Failed {
    /// The client has gone.
    Gone,
    /// To be told to it.
    Said(String),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Said(error.message)
    }
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        tracing::warn!(%error, "a channel of SSH could not be set up");
        Self::Said("the engine could not set the channel up; its log tells why".to_owned())
    }
}

impl From<super::pump::Closed> for Failed {
    fn from(_: super::pump::Closed) -> Self {
        Self::Gone
    }
}

impl Start {
    /// Does what the client wants, and closes the channel.
    pub(super) async fn run(mut self) {
        if let Some(notice) = self.notice.take() {
            self.say(&notice).await;
        }
        let agent = match self.forward_agent().await {
            Ok(agent) => agent,
            Err(error) => {
                self.say(&format!("agent forwarding failed: {}", error.message)).await;
                None
            }
        };
        if let Some(agent) = &agent {
            self.env.insert("SSH_AUTH_SOCK".to_owned(), agent.path().to_owned());
        }
        let outcome = match (&self.what, self.pty) {
            (What::Sftp, _) => self.sftp().await,
            (_, true) => self.terminal().await,
            (_, false) => self.command().await,
        };
        drop(agent);
        match outcome {
            Ok(status) => self.line.exit(status).await,
            Err(Failed::Gone) => {}
            Err(Failed::Said(text)) => {
                self.say(&text).await;
                self.line.exit(FAILED).await;
            }
        }
    }

    /// Tells the user something, as programs do.
    async fn say(&self, text: &str) {
        let end = if self.pty { "\r\n" } else { "\n" };
        let text = format!("bivouac: {text}{end}");
        let _ = self.line.send(Output::Error, Bytes::from(text)).await;
    }

    fn note(&self, outcome: u16) {
        self.shared.note(&self.user, self.what.word(), outcome);
    }

    /// Notes how something came out, and answers it.
    fn noted<T>(&self, done: Result<T, Error>) -> Result<T, Error> {
        self.note(done.as_ref().map_or_else(super::connection::status, |_| 200));
        done
    }

    async fn forward_agent(&self) -> Result<Option<Agent>, Error> {
        if !self.agent {
            return Ok(None);
        }
        Agent::open(&self.shared, &self.user).await.map(Some)
    }

    async fn sftp(&self) -> Result<u32, Failed> {
        let User { who, ns, sandbox, root } = &self.user;
        let started = self.shared.engine().sftp(who, ns, sandbox, *root).await;
        let (socket, hold) = self.noted(started)?;
        let socket = std::os::unix::net::UnixStream::from(socket);
        socket.set_nonblocking(true)?;
        let (from, to) = UnixStream::from_std(socket)?.into_split();
        let out = self.line.send_all(Output::Plain, from);
        tokio::pin!(out);
        let taken = self.line.take_all(to);
        tokio::pin!(taken);
        // The server ends when its client has nothing more to ask; the other way round there is nothing to wait for.
        tokio::select! {
            sent = &mut out => sent?,
            () = &mut taken => out.await?,
        }
        drop(hold);
        Ok(0)
    }

    /// Without a terminal.
    async fn command(&mut self) -> Result<u32, Failed> {
        let User { who, ns, sandbox, root } = self.user.clone();
        let spec = CommandSpec {
            program: "sh".to_owned(),
            args: self.what.args(),
            cwd: None,
            env: self.env.clone(),
            sudo: root,
            timeout_ms: None,
            attach_stdin: false,
            tty: None,
            terminal: None,
        };
        let (near, far) = Pipes::new()?;
        let engine = Arc::clone(self.shared.engine());
        let started = engine.exec_passed(&who, &ns, &sandbox, spec, far).await;
        let Passed { command, hold, .. } = self.noted(started)?;
        let (line, signals) = (&self.line, &mut self.signals);
        let work = async {
            let out = line.send_all(Output::Plain, near.stdout);
            let err = line.send_all(Output::Error, near.stderr);
            let (out, err) = tokio::join!(out, err);
            out.and(err)?;
            Ok::<Command, Failed>(
                engine.wait_command(&who, &ns.team, &command.session_id, &command.id).await?,
            )
        };
        let taken = async {
            line.take_all(near.stdin).await;
            std::future::pending::<()>().await;
        };
        let signalled = async {
            while let Some(signal) = signals.recv().await {
                let sent =
                    engine.kill_command(&who, &ns.team, &command.session_id, &command.id, signal);
                let _ = sent.await;
            }
            std::future::pending::<()>().await;
        };
        let done = tokio::select! {
            done = work => done,
            () = taken => Err(Failed::Gone),
            () = signalled => Err(Failed::Gone),
            () = line.feed.closed() => Err(Failed::Gone),
        };
        if let Err(Failed::Gone) = done {
            self.shared.hang_up(&self.user, command.session_id.clone(), command.id.clone());
        }
        drop(hold);
        status(done?.end)
    }

    /// With a terminal.
    async fn terminal(&mut self) -> Result<u32, Failed> {
        let sat = self.sit_down().await;
        let mut attached = self.noted(sat)?;
        let input = attached.input();
        let terminal = attached.terminal();
        let (session, command) = (terminal.session.clone(), terminal.command.id.clone());
        let line = &self.line;
        let shown = async {
            loop {
                match attached.next().await {
                    Some(Ok(bivouac_engine::Output::Data { bytes, .. })) => {
                        line.send(Output::Plain, bytes).await?;
                    }
                    Some(Ok(bivouac_engine::Output::Cut)) => {}
                    Some(Ok(bivouac_engine::Output::End(ended))) => return status(ended.end),
                    Some(Err(error)) => return Err(error.into()),
                    None => return Err(Failed::Said("the terminal is gone".to_owned())),
                }
            }
        };
        let (size, signals) = (&mut self.size, &mut self.signals);
        // One with a name goes on without its client.
        let ends = self.env.get(TERMINAL).is_none_or(String::is_empty);
        let typed = typed(line, &input, ends);
        let told = steer(&self.shared, &self.user, (&session, &command), &input, size, signals);
        tokio::select! {
            done = shown => done,
            () = typed => Err(Failed::Gone),
            () = told => Err(Failed::Gone),
            () = line.feed.closed() => Err(Failed::Gone),
        }
    }

    /// Attaches to the terminal that the client names, or opens one.
    async fn sit_down(&self) -> Result<Attached, Error> {
        let User { who, ns, sandbox, root } = self.user.clone();
        let engine = Arc::clone(self.shared.engine());
        let mut env = self.env.clone();
        let name = env.remove(TERMINAL).filter(|name| !name.is_empty());
        let size = *self.size.borrow();
        if let Some(name) = &name {
            check_terminal_name(name)
                .map_err(|error| Error::invalid(format!("Invalid {TERMINAL}: {error}")))?;
            match engine.attach_terminal(&who, &ns, &sandbox, name, SCROLLBACK).await {
                Ok(attached) => {
                    attached.input().resize(size).await?;
                    return Ok(attached);
                }
                Err(error) if error.kind == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        // Without a program it is the user's own shell.
        let (program, args) = match &self.what {
            What::Command(_) => ("sh".to_owned(), self.what.args()),
            _ => (String::new(), Vec::new()),
        };
        let new = NewTerminal { name, program, args, cwd: None, env, sudo: root, size };
        let opened = engine.open_terminal(&who, &ns, &sandbox, new).await?;
        engine.attach_opened(&who, &ns.team, &opened).await
    }
}

/// Hands on what is typed, and its end if that is to be. Never answers: the terminal's own end does.
async fn typed(line: &Line, input: &TerminalInput, ends: bool) {
    let given = async {
        while let Some(data) = line.feed.next().await {
            input.write(data).await?;
        }
        if !ends {
            return Ok::<(), Error>(());
        }
        // There is no end of a terminal's input; this is how one is typed. A program that changes the terminal's mode
        // in that moment never sees it, and of several each wants its own: so it is typed until the terminal ends.
        loop {
            input.write(Bytes::from_static(END_OF_INPUT)).await?;
            tokio::time::sleep(END_AGAIN).await;
        }
    };
    if let Err(error) = given.await {
        tracing::debug!(%error, "what was typed did not arrive");
        line.feed.discard().await;
    }
    std::future::pending().await
}

/// Hands on sizes and signals. Never answers.
async fn steer(
    shared: &Shared,
    user: &User,
    (session, command): (&SessionId, &CommandId),
    input: &TerminalInput,
    size: &mut watch::Receiver<TtySize>,
    signals: &mut mpsc::Receiver<i32>,
) {
    loop {
        tokio::select! {
            changed = size.changed() => {
                if changed.is_err() {
                    return std::future::pending().await;
                }
                let now = *size.borrow_and_update();
                let _ = input.resize(now).await;
            }
            signal = signals.recv() => {
                let Some(signal) = signal else { return std::future::pending().await };
                let team = &user.ns.team;
                let _ = shared.engine().kill_command(&user.who, team, session, command, signal).await;
            }
        }
    }
}

/// What SSH is told of how a command ended.
fn status(end: Option<CommandEnd>) -> Result<u32, Failed> {
    let reason = end.as_ref().and_then(|end| end.reason);
    if let Some(code) = end.and_then(|end| end.exit_code) {
        return Ok(u32::try_from(code).unwrap_or(FAILED));
    }
    Err(Failed::Said(match reason {
        Some(EndReason::SandboxStopped) => "the sandbox was stopped".to_owned(),
        _ => "the sandbox was lost, and with it how the command ended".to_owned(),
    }))
}

/// Our ends of a command's standard input, output and error.
struct Pipes {
    stdin: pipe::Sender,
    stdout: pipe::Receiver,
    stderr: pipe::Receiver,
}

impl Pipes {
    /// Ours, and the command's.
    fn new() -> io::Result<(Self, [OwnedFd; 3])> {
        let make = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC);
        let ((stdin, to), (out, stdout), (err, stderr)) = (make()?, make()?, make()?);
        let near = Self {
            stdin: pipe::Sender::from_owned_fd(to)?,
            stdout: pipe::Receiver::from_owned_fd(out)?,
            stderr: pipe::Receiver::from_owned_fd(err)?,
        };
        Ok((near, [stdin, stdout, stderr]))
    }
}

impl Shared {
    /// Tells a command that its client has gone. Answers at once.
    fn hang_up(self: &Arc<Self>, user: &User, session: SessionId, command: CommandId) {
        let (shared, user) = (Arc::clone(self), user.clone());
        tokio::spawn(async move {
            let team = &user.ns.team;
            let sent = shared.engine().kill_command(&user.who, team, &session, &command, HANG_UP);
            if let Err(error) = sent.await {
                tracing::debug!(%command, %error, "a command whose client has gone could not be hung up");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_without_a_code_is_never_an_exit_status() {
        let end = |exit_code, reason| Some(CommandEnd { exit_code, duration_ms: 0, reason });
        assert!(matches!(status(end(Some(7), None)), Ok(7)));
        assert!(matches!(status(end(Some(137), Some(EndReason::Timeout))), Ok(137)));
        let said = |end| match status(end) {
            Err(Failed::Said(text)) => text,
            _ => panic!("an exit status"),
        };
        assert!(said(end(None, Some(EndReason::SandboxStopped))).contains("stopped"));
        assert!(said(end(None, Some(EndReason::Lost))).contains("lost"));
        assert!(said(None).contains("lost"));
    }
}
