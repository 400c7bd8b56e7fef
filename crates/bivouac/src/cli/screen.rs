//! This process's terminal while it shows another one: raw mode, size, keys.
//!
//! Invariant: the terminal is given back as it was found, however this process ends but by SIGKILL: the guard
//! does it, a hook does it when something panics, and signals end through the guard. Used by `cli::attach`.

use std::io::{self, IsTerminal as _, Read as _};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::sync::mpsc;

use super::failure::{Explain as _, Failure, Outcome};

/// How the terminal was found, while it is in raw mode.
static FOUND: Mutex<Option<Termios>> = Mutex::new(None);
/// Bytes that are read at once.
const PIECE: usize = 16 << 10;

/// Gives the terminal back.
fn restore() {
    let found = FOUND.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(found) = found {
        // There is nobody to tell: it may be gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &found);
    }
}

/// Whether standard input is a terminal; else why it has to be one.
pub(crate) fn check() -> Outcome<()> {
    if io::stdin().is_terminal() {
        return Ok(());
    }
    Err(Failure::usage("standard input is not a terminal, and a terminal needs one")
        .hint("exec and run pass standard input without a terminal with -i alone"))
}

/// The terminal in raw mode: every key comes as it is. Given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Screen(());

impl Screen {
    /// Takes it.
    pub(crate) fn take() -> Outcome<Self> {
        check()?;
        let found =
            tcgetattr(io::stdin()).explain(|| "could not read the terminal's modes".to_owned())?;
        let mut raw = found.clone();
        raw.make_raw();
        *FOUND.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            before(info);
        }));
        let screen = Self(());
        tcsetattr(io::stdin(), OptionalActions::Drain, &raw)
            .explain(|| "could not set the terminal's modes".to_owned())?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Columns and lines of the terminal that standard input is.
pub(crate) fn size() -> (u16, u16) {
    let within = |value: u16| (1..=4096).contains(&value);
    match tcgetwinsize(io::stdin()) {
        Ok(size) if within(size.ws_col) && within(size.ws_row) => (size.ws_col, size.ws_row),
        _ => (80, 24),
    }
}

/// Reads keys on a thread of its own: a read of a terminal cannot be cancelled. Ends when the terminal does.
pub(crate) fn keys() -> mpsc::Receiver<Bytes> {
    let (sender, receiver) = mpsc::channel(4);
    std::thread::spawn(move || {
        let mut buffer = vec![0u8; PIECE];
        loop {
            match io::stdin().lock().read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => {
                    let piece = Bytes::copy_from_slice(&buffer[..count]);
                    if sender.blocking_send(piece).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
    receiver
}

/// Finds `~.` at the beginning of a line, as ssh does.
#[derive(Debug)]
pub(crate) struct Escapes {
    line_start: bool,
    tilde: bool,
}

impl Default for Escapes {
    fn default() -> Self {
        Self { line_start: true, tilde: false }
    }
}

impl Escapes {
    /// What of these keys is for the other side, and whether the user leaves behind them.
    pub(crate) fn filter(&mut self, keys: &[u8]) -> (Vec<u8>, bool) {
        let mut out = Vec::with_capacity(keys.len());
        for &key in keys {
            if std::mem::take(&mut self.tilde) {
                match key {
                    b'.' => return (out, true),
                    b'~' => {}
                    _ => out.push(b'~'),
                }
            } else if key == b'~' && self.line_start {
                self.tilde = true;
                continue;
            }
            out.push(key);
            self.line_start = matches!(key, b'\r' | b'\n');
        }
        (out, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(pieces: &[&str]) -> (String, bool) {
        let (mut escapes, mut out) = (Escapes::default(), Vec::new());
        for piece in pieces {
            let (bytes, left) = escapes.filter(piece.as_bytes());
            out.extend(bytes);
            if left {
                return (String::from_utf8(out).unwrap(), true);
            }
        }
        (String::from_utf8(out).unwrap(), false)
    }

    #[test]
    fn a_tilde_counts_at_the_beginning_of_a_line() {
        assert_eq!(typed(&["~."]), (String::new(), true));
        assert_eq!(typed(&["ls\r", "~", "."]), ("ls\r".to_owned(), true));
        assert_eq!(typed(&["ls ~."]), ("ls ~.".to_owned(), false));
        assert_eq!(typed(&["~~.\r"]), ("~.\r".to_owned(), false));
        assert_eq!(typed(&["~/x\r"]), ("~/x\r".to_owned(), false));
        assert_eq!(typed(&["\r~\r~."]), ("\r~\r".to_owned(), true));
        assert_eq!(typed(&["\x03\x1c"]), ("\x03\x1c".to_owned(), false));
    }
}
