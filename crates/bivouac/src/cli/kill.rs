//! `bivouac kill`: a signal for a command.

use serde_json::json;

use super::args::{Global, Kill};
use super::client::Client;
use super::failure::{ExitStatus, Outcome};
use super::{output, parse, sandbox};

/// Sends it to the command's process group. A command that has ended is left alone.
pub(crate) async fn run(global: &Global, args: Kill) -> Outcome {
    let client = Client::find(global)?;
    let (session, _) = sandbox::find_command(&client, &args.name, Some(&args.command)).await?;
    let path = format!("/v2/sandboxes/sessions/{session}/cmd/{}/kill", args.command);
    let answer = client.post(&path, &client.scope(), &json!({ "signal": args.signal })).await?;
    if global.json {
        output::json(&answer["command"])?;
    } else {
        output::progress(&format!("sent {} to {}", parse::signal_name(args.signal), args.command));
    }
    Ok(ExitStatus::Success)
}
