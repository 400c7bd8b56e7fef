//! Disk truth: what a sandbox may hold, what its `df` says, what things take, what is left over, and what is
//! refused when the host is full.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bivouac_testkit::{TestSandbox, TestServer, eventually, shared};
use serde_json::{Value, json};

/// A pass of the reconciler, and what it may cost on a busy machine.
const SOON: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// Size, use and what is available of a path, bytes, as `df` says.
async fn df(sandbox: &TestSandbox, path: &str) -> (u64, u64, u64) {
    let text = sandbox.run(&["df", "-B1", "--output=size,used,avail", path]).await.good();
    let numbers: Vec<u64> = text
        .lines()
        .last()
        .unwrap()
        .split_whitespace()
        .map(|n| n.parse().unwrap_or_else(|_| panic!("{text}")))
        .collect();
    (numbers[0], numbers[1], numbers[2])
}

/// Bytes of the files that a sandbox has made.
async fn held(sandbox: &TestSandbox) -> u64 {
    let text = sandbox.sh("du -s --block-size=1 /vercel/sandbox | cut -f1").await.good();
    text.parse().unwrap()
}

async fn live_snapshot(sandbox: &TestSandbox) -> String {
    let path = format!("/api/bivouac/v1/sandboxes/{}/snapshots", sandbox.name);
    let answer = sandbox.client.post(&path, &json!({ "live": true })).await.ok();
    answer["snapshot"]["id"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

async fn usage(sandbox: &TestSandbox, of: &str, name: &str) -> Value {
    sandbox.client.get(&format!("/api/bivouac/v1/usage?{of}={name}")).await.ok()
}

#[tokio::test]
async fn df_tells_of_the_limit() {
    let lock = shared().unwrap();
    let server = TestServer::builder().arg("--disk").arg("512M").start().await.unwrap();
    let client = server.client("df").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "persistent": false })).await;
    let (size, used, available) = df(&sandbox, "/").await;
    assert_eq!(size, 512 * MIB);
    assert!(used < 16 * MIB && available > 490 * MIB, "{used} {available}");
    // Every way to ask agrees, as every user, by path and by descriptor, and in a sandbox of its own.
    let asks = [
        "python3 -c 'import shutil; print(shutil.disk_usage(\"/vercel/sandbox\").total)'",
        "python3 -c 'import os; f = os.open(\"/etc\", 0); s = os.fstatvfs(f); print(s.f_blocks * s.f_frsize)'",
        "python3 -c 'import os; os.chdir(\"/usr\"); s = os.statvfs(\"lib/..\"); print(s.f_blocks * s.f_frsize)'",
        "node -e 'const s = require(\"fs\").statfsSync(\"/\"); console.log(s.blocks * s.bsize)'",
        "stat -f -c '%b %S' / | awk '{ print $1 * $2 }'",
        "bwrap --dev-bind / / df -B1 --output=size / | tail -n 1 | tr -d ' '",
    ];
    for ask in asks {
        for root in [false, true] {
            let ran = sandbox.run_with(&["sh", "-c", ask], json!({ "sudo": root })).await;
            assert_eq!(ran.good(), (512 * MIB).to_string(), "{ask} as root: {root}");
        }
    }
    // What is written is used.
    let _ = sandbox.sh("head -c 100000000 /dev/urandom > big && sync big").await.good();
    let (_, after, left) = df(&sandbox, "/").await;
    assert!((after - used).abs_diff(100_000_000) < 20_000_000, "{used} then {after}");
    assert!(left < available - 80_000_000, "{available} then {left}");
    // Other file systems are the kernel's: its errors, its numbers.
    let shm = df(&sandbox, "/dev/shm").await.0;
    assert!(shm > 512 * MIB, "{shm}");
    let missing = sandbox.sh("stat -f /no/such/file 2>&1").await;
    assert!(missing.exit != Some(0) && missing.out().contains("No such file"), "{missing:?}");
    let private = "sudo mkdir -pm 700 /root/x; stat -f /root/x 2>&1";
    assert!(sandbox.sh(private).await.out().contains("Permission denied"));
    // Nothing of the host is told.
    let text = sandbox.sh("df -a 2>&1; cat /proc/mounts").await.out();
    assert!(!text.contains(&*server.data.to_string_lossy()), "{text}");
    // Whoever takes the helper away gets another.
    for _ in 0..3 {
        let _ = sandbox.sudo("pkill -9 bivouac-df; true").await;
        assert_eq!(df(&sandbox, "/").await.0, 512 * MIB);
    }
    drop(server);
    drop(lock);
}

