//! Policies on their way into force, with a simulated broker.

use std::sync::atomic::{AtomicUsize, Ordering};

use bivouac_egress::message::{Config, Count, FromBroker, Reply, ToBroker};
use bivouac_runtime::sim::Sim;
use bivouac_types::id::ValueId;
use bivouac_types::policy::{Draft, NetworkPolicy};
use bivouac_types::secret::Secret;
use bytes::Bytes;
use serde_json::{Value, json};

use super::*;
use crate::{AuditQuery, ErrorKind, ForkSandbox, PolicyEdit, Target, UpdateSandbox};

fn draft(request: &Value) -> Draft {
    // Not twice in one test process.
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let mut mint = || {
        let n = NEXT.fetch_add(1, Ordering::Relaxed) as u64;
        let mut tail = [0; 10];
        tail[2..].copy_from_slice(&n.to_be_bytes());
        ValueId::new(u64::try_from(START).unwrap(), tail)
    };
    NetworkPolicy::parse("networkPolicy", request, &mut mint).unwrap()
}

fn with_policy(name: &str, request: &Value) -> CreateSandbox {
    CreateSandbox { policy: Some(draft(request)), ..named(name) }
}

fn launched(sim: &Sim, id: &SessionId) -> Config {
    serde_json::from_slice(&sim.egress_sent(id)[0]).unwrap()
}

/// Messages since the launch.
fn told(sim: &Sim, id: &SessionId) -> Vec<ToBroker> {
    sim.egress_sent(id)[1..].iter().map(|m| serde_json::from_slice(m).unwrap()).collect()
}

/// Policies that a broker was told since its launch.
fn policies(sim: &Sim, id: &SessionId) -> Vec<(u64, NetworkPolicy)> {
    let sets = told(sim, id).into_iter().filter_map(|message| match message {
        ToBroker::Policy(set) => Some((set.generation, set.policy)),
        _ => None,
    });
    sets.collect()
}

fn edit(allow: &[&str], deny: &[&str]) -> PolicyEdit {
    let targets = |texts: &[&str]| texts.iter().map(|text| Target::parse(text).unwrap()).collect();
    PolicyEdit { allow: targets(allow), deny: targets(deny) }
}

#[tokio::test]
async fn a_session_is_launched_with_its_policy() {
    let bed = Bed::new().await;
    let view = bed.create("open").await;
    let config = launched(&bed.sim, &view.session.id);
    assert_eq!(config.policy.policy, NetworkPolicy::AllowAll);
    assert_eq!((config.identity.sandbox.as_str(), config.policy.generation), ("open", 1));
    assert_eq!((config.identity.team.as_str(), config.identity.session), ("team", view.session.id));

    let request = json!({"allow": {"a.test": [
        {"transform": [{"headers": {"authorization": "canary7f3a"}}]}]}});
    let view = bed.engine.create(me(), ns(), with_policy("box", &request)).await.unwrap();
    let config = launched(&bed.sim, &view.session.id);
    let values: Vec<_> = config.policy.values.values().map(|v| v.text.expose()).collect();
    assert_eq!(values, ["canary7f3a"]);
    assert!(!format!("{:?} {view:?}", config.policy).contains("canary7f3a"));

    // A resume and a fork take it along, values and all.
    bed.engine.stop(me(), "team", &view.session.id).await.unwrap();
    let again = bed.resume("box").await.unwrap();
    assert_eq!(launched(&bed.sim, &again.session.id).policy, config.policy);
    let fork = bed.engine.fork(me(), ns(), "box", ForkSandbox::default()).await.unwrap();
    assert_eq!(launched(&bed.sim, &fork.session.id).policy, config.policy);
}

