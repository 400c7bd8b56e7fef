//! `bivouac top`: what running sandboxes use, live.
//!
//! Invariant: on a terminal the picture is drawn anew in place until it is interrupted; anywhere else
//! there is one table, or one JSON document, and an end. CPU is what was used between two looks.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::IsTerminal as _;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use super::args::{Global, SortBy, Top};
use super::client::{Client, Query};
use super::failure::{ExitStatus, Outcome};
use super::snapshot::size;
use super::{clock, output};

/// Between the two looks of a single table.
const LOOK: Duration = Duration::from_millis(500);
/// Shortest pause of the live view: a look costs the engine something.
const SHORTEST: Duration = Duration::from_millis(200);
/// To the corner; what is drawn covers what was there.
const HOME: &str = "\u{1b}[H";
/// Clears to the end of the line, and of the screen.
const CLEAR_LINE: &str = "\u{1b}[K";
const CLEAR_REST: &str = "\u{1b}[J";

/// Shows it once or until interrupted.
pub(crate) async fn run(global: &Global, args: &Top) -> Outcome {
    let client = Client::find(global)?;
    let query =
        if args.all_namespaces { client.scope().with("all", "true") } else { client.scope() };
    let mut looks = Looks::default();
    looks.look(&client, &query).await?;
    if global.json || args.once || !std::io::stdout().is_terminal() {
        sleep(LOOK).await;
        let rows = looks.look(&client, &query).await?;
        return once(global, args, rows);
    }
    let pause = args.interval.max(SHORTEST);
    // The first picture comes soon, whatever the pause is.
    sleep(LOOK.min(pause)).await;
    loop {
        let rows = looks.look(&client, &query).await?;
        draw(args, rows)?;
        sleep(pause).await;
    }
}

fn once(global: &Global, args: &Top, mut rows: Vec<Row>) -> Outcome {
    rows.sort_by_cached_key(|row| row.key(args.sort));
    if global.json {
        output::json(&rows.iter().map(Row::json).collect::<Vec<_>>().into())?;
    } else {
        let empty = rows.is_empty();
        output::line(&table(args, &rows))?;
        if empty && !args.all_namespaces {
            output::hint("nothing runs in this namespace; all of them: bivouac top -A");
        }
    }
    Ok(ExitStatus::Success)
}

fn draw(args: &Top, mut rows: Vec<Row>) -> Outcome<()> {
    rows.sort_by_cached_key(|row| row.key(args.sort));
    let (wide, high) = output::terminal_size().unwrap_or((80, 24));
    let memory: u64 = rows.iter().map(|row| row.number("memoryBytes")).sum();
    // Not `sum`: of nothing it is -0.
    let cpu = rows.iter().fold(0.0, |sum, row| sum + row.cpu);
    let summary =
        format!("{} running   CPU {cpu:.1} %   memory {}   Ctrl-C ends", rows.len(), size(memory));
    let mut text = HOME.to_owned();
    let table = table(args, &rows);
    let lines = std::iter::once(summary.as_str()).chain(std::iter::once("")).chain(table.lines());
    for (index, line) in lines.take(high.saturating_sub(1)).enumerate() {
        if index > 0 {
            text.push_str("\r\n");
        }
        text.extend(line.chars().take(wide));
        text.push_str(CLEAR_LINE);
    }
    text.push_str(CLEAR_REST);
    output::text(&text)
}

fn table(args: &Top, rows: &[Row]) -> String {
    let mut heading =
        vec!["NAME", "STATUS", "CPU %", "MEMORY", "LIMIT", "PIDS", "DISK", "UP", "COMMANDS"];
    if args.all_namespaces {
        heading.insert(0, "NAMESPACE");
    }
    let cells = rows.iter().map(|row| {
        let mut cells = row.cells();
        if args.all_namespaces {
            cells.insert(0, format!("{}/{}", row.text("team"), row.text("project")));
        }
        cells
    });
    output::render(&heading, cells.collect())
}

/// What was seen last, for the rates.
#[derive(Debug, Default)]
struct Looks {
    /// By session: time, and CPU time so far, ms.
    last: HashMap<String, (i64, u64)>,
}

impl Looks {
    async fn look(&mut self, client: &Client, query: &Query) -> Outcome<Vec<Row>> {
        let answer = client.get("/bivouac/v1/stats", query).await?;
        Ok(self.rows(&answer))
    }

