//! The live view of `top`: a terminal that is drawn on until somebody ends it.
//!
//! Invariant: whatever ends it (a key, a signal, an engine that is gone, an error), the terminal is as it was before:
//! its own screen, its cursor, its line discipline. A change of its size is drawn at once. Part of `top`.

use std::io::{self, IsTerminal as _, Read as _};

use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr,
};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::{LOOK, Row, SHORTEST, picture};
use crate::cli::args::{SortBy, Top};
use crate::cli::failure::{ExitStatus, Explain as _, Outcome};
use crate::cli::signals::Signals;
use crate::cli::snapshot::size;
use crate::cli::{output, table};

/// To a screen of its own, without a cursor; and back.
const ENTER: &str = "\u{1b}[?1049h\u{1b}[?25l";
const LEAVE: &str = "\u{1b}[?25h\u{1b}[?1049l";
/// To the corner; what is drawn covers what was there.
const HOME: &str = "\u{1b}[H";
/// Clears to the end of the line, of the screen, and all of it.
const CLEAR_LINE: &str = "\u{1b}[K";
const CLEAR_REST: &str = "\u{1b}[J";
const CLEAR: &str = "\u{1b}[2J";
/// The second line.
const KEYS: &str = "sort: c CPU, m memory, d disk, n network, p pids, u uptime, a name; q ends";

/// What somebody at the keyboard wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Quit,
    Sort(SortBy),
}

fn key(byte: u8) -> Option<Key> {
    Some(match byte {
        // Ctrl-D too.
        b'q' | b'Q' | 4 => Key::Quit,
        b'c' => Key::Sort(SortBy::Cpu),
        b'm' => Key::Sort(SortBy::Memory),
        b'd' => Key::Sort(SortBy::Disk),
        b'n' => Key::Sort(SortBy::Network),
        b'p' => Key::Sort(SortBy::Pids),
        b'u' => Key::Sort(SortBy::Uptime),
        b'a' => Key::Sort(SortBy::Name),
        _ => return None,
    })
}

/// The terminal while it is drawn on. It is as before when this is dropped.
struct Screen {
    /// How its input was, when that is a terminal.
    before: Option<Termios>,
}

