//! Time, as a seam: the only place of the engine that asks for it.
//!
//! Owns: [`Clock`], the system's and one that tests move by hand. Invariant: everything that waits
//! for a moment in this crate does so by [`Clock::sleep_until`], so a test never sleeps for real.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use bivouac_types::Millis;
use tokio::sync::watch;

/// The longest uninterrupted sleep: a wall clock that is set forward is noticed this soon.
const LONGEST_SLEEP: Duration = Duration::from_secs(15);

/// A source of time.
#[async_trait]
pub trait Clock: Send + Sync + std::fmt::Debug {
    /// Milliseconds since the Unix epoch.
    fn now(&self) -> Millis;
    /// Returns when `now` is `at` or later.
    async fn sleep_until(&self, at: Millis);
}

/// The host's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

#[async_trait]
impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the clock that everybody else asks")]
    fn now(&self) -> Millis {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Millis::try_from(since.as_millis()).unwrap_or(Millis::MAX)
    }

    async fn sleep_until(&self, at: Millis) {
        loop {
            let left = at.saturating_sub(self.now());
            let Ok(left) = u64::try_from(left) else { return };
            if left == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(left).min(LONGEST_SLEEP)).await;
        }
    }
}

/// A clock that stands still until it is moved: for tests.
#[derive(Debug)]
pub struct ManualClock {
    now: watch::Sender<Millis>,
}

impl ManualClock {
    /// A clock that shows `now`.
    #[must_use]
    pub fn new(now: Millis) -> Self {
        Self { now: watch::Sender::new(now) }
    }

    /// Moves it forward and wakes who waited for that moment.
    pub fn advance(&self, by: Millis) {
        self.now.send_modify(|now| *now += by);
    }
}

#[async_trait]
impl Clock for ManualClock {
    fn now(&self) -> Millis {
        *self.now.borrow()
    }

    async fn sleep_until(&self, at: Millis) {
        // The sender lives in `self`, so the wait cannot fail.
        let _ = self.now.subscribe().wait_for(|now| *now >= at).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_manual_clock_wakes_at_the_moment_and_not_before() {
        let clock = std::sync::Arc::new(ManualClock::new(1_000));
        let waiter = tokio::spawn({
            let clock = std::sync::Arc::clone(&clock);
            async move { clock.sleep_until(1_500).await }
        });
        clock.advance(499);
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        clock.advance(1);
        waiter.await.unwrap();
        assert_eq!(clock.now(), 1_500);
    }

    #[tokio::test]
    async fn the_system_clock_returns_at_once_for_the_past() {
        SystemClock.sleep_until(SystemClock.now() - 10).await;
    }
}
