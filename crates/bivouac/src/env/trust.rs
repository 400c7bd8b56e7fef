//! The certificates of an engine with `--clients-tls`, as clients take them.
//!
//! Owns: two files in the caller's cache. Invariant: what a client trusted before it still trusts: a
//! variable that replaces the system's certificates gets a copy of them with ours at the end.

use std::io;
use std::path::{Path, PathBuf};

use super::install;

/// Where distributions keep their certificates.
const SYSTEM: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// The files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trust {
    /// For variables that add certificates: `NODE_EXTRA_CA_CERTS`.
    pub extra: PathBuf,
    /// For variables that replace the system's: `SSL_CERT_FILE`.
    pub bundle: PathBuf,
}

/// Writes both files. `get` reads the caller's environment, whose own certificates are kept.
///
/// # Errors
/// The caller's own file cannot be read, or the cache folder cannot be written.
pub fn install_trust(
    cache_dir: Option<&Path>,
    ca: &str,
    get: impl Fn(&str) -> Option<String>,
) -> io::Result<Trust> {
    let own = |name: &str| match get(name).filter(|path| !path.is_empty()) {
        Some(path) => std::fs::read_to_string(&path).map(Some).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("{name} names {path}, which cannot be read: {error}"),
            )
        }),
        None => Ok(None),
    };
    let extra = own("NODE_EXTRA_CA_CERTS")?.unwrap_or_default();
    let bundle = match own("SSL_CERT_FILE")? {
        Some(bundle) => bundle,
        None => {
            SYSTEM.iter().find_map(|path| std::fs::read_to_string(path).ok()).unwrap_or_default()
        }
    };
    Ok(Trust {
        extra: install(cache_dir, "extra-ca", "pem", with(&extra, ca).as_bytes())?,
        bundle: install(cache_dir, "ca-bundle", "pem", with(&bundle, ca).as_bytes())?,
    })
}

/// Certificates with ours at the end, once.
fn with(present: &str, ca: &str) -> String {
    let (present, ca) = (present.trim_end(), ca.trim_end());
    match present {
        "" => format!("{ca}\n"),
        _ if present.contains(ca) => format!("{present}\n"),
        _ => format!("{present}\n{ca}\n"),
    }
}

/// The names that the text of `/etc/hosts` does not lead to `address`.
#[must_use]
pub fn unmapped<'a>(hosts: &str, address: &str, names: &'a [String]) -> Vec<&'a str> {
    let leads = |name: &str| {
        let line = |line: &str| {
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
            let first = words.next()?;
            words.any(|word| word.eq_ignore_ascii_case(name)).then(|| first == address)
        };
        // The first line with the name counts.
        hosts.lines().find_map(line).unwrap_or(false)
    };
    names.iter().map(String::as_str).filter(|name| !leads(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CA: &str = "-----BEGIN CERTIFICATE-----\nours\n-----END CERTIFICATE-----\n";

    #[test]
    fn the_caller_s_own_certificates_stay() {
        let cache = tempfile::tempdir().unwrap();
        let theirs = cache.path().join("company.pem");
        std::fs::write(&theirs, "company").unwrap();
        let theirs = theirs.display().to_string();
        let first = install_trust(Some(cache.path()), CA, |_| Some(theirs.clone())).unwrap();
        for path in [&first.extra, &first.bundle] {
            assert_eq!(std::fs::read_to_string(path).unwrap(), format!("company\n{CA}"));
        }
        // Once more, from an environment that has ours already.
        let second = install_trust(Some(cache.path()), CA, |name| {
            let path = if name == "SSL_CERT_FILE" { &first.bundle } else { &first.extra };
            Some(path.display().to_string())
        });
        assert_eq!(second.unwrap(), first);
    }

    #[test]
    fn without_any_the_system_s_are_kept() {
        let cache = tempfile::tempdir().unwrap();
        let trust = install_trust(Some(cache.path()), CA, |_| None).unwrap();
        assert_eq!(std::fs::read_to_string(&trust.extra).unwrap(), CA);
        let bundle = std::fs::read_to_string(&trust.bundle).unwrap();
        assert!(bundle.ends_with(CA));
        if let Some(system) = SYSTEM.iter().find_map(|path| std::fs::read_to_string(path).ok()) {
            assert!(bundle.starts_with(system.trim_end()));
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let cache = tempfile::tempdir().unwrap();
        let error = install_trust(Some(cache.path()), CA, |_| Some("/no/such.pem".to_owned()));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("NODE_EXTRA_CA_CERTS names /no/such.pem"), "{error}");
    }

    #[test]
    fn hosts_are_read_as_resolvers_read_them() {
        let names = ["vercel.com".to_owned(), "oidc.vercel.com".to_owned()];
        let missing = |hosts: &str| unmapped(hosts, "127.0.0.1", &names).join(" ");
        assert_eq!(missing(""), "vercel.com oidc.vercel.com");
        assert_eq!(
            missing("127.0.0.1 localhost Vercel.com # oidc.vercel.com\n"),
            "oidc.vercel.com"
        );
        assert_eq!(missing("127.0.0.1\tvercel.com oidc.vercel.com"), "");
        assert_eq!(
            missing("#127.0.0.1 vercel.com\n10.0.0.1 oidc.vercel.com\n127.0.0.1 oidc.vercel.com"),
            "vercel.com oidc.vercel.com"
        );
    }
}
