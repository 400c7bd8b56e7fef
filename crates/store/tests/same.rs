//! The same random calls on SQLite and on PostgreSQL give the same answers, row for row and error for
//! error. Needs `BIVOUAC_TEST_POSTGRES`, as `postgres.rs`.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]
#![allow(clippy::print_stderr, reason = "a test that finds no server says so")]

mod common;

use std::fmt::Debug;

use bivouac_store::{
    Address, ChildFilter, Closing, CommandRow, Db, Deleting, Durability, Position, SandboxFilter,
    SandboxOrder, SandboxRow, SnapshotRow, SortKey, StoreError,
};
use bivouac_testkit::TestDatabase;
use bivouac_types::access::Reach;
use bivouac_types::command::{Command, CommandEnd, EndReason};
use bivouac_types::id::{CommandId, SandboxId, SessionId, SnapshotId};
use bivouac_types::name::Namespace;
use bivouac_types::session::SessionStatus;
use bivouac_types::snapshot::{Purpose, Snapshot, SnapshotStatus};
use common::{insert, rows, unlocked};

const SEEDS: u64 = 8;
const CALLS: u32 = 120;
/// Sandboxes, and as many names: they meet.
const SANDBOXES: u64 = 6;
const NAMES: [&str; 8] = ["a", "B", "a-c", "ab", "é", "A", "Ab", "_"];
const STATUSES: [SessionStatus; 5] = [
    SessionStatus::Pending,
    SessionStatus::Running,
    SessionStatus::Stopping,
    SessionStatus::Stopped,
    SessionStatus::Aborted,
];

/// Random numbers that are the same at each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % below
    }

    fn coin(&mut self) -> bool {
        self.roll(2) == 0
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.roll(all.len() as u64)).unwrap()].clone()
    }
}

fn byte(n: u64) -> u8 {
    u8::try_from(n).unwrap()
}

fn sandbox_id(n: u64) -> SandboxId {
    SandboxId::new(n, [byte(n); 10])
}

fn session_id(n: u64) -> SessionId {
    SessionId::new(n, [byte(n); 10])
}

fn snapshot_id(n: u64) -> SnapshotId {
    SnapshotId::new(n, [byte(n); 10])
}

fn command_id(n: u64) -> CommandId {
    CommandId::new(n, [byte(n); 10])
}

/// An answer as text: values in full, errors by kind.
fn told<T: Debug>(result: Result<T, StoreError>) -> String {
    match result {
        Ok(value) => format!("{value:?}"),
        Err(StoreError::Changed { .. }) => "changed".to_owned(),
        Err(StoreError::Taken(what)) => format!("taken: {what:?}"),
        Err(other) => panic!("neither an answer nor a conflict: {other:?}"),
    }
}

fn position(dice: &mut Dice, key: SortKey) -> Option<Position> {
    dice.coin().then(|| Position { key, id: sandbox_id(1 + dice.roll(SANDBOXES)).to_string() })
}

fn within(dice: &mut Dice, ns: &Namespace) -> Vec<Reach> {
    let all = [
        Reach::Everything,
        Reach::Team(ns.team.clone()),
        Reach::Project(ns.clone()),
        Reach::Team("other".to_owned()),
    ];
    (0..dice.roll(3)).map(|_| dice.of(&all)).collect()
}

fn filter(dice: &mut Dice, ns: &Namespace) -> SandboxFilter {
    let orders = [
        SandboxOrder::CreatedAt,
        SandboxOrder::Name,
        SandboxOrder::StatusUpdatedAt,
        SandboxOrder::CurrentSnapshotId,
    ];
    let order = dice.of(&orders);
    let key = match order {
        SandboxOrder::CreatedAt | SandboxOrder::StatusUpdatedAt => {
            SortKey::Int(i64::try_from(dice.roll(8)).unwrap())
        }
        SandboxOrder::Name => SortKey::Text(dice.of(&NAMES).to_owned()),
        SandboxOrder::CurrentSnapshotId => SortKey::Text(snapshot_id(dice.roll(5)).to_string()),
    };
    SandboxFilter {
        namespace: dice.coin().then(|| ns.clone()),
        within: dice.coin().then(|| within(dice, ns)),
        name_prefix: dice.coin().then(|| dice.of(&["a", "A", "", "é", "a%", "_"]).to_owned()),
        tag: (dice.roll(4) == 0).then(|| ("k".to_owned(), dice.of(&["v", "V", ""]).to_owned())),
        order,
        ascending: dice.coin(),
        after: position(dice, key),
        limit: i64::try_from(dice.roll(5)).unwrap(),
    }
}

