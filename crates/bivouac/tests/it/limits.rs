//! Limits hit the sandbox that has them, and only it.

use std::time::{Duration, Instant};

use bivouac_testkit::{LONG, TestSandbox, TestServer, shared};
use serde_json::json;

use crate::sandbox;

async fn alive(sandbox: &TestSandbox) {
    assert_eq!(sandbox.run(&["echo", "alive"]).await.good(), "alive");
}

#[tokio::test]
async fn out_of_memory_kills_the_hog_alone() {
    let (_server, neighbour) = sandbox("memory").await;
    let body = json!({ "persistent": false, "resources": { "vcpus": 1 } });
    let hog = TestSandbox::create(&neighbour.client, body).await;
    let bystander = hog.start(&["sleep", "86040"], json!({})).await;
    // Three gibibytes in a sandbox that has two, touched page by page.
    let script = "my @x; for (1..3072) { push @x, 'x' x 1048576 } print scalar @x";
    let ran = hog.run(&["perl", "-e", script]).await;
    assert_eq!(ran.exit, Some(137), "{} {}", ran.out(), ran.err());
    assert_eq!(ran.command["reason"], "out_of_memory", "{}", ran.command);
    assert!(ran.command["reasonText"].as_str().unwrap().contains("memory"), "{}", ran.command);
    alive(&hog).await;
    alive(&neighbour).await;
    let _ = hog.kill(&bystander, 9).await;
    // A command that ends well afterwards is not blamed.
    let ran = hog.run(&["true"]).await;
    assert!(ran.command["reason"].is_null(), "{}", ran.command);
    // Files in memory count as memory.
    let ran = hog.sh("head -c 3000000000 /dev/zero > /dev/shm/big; ls -l /dev/shm/big").await;
    assert!(ran.exit != Some(0) || !ran.out().contains(" 3000000000 "), "{}", ran.out());
    let _ = hog.sh("rm -f /dev/shm/big").await;
    alive(&hog).await;
}

#[tokio::test]
async fn a_fork_bomb_stays_inside() {
    let (_server, neighbour) = sandbox("forks").await;
    let bomber = TestSandbox::create(&neighbour.client, json!({ "persistent": false })).await;
    let script = "$| = 1; my $n = 0; while (1) { my $p = fork; if (!defined $p) { last } if (!$p) { sleep 86041; exit } $n++ } \
                  print \"full at $n\\n\"; sleep 86041";
    let id = bomber.start(&["perl", "-e", script], json!({})).await;
    let mut lines = bomber.logs(&id).await;
    let line = lines.next(LONG).await.unwrap().unwrap();
    assert_eq!(line["stream"], "stdout", "{line}");
    // While it is full: the next command works, and the neighbour does not notice.
    alive(&bomber).await;
    alive(&neighbour).await;
    let _ = bomber.kill(&id, 9).await.ok();
    let record = bomber.wait(&id).await;
    assert_eq!(record["exitCode"], 137);
    alive(&bomber).await;
    // The classic, with a time limit that takes the whole tree down.
    let ran = bomber
        .run_with(&["bash", "-c", ":(){ :|:& };:; sleep 86042"], json!({ "timeout": 4000 }))
        .await;
    assert_ne!(ran.exit, Some(0), "{}", ran.command);
    alive(&neighbour).await;
    alive(&bomber).await;
    let ran = bomber.sh("for i in $(seq 100); do true & done; wait; echo all").await;
    assert_eq!(ran.good(), "all", "the sandbox can fork again");
}

