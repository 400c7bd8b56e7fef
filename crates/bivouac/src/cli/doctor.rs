//! `bivouac doctor`: what this machine has and lacks. Works without an engine.

use std::path::Path;

use super::args::Global;
use super::client;
use super::failure::{ExitStatus, Outcome};
use super::output;
use crate::serve::host::{Check, Host, Status};
use crate::serve::record::EngineRecord;

/// Prints every finding; fails when one of them stops the engine.
pub(crate) async fn run(global: &Global) -> Outcome {
    let folder = client::data_dir(global);
    let mut checks = Host::real().all(&folder);
    checks.extend(steering());
    checks.push(engine(&folder).await);
    if global.json {
        output::json(&serde_json::to_value(&checks)?)?;
    } else {
        print(&checks)?;
    }
    let failed = checks.iter().any(|check| check.status == Status::Fail);
    Ok(if failed { ExitStatus::Failure } else { ExitStatus::Success })
}

fn print(checks: &[Check]) -> Outcome<()> {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    for check in checks {
        let (word, colour) = match check.status {
            Status::Ok => ("ok  ", "32"),
            Status::Warn => ("warn", "1;33"),
            Status::Fail => ("fail", "1;31"),
        };
        let word = output::stdout_word(word, colour);
        output::line(&format!(
            "{word}  {:width$}  {}",
            check.name,
            output::printable(&check.found)
        ))?;
        if let Some(mend) = &check.mend {
            output::line(&format!("      {:width$}  mend: {mend}", ""))?;
        }
    }
    Ok(())
}

/// How sandboxes' connections reach their egress broker. Only root can try.
fn steering() -> Option<Check> {
    const NAME: &str = "egress";
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    Some(match bivouac_runtime::linux::steering() {
        Ok(way) => Check::ok(NAME, format!("connections are steered {way}")),
        Err(e) => Check::fail(
            NAME,
            e.to_string(),
            "allow bpf(2) to root, or take a kernel with nf_tables and TPROXY (Debian's have them)",
        ),
    })
}

async fn engine(folder: &Path) -> Check {
    const NAME: &str = "engine";
    let shown = folder.display();
    match EngineRecord::read(folder) {
        Ok(None) => Check::ok(NAME, format!("none is running on {shown}")),
        Ok(Some(record)) if !record.is_alive() => Check::warn(
            NAME,
            format!("process {} of {shown} ended without a word", record.pid),
            "bivouac serve: it adopts the sandboxes that still run",
        ),
        Ok(Some(record)) if client::healthy_engine(folder).await.is_some() => Check::ok(
            NAME,
            format!("{} runs at {}, process {}", record.version, record.address, record.pid),
        ),
        Ok(Some(record)) => Check::fail(
            NAME,
            format!("process {} at {} does not answer", record.pid, record.address),
            "look at its log; end it with SIGTERM and start it again: sandboxes go on",
        ),
        Err(error) => Check::warn(
            NAME,
            format!("cannot read the engine's record in {shown}: {error}"),
            "run doctor as the engine's user",
        ),
    }
}
