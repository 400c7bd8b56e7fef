//! Which addresses are denied above all policies, and what an address really is.
//!
//! Owns the list of special ranges (the special-purpose registries of IANA, and the metadata services
//! of clouds). Invariant: an address is judged by where a packet to it ends, so an IPv4 address inside
//! an IPv6 one is judged too. Documentation ranges are ordinary addresses here. Called by `dial` before
//! each connect, by `dns` for each answer, and by `policy` for ranges.
//!
//! What `--egress-allow-private RANGE` does: an address in RANGE is no longer denied above all
//! policies; then the policy decides, as for any public address. So in allow-all mode RANGE is
//! reachable, in custom mode only where `subnets.allow` or a listed name leads to it, in deny-all not
//! at all. The address of a metadata service is opened by no range but the one that holds it alone
//! (`169.254.169.254/32`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bivouac_types::policy::Cidr;

/// IPv4 ranges: network, bits, what it is.
const V4: [([u8; 4], u8, &str); 15] = [
    ([0, 0, 0, 0], 8, "this network (0.0.0.0/8)"),
    ([10, 0, 0, 0], 8, "private (10.0.0.0/8)"),
    ([100, 64, 0, 0], 10, "shared by carriers (100.64.0.0/10)"),
    ([127, 0, 0, 0], 8, "loopback (127.0.0.0/8)"),
    ([169, 254, 0, 0], 16, "link-local (169.254.0.0/16)"),
    ([172, 16, 0, 0], 12, "private (172.16.0.0/12)"),
    ([192, 0, 0, 0], 24, "protocol assignments (192.0.0.0/24)"),
    ([192, 88, 99, 0], 24, "6to4 relays (192.88.99.0/24)"),
    ([192, 168, 0, 0], 16, "private (192.168.0.0/16)"),
    ([198, 18, 0, 0], 15, "benchmarking (198.18.0.0/15)"),
    ([224, 0, 0, 0], 4, "multicast (224.0.0.0/4)"),
    ([255, 255, 255, 255], 32, "broadcast (255.255.255.255)"),
    ([240, 0, 0, 0], 4, "reserved (240.0.0.0/4)"),
    // A public address that means the host of the machine there.
    ([168, 63, 129, 16], 32, METADATA),
    // Alike; it is also in the range of protocol assignments.
    ([192, 0, 0, 192], 32, METADATA),
];

/// IPv6 ranges by their first 64 bits; what is not in `2000::/3` is denied besides, see [`special_v6`].
const V6: [(u64, u8, &str); 11] = [
    (0x0064_ff9b_0001_0000, 48, "translation to IPv4 (64:ff9b:1::/48)"),
    (0x0100_0000_0000_0000, 64, "discard (100::/64)"),
    (0x0100_0000_0000_0001, 64, "dummy prefix (100:0:0:1::/64)"),
    (0x2001_0002_0000_0000, 48, "benchmarking (2001:2::/48)"),
    (0x2001_0010_0000_0000, 28, "hash identifiers (2001:10::/28)"),
    (0x2001_0020_0000_0000, 28, "hash identifiers (2001:20::/28)"),
    (0x5f00_0000_0000_0000, 16, "segment routing (5f00::/16)"),
    (0xfc00_0000_0000_0000, 7, "unique local (fc00::/7)"),
    (0xfe80_0000_0000_0000, 10, "link-local (fe80::/10)"),
    (0xfec0_0000_0000_0000, 10, "site-local (fec0::/10)"),
    (0xff00_0000_0000_0000, 8, "multicast (ff00::/8)"),
];

const METADATA: &str = "a cloud's metadata service";

/// Metadata services that have an address of their own: clouds answer credentials there.
const METADATA_V4: [[u8; 4]; 5] = [
    [169, 254, 169, 254],
    [169, 254, 170, 2],
    [100, 100, 100, 200],
    [168, 63, 129, 16],
    [192, 0, 0, 192],
];
/// `fd00:ec2::254`, `fd00:ec2::23`, `fd20:ce::254`, `fd00:c1::a9fe:a9fe`, `fe80::a9fe:a9fe`.
const METADATA_V6: [u128; 5] = [
    0xfd00_0ec2_0000_0000_0000_0000_0000_0254,
    0xfd00_0ec2_0000_0000_0000_0000_0000_0023,
    0xfd20_00ce_0000_0000_0000_0000_0000_0254,
    0xfd00_00c1_0000_0000_0000_0000_a9fe_a9fe,
    0xfe80_0000_0000_0000_0000_0000_a9fe_a9fe,
];

