//! Reads the streams of `cmd` and `logs`: one JSON record per line, output as base64.
//!
//! Invariant: bytes come out exactly as the command wrote them; a record that is longer than
//! [`MAX_LINE`] or not understood is an error, not a guess. Used by `cli::stream`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use reqwest::Response;
use serde_json::Value;

/// No record of the engine comes near this (a piece of output has 256 KiB at most).
const MAX_LINE: usize = 8 << 20;

/// Which output a piece belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

/// One record.
#[derive(Debug, PartialEq)]
pub(crate) enum Record {
    /// The command as it is now: the first and the last record of a run.
    Command(Value),
    /// A piece of output.
    Data(Stream, Bytes),
    /// Output is missing from here on.
    Cut,
    /// The stream ends here, for this reason.
    Error {
        /// Stable word.
        code: String,
        /// Sentence for the user.
        message: String,
    },
}

/// Why a stream gave no further record.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    /// The connection broke.
    #[error("the stream from the engine broke")]
    Broken(#[source] reqwest::Error),
    /// A record is not the API's.
    #[error("the engine sent a record that this version does not understand: {0}")]
    Record(String),
}

/// The records of one answer.
#[derive(Debug)]
pub(crate) struct Records {
    body: Body,
    buffer: BytesMut,
    /// Bytes of `buffer` that hold no newline.
    seen: usize,
    ended: bool,
}

struct Body(futures_util::stream::BoxStream<'static, reqwest::Result<Bytes>>);

impl std::fmt::Debug for Body {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Body")
    }
}

impl Records {
    /// The records of a streamed answer.
    pub(crate) fn new(response: Response) -> Self {
        let body = Body(response.bytes_stream().boxed());
        Self { body, buffer: BytesMut::new(), seen: 0, ended: false }
    }

    /// The next record; `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<Record>, StreamError> {
        self.whole_line().await?.map(|line| parse(&line)).transpose()
    }

    /// The next line that is not blank; `None` at the end.
    async fn whole_line(&mut self) -> Result<Option<Bytes>, StreamError> {
        loop {
            while let Some(line) = self.line() {
                if !line.trim_ascii().is_empty() {
                    return Ok(Some(line));
                }
            }
            if self.buffer.len() > MAX_LINE {
                return Err(StreamError::Record(format!("a line of over {MAX_LINE} bytes")));
            }
            match self.body.0.next().await {
                Some(Ok(bytes)) => self.buffer.extend_from_slice(&bytes),
                Some(Err(error)) => return Err(StreamError::Broken(error.without_url())),
                None if self.ended => return Ok(None),
                // The last line may come without a newline.
                None => {
                    self.ended = true;
                    self.buffer.extend_from_slice(b"\n");
                }
            }
        }
    }

    fn line(&mut self) -> Option<Bytes> {
        let fresh = &self.buffer[self.seen..];
        if let Some(at) = fresh.iter().position(|byte| *byte == b'\n') {
            let line = self.buffer.split_to(self.seen + at + 1).freeze();
            self.seen = 0;
            return Some(line);
        }
        self.seen = self.buffer.len();
        None
    }
}

/// The lines of an answer that are not a command's records.
#[derive(Debug)]
pub(crate) struct Lines(Records);

impl Lines {
    /// The lines of a streamed answer.
    pub(crate) fn new(response: Response) -> Self {
        Self(Records::new(response))
    }

    /// The next one; `None` at the end.
    pub(crate) async fn next(&mut self) -> Result<Option<Value>, StreamError> {
        let line = self.0.whole_line().await?;
        let read = |line: Bytes| {
            serde_json::from_slice(&line).map_err(|error| StreamError::Record(error.to_string()))
        };
        line.map(read).transpose()
    }
}

fn parse(line: &[u8]) -> Result<Record, StreamError> {
    let mut value: Value =
        serde_json::from_slice(line).map_err(|error| StreamError::Record(error.to_string()))?;
    if let Some(command) = value.get_mut("command").filter(|command| command.is_object()) {
        return Ok(Record::Command(command.take()));
    }
    let data = &value["data"];
    let stream = match value["stream"].as_str() {
        Some("stdout") => Stream::Stdout,
        Some("stderr") => Stream::Stderr,
        Some("cut") => return Ok(Record::Cut),
        Some("error") => {
            let word = |name: &str| data[name].as_str().unwrap_or_default().to_owned();
            return Ok(Record::Error { code: word("code"), message: word("message") });
        }
        other => return Err(StreamError::Record(format!("stream {other:?}"))),
    };
    let text =
        data.as_str().ok_or_else(|| StreamError::Record("output without data".to_owned()))?;
    let bytes = if value["encoding"].as_str() == Some("base64") {
        STANDARD.decode(text).map_err(|error| StreamError::Record(error.to_string()))?
    } else {
        text.as_bytes().to_vec()
    };
    Ok(Record::Data(stream, bytes.into()))
}

