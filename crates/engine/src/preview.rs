//! Routes for browsers: which name leads where, who is let in, and the way into the sandbox.
//!
//! Owns: the cache of routes, passes, links. Invariants: a [`Pass`] is made here only, after its route was found
//! and its reason was checked, and [`Engine::over`] tells when it holds no more; what was revoked is not let in
//! from the moment on at which the revocation is answered. Nobody without a pass wakes anything. Called by the `preview` proxy; ports on the
//! command line are in `routes`.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bivouac_runtime::DialTo;
use bivouac_store::{Deleting, RouteRow};
use bivouac_types::Millis;
use bivouac_types::access::Verb;
use bivouac_types::id::{SandboxId, SessionId};
use bivouac_types::name::Namespace;
use bivouac_types::session::SessionStatus;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::watch;

use crate::Engine;
use crate::activity::ActivityHold;
use crate::api::Principal;
use crate::error::{Error, ErrorKind};
use crate::inner::{Inner, Live, locked};

/// Most names that are remembered.
const MOST: usize = 4096;
/// Longest label of DNS.
const LABEL: usize = 63;
/// Between the port and the label in the name of a port that has no route of its own.
const BETWEEN: &str = "--";

/// What a name leads to.
#[derive(Debug)]
pub struct PreviewRoute {
    /// The name's first label.
    pub label: String,
    /// Team and project of the sandbox.
    pub namespace: Namespace,
    /// The sandbox.
    pub name: String,
    /// Port inside.
    pub port: u16,
    /// Open to everybody.
    pub public: bool,
    pub(crate) sandbox: SandboxId,
    epoch: i64,
    /// The session that was last seen to run: spares the database on most requests.
    session: Mutex<Option<SessionId>>,
}

impl PreviewRoute {
    /// Whether both lead to the same sandbox.
    #[must_use]
    pub fn same_sandbox(&self, other: &Self) -> bool {
        self.sandbox == other.sandbox
    }
}

/// What has been found out about names.
#[derive(Debug)]
pub(crate) struct Routes {
    known: Mutex<HashMap<String, Arc<PreviewRoute>>>,
    changes: watch::Sender<u64>,
}

impl Default for Routes {
    fn default() -> Self {
        Self { known: Mutex::default(), changes: watch::Sender::new(0) }
    }
}

impl Routes {
    /// Something of a sandbox's routes, or of who may use them, has changed: called after the write, before the
    /// answer.
    pub(crate) fn forget(&self, sandbox: &SandboxId) {
        let mut known = locked(&self.known);
        // While the map is locked: a look that began before cannot put back what it read.
        self.changes.send_modify(|count| *count += 1);
        known.retain(|_, route| route.sandbox != *sandbox);
    }

    fn get(&self, label: &str) -> Option<Arc<PreviewRoute>> {
        locked(&self.known).get(label).cloned()
    }

    fn put(&self, route: &Arc<PreviewRoute>, seen: u64) {
        let mut known = locked(&self.known);
        if *self.changes.borrow() != seen {
            return;
        }
        if known.len() >= MOST {
            known.clear();
        }
        known.insert(route.label.clone(), Arc::clone(route));
    }
}

/// Leave to use a route.
#[derive(Debug, Clone)]
pub struct Pass {
    route: Arc<PreviewRoute>,
    by: By,
}

#[derive(Debug, Clone)]
enum By {
    /// The route is open.
    Public,
    /// Somebody who may.
    Principal(Principal),
    /// A link of somebody who may, or the cookie that came of one.
    Signed(Principal, Signed),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Signed {
    until: Millis,
    epoch: i64,
    /// The token of whoever made the link; empty is the engine's own.
    token: String,
}

/// What a text was signed for: one is never taken for the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seal {
    /// The query of a link.
    Link,
    /// A cookie.
    Cookie,
}

impl Seal {
    fn word(self) -> &'static str {
        match self {
            Self::Link => "link",
            Self::Cookie => "cookie",
        }
    }
}

