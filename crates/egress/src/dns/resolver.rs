//! The resolver of one session: the guest's queries and the broker's own dials ask the same one, so
//! that both see the same addresses.
//!
//! Invariant: it asks for a name only when told to, and whoever tells it has judged the name before;
//! names that are nobody's to ask for ([`special`]) never leave. One question at a time per name and
//! family, however many wait for it. No search list, no hosts file.
//!
//! Called by `stub` and by `dial`.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{LocalBoxFuture, Shared, WeakShared};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::Family;
use super::cache::{Cache, Known, Outcome};
use super::client::{Client, DEADLINE};
use super::limit::Bucket;
use super::wire::Reply;
use crate::canonical::Name;

/// Questions to the name servers: how many at once, a second, and in a burst. Names below a wildcard
/// can carry data to whoever serves that zone; this bounds how much.
const AT_ONCE: usize = 64;
const PER_SECOND: u32 = 50;
const BURST: u32 = 400;

/// How long it is known whether there is IPv6.
const V6_KNOWN: Duration = Duration::from_secs(10);

type Flight = Shared<LocalBoxFuture<'static, Known>>;
type Key = (Name, Family);

/// See the module.
pub struct Resolver {
    client: Client,
    cache: RefCell<Cache>,
    flights: RefCell<HashMap<Key, WeakShared<LocalBoxFuture<'static, Known>>>>,
    slots: Semaphore,
    budget: Bucket,
    asked: Cell<u64>,
    v6: fn() -> bool,
    /// What it said, and until when that holds.
    has_v6: Cell<Option<(bool, Instant)>>,
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver").field("asked", &self.asked.get()).finish_non_exhaustive()
    }
}

/// Whether there is a way to the public IPv6 addresses. Connecting a datagram socket sends nothing.
fn reaches_v6() -> bool {
    let first = Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 1);
    UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))
        .is_ok_and(|socket| socket.connect((first, 9)).is_ok())
}

/// What is known of a name, and for how much longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// What.
    pub outcome: Outcome,
    /// Seconds, at least 1.
    pub ttl: u32,
}

impl Answer {
    fn of(known: Known, now: Instant) -> Self {
        let left = known.until.saturating_duration_since(now) + Duration::from_millis(500);
        Self { outcome: known.outcome, ttl: u32::try_from(left.as_secs()).unwrap_or(1).max(1) }
    }

    fn never() -> Self {
        Self { outcome: Outcome::None { exists: false }, ttl: 60 }
    }
}

/// Names that have their meaning from a standard and not from name servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// The sandbox itself (RFC 6761).
    Localhost,
    /// Names of addresses: they would tell the name servers which addresses somebody looks at.
    Reverse,
    /// Never exists in DNS (RFC 6761, RFC 7686).
    Nowhere,
}

