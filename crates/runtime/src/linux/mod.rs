//! The runtime on Linux namespaces: serve's side.
//!
//! Owns the pool, the images, the two zygotes, the engine's control groups and its folder of sockets.
//! Invariant: of each session known here there is a control group, a subvolume and a socket, all named
//! by its id, so that what a crash left can be found and removed without a database. Called by the
//! engine through [`Runtime`].

mod archives;
pub mod cgroup;
pub(crate) mod confine;
mod disk;
pub(crate) mod doors;
mod drives;
pub(crate) mod handle;
pub mod idmap;
pub(crate) mod launch;
pub(crate) mod netns;
pub(crate) mod overlay;
pub(crate) mod rootfs;
pub(crate) mod steer;
mod swap;
mod times;
mod traffic;
pub(crate) mod trust;
pub(crate) mod view;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bivouac_types::id::{CommandId, SessionId};
use bivouac_types::meter::Times;

use self::cgroup::Hierarchies;
use self::handle::LinuxHandle;
use self::idmap::IdRange;
use self::times::StepTimes;
use self::view::ViewPlan;
use crate::fault::{Armed, Point};
use crate::image::host::HostImage;
use crate::image::mounts::ImageMounts;
use crate::image::{HOST, ImageFolder, Manifest, UNIVERSAL};
use crate::log;
use crate::pool::{self, Kind, Pool, PoolOptions, Storage};
use crate::proto::{
    self, Channel, Frame, FromShim, InitZygoteStart, LaunchPlan, Layer, ShimSecrets, ShimStart,
};
use crate::spare::SparePlan;
use crate::zygote::{INIT_ZYGOTE, SHIM_ZYGOTE};
use crate::{
    Handle, Image, LaunchSpec, LogRecord, Progress, Runtime, RuntimeError, SnapshotStat, Space,
};

/// Most bytes of command logs that a session may keep.
const LOG_CAP: u64 = 1 << 30;
/// About how many bytes of records one read of a log answers.
const READ_BUDGET: usize = 256 << 10;

/// Most bytes of a log that are read where the question is asked.
const READ_HERE: u64 = 16 << 10;

/// How this host can steer what sandboxes send, in words. Needs root; leaves nothing behind.
///
/// # Errors
/// A sentence that says what is missing.
pub fn steering() -> io::Result<&'static str> {
    steer::probe().map(steer::Way::in_words)
}

/// Where the runtime keeps its things.
#[derive(Debug, Clone)]
pub struct LinuxConfig {
    /// The engine's data folder, 0700.
    pub data_dir: PathBuf,
    /// Folder of image files, shared by engines.
    pub images_dir: PathBuf,
    /// A short name of this data folder, unique on the host and stable: names control groups and the
    /// folder of sockets.
    pub instance: String,
    /// How volumes are kept.
    pub pool: PoolOptions,
}

/// See the module.
pub struct LinuxRuntime {
    pool: Arc<Pool>,
    /// How this kernel takes the layers of an overlay.
    way: overlay::Way,
    /// How this kernel steers what sandboxes send to their gates.
    capture: steer::Way,
    hierarchies: Hierarchies,
    cgroup: String,
    run_dir: PathBuf,
    /// File that takes what zygotes and shims write to standard error.
    shim_log: PathBuf,
    host: HostImage,
    images: Arc<ImageMounts>,
    data_dir: PathBuf,
    view: ViewPlan,
    zygotes: tokio::sync::Mutex<Arc<Zygotes>>,
    fault: Option<Armed>,
    /// Of the newest launch.
    steps: Mutex<proto::Steps>,
    /// Of all launches.
    times: StepTimes,
}

/// The two zygotes, which end when their sockets close, and the server of the view.
struct Zygotes {
    shim: Channel,
    /// No more frames than the first one: its end tells the zygote to end.
    init: OwnedFd,
    view: ViewPlan,
    /// All are running.
    alive: Arc<AtomicBool>,
}

impl std::fmt::Debug for LinuxRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinuxRuntime").field("cgroup", &self.cgroup).finish_non_exhaustive()
    }
}

fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> RuntimeError {
    let what = what.into();
    move |source| RuntimeError::Io { what, source }
}

async fn blocking<T: Send + 'static>(
    what: impl Into<String>,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, RuntimeError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(io_error(what))
}

impl LinuxRuntime {
    /// Mounts the pool, finds or builds the `host` image, starts the zygotes.
    ///
    /// # Errors
    /// What is missing on this host, and how to get it.
    pub async fn start(config: LinuxConfig) -> Result<Self, RuntimeError> {
        let data_dir = config.data_dir.clone();
        let prepared = blocking("start the runtime", move || prepare(&config)).await?;
        let Prepared {
            pool,
            way,
            capture,
            hierarchies,
            cgroup,
            run_dir,
            shim_log,
            host,
            images,
            view,
        } = prepared;
        let around = Around {
            run_dir: &run_dir,
            data_dir: &data_dir,
            log: &shim_log,
            hierarchies: &hierarchies,
            cgroup: &cgroup,
            capture,
            view: &view,
        };
        let zygotes = around.start_zygotes().map_err(io_error("start the zygotes"))?;
        Ok(Self {
            pool: Arc::new(pool),
            way,
            capture,
            hierarchies,
            cgroup,
            run_dir,
            shim_log,
            host,
            images: Arc::new(images),
            data_dir,
            view,
            zygotes: tokio::sync::Mutex::new(Arc::new(zygotes)),
            fault: Armed::from_env(),
            steps: Mutex::default(),
            times: StepTimes::default(),
        })
    }

    async fn close_pool(&self) -> Result<(), RuntimeError> {
        if !self.list().await?.is_empty() {
            return Ok(());
        }
        let (pool, hierarchies) = (self.pool.clone(), self.hierarchies.clone());
        let images = self.images.clone();
        let (cgroup, run_dir) = (self.cgroup.clone(), self.run_dir.clone());
        let zygotes = self.zygotes.lock().await.clone();
        blocking("close the pool", move || {
            // Its spares let go of their groups; it ends.
            let _ = rustix::net::shutdown(&zygotes.init, rustix::net::Shutdown::Write);
            hierarchies.wait_for_spares(&cgroup, || !zygotes.alive.load(Ordering::Acquire))?;
            let view = &zygotes.view;
            view.close(&cgroup);
            images.close()?;
            pool.close()?;
            hierarchies.remove_engine(&cgroup);
            let _ = std::fs::remove_file(run_dir.join("init"));
            let _ = std::fs::remove_file(run_dir.join(disk::SPACE));
            let _ = std::fs::remove_dir(&run_dir);
            // Shared by engines: goes with the last one.
            let _ = run_dir.parent().map(std::fs::remove_dir);
            Ok(())
        })
        .await
    }

    /// The steps that the shim of the newest launch went through, and how long each took, µs.
    #[must_use]
    pub fn launch_steps(&self) -> Vec<(String, u64)> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn socket(&self, session: &SessionId) -> PathBuf {
        self.run_dir.join(session.as_str())
    }

    /// The zygotes, new ones when one of them has died (the host's OOM killer may take anything).
    async fn zygotes(&self) -> Result<Arc<Zygotes>, RuntimeError> {
        let mut zygotes = self.zygotes.lock().await;
        if !zygotes.alive.load(Ordering::Acquire) {
            tracing::warn!("a zygote has died: starting new ones");
            let around = Around {
                run_dir: &self.run_dir,
                data_dir: &self.data_dir,
                log: &self.shim_log,
                hierarchies: &self.hierarchies,
                cgroup: &self.cgroup,
                capture: self.capture,
                view: &self.view,
            };
            let new = around.start_zygotes();
            *zygotes = Arc::new(new.map_err(io_error("start the zygotes"))?);
        }
        Ok(zygotes.clone())
    }

