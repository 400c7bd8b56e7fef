//! A small internet without an uplink: a namespace for the engine under test, and behind it one in
//! which every address answers.
//!
//! ```text
//! host namespace            veth            world namespace
//! engine, sandboxes   198.51.100.1 -- 198.51.100.2   every other address is local
//! 127.0.0.1 is its own    2001:db8:51::1 -- ::2      name server at 198.51.100.53
//! ```
//!
//! Owns: both namespaces, the servers in the second one, and the record of what reached it. The record
//! that decides is [`Wire`]: it sees every packet that leaves the host namespace, and knows nothing of
//! policies. Invariant: neither namespace has a way out, so any address may be played. A test thread
//! enters with [`World::enter`]; what it starts from then on (the engine, the command line) is inside.
//! Called by `crates/bivouac/tests/egress`.

mod dns;
mod net;
mod origin;
mod wire;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result};
use tempfile::TempDir;

use self::dns::Zones;
pub use self::dns::{Answer, Query};
use self::net::Namespace;
pub use self::origin::Seen;
use self::origin::{Certificates, Origins};
pub use self::wire::{Packet, Wire};

/// Address of the name server.
pub const NAME_SERVER: &str = "198.51.100.53";

/// The two namespaces and what runs in them. Its servers end with it.
#[derive(Debug)]
pub struct World {
    host: Namespace,
    world: Namespace,
    zones: Arc<Zones>,
    seen: Arc<Mutex<Vec<Seen>>>,
    certificates: Arc<Certificates>,
    wire: Wire,
    folder: TempDir,
    /// End with it.
    _servers: Vec<net::Server>,
}

impl World {
    /// Makes it.
    ///
    /// # Errors
    /// Without root, `ip`, `unshare` or `nsenter`.
    pub fn new() -> Result<Self> {
        Self::make(true)
    }

    /// Makes one whose [`World::wire`] stays empty: for benches, whose packets would fill the memory.
    ///
    /// # Errors
    /// As [`World::new`].
    pub fn unrecorded() -> Result<Self> {
        Self::make(false)
    }

    fn make(recorded: bool) -> Result<Self> {
        let (host, world) = net::pair()?;
        let folder = tempfile::Builder::new().prefix("bivouac-world-").tempdir()?;
        let certificates = Arc::new(Certificates::new()?);
        std::fs::write(folder.path().join("roots.pem"), certificates.root_pem())?;
        let zones = Arc::new(Zones::default());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let wire = if recorded { Wire::listen(&world)? } else { Wire::deaf() };
        let names = zones.clone();
        let name_server = world.serve("world-dns", move || dns::serve(names))?;
        let origins = Origins::new(certificates.clone(), seen.clone());
        let web = world.serve("world-web", move || origins.serve())?;
        let _servers = vec![name_server, web];
        Ok(Self { host, world, zones, seen, certificates, wire, folder, _servers })
    }

    /// Moves the calling thread, and all that it starts later, into the engine's namespace.
    ///
    /// # Errors
    /// As setns(2).
    pub fn enter(&self) -> Result<()> {
        self.host.enter()
    }

    /// A command line that runs a program inside the engine's namespace: for programs that are started
    /// by something else than a thread that has entered.
    #[must_use]
    pub fn prefix(&self) -> Vec<String> {
        self.host.prefix()
    }

    /// The same for the side of the origins: a test may run a server of its own there.
    #[must_use]
    pub fn far_prefix(&self) -> Vec<String> {
        self.world.prefix()
    }

    /// Makes `name` resolve to these addresses (A and AAAA).
    ///
    /// # Panics
    /// When one is no address.
    pub fn name(&self, name: &str, addresses: &[&str]) {
        let parsed: Vec<IpAddr> =
            addresses.iter().map(|a| a.parse().unwrap_or_else(|e| panic!("{a}: {e}"))).collect();
        self.zones.set(name, Answer::Addresses(parsed));
    }

    /// Makes `name` answer as told.
    pub fn answer(&self, name: &str, answer: Answer) {
        self.zones.set(name, answer);
    }

    /// Queries that the name server got, oldest first.
    #[must_use]
    pub fn queries(&self) -> Vec<Query> {
        self.zones.queries()
    }

    /// Requests and raw bytes that servers got, oldest first.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What servers got whose text (name, path, header or body) holds `marker`.
    #[must_use]
    pub fn seen_with(&self, marker: &str) -> Vec<Seen> {
        self.seen().into_iter().filter(|seen| seen.text().contains(marker)).collect()
    }

    /// Every packet that left the engine's namespace.
    #[must_use]
    pub fn wire(&self) -> &Wire {
        &self.wire
    }

    /// PEM of the root that signed every origin's certificate: for `--extra-ca`.
    #[must_use]
    pub fn roots(&self) -> PathBuf {
        self.folder.path().join("roots.pem")
    }

    /// A folder that ends with the world.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Certificate and key (PEM) for `names`, signed by the world's root: for servers of a test's own.
    ///
    /// # Errors
    /// When a name is none.
    pub fn certificate(&self, names: &[&str]) -> Result<(String, String)> {
        self.certificates.pem_for(names).context("certificate")
    }

    /// Makes the origin `name` present a bad certificate.
    pub fn spoil(&self, name: &str, how: BadCertificate) {
        self.certificates.spoil(name, how);
    }

    /// Flags for `serve` in this world.
    #[must_use]
    pub fn serve_args(&self) -> Vec<String> {
        let roots = self.roots().display().to_string();
        ["--resolver", NAME_SERVER, "--extra-ca", &roots].map(str::to_owned).to_vec()
    }
}

/// What is wrong with an origin's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadCertificate {
    /// Over for a day.
    Expired,
    /// For another name.
    WrongName,
    /// Signed by itself.
    SelfSigned,
}

/// Names and what they answer.
type Names = BTreeMap<String, Answer>;
