//! Names of images in registries, and the documents that describe an image there.
//!
//! Invariant: what is read here is checked: a reference has one canonical form, a digest is `sha256:` and 64
//! hexadecimal digits, and of an index only an image that this machine can run is chosen. Called by the
//! runtime (import), by the engine (pull) and by the command line.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What names of images in registries begin with.
pub const SCHEME: &str = "docker://";
/// Longest name of an image.
pub const MAX_NAME: usize = 255;
/// Most layers of an image.
const MAX_LAYERS: usize = 256;
/// Most bytes of all variables of an image.
const MAX_ENV: usize = 64 << 10;
/// The only algorithm of digests that is taken.
const SHA256: &str = "sha256:";

/// What clients say that they understand, as one `Accept`.
pub const ACCEPTED: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json";

/// Whether a name is one of an image in a registry.
#[must_use]
pub fn is_reference(name: &str) -> bool {
    name.starts_with(SCHEME)
}

/// Whether a text is a digest as registries write it.
#[must_use]
pub fn is_digest(text: &str) -> bool {
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    text.strip_prefix(SHA256).is_some_and(|rest| rest.len() == 64 && rest.bytes().all(hex))
}

/// An image in a registry: `docker://HOST/REPOSITORY:TAG` or `…@sha256:…`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reference {
    host: String,
    repository: String,
    version: Version,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Version {
    Tag(String),
    Digest(String),
}

impl Reference {
    /// Reads a reference. Without a tag it means `latest`; with a digest the tag says nothing and is left out.
    ///
    /// # Errors
    /// A sentence without a subject.
    pub fn parse(text: &str) -> Result<Self, String> {
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| format!("must begin with {SCHEME}"))?;
        if text.len() > MAX_NAME {
            return Err(format!("must have at most {MAX_NAME} characters"));
        }
        let (host, path) = rest
            .split_once('/')
            .ok_or("needs a host and a repository: docker://HOST/REPOSITORY:TAG")?;
        let host = host.to_ascii_lowercase();
        check_host(&host)?;
        let (path, digest) = match path.split_once('@') {
            Some((path, digest)) => (path, Some(digest)),
            None => (path, None),
        };
        let (repository, tag) = match path.rsplit_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (path, None),
        };
        if !repository.split('/').all(is_component) {
            return Err("has a repository that none can have: lower case words with . _ - between, parted by /".to_owned());
        }
        let tag = tag.unwrap_or("latest");
        if !is_tag(tag) {
            return Err(
                "has a tag that none can have: 1 to 128 letters, digits, dots, _ and -".to_owned()
            );
        }
        let version = match digest {
            Some(digest) if is_digest(digest) => Version::Digest(digest.to_owned()),
            Some(_) => {
                return Err("has a digest that is not sha256: and 64 hexadecimal digits".to_owned());
            }
            None => Version::Tag(tag.to_owned()),
        };
        Ok(Self { host, repository: repository.to_owned(), version })
    }

    /// Host, with the port if there is one.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Repository.
    #[must_use]
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag or the digest, as it stands in paths.
    #[must_use]
    pub fn version(&self) -> &str {
        match &self.version {
            Version::Tag(text) | Version::Digest(text) => text,
        }
    }

    /// The digest, if it is pinned.
    #[must_use]
    pub fn digest(&self) -> Option<&str> {
        match &self.version {
            Version::Digest(digest) => Some(digest),
            Version::Tag(_) => None,
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.digest().is_some() { '@' } else { ':' };
        write!(f, "{SCHEME}{}/{}{sign}{}", self.host, self.repository, self.version())
    }
}

fn check_host(host: &str) -> Result<(), String> {
    let wrong = "needs a host with a dot or a port (or localhost), without a user: docker://HOST/REPOSITORY:TAG";
    let (name, port) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, port)) => {
            address.parse::<std::net::Ipv6Addr>().map_err(|_| wrong)?;
            let port =
                if port.is_empty() { None } else { Some(port.strip_prefix(':').ok_or(wrong)?) };
            (None, port)
        }
        None => match host.split_once(':') {
            Some((name, port)) => (Some(name), Some(port)),
            None => (Some(host), None),
        },
    };
    if let Some(port) = port {
        port.parse::<u16>().ok().filter(|port| *port > 0).ok_or(wrong)?;
    }
    let Some(name) = name else { return Ok(()) };
    let word = |w: &str| {
        !w.is_empty()
            && w.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !w.starts_with('-')
            && !w.ends_with('-')
    };
    let named = name.contains('.') || port.is_some() || name == "localhost";
    if named && name.split('.').all(word) { Ok(()) } else { Err(wrong.to_owned()) }
}

