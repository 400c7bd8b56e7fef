//! Live snapshots, forks of running sandboxes, rollback: on the real thing.

use std::collections::BTreeSet;

use bivouac_testkit::{Client, LONG, TestSandbox, eventually};
use reqwest::Method;
use serde_json::{Value, json};

use crate::server;

fn own(name: &str, tail: &str) -> String {
    format!("/api/bivouac/v1/sandboxes/{name}/{tail}")
}

async fn live(client: &Client, name: &str, body: Value) -> Value {
    let mut whole = json!({ "live": true });
    whole.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
    let answer = client.post(&own(name, "snapshots"), &whole).await;
    assert_eq!(answer.status, 201, "{answer}");
    answer.json["snapshot"].clone()
}

async fn forks(client: &Client, name: &str, body: Value) -> Vec<TestSandbox> {
    let answer = client.post(&own(name, "forks"), &body).await;
    assert_eq!(answer.status, 201, "{answer}");
    let made = answer.json["sandboxes"].as_array().unwrap().clone();
    made.into_iter().map(|view| TestSandbox::of(client, view)).collect()
}

#[tokio::test]
async fn a_live_snapshot_holds_what_was_written_and_the_sandbox_goes_on() {
    let server = server().await;
    let client = server.team("live");
    let sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let counter = "i=0; while :; do i=$((i+1)); echo $i >> count; done";
    let busy = sandbox.start(&["sh", "-c", counter], json!({})).await;
    let _ = sandbox
        .sh("head -c 3000000 /dev/urandom > data; ln -s data link; sha256sum data > sum")
        .await
        .good();
    let taken = live(&client, "box", json!({ "labels": { "step": "one" } })).await;
    assert!(taken["stallUs"].as_i64().unwrap() > 0, "{taken}");
    assert_eq!(taken["labels"]["step"], "one");
    assert_eq!(sandbox.get(false).await.ok()["session"]["id"], json!(sandbox.session));
    assert!(sandbox.command(&busy).await.ok()["command"]["exitCode"].is_null(), "it goes on");
    let before = sandbox.sh("wc -l < count").await.good();
    eventually("the program writes on", LONG, async || {
        (sandbox.sh("wc -l < count").await.good() != before).then_some(()).ok_or("not yet")
    })
    .await;
    let _ = sandbox.kill(&busy, 9).await;
    let path = format!("/v2/sandboxes/snapshots/{}", taken["id"].as_str().unwrap());
    let sized = eventually("it is measured", LONG, async || {
        let shown = client.get(&path).await.ok()["snapshot"].clone();
        shown.get("sizeEstimated").is_none().then_some(shown).ok_or("not yet")
    })
    .await;
    assert!(sized["sizeBytes"].as_i64().unwrap() >= 3_000_000, "{sized}");

    let source = json!({ "type": "snapshot", "snapshotId": taken["id"] });
    let copy = TestSandbox::create(&client, json!({ "name": "copy", "source": source })).await;
    let _ = copy.sh("sha256sum -c sum && test -L link").await.good();
    // Every line is whole: nothing was torn in the middle of a write.
    let _ = copy.sh("awk '$1 != NR { exit 1 }' count").await.good();
    for sandbox in [sandbox, copy] {
        let _ = sandbox.delete().await.ok();
    }
}

