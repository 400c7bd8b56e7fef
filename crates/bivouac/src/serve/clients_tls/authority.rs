//! The certificate authority of `--clients-tls`.
//!
//! Owns: its key and certificate in `<data-dir>/clients-tls`, and the leaves that it signs. Invariants:
//! the authority is made once and used again at every start, so that clients need to be told of it only
//! once; its key never leaves the folder (mode 0600) and this process; its certificate can only vouch
//! for names below the one domain, whatever is signed with it. Called by `clients_tls`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bivouac_engine::{Clock as _, SystemClock};
use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    NameConstraints,
};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use crate::serve::record::write_private;

/// Names that a leaf is for.
pub(crate) const NAMES: [&str; 2] = ["vercel.com", "oidc.vercel.com"];
/// What the authority may vouch for: this domain and what is below it.
const DOMAIN: &str = "vercel.com";
/// Folder below the data folder.
const FOLDER: &str = "clients-tls";
const KEY_FILE: &str = "ca.key";
const CERTIFICATE_FILE: &str = "ca.pem";

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);
/// How long the authority is good for. Clients keep its certificate in their configuration.
const CA_LIFE: Duration = Duration::from_secs(3650 * 24 * 3600);
/// How long a leaf is good for.
const LEAF_LIFE: Duration = Duration::from_secs(3 * 24 * 3600);

/// Why there is no authority to work with.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AuthorityError {
    /// A file could not be read or written.
    #[error("could not {what} {}", path.display())]
    File {
        /// What was being done.
        what: &'static str,
        /// To which file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The files are there and do not make an authority.
    #[error(
        "the certificate authority in {} cannot be used ({reason}); remove that folder to have a new \
         one made, and tell clients of it with 'bivouac env --tls'", folder.display()
    )]
    Damaged {
        /// Where it is.
        folder: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Making or signing failed.
    #[error("could not make a certificate")]
    Mint(#[source] rcgen::Error),
    /// The cryptography library refused.
    #[error("could not use the certificate that was just made")]
    Tls(#[source] rustls::Error),
}

/// The authority: signs leaves for [`NAMES`].
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its certificate, as clients need it.
    pem: String,
    der: CertificateDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// Takes the authority of a data folder, or makes it. One that was damaged is refused: a new one
    /// behind the clients' backs would be refused by them, and less clearly.
    pub(crate) fn open(
        data_dir: &Path,
        provider: Arc<CryptoProvider>,
    ) -> Result<Self, AuthorityError> {
        let folder = data_dir.join(FOLDER);
        fs::create_dir_all(&folder).map_err(file("make", &folder))?;
        let (key_path, certificate_path) = (folder.join(KEY_FILE), folder.join(CERTIFICATE_FILE));
        // The certificate is written last: without it, whatever else is there was never told to anybody.
        let (key, pem) = match read(&certificate_path)? {
            Some(pem) => {
                let damaged = |reason: &str| AuthorityError::Damaged {
                    folder: folder.clone(),
                    reason: reason.to_owned(),
                };
                let key = read(&key_path)?.ok_or_else(|| damaged("its key is missing"))?;
                (KeyPair::from_pem(&key).map_err(|_| damaged("its key is no key"))?, pem)
            }
            None => make(&key_path, &certificate_path)?,
        };
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|_| {
            let reason = "its certificate is no certificate".to_owned();
            AuthorityError::Damaged { folder: folder.clone(), reason }
        })?;
        let issuer = Issuer::new(parameters(wall_time()), key);
        let authority = Self { issuer, pem, der, provider };
        authority.check().map_err(|reason| AuthorityError::Damaged { folder, reason })?;
        Ok(authority)
    }

    /// The certificate that clients have to trust.
    pub(crate) fn pem(&self) -> &str {
        &self.pem
    }

    /// Signs a leaf for [`NAMES`], with a key of its own.
    fn leaf(&self, now: SystemTime) -> Result<Leaf, AuthorityError> {
        let mut wanted =
            CertificateParams::new(NAMES.map(str::to_owned)).map_err(AuthorityError::Mint)?;
        wanted.distinguished_name = named(DOMAIN);
        wanted.not_before = (now - HOUR).into();
        wanted.not_after = (now + LEAF_LIFE).into();
        wanted.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        wanted.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        // Python 3.13 refuses a leaf that does not say who signed it.
        wanted.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().map_err(AuthorityError::Mint)?;
        let certificate = wanted.signed_by(&key, &self.issuer).map_err(AuthorityError::Mint)?;
        let secret = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let secret =
            self.provider.key_provider.load_private_key(secret).map_err(AuthorityError::Tls)?;
        let chain = vec![certificate.der().clone()];
        Ok(Leaf { key: Arc::new(CertifiedKey::new(chain, secret)), renew_at: now + LEAF_LIFE / 2 })
    }

    /// Signs a leaf and looks at it as a client would.
    fn check(&self) -> Result<(), String> {
        let now = wall_time();
        let leaf = self.leaf(now).map_err(|error| error.to_string())?;
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).map_err(|error| error.to_string())?;
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), self.provider.clone())
                .build()
                .map_err(|error| error.to_string())?;
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        for name in NAMES {
            let name = ServerName::try_from(name).map_err(|error| error.to_string())?;
            let at = UnixTime::since_unix_epoch(since);
            let end = leaf.key.end_entity_cert().map_err(|error| error.to_string())?;
            verifier
                .verify_server_cert(end, &[], &name, &[], at)
                .map_err(|error| format!("what it signs is not accepted: {error}"))?;
        }
        Ok(())
    }
}

