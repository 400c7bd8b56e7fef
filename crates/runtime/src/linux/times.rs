//! How long the steps of all launches took.
//!
//! Invariant: the names are those of the launch's own steps, so there are few. Filled by the runtime
//! after each launch, read by whoever shows them.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bivouac_types::meter::{Histogram, Times};

/// The launch as serve sees it: with the upper, the fork of a shim and the way there and back.
const TOTAL: &str = "total";

/// One histogram for each step.
#[derive(Debug, Default)]
pub(super) struct StepTimes(RwLock<BTreeMap<String, Arc<Histogram>>>);

impl StepTimes {
    /// Adds the steps of one launch, µs.
    pub(super) fn add(&self, steps: &[(String, u64)]) {
        for (step, us) in steps {
            self.of(step).observe_us(*us);
        }
    }

    /// Adds the time of one whole launch.
    pub(super) fn total(&self, time: Duration) {
        self.of(TOTAL).observe(time);
    }

    fn of(&self, step: &str) -> Arc<Histogram> {
        if let Some(known) = self.0.read().unwrap_or_else(PoisonError::into_inner).get(step) {
            return known.clone();
        }
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        all.entry(step.to_owned()).or_default().clone()
    }

    /// All of them, by name.
    pub(super) fn read(&self) -> Vec<(String, Times)> {
        let all = self.0.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|(step, times)| (step.clone(), times.read())).collect()
    }
}
