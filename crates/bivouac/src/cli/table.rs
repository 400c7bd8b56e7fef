//! Tables that fit where they are shown.
//!
//! Invariant: a row is one line. Into a pipe or a file every cell goes whole; on a terminal the table is never wider
//! than it: the least important columns are left out first, then texts are cut with a sign, last of all ids in their
//! middle. `--no-trunc` shows everything. Widths are those of a terminal's cells, so that wide characters line up.

use std::sync::atomic::{AtomicBool, Ordering};

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use super::failure::Outcome;
use super::output;

/// Between two columns.
const GAP: usize = 3;
/// A name is not cut below so many cells while there is another column that may go.
const NAME: usize = 40;
/// A text is not cut below so many cells.
const SHORTEST: usize = 8;
/// Nor an id: enough to tell two of them apart.
const SHORTEST_ID: usize = 14;

/// `--no-trunc`.
static WHOLE: AtomicBool = AtomicBool::new(false);

/// Shows whole tables from now on, however wide they are.
pub(crate) fn show_whole() {
    WHOLE.store(true, Ordering::Relaxed);
}

/// What may happen to the cells of a column that is too wide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    Never,
    /// Before another column is left out.
    Early,
    /// Not before that.
    End,
    Middle,
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    name: &'static str,
    /// 0: it stays. Else the highest goes first.
    spare: u8,
    cut: Cut,
    colour: Option<fn(&str) -> Option<&'static str>>,
}

impl Column {
    /// One that always stays, and whose cells may be cut at their end when nothing else helps.
    pub(crate) const fn new(name: &'static str) -> Self {
        Self { name, spare: 0, cut: Cut::End, colour: None }
    }

    /// One of long texts: they are cut before another column is left out.
    pub(crate) const fn text(name: &'static str) -> Self {
        Self { cut: Cut::Early, ..Self::new(name) }
    }

    /// One whose cells are short words and numbers: they are never cut.
    pub(crate) const fn short(name: &'static str) -> Self {
        Self { cut: Cut::Never, ..Self::new(name) }
    }

    /// One of ids: both their ends are kept.
    pub(crate) const fn id(name: &'static str) -> Self {
        Self { cut: Cut::Middle, ..Self::new(name) }
    }

    /// May be left out; the highest number first.
    pub(crate) const fn spare(self, order: u8) -> Self {
        Self { spare: order, ..self }
    }

    /// A word's colour, on a terminal.
    pub(crate) const fn colour(self, of: fn(&str) -> Option<&'static str>) -> Self {
        Self { colour: Some(of), ..self }
    }
}

/// The colour of a sandbox's or snapshot's state.
pub(crate) fn state_colour(state: &str) -> Option<&'static str> {
    Some(match state {
        "running" => "32",
        "pending" | "stopping" | "snapshotting" => "33",
        "paused" => "36",
        "failed" | "aborted" | "damaged" => "31",
        "stopped" => "2",
        _ => return None,
    })
}

/// Writes a table to stdout. No rows: only the heading, so that scripts that skip one line are right in every case.
pub(crate) fn print(columns: &[Column], rows: Vec<Vec<String>>) -> Outcome<()> {
    output::line(&render(columns, rows))
}

/// A table as it would be printed to stdout.
pub(crate) fn render(columns: &[Column], rows: Vec<Vec<String>>) -> String {
    let width = output::columns().filter(|_| !WHOLE.load(Ordering::Relaxed));
    lay_out(columns, rows, width, output::stdout_colours())
}

/// A table for a place of so many cells, without colours.
pub(crate) fn render_in(columns: &[Column], rows: Vec<Vec<String>>, room: usize) -> String {
    lay_out(columns, rows, Some(room), false)
}

/// Lays a table out for `room` cells; `None`: there is no bound.
fn lay_out(
    columns: &[Column],
    rows: Vec<Vec<String>>,
    room: Option<usize>,
    colours: bool,
) -> String {
    // A control character in a name or an argument must not steer the terminal.
    let rows: Vec<Vec<String>> = rows
        .into_iter()
        .map(|row| row.iter().map(|cell| output::printable(cell)).collect())
        .collect();
    let mut shown: Vec<(usize, usize)> = (0..columns.len())
        .map(|at| {
            let cells = rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.width());
            (at, cells.chain([columns[at].name.width()]).max().unwrap_or(0))
        })
        .collect();
    if let Some(room) = room {
        fit(columns, &mut shown, room);
    }
    let heading: Vec<String> = columns.iter().map(|column| column.name.to_owned()).collect();
    let mut lines = vec![line(columns, &shown, &heading, false)];
    lines.extend(rows.iter().map(|row| line(columns, &shown, row, colours)));
    lines.join("\n")
}

