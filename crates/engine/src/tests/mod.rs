//! The engine on a simulated host with a clock that is moved by hand; on SQLite, or on PostgreSQL where
//! `BIVOUAC_TEST_DATABASE=postgres` says so (script/test runs all of it on both).

mod access;
mod archives;
mod commands;
mod credentials;
mod disk;
mod drives;
mod faults;
mod forks;
mod images;
mod leases;
mod life;
mod lists;
mod live;
mod meters;
mod pause;
mod policy;
mod rollback;
mod secrets;
mod snapshots;
mod sources;
mod storm;
mod terminals;
mod timeouts;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bivouac_runtime::sim::Sim;
use bivouac_store::{Address, Db};
use bivouac_testkit::TestDatabase;
use bivouac_types::command::{Command, CommandSpec};
use bivouac_types::id::SessionId;
use bivouac_types::name::Namespace;
use bivouac_types::session::SessionStatus;

use crate::{CreateSandbox, Engine, EngineConfig, Error, ManualClock, Principal, View};

/// When the clock starts.
const START: i64 = 1_800_000_000_000;

/// An engine, its host and its clock. The host and the database outlive the engine.
struct Bed {
    place: Place,
    sim: Sim,
    clock: Arc<ManualClock>,
    db: Db,
    engine: Arc<Engine>,
}

/// Where a test's records are.
struct Place {
    dir: tempfile::TempDir,
    database: Option<TestDatabase>,
}

impl Place {
    fn new() -> Self {
        let database = TestDatabase::chosen().unwrap();
        Self { dir: tempfile::tempdir().unwrap(), database }
    }

    fn address(&self) -> Address {
        match &self.database {
            Some(database) => Address::parse(database.url()).unwrap(),
            None => Address::file(&self.dir.path().join("bivouac.db")),
        }
    }
}

fn me() -> &'static Principal {
    static ME: LazyLock<Principal> =
        LazyLock::new(|| Principal { name: "test".to_owned(), ..Principal::local() });
    &ME
}

fn ns() -> &'static Namespace {
    static NS: LazyLock<Namespace> =
        LazyLock::new(|| Namespace { team: "team".to_owned(), project: "project".to_owned() });
    &NS
}

fn named(name: &str) -> CreateSandbox {
    CreateSandbox { name: Some(name.to_owned()), ..CreateSandbox::default() }
}

fn program(argv: &[&str]) -> CommandSpec {
    CommandSpec {
        program: argv[0].to_owned(),
        args: argv[1..].iter().map(|a| (*a).to_owned()).collect(),
        cwd: None,
        env: std::collections::BTreeMap::new(),
        sudo: false,
        timeout_ms: None,
        attach_stdin: false,
        tty: None,
        terminal: None,
    }
}

async fn open(place: &Place, sim: &Sim, clock: &Arc<ManualClock>) -> (Db, Arc<Engine>) {
    let db = Db::open(&place.address()).await.unwrap();
    db.unlock(&place.dir.path().join("vault.key")).await.unwrap();
    let config = EngineConfig::new("node-a", "host", "http://127.0.0.1:7070");
    let runtime = Arc::new(sim.clone());
    let engine = Engine::open(config, db.clone(), runtime, Arc::clone(clock) as _).await.unwrap();
    (db, engine)
}

impl Bed {
    async fn new() -> Self {
        let place = Place::new();
        let sim = Sim::new();
        let clock = Arc::new(ManualClock::new(START));
        let (db, engine) = open(&place, &sim, &clock).await;
        Self { place, sim, clock, db, engine }
    }

    /// Ends the engine where it stands, as SIGKILL does.
    async fn crash(&self) {
        self.engine.inner.abort_tasks();
        self.db.close().await;
    }

    /// Ends the engine where it stands and starts another on the same host and database.
    async fn restart(self) -> Self {
        self.crash().await;
        let Self { place, sim, clock, .. } = self;
        let (db, engine) = open(&place, &sim, &clock).await;
        Self { place, sim, clock, db, engine }
    }

    async fn create(&self, name: &str) -> View {
        self.engine.create(me(), ns(), named(name)).await.unwrap()
    }

    async fn get(&self, name: &str) -> Result<View, Error> {
        self.engine.get(me(), ns(), name, false).await
    }

    async fn resume(&self, name: &str) -> Result<View, Error> {
        self.engine.get(me(), ns(), name, true).await
    }

    async fn delete(&self, name: &str) -> Result<(), Error> {
        self.engine.delete(me(), ns(), name, false).await.map(drop)
    }

    async fn start(&self, session: &SessionId, argv: &[&str]) -> Result<Command, Error> {
        self.engine.start_command(me(), "team", session, program(argv), None).await
    }

    async fn wait(&self, command: &Command) -> Result<Command, Error> {
        self.engine.wait_command(me(), "team", &command.session_id, &command.id).await
    }

    /// Runs a program to its end and answers its exit code.
    async fn run(&self, session: &SessionId, argv: &[&str]) -> Option<i32> {
        let command = self.start(session, argv).await.unwrap();
        self.wait(&command).await.unwrap().end.unwrap().exit_code
    }

