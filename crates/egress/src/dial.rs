//! Connects to the outside.
//!
//! Invariant: nothing is dialled but a [`Checked`] address, and only this module makes one: unmapped,
//! outside of the fence, not denied by the policy, not an address of this host. What was checked is
//! what is connected to: a name is never resolved again in between, and no connector is ever given a
//! name.
//!
//! Called by `flows` and `intercept` (streams) and by `udp` (datagrams).

mod system;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout, timeout_at};

use crate::address::{Fence, unmap};
use crate::canonical::Name;
use crate::dns::{Family, Outcome, Resolver, Special, special};
use crate::reason::{Reason, Verdict};

pub use system::System;

/// How long a dial may take in all: resolution and every attempt.
const DEADLINE: Duration = Duration::from_secs(10);
/// How long an attempt is alone before the next address is tried beside it.
const HEAD_START: Duration = Duration::from_millis(250);
/// How long one family waits for the other's answer (RFC 8305).
const RESOLUTION_DELAY: Duration = Duration::from_millis(50);
/// Most addresses that are tried.
const CANDIDATES: usize = 8;

/// An address that may be dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Checked(SocketAddr);

impl Checked {
    /// The address.
    #[must_use]
    pub fn address(self) -> SocketAddr {
        self.0
    }
}

/// The seam between what is decided here and the kernel: tests count what passes it.
pub trait Dialer {
    /// Opens a connection.
    fn connect(&self, to: Checked) -> LocalBoxFuture<'static, io::Result<TcpStream>>;

    /// Opens a connected datagram socket.
    ///
    /// # Errors
    /// The kernel's.
    fn datagrams(&self, to: Checked) -> io::Result<UdpSocket>;

    /// Whether the address is one of this host's own.
    ///
    /// # Errors
    /// There is no way to the address, or it cannot be found out. Either way it is not to be dialled.
    fn is_own(&self, ip: IpAddr) -> io::Result<bool>;
}

/// Why there is no connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    /// The name has no address, or nobody could say.
    #[error("{name} does not resolve: {why}")]
    Resolve {
        /// The name.
        name: Name,
        /// Why, in words.
        why: String,
    },
    /// Too many names at once.
    #[error("{name} was not resolved: too many names at once")]
    Limit {
        /// The name.
        name: Name,
    },
    /// The name has addresses and none may be dialled.
    #[error("no address of {name} may be dialled: {why}")]
    NameForbidden {
        /// The name.
        name: Name,
        /// About the last of them, in words.
        why: String,
    },
    /// The address is denied above all policies.
    #[error("{address} is {range}; only the operator can open it (--egress-allow-private)")]
    AddressForbidden {
        /// The address.
        address: IpAddr,
        /// What kind of address it is.
        range: &'static str,
    },
    /// Nothing answers there.
    #[error("no connection to {to}: {why}")]
    Unreachable {
        /// Address, or name and port.
        to: String,
        /// Why, in words.
        why: String,
    },
}

impl DialError {
    /// The word for it.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self {
            Self::Resolve { .. } => Reason::ResolveFailed,
            Self::Limit { .. } => Reason::Limit,
            Self::NameForbidden { .. } => Reason::NameResolvesForbidden,
            Self::AddressForbidden { .. } => Reason::AddressForbidden,
            Self::Unreachable { .. } => Reason::UpstreamUnreachable,
        }
    }

    /// Whether it was refused here, or went wrong out there.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Limit { .. } | Self::NameForbidden { .. } | Self::AddressForbidden { .. } => {
                Verdict::Deny
            }
            Self::Resolve { .. } | Self::Unreachable { .. } => Verdict::Error,
        }
    }
}

/// Dials for one session.
pub struct Dial {
    fence: Fence,
    resolver: Rc<Resolver>,
    dialer: Rc<dyn Dialer>,
}

impl fmt::Debug for Dial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dial").field("resolver", &self.resolver).finish_non_exhaustive()
    }
}

impl Dial {
    /// Dials through the kernel.
    #[must_use]
    pub fn new(fence: Fence, resolver: Rc<Resolver>) -> Self {
        Self::with(fence, resolver, Rc::new(System))
    }

    /// Dials through `dialer`.
    #[must_use]
    pub fn with(fence: Fence, resolver: Rc<Resolver>, dialer: Rc<dyn Dialer>) -> Self {
        Self { fence, resolver, dialer }
    }

