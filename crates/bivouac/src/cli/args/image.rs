//! The shapes of `image …`. Part of `args`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// `image …`
#[derive(Debug, Subcommand)]
pub(crate) enum Image {
    /// Build an image on this machine, from its own apt and npm
    #[command(
        after_help = "universal is Debian 13 with git, a compiler, Python 3.13 and Node 22, 24 and 26. It is built once \
        for all engines of this machine; a running engine finds it by itself."
    )]
    Build {
        /// Which
        #[arg(default_value = "universal", value_parser = ["universal"])]
        name: String,
        /// Build again although it is there: newer packages
        #[arg(long)]
        rebuild: bool,
        #[command(flatten)]
        folder: ImagesFolder,
    },
    /// Pull an image of a registry through the engine
    #[command(
        after_help = "A tag means what it meant when it was pulled, until it is pulled again; a digest means the same for \
        ever. The login comes from --auth-file, else from $REGISTRY_AUTH_FILE, $DOCKER_CONFIG/config.json or \
        ~/.docker/config.json of whoever calls; it is used for this pull and kept nowhere."
    )]
    Pull(PullImage),
    /// Make an image of what `docker save` wrote, or of an OCI layout
    #[command(
        after_help = "FILE is an archive (compressed or not), - for standard input, or a folder with a layout in it. Of an image \
        for several machines, the one for this machine is taken."
    )]
    Import {
        /// The archive or folder
        #[arg(value_name = "FILE|-")]
        from: PathBuf,
        /// Name of the image [default: the one that it has in FILE]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// Which image of several, by the name that it has in FILE
        #[arg(long = "ref", value_name = "NAME")]
        reference: Option<String>,
        #[command(flatten)]
        folder: ImagesFolder,
    },
    /// List the images of this machine
    #[command(visible_alias = "list")]
    Ls {
        #[command(flatten)]
        folder: ImagesFolder,
    },
    /// Show all that is known of an image
    Inspect {
        /// The image: a name, a reference, or name@digest for one version of it
        #[arg(value_name = "NAME")]
        name: String,
        #[command(flatten)]
        folder: ImagesFolder,
    },
    /// Remove images that no sandbox and no snapshot lies on
    #[command(visible_alias = "delete")]
    Rm {
        /// The images: a name, or name@digest for one version of it
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        #[command(flatten)]
        folder: ImagesFolder,
    },
    /// Remove older versions of images that nobody uses, and pieces of registries
    Prune {
        /// All images that nobody uses
        #[arg(long)]
        all: bool,
        /// Only tell what would go
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        folder: ImagesFolder,
    },
}

/// `image pull`
#[derive(Debug, Args)]
pub(crate) struct PullImage {
    /// The image: docker://HOST/REPOSITORY[:TAG|@sha256:…]
    #[arg(value_name = "REFERENCE")]
    pub(crate) image: String,
    #[command(flatten)]
    pub(crate) login: RegistryLogin,
}

/// How a registry is asked.
#[derive(Debug, Clone, Args)]
pub(crate) struct RegistryLogin {
    /// File with logins at registries, as docker keeps them
    #[arg(long, value_name = "FILE", conflicts_with = "registry_secret")]
    pub(crate) auth_file: Option<PathBuf>,
    /// Secret of the project that holds USER:PASSWORD for the registry
    #[arg(long = "registry-secret", value_name = "NAME")]
    pub(crate) registry_secret: Option<String>,
    /// Ask the registry over plain HTTP, also where it is not this machine
    #[arg(long)]
    pub(crate) insecure: bool,
}

/// Where images are.
#[derive(Debug, Args)]
pub(crate) struct ImagesFolder {
    /// Folder of read-only images, shared by engines [default: /var/cache/bivouac/images as root]
    #[arg(long = "images", env = "BIVOUAC_IMAGES", value_name = "DIR")]
    pub(crate) path: Option<PathBuf>,
}