fn children(dice: &mut Dice, ns: &Namespace) -> ChildFilter {
    let key = SortKey::Int(i64::try_from(dice.roll(8)).unwrap());
    ChildFilter {
        namespace: ns.clone(),
        sandbox: dice.coin().then(|| sandbox_id(1 + dice.roll(SANDBOXES))),
        sandbox_name: (dice.roll(4) == 0).then(|| dice.of(&NAMES).to_owned()),
        since: dice.coin().then_some(2),
        until: dice.coin().then_some(5),
        ascending: dice.coin(),
        after: position(dice, key),
        limit: i64::try_from(dice.roll(6)).unwrap(),
    }
}

fn command(dice: &mut Dice) -> CommandRow {
    let n = 1 + dice.roll(20);
    let command = Command {
        id: command_id(n),
        session_id: session_id(1 + dice.roll(SANDBOXES)),
        name: "sh".to_owned(),
        args: vec!["-c".to_owned(), "echo 'ü\"\\'".to_owned()],
        cwd: String::new(),
        attach_stdin: dice.coin(),
        tty: dice.coin(),
        terminal: None,
        started_at: i64::MAX - 1,
        end: None,
    };
    let key = dice.coin().then(|| format!("key {}", dice.roll(5)));
    CommandRow { command, idempotency_key: key }
}

fn snapshot(dice: &mut Dice, ns: &Namespace) -> SnapshotRow {
    let n = 1 + dice.roll(5);
    let snapshot = Snapshot {
        id: snapshot_id(n),
        source_session_id: session_id(1 + dice.roll(SANDBOXES)),
        sandbox_name: dice.of(&NAMES).to_owned(),
        status: SnapshotStatus::Created,
        image: "host".to_owned(),
        runtime: "node24".to_owned(),
        region: "iad1".to_owned(),
        size_bytes: i64::MAX,
        automatic: dice.coin(),
        parent_id: dice.coin().then(|| snapshot_id(1 + dice.roll(5))),
        expiration_ms: i64::try_from(dice.roll(3)).unwrap() * 10,
        expires_at: dice.coin().then_some(10),
        created_at: i64::try_from(n).unwrap(),
        updated_at: 1,
        last_used_at: None,
        labels: [("k".to_owned(), dice.of(&NAMES).to_owned())].into(),
        purpose: if dice.coin() { Purpose::Kept } else { Purpose::Fork },
        stall_us: 7,
        measured: dice.coin(),
    };
    let sandbox_id = sandbox_id(1 + dice.roll(SANDBOXES));
    SnapshotRow { snapshot, namespace: ns.clone(), node: "node-a".to_owned(), sandbox_id }
}

/// A sandbox with a session, names, keys and id ranges drawn from few.
async fn create(db: &Db, dice: &mut Dice, ns: &Namespace) -> String {
    let name = dice.of(&NAMES);
    let (mut sandbox, mut session) = rows(byte(1 + dice.roll(SANDBOXES)), name);
    sandbox.sandbox.namespace = ns.clone();
    session.namespace = ns.clone();
    sandbox.create_key = (dice.roll(3) == 0).then(|| format!("key {}", dice.roll(3)));
    session.session.id_range = u32::try_from(dice.roll(SANDBOXES)).unwrap();
    sandbox.sandbox.tags.insert("k".to_owned(), dice.of(&["v", "V", ""]).to_owned());
    // Which one is told when several values are taken is the database's choice.
    match insert(db, &sandbox, &session).await {
        Err(StoreError::Taken(_)) => "taken".to_owned(),
        other => told(other),
    }
}

