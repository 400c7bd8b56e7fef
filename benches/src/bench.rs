//! A run: its size, its engine, and what it has found so far.
//!
//! Invariant: the engine, its data folder and everything of the peers lie in one temporary folder,
//! and [`Bench::close`] tells what of it would not go. Made by `main`, used by every group.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bivouac_runtime::image::ImageFolder;
use bivouac_testkit::{Client, TestServer};
use tempfile::TempDir;

use crate::egress::EgressSize;
use crate::peers::Rootfs;
use crate::preview::PreviewSize;
use crate::state::Tree;
use crate::stats::{Row, Samples};

/// What can be measured alone with `--only`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Group {
    /// The runtime without an engine, beside the peers.
    Launch,
    /// Create, first output, exec and destroy over HTTP, beside the peers.
    Api,
    /// A hundred creates at once.
    Burst,
    /// Create and destroy without a pause.
    Sustained,
    /// Many idle sandboxes: time, memory, answers, removal.
    Live,
    /// Live snapshot, fork, resume and rollback at three sizes.
    State,
    /// Programs that use the disk, and first writes to files of the image: inside, on the host's file
    /// systems and in a container.
    Work,
    /// The egress broker, beside no broker and beside another proxy.
    Egress,
    /// Routes into sandboxes, beside a plain relay.
    Preview,
}

/// How much of state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StateSize {
    pub(crate) rounds: usize,
    /// A hundred forks, so many times.
    pub(crate) many_rounds: usize,
    pub(crate) trees: [Tree; 3],
}

/// How much of everything.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) name: &'static str,
    pub(crate) judged: bool,
    pub(crate) rounds: usize,
    pub(crate) podman_every: usize,
    pub(crate) burst: usize,
    pub(crate) burst_rounds: usize,
    pub(crate) sustained: Duration,
    pub(crate) live: usize,
    pub(crate) answering: usize,
    pub(crate) state: StateSize,
    /// Small files of the image that are written to for the first time.
    pub(crate) touched: usize,
    pub(crate) work_files: usize,
    pub(crate) work_rounds: usize,
    pub(crate) egress: EgressSize,
    pub(crate) preview: PreviewSize,
}

/// Each row once or twice: only that it can be measured.
pub(crate) const SMOKE: Size = Size {
    name: "smoke",
    judged: false,
    rounds: 2,
    podman_every: 3,
    burst: 5,
    burst_rounds: 1,
    sustained: Duration::from_millis(300),
    live: 8,
    answering: 4,
    state: StateSize {
        rounds: 1,
        many_rounds: 1,
        trees: [
            Tree { files: 20, bytes: 10_000 },
            Tree { files: 50, bytes: 10_000 },
            Tree { files: 4, bytes: 1_000_000 },
        ],
    },
    touched: 20,
    work_files: 40,
    work_rounds: 1,
    egress: EgressSize {
        rounds: 1,
        time: Duration::from_millis(200),
        flows: 50,
        tls_flows: 5,
        mib: 16,
        queries: 50,
    },
    preview: PreviewSize { rounds: 1, mib: 16, short: 50 },
};
/// Under two minutes.
pub(crate) const QUICK: Size = Size {
    name: "quick",
    judged: true,
    rounds: 50,
    podman_every: 10,
    burst: 100,
    burst_rounds: 2,
    sustained: Duration::from_secs(3),
    live: 200,
    answering: 50,
    state: StateSize {
        rounds: 5,
        many_rounds: 1,
        trees: [
            Tree { files: 1_000, bytes: 10_000 },
            Tree { files: 5_000, bytes: 10_000 },
            Tree { files: 20, bytes: 10_000_000 },
        ],
    },
    touched: 200,
    work_files: 3_000,
    work_rounds: 2,
    egress: EgressSize {
        rounds: 3,
        time: Duration::from_millis(1000),
        flows: 1_000,
        tls_flows: 100,
        mib: 512,
        queries: 1_000,
    },
    preview: PreviewSize { rounds: 3, mib: 512, short: 2_000 },
};
/// What a release is described with.
pub(crate) const FULL: Size = Size {
    name: "full",
    judged: true,
    rounds: 300,
    podman_every: 10,
    burst: 100,
    burst_rounds: 8,
    sustained: Duration::from_secs(10),
    live: 2_000,
    answering: 200,
    state: StateSize {
        rounds: 15,
        many_rounds: 3,
        trees: [
            Tree { files: 1_000, bytes: 10_000 },
            Tree { files: 50_000, bytes: 10_000 },
            Tree { files: 200, bytes: 10_000_000 },
        ],
    },
    touched: 500,
    work_files: 20_000,
    work_rounds: 5,
    egress: EgressSize {
        rounds: 7,
        time: Duration::from_millis(2000),
        flows: 1_000,
        tls_flows: 200,
        mib: 2_048,
        queries: 500,
    },
    preview: PreviewSize { rounds: 5, mib: 1024, short: 10_000 },
};

