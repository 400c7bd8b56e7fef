//! The command line: exit codes, streams, JSON shapes, `run` without an engine.

use std::fs;

use bivouac_testkit::{Cli, Kind, LONG, SHORT, TestServer, Traces, eventually, exclusive, shared};
use serde_json::{Value, json};

use crate::server;

/// A run in a namespace of its own.
fn cli(server: &TestServer, namespace: &str, args: &[&str]) -> Cli {
    let mut all = vec!["-n", namespace];
    all.extend(args);
    server.cli(&all)
}

#[tokio::test(flavor = "multi_thread")]
async fn run_passes_everything_through() {
    let server = server().await;
    let run = |args: &[&str]| {
        let mut all = vec!["run", "--"];
        all.extend(args);
        cli(&server, "cli/run", &all)
    };
    let output = run(&["sh", "-c", "echo out; echo err >&2; exit 42"]).run();
    assert_eq!(output.status.code(), Some(42), "{output:?}");
    assert_eq!(output.stdout, b"out\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("err\n"), "{output:?}");
    assert_eq!(run(&["cat"]).stdin("hi\n").run().stdout, b"hi\n");
    let binary: Vec<u8> =
        (0..3_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let output = run(&["cat"]).stdin(binary.clone()).run();
    assert!(
        output.stdout == binary,
        "standard input is not what came out ({} bytes)",
        output.stdout.len()
    );
    assert_eq!(run(&["sh", "-c", "kill -9 $$"]).run().status.code(), Some(137));
    assert_eq!(run(&["no-such-program"]).run().status.code(), Some(127));
    assert_eq!(run(&["/etc/passwd"]).run().status.code(), Some(126));
    assert_eq!(run(&["true"]).run().stdout, b"");
    assert_eq!(run(&["printf", "%s|", "a b", "", "*", "$HOME"]).run().stdout, b"a b||*|$HOME|");
    let list = cli(&server, "cli/run", &["--json", "ls"]).json();
    assert_eq!(names(&list), Vec::<String>::new(), "run left a sandbox");
}

fn names(list: &Value) -> Vec<String> {
    let items = list.as_array().or_else(|| list["sandboxes"].as_array());
    let items = items.unwrap_or_else(|| panic!("no list: {list}"));
    items.iter().map(|s| s["name"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_runs_at_once() {
    let server = server().await;
    let children: Vec<_> = (0..10)
        .map(|i| {
            let script = format!("echo start; sleep 0.3; echo {i}; exit {i}");
            (i, cli(&server, "cli/ten", &["run", "--", "sh", "-c", &script]).spawn().unwrap())
        })
        .collect();
    for (i, child) in children {
        let output =
            tokio::task::spawn_blocking(move || child.wait_with_output()).await.unwrap().unwrap();
        assert_eq!(output.status.code(), Some(i), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("start\n{i}\n"));
    }
    assert_eq!(names(&cli(&server, "cli/ten", &["--json", "ls"]).json()), Vec::<String>::new());
}

/// Waits until a child has said `word` on standard output.
fn heard(child: &mut std::process::Child, word: &str) {
    use std::io::Read as _;
    let mut text = String::new();
    let stdout = child.stdout.as_mut().unwrap();
    while !text.contains(word) {
        let mut byte = [0];
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "the output ended: {text}");
        text.push(char::from(byte[0]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_run_leaves_nothing() {
    use rustix::process::{Pid, Signal, kill_process};
    let server = server().await;
    let listed = || names(&cli(&server, "cli/cut", &["--json", "ls"]).json());
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let args = ["run", "--", "sh", "-c", "echo ready; sleep 86100"];
        let mut child = cli(&server, "cli/cut", &args).spawn().unwrap();
        heard(&mut child, "ready");
        assert_eq!(listed().len(), 1, "positive control");
        kill_process(Pid::from_child(&child), signal).unwrap();
        let status = tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap();
        assert_eq!(status.code(), Some(code), "{signal:?}: {status:?}");
        eventually("the sandbox to go", SHORT, async || {
            let left = listed();
            if left.is_empty() { Ok(()) } else { Err(left) }
        })
        .await;
    }
    // A reader that leaves ends it too.
    let mut child = cli(&server, "cli/cut", &["run", "--", "yes"]).spawn().unwrap();
    heard(&mut child, "y\n");
    drop(child.stdout.take());
    let status = tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap();
    assert!(!status.success(), "{status:?}");
    eventually("the sandbox to go", SHORT, async || {
        let left = listed();
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_durable_box() {
    let server = server().await;
    let run = |args: &[&str]| cli(&server, "cli/box", args);
    let made =
        run(&["--json", "create", "dev", "--tag", "a=b", "-p", "3000", "-e", "COLOR=red"]).json();
    assert!(made.to_string().contains("dev"), "{made}");
    assert_eq!(
        run(&["exec", "dev", "--", "sh", "-c", "echo $COLOR; id -un"]).good(),
        "red\nvercel-sandbox\n"
    );
    let output = run(&[
        "exec",
        "-w",
        "/tmp",
        "-e",
        "A=b",
        "-u",
        "root",
        "dev",
        "--",
        "sh",
        "-c",
        "pwd; echo $A; id -u; exit 3",
    ])
    .run();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert_eq!(output.stdout, b"/tmp\nb\n0\n");
    assert_eq!(run(&["exec", "-i", "dev", "--", "cat"]).stdin("typed\n").good(), "typed\n");
    assert_eq!(names(&run(&["--json", "ls"]).json()), ["dev"]);
    assert!(run(&["ls"]).good().contains("dev"));
    assert!(run(&["--json", "ls", "-A"]).json().to_string().contains("dev"));
    let seen = run(&["--json", "inspect", "dev"]).json();
    assert!(seen.to_string().contains("\"running\""), "{seen}");
    // Files both ways, folders too.
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("tree/sub")).unwrap();
    fs::write(dir.path().join("tree/sub/file"), "content").unwrap();
    fs::write(dir.path().join("one"), [0u8, 255, 13, 10]).unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let _ = run(&["cp", &at("one"), "dev:/tmp/one"]).good();
    let _ = run(&["cp", "dev:/tmp/one", &at("back")]).good();
    assert_eq!(fs::read(at("back")).unwrap(), [0u8, 255, 13, 10]);
    let _ = run(&["cp", &at("tree"), "dev:/vercel/sandbox/"]).good();
    assert_eq!(run(&["exec", "dev", "--", "cat", "tree/sub/file"]).good(), "content");
    let _ = run(&["cp", "dev:/vercel/sandbox/tree", &at("copy")]).good();
    assert_eq!(fs::read_to_string(at("copy/sub/file")).unwrap(), "content");
    let output = run(&["cp", "dev:/nope", &at("nope")]).run();
    assert!(!output.status.success() && !dir.path().join("nope").exists(), "{output:?}");
    // A command in the background, its log, its end.
    let id =
        run(&["exec", "-d", "dev", "--", "sh", "-c", "echo logged; echo e >&2; exit 9"]).good();
    let id = id.trim();
    assert!(id.starts_with("cmd_"), "{id}");
    assert_eq!(run(&["wait", "dev", id]).run().status.code(), Some(9));
    let output = run(&["logs", "dev", id]).run();
    assert_eq!(output.stdout, b"logged\n", "{output:?}");
    assert!(run(&["--json", "ps", "dev"]).json().to_string().contains(id));
    let _ = run(&["--json", "stop", "dev"]).json();
    assert!(run(&["--json", "inspect", "dev"]).json().to_string().contains("\"stopped\""));
    assert_eq!(run(&["stop", "dev"]).run().status.code(), Some(0), "twice is once");
    assert_eq!(
        run(&["exec", "dev", "--", "cat", "tree/sub/file"]).good(),
        "content",
        "exec starts it"
    );
    let _ = run(&["stop", "dev"]).good();
    let _ = run(&["start", "dev"]).good();
    let _ = run(&["rm", "dev"]).good();
    let output = run(&["inspect", "dev"]).run();
    assert!(!output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("dev"), "{output:?}");
    assert!(!run(&["rm", "dev"]).run().status.success());
    let _ = run(&["rm", "-f", "dev"]).good();
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_say_what_and_what_next() {
    let server = server().await;
    let run = |args: &[&str]| cli(&server, "cli/fail", args).run();
    for args in [
        &["exec", "nope", "--", "true"][..],
        &["inspect", "nope"],
        &["logs", "nope"],
        &["stop", "nope"],
    ] {
        let output = run(args);
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{args:?}");
        assert!(err.contains("nope"), "{args:?}: {err}");
        assert!(output.stdout.is_empty(), "{args:?} wrote to stdout: {output:?}");
    }
    for args in
        [&["create", "a/b"][..], &["frobnicate"], &["exec", "x"], &["create", "--vcpus", "many"]]
    {
        assert_eq!(run(args).status.code(), Some(2), "{args:?}");
    }
    assert!(!run(&["create", "x", "--vcpus", "3"]).status.success());
    assert!(!run(&["create", "x", "--image", "no/such"]).status.success());
    assert_eq!(names(&cli(&server, "cli/fail", &["--json", "ls"]).json()), Vec::<String>::new());
    let output =
        Cli::new(&["ls"]).env("BIVOUAC_URL", "http://127.0.0.1:1").env("BIVOUAC_TOKEN", "x").run();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("127.0.0.1:1"), "{output:?}");
    let output =
        Cli::new(&["ls"]).env("BIVOUAC_URL", &server.url).env("BIVOUAC_TOKEN", "wrong").run();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && err.to_lowercase().contains("token"), "{err}");
    // Colours only on a terminal.
    assert!(!err.contains('\u{1b}'), "{err:?}");
    let help = Cli::new(&["help", "exit-codes"]).good();
    assert!(help.contains("127") && help.contains("126"), "{help}");
}

#[tokio::test(flavor = "multi_thread")]
async fn env_points_clients_here() {
    let server = server().await;
    let home = tempfile::tempdir().unwrap();
    let env = |args: &[&str]| server.cli(args).env("XDG_CACHE_HOME", home.path());
    let vars = env(&["env", "--format", "json"]).json();
    assert_eq!(vars["BIVOUAC_URL"], json!(server.url));
    assert_eq!(vars["BIVOUAC_TOKEN"], json!(server.token));
    assert_eq!(vars["VERCEL_OIDC_TOKEN"], vars["VERCEL_AUTH_TOKEN"]);
    assert_eq!(vars["VERCEL_OIDC_TOKEN"].as_str().unwrap().split('.').count(), 3);
    for name in ["VERCEL_TEAM_ID", "VERCEL_PROJECT_ID"] {
        assert!(!vars[name].as_str().unwrap().is_empty(), "{name}");
    }
    assert_eq!(
        (&vars["VERCEL_TELEMETRY_DISABLED"], &vars["SANDBOX_SKIP_VERSION_CHECK"]),
        (&json!("1"), &json!("1"))
    );
    let options = vars["NODE_OPTIONS"].as_str().unwrap();
    let shim =
        options.split("--import=").nth(1).unwrap().trim_matches('"').trim_start_matches("file://");
    assert!(shim.starts_with(home.path().to_str().unwrap()), "{options}");
    let _ = fs::read_to_string(shim).unwrap();
    // What was there stays in front.
    let kept = env(&["env", "--format", "json"]).env("NODE_OPTIONS", "--no-warnings").json();
    assert!(kept["NODE_OPTIONS"].as_str().unwrap().starts_with("--no-warnings "), "{kept}");
    // The shell form survives a real shell.
    let text = env(&["env"]).good();
    let output = std::process::Command::new("sh")
        .args(["-c", "eval \"$1\"; printf '%s' \"$BIVOUAC_TOKEN|$BIVOUAC_URL\"", "sh", &text])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{}|{}", server.token, server.url));
    let empty = tempfile::tempdir().unwrap();
    let output = Cli::new(&["env"]).env("BIVOUAC_DATA_DIR", empty.path()).run();
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_token_is_written_once_and_kept_private() {
    use std::os::unix::fs::PermissionsExt as _;
    let lock = shared().unwrap();
    let mut server = TestServer::builder().own_token().start().await.unwrap();
    let path = server.data.join("token");
    let token = fs::read_to_string(&path).unwrap().trim().to_owned();
    assert!(token.len() >= 32, "{token}");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::metadata(&server.data).unwrap().permissions().mode() & 0o777, 0o700);
    let found = Cli::new(&["--json", "ls"]).env("BIVOUAC_DATA_DIR", &server.data).json();
    assert_eq!(names(&found), Vec::<String>::new());
    server.restart().await.unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap().trim(), token, "a restart made a new token");
    drop((server, lock));
}

#[tokio::test(flavor = "multi_thread")]
async fn run_without_an_engine_starts_one_and_it_ends() {
    let lock = exclusive().unwrap();
    let dir = tempfile::Builder::new().prefix("bivouac-test-run-").tempdir().unwrap();
    let data = dir.path().join("data");
    let before = Traces::before(&data);
    let run = |args: &[&str]| Cli::new(args).env("BIVOUAC_DATA_DIR", &data);
    // Two at once: one engine.
    let first = run(&["run", "--", "sh", "-c", "echo one; exit 42"]).spawn().unwrap();
    let second = run(&["run", "--", "echo", "two"]).spawn().unwrap();
    let first =
        tokio::task::spawn_blocking(move || first.wait_with_output()).await.unwrap().unwrap();
    let second =
        tokio::task::spawn_blocking(move || second.wait_with_output()).await.unwrap().unwrap();
    assert_eq!(
        (first.status.code(), first.stdout.as_slice()),
        (Some(42), &b"one\n"[..]),
        "{first:?}"
    );
    assert_eq!(
        (second.status.code(), second.stdout.as_slice()),
        (Some(0), &b"two\n"[..]),
        "{second:?}"
    );
    let engine: Value =
        serde_json::from_slice(&fs::read(data.join("engine.json")).unwrap()).unwrap();
    let pid = engine["pid"].as_i64().unwrap();
    assert_eq!(run(&["run", "--", "echo", "three"]).good(), "three\n");
    // It ends by itself, and with it everything but its files.
    eventually("the engine to end when it is idle", LONG, async || {
        let left: Vec<_> = before
            .added()
            .into_iter()
            .filter(|t| !matches!(t.kind, Kind::File | Kind::Mount | Kind::Loop))
            .collect();
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    assert!(
        !std::path::Path::new(&format!("/proc/{pid}")).exists(),
        "the engine {pid} is still there"
    );
    for point in ["pool", "pool.mnt"] {
        let path = data.join(point);
        let _ = std::process::Command::new("umount").arg(&path).output();
    }
    eventually("the loop device to go", SHORT, async || {
        let left: Vec<_> = before.added().into_iter().filter(|t| t.kind != Kind::File).collect();
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    drop(lock);
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_knows_this_machine() {
    let output = Cli::new(&["--json", "doctor"]).run();
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    let text = report.to_string().to_lowercase();
    for word in ["kernel", "cgroup", "space"] {
        assert!(text.contains(word), "doctor says nothing of {word}: {report}");
    }
    assert_eq!(output.status.code(), Some(0), "this machine runs the tests: {report}");
    assert!(!Cli::new(&["doctor"]).good().is_empty());
}
