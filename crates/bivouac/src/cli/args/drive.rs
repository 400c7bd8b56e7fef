//! The shapes of `drive …`. Part of `args`.

use clap::Subcommand;

use crate::cli::parse::{self, FilePlace, InDrive, MountArg};

/// `drive …`
#[derive(Debug, Subcommand)]
pub(crate) enum Drive {
    /// Make a drive; one that is there already with that size is as good
    Create {
        /// Its name
        #[arg(value_parser = parse::drive_name)]
        name: String,
        /// Most that it may hold: 500M, 20G, 1T [default: 1T]
        #[arg(long, value_name = "SIZE", value_parser = parse::size)]
        size: Option<i64>,
        /// Opaque; a sandbox has to be in the same [default: iad1]
        #[arg(long)]
        region: Option<String>,
    },
    /// List drives, or a folder of one
    #[command(visible_alias = "list")]
    Ls {
        /// DRIVE:PATH for the files of a drive [default: the drives themselves]
        #[arg(value_name = "DRIVE:PATH", value_parser = parse::in_drive)]
        place: Option<InDrive>,
        /// Only drives whose names start so
        #[arg(long, value_name = "TEXT", conflicts_with = "place")]
        prefix: Option<String>,
        /// Only names
        #[arg(short = 'q', long)]
        quiet: bool,
    },
    /// Show a drive and what it holds
    Show {
        /// The drive
        #[arg(value_parser = parse::drive_name)]
        name: String,
    },
    /// Delete drives with all that they hold; one that is attached is refused
    #[command(visible_alias = "delete")]
    Rm {
        /// The drives
        #[arg(required = true, value_name = "NAME", value_parser = parse::drive_name)]
        names: Vec<String>,
    },
    /// Make a drive out of another one as it is now, whoever writes it
    Fork {
        /// The drive to copy
        #[arg(value_parser = parse::drive_name)]
        source: String,
        /// Name of the copy
        #[arg(value_parser = parse::drive_name)]
        name: String,
    },
    /// Give a sandbox a drive, at once if it runs, and for its next starts
    Attach {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        sandbox: String,
        /// DRIVE:/PATH, or DRIVE:/PATH:snapshot for a private copy of it
        #[arg(value_name = "DRIVE:/PATH[:snapshot]", value_parser = parse::mount)]
        mount: MountArg,
    },
    /// Take a drive from a sandbox, at once if it runs; what was written is on disk then
    Detach {
        /// The sandbox
        #[arg(value_parser = parse::sandbox_name)]
        sandbox: String,
        /// The drive
        #[arg(value_parser = parse::drive_name)]
        drive: String,
        /// Where it is, when it is at several places
        #[arg(long, value_name = "PATH")]
        path: Option<String>,
        /// Also when it is in use: nothing is killed, but what has it open is cut off from the drive
        #[arg(long)]
        force: bool,
    },
    /// Copy a file into a drive that no sandbox writes, or out of any; - is standard input or output
    Cp {
        /// DRIVE:PATH, a file of this machine, or -
        #[arg(value_parser = parse::file_place)]
        source: FilePlace,
        /// DRIVE:PATH, a file of this machine, or -
        #[arg(value_parser = parse::file_place)]
        target: FilePlace,
    },
    /// Print a file of a drive
    Cat {
        /// DRIVE:PATH
        #[arg(value_name = "DRIVE:PATH", value_parser = parse::in_drive)]
        place: InDrive,
    },
    /// Copy a drive to the blob store (a later release)
    #[command(hide = true)]
    Push {
        /// The drive
        #[arg(value_parser = parse::drive_name)]
        name: String,
    },
    /// Copy a drive from the blob store (a later release)
    #[command(hide = true)]
    Pull {
        /// The drive
        #[arg(value_parser = parse::drive_name)]
        name: String,
    },
}
