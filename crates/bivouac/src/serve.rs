//! `bivouac serve`: puts the engine together and keeps it running. The composition root.
//!
//! Owns: the order of start and end, the data folder, its lock and what clients find in it.
//! Invariant: nothing is touched before the host is fit and the folder is ours alone; `engine.json`
//! is there exactly while the API answers; an end by signal leaves sandboxes running unless it was
//! told to stop them. Called by `cli::serve`.

mod clients_tls;
mod egress;
pub mod host;
mod idle;
pub mod lock;
mod log;
mod metrics;
pub mod record;

use std::io::{self, IsTerminal as _};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use axum::Router;
use bivouac_engine::{Clock as _, Engine, EngineConfig, SystemClock};
use bivouac_runtime::Runtime;
use bivouac_runtime::linux::{LinuxConfig, LinuxRuntime};
use bivouac_store::Db;
use bivouac_types::image::{Named, UNIVERSAL, named};
use bivouac_types::secret::Secret;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use crate::cli::output;
use crate::cli::signals::Signals;
use crate::config::{ServeConfig, instance};
use crate::http::{self, EngineInfo, HttpConfig, StandIn};
use crate::preview::PreviewTls;
use crate::uses::UseLog;
use clients_tls::ClientsTls;
use host::{Check, Host, Status};
use idle::Activity;
use lock::{ENGINE_LOCK, FolderLock, LockError};
use metrics::Metrics;
use record::EngineRecord;

/// How long an engine of `bivouac run` waits for a predecessor that is on its way out.
const SUCCESSION: Duration = Duration::from_secs(15);

/// Runs the engine until it is asked to end.
///
/// # Errors
/// It could not start, or did not end in order. The host, the folder or the address is named.
pub fn run(config: ServeConfig) -> anyhow::Result<()> {
    if config.idle_exit.is_some() {
        // Started by a `bivouac run`, and not to die by its Ctrl-C. Fails only for a group leader,
        // who is out of reach already.
        let _ = rustix::process::setsid();
        // It was executed as /proc/self/exe; lists of processes shall not call it "exe".
        rustix::thread::set_name(c"bivouac").context("could not name the process")?;
    }
    log::init(config.log_json)?;
    fit(&Host::real(), &config)?;
    prepare_data_dir(&config.data_dir)?;
    // Requests are short and mostly wait for shims, the kernel and the database, which need CPUs too;
    // more workers than this spend their time on waking each other.
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get() / 2).clamp(1, 16);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers)
        .enable_all()
        .build()
        .context("could not start the asynchronous runtime")?;
    let outcome = runtime.block_on(serve(config));
    // A thread that is stuck in a system call must not hold up the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

/// Refuses a host that cannot run sandboxes, with everything that is missing and how to mend it.
fn fit(host: &Host, config: &ServeConfig) -> anyhow::Result<()> {
    let checks = host.required(&config.data_dir, config.pool.mode);
    let missing: Vec<&Check> = checks.iter().filter(|c| c.status == Status::Fail).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = missing
        .iter()
        .map(|check| format!("{}; mend: {}", check.found, check.mend.as_deref().unwrap_or("-")))
        .collect();
    Err(anyhow!("{}", lines.join("\n  ")).context("this machine cannot run the engine"))
}

/// Makes the data folder, or checks one that is there: ours, and closed to everyone else.
///
/// # Errors
/// It cannot be made, or is somebody else's.
pub fn prepare_data_dir(folder: &Path) -> anyhow::Result<()> {
    let shown = folder.display();
    let found = match std::fs::metadata(folder) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(parent) = folder.parent() {
                std::fs::create_dir_all(parent)
                    .with_context(|| format!("could not make {}", parent.display()))?;
            }
            match std::fs::DirBuilder::new().mode(0o700).create(folder) {
                // Another start was quicker.
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(error).with_context(|| format!("could not make {shown}"));
                }
                _ => return Ok(()),
            }
        }
        Err(error) => return Err(error).with_context(|| format!("could not look at {shown}")),
    };
    if !found.is_dir() {
        bail!("the data folder {shown} is not a folder");
    }
    if found.uid() != rustix::process::geteuid().as_raw() {
        bail!("the data folder {shown} belongs to user {}, not to us", found.uid());
    }
    if found.mode() & 0o077 == 0 {
        return Ok(());
    }
    // Closing a folder of somebody's own (/tmp, a home) would break more than it mends.
    let ours = folder.join(ENGINE_LOCK).exists()
        || std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
    if !ours {
        bail!(
            "{shown} is open to other users and holds other things: choose an empty or a new folder"
        );
    }
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700))
        .with_context(|| format!("could not close {shown} to other users"))
}

