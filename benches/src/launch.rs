//! The runtime without an engine around it: launch, one command, removal, and the launch's steps.
//!
//! Invariant: its data folder is its own and its pool is unmounted by [`Launcher::close`]. Called by
//! `start`, and alone by `bivouac-bench launch`, for whoever works on the launch.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bivouac_runtime::linux::{LinuxConfig, LinuxRuntime};
use bivouac_runtime::{ExecSpec, Handle, LaunchSpec, Limits, Runtime};
use bivouac_types::id::{CommandId, SessionId};

use crate::stats::Samples;

/// A runtime on threads of its own, as in the engine.
pub(crate) struct Launcher {
    threads: tokio::runtime::Runtime,
    runtime: LinuxRuntime,
    image: String,
    next: AtomicU32,
    closed: bool,
    pub(crate) launch: Samples,
    /// Launch and the command `true`: what a peer's run does.
    pub(crate) with_true: Samples,
    /// And the removal.
    pub(crate) whole: Samples,
    /// The command alone.
    pub(crate) exec: Samples,
    pub(crate) remove: Samples,
    pub(crate) steps: BTreeMap<String, Samples>,
}

fn millis(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

impl Launcher {
    pub(crate) fn start(data: &Path, images: &Path, image: &str) -> Result<Self> {
        std::fs::create_dir_all(data)?;
        let threads = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let config = LinuxConfig {
            pool: bivouac_runtime::pool::PoolOptions::default(),
            data_dir: data.to_owned(),
            images_dir: images.to_owned(),
            instance: format!("bench{}", std::process::id()),
        };
        let runtime = threads.block_on(LinuxRuntime::start(config))?;
        let image = threads
            .block_on(runtime.image(image))
            .with_context(|| format!("the image {image} for the runtime"))?
            .name;
        Ok(Self {
            threads,
            runtime,
            image,
            next: AtomicU32::new(0),
            closed: false,
            launch: Samples::default(),
            with_true: Samples::default(),
            whole: Samples::default(),
            exec: Samples::default(),
            remove: Samples::default(),
            steps: BTreeMap::new(),
        })
    }

    fn number(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn spec(&self) -> LaunchSpec {
        let n = self.number();
        LaunchSpec {
            session: SessionId::new(u64::from(n) + 1, [0; 10]),
            hostname: format!("bench-{n}"),
            image: self.image.clone(),
            from_snapshot: None,
            fresh: false,
            mounts: Vec::new(),
            snapshot_bytes: 0,
            limits: Limits { memory_bytes: 4 << 30, vcpus: 2, pids: 2048, disk_bytes: 32 << 30 },
            id_range: n,
            cwd: "/vercel/sandbox".into(),
            request: None,
            egress: None,
        }
    }

    async fn run_true(&self, handle: &dyn Handle) -> Result<()> {
        let command = CommandId::new(u64::from(self.number()), [7; 10]);
        let exec = ExecSpec {
            command: command.clone(),
            argv: vec!["/bin/true".to_owned()],
            env: BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]),
            cwd: "/vercel/sandbox".into(),
            root: false,
            timeout_ms: Some(20_000),
            attach_stdin: false,
            tty: None,
            request: None,
        };
        handle.exec(&exec).await?;
        let mut progress = handle.progress(&command).context("a command without progress")?;
        let end = progress.wait_for(|p| p.end.is_some()).await?.end.clone();
        let exit = end.and_then(|end| end.exit_code);
        anyhow::ensure!(exit == Some(0), "/bin/true ended with {exit:?}");
        Ok(())
    }

    /// One sandbox from nothing to nothing.
    pub(crate) fn cycle(&mut self) -> Result<()> {
        let spec = self.spec();
        let (steps, times) = self.threads.block_on(async {
            let start = Instant::now();
            let handle = self.runtime.launch(&spec).await?;
            let launch = millis(start);
            let steps = self.runtime.launch_steps();
            let command = Instant::now();
            self.run_true(&*handle).await?;
            let (exec, with_true) = (millis(command), millis(start));
            let remove = Instant::now();
            handle.kill().await?;
            self.runtime.remove(&spec.session).await?;
            let (remove, whole) = (millis(remove), millis(start));
            self.runtime.remove_logs(&spec.session).await?;
            anyhow::Ok((steps, [launch, exec, with_true, remove, whole]))
        })?;
        let [launch, exec, with_true, remove, whole] = times;
        self.launch.add(launch);
        self.exec.add(exec);
        self.with_true.add(with_true);
        self.remove.add(remove);
        self.whole.add(whole);
        for (step, micros) in steps {
            let time = Duration::from_micros(micros).as_secs_f64() * 1e3;
            self.steps.entry(step).or_default().add(time);
        }
        Ok(())
    }

    /// Forgets what was measured: the first cycles fill caches.
    pub(crate) fn forget(&mut self) {
        self.launch = Samples::default();
        self.exec = Samples::default();
        self.with_true = Samples::default();
        self.remove = Samples::default();
        self.whole = Samples::default();
        self.steps.clear();
    }

    /// Ends the runtime and unmounts its pool.
    pub(crate) fn close(&mut self) -> Result<()> {
        self.closed = true;
        // A cycle that failed half-way has left its sandbox.
        let left = self.threads.block_on(self.runtime.list())?;
        for session in left {
            self.threads.block_on(self.runtime.remove(&session))?;
        }
        let (mark, kept) = self.threads.block_on(self.runtime.kept_images())?;
        self.threads.block_on(self.runtime.release_images(mark, &kept))?;
        Ok(self.threads.block_on(self.runtime.close())?)
    }
}

impl Drop for Launcher {
    /// After a panic elsewhere: mounts must not outlive the run.
    fn drop(&mut self) {
        if !self.closed {
            let _ = self.close();
        }
    }
}
