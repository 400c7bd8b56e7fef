//! DNS: the resolver that the broker dials by, and the stub that answers the guest.
//!
//! Owns: the wire format (`wire`), the questions to the configured name servers (`client`), what was
//! learnt (`cache`), both together (`resolver`), the guest's side (`stub`, `serve`). Invariant: a name
//! that the policy does not resolve is never asked for upstream, whoever asks; of an answer only
//! addresses of the asked name survive; an address that may not be dialled is never told.
//!
//! What is told: class IN, types A and AAAA, aliases folded into the asked name. Every other type of a
//! name that may be resolved is "no such data" (HTTPS and SVCB too: they would move clients to ECH and
//! QUIC). What is denied is NXDOMAIN with an extended error. Names of addresses (`in-addr.arpa`,
//! `ip6.arpa`) are NXDOMAIN, never asked for. `localhost` is the sandbox itself. In deny-all nothing is
//! answered at all.
//!
//! Called by `broker` (serves the guest) and `dial` (resolves what it dials).

mod cache;
mod client;
mod limit;
mod resolver;
mod serve;
mod stub;
pub mod wire;

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;

use std::net::IpAddr;

use crate::audit::Line;
use crate::canonical::Name;

pub use crate::policy::Decision as Ruling;
pub use cache::Outcome;
pub(crate) use limit::Bucket;
pub use resolver::{Answer, Resolver, Special, special};
pub use serve::{serve_tcp, serve_udp};
pub use stub::{Stub, Transport};

/// A family of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The policy in force, as DNS and datagrams see it. Asked anew for each query.
pub trait Rules {
    /// May the guest resolve this name? [`crate::reason::Reason::DenyAll`] means that nothing is answered.
    fn resolves(&self, name: &Name) -> Ruling;
    /// Does the policy deny this address (`subnets.deny`)?
    fn denies(&self, ip: IpAddr) -> bool;
    /// Are datagrams relayed? Only in allow-all.
    fn relays(&self) -> bool;
    /// Writes a line down, after putting time and generation into it.
    fn note(&self, line: Line);
}