#[tokio::test]
async fn a_policy_that_does_not_compile_changes_nothing() {
    let bed = Bed::new().await;
    let view = bed.create("box").await;
    let bad = json!({"allow": {"a.test": [
        {"match": {"path": {"regex": "("}}, "response": {"statusCode": 403}}]}});
    let id = &view.session.id;
    let error = bed.engine.set_policy(me(), "team", id, draft(&bad)).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(error.message.starts_with("Invalid networkPolicy."), "{error}");
    let error = bed.engine.create(me(), ns(), with_policy("new", &bad)).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    let change = UpdateSandbox { policy: Some(draft(&bad)), ..UpdateSandbox::default() };
    assert!(bed.engine.update(me(), ns(), "box", change).await.is_err());
    assert!(bed.engine.replace_policy(me(), ns(), "box", draft(&bad)).await.is_err());
    assert!(told(&bed.sim, id).is_empty());
    let now = bed.get("box").await.unwrap();
    assert_eq!((now.session.policy, now.session.policy_generation), (NetworkPolicy::AllowAll, 1));
    assert_eq!(now.sandbox.policy, NetworkPolicy::AllowAll);
}

#[tokio::test]
async fn a_live_change_is_written_and_told() {
    let bed = Bed::new().await;
    let id = bed.create("box").await.session.id;
    let set = draft(&json!({"mode": "deny-all"}));
    let session = bed.engine.set_policy(me(), "team", &id, set).await.unwrap();
    assert_eq!(session.policy_generation, 2);
    assert_eq!(policies(&bed.sim, &id), [(2, NetworkPolicy::DenyAll)]);
    // The session's alone: the next one starts with the sandbox's.
    assert_eq!(bed.get("box").await.unwrap().sandbox.policy, NetworkPolicy::AllowAll);

    let change = UpdateSandbox {
        policy: Some(draft(&json!({"allow": ["a.test"]}))),
        ..UpdateSandbox::default()
    };
    bed.engine.update(me(), ns(), "box", change).await.unwrap();
    assert_eq!(
        policies(&bed.sim, &id).len(),
        1,
        "an update of the sandbox is for its next session"
    );
    bed.engine.stop(me(), "team", &id).await.unwrap();
    let error = bed.engine.set_policy(me(), "team", &id, draft(&json!({}))).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Gone);
    let next = bed.resume("box").await.unwrap().session;
    assert!(matches!(next.policy, NetworkPolicy::Custom(_)));
    assert_eq!(launched(&bed.sim, &next.id).policy.policy, next.policy);
}

#[tokio::test]
async fn what_a_broker_refuses_is_taken_back() {
    let bed = Bed::new().await;
    let id = bed.create("box").await.session.id;
    bed.sim.egress_answer(|_| {
        let field = Some("allow[0]".to_owned());
        serde_json::to_vec(&Reply::Refused { field, message: "too new".to_owned() }).unwrap()
    });
    let set = draft(&json!({"mode": "deny-all"}));
    let error = bed.engine.set_policy(me(), "team", &id, set.clone()).await.unwrap_err();
    assert_eq!(error.message, "Invalid networkPolicy.allow[0]: too new");
    let error = bed.engine.replace_policy(me(), ns(), "box", set).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    let now = bed.get("box").await.unwrap();
    assert_eq!(now.session.policy, NetworkPolicy::AllowAll);
    assert_eq!(now.sandbox.policy, NetworkPolicy::AllowAll);
}

/// The record is written and the engine dies before the broker is told.
#[tokio::test]
async fn an_adopted_session_is_told_what_is_recorded() {
    let bed = Bed::new().await;
    let id = bed.create("box").await.session.id;
    let mut row = bed.db.session(&id).await.unwrap().unwrap();
    row.session.policy = NetworkPolicy::DenyAll;
    row.session.policy_generation = 2;
    let mut tx = bed.db.begin(bivouac_store::Durability::Process).await.unwrap();
    tx.update_session(SessionStatus::Running, &mut row).await.unwrap();
    tx.commit().await.unwrap();
    assert!(policies(&bed.sim, &id).is_empty());
    let bed = bed.restart().await;
    assert_eq!(policies(&bed.sim, &id), [(2, NetworkPolicy::DenyAll)]);
}

/// What a broker was last told of its only value.
fn last_value(sim: &Sim, id: &SessionId) -> Option<Result<String, String>> {
    let last = told(sim, id).into_iter().rev().find_map(|message| match message {
        ToBroker::Values { values } => values.into_values().next(),
        _ => None,
    });
    last.map(|value| value.map(|value| value.text.expose().to_owned()))
}

