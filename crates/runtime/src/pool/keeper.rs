//! What a pool needs from time to time: a thread that makes it grow, empties the trash and looks after the
//! check.
//!
//! Invariant: it holds nothing of the pool open while it waits, and has ended before the pool is unmounted.
//! Owned by `pool`.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::loopfile::LoopFile;
use super::record::{self, CheckState};
use super::scrub::Scrub;
use super::{PoolMode, RESERVE, free_bytes, migrate, trash};

/// Between two looks, where nothing is likely to have changed.
const CALM: Duration = Duration::from_secs(5);

/// The thread, as its owner sees it.
#[derive(Debug)]
pub(super) struct Keeper {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stop: bool,
    /// There is work that cannot wait for the next look.
    woken: bool,
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn go_on(&self) -> bool {
        !self.state().stop
    }
}

/// What the thread works on.
pub(super) struct Work {
    pub(super) data: PathBuf,
    pub(super) root: PathBuf,
    pub(super) mode: PoolMode,
    pub(super) file: LoopFile,
    /// Check the pool: nobody closed it.
    pub(super) check: bool,
    /// Places of other modes, left of a migration.
    pub(super) leftovers: Vec<PathBuf>,
}

impl Keeper {
    /// # Errors
    /// When no thread can be made.
    pub(super) fn start(work: Work) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let thread = std::thread::Builder::new().name("pool".to_owned());
        let thread = thread.spawn(move || keep(work, &theirs))?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// There is something in the trash.
    pub(super) fn wake(&self) {
        self.shared.state().woken = true;
        self.shared.changed.notify_all();
    }

    /// Ends it. Idempotent.
    pub(super) fn stop(&self) {
        self.shared.state().stop = true;
        self.shared.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop();
    }
}

fn keep(mut work: Work, shared: &Shared) {
    let mut scrub = if work.check { begin_check(&work) } else { None };
    let mut low = false;
    loop {
        if work.mode == PoolMode::Folder
            && let Err(e) = trash::empty(&work.root, &|| shared.go_on())
        {
            tracing::warn!("the pool's trash cannot be emptied: {e}");
        }
        for place in work.leftovers.drain(..) {
            migrate::remove_leftover(&place, &|| shared.go_on());
        }
        let wait = if work.mode == PoolMode::Loop { grow(&work) } else { CALM };
        low = watch_host(&work, low);
        if let Some(check) = scrub.as_mut().and_then(Scrub::ended) {
            scrub = None;
            match check.state {
                CheckState::Clean => tracing::info!("storage pool: {}", check.in_words()),
                _ => tracing::error!("storage pool: {}", check.in_words()),
            }
            if let Err(e) = record::set_check(&work.data, &check) {
                tracing::warn!("what the check of the pool found cannot be kept: {e}");
            }
        }
        let wait = if scrub.is_some() { wait.min(Duration::from_millis(200)) } else { wait };
        let state = shared.state();
        let waited = shared.changed.wait_timeout_while(state, wait, |s| !s.stop && !s.woken);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.stop {
            break;
        }
        state.woken = false;
    }
    if let Some(scrub) = scrub {
        // Its record says "running": the next engine begins again.
        scrub.end();
    }
}

fn begin_check(work: &Work) -> Option<Scrub> {
    tracing::warn!("the storage pool was not closed by the last engine: it is being checked");
    let started = Scrub::start(&work.root).and_then(|scrub| {
        record::set_check(&work.data, &scrub.running())?;
        Ok(scrub)
    });
    started.inspect_err(|e| tracing::warn!("the pool cannot be checked: {e}")).ok()
}

fn grow(work: &Work) -> Duration {
    match work.file.grow_if_low(&work.root) {
        Ok(Some(size)) => tracing::info!("the storage pool has grown to {} MiB", size >> 20),
        Ok(None) => {}
        Err(e) => tracing::warn!("the storage pool cannot grow: {e}"),
    }
    work.file.next_look(&work.root).unwrap_or(CALM)
}

/// Tells once when the host gets short: writes in sandboxes would fail at last.
fn watch_host(work: &Work, was_low: bool) -> bool {
    let Ok(free) = free_bytes(&work.data) else { return was_low };
    let low = free < RESERVE / 2;
    if low && !was_low {
        tracing::error!(
            "the file system of {} has {} MiB left: make room, or writes in sandboxes will fail",
            work.data.display(),
            free >> 20
        );
    }
    low
}
