//! The client's agent inside a sandbox, where the engine allows that.
//!
//! Whoever is the default user inside, or root, can have the client's agent sign while the socket is there: that is
//! why it takes `serve --ssh-agent-forwarding` and the client's `-A`. Invariant: the socket goes with the channel
//! that asked for it. Used by `session`.

use std::sync::Arc;

use bivouac_engine::{ActivityHold, Error};
use bivouac_runtime::{GuestListener, ListenAt};
use bivouac_types::command::CommandSpec;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::connection::{Shared, User};
use super::forward::{self, Opening};

/// A socket inside that leads to the client's agent.
pub(super) struct Agent {
    path: String,
    _stop: DropGuard,
}

impl Agent {
    /// Listens inside, in a place that nobody guesses.
    pub(super) async fn open(shared: &Arc<Shared>, user: &User) -> Result<Self, Error> {
        let mut random = [0u8; 16];
        getrandom::fill(&mut random).map_err(|error| {
            tracing::warn!(%error, "no randomness");
            Error::internal("The engine has no randomness.")
        })?;
        let path = format!("/tmp/bivouac-agent-{}.sock", crate::serve::record::hex(&random));
        let at = ListenAt::Unix { path: path.clone() };
        let (listening, hold) =
            shared.engine().listen_inside(&user.who, &user.ns, &user.sandbox, &at).await?;
        let listener = GuestListener::new(listening.socket).map_err(|error| {
            tracing::warn!(%error, "a socket from inside cannot be used");
            Error::internal("The engine cannot use a socket from inside.")
        })?;
        let stop = shared.over.child_token();
        let removal =
            Removal { shared: Arc::clone(shared), user: user.clone(), path: path.clone() };
        tokio::spawn(accept(listener, stop.clone(), hold, removal));
        Ok(Self { path, _stop: stop.drop_guard() })
    }

    /// Where it is inside.
    pub(super) fn path(&self) -> &str {
        &self.path
    }
}

struct Removal {
    shared: Arc<Shared>,
    user: User,
    path: String,
}

async fn accept(
    mut listener: GuestListener,
    stop: CancellationToken,
    hold: ActivityHold,
    removal: Removal,
) {
    let taking = async {
        while let Ok(stream) = listener.accept().await {
            forward::carry(&removal.shared, Opening::Agent, stream);
        }
    };
    let _ = stop.run_until_cancelled(taking).await;
    drop(listener);
    drop(hold);
    removal.remove().await;
}

impl Removal {
    /// Takes the name of the socket away. A sandbox that has ended has lost it with its session.
    async fn remove(self) {
        let Self { shared, user, path } = self;
        // Nothing to read, and nobody who reads.
        let make = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC);
        let (Ok((stdin, _)), Ok((_, stdout)), Ok((_, stderr))) = (make(), make(), make()) else {
            return;
        };
        let spec = CommandSpec {
            program: "rm".to_owned(),
            args: vec!["-f".to_owned(), path],
            cwd: Some("/".to_owned()),
            env: std::collections::BTreeMap::new(),
            sudo: false,
            timeout_ms: Some(10_000),
            attach_stdin: false,
            tty: None,
            terminal: None,
        };
        let stdio = [stdin, stdout, stderr];
        let User { who, ns, sandbox, .. } = &user;
        if let Err(error) = shared.engine().exec_passed(who, ns, sandbox, spec, stdio).await {
            tracing::debug!(%error, "the socket of an agent could not be removed");
        }
    }
}
