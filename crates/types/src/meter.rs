//! Histograms of times, for whoever wants to show them.
//!
//! Invariant: an observation is three additions and never waits; the bounds are the same everywhere,
//! so that series of different parts can be compared. Filled by `runtime`, `store` and `engine`, read
//! by the executable's `/metrics`.

use std::sync::atomic::{AtomicU64, Ordering};

/// Upper bounds of the buckets, µs. One more bucket takes what is above.
pub const BOUNDS_US: [u64; 16] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 2_500_000, 10_000_000, 60_000_000,
];

/// How often something took how long.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

/// A histogram at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Times {
    /// Observations by bucket, each bucket for itself; the last one has no upper bound.
    pub buckets: [u64; BOUNDS_US.len() + 1],
    /// All of them together, µs.
    pub sum_us: u64,
}

impl Histogram {
    /// Adds one observation.
    pub fn observe_us(&self, us: u64) {
        let bucket = BOUNDS_US.partition_point(|bound| *bound < us);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Adds one observation.
    pub fn observe(&self, time: std::time::Duration) {
        self.observe_us(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    /// What was observed so far.
    #[must_use]
    pub fn read(&self) -> Times {
        let buckets = std::array::from_fn(|i| self.buckets[i].load(Ordering::Relaxed));
        Times { buckets, sum_us: self.sum_us.load(Ordering::Relaxed) }
    }
}

impl Times {
    /// How many observations there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn an_observation_is_in_the_one_bucket_that_holds_it(us: u64) {
            let histogram = Histogram::default();
            histogram.observe_us(us);
            let times = histogram.read();
            assert_eq!((times.count(), times.sum_us), (1, us));
            let at = times.buckets.iter().position(|n| *n == 1).unwrap();
            assert!(at == BOUNDS_US.len() || us <= BOUNDS_US[at]);
            assert!(at == 0 || us > BOUNDS_US[at - 1]);
        }
    }

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let histogram = Histogram::default();
        histogram.observe(std::time::Duration::from_micros(100));
        histogram.observe_us(101);
        assert_eq!(histogram.read().buckets[..2], [1, 1]);
    }
}
