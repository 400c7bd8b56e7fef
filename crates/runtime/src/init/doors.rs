//! What goes in and out by TCP: connecting to the sandbox's own ports, to others, listening, and who listens.
//!
//! A port of the sandbox's own is dialled by init itself, without a fork and without waiting: the loop looks
//! after what is on its way ([`Dials`]). The rest is done by children, as file operations are: a resolver can
//! take long, and a path is the guest's. Invariant: one answer on each result socket, which never makes init
//! wait; so many dials are on their way, for so long. Called by init's loop.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::{DEFAULT_USER, exec, listeners};
use crate::proto::{self, DoorOp, DoorReply};
use crate::sys::{self, Fork};
use crate::{DialTo, FileError, FileErrorKind, ListenAt};

/// Most dials that are on their way at once.
const MOST: usize = 1024;
/// How long a port of the sandbox's own may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a host may, with the resolver.
const HOST_PATIENCE: Duration = Duration::from_secs(30);
/// After so many seconds a child is ended, whatever holds it.
const CHILD_LIMIT: u32 = 40;
/// How many may wait to be accepted.
const BACKLOG: i32 = 1024;

/// Starts what is asked for, or does it.
pub(super) fn start(op: DoorOp, mut fds: Vec<OwnedFd>, dials: &mut Dials) {
    let (Some(result), true) = (fds.pop(), fds.is_empty()) else { return };
    match op {
        DoorOp::Dial(DialTo::Port(port)) => dials.start(port, own_places(), result),
        DoorOp::Dial(DialTo::Host { host, port }) => match loopback(&host) {
            Some(address) => dials.start(port, vec![address], result),
            None => child(&result, move || connect(&host, port)),
        },
        DoorOp::Listen(at) => child(&result, move || listen(&at)),
        DoorOp::Listeners => child(&result, || Ok((DoorReply::Listeners(listeners::all()), None))),
    }
}

/// An address by which a sandbox means itself.
fn loopback(host: &str) -> Option<IpAddr> {
    host.parse().ok().filter(IpAddr::is_loopback)
}

/// Where programs of the sandbox listen, the likeliest first.
fn own_places() -> Vec<IpAddr> {
    vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)]
}

fn refused(kind: FileErrorKind, message: String) -> DoorReply {
    DoorReply::Failed(FileError { kind, message })
}

/// The text of an error without the standard library's "(os error 2)".
fn plain(error: &io::Error) -> String {
    error.to_string().split(" (os error").next().unwrap_or_default().to_owned()
}

/// The socket is empty and takes a small frame; who does not want it any more has closed it.
fn answer(result: &OwnedFd, reply: &DoorReply, socket: Option<&OwnedFd>) {
    let fds: Vec<_> = socket.iter().map(|socket| socket.as_fd()).collect();
    let _ = proto::send(result, reply, &fds);
}

/// Connections that init makes.
#[derive(Default)]
pub(super) struct Dials(Vec<Dial>);

struct Dial {
    port: u16,
    socket: OwnedFd,
    /// Where else it may be, the next one last.
    left: Vec<IpAddr>,
    /// The address of `eth0` was asked for already.
    all: bool,
    until: Instant,
    result: OwnedFd,
}

impl Dials {
    fn start(&mut self, port: u16, mut places: Vec<IpAddr>, result: OwnedFd) {
        if self.0.len() >= MOST {
            let message = format!("{MOST} connections into this sandbox are on their way already");
            return answer(&result, &refused(FileErrorKind::Busy, message), None);
        }
        places.reverse();
        let all = places.len() < 2;
        let until = Instant::now() + PATIENCE;
        self.next(port, places, all, until, result);
    }

