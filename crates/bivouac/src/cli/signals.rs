//! Ctrl-C and its relatives, for verbs that have something to pass on or to clean up.
//!
//! Invariant: once [`Signals`] exists, SIGINT, SIGTERM and SIGHUP do not end the process by
//! themselves; whoever holds it must act on them. A signal that the caller had ignored (`nohup`,
//! a background job of a script) stays ignored.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::failure::{Explain as _, Outcome};

/// A signal that asks this process to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Ctrl-C.
    Interrupt,
    /// `kill`.
    Terminate,
    /// The terminal is gone.
    Hangup,
}

impl Ask {
    /// The signal's number.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Hangup => 1,
            Self::Interrupt => 2,
            Self::Terminate => 15,
        }
    }
}

/// The signals that came.
#[derive(Debug)]
pub(crate) struct Signals {
    interrupt: Option<Signal>,
    terminate: Option<Signal>,
    hangup: Option<Signal>,
}

impl Signals {
    /// Takes the signals over.
    pub(crate) fn new() -> Outcome<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let ignored = ignored(&status);
        let take = |ask: Ask, kind| {
            if ignored & (1 << (ask.number() - 1)) != 0 {
                return Ok(None);
            }
            signal(kind).map(Some).explain(|| "could not watch for signals".to_owned())
        };
        Ok(Self {
            interrupt: take(Ask::Interrupt, SignalKind::interrupt())?,
            terminate: take(Ask::Terminate, SignalKind::terminate())?,
            hangup: take(Ask::Hangup, SignalKind::hangup())?,
        })
    }

    /// Waits for the next one.
    pub(crate) async fn next(&mut self) -> Ask {
        tokio::select! {
            () = arrival(&mut self.interrupt) => Ask::Interrupt,
            () = arrival(&mut self.terminate) => Ask::Terminate,
            () = arrival(&mut self.hangup) => Ask::Hangup,
        }
    }
}

async fn arrival(signal: &mut Option<Signal>) {
    let came = match signal {
        Some(signal) => signal.recv().await.is_some(),
        None => false,
    };
    if !came {
        std::future::pending::<()>().await;
    }
}

/// The mask of ignored signals out of `/proc/self/status`.
fn ignored(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_is_read() {
        let status = "Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n";
        let mask = ignored(status);
        assert_ne!(mask & (1 << (Ask::Hangup.number() - 1)), 0);
        assert_eq!(mask & (1 << (Ask::Interrupt.number() - 1)), 0);
        assert_eq!(ignored(""), 0);
    }
}
