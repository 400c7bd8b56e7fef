//! Sandboxes: the named thing and its configuration. Limits: reference/vercel-api.md §2.2.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Millis;
use crate::drive::Mounts;
use crate::id::{SandboxId, SessionId, SnapshotId};
use crate::life::{Life, Restarts};
use crate::name::{Invalid, Namespace};
use crate::policy::NetworkPolicy;
use crate::session::SessionStatus;

/// MB of memory per virtual CPU.
pub const MEMORY_PER_VCPU_MB: i64 = 2048;
/// Most virtual CPUs that a sandbox may ask for.
pub const MAX_VCPUS: i64 = 32;
/// Most ports.
pub const MAX_PORTS: usize = 15;
/// Default time that a session may live, ms.
pub const DEFAULT_TIMEOUT_MS: i64 = 300_000;
/// Longest time that a session may live, ms (a day).
pub const MAX_TIMEOUT_MS: i64 = 86_400_000;
/// Default time that an automatic snapshot is kept after its last use, ms (30 days).
pub const DEFAULT_SNAPSHOT_EXPIRATION_MS: i64 = 30 * 86_400_000;

/// Virtual CPUs, memory and disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Virtual CPUs: one, or an even number.
    pub vcpus: i64,
    /// Memory limit in MB.
    pub memory_mb: i64,
    /// Most bytes that it may hold over its image; absent is what the engine says. In a change: absent is as
    /// it is, 0 is what the engine says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<i64>,
}

impl Default for Resources {
    fn default() -> Self {
        Self { vcpus: 2, memory_mb: 2 * MEMORY_PER_VCPU_MB, disk_bytes: None }
    }
}

impl Resources {
    /// Checks what a client asked for.
    ///
    /// # Errors
    /// [`Invalid`] for a count that is neither one nor even, or a memory that does not follow it.
    pub fn new(vcpus: i64, memory_mb: Option<i64>) -> Result<Self, Invalid> {
        if !(vcpus == 1 || (vcpus > 0 && vcpus % 2 == 0 && vcpus <= MAX_VCPUS)) {
            let reason = format!("must be 1 or an even number up to {MAX_VCPUS}, got {vcpus}");
            return Err(Invalid::new("resources.vcpus", reason));
        }
        let wanted = vcpus * MEMORY_PER_VCPU_MB;
        match memory_mb {
            Some(memory) if memory != wanted => Err(Invalid::new(
                "resources.memory",
                format!("must be {MEMORY_PER_VCPU_MB} MB per vcpu ({wanted}), got {memory}"),
            )),
            _ => Ok(Self { vcpus, memory_mb: wanted, disk_bytes: None }),
        }
    }

    /// These over `present`: a disk size that is not told stays, and 0 takes it away.
    #[must_use]
    pub fn over(self, present: Self) -> Self {
        let disk_bytes = match self.disk_bytes {
            None => present.disk_bytes,
            Some(bytes) => Some(bytes).filter(|bytes| *bytes != 0),
        };
        Self { disk_bytes, ..self }
    }
}

/// Where a sandbox's first files come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Source {
    /// A git repository, cloned into the working folder.
    Git {
        /// Where it is.
        url: String,
        /// How many commits; absent is all.
        depth: Option<u32>,
        /// Branch, tag or commit.
        revision: Option<String>,
    },
    /// A gzip tar, unpacked into the working folder.
    Tarball {
        /// Where it is.
        url: String,
    },
    /// A snapshot.
    Snapshot {
        /// Which.
        #[serde(rename = "snapshotId")]
        snapshot_id: String,
    },
}

/// How many snapshots of a sandbox are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeepLastSnapshots {
    /// The newest so many stay.
    pub count: i64,
    /// Expiration of those that stay, ms; 0 is never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiration: Option<i64>,
    /// Whether those that fall out are deleted at once (the default) or left to expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delete_evicted: Option<bool>,
}

/// A named sandbox and its configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Internal id.
    pub id: SandboxId,
    /// Team and project.
    pub namespace: Namespace,
    /// Its name: unique in the namespace, unchangeable.
    pub name: String,
    /// Made through `/v1`: no name of its own for clients, never resumed.
    pub ephemeral: bool,
    /// Whether a stop keeps the filesystem.
    pub persistent: bool,
    /// For the next session.
    pub resources: Resources,
    /// For the next session, ms.
    pub timeout_ms: i64,
    /// Ports with a route.
    pub ports: Vec<u16>,
    /// Default environment of every command. May hold secrets: never logged.
    pub env: BTreeMap<String, String>,
    /// Labels.
    pub tags: BTreeMap<String, String>,
    /// Image's name.
    pub image: String,
    /// `node24` and the like, or the image's name.
    pub runtime: String,
    /// Working folder.
    pub cwd: String,
    /// Egress policy.
    pub policy: NetworkPolicy,
    /// For automatic snapshots, ms; 0 is for ever; absent is the default.
    pub snapshot_expiration_ms: Option<i64>,
    /// How many snapshots are kept.
    pub keep_last: Option<KeepLastSnapshots>,
    /// Drives, for the next session.
    #[serde(default)]
    pub mounts: Mounts,
    /// How long it lives, what ends and wakes it.
    #[serde(default)]
    pub life: Life,
    /// What its restart policy has done.
    #[serde(default)]
    pub restarts: Restarts,
    /// Opaque, kept for clients.
    pub network_id: Option<String>,
    /// Opaque, kept for clients.
    pub region: String,
    /// Opaque, kept for clients.
    pub failover_regions: Vec<String>,
    /// Newest session.
    pub current_session_id: SessionId,
    /// State that the next session starts from.
    pub current_snapshot_id: Option<SnapshotId>,
    /// Status of the newest session.
    pub status: SessionStatus,
    /// When that changed.
    pub status_updated_at: Millis,
    /// The store's compare-and-set key.
    pub generation: i64,
    /// When it was made.
    pub created_at: Millis,
    /// Last write.
    pub updated_at: Millis,
    /// CPU time of all its sessions, ms.
    pub total_active_cpu_ms: i64,
    /// Wall time of all its sessions, ms.
    pub total_duration_ms: i64,
}

