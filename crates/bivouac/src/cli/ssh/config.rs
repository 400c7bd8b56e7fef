//! `bivouac ssh-config`: host entries, so that ssh, scp, rsync, git and editors find sandboxes as NAME.bivouac.
//!
//! Invariants: of the caller's own configuration one line is ever added, and taken away again; a file is written
//! whole or not at all; doing it twice is doing it once; no token is written.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde_json::json;

use super::files::{Folder, home, replace};
use super::{HOST, USER};
use crate::cli::args::{Global, SshConfig};
use crate::cli::failure::{ExitStatus, Explain as _, Failure, Outcome};
use crate::cli::output;

/// The file of entries, in the folder `~/.ssh`.
const FILE: &str = "bivouac_config";
/// The line that takes it in.
const INCLUDE: &str = "Include ~/.ssh/bivouac_config";
/// Who wrote that line.
const MARK: &str = "# Added by 'bivouac ssh-config'; taken away by 'bivouac ssh-config --remove'.";

/// What OpenSSH is told besides the user and the name of the host.
pub(super) fn options(folder: &Folder, proxy: &str) -> Vec<(&'static str, String)> {
    let quoted = |path: PathBuf| format!("\"{}\"", path.display());
    vec![
        ("ProxyCommand", proxy.to_owned()),
        ("IdentityFile", quoted(folder.key())),
        ("IdentitiesOnly", "yes".to_owned()),
        ("UserKnownHostsFile", quoted(folder.known_hosts())),
        ("GlobalKnownHostsFile", "/dev/null".to_owned()),
        ("HostKeyAlias", HOST.to_owned()),
        ("HostKeyAlgorithms", "ssh-ed25519".to_owned()),
        ("StrictHostKeyChecking", "yes".to_owned()),
        ("CheckHostIP", "no".to_owned()),
        ("UpdateHostKeys", "no".to_owned()),
    ]
}

/// The command that carries the connection; `host` is a name or OpenSSH's `%n`. The engine is the one that this
/// command was pointed at; the token comes from the environment or the engine's folder, as ever.
pub(super) fn proxy_command(global: &Global, host: &str) -> Outcome<String> {
    let program =
        std::env::current_exe().explain(|| "could not find this program's file".to_owned())?;
    let mut words = vec![quote(&program.to_string_lossy())];
    if let Some(url) = global.url.as_deref().filter(|url| !url.is_empty()) {
        words.extend(["--url".to_owned(), quote(url)]);
    } else if let Some(folder) = &global.data_dir {
        let folder =
            std::path::absolute(folder).explain(|| "could not use --data-dir".to_owned())?;
        words.extend(["--data-dir".to_owned(), quote(&folder.to_string_lossy())]);
    }
    let namespace = format!("{}/{}", global.namespace.team, global.namespace.project);
    words.extend(["-n".to_owned(), quote(&namespace), "ssh".to_owned(), "--stdio".to_owned()]);
    words.push(host.to_owned());
    Ok(words.join(" "))
}

/// For the shell that runs the command, and for OpenSSH, which looks for `%` in it.
fn quote(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"/._-:@+,=".contains(&b);
    let text = text.replace('%', "%%");
    if !text.is_empty() && text.bytes().all(plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// The entries.
fn entries(global: &Global, folder: &Folder) -> Outcome<String> {
    let mut text =
        String::from("# Sandboxes of Bivouac: ssh NAME.bivouac, or NAME.PROJECT.TEAM.bivouac.\n");
    text.push_str("# Written by 'bivouac ssh-config'.\nHost *.bivouac\n");
    let proxy = proxy_command(global, "%n")?;
    for (name, value) in std::iter::once(("User", USER.to_owned())).chain(options(folder, &proxy)) {
        text.push_str(&format!("  {name} {value}\n"));
    }
    Ok(text)
}

pub(in crate::cli) async fn run(global: &Global, args: &SshConfig) -> Outcome {
    let folder = Folder::find()?;
    let ssh = home()?.join(".ssh");
    if args.remove {
        let changed = remove(&ssh)?;
        return told(global, &ssh, false, changed);
    }
    let text = entries(global, &folder)?;
    if !args.write {
        if global.json {
            output::json(&json!({ "config": text }))?;
        } else {
            output::text(&text)?;
        }
        return Ok(ExitStatus::Success);
    }
    folder.ensure_key()?;
    let changed = write(&ssh, &text)?;
    told(global, &ssh, true, changed)
}

fn told(global: &Global, ssh: &Path, written: bool, changed: bool) -> Outcome {
    let file = ssh.join(FILE);
    if global.json {
        output::json(
            &json!({ "file": file.display().to_string(), "written": written, "changed": changed }),
        )?;
    } else if written {
        output::progress(&format!("{} has the entries: ssh NAME.bivouac", file.display()));
    } else if changed {
        output::progress("the entries are gone");
    } else {
        output::progress("there were no entries");
    }
    Ok(ExitStatus::Success)
}

/// Reads a file that may be missing.
fn read(path: &Path) -> Outcome<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).explain(|| format!("could not read {}", path.display())),
    }
}