/// See the module.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) size: Size,
    only: Vec<Group>,
    pub(crate) image: String,
    pub(crate) images: PathBuf,
    pub(crate) folder: PathBuf,
    pub(crate) server: TestServer,
    pub(crate) client: Client,
    /// One thread: what is measured is the engine, not the waking of the client's threads.
    pub(crate) client_threads: tokio::runtime::Runtime,
    pub(crate) rows: Vec<Row>,
    /// Sentences about what could not be measured.
    pub(crate) skipped: Vec<String>,
    sessions: Mutex<BTreeSet<String>>,
    _temporary: TempDir,
}

impl Bench {
    /// Starts the engine on a data folder of its own.
    pub(crate) fn start(size: Size, only: Vec<Group>, image: &str, images: &Path) -> Result<Self> {
        let client_threads = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let temporary = tempfile::Builder::new().prefix("bivouac-bench-").tempdir()?;
        let builder = TestServer::builder().arg("--image").arg(image);
        let server = client_threads.block_on(builder.start()).context("the engine")?;
        let client = server.client("team_bench")?;
        Ok(Self {
            size,
            only,
            image: image.to_owned(),
            images: images.to_owned(),
            folder: temporary.path().to_owned(),
            server,
            client,
            client_threads,
            rows: Vec::new(),
            skipped: Vec::new(),
            sessions: Mutex::default(),
            _temporary: temporary,
        })
    }

    pub(crate) fn wants(&self, group: Group) -> bool {
        self.only.is_empty() || self.only.contains(&group)
    }

    /// What the peers' root is made of: the same files as the sandboxes' image.
    pub(crate) fn rootfs(&self) -> Result<Rootfs> {
        if self.image == "host" {
            let trees = self.server.data.join("pool/images");
            for entry in
                std::fs::read_dir(&trees).with_context(|| format!("read {}", trees.display()))?
            {
                let entry = entry?;
                if entry.file_name().to_string_lossy().starts_with("host-") {
                    return Ok(Rootfs::Host(entry.path()));
                }
            }
            bail!("no tree of the host image in {}", trees.display());
        }
        let found = ImageFolder::new(&self.images).find(&self.image)?;
        let folder = self.images.display();
        let image = found.with_context(|| {
            format!("no image {} in {folder}: bivouac image build {}", self.image, self.image)
        })?;
        let hash = image.digest.rsplit(':').next().unwrap_or_default();
        let file = self.images.join(format!("{}-{hash}.erofs", image.name));
        ensure!(file.is_file(), "the image's file {} is missing", file.display());
        Ok(Rootfs::File(file))
    }

    /// A folder on the engine's btrfs, for what is measured on the host.
    pub(crate) fn scratch(&self) -> Result<PathBuf> {
        let scratch = self.server.data.join("pool/bench");
        std::fs::create_dir_all(&scratch)?;
        Ok(scratch)
    }

    pub(crate) fn row(
        &self,
        group: &'static str,
        name: impl Into<String>,
        unit: &'static str,
        samples: &Samples,
    ) -> Row {
        Row::new(group, name, unit, samples, self.size.judged)
    }

    pub(crate) fn add(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// A session of this run, whose traces are looked for at the end.
    pub(crate) fn remember(&self, session: &str) {
        self.sessions.lock().expect("no panic while held").insert(session.to_owned());
    }

    /// Control groups, processes and sockets that still name a session of this run.
    pub(crate) fn traces(&self) -> Vec<String> {
        let sessions = self.sessions.lock().expect("no panic while held");
        let ours = |text: &str| {
            text.match_indices("sbx_").any(|(at, _)| {
                let word = text[at..].split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                word.into_iter().next().is_some_and(|id| sessions.contains(id))
            })
        };
        let mut found = Vec::new();
        for root in ["/sys/fs/cgroup", "/run/bivouac"] {
            walk(Path::new(root), &mut |path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                if ours(&name) {
                    found.push(path.display().to_string());
                }
            });
        }
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let groups = std::fs::read_to_string(entry.path().join("cgroup")).unwrap_or_default();
            if ours(&groups) {
                found.push(format!("process {}", entry.file_name().to_string_lossy()));
            }
        }
        found
    }

    /// Ends the engine; an error names what it left.
    pub(crate) fn close(&self) -> Result<()> {
        let status =
            self.client_threads.block_on(self.server.stop()).context("the engine's end")?;
        ensure!(status.success(), "the engine ended with {status}\n{}", self.server.tail());
        let mut left = self.traces();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for folder in [&self.server.data, &self.folder] {
            let folder = folder.to_string_lossy();
            let lines = mounts.lines().filter(|line| line.contains(&*folder));
            left.extend(lines.map(|line| format!("mount {line}")));
        }
        ensure!(left.is_empty(), "left behind:\n  {}", left.join("\n  "));
        Ok(())
    }
}

fn walk(folder: &Path, each: &mut dyn FnMut(&Path)) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        each(&path);
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&path, each);
        }
    }
}
