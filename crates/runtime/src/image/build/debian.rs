//! The Debian part of the image: `mmdebstrap`, which drives the host's apt from outside of the tree.
//!
//! The mirror and the way to it (proxies, certificates, logins) are read from the host's apt at run time;
//! nothing of it is known here, and of it only the mirror's address stays in the tree. Invariant: packages
//! are verified by Debian's own keys. Called by the worker.

use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use super::tool;
use super::worker::Teller;

/// Debian 13: its Python is the `python3.13` of the API.
const SUITE: &str = "trixie";

/// What is installed, with what it depends on and without what is only recommended.
const PACKAGES: &[&str] = &[
    // A usable system.
    "apt",
    "bash",
    "bash-completion",
    "bubblewrap",
    "bzip2",
    "ca-certificates",
    "curl",
    "file",
    "git",
    "gnupg",
    "iproute2",
    "iputils-ping",
    "jq",
    "less",
    "lsof",
    "nano",
    "netcat-openbsd",
    "openssh-client",
    "patch",
    "procps",
    "psmisc",
    "ripgrep",
    "rsync",
    "strace",
    "sudo",
    "tree",
    "tzdata",
    "uidmap",
    "unzip",
    "vim-tiny",
    "wget",
    "xz-utils",
    "zip",
    "zstd",
    // What programs are built with.
    "cargo",
    "g++",
    "gcc",
    "libc6-dev",
    "make",
    "pkg-config",
    "rustc",
    // Python 3.13.
    "python-is-python3",
    "python3",
    "python3-dev",
    "python3-pip",
    "python3-venv",
];

/// Left out of every package: gigabytes of text that no program reads.
const EXCLUDED: &[&str] = &[
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-include=/usr/share/locale/locale.alias",
    // The tree is thrown away when anything fails.
    "force-unsafe-io",
];

/// About how much there is when everything is fetched and unpacked, bytes: for the progress only.
const EXPECTED: u64 = 2_100_000_000;

/// What a build depends on.
pub(super) fn describe(hash: &mut blake3::Hasher) {
    for word in std::iter::once(&SUITE).chain(PACKAGES).chain(EXCLUDED) {
        hash.update(word.as_bytes()).update(b"\n");
    }
    hash.update(architecture().as_bytes());
}

/// Debian's name of this machine's architecture.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Fills `tree`.
///
/// # Errors
/// No mirror is configured, or `mmdebstrap` failed.
pub(super) fn bootstrap(scratch: &Path, tree: &Path, teller: &Teller) -> io::Result<()> {
    teller.step("looking for the machine's Debian mirror");
    let sources = sources()?;
    let own = scratch.join("mmdebstrap");
    std::fs::create_dir(&own)?;
    // Files, because both may hold logins, and everyone can read arguments.
    let (list, options) = (own.join("sources.list"), own.join("apt.conf"));
    secret_file(&list, &sources)?;
    secret_file(&options, &machine_options()?)?;
    let mut command = tool::command("mmdebstrap");
    command
        .args(["--mode=root", "--variant=minbase", "--format=directory"])
        .arg(format!("--architectures={}", architecture()))
        .arg(format!("--include={}", PACKAGES.join(",")))
        .arg(format!("--aptopt={}", options.display()))
        .arg("--aptopt=APT::Install-Recommends \"false\"")
        .arg("--aptopt=Acquire::Retries \"3\"")
        .arg("--aptopt=Acquire::Languages \"none\"")
        .args(EXCLUDED.iter().map(|option| format!("--dpkgopt={option}")))
        .arg(SUITE)
        .arg(tree)
        .arg(&list)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .env("TMPDIR", &own);
    let watch = Watch { scratch, teller };
    watch.during(|| {
        tool::lines(&mut command, |line| {
            if let Some(what) = line.strip_prefix("I: ")
                && let Some((name, _)) = STEPS.iter().find(|(_, begin)| what.starts_with(begin))
            {
                teller.step(*name);
            }
        })
    })?;
    settle_sources(tree, &sources)?;
    std::fs::remove_dir_all(&own)
}

/// What `mmdebstrap` says, and what we say then.
const STEPS: &[(&str, &str)] = &[
    ("reading Debian's package lists", "running apt-get update"),
    ("fetching Debian's base", "downloading packages"),
    ("unpacking Debian's base", "extracting archives"),
    ("setting up Debian's base", "installing essential"),
    ("fetching and installing packages", "installing remaining"),
    ("clearing caches", "cleaning package lists"),
];

/// Tells how far it is by how much there is.
struct Watch<'a> {
    scratch: &'a Path,
    teller: &'a Teller,
}

impl Watch<'_> {
    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let pause = std::time::Duration::from_millis(500);
                while stopped.recv_timeout(pause) == Err(std::sync::mpsc::RecvTimeoutError::Timeout)
                {
                    let Ok(stat) = rustix::fs::statvfs(self.scratch) else { continue };
                    let used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize;
                    let part = used.saturating_mul(800) / EXPECTED;
                    self.teller.done(u32::try_from(part.min(840)).unwrap_or(0));
                }
            });
            let done = work();
            drop(stop);
            done
        })
    }
}