    /// Waits until the newest session of a sandbox is in that status and settled.
    async fn until(&self, name: &str, status: SessionStatus) -> View {
        eventually(&format!("{name} is {}", status.as_str()), || async {
            let view = self.get(name).await.ok()?;
            let row = self.db.session(&view.session.id).await.unwrap().unwrap();
            let settled = row.settled || !status.is_terminal();
            if view.session.status != status || !settled {
                return None;
            }
            // As it is at rest: the first look may have been in the middle of the settling.
            self.get(name).await.ok()
        })
        .await
    }

    /// What host and database say of each other, at rest.
    async fn check(&self) {
        let problems = self.problems().await;
        assert!(problems.is_empty(), "{problems:#?}");
    }

    async fn problems(&self) -> Vec<String> {
        let mut out = Vec::new();
        let rows = self.db.unsettled_sessions("node-a").await.unwrap();
        for row in &rows {
            if row.session.status != SessionStatus::Running {
                out.push(format!("{} is {:?}, not settled", row.session.id, row.session.status));
            }
        }
        let known: Vec<_> = rows.iter().map(|row| row.session.id.clone()).collect();
        for id in self.sim.session_ids().iter().filter(|id| !known.contains(id)) {
            out.push(format!("session {id} is left on the host"));
        }
        for id in known.iter().filter(|id| !self.sim.running().contains(id)) {
            out.push(format!("session {id} is recorded as running and does not run"));
        }
        for row in rows.iter().filter(|row| row.session.status == SessionStatus::Running) {
            let (id, paused) = (&row.session.id, row.session.paused_at.is_some());
            if self.sim.frozen().contains(id) != paused {
                out.push(format!("session {id} is recorded as paused: {paused}, and is the other"));
            }
        }
        let snapshots = self.db.snapshots_on("node-a").await.unwrap();
        let kept: Vec<String> = snapshots.iter().map(|s| s.snapshot.id.to_string()).collect();
        for name in self.sim.snapshot_names().iter().filter(|name| !kept.contains(name)) {
            out.push(format!("snapshot {name} is left on the host"));
        }
        for name in kept.iter().filter(|name| !self.sim.snapshot_names().contains(name)) {
            out.push(format!("snapshot {name} is recorded and has no data"));
        }
        for row in self.db.sandboxes_being_deleted().await.unwrap() {
            out.push(format!("sandbox {} is not deleted", row.sandbox.name));
        }
        for id in self.db.settled_with_open_commands().await.unwrap() {
            out.push(format!("session {id} has ended and has open commands"));
        }
        let drives = self.db.drives_on("node-a").await.unwrap();
        for row in drives.iter().filter(|row| row.state != bivouac_store::DriveState::Ready) {
            out.push(format!("drive {} is {:?}", row.drive.name, row.state));
        }
        let made: Vec<String> = drives.iter().map(|row| row.drive.id.to_string()).collect();
        for name in self.sim.drive_names().iter().filter(|name| !made.contains(name)) {
            out.push(format!("drive {name} is left on the host"));
        }
        for name in made.iter().filter(|name| !self.sim.drive_names().contains(name)) {
            out.push(format!("drive {name} is recorded and has no data"));
        }
        for row in self.db.unsettled_mounts().await.unwrap() {
            out.push(format!("the mount {} of {} is {:?}", row.path, row.session_id, row.state));
        }
        for row in &drives {
            for mount in self.db.mounts_of_drive(&row.drive.id).await.unwrap() {
                if !self.sim.mounts_of(&mount.session_id).contains(&mount.path) {
                    out.push(format!("{} is recorded as mounted and is not", mount.path));
                }
                let writes = mount.mode == bivouac_types::drive::DriveMode::ReadWrite;
                if writes && row.drive.writer.as_ref() != Some(&mount.session_id) {
                    out.push(format!("drive {} has two writers", row.drive.name));
                }
            }
            if let Some(writer) = &row.drive.writer
                && !known.contains(writer)
            {
                out.push(format!("drive {} is held by a session that has ended", row.drive.name));
            }
        }
        let ended = |view: &&String| !known.iter().any(|id| view.starts_with(id.as_str()));
        for view in self.sim.view_names().iter().filter(ended) {
            out.push(format!("the private copy {view} is left on the host"));
        }
        let logs = self.sim.sessions_with_logs();
        for id in logs {
            if self.db.session(&id).await.unwrap().is_none() {
                out.push(format!("logs of session {id} are left on the host"));
            }
        }
        out
    }
}

/// Asks until there is an answer; for what happens in another task.
async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, ask: impl Fn() -> F) -> T {
    for _ in 0..2_000 {
        if let Some(found) = ask().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("not in time: {what}");
}

/// The search for leftovers finds what is planted.
#[tokio::test]
async fn the_check_finds_planted_leftovers() {
    let bed = Bed::new().await;
    bed.check().await;
    let stranger = SessionId::new(1, [9; 10]);
    bed.sim.plant_session(&stranger);
    bed.sim.plant_snapshot("snap_00000000000000000000000009");
    assert_eq!(bed.problems().await.len(), 2);
    // And a new engine removes it.
    let bed = bed.restart().await;
    bed.check().await;
    assert!(bed.sim.session_ids().is_empty());
}
