//! The engine that `bivouac run` starts when none is running.
//!
//! Invariant: of any number of runs at once, one starts an engine (a lock in the data folder) and
//! all use it. That engine has a session of its own, so no Ctrl-C meant for a run reaches it, and
//! ends by itself when it is idle.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::args::Global;
use super::client::{self, Client};
use super::failure::{Explain as _, Failure, Outcome};
use super::output;
use crate::serve::lock::{FolderLock, LockError, START_LOCK};
use crate::serve::prepare_data_dir;

/// How long an engine may take to be ready: it may have many sandboxes to adopt.
const DEADLINE: Duration = Duration::from_secs(90);
/// After how long without work it ends.
const IDLE_SECONDS: &str = "60";
/// Where its log goes, in the data folder.
const LOG_FILE: &str = "engine.log";
/// A log of more is begun anew.
const LOG_LIMIT: u64 = 8 << 20;
/// How much of it a failure shows.
const TAIL_LINES: usize = 15;

/// The running engine of the data folder, or the one that `--url` names; else one is started.
pub(crate) async fn engine(global: &Global) -> Outcome<Client> {
    let folder = client::data_dir(global);
    if global.url.as_deref().is_some_and(|url| !url.is_empty())
        || client::healthy_engine(&folder).await.is_some()
    {
        return Client::find(global);
    }
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::new(format!(
            "no engine is running on {}, and starting one needs root",
            folder.display()
        ))
        .hint("use sudo, or name a running engine with BIVOUAC_URL and BIVOUAC_TOKEN"));
    }
    prepare_data_dir(&folder)?;
    start(&folder).await?;
    Client::find(global)
}

async fn start(folder: &Path) -> Outcome<()> {
    let give_up = Instant::now() + DEADLINE;
    loop {
        match FolderLock::take(folder, START_LOCK) {
            Ok(_lock) => {
                // Another run may have been quicker.
                if client::healthy_engine(folder).await.is_some() {
                    return Ok(());
                }
                return Starting::new(folder)?.ready(give_up).await;
            }
            Err(LockError::Held(_)) if Instant::now() < give_up => {
                sleep(Duration::from_millis(25)).await;
                if client::healthy_engine(folder).await.is_some() {
                    return Ok(());
                }
            }
            Err(LockError::Held(pid)) => {
                let who = pid
                    .map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"));
                let message = format!("{who} is starting an engine and does not get it ready");
                return Err(Failure::new(message));
            }
            Err(error) => {
                return Err(error).explain(|| format!("could not lock {}", folder.display()));
            }
        }
    }
}

/// An engine that is coming up.
struct Starting {
    folder: PathBuf,
    child: Child,
    log: File,
    /// Where its part of the log begins.
    log_from: u64,
}

impl Starting {
    fn new(folder: &Path) -> Outcome<Self> {
        let path = folder.join(LOG_FILE);
        let open = || -> io::Result<(File, u64)> {
            let log =
                OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(&path)?;
            if log.metadata()?.len() > LOG_LIMIT {
                log.set_len(0)?;
            }
            let from = log.metadata()?.len();
            Ok((log, from))
        };
        let (log, log_from) = open().explain(|| format!("could not open {}", path.display()))?;
        output::progress("no engine is running: starting one");
        let child = spawn(folder, &log).explain(|| "could not start an engine".to_owned())?;
        Ok(Self { folder: folder.to_owned(), child, log, log_from })
    }

    async fn ready(mut self, give_up: Instant) -> Outcome<()> {
        loop {
            if client::healthy_engine(&self.folder).await.is_some() {
                return Ok(());
            }
            if let Some(status) = self.child.try_wait()? {
                // It may have left because somebody else's engine was quicker.
                if client::healthy_engine(&self.folder).await.is_some() {
                    return Ok(());
                }
                return Err(self.failed(&format!("the engine did not start ({status})")));
            }
            if Instant::now() >= give_up {
                let _ = self.child.kill();
                let _ = self.child.wait();
                let seconds = DEADLINE.as_secs();
                return Err(self.failed(&format!("the engine was not ready after {seconds} s")));
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    fn failed(&mut self, message: &str) -> Failure {
        for line in self.tail().unwrap_or_default() {
            output::progress(&format!("  engine: {}", output::printable(&line)));
        }
        Failure::new(message)
            .hint(format!("its log: {}", self.folder.join(LOG_FILE).display()))
            .hint("what this machine lacks: bivouac doctor")
    }

    fn tail(&mut self) -> io::Result<Vec<String>> {
        self.log.seek(SeekFrom::Start(self.log_from))?;
        let mut bytes = Vec::new();
        (&self.log).take(LOG_LIMIT).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        Ok(lines[lines.len().saturating_sub(TAIL_LINES)..].to_vec())
    }
}

/// Starts this same executable, whatever has happened to its file since.
fn spawn(folder: &Path, log: &File) -> io::Result<Child> {
    // Whatever this process was started with is not the engine's: a pipe of the caller would never
    // end while the engine lives.
    bivouac_runtime::roles::keep_descriptors()?;
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that starts an engine; nothing is shared with it but its log"
    )]
    let mut command = std::process::Command::new("/proc/self/exe");
    command
        .arg0("bivouac")
        .arg("--data-dir")
        .arg(folder)
        .args(["serve", "--listen", "127.0.0.1:0", "--idle-exit", IDLE_SECONDS])
        .env_remove("BIVOUAC_URL")
        .env_remove("BIVOUAC_STOP_SANDBOXES")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log.try_clone()?)
        .spawn()
}
