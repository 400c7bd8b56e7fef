//! The pool's modes through the front door: plain folders, growth, moves between modes, unclean ends.

use std::fs;
use std::path::Path;
use std::process::Command;

use bivouac_testkit::{Builder, Cli, LONG, TestSandbox, TestServer, eventually, shared};
use serde_json::{Value, json};

use crate::crash::again;

fn folder() -> Builder {
    TestServer::builder().arg("--pool").arg("folder")
}

async fn storage(server: &TestServer) -> Value {
    server.client("pool").unwrap().get("/api/bivouac/v1/engine").await.ok()["storage"].clone()
}

/// Names in a folder of the pool.
fn names(server: &TestServer, folder: &str) -> usize {
    fs::read_dir(server.data.join("pool").join(folder)).map_or(0, Iterator::count)
}

/// Makes what is hard to copy; a line that hashes it comes back.
async fn fill(sandbox: &TestSandbox) -> String {
    let script = "mkdir -p d/e && head -c 3000000 /dev/urandom > d/data && ln d/data d/e/same && \
                  ln -s /etc/passwd link && mkfifo pipe && truncate -s 5G sparse && echo x >> sparse && \
                  chmod 2751 d && touch -d 2001-02-03T04:05:06.789 d/data && \
                  sudo rm -rf /usr/share/doc/bash /etc/issue && sudo mkdir -p /usr/share/doc/bash && \
                  sudo chown 33:44 d/e && sudo setcap cap_net_raw+ep d/data 2>/dev/null; true";
    let _ = sandbox.sh(script).await.good();
    state(sandbox).await
}

/// Everything of it that a user can see.
async fn state(sandbox: &TestSandbox) -> String {
    // Sizes and names of folders are the file system's own.
    let script = "cd /vercel/sandbox && sha256sum d/data d/e/same && \
                  find . -type d | sort | xargs stat -c '%n %a %u %g %y' && \
                  find . ! -type d | sort | xargs stat -c '%n %F %a %u %g %s %h %y' && readlink link && \
                  ls /usr/share/doc/bash | wc -l && test ! -e /etc/issue && echo gone";
    sandbox.sudo(script).await.good()
}

#[tokio::test]
async fn sandboxes_live_in_plain_folders() {
    let lock = shared().unwrap();
    let server = folder().start().await.unwrap();
    let client = server.client("pool").unwrap();
    let seen = storage(&server).await;
    assert_eq!((&seen["mode"], &seen["limits"]), (&json!("folder"), &json!(false)), "{seen}");
    assert!(server.tail().contains("do NOT hold"), "it is told loudly");
    let mut sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let before = fill(&sandbox).await;
    assert!(before.ends_with("gone"), "{before}");
    let _ = sandbox.stop().await.ok();
    assert!(sandbox.resume().await);
    assert_eq!(state(&sandbox).await, before, "a stop and a start change nothing");
    let taken = sandbox.post("/snapshot", &json!({ "expiration": 0 })).await.ok();
    let id = taken["snapshot"]["id"].as_str().unwrap().to_owned();
    assert!(taken["snapshot"]["sizeBytes"].as_u64().unwrap() >= 3_000_000, "{taken}");
    let forked = client.post("/v2/sandboxes/box/fork", &json!({ "name": "fork" })).await.ok();
    let forked = TestSandbox::of(&client, forked);
    assert_eq!(state(&forked).await, before);
    let _ = forked.sh("echo more >> d/data").await.good();
    assert!(sandbox.resume().await);
    assert_eq!(state(&sandbox).await, before, "a fork's writes are its own");
    for gone in [forked, sandbox] {
        let _ = gone.delete().await.ok();
    }
    let list = client.get("/v2/sandboxes/snapshots?name=box").await.ok();
    for snapshot in list["snapshots"].as_array().unwrap() {
        let id = snapshot["id"].as_str().unwrap();
        let _ = client.delete(&format!("/v2/sandboxes/snapshots/{id}")).await;
    }
    let _ = client.delete(&format!("/v2/sandboxes/snapshots/{id}")).await;
    eventually("nothing is left in the pool", LONG, async || {
        let left = ["sessions", "trash", "unfinished"].map(|folder| names(&server, folder));
        if left == [0; 3] { Ok(()) } else { Err(left) }
    })
    .await;
    drop((server, lock));
}

/// `pool migrate` on the folder of an engine that does not run.
fn migrate(server: &TestServer, to: &str) -> Cli {
    server.cli(&["pool", "migrate", "--to", to, "--json"])
}

