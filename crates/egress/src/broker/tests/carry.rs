//! How bytes are carried, how denials are told, and what floods do.

use super::*;

#[test]
fn a_server_may_speak_first_when_everything_may_pass() {
    run(async {
        let world = World::new(&allow_all()).await;
        let server = world.listen("203.0.113.10:22").await;
        for policy in [allow_all(), json!({ "allow": ["*"] })] {
            world.set(&policy).await;
            let mut guest = world.ask("203.0.113.10:22").await;
            let (mut at, _) = server.accept().await.unwrap();
            at.write_all(b"SSH-2.0-server\r\n").await.unwrap();
            let mut banner = [0; 16];
            guest.read_exact(&mut banner).await.unwrap();
            guest.write_all(b"SSH-2.0-client\r\n").await.unwrap();
            at.read_exact(&mut banner).await.unwrap();
            assert_eq!(&banner, b"SSH-2.0-client\r\n");
        }
    });
}

#[test]
fn a_name_under_a_catch_all_still_goes_to_its_own_resolution() {
    run(async {
        let world = World::new(&json!({ "allow": ["*"] })).await;
        let origin = world.listen("203.0.113.10:443").await;
        let line = world.passes("203.0.113.66:443", &hello("ok.test", true), &origin).await;
        assert_eq!(line.dialled.as_deref(), Some("203.0.113.10:443"));
        assert_eq!(world.dialled(), ["203.0.113.10:443"], "the guest's address is not touched");
    });
}

#[test]
fn case_51_plain_http_is_refused_with_a_lesson() {
    run(async {
        let world = World::new(&json!({ "allow": ["ok.test"] })).await;
        let post = b"POST /x HTTP/1.1\r\nHost: evil.test\r\nContent-Length: 5\r\n\r\nhello";
        let got = world.refuses("203.0.113.66:80", post, Reason::PlainHttp).await;
        let text = String::from_utf8(got).unwrap();
        assert!(text.starts_with("HTTP/1.1 403 "), "{text}");
        assert!(text.contains("x-bivouac-deny: plain_http\r\n"));
        assert!(text.contains("bivouac policy allow box evil.test"), "{text}");
        assert_eq!(world.lines()[0].host.as_deref(), Some("evil.test"));
        let got = world
            .refuses(
                "169.254.169.254:80",
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                Reason::AddressForbidden,
            )
            .await;
        assert!(String::from_utf8(got).unwrap().contains("address_forbidden"));
        // Not HTTP, whatever it looks like at first.
        let got =
            world.refuses("203.0.113.66:80", b"PRI * HTTP/2.0\r\n\r\n", Reason::PlainHttp).await;
        assert!(got.is_empty());
    });
}

#[test]
fn many_bytes_and_half_closed_ends_arrive_whole() {
    run(async {
        let world = World::new(&allow_all()).await;
        let origin = world.listen("203.0.113.10:9").await;
        let sent: Vec<u8> = (0..9_000_000_u32).map(|n| ((n * 31) >> 3) as u8).collect();
        let guest = world.ask("203.0.113.10:9").await;
        let (mut read, mut write) = guest.into_split();
        let (origin, _) = origin.accept().await.unwrap();
        let (mut up, mut down) = origin.into_split();
        let (a, b) = (sent.clone(), sent.clone());
        let upload = spawn_local(async move {
            write.write_all(&a).await.unwrap();
            write.shutdown().await.unwrap();
        });
        let echo = spawn_local(async move {
            let mut got = Vec::new();
            up.read_to_end(&mut got).await.unwrap();
            // Only now, over the half that is still open.
            down.write_all(&b).await.unwrap();
            got
        });
        let mut back = Vec::new();
        read.read_to_end(&mut back).await.unwrap();
        upload.await.unwrap();
        assert!(echo.await.unwrap() == sent && back == sent);
        let end = world.line(1).await;
        assert_eq!((end.bytes_up, end.bytes_down), (Some(9_000_000), Some(9_000_000)));
        until(|| world.broker.flows.is_empty().then_some(())).await;
    });
}

