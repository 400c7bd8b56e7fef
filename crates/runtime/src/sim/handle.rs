//! One session of a simulated host, as the engine has hold of it.
//!
//! Invariant: what it says of a session is what the host's state says; a session that has ended answers
//! `Gone`. Made by [`Sim::handle`].

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bivouac_types::command::{CommandEnd, EndReason, Stream};
use bivouac_types::id::{CommandId, SessionId};
use bytes::Bytes;
use tokio::sync::{mpsc, watch};

use super::{Log, Sim, SimSession, doors, end, programs};
use crate::{
    DialTo, DriveMount, ExecSpec, FileError, FileErrorKind, FileReader, FileWriter, Handle,
    ListenAt, Listener, Listening, LogRecord, Progress, RuntimeError, StdinErrorKind, TtySize,
    Usage,
};

#[derive(Debug)]
pub(super) struct SimHandle {
    pub(super) sim: Sim,
    pub(super) id: SessionId,
    /// Somebody has taken the egress events.
    pub(super) heard: AtomicBool,
}

impl SimHandle {
    fn gone_error(&self) -> RuntimeError {
        RuntimeError::Gone(self.id.clone())
    }

    pub(super) fn with_session<T>(
        &self,
        act: impl FnOnce(&mut SimSession) -> T,
    ) -> Result<T, RuntimeError> {
        let mut world = self.sim.world();
        match world.sessions.get_mut(&self.id) {
            Some(session) if *session.alive.borrow() => Ok(act(session)),
            _ => Err(self.gone_error()),
        }
    }

    fn with_log<T>(
        &self,
        command: &CommandId,
        act: impl FnOnce(&mut Log) -> T,
    ) -> Result<T, RuntimeError> {
        self.with_session(|_| ())?;
        let world = self.sim.world();
        let log = world
            .logs
            .get(&(self.id.clone(), command.clone()))
            .ok_or_else(|| RuntimeError::NoCommand(command.clone()))?;
        let mut out = None;
        log.send_modify(|log| out = Some(act(log)));
        out.ok_or_else(|| self.gone_error())
    }
}

fn no_terminal(command: &CommandId) -> RuntimeError {
    let message = format!("command {command} has no terminal");
    FileError { kind: FileErrorKind::Invalid, message }.into()
}

#[async_trait]
impl Handle for SimHandle {
    fn session(&self) -> &SessionId {
        &self.id
    }

    async fn exec(&self, spec: &ExecSpec) -> Result<(), RuntimeError> {
        let argv: Vec<&str> = spec.argv.iter().map(String::as_str).collect();
        // Nothing starts in a sandbox that stands still.
        let mut frozen = self.with_session(|session| session.frozen.subscribe())?;
        let _ = frozen.wait_for(|frozen| !*frozen).await;
        let result = match self.sim.on_drive(&self.id, &argv) {
            Some(done) => Some(done),
            None => self.with_session(|session| programs::act(session, &argv))??,
        };
        let stdin_open = spec.attach_stdin || spec.tty.is_some();
        let mut log = Log { stdin_open, tty: spec.tty, ..Log::default() };
        if let Some((text, code)) = result {
            let bytes = bytes::Bytes::from(text);
            for piece in bytes.chunks(4) {
                let bytes = bytes::Bytes::copy_from_slice(piece);
                log.push(LogRecord::Data { stream: Stream::Stdout, bytes });
            }
            log.push(end(code, None));
        }
        let key = (self.id.clone(), spec.command.clone());
        self.sim.world().logs.insert(key, watch::Sender::new(log));
        Ok(())
    }

    fn progress(&self, command: &CommandId) -> Option<watch::Receiver<Progress>> {
        let world = self.sim.world();
        let mut log = world.logs.get(&(self.id.clone(), command.clone()))?.subscribe();
        let (sender, receiver) = watch::channel(log.borrow_and_update().progress.clone());
        tokio::spawn(async move {
            while log.changed().await.is_ok() {
                let now = log.borrow_and_update().progress.clone();
                if sender.send(now).is_err() {
                    return;
                }
            }
            // Nobody can tell any more, as a handle says whose shim is gone.
            sender.send_if_modified(|progress| {
                let open = progress.end.is_none();
                if open {
                    let reason = Some(EndReason::Lost);
                    progress.end = Some(CommandEnd { exit_code: None, duration_ms: 0, reason });
                }
                open
            });
        });
        Some(receiver)
    }

    async fn signal(&self, command: &CommandId, signal: i32) -> Result<(), RuntimeError> {
        self.with_log(command, |log| {
            if log.progress.end.is_none() {
                log.push(end(128 + signal, None));
            }
        })
    }

    async fn stdin(
        &self,
        command: &CommandId,
        offset: Option<u64>,
        data: bytes::Bytes,
        close: bool,
    ) -> Result<u64, RuntimeError> {
        let refuse = |kind, written| RuntimeError::Stdin {
            kind,
            written,
            message: "simulated standard input refused a write".to_owned(),
        };
        self.with_log(command, |log| {
            let at = offset.unwrap_or(log.stdin);
            if !log.stdin_open || log.progress.end.is_some() {
                return Err(refuse(StdinErrorKind::Closed, 0));
            }
            if at > log.stdin {
                return Err(refuse(StdinErrorKind::Gap, 0));
            }
            let known = usize::try_from(log.stdin - at).unwrap_or(usize::MAX).min(data.len());
            log.stdin = log.stdin.max(at + data.len() as u64);
            if log.tty.is_none() {
                log.stdin_open = !close;
            } else if known < data.len() {
                // A terminal says again what is typed.
                let bytes = data.slice(known..);
                log.push(LogRecord::Data { stream: Stream::Stdout, bytes });
            }
            Ok(log.stdin)
        })?
    }

