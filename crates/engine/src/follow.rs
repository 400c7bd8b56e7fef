//! A command's output, read from its log at the reader's speed until the command has ended.
//!
//! Invariants: every piece is handed out once and in order; a command's end is told only when it is known, and
//! is never invented; a reader that does not ask holds back nobody. Made by `commands` and `terminals`.

use std::collections::VecDeque;
use std::sync::Arc;

use bivouac_runtime::{LogRecord, Progress};
use bivouac_types::command::{Command, CommandEnd};
use tokio::sync::watch;

use crate::activity::ActivityHold;
use crate::api::Output;
use crate::commands::told;
use crate::error::{Error, ErrorKind};
use crate::inner::{Inner, Live, locked};
use crate::terminals::Cursor;

/// A command and the means to hear of its end.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) command: Command,
    /// While it is in the session's list of running ones.
    pub(crate) progress: Option<watch::Receiver<Progress>>,
    pub(crate) live: Option<Arc<Live>>,
}

impl Found {
    /// How far the log goes.
    pub(crate) async fn now(&self, inner: &Inner) -> Result<Progress, Error> {
        if let Some(progress) = &self.progress {
            return Ok(progress.borrow().clone());
        }
        let Command { session_id, id, .. } = &self.command;
        Ok(inner.runtime.log_progress(session_id, id).await?)
    }

    /// Waits for the end if that is still to come, and answers the command with it.
    pub(crate) async fn ended(&mut self, inner: &Inner) -> Result<Command, Error> {
        if self.command.end.is_none()
            && let Some(progress) = &mut self.progress
            && let Ok(now) = progress.wait_for(|p| p.end.is_some()).await
        {
            self.command.end = told(now.end.clone());
        }
        if self.command.end.is_none() {
            self.settled(inner).await?;
        }
        Ok(self.command.clone())
    }

    /// The session went away first: its end is recorded when that has been settled.
    async fn settled(&mut self, inner: &Inner) -> Result<(), Error> {
        let Command { session_id, id, .. } = &self.command;
        if let Some(live) = &self.live {
            // The sender is part of `live`, so this only ends when it is true.
            let _ = live.settled.subscribe().wait_for(|settled| *settled).await;
            // With a deletion the row may be gone by now.
            if let Some(end) = locked(&live.ends).get(id) {
                self.command.end = Some(end.clone());
                return Ok(());
            }
        }
        let row = inner.db.command(session_id, id).await?.ok_or_else(|| Error::no_command(id))?;
        self.command = row.command;
        let id = &self.command.id;
        if self.command.end.is_none() {
            let message = format!("How command {id} ended is not settled yet; ask again.");
            return Err(Error::new(ErrorKind::Unavailable, "command_not_settled", message));
        }
        Ok(())
    }
}

/// A command's output from the very start, then followed until it ends.
#[derive(Debug)]
pub struct Follow {
    inner: Arc<Inner>,
    /// Until the command has ended.
    hold: Option<ActivityHold>,
    found: Found,
    offset: u64,
    ready: VecDeque<LogRecord>,
    /// Where the present batch of records begins, and how much of its output was handed out or left out.
    cursor: Cursor,
    /// Output that is still to be left out.
    skip: u64,
    finished: bool,
}

impl Follow {
    /// Begins at a place in the log.
    pub(crate) fn at(inner: Arc<Inner>, found: Found, cursor: Cursor) -> Self {
        let (offset, skip, finished) = (cursor.at, cursor.skip, false);
        let cursor = Cursor { at: offset, skip: 0 };
        Self { inner, hold: None, found, offset, ready: VecDeque::new(), cursor, skip, finished }
    }

    /// Counts as use of the sandbox from now on, for as long as the command runs.
    pub(crate) fn attend(&mut self) {
        self.hold = self.inner.attended(&self.found);
    }

    /// Where the next piece begins.
    pub(crate) fn cursor(&self) -> Cursor {
        Cursor { skip: self.cursor.skip + self.skip, ..self.cursor }
    }

    /// The command as it was when the following began.
    #[must_use]
    pub fn command(&self) -> &Command {
        &self.found.command
    }

