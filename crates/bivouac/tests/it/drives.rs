//! Drives: data that outlives the sandboxes that wrote it, one writer at a time, and files without a sandbox.

use bivouac_testkit::{Client, SHORT, TestSandbox, TestServer, eventually, shared};
use futures_util::future::join_all;
use reqwest::Method;
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::crash::{again, shims};
use crate::server;

const SMALL: i64 = 64 << 20;

async fn make(client: &Client, name: &str) -> Value {
    let body = json!({ "projectId": client.project(), "maxSizeBytes": SMALL });
    client.post(&format!("/v2/sandboxes/drives/{name}"), &body).await.ok()["drive"].clone()
}

/// A sandbox that keeps nothing, with a drive at /data.
async fn with(client: &Client, drive: &str, mode: &str) -> TestSandbox {
    let mounts = json!({ "/data": { "drive": drive, "mode": mode } });
    TestSandbox::create(client, json!({ "persistent": false, "mounts": mounts })).await
}

async fn own(client: &Client, drive: &str, what: &str, body: Value) -> bivouac_testkit::Answer {
    client.post(&format!("/api/bivouac/v1/drives/{drive}/{what}"), &body).await
}

/// Names in a folder of the pool.
fn volumes(server: &TestServer, kind: &str) -> Vec<String> {
    let entries = std::fs::read_dir(server.data.join("pool").join(kind)).unwrap();
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test]
async fn a_drive_is_got_or_made_listed_and_deleted() {
    let server = server().await;
    let client = server.team("drives-calls");
    let body = json!({ "projectId": client.project(), "maxSizeBytes": SMALL });
    let made = client.post("/v2/sandboxes/drives/one", &body).await;
    assert_eq!(made.status, 201, "{made}");
    let id = made.ok()["drive"]["id"].clone();
    let again = client.post("/v2/sandboxes/drives/one", &json!({})).await;
    assert_eq!((again.status, &again.json["drive"]["id"]), (200, &id));
    let other = json!({ "maxSizeBytes": SMALL * 2 });
    client.post("/v2/sandboxes/drives/one", &other).await.refused(409, "conflict");
    let other = json!({ "region": "sfo1" });
    client.post("/v2/sandboxes/drives/one", &other).await.refused(409, "conflict");
    for bad in ["a%2Fb", "a.b", &"x".repeat(65)] {
        let path = format!("/v2/sandboxes/drives/{bad}");
        client.post(&path, &json!({})).await.refused(400, "bad_request");
    }
    make(&client, "two").await;
    let list = "/v2/sandboxes/drives?sortBy=name&sortOrder=asc&limit=1";
    let first = client.get(list).await.ok();
    assert_eq!(first["drives"][0]["name"], "one");
    let next = first["pagination"]["next"].as_str().unwrap();
    let second = client.get(&format!("{list}&cursor={next}")).await.ok();
    assert_eq!(second["drives"][0]["name"], "two");
    let path = format!("/v2/sandboxes/drives/{}", id.as_str().unwrap());
    assert_eq!(client.get(&path).await.ok()["drive"]["name"], "one", "by its id");
    let there = |id: &Value| volumes(&server, "drives").contains(&id.as_str().unwrap().to_owned());
    assert!(there(&id));
    let _ = client.delete("/v2/sandboxes/drives/one").await.ok();
    client.get("/v2/sandboxes/drives/one").await.refused(404, "not_found");
    client.delete("/v2/sandboxes/drives/one").await.refused(404, "not_found");
    assert!(!there(&id), "the data of a deleted drive is there");
    let _ = client.delete("/v2/sandboxes/drives/two").await.ok();
}