/// A write of a session, from what is there or from an older reading.
async fn change_session(db: &Db, dice: &mut Dice) -> String {
    let id = session_id(1 + dice.roll(SANDBOXES));
    let (status, stale, settled) = (dice.of(&STATUSES), dice.roll(4) == 0, dice.roll(4) == 0);
    let Some(mut row) = db.session(&id).await.unwrap() else { return "none".to_owned() };
    let before = if stale { SessionStatus::Snapshotting } else { row.session.status };
    row.session.status = status;
    row.session.updated_at += 1;
    row.settled |= settled;
    let n = 1 + dice.roll(5);
    row.closing = dice.coin().then(|| Closing {
        snapshot_id: snapshot_id(n),
        automatic: n.is_multiple_of(2),
        rollback: n % 3 == 1,
        expiration_ms: 0,
    });
    let mut tx = db.begin(Durability::Process).await.unwrap();
    let result = tx.update_session(before, &mut row).await;
    if result.is_ok() {
        tx.add_totals(&row.session.sandbox_id, 1, 2).await.unwrap();
        tx.commit().await.unwrap();
    }
    told(result.map(|()| row))
}

async fn change_sandbox(db: &Db, dice: &mut Dice) -> String {
    let id = sandbox_id(1 + dice.roll(SANDBOXES));
    let (stale, going, routes) = (dice.roll(4) == 0, dice.roll(8) == 0, dice.coin());
    let ports = [(3000, format!("sb-{}", dice.roll(4))), (80, format!("sb-{}", 10 + dice.roll(4)))];
    let snapshot = dice.coin().then(|| snapshot_id(1 + dice.roll(5)));
    let Some(mut row) = db.sandbox(&id).await.unwrap() else { return "none".to_owned() };
    row.sandbox.generation -= i64::from(stale);
    row.sandbox.current_snapshot_id = snapshot;
    row.sandbox.tags.insert("n".to_owned(), "1".to_owned());
    if going {
        row.deleting = if dice.coin() { Deleting::Yes } else { Deleting::Unborn };
    }
    let mut tx = db.begin(Durability::Power).await.unwrap();
    let mut result = tx.update_sandbox(&mut row).await;
    if result.is_ok() && routes {
        result = tx.write_routes(&id, &ports).await;
    }
    if result.is_ok() {
        tx.commit().await.unwrap();
    }
    told(result.map(|()| row))
}

async fn change_snapshot(db: &Db, dice: &mut Dice, ns: &Namespace) -> String {
    let (row, id, now) =
        (snapshot(dice, ns), snapshot_id(1 + dice.roll(5)), 5 + i64::from(dice.coin()));
    let what = dice.roll(9);
    let mut tx = db.begin(Durability::Power).await.unwrap();
    let result = match what {
        0 | 1 => tx.insert_snapshot(&row).await.map(|()| true),
        2 => tx.use_snapshot(&id, now).await,
        3 => tx.expire_snapshot(&id, now * 4).await,
        4 => tx.end_snapshot(&id, SnapshotStatus::Deleted, now).await,
        5 => tx.end_fork_snapshot(&id, now).await,
        6 => tx.set_snapshot_size(&id, now).await.map(|()| true),
        7 => {
            let labels = |text: &str| [("k".to_owned(), text.to_owned())].into();
            let (before, after) = (labels(dice.of(&NAMES)), labels(dice.of(&NAMES)));
            tx.set_snapshot_labels(&id, &before, &after, now).await
        }
        _ => tx.set_snapshot_expiration(&id, now - 5, now).await.map(|()| true),
    };
    tx.commit().await.unwrap();
    told(result)
}

