//! What a broker is given of its session's gate: sockets, and two small traits in place of what only
//! the runtime can do.
//!
//! Invariant: the sockets live in the gate's namespace, so whatever they accept comes from that one
//! sandbox; what the broker dials leaves from the host's. Made by `bivouac::role::shim`, and by tests.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;

/// The gate of a session.
pub struct Gate {
    /// Listeners, IPv4 and IPv6. Every TCP connection of the sandbox arrives at one of them, whatever
    /// address and port it asked for; `local_addr` of the accepted socket is what it asked for.
    pub tcp: Vec<std::net::TcpListener>,
    /// The gate's own addresses: nothing is dialled for a connection to one of them.
    pub own: Vec<IpAddr>,
    /// Datagrams to port 53 of any address.
    pub dns: Vec<Rc<dyn Datagrams>>,
    /// All other datagrams, while [`Steer`] lets them in.
    pub udp: Vec<Rc<dyn Datagrams>>,
    /// Opens and closes the gate.
    pub steer: Rc<dyn Steer>,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("tcp", &self.tcp)
            .field("own", &self.own)
            .finish_non_exhaustive()
    }
}

/// Opens and closes the gate by kind. What is closed is refused by the kernel at once.
pub trait Steer {
    /// Takes effect for connections and datagrams that begin after it returns.
    ///
    /// # Errors
    /// The kernel's; the gate is then as it was.
    fn set(&self, tcp: bool, dns: bool, udp: bool) -> io::Result<()>;
}

/// A datagram that came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Bytes of it that are in the buffer.
    pub len: usize,
    /// The guest's socket.
    pub from: SocketAddr,
    /// What the guest asked for.
    pub to: SocketAddr,
}

/// What [`Datagrams::recv`] returns.
pub type Receiving<'a> = Pin<Box<dyn Future<Output = io::Result<Received>> + 'a>>;

/// A socket for datagrams that tells what they asked for, and answers from any address.
pub trait Datagrams {
    /// Waits for the next datagram. Dropping the future loses none.
    fn recv<'a>(&'a self, into: &'a mut [u8]) -> Receiving<'a>;

    /// Sends to `to`, with `from` as the source. Never waits: a full queue loses the datagram.
    ///
    /// # Errors
    /// The kernel's.
    fn send(&self, bytes: &[u8], to: SocketAddr, from: SocketAddr) -> io::Result<()>;
}
