//! `--preview-listen`: routes over TLS, with the operator's certificate.
//!
//! Invariants: the certificate in use is one that fits its key; new files are taken when they do, and until then
//! the old ones go on; the key is in no message. Called by `serve`.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

/// How often the files are looked at, at most.
const LOOK: Duration = Duration::from_secs(1);

/// What the operator named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// `--preview-cert`: the certificate and those between it and its authority, PEM.
    pub certificate: PathBuf,
    /// `--preview-key`, PEM.
    pub key: PathBuf,
    /// `--preview-listen`.
    pub listen: SocketAddr,
}

/// A listener for routes alone.
pub struct PreviewTls {
    /// Bound.
    pub listener: TcpListener,
    /// Takes TLS with HTTP/2 and HTTP/1.1.
    pub acceptor: TlsAcceptor,
}

impl std::fmt::Debug for PreviewTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PreviewTls").field("listener", &self.listener).finish_non_exhaustive()
    }
}

impl PreviewTls {
    /// Reads the files and takes the address.
    ///
    /// # Errors
    /// The address is taken, or the files are no certificate and its key; which one is named.
    pub async fn open(files: TlsFiles) -> anyhow::Result<Self> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let listen = files.listen;
        let present = Present::open(files, provider.clone())?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .context("TLS cannot be set up")?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(present));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let listener = TcpListener::bind(listen)
            .await
            .with_context(|| format!("could not listen on {listen} (--preview-listen)"))?;
        Ok(Self { listener, acceptor: TlsAcceptor::from(Arc::new(config)) })
    }
}

/// What tells two versions of the files apart.
type Stamp = [(u64, u64, i64, i64); 2];

fn stamp(files: &TlsFiles) -> io::Result<Stamp> {
    let of = |path: &Path| -> io::Result<(u64, u64, i64, i64)> {
        let about = std::fs::metadata(path)?;
        Ok((about.ino(), about.len(), about.mtime(), about.mtime_nsec()))
    };
    Ok([of(&files.certificate)?, of(&files.key)?])
}

/// The certificate in use.
struct Present {
    files: TlsFiles,
    provider: Arc<CryptoProvider>,
    now: Mutex<Held>,
}

struct Held {
    key: Arc<CertifiedKey>,
    stamp: Option<Stamp>,
    looked: Instant,
}

impl std::fmt::Debug for Present {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Present").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Present {
    fn open(files: TlsFiles, provider: Arc<CryptoProvider>) -> anyhow::Result<Self> {
        // Before they are read: what changes in between is seen at the next look.
        let stamp = stamp(&files).ok();
        let key = Arc::new(read(&files, &provider)?);
        let now = Mutex::new(Held { key, stamp, looked: Instant::now() });
        Ok(Self { files, provider, now })
    }

    fn present(&self) -> Arc<CertifiedKey> {
        let mut held = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        if held.looked.elapsed() < LOOK {
            return held.key.clone();
        }
        held.looked = Instant::now();
        let Ok(seen) = stamp(&self.files) else { return held.key.clone() };
        if held.stamp != Some(seen) {
            match read(&self.files, &self.provider) {
                Ok(key) => {
                    held.key = Arc::new(key);
                    held.stamp = Some(seen);
                    tracing::info!("the certificate of --preview-cert has changed");
                }
                // Half of a change: the next look may find the other half.
                Err(error) => tracing::warn!("the old certificate of routes stays: {error:#}"),
            }
        }
        held.key.clone()
    }
}

impl ResolvesServerCert for Present {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.present())
    }
}

fn read(files: &TlsFiles, provider: &CryptoProvider) -> anyhow::Result<CertifiedKey> {
    let TlsFiles { certificate, key, .. } = files;
    let shown = certificate.display();
    let pem = std::fs::read(certificate)
        .with_context(|| format!("could not read {shown} (--preview-cert)"))?;
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<_, _>>()
        .ok()
        .filter(|chain: &Vec<_>| !chain.is_empty())
        .with_context(|| format!("{shown} holds no certificate in PEM (--preview-cert)"))?;
    let shown = key.display();
    let pem =
        std::fs::read(key).with_context(|| format!("could not read {shown} (--preview-key)"))?;
    // The cause could hold a part of it.
    let secret = PrivateKeyDer::from_pem_slice(&pem)
        .ok()
        .with_context(|| format!("{shown} holds no key in PEM (--preview-key)"))?;
    CertifiedKey::from_der(chain, secret, provider)
        .with_context(|| format!("{shown} is not the key of {}", certificate.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(files: &TlsFiles, certificate: bool, key: bool) {
        let pair = rcgen::generate_simple_self_signed(["*.boxes.example".to_owned()]).unwrap();
        if certificate {
            std::fs::write(&files.certificate, pair.cert.pem()).unwrap();
        }
        if key {
            std::fs::write(&files.key, pair.signing_key.serialize_pem()).unwrap();
        }
    }

    #[test]
    fn a_changed_certificate_is_taken_when_it_fits() {
        let folder = tempfile::tempdir().unwrap();
        let files = TlsFiles {
            certificate: folder.path().join("c.pem"),
            key: folder.path().join("k.pem"),
            listen: "127.0.0.1:0".parse().unwrap(),
        };
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let error = Present::open(files.clone(), provider.clone()).unwrap_err();
        assert!(format!("{error:#}").contains("--preview-cert"), "{error:#}");
        write(&files, true, true);
        let present = Present::open(files.clone(), provider.clone()).unwrap();
        let look = || {
            present.now.lock().unwrap().looked = Instant::now().checked_sub(LOOK).unwrap();
            present.present().cert.clone()
        };
        let first = look();
        // Half of a change is none.
        write(&files, true, false);
        assert_eq!(look(), first);
        assert!(Present::open(files.clone(), provider).is_err());
        write(&files, true, true);
        let second = look();
        assert_ne!(second, first);
        std::fs::remove_file(&files.key).unwrap();
        assert_eq!(look(), second);
    }
}
