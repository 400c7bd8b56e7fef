//! `bivouac rm`: sandboxes away, running or not.

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::args::{Global, Rm};
use super::client::Client;
use super::each;
use super::failure::Outcome;
use super::{output, sandbox};

/// Deletes each. With `--force` a missing one is no error.
pub(crate) async fn run(global: &Global, args: &Rm) -> Outcome {
    let client = Client::find(global)?;
    each(global, &args.names, async |name| remove(&client, global, args, name).await).await
}

async fn remove(client: &Client, global: &Global, args: &Rm, name: &str) -> Outcome<Value> {
    let mut query = client.scope();
    if args.snapshots {
        query = query.with("deleteOrphanSnapshots", "true");
    }
    match client.delete(&sandbox::path(name), &query).await {
        Ok(answer) => {
            if !global.json {
                output::progress(&format!("deleted {name}"));
            }
            Ok(answer)
        }
        Err(error) if args.force && error.is(StatusCode::NOT_FOUND) => {
            Ok(json!({ "sandbox": { "name": name }, "missing": true }))
        }
        Err(error) => Err(error.into()),
    }
}
