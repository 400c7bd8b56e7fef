//! The engine goes away and comes back: egress goes on, by the policy that was in force.

use bivouac_testkit::{LONG, TestSandbox, TestServer, World, eventually, shared};
use serde_json::{Value, json};

use crate::fresh;
use crate::lifecycle::says;
use crate::tools::{PLAYED, begin};

const OK: &str = "198.51.100.10";

/// How many requests for a path arrived with a header.
fn arrived(world: &World, path: &str, who: &str) -> usize {
    let seen = world.seen();
    seen.iter().filter(|s| s.target.starts_with(path) && s.header("x-who").join(",") == who).count()
}

async fn more(what: &str, count: impl Fn() -> usize) {
    let before = count();
    eventually(what, LONG, async || {
        let now = count();
        if now >= before + 5 { Ok(()) } else { Err(format!("{before} and now {now}")) }
    })
    .await;
}

#[tokio::test]
async fn egress_goes_on_while_nobody_serves_and_obeys_again_afterwards() {
    let lock = shared().unwrap();
    let world = World::new().unwrap();
    world.enter().unwrap();
    let mut builder = TestServer::builder().embedded_database();
    for arg in world.serve_args() {
        builder = builder.arg(arg);
    }
    let mut server = builder.start().await.unwrap();
    let (ruled, plain) = (fresh("ok.test"), fresh("ok.test"));
    for name in [&ruled, &plain] {
        world.name(name, &[OK]);
    }
    let client = server.client("restart").unwrap();
    let secret = async |client: &bivouac_testkit::Client, value: &str| {
        let _ = client.put("/v2/secrets/WHO", &json!({ "value": value })).await.ok();
    };
    secret(&client, "one").await;
    let rule = json!([{"transform": [{"headers": {"x-who": "${secret:WHO}"}}]}]);
    let policy = json!({"allow": {ruled.as_str(): rule, plain.as_str(): []}});
    let body = json!({"persistent": false, "networkPolicy": policy});
    let sandbox = TestSandbox::create(&client, body).await;
    let request =
        |name: &str, path: &str| format!("GET {path} HTTP/1.1\\r\\nHost: {name}\\r\\n\\r\\n");
    let hold = async |name: &str, path: &str| {
        let args = ["hold", PLAYED, "443", name, &request(name, path), "0.05", "300"];
        let id = begin(&sandbox, &args).await;
        says(&sandbox, &id, "alive").await;
        id
    };
    let kept = hold(&ruled, "/kept-ruled").await;
    let passed = hold(&plain, "/kept-plain").await;
    let line = format!(
        "while :; do curl -sS -m 5 -o /dev/null https://{ruled}/new-ruled; curl -ksS -m 5 -o /dev/null https://{plain}/new-plain; sleep 0.05; done"
    );
    let news = sandbox.start(&["sh", "-c", &line], json!({})).await;
    let ways =
        [("/kept-ruled", "one"), ("/kept-plain", ""), ("/new-ruled", "one"), ("/new-plain", "")];
    for (path, who) in ways {
        more(path, || arrived(&world, path, who)).await;
    }

    server.kill9().unwrap();
    // Nobody serves, and each way goes on.
    for (path, who) in ways {
        more(&format!("{path} without an engine"), || arrived(&world, path, who)).await;
    }
    server.restart().await.unwrap();
    let sandbox = TestSandbox { client: server.client("restart").unwrap(), ..sandbox };
    for (path, who) in ways {
        more(&format!("{path} with the next engine"), || arrived(&world, path, who)).await;
    }
    let view = sandbox.get(false).await.ok();
    assert_eq!(view["session"]["id"], json!(sandbox.session), "the same session");
    for id in [&kept, &passed, &news] {
        let record = sandbox.command(id).await.ok();
        assert!(record["command"]["exitCode"].is_null(), "a connection broke: {record}");
    }

    // A new value counts, a new policy counts, and what it forbids is cut before the call answers.
    secret(&sandbox.client, "two").await;
    more("the rotated value", || arrived(&world, "/new-ruled", "two")).await;
    let set = async |policy: &Value| {
        let _ = sandbox.post("/network-policy", policy).await.ok();
    };
    set(&json!({"mode": "deny-all"})).await;
    for id in [&kept, &passed] {
        let _ = sandbox.wait(id).await;
        let out = sandbox.output(id).await.out();
        assert!(out.ends_with("closed") || out.contains("broken"), "{out}");
    }
    let quiet = world.seen().len();
    let probe = format!("curl -ksS -m 5 -o /dev/null https://{plain}/denied");
    assert_ne!(sandbox.sh(&probe).await.exit, Some(0));
    assert_eq!(world.seen().len(), quiet, "something passed under deny-all");
    set(&policy).await;
    more("requests after it is open again", || arrived(&world, "/new-ruled", "two")).await;
    let _ = sandbox.kill(&news, 9).await;
    drop((server, lock));
}