impl Screen {
    fn enter() -> Outcome<Self> {
        let mut before = None;
        if io::stdin().is_terminal() {
            let own = tcgetattr(io::stdin());
            let own = own.explain(|| "could not ask the terminal how it is set".to_owned())?;
            let mut keys = own.clone();
            // Keys come one by one and are not shown; Ctrl-C stays what it is. What would leave the terminal as it
            // is now (Ctrl-Z, Ctrl-\\) does nothing.
            keys.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
            keys.special_codes[SpecialCodeIndex::VSUSP] = 0;
            keys.special_codes[SpecialCodeIndex::VQUIT] = 0;
            keys.special_codes[SpecialCodeIndex::VMIN] = 1;
            keys.special_codes[SpecialCodeIndex::VTIME] = 0;
            tcsetattr(io::stdin(), OptionalActions::Now, &keys)
                .explain(|| "could not set the terminal".to_owned())?;
            before = Some(own);
        }
        // From here on, so that a terminal that takes nothing is restored too.
        let screen = Self { before };
        output::text(ENTER)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = output::text(LEAVE);
        if let Some(before) = &self.before {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}

/// Keys, read by a thread of their own: it is left behind at the end.
fn keys() -> mpsc::Receiver<Key> {
    let (sender, receiver) = mpsc::channel(8);
    if io::stdin().is_terminal() {
        std::thread::spawn(move || {
            for byte in io::stdin().lock().bytes() {
                let Ok(byte) = byte else { return };
                if let Some(key) = key(byte)
                    && sender.blocking_send(key).is_err()
                {
                    return;
                }
            }
        });
    }
    receiver
}

fn watch(kind: SignalKind) -> Outcome<Signal> {
    signal(kind).explain(|| "could not watch for signals".to_owned())
}

/// Shows what `look` sees until somebody ends it.
pub(super) async fn run(args: &Top, mut look: impl AsyncFnMut() -> Outcome<Vec<Row>>) -> Outcome {
    let mut signals = Signals::new()?;
    let mut quit = watch(SignalKind::quit())?;
    let mut resized = watch(SignalKind::window_change())?;
    let screen = Screen::enter()?;
    let mut keys = keys();
    let pause = args.interval.max(SHORTEST);
    let mut sort = args.sort;
    let mut rows = None;
    // The first picture comes soon, whatever the pause is.
    let mut next = Instant::now() + LOOK.min(pause);
    let ended = loop {
        tokio::select! {
            () = sleep_until(next) => {
                let seen = tokio::select! {
                    seen = look() => seen,
                    ask = signals.next() => break Ok(ExitStatus::of_signal(ask.number())),
                    Some(Key::Quit) = keys.recv() => break Ok(ExitStatus::Success),
                };
                match seen {
                    Ok(seen) => rows = Some(seen),
                    Err(failure) => break Err(failure),
                }
                next = Instant::now() + pause;
                show(args, sort, rows.as_deref_mut(), false)?;
            }
            ask = signals.next() => break Ok(ExitStatus::of_signal(ask.number())),
            _ = quit.recv() => break Ok(ExitStatus::of_signal(3)),
            _ = resized.recv() => show(args, sort, rows.as_deref_mut(), true)?,
            Some(key) = keys.recv() => match key {
                Key::Quit => break Ok(ExitStatus::Success),
                Key::Sort(by) => {
                    sort = by;
                    show(args, sort, rows.as_deref_mut(), false)?;
                }
            },
        }
    };
    drop(screen);
    ended
}

fn show(args: &Top, sort: SortBy, rows: Option<&mut [Row]>, anew: bool) -> Outcome<()> {
    let Some(rows) = rows else { return Ok(()) };
    rows.sort_by_cached_key(|row| row.key(sort));
    let place = output::terminal_size().unwrap_or((80, 24));
    let start = if anew { CLEAR } else { "" };
    output::text(&format!("{start}{}", draw(args, sort, rows, place)))
}

/// The picture for a terminal of so many columns and lines: never more of either.
fn draw(args: &Top, sort: SortBy, rows: &[Row], (wide, high): (usize, usize)) -> String {
    let memory: u64 = rows.iter().map(|row| row.number("memoryBytes")).sum();
    // Not `sum`: of nothing it is -0.
    let cpu = rows.iter().fold(0.0, |sum, row| sum + row.cpu);
    let rate = |of: fn(&Row) -> Option<u64>| size(rows.iter().filter_map(of).sum());
    let summary = format!(
        "{} running   CPU {cpu:.1} %   memory {}   in {}/s   out {}/s   by {sort:?}",
        rows.len(),
        size(memory),
        rate(|row| row.received),
        rate(|row| row.sent),
    );
    let (columns, cells) = picture(args, rows);
    let table = table::render_in(&columns, cells, wide);
    let mut text = HOME.to_owned();
    let lines = [summary.as_str(), KEYS, ""].into_iter().chain(table.lines());
    for (index, line) in lines.take(high).enumerate() {
        if index > 0 {
            text.push_str("\r\n");
        }
        text.push_str(table::beginning(line, wide));
        text.push_str(CLEAR_LINE);
    }
    text.push_str(CLEAR_REST);
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use std::time::Duration;

    use unicode_width::UnicodeWidthStr as _;

    use super::super::{Looks, Row};
    use super::*;

    fn rows(count: usize) -> Vec<Row> {
        let stats: Vec<_> = (0..count)
            .map(|n| {
                json!({ "sandbox": format!("box-with-a-long-name-{n}"), "session": n.to_string(),
                "at": 1000, "startedAt": 0, "cpuMs": n, "memoryBytes": 5_000_000, "pids": 3,
                "networkReceivedBytes": 10, "networkSentBytes": 20 })
            })
            .collect();
        Looks::default().rows(&json!({ "stats": stats }))
    }

    fn args() -> Top {
        let interval = Duration::from_secs(2);
        Top { all_namespaces: false, sort: SortBy::Cpu, interval, once: false }
    }

    #[test]
    fn a_picture_is_never_larger_than_the_terminal() {
        for place in [(80, 24), (200, 50), (40, 10), (12, 3), (1, 1)] {
            let text = draw(&args(), SortBy::Cpu, &rows(100), place);
            let text = text.replace(HOME, "").replace(CLEAR_LINE, "").replace(CLEAR_REST, "");
            let lines: Vec<&str> = text.split("\r\n").collect();
            assert!(lines.len() <= place.1, "{place:?}: {} lines", lines.len());
            assert!(lines.iter().all(|line| line.width() <= place.0), "{place:?}: {text}");
        }
    }

    #[test]
    fn keys_sort_and_end() {
        assert_eq!(key(b'q'), Some(Key::Quit));
        assert_eq!(key(b'n'), Some(Key::Sort(SortBy::Network)));
        assert_eq!(key(b'z'), None);
    }
}
