//! What brokers are told about this host: name servers, roots of trust, ranges that may be allowed.
//!
//! Owns the file of root certificates in the data folder. Invariant: the file is the host's store and
//! `--extra-ca` as they were when the engine started, whole or not there; name servers are read at each
//! launch, because a host's change. Called by `serve` and, for its checks, by `doctor`.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use bivouac_engine::{EgressConfig, Resolvers};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use crate::config::ServeConfig;

/// Where systems keep the roots that they trust: Debian, Fedora, SUSE, Alpine.
const STORES: [&str; 4] = [
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
];
/// Name of the merged file in the data folder.
const ROOTS: &str = "roots.pem";
/// Where name servers are asked.
const DNS_PORT: u16 = 53;
/// Most name servers that are used: as many as libc uses.
const MOST: usize = 3;

/// Puts together what brokers are told.
///
/// # Errors
/// A file of certificates cannot be read, or the data folder not be written.
pub(super) fn config(config: &ServeConfig) -> anyhow::Result<EgressConfig> {
    let extra_ca = match &config.extra_ca {
        Some(file) => certificates(file).context("--extra-ca")?,
        None => String::new(),
    };
    let own = match store(Path::new("/"), std::env::var_os("SSL_CERT_FILE").map(PathBuf::from)) {
        Some(file) => certificates(&file)?,
        None => {
            tracing::warn!("this host has no root certificates: apt install ca-certificates");
            String::new()
        }
    };
    let roots = config.data_dir.join(ROOTS);
    write_whole(&roots, &joined(&own, &extra_ca))
        .with_context(|| format!("could not write {}", roots.display()))?;
    let resolvers = match config.resolver {
        Some(resolver) => Resolvers::new(move || vec![resolver]),
        None => Resolvers::new(|| read_resolvers(Path::new("/"))),
    };
    Ok(EgressConfig {
        resolvers,
        allow_private: config.egress_allow_private.clone(),
        roots: roots.display().to_string(),
        extra_ca,
    })
}

/// The file of roots that this host trusts.
pub(super) fn store(root: &Path, told: Option<PathBuf>) -> Option<PathBuf> {
    if let Some(told) = told.filter(|told| told.is_file()) {
        return Some(told);
    }
    STORES.iter().map(|file| root.join(file)).find(|file| file.is_file())
}

/// How many certificates a file holds.
///
/// # Errors
/// It cannot be read, or holds something broken.
pub(super) fn count(pem: &[u8]) -> anyhow::Result<usize> {
    let read = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    Ok(read.map_err(|error| anyhow::anyhow!("is no PEM file of certificates: {error:?}"))?.len())
}

/// The text of a file of certificates: PEM, one at least.
fn certificates(file: &Path) -> anyhow::Result<String> {
    let shown = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("could not read {shown}"))?;
    if count(text.as_bytes()).with_context(|| shown.to_string())? == 0 {
        bail!("{shown} holds no certificate (PEM)");
    }
    Ok(text)
}

fn joined(own: &str, extra: &str) -> String {
    let mut all = own.to_owned();
    if !all.is_empty() && !all.ends_with('\n') {
        all.push('\n');
    }
    all.push_str(extra);
    all
}

/// A launch may read the file while it is written again.
fn write_whole(file: &Path, text: &str) -> io::Result<()> {
    let fresh = file.with_extension("new");
    fs::write(&fresh, text)?;
    fs::rename(&fresh, file)
}

/// The name servers that this host asks, as libc reads them: none told is one on this machine.
pub(super) fn read_resolvers(root: &Path) -> Vec<SocketAddr> {
    let text = fs::read_to_string(root.join("etc/resolv.conf")).unwrap_or_default();
    let found: Vec<_> = text
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let server = words.next().filter(|word| *word == "nameserver").and(words.next())?;
            // A link-local one with a zone cannot be asked by address alone.
            server.parse::<IpAddr>().ok()
        })
        .map(|ip| SocketAddr::new(ip, DNS_PORT))
        .take(MOST)
        .collect();
    if found.is_empty() {
        return vec![SocketAddr::new(Ipv4Addr::LOCALHOST.into(), DNS_PORT)];
    }
    found
}

#[cfg(test)]
mod tests {
    use tempfile::tempdir;

    use super::*;

    fn resolvers(text: &str) -> Vec<String> {
        let folder = tempdir().unwrap();
        fs::create_dir(folder.path().join("etc")).unwrap();
        fs::write(folder.path().join("etc/resolv.conf"), text).unwrap();
        read_resolvers(folder.path()).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn name_servers_are_read_as_libc_does() {
        assert_eq!(
            resolvers("# x\nsearch a\nnameserver 192.0.2.1\nnameserver 2001:db8::1 # y\n"),
            ["192.0.2.1:53", "[2001:db8::1]:53"]
        );
        assert_eq!(resolvers("nameserver fe80::1%eth0\noptions x\n"), ["127.0.0.1:53"]);
        assert_eq!(resolvers(&"nameserver 192.0.2.1\n".repeat(9)).len(), MOST);
        assert_eq!(read_resolvers(Path::new("/no/such")).len(), 1);
    }

    #[test]
    fn a_file_of_roots_has_to_hold_some() {
        let folder = tempdir().unwrap();
        let file = folder.path().join("ca.pem");
        fs::write(&file, "nothing\n").unwrap();
        assert!(certificates(&file).unwrap_err().to_string().contains("no certificate"));
        let key = rcgen::KeyPair::generate().unwrap();
        let made = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        fs::write(&file, made.pem()).unwrap();
        assert_eq!(count(certificates(&file).unwrap().as_bytes()).unwrap(), 1);
        assert!(certificates(&folder.path().join("missing")).is_err());
        let both = joined(made.pem().trim_end(), &made.pem());
        assert_eq!(count(both.as_bytes()).unwrap(), 2);
    }

    #[test]
    fn the_store_is_the_told_one_or_the_system_s() {
        let folder = tempdir().unwrap();
        assert_eq!(store(folder.path(), None), None);
        let system = folder.path().join(STORES[0]);
        fs::create_dir_all(system.parent().unwrap()).unwrap();
        fs::write(&system, "x").unwrap();
        assert_eq!(store(folder.path(), None), Some(system.clone()));
        assert_eq!(store(folder.path(), Some("/no/such".into())), Some(system));
        let told = folder.path().join("told");
        fs::write(&told, "x").unwrap();
        assert_eq!(store(folder.path(), Some(told.clone())), Some(told));
    }
}
