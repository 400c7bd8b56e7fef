//! One lock per name, made when wanted and gone when nobody holds it or waits.
//!
//! Invariant: whoever does a multi-step change of a sandbox in this process holds the lock of its
//! id; the compare-and-set on the rows guards against everybody else.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

type Map = Arc<Mutex<HashMap<String, Arc<AsyncMutex<()>>>>>;

/// A set of named locks.
#[derive(Debug, Default, Clone)]
pub(crate) struct Locks(Map);

/// Holds one of them.
#[derive(Debug)]
pub(crate) struct Held {
    map: Map,
    name: String,
    guard: Option<OwnedMutexGuard<()>>,
}

impl Locks {
    fn entry(&self, name: &str) -> Arc<AsyncMutex<()>> {
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(map.entry(name.to_owned()).or_default())
    }

    /// Waits for the lock.
    pub(crate) async fn lock(&self, name: &str) -> Held {
        let guard = self.entry(name).lock_owned().await;
        Held { map: Arc::clone(&self.0), name: name.to_owned(), guard: Some(guard) }
    }

    /// Takes the lock if it is free.
    pub(crate) fn try_lock(&self, name: &str) -> Option<Held> {
        let guard = self.entry(name).try_lock_owned().ok()?;
        Some(Held { map: Arc::clone(&self.0), name: name.to_owned(), guard: Some(guard) })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.guard = None;
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        if map.get(&self.name).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            map.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lock_excludes_and_leaves_nothing_behind() {
        let locks = Locks::default();
        let held = locks.lock("a").await;
        assert!(locks.try_lock("a").is_none());
        assert!(locks.try_lock("b").is_some());
        let waiter = tokio::spawn({
            let locks = locks.clone();
            async move { drop(locks.lock("a").await) }
        });
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        drop(held);
        waiter.await.unwrap();
        assert!(locks.0.lock().unwrap().is_empty());
    }
}
