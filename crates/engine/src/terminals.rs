//! Terminals: commands on a terminal, with a name, at which clients sit down and get up again.
//!
//! Owns: opening, finding, attaching to and hanging up terminals. Invariant: a terminal is a command like others
//! (its record, its log, its end), so it goes on whoever leaves, and a restart of the engine finds it again; what
//! a client sees is read from the log: first the end of what was written, then what follows, without a gap or a
//! repetition. One to which nobody gave a name (`t1`, `t2` …) goes with its last client, as an SSH session does.
//! Called by HTTP and SSH.

mod scrollback;
mod seats;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bivouac_runtime::{Progress, RuntimeError, StdinErrorKind};
use bivouac_store::SessionRow;
use bivouac_types::access::Verb;
use bivouac_types::command::{Command, CommandSpec};
use bivouac_types::id::{CommandId, SessionId};
use bivouac_types::name::Namespace;
use bivouac_types::terminal::{TtySize, check_terminal_name};
use bytes::{Buf as _, Bytes};

pub use self::scrollback::Cursor;
pub(crate) use self::seats::Seats;

use self::seats::Seat;
use crate::Engine;
use crate::activity::ActivityHold;
use crate::api::{Output, Principal};
use crate::commands::check;
use crate::counters::Operation;
use crate::error::{Error, ErrorKind};
use crate::follow::Follow;
use crate::inner::{Inner, Live, locked};
use crate::lifecycle::chain;

/// What a terminal says it is, when its client does not say.
const TERM: &str = "xterm-256color";
/// The user's shell: the first of these that the image has.
const SHELLS: [&str; 2] = ["bash", "sh"];
/// Most terminals that run in a session.
const MOST: usize = 64;
/// How long a program may go on after it was told that its terminal is gone.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long a terminal that has ended may keep its name until its end is recorded.
const RECORDING: Duration = Duration::from_secs(3);
/// Bytes of input that are handed on at once.
const PIECE: usize = 64 << 10;
// SIGHUP, SIGCONT and SIGKILL.
const HANG_UP: i32 = 1;
const GO_ON: i32 = 18;
const KILL: i32 = 9;

/// A terminal to be opened.
#[derive(Debug, Clone, Default)]
pub struct NewTerminal {
    /// Its name. Absent: a generated one, and it goes with its last client.
    pub name: Option<String>,
    /// Executable; empty is the user's login shell.
    pub program: String,
    /// Arguments after the program.
    pub args: Vec<String>,
    /// As a command's.
    pub cwd: Option<String>,
    /// As a command's. `TERM` is `xterm-256color` if it is not in here.
    pub env: BTreeMap<String, String>,
    /// As root of the sandbox.
    pub sudo: bool,
    /// Its first size.
    pub size: TtySize,
}

/// A terminal that runs, or has ended a moment ago.
#[derive(Debug, Clone)]
pub struct Terminal {
    /// Its name.
    pub name: String,
    /// Where it runs.
    pub session: SessionId,
    /// What it is.
    pub command: Command,
    /// How many clients sit at it.
    pub attached: u32,
}

/// From where on a client wants to see a terminal's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Since {
    /// About the last so many bytes.
    Last(u64),
    /// Where an earlier attachment was ([`Attached::cursor`]).
    Cursor(Cursor),
}

