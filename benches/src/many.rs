//! Many sandboxes: at once, one after the other without a pause, and alive together.
//!
//! Invariant: one create that fails fails the bench; memory is what the machine has less of, beside
//! what the kernel says of the processes. Called by `main`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use bivouac_testkit::{Client, TestSandbox};
use tokio::task::JoinSet;

use crate::bench::Bench;
use crate::interrupt;
use crate::load::meminfo;
use crate::start::{body, create, delete, exec, millis};
use crate::stats::Samples;

/// Clients that call at the same time where throughput is measured.
const CLIENTS: usize = 4;
/// Sandboxes whose processes are looked at one by one.
const LOOKED_AT: usize = 100;

async fn make(client: Client) -> Result<(TestSandbox, f64)> {
    let start = Instant::now();
    let made = TestSandbox::try_create(&client, body()).await;
    let took = millis(start);
    Ok((made.map_err(|answer| anyhow!("{answer}")).context("a create was refused")?, took))
}

/// Creates `count` sandboxes by `clients` clients; in the order in which they were ready.
async fn make_many(bench: &Bench, count: usize, clients: usize) -> Result<Vec<(TestSandbox, f64)>> {
    let begun = Arc::new(AtomicUsize::new(0));
    let (send, mut ready) = tokio::sync::mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for _ in 0..clients {
        let (client, begun, send) = (bench.client.clone(), Arc::clone(&begun), send.clone());
        tasks.spawn(async move {
            while begun.fetch_add(1, Ordering::Relaxed) < count {
                interrupt::check()?;
                let _ = send.send(make(client.clone()).await?);
            }
            anyhow::Ok(())
        });
    }
    drop(send);
    let mut made = Vec::new();
    while let Some((sandbox, took)) = ready.recv().await {
        bench.remember(&sandbox.session);
        made.push((sandbox, took));
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    ensure!(made.len() == count, "{} of {count} sandboxes were made", made.len());
    Ok(made)
}

/// Deletes all, by a few clients.
async fn remove_many(sandboxes: Vec<TestSandbox>) -> Result<()> {
    let rest = Arc::new(std::sync::Mutex::new(sandboxes));
    let mut tasks = JoinSet::new();
    for _ in 0..CLIENTS {
        let rest = Arc::clone(&rest);
        tasks.spawn(async move {
            loop {
                let next = rest.lock().expect("no panic while held").pop();
                let Some(sandbox) = next else { return anyhow::Ok(()) };
                delete(&sandbox).await?;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(())
}

/// A hundred creates at once.
pub(crate) fn burst(bench: &mut Bench) -> Result<()> {
    let count = bench.size.burst;
    let mut wall = Samples::default();
    let mut slowest = Samples::default();
    for _ in 0..bench.size.burst_rounds {
        let (took, made) = bench.client_threads.block_on(async {
            let start = Instant::now();
            let made = make_many(bench, count, count).await?;
            anyhow::Ok((millis(start), made))
        })?;
        wall.add(took);
        slowest.add(made.iter().map(|(_, took)| *took).fold(0.0, f64::max));
        let sandboxes = made.into_iter().map(|(sandbox, _)| sandbox).collect();
        bench.client_threads.block_on(remove_many(sandboxes))?;
    }
    let row =
        bench.row("burst", format!("{count} creates at once: until all are ready"), "ms", &wall);
    let median = row.median;
    bench.add(
        row.want("median ≤ 300 ms", median <= 300.0)
            .note(format!("all {count} succeeded, each time")),
    );
    let row = bench.row("burst", "  the slowest of them, as its caller saw it", "ms", &slowest);
    bench.add(row);
    Ok(())
}

/// Create and destroy for a while; pairs per second, one value per client.
async fn churn(bench: &Bench, time: Duration) -> Result<f64> {
    let until = Instant::now() + time;
    let (send, mut seen) = tokio::sync::mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    let start = Instant::now();
    for _ in 0..CLIENTS {
        let (client, send) = (bench.client.clone(), send.clone());
        tasks.spawn(async move {
            while Instant::now() < until {
                interrupt::check()?;
                let (sandbox, _) = make(client.clone()).await?;
                delete(&sandbox).await?;
                let _ = send.send(sandbox.session);
            }
            anyhow::Ok(())
        });
    }
    drop(send);
    let mut count = 0_u32;
    while let Some(session) = seen.recv().await {
        bench.remember(&session);
        count += 1;
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    Ok(f64::from(count) / start.elapsed().as_secs_f64())
}

/// The rate in several windows, so that its spread shows.
fn rates(bench: &Bench) -> Result<Samples> {
    let windows = if bench.size.judged { 5 } else { 1 };
    let window = bench.size.sustained / windows;
    (0..windows).map(|_| bench.client_threads.block_on(churn(bench, window))).collect()
}

/// Create and destroy without a pause, nothing else alive.
pub(crate) fn sustained(bench: &mut Bench) -> Result<Samples> {
    let rate = rates(bench)?;
    let name = format!("create + destroy, {CLIENTS} clients");
    let row = bench.row("sustained", name, "per s", &rate);
    let median = row.median;
    bench.add(row.want("≥ 250 per s", median >= 250.0));
    Ok(rate)
}

/// Proportional memory of a sandbox's processes, KiB: of all whose control group names a session.
fn pss(sessions: &BTreeSet<String>) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let groups = fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
        let Some(at) = groups.find("sbx_") else { continue };
        let id: String =
            groups[at..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        if !sessions.contains(&id) {
            continue;
        }
        let rollup = fs::read_to_string(entry.path().join("smaps_rollup")).unwrap_or_default();
        let kib = rollup.lines().find_map(|line| {
            line.strip_prefix("Pss:")?.split_whitespace().next()?.parse::<f64>().ok()
        });
        *found.entry(id).or_insert(0.0) += kib.unwrap_or(0.0);
    }
    found
}

/// What the kernel itself holds, KiB.
fn kernel(memory: &BTreeMap<String, f64>) -> f64 {
    ["Slab", "KernelStack", "PageTables", "SecPageTables", "Percpu", "VmallocUsed"]
        .iter()
        .filter_map(|name| memory.get(*name))
        .sum()
}

fn sandboxes(made: &[(TestSandbox, f64)]) -> Samples {
    made.iter().map(|(_, took)| *took).collect()
}

/// Many idle sandboxes alive together.
pub(crate) fn live(bench: &mut Bench, empty: Option<&Samples>) -> Result<()> {
    let (count, answering) = (bench.size.live, bench.size.answering);
    let before = meminfo();
    let start = Instant::now();
    let made = bench.client_threads.block_on(make_many(bench, count, CLIENTS))?;
    let took = start.elapsed().as_secs_f64();
    let tenth = (count / 10).max(1);
    let (first, last) = (sandboxes(&made[..tenth]), sandboxes(&made[count - tenth..]));
    let row = bench.row(
        "live",
        format!("create, {CLIENTS} clients: the last {tenth} of {count}"),
        "ms",
        &last,
    );
    let ratio = row.median / first.median();
    bench.add(
        row.versus(format!("the first {tenth}"), &first).want("≤ 2.5 × the first", ratio <= 2.5),
    );
    let rate: Samples = [count as f64 / took].into_iter().collect();
    let row = bench.row("live", format!("creates while {count} come to life"), "per s", &rate);
    bench.add(row);
    memory(bench, &made, &before);

    let mut answers = Samples::default();
    let step = (count / answering).max(1);
    for (sandbox, _) in made.iter().step_by(step).take(answering) {
        interrupt::check()?;
        answers.add(bench.client_threads.block_on(exec(sandbox))?);
    }
    let row = bench.row(
        "live",
        format!("exec `true` in {answering} of {count}, in turn"),
        "ms",
        &answers,
    );
    let all = answers.len() == answering;
    bench.add(row.want(format!("all {answering} answer"), all));

    let busy = rates(bench)?;
    let row = bench.row("live", format!("create + destroy beside {count} live"), "per s", &busy);
    let rate = row.median;
    let row = row.want("≥ 250 per s", rate >= 250.0);
    bench.add(empty.map_or(row.clone(), |empty| row.versus("with none live", empty)));
    alone(bench, count)?;

    let start = Instant::now();
    let all: Vec<TestSandbox> = made.into_iter().map(|(sandbox, _)| sandbox).collect();
    bench.client_threads.block_on(remove_many(all))?;
    let removed: Samples = [start.elapsed().as_secs_f64()].into_iter().collect();
    let left = settled(bench);
    let row =
        bench.row("live", format!("removal of all {count}, {CLIENTS} clients"), "s", &removed);
    let note = if left.is_empty() { "nothing is left".to_owned() } else { left.join(", ") };
    bench.add(row.want("nothing is left", left.is_empty()).note(note));
    ensure!(left.is_empty(), "{} traces are left of the sandboxes: {left:?}", left.len());
    Ok(())
}

/// One caller, beside all the others' sandboxes.
fn alone(bench: &mut Bench, count: usize) -> Result<()> {
    let (mut creates, mut deletes) = (Samples::default(), Samples::default());
    for _ in 0..bench.size.rounds.min(50) {
        bench.client_threads.block_on(async {
            let (sandbox, took) = create(bench).await?;
            creates.add(took);
            deletes.add(delete(&sandbox).await?);
            anyhow::Ok(())
        })?;
    }
    for (what, samples) in [("create", creates), ("destroy", deletes)] {
        let row =
            bench.row("live", format!("{what} beside {count} live, one client"), "ms", &samples);
        bench.add(row);
    }
    Ok(())
}

/// The kernel removes namespaces in the background; a while is given to it.
fn settled(bench: &Bench) -> Vec<String> {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let left = bench.traces();
        if left.is_empty() || Instant::now() > until {
            return left;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn memory(bench: &mut Bench, made: &[(TestSandbox, f64)], before: &BTreeMap<String, f64>) {
    let count = made.len() as f64;
    let after = meminfo();
    let per = |kib: f64| -> Samples { [kib / count].into_iter().collect() };
    let step = (made.len() / LOOKED_AT).max(1);
    let looked: BTreeSet<String> =
        made.iter().step_by(step).map(|(sandbox, _)| sandbox.session.clone()).collect();
    let resident: Samples = pss(&looked).into_values().collect();
    let in_kernel = kernel(&after) - kernel(before);
    let get =
        |memory: &BTreeMap<String, f64>| memory.get("MemAvailable").copied().unwrap_or(f64::NAN);
    let gone = get(before) - get(&after);
    let row = bench.row("live", "memory of an idle sandbox: shim + init (PSS)", "KiB", &resident);
    let own = row.median;
    bench.add(row);
    let row = bench.row("live", "memory of an idle sandbox: kernel", "KiB", &per(in_kernel));
    let sum = own + row.median;
    bench.add(row.note("growth of slab, stacks, page tables, per-CPU and vmalloc, divided"));
    let row = bench.row(
        "live",
        "memory of an idle sandbox: all together",
        "KiB",
        &[sum].into_iter().collect(),
    );
    bench.add(row.want("≤ 2 MiB", sum <= 2048.0));
    let row = bench.row("live", "  as the machine's free memory fell", "KiB", &per(gone));
    bench
        .add(row.note("MemAvailable before less after, divided; the engine's own growth is in it"));
}