/// The same destination in its shorter form: an IPv4 address that is mapped into IPv6
/// (`::ffff:a.b.c.d`) or that the well-known prefix of NAT64 leads to (`64:ff9b::a.b.c.d`).
///
/// Judge by it. Dial what was asked for: on a host without IPv4 only the translator's address works.
#[must_use]
pub fn unmap(ip: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = ip else { return ip };
    if let Some(v4) = v6.to_ipv4_mapped() {
        return IpAddr::V4(v4);
    }
    match v6.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, a, b] => IpAddr::V4(joined(a, b)),
        _ => ip,
    }
}

/// IPv4 addresses that a packet to this address passes or ends at: 6to4, Teredo (server and client) and
/// the translator of a local network. An address that is denied is denied through them as well.
pub fn embedded(ip: IpAddr) -> impl Iterator<Item = IpAddr> {
    let found = match ip {
        IpAddr::V4(_) => [None, None],
        IpAddr::V6(v6) => match v6.segments() {
            [0x2002, a, b, ..] => [Some(joined(a, b)), None],
            [0x2001, 0, a, b, _, _, c, d] => [Some(joined(a, b)), Some(joined(!c, !d))],
            [0x64, 0xff9b, 1, .., a, b] => [Some(joined(a, b)), None],
            _ => [None, None],
        },
    };
    found.into_iter().flatten().map(IpAddr::V4)
}

fn joined(high: u16, low: u16) -> Ipv4Addr {
    Ipv4Addr::from((u32::from(high) << 16) | u32::from(low))
}

fn special_v4(ip: Ipv4Addr) -> Option<&'static str> {
    let bits = ip.to_bits();
    let within = |net: [u8; 4], prefix: u8| {
        let shift = 32 - u32::from(prefix);
        bits >> shift == u32::from_be_bytes(net) >> shift
    };
    V4.iter().find(|(net, prefix, _)| within(*net, *prefix)).map(|(_, _, what)| *what)
}

fn special_v6(ip: Ipv6Addr) -> Option<&'static str> {
    if ip.is_unspecified() {
        return Some("unspecified (::)");
    }
    if ip.is_loopback() {
        return Some("loopback (::1)");
    }
    let high = (ip.to_bits() >> 64) as u64;
    let within = |net: u64, prefix: u8| {
        let shift = 64 - u32::from(prefix);
        high >> shift == net >> shift
    };
    let listed = V6.iter().find(|(net, prefix, _)| within(*net, *prefix)).map(|(_, _, what)| *what);
    listed.or_else(|| (high >> 61 != 1).then_some("not assigned (outside of 2000::/3)"))
}

fn is_metadata(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => METADATA_V4.contains(&v4.octets()),
        IpAddr::V6(v6) => METADATA_V6.contains(&v6.to_bits()),
    }
}

/// What is denied above all policies.
#[derive(Debug, Clone, Default)]
pub struct Fence {
    allow_private: Vec<Cidr>,
}

impl Fence {
    /// A fence with these gaps: `--egress-allow-private`.
    #[must_use]
    pub fn new(allow_private: Vec<Cidr>) -> Self {
        Self { allow_private }
    }

