//! What a client says: logins, channels, requests.
//!
//! Invariants: nothing is asked of a sandbox before somebody has logged in who may; the connection's loop never
//! waits for a sandbox, but for a listener that a client asked for. Called by the library, for one connection.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bivouac_engine::Principal;
use bivouac_runtime::ListenAt;
use bivouac_types::access::Verb;
use bivouac_types::terminal::TtySize;
use russh::keys::ssh_key::HashAlg;
use russh::server::{
    Auth, ChannelOpenHandle, Handler, Msg, PublicKeyOffer, Session, VerifiedPublicKey,
};
use russh::{Channel, ChannelId, ChannelOpenFailure, Pty, Sig};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::connection::{Door, Shared, User};
use super::forward;
use super::pump::Line;
use super::session::{Start, TERMINAL, What};
use super::{CHANNELS, PATIENCE, user};

/// Most variables of a channel.
const VARIABLES: usize = 64;
/// Longest value of one.
const VALUE: usize = 4096;
/// Longest command.
const COMMAND: usize = 128 << 10;
/// Most signals that wait.
const SIGNALS: usize = 16;
/// Most listeners of a connection.
const LISTENERS: usize = 32;
/// Variables that a client may set besides `LC_…`.
const ALLOWED: [&str; 8] =
    ["LANG", "LANGUAGE", "TERM", "COLORTERM", "TZ", "NO_COLOR", "GIT_PROTOCOL", TERMINAL];
/// What is told to a client whose agent is not let in.
const NO_AGENT: &str =
    "agent forwarding is refused: this engine runs without --ssh-agent-forwarding";

/// Why a connection ends before its time.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error(transparent)]
    Ssh(#[from] russh::Error),
    #[error("the client sent more than its windows allow")]
    Flood,
    #[error("the engine's database did not answer")]
    Database,
}

/// A session channel whose client has not yet said what it wants, or has.
struct Waiting {
    /// Taken when it starts.
    line: Option<Line>,
    env: BTreeMap<String, String>,
    pty: bool,
    size: watch::Sender<TtySize>,
    signals: mpsc::Sender<i32>,
    /// Taken when it starts.
    ears: Option<(watch::Receiver<TtySize>, mpsc::Receiver<i32>)>,
    agent: bool,
    notice: Option<String>,
}

impl Waiting {
    fn new(line: Line) -> Self {
        let (size, resized) = watch::channel(TtySize::default());
        let (signals, signalled) = mpsc::channel(SIGNALS);
        Self {
            line: Some(line),
            env: BTreeMap::new(),
            pty: false,
            size,
            signals,
            ears: Some((resized, signalled)),
            agent: false,
            notice: None,
        }
    }
}

/// One client.
pub(super) struct Connection {
    shared: Arc<Shared>,
    channels: HashMap<ChannelId, Waiting>,
    listeners: HashMap<String, CancellationToken>,
    /// A refusal was written down.
    refused: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.over.cancel();
        self.shared.feeds.close_all(false);
    }
}

fn size_of(cols: u32, rows: u32) -> TtySize {
    let fit = |value: u32, default: u16| match u16::try_from(value) {
        Ok(0) => default,
        Ok(value) => value.min(TtySize::MAX),
        Err(_) => TtySize::MAX,
    };
    let TtySize { cols: usual_cols, rows: usual_rows } = TtySize::default();
    TtySize { cols: fit(cols, usual_cols), rows: fit(rows, usual_rows) }
}

fn may_set(name: &str, value: &str) -> bool {
    let known = ALLOWED.contains(&name)
        || name.strip_prefix("LC_").is_some_and(|rest| {
            (1..=32).contains(&rest.len())
                && rest.bytes().all(|b| b.is_ascii_uppercase() || b == b'_')
        });
    known && value.len() <= VALUE && !value.contains('\0')
}

/// Linux's number of a signal that SSH names.
fn number_of(signal: &Sig) -> Option<i32> {
    Some(match signal {
        Sig::HUP => 1,
        Sig::INT => 2,
        Sig::QUIT => 3,
        Sig::ILL => 4,
        Sig::ABRT => 6,
        Sig::FPE => 8,
        Sig::KILL => 9,
        Sig::USR1 => 10,
        Sig::SEGV => 11,
        Sig::PIPE => 13,
        Sig::ALRM => 14,
        Sig::TERM => 15,
        Sig::Custom(name) => match name.as_str() {
            "USR2" => 12,
            "CONT" => 18,
            "STOP" => 19,
            "TSTP" => 20,
            "WINCH" => 28,
            _ => return None,
        },
    })
}

