//! The egress firewall and credential broker of one session.
//!
//! Owns every decision about a byte that leaves a sandbox: [`policy`] compiles what the user listed,
//! [`canonical`] and [`address`] say what a name and an address are, [`dns`] answers the guest's
//! queries, [`broker`] takes its connections, [`intercept`] shows HTTP to rules. Invariant: nothing is
//! dialled but an address that [`dial`] has checked, and a credential leaves only inside a request that
//! a rule matched, on a verified TLS connection to the name that the rule is for.
//!
//! It knows neither the runtime nor the store: `bivouac::role::shim` hands it listeners
//! ([`broker::Gate`]) and carries its messages ([`message`]). Everything runs in the shim's one thread.
#![forbid(unsafe_code)]

pub mod address;
pub mod audit;
pub mod broker;
pub mod canonical;
pub mod classify;
pub mod dial;
pub mod dns;
pub mod flows;
pub mod intercept;
pub mod message;
pub mod policy;
pub mod reason;
pub mod trust;
pub mod udp;
