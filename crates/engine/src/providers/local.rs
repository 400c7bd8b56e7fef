//! Secrets of the engine's own host: variables, files, programs.
//!
//! Invariant: nothing here waits for longer than [`TIME`] or reads more than a secret may have.

use std::io::Read as _;
use std::process::Stdio;
use std::time::Duration;

use bivouac_types::secret::Secret;
use tokio::io::AsyncReadExt as _;
use zeroize::Zeroizing;

use crate::secrets::MAX_SECRET;

/// How long a program may take.
const TIME: Duration = Duration::from_secs(5);
/// Where a program without a path is looked for.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// `["argv", …]`, or words between spaces; there is no shell and there are no quotes.
pub(super) fn argv(text: &str) -> Result<Vec<String>, String> {
    let argv = if text.trim_start().starts_with('[') {
        serde_json::from_str::<Vec<String>>(text)
            .map_err(|_| "exec: needs a JSON list of texts, or words between spaces".to_owned())?
    } else {
        text.split_whitespace().map(str::to_owned).collect()
    };
    match argv.first() {
        Some(program) if !program.is_empty() => Ok(argv),
        _ => Err("exec: needs a program: exec:[\"pass\", \"show\", \"github\"]".to_owned()),
    }
}

pub(super) fn variable(name: &str) -> Result<Secret, String> {
    match std::env::var(name) {
        Ok(text) => Ok(Secret::new(text)),
        Err(std::env::VarError::NotPresent) => {
            Err(format!("the engine was started without the variable {name}"))
        }
        Err(std::env::VarError::NotUnicode(_)) => Err(format!("the variable {name} is no text")),
    }
}

pub(super) async fn file(path: &str) -> Result<Secret, String> {
    let owned = path.to_owned();
    let reading = tokio::task::spawn_blocking(move || read(&owned));
    match tokio::time::timeout(TIME, reading).await {
        Ok(Ok(read)) => read,
        _ => Err(format!("the file {path} could not be read within {} s", TIME.as_secs())),
    }
}

fn read(path: &str) -> Result<Secret, String> {
    let fail = |error: std::io::Error| format!("the file {path} could not be read: {error}");
    // A pipe would hold up whoever opens it.
    if !std::fs::metadata(path).map_err(fail)?.is_file() {
        return Err(format!("{path} is not a file"));
    }
    let open = std::fs::File::open(path).map_err(fail)?;
    let mut bytes = Zeroizing::new(Vec::new());
    open.take(MAX_SECRET as u64 + 1).read_to_end(&mut bytes).map_err(fail)?;
    text(&bytes, &format!("the file {path}"))
}

#[expect(
    clippy::disallowed_methods,
    reason = "the operator's own program; it is spawned, and nothing of this process is copied into it"
)]
pub(super) async fn exec(argv: &[String]) -> Result<Secret, String> {
    let (program, args) = argv.split_first().ok_or("exec: names no program")?;
    let mut child = tokio::process::Command::new(program)
        .args(args)
        .env_clear()
        .env("PATH", PATH)
        .env("LANG", "C.UTF-8")
        .envs(std::env::var("HOME").map(|home| ("HOME", home)))
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // It may hold the secret, and belongs into no log of ours.
        .stderr(Stdio::null())
        // A group of its own: what it starts ends with it.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("{program} could not be started: {error}"))?;
    let mut group = Group::of(&child);
    let Some(stdout) = child.stdout.take() else {
        return Err(format!("{program} has no output"));
    };
    let work = async {
        let mut bytes = Zeroizing::new(Vec::new());
        let mut limited = stdout.take(MAX_SECRET as u64 + 1);
        limited.read_to_end(&mut bytes).await?;
        drop(limited);
        std::io::Result::Ok((bytes, child.wait().await?))
    };
    let (bytes, status) = match tokio::time::timeout(TIME, work).await {
        Ok(Ok(done)) => {
            // It has ended, and its number may be another's from now on.
            group.0 = None;
            done
        }
        Ok(Err(error)) => return Err(format!("the output of {program} was lost: {error}")),
        // Dropping the group kills the program and what it has started.
        Err(_) => return Err(format!("{program} took longer than {} s", TIME.as_secs())),
    };
    if !status.success() && bytes.len() <= MAX_SECRET {
        return Err(format!("{program} failed ({status})"));
    }
    text(&bytes, &format!("the output of {program}"))
}

/// Kills all that a program has started when it is dropped. Invariant: it is empty once the program was
/// waited for.
struct Group(Option<rustix::process::Pid>);

impl Group {
    fn of(leader: &tokio::process::Child) -> Self {
        let pid = leader.id().and_then(|pid| i32::try_from(pid).ok());
        Self(pid.and_then(rustix::process::Pid::from_raw))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let Some(group) = self.0 else { return };
        // A group lives while one of its processes does; none is left is as good.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
}

/// Bytes as a secret: text, without the line end that programs and editors add.
fn text(bytes: &[u8], what: &str) -> Result<Secret, String> {
    if bytes.len() > MAX_SECRET {
        return Err(format!("{what} is larger than {MAX_SECRET} bytes"));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| format!("{what} is no text"))?;
    let text = text.strip_suffix('\n').unwrap_or(text);
    Ok(Secret::new(text.strip_suffix('\r').unwrap_or(text).to_owned()))
}
