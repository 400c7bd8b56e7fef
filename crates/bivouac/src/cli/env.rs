//! `bivouac env`: what points unmodified clients at the engine.

use super::args::{EnvFormat, EnvVars, Global};
use super::client;
use super::failure::{ExitStatus, Explain as _, Outcome};
use super::output;
use crate::env::{Format, Settings, default_cache_dir, install_shim, render};

/// Prints the variables. Without a readable token it fails.
pub(crate) fn run(global: &Global, args: &EnvVars) -> Outcome {
    let endpoint = client::find(global)?;
    let own = |name: &str| std::env::var(name).ok();
    let cache = default_cache_dir(own);
    let shim = install_shim(cache.as_deref())
        .explain(|| "could not write the Node shim into the cache folder".to_owned())?;
    let settings = Settings {
        url: endpoint.url,
        token: endpoint.token,
        team: global.namespace.team.clone(),
        project: global.namespace.project.clone(),
    };
    let format = match args.format {
        Some(EnvFormat::Sh) => Format::Sh,
        Some(EnvFormat::Json) => Format::Json,
        None if global.json => Format::Json,
        None => Format::Sh,
    };
    let text = render(&settings, format, own("NODE_OPTIONS").as_deref(), &shim);
    output::line(text.trim_end())?;
    Ok(ExitStatus::Success)
}