    /// Begins with the next place. What is decided at once, as on loopback, is answered at once.
    fn next(
        &mut self,
        port: u16,
        mut left: Vec<IpAddr>,
        mut all: bool,
        until: Instant,
        result: OwnedFd,
    ) {
        loop {
            let Some(place) = left.pop().or_else(|| {
                let last = if all { None } else { outer_address() };
                all = true;
                last
            }) else {
                let message =
                    format!("nothing listens on port {port} in the sandbox: start a server there");
                return answer(&result, &refused(FileErrorKind::NotFound, message), None);
            };
            match begin(SocketAddr::new(place, port)) {
                Ok((socket, true)) if met_itself(&socket) => {}
                Ok((socket, true)) => return answer(&result, &DoorReply::Open, Some(&socket)),
                Ok((socket, false)) => {
                    self.0.push(Dial { port, socket, left, all, until, result });
                    return;
                }
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    let message = format!("no room for a connection to port {port}");
                    return answer(&result, &refused(FileErrorKind::Busy, message), None);
                }
                Err(_) => {}
            }
        }
    }

    /// What to wait for: writable sockets.
    pub(super) fn sockets(&self) -> impl Iterator<Item = &OwnedFd> {
        self.0.iter().map(|dial| &dial.socket)
    }

    /// How long the one may wait that has waited longest.
    pub(super) fn patience(&self) -> Option<Duration> {
        let first = self.0.iter().map(|dial| dial.until).min()?;
        // A moment more: what is late then is late for sure.
        Some(first.saturating_duration_since(Instant::now()) + Duration::from_millis(1))
    }

    /// Looks after those that are on their way.
    pub(super) fn tend(&mut self) {
        let now = Instant::now();
        for dial in std::mem::take(&mut self.0) {
            match rustix::net::sockopt::socket_error(&dial.socket) {
                Ok(Ok(())) if met_itself(&dial.socket) => {
                    self.next(dial.port, dial.left, dial.all, dial.until, dial.result);
                }
                Ok(Ok(())) if rustix::net::getpeername(&dial.socket).is_ok() => {
                    answer(&dial.result, &DoorReply::Open, Some(&dial.socket));
                }
                Ok(Ok(())) if now < dial.until => self.0.push(dial),
                Ok(Ok(())) => {
                    let port = dial.port;
                    let message = format!(
                        "port {port} in the sandbox does not answer: its server accepts no connections"
                    );
                    answer(&dial.result, &refused(FileErrorKind::Busy, message), None);
                }
                Ok(Err(_)) | Err(_) => {
                    self.next(dial.port, dial.left, dial.all, dial.until, dial.result);
                }
            }
        }
    }
}

/// Begins to connect; answers whether it is done.
fn begin(to: SocketAddr) -> Result<(OwnedFd, bool), Errno> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
    match rustix::net::connect(&socket, &to) {
        Ok(()) => Ok((socket, true)),
        Err(Errno::INPROGRESS | Errno::AGAIN | Errno::INTR) => Ok((socket, false)),
        Err(e) => Err(e),
    }
}

/// The kernel may have given it the very port that it wanted to reach, where nobody listens: then it is
/// connected with itself.
fn met_itself(socket: &OwnedFd) -> bool {
    match (rustix::net::getsockname(socket), rustix::net::getpeername(socket)) {
        (Ok(own), Ok(Some(peer))) => own == peer,
        _ => false,
    }
}

/// The address of `eth0`, as it is now.
fn outer_address() -> Option<IpAddr> {
    let family = AddressFamily::INET;
    let socket =
        rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    sys::net::interface_address(socket.as_fd(), c"eth0").ok().map(IpAddr::V4)
}

type Made = Result<(DoorReply, Option<OwnedFd>), FileError>;

/// Has a child do the work, with nothing of init's but the result socket.
fn child(result: &OwnedFd, work: impl FnOnce() -> Made) {
    match sys::fork_single_threaded() {
        Ok(Fork::Parent(_)) => {}
        Ok(Fork::Child) => {
            sys::reset_signals_of_role();
            sys::end_after(CHILD_LIMIT);
            // A resolver runs code of the guest's: nothing of init's may be there then.
            let alone = (0..3).try_for_each(|number| sys::dup_to(result.as_fd(), number));
            if alone.and_then(|()| sys::close_from(3)).is_err() {
                sys::exit_now(1);
            }
            let Ok(result) = sys::take_fd(2) else { sys::exit_now(1) };
            let (reply, socket) = work().unwrap_or_else(|error| (DoorReply::Failed(error), None));
            answer(&result, &reply, socket.as_ref());
            sys::exit_now(0)
        }
        Err(e) => {
            let message = format!("the sandbox cannot start a process: {}", plain(&e));
            answer(result, &refused(FileErrorKind::Busy, message), None);
        }
    }
}

