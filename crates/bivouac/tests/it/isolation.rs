//! What a sandbox can see: not the host, not another sandbox, no network that is closed.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use bivouac_testkit::{SHORT, TestSandbox, eventually};
use serde_json::json;

use crate::{sandbox, server};

/// Files on the host, one in each place whose content must not be seen inside.
struct Markers {
    paths: Vec<PathBuf>,
}

impl Markers {
    fn plant() -> Self {
        let name = format!("bivouac-marker-{}", std::process::id());
        let folders = [
            "/root", "/home", "/var/lib", "/var/log", "/var/tmp", "/opt", "/etc", "/tmp", "/srv",
            "/mnt", "/run",
        ];
        let paths: Vec<PathBuf> = folders.iter().map(|f| PathBuf::from(f).join(&name)).collect();
        for path in &paths {
            fs::write(path, "host").unwrap();
        }
        Self { paths }
    }
}

impl Drop for Markers {
    fn drop(&mut self) {
        for path in &self.paths {
            let _ = fs::remove_file(path);
        }
    }
}

/// Runs perl as the default user and as root of the sandbox; both answers must be equal.
pub(crate) async fn perl(sandbox: &TestSandbox, script: &str) -> String {
    let user = sandbox.run(&["perl", "-e", script]).await.good();
    let root = sandbox.run_with(&["perl", "-e", script], json!({ "sudo": true })).await.good();
    assert_eq!(user, root, "user and root differ for {script}");
    user
}

#[tokio::test]
async fn nothing_of_the_host_is_in_the_tree() {
    let markers = Markers::plant();
    let (_server, sandbox) = sandbox("tree").await;
    let name = markers.paths[0].file_name().unwrap().to_str().unwrap().to_owned();
    assert!(markers.paths.iter().all(|p| p.is_file()), "positive control");
    let found =
        sandbox.sudo(&format!("find / -xdev -name '{name}' 2>/dev/null; true")).await.good();
    assert_eq!(found, "", "host files are visible");
    for path in &markers.paths {
        let seen =
            sandbox.sudo(&format!("test -e {} && echo seen; true", path.display())).await.good();
        assert_eq!(seen, "", "{}", path.display());
    }
    for folder in ["/home", "/root", "/opt", "/srv", "/mnt", "/media"] {
        let host: Vec<String> = fs::read_dir(folder)
            .map(|d| d.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect())
            .unwrap_or_default();
        let inside = sandbox.sudo(&format!("ls -A {folder} 2>/dev/null; true")).await.good();
        let dots = [".bashrc", ".profile", ".bash_logout"];
        let both: Vec<&str> =
            inside.lines().filter(|l| !dots.contains(l) && host.iter().any(|h| h == l)).collect();
        assert!(both.is_empty(), "{folder} shows the host's {both:?}");
    }
    // Secrets in /etc: the shadow file is the sandbox's own, and no key of the host is there.
    let shadow = fs::read_to_string("/etc/shadow").unwrap();
    let inside = sandbox.sudo("cat /etc/shadow; true").await.good();
    for line in shadow.lines().filter(|l| l.contains(":$")) {
        let hash = line.split(':').nth(1).unwrap();
        assert!(!inside.contains(hash), "a password hash of the host is inside");
    }
    let keys =
        sandbox.sudo("ls /etc/ssh/ssh_host_* /etc/ssl/private/* 2>/dev/null; true").await.good();
    assert_eq!(keys, "");
}

#[tokio::test]
async fn no_host_path_and_no_token_in_proc() {
    let (server, sandbox) = sandbox("proc").await;
    let data = server.data.to_str().unwrap().to_owned();
    let script = "cat /proc/[0-9]*/mountinfo /proc/[0-9]*/mounts /proc/[0-9]*/cgroup \
                  /proc/[0-9]*/cmdline /proc/[0-9]*/environ /proc/cmdline /proc/mounts 2>/dev/null | tr '\\0' '\\n'";
    let text = sandbox.sudo(script).await.out();
    assert!(text.contains(" / / "), "positive control: mountinfo has a root\n{text}");
    for secret in
        [data.as_str(), "bivouac-test", server.token.as_str(), "pool.btrfs", "/var/lib/bivouac"]
    {
        assert!(!text.contains(secret), "{secret} is visible in /proc:\n{text}");
    }
    let links =
        "for p in /proc/[0-9]*; do readlink $p/exe $p/cwd $p/root $p/fd/* 2>/dev/null; done; true";
    let links = sandbox.sudo(links).await.good();
    assert!(!links.contains(&data), "{links}");
    let env = sandbox.run(&["env"]).await.good();
    assert!(!env.contains(&server.token) && !env.contains("BIVOUAC_"), "{env}");
}

