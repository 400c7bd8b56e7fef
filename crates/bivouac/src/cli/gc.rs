//! `bivouac gc`: what the host keeps for nobody, told and removed.

use serde_json::{Value, json};

use super::args::{Gc, Global};
use super::client::Client;
use super::failure::{ExitStatus, Failure, Outcome};
use super::output;
use super::snapshot::size;
use super::table::{self, Column};

const COLUMNS: [Column; 5] = [
    Column::short("KIND"),
    Column::id("ID"),
    Column::short("SIZE").spare(2),
    Column::short("OWN").spare(1),
    Column::text("WHY"),
];

/// Asks the engine to look, and to remove unless it is a rehearsal.
pub(crate) async fn run(global: &Global, args: &Gc) -> Outcome {
    let client = Client::find(global)?;
    let body = json!({ "dryRun": args.dry_run });
    let answer = client.post("/bivouac/v1/gc", &client.scope(), &body).await?;
    let list = |key: &str| answer[key].as_array().cloned().unwrap_or_default();
    let (orphans, damage) = (list("orphans"), list("damage"));
    let failed = orphans.iter().filter(|one| one["error"].is_string()).count();
    if global.json {
        output::json(&answer)?;
    } else {
        if !orphans.is_empty() {
            table::print(&COLUMNS, orphans.iter().map(row).collect())?;
        }
        for one in &damage {
            output::progress(one["what"].as_str().unwrap_or_default());
        }
        output::progress(&summary(&answer, orphans.len()));
    }
    match failed {
        0 => Ok(ExitStatus::Success),
        _ => Err(Failure::new(format!("{failed} could not be removed; the next gc tries again"))),
    }
}

fn row(one: &Value) -> Vec<String> {
    let word = |key: &str| one[key].as_str().unwrap_or("-").to_owned();
    let bytes = |key: &str| one[key].as_u64().map_or_else(|| "-".to_owned(), size);
    let why = match one["error"].as_str() {
        Some(error) => format!("{}; cannot be removed: {error}", word("reason")),
        None => word("reason"),
    };
    vec![word("kind"), word("id"), bytes("bytes"), bytes("uniqueBytes"), why]
}

fn summary(answer: &Value, orphans: usize) -> String {
    let freed = size(answer["freedBytes"].as_u64().unwrap_or(0));
    let mut text = match (orphans, answer["dryRun"] == true) {
        (0, _) => "nothing is kept for nobody".to_owned(),
        (n, true) => format!("{n} would be removed, {freed} would come back"),
        (n, false) => format!("{n} removed, {freed} came back"),
    };
    if let Some(young) = answer["young"].as_u64().filter(|young| *young > 0) {
        text.push_str(&format!("; {young} are too young to tell"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_is_told() {
        let orphan = json!({ "kind": "logs", "id": "sbx_1", "bytes": 2_000, "reason": "why" });
        assert_eq!(row(&orphan), ["logs", "sbx_1", "2.0 KB", "-", "why"]);
        let told = |dry: bool, n: usize| {
            summary(&json!({ "dryRun": dry, "freedBytes": 5, "young": 0 }), n)
        };
        assert_eq!(told(true, 2), "2 would be removed, 5 B would come back");
        assert_eq!(told(false, 1), "1 removed, 5 B came back");
        assert_eq!(told(true, 0), "nothing is kept for nobody");
    }
}
