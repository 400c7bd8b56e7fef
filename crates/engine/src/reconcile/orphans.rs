//! Goes on with what an error interrupted: ends, deletions, leftovers.
//!
//! Invariant: it touches nothing that somebody works on (the sandbox's lock is held then).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bivouac_types::Millis;
use bivouac_types::session::SessionStatus;

use crate::error::Error;
use crate::inner::Inner;
use crate::lifecycle::chain;

/// Between two passes, ms.
const PASS_MS: Millis = 30_000;
/// Passes between two looks at what the runtime has.
const SWEEP_EVERY: u32 = 20;

pub(super) async fn run(inner: Arc<Inner>) {
    for pass_number in 1_u32.. {
        inner.clock.sleep_until(inner.now().saturating_add(PASS_MS)).await;
        let left = inner.leftovers.swap(false, Ordering::AcqRel);
        let sweep = left || pass_number % SWEEP_EVERY == 0;
        if let Err(error) = pass(&inner, sweep).await {
            tracing::error!(cause = %chain(&error), "cannot clean up yet");
            inner.leftovers.fetch_or(sweep, Ordering::AcqRel);
        }
    }
}

async fn pass(inner: &Arc<Inner>, sweep: bool) -> Result<(), Error> {
    for row in inner.db.unsettled_sessions(&inner.config.node).await? {
        let id = &row.session.id;
        // One whose processes are gone was not settled when they went: the database was away.
        if row.session.status == SessionStatus::Running && inner.runs(id) {
            continue;
        }
        let sandbox = row.session.sandbox_id.as_str();
        let Some(_held) = inner.sandbox_locks.try_lock(sandbox) else { continue };
        if let Err(error) = inner.settle_any(id).await {
            tracing::error!(session = %id, cause = %chain(&error), "cannot settle a session yet");
        }
    }
    inner.finish_deletions(false).await?;
    inner.settle_mounts().await?;
    if sweep { inner.sweep().await } else { Ok(()) }
}
