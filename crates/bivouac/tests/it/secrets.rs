//! Secrets from the outside: the command line, and what lies on disk, in logs and in process lists.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use bivouac_testkit::{Cli, TestServer, shared};

const CANARY: &str = "canary-91c4-hunter2";
const CONTROL: &str = "control-91c4-visible";

/// The files below a folder that hold a text.
pub(crate) fn holding(folder: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            // The pool's files are looked at where it is mounted; images hold nothing of ours.
            let skipped = path.ends_with("pool.btrfs") || path.ends_with("mounts");
            if skipped || kind.is_symlink() || kind.is_socket() || kind.is_fifo() {
                continue;
            }
            if kind.is_dir() {
                open.push(path);
            } else if kind.is_file() && holds(&path, text).unwrap_or(false) {
                found.push(path.display().to_string());
            }
        }
    }
    found
}

fn holds(path: &Path, text: &str) -> io::Result<bool> {
    Ok(std::fs::read(path)?.windows(text.len()).any(|window| window == text.as_bytes()))
}

/// Whether any process of the host has a text in its arguments or its environment.
fn in_processes(text: &str) -> bool {
    let pids = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let own = format!("/proc/{}", std::process::id());
    pids.filter(|path| path != Path::new(&own)).any(|path| {
        ["cmdline", "environ"].iter().any(|file| holds(&path.join(file), text).unwrap_or(false))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_nowhere_in_clear_text() {
    let _lock = shared().unwrap();
    let server = TestServer::builder().embedded_database().start().await.unwrap();
    let cli = |args: &[&str]| server.cli(args);
    let text = |output: std::process::Output| {
        format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    };
    // Refused where everybody could read it, and taken from standard input and from a file.
    let refused = cli(&["secret", "set", "GITHUB_TOKEN", "not-so-secret"]).run();
    assert_eq!(refused.status.code(), Some(2));
    let set = cli(&["secret", "set", "GITHUB_TOKEN"]).stdin(format!("{CANARY}\n")).run();
    assert!(set.status.success());
    assert!(!text(set).contains(CANARY));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("key");
    std::fs::write(&file, CANARY).unwrap();
    let path = file.to_str().unwrap();
    let _ = cli(&["secret", "set", "API", "--file", path, "--json"]).json();
    std::fs::remove_file(&file).unwrap();

    let api = "bearer=API,host=api.example.com,env=API_KEY,expires=1h";
    let tag = format!("control={CONTROL}");
    let create = ["create", "box", "--credential", "github,repos=a/b", "--credential", api];
    let _ = cli(&[&create[..], &["--tag", &tag, "-e", "PASSWORD"]].concat())
        .env("PASSWORD", CANARY)
        .good();
    let listed = cli(&["credential", "ls", "box", "--json"]).json();
    assert_eq!(listed[0]["secrets"][0], "API");
    assert_eq!(listed[1]["name"], "github");
    let dummy = cli(&["exec", "box", "--", "sh", "-c", "echo $API_KEY $GH_TOKEN"]).good();
    assert_eq!(dummy.matches("bivouac-placeholder-").count(), 2, "{dummy}");
    // The variable that the user put there is the user's; no other place of the sandbox has it.
    let inside =
        "env | grep -v ^PASSWORD= | grep -c hunter2; cat /proc/1/environ | grep -c hunter2";
    assert_eq!(cli(&["exec", "box", "--", "sh", "-c", inside]).run().stdout, b"0\n0\n");
    for args in [&["inspect", "box"][..], &["policy", "show", "box"], &["secret", "ls"], &["ls"]] {
        for json in [&[][..], &["--json"]] {
            let shown = text(cli(&[args, json].concat()).run());
            assert!(!shown.contains("hunter2") || args == ["inspect", "box"], "{args:?}: {shown}");
        }
    }

    assert!(!holding(&server.data, CONTROL).is_empty(), "the search finds nothing");
    assert_eq!(holding(&server.data, CANARY), Vec::<String>::new());
    assert!(!holds(&server.log, CANARY).unwrap());
    assert!(holds(&server.log, "engine starts").unwrap(), "the search finds nothing");
    assert!(!in_processes(CANARY));
    let _ = cli(&["stop", "box"]).good();
    assert_eq!(holding(&server.data, CANARY), Vec::<String>::new(), "a snapshot has it");

    let removed = cli(&["credential", "rm", "box", "bearer", "--json"]).json();
    assert_eq!(removed[0]["credential"]["name"], "bearer");
    assert_eq!(cli(&["secret", "rm", "API", "--json"]).json()[0]["name"], "API");
    let gone = cli(&["secret", "rm", "API"]).run();
    assert!(!gone.status.success());
    assert!(text(gone).contains("There is no secret 'API'"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_key_is_told_and_never_made_anew() {
    let _lock = shared().unwrap();
    let mut server = TestServer::builder().embedded_database().start().await.unwrap();
    let set = |server: &TestServer, text: &str| {
        server.cli(&["secret", "set", "S", "--json"]).stdin(text.to_owned()).json()["version"]
            .clone()
    };
    assert_eq!(set(&server, "one"), 1);
    server.restart().await.unwrap();
    assert_eq!(set(&server, "two"), 2);
    server.stop().await.unwrap();

    let key = server.data.join("vault.key");
    let away = server.data.join("kept.key");
    std::fs::rename(&key, &away).unwrap();
    let start = |more: &[&str]| {
        let args = [&["serve", "--listen", "127.0.0.1:0"], more].concat();
        let output = Cli::new(&args).env("BIVOUAC_DATA_DIR", &server.data).run();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = start(&[]);
    assert!(said.contains("vault.key") && said.contains("--vault-key"), "{said}");
    assert!(!key.exists(), "a new key would lock the secrets away");
    let other = server.data.join("other.key");
    std::fs::write(&other, [7; 32]).unwrap();
    let said = start(&["--vault-key", other.to_str().unwrap()]);
    assert!(said.contains("chmod 600"), "{said}");
    std::fs::rename(&away, &key).unwrap();
    server.restart().await.unwrap();
    assert_eq!(set(&server, "three"), 3);
}