/// A port and where it is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Port inside.
    pub port: u16,
    /// DNS label, unique among all sandboxes.
    pub subdomain: String,
    /// Where a browser goes.
    pub url: String,
    /// Open to everybody; else only to who shows a token, a signed link or its cookie.
    #[serde(default)]
    pub public: bool,
}

/// Checks a session's time.
///
/// # Errors
/// [`Invalid`] under a second or over [`MAX_TIMEOUT_MS`].
pub fn check_timeout(ms: i64) -> Result<i64, Invalid> {
    if (1000..=MAX_TIMEOUT_MS).contains(&ms) {
        Ok(ms)
    } else {
        Err(Invalid::new("timeout", format!("must be 1000 to {MAX_TIMEOUT_MS} ms, got {ms}")))
    }
}

/// Checks a list of ports: 15 at most, 1024–65535, none twice.
///
/// # Errors
/// [`Invalid`] that names the port.
pub fn check_ports(ports: &[i64]) -> Result<Vec<u16>, Invalid> {
    if ports.len() > MAX_PORTS {
        let reason = format!("at most {MAX_PORTS} ports, got {}", ports.len());
        return Err(Invalid::new("ports", reason));
    }
    let mut out = Vec::with_capacity(ports.len());
    for &port in ports {
        let good = u16::try_from(port).ok().filter(|p| *p >= 1024).ok_or_else(|| {
            Invalid::new("ports", format!("must be between 1024 and 65535, got {port}"))
        })?;
        if out.contains(&good) {
            return Err(Invalid::new("ports", format!("port {port} is listed twice")));
        }
        out.push(good);
    }
    Ok(out)
}

/// Checks labels: 5 at most, keys 1–256 and values up to 256 characters.
///
/// # Errors
/// [`Invalid`] that names the label.
pub fn check_tags(tags: &BTreeMap<String, String>) -> Result<(), Invalid> {
    if tags.len() > 5 {
        return Err(Invalid::new("tags", format!("at most 5 tags, got {}", tags.len())));
    }
    for (key, value) in tags {
        if key.is_empty() || key.chars().count() > 256 || value.chars().count() > 256 {
            return Err(Invalid::new("tags", "keys need 1 to 256 characters, values at most 256"));
        }
    }
    Ok(())
}

/// Checks an environment: names without `=` or NUL and not empty, values without NUL.
///
/// # Errors
/// [`Invalid`] that names the variable, never its value.
pub fn check_env(env: &BTreeMap<String, String>) -> Result<(), Invalid> {
    for (key, value) in env {
        if key.is_empty() || key.contains(['=', '\0']) {
            let shown: String = key.chars().take(40).collect();
            let reason = format!("'{}' is not a variable name", shown.escape_debug());
            return Err(Invalid::new("env", reason));
        }
        if value.contains('\0') {
            return Err(Invalid::new("env", format!("the value of {key} holds a NUL")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_follow_the_rule() {
        assert_eq!(Resources::new(4, None).map(|r| r.memory_mb), Ok(8192));
        assert_eq!(Resources::new(1, Some(2048)).map(|r| r.vcpus), Ok(1));
        for (vcpus, memory) in [(0, None), (3, None), (-2, None), (34, None), (2, Some(2048))] {
            assert!(Resources::new(vcpus, memory).is_err(), "{vcpus} {memory:?}");
        }
    }

    #[test]
    fn a_disk_size_stays_until_it_is_changed() {
        let with = |disk_bytes| Resources { disk_bytes, ..Resources::default() };
        assert_eq!(with(None).over(with(Some(7))).disk_bytes, Some(7));
        assert_eq!(with(Some(9)).over(with(Some(7))).disk_bytes, Some(9));
        assert_eq!(with(Some(0)).over(with(Some(7))).disk_bytes, None);
        // Of the time before there was one.
        let old: Resources = serde_json::from_str(r#"{"vcpus":2,"memory_mb":4096}"#).unwrap();
        assert_eq!(old, Resources::default());
    }

    #[test]
    fn ports_tags_and_env() {
        assert!(check_ports(&(3000..3015).collect::<Vec<_>>()).is_ok());
        assert!(check_ports(&(3000..3016).collect::<Vec<_>>()).is_err());
        for bad in [[80], [65536], [-1], [0]] {
            assert!(check_ports(&bad).is_err(), "{bad:?}");
        }
        assert!(check_ports(&[3000, 3000]).is_err());
        let env = |k: &str, v: &str| BTreeMap::from([(k.to_owned(), v.to_owned())]);
        assert!(check_env(&env("A", "x=y\n")).is_ok());
        for (k, v) in [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "x\0y")] {
            assert!(check_env(&env(k, v)).is_err());
        }
        assert!(check_tags(&env("k", &"é".repeat(256))).is_ok());
        assert!(check_tags(&env("k", &"é".repeat(257))).is_err());
    }
}
