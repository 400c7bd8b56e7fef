//! What `bivouac serve` is told, and where things are when nothing is told.
//!
//! Owns: the default folders, and the check of `serve`'s flags. Invariant: a [`ServeConfig`] holds
//! only what this version does; a flag whose feature is not there yet is an error, never ignored.
//! Used by `serve` (all of it) and by the command line (the default folders).

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bivouac_runtime::pool::PoolOptions;
use bivouac_store::Address;
use bivouac_types::policy::Cidr;

use crate::cli::args::{LogFormat, Serve};
use crate::preview::TlsFiles;

/// Everything that the engine was told.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// Where the API listens.
    pub listen: SocketAddr,
    /// All state.
    pub data_dir: PathBuf,
    /// Where the records are.
    pub database: Address,
    /// Read-only images, shared by engines.
    pub images_dir: PathBuf,
    /// Image used when a create names none; absent is `universal` once built, else `host`.
    pub image: Option<String>,
    /// What links say; absent is the listen address.
    pub public_url: Option<String>,
    /// Domain of routes, with the port that browsers see if it is not 443.
    pub preview_domain: Option<String>,
    /// Where routes are served over TLS.
    pub preview_tls: Option<TlsFiles>,
    /// What identity tokens say of their issuer; absent is what links say.
    pub issuer: Option<String>,
    /// Kinds of references to this host that secrets may be.
    pub secret_sources: Vec<String>,
    /// The key that secrets are sealed with.
    pub vault_key: PathBuf,
    /// Stop every sandbox before exit.
    pub stop_sandboxes: bool,
    /// Exit, sandboxes included, after so long without work.
    pub idle_exit: Option<Duration>,
    /// Also serve clients under the names that they have built in.
    pub clients_tls: bool,
    /// Where `/metrics` is served without a token as well.
    pub metrics_listen: Option<SocketAddr>,
    /// Where SSH listens; absent: only clients of the API can use it.
    pub ssh: Option<SocketAddr>,
    /// Whether SSH clients may have their agents reachable inside.
    pub ssh_agent_forwarding: bool,
    /// Log lines as JSON.
    pub log_json: bool,
    /// Name server that brokers ask; absent is the host's.
    pub resolver: Option<SocketAddr>,
    /// More roots for upstream TLS, which sandboxes trust too.
    pub extra_ca: Option<PathBuf>,
    /// Private ranges that policies may allow.
    pub egress_allow_private: Vec<Cidr>,
    /// How volumes are kept.
    pub pool: PoolOptions,
    /// Most bytes that a sandbox may hold over its image; absent is the engine's default.
    pub disk_bytes: Option<u64>,
}

/// Why the engine cannot start with these flags.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The feature is not in this version.
    #[error("{what} arrives with a later release")]
    Later {
        /// The flag or value.
        what: String,
    },
    /// A value is wrong.
    #[error("{flag}: {reason}")]
    Bad {
        /// Which flag.
        flag: &'static str,
        /// What is wrong and what is accepted.
        reason: String,
    },
}

impl ConfigError {
    /// Whether a later version will take it.
    #[must_use]
    pub fn is_later(&self) -> bool {
        matches!(self, Self::Later { .. })
    }
}

impl ServeConfig {
    /// Checks the flags and fills in the defaults.
    ///
    /// # Errors
    /// [`ConfigError`]: a feature of a later release, or a wrong value.
    pub(crate) fn resolve(args: &Serve, data_dir: Option<&Path>) -> Result<Self, ConfigError> {
        refuse_later(args)?;
        let data_dir =
            absolute("--data-dir", &data_dir.map_or_else(default_data_dir, Path::to_owned))?;
        let images_dir =
            absolute("--images", &args.images.clone().unwrap_or_else(default_images_dir))?;
        let database = database(args.database.as_deref(), &data_dir)?;
        refuse_open_secret(&database, args.database.as_deref(), std::env::args())?;
        let url = |flag, text: &Option<String>| {
            text.as_deref().map(|text| public_url(flag, text)).transpose()
        };
        let public_url = url("--public-url", &args.public_url)?;
        let issuer = url("--issuer", &args.issuer)?;
        let vault_key = match &args.vault_key {
            Some(file) => absolute("--vault-key", file)?,
            None => beside(&database, &data_dir).join("vault.key"),
        };
        let idle_exit = args.idle_exit.map(Duration::from_secs);
        Ok(Self {
            listen: args.listen,
            database,
            images_dir,
            image: args.image.clone(),
            public_url,
            preview_domain: preview_domain(args)?,
            preview_tls: preview_tls(args)?,
            issuer,
            vault_key,
            secret_sources: args.secret_sources.iter().filter(|s| *s != "none").cloned().collect(),
            stop_sandboxes: args.stop_sandboxes || idle_exit.is_some(),
            idle_exit,
            clients_tls: args.clients_tls,
            metrics_listen: args.metrics_listen,
            ssh: args.ssh,
            ssh_agent_forwarding: args.ssh_agent_forwarding,
            resolver: args.resolver.as_deref().map(resolver).transpose()?,
            extra_ca: args
                .extra_ca
                .as_deref()
                .map(|file| absolute("--extra-ca", file))
                .transpose()?,
            egress_allow_private: ranges(&args.egress_allow_private)?,
            pool: PoolOptions {
                mode: args.pool.mode(),
                first_bytes: args.test_pool_mb.map(|mb| mb << 20),
            },
            log_json: args.log_format == LogFormat::Json,
            disk_bytes: args.test_disk_mb.map(|mb| mb << 20).or(args.disk),
            data_dir,
        })
    }
}

