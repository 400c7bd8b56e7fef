//! Stops or pauses sandboxes in which nothing happens any more, as their idle rules say.
//!
//! Invariant: it acts only with the sandbox's lock, and looks once more when it has it; one that is paused, or
//! that somebody works on, is left alone.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bivouac_types::Millis;
use bivouac_types::life::Life;
use bivouac_types::session::SessionStatus;

use crate::error::Error;
use crate::inner::{Inner, Live};
use crate::lifecycle::{Keep, chain};

/// Between two looks, ms.
const PASS_MS: Millis = 1_000;
/// When a stop that failed is tried again, ms.
const RETRY_MS: Millis = 5_000;

pub(super) async fn run(inner: Arc<Inner>) {
    loop {
        inner.clock.sleep_until(inner.now().saturating_add(PASS_MS)).await;
        if inner.is_closing() {
            continue;
        }
        for live in inner.all_live() {
            if let Err(error) = look(&inner, &live).await {
                // It may have gone meanwhile.
                let session = live.handle.session();
                tracing::debug!(%session, cause = %chain(&error), "cannot look at its idle rule");
            }
        }
    }
}

/// Whether its rule says that it is over.
fn is_over(inner: &Inner, live: &Live, life: &Life) -> bool {
    let session = live.row().session;
    session.status == SessionStatus::Running
        && session.paused_at.is_none()
        && inner.now() >= live.idle_again.load(Ordering::Relaxed)
        && life.idle_stop_ms.is_some_and(|limit| inner.is_idle(&session, limit))
}

async fn look(inner: &Arc<Inner>, live: &Arc<Live>) -> Result<(), Error> {
    let life = inner.life_of(live).await?;
    if !is_over(inner, live, &life) {
        return Ok(());
    }
    let sandbox = live.row().session.sandbox_id;
    let Some(held) = inner.sandbox_locks.try_lock(sandbox.as_str()) else { return Ok(()) };
    if !is_over(inner, live, &life) {
        return Ok(());
    }
    let (worker, live) = (Arc::clone(inner), Arc::clone(live));
    inner.spawn(async move {
        let (inner, of) = (Arc::clone(&worker), Arc::clone(&live));
        let work = async move {
            let _held = held;
            act(&inner, &of, &life).await
        };
        if let Err(error) = worker.run(work).await {
            let session = live.handle.session();
            tracing::error!(%session, cause = %chain(&error), "cannot do what its idle rule says yet");
            let again = worker.now().saturating_add(RETRY_MS);
            live.idle_again.store(again, Ordering::Relaxed);
        }
    });
    Ok(())
}

async fn act(inner: &Arc<Inner>, live: &Arc<Live>, life: &Life) -> Result<(), Error> {
    let id = live.handle.session();
    tracing::info!(session = %id, idle_ms = life.idle_stop_ms, pause = life.idle_pause, "nothing happens in it");
    if life.idle_pause {
        return inner.pause_held(live, false).await.map(drop);
    }
    let ended = inner.end_session(id, Keep::AsConfigured).await;
    inner.counters.note(crate::Operation::Stop, &ended);
    ended.map(drop)
}
