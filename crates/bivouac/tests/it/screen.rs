//! The command line on a real terminal: what fits, what is drawn while something goes on, and what is left.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex};

use bivouac_testkit::{Cli, SHORT, TestServer, binary, eventually};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::server;

/// A terminal of so many columns and lines.
struct Terminal {
    master: File,
    slave: File,
    /// What was written to it so far.
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    fn new(columns: u16, lines: u16) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let master = File::from(master);
        let terminal = Self { master, slave, seen: Arc::default() };
        terminal.resize(columns, lines);
        let (mut reader, seen) = (terminal.master.try_clone().unwrap(), terminal.seen.clone());
        // Ends when nobody has the other side any more.
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut piece) {
                seen.lock().unwrap().extend_from_slice(&piece[..count]);
            }
        });
        terminal
    }

    fn resize(&self, columns: u16, lines: u16) {
        let size = Winsize { ws_col: columns, ws_row: lines, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.master, size).unwrap();
    }

    fn seen(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    /// Waits until `text` was written; answers all that was.
    async fn shows(&self, text: &str) -> String {
        eventually(&format!("the terminal to show '{text}'"), SHORT, async || {
            let seen = self.seen();
            if seen.contains(text) { Ok(seen) } else { Err(seen) }
        })
        .await
    }

    fn types(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Whether input is echoed and comes by lines, as a shell wants it.
    fn is_plain(&self) -> bool {
        let modes = tcgetattr(&self.slave).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO)
    }

    /// Starts the command line with this as its terminal.
    fn start(&self, server: &TestServer, namespace: &str, line: &[&str]) -> Child {
        self.command(server, namespace, line).spawn().unwrap()
    }

    fn command(&self, server: &TestServer, namespace: &str, line: &[&str]) -> Command {
        // The terminal becomes that of a session of its own, so that what is typed can be a signal.
        let mut command = Command::new("setsid");
        command.arg("--ctty");
        self.line(command, server, namespace, line)
    }

    fn line(
        &self,
        mut command: Command,
        server: &TestServer,
        namespace: &str,
        line: &[&str],
    ) -> Command {
        command
            .arg(binary().unwrap())
            .args(["-n", namespace])
            .args(line)
            .env("BIVOUAC_DATA_DIR", &server.data)
            .env("BIVOUAC_TOKEN", &server.token)
            .env("TERM", "xterm")
            .env_remove("BIVOUAC_URL")
            .env_remove("NO_COLOR")
            .env_remove("COLUMNS")
            .stdin(self.slave.try_clone().unwrap())
            .stdout(self.slave.try_clone().unwrap())
            .stderr(self.slave.try_clone().unwrap());
        command
    }
}

async fn ended(mut child: Child) -> ExitStatus {
    tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap()
}

fn cli(server: &TestServer, namespace: &str, args: &[&str]) -> Cli {
    let all: Vec<&str> = ["-n", namespace].iter().chain(args).copied().collect();
    server.cli(&all)
}

/// The lines that a finished command has written to a terminal.
async fn lines(server: &TestServer, columns: u16, line: &[&str]) -> Vec<String> {
    let terminal = Terminal::new(columns, 40);
    let status = ended(terminal.start(server, "screen/fit", line)).await;
    assert!(status.success(), "{line:?}: {}", terminal.seen());
    let mark = "the end of it";
    writeln!(&terminal.slave, "{mark}").unwrap();
    let seen = terminal.shows(mark).await;
    seen.lines().map(|l| l.trim_end().to_owned()).filter(|l| l != mark && !l.is_empty()).collect()
}

