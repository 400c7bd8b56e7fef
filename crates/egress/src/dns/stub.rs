//! Answers the guest's DNS queries.
//!
//! Invariant: a name that the policy does not resolve is never asked for, not even to look; an address
//! that may not be dialled is never told; no answer goes to more than it was asked for. Judged twice:
//! before the name servers are asked and again when they have answered, since the policy may have
//! changed meanwhile.
//!
//! Called by `serve`.

use std::cell::Cell;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bivouac_types::id::SessionId;
use tokio::time::Instant;

use super::cache::Outcome;
use super::limit::Bucket;
use super::resolver::{Resolver, Special, special};
use super::wire::{self, Heard, Question, Rcode, Told};
use super::{Family, Rules, Ruling};
use crate::address::{Fence, unmap};
use crate::audit::{Kind, Line};
use crate::canonical::{self, Host, Name};
use crate::policy::Hint;
use crate::reason::{Reason, Verdict};

/// Extended errors (RFC 8914).
const BLOCKED: u16 = 15;
const FILTERED: u16 = 17;
const NO_REACHABLE_AUTHORITY: u16 = 22;
const NOT_SUPPORTED: u16 = 21;

/// Queries of one sandbox: a second, and in a burst. What is above is dropped unanswered.
const PER_SECOND: u32 = 2000;
const BURST: u32 = 4000;
/// How often drops are written down.
const TELL_DROPS: Duration = Duration::from_secs(1);

/// How a query came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// In a datagram: the answer is as long as the client says, at most.
    Datagram,
    /// In a stream.
    Stream,
}

/// See the module.
pub struct Stub {
    resolver: Rc<Resolver>,
    fence: Fence,
    rules: Rc<dyn Rules>,
    session: SessionId,
    bucket: Bucket,
    dropped: Cell<u64>,
    told_drops: Cell<Option<Instant>>,
}

impl fmt::Debug for Stub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stub").field("resolver", &self.resolver).finish_non_exhaustive()
    }
}

/// What is said to the guest and what is written down about it.
struct Verdicted {
    rcode: Rcode,
    addresses: Vec<IpAddr>,
    ttl: u32,
    why: Option<(u16, String)>,
    verdict: Verdict,
    reason: Reason,
    entry: Option<Arc<str>>,
    error: Option<String>,
}

impl Verdicted {
    fn deny(rcode: Rcode, reason: Reason, why: (u16, String)) -> Self {
        Self {
            rcode,
            addresses: Vec::new(),
            ttl: 0,
            why: Some(why),
            verdict: Verdict::Deny,
            reason,
            entry: None,
            error: None,
        }
    }

    fn allow(rcode: Rcode, ruling: Ruling) -> Self {
        Self {
            rcode,
            addresses: Vec::new(),
            ttl: 0,
            why: None,
            verdict: Verdict::Allow,
            reason: ruling.reason,
            entry: ruling.entry,
            error: None,
        }
    }

    fn because(mut self, entry: Option<Arc<str>>) -> Self {
        self.entry = entry;
        self
    }
}

impl Stub {
    /// A stub that tells what `resolver` finds, as far as `rules` and `fence` let it.
    #[must_use]
    pub fn new(
        resolver: Rc<Resolver>,
        fence: Fence,
        rules: Rc<dyn Rules>,
        session: SessionId,
    ) -> Rc<Self> {
        Self::with_limit(resolver, fence, rules, session, PER_SECOND, BURST)
    }

    pub(super) fn with_limit(
        resolver: Rc<Resolver>,
        fence: Fence,
        rules: Rc<dyn Rules>,
        session: SessionId,
        per_second: u32,
        burst: u32,
    ) -> Rc<Self> {
        Rc::new(Self {
            resolver,
            fence,
            rules,
            session,
            bucket: Bucket::new(per_second, burst),
            dropped: Cell::new(0),
            told_drops: Cell::new(None),
        })
    }

