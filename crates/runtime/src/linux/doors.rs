//! serve's side of what goes in and out of a sandbox by TCP: asks init, looks at what it sends.
//!
//! Each request has a socket pair of its own, on which init or a child of it answers once, so nothing of it
//! stays in the shim. Invariant: a descriptor from inside is handed on only when it is what was asked for; a
//! session has so many requests under way, for so long. Called by [`super::handle`].

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType, sockopt};

use super::handle::LinuxHandle;
use crate::proto::{Assembler, Channel, DoorOp, DoorReply, Frame, Heard, ToShim};
use crate::{DialTo, FileError, FileErrorKind, ListenAt, Listener, Listening, RuntimeError};

/// Longest answer: a list of listeners.
pub(crate) const REPLY_CAP: usize = 256 << 10;
/// Connections to ports of a sandbox's own that are made at once; others wait.
pub(super) const DIALS: usize = 256;
/// The same of what needs a process inside.
pub(super) const CHILDREN: usize = 32;
/// How long the inside may take; it bounds itself, and this is for when it cannot.
const PATIENCE: Duration = Duration::from_secs(60);
/// Sockets of the engine's that are remembered, so that they are not shown as a program's.
const OWN: usize = 4096;

/// Which kind of socket is expected.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Connected,
    Listening { unix: bool },
}

fn refused(kind: FileErrorKind, message: String) -> RuntimeError {
    FileError { kind, message }.into()
}

fn wrong(what: &str) -> RuntimeError {
    refused(
        FileErrorKind::Other,
        format!("the sandbox answered with {what}: stop it and start it again"),
    )
}

/// Whether a descriptor from inside is the socket that was asked for.
fn is(fd: &OwnedFd, wanted: Wanted) -> rustix::io::Result<bool> {
    let stat = rustix::fs::fstat(fd)?;
    if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
        return Ok(false);
    }
    let domain = sockopt::socket_domain(fd)?;
    let inet = [AddressFamily::INET, AddressFamily::INET6].contains(&domain)
        && sockopt::socket_protocol(fd)?.is_none_or(|p| p == rustix::net::ipproto::TCP);
    let family = match wanted {
        Wanted::Listening { unix: true } => domain == AddressFamily::UNIX,
        _ => inet,
    };
    let listens = sockopt::socket_acceptconn(fd)?;
    Ok(family
        && sockopt::socket_type(fd)? == SocketType::STREAM
        && listens == (wanted != Wanted::Connected))
}

impl LinuxHandle {
    /// Asks, and waits for the one answer and its descriptor.
    async fn door(&self, op: DoorOp) -> Result<(DoorReply, Option<OwnedFd>), RuntimeError> {
        self.needs(2, "open connections into a running sandbox")?;
        let io = |source| RuntimeError::Io { what: "ask the sandbox".into(), source };
        let (ours, theirs) = crate::proto::pair().map_err(io)?;
        let answers = Channel::new(ours).map_err(io)?;
        self.pass(&ToShim::Door { op }, &[theirs.as_fd()]).await?;
        drop(theirs);
        let mut assembler = Assembler::new(REPLY_CAP);
        let answer = answers.receive::<DoorReply>(&mut assembler);
        let answer = self.unless_frozen(tokio::time::timeout(PATIENCE, answer)).await?;
        match answer {
            Ok(Ok(Some(Frame { message, mut fds, .. }))) => match (fds.pop(), fds.is_empty()) {
                (fd, true) => Ok((message, fd)),
                _ => Err(wrong("too many descriptors")),
            },
            // Its process was ended: by a limit of its own, or with the whole sandbox.
            Ok(Ok(None)) if !self.is_gone() => {
                Err(refused(FileErrorKind::Busy, "the sandbox gave no answer in time".to_owned()))
            }
            Ok(Ok(None)) => Err(self.gone_error()),
            Ok(Err(_)) => Err(wrong("what no answer is")),
            Err(_) => {
                Err(refused(FileErrorKind::Busy, "the sandbox gave no answer for 60 s".to_owned()))
            }
        }
    }

    async fn socket(&self, op: DoorOp, wanted: Wanted) -> Result<OwnedFd, RuntimeError> {
        match self.door(op).await? {
            (DoorReply::Open, Some(fd)) if is(&fd, wanted).unwrap_or(false) => Ok(fd),
            (DoorReply::Failed(error), None) => Err(error.into()),
            _ => Err(wrong("another descriptor than the one that was asked for")),
        }
    }

    pub(super) async fn dial_inside(&self, to: &DialTo) -> Result<OwnedFd, RuntimeError> {
        let to = match to {
            DialTo::Host { host, port }
                if host.trim_end_matches('.').eq_ignore_ascii_case("localhost") =>
            {
                DialTo::Port(*port)
            }
            other => other.clone(),
        };
        let room = if matches!(to, DialTo::Port(_)) { &self.dials } else { &self.children };
        let _turn = room.acquire().await.map_err(|_| self.gone_error())?;
        self.socket(DoorOp::Dial(to), Wanted::Connected).await
    }

    pub(super) async fn listen_inside(&self, at: &ListenAt) -> Result<Listening, RuntimeError> {
        let _turn = self.children.acquire().await.map_err(|_| self.gone_error())?;
        let unix = matches!(at, ListenAt::Unix { .. });
        let op = DoorOp::Listen(at.clone());
        let socket = self.socket(op, Wanted::Listening { unix }).await?;
        let io = |e: rustix::io::Errno| RuntimeError::Io {
            what: "look at a socket that listens".into(),
            source: e.into(),
        };
        let port = if unix {
            0
        } else {
            let at = rustix::net::getsockname(&socket).map_err(io)?;
            std::net::SocketAddr::try_from(at).map_err(io)?.port()
        };
        let inode = rustix::fs::fstat(&socket).map_err(io)?.st_ino;
        self.remember_own(inode);
        Ok(Listening { socket, port })
    }

    pub(super) async fn listeners_inside(&self) -> Result<Vec<Listener>, RuntimeError> {
        let _turn = self.children.acquire().await.map_err(|_| self.gone_error())?;
        match self.door(DoorOp::Listeners).await? {
            (DoorReply::Listeners(all), None) => {
                let own = self.own();
                let foreign = all.into_iter().filter(|heard| !own.contains(&heard.inode));
                Ok(foreign.map(|Heard { listener, .. }| listener).collect())
            }
            (DoorReply::Failed(error), None) => Err(error.into()),
            _ => Err(wrong("no list")),
        }
    }

    fn remember_own(&self, inode: u64) {
        let mut own = self.own();
        if own.len() >= OWN {
            own.pop_front();
        }
        own.push_back(inode);
    }
}