    async fn prepare_upper(&self, spec: &LaunchSpec, layers: usize) -> Result<(), RuntimeError> {
        if let Some(snapshot) = &spec.from_snapshot
            && !self.pool.has_snapshot(snapshot)
        {
            return Err(RuntimeError::NoSnapshot(snapshot.clone()));
        }
        let pool = self.pool.clone();
        let (session, from) = (spec.session.clone(), spec.from_snapshot.clone());
        let mounts = spec.mounts.clone();
        // What a snapshot holds was charged to the session that wrote it. A launch has to write a little.
        let limit = spec.limits.disk_bytes.saturating_sub(spec.snapshot_bytes).max(disk::TO_START);
        let owner = IdRange::of(spec.id_range).map_err(io_error("id range"))?.owner;
        let fault = self.fault.clone();
        blocking(format!("prepare session {session}"), move || {
            pool.make_session(session.as_str(), from.as_deref(), layers, limit)?;
            Armed::reach(fault.as_ref(), Point::Upper)?;
            drives::prepare(&pool, &mounts)?;
            let logs = pool.logs(session.as_str());
            match std::fs::DirBuilder::new().mode(0o700).create(&logs) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                other => other?,
            }
            std::os::unix::fs::chown(&logs, Some(owner), Some(owner))?;
            Armed::reach(fault.as_ref(), Point::Logs)
        })
        .await
    }

    /// Takes back from a session that starts with a full disk what it was given to start with.
    fn bound_full_disk(&self, spec: &LaunchSpec) -> Result<(), RuntimeError> {
        if spec.limits.disk_bytes.saturating_sub(spec.snapshot_bytes) >= disk::TO_START {
            return Ok(());
        }
        let name = spec.session.as_str();
        let (bytes, written) = (spec.limits.disk_bytes, spec.snapshot_bytes);
        self.pool
            .set_limit(Kind::Session, name, bytes, written)
            .map_err(io_error(format!("set the disk limit of {name}")))
    }

    fn host_image(&self) -> Image {
        let digest = self.host.digest.clone();
        let (name, reference) = (HOST.to_owned(), HOST.to_owned());
        Image { name, reference, digest, replayable: false, config: Default::default() }
    }

    /// The layers of an image, mounted.
    async fn layers(&self, image: &str) -> Result<Vec<Layer>, RuntimeError> {
        if image == HOST {
            return Ok(self.host.layers.clone());
        }
        let tree = match self.images.mounted_tree(image) {
            Some(tree) => tree,
            None => {
                let (images, reference) = (self.images.clone(), image.to_owned());
                let tree = blocking("cannot use the image", move || images.tree(&reference)).await;
                let tree = tree.map_err(|e| RuntimeError::NoImage(e.to_string()))?;
                tree.ok_or_else(|| no_image(image))?
            }
        };
        Ok(vec![Layer { lower: tree.to_string_lossy().into_owned(), at: "/".to_owned() }])
    }

    async fn start_shim(
        &self,
        spec: &LaunchSpec,
        layers: Vec<Layer>,
    ) -> Result<Arc<dyn Handle>, RuntimeError> {
        let failed = |step: &str, message: String| RuntimeError::Launch {
            session: spec.session.clone(),
            step: step.to_owned(),
            message,
        };
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let zygotes = self.zygotes().await?;
        let plan = LaunchPlan {
            upper: text(&self.pool.session(spec.session.as_str())),
            layers,
            way: self.way,
            capture: self.capture,
            logs: text(&self.pool.logs(spec.session.as_str())),
            drives: drives::planned(&self.pool, &spec.mounts),
            trust: text(&self.pool.trust()),
            log_cap: LOG_CAP,
            socket: text(&self.socket(&spec.session)),
            init_zygote: text(&self.run_dir.join("init")),
            cgroup: self.cgroup.clone(),
            hierarchies: self.hierarchies.clone(),
            view: zygotes.view.clone(),
            disk: disk::plan(&self.pool, &spec.session, &self.run_dir),
            machine_id: machine_id(&spec.session),
            fault: self.fault.clone(),
            log_debug: tracing::enabled!(target: "bivouac_shim", tracing::Level::DEBUG),
        };
        let (ours, theirs) = proto::pair().map_err(|e| failed("shim", e.to_string()))?;
        let start = ShimStart { spec: spec.clone(), plan, egress: spec.egress.is_some() };
        let sent = zygotes.shim.send(&start, &[], &[theirs.as_fd()]).await;
        sent.map_err(|e| failed("shim", format!("the shim zygote is gone: {e}")))?;
        drop(theirs);
        let channel = Channel::new(ours).map_err(|e| failed("shim", e.to_string()))?;
        if let Some(config) = &spec.egress {
            // A shim that could not be started does not read it; it says why all the same.
            let _ = channel.send(&ShimSecrets {}, config.expose().as_bytes(), &[]).await;
        }
        let mut assembler = handle::assembler();
        let first = channel.receive(&mut assembler).await;
        match first.map_err(|e| failed("shim", e.to_string()))? {
            Some(Frame { message: FromShim::Launched(Ok(steps)), .. }) => {
                self.times.add(&steps);
                let mut last = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
                *last = steps;
            }
            Some(Frame { message: FromShim::Launched(Err(e)), .. }) => {
                return Err(failed(&e.step, e.message));
            }
            Some(_) => return Err(failed("shim", "an unexpected frame".into())),
            None => return Err(failed("shim", "the shim died during the launch".into())),
        }
        Armed::reach(self.fault.as_ref(), Point::Launched)
            .map_err(|e| failed(Point::Launched.name(), e.to_string()))?;
        let greeting = handle::hello(&channel, &mut assembler).await;
        let greeting = greeting.map_err(|e| failed("shim", e.to_string()))?;
        Ok(self.handle(&spec.session, channel, assembler, greeting))
    }

    fn handle(
        &self,
        session: &SessionId,
        channel: Channel,
        assembler: proto::Assembler,
        greeting: handle::Greeting,
    ) -> Arc<dyn Handle> {
        let groups = self.hierarchies.session(&self.cgroup, session.as_str());
        let pool = self.pool.clone();
        LinuxHandle::new(session.clone(), groups, channel, assembler, greeting, pool)
    }
}