    /// The resolver that it uses: the stub's.
    #[must_use]
    pub fn resolver(&self) -> &Rc<Resolver> {
        &self.resolver
    }

    /// Checks an address.
    ///
    /// # Errors
    /// It may not be dialled, or there is no way to it.
    pub fn check(&self, to: SocketAddr) -> Result<Checked, DialError> {
        let ip = to.ip().to_canonical();
        let inner = unmap(ip);
        if let Some(range) = self.fence.forbidden(ip) {
            return Err(DialError::AddressForbidden { address: inner, range });
        }
        let own = self.dialer.is_own(ip).map_err(|error| unreachable(to, &error))?
            // Through a translator; where that way leads nowhere, the outer one was already found.
            || (inner != ip && self.dialer.is_own(inner).unwrap_or(false));
        if own && !self.fence.listed(ip) {
            return Err(DialError::AddressForbidden {
                address: ip,
                range: "an address of the host itself",
            });
        }
        Ok(Checked(SocketAddr::new(ip, to.port())))
    }

    /// Addresses of a *judged* name that may be dialled, the best first: `asked` (what the guest
    /// connected to), what the guest was told before, then the rest.
    ///
    /// # Errors
    /// There is none.
    pub async fn resolve(
        &self,
        name: &Name,
        deny: &dyn Fn(IpAddr) -> bool,
        asked: Option<IpAddr>,
    ) -> Result<Vec<IpAddr>, DialError> {
        if special(name) == Some(Special::Localhost) {
            let why = "it is the sandbox itself".to_owned();
            return Err(DialError::NameForbidden { name: name.clone(), why });
        }
        let found = self.found(name).await;
        let pinned = self.resolver.pinned(name);
        let mut candidates = match found {
            Ok(found) => {
                let (told, new): (Vec<IpAddr>, Vec<IpAddr>) =
                    found.into_iter().partition(|ip| pinned.contains(ip));
                // What was told and is still true; else what was told lately, which often still works
                // and is what the guest meant.
                if told.is_empty() { [pinned, new].concat() } else { [told, new].concat() }
            }
            Err(error) if pinned.is_empty() => return Err(error),
            // The name servers fail: what they said minutes ago is the best there is.
            Err(_) => pinned,
        };
        let mut why = String::from("it has no address");
        candidates.retain(|&ip| {
            let ip = ip.to_canonical();
            let inner = unmap(ip);
            if let Some(range) = self.fence.forbidden(ip) {
                why = format!("{inner} is {range}");
                return false;
            }
            if deny(ip) || deny(inner) {
                why = format!("{inner} is in subnets.deny");
                return false;
            }
            true
        });
        if candidates.is_empty() {
            return Err(DialError::NameForbidden { name: name.clone(), why });
        }
        Ok(ordered(&candidates, asked))
    }

    /// What the name servers say, of both families.
    async fn found(&self, name: &Name) -> Result<Vec<IpAddr>, DialError> {
        let v4 = self.resolver.lookup(name, Family::V4);
        let v6 = self.resolver.lookup(name, Family::V6);
        tokio::pin!(v4, v6);
        // As soon as one family has addresses, the other gets only a little more time.
        let (first, other) = tokio::select! {
            biased;
            answer = &mut v4 => (answer, &mut v6 as &mut (dyn Future<Output = _> + Unpin)),
            answer = &mut v6 => (answer, &mut v4 as &mut (dyn Future<Output = _> + Unpin)),
        };
        let second = if matches!(first.outcome, Outcome::Found(_)) {
            timeout(RESOLUTION_DELAY, other).await.ok()
        } else {
            Some(other.await)
        };
        let mut addresses = Vec::new();
        let mut error = None;
        for answer in [Some(first), second].into_iter().flatten() {
            let why = match answer.outcome {
                Outcome::Found(found) => {
                    addresses.extend(found.iter().copied());
                    continue;
                }
                Outcome::Limited => {
                    error = Some(DialError::Limit { name: name.clone() });
                    continue;
                }
                Outcome::None { exists: true } => "it has no address".to_owned(),
                Outcome::None { exists: false } => "no such name".to_owned(),
                Outcome::Failed(why) => why.to_string(),
            };
            error.get_or_insert(DialError::Resolve { name: name.clone(), why });
        }
        match error {
            Some(error) if addresses.is_empty() => Err(error),
            _ => Ok(addresses),
        }
    }

