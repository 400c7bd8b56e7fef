//! What went through a sandbox's network device, read from outside.
//!
//! Invariant: nothing is entered and nothing is asked of the sandbox; the numbers are those of its own `eth0`, which
//! its root may rename or replace: then there are none, and a sandbox can lie about itself only. Three small reads,
//! each bounded. Called by the handle when somebody asks what a session uses.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use crate::Traffic;

/// Processes of init's group that are looked at: init was the first in it.
const LOOKED_AT: usize = 16;
/// Longest beginning of a file that is read: root inside can make any number of devices.
const MOST: u64 = 64 << 10;

/// The traffic of the sandbox whose init is in the control group `folder`; `None` when it cannot be told.
pub(super) fn of_init(folder: &Path) -> Option<Traffic> {
    let procs = beginning(&folder.join("cgroup.procs"))?;
    // Version 2 lists processes of other namespaces as 0; no number is taken for granted.
    let pids = procs.lines().filter(|pid| pid.parse::<u32>().is_ok_and(|pid| pid > 0));
    let init = pids.take(LOOKED_AT).find(|pid| {
        beginning(&Path::new("/proc").join(pid).join("status")).is_some_and(|text| is_init(&text))
    })?;
    eth0(&beginning(&Path::new("/proc").join(init).join("net/dev"))?)
}

fn beginning(path: &Path) -> Option<String> {
    let mut text = Vec::new();
    File::open(path).ok()?.take(MOST).read_to_end(&mut text).ok()?;
    String::from_utf8(text).ok()
}

/// Whether a `status` is that of a sandbox's init: number 1 one namespace below ours. A namespace that was made
/// inside is two below.
fn is_init(status: &str) -> bool {
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    ids.is_some_and(|ids| {
        let ids: Vec<&str> = ids.split_whitespace().collect();
        ids.len() == 2 && ids[1] == "1"
    })
}

/// The counters of `eth0` in a `net/dev`.
fn eth0(table: &str) -> Option<Traffic> {
    let counts = table.lines().find_map(|line| line.trim_start().strip_prefix("eth0:"))?;
    let counts: Vec<u64> = counts.split_whitespace().map_while(|n| n.parse().ok()).collect();
    Some(Traffic { received: *counts.first()?, sent: *counts.get(8)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_is_told_from_others() {
        assert!(is_init("Name:\tbivouac-init\nNSpid:\t4711\t1\n"));
        for other in ["NSpid:\t4711\t2\n", "NSpid:\t4711\t17\t1\n", "NSpid:\t1\n", "Name:\tx\n"] {
            assert!(!is_init(other), "{other}");
        }
    }

    #[test]
    fn the_counters_are_eth0_s() {
        let table = "Inter-|   Receive                                                |  Transmit\n \
            face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop\n    \
            lo:     500       5    0    0    0     0          0         0      500       5    0    0\n  \
            eth0: 1234567     90    0    0    0     0          0         0    89012      80    0    0\n";
        assert_eq!(eth0(table), Some(Traffic { received: 1_234_567, sent: 89_012 }));
        assert_eq!(eth0("  lo: 1 2 3 4 5 6 7 8 9\n"), None);
        assert_eq!(eth0(" eth0: 1 2 3\n"), None, "a line that was cut says nothing");
    }
}
