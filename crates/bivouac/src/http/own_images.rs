//! An addition of ours: pulling images of registries. Below `/api/bivouac/v1`.
//!
//! Invariants: what can be refused at once is refused with a status; once the stream has begun, what goes wrong is
//! told in it, because clients repeat a request that was answered by a 5xx. A login comes in the request and
//! is kept nowhere. Asked by `bivouac image pull` and before a create that names an image of a registry.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bivouac_engine::{Error, Login, Pull, PullImage, PullState, PulledImage};
use bivouac_types::secret::Secret;
use futures_util::stream;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::ndjson::{KEEP_ALIVE, json_line};
use super::scope::Call;

/// How soon a pull must have failed to be answered with a status.
const AT_ONCE: Duration = Duration::from_millis(300);

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(pull))
}

/// Which image, and with whose login.
#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PullBody {
    /// `docker://HOST/REPOSITORY[:TAG|@sha256:…]`.
    image: String,
    /// User at the registry.
    username: Option<String>,
    /// Password at the registry, or a token that stands for one.
    password: Option<String>,
    /// Name of a secret of the project that holds `USER:PASSWORD`, instead of the two.
    secret: Option<String>,
    /// Plain HTTP may go elsewhere than to loopback.
    #[serde(default)]
    insecure: bool,
    /// Ask nobody when the image is here.
    #[serde(default)]
    if_missing: bool,
}

/// A line of the answer.
#[derive(Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "camelCase")]
pub(crate) enum PullLine {
    /// How it is going.
    #[serde(rename_all = "camelCase")]
    Progress {
        /// What is being done.
        step: String,
        /// Bytes of layers that are at hand.
        bytes: u64,
        /// Of so many; 0 while that is not known.
        total: u64,
        /// Bytes that came over the wire.
        fetched: u64,
        /// Layers of the image.
        layers: u64,
    },
    /// The end: the image is here.
    Image {
        /// The image.
        image: PulledView,
    },
    /// The end: it could not be pulled.
    Error {
        /// Stable word.
        code: String,
        /// Sentence.
        message: String,
    },
}

/// An image that was pulled.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PulledView {
    /// Its name: the reference.
    name: String,
    /// The name with our digest: this version for ever.
    reference: String,
    /// Our digest.
    digest: String,
    /// The registry's digest of its manifest.
    #[serde(skip_serializing_if = "Option::is_none")]
    manifest: Option<String>,
    /// Size of its file.
    bytes: u64,
    /// Whether something had to be made.
    new: bool,
    /// Bytes that came over the wire.
    fetched: u64,
}

impl From<PulledImage> for PulledView {
    fn from(image: PulledImage) -> Self {
        let PulledImage { name, reference, digest, manifest, bytes, new, fetched } = image;
        Self { name, reference, digest, manifest, bytes, new, fetched }
    }
}

/// Pull an image of a registry; a stream of JSON lines, the last of which tells how it ended
#[utoipa::path(post, path = "/bivouac/v1/images/pull", tag = "bivouac",
    params(("projectId" = Option<String>, Query), ("teamId" = Option<String>, Query)),
    request_body = PullBody,
    responses((status = 200, body = PullLine, content_type = "application/x-ndjson")))]
async fn pull(
    State(app): State<App>,
    call: Call,
    JsonBody(body): JsonBody<PullBody>,
) -> Result<Response, ApiError> {
    let login = match (body.username, body.password) {
        (Some(username), Some(password)) => {
            Some(Login { username, password: Secret::new(password) })
        }
        (None, None) => None,
        _ => return Err(ApiError::field("username", "goes with 'password'")),
    };
    let wanted = PullImage {
        image: body.image,
        login,
        secret: body.secret,
        insecure: body.insecure,
        if_missing: body.if_missing,
    };
    let pull = app.engine.pull_image(&call.who, &call.namespace(None)?, wanted).await?;
    if let Ok(Err(error)) = tokio::time::timeout(AT_ONCE, pull.done.clone()).await {
        return Err(error.into());
    }
    let mut response = Body::from_stream(lines(pull)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

fn lines(pull: Pull) -> impl stream::Stream<Item = Result<bytes::Bytes, Infallible>> + Send {
    stream::unfold(Some(pull), |pull| async move {
        let mut pull = pull?;
        tokio::select! {
            biased;
            outcome = pull.done.clone() => Some((Ok(json_line(&ended(outcome))), None)),
            changed = pull.state.changed() => match changed {
                Ok(()) => {
                    let line = json_line(&progress(&pull.state.borrow_and_update().clone()));
                    Some((Ok(line), Some(pull)))
                }
                // Nothing more is told of it: only how it ends.
                Err(_) => {
                    let outcome = pull.done.clone().await;
                    Some((Ok(json_line(&ended(outcome))), None))
                }
            },
            () = tokio::time::sleep(KEEP_ALIVE) => {
                Some((Ok(bytes::Bytes::from_static(b"\n")), Some(pull)))
            }
        }
    })
}

fn progress(state: &PullState) -> PullLine {
    let PullState { step, bytes, total, fetched, layers } = state.clone();
    PullLine::Progress { step, bytes, total, fetched, layers }
}

fn ended(outcome: Result<PulledImage, Error>) -> PullLine {
    match outcome {
        Ok(image) => PullLine::Image { image: image.into() },
        Err(error) => {
            let error = ApiError::from(error);
            PullLine::Error { code: error.code().to_owned(), message: error.message().to_owned() }
        }
    }
}
