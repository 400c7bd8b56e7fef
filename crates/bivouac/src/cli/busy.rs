//! What takes long, shown while it goes on: one module for every verb.
//!
//! Invariant: a picture is drawn on stderr only, only when that is a terminal (and not a dumb one) and never with
//! `--json`; without colours, so that `NO_COLOR` changes nothing. It is gone from the line when its [`Busy`] is
//! dropped, and work under [`guarded`] is dropped when a signal asks for an end. Elsewhere nothing is drawn: what
//! was done is told by the verbs, in lines of their own.

use std::io::{self, IsTerminal as _};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle, WeakProgressBar};

use super::args::Global;
use super::failure::{Failure, Outcome};
use super::output;
use super::signals::{Ask, Signals};
use super::snapshot::size;

/// Pictures a second.
const HZ: u8 = 8;
/// A picture without news moves all the same.
const TICK: Duration = Duration::from_millis(125);
/// What ends sooner shows nothing: a picture that only flashes tells nothing.
const UNSEEN: Duration = Duration::from_millis(300);

/// A verb was asked to end by a signal.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted(pub(crate) Ask);

/// Something that goes on.
#[derive(Debug)]
pub(crate) struct Busy(Option<ProgressBar>);

/// Whether pictures can be drawn at all.
pub(crate) fn drawable(global: &Global) -> bool {
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    !global.json && !dumb && io::stderr().is_terminal()
}

impl Busy {
    /// Nothing to see.
    pub(crate) fn nothing() -> Self {
        Self(None)
    }

    /// Nothing is known but what is being done.
    pub(crate) fn spinner(global: &Global, what: &str) -> Self {
        Self::start(global, None, "{spinner} {msg} {elapsed}", what)
    }

    /// So many bytes go by, of `total` when that is known.
    pub(crate) fn bytes(global: &Global, what: &str, total: Option<u64>) -> Self {
        let shape = match total {
            Some(_) => "{msg} [{bar:24}] {size} of {whole}, {rate}/s, {eta} left",
            None => "{spinner} {msg} {size}, {rate}/s",
        };
        Self::start(global, total, shape, what)
    }

    /// So many things are worked on, one after the other. One alone needs no picture of this.
    pub(crate) fn things(global: &Global, what: &str, total: usize) -> Self {
        if total < 2 {
            return Self(None);
        }
        let shape = "{msg} [{bar:24}] {pos} of {len}";
        Self::start(global, Some(total as u64), shape, what)
    }

    fn start(global: &Global, total: Option<u64>, shape: &str, what: &str) -> Self {
        if !drawable(global) {
            return Self(None);
        }
        // Nothing is drawn before it is known that this takes a while.
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
        bar.set_style(style(shape));
        bar.set_message(output::printable(what));
        drawn(&bar);
        let shown = bar.downgrade();
        // The only thread that may wait: verbs that fork draw with `image::Screen`.
        std::thread::spawn(move || {
            std::thread::sleep(UNSEEN);
            if let Some(bar) = shown.upgrade().filter(|bar| !bar.is_finished()) {
                bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(HZ));
                bar.enable_steady_tick(TICK);
            }
        });
        Self(Some(bar))
    }

    /// So many more bytes, or things.
    pub(crate) fn add(&self, count: u64) {
        if let Some(bar) = &self.0 {
            bar.inc(count);
        }
    }

    /// Says what is being done now.
    pub(crate) fn say(&self, what: &str) {
        if let Some(bar) = &self.0 {
            bar.set_message(output::printable(what));
        }
    }
}

/// What is drawn now: everything else that is written has to go around it.
static DRAWN: Mutex<Option<WeakProgressBar>> = Mutex::new(None);

/// Writes something while no picture is on the line.
pub(crate) fn aside<T>(write: impl FnOnce() -> T) -> T {
    let drawn = DRAWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match drawn.and_then(|bar| bar.upgrade()).filter(|bar| !bar.is_finished()) {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Takes a picture for the one that is drawn.
pub(crate) fn drawn(bar: &ProgressBar) {
    *DRAWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.downgrade());
}

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// A style whose sizes are written as everywhere in this program.
fn style(shape: &str) -> ProgressStyle {
    let style =
        ProgressStyle::with_template(shape).unwrap_or_else(|_| ProgressStyle::default_bar());
    style
        .progress_chars("=> ")
        .tick_chars("|/-\\ ")
        .with_key("size", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{}", size(state.pos()));
        })
        .with_key("whole", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{}", size(state.len().unwrap_or(0)));
        })
        .with_key("rate", |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            // A rate is no more than a guess; what does not fit a number is none.
            let _ = write!(out, "{}", size(state.per_sec().max(0.0) as u64));
        })
}

/// Does work that may be interrupted: a signal drops it, and with it what it shows and what it has not finished.
///
/// # Errors
/// Those of the work, or [`Interrupted`].
pub(crate) async fn guarded<T>(work: impl Future<Output = Outcome<T>>) -> Outcome<T> {
    let mut signals = Signals::new()?;
    tokio::select! {
        done = work => done,
        ask = signals.next() => Err(Failure::from(Interrupted(ask))),
    }
}

/// As [`guarded`], with a picture of what is being done.
///
/// # Errors
/// Those of the work, or [`Interrupted`].
pub(crate) async fn working<T>(
    global: &Global,
    what: &str,
    work: impl Future<Output = Outcome<T>>,
) -> Outcome<T> {
    let busy = Busy::spinner(global, what);
    let done = guarded(work).await;
    drop(busy);
    done
}

/// As [`guarded`], for work that blocks. It is left where it is, for the end of the process: it has to be of the
/// kind that may be killed at any moment.
///
/// # Errors
/// Those of the work, or [`Interrupted`].
pub(crate) async fn guarded_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Outcome<T> + Send + 'static,
) -> Outcome<T> {
    guarded(async {
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|error| Err(Failure::from(error)))
    })
    .await
}
