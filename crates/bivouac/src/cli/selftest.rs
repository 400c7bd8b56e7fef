//! `bivouac selftest`: what tests of this executable need to know. Hidden.

use bivouac_engine::FaultPoint;
use bivouac_runtime::fault::Point;

use super::args::Selftest;
use super::failure::{ExitStatus, Outcome};
use super::output;

/// Prints the names of all points at which a fault can be injected.
pub(crate) fn run(what: Selftest) -> Outcome {
    let Selftest::FaultPoints = what;
    for point in FaultPoint::ALL {
        output::line(&format!("engine.{}", point.name()))?;
    }
    for point in Point::ALL {
        output::line(point.name())?;
    }
    Ok(ExitStatus::Success)
}
