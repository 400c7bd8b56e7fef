//! Who sits at which terminal.
//!
//! Invariant: a terminal without a name of its own is hung up when nobody has sat at it for its grace, and only
//! then; one with a name stays until its program ends. A seat counts until it is dropped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bivouac_types::id::CommandId;

use crate::error::{Error, ErrorKind};
use crate::inner::{Inner, Live, locked};

/// How long a terminal without a name waits for its client to come back: longer than the command line looks for
/// an engine that restarts.
pub(super) const GRACE: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 75 });
/// Most clients at one terminal.
const MOST: u32 = 64;

/// Of all terminals.
#[derive(Debug, Default)]
pub(crate) struct Seats(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    of: HashMap<CommandId, Taken>,
    /// Number of the last departure.
    departures: u64,
}

#[derive(Debug, Default)]
struct Taken {
    count: u32,
    /// The departure after which nobody was left.
    left: u64,
}

impl Seats {
    /// How many sit there.
    pub(super) fn count(&self, command: &CommandId) -> u32 {
        locked(&self.0).of.get(command).map_or(0, |taken| taken.count)
    }

    fn take(&self, command: &CommandId) -> Result<(), Error> {
        let mut table = locked(&self.0);
        let taken = table.of.entry(command.clone()).or_default();
        if taken.count >= MOST {
            let message = format!("{MOST} clients are attached to this terminal already.");
            return Err(Error::new(ErrorKind::Conflict, "conflict", message));
        }
        taken.count += 1;
        Ok(())
    }

    /// Answers the number of the departure when nobody is left.
    fn leave(&self, command: &CommandId) -> Option<u64> {
        let mut table = locked(&self.0);
        table.departures += 1;
        let number = table.departures;
        let taken = table.of.entry(command.clone()).or_default();
        taken.count = taken.count.saturating_sub(1);
        taken.left = number;
        (taken.count == 0).then_some(number)
    }

    /// Whether nobody has sat there since; forgets the terminal if so.
    fn empty_since(&self, command: &CommandId, number: u64) -> bool {
        let mut table = locked(&self.0);
        let empty = |taken: &Taken| taken.count == 0 && taken.left == number;
        let empty = table.of.get(command).is_some_and(empty);
        if empty {
            table.of.remove(command);
        }
        empty
    }
}

/// A client's place at a terminal.
#[derive(Debug)]
pub(super) struct Seat {
    inner: Arc<Inner>,
    live: Option<Arc<Live>>,
    command: CommandId,
    /// `None`: it stays.
    pub(super) grace: Option<Duration>,
}

impl Seat {
    /// Sits down. `keeps`: the terminal stays when everybody has left.
    pub(super) fn take(
        inner: &Arc<Inner>,
        live: Option<Arc<Live>>,
        command: &CommandId,
        keeps: bool,
    ) -> Result<Self, Error> {
        inner.seats.take(command)?;
        let (inner, command) = (Arc::clone(inner), command.clone());
        Ok(Self { inner, live, command, grace: (!keeps).then_some(GRACE) })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let Some(number) = self.inner.seats.leave(&self.command) else { return };
        let grace = self.live.take().zip(self.grace);
        let Some((live, grace)) = grace.filter(|(live, _)| live.running(&self.command).is_some())
        else {
            self.inner.seats.empty_since(&self.command, number);
            return;
        };
        // Outside of a runtime there is nothing left to wait with: the engine has ended.
        if tokio::runtime::Handle::try_current().is_ok() {
            self.inner.hang_up_later(&live, &self.command, number, grace);
        }
    }
}

impl Inner {
    /// Gives the client of a terminal without a name its grace from now on: it was just opened or adopted.
    pub(crate) fn expect_client(self: &Arc<Self>, live: &Arc<Live>, command: &CommandId) {
        // As if somebody had just left.
        if let Some(number) = self.seats.leave(command) {
            self.hang_up_later(live, command, number, GRACE);
        }
    }

    fn hang_up_later(
        self: &Arc<Self>,
        live: &Arc<Live>,
        command: &CommandId,
        number: u64,
        grace: Duration,
    ) {
        let (inner, live, command) = (Arc::clone(self), Arc::clone(live), command.clone());
        self.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(grace) => {}
                () = super::ended(&live, &command) => {}
            }
            if inner.seats.empty_since(&command, number) {
                super::hang_up(&live, &command).await;
            }
        });
    }
}
