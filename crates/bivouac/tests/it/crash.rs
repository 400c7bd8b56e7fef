//! Kill -9 of anything, at any moment: nothing that was acknowledged is lost, nothing is invented.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use bivouac_testkit::{
    LONG, SHORT, TestSandbox, TestServer, Traces, eventually, exclusive, shared,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// The same sandbox through the engine that runs now.
pub(crate) fn again(server: &TestServer, sandbox: &TestSandbox, team: &str) -> TestSandbox {
    TestSandbox { client: server.client(team).unwrap(), ..sandbox.clone() }
}

/// The shims of a session: the helpers that hold its logs open.
pub(crate) fn shims(session: &str) -> Vec<Pid> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else {
            continue;
        };
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let fds = fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
        let mut links = fds.filter_map(|f| fs::read_link(f.path()).ok());
        if name.starts_with("bivouac-shim") && links.any(|l| l.ends_with(session)) {
            found.extend(Pid::from_raw(pid));
        }
    }
    found
}

fn shim(sandbox: &TestSandbox) -> Pid {
    let found = shims(&sandbox.session);
    assert_eq!(found.len(), 1, "shims of {}: {found:?}", sandbox.session);
    found[0]
}

#[tokio::test]
async fn a_running_command_outlives_the_engine() {
    let lock = shared().unwrap();
    let mut server = TestServer::start().await.unwrap();
    let sandbox =
        TestSandbox::create(&server.client("crash").unwrap(), json!({ "name": "box" })).await;
    let _ = sandbox.run(&["mkfifo", "gate"]).await.good();
    let script = "for i in $(seq 1 1000); do echo before $i; done; cat gate; for i in $(seq 1 1000); do echo after $i; done; exit 42";
    let id = sandbox.start(&["sh", "-c", script], json!({})).await;
    let done = sandbox.start(&["sh", "-c", "echo done; exit 3"], json!({})).await;
    assert_eq!(sandbox.wait(&done).await["exitCode"], 3);
    let input = sandbox.start(&["cat"], json!({ "attachStdin": true })).await;
    let _ = sandbox.stdin(&input, Some(0), b"first ", false).await.ok();
    server.kill9().unwrap();
    // Nobody serves; the sandbox goes on: the gate is opened from the inside by a sleeper.
    server.restart().await.unwrap();
    let sandbox = again(&server, &sandbox, "crash");
    let view = sandbox.get(false).await.ok();
    assert_eq!(view["session"]["id"], json!(sandbox.session), "the same session");
    assert_eq!(view["session"]["status"], "running");
    assert!(sandbox.command(&id).await.ok()["command"]["exitCode"].is_null());
    let _ = sandbox.sh("echo middle > gate").await.good();
    assert_eq!(sandbox.wait(&id).await["exitCode"], 42);
    let lines = |word: &str| (1..=1000).map(|i| format!("{word} {i}\n")).collect::<String>();
    let expected = format!("{}middle\n{}", lines("before"), lines("after"));
    assert!(sandbox.output(&id).await.stdout == expected.as_bytes(), "output is complete");
    assert_eq!(sandbox.command(&done).await.ok()["command"]["exitCode"], 3);
    assert_eq!(sandbox.output(&done).await.out(), "done");
    let _ = sandbox.stdin(&input, Some(6), b"second", true).await.ok();
    assert_eq!(sandbox.wait(&input).await["exitCode"], 0);
    assert_eq!(sandbox.output(&input).await.out(), "first second");
    drop((server, lock));
}

