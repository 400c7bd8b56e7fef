//! Carries bytes both ways between a guest and its destination.
//!
//! Invariant: an idle flow holds no buffer. One buffer of 64 KiB serves all flows of the session: a
//! side is read only when the other can be written, so nearly everything that is read is written in the
//! same moment; what the kernel did not take is kept ([`Budget`] bounds the sum over all flows) and the
//! side is not read again before it is gone. So a slow reader slows its sender, and nobody else.
//! Ends are carried over one by one (half-close), errors as a reset.
//!
//! `splice(2)` is not used: docs/decisions/0006-egress-flows.md has the figures.
//!
//! Called by the broker's flows.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use rustix::net::{Shutdown, shutdown, sockopt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use crate::flows::FlowGuard;

/// Size of the shared buffer.
const SHARED: usize = 64 * 1024;
/// Bytes that all flows together may keep for slow readers before reads become small.
const MOST_KEPT: usize = 16 * 1024 * 1024;
/// What a read takes when that much is kept.
const SMALL: usize = 2 * 1024;

/// How long things may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// A destination that takes no byte of what is there for it.
    pub stuck: Duration,
    /// A flow of which one half is closed, and through whose other half nothing comes.
    pub half_closed: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { stuck: Duration::from_secs(120), half_closed: Duration::from_secs(600) }
    }
}

/// The shared buffer and the sum of what flows keep.
#[derive(Default)]
pub(super) struct Buffers {
    /// Empty until it is used for the first time.
    shared: RefCell<Vec<u8>>,
    kept: Cell<usize>,
}

impl fmt::Debug for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffers").field("kept", &self.kept.get()).finish_non_exhaustive()
    }
}

impl Buffers {
    /// Lends the shared buffer, for work that does not wait.
    pub(super) fn with<T>(&self, work: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut shared = self.shared.borrow_mut();
        if shared.is_empty() {
            shared.resize(SHARED, 0);
        }
        work(&mut shared)
    }

    /// Gives the shared buffer back, for a session that rests.
    pub(super) fn trim(&self) {
        *self.shared.borrow_mut() = Vec::new();
    }
}

/// What one direction keeps; gives it back to the sum when dropped.
struct Kept {
    buffers: Rc<Buffers>,
    bytes: Vec<u8>,
    at: usize,
}

impl Kept {
    fn new(buffers: &Rc<Buffers>) -> Self {
        Self { buffers: Rc::clone(buffers), bytes: Vec::new(), at: 0 }
    }

    fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.buffers.kept.set(self.buffers.kept.get() + bytes.len());
    }

    fn rest(&self) -> &[u8] {
        &self.bytes[self.at..]
    }

    fn took(&mut self, n: usize) {
        self.at += n;
        self.buffers.kept.set(self.buffers.kept.get() - n);
        if self.at == self.bytes.len() {
            // Freed, not only emptied: most flows never keep anything again.
            self.bytes = Vec::new();
            self.at = 0;
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.buffers.kept.set(self.buffers.kept.get() - self.rest().len());
    }
}

/// How a relay ended.
#[derive(Debug)]
pub(super) enum End {
    /// Both sides closed.
    Closed,
    /// One side broke: the other was reset.
    Broke(io::Error),
    /// The destination takes nothing.
    Stuck,
}

/// Which way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Up,
    Down,
}

/// Relays until both sides have closed, or one breaks. The caller drops both sockets afterwards;
/// `ahead` are bytes of the guest that were read before.
pub(super) async fn relay(
    guest: &TcpStream,
    upstream: &TcpStream,
    ahead: Vec<u8>,
    flow: &FlowGuard,
    buffers: &Rc<Buffers>,
    patience: Patience,
) -> End {
    for socket in [guest, upstream] {
        prepare(socket);
    }
    let activity = Activity { bytes: Cell::new(0), closed: Cell::new(0) };
    let both = async {
        let up = carry(guest, upstream, ahead, Way::Up, flow, buffers, &activity, patience);
        let down =
            carry(upstream, guest, Vec::new(), Way::Down, flow, buffers, &activity, patience);
        tokio::try_join!(up, down)
    };
    let end = tokio::select! {
        done = both => match done {
            Ok(_) => End::Closed,
            Err(e) if e.kind() == io::ErrorKind::TimedOut && e.raw_os_error().is_none() => End::Stuck,
            Err(e) => End::Broke(e),
        },
        () = forgotten(&activity, patience) => End::Closed,
    };
    if !matches!(end, End::Closed) {
        reset(guest);
        reset(upstream);
    }
    end
}

