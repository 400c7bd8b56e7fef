//! Live snapshots: the sandbox goes on, labels, sizes, what survives a crash.

use std::collections::BTreeMap;

use bivouac_types::sandbox::{KeepLastSnapshots, Source};
use bivouac_types::session::SessionStatus;
use bivouac_types::snapshot::Snapshot;

use super::{Bed, eventually, me, named, ns};
use crate::{Clock as _, CreateSandbox, ErrorKind, FaultPoint, ListChildren, TakeSnapshot};

const DAY: i64 = 86_400_000;

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

async fn take(bed: &Bed, name: &str, with: &[(&str, &str)]) -> Snapshot {
    let spec = TakeSnapshot { live: true, labels: labels(with), expiration_ms: None };
    bed.engine.take_snapshot(me(), ns(), name, spec).await.unwrap().0
}

async fn listed(bed: &Bed, label: Option<(&str, &str)>) -> Vec<Snapshot> {
    let label = label.map(|(k, v)| (k.to_owned(), v.to_owned()));
    let query = ListChildren { label, ..ListChildren::default() };
    bed.engine.snapshots(me(), ns(), query).await.unwrap().items
}

#[tokio::test]
async fn a_live_snapshot_holds_the_moment_and_the_sandbox_goes_on() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.run(&made.session.id, &["touch", "before"]).await;
    let sleeper = bed.start(&made.session.id, &["sleep"]).await.unwrap();
    let taken = take(&bed, "box", &[("step", "one")]).await;
    bed.run(&made.session.id, &["touch", "after"]).await;
    // Flushed before it stood still, and nothing wrote while it was taken.
    assert_eq!((bed.sim.flushes(), bed.sim.torn_snapshots()), (1, 0));
    assert!(bed.sim.frozen().is_empty());
    assert!(!taken.automatic && taken.stall_us > 0 && taken.measured, "{taken:?}");
    assert_eq!(taken.size_bytes, 1);
    assert_eq!(taken.labels, labels(&[("step", "one")]));
    assert_eq!(taken.expires_at, Some(taken.created_at + 30 * DAY));
    let view = bed.get("box").await.unwrap();
    assert_eq!((view.session.status, &view.session.id), (SessionStatus::Running, &made.session.id));
    assert_eq!(view.sandbox.current_snapshot_id, None, "it would start from what it would have");
    let command = bed.db.command(&sleeper.session_id, &sleeper.id).await.unwrap().unwrap();
    assert!(command.command.end.is_none(), "its commands go on");
    assert_eq!(bed.db.snapshot(&taken.id).await.unwrap().unwrap().snapshot, taken);

    let source = Some(Source::Snapshot { snapshot_id: taken.id.to_string() });
    let copy =
        bed.engine.create(me(), ns(), CreateSandbox { source, ..named("copy") }).await.unwrap();
    assert_eq!(bed.run(&copy.session.id, &["test", "before"]).await, Some(0));
    assert_eq!(bed.run(&copy.session.id, &["test", "after"]).await, Some(1));
    bed.check().await;
}

#[tokio::test]
async fn only_a_running_sandbox_has_a_present_state() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.engine.stop(me(), "team", &made.session.id).await.unwrap();
    for live in [true, false] {
        let spec = TakeSnapshot { live, ..TakeSnapshot::default() };
        let error = bed.engine.take_snapshot(me(), ns(), "box", spec).await.unwrap_err();
        assert_eq!((error.kind, error.code), (ErrorKind::Gone, "sandbox_stopped"));
    }
    let spec = TakeSnapshot { live: true, ..TakeSnapshot::default() };
    let error = bed.engine.take_snapshot(me(), ns(), "none", spec).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    bed.resume("box").await.unwrap();
    for (labels, expiration_ms) in [(labels(&[("a b", "")]), None), (labels(&[]), Some(-1))] {
        let spec = TakeSnapshot { live: true, labels, expiration_ms };
        let error = bed.engine.take_snapshot(me(), ns(), "box", spec).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid);
    }
    // One that stops it has labels as well.
    let spec = TakeSnapshot { live: false, labels: labels(&[("k", "v")]), expiration_ms: Some(0) };
    let (taken, session) = bed.engine.take_snapshot(me(), ns(), "box", spec).await.unwrap();
    assert_eq!(session.status, SessionStatus::Stopped);
    assert_eq!((taken.labels, taken.stall_us, taken.expires_at), (labels(&[("k", "v")]), 0, None));
    bed.check().await;
}

