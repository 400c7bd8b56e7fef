//! The hard clean-up behind an engine, by what `/proc` says and not by what the engine says.
//!
//! Invariant: touches only what belongs to one data folder. Called when a `TestServer` is dropped.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};

use crate::traces;

/// Kills, unmounts and detaches what is left of the engine that owned `data`; says what it was.
pub(crate) fn everything_of(data: &Path) -> Vec<String> {
    let mut left = Vec::new();
    // As the pool, the view stays mounted behind an engine that was killed; its server ends with it.
    let _ = unmount(data.join("view"), UnmountFlags::DETACH);
    let start = Instant::now();
    // An engine's helpers end when their engine is gone: give them the moment they need.
    loop {
        let pids = processes_of(data);
        if pids.is_empty() {
            break;
        }
        if start.elapsed() > Duration::from_secs(5) {
            for pid in &pids {
                left.push(format!("process {pid} {}", traces::name_of(*pid)));
                if let Some(pid) = Pid::from_raw(*pid) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            if start.elapsed() > Duration::from_secs(15) {
                break;
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    left.sort();
    left.dedup();
    let mut mounts = traces::mount_points(data);
    mounts.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
    // The pool and the images stay mounted behind an engine on purpose; all else must be gone.
    let (pool, images) = (data.join("pool"), data.join("mounts"));
    for path in mounts {
        if path != pool && !path.starts_with(&images) {
            left.push(format!("mount {}", path.display()));
        }
        let _ = unmount(&path, UnmountFlags::DETACH);
    }
    for (device, _) in traces::loop_devices(data) {
        let _ = Command::new("losetup").arg("-d").arg(format!("/dev/{device}")).status();
    }
    left
}

/// Processes that have something of the folder open, or name it in their arguments or variables.
fn processes_of(data: &Path) -> BTreeSet<i32> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let wanted = data.as_os_str().as_encoded_bytes();
    let names = |path: PathBuf| {
        fs::read(path).is_ok_and(|text| text.windows(wanted.len()).any(|w| w == wanted))
    };
    traces::pids()
        .into_iter()
        .filter(|pid| *pid != own)
        .filter(|pid| {
            let proc = PathBuf::from(format!("/proc/{pid}"));
            // Only the product's own: a client that was started with the folder in its variables
            // ends by itself or belongs to the test.
            let ours = traces::name_of(*pid).starts_with("bivouac");
            ours && (names(proc.join("environ"))
                || names(proc.join("cmdline"))
                || fs::read_dir(proc.join("fd"))
                    .into_iter()
                    .flatten()
                    .flatten()
                    .any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.starts_with(data))))
        })
        .collect()
}
