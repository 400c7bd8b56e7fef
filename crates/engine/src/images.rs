//! Images of registries: pulling them, and how they say that they are run.
//!
//! Owns the pulls at work and what images say of themselves. Invariants: one pull of a reference at a time, for
//! everybody who asks meanwhile; a reference that is here means what it meant when it was pulled, until
//! somebody pulls it again; one with a digest is never asked for twice; a pull goes on when whoever asked has
//! left, and leaves nothing half-made when the engine ends. A login is used for one pull and kept nowhere.
//! Called by HTTP (`images/pull`) and by `resolve`, for a create that names an image that is not here.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bivouac_runtime::RuntimeError;
use bivouac_runtime::image::blobs::KEPT_BYTES;
use bivouac_runtime::image::build::{BuildError, Progress};
use bivouac_runtime::image::oci::{Cancel, Parts, make, present};
use bivouac_runtime::image::{ImageFolder, Manifest};
use bivouac_types::access::Verb;
use bivouac_types::name::Namespace;
use bivouac_types::oci::{ImageConfig, Reference};
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use rustls::ClientConfig;
use tokio::sync::{oneshot, watch};

use crate::Engine;
use crate::api::Principal;
use crate::error::{Error, ErrorKind};
use crate::inner::{Inner, locked};
use crate::registry::{Fetching, Login, PullError, Registry};

/// How often watchers hear of a fetch.
const TELL: Duration = Duration::from_millis(200);

/// What is asked of a pull.
#[derive(Debug, Clone, Default)]
pub struct PullImage {
    /// `docker://HOST/REPOSITORY[:TAG|@sha256:…]`.
    pub image: String,
    /// With whose login; it is kept nowhere.
    pub login: Option<Login>,
    /// Name of a secret of the project that holds `USER:PASSWORD`, instead.
    pub secret: Option<String>,
    /// Plain HTTP may go elsewhere than to loopback.
    pub insecure: bool,
    /// Ask nobody when an image of that name is here.
    pub if_missing: bool,
}

/// How a pull is going.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullState {
    /// What is being done.
    pub step: String,
    /// Bytes of layers that are at hand.
    pub bytes: u64,
    /// Of so many; 0 while that is not known.
    pub total: u64,
    /// Bytes that came over the wire.
    pub fetched: u64,
    /// Layers of the image.
    pub layers: u64,
}

/// What came of a pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledImage {
    /// Its name: the reference.
    pub name: String,
    /// The name with our digest: this version for ever.
    pub reference: String,
    /// Our digest.
    pub digest: String,
    /// The registry's digest of its manifest.
    pub manifest: Option<String>,
    /// Size of its file.
    pub bytes: u64,
    /// Whether something had to be made.
    pub new: bool,
    /// Bytes that came over the wire.
    pub fetched: u64,
}

type SharedPull = Shared<BoxFuture<'static, Result<PulledImage, Error>>>;

/// A pull at work.
#[derive(Clone)]
pub struct Pull {
    /// How it is going.
    pub state: watch::Receiver<PullState>,
    /// Resolves when it is over.
    pub done: SharedPull,
}

impl std::fmt::Debug for Pull {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pull").field("state", &*self.state.borrow()).finish_non_exhaustive()
    }
}

/// What this engine does about images.
#[derive(Default)]
pub(crate) struct Images {
    /// By reference and user.
    pulls: Arc<Mutex<HashMap<String, Pull>>>,
    /// By reference with our digest: that never changes.
    configs: Mutex<HashMap<String, Arc<ImageConfig>>>,
}

impl Images {
    pub(crate) fn remember(&self, reference: &str, config: ImageConfig) {
        locked(&self.configs).insert(reference.to_owned(), Arc::new(config));
    }

    /// Of an image that was asked for by name since the engine's start.
    pub(crate) fn known(&self, reference: &str) -> Option<Arc<ImageConfig>> {
        locked(&self.configs).get(reference).cloned()
    }
}

