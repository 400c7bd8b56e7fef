//! Sandboxes that a request starts.
//!
//! Invariants: only a request that was let in starts anything; one start is under way for a sandbox, however many
//! ask; a start that failed is told once and not tried again by a page that asks by itself. Called by `preview`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::response::Response;
use bivouac_engine::{Error, ErrorKind, Pass, PreviewRoute, Reached};
use tokio::time::Instant;

use super::Preview;
use super::pages::Asker;

/// How long a start, and the program after it, are waited for.
const PATIENCE: Duration = Duration::from_secs(60);
/// Most starts that are remembered.
const MOST: usize = 1024;

#[derive(Debug)]
struct Start {
    since: Instant,
    /// A task of ours does it, and has not ended.
    under_way: bool,
    failed: Option<String>,
}

/// Starts of the last minute, by sandbox.
#[derive(Debug, Default)]
pub(super) struct Waking(Mutex<HashMap<String, Start>>);

fn key(route: &PreviewRoute) -> String {
    format!("{}/{}/{}", route.namespace.team, route.namespace.project, route.name)
}

/// What there is to be done about a sandbox that does not run.
enum Next {
    /// Start it.
    Start,
    /// Somebody does.
    Wait,
    /// It was tried.
    Failed(String),
}

impl Waking {
    fn next(&self, route: &PreviewRoute, by_task: bool) -> Next {
        let mut starts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        starts.retain(|_, start| start.under_way || start.since.elapsed() < PATIENCE);
        let key = key(route);
        if let Some(start) = starts.get(&key) {
            if start.under_way {
                return Next::Wait;
            }
            if let Some(why) = start.failed.clone() {
                starts.remove(&key);
                return Next::Failed(why);
            }
        }
        if starts.len() < MOST || starts.contains_key(&key) {
            let start = Start { since: Instant::now(), under_way: by_task, failed: None };
            starts.insert(key, start);
        }
        Next::Start
    }

    fn ended(&self, route: &PreviewRoute, outcome: Result<(), Error>) {
        let mut starts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(start) = starts.get_mut(&key(route)) {
            start.under_way = false;
            start.since = Instant::now();
            start.failed = outcome.err().map(|error| error.message);
        }
    }

    /// Until when a program of a sandbox that was just started is waited for.
    pub(super) fn until(&self, route: &PreviewRoute) -> Option<Instant> {
        let starts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let until = starts.get(&key(route))?.since + PATIENCE;
        (until > Instant::now()).then_some(until)
    }
}

/// Whether that is said of a sandbox that a start would bring back.
fn is_down(error: &Error) -> bool {
    matches!(error.kind, ErrorKind::Gone | ErrorKind::Transition)
}

impl Preview {
    /// The way into the sandbox, which is started if that is its rule; else what to answer.
    pub(super) async fn way(
        self: &Arc<Self>,
        pass: &Pass,
        asker: &Asker,
    ) -> Result<Reached, Response> {
        match self.engine.reach(pass, false).await {
            Ok(reached) => Ok(reached),
            Err(error) if is_down(&error) => self.wake(pass, asker, &error).await,
            Err(error) => Err(asker.failed(&error)),
        }
    }

    async fn wake(
        self: &Arc<Self>,
        pass: &Pass,
        asker: &Asker,
        down: &Error,
    ) -> Result<Reached, Response> {
        let route = pass.route();
        match self.engine.wakes(pass).await {
            Ok(true) => {}
            Ok(false) => return Err(asker.stopped(route, &down.message)),
            Err(error) => return Err(asker.failed(&error)),
        }
        let next = self.waking.next(route, asker.navigates);
        if asker.navigates {
            match next {
                Next::Failed(why) => return Err(asker.stopped(route, &why)),
                Next::Wait => {}
                Next::Start => {
                    let (preview, pass) = (Arc::clone(self), pass.clone());
                    tokio::spawn(async move {
                        let outcome = preview.engine.reach(&pass, true).await.map(drop);
                        preview.waking.ended(pass.route(), outcome);
                    });
                }
            }
            return Err(asker.waiting(route));
        }
        match tokio::time::timeout(PATIENCE, self.engine.reach(pass, true)).await {
            Ok(Ok(reached)) => Ok(reached),
            Ok(Err(error)) if is_down(&error) => Err(asker.stopped(route, &error.message)),
            Ok(Err(error)) => Err(asker.failed(&error)),
            Err(_) => Err(asker.late(route)),
        }
    }
}
