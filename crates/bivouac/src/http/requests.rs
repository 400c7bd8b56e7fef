//! JSON bodies that create and change sandboxes and start commands: the tables of
//! reference/vercel-api.md §2.2, §2.5, §2.7 and §2.9.
//!
//! Owns: the step from what clients write to what the engine takes. Invariant: everything that can
//! be judged without state is judged here, before the engine is asked, and the refusal names the
//! field. Fields that this version does not know are ignored: clients pass private ones on.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bivouac_engine::{
    Clock as _, CreateSandbox, CredentialSpec, ForkSandbox, SystemClock, UpdateSandbox,
};
use bivouac_types::command::CommandSpec;
use bivouac_types::drive::{DriveMode, Mount, Mounts, check_mounts};
use bivouac_types::id::ValueId;
use bivouac_types::life::LifeChange;
use bivouac_types::name::check_sandbox_name;
use bivouac_types::policy::{Draft, NetworkPolicy};
use bivouac_types::sandbox::{
    KeepLastSnapshots, Resources, Source, check_env, check_ports, check_tags, check_timeout,
};
use bivouac_types::secret::Secret;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use utoipa::ToSchema;

use super::error::ApiError;
use super::own_pause::LifeBody;
use super::secrets::CredentialBody;

/// Words that `runtime` takes.
const RUNTIMES: [&str; 4] = ["node22", "node24", "node26", "python3.13"];
/// Longest image name, region, network id.
const MAX_WORD: usize = 255;
/// Longest user name and password of a source.
const MAX_LOGIN: usize = 4096;
/// Longest URL of a source.
const MAX_URL: usize = 2048;
/// Most snapshots that `keepLastSnapshots` may keep.
const MAX_KEEP: i64 = 100;
/// Shortest timeout of a command, ms.
const MIN_COMMAND_TIMEOUT_MS: i64 = 100;

/// Tells "absent" from "null", which clears.
pub(super) fn nullable<'de, D, T>(deserializer: D) -> Result<Option<Option<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::<T>::deserialize(deserializer).map(Some)
}

/// Virtual CPUs and memory.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ResourcesBody {
    /// One, or an even number.
    vcpus: i64,
    /// MB; if sent, 2048 for each vcpu.
    memory: Option<i64>,
    /// Most bytes over the image; absent: as it is, else the engine's `--disk`; 0 is the engine's again.
    #[serde(rename = "diskBytes")]
    disk_bytes: Option<i64>,
}

/// Where the first files come from.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SourceBody {
    /// `git`, `tarball` or `snapshot`.
    r#type: String,
    url: Option<String>,
    depth: Option<i64>,
    revision: Option<String>,
    username: Option<String>,
    password: Option<String>,
    snapshot_id: Option<String>,
}

/// How many snapshots are kept.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KeepLastBody {
    count: i64,
    /// ms; 0 is never.
    expiration: Option<i64>,
    delete_evicted: Option<bool>,
}

/// A drive of a sandbox.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct MountBody {
    /// Its name.
    drive: String,
    /// `read-write` (the default) or `snapshot`; older clients write `read-only` for the latter.
    mode: Option<String>,
}

/// Body of a create.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CreateBody {
    /// Id or slug.
    pub(crate) project_id: Option<String>,
    name: Option<String>,
    ports: Option<Vec<i64>>,
    source: Option<SourceBody>,
    /// ms.
    timeout: Option<i64>,
    resources: Option<ResourcesBody>,
    runtime: Option<String>,
    image: Option<String>,
    persistent: Option<bool>,
    #[schema(value_type = Option<Object>)]
    network_policy: Option<Value>,
    network_id: Option<String>,
    env: Option<BTreeMap<String, String>>,
    tags: Option<BTreeMap<String, String>>,
    /// ms; 0 is never.
    snapshot_expiration: Option<i64>,
    keep_last_snapshots: Option<KeepLastBody>,
    /// Drives by their absolute paths inside.
    mounts: Option<BTreeMap<String, MountBody>>,
    region: Option<String>,
    failover_regions: Option<Vec<String>>,
    /// Ready-made credentials, an addition of ours: they add to the policy.
    credentials: Option<Vec<CredentialBody>>,
    /// What ends and wakes it, an addition of ours.
    life: Option<LifeBody>,
    /// The official command line sends it.
    #[serde(rename = "__interactive")]
    interactive: Option<bool>,
}