impl Engine {
    /// Pulls an image, or joins whoever pulls it.
    ///
    /// # Errors
    /// 400 for a bad reference or login, 404 for a secret; what goes wrong later is told by [`Pull::done`].
    pub async fn pull_image(
        &self,
        who: &Principal,
        ns: &Namespace,
        wanted: PullImage,
    ) -> Result<Pull, Error> {
        who.may(Verb::Write, ns)?;
        crate::resolve::check_namespace(ns)?;
        let reference = read(&wanted.image)?;
        if !who.grant.rules() {
            // What is here may be used; anything else would be pulled.
            let folder = self.inner.runtime.image_folder();
            let there = match (&folder, wanted.if_missing || reference.digest().is_some()) {
                (Some(folder), true) => here(folder, &reference).await?,
                _ => None,
            };
            return there.map(finished).ok_or_else(|| not_here(who, &reference.to_string()));
        }
        tracing::info!(by = %who.name, image = %reference, "pull image");
        let login = match (wanted.login, &wanted.secret) {
            (Some(_), Some(_)) => {
                return Err(Error::invalid("Invalid secret: it excludes a login"));
            }
            (None, Some(name)) => Some(self.inner.login_of(ns, name).await?),
            (login, None) => login,
        };
        self.inner.pull(&reference, login, wanted.insecure, wanted.if_missing).await
    }
}

/// 403 for an image of a registry that somebody may not have pulled.
pub(crate) fn not_here(who: &Principal, name: &str) -> Error {
    let message = format!(
        "The image {name} is not here, and the token '{}' may not pull images: an administrator does that with \
         'bivouac image pull {name}'.",
        who.name
    );
    Error::new(ErrorKind::Forbidden, "forbidden", message).with("right", "admin")
}

/// Reads a reference that a client wrote.
pub(crate) fn read(image: &str) -> Result<Reference, Error> {
    Reference::parse(image)
        .map_err(|why| Error::invalid(format!("Invalid image: '{}' {why}", image.escape_debug())))
}

impl Inner {
    /// How an image says that it is run.
    pub(crate) async fn image_config(&self, reference: &str) -> Arc<ImageConfig> {
        if let Some(known) = self.images.known(reference) {
            return known;
        }
        // One that is gone can start nothing any more; whoever needs it says so.
        let config =
            self.runtime.image(reference).await.map(|image| image.config).unwrap_or_default();
        self.images.remember(reference, config.clone());
        Arc::new(config)
    }

    /// Pulls, or joins whoever pulls the same.
    pub(crate) async fn pull(
        &self,
        reference: &Reference,
        login: Option<Login>,
        insecure: bool,
        if_missing: bool,
    ) -> Result<Pull, Error> {
        self.check_open()?;
        let folder = self.runtime.image_folder().ok_or_else(|| {
            Error::invalid("Invalid image: this engine's runtime makes no images of registries")
        })?;
        if (if_missing || reference.digest().is_some())
            && let Some(there) = here(&folder, reference).await?
        {
            return Ok(finished(there));
        }
        let tls = self.outcalls.tls().map_err(|why| {
            Error::invalid(format!("The image {reference} cannot be pulled: its registry {why}"))
        })?;
        // Who has another login does not share the other's refusal.
        let user = login.as_ref().map_or("", |login| login.username.as_str());
        let name = format!("{reference} {user}");
        let mut pulls = locked(&self.images.pulls);
        if let Some(pull) = pulls.get(&name) {
            return Ok(pull.clone());
        }
        let (tell, state) = watch::channel(PullState::default());
        let (answer, wait) = oneshot::channel();
        let ended = || {
            Err(Error::new(
                ErrorKind::Unavailable,
                "shutting_down",
                "The engine ended in the middle of a pull; what was fetched is kept for the next.",
            ))
        };
        let done = wait.map(move |outcome| outcome.unwrap_or_else(|_| ended())).boxed().shared();
        let pull = Pull { state, done };
        pulls.insert(name.clone(), pull.clone());
        let at_work = AtWork { pulls: Arc::clone(&self.images.pulls), name };
        let job = Job { folder, reference: reference.clone(), login, insecure, tls, tell };
        let work = crate::request::carried(Box::pin(job.run()));
        self.spawn(async move {
            let outcome = work.await;
            // Whoever comes now looks for itself.
            drop(at_work);
            let _ = answer.send(outcome);
        });
        Ok(pull)
    }