fn secret_file(path: &Path, text: &str) -> io::Result<()> {
    let mut file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())
}

/// Lines of a sources.list for the suite, from where the host gets its own Debian packages.
fn sources() -> io::Result<String> {
    let mut found = repositories()?;
    if found.archive.is_none() {
        // A fresh machine has no lists yet, and the repositories' own names are in them.
        tool::run(tool::command("apt-get").args(["update", "-q"]))?;
        found = repositories()?;
    }
    let Some(archive) = found.archive else {
        return Err(io::Error::other(
            "this machine's apt has no repository of Debian's (`apt-get indextargets` shows what it \
             has): add one to /etc/apt/sources.list.d",
        ));
    };
    let mut text = format!("deb {archive} {SUITE} main\n");
    if let Some(security) = found.security {
        text.push_str(&format!("deb {security} {SUITE}-security main\n"));
    }
    Ok(text)
}

/// Addresses of Debian's repositories.
#[derive(Debug, Default, PartialEq, Eq)]
struct Repositories {
    archive: Option<String>,
    security: Option<String>,
}

fn repositories() -> io::Result<Repositories> {
    let format = "$(LABEL) $(COMPONENT) $(SUITE) $(REPO_URI)";
    let mut command = tool::command("apt-get");
    command.args(["indextargets", "--format", format, "Created-By: Packages", "Origin: Debian"]);
    let done = command.output()?;
    if !done.status.success() {
        let said = String::from_utf8_lossy(&done.stderr);
        return Err(io::Error::other(format!("apt-get indextargets failed: {}", said.trim())));
    }
    Ok(read_repositories(&String::from_utf8_lossy(&done.stdout)))
}

fn read_repositories(text: &str) -> Repositories {
    let mut found = Repositories::default();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [label, "main", suite, uri] = words[..] else { continue };
        // Back-ports are served from the archive's own address everywhere but in old set-ups.
        if suite.contains("backports") || uri.is_empty() {
            continue;
        }
        match label {
            "Debian" => found.archive.get_or_insert_with(|| uri.to_owned()),
            "Debian-Security" => found.security.get_or_insert_with(|| uri.to_owned()),
            _ => continue,
        };
    }
    found
}

/// How the host's apt reaches its repositories: proxies, certificates, logins.
fn machine_options() -> io::Result<String> {
    let done = tool::command("apt-config").arg("dump").output()?;
    if !done.status.success() {
        return Err(io::Error::other("apt-config dump failed"));
    }
    let mut text = read_options(&String::from_utf8_lossy(&done.stdout));
    text.push_str("Dir::Etc::netrc \"/etc/apt/auth.conf\";\n");
    text.push_str("Dir::Etc::netrcparts \"/etc/apt/auth.conf.d\";\n");
    Ok(text)
}

fn read_options(dump: &str) -> String {
    const KINDS: [&str; 4] =
        ["Acquire::http::", "Acquire::https::", "Acquire::ftp::", "Acquire::ForceIP"];
    dump.lines()
        .filter(|line| KINDS.iter().any(|kind| line.starts_with(kind)))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// The mirror stays, as in any Debian system; logins do not.
fn settle_sources(tree: &Path, sources: &str) -> io::Result<()> {
    let etc = tree.join("etc/apt");
    std::fs::remove_file(etc.join("apt.conf.d/99mmdebstrap"))?;
    std::fs::remove_file(tree.join("etc/dpkg/dpkg.cfg.d/99mmdebstrap"))?;
    for entry in std::fs::read_dir(etc.join("sources.list.d"))? {
        std::fs::remove_file(entry?.path())?;
    }
    let text = tool::without_passwords(sources);
    std::fs::write(etc.join("sources.list"), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_the_archive_s_and_not_another_s() {
        let text = "Debian contrib oldstable http://a/debian/\n\
            Debian Backports\n\
            Debian main oldstable-backports http://old/backports/\n\
            Debian main oldstable http://a/debian/\n\
            Debian main oldstable-updates http://b/debian/\n\
            Debian-Security main oldstable-security http://a/security/\n\
            Google main x http://g/\n";
        let found = read_repositories(text);
        assert_eq!(found.archive.as_deref(), Some("http://a/debian/"));
        assert_eq!(found.security.as_deref(), Some("http://a/security/"));
        assert_eq!(read_repositories(""), Repositories::default());
    }

    #[test]
    fn only_the_way_to_the_mirror_is_taken_over() {
        let dump = "Acquire::http::Proxy \"http://p:1\";\nDPkg::Post-Invoke:: \"rm -f /x\";\n\
            Acquire::AllowInsecureRepositories \"1\";\nAcquire::https::CaInfo \"/c\";\n";
        assert_eq!(
            read_options(dump),
            "Acquire::http::Proxy \"http://p:1\";\nAcquire::https::CaInfo \"/c\";\n"
        );
    }
}
