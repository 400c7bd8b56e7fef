//! Commands, shells, streams.

use bivouac_testkit::{SHORT, eventually};
use futures_util::future::join_all;
use serde_json::{Value, json};

use super::kit::{Desk, noise, run, run_with};
use crate::{sandbox, server};
use bivouac_testkit::TestSandbox;

#[tokio::test]
async fn a_command_has_its_code_its_streams_and_its_user() {
    let (server, box_) = sandbox("ssh-command").await;
    let (desk, name) = (Desk::new(&server, "ssh-command"), box_.name.as_str());
    let done = desk.ssh(&[name, "--", "echo out; echo err >&2; exit 7"]).await;
    assert_eq!((done.code, done.text().as_str(), done.err.as_str()), (Some(7), "out", "err\n"));
    let done = desk.ssh(&[name, "id -un; pwd; echo $HOME $LANG; cat"]).await;
    assert_eq!(done.good(), "vercel-sandbox\n/vercel/sandbox\n/home/vercel-sandbox C.UTF-8");
    assert_eq!(
        desk.ssh(&[name, "-l", "root", "id -un; pwd"]).await.good(),
        "root\n/vercel/sandbox"
    );
    assert_eq!(desk.ssh(&[name, "-l", "somebody", "id -un"]).await.good(), "vercel-sandbox");
    let done = desk.ssh_with(&[name, "--", "wc -c; echo done"], b"12345").await;
    assert_eq!(done.good(), "5\ndone");
    let done = desk.ssh(&[name, "kill -TERM $$"]).await;
    assert_eq!(done.code, Some(143), "as the API tells signals");
    let done = desk.ssh(&[name, "nosuchprogram-x"]).await;
    assert_eq!(done.code, Some(127), "{}", done.err);
    let set = ["-o", "SetEnv=LC_ALL=C LD_PRELOAD=x BASH_ENV=/tmp/x TZ=UTC"];
    let done = desk.ssh(&[name, set[0], set[1], "echo $LC_ALL,$LD_PRELOAD,$BASH_ENV,$TZ"]).await;
    assert_eq!(done.good(), "C,,,UTC");
    // As everything that runs, it is in the list.
    let listed = run(desk.bivouac(&["ps", name, "--json"])).await.good();
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert!(listed.as_array().unwrap().iter().any(|c| c["exitCode"] == json!(7)), "{listed}");
    let missing = desk.ssh(&["no-such-box", "true"]).await;
    assert!(missing.code != Some(0) && missing.err.contains("not found"), "{}", missing.err);
    let shown = run(desk.bivouac(&["ssh", "--json", name])).await.good();
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["host"], json!(format!("{name}.bivouac")));
    let words = shown["command"].to_string();
    assert!(!words.contains(&server.token), "the token is in the arguments");
}

#[tokio::test]
async fn much_goes_both_ways_and_is_the_same() {
    let (server, box_) = sandbox("ssh-much").await;
    let (desk, name) = (Desk::new(&server, "ssh-much"), box_.name.as_str());
    let bytes = noise(64 << 20);
    // What cat cannot write it does not read: input and output hold each other.
    let done = desk.ssh_with(&[name, "cat"], &bytes).await;
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(done.out == bytes, "{} bytes came back of {}", done.out.len(), bytes.len());
    // Nobody reads for a while, then all of it is there.
    let done = desk.ssh_with(&[name, "sleep 2; wc -c"], &bytes).await;
    assert_eq!(done.good(), bytes.len().to_string());
    // What nobody reads at all holds up nothing.
    let done = desk.ssh_with(&[name, "exit 3"], &bytes).await;
    assert_eq!(done.code, Some(3), "{}", done.err);
    // A GiB without a place to keep it.
    let before = server.memory_kb("VmRSS").unwrap();
    let done = desk.ssh(&[name, "head -c 1073741824 /dev/zero"]).await;
    assert_eq!((done.code, done.out.len()), (Some(0), 1 << 30), "{}", done.err);
    let grown = server.memory_kb("VmHWM").unwrap().saturating_sub(before);
    assert!(grown < 256 << 10, "the engine grew by {grown} kB");
}