#[tokio::test]
async fn twenty_forks_of_a_running_box_are_machines_of_their_own() {
    let server = server().await;
    let client = server.team("forks");
    let body = json!({ "name": "box", "ports": [3000], "env": { "KEPT": "yes" } });
    let sandbox = TestSandbox::create(&client, body).await;
    let prepare = "mkdir -p /etc/ssh /var/lib/systemd && \
        for k in ed25519 ecdsa; do ssh-keygen -q -t $k -N '' -f /etc/ssh/ssh_host_${k}_key; done && \
        echo seed > /var/lib/systemd/random-seed && \
        mkdir tree && for d in $(seq 60); do mkdir tree/$d; for f in $(seq 50); do \
        head -c 4000 /dev/zero > tree/$d/$f; done; done";
    let _ = sandbox.sudo(prepare).await.good();
    let key = "cat /etc/ssh/ssh_host_ed25519_key.pub";
    let mut keys = BTreeSet::from([sandbox.sh(key).await.good()]);
    let mut ids = BTreeSet::from([sandbox.sh("cat /etc/machine-id").await.good()]);
    let twins = forks(&client, "box", json!({ "count": 20, "name": "twin" })).await;
    assert_eq!(twins.len(), 20);
    let mut subdomains = BTreeSet::new();
    for (index, twin) in twins.iter().enumerate() {
        assert_eq!(twin.name, format!("twin-{}", index + 1));
        assert_eq!(twin.sh("hostname; echo $KEPT").await.good(), format!("{}\nyes", twin.name));
        assert!(ids.insert(twin.sh("cat /etc/machine-id").await.good()), "a machine id twice");
        assert_ne!(twin.sh("cat /var/lib/systemd/random-seed").await.exit, Some(0));
        assert_eq!(twin.sh("find tree -type f | wc -l").await.good(), "3000");
        let _ = twin.sh(&format!("echo {index} > own")).await.good();
        assert!(subdomains.insert(twin.view["routes"][0]["subdomain"].to_string()));
    }
    for twin in &twins[..3] {
        assert!(keys.insert(twin.sh(key).await.good()), "a host key twice");
        // The second kind comes by itself.
        eventually("the second key", LONG, async || {
            (twin.sh("test -s /etc/ssh/ssh_host_ecdsa_key.pub").await.exit == Some(0))
                .then_some(())
                .ok_or("not yet")
        })
        .await;
    }
    assert_ne!(sandbox.sh("cat own").await.exit, Some(0), "the source has none of it");
    assert_eq!(twins[7].sh("cat own").await.good(), "7");
    let listed = client.get("/v2/sandboxes?limit=50").await.ok();
    assert_eq!(listed["sandboxes"].as_array().unwrap().len(), 21);
    let hidden = client.get("/v2/sandboxes/snapshots").await.ok();
    assert_eq!(hidden["snapshots"].as_array().unwrap().len(), 0, "{hidden}");
    let shared = twins[0].view["sandbox"]["currentSnapshotId"].as_str().unwrap().to_owned();
    for twin in twins {
        let _ = twin.delete().await.ok();
    }
    let path = format!("/v2/sandboxes/snapshots/{shared}");
    eventually("what they started from is gone", LONG, async || {
        (client.get(&path).await.ok()["snapshot"]["status"] == "deleted")
            .then_some(())
            .ok_or("not yet")
    })
    .await;
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn forks_that_cannot_all_be_are_none() {
    let server = server().await;
    let client = server.team("none");
    let sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let taken = TestSandbox::create(&client, json!({ "name": "twin-3" })).await;
    let answer = client.post(&own("box", "forks"), &json!({ "count": 4, "name": "twin" })).await;
    assert_eq!(answer.status, 400, "{answer}");
    assert!(answer.json["error"]["message"].as_str().unwrap().contains("twin-3"), "{answer}");
    let listed = client.get("/v2/sandboxes?sortBy=name&namePrefix=twin").await.ok();
    assert_eq!(listed["sandboxes"].as_array().unwrap().len(), 1, "{listed}");
    for (body, status) in [(json!({ "count": 0 }), 400), (json!({ "nonsense": 1 }), 400)] {
        let answer = client.post(&own("box", "forks"), &body).await;
        assert_eq!(answer.status, status, "{body}: {answer}");
    }
    client.post(&own("none", "forks"), &json!({})).await.refused(404, "not_found");
    for sandbox in [sandbox, taken] {
        let _ = sandbox.delete().await.ok();
    }
}

#[tokio::test]
async fn a_rollback_goes_back_and_forward() {
    let server = server().await;
    let client = server.team("rollback");
    let mut sandbox = TestSandbox::create(&client, json!({ "name": "box", "ports": [3000] })).await;
    let host_key = "ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key";
    let _ = sandbox.sudo(&format!("mkdir -p /etc/ssh && {host_key}")).await.good();
    let key = sandbox.sudo("cat /etc/ssh/ssh_host_ed25519_key").await.good();
    let _ = sandbox.sh("echo one > file").await.good();
    let taken = live(&client, "box", json!({})).await;
    let _ = sandbox.sh("echo two > file").await.good();
    let done = client.post(&own("box", "rollback"), &json!({})).await.ok();
    assert_eq!(done["snapshot"]["id"], taken["id"]);
    assert_eq!(done["kept"]["purpose"], "rollback");
    assert_eq!(done["routes"], sandbox.view["routes"]);
    sandbox = TestSandbox::of(&client, done.clone());
    assert_eq!(sandbox.sh("cat file").await.good(), "one");
    let same = sandbox.sudo("cat /etc/ssh/ssh_host_ed25519_key").await.good();
    assert_eq!(same, key, "it is the same machine");
    let body = json!({ "snapshotId": done["kept"]["id"], "discard": true });
    let done = client.post(&own("box", "rollback"), &body).await.ok();
    assert!(done.get("kept").is_none(), "{done}");
    sandbox = TestSandbox::of(&client, done);
    assert_eq!(sandbox.sh("cat file").await.good(), "two");
    // A stopped one stays so.
    let _ = sandbox.stop().await.ok();
    let body = json!({ "snapshotId": taken["id"] });
    let done = client.post(&own("box", "rollback"), &body).await.ok();
    assert_eq!(done["sandbox"]["status"], "stopped");
    assert!(sandbox.resume().await);
    assert_eq!(sandbox.sh("cat file").await.good(), "one");
    let path = format!("/v2/sandboxes/snapshots/{}", taken["id"].as_str().unwrap());
    let _ = client.delete(&path).await.ok();
    let gone = client.post(&own("box", "rollback"), &body).await;
    gone.refused(410, "snapshot_not_found");
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn labels_are_set_changed_and_looked_for() {
    let server = server().await;
    let client = server.team("labels");
    let sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    let taken = live(&client, "box", json!({ "labels": { "a": "1", "b": "x:y" } })).await;
    let _ = live(&client, "box", json!({})).await;
    let found = async |label: &str| {
        let path = format!("/v2/sandboxes/snapshots?labels={label}");
        client.get(&path).await.ok()["snapshots"].as_array().unwrap().len()
    };
    assert_eq!((found("a:1").await, found("b:x:y").await, found("a:2").await), (1, 1, 0));
    let path = format!("/api/bivouac/v1/snapshots/{}", taken["id"].as_str().unwrap());
    let body = json!({ "labels": { "a": "2", "b": null } });
    let changed = client.send(client.request(Method::PATCH, &path).json(&body)).await.ok();
    assert_eq!(changed["snapshot"]["labels"], json!({ "a": "2" }));
    assert_eq!((found("a:1").await, found("a:2").await), (0, 1));
    client.get("/v2/sandboxes/snapshots?labels=a").await.refused(400, "bad_request");
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn ten_cycles_of_write_stop_resume_keep_every_byte() {
    let server = server().await;
    let client = server.team("cycles");
    let mut sandbox = TestSandbox::create(&client, json!({ "name": "box" })).await;
    for round in 0..10 {
        let line = format!(
            "head -c 200000 /dev/urandom > f{round}; mv f{round} d{round}; sha256sum d* > sums"
        );
        let _ = sandbox.sh(&line).await.good();
        let _ = sandbox.stop().await.ok();
        assert!(sandbox.resume().await);
        let checked = sandbox.sh("sha256sum -c sums | grep -c OK").await.good();
        assert_eq!(checked, (round + 1).to_string());
    }
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn a_file_written_just_before_the_time_is_over_is_there() {
    let server = server().await;
    let client = server.team("late");
    let mut sandbox = TestSandbox::create(&client, json!({ "name": "box", "timeout": 3000 })).await;
    let line = "i=0; while :; do i=$((i+1)); echo $i > late; sleep 0.1; done";
    let _ = sandbox.start(&["sh", "-c", line], json!({})).await;
    eventually("its time is over", LONG, async || {
        (sandbox.get(false).await.ok()["session"]["status"] == "stopped")
            .then_some(())
            .ok_or("not yet")
    })
    .await;
    assert!(sandbox.resume().await);
    // A write of each tenth of a second until the end: that of the last second is there.
    let last: u32 = sandbox.sh("cat late").await.good().parse().unwrap();
    assert!(last >= 10, "{last}");
    let _ = sandbox.delete().await.ok();
}
