//! What the command line does for people and programs beyond the verbs: hints, completions, documented
//! shapes; and what `run` leaves when it cannot clean up.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;

use bivouac_testkit::{Cli, LONG, SHORT, TestServer, binary, eventually, schema_breaches, shared};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::server;

fn cli(server: &TestServer, namespace: &str, args: &[&str]) -> Cli {
    let all: Vec<&str> = ["-n", namespace].iter().chain(args).copied().collect();
    server.cli(&all)
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs something that must fail; what it says.
#[track_caller]
fn fails(cli: Cli, code: i32) -> String {
    let output = cli.run();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains("error: "), "{text}");
    assert!(text.contains("hint: "), "nothing says what to do next: {text}");
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_end_in_what_to_do_next() {
    let server = server().await;
    let run = |args: &[&str]| cli(&server, "hints/here", args);
    let _ = run(&["create", "web-one"]).good();
    let _ = cli(&server, "hints/there", &["create", "elsewhere"]).good();
    for verb in ["exec", "inspect", "logs", "stop", "start", "rm", "snapshot", "fork", "ps"] {
        let mut line = vec![verb, "web-noe"];
        if verb == "exec" {
            line.extend(["--", "true"]);
        }
        let text = fails(run(&line), 1);
        assert!(text.contains("did you mean: web-one?"), "{verb}: {text}");
        assert!(text.contains("bivouac ls"), "{verb}: {text}");
    }
    let text = fails(run(&["exec", "elsewhere", "--", "true"]), 1);
    assert!(text.contains("-n hints/there") && text.contains("bivouac ls -A"), "{text}");
    let text = fails(run(&["inspect", "nothing-like-it"]), 1);
    assert!(text.contains("bivouac ls (all namespaces: bivouac ls -A)"), "{text}");
    let text = fails(run(&["create", "web-one"]), 1);
    assert!(text.contains("bivouac start") && text.contains("bivouac rm"), "{text}");
    // The engine's own sentence names the command.
    let text = said(&run(&["create", "--image", "no-such-image"]).run());
    assert!(text.contains("bivouac image"), "{text}");
    let text = fails(run(&["kill", "web-one", "cmd_01"]), 1);
    assert!(text.contains("bivouac ps web-one"), "{text}");
    let text = fails(run(&["snapshots", "rm", "snap_00000000000000000000000009"]), 1);
    assert!(text.contains("bivouac snapshots ls"), "{text}");
    let text = fails(run(&["exec", "web-one", "--", "no-such-program"]), 127);
    assert!(text.contains("sh -c"), "{text}");
    let text = fails(run(&["ls"]).env("BIVOUAC_TOKEN", "wrong"), 1);
    assert!(text.contains("BIVOUAC_TOKEN") && !text.contains("wrong"), "{text}");
    // Nobody is there: at an address, and in a folder.
    let lone = |args: &[&str]| Cli::new(args).env("BIVOUAC_TOKEN", "x");
    let text = fails(lone(&["--url", "http://127.0.0.1:1", "ls"]), 1);
    assert!(text.contains("bivouac serve"), "{text}");
    let folder = tempfile::tempdir().unwrap();
    let text = fails(Cli::new(&["ls"]).env("BIVOUAC_DATA_DIR", folder.path()), 1);
    assert!(text.contains("bivouac serve"), "{text}");
    for (namespace, name) in [("hints/here", "web-one"), ("hints/there", "elsewhere")] {
        let _ = cli(&server, namespace, &["rm", "--snapshots", name]).good();
    }
}

/// Answers every request with an error, as an engine of another version.
fn another_version(answer: &'static str) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        // Ends with the test's process.
        while let Ok((mut stream, _)) = listener.accept() {
            let mut head = [0; 4096];
            let _ = stream.read(&mut head);
            let _ = write!(
                stream,
                "HTTP/1.1 404 Not Found\r\nx-bivouac-version: 9.9.9\r\nconnection: close\r\n\
                 content-length: {}\r\n\r\n{answer}",
                answer.len()
            );
        }
    });
    format!("http://{address}")
}

