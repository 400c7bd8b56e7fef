//! Forks: of a running, a stopped, a snapshotted source; many at once, all or none; what they start from.

use bivouac_types::session::SessionStatus;
use bivouac_types::snapshot::{Purpose, SnapshotStatus};

use super::{Bed, eventually, me, named, ns};
use crate::{
    CreateSandbox, ErrorKind, ForkMany, Forked, ListChildren, ListSandboxes, TakeSnapshot,
    UpdateSandbox,
};

fn many(count: u32, name: &str) -> ForkMany {
    ForkMany { count, name: Some(name.to_owned()), ..ForkMany::default() }
}

async fn fork(bed: &Bed, source: &str, spec: ForkMany) -> Forked {
    bed.engine.forks(me(), ns(), source, spec).await.unwrap()
}

async fn no_snapshot_is_left(bed: &Bed) {
    eventually("no snapshot is left", || async {
        bed.sim.snapshot_names().is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn forks_of_a_running_sandbox_have_its_present_state() {
    let bed = Bed::new().await;
    let env = [("A".to_owned(), "1".to_owned())].into();
    let spec = CreateSandbox { env, ports: vec![3000], ..named("box") };
    let made = bed.engine.create(me(), ns(), spec).await.unwrap();
    bed.run(&made.session.id, &["touch", "f"]).await;
    bed.run(&made.session.id, &["touch", "/etc/ssh/ssh_host_rsa_key"]).await;
    let forked = fork(&bed, "box", many(20, "try")).await;
    let names: Vec<_> = forked.sandboxes.iter().map(|v| v.sandbox.name.clone()).collect();
    assert_eq!(names, (1..=20).map(|n| format!("try-{n}")).collect::<Vec<_>>());
    // One snapshot for all of them, which no list shows.
    let snapshot = forked.snapshot.unwrap();
    assert_eq!((snapshot.purpose, bed.sim.snapshot_names().len()), (Purpose::Fork, 1));
    assert!(snapshot.stall_us > 0);
    let listed = bed.engine.snapshots(me(), ns(), ListChildren::default()).await.unwrap();
    assert!(listed.items.is_empty());
    assert_eq!(bed.get("box").await.unwrap().session.id, made.session.id, "the source goes on");
    assert_eq!(bed.sim.torn_snapshots(), 0);
    let mut subdomains = std::collections::HashSet::new();
    for view in &forked.sandboxes {
        assert_eq!(view.session.status, SessionStatus::Running);
        assert_eq!(view.sandbox.env["A"], "1");
        assert!(subdomains.insert(view.routes[0].subdomain.clone()), "routes are its own");
        assert_eq!(bed.run(&view.session.id, &["test", "f"]).await, Some(0));
        let key = ["test", "/etc/ssh/ssh_host_rsa_key"];
        assert_eq!(bed.run(&view.session.id, &key).await, Some(1), "another machine's key");
    }
    // They differ from here on.
    bed.run(&forked.sandboxes[0].session.id, &["touch", "own"]).await;
    assert_eq!(bed.run(&forked.sandboxes[1].session.id, &["test", "own"]).await, Some(1));
    assert_eq!(bed.run(&made.session.id, &["test", "own"]).await, Some(1));
    bed.check().await;
    let all = ListSandboxes { limit: Some(50), ..ListSandboxes::default() };
    assert_eq!(bed.engine.list(me(), ns(), all).await.unwrap().items.len(), 21);
    for name in names {
        assert_eq!(bed.sim.snapshot_names().len(), 1, "while one would start from it: {name}");
        bed.delete(&name).await.unwrap();
    }
    no_snapshot_is_left(&bed).await;
    bed.check().await;
}

#[tokio::test]
async fn what_live_forks_start_from_goes_when_they_have_their_own() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.run(&made.session.id, &["touch", "f"]).await;
    let forked = fork(&bed, "box", many(2, "try")).await;
    let shared = forked.snapshot.unwrap().id;
    let mut own = Vec::new();
    for view in &forked.sandboxes {
        assert!(bed.sim.snapshot_names().contains(&shared.to_string()));
        let stopped = bed.engine.stop(me(), "team", &view.session.id).await.unwrap();
        own.push(stopped.snapshot.unwrap());
    }
    eventually("it is gone", || async {
        (!bed.sim.snapshot_names().contains(&shared.to_string())).then_some(())
    })
    .await;
    let record = bed.engine.snapshot_by_id(me(), "team", &shared).await.unwrap();
    assert_eq!(record.status, SnapshotStatus::Deleted);
    assert_eq!(own[0].parent_id.as_ref(), Some(&shared));
    let again = bed.resume("try-1").await.unwrap();
    assert_eq!(bed.run(&again.session.id, &["test", "f"]).await, Some(0));
    bed.check().await;
}

#[tokio::test]
async fn a_fork_that_is_not_persistent_comes_back_to_where_it_began() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.run(&made.session.id, &["touch", "f"]).await;
    let mut spec = many(1, "leaf");
    spec.overrides.update = UpdateSandbox { persistent: Some(false), ..UpdateSandbox::default() };
    let forked = fork(&bed, "box", spec).await;
    bed.run(&forked.sandboxes[0].session.id, &["touch", "own"]).await;
    bed.engine.stop(me(), "team", &forked.sandboxes[0].session.id).await.unwrap();
    let bed = bed.restart().await;
    let again = bed.resume("leaf").await.unwrap();
    assert_eq!(bed.run(&again.session.id, &["test", "f"]).await, Some(0));
    assert_eq!(bed.run(&again.session.id, &["test", "own"]).await, Some(1));
    bed.delete("leaf").await.unwrap();
    no_snapshot_is_left(&bed).await;
}

#[tokio::test]
async fn a_stopped_source_gives_its_last_state_and_a_named_snapshot_its_own() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    bed.run(&made.session.id, &["touch", "one"]).await;
    let spec = TakeSnapshot { live: true, ..TakeSnapshot::default() };
    let (one, _) = bed.engine.take_snapshot(me(), ns(), "box", spec).await.unwrap();
    bed.run(&made.session.id, &["touch", "two"]).await;
    let stopped = bed.engine.stop(me(), "team", &made.session.id).await.unwrap();
    let two = stopped.snapshot.unwrap();
    let forked = fork(&bed, "box", many(1, "a")).await;
    assert_eq!(forked.snapshot.as_ref().map(|s| &s.id), Some(&two.id));
    assert_eq!(forked.sandboxes[0].sandbox.name, "a");
    assert_eq!(bed.run(&forked.sandboxes[0].session.id, &["test", "two"]).await, Some(0));
    let forked =
        fork(&bed, "box", ForkMany { snapshot: Some(one.id.to_string()), ..many(1, "b") }).await;
    assert_eq!(bed.run(&forked.sandboxes[0].session.id, &["test", "one"]).await, Some(0));
    assert_eq!(bed.run(&forked.sandboxes[0].session.id, &["test", "two"]).await, Some(1));
    // Of a running one, from its last snapshot on request.
    bed.resume("box").await.unwrap();
    let forked = fork(&bed, "box", ForkMany { live: Some(false), ..many(1, "c") }).await;
    assert_eq!(forked.snapshot.map(|s| s.id), Some(two.id.clone()));
    // One without any: the image.
    bed.create("fresh").await;
    let forked = fork(&bed, "fresh", ForkMany { live: Some(false), ..many(1, "d") }).await;
    assert!(forked.snapshot.is_none());
    // Nothing was taken for any of them.
    assert_eq!(bed.sim.snapshot_names().len(), 2);
    bed.check().await;
}

