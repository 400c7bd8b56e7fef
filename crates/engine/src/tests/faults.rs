//! Every named step, failed and killed in turn: nothing leaks, names are free or usable.

use std::sync::Arc;
use std::time::Duration;

use bivouac_types::id::SessionId;
use bivouac_types::life::LifeChange;
use bivouac_types::sandbox::KeepLastSnapshots;
use bivouac_types::session::SessionStatus;

use super::{Bed, drives, eventually, me, named, ns};
use crate::FaultPoint as P;
use crate::{CreateSandbox, Engine, Error, ForkMany, Rollback, TakeSnapshot};

/// What has to be asked for to pass a point. Exhaustive: a new point needs a line here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Create,
    CreateThatFails,
    Resume,
    Stop,
    StopWithEviction,
    Lose,
    Delete,
    Start,
    DeleteSnapshot,
    TakeLive,
    Pause,
    Unpause,
    StopWithHook,
    LoseAndRestart,
    Forks,
    Rollback,
    RollbackKeeping,
    MakeDrive,
    DeleteDrive,
    Attach,
    Detach,
    Import,
    Collect,
}

fn act(point: P) -> Act {
    match point {
        P::CreateInserted | P::CreateLaunched | P::CreateRunning => Act::Create,
        P::LaunchFailedRecorded | P::LaunchFailedRemoved => Act::CreateThatFails,
        P::ResumeInserted | P::ResumeLaunched | P::ResumeRunning => Act::Resume,
        P::StopIntent
        | P::StopKilled
        | P::StopCommandsEnded
        | P::StopSnapshotTaken
        | P::StopSnapshotRecorded
        | P::StopRemoved
        | P::StopEnded => Act::Stop,
        P::EvictRecorded => Act::StopWithEviction,
        P::LostRecorded | P::LostSnapshotTaken | P::LostSnapshotRecorded | P::LostRemoved => {
            Act::Lose
        }
        P::DeleteIntent
        | P::DeleteStopped
        | P::DeleteSnapshotsGone
        | P::DeleteLogsGone
        | P::DeleteRowsGone => Act::Delete,
        P::CommandInserted | P::CommandStarted => Act::Start,
        P::SnapshotDeleteIntent | P::SnapshotDataGone => Act::DeleteSnapshot,
        P::PauseRecorded | P::PauseFrozen => Act::Pause,
        P::UnpauseRecorded | P::UnpauseGoesOn => Act::Unpause,
        P::HookEnded => Act::StopWithHook,
        P::RestartRecorded => Act::LoseAndRestart,
        P::LiveFrozen | P::LiveKept | P::LiveGoesOn | P::LiveRecorded => Act::TakeLive,
        P::ForkOrigin | P::ForkStarted | P::ForkShown => Act::Forks,
        P::RollbackTurned | P::RollbackRunning => Act::Rollback,
        P::RollbackKept => Act::RollbackKeeping,
        P::ImportUnpacked | P::ImportRecorded => Act::Import,
        P::GcRemoved => Act::Collect,
        P::DriveInserted | P::DriveMade | P::DriveReady => Act::MakeDrive,
        P::DriveDeleteIntent | P::DriveDataGone | P::DriveRowGone => Act::DeleteDrive,
        P::AttachIntent | P::AttachMounted | P::AttachRecorded => Act::Attach,
        P::DetachIntent | P::DetachUnmounted | P::DetachFenced | P::DetachRecorded => Act::Detach,
    }
}

/// A sandbox `box` with a file `f` and an open command, as far as the act wants one.
async fn prepare(bed: &Bed, act: Act) {
    if matches!(act, Act::Create | Act::CreateThatFails) {
        return;
    }
    let keep_last = Some(KeepLastSnapshots { count: 1, expiration: None, delete_evicted: None })
        .filter(|_| act == Act::StopWithEviction);
    let life = match act {
        Act::StopWithHook => super::pause::hook("touch hooked", 1_000),
        Act::LoseAndRestart => super::pause::restarted(),
        _ => LifeChange::default(),
    };
    let spec = CreateSandbox { keep_last, life, ports: vec![3000], ..named("box") };
    let made = bed.engine.create(me(), ns(), spec).await.unwrap();
    bed.run(&made.session.id, &["touch", "f"]).await;
    bed.engine.stop(me(), "team", &made.session.id).await.unwrap();
    if matches!(act, Act::Resume | Act::DeleteSnapshot | Act::Import) {
        return;
    }
    let session = bed.resume("box").await.unwrap().session.id;
    bed.start(&session, &["sleep"]).await.unwrap();
    if matches!(act, Act::DeleteDrive | Act::Attach | Act::Detach) {
        drives::make(&bed.engine, "d").await.unwrap();
    }
    if act == Act::Unpause {
        bed.engine.pause(me(), ns(), "box", false).await.unwrap();
    }
    if act == Act::Detach {
        drives::attach(&bed.engine, "box", "d").await.unwrap();
        bed.run(&session, &["touch", "/data/f"]).await;
    }
}

