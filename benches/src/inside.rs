//! What the bench runs inside of sandboxes, and beside them for comparison: `bivouac-bench inside …`.
//!
//! Invariant: the same program does the same on each side and prints one line of JSON; it writes only to
//! files that it was told of. Started by `state`, `touch` and `preview`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bivouac_testkit::TestSandbox;
use clap::Subcommand;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

/// Where it lies, inside.
pub(crate) const PROGRAM: &str = "/vercel/sandbox/bivouac-bench";
/// Largest of the small files.
const SMALL: u64 = 16 << 10;
/// How far a walk for files goes.
const DEPTH: usize = 8;

/// What is done.
#[derive(Debug, Subcommand)]
pub(crate) enum Inside {
    /// Writes without a pause, and prints each time that a write came late
    Pulse {
        /// Into this file
        #[arg(long)]
        file: PathBuf,
        /// How long
        #[arg(long)]
        millis: u64,
        /// Microseconds after which it is late
        #[arg(long, default_value_t = 300)]
        late: u64,
    },
    /// Copies the files that `touch` would write to below another folder
    Pick {
        /// Small files
        #[arg(long)]
        small: usize,
        /// Where to
        #[arg(long)]
        to: PathBuf,
    },
    /// Serves HTTP on loopback until it is killed
    Serve {
        /// 0 is any
        #[arg(long)]
        port: u16,
    },
    /// Passes connections on until it is killed
    Relay {
        /// To this port of loopback
        #[arg(long)]
        to: u16,
    },
    /// Writes one byte into each of some small files and into a large one, for the first time
    Touch {
        /// Small files
        #[arg(long)]
        small: usize,
        /// Below here
        #[arg(long, default_value = "/")]
        root: PathBuf,
    },
}

/// The clock that all processes of a machine share, microseconds.
pub(crate) fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec.unsigned_abs() * 1_000_000) + now.tv_nsec.unsigned_abs() / 1_000
}

/// Puts this program into a sandbox.
pub(crate) async fn put(sandbox: &TestSandbox) -> Result<()> {
    let program = fs::read(std::env::current_exe()?)?;
    let archive = bivouac_testkit::Tar::new().file_mode("bivouac-bench", 0o755, &program).gzip();
    let wrote = sandbox.write("/vercel/sandbox", archive).await;
    ensure!(wrote.status == 200, "{wrote}");
    Ok(())
}

/// The role's whole life.
pub(crate) fn run(what: &Inside) -> Result<()> {
    let said = match what {
        Inside::Pulse { file, millis, late } => pulse(file, Duration::from_millis(*millis), *late)?,
        Inside::Pick { small, to } => {
            let root = Path::new("/");
            for file in files(root, *small)? {
                let target = to.join(file.strip_prefix(root)?);
                fs::create_dir_all(target.parent().context("a folder")?)?;
                fs::copy(&file, &target).with_context(|| file.display().to_string())?;
            }
            json!({})
        }
        Inside::Touch { small, root } => touch(root, *small)?,
        Inside::Serve { port } => return crate::preview::serve(*port),
        Inside::Relay { to } => return crate::preview::relay(*to),
    };
    Ok(writeln!(std::io::stdout(), "{said}")?)
}

fn pulse(file: &Path, time: Duration, late: u64) -> Result<Value> {
    let out = File::options().create(true).truncate(true).write(true).open(file)?;
    let block = [0x5a; 4096];
    let (begin, mut last, mut place) = (Instant::now(), now_us(), 0);
    let mut gaps = Vec::new();
    while begin.elapsed() < time {
        out.write_all_at(&block, place)?;
        // Over and over: what a snapshot has to flush stays bounded.
        place = (place + 4096) % (4 << 20);
        let now = now_us();
        if now - last >= late {
            gaps.push(json!([last, now]));
        }
        last = now;
    }
    Ok(json!({ "gaps": gaps }))
}

fn walk(folder: &Path, depth: usize, each: &mut dyn FnMut(PathBuf, u64)) {
    // What cannot be read is as if it were not there: the same on all sides.
    let entries: BTreeSet<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    for path in entries {
        let Ok(about) = fs::symlink_metadata(&path) else { continue };
        if about.is_dir() && depth > 0 {
            walk(&path, depth - 1, each);
        } else if about.is_file() && about.nlink() == 1 {
            each(path, about.len());
        }
    }
}

/// Small files of an image, then its largest program.
fn files(root: &Path, small: usize) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    walk(&root.join("usr/share"), DEPTH, &mut |path, bytes| {
        if found.len() < small && (1..=SMALL).contains(&bytes) {
            found.push(path);
        }
    });
    ensure!(found.len() == small, "only {} small files below {}", found.len(), root.display());
    let mut largest = (0, PathBuf::new());
    walk(&root.join("usr/bin"), 0, &mut |path, bytes| {
        if bytes > largest.0 {
            largest = (bytes, path);
        }
    });
    ensure!(largest.0 > SMALL, "no large file below {}/usr/bin", root.display());
    found.push(largest.1);
    Ok(found)
}

fn touch(root: &Path, small: usize) -> Result<Value> {
    let files = files(root, small)?;
    let mut times = Vec::new();
    for path in &files {
        let byte = {
            let mut byte = [0];
            File::open(path)?.read_exact_at(&mut byte, 0)?;
            byte
        };
        let begin = Instant::now();
        let file = File::options().write(true).open(path);
        let file = file.with_context(|| format!("open {}", path.display()))?;
        file.write_all_at(&byte, 0)?;
        drop(file);
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    let large = times.pop();
    let bytes = files.last().and_then(|path| path.metadata().ok()).map(|about| about.len());
    Ok(json!({ "small_us": times, "large_us": large, "large_bytes": bytes }))
}
