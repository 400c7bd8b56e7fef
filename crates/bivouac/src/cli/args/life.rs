//! The shapes of the rules for a sandbox's life, and of the verbs about it. Part of `args`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::cli::parse;

/// What ends and wakes a sandbox; shared by `create` and `set`.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Life options")]
pub(crate) struct LifeArgs {
    /// Stop it after so long without activity: 30m, 8h, or off; its time limit does not cut it then
    #[arg(long, value_name = "TIME|off", value_parser = idle)]
    pub(crate) idle_stop: Option<Idle>,
    /// Pause it then, with its memory
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub(crate) idle_pause: Option<bool>,
    /// What is done when its host restarts or its processes are lost [default: no]
    #[arg(long, value_enum, value_name = "POLICY")]
    pub(crate) restart: Option<RestartArg>,
    /// Start it for a request to one of its ports, or an SSH connection
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub(crate) wake: Option<bool>,
    /// Line of shell to run inside before it is stopped, whoever asked for that; empty for none
    #[arg(long, value_name = "CMD")]
    pub(crate) pre_stop: Option<String>,
    /// How long that may take [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = parse::duration, requires = "pre_stop")]
    pub(crate) pre_stop_timeout: Option<Duration>,
}

/// An idle rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Idle {
    /// None.
    Off,
    /// After so long.
    After(Duration),
}

fn idle(text: &str) -> Result<Idle, String> {
    if matches!(text, "off" | "never") {
        return Ok(Idle::Off);
    }
    parse::duration(text).map(Idle::After)
}

/// What is done about a lost session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RestartArg {
    /// Nothing, until somebody starts it
    No,
    /// It is started again from what was kept
    UnlessStopped,
}

/// `set`
#[derive(Debug, Args)]
#[command(after_help = "What is not named stays as it is. It is in force at once.")]
pub(crate) struct Set {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) life: LifeArgs,
}

/// `pause`
#[derive(Debug, Args)]
#[command(
    after_help = "Everything in it stands still, with its memory, until `bivouac resume`, or until somebody works in \
    it.\nThat time does not count against its time limit. `stop` keeps files only."
)]
pub(crate) struct Pause {
    /// The sandboxes
    #[arg(required = true, value_name = "NAME", value_parser = parse::sandbox_name)]
    pub(crate) names: Vec<String>,
    /// Also move their memory to the host's swap
    #[arg(long)]
    pub(crate) deep: bool,
}

/// `stop`
#[derive(Debug, Args)]
pub(crate) struct Stop {
    /// The sandboxes
    #[arg(required = true, value_name = "NAME", value_parser = parse::sandbox_name)]
    pub(crate) names: Vec<String>,
    /// Without what they want run before; what runs of that is cut off
    #[arg(long)]
    pub(crate) no_hook: bool,
}

/// `keep-alive`
#[derive(Debug, Args)]
pub(crate) struct KeepAlive {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// How long from now on: 30m, 8h [default: as long as a session of it may live]
    #[arg(value_name = "DURATION", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
}
