//! Steering: how everything that a sandbox sends reaches the sockets of its gate.
//!
//! The gate's routes make every destination local; what is left is to hand packets for any port to one
//! socket. There are two ways. [`Way::Lookup`]: a BPF program chooses the socket when the kernel looks
//! for one. Where BPF is forbidden, [`Way::Tproxy`]: rules of the gate's own packet filter do. Invariant:
//! in both, the sockets are bound to the gate's loopback, which nothing from outside reaches, so a packet
//! that is not steered finds nobody and is refused by the kernel; only packets that came in by the veth
//! are steered. Which way it is, [`probe`] finds out once; called by serve. [`make`] is called in the
//! gate's namespace, by spares and shims.

mod filter;
mod lookup;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, Protocol, SocketAddrAny, SocketFlags, SocketType, ipproto};
use serde::{Deserialize, Serialize};

use super::netns;
use crate::gate::{Parts, Shape};
use crate::sys;

/// How packets get to the gate's sockets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Way {
    /// By a BPF program.
    #[default]
    Lookup,
    /// By rules of nf_tables.
    Tproxy,
}

impl Way {
    /// For operators.
    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Self::Lookup => "by a BPF program",
            Self::Tproxy => "by nf_tables and TPROXY, since BPF is not allowed here",
        }
    }
}

/// Names a way that is to be taken whatever the host can do: for tests.
const FORCED: &str = "BIVOUAC_TEST_CAPTURE";

/// Port of the TCP listener and of the relay's socket, on the gate's loopback. DNS has its own: answers
/// come from it.
const PORT: u16 = 1;
const DNS_PORT: u16 = 53;
/// The kernel cuts it to `net.core.somaxconn`.
const BACKLOG: i32 = 65_535;

/// Tries the ways, the better one first, each in a network namespace that is gone afterwards.
///
/// # Errors
/// A sentence for the operator: without one of them every launch would fail.
pub(crate) fn probe() -> io::Result<Way> {
    // A thread of its own: it changes its namespace.
    let attempt = |way| {
        let tried = std::thread::spawn(move || netns::new_gate(way).map(drop)).join();
        tried.unwrap_or_else(|_| Err(io::Error::other("the probe has panicked")))
    };
    match std::env::var(FORCED).as_deref() {
        Ok("tproxy") => return attempt(Way::Tproxy).map(|()| Way::Tproxy),
        Ok("lookup") => return attempt(Way::Lookup).map(|()| Way::Lookup),
        _ => {}
    }
    let Err(first) = attempt(Way::Lookup) else { return Ok(Way::Lookup) };
    attempt(Way::Tproxy).map(|()| Way::Tproxy).map_err(|second| {
        let text = format!(
            "this kernel cannot steer a sandbox's connections: by a BPF program ({first}), or by \
             nf_tables and TPROXY ({second})"
        );
        io::Error::new(second.kind(), text)
    })
}

/// Makes the sockets and the steering in this process's network namespace, with everything closed.
///
/// # Errors
/// With the step.
pub(crate) fn make(way: Way, namespace: BorrowedFd<'_>) -> io::Result<Parts> {
    let families: Vec<AddressFamily> = netns::families().map(family).collect();
    let all = |make: &dyn Fn(AddressFamily) -> io::Result<OwnedFd>, what: &str| {
        let made: io::Result<Vec<_>> = families.iter().map(|f| make(*f)).collect();
        made.map_err(|e| netns::at(what, e))
    };
    let tcp = all(&listener, "listener of the gate")?;
    let dns = all(&|family| datagrams(family, DNS_PORT), "DNS socket of the gate")?;
    let udp = all(&|family| datagrams(family, PORT), "UDP socket of the gate")?;
    let raw = all(&raw, "raw socket of the gate")?;
    let switch = match way {
        Way::Lookup => {
            // Without nf_tables pings are dropped: their sender waits for nothing.
            let _ = filter::refuse_pings();
            lookup::steer(namespace, [&tcp, &dns, &udp])?
        }
        Way::Tproxy => filter::steer(families.len())?,
    };
    let shape = Shape { way, families: families.len() };
    let fds = [tcp, dns, udp, raw, switch].into_iter().flatten().collect();
    Ok(Parts { shape, fds })
}

fn family(number: i32) -> AddressFamily {
    if number == libc::AF_INET { AddressFamily::INET } else { AddressFamily::INET6 }
}

/// A socket that may answer from any address, bound to a port of the loopback.
fn socket(
    family: AddressFamily,
    kind: SocketType,
    protocol: Option<Protocol>,
    port: u16,
) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, kind, flags, protocol)?;
    let fd = socket.as_fd();
    let address: std::net::SocketAddr = if family == AddressFamily::INET {
        sys::net::set_option(fd, libc::IPPROTO_IP, libc::IP_TRANSPARENT, 1)?;
        (std::net::Ipv4Addr::LOCALHOST, port).into()
    } else {
        sys::net::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT, 1)?;
        // A raw socket is of one family anyway, and refuses to be told so.
        if kind != SocketType::RAW {
            sys::net::set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
        }
        (std::net::Ipv6Addr::LOCALHOST, port).into()
    };
    rustix::net::bind(&socket, &SocketAddrAny::from(address))?;
    Ok(socket)
}

fn listener(family: AddressFamily) -> io::Result<OwnedFd> {
    let socket = socket(family, SocketType::STREAM, None, PORT)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn datagrams(family: AddressFamily, port: u16) -> io::Result<OwnedFd> {
    let socket = socket(family, SocketType::DGRAM, None, port)?;
    let (level, option) = if family == AddressFamily::INET {
        (libc::IPPROTO_IP, libc::IP_RECVORIGDSTADDR)
    } else {
        (libc::IPPROTO_IPV6, libc::IPV6_RECVORIGDSTADDR)
    };
    sys::net::set_option(socket.as_fd(), level, option, 1)?;
    Ok(socket)
}

/// Sends UDP with headers of ours below the kernel's IP, which cuts long ones in fragments. Bound to the
/// loopback: a raw socket that is bound to nothing would get a copy of everything.
fn raw(family: AddressFamily) -> io::Result<OwnedFd> {
    socket(family, SocketType::RAW, Some(ipproto::UDP), 0)
}

#[cfg(test)]
mod tests;
