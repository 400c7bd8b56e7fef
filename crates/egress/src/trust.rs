//! Who trusts whom: the session's own certificate authority towards the guest, and the roots that
//! destinations are checked against.
//!
//! Owns the authority's key, the leaf key and every leaf of one session ([`Authority`]), and the client
//! side of TLS ([`Roots`]). Invariant: the keys exist in this process's memory only and end with it; a
//! leaf names exactly one host and can do nothing but serve; a destination is always verified for the
//! name that the rule is for, never with a client certificate, never with early data.
//!
//! An idle session pays for one key and one certificate: leaves, their key and the roots are made when a
//! guest first needs them and can be dropped again ([`Authority::trim`], [`Roots::trim`]). Called by
//! [`crate::intercept`] for connections, by the composition root for the file that the sandbox gets.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bivouac_types::id::SessionId;
use lru::LruCache;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType, SerialNumber,
};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::{CertifiedKey, SigningKey, SingleCertAndKey};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::canonical::Name;

/// Most names whose leaves are kept.
const MOST_LEAVES: usize = 1000;
/// Leaves that may be made at once, and how many more each second: a guest that asks for ever new names
/// must not keep the broker busy with signatures.
const MINT_BURST: u32 = 200;
const MINT_PER_SECOND: u32 = 50;
/// How far before now certificates begin: the guest's clock may be a day behind.
const AUTHORITY_BEFORE: Duration = Duration::from_secs(48 * 3600);
const LEAF_BEFORE: Duration = Duration::from_secs(24 * 3600);
/// How long a leaf is good for, and when it is made anew.
const LEAF_AFTER: Duration = Duration::from_secs(7 * 24 * 3600);
const LEAF_RENEW: Duration = Duration::from_secs(4 * 24 * 3600);
/// Added to a session's life, for a guest whose clock is ahead.
const MARGIN: Duration = Duration::from_secs(48 * 3600);
/// Sessions to destinations that can be resumed.
const RESUMABLE: usize = 32;

/// Why there is no leaf, or no trust in destinations.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// Too many new names at once.
    #[error("too many new names at once: a certificate for {0} would be one too many this second")]
    TooMany(String),
    /// The certificate could not be made.
    #[error("cannot make a certificate for {name}: {cause}")]
    Mint {
        /// For which name.
        name: String,
        /// Why.
        cause: String,
    },
    /// The roots cannot be read.
    #[error("cannot read the root certificates that destinations are checked against: {0}")]
    Roots(#[from] io::Error),
    /// The roots are no good.
    #[error("the root certificates that destinations are checked against are unusable: {0}")]
    NoRoots(String),
}

/// The certificate authority of one session.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    provider: RefCell<Option<Arc<CryptoProvider>>>,
    leaves: RefCell<Option<Leaves>>,
    serial: Cell<u64>,
    tokens: Cell<(u32, Option<Instant>)>,
}

/// What exists from the first interception on.
struct Leaves {
    pair: KeyPair,
    signer: Arc<dyn SigningKey>,
    made: LruCache<Name, Leaf>,
}

struct Leaf {
    config: Arc<ServerConfig>,
    at: SystemTime,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// A life that no session reaches, for sessions whose end is not known: the key dies with the
    /// session anyway.
    pub const UNKNOWN_LIFE: Duration = Duration::from_secs(365 * 24 * 3600);

