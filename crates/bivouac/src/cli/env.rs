//! `bivouac env`: what points unmodified clients at the engine.

use std::path::Path;

use serde_json::Value;

use super::args::{EnvFormat, EnvVars, Global};
use super::client::{self, Client, Query};
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::output;
use crate::env::trust::{Trust, install_trust, unmapped};
use crate::env::{Format, Settings, Way, default_cache_dir, install_shim, render};

/// The system's own list of names.
const HOSTS: &str = "/etc/hosts";

/// Prints the variables. Without a readable token it fails.
pub(crate) async fn run(global: &Global, args: &EnvVars) -> Outcome {
    let endpoint = client::find(global)?;
    let cache = default_cache_dir(own);
    let settings = Settings {
        url: endpoint.url.clone(),
        token: endpoint.token.clone(),
        team: global.namespace.team.clone(),
        project: global.namespace.project.clone(),
    };
    let format = match args.format {
        Some(EnvFormat::Sh) => Format::Sh,
        Some(EnvFormat::Json) => Format::Json,
        None if global.json => Format::Json,
        None => Format::Sh,
    };
    let node_options = own("NODE_OPTIONS");
    let node_options = node_options.as_deref();
    let text = if args.tls {
        let client = Client::at(endpoint, global)?;
        let trust = trust(&client, cache.as_deref()).await?;
        render(&settings, format, node_options, Way::Trust(&trust))
    } else {
        let shim = install_shim(cache.as_deref())
            .explain(|| "could not write the Node shim into the cache folder".to_owned())?;
        render(&settings, format, node_options, Way::Shim(&shim))
    };
    output::line(text.trim_end())?;
    Ok(ExitStatus::Success)
}

fn own(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Asks the engine for its certificate, writes it where clients can read it, and says which lines
/// `/etc/hosts` still lacks.
async fn trust(client: &Client, cache: Option<&Path>) -> Outcome<Trust> {
    let engine = client.get("/bivouac/v1/engine", &Query::default()).await?;
    let told = &engine["clientsTls"];
    let (Some(ca), Some(address)) = (told["ca"].as_str(), told["address"].as_str()) else {
        return Err(Failure::new("this engine does not serve clients over TLS")
            .hint("start it with: bivouac serve --clients-tls; or leave --tls out: the shim for Node needs none"));
    };
    let trust = install_trust(cache, ca, own)
        .explain(|| "could not write the certificates into the cache folder".to_owned())?;
    let names: Vec<String> = told["hosts"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect();
    let address = address.rsplit_once(':').map_or(address, |(address, _)| address);
    // Not there is as good as empty; the clients' resolver thinks so too.
    let hosts = std::fs::read_to_string(HOSTS).unwrap_or_default();
    let missing = unmapped(&hosts, address, &names);
    if !missing.is_empty() {
        output::hint(&format!("{HOSTS} needs the line: {address} {}", missing.join(" ")));
    }
    Ok(trust)
}
