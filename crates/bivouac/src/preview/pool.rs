//! Connections into sandboxes, kept for the next request.
//!
//! Invariants: a connection is of one session and is used by no other; how many are kept, and for how long, is
//! bounded, and so is how many requests one port has in hand. Called by `preview::carry`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use bivouac_engine::{Error, ErrorKind, GuestStream, Reached};
use bivouac_types::id::SessionId;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::time::Instant;

use super::body::Upload;
use super::left;

/// A connection that takes requests.
pub(super) type Sender = SendRequest<Upload>;

/// How long a connection is kept. Programs close unused ones after some seconds (Node's after five): it is better
/// that we do.
const KEEP: Duration = Duration::from_secs(4);
/// Most that are kept for one port, and in all.
const KEEP_ONE: usize = 64;
const KEEP_ALL: usize = 1024;
/// Most requests that one port has in hand.
const OPEN: usize = 1024;
/// How long a connect may take.
const CONNECT: Duration = Duration::from_secs(10);
/// How often a port that is waited for is tried.
const TRY: Duration = Duration::from_millis(100);

/// A port of a session.
pub(super) type Key = (SessionId, u16);

/// Connections that nobody uses, and counts of those that somebody does.
#[derive(Default)]
pub(super) struct Pool {
    idle: Mutex<HashMap<Key, Vec<(Instant, Sender)>>>,
    open: Mutex<HashMap<Key, usize>>,
    sweeping: AtomicBool,
}

/// One request in hand.
pub(super) struct Open {
    pool: Arc<Pool>,
    key: Key,
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut open = self.pool.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.key);
            }
        }
    }
}

impl Pool {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Counts a request. `None`: the port has too many already.
    pub(super) fn open(self: &Arc<Self>, key: &Key) -> Option<Open> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(key.clone()).or_default();
        if *count >= OPEN {
            return None;
        }
        *count += 1;
        Some(Open { pool: Arc::clone(self), key: key.clone() })
    }

    /// A connection that is not used, the last that was.
    pub(super) fn take(&self, key: &Key) -> Option<Sender> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle.get_mut(key)?;
        let found = loop {
            match kept.pop() {
                Some((since, sender)) if sender.is_ready() && since.elapsed() < KEEP => {
                    break Some(sender);
                }
                Some(_) => {}
                None => break None,
            }
        };
        if kept.is_empty() {
            idle.remove(key);
        }
        found
    }

    /// Keeps a connection once it is ready for the next request.
    pub(super) fn give_back(self: &Arc<Self>, key: Key, mut sender: Sender) {
        let pool = Arc::clone(self);
        tokio::spawn(async move {
            if let Ok(Ok(())) = tokio::time::timeout(KEEP, sender.ready()).await {
                pool.keep(key, sender);
            }
        });
    }

    fn keep(self: &Arc<Self>, key: Key, sender: Sender) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.values().map(Vec::len).sum::<usize>() >= KEEP_ALL {
            return;
        }
        let kept = idle.entry(key).or_default();
        if kept.len() < KEEP_ONE {
            kept.push((Instant::now(), sender));
        }
        if !self.sweeping.swap(true, Ordering::AcqRel) {
            tokio::spawn(sweep(Arc::downgrade(self)));
        }
    }

    /// Lets go of what is too old or closed. Answers whether anything is left.
    fn tidy(&self) -> bool {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|_, kept| {
            kept.retain(|(since, sender)| !sender.is_closed() && since.elapsed() < KEEP);
            !kept.is_empty()
        });
        if idle.is_empty() {
            // While the map is locked: whoever keeps the next one starts the next sweep.
            self.sweeping.store(false, Ordering::Release);
        }
        !idle.is_empty()
    }
}

async fn sweep(pool: Weak<Pool>) {
    loop {
        tokio::time::sleep(KEEP / 4).await;
        match pool.upgrade() {
            Some(pool) if pool.tidy() => {}
            _ => return,
        }
    }
}

/// A new connection. With `patience` a port that nothing listens on yet is tried until then.
///
/// # Errors
/// What the engine says of the port; 504 when the connect takes too long.
pub(super) async fn connect(reached: &Reached, patience: Option<Instant>) -> Result<Sender, Error> {
    let socket = loop {
        match tokio::time::timeout(CONNECT, reached.dial()).await {
            Ok(Ok(socket)) => break socket,
            Ok(Err(error)) if error.code == super::carry::NOT_LISTENING => {
                let more = patience.is_some_and(|until| left(until) > TRY);
                if !more {
                    return Err(error);
                }
                tokio::time::sleep(TRY).await;
            }
            Ok(Err(error)) => return Err(error),
            Err(_) => {
                let message = "The sandbox has not taken the connection in time.";
                return Err(Error::new(ErrorKind::Timeout, "timeout", message));
            }
        }
    };
    let bad = |cause: std::io::Error| {
        Error::internal("The connection into the sandbox could not be used.").because(cause)
    };
    let stream = TokioIo::new(GuestStream::new(socket).map_err(bad)?);
    let (sender, connection) =
        http1::handshake(stream).await.map_err(|e| bad(std::io::Error::other(e)))?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a connection into a sandbox ended with an error");
        }
    });
    Ok(sender)
}
