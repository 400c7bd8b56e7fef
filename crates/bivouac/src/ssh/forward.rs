//! Connections that go through a sandbox: `-L`, `-D` (out of it), `-R` (into the client's network).
//!
//! Invariants: what goes out is made inside, so the sandbox's policy applies to it; loopback is the sandbox's own;
//! what listens inside goes with its connection. Called by `handler` and `agent`.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use bivouac_engine::{ActivityHold, Dialed, Error};
use bivouac_runtime::{DialTo, GuestListener, GuestStream, ListenAt};
use russh::server::{ChannelOpenHandle, Handle, Msg};
use russh::{ChannelOpenFailure, ChannelWriteHalf};
use tokio::io::{AsyncRead, AsyncWrite, split};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::connection::{Shared, User, status};
use super::pump::Line;
use super::{CHANNELS, PATIENCE};

/// Where a client wants to go. Loopback is the sandbox's own.
pub(super) fn target(host: &str, port: u32) -> Option<DialTo> {
    let port = u16::try_from(port).ok().filter(|port| *port != 0)?;
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let loopback = match bare.parse::<IpAddr>() {
        Ok(address) => address.is_loopback() || address.is_unspecified(),
        Err(_) => {
            let name = bare.trim_end_matches('.').to_ascii_lowercase();
            name.is_empty() || name == "localhost" || name.ends_with(".localhost")
        }
    };
    Some(match loopback {
        true => DialTo::Port(port),
        false => DialTo::Host { host: bare.to_owned(), port },
    })
}

/// Connects for a client, and carries.
pub(super) async fn dial(
    shared: Arc<Shared>,
    user: User,
    write: ChannelWriteHalf<Msg>,
    to: DialTo,
    reply: ChannelOpenHandle,
) {
    let line = Line::new(&shared.feeds, write);
    let User { who, ns, sandbox, .. } = &user;
    let dialing = shared.engine().dial(who, ns, sandbox, &to, true);
    let dialed = tokio::select! {
        dialed = tokio::time::timeout(PATIENCE, dialing) => dialed,
        () = shared.over.cancelled() => return,
    };
    let (reason, outcome) = match dialed {
        Ok(Ok(Dialed { socket, hold, gone })) => match GuestStream::new(socket) {
            Ok(stream) => {
                shared.note(&user, "forward", 200);
                reply.accept().await;
                // Small records must not wait for more to come.
                let _ = rustix::net::sockopt::set_tcp_nodelay(&stream, true);
                let (from, to) = split(stream);
                return carry_on(line, from, to, gone, hold).await;
            }
            Err(error) => {
                tracing::warn!(%error, "a socket from inside cannot be used");
                (ChannelOpenFailure::ConnectFailed, 500)
            }
        },
        Ok(Err(error)) => {
            tracing::debug!(%error, "a connection of SSH into a sandbox was not made");
            (refusal(&error), status(&error))
        }
        Err(_) => (ChannelOpenFailure::ConnectFailed, 504),
    };
    shared.note(&user, "forward", outcome);
    reply.reject(reason).await;
}

fn refusal(error: &Error) -> ChannelOpenFailure {
    match status(error) {
        401 | 403 => ChannelOpenFailure::AdministrativelyProhibited,
        _ => ChannelOpenFailure::ConnectFailed,
    }
}

/// Carries until both directions have ended, the channel is gone or the session is.
async fn carry_on(
    line: Line,
    from: impl AsyncRead + Unpin,
    to: impl AsyncWrite + Unpin,
    gone: watch::Receiver<bool>,
    hold: ActivityHold,
) {
    tokio::select! {
        line = line.carry(from, to) => line.close().await,
        // Half a connection stays open without end when the other side has been killed.
        () = ended(gone) => {}
    }
    drop(hold);
}

/// Answers when the session has.
async fn ended(mut gone: watch::Receiver<bool>) {
    let _ = gone.wait_for(|gone| *gone).await;
}

/// What a channel towards the client is for.
#[derive(Debug, Clone)]
pub(super) enum Opening {
    /// A connection to a TCP port inside: the address and port that were asked for, and who connected.
    Tcp { address: String, port: u16, peer: String, peer_port: u16 },
    /// A connection to a Unix socket inside.
    Unix { path: String },
    /// One to the client's agent.
    Agent,
}