#[tokio::test]
async fn a_data_folder_moves_between_modes_and_back() {
    let lock = shared().unwrap();
    let mut server = TestServer::builder().start().await.unwrap();
    let client = server.client("pool").unwrap();
    let mut sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let before = fill(&sandbox).await;
    let refused = migrate(&server, "folder").run();
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && told.contains("an engine is running"), "{told}");
    for (from, to, gone) in [("loop", "folder", "pool.btrfs"), ("folder", "loop", "pool.folder")] {
        let _ = sandbox.stop().await.ok();
        let _ = server.stop().await.unwrap();
        // Cut at each step, the folder has the old pool, or behind the switch the new one.
        for step in ["made", "copying", "copied", "compared", "switched"] {
            let cut = migrate(&server, to).env("BIVOUAC_TEST_POOL_KILL", step).run();
            assert!(!cut.status.success(), "{step}: {cut:?}");
            let shown = server.cli(&["pool", "show", "--json"]).json();
            let expected = if step == "switched" { to } else { from };
            assert_eq!(shown["mode"], expected, "{step}: {shown}");
            if step == "copied" {
                // It works as ever in between.
                server.restart().await.unwrap();
                sandbox = again(&server, &sandbox, "pool");
                assert!(sandbox.resume().await);
                assert_eq!(state(&sandbox).await, before, "{step}");
                let _ = sandbox.stop().await.ok();
                let _ = server.stop().await.unwrap();
            }
        }
        let done = migrate(&server, to).json();
        assert_eq!((&done["to"], &done["volumes"]), (&json!(to), &json!(0)), "{done}");
        assert!(!server.data.join(gone).exists() && !server.data.join("pool.moving").exists());
        server.restart().await.unwrap();
        assert_eq!(storage(&server).await["mode"], to);
        sandbox = again(&server, &sandbox, "pool");
        assert!(sandbox.resume().await);
        assert_eq!(state(&sandbox).await, before, "moved to {to}");
    }
    // Another mode than the folder's is refused, with what to do.
    let _ = sandbox.stop().await.ok();
    let _ = server.stop().await.unwrap();
    let command = server.serve_command().unwrap();
    let told = refuses(command, &["--pool", "folder"]);
    assert!(told.contains("bivouac pool migrate --to folder"), "{told}");
    server.restart().await.unwrap();
    drop((server, lock));
}

/// What an engine says that does not start.
fn refuses(mut command: Command, args: &[&str]) -> String {
    let output = command.args(args).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "it started: {told}");
    told
}

#[tokio::test]
async fn a_sandbox_writes_past_the_first_size_of_the_pool() {
    let lock = shared().unwrap();
    let server = TestServer::builder().arg("--test-pool-mb").arg("512").start().await.unwrap();
    let sandbox =
        TestSandbox::create(&server.client("pool").unwrap(), json!({ "persistent": false })).await;
    let first = storage(&server).await["size"].as_u64().unwrap();
    assert_eq!(first, 512 << 20);
    let script = "for i in 1 2 3 4 5; do dd if=/dev/zero of=f$i bs=1M count=200 conv=fsync status=none || exit 1; \
                  done; cat f1 f2 f3 f4 f5 | wc -c";
    assert_eq!(sandbox.sh(script).await.good(), "1048576000");
    let now = storage(&server).await;
    assert!(now["size"].as_u64().unwrap() > 1_048_576_000, "{now}");
    assert!(server.tail().contains("the storage pool has grown"), "{}", server.tail());
    let file = fs::metadata(server.data.join("pool.btrfs")).unwrap();
    assert_eq!(now["size"], json!(file.len()));
    drop((server, lock));
}

