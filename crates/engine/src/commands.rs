//! Commands: start, follow, wait, signal, standard input.
//!
//! Invariants: the row is written before the program starts and removed when it did not; how a
//! command ended comes from the runtime or its log and is never invented; output goes from the log
//! to whoever asks, at that one's speed, and never through the database. A command whose end is
//! known but not yet recorded already shows it.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bivouac_runtime::{ExecSpec, Progress, RuntimeError};
use bivouac_store::{CommandRow, SessionRow, StoreError, Unique};
use bivouac_types::access::Verb;
use bivouac_types::command::{Command, CommandEnd, CommandSpec, EndReason};
use bivouac_types::id::{CommandId, SessionId};
use bivouac_types::oci::ImageConfig;
use bivouac_types::sandbox::check_env;
use bytes::Bytes;
use tokio::sync::watch;

use crate::activity::ActivityHold;
use crate::api::Principal;
use crate::counters::Operation;
use crate::error::{Error, ErrorKind};
use crate::fault::FaultPoint;
use crate::follow::{Follow, Found};
use crate::inner::{Inner, Live, Running, locked};
use crate::lifecycle::chain;
use crate::terminals::Cursor;
use crate::{Engine, paths};

const USER: &str = "vercel-sandbox";
const USER_HOME: &str = "/home/vercel-sandbox";
const ROOT_HOME: &str = "/root";
/// The host's and the session's own certificates together, as init lays them over the image's bundle.
const BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";
/// The session's own certificates alone.
const ANCHOR: &str = "/usr/local/share/ca-certificates/vercel-proxy-ca.pem";
/// How programs that do not look at the system's bundle find the session's CA. Those that add to what
/// they have get the CA alone, those that replace it get the bundle.
const TRUST: [(&str, &str); 16] = [
    ("AWS_CA_BUNDLE", BUNDLE),
    ("BUNDLE_SSL_CA_CERT", BUNDLE),
    ("CARGO_HTTP_CAINFO", BUNDLE),
    ("CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE", BUNDLE),
    ("CURL_CA_BUNDLE", BUNDLE),
    ("DENO_CERT", ANCHOR),
    ("GIT_SSL_CAINFO", BUNDLE),
    ("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", BUNDLE),
    ("NIX_SSL_CERT_FILE", BUNDLE),
    ("NODE_EXTRA_CA_CERTS", ANCHOR),
    ("NODE_USE_SYSTEM_CA", "1"),
    ("NPM_CONFIG_CAFILE", BUNDLE),
    ("PIP_CERT", BUNDLE),
    ("REQUESTS_CA_BUNDLE", BUNDLE),
    ("SSL_CERT_FILE", BUNDLE),
    ("UV_SYSTEM_CERTS", "1"),
];
/// Shortest time limit of a command, ms.
const MIN_TIMEOUT_MS: u64 = 100;
/// Longest idempotency key.
const MAX_KEY: usize = 256;

/// Checks an idempotency key.
pub(crate) fn check_key(key: Option<&str>) -> Result<(), Error> {
    match key {
        Some(key) if key.is_empty() || key.len() > MAX_KEY => Err(Error::invalid(format!(
            "Invalid Idempotency-Key: must have 1 to {MAX_KEY} characters"
        ))),
        _ => Ok(()),
    }
}

pub(crate) fn check(spec: &CommandSpec) -> Result<(), Error> {
    if spec.program.is_empty() {
        return Err(Error::invalid("Invalid command: must not be empty"));
    }
    if spec.program.contains('\0') || spec.args.iter().any(|arg| arg.contains('\0')) {
        return Err(Error::invalid("Invalid command: a program or argument must not hold a NUL"));
    }
    if let Some(ms) = spec.timeout_ms
        && ms < MIN_TIMEOUT_MS
    {
        return Err(Error::invalid(format!(
            "Invalid timeout: must be at least {MIN_TIMEOUT_MS} ms, got {ms}"
        )));
    }
    check_env(&spec.env)?;
    Ok(())
}

/// An end that the shim has told. "Lost" is only the runtime's word for a shim that can tell no more.
pub(crate) fn told(end: Option<CommandEnd>) -> Option<CommandEnd> {
    end.filter(|end| end.reason != Some(EndReason::Lost))
}

/// Variables that are the sandbox's own, whatever an image says.
const OF_THE_SANDBOX: [&str; 4] = ["PATH", "HOME", "USER", "LOGNAME"];

