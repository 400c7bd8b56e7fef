//! The doors of a simulated sandbox: sockets of this machine, so that those who carry bytes can be tested.
//!
//! A test says which ports are listened on ([`Sim::listen_on`]); what dials one gets what it sends back, until
//! it closes. Passed standard output gets a line, then the program ends.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

use bivouac_types::id::SessionId;
use tokio::sync::watch;

use super::handle::SimHandle;
use super::{Log, Sim, end};
use crate::{
    DialTo, ExecSpec, FileError, FileErrorKind, ListenAt, Listener, Listening, RuntimeError,
};

/// What tests have said of doors.
#[derive(Debug, Default)]
pub(super) struct SimDoors {
    listeners: BTreeMap<SessionId, Vec<Listener>>,
    dialled: BTreeMap<SessionId, Vec<DialTo>>,
    swap: bool,
    paged_out: BTreeMap<SessionId, usize>,
}

fn io(source: std::io::Error) -> RuntimeError {
    RuntimeError::Io { what: "simulate a door".to_owned(), source }
}

fn refuse(kind: FileErrorKind, message: String) -> RuntimeError {
    FileError { kind, message }.into()
}

/// A connection whose other end sends back what it gets.
fn echo() -> std::io::Result<OwnedFd> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let ours = TcpStream::connect(listener.local_addr()?)?;
    let (mut theirs, _) = listener.accept()?;
    std::thread::Builder::new().name("sim-echo".to_owned()).spawn(move || {
        let mut buffer = [0u8; 16 << 10];
        while let Ok(got @ 1..) = theirs.read(&mut buffer) {
            if theirs.write_all(&buffer[..got]).is_err() {
                return;
            }
        }
    })?;
    ours.set_nonblocking(true)?;
    Ok(ours.into())
}

/// A socket of this machine that listens, whatever the path or the host is called.
pub(super) fn listen(at: &ListenAt) -> Result<Listening, RuntimeError> {
    match at {
        ListenAt::Tcp { .. } => {
            let listener = TcpListener::bind("127.0.0.1:0").map_err(io)?;
            let port = listener.local_addr().map_err(io)?.port();
            listener.set_nonblocking(true).map_err(io)?;
            Ok(Listening { socket: listener.into(), port })
        }
        ListenAt::Unix { path } => {
            let listener = UnixListener::bind(path).map_err(io)?;
            listener.set_nonblocking(true).map_err(io)?;
            Ok(Listening { socket: listener.into(), port: 0 })
        }
    }
}

impl Sim {
    /// Has a program of a session listen on a port.
    pub fn listen_on(&self, id: &SessionId, port: u16, program: &str) {
        let listener = Listener {
            port,
            address: "127.0.0.1".to_owned(),
            pid: Some(2),
            program: Some(program.to_owned()),
        };
        self.world().doors.listeners.entry(id.clone()).or_default().push(listener);
    }

    /// Ends all that listens in a session.
    pub fn listen_no_more(&self, id: &SessionId) {
        self.world().doors.listeners.remove(id);
    }

    /// What was dialled in a session, also without success.
    #[must_use]
    pub fn dialled(&self, id: &SessionId) -> Vec<DialTo> {
        self.world().doors.dialled.get(id).cloned().unwrap_or_default()
    }

    /// Gives the host swap.
    pub fn add_swap(&self) {
        self.world().doors.swap = true;
    }

    /// How often a session's memory went to swap.
    #[must_use]
    pub fn paged_out(&self, id: &SessionId) -> usize {
        self.world().doors.paged_out.get(id).copied().unwrap_or(0)
    }

    pub(super) fn dial(&self, id: &SessionId, to: &DialTo) -> Result<OwnedFd, RuntimeError> {
        let mut world = self.world();
        world.doors.dialled.entry(id.clone()).or_default().push(to.clone());
        let own = match to {
            DialTo::Port(port) => Some(*port),
            DialTo::Host { host, port } => (host == "localhost").then_some(*port),
        };
        let heard = world.doors.listeners.get(id).is_some_and(|all| {
            own.is_none_or(|port| all.iter().any(|listener| listener.port == port))
        });
        drop(world);
        match own {
            Some(port) if !heard => Err(refuse(
                FileErrorKind::NotFound,
                format!("nothing listens on port {port} in the sandbox: start a server there"),
            )),
            _ => echo().map_err(io),
        }
    }

    pub(super) fn listeners(&self, id: &SessionId) -> Vec<Listener> {
        self.world().doors.listeners.get(id).cloned().unwrap_or_default()
    }

    pub(super) fn page_out(&self, id: &SessionId) -> Result<u64, RuntimeError> {
        let mut world = self.world();
        if !world.doors.swap {
            return Err(refuse(FileErrorKind::Invalid, "this host has no swap".to_owned()));
        }
        *world.doors.paged_out.entry(id.clone()).or_default() += 1;
        Ok(1 << 20)
    }
}

impl SimHandle {
    /// Says what the program would, then ends.
    pub(super) fn pass(&self, spec: &ExecSpec, stdio: [OwnedFd; 3]) -> Result<(), RuntimeError> {
        let argv: Vec<&str> = spec.argv.iter().map(String::as_str).collect();
        let result = self.with_session(|session| super::programs::act(session, &argv))??;
        let mut log = Log::default();
        if let Some((text, code)) = result {
            let [_, stdout, _] = stdio;
            // A test's text fits into a pipe.
            std::fs::File::from(stdout).write_all(text.as_bytes()).map_err(io)?;
            log.push(end(code, None));
        }
        let key = (self.id.clone(), spec.command.clone());
        self.sim.world().logs.insert(key, watch::Sender::new(log));
        Ok(())
    }
}
