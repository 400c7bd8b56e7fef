//! Snapshots: by hand, eviction, expiry, deletion, the tree.

use bivouac_types::id::SnapshotId;
use bivouac_types::sandbox::{KeepLastSnapshots, Source};
use bivouac_types::session::SessionStatus;
use bivouac_types::snapshot::SnapshotStatus;

use super::{Bed, eventually, me, named, ns};
use crate::{CreateSandbox, ErrorKind, ListChildren, TreeQuery, UpdateSandbox};

const DAY: i64 = 86_400_000;

/// Stops the sandbox and answers the snapshot of that.
async fn stop(bed: &Bed, name: &str) -> SnapshotId {
    let id = bed.resume(name).await.unwrap().session.id;
    bed.engine.stop(me(), "team", &id).await.unwrap().snapshot.unwrap().id
}

fn from(id: &SnapshotId, name: &str) -> CreateSandbox {
    let source = Some(Source::Snapshot { snapshot_id: id.to_string() });
    CreateSandbox { source, ..named(name) }
}

#[tokio::test]
async fn a_snapshot_by_hand_stops_and_can_be_started_from() {
    let bed = Bed::new().await;
    let made = bed
        .engine
        .create(me(), ns(), CreateSandbox { persistent: Some(false), ..named("box") })
        .await
        .unwrap();
    bed.run(&made.session.id, &["touch", "f"]).await;
    let (snapshot, session) =
        bed.engine.snapshot(me(), "team", &made.session.id, Some(DAY)).await.unwrap();
    assert_eq!(session.status, SessionStatus::Stopped);
    assert!(!snapshot.automatic);
    assert_eq!(snapshot.expires_at, Some(snapshot.created_at + DAY));
    let view = bed.get("box").await.unwrap();
    assert_eq!(view.sandbox.current_snapshot_id.as_ref(), Some(&snapshot.id));
    let again = bed.engine.snapshot(me(), "team", &made.session.id, None).await.unwrap_err();
    assert_eq!((again.kind, again.code), (ErrorKind::Gone, "sandbox_stopped"));

    let copy = bed.engine.create(me(), ns(), from(&snapshot.id, "copy")).await.unwrap();
    assert_eq!(bed.run(&copy.session.id, &["test", "f"]).await, Some(0));
    assert_eq!(copy.sandbox.current_snapshot_id.as_ref(), Some(&snapshot.id));
    let (never, _) = bed.engine.snapshot(me(), "team", &copy.session.id, Some(0)).await.unwrap();
    assert_eq!(never.expires_at, None);
    assert_eq!(never.parent_id.as_ref(), Some(&snapshot.id));
    let bad = bed.engine.snapshot(me(), "team", &copy.session.id, Some(-1)).await.unwrap_err();
    assert_eq!(bad.kind, ErrorKind::Invalid);
    bed.check().await;
}

#[tokio::test]
async fn a_deleted_snapshot_is_shown_as_deleted_and_cannot_be_used() {
    let bed = Bed::new().await;
    bed.create("box").await;
    let first = stop(&bed, "box").await;
    let second = stop(&bed, "box").await;
    // A parent can go: the data does not depend on it.
    for _ in 0..2 {
        let gone = bed.engine.delete_snapshot(me(), "team", &first).await.unwrap();
        assert_eq!(gone.status, SnapshotStatus::Deleted);
    }
    let known = bed.engine.snapshot_by_id(me(), "team", &first).await.unwrap();
    assert_eq!(known.status, SnapshotStatus::Deleted);
    assert_eq!(bed.sim.snapshot_names(), [second.to_string()]);
    // Lists show what became of it for a day.
    for (passed, shown) in [(0, 2), (DAY, 2), (1, 1)] {
        bed.clock.advance(passed);
        let listed = bed.engine.snapshots(me(), ns(), ListChildren::default()).await.unwrap().items;
        assert_eq!(listed.len(), shown, "{passed}");
        assert_eq!(listed[0].id, second);
        let last = if shown == 2 { SnapshotStatus::Deleted } else { SnapshotStatus::Created };
        assert_eq!(listed[shown - 1].status, last);
    }
    let error = bed.engine.create(me(), ns(), from(&first, "copy")).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Gone, "snapshot_not_found"));
    assert!(error.message.contains("not found"));
    assert_eq!(bed.get("copy").await.unwrap_err().kind, ErrorKind::NotFound);

    bed.engine.delete_snapshot(me(), "team", &second).await.unwrap();
    let error = bed.resume("box").await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Gone, "snapshot_not_found"));
    let unknown = SnapshotId::new(1, [0; 10]);
    let error = bed.engine.delete_snapshot(me(), "team", &unknown).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    let error = bed.engine.snapshot_by_id(me(), "b", &second).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    bed.check().await;
    bed.delete("box").await.unwrap();
}

