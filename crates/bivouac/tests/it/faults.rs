//! Every named step is failed, and killed at, in turn.
//!
//! For each point: the engine is started with the point armed and driven through a life; the point
//! must have been reached; the next engine, without the fault, must be usable and leave nothing.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use bivouac_testkit::{Cli, Client, LONG, TestSandbox, TestServer, Traces, exclusive};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::crash::assert_same_but_engine;

/// What the program says it has.
fn points() -> Vec<String> {
    let text = Cli::new(&["selftest", "fault-points"]).good();
    text.lines().map(str::to_owned).collect()
}

fn checked_in() -> BTreeSet<String> {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fault-points.txt");
    let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    text.lines()
        .map(str::trim)
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_list_has_not_shrunk() {
    let named: BTreeSet<String> = points().into_iter().collect();
    let wanted = checked_in();
    assert!(wanted.len() > 20, "the checked-in list is too short to mean anything: {wanted:?}");
    let missing: Vec<_> = wanted.difference(&named).collect();
    assert!(missing.is_empty(), "points that are gone: {missing:?}");
    let unlisted: Vec<_> = named.difference(&wanted).collect();
    assert!(unlisted.is_empty(), "add to tests/fault-points.txt: {unlisted:?}");
}

/// What the drive got acknowledged.
#[derive(Debug, Default)]
struct Seen {
    /// Sandboxes that a create answered and no delete ended.
    alive: BTreeSet<String>,
    /// Sandboxes whose delete was answered.
    deleted: BTreeSet<String>,
    /// Sandboxes with the file, by an acknowledged stop or snapshot.
    kept: BTreeSet<String>,
}

/// One whole life, every call of it allowed to fail: the engine may die under any of them.
async fn drive(client: &Client, seen: &mut Seen) {
    let ask = async |method: reqwest::Method, path: String, body: Value| -> Option<Value> {
        let request = client.request(method, &path).json(&body);
        let answer = client.try_send(request).await.ok()?;
        (answer.status < 300).then_some(answer.json)
    };
    let post = async |path: String, body: Value| ask(reqwest::Method::POST, path, body).await;
    for (name, persistent) in [("keeper", true), ("leaver", false), ("doomed", true)] {
        let body = json!({ "projectId": client.project(), "ports": [3000], "name": name, "persistent": persistent });
        let Some(made) = post("/v3/sandboxes".into(), body).await else { continue };
        seen.alive.insert(name.to_owned());
        let id = made["session"]["id"].as_str().unwrap_or_default().to_owned();
        let path = |tail: &str| format!("/v2/sandboxes/sessions/{id}{tail}");
        let command = json!({ "command": "sh", "args": ["-c", "echo kept > file; sync"] });
        let wrote = match post(path("/cmd"), command).await {
            Some(started) => {
                let cmd = started["command"]["id"].as_str().unwrap_or_default().to_owned();
                let done =
                    ask(reqwest::Method::GET, path(&format!("/cmd/{cmd}?wait=true")), json!({}))
                        .await;
                done.is_some_and(|d| d["command"]["exitCode"] == 0)
            }
            None => false,
        };
        let _ = post(path("/extend-timeout"), json!({ "duration": 5000 })).await;
        let _ = post(path("/network-policy"), json!({ "mode": "deny-all" })).await;
        let change = json!({ "tags": { "a": "b" }, "keepLastSnapshots": { "count": 1 } });
        let _ = ask(reqwest::Method::PATCH, format!("/v2/sandboxes/{name}"), change).await;
        let stopped = post(path("/stop"), json!({})).await;
        if wrote && persistent && stopped.is_some() {
            seen.kept.insert(name.to_owned());
        }
        let again =
            ask(reqwest::Method::GET, format!("/v2/sandboxes/{name}?resume=true"), json!({})).await;
        if let Some(view) = again {
            let id = view["session"]["id"].as_str().unwrap_or_default();
            let _ = post(
                format!("/v2/sandboxes/sessions/{id}/cmd"),
                json!({ "command": "true", "args": [] }),
            )
            .await;
            let _ = post(format!("/v2/sandboxes/sessions/{id}/snapshot"), json!({})).await;
            // A second snapshot evicts the first.
            let _ =
                ask(reqwest::Method::GET, format!("/v2/sandboxes/{name}?resume=true"), json!({}))
                    .await;
        }
        let fork = format!("{name}-fork");
        if post(format!("/v2/sandboxes/{name}/fork"), json!({ "name": fork })).await.is_some() {
            seen.alive.insert(fork.clone());
        }
        if name == "doomed" {
            for gone in [name, &fork] {
                // From here on both ends are right until the delete is answered.
                seen.alive.remove(gone);
                seen.kept.remove(gone);
                let path = format!("/v2/sandboxes/{gone}?deleteOrphanSnapshots=true");
                if ask(reqwest::Method::DELETE, path, json!({})).await.is_some() {
                    seen.deleted.insert(gone.to_owned());
                }
            }
        }
    }
    snapshot_alone(client, &ask).await;
    drives(client, &ask).await;
    states(client, &ask, seen).await;
    pauses(client, &ask, seen).await;
    if let Some(made) = post(
        "/v3/sandboxes".into(),
        json!({ "projectId": client.project(), "ports": [], "name": "lost" }),
    )
    .await
    {
        seen.alive.insert("lost".to_owned());
        let sandbox = TestSandbox::of(client, made);
        if let Some(pid) = crate::crash::shims(&sandbox.session).first() {
            let _ = kill_process(*pid, Signal::KILL);
        }
        ended(&ask, "lost").await;
    }
    let body =
        json!({ "projectId": client.project(), "ports": [], "name": "timed", "timeout": 1000 });
    if post("/v3/sandboxes".into(), body).await.is_some() {
        seen.alive.insert("timed".to_owned());
        ended(&ask, "timed").await;
    }
}

/// A snapshot that outlives its sandbox and is deleted by itself.
async fn snapshot_alone(
    client: &Client,
    ask: &impl AsyncFn(reqwest::Method, String, Value) -> Option<Value>,
) {
    let (post, delete) = (reqwest::Method::POST, reqwest::Method::DELETE);
    let body = json!({ "projectId": client.project(), "ports": [], "name": "snapper" });
    let Some(made) = ask(post.clone(), "/v3/sandboxes".into(), body).await else { return };
    let id = made["session"]["id"].as_str().unwrap_or_default();
    let path = format!("/v2/sandboxes/sessions/{id}/snapshot");
    let taken = ask(post, path, json!({})).await;
    let _ = ask(delete.clone(), "/v2/sandboxes/snapper".into(), json!({})).await;
    if let Some(taken) = taken {
        let id = taken["snapshot"]["id"].as_str().unwrap_or_default();
        there_and_back(client, id).await;
        let _ = ask(delete, format!("/v2/sandboxes/snapshots/{id}"), json!({})).await;
    }
}

/// A snapshot that leaves as an archive and comes in again.
async fn there_and_back(client: &Client, id: &str) {
    let path = format!("/api/bivouac/v1/snapshots/{id}/export");
    let exported = client.try_send(client.request(reqwest::Method::GET, &path)).await;
    let Some(archive) = exported.ok().filter(|answer| answer.status == 200) else { return };
    let path = "/api/bivouac/v1/snapshots/import";
    let import = client.request(reqwest::Method::POST, path).body(archive.bytes);
    let _ = client.try_send(import).await;
}

/// A drive that is made, mounted, detached, attached, detached by force and deleted; one that stays.
async fn drives(
    client: &Client,
    ask: &impl AsyncFn(reqwest::Method, String, Value) -> Option<Value>,
) {
    let (post, delete) = (reqwest::Method::POST, reqwest::Method::DELETE);
    let small = json!({ "projectId": client.project(), "maxSizeBytes": 1 << 26 });
    for name in ["gone", "stays"] {
        let _ = ask(post.clone(), format!("/v2/sandboxes/drives/{name}"), small.clone()).await;
    }
    let mounts = json!({ "/stays": { "drive": "stays" } });
    let body = json!({ "projectId": client.project(), "ports": [], "name": "mounter",
        "persistent": false, "mounts": mounts });
    let _ = ask(post.clone(), "/v3/sandboxes".into(), body).await;
    let place = json!({ "sandbox": "mounter", "path": "/gone" });
    for force in [false, true] {
        let _ = ask(post.clone(), "/api/bivouac/v1/drives/gone/attach".into(), place.clone()).await;
        let body = json!({ "sandbox": "mounter", "force": force });
        let _ = ask(post.clone(), "/api/bivouac/v1/drives/gone/detach".into(), body).await;
    }
    let _ = ask(delete.clone(), "/v2/sandboxes/mounter".into(), json!({})).await;
    let _ = ask(delete, "/v2/sandboxes/drives/gone".into(), json!({})).await;
}

/// A box that is caught while it runs, forked, and goes back.
async fn states(
    client: &Client,
    ask: &impl AsyncFn(reqwest::Method, String, Value) -> Option<Value>,
    seen: &mut Seen,
) {
    let post = reqwest::Method::POST;
    let body = json!({ "projectId": client.project(), "ports": [], "name": "stater" });
    if ask(post.clone(), "/v3/sandboxes".into(), body).await.is_none() {
        return;
    }
    seen.alive.insert("stater".to_owned());
    let path = |tail: &str| format!("/api/bivouac/v1/sandboxes/stater/{tail}");
    let _ = ask(post.clone(), path("snapshots"), json!({ "live": true })).await;
    if ask(post.clone(), path("forks"), json!({ "count": 2, "name": "twin" })).await.is_some() {
        seen.alive.extend(["twin-1", "twin-2"].map(str::to_owned));
    }
    let _ = ask(post, path("rollback"), json!({})).await;
}

/// A box that stands still and goes on, is lost and comes back, and is stopped with its hook.
async fn pauses(
    client: &Client,
    ask: &impl AsyncFn(reqwest::Method, String, Value) -> Option<Value>,
    seen: &mut Seen,
) {
    let (get, post) = (reqwest::Method::GET, reqwest::Method::POST);
    let life = json!({ "restart": "unless-stopped", "preStop": { "command": "true" } });
    let body =
        json!({ "projectId": client.project(), "ports": [], "name": "pauser", "life": life });
    let Some(made) = ask(post.clone(), "/v3/sandboxes".into(), body).await else { return };
    seen.alive.insert("pauser".to_owned());
    for tail in ["pause", "unpause", "pause"] {
        let path = format!("/api/bivouac/v1/sandboxes/pauser/{tail}");
        let _ = ask(post.clone(), path, json!({})).await;
    }
    let first = made["session"]["id"].as_str().unwrap_or_default().to_owned();
    if let Some(pid) = crate::crash::shims(&first).first() {
        let _ = kill_process(*pid, Signal::KILL);
    }
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_secs(10) {
        let view = ask(get.clone(), "/v2/sandboxes/pauser".into(), json!({})).await;
        let Some(view) = view else { return };
        let id = view["session"]["id"].as_str().unwrap_or_default();
        if id != first && view["session"]["status"] == "running" {
            let _ = ask(post, format!("/v2/sandboxes/sessions/{id}/stop"), json!({})).await;
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until a session has ended, or the engine has.
async fn ended(ask: &impl AsyncFn(reqwest::Method, String, Value) -> Option<Value>, name: &str) {
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_secs(10) {
        let view = ask(reqwest::Method::GET, format!("/v2/sandboxes/{name}"), json!({})).await;
        let over =
            |v: Value| matches!(v["session"]["status"].as_str(), Some("stopped" | "aborted"));
        if view.is_none_or(over) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// After the restart: everything acknowledged holds, everything works, and all of it can be removed.
async fn settle(server: &TestServer, seen: &Seen, point: &str) {
    let client = server.client("faults").unwrap();
    let list = client.get("/v2/sandboxes?limit=50").await.ok();
    let names: BTreeSet<String> = list["sandboxes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["name"].as_str().unwrap().to_owned())
        .collect();
    let twins = names.iter().filter(|name| name.starts_with("twin-")).count();
    assert!([0, 2].contains(&twins), "{point}: some forks of one call are there: {names:?}");
    let lost: Vec<_> = seen.alive.difference(&names).collect();
    assert!(lost.is_empty(), "{point}: acknowledged and lost: {lost:?}");
    let back: Vec<_> = seen.deleted.intersection(&names).collect();
    assert!(back.is_empty(), "{point}: deleted and back: {back:?}");
    for name in &names {
        let view = client.get(&format!("/v2/sandboxes/{name}?resume=true")).await.ok();
        assert_eq!(view["session"]["status"], "running", "{point}: {name}: {view}");
        let sandbox = TestSandbox::of(&client, view);
        assert_eq!(sandbox.run(&["echo", "usable"]).await.good(), "usable", "{point}: {name}");
        if seen.kept.contains(name) {
            assert_eq!(
                sandbox.run(&["cat", "file"]).await.good(),
                "kept",
                "{point}: {name} lost its file"
            );
        }
        let _ = sandbox.delete().await.ok();
    }
    let fresh = TestSandbox::create(&client, json!({ "name": "fresh" })).await;
    assert_eq!(fresh.run(&["echo", "fresh"]).await.good(), "fresh", "{point}");
    let _ = fresh.delete().await.ok();
    // What is there of drives can be had, written and deleted.
    for name in ["gone", "stays"] {
        let small = json!({ "maxSizeBytes": 1 << 26 });
        let _ = client.post(&format!("/v2/sandboxes/drives/{name}"), &small).await.ok();
        let body = json!({ "persistent": false, "mounts": { "/d": { "drive": name } } });
        let writer = TestSandbox::create(&client, body).await;
        assert_eq!(writer.run(&["touch", "/d/f"]).await.good(), "", "{point}");
        let _ = writer.delete().await.ok();
        let _ = client.delete(&format!("/v2/sandboxes/drives/{name}")).await.ok();
    }
    let left = client.get("/v2/sandboxes/snapshots?limit=50").await.ok();
    for snapshot in left["snapshots"].as_array().unwrap() {
        if snapshot["status"] != "deleted" {
            let _ = client
                .delete(&format!("/v2/sandboxes/snapshots/{}", snapshot["id"].as_str().unwrap()))
                .await
                .ok();
        }
    }
}

/// An engine that died between a create's first row and its launch: the next one has a launch to
/// call failed.
async fn leave_half_a_create(server: &mut TestServer) {
    let mark = tempfile::NamedTempFile::new().unwrap();
    let fault = format!("engine.create_inserted:kill:{}", mark.path().display());
    let armed = TestServer::builder().env("BIVOUAC_TEST_FAULT", fault);
    server.restart_with(armed).await.unwrap();
    let client = server.client("faults").unwrap();
    let body = json!({ "projectId": client.project(), "ports": [], "name": "half" });
    let request = client.request(reqwest::Method::POST, "/v3/sandboxes").json(&body);
    let answer = client.try_send(request).await;
    assert!(answer.is_err(), "the engine was to die: {answer:?}");
    let _ = server.wait_end(LONG).await.unwrap();
}

async fn every_point(mode: &str) {
    let lock = exclusive().unwrap();
    let mut server = TestServer::start().await.unwrap();
    let warm =
        TestSandbox::create(&server.client("faults").unwrap(), json!({ "name": "warm" })).await;
    let _ = warm.delete().await.ok();
    server.restart().await.unwrap();
    let before = Traces::before(&server.data);
    let mark = tempfile::NamedTempFile::new().unwrap();
    let only = std::env::var("BIVOUAC_TEST_POINT").ok();
    let mut failures = Vec::new();
    for point in points().into_iter().filter(|p| only.as_ref().is_none_or(|o| o == p)) {
        fs::write(mark.path(), "").unwrap();
        let fault = format!("{point}:{mode}:{}", mark.path().display());
        let armed = TestServer::builder().env("BIVOUAC_TEST_FAULT", fault);
        let mut seen = Seen::default();
        if point.starts_with("engine.launch_failed") {
            leave_half_a_create(&mut server).await;
        }
        if point == "engine.gc_removed" {
            // What a crash long ago may have left: the start finds it.
            let orphan = server.data.join("pool/logs/sbx_00000000010000000000000000");
            fs::create_dir(orphan).unwrap();
        }
        // A point of the start itself may keep the engine from being ready: that is reaching it.
        if server.restart_with(armed).await.is_ok() {
            let client = server.client("faults").unwrap();
            let life = tokio::time::timeout(LONG, drive(&client, &mut seen)).await;
            assert!(life.is_ok(), "{point}:{mode}: the life did not end\n{}", server.tail());
        }
        let reached = fs::read_to_string(mark.path()).unwrap();
        if !reached.contains(&point) {
            failures.push(format!("{point}:{mode} was never reached"));
        }
        server.restart_with(TestServer::builder()).await.unwrap();
        settle(&server, &seen, &format!("{point}:{mode}")).await;
        assert_same_but_engine(&before, &server).await;
    }
    assert!(failures.is_empty(), "{failures:#?}");
    drop((server, lock));
}

#[tokio::test]
async fn every_point_fails() {
    every_point("fail").await;
}

#[tokio::test]
async fn every_point_kills() {
    every_point("kill").await;
}
