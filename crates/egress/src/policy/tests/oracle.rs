//! The rules of policies a second time, naively and over the JSON that a client sends: nothing of the
//! compiler is used but its answers.

use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::super::*;
use super::{compile, name, parse, verdict};
use crate::canonical::Host;

/// Whether a pattern covers a name: label by label from the left.
fn covers(pattern: &[&str], name: &[&str], first: bool) -> bool {
    match pattern {
        [] => name.is_empty(),
        ["*", rest @ ..] if first => (1..=name.len()).any(|n| covers(rest, &name[n..], false)),
        ["*", rest @ ..] => !name.is_empty() && covers(rest, &name[1..], false),
        [label, rest @ ..] => name.first() == Some(label) && covers(rest, &name[1..], false),
    }
}

/// The entry that decides, by looking at all of them; a smaller key decides.
fn decides<'a>(entries: &'a [String], name: &str, port: u16) -> Option<&'a str> {
    let name: Vec<&str> = name.split('.').collect();
    let mut found = Vec::new();
    for entry in entries {
        let (pattern, only) = match entry.split_once(':') {
            Some((pattern, only)) => (pattern, Some(only.to_owned())),
            None => (entry.as_str(), None),
        };
        let labels: Vec<&str> = pattern.split('.').collect();
        if covers(&labels, &name, true) && only.as_ref().is_none_or(|o| *o == port.to_string()) {
            let stars = pattern.matches('*').count();
            let literals = labels.len() - stars;
            let order =
                (stars > 0, 1_000 - literals, stars, labels[0] == "*", pattern, only.is_none());
            found.push((order, entry));
        }
    }
    found.sort();
    found.first().map(|(_, entry)| entry.as_str())
}

fn host_text() -> impl Strategy<Value = String> {
    proptest::collection::vec("[abc]", 1..5).prop_map(|labels| labels.join("."))
}

fn entries() -> impl Strategy<Value = Vec<String>> {
    let label = prop_oneof!["[abc]", "[abc]", Just("*".to_owned())];
    let pattern = proptest::collection::vec(label, 1..5).prop_map(|labels| labels.join("."));
    let port = prop_oneof![Just(""), Just(""), Just(":443"), Just(":22")];
    let entry = (pattern, port).prop_map(|(pattern, port)| format!("{pattern}{port}"));
    proptest::collection::btree_set(entry, 0..12).prop_map(|set| set.into_iter().collect())
}

fn cidr() -> impl Strategy<Value = String> {
    let v4 = (0u32..4, 24u32..=32).prop_map(|(low, bits)| {
        let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
        format!("{}/{bits}", Ipv4Addr::from((0xc000_0200 | low << 6) & mask))
    });
    let v6 = (0u128..4, 118u32..=128).prop_map(|(low, bits)| {
        let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
        format!("{}/{bits}", Ipv6Addr::from(((0x2001_0db8 << 96) | low << 6) & mask))
    });
    prop_oneof![v4, v6]
}

/// Whether a range holds an address, by comparing bits as text.
fn holds(cidr: &str, ip: IpAddr) -> bool {
    let (network, bits) = cidr.split_once('/').unwrap();
    let text = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => format!("4{:032b}", v4.to_bits()),
        IpAddr::V6(v6) => format!("6{:0128b}", v6.to_bits()),
    };
    let bits: usize = bits.parse().unwrap();
    text(ip).starts_with(&text(network.parse().unwrap())[..=bits])
}

fn address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        (0u32..=255).prop_map(|low| Ipv4Addr::from(0xc000_0200 | low).into()),
        (0u128..=1023).prop_map(|low| Ipv6Addr::from((0x2001_0db8 << 96) | low).into()),
    ]
}

/// Tests of texts, with a plain meaning each.
fn text_match() -> impl Strategy<Value = Value> {
    prop_oneof![
        "[ab]{0,2}".prop_map(|t| json!({"exact": t})),
        "[ab]{0,2}".prop_map(|t| json!({"startsWith": t})),
        "[ab]{1,2}".prop_map(|t| json!({"regex": t})),
        "[ab]{1,2}".prop_map(|t| json!({"regex": format!("{t}$")})),
    ]
}

fn fits(test: Option<&Value>, text: &str) -> bool {
    let Some(test) = test else { return true };
    let (how, want) = test.as_object().unwrap().iter().next().unwrap();
    let want = want.as_str().unwrap();
    match (how.as_str(), want.strip_suffix('$')) {
        ("exact", _) => text == want,
        ("startsWith", _) => text.starts_with(want),
        (_, Some(end)) => text.ends_with(end),
        (_, None) => text.contains(want),
    }
}

fn entry_match() -> impl Strategy<Value = Value> {
    let half = || proptest::option::of(text_match());
    (text_match(), half(), any::<bool>()).prop_map(|(one, two, turn)| {
        let mut entry = Map::new();
        let (first, second) = if turn { ("key", "value") } else { ("value", "key") };
        entry.insert(first.to_owned(), one);
        if let Some(two) = two {
            entry.insert(second.to_owned(), two);
        }
        Value::Object(entry)
    })
}