#[tokio::test]
async fn one_writes_and_others_look_at_copies_of_their_own() {
    let server = server().await;
    let client = server.team("drives-modes");
    make(&client, "d").await;
    let mounts = json!({ "/data": { "drive": "d", "mode": "snapshot" } });
    let empty = TestSandbox::try_create(&client, json!({ "mounts": mounts })).await;
    empty.unwrap_err().refused(400, "drive_not_initialized");
    let a = with(&client, "d", "read-write").await;
    assert_eq!(a.sh("stat -c '%U %a' /data").await.good(), "vercel-sandbox 755");
    let _ = a.sh("echo first > /data/f && sync /data/f").await.good();
    let second = TestSandbox::try_create(&client, json!({ "mounts": { "/x": { "drive": "d" } } }));
    let refusal = second.await.unwrap_err();
    refusal.refused(409, "conflict");
    assert!(refusal.message().contains(&a.name), "{}", refusal.message());
    assert_eq!(refusal.json["error"]["sandbox"], json!(a.name));
    client.delete("/v2/sandboxes/drives/d").await.refused(409, "conflict");
    let view = client.get("/v2/sandboxes/drives/d").await.ok();
    assert_eq!(view["drive"]["currentSandboxName"], json!(a.name));
    assert_eq!(view["drive"]["currentSessionId"], json!(a.session));
    // Ten look while the one writes; each has the moment of its start, and what it writes is its own.
    let readers = join_all((0..10).map(|_| with(&client, "d", "snapshot"))).await;
    let _ = a.sh("echo second > /data/f; echo new > /data/g").await.good();
    for (index, reader) in readers.iter().enumerate() {
        assert_eq!(reader.sh("cat /data/f; ls /data").await.good(), "first\nf", "{index}");
        let _ = reader.sh(&format!("echo {index} > /data/f")).await.good();
    }
    for (index, reader) in readers.iter().enumerate() {
        assert_eq!(reader.sh("cat /data/f").await.good(), index.to_string());
    }
    assert_eq!(a.sh("cat /data/f").await.good(), "second");
    let views = || {
        let own: Vec<_> = readers.iter().map(|r| format!("{}.0", r.session)).collect();
        volumes(&server, "views").into_iter().filter(|name| own.contains(name)).count()
    };
    assert_eq!(views(), 10);
    join_all(readers.iter().map(TestSandbox::delete)).await;
    assert_eq!(views(), 0, "a private copy is left");
    let _ = a.delete().await.ok();
    let b = with(&client, "d", "read-write").await;
    assert_eq!(b.sh("cat /data/f /data/g").await.good(), "second\nnew");
    let _ = b.delete().await.ok();
    let _ = client.delete("/v2/sandboxes/drives/d").await.ok();
}

#[tokio::test]
async fn a_writer_that_is_killed_lets_go_and_loses_nothing() {
    let lock = shared().unwrap();
    let mut server = TestServer::start().await.unwrap();
    let client = server.client("drives-killed").unwrap();
    make(&client, "d").await;
    let a = with(&client, "d", "read-write").await;
    let write =
        "import os,sys; f=open('/data/f','w'); f.write('kept'); f.flush(); os.fsync(f.fileno())";
    let _ = a.run(&["python3", "-c", write]).await.good();
    // Somebody writes while the shim is killed.
    let _ = a.start(&["sh", "-c", "while :; do date >> /data/log; done"], json!({})).await;
    kill_process(shims(&a.session)[0], Signal::KILL).unwrap();
    let taken = |client: Client| async move {
        let body = json!({ "persistent": false, "mounts": { "/data": { "drive": "d" } } });
        TestSandbox::try_create(&client, body).await.map_err(|answer| answer.json)
    };
    let b = eventually("the drive to be free", SHORT, async || taken(client.clone()).await).await;
    assert_eq!(b.sh("cat /data/f").await.good(), "kept");
    let size = b.sh("stat -c %s /data/log").await.good();
    assert_eq!(b.sh("sleep 0.3; stat -c %s /data/log").await.good(), size, "the dead one writes");
    // The engine goes, the writer stays the writer.
    server.kill9().unwrap();
    server.restart().await.unwrap();
    let b = again(&server, &b, "drives-killed");
    let client = server.client("drives-killed").unwrap();
    assert_eq!(b.sh("echo on >> /data/f; cat /data/f").await.good(), "kepton");
    let refusal = taken(client.clone()).await.unwrap_err();
    assert_eq!(refusal["error"]["sandbox"], json!(b.name), "{refusal}");
    // Both go while nobody serves.
    server.kill9().unwrap();
    kill_process(shims(&b.session)[0], Signal::KILL).unwrap();
    server.restart().await.unwrap();
    let client = server.client("drives-killed").unwrap();
    let c = eventually("the drive to be free", SHORT, async || taken(client.clone()).await).await;
    assert_eq!(c.sh("cat /data/f").await.good(), "kepton");
    let _ = c.delete().await.ok();
    let _ = client.delete("/v2/sandboxes/drives/d").await.ok();
    drop((server, lock));
}

