//! The rows of the egress broker.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::origin::{HELLO, HELLO_NAME, RAW, WEB, WEB_NAME};
use super::{ANCHOR, Bed, cpu, memory, policy};
use crate::bench::Bench;
use crate::interrupt;
use crate::stats::{Row, Samples};

const GROUP: &str = "egress";
/// Connections of the rows about CPU time.
const MANY: &str = "16";

/// What a request goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Path {
    Direct,
    Broker,
    Peer,
}

/// What one path did in one round.
struct Turn {
    answer: Value,
    /// CPU seconds of what stands in the way.
    cpu: f64,
}

impl Turn {
    fn value(&self, name: &str) -> Result<f64> {
        self.answer[name].as_f64().with_context(|| format!("no {name} in {}", self.answer))
    }

    fn per_cpu_second(&self) -> Result<f64> {
        ensure!(self.cpu > 0.0, "no CPU time was booked for {}", self.answer);
        Ok(self.value("count")? / self.cpu)
    }
}

/// All rows.
pub(super) fn measure(bench: &Bench, bed: &Bed<'_>) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    rows.extend(requests(bench, bed)?);
    rows.extend(latency(bench, bed)?);
    rows.extend(handshakes(bench, bed)?);
    rows.extend(throughput(bench, bed)?);
    rows.extend(names(bench, bed)?);
    rows.extend(flows(bench, bed)?);
    Ok(rows)
}

/// The paths there are.
fn paths(bed: &Bed<'_>) -> Vec<Path> {
    let mut all = vec![Path::Direct, Path::Broker];
    if bed.peer.is_some() {
        all.push(Path::Peer);
    }
    all
}

/// One path's turn at the web origin.
fn turn(bed: &Bed<'_>, path: Path, kind: &str, connections: &str) -> Result<Turn> {
    interrupt::check()?;
    let millis = bed.size.time.as_millis().to_string();
    let more = ["--name", WEB_NAME, "--connections", connections, "--millis", &millis];
    let mut args = vec![kind];
    args.extend(more);
    let (answer, before, pid);
    match path {
        Path::Direct => {
            let roots = bed.world.roots().display().to_string();
            args.extend(["--to", WEB, "--roots", &roots]);
            if kind == "requests" {
                args.push("--own");
            }
            return Ok(Turn { answer: bed.beside(&args)?, cpu: 0.0 });
        }
        Path::Broker => {
            args.extend(["--to", WEB, "--roots", ANCHOR]);
            pid = bed.guest.shim;
            before = cpu(pid)?;
            answer = bed.guest.inside(&args)?;
        }
        Path::Peer => {
            let peer = bed.peer.as_ref().context("no peer")?;
            let (to, roots) = (peer.at.to_string(), peer.roots.display().to_string());
            args.extend(["--to", &to, "--roots", &roots]);
            pid = peer.pid();
            before = cpu(pid)?;
            answer = bed.beside(&args)?;
        }
    }
    Ok(Turn { answer, cpu: cpu(pid)? - before })
}

/// All rounds of all paths; the first round is not counted.
fn rounds(
    bed: &Bed<'_>,
    kind: &str,
    connections: &str,
    mut each: impl FnMut(&BTreeMap<Path, Turn>) -> Result<()>,
) -> Result<()> {
    let mut order = paths(bed);
    for round in 0..=bed.size.rounds {
        let mut turns = BTreeMap::new();
        for path in &order {
            turns.insert(*path, turn(bed, *path, kind, connections)?);
        }
        order.rotate_left(1);
        if round > 0 {
            each(&turns)?;
        }
    }
    Ok(())
}

fn requests(bench: &Bench, bed: &Bed<'_>) -> Result<Vec<Row>> {
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    let mut rates: BTreeMap<Path, Samples> = BTreeMap::new();
    rounds(bed, "requests", MANY, |turns| {
        for (path, turn) in turns {
            rates.entry(*path).or_default().add(turn.value("rate")?);
            match path {
                Path::Direct => {}
                Path::Broker => ours.add(turn.per_cpu_second()?),
                Path::Peer => theirs.add(turn.per_cpu_second()?),
            }
        }
        Ok(())
    })?;
    let empty = Samples::default();
    let rate = |path| rates.get(&path).unwrap_or(&empty);
    let name = format!("intercepted requests per CPU-second of the shim, {MANY} connections");
    let mut row = bench.row(GROUP, name, "", &ours).versus("mitmproxy", &theirs);
    if !theirs.is_empty() {
        row = row.want("≥ 35 × mitmproxy", ours.median() >= 35.0 * theirs.median());
    }
    let mut rows = vec![row];
    if !theirs.is_empty() {
        let name = format!("mitmproxy: the same, of its process, {MANY} connections");
        rows.push(bench.row(GROUP, name, "", &theirs));
    }
    let direct = rate(Path::Direct);
    rows.push(bench.row(GROUP, "requests: direct", "per s", direct));
    let intercepted = bench.row(GROUP, "requests: intercepted", "per s", rate(Path::Broker));
    rows.push(intercepted.versus("direct", direct).versus("mitmproxy", rate(Path::Peer)));
    if !theirs.is_empty() {
        let row = bench.row(GROUP, "requests: through mitmproxy", "per s", rate(Path::Peer));
        rows.push(row.versus("direct", direct));
    }
    Ok(rows)
}

