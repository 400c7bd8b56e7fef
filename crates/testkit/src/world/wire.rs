//! Every packet that reaches the world's side of the cable.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use anyhow::Result;
use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::net::Namespace;

/// A packet that came from the engine's namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// Where it was going.
    pub to: IpAddr,
    /// Number of its protocol: 1 ICMP, 6 TCP, 17 UDP, 58 ICMPv6.
    pub protocol: u8,
    /// Destination port, of TCP and UDP.
    pub port: u16,
    /// Bytes behind the network header's transport header, of TCP and UDP.
    pub payload: Vec<u8>,
}

/// The record of them. Whoever looks takes in first what the kernel has already seen: a packet is in the record before
/// its sender can know that it has arrived.
#[derive(Debug)]
pub struct Wire {
    packets: Arc<Mutex<Vec<Packet>>>,
    socket: Option<Arc<OwnedFd>>,
    /// The thread ends when this closes.
    stop: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    pub(super) fn listen(world: &Namespace) -> Result<Self> {
        let packets = Arc::new(Mutex::new(Vec::new()));
        let kept = packets.clone();
        let (stopped, stop) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let (tell, told) = mpsc::channel();
        let inside = world.handle()?;
        let thread =
            std::thread::Builder::new().name("world-wire".to_owned()).spawn(move || {
                let socket = open(&inside).map(Arc::new);
                let _ = tell.send(socket.as_ref().map(Arc::clone).map_err(ToString::to_string));
                if let Ok(socket) = socket {
                    record(&socket, &stopped, &kept);
                }
            })?;
        let socket = Some(told.recv()?.map_err(anyhow::Error::msg)?);
        Ok(Self { packets, socket, stop: Some(stop), thread: Some(thread) })
    }

    /// Records nothing.
    pub(super) fn deaf() -> Self {
        Self { packets: Arc::default(), socket: None, stop: None, thread: None }
    }

    /// All of them, oldest first.
    #[must_use]
    pub fn packets(&self) -> Vec<Packet> {
        let mut packets = self.packets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(socket) = &self.socket {
            take_in(socket, &mut packets);
        }
        packets.clone()
    }

    /// Those that went to an address.
    ///
    /// # Panics
    /// When it is no address.
    #[must_use]
    pub fn to(&self, address: &str) -> Vec<Packet> {
        let wanted: IpAddr = address.parse().unwrap_or_else(|e| panic!("{address}: {e}"));
        self.packets().into_iter().filter(|packet| packet.to == wanted).collect()
    }

    /// Those that hold a text, anywhere.
    #[must_use]
    pub fn holding(&self, text: &str) -> Vec<Packet> {
        let text = text.as_bytes();
        let holds = |packet: &Packet| packet.payload.windows(text.len()).any(|w| w == text);
        self.packets().into_iter().filter(holds).collect()
    }
}

/// A socket that sees every packet of the namespace.
fn open(inside: &OwnedFd) -> Result<OwnedFd> {
    move_into_link_name_space(inside.as_fd(), Some(LinkNameSpaceType::Network))?;
    // ETH_P_ALL, in network byte order.
    let all = rustix::net::RawProtocol::new(u32::from(3u16.to_be())).map(Protocol::from_raw);
    let (family, kind) = (AddressFamily::PACKET, SocketType::DGRAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, all)?;
    // A burst must not be lost: what is not recorded would count as not sent.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 64 << 20);
    Ok(socket)
}

/// Reads what the socket has, while nobody else does: no packet is between the socket and the record.
fn take_in(socket: &OwnedFd, packets: &mut Vec<Packet>) {
    let mut buffer = vec![0u8; 70_000];
    loop {
        match rustix::net::recv(socket, &mut buffer[..], RecvFlags::DONTWAIT) {
            Ok((n, _)) => packets.extend(parse(&buffer[..n.min(buffer.len())])),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

fn record(socket: &OwnedFd, stopped: &OwnedFd, kept: &Mutex<Vec<Packet>>) {
    loop {
        let mut polled = [PollFd::new(socket, PollFlags::IN), PollFd::new(stopped, PollFlags::IN)];
        match rustix::event::poll(&mut polled, None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        }
        if !polled[1].revents().is_empty() {
            return;
        }
        take_in(socket, &mut kept.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A packet from the engine's side: what the world itself sends has one of the engine's two addresses
/// as its destination, or stays on `lo`.
fn parse(bytes: &[u8]) -> Option<Packet> {
    let (from, to, protocol, rest): (IpAddr, IpAddr, u8, &[u8]) = match bytes.first()? >> 4 {
        4 => {
            let header = usize::from(bytes[0] & 15) * 4;
            let from: [u8; 4] = bytes.get(12..16)?.try_into().ok()?;
            let to: [u8; 4] = bytes.get(16..20)?.try_into().ok()?;
            let (from, to) = (Ipv4Addr::from(from), Ipv4Addr::from(to));
            (from.into(), to.into(), *bytes.get(9)?, bytes.get(header..)?)
        }
        6 => {
            let from: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
            let to: [u8; 16] = bytes.get(24..40)?.try_into().ok()?;
            let (from, to) = (Ipv6Addr::from(from), Ipv6Addr::from(to));
            (from.into(), to.into(), *bytes.get(6)?, bytes.get(40..)?)
        }
        _ => return None,
    };
    let engine =
        |ip: IpAddr| ip.to_string() == "198.51.100.1" || ip.to_string() == "2001:db8:51::1";
    if !engine(from) || engine(to) {
        return None;
    }
    let ports = matches!(protocol, 6 | 17);
    let port = if ports { u16::from_be_bytes(rest.get(2..4)?.try_into().ok()?) } else { 0 };
    let header = match protocol {
        6 => usize::from(rest.get(12)? >> 4) * 4,
        17 => 8,
        _ => 0,
    };
    Some(Packet { to, protocol, port, payload: rest.get(header..)?.to_vec() })
}
