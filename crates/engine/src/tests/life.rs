//! Create, stop, resume, delete, fork, update.

use std::collections::{BTreeMap, HashSet};

use bivouac_types::id::{SessionId, SnapshotId};
use bivouac_types::sandbox::{Resources, Source};
use bivouac_types::session::SessionStatus;

use super::{Bed, eventually, me, named, ns};
use crate::{CreateSandbox, ErrorKind, ForkSandbox, UpdateSandbox};

#[tokio::test]
async fn a_persistent_sandbox_lives_on_over_a_stop() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    assert_eq!(made.session.status, SessionStatus::Running);
    assert_eq!(made.sandbox.status, SessionStatus::Running);
    assert!(made.sandbox.persistent && !made.resumed);
    assert_eq!(made.session.runtime, "node24");
    assert_eq!(bed.run(&made.session.id, &["touch", "f"]).await, Some(0));

    let stopped = bed.engine.stop(me(), "team", &made.session.id).await.unwrap();
    assert_eq!(stopped.session.status, SessionStatus::Stopped);
    assert_eq!(stopped.session.active_cpu_ms, Some(7));
    let snapshot = stopped.snapshot.unwrap();
    assert_eq!(stopped.sandbox.current_snapshot_id.as_ref(), Some(&snapshot.id));
    assert!(snapshot.automatic && snapshot.parent_id.is_none());
    assert!(stopped.session.snapshotted_at.is_some());
    bed.check().await;
    assert!(bed.sim.session_ids().is_empty());

    let again = bed.engine.stop(me(), "team", &made.session.id).await.unwrap();
    assert!(again.snapshot.is_none() && again.session.status == SessionStatus::Stopped);
    let error = bed.start(&made.session.id, &["true"]).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Gone, "sandbox_stopped"));
    assert!(error.message.contains("no longer available"), "{}", error.message);

    let resumed = bed.resume("box").await.unwrap();
    assert!(resumed.resumed && resumed.session.id != made.session.id);
    assert_eq!(resumed.session.source_snapshot_id.as_ref(), Some(&snapshot.id));
    assert_eq!(bed.run(&resumed.session.id, &["test", "f"]).await, Some(0));
    assert!(!bed.resume("box").await.unwrap().resumed);

    bed.delete("box").await.unwrap();
    assert_eq!(bed.get("box").await.unwrap_err().kind, ErrorKind::NotFound);
    assert_eq!(bed.delete("box").await.unwrap_err().kind, ErrorKind::NotFound);
    let gone = bed.engine.session(me(), "team", &made.session.id).await.unwrap_err();
    assert_eq!(gone.kind, ErrorKind::NotFound);
    // The snapshot stays.
    assert_eq!(bed.sim.snapshot_names(), [snapshot.id.to_string()]);
    bed.check().await;
}

#[tokio::test]
async fn without_persistence_nothing_is_kept() {
    let bed = Bed::new().await;
    let spec = CreateSandbox { persistent: Some(false), ..named("box") };
    let made = bed.engine.create(me(), ns(), spec).await.unwrap();
    bed.run(&made.session.id, &["touch", "f"]).await;
    let stopped = bed.engine.stop(me(), "team", &made.session.id).await.unwrap();
    assert!(stopped.snapshot.is_none() && bed.sim.snapshot_names().is_empty());
    let resumed = bed.resume("box").await.unwrap();
    assert_eq!(bed.run(&resumed.session.id, &["test", "f"]).await, Some(1));
    bed.check().await;
}

#[tokio::test]
async fn an_ephemeral_sandbox_is_never_resumed() {
    let bed = Bed::new().await;
    let spec = CreateSandbox { ephemeral: true, ..CreateSandbox::default() };
    let made = bed.engine.create(me(), ns(), spec).await.unwrap();
    assert!(!made.sandbox.persistent);
    bed.engine.stop(me(), "team", &made.session.id).await.unwrap();
    let error = bed.resume(&made.sandbox.name).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Gone, "sandbox_stopped"));
}

#[tokio::test]
async fn names_are_unique_in_their_namespace_only() {
    let bed = Bed::new().await;
    bed.create("box").await;
    let error = bed.engine.create(me(), ns(), named("box")).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Invalid, "bad_request"));
    assert_eq!(error.message, "A sandbox with the name 'box' already exists for this project.");
    let other = bivouac_types::name::Namespace { project: "other".to_owned(), ..ns().clone() };
    bed.engine.create(me(), &other, named("box")).await.unwrap();
    assert_eq!(bed.sim.running().len(), 2);
    bed.check().await;
}