/// The complete environment of a command: what the image sets, under what the engine sets, under what the
/// sandbox sets, under what the command sets. The image's PATH and language take the place of the engine's.
pub(crate) fn environment(
    image: &ImageConfig,
    path: &str,
    session: &BTreeMap<String, String>,
    command: &BTreeMap<String, String>,
    sudo: bool,
) -> BTreeMap<String, String> {
    let (user, home) = if sudo { ("root", ROOT_HOME) } else { (USER, USER_HOME) };
    let said = |name: &str, ours| image.env.get(name).map_or(ours, String::as_str);
    let (path, language) = (said("PATH", path), said("LANG", "C.UTF-8"));
    let ours =
        [("PATH", path), ("HOME", home), ("USER", user), ("LOGNAME", user), ("LANG", language)];
    // As sudo tells a program who called.
    let caller = [("SUDO_USER", USER), ("SUDO_UID", "1000"), ("SUDO_GID", "1000")];
    let caller = caller.into_iter().filter(|_| sudo);
    let image = image.env.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let mut env: BTreeMap<String, String> = image
        .filter(|(key, _)| !OF_THE_SANDBOX.contains(key))
        .chain(ours)
        .chain(caller)
        .chain(TRUST)
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    env.extend(session.clone());
    env.extend(command.clone());
    env
}

impl Inner {
    /// A session that takes work. One that is starting is waited for, one that is paused goes on.
    pub(crate) async fn working(
        self: &Arc<Self>,
        team: &str,
        id: &SessionId,
    ) -> Result<(Arc<Live>, SessionRow), Error> {
        let (live, row) = self.present(team, id).await?;
        self.activity.touch(&row.session.sandbox_id);
        if row.session.paused_at.is_none() {
            return Ok((live, row));
        }
        self.unpause_session(id).await?;
        self.present(team, id).await
    }

    /// A session that runs, paused or not. One that is starting is waited for.
    pub(crate) async fn present(
        &self,
        team: &str,
        id: &SessionId,
    ) -> Result<(Arc<Live>, SessionRow), Error> {
        self.check_open()?;
        if let Some(found) = self.working_now(team, id)? {
            return Ok(found);
        }
        // Starting, ending, ended or just being adopted: the lock tells when that has settled.
        let row = self.session_row(team, id).await?;
        if row.session.status == bivouac_types::session::SessionStatus::Pending {
            drop(self.sandbox_locks.lock(row.session.sandbox_id.as_str()).await);
            if let Some(found) = self.working_now(team, id)? {
                return Ok(found);
            }
        }
        let row = self.session_row(team, id).await?;
        if let Some(found) = self.working_now(team, id)? {
            return Ok(found);
        }
        Err(Error::not_running(&row.session))
    }

    fn working_now(
        &self,
        team: &str,
        id: &SessionId,
    ) -> Result<Option<(Arc<Live>, SessionRow)>, Error> {
        let Some(live) = self.live(id) else { return Ok(None) };
        let row = live.row();
        if row.namespace.team != team {
            return Err(Error::no_session(id));
        }
        if row.session.status != bivouac_types::session::SessionStatus::Running {
            return Err(Error::not_running(&row.session));
        }
        Ok(Some((live, row)))
    }

    /// The runtime's answer, seen together with the session: one that has just gone says so.
    pub(crate) async fn refine(&self, id: &SessionId, error: RuntimeError) -> Error {
        if let RuntimeError::Gone(_) = error
            && let Ok(Some(row)) = self.db.session(id).await
            && row.session.status != bivouac_types::session::SessionStatus::Running
        {
            return Error::not_running(&row.session);
        }
        error.into()
    }

    pub(crate) async fn start(
        self: &Arc<Self>,
        live: &Arc<Live>,
        row: &SessionRow,
        spec: CommandSpec,
        key: Option<String>,
    ) -> Result<Command, Error> {
        self.start_on(live, row, spec, key, None).await
    }

