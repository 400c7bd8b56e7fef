//! What else the machine did while it was measured.
//!
//! Invariant: everything here comes from `/proc`, and the processes of this run are never counted as
//! others'. Read by `main` before and after the groups.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::thread;
use std::time::Duration;

use serde::Serialize;

/// The kernel counts CPU time in hundredths of a second (USER_HZ, fixed in its interface).
const TICKS: f64 = 100.0;
/// Above this share of the machine's CPUs others disturb the figures.
const DISTURBED: f64 = 0.05;

/// CPU time of the machine, in ticks.
#[derive(Debug, Clone, Copy, Default)]
struct Cpu {
    total: u64,
    idle: u64,
    steal: u64,
}

/// The moment before the measuring.
#[derive(Debug)]
pub(crate) struct Before {
    cpu: Cpu,
    load: String,
    idle_share: f64,
    others: BTreeMap<i32, (String, u64)>,
}

/// What stands beside the figures.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Load {
    pub(crate) cpus: usize,
    pub(crate) kernel: String,
    pub(crate) loadavg_before: String,
    pub(crate) loadavg_after: String,
    /// Share of all CPUs that was busy in the second before the run, when this run did nothing.
    pub(crate) busy_before: f64,
    /// Share of all CPU time that the host's hypervisor took away.
    pub(crate) steal: f64,
    /// Share of all CPU time that went to processes that were there before.
    pub(crate) others: f64,
    /// The greediest of them.
    pub(crate) greedy: Vec<String>,
    /// Why the figures are not to be trusted; empty on a quiet machine.
    pub(crate) warnings: Vec<String>,
}

fn cpu() -> Cpu {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields: Vec<u64> = text
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|f| f.parse().ok())
        .collect();
    let at = |i: usize| fields.get(i).copied().unwrap_or(0);
    // Guest time (8, 9) is part of user time already.
    Cpu { total: fields.iter().take(8).sum(), idle: at(3) + at(4), steal: at(7) }
}

fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}

/// Every process but this one: its name, parent, and the ticks that it and its reaped children used.
fn processes() -> BTreeMap<i32, (String, i32, u64)> {
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| *pid != own)
        .filter_map(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let (front, rest) = stat.rsplit_once(") ")?;
            let name = front.split_once('(')?.1.to_owned();
            let rest: Vec<&str> = rest.split(' ').collect();
            let ticks = (11..15).filter_map(|i| rest.get(i)?.parse::<u64>().ok()).sum();
            Some((pid, (name, rest.get(1)?.parse().ok()?, ticks)))
        })
        .collect()
}

/// Whoever started this run, up to the first process: their time is this run's.
fn ancestors() -> BTreeSet<i32> {
    let all = processes();
    let mut found = BTreeSet::new();
    let mut pid = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    while pid > 1 && found.insert(pid) {
        pid = all.get(&pid).map_or(0, |(_, parent, _)| *parent);
    }
    found
}

impl Before {
    /// Looks at the machine for a second. Nothing of the run may have started.
    pub(crate) fn look() -> Self {
        let first = cpu();
        thread::sleep(Duration::from_secs(1));
        let cpu = cpu();
        let total = cpu.total.saturating_sub(first.total).max(1) as f64;
        let idle = cpu.idle.saturating_sub(first.idle) as f64;
        let ours = ancestors();
        let others = processes()
            .into_iter()
            .filter(|(pid, _)| !ours.contains(pid))
            .map(|(pid, (name, _, ticks))| (pid, (name, ticks)))
            .collect();
        Self { cpu, load: load(), idle_share: (idle / total).min(1.0), others }
    }

    /// What happened since.
    pub(crate) fn since(&self) -> Load {
        let now = cpu();
        let total = now.total.saturating_sub(self.cpu.total).max(1) as f64;
        let after = processes();
        let mut used: Vec<(u64, String)> = self
            .others
            .iter()
            .filter_map(|(pid, (name, before))| {
                let (same, _, ticks) = after.get(pid)?;
                // The kernel's own threads work for everyone, this run among them.
                let kernel = fs::read_link(format!("/proc/{pid}/exe")).is_err();
                (same == name && !kernel)
                    .then(|| (ticks.saturating_sub(*before), format!("{name} ({pid})")))
            })
            .filter(|(ticks, _)| *ticks > 0)
            .collect();
        used.sort_by(|a, b| b.cmp(a));
        // A child's time is its parent's when it is reaped, that of before the run as well.
        let busy_now = (total - now.idle.saturating_sub(self.cpu.idle) as f64) / total;
        let others = used.iter().map(|(ticks, _)| *ticks).sum::<u64>() as f64 / total;
        let others = others.min(busy_now);
        let steal = now.steal.saturating_sub(self.cpu.steal) as f64 / total;
        let busy = 1.0 - self.idle_share;
        let greedy = used.iter().take(3);
        let greedy: Vec<String> =
            greedy.map(|(ticks, name)| format!("{name} {:.1} s", *ticks as f64 / TICKS)).collect();
        let mut warnings = Vec::new();
        if busy > DISTURBED {
            warnings.push(format!("{:.0} % of the CPUs were busy before it began", busy * 100.0));
        }
        if others > DISTURBED {
            let who = greedy.join(", ");
            warnings
                .push(format!("other processes took {:.0} % of the CPUs: {who}", others * 100.0));
        }
        if steal > DISTURBED {
            warnings.push(format!("the hypervisor took {:.0} % of the CPU time", steal * 100.0));
        }
        Load {
            cpus: thread::available_parallelism().map_or(1, usize::from),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_owned(),
            loadavg_before: self.load.clone(),
            loadavg_after: load(),
            busy_before: busy,
            steal,
            others,
            greedy,
            warnings,
        }
    }
}

/// Values of `/proc/meminfo`, KiB.
pub(crate) fn meminfo() -> BTreeMap<String, f64> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let (name, rest) = line.split_once(':')?;
            Some((name.to_owned(), rest.split_whitespace().next()?.parse().ok()?))
        })
        .collect()
}
