//! The client of registries: from a reference to the parts of an image, at hand and checked.
//!
//! Owns the order of questions, retries, and what an answer must be. Invariants: every byte that is kept has been
//! counted and hashed against the digest that names it, from the reference (or the manifest that a tag
//! meant) down to the last layer; a fetch that breaks off goes on where it was; what a registry says is never
//! repeated to clients but for statuses. `wire` guards who is asked, `auth` what is given to whom.
//! Called by `images`.

mod auth;
mod wire;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bivouac_runtime::image::ImageFolder;
use bivouac_runtime::image::blobs::{Blobs, Partial, sha256};
use bivouac_runtime::image::oci::{Layer, Parts};
use bivouac_types::oci::{
    ACCEPTED, Config, Descriptor, Document, Platform, Reference, choose, read_config, read_document,
};
use bivouac_types::secret::Secret;
use futures_util::{FutureExt as _, StreamExt as _};
use hyper::header::{ACCEPT, HeaderName, RANGE};
use rustls::ClientConfig;
use tokio::sync::Mutex;

pub use auth::Login;
use auth::{AuthError, Challenge};
use wire::{Answer, Ask, Origin, Reach, Url, Wire, WireError};

/// Longest manifest or index.
const MAX_MANIFEST: usize = 4 << 20;
/// Longest configuration.
const MAX_CONFIG: u64 = 8 << 20;
/// Most bytes of all layers together, as they come.
const MAX_LAYERS: u64 = 12 << 30;
/// How many layers are fetched at once.
const AT_ONCE: usize = 3;
/// How often a piece is asked for, when no byte of it comes.
const TRIES: u32 = 5;
/// How long the first pause between two tries is.
const PAUSE: Duration = Duration::from_millis(250);
/// How often it is looked whether somebody else has fetched a piece.
const LOOK: Duration = Duration::from_millis(100);

/// Why an image was not fetched.
#[derive(Debug, Clone)]
pub(crate) enum PullError {
    /// The registry has no such image.
    Missing,
    /// It wants another login, or one at all.
    Denied(String),
    /// A sentence without a subject about the registry.
    Failed(String),
    /// A sentence about the image.
    Unfit(String),
    /// There is no room for it.
    Room(String),
    /// On our side.
    Host(String),
}

/// How a fetch is going. Counts up from any task.
#[derive(Debug, Default)]
pub(crate) struct Fetching {
    /// Bytes of layers that are at hand.
    pub(crate) bytes: AtomicU64,
    /// Of so many; 0 while that is not known.
    pub(crate) total: AtomicU64,
    /// Bytes that came over the wire.
    pub(crate) fetched: AtomicU64,
    /// Layers.
    pub(crate) layers: AtomicU64,
}

/// An image whose manifest is known.
pub(crate) struct Found {
    pub(crate) manifest: String,
    index: Option<String>,
    config: Descriptor,
    layers: Vec<Descriptor>,
}

/// A registry, asked about one repository.
pub(crate) struct Registry {
    wire: Wire,
    reference: Reference,
    origin: Origin,
    reach: Reach,
    login: Option<Login>,
    insecure: bool,
    challenge: Option<Challenge>,
    /// Value of `Authorization`.
    token: Mutex<Option<Secret>>,
}

impl From<WireError> for PullError {
    fn from(error: WireError) -> Self {
        Self::Failed(match error {
            WireError::Refused(why) | WireError::Broken(why) => why,
            WireError::NoTls => "speaks no TLS".to_owned(),
        })
    }
}

fn host(e: &io::Error) -> PullError {
    PullError::Host(e.to_string())
}

impl Registry {
    /// Finds out how a registry is talked to.
    pub(crate) async fn open(
        tls: Arc<ClientConfig>,
        reference: &Reference,
        login: Option<Login>,
        insecure: bool,
    ) -> Result<Self, PullError> {
        let wire = Wire::new(tls);
        let mut origin = Origin::new(true, reference.host()).map_err(PullError::Failed)?;
        let first = ask_base(&wire, &origin, insecure).await;
        let (answer, reach) = match first {
            Err(WireError::NoTls) if insecure || origin.is_loopback() => {
                origin = Origin::new(false, reference.host()).map_err(PullError::Failed)?;
                ask_base(&wire, &origin, insecure).await?
            }
            Err(WireError::NoTls) => {
                let why = "speaks no TLS: over plain http it is asked with --insecure only";
                return Err(PullError::Failed(why.to_owned()));
            }
            other => other?,
        };
        let challenge = match answer.status {
            200 => None,
            401 => challenge_of(&answer)?,
            404 => {
                return Err(PullError::Failed("is no registry: it does not know /v2/".to_owned()));
            }
            status => return Err(PullError::Failed(format!("answers {status} at /v2/"))),
        };
        Ok(Self {
            wire,
            reference: reference.clone(),
            origin,
            reach,
            login,
            insecure,
            challenge,
            token: Mutex::new(None),
        })
    }

