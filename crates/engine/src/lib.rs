//! Every decision of the product: the only door for HTTP, SSH, MCP and the command line.
//!
//! Owns: the life of sandboxes, sessions, commands and snapshots. Invariant: a change of status is a
//! compare-and-set on the row, what needs several steps writes its intent first, and a crash between
//! any two of them is settled by a reconciler at the next start. No HTTP, no SQL text, no system call.
//!
//! Policies are compiled, kept and told to the broker of a session here; what they mean is the egress
//! crate's.
#![forbid(unsafe_code)]

mod access;
mod activity;
mod adopt;
mod api;
mod archives;
mod attached;
mod audit;
mod clock;
mod commands;
mod counters;
mod credentials;
mod cursor;
mod deletion;
mod drives;
mod egress;
mod error;
mod fault;
mod files;
mod follow;
mod forks;
mod gc;
mod holds;
mod hooks;
mod identity;
mod idle;
mod ids;
mod images;
mod inner;
mod jwt;
mod leases;
mod lifecycle;
mod live;
mod locks;
mod meters;
mod paths;
mod pause;
mod ports;
mod preview;
mod providers;
mod reconcile;
mod registry;
mod request;
mod resolve;
mod restart;
mod rollback;
mod routes;
mod sandboxes;
mod secrets;
mod sessions;
mod snapshots;
mod sources;
mod ssh_keys;
mod template;
mod terminals;
#[cfg(test)]
mod tests;
mod usage;
mod uses;
mod wake;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bivouac_runtime::Runtime;
use bivouac_store::Db;
use bivouac_types::Millis;
use bivouac_types::id::SessionId;
use bivouac_types::session::SessionStatus;

pub use access::{MadeToken, NewToken, RevokedTokens, Token, Whoami};
pub use activity::ActivityHold;
pub use api::*;
pub use archives::ImportSpec;
pub use attached::Passed;
pub use audit::{AuditLog, AuditQuery};
pub use bivouac_egress::message::Explained;
pub use bivouac_runtime::archive::Format;
pub use bivouac_runtime::{
    DialTo, DriveEntry, DriveUsage, EntryKind, FileReader, FileWriter, GuestStream, ListenAt,
    Listener, Listening, Space, StoredUsage, Usage,
};
pub use bivouac_store::SecretRow;
pub use clock::{Clock, ManualClock, SystemClock};
pub use counters::{Count, Operation};
pub use credentials::{Credential, CredentialChange, CredentialSpec};
pub use drives::{Attachment, DriveView, ListDrives, NewDrive, SortDrives};
pub use egress::calls::PolicyState;
pub use egress::desk::EgressCount;
pub use egress::edit::{PolicyEdit, Target};
pub use egress::learn::{Learned, Learning};
pub use egress::{EgressConfig, Resolvers};
pub use error::{Cause, Error, ErrorKind};
pub use fault::FaultPoint;
pub use follow::Follow;
pub use gc::{Collected, Damage, Orphan};
pub use images::{Pull, PullImage, PullState, PulledImage};
pub use leases::Lease;
pub use meters::{Meters, SessionUse};
pub use pause::Paused;
pub use ports::Dialed;
pub use preview::{Pass, PreviewRoute, Reached, Seal};
pub use registry::Login;
pub use request::for_request;
pub use routes::{LINK_TTL_MS, Link, Port};
pub use secrets::{HOST_SOURCES, MAX_SECRET, NewSecret};
pub use ssh_keys::{NewSshKey, SshKey};
pub use terminals::{Attached, Cursor, NewTerminal, Since, Terminal, TerminalInput};
pub use usage::{DiskUsage, UsageOf};
pub use uses::{Checked, Use, checked};

use crate::inner::Inner;
use crate::lifecycle::chain;

/// Parameter of a query that carries a link's signature.
pub const LINK_QUERY: &str = "__bivouac";

/// How this engine is set up.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// This host's name in rows.
    pub node: String,
    /// The engine's own token: who shows it may do everything. Without one only made tokens count.
    pub token: Option<bivouac_types::secret::Secret>,
    /// Image of a create that names none.
    pub default_image: String,
    /// While the default is not built, `host` is the default.
    pub host_until_built: bool,
    /// Where clients reach the engine, for example `http://127.0.0.1:7070`: routes take its port.
    pub public_url: String,
    /// What is behind the label of a route, `DOMAIN[:PORT]`, reached over TLS; absent is `localhost` with the
    /// port of `public_url`.
    pub preview_domain: Option<String>,
    /// What identity tokens say of their issuer; absent is `public_url`.
    pub issuer: Option<String>,
    /// Kinds of references to this host that secrets may be: `env`, `file`, `exec`, `vault`.
    pub secret_sources: Vec<String>,
    /// More roots (a PEM file) that the engine trusts when it asks for secrets.
    pub extra_ca: Option<std::path::PathBuf>,
    /// Bytes that a sandbox may write over its image.
    pub disk_bytes: u64,
    /// Processes and threads of one session.
    pub pids: u32,
    /// How many id ranges this host has: the most sessions alive at once.
    pub id_ranges: u32,
    /// What brokers are told about the world.
    pub egress: EgressConfig,
}

