//! The store on PostgreSQL: what differs from SQLite, what a server that goes away does, and that both
//! answer the same to the same calls. Needs `BIVOUAC_TEST_POSTGRES` (script/test sets it); without it
//! there is nothing to test, which each test says.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]
#![allow(clippy::print_stderr, reason = "a test that finds no server says so")]

mod common;

use std::time::Duration;

use bivouac_store::{
    Address, CommandRow, Db, Durability, SandboxFilter, SandboxOrder, StoreError, Unique,
};
use bivouac_testkit::{TestDatabase, eventually};
use bivouac_types::command::{Command, CommandEnd};
use bivouac_types::id::CommandId;
use bivouac_types::session::SessionStatus;
use common::{insert, ns, rows, unlocked};

/// A database of a server, opened; or nothing, where there is no server.
async fn server() -> Option<(TestDatabase, Db)> {
    let Some(database) = TestDatabase::new().unwrap() else {
        eprintln!("not run: BIVOUAC_TEST_POSTGRES is not set");
        return None;
    };
    let db = unlocked(Db::open(&Address::parse(database.url()).unwrap()).await.unwrap()).await;
    Some((database, db))
}

fn command(n: u8) -> CommandRow {
    let (_, session) = rows(1, "box");
    let command = Command {
        id: CommandId::new(u64::from(n), [n; 10]),
        session_id: session.session.id,
        name: "sh".to_owned(),
        args: vec!["-c".to_owned()],
        cwd: "/".to_owned(),
        attach_stdin: false,
        tty: false,
        terminal: None,
        started_at: 3,
        end: None,
    };
    CommandRow { command, idempotency_key: Some(format!("key {n}")) }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named_without_the_password() {
    for url in [
        "postgres://u:hunter2@127.0.0.1:1/d",
        "postgres:///d?host=/nowhere&user=u&password=hunter2",
    ] {
        let address = Address::parse(url).unwrap();
        let error = Db::open(&address).await.unwrap_err();
        assert!(matches!(error, StoreError::Open { .. }), "{error:?}");
        assert!(error.to_string().contains("postgres://"), "{error}");
        assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
    }
}

#[tokio::test]
async fn one_engine_at_a_time_uses_a_database() {
    let Some((database, db)) = server().await else { return };
    let address = Address::parse(database.url()).unwrap();
    let error = Db::open(&address).await.unwrap_err();
    assert!(matches!(error, StoreError::InUse { .. }), "{error:?}");
    // The first goes on, and after its end the next may.
    let (sandbox, session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    db.close().await;
    let db = unlocked(Db::open(&address).await.unwrap()).await;
    assert!(db.sandbox_by_name(&ns(), "box").await.unwrap().is_some());
    // One that is dropped without an orderly end has let go as well.
    drop(db);
    Db::open(&address).await.unwrap();
}

#[tokio::test]
async fn two_that_start_at_once_are_one() {
    let Some(database) = TestDatabase::new().unwrap() else { return };
    let address = Address::parse(database.url()).unwrap();
    let starts = (0..4).map(|_| Db::open(&address));
    let done = futures_util::future::join_all(starts).await;
    let (open, refused): (Vec<_>, Vec<_>) = done.into_iter().partition(Result::is_ok);
    assert_eq!((open.len(), refused.len()), (1, 3), "{refused:?}");
    for error in refused {
        assert!(matches!(error, Err(StoreError::InUse { .. })), "{error:?}");
    }
}

#[tokio::test]
async fn a_database_that_was_taken_over_is_left_alone() {
    let Some((database, db)) = server().await else { return };
    let (sandbox, session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    // Its connections are cut, and somebody else is quicker.
    database.cut().unwrap();
    let other = unlocked(Db::open(&Address::parse(database.url()).unwrap()).await.unwrap()).await;
    let (second, second_session) = rows(2, "second");
    let error = insert(&db, &second, &second_session).await.unwrap_err();
    assert!(matches!(error, StoreError::TakenOver), "{error:?}");
    assert!(error.is_away());
    assert!(other.sandbox_by_name(&ns(), "second").await.unwrap().is_none());
    insert(&other, &second, &second_session).await.unwrap();
}

#[tokio::test]
async fn what_is_not_ours_is_refused_and_left_alone() {
    let Some(database) = TestDatabase::new().unwrap() else { return };
    database.query("CREATE TABLE recipes (id BIGINT)").unwrap();
    let address = Address::parse(database.url()).unwrap();
    let error = Db::open(&address).await.unwrap_err();
    assert!(matches!(&error, StoreError::Foreign { .. }), "{error:?}");
    assert!(error.to_string().contains("recipes"), "{error}");
    let tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'";
    assert_eq!(database.query(tables).unwrap().trim(), "1");

    let Some((database, db)) = server().await else { return };
    db.close().await;
    database
        .query(
            "INSERT INTO _sqlx_migrations (version, description, success, checksum, \
             execution_time) VALUES (9999, 'later', true, '', 0)",
        )
        .unwrap();
    let error = Db::open(&Address::parse(database.url()).unwrap()).await.unwrap_err();
    assert!(matches!(&error, StoreError::Newer { found: 9999, .. }), "{error:?}");
}

#[tokio::test]
async fn reads_and_whole_writes_outlive_a_cut() {
    let Some((database, db)) = server().await else { return };
    let (sandbox, session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    for n in 1..4 {
        assert!(database.cut().unwrap() > 0);
        assert!(db.sandbox_by_name(&ns(), "box").await.unwrap().is_some());
        assert!(database.cut().unwrap() > 0);
        db.insert_command(&command(n)).await.unwrap();
        assert!(database.cut().unwrap() > 0);
        let mut tx = db.begin(Durability::Process).await.unwrap();
        tx.add_totals(&sandbox.sandbox.id, 1, 1).await.unwrap();
        tx.commit().await.unwrap();
    }
    assert_eq!(db.commands(&session.session.id, true).await.unwrap().len(), 3);
    assert_eq!(
        db.sandbox(&sandbox.sandbox.id).await.unwrap().unwrap().sandbox.total_active_cpu_ms,
        3
    );
}

#[tokio::test]
async fn a_transaction_that_is_cut_wrote_nothing() {
    let Some((database, db)) = server().await else { return };
    let (sandbox, session) = rows(1, "box");
    let mut tx = db.begin(Durability::Process).await.unwrap();
    tx.insert_sandbox(&sandbox).await.unwrap();
    database.cut().unwrap();
    let error = tx.insert_session(&session).await.unwrap_err();
    assert!(matches!(error, StoreError::Away { .. }), "{error:?}");
    drop(tx);
    let mut tx = db.begin(Durability::Process).await.unwrap();
    tx.insert_sandbox(&sandbox).await.unwrap();
    database.cut().unwrap();
    // Whether the server got to it is not known to who only has the broken connection.
    let error = tx.commit().await.unwrap_err();
    assert!(matches!(error, StoreError::Unsure { .. }), "{error:?}");
    assert!(db.sandbox_by_name(&ns(), "box").await.unwrap().is_none());
}

#[tokio::test]
async fn a_server_that_is_away_is_waited_for() {
    let Some((database, db)) = server().await else { return };
    let (sandbox, session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    database.accept(false).unwrap();
    database.cut().unwrap();
    let reading = tokio::spawn({
        let db = db.clone();
        async move { db.sandbox_by_name(&ns(), "box").await }
    });
    let writing = tokio::spawn({
        let db = db.clone();
        async move { db.insert_command(&command(1)).await }
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!reading.is_finished() && !writing.is_finished());
    database.accept(true).unwrap();
    assert!(reading.await.unwrap().unwrap().is_some());
    writing.await.unwrap().unwrap();
    // One that stays away is told so, and is there again later.
    database.accept(false).unwrap();
    database.cut().unwrap();
    let error = db.sandbox_by_name(&ns(), "box").await.unwrap_err();
    assert!(matches!(error, StoreError::Away { .. }), "{error:?}");
    let error = db.begin(Durability::Process).await.unwrap_err();
    assert!(error.is_away(), "{error:?}");
    database.accept(true).unwrap();
    assert!(db.sandbox_by_name(&ns(), "box").await.unwrap().is_some());
}

/// Two transactions that wait for each other: one is ended, and is told that it may try again.
#[tokio::test]
async fn a_deadlock_is_a_change_that_may_be_tried_again() {
    let Some((_database, db)) = server().await else { return };
    for n in [1, 2] {
        let (sandbox, session) = rows(n, &format!("box {n}"));
        insert(&db, &sandbox, &session).await.unwrap();
    }
    let ids = [rows(1, "").0.sandbox.id, rows(2, "").0.sandbox.id];
    let (mut a, mut b) = (
        db.begin(Durability::Process).await.unwrap(),
        db.begin(Durability::Process).await.unwrap(),
    );
    a.add_totals(&ids[0], 1, 1).await.unwrap();
    b.add_totals(&ids[1], 1, 1).await.unwrap();
    let both = futures_util::future::join(a.add_totals(&ids[1], 1, 1), b.add_totals(&ids[0], 1, 1));
    let (first, second) = both.await;
    let victim = match (first, second) {
        (Ok(()), Err(victim)) | (Err(victim), Ok(())) => victim,
        other => panic!("{other:?}"),
    };
    assert!(victim.is_changed(), "{victim:?}");
}

/// Writers go side by side: of many with the same value, each unique thing has one winner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_writers_one_wins() {
    let Some((_database, db)) = server().await else { return };
    let tries = (1..=12).map(|n| {
        let db = db.clone();
        tokio::spawn(async move {
            let (sandbox, session) = rows(n, "one name");
            insert(&db, &sandbox, &session).await
        })
    });
    let mut won = 0;
    for one in tries.collect::<Vec<_>>() {
        match one.await.unwrap() {
            Ok(()) => won += 1,
            Err(StoreError::Taken(Unique::Name)) => {}
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(won, 1);
    // A compare-and-set from one reading: one wins, the others are told.
    let filter = SandboxFilter { limit: 10, ..SandboxFilter::default() };
    let id = db.sandboxes(&filter).await.unwrap()[0].sandbox.current_session_id.clone();
    let session = db.session(&id).await.unwrap().unwrap();
    let tries = (0..12).map(|_| {
        let (db, mut session) = (db.clone(), session.clone());
        tokio::spawn(async move {
            session.session.status = SessionStatus::Running;
            let mut tx = db.begin(Durability::Process).await.unwrap();
            match tx.update_session(SessionStatus::Pending, &mut session).await {
                Ok(()) => tx.commit().await.map(|()| true),
                Err(e) if e.is_changed() => Ok(false),
                Err(e) => Err(e),
            }
        })
    });
    let mut won = 0;
    for one in tries.collect::<Vec<_>>() {
        won += usize::from(one.await.unwrap().unwrap());
    }
    assert_eq!(won, 1);
}

/// Commands that are added while their sandbox goes leave nothing, and fail only with an answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_added_beside_a_removal_goes_along_or_is_told() {
    let Some((_database, db)) = server().await else { return };
    let (sandbox, session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    let adding = (1..60).map(|n| {
        let db = db.clone();
        tokio::spawn(async move { db.insert_command(&command(n)).await })
    });
    let adding: Vec<_> = adding.collect();
    db.remove_sandbox(&sandbox.sandbox.id).await.unwrap();
    for one in adding {
        match one.await.unwrap() {
            Ok(()) => {}
            Err(e) => assert!(e.is_changed(), "{e:?}"),
        }
    }
    assert!(db.commands(&session.session.id, false).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_nul_is_refused_as_what_it_is() {
    let Some((_database, db)) = server().await else { return };
    let (mut sandbox, session) = rows(1, "box");
    sandbox.sandbox.tags.insert("k".to_owned(), "a\0b".to_owned());
    let error = insert(&db, &sandbox, &session).await.unwrap_err();
    assert!(matches!(error, StoreError::BadText), "{error:?}");
    let error = db.sandbox_by_name(&ns(), "a\0b").await.unwrap_err();
    assert!(matches!(error, StoreError::BadText), "{error:?}");
    // In the JSON of a configuration it is escaped, and reads back.
    let (mut sandbox, session) = rows(1, "box");
    sandbox.sandbox.env.insert("A".to_owned(), "a\0b".to_owned());
    insert(&db, &sandbox, &session).await.unwrap();
    assert_eq!(db.sandbox(&sandbox.sandbox.id).await.unwrap(), Some(sandbox));
}

/// The test server orders text as a language does; lists are ordered byte by byte all the same.
#[tokio::test]
async fn names_are_ordered_byte_by_byte() {
    let Some((database, db)) = server().await else { return };
    let names = ["a", "B", "a-c", "ab", "a_b", "A", "é", "z", "_", "10", "9", "aé"];
    let language = "SELECT 'a' < 'B'";
    assert_eq!(database.query(language).unwrap().trim(), "t", "a server that would not show it");
    for (n, name) in (1..).zip(names) {
        let (sandbox, session) = rows(n, name);
        insert(&db, &sandbox, &session).await.unwrap();
    }
    let filter = SandboxFilter {
        limit: 100,
        order: SandboxOrder::Name,
        ascending: true,
        ..SandboxFilter::default()
    };
    let found = db.sandboxes(&filter).await.unwrap();
    let found: Vec<_> = found.into_iter().map(|row| row.sandbox.name).collect();
    let mut wanted = names.map(str::to_owned).to_vec();
    wanted.sort_unstable();
    assert_eq!(found, wanted);
}

/// What an end of a command that was sent twice says is the first.
#[tokio::test]
async fn a_cut_right_after_a_write_does_not_double_it() {
    let Some((database, db)) = server().await else { return };
    let (sandbox, session) = rows(1, "box");
    insert(&db, &sandbox, &session).await.unwrap();
    let row = command(1);
    db.insert_command(&row).await.unwrap();
    // As when the answer was lost: the same again.
    db.insert_command(&row).await.unwrap();
    let end = CommandEnd { exit_code: Some(3), duration_ms: 1, reason: None };
    db.end_command(&row.command.id, &end).await.unwrap();
    let other = CommandEnd { exit_code: Some(4), duration_ms: 1, reason: None };
    db.end_command(&row.command.id, &other).await.unwrap();
    let rows = db.commands(&session.session.id, false).await.unwrap();
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].command.end, Some(end));
    // The keeper's connection is one of those that are cut, and comes back by itself.
    database.cut().unwrap();
    eventually("the keeper is back", Duration::from_secs(20), async || {
        let count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()";
        // One is the statement's own.
        match database.query(count).map_err(|e| e.to_string())?.trim() {
            "1" => Err("none".to_owned()),
            _ => Ok(()),
        }
    })
    .await;
}
