//! What is done with a connection: pure functions of the policy, of the address that the guest asked
//! for and of its first bytes.
//!
//! Invariant: nothing here waits or dials, and the same facts under the same policy give the same
//! answer; so a sweep can judge a live flow again ([`keeps`]). Called by the broker's flows, by its
//! sweep and by `explain`.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::address::{Fence, unmap};
use crate::canonical::{self, Host, Name};
use crate::classify::{First, Hello};
use crate::flows::{Facts, Handling, Ongoing};
use crate::policy::{Address, Compiled, Mode, Named, Site};
use crate::reason::Reason;

/// The port of DNS.
const DNS: u16 = 53;
/// The port on which plain HTTP may be judged by its `Host`.
pub(super) const HTTP: u16 = 80;

/// What the address alone says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Early {
    /// Refused.
    Deny(Refusal),
    /// The stub answers.
    Dns,
    /// Goes to the address that was asked for, whatever it carries.
    Direct { handling: Handling, reason: Reason, entry: Option<Arc<str>> },
    /// The first bytes decide.
    Look,
}

/// What the first bytes say.
#[derive(Debug, Clone)]
pub(super) enum Late {
    /// Refused.
    Deny(Refusal),
    /// Goes to the broker's own resolution of the name, unseen.
    Pass { name: Name, reason: Reason, entry: Arc<str> },
    /// A rule has to see requests.
    Intercept { name: Name, site: Arc<Site> },
    /// Goes to the address that was asked for, because of this catch-all entry.
    Raw(Arc<str>),
    /// Each request is judged by its `Host`.
    PlainHttp,
}

/// Why something is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) reason: Reason,
    pub(super) entry: Option<Arc<str>>,
    pub(super) name: Option<String>,
    pub(super) detail: Option<String>,
}

impl Refusal {
    pub(super) fn of(reason: Reason) -> Self {
        Self { reason, entry: None, name: None, detail: None }
    }
}

/// Judges the address that the guest asked for.
pub(super) fn by_address(
    policy: &Compiled,
    fence: &Fence,
    own: &[IpAddr],
    asked: SocketAddr,
) -> Early {
    if policy.mode() == Mode::DenyAll {
        return Early::Deny(Refusal::of(Reason::DenyAll));
    }
    if asked.port() == DNS {
        // Whatever name server is asked, the stub answers, so nothing is dialled.
        return Early::Dns;
    }
    let ip = asked.ip();
    let forbidden = |range: &str| {
        Early::Deny(Refusal {
            detail: Some(format!("{} is {range}", unmap(ip))),
            ..Refusal::of(Reason::AddressForbidden)
        })
    };
    if own.contains(&ip) || own.contains(&unmap(ip)) {
        return forbidden("an address of the gate itself");
    }
    if let Some(range) = fence.forbidden(ip).or_else(|| fence.forbidden(unmap(ip))) {
        return forbidden(range);
    }
    if policy.mode() == Mode::AllowAll {
        return Early::Direct { handling: Handling::Open, reason: Reason::AllowAll, entry: None };
    }
    match policy.address(ip) {
        Address::Denied { entry } => {
            Early::Deny(Refusal { entry: Some(entry), ..Refusal::of(Reason::SubnetDenied) })
        }
        Address::Allowed { entry } => Early::Direct {
            handling: Handling::Subnet,
            reason: Reason::SubnetAllowed,
            entry: Some(entry),
        },
        Address::Unlisted => Early::Look,
    }
}

/// Judges the first bytes of a connection to an unlisted address; `first` is none when none came in time.
pub(super) fn by_first(policy: &Compiled, port: u16, first: Option<&First>) -> Late {
    let or_raw = |reason| match policy.catch_all(port) {
        Some(entry) => Late::Raw(entry),
        None => Late::Deny(Refusal::of(reason)),
    };
    match first {
        None => or_raw(Reason::HelloTimeout),
        Some(First::Unknown | First::Postgres | First::PostgresGss) => or_raw(Reason::NotTls),
        Some(First::Odd(why)) => match or_raw(Reason::HelloInvalid) {
            Late::Deny(refusal) => {
                Late::Deny(Refusal { detail: Some((*why).to_owned()), ..refusal })
            }
            raw => raw,
        },
        Some(First::Http2) => or_raw(Reason::PlainHttp),
        Some(First::Http) => match or_raw(Reason::PlainHttp) {
            Late::Deny(_) if policy.plain_http() && port == HTTP => Late::PlainHttp,
            other => other,
        },
        Some(First::Tls(hello)) => by_hello(policy, port, hello),
    }
}

fn by_hello(policy: &Compiled, port: u16, hello: &Hello) -> Late {
    let or_raw = |refusal| match policy.catch_all(port) {
        Some(entry) => Late::Raw(entry),
        None => Late::Deny(refusal),
    };
    let Some(text) = &hello.name else {
        // With the extension, the name is there and hidden.
        return or_raw(Refusal::of(if hello.encrypted {
            Reason::EncryptedHello
        } else {
            Reason::NoServerName
        }));
    };
    let refused = |reason| Refusal { name: Some(text.clone()), ..Refusal::of(reason) };
    match canonical::host(text.as_bytes()) {
        Ok(Host::Name(name)) => match policy.named(&name, port) {
            Named::Deny(reason) => Late::Deny(refused(reason)),
            Named::Pass { reason, entry } => Late::Pass { name, reason, entry },
            Named::Intercept(site) => Late::Intercept { name, site },
        },
        Ok(Host::Ip(_)) | Err(_) => or_raw(refused(Reason::NameInvalid)),
    }
}

/// Whether a live flow may go on as it is under a new policy.
pub(super) fn keeps(
    policy: &Compiled,
    fence: &Fence,
    own: &[IpAddr],
    facts: &Facts,
    ongoing: &[Ongoing],
) -> bool {
    let mode = policy.mode();
    if mode == Mode::DenyAll {
        return false;
    }
    let denied = |ip: IpAddr| matches!(policy.address(ip), Address::Denied { .. });
    if mode == Mode::Custom {
        let dialled = facts.dialled.map(|to| to.ip());
        if dialled.into_iter().chain(ongoing.iter().filter_map(|o| o.dialled)).any(denied) {
            return false;
        }
    }
    let named = || facts.name.as_ref().map(|name| policy.named(name, facts.asked.port()));
    match (by_address(policy, fence, own, facts.asked), facts.handling) {
        (_, Handling::Judging) => true,
        (Early::Deny(_), _) => false,
        (Early::Dns, handling) => handling == Handling::Dns,
        // Bytes to where they would go now anyway, or to where a name of the policy led.
        (Early::Direct { .. }, handling) => matches!(
            handling,
            Handling::Open | Handling::Subnet | Handling::Raw | Handling::Pass | Handling::Postgres
        ),
        (Early::Look, Handling::Raw) => policy.catch_all(facts.asked.port()).is_some(),
        (Early::Look, Handling::Pass) => matches!(named(), Some(Named::Pass { .. })),
        // Rules do not see Postgres, so they do not change its handling.
        (Early::Look, Handling::Postgres) => {
            matches!(named(), Some(Named::Pass { .. } | Named::Intercept(_)))
        }
        (Early::Look, Handling::Intercept) => match named() {
            Some(Named::Intercept(site)) => ongoing.iter().all(|request| *request.site == *site),
            _ => false,
        },
        // What an open flow carries was never looked at; plain HTTP is judged by names that are in its
        // requests.
        (Early::Look, Handling::Open | Handling::Subnet | Handling::PlainHttp | Handling::Dns) => {
            false
        }
    }
}
