//! A terminal over a WebSocket: binary frames are what is typed and what is shown, text frames say the rest.
//!
//! Owns: the frames, their limits, and how it is noticed that nobody is there. Invariant: what is kept of a client
//! is bounded, whoever does not read holds up nobody but himself, and a connection that has been silent for a
//! minute has ended. Called by `interactive` and `own_terminals`.

use std::convert::Infallible;
use std::future::pending;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade};
use bivouac_engine::{Attached, Cursor, Error, ErrorKind, Output, Principal, TerminalInput};
use bivouac_types::command::{Command, CommandEnd};
use bivouac_types::terminal::TtySize;
use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval_at, timeout};

use super::App;
use super::views::explain;

/// Largest frame that a client may send.
const MAX_FRAME: usize = 256 << 10;
/// Frames of a client that wait for a program that does not read.
const WAITING: usize = 16;
/// How often a client is asked whether it is there.
const BEAT: Duration = Duration::from_secs(20);
/// How long it may be silent.
const SILENCE: Duration = Duration::from_secs(60);
/// How long the last frames may take.
const PARTING: Duration = Duration::from_secs(5);
/// How long a terminal without a name outlives a client that has said good-bye.
const FAREWELL: Duration = Duration::from_millis(500);

/// What the code of a close frame says.
mod code {
    pub(super) const NORMAL: u16 = 1000;
    pub(super) const UNSUPPORTED: u16 = 1003;
    pub(super) const POLICY: u16 = 1008;
    pub(super) const ERROR: u16 = 1011;
}

/// What a program's end is told as when nobody knows it, as SSH does.
const UNKNOWN_END: i32 = 255;

/// Which protocol is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// The original's: bytes, and an exit code at the end.
    Original,
    /// Ours: places in the output, what is missing in it, and why it ended.
    Own,
}

/// Sets the limits of a connection that is to become one.
pub(super) fn limited(upgrade: WebSocketUpgrade) -> WebSocketUpgrade {
    upgrade.max_message_size(MAX_FRAME).max_frame_size(MAX_FRAME)
}

/// A text frame of a client.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Said {
    Resize { cols: i64, rows: i64 },
}

/// How a connection ended.
enum Parting {
    /// The client said so.
    Left,
    /// It is not there any more.
    Gone,
    /// It sent what nobody may send.
    Refused(u16, String),
}

/// When something was last heard of a client; absent while what it sent waits for the program.
struct Heard(Mutex<Option<Instant>>);

impl Heard {
    fn set(&self, at: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }

    fn silent(&self) -> bool {
        let at = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        at.is_some_and(|at| at.elapsed() > SILENCE)
    }
}

type Sink = SplitSink<WebSocket, Message>;

/// Carries a terminal until its program has ended or its client has left.
pub(super) async fn carry(
    app: App,
    who: Principal,
    socket: WebSocket,
    mut attached: Attached,
    dialect: Dialect,
) {
    let (mut sink, stream) = socket.split();
    let heard = Heard(Mutex::new(Some(Instant::now())));
    let (typed, typing) = mpsc::channel(WAITING);
    let (sizes, sized) = watch::channel(None);
    let (input, sizing) = (attached.input(), attached.input());
    let parting = {
        let show = show(&mut sink, &mut attached, &heard, dialect);
        let hear = hear(stream, typed, sizes, &heard);
        tokio::select! {
            ended = show => ended,
            parting = hear => Err(parting),
            never = type_in(typing, input) => match never {},
            never = set_sizes(sized, sizing) => match never {},
            () = app.engine.ended(&who) => {
                Err(Parting::Refused(code::POLICY, "The token has ended.".to_owned()))
            }
        }
    };
    match parting {
        Ok(()) => close(&mut sink, code::NORMAL, "").await,
        Err(Parting::Left) => {
            attached.linger(FAREWELL);
            close(&mut sink, code::NORMAL, "").await;
        }
        Err(Parting::Gone) => {}
        Err(Parting::Refused(code, why)) => close(&mut sink, code, &why).await,
    }
}

