//! `bivouac version`.

use serde_json::json;

use super::args::Global;
use super::failure::{ExitStatus, Outcome};
use super::output;

/// Prints this executable's version.
pub(crate) fn run(global: &Global) -> Outcome {
    let version = env!("CARGO_PKG_VERSION");
    if global.json {
        output::json(&json!({ "version": version }))?;
    } else {
        output::line(&format!("bivouac {version}"))?;
    }
    Ok(ExitStatus::Success)
}