#[tokio::test]
async fn a_snapshot_that_fails_lets_the_sandbox_go_on() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.sim.fail_snapshots(1);
    let spec = TakeSnapshot { live: true, ..TakeSnapshot::default() };
    bed.engine.take_snapshot(me(), ns(), "box", spec).await.unwrap_err();
    assert!(bed.sim.frozen().is_empty());
    assert_eq!(bed.run(&made.session.id, &["true"]).await, Some(0));
    assert!(listed(&bed, None).await.is_empty());
    bed.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_while_it_stands_still_is_settled_by_the_next_engine() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    let reached = bed.engine.inner.faults.hang_at(FaultPoint::LiveKept);
    let engine = std::sync::Arc::clone(&bed.engine);
    let call = tokio::spawn(async move {
        let spec = TakeSnapshot { live: true, ..TakeSnapshot::default() };
        engine.take_snapshot(me(), ns(), "box", spec).await
    });
    reached.notified().await;
    assert_eq!(bed.sim.frozen(), std::slice::from_ref(&made.session.id));
    let bed = bed.restart().await;
    call.abort();
    assert!(bed.sim.frozen().is_empty(), "the next engine lets it go on");
    assert_eq!(bed.run(&made.session.id, &["true"]).await, Some(0));
    assert!(listed(&bed, None).await.is_empty());
    bed.check().await;
}

#[tokio::test]
async fn the_sweep_leaves_a_snapshot_alone_that_is_being_taken() {
    let bed = Bed::new().await;
    bed.create("box").await;
    let reached = bed.engine.inner.faults.hang_at(FaultPoint::LiveGoesOn);
    let engine = std::sync::Arc::clone(&bed.engine);
    let call = tokio::spawn(async move {
        let spec = TakeSnapshot { live: true, ..TakeSnapshot::default() };
        engine.take_snapshot(me(), ns(), "box", spec).await
    });
    reached.notified().await;
    bed.engine.inner.sweep().await.unwrap();
    assert_eq!(bed.sim.snapshot_names().len(), 1, "it has data and no record yet");
    call.abort();
    let bed = bed.restart().await;
    bed.check().await;
}

#[tokio::test]
async fn what_an_engine_could_not_measure_is_measured_by_the_next() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.run(&made.session.id, &["touch", "f"]).await;
    let taken = take(&bed, "box", &[]).await;
    let mut row = bed.db.snapshot(&taken.id).await.unwrap().unwrap();
    row.snapshot.id = bivouac_types::id::SnapshotId::new(1, [7; 10]);
    row.snapshot.measured = false;
    row.snapshot.size_bytes = 77;
    bed.sim.plant_snapshot(row.snapshot.id.as_str());
    let mut tx = bed.db.begin(bivouac_store::Durability::Process).await.unwrap();
    tx.insert_snapshot(&row).await.unwrap();
    tx.commit().await.unwrap();
    let bed = bed.restart().await;
    let id = row.snapshot.id;
    let measured = eventually("it is measured", || async {
        let found = bed.db.snapshot(&id).await.unwrap().unwrap().snapshot;
        found.measured.then_some(found)
    });
    assert_eq!(measured.await.size_bytes, 0);
}

