//! Commands on the caller's own descriptors, and files by SFTP: what SSH asks of a sandbox.
//!
//! Invariants: a right is checked before anything is asked of the sandbox; one that does not run is started;
//! whoever holds what is answered keeps the sandbox from being idle. Called by SSH.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use bivouac_types::access::Verb;
use bivouac_types::command::{Command, CommandSpec};
use bivouac_types::name::Namespace;
use tokio::sync::watch;

use crate::activity::ActivityHold;
use crate::api::Principal;
use crate::commands::check;
use crate::counters::Operation;
use crate::error::{Error, ErrorKind};
use crate::{Engine, paths};

/// A command that runs on its caller's descriptors.
#[derive(Debug)]
pub struct Passed {
    /// Its record.
    pub command: Command,
    /// Keeps the sandbox from being idle: lives as long as the connection.
    pub hold: ActivityHold,
    /// Turns true when the sandbox's session has ended.
    pub gone: watch::Receiver<bool>,
}

impl Engine {
    /// Starts a command on these three descriptors and answers when its program runs; nothing but its end goes to
    /// its log. A sandbox that does not run is started first.
    ///
    /// # Errors
    /// 403 without the verb `exec`, 404, 400 when it cannot be executed.
    pub async fn exec_passed(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        spec: CommandSpec,
        stdio: [OwnedFd; 3],
    ) -> Result<Passed, Error> {
        who.may(Verb::Exec, ns)?;
        check(&spec)?;
        if spec.tty.is_some() || spec.attach_stdin {
            return Err(Error::invalid(
                "Invalid command: it has its standard input and output already",
            ));
        }
        let (live, row) = self.inner.awake(ns, sandbox, true).await?;
        let hold = self.inner.activity.hold(&row.session.sandbox_id);
        let gone = live.handle.gone();
        tracing::debug!(by = %who.name, session = %row.session.id, program = %spec.program, "start command");
        let inner = Arc::clone(&self.inner);
        let work = async move { inner.start_on(&live, &row, spec, None, Some(stdio)).await };
        let command = self.inner.run(self.inner.counted(Operation::Exec, work)).await?;
        Ok(Passed { command, hold, gone })
    }

    /// Checks that somebody may work in a sandbox, whether or not it runs.
    ///
    /// # Errors
    /// 403 without the verb `exec`, 404.
    pub async fn reachable(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
    ) -> Result<(), Error> {
        who.may(Verb::Exec, ns)?;
        self.inner.named(ns, sandbox).await.map(drop)
    }

    /// Starts a sandbox that does not run.
    ///
    /// # Errors
    /// 403 without the verb `exec`, 404; what a resume says.
    pub async fn wake(&self, who: &Principal, ns: &Namespace, sandbox: &str) -> Result<(), Error> {
        who.may(Verb::Exec, ns)?;
        self.inner.awake(ns, sandbox, true).await.map(drop)
    }

    /// Starts a server of SFTP in a sandbox, as its default user or as root, in its working folder. Answers a
    /// non-blocking socket that speaks it; the server ends with that. A sandbox that does not run is started first.
    ///
    /// # Errors
    /// 403 without the verb `exec`, 404; 504 when the sandbox does not take part.
    pub async fn sftp(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        root: bool,
    ) -> Result<(OwnedFd, ActivityHold), Error> {
        who.may(Verb::Exec, ns)?;
        let (live, row) = self.inner.awake(ns, sandbox, true).await?;
        let hold = self.inner.activity.hold(&row.session.sandbox_id);
        let cwd = paths::absolute(&row.session.cwd, "")?;
        tracing::debug!(by = %who.name, session = %row.session.id, root, "start SFTP");
        // The answer comes from inside, which may make it wait for ever.
        match tokio::time::timeout(PATIENCE, live.handle.sftp(root, &cwd)).await {
            Ok(Ok(socket)) => Ok((socket, hold)),
            Ok(Err(error)) => Err(self.inner.refine(live.handle.session(), error).await),
            Err(_) => {
                let message = format!(
                    "SFTP did not start in sandbox '{sandbox}': it is busy, or stands still."
                );
                Err(Error::new(ErrorKind::Timeout, "sandbox_busy", message))
            }
        }
    }
}

/// How long a sandbox may take to start SFTP.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);
