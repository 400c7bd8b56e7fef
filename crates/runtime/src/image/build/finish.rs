//! The last hand on a tree: the user, sudo, the order of programs on PATH; what must not be in an image
//! goes; times that say nothing go too.
//!
//! Invariant: when this is done the tree holds no machine id, no host key, no log, no cache and nothing of
//! the build; every program that the image promises has run in it. Called by the worker.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::Path;

use bivouac_types::image::RUNTIMES_FOLDER;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};

use super::{Contents, node, tool};

const USER: &str = "vercel-sandbox";
const ID: u32 = 1000;
/// Runtime of Debian's own Python.
const PYTHON: &str = "python3.13";

/// Root keeps the caller's PATH, so that `sudo node` is the same Node.
const SUDOERS: &str = "Defaults env_keep += \"*\"\nDefaults !requiretty, !use_pty\n\
    root ALL=(ALL:ALL) ALL\nvercel-sandbox ALL=(ALL:ALL) NOPASSWD: ALL\n%sudo ALL=(ALL:ALL) ALL\n\
    @includedir /etc/sudoers.d\n";

/// A login shell keeps the PATH that it is given.
const PROFILE: &str = "export PATH=\"${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}\"\n\
    if [ \"${BASH-}\" ] && [ \"$BASH\" != /bin/sh ] && [ -f /etc/bash.bashrc ]; then\n  . /etc/bash.bashrc\nfi\n\
    if [ -d /etc/profile.d ]; then\n  for i in /etc/profile.d/*.sh; do\n    [ -r \"$i\" ] && . \"$i\"\n  done\n  unset i\nfi\n";

/// Lines that are added: file, line.
const ACCOUNTS: &[(&str, &str)] = &[
    ("passwd", "vercel-sandbox:x:1000:1000:Sandbox:/home/vercel-sandbox:/bin/bash\n"),
    ("group", "vercel-sandbox:x:1000:\n"),
    ("shadow", "vercel-sandbox:*:19700:0:99999:7:::\n"),
    ("gshadow", "vercel-sandbox:*::\n"),
    ("subuid", "vercel-sandbox:10000:50000\n"),
    ("subgid", "vercel-sandbox:10000:50000\n"),
];

/// Files of /etc that a session writes for itself.
const OF_THE_SESSION: &[&str] = &["hostname", "hosts", "machine-id", "resolv.conf"];

/// Folders whose content goes.
const EMPTIED: &[&str] = &[
    "dev",
    "proc",
    "run",
    "sys",
    "tmp",
    "var/tmp",
    "var/cache/apt/archives",
    "var/cache/ldconfig",
    "var/lib/apt/lists",
    "var/log",
];

/// Files that go: copies that Debian's tools make of their own files, and locks.
const REMOVED: &[&str] = &[
    "etc/.pwd.lock",
    "etc/passwd-",
    "etc/group-",
    "etc/shadow-",
    "etc/gshadow-",
    "etc/subuid-",
    "etc/subgid-",
    "var/cache/apt/pkgcache.bin",
    "var/cache/apt/srcpkgcache.bin",
    "var/cache/debconf/config.dat-old",
    "var/cache/debconf/templates.dat-old",
    "var/lib/dpkg/status-old",
    "var/lib/dpkg/lock",
    "var/lib/dpkg/lock-frontend",
    "var/lib/dbus/machine-id",
    "var/lib/systemd/random-seed",
    "root/.bash_history",
    // pip may install into the user's home: the sandbox is the environment that Debian asks for.
    "usr/lib/python3.13/EXTERNALLY-MANAGED",
];

/// What a build depends on.
pub(super) fn describe(hash: &mut blake3::Hasher) {
    for text in [SUDOERS, PROFILE] {
        hash.update(text.as_bytes());
    }
    hash.update(format!("{ACCOUNTS:?} {EMPTIED:?} {REMOVED:?} {CHECKED:?}").as_bytes());
}

/// Does it all, and tries every program.
///
/// # Errors
/// The file, or the program that does not run.
pub(super) fn finish(tree: &Path) -> io::Result<Contents> {
    accounts(tree)?;
    programs(tree)?;
    let contents = check(tree)?;
    clear(tree)?;
    own(&tree.join("vercel"))?;
    Ok(contents)
}