#[tokio::test]
async fn bad_requests_change_nothing() {
    let bed = Bed::new().await;
    let git = Source::Git { url: "https://a b/r.git".to_owned(), depth: None, revision: None };
    let gone = SnapshotId::new(1, [0; 10]).to_string();
    let bad = [
        (named("a/b"), "bad_request"),
        (named(&"x".repeat(129)), "bad_request"),
        (CreateSandbox { timeout_ms: Some(999), ..named("b") }, "bad_request"),
        (CreateSandbox { ports: vec![80], ..named("b") }, "bad_request"),
        (CreateSandbox { ports: (3000..3016).collect(), ..named("b") }, "bad_request"),
        (CreateSandbox { image: Some("nope".to_owned()), ..named("b") }, "not_found"),
        (
            CreateSandbox { image: Some("vercel/sandbox/node:24".to_owned()), ..named("b") },
            "not_found",
        ),
        (CreateSandbox { runtime: Some("cobol".to_owned()), ..named("b") }, "not_found"),
        (
            CreateSandbox {
                image: Some("host".to_owned()),
                runtime: Some("node24".to_owned()),
                ..named("b")
            },
            "bad_request",
        ),
        (CreateSandbox { source: Some(git), ..named("b") }, "bad_request"),
        (
            CreateSandbox { source: Some(Source::Snapshot { snapshot_id: gone }), ..named("b") },
            "snapshot_not_found",
        ),
        (
            CreateSandbox {
                source: Some(Source::Snapshot { snapshot_id: "../x".to_owned() }),
                ..named("b")
            },
            "snapshot_not_found",
        ),
        (CreateSandbox { failover_regions: vec!["iad1".to_owned()], ..named("b") }, "bad_request"),
        (CreateSandbox { snapshot_expiration_ms: Some(-1), ..named("b") }, "bad_request"),
        (CreateSandbox { idempotency_key: Some(String::new()), ..named("b") }, "bad_request"),
    ];
    for (spec, code) in bad {
        let shown = format!("{spec:?}");
        let error = bed.engine.create(me(), ns(), spec).await.unwrap_err();
        assert_eq!(error.code, code, "{shown}: {}", error.message);
    }
    assert_eq!(bed.sim.launches(), 0);
    assert_eq!(bed.get("b").await.unwrap_err().kind, ErrorKind::NotFound);
}

#[tokio::test]
async fn runtimes_fall_back_to_the_host_image_until_the_universal_one_is_built() {
    let bed = Bed::new().await;
    for runtime in ["node22", "node24", "node26", "python3.13"] {
        let spec = CreateSandbox { runtime: Some(runtime.to_owned()), ..CreateSandbox::default() };
        let made = bed.engine.create(me(), ns(), spec).await.unwrap();
        assert_eq!((made.session.runtime.as_str(), made.session.image.as_str()), (runtime, "host"));
    }
}

#[tokio::test]
async fn a_failed_create_leaves_nothing_and_frees_the_name() {
    let bed = Bed::new().await;
    bed.sim.fail_launches(1);
    let error = bed.engine.create(me(), ns(), named("box")).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Internal, "launch_failed"));
    assert!(error.message.contains("'box'"), "{}", error.message);
    bed.check().await;
    assert_eq!(bed.get("box").await.unwrap_err().kind, ErrorKind::NotFound);
    bed.create("box").await;
}