fn refuse_later(args: &Serve) -> Result<(), ConfigError> {
    let later = |what: &str| Err(ConfigError::Later { what: what.to_owned() });
    match () {
        () if args.blobs.is_some() => later("--blobs (bytes outside of the data folder)"),
        () => Ok(()),
    }
}

/// `DOMAIN[:PORT]`, in small letters; with the port of `--preview-listen` when none is told.
fn preview_domain(args: &Serve) -> Result<Option<String>, ConfigError> {
    let Some(text) = &args.preview_domain else { return Ok(None) };
    let bad = || ConfigError::Bad {
        flag: "--preview-domain",
        reason: format!("'{text}' is no domain for routes: write boxes.example.com, or with :PORT"),
    };
    let lower = text.to_ascii_lowercase();
    let (name, port) = match lower.rsplit_once(':') {
        Some((name, port)) => (name, Some(port.parse::<u16>().map_err(|_| bad())?)),
        None => (lower.as_str(), args.preview_listen.map(|listen| listen.port())),
    };
    let label = |label: &str| {
        let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        (1..=63).contains(&label.len()) && label.bytes().all(good)
    };
    let all = name.split('.').all(label) && name.contains('.');
    let address = name.split('.').next_back().is_some_and(|last| last.parse::<u32>().is_ok());
    if !all || address || name.ends_with(".localhost") || name.len() > 180 {
        return Err(bad());
    }
    Ok(Some(match port {
        None | Some(443 | 0) => name.to_owned(),
        Some(port) => format!("{name}:{port}"),
    }))
}

fn preview_tls(args: &Serve) -> Result<Option<TlsFiles>, ConfigError> {
    let (Some(listen), Some(certificate), Some(key)) =
        (args.preview_listen, &args.preview_cert, &args.preview_key)
    else {
        return Ok(None);
    };
    Ok(Some(TlsFiles {
        certificate: absolute("--preview-cert", certificate)?,
        key: absolute("--preview-key", key)?,
        listen,
    }))
}

/// `sqlite:PATH`, `postgres://…` or nothing. The text may hold a password: never repeated.
fn database(url: Option<&str>, data_dir: &Path) -> Result<Address, ConfigError> {
    let Some(url) = url else { return Ok(Address::file(&data_dir.join("bivouac.db"))) };
    let address = Address::parse(url)
        .map_err(|error| ConfigError::Bad { flag: "--database", reason: error.to_string() })?;
    match address.path() {
        Some(path) => Ok(Address::file(&absolute("--database", path)?)),
        None => Ok(address),
    }
}

/// Everybody on the machine can read the arguments of a process.
fn refuse_open_secret(
    address: &Address,
    url: Option<&str>,
    mut arguments: impl Iterator<Item = String>,
) -> Result<(), ConfigError> {
    let Some(url) = url.filter(|_| address.has_password()) else { return Ok(()) };
    if arguments.any(|argument| argument.contains(url)) {
        let reason = "a password on the command line can be read by everybody on this machine: put \
                      the address into BIVOUAC_DATABASE, or the password into PGPASSWORD or a \
                      PGPASSFILE";
        return Err(ConfigError::Bad { flag: "--database", reason: reason.to_owned() });
    }
    Ok(())
}

/// `ADDR` or `ADDR:PORT`.
fn resolver(text: &str) -> Result<SocketAddr, ConfigError> {
    let bare = text.trim_matches(['[', ']']).parse().map(|ip| SocketAddr::new(ip, 53));
    text.parse().or(bare).map_err(|_| ConfigError::Bad {
        flag: "--resolver",
        reason: format!("'{text}' is no address: write 192.0.2.53 or 192.0.2.53:5353"),
    })
}

fn ranges(texts: &[String]) -> Result<Vec<Cidr>, ConfigError> {
    let read = |text: &String| {
        Cidr::parse(text).map_err(|why| ConfigError::Bad {
            flag: "--egress-allow-private",
            reason: format!("'{text}' {why}"),
        })
    };
    texts.iter().map(read).collect()
}

