//! Texts of the honest files, in the kernel's own formats: pure functions of what was measured.
//!
//! Invariant: whatever the numbers, sums hold (free ≤ available ≤ total) and counters of one session
//! never go back. What cannot be known for a sandbox is 0, never the host's.

use std::fmt::Write as _;

/// Memory of a session, bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Memory {
    pub limit: u64,
    pub used: u64,
    pub swap_limit: u64,
    pub swap_used: u64,
    pub anon: u64,
    pub file: u64,
    pub shared: u64,
    pub active_anon: u64,
    pub inactive_anon: u64,
    pub active_file: u64,
    pub inactive_file: u64,
    pub unevictable: u64,
    pub dirty: u64,
    pub writeback: u64,
    pub mapped: u64,
    pub slab_reclaimable: u64,
    pub slab_unreclaimable: u64,
    pub kernel_stack: u64,
    pub page_tables: u64,
}

/// /proc/meminfo.
pub(super) fn meminfo(m: &Memory) -> String {
    let free = m.limit.saturating_sub(m.used);
    // What the kernel would give back before it kills.
    let cache = m.active_file + m.inactive_file + m.slab_reclaimable;
    let available = free.saturating_add(cache).min(m.limit);
    let swap_used = m.swap_used.min(m.swap_limit);
    let slab = m.slab_reclaimable + m.slab_unreclaimable;
    let rows = [
        ("MemTotal", m.limit),
        ("MemFree", free),
        ("MemAvailable", available),
        ("Buffers", 0),
        ("Cached", m.file),
        ("SwapCached", 0),
        ("Active", m.active_anon + m.active_file),
        ("Inactive", m.inactive_anon + m.inactive_file),
        ("Active(anon)", m.active_anon),
        ("Inactive(anon)", m.inactive_anon),
        ("Active(file)", m.active_file),
        ("Inactive(file)", m.inactive_file),
        ("Unevictable", m.unevictable),
        ("Mlocked", 0),
        ("SwapTotal", m.swap_limit),
        ("SwapFree", m.swap_limit - swap_used),
        ("Dirty", m.dirty),
        ("Writeback", m.writeback),
        ("AnonPages", m.anon),
        ("Mapped", m.mapped),
        ("Shmem", m.shared),
        ("KReclaimable", m.slab_reclaimable),
        ("Slab", slab),
        ("SReclaimable", m.slab_reclaimable),
        ("SUnreclaim", m.slab_unreclaimable),
        ("KernelStack", m.kernel_stack),
        ("PageTables", m.page_tables),
        ("CommitLimit", m.limit + m.swap_limit),
        ("Committed_AS", m.anon + m.shared),
        ("VmallocTotal", 0),
        ("VmallocUsed", 0),
        ("VmallocChunk", 0),
    ];
    let mut out = String::with_capacity(rows.len() * 28);
    for (name, bytes) in rows {
        let _ = writeln!(out, "{:<16}{:>8} kB", format!("{name}:"), bytes / 1024);
    }
    out
}

/// /proc/swaps. Where the swap is, is the host's affair.
pub(super) fn swaps(m: &Memory) -> String {
    let mut out = String::from("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n");
    if m.swap_limit > 0 {
        let (size, used) = (m.swap_limit / 1024, m.swap_used.min(m.swap_limit) / 1024);
        let _ = writeln!(out, "none\t\t\t\t\tvirtual\t\t{size}\t\t{used}\t\t0");
    }
    out
}

/// CPU time of a session in ticks of 1/100 s, as its files show it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ticks {
    pub user: u64,
    pub system: u64,
    pub idle: u64,
}

impl Ticks {
    /// What was used since the start on so many CPUs; not less than what was told `before`.
    pub(super) fn of(user_us: u64, system_us: u64, up_us: u64, cpus: u64, before: Self) -> Self {
        let ticks = |us: u64| us / 10_000;
        let (user, system) = (ticks(user_us), ticks(system_us));
        let all = ticks(up_us).saturating_mul(cpus);
        let idle = all.saturating_sub(user).saturating_sub(system);
        Self {
            user: user.max(before.user),
            system: system.max(before.system),
            idle: idle.max(before.idle),
        }
    }
}