impl Pass {
    /// What it is for.
    #[must_use]
    pub fn route(&self) -> &Arc<PreviewRoute> {
        &self.route
    }

    /// When it ends by itself.
    #[must_use]
    pub fn until(&self) -> Option<Millis> {
        match &self.by {
            By::Signed(_, signed) => Some(signed.until),
            By::Public | By::Principal(_) => None,
        }
    }

    /// Who is let in, or in whose name; `None` is everybody.
    #[must_use]
    pub fn who(&self) -> Option<&Principal> {
        match &self.by {
            By::Public => None,
            By::Principal(who) | By::Signed(who, _) => Some(who),
        }
    }

    /// Why: `public`, `token`, `link`.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match &self.by {
            By::Public => "public",
            By::Principal(_) => "token",
            By::Signed(..) => "link",
        }
    }
}

/// A sandbox that takes connections.
#[derive(Debug)]
pub struct Reached {
    /// Connections of another session than this are of no use.
    pub session: SessionId,
    inner: Arc<Inner>,
    live: Arc<Live>,
    route: Arc<PreviewRoute>,
}

impl Reached {
    /// A new connection to the port.
    ///
    /// # Errors
    /// 404 `not_listening`; 410 or 422 when the sandbox has ended meanwhile.
    pub async fn dial(&self) -> Result<OwnedFd, Error> {
        let to = DialTo::Port(self.route.port);
        self.inner.connect(&self.live, &self.route.name, &to).await
    }

    /// Turns true when the session has ended.
    #[must_use]
    pub fn gone(&self) -> watch::Receiver<bool> {
        self.live.handle.gone()
    }

    /// Keeps the sandbox from being idle.
    #[must_use]
    pub fn hold(&self) -> ActivityHold {
        self.inner.activity.hold(&self.route.sandbox)
    }
}

/// Reads `PORT--LABEL`.
fn split(label: &str) -> Option<(u16, &str)> {
    let (port, rest) = label.split_once(BETWEEN)?;
    if port.starts_with('0') || !port.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some((port.parse().ok()?, rest))
}

/// The first label of the name of a port without a route of its own.
pub(crate) fn join(port: u16, label: &str) -> String {
    format!("{port}{BETWEEN}{label}")
}

impl Inner {
    async fn find_route(&self, label: &str) -> Result<Option<Arc<PreviewRoute>>, Error> {
        let good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if label.is_empty() || label.len() > LABEL || !label.bytes().all(good) {
            return Ok(None);
        }
        if let Some(known) = self.routes.get(label) {
            return Ok(Some(known));
        }
        let seen = *self.routes.changes.borrow();
        let (port, row) = match split(label) {
            Some((port, rest)) => (Some(port), self.db.route(rest).await?),
            None => (None, self.db.route(label).await?),
        };
        // The label alone is no route, and a route is no label.
        let fits = |row: &RouteRow| (row.port == 0) == port.is_some();
        let Some(row) = row.filter(fits) else { return Ok(None) };
        let Some(found) = self.db.sandbox(&row.sandbox_id).await? else { return Ok(None) };
        if found.deleting != Deleting::No {
            return Ok(None);
        }
        let route = Arc::new(PreviewRoute {
            label: label.to_owned(),
            namespace: found.sandbox.namespace,
            name: found.sandbox.name,
            port: port.unwrap_or(row.port),
            public: row.public && row.port != 0,
            sandbox: row.sandbox_id,
            epoch: row.epoch,
            session: Mutex::default(),
        });
        self.routes.put(&route, seen);
        Ok(Some(route))
    }

