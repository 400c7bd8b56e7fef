//! `bivouac keep-alive`: a sandbox counts as in use.

use serde_json::json;

use super::args::{Global, KeepAlive};
use super::client::Client;
use super::failure::{ExitStatus, Outcome};
use super::parse::millis;
use super::{clock, output};

/// Gives it time, and says how much there is now.
pub(crate) async fn run(global: &Global, args: &KeepAlive) -> Outcome {
    let client = Client::find(global)?;
    let path = format!("/bivouac/v1/sandboxes/{}/keep-alive", args.name);
    let body = match args.duration {
        Some(duration) => json!({ "durationMs": millis(duration) }),
        None => json!({}),
    };
    let answer = client.post(&path, &client.scope(), &body).await?;
    if global.json {
        output::json(&answer)?;
    } else if let Some(at) = answer["expiresAt"].as_i64() {
        let left = clock::span(at - clock::now_ms());
        output::progress(&format!("{} has {left} left", args.name));
    }
    Ok(ExitStatus::Success)
}
