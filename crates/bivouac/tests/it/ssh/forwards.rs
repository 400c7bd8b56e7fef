//! Ports: -L, -R, -D, and what is left of them.

use std::time::Duration;

use bivouac_testkit::{SHORT, TestSandbox, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::kit::{Desk, free_port, run, start};
use crate::sandbox;

/// Inside, on loopback: says the same to everybody, in HTTP.
const SERVE: &str = "mkdir -p /tmp/www && echo inside > /tmp/www/index.html && cd /tmp/www && \
                     exec python3 -m http.server --bind 127.0.0.1 3000";

async fn get(url: &str, more: &[&str]) -> Result<String, String> {
    let mut curl = tokio::process::Command::new("curl");
    curl.args(["-sS", "--noproxy", "", "--max-time", "20"]).args(more).arg(url);
    let done = curl.output().await.unwrap();
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    if done.status.success() {
        Ok(text)
    } else {
        Err(String::from_utf8_lossy(&done.stderr).into_owned())
    }
}

async fn serving(box_: &TestSandbox) {
    let _ = box_.start(&["sh", "-c", SERVE], serde_json::json!({})).await;
    eventually("the server inside", SHORT, async || {
        let ran = box_.sh("curl -s http://127.0.0.1:3000/").await;
        (ran.out() == "inside").then_some(()).ok_or(ran.err())
    })
    .await;
}

#[tokio::test]
async fn ports_inside_are_reached_by_l_and_d() {
    let (server, box_) = sandbox("ssh-out").await;
    let (desk, name) = (Desk::new(&server, "ssh-out"), box_.name.as_str());
    serving(&box_).await;
    let (local, socks) = (free_port(), free_port());
    let forward = format!("127.0.0.1:{local}:localhost:3000");
    let proxy = format!("127.0.0.1:{socks}");
    let _client = start(desk.bivouac(&["ssh", name, "-N", "-L", &forward, "-D", &proxy]));
    let url = format!("http://127.0.0.1:{local}/");
    eventually("the forward", SHORT, async || get(&url, &[]).await).await;
    assert_eq!(get(&url, &[]).await.unwrap(), "inside\n");
    let by = format!("socks5h://127.0.0.1:{socks}");
    assert_eq!(get("http://localhost:3000/", &["-x", &by]).await.unwrap(), "inside\n");
    assert!(get("http://localhost:3999/", &["-x", &by]).await.is_err(), "nobody listens there");
    // The host's own loopback is not the sandbox's.
    let outside = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = outside.local_addr().unwrap().port();
    let there = get(&format!("http://127.0.0.1:{port}/"), &["-x", &by]).await;
    assert!(there.is_err(), "the host was reached: {there:?}");
    let reached = tokio::time::timeout(Duration::from_millis(50), outside.accept()).await;
    assert!(reached.is_err(), "somebody came to the host's loopback");
}

#[tokio::test]
async fn a_server_outside_is_reached_by_r() {
    let (server, box_) = sandbox("ssh-in").await;
    let (desk, name) = (Desk::new(&server, "ssh-in"), box_.name.as_str());
    let outside = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = outside.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = outside.accept().await {
            tokio::spawn(async move {
                let mut all = Vec::new();
                // Half a close goes through, and the answer comes after it.
                stream.read_to_end(&mut all).await.unwrap();
                stream.write_all(format!("{} bytes", all.len()).as_bytes()).await.unwrap();
            });
        }
    });
    let forward = format!("4000:127.0.0.1:{port}");
    let mut client = start(desk.bivouac(&["ssh", name, "-N", "-R", &forward]));
    let ask = "import socket as s; c=s.create_connection(('127.0.0.1',4000)); c.sendall(b'x'*300000); \
               c.shutdown(1); print(c.recv(99).decode())";
    let ask = format!("python3 -c \"{ask}\"");
    eventually("the forward", SHORT, async || {
        let ran = box_.sh(&ask).await;
        (ran.out() == "300000 bytes").then_some(()).ok_or(ran.err())
    })
    .await;
    // It listens on loopback only.
    let all = box_.sh("grep -ci ':0FA0 00000000:0000 0A' /proc/net/tcp").await.out();
    let own = box_.sh("grep -ci '0100007F:0FA0 00000000:0000 0A' /proc/net/tcp").await.out();
    assert_eq!((all.as_str(), own.as_str()), ("1", "1"));
    client.kill().await.unwrap();
    eventually("the listener to go", SHORT, async || {
        let ran = box_.sh(&ask).await;
        if ran.exit == Some(0) { Err(ran.out()) } else { Ok(()) }
    })
    .await;
}

#[tokio::test]
async fn a_stuck_channel_holds_up_no_other() {
    let (server, box_) = sandbox("ssh-stuck").await;
    let desk = Desk::new(&server, "ssh-stuck");
    desk.ssh(&[&box_.name, "true"]).await.good();
    serving(&box_).await;
    // Reads nothing, ever.
    let stuck = "import socket as s,time; l=s.socket(); l.bind(('127.0.0.1',3001)); l.listen(); c=l.accept()[0]; \
                 print('in',flush=True); time.sleep(600)";
    let _ = box_.start(&["python3", "-c", stuck], serde_json::json!({})).await;
    let (one, two) = (free_port(), free_port());
    let (first, second) = (format!("{one}:localhost:3000"), format!("{two}:localhost:3001"));
    let _client = start(desk.bivouac(&["ssh", &box_.name, "-N", "-L", &first, "-L", &second]));
    let url = format!("http://127.0.0.1:{one}/");
    eventually("the forward", SHORT, async || get(&url, &[]).await).await;
    let mut stream = TcpStream::connect(("127.0.0.1", two)).await.unwrap();
    let junk = vec![0u8; 1 << 20];
    let mut written = 0;
    // Until all that lies between has taken what it can.
    while let Ok(Ok(n)) =
        tokio::time::timeout(Duration::from_millis(500), stream.write(&junk)).await
    {
        written += n;
        assert!(written < 64 << 20, "somebody keeps what nobody reads");
    }
    assert_eq!(get(&url, &[]).await.unwrap(), "inside\n");
    drop(stream);
    assert_eq!(get(&url, &[]).await.unwrap(), "inside\n");
    let _ = run(desk.bivouac(&["ssh", &box_.name, "true"])).await.good();
}
