//! The interactive end point of the original: a ticket by the API, then a WebSocket that shows it.
//!
//! Owns: tickets. Invariant: a ticket opens one connection, within a minute, for the principal and to the session
//! that it was made for, whether or not the attempt succeeds; its secret half is compared in constant time and is
//! in no log. What is opened here has no name of its own and goes with its client.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bivouac_engine::{Engine, Error, NewTerminal, Principal, Use};
use bivouac_types::id::SessionId;
use bivouac_types::terminal::TtySize;
use serde::Deserialize;
use subtle::ConstantTimeEq as _;
use tokio::time::Instant;

use super::App;
use super::error::ApiError;
use super::scope::{Seg, session_id};
use super::socket::{self, Dialect};

/// Where the connections arrive; the session's id is behind it.
pub(super) const PATH: &str = "/interactive/";
/// How long a ticket is good for.
const VALID: Duration = Duration::from_secs(60);
/// Most tickets that are out.
const MOST: usize = 4096;
/// Bytes of a ticket that find it, and of those that prove it.
const ID: usize = 8;
const SECRET: usize = 24;
/// How long a connection may take to say what it wants.
const START: Duration = Duration::from_secs(15);
/// How long a terminal outlives a client that vanished.
const GRACE: Duration = Duration::from_secs(5);
/// Most arguments and variables.
const MAX_WORDS: usize = 4096;

/// Tickets that are out.
#[derive(Debug, Default)]
pub(super) struct Tickets(Mutex<HashMap<[u8; ID], Ticket>>);

struct Ticket {
    who: Principal,
    team: String,
    session: SessionId,
    secret: [u8; SECRET],
    until: Instant,
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket").field("session", &self.session).finish_non_exhaustive()
    }
}

impl Tickets {
    /// Makes one.
    pub(super) fn issue(
        &self,
        who: Principal,
        team: String,
        session: SessionId,
    ) -> Result<String, ApiError> {
        let mut token = [0u8; ID + SECRET];
        getrandom::fill(&mut token).map_err(|_| {
            let message = "This host has no randomness to make a token of.";
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
        })?;
        let (mut id, mut secret) = ([0; ID], [0; SECRET]);
        id.copy_from_slice(&token[..ID]);
        secret.copy_from_slice(&token[ID..]);
        let now = Instant::now();
        let mut out = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if out.len() >= MOST {
            out.retain(|_, ticket| ticket.until > now);
        }
        if out.len() >= MOST {
            let message = "Too many interactive sessions are being opened; try again in a moment.";
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "busy", message));
        }
        out.insert(id, Ticket { who, team, session, secret, until: now + VALID });
        drop(out);
        Ok(URL_SAFE_NO_PAD.encode(token))
    }

    /// Takes the one that a connection to a session shows. It is gone then.
    fn take(&self, token: &str, session: &SessionId) -> Option<Ticket> {
        let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
        let (id, secret) = bytes.split_at_checked(ID)?;
        let id: [u8; ID] = id.try_into().ok()?;
        let mut out = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = out.remove(&id)?;
        drop(out);
        let proved = bool::from(ticket.secret.ct_eq(secret));
        (proved && ticket.until > Instant::now() && ticket.session == *session).then_some(ticket)
    }
}

/// Where the ticket is to be shown.
pub(super) fn url(engine: &Engine, stands_in: bool, session: &SessionId) -> String {
    if stands_in {
        return format!("wss://vercel.com{PATH}{session}");
    }
    let base = engine.config().public_url.trim_end_matches('/');
    let base = match base.split_once("://") {
        Some(("https", rest)) => format!("wss://{rest}"),
        Some((_, rest)) => format!("ws://{rest}"),
        None => format!("ws://{base}"),
    };
    format!("{base}{PATH}{session}")
}

#[derive(Deserialize)]
pub(super) struct Shown {
    token: String,
}