    /// What is signed besides the text itself: no link is good for another route.
    fn seal_parts<'a>(route: &'a PreviewRoute, seal: Seal, said: &'a str) -> [&'a str; 5] {
        ["preview", seal.word(), route.sandbox.as_str(), &route.label, said]
    }

    fn write_seal(
        &self,
        route: &PreviewRoute,
        seal: Seal,
        signed: &Signed,
    ) -> Result<String, Error> {
        let Signed { until, epoch, token } = signed;
        let said = format!("{until}.{epoch}.{token}");
        let tag = self.db.sign(&Self::seal_parts(route, seal, &said))?;
        Ok(format!("{said}.{}", URL_SAFE_NO_PAD.encode(tag)))
    }

    fn read_seal(
        &self,
        route: &PreviewRoute,
        seal: Seal,
        text: &str,
    ) -> Result<Option<Signed>, Error> {
        let Some((said, tag)) = text.rsplit_once('.') else { return Ok(None) };
        let Ok(tag) = URL_SAFE_NO_PAD.decode(tag) else { return Ok(None) };
        if !self.db.signed(&Self::seal_parts(route, seal, said), &tag)? {
            return Ok(None);
        }
        let mut parts = said.splitn(3, '.');
        let until = parts.next().and_then(|part| part.parse().ok());
        let epoch = parts.next().and_then(|part| part.parse().ok());
        let (Some(until), Some(epoch), Some(token)) = (until, epoch, parts.next()) else {
            return Ok(None);
        };
        Ok(Some(Signed { until, epoch, token: token.to_owned() }))
    }

    /// Who made a signed text, if it counts at the moment: whoever made it must still have the right.
    fn signer(&self, route: &PreviewRoute, signed: &Signed) -> Option<Principal> {
        if signed.until <= self.now() || signed.epoch != route.epoch {
            return None;
        }
        let who = self.counting(&signed.token)?;
        who.may(Verb::Preview, &route.namespace).is_ok().then_some(who)
    }

    async fn still(&self, pass: &Pass) -> Result<bool, Error> {
        let Some(now) = self.find_route(&pass.route.label).await? else { return Ok(false) };
        if now.sandbox != pass.route.sandbox || now.port != pass.route.port {
            return Ok(false);
        }
        Ok(match &pass.by {
            By::Public => now.public,
            By::Principal(who) => self.counting(who.token.as_deref().unwrap_or_default()).is_some(),
            By::Signed(_, signed) => self.signer(&now, signed).is_some(),
        })
    }

    /// Signs a link to a route, for `ttl` ms, on behalf of `who`.
    pub(crate) async fn sign_link(
        &self,
        who: &Principal,
        label: &str,
        ttl: Millis,
    ) -> Result<(String, Millis), Error> {
        let route = self.find_route(label).await?.ok_or_else(|| {
            Error::new(ErrorKind::Conflict, "conflict", "The route has just gone; look again.")
        })?;
        let until = self.now() + ttl;
        let token = who.token.clone().unwrap_or_default();
        let signed = Signed { until, epoch: route.epoch, token };
        Ok((self.write_seal(&route, Seal::Link, &signed)?, until))
    }

    async fn reach_route(
        self: &Arc<Self>,
        route: &Arc<PreviewRoute>,
        wake: bool,
    ) -> Result<Reached, Error> {
        let reached = |live: Arc<Live>, session: SessionId| Reached {
            session,
            inner: Arc::clone(self),
            live,
            route: Arc::clone(route),
        };
        let last = locked(&route.session).clone();
        if let Some(id) = last
            && let Some(live) = self.live(&id)
        {
            let row = live.row();
            if row.session.status == SessionStatus::Running && row.session.paused_at.is_none() {
                self.check_open()?;
                return Ok(reached(live, id));
            }
        }
        let (live, row) = self.awake(&route.namespace, &route.name, wake).await?;
        // Deleted, and another one made of the same name.
        if row.session.sandbox_id != route.sandbox {
            return Err(Error::no_sandbox(&route.name));
        }
        let id = row.session.id;
        *locked(&route.session) = Some(id.clone());
        Ok(reached(live, id))
    }
}

impl Engine {
    /// What the first label of a preview name leads to, if to anything. The label is in small letters.
    ///
    /// # Errors
    /// The database does not answer.
    pub async fn preview_route(&self, label: &str) -> Result<Option<Arc<PreviewRoute>>, Error> {
        self.inner.find_route(label).await
    }

