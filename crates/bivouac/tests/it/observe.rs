//! What the engine tells of itself: metrics, one id from the request to the shim, what sandboxes use.

use std::fs;

use bivouac_testkit::{LONG, SHORT, TestSandbox, TestServer, eventually, shared};
use reqwest::Method;
use serde_json::{Value, json};

use crate::{sandbox, server};

/// A series' value on a page of metrics.
fn value(page: &str, series: &str) -> Option<f64> {
    let line = page.lines().find_map(|line| line.strip_prefix(series))?;
    line.trim().parse().ok()
}

/// A page of metrics in which `series` is at least `least`: some are written a moment later.
async fn page_with(server: &TestServer, series: &str, least: f64) -> String {
    let client = server.client("team_metrics").unwrap();
    eventually(series, SHORT, async || {
        let answer = client.send(client.request(Method::GET, "/metrics")).await;
        assert_eq!(answer.status, 200, "{answer}");
        let page = String::from_utf8(answer.bytes).unwrap();
        if value(&page, series).is_some_and(|found| found >= least) { Ok(page) } else { Err(page) }
    })
    .await
}

#[tokio::test]
async fn metrics_count_what_is_done() {
    let _lock = shared().unwrap();
    let server = TestServer::start().await.unwrap();
    let client = server.client("team_metrics").unwrap();
    let name = "a-name-that-is-nobody-else-s";
    let box_ = TestSandbox::create(&client, json!({ "name": name, "persistent": false })).await;
    TestSandbox::try_create(&client, json!({ "name": name })).await.unwrap_err();
    box_.run(&["true"]).await;
    let sleeper = box_.start(&["sleep", "86100"], json!({})).await;
    let page = page_with(&server, "bivouac_open_commands", 1.0).await;
    for (series, wanted) in [
        ("bivouac_sessions{status=\"running\"}", 1.0),
        ("bivouac_operations_total{operation=\"create\"}", 1.0),
        ("bivouac_operations_total{operation=\"exec\"}", 2.0),
        ("bivouac_operation_failures_total{operation=\"create\",code=\"bad_request\"}", 1.0),
        ("bivouac_launch_step_duration_seconds_count{step=\"total\"}", 1.0),
        ("bivouac_launch_step_duration_seconds_bucket{step=\"total\",le=\"+Inf\"}", 1.0),
        ("bivouac_build_info{version=\"0.1.0\"}", 1.0),
    ] {
        assert_eq!(value(&page, series), Some(wanted), "{series}\n{page}");
    }
    for series in [
        "bivouac_uptime_seconds",
        "bivouac_pool_used_bytes",
        "bivouac_pool_free_bytes",
        "bivouac_database_duration_seconds_count{kind=\"read\"}",
        "bivouac_database_duration_seconds_count{kind=\"transaction\"}",
        "bivouac_http_request_duration_seconds_count{method=\"POST\",route=\"/api/v3/sandboxes\",status=\"200\"}",
    ] {
        assert!(value(&page, series).is_some_and(|found| found > 0.0), "{series}\n{page}");
    }
    // Paths are not labels, or every sandbox would make series of its own.
    box_.kill(&sleeper, 9).await;
    let page = page_with(&server, "bivouac_operations_total{operation=\"exec\"}", 2.0).await;
    for word in [name, box_.session.as_str(), sleeper.as_str(), "team_metrics"] {
        assert!(!page.contains(word), "'{word}' is a label\n{page}");
    }
    let _ = box_.delete().await.ok();
    page_with(&server, "bivouac_operations_total{operation=\"delete\"}", 1.0).await;
}