/// The connection itself. The ticket is looked at before anything else: without one it does not even become a
/// WebSocket.
pub(super) async fn connect(
    State(app): State<App>,
    Seg(session): Seg<String>,
    shown: Result<Query<Shown>, QueryRejection>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let upgrade = upgrade.map_err(|_| not_a_socket())?;
    let refuse = || {
        let message = "This token does not open anything: it is for one connection to its own \
                       session, and only for a minute. Ask for another one.";
        ApiError::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
    };
    let session = session_id(&session).map_err(|_| refuse())?;
    let token = shown.map_err(|_| refuse())?.0.token;
    let ticket = app.tickets.take(&token, &session).ok_or_else(refuse)?;
    if !app.engine.counts(&ticket.who) {
        return Err(refuse());
    }
    let mut opened = Use::new(&ticket.who, "http", "WEBSOCKET /interactive/{session}").outcome(101);
    opened.object = Some(session.to_string());
    app.engine.audit(opened);
    Ok(socket::limited(upgrade).on_upgrade(move |socket| converse(app, ticket, socket)))
}

/// 426: the path takes WebSockets only.
pub(super) fn not_a_socket() -> ApiError {
    let message = "This path is a WebSocket: send 'Upgrade: websocket' over HTTP/1.1.";
    ApiError::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", message)
}

/// The first frame.
#[derive(Debug, Deserialize)]
struct Start {
    r#type: String,
    command: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: Vec<String>,
    cwd: Option<String>,
    cols: Option<i64>,
    rows: Option<i64>,
}

impl Start {
    fn terminal(self) -> Result<NewTerminal, Error> {
        let wrong = |what: &str| Error::invalid(format!("Invalid start frame: {what}"));
        if self.r#type != "start" || self.command.is_empty() {
            return Err(wrong("the first frame must be a start with a command"));
        }
        if self.args.len() > MAX_WORDS || self.env.len() > MAX_WORDS {
            return Err(wrong("there are too many arguments or variables"));
        }
        let mut env = BTreeMap::new();
        for pair in self.env {
            let (name, value) =
                pair.split_once('=').ok_or_else(|| wrong("a variable must be NAME=VALUE"))?;
            env.insert(name.to_owned(), value.to_owned());
        }
        let default = TtySize::default();
        let size = TtySize::new(
            self.cols.unwrap_or_else(|| default.cols.into()),
            self.rows.unwrap_or_else(|| default.rows.into()),
        )?;
        let (mut program, mut args, mut sudo) = (self.command, self.args, false);
        // The original's clients ask for root by this word alone, and expect their variables to stay.
        if program == "sudo" && args.first().is_some_and(|first| !first.starts_with('-')) {
            program = args.remove(0);
            sudo = true;
        }
        Ok(NewTerminal { name: None, program, args, cwd: self.cwd, env, sudo, size })
    }
}

async fn converse(app: App, ticket: Ticket, mut socket: WebSocket) {
    let first = tokio::time::timeout(START, first_frame(&mut socket)).await;
    let start = match first {
        Ok(Some(Ok(start))) => start,
        Ok(Some(Err(reason))) => return socket::refuse(socket, reason).await,
        Ok(None) => return,
        Err(_) => return socket::refuse(socket, "no start frame came").await,
    };
    let Ticket { who, team, session, .. } = ticket;
    let opened = async {
        let new = start.terminal()?;
        let terminal = app.engine.open_terminal_in(&who, &team, &session, new).await?;
        app.engine.attach_opened(&who, &team, &terminal).await
    };
    match opened.await {
        Ok(mut attached) => {
            attached.linger(GRACE);
            socket::carry(app, who, socket, attached, Dialect::Original).await;
        }
        Err(error) => socket::turn_away(socket, exit_code(&error), &error.message).await,
    }
}

