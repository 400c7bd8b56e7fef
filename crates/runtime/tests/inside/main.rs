//! The runtime on this host without the engine around it: terminals, passed standard output, doors, pause.
//!
//! It brings its own `main`, since it is executed for the roles as well, and says its results as libtest does.
//! All tests share one runtime on a scratch folder; each has sessions of its own. Needs root. A name, or a part
//! of one, as the first argument runs only those.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test, with its own harness"
)]

mod doors;
mod pause;
mod terminals;

use std::collections::BTreeMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bivouac_runtime::linux::{LinuxConfig, LinuxRuntime};
use bivouac_runtime::pool::{PoolMode, PoolOptions};
use bivouac_runtime::{
    ExecSpec, Handle, LaunchSpec, Limits, LogRecord, Progress, Runtime, RuntimeError, TtySize,
};
use bivouac_types::command::{CommandEnd, Stream};
use bivouac_types::id::{CommandId, SessionId};
use bytes::Bytes;

static NEXT: AtomicU32 = AtomicU32::new(1);

/// A running session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) runtime: Arc<LinuxRuntime>,
    pub(crate) spec: LaunchSpec,
    pub(crate) handle: Arc<dyn Handle>,
}

fn next() -> u32 {
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Session {
    async fn launch(runtime: &Arc<LinuxRuntime>) -> Result<Self, RuntimeError> {
        let n = next();
        let spec = LaunchSpec {
            session: SessionId::new(u64::from(n), [0; 10]),
            hostname: format!("inside-{n}"),
            image: "host".into(),
            from_snapshot: None,
            snapshot_bytes: 0,
            fresh: false,
            limits: Limits { memory_bytes: 1 << 30, vcpus: 2, pids: 512, disk_bytes: 1 << 30 },
            id_range: n,
            cwd: "/vercel/sandbox".into(),
            mounts: Vec::new(),
            request: None,
            egress: None,
        };
        let handle = runtime.launch(&spec).await?;
        Ok(Self { runtime: runtime.clone(), spec, handle })
    }

    /// A command that is not started yet.
    pub(crate) fn command(&self, argv: &[&str]) -> ExecSpec {
        let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        ExecSpec {
            command: CommandId::new(u64::from(next()), [7; 10]),
            argv: argv.iter().map(|&word| word.to_owned()).collect(),
            env: BTreeMap::from([
                ("PATH".to_owned(), path.to_owned()),
                ("TERM".into(), "xterm".into()),
            ]),
            cwd: "/vercel/sandbox".into(),
            root: false,
            timeout_ms: Some(60_000),
            attach_stdin: false,
            tty: None,
            request: None,
        }
    }

    /// A script on a terminal.
    pub(crate) fn on_terminal(&self, script: &str) -> ExecSpec {
        let tty = Some(TtySize { cols: 101, rows: 31 });
        ExecSpec { tty, ..self.command(&["bash", "--norc", "-c", script]) }
    }

    /// Runs a script on pipes to its end; answers what it said and its exit code.
    pub(crate) async fn sh(&self, script: &str) -> (String, i32) {
        let spec = self.command(&["sh", "-c", script]);
        self.handle.exec(&spec).await.unwrap();
        let end = self.end(&spec.command).await;
        (self.text(&spec.command).await, end.exit_code.unwrap())
    }

    /// The same as root, which has to go well.
    pub(crate) async fn root(&self, script: &str) -> String {
        let spec = ExecSpec { root: true, ..self.command(&["sh", "-c", script]) };
        self.handle.exec(&spec).await.unwrap();
        let end = self.end(&spec.command).await;
        let text = self.text(&spec.command).await;
        assert_eq!(end.exit_code, Some(0), "{text}");
        text
    }

    /// Waits for a command's end.
    pub(crate) async fn end(&self, command: &CommandId) -> CommandEnd {
        let mut progress = self.handle.progress(command).unwrap();
        let seen = progress.wait_for(|progress| progress.end.is_some());
        let seen = within(seen).await.unwrap();
        seen.end.clone().unwrap()
    }

    /// All records that a command's log has now.
    pub(crate) async fn records(&self, command: &CommandId) -> (Vec<LogRecord>, Progress) {
        let progress = match self.handle.progress(command) {
            Some(progress) => progress.borrow().clone(),
            None => self.runtime.log_progress(&self.spec.session, command).await.unwrap(),
        };
        let (mut at, mut all) = (progress.log_start, Vec::new());
        while at < progress.log_bytes {
            let read = self.runtime.read_log(&self.spec.session, command, at, progress.log_bytes);
            let (records, next) = read.await.unwrap();
            assert!(next > at);
            all.extend(records);
            at = next;
        }
        (all, progress)
    }

    /// What a command has written so far.
    pub(crate) async fn text(&self, command: &CommandId) -> String {
        let (records, _) = self.records(command).await;
        let bytes = records.iter().map(|record| match record {
            LogRecord::Data { bytes, .. } => bytes.to_vec(),
            _ => Vec::new(),
        });
        String::from_utf8_lossy(&bytes.collect::<Vec<_>>().concat()).into_owned()
    }

    /// Waits until a command has written this.
    pub(crate) async fn until(&self, command: &CommandId, wanted: &str) -> String {
        let mut progress = self.handle.progress(command).unwrap();
        within(async {
            loop {
                let text = self.text(command).await;
                if text.contains(wanted) {
                    return text;
                }
                let ended = progress.borrow_and_update().end.clone();
                assert!(ended.is_none(), "ended without {wanted:?}: {text:?} {ended:?}");
                let more = progress.changed();
                // What came between the text and this is in the next one.
                let _ = tokio::time::timeout(Duration::from_millis(50), more).await;
            }
        })
        .await
    }

    /// The process of this session that is the engine's and has this name.
    pub(crate) fn own_process(&self, name: &str) -> String {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let pid = entry.file_name().to_string_lossy().into_owned();
            let at = |name: &str| {
                std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default()
            };
            if at("cgroup").contains(self.spec.session.as_str()) && at("comm").trim() == name {
                found.push(pid);
            }
        }
        assert_eq!(found.len(), 1, "{name}: {found:?}");
        found.remove(0)
    }

    /// Types into a command.
    pub(crate) async fn typed(&self, command: &CommandId, text: &str) {
        let bytes = Bytes::copy_from_slice(text.as_bytes());
        self.handle.stdin(command, None, bytes, false).await.unwrap();
    }

    /// Ends it and looks that nothing is left.
    async fn done(self) {
        let _ = self.handle.kill().await;
        self.runtime.remove(&self.spec.session).await.unwrap();
        self.runtime.remove_logs(&self.spec.session).await.unwrap();
    }
}

