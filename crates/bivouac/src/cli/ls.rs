//! `bivouac ls`: the sandboxes of a namespace, or of all.

use serde_json::Value;

use super::args::{Global, Ls};
use super::client::Client;
use super::failure::{ExitStatus, Outcome};
use super::{clock, output};

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
    let sandboxes = client.pages(path, &query, "sandboxes").await?;
    if global.json {
        output::json(&sandboxes.into())?;
        return Ok(ExitStatus::Success);
    }
    if args.quiet {
        for sandbox in &sandboxes {
            output::line(sandbox["name"].as_str().unwrap_or_default())?;
        }
        return Ok(ExitStatus::Success);
    }
    let now = clock::now_ms();
    if args.all_namespaces {
        let rows = sandboxes.iter().map(|sandbox| {
            let mut row = row(sandbox, now);
            row.insert(0, format!("{}/{}", word(sandbox, "team"), word(sandbox, "project")));
            row
        });
        output::table(
            &["NAMESPACE", "NAME", "STATUS", "IMAGE", "CREATED", "TAGS"],
            rows.collect(),
        )?;
    } else {
        let rows = sandboxes.iter().map(|sandbox| row(sandbox, now)).collect();
        output::table(&["NAME", "STATUS", "IMAGE", "CREATED", "TAGS"], rows)?;
    }
    if sandboxes.is_empty() && !args.all_namespaces {
        output::hint("create one with: bivouac create NAME; other namespaces: bivouac ls -A");
    }
    Ok(ExitStatus::Success)
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
