//! What a host is: the one canonicaliser of names and addresses (reference/egress.md §3.5).
//!
//! Invariant: two texts that reach the same host are the same [`Host`], and a [`Name`] is lower case,
//! ASCII, without a dot at the end and never an address in disguise. Policy keys, DNS queries, server
//! names, `Host` and `:authority` all pass through [`Host::parse`] or, for patterns, through the same
//! label check, so that no two of them can disagree. Called by [`crate::policy`] and by
//! `egress::canonical`, which adds authorities and paths.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

/// Longest host name, bytes.
pub const MAX_NAME: usize = 253;
/// Longest label, bytes.
pub const MAX_LABEL: usize = 63;

/// Why bytes are no host: a clause that follows the name of the field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NameError(pub &'static str);

/// A host name in canonical form. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(Arc<str>);

impl Name {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Reads a name that must not be an address.
    ///
    /// # Errors
    /// [`NameError`] that says which rule the bytes break.
    pub fn parse(bytes: &[u8]) -> Result<Self, NameError> {
        match Host::parse(bytes)? {
            Host::Name(name) => Ok(name),
            Host::Ip(_) => Err(NameError("is an address, not a name")),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where a request wants to go.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Host {
    /// A name.
    Name(Name),
    /// An address; never an IPv4 address that is written as IPv6.
    Ip(IpAddr),
}

impl Host {
    /// Reads a host as it stands on the wire: ASCII only, IPv6 in brackets. What a URL parser takes
    /// for an IPv4 address (`2130706433`, `0x7f.1`, `0177.0.0.1`) is that address.
    ///
    /// # Errors
    /// [`NameError`] that says which rule the bytes break.
    pub fn parse(bytes: &[u8]) -> Result<Self, NameError> {
        let text = std::str::from_utf8(bytes)
            .ok()
            .filter(|t| t.is_ascii())
            .ok_or(NameError("must be ASCII; an international name is sent in its xn-- form"))?;
        if let Some(rest) = text.strip_prefix('[') {
            let inside = rest.strip_suffix(']').and_then(|t| t.parse::<Ipv6Addr>().ok());
            let v6 = inside.ok_or(NameError("is not an IPv6 address in brackets"))?;
            return Ok(Self::Ip(v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)));
        }
        let name = lower(text);
        if name.rsplit('.').next().is_some_and(is_number) {
            return ipv4(&name).map(|v4| Self::Ip(IpAddr::V4(v4)));
        }
        check_length(&name)?;
        name.split('.').try_for_each(check_label)?;
        Ok(Self::Name(Name(name.into())))
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Ip(IpAddr::V4(v4)) => v4.fmt(f),
            Self::Ip(IpAddr::V6(v6)) => write!(f, "[{v6}]"),
        }
    }
}

/// Lower case, without the dot of the root.
pub(crate) fn lower(text: &str) -> Cow<'_, str> {
    let text = text.strip_suffix('.').unwrap_or(text);
    if text.bytes().any(|b| b.is_ascii_uppercase()) {
        Cow::Owned(text.to_ascii_lowercase())
    } else {
        Cow::Borrowed(text)
    }
}

pub(crate) fn check_length(name: &str) -> Result<(), NameError> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(NameError("must have 1 to 253 characters"));
    }
    Ok(())
}

/// One part between dots, lower case already.
pub(crate) fn check_label(label: &str) -> Result<(), NameError> {
    if label.is_empty() || label.len() > MAX_LABEL {
        return Err(NameError("each part between dots must have 1 to 63 characters"));
    }
    let good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
    if !label.bytes().all(good) || label.starts_with('-') || label.ends_with('-') {
        return Err(NameError(
            "is not a host name: letters, digits, '-' and '_' only, no scheme, user or path",
        ));
    }
    Ok(())
}

/// Whether a URL parser takes this label, the last of a name, for the end of an IPv4 address.
pub(crate) fn is_number(label: &str) -> bool {
    let digits = !label.is_empty() && label.bytes().all(|b| b.is_ascii_digit());
    let hex = label.strip_prefix("0x").is_some_and(|h| h.bytes().all(|b| b.is_ascii_hexdigit()));
    digits || hex
}

/// The IPv4 parser of the WHATWG URL standard; `text` is lower case.
fn ipv4(text: &str) -> Result<Ipv4Addr, NameError> {
    const WRONG: NameError = NameError("ends in a number and is not an IPv4 address");
    let parts: Vec<&str> = text.split('.').collect();
    if parts.len() > 4 {
        return Err(WRONG);
    }
    let mut bits: u64 = 0;
    for (i, part) in parts.iter().enumerate() {
        let number = number(part).ok_or(WRONG)?;
        let last = i + 1 == parts.len();
        // The last number fills the bytes that the others left.
        let width = if last { 8 * (5 - parts.len()) } else { 8 };
        if number >> width != 0 {
            return Err(WRONG);
        }
        bits = (bits << width) | number;
    }
    u32::try_from(bits).map(Ipv4Addr::from).map_err(|_| WRONG)
}