/// A file system that answers nothing, and programs that ask for its size.
const HUNG: &str = r"
import os, struct, ctypes, threading, time
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open('/dev/fuse', os.O_RDWR)
os.makedirs('/mnt/hung', exist_ok=True)
options = f'fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other'.encode()
assert libc.mount(b'fuse', b'/mnt/hung', b'fuse', 0, options) == 0, os.strerror(ctypes.get_errno())
def serve():
    while True:
        try:
            request = os.read(fd, 1 << 17)
        except OSError:
            return
        _, code, unique, _ = struct.unpack('IIQQ', request[:24])
        if code == 26:
            body = struct.pack('IIIIHHIIHHI', 7, 31, 65536, 0, 12, 9, 65536, 1, 0, 0, 0) + b'\0' * 28
            os.write(fd, struct.pack('IiQ', 16 + len(body), 0, unique) + body)
threading.Thread(target=serve, daemon=True).start()
children = []
for number in range(6):
    child = os.fork()
    if child == 0:
        try:
            os.statvfs(f'/mnt/hung/{number}')
        except OSError:
            pass
        os._exit(0)
    children.append(child)
    time.sleep(0.05)
    os.statvfs('/')
print('others are answered', flush=True)
libc.umount2(b'/mnt/hung', 1 | 2)
for child in children:
    os.waitpid(child, 0)
print('all are free', flush=True)
";

#[tokio::test]
async fn a_file_system_that_hangs_hangs_nobody_else() {
    let lock = shared().unwrap();
    let server = TestServer::builder().arg("--disk").arg("512M").start().await.unwrap();
    let client = server.client("df-hung").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "persistent": false })).await;
    let ran = sandbox.run_with(&["python3", "-c", HUNG], json!({ "sudo": true })).await;
    assert_eq!(ran.out(), "others are answered\nall are free", "{}", ran.err());
    // init has not waited for it, and answers again when what hung has ended.
    eventually("an honest df", SOON, async || {
        let size = df(&sandbox, "/").await.0;
        if size == 512 * MIB { Ok(()) } else { Err(size.to_string()) }
    })
    .await;
    drop(server);
    drop(lock);
}

/// How much more a sandbox can write: fills its disk, and empties it again.
async fn room(sandbox: &TestSandbox) -> u64 {
    let line = "rm -f fill; head -c 200000000 /dev/urandom > fill 2> /dev/null; sync fill; \
                du --block-size=1 fill | cut -f1; rm -f fill";
    sandbox.sh(line).await.out().parse().unwrap()
}

#[tokio::test]
async fn a_hundred_rounds_neither_lock_out_nor_give_more() {
    const LIMIT: u64 = 64 * MIB;
    let lock = shared().unwrap();
    let server = TestServer::builder().arg("--disk").arg("64M").start().await.unwrap();
    let client = server.client("rounds").unwrap();
    let mut sandbox = TestSandbox::create(&client, json!({ "timeout": 1_800_000 })).await;
    let rounds = std::env::var("BIVOUAC_TEST_ROUNDS").ok().and_then(|n| n.parse().ok());
    for round in 0..rounds.unwrap_or(30u32) {
        // What snapshots keep of earlier rounds is charged to somebody, and is not this one's to bear. Right
        // after a delete the limit may still be the old one.
        eventually("20 MB of room", SOON, async || {
            let line = format!("head -c 20000000 /dev/urandom > r{round} && sync r{round}");
            let ran = sandbox.sh(&line).await;
            if ran.exit == Some(0) { Ok(()) } else { Err(format!("round {round}: {}", ran.err())) }
        })
        .await;
        let before = sandbox.sh(&format!("sha256sum < r{round}")).await.good();
        let _ = live_snapshot(&sandbox).await;
        if round % 3 == 1 {
            let _ = sandbox.stop().await.ok();
            assert!(sandbox.resume().await);
        }
        if round % 10 == 4 {
            // This call copies what was kept last.
            let _ = sandbox.stop().await.ok();
            let body = json!({ "projectId": client.project() });
            let path = format!("/v2/sandboxes/{}/fork", sandbox.name);
            let forked = TestSandbox::of(&client, client.post(&path, &body).await.ok());
            let _ = sandbox.delete().await.ok();
            sandbox = forked;
        }
        assert_eq!(sandbox.sh(&format!("sha256sum < r{round}")).await.good(), before);
        if round % 5 == 2 {
            let present = held(&sandbox).await;
            eventually("the room that is left", SOON, async || {
                let room = room(&sandbox).await;
                assert!(present + room <= LIMIT + MIB, "round {round}: {present} and {room} more");
                // Metadata takes a little.
                let enough = present + room >= LIMIT - 8 * MIB;
                if enough { Ok(()) } else { Err(format!("round {round}: {present}, {room} more")) }
            })
            .await;
        }
        let _ = sandbox.sh(&format!("rm r{round}; sync")).await.good();
    }
    // When the snapshots go, so does what they kept, and the limit with it.
    let list = client.get("/v2/sandboxes/snapshots?limit=50").await.ok();
    for snapshot in list["snapshots"].as_array().unwrap() {
        let id = snapshot["id"].as_str().unwrap();
        let _ = client.delete(&format!("/v2/sandboxes/snapshots/{id}")).await;
    }
    let present = held(&sandbox).await;
    let room = room(&sandbox).await;
    assert!(present + room <= LIMIT + MIB, "{present} and {room} more");
    drop(server);
    drop(lock);
}