#[tokio::test]
async fn a_drive_holds_what_it_may_and_no_more() {
    let server = server().await;
    let client = server.team("drives-size");
    make(&client, "d").await;
    let a = with(&client, "d", "read-write").await;
    let fill = "dd if=/dev/urandom of=/data/big bs=1M count=100 conv=fsync 2>&1";
    let full = a.sh(fill).await;
    assert!(full.exit != Some(0), "100 MiB on a drive of 64: {full:?}");
    let held: i64 = a.sh("stat -c %s /data/big").await.good().parse().unwrap();
    assert!((SMALL / 2..=SMALL).contains(&held), "{held}");
    let _ = a
        .sh("rm /data/big && sync -f /data && echo ok > /data/small && sync /data/small")
        .await
        .good();
    // A subvolume inside would be outside of the size, and of every copy.
    let made = a.sudo("btrfs subvolume create /data/sub").await;
    assert!(made.exit != Some(0), "{made:?}");
    let usage = client.get("/api/bivouac/v1/drives/d/usage").await.ok();
    assert!(usage["usedBytes"].as_i64().unwrap() < SMALL / 2, "{usage}");
    let _ = a.delete().await.ok();
    let _ = client.delete("/v2/sandboxes/drives/d").await.ok();
}

#[tokio::test]
async fn attached_and_detached_while_it_runs() {
    let server = server().await;
    let client = server.team("drives-live");
    make(&client, "d").await;
    let a = TestSandbox::create(&client, json!({})).await;
    let place = |path: &str| json!({ "sandbox": a.name, "path": path });
    let done = own(&client, "d", "attach", place("/mnt/new/data")).await.ok();
    assert_eq!(done["live"], true, "{done}");
    let _ = a.sh("echo written > /mnt/new/data/f").await.good();
    let _ = own(&client, "d", "attach", place("/mnt/new/data")).await.ok();
    own(&client, "d", "attach", place("/other")).await.refused(400, "");
    // Nobody follows a link to the place.
    let _ = a.sudo("mkdir /real && ln -s /real /link").await.good();
    make(&client, "e").await;
    let refusal = own(&client, "e", "attach", place("/link/x")).await;
    refusal.refused(400, "");
    assert_eq!(a.sudo("ls /real").await.good(), "");
    assert!(client.get("/v2/sandboxes/drives/e").await.ok()["drive"]["currentSessionId"].is_null());
    // In use: said, and left as it is; by force: cut off, and nothing killed.
    let holder = "exec 3>>/mnt/new/data/held; echo on >&3; touch /tmp/open; while [ ! -e /tmp/go ]; do sleep 0.05; done; echo late >&3; sync /proc/self/fd/3; touch /tmp/over; sleep 60";
    let id = a.start(&["sh", "-c", holder], json!({})).await;
    let _ = a.sh("while [ ! -e /tmp/open ]; do sleep 0.05; done").await.good();
    let from = json!({ "sandbox": a.name });
    let busy = own(&client, "d", "detach", from.clone()).await;
    busy.refused(409, "conflict");
    assert!(busy.message().contains("/mnt/new/data"), "{}", busy.message());
    assert_eq!(a.sh("cat /mnt/new/data/held").await.good(), "on");
    // Root inside hides a second mount of it.
    let _ = a.sudo("mkdir /hidden && mount --bind /mnt/new/data /hidden").await.good();
    let force = json!({ "sandbox": a.name, "force": true });
    let _ = own(&client, "d", "detach", force).await.ok();
    let b = with(&client, "d", "read-write").await;
    let _ = a.sh("touch /tmp/go; while [ ! -e /tmp/over ]; do sleep 0.05; done").await.good();
    let _ = a.sudo("echo hidden > /hidden/more; sync -f /hidden").await;
    assert_eq!(b.sh("cat /data/f /data/held; ls /data").await.good(), "written\non\nf\nheld");
    assert!(a.command(&id).await.ok()["command"]["exitCode"].is_null(), "it was killed");
    own(&client, "d", "detach", from).await.refused(404, "not_found");
    assert_eq!(volumes(&server, "drives").iter().filter(|n| n.contains(".next")).count(), 0);
    let _ = b.delete().await.ok();
    // A copy can come and go as well.
    let view = json!({ "sandbox": a.name, "path": "/view", "mode": "snapshot" });
    let _ = own(&client, "d", "attach", view.clone()).await.ok();
    assert_eq!(a.sh("cat /view/f; echo mine > /view/f").await.good(), "written");
    let shown = a.get(false).await.ok();
    assert_eq!(shown["sandbox"]["mounts"]["/view"]["mode"], "snapshot");
    let _ = own(&client, "d", "detach", json!({ "sandbox": a.name })).await.ok();
    assert!(a.get(false).await.ok()["sandbox"]["mounts"].is_null());
    let _ = a.delete().await.ok();
    for name in ["d", "e"] {
        let _ = client.delete(&format!("/v2/sandboxes/drives/{name}")).await.ok();
    }
}

