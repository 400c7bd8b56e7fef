//! Additions of ours about secrets: set, list and remove them, and give sandboxes credentials that use
//! them. Below `/api/v2`, because they take team and project as the calls around them do.
//!
//! Invariant: a secret goes in and never comes out; what is answered is its name, kind, version and dates.
//! Asked by `bivouac secret`, `bivouac credential` and `--credential`.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use bivouac_engine::{Credential, CredentialChange, CredentialSpec, NewSecret, SecretRow};
use bivouac_types::secret::Secret;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::scope::{Call, Seg};

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(set, remove))
        .routes(routes!(credentials, add))
        .routes(routes!(take_away))
}

/// What may be told of a secret.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SecretView {
    name: String,
    /// Where it comes from: `literal`, `env`, `file`, `exec`, `vault` or `github-app`.
    kind: String,
    /// Grows with each change.
    version: i64,
    created_at: i64,
    updated_at: i64,
}

impl From<SecretRow> for SecretView {
    fn from(row: SecretRow) -> Self {
        Self {
            name: row.name,
            kind: row.kind,
            version: row.version,
            created_at: row.created_at,
            updated_at: row.updated_at,
        }
    }
}

/// Answer with the secrets of a project.
#[derive(Debug, Serialize, ToSchema)]
struct SecretsBody {
    secrets: Vec<SecretView>,
}

/// Answer with a secret, without its value.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SecretBody {
    secret: SecretView,
}

/// Answer with the name of a secret that was removed.
#[derive(Debug, Serialize, ToSchema)]
struct RemovedSecretBody {
    name: String,
}

/// What a secret is set to: a value, or where it comes from.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SetSecretBody {
    /// The secret itself; with `github-app:` the App's private key (PEM).
    value: Option<String>,
    /// `env:NAME`, `file:/path`, `exec:["argv"]`, `vault:MOUNT/PATH#FIELD` or `github-app:APP/INSTALLATION`.
    from: Option<String>,
}

/// List the secrets of a project: names, kinds and dates
#[utoipa::path(get, path = "/v2/secrets", tag = "secrets",
    params(("teamId" = Option<String>, Query), ("projectId" = Option<String>, Query)),
    responses((status = 200, body = SecretsBody)))]
async fn list(State(app): State<App>, call: Call) -> Result<Json<SecretsBody>, ApiError> {
    let rows = app.engine.secrets(&call.who, &call.namespace(None)?).await?;
    Ok(Json(SecretsBody { secrets: rows.into_iter().map(SecretView::from).collect() }))
}

/// Set a secret, new or not; running sandboxes whose policy names it get it at once
#[utoipa::path(put, path = "/v2/secrets/{name}", tag = "secrets",
    params(("name" = String, Path), ("teamId" = Option<String>, Query),
        ("projectId" = Option<String>, Query)),
    request_body = SetSecretBody, responses((status = 200, body = SecretBody)))]
async fn set(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<SetSecretBody>,
) -> Result<Json<SecretBody>, ApiError> {
    let new = NewSecret { from: body.from, value: body.value.map(Secret::new) };
    let row = app.engine.set_secret(&call.who, &call.namespace(None)?, &name, new).await?;
    Ok(Json(SecretBody { secret: row.into() }))
}

/// Remove a secret; requests that need it are refused from then on
#[utoipa::path(delete, path = "/v2/secrets/{name}", tag = "secrets",
    params(("name" = String, Path), ("teamId" = Option<String>, Query),
        ("projectId" = Option<String>, Query)),
    responses((status = 200, body = RemovedSecretBody)))]
async fn remove(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<RemovedSecretBody>, ApiError> {
    app.engine.remove_secret(&call.who, &call.namespace(None)?, &name).await?;
    Ok(Json(RemovedSecretBody { name }))
}

/// A ready-made credential that a sandbox shall have.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct CredentialBody {
    /// `github`, `npm`, `anthropic`, `openai`, `aws`, `basic` or `bearer`.
    r#type: String,
    /// What it is called; absent is its type.
    name: Option<String>,
    /// Name of the secret that it uses; absent is the type's own, for example `GITHUB_TOKEN`.
    secret: Option<String>,
    /// What else the type takes, for example `{"repos": "owner/name", "push": "true"}`.
    options: Option<BTreeMap<String, String>>,
    /// Whose it is: a fork by somebody else does not get it.
    actor: Option<String>,
    /// From when on it counts no more, ms since the epoch.
    expires_at: Option<u64>,
}