/// Whether a name is special.
#[must_use]
pub fn special(name: &Name) -> Option<Special> {
    let name = name.as_str();
    let under = |zone: &str| {
        name.strip_suffix(zone).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    if under("localhost") {
        Some(Special::Localhost)
    } else if under("in-addr.arpa") || under("ip6.arpa") {
        Some(Special::Reverse)
    } else if under("invalid") || under("onion") {
        Some(Special::Nowhere)
    } else {
        None
    }
}

impl Resolver {
    /// A resolver that asks these servers, in this order. It opens nothing until it is asked.
    #[must_use]
    pub fn new(servers: Vec<SocketAddr>) -> Rc<Self> {
        Self::with(servers, PER_SECOND, BURST, reaches_v6)
    }

    /// With another budget, and another way to find out whether there is IPv6.
    pub(crate) fn with(
        servers: Vec<SocketAddr>,
        per_second: u32,
        burst: u32,
        v6: fn() -> bool,
    ) -> Rc<Self> {
        Rc::new(Self {
            client: Client::new(servers),
            cache: RefCell::new(Cache::new()),
            flights: RefCell::default(),
            slots: Semaphore::new(AT_ONCE),
            budget: Bucket::new(per_second, burst),
            asked: Cell::new(0),
            v6,
            has_v6: Cell::new(None),
        })
    }

    /// Questions that went to name servers so far.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.asked.get()
    }

    /// Addresses of a *judged* name, unfiltered, from the cache or from the name servers.
    pub async fn lookup(self: &Rc<Self>, name: &Name, family: Family) -> Answer {
        if special(name).is_some() {
            return Answer::never();
        }
        let key = (name.clone(), family);
        let now = Instant::now();
        if family == Family::V6 && !self.has_v6(now) {
            return Answer { outcome: Outcome::None { exists: true }, ttl: 5 };
        }
        if let Some(known) = self.cache.borrow_mut().get(&key, now) {
            return Answer::of(known, now);
        }
        let waiting = self.flights.borrow().get(&key).and_then(WeakShared::upgrade);
        let flight = match waiting {
            Some(flight) => flight,
            None => match self.launch(key, now) {
                Some(flight) => flight,
                None => return Answer { outcome: Outcome::Limited, ttl: 1 },
            },
        };
        Answer::of(flight.await, Instant::now())
    }

    /// Whether this host reaches IPv6. Where it does not, no IPv6 address is asked for or told: the
    /// sandbox's connections are accepted before they are dialled, so a client that was told one would
    /// never fall back to IPv4.
    fn has_v6(&self, now: Instant) -> bool {
        if let Some((has, until)) = self.has_v6.get()
            && until > now
        {
            return has;
        }
        let has = (self.v6)();
        self.has_v6.set(Some((has, now + V6_KNOWN)));
        has
    }

    fn launch(self: &Rc<Self>, key: Key, now: Instant) -> Option<Flight> {
        if !self.budget.take(now) {
            return None;
        }
        let this = Rc::clone(self);
        let own = key.clone();
        let flight: Flight = async move {
            let known = this.fetch(&own).await;
            this.flights.borrow_mut().remove(&own);
            this.cache.borrow_mut().put(own, known.clone());
            known
        }
        .boxed_local()
        .shared();
        let mut flights = self.flights.borrow_mut();
        // Those whose askers all went away have left their entries behind.
        if flights.len() >= 4 * AT_ONCE {
            flights.retain(|_, flight| flight.upgrade().is_some());
        }
        if let Some(weak) = flight.downgrade() {
            flights.insert(key, weak);
        }
        Some(flight)
    }

    async fn fetch(&self, (name, family): &Key) -> Known {
        let failed = |why: &str| Known::new(Outcome::Failed(why.into()), 0, Instant::now());
        let Ok(Ok(_slot)) = timeout(DEADLINE, self.slots.acquire()).await else {
            return failed("too many lookups at once");
        };
        self.asked.set(self.asked.get() + 1);
        let reply = self.client.ask(name, *family).await;
        let now = Instant::now();
        match reply {
            Ok(Reply::Found { addresses, ttl }) => {
                Known::new(Outcome::Found(addresses.into()), ttl, now)
            }
            Ok(Reply::None { exists, ttl }) => Known::new(Outcome::None { exists }, ttl, now),
            Ok(Reply::Truncated | Reply::NoEdns | Reply::Failed(_)) => {
                failed("the name servers gave no answer")
            }
            Err(why) => failed(&why),
        }
    }

    /// Notes that the guest was told these addresses, for [`Resolver::pinned`].
    pub(crate) fn pin(&self, name: &Name, told: &[IpAddr]) {
        self.cache.borrow_mut().pin(name, told, Instant::now());
    }

    /// Addresses that the guest was told for this name in the last ten minutes, newest first: they are
    /// dialled by preference, and checked like any other.
    #[must_use]
    pub fn pinned(&self, name: &Name) -> Vec<IpAddr> {
        self.cache.borrow_mut().pinned(name, Instant::now())
    }

    /// Forgets names that a new policy does not resolve any more.
    pub fn retain(&self, keep: &dyn Fn(&Name) -> bool) {
        self.cache.borrow_mut().retain(keep);
    }
}
