//! Files: write, read, make folders, as a well-meaning client does it.

use std::io::Write as _;

use bivouac_testkit::{LONG, Tar, TestSandbox};
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::StreamExt as _;
use reqwest::Method;
use serde_json::json;

use crate::sandbox;

/// Writes one file and asserts that it worked.
async fn put(sandbox: &TestSandbox, path: &str, data: &[u8]) {
    let _ =
        sandbox.write("/", Tar::new().file(path.trim_start_matches('/'), data).gzip()).await.ok();
}

#[tokio::test]
async fn what_is_written_is_read_back() {
    let (_server, sandbox) = sandbox("round-trip").await;
    let long = format!("vercel/sandbox/{}/{}", "d".repeat(90), "f".repeat(120));
    let deepest = format!("vercel/sandbox/{}end", "x/".repeat(60));
    let binary: Vec<u8> =
        (0..20_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 23) as u8).collect();
    let files: Vec<(&str, &[u8])> = vec![
        ("vercel/sandbox/hello.txt", b"hello"),
        ("vercel/sandbox/empty", b""),
        ("vercel/sandbox/a/b/c/deep.txt", b"deep"),
        ("vercel/sandbox/with space/f 1", b"space"),
        ("vercel/sandbox/n\u{e9}/漢😀.txt", "inhalt é".as_bytes()),
        ("etc/x.conf", b"absolute"),
        ("tmp/t", b"tmp"),
        (&long, b"long"),
        (&deepest, b"deepest"),
        ("vercel/sandbox/binary", &binary),
    ];
    let tar = files.iter().fold(Tar::new(), |tar, (name, data)| tar.file(name, data));
    let answer = sandbox.write("/", tar.gzip()).await;
    assert_eq!(answer.ok(), json!({}));
    for (name, data) in &files {
        let read = sandbox.read(&format!("/{name}")).await;
        assert_eq!(read.status, 200, "{name}: {read}");
        assert_eq!(read.headers["content-type"], "application/octet-stream");
        assert!(read.bytes == *data, "{name} differs");
    }
    // Relative paths count from the working folder, or from the caller's.
    assert_eq!(sandbox.read("hello.txt").await.bytes, b"hello");
    let read = sandbox.post("/fs/read", &json!({ "path": "t", "cwd": "/tmp" })).await;
    assert_eq!(read.bytes, b"tmp");
    let read = sandbox.post("/fs/read", &json!({ "path": "../t", "cwd": "/tmp/x/.." })).await;
    assert_eq!(read.status, 404, "{read}");
}

#[tokio::test]
async fn owner_mode_and_parents() {
    let (_server, sandbox) = sandbox("owner").await;
    let tar = Tar::new()
        .file_mode("new/folders/here/run.sh", 0o755, b"#!/bin/sh\necho ran\n")
        .file_mode("new/private", 0o600, b"x")
        .folder("made")
        .file_mode("setuid", 0o4755, b"x");
    let _ = sandbox.write("/vercel/sandbox", tar.gzip()).await.ok();
    let stat = async |path: &str| sandbox.run(&["stat", "-c", "%U:%G %a", path]).await.good();
    assert_eq!(stat("new/folders/here/run.sh").await, "vercel-sandbox:vercel-sandbox 755");
    assert_eq!(stat("new/private").await, "vercel-sandbox:vercel-sandbox 600");
    for folder in ["new", "new/folders", "new/folders/here", "made"] {
        let seen = stat(folder).await;
        assert!(seen.starts_with("vercel-sandbox:vercel-sandbox 7"), "{folder}: {seen}");
    }
    assert_eq!(sandbox.run(&["new/folders/here/run.sh"]).await.good(), "ran");
    let setuid = stat("setuid").await;
    assert!(setuid.starts_with("vercel-sandbox:vercel-sandbox"), "{setuid}");
    // Outside of the working folder too, where the parent is root's.
    put(&sandbox, "/etc/deep/er/x.conf", b"x").await;
    assert!(stat("/etc/deep/er/x.conf").await.starts_with("vercel-sandbox:"));
    assert_eq!(stat("/etc").await, "root:root 755", "folders that were there keep their owner");
}

