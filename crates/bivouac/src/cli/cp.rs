//! `bivouac cp`: files and folders into and out of a sandbox.
//!
//! Invariant: nothing that a sandbox sends can reach outside of the local target (see `unpack`); a
//! copy that was not complete ends with an error. Owners inside are the default user, outside the
//! caller; permissions are kept, special files are left out with a warning.

mod pack;
mod unpack;

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::StreamExt as _;
use reqwest::StatusCode;
use serde_json::{Value, json};

use super::args::{Cp, Global};
use super::busy::{Busy, guarded};
use super::client::Client;
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::ndjson::{Record, Records, Stream};
use super::parse::Place;
use super::snapshot::size;
use super::{output, sandbox};

/// What was copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Total {
    /// Regular files.
    pub(super) files: u64,
    /// Their bytes.
    pub(super) bytes: u64,
}

/// A running sandbox and the paths in it.
struct Remote {
    client: Client,
    global: Global,
    name: String,
    session: String,
    cwd: String,
}

/// What a path in a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Missing,
    Folder,
    /// With its permissions.
    File(u32),
    Other,
}

/// Copies. A copy that is interrupted leaves nothing half made here.
pub(crate) async fn run(global: &Global, args: Cp) -> Outcome {
    // Before anything is watched for: reading it blocks.
    let typed = match (&args.source, &args.target) {
        (Place::Stdio, Place::Sandbox { .. }) => Some(pack::Source::stdin()?),
        _ => None,
    };
    if matches!(args.target, Place::Stdio) {
        // What waits for standard output hears of no signal: they end it as ever.
        return copy(global, args, typed).await;
    }
    guarded(copy(global, args, typed)).await
}

async fn copy(global: &Global, args: Cp, typed: Option<pack::Source>) -> Outcome {
    let total = match (args.source, args.target) {
        (Place::Sandbox { name, path }, Place::Local(target)) => {
            Remote::open(global, name).await?.download(&path, Path::new(&target)).await?
        }
        (Place::Sandbox { name, path }, Place::Stdio) => {
            Remote::open(global, name).await?.print(&path).await?
        }
        (Place::Local(source), Place::Sandbox { name, path }) => {
            // Looked at first: a missing file starts no sandbox.
            let source = pack::Source::local(Path::new(&source))?;
            Remote::open(global, name).await?.upload(source, &path).await?
        }
        (Place::Stdio, Place::Sandbox { name, path }) => match typed {
            Some(source) => Remote::open(global, name).await?.upload(source, &path).await?,
            None => return Err(Failure::new("standard input was not read")),
        },
        (Place::Sandbox { .. }, Place::Sandbox { .. }) => {
            return Err(Failure::usage("one end of a copy is on this machine")
                .hint("through a pipe: bivouac cp A:FILE - | bivouac cp - B:FILE"));
        }
        _ => return Err(Failure::usage("one end of a copy is in a sandbox: write NAME:PATH")),
    };
    if global.json {
        output::json(&json!({ "files": total.files, "bytes": total.bytes }))?;
    } else {
        let files = if total.files == 1 { "file" } else { "files" };
        output::progress(&format!("copied {} {files}, {}", total.files, size(total.bytes)));
    }
    Ok(ExitStatus::Success)
}

impl Remote {
    async fn open(global: &Global, name: String) -> Outcome<Self> {
        let client = Client::find(global)?;
        let view = sandbox::resume(&client, &name).await?;
        let session = sandbox::session_id(&view)?;
        let cwd = sandbox::text(&view, "/session/cwd")?;
        Ok(Self { client, global: global.clone(), name, session, cwd })
    }

    fn path(&self, tail: &str) -> String {
        format!("/v2/sandboxes/sessions/{}/{tail}", self.session)
    }

    /// A path as the user wrote it, absolute. A slash or a dot at its end is kept.
    fn absolute(&self, path: &str) -> String {
        absolute(&self.cwd, path)
    }