    /// Makes key and certificate. `life` is how long the session may last.
    ///
    /// # Errors
    /// When the system gives no random numbers; the session must not start then.
    pub fn new(session: &SessionId, life: Duration) -> io::Result<Self> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(io::Error::other)?;
        let now = SystemTime::now();
        let mut params = CertificateParams::default();
        params.not_before = rcgen::date_time_ymd(1970, 1, 1) + seconds(now - AUTHORITY_BEFORE);
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + seconds(now + life + MARGIN);
        params.distinguished_name = subject(&format!("Bivouac sandbox CA {session}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.serial_number = Some(serial(random()?, 0));
        let certificate = params.self_signed(&key).map_err(io::Error::other)?;
        let pem = certificate.pem();
        Ok(Self {
            issuer: Issuer::new(params, key),
            pem,
            provider: RefCell::new(None),
            leaves: RefCell::new(None),
            serial: Cell::new(random()?),
            tokens: Cell::new((MINT_BURST, None)),
        })
    }

    /// The certificate for the sandbox's trust store.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// How TLS for this name is ended: a leaf of its own, HTTP/2 and HTTP/1.1, tickets that count for
    /// this name in this session alone, no early data.
    ///
    /// # Errors
    /// [`TrustError::TooMany`] when the guest asks for too many new names, [`TrustError::Mint`] when the
    /// certificate cannot be made.
    pub fn server_config_for(&self, name: &Name) -> Result<Arc<ServerConfig>, TrustError> {
        let now = SystemTime::now();
        if let Some(leaves) = self.leaves.borrow_mut().as_mut()
            && let Some(leaf) = leaves.made.get(name)
        {
            // A clock that was set back makes the leaf look young: it is still good then, or the guest
            // would refuse every other one too.
            let age = now.duration_since(leaf.at).unwrap_or_default();
            if age < LEAF_RENEW {
                return Ok(Arc::clone(&leaf.config));
            }
        }
        if !self.may_mint() {
            return Err(TrustError::TooMany(name.to_string()));
        }
        let config = self
            .mint(name, now)
            .map_err(|cause| TrustError::Mint { name: name.to_string(), cause })?;
        if let Some(leaves) = self.leaves.borrow_mut().as_mut() {
            leaves.made.put(name.clone(), Leaf { config: Arc::clone(&config), at: now });
        }
        Ok(config)
    }

    /// Drops leaves and their key; they are made again when needed. For a session that rests.
    pub fn trim(&self) {
        *self.leaves.borrow_mut() = None;
        *self.provider.borrow_mut() = None;
    }

    fn may_mint(&self) -> bool {
        let (mut left, since) = self.tokens.get();
        let now = Instant::now();
        let mut mark = since.unwrap_or(now);
        let earned = now.duration_since(mark).as_millis() * u128::from(MINT_PER_SECOND) / 1000;
        if earned > 0 {
            left = left.saturating_add(u32::try_from(earned).unwrap_or(MINT_BURST)).min(MINT_BURST);
            mark = now;
        }
        let may = left > 0;
        self.tokens.set((left.saturating_sub(1), Some(mark)));
        may
    }

    fn provider(&self) -> Arc<CryptoProvider> {
        let mut provider = self.provider.borrow_mut();
        Arc::clone(provider.get_or_insert_with(|| Arc::new(aws_lc_rs::default_provider())))
    }

    fn mint(&self, name: &Name, now: SystemTime) -> Result<Arc<ServerConfig>, String> {
        let mut slot = self.leaves.borrow_mut();
        if slot.is_none() {
            *slot = Some(Leaves::new()?);
        }
        let Some(leaves) = slot.as_ref() else { return Err("no leaf key".to_owned()) };
        let mut params = CertificateParams::default();
        params.not_before = rcgen::date_time_ymd(1970, 1, 1) + seconds(now - LEAF_BEFORE);
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + seconds(now + LEAF_AFTER);
        // A common name has room for 64 characters, a host name for 253.
        let common = if name.as_str().len() <= 64 { name.as_str() } else { "Bivouac sandbox leaf" };
        params.distinguished_name = subject(common);
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let san = name.as_str().try_into().map_err(|e: rcgen::Error| e.to_string())?;
        params.subject_alt_names = vec![SanType::DnsName(san)];
        // All leaves share a key, and browsers refuse two certificates with one issuer and serial.
        let count = self.serial.get().wrapping_add(1);
        self.serial.set(count);
        params.serial_number = Some(serial(count, 1));
        let leaf = params.signed_by(&leaves.pair, &self.issuer).map_err(|e| e.to_string())?;
        let chain = vec![leaf.der().clone()];
        let key = CertifiedKey::new(chain, Arc::clone(&leaves.signer));
        let mut config = ServerConfig::builder_with_provider(self.provider())
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
            .map_err(|e| e.to_string())?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config.max_early_data_size = 0;
        config.send_half_rtt_data = false;
        // Tickets sealed with a key of this configuration: they mean nothing to any other name.
        config.ticketer = aws_lc_rs::Ticketer::new().map_err(|e| e.to_string())?;
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.send_tls13_tickets = 1;
        Ok(Arc::new(config))
    }
}

impl Leaves {
    fn new() -> Result<Self, String> {
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|e| e.to_string())?;
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pair.serialize_der()));
        let signer = aws_lc_rs::sign::any_ecdsa_type(&der).map_err(|e| e.to_string())?;
        let most = NonZeroUsize::new(MOST_LEAVES).unwrap_or(NonZeroUsize::MIN);
        // Unbounded by itself, so that it does not reserve a thousand places for a guest that talks to
        // three hosts; `put` keeps the bound.
        let mut made = LruCache::unbounded();
        made.resize(most);
        Ok(Self { pair, signer, made })
    }
}

