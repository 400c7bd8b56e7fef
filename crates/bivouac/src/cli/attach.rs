//! A terminal in a sandbox as if it were here.
//!
//! Invariant: every byte of output is shown once and in order: the engine tells places in the output, what comes
//! behind them is counted, and after a broken connection (the engine restarts) the output goes on from there.
//! Used by `shell`, `attach`, `exec -t` and `run -t`.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

use super::client::{CallError, Client};
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::output;
use super::screen::{self, Escapes, Screen};
use super::signals::{Ask, Signals};
use super::stream::PATIENCE;

/// Longest silence of an engine that is there: it asks more often whether we are.
const SILENCE: Duration = Duration::from_secs(70);
/// How long a good-bye may take.
const PARTING: Duration = Duration::from_secs(3);
/// Largest frame that an engine sends.
const MAX_FRAME: usize = 16 << 20;

/// Which terminal, and what of it was seen.
#[derive(Debug)]
pub(crate) struct Target {
    session: String,
    command: String,
    seen: Seen,
}

/// Where the output goes on.
#[derive(Debug)]
enum Seen {
    /// Nothing yet: about the last so many bytes first.
    Nothing(u64),
    /// So many bytes behind a place.
    Place { at: u64, skip: u64 },
}

impl Target {
    /// A terminal as the API shows it. `scrollback`: bytes of earlier output, `None` is all of it.
    pub(crate) fn new(terminal: &Value, scrollback: Option<u64>) -> Outcome<Self> {
        let field = |pointer: &str| super::sandbox::text(terminal, pointer);
        let seen = match scrollback {
            Some(bytes) => Seen::Nothing(bytes),
            None => Seen::Place { at: 0, skip: 0 },
        };
        Ok(Self { session: field("/sessionId")?, command: field("/command/id")?, seen })
    }

    fn path(&self) -> String {
        let Self { session, command, seen } = self;
        let place = match seen {
            Seen::Nothing(bytes) => format!("scrollback={bytes}"),
            Seen::Place { at, skip } => format!("at={at}&skip={skip}"),
        };
        format!("/bivouac/v1/sessions/{session}/terminals/{command}/attach?{place}")
    }
}

/// How it ended here.
#[derive(Debug)]
pub(crate) enum Finish {
    /// The program has ended: the engine's last frame.
    Exit(Value),
    /// The user left.
    Left,
    /// This process was asked to end.
    Asked(Ask),
    /// The terminal here is gone.
    Closed,
}

impl Finish {
    /// The status to end with. Says on stderr why, when the program did not end by itself.
    pub(crate) fn status(&self) -> Outcome {
        match self {
            Self::Exit(exit) => {
                let why = exit["reasonText"].as_str().map(output::printable);
                match exit["code"].as_i64() {
                    Some(code) => {
                        if let Some(why) = why {
                            output::hint(&why);
                        }
                        Ok(ExitStatus::of_command(code))
                    }
                    None => Err(Failure::new(
                        why.unwrap_or_else(|| "how the program ended is not known".to_owned()),
                    )),
                }
            }
            Self::Left => Ok(ExitStatus::Success),
            Self::Asked(ask) => Ok(ExitStatus::of_signal(ask.number())),
            Self::Closed => Ok(ExitStatus::of_signal(Ask::Hangup.number())),
        }
    }
}

type Socket = WebSocketStream<reqwest::Upgraded>;

/// Why a connection is not there any more.
enum Broken {
    /// It may be taken up again.
    Now(Failure),
    /// It is of no use.
    For(Failure),
}

impl From<CallError> for Broken {
    fn from(error: CallError) -> Self {
        if error.is_transport() || error.is(StatusCode::SERVICE_UNAVAILABLE) {
            Self::Now(error.into())
        } else {
            Self::For(error.into())
        }
    }
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Self {
        Self::For(failure)
    }
}