/// /proc/stat. The kernel counts a group's time without CPUs, so each of them shows its part.
pub(super) fn stat(cpus: &[u32], t: Ticks, start: u64, running: u64) -> String {
    let mut out = String::new();
    let line = |out: &mut String, name: &str, [user, system, idle]: [u64; 3]| {
        let _ = writeln!(out, "{name} {user} 0 {system} {idle} 0 0 0 0 0 0");
    };
    line(&mut out, "cpu ", [t.user, t.system, t.idle]);
    let count = cpus.len().max(1) as u64;
    for (index, cpu) in (0..).zip(cpus) {
        // Parts that add up: the first ones take what the division leaves.
        let part = |all: u64| all / count + u64::from(index < all % count);
        line(&mut out, &format!("cpu{cpu}"), [part(t.user), part(t.system), part(t.idle)]);
    }
    let _ = write!(
        out,
        "intr 0\nctxt 0\nbtime {start}\nprocesses 0\nprocs_running {}\nprocs_blocked 0\n\
         softirq 0 0 0 0 0 0 0 0 0 0 0\n",
        running.max(1)
    );
    out
}

/// /proc/uptime: since the session's start, and the idle time of all its CPUs.
pub(super) fn uptime(up_us: u64, t: Ticks) -> String {
    let up = up_us / 10_000;
    format!("{}.{:02} {}.{:02}\n", up / 100, up % 100, t.idle / 100, t.idle % 100)
}

/// Load averages over 1, 5 and 15 minutes, moved on only when somebody reads them.
///
/// The load is the CPU time that was used per time that passed, not the length of the queue: the
/// kernel counts no queue for a group. A sandbox at its limit shows its number of CPUs.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Load {
    at_us: u64,
    used_us: u64,
    averages: [f64; 3],
    /// Of the last interval.
    now: f64,
}

impl Load {
    /// Moves on to a time since the session's start and the CPU time used by then.
    pub(super) fn advance(&mut self, at_us: u64, used_us: u64) {
        let passed = at_us.saturating_sub(self.at_us);
        // Too short an interval measures only the granularity of the counters.
        if passed < 500_000 {
            return;
        }
        let load = used_us.saturating_sub(self.used_us) as f64 / passed as f64;
        for (average, seconds) in self.averages.iter_mut().zip([60.0, 300.0, 900.0]) {
            let keep = (-(passed as f64 / 1e6) / seconds).exp();
            *average = *average * keep + load * (1.0 - keep);
        }
        (self.at_us, self.used_us, self.now) = (at_us, used_us.max(self.used_us), load);
    }

    /// Running tasks of about now, out of so many: who asks is one.
    pub(super) fn running(&self, tasks: u64) -> u64 {
        (self.now.round() as u64).clamp(1, tasks.max(1))
    }

    /// /proc/loadavg. Which process was the newest is not known; their number stands for it.
    pub(super) fn text(&self, tasks: u64) -> String {
        let [one, five, fifteen] = self.averages;
        let tasks = tasks.max(1);
        let running = self.running(tasks);
        format!("{one:.2} {five:.2} {fifteen:.2} {running}/{tasks} {tasks}\n")
    }
}

/// /proc/cpuinfo: the blocks of the session's CPUs out of the host's text, and what follows them.
pub(super) fn cpuinfo(host: &str, cpus: &[u32]) -> String {
    let number = |block: &str| -> Option<u32> {
        let line = block.lines().find(|line| line.starts_with("processor"))?;
        line.split_once(':')?.1.trim().parse().ok()
    };
    let mut out = String::new();
    for block in host.split_inclusive("\n\n") {
        if number(block).is_none_or(|cpu| cpus.contains(&cpu)) {
            out.push_str(block);
        }
    }
    out
}

