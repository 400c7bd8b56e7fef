//! The life of a sandbox: create, stop, resume, time out, snapshot, fork, delete; twice and at once.

use std::collections::BTreeSet;
use std::time::Duration;

use bivouac_testkit::{LONG, SHORT, Tar, TestSandbox, eventually};
use reqwest::Method;
use serde_json::json;

use crate::server;

#[tokio::test]
async fn a_stop_keeps_the_files_and_a_call_brings_them_back() {
    let server = server().await;
    let client = server.team("persist");
    let body =
        json!({ "name": "box", "env": { "KEPT": "yes" }, "ports": [3000], "tags": { "a": "b" } });
    let mut sandbox = TestSandbox::create(&client, body).await;
    assert_eq!(sandbox.view["sandbox"]["persistent"], true);
    assert_eq!(sandbox.view["sandbox"]["status"], "running");
    let _ = sandbox
        .write(
            "/vercel/sandbox",
            Tar::new().file_mode("run.sh", 0o755, b"#!/bin/sh\necho $KEPT\n").gzip(),
        )
        .await
        .ok();
    let script = "mkdir -p d && echo root > /etc/own; ln -s run.sh link; rm -f /usr/share/doc/bash/README; chmod 640 run.sh; chmod 755 run.sh";
    let _ = sandbox.sudo(script).await;
    let _ = sandbox.start(&["sleep", "86050"], json!({})).await;
    let first = sandbox.session.clone();
    let stopped = sandbox.stop().await.ok();
    assert_eq!(stopped["session"]["id"], json!(first));
    assert_eq!(stopped["session"]["status"], "stopped");
    assert!(stopped["session"]["stoppedAt"].is_i64(), "{stopped}");
    assert!(stopped["session"]["duration"].is_i64(), "{stopped}");
    assert_eq!(stopped["snapshot"]["status"], "created");
    assert_eq!(stopped["sandbox"]["currentSnapshotId"], stopped["snapshot"]["id"]);
    let again = sandbox.stop().await.ok();
    assert_eq!(again["session"]["status"], "stopped");
    assert!(again.get("snapshot").is_none(), "{again}");

    // Looking does not wake it; calls say 410 until someone resumes.
    let seen = sandbox.get(false).await.ok();
    assert_eq!(seen["sandbox"]["status"], "stopped");
    assert_eq!(seen["session"]["id"], json!(first));
    let body = json!({ "command": "true", "args": [] });
    sandbox.post("/cmd", &body).await.refused(410, "sandbox_stopped");
    sandbox.post("/fs/mkdir", &json!({ "path": "x" })).await.refused(410, "sandbox_stopped");
    sandbox.read("run.sh").await.refused(410, "sandbox_stopped");
    sandbox
        .post("/extend-timeout", &json!({ "duration": 5000 }))
        .await
        .refused(410, "sandbox_stopped");
    sandbox.post("/snapshot", &json!({})).await.refused(410, "sandbox_stopped");
    assert_eq!(sandbox.get(false).await.ok()["sandbox"]["status"], "stopped");

    assert!(sandbox.resume().await, "the first resume starts a session");
    assert_ne!(sandbox.session, first);
    assert_eq!(sandbox.view["session"]["sourceSnapshotId"], stopped["snapshot"]["id"]);
    assert!(!sandbox.resume().await, "the second finds it running");
    assert_eq!(sandbox.run(&["./link"]).await.good(), "yes");
    let stat = sandbox.run(&["stat", "-c", "%a %U", "run.sh", "/etc/own"]).await.good();
    assert_eq!(stat, "755 vercel-sandbox\n644 root");
    assert_eq!(
        crate::commands::running(&sandbox, "86050").await,
        Vec::<String>::new(),
        "processes do not come back"
    );
    assert_eq!(sandbox.view["routes"][0]["port"], 3000);
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn without_persistence_nothing_is_kept() {
    let server = server().await;
    let client = server.team("ephemeral");
    let mut sandbox =
        TestSandbox::create(&client, json!({ "persistent": false, "name": "gone" })).await;
    let _ = sandbox.sh("echo x > file").await.good();
    let stopped = sandbox.stop().await.ok();
    assert!(stopped.get("snapshot").is_none(), "{stopped}");
    assert!(stopped["sandbox"].get("currentSnapshotId").is_none(), "{stopped}");
    assert!(sandbox.resume().await);
    assert_ne!(sandbox.run(&["cat", "file"]).await.exit, Some(0));
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn parallel_resumes_make_one_session() {
    let server = server().await;
    let client = server.team("resume");
    let sandbox = TestSandbox::create(&client, json!({ "name": "one" })).await;
    let _ = sandbox.stop().await.ok();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..12 {
        let sandbox = sandbox.clone();
        tasks.spawn(async move { sandbox.get(true).await.ok() });
    }
    let mut sessions = BTreeSet::new();
    let mut resumed = 0;
    while let Some(view) = tokio::time::timeout(LONG, tasks.join_next()).await.unwrap() {
        let view = view.unwrap();
        assert_eq!(view["session"]["status"], "running", "{view}");
        sessions.insert(view["session"]["id"].as_str().unwrap().to_owned());
        resumed += i32::from(view["resumed"] == true);
    }
    assert_eq!(sessions.len(), 1);
    assert!(resumed >= 1, "nobody was told of the resume");
    let list = client.get(&format!("/v2/sandboxes/sessions?name={}", sandbox.name)).await.ok();
    assert_eq!(list["sessions"].as_array().unwrap().len(), 2, "{list}");
}

#[tokio::test]
async fn parallel_stops_and_deletes_are_one() {
    let server = server().await;
    let client = server.team("at-once");
    let sandbox = TestSandbox::create(&client, json!({ "name": "many" })).await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let sandbox = sandbox.clone();
        tasks.spawn(async move { sandbox.stop().await });
    }
    let mut snapshots = BTreeSet::new();
    while let Some(answer) = tokio::time::timeout(LONG, tasks.join_next()).await.unwrap() {
        let answer = answer.unwrap().ok();
        assert_eq!(answer["session"]["status"], "stopped", "{answer}");
        snapshots.extend(answer["snapshot"]["id"].as_str().map(str::to_owned));
    }
    assert!(snapshots.len() <= 1, "{snapshots:?}");
    let list = client.get("/v2/sandboxes/snapshots?name=many").await.ok();
    assert_eq!(list["snapshots"].as_array().unwrap().len(), 1, "{list}");
    for _ in 0..8 {
        let sandbox = sandbox.clone();
        tasks.spawn(async move { sandbox.delete().await });
    }
    let mut deleted = 0;
    while let Some(answer) = tokio::time::timeout(LONG, tasks.join_next()).await.unwrap() {
        let answer = answer.unwrap();
        match answer.status {
            200 => deleted += 1,
            404 => {}
            _ => panic!("{answer}"),
        }
    }
    assert!(deleted >= 1);
    sandbox.get(false).await.refused(404, "not_found");
}

#[tokio::test]
async fn time_runs_out() {
    let server = server().await;
    let client = server.team("time");
    let sandbox = TestSandbox::create(&client, json!({ "name": "short", "timeout": 1500 })).await;
    let ephemeral =
        TestSandbox::create(&client, json!({ "timeout": 1500, "persistent": false })).await;
    let _ = sandbox.sh("echo kept > file").await.good();
    let id = sandbox.start(&["sleep", "86051"], json!({})).await;
    let ended = eventually("the session to end", SHORT, async || {
        let view = sandbox.get(false).await.ok();
        if view["sandbox"]["status"] == "stopped" {
            Ok(view)
        } else {
            Err(view["sandbox"]["status"].clone())
        }
    })
    .await;
    assert!(ended["sandbox"]["currentSnapshotId"].is_string(), "{ended}");
    assert_eq!(sandbox.command(&id).await.ok()["command"]["reason"], "sandbox_stopped");
    let mut back = sandbox.clone();
    assert!(back.resume().await);
    assert_eq!(back.view["session"]["timeout"], 1500, "a fresh session has the whole time again");
    assert_eq!(back.run(&["cat", "file"]).await.good(), "kept");
    eventually("the other one to end", SHORT, async || {
        let view = ephemeral.get(false).await.ok();
        if view["sandbox"]["status"] == "stopped" { Ok(()) } else { Err(view) }
    })
    .await;
    let view = ephemeral.get(false).await.ok();
    assert!(view["sandbox"].get("currentSnapshotId").is_none(), "{view}");
}

#[tokio::test]
async fn time_can_be_extended() {
    let server = server().await;
    let client = server.team("extend");
    let sandbox = TestSandbox::create(&client, json!({ "timeout": 3000 })).await;
    let longer = sandbox.post("/extend-timeout", &json!({ "duration": 60_000 })).await.ok();
    assert_eq!(longer["session"]["timeout"], 63_000);
    assert_eq!(sandbox.get(false).await.ok()["session"]["timeout"], 63_000);
    // It outlives its first deadline.
    let ran = sandbox.sh("sleep 4; echo alive").await;
    assert_eq!(ran.good(), "alive");
    for bad in [
        json!({ "duration": 999 }),
        json!({ "duration": -5 }),
        json!({}),
        json!({ "duration": "1s" }),
    ] {
        sandbox.post("/extend-timeout", &bad).await.refused(400, "");
    }
    let far = json!({ "duration": 90_000_000 });
    sandbox.post("/extend-timeout", &far).await.refused(400, "sandbox_timeout_invalid");
    assert_eq!(sandbox.get(false).await.ok()["session"]["timeout"], 63_000);
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn snapshots_outlive_and_start_others() {
    let server = server().await;
    let client = server.team("snapshots");
    let sandbox = TestSandbox::create(&client, json!({ "name": "source" })).await;
    let _ = sandbox
        .sh("head -c 1000000 /dev/urandom > data; sha256sum data > sum; mkdir -p a/b; mkfifo p")
        .await
        .good();
    let taken = sandbox.post("/snapshot", &json!({ "expiration": 0 })).await.ok();
    assert_eq!(taken["session"]["status"], "stopped", "{taken}");
    let snapshot = &taken["snapshot"];
    let id = snapshot["id"].as_str().unwrap();
    assert!(id.starts_with("snap_"), "{taken}");
    assert!(snapshot["sizeBytes"].as_u64().unwrap() >= 1_000_000, "{taken}");
    assert!(snapshot.get("expiresAt").is_none(), "0 is never: {taken}");
    assert_eq!(snapshot["creationMethod"], "manual");
    assert_eq!(snapshot["sourceSessionId"], json!(sandbox.session));
    let from = json!({ "source": { "type": "snapshot", "snapshotId": id }, "persistent": false });
    let one = TestSandbox::create(&client, from.clone()).await;
    let two = TestSandbox::create(&client, from.clone()).await;
    for copy in [&one, &two] {
        assert_eq!(copy.run(&["sha256sum", "-c", "sum"]).await.good(), "data: OK");
    }
    let _ = one.sh("echo changed > data").await.good();
    assert_eq!(
        two.run(&["sha256sum", "-c", "sum"]).await.good(),
        "data: OK",
        "copies share nothing"
    );
    let forked = client.post("/v2/sandboxes/source/fork", &json!({ "name": "fork" })).await.ok();
    let forked = TestSandbox::of(&client, forked);
    assert_eq!(forked.run(&["sha256sum", "-c", "sum"]).await.good(), "data: OK");
    client.post("/v2/sandboxes/nope/fork", &json!({})).await.refused(404, "not_found");
    client.post("/v2/sandboxes/source/fork", &json!({ "name": "fork" })).await.refused(400, "");
    let deleted = client.delete(&format!("/v2/sandboxes/snapshots/{id}")).await.ok();
    assert_eq!(deleted["snapshot"]["status"], "deleted");
    let refused = TestSandbox::try_create(&client, from).await.unwrap_err();
    refused.refused(410, "snapshot_not_found");
    // The running copies do not care.
    assert_eq!(two.run(&["sha256sum", "-c", "sum"]).await.good(), "data: OK");
    client.get("/v2/sandboxes/snapshots/snap_00000000000000000000000000").await.refused(404, "");
    for sandbox in [one, two, forked, sandbox] {
        let _ = sandbox.delete().await.ok();
    }
}

#[tokio::test]
async fn deletes_end_everything() {
    let server = server().await;
    let client = server.team("deletes");
    let sandbox = TestSandbox::create(&client, json!({ "name": "doomed" })).await;
    let id = sandbox.start(&["sleep", "86052"], json!({})).await;
    let mut lines = sandbox.logs(&id).await;
    let deleted = client.delete("/v2/sandboxes/doomed").await.ok();
    assert_eq!(deleted["sandbox"]["name"], "doomed");
    sandbox.get(false).await.refused(404, "not_found");
    sandbox.get(true).await.refused(404, "not_found");
    client.delete("/v2/sandboxes/doomed").await.refused(404, "not_found");
    sandbox.command(&id).await.refused(404, "");
    // A follower is let go.
    while let Ok(Some(_)) = lines.next(SHORT).await {}
    // The name is free again.
    let again = TestSandbox::create(&client, json!({ "name": "doomed" })).await;
    assert_ne!(again.session, sandbox.session);
    assert_ne!(again.run(&["test", "-e", "x"]).await.exit, Some(0));
    let _ = again.delete().await.ok();
}

#[tokio::test]
async fn names_belong_to_their_namespace() {
    let server = server().await;
    let (mine, theirs) = (server.team("mine"), server.team("theirs"));
    let sandbox = TestSandbox::create(&mine, json!({ "name": "same" })).await;
    let other = TestSandbox::create(&theirs, json!({ "name": "same" })).await;
    assert_ne!(sandbox.session, other.session);
    let twice = TestSandbox::try_create(&mine, json!({ "name": "same" })).await.unwrap_err();
    twice.refused(400, "bad_request");
    assert!(twice.message().contains("'same' already exists"), "{twice}");
    // A session id of another team is not found, whatever is asked of it.
    let path = |tail: &str| format!("/v2/sandboxes/sessions/{}{tail}", sandbox.session);
    theirs.get(&path("")).await.refused(404, "not_found");
    theirs
        .post(&path("/cmd"), &json!({ "command": "true", "args": [] }))
        .await
        .refused(404, "not_found");
    theirs.post(&path("/stop"), &json!({})).await.refused(404, "not_found");
    theirs
        .post(&path("/fs/read"), &json!({ "path": "/etc/passwd" }))
        .await
        .refused(404, "not_found");
    assert_eq!(sandbox.run(&["echo", "untouched"]).await.good(), "untouched");
    let _ = other.delete().await.ok();
    assert_eq!(sandbox.run(&["echo", "untouched"]).await.good(), "untouched");
}

#[tokio::test]
async fn updates_are_checked_and_kept() {
    let server = server().await;
    let client = server.team("updates");
    let mut sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let all = json!({
        "resources": { "vcpus": 4, "memory": 8192 }, "timeout": 900_000, "tags": { "a": "b" }, "ports": [4000, 4001],
        "env": { "NEW": "1" }, "snapshotExpiration": 0, "keepLastSnapshots": { "count": 2 }, "networkId": null,
        "persistent": true, "region": "sfo1", "failoverRegions": [],
    });
    let updated = client.patch("/v2/sandboxes/box", &all).await.ok();
    assert_eq!(updated["sandbox"]["tags"], json!({ "a": "b" }));
    assert_eq!(updated["sandbox"]["timeout"], 900_000);
    assert_eq!(updated["sandbox"]["keepLastSnapshots"]["count"], 2);
    let ports: Vec<_> =
        updated["routes"].as_array().unwrap().iter().map(|r| r["port"].clone()).collect();
    assert_eq!(ports, [4000, 4001]);
    let bad = [
        json!({ "resources": { "vcpus": 3 } }),
        json!({ "timeout": 5 }),
        json!({ "ports": [80] }),
        json!({ "tags": { "1": "", "2": "", "3": "", "4": "", "5": "", "6": "" } }),
        json!({ "keepLastSnapshots": { "count": 0 } }),
        json!({ "env": { "A=B": "" } }),
        json!({ "tags": 7 }),
    ];
    for body in bad {
        client.patch("/v2/sandboxes/box", &body).await.refused(400, "");
    }
    assert_eq!(
        sandbox.get(false).await.ok()["sandbox"]["tags"],
        json!({ "a": "b" }),
        "a refusal changes nothing"
    );
    let _ = sandbox.stop().await.ok();
    assert!(sandbox.resume().await);
    assert_eq!(sandbox.view["session"]["vcpus"], 4);
    assert_eq!(sandbox.sh("echo $NEW").await.good(), "1");
    // Three stops, two kept.
    for _ in 0..2 {
        let _ = sandbox.stop().await.ok();
        assert!(sandbox.resume().await);
    }
    let list = client.get("/v2/sandboxes/snapshots?name=box").await.ok();
    let kept =
        list["snapshots"].as_array().unwrap().iter().filter(|s| s["status"] == "created").count();
    assert_eq!(kept, 2, "{list}");
    let cleared = json!({ "tags": {}, "keepLastSnapshots": null });
    let updated = client.patch("/v2/sandboxes/box", &cleared).await.ok();
    assert!(updated["sandbox"].get("keepLastSnapshots").is_none(), "{updated}");
    client.patch("/v2/sandboxes/nope", &json!({ "tags": {} })).await.refused(404, "not_found");
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn a_repeated_call_with_a_key_is_one_call() {
    let server = server().await;
    let client = server.team("keys");
    let body = json!({ "projectId": client.project(), "ports": [] });
    let create = async || {
        let request = client
            .request(Method::POST, "/v3/sandboxes")
            .header("Idempotency-Key", "k1")
            .json(&body);
        TestSandbox::of(&client, client.send(request).await.ok())
    };
    let (one, two) = (create().await, create().await);
    assert_eq!((&one.name, &one.session), (&two.name, &two.session));
    let command = json!({ "command": "sh", "args": ["-c", "echo x >> count"] });
    for _ in 0..3 {
        let request = client
            .request(Method::POST, &one.path("/cmd"))
            .header("Idempotency-Key", "c1")
            .json(&command);
        let answer = client.send(request).await.ok();
        let _ = one.wait(answer["command"]["id"].as_str().unwrap()).await;
    }
    assert_eq!(one.run(&["cat", "count"]).await.good(), "x");
    let _ = one.delete().await.ok();
}

#[tokio::test]
async fn a_client_that_leaves_during_create_loses_nothing() {
    let server = server().await;
    let client = server.team("leaves");
    for i in 0..10u64 {
        let body = json!({ "projectId": client.project(), "ports": [], "name": format!("left-{i}"), "persistent": false });
        let request = client.request(Method::POST, "/v3/sandboxes").json(&body);
        let _ = tokio::time::timeout(Duration::from_millis(3 * i), client.try_send(request)).await;
    }
    // Each either is there and usable, or was never made; and none is half.
    for i in 0..10 {
        let name = format!("left-{i}");
        eventually("a settled state", SHORT, async || {
            let answer = client.get(&format!("/v2/sandboxes/{name}?resume=true")).await;
            match answer.status {
                404 => Ok(()),
                200 if answer.json["session"]["status"] == "running" => {
                    let sandbox = TestSandbox::of(&client, answer.json);
                    assert_eq!(sandbox.run(&["echo", "x"]).await.good(), "x");
                    let _ = sandbox.delete().await.ok();
                    Ok(())
                }
                _ => Err(answer.to_string()),
            }
        })
        .await;
    }
}
