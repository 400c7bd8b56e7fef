//! Pause, idle rule, hooks, restart policy: with the clock in hand.

use std::sync::Arc;

use bivouac_types::id::SessionId;
use bivouac_types::life::{Hook, LifeChange, MAX_RESTARTS, Restart};
use bivouac_types::session::SessionStatus;

use super::{Bed, START, eventually, me, named, ns};
use crate::{CreateSandbox, ErrorKind, ForkMany, Rollback, TakeSnapshot, UpdateSandbox, View};

pub(super) fn hook(command: &str, timeout_ms: u64) -> LifeChange {
    let hook = Hook { command: command.to_owned(), timeout_ms };
    LifeChange { pre_stop: Some(Some(hook)), ..LifeChange::default() }
}

pub(super) fn restarted() -> LifeChange {
    LifeChange { restart: Some(Restart::UnlessStopped), ..LifeChange::default() }
}

fn idle(ms: i64) -> LifeChange {
    LifeChange { idle_stop_ms: Some(Some(ms)), ..LifeChange::default() }
}

async fn with(bed: &Bed, name: &str, life: LifeChange) -> SessionId {
    let spec = CreateSandbox { life, timeout_ms: Some(60_000), ..named(name) };
    bed.engine.create(me(), ns(), spec).await.unwrap().session.id
}

async fn pause(bed: &Bed, name: &str) {
    let paused = bed.engine.pause(me(), ns(), name, false).await.unwrap();
    assert!(paused.session.paused_at.is_some());
    assert!(bed.sim.frozen().contains(&paused.session.id));
}

/// Moves the clock in steps that the reconcilers can follow, for as long as `goes_on`.
async fn pass(bed: &Bed, ms: i64) {
    let mut left = ms;
    while left > 0 {
        let step = left.min(1_000);
        bed.clock.advance(step);
        left -= step;
        for _ in 0..4 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }
}

async fn status(bed: &Bed, name: &str) -> SessionStatus {
    bed.get(name).await.unwrap().session.status
}

#[tokio::test]
async fn a_pause_stands_still_and_its_time_does_not_count() {
    let bed = Bed::new().await;
    let id = with(&bed, "box", LifeChange::default()).await;
    let sleeper = bed.start(&id, &["sleep"]).await.unwrap();
    bed.clock.advance(10_000);
    pause(&bed, "box").await;
    assert_eq!(bed.engine.paused_at(&id), Some(START + 10_000));
    bed.clock.advance(5_000);
    // Again: since when stays.
    let again = bed.engine.pause(me(), ns(), "box", false).await.unwrap();
    assert_eq!(again.session.paused_at, Some(START + 10_000));
    bed.check().await;
    pass(&bed, 100_000).await;
    let view = bed.get("box").await.unwrap();
    assert_eq!(view.session.status, SessionStatus::Running, "clients know no other word");
    assert_eq!(bed.engine.deadline(&id), Some(START + 60_000 + 105_000));
    for _ in 0..2 {
        let gone_on = bed.engine.unpause(me(), ns(), "box").await.unwrap();
        assert_eq!((gone_on.session.paused_at, gone_on.session.paused_ms), (None, 105_000));
    }
    assert!(bed.sim.frozen().is_empty());
    assert!(bed.engine.command(me(), "team", &id, &sleeper.id).await.unwrap().end.is_none());
    assert_eq!(bed.engine.deadline(&id), Some(START + 165_000));
    pass(&bed, 49_000).await;
    assert_eq!(status(&bed, "box").await, SessionStatus::Running);
    pass(&bed, 1_000).await;
    bed.until("box", SessionStatus::Stopped).await;
    bed.check().await;
}

#[tokio::test]
async fn a_pause_outlives_the_engine_and_who_works_in_it_ends_it() {
    let bed = Bed::new().await;
    let id = with(&bed, "box", LifeChange::default()).await;
    pause(&bed, "box").await;
    let bed = bed.restart().await;
    assert_eq!(bed.sim.frozen(), std::slice::from_ref(&id));
    bed.check().await;
    // Many at once: each gets its answer, and it is let go on once.
    let calls = (0..8).map(|_| bed.run(&id, &["true"]));
    let codes = futures_util::future::join_all(calls).await;
    assert!(codes.iter().all(|code| *code == Some(0)), "{codes:?}");
    assert_eq!(bed.engine.paused_at(&id), None);
    pause(&bed, "box").await;
    bed.engine.mkdir(me(), "team", &id, "folder", None, true).await.unwrap();
    assert!(bed.sim.frozen().is_empty());
    pause(&bed, "box").await;
    // One that asks for a sandbox that runs gets one.
    assert!(!bed.resume("box").await.unwrap().resumed);
    assert!(bed.sim.frozen().is_empty());
    bed.check().await;
}