#[tokio::test]
async fn overwriting_replaces() {
    let (_server, sandbox) = sandbox("overwrite").await;
    put(&sandbox, "/vercel/sandbox/f", &[b'a'; 100_000]).await;
    put(&sandbox, "/vercel/sandbox/f", b"short").await;
    assert_eq!(sandbox.read("f").await.bytes, b"short");
    // A running program keeps what it has mapped: replacing is not "text file busy".
    let _ = sandbox.sh("cp /bin/sleep mine && ./mine 86020 & sleep 0.3").await;
    put(&sandbox, "/vercel/sandbox/mine", b"#!/bin/sh\n").await;
    assert_eq!(sandbox.read("mine").await.bytes, b"#!/bin/sh\n");
    // A folder is not silently replaced by a file.
    let _ = sandbox.sh("mkdir folder && touch folder/inside").await.good();
    sandbox.write("/vercel/sandbox", Tar::new().file("folder", b"x").gzip()).await.refused(400, "");
    assert_eq!(sandbox.sh("ls folder").await.good(), "inside");
    // A read-only file of the user is replaced as well: the API is not the user.
    let _ = sandbox.sh("echo old > ro && chmod 400 ro").await.good();
    put(&sandbox, "/vercel/sandbox/ro", b"new").await;
    assert_eq!(sandbox.read("ro").await.bytes, b"new");
}

#[tokio::test]
async fn reads_that_cannot_work() {
    let (_server, sandbox) = sandbox("unreadable").await;
    let _ = sandbox.sh("mkdir d; mkfifo p; ln -s loop loop; ln -s /nope dangling").await.good();
    sandbox.read("missing").await.refused(404, "not_found");
    sandbox.read("missing/deeper").await.refused(404, "not_found");
    sandbox.read("dangling").await.refused(404, "not_found");
    sandbox.read("d").await.refused(400, "");
    sandbox.read("p").await.refused(400, "");
    sandbox.read("loop").await.refused(400, "");
    sandbox.read("/dev/zero").await.refused(400, "");
    sandbox.read("").await.refused(400, "");
    sandbox.read("a\0b").await.refused(400, "");
    sandbox.post("/fs/read", &json!({})).await.refused(400, "");
    sandbox.post("/fs/read", &json!({ "path": "x", "cwd": 5 })).await.refused(400, "");
    sandbox.read(&"x/".repeat(5000)).await.refused(400, "");
    let name = "y".repeat(300);
    assert!((400..500).contains(&sandbox.read(&name).await.status));
    // What the user may not read, the API may: files belong to the sandbox.
    let _ = sandbox.sudo("echo secret > /root/s; chmod 600 /root/s").await.good();
    assert_eq!(sandbox.read("/root/s").await.bytes, b"secret\n");
}

#[tokio::test]
async fn folders_are_made_one_level_at_a_time() {
    let (_server, sandbox) = sandbox("mkdir").await;
    let mkdir = async |body: serde_json::Value| sandbox.post("/fs/mkdir", &body).await;
    assert_eq!(mkdir(json!({ "path": "a" })).await.ok(), json!({}));
    mkdir(json!({ "path": "a" })).await.refused(400, "bad_request");
    mkdir(json!({ "path": "x/y" })).await.refused(400, "bad_request");
    let _ = mkdir(json!({ "path": "x/y", "recursive": true })).await.ok();
    let _ = mkdir(json!({ "path": "x/y", "recursive": true })).await.ok();
    let _ = mkdir(json!({ "path": "z", "cwd": "/tmp" })).await.ok();
    let _ = mkdir(json!({ "path": "/opt/tool/bin", "recursive": true })).await.ok();
    let owners =
        sandbox.run(&["stat", "-c", "%U", "a", "x", "x/y", "/tmp/z", "/opt/tool/bin"]).await;
    assert_eq!(owners.good(), ["vercel-sandbox"; 5].join("\n"));
    let _ = sandbox.sh("touch f").await.good();
    mkdir(json!({ "path": "f" })).await.refused(400, "bad_request");
    mkdir(json!({ "path": "f/g", "recursive": true })).await.refused(400, "bad_request");
    mkdir(json!({ "path": "" })).await.refused(400, "");
    mkdir(json!({})).await.refused(400, "");
}

