//! A runtime without a kernel: sessions, commands and snapshots as values, for tests of the engine.
//!
//! Invariant: what it keeps ([`World`]) survives the engine, as a host does, so a test can drop an
//! engine at any point and open another one on the same world. A "file system" is a set of names;
//! commands are a few words: `true`, `false`, `exit N`, `echo WORD…`, `touch NAME`, `rm NAME`, `test NAME`
//! (0 when it exists) and `sleep`, which runs until it is signalled or the session ends. On a terminal
//! `sh` says again what it reads. Doors are real sockets: see `doors`.

mod archives;
mod doors;
mod drives;
mod handle;
mod holdings;
mod programs;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use bivouac_types::command::{CommandEnd, EndReason};
use bivouac_types::id::{CommandId, SessionId};
use bivouac_types::meter::Times;
use bytes::Bytes;
use tokio::sync::{mpsc, watch};

use self::handle::SimHandle;
use crate::image::UNIVERSAL;
use crate::{
    DiskLevel, Handle, Image, LaunchSpec, LogRecord, Progress, Runtime, RuntimeError, SnapshotStat,
    Space, TtySize,
};

/// The state of a simulated host.
#[derive(Debug, Default)]
pub struct World {
    sessions: BTreeMap<SessionId, SimSession>,
    snapshots: BTreeMap<String, BTreeSet<String>>,
    logs: BTreeMap<(SessionId, CommandId), watch::Sender<Log>>,
    /// Launches so far.
    launches: usize,
    fail_launches: usize,
    fail_snapshots: usize,
    fail_removes: usize,
    /// Snapshots that were taken of a session whose programs could write.
    torn_snapshots: usize,
    flushes: usize,
    walks: usize,
    /// Versions of the universal image that were built.
    universal: u32,
    /// Images that are kept from being removed.
    kept: BTreeSet<String>,
    drives: drives::SimDrives,
    /// What the egress brokers got and wrote, by session.
    egress: BTreeMap<SessionId, Egress>,
    broker: Broker,
    doors: doors::SimDoors,
}

/// A test's broker: message in, answer out.
type AnswerWith = Arc<dyn Fn(&[u8]) -> Vec<u8> + Send + Sync>;

/// What a test has the egress brokers answer.
struct Broker(AnswerWith);

impl Default for Broker {
    fn default() -> Self {
        Self(Arc::new(|_| br#"{"type":"done","cut":0}"#.to_vec()))
    }
}

impl std::fmt::Debug for Broker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Broker")
    }
}

/// The egress broker of a session, as far as others see it.
#[derive(Default)]
struct Egress {
    /// The launch's configuration, then each message.
    sent: Vec<Bytes>,
    /// Unasked messages that nobody has taken yet.
    unheard: Vec<Bytes>,
    /// The handle that listens.
    listener: Option<mpsc::Sender<Bytes>>,
    audit: Vec<u8>,
}

impl std::fmt::Debug for Egress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // No message: they hold secrets.
        f.debug_struct("Egress").field("sent", &self.sent.len()).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct SimSession {
    files: BTreeSet<String>,
    alive: watch::Sender<bool>,
    gone: watch::Sender<bool>,
    frozen: watch::Sender<bool>,
    id_range: u32,
    /// A file takes a byte, and stays charged when it is removed, as one does that a snapshot keeps.
    disk: DiskLevel,
    /// How often its limit was set anew.
    fits: usize,
}

/// A log is its records; an offset is a count of records.
#[derive(Debug, Default, Clone)]
struct Log {
    records: Vec<LogRecord>,
    progress: Progress,
    stdin: u64,
    stdin_open: bool,
    /// Size of its terminal, if it has one.
    tty: Option<TtySize>,
}

impl Log {
    fn push(&mut self, record: LogRecord) {
        if let LogRecord::End(end) = &record {
            self.progress.end = Some(end.clone());
        }
        self.records.push(record);
        self.progress.log_bytes = self.records.len() as u64;
    }
}

/// A simulated host. Clones are the same host.
#[derive(Debug, Clone, Default)]
pub struct Sim(Arc<Mutex<World>>);

impl Sim {
    /// An empty host with the images `host` and `other`.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Builds the universal image, or a newer version of it.
    pub fn build_universal(&self) {
        self.world().universal += 1;
    }

    /// References of the images that are kept from being removed.
    #[must_use]
    pub fn kept(&self) -> Vec<String> {
        self.world().kept.iter().cloned().collect()
    }

    /// Makes the next `count` launches fail.
    pub fn fail_launches(&self, count: usize) {
        self.world().fail_launches = count;
    }

    /// Makes the next `count` snapshots fail.
    pub fn fail_snapshots(&self, count: usize) {
        self.world().fail_snapshots = count;
    }

