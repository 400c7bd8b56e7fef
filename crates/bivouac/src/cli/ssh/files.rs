//! The caller's own files about SSH: a key, and the hosts that it knows.
//!
//! Invariant: written whole or not at all, and readable by the caller alone. Used by `ssh` and `ssh-config`.

use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use russh::keys::ssh_key::{LineEnding, PrivateKey};

use crate::cli::failure::{Explain as _, Failure, Outcome};
use crate::ssh::host_key;

/// Most lines of known hosts that are kept: one for each engine.
const HOSTS: usize = 100;

/// The folder that they are in.
#[derive(Debug)]
pub(in crate::cli) struct Folder(PathBuf);

/// The caller's home.
pub(super) fn home() -> Outcome<PathBuf> {
    let home = std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute());
    home.ok_or_else(|| {
        Failure::new("there is no home folder to keep an SSH key in")
            .hint("set HOME to your home folder")
    })
}

/// How a key of this caller is called.
pub(super) fn label() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let user = std::env::var("USER").unwrap_or_else(|_| "user".to_owned());
    let plain =
        |text: String| text.chars().filter(|c| !c.is_control()).take(60).collect::<String>();
    format!("{}@{}", plain(user), plain(host))
}

impl Folder {
    /// `$XDG_CONFIG_HOME/bivouac/ssh`, else below `~/.config`.
    pub(in crate::cli) fn find() -> Outcome<Self> {
        let set =
            std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
        let base = set.map_or_else(|| home().map(|home| home.join(".config")), Ok)?;
        Ok(Self(base.join("bivouac/ssh")))
    }

    #[cfg(test)]
    pub(super) fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// The private key's file.
    pub(super) fn key(&self) -> PathBuf {
        self.0.join("id_ed25519")
    }

    /// The public key's file.
    pub(super) fn public_key(&self) -> PathBuf {
        self.0.join("id_ed25519.pub")
    }

    /// The file of known hosts.
    pub(super) fn known_hosts(&self) -> PathBuf {
        self.0.join("known_hosts")
    }

    fn make(&self) -> Outcome<()> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        made.explain(|| format!("could not make {}", self.0.display()))
    }

    /// The caller's public key, with a private one that is made when there is none.
    pub(super) fn ensure_key(&self) -> Outcome<String> {
        let path = self.key();
        let read = || match std::fs::read(&path) {
            Ok(bytes) => {
                let key = PrivateKey::from_openssh(&bytes).map_err(io::Error::other)?;
                Ok(Some(key))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        let could_not = || format!("could not use the key in {}", path.display());
        let key = match read().explain(could_not)? {
            Some(key) => key,
            None => {
                self.make()?;
                let key = host_key::new(&label()).explain(|| "could not make a key".to_owned())?;
                let text = key.to_openssh(LineEnding::LF).explain(could_not)?;
                // Another command may be making one at the same time: the first one stays.
                put_new(&path, text.as_bytes()).explain(could_not)?;
                read().explain(could_not)?.ok_or_else(|| Failure::new(could_not()))?
            }
        };
        let public = key.public_key().to_openssh().explain(could_not)?;
        let file = self.public_key();
        if std::fs::read_to_string(&file).ok().as_deref().map(str::trim) != Some(public.trim()) {
            let line = format!("{}\n", public.trim());
            replace(&file, line.as_bytes(), 0o644)
                .explain(|| format!("could not write {}", file.display()))?;
        }
        Ok(public)
    }

    /// Adds a line to the known hosts, unless it is there.
    pub(super) fn know(&self, line: &str) -> Outcome<()> {
        let path = self.known_hosts();
        let before = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => {
                return Err(error).explain(|| format!("could not read {}", path.display()));
            }
        };
        if before.lines().any(|known| known == line) {
            return Ok(());
        }
        self.make()?;
        let mut lines: Vec<&str> = before.lines().collect();
        lines.push(line);
        let first = lines.len().saturating_sub(HOSTS);
        let text = lines[first..].iter().map(|line| format!("{line}\n")).collect::<String>();
        replace(&path, text.as_bytes(), 0o600)
            .explain(|| format!("could not write {}", path.display()))
    }
}

fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    path.with_file_name(format!(".{name}.{}", std::process::id()))
}

fn write_beside(path: &Path, bytes: &[u8], mode: u32) -> io::Result<PathBuf> {
    let new = beside(path);
    let _ = std::fs::remove_file(&new);
    let mut file =
        std::fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
    file.write_all(bytes)?;
    // Past the caller's umask.
    file.set_permissions(std::fs::Permissions::from_mode(mode))?;
    file.sync_all()?;
    Ok(new)
}

/// Puts a file in place of what is there.
pub(super) fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let new = write_beside(path, bytes, mode)?;
    std::fs::rename(&new, path).inspect_err(|_| {
        let _ = std::fs::remove_file(&new);
    })
}

/// Puts a private file in place, unless something is there.
fn put_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = write_beside(path, bytes, 0o600)?;
    let put = std::fs::hard_link(&new, path);
    let _ = std::fs::remove_file(&new);
    match put {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_made_once_and_private() {
        let home = tempfile::tempdir().unwrap();
        let folder = Folder::at(&home.path().join("a/b"));
        let public = folder.ensure_key().unwrap();
        assert!(public.starts_with("ssh-ed25519 "), "{public}");
        assert_eq!(folder.ensure_key().unwrap(), public);
        let mode = std::fs::metadata(folder.key()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::remove_file(folder.public_key()).unwrap();
        assert_eq!(folder.ensure_key().unwrap(), public);
        assert!(folder.public_key().is_file());
        std::fs::write(folder.key(), "broken").unwrap();
        assert!(folder.ensure_key().is_err(), "never replaced by itself");
    }

    #[test]
    fn hosts_are_known_once_and_not_for_ever() {
        let home = tempfile::tempdir().unwrap();
        let folder = Folder::at(home.path());
        for _ in 0..2 {
            folder.know("bivouac ssh-ed25519 A").unwrap();
        }
        assert_eq!(
            std::fs::read_to_string(folder.known_hosts()).unwrap(),
            "bivouac ssh-ed25519 A\n"
        );
        for n in 0..HOSTS {
            folder.know(&format!("bivouac ssh-ed25519 {n}")).unwrap();
        }
        let text = std::fs::read_to_string(folder.known_hosts()).unwrap();
        assert_eq!(text.lines().count(), HOSTS);
        assert!(!text.contains("ed25519 A\n"));
    }
}