#[tokio::test]
async fn metrics_need_the_token_but_on_their_own_address() {
    let _lock = shared().unwrap();
    let server =
        TestServer::builder().arg("--metrics-listen").arg("127.0.0.1:0").start().await.unwrap();
    let stranger = server.client("t").unwrap().with_token("wrong");
    stranger.send(stranger.request(Method::GET, "/metrics")).await.refused(401, "unauthorized");
    let log = fs::read_to_string(&server.log).unwrap();
    let place = log.split_whitespace().find(|word| word.ends_with("/metrics")).unwrap().to_owned();
    let base = place.trim_end_matches("/metrics");
    let open = bivouac_testkit::Client::new(base, "none", "t", "p").unwrap();
    let answer = open.send(open.request(Method::GET, "/metrics")).await;
    assert_eq!(answer.status, 200, "{answer}");
    let kind = answer.headers["content-type"].to_str().unwrap().to_owned();
    assert!(kind.starts_with("text/plain; version=0.0.4"), "{kind}");
    // Nothing else is there, token or not.
    let owner = bivouac_testkit::Client::new(base, &server.token, "t", "p").unwrap();
    assert_eq!(owner.get("/v2/sandboxes").await.status, 404);
}

/// Lines of a log of JSON lines that hold a word.
fn lines(path: &std::path::Path, word: &str) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let found = text.lines().filter(|line| line.contains(word));
    found.filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[tokio::test]
async fn one_id_goes_from_the_request_to_the_shim() {
    let _lock = shared().unwrap();
    let builder = TestServer::builder().env("BIVOUAC_LOG", "debug");
    let server = builder.arg("--log-format").arg("json").start().await.unwrap();
    let client = server.client("team_ids").unwrap();
    let send = async |path: &str, id: &str, body: Value| {
        let request = client.request(Method::POST, path).header("x-request-id", id).json(&body);
        let answer = client.send(request).await;
        assert_eq!(answer.headers["x-request-id"], id, "{answer}");
        answer.ok()
    };
    let made = send("/v3/sandboxes", "create-1", json!({ "ports": [], "persistent": false })).await;
    let session = made["session"]["id"].as_str().unwrap();
    let path = format!("/v2/sandboxes/sessions/{session}/cmd");
    let body = json!({ "command": "sh", "args": ["-c", "exit 3", "a secret"], "env": {},
        "sudo": false, "wait": true });
    send(&path, "exec.2", body).await;
    let shims = server.data.join("shims.log");
    let fields = |line: &Value| line["fields"].clone();
    for (id, messages) in [
        ("create-1", vec!["session launched"]),
        ("exec.2", vec!["command started", "command ended"]),
    ] {
        let said = lines(&server.log, id);
        assert!(!said.is_empty(), "serve says nothing of {id}\n{}", server.tail());
        assert!(said.iter().all(|line| line["span"]["id"] == id), "{said:?}");
        let found = eventually("the shim's lines", SHORT, async || {
            let found: Vec<Value> = lines(&shims, id).iter().map(fields).collect();
            if found.len() == messages.len() { Ok(found) } else { Err(found) }
        })
        .await;
        for (line, message) in found.iter().zip(messages) {
            assert_eq!((&line["message"], &line["request"]), (&json!(message), &json!(id)));
            assert_eq!(line["session"], session, "{line}");
        }
    }
    let ended = &lines(&shims, "command ended")[0];
    assert_eq!(ended["fields"]["code"], 3, "{ended}");
    for path in [&server.log, &shims] {
        assert!(!fs::read_to_string(path).unwrap().contains("a secret"), "{}", path.display());
    }
    // What could break a line or a search is not taken over.
    let request = client.request(Method::GET, "/v2/sandboxes").header("x-request-id", "a b\"c");
    let answer = client.send(request).await;
    assert!(answer.headers["x-request-id"].to_str().unwrap().starts_with("req_"));
}

/// Without it, one who asks for nothing is told of nothing.
#[tokio::test]
async fn a_shim_is_silent_while_all_is_well() {
    let (server, sandbox) = sandbox("quiet").await;
    sandbox.run(&["true"]).await;
    assert!(lines(&server.data.join("shims.log"), &sandbox.session).is_empty());
}

