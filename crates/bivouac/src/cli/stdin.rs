//! This process's standard input, passed to a command in a sandbox.
//!
//! Invariant: every byte is sent with its offset, so a call that is repeated after a broken
//! connection delivers nothing twice. Used by `cli::stream`.

use std::io::{self, Read as _};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf as _, Bytes};
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use super::client::{CallError, Client};
use super::stream::PATIENCE;
use super::{failure::Failure, output};

/// Bytes per call: well under the API's limit once they are base64.
const PIECE: usize = 256 << 10;

/// Whether standard input has something to pass: a pipe, a file or a socket, but neither a
/// terminal nor `/dev/null` nor nothing at all.
pub(crate) fn is_piped() -> bool {
    use rustix::fs::FileType;
    let Ok(stat) = rustix::fs::fstat(io::stdin()) else { return false };
    let kind = FileType::from_raw_mode(stat.st_mode);
    matches!(kind, FileType::Fifo | FileType::RegularFile | FileType::Socket)
}

/// Reads standard input to its end and posts it to `path`. Ends early, without a word, when the
/// command does not take any more.
pub(super) async fn feed(mut client: Client, path: String) {
    let mut pieces = reader();
    let mut offset = 0u64;
    while let Some(mut piece) = pieces.recv().await {
        while !piece.is_empty() {
            let body = json!({ "data": STANDARD.encode(&piece), "offset": offset });
            match send(&mut client, &path, &body).await {
                Sent::Received(total) => {
                    let fresh = total.saturating_sub(offset);
                    let fresh = usize::try_from(fresh).unwrap_or(usize::MAX).min(piece.len());
                    piece.advance(fresh);
                    offset += fresh as u64;
                }
                Sent::Over => return,
                Sent::Failed(failure) => {
                    output::warning(&format!(
                        "standard input is not passed on any more: {}",
                        failure.summary()
                    ));
                    return;
                }
            }
        }
    }
    let _ = send(&mut client, &path, &json!({ "close": true })).await;
}

enum Sent {
    /// So many bytes arrived since the command's start.
    Received(u64),
    /// The command has ended or closed its input.
    Over,
    Failed(Failure),
}

async fn send(client: &mut Client, path: &str, body: &Value) -> Sent {
    let give_up = Instant::now() + PATIENCE;
    loop {
        let error = match client.post(path, &client.scope(), body).await {
            // An answer without progress would be repeated for ever.
            Ok(answer) => {
                let total = answer["bytesWritten"].as_u64().unwrap_or(0);
                let waits =
                    body["data"].is_string() && total <= body["offset"].as_u64().unwrap_or(0);
                return if waits { Sent::Over } else { Sent::Received(total) };
            }
            Err(error) => error,
        };
        match &error {
            // The program does not read for now; what it took counts.
            CallError::Api(api) if api.status == StatusCode::GATEWAY_TIMEOUT => {
                return Sent::Received(api.body["bytesWritten"].as_u64().unwrap_or(0));
            }
            CallError::Api(api)
                if matches!(api.status, StatusCode::NOT_FOUND | StatusCode::GONE) =>
            {
                return Sent::Over;
            }
            _ if error.is_transport() && Instant::now() < give_up => {
                sleep(Duration::from_millis(250)).await;
                if let Ok(again) = client.find_again() {
                    *client = again;
                }
            }
            _ => return Sent::Failed(error.into()),
        }
    }
}

/// Reads on a thread of its own: a read of a terminal cannot be cancelled, and must not hold up the
/// end of the process.
fn reader() -> mpsc::Receiver<Bytes> {
    let (sender, receiver) = mpsc::channel(2);
    std::thread::spawn(move || {
        let mut input = io::stdin().lock();
        let mut buffer = vec![0u8; PIECE];
        loop {
            match input.read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => {
                    if sender.blocking_send(Bytes::copy_from_slice(&buffer[..count])).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    output::warning(&format!("could not read standard input: {error}"));
                    return;
                }
            }
        }
    });
    receiver
}