    /// Asks for a path of the repository, with a login as soon as one is wanted.
    async fn get(&self, path: &str, headers: &[(HeaderName, String)]) -> Result<Answer, PullError> {
        let url = Url {
            origin: self.origin.clone(),
            path: format!("/v2/{}/{path}", self.reference.repository()),
        };
        let mut challenge = self.challenge.clone();
        for last in [false, true] {
            let token = self.authorization(challenge.as_ref()).await?;
            let ask = Ask {
                url: &url,
                headers: headers.to_vec(),
                authorization: token.as_ref(),
                most: Some(self.reach),
                follow: true,
                insecure: self.insecure,
            };
            let (answer, _) = self.wire.get(ask).await?;
            match answer.status {
                401 if !last => {
                    // A token that has run out, or the first question that needs one.
                    challenge = challenge_of(&answer)?.or(challenge);
                    let mut kept = self.token.lock().await;
                    if *kept == token {
                        *kept = None;
                    }
                }
                401 | 403 => {
                    let why = if self.login.is_some() {
                        "does not let this login pull the image"
                    } else {
                        "wants a login for this image"
                    };
                    return Err(PullError::Denied(why.to_owned()));
                }
                429 => {
                    return Err(PullError::Failed(
                        "has had too many requests (429): try again later".to_owned(),
                    ));
                }
                _ => return Ok(answer),
            }
        }
        Err(PullError::Denied("wants another login".to_owned()))
    }

    async fn authorization(
        &self,
        challenge: Option<&Challenge>,
    ) -> Result<Option<Secret>, PullError> {
        let Some(challenge) = challenge else { return Ok(None) };
        // Held while it is asked for: layers that are fetched at once need one token.
        let mut kept = self.token.lock().await;
        if kept.is_none() {
            let repository = self.reference.repository();
            let login = self.login.as_ref();
            let given =
                auth::answer(&self.wire, challenge, login, repository, self.reach, self.insecure)
                    .await;
            *kept = Some(given.map_err(|error| match error {
                AuthError::Denied(why) => PullError::Denied(why),
                AuthError::Wire(error) => error.into(),
            })?);
        }
        Ok(kept.clone())
    }

    /// A document by tag or digest, and its digest.
    async fn document(
        &self,
        version: &str,
        size: Option<u64>,
    ) -> Result<(String, Document), PullError> {
        let headers = [(ACCEPT, ACCEPTED.to_owned())];
        let answer = self.get(&format!("manifests/{version}"), &headers).await?;
        match answer.status {
            200 => {}
            404 => return Err(PullError::Missing),
            status => {
                return Err(PullError::Failed(format!(
                    "answers {status} when asked for the manifest"
                )));
            }
        }
        let told = answer.header("docker-content-digest").map(str::to_owned);
        let text = answer.whole(MAX_MANIFEST).await?;
        let digest = sha256(&text);
        let pinned = bivouac_types::oci::is_digest(version).then(|| version.to_owned());
        for wanted in
            [pinned, told.filter(|told| bivouac_types::oci::is_digest(told))].into_iter().flatten()
        {
            if wanted != digest {
                let why = format!("sent something else than {wanted}: those bytes are {digest}");
                return Err(PullError::Failed(why));
            }
        }
        if size.is_some_and(|size| size != text.len() as u64) {
            return Err(PullError::Failed(format!(
                "sent a manifest of another size than its index says ({digest})"
            )));
        }
        let document =
            read_document(&text).map_err(|why| PullError::Unfit(format!("{digest} {why}")))?;
        Ok((digest, document))
    }

