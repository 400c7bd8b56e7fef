//! Pause and resume with memory, idle rule, hooks, restart policy: on the real thing, through the front door.

use std::time::Instant;

use bivouac_testkit::{Client, LONG, TestSandbox, TestServer, eventually, shared};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::{crash, server};

fn own(name: &str, tail: &str) -> String {
    format!("/api/bivouac/v1/sandboxes/{name}/{tail}")
}

async fn pause(client: &Client, name: &str) -> Value {
    client.post(&own(name, "pause"), &json!({})).await.ok()
}

async fn unpause(client: &Client, name: &str) -> Value {
    client.post(&own(name, "unpause"), &json!({})).await.ok()
}

/// CPU time of the newest session of a sandbox so far, ms: a look that wakes nobody.
async fn cpu_ms(client: &Client, name: &str) -> u64 {
    let stats = client.get("/api/bivouac/v1/stats").await.ok();
    let stats = stats["stats"].as_array().unwrap().clone();
    let of = stats.iter().find(|of| of["sandbox"] == name).unwrap_or_else(|| panic!("{stats:?}"));
    of["cpuMs"].as_u64().unwrap()
}

async fn paused_at(sandbox: &TestSandbox) -> Option<i64> {
    let view = sandbox.get(false).await.ok();
    assert_eq!(view["session"]["status"], "running", "the API's word stays: {view}");
    view["sandbox"]["pausedAt"].as_i64()
}

/// A server that echoes lines, and a client of it that notes each answer with the connection's number.
const TALK: &str = r#"
use IO::Socket::INET; $| = 1;
my $s = IO::Socket::INET->new(Listen => 5, LocalAddr => '127.0.0.1', LocalPort => 9000, ReuseAddr => 1) or die $!;
if (!fork) { my $n = 0; while (my $c = $s->accept) { $n++; while (<$c>) { print $c "$n $_"; $c->flush } } exit }
my $c = IO::Socket::INET->new(PeerAddr => '127.0.0.1:9000') or die $!;
for (my $i = 0; ; $i++) { print $c "$i\n"; $c->flush; my $l = <$c>; defined $l or die 'cut';
  open my $f, '>>', 'talk'; print $f $l; close $f; select undef, undef, undef, 0.005 }
"#;

