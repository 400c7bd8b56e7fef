//! Going back: where to, what is kept, what stays.

use bivouac_types::id::SnapshotId;
use bivouac_types::session::SessionStatus;
use bivouac_types::snapshot::{Purpose, Snapshot};

use super::{Bed, me, named, ns};
use crate::{CreateSandbox, ErrorKind, FaultPoint, Rollback, RolledBack, TakeSnapshot};

async fn live(bed: &Bed) -> Snapshot {
    let spec = TakeSnapshot { live: true, ..TakeSnapshot::default() };
    bed.engine.take_snapshot(me(), ns(), "box", spec).await.unwrap().0
}

async fn back(bed: &Bed, to: Option<&SnapshotId>, discard: bool) -> RolledBack {
    let spec = Rollback { snapshot: to.map(ToString::to_string), discard };
    bed.engine.rollback(me(), ns(), "box", spec).await.unwrap()
}

/// A running box with `one` in a live snapshot and `two` after it.
async fn prepared() -> (Bed, Snapshot) {
    let bed = Bed::new().await;
    let spec = CreateSandbox { ports: vec![3000], ..named("box") };
    let made = bed.engine.create(me(), ns(), spec).await.unwrap();
    bed.run(&made.session.id, &["touch", "one"]).await;
    let taken = live(&bed).await;
    bed.run(&made.session.id, &["touch", "two"]).await;
    (bed, taken)
}

async fn has(bed: &Bed, file: &str) -> bool {
    let session = bed.get("box").await.unwrap().session.id;
    bed.run(&session, &["test", file]).await == Some(0)
}

#[tokio::test]
async fn a_running_sandbox_goes_back_and_runs() {
    let (bed, taken) = prepared().await;
    let before = bed.get("box").await.unwrap();
    let done = back(&bed, None, false).await;
    assert_eq!(done.to.id, taken.id, "the last that was taken");
    assert_eq!(done.view.session.status, SessionStatus::Running);
    assert_ne!(done.view.session.id, before.session.id);
    assert_eq!(done.view.session.source_snapshot_id.as_ref(), Some(&taken.id));
    assert_eq!(done.view.sandbox.id, before.sandbox.id);
    assert_eq!(done.view.routes, before.routes);
    assert!(has(&bed, "one").await && !has(&bed, "two").await);
    // And forward again, to what it left.
    let kept = done.kept.unwrap();
    assert_eq!((kept.purpose, kept.automatic), (Purpose::Rollback, false));
    let done = back(&bed, Some(&kept.id), false).await;
    assert!(has(&bed, "two").await);
    // What a rollback left is not where the next one goes by itself.
    assert_ne!(done.kept.unwrap().id, taken.id);
    assert_eq!(back(&bed, None, true).await.to.id, taken.id);
    bed.check().await;
}

#[tokio::test]
async fn with_discard_nothing_is_kept() {
    let (bed, taken) = prepared().await;
    let done = back(&bed, Some(&taken.id), true).await;
    assert!(done.kept.is_none());
    assert!(has(&bed, "one").await && !has(&bed, "two").await);
    assert_eq!(bed.sim.snapshot_names(), [taken.id.to_string()]);
    bed.check().await;
}

#[tokio::test]
async fn a_stopped_sandbox_stays_stopped() {
    let (bed, taken) = prepared().await;
    let session = bed.get("box").await.unwrap().session.id;
    bed.engine.stop(me(), "team", &session).await.unwrap();
    let done = back(&bed, Some(&taken.id), false).await;
    assert_eq!(done.view.sandbox.status, SessionStatus::Stopped);
    assert_eq!(done.view.sandbox.current_snapshot_id.as_ref(), Some(&taken.id));
    assert!(done.kept.is_none(), "its state is a snapshot already");
    assert_eq!(bed.sim.snapshot_names().len(), 2);
    bed.resume("box").await.unwrap();
    assert!(has(&bed, "one").await && !has(&bed, "two").await);
    bed.check().await;
}

#[tokio::test]
async fn what_cannot_be_gone_back_to_is_refused_and_nothing_changes() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    let refused = async |snapshot: Option<String>| {
        let spec = Rollback { snapshot, discard: true };
        bed.engine.rollback(me(), ns(), "box", spec).await.unwrap_err()
    };
    assert_eq!(refused(None).await.code, "no_snapshot");
    assert_eq!(refused(Some("snap_x".to_owned())).await.code, "snapshot_not_found");
    let taken = live(&bed).await;
    bed.engine.delete_snapshot(me(), "team", &taken.id).await.unwrap();
    assert_eq!(refused(Some(taken.id.to_string())).await.kind, ErrorKind::Gone);
    assert_eq!(bed.get("box").await.unwrap().session.id, made.session.id);
    let gone = Rollback::default();
    let error = bed.engine.rollback(me(), ns(), "none", gone).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    let spec = CreateSandbox { ephemeral: true, ..CreateSandbox::default() };
    let run = bed.engine.create(me(), ns(), spec).await.unwrap();
    let error = bed.engine.rollback(me(), ns(), &run.sandbox.name, Rollback::default()).await;
    assert_eq!(error.unwrap_err().code, "ephemeral");
}

/// A crash at each step leaves the state from before, or the one that was asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_leaves_the_old_state_or_the_new_one() {
    let points = [
        (FaultPoint::StopIntent, false, true),
        (FaultPoint::StopKilled, false, true),
        (FaultPoint::StopSnapshotTaken, false, true),
        (FaultPoint::StopSnapshotRecorded, false, true),
        (FaultPoint::StopRemoved, false, true),
        (FaultPoint::RollbackKept, false, true),
        (FaultPoint::RollbackTurned, false, false),
        (FaultPoint::ResumeInserted, false, false),
        (FaultPoint::ResumeLaunched, false, false),
        (FaultPoint::RollbackRunning, false, false),
        // Without keeping, it goes on until it is stopped, and then there is only the new one.
        (FaultPoint::RollbackTurned, true, true),
        (FaultPoint::StopIntent, true, false),
        (FaultPoint::StopKilled, true, false),
        (FaultPoint::StopRemoved, true, false),
        (FaultPoint::ResumeInserted, true, false),
    ];
    for (point, discard, old) in points {
        let (bed, taken) = prepared().await;
        let reached = bed.engine.inner.faults.hang_at(point);
        let engine = std::sync::Arc::clone(&bed.engine);
        let call = tokio::spawn(async move {
            let spec = Rollback { snapshot: Some(taken.id.to_string()), discard };
            engine.rollback(me(), ns(), "box", spec).await
        });
        reached.notified().await;
        let bed = bed.restart().await;
        call.abort();
        bed.check().await;
        bed.resume("box").await.unwrap();
        let what = format!("{} discard={discard}", point.name());
        assert!(has(&bed, "one").await, "{what}");
        assert_eq!(has(&bed, "two").await, old, "{what}");
    }
}