/// Body of an update: absent fields stay as they are, null clears.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct UpdateBody {
    persistent: Option<bool>,
    resources: Option<ResourcesBody>,
    timeout: Option<i64>,
    #[schema(value_type = Option<Object>)]
    network_policy: Option<Value>,
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<String>)]
    network_id: Option<Option<String>>,
    tags: Option<BTreeMap<String, String>>,
    env: Option<BTreeMap<String, String>>,
    ports: Option<Vec<i64>>,
    snapshot_expiration: Option<i64>,
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<KeepLastBody>)]
    keep_last_snapshots: Option<Option<KeepLastBody>>,
    current_snapshot_id: Option<String>,
    region: Option<String>,
    failover_regions: Option<Vec<String>>,
    mounts: Option<BTreeMap<String, MountBody>>,
    runtime: Option<String>,
    /// What ends and wakes it, an addition of ours; in force at once.
    life: Option<LifeBody>,
}

/// Body of a fork: what is to differ from the source.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ForkBody {
    name: Option<String>,
    image: Option<String>,
    #[serde(flatten)]
    update: UpdateBody,
    #[serde(rename = "__interactive")]
    interactive: Option<bool>,
}

/// Body of a start of a command.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CommandRequest {
    /// The executable, looked up in PATH. No shell.
    command: String,
    args: Option<Vec<String>>,
    /// Absent: the session's; relative: below it.
    cwd: Option<String>,
    /// Merged over the sandbox's.
    env: Option<BTreeMap<String, String>>,
    /// As root.
    sudo: Option<bool>,
    /// Answer with a stream that ends with the command.
    pub(crate) wait: Option<bool>,
    /// With `wait`: the output is in the stream.
    pub(crate) logs: Option<bool>,
    /// ms; SIGKILL on expiry.
    timeout: Option<i64>,
    attach_stdin: Option<bool>,
}

impl CreateBody {
    pub(crate) fn wants_interactive(&self) -> bool {
        self.interactive.unwrap_or(false)
    }

    /// What the engine takes.
    pub(crate) fn spec(self, key: Option<String>) -> Result<CreateSandbox, ApiError> {
        if let Some(name) = &self.name {
            check_sandbox_name(name)?;
        }
        let mounts = self.mounts.map(mounts).transpose()?.unwrap_or_default();
        if self.runtime.is_some() && self.image.is_some() {
            return Err(ApiError::field("runtime", "cannot be given together with image"));
        }
        let failover_regions = self.failover_regions.unwrap_or_default();
        check_regions(self.region.as_deref(), &failover_regions)?;
        let env = self.env.unwrap_or_default();
        check_env(&env)?;
        let tags = self.tags.unwrap_or_default();
        check_tags(&tags)?;
        let mut source = self.source;
        Ok(CreateSandbox {
            name: self.name,
            ephemeral: false,
            persistent: self.persistent,
            resources: self.resources.map(ResourcesBody::check).transpose()?,
            timeout_ms: self.timeout.map(check_timeout).transpose()?,
            ports: check_ports(&self.ports.unwrap_or_default())?,
            env,
            tags,
            image: self.image.map(|text| word("image", text)).transpose()?,
            runtime: self.runtime.map(runtime).transpose()?,
            source_login: source.as_mut().map(SourceBody::login).transpose()?.flatten(),
            source: source.map(SourceBody::check).transpose()?,
            policy: self.network_policy.as_ref().map(policy).transpose()?,
            credentials: self
                .credentials
                .unwrap_or_default()
                .into_iter()
                .map(CredentialSpec::from)
                .collect(),
            mounts,
            network_id: self.network_id.map(|text| word("networkId", text)).transpose()?,
            region: self.region,
            failover_regions,
            snapshot_expiration_ms: self.snapshot_expiration.map(expiration).transpose()?,
            keep_last: self.keep_last_snapshots.map(KeepLastBody::check).transpose()?,
            life: self.life.map(LifeChange::from).unwrap_or_default(),
            idempotency_key: key,
        })
    }
}

impl UpdateBody {
    /// What the engine takes.
    pub(crate) fn change(self) -> Result<UpdateSandbox, ApiError> {
        let mounts = self.mounts.map(mounts).transpose()?;
        let failovers = self.failover_regions.as_deref().unwrap_or_default();
        check_regions(self.region.as_deref(), failovers)?;
        if let Some(env) = &self.env {
            check_env(env)?;
        }
        if let Some(tags) = &self.tags {
            check_tags(tags)?;
        }
        let network_id = match self.network_id {
            Some(Some(text)) => Some(Some(word("networkId", text)?)),
            other => other,
        };
        let keep_last = match self.keep_last_snapshots {
            Some(Some(keep)) => Some(Some(keep.check()?)),
            Some(None) => Some(None),
            None => None,
        };
        Ok(UpdateSandbox {
            persistent: self.persistent,
            resources: self.resources.map(ResourcesBody::check).transpose()?,
            timeout_ms: self.timeout.map(check_timeout).transpose()?,
            ports: self.ports.map(|ports| check_ports(&ports)).transpose()?,
            env: self.env,
            tags: self.tags,
            policy: self.network_policy.as_ref().map(policy).transpose()?,
            mounts,
            network_id,
            region: self.region,
            failover_regions: self.failover_regions,
            snapshot_expiration_ms: self.snapshot_expiration.map(expiration).transpose()?,
            keep_last,
            life: self.life.map(LifeChange::from),
            current_snapshot_id: self.current_snapshot_id,
            runtime: self.runtime.map(runtime).transpose()?,
        })
    }
}

