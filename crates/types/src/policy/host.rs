//! Names and ranges that a policy may list: reference/egress.md §1.2 and §3.5.
//!
//! Invariant: a value of these types is canonical, so equal meaning is equal text.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

use idna::uts46::{AsciiDenyList, DnsLength, Hyphens, Uts46};
use serde::{Deserialize, Serialize};

use crate::host::{check_label, check_length, is_number, lower};

/// A host name, or a wildcard over host names: lower case, no dot at the end, ASCII.
///
/// `*` stands for a whole label. In front it means one or more labels, elsewhere exactly one; alone
/// it means every name. `*.example.com` does not cover `example.com`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HostPattern(String);

impl HostPattern {
    /// Checks and canonicalises. International names become their `xn--` form, by UTS 46; the rules
    /// for what is left are those of [`crate::host::Host::parse`].
    ///
    /// # Errors
    /// A sentence that says which rule the text breaks.
    pub fn parse(text: &str) -> Result<Self, String> {
        let ascii = to_ascii(text)?;
        let name = lower(&ascii);
        if name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
            || name.rsplit('.').next().is_some_and(is_number)
        {
            return Err("is an address, not a name; list addresses in subnets.allow".to_owned());
        }
        check_length(&name).map_err(|e| e.to_string())?;
        for label in name.split('.') {
            match label {
                "*" => {}
                _ if label.contains('*') => {
                    return Err("'*' must be a whole label, as in *.example.com".to_owned());
                }
                _ => check_label(label).map_err(|e| e.to_string())?,
            }
        }
        Ok(Self(name.into_owned()))
    }

    /// The pattern as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it stands for more than one name.
    #[must_use]
    pub fn is_wildcard(&self) -> bool {
        self.0.split('.').any(|label| label == "*")
    }
}

/// ASCII stays as it is: on the wire it is opaque as well.
fn to_ascii(text: &str) -> Result<Cow<'_, str>, String> {
    if text.is_ascii() {
        return Ok(Cow::Borrowed(text));
    }
    let mapped = Uts46::new()
        .to_ascii(text.as_bytes(), AsciiDenyList::EMPTY, Hyphens::Allow, DnsLength::Ignore)
        .map_err(|_| "is not a valid international name".to_owned())?;
    // Characters that look like '*' are mapped to it; a wildcard has to be written as one.
    let stars = |t: &str| t.bytes().filter(|b| *b == b'*').count();
    if stars(&mapped) != stars(text) {
        return Err("holds a character that only looks like '*'".to_owned());
    }
    Ok(mapped)
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

    /// Whether an address is in it. An IPv4 address that is written as IPv6 is not in an IPv4 range:
    /// whoever asks unmaps it first.
    #[must_use]
    pub fn contains(&self, ip: IpAddr) -> bool {
        self.address.is_ipv4() == ip.is_ipv4()
            && Self { address: ip, prefix: self.prefix }.network() == self.address
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
