//! Runs fuzz targets for a while: `bivouac-fuzz --seconds 60 [TARGET…]`. Exits with an error at the first
//! input that breaks a promise; such an input belongs into the corpus, beside the repair.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bivouac_fuzz::targets::TARGETS;
use clap::Parser;

/// Gives mutated inputs to the parsers of the egress broker.
#[derive(Debug, Parser)]
struct Args {
    /// Targets; all of them without any.
    targets: Vec<String>,
    /// How long to run each.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Where to begin: another number makes other inputs.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[expect(clippy::print_stdout, reason = "a program's output")]
fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(unknown) =
        args.targets.iter().find(|name| !TARGETS.iter().any(|t| t.name == **name))
    {
        let known = TARGETS.map(|t| t.name).join(", ");
        bail!("there is no target '{unknown}': {known}");
    }
    let time = Duration::from_secs(args.seconds);
    for target in TARGETS
        .iter()
        .filter(|t| args.targets.is_empty() || args.targets.iter().any(|n| n == t.name))
    {
        let start = Instant::now();
        // The clock costs more than most inputs: it is asked once in a while.
        let more = |number: u64| !number.is_multiple_of(256) || start.elapsed() < time;
        let inputs = bivouac_fuzz::run(target, args.seed, more)
            .map_err(|finding| anyhow::anyhow!("{finding}"))
            .with_context(|| format!("target {}, seed {}", target.name, args.seed))?;
        println!("{}: {inputs} inputs in {:?}, none bad", target.name, start.elapsed());
    }
    Ok(())
}
