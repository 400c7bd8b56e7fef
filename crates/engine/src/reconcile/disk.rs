//! Keeps the disk limits of running sessions true.
//!
//! What a session is charged for is not what it holds (see [`bivouac_runtime::DiskLevel`]), and what it
//! holds is known only after a walk through its files. So each session is looked at from time to time,
//! which costs a few small reads, and walked through when its room runs out by the charge, when what it is
//! charged for has fallen since a walk (a snapshot that kept it may be gone, and the limit would then give
//! more than there is), or when it started from a snapshot that nobody has measured yet.
//!
//! Invariant: a session is walked through at most for a twentieth of the time, and a walk that changes
//! nothing makes the next one rarer. Also tells running sandboxes how much room the storage has.

use std::collections::HashMap;
use std::sync::Arc;

use bivouac_runtime::{DiskFit, DiskLevel};
use bivouac_types::Millis;
use bivouac_types::id::SessionId;
use bivouac_types::session::SessionStatus;

use crate::error::Error;
use crate::inner::{Inner, Live};
use crate::lifecycle::chain;

/// Between two passes, ms. A session may be looked at less often.
const PASS_MS: Millis = 1_000;
/// The longest time without a look at a session, ms.
const LOOK_MS: Millis = 30_000;
/// Nobody writes more in a millisecond.
const BYTES_PER_MS: u64 = 2 << 20;
/// The longest pause between two walks that change nothing, ms.
const WALK_MS: Millis = 60_000;
/// Walks may take so much of the time: one part in so many.
const SHARE: Millis = 20;

/// What is remembered of a session.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Known {
    /// Not before this time.
    look_at: Millis,
    /// Not before this time.
    walk_at: Millis,
    /// The pause after the last walk, ms.
    pause: Millis,
    /// The highest charge since the last walk that set a limit. `None`: there was none.
    peak: Option<u64>,
    /// What it started from was not measured.
    guessed: bool,
}

/// Whether a session that may hold `bytes` is to be walked through.
fn wants_walk(bytes: u64, level: DiskLevel, known: &Known) -> bool {
    let low = level.left() < bytes / 10;
    let slack = (bytes / 64).max(1);
    let fell = known.peak.is_some_and(|peak| level.charged.saturating_add(slack) < peak);
    low || fell || known.guessed || level.left() > bytes
}

/// When a session that has so much room is looked at again: before it can have used it up.
fn next_look(now: Millis, level: DiskLevel) -> Millis {
    let room = Millis::try_from(level.left() / 2 / BYTES_PER_MS).unwrap_or(LOOK_MS);
    now.saturating_add(room.clamp(PASS_MS, LOOK_MS))
}

impl Known {
    /// After a walk that took `took` ms and found what it found.
    fn walked(&mut self, now: Millis, took: Millis, before: DiskLevel, fit: DiskFit, bytes: u64) {
        let moved = before.left().abs_diff(fit.level.left()) > bytes / 64;
        let shortest = took.saturating_mul(SHARE).clamp(PASS_MS, WALK_MS);
        self.pause =
            if moved { shortest } else { self.pause.saturating_mul(2).clamp(shortest, WALK_MS) };
        self.walk_at = now.saturating_add(self.pause);
        self.peak = Some(fit.level.charged);
        self.guessed = false;
    }
}

pub(super) async fn run(inner: Arc<Inner>) {
    let mut known = HashMap::new();
    let mut told = 0;
    loop {
        inner.clock.sleep_until(inner.now().saturating_add(PASS_MS)).await;
        let live = inner.all_live();
        known.retain(|id, _| live.iter().any(|live| live.handle.session() == id));
        let now = inner.now();
        if live.is_empty() {
            continue;
        }
        if now.saturating_sub(told) >= 5 * PASS_MS {
            told = now;
            if let Err(error) = inner.runtime.tell_space().await {
                tracing::warn!(%error, "cannot tell sandboxes how much room there is");
            }
        }
        for live in live {
            let id = live.handle.session().clone();
            if let Err(error) = one(&inner, &live, &mut known).await {
                // It may have ended meanwhile; a tree that changes too fast is tried again.
                tracing::debug!(session = %id, cause = %chain(&error), "cannot look at its disk");
                let known = known.entry(id).or_default();
                known.look_at = now.saturating_add(5 * PASS_MS);
            }
        }
    }
}