fn latency(bench: &Bench, bed: &Bed<'_>) -> Result<Vec<Row>> {
    let mut medians: BTreeMap<Path, Samples> = BTreeMap::new();
    let (mut added, mut added_peer) = (Samples::default(), Samples::default());
    rounds(bed, "requests", "1", |turns| {
        let of = |path| turns.get(&path).map(|turn| turn.value("p50")).transpose();
        for (path, turn) in turns {
            medians.entry(*path).or_default().add(turn.value("p50")?);
        }
        if let (Some(direct), Some(broker)) = (of(Path::Direct)?, of(Path::Broker)?) {
            added.add(broker - direct);
            if let Some(peer) = of(Path::Peer)? {
                added_peer.add(peer - direct);
            }
        }
        Ok(())
    })?;
    let empty = Samples::default();
    let median = |path| medians.get(&path).unwrap_or(&empty);
    let direct = median(Path::Direct);
    let mut rows = vec![
        bench.row(GROUP, "p50 of a request, one connection: direct", "µs", direct),
        bench
            .row(GROUP, "p50 of a request, one connection: intercepted", "µs", median(Path::Broker))
            .versus("direct", direct),
        bench
            .row(GROUP, "added to the p50 of a request by the broker", "µs", &added)
            .versus("what mitmproxy adds", &added_peer)
            .want("≤ 80 µs", added.median() <= 80.0),
    ];
    if bed.peer.is_some() {
        let name = "p50 of a request, one connection: through mitmproxy";
        rows.push(bench.row(GROUP, name, "µs", median(Path::Peer)).versus("direct", direct));
    }
    Ok(rows)
}

fn handshakes(bench: &Bench, bed: &Bed<'_>) -> Result<Vec<Row>> {
    let (mut ours, mut theirs) = (Samples::default(), Samples::default());
    let (mut direct, mut through) = (Samples::default(), Samples::default());
    rounds(bed, "handshakes", "8", |turns| {
        for (path, turn) in turns {
            match path {
                Path::Direct => direct.add(turn.value("rate")?),
                Path::Broker => {
                    through.add(turn.value("rate")?);
                    ours.add(turn.per_cpu_second()?);
                }
                Path::Peer => theirs.add(turn.per_cpu_second()?),
            }
        }
        Ok(())
    })?;
    let name = "new intercepted connections, full handshake, per CPU-second of the shim";
    let mut rows = vec![bench.row(GROUP, name, "", &ours).versus("mitmproxy", &theirs)];
    if !theirs.is_empty() {
        rows.push(bench.row(GROUP, "mitmproxy: the same, of its process", "", &theirs));
    }
    rows.push(bench.row(GROUP, "full handshakes, 8 clients: direct", "per s", &direct));
    let row = bench.row(GROUP, "full handshakes, 8 clients: intercepted", "per s", &through);
    rows.push(row.versus("direct", &direct));
    Ok(rows)
}

fn throughput(bench: &Bench, bed: &Bed<'_>) -> Result<Vec<Row>> {
    let mib = bed.size.mib.to_string();
    let plain = ["bytes", "--to", RAW, "--mib", &mib];
    let passing = ["bytes", "--to", HELLO, "--hello", HELLO_NAME, "--mib", &mib];
    let all_open = json!({ "mode": "allow-all" });
    let names = [
        "one stream: loopback",
        "one stream: direct, over a veth",
        "one stream: passed by name (TLS that is not decrypted)",
        "one stream: relayed (allow-all)",
    ];
    let mut samples = vec![Samples::default(); names.len()];
    let mut cost = [Samples::default(), Samples::default()];
    let mut order: Vec<usize> = (0..names.len()).collect();
    for round in 0..=bed.size.rounds {
        for way in &order {
            interrupt::check()?;
            if *way == 3 {
                bed.guest.set(&all_open)?;
            }
            let before = cpu(bed.guest.shim)?;
            let answer = match way {
                0 => bed.beyond(&plain),
                1 => bed.beside(&plain),
                2 => bed.guest.inside(&passing),
                _ => bed.guest.inside(&plain),
            }?;
            let used = cpu(bed.guest.shim)? - before;
            if *way == 3 {
                bed.guest.set(&policy())?;
            }
            if round > 0 {
                samples[*way].add(answer["gbits"].as_f64().context("no rate")?);
                if *way >= 2 {
                    cost[*way - 2].add(used * 1e3 * 1024.0 / bed.size.mib as f64);
                }
            }
        }
        order.rotate_left(1);
    }
    let mut rows = Vec::new();
    for (way, name) in names.iter().enumerate() {
        let mut row = bench.row(GROUP, *name, "Gbit/s", &samples[way]);
        if way > 0 {
            row = row.versus("loopback", &samples[0]);
        }
        if way > 1 {
            let enough = samples[way].median() >= 0.4 * samples[0].median();
            row = row.versus("veth", &samples[1]);
            row = row.want("≥ 0.4 × loopback", enough);
            row = row.note(format!("{:.0} ms of the shim's CPU a GiB", cost[way - 2].median()));
        }
        rows.push(row);
    }
    Ok(rows)
}

