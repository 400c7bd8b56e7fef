//! HTTP that a rule has to see: the guest's TLS is ended here, each request is judged by the policy in
//! force, and what may leave goes on over a connection of the broker's own.
//!
//! Owns the way of a request from the guest's bytes to the destination's and back: framing checks
//! (`scan`), validation (`check`), headers (`headers`), credentials, signatures (`sign`),
//! destinations (`upstream`), upgrades (`upgrade`) and denials (`refuse`). Invariant: a credential
//! is put into a request only after a rule of the policy in force matched the very request that is sent,
//! only on a verified TLS connection to the name that the guest's connection is for (or to the proxy
//! that the rule names), and never on a connection that another credential uses. What is ambiguous is
//! refused, not repaired.
//!
//! Called by [`crate::broker`] with a connection whose first bytes were looked at. What it needs of the
//! broker it takes through [`Setup`]. Ending the flow ([`FlowGuard::cut`]) ends everything of it.
//!
//! [`FlowGuard::cut`]: crate::flows::FlowGuard::cut

mod body;
mod budget;
mod check;
mod connection;
mod forward;
mod headers;
mod interim;
mod ledger;
mod pipeline;
mod refuse;
mod scan;
mod sign;
#[cfg(test)]
mod tests;
mod upgrade;
mod upstream;

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

use bivouac_types::id::{SessionId, ValueId};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::audit::Line;
use crate::canonical::{Host, Name};
use crate::flows::Guest;
use crate::message::Value;
use crate::policy::Compiled;
use crate::reason::Reason;
use crate::trust::{Authority, Roots};

/// A future of this thread.
pub type Local<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// The policy in force.
#[derive(Debug, Clone)]
pub struct Current {
    /// The policy.
    pub policy: Rc<Compiled>,
    /// Its generation.
    pub generation: u64,
}

/// Where header values come from.
pub trait Values {
    /// The value, now; asks for it when it is missing or has ended. `Err` is a sentence without secret.
    fn get<'a>(&'a self, id: &'a ValueId) -> Local<'a, Result<Value, String>>;
}

/// Where identity tokens come from.
pub trait Tokens {
    /// A token for this audience that is good for some seconds more.
    fn get<'a>(&'a self, audience: &'a str) -> Local<'a, Result<Value, String>>;
}

/// How destinations are reached: the broker's own resolution, its fence, the policy's denied ranges.
pub trait Connect {
    /// Connects. `Err` has the word for it and a sentence.
    fn to<'a>(
        &'a self,
        host: &'a Host,
        port: u16,
    ) -> Local<'a, Result<(TcpStream, SocketAddr), (Reason, String)>>;
}

/// What interception needs of the broker.
#[allow(missing_debug_implementations)]
pub struct Setup {
    /// The session.
    pub session: SessionId,
    /// Its certificate authority.
    pub authority: Rc<Authority>,
    /// What destinations are checked against.
    pub roots: Rc<Roots>,
    /// The policy in force, asked for each request.
    pub current: Box<dyn Fn() -> Current>,
    /// Header values.
    pub values: Rc<dyn Values>,
    /// Identity tokens.
    pub tokens: Rc<dyn Tokens>,
    /// Destinations.
    pub connect: Rc<dyn Connect>,
    /// Takes audit lines; fills in `at`.
    pub record: Box<dyn Fn(Line)>,
}

/// Whom the tokens of a forward rule are for: origin and path of its URL, in the one form that brokers ask
/// for, however the rule spells it. None for what is no such URL.
#[must_use]
pub fn audience(forward_url: &str) -> Option<String> {
    forward::proxy(forward_url).ok().map(|proxy| proxy.audience)
}

/// How a connection ended, for its last audit line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// [`Reason::Closed`] when it ended as connections do.
    pub reason: Reason,
    /// What went wrong, in words.
    pub error: Option<String>,
    /// Requests that were judged.
    pub requests: u64,
}

/// Interception in one session.
pub struct Interception {
    setup: Setup,
    pool: Rc<upstream::Pool>,
    budget: budget::Budget,
    /// Places for bodies that are kept whole while they are signed.
    buffers: Arc<Semaphore>,
}

impl fmt::Debug for Interception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interception").finish_non_exhaustive()
    }
}

impl Interception {
    /// Costs nothing until the first connection.
    #[must_use]
    pub fn new(setup: Setup) -> Rc<Self> {
        let buffers = Arc::new(Semaphore::new(sign::MOST_BUFFERED));
        Rc::new(Self { setup, pool: Rc::default(), budget: budget::Budget::default(), buffers })
    }

    /// Ends the guest's TLS for this name and serves the HTTP inside. The hello is what the guest's
    /// stream gives first. Dropping the future ends everything of the connection.
    pub async fn serve_tls(self: Rc<Self>, guest: Guest, name: Name, port: u16) -> Ended {
        connection::tls(self, guest, name, port).await
    }

    /// Serves plain HTTP/1, each request judged by its `Host`: nothing is ever put into it.
    pub async fn serve_plain(self: Rc<Self>, guest: Guest, port: u16) -> Ended {
        connection::plain(self, guest, port).await
    }

    /// Ends the connections to destinations that nobody uses: at each change of the policy.
    pub fn forget(&self) {
        self.pool.trim();
    }

    /// Drops what is made again when needed: leaves, roots, idle connections. For a session that rests.
    pub fn trim(&self) {
        self.pool.trim();
        self.setup.authority.trim();
        self.setup.roots.trim();
    }
}