/// Whether a name is one that the engine gives.
pub(crate) fn is_generated(name: &str) -> bool {
    let number = name.strip_prefix('t').unwrap_or_default();
    !number.is_empty() && number.len() <= 9 && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// A client at a terminal.
#[derive(Debug)]
pub struct Attached {
    terminal: Terminal,
    follow: Follow,
    input: TerminalInput,
    seat: Seat,
    _hold: ActivityHold,
}

impl Attached {
    /// The terminal as it was at the beginning.
    #[must_use]
    pub fn terminal(&self) -> &Terminal {
        &self.terminal
    }

    /// The next piece of output, as [`Follow::next`]: all of it is of the one stream `stdout`.
    pub async fn next(&mut self) -> Option<Result<Output, Error>> {
        self.follow.next().await
    }

    /// Where the next piece begins, for [`Since::Cursor`].
    #[must_use]
    pub fn cursor(&self) -> Cursor {
        self.follow.cursor()
    }

    /// What takes its input.
    #[must_use]
    pub fn input(&self) -> TerminalInput {
        self.input.clone()
    }

    /// How long a terminal without a name waits for another client when this one has left.
    pub fn linger(&mut self, grace: Duration) {
        if let Some(present) = &mut self.seat.grace {
            *present = grace;
        }
    }
}

/// The way into a terminal.
#[derive(Debug, Clone)]
pub struct TerminalInput {
    inner: Arc<Inner>,
    live: Option<Arc<Live>>,
    session: SessionId,
    command: CommandId,
}

impl TerminalInput {
    /// Writes what was typed. Answers when the terminal has it all: a program that does not read makes this wait.
    ///
    /// # Errors
    /// 404 when the program has ended; 410 when the session has.
    pub async fn write(&self, mut bytes: Bytes) -> Result<(), Error> {
        let live = self.live()?;
        while !bytes.is_empty() {
            let piece = bytes.slice(..bytes.len().min(PIECE));
            // Somebody types: it goes on.
            self.inner.unpause_session(&self.session).await?;
            // One writer at a time, so that it is known how much of a piece was taken.
            let _held = self.inner.key_locks.lock(&format!("terminal {}", self.command)).await;
            let probe = live.handle.stdin(&self.command, None, Bytes::new(), false).await;
            let sent = match probe {
                Ok(before) => {
                    let sent = live.handle.stdin(&self.command, None, piece.clone(), false).await;
                    sent.map_err(|error| (before, error))
                }
                Err(error) => Err((u64::MAX, error)),
            };
            match sent {
                Ok(_) => bytes.advance(piece.len()),
                // What it took counts; the rest waits on, as it would at a cable.
                Err((before, RuntimeError::Stdin { kind: StdinErrorKind::Stuck, written, .. })) => {
                    let took = usize::try_from(written.saturating_sub(before)).unwrap_or(0);
                    bytes.advance(took.min(piece.len()));
                }
                Err((_, error)) => return Err(self.inner.refine(&self.session, error).await),
            }
        }
        Ok(())
    }

    fn live(&self) -> Result<&Live, Error> {
        self.live.as_deref().ok_or_else(|| Error::stopped(&self.session, "it has ended"))
    }

    /// Tells the terminal its size; the last one that anybody set is the one that it has.
    ///
    /// # Errors
    /// As [`Self::write`]; 400 for a size that no terminal has.
    pub async fn resize(&self, size: TtySize) -> Result<(), Error> {
        let size = TtySize::new(size.cols.into(), size.rows.into())?;
        match self.live()?.handle.resize(&self.command, size).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.inner.refine(&self.session, error).await),
        }
    }
}

/// Waits until the program has ended, or nothing is known of it any more.
async fn ended(live: &Live, command: &CommandId) {
    if let Some(mut running) = live.running(command) {
        let _ = running.progress.wait_for(|progress| progress.end.is_some()).await;
    }
}

/// Tells the program that its terminal is gone, and ends it if it does not mind.
async fn hang_up(live: &Live, command: &CommandId) {
    for signal in [HANG_UP, GO_ON] {
        if let Err(error) = live.handle.signal(command, signal).await {
            tracing::debug!(%command, %error, "a terminal could not be hung up");
        }
    }
    if tokio::time::timeout(LAST_WORDS, ended(live, command)).await.is_err()
        && let Err(error) = live.handle.signal(command, KILL).await
    {
        tracing::debug!(%command, %error, "what ran at a terminal could not be ended");
    }
}

fn no_terminal(sandbox: &str, name: &str) -> Error {
    let shown: String = name.chars().take(80).collect();
    Error::not_found(format!(
        "Terminal '{}' does not run in sandbox '{sandbox}'; 'bivouac terminals {sandbox}' lists those that do.",
        shown.escape_debug()
    ))
}

/// 409: the name is in use.
pub(crate) fn taken(name: &str) -> Error {
    let message = format!(
        "Terminal '{name}' runs already in this sandbox: attach to it, hang it up, or take another name."
    );
    Error::new(ErrorKind::Conflict, "terminal_exists", message)
}