fn matcher() -> impl Strategy<Value = Value> {
    let list = || proptest::collection::vec(entry_match(), 0..3);
    let methods = proptest::collection::vec(prop_oneof![Just("GET"), Just("PUT")], 0..3);
    (proptest::option::of(text_match()), methods, list(), list()).prop_map(
        |(path, methods, query, headers)| {
            let mut out = Map::new();
            if let Some(path) = path {
                out.insert("path".to_owned(), path);
            }
            for (name, list) in [
                ("method", json!(methods)),
                ("queryString", json!(query)),
                ("headers", json!(headers)),
            ] {
                if list.as_array().is_some_and(|l| !l.is_empty()) {
                    out.insert(name.to_owned(), list);
                }
            }
            Value::Object(out)
        },
    )
}

type Pairs = Vec<(String, String)>;

fn pairs() -> impl Strategy<Value = Pairs> {
    proptest::collection::vec(("[ab]{1,2}", "[ab]{0,2}"), 0..4)
}

fn rule_fits(rule: &Value, method: &str, path: &str, query: &Pairs, headers: &Pairs) -> bool {
    let matcher = &rule["match"];
    let list = |name: &str| matcher[name].as_array().cloned().unwrap_or_default();
    let all = |name: &str, pairs: &Pairs| {
        list(name)
            .iter()
            .all(|e| pairs.iter().any(|(k, v)| fits(e.get("key"), k) && fits(e.get("value"), v)))
    };
    let methods = list("method");
    (methods.is_empty() || methods.contains(&json!(method)))
        && fits(matcher.get("path"), path)
        && all("queryString", query)
        && all("headers", headers)
}

