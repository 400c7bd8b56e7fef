//! From what a client asked for to a complete sandbox: defaults, checks, image and source.
//!
//! Invariant: everything here happens before anything is made; a refusal has changed nothing.

use bivouac_runtime::RuntimeError;
use bivouac_store::SnapshotRow;
use bivouac_types::drive::check_mounts;
use bivouac_types::id::SnapshotId;
use bivouac_types::image::{
    DEFAULT_RUNTIME, HOST, Named, RUNTIMES, UNIVERSAL, managed_names, named, plain,
};
use bivouac_types::life::{Life, LifeChange, Restart};
use bivouac_types::name::{Namespace, check_sandbox_name, check_scope};
use bivouac_types::oci::is_reference;
use bivouac_types::policy::{Draft, NetworkPolicy};
use bivouac_types::sandbox::{
    DEFAULT_TIMEOUT_MS, KeepLastSnapshots, Resources, Sandbox, Source, check_env, check_ports,
    check_tags, check_timeout,
};

use crate::api::{CreateSandbox, ForkSandbox, Principal, UpdateSandbox};
use crate::credentials;
use crate::egress::check_policy;
use crate::error::{Error, ErrorKind};
use crate::inner::Inner;
use crate::snapshots::check_expiration;
use crate::sources::Fetch;

/// The folder that commands start in.
pub(crate) const CWD: &str = "/vercel/sandbox";
pub(crate) const REGION: &str = "iad1";
const MAX_IMAGE: usize = 255;
const MAX_KEPT: i64 = 100;
/// Smallest disk of a sandbox, bytes: a session writes some of it to start with.
const MIN_DISK: u64 = 16 << 20;

/// Where a new sandbox's files come from, and what it calls itself.
#[derive(Debug, Clone)]
pub(crate) struct Base {
    pub(crate) image: String,
    pub(crate) runtime: String,
    pub(crate) snapshot: Option<SnapshotRow>,
}

/// Everything of a [`Sandbox`] that a client can set.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// A sandbox without ids and times.
    pub(crate) name: Option<String>,
    pub(crate) config: UpdateSandbox,
    pub(crate) base: Base,
    pub(crate) ephemeral: bool,
    pub(crate) key: Option<String>,
    /// What is fetched before the first session runs.
    pub(crate) fetch: Option<Fetch>,
    /// One of several that are shown together.
    pub(crate) unborn: bool,
}

pub(crate) fn check_namespace(ns: &Namespace) -> Result<(), Error> {
    check_scope("teamId", &ns.team)?;
    check_scope("projectId", &ns.project)?;
    Ok(())
}

fn check_keep_last(keep: &KeepLastSnapshots) -> Result<(), Error> {
    if !(1..=MAX_KEPT).contains(&keep.count) {
        let count = keep.count;
        return Err(Error::invalid(format!(
            "Invalid keepLastSnapshots.count: must be 1 to {MAX_KEPT}, got {count}"
        )));
    }
    if let Some(ms) = keep.expiration {
        check_expiration("keepLastSnapshots.expiration", ms)?;
    }
    Ok(())
}

/// Checks what a client wants to set, each field by itself.
pub(crate) fn check_change(change: &UpdateSandbox) -> Result<(), Error> {
    if let Some(ms) = change.timeout_ms {
        check_timeout(ms)?;
    }
    if let Some(ports) = &change.ports {
        check_ports(&ports.iter().map(|p| i64::from(*p)).collect::<Vec<_>>())?;
    }
    if let Some(env) = &change.env {
        check_env(env)?;
    }
    if let Some(tags) = &change.tags {
        check_tags(tags)?;
    }
    if let Some(mounts) = &change.mounts {
        check_mounts(mounts)?;
    }
    if let Some(ms) = change.snapshot_expiration_ms {
        check_expiration("snapshotExpiration", ms)?;
    }
    if let Some(Some(keep)) = &change.keep_last {
        check_keep_last(keep)?;
    }
    if let Some(draft) = &change.policy {
        check_policy("networkPolicy", &draft.policy)?;
    }
    Ok(())
}

/// Refuses a fail-over region that is the region itself.
pub(crate) fn check_regions(region: &str, failover: &[String]) -> Result<(), Error> {
    if failover.iter().any(|f| f == region) {
        return Err(Error::invalid(format!(
            "Invalid failoverRegions: must not contain the region itself ({region})"
        )));
    }
    Ok(())
}

