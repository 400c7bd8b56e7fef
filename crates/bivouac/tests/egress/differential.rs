//! "The policy says allow" and "bytes arrive" are the same, for policies made by chance.
//!
//! The oracle below is written from the specification's sentences (reference/egress.md §1) and shares
//! no code with the engine: it compares labels and bits as text.

use std::net::IpAddr;

use serde_json::{Value, json};

use crate::tools::attack;
use crate::{Bed, fresh};

/// Where the guest believes that names are.
const BELIEVED: [&str; 3] = ["203.0.113.210", "203.0.113.211", "2001:db8:99::1"];
/// What is asked for by address.
const ADDRESSES: [&str; 6] = [
    "203.0.113.210",
    "198.51.100.12",
    "2001:db8:99::1",
    "10.9.9.9",
    "169.254.169.254",
    "192.0.2.7",
];
const RANGES: [&str; 10] = [
    "203.0.113.0/24",
    "203.0.113.210/32",
    "198.51.100.0/25",
    "0.0.0.0/0",
    "::/0",
    "2001:db8:99::/48",
    "10.0.0.0/8",
    "192.0.2.0/24",
    "203.0.113.128/25",
    "169.254.0.0/16",
];

/// Numbers by chance, the same for the same seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((self.0 >> 33) % u64::try_from(n).unwrap()).unwrap()
    }

    fn some<'a>(&mut self, from: &[&'a str], most: usize) -> Vec<&'a str> {
        let count = self.below(most + 1);
        (0..count).map(|_| from[self.below(from.len())]).collect()
    }
}

fn bits(address: &str) -> String {
    match address.parse::<IpAddr>().unwrap() {
        IpAddr::V4(v4) => v4.octets().iter().map(|o| format!("{o:08b}")).collect(),
        IpAddr::V6(v6) => v6.octets().iter().map(|o| format!("{o:08b}")).collect(),
    }
}

fn within(address: &str, range: &str) -> bool {
    let (network, length) = range.split_once('/').unwrap();
    let length: usize = length.parse().unwrap();
    let (address, network) = (bits(address), bits(network));
    address.len() == network.len() && address[..length] == network[..length]
}

/// What is denied above all policies, of the addresses that this test plays.
fn special(address: &str) -> bool {
    ["10.0.0.0/8", "169.254.0.0/16"].iter().any(|range| within(address, range))
}

fn covers(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<_>, Vec<_>) =
        (pattern.split('.').collect(), name.split('.').collect());
    if pattern == ["*"] {
        return true;
    }
    if pattern[0] == "*" {
        let tail = &pattern[1..];
        return name.len() > tail.len() && same(tail, &name[name.len() - tail.len()..]);
    }
    same(&pattern, &name)
}

fn same(pattern: &[&str], name: &[&str]) -> bool {
    pattern.len() == name.len() && pattern.iter().zip(name).all(|(p, n)| *p == "*" || p == n)
}

/// A policy and what the sentences say of it.
struct Policy {
    mode: usize,
    domains: Vec<String>,
    allow: Vec<&'static str>,
    deny: Vec<&'static str>,
}

impl Policy {
    fn any(chance: &mut Chance, patterns: &[String]) -> Self {
        let names: Vec<&str> = patterns.iter().map(String::as_str).collect();
        let mut domains: Vec<String> =
            chance.some(&names, 3).into_iter().map(str::to_owned).collect();
        domains.sort();
        domains.dedup();
        Self {
            mode: chance.below(8),
            domains,
            allow: chance.some(&RANGES, 2),
            deny: chance.some(&RANGES, 2),
        }
    }

    fn wire(&self) -> Value {
        match self.mode {
            0 => json!({"mode": "allow-all"}),
            1 => json!({"mode": "deny-all"}),
            _ => {
                json!({"allow": self.domains, "subnets": {"allow": self.allow, "deny": self.deny}})
            }
        }
    }

    fn denies(&self, address: &str) -> bool {
        special(address) || self.deny.iter().any(|range| within(address, range))
    }

    fn allows_address(&self, address: &str) -> bool {
        match self.mode {
            0 => !special(address),
            1 => false,
            _ if self.denies(address) => false,
            _ => {
                self.allow.iter().any(|range| within(address, range))
                    || self.domains.iter().any(|d| d == "*")
            }
        }
    }

    /// A TLS connection that names `name`, which really is at `real`, to where the guest believes it.
    fn allows_name(&self, name: &str, believed: &str, real: &[&str]) -> bool {
        match self.mode {
            0 => !special(believed),
            1 => false,
            _ if self.denies(believed) => false,
            _ if self.allow.iter().any(|range| within(believed, range)) => true,
            _ => {
                self.domains.iter().any(|d| covers(d, name))
                    && real.iter().any(|address| !self.denies(address))
            }
        }
    }
}

#[tokio::test]
async fn what_a_policy_allows_arrives_and_nothing_else() {
    let bed = Bed::new().await;
    let base = fresh("diff.test");
    let names: Vec<(String, Vec<&str>)> = vec![
        (base.clone(), vec!["198.51.100.12"]),
        (format!("a.{base}"), vec!["198.51.100.200"]),
        (format!("b.a.{base}"), vec!["10.9.9.12", "198.51.100.12"]),
        (format!("in.{base}"), vec!["10.9.9.13"]),
        (format!("www.x.{base}"), vec!["2001:db8:99::12"]),
        (format!("x{base}"), vec!["198.51.100.12"]),
    ];
    for (name, at) in &names {
        bed.name(name, at);
    }
    let patterns = [
        base.clone(),
        format!("*.{base}"),
        format!("www.*.{base}"),
        format!("a.{base}"),
        "*".to_owned(),
        format!("*.a.{base}"),
        format!("in.{base}"),
    ];
    let seed =
        std::env::var("BIVOUAC_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(20_261_130);
    let mut chance = Chance(seed);
    let sandbox = bed.sandbox(json!({"mode": "deny-all"})).await;
    let (mut allowed, mut refused) = (0, 0);
    for round in 0..40 {
        let policy = Policy::any(&mut chance, &patterns);
        bed.set(&sandbox, &policy.wire()).await;
        let mut attempts = Vec::new();
        let mut wanted = Vec::new();
        for (i, (name, real)) in names.iter().enumerate() {
            let believed = BELIEVED[chance.below(BELIEVED.len())];
            let path = format!("/r{round}n{i}-{base}");
            attempts.push(
                json!({"address": believed, "port": 443, "sni": name, "host": name, "path": path}),
            );
            wanted.push((policy.allows_name(name, believed, real), path));
        }
        for (i, address) in ADDRESSES.iter().enumerate() {
            let path = format!("/r{round}a{i}-{base}");
            attempts.push(json!({"address": address, "port": 80, "host": address, "path": path}));
            wanted.push((policy.allows_address(address), path));
        }
        let answered =
            attack(&sandbox, &["batch", &Value::from(attempts.clone()).to_string()]).await;
        for (i, (want, path)) in wanted.iter().enumerate() {
            let arrived = !bed.seen_with(path).is_empty();
            let context =
                format!("seed {seed} round {round}: {} under {}", attempts[i], policy.wire());
            assert_eq!(arrived, *want, "{context}");
            assert_eq!(answered[i], *want, "{context}");
            if *want { allowed += 1 } else { refused += 1 }
        }
    }
    // Chance gave both kinds.
    assert!(allowed > 30 && refused > 100, "{allowed} allowed, {refused} refused");
}
