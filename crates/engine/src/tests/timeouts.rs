//! Deadlines, with the clock in hand.

use bivouac_types::sandbox::MAX_TIMEOUT_MS;
use bivouac_types::session::SessionStatus;

use super::{Bed, me, named, ns};
use crate::{CreateSandbox, ErrorKind};

async fn with_timeout(bed: &Bed, name: &str, ms: i64) -> bivouac_types::id::SessionId {
    let spec = CreateSandbox { timeout_ms: Some(ms), ..named(name) };
    bed.engine.create(me(), ns(), spec).await.unwrap().session.id
}

/// Lets the reconcilers see the clock.
async fn settle() {
    for _ in 0..20 {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn a_session_is_stopped_when_its_time_is_over_and_not_before() {
    let bed = Bed::new().await;
    let id = with_timeout(&bed, "box", 10_000).await;
    with_timeout(&bed, "later", 20_000).await;
    bed.run(&id, &["touch", "f"]).await;
    settle().await;
    bed.clock.advance(9_999);
    settle().await;
    assert_eq!(bed.get("box").await.unwrap().session.status, SessionStatus::Running);
    bed.clock.advance(1);
    let view = bed.until("box", SessionStatus::Stopped).await;
    assert!(view.sandbox.current_snapshot_id.is_some());
    assert_eq!(bed.get("later").await.unwrap().session.status, SessionStatus::Running);
    let resumed = bed.resume("box").await.unwrap();
    assert_eq!(bed.run(&resumed.session.id, &["test", "f"]).await, Some(0));
    bed.clock.advance(10_000);
    bed.until("box", SessionStatus::Stopped).await;
    bed.until("later", SessionStatus::Stopped).await;
    bed.check().await;
}

#[tokio::test]
async fn more_time_moves_the_deadline_up_to_the_maximum() {
    let bed = Bed::new().await;
    let id = with_timeout(&bed, "box", 10_000).await;
    let session = bed.engine.extend_timeout(me(), "team", &id, 5_000).await.unwrap();
    assert_eq!(session.timeout_ms, 15_000);
    bed.clock.advance(14_000);
    settle().await;
    assert_eq!(bed.get("box").await.unwrap().session.status, SessionStatus::Running);
    let error = bed.engine.extend_timeout(me(), "team", &id, MAX_TIMEOUT_MS).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Invalid, "sandbox_timeout_invalid"));
    let error = bed.engine.extend_timeout(me(), "team", &id, 999).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Invalid, "bad_request"));
    bed.clock.advance(1_000);
    bed.until("box", SessionStatus::Stopped).await;
    let error = bed.engine.extend_timeout(me(), "team", &id, 1_000).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Gone);
}

#[tokio::test]
async fn time_that_passes_while_the_engine_is_away_counts() {
    let bed = Bed::new().await;
    with_timeout(&bed, "box", 10_000).await;
    with_timeout(&bed, "later", 50_000).await;
    bed.crash().await;
    bed.clock.advance(20_000);
    let bed = bed.restart().await;
    bed.until("box", SessionStatus::Stopped).await;
    assert_eq!(bed.get("later").await.unwrap().session.status, SessionStatus::Running);
    bed.check().await;
}

#[tokio::test]
async fn a_stop_at_the_deadline_that_fails_is_tried_again() {
    let bed = Bed::new().await;
    with_timeout(&bed, "box", 10_000).await;
    bed.sim.fail_snapshots(1);
    bed.clock.advance(10_000);
    bed.until("box", SessionStatus::Snapshotting).await;
    settle().await;
    bed.clock.advance(5_000);
    bed.until("box", SessionStatus::Stopped).await;
    assert_eq!(bed.sim.snapshot_names().len(), 1);
    bed.check().await;
}

#[tokio::test]
async fn the_deadline_of_what_runs_is_told() {
    let bed = Bed::new().await;
    let id = with_timeout(&bed, "box", 10_000).await;
    assert_eq!(bed.engine.deadline(&id), Some(super::START + 10_000));
    assert!(bed.engine.is_busy());
    bed.engine.extend_timeout(me(), "team", &id, 5_000).await.unwrap();
    assert_eq!(bed.engine.deadline(&id), Some(super::START + 15_000));
    bed.engine.stop(me(), "team", &id).await.unwrap();
    assert_eq!(bed.engine.deadline(&id), None);
    settle().await;
    assert!(!bed.engine.is_busy());
}

#[tokio::test]
async fn what_ended_long_ago_is_forgotten_except_the_newest() {
    const DAY: i64 = 86_400_000;
    let bed = Bed::new().await;
    let spec = CreateSandbox { snapshot_expiration_ms: Some(0), ..named("box") };
    let first = bed.engine.create(me(), ns(), spec).await.unwrap().session.id;
    bed.run(&first, &["true"]).await;
    bed.engine.stop(me(), "team", &first).await.unwrap();
    let second = bed.resume("box").await.unwrap().session.id;
    bed.run(&second, &["true"]).await;
    bed.engine.stop(me(), "team", &second).await.unwrap();
    let spec = CreateSandbox { ephemeral: true, ..CreateSandbox::default() };
    let ephemeral = bed.engine.create(me(), ns(), spec).await.unwrap();
    bed.engine.stop(me(), "team", &ephemeral.session.id).await.unwrap();
    assert_eq!(bed.sim.sessions_with_logs().len(), 2);
    settle().await;
    bed.clock.advance(31 * DAY);
    super::eventually("the old are forgotten", || async {
        let gone = bed.engine.session(me(), "team", &first).await.is_err()
            && bed.get(&ephemeral.sandbox.name).await.is_err();
        gone.then_some(())
    })
    .await;
    assert_eq!(bed.sim.sessions_with_logs().into_iter().collect::<Vec<_>>(), [second]);
    bed.resume("box").await.unwrap();
    // The second is not the newest any more, and old: it may just be going.
    super::eventually("all is at rest", || async { bed.problems().await.is_empty().then_some(()) })
        .await;
}
