//! The shapes of `token …`. Part of `args`.

use std::time::Duration;

use bivouac_types::access::{Reach, Verb};
use clap::Subcommand;

use crate::cli::parse;

/// `token …`
#[derive(Debug, Subcommand)]
pub(crate) enum Token {
    /// Make a token with some of your rights, and print it: it is shown once
    #[command(after_help = "Rights:\n\
        \x20 read     look: lists, records, logs, files\n\
        \x20 exec     work inside: commands, terminals, SSH, files, ports\n\
        \x20 preview  reach the ports through their routes\n\
        \x20 write    make, change, stop and remove sandboxes, snapshots, drives\n\
        \x20 policy   change policies, secrets and credentials\n\
        \x20 admin    everything, and what concerns the engine; with --all-namespaces only\n\
        Use it as BIVOUAC_TOKEN. It ends when it expires, is revoked, or the token that made it is.")]
    Create {
        /// Its name
        name: String,
        /// Namespace that it is for; -n does the same (repeat for more) [default: the one of this command]
        #[arg(long = "in", value_name = "TEAM/PROJECT|TEAM/*", value_parser = reach, conflicts_with = "all_namespaces")]
        namespaces: Vec<String>,
        /// For every namespace
        #[arg(short = 'A', long = "all-namespaces")]
        all_namespaces: bool,
        /// What it may do
        #[arg(long, value_name = "RIGHTS", value_delimiter = ',', value_parser = right,
            default_value = "read,exec,preview,write")]
        allow: Vec<String>,
        /// Count no more after so long: 12h, 30d [default: with the token that makes it]
        #[arg(long, value_name = "TIME", value_parser = parse::duration)]
        expires: Option<Duration>,
    },
    /// List tokens that count: all for an administrator, else yours and those that it made
    #[command(visible_alias = "list")]
    Ls {
        /// Also those that have ended
        #[arg(short = 'a', long)]
        all: bool,
    },
    /// Take tokens back, with those that they made; what is open in their names is cut
    #[command(visible_alias = "rm")]
    Revoke {
        /// Names or ids
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Show who you are to the engine, and what you may
    Whoami,
    /// Show who used what, at which door; for administrators
    Log {
        /// Wait for more
        #[arg(short = 'f', long)]
        follow: bool,
        /// Only of this token: name or id
        #[arg(long, value_name = "NAME")]
        token: Option<String>,
        /// How many of the last lines
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        lines: u32,
    },
}

fn reach(text: &str) -> Result<String, String> {
    Reach::parse(text).map(|reach| reach.to_string()).map_err(|error| error.to_string())
}

fn right(text: &str) -> Result<String, String> {
    Verb::parse(text).map(|verb| verb.to_string()).map_err(|error| error.to_string())
}
