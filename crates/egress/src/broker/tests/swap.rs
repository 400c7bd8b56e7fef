//! A policy is replaced: what goes on, what is cut, what never begins. Cases 121 to 125.

use super::*;
use crate::flows::{Ongoing, Socket};

/// An open flow, and both its ends.
async fn open(
    world: &World,
    asked: &str,
    bytes: &[u8],
    at: &TcpListener,
) -> (TcpStream, TcpStream) {
    let mut guest = world.ask(asked).await;
    guest.write_all(bytes).await.unwrap();
    let (mut origin, _) = at.accept().await.unwrap();
    let mut got = vec![0; bytes.len()];
    origin.read_exact(&mut got).await.unwrap();
    (guest, origin)
}

async fn alive((guest, origin): &mut (TcpStream, TcpStream)) {
    guest.write_all(b"?").await.unwrap();
    assert_eq!(origin.read_u8().await.unwrap(), b'?');
    origin.write_all(b"!").await.unwrap();
    assert_eq!(guest.read_u8().await.unwrap(), b'!');
}

#[test]
fn case_121_what_a_policy_forbids_is_gone_when_it_is_answered() {
    run(async {
        let world = World::new(&allow_all()).await;
        let raw = world.listen("203.0.113.10:22").await;
        let mut flow = open(&world, "203.0.113.10:22", b"x", &raw).await;
        assert_eq!(world.steered.now.get(), (true, true, true));
        assert_eq!(world.cuts(&deny_all()).await, 1);
        // Already, not soon.
        assert!(world.broker.flows.is_empty());
        assert_eq!(world.steered.now.get(), (false, false, false));
        assert_reset(&mut flow.0).await;
        assert_reset(&mut flow.1).await;
        let end = world.line(1).await;
        assert_eq!((end.verdict, end.reason), (Verdict::Cut, Reason::PolicyChanged));
        // A connection that was in the queue.
        world.refuses("203.0.113.10:22", b"", Reason::DenyAll).await;
        assert_eq!(world.cuts(&allow_all()).await, 0);
        let mut flow = open(&world, "203.0.113.10:22", b"x", &raw).await;
        alive(&mut flow).await;
    });
}

#[test]
fn case_122_what_is_handled_as_before_goes_on() {
    run(async {
        let world = World::new(&json!({ "allow": ["ok.test", "other.test"] })).await;
        let (ok, other) =
            (world.listen("203.0.113.10:443").await, world.listen("203.0.113.11:443").await);
        let mut first = open(&world, "203.0.113.66:443", &hello("ok.test", true), &ok).await;
        let mut second = open(&world, "203.0.113.66:443", &hello("other.test", true), &other).await;
        assert_eq!(world.cuts(&json!({ "allow": ["ok.test", "new.test"] })).await, 1);
        assert_reset(&mut second.0).await;
        alive(&mut first).await;
        // Another entry for the same name, and no entry at all: it goes where it goes.
        assert_eq!(world.cuts(&json!({ "allow": ["*.test", "ok.test"] })).await, 0);
        assert_eq!(world.cuts(&allow_all()).await, 0);
        alive(&mut first).await;
        // Now a rule has to see it.
        let rules = json!({ "allow": { "ok.test": [{ "response": { "statusCode": 418 } }] } });
        assert_eq!(world.cuts(&rules).await, 1);
        assert_reset(&mut first.0).await;
        // The range that it was dialled in is denied.
        world.set(&json!({ "allow": ["ok.test"] })).await;
        let mut third = open(&world, "203.0.113.66:443", &hello("ok.test", true), &ok).await;
        let denied = json!({ "allow": ["ok.test"], "subnets": { "deny": ["203.0.113.10/32"] } });
        assert_eq!(world.cuts(&denied).await, 1);
        assert_reset(&mut third.0).await;
    });
}

