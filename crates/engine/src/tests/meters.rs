//! What the engine counts and measures.

use super::*;
use crate::{Count, Operation};

async fn count(bed: &Bed, operation: Operation) -> Count {
    let counts = bed.engine.meters().await.counts;
    counts.into_iter().find(|c| c.operation == operation).unwrap()
}

#[tokio::test]
async fn outcomes_are_counted_by_code() {
    let bed = Bed::new().await;
    let session = bed.create("a").await.session.id;
    bed.engine.create(me(), ns(), named("a")).await.unwrap_err();
    bed.sim.fail_launches(1);
    bed.engine.create(me(), ns(), named("b")).await.unwrap_err();
    let creates = count(&bed, Operation::Create).await;
    assert_eq!((creates.done, creates.failed), (1, vec![("bad_request", 1), ("launch_failed", 1)]));
    bed.run(&session, &["true"]).await;
    bed.start(&session, &["no-such-word"]).await.unwrap_err();
    let execs = count(&bed, Operation::Exec).await;
    assert_eq!((execs.done, execs.failed), (1, vec![("executable_not_found", 1)]));
    bed.engine.stop(me(), "team", &session).await.unwrap();
    bed.get("a").await.unwrap();
    assert_eq!(count(&bed, Operation::Resume).await.done, 0, "a look is no resume");
    bed.resume("a").await.unwrap();
    bed.resume("a").await.unwrap();
    assert_eq!(count(&bed, Operation::Resume).await.done, 1, "it ran already");
    assert_eq!(count(&bed, Operation::Stop).await.done, 1);
    bed.delete("a").await.unwrap();
    assert_eq!(count(&bed, Operation::Delete).await.done, 1);
}

#[tokio::test]
async fn what_runs_is_measured() {
    let bed = Bed::new().await;
    let session = bed.create("b").await.session.id;
    bed.create("a").await;
    bed.start(&session, &["sleep"]).await.unwrap();
    let used = bed.engine.usage(me(), Some(ns())).await.unwrap();
    let names: Vec<&str> = used.iter().map(|u| u.session.sandbox_name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!((used[0].commands, used[1].commands), (0, 1));
    assert!(used.iter().all(|u| u.disk_bytes.is_some()));
    let other = Namespace { team: "other".to_owned(), project: "x".to_owned() };
    assert!(bed.engine.usage(me(), Some(&other)).await.unwrap().is_empty());
    assert_eq!(bed.engine.usage(me(), None).await.unwrap().len(), 2);
    let meters = bed.engine.meters().await;
    assert!(meters.sessions.contains(&(SessionStatus::Running, 2)), "{:?}", meters.sessions);
    assert_eq!(meters.open_commands, 1);
    assert!(meters.space.is_some());
    assert!(meters.database.iter().all(|(_, times)| times.count() > 0), "{:?}", meters.database);
    assert_eq!(meters.launches[0].1.count(), 2);
    // A session that was taken up again is measured too.
    let bed = bed.restart().await;
    assert_eq!(bed.engine.usage(me(), None).await.unwrap().len(), 2);
}

#[tokio::test]
async fn an_operation_in_the_middle_of_its_steps_is_work() {
    let bed = Bed::new().await;
    assert!(!bed.engine.is_busy());
    let (go_on, wait) = tokio::sync::oneshot::channel::<()>();
    let inner = Arc::clone(&bed.engine.inner);
    let working = tokio::spawn(async move {
        let work = async move {
            let _ = wait.await;
            Ok(())
        };
        inner.run(work).await
    });
    eventually("the engine is busy", || async { bed.engine.is_busy().then_some(()) }).await;
    assert_eq!(bed.engine.live_sessions(), 0, "no session says so");
    go_on.send(()).unwrap();
    working.await.unwrap().unwrap();
    eventually("the engine is idle", || async { (!bed.engine.is_busy()).then_some(()) }).await;
}