#[tokio::test]
async fn a_counter_and_a_server_go_on_where_they_stood() {
    let server = server().await;
    let client = server.team("pause");
    let sandbox = TestSandbox::create(&client, json!({ "name": "box", "timeout": 60_000 })).await;
    let count = "i=0; while :; do i=$((i+1)); echo $i >> count; done";
    let counter = sandbox.start(&["sh", "-c", count], json!({})).await;
    let talk = sandbox.start(&["perl", "-e", TALK], json!({})).await;
    let _ = sandbox.sh("until test -s talk && test -s count; do sleep 0.05; done").await.good();
    let before = sandbox.get(false).await.ok()["sandbox"]["expiresAt"].as_i64().unwrap();

    let paused = pause(&client, "box").await;
    assert!(paused["session"]["pausedAt"].is_i64(), "{paused}");
    let since = paused_at(&sandbox).await.unwrap();
    assert_eq!(pause(&client, "box").await["session"]["pausedAt"], since, "twice is once");
    let listed = client.get("/v2/sandboxes").await.ok();
    assert_eq!(listed["sandboxes"][0]["pausedAt"], since, "{listed}");
    // Nothing runs: no CPU time is used, over a while that is told by the engine's own clock.
    let used = cpu_ms(&client, "box").await;
    eventually("three seconds of a pause", LONG, async || {
        let stats = client.get("/api/bivouac/v1/stats").await.ok();
        (stats["at"].as_i64().unwrap() >= since + 3_000).then_some(()).ok_or("not yet")
    })
    .await;
    assert_eq!(cpu_ms(&client, "box").await, used, "something ran");

    let gone_on = unpause(&client, "box").await;
    assert!(gone_on["session"]["pausedAt"].is_null(), "{gone_on}");
    assert!(gone_on["session"]["pausedMs"].as_i64().unwrap() >= 3_000, "{gone_on}");
    let clock: i64 = sandbox.sh("date +%s%3N").await.good().parse().unwrap();
    let now = client.get("/api/bivouac/v1/stats").await.ok()["at"].as_i64().unwrap();
    assert!((now - clock).abs() < 20_000, "the clock inside says {clock}, outside {now}");
    assert!(clock >= since + 3_000, "the clock stood still");
    let after = sandbox.get(false).await.ok()["sandbox"]["expiresAt"].as_i64().unwrap();
    assert!(after >= before + 3_000, "the pause counted: {before} {after}");
    let _ = unpause(&client, "box").await;
    let lines = "wc -l < talk";
    let then: u64 = sandbox.sh(lines).await.good().parse().unwrap();
    eventually("they go on", LONG, async || {
        let now: u64 = sandbox.sh(lines).await.good().parse().unwrap();
        (now > then + 10).then_some(()).ok_or("not yet")
    })
    .await;
    let _ = sandbox.kill(&counter, 9).await;
    let _ = sandbox.kill(&talk, 9).await;
    // No count is lost, and it is the same connection, each answer in its turn.
    let _ = sandbox.sh("awk '$1 != NR { exit 1 }' count").await.good();
    let _ = sandbox.sh("awk '$1 != 1 || $2 != NR - 1 { exit 1 }' talk").await.good();
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn fifty_processes_stand_still_idle_or_busy_and_who_works_ends_it() {
    let server = server().await;
    let client = server.team("fifty");
    let sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    for (kind, program) in [("idle", "sleep 1000"), ("busy", "while :; do :; done")] {
        let line = format!("for i in $(seq 50); do ({program}) & done; wait");
        let command = sandbox.start(&["sh", "-c", &line], json!({})).await;
        eventually("all of them run", LONG, async || {
            let stats = client.get("/api/bivouac/v1/stats").await.ok();
            (stats["stats"][0]["pids"].as_u64().unwrap() >= 52).then_some(()).ok_or("not yet")
        })
        .await;
        let (mut down, mut up) = (Vec::new(), Vec::new());
        for _ in 0..10 {
            let begun = Instant::now();
            let _ = pause(&client, "box").await;
            down.push(begun.elapsed());
            let used = cpu_ms(&client, "box").await;
            assert_eq!(cpu_ms(&client, "box").await, used);
            let begun = Instant::now();
            let _ = unpause(&client, "box").await;
            up.push(begun.elapsed());
        }
        down.sort_unstable();
        up.sort_unstable();
        eprintln!("pause of 50 {kind} processes: {:?}, resume: {:?} (medians)", down[5], up[5]);
        let _ = pause(&client, "box").await;
        assert!(paused_at(&sandbox).await.is_some());
        assert_eq!(sandbox.run(&["echo", "awake"]).await.good(), "awake");
        assert_eq!(paused_at(&sandbox).await, None);
        let _ = sandbox.kill(&command, 9).await;
        let _ = sandbox.sh("pkill -9 sleep; true").await;
        eventually("they are gone", LONG, async || {
            let stats = client.get("/api/bivouac/v1/stats").await.ok();
            (stats["stats"][0]["pids"].as_u64().unwrap() < 10).then_some(()).ok_or("not yet")
        })
        .await;
    }
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn what_can_be_done_with_a_paused_box() {
    let server = server().await;
    let client = server.team("paused");
    let mut sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let _ = sandbox.sh("echo kept > file").await.good();
    let _ = pause(&client, "box").await;
    // A deep one needs swap: a host without says so, and nothing has changed.
    if std::fs::read_to_string("/proc/swaps").unwrap().lines().count() < 2 {
        let _ = unpause(&client, "box").await;
        let answer = client.post(&own("box", "pause"), &json!({ "deep": true })).await;
        assert!((400..500).contains(&answer.status), "{answer}");
        assert_eq!(paused_at(&sandbox).await, None);
        let _ = pause(&client, "box").await;
    }
    let taken = client.post(&own("box", "snapshots"), &json!({ "live": true })).await;
    assert_eq!(taken.status, 201, "{taken}");
    let forked = client.post(&own("box", "forks"), &json!({ "name": "fork" })).await;
    assert_eq!(forked.status, 201, "{forked}");
    assert!(paused_at(&sandbox).await.is_some(), "a paused source stays so");
    let fork = TestSandbox::of(&client, forked.json["sandboxes"][0].clone());
    assert_eq!(fork.run(&["cat", "file"]).await.good(), "kept");
    let drive = json!({ "projectId": client.project(), "maxSizeBytes": 1 << 26 });
    assert!(client.post("/v2/sandboxes/drives/data", &drive).await.status < 300);
    let place = json!({ "sandbox": "box", "path": "/data" });
    let _ = client.post("/api/bivouac/v1/drives/data/attach", &place).await.ok();
    let _ = sandbox.sh("echo x > /data/x").await.good();
    let _ = pause(&client, "box").await;
    let place = json!({ "sandbox": "box" });
    let _ = client.post("/api/bivouac/v1/drives/data/detach", &place).await.ok();
    let _ = pause(&client, "box").await;
    let back = client.post(&own("box", "rollback"), &json!({})).await.ok();
    sandbox = TestSandbox::of(&client, back);
    assert_eq!(sandbox.run(&["cat", "file"]).await.good(), "kept");
    let _ = pause(&client, "box").await;
    assert_eq!(sandbox.stop().await.ok()["session"]["status"], "stopped");
    client.post(&own("box", "pause"), &json!({})).await.refused(410, "sandbox_stopped");
    client.post(&own("box", "unpause"), &json!({})).await.refused(410, "sandbox_stopped");
    client.post(&own("none", "pause"), &json!({})).await.refused(404, "not_found");
    client.post(&own("box", "pause"), &json!({ "x": 1 })).await.refused(400, "bad_request");
    assert!(sandbox.resume().await);
    let _ = pause(&client, "box").await;
    for sandbox in [sandbox, fork] {
        let _ = sandbox.delete().await.ok();
    }
    let _ = client.delete("/v2/sandboxes/drives/data").await.ok();
}

#[tokio::test]
async fn an_engine_that_is_killed_finds_it_paused() {
    let _lock = shared().unwrap();
    let mut server = TestServer::start().await.unwrap();
    let client = server.client("killed").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let count = "i=0; while :; do i=$((i+1)); echo $i >> count; done";
    let _ = sandbox.start(&["sh", "-c", count], json!({})).await;
    let _ = sandbox.sh("until test -s count; do sleep 0.05; done").await.good();
    let _ = pause(&client, "box").await;
    let used = cpu_ms(&client, "box").await;
    server.kill9().unwrap();
    server.restart().await.unwrap();
    let sandbox = crash::again(&server, &sandbox, "killed");
    let client = server.client("killed").unwrap();
    assert!(paused_at(&sandbox).await.is_some());
    assert_eq!(cpu_ms(&client, "box").await, used, "it ran while the engine was away");
    let first = sandbox.sh("wc -l < count").await.good();
    assert_eq!(paused_at(&sandbox).await, None, "who works in it ends the pause");
    eventually("it counts on", LONG, async || {
        (sandbox.sh("wc -l < count").await.good() != first).then_some(()).ok_or("not yet")
    })
    .await;
    let _ = sandbox.sh("awk '$1 != NR { exit 1 }' count").await.good();
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn an_idle_box_is_stopped_and_its_hook_is_seen() {
    let server = server().await;
    let client = server.team("idle");
    let hook =
        json!({ "command": "echo $KEPT $(id -un) > hooked; echo said", "timeoutMs": 20_000 });
    let body = json!({ "name": "box", "env": { "KEPT": "yes" }, "timeout": 5_000,
        "life": { "idleStopMs": 10_000, "preStop": hook } });
    let mut sandbox = TestSandbox::create(&client, body).await;
    // Longer than its session may live, and than its rule says: somebody waits for it.
    assert_eq!(sandbox.sh("sleep 12; echo still").await.good(), "still");
    let view = sandbox.get(false).await.ok();
    assert!(view["session"]["timeout"].as_i64().unwrap() > 5_000, "{view}");
    assert_eq!(view["sandbox"]["life"]["idleStopMs"], 10_000);
    eventually("it is idle", LONG, async || {
        let status = sandbox.get(false).await.ok()["session"]["status"].clone();
        (status == "stopped").then_some(()).ok_or("not yet")
    })
    .await;
    let commands = client.get(&sandbox.path("/cmd")).await.ok();
    let hook = &commands["commands"][0];
    assert_eq!(hook["args"][2], "pre-stop", "{commands}");
    assert_eq!(hook["exitCode"], 0, "{commands}");
    let id = hook["id"].as_str().unwrap().to_owned();
    assert_eq!(sandbox.output(&id).await.out(), "said");
    assert!(sandbox.resume().await);
    assert_eq!(sandbox.run(&["cat", "hooked"]).await.good(), "yes vercel-sandbox");
    // One that hangs has its time; then the stop goes on, and says so.
    let slow = json!({ "life": { "preStop": { "command": "sleep 1000", "timeoutMs": 300 } } });
    let _ = client.patch("/v2/sandboxes/box", &slow).await.ok();
    let stopped = sandbox.stop().await.ok();
    assert_eq!(stopped["session"]["status"], "stopped");
    assert!(stopped["session"]["reason"].as_str().unwrap().contains("longer"), "{stopped}");
    assert!(sandbox.resume().await);
    let stopped = sandbox.post("/stop", &json!({ "hook": false })).await.ok();
    assert!(stopped["session"]["reason"].is_null(), "{stopped}");
    client
        .patch("/v2/sandboxes/box", &json!({ "life": { "idleStopMs": 1 } }))
        .await
        .refused(400, "bad_request");
    let _ = sandbox.delete().await.ok();
}

/// Waits until a sandbox runs in another session.
async fn back(client: &Client, before: &TestSandbox) -> TestSandbox {
    let view = eventually("it is back", LONG, async || {
        let view = client.get(&format!("/v2/sandboxes/{}", before.name)).await.ok();
        let other = view["session"]["id"] != json!(before.session);
        (other && view["session"]["status"] == "running").then_some(view).ok_or("not yet")
    })
    .await;
    TestSandbox::of(client, view)
}

#[tokio::test]
async fn what_a_host_lost_comes_back_by_its_policy() {
    let _lock = shared().unwrap();
    let mut server = TestServer::start().await.unwrap();
    let client = server.client("lost").unwrap();
    let body = json!({ "name": "box", "life": { "restart": "unless-stopped" } });
    let sandbox = TestSandbox::create(&client, body).await;
    let plain = TestSandbox::create(&client, json!({ "name": "plain" })).await;
    let _ = sandbox.sh("echo kept > file; sync").await.good();
    for pid in crash::shims(&sandbox.session) {
        let _ = kill_process(pid, Signal::KILL);
    }
    let sandbox = back(&client, &sandbox).await;
    assert_eq!(sandbox.run(&["cat", "file"]).await.good(), "kept");
    assert_eq!(sandbox.view["sandbox"]["restarts"]["total"], 1);
    // As a restart of the host: engine, shims and everything inside are gone at once.
    server.kill9().unwrap();
    for pid in [crash::shims(&sandbox.session), crash::shims(&plain.session)].concat() {
        let _ = kill_process(pid, Signal::KILL);
    }
    server.restart().await.unwrap();
    let client = server.client("lost").unwrap();
    let sandbox = back(&client, &sandbox).await;
    assert_eq!(sandbox.run(&["cat", "file"]).await.good(), "kept");
    assert_eq!(sandbox.view["sandbox"]["restarts"]["total"], 2);
    let plain = crash::again(&server, &plain, "lost");
    assert_eq!(plain.get(false).await.ok()["session"]["status"], "aborted");
    for sandbox in [sandbox, plain] {
        let _ = sandbox.delete().await.ok();
    }
}

#[tokio::test]
async fn the_command_line_pauses_resumes_and_shows_it() {
    let server = server().await;
    let client = server.team("words");
    let ns = format!("words/{}", client.project());
    let cli = |args: &[&str]| {
        let words = [&["-n", ns.as_str()], args].concat();
        server.cli(&words)
    };
    let rules = ["--idle-stop", "8h", "--restart", "unless-stopped", "--pre-stop", "sync"];
    let _ = cli(&[&["create", "box"], &rules[..]].concat()).good();
    let _ = cli(&["pause", "box"]).good();
    assert!(cli(&["ls"]).good().contains("paused"));
    let shown = cli(&["inspect", "box"]).good();
    for wanted in ["paused", "stopped after 8h", "unless-stopped", "sync (at most 30s)"] {
        assert!(shown.contains(wanted), "{shown}");
    }
    assert!(cli(&["top"]).good().contains("paused"));
    let all = cli(&["resume", "box", "--json"]).json();
    assert_eq!(all[0]["sandbox"], "box");
    assert!(cli(&["ls"]).good().contains("running"));
    let _ = cli(&["pause", "box"]).good();
    assert_eq!(cli(&["exec", "box", "--", "echo", "awake"]).good(), "awake\n");
    let kept = cli(&["keep-alive", "box", "2h", "--json"]).json();
    assert!(kept["expiresAt"].is_i64(), "{kept}");
    let set = cli(&["set", "box", "--idle-stop", "off", "--pre-stop", "", "--json"]).json();
    assert!(set["sandbox"]["life"].get("idleStopMs").is_none(), "{set}");
    assert_eq!(set["sandbox"]["life"]["restart"], "unless-stopped");
    assert_eq!(cli(&["set", "box"]).run().status.code(), Some(2));
    let _ = cli(&["stop", "box", "--no-hook"]).good();
    assert!(!cli(&["pause", "box"]).run().status.success());
    let _ = cli(&["rm", "--snapshots", "box"]).good();
}
