//! Rows that the tests of the store write.

#![allow(dead_code, reason = "each test executable uses a part of it")]

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use bivouac_store::{Db, Deleting, Durability, SandboxRow, SessionRow, StoreError};
use bivouac_types::id::{SandboxId, SessionId, SnapshotId};
use bivouac_types::name::Namespace;
use bivouac_types::policy::NetworkPolicy;
use bivouac_types::sandbox::{KeepLastSnapshots, Resources, Sandbox};
use bivouac_types::session::{Session, SessionStatus};

pub(crate) fn ns() -> Namespace {
    Namespace { team: "t".to_owned(), project: "p".to_owned() }
}

/// Opens the vault of a database, with the same key in each test.
pub(crate) async fn unlocked(db: Db) -> Db {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    write_key(&key, 7);
    db.unlock(&key).await.unwrap();
    db
}

/// A key file with nothing but one byte in it.
pub(crate) fn write_key(path: &Path, byte: u8) {
    let mut file =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path).unwrap();
    file.write_all(&[byte; 32]).unwrap();
}

pub(crate) fn rows(n: u8, name: &str) -> (SandboxRow, SessionRow) {
    let id = SandboxId::new(u64::from(n), [n; 10]);
    let session_id = SessionId::new(u64::from(n), [n; 10]);
    let sandbox = Sandbox {
        id: id.clone(),
        namespace: ns(),
        name: name.to_owned(),
        ephemeral: false,
        persistent: true,
        resources: Resources::default(),
        timeout_ms: 300_000,
        ports: vec![3000],
        env: BTreeMap::from([("A".to_owned(), "é\n\"'".to_owned())]),
        tags: BTreeMap::from([("k".to_owned(), "v".to_owned())]),
        image: "host".to_owned(),
        runtime: "node24".to_owned(),
        cwd: "/vercel/sandbox".to_owned(),
        policy: NetworkPolicy::DenyAll,
        snapshot_expiration_ms: Some(0),
        keep_last: Some(KeepLastSnapshots {
            count: 2,
            expiration: None,
            delete_evicted: Some(false),
        }),
        mounts: std::collections::BTreeMap::from([(
            "/data".to_owned(),
            bivouac_types::drive::Mount {
                drive: "d".to_owned(),
                mode: bivouac_types::drive::DriveMode::Snapshot,
            },
        )]),
        life: bivouac_types::life::Life {
            idle_stop_ms: Some(60_000),
            wake: true,
            ..bivouac_types::life::Life::default()
        },
        restarts: bivouac_types::life::Restarts { total: 3, in_a_row: 1, last_at: Some(70) },
        network_id: None,
        region: "iad1".to_owned(),
        failover_regions: vec!["sfo1".to_owned()],
        current_session_id: session_id.clone(),
        current_snapshot_id: None,
        status: SessionStatus::Pending,
        status_updated_at: 1,
        generation: 1,
        created_at: i64::from(n),
        updated_at: 1,
        total_active_cpu_ms: 0,
        total_duration_ms: 0,
    };
    let session = Session {
        id: session_id,
        sandbox_id: id,
        sandbox_name: name.to_owned(),
        status: SessionStatus::Pending,
        generation: 1,
        resources: Resources::default(),
        timeout_ms: 300_000,
        cwd: "/vercel/sandbox".to_owned(),
        runtime: "node24".to_owned(),
        image: "host".to_owned(),
        env: BTreeMap::new(),
        mounts: BTreeMap::new(),
        policy: NetworkPolicy::DenyAll,
        policy_generation: 3,
        policy_before: Some(NetworkPolicy::AllowAll),
        paused_at: Some(40),
        paused_ms: 7,
        keep_until: Some(90),
        source_snapshot_id: Some(SnapshotId::new(9, [9; 10])),
        id_range: u32::from(n),
        node: "node-a".to_owned(),
        region: "iad1".to_owned(),
        reason: None,
        requested_at: 1,
        created_at: i64::from(n),
        updated_at: 1,
        started_at: None,
        requested_stop_at: None,
        stopped_at: None,
        aborted_at: None,
        snapshotted_at: None,
        active_cpu_ms: None,
    };
    let sandbox = SandboxRow { sandbox, create_key: None, deleting: Deleting::No };
    let session =
        SessionRow { session, namespace: ns(), first: true, closing: None, settled: false };
    (sandbox, session)
}

pub(crate) async fn insert(
    db: &Db,
    sandbox: &SandboxRow,
    session: &SessionRow,
) -> Result<(), StoreError> {
    let mut tx = db.begin(Durability::Process).await?;
    tx.insert_sandbox(sandbox).await?;
    tx.insert_session(session).await?;
    tx.commit().await
}