/// Leaves columns out and makes others narrower until they fit into `room`, as far as they may.
fn fit(columns: &[Column], shown: &mut Vec<(usize, usize)>, room: usize) {
    let total = |shown: &[(usize, usize)]| {
        shown.iter().map(|(_, width)| width).sum::<usize>() + GAP * shown.len().saturating_sub(1)
    };
    // What a column cannot do without; a text can be cut before a column goes that is worth more than its end.
    let least = |shown: &[(usize, usize)]| {
        let least = shown.iter().map(|(at, width)| match columns[*at].cut {
            Cut::Never | Cut::Middle => *width,
            Cut::End => (*width).min(NAME),
            Cut::Early => (*width).min(SHORTEST.max(columns[*at].name.width())),
        });
        least.sum::<usize>() + GAP * shown.len().saturating_sub(1)
    };
    while least(shown) > room {
        let spare = shown.iter().map(|(at, _)| columns[*at].spare).max().unwrap_or(0);
        if spare == 0 {
            break;
        }
        shown.retain(|(at, _)| columns[*at].spare != spare);
    }
    let order = [(Cut::Early, SHORTEST), (Cut::End, SHORTEST), (Cut::Middle, SHORTEST_ID)];
    for (cut, shortest) in order {
        while total(shown) > room {
            // The widest gives most.
            let of_kind = shown.iter_mut().filter(|(at, _)| columns[*at].cut == cut);
            let Some((at, width)) = of_kind.max_by_key(|(_, width)| *width) else { break };
            let floor = shortest.max(columns[*at].name.width());
            if *width <= floor {
                break;
            }
            *width -= 1;
        }
    }
}

fn line(columns: &[Column], shown: &[(usize, usize)], row: &[String], colours: bool) -> String {
    let mut text = String::new();
    let mut behind = 0;
    for (at, width) in shown {
        let cell = row.get(*at).map_or("", String::as_str);
        let cell = match columns[*at].cut {
            Cut::Never => cell.to_owned(),
            Cut::Early | Cut::End => cut_end(cell, *width),
            Cut::Middle => cut_middle(cell, *width),
        };
        let wide = cell.width();
        if wide > 0 {
            text.extend(std::iter::repeat_n(' ', behind));
            behind = 0;
        }
        let colour = columns[*at].colour.filter(|_| colours).and_then(|of| of(&cell));
        match colour {
            Some(colour) => text.push_str(&output::painted(&cell, colour)),
            None => text.push_str(&cell),
        }
        behind += width.saturating_sub(wide) + GAP;
    }
    text.truncate(text.trim_end_matches(' ').len());
    text
}

/// The beginning of a text, in so many cells, with a sign when it was longer.
pub(crate) fn cut_end(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut cut = beginning(text, width.saturating_sub(1)).to_owned();
    cut.push('…');
    cut
}

/// Both ends of an id, in so many cells.
fn cut_middle(text: &str, width: usize) -> String {
    if text.width() <= width || !text.is_ascii() {
        return cut_end(text, width);
    }
    // What tells two ids apart is at the end.
    let kept = width.saturating_sub(1);
    let tail = (kept / 2).min(text.len());
    let head = kept - tail;
    format!("{}…{}", &text[..head.min(text.len())], &text[text.len() - tail..])
}