#[tokio::test]
async fn a_command_that_ends_while_nobody_serves_is_known_afterwards() {
    let lock = shared().unwrap();
    let mut server = TestServer::start().await.unwrap();
    let sandbox = TestSandbox::create(&server.client("meanwhile").unwrap(), json!({})).await;
    let script = "echo start; while [ ! -e go ]; do sleep 0.02; done; head -c 3000000 /dev/zero; echo end; exit 7";
    let id = sandbox.start(&["sh", "-c", script], json!({})).await;
    let limited = sandbox.start(&["sleep", "86080"], json!({ "timeout": 1500 })).await;
    let opener = "sleep 1; touch go; sleep 0.5; touch over";
    let last = sandbox.start(&["sh", "-c", opener], json!({})).await;
    server.kill9().unwrap();
    // The pool is still mounted: what the sandbox writes is visible from here.
    eventually("the sandbox to go on by itself", SHORT, async || {
        if found(&server.data, "over") { Ok(()) } else { Err("not over") }
    })
    .await;
    server.restart().await.unwrap();
    let sandbox = again(&server, &sandbox, "meanwhile");
    let record = sandbox.wait(&id).await;
    assert_eq!(record["exitCode"], 7, "{record}");
    let output = sandbox.output(&id).await.stdout;
    assert_eq!(output.len(), 6 + 3_000_000 + 4);
    assert!(output.ends_with(b"end\n"));
    assert_eq!(sandbox.wait(&last).await["exitCode"], 0);
    let record = sandbox.wait(&limited).await;
    assert_eq!(
        (&record["exitCode"], &record["reason"]),
        (&json!(137), &json!("timeout")),
        "{record}"
    );
    drop((server, lock));
}

fn found(folder: &Path, name: &str) -> bool {
    fs::read_dir(folder).into_iter().flatten().flatten().any(|entry| {
        entry.file_name() == name
            || (entry.file_type().is_ok_and(|t| t.is_dir()) && found(&entry.path(), name))
    })
}

#[tokio::test]
async fn time_that_runs_out_while_nobody_serves_is_over_at_the_next_start() {
    let lock = shared().unwrap();
    let mut server = TestServer::start().await.unwrap();
    let client = server.client("overtime").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "timeout": 1500 })).await;
    let _ = sandbox.sh("echo kept > file").await.good();
    let id = sandbox.start(&["sleep", "86083"], json!({})).await;
    server.kill9().unwrap();
    // Its time passes with nobody there to see it.
    tokio::time::sleep(Duration::from_secs(2)).await;
    server.restart().await.unwrap();
    let mut sandbox = again(&server, &sandbox, "overtime");
    eventually("the session to end", SHORT, async || {
        let view = sandbox.get(false).await.ok();
        if view["session"]["status"] == "stopped" { Ok(()) } else { Err(view) }
    })
    .await;
    assert_eq!(sandbox.command(&id).await.ok()["command"]["reason"], "sandbox_stopped");
    assert!(sandbox.resume().await);
    assert_eq!(sandbox.run(&["cat", "file"]).await.good(), "kept");
    drop((server, lock));
}

#[tokio::test]
async fn a_stop_cut_by_a_crash_is_finished_and_keeps_the_files() {
    let lock = shared().unwrap();
    let mut server = TestServer::start().await.unwrap();
    for round in 0..8u64 {
        let client = server.client("cut").unwrap();
        let body = json!({ "name": format!("box-{round}") });
        let sandbox = TestSandbox::create(&client, body).await;
        let _ =
            sandbox.sh("head -c 2000000 /dev/urandom > data; sha256sum data > sum").await.good();
        let stopping = {
            let sandbox = sandbox.clone();
            let request = client.request(reqwest::Method::POST, &sandbox.path("/stop"));
            tokio::spawn(async move {
                let _ = sandbox.client.try_send(request.json(&json!({}))).await;
            })
        };
        tokio::time::sleep(Duration::from_millis(round * 4)).await;
        server.kill9().unwrap();
        stopping.await.unwrap();
        server.restart().await.unwrap();
        let mut sandbox = again(&server, &sandbox, "cut");
        let _ = sandbox.resume().await;
        assert_eq!(sandbox.run(&["sha256sum", "-c", "sum"]).await.good(), "data: OK", "{round}");
        let _ = sandbox.delete().await.ok();
    }
    drop((server, lock));
}