/// The folder of a database that is a file; else the data folder.
fn beside<'a>(database: &'a Address, data_dir: &'a Path) -> &'a Path {
    database.path().and_then(Path::parent).unwrap_or(data_dir)
}

fn public_url(flag: &'static str, url: &str) -> Result<String, ConfigError> {
    let host = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://")).unwrap_or("");
    if host.trim_end_matches('/').is_empty() || host.contains(['?', '#', ' ']) {
        let reason = format!("'{url}' is no URL: write http://HOST[:PORT]");
        return Err(ConfigError::Bad { flag, reason });
    }
    Ok(url.trim_end_matches('/').to_owned())
}

/// The engine must find its folders from any working folder.
fn absolute(flag: &'static str, path: &Path) -> Result<PathBuf, ConfigError> {
    std::path::absolute(path).map_err(|error| ConfigError::Bad {
        flag,
        reason: format!("'{}' cannot be used: {error}", path.display()),
    })
}

/// Where state is kept when nothing is told.
#[must_use]
pub fn default_data_dir() -> PathBuf {
    default_dir("/var/lib/bivouac", "XDG_DATA_HOME", ".local/share", "bivouac")
}

/// Where images are kept when nothing is told.
#[must_use]
pub fn default_images_dir() -> PathBuf {
    default_dir("/var/cache/bivouac/images", "XDG_CACHE_HOME", ".cache", "bivouac/images")
}

fn default_dir(as_root: &str, variable: &str, below_home: &str, tail: &str) -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return PathBuf::from(as_root);
    }
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = set(variable).or_else(|| set("HOME").map(|home| home.join(below_home)));
    base.unwrap_or_else(|| PathBuf::from("/tmp")).join(tail)
}

