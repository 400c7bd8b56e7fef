//! The store: compare-and-set, uniqueness, what a transaction keeps; on SQLite, or on PostgreSQL where
//! `BIVOUAC_TEST_DATABASE=postgres` says so. What concerns a file only is on SQLite always.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use bivouac_store::{
    Address, Closing, CommandRow, Db, Deleting, Durability, SandboxFilter, StoreError, Unique,
};
use bivouac_testkit::TestDatabase;
use bivouac_types::command::{Command, CommandEnd, EndReason};
use bivouac_types::id::{CommandId, SessionId, SnapshotId};
use bivouac_types::session::SessionStatus;
use common::{insert, ns, rows, unlocked};
use sqlx::SqlSafeStr as _;
use sqlx::migrate::{Migration, MigrationType, Migrator};

/// An empty database of the kind that the run is for.
async fn fresh() -> (Place, Db) {
    let place =
        Place { dir: tempfile::tempdir().unwrap(), server: TestDatabase::chosen().unwrap() };
    let address = match &place.server {
        Some(server) => Address::parse(server.url()).unwrap(),
        None => Address::file(&place.dir.path().join("a b?#%.db")),
    };
    let db = unlocked(Db::open(&address).await.unwrap()).await;
    (place, db)
}

struct Place {
    dir: tempfile::TempDir,
    server: Option<TestDatabase>,
}