    /// As [`Self::start`]; with `stdio` on the caller's own standard input, output and error.
    pub(crate) async fn start_on(
        self: &Arc<Self>,
        live: &Arc<Live>,
        row: &SessionRow,
        spec: CommandSpec,
        key: Option<String>,
        stdio: Option<[OwnedFd; 3]>,
    ) -> Result<Command, Error> {
        let session = &row.session;
        let cwd = paths::absolute(&session.cwd, spec.cwd.as_deref().unwrap_or(""))?;
        let now = self.now();
        let command = Command {
            id: self.ids.command(now)?,
            session_id: session.id.clone(),
            name: spec.program.clone(),
            args: spec.args.clone(),
            cwd: cwd.clone(),
            attach_stdin: spec.attach_stdin,
            tty: spec.tty.is_some(),
            terminal: spec.terminal.clone(),
            started_at: now,
            end: None,
        };
        let record = CommandRow { command: command.clone(), idempotency_key: key };
        match self.db.insert_command(&record).await {
            Ok(()) => {}
            Err(StoreError::Taken(Unique::CommandKey)) => {
                let key = record.idempotency_key.unwrap_or_default();
                let first = self.db.command_by_key(&session.id, &key).await?;
                return first.map(|f| f.command).ok_or_else(|| Error::no_command(&command.id));
            }
            Err(StoreError::Taken(Unique::Terminal)) => {
                return Err(crate::terminals::taken(&command.terminal.unwrap_or_default()));
            }
            Err(e) => return Err(e.into()),
        }
        let image = self.image_config(&session.image).await;
        let exec = ExecSpec {
            command: command.id.clone(),
            argv: std::iter::once(spec.program).chain(spec.args).collect(),
            env: environment(
                &image,
                &bivouac_types::image::path(&session.image, &session.runtime),
                &session.env,
                &spec.env,
                spec.sudo,
            ),
            cwd,
            root: spec.sudo,
            timeout_ms: spec.timeout_ms,
            attach_stdin: spec.attach_stdin,
            tty: spec.tty,
            request: crate::request::current(),
        };
        let started = match self.reach(FaultPoint::CommandInserted).await {
            Ok(()) => match stdio {
                None => self.through(live, live.handle.exec(&exec)).await,
                Some(stdio) => self.through(live, live.handle.exec_passed(&exec, stdio)).await,
            },
            Err(error) => {
                self.db.remove_command(&command.id).await?;
                return Err(error);
            }
        };
        if let Err(error) = started {
            self.db.remove_command(&command.id).await?;
            return Err(self.refine(&session.id, error).await);
        }
        if let Some(progress) = live.handle.progress(&command.id) {
            self.watch_command(live, command.clone(), progress);
        }
        self.reach(FaultPoint::CommandStarted).await?;
        Ok(command)
    }

    /// Records the end of a running command when it comes.
    pub(crate) fn watch_command(
        self: &Arc<Self>,
        live: &Arc<Live>,
        command: Command,
        mut progress: watch::Receiver<Progress>,
    ) {
        let id = command.id.clone();
        let running = Running { command, progress: progress.clone() };
        locked(&live.commands).insert(id.clone(), running);
        let (inner, live) = (Arc::clone(self), Arc::clone(live));
        self.spawn(async move {
            let Ok(end) = progress.wait_for(|p| p.end.is_some()).await.map(|p| p.end.clone())
            else {
                // The session is gone; whoever settles it reads the log.
                return;
            };
            // `None`: lost with its shim. What its log says is read by whoever settles the session.
            let Some(end) = told(end) else { return };
            match inner.db.end_command(&id, &end).await {
                Ok(()) => {
                    locked(&live.commands).remove(&id);
                }
                Err(error) => {
                    tracing::error!(command = %id, cause = %chain(&error), "cannot record a command's end yet");
                }
            }
        });
    }

    /// Records the ends of all commands of a session of which nothing runs any more: from the
    /// runtime's last word, from the log, else `otherwise` without an exit code.
    pub(crate) async fn end_commands(
        &self,
        row: &SessionRow,
        otherwise: EndReason,
    ) -> Result<(), Error> {
        let session = &row.session.id;
        let live = self.live(session);
        for open in self.db.commands(session, true).await? {
            let id = &open.command.id;
            let last = live.as_ref().and_then(|l| l.running(id)).and_then(|r| r.command.end);
            let end = match last {
                Some(end) => end,
                None => self.end_from_log(&open.command, otherwise).await,
            };
            self.db.end_command(id, &end).await?;
            if let Some(live) = &live {
                locked(&live.ends).insert(id.clone(), end);
            }
        }
        if let Some(live) = live {
            locked(&live.commands).clear();
            live.settled.send_replace(true);
        }
        Ok(())
    }

    async fn end_from_log(&self, command: &Command, otherwise: EndReason) -> CommandEnd {
        match self.runtime.log_progress(&command.session_id, &command.id).await {
            Ok(Progress { end: Some(end), .. }) => end,
            Ok(Progress { end: None, .. }) => CommandEnd {
                exit_code: None,
                duration_ms: self.now().saturating_sub(command.started_at),
                reason: Some(otherwise),
            },
            Err(error) => {
                tracing::warn!(command = %command.id, cause = %chain(&error), "cannot read a command's log");
                CommandEnd {
                    exit_code: None,
                    duration_ms: self.now().saturating_sub(command.started_at),
                    reason: Some(otherwise),
                }
            }
        }
    }

