//! Swap of the simulated host. Part of `sim`.

use super::{Sim, SimHandle};
use crate::{FileError, FileErrorKind, RuntimeError};

impl Sim {
    /// Gives the host swap, or takes it away.
    pub fn set_swap(&self, there: bool) {
        self.world().swap = there;
    }
}

impl SimHandle {
    /// A session has 4096 bytes of memory.
    pub(super) fn page_out_now(&self) -> Result<u64, RuntimeError> {
        self.with_session(|_| ())?;
        if self.sim.world().swap {
            return Ok(4096);
        }
        let message = "this host has no swap".to_owned();
        Err(FileError { kind: FileErrorKind::Invalid, message }.into())
    }
}
