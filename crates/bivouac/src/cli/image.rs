//! `bivouac image`: builds, imports, lists and removes the images of this machine; pulls through the engine.
//!
//! All but `pull` works on the folder of images itself, without an engine: several engines share it.
//! Invariant: what it removes nobody uses, by the engines' own leases.

mod import;
mod prune;
pub(crate) mod pull;

use std::path::Path;
use std::time::Duration;

use bivouac_runtime::image::build::{self, BuildError, Built, Progress};
use bivouac_runtime::image::folder::{ImageFolder, Lease, Manifest, RemoveError};
use bivouac_runtime::image::{HOST, UNIVERSAL};
use bivouac_types::oci::Reference;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;
use tokio::time::Instant;

use super::args::{Global, Image, ImagesFolder};
use super::failure::{ExitStatus, Explain as _, Failure, Outcome};
use super::table::{self, Column};
use super::{busy, clock, output, snapshot};
use crate::config::default_images_dir;

const COLUMNS: [Column; 6] = [
    Column::new("NAME"),
    Column::short("DIGEST").spare(4),
    Column::short("SIZE").spare(1),
    Column::short("BUILT").spare(2),
    Column::short("STATE").spare(3),
    Column::text("HOLDS").spare(5),
];

/// How long an engine may take to let go of an image whose last sandbox has just been removed.
const LETTING_GO: Duration = Duration::from_secs(5);

/// Does what `image …` says.
pub(crate) fn run(global: &Global, args: Image) -> Outcome {
    match args {
        Image::Build { name: _, rebuild, folder } => make(global, &open(&folder)?, rebuild),
        Image::Pull(args) => super::client_runtime(async {
            match pull::run(global, args).await {
                Err(failure) => Err(super::hints::look_up(global, failure).await),
                done => done,
            }
        }),
        Image::Import { from, name, reference, folder } => {
            import::run(global, &open(&folder)?, &from, name, reference)
        }
        Image::Ls { folder } => list(global, &open(&folder)?),
        Image::Inspect { name, folder } => inspect(global, &open(&folder)?, &name),
        Image::Prune { all, dry_run, folder } => prune::run(global, &open(&folder)?, all, dry_run),
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
    let mut screen = Screen::new(global);
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
    fn new(global: &Global) -> Self {
        let bar = busy::drawable(global).then(|| {
            // Drawn by this thread alone: the build starts a process, and a fork wants no threads.
            let target = ProgressDrawTarget::stderr_with_hz(8);
            let bar = ProgressBar::with_draw_target(Some(1000), target);
            if let Ok(style) =
                ProgressStyle::with_template("{elapsed:>4} [{bar:30}] {percent:>3}% {msg}")
            {
                bar.set_style(style.progress_chars("=> "));
            }
            busy::drawn(&bar);
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

    /// A step of a pull.
    fn step(&mut self, step: &str) {
        self.show(&Progress::Step(output::printable(step)));
    }

    /// So many thousandths of a pull's bytes.
    fn part(&mut self, thousandths: u64) {
        self.show(&Progress::Done(u32::try_from(thousandths.min(1000)).unwrap_or(1000)));
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.end();
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
            match &manifest.oci {
                Some(origin) if origin.source == manifest.name => "registry".to_owned(),
                Some(origin) => origin.source.clone(),
                None => manifest.runtimes.keys().cloned().collect::<Vec<_>>().join(", "),
            },
        ]);
        if let Some(damage) = damage {
            output::warning(&damage);
        }
    }
    if global.json {
        output::json(&values.into())?;
        return Ok(ExitStatus::Success);
    }
    table::print(&COLUMNS, rows)?;
    if images.is_empty() {
        output::hint(&format!(
            "sandboxes use '{HOST}', which needs no build; for the other: bivouac image build {UNIVERSAL}"
        ));
    }
    Ok(ExitStatus::Success)
}

/// The image of a name, as people write it: of a reference without a tag, `latest`.
fn find(folder: &ImageFolder, name: &str) -> Outcome<Option<Manifest>> {
    if let Some(found) = folder.find(name)? {
        return Ok(Some(found));
    }
    match Reference::parse(name) {
        Ok(read) => Ok(folder.find(&read.to_string())?),
        Err(_) => Ok(None),
    }
}

fn inspect(global: &Global, folder: &ImageFolder, name: &str) -> Outcome {
    let Some(manifest) = find(folder, name)? else { return Err(unknown(folder, name)?) };
    let leases = folder.leases(&manifest)?;
    let damage = folder.check(&manifest).err().map(|e| e.to_string());
    let mut value = shown(&manifest, &leases);
    value["damage"] = damage.clone().into();
    if global.json {
        output::json(&value)?;
        return Ok(ExitStatus::Success);
    }
    let mut rows = vec![
        ("name", manifest.name.clone()),
        ("reference", manifest.reference()),
        ("size", snapshot::size(manifest.bytes)),
        ("built", format!("{} ago", clock::span(clock::now_ms() - manifest.built_at))),
        ("architecture", manifest.architecture.clone()),
    ];
    if let Some(origin) = &manifest.oci {
        let config = &origin.config;
        rows.push(("source", origin.source.clone()));
        rows.extend(origin.manifest.iter().map(|digest| ("manifest", digest.clone())));
        rows.extend(origin.index.iter().map(|digest| ("index", digest.clone())));
        rows.push(("config", origin.config_digest.clone()));
        for layer in &origin.layers {
            rows.push(("layer", format!("{} {}", layer.digest, snapshot::size(layer.size))));
        }
        rows.extend(config.env.iter().map(|(name, text)| ("variable", format!("{name}={text}"))));
        rows.push(("folder", config.folder().unwrap_or_else(|| "/vercel/sandbox".to_owned())));
    } else {
        let all = manifest.runtimes.iter().chain(&manifest.tools);
        rows.extend(all.map(|(name, version)| ("holds", format!("{name} {version}"))));
    }
    rows.extend(leases.iter().map(|l| ("used by", l.data_dir.display().to_string())));
    rows.extend(damage.iter().map(|damage| ("damage", damage.clone())));
    let rows = rows.into_iter().map(|(key, text)| vec![key.to_owned(), text]);
    output::table(&["FIELD", "VALUE"], rows.collect())?;
    Ok(ExitStatus::Success)
}

/// The failure of a name that no image has.
fn unknown(folder: &ImageFolder, name: &str) -> Outcome<Failure> {
    let failure = Failure::new(format!("there is no image '{name}'"));
    let known: Vec<String> = folder.list()?.iter().map(Manifest::reference).collect();
    Ok(match known.is_empty() {
        true if name == HOST => failure.hint("'host' is this machine's own /usr: no file of ours"),
        true => failure.hint("no image is built here"),
        false => failure.hint(format!("there is: {}", known.join(", "))),
    })
}

fn remove(folder: &ImageFolder, name: &str) -> Outcome<Manifest> {
    let Some(manifest) = find(folder, name)? else { return Err(unknown(folder, name)?) };
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