    /// A command, in whatever state its session is. Looks at the running ones first: they leave
    /// only after their row is complete.
    pub(crate) async fn find_command(
        &self,
        team: &str,
        session: &SessionId,
        id: &CommandId,
    ) -> Result<Found, Error> {
        let live = self.live(session);
        match &live {
            Some(live) if live.row().namespace.team != team => {
                return Err(Error::no_session(session));
            }
            Some(_) => {}
            None => {
                self.session_row(team, session).await?;
            }
        }
        if let Some(running) = live.as_ref().and_then(|l| l.running(id)) {
            let Running { command, progress } = running;
            return Ok(Found { command, progress: Some(progress), live });
        }
        let row = self.db.command(session, id).await?.ok_or_else(|| Error::no_command(id))?;
        Ok(Found { command: row.command, progress: None, live })
    }

    /// Somebody waits for a command that runs: for as long as it does, its sandbox is in use.
    pub(crate) fn attended(&self, found: &Found) -> Option<ActivityHold> {
        let live = found.live.as_ref().filter(|_| found.command.end.is_none())?;
        Some(self.activity.hold(&live.row().session.sandbox_id))
    }

    async fn follow_command(
        self: &Arc<Self>,
        team: &str,
        session: &SessionId,
        id: &CommandId,
    ) -> Result<Follow, Error> {
        let found = self.find_command(team, session, id).await?;
        let mut follow = Follow::at(Arc::clone(self), found, Cursor::default());
        follow.attend();
        Ok(follow)
    }
}

impl Engine {
    /// Starts a command and answers when its program runs.
    ///
    /// # Errors
    /// 400 when it cannot be executed; 410 or 422 when the session does not run.
    pub async fn start_command(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        spec: CommandSpec,
        idempotency_key: Option<String>,
    ) -> Result<Command, Error> {
        self.inner.check_session(who, &[Verb::Exec], team, id).await?;
        check(&spec)?;
        check_key(idempotency_key.as_deref())?;
        let (live, row) = self.inner.working(team, id).await?;
        tracing::debug!(by = %who.name, session = %id, program = %spec.program, "start command");
        let inner = Arc::clone(&self.inner);
        let work = async move {
            let Some(key) = idempotency_key else {
                return inner.start(&live, &row, spec, None).await;
            };
            // The second of two equal calls waits for the first to know what became of it.
            let session = &row.session.id;
            let _held = inner.key_locks.lock(&format!("command {session} {key}")).await;
            if let Some(first) = inner.db.command_by_key(session, &key).await? {
                let running = live.running(&first.command.id);
                return Ok(running.map_or(first.command, |r| r.command));
            }
            inner.start(&live, &row, spec, Some(key)).await
        };
        self.inner.run(self.inner.counted(Operation::Exec, work)).await
    }

    /// Follows a command's output from its very start.
    ///
    /// # Errors
    /// 404.
    pub async fn follow(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        command: &CommandId,
    ) -> Result<Follow, Error> {
        self.inner.check_session(who, &[Verb::Read, Verb::Exec], team, id).await?;
        self.inner.follow_command(team, id, command).await
    }

    /// Answers when a command has ended.
    ///
    /// # Errors
    /// 404.
    pub async fn wait_command(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        command: &CommandId,
    ) -> Result<Command, Error> {
        self.inner.check_session(who, &[Verb::Read, Verb::Exec], team, id).await?;
        let mut found = self.inner.find_command(team, id, command).await?;
        let _hold = self.inner.attended(&found);
        found.ended(&self.inner).await
    }

    /// A command as it is now.
    ///
    /// # Errors
    /// 404.
    pub async fn command(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        command: &CommandId,
    ) -> Result<Command, Error> {
        self.inner.check_session(who, &[Verb::Read, Verb::Exec], team, id).await?;
        Ok(self.inner.find_command(team, id, command).await?.command)
    }

    /// All commands of a session, newest first.
    ///
    /// # Errors
    /// 404.
    pub async fn commands(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
    ) -> Result<Vec<Command>, Error> {
        self.inner.check_session(who, &[Verb::Read, Verb::Exec], team, id).await?;
        self.inner.session_row(team, id).await?;
        let running: BTreeMap<CommandId, Command> = match self.inner.live(id) {
            Some(live) => {
                let ids: Vec<CommandId> = locked(&live.commands).keys().cloned().collect();
                ids.iter()
                    .filter_map(|c| live.running(c))
                    .map(|r| (r.command.id.clone(), r.command))
                    .collect()
            }
            None => BTreeMap::new(),
        };
        let rows = self.inner.db.commands(id, false).await?;
        let newest = |row: CommandRow| match running.get(&row.command.id) {
            Some(known) if row.command.end.is_none() => known.clone(),
            _ => row.command,
        };
        Ok(rows.into_iter().map(newest).collect())
    }

