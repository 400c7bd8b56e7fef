//! The shim's connections to serve: requests in, answers and changes out.
//!
//! Changes are level-triggered: a connection has a set of commands that changed, not a queue of
//! changes, so a slow serve costs no memory. What the egress broker says unasked is a queue, bounded, and
//! goes to the newest connection. Invariant: the state that a new connection starts from and
//! the changes after it leave no gap.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::os::fd::AsFd;
use std::rc::{Rc, Weak};

use bivouac_types::id::CommandId;
use tokio::sync::Notify;

use super::Shim;
use crate::proto::{
    Assembler, Channel, Frame, FromShim, LEVEL, ShimError, TRUSTED_CAP, ToInit, ToShim, VERSION,
};

/// One connection.
struct Door {
    channel: Channel,
    dirty: RefCell<HashSet<CommandId>>,
    wake: Notify,
    /// Nobody writes changes to it any more: its serve is gone.
    over: Cell<bool>,
    /// There is a newer one.
    replaced: Notify,
}

/// All connections that are open.
#[derive(Default)]
pub(super) struct Doors {
    open: RefCell<Vec<Weak<Door>>>,
}

impl Doors {
    fn add(&self, door: &Rc<Door>) {
        let mut open = self.open.borrow_mut();
        for older in open.iter().filter_map(Weak::upgrade) {
            older.replaced.notify_one();
        }
        open.push(Rc::downgrade(door));
    }

    /// Whether no connection that is open was made later.
    fn is_newest(&self, door: &Rc<Door>) -> bool {
        let open = self.open.borrow();
        let newest = open.iter().rev().filter_map(Weak::upgrade).find(|door| !door.over.get());
        newest.is_none_or(|newest| Rc::ptr_eq(&newest, door))
    }

    /// Marks a command as changed on every connection.
    pub(super) fn changed(&self, command: &CommandId) {
        self.open.borrow_mut().retain(|door| {
            let Some(door) = door.upgrade() else { return false };
            door.dirty.borrow_mut().insert(command.clone());
            door.wake.notify_one();
            true
        });
    }

    /// Sends a last frame on every connection.
    pub(super) async fn close(&self, last: &FromShim) {
        let open: Vec<_> = self.open.borrow().iter().filter_map(Weak::upgrade).collect();
        for door in open {
            let limit = std::time::Duration::from_secs(5);
            let _ = tokio::time::timeout(limit, async {
                // What changed before comes first, so that the last frame means "nothing follows".
                // A serve that was killed in the middle reads nothing any more: nothing to wait for.
                while !door.over.get() && !door.dirty.borrow().is_empty() {
                    tokio::task::yield_now().await;
                }
                door.channel.send(last, &[], &[]).await
            })
            .await;
        }
    }
}

impl Shim {
    /// Serves a connection in a task of its own.
    pub(super) fn open_door(self: Rc<Self>, channel: Channel) {
        let (dirty, over) = (RefCell::default(), Cell::new(false));
        let (wake, replaced) = (Notify::new(), Notify::new());
        let door = Rc::new(Door { channel, dirty, wake, over, replaced });
        self.doors.add(&door);
        tokio::task::spawn_local(async move {
            let (commands, ages) = (self.progress(), self.ages());
            let hello = FromShim::Hello { version: VERSION, commands, ages, level: LEVEL };
            if door.channel.send(&hello, &[], &[]).await.is_err() {
                door.over.set(true);
                return;
            }
            // The reader decides when the connection is over.
            tokio::select! {
                () = self.read_requests(&door) => {}
                () = self.write_changes(&door) => {}
                () = self.write_egress(&door) => {}
            }
            door.over.set(true);
        });
    }

    async fn write_changes(&self, door: &Rc<Door>) {
        loop {
            door.wake.notified().await;
            loop {
                let next = door.dirty.borrow().iter().next().cloned();
                let Some(command) = next else { break };
                let Some(running) = self.find(&command) else {
                    door.dirty.borrow_mut().remove(&command);
                    continue;
                };
                // Unmarked before the state is read: a change during the send marks it again.
                door.dirty.borrow_mut().remove(&command);
                let changed = FromShim::Changed { command, progress: running.progress() };
                if door.channel.send(&changed, &[], &[]).await.is_err() {
                    return;
                }
            }
        }
    }

