//! What the control groups say of a session, for the view: memory, CPU time, tasks.
//!
//! Reads as an unprivileged user, each file by its path and not by an open descriptor, so that a
//! session costs no descriptor. Invariant: a file that a kernel does not have counts as 0; only a
//! group that is gone is an error.

use std::io;
use std::path::{Path, PathBuf};

use super::text::Memory;
use crate::linux::cgroup::SessionGroups;

/// What bounds every session, bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Host {
    memory: u64,
    swap: u64,
}

impl Host {
    /// Reads the host's own meminfo.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(super) fn read() -> io::Result<Self> {
        let text = std::fs::read_to_string("/proc/meminfo")?;
        let kib = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key));
            line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
        };
        Ok(Self { memory: kib("MemTotal:") * 1024, swap: kib("SwapTotal:") * 1024 })
    }
}

/// The files of one session.
#[derive(Debug)]
pub(super) struct Meter {
    memory: PathBuf,
    memory_v2: bool,
    cpu_stat: PathBuf,
    tasks: PathBuf,
    used_us: u64,
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The number behind a key of a flat keyed file.
fn keyed(text: &str, key: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(name, _)| *name == key)
        .and_then(|(_, value)| value.trim().parse().ok())
        .unwrap_or(0)
}

impl Meter {
    pub(super) fn new(groups: &SessionGroups) -> Self {
        let (memory, memory_v2) = groups.memory_folder();
        Self {
            memory,
            memory_v2,
            cpu_stat: groups.unified().join("cpu.stat"),
            tasks: groups.pids_folder().join("pids.current"),
            used_us: 0,
        }
    }

    /// Whether the session is gone: its group is.
    pub(super) fn gone(&self) -> bool {
        matches!(std::fs::metadata(&self.cpu_stat), Err(e) if e.kind() == io::ErrorKind::NotFound)
    }

    /// User and system time, µs.
    ///
    /// # Errors
    /// When the group is gone.
    pub(super) fn cpu(&mut self) -> io::Result<(u64, u64)> {
        let text = std::fs::read_to_string(&self.cpu_stat)?;
        self.used_us = keyed(&text, "usage_usec");
        Ok((keyed(&text, "user_usec"), keyed(&text, "system_usec")))
    }

    /// All CPU time as of the last [`cpu`](Self::cpu), µs.
    pub(super) fn used_us(&self) -> u64 {
        self.used_us
    }

    /// Processes and threads, with init.
    ///
    /// # Errors
    /// When the group is gone.
    pub(super) fn tasks(&self) -> io::Result<u64> {
        Ok(std::fs::read_to_string(&self.tasks)?.trim().parse().unwrap_or(1))
    }

    /// Memory in use and its limits.
    ///
    /// # Errors
    /// When the group is gone.
    pub(super) fn memory(&self, host: &Host) -> io::Result<Memory> {
        let stat = std::fs::read_to_string(self.memory.join("memory.stat"))?;
        let file = |name: &str| number(&self.memory.join(name));
        // A limit above what the host has promises nothing.
        let limit = |name: &str, host: u64| file(name).unwrap_or(u64::MAX).min(host);
        Ok(if self.memory_v2 {
            let of = |key| keyed(&stat, key);
            Memory {
                limit: limit("memory.max", host.memory),
                used: file("memory.current").unwrap_or(0),
                swap_limit: limit("memory.swap.max", host.swap),
                swap_used: file("memory.swap.current").unwrap_or(0),
                anon: of("anon"),
                file: of("file"),
                shared: of("shmem"),
                active_anon: of("active_anon"),
                inactive_anon: of("inactive_anon"),
                active_file: of("active_file"),
                inactive_file: of("inactive_file"),
                unevictable: of("unevictable"),
                dirty: of("file_dirty"),
                writeback: of("file_writeback"),
                mapped: of("file_mapped"),
                slab_reclaimable: of("slab_reclaimable"),
                slab_unreclaimable: of("slab_unreclaimable"),
                kernel_stack: of("kernel_stack"),
                page_tables: of("pagetables"),
            }
        } else {
            let of = |key: &str| keyed(&stat, &format!("total_{key}"));
            let memory = limit("memory.limit_in_bytes", host.memory);
            // Memory and swap have one limit together here.
            let both = file("memory.memsw.limit_in_bytes");
            let swap = both.map_or(0, |both| both.saturating_sub(memory).min(host.swap));
            // Version 1 does not part its kernel memory: none of it counts as reclaimable.
            let kernel = file("memory.kmem.usage_in_bytes").unwrap_or(0);
            Memory {
                limit: memory,
                used: file("memory.usage_in_bytes").unwrap_or(0),
                swap_limit: swap,
                swap_used: of("swap"),
                anon: of("rss"),
                file: of("cache"),
                shared: of("shmem"),
                active_anon: of("active_anon"),
                inactive_anon: of("inactive_anon"),
                active_file: of("active_file"),
                inactive_file: of("inactive_file"),
                unevictable: of("unevictable"),
                dirty: of("dirty"),
                writeback: of("writeback"),
                mapped: of("mapped_file"),
                slab_reclaimable: 0,
                slab_unreclaimable: kernel,
                kernel_stack: 0,
                page_tables: 0,
            }
        })
    }
}