#[tokio::test]
async fn a_full_disk_is_its_own() {
    let lock = shared().unwrap();
    let server = TestServer::builder().env("BIVOUAC_TEST_DISK_MB", "200").start().await.unwrap();
    let client = server.client("disk").unwrap();
    let full = TestSandbox::create(&client, json!({})).await;
    let neighbour = TestSandbox::create(&client, json!({ "persistent": false })).await;
    let ran = full.sh("head -c 300000000 /dev/urandom > big").await;
    assert_ne!(ran.exit, Some(0), "300 MB fit into 200");
    let text = ran.err().to_lowercase();
    assert!(text.contains("quota") || text.contains("space"), "{text}");
    alive(&full).await;
    alive(&neighbour).await;
    // The file API says it too, with a 4xx, and goes on.
    let answer = full
        .write(
            "/vercel/sandbox",
            bivouac_testkit::Tar::new().file("more", &vec![7; 40 << 20]).gzip(),
        )
        .await;
    assert!((400..500).contains(&answer.status), "{answer}");
    assert!(!answer.message().is_empty(), "{answer}");
    // The neighbour can write, and room that is freed can be used again.
    let _ = neighbour.sh("head -c 100000000 /dev/urandom > big && sync big").await.good();
    let _ = full.sh("rm -f big more; sync").await;
    bivouac_testkit::eventually("freed room", LONG, async || {
        let ran = full.sh("head -c 50000000 /dev/urandom > again && sync again").await;
        if ran.exit == Some(0) { Ok(()) } else { Err(ran.err()) }
    })
    .await;
    // A full sandbox can still be stopped, kept and started.
    let _ = full.sh("head -c 300000000 /dev/urandom > big").await;
    let stopped = full.stop().await.ok();
    assert!(stopped["snapshot"]["sizeBytes"].as_u64().unwrap() > 50_000_000, "{stopped}");
    let mut full = full;
    assert!(full.resume().await);
    alive(&full).await;
    assert_eq!(full.sh("stat -c %s again").await.good(), "50000000");
    // The limit holds across sessions: it is not as if the room began anew.
    assert_ne!(full.sh("head -c 180000000 /dev/urandom > next").await.exit, Some(0));
    drop(server);
    drop(lock);
}

#[tokio::test]
async fn cpu_time_is_bounded() {
    let (_server, neighbour) = sandbox("cpu").await;
    let body = json!({ "persistent": false, "resources": { "vcpus": 1 } });
    let one = TestSandbox::create(&neighbour.client, body).await;
    let script = "for i in 1 2 3 4; do (timeout 3 sh -c 'while :; do :; done') & done; wait; cat /proc/$$/stat | awk '{ print $16 + $17 }'";
    let start = Instant::now();
    let ticks: f64 = one.sh(script).await.good().parse().unwrap();
    let (used, wall) = (ticks / 100.0, start.elapsed().as_secs_f64());
    // Only an upper bound: a busy machine gives less.
    assert!(used <= wall * 1.0 + 0.6, "{used} s of CPU in {wall} s with one vcpu");
    assert!(used > 0.2, "positive control: {used}");
}

#[tokio::test]
async fn more_cpus_than_the_host_has_are_accepted() {
    let (_server, neighbour) = sandbox("cpus").await;
    let body = json!({ "persistent": false, "resources": { "vcpus": 32 } });
    let many = TestSandbox::create(&neighbour.client, body).await;
    assert_eq!(many.view["session"]["vcpus"], 32);
    assert_eq!(many.view["session"]["memory"], 65_536);
    let host = std::thread::available_parallelism().unwrap().get();
    assert_eq!(many.run(&["nproc"]).await.good(), host.to_string());
}

#[tokio::test]
async fn a_stop_ends_even_a_bomb() {
    let (_server, neighbour) = sandbox("stop-bomb").await;
    let bomber = TestSandbox::create(&neighbour.client, json!({ "persistent": false })).await;
    let bomb = "trap '' TERM INT HUP QUIT; while :; do (sleep 86043 &) ; setsid sleep 86043 & done";
    let _ = bomber.start(&["bash", "-c", bomb], json!({})).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    let stopped = bomber.stop().await.ok();
    assert_eq!(stopped["session"]["status"], "stopped");
    alive(&neighbour).await;
    let _ = bomber.delete().await.ok();
}
