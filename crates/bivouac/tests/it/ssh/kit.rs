//! Somebody with OpenSSH's clients and a home folder of his own.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use bivouac_testkit::{TestServer, binary};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

/// How long a client may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// A user of one engine, in one namespace.
pub(super) struct Desk {
    pub(super) home: TempDir,
    data: PathBuf,
    token: String,
    namespace: String,
}

/// What a client did.
pub(super) struct Done {
    pub(super) code: Option<i32>,
    pub(super) out: Vec<u8>,
    pub(super) err: String,
}

impl Done {
    fn of(output: Output) -> Self {
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        Self { code: output.status.code(), out: output.stdout, err }
    }

    /// Standard output without the white space at its end.
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).trim_end().to_owned()
    }

    /// Standard output of what must have gone well.
    #[track_caller]
    pub(super) fn good(&self) -> String {
        assert_eq!(self.code, Some(0), "{}\n{}", self.text(), self.err);
        self.text()
    }
}

impl Desk {
    /// Who has the engine's own token; `team` is that of `server.client(team)`.
    pub(super) fn new(server: &TestServer, team: &str) -> Self {
        Self::with(server, team, &server.token)
    }

    pub(super) fn with(server: &TestServer, team: &str, token: &str) -> Self {
        Self {
            home: tempfile::tempdir().unwrap(),
            data: server.data.clone(),
            token: token.to_owned(),
            namespace: format!("{team}/prj_test"),
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// A program in the user's environment.
    pub(super) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env("HOME", self.home.path())
            .env_remove("XDG_CONFIG_HOME")
            .env_remove("SSH_AUTH_SOCK")
            .env_remove("BIVOUAC_URL")
            .env("BIVOUAC_DATA_DIR", &self.data)
            .env("BIVOUAC_TOKEN", &self.token)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    /// `bivouac -n NAMESPACE …`
    pub(super) fn bivouac(&self, args: &[&str]) -> Command {
        let mut command = self.command(binary().unwrap());
        command.args(["-n", &self.namespace]).args(args);
        command
    }

    /// The file that `bivouac ssh-config` prints, for `-F`.
    pub(super) async fn config(&self) -> String {
        let text = run(self.bivouac(&["ssh-config"])).await.good();
        let path = self.path("ssh_config");
        // Nothing of this machine's own configuration shall matter.
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// One of OpenSSH's programs, with that file.
    pub(super) async fn open_ssh(&self, program: &str, args: &[&str]) -> Command {
        let config = self.config().await;
        let mut command = self.command(program);
        command.args(["-F", &config]).args(args);
        command
    }

    /// `bivouac ssh NAME …`
    pub(super) async fn ssh(&self, args: &[&str]) -> Done {
        run(self.bivouac(&[&["ssh"], args].concat())).await
    }

    /// The same with something on standard input.
    pub(super) async fn ssh_with(&self, args: &[&str], input: &[u8]) -> Done {
        run_with(self.bivouac(&[&["ssh"], args].concat()), input).await
    }

    /// A file in the home folder.
    pub(super) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::File::create(&path).unwrap().write_all(bytes).unwrap();
        path
    }
}

pub(super) async fn run(mut command: Command) -> Done {
    let output = tokio::time::timeout(PATIENCE, command.output()).await;
    Done::of(output.unwrap_or_else(|_| panic!("too slow: {command:?}")).unwrap())
}

pub(super) async fn run_with(mut command: Command, input: &[u8]) -> Done {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let work = async {
        let (written, output) = tokio::join!(
            async {
                let written = stdin.write_all(input).await;
                drop(stdin);
                written
            },
            child.wait_with_output()
        );
        // A client that ends early does not read all.
        drop(written);
        output.unwrap()
    };
    let output = tokio::time::timeout(PATIENCE, work).await;
    Done::of(output.unwrap_or_else(|_| panic!("too slow: {command:?}")))
}

/// Starts something that goes on; it ends with what is answered.
pub(super) fn start(mut command: Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap()
}

/// Bytes that compress badly and are the same each time.
pub(super) fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// A port of this machine that nobody has.
pub(super) fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// How many descriptors a process has.
pub(super) fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")).unwrap().count()
}