    /// Makes the next `count` removals of a session fail.
    pub fn fail_removes(&self, count: usize) {
        self.world().fail_removes = count;
    }

    /// How many snapshots were taken of a session that ran and did not stand still.
    #[must_use]
    pub fn torn_snapshots(&self) -> usize {
        self.world().torn_snapshots
    }

    /// How often a flush was asked for.
    #[must_use]
    pub fn flushes(&self) -> usize {
        self.world().flushes
    }

    /// How often the size of a snapshot was asked for.
    #[must_use]
    pub fn walks(&self) -> usize {
        self.world().walks
    }

    /// Sessions that stand still.
    #[must_use]
    pub fn frozen(&self) -> Vec<SessionId> {
        let world = self.world();
        let frozen = world.sessions.iter().filter(|(_, s)| *s.frozen.borrow());
        frozen.map(|(id, _)| id.clone()).collect()
    }

    /// How many launches were asked for.
    #[must_use]
    pub fn launches(&self) -> usize {
        self.world().launches
    }

    /// Ends a session as if its shim had died: open commands get no end.
    pub fn crash_session(&self, id: &SessionId) {
        self.crash_after(id, None);
    }

    /// As [`Sim::crash_session`], after the shim has written the end of a command into its log and
    /// before it could tell anybody.
    pub fn crash_after(&self, id: &SessionId, written: Option<(&CommandId, i32)>) {
        let mut world = self.world();
        if let Some(session) = world.sessions.get(id) {
            session.alive.send_replace(false);
            session.gone.send_replace(true);
            session.frozen.send_replace(false);
        }
        // A shim that died drops its channels: the log on disk stays.
        let dead: Vec<_> = world.logs.keys().filter(|(s, _)| s == id).cloned().collect();
        for key in dead {
            if let Some(old) = world.logs.remove(&key) {
                let mut log = old.borrow().clone();
                if let Some((command, code)) = written
                    && *command == key.1
                {
                    log.push(end(code, None));
                }
                world.logs.insert(key, watch::Sender::new(log));
            }
        }
    }

    /// Deletes the data of a snapshot behind the engine's back.
    pub fn lose_snapshot(&self, name: &str) {
        self.world().snapshots.remove(name);
    }

    /// Sessions of which something is left.
    #[must_use]
    pub fn session_ids(&self) -> Vec<SessionId> {
        self.world().sessions.keys().cloned().collect()
    }

    /// Sessions that run.
    #[must_use]
    pub fn running(&self) -> Vec<SessionId> {
        let world = self.world();
        let alive = world.sessions.iter().filter(|(_, s)| *s.alive.borrow());
        alive.map(|(id, _)| id.clone()).collect()
    }

    /// Names of snapshots whose data is there.
    #[must_use]
    pub fn snapshot_names(&self) -> Vec<String> {
        self.world().snapshots.keys().cloned().collect()
    }

    /// How often the disk limit of a session was set anew.
    #[must_use]
    pub fn fits(&self, id: &SessionId) -> usize {
        self.world().sessions.get(id).map_or(0, |session| session.fits)
    }

    /// Sessions that have logs.
    #[must_use]
    pub fn sessions_with_logs(&self) -> BTreeSet<SessionId> {
        self.world().logs.keys().map(|(session, _)| session.clone()).collect()
    }

    /// Makes a session that no engine knows: what a search for leftovers must find.
    pub fn plant_session(&self, id: &SessionId) {
        let session = SimSession {
            files: BTreeSet::new(),
            alive: watch::Sender::new(true),
            gone: watch::Sender::new(false),
            frozen: watch::Sender::new(false),
            id_range: u32::MAX,
            disk: DiskLevel::default(),
            fits: 0,
        };
        self.world().sessions.insert(id.clone(), session);
    }

    /// Makes the data of a snapshot that no engine knows.
    pub fn plant_snapshot(&self, name: &str) {
        self.world().snapshots.insert(name.to_owned(), BTreeSet::new());
    }

    /// What the egress broker of a session got: the launch's configuration, then each message.
    #[must_use]
    pub fn egress_sent(&self, id: &SessionId) -> Vec<Bytes> {
        self.world().egress.get(id).map(|egress| egress.sent.clone()).unwrap_or_default()
    }

    /// Has the egress brokers answer messages so, instead of with "done".
    pub fn egress_answer(&self, answer: impl Fn(&[u8]) -> Vec<u8> + Send + Sync + 'static) {
        self.world().broker = Broker(Arc::new(answer));
    }

    /// Has the egress broker of a session say something unasked. It is kept until a handle listens.
    pub fn egress_event(&self, id: &SessionId, message: Bytes) {
        let mut world = self.world();
        let egress = world.egress.entry(id.clone()).or_default();
        match egress.listener.as_ref().map(|listener| listener.try_send(message.clone())) {
            Some(Ok(())) => {}
            _ => egress.unheard.push(message),
        }
    }