fn is_component(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.first().is_some_and(|b| plain(*b))
        && bytes.last().is_some_and(|b| plain(*b))
        && bytes.iter().all(|b| plain(*b) || matches!(b, b'.' | b'_' | b'-'))
}

fn is_tag(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    text.len() <= 128
        && text.bytes().next().is_some_and(plain)
        && text.bytes().all(|b| plain(b) || matches!(b, b'.' | b'-'))
}

/// Checks the name that an imported image gets: one that means nothing else.
///
/// # Errors
/// A sentence without a subject.
pub fn check_local_name(name: &str) -> Result<(), String> {
    use crate::image::{HOST, Named, RUNTIMES, UNIVERSAL, named};
    let good = |b: u8| {
        b.is_ascii_lowercase()
            || b.is_ascii_digit()
            || matches!(b, b'.' | b'_' | b'-' | b'/' | b':')
    };
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if !first
        || name.len() > 128
        || !name.bytes().all(good)
        || name.contains("//")
        || name.contains("..")
    {
        return Err("must have 1 to 128 lower case letters, digits and . _ - / : and begin with a letter or digit".to_owned());
    }
    let taken = name == HOST || name == UNIVERSAL || RUNTIMES.contains(&name);
    if taken || !matches!(named(name), Named::Own(_)) {
        return Err("means another image already".to_owned());
    }
    Ok(())
}

/// For which machines an image is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Platform {
    /// As Go calls it: `linux`.
    pub os: String,
    /// As Go calls it: `amd64`, `arm64`.
    pub architecture: String,
    /// For example `v8`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    /// That of this program.
    #[must_use]
    pub fn ours() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        Self { os: "linux".to_owned(), architecture: architecture.to_owned(), variant: None }
    }

    /// Whether images of the other one run here. An image that does not say is taken at its word.
    #[must_use]
    pub fn runs(&self, other: &Self) -> bool {
        let same = |ours: &str, theirs: &str| theirs.is_empty() || ours == theirs;
        // The plain one of each architecture, or none said: v2 of amd64 and v8 of arm64 are what all have.
        let common = match (other.architecture.as_str(), other.variant.as_deref()) {
            (_, None | Some("")) | ("arm64", Some("v8")) => true,
            ("amd64", Some(variant)) => matches!(variant, "v1" | "v2"),
            _ => false,
        };
        same(&self.os, &other.os) && same(&self.architecture, &other.architecture) && common
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match self.variant.as_deref() {
            Some(variant) if !variant.is_empty() => write!(f, "/{variant}"),
            _ => Ok(()),
        }
    }
}

