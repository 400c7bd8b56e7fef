//! `bivouac fork`: a sandbox that begins where another one is.

use serde_json::json;

use super::args::{Fork, Global};
use super::client::{Client, random_word};
use super::failure::{ExitStatus, Outcome};
use super::{output, sandbox};

/// Forks and prints the copy's name. The source goes on.
pub(crate) async fn run(global: &Global, args: Fork) -> Outcome {
    let client = Client::find(global)?;
    let body = match &args.name {
        Some(name) => json!({ "name": name }),
        None => json!({}),
    };
    let path = format!("{}/fork", sandbox::path(&args.source));
    let answer = client.post_once(&path, &client.scope(), &body, &random_word()?).await?;
    if global.json {
        output::json(&answer)?;
    } else {
        output::line(&sandbox::text(&answer, "/sandbox/name")?)?;
    }
    Ok(ExitStatus::Success)
}