fn built(manifest: Manifest) -> Image {
    let reference = manifest.reference();
    let config = manifest.oci.map(|origin| origin.config).unwrap_or_default();
    Image { name: manifest.name, reference, digest: manifest.digest, replayable: true, config }
}

fn no_image(name: &str) -> RuntimeError {
    let plain = bivouac_types::image::plain(name);
    RuntimeError::NoImage(if plain != name {
        format!("This version of the image '{plain}' is not on this machine any more: {name}")
    } else if name == UNIVERSAL {
        format!(
            "The image '{UNIVERSAL}' is not built on this machine: run `bivouac image build {UNIVERSAL}`"
        )
    } else {
        format!("There is no image '{name}' on this machine")
    })
}

struct Prepared {
    pool: Pool,
    way: overlay::Way,
    capture: steer::Way,
    hierarchies: Hierarchies,
    cgroup: String,
    run_dir: PathBuf,
    shim_log: PathBuf,
    host: HostImage,
    images: ImageMounts,
    view: ViewPlan,
}

fn prepare(config: &LinuxConfig) -> io::Result<Prepared> {
    let hierarchies = Hierarchies::detect()?;
    let cgroup = format!("bivouac-{}", config.instance);
    hierarchies.make_engine(&cgroup)?;
    let pool = Pool::open(&config.data_dir, &config.pool)?;
    let way = overlay::probe(&pool.images().join("probe.new"))?;
    let capture = steer::probe()?;
    tracing::info!("connections of sandboxes are steered {}", capture.in_words());
    let host = HostImage::ensure(&pool.images())?;
    let images = ImageMounts::open(&config.images_dir, &config.data_dir, &config.instance)?;
    let run_dir = Path::new("/run/bivouac").join(&config.instance);
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&run_dir)?;
    disk::tell(&run_dir, &pool)?;
    let shim_log = config.data_dir.join("shims.log");
    let view = ViewPlan::detect(&cgroup)?;
    Ok(Prepared { pool, way, capture, hierarchies, cgroup, run_dir, shim_log, host, images, view })
}