async fn close(sink: &mut Sink, code: u16, reason: &str) {
    // A reason has 123 bytes at most.
    let mut end = reason.len().min(120);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let frame = CloseFrame { code, reason: reason[..end].into() };
    // Who is gone does not hear it.
    let _ = timeout(PARTING, async {
        sink.send(Message::Close(Some(frame))).await?;
        sink.flush().await
    })
    .await;
}

/// Shows output until the program has ended.
async fn show(
    sink: &mut Sink,
    attached: &mut Attached,
    heard: &Heard,
    dialect: Dialect,
) -> Result<(), Parting> {
    let gone = |_| Parting::Gone;
    if dialect == Dialect::Own {
        let terminal = attached.terminal();
        let hello = json!({ "type": "attached", "terminal": terminal.name,
            "session": terminal.session.to_string(), "command": terminal.command.id.to_string() });
        sink.send(text(&hello)).await.map_err(gone)?;
    }
    let mut beat = interval_at(Instant::now() + BEAT, BEAT);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told: Option<Cursor> = None;
    loop {
        // The place of the next piece, before it: a client counts what comes behind it.
        let place = attached.cursor();
        let next = tokio::select! {
            next = attached.next() => next,
            _ = beat.tick() => {
                if heard.silent() {
                    return Err(Parting::Gone);
                }
                sink.send(Message::Ping(Bytes::new())).await.map_err(gone)?;
                continue;
            }
        };
        match next {
            Some(Ok(Output::Data { bytes, .. })) => {
                if dialect == Dialect::Own {
                    let skip = attached.cursor().skip.saturating_sub(bytes.len() as u64);
                    let here = Cursor { at: attached.cursor().at, skip };
                    if told.is_none_or(|told| told.at != here.at) {
                        let at = json!({ "type": "at", "at": here.at, "skip": here.skip });
                        sink.send(text(&at)).await.map_err(gone)?;
                        told = Some(here);
                    }
                }
                sink.send(Message::Binary(bytes)).await.map_err(gone)?;
            }
            Some(Ok(Output::Cut)) => {
                if dialect == Dialect::Own {
                    sink.send(text(&json!({ "type": "cut" }))).await.map_err(gone)?;
                }
                told = None;
            }
            Some(Ok(Output::End(command))) => {
                tracing::debug!(command = %command.id, at = place.at, "a terminal has ended");
                return bid_farewell(sink, &command, dialect).await;
            }
            Some(Err(error)) => return Err(Parting::Refused(code::ERROR, error.message)),
            None => return Ok(()),
        }
    }
}

async fn bid_farewell(sink: &mut Sink, command: &Command, dialect: Dialect) -> Result<(), Parting> {
    let end = command.end.as_ref();
    let known = end.and_then(|end: &CommandEnd| end.exit_code);
    let reason = end.and_then(|end| end.reason);
    let frame = match dialect {
        Dialect::Original => {
            if let Some(reason) = reason {
                let words = format!("\r\n[{}]\r\n", explain(reason));
                sink.send(Message::Binary(words.into())).await.map_err(|_| Parting::Gone)?;
            }
            json!({ "type": "exit", "code": known.unwrap_or(UNKNOWN_END) })
        }
        Dialect::Own => {
            let mut exit = json!({ "type": "exit", "code": known });
            if let Some(reason) = reason {
                exit["reason"] = serde_json::to_value(reason).unwrap_or(Value::Null);
                exit["reasonText"] = explain(reason).into();
            }
            exit
        }
    };
    sink.send(text(&frame)).await.map_err(|_| Parting::Gone)
}

fn text(value: &Value) -> Message {
    Message::Text(value.to_string().into())
}