#[tokio::test]
async fn what_sandboxes_use_can_be_seen_live() {
    let _lock = shared().unwrap();
    let mut server = TestServer::builder().keep_sandboxes().start().await.unwrap();
    let client = server.client("team_top").unwrap();
    let of = json!({ "name": "busy", "persistent": false, "resources": { "vcpus": 1 } });
    let busy = TestSandbox::create(&client, of).await;
    busy.sh("dd if=/dev/zero of=big bs=1M count=24 2>/dev/null; sync").await;
    busy.start(&["sh", "-c", "while :; do :; done"], json!({})).await;
    let namespace = ["-n", "team_top/prj_test"];
    let top = |more: &[&str]| {
        let args: Vec<&str> = namespace.iter().chain(&["top"]).chain(more).copied().collect();
        server.cli(&args)
    };
    let seen = eventually("its CPU time and its disk", LONG, async || {
        let all = top(&["--json"]).json();
        let one = all[0].clone();
        let grown =
            one["cpuMs"].as_u64() > Some(100) && one["diskBytes"].as_u64() >= Some(24 << 20);
        if grown { Ok(one) } else { Err(one) }
    })
    .await;
    assert_eq!((&seen["sandbox"], &seen["team"]), (&json!("busy"), &json!("team_top")));
    assert_eq!(seen["memoryLimitBytes"], 2048u64 << 20, "{seen}");
    assert!(seen["memoryBytes"].as_u64() > Some(0) && seen["pids"].as_u64() >= Some(2), "{seen}");
    assert_eq!(seen["commands"], 1, "{seen}");
    assert!(seen["cpuPercent"].as_f64() > Some(0.0), "{seen}");
    // Not a terminal: one table, and an end.
    let table = top(&[]).good();
    assert!(table.starts_with("NAME") && table.lines().count() == 2, "{table}");
    assert!(!table.contains('\u{1b}'), "{table:?}");
    assert!(top(&["-A", "--once"]).good().contains("team_top/prj_test"));
    let other = server.cli(&["-n", "team_top/other", "top", "--json"]).json();
    assert_eq!(other, json!([]));
    // Also of a sandbox that an engine took up again.
    server.restart().await.unwrap();
    let all = server.cli(&["-n", "team_top/prj_test", "--json", "top"]).json();
    assert!(all[0]["cpuMs"].as_u64() >= seen["cpuMs"].as_u64(), "{all}");
    assert!(all[0]["diskBytes"].as_u64() >= Some(24 << 20), "{all}");
    let _ =
        TestSandbox::of(&server.client("team_top").unwrap(), busy.view.clone()).delete().await.ok();
}

#[tokio::test]
async fn a_hold_keeps_a_sandbox_and_its_end_ends_it() {
    let server = server().await;
    let client = server.team("team_hold");
    let held = TestSandbox::create(&client, json!({ "name": "held" })).await;
    let other = TestSandbox::create(&client, json!({ "name": "other" })).await;
    let path = "/api/bivouac/v1/sandboxes/held/hold";
    let mut first = client.stream(client.request(Method::POST, path)).await.unwrap();
    assert_eq!(first.next(SHORT).await.unwrap(), Some(json!({ "held": true })));
    let second = client.stream(client.request(Method::POST, path)).await.unwrap();
    drop(first);
    assert_eq!(held.get(false).await.status, 200);
    drop(second);
    eventually("the sandbox to go", SHORT, async || match held.get(false).await.status {
        404 => Ok(()),
        status => Err(status),
    })
    .await;
    assert_eq!(other.get(false).await.status, 200, "nobody held it");
    let answer = client.post("/api/bivouac/v1/sandboxes/missing/hold", &json!({})).await;
    answer.refused(404, "not_found");
    let _ = other.delete().await.ok();
}

#[tokio::test]
async fn memory_that_ran_out_in_a_pipeline_is_told_although_the_shell_is_content() {
    let (_server, neighbour) = sandbox("pipeline").await;
    let body = json!({ "persistent": false, "resources": { "vcpus": 1 } });
    let hog = TestSandbox::create(&neighbour.client, body).await;
    let calm = hog.sh("true | true").await;
    assert_eq!((calm.exit, &calm.command["reason"]), (Some(0), &Value::Null), "{}", calm.command);
    let script = "perl -e 'my @x; for (1..3072) { push @x, \"x\" x 1048576 }' | cat; exit 0";
    let ran = hog.sh(script).await;
    assert_eq!(ran.exit, Some(0), "the code is the shell's: {}", ran.command);
    assert_eq!(ran.command["reason"], "out_of_memory", "{}", ran.command);
    let text = ran.command["reasonText"].as_str().unwrap();
    assert!(text.contains("memory limit"), "{text}");
}
