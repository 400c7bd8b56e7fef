//! What the composition root adds to each shim: the keeper of its gate.
//!
//! The runtime makes the gate and carries messages; who decides about what goes through it is a
//! stranger to it, handed over as a [`GateKeeper`] when the executable starts. Invariant: without a
//! keeper, or for a session that was launched without a configuration, the gate stays closed. Called by
//! the shim; implemented by `bivouac::role::shim`.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::rc::Rc;

use tokio::sync::Notify;

use crate::gate::Gate;

/// Makes the keeper of one session. Known to the zygote, so it holds nothing of any session.
pub trait GateKeeper: Sync {
    /// Called in the shim while that is privileged and single-threaded, before init builds its root;
    /// a launch waits for it. `config` is the session's [`crate::LaunchSpec::egress`].
    ///
    /// # Errors
    /// Ends the launch.
    fn prepare(&self, config: &[u8]) -> io::Result<Box<dyn Prepared>>;
}

/// The keeper of one session, before the sandbox runs.
pub trait Prepared {
    /// Certificates that the sandbox has to trust.
    fn trust(&self) -> Trust;
    /// Begins work: inside of the shim's `LocalSet`, confined. The gate is closed until the keeper opens
    /// it. `out` takes what it has to say unasked, `audit` its lines.
    fn serve(
        self: Box<Self>,
        gate: Gate,
        out: Outbox,
        audit: Box<dyn AuditFile>,
    ) -> Rc<dyn Deliver>;
}

/// A message's way to its answer.
pub type Delivery = Pin<Box<dyn Future<Output = Vec<u8>>>>;

/// A keeper at work.
pub trait Deliver {
    /// Takes a message from serve; the future answers it.
    fn deliver(&self, message: Vec<u8>) -> Delivery;
}

/// Takes audit lines.
pub trait AuditFile {
    /// Appends one line, with its line end. Never waits and never fails: when the storage takes no
    /// more, lines are lost.
    fn append(&self, line: &[u8]);
}

/// Certificates for the inside, PEM.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trust {
    /// The session's own authority.
    pub session: Vec<u8>,
    /// More roots for the bundle.
    pub extra: Vec<u8>,
}

/// The keeper of an executable that has none: refuses to launch what needs one.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoKeeper;

impl GateKeeper for NoKeeper {
    fn prepare(&self, _config: &[u8]) -> io::Result<Box<dyn Prepared>> {
        Err(io::Error::other("this executable has no egress broker: launch without `egress`"))
    }
}

/// Most bytes of messages that wait for a serve.
const OUTBOX_BYTES: usize = 256 << 10;
/// Most messages that wait for a serve.
const OUTBOX_MESSAGES: usize = 1024;

/// Unasked messages on their way to serve. Kept while none is connected; when there are too many, the
/// oldest are dropped. Clones are the same box.
#[derive(Clone, Default)]
pub struct Outbox(Rc<Waiting>);

#[derive(Default)]
struct Waiting {
    messages: RefCell<VecDeque<Vec<u8>>>,
    bytes: Cell<usize>,
    wake: Notify,
}

impl std::fmt::Debug for Outbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outbox").field("bytes", &self.0.bytes.get()).finish_non_exhaustive()
    }
}

impl Outbox {
    /// Puts a message in.
    pub fn send(&self, message: Vec<u8>) {
        self.0.bytes.set(self.0.bytes.get() + message.len());
        self.0.messages.borrow_mut().push_back(message);
        self.bound();
        self.0.wake.notify_one();
    }

    fn bound(&self) {
        let mut messages = self.0.messages.borrow_mut();
        while messages.len() > 1
            && (messages.len() > OUTBOX_MESSAGES || self.0.bytes.get() > OUTBOX_BYTES)
        {
            let oldest = messages.pop_front().map_or(0, |message| message.len());
            self.0.bytes.set(self.0.bytes.get().saturating_sub(oldest));
        }
    }

    /// Waits until there is something to take.
    pub(crate) async fn filled(&self) {
        while self.0.messages.borrow().is_empty() {
            self.0.wake.notified().await;
        }
    }

    /// Wakes the next who waits: this one has been woken and takes nothing.
    pub(crate) fn pass_on(&self) {
        self.0.wake.notify_one();
    }

    /// The oldest message.
    pub(crate) fn take(&self) -> Option<Vec<u8>> {
        let message = self.0.messages.borrow_mut().pop_front()?;
        self.0.bytes.set(self.0.bytes.get().saturating_sub(message.len()));
        Some(message)
    }

    /// Puts a message back that could not be sent.
    pub(crate) fn put_back(&self, message: Vec<u8>) {
        self.0.bytes.set(self.0.bytes.get() + message.len());
        self.0.messages.borrow_mut().push_front(message);
        self.bound();
        self.0.wake.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_takes_is_bounded_and_the_newest_stays() {
        let outbox = Outbox::default();
        for n in 0..3 * OUTBOX_MESSAGES {
            outbox.send(n.to_string().into_bytes());
        }
        assert_eq!(outbox.0.messages.borrow().len(), OUTBOX_MESSAGES);
        outbox.send(vec![7; OUTBOX_BYTES + 1]);
        assert_eq!(outbox.take().map(|m| m.len()), Some(OUTBOX_BYTES + 1), "alone, it stays");
        assert_eq!((outbox.take(), outbox.0.bytes.get()), (None, 0));
    }

    #[test]
    fn messages_keep_their_order_when_a_send_fails() {
        let outbox = Outbox::default();
        outbox.send(b"one".to_vec());
        outbox.send(b"two".to_vec());
        let first = outbox.take().unwrap();
        outbox.put_back(first);
        assert_eq!(outbox.take(), Some(b"one".to_vec()));
        assert_eq!(outbox.take(), Some(b"two".to_vec()));
    }
}
