//! `bivouac snapshot` and `bivouac snapshots`: keep a state; list, show, label and delete what is kept.

use std::collections::BTreeMap;

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::args::{Global, Snapshot, Snapshots};
use super::client::Client;
use super::failure::{ExitStatus, Failure, Outcome};
use super::parse::millis;
use super::table::{self, Column, state_colour};
use super::{archive, busy, clock, each, fork, output, sandbox};

const COLUMNS: [Column; 8] = [
    Column::id("ID"),
    Column::new("SANDBOX"),
    Column::short("STATUS").colour(state_colour).spare(1),
    Column::short("SIZE").spare(2),
    Column::short("CREATED").spare(2),
    Column::short("EXPIRES").spare(4),
    Column::short("MADE").spare(5),
    Column::text("LABELS").spare(6),
];

/// Takes a snapshot and prints its id. The session stops, but for `--live`.
pub(crate) async fn take(global: &Global, args: Snapshot) -> Outcome {
    let client = Client::find(global)?;
    let name = &args.name;
    let labels: BTreeMap<_, _> = args.labels.into_iter().collect();
    let mut body = json!({ "live": args.live, "labels": labels });
    match args.expires {
        Some(expires) => body["expiration"] = millis(expires).into(),
        None if args.keep => body["expiration"] = 0.into(),
        None => {}
    }
    let path = format!("/bivouac/v1/sandboxes/{name}/snapshots");
    let query = client.scope();
    let taking = async { Ok(client.post(&path, &query, &body).await) };
    let taken = busy::working(global, &format!("keeping {name}"), taking).await?;
    let answer = match taken {
        Err(error) if error.is(StatusCode::GONE) => {
            let view = sandbox::get(&client, name).await?;
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
    if args.live {
        let stall = answer["snapshot"]["stallUs"].as_u64().unwrap_or_default();
        let stall = fork::stood_still(stall);
        output::progress(&format!("{name} goes on; it stood still for {stall}"));
        output::hint(&format!("back to it: bivouac rollback {name} {id}"));
    } else {
        output::progress(&format!("stopped {name}; bivouac start {name} goes on from here"));
    }
    output::hint(&format!("another from the same state: bivouac create --snapshot {id}"));
    Ok(ExitStatus::Success)
}

/// `snapshots …`.
pub(crate) async fn run(global: &Global, args: Snapshots) -> Outcome {
    let client = Client::find(global)?;
    match args {
        Snapshots::Ls { name, label, quiet } => {
            list(&client, global, name.as_deref(), label, quiet).await
        }
        Snapshots::Get { id } => show(&client, global, &id).await,
        Snapshots::Tree { id, down } => tree(&client, global, &id, down).await,
        Snapshots::Label { id, labels } => label(&client, global, &id, labels).await,
        Snapshots::Export { id, file, format } => {
            archive::export(&client, global, &id, &file, format).await
        }
        Snapshots::Import(args) => archive::import(&client, global, args).await,
        Snapshots::Rm { ids } => {
            each(global, &ids, async |id| remove(&client, global, id).await).await
        }
    }
}

async fn list(
    client: &Client,
    global: &Global,
    name: Option<&str>,
    label: Option<(String, String)>,
    quiet: bool,
) -> Outcome {
    let mut query = client.list_scope().with("limit", "50");
    if let Some(name) = name {
        query = query.with("name", name);
    }
    if let Some((key, value)) = label {
        query = query.with("labels", &format!("{key}:{value}"));
    }
    let mut snapshots = client.pages("/v2/sandboxes/snapshots", &query, "snapshots").await?;
    // The API shows them for another day, for clients that look there for what became of one.
    snapshots.retain(|snapshot| snapshot["status"] != "deleted");
    if global.json {
        output::json(&snapshots.into())?;
        return Ok(ExitStatus::Success);
    }
    if quiet {
        return output::names(&snapshots, "id");
    }
    let now = clock::now_ms();
    let rows = snapshots.iter().map(|snapshot| row(snapshot, now)).collect();
    table::print(&COLUMNS, rows)?;
    Ok(ExitStatus::Success)
}

async fn show(client: &Client, global: &Global, id: &str) -> Outcome {
    let answer = client.get(&format!("/v2/sandboxes/snapshots/{id}"), &client.scope()).await?;
    if global.json {
        output::json(&answer)?;
        return Ok(ExitStatus::Success);
    }
    let (snapshot, now) = (&answer["snapshot"], clock::now_ms());
    let word = |key: &str| snapshot[key].as_str().unwrap_or("-").to_owned();
    let ago = |key: &str| {
        let at = snapshot[key].as_i64();
        at.map_or_else(|| "never".to_owned(), |at| format!("{} ago", clock::span(now - at)))
    };
    let mut facts = vec![
        ("id", word("id")),
        ("sandbox", word("sourceSandboxName")),
        ("status", word("status")),
        ("size", sized(snapshot)),
        ("image", word("image")),
        ("made", made(snapshot)),
        ("created", ago("createdAt")),
        ("last used", ago("lastUsedAt")),
        ("expires", expires(snapshot, now)),
        ("parent", word("parentId")),
        ("labels", labels_of(snapshot)),
    ];
    if let Some(stall) = snapshot["stallUs"].as_u64() {
        facts.push(("stood still", fork::stood_still(stall)));
    }
    output::facts(&facts)?;
    Ok(ExitStatus::Success)
}

async fn tree(client: &Client, global: &Global, id: &str, down: bool) -> Outcome {
    let order = if down { "asc" } else { "desc" };
    let path = "/v2/sandboxes/snapshots/tree";
    let query = client.list_scope().with("snapshotId", id).with("sortOrder", order);
    let levels = client.pages(path, &query, "snapshots").await?;
    if global.json {
        output::json(&levels.into())?;
        return Ok(ExitStatus::Success);
    }
    let now = clock::now_ms();
    let rows = levels.iter().map(|level| {
        let mut row = row(&level["snapshot"], now);
        row.push(level["count"].as_str().unwrap_or_default().to_owned());
        row
    });
    let mut columns = COLUMNS.to_vec();
    columns.push(Column::short("OF PARENT").spare(3));
    table::print(&columns, rows.collect())?;
    Ok(ExitStatus::Success)
}

async fn label(
    client: &Client,
    global: &Global,
    id: &str,
    labels: Vec<(String, Option<String>)>,
) -> Outcome {
    let body = json!({ "labels": labels.into_iter().collect::<BTreeMap<_, _>>() });
    let answer =
        client.patch(&format!("/bivouac/v1/snapshots/{id}"), &client.scope(), &body).await?;
    if global.json {
        output::json(&answer)?;
    } else {
        output::progress(&format!("{id}: {}", labels_of(&answer["snapshot"])));
    }
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
    vec![
        word("id"),
        word("sourceSandboxName"),
        word("status"),
        sized(snapshot),
        created.map(|at| format!("{} ago", clock::span(now - at))).unwrap_or_default(),
        expires(snapshot, now),
        made(snapshot),
        labels_of(snapshot),
    ]
}

/// How it came to be: `automatic`, `manual`, `live`, `rollback` or `fork`.
fn made(snapshot: &Value) -> String {
    let purpose = snapshot["purpose"].as_str();
    let live = snapshot["stallUs"].is_u64().then_some("live");
    let word = purpose.or(live).or(snapshot["creationMethod"].as_str());
    word.unwrap_or("-").to_owned()
}

fn expires(snapshot: &Value, now: i64) -> String {
    let at = snapshot["expiresAt"].as_i64();
    at.map_or_else(|| "never".to_owned(), |at| format!("in {}", clock::span(at - now)))
}

/// Its size, with a sign when that is an estimate.
fn sized(snapshot: &Value) -> String {
    let about = if snapshot["sizeEstimated"] == true { "~" } else { "" };
    snapshot["sizeBytes"]
        .as_u64()
        .map(|bytes| format!("{about}{}", size(bytes)))
        .unwrap_or_default()
}

fn labels_of(snapshot: &Value) -> String {
    let labels = snapshot["labels"].as_object().into_iter().flatten();
    let pairs = labels.map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()));
    let text = pairs.collect::<Vec<_>>().join(",");
    if text.is_empty() { "-".to_owned() } else { text }
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
        assert_eq!(row, ["snap_1", "-", "-", "2.0 KB", "60s ago", "never", "-", "-"]);
    }

    #[test]
    fn what_is_special_about_a_snapshot_is_shown() {
        let told = json!({ "id": "snap_1", "sourceSandboxName": "box", "status": "created",
            "createdAt": 0, "sizeBytes": 2_000, "sizeEstimated": true, "expiresAt": 120_000,
            "creationMethod": "manual", "stallUs": 7, "labels": { "a": "1", "b": "" } });
        let wanted = ["snap_1", "box", "created", "~2.0 KB", "60s ago", "in 60s", "live", "a=1,b="];
        assert_eq!(row(&told, 60_000), wanted);
        let rollback = json!({ "purpose": "rollback", "creationMethod": "manual", "stallUs": 7 });
        assert_eq!(made(&rollback), "rollback");
    }
}
