//! The first write to files of the image: inside a sandbox, which copies or shares them then, and in a
//! container of podman; beside the same write to the same files on the host's file systems.
//!
//! Invariant: each file is written to once, by the same program, which takes its own time. Called by
//! `main` after `work`.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::bench::Bench;
use crate::inside;
use crate::peers::{Peers, Place};
use crate::start::{create, delete};
use crate::stats::Samples;

/// What `inside touch` said.
struct Touched {
    small: Samples,
    large: Samples,
    megabytes: u64,
}

fn read(said: &str) -> Result<Touched> {
    let said: Value = serde_json::from_str(said).with_context(|| format!("not JSON: {said}"))?;
    let small = said["small_us"].as_array().context("no small_us")?;
    Ok(Touched {
        small: small.iter().filter_map(Value::as_f64).collect(),
        large: said["large_us"].as_f64().map(|us| us / 1e3).into_iter().collect(),
        megabytes: said["large_bytes"].as_u64().context("no large_bytes")? / 1_000_000,
    })
}

/// On the host: copies first, so that the first write meets a file that is there already, and nobody's
/// else.
fn on_host(bench: &Bench, peers: &mut Peers, place: Place) -> Result<Touched> {
    let (program, small) = ("/mnt/bivouac-bench inside", bench.size.touched);
    let _ = peers
        .shell(place, &format!("{program} pick --small {small} --to picked && sync -f picked"))?;
    let line = format!("{program} touch --small {small} --root picked > /mnt/touched.json");
    let _ = peers.shell(place, &line)?;
    let _ = peers.shell(place, "rm -rf picked")?;
    read(&fs::read_to_string(bench.scratch()?.join("touched.json"))?)
}

fn in_container(bench: &Bench, peers: &mut Peers) -> Result<Touched> {
    let small = bench.size.touched;
    let line = format!("/mnt/bivouac-bench inside touch --small {small} > /mnt/touched.json");
    let _ = peers.shell(Place::Podman, &line)?;
    read(&fs::read_to_string(bench.scratch()?.join("touched.json"))?)
}

fn in_sandbox(bench: &Bench) -> Result<Touched> {
    bench.client_threads.block_on(async {
        let (sandbox, _) = create(bench).await?;
        inside::put(&sandbox).await?;
        let small = bench.size.touched;
        let ran = sandbox.sudo(&format!("{} inside touch --small {small}", inside::PROGRAM)).await;
        ensure!(ran.exit == Some(0), "first writes: {}{}", ran.out(), ran.err());
        let _ = delete(&sandbox).await?;
        read(&ran.out())
    })
}

/// Measures it.
pub(crate) fn run(bench: &mut Bench, peers: &mut Peers) -> Result<()> {
    fs::copy(std::env::current_exe()?, bench.scratch()?.join("bivouac-bench"))?;
    let here = in_sandbox(bench)?;
    let btrfs = on_host(bench, peers, Place::Btrfs)?;
    let ext4 = on_host(bench, peers, Place::Ext4)?;
    let mut others = vec![("the host's btrfs", btrfs), ("the host's ext4", ext4)];
    if bench.image == "host" {
        // Its /usr is the host's own there.
        let sentence = "first writes in podman: the image host has no overlay there";
        bench.skipped.push(sentence.into());
    } else {
        others.push(("podman", in_container(bench, peers)?));
    }
    let mut row = bench.row("work", "first write to a small file of the image", "µs", &here.small);
    for (name, other) in &others {
        row = row.versus(*name, &other.small);
    }
    bench.add(row);
    let name = format!("first write to one of {} MB", here.megabytes);
    let mut row = bench.row("work", name, "ms", &here.large);
    for (name, other) in &others {
        row = row.versus(*name, &other.large);
    }
    bench.add(row);
    Ok(())
}
