//! Connections through the broker of a sandbox that stands still: alive afterwards, or closed; never hanging.

use std::time::Duration;

use bivouac_testkit::{LONG, TestSandbox, eventually};
use serde_json::{Value, json};

use crate::lifecycle::says;
use crate::tools::{PLAYED, begin};
use crate::{Bed, fresh};

const OK: &str = "198.51.100.10";

async fn pause(bed: &Bed, sandbox: &TestSandbox) -> i64 {
    let path = format!("/api/bivouac/v1/sandboxes/{}/pause", sandbox.name);
    let paused = bed.client.post(&path, &json!({})).await.ok();
    paused["session"]["pausedAt"].as_i64().unwrap()
}

async fn unpause(bed: &Bed, sandbox: &TestSandbox) {
    let path = format!("/api/bivouac/v1/sandboxes/{}/unpause", sandbox.name);
    let _ = bed.client.post(&path, &json!({})).await.ok();
}

/// Bytes that a command has written so far: a look that wakes nobody.
async fn written(sandbox: &TestSandbox, command: &str) -> usize {
    let mut lines = sandbox.logs(command).await;
    let mut bytes = 0;
    // What there is comes at once; then the stream waits for more.
    let until = tokio::time::Instant::now() + Duration::from_millis(500);
    while let Ok(Ok(Some(line))) =
        tokio::time::timeout_at(until, lines.next(Duration::from_secs(1))).await
    {
        bytes += line["data"].as_str().map_or(0, str::len);
    }
    bytes
}

async fn held(sandbox: &TestSandbox, name: &str) -> [String; 2] {
    let request = format!("GET /held HTTP/1.1\\r\\nHost: {name}\\r\\n\\r\\n");
    let read = begin(sandbox, &["hold", PLAYED, "443", name, &request]).await;
    let spliced = begin(sandbox, &["hold", "203.0.113.126", "9000", "-", "x"]).await;
    for command in [&read, &spliced] {
        says(sandbox, command, "alive").await;
    }
    [read, spliced]
}

/// One host whose requests are read, and everything else spliced.
fn policy(name: &str) -> Value {
    json!({ "allow": { name: [{ "transform": [{ "headers": { "x-a": "b" } }] }], "*": [] } })
}

#[tokio::test]
async fn connections_outlive_a_pause() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let sandbox = bed.sandbox(policy(&name)).await;
    let held = held(&sandbox, &name).await;
    let since = pause(&bed, &sandbox).await;
    let mut before = Vec::new();
    for command in &held {
        before.push(written(&sandbox, command).await);
    }
    eventually("a pause of three seconds", LONG, async || {
        let stats = bed.client.get("/api/bivouac/v1/stats").await.ok();
        (stats["at"].as_i64().unwrap() >= since + 3_000).then_some(()).ok_or("not yet")
    })
    .await;
    for (command, before) in held.iter().zip(&before) {
        assert_eq!(written(&sandbox, command).await, *before, "something went on in a pause");
    }
    unpause(&bed, &sandbox).await;
    for (command, before) in held.iter().zip(before) {
        eventually("it goes on", LONG, async || {
            let now = written(&sandbox, command).await;
            (now > before + 60).then_some(()).ok_or("not yet")
        })
        .await;
        let _ = sandbox.kill(command, 9).await;
        let out = sandbox.output(command).await.out();
        assert!(!out.contains("closed") && !out.contains("broken"), "{out}");
        assert_eq!(out.matches("open").count(), 1, "{out}");
    }
    let _ = sandbox.delete().await;
}

#[tokio::test]
async fn what_was_cut_in_a_pause_is_seen_at_once_after_it() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let sandbox = bed.sandbox(policy(&name)).await;
    let held = held(&sandbox, &name).await;
    let since = pause(&bed, &sandbox).await;
    // A new policy is the broker's: it cuts, and the sandbox stays as it is.
    bed.set(&sandbox, &json!({ "mode": "deny-all" })).await;
    let view = sandbox.get(false).await.ok();
    assert_eq!(view["session"]["pausedAt"], since, "{view}");
    unpause(&bed, &sandbox).await;
    for command in held {
        let record = tokio::time::timeout(Duration::from_secs(20), sandbox.wait(&command)).await;
        assert!(record.is_ok(), "the end of its connection was not seen");
        let out = sandbox.output(&command).await.out();
        assert!(out.ends_with("closed") || out.contains("broken"), "{out}");
    }
    let _ = sandbox.delete().await;
}
