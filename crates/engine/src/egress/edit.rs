//! Small changes of a policy: one more host, one range less. What the policy says besides, its values
//! above all, stays as it is.
//!
//! Invariant: pure functions; a change that cannot be expressed is refused with what would do, and one
//! that is there already changes nothing.

use std::net::IpAddr;

use bivouac_types::policy::{
    Action, Cidr, CustomPolicy, Domain, HostPattern, MAX_CIDRS, MAX_DOMAINS, NetworkPolicy,
    Response, Rule,
};

use crate::error::Error;

/// What `policy allow` and `policy deny` name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// A host or wildcard, perhaps on one port alone.
    Host(HostPattern, Option<u16>),
    /// Addresses.
    Range(Cidr),
}

/// A change of a policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyEdit {
    /// To be reached from now on.
    pub allow: Vec<Target>,
    /// Not to be reached any more.
    pub deny: Vec<Target>,
}

impl Target {
    /// Reads `HOST`, `HOST:PORT`, an address or `ADDRESS/BITS`.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let bare = text.trim_matches(['[', ']']);
        if bare.parse::<IpAddr>().is_ok() || text.contains('/') {
            return Cidr::parse(bare).map(Self::Range).map_err(|why| format!("'{text}' {why}"));
        }
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => {
                let number = port.parse::<u16>().ok().filter(|port| *port > 0);
                let why = || format!("'{text}' has a port that is not 1 to 65535");
                (host, Some(number.ok_or_else(why)?))
            }
            None => (text, None),
        };
        let host = HostPattern::parse(host).map_err(|why| format!("'{text}' {why}"))?;
        Ok(Self::Host(host, port))
    }
}

/// The policy after the change; `None`: it says so already.
pub(crate) fn apply(
    policy: &NetworkPolicy,
    edit: &PolicyEdit,
) -> Result<Option<NetworkPolicy>, Error> {
    let mut now = policy.clone();
    for target in &edit.allow {
        now = allow(now, target)?;
    }
    for target in &edit.deny {
        now = deny(now, target)?;
    }
    Ok((now != *policy).then_some(now))
}

fn allow(policy: NetworkPolicy, target: &Target) -> Result<NetworkPolicy, Error> {
    let mut custom = match policy {
        // Everything that a policy can allow is.
        NetworkPolicy::AllowAll => return Ok(NetworkPolicy::AllowAll),
        NetworkPolicy::DenyAll => CustomPolicy::default(),
        NetworkPolicy::Custom(custom) => custom,
    };
    match target {
        Target::Host(host, port) => {
            // The answer that `deny` put in its place.
            custom.domains.retain(|d| !(d.host == *host && d.port == *port && is_refusal(d)));
            if !custom.domains.iter().any(|d| d.host == *host && d.port == *port) {
                full(custom.domains.len(), MAX_DOMAINS, "domains")?;
                custom.domains.push(Domain { host: host.clone(), port: *port, rules: Vec::new() });
            }
        }
        Target::Range(range) => {
            custom.deny_cidrs.retain(|denied| denied != range);
            if let Some(denied) = custom.deny_cidrs.iter().find(|denied| covers(denied, range)) {
                return Err(Error::invalid(format!(
                    "{range} lies in {denied}, which the policy denies, and a denied range beats an \
                     allowed one; set a policy with narrower ranges in subnets.deny"
                )));
            }
            if !custom.allow_cidrs.contains(range) {
                full(custom.allow_cidrs.len(), MAX_CIDRS, "ranges")?;
                custom.allow_cidrs.push(*range);
            }
        }
    }
    Ok(NetworkPolicy::Custom(custom))
}