fn names(bench: &Bench, bed: &Bed<'_>) -> Result<Vec<Row>> {
    let count = bed.size.queries.to_string();
    let server = format!("{}:53", bivouac_testkit::NAME_SERVER);
    let asked = ["dns", "--name", WEB_NAME, "--count", &count];
    let direct_args: Vec<&str> = asked.into_iter().chain(["--to", &server]).collect();
    let (mut direct, mut cached) = (Samples::default(), Samples::default());
    for round in 0..=bed.size.rounds {
        interrupt::check()?;
        let (one, two) = if round % 2 == 0 {
            let one = bed.beside(&direct_args)?;
            (one, bed.guest.inside(&asked)?)
        } else {
            let two = bed.guest.inside(&asked)?;
            (bed.beside(&direct_args)?, two)
        };
        if round > 0 {
            direct.add(one["p50"].as_f64().context("no p50")?);
            cached.add(two["p50"].as_f64().context("no p50")?);
        }
    }
    let name = "p50 of a name's answer: the world's name server, direct";
    Ok(vec![
        bench.row(GROUP, name, "µs", &direct),
        bench
            .row(GROUP, "p50 of a name's answer: from the broker's cache", "µs", &cached)
            .versus("direct", &direct),
    ])
}

fn flows(bench: &Bench, bed: &Bed<'_>) -> Result<Vec<Row>> {
    let flows = bed.size.flows;
    let (guest, count) = (&bed.guest, flows.to_string());
    let mut other = policy();
    other["allow"]["another.bench.test"] = json!([]);
    let (mut empty, mut kept, mut cut) =
        (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..bed.size.rounds {
        interrupt::check()?;
        guest.set(&policy())?;
        empty.add(guest.set(&other)?);
        guest.set(&policy())?;
        let held = guest.hold(&["--to", RAW, "--count", &count])?;
        kept.add(guest.set(&other)?);
        cut.add(guest.set(&json!({ "mode": "deny-all" }))?);
        let answered = Instant::now();
        let closed = guest.held(&held)?;
        ensure!(
            closed["closed"] == flows && answered.elapsed().as_secs() < 30,
            "{flows} flows were held and then forbidden: {closed}"
        );
    }
    guest.set(&policy())?;
    let live = format!("{flows} live flows");
    let mut rows = vec![
        bench.row(GROUP, "policy swap with no flow, until the call answers", "ms", &empty),
        bench
            .row(GROUP, format!("policy swap with {live}: all stay"), "ms", &kept)
            .versus("no flow", &empty),
        bench
            .row(GROUP, format!("policy swap with {live}: all are cut"), "ms", &cut)
            .versus("no flow", &empty),
    ];
    rows.extend(footprint(bench, bed)?);
    Ok(rows)
}

/// What idle flows keep. Each time in a shim that has done nothing before: memory that earlier work gave
/// back to the allocator would be used again and not be seen.
fn footprint(bench: &Bench, bed: &Bed<'_>) -> Result<Vec<Row>> {
    let (mut relayed, mut decrypted) = (Samples::default(), Samples::default());
    let tls = ["--to", WEB, "--name", WEB_NAME, "--roots", ANCHOR];
    let kinds: [(&[&str], usize, &mut Samples); 2] = [
        (&["--to", RAW], bed.size.flows, &mut relayed),
        (&tls, bed.size.tls_flows, &mut decrypted),
    ];
    for (args, flows, samples) in kinds {
        for _ in 0..bed.size.rounds.min(3) {
            interrupt::check()?;
            let guest = bed.fresh()?;
            bench.remember(&guest.sandbox.session);
            let hold = |count: usize| {
                let count = count.to_string();
                let whole: Vec<&str> = args.iter().copied().chain(["--count", &count]).collect();
                guest.hold(&whole)
            };
            // What the first one makes for all.
            hold(1)?;
            let before = memory(guest.shim)?;
            hold(flows)?;
            samples.add((memory(guest.shim)? - before) / flows as f64);
            guest.close()?;
        }
    }
    Ok(vec![
        bench.row(GROUP, "memory of an idle relayed flow: shim (PSS)", "KiB", &relayed),
        bench.row(GROUP, "memory of an idle intercepted connection: shim (PSS)", "KiB", &decrypted),
    ])
}
