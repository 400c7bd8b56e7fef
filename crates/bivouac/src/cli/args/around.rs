//! The shapes of verbs around the engine: `top` and `completions`. Part of `args`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::cli::parse;

/// `top`
#[derive(Debug, Args)]
#[command(
    after_help = "CPU is of one CPU: 200 % are two. Disk is what a sandbox holds over its image; network what went through \
    its eth0. On a terminal: q ends; c m d n p u a sort by CPU, memory, disk, network, processes, uptime, name."
)]
pub(crate) struct Top {
    /// Sandboxes of all namespaces
    #[arg(short = 'A', long = "all-namespaces")]
    pub(crate) all_namespaces: bool,
    /// What comes first
    #[arg(long, value_enum, default_value_t = SortBy::Cpu)]
    pub(crate) sort: SortBy,
    /// Between two looks: 2s, 500ms
    #[arg(long, value_name = "TIME", value_parser = parse::duration, default_value = "2s")]
    pub(crate) interval: Duration,
    /// One table and an end, as without a terminal
    #[arg(long)]
    pub(crate) once: bool,
}

/// What `top` sorts by: the biggest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortBy {
    /// CPU time between two looks
    Cpu,
    /// Memory in use
    Memory,
    /// Processes and threads
    Pids,
    /// Bytes over the image
    Disk,
    /// Bytes in and out between two looks
    Network,
    /// Time since the start
    Uptime,
    /// Name
    Name,
}

/// `resize`
#[derive(Debug, Args)]
#[command(
    after_help = "A running sandbox has what it was started with until it stops. A disk that is smaller than what is held \
    takes nothing more until there is room."
)]
pub(crate) struct Resize {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// Most that it may hold over its image: 500M, 10G; up to the engine's --disk
    #[arg(long, value_name = "SIZE", value_parser = parse::disk_size)]
    pub(crate) disk: Option<u64>,
    /// Virtual CPUs: 1 or an even number; each brings 2048 MB of memory
    #[arg(long, value_name = "N")]
    pub(crate) vcpus: Option<i64>,
}

/// `gc`
#[derive(Debug, Args)]
#[command(after_help = "The engine does the same by itself, every few minutes.")]
pub(crate) struct Gc {
    /// Only tell what would be removed, and why
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// `completions`
#[derive(Debug, Args)]
#[command(
    after_help = "The names of sandboxes, snapshots and commands come from the running engine at each Tab."
)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

/// Shells that can be told how to complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    /// GNU Bash 4 or newer
    Bash,
    /// Z shell
    Zsh,
    /// Fish
    Fish,
    /// Elvish
    Elvish,
    /// PowerShell
    Powershell,
}
