//! Sandboxes that stop and start; what is left of many connections; the command line.

use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Child;

use bivouac_testkit::{LONG, TestServer, eventually};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{Site, ended, read};

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// The engine and what it started: zygotes, shims, init.
fn family(server: &TestServer) -> Vec<u32> {
    let mut found = vec![server.pid()];
    let mut at = 0;
    while let Some(pid) = found.get(at) {
        let children =
            std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for task in children {
            let text = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            let more = text.split_whitespace().filter_map(|pid| pid.parse().ok());
            found.extend(more.collect::<Vec<u32>>());
        }
        at += 1;
    }
    found
}

#[tokio::test]
async fn many_short_connections_leave_nothing() {
    // What other tests have open on a shared server would be counted.
    let site = Site::alone("prev-short").await;
    let family = family(&site.server);
    let count = || family.iter().map(|pid| descriptors(*pid)).sum::<usize>();
    // Idle connections of the warm-up are gone after some seconds.
    let before = eventually("nobody is connected", LONG, async || {
        let first = count();
        tokio::time::sleep(std::time::Duration::from_millis(6000)).await;
        (first == count()).then_some(first).ok_or("it still changes")
    })
    .await;
    let one = async |number: usize| {
        let mut stream = TcpStream::connect(site.address()).await.unwrap();
        let request = format!(
            "GET /alive?{number} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nx-bivouac-token: {}\r\n\r\n",
            site.host, site.server.token
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        // Every fourth goes away in the middle.
        if number.is_multiple_of(4) {
            return;
        }
        let _ = read(&mut stream, false).await.is(200);
    };
    for batch in 0..200 {
        let numbers = batch * 50..(batch + 1) * 50;
        let _: Vec<()> = futures_util::future::join_all(numbers.map(&one)).await;
    }
    eventually("all is let go of", LONG, async || {
        let now = count();
        (now <= before).then_some(()).ok_or((before, now))
    })
    .await;
    assert_eq!(site.token("GET", "/alive", "").await.is(200).text(), "1");
}

#[tokio::test]
async fn a_stopped_box_says_so_and_one_that_may_wake_is_started() {
    let body = json!({ "name": "site", "ports": [3000] });
    let site = Site::with("prev-wake", body).await;
    let _ = site.sandbox.stop().await.ok();
    let got = site.token("GET", "/alive", "").await;
    assert_eq!(got.is(503).json()["error"]["code"], "sandbox_stopped");
    assert!(got.text().contains("bivouac start site"), "{}", got.text());
    let view = site.sandbox.get(false).await.ok();
    assert_eq!(view["sandbox"]["status"], "stopped", "nobody started it");
    let path = format!("/v2/sandboxes/{}", site.sandbox.name);
    let set = site.client.patch(&path, &json!({ "life": { "wake": true } })).await.ok();
    assert_eq!(set["sandbox"]["life"]["wake"], true, "{set}");
    // A stranger starts nothing.
    let _ = site.ask("GET", "/alive", "Accept: text/html\r\n").await.is(401);
    assert_eq!(site.sandbox.get(false).await.ok()["sandbox"]["status"], "stopped");
    let page = site.token("GET", "/alive", "Accept: text/html\r\n").await;
    assert!(page.is(503).header("refresh").is_some(), "{}", page.head);
    assert!(page.text().contains("being started"), "{}", page.text());
    eventually("it runs", LONG, async || {
        let view = site.sandbox.get(false).await.ok();
        (view["sandbox"]["status"] == "running").then_some(()).ok_or(view)
    })
    .await;
    // The program is not started by anybody here; a request waits for it.
    let waiting = site.token("GET", "/alive", "");
    let starting = async {
        let mut sandbox = super::TestSandbox::of(&site.client, site.sandbox.get(false).await.ok());
        let _ = sandbox.resume().await;
        super::start_app(&sandbox, 3000, "127.0.0.1").await;
    };
    let (got, ()) = tokio::join!(waiting, starting);
    let _ = got.is(200);
}

/// A `bivouac forward` that runs.
struct Forward {
    child: Child,
    at: SocketAddr,
}

impl Drop for Forward {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn the_command_line_lists_opens_and_forwards() {
    let site = Site::new("prev-cli").await;
    let scope = ["-n", "prev-cli/prj_test"];
    let cli = |args: &[&str]| site.server.cli(&[&scope[..], args].concat());
    let ports = cli(&["ports", "site", "--json"]).json();
    assert_eq!((&ports[0]["port"], &ports[0]["listening"]), (&json!(3000), &json!(true)));
    let table = cli(&["ports", "site"]).good();
    assert!(table.contains("python") && table.contains("private"), "{table}");
    let link = cli(&["open", "site", "--print"]).good();
    let query = link.trim().split_once('?').unwrap().1.to_owned();
    let _ = site.ask("GET", &format!("/echo?{query}"), "").await.is(302);
    let _ = cli(&["ports", "revoke", "site"]).good();
    let _ = site.ask("GET", &format!("/echo?{query}"), "").await.is(401);
    let _ = cli(&["ports", "publish", "site", "3000"]).good();
    let _ = site.ask("GET", "/echo", "").await.is(200);
    let _ = cli(&["ports", "unpublish", "site", "3000"]).good();
    let _ = site.ask("GET", "/echo", "").await.is(401);
    assert_eq!(cli(&["forward", "nobody", "3000"]).run().status.code(), Some(1));

    let mut child = cli(&["forward", "site", "0:3000"]).spawn().unwrap();
    let mut line = String::new();
    let out = child.stdout.take().unwrap();
    let _ = std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
    let at = line.split(" -> ").next().unwrap().parse().unwrap_or_else(|_| panic!("{line}"));
    let mut forward = Forward { child, at };
    let request = "GET /alive HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut stream = TcpStream::connect(forward.at).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let _ = read(&mut stream, false).await.is(200);
    // A port that nobody listens on ends its connections, and those of others go on.
    let raw = format!(
        "GET {} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n",
        site.own("tunnel?port=3999"),
        site.server.token
    );
    let upgrade = "Connection: upgrade\r\nUpgrade: bivouac-tunnel\r\n\r\n";
    let scoped = raw.replacen("?port", "?teamId=prev-cli&projectId=prj_test&port", 1);
    let got = read(&mut site.raw(format!("{scoped}{upgrade}").as_bytes()).await, false).await;
    assert_eq!(got.is(404).json()["error"]["code"], "not_listening");
    let got = read(&mut site.raw(format!("{scoped}\r\n").as_bytes()).await, false).await;
    let _ = got.is(426);
    // Half a connection stays open.
    let open = scoped.replacen("3999", "3000", 1);
    let mut tunnel = site.raw(format!("{open}{upgrade}").as_bytes()).await;
    let _ = read(&mut tunnel, true).await.is(101);
    tunnel.write_all(b"GET /no-length HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    tunnel.shutdown().await.unwrap();
    let mut rest = String::new();
    let _ = tunnel.read_to_string(&mut rest).await.unwrap();
    assert!(rest.ends_with("until the end"), "{rest}");
    // And a killed sandbox takes its connections along.
    let _ = site.sandbox.delete().await.ok();
    ended(&mut stream).await;
    let pid = i32::try_from(forward.child.id()).unwrap();
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).unwrap(),
        rustix::process::Signal::INT,
    )
    .unwrap();
    let status = forward.child.wait().unwrap();
    assert_eq!((status.code(), status.signal()), (Some(0), None));
}

#[tokio::test]
async fn forward_goes_on_after_a_restart_of_the_engine() {
    let _lock = bivouac_testkit::shared().unwrap();
    let mut server = TestServer::builder().keep_sandboxes().start().await.unwrap();
    let client = server.client("local").unwrap();
    let sandbox =
        super::TestSandbox::create(&client, json!({ "name": "site", "persistent": false })).await;
    super::start_app(&sandbox, 3000, "127.0.0.1").await;
    let mut child =
        server.cli(&["-n", "local/prj_test", "forward", "site", "0:3000"]).spawn().unwrap();
    let mut line = String::new();
    let out = child.stdout.take().unwrap();
    let _ = std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
    let forward = Forward { child, at: line.split(" -> ").next().unwrap().parse().unwrap() };
    let ask = async || {
        let mut stream = TcpStream::connect(forward.at).await.unwrap();
        let _ = stream.write_all(b"GET /alive HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        read(&mut stream, false).await
    };
    eventually("it answers", LONG, async || {
        let got = ask().await;
        (got.status == 200).then_some(()).ok_or(got)
    })
    .await;
    server.kill9().unwrap();
    server.restart().await.unwrap();
    let got = ask().await;
    let _ = got.is(200);
    drop(forward);
    // It listens elsewhere now.
    let _ = server.cli(&["-n", "local/prj_test", "rm", "site"]).good();
}