/// Bytes of one stream as text, piece by piece: a character that is split over two pieces stays
/// whole, what is no UTF-8 becomes U+FFFD.
#[derive(Debug, Default)]
pub(crate) struct Text {
    pending: Vec<u8>,
}

impl Text {
    /// The text that is complete with this piece.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let keep = match self.pending.utf8_chunks().last() {
            // An unfinished character at the very end waits for the rest of it.
            Some(chunk) if !chunk.invalid().is_empty() && unfinished(chunk.invalid()) => {
                chunk.invalid().len()
            }
            _ => 0,
        };
        let rest = self.pending.split_off(self.pending.len() - keep);
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending = rest;
        text
    }

    /// What is left at the end of the stream.
    pub(crate) fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

fn unfinished(tail: &[u8]) -> bool {
    std::str::from_utf8(tail).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn records(pieces: &[&str]) -> Result<Vec<Record>, StreamError> {
        let pieces: Vec<reqwest::Result<Bytes>> =
            pieces.iter().map(|piece| Ok(Bytes::copy_from_slice(piece.as_bytes()))).collect();
        let body = Body(futures_util::stream::iter(pieces).boxed());
        let mut records = Records { body, buffer: BytesMut::new(), seen: 0, ended: false };
        let mut all = Vec::new();
        while let Some(record) = records.next().await? {
            all.push(record);
        }
        Ok(all)
    }

    fn out(text: &[u8]) -> Record {
        Record::Data(Stream::Stdout, Bytes::copy_from_slice(text))
    }

    #[tokio::test]
    async fn lines_are_found_wherever_the_pieces_end() {
        let text = "{\"command\":{\"id\":\"cmd_1\"}}\n\n\r\n{\"stream\":\"stdout\",\"data\":\"aGkA/w==\",\
            \"encoding\":\"base64\"}\r\n{\"stream\":\"stderr\",\"data\":\"x\"}\n{\"stream\":\"cut\"}";
        let whole = records(&[text]).await.unwrap();
        assert_eq!(whole.len(), 4);
        assert_eq!(whole[1], out(b"hi\0\xff"));
        assert_eq!(whole[3], Record::Cut);
        for at in 1..text.len() {
            let (a, b) = text.split_at(at);
            assert_eq!(records(&[a, b]).await.unwrap(), whole, "cut at {at}");
        }
    }

    #[tokio::test]
    async fn foreign_records_are_refused() {
        for bad in [
            "{}",
            "nonsense",
            "{\"stream\":\"x\",\"data\":\"\"}",
            "{\"stream\":\"stdout\"}",
            "{\"stream\":\"stdout\",\"data\":\"%\",\"encoding\":\"base64\"}",
            "[]",
        ] {
            assert!(records(&[bad]).await.is_err(), "{bad}");
        }
        let error =
            records(&["{\"stream\":\"error\",\"data\":{\"code\":\"c\",\"message\":\"m\"}}"]).await;
        assert_eq!(
            error.unwrap(),
            [Record::Error { code: "c".to_owned(), message: "m".to_owned() }]
        );
    }

    #[test]
    fn text_keeps_split_characters_whole() {
        let whole = "aé漢🦀z".as_bytes();
        for at in 0..=whole.len() {
            let mut text = Text::default();
            let mut got = text.push(&whole[..at]);
            got += &text.push(&whole[at..]);
            got += &text.finish();
            assert_eq!(got.as_bytes(), whole, "cut at {at}");
        }
        let mut text = Text::default();
        assert_eq!(text.push(b"a\xff\xe6\xbc"), "a\u{fffd}");
        assert_eq!(text.push(b"b"), "\u{fffd}b");
        assert_eq!(text.push(b"\xf0\x9f"), "");
        assert_eq!(text.finish(), "\u{fffd}");
    }
}