#[test]
fn a_slow_reader_slows_its_sender_and_costs_little() {
    run(async {
        let mut tuning = patient();
        tuning.patience.stuck = Duration::from_millis(400);
        let world = World::with(&allow_all(), tuning).await;
        let server = world.listen("203.0.113.10:9").await;
        let guest = world.ask("203.0.113.10:9").await;
        let (at, _) = server.accept().await.unwrap();
        // Nobody reads `at`: the writer is stopped long before it is through, then given up.
        let (mut read, mut write) = guest.into_split();
        let piece = vec![0; 1 << 20];
        let mut took = 0;
        while write.write_all(&piece).await.is_ok() {
            took += 1;
            assert!(took < 100, "nothing held the sender back");
        }
        let line = until(|| world.lines().into_iter().find(|l| l.kind == Kind::End)).await;
        assert_eq!(line.reason, Reason::UpstreamUnreachable);
        assert!(read.read_u8().await.is_err());
        drop(at);
    });
}

#[test]
fn case_94_a_flood_is_bounded_and_the_rest_goes_on() {
    run(async {
        let world = World::with(&allow_all(), Tuning { most: 50, ..patient() }).await;
        let server = world.listen("203.0.113.10:9").await;
        let mut kept = Vec::new();
        for _ in 0..50 {
            kept.push((world.ask("203.0.113.10:9").await, server.accept().await.unwrap().0));
        }
        for _ in 0..20 {
            let mut more = world.ask("203.0.113.10:9").await;
            assert_reset(&mut more).await;
        }
        let refused = world.lines().iter().filter(|l| l.reason == Reason::Limit).count();
        assert_eq!(refused, 20);
        let (guest, at) = &mut kept[7];
        guest.write_all(b"x").await.unwrap();
        assert_eq!(at.read_u8().await.unwrap(), b'x');
        kept.clear();
        until(|| world.broker.flows.is_empty().then_some(())).await;
        let _more = world.ask("203.0.113.10:9").await;
        server.accept().await.unwrap();
    });
}

#[test]
fn a_panic_ends_one_connection_alone() {
    run(async {
        let world = World::new(&allow_all()).await;
        let server = world.listen("203.0.113.10:9").await;
        world.lines.1.set(true);
        let mut guest = world.ask("203.0.113.10:9").await;
        assert_eq!(drain(&mut guest).await, b"");
        until(|| world.broker.flows.is_empty().then_some(())).await;
        server.accept().await.unwrap();
        let mut guest = world.ask("203.0.113.10:9").await;
        let (mut at, _) = server.accept().await.unwrap();
        guest.write_all(b"x").await.unwrap();
        assert_eq!(at.read_u8().await.unwrap(), b'x');
    });
}

#[test]
fn case_67_dns_over_tcp_is_answered_by_the_stub() {
    run(async {
        let world = World::new(&json!({ "allow": ["ok.test"] })).await;
        // A query for A of ok.test.
        let query = [
            0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2, b'o', b'k', 4, b't', b'e', b's', b't', 0, 0, 1,
            0, 1,
        ];
        let mut guest = world.ask("9.9.9.9:53").await;
        guest.write_u16(query.len() as u16).await.unwrap();
        guest.write_all(&query).await.unwrap();
        let mut answer = vec![0; guest.read_u16().await.unwrap().into()];
        guest.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer[..2], [0, 7]);
        assert!(answer.windows(4).any(|w| w == [203, 0, 113, 10]), "{answer:?}");
        drop(guest);
        until(|| world.broker.flows.is_empty().then_some(())).await;
        assert!(world.dialled().is_empty());
        assert!(world.lines().is_empty(), "queries have lines of their own");
    });
}

