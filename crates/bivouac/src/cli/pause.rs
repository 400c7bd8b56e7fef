//! `bivouac pause`: sandboxes stand still, with their memory.

use serde_json::{Value, json};

use super::args::{Global, Pause};
use super::client::Client;
use super::failure::Outcome;
use super::snapshot::size;
use super::{each, output};

/// Pauses each. A paused one stays so.
pub(crate) async fn run(global: &Global, args: &Pause) -> Outcome {
    let client = Client::find(global)?;
    each(global, &args.names, async |name| pause(&client, global, name, args.deep).await).await
}

async fn pause(client: &Client, global: &Global, name: &str, deep: bool) -> Outcome<Value> {
    let path = format!("/bivouac/v1/sandboxes/{name}/pause");
    let answer = client.post(&path, &client.scope(), &json!({ "deep": deep })).await?;
    if !global.json {
        match answer["pagedOutBytes"].as_u64() {
            Some(bytes) => {
                output::progress(&format!("paused {name}, {} of it in swap", size(bytes)));
            }
            None => output::progress(&format!("paused {name}")),
        }
    }
    Ok(answer)
}