/// Waits for the start frame. `None`: the client has left.
async fn first_frame(socket: &mut WebSocket) -> Option<Result<Start, &'static str>> {
    loop {
        match socket.recv().await? {
            Ok(Message::Text(text)) => {
                let start = serde_json::from_str(&text);
                return Some(start.map_err(|_| "the first frame must be a start with a command"));
            }
            Ok(Message::Binary(_)) => return Some(Err("the first frame must be a text frame")),
            Ok(Message::Ping(_) | Message::Pong(_)) => {}
            Ok(Message::Close(_)) | Err(_) => return None,
        }
    }
}

/// As a shell would end: 127 not found, 126 not executable.
fn exit_code(error: &Error) -> i32 {
    match error.detail.get("failure").and_then(|word| word.as_str()) {
        Some("not_found") => 127,
        Some("not_executable" | "bad_format") => 126,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(n: u8) -> SessionId {
        SessionId::new(1, [n; 10])
    }

    fn issue(tickets: &Tickets) -> String {
        tickets.issue(Principal::local(), "team".to_owned(), session(1)).unwrap()
    }

    #[test]
    fn a_ticket_opens_one_connection_to_its_session() {
        let tickets = Tickets::default();
        let (first, second) = (issue(&tickets), issue(&tickets));
        assert_ne!(first, second);
        assert!(tickets.take(&first, &session(1)).is_some());
        assert!(tickets.take(&first, &session(1)).is_none(), "twice");
        assert!(tickets.take(&second, &session(2)).is_none(), "another session's");
        assert!(tickets.take(&second, &session(1)).is_none(), "burnt");
        for bad in ["", "x", "===", &"A".repeat(43), &"A".repeat(5000)] {
            assert!(tickets.take(bad, &session(1)).is_none(), "{bad:.20}");
        }
        // The half that finds it is not enough.
        let third = issue(&tickets);
        let forged = format!("{}{}", &third[..12], "A".repeat(third.len() - 12));
        assert!(tickets.take(&forged, &session(1)).is_none());
    }

    #[test]
    fn a_ticket_grows_old_and_their_number_has_an_end() {
        let tickets = Tickets::default();
        let old = issue(&tickets);
        tickets.0.lock().unwrap().values_mut().for_each(|ticket| ticket.until = Instant::now());
        assert!(tickets.take(&old, &session(1)).is_none());
        (0..MOST).for_each(|_| drop(issue(&tickets)));
        let full = tickets.issue(Principal::local(), "team".to_owned(), session(1));
        assert_eq!(full.unwrap_err().code(), "busy");
        tickets.0.lock().unwrap().values_mut().for_each(|ticket| ticket.until = Instant::now());
        issue(&tickets);
    }

    #[test]
    fn a_start_says_what_and_as_whom() {
        let read = |text: &str| serde_json::from_str::<Start>(text).unwrap().terminal();
        let plain = read(
            r#"{"type":"start","command":"sh","args":["-c","x"],"env":["A=1","B=x=y"],"cwd":"/tmp"}"#,
        )
        .unwrap();
        assert_eq!((plain.program.as_str(), plain.sudo), ("sh", false));
        assert_eq!(plain.env["B"], "x=y");
        assert_eq!(plain.size, TtySize::default());
        let root = read(r#"{"type":"start","command":"sudo","args":["sh"],"cols":120,"rows":40}"#);
        let root = root.unwrap();
        assert_eq!((root.program.as_str(), root.args.len(), root.sudo), ("sh", 0, true));
        assert_eq!(root.size, TtySize { cols: 120, rows: 40 });
        let own = read(r#"{"type":"start","command":"sudo","args":["-u","x"]}"#).unwrap();
        assert_eq!((own.program.as_str(), own.sudo), ("sudo", false));
        for bad in [
            r#"{"type":"stop","command":"sh"}"#,
            r#"{"type":"start","command":""}"#,
            r#"{"type":"start","command":"sh","env":["A"]}"#,
            r#"{"type":"start","command":"sh","cols":0}"#,
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
