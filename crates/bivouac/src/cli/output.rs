//! What people and programs see. The only place that writes to stdout and stderr.
//!
//! Invariant: results go to stdout (tables, or JSON with `--json`), progress, hints and errors to
//! stderr; colour only on a terminal and never with `NO_COLOR`. A reader that closed stdout ends
//! the verb with [`Closed`], not with a panic.

use std::io::{self, IsTerminal as _, Write as _};

use serde_json::Value;

use super::busy;
use super::failure::Outcome;
use super::table::{self, Column};

/// Stdout could not be written because its reader is gone.
#[derive(Debug, thiserror::Error)]
#[error("the reader of standard output is gone")]
pub(crate) struct Closed;

/// Writes exact bytes to stdout.
pub(crate) fn stdout_bytes(bytes: &[u8]) -> io::Result<()> {
    busy::aside(|| {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    })
}

/// Writes exact bytes to stderr.
pub(crate) fn stderr_bytes(bytes: &[u8]) -> io::Result<()> {
    busy::aside(|| io::stderr().lock().write_all(bytes))
}

/// Writes one line to stdout.
pub(crate) fn line(text: &str) -> Outcome<()> {
    self::text(&format!("{text}\n"))
}

/// Writes text to stdout as it is.
pub(crate) fn text(text: &str) -> Outcome<()> {
    stdout_bytes(text.as_bytes()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Closed.into(),
        _ => anyhow::Error::new(error).context("could not write to standard output").into(),
    })
}

/// Columns and lines of the terminal that stdout is.
pub(crate) fn terminal_size() -> Option<(usize, usize)> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0 && size.ws_row > 0).then(|| (size.ws_col.into(), size.ws_row.into()))
}

/// Columns that a table may have: of the terminal that stdout is, by `COLUMNS` or what the terminal says; none: it is
/// no terminal, and nothing is cut.
pub(crate) fn columns() -> Option<usize> {
    if !io::stdout().is_terminal() {
        return None;
    }
    let told = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    Some(told.filter(|n| *n > 0).or_else(|| terminal_size().map(|(wide, _)| wide)).unwrap_or(80))
}

/// Writes a JSON value to stdout, readable for people too.
pub(crate) fn json(value: &Value) -> Outcome<()> {
    line(&format!("{value:#}"))
}

/// Writes rows under a heading to stdout: a table of which no column can be left out. See [`table`].
pub(crate) fn table(heading: &[&'static str], rows: Vec<Vec<String>>) -> Outcome<()> {
    let columns: Vec<Column> = heading.iter().map(|name| Column::text(name)).collect();
    table::print(&columns, rows)
}

/// Writes one field of each, one a line: for scripts.
pub(crate) fn names(all: &[Value], key: &str) -> Outcome {
    for one in all {
        line(one[key].as_str().unwrap_or_default())?;
    }
    Ok(super::failure::ExitStatus::Success)
}

/// Writes `name: value` pairs to stdout, the values in one column.
pub(crate) fn facts(pairs: &[(&str, String)]) -> Outcome<()> {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, value) in pairs {
        line(&format!("{name:width$}   {}", printable(value)))?;
    }
    Ok(())
}

/// Control characters written as escapes.
pub(crate) fn printable(text: &str) -> String {
    if text.chars().any(char::is_control) {
        text.chars()
            .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
            .collect()
    } else {
        text.to_owned()
    }
}

/// As [`printable`], for text of several lines.
pub(crate) fn printable_lines(text: &str) -> String {
    text.lines().map(printable).collect::<Vec<_>>().join("\n")
}

/// One line of progress on stderr.
pub(crate) fn progress(text: &str) {
    diagnostic(&format!("{text}\n"));
}

/// What to do next, on stderr.
pub(crate) fn hint(text: &str) {
    diagnostic(&format!("{} {text}\n", paint("hint:", "36")));
}

/// Something that the user should know, on stderr.
pub(crate) fn warning(text: &str) {
    diagnostic(&format!("{} {text}\n", paint("warning:", "1;33")));
}

/// An error's own message, on stderr.
pub(crate) fn error_line(text: &str) {
    diagnostic(&format!("{} {text}\n", paint("error:", "1;31")));
}

/// An error's cause, on stderr.
pub(crate) fn cause_line(text: &str) {
    diagnostic(&format!("  {} {text}\n", paint("caused by:", "31")));
}

/// A word of a report on stdout, coloured when stdout is a terminal.
pub(crate) fn stdout_word(word: &str, colour: &str) -> String {
    paint_if(word, colour, stdout_colours())
}

/// Whether stdout takes colours.
pub(crate) fn stdout_colours() -> bool {
    colours_wanted() && io::stdout().is_terminal()
}

/// A word in a colour, for a place that takes colours.
pub(crate) fn painted(word: &str, colour: &str) -> String {
    paint_if(word, colour, true)
}

fn paint(text: &str, colour: &str) -> String {
    paint_if(text, colour, colours_wanted() && io::stderr().is_terminal())
}

fn paint_if(text: &str, colour: &str, yes: bool) -> String {
    if yes { format!("\u{1b}[{colour}m{text}\u{1b}[0m") } else { text.to_owned() }
}

/// `NO_COLOR` counts when it is set and not empty (no-color.org).
fn colours_wanted() -> bool {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    set("NO_COLOR").is_none() && set("TERM").is_none_or(|term| term != "dumb")
}

/// Stderr that is gone is no reason to fail: there is nobody to tell.
fn diagnostic(text: &str) {
    let _ = busy::aside(|| io::stderr().lock().write_all(text.as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_steer_the_terminal() {
        assert_eq!(printable("a\u{1b}[31mb\n"), "a\\u{1b}[31mb\\n");
        assert_eq!(printable("é漢"), "é漢");
    }
}
