//! The shapes of verbs about states: `snapshot`, `snapshots`, `fork`, `rollback`. Part of `args`.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use super::snapshot_id;
use crate::cli::parse::{self, EnvVar};

/// `snapshot`
#[derive(Debug, Args)]
pub(crate) struct Snapshot {
    /// The sandbox; it must be running
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// Let the sandbox go on: it stands still for some milliseconds, however much it holds
    #[arg(long)]
    pub(crate) live: bool,
    /// Write a label on it (repeat for more)
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse::tag)]
    pub(crate) labels: Vec<(String, String)>,
    /// Delete the snapshot so long after its last use: 7d [default: the engine's]
    #[arg(long, value_name = "TIME", value_parser = parse::duration, conflicts_with = "keep")]
    pub(crate) expires: Option<Duration>,
    /// Keep the snapshot for ever
    #[arg(long)]
    pub(crate) keep: bool,
}

/// `snapshots …`
#[derive(Debug, Subcommand)]
pub(crate) enum Snapshots {
    /// List snapshots
    #[command(visible_alias = "list")]
    Ls {
        /// Only of this sandbox
        #[arg(value_parser = parse::sandbox_name)]
        name: Option<String>,
        /// Only with this label
        #[arg(long, value_name = "KEY=VALUE", value_parser = parse::tag)]
        label: Option<(String, String)>,
        /// Only ids
        #[arg(short = 'q', long)]
        quiet: bool,
    },
    /// Show one snapshot
    Get {
        /// The snapshot
        #[arg(value_name = "ID", value_parser = snapshot_id)]
        id: String,
    },
    /// Show what a snapshot comes from, or what comes from it
    Tree {
        /// The snapshot
        #[arg(value_name = "ID", value_parser = snapshot_id)]
        id: String,
        /// Towards what comes from it; at a branch the newest
        #[arg(long)]
        down: bool,
    },
    /// Write labels on a snapshot, or take them off
    Label {
        /// The snapshot
        #[arg(value_name = "ID", value_parser = snapshot_id)]
        id: String,
        /// KEY=VALUE sets one, KEY- takes it off
        #[arg(required = true, value_name = "KEY=VALUE|KEY-", value_parser = label)]
        labels: Vec<(String, Option<String>)>,
    },
    /// Write a snapshot into a file, for another machine or another tool
    Export {
        /// The snapshot
        #[arg(value_name = "ID", value_parser = snapshot_id)]
        id: String,
        /// The file; `-` is standard output
        file: String,
        /// What it changed of its image, or the whole as an OCI image
        #[arg(long, value_enum, default_value_t = ExportFormat::TarZst)]
        format: ExportFormat,
    },
    /// Take in a snapshot out of a file that `export` wrote
    Import(Import),
    /// Delete snapshots
    #[command(visible_alias = "delete")]
    Rm {
        /// The snapshots
        #[arg(required = true, value_name = "ID", value_parser = snapshot_id)]
        ids: Vec<String>,
    },
}

/// `snapshots export --format`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportFormat {
    /// A compressed tar of what it changed of its image
    #[value(name = "tar.zst")]
    TarZst,
    /// A tar of an OCI layout: the image and what was changed, for podman and others
    Oci,
}

impl ExportFormat {
    /// Its word in the API.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::TarZst => "tar.zst",
            Self::Oci => "oci",
        }
    }
}

/// `snapshots import`
#[derive(Debug, Args)]
pub(crate) struct Import {
    /// The file; `-` is standard input
    pub(crate) file: String,
    /// Name of its sandbox in lists [default: the one that it was taken of]
    #[arg(long, value_parser = parse::sandbox_name)]
    pub(crate) name: Option<String>,
    /// Write a label on it, over those that it brings (repeat for more)
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse::tag)]
    pub(crate) labels: Vec<(String, String)>,
    /// Put it on this image, whatever it was taken of
    #[arg(long, value_name = "IMAGE")]
    pub(crate) onto: Option<String>,
}

/// `fork`
#[derive(Debug, Args)]
#[command(
    after_help = "A running sandbox is copied as it is at this moment and goes on; a stopped one as it was left.\n\
    Several copies are called NAME-1, NAME-2 and so on: all of them come to be, or none. -n N is --count N."
)]
pub(crate) struct Fork {
    /// The sandbox to copy: its files and its settings
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) source: String,
    /// Name of the copy, or the beginning of all their names [default: generated ones]
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: Option<String>,
    /// How many copies (-n N)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) count: u32,
    /// From this snapshot instead
    #[arg(long, value_name = "ID", value_parser = snapshot_id, conflicts_with = "last")]
    pub(crate) snapshot: Option<String>,
    /// From the last snapshot, also of a running sandbox
    #[arg(long)]
    pub(crate) last: bool,
    /// Variables of the copies instead of the source's (repeat for more)
    #[arg(short = 'e', long = "env", value_name = "K[=V]", value_parser = parse::env_var)]
    pub(crate) env: Vec<EnvVar>,
    /// Labels of the copies instead of the source's (repeat for more)
    #[arg(long = "tag", value_name = "KEY=VALUE", value_parser = parse::tag)]
    pub(crate) tags: Vec<(String, String)>,
    /// Time that a session of a copy may live: 1h
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) timeout: Option<Duration>,
    /// Virtual CPUs of a copy
    #[arg(long, value_name = "N")]
    pub(crate) vcpus: Option<i64>,
    /// Most that a copy may hold over its image [default: the source's]
    #[arg(long, value_name = "SIZE", value_parser = parse::disk_size)]
    pub(crate) disk: Option<u64>,
    /// Forget the files of a copy when it stops
    #[arg(long)]
    pub(crate) ephemeral: bool,
}

/// `rollback`
#[derive(Debug, Args)]
#[command(
    after_help = "A running sandbox runs again from there, a stopped one stays stopped. Name, routes and settings stay."
)]
pub(crate) struct Rollback {
    /// The sandbox
    #[arg(value_parser = parse::sandbox_name)]
    pub(crate) name: String,
    /// Where to go back to [default: the last snapshot that was taken of it]
    #[arg(value_name = "SNAPSHOT", value_parser = snapshot_id)]
    pub(crate) snapshot: Option<String>,
    /// Forget what it would leave, instead of keeping that as a snapshot
    #[arg(long)]
    pub(crate) discard: bool,
}

/// Reads `KEY=VALUE`, or `KEY-` for one that is to go.
fn label(text: &str) -> Result<(String, Option<String>), String> {
    if let Some((key, value)) = text.split_once('=').filter(|(key, _)| !key.is_empty()) {
        return Ok((key.to_owned(), Some(value.to_owned())));
    }
    match text.strip_suffix('-') {
        Some(key) if !key.is_empty() => Ok((key.to_owned(), None)),
        _ => Err(format!("'{text}' is no change of a label: write KEY=VALUE or KEY-")),
    }
}

#[cfg(test)]
mod tests {
    use super::label;

    #[test]
    fn labels_are_set_and_taken_off() {
        let owned = |key: &str, value: Option<&str>| (key.to_owned(), value.map(str::to_owned));
        assert_eq!(label("a=b=c"), Ok(owned("a", Some("b=c"))));
        assert_eq!(label("a="), Ok(owned("a", Some(""))));
        assert_eq!(label("a-"), Ok(owned("a", None)));
        assert_eq!(label("a-b=c-"), Ok(owned("a-b", Some("c-"))));
        for wrong in ["", "a", "-", "=b"] {
            assert!(label(wrong).is_err(), "{wrong}");
        }
    }
}