async fn serve(config: ServeConfig) -> anyhow::Result<()> {
    let mut stop = Stop::watch()?;
    let lock = take_lock(&config).await?;
    // Bound early: a taken address is told before anything else is touched.
    let listener = listen(config.listen).await?;
    let address = listener.local_addr().context("the listener has no address")?;
    let tls = match config.clients_tls {
        true => Some(ClientsTls::open(&config.data_dir).await?),
        false => None,
    };
    let metrics = Metrics::bind(config.metrics_listen).await?;
    let preview = match config.preview_tls.clone() {
        Some(files) => Some(PreviewTls::open(files).await?),
        None => None,
    };
    let starting = start(&config, address, tls.as_ref().map(|tls| tls.told.clone()));
    let running = tokio::select! {
        running = starting => running?,
        () = stop.asked() => {
            tracing::info!("asked to end while starting");
            return Ok(());
        }
    };
    running.serve(listener, Names { tls, preview }, metrics, stop).await?;
    drop(lock);
    Ok(())
}

/// A running engine and what belongs to it.
struct Running {
    config: ServeConfig,
    engine: Arc<Engine>,
    db: Db,
    http: HttpConfig,
    address: SocketAddr,
}

async fn start(
    config: &ServeConfig,
    address: SocketAddr,
    clients_tls: Option<StandIn>,
) -> anyhow::Result<Running> {
    let token = token(config)?;
    let db = Db::open(&config.database)
        .await
        .with_context(|| format!("could not open the database {}", config.database))?;
    db.unlock(&config.vault_key).await.context("could not open the vault of secrets")?;
    let egress = egress::config(config)?;
    let runtime = build_runtime(config).await?;
    let image = default_image(config, runtime.as_ref()).await;
    let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let public_url = config.public_url.clone().unwrap_or_else(|| format!("http://{address}"));
    let clock = Arc::new(SystemClock);
    let info = EngineInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        node: node.clone(),
        data_dir: config.data_dir.display().to_string(),
        started_at: clock.now(),
        clients_tls,
    };
    let mut settings = EngineConfig::new(node, image, public_url);
    settings.host_until_built = config.image.is_none();
    settings.preview_domain.clone_from(&config.preview_domain);
    settings.issuer.clone_from(&config.issuer);
    settings.secret_sources.clone_from(&config.secret_sources);
    settings.extra_ca.clone_from(&config.extra_ca);
    settings.egress = egress;
    settings.token = Some(Secret::new(token));
    if let Some(bytes) = config.disk_bytes {
        settings.disk_bytes = bytes;
    }
    let engine = Engine::open(settings, db.clone(), runtime, clock)
        .await
        .context("could not settle what the last run of the engine left")?;
    engine.warm_identity();
    let uses = UseLog::open(&config.data_dir).with_context(|| {
        format!("could not open the log of uses in {}", config.data_dir.display())
    })?;
    let http = HttpConfig { uses, info };
    Ok(Running { config: config.clone(), engine, db, http, address })
}