/// What the zygotes are started with.
struct Around<'a> {
    run_dir: &'a Path,
    data_dir: &'a Path,
    log: &'a Path,
    hierarchies: &'a Hierarchies,
    cgroup: &'a str,
    capture: steer::Way,
    view: &'a ViewPlan,
}

impl Around<'_> {
    fn start_zygotes(&self) -> io::Result<Zygotes> {
        let init_socket = self.run_dir.join("init");
        match std::fs::remove_file(&init_socket) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let listener = std::os::unix::net::UnixListener::bind(&init_socket)?;
        let alive = Arc::new(AtomicBool::new(true));
        let (init, pid) = start_zygote(INIT_ZYGOTE, self.log, alive.clone())?;
        // Before it serves: inits are born in its groups.
        self.view.house(self.cgroup, pid)?;
        let spares = SparePlan {
            hierarchies: self.hierarchies.clone(),
            cgroup: self.cgroup.to_owned(),
            capture: self.capture,
        };
        let start = InitZygoteStart { spares: Some(spares) };
        proto::send(&init, &start, &[listener.as_fd()])?;
        let (shim, _) = start_zygote(SHIM_ZYGOTE, self.log, alive.clone())?;
        let files = self.start_view(&alive)?;
        let view = self.view.clone().with_files(files);
        Ok(Zygotes { shim: Channel::new(shim)?, init, view, alive })
    }

    /// Mounts a view and starts the process that serves it. It ends when the last sandbox with it has
    /// ended, by itself.
    fn start_view(&self, alive: &Arc<AtomicBool>) -> io::Result<Option<PathBuf>> {
        let Some((place, device)) = view::mount(self.data_dir)? else {
            tracing::warn!(
                "no FUSE on this host: sandboxes see its memory and CPUs, not their own"
            );
            return Ok(None);
        };
        let (control, _) = start_zygote(crate::view::ROLE, self.log, alive.clone())?;
        let start = crate::view::ViewStart {
            hierarchies: self.hierarchies.clone(),
            cgroup: self.cgroup.to_owned(),
        };
        proto::send(&control, &start, &[device.as_fd()])?;
        Ok(Some(place))
    }
}

/// Executes a zygote. It outlives serve, so it must hold nothing of serve's: no environment, no
/// terminal, and standard error into a file.
fn start_zygote(role: &str, log: &Path, alive: Arc<AtomicBool>) -> io::Result<(OwnedFd, u32)> {
    let (ours, theirs) = proto::pair()?;
    let log = std::fs::OpenOptions::new().append(true).create(true).open(log)?;
    let mut child = Command::new("/proc/self/exe")
        .arg0(role)
        .env_clear()
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::from(log))
        .spawn()?;
    let pid = child.id();
    // Reaps it, and notices, when it ends before serve does.
    std::thread::Builder::new().name(role.to_owned()).spawn(move || {
        let _ = child.wait();
        alive.store(false, Ordering::Release);
    })?;
    Ok((ours, pid))
}

