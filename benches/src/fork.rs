//! Snapshot, resume and fork of a sandbox with a large tree, beside a copy of it on the host.
//!
//! Invariant: the same rounds are done with an empty sandbox, since the promise is that size does not
//! matter. A snapshot ends the session in this API; what is live comes with the checkpoints. Called by
//! `main`.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bivouac_testkit::TestSandbox;
use serde_json::json;
use tokio::task::JoinSet;

use crate::bench::Bench;
use crate::interrupt;
use crate::peers::Peers;
use crate::start::{body, delete, millis};
use crate::stats::Samples;

/// Bytes of each file.
const FILE: usize = 10_000;

/// Writes `files` files of random bytes below `folder`.
fn tree(files: usize, folder: &str) -> String {
    let bytes = files * FILE;
    format!(
        "mkdir -p {folder} && head -c {bytes} /dev/urandom | split -b {FILE} -a 5 -d - {folder}/f"
    )
}

#[derive(Debug, Default)]
struct Times {
    snapshot: Samples,
    resume: Samples,
    fork: Samples,
    /// Many forks at the same moment, until the last is ready.
    at_once: Samples,
}

/// Forks the sandbox so many times at once; how long until all run.
async fn forks_at_once(bench: &Bench, source: &str, count: usize) -> Result<f64> {
    let mut tasks = JoinSet::new();
    let start = Instant::now();
    for _ in 0..count {
        let (client, path) = (bench.client.clone(), format!("/v2/sandboxes/{source}/fork"));
        tasks.spawn(async move { client.post(&path, &json!({ "persistent": false })).await });
    }
    let mut forks = Vec::new();
    while let Some(answer) = tasks.join_next().await {
        let answer = answer?;
        ensure!((200..300).contains(&answer.status), "{answer}");
        forks.push(TestSandbox::of(&bench.client, answer.json));
    }
    let took = millis(start);
    for fork in forks {
        bench.remember(&fork.session);
        delete(&fork).await?;
    }
    Ok(took)
}

async fn rounds(bench: &Bench, files: usize) -> Result<Times> {
    let mut body = body();
    body["persistent"] = json!(true);
    let mut sandbox = TestSandbox::create(&bench.client, body).await;
    bench.remember(&sandbox.session);
    if files > 0 {
        let ran = sandbox.sh(&tree(files, "tree")).await;
        ensure!(ran.exit == Some(0), "the tree could not be written: {}", ran.err());
    }
    let mut times = Times::default();
    for round in 0..=bench.size.fork_rounds {
        interrupt::check()?;
        // A little that is new each time; in the first round, which does not count, all is.
        let ran = sandbox.sh("date >> log").await;
        ensure!(ran.exit == Some(0), "{}", ran.err());
        let start = Instant::now();
        let answer = sandbox.post("/snapshot", &json!({ "expiration": 0 })).await;
        let snapshot = millis(start);
        ensure!((200..300).contains(&answer.status), "{answer}");
        let start = Instant::now();
        let path = format!("/v2/sandboxes/{}/fork", sandbox.name);
        let answer = bench.client.post(&path, &json!({ "persistent": false })).await;
        let fork = millis(start);
        ensure!((200..300).contains(&answer.status), "{answer}");
        let forked = TestSandbox::of(&bench.client, answer.json);
        bench.remember(&forked.session);
        if files > 0 {
            let seen = forked.sh("ls tree | wc -l").await;
            ensure!(
                seen.out() == files.to_string(),
                "the fork has {} of {files} files",
                seen.out()
            );
        }
        delete(&forked).await?;
        let start = Instant::now();
        ensure!(sandbox.resume().await, "the session was to be over after its snapshot");
        let resume = millis(start);
        bench.remember(&sandbox.session);
        if round > 0 {
            times.snapshot.add(snapshot);
            times.fork.add(fork);
            times.resume.add(resume);
        }
    }
    if files > 0 {
        let at_once = forks_at_once(bench, &sandbox.name, bench.size.burst).await?;
        times.at_once.add(at_once);
    }
    delete(&sandbox).await?;
    Ok(times)
}

/// Measures it.
pub(crate) fn run(bench: &mut Bench, peers: &mut Peers) -> Result<()> {
    let files = bench.size.tree_files;
    let empty = bench.client_threads.block_on(rounds(bench, 0)).context("with nothing in it")?;
    let full = bench.client_threads.block_on(rounds(bench, files)).context("with a tree in it")?;
    let _ = peers.shell(&tree(files, "/mnt/copied"))?;
    let mut copies = Samples::default();
    for _ in 0..bench.size.fork_rounds.min(3) {
        copies.add(peers.shell("cp -a copied copy")?);
        let _ = peers.shell("rm -rf copy")?;
    }
    let _ = peers.shell("rm -rf copied")?;
    let what = format!("{files} files, {} MB", files * FILE / 1_000_000);
    let row =
        bench.row("fork", format!("fork of a snapshot with {what}: running"), "ms", &full.fork);
    let (median, flat) = (row.median, row.median / empty.fork.median());
    bench.add(
        row.versus("an empty one", &empty.fork)
            .versus("cp -a on the host", &copies)
            .want("median ≤ 10 ms", median <= 10.0)
            .want("≤ 1.5 × an empty one", flat <= 1.5),
    );
    let row =
        bench.row("fork", format!("snapshot of {what}, ends the session"), "ms", &full.snapshot);
    bench.add(
        row.versus("an empty one", &empty.snapshot)
            .note("kill, commit of the file system and removal included"),
    );
    let row = bench.row("fork", format!("resume of {what}"), "ms", &full.resume);
    bench.add(row.versus("an empty one", &empty.resume));
    let row = bench.row("fork", format!("cp -a of {what} on the host's btrfs"), "ms", &copies);
    bench.add(row);
    Ok(())
}