fn wrong(kind: FileErrorKind, message: String) -> FileError {
    FileError { kind, message }
}

/// As a program of the default user would: by the sandbox's resolver and its policy.
fn connect(host: &str, port: u16) -> Made {
    let other = |e: io::Error| wrong(FileErrorKind::Other, plain(&e));
    exec::become_user(DEFAULT_USER).map_err(other)?;
    let until = Instant::now() + HOST_PATIENCE;
    let found = (host, port).to_socket_addrs().map_err(|e| {
        wrong(
            FileErrorKind::NotFound,
            format!("the sandbox cannot find host '{host}': {}", plain(&e)),
        )
    })?;
    let mut last = wrong(FileErrorKind::NotFound, format!("host '{host}' has no address"));
    for address in found {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => {
                let _ = stream.set_nodelay(true);
                stream.set_nonblocking(true).map_err(other)?;
                return Ok((DoorReply::Open, Some(stream.into())));
            }
            Err(e) => {
                let kind = match e.kind() {
                    io::ErrorKind::ConnectionRefused => FileErrorKind::NotFound,
                    _ => FileErrorKind::Other,
                };
                let text = plain(&e);
                last = wrong(kind, format!("the sandbox cannot connect to {host}:{port}: {text}"));
            }
        }
    }
    Err(last)
}

fn listen(at: &ListenAt) -> Made {
    let socket = match at {
        ListenAt::Tcp { host, port } => listen_tcp(host, *port),
        ListenAt::Unix { path } => listen_unix(path),
    };
    socket.map(|socket| (DoorReply::Open, Some(socket)))
}

fn listen_tcp(host: &str, port: u16) -> Result<OwnedFd, FileError> {
    let place = match host {
        "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
        "" | "*" => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        other => other.parse().map_err(|_| {
            let message =
                format!("cannot listen at '{host}': it is neither localhost nor an address");
            wrong(FileErrorKind::Invalid, message)
        })?,
    };
    let at = SocketAddr::new(place, port);
    let listen = || -> Result<OwnedFd, Errno> {
        let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
        rustix::net::bind(&socket, &at)?;
        rustix::net::listen(&socket, BACKLOG)?;
        Ok(socket)
    };
    listen().map_err(|e| {
        let (kind, text) = match e {
            Errno::ADDRINUSE => {
                (FileErrorKind::Exists, "something listens there already".to_owned())
            }
            Errno::ADDRNOTAVAIL => {
                (FileErrorKind::Invalid, "the sandbox has no such address".to_owned())
            }
            other => (FileErrorKind::Other, plain(&other.into())),
        };
        wrong(kind, format!("cannot listen at {at} in the sandbox: {text}"))
    })
}

fn listen_unix(path: &str) -> Result<OwnedFd, FileError> {
    let failed = |kind, text: &str| wrong(kind, format!("cannot listen at '{path}': {text}"));
    if !path.starts_with('/') {
        return Err(failed(FileErrorKind::Invalid, "the path is not absolute"));
    }
    let listen = || -> io::Result<OwnedFd> {
        exec::become_user(DEFAULT_USER)?;
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
        // bind(2) makes the last name and follows no link there.
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(listener.into())
    };
    listen().map_err(|e| match e.kind() {
        io::ErrorKind::AddrInUse => failed(FileErrorKind::Exists, "something is there already"),
        io::ErrorKind::NotFound => failed(FileErrorKind::NotFound, "its folder is missing"),
        io::ErrorKind::InvalidInput => {
            failed(FileErrorKind::Invalid, "the path is too long for a socket")
        }
        _ => failed(FileErrorKind::Other, &plain(&e)),
    })
}

/// Reads a file of the guest's up to a bound.
pub(super) fn read_bounded(path: &str, most: u64) -> io::Result<String> {
    let mut text = Vec::new();
    std::fs::File::open(path)?.take(most).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}