impl Connection {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, channels: HashMap::new(), listeners: HashMap::new(), refused: false }
    }

    /// Who comes with this key to that user name, if he may.
    async fn login(&mut self, name: &str, fingerprint: &str) -> Result<Option<User>, Broken> {
        let found = self.shared.engine().by_ssh_key(fingerprint).await.map_err(|error| {
            tracing::error!(%error, "a key of SSH could not be looked up");
            Broken::Database
        })?;
        let Some(by_key) = found else { return Ok(None) };
        let user = match &self.shared.door {
            // The key only proves that the client is one that somebody let in; the token tells the rights.
            Door::Tunnel { who, ns, sandbox } => User {
                who: who.clone(),
                ns: ns.clone(),
                sandbox: sandbox.clone(),
                root: user::is_root(name),
            },
            Door::Port => {
                let Some(login) = user::read(name) else { return Ok(None) };
                let ns = login.namespace.unwrap_or_else(|| by_key.grant.home(None));
                User { who: by_key, ns, sandbox: login.sandbox, root: login.root }
            }
        };
        let may =
            user.who.may(Verb::Exec, &user.ns).is_ok() && self.shared.engine().counts(&user.who);
        Ok(may.then_some(user))
    }

    fn refuse(&mut self) -> Auth {
        if !self.refused {
            self.refused = true;
            self.shared.note_refused();
        }
        Auth::reject()
    }

    fn user(&self) -> Result<&User, Broken> {
        self.shared.user.get().ok_or(Broken::Ssh(russh::Error::Inconsistent))
    }

    /// Cuts the connection when the token of who logged in counts no more.
    fn watch(&self, who: &Principal) {
        let (ended, over) = (self.shared.engine().ended(who), self.shared.over.clone());
        let feeds = Arc::clone(&self.shared.feeds);
        tokio::spawn(async move {
            tokio::select! {
                () = ended => {
                    feeds.close_all(true);
                    over.cancel();
                }
                () = over.cancelled() => {}
            }
        });
    }

    /// Starts what the client wants on a channel.
    fn start(&mut self, id: ChannelId, what: What, session: &mut Session) -> Result<(), Broken> {
        let user = self.user()?.clone();
        let parts = self.channels.get_mut(&id).and_then(|waiting| {
            let (line, ears) = (waiting.line.take()?, waiting.ears.take()?);
            Some((line, ears, waiting))
        });
        let Some((line, (size, signals), waiting)) = parts else {
            session.channel_failure(id)?;
            return Ok(());
        };
        let start = Start {
            shared: Arc::clone(&self.shared),
            user,
            line,
            what,
            env: std::mem::take(&mut waiting.env),
            pty: waiting.pty,
            size,
            signals,
            agent: waiting.agent,
            notice: waiting.notice.take(),
        };
        session.channel_success(id)?;
        tokio::spawn(start.run());
        Ok(())
    }

    /// Listens inside for the client. Answers the port.
    async fn listen(
        &mut self,
        key: impl Fn(u16) -> String,
        at: ListenAt,
    ) -> Result<Option<u16>, Broken> {
        let user = self.user()?.clone();
        if self.listeners.len() >= LISTENERS {
            return Ok(None);
        }
        let listening = forward::listen(&self.shared, &user, at);
        match tokio::time::timeout(PATIENCE, listening).await {
            Ok(Ok((port, stop))) => {
                self.shared.note(&user, "listen", 200);
                self.listeners.insert(key(port), stop);
                Ok(Some(port))
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, "SSH could not listen in a sandbox");
                self.shared.note(&user, "listen", super::connection::status(&error));
                Ok(None)
            }
            Err(_) => {
                self.shared.note(&user, "listen", 504);
                Ok(None)
            }
        }
    }

    fn stop_listening(&mut self, key: &str) -> bool {
        self.listeners.remove(key).map(|stop| stop.cancel()).is_some()
    }
}

fn tcp_key(address: &str, port: u32) -> String {
    format!("{address}:{port}")
}

impl Handler for Connection {
    type Error = Broken;

    async fn auth_publickey_offered(
        &mut self,
        user: &str,
        offer: PublicKeyOffer<'_>,
    ) -> Result<Auth, Broken> {
        let fingerprint = offer.public_key.fingerprint(HashAlg::Sha256).to_string();
        match self.login(user, &fingerprint).await? {
            Some(_) => Ok(Auth::Accept),
            None => Ok(self.refuse()),
        }
    }

