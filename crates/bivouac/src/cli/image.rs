//! `bivouac image`: builds, lists and removes the images of this machine.
//!
//! Works on the folder of images itself, without an engine: several engines share it. Invariant: what it
//! removes nobody uses, by the engines' own leases.

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::Duration;

use bivouac_runtime::image::build::{self, BuildError, Built, Progress};
use bivouac_runtime::image::folder::{ImageFolder, Lease, Manifest, RemoveError};
use bivouac_runtime::image::{HOST, UNIVERSAL};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use tokio::time::Instant;

use super::args::{Global, Image, ImagesFolder};
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::{clock, output, snapshot};
use crate::config::default_images_dir;

/// How long an engine may take to let go of an image whose last sandbox has just been removed.
const LETTING_GO: Duration = Duration::from_secs(5);

/// Does what `image …` says.
pub(crate) fn run(global: &Global, args: Image) -> Outcome {
    match args {
        Image::Build { name: _, rebuild, folder } => make(global, &open(&folder)?, rebuild),
        Image::Ls { folder } => list(global, &open(&folder)?),
        Image::Rm { names, folder } => {
            let folder = open(&folder)?;
            let mut removed = Vec::new();
            let mut worst = ExitStatus::Success;
            for name in &names {
                match remove(&folder, name) {
                    Ok(manifest) => {
                        if !global.json {
                            output::progress(&format!("removed {}", manifest.reference()));
                        }
                        removed.push(shown(&manifest, &[]));
                    }
                    Err(failure) => worst = failure.report(),
                }
            }
            if global.json {
                output::json(&removed.into())?;
            }
            Ok(worst)
        }
    }
}

fn open(folder: &ImagesFolder) -> Outcome<ImageFolder> {
    let path = folder.path.clone().unwrap_or_else(default_images_dir);
    let path = std::path::absolute(&path)
        .explain(|| format!("the image folder '{}' cannot be used", path.display()))?;
    Ok(ImageFolder::new(path))
}

fn make(global: &Global, folder: &ImageFolder, rebuild: bool) -> Outcome {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::new("an image is built as root: its files belong to root and others")
            .hint("start it again with sudo"));
    }
    let mut screen = Screen::new();
    let built = build::universal(folder, rebuild, |progress| screen.show(&progress));
    screen.end();
    let (manifest, new) = match built {
        Ok(Built::New(manifest)) => (manifest, true),
        Ok(Built::Already(manifest)) => (manifest, false),
        Err(error) => return Err(unbuilt(error)),
    };
    if global.json {
        let mut value = shown(&manifest, &[]);
        value["built"] = new.into();
        output::json(&value)?;
        return Ok(ExitStatus::Success);
    }
    output::line(&manifest.reference())?;
    let size = snapshot::size(manifest.bytes);
    let file = folder.path().display();
    if new {
        let took = clock::span(i64::try_from(screen.begin.elapsed().as_millis()).unwrap_or(0));
        output::progress(&format!("built {} in {took}: {size} in {file}", manifest.name));
    } else {
        output::progress(&format!("{} is built already: {size} in {file}", manifest.name));
        output::hint("for newer packages: bivouac image build --rebuild");
    }
    Ok(ExitStatus::Success)
}

fn unbuilt(error: BuildError) -> Failure {
    match error {
        BuildError::Failed { message, log } => {
            if !log.is_empty() {
                output::progress(&output::printable_lines(&log));
            }
            Failure::new(message).hint("nothing is left of the build; mend it and start it again")
        }
        BuildError::Interrupted(signal) => {
            let status = ExitStatus::of_signal(u8::try_from(signal).unwrap_or(15));
            Failure::from(error).status(status)
        }
        error => Failure::from(error),
    }
}

/// What a build shows: a bar on a terminal, else a line a step.
struct Screen {
    bar: Option<ProgressBar>,
    begin: Instant,
}