    /// The next piece; `None` after [`Output::End`] or an error. A caller that does not ask holds
    /// back nobody but itself.
    pub async fn next(&mut self) -> Option<Result<Output, Error>> {
        if self.finished {
            return None;
        }
        let next = self.step().await;
        self.finished = matches!(next, Err(_) | Ok(Output::End(_)));
        if self.finished {
            self.hold = None;
        }
        Some(next)
    }

    async fn step(&mut self) -> Result<Output, Error> {
        loop {
            match self.ready.pop_front() {
                Some(LogRecord::Data { stream, mut bytes }) => {
                    self.cursor.skip += bytes.len() as u64;
                    let known = self.skip.min(bytes.len() as u64);
                    self.skip -= known;
                    // Not more than its length.
                    let rest = bytes.split_off(usize::try_from(known).unwrap_or(bytes.len()));
                    if rest.is_empty() {
                        continue;
                    }
                    return Ok(Output::Data { stream, bytes: rest });
                }
                Some(LogRecord::Cut) => return Ok(Output::Cut),
                Some(LogRecord::End(end)) => {
                    self.found.command.end = Some(end);
                    return Ok(Output::End(Box::new(self.found.command.clone())));
                }
                None => {}
            }
            let (start, until, end) = self.progress().await?;
            if self.offset < start {
                // Of a terminal, old output goes.
                (self.offset, self.skip) = (start, 0);
                self.cursor = Cursor { at: start, skip: 0 };
                return Ok(Output::Cut);
            }
            if self.offset < until {
                match self.read(until).await {
                    Ok(()) => continue,
                    Err(_) if self.progress().await?.0 > self.offset => continue,
                    // With a deletion the log goes as well; how it ended is still known.
                    Err(_) if end.is_some() && self.found.progress.is_none() => {}
                    Err(error) => return Err(error),
                }
            }
            if self.found.progress.is_some() && end.is_some() && told(end.clone()).is_none() {
                self.outlive().await?;
                continue;
            }
            if end.is_some() {
                self.found.command.end = end;
                return Ok(Output::End(Box::new(self.found.command.clone())));
            }
            self.wait().await?;
        }
    }

    /// Where the log begins, how far it goes, and the end if there is one.
    async fn progress(&mut self) -> Result<(u64, u64, Option<CommandEnd>), Error> {
        if let Some(progress) = &mut self.found.progress {
            let seen = progress.borrow_and_update();
            return Ok((seen.log_start, seen.log_bytes, seen.end.clone()));
        }
        let Command { session_id, id, end, .. } = &self.found.command;
        match self.inner.runtime.log_progress(session_id, id).await {
            Ok(file) => Ok((file.log_start, file.log_bytes, end.clone())),
            Err(_) if end.is_some() => Ok((self.offset, self.offset, end.clone())),
            Err(error) => Err(error.into()),
        }
    }

    async fn read(&mut self, until: u64) -> Result<(), Error> {
        let Command { session_id, id, .. } = &self.found.command;
        let runtime = &self.inner.runtime;
        let (records, next) = runtime.read_log(session_id, id, self.offset, until).await?;
        if next <= self.offset {
            let message =
                format!("The log of command {id} cannot be read on from byte {}.", self.offset);
            return Err(Error::internal(message));
        }
        if self.found.progress.as_ref().is_some_and(|p| p.borrow().log_start > self.offset) {
            // Old output went meanwhile: whether these records are the next ones cannot be told.
            return Ok(());
        }
        self.cursor = Cursor { at: self.offset, skip: 0 };
        self.offset = next;
        self.ready.extend(records);
        Ok(())
    }

    /// Waits until there is more to read.
    async fn wait(&mut self) -> Result<(), Error> {
        let gone = match &mut self.found.progress {
            Some(progress) => progress.changed().await.is_err(),
            None => true,
        };
        if gone { self.outlive().await } else { Ok(()) }
    }

    /// The session is gone: what the shim wrote last is in the file, the end in the row.
    async fn outlive(&mut self) -> Result<(), Error> {
        self.found.progress = None;
        self.found.settled(&self.inner).await
    }
}