/// A short name of a data folder, the same at every start: it names control groups and the folder of
/// sockets. The folder has to exist: under two names (a link, a trailing slash) it is one folder.
///
/// # Errors
/// The folder cannot be looked at.
pub fn instance(data_dir: &Path) -> std::io::Result<String> {
    use std::os::unix::ffi::OsStrExt as _;
    let real = std::fs::canonicalize(data_dir)?;
    // FNV-1a: has to tell a handful of folders of one machine apart, in any version of us.
    let hash = real.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    Ok(format!("{hash:016x}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::args::{Cli, Verb};

    fn resolve(flags: &[&str]) -> Result<ServeConfig, ConfigError> {
        let line = ["bivouac", "--data-dir", "/data", "serve"].iter().chain(flags);
        let cli = Cli::try_parse_from(line).unwrap();
        let Verb::Serve(serve) = &cli.verb else { panic!("not serve") };
        ServeConfig::resolve(serve, cli.global.data_dir.as_deref())
    }

    #[test]
    fn defaults_are_the_contract_s() {
        let config = resolve(&[]).unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:7070");
        assert_eq!(config.database.path(), Some(Path::new("/data/bivouac.db")));
        assert!(!config.stop_sandboxes && config.idle_exit.is_none() && !config.log_json);
        assert!(config.image.is_none(), "chosen by what is built");
    }

    #[test]
    fn what_is_not_there_yet_is_refused() {
        let cases: [&[&str]; 1] = [&["--blobs", "s3://bucket"]];
        for flags in cases {
            let error = resolve(flags).unwrap_err().to_string();
            assert!(error.contains("arrives with a later release"), "{flags:?}: {error}");
        }
    }

    #[test]
    fn a_domain_of_routes_is_one() {
        let domain = |flags: &[&str]| resolve(flags).map(|config| config.preview_domain);
        let of = |text: &str| domain(&["--preview-domain", text]);
        assert_eq!(of("Boxes.Example").unwrap().as_deref(), Some("boxes.example"));
        assert_eq!(of("b.example:8443").unwrap().as_deref(), Some("b.example:8443"));
        assert_eq!(of("b.example:443").unwrap().as_deref(), Some("b.example"));
        for bad in [
            "localhost",
            "a.localhost",
            "example",
            "10.0.0.1",
            "a..b",
            "a.b:x",
            "https://a.b",
            "*.a.b",
        ] {
            assert!(of(bad).unwrap_err().to_string().contains("--preview-domain"), "{bad}");
        }
        let tls = ["--preview-cert", "/c", "--preview-key", "/k", "--preview-listen", "[::]:8443"];
        let all = [&["--preview-domain", "b.example"][..], &tls].concat();
        assert_eq!(domain(&all).unwrap().as_deref(), Some("b.example:8443"));
    }

    #[test]
    fn a_password_is_no_argument() {
        let url = "postgres://u:hunter2@h/d";
        let config = resolve(&["--database", url]).unwrap();
        assert_eq!(config.database.to_string(), "postgres://h/d");
        assert!(!format!("{config:?}").contains("hunter2"));
        let flag = |flag: &str| [String::from("serve"), flag.to_owned()].into_iter();
        let refuse = |url: &str, argument: &str| {
            let address = Address::parse(url).unwrap();
            refuse_open_secret(&address, Some(url), flag(argument))
        };
        for argument in [url, &format!("--database={url}")] {
            let error = refuse(url, argument).unwrap_err().to_string();
            assert!(error.contains("BIVOUAC_DATABASE") && !error.contains("hunter2"), "{error}");
        }
        refuse(url, "--other").unwrap();
        refuse("postgres://u@h/d", "postgres://u@h/d").unwrap();
    }

    #[test]
    fn values_are_checked() {
        let file = |url: &str| resolve(&["--database", url]).map(|config| config.database);
        assert_eq!(file("sqlite:/x/y.db").unwrap().path(), Some(Path::new("/x/y.db")));
        assert_eq!(file("sqlite:///x/y.db").unwrap().path(), Some(Path::new("/x/y.db")));
        for bad in ["mysql://x", "sqlite:", "sqlite::memory:", "/x/y.db", "sqlite:x?mode=ro"] {
            assert!(file(bad).is_err(), "{bad}");
        }
        let url = |url: &str| resolve(&["--public-url", url]).map(|config| config.public_url);
        assert_eq!(url("http://box:80/").unwrap().as_deref(), Some("http://box:80"));
        assert!(url("box:80").is_err() && url("http://").is_err());
        let issuer = |url: &str| resolve(&["--issuer", url]).map(|config| config.issuer);
        assert_eq!(issuer("https://id.x/").unwrap().as_deref(), Some("https://id.x"));
        assert!(issuer("id.x").unwrap_err().to_string().contains("--issuer"));
        let key = |flags: &[&str]| resolve(flags).map(|config| config.vault_key).unwrap();
        let sources = |flags: &[&str]| resolve(flags).map(|config| config.secret_sources).unwrap();
        assert_eq!(sources(&[]), bivouac_engine::HOST_SOURCES);
        assert_eq!(sources(&["--secret-sources", "vault,env"]), ["vault", "env"]);
        assert!(sources(&["--secret-sources", "none"]).is_empty());
        assert_eq!(key(&[]), Path::new("/data/vault.key"));
        assert_eq!(key(&["--database", "sqlite:/x/y.db"]), Path::new("/x/vault.key"));
        assert_eq!(key(&["--database", "postgres://h/d"]), Path::new("/data/vault.key"));
        assert_eq!(key(&["--vault-key", "/k"]), Path::new("/k"));
    }

    #[test]
    fn egress_flags_are_checked() {
        let resolver = |text: &str| resolve(&["--resolver", text]).map(|c| c.resolver);
        assert_eq!(resolver("192.0.2.1").unwrap().unwrap().to_string(), "192.0.2.1:53");
        assert_eq!(resolver("[2001:db8::1]:54").unwrap().unwrap().to_string(), "[2001:db8::1]:54");
        assert_eq!(resolver("2001:db8::1").unwrap().unwrap().port(), 53);
        assert!(resolver("dns.test").is_err());
        let flags = ["--egress-allow-private", "10.0.0.0/8", "--egress-allow-private", "fd00::/8"];
        assert_eq!(resolve(&flags).unwrap().egress_allow_private.len(), 2);
        let error = resolve(&["--egress-allow-private", "10.0.0.1/8"]).unwrap_err().to_string();
        assert!(
            error.contains("--egress-allow-private") && error.contains("10.0.0.0/8"),
            "{error}"
        );
        assert_eq!(resolve(&["--extra-ca", "/x.pem"]).unwrap().extra_ca, Some("/x.pem".into()));
    }

    #[test]
    fn an_idle_engine_takes_its_sandboxes_along() {
        let config = resolve(&["--idle-exit", "60"]).unwrap();
        assert!(config.stop_sandboxes);
        assert_eq!(config.idle_exit, Some(Duration::from_secs(60)));
    }

    #[test]
    fn a_folder_has_one_short_name() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        std::fs::create_dir(&a).unwrap();
        std::fs::create_dir(&b).unwrap();
        std::os::unix::fs::symlink(&a, folder.path().join("link")).unwrap();
        let name = instance(&a).unwrap();
        assert_eq!(name.len(), 16);
        assert_eq!(instance(&folder.path().join("link")).unwrap(), name);
        assert_eq!(instance(&folder.path().join("b/../a/")).unwrap(), name);
        assert_ne!(instance(&b).unwrap(), name);
        assert!(instance(&folder.path().join("missing")).is_err());
    }

    #[test]
    fn the_name_of_a_folder_never_changes() {
        // A newer version must find the control groups and sockets of the one before.
        assert_eq!(instance(Path::new("/")).unwrap(), "af63a24c860189fe");
    }
}
