//! Listens to the first bytes of a guest.
//!
//! Invariant: bounded in time, in bytes of one flow ([`crate::classify::MOST`]) and in bytes of all flows
//! that are listened to at once ([`Mouthful`]); who has sent nothing costs no buffer.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::relay::Buffers;
use crate::classify::{First, Look, MOST, look};

/// Bytes that all flows together may hold before they are decided.
const MOST_HEARD: usize = 8 * 1024 * 1024;

/// The sum of what was heard and not yet decided.
#[derive(Debug, Default)]
pub(super) struct Mouthful(Cell<usize>);

/// Bytes of a guest that were read and not yet sent anywhere.
#[derive(Debug)]
pub(super) struct Hearing {
    bytes: Vec<u8>,
    counted: usize,
    sum: Rc<Mouthful>,
}

/// What was heard.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// It is this.
    First(First),
    /// Not enough came in time.
    Late,
    /// The guest closed before it could be told.
    Closed,
    /// All flows together hold too much.
    Full,
}

impl Hearing {
    pub(super) fn new(sum: &Rc<Mouthful>) -> Self {
        Self { bytes: Vec::new(), counted: 0, sum: Rc::clone(sum) }
    }

    /// What was read.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Forgets the first `n` bytes: they are answered.
    pub(super) fn consume(&mut self, n: usize) {
        self.bytes.drain(..n);
    }

    /// Takes the bytes out, to be sent.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.sum.0.set(self.sum.0.get() - self.counted);
        self.counted = 0;
        std::mem::take(&mut self.bytes)
    }

    fn add(&mut self, bytes: &[u8]) -> bool {
        let sum = self.sum.0.get() + bytes.len();
        if sum > MOST_HEARD {
            return false;
        }
        self.sum.0.set(sum);
        self.counted += bytes.len();
        self.bytes.extend_from_slice(bytes);
        true
    }

    /// Listens until it can be told what it is. Dropping the future loses no byte.
    pub(super) async fn first(
        &mut self,
        guest: &TcpStream,
        buffers: &Buffers,
        until: Instant,
    ) -> io::Result<Heard> {
        let mut enough = 0;
        loop {
            if self.bytes.len() >= enough {
                match look(&self.bytes) {
                    Look::Is(first) => return Ok(Heard::First(first)),
                    Look::More(at_least) => enough = at_least,
                }
            }
            match self.more(guest, buffers, until).await? {
                None => {}
                Some(end) => return Ok(end),
            }
        }
    }

    /// Listens until the head of an HTTP message is complete, or there is as much as is looked at.
    pub(super) async fn head(
        &mut self,
        guest: &TcpStream,
        buffers: &Buffers,
        until: Instant,
    ) -> io::Result<()> {
        loop {
            let whole = self.bytes.windows(4).any(|w| w == b"\r\n\r\n")
                || self.bytes.windows(2).any(|w| w == b"\n\n");
            if whole || self.bytes.len() >= MOST {
                return Ok(());
            }
            if self.more(guest, buffers, until).await?.is_some() {
                return Ok(());
            }
        }
    }

    /// Reads once.
    async fn more(
        &mut self,
        guest: &TcpStream,
        buffers: &Buffers,
        until: Instant,
    ) -> io::Result<Option<Heard>> {
        match timeout_at(until, guest.readable()).await {
            Ok(ready) => ready?,
            Err(_) => return Ok(Some(Heard::Late)),
        }
        let room = MOST.saturating_sub(self.bytes.len()).max(1);
        buffers.with(|shared| {
            let most = room.min(shared.len());
            match guest.try_read(&mut shared[..most]) {
                Ok(0) => Ok(Some(Heard::Closed)),
                Ok(n) if self.add(&shared[..n]) => Ok(None),
                Ok(_) => Ok(Some(Heard::Full)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
                Err(e) => Err(e),
            }
        })
    }
}

impl Drop for Hearing {
    fn drop(&mut self) {
        self.sum.0.set(self.sum.0.get() - self.counted);
    }
}
