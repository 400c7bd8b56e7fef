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

/// How often in a row a socket may fail before it is given up, and the rest in between: a host that is
/// short of memory for a moment must not cost the session its names for good.
const FAILURES: u32 = 600;
const REST: std::time::Duration = std::time::Duration::from_millis(100);

/// As [`Datagrams::recv`], over failures that pass.
///
/// # Errors
/// The kernel's, when they do not pass for a minute.
pub(crate) async fn receive(from: &dyn Datagrams, into: &mut [u8]) -> io::Result<Received> {
    let mut failures = 0;
    loop {
        match from.recv(into).await {
            Err(error) if failures < FAILURES => {
                if failures == 0 {
                    tracing::warn!(%error, "a socket of the gate fails; it is tried again");
                }
                failures += 1;
                tokio::time::sleep(REST).await;
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Fails so often, then has a datagram.
    struct Failing(Cell<u32>);

    impl Datagrams for Failing {
        fn recv<'a>(&'a self, _: &'a mut [u8]) -> Receiving<'a> {
            Box::pin(async {
                let left = self.0.get();
                self.0.set(left.saturating_sub(1));
                let any = SocketAddr::from(([127, 0, 0, 1], 1));
                if left == 0 {
                    return Ok(Received { len: 0, from: any, to: any });
                }
                Err(io::Error::from_raw_os_error(105)) // ENOBUFS
            })
        }

        fn send(&self, _: &[u8], _: SocketAddr, _: SocketAddr) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_passes_ends_nothing() {
        assert!(receive(&Failing(Cell::new(20)), &mut []).await.is_ok());
        assert!(receive(&Failing(Cell::new(u32::MAX)), &mut []).await.is_err());
    }
}