/// Where one piece of an image is, and what it must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    #[serde(default)]
    pub media_type: String,
    /// Hash of its bytes.
    pub digest: String,
    /// How many they are.
    pub size: u64,
    /// In an index: for which machines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Notes, for example the name of an image in a layout.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// A document of a registry or a layout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    /// Several images.
    Index(Vec<Descriptor>),
    /// One image.
    Manifest {
        /// Its configuration.
        config: Descriptor,
        /// Its layers, the lowest first.
        layers: Vec<Descriptor>,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDocument {
    #[serde(default)]
    schema_version: u64,
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

/// Reads an index or a manifest.
///
/// # Errors
/// A sentence without a subject.
pub fn read_document(text: &[u8]) -> Result<Document, String> {
    let raw: RawDocument =
        serde_json::from_slice(text).map_err(|e| format!("is no document of an image: {e}"))?;
    if raw.schema_version != 2 {
        return Err(format!(
            "is of schema {}, which was given up in 2017: push the image again with a tool of today",
            raw.schema_version
        ));
    }
    let all = || raw.manifests.iter().chain(raw.layers.iter()).flatten().chain(raw.config.iter());
    if let Some(odd) = all().find(|one| !is_digest(&one.digest)) {
        let shown: String = odd.digest.chars().take(80).collect();
        return Err(format!(
            "names a piece by '{}', which is no sha256 digest",
            shown.escape_debug()
        ));
    }
    match raw {
        RawDocument { manifests: Some(manifests), config: None, layers: None, .. } => {
            Ok(Document::Index(manifests))
        }
        RawDocument { manifests: None, config: Some(config), layers: Some(layers), .. } => {
            if layers.len() > MAX_LAYERS {
                return Err(format!("has {} layers: at most {MAX_LAYERS} are taken", layers.len()));
            }
            Ok(Document::Manifest { config, layers })
        }
        _ => Err("is neither the index nor the manifest of an image".to_owned()),
    }
}

/// The image of an index that runs here.
///
/// # Errors
/// A sentence that names the platforms that there are.
pub fn choose<'a>(all: &'a [Descriptor], ours: &Platform) -> Result<&'a Descriptor, String> {
    let is_image = |one: &&Descriptor| {
        // Beside images lie attestations, which say so in this way.
        one.platform.as_ref().is_none_or(|platform| platform.os != "unknown")
            && !one.annotations.contains_key("vnd.docker.reference.type")
    };
    let images: Vec<&Descriptor> = all.iter().filter(is_image).collect();
    let fits =
        |one: &&&Descriptor| one.platform.as_ref().is_none_or(|platform| ours.runs(platform));
    if let Some(found) = images.iter().find(fits) {
        return Ok(found);
    }
    let mut names: Vec<String> =
        images.iter().filter_map(|one| one.platform.as_ref()).map(ToString::to_string).collect();
    names.dedup();
    let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Err(format!("there is no image for {ours}; there are images for: {there}"))
}

/// What an image says of how it is to be run.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageConfig {
    /// Variables of every command.
    pub env: BTreeMap<String, String>,
    /// Whom its maker would run it as. Only told: commands run as `vercel-sandbox`, or as root.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// Where commands start.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub working_dir: String,
    /// Only told.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// Only told.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
}

/// Folders that belong to the system of an image: none of them is a working folder.
const OF_THE_SYSTEM: &[&str] = &[
    "",
    "bin",
    "boot",
    "dev",
    "etc",
    "home",
    "lib",
    "lib32",
    "lib64",
    "media",
    "mnt",
    "opt",
    "root",
    "sbin",
    "srv",
    "tmp",
    "usr",
    "usr/bin",
    "usr/lib",
    "usr/local",
    "usr/sbin",
    "usr/share",
    "usr/src",
    "var",
    "var/lib",
    "var/log",
    "vercel",
];
/// What is mounted over.
const OF_THE_SESSION: &[&str] = &["dev", "proc", "run", "sys"];

impl ImageConfig {
    /// The folder that commands start in, if the image names one that is not the system's own.
    #[must_use]
    pub fn folder(&self) -> Option<String> {
        let path = self.working_dir.strip_prefix('/')?;
        let parts: Vec<&str> = path.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
        if parts.contains(&"..")
            || parts.first().is_some_and(|first| OF_THE_SESSION.contains(first))
        {
            return None;
        }
        let path = parts.join("/");
        (path.len() < 1024 && !path.contains('\0') && !OF_THE_SYSTEM.contains(&path.as_str()))
            .then(|| format!("/{path}"))
    }
}

/// The configuration document of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// For which machines it is.
    pub platform: Platform,
    /// How it is to be run.
    pub config: ImageConfig,
    /// Hashes of the layers as they are when they are not compressed, the lowest first.
    pub diff_ids: Vec<String>,
}

#[derive(Deserialize)]
struct RawConfig {
    #[serde(flatten)]
    platform: Platform,
    config: Option<RawRun>,
    rootfs: RawRoot,
}