#[tokio::test]
async fn only_its_own_processes() {
    let (_server, sandbox) = sandbox("pids").await;
    let id = sandbox.start(&["sleep", "86030"], json!({})).await;
    let list = "for p in /proc/[0-9]*; do echo ${p#/proc/} $(tr '\\0' ' ' < $p/cmdline); done";
    let seen = sandbox.sudo(list).await.out();
    assert!(seen.contains("sleep 86030"), "positive control: {seen}");
    assert!(seen.lines().count() < 10, "too many processes:\n{seen}");
    assert!(seen.lines().any(|l| l.starts_with("1 ")), "no PID 1:\n{seen}");
    assert!(!seen.contains("serve"), "the engine is visible:\n{seen}");
    // Killing everything hits the sandbox's own processes, and init stays.
    let _ = sandbox.sudo("kill -9 -1; true").await;
    assert_eq!(sandbox.wait(&id).await["exitCode"], 137);
    let _ = sandbox.sudo("kill -9 1; kill -TERM 1; true").await;
    assert_eq!(sandbox.run(&["echo", "alive"]).await.good(), "alive");
}

#[tokio::test]
async fn root_inside_is_nobody_outside() {
    let (_server, sandbox) = sandbox("ids").await;
    for file in ["uid_map", "gid_map"] {
        let map = sandbox.sudo(&format!("cat /proc/self/{file}")).await.good();
        let fields: Vec<u64> = map.split_whitespace().map(|f| f.parse().unwrap()).collect();
        assert_eq!(fields.len(), 3, "one extent: {map}");
        assert_eq!((fields[0], fields[2]), (0, 65_536), "{map}");
        assert!(fields[1] >= 1 << 30, "{map}");
    }
    // A second sandbox has other ids.
    let other = TestSandbox::create(&sandbox.client, json!({ "persistent": false })).await;
    let (a, b) =
        (sandbox.sudo("cat /proc/self/uid_map").await, other.sudo("cat /proc/self/uid_map").await);
    assert_ne!(a.good(), b.good());
    // Seen from the host: the process belongs to an id of that range.
    let id = sandbox.sudo("sleep 86031 & echo started").await;
    assert_eq!(id.good(), "started");
    let outside = eventually("the process to be seen from the host", SHORT, async || {
        host_uid_of(b"sleep\086031\0").ok_or("positive control")
    })
    .await;
    assert!(outside >= 1 << 30, "root inside is {outside} outside");
    let setgroups = sandbox.run(&["cat", "/proc/self/status"]).await.good();
    assert!(setgroups.contains("NoNewPrivs:\t0"), "sudo needs it: {setgroups}");
}

fn host_uid_of(wanted: &[u8]) -> Option<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.into_iter().find_map(|entry| {
        let cmdline = fs::read(entry.path().join("cmdline")).ok()?;
        if cmdline != wanted {
            return None;
        }
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let line = status.lines().find_map(|l| l.strip_prefix("Uid:"))?;
        line.split_whitespace().next()?.parse().ok()
    })
}

