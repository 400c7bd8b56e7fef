//! Snapshots as files: there and back, hostile ones, interrupted ones.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use bivouac_testkit::{Answer, Client, LONG, TestSandbox, TestServer, eventually, shared};
use reqwest::{Body, Method};
use serde_json::json;

use crate::{Shared, server};

/// Makes a file of every kind, and changes what the image has in every way.
const CHANGE: &str = r#"
import os, struct, socket
os.chdir('/etc')
os.rename('alternatives', 'renamed')             # a folder of the image
os.unlink('renamed/' + sorted(os.listdir('renamed'))[0])
open('renamed/new', 'w').write('new in a renamed folder')
os.chmod('login.defs', 0o640)                    # its mode alone
os.chown('magic', 1000, 33)                      # its owner alone
os.link('magic', 'magic-too')
os.unlink('shells')
for name in os.listdir('skel'): os.unlink('skel/' + name)
os.rmdir('skel'); os.mkdir('skel'); open('skel/.bashrc', 'w').write('mine')
os.rename('/usr/share/misc', '/usr/share/other') # in the second layer
os.chmod('/usr/share/common-licenses', 0o700)
os.makedirs('/opt/odd'); os.chdir('/opt/odd')
open('one', 'w').write('two names'); os.link('one', 'two'); os.link('one', '/opt/three')
open('attributes', 'w').write('x'); os.setxattr('attributes', 'user.note', b'line\nfeed')
os.setxattr('.', 'user.folder', b'\0\xff')
open('tool', 'w').write('capable')
os.setxattr('tool', 'security.capability', struct.pack('<IIIII', 0x02000001, 0xa, 0, 0, 0))
open('set-id', 'w'); os.chmod('set-id', 0o6755)
with open('sparse', 'wb') as f: f.truncate(64 << 20); f.seek(32 << 20); f.write(b'in the middle')
open(b'bytes-\xff\xfe\n', 'w').write('not UTF-8')
os.mkfifo('pipe'); socket.socket(socket.AF_UNIX).bind('socket')
os.symlink('/etc/../../outside', 'link')
open('.wh.name', 'w').write('a name like others')
os.makedirs('deep/' * 60); open('deep/' * 60 + 'file', 'w').write('far down')
open('empty', 'w'); os.utime('empty', ns=(0, -1500000001))
os.chown('empty', 65534, 65533)
os.chmod('.', 0o1777)
"#;

/// Says all of these trees, one line for each file. What belongs to the session is left out.
const LOOK: &str = r#"
import os, stat, hashlib
seen = {}
def say(path):
    s = os.lstat(path); kind = stat.S_IFMT(s.st_mode)
    if path in (b'/etc/hosts', b'/etc/hostname', b'/etc/machine-id', b'/etc/resolv.conf', b'/etc/ssl', b'/etc/ssh', b'/etc/pki'): return
    if kind == stat.S_IFSOCK: return
    # What a folder holds is told below.
    size = s.st_size if kind == stat.S_IFREG else 0
    more = ''
    if kind == stat.S_IFLNK: more = os.readlink(path).hex()
    if kind == stat.S_IFREG:
        more = hashlib.sha256(open(path, 'rb').read()).hexdigest()
        if s.st_nlink > 1: more += ' is ' + seen.setdefault((s.st_dev, s.st_ino), path).hex()
        if s.st_blocks * 512 < s.st_size // 2: more += ' sparse'
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        names = sorted(os.listxattr(path))
        more += ' '.join(n + '=' + os.getxattr(path, n).hex() for n in names)
    times = '' if path in (b'/etc', b'/usr/share', b'/opt') else s.st_mtime_ns
    print(path, oct(s.st_mode), s.st_uid, s.st_gid, size, times, more)
    if kind == stat.S_IFDIR:
        for name in sorted(os.listdir(path)): say(os.path.join(path, name))
for top in (b'/etc', b'/opt', b'/vercel', b'/usr/share/other', b'/usr/share/common-licenses'): say(top)
print(os.path.exists('/usr/share/misc'))
"#;

async fn python(sandbox: &TestSandbox, text: &str) -> String {
    let line = format!("python3 - <<'EOP'\n{text}\nEOP");
    sandbox.sudo(&line).await.good()
}

