//! Running the host's programs during a build: which of its variables they see, where their output goes.
//!
//! Invariant: a program gets no variable that a build does not need (tokens of the caller stay out), no
//! standard input, and its output is in the build's log. Called by the build's steps.

use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Where programs are looked for, besides the caller's PATH.
const FOLDERS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Variables that say how this machine reaches its registries.
const KEPT: &[&str] = &[
    "HOME",
    "APT_CONFIG",
    "NODE_EXTRA_CA_CERTS",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "http_proxy",
    "https_proxy",
    "ftp_proxy",
    "all_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
];

/// The part of an environment that a build's programs get.
pub(super) fn environment(
    of: impl Iterator<Item = (OsString, OsString)>,
) -> Vec<(OsString, OsString)> {
    let mut path = OsString::from(FOLDERS);
    let mut kept: Vec<(OsString, OsString)> = Vec::new();
    for (name, value) in of {
        let text = name.to_string_lossy();
        if text == "PATH" {
            path = value;
            path.push(":");
            path.push(FOLDERS);
        } else if KEPT.contains(&text.as_ref()) || text.to_lowercase().starts_with("npm_config_") {
            kept.push((name, value));
        }
    }
    kept.push(("PATH".into(), path));
    kept.push(("LANG".into(), "C.UTF-8".into()));
    kept
}

/// Where a program of the host is.
pub(in crate::image) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(std::env::split_paths(FOLDERS))
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// A program without standard input whose messages go into the log.
pub(super) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null());
    command
}

/// Runs it; its output goes into the log.
///
/// # Errors
/// The program's name and how it ended.
pub(super) fn run(command: &mut Command) -> io::Result<()> {
    lines(command, |_| {})
}

/// Runs it; each line of its output goes into the log and to `see`.
///
/// # Errors
/// As [`run`].
pub(super) fn lines(command: &mut Command, mut see: impl FnMut(&str)) -> io::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let (reader, writer) = io::pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer);
    let spawned = command.spawn().map_err(|e| io::Error::new(e.kind(), format!("{name}: {e}")));
    // The command holds the pipe's other end, which has to close for the output to end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = spawned?;
    for line in BufReader::new(reader).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        tell_log(&line);
        see(line.trim());
    }
    let status = child.wait()?;
    if status.success() {
        return Ok(());
    }
    Err(io::Error::other(format!("{name} failed ({status})")))
}

/// What it prints, without the end of the line.
///
/// # Errors
/// As [`run`].
pub(super) fn output(command: &mut Command) -> io::Result<String> {
    let mut text = String::new();
    lines(command, |line| {
        text.push_str(line);
        text.push('\n');
    })?;
    Ok(text.trim_end().to_owned())
}

/// Standard error is the build's log.
fn tell_log(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(io::stderr(), "{line}");
}

/// Takes the user and password out of URLs.
pub(super) fn without_passwords(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        out.push_str(before);
        let end = after.find(['/', ' ', '\n', '"', '\'', '\t']).unwrap_or(after.len());
        let skip = after[..end].rfind('@').map_or(0, |at| at + 1);
        rest = &after[skip..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_do_not_get_into_messages() {
        assert_eq!(
            without_passwords("E: https://me:p@ss@mirror/debian x http://b/c@d\nftp://u@h"),
            "E: https://mirror/debian x http://b/c@d\nftp://h"
        );
        assert_eq!(without_passwords("plain @ text"), "plain @ text");
    }

    #[test]
    fn programs_see_the_way_to_the_registries_and_no_token() {
        let given = [
            ("https_proxy", "p"),
            ("NPM_CONFIG_CAFILE", "c"),
            ("BIVOUAC_TOKEN", "secret"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("NODE_OPTIONS", "--import=x"),
            ("PATH", "/opt/bin"),
        ];
        let kept = environment(given.iter().map(|(k, v)| ((*k).into(), (*v).into())));
        let names: Vec<_> = kept.iter().map(|(k, _)| k.to_str().unwrap()).collect();
        assert_eq!(names, ["https_proxy", "NPM_CONFIG_CAFILE", "PATH", "LANG"]);
        assert!(kept.iter().all(|(_, value)| value != "secret"));
        assert!(kept[2].1.to_str().unwrap().starts_with("/opt/bin:/usr/local/sbin"));
    }
}