    /// What the reference means now, on this machine.
    pub(crate) async fn find(&self) -> Result<Found, PullError> {
        let ours = Platform::ours();
        let (digest, document) = self.document(self.reference.version(), None).await?;
        let (manifest, index, document) = match document {
            Document::Manifest { .. } => (digest, None, document),
            Document::Index(all) => {
                let chosen = choose(&all, &ours).map_err(PullError::Unfit)?;
                let (inner, document) = self.document(&chosen.digest, Some(chosen.size)).await?;
                (inner, Some(digest), document)
            }
        };
        let Document::Manifest { config, layers } = document else {
            return Err(PullError::Unfit("it is an index in an index".to_owned()));
        };
        if config.size > MAX_CONFIG {
            return Err(PullError::Unfit(format!("its configuration has {} bytes", config.size)));
        }
        let total = layers.iter().try_fold(0u64, |sum, layer| sum.checked_add(layer.size));
        if total.is_none_or(|total| total > MAX_LAYERS) {
            return Err(PullError::Unfit(format!("its layers have more than {MAX_LAYERS} bytes")));
        }
        Ok(Found { manifest, index, config, layers })
    }

    /// Fetches what is not at hand of an image.
    pub(crate) async fn fetch(
        &self,
        folder: &ImageFolder,
        found: Found,
        state: &Fetching,
    ) -> Result<Parts, PullError> {
        folder.ensure().map_err(|e| host(&e))?;
        let blobs = folder.blobs();
        let file = self.blob(&blobs, &found.config, &Fetching::default()).await?;
        let text = tokio::fs::read(&file).await.map_err(|e| host(&e))?;
        let config: Config = read_config(&text, &Platform::ours())
            .map_err(|why| PullError::Unfit(format!("the image {why}")))?;
        let total: u64 = found.layers.iter().map(|layer| layer.size).sum();
        folder.check_room(total).map_err(PullError::Room)?;
        state.total.store(total, Ordering::Relaxed);
        state.layers.store(found.layers.len() as u64, Ordering::Relaxed);
        let mut each = Vec::new();
        for layer in &found.layers {
            each.push(self.blob(&blobs, layer, state).boxed());
        }
        let mut coming = futures_util::stream::iter(each).buffered(AT_ONCE);
        let mut layers = Vec::new();
        while let Some(file) = coming.next().await {
            let descriptor = &found.layers[layers.len()];
            layers.push(Layer {
                file: file?,
                media_type: Some(descriptor.media_type.clone()).filter(|kind| !kind.is_empty()),
                digest: descriptor.digest.clone(),
                size: descriptor.size,
            });
        }
        drop(coming);
        Ok(Parts {
            name: self.reference.to_string(),
            source: self.reference.to_string(),
            manifest: Some(found.manifest),
            index: found.index,
            config_digest: found.config.digest,
            config,
            layers,
        })
    }

