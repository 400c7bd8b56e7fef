//! Terminals: the command line in a terminal of its own, several clients, an engine that is killed, and clients
//! that do not keep to the protocol.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bivouac_testkit::{LONG, TestSandbox, TestServer, eventually};
use futures_util::{SinkExt as _, StreamExt as _};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, client_async};

use crate::server;

/// The program in a terminal, as a person starts it.
struct Pty {
    master: OwnedFd,
    slave: OwnedFd,
    seen: Arc<Mutex<Vec<u8>>>,
    child: Child,
}

impl Pty {
    fn start(server: &TestServer, team: &str, args: &[&str]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
        let slave = rustix::fs::open(&name, flags, rustix::fs::Mode::empty()).unwrap();
        let side = || Stdio::from(slave.try_clone().unwrap());
        // Makes the terminal that of a session of its own, and is the program then.
        let mut command = Command::new("setsid");
        command.arg("-c").arg(bivouac_testkit::binary().unwrap());
        command.args(["-n", &format!("{team}/prj_test")]).args(args);
        command.env("BIVOUAC_DATA_DIR", &server.data).env("BIVOUAC_TOKEN", &server.token);
        command.env_remove("BIVOUAC_URL").env("TERM", "xterm").env("NO_COLOR", "1");
        let pty = Self {
            child: command.stdin(side()).stdout(side()).stderr(side()).spawn().unwrap(),
            seen: Arc::default(),
            master,
            slave,
        };
        pty.resize(120, 40);
        let (seen, master) = (Arc::clone(&pty.seen), pty.master.try_clone().unwrap());
        std::thread::spawn(move || {
            let mut master = std::fs::File::from(master);
            let mut buffer = vec![0u8; 64 << 10];
            while let Ok(count @ 1..) = master.read(&mut buffer) {
                seen.lock().unwrap().extend(&buffer[..count]);
            }
        });
        pty
    }

    fn resize(&self, cols: u16, rows: u16) {
        let size = Winsize { ws_col: cols, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.master, size).unwrap();
    }