#[tokio::test]
async fn a_stopped_sandbox_comes_back_with_its_drives() {
    let server = server().await;
    let client = server.team("drives-resume");
    make(&client, "d").await;
    let mut a = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let _ = a.sh("mkdir -p /tmp/x && echo root > /vercel/sandbox/own").await.good();
    let _ = a.stop().await;
    let done = own(&client, "d", "attach", json!({ "sandbox": "box", "path": "/data" })).await.ok();
    assert_eq!(done["live"], false, "{done}");
    assert!(a.resume().await);
    let _ = a.sh("echo kept > /data/f; cat own").await.good();
    let _ = a.stop().await;
    // What is on a drive is not in the snapshot: another writes it meanwhile.
    let b = with(&client, "d", "read-write").await;
    let _ = b.sh("echo more >> /data/f").await.good();
    let resume = a.get(true).await;
    resume.refused(409, "conflict");
    assert!(resume.message().contains(&b.name), "{}", resume.message());
    let _ = b.delete().await.ok();
    assert!(a.resume().await);
    assert_eq!(a.sh("cat /data/f").await.good(), "kept\nmore");
    // A link in the way of the next start: a sentence, and no half of a sandbox.
    let place = json!({ "sandbox": "box", "path": "/blocked/data" });
    let _ = own(&client, "d", "detach", json!({ "sandbox": "box" })).await.ok();
    let _ = a.sudo("ln -s /tmp /blocked").await.good();
    let _ = a.stop().await;
    let _ = own(&client, "d", "attach", place).await.ok();
    let refusal = a.get(true).await;
    refusal.refused(400, "mount_failed");
    assert!(refusal.message().contains("/blocked/data"), "{}", refusal.message());
    let cleared = client.patch("/v2/sandboxes/box", &json!({ "mounts": {} })).await.ok();
    assert!(cleared["sandbox"]["mounts"].is_null(), "{cleared}");
    assert!(a.resume().await);
    let _ = a.delete().await.ok();
    let _ = client.delete("/v2/sandboxes/drives/d").await.ok();
}

#[tokio::test]
async fn forks_of_a_drive_go_ways_of_their_own() {
    let server = server().await;
    let client = server.team("drives-fork");
    let parent = make(&client, "d").await;
    let a = with(&client, "d", "read-write").await;
    let _ = a.sh("head -c 20000000 /dev/urandom > /data/big; echo one > /data/f").await.good();
    let fork = client.post("/v2/sandboxes/drives/d/fork", &json!({ "name": "copy" })).await;
    assert_eq!(fork.status, 201, "{fork}");
    assert_eq!(fork.json["drive"]["parentDriveId"], parent["id"]);
    assert_eq!(fork.json["drive"]["rootDriveId"], parent["id"]);
    let again = client.post("/v2/sandboxes/drives/d/fork", &json!({ "name": "copy" })).await;
    again.refused(409, "conflict");
    let _ = a.sh("echo two > /data/f").await.good();
    let b = with(&client, "copy", "read-write").await;
    let sums =
        (a.sh("sha256sum < /data/big").await.good(), b.sh("sha256sum < /data/big").await.good());
    assert_eq!(sums.0, sums.1);
    assert_eq!(b.sh("cat /data/f; echo three > /data/f").await.good(), "one");
    assert_eq!(a.sh("cat /data/f").await.good(), "two");
    let _ = a.delete().await.ok();
    // The copy does not need what it was made from.
    let _ = client.delete("/v2/sandboxes/drives/d").await.ok();
    assert_eq!(b.sh("sha256sum < /data/big").await.good(), sums.0);
    // A fork's size is its parent's: 20 MB are in it already.
    let full = b.sh("dd if=/dev/urandom of=/data/more bs=1M count=55 conv=fsync").await;
    assert!(full.exit != Some(0), "{full:?}");
    let _ = b.delete().await.ok();
    let _ = client.delete("/v2/sandboxes/drives/copy").await.ok();
}