async fn call(db: &Db, dice: &mut Dice, ns: &Namespace) -> String {
    match dice.roll(12) {
        0..3 => create(db, dice, ns).await,
        3..5 => change_session(db, dice).await,
        5..7 => change_sandbox(db, dice).await,
        7 => change_snapshot(db, dice, ns).await,
        8 => told(db.insert_command(&command(dice)).await),
        9 => {
            let id = command_id(1 + dice.roll(20));
            let reason = dice.coin().then_some(EndReason::OutOfMemory);
            let end = CommandEnd { exit_code: Some(-1), duration_ms: 0, reason };
            told(db.end_command(&id, &end).await)
        }
        10 => told(db.remove_command(&command_id(1 + dice.roll(20))).await),
        _ if dice.coin() => told(db.remove_sandbox(&sandbox_id(1 + dice.roll(SANDBOXES))).await),
        _ => told(db.remove_session(&session_id(1 + dice.roll(SANDBOXES))).await),
    }
}

/// Everything that can be asked.
async fn look(db: &Db, dice: &mut Dice, ns: &Namespace) -> Vec<String> {
    let (sandbox, session) =
        (sandbox_id(1 + dice.roll(SANDBOXES)), session_id(1 + dice.roll(SANDBOXES)));
    let snapshot = snapshot_id(1 + dice.roll(5));
    let (key, name) = (format!("key {}", dice.roll(5)), dice.of(&NAMES));
    let mut settled: Vec<_> = db.settled_with_open_commands().await.unwrap();
    settled.sort_unstable();
    let by_key: Option<SandboxRow> = db.sandbox_by_create_key(ns, &key).await.unwrap();
    vec![
        told(db.sandbox(&sandbox).await),
        told(db.sandbox_by_name(ns, name).await),
        told(Ok(by_key)),
        told(db.sandboxes(&filter(dice, ns)).await),
        told(db.sandboxes(&filter(dice, ns)).await),
        told(db.sandboxes_being_deleted().await),
        told(db.ephemeral_ended_before(9).await),
        told(db.snapshot_is_current(&snapshot, Some(&sandbox)).await),
        told(db.routes(&sandbox).await),
        told(db.session(&session).await),
        told(db.sessions(&children(dice, ns)).await),
        told(db.unsettled_sessions("node-a").await),
        told(db.unsettled_sessions_of(&sandbox).await),
        told(db.sessions_ended_before(9).await),
        told(db.session_ids(&sandbox).await),
        told(db.commands(&session, dice.coin()).await),
        told(db.command_by_key(&session, &key).await),
        told(Ok(settled)),
        told(db.snapshot(&snapshot).await),
        told(db.snapshots(&children(dice, ns), 6, None).await),
        told(db.snapshots(&children(dice, ns), 6, Some(&("k".to_owned(), name.to_owned()))).await),
        told(db.unmeasured_snapshots("node-a").await),
        told(db.unwanted_fork_snapshots("node-a").await),
        told(db.snapshots_of(&sandbox).await),
        told(db.snapshot_children(&snapshot).await),
        told(db.snapshots_on("node-a").await),
        told(db.snapshots_expired(10).await),
        told(db.next_snapshot_expiry().await),
        told(db.image_is_used("host").await),
    ]
}

#[tokio::test]
async fn both_databases_answer_the_same() {
    let ns = Namespace { team: "t".to_owned(), project: "p".to_owned() };
    for seed in 1..=SEEDS {
        let Some(server) = TestDatabase::new().unwrap() else {
            eprintln!("not run: BIVOUAC_TEST_POSTGRES is not set");
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let sqlite = unlocked(Db::open_file(&dir.path().join("x.db")).await.unwrap()).await;
        let postgres =
            unlocked(Db::open(&Address::parse(server.url()).unwrap()).await.unwrap()).await;
        let first = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed);
        let (mut one, mut two) = (Dice(first), Dice(first));
        for number in 0..CALLS {
            let (a, b) = (call(&sqlite, &mut one, &ns).await, call(&postgres, &mut two, &ns).await);
            assert_eq!(a, b, "seed {seed}, call {number}");
            if number % 4 == 0 {
                let (a, b) =
                    (look(&sqlite, &mut one, &ns).await, look(&postgres, &mut two, &ns).await);
                assert_eq!(a, b, "seed {seed}, after call {number}");
            }
            assert_eq!(one.0, two.0, "seed {seed}, call {number}: the calls went apart");
        }
    }
}