async fn one(
    inner: &Arc<Inner>,
    live: &Live,
    known: &mut HashMap<SessionId, Known>,
) -> Result<(), Error> {
    let row = live.row();
    let id = &row.session.id;
    let now = inner.now();
    if row.session.status != SessionStatus::Running {
        return Ok(());
    }
    let state = match known.get_mut(id) {
        Some(state) => state,
        None => {
            let guessed = match &row.session.source_snapshot_id {
                Some(source) => {
                    inner.db.snapshot(source).await?.is_some_and(|row| !row.snapshot.measured)
                }
                None => false,
            };
            known.entry(id.clone()).or_insert(Known { guessed, ..Known::default() })
        }
    };
    if state.look_at > now {
        return Ok(());
    }
    let Some(level) = inner.runtime.disk_level(id).await? else {
        state.look_at = now.saturating_add(LOOK_MS);
        return Ok(());
    };
    state.look_at = next_look(now, level);
    if let Some(peak) = &mut state.peak {
        *peak = level.charged.max(*peak);
    }
    let bytes = inner.disk_of(&row.session.resources);
    if !wants_walk(bytes, level, state) {
        state.pause = 0;
        return Ok(());
    }
    if state.walk_at > now {
        return Ok(());
    }
    let begun = inner.now();
    let Some(fit) = inner.runtime.fit_disk(id, bytes).await? else { return Ok(()) };
    let took = inner.now().saturating_sub(begun);
    state.walked(inner.now(), took, level, fit, bytes);
    state.look_at = next_look(inner.now(), fit.level);
    tracing::debug!(session = %id, written = fit.written, left = fit.level.left(), "disk limit set anew");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(charged: u64, limit: u64) -> DiskLevel {
        DiskLevel { charged, limit }
    }

    #[test]
    fn who_is_walked_through() {
        let fresh = Known::default();
        assert!(!wants_walk(1000, level(0, 1000), &fresh));
        assert!(!wants_walk(1000, level(900, 1000), &fresh), "a tenth is left");
        assert!(wants_walk(1000, level(901, 1000), &fresh), "its room runs out");
        let guessed = Known { guessed: true, ..fresh };
        assert!(wants_walk(1000, level(0, 1000), &guessed));
        // After a walk: what it was charged for came back, whoever kept it.
        let walked = Known { peak: Some(500), ..fresh };
        assert!(!wants_walk(1000, level(490, 1400), &walked));
        assert!(wants_walk(1000, level(400, 1400), &walked));
        assert!(wants_walk(1000, level(0, 1001), &fresh), "never more than all");
    }

    #[test]
    fn walks_that_change_nothing_become_rare() {
        let mut known = Known::default();
        let full = DiskFit { written: 1000, level: level(1000, 1000) };
        let mut pauses = Vec::new();
        for _ in 0..8 {
            known.walked(0, 3, level(1000, 1000), full, 1000);
            pauses.push(known.pause);
        }
        assert_eq!(pauses, [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]);
        // One that gave room makes the next one prompt; a long walk makes all of them rare.
        let roomy = DiskFit { written: 100, level: level(1000, 1900) };
        known.walked(0, 3, level(1000, 1000), roomy, 1000);
        assert_eq!(known.pause, 1000);
        known.walked(0, 500, level(1000, 1000), roomy, 1000);
        assert_eq!(known.pause, 10_000);
    }

    proptest::proptest! {
        #[test]
        fn a_look_comes_before_the_room_is_used_up(charged in 0u64.., limit in 0u64..) {
            let level = level(charged, limit);
            let next = next_look(0, level);
            proptest::prop_assert!((PASS_MS..=LOOK_MS).contains(&next));
            if next > PASS_MS {
                proptest::prop_assert!(u64::try_from(next).unwrap() * BYTES_PER_MS <= level.left());
            }
        }
    }
}