/// Makes the coming close a reset.
pub(super) fn reset(socket: &TcpStream) {
    // Fails for a socket that is closed already, which is what is wanted.
    let _ = socket.set_zero_linger();
}

/// No delay for small writes, and probes that find a peer which went without a word.
fn prepare(socket: &TcpStream) {
    // Best effort: a socket without probes still works.
    let _ = socket.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(socket, true);
    let _ = sockopt::set_tcp_keepidle(socket, Duration::from_secs(60));
    let _ = sockopt::set_tcp_keepintvl(socket, Duration::from_secs(15));
    let _ = sockopt::set_tcp_keepcnt(socket, 8);
}

struct Activity {
    bytes: Cell<u64>,
    closed: Cell<u8>,
}

/// Resolves when one half has been closed for long and the other brings nothing.
async fn forgotten(activity: &Activity, patience: Patience) {
    let mut seen = u64::MAX;
    loop {
        tokio::time::sleep(patience.half_closed).await;
        let now = activity.bytes.get();
        if activity.closed.get() > 0 && now == seen {
            return;
        }
        seen = now;
    }
}

#[allow(clippy::too_many_arguments)]
async fn carry(
    from: &TcpStream,
    to: &TcpStream,
    ahead: Vec<u8>,
    way: Way,
    flow: &FlowGuard,
    buffers: &Rc<Buffers>,
    activity: &Activity,
    patience: Patience,
) -> io::Result<()> {
    let count = |n: usize| {
        activity.bytes.set(activity.bytes.get() + n as u64);
        match way {
            Way::Up => flow.up(n as u64),
            Way::Down => flow.down(n as u64),
        }
    };
    let mut kept = Kept::new(buffers);
    kept.put(&ahead);
    drop(ahead);
    let mut turns = 0_u32;
    loop {
        while !kept.rest().is_empty() {
            writable(to, way, patience).await?;
            match to.try_write(kept.rest()) {
                Ok(n) => {
                    kept.took(n);
                    count(n);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        // First a place to put it, then the bytes: so that nothing has to be kept. No deadline here,
        // since nothing waits to be written.
        from.readable().await?;
        writable(to, way, patience).await?;
        let read = buffers.with(|shared| {
            let most = if buffers.kept.get() < MOST_KEPT { SHARED } else { SMALL };
            match from.try_read(&mut shared[..most]) {
                Ok(0) => Ok(Some(0)),
                Ok(n) => {
                    let wrote = match to.try_write(&shared[..n]) {
                        Ok(wrote) => wrote,
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
                        Err(e) => return Err(e),
                    };
                    count(wrote);
                    if wrote < n {
                        kept.put(&shared[wrote..n]);
                    }
                    Ok(Some(n))
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
                Err(e) => Err(e),
            }
        })?;
        if read == Some(0) {
            activity.closed.set(activity.closed.get() + 1);
            return match shutdown(to, Shutdown::Write) {
                // The other side is gone wholly: then there is nothing to tell it.
                Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(()),
                Err(e) => Err(e.into()),
            };
        }
        turns += 1;
        if turns.is_multiple_of(32) {
            // A fast flow must not keep the thread from the others.
            tokio::task::yield_now().await;
        }
    }
}

/// Waits for room. A destination that makes none is given up; a guest may be frozen and is waited for.
async fn writable(to: &TcpStream, way: Way, patience: Patience) -> io::Result<()> {
    if way == Way::Down {
        return to.writable().await;
    }
    tokio::select! {
        biased;
        ready = to.writable() => ready,
        () = sleep_until(Instant::now() + patience.stuck) => {
            Err(io::Error::new(io::ErrorKind::TimedOut, "the destination takes nothing"))
        }
    }
}