    async fn auth_publickey(
        &mut self,
        user: &str,
        key: VerifiedPublicKey<'_>,
    ) -> Result<Auth, Broken> {
        let fingerprint = key.public_key.fingerprint(HashAlg::Sha256).to_string();
        let Some(user) = self.login(user, &fingerprint).await? else { return Ok(self.refuse()) };
        self.watch(&user.who);
        self.shared.engine().note_ssh_key(&fingerprint);
        self.shared.note(&user, "login", 200);
        let _ = self.shared.user.set(user);
        Ok(Auth::Accept)
    }

    async fn auth_succeeded(&mut self, session: &mut Session) -> Result<(), Broken> {
        let _ = self.shared.handle.set(session.handle());
        Ok(())
    }

    async fn channel_open_session(
        &mut self,
        channel: Channel<Msg>,
        reply: ChannelOpenHandle,
        _session: &mut Session,
    ) -> Result<(), Broken> {
        // Those that have ended count as well, until the client has closed them.
        if self.shared.feeds.count().max(self.channels.len()) >= CHANNELS {
            reply.reject(ChannelOpenFailure::ResourceShortage).await;
            return Ok(());
        }
        // What is read comes by this handler and the feeds.
        let (_, write) = channel.split();
        let line = Line::new(&self.shared.feeds, write);
        self.channels.insert(line.id(), Waiting::new(line));
        reply.accept().await;
        Ok(())
    }

    async fn channel_open_direct_tcpip(
        &mut self,
        channel: Channel<Msg>,
        host: &str,
        port: u32,
        _originator: &str,
        _originator_port: u32,
        reply: ChannelOpenHandle,
        _session: &mut Session,
    ) -> Result<(), Broken> {
        let user = self.user()?.clone();
        let Some(to) = forward::target(host, port) else {
            reply.reject(ChannelOpenFailure::ConnectFailed).await;
            return Ok(());
        };
        if self.shared.feeds.count() >= CHANNELS {
            reply.reject(ChannelOpenFailure::ResourceShortage).await;
            return Ok(());
        }
        let (_, write) = channel.split();
        tokio::spawn(forward::dial(Arc::clone(&self.shared), user, write, to, reply));
        Ok(())
    }

    async fn data(&mut self, id: ChannelId, data: &[u8], _: &mut Session) -> Result<(), Broken> {
        self.shared.feeds.put(id, data).await.map_err(|_| Broken::Flood)
    }

    fn adjust_window(&mut self, _channel: ChannelId, _current: u32) -> u32 {
        self.shared.feeds.window()
    }

    async fn channel_eof(&mut self, id: ChannelId, _: &mut Session) -> Result<(), Broken> {
        self.shared.feeds.end(id);
        Ok(())
    }

    async fn channel_close(&mut self, id: ChannelId, _: &mut Session) -> Result<(), Broken> {
        self.channels.remove(&id);
        self.shared.feeds.close(id);
        Ok(())
    }

    async fn channel_open_confirmation(
        &mut self,
        id: ChannelId,
        _max_packet_size: u32,
        _window_size: u32,
        _session: &mut Session,
    ) -> Result<(), Broken> {
        // Data may come before whoever opened the channel has heard of this.
        self.shared.feeds.of(id);
        Ok(())
    }

    async fn pty_request(
        &mut self,
        id: ChannelId,
        term: &str,
        cols: u32,
        rows: u32,
        _pix_width: u32,
        _pix_height: u32,
        _modes: &[(Pty, u32)],
        session: &mut Session,
    ) -> Result<(), Broken> {
        match self.channels.get_mut(&id) {
            Some(waiting) if waiting.line.is_some() => {
                waiting.pty = true;
                if may_set("TERM", term) && !term.is_empty() {
                    waiting.env.insert("TERM".to_owned(), term.to_owned());
                }
                waiting.size.send_replace(size_of(cols, rows));
                session.channel_success(id)?;
            }
            _ => session.channel_failure(id)?,
        }
        Ok(())
    }

    async fn window_change_request(
        &mut self,
        id: ChannelId,
        cols: u32,
        rows: u32,
        _pix_width: u32,
        _pix_height: u32,
        session: &mut Session,
    ) -> Result<(), Broken> {
        match self.channels.get(&id) {
            Some(waiting) => {
                waiting.size.send_replace(size_of(cols, rows));
                session.channel_success(id)?;
            }
            None => session.channel_failure(id)?,
        }
        Ok(())
    }