/// The caller's configuration, which may be a link to where he keeps such files.
fn own_config(ssh: &Path) -> Outcome<PathBuf> {
    let path = ssh.join("config");
    match std::fs::canonicalize(&path) {
        Ok(real) => Ok(real),
        Err(_) if path.is_symlink() => {
            Err(Failure::new(format!("{} is a link to nowhere", path.display()))
                .hint("mend the link, then try again"))
        }
        Err(_) => Ok(path),
    }
}

fn put(path: &Path, text: &str, mode: u32) -> Outcome<()> {
    replace(path, text.as_bytes(), mode).explain(|| format!("could not write {}", path.display()))
}

/// Writes the entries and the line that includes them. Answers whether anything changed.
fn write(ssh: &Path, text: &str) -> Outcome<bool> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(ssh)
        .explain(|| format!("could not make {}", ssh.display()))?;
    let file = ssh.join(FILE);
    let mut changed = read(&file)?.as_deref() != Some(text);
    if changed {
        put(&file, text, 0o600)?;
    }
    let config = own_config(ssh)?;
    let before = read(&config)?;
    if !before.as_deref().is_some_and(|text| text.lines().any(|line| line.trim() == INCLUDE)) {
        // First: behind a Host line it would belong to that.
        let rest = before.unwrap_or_default();
        let gap = if rest.is_empty() { "" } else { "\n" };
        put(&config, &format!("{MARK}\n{INCLUDE}\n{gap}{rest}"), mode_of(&config))?;
        changed = true;
    }
    Ok(changed)
}

fn mode_of(path: &Path) -> u32 {
    std::fs::metadata(path).map_or(0o600, |found| found.permissions().mode() & 0o777)
}

/// Takes both away. Answers whether anything was there.
fn remove(ssh: &Path) -> Outcome<bool> {
    let file = ssh.join(FILE);
    let mut changed = false;
    let config = own_config(ssh)?;
    if let Some(before) = read(&config)? {
        let after = without(&before);
        if after != before {
            put(&config, &after, mode_of(&config))?;
            changed = true;
        }
    }
    match std::fs::remove_file(&file) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(changed),
        Err(error) => Err(error).explain(|| format!("could not remove {}", file.display())),
    }
}

/// The caller's text without our lines, and without the gap that was put behind them.
fn without(text: &str) -> String {
    let ours = format!("{MARK}\n{INCLUDE}\n");
    if let Some((before, after)) = text.split_once(&ours) {
        return format!("{before}{}", after.strip_prefix('\n').unwrap_or(after));
    }
    let keep = |line: &&str| line.trim() != INCLUDE && line.trim() != MARK;
    text.split_inclusive('\n').filter(keep).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_user_has_stays_and_comes_back() {
        let home = tempfile::tempdir().unwrap();
        let ssh = home.path().join(".ssh");
        std::fs::create_dir(&ssh).unwrap();
        let own = "# mine\nHost x\n  User y\n";
        let config = ssh.join("config");
        std::fs::write(&config, own).unwrap();
        std::fs::set_permissions(&config, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(write(&ssh, "Host *.bivouac\n").unwrap());
        assert!(!write(&ssh, "Host *.bivouac\n").unwrap(), "twice is once");
        let text = std::fs::read_to_string(&config).unwrap();
        assert!(text.ends_with(own) && text.matches(INCLUDE).count() == 1, "{text}");
        assert!(text.find(INCLUDE) < text.find("Host x"), "{text}");
        assert_eq!(mode_of(&config), 0o640);
        assert!(write(&ssh, "Host *.bivouac # new\n").unwrap());
        assert!(remove(&ssh).unwrap());
        assert_eq!(std::fs::read_to_string(&config).unwrap(), own);
        assert!(!ssh.join(FILE).exists());
        assert!(!remove(&ssh).unwrap());
    }

    #[test]
    fn a_link_stays_a_link() {
        let home = tempfile::tempdir().unwrap();
        let (ssh, dots) = (home.path().join(".ssh"), home.path().join("dots"));
        std::fs::create_dir(&ssh).unwrap();
        std::fs::write(&dots, "Host x\n").unwrap();
        std::os::unix::fs::symlink(&dots, ssh.join("config")).unwrap();
        write(&ssh, "a\n").unwrap();
        assert!(ssh.join("config").is_symlink());
        assert!(std::fs::read_to_string(&dots).unwrap().contains(INCLUDE));
        remove(&ssh).unwrap();
        assert_eq!(std::fs::read_to_string(&dots).unwrap(), "Host x\n");
    }

    #[test]
    fn words_reach_the_shell_as_they_are() {
        assert_eq!(quote("/usr/bin/bivouac"), "/usr/bin/bivouac");
        assert_eq!(quote("/a b/c"), "'/a b/c'");
        assert_eq!(quote("it's"), r"'it'\''s'");
        assert_eq!(quote("50%"), "'50%%'");
        assert_eq!(quote(""), "''");
    }
}
