//! `bivouac stop`: the end of a session; a persistent sandbox keeps its files.

use serde_json::{Value, json};

use super::args::{Global, Stop};
use super::client::Client;
use super::each;
use super::failure::Outcome;
use super::{output, sandbox};

/// Stops each; answers when they are stopped. A stopped one stays so.
pub(crate) async fn run(global: &Global, args: &Stop) -> Outcome {
    let client = Client::find(global)?;
    each(global, &args.names, async |name| stop(&client, global, name, !args.no_hook).await).await
}

async fn stop(client: &Client, global: &Global, name: &str, hook: bool) -> Outcome<Value> {
    let session = sandbox::session_id(&sandbox::get(client, name).await?)?;
    let path = format!("/v2/sandboxes/sessions/{session}/stop");
    let answer = client.post(&path, &client.scope(), &json!({ "hook": hook })).await?;
    if !global.json {
        match answer.pointer("/snapshot/id").and_then(Value::as_str) {
            Some(snapshot) => output::progress(&format!("stopped {name}, kept as {snapshot}")),
            None => output::progress(&format!("stopped {name}")),
        }
        if let Some(reason) = answer.pointer("/session/reason").and_then(Value::as_str) {
            output::progress(&format!("{name}: {reason}"));
        }
    }
    Ok(answer)
}
