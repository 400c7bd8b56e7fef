//! A real engine for a test: the built executable, its own data folder, port and token.
//!
//! Invariant: when a [`TestServer`] is dropped nothing of its engine is left on the machine, however
//! the test ended. If the engine had to be helped to get there, the log says what was left.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::client::Client;
use crate::database::TestDatabase;
use crate::sweep;

/// How long an engine may take to be ready: the first one builds the pool and the `host` image.
const READY: Duration = Duration::from_secs(120);
/// How long an orderly end may take: every sandbox is stopped first.
const END: Duration = Duration::from_secs(60);

/// The executable under test: `BIVOUAC_BIN` or `BIVOUAC_TEST_BIN`, else the one that cargo built for
/// the caller.
///
/// # Errors
/// When neither is a file.
pub fn binary() -> Result<PathBuf> {
    let mut tried = Vec::new();
    let own = std::env::current_exe().ok();
    let beside =
        own.as_deref().and_then(Path::parent).and_then(Path::parent).map(|p| p.join("bivouac"));
    let named = ["BIVOUAC_BIN", "BIVOUAC_TEST_BIN", "CARGO_BIN_EXE_bivouac"];
    let named = named.into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    for path in named.chain(beside) {
        if path.is_file() {
            return Ok(path.canonicalize()?);
        }
        tried.push(path);
    }
    bail!("no bivouac executable at {tried:?}: build it, or set BIVOUAC_BIN")
}

/// The folder of images that all tests share, so that the `host` image is built once.
fn images() -> PathBuf {
    std::env::var_os("BIVOUAC_IMAGES")
        .map_or_else(|| std::env::temp_dir().join("bivouac-tests-images"), PathBuf::from)
}

/// What a server is started with.
#[derive(Debug, Default, Clone)]
pub struct Builder {
    env: Vec<(String, String)>,
    args: Vec<String>,
    keep: bool,
    own_token: bool,
    embedded: bool,
    data: Option<PathBuf>,
}

impl Builder {
    /// Keeps its records in the data folder, whatever database the tests run on: for an engine in a
    /// namespace from which no server's database can be reached.
    #[must_use]
    pub fn embedded_database(mut self) -> Self {
        self.embedded = true;
        self
    }

    /// Its data folder, which may hold what another engine left. The caller removes it.
    #[must_use]
    pub fn data_folder(mut self, folder: PathBuf) -> Self {
        self.data = Some(folder);
        self
    }

    /// A variable of the engine's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.push((name.to_owned(), value.into()));
        self
    }

    /// A flag of `serve`.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// An orderly end leaves the sandboxes running (the default is to stop them).
    #[must_use]
    pub fn keep_sandboxes(mut self) -> Self {
        self.keep = true;
        self
    }

    /// The engine makes its own token; clients read it from the data folder.
    #[must_use]
    pub fn own_token(mut self) -> Self {
        self.own_token = true;
        self
    }

    /// Starts it.
    ///
    /// # Errors
    /// As [`TestServer::start`].
    pub async fn start(self) -> Result<TestServer> {
        ensure!(
            rustix::process::getuid().is_root(),
            "these tests start a real engine: run them as root"
        );
        let dir = tempfile::Builder::new().prefix("bivouac-test-").tempdir()?;
        let mut server = TestServer {
            data: self.data.clone().unwrap_or_else(|| dir.path().join("data")),
            log: dir.path().join("serve.log"),
            token: format!("test-{}", std::process::id()),
            url: String::new(),
            child: Mutex::new(None),
            database: if self.embedded { None } else { TestDatabase::chosen()? },
            builder: self,
            dir: Some(dir),
        };
        server.launch().await?;
        Ok(server)
    }
}

/// A running engine.
#[derive(Debug)]
pub struct TestServer {
    /// Its data folder.
    pub data: PathBuf,
    /// Its standard output and error.
    pub log: PathBuf,
    /// Its token.
    pub token: String,
    /// Where it listens.
    pub url: String,
    child: Mutex<Option<Child>>,
    builder: Builder,
    /// Its records, where the tests run on a server's database.
    pub database: Option<TestDatabase>,
    dir: Option<TempDir>,
}

impl TestServer {
    /// Starts an engine with the defaults.
    ///
    /// # Errors
    /// When it ends or is not ready in time; the message holds the end of its log.
    pub async fn start() -> Result<Self> {
        Builder::default().start().await
    }

    /// For more than the defaults.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// A client in the namespace `team`/`prj_test`.
    ///
    /// # Errors
    /// When the HTTP library cannot be set up.
    pub fn client(&self, team: &str) -> Result<Client> {
        Client::new(&self.url, &self.token, team, "prj_test")
    }

