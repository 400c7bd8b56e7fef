//! The runtime's gate in the egress broker's words.
//!
//! Invariant: the switch lives as long as the broker holds its gate; with it the gate closes.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bivouac_egress::broker::{Datagrams, Gate, Received, Receiving, Steer};
use bivouac_runtime::gate::{self, Switch};
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// Turns the runtime's gate into the broker's. Inside of the shim's runtime.
///
/// # Errors
/// When a socket cannot be watched.
pub(super) fn of(gate: gate::Gate) -> io::Result<Gate> {
    let gate::Gate { tcp, dns, udp, raw, own, switch } = gate;
    let mut queries: Vec<Rc<dyn Datagrams>> = Vec::new();
    for socket in dns {
        queries.push(Rc::new(Queries(UdpSocket::from_std(socket)?)));
    }
    let mut others: Vec<Rc<dyn Datagrams>> = Vec::new();
    for (socket, raw) in udp.into_iter().zip(raw) {
        others.push(Rc::new(Others { socket: UdpSocket::from_std(socket)?, raw }));
    }
    Ok(Gate { tcp, own, dns: queries, udp: others, steer: Rc::new(Steering(switch)) })
}

struct Steering(Switch);

impl Steer for Steering {
    fn set(&self, tcp: bool, dns: bool, udp: bool) -> io::Result<()> {
        self.0.set(tcp, dns, udp)
    }
}

/// Datagrams to port 53: answered from that port, by the socket itself.
struct Queries(UdpSocket);

impl Datagrams for Queries {
    fn recv<'a>(&'a self, into: &'a mut [u8]) -> Receiving<'a> {
        Box::pin(receive(&self.0, into))
    }

    fn send(&self, bytes: &[u8], to: SocketAddr, from: SocketAddr) -> io::Result<()> {
        gate::answer(&self.0, bytes, to, from.ip())
    }
}

/// All other datagrams: answered from any port, by a raw socket.
struct Others {
    socket: UdpSocket,
    raw: OwnedFd,
}

impl Datagrams for Others {
    fn recv<'a>(&'a self, into: &'a mut [u8]) -> Receiving<'a> {
        Box::pin(receive(&self.socket, into))
    }

    fn send(&self, bytes: &[u8], to: SocketAddr, from: SocketAddr) -> io::Result<()> {
        gate::answer_as(&self.raw, bytes, to, from)
    }
}

async fn receive(socket: &UdpSocket, into: &mut [u8]) -> io::Result<Received> {
    loop {
        socket.readable().await?;
        match socket.try_io(Interest::READABLE, || gate::receive(socket, into)) {
            // One that is longer than the buffer is longer than anything that is let through.
            Ok(got) if got.cut => {}
            Ok(got) => return Ok(Received { len: got.len, from: got.from, to: got.to }),
            Err(e) => match e.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::Interrupted
                // Without its addresses it is nobody's.
                | io::ErrorKind::InvalidData
                // What an answer met on its way to the sandbox is told here.
                | io::ErrorKind::ConnectionRefused
                | io::ErrorKind::HostUnreachable => {}
                _ => return Err(e),
            },
        }
    }
}