#[tokio::test]
async fn use_is_told_with_what_is_shared_apart() {
    let lock = shared().unwrap();
    let server = TestServer::builder().arg("--disk").arg("256M").start().await.unwrap();
    let client = server.client("usage").unwrap();
    let sandbox = TestSandbox::create(&client, json!({})).await;
    let _ = sandbox.sh("head -c 20000000 /dev/urandom > a && sync a").await.good();
    let number = |of: &Value, key: &str| of[key].as_u64().unwrap_or_else(|| panic!("{of}"));
    let near = |n: u64, wanted: u64| n.abs_diff(wanted) < 2_000_000;
    let alone = usage(&sandbox, "sandbox", &sandbox.name).await;
    assert!(alone["kind"] == "session" && number(&alone, "limitBytes") == 256 * MIB, "{alone}");
    assert!(near(number(&alone, "bytes"), 20_000_000), "{alone}");
    let snapshot = live_snapshot(&sandbox).await;
    let _ = sandbox.sh("head -c 10000000 /dev/urandom > b && sync b").await.good();
    let shared = usage(&sandbox, "sandbox", &sandbox.name).await;
    assert!(near(number(&shared, "bytes"), 30_000_000), "{shared}");
    assert!(near(number(&shared, "uniqueBytes"), 10_000_000), "{shared}");
    let kept = usage(&sandbox, "snapshot", &snapshot).await;
    assert!(near(number(&kept, "bytes"), 20_000_000) && number(&kept, "uniqueBytes") < 1_000_000);
    // What only the snapshot has is its alone.
    let _ = sandbox.sh("rm a; sync").await.good();
    eventually("the snapshot's own bytes", SOON, async || {
        let kept = usage(&sandbox, "snapshot", &snapshot).await;
        let own = number(&kept, "uniqueBytes");
        if near(own, 20_000_000) { Ok(()) } else { Err(kept.to_string()) }
    })
    .await;
    let namespace = format!("usage/{}", client.project());
    let text = server.cli(&["inspect", &sandbox.name, "-n", &namespace]).good();
    assert!(text.contains("disk") && text.contains("of 268.4 MB"), "{text}");
    for bad in ["", "sandbox=a&snapshot=b", "snapshot=x"] {
        let answer = client.get(&format!("/api/bivouac/v1/usage?{bad}")).await;
        assert_eq!(answer.status, 400, "{bad}: {answer}");
    }
    client.get("/api/bivouac/v1/usage?sandbox=none").await.refused(404, "not_found");
    drop(server);
    drop(lock);
}

/// A subvolume that no record knows.
fn plant(place: &Path) {
    let made = Command::new("btrfs").args(["-q", "subvolume", "create"]).arg(place).status();
    assert!(made.unwrap().success());
    fs::create_dir(place.join("u0")).unwrap();
    fs::write(place.join("u0/file"), vec![7; 3_000_000]).unwrap();
}

