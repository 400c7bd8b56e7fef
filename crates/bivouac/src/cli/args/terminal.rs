//! The shapes of verbs about terminals: `shell`, `terminals`, `attach`, `hangup`. Part of `args`.

use clap::Args;

use super::User;
use crate::cli::parse::{self, EnvVar};

/// `shell`
#[derive(Debug, Args)]
#[command(
    after_help = "A terminal with a name stays when you leave it: ~. at the beginning of a line leaves, ~~ is \
                  one ~. One opened with --new goes with its last client."
)]
pub(crate) struct ShellIn {
    /// The sandbox; started if it was stopped
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// Terminal to attach to, opened if it does not run [default: main, or root with -u root]
    #[arg(long, value_name = "TERMINAL", value_parser = parse::terminal_name)]
    pub(crate) terminal: Option<String>,
    /// Open another terminal, which goes when you leave it
    #[arg(long, conflicts_with = "terminal")]
    pub(crate) new: bool,
    /// Working folder of a terminal that is opened
    #[arg(short = 'w', long, value_name = "DIR")]
    pub(crate) workdir: Option<String>,
    /// Variable of a terminal that is opened; a name alone takes the caller's value (repeat for more)
    #[arg(short = 'e', long = "env", value_name = "K[=V]", value_parser = parse::env_var)]
    pub(crate) env: Vec<EnvVar>,
    /// User that runs it
    #[arg(short = 'u', long, value_enum, default_value_t = User::VercelSandbox)]
    pub(crate) user: User,
    /// What is to run instead of the user's shell
    #[arg(last = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// `attach`
#[derive(Debug, Args)]
#[command(
    after_help = "~. at the beginning of a line leaves; bivouac terminals NAME lists terminals."
)]
pub(crate) struct Attach {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// The terminal
    #[arg(value_parser = parse::terminal_name)]
    pub(crate) terminal: String,
    /// Bytes of earlier output to show first: 64K, 1M, 0
    #[arg(long, value_name = "SIZE", value_parser = parse::scrollback, default_value = "64K")]
    pub(crate) scrollback: u64,
}

/// `hangup`
#[derive(Debug, Args)]
pub(crate) struct Hangup {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// The terminals
    #[arg(required = true, value_name = "TERMINAL", value_parser = parse::terminal_name)]
    pub(crate) terminals: Vec<String>,
}