impl Running {
    /// Serves until asked to end, then ends in order: no new work, open answers finish or are cut
    /// after a moment, sandboxes stop if they are to.
    async fn serve(
        self,
        listener: TcpListener,
        names: Names,
        metrics: Metrics,
        mut stop: Stop,
    ) -> anyhow::Result<()> {
        let Self { config, engine, db, http, address } = self;
        let activity = Activity::new();
        let uses = Arc::clone(&http.uses);
        let writing = tokio::spawn(Arc::clone(&uses).keep(Arc::clone(&engine)));
        let doors = http::doors(engine.clone(), http);
        let app = activity.watch(doors.api);
        let routes = activity.watch(doors.preview);
        let record = EngineRecord {
            pid: i32::try_from(std::process::id()).context("a process id that is no i32")?,
            address: address.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        record
            .write(&config.data_dir)
            .with_context(|| format!("could not write into {}", config.data_dir.display()))?;
        announce(&config, address);
        let (end, ended) = watch::channel(false);
        let measured = metrics.serve(doors.metrics, ended.clone());
        let serving = serve_doors(listener, names, app, routes, ended);
        let mut again = stop.clone();
        let ending = async {
            tokio::select! {
                () = stop.asked() => tracing::info!("asked to end"),
                () = activity.idle(config.idle_exit, &engine) => tracing::info!("idle: ending"),
            }
            // First, so that no client is sent to an engine that does not take it any more.
            if let Err(error) = record::remove_record(&config.data_dir) {
                tracing::warn!(%error, "could not remove engine.json");
            }
            end.send_replace(true);
            if config.stop_sandboxes { engine.shutdown(true).await } else { Ok(()) }
        };
        let stopped = tokio::select! {
            ((), (), stopped) = async { tokio::join!(serving, measured, ending) } => stopped,
            () = again.again() => bail!("left at once; what is half done is settled at the next start"),
        };
        if !config.stop_sandboxes {
            let alive = engine.live_sessions();
            if alive > 0 {
                output::progress(&format!(
                    "{alive} sandboxes go on; bivouac serve takes them up again"
                ));
            }
            engine.shutdown(false).await.context("could not end in order")?;
        }
        writing.abort();
        uses.finish(&engine);
        db.close().await;
        stopped.context("could not stop every sandbox; the next start settles the rest")
    }
}

/// Listeners besides the plain one.
struct Names {
    tls: Option<ClientsTls>,
    preview: Option<PreviewTls>,
}

/// Serves the plain listener, and those of `--clients-tls` and `--preview-listen`, until told to end.
async fn serve_doors(
    listener: TcpListener,
    names: Names,
    app: Router,
    routes: Router,
    ended: watch::Receiver<bool>,
) {
    let end = |mut ended: watch::Receiver<bool>| async move {
        let _ = ended.wait_for(|end| *end).await;
    };
    let plain = http::serve(listener, None, app.clone(), end(ended.clone()));
    let clients = async {
        if let Some(ClientsTls { listener, acceptor, .. }) = names.tls {
            let app = http::stand_in(app);
            http::serve(listener, Some(acceptor), app, end(ended.clone())).await;
        }
    };
    let preview = async {
        if let Some(PreviewTls { listener, acceptor }) = names.preview {
            http::serve(listener, Some(acceptor), routes, end(ended.clone())).await;
        }
    };
    tokio::join!(plain, clients, preview);
}

/// The engine's token: from the environment, else the folder's own.
fn token(config: &ServeConfig) -> anyhow::Result<String> {
    match std::env::var("BIVOUAC_TOKEN") {
        Ok(token) if token.trim().is_empty() => {
            bail!("BIVOUAC_TOKEN is set and empty: unset it, or give it the token")
        }
        // It goes into a header; anything else could never be sent back.
        Ok(token) if !token.bytes().all(|byte| byte.is_ascii_graphic()) => {
            bail!("BIVOUAC_TOKEN may hold printable characters without spaces only")
        }
        Ok(token) => Ok(token),
        Err(std::env::VarError::NotUnicode(_)) => bail!("BIVOUAC_TOKEN is not text"),
        Err(std::env::VarError::NotPresent) => record::ensure_token(&config.data_dir)
            .with_context(|| format!("could not make a token in {}", config.data_dir.display())),
    }
}

async fn take_lock(config: &ServeConfig) -> anyhow::Result<FolderLock> {
    let folder = config.data_dir.display();
    // An idle engine may be on its way out while the next run starts its own.
    let give_up = config.idle_exit.map(|_| Instant::now() + SUCCESSION);
    loop {
        match FolderLock::take(&config.data_dir, ENGINE_LOCK) {
            Ok(lock) => return Ok(lock),
            Err(LockError::Held(_)) if give_up.is_some_and(|at| Instant::now() < at) => {
                sleep(Duration::from_millis(50)).await;
            }
            Err(LockError::Held(Some(pid))) => bail!(
                "another engine is running on {folder}: process {pid}; stop it, or choose another \
                 folder with --data-dir"
            ),
            Err(LockError::Held(None)) => {
                bail!(
                    "another engine is starting on {folder}; choose another folder with --data-dir"
                )
            }
            Err(error) => return Err(error).with_context(|| format!("could not lock {folder}")),
        }
    }
}

async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| match address.port() {
        0 => format!("could not listen on {address}"),
        _ => format!("could not listen on {address}; choose another address with --listen"),
    })
}

