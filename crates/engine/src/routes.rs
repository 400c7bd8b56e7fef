//! The ports of a sandbox as its owner sees them: what is declared, what listens, who may come.
//!
//! Invariants: a port is closed to strangers until somebody says otherwise, and one that has no route of its own
//! always is; a change counts, also for streams that are open, when its call answers. Called by HTTP.

use std::collections::BTreeMap;

use bivouac_store::{Durability, RouteRow, StoreError};
use bivouac_types::Millis;
use bivouac_types::access::Verb;
use bivouac_types::id::SandboxId;
use bivouac_types::name::Namespace;
use bivouac_types::sandbox::{MAX_PORTS, Route, Sandbox, check_ports};
use bivouac_types::session::SessionStatus;

use crate::Engine;
use crate::api::{Principal, UpdateSandbox};
use crate::error::{Error, ErrorKind};
use crate::ids;
use crate::inner::{Inner, busy};
use crate::preview::join;

/// Time that a link is good for when none is told, ms: twelve hours.
pub const LINK_TTL_MS: Millis = 12 * 3_600_000;
/// Longest and shortest, ms: thirty days, a second.
const LINK_TTLS: std::ops::RangeInclusive<Millis> = 1000..=30 * 86_400_000;
/// How often a label that is taken is drawn anew.
const DRAWS: u32 = 20;

/// A port of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The port.
    pub port: u16,
    /// It has a route of its own.
    pub declared: bool,
    /// Something listens on it.
    pub listening: bool,
    /// Where it listens: `127.0.0.1`, `0.0.0.0`, `::`.
    pub address: Option<String>,
    /// Its process id inside.
    pub pid: Option<i32>,
    /// Its name.
    pub program: Option<String>,
    /// Where a browser goes.
    pub url: String,
    /// Open to everybody.
    pub public: bool,
}

/// A link that lets its holder in.
#[derive(Debug, Clone)]
pub struct Link {
    /// With what lets in.
    pub url: String,
    /// Until when, Unix ms.
    pub expires_at: Millis,
    /// What it leads to.
    pub port: u16,
}

impl Inner {
    /// Where a browser goes for a label.
    pub(crate) fn label_url(&self, label: &str) -> String {
        match &self.config.preview_domain {
            Some(domain) => format!("https://{label}.{domain}"),
            None => {
                let port = crate::sandboxes::port_suffix(&self.config.public_url);
                format!("http://{label}.localhost{port}")
            }
        }
    }

