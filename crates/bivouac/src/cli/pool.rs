//! `bivouac pool`: how a data folder keeps its volumes, and moving them to another way.
//!
//! Works on the data folder itself, without an engine. Invariant: nothing is moved but under the engine's
//! lock.

use std::path::Path;

use bivouac_runtime::pool::{self, Migrated, PoolMode, Shown};
use serde_json::{Value, json};

use super::args::{Global, Pool};
use super::busy::{Busy, guarded_blocking};
use super::client;
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::output;
use super::snapshot::size;
use crate::config::instance;
use crate::serve::lock::{ENGINE_LOCK, FolderLock, LockError};

/// Does what `pool …` says.
pub(crate) fn run(global: &Global, args: &Pool) -> Outcome {
    let data = client::data_dir(global);
    match *args {
        Pool::Show => show(global, &data),
        Pool::Migrate { to } => migrate(global, &data, to.mode()),
    }
}

fn show(global: &Global, data: &Path) -> Outcome {
    let shown =
        pool::show(data).explain(|| format!("could not look at the pool of {}", data.display()))?;
    if global.json {
        output::json(&as_json(data, &shown))?;
        return Ok(ExitStatus::Success);
    }
    let Some(mode) = shown.mode else {
        output::line(&format!("{} has no pool yet", data.display()))?;
        output::hint("the first `bivouac serve` makes one; --pool chooses how");
        return Ok(ExitStatus::Success);
    };
    let mut rows = vec![("mode", mode.to_string())];
    rows.extend(shown.place.iter().map(|place| ("place", place.display().to_string())));
    match &shown.storage {
        Some(storage) => rows.extend([
            ("size", size(storage.size)),
            ("used", size(storage.used)),
            ("free", size(storage.free)),
            ("reserve", size(storage.reserve)),
            ("limits", if storage.limits { "hold" } else { "do not hold" }.to_owned()),
        ]),
        None => rows.push(("mounted", "no".to_owned())),
    }
    rows.extend(shown.check.iter().map(|check| ("check", check.in_words())));
    for place in &shown.leftovers {
        rows.push(("left over", place.display().to_string()));
    }
    for (name, value) in rows {
        output::line(&format!("{name:9}  {}", output::printable(&value)))?;
    }
    Ok(ExitStatus::Success)
}

fn as_json(data: &Path, shown: &Shown) -> Value {
    let storage = shown.storage.as_ref().map(|storage| {
        json!({
            "size": storage.size,
            "used": storage.used,
            "free": storage.free,
            "reserve": storage.reserve,
            "limits": storage.limits,
        })
    });
    json!({
        "dataDir": data,
        "mode": shown.mode,
        "place": shown.place,
        "storage": storage,
        "check": shown.check,
        "leftovers": shown.leftovers,
    })
}

fn migrate(global: &Global, data: &Path, to: PoolMode) -> Outcome {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::new("only root can move the pool: it is mounted for that"));
    }
    let folder = data.display();
    let lock = match FolderLock::take(data, ENGINE_LOCK) {
        Ok(lock) => lock,
        Err(LockError::Held(pid)) => {
            let who = pid.map(|pid| format!(": process {pid}")).unwrap_or_default();
            let text = format!("an engine is running on {folder}{who}; end it first");
            return Err(Failure::new(text));
        }
        Err(error) => return Err(error).explain(|| format!("could not lock {folder}")),
    };
    let name = instance(data).explain(|| format!("could not look at {folder}"))?;
    let (data, busy) = (data.to_owned(), Busy::spinner(global, "looking at the pool"));
    let moving = move || {
        // Until the end, whatever that is: nobody else works on the folder.
        let _lock = lock;
        let mut tell = |what: &str| {
            output::progress(what);
            busy.say(what);
        };
        pool::migrate(&data, &name, to, &mut tell)
            .explain(|| format!("could not move the pool of {}", data.display()))
    };
    // One that is killed in the middle is settled by the next try, or the next start.
    let moved = super::client_runtime(guarded_blocking(moving))?;
    told(global, &moved)
}

fn told(global: &Global, moved: &Migrated) -> Outcome {
    if global.json {
        output::json(&json!({
            "from": moved.from,
            "to": moved.to,
            "volumes": moved.volumes,
            "bytes": moved.bytes,
        }))?;
    } else if moved.from == moved.to {
        output::line(&format!("the mode is {} already", moved.to))?;
    } else {
        output::line(&format!(
            "moved {} volumes ({}) from {} to {}",
            moved.volumes,
            size(moved.bytes),
            moved.from,
            moved.to
        ))?;
    }
    Ok(ExitStatus::Success)
}