#[tokio::test]
async fn a_shell_has_a_terminal_that_can_be_met_again() {
    let (server, box_) = sandbox("ssh-shell").await;
    let (desk, name) = (Desk::new(&server, "ssh-shell"), box_.name.as_str());
    let script = b"tty; echo T=$TERM; stty size; exit 3\n";
    let done = desk.ssh_with(&[name, "-tt"], script).await;
    let text = done.text();
    assert_eq!(done.code, Some(3), "{text} {}", done.err);
    assert!(text.contains("/dev/pts/") && text.contains("24 80"), "{text}");
    let done = desk.ssh_with(&[name, "-tt", "tty && exit 4"], b"").await;
    assert_eq!(done.code, Some(4), "{}", done.text());
    // The end of input ends a shell.
    let done = desk.ssh_with(&[name, "-tt"], b"echo al''l\n").await;
    assert!(done.code == Some(0) && done.text().contains("all"), "{}", done.text());
    let without = desk.ssh_with(&[name], b"echo $0; tty\n").await;
    assert!(without.text().contains("not a tty"), "{}", without.text());
    // One with a name outlives its client.
    let mut first = desk.bivouac(&["ssh", "--terminal", "main", name, "-tt"]);
    let mut first = first.stdin(std::process::Stdio::piped()).spawn().unwrap();
    let mut keys = first.stdin.take().unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut keys, b"mark=4242; touch /tmp/ready\n").await.unwrap();
    eventually("the shell", SHORT, async || {
        let ran = box_.sh("test -e /tmp/ready && echo yes").await;
        (ran.out() == "yes").then_some(()).ok_or(ran.err())
    })
    .await;
    first.kill().await.unwrap();
    let again = desk.bivouac(&["ssh", "--terminal", "main", name, "-tt"]);
    let done = run_with(again, b"echo mark is $mark; exit\n").await;
    assert!(done.text().contains("mark is 4242"), "{}", done.text());
}

#[tokio::test]
async fn a_client_that_goes_takes_its_command_along() {
    let (server, box_) = sandbox("ssh-gone").await;
    let (desk, name) = (Desk::new(&server, "ssh-gone"), box_.name.as_str());
    let mut client =
        super::kit::start(desk.bivouac(&["ssh", name, "echo $$ > /tmp/pid; exec sleep 1234"]));
    let pid = eventually("the command", SHORT, async || {
        let ran = box_.sh("cat /tmp/pid").await;
        if ran.out().is_empty() { Err(ran.err()) } else { Ok(ran.out()) }
    })
    .await;
    client.kill().await.unwrap();
    eventually("its end", SHORT, async || {
        let ran = box_.sh(&format!("kill -0 {pid} && echo alive")).await;
        if ran.out() == "alive" { Err("it lives") } else { Ok(()) }
    })
    .await;
}

#[tokio::test]
async fn twenty_at_once_and_a_stopped_box() {
    let server = server().await;
    let client = server.team("ssh-many");
    let box_ = TestSandbox::create(&client, json!({})).await;
    let (desk, name) = (Desk::new(&server, "ssh-many"), box_.name.as_str());
    // The first one makes the key.
    desk.ssh(&[name, "echo kept > kept"]).await.good();
    let all = (0..20).map(|n| {
        let desk = &desk;
        async move { desk.ssh(&[name, &format!("echo {n}; sleep 0.2")]).await.good() }
    });
    let said = join_all(all).await;
    assert_eq!(said, (0..20).map(|n| n.to_string()).collect::<Vec<_>>());
    let _ = run(desk.bivouac(&["stop", name])).await.good();
    assert_eq!(desk.ssh(&[name, "cat kept"]).await.good(), "kept", "woken");
    let _ = run(desk.bivouac(&["rm", "-f", "--snapshots", name])).await.good();
}