    /// Sends a signal to a command's process group. One that has ended is left alone.
    ///
    /// # Errors
    /// 400 for a number that is no signal, 404, 410 or 422 when the session does not run.
    pub async fn kill_command(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        command: &CommandId,
        signal: i32,
    ) -> Result<Command, Error> {
        self.inner.check_session(who, &[Verb::Exec], team, id).await?;
        if !(1..=64).contains(&signal) {
            return Err(Error::invalid(format!("Invalid signal: must be 1 to 64, got {signal}")));
        }
        let found = self.inner.find_command(team, id, command).await?;
        if found.command.end.is_some() {
            return Ok(found.command);
        }
        let (live, _) = self.inner.working(team, id).await?;
        tracing::debug!(by = %who.name, %command, signal, "signal");
        match self.inner.through(&live, live.handle.signal(command, signal)).await {
            Ok(()) => self.command(who, team, id, command).await,
            Err(error) => Err(self.inner.refine(id, error).await),
        }
    }

    /// Writes a command's standard input. Answers how many bytes it has received in all calls.
    ///
    /// # Errors
    /// 400 when standard input is not attached, 404 when the command has ended, 409 for an offset
    /// beyond what was received, 504 when the program does not read.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call of the API, each argument a part of it"
    )]
    pub async fn write_stdin(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        command: &CommandId,
        offset: Option<u64>,
        data: Bytes,
        close: bool,
    ) -> Result<(Command, u64), Error> {
        self.inner.check_session(who, &[Verb::Exec], team, id).await?;
        let found = self.inner.find_command(team, id, command).await?;
        if !found.command.attach_stdin {
            let message = format!(
                "Command {command} was not started with attachStdin; its standard input is empty."
            );
            return Err(Error::new(ErrorKind::Invalid, "command_stdin_unavailable", message));
        }
        if found.command.end.is_some() {
            let message = format!("Command {command} has ended; its standard input was not found.");
            return Err(Error::not_found(message));
        }
        let (live, _) = self.inner.working(team, id).await?;
        let write = live.handle.stdin(command, offset, data, close);
        match self.inner.through(&live, write).await {
            Ok(received) => Ok((found.command, received)),
            Err(error) => Err(self.inner.refine(id, error).await),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn an_image_says_what_nobody_else_does() {
        let env = map(&[
            ("PATH", "/image/bin"),
            ("HOME", "/root"),
            ("LANG", "de_DE"),
            ("A", "image"),
            ("B", "image"),
            ("SSL_CERT_FILE", "/image.pem"),
        ]);
        let image = ImageConfig { env, ..ImageConfig::default() };
        let env = environment(&image, "/p", &map(&[("A", "sandbox")]), &map(&[]), false);
        assert_eq!(env["PATH"], "/image/bin");
        assert_eq!(env["HOME"], USER_HOME);
        assert_eq!(
            (env["A"].as_str(), env["B"].as_str(), env["LANG"].as_str()),
            ("sandbox", "image", "de_DE")
        );
        assert_ne!(env["SSL_CERT_FILE"], "/image.pem", "the session's authority is in ours");
        let env = environment(&image, "/p", &map(&[("PATH", "/mine")]), &map(&[]), true);
        assert_eq!((env["PATH"].as_str(), env["HOME"].as_str()), ("/mine", ROOT_HOME));
    }

    #[test]
    fn the_environment_is_layered() {
        let none = ImageConfig::default();
        let env = environment(
            &none,
            "/p",
            &map(&[("A", "1"), ("PATH", "/x")]),
            &map(&[("A", "2")]),
            false,
        );
        assert_eq!(env["A"], "2");
        assert_eq!(env["PATH"], "/x");
        assert_eq!(env["HOME"], "/home/vercel-sandbox");
        assert_eq!(env["USER"], "vercel-sandbox");
        assert!(!env.contains_key("TERM"));
        let root = environment(&none, "/p", &map(&[]), &map(&[("HOME", "/h")]), true);
        assert_eq!((root["HOME"].as_str(), root["LOGNAME"].as_str()), ("/h", "root"));
        assert_eq!(root["PATH"], "/p");
        assert_eq!(root["SUDO_USER"], "vercel-sandbox");
        assert!(!env.contains_key("SUDO_USER"));
    }
}
