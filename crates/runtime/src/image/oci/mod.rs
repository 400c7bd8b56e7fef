//! OCI images become images of ours: layers on each other, a user for sandboxes, one EROFS file.
//!
//! Whoever has the layers (the engine's registry client, or the reader of layouts in [`layout`]) says what they
//! are in [`Parts`]; [`make`] has the worker of builds put them together (`flatten`, `finish`) and publishes the
//! result. Invariants: each layer is hashed as it is unpacked, and one that is not what the configuration names
//! makes no image; the same parts make the same digest; however it ends, nothing is left but a folder
//! `import-*.tmp` whose lock nobody holds. Called by `bivouac image import` and by `LinuxRuntime`.

pub(crate) mod finish;
pub(crate) mod flatten;
pub mod layout;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use bivouac_types::oci::{Config, ImageConfig, Platform};
use serde::{Deserialize, Serialize};

use super::build::starter::{Job, Worker};
use super::build::worker;
use super::build::{BuildError, Progress, digest, failed};
use super::folder::{ImageFolder, Manifest, Origin, OriginLayer};

/// Changes when the same parts make another tree.
const RECIPE: &str = "oci 1";
/// One layer of an image, at hand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// The file that holds it.
    pub file: PathBuf,
    /// What it says it is; tells how it is compressed. Absent: its first bytes tell.
    pub media_type: Option<String>,
    /// Hash of the file as it is.
    pub digest: String,
    /// Bytes of the file as it is.
    pub size: u64,
}

/// All that an image is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts {
    /// The name that it gets: a reference, or one that `check_local_name` takes.
    pub name: String,
    /// Where it came from, for people.
    pub source: String,
    /// Digest of its manifest, when it has one.
    pub manifest: Option<String>,
    /// Digest of the index that the manifest was chosen from.
    pub index: Option<String>,
    /// Digest of its configuration.
    pub config_digest: String,
    /// What the configuration says.
    pub config: Config,
    /// The layers, the lowest first.
    pub layers: Vec<Layer>,
}

/// What the worker is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) layers: Vec<Layer>,
    pub(crate) diff_ids: Vec<String>,
    pub(crate) config: ImageConfig,
}

/// Asks a making to end early, from another thread.
#[derive(Debug, Default)]
pub struct Cancel(AtomicBool);

impl Cancel {
    /// Ends it soon.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// An image of that name that was made of these parts, so that nothing has to be made. When another name
/// has it, this one gets it too.
///
/// # Errors
/// The folder cannot be read or written.
pub fn present(
    folder: &ImageFolder,
    name: &str,
    source: &str,
    manifest: &str,
) -> Result<Option<Manifest>, BuildError> {
    let of = |m: &Manifest| {
        m.recipe == RECIPE
            && m.oci.as_ref().is_some_and(|o| o.manifest.as_deref() == Some(manifest))
            && folder.check(m).is_ok()
    };
    let mut all: Vec<Manifest> = folder.list()?.into_iter().filter(of).collect();
    // The name's own first.
    all.sort_by_key(|m| m.name != name);
    let Some(mut found) = all.into_iter().next() else { return Ok(None) };
    found.name = name.to_owned();
    found.built_at = now_ms();
    if let Some(origin) = &mut found.oci {
        origin.source = source.to_owned();
    }
    Ok(folder.publish_again(&found)?.then_some(found))
}

/// Makes an image, and makes it known.
///
/// # Errors
/// What is wrong with the parts or missing on this machine; nothing half-made is left.
pub fn make(
    folder: &ImageFolder,
    parts: Parts,
    cancel: &Cancel,
    mut tell: impl FnMut(Progress),
) -> Result<Manifest, BuildError> {
    folder.ensure()?;
    if super::build::tool::find("mkfs.erofs").is_none() {
        let text = "images are written by mkfs.erofs: install it with `apt install erofs-utils`";
        return Err(BuildError::Unfit(text.to_owned()));
    }
    if parts.layers.len() != parts.config.diff_ids.len() {
        let text = format!(
            "the image has {} layers and its configuration names {}",
            parts.layers.len(),
            parts.config.diff_ids.len()
        );
        return Err(BuildError::Unfit(text));
    }
    folder
        .check_room(parts.layers.iter().map(|layer| layer.size).sum())
        .map_err(BuildError::Unfit)?;
    folder.sweep()?;
    let (work, held) = folder.make_import()?;
    let made = in_folder(folder, &work, &held, parts, cancel, &mut tell);
    let removed = std::fs::remove_dir_all(&work);
    let manifest = made?;
    removed?;
    Ok(manifest)
}

fn in_folder(
    folder: &ImageFolder,
    work: &Path,
    held: &super::folder::Held,
    parts: Parts,
    cancel: &Cancel,
    tell: &mut impl FnMut(Progress),
) -> Result<Manifest, BuildError> {
    let task = Task {
        layers: parts.layers.clone(),
        diff_ids: parts.config.diff_ids.clone(),
        config: parts.config.config.clone(),
    };
    let log = work.join("build.log");
    let mut worker = Worker::start(work, held, &log, &Job::Oci(task))?;
    let ended = worker.follow(None, Some(cancel), tell);
    worker.end();
    match ended? {
        Some(Ok(_)) => {}
        Some(Err(message)) => return Err(failed(message, &log)),
        None => {
            let text = "the process that puts the layers together ended unexpectedly".to_owned();
            return Err(failed(text, &log));
        }
    }
    let file = work.join(worker::RESULT);
    tell(Progress::Step("naming it by its content".to_owned()));
    let (file_digest, bytes) = digest(&file)?;
    let manifest = manifest(parts, file_digest, bytes)?;
    folder.publish(&manifest, &file)?;
    tell(Progress::Done(1000));
    Ok(manifest)
}

fn manifest(parts: Parts, file_digest: String, bytes: u64) -> Result<Manifest, BuildError> {
    let platform = if parts.config.platform.architecture.is_empty() {
        Platform::ours()
    } else {
        parts.config.platform
    };
    let layer = |layer: Layer| OriginLayer { digest: layer.digest, size: layer.size };
    let config = parts.config.config;
    // A name with this digest means how it is run as well as what is in it.
    let mut hash = blake3::Hasher::new_derive_key("bivouac image of a file and a configuration");
    hash.update(file_digest.as_bytes());
    hash.update(&serde_json::to_vec(&config).map_err(std::io::Error::from)?);
    Ok(Manifest {
        name: parts.name,
        digest: format!("blake3:{}", hash.finalize().to_hex()),
        bytes,
        built_at: now_ms(),
        recipe: RECIPE.to_owned(),
        architecture: platform.architecture,
        debian: String::new(),
        default_runtime: String::new(),
        runtimes: Default::default(),
        tools: Default::default(),
        oci: Some(Origin {
            source: parts.source,
            manifest: parts.manifest,
            index: parts.index,
            config_digest: parts.config_digest,
            layers: parts.layers.into_iter().map(layer).collect(),
            config,
            file_digest,
        }),
    })
}

fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}