/// Does what passes the point. An error is an answer here.
async fn perform(
    engine: Arc<Engine>,
    sim: bivouac_runtime::sim::Sim,
    act: Act,
) -> Result<(), Error> {
    let who = me();
    let current = async || Ok::<_, Error>(engine.get(who, ns(), "box", false).await?);
    match act {
        Act::Create => engine.create(who, ns(), named("box")).await.map(drop),
        Act::CreateThatFails => {
            sim.fail_launches(1);
            engine.create(who, ns(), named("box")).await.map(drop)
        }
        Act::Resume => engine.get(who, ns(), "box", true).await.map(drop),
        Act::Pause => engine.pause(who, ns(), "box", false).await.map(drop),
        Act::Unpause => engine.unpause(who, ns(), "box").await.map(drop),
        Act::LoseAndRestart => {
            sim.crash_session(&current().await?.session.id);
            Ok(())
        }
        Act::Stop | Act::StopWithEviction | Act::StopWithHook => {
            let id = current().await?.session.id;
            engine.stop(who, "team", &id).await.map(drop)
        }
        Act::Lose => {
            let id = current().await?.session.id;
            sim.crash_session(&id);
            eventually("the loss is noticed", || async {
                let view = engine.get(who, ns(), "box", false).await.ok()?;
                (view.session.status == SessionStatus::Aborted).then_some(())
            })
            .await;
            Ok(())
        }
        Act::Delete => engine.delete(who, ns(), "box", true).await.map(drop),
        Act::Start => {
            let id = current().await?.session.id;
            let spec = super::program(&["true"]);
            engine.start_command(who, "team", &id, spec, Some("key".to_owned())).await.map(drop)
        }
        Act::DeleteSnapshot => {
            let id = current().await?.sandbox.current_snapshot_id.unwrap();
            engine.delete_snapshot(who, "team", &id).await.map(drop)
        }
        Act::TakeLive => {
            let spec = TakeSnapshot { live: true, ..TakeSnapshot::default() };
            engine.take_snapshot(who, ns(), "box", spec).await.map(drop)
        }
        Act::Forks => {
            let spec = ForkMany { count: 3, name: Some("fork".to_owned()), ..ForkMany::default() };
            engine.forks(who, ns(), "box", spec).await.map(drop)
        }
        Act::Rollback | Act::RollbackKeeping => {
            let spec = Rollback { discard: act == Act::Rollback, ..Rollback::default() };
            engine.rollback(who, ns(), "box", spec).await.map(drop)
        }
        Act::Import => {
            let id = current().await?.sandbox.current_snapshot_id.unwrap();
            let out = engine
                .export_snapshot(who, "team", &id, bivouac_runtime::archive::Format::TarZst)
                .await?;
            engine
                .import_snapshot(who, ns(), crate::ImportSpec::default(), out.data)
                .await
                .map(drop)
        }
        Act::Collect => {
            // Two, so that one is left when the first is gone.
            for n in [3, 4] {
                sim.plant_session(&SessionId::new(5, [n; 10]));
            }
            engine.collect_garbage(who, false).await.map(drop)
        }
        Act::MakeDrive => drives::make(&engine, "d").await.map(drop),
        Act::DeleteDrive => engine.delete_drive(who, ns(), "d").await.map(drop),
        Act::Attach => drives::attach(&engine, "box", "d").await.map(drop),
        Act::Detach => engine.detach_drive(who, ns(), "d", "box", None, false).await.map(drop),
    }
}

