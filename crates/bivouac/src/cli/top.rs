//! `bivouac top`: what running sandboxes use, live.
//!
//! Invariant: on a terminal the picture is drawn anew in place until somebody ends it (see [`live`]); anywhere else
//! there is one table, or one JSON document, and an end. CPU and network are what was used between two looks.

mod live;

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
use super::table::{self, Column};
use super::{clock, output};

/// Between the two looks of a single table.
const LOOK: Duration = Duration::from_millis(500);
/// Shortest pause of the live view: a look costs the engine something.
const SHORTEST: Duration = Duration::from_millis(200);
const COLUMNS: [Column; 11] = [
    Column::new("NAME"),
    Column::short("STATUS").spare(3),
    Column::short("CPU %"),
    Column::short("MEMORY"),
    Column::short("LIMIT").spare(5),
    Column::short("DISK").spare(1),
    Column::short("NET IN/S").spare(2),
    Column::short("NET OUT/S").spare(2),
    Column::short("PIDS").spare(4),
    Column::short("UP").spare(3),
    Column::short("COMMANDS").spare(6),
];

/// Shows it once or until somebody ends it.
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
    live::run(args, async || looks.look(&client, &query).await).await
}

fn once(global: &Global, args: &Top, mut rows: Vec<Row>) -> Outcome {
    rows.sort_by_cached_key(|row| row.key(args.sort));
    if global.json {
        output::json(&rows.iter().map(Row::json).collect::<Vec<_>>().into())?;
    } else {
        let (columns, cells) = picture(args, &rows);
        table::print(&columns, cells)?;
        if rows.is_empty() && !args.all_namespaces {
            output::hint("nothing runs in this namespace; all of them: bivouac top -A");
        }
    }
    Ok(ExitStatus::Success)
}

/// Columns and cells.
fn picture(args: &Top, rows: &[Row]) -> (Vec<Column>, Vec<Vec<String>>) {
    let mut columns = COLUMNS.to_vec();
    if args.all_namespaces {
        columns.insert(0, Column::new("NAMESPACE"));
    }
    let cells = rows.iter().map(|row| {
        let mut cells = row.cells();
        if args.all_namespaces {
            cells.insert(0, format!("{}/{}", row.text("team"), row.text("project")));
        }
        cells
    });
    (columns, cells.collect())
}

/// What was seen last, for the rates.
#[derive(Debug, Default)]
struct Looks {
    /// By session.
    last: HashMap<String, Seen>,
}

/// A session at one moment.
#[derive(Debug, Clone, Copy)]
struct Seen {
    at: i64,
    /// ms so far.
    cpu: u64,
    /// Bytes so far.
    received: Option<u64>,
    sent: Option<u64>,
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
            let number = |key: &str| of[key].as_u64();
            let at = of["at"].as_i64().unwrap_or(0);
            let now = Seen {
                at,
                cpu: number("cpuMs").unwrap_or(0),
                received: number("networkReceivedBytes"),
                sent: number("networkSentBytes"),
            };
            // One that is new since the last look is measured from its start.
            let started = of["startedAt"].as_i64().unwrap_or(at);
            let first = Seen { at: started, cpu: 0, received: Some(0), sent: Some(0) };
            let before = self.last.get(session).copied().unwrap_or(first);
            seen.insert(session.to_owned(), now);
            Row::new(of.clone(), before, now)
        });
        let rows = rows.collect();
        self.last = seen;
        rows
    }
}

/// So much in so many ms, a second.
fn rate(more: u64, passed_ms: i64) -> f64 {
    if passed_ms <= 0 { 0.0 } else { more as f64 * 1000.0 / passed_ms as f64 }
}

/// One running sandbox.
#[derive(Debug)]
struct Row {
    of: Value,
    /// Percent of one CPU.
    cpu: f64,
    /// Bytes a second; absent where they are not counted.
    received: Option<u64>,
    sent: Option<u64>,
}

/// What rows are sorted by: the biggest first, then by name.
type Key = (Reverse<u64>, String);

impl Row {
    fn new(of: Value, before: Seen, now: Seen) -> Self {
        let passed = now.at - before.at;
        // A device that was made anew counts from 0 again.
        let bytes = |now: Option<u64>, before: Option<u64>| {
            Some(rate(now?.saturating_sub(before?), passed) as u64)
        };
        Self {
            cpu: rate(now.cpu.saturating_sub(before.cpu), passed) / 10.0,
            received: bytes(now.received, before.received),
            sent: bytes(now.sent, before.sent),
            of,
        }
    }

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
            SortBy::Network => self.received.unwrap_or(0).saturating_add(self.sent.unwrap_or(0)),
            SortBy::Uptime => u64::try_from(self.up_ms()).unwrap_or(0),
            SortBy::Name => 0,
        };
        (Reverse(size), self.text("sandbox").to_owned())
    }

    fn cells(&self) -> Vec<String> {
        let bytes = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), size);
        vec![
            self.text("sandbox").to_owned(),
            if self.of["pausedAt"].is_i64() { "paused" } else { "running" }.to_owned(),
            format!("{:.1}", self.cpu),
            size(self.number("memoryBytes")),
            size(self.number("memoryLimitBytes")),
            bytes(self.of["diskBytes"].as_u64()),
            bytes(self.received),
            bytes(self.sent),
            self.number("pids").to_string(),
            clock::span(self.up_ms()),
            self.number("commands").to_string(),
        ]
    }

    fn json(&self) -> Value {
        let mut of = self.of.clone();
        // A tenth is what two looks can tell.
        of["cpuPercent"] = json!((self.cpu * 10.0).round() / 10.0);
        for (key, rate) in
            [("networkReceivedPerSecond", self.received), ("networkSentPerSecond", self.sent)]
        {
            if let Some(rate) = rate {
                of[key] = rate.into();
            }
        }
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
    fn network_is_a_rate() {
        let at = |at: i64, received: u64| {
            json!({ "stats": [{ "sandbox": "a", "session": "sbx_a", "at": at, "startedAt": 0,
                "networkReceivedBytes": received, "networkSentBytes": 7 }] })
        };
        let mut looks = Looks::default();
        let first = looks.rows(&at(2_000, 8_000));
        assert_eq!(first[0].received, Some(4_000), "since its start");
        let second = looks.rows(&at(2_500, 8_500));
        assert_eq!((second[0].received, second[0].sent), (Some(1_000), Some(0)));
        assert_eq!(second[0].json()["networkReceivedPerSecond"], 1_000);
        let again = looks.rows(&at(3_000, 5));
        assert_eq!(again[0].received, Some(0), "a new device counts anew");
        let none = looks.rows(&answer(4_000, &[("a", 1)]));
        assert_eq!((none[0].received, none[0].cells()[6].as_str()), (None, "-"));
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
        assert_eq!(rows[0].cells()[5], "-", "a host that does not count disk use says so");
    }
}