    fn rows(&mut self, answer: &Value) -> Vec<Row> {
        let mut seen = HashMap::new();
        let stats = answer["stats"].as_array().into_iter().flatten();
        let rows = stats.map(|of| {
            let session = of["session"].as_str().unwrap_or_default();
            let at = of["at"].as_i64().unwrap_or(0);
            let used = of["cpuMs"].as_u64().unwrap_or(0);
            // One that is new since the last look is measured from its start.
            let started = of["startedAt"].as_i64().unwrap_or(at);
            let (from, before) = self.last.get(session).copied().unwrap_or((started, 0));
            seen.insert(session.to_owned(), (at, used));
            Row { of: of.clone(), cpu: percent(used.saturating_sub(before), at - from) }
        });
        let rows = rows.collect();
        self.last = seen;
        rows
    }
}

/// Of one CPU.
fn percent(used_ms: u64, passed_ms: i64) -> f64 {
    if passed_ms <= 0 { 0.0 } else { used_ms as f64 * 100.0 / passed_ms as f64 }
}

/// One running sandbox.
#[derive(Debug)]
struct Row {
    of: Value,
    cpu: f64,
}

/// What rows are sorted by: the biggest first, then by name.
type Key = (Reverse<u64>, String);

impl Row {
    fn text(&self, key: &str) -> &str {
        self.of[key].as_str().unwrap_or("-")
    }

    fn number(&self, key: &str) -> u64 {
        self.of[key].as_u64().unwrap_or(0)
    }

    fn up_ms(&self) -> i64 {
        self.of["at"].as_i64().zip(self.of["startedAt"].as_i64()).map_or(0, |(at, from)| at - from)
    }

    fn key(&self, by: SortBy) -> Key {
        let size = match by {
            // Hundredths: shown are tenths.
            SortBy::Cpu => (self.cpu * 100.0) as u64,
            SortBy::Memory => self.number("memoryBytes"),
            SortBy::Pids => self.number("pids"),
            SortBy::Disk => self.number("diskBytes"),
            SortBy::Uptime => u64::try_from(self.up_ms()).unwrap_or(0),
            SortBy::Name => 0,
        };
        (Reverse(size), self.text("sandbox").to_owned())
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.text("sandbox").to_owned(),
            if self.of["pausedAt"].is_i64() { "paused" } else { "running" }.to_owned(),
            format!("{:.1}", self.cpu),
            size(self.number("memoryBytes")),
            size(self.number("memoryLimitBytes")),
            self.number("pids").to_string(),
            self.of["diskBytes"].as_u64().map_or_else(|| "-".to_owned(), size),
            clock::span(self.up_ms()),
            self.number("commands").to_string(),
        ]
    }

    fn json(&self) -> Value {
        let mut of = self.of.clone();
        // A tenth is what two looks can tell.
        of["cpuPercent"] = json!((self.cpu * 10.0).round() / 10.0);
        of
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(at: i64, stats: &[(&str, u64)]) -> Value {
        let stats: Vec<Value> = stats
            .iter()
            .map(|(name, cpu)| {
                json!({ "sandbox": name, "session": format!("sbx_{name}"), "at": at,
                    "startedAt": 0, "cpuMs": cpu, "memoryBytes": cpu * 2 })
            })
            .collect();
        json!({ "at": at, "stats": stats })
    }

    #[test]
    fn cpu_is_what_was_used_between_two_looks() {
        let mut looks = Looks::default();
        let first = looks.rows(&answer(1_000, &[("a", 500)]));
        assert!((first[0].cpu - 50.0).abs() < 0.01, "since its start: {}", first[0].cpu);
        let second = looks.rows(&answer(2_000, &[("a", 1_500), ("b", 200)]));
        assert!((second[0].cpu - 100.0).abs() < 0.01);
        assert!((second[1].cpu - 10.0).abs() < 0.01);
        let third = looks.rows(&answer(2_000, &[("a", 1_500)]));
        assert!(third[0].cpu.abs() < 0.01, "no time has passed");
    }

    #[test]
    fn the_biggest_comes_first() {
        let mut looks = Looks::default();
        let mut rows = looks.rows(&answer(1_000, &[("a", 1), ("c", 9), ("b", 9)]));
        let names =
            |rows: &[Row]| rows.iter().map(|r| r.text("sandbox").to_owned()).collect::<Vec<_>>();
        rows.sort_by_cached_key(|row| row.key(SortBy::Memory));
        assert_eq!(names(&rows), ["b", "c", "a"]);
        rows.sort_by_cached_key(|row| row.key(SortBy::Name));
        assert_eq!(names(&rows), ["a", "b", "c"]);
        assert_eq!(rows[0].cells()[6], "-", "a host that does not count disk use says so");
    }
}