/// Whatever happened: what is there is whole, and what was asked for can be asked for again.
async fn after(bed: &Bed, point: P, act: Act) {
    let what = format!("{} settles", point.name());
    eventually(&what, || async { bed.problems().await.is_empty().then_some(()) }).await;
    match act {
        Act::Create | Act::CreateThatFails => {
            if bed.get("box").await.is_err() {
                bed.create("box").await;
            }
        }
        // A repeated call ends what the first one began.
        Act::Delete => {
            if bed.get("box").await.is_ok() {
                bed.engine.delete(me(), ns(), "box", true).await.unwrap();
            }
            bed.create("box").await;
        }
        Act::DeleteSnapshot => {
            if let Err(error) = bed.resume("box").await {
                assert_eq!(error.code, "snapshot_not_found", "{}", point.name());
                bed.delete("box").await.unwrap();
                bed.create("box").await;
            }
        }
        Act::TakeLive => {
            // Whatever happened, it goes on.
            assert!(bed.sim.frozen().is_empty(), "{}", point.name());
            let view = bed.get("box").await.unwrap();
            assert_eq!(view.session.status, SessionStatus::Running, "{}", point.name());
            assert_eq!(bed.run(&view.session.id, &["test", "f"]).await, Some(0));
        }
        Act::Forks => {
            // All of them, or none.
            let mut there = 0;
            for n in 1..=3 {
                there += usize::from(bed.get(&format!("fork-{n}")).await.is_ok());
            }
            let all = usize::from(there == 3) * 3;
            assert_eq!(there, all, "{}", point.name());
            for n in 1..=there {
                bed.engine.delete(me(), ns(), &format!("fork-{n}"), true).await.unwrap();
            }
            let spec = ForkMany { count: 3, name: Some("fork".to_owned()), ..ForkMany::default() };
            assert_eq!(bed.engine.forks(me(), ns(), "box", spec).await.unwrap().sandboxes.len(), 3);
            for n in 1..=3 {
                bed.engine.delete(me(), ns(), &format!("fork-{n}"), true).await.unwrap();
            }
        }
        Act::MakeDrive | Act::DeleteDrive => {
            drives::make(&bed.engine, "d").await.unwrap();
            bed.engine.delete_drive(me(), ns(), "d").await.unwrap();
        }
        // Whatever became of it, the drive is whole, and another can have it when this one lets go.
        Act::Attach | Act::Detach => {
            match bed.engine.detach_drive(me(), ns(), "d", "box", None, false).await {
                Ok(_) => {}
                Err(error) => {
                    assert_eq!(error.kind, crate::ErrorKind::NotFound, "{}", point.name())
                }
            }
            bed.create("other").await;
            drives::attach(&bed.engine, "other", "d").await.unwrap();
            let other = bed.get("other").await.unwrap().session.id;
            let there = bed.run(&other, &["test", "/data/f"]).await == Some(0);
            assert_eq!(there, act == Act::Detach, "{}", point.name());
            bed.delete("other").await.unwrap();
            bed.engine.delete_drive(me(), ns(), "d").await.unwrap();
        }
        Act::Rollback
        | Act::RollbackKeeping
        | Act::Resume
        | Act::Stop
        | Act::StopWithEviction
        | Act::StopWithHook
        | Act::LoseAndRestart
        | Act::Pause
        | Act::Unpause
        | Act::Lose
        | Act::Import
        | Act::Collect
        | Act::Start => {
            let session = bed.resume("box").await.unwrap().session.id;
            assert_eq!(bed.run(&session, &["test", "f"]).await, Some(0), "{}", point.name());
        }
    }
    let session = bed.resume("box").await.unwrap().session.id;
    assert_eq!(bed.run(&session, &["true"]).await, Some(0));
    // What forks started from goes a moment after them.
    let what = format!("{} leaves nothing", point.name());
    eventually(&what, || async { bed.problems().await.is_empty().then_some(()) }).await;
    bed.engine.delete(me(), ns(), "box", true).await.unwrap();
    eventually(&what, || async { bed.problems().await.is_empty().then_some(()) }).await;
    assert!(bed.sim.session_ids().is_empty(), "{}", point.name());
    assert!(bed.sim.sessions_with_logs().is_empty(), "{}", point.name());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_step_that_is_killed_is_settled_at_the_next_start() {
    for &point in P::ALL {
        let act = act(point);
        let bed = Bed::new().await;
        prepare(&bed, act).await;
        let reached = bed.engine.inner.faults.hang_at(point);
        let call = tokio::spawn(perform(Arc::clone(&bed.engine), bed.sim.clone(), act));
        let in_time = tokio::time::timeout(Duration::from_secs(10), reached.notified()).await;
        assert!(in_time.is_ok(), "{} was not reached", point.name());
        let bed = bed.restart().await;
        call.abort();
        // Some of it by reconcilers, which begin with the engine and end after it has opened.
        let what = format!("{} is settled", point.name());
        eventually(&what, || async { bed.problems().await.is_empty().then_some(()) }).await;
        after(&bed, point, act).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_step_that_fails_is_undone_or_gone_on_with() {
    for &point in P::ALL {
        let act = act(point);
        let bed = Bed::new().await;
        prepare(&bed, act).await;
        bed.engine.inner.faults.fail_at(point);
        let _ = perform(Arc::clone(&bed.engine), bed.sim.clone(), act).await;
        eventually(&format!("{} is reached", point.name()), || async {
            (!bed.engine.inner.faults.is_armed()).then_some(())
        })
        .await;
        // What an error interrupted is the reconciler's, which comes again where somebody was at work.
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            bed.clock.advance(31_000);
        }
        after(&bed, point, act).await;
    }
}

/// A removed step would make the tests above pass by testing less.
#[test]
fn no_step_has_been_dropped() {
    assert_eq!(P::ALL.len(), 61);
    let names: std::collections::HashSet<_> = P::ALL.iter().map(|p| p.name()).collect();
    assert_eq!(names.len(), P::ALL.len());
}
