//! Who is let in: keys, tokens, both doors; and what is left when they have gone.

use bivouac_testkit::{LONG, SHORT, TestSandbox, TestServer, eventually, shared};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::kit::{Desk, descriptors, free_port, run, start};
use crate::sandbox;

/// Options that leave nothing to this machine's own configuration.
fn plain(port: u16, key: &str, hosts: &str) -> Vec<String> {
    let options = [
        format!("IdentityFile={key}"),
        "IdentitiesOnly=yes".to_owned(),
        format!("UserKnownHostsFile={hosts}"),
        "GlobalKnownHostsFile=/dev/null".to_owned(),
        "StrictHostKeyChecking=accept-new".to_owned(),
        "BatchMode=yes".to_owned(),
    ];
    let mut words =
        vec!["-F".to_owned(), "/dev/null".to_owned(), "-p".to_owned(), port.to_string()];
    words.extend(options.into_iter().flat_map(|option| ["-o".to_owned(), option]));
    words
}

async fn keygen(desk: &Desk, name: &str) -> String {
    let path = desk.path(name);
    let path = path.to_str().unwrap();
    let mut keygen = desk.command("ssh-keygen");
    keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", name, "-f", path]);
    run(keygen).await.good();
    path.to_owned()
}

#[tokio::test]
async fn registered_keys_open_the_port_and_others_do_not() {
    let lock = shared().unwrap();
    let port = free_port();
    let mut server = TestServer::builder()
        .arg("--ssh")
        .arg(format!("127.0.0.1:{port}"))
        .keep_sandboxes()
        .start()
        .await
        .unwrap();
    let client = server.client("local").unwrap();
    let box_ = TestSandbox::create(&client, json!({ "persistent": false })).await;
    let desk = Desk::new(&server, "local");
    let (good, bad) = (keygen(&desk, "good").await, keygen(&desk, "bad").await);
    let public = format!("{good}.pub");
    run(desk.bivouac(&["ssh-key", "add", &public, "--name", "laptop"])).await.good();
    let hosts = desk.path("hosts");
    let hosts = hosts.to_str().unwrap();
    let ssh = |key: &str, user: &str, more: &[&str], command: &str| {
        let mut ssh = desk.command("ssh");
        ssh.args(plain(port, key, hosts)).args(more).arg(format!("{user}@127.0.0.1")).arg(command);
        ssh
    };
    let user = format!("{}.prj_test.local", box_.name);
    assert_eq!(run(ssh(&good, &user, &[], "id -un")).await.good(), "vercel-sandbox");
    let root = format!("root+{user}");
    assert_eq!(run(ssh(&good, &root, &[], "id -un")).await.good(), "root");
    let refused = run(ssh(&bad, &user, &["-v"], "true")).await;
    assert_eq!(refused.code, Some(255));
    assert!(refused.err.contains("Permission denied (publickey)"), "{}", refused.err);
    assert!(
        refused.err.contains("Authentications that can continue: publickey\n")
            || refused.err.contains("Authentications that can continue: publickey\r\n"),
        "{}",
        refused.err
    );
    let nowhere = run(ssh(&good, "nobox.prj_test.local", &[], "true")).await;
    assert!(nowhere.code == Some(255) && nowhere.err.contains("not found"), "{}", nowhere.err);
    // The host key stays: the known host is asked for again, strictly.
    server.restart().await.unwrap();
    let strict = ["-o", "StrictHostKeyChecking=yes"];
    let again = eventually("the port", SHORT, async || {
        let done = run(ssh(&good, &user, &strict, "echo again")).await;
        (done.code == Some(0)).then(|| done.text()).ok_or(done.err)
    })
    .await;
    assert_eq!(again, "again");
    // Without its agent, and with a word about it.
    let mut agent = desk.command("ssh-agent");
    agent.arg("ssh").args(plain(port, &good, hosts)).args(["-A", &format!("{user}@127.0.0.1")]);
    let agent = run({
        agent.arg("echo ${SSH_AUTH_SOCK:-none}");
        agent
    })
    .await;
    assert_eq!(agent.good(), "none");
    assert!(agent.err.contains("agent forwarding is refused"), "{}", agent.err);
    run(desk.bivouac(&["ssh-key", "rm", "laptop"])).await.good();
    assert_eq!(run(ssh(&good, &user, &[], "true")).await.code, Some(255), "a removed key");
    drop((server, lock));
}

#[tokio::test]
async fn an_agent_is_let_in_where_the_operator_says_so() {
    let lock = shared().unwrap();
    let server = TestServer::builder().arg("--ssh-agent-forwarding").start().await.unwrap();
    let client = server.client("ssh-agent").unwrap();
    let box_ = TestSandbox::create(&client, json!({ "persistent": false })).await;
    let desk = Desk::new(&server, "ssh-agent");
    let key = keygen(&desk, "mine").await;
    desk.ssh(&[&box_.name, "true"]).await.good();
    let config = desk.config().await;
    let mut agent = desk.command("ssh-agent");
    let line = format!(
        "ssh-add -q {key} && ssh -F {config} {}.bivouac 'stat -c \"%U %a\" $SSH_AUTH_SOCK; echo no' && \
         ssh -A -F {config} {}.bivouac 'ssh-add -L; stat -c \"%U %a\" $SSH_AUTH_SOCK'",
        box_.name, box_.name
    );
    agent.args(["sh", "-c", &line]);
    let done = run(agent).await;
    let public = std::fs::read_to_string(format!("{key}.pub")).unwrap();
    assert_eq!(done.good(), format!("no\n{}\nvercel-sandbox 600", public.trim()), "{}", done.err);
    eventually("the socket to go", SHORT, async || {
        let ran = box_.sh("ls /tmp | grep -c bivouac-agent").await;
        if ran.out() == "0" { Ok(()) } else { Err(ran.out()) }
    })
    .await;
    drop((server, lock));
}

