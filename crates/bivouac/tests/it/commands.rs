//! Commands: exit codes, folders, environments, users, signals, timeouts, refusals.

use std::time::Duration;

use bivouac_testkit::{LONG, SHORT, TestSandbox, eventually};
use serde_json::json;

use crate::sandbox;

/// Ids of the processes inside whose command line holds `marker`, asked from inside.
pub(crate) async fn running(sandbox: &TestSandbox, marker: &str) -> Vec<String> {
    let script = r#"for p in /proc/[0-9]*; do
        if tr '\0' ' ' < $p/cmdline 2>/dev/null | grep -q -F -- "$1"; then
            [ "${p#/proc/}" = $$ ] || echo "${p#/proc/}"
        fi
    done"#;
    let ran = sandbox.run_with(&["sh", "-c", script, "sh", marker], json!({ "sudo": true })).await;
    ran.out().lines().map(str::to_owned).collect()
}

#[tokio::test]
async fn exit_codes_come_through() {
    let (_server, sandbox) = sandbox("exit-codes").await;
    for code in [0, 1, 2, 42, 126, 127, 128, 255] {
        let ran = sandbox.sh(&format!("exit {code}")).await;
        assert_eq!(ran.exit, Some(code));
        assert!(ran.command["reason"].is_null(), "{:?}", ran.command);
    }
    for (signal, code) in [(9, 137), (15, 143), (11, 139), (1, 129)] {
        let ran = sandbox.sh(&format!("kill -{signal} $$")).await;
        assert_eq!(ran.exit, Some(code), "signal {signal}");
    }
}

#[tokio::test]
async fn a_record_has_the_fields_that_clients_need() {
    let (_server, sandbox) = sandbox("record").await;
    let mut lines = sandbox.open(&["echo", "x y", "z"], json!({})).await.unwrap();
    let first = lines.next(SHORT).await.unwrap().unwrap();
    let command = &first["command"];
    assert!(command["id"].as_str().unwrap().starts_with("cmd_"), "{command}");
    assert_eq!(command["name"], "echo");
    assert_eq!(command["args"], json!(["x y", "z"]));
    assert_eq!(command["cwd"], "/vercel/sandbox");
    assert_eq!(command["sessionId"], json!(sandbox.session));
    assert!(command.as_object().unwrap().contains_key("exitCode"), "{command}");
    assert!(command["exitCode"].is_null(), "{command}");
    assert!(command["startedAt"].as_i64().unwrap() > 1_700_000_000_000, "{command}");
    assert!(command.get("durationMs").is_none(), "{command}");
    let mut last = first.clone();
    while let Some(line) = lines.next(SHORT).await.unwrap() {
        last = line;
    }
    assert_eq!(last["command"]["id"], command["id"]);
    assert_eq!(last["command"]["exitCode"], 0);
    assert!(last["command"]["durationMs"].as_i64().unwrap() >= 0);
    let stored = sandbox.command(command["id"].as_str().unwrap()).await.ok();
    assert_eq!(stored["command"], last["command"]);
}