#[tokio::test]
async fn all_of_them_or_none() {
    let bed = Bed::new().await;
    bed.create("box").await;
    bed.create("try-3").await;
    let launches = bed.sim.launches();
    let error = bed.engine.forks(me(), ns(), "box", many(5, "try")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(error.message.contains("'try-3'"), "{}", error.message);
    assert!(bed.sim.launches() > launches, "others were begun");
    for n in [1, 2, 4, 5] {
        let gone = bed.get(&format!("try-{n}")).await.unwrap_err();
        assert_eq!(gone.kind, ErrorKind::NotFound);
    }
    assert!(bed.get("try-3").await.is_ok(), "somebody else's stays");
    no_snapshot_is_left(&bed).await;
    bed.check().await;
    bed.delete("try-3").await.unwrap();
    bed.sim.fail_launches(1);
    let error = bed.engine.forks(me(), ns(), "box", many(4, "try")).await.unwrap_err();
    assert!(error.message.contains("removed again"), "{}", error.message);
    no_snapshot_is_left(&bed).await;
    assert_eq!(bed.sim.running().len(), 1);
    bed.check().await;
    assert_eq!(fork(&bed, "box", many(4, "try")).await.sandboxes.len(), 4);
}

#[tokio::test]
async fn a_repeated_call_answers_the_first_one_s_sandboxes() {
    let bed = Bed::new().await;
    bed.create("box").await;
    let spec =
        || ForkMany { idempotency_key: Some("key".to_owned()), count: 3, ..ForkMany::default() };
    let first = fork(&bed, "box", spec()).await;
    let second = fork(&bed, "box", spec()).await;
    let names = |forked: &Forked| {
        forked.sandboxes.iter().map(|v| v.sandbox.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&first), names(&second));
    assert_eq!(first.snapshot.map(|s| s.id), second.snapshot.map(|s| s.id));
    assert_eq!(bed.sim.running().len(), 4);
    bed.check().await;
}

#[tokio::test]
async fn what_cannot_be_is_refused_before_anything_is_made() {
    let bed = Bed::new().await;
    let made = bed.create("box").await;
    let refused =
        async |spec: ForkMany| bed.engine.forks(me(), ns(), "box", spec).await.unwrap_err();
    for count in [0, 1001] {
        assert_eq!(refused(many(count, "a")).await.kind, ErrorKind::Invalid);
    }
    assert_eq!(refused(many(1, "a/b")).await.kind, ErrorKind::Invalid);
    let gone = ForkMany { snapshot: Some("snap_x".to_owned()), ..many(1, "a") };
    assert_eq!(refused(gone).await.code, "snapshot_not_found");
    let both = ForkMany { snapshot: Some("x".to_owned()), live: Some(true), ..many(1, "a") };
    assert_eq!(refused(both).await.kind, ErrorKind::Invalid);
    let error = bed.engine.forks(me(), ns(), "none", many(1, "a")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    bed.engine.stop(me(), "team", &made.session.id).await.unwrap();
    assert_eq!(
        refused(ForkMany { live: Some(true), ..many(1, "a") }).await.code,
        "sandbox_stopped"
    );
    let current = bed.get("box").await.unwrap().sandbox.current_snapshot_id.unwrap();
    bed.engine.delete_snapshot(me(), "team", &current).await.unwrap();
    assert_eq!(refused(many(2, "a")).await.code, "snapshot_not_found");
    assert!(bed.sim.running().is_empty());
    bed.check().await;
}
