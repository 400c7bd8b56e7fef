//! Stops sessions whose time is over, with the snapshot that their sandbox wants.
//!
//! Invariant: every running session that is not paused is in the queue once, under its present deadline; the
//! queue is rebuilt by adoption, so time that passed while the engine was away counts. A session whose sandbox
//! has an idle rule gets more time instead.

use std::sync::Arc;

use bivouac_types::Millis;
use bivouac_types::id::SessionId;

use crate::error::Error;
use crate::inner::{Inner, locked};
use crate::lifecycle::chain;

/// When a stop that failed is tried again, ms.
const RETRY_MS: Millis = 5_000;

pub(super) async fn run(inner: Arc<Inner>) {
    loop {
        let next = locked(&inner.deadlines).first().cloned();
        let Some((at, id)) = next else {
            inner.deadlines_changed.notified().await;
            continue;
        };
        if at > inner.now() {
            tokio::select! {
                () = inner.clock.sleep_until(at) => {}
                () = inner.deadlines_changed.notified() => {}
            }
            continue;
        }
        locked(&inner.deadlines).remove(&(at, id.clone()));
        let worker = Arc::clone(&inner);
        inner.spawn(async move { stop(&worker, &id).await });
    }
}

async fn stop(inner: &Arc<Inner>, id: &SessionId) {
    // It may have been given more time in the meantime.
    if let Some(live) = inner.live(id) {
        let row = live.row();
        // It may have been given more time in the meantime. One that is paused comes back when it goes on.
        if row.session.paused_at.is_some() || row.session.deadline() > inner.now() {
            inner.set_deadline(id, None, &row);
            return;
        }
    }
    if let Err(error) = over(inner, id).await {
        tracing::error!(session = %id, cause = %chain(&error), "cannot stop it yet");
        if inner.live(id).is_some() {
            locked(&inner.deadlines).insert((inner.now().saturating_add(RETRY_MS), id.clone()));
            inner.deadlines_changed.notify_one();
        }
    }
}

async fn over(inner: &Arc<Inner>, id: &SessionId) -> Result<(), Error> {
    if let Some(live) = inner.live(id)
        && inner.extend_for_idle(&live).await?
    {
        return Ok(());
    }
    tracing::info!(session = %id, "its time is over");
    inner.stop_shared(id).await.map(drop)
}