fn deny(policy: NetworkPolicy, target: &Target) -> Result<NetworkPolicy, Error> {
    let mut custom = match policy {
        NetworkPolicy::DenyAll => return Ok(NetworkPolicy::DenyAll),
        NetworkPolicy::AllowAll => everything()?,
        NetworkPolicy::Custom(custom) => custom,
    };
    match target {
        Target::Host(host, port) => {
            if custom.domains.iter().any(|d| d.host == *host && d.port == *port && is_refusal(d)) {
                return Ok(NetworkPolicy::Custom(custom));
            }
            custom.domains.retain(|d| !(d.host == *host && (port.is_none() || d.port == *port)));
            if custom.domains.iter().any(|d| matches(d.host.as_str(), host.as_str())) {
                // A wildcard goes on to cover it, and policies have no denied names: it is answered.
                full(custom.domains.len(), MAX_DOMAINS, "domains")?;
                let rules = vec![Rule::new(None, Action::Respond(refusal()))];
                custom.domains.push(Domain { host: host.clone(), port: *port, rules });
            }
        }
        Target::Range(range) => {
            custom.allow_cidrs.retain(|allowed| !covers(range, allowed));
            if !custom.deny_cidrs.iter().any(|denied| covers(denied, range)) {
                full(custom.deny_cidrs.len(), MAX_CIDRS, "ranges")?;
                custom.deny_cidrs.push(*range);
            }
        }
    }
    Ok(NetworkPolicy::Custom(custom))
}

/// What `allow-all` is as a list.
pub(crate) fn everything() -> Result<CustomPolicy, Error> {
    let host = HostPattern::parse("*").map_err(Error::internal)?;
    let domains = vec![Domain { host, port: None, rules: Vec::new() }];
    Ok(CustomPolicy { domains, ..CustomPolicy::default() })
}

fn refusal() -> Response {
    Response {
        status_code: 403,
        headers: std::collections::BTreeMap::new(),
        body: Some("the network policy of this sandbox denies this host\n".to_owned()),
        content_type: Some("text/plain".to_owned()),
    }
}

fn is_refusal(domain: &Domain) -> bool {
    let [rule] = domain.rules.as_slice() else { return false };
    rule.matcher.is_none() && rule.action == Action::Respond(refusal())
}

fn full(len: usize, most: usize, what: &str) -> Result<(), Error> {
    if len < most {
        return Ok(());
    }
    Err(Error::invalid(format!("The policy has {len} {what} already, which is the most")))
}

/// Whether a pattern covers a name or a narrower pattern, label by label.
fn matches(pattern: &str, name: &str) -> bool {
    if pattern == "*" {
        return name != "*";
    }
    if let Some(suffix) = pattern.strip_prefix("*.") {
        let (wanted, labels) = (suffix.split('.').count(), name.split('.').count());
        let tail: Vec<&str> = name.split('.').skip(labels.saturating_sub(wanted)).collect();
        return labels > wanted && name != pattern && same_labels(suffix, &tail.join("."));
    }
    pattern != name && same_labels(pattern, name)
}

fn same_labels(pattern: &str, name: &str) -> bool {
    pattern.split('.').count() == name.split('.').count()
        && pattern.split('.').zip(name.split('.')).all(|(p, n)| p == "*" || p == n)
}