#[tokio::test]
async fn an_orderly_end_during_creates_leaves_no_process() {
    let lock = exclusive().unwrap();
    let mut server = TestServer::start().await.unwrap();
    for round in 0..4u64 {
        let client = server.client("ending").unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..40 {
            let body = json!({ "projectId": client.project(), "ports": [] });
            let request = client.request(reqwest::Method::POST, "/v3/sandboxes").json(&body);
            let client = client.clone();
            tasks.spawn(async move {
                let _ = client.try_send(request).await;
            });
        }
        tokio::time::sleep(Duration::from_millis(5 + 15 * round)).await;
        assert!(server.stop().await.unwrap().success(), "{}", server.tail());
        while tasks.join_next().await.is_some() {}
        eventually("every helper to go", SHORT, async || {
            let traces = Traces::before(&server.data);
            let left: Vec<_> = traces
                .all()
                .iter()
                .filter(|t| t.kind == bivouac_testkit::Kind::Process)
                .cloned()
                .collect();
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
        server.restart().await.unwrap();
    }
    drop((server, lock));
}

#[tokio::test]
async fn an_orderly_restart_keeps_the_sandboxes() {
    let lock = shared().unwrap();
    let mut server = TestServer::builder().keep_sandboxes().start().await.unwrap();
    let sandbox = TestSandbox::create(&server.client("orderly").unwrap(), json!({})).await;
    let id = sandbox.start(&["sh", "-c", "sleep 1; echo late"], json!({})).await;
    assert!(server.stop().await.unwrap().success());
    server.restart().await.unwrap();
    let sandbox = again(&server, &sandbox, "orderly");
    assert_eq!(sandbox.get(false).await.ok()["session"]["status"], "running");
    assert_eq!(sandbox.wait(&id).await["exitCode"], 0);
    assert_eq!(sandbox.output(&id).await.out(), "late");
    // With --stop-sandboxes they are stopped and kept.
    let builder = TestServer::builder();
    server.restart_with(builder.clone()).await.unwrap();
    let sandbox = again(&server, &sandbox, "orderly");
    let _ = sandbox.sh("echo kept > file").await.good();
    assert!(server.stop().await.unwrap().success());
    assert_eq!(helpers_of(&server), Vec::<String>::new(), "helpers are left");
    server.restart().await.unwrap();
    let mut sandbox = again(&server, &sandbox, "orderly");
    let view = sandbox.get(false).await.ok();
    assert_eq!(view["session"]["status"], "stopped", "{view}");
    assert!(sandbox.resume().await);
    assert_eq!(sandbox.run(&["cat", "file"]).await.good(), "kept");
    drop((server, lock));
}

fn helpers_of(server: &TestServer) -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|e| {
            let links = fs::read_dir(e.path().join("fd")).ok()?.flatten();
            let mut links = links.filter_map(|f| fs::read_link(f.path()).ok());
            let own = e.file_name().to_str() == Some(&std::process::id().to_string());
            (!own && links.any(|l| l.starts_with(server.data.join("pool"))))
                .then(|| fs::read_to_string(e.path().join("comm")).unwrap_or_default())
        })
        .collect()
}

#[tokio::test]
async fn a_dead_shim_is_a_lost_session_with_its_files() {
    let lock = shared().unwrap();
    let server = TestServer::start().await.unwrap();
    let client = server.client("shim").unwrap();
    let mut sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let _ = sandbox.sh("echo kept > file; sync").await.good();
    let id = sandbox.start(&["sh", "-c", "echo partial; sleep 86081"], json!({})).await;
    let mut lines = sandbox.logs(&id).await;
    assert_eq!(lines.next(SHORT).await.unwrap().unwrap()["stream"], "stdout");
    kill_process(shim(&sandbox), Signal::KILL).unwrap();
    let view = eventually("the loss to be seen", SHORT, async || {
        let view = sandbox.get(false).await.ok();
        if view["session"]["status"] == "aborted" {
            Ok(view)
        } else {
            Err(view["session"]["status"].clone())
        }
    })
    .await;
    assert!(view["session"]["abortedAt"].is_i64(), "{view}");
    // The session's loss is recorded first, then its commands' ends are settled.
    let record = eventually("the command to be settled", SHORT, async || {
        let record = sandbox.command(&id).await.ok()["command"].clone();
        if record["reason"].is_null() { Err(record) } else { Ok(record) }
    })
    .await;
    assert_eq!(record["reason"], "lost", "{record}");
    assert!(
        record["exitCode"].is_null() || record["exitCode"] == 255,
        "an invented exit code: {record}"
    );
    while let Ok(Some(_)) = lines.next(SHORT).await {}
    assert_eq!(sandbox.output(&id).await.out(), "partial", "what was written is still there");
    assert!(sandbox.resume().await, "a new session");
    assert_eq!(sandbox.run(&["cat", "file"]).await.good(), "kept", "the upper was kept");
    assert_eq!(crate::commands::running(&sandbox, "86081").await, Vec::<String>::new());
    // The same with nobody serving when it happens.
    let id = sandbox.start(&["sleep", "86082"], json!({})).await;
    let _ = sandbox.sh("echo second > second").await.good();
    let mut server = server;
    let pid = shim(&sandbox);
    server.kill9().unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    server.restart().await.unwrap();
    let mut sandbox = again(&server, &sandbox, "shim");
    let view = sandbox.get(false).await.ok();
    assert_eq!(view["session"]["status"], "aborted", "{view}");
    assert_eq!(sandbox.command(&id).await.ok()["command"]["reason"], "lost");
    assert!(sandbox.resume().await);
    assert_eq!(sandbox.run(&["cat", "second"]).await.good(), "second");
    drop((server, lock));
}