/// A list of CPUs as in /sys/devices/system/cpu/online.
pub(super) fn online(cpus: &[u32]) -> String {
    let mut sorted = cpus.to_vec();
    sorted.sort_unstable();
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for cpu in sorted {
        match ranges.last_mut() {
            Some((_, end)) if *end + 1 == cpu => *end = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let parts: Vec<String> = ranges
        .into_iter()
        .map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") })
        .collect();
    parts.join(",") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str, key: &str) -> u64 {
        let line = text.lines().find(|l| l.split(':').next() == Some(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    proptest::proptest! {
        #[test]
        fn memory_sums_hold(limit in 1u64..1 << 45, used in 0u64..1 << 45, file in 0u64..1 << 45, swap in 0u64..1 << 40) {
            let m = Memory { limit, used, inactive_file: file, swap_used: swap, swap_limit: 1 << 30, ..Memory::default() };
            let text = meminfo(&m);
            let (total, free, available) = (value(&text, "MemTotal"), value(&text, "MemFree"), value(&text, "MemAvailable"));
            proptest::prop_assert_eq!(total, limit / 1024);
            proptest::prop_assert!(free <= available && available <= total);
            proptest::prop_assert!(value(&text, "SwapFree") <= value(&text, "SwapTotal"));
        }

        #[test]
        fn counters_never_go_back(steps in proptest::collection::vec((0u64..1 << 40, 0u64..1 << 40, 0u64..1 << 40), 1..20), cpus in 1u64..8) {
            let (mut before, mut load) = (Ticks::default(), Load::default());
            for (user, system, up) in steps {
                let now = Ticks::of(user, system, up, cpus, before);
                proptest::prop_assert!(now.user >= before.user && now.system >= before.system && now.idle >= before.idle);
                before = now;
                load.advance(up, user);
                proptest::prop_assert!(load.averages.iter().all(|a| a.is_finite() && *a >= 0.0));
            }
        }

        #[test]
        fn cpu_lines_add_up(user in 0u64..1 << 40, system in 0u64..1 << 40, idle in 0u64..1 << 40, count in 1u32..9) {
            let cpus: Vec<u32> = (3..3 + count).collect();
            let text = stat(&cpus, Ticks { user, system, idle }, 1, 1);
            let fields = |line: &str| -> Vec<u64> { line.split_whitespace().skip(1).map(|f| f.parse().unwrap()).collect() };
            let mut sum = vec![0; 10];
            for line in text.lines().filter(|l| l.starts_with("cpu") && !l.starts_with("cpu ")) {
                for (total, part) in sum.iter_mut().zip(fields(line)) { *total += part; }
            }
            proptest::prop_assert_eq!(sum, fields(text.lines().next().unwrap()));
        }
    }

    #[test]
    fn a_busy_cpu_becomes_a_load_of_one() {
        let mut load = Load::default();
        for minute in 1..=10 {
            load.advance(minute * 60_000_000, minute * 60_000_000);
        }
        let text = load.text(12);
        let averages: Vec<f64> =
            text.split(' ').take(3).map(|field| field.parse().unwrap()).collect();
        assert!(averages[0] > 0.99 && averages[1] > 0.8 && averages[2] > 0.4, "{text}");
        assert!(text.ends_with("1/12 12\n"), "{text}");
        load.advance(11 * 60_000_000, 10 * 60_000_000);
        assert!(load.averages[0] < 0.4, "it decays: {load:?}");
    }

    #[test]
    fn lists_of_cpus() {
        assert_eq!(online(&[0, 1, 2, 3]), "0-3\n");
        assert_eq!(online(&[7, 0, 1, 5]), "0-1,5,7\n");
    }

    #[test]
    fn cpuinfo_keeps_its_own_and_the_rest() {
        let host =
            "processor\t: 0\nmodel\t: x\n\nprocessor\t: 1\nmodel\t: x\n\nHardware\t: board\n";
        assert_eq!(cpuinfo(host, &[1]), "processor\t: 1\nmodel\t: x\n\nHardware\t: board\n");
    }

    #[test]
    fn uptime_has_the_kernels_form() {
        assert_eq!(uptime(12_345_678, Ticks { idle: 2405, ..Ticks::default() }), "12.34 24.05\n");
    }
}