#[tokio::test]
async fn a_growth_that_was_cut_short_is_finished_by_the_next_start() {
    let lock = shared().unwrap();
    let small = || TestServer::builder().arg("--test-pool-mb").arg("512");
    let mut server = small().env("BIVOUAC_TEST_POOL_KILL", "grown").start().await.unwrap();
    let client = server.client("pool").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let path = sandbox.path("/cmd");
    // While there is no engine the pool is full, and stays so.
    let script = "for i in 1 2 3 4 5; do until head -c 200000000 /dev/urandom > f$i; do sleep 0.2; done; \
                  until sha256sum f$i > s$i; do sleep 0.2; done; done; cat s? > sums; touch whole; sleep 86100";
    let body = json!({ "command": "sh", "args": ["-c", script] });
    let _ = client.try_send(client.request(reqwest::Method::POST, &path).json(&body)).await;
    let ended = server.wait_end(LONG).await.unwrap();
    assert!(!ended.success(), "the engine was to die when its pool has grown: {ended:?}");
    let file = fs::metadata(server.data.join("pool.btrfs")).unwrap().len();
    assert!(file > 512 << 20, "the file has grown: {file}");
    server.restart_with(small()).await.unwrap();
    let now = storage(&server).await;
    assert!(
        now["size"].as_u64().unwrap() >= file,
        "the rest of the growth was forgotten: {now} of {file}"
    );
    // The sandbox went on meanwhile, and goes on: all that it wrote is whole.
    let client = server.client("pool").unwrap();
    let sandbox = TestSandbox::of(&client, client.get("/v2/sandboxes/box").await.ok());
    eventually("everything to be written", LONG, async || {
        let seen = sandbox.sh("ls -l; test -e whole").await;
        if seen.exit == Some(0) { Ok(()) } else { Err(seen) }
    })
    .await;
    assert_eq!(sandbox.sh("sha256sum --quiet -c sums && wc -l < sums").await.good(), "5");
    let _ = sandbox.delete().await.ok();
    drop((server, lock));
}

#[tokio::test]
async fn an_unclean_end_is_followed_by_a_check() {
    let lock = shared().unwrap();
    let mut server = TestServer::start().await.unwrap();
    let client = server.client("pool").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let _ = sandbox.sh("head -c 20000000 /dev/urandom > data").await.good();
    let _ = sandbox.stop().await.ok();
    let _ = server.stop().await.unwrap();
    server.restart().await.unwrap();
    assert_eq!(storage(&server).await["check"], Value::Null, "a clean end needs none");
    // As after a power cut: the pool is not mounted any more, and nobody has closed it.
    server.kill9().unwrap();
    let pool = server.data.join("pool");
    eventually("the pool can be unmounted", LONG, async || {
        rustix::mount::unmount(&pool, rustix::mount::UnmountFlags::empty())
    })
    .await;
    server.restart().await.unwrap();
    let check = eventually("the check ends", LONG, async || {
        let check = storage(&server).await["check"].clone();
        if check["state"] == "running" { Err(check) } else { Ok(check) }
    })
    .await;
    assert_eq!(check["state"], "clean", "{check}");
    assert!(check["bytes"].as_u64().unwrap() > 20_000_000 && check["errors"] == 0, "{check}");
    let doctor = server.cli(&["doctor", "--json"]).run();
    let told = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(told.contains("checked after an unclean end"), "{told}");
    // Damage is found, and told: a byte of the data is another one.
    let _ = server.stop().await.unwrap();
    spoil(&server.data.join("pool.btrfs"));
    fs::write(server.data.join("pool.open"), "").unwrap();
    server.restart().await.unwrap();
    let check = eventually("the check ends", LONG, async || {
        let check = storage(&server).await["check"].clone();
        if check["state"] == "damaged" { Ok(check) } else { Err(check) }
    })
    .await;
    assert!(check["errors"].as_u64().unwrap() > 0, "{check}");
    let doctor = server.cli(&["doctor", "--json"]).run();
    assert!(!doctor.status.success(), "{doctor:?}");
    // A file that is no btrfs any more is told apart from one that is missing.
    let _ = server.stop().await.unwrap();
    let file = fs::OpenOptions::new().write(true).open(server.data.join("pool.btrfs")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0; 4096], 64 << 10).unwrap();
    let told = refuses(server.serve_command().unwrap(), &[]);
    assert!(told.contains("not that of a btrfs") && told.contains("btrfs check"), "{told}");
    drop((server, lock));
}

/// Changes data of the one big file of random bytes: what does not compress is found by its entropy.
fn spoil(pool: &Path) {
    use std::os::unix::fs::FileExt as _;
    let file = fs::OpenOptions::new().read(true).write(true).open(pool).unwrap();
    let mut block = vec![0; 4096];
    let (mut run, mut at) = (0, 0);
    loop {
        // Over holes, which are most of it.
        let data = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)).expect("random data");
        run = if data == at { run } else { 0 };
        at = data;
        file.read_exact_at(&mut block, at).unwrap();
        let different = block.iter().collect::<std::collections::BTreeSet<_>>().len();
        run = if different > 240 { run + 1 } else { 0 };
        // In the middle of a long run of random blocks: in no tree.
        if run == 1000 {
            block[7] ^= 0xff;
            file.write_all_at(&block, at).unwrap();
            file.sync_all().unwrap();
            return;
        }
        at += 4096;
    }
}
