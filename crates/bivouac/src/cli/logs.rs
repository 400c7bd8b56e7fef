//! `bivouac logs`: a command's output, from its start to its end.

use super::args::{Global, Logs};
use super::client::Client;
use super::failure::{ExitStatus, Outcome};
use super::{output, sandbox, stream};

/// Replays and follows. The command's own code is not ours: reading a log succeeded.
pub(crate) async fn run(global: &Global, args: Logs) -> Outcome {
    let client = Client::find(global)?;
    let (session, command) =
        sandbox::find_command(&client, &args.name, args.command.as_deref()).await?;
    let id = sandbox::text(&command, "/id")?;
    if args.command.is_none() && !global.json {
        output::progress(&format!("{id}: {}", output::printable(&sandbox::command_line(&command))));
    }
    stream::follow(&client, &session, &id, global.json).await?;
    Ok(ExitStatus::Success)
}
