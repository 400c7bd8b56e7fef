//! Lists of ranges, asked about one address: a table per length of prefix.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use bivouac_types::policy::Cidr;

/// A set of ranges; the narrowest that holds an address is found first.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    /// By length of the prefix, longest first: network bits → the range as text. IPv4 counts as the
    /// last 32 of 128 bits in a table of its own.
    v4: Vec<(u8, HashMap<u128, Arc<str>>)>,
    v6: Vec<(u8, HashMap<u128, Arc<str>>)>,
}

impl Ranges {
    pub(super) fn new(ranges: &[Cidr]) -> Self {
        Self { v4: tables(ranges, true), v6: tables(ranges, false) }
    }

    pub(super) fn find(&self, ip: IpAddr) -> Option<&Arc<str>> {
        let (tables, bits, width) = match ip {
            IpAddr::V4(v4) => (&self.v4, u128::from(v4.to_bits()), 32),
            IpAddr::V6(v6) => (&self.v6, v6.to_bits(), 128),
        };
        tables.iter().find_map(|(prefix, table)| table.get(&network(bits, width, *prefix)))
    }
}

fn tables(ranges: &[Cidr], v4: bool) -> Vec<(u8, HashMap<u128, Arc<str>>)> {
    let mut by_prefix: BTreeMap<u8, HashMap<u128, Arc<str>>> = BTreeMap::new();
    for range in ranges.iter().filter(|range| range.address().is_ipv4() == v4) {
        let (bits, width) = match range.address() {
            IpAddr::V4(v4) => (u128::from(v4.to_bits()), 32),
            IpAddr::V6(v6) => (v6.to_bits(), 128),
        };
        let network = network(bits, width, range.prefix());
        by_prefix.entry(range.prefix()).or_default().insert(network, range.to_string().into());
    }
    by_prefix.into_iter().rev().collect()
}

/// The bits that count; the others are dropped.
fn network(bits: u128, width: u32, prefix: u8) -> u128 {
    bits.checked_shr(width - u32::from(prefix)).unwrap_or(0)
}
