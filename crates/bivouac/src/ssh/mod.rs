//! The SSH door: shells, commands, files and ports of sandboxes for unmodified SSH clients.
//!
//! Owns: the host key, logins, channels. Invariants: only public keys let in, and only registered ones; each has
//! the rights of its token, is checked by the engine at every use, and what it opened is cut when that token
//! counts no more; nothing is decided here; every count and every buffer has a bound. A connection comes by the API
//! (`Door::Tunnel`) or to the port of `--ssh` (`Door::Port`). Called by `serve` and by `http`.

mod agent;
mod connection;
mod feed;
mod forward;
mod guard;
mod handler;
pub(crate) mod host_key;
mod pump;
mod session;
pub(crate) mod user;

use std::borrow::Cow;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bivouac_engine::Engine;
use russh::keys::ssh_key::{HashAlg, PrivateKey};
use russh::{MethodKind, MethodSet, Preferred, SshId};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

pub(crate) use connection::Door;
use connection::Shared;
use feed::Feeds;
use guard::Guarded;
use handler::Connection;

/// Most channels of a connection.
const CHANNELS: usize = 64;
/// Most connections at a time, those of both doors.
const CONNECTIONS: usize = 1024;
/// How long a login may take.
const LOGIN: Duration = Duration::from_secs(60);
/// Most tries of a login.
const TRIES: usize = 6;
/// How long a refusal takes.
const REFUSAL: Duration = Duration::from_millis(300);
/// How often a silent client is asked whether it is there, and how often it may not answer.
const KEEPALIVE: (Duration, usize) = (Duration::from_secs(30), 4);
/// How long a sandbox may take to connect or to listen.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of one packet.
const PACKET: u32 = 32 << 10;
/// Pieces of output that wait in a connection.
const OUTPUT_PIECES: usize = 32;

/// What the operator chose.
#[derive(Debug, Clone, Copy, Default)]
pub struct SshOptions {
    /// Clients may have their agents reachable inside.
    pub agent_forwarding: bool,
}

/// The SSH server of an engine.
pub struct Server {
    engine: Arc<Engine>,
    config: Arc<russh::server::Config>,
    options: SshOptions,
    /// The public half of the host key, in OpenSSH's form.
    host_key: String,
    fingerprint: String,
    /// Where `--ssh` listens.
    address: OnceLock<SocketAddr>,
    room: Arc<Semaphore>,
    end: CancellationToken,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("fingerprint", &self.fingerprint).finish_non_exhaustive()
    }
}

impl Server {
    /// A server with this host key.
    ///
    /// # Errors
    /// A key that cannot be written in OpenSSH's form.
    pub fn new(engine: Arc<Engine>, key: PrivateKey, options: SshOptions) -> io::Result<Arc<Self>> {
        let public = key.public_key();
        let (kind, data) = (public.algorithm(), public.to_openssh().map_err(io::Error::other)?);
        let body = data.split(' ').nth(1).unwrap_or_default();
        let host_key = format!("{} {body}", kind.as_str());
        let fingerprint = public.fingerprint(HashAlg::Sha256).to_string();
        Ok(Arc::new(Self {
            engine,
            config: Arc::new(config(key)),
            options,
            host_key,
            fingerprint,
            address: OnceLock::new(),
            room: Arc::new(Semaphore::new(CONNECTIONS)),
            end: CancellationToken::new(),
        }))
    }

    /// The public half of the host key: `ssh-ed25519 AAAA…`.
    #[must_use]
    pub fn host_key(&self) -> &str {
        &self.host_key
    }

    /// The host key's fingerprint, `SHA256:…`.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Where `--ssh` listens, if it does.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.address.get().copied()
    }

    /// Whether clients may have their agents reachable inside.
    #[must_use]
    pub fn forwards_agents(&self) -> bool {
        self.options.agent_forwarding
    }

    /// Takes connections until told to end.
    pub async fn listen(self: &Arc<Self>, listener: TcpListener, ended: impl Future<Output = ()>) {
        if let Ok(address) = listener.local_addr() {
            let _ = self.address.set(address);
        }
        let taking = async {
            loop {
                match listener.accept().await {
                    Ok((stream, peer)) => {
                        let _ = stream.set_nodelay(true);
                        let (server, peer) = (Arc::clone(self), peer.ip().to_string());
                        tokio::spawn(
                            async move { server.serve(stream, Door::Port, Some(peer)).await },
                        );
                    }
                    // Out of descriptors: in a moment there may be some again.
                    Err(error) => {
                        tracing::warn!(%error, "a connection of SSH could not be taken");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
            }
        };
        tokio::select! {
            () = taking => {}
            () = ended => {}
        }
    }

    /// Cuts every connection.
    pub fn close(&self) {
        self.end.cancel();
    }

    /// Serves one connection to its end.
    pub(crate) async fn serve<S>(self: Arc<Self>, stream: S, door: Door, peer: Option<String>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Ok(_room) = Arc::clone(&self.room).try_acquire_owned() else {
            tracing::warn!("a connection of SSH is refused: there are {CONNECTIONS} already");
            return;
        };
        let over = self.end.child_token();
        let shared = Arc::new(Shared {
            server: Arc::clone(&self),
            door,
            peer,
            user: OnceLock::new(),
            handle: OnceLock::new(),
            feeds: Arc::new(Feeds::default()),
            over: over.clone(),
        });
        let _ended = over.clone().drop_guard();
        let connection = Connection::new(Arc::clone(&shared));
        let stream = Guarded::new(stream, &over);
        let begun = tokio::time::timeout(
            LOGIN,
            russh::server::run_stream(Arc::clone(&self.config), stream, connection),
        );
        let session = match begun.await {
            Ok(Ok(session)) => session,
            Ok(Err(error)) => return tracing::debug!(%error, "a connection of SSH did not begin"),
            Err(_) => return tracing::debug!("a connection of SSH said nothing"),
        };
        tokio::pin!(session);
        let ended = tokio::select! {
            ended = &mut session => ended,
            () = self.watch(&shared) => {
                over.cancel();
                session.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection of SSH broke");
        }
    }

    /// Answers when the connection has to be cut: nobody logged in in time, or who did counts no more.
    async fn watch(&self, shared: &Shared) {
        tokio::time::sleep(LOGIN).await;
        if shared.user.get().is_none() {
            tracing::debug!("a connection of SSH did not log in in time");
            return;
        }
        shared.over.cancelled().await;
    }
}

/// Bounds and algorithms.
fn config(key: PrivateKey) -> russh::server::Config {
    russh::server::Config {
        server_id: SshId::Standard(Cow::Borrowed(concat!(
            "SSH-2.0-Bivouac_",
            env!("CARGO_PKG_VERSION")
        ))),
        methods: MethodSet::from(&[MethodKind::PublicKey][..]),
        auth_rejection_time: REFUSAL,
        // Every client begins with a try that cannot succeed.
        auth_rejection_time_initial: Some(Duration::ZERO),
        keys: vec![key],
        window_size: feed::WINDOW,
        maximum_packet_size: PACKET,
        // Nobody reads those: see `feed`.
        channel_buffer_size: 1,
        event_buffer_size: OUTPUT_PIECES,
        // What a small packet blows up to has no bound.
        preferred: Preferred {
            compression: Cow::Borrowed(&[russh::compression::NONE]),
            ..Preferred::DEFAULT
        },
        max_auth_attempts: TRIES,
        inactivity_timeout: None,
        keepalive_interval: Some(KEEPALIVE.0),
        keepalive_max: KEEPALIVE.1,
        nodelay: true,
        ..russh::server::Config::default()
    }
}