#[test]
fn an_engine_of_another_version_is_told() {
    let bodies = [
        r#"{"error":{"code":"not_found","message":"There is no path /api/v9."}}"#,
        "not the API's words",
    ];
    for body in bodies {
        let url = another_version(body);
        let text = fails(Cli::new(&["--url", &url, "ls"]).env("BIVOUAC_TOKEN", "x"), 1);
        assert!(text.contains("9.9.9") && text.contains("start it again"), "{text}");
    }
}

/// A folder in which the executable under test is called `bivouac`, for a search path.
fn named_folder() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(binary().unwrap(), folder.path().join("bivouac")).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    (folder, path)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shell_completes_names_that_are_there() {
    let server = server().await;
    for name in ["tab-one", "tab-two", "other"] {
        let _ = cli(&server, "local/tab", &["create", name]).good();
    }
    let (_folder, path) = named_folder();
    // A real shell, with what it does when somebody presses Tab.
    let candidates = |words: &[&str]| -> Vec<String> {
        let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
        let script = format!(
            "source <(bivouac completions bash); COMP_WORDS=({}); COMP_CWORD={}; COMP_TYPE=9; \
             $(complete -p bivouac | sed 's/.*-F \\([^ ]*\\).*/\\1/') bivouac \"${{COMP_WORDS[COMP_CWORD]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            quoted.join(" "),
            words.len() - 1
        );
        let output = Command::new("bash")
            .args(["-c", &script])
            .env("PATH", &path)
            .env("BIVOUAC_DATA_DIR", &server.data)
            .env("BIVOUAC_TOKEN", &server.token)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(output.stderr.is_empty(), "it says something: {}", said(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        let mut found: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        found.sort();
        found
    };
    let ns = ["bivouac", "-n", "local/tab"];
    let at = |words: &[&str]| candidates(&[&ns[..], words].concat());
    assert_eq!(at(&["exec", "tab-"]), ["tab-one", "tab-two"]);
    assert_eq!(at(&["resize", "tab-t"]), ["tab-two"]);
    assert_eq!(at(&["cp", "tab-o"]), ["tab-one:"]);
    assert_eq!(candidates(&["bivouac", "snap"]), ["snapshot", "snapshots"]);
    assert!(candidates(&["bivouac", "-n", "local/none", "exec", "tab-"]).is_empty());
    // Each kind of name, from what is there now.
    let run = |args: &[&str]| cli(&server, "local/tab", args);
    let id = run(&["snapshot", "tab-one", "--live"]).good().trim().to_owned();
    let command = run(&["exec", "-d", "tab-one", "--", "sleep", "86100"]).good().trim().to_owned();
    let _ = run(&["drive", "create", "tab-drive", "--size", "1G"]).good();
    let _ = run(&["secret", "set", "TAB_SECRET"]).stdin("x").good();
    assert_eq!(at(&["snapshots", "rm", "snap_"]), [id.as_str()]);
    assert_eq!(at(&["create", "--snapshot", "snap_"]), [id.as_str()]);
    assert_eq!(at(&["kill", "tab-one", "cmd_"]), [command.as_str()]);
    assert!(at(&["kill", "tab-two", "cmd_"]).is_empty(), "another sandbox's");
    assert_eq!(at(&["drive", "rm", "tab"]), ["tab-drive"]);
    assert_eq!(at(&["drive", "cat", "tab"]), ["tab-drive:"]);
    assert_eq!(at(&["secret", "rm", "TAB"]), ["TAB_SECRET"]);
    assert!(at(&["create", "--image", "ho"]).contains(&"host".to_owned()));
    // Without an engine there is nothing to say, and nothing is said.
    let lost = candidates(&["bivouac", "--data-dir", "/nonexistent", "exec", "tab-"]);
    assert!(lost.is_empty(), "{lost:?}");
    // As zsh and fish call it.
    let called = |shell: &str, variables: &[(&str, &str)], words: &[&str]| {
        let mut call = Command::new(binary().unwrap());
        call.arg("--").args(words).env("BIVOUAC_COMPLETE", shell).envs(variables.to_vec());
        call.env("BIVOUAC_DATA_DIR", &server.data).env("BIVOUAC_TOKEN", &server.token);
        let output = call.output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{shell}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let line = ["bivouac", "-n", "local/tab", "exec", "tab-"];
    let zsh = called("zsh", &[("_CLAP_IFS", "\n"), ("_CLAP_COMPLETE_INDEX", "4")], &line);
    let names: Vec<&str> = zsh.lines().map(|l| l.split(':').next().unwrap()).collect();
    assert_eq!(names, ["tab-one", "tab-two"], "{zsh:?}");
    let fish = called("fish", &[], &line);
    let names: Vec<&str> = fish.lines().map(|l| l.split('\t').next().unwrap()).collect();
    assert_eq!(names, ["tab-one", "tab-two"], "{fish:?}");
    assert!(fish.contains("\trunning"), "with what is known of each: {fish:?}");
    // An engine that takes a connection and says nothing keeps nobody waiting.
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", mute.local_addr().unwrap());
    let nothing = called("fish", &[("BIVOUAC_URL", &url)], &line);
    assert_eq!(nothing, "");
    drop(mute);
    for name in ["tab-one", "tab-two", "other"] {
        let _ = run(&["rm", "--snapshots", name]).good();
    }
    let _ = run(&["snapshots", "rm", &id]).run();
    let _ = run(&["drive", "rm", "tab-drive"]).good();
    let _ = run(&["secret", "rm", "TAB_SECRET"]).good();
}

/// What somebody does, what it exits with, and what it is told to do next.
type Mistake<'a> = (&'a [&'a str], i32, &'a [&'a str]);

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_trouble_has_its_code_and_its_way_out() {
    let server = server().await;
    let run = |args: &[&str]| cli(&server, "hints/table", args);
    let _ = run(&["create", "web-box", "-p", "3000"]).good();
    let _ = run(&["create", "asleep", "--ephemeral"]).good();
    let _ = run(&["stop", "asleep"]).good();
    let _ = run(&["drive", "create", "data-drive", "--size", "1G"]).good();
    let table: &[Mistake<'_>] = &[
        (&["exec", "web-bxo", "--", "true"], 1, &["did you mean: web-box?", "bivouac ls"]),
        (&["inspect", "nothing-like-it"], 1, &["bivouac ls -A"]),
        (&["drive", "show", "data-drvie"], 1, &["did you mean: data-drive?", "bivouac drive ls"]),
        (&["snapshot", "asleep"], 1, &["bivouac start asleep"]),
        (&["create", "x", "--image", "no-such-image"], 1, &["bivouac image"]),
        (
            &["create", "x", "--snapshot", "snap_00000000000000000000000009"],
            1,
            &["bivouac snapshots ls"],
        ),
        (&["create", "web-box"], 1, &["bivouac start", "bivouac rm"]),
        (&["create", "x", "--disk", "900T"], 1, &["--disk"]),
        (&["exec", "web-box", "--", "no-such-program"], 127, &["sh -c"]),
        (&["exec", "web-box", "--", "/etc/passwd"], 126, &[]),
        (
            &["exec", "web-box", "--timeout", "100ms", "--", "sleep", "86100"],
            137,
            &["its timeout passed"],
        ),
        (&["exec", "web-box", "--", "sh", "-c", "exit 7"], 7, &[]),
        (&["exec", "web-box", "--", "sh", "-c", "kill -TERM $$"], 143, &[]),
        (&["kill", "web-box", "cmd_01"], 1, &["bivouac ps web-box"]),
        (&["secret", "rm", "NOT_THERE"], 1, &["bivouac secret set"]),
        (&["exec", "web-box"], 2, &[]),
        (&["nonsense"], 2, &[]),
    ];
    let codes = Cli::new(&["help", "exit-codes"]).good();
    for (line, code, wanted) in table {
        let output = run(line).run();
        let text = said(&output);
        assert_eq!(output.status.code(), Some(*code), "{line:?}: {text}");
        for hint in *wanted {
            assert!(text.contains(hint), "{line:?} does not say '{hint}': {text}");
        }
        let listed = codes.contains(&format!("\n  {code} ")) || *code == 7 || *code > 128;
        assert!(listed, "{code} is not in the list of exit codes");
    }
    // The wrong token, and nobody there: nothing secret is told.
    let text = fails(run(&["ls"]).env("BIVOUAC_TOKEN", "a-wrong-one"), 1);
    assert!(text.contains("BIVOUAC_TOKEN") && !text.contains("a-wrong-one"), "{text}");
    let nobody = Cli::new(&["--url", "http://127.0.0.1:1", "ls"]).env("BIVOUAC_TOKEN", "x");
    assert!(fails(nobody, 1).contains("bivouac serve"));
    let _ = run(&["rm", "--snapshots", "web-box", "asleep"]).good();
    let _ = run(&["drive", "rm", "data-drive"]).good();
}

#[test]
fn every_shell_has_a_script() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = Cli::new(&["completions", shell]).good();
        assert!(script.contains("BIVOUAC_COMPLETE") && script.contains("bivouac"), "{shell}");
    }
    let mut check = Command::new("bash").arg("-n").stdin(Stdio::piped()).spawn().unwrap();
    let script = Cli::new(&["completions", "bash"]).good();
    check.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
    assert!(check.wait().unwrap().success());
    assert_eq!(Cli::new(&["completions", "tcsh"]).run().status.code(), Some(2));
}

/// The schema of a verb, from the documentation.
fn schema(verb: &str) -> Value {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schemas");
    let text = fs::read_to_string(folder.join(format!("{verb}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Verbs whose output was held against its schema.
static HELD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

#[track_caller]
fn fits(verb: &str, value: &Value) {
    HELD.lock().unwrap().insert(verb.to_owned());
    let breaches = schema_breaches(&schema(verb), value);
    assert!(breaches.is_empty(), "{verb}: {breaches:#?}\n{value:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_verbs_print_is_what_is_documented() {
    let server = server().await;
    let run = |args: &[&str]| {
        let all: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        cli(&server, "schemas/test", &all)
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file").display().to_string();
    fs::write(&file, "content").unwrap();
    let lines = |verb: &str, text: &str| {
        assert!(text.lines().count() > 1, "{verb}: {text}");
        text.lines().for_each(|line| fits(verb, &serde_json::from_str(line).unwrap()));
    };
    // Everything that an answer may hold is in one of them: an end with a reason, a port, a label.
    fits("create", &run(&["create", "one", "--tag", "a=b", "-p", "3000"]).json());
    fits("create", &run(&["create", "two", "--ephemeral"]).json());
    lines("exec", &run(&["exec", "one", "--", "sh", "-c", "echo out; echo err >&2"]).good());
    let late = run(&["exec", "one", "--timeout", "200ms", "--", "sleep", "86100"]).run();
    lines("exec", &String::from_utf8(late.stdout).unwrap());
    let started = run(&["exec", "-d", "one", "--", "sleep", "86100"]).json();
    fits("exec-detach", &started);
    let id = started["command"]["id"].as_str().unwrap();
    fits("ps", &run(&["ps", "one"]).json());
    fits("top", &run(&["top"]).json());
    fits("kill", &run(&["kill", "one", id, "-s", "KILL"]).json());
    let waited = run(&["wait", "one", id]).run();
    fits("wait", &serde_json::from_slice(&waited.stdout).unwrap());
    fits("ps", &run(&["ps", "one"]).json());
    lines("run", &run(&["run", "--", "echo", "hello"]).good());
    let _ = run(&["exec", "one", "--", "echo", "hello"]).good();
    lines("logs", &run(&["logs", "one"]).good());
    fits("cp", &run(&["cp", &file, "one:"]).json());
    fits("inspect", &run(&["inspect", "one"]).json());
    fits("ls", &run(&["ls"]).json());
    fits("ls", &run(&["ls", "-A"]).json());
    fits("ls", &run(&["ls", "--usage"]).json());
    fits("resize", &run(&["resize", "one", "--disk", "1G"]).json());
    fits("ls", &run(&["ls"]).json());
    fits("snapshot", &run(&["snapshot", "one", "--expires", "1d"]).json());
    fits("start", &run(&["start", "one"]).json());
    fits("stop", &run(&["stop", "one", "two"]).json());
    fits("fork", &run(&["fork", "one", "copy"]).json());
    let kept = run(&["snapshots", "ls", "one"]).json();
    fits("snapshots-ls", &kept);
    fits("inspect", &run(&["inspect", "one"]).json());
    fits("rm", &run(&["rm", "-f", "one", "two", "copy", "not-there"]).json());
    let ids: Vec<&str> =
        kept.as_array().unwrap().iter().map(|s| s["id"].as_str().unwrap()).collect();
    assert!(!ids.is_empty(), "positive control");
    let removing: Vec<&str> = ["snapshots", "rm"].iter().copied().chain(ids).collect();
    fits("snapshots-rm", &run(&removing).json());
    // Those that need no engine.
    fits("version", &run(&["version"]).json());
    fits("env", &run(&["env"]).json());
    fits("completions", &run(&["completions", "bash"]).json());
    let doctor = run(&["doctor"]).run();
    fits("doctor", &serde_json::from_slice(&doctor.stdout).unwrap());
    let images = folder.path().join("images").display().to_string();
    fits("image-ls", &run(&["image", "ls", "--images", &images]).json());
    fits("image-ls", &run(&["image", "ls"]).json());
    fits("image-prune", &run(&["image", "prune", "--dry-run", "--images", &images]).json());
    what_states_and_drives_print(&server, folder.path());
    what_policies_and_secrets_print(&server);
    what_boxes_print(&server, folder.path());
    what_tokens_and_keys_print(&server, folder.path());
    // Everything that is documented was held against what is printed, but for these.
    let elsewhere = [
        // Minutes of work, a registry or root's own folder of images: tests/it/{image,images}.rs look at them.
        "image-build",
        "image-import",
        "image-inspect",
        "image-pull",
        "image-rm",
        // Without an engine: tests/it/pool.rs.
        "pool-migrate",
        // Needs a network to learn about: tests/egress.
        "policy-learn",
        // Goes on until it is ended: tests/it/preview.
        "forward",
    ];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schemas");
    let documented = fs::read_dir(folder)
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".json").map(str::to_owned));
    let held = HELD.lock().unwrap().clone();
    let missing: Vec<String> = documented
        .filter(|verb| !held.contains(verb) && !elsewhere.contains(&verb.as_str()))
        .collect();
    assert!(missing.is_empty(), "nobody has looked at what these print: {missing:?}");
}

fn what_boxes_print(server: &TestServer, home: &Path) {
    let run = |args: &[&str]| {
        let all: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        cli(server, "schemas/boxes", &all).env("HOME", home).env("XDG_CONFIG_HOME", home)
    };
    let _ = run(&["create", "box", "-p", "3000"]).json();
    fits("set", &run(&["set", "box", "--idle-stop", "30m"]).json());
    fits("inspect", &run(&["inspect", "box"]).json());
    fits("keep-alive", &run(&["keep-alive", "box", "5m"]).json());
    fits("shell", &run(&["shell", "box", "--", "sleep", "86100"]).json());
    fits("terminals", &run(&["terminals", "box"]).json());
    fits("attach", &run(&["attach", "box", "main"]).json());
    fits("ps", &run(&["ps", "box"]).json());
    fits("hangup", &run(&["hangup", "box", "main"]).json());
    fits("pause", &run(&["pause", "box"]).json());
    fits("ls", &run(&["ls"]).json());
    fits("inspect", &run(&["inspect", "box"]).json());
    fits("resume", &run(&["resume", "box"]).json());
    fits("ports", &run(&["ports", "box"]).json());
    fits("ports-publish", &run(&["ports", "publish", "box", "3000"]).json());
    fits("ports-unpublish", &run(&["ports", "unpublish", "box", "3000"]).json());
    fits("ports-link", &run(&["ports", "link", "box", "3000"]).json());
    fits("ports-revoke", &run(&["ports", "revoke", "box"]).json());
    fits("open", &run(&["open", "box", "3000", "--print"]).json());
    fits("ssh", &run(&["ssh", "box"]).json());
    fits("ssh-config", &run(&["ssh-config"]).json());
}

fn what_tokens_and_keys_print(server: &TestServer, home: &Path) {
    let run = |args: &[&str]| {
        let all: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        cli(server, "schemas/access", &all).env("HOME", home).env("XDG_CONFIG_HOME", home)
    };
    fits("token-create", &run(&["token", "create", "schemas", "--allow", "read"]).json());
    fits("token-ls", &run(&["token", "ls"]).json());
    fits("token-whoami", &run(&["token", "whoami"]).json());
    let log = run(&["token", "log"]).good();
    assert!(!log.is_empty());
    log.lines().for_each(|line| fits("token-log", &serde_json::from_str(line).unwrap()));
    fits("token-revoke", &run(&["token", "revoke", "schemas"]).json());
    fits("ssh-key-add", &run(&["ssh-key", "add", "--name", "schemas"]).json());
    let keys = run(&["ssh-key", "ls"]).json();
    fits("ssh-key-ls", &keys);
    let key = keys[0]["fingerprint"].as_str().unwrap();
    fits("ssh-key-rm", &run(&["ssh-key", "rm", key]).json());
}

fn what_states_and_drives_print(server: &TestServer, folder: &Path) {
    let run = |args: &[&str]| {
        let all: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        cli(server, "schemas/states", &all)
    };
    let _ = run(&["create", "box"]).json();
    let taken = run(&["snapshot", "box", "--live", "--label", "a=b"]).json();
    fits("snapshot", &taken);
    let id = taken["snapshot"]["id"].as_str().unwrap();
    fits("snapshots-get", &run(&["snapshots", "get", id]).json());
    fits("snapshots-tree", &run(&["snapshots", "tree", id]).json());
    fits("snapshots-label", &run(&["snapshots", "label", id, "c=d"]).json());
    let file = folder.join("box.tar.zst").display().to_string();
    fits("snapshots-export", &run(&["snapshots", "export", id, &file]).json());
    let imported = run(&["snapshots", "import", &file]).json();
    fits("snapshots-import", &imported);
    fits("rollback", &run(&["rollback", "box", id]).json());
    fits("drive-create", &run(&["drive", "create", "d", "--size", "1G"]).json());
    let note = folder.join("note").display().to_string();
    fs::write(&note, "content").unwrap();
    fits("drive-cp", &run(&["drive", "cp", &note, "d:note"]).json());
    fits("drive-cat", &run(&["drive", "cat", "d:note"]).json());
    fits("drive-ls", &run(&["drive", "ls"]).json());
    fits("drive-ls", &run(&["drive", "ls", "d:"]).json());
    fits("drive-show", &run(&["drive", "show", "d"]).json());
    fits("drive-fork", &run(&["drive", "fork", "d", "e"]).json());
    fits("drive-attach", &run(&["drive", "attach", "box", "d:/d"]).json());
    fits("drive-detach", &run(&["drive", "detach", "box", "d"]).json());
    fits("rm", &run(&["rm", "--snapshots", "box"]).json());
    fits("drive-rm", &run(&["drive", "rm", "d", "e"]).json());
    for left in run(&["snapshots", "ls"]).json().as_array().unwrap() {
        let _ = run(&["snapshots", "rm", left["id"].as_str().unwrap()]).run();
    }
    fits("gc", &run(&["gc", "--dry-run"]).json());
    fits("pool-show", &run(&["pool", "show"]).env("BIVOUAC_DATA_DIR", &server.data).json());
}

fn what_policies_and_secrets_print(server: &TestServer) {
    let run = |args: &[&str]| {
        let all: Vec<&str> = ["--json"].iter().chain(args).copied().collect();
        cli(server, "schemas/egress", &all)
    };
    fits("secret-set", &run(&["secret", "set", "GITHUB_TOKEN"]).stdin("x").json());
    fits("secret-ls", &run(&["secret", "ls"]).json());
    let _ = run(&["create", "box", "--ephemeral", "--network-policy", "deny-all"]).json();
    fits("credential-add", &run(&["credential", "add", "box", "github"]).json());
    fits("credential-ls", &run(&["credential", "ls", "box"]).json());
    fits("credential-rm", &run(&["credential", "rm", "box", "github"]).json());
    fits("policy-show", &run(&["policy", "show", "box"]).json());
    fits("policy-allow", &run(&["policy", "allow", "box", "example.com"]).json());
    fits("policy-deny", &run(&["policy", "deny", "box", "192.0.2.0/24"]).json());
    fits("policy-explain", &run(&["policy", "explain", "box", "https://example.org/"]).json());
    fits("policy-set", &run(&["policy", "set", "box", "deny-all"]).json());
    let _ = run(&["exec", "box", "--", "getent", "hosts", "example.org"]).run();
    let log = run(&["policy", "log", "box"]).good();
    assert!(!log.is_empty(), "positive control");
    log.lines().for_each(|line| fits("policy-log", &serde_json::from_str(line).unwrap()));
    let _ = run(&["rm", "box"]).json();
    fits("secret-rm", &run(&["secret", "rm", "GITHUB_TOKEN"]).json());
}

/// Waits until a child has said `word` on standard output.
fn heard(child: &mut std::process::Child, word: &str) {
    let mut text = String::new();
    let stdout = child.stdout.as_mut().unwrap();
    while !text.contains(word) {
        let mut byte = [0];
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "the output ended: {text}");
        text.push(char::from(byte[0]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_killed_leaves_its_sandbox_for_seconds_only() {
    let server = server().await;
    let listed = || cli(&server, "cli/killed", &["--json", "ls"]).json();
    let args = ["run", "--", "sh", "-c", "echo ready; sleep 86100"];
    let mut child = cli(&server, "cli/killed", &args).spawn().unwrap();
    heard(&mut child, "ready");
    assert_eq!(listed().as_array().unwrap().len(), 1, "positive control");
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap();
    eventually("the sandbox to go", SHORT, async || {
        let left = listed();
        if left == serde_json::json!([]) { Ok(()) } else { Err(left) }
    })
    .await;
}

/// An engine that `run` started; it ends with this.
struct Started {
    pid: Pid,
    data: PathBuf,
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = kill_process(self.pid, Signal::TERM);
        let begun = std::time::Instant::now();
        while self.data.join("engine.json").exists() || alive(self.pid) {
            if begun.elapsed() > LONG {
                let _ = kill_process(self.pid, Signal::KILL);
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

fn alive(pid: Pid) -> bool {
    Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists()
}

/// Files that a process holds open.
fn open_files(pid: i32) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries.filter_map(|entry| fs::read_link(entry.path()).ok()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_run_starts_holds_nothing_of_its_caller() {
    let _lock = shared().unwrap();
    let folder = tempfile::Builder::new().prefix("bivouac-test-fds-").tempdir().unwrap();
    let (data, secret) = (folder.path().join("data"), folder.path().join("the-caller-s"));
    // Open in the shell, and so in the run that it starts.
    let line =
        "exec 7>\"$1\"; exec 9<\"$1\"; \"$2\" run -- sh -c 'echo started'; ls -l /proc/self/fd >&2";
    let output = Command::new("sh")
        .args(["-c", line, "sh"])
        .arg(&secret)
        .arg(binary().unwrap())
        .env("BIVOUAC_DATA_DIR", &data)
        .env_remove("BIVOUAC_URL")
        .env_remove("BIVOUAC_TOKEN")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let engine: Value =
        serde_json::from_slice(&fs::read(data.join("engine.json")).unwrap()).unwrap();
    let number = i32::try_from(engine["pid"].as_i64().unwrap()).unwrap();
    let _started = Started { pid: Pid::from_raw(number).unwrap(), data: data.clone() };
    assert_eq!(output.stdout, b"started\n", "{output:?}");
    assert!(said(&output).contains("the-caller-s"), "positive control: {}", said(&output));
    let mut family = vec![number];
    // The zygotes outlive the engine.
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split(' ').nth(2));
        if parent == Some(&number.to_string()) {
            family.push(pid);
        }
    }
    assert!(family.len() >= 3, "the engine and its zygotes: {family:?}");
    for pid in family {
        let open = open_files(pid);
        assert!(!open.is_empty(), "positive control");
        assert!(!open.contains(&secret), "process {pid} holds {open:?}");
    }
}