#[tokio::test]
async fn kills_at_random_moments_of_creates() {
    let lock = exclusive().unwrap();
    let mut server = TestServer::start().await.unwrap();
    // Warm: what the first sandbox makes for all that follow does not count as a leak.
    let warm =
        TestSandbox::create(&server.client("warm").unwrap(), json!({ "persistent": false })).await;
    let _ = warm.delete().await.ok();
    server.restart().await.unwrap();
    let warm =
        TestSandbox::create(&server.client("warm").unwrap(), json!({ "persistent": false })).await;
    let _ = warm.delete().await.ok();
    let before = Traces::before(&server.data);
    let mut acknowledged: Vec<String> = Vec::new();
    for round in 0..12u64 {
        let client = server.client("random").unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for i in 0..4 {
            let client = client.clone();
            tasks.spawn(async move {
                let name = format!("box-{round}-{i}");
                let body = json!({ "projectId": client.project(), "ports": [], "name": name });
                let request = client.request(reqwest::Method::POST, "/v3/sandboxes").json(&body);
                match client.try_send(request).await {
                    Ok(answer) if answer.status < 300 => Some(name),
                    Ok(answer) => panic!("{answer}"),
                    Err(_) => None,
                }
            });
        }
        tokio::time::sleep(Duration::from_millis(round * 7)).await;
        server.kill9().unwrap();
        while let Some(name) = tasks.join_next().await {
            acknowledged.extend(name.unwrap());
        }
        server.restart().await.unwrap();
    }
    let client = server.client("random").unwrap();
    let all = list(&client).await;
    for name in &acknowledged {
        assert!(
            all.iter().any(|s| s["name"] == json!(name)),
            "{name} was acknowledged and is lost"
        );
    }
    for sandbox in &all {
        let name = sandbox["name"].as_str().unwrap();
        let view = client.get(&format!("/v2/sandboxes/{name}?resume=true")).await.ok();
        let sandbox = TestSandbox::of(&client, view);
        assert_eq!(sandbox.run(&["echo", "usable"]).await.good(), "usable", "{name}");
        let _ = sandbox.delete().await.ok();
    }
    assert!(list(&client).await.is_empty());
    assert_same_but_engine(&before, &server).await;
    drop((server, lock));
}

async fn list(client: &bivouac_testkit::Client) -> Vec<Value> {
    let (mut all, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = client.get(&format!("/v2/sandboxes?limit=50{cursor}")).await.ok();
        all.extend(page["sandboxes"].as_array().unwrap().iter().cloned());
        match page["pagination"]["next"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return all,
        }
    }
}

