//! Deletes snapshots whose time is over, and what nobody will ask for any more: records and logs of
//! sessions that ended long ago, and of ephemeral sandboxes.
//!
//! Invariant: the newest session of a sandbox is never touched, so a sandbox is never without one.

use std::sync::Arc;

use bivouac_store::{Deleting, Durability};
use bivouac_types::Millis;

use crate::error::Error;
use crate::inner::Inner;
use crate::lifecycle::chain;

/// The longest time between two looks, ms.
const LOOK_MS: Millis = 3_600_000;
/// After a failure, ms.
const RETRY_MS: Millis = 30_000;
/// The shortest time between two looks, ms.
const AGAIN_MS: Millis = 1_000;
/// How long the record of an ephemeral sandbox is kept after its end, ms (14 days): nothing can be
/// started from it any more.
const EPHEMERAL_MS: Millis = 14 * 86_400_000;

/// How long the records and logs of earlier sessions are kept, ms (30 days, as snapshots): without
/// an end, a box that is resumed every day would fill the pool with logs.
const SESSION_MS: Millis = 30 * 86_400_000;

pub(super) async fn run(inner: Arc<Inner>) {
    loop {
        let now = inner.now();
        let next = match pass(&inner).await {
            Ok(next) => next.unwrap_or(Millis::MAX).min(now.saturating_add(LOOK_MS)),
            Err(error) => {
                tracing::error!(cause = %chain(&error), "cannot expire snapshots yet");
                now.saturating_add(RETRY_MS)
            }
        };
        tokio::select! {
            () = inner.clock.sleep_until(next) => {}
            () = inner.expiry_changed.notified() => {}
        }
    }
}

/// Deletes what is due. Answers when the next is.
async fn pass(inner: &Arc<Inner>) -> Result<Option<Millis>, Error> {
    let looked = loop {
        let now = inner.now();
        let due = inner.db.snapshots_expired(now).await?;
        let mut gone = 0;
        for row in due {
            let id = &row.snapshot.id;
            // Somebody starts from it at this moment.
            if inner.holds.is_held(id.as_str()) {
                continue;
            }
            let mut tx = inner.db.begin(Durability::Power).await?;
            let expired = tx.expire_snapshot(id, now).await?;
            tx.commit().await?;
            if expired {
                tracing::info!(snapshot = %id, "snapshot expired");
                inner.drop_snapshot(id).await?;
                gone += 1;
            }
        }
        if gone == 0 {
            break now;
        }
    };
    let before = inner.now().saturating_sub(SESSION_MS);
    loop {
        let old = inner.db.sessions_ended_before(before).await?;
        if old.is_empty() {
            break;
        }
        for row in old {
            let id = &row.session.id;
            inner.runtime.remove_logs(id).await?;
            inner.db.remove_session(id).await?;
        }
    }
    let before = inner.now().saturating_sub(EPHEMERAL_MS);
    for row in inner.db.ephemeral_ended_before(before).await? {
        let id = row.sandbox.id;
        let Some(_held) = inner.sandbox_locks.try_lock(id.as_str()) else { continue };
        let row = inner.mark_deleting(&id, Deleting::Yes).await?;
        inner.finish_delete(&row).await?;
    }
    // One that is held is due and still there. Counted from that look: what has become due since, however
    // long the rest took, does not wait another time.
    let soonest = looked.saturating_add(AGAIN_MS);
    Ok(inner.db.next_snapshot_expiry().await?.map(|next| next.max(soonest)))
}
