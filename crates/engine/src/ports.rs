//! TCP in and out of sandboxes: connections to what listens inside, listeners for what shall come out.
//!
//! Invariants: a connection is made by a process inside, so it reaches what a program there would and nothing
//! of the host; whoever holds one keeps the sandbox from being idle; a right is checked before anything is
//! asked of the sandbox. Called by HTTP (tunnels) and SSH; routes for browsers are in `preview`.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use bivouac_runtime::{DialTo, FileErrorKind, ListenAt, Listening, RuntimeError};
use bivouac_types::access::Verb;
use bivouac_types::name::Namespace;
use tokio::sync::watch;

use crate::Engine;
use crate::activity::ActivityHold;
use crate::api::Principal;
use crate::error::{Error, ErrorKind};
use crate::inner::{Inner, Live};

/// A connection into a sandbox.
#[derive(Debug)]
pub struct Dialed {
    /// Connected and non-blocking.
    pub socket: OwnedFd,
    /// Keeps the sandbox from being idle: lives as long as the connection.
    pub hold: ActivityHold,
    /// Turns true when the sandbox's session has ended: the socket may say nothing of it.
    pub gone: watch::Receiver<bool>,
}

impl Inner {
    /// Connects; what the runtime says of a port that is closed becomes a sentence for the caller.
    pub(crate) async fn connect(
        self: &Arc<Self>,
        live: &Arc<Live>,
        sandbox: &str,
        to: &DialTo,
    ) -> Result<OwnedFd, Error> {
        match self.through(live, live.handle.dial(to)).await {
            Ok(socket) => Ok(socket),
            Err(RuntimeError::File(file)) if file.kind == FileErrorKind::NotFound => {
                Err(match to {
                    DialTo::Port(port) => not_listening(sandbox, *port),
                    DialTo::Host { .. } => {
                        Error::new(ErrorKind::NotFound, NOT_LISTENING, file.message)
                    }
                })
            }
            Err(error) => Err(self.refine(live.handle.session(), error).await),
        }
    }
}

/// Code of the error that says that nobody answered a connection.
pub(crate) const NOT_LISTENING: &str = "not_listening";

fn not_listening(sandbox: &str, port: u16) -> Error {
    let message = format!(
        "Nothing listens on port {port} in sandbox '{sandbox}': start the program, and have it bind to \
         0.0.0.0 or 127.0.0.1."
    );
    Error::new(ErrorKind::NotFound, NOT_LISTENING, message).with("port", port)
}

impl Engine {
    /// Connects to a port of a sandbox, or from inside of it to a host. With `wake` a sandbox that does not
    /// run is started first.
    ///
    /// # Errors
    /// 403 without the verb `exec`, 404 for the sandbox, 404 `not_listening` when nobody answers, 410 or 422
    /// for one that does not run.
    pub async fn dial(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        to: &DialTo,
        wake: bool,
    ) -> Result<Dialed, Error> {
        who.may(Verb::Exec, ns)?;
        let (live, row) = self.inner.awake(ns, sandbox, wake).await?;
        let hold = self.inner.activity.hold(&row.session.sandbox_id);
        let socket = self.inner.connect(&live, sandbox, to).await?;
        Ok(Dialed { socket, hold, gone: live.handle.gone() })
    }

    /// Listens inside of a running sandbox. What comes is the caller's to accept.
    ///
    /// # Errors
    /// 403 without the verb `exec`, 404, 409 for an address that is taken, 410 or 422 for one that does not
    /// run.
    pub async fn listen_inside(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        at: &ListenAt,
    ) -> Result<(Listening, ActivityHold), Error> {
        who.may(Verb::Exec, ns)?;
        let (live, row) = self.inner.awake(ns, sandbox, false).await?;
        let hold = self.inner.activity.hold(&row.session.sandbox_id);
        match self.inner.through(&live, live.handle.listen(at)).await {
            Ok(listening) => Ok((listening, hold)),
            Err(error) => Err(self.inner.refine(live.handle.session(), error).await),
        }
    }
}