    /// Sends what the egress broker says unasked, for as long as this is the newest connection.
    async fn write_egress(&self, door: &Rc<Door>) {
        loop {
            tokio::select! {
                () = self.outbox.filled() => {}
                () = door.replaced.notified() => {}
            }
            if !self.doors.is_newest(door) {
                self.outbox.pass_on();
                // The other loops decide when this one is over.
                std::future::pending::<()>().await;
            }
            let Some(message) = self.outbox.take() else { continue };
            if door.channel.send(&FromShim::Egress, &message, &[]).await.is_err() {
                self.outbox.put_back(message);
                return;
            }
        }
    }

    async fn read_requests(self: &Rc<Self>, door: &Rc<Door>) {
        let mut assembler = Assembler::new(TRUSTED_CAP);
        while let Ok(Some(frame)) = door.channel.receive::<ToShim>(&mut assembler).await {
            self.request(door, frame).await;
        }
    }

    async fn request(self: &Rc<Self>, door: &Rc<Door>, frame: Frame<ToShim>) {
        let Frame { message, tail, fds } = frame;
        match message {
            ToShim::Exec { request, spec } => {
                let started = self.clone().start(*spec, fds).await;
                let door = door.clone();
                tokio::task::spawn_local(async move {
                    let result = match started {
                        Ok(started) => started.await,
                        Err(e) => Err(e),
                    };
                    answer(&door, request, result).await;
                });
            }
            ToShim::Signal { request, command, signal } => {
                let result = match self.find(&command) {
                    None => Err(ShimError::NoCommand),
                    Some(running) if running.progress().end.is_some() => Ok(0),
                    Some(_) => {
                        let signal = ToInit::Signal { command, signal };
                        self.tell_init(&signal, &[]).await.map(|()| 0)
                    }
                };
                answer(door, request, result).await;
            }
            ToShim::Stdin { request, command, offset, close } => {
                let running = self.find(&command);
                let door = door.clone();
                tokio::task::spawn_local(async move {
                    let result = match running {
                        None => Err(ShimError::NoCommand),
                        Some(running) => running.write_stdin(offset, &tail, close).await,
                    };
                    answer(&door, request, result).await;
                });
            }
            ToShim::File { op } => {
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                // A result descriptor that closes without a line says that init is gone.
                let _ = self.tell_init(&ToInit::File(op), &fds).await;
            }
            ToShim::Resize { request, command, size } => {
                let running = self.find(&command).ok_or(ShimError::NoCommand);
                let result = running.and_then(|running| running.resize(size));
                answer(door, request, result).await;
            }
            ToShim::Door { op } => {
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                // As above.
                let _ = self.tell_init(&ToInit::Door(op), &fds).await;
            }
            ToShim::Egress { request } => match &self.egress {
                None => {
                    let text = "this session was launched without an egress broker".to_owned();
                    answer(door, request, Err(ShimError::Other(text))).await;
                }
                // Called here, so that messages reach the broker in their order; answered when it is
                // done.
                Some(egress) => {
                    let (reply, door) = (egress.deliver(tail), door.clone());
                    tokio::task::spawn_local(async move {
                        let reply = reply.await;
                        let frame = FromShim::EgressReply { request };
                        let _ = door.channel.send(&frame, &reply, &[]).await;
                    });
                }
            },
            ToShim::Stopping { request } => {
                self.stopping.set(true);
                answer(door, request, Ok(0)).await;
            }
        }
    }

    /// Sends a frame to init.
    ///
    /// # Errors
    /// [`ShimError::Gone`].
    pub(super) async fn tell_init(
        &self,
        message: &ToInit,
        fds: &[std::os::fd::BorrowedFd<'_>],
    ) -> Result<(), ShimError> {
        self.init.send(message, &[], fds).await.map_err(|_| ShimError::Gone)
    }
}

async fn answer(door: &Rc<Door>, request: u64, result: Result<u64, ShimError>) {
    // A connection that is gone has no use for answers; its requests are done all the same.
    let _ = door.channel.send(&FromShim::Reply { request, result }, &[], &[]).await;
}