    /// Appends an audit line, with its line end, as the broker of a session does.
    pub fn audit_append(&self, id: &SessionId, line: &[u8]) {
        self.world().egress.entry(id.clone()).or_default().audit.extend_from_slice(line);
    }

    fn handle(&self, id: &SessionId) -> Arc<dyn Handle> {
        let heard = AtomicBool::new(false);
        Arc::new(SimHandle { sim: self.clone(), id: id.clone(), heard })
    }
}

fn broken(what: &str) -> RuntimeError {
    let source = std::io::Error::other("a test asked for it");
    RuntimeError::Io { what: what.to_owned(), source }
}

fn sim_universal(version: u32) -> Image {
    let digest = format!("sim:{version}");
    let reference = format!("{UNIVERSAL}@{digest}");
    Image {
        name: UNIVERSAL.to_owned(),
        reference,
        digest,
        replayable: true,
        config: Default::default(),
    }
}

fn sim_image(name: &str) -> Image {
    let digest = format!("sim:{name}");
    Image {
        name: name.to_owned(),
        reference: name.to_owned(),
        digest,
        replayable: false,
        config: Default::default(),
    }
}

#[async_trait]
impl Runtime for Sim {
    async fn launch(&self, spec: &LaunchSpec) -> Result<Arc<dyn Handle>, RuntimeError> {
        // Lets other tasks in, as a real launch does.
        tokio::task::yield_now().await;
        let mut world = self.world();
        world.launches += 1;
        if spec.image.contains('@') {
            world.kept.insert(spec.image.clone());
        }
        if world.fail_launches > 0 {
            world.fail_launches -= 1;
            return Err(RuntimeError::Launch {
                session: spec.session.clone(),
                step: "simulated".to_owned(),
                message: "a test asked for it".to_owned(),
            });
        }
        let mut files = match &spec.from_snapshot {
            Some(name) => match world.snapshots.get(name) {
                Some(files) => files.clone(),
                None => return Err(RuntimeError::NoSnapshot(name.clone())),
            },
            None => BTreeSet::new(),
        };
        if spec.fresh {
            files.retain(|file| !file.starts_with("/etc/ssh/ssh_host_"));
        }
        let in_use = world.sessions.values().any(|s| s.id_range == spec.id_range);
        if in_use || world.sessions.contains_key(&spec.session) {
            return Err(broken("reserve an id range and a session that are in use"));
        }
        let held = files.len() as u64;
        let session = SimSession {
            files,
            alive: watch::Sender::new(true),
            gone: watch::Sender::new(false),
            frozen: watch::Sender::new(false),
            id_range: spec.id_range,
            disk: DiskLevel { charged: 0, limit: spec.limits.disk_bytes.saturating_sub(held) },
            fits: 0,
        };
        for mount in &spec.mounts {
            world.drives.mount(&spec.session, mount)?;
        }
        world.sessions.insert(spec.session.clone(), session);
        let config = spec.egress.iter().map(|config| config.expose().as_bytes().to_vec().into());
        let egress = Egress { sent: config.collect(), ..Egress::default() };
        world.egress.insert(spec.session.clone(), egress);
        drop(world);
        Ok(self.handle(&spec.session))
    }

    async fn adopt(&self, session: &SessionId) -> Result<Option<Arc<dyn Handle>>, RuntimeError> {
        let world = self.world();
        let alive = world.sessions.get(session).is_some_and(|s| *s.alive.borrow());
        Ok(alive.then(|| self.handle(session)))
    }

    async fn list(&self) -> Result<Vec<SessionId>, RuntimeError> {
        Ok(self.session_ids())
    }

    async fn remove(&self, session: &SessionId) -> Result<(), RuntimeError> {
        let mut world = self.world();
        if world.fail_removes > 0 {
            world.fail_removes -= 1;
            return Err(broken("remove a session"));
        }
        world.drives.forget(session);
        if let Some(session) = world.sessions.remove(session) {
            session.alive.send_replace(false);
            session.gone.send_replace(true);
        }
        Ok(())
    }

    async fn remove_logs(&self, session: &SessionId) -> Result<(), RuntimeError> {
        let mut world = self.world();
        world.logs.retain(|(of, _), _| of != session);
        world.egress.remove(session);
        Ok(())
    }

    async fn keep(&self, session: &SessionId, name: &str) -> Result<(), RuntimeError> {
        let mut world = self.world();
        if world.fail_snapshots > 0 {
            world.fail_snapshots -= 1;
            return Err(broken("take a snapshot"));
        }
        if world.snapshots.contains_key(name) {
            return Ok(());
        }
        let Some(found) = world.sessions.get(session) else {
            return Err(RuntimeError::Gone(session.clone()));
        };
        let (files, alive) = (found.files.clone(), *found.alive.borrow());
        let torn = alive && !*found.frozen.borrow();
        world.torn_snapshots += usize::from(torn);
        world.snapshots.insert(name.to_owned(), files);
        Ok(())
    }