#[tokio::test]
async fn files_without_a_sandbox_and_links_that_lead_out() {
    let server = server().await;
    let client = server.team("drives-files");
    make(&client, "d").await;
    let file = |path: &str| format!("/api/bivouac/v1/drives/d/file?path={path}");
    let put = async |path: &str, body: &'static [u8]| {
        client.send(client.request(Method::PUT, &file(path)).body(body)).await
    };
    let _ = put("in/there.txt", b"hello").await.ok();
    let a = with(&client, "d", "read-write").await;
    assert_eq!(a.sh("cat /data/in/there.txt").await.good(), "hello");
    assert_eq!(
        a.sh("stat -c %U:%G:%a /data/in/there.txt").await.good(),
        "vercel-sandbox:vercel-sandbox:644"
    );
    put("in/there.txt", b"no").await.refused(409, "conflict");
    let data = server.data.display();
    let links = format!(
        "cd /data && ln -s /etc/shadow shadow && ln -s / root && ln -s ../../.. up && \
         ln -s {data}/token token && ln -s in ok && mkfifo pipe && echo set > in/own"
    );
    let _ = a.sh(&links).await.good();
    let _ = a.sudo("cp /bin/true /data/suid && chmod 4755 /data/suid").await.good();
    // Reading is allowed while somebody writes.
    let listed = client.get("/api/bivouac/v1/drives/d/files").await.ok();
    let names: Vec<_> =
        listed["entries"].as_array().unwrap().iter().map(|e| e["name"].clone()).collect();
    assert!(names.contains(&json!("shadow")) && names.contains(&json!("pipe")), "{listed}");
    let _ = a.delete().await.ok();
    for bad in [
        "shadow",
        "root/etc/shadow",
        "up/token",
        "token",
        "ok/own",
        "../token",
        "in/../../x",
        "pipe",
        "in",
    ] {
        let answer = client.get(&file(bad)).await;
        answer.refused(400, "bad_request");
        let listing = format!("/api/bivouac/v1/drives/d/files?path={bad}");
        if bad != "in" {
            client.get(&listing).await.refused(400, "bad_request");
        }
    }
    client.get(&file("nothing")).await.refused(404, "not_found");
    for bad in ["root/tmp/evil", "up/evil", "../evil", "pipe/x", "", "/"] {
        put(bad, b"evil").await.refused(400, "bad_request");
    }
    // A link in the file's own place is replaced.
    let _ = put("token", b"mine").await.ok();
    assert_ne!(std::fs::read(server.data.join("token")).unwrap_or_default(), b"mine");
    let read = client.get(&file("token")).await;
    assert_eq!(read.bytes, b"mine");
    let over =
        client.request(Method::PUT, &file("big")).header("content-length", "5").body("hello");
    let _ = client.send(over).await.ok();
    let view = client.get("/api/bivouac/v1/drives/d/files?path=in").await.ok();
    let sizes: Vec<_> = view["entries"].as_array().unwrap().iter().map(|e| &e["size"]).collect();
    assert_eq!(sizes, [&json!(4), &json!(5)]);
    let _ = client.delete("/v2/sandboxes/drives/d").await.ok();
}

#[tokio::test]
async fn the_command_line_s_drives() {
    let server = server().await;
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let args: Vec<&str> = ["-n", "drives-cli/p"].iter().chain(args).copied().collect();
        server.cli(&args)
    };
    assert_eq!(run(&["drive", "create", "data", "--size", "64M"]).good().trim(), "data");
    let source = folder.path().join("in.txt");
    std::fs::write(&source, "from here").unwrap();
    let source = source.to_str().unwrap();
    let _ = run(&["drive", "cp", source, "data:sub/in.txt"]).good();
    assert_eq!(run(&["drive", "cat", "data:sub/in.txt"]).good(), "from here");
    let back = folder.path().join("back.txt");
    let _ = run(&["drive", "cp", "data:sub/in.txt", back.to_str().unwrap()]).good();
    assert_eq!(std::fs::read_to_string(back).unwrap(), "from here");
    let _ = run(&["drive", "cp", "-", "data:std"]).stdin("piped").good();
    let files = run(&["drive", "ls", "data:", "--json"]).json();
    let names: Vec<_> = files.as_array().unwrap().iter().map(|f| f["name"].clone()).collect();
    assert_eq!(names, [json!("std"), json!("sub")]);
    let _ = run(&["create", "box", "--mount", "data:/data"]).good();
    let seen = run(&["exec", "box", "--", "cat", "/data/sub/in.txt"]).good();
    assert_eq!(seen, "from here");
    let held = run(&["drive", "rm", "data"]).run();
    assert!(!held.status.success());
    let _ = run(&["drive", "detach", "box", "data"]).good();
    let _ = run(&["drive", "attach", "box", "data:/again:snapshot"]).good();
    assert_eq!(run(&["exec", "box", "--", "cat", "/again/std"]).good(), "piped");
    let _ = run(&["drive", "fork", "data", "copy"]).good();
    let shown = run(&["drive", "show", "copy", "--json"]).json();
    assert_eq!(shown["drive"]["name"], "copy");
    let _ = run(&["rm", "box"]).good();
    let _ = run(&["drive", "rm", "data", "copy"]).good();
    assert_eq!(run(&["drive", "ls", "--json"]).json(), json!([]));
}
