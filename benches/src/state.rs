//! Live snapshot, fork, resume and rollback of sandboxes of three sizes, beside a copy on the host.
//!
//! Invariant: the same rounds are done at each size, since the promise is that size does not matter, and in
//! each a little is new. The source's stall is seen by a program inside that writes all the while. Called
//! by `main`.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bivouac_testkit::{Answer, TestSandbox};
use serde_json::{Value, json};

use crate::bench::{Bench, StateSize};
use crate::inside::{self, now_us};
use crate::interrupt;
use crate::peers::{Peers, Place};
use crate::start::{body, delete, millis};
use crate::stats::{Row, Samples};

/// Live snapshots and forks while the program inside writes: about so long each.
const PULSE: Duration = Duration::from_millis(400);

/// A tree of so many files.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tree {
    pub(crate) files: usize,
    pub(crate) bytes: usize,
}

impl Tree {
    fn megabytes(self) -> usize {
        self.files * self.bytes / 1_000_000
    }

    fn name(self) -> String {
        format!("{} files, {} MB", self.files, self.megabytes())
    }

    /// Writes it below `folder`.
    fn line(self, folder: &str) -> String {
        let (all, each) = (self.files * self.bytes, self.bytes);
        format!(
            "mkdir -p {folder} && head -c {all} /dev/urandom | split -b {each} -a 5 -d - {folder}/f"
        )
    }
}

#[derive(Debug, Default)]
struct Times {
    live: Samples,
    /// The engine's own figure: from the freeze to the thaw.
    frozen: Samples,
    /// The longest gap that the program inside saw in a live snapshot while it wrote.
    stall: Samples,
    /// And in none, in the same time.
    calm: Samples,
    ending: Samples,
    fork: Samples,
    resume: Samples,
    rollback: Samples,
    many: Samples,
}

fn good(answer: Answer) -> Result<Value> {
    ensure!((200..300).contains(&answer.status), "{answer}");
    Ok(answer.json)
}

fn own(sandbox: &TestSandbox, tail: &str) -> String {
    format!("/api/bivouac/v1/sandboxes/{}/{tail}", sandbox.name)
}

async fn sh(sandbox: &TestSandbox, line: &str) -> Result<()> {
    let ran = sandbox.sh(line).await;
    ensure!(ran.exit == Some(0), "`{line}` ended with {:?}: {}", ran.exit, ran.err());
    Ok(())
}

async fn live(bench: &Bench, sandbox: &TestSandbox) -> Result<(f64, Value)> {
    let start = Instant::now();
    let answer = bench.client.post(&own(sandbox, "snapshots"), &json!({ "live": true })).await;
    let took = millis(start);
    Ok((took, good(answer)?["snapshot"].clone()))
}

/// Forks the running sandbox; how long until all of them run.
async fn fork(
    bench: &Bench,
    sandbox: &TestSandbox,
    count: usize,
) -> Result<(f64, Vec<TestSandbox>)> {
    let body = json!({ "count": count, "live": true, "overrides": { "persistent": false } });
    let start = Instant::now();
    let answer = bench.client.post(&own(sandbox, "forks"), &body).await;
    let took = millis(start);
    let made = good(answer)?;
    let made = made["sandboxes"].as_array().context("no list of forks")?.clone();
    ensure!(made.len() == count, "{} of {count} forks", made.len());
    let forks: Vec<_> = made.into_iter().map(|v| TestSandbox::of(&bench.client, v)).collect();
    for fork in &forks {
        bench.remember(&fork.session);
    }
    Ok((took, forks))
}

/// The longest gap of a writer inside that overlaps with `from..to`, ms.
fn longest(gaps: &Value, from: u64, to: u64) -> f64 {
    let each = gaps.as_array().into_iter().flatten().filter_map(|gap| {
        let (begin, end) = (gap[0].as_u64()?, gap[1].as_u64()?);
        (begin < to && end > from).then_some((end - begin) as f64 / 1e3)
    });
    each.fold(0.0, f64::max)
}

/// A live snapshot while a program inside writes without a pause.
async fn under_writes(bench: &Bench, sandbox: &TestSandbox, times: &mut Times) -> Result<()> {
    let millis = (2 * PULSE + Duration::from_secs(1)).as_millis().to_string();
    let argv = [
        inside::PROGRAM,
        "inside",
        "pulse",
        "--file",
        "/vercel/sandbox/pulse",
        "--millis",
        &millis,
    ];
    let id = sandbox.start(&argv, json!({})).await;
    tokio::time::sleep(PULSE).await;
    let (from, calm_from) = (now_us(), now_us() - PULSE.as_micros() as u64 / 2);
    let (took, snapshot) = live(bench, sandbox).await?;
    let to = now_us();
    let ended = sandbox.wait(&id).await;
    let ran = sandbox.output(&id).await;
    ensure!(ended["exitCode"] == 0, "the writer inside: {ended}: {}", ran.err());
    let said: Value = serde_json::from_str(&ran.out())?;
    ensure!(said["gaps"].is_array(), "{said}");
    times.live.add(took);
    times.frozen.add(snapshot["stallUs"].as_f64().context("no stallUs")? / 1e3);
    times.stall.add(longest(&said["gaps"], from, to));
    times.calm.add(longest(&said["gaps"], calm_from, from));
    Ok(())
}