fn one_secret() -> Value {
    json!({"allow": {"a.test": [{"transform": [{"headers": {"x-key": "${secret:KEY}"}}]}]}})
}

/// A secret is changed, or removed, and the engine dies before the brokers are told.
#[tokio::test]
async fn an_adopted_session_uses_the_secrets_of_now() {
    let mut bed = Bed::new().await;
    let secret = |text: &str| Secret::new(format!(r#"{{"kind":"literal","value":"{text}"}}"#));
    bed.db.put_secret(ns(), "KEY", "literal", &secret("old"), START).await.unwrap();
    let view = bed.engine.create(me(), ns(), with_policy("box", &one_secret())).await.unwrap();
    let id = view.session.id;
    bed.db.put_secret(ns(), "KEY", "literal", &secret("new"), START).await.unwrap();
    bed = bed.restart().await;
    let is = |bed: &Bed, good: fn(Result<String, String>) -> bool| {
        last_value(&bed.sim, &id).is_some_and(good).then_some(())
    };
    eventually("the new one", || async { is(&bed, |v| v == Ok("new".to_owned())) }).await;
    bed.db.remove_secret(ns(), "KEY").await.unwrap();
    bed = bed.restart().await;
    eventually("none", || async { is(&bed, |v| v.is_err()) }).await;
}

/// A secret changes between the moment that a policy's values are resolved and the one that the broker
/// has them.
#[tokio::test]
async fn a_secret_that_changes_while_a_policy_is_told_is_told_again() {
    let bed = Bed::new().await;
    let id = bed.create("box").await.session.id;
    let value = Secret::new("old".to_owned());
    let new = crate::NewSecret { from: None, value: Some(value) };
    bed.engine.set_secret(me(), ns(), "KEY", new).await.unwrap();
    let inner = Arc::clone(&bed.engine.inner);
    bed.sim.egress_answer(move |message| {
        if matches!(serde_json::from_slice(message), Ok(ToBroker::Policy(_))) {
            inner.secret_changes.fetch_add(1, Ordering::SeqCst);
        }
        serde_json::to_vec(&Reply::Done { cut: 0 }).unwrap()
    });
    bed.engine.set_policy(me(), "team", &id, draft(&one_secret())).await.unwrap();
    assert_eq!(last_value(&bed.sim, &id), Some(Ok("old".to_owned())), "resolved once more");
    // Without a change there is nothing to repeat.
    bed.sim.egress_answer(|_| serde_json::to_vec(&Reply::Done { cut: 0 }).unwrap());
    let before = told(&bed.sim, &id).len();
    bed.engine.set_policy(me(), "team", &id, draft(&one_secret())).await.unwrap();
    assert_eq!(told(&bed.sim, &id).len(), before + 1);
}

#[tokio::test]
async fn an_adopted_policy_that_the_broker_cannot_do_closes_the_session() {
    let bed = Bed::new().await;
    let id = bed.create("box").await.session.id;
    bed.sim.egress_answer(|message| {
        let closed = serde_json::from_slice(message).is_ok_and(
            |message| matches!(message, ToBroker::Policy(set) if set.policy == NetworkPolicy::DenyAll),
        );
        let refused = Reply::Refused { field: None, message: "too new".to_owned() };
        serde_json::to_vec(&if closed { Reply::Done { cut: 0 } } else { refused }).unwrap()
    });
    let bed = bed.restart().await;
    let told = policies(&bed.sim, &id);
    assert_eq!(told, [(1, NetworkPolicy::AllowAll), (1, NetworkPolicy::DenyAll)]);
}

#[tokio::test]
async fn an_edit_keeps_rules_and_is_for_both() {
    let bed = Bed::new().await;
    let request = json!({"allow": {"a.test": [
        {"transform": [{"headers": {"authorization": "canary7f3a"}}]}]}});
    let view = bed.engine.create(me(), ns(), with_policy("box", &request)).await.unwrap();
    let id = &view.session.id;
    let state = bed.engine.edit_policy(me(), ns(), "box", edit(&["b.test"], &[])).await.unwrap();
    assert!(state.changed && state.policy == state.next);
    let shown = state.policy.request_form();
    assert!(
        shown["allow"]["a.test"][0]["transform"].is_array()
            && shown["allow"]["b.test"] == json!([])
    );
    let messages = told(&bed.sim, id);
    let Some(ToBroker::Policy(set)) = messages.last() else { panic!("{messages:?}") };
    assert_eq!((set.generation, set.values.len()), (2, 1), "the value is the same one");
    let same = bed.engine.edit_policy(me(), ns(), "box", edit(&["b.test"], &[])).await.unwrap();
    assert!(!same.changed);
    assert_eq!(policies(&bed.sim, id).len(), 1);
    // Stopped: for the next session.
    bed.engine.stop(me(), "team", id).await.unwrap();
    let state = bed.engine.edit_policy(me(), ns(), "box", edit(&[], &["b.test"])).await.unwrap();
    assert!(state.changed && state.running.is_none());
    let next = bed.resume("box").await.unwrap().session;
    assert_eq!(next.policy, state.policy);
}

#[tokio::test]
async fn a_stopped_sandbox_s_policy_is_explained_by_the_engine() {
    let bed = Bed::new().await;
    let request = json!({"allow": ["a.test"]});
    let view = bed.engine.create(me(), ns(), with_policy("box", &request)).await.unwrap();
    bed.engine.stop(me(), "team", &view.session.id).await.unwrap();
    let explain = async |url: &str| bed.engine.explain_policy(me(), ns(), "box", url, "GET").await;
    assert!(explain("https://a.test/x").await.unwrap().allowed);
    assert!(!explain("https://b.test/x").await.unwrap().allowed);
    assert_eq!(explain("https://").await.unwrap_err().kind, ErrorKind::Invalid);
}

fn event(event: &FromBroker) -> Bytes {
    serde_json::to_vec(event).unwrap().into()
}

#[tokio::test]
async fn a_broker_gets_the_values_of_its_own_policy_and_no_others() {
    let bed = Bed::new().await;
    let rule = |secret: &str| {
        json!({"allow": {"a.test": [
            {"transform": [{"headers": {"authorization": secret}}]}, {"forwardURL": "https://p.test/in/"}]}})
    };
    let (own, other) = (rule("canary-own"), rule("canary-other"));
    let mine = bed.engine.create(me(), ns(), with_policy("mine", &own)).await.unwrap().session;
    let theirs =
        bed.engine.create(me(), ns(), with_policy("theirs", &other)).await.unwrap().session;
    let value = |id| launched(&bed.sim, id).policy.values.into_keys().next().unwrap();
    for value in [value(&mine.id), value(&theirs.id)] {
        bed.sim.egress_event(&mine.id, event(&FromBroker::WantValue { value }));
    }
    for audience in ["https://p.test/in", "https://elsewhere.test"] {
        let audience = audience.to_owned();
        bed.sim.egress_event(&mine.id, event(&FromBroker::WantToken { audience }));
    }
    let answers = eventually("four answers", || async {
        Some(told(&bed.sim, &mine.id)).filter(|told| told.len() == 4)
    })
    .await;
    let mut got = Vec::new();
    for answer in answers {
        match answer {
            ToBroker::Values { values } => got.extend(values.into_values().map(|v| {
                v.map(|value| value.text.expose().to_owned()).map_err(|_| "a value".to_owned())
            })),
            ToBroker::Token { audience, token } => {
                got.push(token.map(|_| audience.clone()).map_err(|_| audience));
            }
            other => panic!("{other:?}"),
        }
    }
    got.sort();
    let wanted = [
        Ok("canary-own".to_owned()),
        Ok("https://p.test/in".to_owned()),
        Err("a value".to_owned()),
        Err("https://elsewhere.test".to_owned()),
    ];
    assert_eq!(got, wanted);
    assert!(told(&bed.sim, &theirs.id).is_empty());
}

#[tokio::test]
async fn what_brokers_count_is_added_up() {
    let bed = Bed::new().await;
    let id = bed.create("box").await.session.id;
    let labels = vec![("direction".to_owned(), "up".to_owned())];
    let count = Count { name: "bytes".to_owned(), labels, added: 5 };
    for _ in 0..2 {
        bed.sim.egress_event(&id, event(&FromBroker::Counted { counts: vec![count.clone()] }));
    }
    bed.sim.egress_event(&id, Bytes::from_static(b"nonsense"));
    eventually("both counted", || async {
        let read = bed.engine.meters().await.egress;
        read.iter().any(|c| c.name == "bytes" && c.total == 10).then_some(())
    })
    .await;
}

#[tokio::test]
async fn audit_lines_are_read_and_followed() {
    let bed = Bed::new().await;
    let id = bed.create("box").await.session.id;
    bed.sim.audit_append(&id, b"{\"kind\":\"dns\"}\n");
    let query = AuditQuery { follow: true, ..AuditQuery::default() };
    let mut log = bed.engine.egress_log(me(), ns(), "box", query).await.unwrap();
    let first = log.next().await.unwrap().unwrap();
    assert_eq!((&first["kind"], &first["next"]), (&json!("dns"), &json!(15)));
    let (sim, session) = (bed.sim.clone(), id.clone());
    let later = tokio::spawn(async move { sim.audit_append(&session, b"{\"kind\":\"http\"}\n") });
    assert_eq!(log.next().await.unwrap().unwrap()["kind"], "http");
    later.await.unwrap();
    let since = AuditQuery { since: Some(15), ..AuditQuery::default() };
    let mut rest = bed.engine.egress_log(me(), ns(), "box", since).await.unwrap();
    assert_eq!(rest.next().await.unwrap().unwrap()["kind"], "http");
    assert!(rest.next().await.is_none());
    bed.engine.stop(me(), "team", &id).await.unwrap();
    assert!(log.next().await.is_none(), "the follower ends with the session");
    let other = bed.create("other").await.session.id;
    let wrong = AuditQuery { session: Some(other), ..AuditQuery::default() };
    let error = bed.engine.egress_log(me(), ns(), "box", wrong).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
}

#[tokio::test]
async fn a_session_that_learns_gets_its_policy_back() {
    let bed = Bed::new().await;
    let request = json!({"allow": ["a.test"]});
    let view = bed.engine.create(me(), ns(), with_policy("box", &request)).await.unwrap();
    let (id, own) = (view.session.id, view.session.policy);
    let policy_of = async |bed: &Bed| bed.get("box").await.unwrap().session.policy;

    bed.sim.audit_append(&id, b"{\"kind\":\"dns\"}\n");
    let open = bed.engine.learn(me(), ns(), "box").await.unwrap();
    assert_eq!(open.since(), 15);
    assert!(bed.engine.policy(me(), ns(), "box").await.unwrap().learning);
    let error = bed.engine.learn(me(), ns(), "box").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Conflict);
    let line = json!({"at": 1, "session": id, "kind": "connect", "generation": 2, "verdict": "allow",
        "reason": "catch_all", "host": "b.test", "host_from": "sni"});
    bed.sim.audit_append(&id, format!("{line}\n").as_bytes());
    let learned = bed.engine.learned(me(), ns(), "box", open.since()).await.unwrap();
    assert_eq!(learned.policy.request_form(), json!({"allow": ["b.test"]}));
    assert_eq!(policy_of(&bed).await, own);
    drop(open);
    let error = bed.engine.learned(me(), ns(), "box", 0).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Conflict);

    // The asker goes away without a word.
    drop(bed.engine.learn(me(), ns(), "box").await.unwrap());
    eventually("closed again", || async { (policy_of(&bed).await == own).then_some(()) }).await;
    assert_eq!(policies(&bed.sim, &id).last().unwrap().1, own);

    // And the engine.
    let open = bed.engine.learn(me(), ns(), "box").await.unwrap();
    std::mem::forget(open);
    let bed = bed.restart().await;
    assert_eq!(policy_of(&bed).await, own);
    assert_eq!(policies(&bed.sim, &id).last().unwrap().1, own);
}