#[tokio::test]
async fn a_closed_network_refuses_at_once() {
    let (server, sandbox) = sandbox("network").await;
    let _ = sandbox.post("/network-policy", &json!({ "mode": "deny-all" })).await.ok();
    let port = server.url.rsplit(':').next().unwrap().to_owned();
    let gateway =
        sandbox.sh("awk '$2 == \"00000000\" { print $3; exit }' /proc/net/route").await.good();
    assert_eq!(gateway.len(), 8, "there is a default route: {gateway}");
    let octets: Vec<String> = (0..4)
        .rev()
        .map(|i| u8::from_str_radix(&gateway[2 * i..2 * i + 2], 16).unwrap().to_string())
        .collect();
    let gateway = octets.join(".");
    assert_eq!(sandbox.run(&["cat", "/sys/class/net/eth0/carrier"]).await.good(), "1");
    let targets = [
        ("1.1.1.1", "443"),
        ("10.0.0.1", "80"),
        ("169.254.169.254", "80"),
        ("127.0.0.1", port.as_str()),
        (gateway.as_str(), port.as_str()),
        (gateway.as_str(), "22"),
        ("::1", port.as_str()),
        ("2606:4700:4700::1111", "443"),
    ];
    let start = Instant::now();
    for (host, port) in targets {
        let ran = sandbox.run(&["bash", "-c", "exec 3<>/dev/tcp/$1/$2", "bash", host, port]).await;
        assert_ne!(ran.exit, Some(0), "a connection to {host}:{port} was made");
    }
    // UDP: no answer, and no silence either.
    let udp = r#"use Socket; socket(my $s, PF_INET, SOCK_DGRAM, 0) or die; my $a = sockaddr_in(53, inet_aton("8.8.8.8"));
        my $said = connect($s, $a) && send($s, "x" x 30, 0); my $r = ""; vec($r, fileno $s, 1) = 1;
        my $n = select(my $out = $r, undef, undef, 5); my $got = $n ? recv($s, my $b, 100, 0) : undef;
        print !$said ? "refused" : $n == 0 ? "silence" : defined $got ? "answer" : "refused""#;
    assert_eq!(sandbox.run(&["perl", "-e", udp]).await.good(), "refused");
    for name in ["example.com", "vercel.com", "localhost.example"] {
        let ran = sandbox.run(&["getent", "hosts", name]).await;
        assert_ne!(ran.exit, Some(0), "{name} was resolved: {}", ran.out());
    }
    let ping = "command -v ping >/dev/null || exit 1; ping -c 1 -W 5 1.1.1.1";
    assert_ne!(sandbox.sh(ping).await.exit, Some(0));
    assert!(start.elapsed() < Duration::from_secs(20), "refusals took {:?}", start.elapsed());
    // Its own loopback works, by number and by name.
    let own = "perl -MIO::Socket::INET -e 'my $l = IO::Socket::INET->new(Listen => 1, LocalAddr => \"127.0.0.1\") or die; \
               my $c = IO::Socket::INET->new(PeerAddr => \"localhost\", PeerPort => $l->sockport) or die \"$!\"; print \"ok\"'";
    assert_eq!(sandbox.sh(own).await.good(), "ok");
    // Nothing that root does to its own namespace helps.
    let root = "ip route replace default dev lo 2>/dev/null; ip link set eth0 down 2>/dev/null; \
                ip link set eth0 up 2>/dev/null; timeout 5 bash -c 'exec 3<>/dev/tcp/1.1.1.1/443'";
    assert_ne!(sandbox.sudo(root).await.exit, Some(0));
}

#[tokio::test]
async fn two_sandboxes_do_not_see_each_other() {
    let (server, first) = sandbox("first").await;
    let second = TestSandbox::create(&server.team("second"), json!({ "persistent": false })).await;
    let address = async |s: &TestSandbox| s.sh("hostname -I | cut -d' ' -f1").await.good();
    assert_eq!(address(&first).await, address(&second).await, "the same private address in all");
    let listen = r#"use IO::Socket::INET; $| = 1; my $l = IO::Socket::INET->new(Listen => 5, LocalAddr => "0.0.0.0",
        LocalPort => 5000, ReuseAddr => 1) or die; print "listening\n"; while (my $c = $l->accept) { print $c "hello from the first\n"; close $c }"#;
    let id = first.start(&["perl", "-e", listen], json!({})).await;
    let mut lines = first.logs(&id).await;
    let line = lines.next(SHORT).await.unwrap().unwrap();
    assert_eq!(line["stream"], "stdout", "{line}");
    let connect = "exec 3<>/dev/tcp/$(hostname -I | cut -d' ' -f1)/5000 && head -n 1 <&3";
    let own = first.run(&["bash", "-c", connect]).await;
    assert_eq!(own.good(), "hello from the first", "positive control");
    assert_ne!(
        second.run(&["bash", "-c", connect]).await.exit,
        Some(0),
        "it reaches the other one"
    );
    // Files, processes, shared memory, abstract sockets.
    let _ = first
        .sh("echo mine > /tmp/first; echo mine > /dev/shm/first; sleep 86032 & echo")
        .await
        .good();
    let abs = r#"use Socket; socket(my $s, PF_UNIX, SOCK_STREAM, 0); bind($s, pack_sockaddr_un("\0bivouac-abstract")) or die; listen($s, 1); print "ok""#;
    let _ = first.start(&["perl", "-e", &format!("$| = 1; {abs}; sleep 86033")], json!({})).await;
    let look = "ls /tmp /dev/shm; cat /proc/[0-9]*/cmdline /proc/net/unix /proc/sysvipc/shm 2>/dev/null | tr '\\0' ' '";
    let seen = second.sudo(look).await.out();
    for trace in ["first", "86032", "86033", "bivouac-abstract"] {
        assert!(!seen.contains(trace), "{trace} of the other sandbox is visible:\n{seen}");
    }
}

