//! Names and ranges that a policy may list: reference/egress.md §1.2 and §3.5.
//!
//! Invariant: a value of these types is canonical, so equal meaning is equal text.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// Longest host name, bytes, and longest label.
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// A host name, or a wildcard over host names: lower case, no dot at the end, ASCII.
///
/// `*` stands for a whole label. In front it means one or more labels, elsewhere exactly one; alone
/// it means every name. `*.example.com` does not cover `example.com`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostPattern(String);

impl HostPattern {
    /// Checks and canonicalises.
    ///
    /// # Errors
    /// A sentence that says which rule the text breaks.
    pub fn parse(text: &str) -> Result<Self, String> {
        if !text.is_ascii() {
            return Err("must be ASCII; write an international name in its xn-- form".to_owned());
        }
        let lower = text.to_ascii_lowercase();
        let name = lower.strip_suffix('.').unwrap_or(&lower);
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(format!("must have 1 to {MAX_NAME} characters"));
        }
        if name.parse::<IpAddr>().is_ok() || name.rsplit('.').next().is_some_and(is_number) {
            return Err("is an address, not a name; list addresses in subnets.allow".to_owned());
        }
        for label in name.split('.') {
            check_label(label)?;
        }
        Ok(Self(name.to_owned()))
    }

    /// The pattern as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What a URL parser takes for the last part of an IPv4 address.
fn is_number(label: &str) -> bool {
    if label.is_empty() {
        return false;
    }
    match label.strip_prefix("0x") {
        Some(hex) => hex.bytes().all(|b| b.is_ascii_hexdigit()),
        None => label.bytes().all(|b| b.is_ascii_digit()),
    }
}

fn check_label(label: &str) -> Result<(), String> {
    if label == "*" {
        return Ok(());
    }
    if label.contains('*') {
        return Err("'*' must be a whole label, as in *.example.com".to_owned());
    }
    if label.is_empty() || label.len() > MAX_LABEL {
        return Err(format!("each part between dots must have 1 to {MAX_LABEL} characters"));
    }
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    if !label.bytes().all(good) || label.starts_with('-') || label.ends_with('-') {
        return Err(
            "is not a host name: letters, digits, '-' and '_' only, no scheme, port or path"
                .to_owned(),
        );
    }
    Ok(())
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for HostPattern {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text)
    }
}

impl From<HostPattern> for String {
    fn from(host: HostPattern) -> String {
        host.0
    }
}

/// A range of addresses: the network address and how many of its bits count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cidr {
    address: IpAddr,
    prefix: u8,
}

impl Cidr {
    /// Checks `ADDRESS/BITS`; a bare address is a range of one.
    ///
    /// # Errors
    /// A sentence that says which rule the text breaks.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let Ok(address) = address.parse::<IpAddr>() else {
            return Err("is not a range of addresses, as in 10.0.0.0/8 or fd00::/8".to_owned());
        };
        let width = if address.is_ipv4() { 32 } else { 128 };
        let prefix = match bits {
            None => width,
            Some(bits) if bits.bytes().all(|b| b.is_ascii_digit()) => bits
                .parse()
                .ok()
                .filter(|n| *n <= width)
                .ok_or_else(|| format!("the number after the slash must be 0 to {width}"))?,
            Some(_) => return Err(format!("the number after the slash must be 0 to {width}")),
        };
        if let IpAddr::V6(v6) = address
            && v6.to_ipv4_mapped().is_some()
        {
            return Err("is an IPv4 address written as IPv6; write it as IPv4".to_owned());
        }
        let range = Self { address, prefix };
        let network = range.network();
        if network != address {
            return Err(format!(
                "has bits set behind the prefix; did you mean {network}/{prefix} or {address}/{width}?"
            ));
        }
        Ok(range)
    }

    /// First address of the range.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// How many leading bits count.
    #[must_use]
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    fn network(&self) -> IpAddr {
        let prefix = u32::from(self.prefix);
        match self.address {
            IpAddr::V4(v4) => {
                let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
                IpAddr::V4((v4.to_bits() & mask).into())
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
                IpAddr::V6((v6.to_bits() & mask).into())
            }
        }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl TryFrom<String> for Cidr {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text)
    }
}

impl From<Cidr> for String {
    fn from(range: Cidr) -> String {
        range.to_string()
    }
}
