//! Ctrl-C and SIGTERM: the run ends early, and still cleans up.
//!
//! Invariant: a signal only raises a flag; every loop looks at it, so what was started is ended by
//! those who started it. Watched from `main`.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

static RAISED: AtomicBool = AtomicBool::new(false);

/// From here on signals raise the flag instead of ending this process.
pub(crate) fn watch() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut interrupt, mut terminate) = {
        let _inside = runtime.enter();
        let of = |kind| signal(kind).context("watch for signals");
        (of(SignalKind::interrupt())?, of(SignalKind::terminate())?)
    };
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        RAISED.store(true, Ordering::Relaxed);
    });
    Ok(())
}

/// An error once a signal has come.
pub(crate) fn check() -> Result<()> {
    if RAISED.load(Ordering::Relaxed) {
        bail!("interrupted; what had been measured is dropped");
    }
    Ok(())
}