    /// What is at a path; links are followed.
    async fn kind(&self, path: &str) -> Outcome<Kind> {
        // 44: nothing there. The mode comes in hexadecimal, type included.
        let body = helper(r#"test -e "$1" || exit 44; exec stat -L -c %f -- "$1""#, path);
        let mut out = Vec::new();
        let code = self.command(&body, |bytes| {
            out.extend_from_slice(bytes);
            Ok(())
        });
        match code.await? {
            44 => Ok(Kind::Missing),
            0 => kind_of(&String::from_utf8_lossy(&out))
                .ok_or_else(|| Failure::new(format!("could not tell what {path} is"))),
            code => {
                Err(Failure::new(format!("could not look at {}:{path} (exit {code})", self.name)))
            }
        }
    }

    /// Runs a command to its end; its stdout goes to `sink`, its stderr to ours.
    async fn command(
        &self,
        body: &Value,
        mut sink: impl FnMut(&[u8]) -> Outcome<()>,
    ) -> Outcome<i64> {
        let query = self.client.scope().with("encoding", "base64");
        let answer = self.client.post_stream(&self.path("cmd"), &query, body, None).await?;
        let mut records = Records::new(answer);
        let mut started = false;
        loop {
            match records.next().await? {
                Some(Record::Data(Stream::Stdout, bytes)) => sink(&bytes)?,
                Some(Record::Data(Stream::Stderr, bytes)) => {
                    for line in String::from_utf8_lossy(&bytes).lines() {
                        output::warning(&output::printable(line));
                    }
                }
                Some(Record::Command(command)) if started => {
                    return command["exitCode"]
                        .as_i64()
                        .ok_or_else(|| Failure::new("the copy's command was lost"));
                }
                Some(Record::Command(_)) => started = true,
                Some(Record::Cut) => {
                    return Err(Failure::new("the session's space for output is used up")
                        .hint("stop and start the sandbox, or copy single files"));
                }
                Some(Record::Error { message, .. }) => return Err(Failure::new(message)),
                None => return Err(Failure::new("the engine ended the copy early")),
            }
        }
    }

    async fn upload(&self, source: pack::Source, target: &str) -> Outcome<Total> {
        let target = self.absolute(target);
        let kind = self.kind(&target).await?;
        let into = kind == Kind::Folder || target.ends_with('/');
        let target = match (source.name(), into) {
            (Some(name), true) => format!("{}/{name}", target.trim_end_matches('/')),
            (None, true) if !source.is_folder() => {
                return Err(Failure::usage(format!("{}:{target} is a folder", self.name))
                    .hint("standard input needs the name of a file"));
            }
            _ => target,
        };
        if source.is_folder() && matches!(kind, Kind::File(_) | Kind::Other) {
            return Err(Failure::new(format!("{}:{target} is no folder", self.name)));
        }
        let busy = Arc::new(Busy::bytes(&self.global, "copying", source.size()));
        let counted = Arc::clone(&busy);
        let (packed, body) = pack::stream(source, entry(&target), move |bytes| counted.add(bytes));
        let headers = [("content-type", "application/gzip".to_owned()), ("x-cwd", "/".to_owned())];
        let body = reqwest::Body::wrap_stream(body);
        let sent = self
            .client
            .post_body(&self.path("fs/write"), &self.client.scope(), headers, body)
            .await;
        let packed = packed.await?;
        drop(busy);
        match (sent, packed) {
            // Our own end of the archive broke: that is the reason, not what the engine made of it.
            (_, Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(error).explain(|| "could not read what to copy".to_owned())
            }
            (Err(error), _) => Err(error.into()),
            (Ok(_), Ok(total)) => Ok(total),
            (Ok(_), Err(_)) => Err(Failure::new("the engine did not take the whole copy")),
        }
    }

    async fn download(&self, source: &str, target: &Path) -> Outcome<Total> {
        let source = self.absolute(source);
        let name = last_name(&source);
        let kind = self.existing(&source).await?;
        let shown = target.display().to_string();
        let into = target.is_dir() || shown.ends_with('/');
        let target = match name {
            Some(name) if into => target.join(name),
            _ => target.to_owned(),
        };
        match kind {
            Kind::Folder => self.download_folder(&source, &target).await,
            Kind::File(mode) => self.download_file(&source, &target, mode).await,
            Kind::Other | Kind::Missing => {
                Err(Failure::new(format!("{}:{source} is neither a file nor a folder", self.name)))
            }
        }
    }

    async fn existing(&self, path: &str) -> Outcome<Kind> {
        match self.kind(path).await? {
            Kind::Missing => {
                Err(Failure::new(format!("{}:{path}: no such file or folder", self.name)))
            }
            kind => Ok(kind),
        }
    }

    /// The content of a file, piece by piece.
    async fn read(
        &self,
        path: &str,
        busy: Busy,
        mut sink: impl FnMut(&[u8]) -> Outcome<()>,
    ) -> Outcome<u64> {
        let body = json!({ "path": path });
        let read =
            self.client.post_stream(&self.path("fs/read"), &self.client.scope(), &body, None).await;
        let answer = match read {
            Err(error) if error.is(StatusCode::NOT_FOUND) => {
                return Err(Failure::new(format!("{}:{path}: no such file", self.name)));
            }
            answer => answer?,
        };
        let mut total = 0;
        let mut pieces = answer.bytes_stream();
        while let Some(piece) = pieces.next().await {
            let piece = piece.explain(|| format!("{}:{path} came incomplete", self.name))?;
            sink(&piece)?;
            busy.add(piece.len() as u64);
            total += piece.len() as u64;
        }
        Ok(total)
    }

    async fn print(&self, path: &str) -> Outcome<Total> {
        let path = self.absolute(path);
        if self.existing(&path).await? == Kind::Folder {
            return Err(Failure::new(format!("{}:{path} is a folder", self.name))
                .hint(format!("as an archive: bivouac exec {} -- tar -C {path} -c .", self.name)));
        }
        let bytes = self.read(&path, Busy::nothing(), |piece| {
            output::stdout_bytes(piece).map_err(|error| match error.kind() {
                io::ErrorKind::BrokenPipe => output::Closed.into(),
                _ => anyhow::Error::new(error).context("could not write to standard output").into(),
            })
        });
        Ok(Total { files: 1, bytes: bytes.await? })
    }

    async fn download_file(&self, source: &str, target: &Path, mode: u32) -> Outcome<Total> {
        let shown = target.display().to_string();
        let mut new = true;
        let mut options = fs::OpenOptions::new();
        options.write(true).mode(0o600);
        let file = match options.clone().create_new(true).open(target) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                new = false;
                options.truncate(true).open(target)
            }
            file => file,
        };
        let mut file = file.explain(|| format!("could not write {shown}"))?;
        // Half a file must not pass for the whole one, whatever ends this.
        let half = new.then(|| Half(Some(target.to_owned())));
        let busy = Busy::bytes(&self.global, "copying", None);
        let read = self.read(source, busy, |piece| {
            file.write_all(piece).explain(|| format!("could not write {shown}"))
        });
        match read.await {
            Ok(bytes) => {
                if new {
                    set_mode(&file, mode)
                        .explain(|| format!("could not set the mode of {shown}"))?;
                }
                if let Some(half) = half {
                    half.keep();
                }
                Ok(Total { files: 1, bytes })
            }
            Err(failure) => Err(failure),
        }
    }

    async fn download_folder(&self, source: &str, target: &Path) -> Outcome<Total> {
        let mut unpacking = unpack::Unpacking::start(target)?;
        let body = helper(r#"exec tar -C "$1" --hard-dereference --format=gnu -cf - ."#, source);
        let busy = Busy::bytes(&self.global, "copying", None);
        let copied = self.command(&body, |bytes| {
            busy.add(bytes.len() as u64);
            unpacking.push(bytes)
        });
        let copied = copied.await;
        drop(busy);
        let unpacked = unpacking.finish().await;
        match (copied, unpacked) {
            // Our own end is the reason, if it broke.
            (_, Err(failure)) => Err(failure),
            (Err(failure), _) => Err(failure),
            (Ok(0), Ok(total)) => Ok(total),
            // GNU tar: some files changed while they were read.
            (Ok(1), Ok(total)) => {
                output::warning("files changed while they were copied");
                Ok(total)
            }
            (Ok(code), Ok(_)) => Err(Failure::new(format!(
                "tar in the sandbox ended with {code}: the copy is not complete"
            ))),
        }
    }
}

