//! Pause and resume of a sandbox with 50 processes, idle and busy, over the HTTP API.
//!
//! Invariant: nothing runs between the two, which the CPU time of the session tells. Called by `main`.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use bivouac_testkit::{LONG, TestSandbox, eventually};
use serde_json::json;

use crate::bench::Bench;
use crate::interrupt;
use crate::start::{body, delete, millis};
use crate::stats::Samples;

/// How many processes stand still.
const PROCESSES: usize = 50;

/// A field of the only session's use.
async fn used(bench: &Bench, sandbox: &TestSandbox, field: &str) -> Result<u64> {
    let answer = bench.client.get("/api/bivouac/v1/stats").await;
    let stats = answer.json["stats"].as_array().cloned().unwrap_or_default();
    let of = stats.iter().find(|of| of["session"] == json!(sandbox.session));
    of.and_then(|of| of[field].as_u64()).with_context(|| format!("no {field}: {answer}"))
}

async fn rounds(bench: &Bench, program: &str) -> Result<(Samples, Samples)> {
    let made = TestSandbox::try_create(&bench.client, body()).await;
    let sandbox = made.map_err(|answer| anyhow::anyhow!("{answer}"))?;
    bench.remember(&sandbox.session);
    let line = format!("for i in $(seq {PROCESSES}); do ({program}) & done; wait");
    sandbox.start(&["sh", "-c", &line], json!({})).await;
    eventually("all of them run", LONG, async || {
        let pids = used(bench, &sandbox, "pids").await;
        pids.is_ok_and(|pids| pids > PROCESSES as u64).then_some(()).ok_or("not yet")
    })
    .await;
    let path = |tail: &str| format!("/api/bivouac/v1/sandboxes/{}/{tail}", sandbox.name);
    let (mut down, mut up) = (Samples::default(), Samples::default());
    for _ in 0..bench.size.state.rounds {
        interrupt::check()?;
        let start = Instant::now();
        let paused = bench.client.post(&path("pause"), &json!({})).await;
        down.add(millis(start));
        ensure!(paused.status == 200, "{paused}");
        let before = used(bench, &sandbox, "cpuMs").await?;
        ensure!(used(bench, &sandbox, "cpuMs").await? == before, "something runs in a pause");
        let start = Instant::now();
        let gone_on = bench.client.post(&path("unpause"), &json!({})).await;
        up.add(millis(start));
        ensure!(gone_on.status == 200, "{gone_on}");
    }
    delete(&sandbox).await?;
    Ok((down, up))
}

/// Measures it.
pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    for (kind, program, most) in
        [("idle", "exec sleep 1000", 2.0), ("busy", "while :; do :; done", 15.0)]
    {
        let times = bench.client_threads.block_on(rounds(bench, program));
        let (down, up) = times.with_context(|| format!("{kind} processes"))?;
        for (what, samples) in [("pause", &down), ("resume with memory", &up)] {
            let name = format!("{what} of {PROCESSES} {kind} processes");
            let row = bench.row("state", name, "ms", samples);
            let median = row.median;
            bench.add(row.want(format!("median ≤ {most} ms"), median <= most));
        }
    }
    Ok(())
}