/// Lays a change over a sandbox. Image, runtime and snapshot need the database: see `sandboxes`.
pub(crate) fn apply(change: &UpdateSandbox, sandbox: &mut Sandbox) {
    fn set<T: Clone>(to: &mut T, from: Option<&T>) {
        if let Some(value) = from {
            to.clone_from(value);
        }
    }
    set(&mut sandbox.persistent, change.persistent.as_ref());
    if let Some(resources) = change.resources {
        sandbox.resources = resources.over(sandbox.resources);
    }
    set(&mut sandbox.timeout_ms, change.timeout_ms.as_ref());
    set(&mut sandbox.ports, change.ports.as_ref());
    set(&mut sandbox.env, change.env.as_ref());
    set(&mut sandbox.tags, change.tags.as_ref());
    set(&mut sandbox.policy, change.policy.as_ref().map(|draft| &draft.policy));
    set(&mut sandbox.mounts, change.mounts.as_ref());
    set(&mut sandbox.network_id, change.network_id.as_ref());
    set(&mut sandbox.region, change.region.as_ref());
    set(&mut sandbox.failover_regions, change.failover_regions.as_ref());
    set(&mut sandbox.keep_last, change.keep_last.as_ref());
    if let Some(life) = &change.life {
        life.apply(&mut sandbox.life);
    }
    if change.snapshot_expiration_ms.is_some() {
        sandbox.snapshot_expiration_ms = change.snapshot_expiration_ms;
    }
}

impl Inner {
    /// Most bytes that a sandbox may hold over its image: its own size, and never more than the engine's.
    pub(crate) fn disk_of(&self, resources: &Resources) -> u64 {
        let own = resources.disk_bytes.and_then(|bytes| u64::try_from(bytes).ok());
        own.map_or(self.config.disk_bytes, |own| own.min(self.config.disk_bytes))
    }