impl ForkBody {
    pub(crate) fn wants_interactive(&self) -> bool {
        self.interactive.unwrap_or(false)
    }

    /// What the engine takes.
    pub(crate) fn spec(self, key: Option<String>) -> Result<ForkSandbox, ApiError> {
        if let Some(name) = &self.name {
            check_sandbox_name(name)?;
        }
        Ok(ForkSandbox {
            name: self.name,
            image: self.image.map(|text| word("image", text)).transpose()?,
            update: self.update.change()?,
            idempotency_key: key,
        })
    }
}

impl CommandRequest {
    /// What the engine takes.
    pub(crate) fn spec(self) -> Result<CommandSpec, ApiError> {
        let args = self.args.unwrap_or_default();
        let env = self.env.unwrap_or_default();
        check_env(&env)?;
        if self.command.is_empty() {
            return Err(ApiError::field("command", "must not be empty"));
        }
        let texts = [("command", &self.command)].into_iter();
        let texts = texts.chain(args.iter().map(|arg| ("args", arg)));
        for (field, text) in texts.chain(self.cwd.iter().map(|cwd| ("cwd", cwd))) {
            no_nul(field, text)?;
        }
        let timeout_ms = match self.timeout {
            None => None,
            Some(ms) if ms >= MIN_COMMAND_TIMEOUT_MS => u64::try_from(ms).ok(),
            Some(ms) => {
                let reason = format!("must be at least {MIN_COMMAND_TIMEOUT_MS} ms, got {ms}");
                return Err(ApiError::field("timeout", reason));
            }
        };
        Ok(CommandSpec {
            program: self.command,
            args,
            cwd: self.cwd.filter(|cwd| !cwd.is_empty()),
            env,
            sudo: self.sudo.unwrap_or(false),
            timeout_ms,
            attach_stdin: self.attach_stdin.unwrap_or(false),
            tty: None,
            terminal: None,
        })
    }
}

impl ResourcesBody {
    fn check(self) -> Result<Resources, ApiError> {
        let disk_bytes = self.disk_bytes;
        Ok(Resources { disk_bytes, ..Resources::new(self.vcpus, self.memory)? })
    }
}

impl KeepLastBody {
    fn check(self) -> Result<KeepLastSnapshots, ApiError> {
        if !(1..=MAX_KEEP).contains(&self.count) {
            let reason = format!("must be 1 to {MAX_KEEP}, got {}", self.count);
            return Err(ApiError::field("keepLastSnapshots.count", reason));
        }
        let (count, delete_evicted) = (self.count, self.delete_evicted);
        let expiration = self.expiration.map(expiration).transpose()?;
        Ok(KeepLastSnapshots { count, expiration, delete_evicted })
    }
}

impl SourceBody {
    /// What the source's host is shown: never part of the source, which is kept.
    fn login(&mut self) -> Result<Option<Secret>, ApiError> {
        let (user, password) = (self.username.take(), self.password.take());
        if user.is_none() && password.is_none() {
            return Ok(None);
        }
        if self.r#type != "git" {
            return Err(ApiError::field("source.username", "is for a git source"));
        }
        let pair = format!("{}:{}", user.unwrap_or_default(), password.unwrap_or_default());
        if has_control(&pair) || pair.len() > MAX_LOGIN {
            let reason = format!("must have at most {MAX_LOGIN} printable characters");
            return Err(ApiError::field("source.password", reason));
        }
        let pair = Secret::new(pair);
        let coded = STANDARD.encode(pair.expose());
        Ok(Some(Secret::new(format!("Basic {coded}"))))
    }

    fn check(self) -> Result<Source, ApiError> {
        match self.r#type.as_str() {
            "git" => {
                let url = source_url(self.url)?;
                let depth = match self.depth {
                    None => None,
                    Some(depth) => {
                        Some(u32::try_from(depth).ok().filter(|d| *d >= 1).ok_or_else(|| {
                            ApiError::field(
                                "source.depth",
                                format!("must be 1 or more, got {depth}"),
                            )
                        })?)
                    }
                };
                if let Some(revision) = &self.revision
                    && (revision.is_empty() || revision.starts_with('-') || has_control(revision))
                {
                    return Err(ApiError::field("source.revision", "is not a revision"));
                }
                Ok(Source::Git { url, depth, revision: self.revision })
            }
            "tarball" => Ok(Source::Tarball { url: source_url(self.url)? }),
            "snapshot" => match self.snapshot_id {
                Some(snapshot_id) if !snapshot_id.is_empty() => {
                    Ok(Source::Snapshot { snapshot_id })
                }
                _ => Err(ApiError::field("source.snapshotId", "is missing")),
            },
            _ => {
                let reason = "must be 'git', 'tarball' or 'snapshot'";
                Err(ApiError::field("source.type", reason))
            }
        }
    }
}