#[tokio::test]
async fn a_failed_resume_leaves_a_sandbox_that_can_be_resumed() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.run(&made.session.id, &["touch", "f"]).await;
    bed.engine.stop(me(), "team", &made.session.id).await.unwrap();
    bed.sim.fail_launches(1);
    bed.resume("box").await.unwrap_err();
    let view = bed.get("box").await.unwrap();
    assert_eq!(view.session.status, SessionStatus::Failed);
    assert!(view.session.reason.is_some());
    let error = bed.start(&view.session.id, &["true"]).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Gone, "sandbox_stopped"));
    bed.check().await;
    let resumed = bed.resume("box").await.unwrap();
    assert_eq!(bed.run(&resumed.session.id, &["test", "f"]).await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_resumes_give_one_session() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.engine.stop(me(), "team", &made.session.id).await.unwrap();
    let before = bed.sim.launches();
    let calls = (0..20).map(|_| {
        let engine = std::sync::Arc::clone(&bed.engine);
        tokio::spawn(async move { engine.get(me(), ns(), "box", true).await })
    });
    let mut ids = HashSet::new();
    let mut fresh = 0;
    for call in calls.collect::<Vec<_>>() {
        let view = call.await.unwrap().unwrap();
        fresh += usize::from(view.resumed);
        ids.insert(view.session.id);
    }
    assert_eq!((ids.len(), fresh, bed.sim.launches() - before), (1, 1, 1));
    bed.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_creates_of_one_name_give_one_sandbox() {
    let bed = Bed::new().await;
    let calls = (0..10).map(|_| {
        let engine = std::sync::Arc::clone(&bed.engine);
        tokio::spawn(async move { engine.create(me(), ns(), named("box")).await })
    });
    let mut made = 0;
    for call in calls.collect::<Vec<_>>() {
        match call.await.unwrap() {
            Ok(_) => made += 1,
            Err(error) => assert!(error.message.contains("already exists"), "{}", error.message),
        }
    }
    assert_eq!((made, bed.sim.running().len()), (1, 1));
    bed.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_stops_share_one_result() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    let calls = (0..10).map(|_| {
        let engine = std::sync::Arc::clone(&bed.engine);
        let id = made.session.id.clone();
        tokio::spawn(async move { engine.stop(me(), "team", &id).await })
    });
    for call in calls.collect::<Vec<_>>() {
        let stopped = call.await.unwrap().unwrap();
        assert_eq!(stopped.session.status, SessionStatus::Stopped);
    }
    assert_eq!(bed.sim.snapshot_names().len(), 1);
    bed.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_or_delete_overtakes_a_launch() {
    for delete in [false, true] {
        let bed = Bed::new().await;
        let reached = bed.engine.inner.faults.hang_at(crate::FaultPoint::CreateInserted);
        let engine = std::sync::Arc::clone(&bed.engine);
        let create = tokio::spawn(async move { engine.create(me(), ns(), named("box")).await });
        reached.notified().await;
        let view = bed.get("box").await.unwrap();
        assert_eq!(view.session.status, SessionStatus::Pending);
        let engine = std::sync::Arc::clone(&bed.engine);
        let id = view.session.id.clone();
        let stop = tokio::spawn(async move {
            if delete {
                engine.delete(me(), ns(), "box", false).await.map(drop)
            } else {
                engine.stop(me(), "team", &id).await.map(drop)
            }
        });
        eventually("the stop is recorded", || async {
            let row = bed.db.session(&view.session.id).await.unwrap()?;
            (row.session.status == SessionStatus::Stopping).then_some(())
        })
        .await;
        // The hanging create is gone with its engine; the next one settles both.
        let bed = bed.restart().await;
        drop((create, stop));
        bed.check().await;
        match bed.get("box").await {
            Ok(view) => assert!(!delete && view.session.status == SessionStatus::Stopped),
            Err(error) => assert!(delete && error.kind == ErrorKind::NotFound),
        }
        assert!(bed.sim.session_ids().is_empty());
    }
}

#[tokio::test]
async fn a_key_makes_a_create_happen_once() {
    let bed = Bed::new().await;
    let spec =
        || CreateSandbox { idempotency_key: Some("k1".to_owned()), ..CreateSandbox::default() };
    let first = bed.engine.create(me(), ns(), spec()).await.unwrap();
    let second = bed.engine.create(me(), ns(), spec()).await.unwrap();
    assert_eq!(first.sandbox.id, second.sandbox.id);
    let (a, b) = tokio::join!(
        bed.engine.create(
            me(),
            ns(),
            CreateSandbox { idempotency_key: Some("k2".to_owned()), ..named("x") }
        ),
        bed.engine.create(
            me(),
            ns(),
            CreateSandbox { idempotency_key: Some("k2".to_owned()), ..named("x") }
        ),
    );
    assert_eq!(a.unwrap().sandbox.id, b.unwrap().sandbox.id);
    assert_eq!(bed.sim.launches(), 2);
    bed.delete(&first.sandbox.name).await.unwrap();
    let third = bed.engine.create(me(), ns(), spec()).await.unwrap();
    assert_ne!(third.sandbox.id, first.sandbox.id);
}

#[tokio::test]
async fn a_caller_that_leaves_changes_nothing() {
    let bed = Bed::new().await;
    let call = bed.engine.create(me(), ns(), named("box"));
    // Polled once, then dropped: the work goes on.
    let _ = tokio::time::timeout(std::time::Duration::ZERO, call).await;
    bed.until("box", SessionStatus::Running).await;
    bed.check().await;
}

#[tokio::test]
async fn a_lost_session_is_aborted_kept_and_resumable() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.run(&made.session.id, &["touch", "f"]).await;
    let command = bed.start(&made.session.id, &["sleep"]).await.unwrap();
    bed.sim.crash_session(&made.session.id);
    let view = bed.until("box", SessionStatus::Aborted).await;
    assert!(view.session.aborted_at.is_some() && view.session.reason.is_some());
    let end = bed.wait(&command).await.unwrap().end.unwrap();
    assert_eq!(end.exit_code, None);
    assert_eq!(end.reason, Some(bivouac_types::command::EndReason::Lost));
    // Waits for the end of the settling, of which the status was the first step.
    let resumed = bed.resume("box").await.unwrap();
    assert!(resumed.sandbox.current_snapshot_id.is_some());
    bed.check().await;
    assert_eq!(bed.run(&resumed.session.id, &["test", "f"]).await, Some(0));
}

#[tokio::test]
async fn what_ran_when_the_engine_was_killed_runs_on() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    let lost = bed.create("lost").await;
    let sleep = bed.start(&made.session.id, &["sleep"]).await.unwrap();
    let done = bed.start(&made.session.id, &["exit", "3"]).await.unwrap();
    bed.crash().await;
    bed.sim.crash_session(&lost.session.id);
    let bed = bed.restart().await;
    bed.check().await;
    assert_eq!(bed.get("lost").await.unwrap().session.status, SessionStatus::Aborted);
    assert_eq!(bed.get("box").await.unwrap().session.status, SessionStatus::Running);
    assert_eq!(bed.wait(&done).await.unwrap().end.unwrap().exit_code, Some(3));
    let killed =
        bed.engine.kill_command(me(), "team", &made.session.id, &sleep.id, 15).await.unwrap();
    assert_eq!(killed.id, sleep.id);
    assert_eq!(bed.wait(&sleep).await.unwrap().end.unwrap().exit_code, Some(143));
    // Id ranges in use are known again: the next launch takes another (the host checks it).
    bed.create("third").await;
    bed.check().await;
}

