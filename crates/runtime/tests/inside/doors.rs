//! What goes in and out by TCP.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bivouac_runtime::{DialTo, ExecSpec, FileErrorKind, ListenAt};
use bivouac_types::id::CommandId;

use crate::{Session, kind, within};

crate::tests![
    own_ports_are_found_wherever_they_listen,
    nobody_listening_is_said,
    many_at_once_and_in_a_row,
    a_full_queue_is_no_hang,
    hosts_are_found_as_inside,
    listening_inside,
    a_socket_with_a_path,
    who_listens,
];

const SERVER: &str = r#"
use Socket qw(:all);
my ($family, $at, $port, $greeting) = @ARGV;
my $six = $family eq '6';
socket(my $s, $six ? AF_INET6 : AF_INET, SOCK_STREAM, 0) or die $!;
setsockopt($s, SOL_SOCKET, SO_REUSEADDR, 1);
setsockopt($s, IPPROTO_IPV6, IPV6_V6ONLY, 1) if $six;
bind($s, $six ? pack_sockaddr_in6($port, inet_pton(AF_INET6, $at)) : pack_sockaddr_in($port, inet_aton($at))) or die $!;
listen($s, 1024) or die $!;
$| = 1;
print "ready\n";
while (accept(my $c, $s)) { syswrite($c, "$greeting\n"); close($c); }
"#;

async fn server(session: &Session, family: &str, at: &str, port: u16) -> CommandId {
    let port = port.to_string();
    let argv = ["perl", "-e", SERVER, "--", family, at, &port, &format!("at {at}")];
    let spec = ExecSpec { timeout_ms: None, ..session.command(&argv) };
    session.handle.exec(&spec).await.unwrap();
    session.until(&spec.command, "ready").await;
    spec.command
}

