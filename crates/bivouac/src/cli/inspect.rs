//! `bivouac inspect`: everything about one sandbox.

use serde_json::{Value, json};

use super::args::Global;
use super::client::Client;
use super::failure::{ExitStatus, Outcome};
use super::snapshot::size;
use super::{clock, life, ls, output, sandbox};

/// Shows the sandbox, its newest session and its routes; starts nothing.
pub(crate) async fn run(global: &Global, name: &str) -> Outcome {
    let client = Client::find(global)?;
    let answer = sandbox::get(&client, name).await?;
    let query = client.scope().with("sandbox", name);
    let usage = client.get("/bivouac/v1/usage", &query).await?;
    if global.json {
        let view = json!({
            "sandbox": answer["sandbox"],
            "session": answer["session"],
            "routes": answer["routes"],
            "usage": usage,
        });
        output::json(&view)?;
    } else {
        output::facts(&facts(&answer, &usage, clock::now_ms()))?;
    }
    Ok(ExitStatus::Success)
}

fn facts(answer: &Value, usage: &Value, now: i64) -> Vec<(&'static str, String)> {
    let (sandbox, session) = (&answer["sandbox"], &answer["session"]);
    let mut facts = Vec::new();
    let mut add = |name, value: Option<String>| facts.extend(value.map(|value| (name, value)));
    let text = |from: &Value, key: &str| from[key].as_str().map(str::to_owned);
    let ago = |from: &Value, key: &str| {
        from[key].as_i64().map(|at| format!("{} ago", clock::span(now - at)))
    };
    add("name", text(sandbox, "name"));
    add("status", text(sandbox, "status").map(|_| ls::status(sandbox).to_owned()));
    add("paused", ago(sandbox, "pausedAt"));
    add("reason", text(session, "reason").or_else(|| text(sandbox, "reason")));
    add("image", text(sandbox, "image").or_else(|| text(sandbox, "runtime")));
    add(
        "persistent",
        sandbox["persistent"].as_bool().map(|yes| if yes { "yes" } else { "no" }.to_owned()),
    );
    add("vcpus", session["vcpus"].as_i64().map(|n| n.to_string()));
    add("memory", session["memory"].as_i64().map(|mb| format!("{mb} MB")));
    add("disk", disk(usage));
    add("folder", text(session, "cwd"));
    add("timeout", session["timeout"].as_i64().map(clock::span));
    add("expires", sandbox["expiresAt"].as_i64().map(|at| format!("in {}", clock::span(at - now))));
    for (name, rule) in life::facts(&sandbox["life"]) {
        add(name, Some(rule));
    }
    add("restarts", life::restarts(&sandbox["restarts"], now));
    add("created", ago(sandbox, "createdAt"));
    add("session", text(session, "id"));
    add("started", ago(session, "startedAt"));
    add("stopped", ago(session, "stoppedAt"));
    add("snapshot", text(sandbox, "currentSnapshotId"));
    let running = session["status"] == "running";
    let in_force = if running { &session["networkPolicy"] } else { &sandbox["networkPolicy"] };
    add("policy", policy(in_force));
    for (key, value) in sandbox["tags"].as_object().into_iter().flatten() {
        add("tag", Some(format!("{key}={}", value.as_str().unwrap_or_default())));
    }
    for route in answer["routes"].as_array().into_iter().flatten() {
        let url = route["url"].as_str().unwrap_or_default();
        add("port", route["port"].as_i64().map(|port| format!("{port} -> {url}")));
    }
    facts
}

/// What it holds, of how much, and what of that is its alone.
fn disk(usage: &Value) -> Option<String> {
    let mut text = size(usage["bytes"].as_u64()?);
    if let Some(limit) = usage["limitBytes"].as_u64() {
        text.push_str(&format!(" of {}", size(limit)));
    }
    if let Some(own) =
        usage["uniqueBytes"].as_u64().filter(|own| Some(*own) != usage["bytes"].as_u64())
    {
        text.push_str(&format!(", {} shared with nothing", size(own)));
    }
    Some(text)
}

/// The policy as one line: its mode, and how much it lists.
fn policy(policy: &Value) -> Option<String> {
    let mode = policy["mode"].as_str()?;
    let mut lists = Vec::new();
    for (field, one, many) in [
        ("allowedDomains", "host", "hosts"),
        ("allowedCIDRs", "allowed range", "allowed ranges"),
        ("deniedCIDRs", "denied range", "denied ranges"),
        ("injectionRules", "rule with credentials", "rules with credentials"),
    ] {
        match policy[field].as_array().map_or(0, Vec::len) {
            0 => {}
            1 => lists.push(format!("1 {one}")),
            count => lists.push(format!("{count} {many}")),
        }
    }
    Some(if lists.is_empty() { mode.to_owned() } else { format!("{mode}: {}", lists.join(", ")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_known_is_shown() {
        let answer = json!({
            "sandbox": { "name": "box", "status": "running", "expiresAt": 300_000 },
            "session": { "id": "sbx_1", "memory": 4096 },
            "routes": [{ "port": 3000, "url": "http://x.localhost:1" }],
        });
        let facts = facts(&answer, &json!({}), 0);
        let usage = json!({ "bytes": 5_000, "uniqueBytes": 1_000, "limitBytes": 9_000 });
        let told = "5.0 KB of 9.0 KB, 1.0 KB shared with nothing";
        assert_eq!(disk(&usage).as_deref(), Some(told));
        assert_eq!(disk(&json!({ "bytes": 5, "uniqueBytes": 5 })).as_deref(), Some("5 B"));
        let names: Vec<&str> = facts.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["name", "status", "memory", "expires", "session", "port"]);
        assert_eq!(policy(&json!({ "mode": "deny-all" })).as_deref(), Some("deny-all"));
        let custom =
            json!({ "mode": "custom", "allowedDomains": ["a", "b"], "deniedCIDRs": ["c"] });
        assert_eq!(policy(&custom).as_deref(), Some("custom: 2 hosts, 1 denied range"));
        assert_eq!(facts[3].1, "in 5m");
        assert_eq!(facts[5].1, "3000 -> http://x.localhost:1");
    }
}
