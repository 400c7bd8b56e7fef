//! `bivouac resize`: what a sandbox may use, from its next start on.

use serde_json::json;

use super::args::{Global, Resize};
use super::client::Client;
use super::failure::{ExitStatus, Failure, Outcome};
use super::snapshot::size;
use super::{output, sandbox};

/// Changes it. A session that runs has what it was started with until it ends.
pub(crate) async fn run(global: &Global, args: Resize) -> Outcome {
    let client = Client::find(global)?;
    let name = &args.name;
    let view = sandbox::get(&client, name).await?;
    let present = sandbox::vcpus(&view)?;
    let Some(resources) = sandbox::resources(args.vcpus, args.disk, present) else {
        return Err(Failure::usage("nothing to change: give --disk or --vcpus"));
    };
    let body = json!({ "resources": resources });
    let answer = client.patch(&sandbox::path(name), &client.scope(), &body).await?;
    if global.json {
        output::json(&answer)?;
        return Ok(ExitStatus::Success);
    }
    let of = &answer["sandbox"];
    let disk = of["diskBytes"].as_u64().map_or("the engine's".to_owned(), size);
    let vcpus = of["vcpus"].as_i64().unwrap_or(present);
    output::progress(&format!("{name}: {vcpus} vcpus, disk {disk}, from its next start on"));
    if of["status"] == "running" {
        output::hint(&format!("it runs: bivouac stop {name} && bivouac start {name}"));
    }
    Ok(ExitStatus::Success)
}