#[tokio::test]
async fn what_does_not_need_it_leaves_it_paused() {
    let bed = Bed::new().await;
    let id = with(&bed, "box", LifeChange::default()).await;
    bed.run(&id, &["touch", "f"]).await;
    pause(&bed, "box").await;
    let live = TakeSnapshot { live: true, ..TakeSnapshot::default() };
    bed.engine.take_snapshot(me(), ns(), "box", live).await.unwrap();
    let spec = ForkMany { count: 2, name: Some("fork".to_owned()), ..ForkMany::default() };
    let forked = bed.engine.forks(me(), ns(), "box", spec).await.unwrap();
    for fork in &forked.sandboxes {
        assert_eq!(fork.session.paused_at, None);
        assert_eq!(bed.run(&fork.session.id, &["test", "f"]).await, Some(0));
    }
    bed.engine.extend_timeout(me(), "team", &id, 1_000).await.unwrap();
    bed.engine.keep_alive(me(), ns(), "box", Some(70_000)).await.unwrap();
    assert_eq!(bed.sim.frozen(), std::slice::from_ref(&id));
    assert_eq!(bed.sim.torn_snapshots(), 0);
    bed.check().await;
    let back = bed.engine.rollback(me(), ns(), "box", Rollback::default()).await.unwrap();
    assert_eq!(bed.run(&back.view.session.id, &["test", "f"]).await, Some(0));
    pause(&bed, "box").await;
    let stopped = bed.engine.stop(me(), "team", &back.view.session.id).await.unwrap();
    assert!(stopped.snapshot.is_some() && stopped.session.paused_at.is_none());
    let error = bed.engine.pause(me(), ns(), "box", false).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Gone, "{error}");
    let error = bed.engine.unpause(me(), ns(), "box").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Gone, "{error}");
    assert_eq!(
        bed.engine.pause(me(), ns(), "none", false).await.unwrap_err().kind,
        ErrorKind::NotFound
    );
    bed.resume("box").await.unwrap();
    pause(&bed, "box").await;
    bed.delete("box").await.unwrap();
    bed.check().await;
}

#[tokio::test]
async fn a_deep_pause_without_swap_changes_nothing() {
    let bed = Bed::new().await;
    let id = with(&bed, "box", LifeChange::default()).await;
    let error = bed.engine.pause(me(), ns(), "box", true).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Conflict, "cannot_page_out"));
    assert!(error.message.contains("was not paused"), "{error}");
    assert!(bed.sim.frozen().is_empty());
    assert_eq!(bed.engine.paused_at(&id), None);
    pause(&bed, "box").await;
    let error = bed.engine.pause(me(), ns(), "box", true).await.unwrap_err();
    assert!(error.message.contains("stays paused"), "{error}");
    assert_eq!(bed.sim.frozen(), [id]);
    bed.sim.add_swap();
    let deep = bed.engine.pause(me(), ns(), "box", true).await.unwrap();
    assert_eq!(deep.paged_out, Some(1 << 20));
    bed.check().await;
}

#[tokio::test]
async fn an_idle_sandbox_is_stopped_and_one_in_use_is_not_cut() {
    let bed = Bed::new().await;
    let id = with(&bed, "box", idle(120_000)).await;
    let other = with(&bed, "busy", idle(120_000)).await;
    // Twice as long as a session may live: the rule decides, not the limit.
    let sleeper = bed.start(&other, &["sleep"]).await.unwrap();
    let mut follow = bed.engine.follow(me(), "team", &other, &sleeper.id).await.unwrap();
    pass(&bed, 100_000).await;
    assert_eq!(status(&bed, "box").await, SessionStatus::Running);
    assert!(bed.get("box").await.unwrap().session.timeout_ms > 60_000);
    // Looks do not count, work does.
    bed.engine.commands(me(), "team", &id).await.unwrap();
    pass(&bed, 15_000).await;
    bed.run(&id, &["touch", "f"]).await;
    pass(&bed, 110_000).await;
    assert_eq!(status(&bed, "box").await, SessionStatus::Running);
    pass(&bed, 11_000).await;
    assert!(bed.until("box", SessionStatus::Stopped).await.sandbox.current_snapshot_id.is_some());
    assert_eq!(status(&bed, "busy").await, SessionStatus::Running, "somebody follows its command");
    // Nobody does any more: a daemon in the background does not count.
    assert!(
        tokio::time::timeout(std::time::Duration::from_millis(20), follow.next()).await.is_err()
    );
    drop(follow);
    pass(&bed, 122_000).await;
    bed.until("busy", SessionStatus::Stopped).await;
    bed.check().await;
}

