//! A token bucket: how often something may happen.
//!
//! Invariant: in any span of time no more than `burst + per_second * span` tokens are given.

use std::cell::Cell;

use tokio::time::Instant;

/// See the module.
#[derive(Debug)]
pub(crate) struct Bucket {
    per_second: f64,
    burst: f64,
    tokens: Cell<f64>,
    at: Cell<Option<Instant>>,
}

impl Bucket {
    pub(crate) fn new(per_second: u32, burst: u32) -> Self {
        let burst = f64::from(burst);
        Self { per_second: per_second.into(), burst, tokens: Cell::new(burst), at: Cell::new(None) }
    }

    /// Takes a token, if there is one.
    pub(crate) fn take(&self, now: Instant) -> bool {
        let before = self.at.replace(Some(now)).unwrap_or(now);
        let passed = now.saturating_duration_since(before).as_secs_f64();
        let tokens = passed.mul_add(self.per_second, self.tokens.get()).min(self.burst);
        let enough = tokens >= 1.0;
        self.tokens.set(if enough { tokens - 1.0 } else { tokens });
        enough
    }
}
