//! Hundreds at once: all answer, all go, nothing stays; with a crash in the middle too.

use std::time::Instant;

use bivouac_testkit::{LONG, TestSandbox, TestServer, Traces, exclusive};
use serde_json::json;
use tokio::task::JoinSet;

use crate::crash::{again, assert_same_but_engine};

/// How many: `BIVOUAC_TEST_MANY`, else two hundred.
fn many() -> usize {
    std::env::var("BIVOUAC_TEST_MANY").ok().and_then(|n| n.parse().ok()).unwrap_or(200)
}

async fn join<T: 'static>(tasks: &mut JoinSet<T>) -> Vec<T> {
    let mut all = Vec::new();
    while let Some(done) = tokio::time::timeout(LONG, tasks.join_next()).await.expect("no progress")
    {
        all.push(done.unwrap());
    }
    all
}

async fn create_all(server: &TestServer) -> Vec<TestSandbox> {
    let client = server.client("many").unwrap();
    let mut tasks = JoinSet::new();
    for i in 0..many() {
        let client = client.clone();
        tasks.spawn(async move {
            let body = json!({ "name": format!("box-{i}"), "persistent": i % 10 == 0, "timeout": 3_600_000 });
            TestSandbox::create(&client, body).await
        });
    }
    join(&mut tasks).await
}

/// Every one answers with its own name: nobody answers for another.
async fn ask_all(sandboxes: &[TestSandbox]) {
    let mut tasks = JoinSet::new();
    for sandbox in sandboxes.iter().cloned() {
        tasks.spawn(async move {
            assert_eq!(sandbox.run(&["hostname"]).await.good(), sandbox.name);
            let _ = sandbox.start(&["sleep", "86090"], json!({})).await;
        });
    }
    join(&mut tasks).await;
}

async fn delete_all(sandboxes: Vec<TestSandbox>) {
    let mut tasks = JoinSet::new();
    for sandbox in sandboxes {
        tasks.spawn(async move {
            let _ = sandbox.delete().await.ok();
        });
    }
    join(&mut tasks).await;
}

/// A server with everything made that the first sandboxes make for all.
async fn warm() -> (TestServer, Traces) {
    let mut server = TestServer::start().await.unwrap();
    for _ in 0..2 {
        let sandbox =
            TestSandbox::create(&server.client("warm").unwrap(), json!({ "name": "warm" })).await;
        let _ = sandbox.delete().await.ok();
        server.restart().await.unwrap();
    }
    let before = Traces::before(&server.data);
    (server, before)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_answer_and_all_go() {
    let lock = exclusive().unwrap();
    let (server, before) = warm().await;
    let start = Instant::now();
    let sandboxes = create_all(&server).await;
    assert_eq!(sandboxes.len(), many());
    eprintln!("{} created after {:?}", many(), start.elapsed());
    ask_all(&sandboxes).await;
    eprintln!("all answered after {:?}", start.elapsed());
    delete_all(sandboxes).await;
    eprintln!("all deleted after {:?}", start.elapsed());
    assert_same_but_engine(&before, &server).await;
    drop((server, lock));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_in_the_middle_changes_nothing() {
    let lock = exclusive().unwrap();
    let (mut server, before) = warm().await;
    let sandboxes = create_all(&server).await;
    let running = {
        let sandboxes = sandboxes.clone();
        tokio::spawn(async move {
            let mut tasks = JoinSet::new();
            for sandbox in sandboxes {
                // Cut off by the crash, most of them: only the engine's own state is looked at later.
                tasks.spawn(async move {
                    let body = json!({ "command": "sleep", "args": ["86091"] });
                    let request = sandbox
                        .client
                        .request(reqwest::Method::POST, &sandbox.path("/cmd"))
                        .json(&body);
                    let _ = sandbox.client.try_send(request).await;
                });
            }
            join(&mut tasks).await;
        })
    };
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    server.kill9().unwrap();
    running.await.unwrap();
    server.restart().await.unwrap();
    let sandboxes: Vec<TestSandbox> = sandboxes.iter().map(|s| again(&server, s, "many")).collect();
    for sandbox in &sandboxes {
        let view = sandbox.get(false).await.ok();
        assert_eq!(view["session"]["id"], json!(sandbox.session), "{}", sandbox.name);
        assert_eq!(view["session"]["status"], "running", "{}", sandbox.name);
    }
    ask_all(&sandboxes).await;
    delete_all(sandboxes).await;
    assert_same_but_engine(&before, &server).await;
    drop((server, lock));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_after_the_other_leaves_nothing() {
    let lock = exclusive().unwrap();
    let (server, before) = warm().await;
    let client = server.client("churn").unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for i in 0..many() {
        let body = json!({ "name": "churn", "persistent": i % 2 == 0 });
        let mut sandbox = TestSandbox::create(&client, body).await;
        assert!(seen.insert(sandbox.session.clone()), "a session id came twice");
        let _ = sandbox.sh("echo x > f").await.good();
        if i % 4 == 0 {
            let _ = sandbox.stop().await.ok();
            let _ = sandbox.resume().await;
            assert_eq!(sandbox.sh("cat f").await.good(), "x");
        }
        let _ = sandbox.delete().await.ok();
    }
    let open = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
    assert!(open < 200, "the engine holds {open} descriptors after {} sandboxes", many());
    assert_same_but_engine(&before, &server).await;
    drop((server, lock));
}