fn accounts(tree: &Path) -> io::Result<()> {
    let etc = tree.join("etc");
    for (name, line) in ACCOUNTS {
        let path = etc.join(name);
        let mut text = match std::fs::read_to_string(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            other => other?,
        };
        text.push_str(line);
        // Keeps owner and mode of a file that is there.
        std::fs::write(&path, text)?;
    }
    std::fs::write(etc.join("sudoers"), SUDOERS)?;
    std::fs::set_permissions(etc.join("sudoers"), Permissions::from_mode(0o440))?;
    std::fs::write(etc.join("profile"), PROFILE)?;
    let home = tree.join("home").join(USER);
    std::fs::create_dir_all(&home)?;
    for entry in std::fs::read_dir(etc.join("skel"))? {
        let entry = entry?;
        std::fs::copy(entry.path(), home.join(entry.file_name()))?;
    }
    own(&home)?;
    std::fs::create_dir_all(tree.join("vercel/sandbox"))
}

/// Gives a tree to the user.
fn own(path: &Path) -> io::Result<()> {
    std::os::unix::fs::lchown(path, Some(ID), Some(ID))?;
    if std::fs::symlink_metadata(path)?.is_dir() {
        for entry in std::fs::read_dir(path)? {
            own(&entry?.path())?;
        }
    }
    Ok(())
}

/// A folder for Python like those of Node, and the default runtime for whoever has no PATH of ours.
fn programs(tree: &Path) -> io::Result<()> {
    let runtimes = super::inside(tree, RUNTIMES_FOLDER);
    let python = runtimes.join(PYTHON).join("bin");
    std::fs::create_dir_all(&python)?;
    for name in ["python", "python3", "pip", "pip3"] {
        symlink(format!("/usr/bin/{name}"), python.join(name))?;
    }
    let local = tree.join("usr/local/bin");
    let default = Path::new(RUNTIMES_FOLDER).join(node::DEFAULT).join("bin");
    for entry in std::fs::read_dir(runtimes.join(node::DEFAULT).join("bin"))? {
        let name = entry?.file_name();
        symlink(default.join(&name), local.join(&name))?;
    }
    Ok(())
}

/// Programs that must answer, and the arguments that make them.
const CHECKED: &[(&str, &[&str])] = &[
    ("bwrap", &["--version"]),
    ("cargo", &["--version"]),
    ("curl", &["--version"]),
    ("g++", &["--version"]),
    ("gcc", &["--version"]),
    ("git", &["--version"]),
    ("jq", &["--version"]),
    ("make", &["--version"]),
    ("pip", &["--version"]),
    ("pkg-config", &["--version"]),
    ("rg", &["--version"]),
    ("rustc", &["--version"]),
    ("ssh", &["-V"]),
    ("sudo", &["--version"]),
    ("unzip", &["-v"]),
    ("wget", &["--version"]),
    ("xz", &["--version"]),
    ("zip", &["-v"]),
];

fn check(tree: &Path) -> io::Result<Contents> {
    let run = |path: &str, words: &[&str]| -> io::Result<String> {
        let mut command = tool::command("chroot");
        command.arg(tree).args(words).env_clear().env("PATH", path).env("HOME", "/root");
        let said = tool::output(&mut command)
            .map_err(|e| io::Error::other(format!("{} does not run: {e}", words[0])))?;
        Ok(version(&said))
    };
    let usual = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let mut runtimes = BTreeMap::new();
    for name in node::names() {
        let path = format!("{RUNTIMES_FOLDER}/{name}/bin:{usual}");
        runtimes.insert(name.to_owned(), run(&path, &["node", "--version"])?);
        for manager in ["npm", "pnpm", "yarn"] {
            run(&path, &[manager, "--version"])?;
        }
    }
    runtimes.insert(PYTHON.to_owned(), run(usual, &["python3", "--version"])?);
    run(usual, &["python3", "-c", "import ssl, venv, sqlite3, lzma, ctypes, curses"])?;
    let mut tools = BTreeMap::new();
    for (name, words) in CHECKED {
        let mut line = vec![*name];
        line.extend(*words);
        tools.insert((*name).to_owned(), run(usual, &line)?);
    }
    for manager in ["npm", "pnpm", "yarn"] {
        tools.insert(manager.to_owned(), run(usual, &[manager, "--version"])?);
    }
    let debian = std::fs::read_to_string(tree.join("etc/debian_version"))?.trim().to_owned();
    Ok(Contents { debian, runtimes, tools })
}