impl Live {
    /// The terminals of this session that run, oldest first.
    fn terminals(&self, seats: &Seats) -> Vec<Terminal> {
        let ids: Vec<CommandId> = locked(&self.commands).keys().cloned().collect();
        let mut found: Vec<Terminal> = ids
            .iter()
            .filter_map(|id| self.running(id))
            .filter(|running| running.command.end.is_none())
            .filter_map(|running| Terminal::of(running.command, seats))
            .collect();
        found.sort_by(|a, b| {
            let key = |t: &Terminal| (t.command.started_at, t.command.id.clone());
            key(a).cmp(&key(b))
        });
        found
    }
}

impl Terminal {
    fn of(command: Command, seats: &Seats) -> Option<Self> {
        let name = command.terminal.clone()?;
        let attached = seats.count(&command.id);
        Some(Self { name, session: command.session_id.clone(), command, attached })
    }
}

impl NewTerminal {
    fn check(&self) -> Result<(), Error> {
        TtySize::new(self.size.cols.into(), self.size.rows.into())?;
        let Some(name) = &self.name else { return Ok(()) };
        check_terminal_name(name)?;
        if is_generated(name) {
            let message = format!(
                "Invalid terminal: '{name}' is a name that the engine gives; take one that is not 't' and a number"
            );
            return Err(Error::invalid(message));
        }
        Ok(())
    }

    fn spec(&self, name: String, shell: &str) -> CommandSpec {
        let shells = self.program.is_empty();
        let mut args = self.args.clone();
        if shells {
            args.insert(0, "-l".to_owned());
        }
        let mut env = self.env.clone();
        env.entry("TERM".to_owned()).or_insert_with(|| TERM.to_owned());
        CommandSpec {
            program: if shells { shell.to_owned() } else { self.program.clone() },
            args,
            cwd: self.cwd.clone(),
            env,
            sudo: self.sudo,
            timeout_ms: None,
            attach_stdin: true,
            tty: Some(self.size),
            terminal: Some(name),
        }
    }
}