    /// The image of a registry that a create names: as it is here, else pulled now, without a login.
    pub(crate) async fn registry_image(&self, name: &str) -> Result<String, Error> {
        let reference = read(name)?;
        match self.runtime.image(&reference.to_string()).await {
            Ok(image) => {
                self.images.remember(&image.reference, image.config);
                return Ok(image.reference);
            }
            Err(RuntimeError::NoImage(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let pulled = self.pull(&reference, None, false, true).await?.done.await?;
        let image = self.runtime.image(&pulled.reference).await?;
        self.images.remember(&image.reference, image.config);
        Ok(image.reference)
    }

    /// A secret of a project as a login.
    async fn login_of(&self, ns: &Namespace, name: &str) -> Result<Login, Error> {
        let wrong = |why: String| Error::invalid(format!("Invalid secret: {why}"));
        let secret = self.secret_now(ns, name).await.map_err(wrong)?;
        Login::of_pair(&secret)
            .ok_or_else(|| wrong(format!("'{}' does not hold USER:PASSWORD", name.escape_debug())))
    }
}

/// A pull that nobody has to wait for.
fn finished(there: PulledImage) -> Pull {
    let (_, state) = watch::channel(PullState::default());
    Pull { state, done: std::future::ready(Ok(there)).boxed().shared() }
}

/// Takes a pull out of the list, however it ends.
struct AtWork {
    pulls: Arc<Mutex<HashMap<String, Pull>>>,
    name: String,
}

impl Drop for AtWork {
    fn drop(&mut self) {
        locked(&self.pulls).remove(&self.name);
    }
}

/// Ends the making of an image with the task that waits for it.
struct Ends(Arc<Cancel>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BuildError> + Send + 'static,
) -> Result<T, BuildError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(std::io::Error::other(e).into()))
}

/// The image of a reference, if a sound one is here.
async fn here(folder: &ImageFolder, reference: &Reference) -> Result<Option<PulledImage>, Error> {
    let (folder, name) = (folder.clone(), reference.to_string());
    let found = blocking(move || {
        let found = folder.find(&name)?;
        Ok(found.filter(|image| folder.check(image).is_ok()))
    });
    let found = found.await.map_err(|e| unmade(reference, e))?;
    Ok(found.map(|manifest| pulled(manifest, false, 0)))
}

fn pulled(manifest: Manifest, new: bool, fetched: u64) -> PulledImage {
    PulledImage {
        reference: manifest.reference(),
        manifest: manifest.oci.as_ref().and_then(|origin| origin.manifest.clone()),
        name: manifest.name,
        digest: manifest.digest,
        bytes: manifest.bytes,
        new,
        fetched,
    }
}

/// One pull.
struct Job {
    folder: ImageFolder,
    reference: Reference,
    login: Option<Login>,
    insecure: bool,
    tls: Arc<ClientConfig>,
    tell: watch::Sender<PullState>,
}

impl Job {
    fn step(&self, step: impl Into<String>) {
        self.tell.send_modify(|state| state.step = step.into());
    }

    async fn run(mut self) -> Result<PulledImage, Error> {
        let reference = self.reference.clone();
        let failed = |error| unpulled(&reference, error);
        self.step(format!("asking {}", reference.host()));
        let login = self.login.take();
        let tls = Arc::clone(&self.tls);
        let registry =
            Registry::open(tls, &reference, login, self.insecure).await.map_err(failed)?;
        let found = registry.find().await.map_err(failed)?;
        let (folder, name, manifest) =
            (self.folder.clone(), reference.to_string(), found.manifest.clone());
        let same = blocking(move || present(&folder, &name, &name, &manifest));
        if let Some(same) = same.await.map_err(|e| unmade(&reference, e))? {
            return Ok(pulled(same, false, 0));
        }
        self.step("fetching");
        let state = Fetching::default();
        let parts = self.watched(registry.fetch(&self.folder, found, &state), &state).await;
        let parts = parts.map_err(failed)?;
        let made = self.make(parts).await.map_err(|e| unmade(&reference, e))?;
        tracing::info!(image = %reference, digest = made.digest, "pulled image");
        self.trim();
        Ok(pulled(made, true, state.fetched.load(Ordering::Relaxed)))
    }

