//! Streams of JSON lines: a command's output on its way to a client.
//!
//! Owns: the records of reference/vercel-api.md §2.9. Invariants, each a trap of a real client:
//! * the content type is exactly `application/x-ndjson`;
//! * a line is ASCII: the official SDK decodes piece by piece and would tear a longer character;
//! * a character, and with it a surrogate pair, is never spread over two records: the bytes of an
//!   incomplete one wait for the stream's next piece. What is no UTF-8 is replaced, the same way
//!   however the output was cut into pieces;
//! * a silent command still sends a blank line now and then, so that nobody on the way gives up.
//!
//! Dropping the stream frees everything that it holds; the command runs on.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bivouac_engine::{Error, Output};
use bivouac_types::command::{Command, EndReason, Stream as Which};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::{self, Stream};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

use super::error::ApiError;
use super::views::{CommandBody, CommandView};

/// How long a stream may be silent before it sends a blank line.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The only content type that the official SDK takes for a stream.
const CONTENT_TYPE: &str = "application/x-ndjson";
/// What a reader sees on stderr where output is missing.
const CUT_NOTE: &str =
    "bivouac: output is missing from here on: the session's log space is used up\n";

/// Pieces of output and how they end.
pub(crate) type Source = Pin<Box<dyn Stream<Item = Result<Output, Error>> + Send>>;

/// How the bytes of a command are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// As text, what is no UTF-8 replaced.
    Text,
    /// As base64: exact.
    Base64,
}

/// Which records a stream has.
#[derive(Debug)]
pub(crate) enum Frame {
    /// The command first, its end last, as a blocking run has it.
    Run {
        /// The command as it began.
        begun: Box<CommandView>,
        /// Fields are called as in `/v1`.
        v1: bool,
    },
    /// Output alone, as the log has it.
    Log,
}

/// Answers with the records of `source`.
pub(crate) fn respond(source: Source, frame: Frame, encoding: Encoding) -> Response {
    let body = Body::from_stream(records(source, frame, encoding, KEEP_ALIVE));
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn records(
    source: Source,
    frame: Frame,
    encoding: Encoding,
    keep_alive: Duration,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    let mut writer = Writer::new(encoding);
    let run = match frame {
        Frame::Run { begun, v1 } => {
            writer.v1 = v1;
            writer.push_json(&CommandBody { command: *begun });
            true
        }
        Frame::Log => false,
    };
    stream::unfold((source, writer), move |(mut source, mut writer)| async move {
        loop {
            if let Some(line) = writer.ready.pop_front() {
                return Some((Ok(line), (source, writer)));
            }
            if writer.ended {
                return None;
            }
            // `source` keeps its pending work in itself: giving up a wait loses nothing.
            match tokio::time::timeout(keep_alive, source.next()).await {
                Err(_) => writer.ready.push_back(Bytes::from_static(b"\n")),
                Ok(item) => writer.take(item, run),
            }
        }
    })
}

/// Turns pieces into lines.
struct Writer {
    encoding: Encoding,
    v1: bool,
    stdout: Utf8Carry,
    stderr: Utf8Carry,
    ready: VecDeque<Bytes>,
    ended: bool,
}

impl Writer {
    fn new(encoding: Encoding) -> Self {
        let (stdout, stderr) = (Utf8Carry::default(), Utf8Carry::default());
        Self { encoding, v1: false, stdout, stderr, ready: VecDeque::new(), ended: false }
    }

    fn take(&mut self, item: Option<Result<Output, Error>>, run: bool) {
        match item {
            Some(Ok(Output::Data { stream, bytes })) => self.data(stream, &bytes),
            Some(Ok(Output::Cut)) => self.cut(),
            Some(Ok(Output::End(command))) => self.end(&command, run),
            Some(Err(error)) => {
                let error = ApiError::from(error);
                self.flush();
                self.error(error.code(), error.message());
            }
            None => {
                self.flush();
                let message = "The stream of the command's output broke off; read its logs again.";
                self.error("sandbox_stream_closed", message);
            }
        }
    }

    fn data(&mut self, which: Which, bytes: &[u8]) {
        match self.encoding {
            Encoding::Base64 => {
                let mut line = open_record(which);
                line.push('"');
                STANDARD.encode_string(bytes, &mut line);
                line.push_str("\",\"encoding\":\"base64\"}\n");
                self.ready.push_back(line.into());
            }
            Encoding::Text => {
                let text = self.carry(which).push(bytes);
                self.text(which, &text);
            }
        }
    }

    fn carry(&mut self, which: Which) -> &mut Utf8Carry {
        match which {
            Which::Stdout => &mut self.stdout,
            Which::Stderr => &mut self.stderr,
        }
    }

    fn text(&mut self, which: Which, text: &str) {
        if !text.is_empty() {
            let mut line = open_record(which).into_bytes();
            write_ascii(&mut line, text);
            line.extend_from_slice(b"}\n");
            self.ready.push_back(line.into());
        }
    }

    /// What waited for the rest of a character will not get it any more.
    fn flush(&mut self) {
        for which in [Which::Stdout, Which::Stderr] {
            let text = self.carry(which).finish();
            self.text(which, &text);
        }
    }

    fn cut(&mut self) {
        match self.encoding {
            Encoding::Base64 => self.ready.push_back(Bytes::from_static(b"{\"stream\":\"cut\"}\n")),
            Encoding::Text => {
                self.flush();
                self.text(Which::Stderr, CUT_NOTE);
            }
        }
    }

    fn end(&mut self, command: &Command, run: bool) {
        self.flush();
        self.ended = true;
        if !run {
            return;
        }
        let end = command.end.as_ref();
        match end.and_then(|e| e.reason) {
            // Clients take a last command record for the program's own end, so these have none.
            Some(EndReason::SandboxStopped) => {
                let id = &command.session_id;
                let message = format!("Sandbox session {id} was stopped while the command ran.");
                self.error("sandbox_stopped", &message);
            }
            _ if end.is_none_or(|e| e.exit_code.is_none()) => {
                let message = "The sandbox session was lost; how the command ended is not known.";
                self.error("sandbox_stream_closed", message);
            }
            _ => {
                let view = CommandView::from(command);
                let command = if self.v1 { view.v1() } else { view };
                self.push_json(&CommandBody { command });
            }
        }
    }

    fn error(&mut self, code: &str, message: &str) {
        self.ended = true;
        let data = serde_json::json!({"code": code, "message": message});
        self.push_json(&serde_json::json!({"stream": "error", "data": data}));
    }

    fn push_json(&mut self, value: &impl Serialize) {
        let mut line = Vec::new();
        write_ascii(&mut line, value);
        line.push(b'\n');
        self.ready.push_back(line.into());
    }
}

/// `{"stream":"…","data":`: a record up to its data.
fn open_record(which: Which) -> String {
    match which {
        Which::Stdout => "{\"stream\":\"stdout\",\"data\":".to_owned(),
        Which::Stderr => "{\"stream\":\"stderr\",\"data\":".to_owned(),
    }
}

/// Decodes a stream of bytes piece by piece; the texts together are `from_utf8_lossy` of the whole.
#[derive(Debug, Default)]
pub(crate) struct Utf8Carry {
    /// Begin of a character: at most three bytes.
    tail: Vec<u8>,
}

impl Utf8Carry {
    /// Everything that is decided by now.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        let joined;
        let mut rest = if self.tail.is_empty() {
            bytes
        } else {
            joined = [self.tail.as_slice(), bytes].concat();
            self.tail.clear();
            joined.as_slice()
        };
        let mut out = String::with_capacity(rest.len());
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    return out;
                }
                Err(error) => {
                    let (good, bad) = rest.split_at(error.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(good));
                    let Some(length) = error.error_len() else {
                        self.tail.extend_from_slice(bad);
                        return out;
                    };
                    out.push(char::REPLACEMENT_CHARACTER);
                    rest = &bad[length..];
                }
            }
        }
    }

    /// The end: what is incomplete stays so.
    pub(crate) fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.tail)).into_owned()
    }
}

