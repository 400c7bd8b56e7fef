//! The engine's log: lines on stderr, filtered by `BIVOUAC_LOG`.

use std::io::IsTerminal as _;

use anyhow::Context as _;
use tracing_subscriber::EnvFilter;

/// Starts logging. Text for people, or one JSON object per line.
///
/// # Errors
/// `BIVOUAC_LOG` is not a filter.
pub(super) fn init(json: bool) -> anyhow::Result<()> {
    let filter = match std::env::var("BIVOUAC_LOG") {
        Ok(filter) if !filter.trim().is_empty() => EnvFilter::try_new(&filter)
            .with_context(|| format!("BIVOUAC_LOG: '{filter}' is no filter"))?,
        _ => EnvFilter::new("info"),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let done = if json {
        builder.json().try_init()
    } else {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        builder.with_ansi(!plain && std::io::stderr().is_terminal()).try_init()
    };
    done.map_err(|error| anyhow::anyhow!("could not start the log: {error}"))
}