    /// The answer to one message of the guest; none for what is no query, for what is above the limit
    /// and while everything is denied.
    pub async fn answer(&self, message: &[u8], transport: Transport) -> Option<Vec<u8>> {
        if !self.admit() {
            return None;
        }
        let question = match wire::hear(message) {
            Heard::Noise => return None,
            Heard::Unserved(answer) => {
                let mut line = self.line(Verdict::Deny, Reason::Protocol);
                line.error = Some("not a DNS query that is understood here".to_owned());
                self.rules.note(line);
                return Some(answer);
            }
            Heard::Question(question) => question,
        };
        let limit = match transport {
            Transport::Datagram => question.datagram_limit(),
            Transport::Stream => usize::from(u16::MAX),
        };
        let (name, verdicted) = match self.named(&question) {
            Ok(name) => {
                let verdicted = self.judge(&question, &name).await;
                (Some(name), verdicted)
            }
            Err(verdicted) => (None, Some(verdicted)),
        };
        let Some(verdicted) = verdicted else {
            // Deny-all has no DNS at all: silence, as from the closed socket. This query was under way.
            self.note(&question, name.as_ref(), Verdict::Deny, Reason::DenyAll, None, None);
            return None;
        };
        let told = Told {
            rcode: verdicted.rcode,
            addresses: &verdicted.addresses,
            ttl: verdicted.ttl,
            why: verdicted.why,
        };
        let answer = question.answer(&told, limit);
        let Verdicted { verdict, reason, entry, error, .. } = verdicted;
        self.note(&question, name.as_ref(), verdict, reason, entry, error);
        Some(answer)
    }

    /// The asked name, canonical.
    fn named(&self, question: &Question) -> Result<Name, Verdicted> {
        let invalid = || {
            let why = "name_invalid: not a host name".to_owned();
            Verdicted::deny(Rcode::NxDomain, Reason::NameInvalid, (FILTERED, why))
        };
        if !question.is_internet() {
            let why = "query_type: only class IN is answered".to_owned();
            return Err(Verdicted::deny(Rcode::Refused, Reason::QueryType, (NOT_SUPPORTED, why)));
        }
        let dotted = question.dotted.as_deref().ok_or_else(invalid)?;
        match canonical::host(dotted) {
            Ok(Host::Name(name)) => Ok(name),
            Ok(Host::Ip(_)) | Err(_) => Err(invalid()),
        }
    }

    /// What to say; nothing in deny-all.
    async fn judge(&self, question: &Question, name: &Name) -> Option<Verdicted> {
        let ruling = self.rules.resolves(name);
        if !ruling.allowed && ruling.reason == Reason::DenyAll {
            return None;
        }
        if special(name) == Some(Special::Localhost) {
            return Some(localhost(question));
        }
        if !ruling.allowed {
            return Some(refused(name, ruling));
        }
        if special(name).is_some() {
            let why = "query_type: reverse and special names are not looked up".to_owned();
            let deny = Verdicted::deny(Rcode::NxDomain, Reason::QueryType, (FILTERED, why));
            return Some(deny.because(ruling.entry));
        }
        let Some(family) = question.family() else {
            let why = "query_type: only A and AAAA are answered".to_owned();
            let deny = Verdicted::deny(Rcode::NoError, Reason::QueryType, (FILTERED, why));
            return Some(deny.because(ruling.entry));
        };
        let found = self.resolver.lookup(name, family).await;
        let ruling = self.rules.resolves(name);
        if !ruling.allowed {
            return (ruling.reason != Reason::DenyAll).then(|| refused(name, ruling));
        }
        Some(match found.outcome {
            Outcome::Found(addresses) => self.tell(name, &addresses, found.ttl, ruling),
            Outcome::None { exists } => {
                let rcode = if exists { Rcode::NoError } else { Rcode::NxDomain };
                Verdicted::allow(rcode, ruling)
            }
            Outcome::Failed(error) => {
                // The guest is not told of the host's name servers; the audit is.
                let why = "resolve_failed: the name servers did not answer".to_owned();
                let why = (NO_REACHABLE_AUTHORITY, why);
                let mut deny = Verdicted::deny(Rcode::ServFail, Reason::ResolveFailed, why);
                deny.verdict = Verdict::Error;
                deny.error = Some(error.to_string());
                deny.because(ruling.entry)
            }
            Outcome::Limited => {
                let why = "limit: too many different names at once".to_owned();
                Verdicted::deny(Rcode::ServFail, Reason::Limit, (BLOCKED, why))
                    .because(ruling.entry)
            }
        })
    }