/// Decimal, octal behind `0`, hexadecimal behind `0x`; `0x` alone is zero.
fn number(text: &str) -> Option<u64> {
    let (digits, radix) = match (text.strip_prefix("0x"), text.strip_prefix('0')) {
        (Some(""), _) => return Some(0),
        (Some(hex), _) => (hex, 16),
        (None, Some(octal)) if !octal.is_empty() => (octal, 8),
        _ => (text, 10),
    };
    if digits.is_empty() || !digits.bytes().all(|b| char::from(b).is_digit(radix)) {
        return None;
    }
    // A number that is too long for 64 bits is too long for an address as well.
    u64::from_str_radix(digits, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host(text: &str) -> Result<String, NameError> {
        Host::parse(text.as_bytes()).map(|h| h.to_string())
    }

    #[test]
    fn names_and_addresses() {
        for (text, canonical) in [
            ("Example.COM.", "example.com"),
            ("localhost", "localhost"),
            ("a_b.example", "a_b.example"),
            ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
            ("1.2.3.4.example", "1.2.3.4.example"),
            ("1e100.net", "1e100.net"),
            ("0xg", "0xg"),
            ("1.2.3.4", "1.2.3.4"),
            ("1.2.3.4.", "1.2.3.4"),
            ("2130706433", "127.0.0.1"),
            ("0177.1", "127.0.0.1"),
            ("127.1", "127.0.0.1"),
            ("0X7F.0x0.0.1", "127.0.0.1"),
            ("0x", "0.0.0.0"),
            ("1.0x", "1.0.0.0"),
            ("0", "0.0.0.0"),
            ("037777777777", "255.255.255.255"),
            ("00000000000000000000000000001.2.3.4", "1.2.3.4"),
            ("192.168.257", "192.168.1.1"),
            ("[::1]", "[::1]"),
            ("[::ffff:127.0.0.1]", "127.0.0.1"),
            ("[2001:DB8::0:1]", "[2001:db8::1]"),
        ] {
            assert_eq!(host(text).as_deref(), Ok(canonical), "{text}");
        }
    }

    #[test]
    fn what_is_no_host() {
        let (label, name) = ("a".repeat(64), format!("{}com", "a.".repeat(126)));
        for bad in [
            "",
            ".",
            "..",
            "a..b",
            ".a.com",
            "a.com..",
            "a b",
            "a\0.com",
            "a.com\0.b.com",
            "a\t",
            "-a.com",
            "a-.com",
            "a@b.com",
            "a%2e.com",
            "a/b",
            "a\\b",
            "a:1",
            "::1",
            "[::1",
            "[::1%eth0]",
            "[1.2.3.4]",
            "[]",
            "*.a.com",
            "bücher.example",
            "a\u{3002}com",
            "256.1.1.1",
            "1.2.3.4.5",
            "1.2.3.256",
            "09",
            "1.08",
            "0xfffffffff",
            "4294967296",
            "a.1",
            "1..2",
            "99999999999999999999999999",
            &label,
            &name,
        ] {
            assert!(host(bad).is_err(), "{bad:?} is {:?}", host(bad));
        }
        assert!(Host::parse(b"a\xff.com").is_err());
        assert!(Name::parse(b"127.1").is_err());
    }

    /// Another way to the same numbers: every form of one address.
    fn forms(bytes: [u8; 4], radix: [u8; 4], parts: usize) -> String {
        let mut numbers: Vec<u64> = bytes[..parts - 1].iter().map(|b| u64::from(*b)).collect();
        numbers.push(bytes[parts - 1..].iter().fold(0, |sum, b| sum * 256 + u64::from(*b)));
        let write = |(n, radix): (&u64, &u8)| match radix % 3 {
            0 => format!("{n}"),
            1 => format!("0{n:o}"),
            _ => format!("0x{n:X}"),
        };
        numbers.iter().zip(&radix).map(write).collect::<Vec<_>>().join(".")
    }

    proptest! {
        #[test]
        fn every_form_of_an_address_is_that_address(
            bytes: [u8; 4], radix: [u8; 4], parts in 1usize..=4, dot: bool,
        ) {
            let text = format!("{}{}", forms(bytes, radix, parts), if dot { "." } else { "" });
            prop_assert_eq!(Host::parse(text.as_bytes()), Ok(Host::Ip(IpAddr::from(bytes))), "{}", text);
        }

        #[test]
        fn parsing_is_idempotent(text in "[a-zA-Z0-9x_.\\[\\]:-]{1,40}") {
            if let Ok(host) = Host::parse(text.as_bytes()) {
                prop_assert_eq!(Host::parse(host.to_string().as_bytes()), Ok(host));
            }
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            if let Ok(Host::Name(name)) = Host::parse(&bytes) {
                prop_assert!(name.as_str().is_ascii() && !name.as_str().ends_with('.'));
                prop_assert!(!name.as_str().bytes().any(|b| b.is_ascii_uppercase() || b <= b' '));
            }
        }
    }
}
