//! `bivouac ps`: the commands of a sandbox's newest session.

use serde_json::Value;

use super::args::Global;
use super::client::Client;
use super::failure::{ExitStatus, Outcome};
use super::table::{self, Column};
use super::{clock, output, sandbox};

const COLUMNS: [Column; 6] = [
    Column::id("ID"),
    Column::text("STATUS"),
    Column::short("STARTED").spare(1),
    Column::short("TOOK").spare(2),
    Column::short("TERMINAL").spare(3),
    Column::text("COMMAND"),
];

/// Lists them, newest first; those that `cp` ran only with `--json`. A stopped sandbox is not started.
pub(crate) async fn run(global: &Global, name: &str) -> Outcome {
    let client = Client::find(global)?;
    let session = sandbox::session_id(&sandbox::get(&client, name).await?)?;
    let commands = sandbox::commands(&client, &session).await?;
    if global.json {
        output::json(&commands.into())?;
        return Ok(ExitStatus::Success);
    }
    let now = clock::now_ms();
    let rows = commands.iter().filter(|command| !sandbox::is_helper(command));
    let rows = rows.map(|command| row(command, now)).collect();
    table::print(&COLUMNS, rows)?;
    Ok(ExitStatus::Success)
}

fn row(command: &Value, now: i64) -> Vec<String> {
    let status = match (command["exitCode"].as_i64(), command["reason"].as_str()) {
        (Some(code), Some(reason)) => format!("exit {code} ({})", reason.replace('_', " ")),
        (Some(code), None) => format!("exit {code}"),
        (None, Some(reason)) => reason.replace('_', " "),
        (None, None) => "running".to_owned(),
    };
    let started = command["startedAt"].as_i64();
    vec![
        command["id"].as_str().unwrap_or("-").to_owned(),
        status,
        started.map(|at| format!("{} ago", clock::span(now - at))).unwrap_or_default(),
        command["durationMs"].as_i64().map(clock::duration).unwrap_or_default(),
        command["terminal"].as_str().unwrap_or_default().to_owned(),
        sandbox::command_line(command),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn states_of_commands() {
        let status = |command: Value| row(&command, 0)[1].clone();
        assert_eq!(status(json!({ "exitCode": null })), "running");
        assert_eq!(status(json!({ "exitCode": 3 })), "exit 3");
        assert_eq!(
            status(json!({ "exitCode": 137, "reason": "out_of_memory" })),
            "exit 137 (out of memory)"
        );
        assert_eq!(status(json!({ "exitCode": null, "reason": "lost" })), "lost");
    }
}
