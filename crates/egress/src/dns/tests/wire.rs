//! Any bytes whatever, and the bounds of the cache.

use std::net::IpAddr;
use std::time::Duration;

use hickory_proto::op::{Message, ResponseCode};
use proptest::prelude::*;
use tokio::time::Instant;

use super::super::Family;
use super::super::cache::{Cache, Known, Outcome};
use super::super::fake::{alias, answer, ip, name, record};
use super::super::limit::Bucket;
use super::super::wire::{self, Heard, Rcode, Reply, Told};

const GOOD: &str = "203.0.113.10";

/// A message and what to do to it: bytes to overwrite, and where it ends.
fn damaged() -> impl Strategy<Value = (Vec<(prop::sample::Index, u8)>, prop::sample::Index)> {
    (
        prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        any::<prop::sample::Index>(),
    )
}

fn damage(
    mut bytes: Vec<u8>,
    (writes, end): &(Vec<(prop::sample::Index, u8)>, prop::sample::Index),
) -> Vec<u8> {
    for (at, byte) in writes {
        let at = at.index(bytes.len());
        bytes[at] = *byte;
    }
    bytes.truncate(end.index(bytes.len()) + 1);
    bytes
}

fn a_query() -> Vec<u8> {
    wire::ask(7, "a.Long.name.ok.TEST", Family::V6, true)
}

/// An answer with an alias, an address of the chain and one of somebody else.
fn an_answer() -> Vec<u8> {
    let query = Message::from_vec(&wire::ask(7, "ok.test", Family::V4, true)).unwrap();
    let records = vec![
        record("ok.test", 30, alias("cdn.test")),
        record("cdn.test", 30, ip(GOOD)),
        record("evil.test", 30, ip("203.0.113.66")),
    ];
    answer(&query, ResponseCode::NoError, records).to_vec().unwrap()
}

#[test]
fn a_question_of_ours_is_heard_as_what_it_is() {
    let Heard::Question(question) = wire::hear(&a_query()) else { panic!("not heard") };
    assert_eq!(question.id, 7);
    assert_eq!(question.dotted.as_deref(), Some(b"a.Long.name.ok.TEST".as_slice()));
    assert_eq!(question.family(), Some(Family::V6));
    assert_eq!(question.datagram_limit(), wire::DATAGRAM);
}

#[test]
fn the_undamaged_answer_is_taken() {
    let found = Reply::Found { addresses: vec![GOOD.parse().unwrap()], ttl: 30 };
    assert_eq!(wire::reply(&an_answer(), 7, "ok.test", Family::V4, true), Ok(found));
}

proptest! {
    #[test]
    fn any_bytes_of_a_guest_get_a_bounded_answer(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        bounded(&bytes);
    }

    #[test]
    fn any_damaged_query_gets_a_bounded_answer(how in damaged()) {
        bounded(&damage(a_query(), &how));
    }

    #[test]
    fn any_bytes_of_a_server_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let _ = wire::reply(&bytes, 7, "ok.test", Family::V4, true);
    }

    #[test]
    fn any_damaged_answer_is_survived(how in damaged()) {
        let _ = wire::reply(&damage(an_answer(), &how), 7, "ok.test", Family::V4, true);
    }

    /// Any set of records, over five names: what is taken is what a walk over a map finds, that is
    /// addresses of the asked name or of where its aliases lead, and of no other name.
    #[test]
    fn only_addresses_of_the_chain_are_taken(
        records in prop::collection::vec((0..5usize, prop::option::of(0..5usize), 1..200u8), 0..12)
    ) {
        const NAMES: [&str; 5] = ["ok.test", "b.test", "c.test", "d.test", "e.test"];
        let query = Message::from_vec(&wire::ask(7, "ok.test", Family::V4, true)).unwrap();
        let sent = records.iter().map(|(owner, alias_of, host)| {
            let data = match alias_of {
                Some(to) => alias(NAMES[*to]),
                None => ip(&format!("203.0.113.{host}")),
            };
            record(NAMES[*owner], 30, data)
        });
        let bytes = answer(&query, ResponseCode::NoError, sent.collect()).to_vec().unwrap();

        let mut at = 0;
        let mut expected = std::collections::BTreeSet::new();
        for _ in 0..NAMES.len() {
            expected.extend(records.iter().filter(|r| r.0 == at && r.1.is_none()).map(|r| r.2));
            let next = records.iter().find(|r| r.0 == at && r.1.is_some()).and_then(|r| r.1);
            match next {
                Some(next) if expected.is_empty() => at = next,
                _ => break,
            }
        }
        let taken: std::collections::BTreeSet<u8> =
            match wire::reply(&bytes, 7, "ok.test", Family::V4, true).unwrap() {
                Reply::Found { addresses, .. } => addresses.iter().map(|ip| match ip {
                    IpAddr::V4(v4) => v4.octets()[3],
                    IpAddr::V6(_) => 0,
                }).collect(),
                _ => Default::default(),
            };
        prop_assert_eq!(taken, expected);
    }

    #[test]
    fn a_bucket_gives_no_more_than_it_holds(
        per_second in 1u32..50, burst in 1u32..50, gaps in prop::collection::vec(0u64..2000, 1..100),
    ) {
        let start = Instant::now();
        let bucket = Bucket::new(per_second, burst);
        let mut passed = 0;
        let mut given = 0u64;
        for gap in gaps {
            passed += gap;
            given += u64::from(bucket.take(start + Duration::from_millis(passed)));
            // One more for rounding.
            prop_assert!(given <= u64::from(burst) + u64::from(per_second) * passed / 1000 + 1);
        }
    }
}