#[tokio::test]
async fn labels_are_written_changed_and_looked_for() {
    let bed = Bed::new().await;
    bed.create("box").await;
    let first = take(&bed, "box", &[("step", "one"), ("kind", "a\"b%_")]).await;
    let second = take(&bed, "box", &[("step", "one\",\"kind\":\"x")]).await;
    let ids = |found: Vec<Snapshot>| found.into_iter().map(|s| s.id).collect::<Vec<_>>();
    assert_eq!(ids(listed(&bed, Some(("step", "one"))).await), std::slice::from_ref(&first.id));
    assert_eq!(ids(listed(&bed, Some(("kind", "a\"b%_"))).await), std::slice::from_ref(&first.id));
    for (key, value) in [("step", "On"), ("step", "ONE"), ("kind", "x"), ("kind", "a"), ("", "")] {
        assert!(listed(&bed, Some((key, value))).await.is_empty(), "{key}={value}");
    }
    let change = |pairs: &[(&str, Option<&str>)]| {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), v.map(str::to_owned))).collect()
    };
    let changed = bed
        .engine
        .label_snapshot(me(), "team", &first.id, &change(&[("step", Some("two")), ("kind", None)]))
        .await
        .unwrap();
    assert_eq!(changed.labels, labels(&[("step", "two")]));
    assert_eq!(ids(listed(&bed, Some(("step", "two"))).await), std::slice::from_ref(&first.id));
    let (bad, good) = (change(&[("a b", Some(""))]), change(&[("a", None)]));
    let bad = bed.engine.label_snapshot(me(), "team", &first.id, &bad);
    assert_eq!(bad.await.unwrap_err().kind, ErrorKind::Invalid);
    let other = bed.engine.label_snapshot(me(), "other", &first.id, &good);
    assert_eq!(other.await.unwrap_err().kind, ErrorKind::NotFound);
    bed.engine.delete_snapshot(me(), "team", &second.id).await.unwrap();
    let gone = bed.engine.label_snapshot(me(), "team", &second.id, &good);
    assert_eq!(gone.await.unwrap_err().code, "snapshot_not_found");
}

#[tokio::test]
async fn live_snapshots_are_counted_and_what_a_sandbox_starts_from_is_kept() {
    let bed = Bed::new().await;
    let keep_last = Some(KeepLastSnapshots { count: 1, expiration: None, delete_evicted: None });
    let spec = CreateSandbox { keep_last, persistent: Some(false), ..named("box") };
    let made = bed.engine.create(me(), ns(), spec).await.unwrap();
    bed.run(&made.session.id, &["touch", "base"]).await;
    let (base, _) = bed.engine.snapshot(me(), "team", &made.session.id, None).await.unwrap();
    bed.resume("box").await.unwrap();
    let first = take(&bed, "box", &[]).await;
    let second = take(&bed, "box", &[]).await;
    // The first live one has fallen out; the one that it would start from again has not.
    let names = bed.sim.snapshot_names();
    assert!(names.contains(&base.id.to_string()) && names.contains(&second.id.to_string()));
    assert!(!names.contains(&first.id.to_string()));
    let session = bed.get("box").await.unwrap().session.id;
    bed.engine.stop(me(), "team", &session).await.unwrap();
    let again = bed.resume("box").await.unwrap();
    assert_eq!(bed.run(&again.session.id, &["test", "base"]).await, Some(0));
    bed.check().await;
}

#[tokio::test]
async fn a_snapshot_in_use_does_not_expire() {
    let bed = Bed::new().await;
    let spec = CreateSandbox { persistent: Some(false), timeout_ms: Some(DAY), ..named("box") };
    let made = bed.engine.create(me(), ns(), spec).await.unwrap();
    let hour = DAY / 24;
    let (base, _) = bed.engine.snapshot(me(), "team", &made.session.id, Some(hour)).await.unwrap();
    let session = bed.resume("box").await.unwrap().session.id;
    bed.clock.advance(2 * hour);
    let engine = &bed.engine;
    // Something else that expires shows that the reconciler has looked.
    let spec = TakeSnapshot { live: true, expiration_ms: Some(1), ..TakeSnapshot::default() };
    let (other, _) = engine.take_snapshot(me(), ns(), "box", spec).await.unwrap();
    bed.clock.advance(2_000);
    eventually("the other has expired", || async {
        (!bed.sim.snapshot_names().contains(&other.id.to_string())).then_some(())
    })
    .await;
    assert!(bed.sim.snapshot_names().contains(&base.id.to_string()));
    // Its use ends with the session: from there its time runs again.
    engine.stop(me(), "team", &session).await.unwrap();
    let used = bed.db.snapshot(&base.id).await.unwrap().unwrap().snapshot;
    assert_eq!(used.expires_at, Some(bed.clock.now() + hour));
    bed.clock.advance(hour + 2_000);
    eventually("it has expired", || async { bed.sim.snapshot_names().is_empty().then_some(()) })
        .await;
    assert_eq!(bed.resume("box").await.unwrap_err().code, "snapshot_not_found");
}
