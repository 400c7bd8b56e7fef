//! The kernel's side of dialling.
//!
//! Invariant: an address that this host answers to itself is recognised, however it came to be one.
//! Called by `dial` alone.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use rustix::net::sockopt;
use tokio::net::{TcpStream, UdpSocket};

use super::{Checked, Dialer};

/// A peer that vanished is noticed after about two minutes.
const KEEP_ALIVE: Duration = Duration::from_secs(60);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);
const KEEP_ALIVE_PROBES: u32 = 4;
/// Connecting a datagram socket sends nothing; any port does.
const ANY_PORT: u16 = 9;
/// MTU of the loopback interface as the kernel reports it for IPv4.
const LOOPBACK_MTU: u32 = 65_535;

/// The host's network.
#[derive(Debug, Clone, Copy, Default)]
pub struct System;

impl Dialer for System {
    fn connect(&self, to: Checked) -> LocalBoxFuture<'static, io::Result<TcpStream>> {
        async move {
            let stream = TcpStream::connect(to.address()).await?;
            // Whatever happened, what stands is what was checked.
            if stream.peer_addr()? != to.address() {
                return Err(io::Error::other("the connection leads elsewhere"));
            }
            stream.set_nodelay(true)?;
            sockopt::set_socket_keepalive(&stream, true)?;
            sockopt::set_tcp_keepidle(&stream, KEEP_ALIVE)?;
            sockopt::set_tcp_keepintvl(&stream, KEEP_ALIVE_INTERVAL)?;
            sockopt::set_tcp_keepcnt(&stream, KEEP_ALIVE_PROBES)?;
            Ok(stream)
        }
        .boxed_local()
    }

    fn datagrams(&self, to: Checked) -> io::Result<UdpSocket> {
        let socket = std::net::UdpSocket::bind((unspecified(to.address().ip()), 0))?;
        socket.connect(to.address())?;
        socket.set_nonblocking(true)?;
        UdpSocket::from_std(socket)
    }

    fn is_own(&self, ip: IpAddr) -> io::Result<bool> {
        // Towards an address of its own the kernel takes that same address as the source.
        let socket = std::net::UdpSocket::bind((unspecified(ip), 0))?;
        socket.connect(SocketAddr::new(ip, ANY_PORT))?;
        if socket.local_addr()?.ip() == ip {
            return Ok(true);
        }
        // Except that for an IPv4 address beside another one in the same network it takes the other
        // one. But only an own address can be bound…
        if ip.is_ipv6() || !can_bind(ip) {
            return Ok(false);
        }
        // …unless the host lets any be bound (`ip_nonlocal_bind`). Then the way there tells.
        if can_bind(nobodys()) {
            return Ok(sockopt::ip_mtu(&socket)? >= LOOPBACK_MTU);
        }
        Ok(true)
    }
}

fn can_bind(ip: IpAddr) -> bool {
    std::net::UdpSocket::bind((ip, 0)).is_ok()
}

/// An address that no host has: class E.
fn nobodys() -> IpAddr {
    Ipv4Addr::new(240, 0, 0, 1).into()
}

fn unspecified(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}