async fn snapshot(sandbox: &TestSandbox) -> String {
    let taken = sandbox.post("/snapshot", &json!({ "expiration": 0 })).await.ok();
    taken["snapshot"]["id"].as_str().unwrap().to_owned()
}

fn export(client: &Client, id: &str) -> reqwest::RequestBuilder {
    client.request(Method::GET, &format!("/api/bivouac/v1/snapshots/{id}/export"))
}

async fn import(client: &Client, query: &str, body: impl Into<Body>) -> Answer {
    let path = format!("/api/bivouac/v1/snapshots/import{query}");
    client.send(client.request(Method::POST, &path).body(body)).await
}

/// Deletes a sandbox and leaves its snapshots.
async fn leave(sandbox: &TestSandbox) {
    let _ = sandbox.client.delete(&format!("/v2/sandboxes/{}", sandbox.name)).await.ok();
}

async fn remove(client: &Client, id: &str) {
    let _ = client.delete(&format!("/v2/sandboxes/snapshots/{id}")).await.ok();
}

/// Volumes of sessions and snapshots.
fn volumes(server: &TestServer) -> BTreeSet<PathBuf> {
    let pool = server.data.join("pool");
    let names = |kind: &str| std::fs::read_dir(pool.join(kind)).unwrap();
    ["sessions", "snapshots"]
        .iter()
        .flat_map(|kind| names(kind).map(|entry| entry.unwrap().path()))
        .collect()
}

/// An archive that was taken apart by nobody: its plain tar.
fn plain(archive: &[u8]) -> Vec<u8> {
    zstd::decode_all(archive).unwrap()
}

fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_ustar();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        builder.append(&header, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

/// The manifest of an archive, changed.
fn manifest(archive: &[u8], change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
    let plain = plain(archive);
    let mut archive = tar::Archive::new(plain.as_slice());
    let first = archive.entries().unwrap().next().unwrap().unwrap();
    assert_eq!(first.path().unwrap(), Path::new("bivouac.json"));
    let mut value = serde_json::from_reader(first).unwrap();
    change(&mut value);
    serde_json::to_vec(&value).unwrap()
}

/// A small snapshot and its archive.
async fn small(server: &Shared, team: &str) -> (Client, String, Vec<u8>) {
    let client = server.team(team);
    let sandbox = TestSandbox::create(&client, json!({ "image": "host" })).await;
    let _ = sandbox.sh("echo kept > file; head -c 3000000 /dev/urandom > noise").await.good();
    let id = snapshot(&sandbox).await;
    leave(&sandbox).await;
    let answer = client.send(export(&client, &id)).await;
    assert_eq!(answer.status, 200, "{answer}");
    (client, id, answer.bytes)
}

#[tokio::test]
async fn a_snapshot_comes_back_as_it_was() {
    let server = server().await;
    let client = server.team("archive-there");
    let source = TestSandbox::create(&client, json!({ "image": "host", "name": "there" })).await;
    let _ = python(&source, CHANGE).await;
    let before = python(&source, LOOK).await;
    assert!(before.contains("/opt/odd/sparse") && before.contains("security.capability"));
    let id = snapshot(&source).await;
    let label = json!({ "labels": { "of": "this test" } });
    let _ = client.patch(&format!("/api/bivouac/v1/snapshots/{id}"), &label).await.ok();
    let first = client.send(export(&client, &id)).await;
    assert_eq!(first.status, 200, "{first}");
    assert_eq!(first.headers["content-type"], "application/zstd");
    let named = first.headers["content-disposition"].to_str().unwrap();
    assert!(named.contains(&format!("{id}.tar.zst")), "{named}");
    assert!(first.bytes.len() < 8 << 20, "holes are left out: {}", first.bytes.len());
    let second = client.send(export(&client, &id)).await;
    assert!(first.bytes == second.bytes, "equal snapshots make equal archives");
    // The source is gone before the copy is made.
    leave(&source).await;
    remove(&client, &id).await;
    let answer = import(&client, "?labels=%7B%22more%22%3A%22words%22%7D", first.bytes).await;
    assert_eq!(answer.status, 201, "{answer}");
    let snapshot = &answer.json["snapshot"];
    assert_eq!(snapshot["labels"], json!({ "of": "this test", "more": "words" }));
    assert_eq!(snapshot["sourceSandboxName"], "there");
    assert_eq!(snapshot["image"], "host");
    let imported = snapshot["id"].as_str().unwrap().to_owned();
    assert_ne!(imported, id);
    let body =
        json!({ "source": { "type": "snapshot", "snapshotId": imported }, "persistent": false });
    let copy = TestSandbox::create(&client, body).await;
    let after = python(&copy, LOOK).await;
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<BTreeSet<_>>();
    let (before, after) = (lines(&before), lines(&after));
    let lost: Vec<_> = before.difference(&after).collect();
    let new: Vec<_> = after.difference(&before).collect();
    assert!(lost.is_empty() && new.is_empty(), "lost {lost:#?}\nnew {new:#?}");
    assert!(before.len() > 300, "{}", before.len());
    // And like any other: what the image has is below, and a fork starts from it.
    assert_eq!(copy.sh("test -e /usr/bin/env && cat /etc/skel/.bashrc").await.good(), "mine");
    let _ = copy.delete().await.ok();
    remove(&client, &imported).await;
}

#[tokio::test]
async fn an_archive_holds_nothing_of_the_engine() {
    let server = server().await;
    let client = server.team("archive-secret");
    let body = json!({ "image": "host", "env": { "TOKEN": "variable-S3CRET" },
        "networkPolicy": { "mode": "custom", "allow": { "example.com": [
            { "transform": [{ "headers": { "authorization": "Bearer header-S3CRET" } }] } ] } } });
    let sandbox = TestSandbox::create(&client, body).await;
    let mine = sandbox.sh("cat /etc/machine-id /etc/hostname; cat /etc/hosts > /dev/null").await;
    let mine = mine.good();
    let _ = sandbox.sudo("echo of-the-user > /root/file").await.good();
    let id = snapshot(&sandbox).await;
    let archive = plain(&client.send(export(&client, &id)).await.bytes);
    let has = |text: &str| archive.windows(text.len()).any(|window| window == text.as_bytes());
    assert!(has("of-the-user"));
    for never in ["S3CRET", "PRIVATE KEY", "example.com", "vercel-proxy-ca", "networkPolicy"] {
        assert!(!has(never), "{never}");
    }
    for own in mine.split_whitespace() {
        assert!(!has(&format!("{own}\n")), "a file of the session: {own}");
    }
    let _ = sandbox.delete().await.ok();
    remove(&client, &id).await;
}

#[tokio::test]
async fn what_is_wrong_is_refused_and_leaves_nothing() {
    let server = server().await;
    let (client, id, archive) = small(&server, "archive-wrong").await;
    let words = manifest(&archive, |_| {});
    let later = manifest(&archive, |value| value["bivouacSnapshot"] = 7.into());
    let missing = manifest(&archive, |value| {
        value["image"] = json!({ "name": "gone", "reference": "gone@x", "digest": "x" });
    });
    let other = manifest(&archive, |value| value["image"]["digest"] = "another".into());
    let mut changed = plain(&archive);
    let at = changed.windows(5).rposition(|window| window == b"kept\n").unwrap();
    changed[at] ^= 1;
    let with =
        |more: &[(&str, &[u8])]| tar(&[&[("bivouac.json", words.as_slice())], more].concat());
    let cases: Vec<(Vec<u8>, u16, &str, &str)> = vec![
        (b"no archive at all".to_vec(), 400, "archive_unreadable", "too early"),
        (vec![b'x'; 5000], 400, "archive_refused", "no tar archive"),
        (tar(&[("file", b"")]), 400, "archive_refused", "no snapshot of Bivouac"),
        (tar(&[("bivouac.json", &later)]), 400, "archive_refused", "version 7"),
        (tar(&[("bivouac.json", &missing)]), 404, "image_not_found", "--onto"),
        (tar(&[("bivouac.json", &other)]), 409, "image_mismatch", "--onto"),
        (archive[..archive.len() / 2].to_vec(), 400, "archive_unreadable", "cannot be read"),
        (changed, 400, "archive_refused", "hash"),
        (with(&[("u0/../../../../tmp/out", b"")]), 400, "archive_refused", "'..'"),
        (with(&[("../out", b"")]), 400, "archive_refused", "'..'"),
        (with(&[("w0/work", b"")]), 400, "archive_refused", "no layer"),
        (with(&[("u9/file", b"")]), 400, "archive_refused", "no layer"),
        (with(&[("u0/file", b"")]), 400, "archive_unreadable", "its end is missing"),
    ];
    for (body, status, code, text) in cases {
        let answer = import(&client, "", body).await;
        answer.refused(status, code);
        assert!(answer.message().contains(text), "{text}: {}", answer.message());
    }
    for (query, field) in
        [("?name=no%20name", "name"), ("?labels=x", "labels"), ("?expiration=-1", "expiration")]
    {
        let answer = import(&client, query, archive.clone()).await;
        assert_eq!(answer.status, 400, "{answer}");
        assert!(answer.message().contains(field), "{}", answer.message());
    }
    let answer = client.get(&format!("/api/bivouac/v1/snapshots/{id}/export?format=zip")).await;
    answer.refused(400, "bad_request");
    client
        .get("/api/bivouac/v1/snapshots/snap_00000000000000000000000000/export")
        .await
        .refused(410, "snapshot_not_found");
    let other_team = client.with_team("archive-others");
    other_team.send(export(&other_team, &id)).await.refused(410, "snapshot_not_found");
    // Insisting on an image works; the snapshot is one like others.
    let insisted = import(&client, "?onto=host&name=mine", archive).await;
    assert_eq!(insisted.status, 201, "{insisted}");
    assert_eq!(insisted.json["snapshot"]["sourceSandboxName"], "mine");
    remove(&client, insisted.json["snapshot"]["id"].as_str().unwrap()).await;
    remove(&client, &id).await;
    let list = client.get("/v2/sandboxes/snapshots?limit=50").await.ok();
    let statuses = list["snapshots"].as_array().unwrap().iter().map(|s| &s["status"]);
    assert!(statuses.into_iter().all(|status| status == "deleted"), "{list}");
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_nothing() {
    let lock = shared().unwrap();
    let server = TestServer::start().await.unwrap();
    let client = server.client("archive-away").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "image": "host" })).await;
    let _ = sandbox.sh("head -c 40000000 /dev/urandom > noise").await.good();
    let id = snapshot(&sandbox).await;
    leave(&sandbox).await;
    let archive = client.send(export(&client, &id)).await.bytes;
    let before = volumes(&server);
    // In the middle of an import.
    let (half, path) = (archive[..archive.len() / 2].to_vec(), "/api/bivouac/v1/snapshots/import");
    let hanging = hang_after(half);
    let request = client.request(Method::POST, path).body(hanging);
    let upload = tokio::spawn(async move { request.send().await });
    until("the import begins", || volumes(&server).len() > before.len()).await;
    upload.abort();
    until("the import is gone", || volumes(&server) == before).await;
    // In the middle of an export: nothing holds the snapshot then.
    let mut answer = export(&client, &id).send().await.unwrap();
    assert!(answer.chunk().await.unwrap().is_some());
    drop(answer);
    remove(&client, &id).await;
    until("the snapshot is gone", || volumes(&server).is_empty()).await;
    drop((server, lock));
}