#[tokio::test]
async fn a_stop_whose_snapshot_fails_loses_nothing_and_goes_on_later() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.run(&made.session.id, &["touch", "f"]).await;
    bed.sim.fail_snapshots(1);
    bed.engine.stop(me(), "team", &made.session.id).await.unwrap_err();
    let view = bed.get("box").await.unwrap();
    assert_eq!(view.session.status, SessionStatus::Snapshotting);
    let error = bed.start(&made.session.id, &["true"]).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Transition, "sandbox_snapshotting"));
    assert!(error.message.contains("creating a snapshot"));
    assert!(error.message.contains("stopped shortly"));
    let resumed = bed.resume("box").await.unwrap();
    assert_eq!(bed.run(&resumed.session.id, &["test", "f"]).await, Some(0));
    bed.check().await;
}

#[tokio::test]
async fn the_orphan_reconciler_goes_on_with_what_failed() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.create("other").await;
    bed.sim.fail_removes(1);
    bed.engine.stop(me(), "team", &made.session.id).await.unwrap_err();
    bed.sim.fail_removes(1);
    bed.delete("other").await.unwrap_err();
    assert!(!bed.problems().await.is_empty());
    // Its name is not free before it is gone, and it is not shown any more.
    assert_eq!(bed.get("other").await.unwrap_err().kind, ErrorKind::NotFound);
    tokio::task::yield_now().await;
    bed.clock.advance(31_000);
    bed.until("box", SessionStatus::Stopped).await;
    eventually("all is settled", || async { bed.problems().await.is_empty().then_some(()) }).await;
    bed.create("other").await;
}

#[tokio::test]
async fn a_fork_copies_configuration_and_files() {
    let bed = Bed::new().await;
    let map = |k: &str, v: &str| BTreeMap::from([(k.to_owned(), v.to_owned())]);
    let spec = CreateSandbox {
        env: map("A", "1"),
        tags: map("t", "1"),
        ports: vec![3000, 4000],
        resources: Some(Resources::new(4, None).unwrap()),
        ..named("source")
    };
    let source = bed.engine.create(me(), ns(), spec).await.unwrap();
    // Without a snapshot: the base image.
    let plain = bed.engine.fork(me(), ns(), "source", ForkSandbox::default()).await.unwrap();
    assert_eq!(plain.sandbox.env, source.sandbox.env);
    assert_eq!(plain.sandbox.resources.vcpus, 4);
    bed.run(&source.session.id, &["touch", "f"]).await;
    bed.engine.stop(me(), "team", &source.session.id).await.unwrap();
    let overrides = ForkSandbox {
        name: Some("copy".to_owned()),
        update: UpdateSandbox { env: Some(map("B", "2")), ..UpdateSandbox::default() },
        ..ForkSandbox::default()
    };
    let copy = bed.engine.fork(me(), ns(), "source", overrides.clone()).await.unwrap();
    assert_eq!(copy.sandbox.env, map("B", "2"));
    assert_eq!(copy.sandbox.tags, map("t", "1"));
    assert_eq!(copy.routes.iter().map(|r| r.port).collect::<Vec<_>>(), [3000, 4000]);
    assert_eq!(bed.run(&copy.session.id, &["test", "f"]).await, Some(0));
    let labels: HashSet<String> = [&source, &plain, &copy]
        .iter()
        .flat_map(|v| &v.routes)
        .map(|r| r.subdomain.clone())
        .collect();
    assert_eq!(labels.len(), 6);
    let taken = bed.engine.fork(me(), ns(), "source", overrides).await.unwrap_err();
    assert_eq!(taken.kind, ErrorKind::Invalid);
    let unknown = bed.engine.fork(me(), ns(), "nope", ForkSandbox::default()).await.unwrap_err();
    assert_eq!(unknown.kind, ErrorKind::NotFound);
    bed.check().await;
}