    /// Connects to one of the addresses of a *judged* name; answers which.
    ///
    /// # Errors
    /// See [`DialError`].
    pub async fn to_name(
        &self,
        name: &Name,
        port: u16,
        deny: &dyn Fn(IpAddr) -> bool,
        asked: Option<IpAddr>,
    ) -> Result<(TcpStream, SocketAddr), DialError> {
        let end = Instant::now() + DEADLINE;
        let late = |_| DialError::Unreachable {
            to: format!("{name}:{port}"),
            why: format!("nothing answered in {} s", DEADLINE.as_secs()),
        };
        let addresses = timeout_at(end, self.resolve(name, deny, asked)).await.map_err(late)??;
        let mut checked = Vec::new();
        let mut refused = None;
        for ip in addresses.into_iter().take(CANDIDATES) {
            match self.check(SocketAddr::new(ip, port)) {
                Ok(address) => checked.push(address),
                Err(error) => refused = Some(error),
            }
        }
        if checked.is_empty() {
            return Err(match refused {
                Some(error @ DialError::Unreachable { .. }) => error,
                other => DialError::NameForbidden {
                    name: name.clone(),
                    why: other.map_or_else(String::new, |error| error.to_string()),
                },
            });
        }
        timeout_at(end, self.race(checked)).await.map_err(late)?
    }

    /// Connects to an address that the policy allows.
    ///
    /// # Errors
    /// See [`DialError`].
    pub async fn to_address(&self, to: SocketAddr) -> Result<TcpStream, DialError> {
        let checked = self.check(to)?;
        match timeout(DEADLINE, self.race(vec![checked])).await {
            Ok(connected) => connected.map(|(stream, _)| stream),
            Err(_) => Err(DialError::Unreachable {
                to: to.to_string(),
                why: format!("nothing answered in {} s", DEADLINE.as_secs()),
            }),
        }
    }

    /// A datagram socket connected to an address that the policy allows.
    ///
    /// # Errors
    /// See [`DialError`].
    pub fn datagrams(&self, to: SocketAddr) -> Result<UdpSocket, DialError> {
        let checked = self.check(to)?;
        self.dialer.datagrams(checked).map_err(|error| unreachable(to, &error))
    }

    /// The first connection that stands: each address is tried a little after the one before it, or as
    /// soon as that one has failed.
    async fn race(&self, to: Vec<Checked>) -> Result<(TcpStream, SocketAddr), DialError> {
        let mut next = to.into_iter();
        let mut trying = FuturesUnordered::new();
        let mut error = None;
        loop {
            match next.next() {
                Some(checked) => {
                    let connecting = self.dialer.connect(checked);
                    trying.push(async move { (checked, connecting.await) });
                }
                None if trying.is_empty() => {
                    return Err(error.unwrap_or_else(|| DialError::Unreachable {
                        to: String::new(),
                        why: "there is no address to try".to_owned(),
                    }));
                }
                None => {}
            }
            let ended = if next.len() == 0 {
                trying.next().await
            } else {
                timeout(HEAD_START, trying.next()).await.ok().flatten()
            };
            match ended {
                Some((checked, Ok(stream))) => return Ok((stream, checked.address())),
                Some((checked, Err(why))) => error = Some(unreachable(checked.address(), &why)),
                None => {}
            }
        }
    }
}

fn unreachable(to: SocketAddr, why: &io::Error) -> DialError {
    DialError::Unreachable { to: to.to_string(), why: why.to_string() }
}

/// Puts `asked` first if it is one of them, and alternates the families, so that a broken one costs
/// one head start and not one per address.
fn ordered(addresses: &[IpAddr], asked: Option<IpAddr>) -> Vec<IpAddr> {
    let mut queue: Vec<IpAddr> = Vec::with_capacity(addresses.len());
    let asked = asked.map(|ip| ip.to_canonical());
    let first = addresses.iter().filter(|ip| Some(**ip) == asked);
    for ip in first.chain(addresses) {
        if !queue.contains(ip) {
            queue.push(*ip);
        }
    }
    let Some(lead) = queue.first().map(IpAddr::is_ipv4) else { return queue };
    let (same, other): (Vec<_>, Vec<_>) = queue.into_iter().partition(|ip| ip.is_ipv4() == lead);
    let mut out = Vec::with_capacity(same.len() + other.len());
    let (mut same, mut other) = (same.into_iter(), other.into_iter());
    loop {
        let before = out.len();
        out.extend(same.next());
        out.extend(other.next());
        if out.len() == before {
            return out;
        }
    }
}