/// Opens a channel to the client and carries a connection over it. Answers at once; a connection over the bound is
/// dropped.
pub(super) fn carry(shared: &Arc<Shared>, opening: Opening, stream: GuestStream) {
    let Some(handle) = shared.handle.get().cloned() else { return };
    if shared.feeds.count() >= CHANNELS {
        tracing::debug!("a connection from inside is dropped: the client has too many channels");
        return;
    }
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        let opened = tokio::select! {
            opened = open(&handle, opening) => opened,
            () = shared.over.cancelled() => return,
        };
        match opened {
            Ok(channel) => {
                // What is read comes by the handler and its feeds.
                let (_, write) = channel.split();
                let line = Line::new(&shared.feeds, write);
                let (from, to) = split(stream);
                line.carry(from, to).await.close().await;
            }
            Err(error) => tracing::debug!(%error, "the client takes no connection from inside"),
        }
    });
}

async fn open(handle: &Handle, opening: Opening) -> Result<russh::Channel<Msg>, russh::Error> {
    match opening {
        Opening::Tcp { address, port, peer, peer_port } => {
            let (port, peer_port) = (u32::from(port), u32::from(peer_port));
            handle.channel_open_forwarded_tcpip(address, port, peer, peer_port).await
        }
        Opening::Unix { path } => handle.channel_open_forwarded_streamlocal(path).await,
        Opening::Agent => handle.channel_open_agent().await,
    }
}

/// What a client is told of a connection that came to what it asked for.
fn opening(at: &ListenAt, port: u16, stream: &GuestStream) -> Opening {
    match at {
        ListenAt::Unix { path } => Opening::Unix { path: path.clone() },
        ListenAt::Tcp { host, .. } => {
            let _ = rustix::net::sockopt::set_tcp_nodelay(stream, true);
            let peer = rustix::net::getpeername(stream).ok().flatten();
            let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
            let peer = peer.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)));
            let (address, peer, peer_port) = (host.clone(), peer.ip().to_string(), peer.port());
            Opening::Tcp { address, port, peer, peer_port }
        }
    }
}

/// Listens inside for a client. Answers the port, and what ends it.
pub(super) async fn listen(
    shared: &Arc<Shared>,
    user: &User,
    at: ListenAt,
) -> Result<(u16, CancellationToken), Error> {
    let User { who, ns, sandbox, .. } = user;
    let unusable = |error: io::Error| {
        tracing::warn!(%error, "a socket from inside cannot be used");
        Error::internal("The engine cannot use a socket from inside.")
    };
    shared.engine().wake(who, ns, sandbox).await?;
    let (listening, hold) = shared.engine().listen_inside(who, ns, sandbox, &at).await?;
    let stop = shared.over.child_token();
    let (port, mut listener) =
        (listening.port, GuestListener::new(listening.socket).map_err(unusable)?);
    let (shared, stopped) = (Arc::clone(shared), stop.clone());
    tokio::spawn(async move {
        let taking = async {
            while let Ok(stream) = listener.accept().await {
                let opening = opening(&at, port, &stream);
                carry(&shared, opening, stream);
            }
        };
        let _ = stopped.run_until_cancelled(taking).await;
        drop(hold);
    });
    Ok((port, stop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_the_sandbox_s_own() {
        for host in [
            "localhost",
            "LOCALHOST.",
            "a.localhost",
            "127.0.0.1",
            "127.9.9.9",
            "::1",
            "[::1]",
            "0.0.0.0",
            "",
        ] {
            assert_eq!(target(host, 80), Some(DialTo::Port(80)), "{host}");
        }
        let other = |host: &str| Some(DialTo::Host { host: host.to_owned(), port: 443 });
        for host in ["example.org", "10.0.0.1", "2001:db8::1", "localhost.example.org"] {
            assert_eq!(target(host, 443), other(host));
        }
        assert_eq!(target("localhost", 0), None);
        assert_eq!(target("localhost", 65_536), None);
    }
}