/// JSON in ASCII: every other character as `\uXXXX`.
fn write_ascii(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    let mut serializer = Serializer::with_formatter(out, Ascii);
    // A vector takes every write, and our records have only text keys.
    if let Err(error) = value.serialize(&mut serializer) {
        tracing::error!(%error, "a record could not be written as JSON");
    }
}

/// A record of a stream, in ASCII, with its line end.
pub(super) fn json_line(value: &impl Serialize) -> Bytes {
    let mut line = Vec::new();
    write_ascii(&mut line, value);
    line.push(b'\n');
    line.into()
}

struct Ascii;

impl Formatter for Ascii {
    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut rest = fragment;
        while let Some(at) = rest.bytes().position(|b| !b.is_ascii()) {
            let (plain, other) = rest.split_at(at);
            writer.write_all(plain.as_bytes())?;
            let end = other.bytes().position(|b| b.is_ascii()).unwrap_or(other.len());
            let (other, after) = other.split_at(end);
            for unit in other.encode_utf16() {
                write!(writer, "\\u{unit:04x}")?;
            }
            rest = after;
        }
        writer.write_all(rest.as_bytes())
    }
}

/// Streams a JSON answer that may take long: headers at once, then white space as keep-alive, then
/// the value. Clients give up after five minutes without headers.
pub(crate) fn late_json<T, F>(answer: F) -> Response
where
    T: Serialize + Send + 'static,
    F: Future<Output = Result<T, Error>> + Send + 'static,
{
    let body = Body::from_stream(late(answer, KEEP_ALIVE));
    let mut response = body.into_response();
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

fn late<T, F>(
    answer: F,
    keep_alive: Duration,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send
where
    T: Serialize + Send + 'static,
    F: Future<Output = Result<T, Error>> + Send + 'static,
{
    let space = || Bytes::from_static(b" ");
    let first = stream::once(async move { Ok(space()) });
    let rest = stream::unfold(Some(Box::pin(answer)), move |pending| async move {
        let mut answer = pending?;
        let Ok(result) = tokio::time::timeout(keep_alive, &mut answer).await else {
            return Some((Ok(space()), Some(answer)));
        };
        let mut out = Vec::new();
        match result {
            Ok(value) => write_ascii(&mut out, &value),
            // The status line is gone; the body is what is left to say it.
            Err(error) => write_ascii(&mut out, &ApiError::from(error).into_body()),
        }
        Some((Ok(out.into()), None))
    });
    first.chain(rest)
}

#[cfg(test)]
mod tests;
