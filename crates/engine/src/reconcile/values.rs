//! Removes header values that no policy names any more.

use std::sync::Arc;

use bivouac_types::Millis;

use crate::inner::Inner;
use crate::lifecycle::chain;

/// Between two looks, ms.
const LOOK_MS: Millis = 3_600_000;

pub(super) async fn run(inner: Arc<Inner>) {
    loop {
        match inner.sweep_values().await {
            Ok(0) => {}
            Ok(removed) => tracing::debug!(removed, "removed unused header values"),
            Err(error) => {
                tracing::error!(cause = %chain(&error), "cannot remove unused header values yet");
            }
        }
        inner.clock.sleep_until(inner.now().saturating_add(LOOK_MS)).await;
    }
}