#[tokio::test]
async fn rows_read_back_as_they_were_written() {
    let (_dir, db) = fresh().await;
    let (sandbox, mut session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    assert_eq!(db.sandbox(&sandbox.sandbox.id).await.unwrap().as_ref(), Some(&sandbox));
    assert_eq!(db.sandbox_by_name(&ns(), "box").await.unwrap().as_ref(), Some(&sandbox));
    assert_eq!(db.session(&session.session.id).await.unwrap().as_ref(), Some(&session));

    session.session.status = SessionStatus::Running;
    session.session.started_at = Some(5);
    session.session.updated_at = 5;
    session.closing = Some(Closing {
        snapshot_id: SnapshotId::new(2, [2; 10]),
        automatic: true,
        rollback: false,
        expiration_ms: 7,
    });
    let mut tx = db.begin(Durability::Power).await.unwrap();
    tx.update_session(SessionStatus::Pending, &mut session).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(session.session.generation, 2);
    assert_eq!(db.session(&session.session.id).await.unwrap().as_ref(), Some(&session));
    // The sandbox follows the status of its newest session.
    let followed = db.sandbox(&sandbox.sandbox.id).await.unwrap().unwrap();
    assert_eq!(followed.sandbox.status, SessionStatus::Running);
    assert_eq!((followed.sandbox.status_updated_at, followed.sandbox.generation), (5, 2));
}

#[tokio::test]
async fn a_write_of_an_older_row_is_refused() {
    let (_dir, db) = fresh().await;
    let (sandbox, session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    let (mut first, mut second) = (session.clone(), session.clone());
    first.session.status = SessionStatus::Running;
    second.session.status = SessionStatus::Stopping;
    let mut tx = db.begin(Durability::Process).await.unwrap();
    tx.update_session(SessionStatus::Pending, &mut first).await.unwrap();
    let refused = tx.update_session(SessionStatus::Pending, &mut second).await.unwrap_err();
    assert!(refused.is_changed());
    tx.commit().await.unwrap();
    // The same generation with another status, and the other way round.
    let mut wrong = first.clone();
    let mut tx = db.begin(Durability::Process).await.unwrap();
    assert!(tx.update_session(SessionStatus::Pending, &mut wrong).await.unwrap_err().is_changed());
    drop(tx);

    let (mut a, mut b) = (sandbox.clone(), sandbox.clone());
    a.sandbox.generation = 2;
    a.sandbox.persistent = false;
    let mut tx = db.begin(Durability::Process).await.unwrap();
    tx.update_sandbox(&mut a).await.unwrap();
    assert!(tx.update_sandbox(&mut b).await.unwrap_err().is_changed());
    tx.commit().await.unwrap();
    assert!(!db.sandbox(&sandbox.sandbox.id).await.unwrap().unwrap().sandbox.persistent);
}

#[tokio::test]
async fn an_uncommitted_transaction_leaves_nothing() {
    let (_dir, db) = fresh().await;
    let (sandbox, session) = rows(1, "box");
    let mut tx = db.begin(Durability::Process).await.unwrap();
    tx.insert_sandbox(&sandbox).await.unwrap();
    tx.insert_session(&session).await.unwrap();
    drop(tx);
    assert!(db.sandbox(&sandbox.sandbox.id).await.unwrap().is_none());
    insert(&db, &sandbox, &session).await.unwrap();
}

#[tokio::test]
async fn uniqueness_is_told_apart() {
    let (_dir, db) = fresh().await;
    let (mut sandbox, session) = rows(1, "box");
    sandbox.create_key = Some("k".to_owned());
    insert(&db, &sandbox, &session).await.unwrap();
    let routes = [(3000, "sb-one".to_owned())];
    let mut tx = db.begin(Durability::Process).await.unwrap();
    tx.write_routes(&sandbox.sandbox.id, &routes).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(db.routes(&sandbox.sandbox.id).await.unwrap(), routes);

    let taken = |result: Result<(), StoreError>| match result {
        Err(StoreError::Taken(what)) => what,
        other => panic!("{other:?}"),
    };
    let (other, other_session) = rows(2, "box");
    assert_eq!(taken(insert(&db, &other, &other_session).await), Unique::Name);
    let (mut other, other_session) = rows(2, "b");
    other.create_key = Some("k".to_owned());
    assert_eq!(taken(insert(&db, &other, &other_session).await), Unique::CreateKey);
    let (other, mut other_session) = rows(2, "b");
    other_session.session.id_range = 1;
    assert_eq!(taken(insert(&db, &other, &other_session).await), Unique::IdRange);
    other_session.session.id_range = 2;
    insert(&db, &other, &other_session).await.unwrap();
    let mut tx = db.begin(Durability::Process).await.unwrap();
    let result = tx.write_routes(&other.sandbox.id, &routes).await;
    assert_eq!(taken(result), Unique::Subdomain);
    drop(tx);

    // A settled session's range is free, and two creates without a key do not collide.
    let mut settled = session.clone();
    settled.settled = true;
    let mut tx = db.begin(Durability::Process).await.unwrap();
    tx.update_session(SessionStatus::Pending, &mut settled).await.unwrap();
    tx.commit().await.unwrap();
    let (third, mut third_session) = rows(3, "c");
    third_session.session.id_range = 1;
    insert(&db, &third, &third_session).await.unwrap();
    let unsettled = db.unsettled_sessions("node-a").await.unwrap();
    assert_eq!(unsettled.len(), 2);
    assert!(db.unsettled_sessions("node-b").await.unwrap().is_empty());
}

#[tokio::test]
async fn a_command_ends_once() {
    let (_dir, db) = fresh().await;
    let (sandbox, session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    let command = Command {
        id: CommandId::new(1, [1; 10]),
        session_id: session.session.id.clone(),
        name: "sh".to_owned(),
        args: vec!["-c".to_owned(), "echo 'ü'".to_owned()],
        cwd: "/".to_owned(),
        attach_stdin: true,
        tty: true,
        terminal: Some("main".to_owned()),
        started_at: 3,
        end: None,
    };
    let mut row = CommandRow { command, idempotency_key: Some("k".to_owned()) };
    db.insert_command(&row).await.unwrap();
    let (id, session_id) = (row.command.id.clone(), session.session.id.clone());
    assert_eq!(db.command(&session_id, &id).await.unwrap().as_ref(), Some(&row));
    assert_eq!(db.command_by_key(&session_id, "k").await.unwrap().as_ref(), Some(&row));
    let second = CommandRow {
        command: Command { id: CommandId::new(2, [2; 10]), terminal: None, ..row.command.clone() },
        ..row.clone()
    };
    let error = db.insert_command(&second).await.unwrap_err();
    assert!(matches!(error, StoreError::Taken(Unique::CommandKey)));
    let namesake = CommandRow {
        command: Command { id: CommandId::new(3, [3; 10]), ..row.command.clone() },
        idempotency_key: None,
    };
    let error = db.insert_command(&namesake).await.unwrap_err();
    assert!(matches!(error, StoreError::Taken(Unique::Terminal)), "{error}");
    let end = CommandEnd { exit_code: None, duration_ms: 4, reason: Some(EndReason::OutOfMemory) };
    db.end_command(&id, &end).await.unwrap();
    let other = CommandEnd { exit_code: Some(0), duration_ms: 9, reason: None };
    db.end_command(&id, &other).await.unwrap();
    row.command.end = Some(end);
    assert_eq!(db.command(&session_id, &id).await.unwrap().as_ref(), Some(&row));
    assert!(db.commands(&session_id, true).await.unwrap().is_empty());
    assert!(db.command(&SessionId::new(7, [7; 10]), &id).await.unwrap().is_none());

    db.remove_sandbox(&sandbox.sandbox.id).await.unwrap();
    assert!(db.session(&session_id).await.unwrap().is_none());
    assert!(db.command(&session_id, &id).await.unwrap().is_none());
}

#[tokio::test]
async fn what_is_being_deleted_is_not_listed() {
    let (_dir, db) = fresh().await;
    let (mut sandbox, session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    let filter = SandboxFilter { limit: 10, ..SandboxFilter::default() };
    assert_eq!(db.sandboxes(&filter).await.unwrap().len(), 1);
    sandbox.deleting = Deleting::WithOrphans;
    let mut tx = db.begin(Durability::Process).await.unwrap();
    tx.update_sandbox(&mut sandbox).await.unwrap();
    tx.commit().await.unwrap();
    assert!(db.sandboxes(&filter).await.unwrap().is_empty());
    let going = db.sandboxes_being_deleted().await.unwrap();
    assert_eq!(going[0].deleting, Deleting::WithOrphans);
}

#[tokio::test]
async fn a_file_is_private_and_opens_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.db");
    let url = format!("sqlite:{}", path.display());
    let db = unlocked(Db::open(&Address::parse(&url).unwrap()).await.unwrap()).await;
    let (sandbox, session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    for file in std::fs::read_dir(dir.path()).unwrap() {
        let file = file.unwrap();
        let mode = file.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600, "{:?}", file.path());
    }
    db.close().await;
    let db = unlocked(Db::open_file(&path).await.unwrap()).await;
    assert!(db.sandbox_by_name(&ns(), "box").await.unwrap().is_some());
}

async fn plain_sqlite(path: &Path, sql: &'static str) {
    let file = std::fs::File::create_new(path);
    drop(file);
    sqlx::any::install_default_drivers();
    let pool = sqlx::AnyPool::connect(&format!("sqlite://{}", path.display())).await.unwrap();
    sqlx::raw_sql(sql).execute(&pool).await.unwrap();
    pool.close().await;
}

#[tokio::test]
async fn what_is_not_ours_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let foreign = dir.path().join("foreign.db");
    plain_sqlite(&foreign, "CREATE TABLE recipes (id INTEGER)").await;
    let error = Db::open_file(&foreign).await.unwrap_err();
    assert!(matches!(&error, StoreError::Foreign { .. }), "{error:?}");
    assert!(error.to_string().contains("recipes"), "{error}");

    let newer = dir.path().join("newer.db");
    drop(Db::open_file(&newer).await.unwrap());
    plain_sqlite(
        &newer,
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
         VALUES (9999, 'later', 1, x'00', 0)",
    )
    .await;
    let error = Db::open_file(&newer).await.unwrap_err();
    assert!(matches!(&error, StoreError::Newer { found: 9999, .. }), "{error:?}");

    let junk = dir.path().join("junk.db");
    std::fs::write(&junk, vec![b'x'; 8192]).unwrap();
    assert!(Db::open_file(&junk).await.is_err());
    assert_eq!(std::fs::read(&junk).unwrap(), vec![b'x'; 8192]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writers_do_not_meet() {
    let (_dir, db) = fresh().await;
    let (sandbox, session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    let writers = (0..20).map(|_| {
        let (db, id) = (db.clone(), sandbox.sandbox.id.clone());
        tokio::spawn(async move {
            for _ in 0..20 {
                let level = Durability::Process;
                let mut tx = db.begin(level).await.unwrap();
                tx.add_totals(&id, 1, 2).await.unwrap();
                tx.commit().await.unwrap();
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    let sums = db.sandbox(&sandbox.sandbox.id).await.unwrap().unwrap().sandbox;
    assert_eq!((sums.total_active_cpu_ms, sums.total_duration_ms), (400, 800));
}

/// What an older version wrote is there after the tables were made anew, and goes along with its
/// sandbox.
#[tokio::test]
async fn records_of_the_first_schema_are_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("old.db");
    let old = include_str!("../migrations/0001_start.sql").into_sql_str();
    let step = Migration::new(1, "start".into(), MigrationType::Simple, old, false);
    drop(std::fs::File::create_new(&path).unwrap());
    sqlx::any::install_default_drivers();
    let pool = sqlx::AnyPool::connect(&format!("sqlite://{}", path.display())).await.unwrap();
    Migrator::with_migrations(vec![step]).run(&pool).await.unwrap();
    let (sandbox, session) = rows(1, "box");
    let (id, run) = (sandbox.sandbox.id.clone(), session.session.id.clone());
    let command = CommandId::new(1, [1; 10]);
    let texts = [
        format!(
            "INSERT INTO sandboxes VALUES ('{id}', 't', 'p', 'box', 0, 1, '{{}}', '{run}', NULL, \
             'running', 1, 1, 1, 1, 0, 0, NULL, 0)"
        ),
        format!("INSERT INTO sandbox_tags VALUES ('{id}', 'k', 'v')"),
        format!("INSERT INTO routes VALUES ('sb-old', '{id}', 3000)"),
        format!(
            "INSERT INTO sessions VALUES ('{run}', '{id}', 'box', 't', 'p', 'node-a', 1, \
             'running', 1, '{{}}', 1, NULL, 7, NULL, 1, 1, 1, NULL, NULL, NULL, NULL, NULL, NULL, \
             NULL, 0, 0, 0)"
        ),
        format!(
            "INSERT INTO commands VALUES ('{command}', '{run}', 'sh', '[\"-c\"]', '/', 0, 1, 1, 3, \
             9, NULL, 'key')"
        ),
    ];
    for text in texts {
        sqlx::query(sqlx::AssertSqlSafe(text)).execute(&pool).await.unwrap();
    }
    pool.close().await;

    let db = unlocked(Db::open_file(&path).await.unwrap()).await;
    assert_eq!(db.session_ids(&id).await.unwrap(), std::slice::from_ref(&run));
    assert_eq!(db.routes(&id).await.unwrap(), [(3000, "sb-old".to_owned())]);
    let found = db.command_by_key(&run, "key").await.unwrap().unwrap();
    assert_eq!(found.command.end.unwrap().exit_code, Some(3));
    db.remove_sandbox(&id).await.unwrap();
    assert!(db.session_ids(&id).await.unwrap().is_empty());
    assert!(db.routes(&id).await.unwrap().is_empty());
    assert!(db.command_by_key(&run, "key").await.unwrap().is_none());
    // The name and everything else that was taken is free.
    insert(&db, &sandbox, &session).await.unwrap();
}