#[tokio::test]
async fn old_snapshots_fall_out_unless_somebody_starts_from_them() {
    let bed = Bed::new().await;
    let keep_last = Some(KeepLastSnapshots { count: 1, expiration: Some(0), delete_evicted: None });
    let spec = CreateSandbox { keep_last, ..named("box") };
    bed.engine.create(me(), ns(), spec).await.unwrap();
    let first = stop(&bed, "box").await;
    let second = stop(&bed, "box").await;
    assert_eq!(bed.sim.snapshot_names(), [second.to_string()]);
    assert_ne!(first, second);
    let kept = bed.engine.snapshot_by_id(me(), "team", &second).await.unwrap();
    assert_eq!(kept.expires_at, None);
    // A fork starts from the second: it stays when a third comes.
    bed.engine.create(me(), ns(), from(&second, "copy")).await.unwrap();
    let third = stop(&bed, "box").await;
    assert_eq!(bed.sim.snapshot_names(), [second.to_string(), third.to_string()]);
    bed.check().await;
}

#[tokio::test]
async fn what_a_loss_left_does_not_take_the_place_of_what_was_kept() {
    let bed = Bed::new().await;
    let keep_last = Some(KeepLastSnapshots { count: 1, expiration: None, delete_evicted: None });
    let spec = CreateSandbox { keep_last, ..named("box") };
    bed.engine.create(me(), ns(), spec).await.unwrap();
    let kept = stop(&bed, "box").await;
    let session = bed.resume("box").await.unwrap().session.id;
    bed.sim.crash_session(&session);
    let left = eventually("the loss to be settled", || async {
        let left = bed.sim.snapshot_names();
        (left.len() == 2 && bed.sim.session_ids().is_empty()).then_some(left)
    })
    .await;
    assert!(left.contains(&kept.to_string()), "{left:?} without {kept}");
    // The next end that was asked for counts as always.
    let last = stop(&bed, "box").await;
    assert_eq!(bed.sim.snapshot_names(), [last.to_string()]);
    bed.check().await;
}

#[tokio::test]
async fn snapshots_expire_after_their_last_use() {
    let bed = Bed::new().await;
    let spec = CreateSandbox {
        snapshot_expiration_ms: Some(10 * DAY),
        timeout_ms: Some(DAY),
        ..named("box")
    };
    bed.engine.create(me(), ns(), spec).await.unwrap();
    let first = stop(&bed, "box").await;
    bed.clock.advance(9 * DAY);
    let second = stop(&bed, "box").await;
    let used = bed.engine.snapshot_by_id(me(), "team", &first).await.unwrap();
    assert_eq!(used.expires_at, Some(super::START + 19 * DAY));
    assert_eq!(used.last_used_at, Some(super::START + 9 * DAY));
    bed.clock.advance(9 * DAY);
    assert_eq!(bed.sim.snapshot_names().len(), 2);
    bed.clock.advance(DAY);
    eventually("both have expired", || async { bed.sim.snapshot_names().is_empty().then_some(()) })
        .await;
    for id in [&first, &second] {
        let known = bed.engine.snapshot_by_id(me(), "team", id).await.unwrap();
        assert_eq!(known.status, SnapshotStatus::Deleted);
    }
    assert_eq!(bed.resume("box").await.unwrap_err().code, "snapshot_not_found");
    bed.check().await;
}

#[tokio::test]
async fn orphaned_snapshots_go_with_their_sandbox_when_asked() {
    let bed = Bed::new().await;
    bed.create("box").await;
    stop(&bed, "box").await;
    let second = stop(&bed, "box").await;
    bed.engine.create(me(), ns(), from(&second, "copy")).await.unwrap();
    bed.engine.delete(me(), ns(), "box", true).await.unwrap();
    assert_eq!(bed.sim.snapshot_names(), [second.to_string()]);
    bed.check().await;
}