impl Inner {
    /// Opens a terminal in a session that takes work.
    async fn open(
        self: &Arc<Self>,
        live: &Arc<Live>,
        row: &SessionRow,
        new: &NewTerminal,
    ) -> Result<Terminal, Error> {
        let until = tokio::time::Instant::now() + RECORDING;
        loop {
            let running = live.terminals(&self.seats);
            if running.len() >= MOST {
                let message = format!(
                    "{MOST} terminals run in this sandbox already; hang one up before opening another."
                );
                return Err(Error::new(ErrorKind::Conflict, "conflict", message));
            }
            let name = new.name.clone().unwrap_or_else(|| free_name(&running));
            let error = match self.start_shell(live, row, new, &name).await {
                Ok(command) => {
                    if new.name.is_none() {
                        self.expect_client(live, &command.id);
                    }
                    let session = command.session_id.clone();
                    return Ok(Terminal { name, session, command, attached: 0 });
                }
                Err(error) if error.code != "terminal_exists" => return Err(error),
                Err(error) => error,
            };
            // Somebody was quicker, or one of that name has just ended and is not yet recorded so.
            let runs = live.terminals(&self.seats).iter().any(|terminal| terminal.name == name);
            if (runs && new.name.is_some()) || tokio::time::Instant::now() > until {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn start_shell(
        self: &Arc<Self>,
        live: &Arc<Live>,
        row: &SessionRow,
        new: &NewTerminal,
        name: &str,
    ) -> Result<Command, Error> {
        let mut shells = SHELLS.into_iter();
        loop {
            let shell = shells.next().unwrap_or_default();
            let spec = new.spec(name.to_owned(), shell);
            check(&spec)?;
            match self.start(live, row, spec, None).await {
                Err(error)
                    if new.program.is_empty()
                        && error.code == "executable_not_found"
                        && shells.len() > 0 => {}
                done => return done,
            }
        }
    }

    async fn sit_down(
        self: &Arc<Self>,
        command: &CommandId,
        session: &SessionRow,
        since: Since,
    ) -> Result<Attached, Error> {
        let id = &session.session.id;
        let found = self.find_command(&session.namespace.team, id, command).await?;
        let Some(terminal) = Terminal::of(found.command.clone(), &self.seats) else {
            let message = format!("Command {command} is no terminal.");
            return Err(Error::invalid(message));
        };
        let live = found.live.clone();
        let keeps = !is_generated(&terminal.name);
        let seat = Seat::take(self, live.clone(), command, keeps)?;
        let input = TerminalInput {
            inner: Arc::clone(self),
            live,
            session: id.clone(),
            command: command.clone(),
        };
        let now = found.now(self).await?;
        let cursor = match since {
            Since::Last(bytes) => self.last(id, command, &now, bytes).await?,
            Since::Cursor(cursor) => self.place(id, command, &now, cursor).await?,
        };
        let hold = self.activity.hold(&session.session.sandbox_id);
        let follow = Follow::at(Arc::clone(self), found, cursor);
        Ok(Attached { terminal, follow, input, seat, _hold: hold })
    }

    /// Where the last so many bytes of output begin.
    async fn last(
        &self,
        session: &SessionId,
        command: &CommandId,
        now: &Progress,
        bytes: u64,
    ) -> Result<Cursor, Error> {
        let read = |from, until| self.runtime.read_log(session, command, from, until);
        match scrollback::find(read, now.log_start, now.log_bytes, bytes).await {
            Ok(cursor) => Ok(cursor),
            // Old output went while it was being looked through.
            Err(error) => {
                tracing::debug!(%command, cause = %chain(&error), "the scrollback is being overwritten");
                Ok(Cursor { at: now.log_bytes, skip: 0 })
            }
        }
    }

    /// Checks a place that a client says it was at: the beginning of a record.
    async fn place(
        &self,
        session: &SessionId,
        command: &CommandId,
        now: &Progress,
        cursor: Cursor,
    ) -> Result<Cursor, Error> {
        let wrong = || Error::invalid("Invalid cursor: there is no such place in the output");
        if cursor.at > now.log_bytes {
            return Err(wrong());
        }
        let mut at = now.log_start;
        while at < cursor.at {
            let (_, next) = self.runtime.read_log(session, command, at, cursor.at).await?;
            if next <= at || next > cursor.at {
                return Err(wrong());
            }
            at = next;
        }
        Ok(cursor)
    }

    /// A terminal that runs, by name. A sandbox that does not run has none.
    async fn terminal(
        &self,
        ns: &Namespace,
        sandbox: &str,
        name: &str,
    ) -> Result<(Arc<Live>, Terminal), Error> {
        let row = self.named(ns, sandbox).await?;
        let live = self.live(&row.sandbox.current_session_id);
        let found = live.and_then(|live| {
            let mut terminals = live.terminals(&self.seats).into_iter();
            let terminal = terminals.find(|terminal| terminal.name == name)?;
            Some((live, terminal))
        });
        found.ok_or_else(|| no_terminal(sandbox, name))
    }
}

/// The first of `t1`, `t2` … that is free.
fn free_name(running: &[Terminal]) -> String {
    let taken = |name: &String| running.iter().any(|terminal| terminal.name == *name);
    let mut names = (1u32..).map(|number| format!("t{number}"));
    names.find(|name| !taken(name)).unwrap_or_default()
}

impl Engine {
    /// Opens a terminal in a sandbox, which is started if need be, and answers when its program runs.
    ///
    /// # Errors
    /// 400 when it cannot be executed, 404, 409 when a terminal of that name runs.
    pub async fn open_terminal(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        new: NewTerminal,
    ) -> Result<Terminal, Error> {
        who.may(Verb::Exec, ns)?;
        new.check()?;
        let (live, row) = self.inner.awake(ns, sandbox, true).await?;
        self.open_in(who, live, row, new).await
    }

    /// As [`Self::open_terminal`], in a session.
    ///
    /// # Errors
    /// As there; 410 or 422 when the session does not run.
    pub async fn open_terminal_in(
        &self,
        who: &Principal,
        team: &str,
        session: &SessionId,
        new: NewTerminal,
    ) -> Result<Terminal, Error> {
        self.inner.check_session(who, &[Verb::Exec], team, session).await?;
        new.check()?;
        let (live, row) = self.inner.working(team, session).await?;
        self.open_in(who, live, row, new).await
    }

    /// Whether a terminal could be opened in a session now.
    ///
    /// # Errors
    /// As [`Self::open_terminal_in`].
    pub async fn may_open_terminal(
        &self,
        who: &Principal,
        team: &str,
        session: &SessionId,
    ) -> Result<(), Error> {
        self.inner.check_session(who, &[Verb::Exec], team, session).await?;
        self.inner.working(team, session).await.map(drop)
    }

    async fn open_in(
        &self,
        who: &Principal,
        live: Arc<Live>,
        row: SessionRow,
        new: NewTerminal,
    ) -> Result<Terminal, Error> {
        let (inner, session) = (Arc::clone(&self.inner), row.session.id.clone());
        let work = async move { inner.open(&live, &row, &new).await };
        let terminal = self.inner.run(self.inner.counted(Operation::Exec, work)).await?;
        tracing::debug!(by = %who.name, %session, terminal = %terminal.name, "open terminal");
        Ok(terminal)
    }

    /// The terminals of a sandbox that run, oldest first.
    ///
    /// # Errors
    /// 404.
    pub async fn terminals(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
    ) -> Result<Vec<Terminal>, Error> {
        who.may(Verb::Read, ns)?;
        let row = self.inner.named(ns, sandbox).await?;
        let live = self.inner.live(&row.sandbox.current_session_id);
        Ok(live.map(|live| live.terminals(&self.inner.seats)).unwrap_or_default())
    }

    /// Sits down at a terminal that runs: about the last `scrollback` bytes of its output first, then what follows.
    ///
    /// # Errors
    /// 404; 409 for too many clients.
    pub async fn attach_terminal(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        name: &str,
        scrollback: u64,
    ) -> Result<Attached, Error> {
        who.may(Verb::Exec, ns)?;
        let (live, terminal) = self.inner.terminal(ns, sandbox, name).await?;
        self.inner.sit_down(&terminal.command.id, &live.row(), Since::Last(scrollback)).await
    }

    /// Sits down at a terminal that was opened before, whether or not it still runs: so a client that lost its
    /// connection sees the end.
    ///
    /// # Errors
    /// 404; 400 for a command that is no terminal, or a cursor that is none; 409 for too many clients.
    pub async fn attach_again(
        &self,
        who: &Principal,
        ns: &Namespace,
        session: &SessionId,
        command: &CommandId,
        since: Since,
    ) -> Result<Attached, Error> {
        who.may(Verb::Exec, ns)?;
        let row = self.inner.session_row(&ns.team, session).await?;
        if row.namespace != *ns {
            return Err(Error::no_session(session));
        }
        self.inner.sit_down(command, &row, since).await
    }

    /// Sits down at a terminal of a session that was just opened.
    ///
    /// # Errors
    /// As [`Self::attach_again`].
    pub async fn attach_opened(
        &self,
        who: &Principal,
        team: &str,
        terminal: &Terminal,
    ) -> Result<Attached, Error> {
        let row = self.inner.session_for(who, &[Verb::Exec], team, &terminal.session).await?;
        self.inner.sit_down(&terminal.command.id, &row, Since::Cursor(Cursor::default())).await
    }

    /// Tells a terminal's program that its terminal is gone; one that goes on is killed five seconds later.
    /// Answers at once.
    ///
    /// # Errors
    /// 404.
    pub async fn hang_up(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        name: &str,
    ) -> Result<Terminal, Error> {
        who.may(Verb::Exec, ns)?;
        let (live, terminal) = self.inner.terminal(ns, sandbox, name).await?;
        tracing::debug!(by = %who.name, session = %terminal.session, %name, "hang up");
        let command = terminal.command.id.clone();
        self.inner.unpause_session(&terminal.session).await?;
        self.inner.spawn(async move { hang_up(&live, &command).await });
        Ok(terminal)
    }
}