    /// Process id of the engine.
    ///
    /// # Panics
    /// When it is not running.
    #[must_use]
    pub fn pid(&self) -> u32 {
        let child = self.child.lock().expect("no panic while held");
        child.as_ref().expect("the engine runs").id()
    }

    /// A command of the same executable that finds this engine.
    #[must_use]
    pub fn cli(&self, args: &[&str]) -> Cli {
        let mut cli = Cli::new(args);
        cli.command.env("BIVOUAC_DATA_DIR", &self.data).env("BIVOUAC_TOKEN", &self.token);
        cli
    }

    /// A value of `/proc/<pid>/status` of the engine, in kB: `VmRSS`, `VmHWM`.
    ///
    /// # Errors
    /// When the process is gone or has no such line.
    pub fn memory_kb(&self, line: &str) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let value = status.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(':'));
        let value = value.with_context(|| format!("no {line} in {status}"))?;
        Ok(value.trim().trim_end_matches(" kB").parse()?)
    }

    /// Kills the engine as a crash would.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn kill9(&self) -> Result<()> {
        let child = self.child.lock().expect("no panic while held").take();
        if let Some(mut child) = child {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Waits until the engine has ended by itself (a fault point that kills).
    ///
    /// # Errors
    /// When it is still there at the deadline.
    pub async fn wait_end(&self, deadline: Duration) -> Result<ExitStatus> {
        let start = Instant::now();
        loop {
            {
                let mut child = self.child.lock().expect("no panic while held");
                let running = child.as_mut().context("the engine is not running")?;
                if let Some(status) = running.try_wait()? {
                    *child = None;
                    return Ok(status);
                }
            }
            ensure!(
                start.elapsed() < deadline,
                "the engine did not end in {deadline:?}\n{}",
                self.tail()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether the engine has ended (true after a fault point killed it).
    #[must_use]
    pub fn ended(&self) -> bool {
        let mut child = self.child.lock().expect("no panic while held");
        child.as_mut().is_none_or(|c| c.try_wait().is_ok_and(|s| s.is_some()))
    }

    /// Asks for an orderly end and waits for it.
    ///
    /// # Errors
    /// When it does not come.
    pub async fn stop(&self) -> Result<ExitStatus> {
        let pid = Pid::from_raw(i32::try_from(self.pid())?).context("a pid")?;
        kill_process(pid, Signal::TERM)?;
        self.wait_end(END).await
    }

    /// Starts the engine again on the same folder, with the same settings.
    ///
    /// # Errors
    /// As [`TestServer::start`].
    pub async fn restart(&mut self) -> Result<()> {
        self.kill9()?;
        self.launch().await
    }

    /// As [`TestServer::restart`], with other settings.
    ///
    /// # Errors
    /// As [`TestServer::start`].
    pub async fn restart_with(&mut self, builder: Builder) -> Result<()> {
        self.builder = builder;
        self.restart().await
    }

    /// The command that this server runs, for a second engine on the same folder.
    ///
    /// # Errors
    /// When the executable is missing.
    pub fn serve_command(&self) -> Result<Command> {
        let mut command = Command::new(binary()?);
        command
            .args(["serve", "--listen", "127.0.0.1:0"])
            .args(&self.builder.args)
            .env("BIVOUAC_DATA_DIR", &self.data)
            .env("BIVOUAC_IMAGES", images())
            .env("BIVOUAC_TOKEN", &self.token)
            .envs(self.builder.env.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::null());
        if let Some(database) = &self.database {
            command.env("BIVOUAC_DATABASE", database.url());
        }
        if self.builder.own_token {
            command.env_remove("BIVOUAC_TOKEN");
        }
        if !self.builder.keep {
            command.env("BIVOUAC_STOP_SANDBOXES", "1");
        }
        Ok(command)
    }

    async fn launch(&mut self) -> Result<()> {
        let mut log = File::options().create(true).append(true).open(&self.log)?;
        writeln!(log, "--- engine starts")?;
        let child = self
            .serve_command()?
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("start bivouac serve")?;
        let pid = child.id();
        *self.child.lock().expect("no panic while held") = Some(child);
        let start = Instant::now();
        loop {
            if let Some(url) = self.address(pid) {
                let client = Client::new(&url, &self.token, "team_test", "prj_test")?;
                let probe = client.request(reqwest::Method::GET, "/health");
                if client.try_send(probe).await.is_ok_and(|a| a.status == 200) {
                    self.url = url;
                    return Ok(());
                }
            }
            ensure!(!self.ended(), "the engine ended before it was ready\n{}", self.tail());
            ensure!(
                start.elapsed() < READY,
                "the engine was not ready in {READY:?}\n{}",
                self.tail()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What the running engine wrote beside its token; a file of an earlier run does not count.
    fn address(&self, pid: u32) -> Option<String> {
        let text = std::fs::read(self.data.join("engine.json")).ok()?;
        let engine: Value = serde_json::from_slice(&text).ok()?;
        let address = engine["address"].as_str().filter(|_| engine["pid"] == pid)?;
        let host = address.trim_start_matches("http://").trim_end_matches('/');
        Some(format!("http://{host}"))
    }

    /// The last lines of the engine's log.
    #[must_use]
    pub fn tail(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        format!(
            "--- log of {}\n{}",
            self.data.display(),
            lines[lines.len().saturating_sub(60)..].join("\n")
        )
    }

    fn end(&self) {
        let Some(mut child) = self.child.lock().expect("no panic while held").take() else {
            return;
        };
        if let Ok(Some(pid)) = i32::try_from(child.id()).map(Pid::from_raw) {
            let asked = kill_process(pid, Signal::TERM).is_ok();
            let start = Instant::now();
            while asked && start.elapsed() < END {
                if child.try_wait().is_ok_and(|s| s.is_some()) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for TestServer {
    #[allow(clippy::print_stderr, reason = "what a person needs to see when a test fails")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.tail());
        }
        self.end();
        let left = sweep::everything_of(&self.data);
        if !left.is_empty() {
            eprintln!("the test kit had to remove what the engine left:\n  {}", left.join("\n  "));
        }
        if let Some(dir) = self.dir.take() {
            let path = dir.path().to_owned();
            if std::env::var_os("BIVOUAC_TEST_KEEP").is_some() && std::thread::panicking() {
                eprintln!("kept {}", dir.keep().display());
            } else if let Err(error) = dir.close() {
                eprintln!("{} could not be removed: {error}", path.display());
            }
        }
    }
}

/// A run of the command line.
#[derive(Debug)]
pub struct Cli {
    command: Command,
    stdin: Vec<u8>,
}

impl Cli {
    /// The executable under test with these arguments, a clean set of variables and no terminal.
    ///
    /// # Panics
    /// When the executable is missing.
    #[must_use]
    pub fn new(args: &[&str]) -> Self {
        let mut command = Command::new(binary().expect("the executable under test"));
        let names =
            ["BIVOUAC_URL", "BIVOUAC_TOKEN", "BIVOUAC_DATA_DIR", "BIVOUAC_IMAGE", "NODE_OPTIONS"];
        for name in names {
            command.env_remove(name);
        }
        command.args(args).env("BIVOUAC_IMAGES", images()).env("NO_COLOR", "1");
        Self { command, stdin: Vec::new() }
    }

    /// A variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// The folder that it runs in.
    #[must_use]
    pub fn cwd(mut self, path: &Path) -> Self {
        self.command.current_dir(path);
        self
    }

    /// What it reads on standard input.
    #[must_use]
    pub fn stdin(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.stdin = data.into();
        self
    }

    /// Starts it; the caller waits for it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn(mut self) -> Result<Child> {
        self.command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.command.spawn().with_context(|| format!("{:?}", self.command))?;
        if let Some(mut stdin) = child.stdin.take() {
            let data = self.stdin;
            // A program that does not read its input must not hold the test.
            std::thread::spawn(move || stdin.write_all(&data));
        }
        Ok(child)
    }

    /// Runs it to its end, at most two minutes.
    ///
    /// # Panics
    /// When it cannot be started or does not end.
    #[must_use]
    pub fn run(self) -> Output {
        let shown = format!("{:?}", self.command);
        let child = self.spawn().expect("the command starts");
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a pid");
        let (send, done) = std::sync::mpsc::channel::<()>();
        let watch = std::thread::spawn(move || {
            let late = done.recv_timeout(Duration::from_secs(120)).is_err();
            if late {
                let _ = kill_process(pid, Signal::KILL);
            }
            late
        });
        let output = child.wait_with_output().expect("its output");
        let _ = send.send(());
        let late = watch.join().expect("the watch does not panic");
        assert!(!late, "{shown} did not end; stderr: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Standard output of a run that must succeed.
    ///
    /// # Panics
    /// When it fails.
    #[track_caller]
    #[must_use]
    pub fn good(self) -> String {
        let shown = format!("{:?}", self.command);
        let output = self.run();
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{shown}: {:?}\n{err}", output.status);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Standard output of a `--json` run that must succeed, parsed.
    ///
    /// # Panics
    /// When it fails or prints anything but one JSON value.
    #[track_caller]
    #[must_use]
    pub fn json(self) -> Value {
        let text = self.good();
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("not JSON ({e}): {text}"))
    }
}