/// Nothing here takes long; what hangs is a failure.
pub(crate) async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), work).await.expect("it hangs")
}

/// The stream of output of a terminal.
pub(crate) const TERMINAL: Stream = Stream::Stdout;

/// The kind of a refusal, for comparing.
pub(crate) fn kind(error: &RuntimeError) -> bivouac_runtime::FileErrorKind {
    match error {
        RuntimeError::File(error) => error.kind,
        other => panic!("{other}"),
    }
}

type Test = fn(Arc<Session>) -> Pin<Box<dyn Future<Output = ()> + Send>>;

/// Names an asynchronous function as a test.
#[macro_export]
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        pub(crate) const ALL: &[(&str, $crate::Test)] =
            &[$((concat!(module_path!(), "::", stringify!($name)), |session| Box::pin($name(session)))),*];
    };
}

async fn run(filter: Option<String>) -> usize {
    let data = tempfile::tempdir().unwrap();
    let config = LinuxConfig {
        pool: PoolOptions { mode: Some(PoolMode::Folder), ..PoolOptions::default() },
        images_dir: data.path().join("image-files"),
        data_dir: data.path().to_owned(),
        instance: format!("inside{}", std::process::id()),
    };
    let runtime = Arc::new(LinuxRuntime::start(config).await.unwrap());
    let (mut passed, mut failed, mut out) = (0, 0, 0);
    let all = [terminals::ALL, doors::ALL, pause::ALL].concat();
    for (name, test) in all {
        let name = name.trim_start_matches("inside::");
        if filter.as_ref().is_some_and(|filter| !name.contains(filter.as_str())) {
            out += 1;
            continue;
        }
        let session = match Session::launch(&runtime).await {
            Ok(session) => Arc::new(session),
            // No panic here: what the runtime has on this host has to go.
            Err(e) => {
                println!("{e}\ntest {name} ... FAILED");
                failed += 1;
                continue;
            }
        };
        let body = tokio::spawn(AssertUnwindSafe(test(session.clone())));
        let good =
            tokio::time::timeout(Duration::from_secs(180), body).await.is_ok_and(|r| r.is_ok());
        println!("test {name} ... {}", if good { "ok" } else { "FAILED" });
        *if good { &mut passed } else { &mut failed } += 1;
        match Arc::try_unwrap(session) {
            Ok(session) => session.done().await,
            // A test that hangs holds it.
            Err(session) => runtime.remove(&session.spec.session).await.unwrap(),
        }
    }
    assert_eq!(runtime.list().await.unwrap(), []);
    runtime.close().await.unwrap();
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "test result: {result}. {passed} passed; {failed} failed; 0 ignored; 0 measured; {out} filtered out"
    );
    failed
}

fn main() -> std::process::ExitCode {
    bivouac_runtime::roles::maybe_run(&bivouac_runtime::keeper::NoKeeper);
    let filter = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    let threads = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let failed = threads.block_on(run(filter));
    std::process::ExitCode::from(u8::from(failed > 0))
}
