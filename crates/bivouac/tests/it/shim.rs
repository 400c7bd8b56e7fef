//! The process on the host's side of a session: what it has given up, and what it puts inside.

use std::fs;
use std::path::{Path, PathBuf};

use bivouac_testkit::TestSandbox;
use rustix::process::Pid;
use serde_json::json;

use crate::crash::shims;
use crate::{sandbox, server};

const BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
const ANCHORS: [&str; 2] = [
    "/etc/pki/ca-trust/source/anchors/vercel-proxy-ca.pem",
    "/usr/local/share/ca-certificates/vercel-proxy-ca.pem",
];

/// The words of a line of /proc/PID/status.
fn status(pid: Pid, key: &str) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{key}:")));
    line.unwrap_or_else(|| panic!("no {key}")).split_whitespace().map(str::to_owned).collect()
}

const CAPABILITIES: [&str; 5] = ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"];

#[tokio::test]
async fn a_shim_has_given_up_what_it_does_not_need() {
    let (server, sandbox) = sandbox("given-up").await;
    let found = shims(&sandbox.session);
    assert_eq!(found.len(), 1);
    let pid = found[0];
    for key in CAPABILITIES {
        assert_eq!(status(pid, key), ["0000000000000000"], "{key}");
    }
    // Positive control: the process that it is forked from has them.
    let parent = status(pid, "PPid")[0].parse().ok().and_then(Pid::from_raw).unwrap();
    assert_ne!(status(parent, "CapEff"), ["0000000000000000"]);
    assert_eq!(status(pid, "NoNewPrivs"), ["1"]);
    assert_eq!(status(pid, "Seccomp"), ["2"]);
    assert!(status(pid, "Groups").is_empty());
    for key in ["Uid", "Gid"] {
        let ids = status(pid, key);
        assert!(ids.iter().all(|id| *id == ids[0] && id.parse::<u32>().unwrap() > 1 << 29));
    }
    let proc = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    let limits = fs::read_to_string(proc.join("limits")).unwrap();
    let limit = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().to_owned()
    };
    assert_eq!(limit("Max core file size"), "0");
    assert_eq!(limit("Max data size"), (512 << 20).to_string());
    // It is where the host's connections are made, and holds no other door of the host's.
    let net = |of: &Path| fs::read_link(of.join("ns/net")).unwrap();
    assert_eq!(net(&proc), net(&PathBuf::from(format!("/proc/{}", server.pid()))));
    for entry in fs::read_dir(proc.join("fd")).unwrap().flatten() {
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        let name = link.to_string_lossy().into_owned();
        let known = ["socket:", "anon_inode:", "/dev/null", "/sys/fs/cgroup/"];
        let own = [server.data.join("shims.log"), server.data.join("roots.pem")];
        assert!(
            known.iter().any(|start| name.starts_with(start))
                || own.contains(&link)
                || name.ends_with(&sandbox.session),
            "{name}"
        );
    }
}

/// The certificate of the session, as the sandbox has it.
async fn authority(sandbox: &TestSandbox) -> String {
    let [first, second] = ANCHORS;
    let text = sandbox.run(&["cat", first]).await.good();
    assert!(text.contains("-----BEGIN CERTIFICATE-----"), "{text}");
    assert_eq!(sandbox.run(&["cat", second]).await.good(), text);
    text
}

/// Files below a folder that hold a text.
fn holders(folder: &Path, text: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            holders(&entry.path(), text, found);
        } else if kind.is_file()
            && String::from_utf8_lossy(&fs::read(entry.path()).unwrap()).contains(text)
        {
            found.push(entry.path());
        }
    }
}

#[tokio::test]
async fn the_certificate_authority_is_inside_and_in_no_snapshot() {
    let server = server().await;
    let client = server.team("authority");
    let mut sandbox = TestSandbox::create(&client, json!({ "name": "authority" })).await;
    let first = authority(&sandbox).await;
    let bundle = sandbox.run(&["cat", BUNDLE]).await.good();
    assert!(bundle.ends_with(first.trim_end()) && bundle.len() > 10 * first.len());
    for path in ANCHORS.iter().chain([&BUNDLE]) {
        let line = format!("echo x >> {path}");
        assert_ne!(sandbox.sh(&line).await.exit, Some(0), "{path} is not the user's");
    }
    // What changes attributes and names of files around it takes nothing of it along.
    let touched = "touch -c /usr/local/share/ca-certificates/* && chmod 755 /usr/local/share \
                   && echo planted > /usr/local/share/planted";
    let _ = sandbox.sudo(touched).await.good();
    let _ = sandbox.stop().await.ok();
    let mut found = Vec::new();
    let snapshots = server.data.join("pool/snapshots");
    let body = first.lines().find(|line| line.len() == 64).unwrap();
    holders(&snapshots, body, &mut found);
    assert_eq!(found, Vec::<PathBuf>::new(), "no snapshot holds the authority");
    holders(&snapshots, "planted", &mut found);
    assert_ne!(found, Vec::<PathBuf>::new(), "positive control: what was written is found");
    assert!(sandbox.resume().await);
    let second = authority(&sandbox).await;
    assert_ne!(first, second, "each session has its own");
    let bundle = sandbox.run(&["cat", BUNDLE]).await.good();
    assert!(bundle.contains(second.trim_end()) && !bundle.contains(body));
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn a_bundle_that_root_made_is_kept_and_completed() {
    let server = server().await;
    let client = server.team("bundle");
    let mut sandbox = TestSandbox::create(&client, json!({ "name": "bundle" })).await;
    // As update-ca-certificates does: beside, then renamed into place.
    let line = format!("echo '# mine' > {BUNDLE}.new && mv -f {BUNDLE}.new {BUNDLE}");
    let _ = sandbox.sudo(&line).await.good();
    assert_eq!(sandbox.run(&["cat", BUNDLE]).await.good().trim_end(), "# mine");
    for _ in 0..2 {
        let _ = sandbox.stop().await.ok();
        assert!(sandbox.resume().await);
        let bundle = sandbox.run(&["cat", BUNDLE]).await.good();
        assert!(bundle.starts_with("# mine\n"), "{bundle}");
        assert!(bundle.ends_with(authority(&sandbox).await.trim_end()), "{bundle}");
        // The rename works in every session.
        let _ = sandbox.sudo(&format!("cp {BUNDLE} /tmp/b && mv -f /tmp/b {BUNDLE}")).await.good();
    }
    let _ = sandbox.delete().await.ok();
}