#[tokio::test]
async fn links_inside_are_followed_as_on_linux() {
    let (_server, sandbox) = sandbox("links").await;
    let _ = sandbox
        .sh("mkdir real; echo target > real/f; ln -s real link; ln -s real/f to-f")
        .await
        .good();
    assert_eq!(sandbox.read("link/f").await.bytes, b"target\n");
    assert_eq!(sandbox.read("to-f").await.bytes, b"target\n");
    put(&sandbox, "/vercel/sandbox/link/g", b"through").await;
    assert_eq!(sandbox.read("real/g").await.bytes, b"through");
    assert_eq!(sandbox.sh("readlink link").await.good(), "real", "the link itself is kept");
}

#[tokio::test]
async fn a_gigabyte_streams_through() {
    const SIZE: usize = 1 << 30;
    const BLOCK: usize = 1 << 20;
    let (server, sandbox) = sandbox("gigabyte").await;
    let before = server.memory_kb("VmHWM").unwrap();
    let block: Vec<u8> =
        (0..BLOCK as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let sent = block.clone();
    // Stored, not deflated: the body on the wire is as large as the file.
    let (mut reader, writer) = std::io::pipe().unwrap();
    let source = std::thread::spawn(move || {
        let mut gzip = GzEncoder::new(writer, Compression::none());
        let mut entry = bivouac_testkit::Entry::new("big", b'0');
        entry.size = SIZE as u64;
        let head = Tar::new().raw(&entry, b"").bytes();
        gzip.write_all(&head[..512]).unwrap();
        for _ in 0..SIZE / BLOCK {
            gzip.write_all(&sent).unwrap();
        }
        gzip.write_all(&[0; 1024]).unwrap();
        gzip.finish().unwrap();
    });
    let (send, receive) = tokio::sync::mpsc::channel::<std::io::Result<Vec<u8>>>(4);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 18];
        while let Ok(n) = std::io::Read::read(&mut reader, &mut buffer) {
            if n == 0 || send.blocking_send(Ok(buffer[..n].to_vec())).is_err() {
                break;
            }
        }
    });
    let body = futures_util::stream::unfold(receive, async |mut r| r.recv().await.map(|v| (v, r)));
    let answer = sandbox.write("/vercel/sandbox", reqwest::Body::wrap_stream(body)).await;
    assert_eq!(answer.ok(), json!({}));
    source.join().unwrap();
    let path = sandbox.path("/fs/read");
    let request = sandbox.client.request(Method::POST, &path).json(&json!({ "path": "big" }));
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200);
    let (mut seen, mut stream) = (0usize, response.bytes_stream());
    while let Some(chunk) = tokio::time::timeout(LONG, stream.next()).await.unwrap() {
        let mut rest = &chunk.unwrap()[..];
        while !rest.is_empty() {
            let at = seen % BLOCK;
            let n = rest.len().min(BLOCK - at);
            assert!(rest[..n] == block[at..at + n], "differs after {seen} bytes");
            (seen, rest) = (seen + n, &rest[n..]);
        }
    }
    assert_eq!(seen, SIZE);
    let peak = server.memory_kb("VmHWM").unwrap();
    assert!(peak < before.max(100_000) + 150_000, "the engine grew from {before} to {peak} kB");
}