    /// Tells the addresses that may be dialled.
    fn tell(&self, name: &Name, found: &[IpAddr], ttl: u32, ruling: Ruling) -> Verdicted {
        let mut withheld = None;
        let mut good = Vec::with_capacity(found.len());
        for &address in found {
            let ip = unmap(address);
            if let Some(range) = self.fence.forbidden(ip) {
                withheld = Some((BLOCKED, format!("{ip} is {range}")));
            } else if self.rules.denies(ip) {
                withheld = Some((FILTERED, format!("{ip} is in subnets.deny")));
            } else {
                good.push(address);
            }
        }
        if good.is_empty() {
            let (code, what) = withheld.unwrap_or((BLOCKED, String::new()));
            let why = (code, format!("name_resolves_forbidden: {what}"));
            let mut deny = Verdicted::deny(Rcode::NxDomain, Reason::NameResolvesForbidden, why);
            deny.error = Some(what);
            return deny.because(ruling.entry);
        }
        self.resolver.pin(name, &good);
        let mut allow = Verdicted::allow(Rcode::NoError, ruling);
        allow.addresses = good;
        allow.ttl = ttl;
        allow
    }

    /// Whether there is still room for a query; drops are counted, and told once a second.
    fn admit(&self) -> bool {
        let now = Instant::now();
        let admitted = self.bucket.take(now);
        if !admitted {
            self.dropped.set(self.dropped.get() + 1);
        }
        let due = self.told_drops.get().is_none_or(|at| now >= at + TELL_DROPS);
        if self.dropped.get() > 0 && due {
            self.told_drops.set(Some(now));
            let dropped = self.dropped.replace(0);
            let mut line = self.line(Verdict::Deny, Reason::Limit);
            line.error = Some(format!("{dropped} queries above the limit were not answered"));
            self.rules.note(line);
        }
        admitted
    }

    fn line(&self, verdict: Verdict, reason: Reason) -> Line {
        Line::new(self.session.clone(), Kind::Dns, verdict, reason)
    }

    fn note(
        &self,
        question: &Question,
        name: Option<&Name>,
        verdict: Verdict,
        reason: Reason,
        entry: Option<Arc<str>>,
        error: Option<String>,
    ) {
        let mut line = self.line(verdict, reason);
        line.host = name.map(ToString::to_string);
        line.host_from = name.map(|_| "dns".to_owned());
        line.protocol = Some(question.kind_name());
        line.entry = entry.map(|entry| entry.to_string());
        line.error = error;
        self.rules.note(line);
    }
}

/// The sandbox itself, whatever the policy lists: nothing of it leaves.
fn localhost(question: &Question) -> Verdicted {
    let ruling = Ruling { allowed: true, reason: Reason::DomainListed, entry: None };
    let mut allow = Verdicted::allow(Rcode::NoError, ruling);
    allow.ttl = 60;
    match question.family() {
        Some(Family::V4) => allow.addresses.push(Ipv4Addr::LOCALHOST.into()),
        Some(Family::V6) => allow.addresses.push(Ipv6Addr::LOCALHOST.into()),
        None => {}
    }
    allow
}

/// Denied by name: the answer says which line of the policy would allow it.
fn refused(name: &Name, ruling: Ruling) -> Verdicted {
    let hint = Hint::Domain(name.to_string()).line();
    let why = format!("{}: the policy has no {hint}", ruling.reason.as_str());
    Verdicted::deny(Rcode::NxDomain, ruling.reason, (FILTERED, why)).because(ruling.entry)
}