fn subject(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::OrganizationName, "Bivouac");
    name.push(DnType::CommonName, common);
    name
}

/// Whole seconds since the epoch: certificates know no others.
fn seconds(at: SystemTime) -> Duration {
    Duration::from_secs(at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
}

fn serial(number: u64, kind: u8) -> SerialNumber {
    let mut bytes = [0; 10];
    // The first bit is clear: serials are positive, and never begin with a superfluous zero.
    bytes[0] = 0x40;
    bytes[1] = kind;
    bytes[2..].copy_from_slice(&number.to_be_bytes());
    SerialNumber::from_slice(&bytes)
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    ::aws_lc_rs::rand::fill(&mut bytes)
        .map_err(|_| io::Error::other("the system gave no random numbers"))?;
    Ok(u64::from_be_bytes(bytes))
}

/// Gives the PEM of the roots; called again after [`Roots::trim`].
pub type ReadRoots = Box<dyn Fn() -> io::Result<Vec<u8>>>;

/// The roots that destinations are checked against.
pub struct Roots {
    read: ReadRoots,
    made: RefCell<Option<Clients>>,
}

#[derive(Clone)]
struct Clients {
    any: Arc<ClientConfig>,
    http1: Arc<ClientConfig>,
}

impl fmt::Debug for Roots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Roots").finish_non_exhaustive()
    }
}

impl Roots {
    /// `read` gives PEM: of a file that was opened before the process was confined, say.
    #[must_use]
    pub fn new(read: ReadRoots) -> Self {
        Self { read, made: RefCell::new(None) }
    }

    /// The client side of TLS. `http1_only` is for destinations that are spoken to in HTTP/1.1 whatever
    /// else they can: WebSocket handshakes and forward proxies.
    ///
    /// # Errors
    /// When the roots cannot be read or none of them is usable: then nothing is trusted.
    pub fn client_config(&self, http1_only: bool) -> Result<Arc<ClientConfig>, TrustError> {
        let mut slot = self.made.borrow_mut();
        if slot.is_none() {
            *slot = Some(self.make()?);
        }
        let clients = slot.as_ref().map(|c| if http1_only { &c.http1 } else { &c.any });
        clients.map(Arc::clone).ok_or_else(|| TrustError::NoRoots("none was made".to_owned()))
    }

    /// Drops what was read; it is read again when needed.
    pub fn trim(&self) {
        *self.made.borrow_mut() = None;
    }

    fn make(&self) -> Result<Clients, TrustError> {
        let pem = (self.read)()?;
        let mut roots = RootCertStore::empty();
        // A store may hold certificates that no verifier accepts; those are skipped, as everywhere.
        let certificates = CertificateDer::pem_slice_iter(&pem).filter_map(Result::ok);
        let (good, bad) = roots.add_parsable_certificates(certificates);
        if good == 0 {
            let what = format!("no certificate among {bad} entries can be used");
            return Err(TrustError::NoRoots(what));
        }
        let provider = Arc::new(aws_lc_rs::default_provider());
        let roots = Arc::new(roots);
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(|e| TrustError::NoRoots(e.to_string()))?;
        let mut any = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
            .map_err(|e| TrustError::NoRoots(e.to_string()))?
            .with_webpki_verifier(verifier)
            .with_no_client_auth();
        any.enable_early_data = false;
        any.resumption = Resumption::in_memory_sessions(RESUMABLE);
        any.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let mut http1 = any.clone();
        http1.alpn_protocols = vec![b"http/1.1".to_vec()];
        // A session that was begun with one protocol is not resumed with another.
        http1.resumption = Resumption::in_memory_sessions(RESUMABLE);
        Ok(Clients { any: Arc::new(any), http1: Arc::new(http1) })
    }
}

#[cfg(test)]
mod tests;