#[test]
fn the_accept_loop_takes_what_the_gate_brings() {
    run(async {
        let world = World::new(&json!({ "allow": ["ok.test"] })).await;
        // What the gate's listener of this test can be asked for is loopback, which is forbidden; that
        // line shows that the connection was taken and what it asked for.
        let gate = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        let port = gate.local_addr().unwrap().port();
        gate.set_nonblocking(true).unwrap();
        let loops = accept::accept(
            Rc::clone(&world.broker.works),
            world.broker.flows.clone(),
            TcpListener::from_std(gate).unwrap(),
        );
        let task = spawn_local(loops);
        let mut guest = TcpStream::connect(("127.44.55.66", port)).await.unwrap();
        assert_reset(&mut guest).await;
        let line = world.line(0).await;
        assert_eq!(line.asked, Some(format!("127.44.55.66:{port}")));
        assert_eq!(line.reason, Reason::AddressForbidden);
        task.abort();
    });
}

#[test]
fn counters_are_told_and_add_up() {
    run(async {
        let world = World::new(&json!({ "allow": ["ok.test"] })).await;
        for _ in 0..3 {
            world.refuses("203.0.113.66:443", b"SSH-2.0-x\r\n", Reason::NotTls).await;
        }
        let origin = world.listen("203.0.113.10:443").await;
        let hello = hello("ok.test", true);
        world.passes("203.0.113.66:443", &hello, &origin).await;
        let sum = |name: &str, value: &str| -> u64 {
            let said = world.said.borrow();
            said.iter()
                .filter_map(|m| match m {
                    FromBroker::Counted { counts } => Some(counts),
                    _ => None,
                })
                .flatten()
                .filter(|c| c.name == name && c.labels.iter().any(|(_, v)| v == value))
                .map(|c| c.added)
                .sum()
        };
        until(|| (sum("bytes", "down") == 4).then_some(())).await;
        assert_eq!(sum("bytes", "up"), hello.len() as u64);
        assert_eq!(sum("decisions", "not_tls"), 3);
        assert_eq!(sum("decisions", "domain_listed"), 1);
    });
}

#[test]
fn an_idle_flow_costs_little() {
    run(async {
        let world = World::new(&allow_all()).await;
        let flow = world.broker.flows.register("203.0.113.10:9".parse().unwrap()).unwrap();
        let stream = TcpStream::connect(world.door.local_addr().unwrap()).await.unwrap();
        let life = std::mem::size_of_val(&world.broker.works.serve(stream, flow));
        // The specification's bound for an idle flow is 24 KiB, all in.
        assert!(life <= 6 * 1024, "{life} bytes");
        figure(&format!("the life of a flow: {life} bytes"));
    });
}

/// Sends `total` bytes through a pair of sockets, from a thread to a thread.
fn pump(to: std::net::TcpStream, from: std::net::TcpStream, total: usize) -> Pumping {
    use std::io::{Read, Write};
    to.set_nonblocking(false).unwrap();
    from.set_nonblocking(false).unwrap();
    let write = std::thread::spawn(move || {
        let piece = vec![7; 1 << 18];
        for _ in 0..total / piece.len() {
            (&to).write_all(&piece).unwrap();
        }
        to
    });
    let read = std::thread::spawn(move || {
        let mut piece = vec![0; 1 << 18];
        let mut got = 0;
        while got < total {
            got += (&from).read(&mut piece).unwrap();
        }
        from
    });
    (write, read)
}

type Pumping =
    (std::thread::JoinHandle<std::net::TcpStream>, std::thread::JoinHandle<std::net::TcpStream>);

#[test]
fn relayed_bytes_beside_direct_ones() {
    run(async {
        let asked_for = std::env::var_os("BIVOUAC_FIGURES").is_some();
        let total: usize = if asked_for { 1 << 30 } else { 1 << 22 };
        let world = World::new(&allow_all()).await;
        let server = world.listen("203.0.113.10:9").await;
        let guest = world.ask("203.0.113.10:9").await;
        let (at, _) = server.accept().await.unwrap();
        let (near, far) =
            tokio::join!(TcpStream::connect(world.door.local_addr().unwrap()), world.door.accept());
        let std_of = |stream: TcpStream| stream.into_std().unwrap();
        let mut gbit = Vec::new();
        for (to, from) in [(near.unwrap(), far.unwrap().0), (guest, at)] {
            let began = std::time::Instant::now();
            let (write, read) = pump(std_of(to), std_of(from), total);
            until(|| (write.is_finished() && read.is_finished()).then_some(())).await;
            gbit.push(total as f64 * 8e-9 / began.elapsed().as_secs_f64());
            read.join().unwrap();
        }
        figure(&format!("direct {:.1} Gbit/s, relayed {:.1} Gbit/s", gbit[0], gbit[1]));
        let end = world.line(1).await;
        assert_eq!(end.bytes_up, Some(total as u64));
    });
}

