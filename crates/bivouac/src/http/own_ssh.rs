//! Additions of ours about SSH: the engine's host key, the tunnel to a sandbox, registered keys. Below
//! `/api/bivouac/v1`.
//!
//! Invariant: a tunnel is agreed to when the caller may use the sandbox; what goes through it is SSH, which checks
//! its own part. Asked by `bivouac ssh`, `ssh-config` and `ssh-key`.

use axum::Json;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use bivouac_engine::{NewSshKey, SshKey};
use bivouac_types::Millis;
use russh::keys::ssh_key::{HashAlg, PublicKey};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::App;
use super::body::JsonBody;
use super::error::ApiError;
use super::scope::{Call, Seg};
use super::tunnel;
use crate::ssh::Door;

/// Longest key that is read.
const MAX_KEY: usize = 16 << 10;

pub(super) fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(show))
        .routes(routes!(open_tunnel))
        .routes(routes!(list, add))
        .routes(routes!(remove))
}

/// How the engine serves SSH.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SshBody {
    /// The engine's host key, as a line of known_hosts has it behind the name.
    host_key: String,
    /// Its fingerprint.
    fingerprint: String,
    /// Where `serve --ssh` listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    /// Whether `ssh -A` is let in.
    agent_forwarding: bool,
}

/// A registered public key.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SshKeyView {
    name: String,
    fingerprint: String,
    /// In OpenSSH's form.
    public_key: String,
    created_at: Millis,
    /// When it last opened a connection, to the minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_used_at: Option<Millis>,
}

impl From<SshKey> for SshKeyView {
    fn from(of: SshKey) -> Self {
        let SshKey { name, fingerprint, public_key, token: _, created_at, last_used_at } = of;
        Self { name, fingerprint, public_key, created_at, last_used_at }
    }
}

/// Registered keys.
#[derive(Debug, Serialize, ToSchema)]
struct SshKeysBody {
    keys: Vec<SshKeyView>,
}

/// Answer with one key.
#[derive(Debug, Serialize, ToSchema)]
struct SshKeyBody {
    key: SshKeyView,
}

/// A key to be registered.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct AddKeyBody {
    /// What it is called; absent is the key's comment.
    name: Option<String>,
    /// A line of a `.pub` file.
    public_key: String,
}

fn unavailable() -> ApiError {
    let message = "This engine serves no SSH.";
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "ssh_unavailable", message)
}

/// Show how the engine serves SSH: host key, address
#[utoipa::path(get, path = "/bivouac/v1/ssh", tag = "bivouac",
    responses((status = 200, body = SshBody)))]
async fn show(State(app): State<App>, _call: Call) -> Result<Json<SshBody>, ApiError> {
    let ssh = app.ssh.as_ref().ok_or_else(unavailable)?;
    Ok(Json(SshBody {
        host_key: ssh.host_key().to_owned(),
        fingerprint: ssh.fingerprint().to_owned(),
        address: ssh.address().map(|address| address.to_string()),
        agent_forwarding: ssh.forwards_agents(),
    }))
}

/// Open an SSH connection to a sandbox: an upgrade to `bivouac-tunnel`; takes `exec`
///
/// The SSH user is the user inside: `root`, or any other name for the default user. A sandbox that does not run is
/// started by the first channel.
#[utoipa::path(get, path = "/bivouac/v1/sandboxes/{name}/ssh", tag = "bivouac",
    params(("name" = String, Path)), responses((status = 101, description = "SSH")))]
async fn open_tunnel(
    State(app): State<App>,
    call: Call,
    Seg(sandbox): Seg<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let (response, opening) = tunnel::accept(request)?;
    let ssh = app.ssh.clone().ok_or_else(unavailable)?;
    let ns = call.namespace(None)?;
    app.engine.reachable(&call.who, &ns, &sandbox).await?;
    let door = Door::Tunnel { who: call.who, ns, sandbox };
    tokio::spawn(async move {
        match opening.await {
            Ok(stream) => ssh.serve(stream, door, None).await,
            Err(error) => tracing::debug!(%error, "a tunnel for SSH was not opened"),
        }
    });
    Ok(response)
}

/// List the SSH keys that the caller registered
#[utoipa::path(get, path = "/bivouac/v1/ssh-keys", tag = "bivouac",
    responses((status = 200, body = SshKeysBody)))]
async fn list(State(app): State<App>, call: Call) -> Result<Json<SshKeysBody>, ApiError> {
    let keys = app.engine.ssh_keys(&call.who).await?;
    Ok(Json(SshKeysBody { keys: keys.into_iter().map(SshKeyView::from).collect() }))
}

/// Register an SSH key with the caller's rights; one that he has registered already is answered
#[utoipa::path(post, path = "/bivouac/v1/ssh-keys", tag = "bivouac",
    request_body = AddKeyBody, responses((status = 200, body = SshKeyBody)))]
async fn add(
    State(app): State<App>,
    call: Call,
    JsonBody(body): JsonBody<AddKeyBody>,
) -> Result<Json<SshKeyBody>, ApiError> {
    let new = read(body)?;
    let key = app.engine.add_ssh_key(&call.who, new).await?;
    Ok(Json(SshKeyBody { key: key.into() }))
}

fn read(body: AddKeyBody) -> Result<NewSshKey, ApiError> {
    let text = body.public_key.trim();
    let bad = |reason: &str| ApiError::field("publicKey", reason.to_owned());
    if text.len() > MAX_KEY || text.contains('\n') {
        return Err(bad("must be one line of a .pub file"));
    }
    let key = PublicKey::from_openssh(text)
        .map_err(|_| bad("must be one line of a .pub file: 'ssh-ed25519 AAAA… name'"))?;
    if key.algorithm().is_rsa() || key.algorithm().is_dsa() {
        return Err(bad(
            "is RSA or DSA, which this engine does not take: use an ed25519 or ECDSA key",
        ));
    }
    let comment = key.comment().as_str_lossy().trim().to_owned();
    let name = body.name.or(Some(comment).filter(|comment| !comment.is_empty()));
    let fingerprint = key.fingerprint(HashAlg::Sha256).to_string();
    let mut bare = key;
    bare.set_comment("");
    let public_key = bare.to_openssh().map_err(|_| bad("cannot be written again"))?;
    let name = name.unwrap_or_else(|| fingerprint.clone());
    Ok(NewSshKey { name, fingerprint, public_key: public_key.trim().to_owned() })
}

/// Remove an SSH key, by its fingerprint or name
#[utoipa::path(delete, path = "/bivouac/v1/ssh-keys/{key}", tag = "bivouac",
    params(("key" = String, Path)), responses((status = 200, body = SshKeyBody)))]
async fn remove(
    State(app): State<App>,
    call: Call,
    Seg(key): Seg<String>,
) -> Result<Json<SshKeyBody>, ApiError> {
    let key = app.engine.remove_ssh_key(&call.who, &key).await?;
    Ok(Json(SshKeyBody { key: key.into() }))
}