impl Screen {
    fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            // Drawn by this thread alone: the build starts a process, and a fork wants no threads.
            let target = ProgressDrawTarget::stderr_with_hz(8);
            let bar = ProgressBar::with_draw_target(Some(1000), target);
            if let Ok(style) =
                ProgressStyle::with_template("{elapsed:>4} [{bar:30}] {percent:>3}% {msg}")
            {
                bar.set_style(style.progress_chars("=> "));
            }
            bar
        });
        Self { bar, begin: Instant::now() }
    }

    fn show(&mut self, progress: &Progress) {
        let text = match progress {
            Progress::Waiting(Some(pid)) => {
                format!("another build is at work: process {pid}; waiting for it")
            }
            Progress::Waiting(None) => "another build is at work; waiting for it".to_owned(),
            Progress::Step(step) => step.clone(),
            Progress::Done(part) => {
                if let Some(bar) = &self.bar {
                    bar.set_position(u64::from(*part).max(bar.position()));
                }
                return;
            }
        };
        match &self.bar {
            Some(bar) => bar.set_message(text),
            None => output::progress(&format!("[{:>4}s] {text}", self.begin.elapsed().as_secs())),
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn shown(manifest: &Manifest, leases: &[Lease]) -> Value {
    let mut value = serde_json::to_value(manifest).unwrap_or_default();
    value["reference"] = manifest.reference().into();
    value["usedBy"] = leases.iter().map(|l| l.data_dir.display().to_string()).collect();
    value
}

fn list(global: &Global, folder: &ImageFolder) -> Outcome {
    if rustix::process::geteuid().is_root() {
        folder.sweep().explain(|| "could not remove what an interrupted build left".to_owned())?;
    }
    let images = folder.list()?;
    let mut rows = Vec::new();
    let mut values = Vec::new();
    let now = clock::now_ms();
    let mut named = std::collections::BTreeSet::new();
    for manifest in &images {
        let leases = folder.leases(manifest)?;
        // The newest of a name comes first, and is what the name means.
        let current = named.insert(&manifest.name);
        let damage = folder.check(manifest).err().map(|e| e.to_string());
        let mut value = shown(manifest, &leases);
        value["current"] = current.into();
        value["damage"] = damage.clone().into();
        values.push(value);
        let state = match (&damage, leases.len()) {
            (Some(_), _) => "damaged".to_owned(),
            (None, 0) => "unused".to_owned(),
            (None, 1) => "used by 1 engine".to_owned(),
            (None, n) => format!("used by {n} engines"),
        };
        rows.push(vec![
            if current { manifest.name.clone() } else { manifest.reference() },
            manifest.digest.chars().take(19).collect(),
            snapshot::size(manifest.bytes),
            format!("{} ago", clock::span(now - manifest.built_at)),
            state,
            manifest.runtimes.keys().cloned().collect::<Vec<_>>().join(", "),
        ]);
        if let Some(damage) = damage {
            output::warning(&damage);
        }
    }
    if global.json {
        output::json(&values.into())?;
        return Ok(ExitStatus::Success);
    }
    output::table(&["NAME", "DIGEST", "SIZE", "BUILT", "STATE", "RUNTIMES"], rows)?;
    if images.is_empty() {
        output::hint(&format!(
            "sandboxes use '{HOST}', which needs no build; for the other: bivouac image build {UNIVERSAL}"
        ));
    }
    Ok(ExitStatus::Success)
}

fn remove(folder: &ImageFolder, name: &str) -> Outcome<Manifest> {
    let Some(manifest) = folder.find(name)? else {
        let failure = Failure::new(format!("there is no image '{name}'"));
        let known: Vec<String> = folder.list()?.iter().map(Manifest::reference).collect();
        return Err(match known.is_empty() {
            true if name == HOST => {
                failure.hint("'host' is this machine's own /usr: no file of ours")
            }
            true => failure.hint("no image is built here"),
            false => failure.hint(format!("there is: {}", known.join(", "))),
        });
    };
    let begin = Instant::now();
    loop {
        match folder.remove(&manifest) {
            Ok(()) => return Ok(manifest),
            Err(RemoveError::InUse(_)) if begin.elapsed() < LETTING_GO => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(RemoveError::InUse(leases)) => return Err(in_use(name, &leases)),
            Err(error) => {
                return Err(error).explain(|| format!("could not remove the image '{name}'"));
            }
        }
    }
}

fn in_use(name: &str, leases: &[Lease]) -> Failure {
    let engines: Vec<String> = leases.iter().map(|l| l.data_dir.display().to_string()).collect();
    let first = leases.first().map_or(Path::new("/"), |lease| &lease.data_dir);
    Failure::new(format!(
        "the image '{name}' is in use: sandboxes or snapshots of the engine in {} lie on it",
        engines.join(" and of the engine in ")
    ))
    .hint(format!(
        "bivouac ls -A and bivouac snapshots ls show them (with BIVOUAC_DATA_DIR={}); remove them first",
        first.display()
    ))
}