/// What is said to these bytes is never longer than their sender takes, and readable.
fn bounded(bytes: &[u8]) {
    match wire::hear(bytes) {
        Heard::Noise => {}
        Heard::Unserved(answer) => {
            assert!(answer.len() <= wire::DATAGRAM);
            assert_eq!(answer[..2], bytes[..2], "the id goes back");
        }
        Heard::Question(question) => {
            let addresses: Vec<IpAddr> = vec!["2001:db8::1".parse().unwrap(); 30];
            let told = Told {
                rcode: Rcode::NoError,
                addresses: &addresses,
                ttl: 5,
                why: Some((15, "x".repeat(1000))),
            };
            let limit = question.datagram_limit();
            let answer = question.answer(&told, limit);
            assert!(answer.len() <= limit, "{} > {limit}", answer.len());
            assert!(Message::from_vec(&answer).is_ok());
        }
    }
}

#[test]
fn the_cache_is_bounded_and_forgets() {
    let now = Instant::now();
    let mut cache = Cache::new();
    let found = || Outcome::Found([GOOD.parse().unwrap()].into());
    for n in 0..2000 {
        let name = name(&format!("n{n}.test"));
        cache.put((name.clone(), Family::V4), Known::new(found(), 30, now));
        cache.pin(&name, &[GOOD.parse().unwrap()], now);
    }
    let key = |n: u32| (name(&format!("n{n}.test")), Family::V4);
    let kept = (0..2000).filter(|n| cache.get(&key(*n), now).is_some()).count();
    assert_eq!(kept, 512);
    assert!(cache.get(&key(1999), now).is_some(), "the newest stay");
    let pinned = (0..2000).filter(|n| !cache.pinned(&key(*n).0, now).is_empty()).count();
    assert_eq!(pinned, 512);
    let later = |seconds| now + Duration::from_secs(seconds);
    assert!(cache.get(&key(1999), later(29)).is_some());
    assert!(cache.get(&key(1999), later(30)).is_none());
    assert!(!cache.pinned(&key(1999).0, later(599)).is_empty(), "ten minutes");
    assert!(cache.pinned(&key(1999).0, later(600)).is_empty());
}

#[test]
fn lives_are_clamped() {
    let now = Instant::now();
    let life = |outcome: Outcome, ttl| Known::new(outcome, ttl, now).until - now;
    let found = || Outcome::Found([GOOD.parse().unwrap()].into());
    let none = || Outcome::None { exists: false };
    let failed = || Outcome::Failed("x".into());
    for (ttl, of_found, of_none) in [(0, 5, 1), (7, 7, 7), (90, 60, 10), (u32::MAX, 60, 10)] {
        assert_eq!(life(found(), ttl), Duration::from_secs(of_found));
        assert_eq!(life(none(), ttl), Duration::from_secs(of_none));
        assert_eq!(life(failed(), ttl), Duration::from_secs(1));
    }
}

#[test]
fn a_pin_keeps_what_was_told_before_behind_what_is_told_now() {
    let now = Instant::now();
    let mut cache = Cache::new();
    let name = name("ok.test");
    let ips = |list: &[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
    cache.pin(&name, &ips(&["203.0.113.1", "203.0.113.2"]), now);
    cache.pin(&name, &ips(&["203.0.113.2", "203.0.113.3"]), now);
    assert_eq!(cache.pinned(&name, now), ips(&["203.0.113.2", "203.0.113.3", "203.0.113.1"]));
    for n in 0..100 {
        cache.pin(&name, &ips(&[&format!("198.51.100.{n}")]), now);
    }
    assert_eq!(cache.pinned(&name, now).len(), 16);
}