fn source_url(url: Option<String>) -> Result<String, ApiError> {
    let Some(url) = url else { return Err(ApiError::field("source.url", "is missing")) };
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    let Some(rest) = rest.filter(|_| url.len() <= MAX_URL && !has_control(&url)) else {
        let reason = format!("must be an http:// or https:// URL of at most {MAX_URL} bytes");
        return Err(ApiError::field("source.url", reason));
    };
    if rest.split('/').next().is_some_and(|authority| authority.contains('@')) {
        return Err(ApiError::field("source.url", "must not hold a user name or password"));
    }
    Ok(url)
}

/// A policy in a body of its own, or below `networkPolicy`, with the values that are in it.
pub(crate) fn policy(value: &Value) -> Result<Draft, ApiError> {
    draft("networkPolicy", value)
}

/// A policy that errors call `field`.
pub(crate) fn draft(field: &str, value: &Value) -> Result<Draft, ApiError> {
    let now = u64::try_from(SystemClock.now()).unwrap_or(0);
    let mut failed = None;
    let mut mint = || {
        let mut random = [0u8; 10];
        if let Err(error) = getrandom::fill(&mut random) {
            failed = Some(error);
        }
        ValueId::new(now, random)
    };
    let draft = NetworkPolicy::parse(field, value, &mut mint)?;
    match failed {
        None => Ok(draft),
        // Ids that are not random could be somebody else's.
        Some(error) => {
            tracing::error!(%error, "the system has no randomness");
            let status = axum::http::StatusCode::INTERNAL_SERVER_ERROR;
            Err(ApiError::new(status, "internal_error", "The system has no randomness."))
        }
    }
}

/// An expiration in ms: 0 is never.
pub(crate) fn expiration(ms: i64) -> Result<i64, ApiError> {
    /// Ten years: longer is a mistake, and "never" has its own number.
    const MOST: i64 = 10 * 366 * 86_400_000;
    if (0..=MOST).contains(&ms) {
        return Ok(ms);
    }
    let reason = format!("must be 0 (never) to {MOST} ms, got {ms}");
    Err(ApiError::field("expiration", reason))
}

fn runtime(text: String) -> Result<String, ApiError> {
    if RUNTIMES.contains(&text.as_str()) {
        return Ok(text);
    }
    Err(ApiError::field("runtime", format!("must be one of {}", RUNTIMES.join(", "))))
}

fn word(field: &str, text: String) -> Result<String, ApiError> {
    if text.is_empty() || text.len() > MAX_WORD || has_control(&text) {
        let reason = format!("must have 1 to {MAX_WORD} printable characters");
        return Err(ApiError::field(field, reason));
    }
    Ok(text)
}

fn check_regions(region: Option<&str>, failovers: &[String]) -> Result<(), ApiError> {
    for text in region.into_iter().chain(failovers.iter().map(String::as_str)) {
        let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if text.is_empty() || text.len() > 64 || !text.bytes().all(good) {
            return Err(ApiError::field("region", "is not a region's name"));
        }
    }
    if failovers.len() > 16 {
        return Err(ApiError::field("failoverRegions", "at most 16"));
    }
    if region.is_some_and(|region| failovers.iter().any(|f| f == region)) {
        return Err(ApiError::field("failoverRegions", "must not contain the region itself"));
    }
    Ok(())
}

/// Where a drive goes, as clients write it: a slash at the end says nothing.
pub(crate) fn place(path: &str) -> &str {
    path.strip_suffix('/').filter(|rest| !rest.is_empty()).unwrap_or(path)
}

fn mounts(bodies: BTreeMap<String, MountBody>) -> Result<Mounts, ApiError> {
    let mut mounts = Mounts::new();
    for (path, body) in bodies {
        let mode = body.mode.as_deref().map(DriveMode::parse).transpose()?.unwrap_or_default();
        mounts.insert(place(&path).to_owned(), Mount { drive: body.drive, mode });
    }
    check_mounts(&mounts)?;
    Ok(mounts)
}

fn has_control(text: &str) -> bool {
    text.chars().any(char::is_control)
}

pub(crate) fn no_nul(field: &str, text: &str) -> Result<(), ApiError> {
    if text.contains('\0') {
        return Err(ApiError::field(field, "must not hold a NUL character"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
