//! Knows whether anybody needs the engine, for the engine that `bivouac run` starts.
//!
//! Invariant: idle means that no request was in flight, no session was alive and no operation was in
//! the middle of its steps during the whole span. Requests of `/health` do not count: they ask about the engine, not for anything.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{self, Next};
use bivouac_engine::Engine;
use tokio::time::{Instant, sleep};

/// How often sessions are looked at, at least.
const STEP: Duration = Duration::from_secs(5);

/// What was asked of the engine lately.
#[derive(Debug, Clone)]
pub(super) struct Activity(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    open: AtomicUsize,
    last: Mutex<Instant>,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self(Arc::new(Inner { open: AtomicUsize::new(0), last: Mutex::new(Instant::now()) }))
    }

    /// Watches the requests of `app`.
    pub(super) fn watch(&self, app: Router) -> Router {
        let activity = self.clone();
        app.layer(middleware::from_fn(move |request: Request, next: Next| {
            let busy = (request.uri().path() != "/health").then(|| Busy::new(&activity.0));
            async move {
                let answer = next.run(request).await;
                drop(busy);
                answer
            }
        }))
    }

    /// Returns once nothing was asked and the engine had nothing to do for `span`; without one, never.
    pub(super) async fn idle(&self, span: Option<Duration>, engine: &Engine) {
        // A create in the middle of its steps has no session yet, and must not find the door closed.
        self.idle_while(span, || engine.is_busy()).await;
    }

    async fn idle_while(&self, span: Option<Duration>, busy: impl Fn() -> bool) {
        let Some(span) = span else { return std::future::pending().await };
        let step = (span / 8).clamp(Duration::from_millis(10), STEP);
        loop {
            sleep(step).await;
            if self.0.open.load(Ordering::Acquire) > 0 || busy() {
                self.0.touch();
            } else if self.0.last().elapsed() >= span {
                return;
            }
        }
    }
}

impl Inner {
    fn touch(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn last(&self) -> Instant {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request in flight.
struct Busy(Arc<Inner>);

impl Busy {
    fn new(inner: &Arc<Inner>) -> Self {
        inner.open.fetch_add(1, Ordering::AcqRel);
        Self(inner.clone())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.touch();
        self.0.open.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    const SPAN: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn requests_and_sessions_keep_it_awake() {
        let activity = Activity::new();
        let begun = Instant::now();
        let alive = AtomicBool::new(true);
        let busy = Busy::new(&activity.0);
        let script = async {
            sleep(SPAN * 3).await;
            drop(busy);
            sleep(SPAN * 3).await;
            alive.store(false, Ordering::Relaxed);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = activity.idle_while(Some(SPAN), || alive.load(Ordering::Relaxed)) => {}
            () = script => {}
        }
        // Sessions are looked at in steps, so the last one may have ended a step later than seen.
        let waited = begun.elapsed() + STEP;
        assert!(waited >= SPAN * 7 && waited < SPAN * 8, "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_span_it_never_ends() {
        let activity = Activity::new();
        let idle = activity.idle_while(None, || false);
        assert!(tokio::time::timeout(SPAN * 1000, idle).await.is_err());
    }
}