/// A machine id of the session's own: 32 hexadecimal digits out of its id.
fn machine_id(session: &SessionId) -> String {
    let mut words = [0xcbf2_9ce4_8422_2325_u64, 0x9ae1_6a3b_2f90_404f];
    for byte in session.as_str().bytes() {
        for (index, word) in words.iter_mut().enumerate() {
            *word = (*word ^ (u64::from(byte) + index as u64)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    format!("{:016x}{:016x}", words[0], words[1])
}

#[async_trait]
impl Runtime for LinuxRuntime {
    async fn launch(&self, spec: &LaunchSpec) -> Result<Arc<dyn Handle>, RuntimeError> {
        let layers = self.layers(&spec.image).await?;
        let begun = std::time::Instant::now();
        let launched = async {
            self.prepare_upper(spec, layers.len()).await?;
            let handle = self.start_shim(spec, layers).await?;
            self.bound_full_disk(spec)?;
            Ok(handle)
        }
        .await;
        if launched.is_ok() {
            self.times.total(begun.elapsed());
        }
        if launched.is_err() {
            // The shim has undone its part; this is serve's, and what a killed shim left.
            self.remove(&spec.session).await?;
            self.remove_logs(&spec.session).await?;
        }
        launched
    }

    async fn adopt(&self, session: &SessionId) -> Result<Option<Arc<dyn Handle>>, RuntimeError> {
        let Ok(stream) = tokio::net::UnixStream::connect(self.socket(session)).await else {
            return Ok(None);
        };
        let what = || io_error(format!("adopt session {session}"));
        let stream = stream.into_std().map_err(what())?;
        let channel = Channel::new(stream.into()).map_err(what())?;
        let mut assembler = handle::assembler();
        let limit = std::time::Duration::from_secs(10);
        match tokio::time::timeout(limit, handle::hello(&channel, &mut assembler)).await {
            Ok(Ok(greeting)) => Ok(Some(self.handle(session, channel, assembler, greeting))),
            // Dying, stuck, or of another version: not alive as far as this engine can use it.
            Ok(Err(_)) | Err(_) => Ok(None),
        }
    }

    async fn list(&self) -> Result<Vec<SessionId>, RuntimeError> {
        let (pool, hierarchies) = (self.pool.clone(), self.hierarchies.clone());
        let (cgroup, run_dir) = (self.cgroup.clone(), self.run_dir.clone());
        blocking("list sessions", move || {
            let mut names = hierarchies.sessions(&cgroup)?;
            names.extend(pool.names(Kind::Session)?);
            let views = pool.names(Kind::View)?;
            names.extend(views.iter().filter_map(|v| Some(v.split_once('.')?.0.to_owned())));
            for entry in std::fs::read_dir(&run_dir)? {
                names.push(entry?.file_name().to_string_lossy().into_owned());
            }
            let mut ids: Vec<SessionId> =
                names.iter().filter_map(|name| SessionId::parse(name).ok()).collect();
            ids.sort();
            ids.dedup();
            Ok(ids)
        })
        .await
    }

    async fn remove(&self, session: &SessionId) -> Result<(), RuntimeError> {
        let pool = self.pool.clone();
        let groups = self.hierarchies.session(&self.cgroup, session.as_str());
        let (session, socket) = (session.clone(), self.socket(session));
        blocking(format!("remove session {session}"), move || {
            // The shim first: it could otherwise still be about to make what is removed here.
            groups.remove_shim()?;
            groups.remove()?;
            match std::fs::remove_file(&socket) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            drives::remove_views(&pool, session.as_str())?;
            pool.remove_session(session.as_str())
        })
        .await
    }

    async fn remove_logs(&self, session: &SessionId) -> Result<(), RuntimeError> {
        let logs = self.pool.logs(session.as_str());
        blocking(format!("remove the logs of {session}"), move || {
            match std::fs::remove_dir_all(&logs) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            }
        })
        .await
    }

    async fn keep(&self, session: &SessionId, name: &str) -> Result<(), RuntimeError> {
        let pool = self.pool.clone();
        let (session, name) = (session.clone(), name.to_owned());
        let what = format!("snapshot session {session}");
        blocking(what, move || pool.snapshot(session.as_str(), &name)).await
    }

    async fn measure(&self, name: &str) -> Result<SnapshotStat, RuntimeError> {
        let (pool, wanted) = (self.pool.clone(), name.to_owned());
        let walk = move || Ok(SnapshotStat { bytes: pool.snapshot_bytes(&wanted)? });
        blocking(format!("measure snapshot {name}"), walk).await
    }

    async fn flush(&self) -> Result<(), RuntimeError> {
        let pool = self.pool.clone();
        blocking("flush the pool", move || pool.flush()).await
    }

    async fn snapshots(&self) -> Result<Vec<String>, RuntimeError> {
        let pool = self.pool.clone();
        blocking("list snapshots", move || pool.names(Kind::Snapshot)).await
    }

    async fn remove_snapshot(&self, name: &str) -> Result<(), RuntimeError> {
        let pool = self.pool.clone();
        let name = name.to_owned();
        blocking(format!("remove snapshot {name}"), move || pool.remove_snapshot(&name)).await
    }

    async fn image(&self, name: &str) -> Result<Image, RuntimeError> {
        if name == HOST {
            return Ok(self.host_image());
        }
        // A look at two files that the kernel has in memory.
        match self.images.find(name) {
            Ok(Some(manifest)) => Ok(built(manifest)),
            Ok(None) => Err(no_image(name)),
            Err(error) => Err(RuntimeError::NoImage(error.to_string())),
        }
    }

    async fn images(&self) -> Result<Vec<Image>, RuntimeError> {
        let listed = self.images.list().map_err(io_error("list the images"))?;
        // The newest of each name comes first.
        let mut seen = std::collections::BTreeSet::new();
        let mut all: Vec<Image> =
            listed.into_iter().filter(|one| seen.insert(one.name.clone())).map(built).collect();
        all.push(self.host_image());
        Ok(all)
    }

    fn image_folder(&self) -> Option<ImageFolder> {
        Some(self.images.folder().clone())
    }

    async fn kept_images(&self) -> Result<(u64, Vec<String>), RuntimeError> {
        let images = self.images.clone();
        blocking("list the images in use", move || images.kept()).await
    }

    async fn release_images(&self, mark: u64, unused: &[String]) -> Result<(), RuntimeError> {
        let (images, unused) = (self.images.clone(), unused.to_vec());
        blocking("let go of unused images", move || images.release(mark, &unused)).await
    }

    async fn read_log(
        &self,
        session: &SessionId,
        command: &CommandId,
        from: u64,
        until: u64,
    ) -> Result<(Vec<LogRecord>, u64), RuntimeError> {
        let (logs, name) = (self.pool.logs(session.as_str()), crate::log_name(command));
        let terminal = log::ring::names(command);
        let what = format!("read the log of {command}");
        let read = move || match pool::open_log(&logs, &name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let open = |index: usize| pool::open_log(&logs, &terminal[index]);
                log::ring::read(open, from, until, READ_BUDGET)
            }
            file => log::read(&file?, from, until, READ_BUDGET),
        };
        // A little that has just been written is in memory: less work than giving it to a thread.
        if until.saturating_sub(from) <= READ_HERE {
            return read().map_err(io_error(what));
        }
        blocking(what, read).await
    }

    async fn log_progress(
        &self,
        session: &SessionId,
        command: &CommandId,
    ) -> Result<Progress, RuntimeError> {
        let (logs, name) = (self.pool.logs(session.as_str()), crate::log_name(command));
        let terminal = log::ring::names(command);
        let missing = |e: &io::Error| e.kind() == io::ErrorKind::NotFound;
        blocking(format!("read the log of {command}"), move || match pool::open_log(&logs, &name) {
            Err(e) if missing(&e) => {
                match log::ring::progress(|index| pool::open_log(&logs, &terminal[index])) {
                    Err(e) if missing(&e) => Ok(Progress::default()),
                    other => other,
                }
            }
            file => log::progress(&file?),
        })
        .await
    }

    async fn read_audit(
        &self,
        session: &SessionId,
        from: u64,
    ) -> Result<(Vec<u8>, u64), RuntimeError> {
        let logs = self.pool.logs(session.as_str());
        let what = format!("read the audit lines of {session}");
        blocking(what, move || crate::audit::read(&logs, from)).await
    }

    async fn close(&self) -> Result<(), RuntimeError> {
        self.close_pool().await
    }

    async fn admit(&self) -> Result<(), RuntimeError> {
        // Two looks at counters in memory: less work than giving it to another thread.
        self.pool.admit().map_err(io_error("no room for another sandbox"))
    }

    async fn space(&self) -> Result<Option<Space>, RuntimeError> {
        let pool = self.pool.clone();
        blocking("measure the pool", move || pool.space().map(Some)).await
    }

    async fn storage(&self) -> Result<Option<Storage>, RuntimeError> {
        let pool = self.pool.clone();
        blocking("look at the pool", move || pool.storage().map(Some)).await
    }

    fn launch_times(&self) -> Vec<(String, Times)> {
        self.times.read()
    }
}