#[tokio::test]
async fn names_and_machine_ids_belong_to_the_session() {
    let server = server().await;
    let client = server.team("etc");
    let name = format!("My_Box-{}", "x".repeat(70));
    let mut sandbox = TestSandbox::create(&client, json!({ "name": name })).await;
    let expected: String = format!("my-box-{}", "x".repeat(70))[..63].to_owned();
    assert_eq!(sandbox.run(&["hostname"]).await.good(), expected);
    assert_eq!(sandbox.run(&["cat", "/proc/sys/kernel/hostname"]).await.good(), expected);
    let hosts = sandbox.run(&["cat", "/etc/hosts"]).await.good();
    assert!(hosts.contains(&expected) && hosts.contains("localhost"), "{hosts}");
    assert_eq!(sandbox.run(&["getent", "hosts", "localhost"]).await.exit, Some(0));
    assert!(sandbox.run(&["cat", "/etc/resolv.conf"]).await.good().contains("nameserver"));
    let machine = sandbox.run(&["cat", "/etc/machine-id"]).await.good();
    assert!(machine.len() == 32 && machine.bytes().all(|b| b.is_ascii_hexdigit()), "{machine}");
    let host = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    assert_ne!(machine, host.trim(), "the host's machine id is inside");
    // What is written there by the sandbox ends with the session; the rest of /etc is kept.
    let write = "for f in hosts resolv.conf machine-id; do echo planted >> /etc/$f; done; echo kept > /etc/own";
    let _ = sandbox.sudo(write).await;
    let stopped = sandbox.stop().await.ok();
    let snapshot = stopped["snapshot"]["id"].as_str().unwrap().to_owned();
    assert!(sandbox.resume().await);
    assert_eq!(sandbox.run(&["cat", "/etc/own"]).await.good(), "kept");
    for file in ["hosts", "resolv.conf", "machine-id"] {
        let text = sandbox.run(&["cat", &format!("/etc/{file}")]).await.good();
        assert!(!text.contains("planted"), "{file} came out of the snapshot: {text}");
    }
    assert_ne!(sandbox.run(&["cat", "/etc/machine-id"]).await.good(), machine);
    let source =
        json!({ "name": "clone", "source": { "type": "snapshot", "snapshotId": snapshot } });
    let clone = TestSandbox::create(&client, source).await;
    assert_eq!(clone.run(&["hostname"]).await.good(), "clone");
    assert!(clone.run(&["cat", "/etc/hosts"]).await.good().contains("clone"));
    assert_ne!(clone.run(&["cat", "/etc/machine-id"]).await.good(), machine);
    let _ = clone.delete().await.ok();
    let _ = sandbox.delete().await.ok();
}

#[tokio::test]
async fn the_userland_is_what_clients_expect() {
    let (_server, sandbox) = sandbox("userland").await;
    for tool in [
        "bash", "sh", "git", "curl", "tar", "gzip", "find", "stat", "mktemp", "realpath",
        "truncate", "base64", "sudo", "useradd", "usermod", "groupadd", "gpasswd", "perl", "sed",
        "awk",
    ] {
        let ran = sandbox.run(&["bash", "-c", "command -v \"$1\"", "bash", tool]).await;
        assert_eq!(ran.exit, Some(0), "{tool} is missing");
    }
    let script = "echo x > /dev/null && test -c /dev/zero && test -c /dev/urandom && test -c /dev/tty; \
                  test -d /dev/pts && test -d /dev/shm && test -w /tmp && echo > /dev/stdout && test -e /dev/fd/0 && echo fine";
    assert_eq!(sandbox.sh(script).await.good().trim(), "fine");
    assert_eq!(sandbox.run(&["stat", "-c", "%a", "/tmp"]).await.good(), "1777");
    let user =
        "sudo useradd -m -s /bin/bash alice && sudo -u alice -- bash -c 'cd; touch mine; id -un'";
    assert_eq!(sandbox.sh(user).await.good(), "alice");
    assert_eq!(
        sandbox.sh("git init -q repo && cd repo && git status --short && echo git").await.good(),
        "git"
    );
    assert_eq!(sandbox.sh("locale -a | grep -qi 'c.utf' && echo utf").await.good(), "utf");
    // /usr can be written: it is the sandbox's own copy.
    let _ = sandbox.sudo("echo own > /usr/bin/own-tool && rm /usr/bin/perl").await.good();
    assert!(
        PathBuf::from("/usr/bin/perl").exists() && !PathBuf::from("/usr/bin/own-tool").exists()
    );
}
