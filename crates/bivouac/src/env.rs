//! What points unmodified clients at an engine: `bivouac env`.
//!
//! Owns: the variables of CONTRACT and the files that go with them: the Node preload, or the
//! certificates of an engine with `--clients-tls`. Invariant: a file's name follows from its content
//! and it is written whole or not at all, so an engine of another version never changes a file that
//! running programs load. Called by the command line.

pub mod trust;

use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Map, Value, json};

/// The Node preload.
const SHIM: &str = include_str!("env_shim.mjs");

/// Which engine, as whom.
#[derive(Clone, PartialEq, Eq)]
pub struct Settings {
    /// Where the engine listens, for example `http://127.0.0.1:7070`.
    pub url: String,
    /// Its token.
    pub token: String,
    /// Team of everything that the clients make.
    pub team: String,
    /// Project of it.
    pub project: String,
}

impl std::fmt::Debug for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settings").field("url", &self.url).finish_non_exhaustive()
    }
}

/// How the variables are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `export NAME='value'` lines.
    Sh,
    /// One object.
    Json,
}

/// The caller's cache folder, from its environment: `XDG_CACHE_HOME`, else `~/.cache`.
pub fn default_cache_dir(get: impl Fn(&str) -> Option<String>) -> Option<PathBuf> {
    // The specification of these variables: a relative path is to be ignored.
    let absolute = |name| get(name).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))
}

/// Writes the shim into `cache_dir` unless it is there, and answers where.
///
/// # Errors
/// `None`, or a folder that cannot be written.
pub fn install_shim(cache_dir: Option<&Path>) -> io::Result<PathBuf> {
    install(cache_dir, "shim", "mjs", SHIM.as_bytes())
}

/// Writes a file that is named after its content into our part of the cache, unless it is there.
fn install(cache_dir: Option<&Path>, stem: &str, end: &str, bytes: &[u8]) -> io::Result<PathBuf> {
    let Some(cache_dir) = cache_dir else {
        let message = "neither XDG_CACHE_HOME nor HOME names an absolute folder";
        return Err(io::Error::new(io::ErrorKind::NotFound, message));
    };
    let folder = cache_dir.join("bivouac");
    let path = folder.join(format!("{stem}-{:016x}.{end}", fingerprint(bytes)));
    if fs::read(&path).is_ok_and(|found| found == bytes) {
        return Ok(path);
    }
    fs::create_dir_all(&folder)?;
    // Another process may write the same file at the same time: each its own, then a rename.
    let mut random = [0u8; 8];
    getrandom::fill(&mut random).map_err(io::Error::other)?;
    let fresh = folder.join(format!(".{stem}-{:016x}.tmp", u64::from_be_bytes(random)));
    let written = write_new(&fresh, bytes).and_then(|()| fs::rename(&fresh, &path));
    if written.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    written.map(|()| path)
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
    file.write_all(bytes)?;
    // The caller's umask may have taken bits away.
    file.set_permissions(fs::Permissions::from_mode(0o644))
}

/// FNV-1a: names a content; nothing is trusted because of it.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// How clients get from the name that they have built in to the engine.
#[derive(Debug, Clone, Copy)]
pub enum Way<'a> {
    /// Node loads the shim that [`install_shim`] wrote.
    Shim(&'a Path),
    /// `/etc/hosts` leads them there and they trust these certificates.
    Trust(&'a trust::Trust),
}

/// The variables. `node_options` is the caller's present `NODE_OPTIONS`.
#[must_use]
pub fn render(
    settings: &Settings,
    format: Format,
    node_options: Option<&str>,
    way: Way<'_>,
) -> String {
    let jwt = jwt(settings);
    let mut variables = vec![
        ("BIVOUAC_URL", settings.url.trim_end_matches('/').to_owned()),
        ("BIVOUAC_TOKEN", settings.token.clone()),
        ("VERCEL_OIDC_TOKEN", jwt.clone()),
        ("VERCEL_AUTH_TOKEN", jwt),
        ("VERCEL_TEAM_ID", settings.team.clone()),
        ("VERCEL_PROJECT_ID", settings.project.clone()),
        ("VERCEL_TELEMETRY_DISABLED", "1".to_owned()),
        ("SANDBOX_SKIP_VERSION_CHECK", "1".to_owned()),
    ];
    let node_options = node_options.unwrap_or_default();
    match way {
        Way::Shim(shim) => variables.push(("NODE_OPTIONS", with_import(node_options, shim))),
        Way::Trust(trust) => {
            let kept = without_import(node_options);
            // The shim of an earlier call would get in between.
            if kept != node_options {
                variables.push(("NODE_OPTIONS", kept));
            }
            variables.push(("NODE_EXTRA_CA_CERTS", trust.extra.display().to_string()));
            variables.push(("SSL_CERT_FILE", trust.bundle.display().to_string()));
        }
    }
    match format {
        Format::Sh => variables.iter().fold(String::new(), |mut out, (name, value)| {
            let _ = writeln!(out, "export {name}={}", quote(value));
            out
        }),
        Format::Json => {
            let object: Map<String, Value> = variables
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value.into()))
                .collect();
            format!("{:#}\n", Value::Object(object))
        }
    }
}

/// An unsigned JWT, for clients that read team and project out of their token. It has no expiry, so
/// nobody tries to renew it; the engine takes it for the token that its claim carries.
fn jwt(settings: &Settings) -> String {
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let header = part(json!({"alg": "none", "typ": "JWT"}));
    let claims = part(json!({
        "owner_id": settings.team,
        "project_id": settings.project,
        "token": settings.token,
    }));
    // Clients count three parts; the last one signs nothing.
    format!("{header}.{claims}.x")
}

/// `NODE_OPTIONS` with our import at its end, and without the one of an earlier call.
fn with_import(present: &str, shim: &Path) -> String {
    let kept = without_import(present);
    let gap = if kept.is_empty() { "" } else { " " };
    format!("{kept}{gap}--import={}", file_url(shim))
}

/// `NODE_OPTIONS` without our import.
fn without_import(present: &str) -> String {
    let ours = |option: &str| {
        option.starts_with("--import=file://")
            && option.contains("/bivouac/shim-")
            && option.ends_with(".mjs")
    };
    let kept: Vec<&str> = present.split(' ').filter(|option| !ours(option)).collect();
    kept.join(" ").trim_end_matches(' ').to_owned()
}

/// A URL and not a path: Node splits `NODE_OPTIONS` at spaces, and a URL has none.
fn file_url(path: &Path) -> String {
    let mut url = "file://".to_owned();
    for &byte in path.as_os_str().as_bytes() {
        if byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte) {
            url.push(char::from(byte));
        } else {
            let _ = write!(url, "%{byte:02X}");
        }
    }
    url
}

/// Quotes for a POSIX shell.
fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests;
