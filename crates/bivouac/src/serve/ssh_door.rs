//! The address of `--ssh`.
//!
//! Invariant: it is there only when it was asked for. Called by `serve`.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::cli::output;
use crate::ssh;

/// A listener, if one was asked for.
#[derive(Debug)]
pub(super) struct SshDoor(Option<TcpListener>);

impl SshDoor {
    /// Takes the address early: one that is taken is told before anything else is touched.
    ///
    /// # Errors
    /// The address is named.
    pub(super) async fn bind(address: Option<SocketAddr>) -> anyhow::Result<Self> {
        let Some(address) = address else { return Ok(Self(None)) };
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("could not listen on {address}; choose another address with --ssh")
        })?;
        Ok(Self(Some(listener)))
    }

    /// Tells where it is.
    pub(super) fn announce(&self) {
        if let Some(address) = self.0.as_ref().and_then(|listener| listener.local_addr().ok()) {
            output::progress(&format!("SSH for registered keys on {address}"));
        }
    }

    /// Answers until told to end.
    pub(super) async fn serve(
        self,
        server: Option<Arc<ssh::Server>>,
        mut ended: watch::Receiver<bool>,
    ) {
        let (Some(listener), Some(server)) = (self.0, server) else { return };
        let end = async move {
            let _ = ended.wait_for(|end| *end).await;
        };
        server.listen(listener, end).await;
    }
}