#[derive(Deserialize)]
struct RawRoot {
    #[serde(default)]
    diff_ids: Vec<String>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct RawRun {
    env: Option<Vec<String>>,
    user: Option<String>,
    working_dir: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
}

/// Reads an image's configuration, and whether it is for this machine.
///
/// # Errors
/// A sentence without a subject.
pub fn read_config(text: &[u8], ours: &Platform) -> Result<Config, String> {
    let raw: RawConfig = serde_json::from_slice(text)
        .map_err(|e| format!("has a configuration that cannot be read: {e}"))?;
    if !ours.runs(&raw.platform) {
        return Err(format!("is made for {}, and this machine is {ours}", raw.platform));
    }
    if !raw.rootfs.diff_ids.iter().all(|id| is_digest(id)) {
        return Err("has a layer whose hash is no sha256".to_owned());
    }
    let run = raw.config.unwrap_or_default();
    let mut env = BTreeMap::new();
    let mut bytes = 0;
    for line in run.env.unwrap_or_default() {
        let (name, value) = line.split_once('=').unwrap_or((&line, ""));
        bytes += line.len() + 1;
        if name.is_empty() || line.contains('\0') || bytes > MAX_ENV {
            return Err(format!(
                "has variables that cannot be set (without a name, or over {MAX_ENV} bytes)"
            ));
        }
        env.insert(name.to_owned(), value.to_owned());
    }
    let config = ImageConfig {
        env,
        user: run.user.unwrap_or_default(),
        working_dir: run.working_dir.unwrap_or_default(),
        entrypoint: run.entrypoint.unwrap_or_default(),
        cmd: run.cmd.unwrap_or_default(),
    };
    Ok(Config { platform: raw.platform, config, diff_ids: raw.rootfs.diff_ids })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(fill: char) -> String {
        format!("{SHA256}{}", fill.to_string().repeat(64))
    }

    #[test]
    fn a_reference_has_one_form() {
        let cases = [
            ("docker://Example.com/a", "docker://example.com/a:latest"),
            ("docker://example.com/a/b_c:1.2-x", "docker://example.com/a/b_c:1.2-x"),
            ("docker://localhost/a", "docker://localhost/a:latest"),
            ("docker://127.0.0.1:5000/a/b:t", "docker://127.0.0.1:5000/a/b:t"),
            ("docker://[::1]:5000/a", "docker://[::1]:5000/a:latest"),
        ];
        for (text, canonical) in cases {
            let read = Reference::parse(text).unwrap();
            assert_eq!(read.to_string(), canonical, "{text}");
            assert_eq!(Reference::parse(canonical).unwrap(), read);
        }
        let pinned = format!("docker://example.com/a:old@{}", hex('a'));
        let read = Reference::parse(&pinned).unwrap();
        assert_eq!(read.to_string(), format!("docker://example.com/a@{}", hex('a')));
        assert_eq!(read.digest(), Some(hex('a').as_str()));
    }

    #[test]
    fn what_is_no_reference_is_refused() {
        for text in [
            "example.com/a",
            "docker://a/b",
            "docker://example.com",
            "docker://example.com/",
            "docker://example.com/A",
            "docker://example.com/a/../b",
            "docker://example.com/a//b",
            "docker://example.com/a:",
            "docker://example.com/a:b/c:",
            "docker://example.com/a@sha256:00",
            "docker://example.com/a?x=y",
            "docker://user:pw@example.com/a",
            "docker://example.com:0/a",
            "docker://example.com:99999/a",
            "docker://[::1/a",
            "docker://exa mple.com/a",
            "docker://-x.com/a",
            "docker://example.com/a%2f",
        ] {
            assert!(Reference::parse(text).is_err(), "{text}");
        }
        assert!(Reference::parse(&format!("docker://example.com/{}", "a".repeat(250))).is_err());
    }

    #[test]
    fn names_of_imported_images_mean_nothing_else() {
        for good in ["app", "app:1.2", "team/app:latest", "localhost/app:latest"] {
            check_local_name(good).unwrap();
        }
        for bad in [
            "",
            "host",
            "universal",
            "node24",
            "vercel/sandbox/node:22",
            "App",
            "a@b",
            "docker://x/y",
            "../a",
            "a//b",
            ".a",
        ] {
            assert!(check_local_name(bad).is_err(), "{bad}");
        }
    }

    fn descriptor(fill: char, platform: Option<(&str, &str, Option<&str>)>) -> Descriptor {
        Descriptor {
            media_type: String::new(),
            digest: hex(fill),
            size: 1,
            platform: platform.map(|(os, architecture, variant)| Platform {
                os: os.to_owned(),
                architecture: architecture.to_owned(),
                variant: variant.map(str::to_owned),
            }),
            annotations: BTreeMap::new(),
        }
    }

    #[test]
    fn the_image_of_this_machine_is_chosen() {
        let ours = |architecture: &str| Platform {
            os: "linux".to_owned(),
            architecture: architecture.to_owned(),
            variant: None,
        };
        let all = [
            descriptor('a', Some(("unknown", "unknown", None))),
            descriptor('b', Some(("windows", "amd64", None))),
            descriptor('c', Some(("linux", "amd64", Some("v4")))),
            descriptor('d', Some(("linux", "amd64", None))),
            descriptor('e', Some(("linux", "arm64", Some("v8")))),
            descriptor('f', Some(("linux", "arm", Some("v7")))),
        ];
        assert_eq!(choose(&all, &ours("amd64")).unwrap().digest, hex('d'));
        assert_eq!(choose(&all, &ours("arm64")).unwrap().digest, hex('e'));
        let said = choose(&all, &ours("riscv64")).unwrap_err();
        assert!(said.contains("linux/riscv64") && said.contains("linux/arm/v7"), "{said}");
        assert!(!said.contains("unknown"), "{said}");
        assert_eq!(choose(&[descriptor('a', None)], &ours("amd64")).unwrap().digest, hex('a'));
    }

    #[test]
    fn documents_are_told_apart() {
        let index =
            format!(r#"{{"schemaVersion":2,"manifests":[{{"digest":"{}","size":3}}]}}"#, hex('a'));
        assert!(
            matches!(read_document(index.as_bytes()), Ok(Document::Index(all)) if all.len() == 1)
        );
        let one = format!(r#"{{"digest":"{}","size":3}}"#, hex('a'));
        let manifest = format!(r#"{{"schemaVersion":2,"config":{one},"layers":[{one},{one}]}}"#);
        assert!(
            matches!(read_document(manifest.as_bytes()), Ok(Document::Manifest { layers, .. }) if layers.len() == 2)
        );
        let both = format!(r#"{{"schemaVersion":2,"config":{one},"layers":[],"manifests":[]}}"#);
        for bad in [
            "",
            "{}",
            "[]",
            r#"{"schemaVersion":1,"fsLayers":[]}"#,
            both.as_str(),
            r#"{"schemaVersion":2,"manifests":[{"digest":"sha256:../../x","size":3}]}"#,
            r#"{"schemaVersion":2,"manifests":[{"digest":"md5:00","size":3}]}"#,
        ] {
            assert!(read_document(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_configuration_is_read_with_what_tools_leave_out() {
        let ours = Platform::ours();
        let text = format!(
            r#"{{"os":"linux","architecture":"{}","config":{{"Env":["PATH=/x","A=b=c","E"],"Cmd":null,"WorkingDir":"/app"}},"rootfs":{{"type":"layers","diff_ids":["{}"]}}}}"#,
            ours.architecture,
            hex('a')
        );
        let read = read_config(text.as_bytes(), &ours).unwrap();
        assert_eq!(read.config.env["A"], "b=c");
        assert_eq!(read.config.env["E"], "");
        assert_eq!(read.config.folder().as_deref(), Some("/app"));
        assert_eq!(read.diff_ids, [hex('a')]);
        let other = r#"{"os":"linux","architecture":"s390x","rootfs":{"diff_ids":[]}}"#;
        let said = read_config(other.as_bytes(), &ours).unwrap_err();
        assert!(said.contains("linux/s390x"), "{said}");
        assert!(read_config(br#"{"rootfs":{"diff_ids":["x"]}}"#, &ours).is_err());
        assert!(read_config(br#"{"config":{"Env":["=x"]},"rootfs":{}}"#, &ours).is_err());
    }

    #[test]
    fn folders_of_the_system_are_no_working_folders() {
        let folder = |text: &str| {
            ImageConfig { working_dir: text.to_owned(), ..ImageConfig::default() }.folder()
        };
        assert_eq!(folder("/usr/src/app/").as_deref(), Some("/usr/src/app"));
        assert_eq!(folder("/srv//x/.").as_deref(), Some("/srv/x"));
        for none in ["", "/", "app", "/root", "/usr/src", "/proc/1", "/dev/x", "/a/../b", "/run/x"]
        {
            assert_eq!(folder(none), None, "{none}");
        }
    }
}