#[tokio::test]
async fn the_tree_walks_both_ways_and_counts_siblings() {
    let bed = Bed::new().await;
    bed.create("box").await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(stop(&bed, "box").await);
    }
    let mut forks = Vec::new();
    for n in 0..11 {
        let name = format!("fork{n}");
        bed.engine.create(me(), ns(), from(&ids[0], &name)).await.unwrap();
        forks.push(stop(&bed, &name).await);
    }
    let walk = async |id: &SnapshotId, ascending, limit| {
        let query = TreeQuery { snapshot_id: id.clone(), limit, ascending };
        bed.engine.snapshot_tree(me(), ns(), query).await
    };
    let up = walk(&ids[2], false, None).await.unwrap();
    let path: Vec<_> = up.nodes.iter().map(|n| n.snapshot.id.clone()).collect();
    assert_eq!(path, [ids[2].clone(), ids[1].clone(), ids[0].clone()]);
    assert_eq!(up.next, None);
    assert_eq!(up.nodes[0].count, "1");
    assert_eq!((up.nodes[1].count.as_str(), up.nodes[1].siblings.len()), ("10+", 10));
    assert_eq!(up.anchor.snapshot.id, ids[2]);

    let page = walk(&ids[2], false, Some(2)).await.unwrap();
    assert_eq!((page.nodes.len(), page.next.as_ref()), (2, Some(&ids[0])));
    let down = walk(&ids[0], true, None).await.unwrap();
    assert_eq!(down.nodes[1].snapshot.id, forks[10]);
    assert_eq!(walk(&ids[0], true, Some(11)).await.unwrap_err().kind, ErrorKind::Invalid);
    let unknown = SnapshotId::new(1, [0; 10]);
    assert_eq!(walk(&unknown, true, None).await.unwrap_err().kind, ErrorKind::NotFound);
}

#[tokio::test]
async fn a_sandbox_can_be_moved_to_another_snapshot() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    let first = stop(&bed, "box").await;
    let second = bed.resume("box").await.unwrap();
    bed.run(&second.session.id, &["touch", "f"]).await;
    stop(&bed, "box").await;
    let change =
        |id: String| UpdateSandbox { current_snapshot_id: Some(id), ..UpdateSandbox::default() };
    bed.engine.update(me(), ns(), "box", change(first.to_string())).await.unwrap();
    let back = bed.resume("box").await.unwrap();
    assert_ne!(back.session.id, made.session.id);
    assert_eq!(bed.run(&back.session.id, &["test", "f"]).await, Some(1));
    let error =
        bed.engine.update(me(), ns(), "box", change("snap_x".to_owned())).await.unwrap_err();
    assert_eq!(error.code, "snapshot_not_found");
}

#[tokio::test]
async fn data_that_is_missing_is_told() {
    let bed = Bed::new().await;
    bed.create("box").await;
    let id = stop(&bed, "box").await;
    bed.sim.lose_snapshot(id.as_str());
    let bed = bed.restart().await;
    let known = bed.engine.snapshot_by_id(me(), "team", &id).await.unwrap();
    assert_eq!(known.status, SnapshotStatus::Failed);
    assert_eq!(bed.resume("box").await.unwrap_err().code, "snapshot_not_found");
    bed.check().await;
}

#[tokio::test]
async fn lists_of_a_sandbox_show_only_its_own() {
    let bed = Bed::new().await;
    bed.create("a").await;
    bed.create("b").await;
    let (first, _) = (stop(&bed, "a").await, stop(&bed, "b").await);
    bed.resume("a").await.unwrap();
    let of = |name: &str| ListChildren {
        sandbox_name: Some(name.to_owned()),
        ..ListChildren::default()
    };
    let snapshots = bed.engine.snapshots(me(), ns(), of("a")).await.unwrap().items;
    assert_eq!(snapshots.iter().map(|s| &s.id).collect::<Vec<_>>(), [&first]);
    let sessions = bed.engine.sessions(me(), ns(), of("a")).await.unwrap().items;
    assert_eq!(sessions.len(), 2);
    assert!(sessions[0].id > sessions[1].id && sessions.iter().all(|s| s.sandbox_name == "a"));
    bed.delete("a").await.unwrap();
    assert!(bed.engine.sessions(me(), ns(), of("a")).await.unwrap().items.is_empty());
    // Snapshots outlive their sandbox, and are found by its name while nobody else has it.
    assert_eq!(bed.engine.snapshots(me(), ns(), of("a")).await.unwrap().items.len(), 1);
    bed.create("a").await;
    assert!(bed.engine.snapshots(me(), ns(), of("a")).await.unwrap().items.is_empty());
    assert_eq!(
        bed.engine.snapshots(me(), ns(), ListChildren::default()).await.unwrap().items.len(),
        2
    );
}
