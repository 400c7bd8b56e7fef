//! `bivouac serve`: the engine in the foreground.

use super::args::{Global, Serve};
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use crate::config::{ConfigError, ServeConfig};
use crate::serve;

/// Serves until it is asked to end.
pub(crate) fn run(global: &Global, args: &Serve) -> Outcome {
    let config = ServeConfig::resolve(args, global.data_dir.as_deref()).map_err(|error| {
        let failure = Failure::from(anyhow::Error::new(error));
        let later = failure.cause::<ConfigError>().is_some_and(ConfigError::is_later);
        if later {
            failure.status(ExitStatus::Usage).hint("leave it out, or unset its variable")
        } else {
            failure.status(ExitStatus::Usage).hint("bivouac help serve")
        }
    })?;
    // The zygotes outlive this process, and with them what it was started with would.
    bivouac_runtime::roles::keep_descriptors()
        .explain(|| "could not keep descriptors to this process".to_owned())?;
    serve::run(config).map_err(Failure::from)?;
    Ok(ExitStatus::Success)
}