/// A new file that goes when it is not declared whole.
struct Half(Option<PathBuf>);

impl Half {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            let _ = fs::remove_file(path);
        }
    }
}

/// A script of ours in the sandbox, with one path as its argument. Its `$0` tells it from the user's
/// commands.
fn helper(script: &str, path: &str) -> Value {
    json!({
        "command": "sh", "args": ["-c", script, sandbox::HELPER, path],
        "sudo": true, "wait": true, "logs": true, "cwd": "/",
    })
}

fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    file.set_permissions(fs::Permissions::from_mode(mode & 0o777))
}

/// Joins a path to the working folder unless it is absolute.
fn absolute(cwd: &str, path: &str) -> String {
    match path {
        "" => format!("{}/.", cwd.trim_end_matches('/')),
        path if path.starts_with('/') => path.to_owned(),
        path => format!("{}/{path}", cwd.trim_end_matches('/')),
    }
}

/// An absolute path as the name of an archive's entry: below the root, without `.` and `..`.
fn entry(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The name of what a path leads to; none for `.`, `..` and the root.
fn last_name(path: &str) -> Option<String> {
    match path.trim_end_matches('/').rsplit('/').next() {
        None | Some("" | "." | "..") => None,
        Some(name) => Some(name.to_owned()),
    }
}

fn kind_of(hex: &str) -> Option<Kind> {
    use rustix::fs::FileType;
    let mode = u32::from_str_radix(hex.trim(), 16).ok()?;
    Some(match FileType::from_raw_mode(mode) {
        FileType::Directory => Kind::Folder,
        FileType::RegularFile => Kind::File(mode & 0o777),
        _ => Kind::Other,
    })
}

/// The local path that a copy of `path` is named after: none for `.`, `..` and the root.
fn local_name(path: &Path) -> Option<PathBuf> {
    let text = path.to_string_lossy();
    last_name(&text)?;
    path.file_name().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_inside() {
        assert_eq!(absolute("/vercel/sandbox", ""), "/vercel/sandbox/.");
        assert_eq!(absolute("/vercel/sandbox/", "a/b"), "/vercel/sandbox/a/b");
        assert_eq!(absolute("/x", "/etc/"), "/etc/");
        assert_eq!(entry("/vercel/sandbox/./../x//y/"), "vercel/x/y");
        assert_eq!(entry("/../.."), "");
        assert_eq!(last_name("/etc/passwd").as_deref(), Some("passwd"));
        assert_eq!(last_name("/etc/").as_deref(), Some("etc"));
        for none in ["/", "/x/.", "/x/..", "."] {
            assert_eq!(last_name(none), None, "{none}");
        }
        assert_eq!(local_name(Path::new("a/b")), Some(PathBuf::from("b")));
        assert_eq!(local_name(Path::new("a/.")), None);
    }

    #[test]
    fn kinds_by_mode() {
        assert_eq!(kind_of("41ed\n"), Some(Kind::Folder));
        assert_eq!(kind_of("81a4"), Some(Kind::File(0o644)));
        assert_eq!(kind_of("8fed"), Some(Kind::File(0o755)), "no set-uid bit comes out");
        assert_eq!(kind_of("21b6"), Some(Kind::Other));
        assert_eq!(kind_of("nonsense"), None);
    }
}