#[test]
fn plain_http_by_host_goes_to_the_host_s_own_address() {
    run(async {
        let world = World::new(&json!({ "allow": ["ok.test"], "plainHttp": true })).await;
        let origin = world.listen("203.0.113.10:80").await;
        let mut guest = world.ask("203.0.113.66:80").await;
        guest.write_all(b"GET /a HTTP/1.1\r\nHost: ok.test\r\n\r\n").await.unwrap();
        let (mut at, _) = origin.accept().await.unwrap();
        let mut head = [0; 14];
        at.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"GET /a HTTP/1.");
        at.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi").await.unwrap();
        let mut got = [0; 15];
        guest.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"HTTP/1.1 200 OK");
        let mut evil = world.ask("203.0.113.66:80").await;
        evil.write_all(b"GET / HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        let text = String::from_utf8(drain(&mut evil).await).unwrap();
        assert!(text.starts_with("HTTP/1.1 403 ") && text.contains("domain_not_listed"), "{text}");
        assert_eq!(world.dialled(), ["203.0.113.10:80"]);
    });
}

/// Pages of memory that this process has in use.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn case_94_thousands_of_idle_flows_live_beside_one_that_works() {
    run(async {
        let many = if std::env::var_os("BIVOUAC_FIGURES").is_some() { 4000 } else { 400 };
        let world = World::new(&json!({ "allow": ["ok.test"] })).await;
        let origin = world.listen("203.0.113.10:443").await;
        let bytes = hello("ok.test", true);
        let mut kept = Vec::with_capacity(many);
        let mut before = 0;
        for n in 0..many {
            // The first ones warm caches and buffers up.
            if n == 100 {
                before = resident();
            }
            let mut guest = world.ask("203.0.113.66:443").await;
            guest.write_all(&bytes).await.unwrap();
            kept.push((guest, origin.accept().await.unwrap().0));
        }
        until(|| (world.lines().len() == many).then_some(())).await;
        let grown = (resident() - before) * 4096 / (many as u64 - 100);
        // Both ends of the guest's and of the origin's connection are in this process, too.
        figure(&format!("{many} idle flows: {grown} bytes each, and the test's own part of them"));
        let (guest, at) = &mut kept[many / 2];
        guest.write_all(b"x").await.unwrap();
        let mut got = vec![0; bytes.len() + 1];
        at.read_exact(&mut got).await.unwrap();
        assert_eq!(got.last(), Some(&b'x'));
        assert_eq!(world.broker.flows.len(), many);
    });
}

#[test]
fn plain_http_under_a_catch_all_tells_its_host_where_a_policy_could_name_it() {
    run(async {
        let world = World::new(&json!({ "allow": ["*"] })).await;
        for (port, head, host) in [
            (80, "GET / HTTP/1.1\r\nHost: Plain.Test:80\r\n\r\n", Some("plain.test")),
            (80, "GET / HTTP/1.1\r\nHost: 203.0.113.10\r\n\r\n", None),
            (8080, "GET / HTTP/1.1\r\nHost: plain.test\r\n\r\n", None),
            (80, "SSH-2.0-x\r\n", None),
        ] {
            let asked = format!("203.0.113.10:{port}");
            let listener = world.listen(&asked).await;
            let line = world.passes(&asked, head.as_bytes(), &listener).await;
            assert_eq!(line.host.as_deref(), host, "{head}");
            assert_eq!(line.host_from.as_deref(), host.map(|_| "host"));
            let protocol = if head.starts_with("GET") { "http" } else { "raw" };
            assert_eq!(line.protocol.as_deref(), Some(protocol), "{head}");
        }
    });
}
