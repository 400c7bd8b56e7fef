//! Programs that use the disk much: `tar`, `git`, `npm`, inside a sandbox, on the host's btrfs and ext4, and
//! in a container of podman, from the same files.
//!
//! Invariant: all places run the same line of shell on the same input, in turn; what a line needs is
//! prepared outside of its time. A tool that the image lacks is told, not left out. Called by `main`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bivouac_testkit::{Tar, TestSandbox};

use crate::bench::Bench;
use crate::interrupt;
use crate::peers::{Peers, Place};
use crate::start::{create, delete, millis};
use crate::stats::Samples;

/// What `npm ci` installs from: a project with its lock file and `.npmrc`, and a filled cache, whose
/// entries are named after the registry that the `.npmrc` names.
#[derive(Debug, Clone)]
pub(crate) struct NpmInput {
    pub(crate) project: std::path::PathBuf,
    pub(crate) cache: std::path::PathBuf,
}

struct Case {
    name: &'static str,
    /// Program that the image must have.
    needs: &'static str,
    /// Before each round, not timed.
    before: String,
    timed: String,
    limit: f64,
}

/// Text that compresses and differs as sources do.
fn source(n: usize) -> Vec<u8> {
    let mut text = String::new();
    for line in 0..(20 + n % 180) {
        let _ = writeln!(
            text,
            "pub fn item_{n}_{line}(x: u64) -> u64 {{ x.wrapping_mul({}) }}",
            n * 31 + line
        );
    }
    text.into_bytes()
}

fn sources(files: usize) -> Vec<u8> {
    let mut tar = Tar::new();
    for n in 0..files {
        tar = tar.file(format!("src/{}/{}/m{n}.rs", n / 500, n / 25), &source(n));
    }
    tar.gzip()
}

fn cases(npm: bool) -> Vec<Case> {
    let mut cases = vec![
        Case {
            name: "untar",
            needs: "tar",
            before: "rm -rf out && mkdir out".into(),
            timed: "tar --no-same-owner -xzf sources.tgz -C out".into(),
            limit: 1.4,
        },
        Case {
            name: "git status, five times",
            needs: "git",
            before: "if [ ! -d repo ]; then mkdir repo && tar --no-same-owner -xzf sources.tgz -C repo && cd repo && \
                git init -q && git add . && git -c user.name=b -c user.email=b@b commit -qm 1; fi"
                .into(),
            timed: "cd repo && for i in 1 2 3 4 5; do git status --porcelain; done".into(),
            limit: 1.8,
        },
    ];
    if npm {
        cases.push(Case {
            name: "npm ci, cache filled",
            needs: "npm",
            before: "rm -rf project && mkdir project && cp package.json package-lock.json .npmrc project".into(),
            timed: "cd project && npm ci --offline --ignore-scripts --no-audit --no-fund \
                --cache ../npm-cache --loglevel error"
                .into(),
            limit: 1.4,
        });
    }
    cases
}

fn add_tree(mut tar: Tar, from: &Path, name: &str) -> Result<Tar> {
    for entry in fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let entry = entry?;
        let name = format!("{name}/{}", entry.file_name().to_string_lossy());
        tar = if entry.file_type()?.is_dir() {
            add_tree(tar, &entry.path(), &name)?
        } else {
            tar.file(&name, &fs::read(entry.path())?)
        };
    }
    Ok(tar)
}

/// Everything that the cases read, as one archive.
fn input(files: usize, npm: Option<&NpmInput>) -> Result<Vec<u8>> {
    let mut tar = Tar::new().file("sources.tgz", &sources(files));
    if let Some(npm) = npm {
        for name in ["package.json", "package-lock.json", ".npmrc"] {
            tar = tar.file(name, &fs::read(npm.project.join(name))?);
        }
        tar = add_tree(tar, &npm.cache, "npm-cache")?;
    }
    Ok(tar.gzip())
}

async fn inside(sandbox: &TestSandbox, line: &str) -> Result<f64> {
    let start = Instant::now();
    let ran = sandbox.sh(line).await;
    let took = millis(start);
    ensure!(ran.exit == Some(0), "`{line}` ended with {:?}: {}{}", ran.exit, ran.out(), ran.err());
    Ok(took)
}

/// Where the same is done for comparison, and what it is called.
const PLACES: [(Place, &str); 3] = [
    (Place::Btrfs, "the host's btrfs"),
    (Place::Ext4, "the host's ext4"),
    (Place::Podman, "podman"),
];

/// One case at all places, in turn; the first round does not count.
fn rounds(
    bench: &Bench,
    peers: &mut Peers,
    sandbox: &TestSandbox,
    case: &Case,
) -> Result<(Samples, [Samples; 3])> {
    let (mut here, mut there) = (Samples::default(), [const { Samples::new() }; 3]);
    for round in 0..=bench.size.work_rounds {
        interrupt::check()?;
        for (samples, (place, _)) in there.iter_mut().zip(PLACES) {
            let _ = peers.shell(place, &case.before)?;
            let took = peers.shell(place, &case.timed)?;
            if round > 0 {
                samples.add(took);
            }
        }
        let _ = bench.client_threads.block_on(inside(sandbox, &case.before))?;
        let took = bench.client_threads.block_on(inside(sandbox, &case.timed))?;
        if round > 0 {
            here.add(took);
        }
    }
    Ok((here, there))
}

/// Measures it.
pub(crate) fn run(bench: &mut Bench, peers: &mut Peers, npm: Option<&NpmInput>) -> Result<()> {
    let archive = input(bench.size.work_files, npm)?;
    fs::write(bench.scratch()?.join("input.tgz"), &archive)?;
    for (place, _) in PLACES {
        let _ = peers.shell(place, "tar --no-same-owner -xzf /mnt/input.tgz")?;
    }
    let _ = peers.shell(Place::Btrfs, "rm input.tgz")?;
    let (sandbox, _) = bench.client_threads.block_on(create(bench))?;
    let wrote = bench.client_threads.block_on(sandbox.write("/vercel/sandbox", archive));
    ensure!(wrote.status == 200, "{wrote}");
    for case in cases(npm.is_some()) {
        let has = bench.client_threads.block_on(sandbox.sh(&format!("command -v {}", case.needs)));
        if has.exit != Some(0) {
            let (name, needs, image) = (case.name, case.needs, &bench.image);
            bench.skipped.push(format!("{name}: the image {image} has no {needs}"));
            continue;
        }
        let (here, there) = rounds(bench, peers, &sandbox, &case)?;
        let mut row = bench.row("work", format!("{}: inside", case.name), "ms", &here);
        let (ratio, limit) = (row.median / there[0].median(), case.limit);
        for (samples, (_, name)) in there.iter().zip(PLACES) {
            row = row.versus(name, samples);
        }
        bench.add(row.want(format!("≤ {limit} × the host's btrfs"), ratio <= limit));
        for (samples, (place, name)) in there.iter().zip(PLACES) {
            let row = bench.row("work", format!("{}: {name}", case.name), "ms", samples);
            let plain = place == Place::Podman && bench.image == "host";
            bench.add(if plain {
                row.note("on the host's btrfs, without an overlay")
            } else {
                row
            });
        }
    }
    let _ = bench.client_threads.block_on(delete(&sandbox))?;
    Ok(())
}
