//! `bivouac snapshot` and `bivouac snapshots`: keep a state, list and delete what is kept.

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::args::{Global, Snapshot, Snapshots};
use super::client::Client;
use super::failure::{ExitStatus, Failure, Outcome};
use super::parse::millis;
use super::{clock, each, output, sandbox};

/// Takes a snapshot and prints its id. The session stops.
pub(crate) async fn take(global: &Global, args: Snapshot) -> Outcome {
    let client = Client::find(global)?;
    let name = &args.name;
    let view = sandbox::get(&client, name).await?;
    let session = sandbox::session_id(&view)?;
    let body = match args.expires {
        Some(expires) => json!({ "expiration": millis(expires) }),
        None if args.keep => json!({ "expiration": 0 }),
        None => json!({}),
    };
    let path = format!("/v2/sandboxes/sessions/{session}/snapshot");
    let answer = match client.post(&path, &client.scope(), &body).await {
        Err(error) if error.is(StatusCode::GONE) => {
            let kept = view.pointer("/sandbox/currentSnapshotId").and_then(Value::as_str);
            let failure = Failure::from(error);
            return Err(match kept {
                Some(kept) => failure.hint(format!("its state is kept already, as {kept}")),
                None => failure.hint(format!("start it first: bivouac start {name}")),
            });
        }
        answer => answer?,
    };
    if global.json {
        output::json(&answer)?;
        return Ok(ExitStatus::Success);
    }
    let id = sandbox::text(&answer, "/snapshot/id")?;
    output::line(&id)?;
    output::progress(&format!("stopped {name}; bivouac start {name} goes on from here"));
    output::hint(&format!("another from the same state: bivouac create --snapshot {id}"));
    Ok(ExitStatus::Success)
}

/// `snapshots ls` and `snapshots rm`.
pub(crate) async fn run(global: &Global, args: Snapshots) -> Outcome {
    let client = Client::find(global)?;
    match args {
        Snapshots::Ls { name } => list(&client, global, name.as_deref()).await,
        Snapshots::Rm { ids } => {
            each(global, &ids, async |id| remove(&client, global, id).await).await
        }
    }
}

async fn list(client: &Client, global: &Global, name: Option<&str>) -> Outcome {
    let mut query = client.list_scope().with("limit", "50");
    if let Some(name) = name {
        query = query.with("name", name);
    }
    let mut snapshots = client.pages("/v2/sandboxes/snapshots", &query, "snapshots").await?;
    // The API shows them for another day, for clients that look there for what became of one.
    snapshots.retain(|snapshot| snapshot["status"] != "deleted");
    if global.json {
        output::json(&snapshots.into())?;
        return Ok(ExitStatus::Success);
    }
    let now = clock::now_ms();
    let rows = snapshots.iter().map(|snapshot| row(snapshot, now)).collect();
    output::table(&["ID", "STATUS", "SIZE", "CREATED", "EXPIRES", "MADE"], rows)?;
    Ok(ExitStatus::Success)
}

async fn remove(client: &Client, global: &Global, id: &str) -> Outcome<Value> {
    let answer = client.delete(&format!("/v2/sandboxes/snapshots/{id}"), &client.scope()).await?;
    if !global.json {
        output::progress(&format!("deleted {id}"));
    }
    Ok(answer)
}

fn row(snapshot: &Value, now: i64) -> Vec<String> {
    let word = |key: &str| snapshot[key].as_str().unwrap_or("-").to_owned();
    let created = snapshot["createdAt"].as_i64();
    let expires = snapshot["expiresAt"].as_i64();
    vec![
        word("id"),
        word("status"),
        snapshot["sizeBytes"].as_u64().map(size).unwrap_or_default(),
        created.map(|at| format!("{} ago", clock::span(now - at))).unwrap_or_default(),
        expires.map_or_else(|| "never".to_owned(), |at| format!("in {}", clock::span(at - now))),
        word("creationMethod"),
    ]
}

/// Bytes as people read them.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KB", "MB", "GB", "TB"];
    if bytes < 1_000 {
        return format!("{bytes} B");
    }
    let mut scaled = bytes;
    for unit in UNITS {
        // Tenths, so that the rounding is exact.
        if scaled < 1_000_000 || unit == "TB" {
            return format!("{}.{} {unit}", scaled / 1_000, scaled % 1_000 / 100);
        }
        scaled /= 1_000;
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let cases = [
            (0, "0 B"),
            (999, "999 B"),
            (1_000, "1.0 KB"),
            (1_550_000, "1.5 MB"),
            (999_999, "999.9 KB"),
            (12_300_000_000, "12.3 GB"),
            (5_000_000_000_000_000, "5000.0 TB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn a_snapshot_without_an_end_is_kept() {
        let row = row(&json!({ "id": "snap_1", "createdAt": 0, "sizeBytes": 2_000 }), 60_000);
        assert_eq!(row, ["snap_1", "-", "2.0 KB", "60s ago", "never", "-"]);
    }
}
