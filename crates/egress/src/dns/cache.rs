//! What was learnt about names, and what the guest was told.
//!
//! Invariant: bounded in entries, grown only when used, and nothing in it is older than [`LONGEST`]
//! (answers) or [`PINNED`] (pins). It holds raw answers: who uses one filters it by the rules of that
//! moment.
//!
//! Called by `resolver` alone.

use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;

use lru::LruCache;
use tokio::time::Instant;

use super::Family;
use crate::canonical::Name;

/// Shortest and longest life of a found address: shorter and a flood of queries goes through to the
/// name servers, longer and a moved name is missed.
pub(super) const SHORTEST: Duration = Duration::from_secs(5);
pub(super) const LONGEST: Duration = Duration::from_secs(60);
/// Longest life of "there is none".
const LONGEST_NONE: Duration = Duration::from_secs(10);
const SHORTEST_NONE: Duration = Duration::from_secs(1);
/// Life of a failure: only so long that a burst of askers costs one attempt.
const FAILURE: Duration = Duration::from_secs(1);
/// How long what a guest was told is preferred when its name is dialled.
const PINNED: Duration = Duration::from_secs(600);
const ENTRIES: usize = 512;
const PINS: usize = 512;
/// Most addresses of one pin.
const PINNED_ADDRESSES: usize = 16;

/// What asking for a name came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Addresses, unfiltered.
    Found(Rc<[IpAddr]>),
    /// None of this family.
    None {
        /// Whether the name exists.
        exists: bool,
    },
    /// Nobody could say. Why, in words: for the audit, not for the guest.
    Failed(Rc<str>),
    /// Too many questions: it was not asked.
    Limited,
}

/// An outcome and its end.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) outcome: Outcome,
    pub(super) until: Instant,
}

impl Known {
    /// Clamps the TTL that came with it.
    pub(super) fn new(outcome: Outcome, ttl: u32, now: Instant) -> Self {
        let ttl = Duration::from_secs(ttl.into());
        let life = match outcome {
            Outcome::Found(_) => ttl.clamp(SHORTEST, LONGEST),
            Outcome::None { .. } => ttl.clamp(SHORTEST_NONE, LONGEST_NONE),
            Outcome::Failed(_) | Outcome::Limited => FAILURE,
        };
        Self { outcome, until: now + life }
    }
}

struct Pin {
    addresses: Vec<IpAddr>,
    until: Instant,
}

/// See the module.
pub(super) struct Cache {
    // Unbounded as far as `lru` goes: its bounded form takes all its memory at once, and most
    // sessions ask for a dozen names.
    known: LruCache<(Name, Family), Known>,
    pins: LruCache<Name, Pin>,
}

impl Cache {
    pub(super) fn new() -> Self {
        Self { known: LruCache::unbounded(), pins: LruCache::unbounded() }
    }

    pub(super) fn get(&mut self, key: &(Name, Family), now: Instant) -> Option<Known> {
        let known = self.known.get(key)?;
        if known.until > now {
            return Some(known.clone());
        }
        self.known.pop(key);
        None
    }

    pub(super) fn put(&mut self, key: (Name, Family), known: Known) {
        self.known.put(key, known);
        while self.known.len() > ENTRIES {
            self.known.pop_lru();
        }
    }

    /// Notes what the guest was told; addresses that it was told before go behind.
    pub(super) fn pin(&mut self, name: &Name, told: &[IpAddr], now: Instant) {
        let mut addresses: Vec<IpAddr> = told.iter().copied().take(PINNED_ADDRESSES).collect();
        if let Some(pin) = self.pins.get_mut(name) {
            if pin.until > now {
                let room = PINNED_ADDRESSES - addresses.len();
                let before: Vec<_> = pin
                    .addresses
                    .iter()
                    .filter(|a| !told.contains(a))
                    .take(room)
                    .copied()
                    .collect();
                addresses.extend(before);
            }
            *pin = Pin { addresses, until: now + PINNED };
            return;
        }
        self.pins.put(name.clone(), Pin { addresses, until: now + PINNED });
        while self.pins.len() > PINS {
            self.pins.pop_lru();
        }
    }

    pub(super) fn pinned(&mut self, name: &Name, now: Instant) -> Vec<IpAddr> {
        match self.pins.get(name) {
            Some(pin) if pin.until > now => pin.addresses.clone(),
            Some(_) => {
                self.pins.pop(name);
                Vec::new()
            }
            None => Vec::new(),
        }
    }

    /// Forgets the names that `keep` refuses.
    pub(super) fn retain(&mut self, keep: &dyn Fn(&Name) -> bool) {
        let gone: Vec<_> = self
            .known
            .iter()
            .map(|(key, _)| key)
            .filter(|(name, _)| !keep(name))
            .cloned()
            .collect();
        for key in gone {
            self.known.pop(&key);
        }
        let gone: Vec<_> =
            self.pins.iter().map(|(name, _)| name).filter(|name| !keep(name)).cloned().collect();
        for name in gone {
            self.pins.pop(&name);
        }
    }
}