#[tokio::test]
async fn an_update_is_for_the_next_session_and_routes_are_at_once() {
    let bed = Bed::new().await;
    let spec = CreateSandbox { ports: vec![3000], ..named("box") };
    let made = bed.engine.create(me(), ns(), spec).await.unwrap();
    assert_eq!(made.routes[0].url, format!("http://{}.localhost:7070", made.routes[0].subdomain));
    let change = UpdateSandbox {
        ports: Some(vec![3000, 4000]),
        timeout_ms: Some(900_000),
        env: Some(BTreeMap::from([("A".to_owned(), "1".to_owned())])),
        network_id: Some(Some("n".to_owned())),
        persistent: Some(false),
        ..UpdateSandbox::default()
    };
    let view = bed.engine.update(me(), ns(), "box", change).await.unwrap();
    assert_eq!(view.routes.len(), 2);
    assert_eq!(view.routes[0], made.routes[0]);
    assert_eq!(view.session.timeout_ms, made.session.timeout_ms);
    assert!(view.session.env.is_empty());
    let clear = UpdateSandbox { network_id: Some(None), ..UpdateSandbox::default() };
    let view = bed.engine.update(me(), ns(), "box", clear).await.unwrap();
    assert!(view.sandbox.network_id.is_none() && view.sandbox.timeout_ms == 900_000);
    bed.engine.stop(me(), "team", &made.session.id).await.unwrap();
    let resumed = bed.resume("box").await.unwrap();
    assert_eq!((resumed.session.timeout_ms, resumed.session.env.len()), (900_000, 1));
    let bad = UpdateSandbox { timeout_ms: Some(1), ..UpdateSandbox::default() };
    assert_eq!(
        bed.engine.update(me(), ns(), "box", bad).await.unwrap_err().kind,
        ErrorKind::Invalid
    );
}

#[tokio::test]
async fn another_team_sees_nothing() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    let (id, who) = (&made.session.id, me());
    let kinds = [
        bed.engine.session(who, "b", id).await.err().map(|e| e.kind),
        bed.engine.stop(who, "b", id).await.err().map(|e| e.kind),
        bed.engine.commands(who, "b", id).await.err().map(|e| e.kind),
        bed.engine.extend_timeout(who, "b", id, 1000).await.err().map(|e| e.kind),
        bed.engine.snapshot(who, "b", id, None).await.err().map(|e| e.kind),
        bed.engine.mkdir(who, "b", id, "/x", None, true).await.err().map(|e| e.kind),
        bed.start(&SessionId::new(5, [1; 10]), &["true"]).await.err().map(|e| e.kind),
    ];
    assert!(kinds.iter().all(|kind| *kind == Some(ErrorKind::NotFound)), "{kinds:?}");
    assert_eq!(bed.get("box").await.unwrap().session.status, SessionStatus::Running);
}

#[tokio::test]
async fn a_shutdown_leaves_sandboxes_or_stops_them() {
    let bed = Bed::new().await;
    bed.create("box").await;
    bed.engine.shutdown(false).await.unwrap();
    assert_eq!(bed.sim.running().len(), 1);
    let error = bed.engine.create(me(), ns(), named("late")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    let bed = bed.restart().await;
    assert_eq!(bed.get("box").await.unwrap().session.status, SessionStatus::Running);
    bed.engine.shutdown(true).await.unwrap();
    assert!(bed.sim.session_ids().is_empty());
    assert_eq!(bed.sim.snapshot_names().len(), 1);
}