/// The longest beginning of a text that fits into so many cells.
pub(crate) fn beginning(text: &str, width: usize) -> &str {
    let mut used = 0;
    for (at, c) in text.char_indices() {
        // A sign behind some characters makes them an emoji, which is wide.
        used += if c == '\u{fe0f}' { 1 } else { c.width().unwrap_or(0) };
        if used > width {
            return &text[..at];
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 4] = [
        Column::id("ID"),
        Column::short("STATUS").colour(state_colour),
        Column::short("AGE").spare(1),
        Column::text("LABELS").spare(2),
    ];

    fn rows(cells: &[&[&str]]) -> Vec<Vec<String>> {
        cells.iter().map(|row| row.iter().map(|cell| (*cell).to_owned()).collect()).collect()
    }

    const ID: &str = "snap_01JABCDEFGHIJKLMNOPQRSTUVW";

    #[test]
    fn a_pipe_gets_everything() {
        let long = "x".repeat(300);
        let text = lay_out(&COLUMNS, rows(&[&[ID, "running", "5m ago", &long]]), None, false);
        assert!(text.contains(ID) && text.contains(&long), "{text}");
        assert!(text.lines().all(|line| line == line.trim_end()), "{text}");
        assert_eq!(text.lines().count(), 2);
        assert_eq!(lay_out(&COLUMNS, vec![], None, false), "ID   STATUS   AGE   LABELS");
        let two = rows(&[&["a", "running"], &["long-name", "x"]]);
        assert_eq!(
            lay_out(&[Column::new("NAME"), Column::new("STATUS")], two, None, false),
            "NAME        STATUS\na           running\nlong-name   x"
        );
    }

    #[test]
    fn the_least_important_goes_first_and_ids_last() {
        let table = |room| {
            lay_out(
                &COLUMNS,
                rows(&[&[ID, "running", "5m ago", "team=web,step=two"]]),
                Some(room),
                false,
            )
        };
        assert!(table(80).contains("team=web,step=two"));
        let cut = table(64);
        assert!(cut.contains("team=w") && cut.contains('…') && cut.contains(ID), "{cut}");
        let without = table(54);
        assert!(!without.contains("LABELS") && without.contains("5m ago"), "{without}");
        let narrow = table(43);
        assert!(!narrow.contains("AGE") && narrow.contains(ID), "{narrow}");
        let narrowest = table(30);
        assert!(narrowest.contains("\nsnap_01JAB…OPQRSTUVW "), "{narrowest}");
        assert!(narrowest.contains("running"), "{narrowest}");
        // A name stays whole while there is something to leave out.
        let columns =
            [Column::new("NAME"), Column::short("AGE").spare(1), Column::text("TAGS").spare(2)];
        let named = rows(&[&["a-long-name-of-a-box", "5m ago", "purpose=show"]]);
        let text = lay_out(&columns, named, Some(30), false);
        assert_eq!(text, "NAME                   AGE\na-long-name-of-a-box   5m ago");
        // What cannot be made smaller is as wide as it is, in one line.
        assert_eq!(table(3).lines().count(), 2);
    }

    proptest::proptest! {
        #[test]
        fn no_line_is_wider_than_the_terminal(
            room in 30usize..200, name in ".{0,60}", status in "[a-z]{1,7}", label in ".{0,60}",
        ) {
            let columns = [
                Column::new("NAME"),
                Column::short("STATUS").colour(state_colour),
                Column::text("LABELS").spare(1),
            ];
            let text = lay_out(&columns, rows(&[&[&name, &status, &label]]), Some(room), false);
            proptest::prop_assert_eq!(text.lines().count(), 2);
            for line in text.lines() {
                proptest::prop_assert!(line.width() <= room, "{}: {line}", line.width());
            }
        }
    }

    #[test]
    fn wide_characters_line_up() {
        let columns = [Column::new("NAME"), Column::new("STATUS")];
        let text = lay_out(&columns, rows(&[&["漢字", "a"], &["é", "b"]]), None, false);
        let starts: Vec<usize> =
            text.lines().skip(1).map(|l| beginning_of_last(l).width()).collect();
        assert_eq!(starts[0], starts[1], "{text}");
        assert_eq!(cut_end("漢字漢字", 5), "漢字…");
        assert_eq!(cut_end("漢字", 4), "漢字");
        assert_eq!(beginning("a漢", 2), "a");
    }

    fn beginning_of_last(line: &str) -> &str {
        &line[..line.rfind(' ').map_or(0, |at| at + 1)]
    }

    #[test]
    fn states_have_colours_where_there_are_any() {
        let row = || rows(&[&[ID, "running", "now", "-"]]);
        let plain = lay_out(&COLUMNS, row(), None, false);
        let painted = lay_out(&COLUMNS, row(), None, true);
        assert!(painted.contains("\u{1b}[32mrunning\u{1b}[0m"), "{painted:?}");
        let stripped = painted.replace("\u{1b}[32m", "").replace("\u{1b}[0m", "");
        assert_eq!(stripped, plain, "colours move nothing");
    }
}