    async fn measure(&self, name: &str) -> Result<SnapshotStat, RuntimeError> {
        let mut world = self.world();
        world.walks += 1;
        let files = world.snapshots.get(name);
        let bytes = files.map(|files| files.len() as u64);
        let bytes = bytes.ok_or_else(|| RuntimeError::NoSnapshot(name.to_owned()))?;
        Ok(SnapshotStat { bytes })
    }

    async fn flush(&self) -> Result<(), RuntimeError> {
        self.world().flushes += 1;
        Ok(())
    }

    async fn snapshots(&self) -> Result<Vec<String>, RuntimeError> {
        Ok(self.snapshot_names())
    }

    async fn remove_snapshot(&self, name: &str) -> Result<(), RuntimeError> {
        self.world().snapshots.remove(name);
        Ok(())
    }

    async fn image(&self, name: &str) -> Result<Image, RuntimeError> {
        if matches!(name, "host" | "other") {
            return Ok(sim_image(name));
        }
        let newest = self.world().universal;
        let version = match name.split_once("@sim:") {
            None if name == UNIVERSAL => newest,
            Some((UNIVERSAL, version)) => version.parse().unwrap_or(0),
            _ => 0,
        };
        if (1..=newest).contains(&version) {
            return Ok(sim_universal(version));
        }
        Err(RuntimeError::NoImage(format!("There is no image '{name}' on this host.")))
    }

    async fn images(&self) -> Result<Vec<Image>, RuntimeError> {
        let mut all = vec![sim_image("host"), sim_image("other")];
        let newest = self.world().universal;
        all.extend((newest > 0).then(|| sim_universal(newest)));
        Ok(all)
    }

    async fn kept_images(&self) -> Result<(u64, Vec<String>), RuntimeError> {
        let world = self.world();
        let mark = u64::try_from(world.launches).unwrap_or(u64::MAX);
        Ok((mark, world.kept.iter().cloned().collect()))
    }

    async fn release_images(&self, mark: u64, unused: &[String]) -> Result<(), RuntimeError> {
        let mut world = self.world();
        if u64::try_from(world.launches).is_ok_and(|launches| launches == mark) {
            world.kept.retain(|reference| !unused.contains(reference));
        }
        Ok(())
    }

    async fn read_log(
        &self,
        session: &SessionId,
        command: &CommandId,
        from: u64,
        until: u64,
    ) -> Result<(Vec<LogRecord>, u64), RuntimeError> {
        let world = self.world();
        let log = world
            .logs
            .get(&(session.clone(), command.clone()))
            .ok_or_else(|| RuntimeError::NoCommand(command.clone()))?
            .borrow();
        // Two records at a time, so that readers have to come back.
        let until = until.min(from + 2).min(log.records.len() as u64);
        let (from, until) = (from as usize, until as usize);
        let records = log.records.get(from..until).unwrap_or_default().to_vec();
        Ok((records, until as u64))
    }

    async fn log_progress(
        &self,
        session: &SessionId,
        command: &CommandId,
    ) -> Result<Progress, RuntimeError> {
        let world = self.world();
        let log = world.logs.get(&(session.clone(), command.clone()));
        Ok(log.map(|log| log.borrow().progress.clone()).unwrap_or_default())
    }

    async fn read_audit(
        &self,
        session: &SessionId,
        from: u64,
    ) -> Result<(Vec<u8>, u64), RuntimeError> {
        let world = self.world();
        let all = world.egress.get(session).map(|egress| egress.audit.as_slice());
        let at = usize::try_from(from).unwrap_or(usize::MAX);
        let rest = all.and_then(|all| all.get(at..)).unwrap_or_default();
        Ok((rest.to_vec(), from + rest.len() as u64))
    }

    async fn admit(&self) -> Result<(), RuntimeError> {
        Ok(())
    }

    async fn space(&self) -> Result<Option<Space>, RuntimeError> {
        let used = self.world().snapshots.values().map(|files| files.len() as u64).sum();
        Ok(Some(Space { used, free: 1 << 40 }))
    }

    fn launch_times(&self) -> Vec<(String, Times)> {
        let count = self.world().launches as u64;
        let mut times = Times::default();
        times.buckets[0] = count;
        vec![("simulated".to_owned(), times)]
    }
}

fn end(exit_code: i32, reason: Option<EndReason>) -> LogRecord {
    LogRecord::End(CommandEnd { exit_code: Some(exit_code), duration_ms: 1, reason })
}
