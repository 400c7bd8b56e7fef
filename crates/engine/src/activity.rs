//! When something last happened in a sandbox: what the idle rule asks.
//!
//! Owns: a time for each sandbox, and a count of what is going on in it. Invariant: a sandbox with a hold is
//! never idle; the time only grows. What counts as activity is listed in docs/boxes.md. Told by every part of
//! the engine that works in a sandbox for somebody.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use bivouac_types::Millis;
use bivouac_types::id::SandboxId;

use crate::clock::Clock;
use crate::inner::locked;

/// Of all sandboxes.
#[derive(Debug)]
pub(crate) struct Activity {
    clock: Arc<dyn Clock>,
    of: Mutex<HashMap<SandboxId, Seen>>,
}

#[derive(Debug, Default)]
struct Seen {
    last: Millis,
    holds: usize,
}

impl Activity {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { clock, of: Mutex::default() })
    }

    /// Something happened.
    pub(crate) fn touch(&self, sandbox: &SandboxId) {
        let now = self.clock.now();
        let mut of = locked(&self.of);
        let seen = of.entry(sandbox.clone()).or_default();
        seen.last = seen.last.max(now);
    }

    /// Something is going on until the hold is dropped.
    pub(crate) fn hold(self: &Arc<Self>, sandbox: &SandboxId) -> ActivityHold {
        self.touch(sandbox);
        locked(&self.of).entry(sandbox.clone()).or_default().holds += 1;
        ActivityHold { activity: Arc::clone(self), sandbox: sandbox.clone() }
    }

    /// When something last happened; the present while something is going on. `None`: never seen.
    pub(crate) fn last(&self, sandbox: &SandboxId) -> Option<Millis> {
        let of = locked(&self.of);
        let seen = of.get(sandbox)?;
        Some(if seen.holds > 0 { self.clock.now() } else { seen.last })
    }

    /// The sandbox is gone.
    pub(crate) fn forget(&self, sandbox: &SandboxId) {
        let mut of = locked(&self.of);
        if of.get(sandbox).is_some_and(|seen| seen.holds == 0) {
            of.remove(sandbox);
        }
    }
}

/// Keeps a sandbox from being idle.
#[derive(Debug)]
pub struct ActivityHold {
    activity: Arc<Activity>,
    sandbox: SandboxId,
}

impl Drop for ActivityHold {
    fn drop(&mut self) {
        self.activity.touch(&self.sandbox);
        if let Some(seen) = locked(&self.activity.of).get_mut(&self.sandbox) {
            seen.holds = seen.holds.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    #[test]
    fn a_held_sandbox_is_never_idle() {
        let clock = Arc::new(ManualClock::new(1000));
        let activity = Activity::new(clock.clone());
        let id = SandboxId::new(1, [0; 10]);
        assert_eq!(activity.last(&id), None);
        activity.touch(&id);
        clock.advance(50);
        assert_eq!(activity.last(&id), Some(1000));
        let hold = activity.hold(&id);
        let second = activity.hold(&id);
        clock.advance(50);
        assert_eq!(activity.last(&id), Some(1100));
        drop(hold);
        clock.advance(50);
        assert_eq!(activity.last(&id), Some(1150));
        activity.forget(&id);
        drop(second);
        clock.advance(50);
        assert_eq!(activity.last(&id), Some(1150));
        activity.forget(&id);
        assert_eq!(activity.last(&id), None);
    }
}
