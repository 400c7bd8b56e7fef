//! The address of `--metrics-listen`: `/metrics` and nothing else, without a token.
//!
//! Invariant: it is there only when it was asked for, and answers nothing that acts or names a sandbox.
//! Called by `serve`.

use std::net::SocketAddr;

use anyhow::Context as _;
use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::cli::output;
use crate::http;

/// A listener, if one was asked for.
#[derive(Debug)]
pub(super) struct Metrics(Option<TcpListener>);

impl Metrics {
    /// Takes the address early: one that is taken is told before anything else is touched.
    ///
    /// # Errors
    /// The address is named.
    pub(super) async fn bind(address: Option<SocketAddr>) -> anyhow::Result<Self> {
        let Some(address) = address else { return Ok(Self(None)) };
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("could not listen on {address}; choose another address with --metrics-listen")
        })?;
        Ok(Self(Some(listener)))
    }

    /// Answers until told to end.
    pub(super) async fn serve(self, app: Router, mut ended: watch::Receiver<bool>) {
        let Some(listener) = self.0 else { return };
        if let Ok(address) = listener.local_addr() {
            output::progress(&format!("metrics without a token on http://{address}/metrics"));
        }
        http::serve(listener, None, app, async move {
            let _ = ended.wait_for(|end| *end).await;
        })
        .await;
    }
}