/// A server certificate of ours and when the next one is due.
#[derive(Debug, Clone)]
struct Leaf {
    key: Arc<CertifiedKey>,
    renew_at: SystemTime,
}

/// Gives each handshake the present leaf, and signs the next one in time.
#[derive(Debug)]
pub(crate) struct Leaves {
    authority: Authority,
    present: Mutex<Leaf>,
}

impl Leaves {
    pub(crate) fn new(authority: Authority) -> Result<Self, AuthorityError> {
        let present = Mutex::new(authority.leaf(wall_time())?);
        Ok(Self { authority, present })
    }

    fn present(&self, now: SystemTime) -> Arc<CertifiedKey> {
        let mut leaf = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        // A clock that was set back by days makes the present leaf one of the future.
        if now >= leaf.renew_at || now + LEAF_LIFE < leaf.renew_at {
            match self.authority.leaf(now) {
                Ok(fresh) => *leaf = fresh,
                // The old one may still be good; the client decides.
                Err(error) => tracing::error!(%error, "the next certificate for clients"),
            }
        }
        leaf.key.clone()
    }
}

impl ResolvesServerCert for Leaves {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let name = hello.server_name()?;
        NAMES
            .iter()
            .any(|known| known.eq_ignore_ascii_case(name))
            .then(|| self.present(wall_time()))
    }
}

/// The time of day, from the one clock.
fn wall_time() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(u64::try_from(SystemClock.now()).unwrap_or(0))
}

/// Makes key and certificate and keeps them.
fn make(key_path: &Path, certificate_path: &Path) -> Result<(KeyPair, String), AuthorityError> {
    let key = KeyPair::generate().map_err(AuthorityError::Mint)?;
    let pem = parameters(wall_time()).self_signed(&key).map_err(AuthorityError::Mint)?.pem();
    write_private(key_path, key.serialize_pem().as_bytes()).map_err(file("write", key_path))?;
    write_private(certificate_path, pem.as_bytes()).map_err(file("write", certificate_path))?;
    Ok((key, pem))
}

/// What the authority's certificate says. Its subject has to stay as it is: leaves of a later start
/// must name it.
fn parameters(now: SystemTime) -> CertificateParams {
    let mut ca = CertificateParams::default();
    ca.distinguished_name = named("Bivouac clients-tls");
    ca.not_before = (now - DAY).into();
    ca.not_after = (now + CA_LIFE).into();
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    ca.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    ca.name_constraints = Some(NameConstraints {
        permitted_subtrees: vec![GeneralSubtree::DnsName(DOMAIN.to_owned())],
        // A kind of name without any permitted one is free: so no address at all.
        excluded_subtrees: vec![
            GeneralSubtree::IpAddress(CidrSubnet::V4([0; 4], [0; 4])),
            GeneralSubtree::IpAddress(CidrSubnet::V6([0; 16], [0; 16])),
        ],
    });
    ca
}

