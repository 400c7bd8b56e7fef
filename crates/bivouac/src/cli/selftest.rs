//! `bivouac selftest`: what tests of this executable need to know. Hidden.

use bivouac_engine::FaultPoint;
use bivouac_runtime::fault::Point;

use super::args::Selftest;
use super::failure::{ExitStatus, Outcome};
use super::{output, schemas};

/// Prints the names of all points at which a fault can be injected, or the schemas.
pub(crate) fn run(what: Selftest) -> Outcome {
    if what == Selftest::Schemas {
        output::json(&schemas::all())?;
        return Ok(ExitStatus::Success);
    }
    for point in FaultPoint::ALL {
        output::line(&format!("engine.{}", point.name()))?;
    }
    for point in Point::ALL {
        output::line(point.name())?;
    }
    Ok(ExitStatus::Success)
}