async fn round(
    bench: &Bench,
    sandbox: &mut TestSandbox,
    tree: Tree,
    times: &mut Times,
) -> Result<()> {
    sh(sandbox, "date >> log").await?;
    under_writes(bench, sandbox, times).await?;
    let (took, forks) = fork(bench, sandbox, 1).await?;
    times.fork.add(took);
    for fork in forks {
        if tree.files > 0 {
            let seen = fork.sh("ls tree | wc -l").await.out();
            ensure!(seen == tree.files.to_string(), "the fork has {seen} of {} files", tree.files);
        }
        delete(&fork).await?;
    }
    let start = Instant::now();
    let answer = bench.client.post(&own(sandbox, "rollback"), &json!({ "discard": true })).await;
    times.rollback.add(millis(start));
    *sandbox = TestSandbox::of(&bench.client, good(answer)?);
    bench.remember(&sandbox.session);
    sh(sandbox, "date >> log").await?;
    let start = Instant::now();
    let answer = sandbox.post("/snapshot", &json!({ "expiration": 0 })).await;
    times.ending.add(millis(start));
    good(answer)?;
    let start = Instant::now();
    ensure!(sandbox.resume().await, "the session was to be over after its snapshot");
    times.resume.add(millis(start));
    bench.remember(&sandbox.session);
    Ok(())
}

async fn rounds(bench: &Bench, tree: Tree, size: StateSize) -> Result<Times> {
    let mut body = body();
    body["persistent"] = json!(true);
    body["keepLastSnapshots"] = json!({ "count": 2 });
    let made = TestSandbox::try_create(&bench.client, body).await;
    let mut sandbox = made.map_err(|answer| anyhow::anyhow!("{answer}"))?;
    bench.remember(&sandbox.session);
    inside::put(&sandbox).await?;
    if tree.files > 0 {
        sh(&sandbox, &tree.line("tree")).await?;
    }
    let mut times = Times::default();
    for turn in 0..=size.rounds {
        interrupt::check()?;
        if turn == 1 {
            // In the first round everything was new.
            times = Times::default();
        }
        round(bench, &mut sandbox, tree, &mut times).await?;
    }
    for _ in 0..size.many_rounds {
        interrupt::check()?;
        sh(&sandbox, "date >> log").await?;
        let (took, forks) = fork(bench, &sandbox, bench.size.burst).await?;
        times.many.add(took);
        for fork in forks {
            delete(&fork).await?;
        }
    }
    delete(&sandbox).await?;
    Ok(times)
}

/// The rows of one size; `empty` is a sandbox with nothing in it.
fn report(bench: &mut Bench, tree: Tree, times: &Times, empty: &Times, copy: &Samples) {
    let (name, many) = (tree.name(), bench.size.burst);
    let flat = |row: Row, empty: &Samples| {
        let ratio = row.median / empty.median();
        row.versus("an empty one", empty).want("≤ 1.5 × an empty one", ratio <= 1.5)
    };
    let row = bench.row("state", format!("live snapshot of {name}: whole call"), "ms", &times.live);
    bench.add(flat(row, &empty.live).versus("cp -a on the host", copy));
    let row = bench.row("state", format!("  source frozen, {name}"), "ms", &times.frozen);
    let median = row.median;
    bench.add(
        row.note("the engine's figure: freeze, snapshot of the file system, thaw")
            .want("median ≤ 5 ms", median <= 5.0),
    );
    let row = bench.row(
        "state",
        format!("  a program that writes: longest gap, {name}"),
        "ms",
        &times.stall,
    );
    bench.add(row.versus("in as much time before it", &times.calm));
    let row =
        bench.row("state", format!("fork of it as it runs, {name}: running"), "ms", &times.fork);
    let median = row.median;
    bench.add(
        flat(row, &empty.fork)
            .versus("cp -a on the host", copy)
            .want("median ≤ 10 ms", median <= 10.0),
    );
    let row =
        bench.row("state", format!("  {many} by one call, {name}: all run"), "ms", &times.many);
    let median = row.median;
    bench.add(row.versus("an empty one's", &empty.many).want("≤ 800 ms", median <= 800.0));
    let row = bench.row("state", format!("rollback, {name}: running"), "ms", &times.rollback);
    bench.add(flat(row, &empty.rollback));
    let row =
        bench.row("state", format!("snapshot that ends the session, {name}"), "ms", &times.ending);
    bench.add(row.versus("an empty one", &empty.ending));
    let row = bench.row("state", format!("resume, {name}"), "ms", &times.resume);
    bench.add(flat(row, &empty.resume));
    let row = bench.row("state", format!("cp -a on the host's btrfs, {name}"), "ms", copy);
    bench.add(row);
}

/// Measures it.
pub(crate) fn run(bench: &mut Bench, peers: &mut Peers) -> Result<()> {
    let size = bench.size.state;
    let none = Tree { files: 0, bytes: 0 };
    let empty = bench.client_threads.block_on(rounds(bench, none, size)).context("empty")?;
    for tree in size.trees {
        let times = bench.client_threads.block_on(rounds(bench, tree, size));
        let times = times.with_context(|| tree.name())?;
        let _ = peers.shell(Place::Btrfs, &tree.line("copied"))?;
        let mut copies = Samples::default();
        for _ in 0..size.rounds.min(3) {
            copies.add(peers.shell(Place::Btrfs, "cp -a copied copy")?);
            let _ = peers.shell(Place::Btrfs, "rm -rf copy")?;
        }
        let _ = peers.shell(Place::Btrfs, "rm -rf copied")?;
        report(bench, tree, &times, &empty, &copies);
    }
    Ok(())
}
