//! What happens by itself: no input, idempotent, woken by signal and by timer.

mod disk;
mod expiry;
mod forks;
mod idle;
mod images;
mod orphans;
mod timeouts;
mod values;

use std::sync::Arc;

use crate::inner::Inner;

impl Inner {
    /// Starts all reconcilers.
    pub(crate) fn start_reconcilers(self: &Arc<Self>) {
        self.spawn(timeouts::run(Arc::clone(self)));
        self.spawn(expiry::run(Arc::clone(self)));
        self.spawn(forks::run(Arc::clone(self)));
        self.spawn(orphans::run(Arc::clone(self)));
        self.spawn(images::run(Arc::clone(self)));
        self.spawn(disk::run(Arc::clone(self)));
        self.spawn(values::run(Arc::clone(self)));
        self.spawn(idle::run(Arc::clone(self)));
        self.spawn(crate::restart::run(Arc::clone(self)));
    }
}