    /// A pass for everybody, if the route is open.
    #[must_use]
    pub fn pass_public(&self, route: &Arc<PreviewRoute>) -> Option<Pass> {
        route.public.then(|| Pass { route: Arc::clone(route), by: By::Public })
    }

    /// A pass for somebody whose token was taken.
    ///
    /// # Errors
    /// 404 or 403 as of every call.
    pub fn pass_principal(&self, route: &Arc<PreviewRoute>, who: Principal) -> Result<Pass, Error> {
        who.may(Verb::Preview, &route.namespace)?;
        Ok(Pass { route: Arc::clone(route), by: By::Principal(who) })
    }

    /// A pass by a link or a cookie, if it is one of ours for this route, not expired and not revoked.
    ///
    /// # Errors
    /// The vault is not open.
    pub fn pass_signed(
        &self,
        route: &Arc<PreviewRoute>,
        seal: Seal,
        text: &str,
    ) -> Result<Option<Pass>, Error> {
        let Some(signed) = self.inner.read_seal(route, seal, text)? else { return Ok(None) };
        let Some(who) = self.inner.signer(route, &signed) else { return Ok(None) };
        Ok(Some(Pass { route: Arc::clone(route), by: By::Signed(who, signed) }))
    }

    /// The cookie that a link is turned into: it ends when the link does.
    ///
    /// # Errors
    /// The vault is not open.
    pub fn preview_cookie(&self, pass: &Pass) -> Result<Option<String>, Error> {
        let By::Signed(_, signed) = &pass.by else { return Ok(None) };
        self.inner.write_seal(&pass.route, Seal::Cookie, signed).map(Some)
    }

    /// Answers when a pass holds no more: its route is gone or leads elsewhere, was closed, its links were revoked or
    /// have expired, the token counts no more. What is open by it is then to be cut.
    pub fn over(&self, pass: &Pass) -> impl Future<Output = ()> + Send + use<> {
        let (inner, pass) = (Arc::clone(&self.inner), pass.clone());
        let token: Option<BoxFuture<'static, ()>> = pass.who().map(|who| self.ended(who).boxed());
        async move {
            let mut changes = inner.routes.changes.subscribe();
            let token = async {
                match token {
                    Some(ended) => ended.await,
                    None => std::future::pending().await,
                }
            };
            let late = async {
                match pass.until() {
                    Some(at) => inner.clock.sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let changed = async {
                loop {
                    // A database that does not answer has not said that the pass is over.
                    if matches!(inner.still(&pass).await, Ok(false))
                        || changes.changed().await.is_err()
                    {
                        return;
                    }
                }
            };
            tokio::select! {
                () = token => {}
                () = late => {}
                () = changed => {}
            }
        }
    }

    /// The way to the port, if the sandbox runs; with `wake` it is started first.
    ///
    /// # Errors
    /// 404 when it is gone, 410 or 422 when it does not run.
    pub async fn reach(&self, pass: &Pass, wake: bool) -> Result<Reached, Error> {
        self.inner.reach_route(&pass.route, wake).await
    }

    /// Whether a request starts the sandbox.
    ///
    /// # Errors
    /// The database does not answer, or the sandbox is gone.
    pub async fn wakes(&self, pass: &Pass) -> Result<bool, Error> {
        Ok(self.inner.known_sandbox(&pass.route.sandbox).await?.sandbox.life.wake)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_and_a_label_read_back() {
        assert_eq!(split(&join(3000, "sb-x")), Some((3000, "sb-x")));
        assert_eq!(split("1--sb-a--b"), Some((1, "sb-a--b")));
        for bad in ["sb-x", "--sb-x", "03--x", "70000--x", "+3--x", "3-x", "x--3", "0--x"] {
            assert_eq!(split(bad), None, "{bad}");
        }
    }
}