#[tokio::test]
async fn a_revoked_token_ends_what_it_opened() {
    let (server, box_) = sandbox("ssh-revoked").await;
    let admin = Desk::new(&server, "ssh-revoked");
    let line = ["token", "create", "guest-ssh", "--allow", "exec", "--json"];
    let made = run(admin.bivouac(&line)).await.good();
    let made: serde_json::Value = serde_json::from_str(&made).unwrap();
    let token = made["secret"].as_str().unwrap();
    let guest = Desk::with(&server, "ssh-revoked", token);
    assert_eq!(guest.ssh(&[&box_.name, "echo in"]).await.good(), "in");
    let mut open = start(guest.bivouac(&["ssh", &box_.name, "touch /tmp/open; sleep 600"]));
    eventually("the command", SHORT, async || {
        let ran = box_.sh("test -e /tmp/open && echo yes").await;
        (ran.out() == "yes").then_some(()).ok_or(ran.err())
    })
    .await;
    run(admin.bivouac(&["token", "revoke", "guest-ssh"])).await.good();
    let ended =
        tokio::time::timeout(SHORT, open.wait()).await.expect("the connection goes on").unwrap();
    assert_eq!(ended.code(), Some(255));
    assert_ne!(guest.ssh(&[&box_.name, "true"]).await.code, Some(0));
}

#[tokio::test]
async fn connections_leave_no_descriptor() {
    let lock = shared().unwrap();
    let port = free_port();
    let server =
        TestServer::builder().arg("--ssh").arg(format!("127.0.0.1:{port}")).start().await.unwrap();
    let client = server.client("ssh-leaks").unwrap();
    let box_ = TestSandbox::create(&client, json!({ "persistent": false })).await;
    let desk = Desk::new(&server, "ssh-leaks");
    desk.ssh(&[&box_.name, "true"]).await.good();
    let before = eventually("quiet", SHORT, async || {
        let first = descriptors(server.pid());
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        (descriptors(server.pid()) == first).then_some(first).ok_or("busy")
    })
    .await;
    for n in 0..200 {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let mut greeting = [0u8; 8];
        stream.read_exact(&mut greeting).await.unwrap();
        assert_eq!(&greeting, b"SSH-2.0-");
        // Some say nothing, some say nonsense, some say half.
        match n % 3 {
            0 => {}
            1 => stream.write_all(&[0xff; 400]).await.unwrap(),
            _ => stream.write_all(b"SSH-2.0-x\r\n\0\0\x7f\xff").await.unwrap(),
        }
    }
    for _ in 0..5 {
        desk.ssh(&[&box_.name, "echo; exit 0"]).await.good();
        let mut sftp =
            desk.open_ssh("sftp", &["-b", "/dev/null", &format!("{}.bivouac", box_.name)]).await;
        assert!(sftp.output().await.unwrap().status.success());
    }
    eventually("the descriptors to go", LONG, async || {
        let now = descriptors(server.pid());
        if now <= before + 2 { Ok(()) } else { Err((now, before)) }
    })
    .await;
    // And inside: no server of SFTP, no command.
    let left = box_.sh("ls /proc | grep -c '^[0-9]*$'").await.good();
    assert!(left.parse::<u32>().unwrap() < 12, "{left} processes");
    drop((server, lock));
}

#[tokio::test]
async fn the_user_s_own_configuration_is_written_and_taken_away() {
    let (server, box_) = sandbox("ssh-config").await;
    let desk = Desk::new(&server, "ssh-config");
    std::fs::create_dir(desk.path(".ssh")).unwrap();
    let own = "Host mine\n  User me\n";
    let config = desk.file(".ssh/config", own.as_bytes());
    for _ in 0..2 {
        run(desk.bivouac(&["ssh-config", "--write"])).await.good();
    }
    let text = std::fs::read_to_string(&config).unwrap();
    assert!(text.ends_with(own) && text.matches("Include").count() == 1, "{text}");
    let file = desk.path(".ssh/bivouac_config");
    let mut ssh = desk.command("ssh");
    ssh.args(["-F", file.to_str().unwrap(), &format!("{}.bivouac", box_.name), "echo by config"]);
    assert_eq!(run(ssh).await.good(), "by config", "the key is registered on the way");
    run(desk.bivouac(&["ssh-config", "--remove"])).await.good();
    assert_eq!(std::fs::read_to_string(&config).unwrap(), own);
    assert!(!file.exists());
    // Without an ssh program there is a sentence.
    let mut bare = desk.bivouac(&["ssh", &box_.name, "true"]);
    bare.env("PATH", "/nonexistent");
    let done = run(bare).await;
    assert!(done.code == Some(1) && done.err.contains("openssh-client"), "{}", done.err);
    let other = run(desk.bivouac(&["ssh-key", "add", "/etc/hostname"])).await;
    assert!(other.code != Some(0) && other.err.contains("publicKey"), "{}", other.err);
}