impl From<CredentialBody> for CredentialSpec {
    fn from(body: CredentialBody) -> Self {
        Self {
            kind: body.r#type,
            name: body.name,
            secret: body.secret,
            options: body.options.unwrap_or_default(),
            actor: body.actor,
            expires_at: body.expires_at,
        }
    }
}

/// A credential that a sandbox has.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CredentialView {
    name: String,
    /// Entries of the policy with rules of it.
    hosts: Vec<String>,
    /// Names of the secrets that it uses.
    secrets: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    actor: Option<String>,
    /// From when on it counts no more, ms since the epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<u64>,
}

impl From<Credential> for CredentialView {
    fn from(one: Credential) -> Self {
        let Credential { name, hosts, secrets, actor, expires_at } = one;
        Self { name, hosts, secrets, actor, expires_at }
    }
}

/// Answer with the credentials of a sandbox.
#[derive(Debug, Serialize, ToSchema)]
struct CredentialsBody {
    credentials: Vec<CredentialView>,
}

/// Answer with a credential that was added or removed.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CredentialChangeBody {
    credential: CredentialView,
    /// Variables that commands get from now on: dummies, which count only in the right header.
    env: Vec<String>,
    /// Hosts that stay reachable after the removal; close them with a change of the policy.
    still_allowed: Vec<String>,
}

impl From<CredentialChange> for CredentialChangeBody {
    fn from(change: CredentialChange) -> Self {
        let CredentialChange { credential, env, still_allowed } = change;
        Self { credential: credential.into(), env, still_allowed }
    }
}

/// List the credentials of a sandbox
#[utoipa::path(get, path = "/v2/sandboxes/{name}/credentials", tag = "secrets",
    params(("name" = String, Path), ("teamId" = Option<String>, Query),
        ("projectId" = Option<String>, Query)),
    responses((status = 200, body = CredentialsBody)))]
async fn credentials(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
) -> Result<Json<CredentialsBody>, ApiError> {
    let all = app.engine.credentials(&call.who, &call.namespace(None)?, &name).await?;
    let credentials = all.into_iter().map(CredentialView::from).collect();
    Ok(Json(CredentialsBody { credentials }))
}

/// Give a sandbox a credential, in its running session and for those to come
#[utoipa::path(post, path = "/v2/sandboxes/{name}/credentials", tag = "secrets",
    params(("name" = String, Path), ("teamId" = Option<String>, Query),
        ("projectId" = Option<String>, Query)),
    request_body = CredentialBody, responses((status = 200, body = CredentialChangeBody)))]
async fn add(
    State(app): State<App>,
    call: Call,
    Seg(name): Seg<String>,
    JsonBody(body): JsonBody<CredentialBody>,
) -> Result<Json<CredentialChangeBody>, ApiError> {
    let ns = call.namespace(None)?;
    let change = app.engine.add_credential(&call.who, &ns, &name, body.into()).await?;
    Ok(Json(change.into()))
}

/// Take a credential away from a sandbox; requests that use it are cut
#[utoipa::path(delete, path = "/v2/sandboxes/{name}/credentials/{credential}", tag = "secrets",
    params(("name" = String, Path), ("credential" = String, Path),
        ("teamId" = Option<String>, Query), ("projectId" = Option<String>, Query)),
    responses((status = 200, body = CredentialChangeBody)))]
async fn take_away(
    State(app): State<App>,
    call: Call,
    Seg((name, credential)): Seg<(String, String)>,
) -> Result<Json<CredentialChangeBody>, ApiError> {
    let ns = call.namespace(None)?;
    let change = app.engine.remove_credential(&call.who, &ns, &name, &credential).await?;
    Ok(Json(change.into()))
}
