//! The bench through its front door: that each row can be measured and nothing is left of it, and that
//! an absent peer is told. Figures are not looked at: other tests run beside it.

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bivouac-bench"));
    command
        .args(["--smoke", "--image", "host"])
        .args(args)
        .env("BIVOUAC_BIN", bivouac_testkit::binary().expect("the executable"))
        .env("BIVOUAC_IMAGES", folder.join("images"))
        .env("TMPDIR", folder);
    command
}

fn said(output: &Output) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    format!("{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr))
}

#[test]
fn every_row_can_be_measured_and_nothing_is_left() {
    let _lock = bivouac_testkit::shared().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("record.json");
    let output = bench(folder.path(), &["--json", record.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let record: Value = serde_json::from_slice(&std::fs::read(&record).unwrap()).unwrap();
    let rows = record["rows"].as_array().unwrap();
    let groups: BTreeSet<&str> = rows.iter().filter_map(|row| row["group"].as_str()).collect();
    let wanted = [
        "api",
        "burst",
        "egress",
        "launch",
        "live",
        "peers",
        "preview",
        "state",
        "sustained",
        "work",
    ];
    assert_eq!(groups, BTreeSet::from(wanted), "{}", said(&output));
    for row in rows {
        assert!(row["median"].is_f64() && row["n"].as_u64() > Some(0), "not measured: {row}");
        let verdicts = row["targets"].as_array().unwrap().iter();
        assert!(verdicts.clone().all(|t| t["met"].is_null()), "judged on so little: {row}");
    }
    for peer in ["posix_spawn", "bwrap", "crun", "podman"] {
        let is = |row: &Value| row["name"].as_str().is_some_and(|name| name.starts_with(peer));
        assert!(rows.iter().any(is), "no row of {peer}: {}", said(&output));
    }
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name != "images" && name != "record.json")
        .collect();
    assert!(left.is_empty(), "{left:?} is left: {}", said(&output));
}

#[test]
fn an_absent_peer_is_told_and_fails_the_run() {
    let _lock = bivouac_testkit::shared().unwrap();
    let folder = tempfile::tempdir().unwrap();
    // All programs but one.
    let path = folder.path().join("bin");
    std::fs::create_dir(&path).unwrap();
    for from in ["/usr/sbin", "/usr/bin", "/sbin", "/bin"] {
        for entry in std::fs::read_dir(from).into_iter().flatten().flatten() {
            if entry.file_name() != "crun" {
                let _ = symlink(entry.path(), path.join(entry.file_name()));
            }
        }
    }
    let output = bench(folder.path(), &["--only", "launch"]).env("PATH", &path).output().unwrap();
    assert!(!output.status.success(), "{}", said(&output));
    let text = said(&output);
    assert!(text.contains("the peer `crun` is not installed"), "{text}");
    assert!(text.contains("apt-get install crun"), "{text}");
}