impl EngineConfig {
    /// A set-up with the documented limits: 32 GB of disk, 2,048 processes, 32,768 id ranges.
    pub fn new(
        node: impl Into<String>,
        default_image: impl Into<String>,
        public_url: impl Into<String>,
    ) -> Self {
        Self {
            node: node.into(),
            token: None,
            default_image: default_image.into(),
            host_until_built: false,
            public_url: public_url.into(),
            preview_domain: None,
            issuer: None,
            secret_sources: HOST_SOURCES.map(str::to_owned).to_vec(),
            extra_ca: None,
            disk_bytes: 32 << 30,
            pids: 2048,
            id_ranges: 32_768,
            egress: EgressConfig::default(),
        }
    }
}

/// The engine.
#[derive(Debug)]
pub struct Engine {
    inner: Arc<Inner>,
}

impl Engine {
    /// Settles what a crash left (adopts what runs, ends what does not, undoes what was half made)
    /// and starts the reconcilers.
    ///
    /// # Errors
    /// When the database or the runtime does not answer. A single session that cannot be settled is
    /// logged and tried again later.
    pub async fn open(
        config: EngineConfig,
        db: Db,
        runtime: Arc<dyn Runtime>,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, Error> {
        let engine = Self { inner: Arc::new(Inner::new(config, db, runtime, clock)) };
        engine.inner.load_tokens().await?;
        engine.inner.adopt_all().await?;
        engine.inner.start_reconcilers();
        Ok(Arc::new(engine))
    }

    /// Its set-up.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.inner.config
    }

    /// Name of the image of a create that names none, at the moment.
    pub async fn default_image(&self) -> String {
        self.inner.default_image().await.to_owned()
    }

    /// Names of the images that a create may name, at the moment.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub async fn images(&self) -> Result<Vec<String>, Error> {
        Ok(self.inner.runtime.images().await?.into_iter().map(|image| image.name).collect())
    }

    /// How this node keeps volumes, and how full it is. `None`: there is nothing to tell.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub async fn storage(&self) -> Result<Option<bivouac_runtime::pool::Storage>, Error> {
        Ok(self.inner.runtime.storage().await?)
    }

    /// How many sessions run on this node.
    #[must_use]
    pub fn live_sessions(&self) -> usize {
        self.inner.live_count()
    }

    /// Whether a session runs or an operation is in the middle of its steps.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.inner.live_count() > 0 || self.inner.operations() > 0
    }

    /// When the time of a running session is over (of a paused one: if it went on now): for lists, which carry
    /// no sessions.
    #[must_use]
    pub fn deadline(&self, session: &SessionId) -> Option<Millis> {
        let row = self.inner.live(session)?.row();
        let now = self.inner.now();
        (row.session.status == SessionStatus::Running).then(|| row.session.deadline_at(now))
    }

    /// Takes no more work. With `stop_sandboxes` every running session is stopped cleanly first;
    /// else they go on without the engine and are adopted by the next one.
    ///
    /// # Errors
    /// When a session could not be stopped; the others are.
    pub async fn shutdown(&self, stop_sandboxes: bool) -> Result<(), Error> {
        self.inner.closing.store(true, Ordering::Release);
        let mut failed = None;
        // First, so that a create in the middle of its steps has a session that can be stopped.
        self.inner.wait_idle().await;
        if stop_sandboxes {
            let ids = self.inner.live_ids();
            let stops = ids.iter().map(|id| async move { (id, self.inner.stop_shared(id).await) });
            for (id, result) in futures_util::future::join_all(stops).await {
                if let Err(error) = result {
                    tracing::error!(session = %id, cause = %chain(&error), "cannot stop a session");
                    failed = Some(error);
                }
            }
        }
        self.inner.finish_work().await;
        if let Err(error) = self.inner.release_images(0).await {
            tracing::warn!(cause = %chain(&error), "could not let go of unused images");
        }
        if let Err(error) = self.inner.runtime.close().await {
            tracing::warn!(%error, "the runtime could not let go of this host");
        }
        failed.map_or(Ok(()), Err)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Tasks hold the shared state; without this they would outlive the engine.
        self.inner.abort_tasks();
    }
}
