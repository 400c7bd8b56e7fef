//! What things cost, printed; nothing is judged by it. `cargo test -p bivouac-egress --profile ci --lib
//! figures -- --ignored --nocapture`.

use std::time::Instant;

use http::{Request, Response};

use super::world::*;
use crate::trust::Authority;

const ROUNDS: u32 = 2000;

#[test]
#[ignore = "prints figures, judges nothing"]
fn figures() {
    run(|| async {
        let began = Instant::now();
        let authority = Authority::new(&session(1), Authority::UNKNOWN_LIFE).expect("an authority");
        println!("authority: {:?}", began.elapsed());
        let before = resident();
        let idle: Vec<_> = (0..2000)
            .map(|_| Authority::new(&session(1), Authority::UNKNOWN_LIFE).expect("an authority"))
            .collect();
        println!("an idle authority: {} bytes", (resident() - before) / 2000);
        let before = resident();
        for authority in &idle[..200] {
            authority.server_config_for(&name("first.test")).expect("a leaf");
        }
        println!("an authority's first leaf: {} bytes", (resident() - before) / 200);
        drop(idle);
        let began = Instant::now();
        authority.server_config_for(&name("first.test")).expect("a leaf");
        println!("first leaf: {:?}", began.elapsed());
        let began = Instant::now();
        for n in 0..100 {
            authority.server_config_for(&name(&format!("h{n}.test"))).expect("a leaf");
        }
        println!("leaf: {:?}", began.elapsed() / 100);

        let world = World::new(&inject("authorization", "Bearer canary-0123456789"));
        let tls = world.root.server("ok.test", &["http/1.1", "h2"], |_| ());
        let (address, _) = origin(Some(tls), |_| Response::new(text("fine"))).await;
        world.place("ok.test", 443, address);
        world.ask("ok.test", get("ok.test", "/").body("").expect("")).await;

        let began = Instant::now();
        for _ in 0..ROUNDS / 10 {
            drop(world.tls("ok.test", &["http/1.1"]).await);
        }
        println!("handshake, both sides, resumed: {:?}", began.elapsed() / (ROUNDS / 10));
        let began = Instant::now();
        for _ in 0..ROUNDS / 10 {
            let tcp = world.tcp(Some("ok.test"), 443).await;
            drop(world.handshake(tcp, "ok.test", world.client(&["http/1.1"])).await);
        }
        println!("handshake, both sides, full: {:?}", began.elapsed() / (ROUNDS / 10));

        let direct = tokio::net::TcpStream::connect(address).await.expect("the origin");
        let config = client_of(&world.root.pem, &["http/1.1"]);
        let stream = world.handshake(direct, "ok.test", config).await.expect("a handshake");
        let (sender, connection) =
            hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream))
                .await
                .expect("HTTP/1");
        tokio::task::spawn_local(connection);
        let mut direct = Asker::Http1(sender);
        let mut through = world.asker("ok.test").await;
        let request = || -> Request<&str> { get("ok.test", "/a/b?c=d").body("").expect("") };
        for round in 0..3 {
            let began = Instant::now();
            for _ in 0..ROUNDS {
                direct.send(request()).await;
            }
            let one = began.elapsed() / ROUNDS;
            let began = Instant::now();
            for _ in 0..ROUNDS {
                through.send(request()).await;
            }
            let two = began.elapsed() / ROUNDS;
            println!(
                "round {round}: direct {one:?}, through {two:?}, added {:?}",
                two.saturating_sub(one)
            );
        }
    });
}

/// Resident bytes of this process.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: usize = text.split(' ').nth(1).expect("pages").parse().expect("a number");
    pages * 4096
}

/// The certificate for other tools to look at: `openssl x509 -text`.
#[test]
#[ignore = "prints the authority's certificate"]
fn certificate() {
    let authority = Authority::new(&session(1), Authority::UNKNOWN_LIFE).expect("an authority");
    println!("{}", authority.pem());
}
