//! Sandboxes that live for as long as somebody holds them.
//!
//! A lease is a promise of one connection. Invariant: a sandbox that was held is deleted a moment
//! after its last lease has gone, unless it is held again by then; one that nobody ever held, and all
//! of them while the engine ends, are left alone. Leases are not recorded: after a restart the
//! holders come back, and a holder that is gone for good leaves the session's timeout.

use std::collections::HashMap;
use std::sync::Arc;

use bivouac_store::Deleting;
use bivouac_types::Millis;
use bivouac_types::access::Verb;
use bivouac_types::id::SandboxId;
use bivouac_types::name::Namespace;

use crate::Engine;
use crate::api::Principal;
use crate::error::Error;
use crate::inner::{Inner, locked};
use crate::lifecycle::chain;

/// How long a sandbox outlives its last lease, ms: a holder whose connection broke comes back.
pub(crate) const GRACE_MS: Millis = 5_000;

/// Who holds what.
#[derive(Debug, Default)]
pub(crate) struct Leases(HashMap<SandboxId, Held>);

#[derive(Debug, Default)]
struct Held {
    holders: usize,
    /// Grows with each lease, so that an old end of grace is told from the present one.
    turn: u64,
}

impl Leases {
    fn take(&mut self, id: &SandboxId) {
        let held = self.0.entry(id.clone()).or_default();
        held.holders += 1;
        held.turn += 1;
    }

    /// Answers the turn when it was the last holder.
    fn drop_one(&mut self, id: &SandboxId) -> Option<u64> {
        let held = self.0.get_mut(id)?;
        held.holders = held.holders.saturating_sub(1);
        (held.holders == 0).then_some(held.turn)
    }

    /// Forgets a sandbox that nobody has held since that turn. Answers whether it was so.
    fn give_up(&mut self, id: &SandboxId, turn: u64) -> bool {
        let over = self.0.get(id).is_some_and(|held| held.holders == 0 && held.turn == turn);
        if over {
            self.0.remove(id);
        }
        over
    }
}

/// Holds a sandbox until it is dropped.
#[derive(Debug)]
pub struct Lease {
    inner: Arc<Inner>,
    id: SandboxId,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(turn) = locked(&self.inner.leases).drop_one(&self.id) else { return };
        // Outside of a runtime the process is ending, and its sandboxes go on.
        if self.inner.is_closing() || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let (inner, id) = (Arc::clone(&self.inner), self.id.clone());
        let at = inner.now().saturating_add(GRACE_MS);
        self.inner.spawn(async move {
            inner.clock.sleep_until(at).await;
            if inner.is_closing() || !locked(&inner.leases).give_up(&id, turn) {
                return;
            }
            if let Err(error) = inner.remove_held(&id).await {
                tracing::error!(sandbox = %id, cause = %chain(&error), "cannot delete a sandbox that nobody holds");
            }
        });
    }
}

impl Inner {
    async fn remove_held(self: &Arc<Self>, id: &SandboxId) -> Result<(), Error> {
        let Some(row) = self.db.sandbox(id).await?.filter(|row| row.deleting == Deleting::No)
        else {
            return Ok(());
        };
        tracing::info!(sandbox = %row.sandbox.name, "nobody holds it any more: deleting it");
        let inner = Arc::clone(self);
        let id = id.clone();
        self.run(async move { inner.remove_known(&id, Deleting::Yes).await.map(drop) }).await
    }
}

impl Engine {
    /// Holds a sandbox: it is deleted when this lease, and every other one of it, is gone.
    ///
    /// # Errors
    /// 404.
    pub async fn hold(&self, who: &Principal, ns: &Namespace, name: &str) -> Result<Lease, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        let id = self.inner.named(ns, name).await?.sandbox.id;
        tracing::debug!(by = %who.name, sandbox = %name, "hold");
        locked(&self.inner.leases).take(&id);
        Ok(Lease { inner: Arc::clone(&self.inner), id })
    }
}
