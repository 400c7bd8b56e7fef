//! `bivouac forward`: ports of a sandbox on this machine's loopback.
//!
//! Invariants: it listens on loopback only; each connection has a tunnel of its own, and ends with it; a restart of
//! the engine costs the connections that were open and no others. How many are open at once is bounded.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::args::{Forward, Forwarded, Global};
use super::client::{CallError, Client};
use super::failure::{ExitStatus, Explain as _, Outcome};
use super::signals::Signals;
use super::{output, tunnel};

/// How long an engine that is being started again is waited for, for one connection.
const RESTART: Duration = Duration::from_secs(20);
/// How often it is looked for.
const STEP: Duration = Duration::from_millis(200);
/// Most connections at once.
const MOST: usize = 1000;
/// Pause after an accept that failed for want of something.
const PAUSE: Duration = Duration::from_millis(100);

/// Forwards until it is asked to end.
pub(crate) async fn run(global: &Global, args: Forward) -> Outcome {
    let client = Client::find(global)?;
    let mut signals = Signals::new()?;
    // A name that is wrong is told now and not at the first connection.
    let path = format!("/bivouac/v1/sandboxes/{}/ports", args.name);
    match client.get(&path, &client.scope()).await {
        // A token may have the right to connect and none to look.
        Err(error) if error.is(reqwest::StatusCode::FORBIDDEN) => {}
        found => drop(found?),
    }
    let mut accepting = JoinSet::new();
    let room = Arc::new(Semaphore::new(MOST));
    let mut told = Vec::new();
    for pair in &args.ports {
        let (four, six) = listen(*pair).await?;
        let local = four.local_addr().explain(|| "no address".to_owned())?;
        told.push((local, pair.port));
        let mut path = format!("/bivouac/v1/sandboxes/{}/tunnel?port={}", args.name, pair.port);
        if args.wake {
            path.push_str("&wake=true");
        }
        for listener in std::iter::once(four).chain(six) {
            accepting.spawn(accept(listener, client.clone(), path.clone(), room.clone()));
        }
    }
    if global.json {
        let list: Vec<_> = told
            .iter()
            .map(|(local, port)| json!({ "local": local.to_string(), "port": port }))
            .collect();
        output::json(&list.into())?;
    } else {
        for (local, port) in &told {
            output::line(&format!("{local} -> {}:{port}", args.name))?;
        }
    }
    signals.next().await;
    accepting.shutdown().await;
    Ok(ExitStatus::Success)
}

/// Both loopback addresses, if there are two: browsers try either for `localhost`.
async fn listen(pair: Forwarded) -> Outcome<(TcpListener, Option<TcpListener>)> {
    let four = SocketAddr::from((Ipv4Addr::LOCALHOST, pair.local));
    let four = TcpListener::bind(four)
        .await
        .explain(|| format!("could not listen on {four}; another port here: PORT:{}", pair.port))?;
    let port = four.local_addr().explain(|| "no address".to_owned())?.port();
    let six = TcpListener::bind(SocketAddr::from((Ipv6Addr::LOCALHOST, port))).await.ok();
    Ok((four, six))
}

async fn accept(listener: TcpListener, client: Client, path: String, room: Arc<Semaphore>) {
    let mut open = JoinSet::new();
    let mut client = client;
    let mut warned: Option<Instant> = None;
    let (moved, mut found) = tokio::sync::mpsc::channel::<Client>(1);
    let (trouble, mut said) = tokio::sync::mpsc::channel::<String>(1);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = open.join_next(), if !open.is_empty() => continue,
            Some(new) = found.recv() => {
                client = new;
                continue;
            }
            Some(what) = said.recv() => {
                // One who tries again and again shall not fill the screen.
                if warned.is_none_or(|at| at.elapsed() > Duration::from_secs(5)) {
                    output::warning(&what);
                    warned = Some(Instant::now());
                }
                continue;
            }
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                output::warning(&format!("a connection could not be accepted: {error}"));
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let Ok(place) = room.clone().try_acquire_owned() else {
            let _ = trouble.try_send(format!("more than {MOST} connections at once"));
            continue;
        };
        let (client, path) = (client.clone(), path.clone());
        let (moved, trouble) = (moved.clone(), trouble.clone());
        open.spawn(async move {
            if let Err(what) = carry(stream, client, &path, &moved).await {
                let _ = trouble.try_send(what);
            }
            drop(place);
        });
    }
}

/// Carries one connection. An engine that is away is waited for.
async fn carry(
    mut here: TcpStream,
    mut client: Client,
    path: &str,
    moved: &tokio::sync::mpsc::Sender<Client>,
) -> Result<(), String> {
    let _ = here.set_nodelay(true);
    let until = Instant::now() + RESTART;
    let mut there = loop {
        match tunnel::open(&client, path).await {
            Ok(stream) => break stream,
            Err(error) if Instant::now() < until && may_come_back(&error) => {
                tokio::time::sleep(STEP).await;
                if let Ok(found) = client.find_again() {
                    client = found;
                    let _ = moved.try_send(client.clone());
                }
            }
            Err(error) => return Err(error.to_string()),
        }
    };
    // How it ends is the business of those who speak over it.
    let _ = copy_bidirectional(&mut here, &mut there).await;
    Ok(())
}

/// Whether that is what an engine says, or does not, while it is started again.
fn may_come_back(error: &CallError) -> bool {
    error.is_transport() || error.is(reqwest::StatusCode::SERVICE_UNAVAILABLE)
}