#[tokio::test]
async fn one_more_than_may_be_at_once_is_told_to_wait() {
    let lock = shared().unwrap();
    let server = TestServer::start().await.unwrap();
    let client = server.client("archive-many").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "image": "host" })).await;
    let id = snapshot(&sandbox).await;
    leave(&sandbox).await;
    let archive = client.send(export(&client, &id)).await.bytes;
    let before = volumes(&server);
    let import = || client.request(Method::POST, "/api/bivouac/v1/snapshots/import");
    // Whoever begins and does not go on has a place, and no more than a place.
    let mut uploads = Vec::new();
    let busy = eventually("all places to be taken", LONG, async || {
        let hanging = import().body(hang_after(archive[..16].to_vec()));
        uploads.push(tokio::spawn(async move { hanging.send().await }));
        let asked = client.send(export(&client, &id)).await;
        if asked.status == 429 { Ok(asked) } else { Err(asked.status) }
    })
    .await;
    busy.refused(429, "busy");
    assert!(busy.message().contains("try again"), "{busy}");
    let told = server.cli(&["-n", "archive-many/x", "snapshots", "export", &id, "-"]).run();
    let said = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.status.code() == Some(1) && said.contains("try again in a moment"), "{said}");
    client.send(import().body(archive.clone())).await.refused(429, "busy");
    // They go, and there is room again.
    uploads.iter().for_each(tokio::task::JoinHandle::abort);
    eventually("there to be room", LONG, async || {
        let answer = client.send(import().body(archive.clone())).await;
        if answer.status == 201 { Ok(()) } else { Err(answer.status) }
    })
    .await;
    until("nothing but the two", || volumes(&server).len() == before.len() + 1).await;
    drop((server, lock));
}