#[tokio::test]
async fn arguments_arrive_as_they_are() {
    let (_server, sandbox) = sandbox("arguments").await;
    let args = ["a b", "", "*", "$HOME", "`id`", "'\"\\", "new\nline", "é漢😀", "-n", "--"];
    let mut argv = vec!["perl", "-e", r#"print map { length($_) . ":$_;" } @ARGV"#, "--"];
    argv.extend(args);
    let expected: String = args.iter().map(|a| format!("{}:{a};", a.len())).collect();
    assert_eq!(String::from_utf8(sandbox.run(&argv).await.stdout).unwrap(), expected);
}

#[tokio::test]
async fn the_working_folder_is_chosen() {
    let (_server, sandbox) = sandbox("cwd").await;
    assert_eq!(sandbox.run(&["pwd"]).await.good(), "/vercel/sandbox");
    let pwd = async |cwd: &str| sandbox.run_with(&["pwd"], json!({ "cwd": cwd })).await;
    assert_eq!(pwd("/tmp").await.good(), "/tmp");
    let _ = sandbox.run(&["mkdir", "-p", "sub/deep", "with space"]).await.good();
    assert_eq!(pwd("sub").await.good(), "/vercel/sandbox/sub");
    assert_eq!(pwd("./sub/../sub/deep").await.good(), "/vercel/sandbox/sub/deep");
    assert_eq!(pwd("with space").await.good(), "/vercel/sandbox/with space");
    assert_eq!(pwd("..").await.good(), "/vercel");
}

#[tokio::test]
async fn environments_merge_and_users_differ() {
    let (server, _) = sandbox("env").await;
    let client = server.team("env");
    let body = json!({ "persistent": false, "env": { "A": "create", "B": "create", "E": "" } });
    let sandbox = TestSandbox::create(&client, body).await;
    let extra = json!({ "env": { "B": "call", "C": "with 'quotes' and\nlines" } });
    let script = "printf '%s|%s|%s|%s' \"$A\" \"$B\" \"$C\" \"${E-unset}\"";
    let ran = sandbox.run_with(&["sh", "-c", script], extra).await;
    assert_eq!(ran.good(), "create|call|with 'quotes' and\nlines|");

    assert_eq!(sandbox.run(&["id", "-un"]).await.good(), "vercel-sandbox");
    assert_eq!(sandbox.run(&["id", "-u"]).await.good(), "1000");
    let script = "test -d $HOME && test -w $HOME && test -w . && echo $USER";
    assert_eq!(sandbox.sh(script).await.good(), "vercel-sandbox");

    let root = json!({ "sudo": true, "env": { "FOO": "bar" } });
    let script = "echo $(id -u) $HOME $USER $FOO $A";
    assert_eq!(
        sandbox.run_with(&["sh", "-c", script], root).await.good(),
        "0 /root root bar create"
    );
    let path = sandbox.sh("echo $PATH").await.good();
    assert_eq!(sandbox.sudo("echo $PATH").await.good(), path, "sudo keeps PATH");
    assert_eq!(sandbox.run(&["sudo", "-n", "id", "-u"]).await.good(), "0");
    assert_eq!(sandbox.run(&["sudo", "-n", "-u", "nobody", "id", "-un"]).await.good(), "nobody");
}

#[tokio::test]
async fn a_timeout_kills_the_whole_tree() {
    let (_server, sandbox) = sandbox("timeout").await;
    // One child in the group, one in a session of its own, one that ignores polite signals.
    let script =
        "sleep 86001 & setsid sleep 86001 & trap '' TERM INT HUP; sleep 86001; sleep 86001";
    let ran = sandbox.run_with(&["sh", "-c", script], json!({ "timeout": 700 })).await;
    assert_eq!(ran.exit, Some(137));
    assert_eq!(ran.command["reason"], "timeout", "{}", ran.command);
    assert!(ran.command["reasonText"].as_str().unwrap().len() > 10, "{}", ran.command);
    assert!(ran.command["durationMs"].as_i64().unwrap() >= 600, "{}", ran.command);
    eventually("the tree to be gone", SHORT, async || {
        let left = running(&sandbox, "86001").await;
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    let id = sandbox.start(&["sleep", "86002"], json!({ "timeout": 300 })).await;
    let ended = sandbox.wait(&id).await;
    assert_eq!(
        (ended["exitCode"].as_i64(), ended["reason"].as_str()),
        (Some(137), Some("timeout"))
    );
    let ran = sandbox.run_with(&["true"], json!({ "timeout": 60_000 })).await;
    assert_eq!((ran.exit, &ran.command["reason"]), (Some(0), &json!(null)));
}

#[tokio::test]
async fn signals_reach_the_group() {
    let (_server, sandbox) = sandbox("signals").await;
    for (signal, code) in [(1, 129), (2, 130), (9, 137), (15, 143)] {
        let id = sandbox.start(&["sleep", "86003"], json!({})).await;
        let answer = sandbox.kill(&id, signal).await.ok();
        assert_eq!(answer["command"]["id"], json!(id));
        assert_eq!(sandbox.wait(&id).await["exitCode"], code, "signal {signal}");
        // A command that has ended is left alone.
        let again = sandbox.kill(&id, 9).await;
        assert!(again.status < 500, "{again}");
        assert_eq!(sandbox.command(&id).await.ok()["command"]["exitCode"], code);
    }
    // A shell in the middle does not shield its children.
    let id = sandbox.start(&["sh", "-c", "sleep 86004; true"], json!({})).await;
    eventually("the child to run", SHORT, async || {
        if running(&sandbox, "sleep 86004").await.len() == 2 { Ok(()) } else { Err(()) }
    })
    .await;
    let _ = sandbox.kill(&id, 9).await.ok();
    assert_eq!(sandbox.wait(&id).await["exitCode"], 137);
    eventually("the child to be gone", SHORT, async || {
        let left = running(&sandbox, "86004").await;
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    // A handler runs.
    let script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done";
    let id = sandbox.start(&["sh", "-c", script], json!({})).await;
    let mut lines = sandbox.logs(&id).await;
    assert_eq!(lines.next(SHORT).await.unwrap().unwrap()["stream"], "stdout");
    let _ = sandbox.kill(&id, 15).await.ok();
    assert_eq!(sandbox.wait(&id).await["exitCode"], 5);
    assert_eq!(sandbox.output(&id).await.out(), "ready\ncaught");
    // Stop and continue do not end it.
    let id = sandbox.start(&["sleep", "86005"], json!({})).await;
    let _ = sandbox.kill(&id, 19).await.ok();
    let _ = sandbox.kill(&id, 18).await.ok();
    assert!(sandbox.command(&id).await.ok()["command"]["exitCode"].is_null());
    for bad in [-1, 65, 1000] {
        sandbox.kill(&id, bad).await.refused(400, "");
    }
    let _ = sandbox.kill(&id, 9).await.ok();
    assert_eq!(sandbox.wait(&id).await["exitCode"], 137);
    sandbox.kill("cmd_00000000000000000000000000", 9).await.refused(404, "not_found");
}

#[tokio::test]
async fn what_cannot_start_is_a_400_and_leaves_no_record() {
    let (_server, sandbox) = sandbox("refusals").await;
    let prepare = "echo hi > plain; mkdir folder; printf '#!/nope/sh\\n' > shebang; \
                   echo 'no magic' > format; chmod +x shebang format; ln -s /nope dangling";
    let _ = sandbox.sh(prepare).await.good();
    let before = sandbox.client.get(&sandbox.path("/cmd")).await.ok();
    let long = "x".repeat(200_000);
    let cases: Vec<(Vec<&str>, serde_json::Value, &str)> = vec![
        (vec!["no-such-program"], json!({}), "no-such-program"),
        (vec!["echo hi"], json!({}), "echo hi"),
        (vec!["/no/such/file"], json!({}), "/no/such/file"),
        (vec!["./plain"], json!({}), "plain"),
        (vec!["./folder"], json!({}), "folder"),
        (vec!["./dangling"], json!({}), "dangling"),
        (vec!["./shebang"], json!({}), "shebang"),
        (vec!["./format"], json!({}), "format"),
        (vec!["true"], json!({ "cwd": "/no/such/folder" }), "/no/such/folder"),
        (vec!["true"], json!({ "cwd": "plain" }), "plain"),
        (vec![""], json!({}), ""),
        (vec!["true", "a\0b"], json!({}), ""),
        (vec!["true"], json!({ "cwd": "a\0b" }), ""),
        (vec!["true"], json!({ "env": { "A=B": "x" } }), ""),
        (vec!["true"], json!({ "env": { "": "x" } }), ""),
        (vec!["true"], json!({ "timeout": 99 }), "timeout"),
        (vec!["true"], json!({ "timeout": -1 }), ""),
        (vec!["true"], json!({ "env": { "A": 1 } }), ""),
        (vec!["true", &long], json!({}), ""),
    ];
    for (argv, extra, named) in cases {
        let answer = sandbox.refuses(&argv, extra.clone()).await;
        answer.refused(400, "");
        assert!(answer.message().contains(named), "{extra}: {answer} does not name {named}");
        let mut body = json!({ "command": argv[0], "args": &argv[1..], "env": {} });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        sandbox.post("/cmd", &body).await.refused(400, "");
    }
    sandbox.post("/cmd", &json!({ "args": [] })).await.refused(400, "");
    let after = sandbox.client.get(&sandbox.path("/cmd")).await.ok();
    assert_eq!(before["commands"], after["commands"], "a refused command left a record");
    assert_eq!(sandbox.run(&["echo", "still here"]).await.good(), "still here");
}

#[tokio::test]
async fn a_background_child_does_not_hold_the_command() {
    let (_server, sandbox) = sandbox("background").await;
    let ran = sandbox.sh("sleep 86006 & echo started").await;
    assert_eq!(ran.good(), "started");
    let ran =
        sandbox.sh("setsid sleep 86006 >/dev/null & (sleep 86006 &); echo again >&2; exit 3").await;
    assert_eq!((ran.exit, ran.err().as_str()), (Some(3), "again\n"));
    assert_eq!(running(&sandbox, "sleep 86006").await.len(), 3, "background children live on");
}

#[tokio::test]
async fn closed_output_does_not_end_a_command() {
    let (_server, sandbox) = sandbox("closed").await;
    let ran = sandbox.sh("exec >&- 2>&-; sleep 0.4; exit 7").await;
    assert_eq!(ran.exit, Some(7));
    assert!(ran.command["durationMs"].as_i64().unwrap() >= 300, "{}", ran.command);
}

#[tokio::test]
async fn commands_are_listed_newest_first_and_kept() {
    let (_server, sandbox) = sandbox("listed").await;
    let mut ids = Vec::new();
    for i in 0..5 {
        let id = sandbox.start(&["sh", "-c", &format!("exit {i}")], json!({})).await;
        assert_eq!(sandbox.wait(&id).await["exitCode"], i);
        ids.insert(0, id);
    }
    let listed = sandbox.client.get(&sandbox.path("/cmd")).await.ok();
    let listed: Vec<&str> =
        listed["commands"].as_array().unwrap().iter().map(|c| c["id"].as_str().unwrap()).collect();
    assert_eq!(listed, ids);
    sandbox.command("cmd_00000000000000000000000000").await.refused(404, "not_found");
    sandbox.command("nonsense").await.refused(404, "not_found");
}

#[tokio::test]
async fn fifty_at_once() {
    let (_server, sandbox) = sandbox("fifty").await;
    let mut tasks = tokio::task::JoinSet::new();
    for i in 0..50 {
        let sandbox = sandbox.clone();
        tasks.spawn(async move {
            let ran = sandbox.sh(&format!("echo {i}; echo e{i} >&2; exit {i}")).await;
            assert_eq!((ran.exit, ran.out()), (Some(i), i.to_string()));
            assert_eq!(ran.err(), format!("e{i}\n"));
        });
    }
    while let Some(done) = tokio::time::timeout(LONG, tasks.join_next()).await.unwrap() {
        done.unwrap();
    }
}

#[tokio::test]
async fn pid_one_reaps() {
    let (_server, sandbox) = sandbox("reaps").await;
    for _ in 0..20 {
        let _ = sandbox.sh("(sleep 0.05 & sleep 0.02 &) ; (true &)").await.good();
    }
    let zombies = "cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | grep -c '^Z' || true";
    eventually("every orphan to be reaped", SHORT, async || {
        let left = sandbox.sudo(zombies).await.good();
        if left == "0" { Ok(()) } else { Err(left) }
    })
    .await;
}

#[tokio::test]
async fn a_wait_outlives_a_reader_that_left() {
    let (_server, sandbox) = sandbox("left").await;
    let stream = sandbox.open(&["sh", "-c", "sleep 0.5; echo late; exit 4"], json!({})).await;
    let mut stream = stream.unwrap();
    let first = stream.next(SHORT).await.unwrap().unwrap();
    drop(stream);
    let id = first["command"]["id"].as_str().unwrap();
    assert_eq!(sandbox.wait(id).await["exitCode"], 4);
    assert_eq!(sandbox.output(id).await.out(), "late");
}

#[tokio::test]
async fn a_stop_ends_an_open_stream_with_its_reason() {
    let (_server, sandbox) = sandbox("stopped-stream").await;
    let mut stream = sandbox.open(&["sleep", "86007"], json!({})).await.unwrap();
    let first = stream.next(SHORT).await.unwrap().unwrap();
    let _ = sandbox.stop().await.ok();
    let mut last = first.clone();
    while let Some(line) = stream.next(Duration::from_secs(60)).await.unwrap() {
        last = line;
    }
    assert_eq!(last["stream"], "error", "{last}");
    assert_eq!(last["data"]["code"], "sandbox_stopped", "{last}");
    let id = first["command"]["id"].as_str().unwrap();
    let kept = sandbox.command(id).await.ok();
    assert_eq!(kept["command"]["reason"], "sandbox_stopped", "{kept}");
}