fn named(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

fn read(path: &Path) -> Result<Option<String>, AuthorityError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(file("read", path)(error)),
    }
}

fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AuthorityError {
    let path = path.to_owned();
    move |source| AuthorityError::File { what, path, source }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use tempfile::tempdir;

    use super::*;

    fn provider() -> Arc<CryptoProvider> {
        Arc::new(rustls::crypto::aws_lc_rs::default_provider())
    }

    fn accepted(ca: &Authority, names: &[&str], asked: &str) -> Result<(), rustls::Error> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut wanted = CertificateParams::new(names).unwrap();
        wanted.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate().unwrap();
        let leaf = wanted.signed_by(&key, &ca.issuer).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(ca.der.clone()).unwrap();
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), ca.provider.clone())
            .build()
            .unwrap()
            .verify_server_cert(
                leaf.der(),
                &[],
                &ServerName::try_from(asked.to_owned()).unwrap(),
                &[],
                UnixTime::now(),
            )
            .map(drop)
    }

    #[test]
    fn it_is_made_once_and_its_key_is_private() {
        let folder = tempdir().unwrap();
        let first = Authority::open(folder.path(), provider()).unwrap();
        let second = Authority::open(folder.path(), provider()).unwrap();
        assert_eq!(first.pem(), second.pem());
        assert_eq!(first.issuer.key().serialize_der(), second.issuer.key().serialize_der());
        for name in [KEY_FILE, CERTIFICATE_FILE] {
            let path = folder.path().join(FOLDER).join(name);
            assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
        }
        assert!(!first.pem().contains("PRIVATE"));
        assert!(!format!("{first:?}").contains("KeyPair"));
    }

    #[test]
    fn it_can_vouch_for_its_domain_only() {
        let folder = tempdir().unwrap();
        let ca = Authority::open(folder.path(), provider()).unwrap();
        for name in NAMES {
            accepted(&ca, &[name], name).unwrap();
        }
        for other in ["example.com", "notvercel.com", "vercel.com.evil.test", "127.0.0.1", "::1"] {
            assert!(accepted(&ca, &[other], other).is_err(), "{other}");
            // A second name does not smuggle it in.
            assert!(accepted(&ca, &["vercel.com", other], other).is_err(), "{other}");
        }
    }

    #[test]
    fn a_start_that_was_cut_before_the_certificate_makes_a_new_one() {
        let folder = tempdir().unwrap();
        Authority::open(folder.path(), provider()).unwrap();
        fs::remove_file(folder.path().join(FOLDER).join(CERTIFICATE_FILE)).unwrap();
        Authority::open(folder.path(), provider()).unwrap();
    }

    #[test]
    fn a_damaged_one_is_refused_and_left_alone() {
        let other = tempdir().unwrap();
        let foreign = Authority::open(other.path(), provider()).unwrap();
        let cases: [(&str, Option<&str>, &str); 4] = [
            (KEY_FILE, None, "its key is missing"),
            (KEY_FILE, Some("x"), "its key is no key"),
            (CERTIFICATE_FILE, Some("x"), "its certificate is no certificate"),
            (CERTIFICATE_FILE, Some(foreign.pem()), "what it signs is not accepted"),
        ];
        for (name, text, reason) in cases {
            let folder = tempdir().unwrap();
            Authority::open(folder.path(), provider()).unwrap();
            let path = folder.path().join(FOLDER).join(name);
            match text {
                Some(text) => fs::write(&path, text).unwrap(),
                None => fs::remove_file(&path).unwrap(),
            }
            let error = Authority::open(folder.path(), provider()).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("remove that folder"), "{error}");
            assert_eq!(fs::read_to_string(&path).ok().as_deref(), text);
        }
    }

    #[test]
    fn leaves_are_short_and_renewed() {
        let folder = tempdir().unwrap();
        let leaves = Leaves::new(Authority::open(folder.path(), provider()).unwrap()).unwrap();
        let now = wall_time();
        let first = leaves.present(now);
        assert!(Arc::ptr_eq(&first, &leaves.present(now + HOUR)));
        let second = leaves.present(now + LEAF_LIFE / 2 + HOUR);
        assert!(!Arc::ptr_eq(&first, &second));
        assert!(!Arc::ptr_eq(&second, &leaves.present(now - 30 * DAY)), "the clock was set back");
    }
}