#[tokio::test]
async fn what_nobody_wants_is_told_and_removed() {
    let lock = shared().unwrap();
    let server = TestServer::start().await.unwrap();
    let client = server.client("gc").unwrap();
    let sandbox = TestSandbox::create(&client, json!({})).await;
    let _ = sandbox.sh("echo kept > file && sync file").await.good();
    let snapshot = live_snapshot(&sandbox).await;
    let lost = live_snapshot(&sandbox).await;
    let pool = server.data.join("pool");
    let tail = "0000000001zzzzzzzzzzzzzzzz";
    let (session, snap) = (format!("sbx_{tail}"), format!("snap_{tail}"));
    plant(&pool.join("snapshots").join(&snap));
    plant(&pool.join("sessions").join(&session));
    for folder in ["logs", "trust"] {
        fs::create_dir(pool.join(folder).join(&session)).unwrap();
        fs::write(pool.join(folder).join(&session).join("x"), "x").unwrap();
    }
    let path = pool.join("snapshots").join(&lost);
    let _ = Command::new("btrfs")
        .args(["property", "set", "-ts"])
        .arg(&path)
        .args(["ro", "false"])
        .status();
    let gone = Command::new("btrfs").args(["-q", "subvolume", "delete"]).arg(&path).status();
    assert!(gone.unwrap().success());
    let gc =
        async |dry: bool| client.post("/api/bivouac/v1/gc", &json!({ "dryRun": dry })).await.ok();
    let found = |answer: &Value| {
        let list = answer["orphans"].as_array().unwrap();
        let mut list: Vec<(String, String)> = list
            .iter()
            .filter(|one| one["kind"] != "image lease")
            .map(|one| {
                (one["kind"].as_str().unwrap().to_owned(), one["id"].as_str().unwrap().to_owned())
            })
            .collect();
        list.sort();
        list
    };
    let pair = |kind: &str, id: &str| (kind.to_owned(), id.to_owned());
    let wanted = [
        pair("certificates", &session),
        pair("logs", &session),
        pair("session", &session),
        pair("snapshot", &snap),
    ];
    // A rehearsal tells, and changes nothing; the same again says the same.
    for _ in 0..2 {
        let told = gc(true).await;
        assert_eq!(found(&told), wanted, "{told}");
        assert!(told["freedBytes"].as_u64().unwrap() > 5_000_000, "{told}");
        assert!(told["orphans"].as_array().unwrap().iter().all(|one| one["removed"] == false));
        assert_eq!(told["damage"][0]["id"], lost.as_str(), "{told}");
        assert!(told["damage"][0]["what"].as_str().unwrap().contains("has a record and no data"));
    }
    assert!(
        pool.join("snapshots").join(&snap).exists() && pool.join("logs").join(&session).exists()
    );
    let still = client.get(&format!("/v2/sandboxes/snapshots/{lost}")).await.ok();
    assert_eq!(still["snapshot"]["status"], "created");
    let done = gc(false).await;
    assert_eq!(found(&done), wanted, "{done}");
    assert!(done["orphans"].as_array().unwrap().iter().all(|one| one["error"].is_null()), "{done}");
    for (folder, name) in
        [("snapshots", &snap), ("sessions", &session), ("logs", &session), ("trust", &session)]
    {
        assert!(!pool.join(folder).join(name).exists(), "{folder}/{name}");
    }
    // The record without data says so, and nobody can start from it; nothing is left to do.
    let failed = client.get(&format!("/v2/sandboxes/snapshots/{lost}")).await.ok();
    assert_eq!(failed["snapshot"]["status"], "failed", "{failed}");
    let body = json!({ "projectId": client.project(), "source": { "type": "snapshot", "snapshotId": lost } });
    assert_eq!(client.post("/v3/sandboxes", &body).await.status, 410);
    let again = gc(false).await;
    assert!(found(&again).is_empty() && again["damage"].as_array().unwrap().is_empty(), "{again}");
    // What is wanted is there.
    assert_eq!(sandbox.sh("cat file").await.good(), "kept");
    let body = json!({ "projectId": client.project(), "source": { "type": "snapshot", "snapshotId": snapshot } });
    let other = TestSandbox::of(&client, client.post("/v3/sandboxes", &body).await.ok());
    assert_eq!(other.sh("cat file").await.good(), "kept");
    let told = server.cli(&["gc", "--dry-run", "--json"]).good();
    assert!(told.contains("\"dryRun\""), "{told}");
    drop(server);
    drop(lock);
}

#[tokio::test]
async fn a_full_host_takes_no_new_work() {
    let lock = shared().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let reserve = folder.path().join("reserve");
    fs::write(&reserve, "1").unwrap();
    let server = TestServer::builder()
        .env("BIVOUAC_TEST_RESERVE", reserve.to_string_lossy())
        .start()
        .await
        .unwrap();
    let client = server.client("full").unwrap();
    let sandbox = TestSandbox::create(&client, json!({})).await;
    let stopped = TestSandbox::create(&client, json!({})).await;
    let _ = stopped.stop().await.ok();
    // More than any disk has.
    fs::write(&reserve, (1u64 << 32).to_string()).unwrap();
    let body = json!({ "projectId": client.project() });
    let name = &sandbox.name;
    let refused = [
        client.post("/v3/sandboxes", &body).await,
        stopped.get(true).await,
        sandbox.post("/snapshot", &json!({})).await,
        client
            .post(&format!("/api/bivouac/v1/sandboxes/{name}/snapshots"), &json!({ "live": true }))
            .await,
        client.post(&format!("/v2/sandboxes/{name}/fork"), &body).await,
        client.post("/v2/sandboxes/drives/d", &body).await,
    ];
    for answer in refused {
        answer.refused(429, "no_capacity");
        let text = answer.message();
        assert!(text.contains("reserve") && text.contains("MiB"), "{text}");
    }
    // What runs goes on, can be kept by its end, and room can be made.
    assert_eq!(sandbox.sh("echo on").await.good(), "on");
    let kept = sandbox.stop().await.ok();
    assert!(kept["snapshot"]["id"].is_string(), "{kept}");
    let _ = stopped.delete().await.ok();
    fs::write(&reserve, "1").unwrap();
    let mut sandbox = sandbox;
    assert!(sandbox.resume().await);
    drop(server);
    drop(lock);
}
