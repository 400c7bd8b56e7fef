//! `bivouac rollback`: a sandbox goes back to a snapshot and stays the same sandbox.

use serde_json::{Value, json};

use super::args::{Global, Rollback};
use super::busy::working;
use super::client::Client;
use super::failure::{ExitStatus, Outcome};
use super::{output, sandbox};

/// Goes back and prints the snapshot that the sandbox is at now.
pub(crate) async fn run(global: &Global, args: Rollback) -> Outcome {
    let client = Client::find(global)?;
    let mut body = json!({ "discard": args.discard });
    if let Some(snapshot) = &args.snapshot {
        body["snapshotId"] = snapshot.as_str().into();
    }
    let path = format!("/bivouac/v1/sandboxes/{}/rollback", args.name);
    let query = client.scope();
    let done = async { Ok(client.post(&path, &query, &body).await?) };
    let answer = working(global, &format!("taking {} back", args.name), done).await?;
    if global.json {
        output::json(&answer)?;
        return Ok(ExitStatus::Success);
    }
    output::line(&sandbox::text(&answer, "/snapshot/id")?)?;
    let (name, status) = (&args.name, sandbox::text(&answer, "/sandbox/status")?);
    output::progress(&format!("{name} is there and {status}"));
    if let Some(kept) = answer.pointer("/kept/id").and_then(Value::as_str) {
        output::hint(&format!("what it left: bivouac rollback {name} {kept}"));
    }
    Ok(ExitStatus::Success)
}