    /// The label of a sandbox, which is made at the first look.
    async fn sandbox_label(&self, id: &SandboxId) -> Result<RouteRow, Error> {
        for _ in 0..DRAWS {
            let rows = self.db.route_rows(id).await?;
            if let Some(row) = rows.into_iter().find(|row| row.port == 0) {
                return Ok(row);
            }
            let mut tx = self.db.begin(Durability::Process).await?;
            match tx.add_label(id, &ids::subdomain()?).await {
                Ok(()) => tx.commit().await?,
                Err(StoreError::Taken(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(busy("labels of sandboxes"))
    }

    /// The name of a port: its own, or the one that every port has.
    async fn port_label(&self, sandbox: &SandboxId, port: u16) -> Result<String, Error> {
        let rows = self.db.route_rows(sandbox).await?;
        match rows.into_iter().find(|row| row.port == port) {
            Some(row) => Ok(row.subdomain),
            None => Ok(join(port, &self.sandbox_label(sandbox).await?.subdomain)),
        }
    }

    async fn listening(&self, sandbox: &Sandbox) -> Result<Vec<bivouac_runtime::Listener>, Error> {
        if sandbox.status != SessionStatus::Running {
            return Ok(Vec::new());
        }
        let Some(live) = self.live(&sandbox.current_session_id) else { return Ok(Vec::new()) };
        // They are found from inside: of one that stands still nothing can be told, and a look lets nobody go on.
        let mut paused = live.paused.subscribe();
        let found = tokio::select! {
            biased;
            _ = paused.wait_for(|paused| *paused) => return Ok(Vec::new()),
            found = live.handle.listeners() => found,
        };
        match found {
            Ok(listeners) => Ok(listeners),
            Err(error) => Err(self.refine(&sandbox.current_session_id, error).await),
        }
    }

    async fn ports(&self, ns: &Namespace, name: &str) -> Result<Vec<Port>, Error> {
        let sandbox = self.named(ns, name).await?.sandbox;
        let label = self.sandbox_label(&sandbox.id).await?.subdomain;
        let mut ports: BTreeMap<u16, Port> = BTreeMap::new();
        let port = |route: Route, declared| Port {
            port: route.port,
            declared,
            listening: false,
            address: None,
            pid: None,
            program: None,
            url: route.url,
            public: route.public,
        };
        for route in self.routes(&sandbox.id).await? {
            ports.insert(route.port, port(route, true));
        }
        for found in self.listening(&sandbox).await? {
            let entry = ports.entry(found.port).or_insert_with(|| {
                port(self.route(found.port, join(found.port, &label), false), false)
            });
            if !entry.listening {
                entry.listening = true;
                entry.address = Some(found.address);
                entry.pid = found.pid;
                entry.program = found.program;
            }
        }
        Ok(ports.into_values().collect())
    }

    async fn publish(
        &self,
        ns: &Namespace,
        name: &str,
        port: u16,
        public: bool,
    ) -> Result<(), Error> {
        for _ in 0..DRAWS {
            let sandbox = self.named(ns, name).await?.sandbox;
            let mut tx = self.db.begin(Durability::Process).await?;
            let there = tx.publish_route(&sandbox.id, port, public).await?;
            tx.commit().await?;
            if there {
                self.routes_of_changed(&sandbox.id);
                return Ok(());
            }
            if !public {
                // Never open, so it is closed.
                return Ok(());
            }
            check_ports(&[i64::from(port)])?;
            let mut ports = sandbox.ports;
            if ports.len() >= MAX_PORTS {
                let message = format!(
                    "Sandbox '{name}' has {MAX_PORTS} declared ports, which is the most; only a declared port \
                     can be public."
                );
                return Err(Error::new(ErrorKind::Invalid, "bad_request", message));
            }
            ports.push(port);
            let change = UpdateSandbox { ports: Some(ports), ..UpdateSandbox::default() };
            self.change(ns, name, change).await?;
        }
        Err(busy(&format!("the ports of sandbox '{name}'")))
    }

    async fn revoke_routes(
        &self,
        ns: &Namespace,
        name: &str,
        port: Option<u16>,
    ) -> Result<u64, Error> {
        let sandbox = self.named(ns, name).await?.sandbox;
        // The row of a port that has no route of its own is the label's.
        let rows = self.db.route_rows(&sandbox.id).await?;
        let row = port.map(|port| if rows.iter().any(|row| row.port == port) { port } else { 0 });
        let mut tx = self.db.begin(Durability::Process).await?;
        let count = tx.revoke_routes(&sandbox.id, row).await?;
        if port.is_some_and(|port| row != Some(0) && port != 0) {
            // It is reached by the label's name too.
            tx.revoke_routes(&sandbox.id, Some(0)).await?;
        }
        tx.commit().await?;
        self.routes_of_changed(&sandbox.id);
        Ok(count)
    }

    /// After a write of routes, before its answer.
    pub(crate) fn routes_of_changed(&self, sandbox: &SandboxId) {
        self.routes.forget(sandbox);
    }
}

impl Engine {
    /// The ports of a sandbox: those that are declared, and those that something listens on.
    ///
    /// # Errors
    /// 404, 403.
    pub async fn ports(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
    ) -> Result<Vec<Port>, Error> {
        who.may(Verb::Read, ns)?;
        self.inner.ports(ns, sandbox).await
    }

    /// Opens a port to everybody, or closes it: then what strangers have open is cut. A port that is not
    /// declared becomes so when it is opened. Answers the port.
    ///
    /// # Errors
    /// 400 for a port that cannot be declared, 404, 403.
    pub async fn publish_port(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        port: u16,
        public: bool,
    ) -> Result<Port, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        tracing::info!(by = %who.name, %sandbox, port, public, "publish");
        self.inner.publish(ns, sandbox, port, public).await?;
        let ports = self.inner.ports(ns, sandbox).await?;
        if let Some(found) = ports.into_iter().find(|found| found.port == port) {
            return Ok(found);
        }
        let id = self.inner.named(ns, sandbox).await?.sandbox.id;
        let url = self.inner.label_url(&self.inner.port_label(&id, port).await?);
        Ok(Port {
            port,
            declared: false,
            listening: false,
            address: None,
            pid: None,
            program: None,
            url,
            public: false,
        })
    }

    /// A link that lets its holder in to a port, for `ttl` ms (absent: [`LINK_TTL_MS`]). Ends with the
    /// caller's token, and when links are revoked.
    ///
    /// # Errors
    /// 400 for a bad time, 404, 403.
    pub async fn link_port(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        port: u16,
        ttl: Option<Millis>,
    ) -> Result<Link, Error> {
        who.may(Verb::Preview, ns)?;
        self.inner.check_open()?;
        let ttl = ttl.unwrap_or(LINK_TTL_MS);
        if !LINK_TTLS.contains(&ttl) {
            let (from, to) = (LINK_TTLS.start(), LINK_TTLS.end());
            return Err(Error::invalid(format!(
                "Invalid ttl: must be {from} to {to} ms, got {ttl}"
            )));
        }
        if port == 0 {
            return Err(Error::invalid("Invalid port: must be 1 to 65535, got 0"));
        }
        let id = self.inner.named(ns, sandbox).await?.sandbox.id;
        let label = self.inner.port_label(&id, port).await?;
        let (text, expires_at) = self.inner.sign_link(who, &label, ttl).await?;
        let url = format!("{}/?{}={text}", self.inner.label_url(&label), crate::LINK_QUERY);
        Ok(Link { url, expires_at, port })
    }

    /// Makes every link and cookie of a port, or of all, worthless, and cuts what they have open. Answers how
    /// many routes that was for.
    ///
    /// # Errors
    /// 404, 403.
    pub async fn revoke_links(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        port: Option<u16>,
    ) -> Result<u64, Error> {
        who.may(Verb::Write, ns)?;
        self.inner.check_open()?;
        tracing::info!(by = %who.name, %sandbox, ?port, "revoke links");
        self.inner.revoke_routes(ns, sandbox, port).await
    }
}