    async fn read_file(&self, path: &str) -> Result<FileReader, RuntimeError> {
        self.with_session(|_| ())?;
        Err(FileError { kind: FileErrorKind::NotFound, message: format!("{path}: no such file") }
            .into())
    }

    async fn write_files(&self, cwd: &str) -> Result<FileWriter, RuntimeError> {
        self.with_session(|_| ())?;
        let message = format!("{cwd}: a simulated sandbox takes no files");
        Err(FileError { kind: FileErrorKind::Other, message }.into())
    }

    async fn mkdir(&self, path: &str, recursive: bool) -> Result<(), RuntimeError> {
        let fresh = self.with_session(|session| session.files.insert(path.to_owned()))?;
        if fresh || recursive {
            return Ok(());
        }
        let message = format!("cannot make {path}: it already exists");
        Err(FileError { kind: FileErrorKind::Exists, message }.into())
    }

    async fn attach_drive(&self, mount: &DriveMount, _id_range: u32) -> Result<(), RuntimeError> {
        self.sim.attach(&self.id, mount)
    }

    async fn detach_drive(&self, mount: &DriveMount, force: bool) -> Result<(), RuntimeError> {
        self.sim.detach(&self.id, mount, force)
    }

    async fn exec_passed(&self, spec: &ExecSpec, stdio: [OwnedFd; 3]) -> Result<(), RuntimeError> {
        self.pass(spec, stdio)
    }

    async fn resize(&self, command: &CommandId, size: TtySize) -> Result<(), RuntimeError> {
        self.with_log(command, |log| match &mut log.tty {
            Some(tty) => {
                *tty = size;
                Ok(())
            }
            None => Err(no_terminal(command)),
        })?
    }

    async fn dial(&self, to: &DialTo) -> Result<OwnedFd, RuntimeError> {
        self.with_session(|_| ())?;
        self.sim.dial(&self.id, to)
    }

    async fn listen(&self, at: &ListenAt) -> Result<Listening, RuntimeError> {
        self.with_session(|_| ())?;
        doors::listen(at)
    }

    async fn listeners(&self) -> Result<Vec<Listener>, RuntimeError> {
        self.with_session(|_| ())?;
        Ok(self.sim.listeners(&self.id))
    }

    async fn sftp(&self, _root: bool, _cwd: &str) -> Result<OwnedFd, RuntimeError> {
        self.with_session(|_| ())?;
        let message = "a simulated sandbox has no SFTP".to_owned();
        Err(FileError { kind: FileErrorKind::Other, message }.into())
    }

    async fn page_out(&self) -> Result<u64, RuntimeError> {
        self.with_session(|_| ())?;
        self.sim.page_out(&self.id)
    }

    async fn freeze(&self) -> Result<(), RuntimeError> {
        self.with_session(|session| session.frozen.send_replace(true)).map(drop)
    }

    async fn thaw(&self) -> Result<(), RuntimeError> {
        self.with_session(|session| session.frozen.send_replace(false)).map(drop)
    }

    async fn kill(&self) -> Result<(), RuntimeError> {
        let world = self.sim.world();
        let alive = world.sessions.get(&self.id).filter(|session| *session.alive.borrow());
        let Some(session) = alive else { return Err(self.gone_error()) };
        let open = world.logs.iter().filter(|((of, _), _)| *of == self.id);
        for (_, log) in open {
            if log.borrow().progress.end.is_none() {
                log.send_modify(|log| log.push(end(137, Some(EndReason::SandboxStopped))));
            }
        }
        session.alive.send_replace(false);
        session.gone.send_replace(true);
        session.frozen.send_replace(false);
        Ok(())
    }

    async fn egress(&self, message: Bytes) -> Result<Bytes, RuntimeError> {
        let broker = {
            let mut world = self.sim.world();
            let alive = world.sessions.get(&self.id).is_some_and(|s| *s.alive.borrow());
            if !alive {
                return Err(self.gone_error());
            }
            world.egress.entry(self.id.clone()).or_default().sent.push(message.clone());
            world.broker.0.clone()
        };
        Ok(broker(&message).into())
    }

    fn egress_events(&self) -> mpsc::Receiver<Bytes> {
        let (sender, receiver) = mpsc::channel(1024);
        if !self.heard.swap(true, Ordering::AcqRel) {
            let mut world = self.sim.world();
            let egress = world.egress.entry(self.id.clone()).or_default();
            for message in egress.unheard.drain(..) {
                // A test says less than fits.
                let _ = sender.try_send(message);
            }
            egress.listener = Some(sender);
        }
        receiver
    }

    async fn usage(&self) -> Result<Usage, RuntimeError> {
        self.with_session(|_| Usage {
            cpu_ms: 7,
            network: Some(crate::Traffic { received: 3, sent: 2 }),
            ..Usage::default()
        })
    }

    fn gone(&self) -> watch::Receiver<bool> {
        match self.sim.world().sessions.get(&self.id) {
            Some(session) => session.gone.subscribe(),
            None => watch::Sender::new(true).subscribe(),
        }
    }
}