/// Waits until something is so.
async fn until(what: &str, mut so: impl FnMut() -> bool) {
    eventually(what, LONG, async || if so() { Ok(()) } else { Err("not yet") }).await;
}

/// A body that sends this and then nothing, without an end.
fn hang_after(bytes: Vec<u8>) -> Body {
    use futures_util::StreamExt as _;
    let first = futures_util::stream::iter([Ok::<_, std::io::Error>(bytes)]);
    Body::wrap_stream(first.chain(futures_util::stream::pending()))
}

#[tokio::test]
async fn an_engine_that_dies_in_the_middle_of_an_import_leaves_nothing() {
    let lock = shared().unwrap();
    let mut server = TestServer::start().await.unwrap();
    let client = server.client("archive-killed").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "image": "host" })).await;
    let _ = sandbox.sh("head -c 40000000 /dev/urandom > noise").await.good();
    let id = snapshot(&sandbox).await;
    leave(&sandbox).await;
    let archive = client.send(export(&client, &id)).await.bytes;
    let before = volumes(&server);
    let half = archive[..archive.len() / 2].to_vec();
    let request = client.request(Method::POST, "/api/bivouac/v1/snapshots/import");
    let request = request.body(hang_after(half));
    let upload = tokio::spawn(async move { request.send().await });
    // Files of it are on disk.
    let written = || {
        let new: Vec<_> = volumes(&server).difference(&before).cloned().collect();
        new.first().is_some_and(|volume| volume.join("u0/vercel/sandbox/noise").exists())
    };
    until("the import writes", written).await;
    server.kill9().unwrap();
    assert!(upload.await.unwrap().is_err());
    server.restart().await.unwrap();
    until("what it left is gone", || volumes(&server) == before).await;
    let client = server.client("archive-killed").unwrap();
    let list = client.get("/v2/sandboxes/snapshots?limit=50").await.ok();
    assert_eq!(list["snapshots"].as_array().unwrap().len(), 1, "{list}");
    // Whole, it is taken.
    let answer = import(&client, "", archive).await;
    assert_eq!(answer.status, 201, "{answer}");
    for id in [&id, answer.json["snapshot"]["id"].as_str().unwrap()] {
        remove(&client, id).await;
    }
    drop((server, lock));
}

#[tokio::test]
async fn the_command_line_writes_and_reads_files() {
    let server = server().await;
    let (client, id, archive) = small(&server, "archive-cli").await;
    let namespace = format!("archive-cli/{}", client.project());
    let cli = |args: &[&str]| server.cli(&[&["-n", &namespace], args].concat());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("box.tar.zst");
    let name = file.to_str().unwrap();
    let told = cli(&["--json", "snapshots", "export", &id, name]).json();
    assert_eq!(told["bytes"], archive.len());
    assert!(std::fs::read(&file).unwrap() == archive);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing beside it");
    let piped = cli(&["snapshots", "export", &id, "-"]).run();
    assert!(piped.status.success() && piped.stdout == archive);
    let taken = cli(&["--json", "snapshots", "import", name, "--label", "from=here"]).json();
    assert_eq!(taken["snapshot"]["labels"]["from"], "here");
    let by_pipe = cli(&["snapshots", "import", "-", "--name", "piped"]).stdin(archive).good();
    let by_pipe = by_pipe.trim();
    assert!(by_pipe.starts_with("snap_"), "{by_pipe}");
    // What is no archive says so, and a file that is not there is no empty archive.
    std::fs::write(&file, "nothing").unwrap();
    let refused = cli(&["snapshots", "import", name]).run();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("too early"), "{text}");
    let gone = folder.path().join("gone");
    let refused = cli(&["snapshots", "import", gone.to_str().unwrap()]).run();
    assert!(!refused.status.success());
    // A failed export leaves no file.
    let missing = "snap_00000000000000000000000000";
    let target = folder.path().join("new");
    let refused = cli(&["snapshots", "export", missing, target.to_str().unwrap()]).run();
    assert!(!refused.status.success());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    for id in [&id, by_pipe, taken["snapshot"]["id"].as_str().unwrap()] {
        remove(&client, id).await;
    }
}