    /// One piece, from the folder or from the registry.
    async fn blob(
        &self,
        blobs: &Blobs,
        wanted: &Descriptor,
        state: &Fetching,
    ) -> Result<std::path::PathBuf, PullError> {
        let mut failures = 0;
        let mut fresh = false;
        loop {
            let at_hand = blobs.get(&wanted.digest, wanted.size).map_err(|e| host(&e))?;
            if let Some(path) = at_hand {
                state.bytes.fetch_add(wanted.size, Ordering::Relaxed);
                return Ok(path);
            }
            let (holder, digest, size) = (blobs.clone(), wanted.digest.clone(), wanted.size);
            // What an earlier fetch left is hashed first.
            let begun = tokio::task::spawn_blocking(move || holder.begin(&digest, size)).await;
            let Some(mut partial) =
                begun.map_err(|e| PullError::Host(e.to_string()))?.map_err(|e| host(&e))?
            else {
                tokio::time::sleep(LOOK).await;
                continue;
            };
            if fresh {
                partial.restart().map_err(|e| host(&e))?;
            }
            let had = partial.have();
            let outcome = self.piece(&mut partial, wanted, state).await;
            let moved = partial.have() > had;
            let why = match outcome {
                Ok(()) => {
                    let done = tokio::task::spawn_blocking(move || partial.finish()).await;
                    match done.map_err(|e| PullError::Host(e.to_string()))? {
                        Ok(path) => {
                            state.bytes.fetch_add(wanted.size, Ordering::Relaxed);
                            return Ok(path);
                        }
                        // What an earlier fetch left may be what is wrong: once more, from the first byte.
                        Err(e) if e.kind() == io::ErrorKind::InvalidData && had > 0 && !fresh => {
                            fresh = true;
                            continue;
                        }
                        Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                            return Err(PullError::Failed(format!("sent something else: {e}")));
                        }
                        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                            format!("cut an answer short: {e}")
                        }
                        Err(e) => return Err(host(&e)),
                    }
                }
                Err(Piece::Again(why)) => why,
                Err(Piece::Never(error)) => return Err(error),
            };
            failures = if moved { 1 } else { failures + 1 };
            if failures >= TRIES {
                return Err(PullError::Failed(why));
            }
            tracing::info!(digest = wanted.digest, why, "a registry broke off; going on");
            tokio::time::sleep(PAUSE * 2u32.pow(failures)).await;
        }
    }

    /// Asks for what is missing of a piece, and writes what comes.
    async fn piece(
        &self,
        partial: &mut Partial,
        wanted: &Descriptor,
        state: &Fetching,
    ) -> Result<(), Piece> {
        let have = partial.have();
        if have == wanted.size {
            return Ok(());
        }
        let range = (have > 0).then(|| (RANGE, format!("bytes={have}-")));
        let headers: Vec<_> = range.into_iter().collect();
        let answer = self.get(&format!("blobs/{}", wanted.digest), &headers).await;
        let mut answer = match answer {
            Ok(answer) => answer,
            Err(PullError::Failed(why)) => return Err(Piece::Again(why)),
            Err(other) => return Err(Piece::Never(other)),
        };
        let never = |why: String| Piece::Never(PullError::Failed(why));
        let here = |e: io::Error| Piece::Never(host(&e));
        let start = match answer.status {
            200 => 0,
            206 => match range_start(answer.header("content-range")) {
                Some(start) if start == have => have,
                _ => return Err(never("answers another range than was asked for".to_owned())),
            },
            404 => {
                return Err(never(format!(
                    "has not {}, which the image's manifest names",
                    wanted.digest
                )));
            }
            416 => {
                partial.restart().map_err(here)?;
                return Err(Piece::Again("has fewer bytes than are here already".to_owned()));
            }
            status @ 500.. => return Err(Piece::Again(format!("answers {status}"))),
            status => {
                return Err(never(format!("answers {status} when asked for {}", wanted.digest)));
            }
        };
        let told: Option<u64> = answer.header("content-length").and_then(|text| text.parse().ok());
        if told.is_some_and(|told| told != wanted.size - start) {
            let why =
                format!("says that {} has another size than the manifest says", wanted.digest);
            return Err(never(why));
        }
        if start != have {
            partial.restart().map_err(here)?;
        }
        loop {
            match answer.next().await {
                Ok(None) => return Ok(()),
                Ok(Some(bytes)) => {
                    partial.write(&bytes).map_err(|e| match e.kind() {
                        io::ErrorKind::InvalidData => never(format!("sent too much: {e}")),
                        _ => here(e),
                    })?;
                    state.fetched.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                }
                Err(WireError::Refused(why) | WireError::Broken(why)) => {
                    return Err(Piece::Again(why));
                }
                Err(WireError::NoTls) => return Err(never("speaks no TLS".to_owned())),
            }
        }
    }
}

/// Why a piece did not come.
enum Piece {
    Again(String),
    Never(PullError),
}

async fn ask_base(
    wire: &Wire,
    origin: &Origin,
    insecure: bool,
) -> Result<(Answer, Reach), WireError> {
    let url = Url { origin: origin.clone(), path: "/v2/".to_owned() };
    let ask = Ask {
        url: &url,
        headers: Vec::new(),
        authorization: None,
        most: None,
        follow: false,
        insecure,
    };
    wire.get(ask).await
}

fn challenge_of(answer: &Answer) -> Result<Option<Challenge>, PullError> {
    let values = answer.headers.get_all("www-authenticate");
    let found = auth::challenge(values.iter().filter_map(|value| value.to_str().ok()));
    let unknown = || PullError::Failed("wants a login of a kind that is not known here".to_owned());
    found.map(Some).ok_or_else(unknown)
}

/// The first byte of `bytes 5-9/10`.
fn range_start(text: Option<&str>) -> Option<u64> {
    text?.trim().strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}
