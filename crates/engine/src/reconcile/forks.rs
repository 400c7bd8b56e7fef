//! Deletes snapshots that only live forks started from, once no sandbox would start from them any more, and
//! measures snapshots that an earlier engine could not.

use std::sync::Arc;

use bivouac_types::Millis;

use crate::inner::Inner;
use crate::lifecycle::chain;

/// The longest time between two looks, ms.
const LOOK_MS: Millis = 300_000;
/// After a failure, ms.
const RETRY_MS: Millis = 30_000;

pub(super) async fn run(inner: Arc<Inner>) {
    if let Err(error) = inner.measure_all().await {
        tracing::error!(cause = %chain(&error), "cannot measure snapshots yet");
    }
    loop {
        let wait = match inner.drop_unwanted_forks().await {
            Ok(()) => LOOK_MS,
            Err(error) => {
                tracing::error!(cause = %chain(&error), "cannot delete snapshots of forks yet");
                RETRY_MS
            }
        };
        tokio::select! {
            () = inner.clock.sleep_until(inner.now().saturating_add(wait)) => {}
            () = inner.forks_changed.notified() => {}
        }
    }
}