#[test]
fn case_123_no_flow_begins_by_an_older_policy() {
    run(async {
        let world = World::new(&json!({ "allow": ["ok.test"] })).await;
        let origin = world.listen("203.0.113.10:443").await;
        let arrived = Rc::new(RefCell::new(Vec::new()));
        let seen = Rc::clone(&arrived);
        let broker = Rc::clone(&world.broker);
        spawn_local(async move {
            while let Ok((stream, _)) = origin.accept().await {
                let listed = broker.works.force.current().policy.mode() == Mode::Custom;
                seen.borrow_mut().push((stream, listed));
            }
        });
        let bytes = hello("ok.test", true);
        for round in 0..60 {
            let mut guests = Vec::new();
            for n in 0..8 {
                let mut guest = world.ask("203.0.113.66:443").await;
                guest.write_all(&bytes).await.unwrap();
                for _ in 0..(round + n) % 7 {
                    tokio::task::yield_now().await;
                }
                guests.push(guest);
            }
            // They are at all stages: accepted, judged, resolved, dialled, carried.
            world.set(&deny_all()).await;
            let left = world.broker.flows.len();
            world.lines.0.borrow_mut().clear();
            // Whatever lives now was not decided, and is refused when it is.
            for guest in &mut guests {
                drain(guest).await;
            }
            until(|| world.broker.flows.is_empty().then_some(())).await;
            assert!(
                world.lines().iter().all(|l| l.verdict == Verdict::Deny),
                "of {left} that lived one was let through: {:?}",
                world.lines()
            );
            world.set(&json!({ "allow": ["ok.test"] })).await;
        }
        assert!(!arrived.borrow().is_empty(), "the test let something through in between");
    });
}

#[test]
fn case_123_a_range_that_is_denied_during_the_dial_is_not_reached() {
    run(async {
        let world = World::new(&json!({ "allow": ["ok.test"] })).await;
        let origin = world.listen("203.0.113.10:443").await;
        let go = Rc::new(tokio::sync::Notify::new());
        *world.outside.slow.borrow_mut() = Some(Rc::clone(&go));
        let mut guest = world.ask("203.0.113.66:443").await;
        guest.write_all(&hello("ok.test", true)).await.unwrap();
        until(|| (!world.dialled().is_empty()).then_some(())).await;
        // Nobody knows yet where it will lead, so this cuts nothing.
        let denied = json!({ "allow": ["ok.test"], "subnets": { "deny": ["203.0.113.10/32"] } });
        assert_eq!(world.cuts(&denied).await, 0);
        go.notify_one();
        let (mut stream, _) = origin.accept().await.unwrap();
        assert_eq!(drain(&mut stream).await, b"", "bytes went to a denied address");
        assert_reset(&mut guest).await;
        let line = world.line(0).await;
        assert_eq!((line.verdict, line.reason), (Verdict::Deny, Reason::SubnetDenied), "{line:?}");
    });
}

#[test]
fn case_123_the_generation_is_checked_when_a_decision_is_taken() {
    run(async {
        let world = World::new(&allow_all()).await;
        let flows = &world.broker.flows;
        let flow = flows.register("203.0.113.10:1".parse().unwrap()).unwrap();
        let facts = flow.facts();
        flows.set_generation(9);
        assert!(flow.decide(facts.clone()).is_err());
        assert!(flow.decide(Facts { generation: 9, ..facts }).is_ok());
    });
}

#[test]
fn case_124_a_bad_policy_or_gate_changes_nothing() {
    run(async {
        let world = World::new(&json!({ "allow": ["ok.test"] })).await;
        let origin = world.listen("203.0.113.10:443").await;
        let mut flow = open(&world, "203.0.113.66:443", &hello("ok.test", true), &origin).await;
        let mut bad = policy(&json!({ "allow": { "ok.test": [{
            "match": { "path": { "regex": "a" } },
            "response": { "statusCode": 418 },
        }] } }));
        if let NetworkPolicy::Custom(custom) = &mut bad {
            let rule = &mut custom.domains[0].rules[0];
            let regex = bivouac_types::policy::TextMatch::Regex("(".to_owned());
            rule.matcher.as_mut().unwrap().path = Some(regex);
        }
        let set = PolicySet { generation: 50, policy: bad, values: BTreeMap::new() };
        let reply = world.broker.deliver(ToBroker::Policy(set)).await;
        let Reply::Refused { field: Some(field), .. } = reply else { panic!("{reply:?}") };
        assert!(field.contains("ok.test"), "{field}");
        world.steered.broken.set(true);
        assert!(matches!(world.set(&deny_all()).await, Reply::Refused { field: None, .. }));
        world.steered.broken.set(false);
        alive(&mut flow).await;
        assert_eq!(world.broker.flows.generation(), 1);
        // Nor does one that is not newer.
        let set =
            PolicySet { generation: 1, policy: NetworkPolicy::DenyAll, values: BTreeMap::new() };
        assert_eq!(world.broker.deliver(ToBroker::Policy(set)).await, Reply::Done { cut: 0 });
        alive(&mut flow).await;
    });
}