/// The first word of a text that looks like a version.
fn version(text: &str) -> String {
    let word = text.split(|c: char| c.is_whitespace() || matches!(c, '(' | ')' | ','));
    let digits =
        |w: &str| w.split(['_', '-']).next_back().unwrap_or(w).trim_start_matches('v').to_owned();
    let found =
        word.map(digits).find(|w| w.contains('.') && w.starts_with(|c: char| c.is_ascii_digit()));
    found.unwrap_or_default()
}

fn clear(tree: &Path) -> io::Result<()> {
    let absent = |result: io::Result<()>| match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    for name in EMPTIED {
        let entries = match std::fs::read_dir(tree.join(name)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                std::fs::remove_dir_all(entry.path())?;
            } else {
                std::fs::remove_file(entry.path())?;
            }
        }
    }
    for name in REMOVED {
        absent(std::fs::remove_file(tree.join(name)))?;
    }
    for name in OF_THE_SESSION {
        let path = tree.join("etc").join(name);
        absent(std::fs::remove_file(&path))?;
        std::fs::write(&path, "")?;
    }
    // Programs that log expect these.
    std::fs::create_dir_all(tree.join("var/log/apt"))?;
    let home = tree.join("root");
    for entry in std::fs::read_dir(&home)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != ".bashrc" && name != ".profile" {
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                std::fs::remove_dir_all(path)?;
            } else {
                std::fs::remove_file(path)?;
            }
        }
    }
    std::fs::create_dir_all(tree.join("var/lib/apt/lists/partial"))?;
    chown(tree.join("var/lib/apt/lists/partial"), Some(42), Some(0))?;
    std::fs::set_permissions(tree.join("tmp"), Permissions::from_mode(0o1777))
}

/// Times since `begin` are the build's own: they become that of the newest file of any package, so that
/// the same packages make the same image. Answers it, seconds since 1970.
///
/// Times of packages' own files must stay: compiled Python is only used beside a source of its time.
///
/// # Errors
/// As reading the tree.
pub(super) fn settle_times(tree: &Path, begin: i64) -> io::Result<i64> {
    let mut newest = 0;
    visit(tree, &mut |_, mtime| {
        if mtime < begin {
            newest = newest.max(mtime);
        }
        Ok(())
    })?;
    visit(tree, &mut |path, mtime| {
        if mtime <= newest {
            return Ok(());
        }
        let at = Timespec { tv_sec: newest, tv_nsec: 0 };
        let times = Timestamps { last_access: at, last_modification: at };
        Ok(utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?)
    })?;
    Ok(newest)
}

fn visit(path: &Path, act: &mut impl FnMut(&Path, i64) -> io::Result<()>) -> io::Result<()> {
    let meta = std::fs::symlink_metadata(path)?;
    if meta.is_dir() {
        for entry in std::fs::read_dir(path)? {
            visit(&entry?.path(), act)?;
        }
    }
    // After what is in it: setting a time of a file leaves its folder's alone.
    act(path, meta.mtime())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_programs_say() {
        let cases = [
            ("v22.3.1", "22.3.1"),
            ("git version 2.47.2", "2.47.2"),
            ("OpenSSH_10.0p2 Debian-7, OpenSSL 3.5.1", "10.0p2"),
            ("gcc (Debian 14.2.0-19) 14.2.0\nCopyright", "14.2.0"),
            ("pip 25.1.1 from /usr/lib/python3/dist-packages/pip (python 3.13)", "25.1.1"),
            ("jq-1.7.1", "1.7.1"),
            ("nothing", ""),
        ];
        for (said, found) in cases {
            assert_eq!(version(said), found, "{said}");
        }
    }
}