/// Whether all of `inner` lies in `outer`.
fn covers(outer: &Cidr, inner: &Cidr) -> bool {
    let shift = |width: u8| u32::from(width - outer.prefix());
    outer.prefix() <= inner.prefix()
        && match (outer.address(), inner.address()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                (a.to_bits() ^ b.to_bits()).checked_shr(shift(32)).unwrap_or(0) == 0
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                (a.to_bits() ^ b.to_bits()).checked_shr(shift(128)).unwrap_or(0) == 0
            }
            _ => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(texts: &[&str]) -> Vec<Target> {
        texts.iter().map(|text| Target::parse(text).unwrap()).collect()
    }

    fn edit(policy: &NetworkPolicy, allow: &[&str], deny: &[&str]) -> Option<NetworkPolicy> {
        let edit = PolicyEdit { allow: targets(allow), deny: targets(deny) };
        apply(policy, &edit).unwrap()
    }

    fn custom(policy: Option<NetworkPolicy>) -> CustomPolicy {
        match policy {
            Some(NetworkPolicy::Custom(custom)) => custom,
            other => panic!("{other:?}"),
        }
    }

    fn hosts(policy: &CustomPolicy) -> Vec<&str> {
        policy.domains.iter().map(|d| d.host.as_str()).collect()
    }

    #[test]
    fn targets_are_read() {
        let host = |text: &str| HostPattern::parse(text).unwrap();
        assert_eq!(Target::parse("*.X.test").unwrap(), Target::Host(host("*.x.test"), None));
        assert_eq!(Target::parse("x.test:8443").unwrap(), Target::Host(host("x.test"), Some(8443)));
        for range in ["10.0.0.0/8", "::1", "192.0.2.7", "2001:db8::/32"] {
            assert!(matches!(Target::parse(range).unwrap(), Target::Range(_)), "{range}");
        }
        for bad in ["", "https://x.test", "x.test:0", "x.test:http", "10.0.0.1/8", "a b", "x*.test"]
        {
            assert!(Target::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn allowing_opens_a_closed_policy_and_nothing_an_open_one() {
        let opened = custom(edit(&NetworkPolicy::DenyAll, &["x.test", "192.0.2.0/24"], &[]));
        assert_eq!(hosts(&opened), ["x.test"]);
        assert_eq!(opened.allow_cidrs.len(), 1);
        assert_eq!(edit(&NetworkPolicy::AllowAll, &["x.test"], &[]), None);
        assert_eq!(edit(&NetworkPolicy::Custom(opened), &["x.test"], &[]), None);
    }

    #[test]
    fn a_denied_range_has_to_go_before_it_is_allowed() {
        let denied = custom(edit(&NetworkPolicy::AllowAll, &[], &["192.0.2.0/24"]));
        assert_eq!(hosts(&denied), ["*"]);
        let policy = NetworkPolicy::Custom(denied);
        let narrower = PolicyEdit { allow: targets(&["192.0.2.7"]), deny: Vec::new() };
        assert!(apply(&policy, &narrower).unwrap_err().message.contains("192.0.2.0/24"));
        let allowed = custom(edit(&policy, &["192.0.2.0/24"], &[]));
        assert!(allowed.deny_cidrs.is_empty() && allowed.allow_cidrs.len() == 1);
        // Denying again takes the allowed part along.
        let again = custom(edit(&NetworkPolicy::Custom(allowed), &[], &["192.0.0.0/16"]));
        assert!(again.allow_cidrs.is_empty() && again.deny_cidrs.len() == 1);
    }

    #[test]
    fn a_denied_host_goes_or_is_answered() {
        let listed = custom(edit(&NetworkPolicy::DenyAll, &["x.test", "y.test"], &[]));
        let less = custom(edit(&NetworkPolicy::Custom(listed), &[], &["x.test"]));
        assert_eq!(hosts(&less), ["y.test"]);
        let wide = custom(edit(&NetworkPolicy::DenyAll, &["*.test"], &[]));
        let wide = custom(edit(&NetworkPolicy::Custom(wide), &[], &["x.test"]));
        assert_eq!(hosts(&wide), ["*.test", "x.test"]);
        assert!(is_refusal(&wide.domains[1]));
        let policy = NetworkPolicy::Custom(wide);
        assert_eq!(edit(&policy, &[], &["x.test"]), None, "it is so already");
        let back = custom(edit(&policy, &["x.test"], &[]));
        assert!(back.domains[1].rules.is_empty());
        assert_eq!(edit(&NetworkPolicy::DenyAll, &[], &["x.test"]), None);
    }

    #[test]
    fn wildcards_cover_what_they_should() {
        for (pattern, name, covered) in [
            ("*", "a.b", true),
            ("*.b", "a.b", true),
            ("*.b", "x.a.b", true),
            ("*.b", "b", false),
            ("*.b", "xb", false),
            ("www.*.com", "www.a.com", true),
            ("www.*.com", "www.a.b.com", false),
            ("a.b", "a.b", false),
        ] {
            assert_eq!(matches(pattern, name), covered, "{pattern} {name}");
        }
    }

    #[test]
    fn ranges_cover_ranges() {
        let range = |text: &str| Cidr::parse(text).unwrap();
        for (outer, inner, covered) in [
            ("0.0.0.0/0", "10.0.0.0/8", true),
            ("10.0.0.0/8", "10.1.2.3", true),
            ("10.1.2.3", "10.0.0.0/8", false),
            ("10.0.0.0/8", "11.0.0.0/8", false),
            ("::/0", "10.0.0.0/8", false),
            ("::/0", "2001:db8::/32", true),
        ] {
            assert_eq!(covers(&range(outer), &range(inner)), covered, "{outer} {inner}");
        }
    }
}
