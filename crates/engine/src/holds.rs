//! What an operation of this process relies on or is in the middle of making, by id: snapshots and
//! sandboxes that no reconciler may remove meanwhile.
//!
//! Invariant: a hold ends with its guard. It is a matter of this process alone: after a crash nobody is in
//! the middle of anything, and the rows say what is to be kept. Called by `live`, `forks`, `rollback` and
//! asked by the reconcilers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::inner::locked;

type Counts = Arc<Mutex<HashMap<String, usize>>>;

/// Ids that are held, and how often.
#[derive(Debug, Default, Clone)]
pub(crate) struct Holds(Counts);

/// Holds an id until it is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    counts: Counts,
    id: String,
}

impl Holds {
    /// Holds an id; others may hold it as well.
    pub(crate) fn hold(&self, id: &str) -> Hold {
        *locked(&self.0).entry(id.to_owned()).or_default() += 1;
        Hold { counts: Arc::clone(&self.0), id: id.to_owned() }
    }

    /// Whether somebody holds it.
    pub(crate) fn is_held(&self, id: &str) -> bool {
        locked(&self.0).contains_key(id)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut counts = locked(&self.counts);
        match counts.get_mut(&self.id) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                counts.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_guard_ends_a_hold() {
        let holds = Holds::default();
        let (first, second) = (holds.hold("a"), holds.hold("a"));
        assert!(holds.is_held("a") && !holds.is_held("b"));
        drop(first);
        assert!(holds.is_held("a"));
        drop(second);
        assert!(!holds.is_held("a"));
    }
}