fn plain(line: &str) -> String {
    let mut text = String::new();
    let mut parts = line.split('\u{1b}');
    text.push_str(parts.next().unwrap());
    for part in parts {
        text.push_str(part.split_once('m').map_or(part, |(_, rest)| rest));
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_fit_the_terminal_and_pipes_get_everything() {
    let server = server().await;
    let run = |args: &[&str]| cli(&server, "screen/fit", args);
    let (name, label) =
        ("a-box-with-quite-a-long-name", "purpose=to-be-wider-than-the-terminal-is");
    let _ = run(&["create", name, "--tag", label]).good();
    let id = run(&["snapshot", name, "--live", "--label", label]).good();
    let id = id.trim();
    let _ = run(&["drive", "create", "screen-drive", "--size", "1G"]).good();
    for columns in [40, 60, 100, 200] {
        for line in
            [&["ls"][..], &["snapshots", "ls"], &["ps", name], &["drive", "ls"], &["top", "--once"]]
        {
            for shown in lines(&server, columns, line).await {
                let wide = plain(&shown).chars().count();
                assert!(wide <= usize::from(columns), "{line:?} at {columns}: {wide}: {shown}");
            }
        }
    }
    let narrow = lines(&server, 50, &["ls"]).await.join("\n");
    assert!(narrow.contains(name) && !narrow.contains("CREATED"), "{narrow}");
    assert!(narrow.contains("\u{1b}[32mrunning\u{1b}[0m"), "a state has its colour: {narrow:?}");
    let ids = lines(&server, 60, &["snapshots", "ls"]).await.join("\n");
    assert!(ids.contains(id), "an id is whole where there is room: {ids}");
    let whole = lines(&server, 40, &["--no-trunc", "ls"]).await.join("\n");
    assert!(whole.contains("CREATED"), "{whole}");
    // Into a pipe: everything, whatever COLUMNS says, without colours.
    let piped = run(&["ls"]).env("COLUMNS", "20").good();
    assert!(piped.contains(name) && piped.contains(label) && !piped.contains('\u{1b}'), "{piped}");
    assert!(run(&["snapshots", "ls"]).good().contains(id));
    // Names alone.
    assert_eq!(run(&["ls", "-q"]).good(), format!("{name}\n"));
    assert_eq!(run(&["snapshots", "ls", "-q"]).good(), format!("{id}\n"));
    assert_eq!(run(&["drive", "ls", "-q"]).good(), "screen-drive\n");
    // No colours for who wants none.
    let terminal = Terminal::new(100, 40);
    let mut command = terminal.command(&server, "screen/fit", &["ls"]);
    assert!(ended(command.env("NO_COLOR", "1").spawn().unwrap()).await.success());
    let seen = terminal.shows("running").await;
    assert!(!seen.contains('\u{1b}'), "{seen:?}");
    let _ = run(&["rm", "--snapshots", name]).good();
    let _ = run(&["snapshots", "rm", id]).run();
    let _ = run(&["drive", "rm", "screen-drive"]).good();
}

const ENTER: &str = "\u{1b}[?1049h";
const LEAVE: &str = "\u{1b}[?25h\u{1b}[?1049l";

#[tokio::test(flavor = "multi_thread")]
async fn top_gives_the_terminal_back_on_every_way_out() {
    let server = server().await;
    let _ = cli(&server, "screen/top", &["create", "seen-in-top"]).good();
    let top = ["top", "--interval", "200ms"];
    // By a key; others sort.
    let mut terminal = Terminal::new(100, 20);
    assert!(terminal.is_plain());
    let child = terminal.start(&server, "screen/top", &top);
    let seen = terminal.shows("seen-in-top").await;
    assert!(seen.contains(ENTER) && seen.contains("NET IN/S"), "{seen:?}");
    assert!(!terminal.is_plain(), "keys come one by one");
    terminal.types("m");
    terminal.shows("by Memory").await;
    // Another size is drawn at once, and nothing wider than it.
    let before = terminal.seen().len();
    terminal.resize(40, 10);
    let drawn = eventually("a picture of the new size", SHORT, async || {
        let seen = terminal.seen()[before..].to_owned();
        if seen.matches("\u{1b}[J").count() >= 2 { Ok(seen) } else { Err(seen) }
    })
    .await;
    let picture = drawn.split("\u{1b}[H").last().unwrap();
    // The terminal writes a return of its own.
    for line in picture.replace('\r', "").lines() {
        let wide = line.replace("\u{1b}[K", "").replace("\u{1b}[J", "").chars().count();
        assert!(wide <= 40, "{wide}: {line:?}");
    }
    terminal.types("q");
    assert_eq!(ended(child).await.code(), Some(0));
    terminal.shows(LEAVE).await;
    assert!(terminal.is_plain(), "{}", terminal.seen());
    // By Ctrl-C as it is typed, and by signals.
    for (signal, code) in [
        (None, 130),
        (Some(Signal::TERM), 143),
        (Some(Signal::HUP), 129),
        (Some(Signal::QUIT), 131),
    ] {
        let mut terminal = Terminal::new(80, 20);
        let child = terminal.start(&server, "screen/top", &top);
        terminal.shows("seen-in-top").await;
        match signal {
            None => terminal.types("\u{3}"),
            Some(signal) => kill_process(Pid::from_child(&child), signal).unwrap(),
        }
        assert_eq!(ended(child).await.code(), Some(code), "{signal:?}");
        terminal.shows(LEAVE).await;
        assert!(terminal.is_plain(), "{signal:?}");
    }
    let _ = cli(&server, "screen/top", &["rm", "--snapshots", "seen-in-top"]).good();
}

#[tokio::test(flavor = "multi_thread")]
async fn top_gives_the_terminal_back_when_the_engine_ends() {
    let _lock = bivouac_testkit::shared().unwrap();
    let server = TestServer::start().await.unwrap();
    let _ = server.cli(&["-n", "screen/end", "create", "seen-in-top", "--ephemeral"]).good();
    let terminal = Terminal::new(80, 20);
    let child = terminal.start(&server, "screen/end", &["top", "--interval", "200ms"]);
    terminal.shows("seen-in-top").await;
    let _ = server.stop().await.unwrap();
    assert_eq!(ended(child).await.code(), Some(1));
    let seen = terminal.shows("error:").await;
    assert!(terminal.is_plain());
    assert!(seen.rfind(LEAVE) < seen.rfind("error:"), "the error is on the usual screen: {seen:?}");
}

/// A picture of what goes on is on the line; and what takes it away.
const PICTURE: &str = "importing";
const WIPED: &str = "\r\u{1b}[2K";

#[tokio::test(flavor = "multi_thread")]
async fn what_takes_long_is_shown_and_leaves_nothing() {
    let server = server().await;
    let run = |args: &[&str]| cli(&server, "screen/busy", args);
    let _ = run(&["create", "source"]).good();
    let id = run(&["snapshot", "source", "--live"]).good();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("box.tar.zst");
    let _ = run(&["snapshots", "export", id.trim(), file.to_str().unwrap()]).good();
    let archive = std::fs::read(&file).unwrap();
    let before = run(&["snapshots", "ls", "-q"]).good();
    // An import that waits for the rest of its archive.
    let import = |terminal: &Terminal, json: bool| {
        let (read, mut write) = std::io::pipe().unwrap();
        write.write_all(&archive[..archive.len() / 2]).unwrap();
        let line: &[&str] = if json {
            &["snapshots", "import", "-", "--json"]
        } else {
            &["snapshots", "import", "-"]
        };
        let mut command = terminal.line(Command::new("setsid"), &server, "screen/busy", line);
        (command.stdin(read).spawn().unwrap(), write)
    };
    for signal in [Signal::INT, Signal::TERM] {
        let terminal = Terminal::new(80, 20);
        let (child, _write) = import(&terminal, false);
        terminal.shows(PICTURE).await;
        kill_process(Pid::from_child(&child), signal).unwrap();
        let code = ended(child).await.code();
        assert_eq!(code, Some(if signal == Signal::INT { 130 } else { 143 }));
        writeln!(&terminal.slave, "after").unwrap();
        let seen = terminal.shows("after").await;
        let last = seen.rfind(PICTURE).unwrap();
        assert!(seen[last..].contains(WIPED), "the line is not clean: {seen:?}");
        assert!(!seen.contains("error:"), "{seen}");
    }
    // To its end: nothing is left of the picture, and the id is on a line of its own.
    let terminal = Terminal::new(80, 20);
    let (child, mut write) = import(&terminal, false);
    terminal.shows(PICTURE).await;
    write.write_all(&archive[archive.len() / 2..]).unwrap();
    drop(write);
    assert!(ended(child).await.success(), "{}", terminal.seen());
    let seen = terminal.shows("hint:").await;
    let last = seen.rfind(PICTURE).unwrap();
    assert!(seen[last..].contains(WIPED) && seen[last..].contains("snap_"), "{seen:?}");
    // Never with --json.
    let terminal = Terminal::new(80, 20);
    let (child, mut write) = import(&terminal, true);
    write.write_all(&archive[archive.len() / 2..]).unwrap();
    drop(write);
    assert!(ended(child).await.success(), "{}", terminal.seen());
    let seen = terminal.shows("\"snapshot\"").await;
    assert!(!seen.contains('\u{1b}') && !seen.contains(PICTURE), "{seen:?}");
    // What was interrupted left nothing: two came to be of four.
    let after = run(&["snapshots", "ls", "-q"]).good();
    assert_eq!(after.lines().count(), before.lines().count() + 2, "{after}");
    // An export that is interrupted leaves no half of a file.
    for id in after.lines() {
        let _ = run(&["snapshots", "rm", id]).good();
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    let _ = run(&["rm", "--snapshots", "source"]).good();
}
