//! Every decision of the product: the only door for HTTP, SSH, MCP and the command line.
//!
//! Owns: the life of sandboxes, sessions, commands and snapshots. Invariant: a change of status is a
//! compare-and-set on the row, what needs several steps writes its intent first, and a crash between
//! any two of them is settled by a reconciler at the next start. No HTTP, no SQL text, no system call.
#![forbid(unsafe_code)]

mod api;
mod clock;
mod error;

use std::sync::Arc;

use bivouac_runtime::Runtime;
use bivouac_store::Db;
use bivouac_types::command::{Command, CommandSpec};
use bivouac_types::id::{CommandId, SessionId, SnapshotId};
use bivouac_types::name::Namespace;
use bivouac_types::policy::NetworkPolicy;
use bivouac_types::sandbox::Sandbox;
use bivouac_types::session::Session;
use bivouac_types::snapshot::Snapshot;
use bytes::Bytes;

pub use api::*;
pub use bivouac_runtime::{FileReader, FileWriter};
pub use clock::{Clock, ManualClock, SystemClock};
pub use error::{Cause, Error, ErrorKind};

/// How this engine is set up.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// This host's name in rows.
    pub node: String,
    /// Image of a create that names none.
    pub default_image: String,
    /// Where clients reach the engine, for example `http://127.0.0.1:7070`: routes take its port.
    pub public_url: String,
    /// Bytes that a sandbox may write over its image.
    pub disk_bytes: u64,
    /// Processes and threads of one session.
    pub pids: u32,
    /// How many id ranges this host has: the most sessions alive at once.
    pub id_ranges: u32,
}

impl EngineConfig {
    /// A set-up with the documented limits: 32 GB of disk, 16,384 processes, 32,768 id ranges.
    pub fn new(
        node: impl Into<String>,
        default_image: impl Into<String>,
        public_url: impl Into<String>,
    ) -> Self {
        Self {
            node: node.into(),
            default_image: default_image.into(),
            public_url: public_url.into(),
            disk_bytes: 32 << 30,
            pids: 16_384,
            id_ranges: 32_768,
        }
    }
}

/// The engine.
#[derive(Debug)]
pub struct Engine {
    _x: (),
}

fn later<T>() -> Result<T, Error> {
    Err(Error::internal("being written"))
}

#[allow(missing_docs, unused_variables, clippy::missing_errors_doc)]
impl Engine {
    pub async fn open(
        config: EngineConfig,
        db: Db,
        runtime: Arc<dyn Runtime>,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Engine>, Error> {
        later()
    }
    pub fn config(&self) -> &EngineConfig {
        unreachable!()
    }
    pub fn live_sessions(&self) -> usize {
        0
    }
    pub async fn create(
        &self,
        who: &Principal,
        ns: &Namespace,
        spec: CreateSandbox,
    ) -> Result<View, Error> {
        later()
    }
    pub async fn get(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        resume: bool,
    ) -> Result<View, Error> {
        later()
    }
    pub async fn list(
        &self,
        who: &Principal,
        ns: &Namespace,
        query: ListSandboxes,
    ) -> Result<Page<Sandbox>, Error> {
        later()
    }
    pub async fn update(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        change: UpdateSandbox,
    ) -> Result<View, Error> {
        later()
    }
    pub async fn delete(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        delete_orphan_snapshots: bool,
    ) -> Result<Sandbox, Error> {
        later()
    }
    pub async fn fork(
        &self,
        who: &Principal,
        ns: &Namespace,
        source: &str,
        spec: ForkSandbox,
    ) -> Result<View, Error> {
        later()
    }
    pub async fn sessions(
        &self,
        who: &Principal,
        ns: &Namespace,
        query: ListChildren,
    ) -> Result<Page<Session>, Error> {
        later()
    }
    pub async fn session(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
    ) -> Result<View, Error> {
        later()
    }
    pub async fn stop(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
    ) -> Result<Stopped, Error> {
        later()
    }
    pub async fn extend_timeout(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        by_ms: i64,
    ) -> Result<Session, Error> {
        later()
    }
    pub async fn set_policy(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        policy: NetworkPolicy,
    ) -> Result<Session, Error> {
        later()
    }
    pub async fn snapshot(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        expiration_ms: Option<i64>,
    ) -> Result<(Snapshot, Session), Error> {
        later()
    }
    pub async fn start_command(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        spec: CommandSpec,
        idempotency_key: Option<String>,
    ) -> Result<Command, Error> {
        later()
    }
    pub async fn follow(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        command: &CommandId,
    ) -> Result<Follow, Error> {
        later()
    }
    pub async fn wait_command(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        command: &CommandId,
    ) -> Result<Command, Error> {
        later()
    }
    pub async fn command(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        command: &CommandId,
    ) -> Result<Command, Error> {
        later()
    }
    pub async fn commands(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
    ) -> Result<Vec<Command>, Error> {
        later()
    }
    pub async fn kill_command(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        command: &CommandId,
        signal: i32,
    ) -> Result<Command, Error> {
        later()
    }
    #[allow(clippy::too_many_arguments)]
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
        later()
    }
    pub async fn read_file(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        path: &str,
        cwd: Option<&str>,
    ) -> Result<FileReader, Error> {
        later()
    }
    pub async fn write_files(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        cwd: Option<&str>,
    ) -> Result<FileWriter, Error> {
        later()
    }
    pub async fn mkdir(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        path: &str,
        cwd: Option<&str>,
        recursive: bool,
    ) -> Result<(), Error> {
        later()
    }
    pub async fn snapshots(
        &self,
        who: &Principal,
        ns: &Namespace,
        query: ListChildren,
    ) -> Result<Page<Snapshot>, Error> {
        later()
    }
    pub async fn snapshot_by_id(
        &self,
        who: &Principal,
        team: &str,
        id: &SnapshotId,
    ) -> Result<Snapshot, Error> {
        later()
    }
    pub async fn delete_snapshot(
        &self,
        who: &Principal,
        team: &str,
        id: &SnapshotId,
    ) -> Result<Snapshot, Error> {
        later()
    }
    pub async fn snapshot_tree(
        &self,
        who: &Principal,
        ns: &Namespace,
        query: TreeQuery,
    ) -> Result<Tree, Error> {
        later()
    }
    pub async fn shutdown(&self, stop_sandboxes: bool) -> Result<(), Error> {
        later()
    }
}

/// A command's output from the very start, then followed until it ends.
#[derive(Debug)]
pub struct Follow {
    _x: (),
}

impl Follow {
    /// The next piece; `None` after [`Output::End`]. A caller that does not ask holds nothing back
    /// but its own stream.
    pub async fn next(&mut self) -> Option<Result<Output, Error>> {
        None
    }
}
