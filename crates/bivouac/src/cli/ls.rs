//! `bivouac ls`: the sandboxes of a namespace, or of all.

use futures_util::{StreamExt as _, TryStreamExt as _};
use reqwest::StatusCode;
use serde_json::Value;

use super::args::{Global, Ls};
use super::busy::{Busy, guarded};
use super::client::{Client, Query};
use super::failure::{ExitStatus, Failure, Outcome};
use super::snapshot::size;
use super::table::{self, Column, state_colour};
use super::{clock, output};

/// Disks that are walked through at the same time.
const LOOKS: usize = 4;
const COLUMNS: [Column; 5] = [
    Column::new("NAME"),
    Column::short("STATUS").colour(state_colour),
    Column::text("IMAGE").spare(3),
    Column::short("CREATED").spare(4),
    Column::text("TAGS").spare(5),
];

/// Lists every page.
pub(crate) async fn run(global: &Global, args: Ls) -> Outcome {
    let client = Client::find(global)?;
    let mut query = client.list_scope().with("limit", "50");
    if let Some(prefix) = &args.prefix {
        query = query.with("sortBy", "name").with("sortOrder", "asc").with("namePrefix", prefix);
    }
    if let Some((key, value)) = &args.tag {
        query = query.with("tags", &format!("{key}:{value}"));
    }
    let path = if args.all_namespaces {
        query = query.with("all", "true");
        "/bivouac/v1/sandboxes"
    } else {
        "/v2/sandboxes"
    };
    let mut sandboxes = client.pages(path, &query, "sandboxes").await?;
    if args.usage {
        guarded(add_usage(&client, global, &mut sandboxes)).await?;
    }
    if global.json {
        output::json(&sandboxes.into())?;
        return Ok(ExitStatus::Success);
    }
    if args.quiet {
        return output::names(&sandboxes, "name");
    }
    let now = clock::now_ms();
    let mut columns = COLUMNS.to_vec();
    if args.usage {
        columns.splice(3..3, [Column::short("DISK"), Column::short("OWN").spare(2)]);
    }
    if args.all_namespaces {
        columns.insert(0, Column::new("NAMESPACE"));
    }
    let rows = sandboxes.iter().map(|sandbox| {
        let mut row = row(sandbox, now);
        if args.usage {
            row.splice(3..3, ["bytes", "uniqueBytes"].map(|key| bytes(&sandbox["usage"][key])));
        }
        if args.all_namespaces {
            row.insert(0, format!("{}/{}", word(sandbox, "team"), word(sandbox, "project")));
        }
        row
    });
    table::print(&columns, rows.collect())?;
    if sandboxes.is_empty() && !args.all_namespaces {
        output::hint("create one with: bivouac create NAME; other namespaces: bivouac ls -A");
    }
    Ok(ExitStatus::Success)
}

/// Adds to each what it holds on disk. One that goes meanwhile has none.
async fn add_usage(client: &Client, global: &Global, sandboxes: &mut [Value]) -> Outcome<()> {
    let busy = Busy::things(global, "looking at their disks", sandboxes.len());
    let looks = sandboxes.iter_mut().map(|sandbox| {
        let busy = &busy;
        async move {
            let own = (sandbox["team"].as_str(), sandbox["project"].as_str());
            let query = match own {
                (Some(team), Some(project)) => {
                    Query::default().with("teamId", team).with("projectId", project)
                }
                _ => client.scope(),
            };
            let query = query.with("sandbox", sandbox["name"].as_str().unwrap_or_default());
            let found = client.get("/bivouac/v1/usage", &query).await;
            busy.add(1);
            match found {
                Ok(usage) => sandbox["usage"] = usage,
                Err(error) if error.is(StatusCode::NOT_FOUND) => {}
                Err(error) => return Err(Failure::from(error)),
            }
            Ok(())
        }
    });
    let looks: Vec<_> = looks.collect();
    futures_util::stream::iter(looks).buffer_unordered(LOOKS).try_collect::<Vec<()>>().await?;
    Ok(())
}

fn bytes(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".to_owned(), size)
}

fn row(sandbox: &Value, now: i64) -> Vec<String> {
    let image = sandbox["image"].as_str().or(sandbox["runtime"].as_str()).unwrap_or("-");
    let created = sandbox["createdAt"].as_i64().map(|at| format!("{} ago", clock::span(now - at)));
    let tags = sandbox["tags"].as_object().map(|tags| {
        let tags = tags.iter().map(|(k, v)| format!("{k}={}", v.as_str().unwrap_or_default()));
        tags.collect::<Vec<_>>().join(",")
    });
    vec![
        word(sandbox, "name"),
        status(sandbox).to_owned(),
        image.to_owned(),
        created.unwrap_or_default(),
        tags.unwrap_or_default(),
    ]
}

/// Its status; of one that stands still, that.
pub(crate) fn status(sandbox: &Value) -> &str {
    if sandbox["pausedAt"].is_i64() { "paused" } else { sandbox["status"].as_str().unwrap_or("-") }
}

fn word(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or("-").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stand_what_may_be_absent() {
        let full = serde_json::json!({ "name": "a", "status": "running", "image": "host",
            "createdAt": 0, "tags": { "k": "v", "l": "w" } });
        assert_eq!(row(&full, 300_000), ["a", "running", "host", "5m ago", "k=v,l=w"]);
        let paused = serde_json::json!({ "status": "running", "pausedAt": 5 });
        assert_eq!(row(&paused, 0)[1], "paused");
        assert_eq!(row(&serde_json::json!({ "name": "a" }), 0), ["a", "-", "-", "", ""]);
    }
}