/// The sandboxes' side of the engine.
async fn build_runtime(config: &ServeConfig) -> anyhow::Result<Arc<dyn Runtime>> {
    let instance = instance(&config.data_dir)
        .with_context(|| format!("could not look at {}", config.data_dir.display()))?;
    let linux = LinuxConfig {
        data_dir: config.data_dir.clone(),
        images_dir: config.images_dir.clone(),
        instance,
        pool: config.pool.clone(),
    };
    let runtime = LinuxRuntime::start(linux)
        .await
        .context("could not get this machine ready for sandboxes")?;
    Ok(Arc::new(runtime))
}

/// The image of a create that names none. With none told it is `universal`, and `host` at each create
/// that finds it not built yet.
async fn default_image(config: &ServeConfig, runtime: &dyn Runtime) -> String {
    let Some(image) = &config.image else { return UNIVERSAL.to_owned() };
    // Managed names are the engine's to read; it will say what is wrong with one.
    if let Named::Own(own) = named(image)
        && let Err(error) = runtime.image(own).await
    {
        tracing::warn!(%error, image, "creates without an image will fail");
    }
    image.clone()
}

fn announce(config: &ServeConfig, address: SocketAddr) {
    let data = config.data_dir.display();
    tracing::info!(%address, data = %data, "ready");
    let version = env!("CARGO_PKG_VERSION");
    output::progress(&format!("bivouac {version} listening on http://{address} (data: {data})"));
    if config.clients_tls {
        output::progress(
            "and for clients that only take its name on https://vercel.com/api (127.0.0.1)",
        );
        output::hint("what they need: bivouac env --tls");
    }
    if io::stderr().is_terminal() {
        output::hint("in another terminal: bivouac run -- echo hello");
        output::hint("with the official SDK: eval \"$(bivouac env)\"; node app.mjs");
    }
}

/// Asked to end: by SIGTERM, Ctrl-C, or a terminal that is gone. A second time means at once.
#[derive(Clone)]
struct Stop(watch::Receiver<u32>);

impl Stop {
    fn watch() -> anyhow::Result<Self> {
        let mut signals = Signals::new().map_err(|failure| anyhow!(failure.summary()))?;
        let (count, counted) = watch::channel(0);
        tokio::spawn(async move {
            loop {
                signals.next().await;
                count.send_modify(|count| *count += 1);
            }
        });
        Ok(Self(counted))
    }

    async fn asked(&mut self) {
        self.times(1).await;
    }

    async fn again(&mut self) {
        self.times(2).await;
    }

    async fn times(&mut self, times: u32) {
        if self.0.wait_for(|count| *count >= times).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use tempfile::tempdir;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn a_new_data_folder_is_closed() {
        let folder = tempdir().unwrap();
        let data = folder.path().join("a/b");
        prepare_data_dir(&data).unwrap();
        assert_eq!(mode(&data), 0o700);
        prepare_data_dir(&data).unwrap();
    }

    #[test]
    fn an_open_folder_is_closed_only_if_it_is_ours() {
        let folder = tempdir().unwrap();
        let open = |name: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let (empty, ours, theirs) = (open("empty"), open("ours"), open("theirs"));
        std::fs::write(ours.join(ENGINE_LOCK), "").unwrap();
        std::fs::write(theirs.join("letter"), "").unwrap();
        prepare_data_dir(&empty).unwrap();
        prepare_data_dir(&ours).unwrap();
        assert!(prepare_data_dir(&theirs).is_err());
        assert_eq!((mode(&empty), mode(&ours), mode(&theirs)), (0o700, 0o700, 0o755));
        assert!(prepare_data_dir(&theirs.join("letter")).is_err(), "a file");
    }

    #[tokio::test]
    async fn a_taken_address_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = taken.local_addr().unwrap();
        let error = listen(address).await.unwrap_err();
        assert!(error.to_string().contains(&address.to_string()), "{error}");
    }
}
