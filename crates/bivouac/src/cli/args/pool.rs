//! The shape of `pool`, and of `serve --pool`. Part of `args`.

use bivouac_runtime::pool::PoolMode;
use clap::{Subcommand, ValueEnum};

/// How volumes are to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PoolArg {
    /// What the data folder has, else loop, else folder
    Auto,
    /// A btrfs in a file of the data folder
    Loop,
    /// A btrfs that holds the data folder and nothing else
    Native,
    /// Plain folders: no disk limits, and copies take time and room
    Folder,
}

impl PoolArg {
    /// `None`: what is there, or the best.
    pub(crate) fn mode(self) -> Option<PoolMode> {
        match self {
            Self::Auto => None,
            Self::Loop => Some(PoolMode::Loop),
            Self::Native => Some(PoolMode::Native),
            Self::Folder => Some(PoolMode::Folder),
        }
    }
}

/// `pool …`
#[derive(Debug, Subcommand)]
pub(crate) enum Pool {
    /// Show how the data folder keeps its volumes, and how full it is
    Show,
    /// Move the volumes to another way of keeping them, while no engine runs
    #[command(
        after_help = "Copies every volume, compares each copy, and only then switches. Cut short it leaves the \
        old pool as it was; say it again to go on. Room for a full copy of each volume is needed."
    )]
    Migrate {
        /// The new way
        #[arg(long, value_enum, value_name = "MODE")]
        to: Target,
    },
}

/// Where `pool migrate` moves volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// A btrfs in a file of the data folder
    Loop,
    /// A btrfs that holds the data folder and nothing else
    Native,
    /// Plain folders
    Folder,
}

impl Target {
    pub(crate) fn mode(self) -> PoolMode {
        match self {
            Self::Loop => PoolMode::Loop,
            Self::Native => PoolMode::Native,
            Self::Folder => PoolMode::Folder,
        }
    }
}