/// Shows the terminal until its program ends or the user leaves. The terminal here has been given back then.
pub(crate) async fn run(
    client: &Client,
    mut target: Target,
    signals: &mut Signals,
) -> Outcome<Finish> {
    let mut client = client.clone();
    let mut socket = match connect(&client, &target).await {
        Ok(socket) => socket,
        Err(Broken::Now(failure) | Broken::For(failure)) => return Err(failure),
    };
    let watch = |kind| signal(kind).explain(|| "could not watch for signals".to_owned());
    let mut here = Here {
        resized: watch(SignalKind::window_change())?,
        quit: watch(SignalKind::quit())?,
        keys: screen::keys(),
        escapes: Escapes::default(),
    };
    let screen = Screen::take()?;
    let finish = loop {
        let failure = match carry(&mut socket, &mut target, &mut here, signals).await {
            Ok(finish) => break Ok(finish),
            Err(Broken::For(failure)) => break Err(failure),
            Err(Broken::Now(failure)) => failure,
        };
        say("the connection to the engine broke; taking it up again");
        let again = tokio::select! {
            again = reconnect(&mut client, &target) => again,
            ask = signals.next() => break Ok(Finish::Asked(ask)),
        };
        match again {
            Ok(fresh) => socket = fresh,
            Err(last) => break Err(last.after(&Said(failure.summary()))),
        }
    };
    drop(screen);
    if let Ok(Finish::Left | Finish::Asked(_) | Finish::Closed) = &finish {
        // Says good-bye, so that the engine need not find out.
        let _ = timeout(PARTING, socket.close(None)).await;
    }
    finish
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Said(String);

/// A line on stderr in raw mode, where a line feed alone does not return.
fn say(text: &str) {
    let _ = output::stderr_bytes(format!("\r\n[bivouac: {text}]\r\n").as_bytes());
}

async fn connect(client: &Client, target: &Target) -> Result<Socket, Broken> {
    let stream = client.websocket(&target.path()).await?;
    let config = WebSocketConfig::default()
        .max_message_size(Some(MAX_FRAME))
        .max_frame_size(Some(MAX_FRAME));
    let mut socket = WebSocketStream::from_raw_socket(stream, Role::Client, Some(config)).await;
    socket.send(resize()).await.map_err(broke)?;
    Ok(socket)
}

fn resize() -> Message {
    let (cols, rows) = screen::size();
    Message::Text(json!({ "type": "resize", "cols": cols, "rows": rows }).to_string().into())
}

fn broke(error: impl std::error::Error + Send + Sync + 'static) -> Broken {
    let failure: Failure =
        anyhow::Error::new(error).context("the connection to the engine broke").into();
    Broken::Now(failure)
}

/// Finds the engine again, wherever it is then.
async fn reconnect(client: &mut Client, target: &Target) -> Outcome<Socket> {
    let give_up = Instant::now() + PATIENCE;
    loop {
        sleep(Duration::from_millis(250)).await;
        if let Ok(again) = client.find_again() {
            *client = again;
        }
        match connect(client, target).await {
            Ok(socket) => return Ok(socket),
            Err(Broken::For(failure)) => return Err(failure),
            Err(Broken::Now(failure)) if Instant::now() >= give_up => return Err(failure),
            Err(Broken::Now(_)) => {}
        }
    }
}

/// What comes from this side.
struct Here {
    resized: Signal,
    quit: Signal,
    keys: mpsc::Receiver<Bytes>,
    escapes: Escapes,
}

/// Carries one connection.
async fn carry(
    socket: &mut Socket,
    target: &mut Target,
    here: &mut Here,
    signals: &mut Signals,
) -> Result<Finish, Broken> {
    loop {
        tokio::select! {
            frame = timeout(SILENCE, socket.next()) => {
                let frame = match frame {
                    Ok(Some(Ok(frame))) => frame,
                    Ok(Some(Err(error))) => return Err(broke(error)),
                    Ok(None) => return Err(broke(io::Error::from(io::ErrorKind::UnexpectedEof))),
                    Err(silent) => return Err(broke(silent)),
                };
                if let Some(exit) = shown(frame, target).await? {
                    return Ok(Finish::Exit(exit));
                }
            }
            keys = here.keys.recv() => {
                let Some(keys) = keys else { return Ok(Finish::Closed) };
                let (keys, left) = here.escapes.filter(&keys);
                if !keys.is_empty() {
                    socket.send(Message::Binary(keys.into())).await.map_err(broke)?;
                }
                if left {
                    return Ok(Finish::Left);
                }
            }
            _ = here.resized.recv() => socket.send(resize()).await.map_err(broke)?,
            _ = here.quit.recv() => return Ok(Finish::Asked(Ask::Terminate)),
            ask = signals.next() => return Ok(Finish::Asked(ask)),
        }
    }
}

/// Takes a frame of the engine; answers its last one.
async fn shown(frame: Message, target: &mut Target) -> Result<Option<Value>, Broken> {
    match frame {
        Message::Binary(bytes) => {
            if let Seen::Place { skip, .. } = &mut target.seen {
                *skip += bytes.len() as u64;
            }
            put(bytes).await?;
        }
        Message::Text(text) => {
            let said: Value = serde_json::from_str(&text)
                .explain(|| "the engine sent what is no frame of a terminal".to_owned())?;
            match said["type"].as_str().unwrap_or_default() {
                "at" => {
                    let field = |name: &str| said[name].as_u64().unwrap_or(0);
                    target.seen = Seen::Place { at: field("at"), skip: field("skip") };
                }
                "cut" => say("output is missing here"),
                "exit" => return Ok(Some(said)),
                _ => {}
            }
        }
        Message::Close(frame) => {
            let reason = frame.map(|frame| frame.reason.to_string()).unwrap_or_default();
            if reason.is_empty() {
                return Err(broke(io::Error::from(io::ErrorKind::UnexpectedEof)));
            }
            let reason = output::printable(&reason);
            return Err(Broken::For(Failure::new(format!("the engine ended it: {reason}"))));
        }
        Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
    }
    Ok(None)
}

/// Writes without holding up signals.
async fn put(bytes: Bytes) -> Result<(), Broken> {
    let written = tokio::task::spawn_blocking(move || output::stdout_bytes(&bytes)).await;
    let written = written.explain(|| "could not write to standard output".to_owned())?;
    match written {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Err(Failure::from(output::Closed).into())
        }
        Err(error) => {
            let error = anyhow::Error::new(error).context("could not write to standard output");
            Err(Failure::from(error).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        let terminal = json!({ "sessionId": "sbx_1", "command": { "id": "cmd_1" } });
        Target::new(&terminal, Some(100)).unwrap()
    }

    #[tokio::test]
    async fn places_are_counted() {
        let mut target = target();
        assert!(target.path().ends_with("cmd_1/attach?scrollback=100"), "{}", target.path());
        let text = |value: Value| Message::Text(value.to_string().into());
        let at = text(json!({ "type": "at", "at": 26, "skip": 3 }));
        shown(at, &mut target).await.ok().unwrap();
        shown(Message::Binary(Bytes::from_static(b"")), &mut target).await.ok().unwrap();
        if let Seen::Place { skip, .. } = &mut target.seen {
            *skip += 4;
        }
        assert!(target.path().ends_with("?at=26&skip=7"), "{}", target.path());
        let exit = text(json!({ "type": "exit", "code": 3 }));
        let exit = shown(exit, &mut target).await.ok().unwrap().unwrap();
        assert_eq!(Finish::Exit(exit).status().unwrap(), ExitStatus::External(3));
        assert!(Finish::Exit(json!({ "code": null })).status().is_err());
        assert!(shown(text(json!([])), &mut target).await.is_ok());
        assert!(shown(Message::Text("x".into()), &mut target).await.is_err());
    }
}
