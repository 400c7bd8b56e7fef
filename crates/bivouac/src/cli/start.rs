//! `bivouac start`: a new session of a stopped sandbox, from its last state.

use serde_json::Value;

use super::args::Global;
use super::client::Client;
use super::each;
use super::failure::Outcome;
use super::{output, sandbox};

/// Starts each; answers when they run. A running one goes on.
pub(crate) async fn run(global: &Global, names: &[String]) -> Outcome {
    let client = Client::find(global)?;
    each(global, names, async |name| start(&client, global, name).await).await
}

async fn start(client: &Client, global: &Global, name: &str) -> Outcome<Value> {
    let answer = sandbox::resume(client, name).await?;
    if answer["resumed"] != true && !global.json {
        output::progress(&format!("{name} is running already"));
    }
    Ok(answer)
}