/// Says what a client is to know before it is turned away, in the original's frames.
pub(super) async fn turn_away(mut socket: WebSocket, exit: i32, message: &str) {
    let words = format!("bivouac: {message}\r\n");
    let exit = json!({ "type": "exit", "code": exit });
    let close = CloseFrame { code: code::NORMAL, reason: "".into() };
    let all = [Message::Binary(words.into()), text(&exit), Message::Close(Some(close))];
    for frame in all {
        if !matches!(timeout(PARTING, socket.send(frame)).await, Ok(Ok(()))) {
            return;
        }
    }
    // Read on until it is closed from there too, so that nothing of it is lost.
    let rest = async { while let Some(Ok(_)) = socket.recv().await {} };
    let _ = timeout(PARTING, rest).await;
}

/// Ends a connection whose client does not keep to the protocol.
pub(super) async fn refuse(mut socket: WebSocket, reason: &'static str) {
    let close = CloseFrame { code: code::POLICY, reason: reason.into() };
    let _ = timeout(PARTING, socket.send(Message::Close(Some(close)))).await;
}

/// Hears what a client sends until it leaves.
async fn hear(
    mut stream: SplitStream<WebSocket>,
    typed: mpsc::Sender<Bytes>,
    sizes: watch::Sender<Option<TtySize>>,
    heard: &Heard,
) -> Parting {
    while let Some(frame) = stream.next().await {
        let frame = match frame {
            Ok(frame) => frame,
            Err(error) => {
                tracing::debug!(%error, "a terminal's connection broke");
                return Parting::Gone;
            }
        };
        match frame {
            Message::Binary(bytes) => {
                // Waits for a program that does not read; the other half ends this when that one ends.
                heard.set(None);
                if typed.send(bytes).await.is_err() {
                    return Parting::Gone;
                }
            }
            Message::Text(words) => match size(&words) {
                Ok(size) => drop(sizes.send_replace(Some(size))),
                Err(why) => return Parting::Refused(code::UNSUPPORTED, why),
            },
            Message::Close(_) => return Parting::Left,
            Message::Ping(_) | Message::Pong(_) => {}
        }
        heard.set(Some(Instant::now()));
    }
    Parting::Gone
}

fn size(words: &str) -> Result<TtySize, String> {
    let said: Said = serde_json::from_str(words)
        .map_err(|_| "A text frame must be a resize with cols and rows.".to_owned())?;
    let Said::Resize { cols, rows } = said;
    TtySize::new(cols, rows).map_err(|invalid| invalid.to_string())
}

/// Hands on what was typed. Never ends: whether the program has is told by its output.
async fn type_in(mut from: mpsc::Receiver<Bytes>, input: TerminalInput) -> Infallible {
    while let Some(bytes) = from.recv().await {
        note(input.write(bytes).await);
    }
    pending().await
}

/// Sets the last size that was told, also while what was typed waits.
async fn set_sizes(mut from: watch::Receiver<Option<TtySize>>, input: TerminalInput) -> Infallible {
    while from.changed().await.is_ok() {
        let size = *from.borrow_and_update();
        if let Some(size) = size {
            note(input.resize(size).await);
        }
    }
    pending().await
}

/// What goes to a program that has ended is nobody's; all else is for the log.
fn note(done: Result<(), Error>) {
    let over = [ErrorKind::NotFound, ErrorKind::Gone, ErrorKind::Transition];
    if let Err(error) = done
        && !over.contains(&error.kind)
    {
        tracing::debug!(%error, "what was typed at a terminal went nowhere");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sizes_are_said() {
        let good = size(r#"{"type":"resize","cols":120,"rows":40,"more":1}"#);
        assert_eq!(good, Ok(TtySize { cols: 120, rows: 40 }));
        for bad in [
            "",
            "x",
            "[]",
            r#"{"type":"start"}"#,
            r#"{"type":"resize"}"#,
            r#"{"type":"resize","cols":0,"rows":1}"#,
            r#"{"type":"resize","cols":"120","rows":1}"#,
            r#"{"type":"resize","cols":99999999999999999999,"rows":1}"#,
        ] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