#[test]
fn case_125_a_broker_that_goes_takes_no_more() {
    run(async {
        let world = World::new(&allow_all()).await;
        let loops: Vec<_> =
            world.broker.loops.borrow().iter().map(JoinHandle::abort_handle).collect();
        assert!(!loops.is_empty());
        drop(world);
        until(|| loops.iter().all(tokio::task::AbortHandle::is_finished).then_some(())).await;
    });
}

#[test]
fn a_rule_that_ends_cuts_its_requests() {
    run(async {
        let rules = json!({ "allow": { "api.test": [{ "response": { "statusCode": 418 } }] } });
        let world = World::new(&rules).await;
        let current = world.broker.works.force.current();
        let name = crate::dns::fake::name("api.test");
        let crate::policy::Named::Intercept(site) = current.policy.named(&name, 443) else {
            panic!("not intercepted")
        };
        let (near, far) =
            tokio::join!(TcpStream::connect(world.door.local_addr().unwrap()), world.door.accept());
        let flow = world.broker.flows.register("203.0.113.12:443".parse().unwrap()).unwrap();
        flow.decide(Facts {
            name: Some(name.clone()),
            handling: crate::flows::Handling::Intercept,
            ..flow.facts()
        })
        .unwrap();
        let ongoing = Ongoing {
            site,
            name,
            port: 443,
            rule: Some(0),
            expires_at: Some(now_ms() + 150),
            dialled: None,
        };
        let request = flow.begin(current.generation, ongoing).unwrap();
        let socket = Socket::new(far.unwrap().0, flow.clone());
        assert_eq!(flow.cut().await, Reason::CredentialExpired);
        drop((request, socket, flow));
        assert_reset(&mut near.unwrap()).await;
    });
}

#[test]
fn explain_and_values_are_answered() {
    run(async {
        let world = World::new(&json!({ "allow": ["ok.test"] })).await;
        let ask = |url: &str| ToBroker::Explain { url: url.to_owned(), method: "GET".to_owned() };
        let Reply::Explained(yes) = world.broker.deliver(ask("https://ok.test/")).await else {
            panic!("not explained")
        };
        assert!(yes.allowed);
        let wrong = world.broker.deliver(ask("gopher://ok.test/")).await;
        assert!(matches!(wrong, Reply::Refused { .. }));
        let values = ToBroker::Values { values: BTreeMap::new() };
        assert_eq!(world.broker.deliver(values).await, Reply::Done { cut: 0 });
    });
}

#[test]
fn a_thousand_flows_are_cut_by_one_swap() {
    run(async {
        let world = World::new(&allow_all()).await;
        let server = world.listen("203.0.113.10:9").await;
        let mut flows = Vec::new();
        for _ in 0..1000 {
            flows.push((world.ask("203.0.113.10:9").await, server.accept().await.unwrap().0));
        }
        until(|| (world.lines().len() == 1000).then_some(())).await;
        let began = std::time::Instant::now();
        assert_eq!(world.cuts(&deny_all()).await, 1000);
        let took = began.elapsed();
        assert!(world.broker.flows.is_empty());
        for (guest, origin) in &mut flows {
            assert_reset(guest).await;
            assert_reset(origin).await;
        }
        figure(&format!("a swap that cuts 1,000 flows: {took:?}"));
    });
}
