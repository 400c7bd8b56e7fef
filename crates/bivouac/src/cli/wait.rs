//! `bivouac wait`: until a command has ended, then its code.

use super::args::{Global, Wait};
use super::client::Client;
use super::failure::Outcome;
use super::{output, sandbox, stream};

/// Waits and ends with the command's own code.
pub(crate) async fn run(global: &Global, args: Wait) -> Outcome {
    let client = Client::find(global)?;
    let (session, command) =
        sandbox::find_command(&client, &args.name, args.command.as_deref()).await?;
    let id = sandbox::text(&command, "/id")?;
    let path = format!("/v2/sandboxes/sessions/{session}/cmd/{id}");
    let answer = client.get(&path, &client.scope().with("wait", "true")).await?;
    let command = &answer["command"];
    if global.json {
        output::json(command)?;
    }
    stream::ended(command)
}
