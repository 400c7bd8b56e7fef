//! Start and end of one sandbox, beside the peers: `launch` (the runtime alone) and `api` (over HTTP).
//!
//! Invariant: everything takes turns, and whoever was first in one round is not in the next, so that a
//! disturbance meets all alike. Called by `main`.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bivouac_testkit::TestSandbox;
use serde_json::json;

use crate::bench::{Bench, Group};
use crate::interrupt;
use crate::launch::Launcher;
use crate::peers::Peers;
use crate::stats::{Row, Samples};

/// Rounds before those that count.
const WARM: usize = 2;
/// Commands per sandbox over HTTP.
const EXECS: usize = 3;

/// What takes a turn in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Peer(usize),
    Runtime,
    Api,
}

#[derive(Debug, Default)]
struct Api {
    create: Samples,
    first_output: Samples,
    exec: Samples,
    delete: Samples,
}

/// A create's body: lives until it is deleted.
pub(crate) fn body() -> serde_json::Value {
    json!({ "timeout": 3_600_000, "persistent": false })
}

pub(crate) fn millis(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

/// Creates a sandbox; how long that took.
pub(crate) async fn create(bench: &Bench) -> Result<(TestSandbox, f64)> {
    let start = Instant::now();
    let made = TestSandbox::try_create(&bench.client, body()).await;
    let took = millis(start);
    let made =
        made.map_err(|answer| anyhow::anyhow!("{answer}")).context("a create was refused")?;
    bench.remember(&made.session);
    Ok((made, took))
}

/// Deletes a sandbox; how long that took.
pub(crate) async fn delete(sandbox: &TestSandbox) -> Result<f64> {
    let start = Instant::now();
    let answer = sandbox.delete().await;
    let took = millis(start);
    ensure!(answer.status == 200, "{answer}");
    Ok(took)
}

/// Runs `true` with the streaming form that the SDK uses; how long until the stream's end.
pub(crate) async fn exec(sandbox: &TestSandbox) -> Result<f64> {
    let start = Instant::now();
    let ran = sandbox.run(&["true"]).await;
    let took = millis(start);
    ensure!(ran.exit == Some(0), "`true` ended with {:?}: {}", ran.exit, ran.err());
    Ok(took)
}

impl Api {
    async fn cycle(&mut self, bench: &Bench) -> Result<()> {
        let start = Instant::now();
        let (sandbox, created) = create(bench).await?;
        let mut lines = sandbox
            .open(&["echo", "ready"], json!({}))
            .await
            .map_err(|answer| anyhow::anyhow!("{answer}"))?;
        let mut first = None;
        while let Some(line) = lines.next(Duration::from_secs(30)).await? {
            if line["stream"] == "stdout" && first.is_none() {
                first = Some(millis(start));
            }
        }
        self.create.add(created);
        self.first_output.add(first.context("`echo` wrote nothing")?);
        for _ in 0..EXECS {
            self.exec.add(exec(&sandbox).await?);
        }
        self.delete.add(delete(&sandbox).await?);
        Ok(())
    }
}

/// Measures both groups, or the one that was asked for.
pub(crate) fn run(bench: &mut Bench, peers: &mut Peers) -> Result<()> {
    let with_api = bench.wants(Group::Api);
    let mut launcher = if bench.wants(Group::Launch) {
        Some(Launcher::start(&bench.folder.join("runtime"), &bench.images, &bench.image)?)
    } else {
        None
    };
    let done = rounds(bench, peers, launcher.as_mut(), with_api);
    // Its mounts go, whatever happened.
    let closed = launcher.as_mut().map_or(Ok(()), Launcher::close);
    let (samples, api) = done?;
    closed?;
    report(bench, peers, launcher.as_ref(), with_api.then_some(&api), &samples);
    Ok(())
}

fn rounds(
    bench: &Bench,
    peers: &mut Peers,
    mut launcher: Option<&mut Launcher>,
    with_api: bool,
) -> Result<(Vec<Samples>, Api)> {
    let mut samples = vec![Samples::default(); peers.names.len()];
    let mut api = Api::default();
    let mut turns: Vec<Turn> = (0..peers.names.len()).map(Turn::Peer).collect();
    turns.extend(launcher.as_ref().map(|_| Turn::Runtime));
    turns.extend(with_api.then_some(Turn::Api));
    for round in 0..bench.size.rounds + WARM {
        if round == WARM {
            samples.fill(Samples::default());
            api = Api::default();
            if let Some(launcher) = &mut launcher {
                launcher.forget();
            }
        }
        for place in 0..turns.len() {
            interrupt::check()?;
            match turns[(place + round) % turns.len()] {
                Turn::Peer(i) => {
                    let name = peers.names[i];
                    // A hundred times slower than the others: fewer of it say as much.
                    if name != "podman" || round % bench.size.podman_every == 0 {
                        samples[i].add(peers.run(name)?);
                    }
                }
                Turn::Runtime => {
                    if let Some(launcher) = &mut launcher {
                        launcher.cycle()?;
                    }
                }
                Turn::Api => bench.client_threads.block_on(api.cycle(bench))?,
            }
        }
    }
    Ok((samples, api))
}

fn report(
    bench: &mut Bench,
    peers: &Peers,
    launcher: Option<&Launcher>,
    api: Option<&Api>,
    samples: &[Samples],
) {
    let of = |name: &str| {
        let found = peers.names.iter().position(|n| *n == name);
        found.map(|i| samples[i].clone()).unwrap_or_default()
    };
    let (spawn, bwrap, podman) = (of("posix_spawn"), of("bwrap"), of("podman"));
    let against = |row: Row| {
        let mut row = row;
        for (name, samples) in peers.names.iter().zip(samples) {
            row = row.versus(*name, samples);
        }
        row
    };
    for (name, samples) in peers.names.iter().zip(samples) {
        let row = bench.row("peers", format!("{name}: /bin/true, start to end"), "ms", samples);
        bench.add(if *name == "posix_spawn" { row } else { row.versus("posix_spawn", &spawn) });
    }
    if let Some(launcher) = launcher {
        let row = bench.row(
            "launch",
            "launch: init answers, network and limits ready",
            "ms",
            &launcher.launch,
        );
        let ratio = row.median / bwrap.median();
        let faster = podman.median() / row.median;
        let row = against(row);
        let median = row.median;
        bench.add(
            row.want("median ≤ 4 ms", median <= 4.0)
                .want("≤ 1.0 × bwrap", ratio <= 1.0)
                .want("≥ 20 × faster than podman", faster >= 20.0),
        );
        let mut steps: Vec<_> = launcher.steps.iter().collect();
        steps.sort_by(|a, b| b.1.median().total_cmp(&a.1.median()));
        for (step, times) in steps {
            let row = bench.row("launch", format!("  step {step}"), "ms", times);
            bench.add(row);
        }
        let more = [
            ("launch and `true` to its end", &launcher.with_true),
            ("launch, `true`, removal: nothing left", &launcher.whole),
            ("`true` alone, without HTTP", &launcher.exec),
            ("kill and removal alone", &launcher.remove),
        ];
        for (name, samples) in more {
            let row = bench.row("launch", name, "ms", samples);
            bench.add(row.versus("posix_spawn", &spawn).versus("bwrap", &bwrap));
        }
    }
    if let Some(api) = api {
        let row = bench.row("api", "create → first output of a command", "ms", &api.first_output);
        let (median, p99) = (row.median, row.p99);
        bench.add(
            against(row).want("median ≤ 8 ms", median <= 8.0).want("p99 ≤ 25 ms", p99 <= 25.0),
        );
        let row = bench.row("api", "create", "ms", &api.create);
        bench.add(row.versus("bwrap", &bwrap));
        let row = bench.row("api", "exec `true`, to the end of its stream", "ms", &api.exec);
        let over = row.median - spawn.median();
        let median = row.median;
        bench.add(
            row.versus("posix_spawn", &spawn)
                .want("median ≤ 1.2 ms", median <= 1.2)
                .want("≤ posix_spawn + 0.7 ms", over <= 0.7)
                .note(format!("posix_spawn + {over:.2} ms")),
        );
        let row = bench.row("api", "destroy", "ms", &api.delete);
        bench.add(row);
    }
}
