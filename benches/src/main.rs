//! `bivouac-bench`: the product's speed as ratios against its peers, all measured in one run on one
//! machine. Started by `script/bench`, which builds, installs and cleans.
//!
//! Invariant: it starts its own engine on a folder of its own, and fails when anything that it made is
//! left on the machine. No figure is invented: what could not be measured fails the run or is told.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for people at a terminal")]

mod bench;
mod egress;
mod inside;
mod interrupt;
mod launch;
mod load;
mod many;
mod pause;
mod peers;
mod preview;
mod report;
mod start;
mod state;
mod stats;
mod touch;
mod work;

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};

use crate::bench::{Bench, FULL, Group, QUICK, SMOKE};
use crate::load::Before;
use crate::peers::Peers;
use crate::report::Report;
use crate::work::NpmInput;

#[derive(Debug, Parser)]
#[command(
    about = "Measures bivouac beside its peers. Start script/bench instead: it prepares what this needs."
)]
struct Args {
    /// Under two minutes
    #[arg(long, conflicts_with = "smoke")]
    quick: bool,
    /// Every row once or twice, no verdicts: whether it can be measured at all
    #[arg(long)]
    smoke: bool,
    /// Only these
    #[arg(long, value_delimiter = ',')]
    only: Vec<Group>,
    /// Print a table for docs/benchmarks.md
    #[arg(long)]
    markdown: bool,
    /// Also write the record to this file
    #[arg(long)]
    json: Option<PathBuf>,
    /// Image of the sandboxes, and of the peers
    #[arg(long, default_value = "host")]
    image: String,
    /// Folder of images
    #[arg(long, env = "BIVOUAC_IMAGES", default_value = "/var/cache/bivouac/images")]
    images: PathBuf,
    /// Version control's name of what is measured
    #[arg(long, default_value = "unknown")]
    commit: String,
    /// When, as it shall be printed
    #[arg(long, default_value = "undated")]
    at: String,
    /// Folder with package.json, its lock file and an .npmrc for `npm ci`
    #[arg(long, requires = "npm_cache")]
    npm_project: Option<PathBuf>,
    /// npm's cache, filled for that project
    #[arg(long)]
    npm_cache: Option<PathBuf>,
    /// The program `mitmdump`, the peer of the egress broker
    #[arg(long)]
    mitmdump: Option<PathBuf>,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Runs peers on request (started by the bench itself)
    #[command(hide = true)]
    Peers(peers::HelperArgs),
    /// What runs in sandboxes and beside them (started by the bench itself)
    #[command(hide = true, subcommand)]
    Inside(inside::Inside),
    /// The client of the egress rows (started by the bench itself)
    #[command(hide = true, subcommand)]
    Load(egress::Load),
    /// The origin of the egress rows (started by the bench itself)
    #[command(hide = true)]
    Origin(egress::OriginArgs),
    /// The runtime alone, without peers: the table of a launch's steps
    Launch {
        /// Launches
        #[arg(default_value_t = 100)]
        rounds: usize,
    },
}

/// What a program calls itself, if it is there.
fn version_of(name: &str) -> Option<String> {
    let output = Command::new(name).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let first = text.lines().next().unwrap_or_default();
    let version = first.split_whitespace().rfind(|w| w.starts_with(|c: char| c.is_ascii_digit()));
    Some(format!("{name} {}", version.unwrap_or("?")))
}

fn only_launch(args: &Args, rounds: usize) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("bivouac-bench-").tempdir()?;
    let mut launcher =
        launch::Launcher::start(&folder.path().join("data"), &args.images, &args.image)?;
    let mut done = Ok(());
    for round in 0..rounds + 2 {
        if round == 2 {
            launcher.forget();
        }
        done = launcher.cycle();
        if done.is_err() {
            break;
        }
    }
    launcher.close()?;
    done?;
    let show = |name: &str, samples: &stats::Samples| {
        println!(
            "{name:26} median {:7.3} ms  p90 {:7.3}  p99 {:7.3}",
            samples.median(),
            samples.at(0.9),
            samples.at(0.99)
        );
    };
    show("launch", &launcher.launch);
    let mut steps: Vec<_> = launcher.steps.iter().collect();
    steps.sort_by(|a, b| b.1.median().total_cmp(&a.1.median()));
    for (step, samples) in steps {
        show(&format!("  {step}"), samples);
    }
    show("exec true", &launcher.exec);
    show("kill and removal", &launcher.remove);
    Ok(())
}