    /// Refuses a disk size that this engine cannot give.
    pub(crate) fn check_disk(&self, resources: Option<&Resources>) -> Result<(), Error> {
        let Some(bytes) = resources.and_then(|r| r.disk_bytes).filter(|bytes| *bytes != 0) else {
            return Ok(());
        };
        let most = self.config.disk_bytes;
        if u64::try_from(bytes).is_ok_and(|bytes| (MIN_DISK.min(most)..=most).contains(&bytes)) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "Invalid resources.diskBytes: must be {} to {most} (the engine's --disk), got {bytes}",
            MIN_DISK.min(most)
        )))
    }

    /// The reference of an image that the runtime has.
    pub(crate) async fn image(&self, name: &str) -> Result<String, Error> {
        if name.is_empty() || plain(name).len() > MAX_IMAGE || name.len() > 2 * MAX_IMAGE {
            return Err(Error::invalid(format!(
                "Invalid image: must have 1 to {MAX_IMAGE} characters"
            )));
        }
        let wanted = match named(name) {
            Named::Universal(_) => UNIVERSAL,
            Named::Own(own) => own,
            Named::Unmanaged => return Err(self.no_image("image", name).await?),
        };
        if is_reference(wanted) && plain(wanted) == wanted {
            return self.registry_image(wanted).await;
        }
        match self.runtime.image(wanted).await {
            Ok(image) => {
                self.images.remember(&image.reference, image.config);
                Ok(image.reference)
            }
            // For these the runtime knows better what to say: not built, damaged, gone.
            Err(error) if plain(wanted) == UNIVERSAL => Err(error.into()),
            Err(RuntimeError::NoImage(_)) => Err(self.no_image("image", name).await?),
            Err(error) => Err(error.into()),
        }
    }

    /// Refuses to pull an image of a registry for somebody who may not: it takes the host's disk and address.
    pub(crate) async fn check_pull(
        &self,
        who: &Principal,
        image: Option<&str>,
    ) -> Result<(), Error> {
        let Some(image) = image.filter(|_| !who.grant.rules()) else { return Ok(()) };
        let Named::Own(wanted) = named(image) else { return Ok(()) };
        if !is_reference(wanted) || plain(wanted) != wanted {
            return Ok(());
        }
        let name = crate::images::read(wanted)?.to_string();
        match self.runtime.image(&name).await {
            Err(RuntimeError::NoImage(_)) => Err(crate::images::not_here(who, &name)),
            _ => Ok(()),
        }
    }

    /// The refusal of a name, with the names that would do.
    async fn no_image(&self, what: &str, name: &str) -> Result<Error, Error> {
        let known: Vec<String> =
            self.runtime.images().await?.into_iter().map(|image| image.name).collect();
        let built = known.iter().any(|name| name == UNIVERSAL);
        let managed = format!("{}; runtimes {}", managed_names().join(", "), RUNTIMES.join(", "));
        let also = if built {
            format!("{managed} (all of them the image '{UNIVERSAL}')")
        } else {
            format!("and, after `bivouac image build {UNIVERSAL}`: {managed}")
        };
        Ok(Error::not_found(format!(
            "There is no {what} '{name}' here. There are: {}; {also}",
            known.join(", ")
        )))
    }

    /// Name of the image of a create that names none: `universal` as soon as it is built.
    pub(crate) async fn default_image(&self) -> &str {
        if self.config.host_until_built && !self.has(&self.config.default_image).await {
            return HOST;
        }
        &self.config.default_image
    }

    /// Whether there is an image of that name, sound or not.
    async fn has(&self, name: &str) -> bool {
        let images = self.runtime.images().await.unwrap_or_default();
        images.iter().any(|image| image.name == name)
    }

    /// The image of a `runtime`: the universal one, or, until it is built, the `host` image if that
    /// is the default, because clients of SDK 1.x always send a runtime.
    pub(crate) async fn image_of_runtime(&self, runtime: &str) -> Result<String, Error> {
        if !RUNTIMES.contains(&runtime) {
            return match self.image(runtime).await {
                Err(error) if error.kind == ErrorKind::NotFound => {
                    Err(self.no_image("runtime", runtime).await?)
                }
                other => other,
            };
        }
        if self.default_image().await == HOST && !self.has(UNIVERSAL).await {
            return self.image(HOST).await;
        }
        self.image(UNIVERSAL).await
    }

    async fn base_of_snapshot(
        &self,
        ns: &Namespace,
        id: &SnapshotId,
        image: Option<&str>,
        runtime: Option<&str>,
    ) -> Result<Base, Error> {
        let row = self.usable_snapshot(&ns.team, id).await?;
        let under = self.image(&row.snapshot.image).await?;
        if let Some(image) = image
            && plain(&self.image(image).await?) != plain(&under)
        {
            return Err(Error::invalid(format!(
                "Invalid image: snapshot {id} lies on image '{}' and cannot be started on another",
                plain(&under)
            )));
        }
        let runtime = runtime.or(image).unwrap_or(&row.snapshot.runtime).to_owned();
        Ok(Base { image: under, runtime, snapshot: Some(row) })
    }

    async fn base_of_image(
        &self,
        image: Option<&str>,
        runtime: Option<&str>,
    ) -> Result<Base, Error> {
        let (image, runtime) = match (image, runtime) {
            (Some(name), _) => (self.image(name).await?, name.to_owned()),
            (None, Some(runtime)) => (self.image_of_runtime(runtime).await?, runtime.to_owned()),
            (None, None) => {
                (self.image(self.default_image().await).await?, DEFAULT_RUNTIME.to_owned())
            }
        };
        Ok(Base { image, runtime, snapshot: None })
    }

    /// Puts the header values of a change into the vault; ids are left of them. Values that the client
    /// has only seen hidden are those of `present`.
    pub(crate) async fn seal_change(
        &self,
        ns: &Namespace,
        change: &mut UpdateSandbox,
        present: &NetworkPolicy,
    ) -> Result<(), Error> {
        if let Some(mut draft) = change.policy.take() {
            draft.keep_hidden("networkPolicy", present)?;
            change.policy = Some(unsealed(self.keep_values(ns, draft).await?));
        }
        Ok(())
    }

    /// What a create asks for, checked.
    pub(crate) async fn plan_create(
        &self,
        ns: &Namespace,
        spec: CreateSandbox,
    ) -> Result<Plan, Error> {
        check_namespace(ns)?;
        if let Some(name) = &spec.name {
            check_sandbox_name(name)?;
        }
        if spec.image.is_some() && spec.runtime.is_some() {
            return Err(Error::invalid("Invalid image: 'image' and 'runtime' exclude each other"));
        }
        let region = spec.region.unwrap_or_else(|| REGION.to_owned());
        check_regions(&region, &spec.failover_regions)?;
        let mut life = Life::default();
        spec.life.apply(&mut life);
        life.check()?;
        if spec.ephemeral && life.restart != Restart::No {
            return Err(Error::invalid(
                "Invalid life.restart: an ephemeral sandbox has one session and no other",
            ));
        }
        let mut config = UpdateSandbox {
            persistent: Some(spec.persistent.unwrap_or(!spec.ephemeral)),
            resources: Some(spec.resources.unwrap_or_default()),
            timeout_ms: Some(spec.timeout_ms.unwrap_or(DEFAULT_TIMEOUT_MS)),
            ports: Some(spec.ports),
            env: Some(spec.env),
            tags: Some(spec.tags),
            policy: Some(spec.policy.unwrap_or_else(|| unsealed(NetworkPolicy::default()))),
            mounts: Some(spec.mounts),
            network_id: Some(spec.network_id),
            region: Some(region),
            failover_regions: Some(spec.failover_regions),
            snapshot_expiration_ms: spec.snapshot_expiration_ms,
            keep_last: Some(spec.keep_last),
            life: Some(spec.life),
            current_snapshot_id: None,
            runtime: None,
        };
        check_change(&config)?;
        self.check_disk(config.resources.as_ref())?;
        let (image, runtime) = (spec.image.as_deref(), spec.runtime.as_deref());
        let base = match &spec.source {
            Some(Source::Snapshot { snapshot_id }) => {
                let id = parse_snapshot(snapshot_id)?;
                self.base_of_snapshot(ns, &id, image, runtime).await?
            }
            _ => self.base_of_image(image, runtime).await?,
        };
        // Last, so that a refusal has kept nothing.
        self.seal_change(ns, &mut config, &NetworkPolicy::default()).await?;
        let made = self.make_credentials(ns, &spec.credentials).await?;
        credentials::add_to(&made, &mut config)?;
        check_change(&config)?;
        let policy = config.policy.as_ref().map(|draft| draft.policy.clone()).unwrap_or_default();
        let fetch = match spec.source {
            Some(source) => self.plan_fetch(ns, &policy, source, spec.source_login).await?,
            None => None,
        };
        if let Some(fetch) = &fetch {
            check_policy("networkPolicy", &fetch.policy)?;
        }
        let key = spec.idempotency_key;
        let (name, ephemeral) = (spec.name, spec.ephemeral);
        Ok(Plan { name, config, base, ephemeral, key, fetch, unborn: false })
    }

    /// What a fork asks for, checked: the source's configuration with the overrides over it, and the
    /// credentials that are not the forker's to take along.
    pub(crate) async fn plan_fork(
        &self,
        who: &Principal,
        ns: &Namespace,
        source: &Sandbox,
        from: Option<&SnapshotId>,
        mut spec: ForkSandbox,
    ) -> Result<(Plan, Vec<String>), Error> {
        if let Some(name) = &spec.name {
            check_sandbox_name(name)?;
        }
        check_change(&spec.update)?;
        if let Some(life) = &spec.update.life {
            who.may_hook(life, ns)?;
        }
        self.check_disk(spec.update.resources.as_ref())?;
        let mut sandbox = source.clone();
        // What somebody else may use is not the forker's to take along.
        let needs_auth = self.drop_foreign(who, &mut sandbox.policy);
        for credential in &needs_auth {
            tracing::warn!(by = %who.name, source = %source.name, %credential, reason = "needs_auth",
                "a credential session stays with its actor: the fork has none");
        }
        self.seal_change(ns, &mut spec.update, &sandbox.policy).await?;
        apply(&spec.update, &mut sandbox);
        sandbox.life.check()?;
        check_regions(&sandbox.region, &sandbox.failover_regions)?;
        let runtime = spec.update.runtime.as_deref();
        let image = spec.image.as_deref();
        let mut base = match from {
            Some(id) => self.base_of_snapshot(ns, id, image, runtime).await?,
            None if image.is_some() || runtime.is_some() => {
                self.base_of_image(image, runtime).await?
            }
            None => self.base_of_image(Some(&source.image), None).await?,
        };
        if image.is_none() && runtime.is_none() {
            base.runtime.clone_from(&source.runtime);
        }
        let config = UpdateSandbox {
            persistent: Some(sandbox.persistent),
            resources: Some(sandbox.resources),
            timeout_ms: Some(sandbox.timeout_ms),
            ports: Some(sandbox.ports),
            env: Some(sandbox.env),
            tags: Some(sandbox.tags),
            policy: Some(unsealed(sandbox.policy)),
            mounts: Some(sandbox.mounts),
            network_id: Some(sandbox.network_id),
            region: Some(sandbox.region),
            failover_regions: Some(sandbox.failover_regions),
            snapshot_expiration_ms: sandbox.snapshot_expiration_ms,
            keep_last: Some(sandbox.keep_last),
            life: Some(LifeChange::to(&sandbox.life)),
            current_snapshot_id: None,
            runtime: None,
        };
        let key = spec.idempotency_key;
        let name = spec.name;
        let plan = Plan { name, config, base, ephemeral: false, key, fetch: None, unborn: false };
        Ok((plan, needs_auth))
    }
}

/// A policy without values that still have to be sealed.
pub(crate) fn unsealed(policy: NetworkPolicy) -> Draft {
    Draft { policy, values: std::collections::BTreeMap::new() }
}

/// An id of a snapshot as clients send it. One that cannot be any snapshot's is not found.
pub(crate) fn parse_snapshot(text: &str) -> Result<SnapshotId, Error> {
    SnapshotId::parse(text).map_err(|_| {
        let shown: String = text.chars().take(80).collect();
        Error::no_snapshot(&shown)
    })
}