    async fn env_request(
        &mut self,
        id: ChannelId,
        name: &str,
        value: &str,
        session: &mut Session,
    ) -> Result<(), Broken> {
        match self.channels.get_mut(&id) {
            Some(waiting) if waiting.env.len() < VARIABLES && may_set(name, value) => {
                waiting.env.insert(name.to_owned(), value.to_owned());
                session.channel_success(id)?;
            }
            _ => session.channel_failure(id)?,
        }
        Ok(())
    }

    async fn shell_request(&mut self, id: ChannelId, session: &mut Session) -> Result<(), Broken> {
        self.start(id, What::Shell, session)
    }

    async fn exec_request(
        &mut self,
        id: ChannelId,
        data: &[u8],
        session: &mut Session,
    ) -> Result<(), Broken> {
        match std::str::from_utf8(data) {
            Ok(text) if text.len() <= COMMAND && !text.contains('\0') => {
                self.start(id, What::Command(text.to_owned()), session)
            }
            _ => Ok(session.channel_failure(id)?),
        }
    }

    async fn subsystem_request(
        &mut self,
        id: ChannelId,
        name: &str,
        session: &mut Session,
    ) -> Result<(), Broken> {
        match name {
            "sftp" => self.start(id, What::Sftp, session),
            _ => Ok(session.channel_failure(id)?),
        }
    }

    async fn agent_request(&mut self, id: ChannelId, _: &mut Session) -> Result<bool, Broken> {
        let allowed = self.shared.server.options.agent_forwarding;
        let Some(waiting) = self.channels.get_mut(&id) else { return Ok(false) };
        if allowed {
            waiting.agent = true;
        } else {
            waiting.notice = Some(NO_AGENT.to_owned());
        }
        Ok(allowed)
    }

    async fn signal(&mut self, id: ChannelId, signal: Sig, _: &mut Session) -> Result<(), Broken> {
        if let (Some(waiting), Some(number)) = (self.channels.get(&id), number_of(&signal)) {
            // Who sends more than can be delivered loses some.
            let _ = waiting.signals.try_send(number);
        }
        Ok(())
    }

    async fn tcpip_forward(
        &mut self,
        address: &str,
        port: &mut u32,
        _session: &mut Session,
    ) -> Result<bool, Broken> {
        let Ok(wanted) = u16::try_from(*port) else { return Ok(false) };
        // The client says what it is to be bound to, as with OpenSSH's `GatewayPorts clientspecified`.
        let host = if address == "*" { String::new() } else { address.to_owned() };
        let at = ListenAt::Tcp { host, port: wanted };
        let listening = self.listen(|port| tcp_key(address, port.into()), at).await?;
        if let Some(got) = listening {
            *port = got.into();
        }
        Ok(listening.is_some())
    }

    async fn cancel_tcpip_forward(
        &mut self,
        address: &str,
        port: u32,
        _session: &mut Session,
    ) -> Result<bool, Broken> {
        Ok(self.stop_listening(&tcp_key(address, port)))
    }

    async fn streamlocal_forward(&mut self, path: &str, _: &mut Session) -> Result<bool, Broken> {
        let at = ListenAt::Unix { path: path.to_owned() };
        Ok(self.listen(|_| path.to_owned(), at).await?.is_some())
    }

    async fn cancel_streamlocal_forward(
        &mut self,
        path: &str,
        _session: &mut Session,
    ) -> Result<bool, Broken> {
        Ok(self.stop_listening(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_harmless_variables_are_taken() {
        for good in ["LANG", "LC_ALL", "LC_TIME", "TERM", "GIT_PROTOCOL", TERMINAL] {
            assert!(may_set(good, "x"), "{good}");
        }
        for bad in ["PATH", "LD_PRELOAD", "LC_", "LC_a", "LC_X=Y", "BASH_ENV", "", "HOME"] {
            assert!(!may_set(bad, "x"), "{bad}");
        }
        assert!(!may_set("LANG", "a\0b"));
        assert!(!may_set("LANG", &"x".repeat(VALUE + 1)));
    }

    #[test]
    fn sizes_are_made_to_fit() {
        assert_eq!(size_of(120, 40), TtySize { cols: 120, rows: 40 });
        assert_eq!(size_of(0, 0), TtySize::default());
        assert_eq!(size_of(u32::MAX, 5000), TtySize { cols: TtySize::MAX, rows: TtySize::MAX });
    }
}
