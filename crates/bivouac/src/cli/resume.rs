//! `bivouac resume`: paused sandboxes go on where they stood.

use serde_json::{Value, json};

use super::args::Global;
use super::client::Client;
use super::failure::Outcome;
use super::{each, output};

/// Lets each go on. One that is not paused goes on anyway.
pub(crate) async fn run(global: &Global, names: &[String]) -> Outcome {
    let client = Client::find(global)?;
    each(global, names, async |name| resume(&client, global, name).await).await
}

async fn resume(client: &Client, global: &Global, name: &str) -> Outcome<Value> {
    let path = format!("/bivouac/v1/sandboxes/{name}/unpause");
    let answer = client.post(&path, &client.scope(), &json!({})).await?;
    if !global.json {
        output::progress(&format!("{name} goes on"));
    }
    Ok(answer)
}