fn groups(bench: &mut Bench, args: &Args) -> Result<()> {
    let said = |what: &str| eprintln!("bench: {what}");
    let needs_peers = [Group::Launch, Group::Api, Group::State, Group::Work];
    if needs_peers.into_iter().any(|group| bench.wants(group)) {
        let (rootfs, scratch) = (bench.rootfs()?, bench.scratch()?);
        let mut peers = Peers::start(&bench.folder.join("peers"), &rootfs, &scratch)?;
        if bench.wants(Group::Launch) || bench.wants(Group::Api) {
            said("launch, create, exec, destroy, in turn with the peers");
            start::run(bench, &mut peers)?;
        }
        if bench.wants(Group::State) {
            said("live snapshots, forks, the way back");
            state::run(bench, &mut peers)?;
            said("pause and resume with memory");
            pause::run(bench)?;
        }
        if bench.wants(Group::Work) {
            said("programs that use the disk");
            let npm = match (&args.npm_project, &args.npm_cache) {
                (Some(project), Some(cache)) => {
                    Some(NpmInput { project: project.clone(), cache: cache.clone() })
                }
                _ => {
                    bench.skipped.push("npm ci: no project and cache were given".into());
                    None
                }
            };
            work::run(bench, &mut peers, npm.as_ref())?;
            said("first writes to files of the image");
            touch::run(bench, &mut peers)?;
        }
        // The helper's mount namespace holds the pool; it has to be gone before the engine ends.
        drop(peers);
        std::fs::remove_dir_all(&scratch)
            .with_context(|| format!("remove {}", scratch.display()))?;
    }
    if bench.wants(Group::Egress) {
        said("the egress broker");
        egress::run(bench, args.mitmdump.as_deref())?;
    }
    if bench.wants(Group::Preview) {
        said("routes into sandboxes");
        preview::run(bench)?;
    }
    if bench.wants(Group::Burst) {
        said("many creates at once");
        many::burst(bench)?;
    }
    let mut empty = None;
    if bench.wants(Group::Sustained) {
        said("create and destroy without a pause");
        empty = Some(many::sustained(bench)?);
    }
    if bench.wants(Group::Live) {
        said("many alive together");
        many::live(bench, empty.as_ref())?;
    }
    Ok(())
}

fn measure(args: &Args) -> Result<Report> {
    ensure!(rustix::process::getuid().is_root(), "the bench starts an engine: run it as root");
    let size = match (args.smoke, args.quick) {
        (true, _) => SMOKE,
        (_, true) => QUICK,
        _ => FULL,
    };
    interrupt::watch()?;
    let before = Before::look();
    let begin = Instant::now();
    let mut bench = Bench::start(size, args.only.clone(), &args.image, &args.images)?;
    let done = groups(&mut bench, args);
    if let Err(error) = &done {
        eprintln!("bench: {error:#}\n{}", bench.server.tail());
    }
    let closed = bench.close();
    done?;
    closed?;
    let mut peers: Vec<String> =
        ["bwrap", "crun", "podman", "runc"].into_iter().filter_map(version_of).collect();
    peers.extend(args.mitmdump.as_deref().and_then(egress::peer_version));
    peers.push("posix_spawn of the host's libc".into());
    Ok(Report {
        version: 1,
        product: env!("CARGO_PKG_VERSION").into(),
        commit: args.commit.clone(),
        at: args.at.clone(),
        size: size.name.into(),
        image: args.image.clone(),
        peers,
        seconds: begin.elapsed().as_secs_f64(),
        load: before.since(),
        skipped: std::mem::take(&mut bench.skipped),
        rows: std::mem::take(&mut bench.rows),
    })
}

fn run(args: &Args) -> Result<()> {
    match &args.role {
        Some(Role::Peers(helper)) => return peers::help(helper),
        Some(Role::Inside(what)) => return inside::run(what),
        Some(Role::Load(load)) => return egress::load(load),
        Some(Role::Origin(origin)) => return egress::serve_origin(origin),
        Some(Role::Launch { rounds }) => return only_launch(args, *rounds),
        None => {}
    }
    let report = measure(args)?;
    if let Some(file) = &args.json {
        std::fs::write(file, serde_json::to_string_pretty(&report)? + "\n")
            .with_context(|| format!("write {}", file.display()))?;
    }
    print!("{}", if args.markdown { report.markdown() } else { report.text() });
    Ok(())
}

fn main() -> ExitCode {
    bivouac_runtime::roles::maybe_run(&bivouac_runtime::keeper::NoKeeper);
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
