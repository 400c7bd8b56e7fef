//! The judge and the sweep agree: a property test over policies, flows and changes of policy.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::broker::judge::{Early, Late, by_address, by_first, keeps};
use crate::canonical::Name;
use crate::classify::{First, Hello};
use crate::flows::Handling;

/// Names of the test, and where each leads.
const NAMES: [(&str, &str); 3] =
    [("ok.test", "203.0.113.10"), ("a.ok.test", "203.0.113.20"), ("other.test", "198.51.100.1")];

fn address(name: &Name) -> IpAddr {
    let found = NAMES.iter().find(|(n, _)| *n == name.as_str());
    found.map(|(_, ip)| ip.parse().unwrap()).unwrap()
}

fn policies() -> impl Strategy<Value = Json> {
    let entry = prop::sample::select(vec!["ok.test", "*.ok.test", "a.ok.test", "other.test", "*"]);
    let rules = prop::sample::select(vec![0, 0, 1, 2]);
    let range = || {
        let ranges = vec!["203.0.113.0/24", "203.0.113.10/32", "198.51.100.0/24", "0.0.0.0/0"];
        prop::collection::vec(prop::sample::select(ranges), 0..2)
    };
    let custom = (prop::collection::btree_map(entry, rules, 0..4), range(), range(), any::<bool>());
    let custom = custom.prop_map(|(names, allow, deny, plain)| {
        let names: serde_json::Map<_, _> = names
            .into_iter()
            .map(|(name, rule)| {
                let rules = match rule {
                    0 => json!([]),
                    n => json!([{ "response": { "statusCode": 400 + n } }]),
                };
                (name.to_owned(), rules)
            })
            .collect();
        let subnets = json!({ "allow": dedup(allow), "deny": dedup(deny) });
        json!({ "allow": names, "subnets": subnets, "plainHttp": plain })
    });
    prop_oneof![1 => Just(allow_all()), 1 => Just(deny_all()), 8 => custom]
}

fn dedup(mut list: Vec<&'static str>) -> Vec<&'static str> {
    list.sort_unstable();
    list.dedup();
    list
}

fn firsts() -> impl Strategy<Value = First> {
    let hello = |name: Option<&str>| {
        First::Tls(Hello { name: name.map(str::to_owned), encrypted: false, tls13: true })
    };
    let mut all: Vec<_> = NAMES.iter().map(|(name, _)| hello(Some(name))).collect();
    all.extend([hello(None), First::Http, First::Unknown, First::Odd("odd")]);
    prop::sample::select(all)
}

fn asked() -> impl Strategy<Value = SocketAddr> {
    prop::sample::select(vec![
        "203.0.113.10:443".parse().unwrap(),
        "203.0.113.66:443".parse().unwrap(),
        "198.51.100.1:80".parse().unwrap(),
        "192.0.2.9:8443".parse().unwrap(),
        "203.0.113.66:53".parse().unwrap(),
    ])
}

/// Facts of a connection under a policy, as the broker would write them; none when it is refused.
fn judged(policy: &Compiled, asked: SocketAddr, first: &First) -> Option<Facts> {
    let facts = |name: Option<Name>, handling, entry: Option<Arc<str>>| {
        let dialled = match (&name, handling) {
            (_, Handling::Dns | Handling::Intercept | Handling::PlainHttp) => None,
            (Some(name), _) => Some(SocketAddr::new(address(name), asked.port())),
            (None, _) => Some(asked),
        };
        let denied = |to: SocketAddr| {
            policy.mode() == Mode::Custom
                && matches!(policy.address(to.ip()), crate::policy::Address::Denied { .. })
        };
        // What the dialer refuses never lives.
        (!dialled.is_some_and(denied)).then_some(Facts {
            asked,
            name,
            handling,
            entry,
            dialled,
            generation: 1,
        })
    };
    match by_address(policy, &Fence::default(), &[], asked) {
        Early::Deny(_) => None,
        Early::Dns => facts(None, Handling::Dns, None),
        Early::Direct { handling, entry, .. } => facts(None, handling, entry),
        Early::Look => match by_first(policy, asked.port(), Some(first)) {
            Late::Deny(_) => None,
            Late::Raw(entry) => facts(None, Handling::Raw, Some(entry)),
            Late::PlainHttp => facts(None, Handling::PlainHttp, None),
            Late::Pass { name, entry, .. } => facts(Some(name), Handling::Pass, Some(entry)),
            Late::Intercept { name, site } => {
                facts(Some(name), Handling::Intercept, Some(Arc::clone(&site.entry)))
            }
        },
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_goes_on_is_what_would_begin(
        before in policies(), after in policies(), asked in asked(), first in firsts(),
    ) {
        let (old, new) = (
            Compiled::new(&policy(&before)).unwrap(),
            Compiled::new(&policy(&after)).unwrap(),
        );
        let Some(facts) = judged(&old, asked, &first) else { return Ok(()) };
        let kept = keeps(&new, &Fence::default(), &[], &facts, &[]);
        let now = judged(&new, asked, &first);
        match &now {
            // Forbidden: cut. But for what was never looked at, the judge of now knows more.
            None => prop_assert!(!kept, "forbidden and kept: {facts:?}"),
            Some(now) if now.handling == Handling::PlainHttp => prop_assert!(!kept),
            // The same: kept, unless a flow was open to everything, since nobody knows what it carries.
            Some(now) if now.handling == facts.handling && now.dialled == facts.dialled => {
                prop_assert!(kept, "as before and cut: {facts:?} {now:?}");
            }
            // Now rules see it, or no longer do: cut.
            Some(now) if (now.handling == Handling::Intercept) != (facts.handling == Handling::Intercept) => {
                prop_assert!(!kept, "handled otherwise and kept: {facts:?} {now:?}");
            }
            Some(_) => {}
        }
    }
}
