//! Many callers at once on few names, cut off at any moment: whatever the order, host and database
//! agree afterwards and every name is free or usable.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bivouac_runtime::sim::Sim;

use super::{Bed, eventually, me, named, ns, program};
use crate::{CreateSandbox, Engine, ErrorKind, ForkSandbox, UpdateSandbox};

const NAMES: [&str; 3] = ["a", "b", "c"];

/// A small generator: the same seed gives the same calls.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }

    fn name(&mut self) -> &'static str {
        NAMES[usize::try_from(self.roll(3)).unwrap_or(0)]
    }
}

/// One caller. An error is an answer, unless it says that we are at fault.
async fn caller(engine: Arc<Engine>, sim: Sim, seed: u64, calls: usize) {
    let mut dice = Dice(seed | 1);
    for _ in 0..calls {
        let name = dice.name();
        let session = engine.get(me(), ns(), name, false).await.map(|view| view.session.id);
        let result = match (dice.roll(15), session) {
            (0, _) => {
                let persistent = Some(dice.roll(3) > 0);
                let spec = CreateSandbox { persistent, ..named(name) };
                engine.create(me(), ns(), spec).await.map(drop)
            }
            (1 | 2, _) => engine.get(me(), ns(), name, true).await.map(drop),
            (3, _) => engine.delete(me(), ns(), name, dice.roll(2) == 0).await.map(drop),
            (4, _) => {
                let spec = ForkSandbox { name: Some(dice.name().to_owned()), ..Default::default() };
                engine.fork(me(), ns(), name, spec).await.map(drop)
            }
            (5, _) => {
                let change = UpdateSandbox { ports: Some(vec![3000]), ..Default::default() };
                engine.update(me(), ns(), name, change).await.map(drop)
            }
            (6 | 7, Ok(id)) => engine.stop(me(), "team", &id).await.map(drop),
            (8, Ok(id)) => engine.snapshot(me(), "team", &id, None).await.map(drop),
            (9, Ok(id)) => {
                sim.crash_session(&id);
                Ok(())
            }
            (11 | 12, _) => engine.pause(me(), ns(), name, false).await.map(drop),
            (13, _) => engine.unpause(me(), ns(), name).await.map(drop),
            (10, Ok(id)) => engine.extend_timeout(me(), "team", &id, 1_000).await.map(drop),
            (_, Ok(id)) => {
                let argv: &[&str] = if dice.roll(2) == 0 { &["sleep"] } else { &["true"] };
                engine.start_command(me(), "team", &id, program(argv), None).await.map(drop)
            }
            (_, Err(error)) => Err(error),
        };
        if let Err(error) = result {
            assert_ne!(error.kind, ErrorKind::Internal, "{error} {:?}", error.source);
        }
    }
}

async fn usable(bed: &Bed) {
    eventually("all is settled", || async { bed.problems().await.is_empty().then_some(()) }).await;
    for name in NAMES {
        match bed.resume(name).await {
            Ok(view) => assert_eq!(bed.run(&view.session.id, &["true"]).await, Some(0)),
            Err(error) if error.code == "snapshot_not_found" => {
                bed.delete(name).await.unwrap();
            }
            Err(error) => {
                assert_eq!(error.kind, ErrorKind::NotFound, "{name}: {error}");
                bed.create(name).await;
            }
        }
    }
    bed.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_cross_leave_a_whole_state() {
    for seed in 1..=6_u64 {
        let bed = Bed::new().await;
        let callers: Vec<_> = (0..8)
            .map(|n| {
                let (engine, sim) = (Arc::clone(&bed.engine), bed.sim.clone());
                tokio::spawn(caller(engine, sim, seed * 7_919 + n * 104_729, 25))
            })
            .collect();
        for caller in callers {
            caller.await.unwrap();
        }
        usable(&bed).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_are_killed_in_the_storm_leave_a_whole_state() {
    let mut bed = Bed::new().await;
    let mut seen = BTreeSet::new();
    for round in 1..=25_u64 {
        let callers: Vec<_> = (0..6)
            .map(|n| {
                let (engine, sim) = (Arc::clone(&bed.engine), bed.sim.clone());
                tokio::spawn(caller(engine, sim, round * 15_485_863 + n * 32_452_843, 1_000))
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(3 + round * 2)).await;
        // Callers see errors of all kinds when the engine goes: they are not asked.
        callers.iter().for_each(tokio::task::JoinHandle::abort);
        bed = bed.restart().await;
        seen.extend(bed.sim.snapshot_names());
        let problems = bed.problems().await;
        assert!(problems.is_empty(), "round {round}: {problems:#?}");
        usable(&bed).await;
    }
    assert!(seen.len() > 5, "the storm did next to nothing");
}

/// Only where the records are on a server: a file's connections are not cut.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_are_cut_in_the_storm_leave_a_whole_state() {
    let bed = Bed::new().await;
    let Some(database) = &bed.place.database else { return };
    for round in 1..=3_u64 {
        let callers: Vec<_> = (0..6)
            .map(|n| {
                let (engine, sim) = (Arc::clone(&bed.engine), bed.sim.clone());
                tokio::spawn(caller(engine, sim, round * 7_919 + n * 104_729, 25))
            })
            .collect();
        let mut cut = 0;
        while !callers.iter().all(tokio::task::JoinHandle::is_finished) {
            tokio::time::sleep(Duration::from_millis(20 + round * 7)).await;
            cut += database.cut().unwrap();
        }
        assert!(cut > 10, "hardly a connection was cut: {cut}");
        for caller in callers {
            caller.await.unwrap();
        }
        // What was interrupted is gone on with by itself, a little later.
        let mut passes = 0;
        while !bed.problems().await.is_empty() {
            passes += 1;
            assert!(passes < 100, "{:#?}", bed.problems().await);
            bed.clock.advance(31_000);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        usable(&bed).await;
    }
}