    /// Tells watchers how a fetch is going, until it is over.
    async fn watched<T>(&self, work: impl Future<Output = T>, fetching: &Fetching) -> T {
        let show = || {
            self.tell.send_if_modified(|state| {
                let now = PullState {
                    step: state.step.clone(),
                    bytes: fetching.bytes.load(Ordering::Relaxed),
                    total: fetching.total.load(Ordering::Relaxed),
                    fetched: fetching.fetched.load(Ordering::Relaxed),
                    layers: fetching.layers.load(Ordering::Relaxed),
                };
                let changed = *state != now;
                *state = now;
                changed
            });
        };
        let mut work = std::pin::pin!(work);
        loop {
            match tokio::time::timeout(TELL, &mut work).await {
                Ok(done) => {
                    show();
                    return done;
                }
                Err(_) => show(),
            }
        }
    }

    async fn make(&self, parts: Parts) -> Result<Manifest, BuildError> {
        let cancel = Arc::new(Cancel::default());
        let _ends = Ends(Arc::clone(&cancel));
        let (folder, tell) = (self.folder.clone(), self.tell.clone());
        let told = move |progress: Progress| {
            if let Progress::Step(step) = progress {
                tell.send_modify(|state| state.step = step);
            }
        };
        blocking(move || make(&folder, parts, &cancel, told)).await
    }

    /// Keeps the pieces that are kept bounded.
    fn trim(&self) {
        let blobs = self.folder.blobs();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = blobs.prune(KEPT_BYTES, false) {
                tracing::warn!(%error, "old pieces of images cannot be removed");
            }
        });
    }
}

/// Why an image was not pulled, for whoever asked.
fn unpulled(reference: &Reference, error: PullError) -> Error {
    let host = reference.host();
    match error {
        PullError::Missing => Error::not_found(format!(
            "There is no image {reference}: the registry {host} does not have it, or does not show it to this login."
        )),
        PullError::Denied(why) => {
            let message = format!(
                "The image {reference} cannot be pulled: the registry {host} {why}. Give a login with --auth-file or --registry-secret."
            );
            Error::new(ErrorKind::Forbidden, "image_denied", message)
        }
        PullError::Failed(why) => {
            let message =
                format!("The image {reference} cannot be pulled: the registry {host} {why}.");
            Error::new(ErrorKind::Invalid, "image_unavailable", message)
        }
        PullError::Unfit(why) => {
            let message = format!("The image {reference} cannot be used here: {why}.");
            Error::new(ErrorKind::Invalid, "image_unfit", message)
        }
        PullError::Room(why) => {
            let message = format!("The image {reference} cannot be pulled: {why}.");
            Error::new(ErrorKind::TooMany, "no_capacity", message)
        }
        PullError::Host(error) => {
            let message = format!("The image {reference} could not be kept; see the engine's log.");
            Error::internal(message).because(std::io::Error::other(error))
        }
    }
}

/// Why an image was not made, for whoever asked.
fn unmade(reference: &Reference, error: BuildError) -> Error {
    match error {
        BuildError::Unfit(why) => {
            let message = format!("The image {reference} cannot be used here: {why}.");
            Error::new(ErrorKind::Invalid, "image_unfit", message)
        }
        BuildError::Failed { message, log } => {
            tracing::warn!(image = %reference, message, log, "an image could not be made");
            let message = format!("The image {reference} cannot be used here: {message}.");
            Error::new(ErrorKind::Invalid, "image_unfit", message)
        }
        BuildError::Interrupted(_) => {
            let message =
                "The engine ended in the middle of a pull; what was fetched is kept for the next.";
            Error::new(ErrorKind::Unavailable, "shutting_down", message)
        }
        BuildError::Io(error) => {
            let message = format!("The image {reference} could not be made; see the engine's log.");
            Error::internal(message).because(error)
        }
    }
}
