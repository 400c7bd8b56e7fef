//! Lets go of images that nothing lies on any more, so that `bivouac image rm` can remove them.
//!
//! Invariant: an image that a session may be starting from is kept: what the runtime holds is asked for
//! before the database is, and a session is recorded before it is launched.

use std::sync::Arc;

use bivouac_types::Millis;

use crate::error::Error;
use crate::inner::Inner;
use crate::lifecycle::chain;

/// The longest time between two looks, ms.
const LOOK_MS: Millis = 600_000;
/// How long an image has to be without use, ms: sandboxes that come one after the other share a mount.
const UNUSED_MS: Millis = 2_000;

pub(super) async fn run(inner: Arc<Inner>) {
    loop {
        if let Err(error) = inner.release_images(UNUSED_MS).await {
            tracing::error!(cause = %chain(&error), "cannot let go of unused images yet");
        }
        tokio::select! {
            () = inner.clock.sleep_until(inner.now().saturating_add(LOOK_MS)) => {}
            () = inner.images_changed.notified() => {}
        }
    }
}

impl Inner {
    /// One look, for what nobody asks for during `unused` ms. Also the last thing before the engine lets
    /// go of the host.
    pub(crate) async fn release_images(&self, unused: Millis) -> Result<(), Error> {
        let (mark, kept) = self.runtime.kept_images().await?;
        if kept.is_empty() {
            return Ok(());
        }
        if unused > 0 {
            self.clock.sleep_until(self.now().saturating_add(unused)).await;
        }
        let mut unused = Vec::new();
        for reference in kept {
            if !self.db.image_is_used(&reference).await? {
                unused.push(reference);
            }
        }
        if unused.is_empty() {
            Ok(())
        } else {
            Ok(self.runtime.release_images(mark, &unused).await?)
        }
    }
}