    fn types(&self, keys: &str) {
        let mut master = std::fs::File::from(self.master.try_clone().unwrap());
        master.write_all(keys.as_bytes()).unwrap();
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    async fn sees(&self, text: &str) {
        eventually(&format!("the terminal shows {text:?}"), LONG, async || {
            let seen = self.text();
            let tail = seen.len().saturating_sub(2000);
            let tail = seen.get(tail..).unwrap_or_default().to_owned();
            seen.contains(text).then_some(()).ok_or(tail)
        })
        .await;
    }

    /// Whether keys come as they are.
    fn raw(&self) -> bool {
        !tcgetattr(&self.slave).unwrap().local_modes.contains(LocalModes::ICANON)
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Its exit code; the terminal is as it was before.
    async fn ends(mut self) -> (i32, String) {
        let child = Mutex::new(&mut self.child);
        let status = eventually("the program ends", LONG, async || {
            child.lock().unwrap().try_wait().unwrap().ok_or("it runs")
        })
        .await;
        assert!(!self.raw(), "the terminal was not given back");
        // The reader is behind the program by what the kernel still holds.
        let mut length = usize::MAX;
        while length != self.seen.lock().unwrap().len() {
            length = self.seen.lock().unwrap().len();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        (status.code().unwrap_or(-1), self.text())
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn terminals(server: &TestServer, team: &str) -> Vec<Value> {
    let space = format!("{team}/prj_test");
    let cli = server.cli(&["-n", &space, "--json", "terminals", "box"]);
    tokio::task::spawn_blocking(move || cli.json()).await.unwrap().as_array().unwrap().clone()
}

async fn names(server: &TestServer, team: &str) -> Vec<String> {
    let all = terminals(server, team).await;
    all.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

async fn boxed(server: &TestServer, team: &str) -> TestSandbox {
    TestSandbox::create(&server.client(team).unwrap(), json!({ "name": "box" })).await
}

#[tokio::test]
async fn a_shell_has_a_prompt_a_size_and_an_exit_code() {
    let server = server().await;
    let sandbox = boxed(&server, "tty").await;
    let pty = Pty::start(&server, "tty", &["exec", "-it", "box", "-e", "PS1=ready> ", "--", "sh"]);
    pty.sees("ready> ").await;
    assert!(pty.raw());
    pty.types("echo $((40+2)) $TERM; test -t 0 -a -t 1 -a -t 2 && echo all-$((3*1))\r");
    pty.sees("42 xterm").await;
    pty.sees("all-3").await;
    assert!(pty.text().contains("echo $((40+2))"), "what is typed is echoed");
    pty.types("stty size\r");
    pty.sees("40 120").await;
    pty.resize(132, 50);
    eventually("the new size arrives", LONG, async || {
        pty.types("stty size\r");
        tokio::time::sleep(Duration::from_millis(100)).await;
        pty.text().contains("50 132").then_some(()).ok_or_else(|| pty.text())
    })
    .await;
    // Keys that would end or stop the client are the program's.
    pty.types("trap 'echo quit-$((5*5))' QUIT; sleep 1000\r");
    pty.sees("sleep 1000").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    pty.types("\x03");
    pty.types("kill -QUIT $$; echo alive-$((2+2))\r");
    pty.sees("quit-25").await;
    pty.sees("alive-4").await;
    pty.types("exit 3\r");
    let (code, seen) = pty.ends().await;
    assert_eq!(code, 3, "{seen}");
    let all = sandbox.client.get(&sandbox.path("/cmd")).await.ok();
    assert_eq!(all["commands"][0]["terminal"], "t1", "{all}");
    assert_eq!(all["commands"][0]["exitCode"], 3, "{all}");
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn run_gives_its_command_a_terminal_and_leaves_nothing() {
    let server = server().await;
    let pty =
        Pty::start(&server, "tty-run", &["run", "-it", "--", "sh", "-c", "tty; stty size; exit 5"]);
    let (code, seen) = pty.ends().await;
    assert_eq!(code, 5, "{seen}");
    assert!(seen.contains("/dev/pts/") && seen.contains("40 120"), "{seen}");
    let left = server.client("tty-run").unwrap().get("/v2/sandboxes?project=prj_test").await.ok();
    assert_eq!(left["sandboxes"], json!([]));
}

#[tokio::test]
async fn without_a_terminal_there_is_a_sentence() {
    let server = server().await;
    for args in [
        &["exec", "-t", "box", "--", "true"][..],
        &["run", "-it", "--", "true"],
        &["shell", "box"],
        &["attach", "box", "main"],
    ] {
        let output = server.cli(args).run();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {err}");
        assert!(err.contains("standard input is not a terminal"), "{args:?}: {err}");
    }
    // Input without a terminal goes as it always went.
    let sandbox = boxed(&server, "tty-less").await;
    let cli = server.cli(&[
        "-n",
        "tty-less/prj_test",
        "exec",
        "-i",
        "box",
        "--",
        "sh",
        "-c",
        "cat; exit 4",
    ]);
    let output = tokio::task::spawn_blocking(|| cli.stdin("a\0b\n").run()).await.unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(4), &b"a\0b\n"[..]));
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn several_sit_at_one_and_it_stays_when_they_leave() {
    let server = server().await;
    let sandbox = boxed(&server, "tty-two").await;
    let first = Pty::start(&server, "tty-two", &["shell", "box", "-e", "PS1=ready> ", "--", "sh"]);
    first.sees("ready> ").await;
    let second = Pty::start(&server, "tty-two", &["shell", "box"]);
    second.sees("ready> ").await;
    first.types("echo one-$((1+1))\r");
    second.types("echo two-$((2+2))\r");
    for pty in [&first, &second] {
        pty.sees("one-2").await;
        pty.sees("two-4").await;
    }
    assert_eq!(terminals(&server, "tty-two").await[0]["attached"], 2);
    let third = Pty::start(&server, "tty-two", &["shell", "box", "--", "true"]);
    let (code, seen) = third.ends().await;
    assert!(code == 1 && seen.contains("runs already"), "{code} {seen}");
    // In the middle of a line it is no escape.
    first.types("echo ~.\r");
    first.sees("\n~.").await;
    first.types("\r~.");
    let (code, seen) = first.ends().await;
    assert_eq!(code, 0, "{seen}");
    assert!(seen.contains("left terminal main of box; it goes on"), "{seen}");
    second.types("echo still-$((3+3))\r");
    second.sees("still-6").await;
    second.signal(Signal::TERM);
    assert_eq!(second.ends().await.0, 143);
    assert_eq!(names(&server, "tty-two").await, ["main"]);
    // What was written is seen again.
    let third = Pty::start(&server, "tty-two", &["attach", "box", "main"]);
    third.sees("still-6").await;
    third.types("exit 7\r");
    assert_eq!(third.ends().await.0, 7);
    assert!(names(&server, "tty-two").await.is_empty());
    let gone = Pty::start(&server, "tty-two", &["attach", "box", "main"]);
    let (code, seen) = gone.ends().await;
    assert!(code == 1 && seen.contains("does not run"), "{code} {seen}");
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn who_leaves_one_without_a_name_hangs_it_up() {
    let server = server().await;
    let sandbox = boxed(&server, "tty-hup").await;
    let new =
        Pty::start(&server, "tty-hup", &["shell", "box", "--new", "-e", "PS1=ready> ", "--", "sh"]);
    new.sees("ready> ").await;
    new.types("sleep 4321\r");
    let runs =
        async || sandbox.sh("pgrep -f 'sleep 432[1]' | wc -l").await.good().trim().to_owned();
    eventually("it runs", LONG, async || (runs().await == "1").then_some(()).ok_or("not yet"))
        .await;
    new.types("\r~.");
    assert_eq!(new.ends().await.0, 0);
    eventually("it ends", LONG, async || (runs().await == "0").then_some(()).ok_or("not yet"))
        .await;
    // By hand, with a program that does not mind.
    let keep = Pty::start(
        &server,
        "tty-hup",
        &[
            "shell",
            "box",
            "--terminal",
            "deaf",
            "--",
            "sh",
            "-c",
            "trap '' HUP; echo deaf-$((1+1)); while :; do sleep 1; done",
        ],
    );
    keep.sees("deaf-2").await;
    let cli = server.cli(&["-n", "tty-hup/prj_test", "--json", "hangup", "box", "deaf"]);
    let left = tokio::task::spawn_blocking(|| cli.json()).await.unwrap();
    assert_eq!(left[0]["name"], "deaf");
    assert_eq!(keep.ends().await.0, 137);
    let cli = server.cli(&["-n", "tty-hup/prj_test", "hangup", "box", "deaf"]);
    let output = tokio::task::spawn_blocking(|| cli.run()).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn a_killed_engine_costs_no_byte_and_shows_none_twice() {
    let mut server = TestServer::builder().keep_sandboxes().start().await.unwrap();
    boxed(&server, "tty-kill").await;
    let count = "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo line-$i-; [ $((i%10)) = 0 ] && sleep 0.01; done; read end; exit 6";
    let args = ["shell", "box", "--terminal", "count", "--", "sh", "-c", count];
    let pty = Pty::start(&server, "tty-kill", &args);
    pty.sees("line-200-").await;
    server.restart().await.unwrap();
    pty.sees("line-1200-").await;
    server.restart().await.unwrap();
    pty.sees("line-3000-").await;
    assert!(pty.text().contains("the connection to the engine broke"), "{}", pty.text());
    // Somebody else sees the end of it again.
    assert_eq!(names(&server, "tty-kill").await, ["count"]);
    let other = Pty::start(&server, "tty-kill", &["attach", "box", "count", "--scrollback", "2K"]);
    other.sees("line-3000-").await;
    assert!(!other.text().contains("line-2000-"));
    // Ends while nobody is there to tell.
    server.kill9().unwrap();
    pty.types("done\r");
    server.restart().await.unwrap();
    eventually("what was typed arrives", LONG, async || {
        // A key that is pressed at the moment of the break may be lost.
        pty.types("\r");
        tokio::time::sleep(Duration::from_millis(200)).await;
        names(&server, "tty-kill").await.is_empty().then_some(()).ok_or("it runs")
    })
    .await;
    let (code, seen) = pty.ends().await;
    assert_eq!(code, 6, "{}", &seen[seen.len().saturating_sub(500)..]);
    let numbers: Vec<u32> = seen
        .split("line-")
        .skip(1)
        .map(|rest| rest.split('-').next().unwrap().parse().unwrap())
        .collect();
    assert_eq!(numbers, (1..=3000).collect::<Vec<_>>());
    assert_eq!(other.ends().await.0, 6);
    // The engine listens elsewhere by now.
    let client = server.client("tty-kill").unwrap();
    let _ = client.delete("/v2/sandboxes/box").await.ok();
}

#[tokio::test]
async fn much_output_is_complete_and_too_much_is_its_end() {
    let server = server().await;
    let sandbox = boxed(&server, "tty-much").await;
    let pty = Pty::start(&server, "tty-much", &["exec", "-t", "box", "--", "seq", "1", "200000"]);
    let (code, seen) = pty.ends().await;
    assert_eq!(code, 0);
    let wanted: String = (1..=200_000).map(|n| format!("{n}\r\n")).collect();
    assert!(seen.contains(&wanted), "{} bytes of {}", seen.len(), wanted.len());
    // 22 MB: what the log keeps is the end of it, cut between lines.
    let line = "seq 1 3000000; echo the-$((1+1))-end; sleep 1000";
    let cli = server.cli(&[
        "-n",
        "tty-much/prj_test",
        "--json",
        "shell",
        "box",
        "--terminal",
        "big",
        "--",
        "sh",
        "-c",
        line,
    ]);
    let opened = tokio::task::spawn_blocking(|| cli.json()).await.unwrap();
    assert_eq!(opened["name"], "big");
    let attach = ["attach", "box", "big", "--scrollback", "100M"];
    let followed = eventually("all is written", LONG, async || {
        let pty = Pty::start(&server, "tty-much", &["attach", "box", "big", "--scrollback", "1K"]);
        pty.sees("\n").await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        pty.text().contains("the-2-end").then_some(()).ok_or("not yet")
    });
    followed.await;
    let pty = Pty::start(&server, "tty-much", &attach);
    pty.sees("the-2-end").await;
    let seen = pty.text();
    let first: u32 = seen.trim_start().lines().next().unwrap().trim().parse().unwrap();
    assert!(first > 100_000, "{first}");
    let rest: String = (first..=3_000_000).map(|n| format!("{n}\r\n")).collect();
    assert!(seen.contains(&rest), "from {first}: {} of {}", seen.len(), rest.len());
    pty.types("\r~.");
    assert_eq!(pty.ends().await.0, 0);
    let _ = sandbox.delete().await.ok();
}

type Socket = WebSocketStream<TcpStream>;

/// Opens a WebSocket; a status that is no upgrade is the error.
async fn socket(server: &TestServer, path: &str, token: Option<&str>) -> Result<Socket, u16> {
    let address = server.url.trim_start_matches("http://");
    let mut request = format!("ws://{address}{path}").into_client_request().unwrap();
    if let Some(token) = token {
        let bearer = format!("Bearer {token}").parse().unwrap();
        request.headers_mut().insert("authorization", bearer);
    }
    let stream = TcpStream::connect(address).await.unwrap();
    match client_async(request, stream).await {
        Ok((socket, _)) => Ok(socket),
        Err(Error::Http(response)) => Err(response.status().as_u16()),
        Err(error) => panic!("{error}"),
    }
}

struct Ticket {
    path: String,
    token: String,
}

async fn ticket(sandbox: &TestSandbox) -> Ticket {
    let answer = sandbox.client.post(&sandbox.path("/interactive"), &json!({})).await.ok();
    let url = answer["url"].as_str().unwrap();
    let (_, path) = url.strip_prefix("ws://").unwrap().split_once('/').unwrap();
    Ticket { path: format!("/{path}"), token: answer["token"].as_str().unwrap().to_owned() }
}

async fn interactive(server: &TestServer, sandbox: &TestSandbox) -> Socket {
    let Ticket { path, token } = ticket(sandbox).await;
    socket(server, &format!("{path}?token={token}"), None).await.unwrap()
}

fn text(value: &Value) -> Message {
    Message::Text(value.to_string().into())
}

/// What a connection shows until it is closed: output, text frames, the code of the close.
async fn drained(socket: &mut Socket) -> (String, Vec<Value>, Option<u16>) {
    let (mut shown, mut said, mut code) = (Vec::new(), Vec::new(), None);
    let all = async {
        while let Some(Ok(frame)) = socket.next().await {
            match frame {
                Message::Binary(bytes) => shown.extend(bytes),
                Message::Text(text) => said.push(serde_json::from_str(&text).unwrap()),
                Message::Close(frame) => code = frame.map(|frame| u16::from(frame.code)),
                _ => {}
            }
        }
    };
    tokio::time::timeout(LONG, all).await.expect("it is closed");
    (String::from_utf8_lossy(&shown).into_owned(), said, code)
}

/// Reads on until that is shown.
async fn shows(socket: &mut Socket, words: &str) {
    let mut shown = Vec::new();
    while !String::from_utf8_lossy(&shown).contains(words) {
        let frame = tokio::time::timeout(LONG, socket.next()).await.unwrap().unwrap().unwrap();
        if let Message::Binary(bytes) = frame {
            shown.extend(bytes);
        }
    }
}

#[tokio::test]
async fn a_ticket_is_for_one_connection_to_its_session() {
    let server = server().await;
    let (sandbox, other) = (boxed(&server, "tty-ticket").await, boxed(&server, "tty-other").await);
    let Ticket { path, token } = ticket(&sandbox).await;
    let elsewhere = ticket(&other).await;
    let mut first = socket(&server, &format!("{path}?token={token}"), None).await.unwrap();
    let refused = async |path: String| socket(&server, &path, None).await.unwrap_err();
    assert_eq!(refused(format!("{path}?token={token}")).await, 401, "used");
    assert_eq!(refused(format!("{path}?token={}", elsewhere.token)).await, 401, "of another");
    assert_eq!(refused(format!("{path}?token=x")).await, 401);
    assert_eq!(refused(path.clone()).await, 401);
    assert_eq!(refused(format!("{path}x?token={token}")).await, 401);
    let bearer = socket(&server, &path, Some(&server.token)).await.unwrap_err();
    assert_eq!(bearer, 401, "the API's token is none for this");
    let wrong = sandbox.client.with_team("tty-other");
    wrong.post(&sandbox.path("/interactive"), &json!({})).await.refused(404, "not_found");
    let start = json!({ "type": "start", "command": "sudo", "args": ["sh", "-c",
        "id -un; pwd; echo $FOO; stty size; exit 3"], "env": ["FOO=bar=1"], "cwd": "/tmp",
        "cols": 99, "rows": 33 });
    first.send(text(&start)).await.unwrap();
    let (shown, said, code) = drained(&mut first).await;
    assert_eq!(shown, "root\r\n/tmp\r\nbar=1\r\n33 99\r\n");
    assert_eq!((said, code), (vec![json!({ "type": "exit", "code": 3 })], Some(1000)));
    let mut second = interactive(&server, &sandbox).await;
    second.send(text(&json!({ "type": "start", "command": "no-such-thing" }))).await.unwrap();
    let (shown, said, _) = drained(&mut second).await;
    assert!(shown.contains("no-such-thing"), "{shown}");
    assert_eq!(said, [json!({ "type": "exit", "code": 127 })]);
    for sandbox in [sandbox, other] {
        let _ = sandbox.delete().await.ok();
    }
}

#[tokio::test]
async fn hostile_frames_end_their_own_connection_alone() {
    let server = server().await;
    let sandbox = boxed(&server, "tty-bad").await;
    let start = json!({ "type": "start", "command": "cat" });
    // Wrong from the first frame on.
    for frame in [
        Message::Text("{".into()),
        text(&json!([1])),
        text(&json!({ "type": "resize", "cols": 1, "rows": 1 })),
        text(&json!({ "type": "start", "command": 7 })),
        Message::Binary(vec![0xff; 100].into()),
    ] {
        let mut socket = interactive(&server, &sandbox).await;
        socket.send(frame.clone()).await.unwrap();
        let (shown, said, code) = drained(&mut socket).await;
        assert!(said.is_empty() && shown.is_empty() && code == Some(1008), "{frame:?}: {code:?}");
    }
    for bad in [
        json!({ "env": ["x"] }),
        json!({ "cols": 0 }),
        json!({ "cols": 70000 }),
        json!({ "cwd": "/no/such/place" }),
        json!({ "args": ["a\0b"] }),
    ] {
        let mut all = start.as_object().unwrap().clone();
        all.extend(bad.as_object().unwrap().clone());
        let mut socket = interactive(&server, &sandbox).await;
        socket.send(text(&Value::Object(all))).await.unwrap();
        let (shown, said, _) = drained(&mut socket).await;
        assert!(shown.starts_with("bivouac: "), "{bad}: {shown}");
        assert_eq!(said, [json!({ "type": "exit", "code": 1 })], "{bad}");
    }
    // Wrong later: what ran is hung up.
    for frame in [
        Message::Text("nonsense".into()),
        text(&start),
        text(&json!({ "type": "resize", "cols": -1, "rows": 5 })),
        Message::Binary(vec![b'x'; 300 << 10].into()),
    ] {
        let mut socket = interactive(&server, &sandbox).await;
        socket.send(text(&start)).await.unwrap();
        socket.send(Message::Binary("hello\r".into())).await.unwrap();
        shows(&mut socket, "hello").await;
        // The other side may have closed before all of it was sent.
        let _ = socket.send(frame).await;
        let (_, said, _) = drained(&mut socket).await;
        assert!(said.is_empty(), "{said:?}");
    }
    // Bytes that are no text go through as they are, and a client that vanishes leaves nothing.
    let mut socket = interactive(&server, &sandbox).await;
    let raw = json!({ "type": "start", "command": "sh",
        "args": ["-c", "stty raw -echo; echo ready; head -c 6 | od -An -tx1; exec sleep 8765"] });
    socket.send(text(&raw)).await.unwrap();
    shows(&mut socket, "ready").await;
    socket.send(Message::Binary(vec![0xff, 0xfe, 0x80, 0, 3, 0x1a].into())).await.unwrap();
    shows(&mut socket, "ff fe 80 00 03 1a").await;
    drop(socket);
    eventually("what its client left is hung up", LONG, async || {
        let left = sandbox.sh("pgrep -f 'sleep 876[5]|^ca[t]$' | wc -l").await.good();
        (left.trim() == "0").then_some(()).ok_or(left)
    })
    .await;
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn our_own_end_point_tells_places_and_ends() {
    let server = server().await;
    let sandbox = boxed(&server, "tty-own").await;
    let client = &sandbox.client;
    let base = "/api/bivouac/v1/sandboxes/box/terminals";
    let line = "echo first; read x; echo got-$x; exit 9";
    let body =
        json!({ "name": "work", "command": "sh", "args": ["-c", line], "cols": 100, "rows": 30 });
    let opened = client.post(base, &body).await;
    assert_eq!(opened.status, 201, "{opened}");
    let opened = opened.json["terminal"].clone();
    client.post(base, &body).await.refused(409, "terminal_exists");
    for bad in
        [json!({ "name": "t1" }), json!({ "name": "a b" }), json!({ "cols": 0 }), json!({ "x": 1 })]
    {
        client.post(base, &bad).await.refused(400, "bad_request");
    }
    client.get(&format!("{base}/work/attach")).await.refused(426, "upgrade_required");
    let scope = "teamId=tty-own&projectId=prj_test";
    let open = async |path: String, token| socket(&server, &path, token).await;
    let path = format!("{base}/work/attach?{scope}");
    assert_eq!(open(path.clone(), None).await.unwrap_err(), 401);
    assert_eq!(open(path.clone(), Some("wrong")).await.unwrap_err(), 401);
    assert_eq!(
        open(format!("{base}/none/attach?{scope}"), Some(&server.token)).await.unwrap_err(),
        404
    );
    let mut first = open(path, Some(&server.token)).await.unwrap();
    first.send(Message::Binary("me\r".into())).await.unwrap();
    let (shown, said, _) = drained(&mut first).await;
    assert!(shown.starts_with("first\r\n") && shown.ends_with("got-me\r\n"), "{shown}");
    assert_eq!(said[0]["terminal"], "work");
    assert_eq!(said[1]["type"], "at");
    assert_eq!(said.last().unwrap(), &json!({ "type": "exit", "code": 9 }));
    // By its ids, from a place, although it has ended.
    let (session, command) = (&opened["sessionId"], &opened["command"]["id"]);
    let again = format!(
        "/api/bivouac/v1/sessions/{}/terminals/{}/attach?{scope}",
        session.as_str().unwrap(),
        command.as_str().unwrap()
    );
    let mut second = open(format!("{again}&at=0&skip=3"), Some(&server.token)).await.unwrap();
    let (rest, said, _) = drained(&mut second).await;
    assert_eq!(rest, shown[3..]);
    assert_eq!(said.last().unwrap()["code"], 9);
    for bad in ["at=1", "at=99999999999", "at=-1", "at=x"] {
        let status = open(format!("{again}&{bad}"), Some(&server.token)).await.unwrap_err();
        assert_eq!(status, 400, "{bad}");
    }
    let plain = sandbox.start(&["true"], json!({})).await;
    let no = again.replace(command.as_str().unwrap(), &plain);
    assert_eq!(open(no, Some(&server.token)).await.unwrap_err(), 400);
    let _ = sandbox.delete().await.ok();
}