#[tokio::test]
async fn an_engine_that_was_away_stops_nothing_at_once() {
    let bed = Bed::new().await;
    with(&bed, "box", idle(120_000)).await;
    bed.crash().await;
    bed.clock.advance(3_600_000);
    let bed = bed.restart().await;
    pass(&bed, 110_000).await;
    assert_eq!(status(&bed, "box").await, SessionStatus::Running);
    pass(&bed, 12_000).await;
    bed.until("box", SessionStatus::Stopped).await;
    bed.check().await;
}

#[tokio::test]
async fn an_idle_rule_can_pause_and_be_changed_and_be_put_off() {
    let bed = Bed::new().await;
    let life = LifeChange { idle_pause: Some(true), ..idle(30_000) };
    let id = with(&bed, "box", life).await;
    pass(&bed, 31_000).await;
    eventually("it is paused", || async { bed.engine.paused_at(&id).map(drop) }).await;
    pass(&bed, 120_000).await;
    assert_eq!(status(&bed, "box").await, SessionStatus::Running, "a paused one is left alone");
    assert_eq!(bed.run(&id, &["true"]).await, Some(0));
    let bed = bed.restart().await;
    bed.engine.keep_alive(me(), ns(), "box", Some(90_000)).await.unwrap();
    pass(&bed, 60_000).await;
    let bed = bed.restart().await;
    pass(&bed, 29_000).await;
    assert_eq!(bed.engine.paused_at(&id), None, "kept, also over a restart");
    // Changed on the spot, for the session that runs.
    let life = Some(LifeChange { idle_pause: Some(false), ..idle(10_000) });
    let change = UpdateSandbox { life, ..UpdateSandbox::default() };
    bed.engine.update(me(), ns(), "box", change).await.unwrap();
    pass(&bed, 12_000).await;
    bed.until("box", SessionStatus::Stopped).await;
    let wrong = UpdateSandbox { life: Some(idle(1)), ..UpdateSandbox::default() };
    let error = bed.engine.update(me(), ns(), "box", wrong).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert_eq!(bed.get("box").await.unwrap().sandbox.life.idle_stop_ms, Some(10_000));
    bed.check().await;
}

#[tokio::test]
async fn keep_alive_gives_time() {
    let bed = Bed::new().await;
    let id = with(&bed, "box", LifeChange::default()).await;
    bed.clock.advance(30_000);
    bed.engine.keep_alive(me(), ns(), "box", None).await.unwrap();
    assert_eq!(bed.engine.deadline(&id), Some(START + 90_000));
    bed.engine.keep_alive(me(), ns(), "box", Some(10_000)).await.unwrap();
    assert_eq!(bed.engine.deadline(&id), Some(START + 90_000), "never less");
    let day = 86_400_000;
    let error = bed.engine.keep_alive(me(), ns(), "box", Some(2 * day)).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Invalid, "sandbox_timeout_invalid"));
    let error = bed.engine.keep_alive(me(), ns(), "box", Some(1)).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    with(&bed, "ruled", idle(60_000)).await;
    bed.engine.keep_alive(me(), ns(), "ruled", Some(2 * day)).await.unwrap();
    let view = bed.get("ruled").await.unwrap();
    assert_eq!(view.session.deadline(), START + 30_000 + 2 * day);
    bed.engine.extend_timeout(me(), "team", &view.session.id, 1_000).await.unwrap();
    assert_eq!(bed.engine.deadline(&id), Some(START + 90_000));
}

/// The newest command of a session.
async fn newest(bed: &Bed, id: &SessionId) -> bivouac_types::command::Command {
    bed.engine.commands(me(), "team", id).await.unwrap().remove(0)
}

