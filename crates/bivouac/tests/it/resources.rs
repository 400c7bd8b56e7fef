//! What a sandbox may use by its own measure, and what it is seen to use: its disk, its network.

use bivouac_testkit::{Cli, LONG, TestServer, eventually, shared};
use serde_json::{Value, json};

use crate::sandbox;

const MIB: u64 = 1 << 20;

fn cli(server: &TestServer, namespace: &str, args: &[&str]) -> Cli {
    let all: Vec<&str> = ["-n", namespace].iter().chain(args).copied().collect();
    server.cli(&all)
}

/// What `df` says inside, bytes.
fn df(server: &TestServer, namespace: &str, name: &str) -> u64 {
    let line = ["exec", name, "--", "df", "-B1", "--output=size", "/"];
    let text = cli(server, namespace, &line).good();
    text.lines().last().unwrap().trim().parse().unwrap_or_else(|_| panic!("{text}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_has_a_disk_of_its_own_size() {
    let lock = shared().unwrap();
    let server = TestServer::builder().arg("--disk").arg("512M").start().await.unwrap();
    let ns = "disk/own";
    let run = |args: &[&str]| cli(&server, ns, args);
    let made = run(&["--json", "create", "small", "--disk", "64M"]).json();
    assert_eq!(made["sandbox"]["diskBytes"], 64 * MIB, "{made}");
    let plain = run(&["--json", "create", "plain"]).json();
    assert!(plain["sandbox"].get("diskBytes").is_none(), "{plain}");
    assert_eq!(df(&server, ns, "small"), 64 * MIB);
    assert_eq!(df(&server, ns, "plain"), 512 * MIB);
    // It holds, also against root, and what is told is the same everywhere.
    let fill = "head -c 100M /dev/urandom > big; echo $?";
    let full = run(&["exec", "-u", "root", "small", "--", "sh", "-c", fill]).run();
    assert_eq!(full.stdout, b"1\n", "{full:?}");
    let usage = &run(&["--json", "inspect", "small"]).json()["usage"];
    assert_eq!(usage["limitBytes"], 64 * MIB, "{usage}");
    assert!(usage["bytes"].as_u64().unwrap() <= 64 * MIB, "{usage}");
    let top = run(&["--json", "top"]).json();
    let limits: Vec<&Value> =
        top.as_array().unwrap().iter().map(|of| &of["diskLimitBytes"]).collect();
    assert_eq!(limits, [&json!(512 * MIB), &json!(64 * MIB)], "{top}");
    // A copy into it that does not fit says so, and what to do.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    let noise: Vec<u8> =
        (0..4_000_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    std::fs::write(&file, noise).unwrap();
    let refused = run(&["cp", file.to_str().unwrap(), "small:"]).run();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("disk limit") && said.contains("bivouac resize"), "{said}");
    // Another size is the next session's.
    let resized = run(&["--json", "resize", "small", "--disk", "128M"]).json();
    assert_eq!(resized["sandbox"]["diskBytes"], 128 * MIB, "{resized}");
    assert_eq!(resized["sandbox"]["vcpus"], 2);
    assert_eq!(df(&server, ns, "small"), 64 * MIB, "what runs has what it had");
    let _ = run(&["stop", "small"]).good();
    assert_eq!(df(&server, ns, "small"), 128 * MIB);
    let more = "rm -f more; head -c 30M /dev/urandom > more; echo $?";
    assert_eq!(run(&["exec", "small", "--", "sh", "-c", more]).good(), "0\n");
    // CPUs alone leave the disk as it is; forks take it along, or have their own.
    let _ = run(&["resize", "small", "--vcpus", "4"]).good();
    assert_eq!(run(&["--json", "inspect", "small"]).json()["sandbox"]["diskBytes"], 128 * MIB);
    let _ = run(&["fork", "small", "twin"]).good();
    assert_eq!(df(&server, ns, "twin"), 128 * MIB);
    let own = run(&["--json", "fork", "small", "other", "--disk", "256M"]).json();
    assert_eq!(own["sandboxes"][0]["sandbox"]["vcpus"], 4, "{own}");
    assert_eq!(df(&server, ns, "other"), 256 * MIB);
    // More than the engine gives, and less than a session needs, is refused and changes nothing.
    for size in ["513M", "1T"] {
        for line in [&["create", "never", "--disk", size][..], &["resize", "small", "--disk", size]]
        {
            let refused = run(line).run();
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert_eq!(refused.status.code(), Some(1), "{line:?}: {said}");
            assert!(said.contains("--disk"), "{line:?}: {said}");
        }
    }
    assert_eq!(run(&["resize", "small", "--disk", "1M"]).run().status.code(), Some(2));
    assert_eq!(run(&["resize", "small"]).run().status.code(), Some(2));
    let client = server.client("disk").unwrap();
    for bytes in [json!(-1), json!(1), json!(600 * MIB)] {
        let body = json!({ "resources": { "vcpus": 2, "diskBytes": bytes } });
        client.patch("/v2/sandboxes/small?projectId=own", &body).await.refused(400, "bad_request");
    }
    assert_eq!(run(&["--json", "inspect", "small"]).json()["sandbox"]["diskBytes"], 128 * MIB);
    // 0 is the engine's size again.
    let body = json!({ "resources": { "vcpus": 2, "diskBytes": 0 } });
    let again = client.patch("/v2/sandboxes/small?projectId=own", &body).await.ok();
    assert!(again["sandbox"].get("diskBytes").is_none(), "{again}");
    // What each holds, and what of that is its alone.
    let listed = run(&["--json", "ls", "--usage"]).json();
    for of in listed.as_array().unwrap() {
        let usage = &of["usage"];
        assert!(usage["bytes"].is_u64() && usage["limitBytes"].is_u64(), "{of}");
    }
    let table = run(&["ls", "--usage"]).good();
    assert!(table.lines().next().unwrap().contains("DISK   "), "{table}");
    let _ = run(&["rm", "--snapshots", "small", "plain", "twin", "other"]).good();
    drop(server);
    drop(lock);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_keeps_the_size_of_what_runs() {
    let lock = shared().unwrap();
    let mut server = TestServer::builder().keep_sandboxes().start().await.unwrap();
    let ns = "disk/kept";
    let _ = cli(&server, ns, &["create", "box", "--disk", "64M", "--ephemeral"]).good();
    server.restart().await.unwrap();
    assert_eq!(df(&server, ns, "box"), 64 * MIB);
    let fill = ["exec", "box", "--", "sh", "-c", "head -c 100M /dev/urandom > big; echo $?"];
    assert_eq!(cli(&server, ns, &fill).good(), "1\n");
    let _ = cli(&server, ns, &["rm", "box"]).good();
    drop(server);
    drop(lock);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_goes_over_the_network_is_counted_by_sandbox() {
    let (server, one) = sandbox("net-count").await;
    let client = server.team("net-count");
    let other = bivouac_testkit::TestSandbox::create(&client, json!({ "persistent": false })).await;
    let counts = async |name: &str| {
        let stats = client.get("/api/bivouac/v1/stats").await.ok();
        let stats = stats["stats"].as_array().unwrap().clone();
        let of = stats.into_iter().find(|of| of["sandbox"] == *name).unwrap();
        let number = |key: &str| of[key].as_u64().unwrap_or_else(|| panic!("{key}: {of}"));
        (number("networkReceivedBytes"), number("networkSentBytes"))
    };
    let (before, quiet) = (counts(&one.name).await, counts(&other.name).await);
    // Names that are asked for go over eth0 and back, whatever becomes of them.
    let asks = "for i in $(seq 1 50); do getent hosts no-such-name-$i.invalid; done; true";
    let _ = one.sh(asks).await.good();
    let after = counts(&one.name).await;
    assert!(after.1 >= before.1 + 50 * 40, "sent: {before:?} then {after:?}");
    assert!(after.0 > before.0, "received: {before:?} then {after:?}");
    assert!(counts(&other.name).await.1 < quiet.1 + 50 * 40, "another's is not its");
    // A namespace that is made inside, with an eth0 of its own, is not taken for the sandbox's.
    let nested = "unshare --user --map-root-user --net --pid --fork sleep 86100 &";
    let _ = one.sudo(nested).await;
    let seen = counts(&one.name).await;
    assert!(seen.1 >= after.1, "{after:?} then {seen:?}");
    // Root inside may take its device away: then there are no numbers, and everything else is told all the same.
    let _ = one.sudo("ip link set eth0 down; ip link set eth0 name gone0").await.good();
    let renamed = eventually("the counters to be absent", LONG, async || {
        let stats = client.get("/api/bivouac/v1/stats").await.ok();
        let of =
            stats["stats"].as_array().unwrap().iter().find(|of| of["sandbox"] == one.name).cloned();
        let of = of.unwrap();
        if of.get("networkSentBytes").is_none() { Ok(of) } else { Err(of) }
    })
    .await;
    assert!(renamed["memoryBytes"].is_u64(), "{renamed}");
    let _ = other.delete().await;
}