    /// Why this address is denied above all policies, in words; none when the policy decides.
    #[must_use]
    pub fn forbidden(&self, ip: IpAddr) -> Option<&'static str> {
        let ip = unmap(ip);
        self.special(ip).or_else(|| {
            // Whoever lists the outer address means what is inside, too.
            if self.listed(ip) { None } else { embedded(ip).find_map(|inner| self.special(inner)) }
        })
    }

    /// Whether the operator listed a range that holds this address.
    #[must_use]
    pub fn listed(&self, ip: IpAddr) -> bool {
        let ip = unmap(ip);
        self.allow_private.iter().any(|range| range.contains(ip))
    }

    fn special(&self, ip: IpAddr) -> Option<&'static str> {
        if is_metadata(ip) {
            let alone =
                |r: &Cidr| r.address() == ip && r.prefix() == if ip.is_ipv4() { 32 } else { 128 };
            return (!self.allow_private.iter().any(alone)).then_some(METADATA);
        }
        let what = match ip {
            IpAddr::V4(v4) => special_v4(v4),
            IpAddr::V6(v6) => special_v6(v6),
        };
        what.filter(|_| !self.listed(ip))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fence(gaps: &[&str]) -> Fence {
        Fence::new(gaps.iter().map(|g| Cidr::parse(g).unwrap()).collect())
    }

    fn forbidden(fence: &Fence, ip: &str) -> bool {
        fence.forbidden(ip.parse().unwrap()).is_some()
    }

    const DENIED: &[&str] = &[
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "10.255.255.255",
        "100.64.0.1",
        "100.127.255.255",
        "100.100.100.200",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.0.1",
        "169.254.169.254",
        "169.254.170.2",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.1",
        "192.0.0.192",
        "192.88.99.1",
        "192.168.0.1",
        "198.18.0.1",
        "198.19.255.255",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "168.63.129.16",
        "::",
        "::1",
        "::127.0.0.1",
        "::8.8.8.8",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::10.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::8.8.8.8",
        "100::1",
        "100:0:0:1::1",
        "2001:2::1",
        "2001:10::1",
        "2001:20::1",
        "2002:a00:1::1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "2001:0:a00:1::f7f7:f7f7",
        "2001:0:808:808::80ff:fffe",
        "2001:0:808:808:0:0:5601:5601",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "fe80::1",
        "fe80::a9fe:a9fe",
        "febf::1",
        "fec0::1",
        "ff02::1",
        "1000::1",
        "4000::1",
        "8000::1",
    ];
    const ORDINARY: &[&str] = &[
        "1.1.1.1",
        "8.8.8.8",
        "9.255.255.255",
        "11.0.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "126.255.255.255",
        "128.0.0.1",
        "169.253.255.255",
        "169.255.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "192.0.1.0",
        "192.88.98.1",
        "192.167.255.255",
        "192.169.0.0",
        "198.17.255.255",
        "198.20.0.0",
        "223.255.255.255",
        "192.0.2.1",
        "198.51.100.1",
        "203.0.113.1",
        "168.63.129.15",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
        "2001:db8::1",
        "2606:4700::1111",
        "2a00::1",
        "3fff::1",
        "2002:808:808::1",
        "2001:0:808:808::f7f7:f7f7",
        "2001:4860::1",
    ];

    #[test]
    fn special_ranges_to_the_last_address() {
        let closed = fence(&[]);
        for ip in DENIED {
            assert!(forbidden(&closed, ip), "{ip}");
        }
        for ip in ORDINARY {
            assert_eq!(closed.forbidden(ip.parse().unwrap()), None, "{ip}");
        }
    }

    #[test]
    fn a_gap_opens_what_is_listed_and_no_more() {
        let open = fence(&["10.1.0.0/16", "fd00::/8", "169.254.0.0/16"]);
        for ip in [
            "10.1.2.3",
            "::ffff:10.1.2.3",
            "64:ff9b::10.1.2.3",
            "2002:a01:203::1",
            "fd00::1",
            "169.254.1.1",
        ] {
            assert!(!forbidden(&open, ip), "{ip}");
        }
        for ip in [
            "10.2.0.1",
            "2002:a02:1::1",
            "fe80::1",
            "169.254.169.254",
            "fd00:ec2::254",
            "127.0.0.1",
        ] {
            assert!(forbidden(&open, ip), "{ip}");
        }
        assert!(!forbidden(&fence(&["169.254.169.254/32"]), "169.254.169.254"));
        assert!(!forbidden(&fence(&["fd00:ec2::254"]), "fd00:ec2::254"));
        assert!(open.listed("::ffff:10.1.2.3".parse().unwrap()));
    }

    proptest! {
        #[test]
        fn no_disguise_opens_a_denied_address(bytes: [u8; 4], at in 0usize..DENIED.len()) {
            // Half the time any address, half one that is denied.
            let v4 = match DENIED[at].parse::<Ipv4Addr>() {
                Ok(denied) if bytes[0] % 2 == 0 => denied,
                _ => Ipv4Addr::from(bytes),
            };
            let closed = fence(&[]);
            let plain = closed.forbidden(v4.into());
            let [a, b, c, d] = v4.octets();
            let word = |x: u8, y: u8| (u16::from(x) << 8) | u16::from(y);
            let (high, low) = (word(a, b), word(c, d));
            for same in [
                Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, high, low),
                Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
            ] {
                prop_assert_eq!(closed.forbidden(same.into()), plain, "{}", same);
                prop_assert_eq!(unmap(same.into()), IpAddr::V4(v4));
            }
            for through in [
                Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
                Ipv6Addr::new(0x2001, 0, high, low, 0, 0, 0xf7f7, 0xf7f7),
                Ipv6Addr::new(0x2001, 0, 0x808, 0x808, 0, 0, !high, !low),
            ] {
                prop_assert_eq!(closed.forbidden(through.into()), plain, "{}", through);
            }
        }

        #[test]
        fn the_standard_library_agrees(bits: u32) {
            let v4 = Ipv4Addr::from(bits);
            let known = v4.is_private() || v4.is_loopback() || v4.is_link_local() || v4.is_broadcast()
                || v4.is_multicast() || v4.is_unspecified();
            prop_assert!(!known || fence(&[]).forbidden(v4.into()).is_some(), "{}", v4);
        }
    }
}