proptest! {
    #[test]
    fn names_are_decided_as_the_naive_way_says(entries in entries(), host in host_text(), port in prop_oneof![Just(443u16), Just(22), Just(80)]) {
        let compiled = compile(&json!({"allow": entries}));
        let want = match decides(&entries, &host, port) {
            Some(entry) => entry.to_owned(),
            None if entries.is_empty() => "no: deny_all".to_owned(),
            None => "no: domain_not_listed".to_owned(),
        };
        prop_assert_eq!(verdict(&compiled, &host, port), want);
        // What may be reached on some port may be resolved, and nothing else.
        let resolves = [443, 22, 80].iter().any(|p| decides(&entries, &host, *p).is_some());
        prop_assert_eq!(compiled.resolves(&name(&host)).allowed, resolves);
        prop_assert_eq!(compiled.dns_on(), !entries.is_empty());
    }

    #[test]
    fn ranges_are_decided_as_the_naive_way_says(
        allow in proptest::collection::vec(cidr(), 0..8), deny in proptest::collection::vec(cidr(), 0..8), ip in address(),
    ) {
        let compiled = compile(&json!({"allow": ["a.com"], "subnets": {"allow": allow, "deny": deny}}));
        let mapped = match ip {
            IpAddr::V4(v4) => IpAddr::V6(v4.to_ipv6_mapped()),
            IpAddr::V6(_) => ip,
        };
        for form in [ip, mapped] {
            let got = match compiled.address(form) {
                Address::Denied { entry } => { prop_assert!(holds(&entry, ip)); "denied" }
                Address::Allowed { entry } => { prop_assert!(holds(&entry, ip)); "allowed" }
                Address::Unlisted => "unlisted",
            };
            let want = if deny.iter().any(|c| holds(c, ip)) { "denied" }
                else if allow.iter().any(|c| holds(c, ip)) { "allowed" }
                else { "unlisted" };
            prop_assert_eq!(got, want);
        }
    }

    #[test]
    fn the_order_of_lists_never_matters(
        entries in entries(), hosts in proptest::collection::vec(host_text(), 1..6), ranges in proptest::collection::vec(cidr(), 0..8),
        ips in proptest::collection::vec(address(), 1..6), turn in any::<usize>(), split in 0usize..8,
    ) {
        let shuffled = |list: &[String]| {
            let mut list: Vec<String> = list.iter().rev().cloned().collect();
            let middle = turn % list.len().max(1);
            list.rotate_left(middle);
            list
        };
        let split = split.min(ranges.len());
        let policy = |entries: &[String], allow: &[String], deny: &[String]|
            compile(&json!({"allow": entries, "subnets": {"allow": allow, "deny": deny}}));
        let one = policy(&entries, &ranges[..split], &ranges[split..]);
        let two = policy(&shuffled(&entries), &shuffled(&ranges[..split]), &shuffled(&ranges[split..]));
        for host in hosts {
            for port in [22, 80, 443] {
                prop_assert_eq!(verdict(&one, &host, port), verdict(&two, &host, port));
            }
        }
        for ip in ips {
            prop_assert_eq!(one.address(ip), two.address(ip));
        }
    }

    #[test]
    fn a_denied_range_beats_whatever_is_allowed(
        allow in proptest::collection::vec(cidr(), 0..8), ip in address(), bits in 0u32..=128, all: bool,
    ) {
        // A range around the address.
        let deny = match ip {
            IpAddr::V4(v4) => {
                let bits = bits / 4;
                let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
                format!("{}/{bits}", Ipv4Addr::from(v4.to_bits() & mask))
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
                format!("{}/{bits}", Ipv6Addr::from(v6.to_bits() & mask))
            }
        };
        let mut allow = allow;
        allow.extend([if all { "0.0.0.0/0" } else { "::/0" }.to_owned(), deny.clone(), ip.to_string()]);
        let compiled = compile(&json!({"allow": ["*"], "subnets": {"allow": allow, "deny": [deny]}}));
        prop_assert_eq!(compiled.address(ip), Address::Denied { entry: deny.into() });
    }

    #[test]
    fn the_rule_that_acts_is_the_first_that_the_naive_way_finds(
        matchers in proptest::collection::vec(matcher(), 1..4), method in prop_oneof![Just("GET"), Just("PUT")],
        path in "[ab]{0,3}", query in pairs(), headers in pairs(),
    ) {
        let rules: Vec<Value> =
            matchers.iter().map(|m| json!({"match": m, "response": {"statusCode": 403}})).collect();
        let compiled = compile(&json!({"allow": {"a.com": rules}}));
        let Named::Intercept(site) = compiled.named(&name("a.com"), 443) else { panic!("no rules") };
        let mut map = http::HeaderMap::new();
        for (key, value) in &headers {
            map.append(key.parse::<http::HeaderName>().unwrap(), value.parse().unwrap());
        }
        let text: Vec<String> = query.iter().map(|(k, v)| format!("{k}={v}")).collect();
        let text = text.join("&");
        let view = RequestView { method, path: &path, query: Some(&text), headers: &map };
        let got = site.first_match(&view, 0).map(|(i, _)| i);
        let want = rules.iter().position(|rule| rule_fits(rule, method, &path, &query, &headers));
        prop_assert_eq!(got, want);
    }

    #[test]
    fn what_is_stored_decides_as_what_was_sent(entries in entries(), ranges in proptest::collection::vec(cidr(), 0..4), host in host_text(), ip in address()) {
        let policy = parse(&json!({"allow": entries, "subnets": {"allow": ranges}, "plainHttp": true}));
        let stored = serde_json::to_string(&policy).unwrap();
        let again: NetworkPolicy = serde_json::from_str(&stored).unwrap();
        prop_assert_eq!(&again, &policy);
        let (one, two) = (Compiled::new(&policy).unwrap(), Compiled::new(&again).unwrap());
        prop_assert_eq!(verdict(&one, &host, 443), verdict(&two, &host, 443));
        prop_assert_eq!(one.address(ip), two.address(ip));
        prop_assert_eq!(one.plain_http(), two.plain_http());
    }

    #[test]
    fn a_hint_allows_what_was_denied_and_only_that(entries in entries(), host in host_text(), other in host_text(), port in prop_oneof![Just(443u16), Just(22)]) {
        let compiled = compile(&json!({"allow": entries}));
        let Some(Hint::Domain(entry)) = compiled.hint(&Host::Name(name(&host)), port) else {
            prop_assert!(decides(&entries, &host, port).is_some());
            return Ok(());
        };
        let mut more = entries.clone();
        more.push(entry);
        let changed = compile(&json!({"allow": more}));
        prop_assert!(!verdict(&changed, &host, port).starts_with("no"));
        if other != host {
            let was_denied = verdict(&compiled, &other, port).starts_with("no");
            prop_assert_eq!(verdict(&changed, &other, port).starts_with("no"), was_denied);
        }
    }

    /// One reader for policies and for the wire (case 22): a name that may stand in a policy is the
    /// name that the wire shows, in every way of writing it.
    #[test]
    fn policies_and_the_wire_read_names_alike(text in "[a-cA-C0-9x_*.-]{1,12}|[a-z0-9]{1,4}\\.(0x[0-9a-f]{0,3}|[0-9]{1,3})\\.?", dot: bool) {
        use bivouac_types::policy::HostPattern;
        let wire = Host::parse(text.as_bytes());
        match HostPattern::parse(&text) {
            Ok(pattern) if pattern.is_wildcard() => prop_assert!(wire.is_err()),
            Ok(pattern) => {
                let Ok(Host::Name(name)) = wire else { return Err(TestCaseError::fail(format!("{text} is {wire:?}"))) };
                prop_assert_eq!(name.as_str(), pattern.as_str());
                let compiled = compile(&json!({"allow": [text]}));
                let turned: String = text.chars().map(|c| if c.is_ascii_lowercase() { c.to_ascii_uppercase() } else { c.to_ascii_lowercase() }).collect();
                let turned = if dot && !turned.ends_with('.') { format!("{turned}.") } else { turned };
                prop_assert_eq!(verdict(&compiled, &turned, 443), pattern.as_str());
            }
            Err(_) => prop_assert!(!matches!(wire, Ok(Host::Name(_))), "{:?}", wire),
        }
    }
}
