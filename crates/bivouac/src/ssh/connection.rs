//! What all channels of one connection have in common.
//!
//! Invariant: who it is and which sandbox it is for is settled once, at the login; nothing of a connection outlives
//! [`Shared::over`]. Used by `handler`, `session`, `forward` and `agent`.

use std::sync::{Arc, OnceLock};

use bivouac_engine::{Engine, Error, ErrorKind, Principal, Use};
use bivouac_types::name::Namespace;
use russh::server::Handle;
use tokio_util::sync::CancellationToken;

use super::Server;
use super::feed::Feeds;

/// Who works where, and as whom inside.
#[derive(Debug, Clone)]
pub(super) struct User {
    pub(super) who: Principal,
    pub(super) ns: Namespace,
    pub(super) sandbox: String,
    pub(super) root: bool,
}

/// How a connection came.
#[derive(Debug, Clone)]
pub(crate) enum Door {
    /// Through the API: the token and the path have told who and where.
    Tunnel {
        /// Who showed the token.
        who: Principal,
        /// Where the sandbox is.
        ns: Namespace,
        /// Its name.
        sandbox: String,
    },
    /// To the port of `--ssh`: the key tells who, the user name where.
    Port,
}

/// One connection.
pub(super) struct Shared {
    pub(super) server: Arc<Server>,
    pub(super) door: Door,
    /// Where the client is, if that is known.
    pub(super) peer: Option<String>,
    pub(super) user: OnceLock<User>,
    /// To open channels towards the client.
    pub(super) handle: OnceLock<Handle>,
    pub(super) feeds: Arc<Feeds>,
    /// Cuts the connection; cancelled as well when it has ended.
    pub(super) over: CancellationToken,
}

impl Shared {
    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.server.engine
    }

    /// Writes down a use.
    pub(super) fn note(&self, user: &User, what: &str, outcome: u16) {
        let mut used =
            Use::new(&user.who, "ssh", what).on(&user.ns, user.sandbox.clone()).outcome(outcome);
        used.address.clone_from(&self.peer);
        self.engine().audit(used);
    }

    /// Writes down a login that was refused.
    pub(super) fn note_refused(&self) {
        let mut used = Use::of_nobody("ssh", "login").outcome(401);
        used.address.clone_from(&self.peer);
        self.engine().audit(used);
    }
}

/// How an error is written down: as HTTP's status for it.
pub(super) fn status(error: &Error) -> u16 {
    match error.kind {
        ErrorKind::Invalid => 400,
        ErrorKind::Unauthorized => 401,
        ErrorKind::Forbidden => 403,
        ErrorKind::NotFound => 404,
        ErrorKind::Conflict => 409,
        ErrorKind::Gone => 410,
        ErrorKind::Transition => 422,
        ErrorKind::TooMany => 429,
        ErrorKind::Unavailable => 503,
        ErrorKind::Timeout => 504,
        ErrorKind::Internal => 500,
    }
}
