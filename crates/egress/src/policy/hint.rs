//! What would have to be in the policy: the smallest entry that allows what was denied.

use std::fmt;
use std::net::IpAddr;

use super::{Address, Compiled, Mode, Named};
use crate::address::unmap;
use crate::canonical::{Host, Name};

/// A change of the policy that allows what was denied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hint {
    /// This entry is missing in `allow`.
    Domain(String),
    /// This range is missing in `subnets.allow`.
    Range(String),
    /// This range would have to leave `subnets.deny`.
    Lift(String),
}

impl Hint {
    /// The change as a policy's line.
    #[must_use]
    pub fn line(&self) -> String {
        match self {
            Self::Domain(entry) => format!("allow: [{entry:?}]"),
            Self::Range(range) => format!("subnets.allow: [{range:?}]"),
            Self::Lift(range) => format!("without {range:?} in subnets.deny"),
        }
    }
}

/// The change as arguments of `bivouac policy`, where the sandbox's name is to be put in: to allow a
/// range that is in `subnets.deny` is to lift it.
impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Domain(entry) | Self::Range(entry) | Self::Lift(entry)) = self;
        write!(f, "allow {entry}")
    }
}

impl Compiled {
    /// What would allow a connection to this host; none when it is allowed.
    #[must_use]
    pub fn hint(&self, host: &Host, port: u16) -> Option<Hint> {
        match host {
            Host::Name(name) => self.hint_for_name(name, port),
            Host::Ip(ip) => self.hint_for_address(*ip),
        }
    }

    /// What would allow a connection to this name; none when it is allowed.
    #[must_use]
    pub fn hint_for_name(&self, name: &Name, port: u16) -> Option<Hint> {
        let Named::Deny(_) = self.named(name, port) else { return None };
        // The two ports of the web are what a bare name is meant for.
        Some(Hint::Domain(match port {
            80 | 443 => name.to_string(),
            _ => format!("{name}:{port}"),
        }))
    }

    /// What would allow a connection to this address; none when it is allowed.
    #[must_use]
    pub fn hint_for_address(&self, ip: IpAddr) -> Option<Hint> {
        match self.address(ip) {
            Address::Allowed { .. } => None,
            Address::Denied { entry } if self.mode() == Mode::Custom => {
                Some(Hint::Lift(entry.to_string()))
            }
            Address::Denied { .. } | Address::Unlisted => Some(Hint::Range(unmap(ip).to_string())),
        }
    }
}