#[tokio::test]
async fn a_hook_runs_before_what_keeps_something_ends() {
    let bed = Bed::new().await;
    let id = with(&bed, "box", hook("touch hooked", 1_000)).await;
    pause(&bed, "box").await;
    let stopped = bed.engine.stop(me(), "team", &id).await.unwrap();
    assert_eq!(stopped.session.reason, None);
    let ran = newest(&bed, &id).await;
    assert_eq!(ran.args, ["-c", "touch hooked", crate::hooks::PRE_STOP]);
    assert_eq!(ran.end.unwrap().exit_code, Some(0));
    let view = bed.resume("box").await.unwrap();
    assert_eq!(bed.run(&view.session.id, &["test", "hooked"]).await, Some(0));
    // Its time is over, and a snapshot that ends it: the same.
    bed.run(&view.session.id, &["rm", "hooked"]).await;
    bed.clock.advance(60_000);
    bed.until("box", SessionStatus::Stopped).await;
    let view = bed.resume("box").await.unwrap();
    assert_eq!(bed.run(&view.session.id, &["test", "hooked"]).await, Some(0));
    bed.run(&view.session.id, &["rm", "hooked"]).await;
    bed.engine.snapshot(me(), "team", &view.session.id, None).await.unwrap();
    let view = bed.resume("box").await.unwrap();
    assert_eq!(bed.run(&view.session.id, &["test", "hooked"]).await, Some(0));
    // Without it when that is asked for.
    bed.run(&view.session.id, &["rm", "hooked"]).await;
    bed.engine.stop_without_hook(me(), "team", &view.session.id).await.unwrap();
    let view = bed.resume("box").await.unwrap();
    assert_eq!(bed.run(&view.session.id, &["test", "hooked"]).await, Some(1));
    bed.engine.shutdown(true).await.unwrap();
    assert_eq!(newest(&bed, &view.session.id).await.args[1], "touch hooked");
}

#[tokio::test]
async fn a_hook_that_fails_or_hangs_stops_nobody() {
    let bed = Bed::new().await;
    let id = with(&bed, "fails", hook("exit 3", 1_000)).await;
    let stopped = bed.engine.stop(me(), "team", &id).await.unwrap();
    assert_eq!(stopped.session.status, SessionStatus::Stopped);
    assert!(stopped.session.reason.unwrap().contains("exit code 3"));
    let id = with(&bed, "missing", hook("nonsense", 1_000)).await;
    let stopped = bed.engine.stop(me(), "team", &id).await.unwrap();
    assert!(stopped.session.reason.unwrap().contains("hook failed"));
    // One that hangs has its time and a little.
    let id = with(&bed, "hangs", hook("sleep", 10_000)).await;
    let engine = Arc::clone(&bed.engine);
    let stop = tokio::spawn(async move { engine.stop(me(), "team", &id).await });
    let view = bed.get("hangs").await.unwrap();
    eventually("it runs", || async {
        (!bed.engine.commands(me(), "team", &view.session.id).await.unwrap().is_empty())
            .then_some(())
    })
    .await;
    pass(&bed, 14_000).await;
    assert!(!stop.is_finished());
    assert_eq!(status(&bed, "hangs").await, SessionStatus::Running);
    pass(&bed, 1_000).await;
    let stopped = stop.await.unwrap().unwrap();
    assert!(stopped.session.reason.unwrap().contains("did not end"));
    // Or is cut off.
    let view = bed.resume("hangs").await.unwrap();
    let (engine, id) = (Arc::clone(&bed.engine), view.session.id.clone());
    let stop = tokio::spawn(async move { engine.stop(me(), "team", &id).await });
    eventually("it runs", || async {
        (!bed.engine.commands(me(), "team", &view.session.id).await.unwrap().is_empty())
            .then_some(())
    })
    .await;
    bed.engine.stop_without_hook(me(), "team", &view.session.id).await.unwrap();
    assert!(stop.await.unwrap().unwrap().session.reason.unwrap().contains("cut off"));
    // A deletion keeps nothing, so nothing is to be done before.
    let view = bed.resume("hangs").await.unwrap();
    assert_eq!(view.session.status, SessionStatus::Running);
    bed.delete("hangs").await.unwrap();
    bed.check().await;
}

/// Waits until a sandbox runs in another session than `before`.
async fn back(bed: &Bed, name: &str, before: &SessionId) -> View {
    eventually("it is back", || async {
        let view = bed.get(name).await.ok()?;
        let back = view.session.status == SessionStatus::Running && view.session.id != *before;
        back.then_some(view)
    })
    .await
}