/// As `assert_same_after`, but the engine itself, started anew, and its helpers are other processes:
/// as many as before is what counts.
pub(crate) async fn assert_same_but_engine(before: &Traces, server: &TestServer) {
    use bivouac_testkit::Kind;
    let count = |t: &Traces, kind: Kind| t.all().iter().filter(|t| t.kind == kind).count();
    eventually("every trace to be gone", LONG, async || {
        let now = Traces::before(&server.data);
        let mut wrong: Vec<String> = before
            .added()
            .into_iter()
            .filter(|t| !matches!(t.kind, Kind::Process | Kind::NetNamespace))
            .map(|t| format!("{t:?}"))
            .collect();
        for kind in [Kind::Process, Kind::NetNamespace] {
            if count(&now, kind) > count(before, kind) {
                wrong.extend(
                    now.all()
                        .difference(before.all())
                        .filter(|t| t.kind == kind)
                        .map(|t| format!("{t:?}")),
                );
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    })
    .await;
}

#[tokio::test]
async fn a_second_engine_is_refused() {
    let lock = shared().unwrap();
    let server = TestServer::start().await.unwrap();
    let sandbox = TestSandbox::create(&server.client("second-engine").unwrap(), json!({})).await;
    let mut command = server.serve_command().unwrap();
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains(&server.pid().to_string()), "the holder's pid is not named: {text}");
    assert_eq!(sandbox.run(&["echo", "unharmed"]).await.good(), "unharmed");
    let engine: Value =
        serde_json::from_slice(&fs::read(server.data.join("engine.json")).unwrap()).unwrap();
    assert_eq!(engine["pid"], json!(server.pid()), "the refused engine wrote its own address");
    drop((server, lock));
}

#[tokio::test]
async fn the_pool_is_never_mounted_twice() {
    let lock = exclusive().unwrap();
    let mut server = TestServer::start().await.unwrap();
    let sandbox = TestSandbox::create(&server.client("pool").unwrap(), json!({})).await;
    for _ in 0..5 {
        server.kill9().unwrap();
        server.restart().await.unwrap();
        let traces = Traces::before(&server.data);
        let loops = traces.all().iter().filter(|t| t.kind == bivouac_testkit::Kind::Loop).count();
        assert_eq!(loops, 1, "{:?}", traces.all());
        let pools = traces
            .all()
            .iter()
            .filter(|t| {
                t.kind == bivouac_testkit::Kind::Mount
                    && t.what.contains(" btrfs ")
                    && t.what.contains(server.data.to_str().unwrap())
            })
            .count();
        assert_eq!(pools, 1, "{:?}", traces.all());
        let sandbox = again(&server, &sandbox, "pool");
        let _ = sandbox.sh("echo x >> file; sync").await.good();
    }
    let sandbox = again(&server, &sandbox, "pool");
    assert_eq!(sandbox.sh("wc -l < file").await.good(), "5");
    drop((server, lock));
}

/// Folders of the session in the version 2 hierarchy.
fn group_of(session: &str) -> std::path::PathBuf {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let roots = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let at = fields.next()?;
        (fields.next()? == "cgroup2").then(|| Path::new(at).to_owned())
    });
    let engines = roots.flat_map(|root| fs::read_dir(root).unwrap().flatten());
    let found = engines.map(|engine| engine.path().join(session)).find(|path| path.is_dir());
    found.unwrap_or_else(|| panic!("no control group of {session}"))
}

#[tokio::test]
async fn a_stop_amid_the_start_of_a_command_waits_for_nothing() {
    let _lock = shared().unwrap();
    let server = TestServer::start().await.unwrap();
    let client = server.client("amid").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "persistent": false })).await;
    // A frozen init answers nothing: the command stays in the middle of its start.
    fs::write(group_of(&sandbox.session).join("cgroup.freeze"), "1").unwrap();
    let starting = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.open(&["true"], json!({})).await.map(drop) }
    });
    let logs = server.data.join("pool/logs").join(&sandbox.session);
    eventually("the shim has begun with the command", SHORT, async || {
        let begun = fs::read_dir(&logs).is_ok_and(|entries| entries.count() > 0);
        begun.then_some(()).ok_or("no log yet")
    })
    .await;
    let _ = sandbox.stop().await.ok();
    assert!(starting.await.unwrap().is_err(), "a command that never ran has no answer");
    // The engine kills a shim that does not end, after a while, and says so.
    assert!(!server.tail().contains("did not end by itself"), "{}", server.tail());
}
