//! Limits of disks that are kept true, and what is kept for nobody.

use super::*;

async fn opened(limit: u64) -> (Place, Sim, Arc<ManualClock>, Arc<Engine>) {
    let place = Place::new();
    let (sim, clock) = (Sim::new(), Arc::new(ManualClock::new(START)));
    let db = Db::open(&place.address()).await.unwrap();
    db.unlock(&place.dir.path().join("vault.key")).await.unwrap();
    let mut config = EngineConfig::new("node-a", "host", "http://127.0.0.1:7070");
    config.disk_bytes = limit;
    let engine = Engine::open(config, db, Arc::new(sim.clone()), Arc::clone(&clock) as _);
    let engine = engine.await.unwrap();
    (place, sim, clock, engine)
}

async fn does(engine: &Engine, session: &SessionId, argv: &[&str]) -> i32 {
    let command = engine.start_command(me(), "team", session, program(argv), None).await.unwrap();
    let done = engine.wait_command(me(), "team", session, &command.id).await.unwrap();
    done.end.unwrap().exit_code.unwrap()
}

#[tokio::test]
async fn a_box_whose_room_ran_out_by_the_charge_gets_what_it_freed() {
    let (_place, sim, clock, engine) = opened(20).await;
    let session = engine.create(me(), ns(), named("a")).await.unwrap().session.id;
    for n in 0..20 {
        assert_eq!(does(&engine, &session, &["touch", &n.to_string()]).await, 0);
    }
    assert_eq!(does(&engine, &session, &["touch", "more"]).await, 1, "it is full");
    // Here a file stays charged when it goes, as one does that a snapshot keeps.
    for n in 0..15 {
        assert_eq!(does(&engine, &session, &["rm", &n.to_string()]).await, 0);
    }
    let looks = sim.fits(&session);
    let mut tries = 0;
    while sim.fits(&session) == looks {
        clock.advance(1_000);
        tokio::task::yield_now().await;
        tries += 1;
        assert!(tries < 100_000, "nobody looks");
    }
    for n in 100..115 {
        assert_eq!(does(&engine, &session, &["touch", &n.to_string()]).await, 0, "{n}");
    }
    assert_eq!(does(&engine, &session, &["touch", "more"]).await, 1, "and no more than that");
}

#[tokio::test]
async fn what_nobody_wants_is_told_before_it_goes() {
    let bed = Bed::new().await;
    let view = bed.create("a").await;
    bed.engine.stop(me(), "team", &view.session.id).await.unwrap();
    let orphan = SessionId::new(5, [3; 10]);
    bed.sim.plant_session(&orphan);
    bed.sim.plant_snapshot("snap_00000000050000000000000000");
    let told = bed.engine.collect_garbage(me(), true).await.unwrap();
    let kinds: Vec<&str> = told.orphans.iter().map(|one| one.kind).collect();
    assert_eq!(kinds, ["session", "snapshot"]);
    assert!(told.orphans.iter().all(|one| !one.removed && one.usage.is_some()));
    assert_eq!(bed.sim.session_ids(), std::slice::from_ref(&orphan), "a rehearsal removes nothing");
    let kept = bed.sim.snapshot_names();
    let done = bed.engine.collect_garbage(me(), false).await.unwrap();
    assert!(done.orphans.iter().all(|one| one.removed), "{done:?}");
    assert!(bed.sim.session_ids().is_empty());
    assert_eq!(bed.sim.snapshot_names().len(), kept.len() - 1);
    assert!(bed.engine.collect_garbage(me(), false).await.unwrap().orphans.is_empty());
}

#[tokio::test]
async fn what_is_younger_than_an_operation_is_left_alone() {
    let bed = Bed::new().await;
    let inner = Arc::clone(&bed.engine.inner);
    let (go_on, wait) = tokio::sync::oneshot::channel::<()>();
    let working = tokio::spawn(async move {
        let work = async move {
            let _ = wait.await;
            Ok(())
        };
        inner.run(work).await
    });
    while bed.engine.inner.oldest_operation().is_none() {
        tokio::task::yield_now().await;
    }
    bed.clock.advance(10);
    let young = SessionId::new(u64::try_from(START + 5).unwrap(), [3; 10]);
    bed.sim.plant_session(&young);
    let told = bed.engine.collect_garbage(me(), false).await.unwrap();
    assert!(told.orphans.is_empty() && told.young == 1, "{told:?}");
    go_on.send(()).unwrap();
    working.await.unwrap().unwrap();
    let told = bed.engine.collect_garbage(me(), false).await.unwrap();
    assert_eq!((told.orphans.len(), told.young), (1, 0), "{told:?}");
}

#[tokio::test]
async fn a_record_without_data_is_told_and_marked() {
    let bed = Bed::new().await;
    let view = bed.create("a").await;
    bed.engine.stop(me(), "team", &view.session.id).await.unwrap();
    let name = bed.sim.snapshot_names().pop().unwrap();
    bed.sim.lose_snapshot(&name);
    let told = bed.engine.collect_garbage(me(), true).await.unwrap();
    assert_eq!(told.damage[0].what, format!("snapshot {name} has a record and no data"));
    assert_eq!(bed.engine.collect_garbage(me(), false).await.unwrap().damage.len(), 1);
    let again = bed.engine.collect_garbage(me(), false).await.unwrap();
    assert!(again.damage.is_empty(), "a failed one is not damaged once more");
    assert!(bed.sim.snapshot_names().is_empty(), "nothing is invented");
}