#[tokio::test]
async fn what_was_lost_comes_back_if_it_is_to() {
    let bed = Bed::new().await;
    let id = with(&bed, "box", restarted()).await;
    let plain = with(&bed, "plain", LifeChange::default()).await;
    bed.run(&id, &["touch", "f"]).await;
    bed.sim.crash_session(&plain);
    bed.sim.crash_session(&id);
    let view = back(&bed, "box", &id).await;
    assert_eq!(bed.run(&view.session.id, &["test", "f"]).await, Some(0));
    assert_eq!(view.sandbox.restarts.total, 1);
    bed.until("plain", SessionStatus::Aborted).await;
    // A host that restarts: everything is gone when the engine comes.
    bed.crash().await;
    bed.sim.crash_session(&view.session.id);
    bed.clock.advance(3_600_000);
    let bed = bed.restart().await;
    let again = back(&bed, "box", &view.session.id).await;
    assert_eq!(bed.run(&again.session.id, &["test", "f"]).await, Some(0));
    assert_eq!((again.sandbox.restarts.total, again.sandbox.restarts.in_a_row), (2, 1));
    assert_eq!(status(&bed, "plain").await, SessionStatus::Aborted);
    // One that was stopped stays so, also when it was lost before.
    bed.engine.stop(me(), "team", &again.session.id).await.unwrap();
    let bed = bed.restart().await;
    pass(&bed, 70_000).await;
    assert_eq!(status(&bed, "box").await, SessionStatus::Stopped);
    bed.check().await;
}

#[tokio::test]
async fn restarts_come_ever_later_and_have_an_end() {
    let bed = Bed::new().await;
    let mut id = with(&bed, "box", restarted()).await;
    for attempt in 1..=MAX_RESTARTS {
        bed.sim.crash_session(&id);
        // The first one comes back at once.
        eventually("its loss is seen", || async {
            let session = bed.get("box").await.ok()?.session;
            (session.id != id || session.status == SessionStatus::Aborted).then_some(())
        })
        .await;
        // From the second one on it waits.
        for _ in 0..400 {
            if bed.get("box").await.unwrap().session.id != id {
                break;
            }
            bed.clock.advance(1_000);
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        let view = back(&bed, "box", &id).await;
        assert_eq!(view.sandbox.restarts.in_a_row, attempt);
        id = view.session.id;
    }
    bed.sim.crash_session(&id);
    bed.until("box", SessionStatus::Aborted).await;
    for _ in 0..20 {
        bed.clock.advance(60_000);
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    let view = bed.get("box").await.unwrap();
    assert_eq!(view.session.status, SessionStatus::Aborted);
    assert!(view.sandbox.restarts.gave_up());
    // A start by hand begins anew.
    let view = bed.resume("box").await.unwrap();
    assert_eq!(view.sandbox.restarts.in_a_row, 0);
    bed.sim.crash_session(&view.session.id);
    back(&bed, "box", &view.session.id).await;
    bed.check().await;
}

#[tokio::test]
async fn a_restart_that_fails_is_tried_again() {
    let bed = Bed::new().await;
    let id = with(&bed, "box", restarted()).await;
    bed.sim.fail_launches(1);
    bed.sim.crash_session(&id);
    eventually("the first attempt failed", || async {
        (status(&bed, "box").await == SessionStatus::Failed).then_some(())
    })
    .await;
    bed.clock.advance(2_000);
    let view = back(&bed, "box", &id).await;
    assert_eq!(view.sandbox.restarts.total, 2);
    bed.check().await;
}

#[tokio::test]
async fn forks_copy_the_rules() {
    let bed = Bed::new().await;
    let life = LifeChange { wake: Some(true), ..hook("touch f", 500) };
    with(&bed, "box", LifeChange { restart: Some(Restart::UnlessStopped), ..life }).await;
    let spec = ForkMany { count: 1, name: Some("fork".to_owned()), ..ForkMany::default() };
    let fork = bed.engine.forks(me(), ns(), "box", spec).await.unwrap().sandboxes.remove(0);
    assert_eq!(fork.sandbox.life, bed.get("box").await.unwrap().sandbox.life);
    let spec = CreateSandbox { ephemeral: true, life: restarted(), ..CreateSandbox::default() };
    let error = bed.engine.create(me(), ns(), spec).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
}