fn stream(fd: OwnedFd) -> TcpStream {
    let stream = TcpStream::from(fd);
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

fn greeting(fd: OwnedFd) -> String {
    let mut text = String::new();
    stream(fd).read_to_string(&mut text).unwrap();
    text
}

async fn own_ports_are_found_wherever_they_listen(session: Arc<Session>) {
    let outer = session.root("hostname -I").await.split_whitespace().next().unwrap().to_owned();
    for (port, (family, at)) in
        (4000..).zip([("4", "127.0.0.1"), ("6", "::1"), ("4", outer.as_str()), ("4", "0.0.0.0")])
    {
        server(&session, family, at, port).await;
        let fd = session.handle.dial(&DialTo::Port(port)).await.unwrap();
        assert!(rustix::fs::fcntl_getfl(&fd).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
        assert_eq!(greeting(fd), format!("at {at}\n"));
    }
    for host in ["localhost", "LocalHost.", "127.0.0.1"] {
        let to = DialTo::Host { host: host.into(), port: 4000 };
        assert_eq!(greeting(session.handle.dial(&to).await.unwrap()), "at 127.0.0.1\n");
    }
}

async fn nobody_listening_is_said(session: Arc<Session>) {
    let refused = session.handle.dial(&DialTo::Port(4999)).await.unwrap_err();
    assert_eq!(kind(&refused), FileErrorKind::NotFound);
    assert_eq!(
        refused.to_string(),
        "nothing listens on port 4999 in the sandbox: start a server there"
    );
}

/// Descriptors of a process.
fn descriptors(pid: &str) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

async fn many_at_once_and_in_a_row(session: Arc<Session>) {
    server(&session, "4", "127.0.0.1", 4000).await;
    drop(session.handle.dial(&DialTo::Port(4000)).await.unwrap());
    let processes = ["bivouac-shim", "bivouac-init"].map(|name| session.own_process(name));
    let count =
        || [descriptors("self")].into_iter().chain(processes.iter().map(|pid| descriptors(pid)));
    let before: Vec<_> = count().collect();
    let start = Instant::now();
    let all = (0..200).map(|_| {
        let session = session.clone();
        tokio::spawn(async move { session.handle.dial(&DialTo::Port(4000)).await.unwrap() })
    });
    let mut open = Vec::new();
    for one in all.collect::<Vec<_>>() {
        open.push(one.await.unwrap());
    }
    println!("200 at once: {:?}", start.elapsed());
    for fd in open {
        assert_eq!(greeting(fd), "at 127.0.0.1\n");
    }
    let (start, mut dialling) = (Instant::now(), Duration::ZERO);
    for _ in 0..10_000 {
        let dial = Instant::now();
        let fd = session.handle.dial(&DialTo::Port(4000)).await.unwrap();
        dialling += dial.elapsed();
        // The guest closes first, so no port of its own is kept busy by the engine's end.
        assert_eq!(greeting(fd), "at 127.0.0.1\n");
    }
    let each = start.elapsed() / 10_000;
    println!("10,000 in a row: {:?} each, {each:?} with a line of the server's", dialling / 10_000);
    for _ in 0..300 {
        session.handle.dial(&DialTo::Port(4999)).await.unwrap_err();
    }
    within(async {
        // Fewer is no leak: what earlier tests had open goes when it goes.
        while count().zip(&before).any(|(now, before)| now > *before) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

async fn a_full_queue_is_no_hang(session: Arc<Session>) {
    let script = "use Socket; socket(my $s, AF_INET, SOCK_STREAM, 0); \
                  bind($s, pack_sockaddr_in(4001, inet_aton('127.0.0.1'))) or die; listen($s, 0); $| = 1; \
                  print \"ready\n\"; sleep 100";
    let spec = session.command(&["perl", "-e", script]);
    session.handle.exec(&spec).await.unwrap();
    session.until(&spec.command, "ready").await;
    let mut open = Vec::new();
    let refused = loop {
        match within(session.handle.dial(&DialTo::Port(4001))).await {
            Ok(fd) => open.push(fd),
            Err(e) => break e,
        }
        assert!(open.len() < 20);
    };
    assert_eq!(kind(&refused), FileErrorKind::Busy, "{refused}");
    // Others do not wait for that.
    assert_eq!(session.sh("echo alive").await.0, "alive\n");
}

async fn hosts_are_found_as_inside(session: Arc<Session>) {
    server(&session, "4", "0.0.0.0", 4000).await;
    session.root("echo 127.0.0.9 my.host >> /etc/hosts").await;
    let to = |host: &str, port| DialTo::Host { host: host.into(), port };
    let fd = session.handle.dial(&to("my.host", 4000)).await.unwrap();
    assert_eq!(stream_peer(&fd), "127.0.0.9:4000");
    assert_eq!(greeting(fd), "at 0.0.0.0\n");
    let refused = session.handle.dial(&to("my.host", 4999)).await.unwrap_err();
    assert_eq!(kind(&refused), FileErrorKind::NotFound, "{refused}");
    assert!(refused.to_string().contains("my.host:4999"), "{refused}");
    let refused = within(session.handle.dial(&to("no such host", 80))).await.unwrap_err();
    assert!(refused.to_string().contains("no such host"), "{refused}");
}

fn stream_peer(fd: &OwnedFd) -> String {
    TcpStream::from(fd.try_clone().unwrap()).peer_addr().unwrap().to_string()
}

async fn listening_inside(session: Arc<Session>) {
    for host in ["localhost", "", "127.0.0.1"] {
        let at = ListenAt::Tcp { host: host.into(), port: 0 };
        let made = session.handle.listen(&at).await.unwrap();
        assert!(made.port > 1023);
        let accept = std::net::TcpListener::from(made.socket);
        accept.set_nonblocking(false).unwrap();
        let echo = tokio::task::spawn_blocking(move || {
            let (mut stream, _) = accept.accept().unwrap();
            stream.write_all(b"from outside\n").unwrap();
        });
        let script = format!("exec 3<>/dev/tcp/127.0.0.1/{}; cat <&3", made.port);
        let spec = session.command(&["bash", "-c", &script]);
        session.handle.exec(&spec).await.unwrap();
        session.end(&spec.command).await;
        assert_eq!(session.text(&spec.command).await, "from outside\n");
        within(echo).await.unwrap();
    }
    server(&session, "4", "127.0.0.1", 4000).await;
    let listen = |host: &str, port| {
        let at = ListenAt::Tcp { host: host.into(), port };
        let session = session.clone();
        async move { session.handle.listen(&at).await.map(|made| made.port) }
    };
    assert_eq!(kind(&listen("localhost", 4000).await.unwrap_err()), FileErrorKind::Exists);
    assert_eq!(kind(&listen("203.0.113.9", 0).await.unwrap_err()), FileErrorKind::Invalid);
    assert_eq!(kind(&listen("example.com", 0).await.unwrap_err()), FileErrorKind::Invalid);
    assert_eq!(listen("", 80).await.unwrap(), 80);
    assert_eq!(listen("", 80).await.unwrap(), 80, "the first one is gone");
}

async fn a_socket_with_a_path(session: Arc<Session>) {
    let listen = |path: &str| {
        let at = ListenAt::Unix { path: path.into() };
        let session = session.clone();
        async move { session.handle.listen(&at).await }
    };
    let made = listen("/tmp/a.sock").await.unwrap();
    assert_eq!(session.sh("stat -c '%F %a %u' /tmp/a.sock").await.0, "socket 600 1000\n");
    let accept = UnixListener::from(made.socket);
    accept.set_nonblocking(false).unwrap();
    let script = "use Socket; socket(my $s, AF_UNIX, SOCK_STREAM, 0); connect($s, pack_sockaddr_un('/tmp/a.sock')) or die; print <$s>";
    let spec = session.command(&["perl", "-e", script]);
    session.handle.exec(&spec).await.unwrap();
    let (mut stream, _) =
        within(tokio::task::spawn_blocking(move || accept.accept())).await.unwrap().unwrap();
    stream.write_all(b"hello\n").unwrap();
    drop(stream);
    session.end(&spec.command).await;
    assert_eq!(session.text(&spec.command).await, "hello\n");
    session.sh("ln -s /tmp/elsewhere /tmp/link; mkdir -p /tmp/d; ln -s /tmp/d /tmp/dlink").await;
    assert_eq!(kind(&listen("/tmp/a.sock").await.unwrap_err()), FileErrorKind::Exists);
    assert_eq!(kind(&listen("/tmp/link").await.unwrap_err()), FileErrorKind::Exists);
    assert_eq!(session.sh("ls /tmp/elsewhere").await.1, 2, "nothing was made behind the link");
    assert_eq!(kind(&listen("/no/folder/x").await.unwrap_err()), FileErrorKind::NotFound);
    assert_eq!(kind(&listen("relative").await.unwrap_err()), FileErrorKind::Invalid);
    let long = format!("/tmp/{}", "x".repeat(200));
    assert_eq!(kind(&listen(&long).await.unwrap_err()), FileErrorKind::Invalid);
    assert!(listen("/etc/x.sock").await.is_err(), "the default user may not write there");
}

async fn who_listens(session: Arc<Session>) {
    assert_eq!(session.handle.listeners().await.unwrap(), []);
    server(&session, "4", "127.0.0.1", 4000).await;
    server(&session, "6", "::1", 4001).await;
    let mine =
        session.handle.listen(&ListenAt::Tcp { host: String::new(), port: 4002 }).await.unwrap();
    let all = session.handle.listeners().await.unwrap();
    let told: Vec<_> =
        all.iter().map(|l| (l.port, l.address.as_str(), l.program.as_deref())).collect();
    assert_eq!(told, [(4000, "127.0.0.1", Some("perl")), (4001, "::1", Some("perl"))]);
    assert!(all.iter().all(|listener| listener.pid.is_some_and(|pid| pid > 1)));
    drop(mine);
    // More than are told of.
    let script = "use Socket; $| = 1; for my $p (5000..5400) { socket(my $s, AF_INET, SOCK_STREAM, 0) or die $!; \
                  bind($s, pack_sockaddr_in($p, inet_aton('127.0.0.1'))) or die $!; listen($s, 1); push @all, $s } \
                  print \"ready\n\"; sleep 100";
    let spec = session.command(&["perl", "-e", script]);
    session.handle.exec(&spec).await.unwrap();
    session.until(&spec.command, "ready").await;
    let all = session.handle.listeners().await.unwrap();
    assert_eq!(all.len(), 256);
    assert_eq!((all[0].port, all[255].port), (4000, 5253));
}
