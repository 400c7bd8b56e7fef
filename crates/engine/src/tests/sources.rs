//! Sources that are fetched: under which policy, with which login, and what is left of a failure.

use bivouac_egress::message::{Config, ToBroker};
use bivouac_types::policy::{Draft, NetworkPolicy};
use bivouac_types::sandbox::Source;
use bivouac_types::secret::Secret;

use super::*;
use crate::ErrorKind;

fn git(url: &str) -> CreateSandbox {
    let source = Source::Git { url: url.to_owned(), depth: Some(1), revision: None };
    let policy =
        Draft { policy: NetworkPolicy::DenyAll, values: std::collections::BTreeMap::new() };
    CreateSandbox { source: Some(source), policy: Some(policy), ..named("box") }
}

#[tokio::test]
async fn a_source_is_fetched_before_the_session_runs() {
    let bed = Bed::new().await;
    let login = Some(Secret::new("Basic canary7f3a".to_owned()));
    let spec = CreateSandbox { source_login: login, ..git("https://git.test/r.git") };
    let view = bed.engine.create(me(), ns(), spec).await.unwrap();
    let id = &view.session.id;
    assert_eq!(bed.run(id, &["test", "fetched"]).await, Some(0));
    // The source's host was open with the login; the session has its own policy.
    let sent = bed.sim.egress_sent(id);
    let config: Config = serde_json::from_slice(&sent[0]).unwrap();
    let shown = config.policy.policy.request_form();
    assert_eq!(shown["allow"]["git.test"][0]["credential"], "source");
    let values: Vec<_> = config.policy.values.values().map(|v| v.text.expose()).collect();
    assert_eq!(values, ["Basic canary7f3a"]);
    let Ok(ToBroker::Policy(set)) = serde_json::from_slice(&sent[1]) else { panic!("no policy") };
    assert_eq!((set.policy, set.generation), (NetworkPolicy::DenyAll, 2));
    assert!(set.values.is_empty());
    assert_eq!(view.session.policy, NetworkPolicy::DenyAll);
    assert_eq!(view.session.policy_generation, 2);
    assert!(!format!("{view:?}").contains("canary7f3a"));
    bed.check().await;
}

#[tokio::test]
async fn a_source_that_cannot_be_fetched_leaves_nothing() {
    let bed = Bed::new().await;
    let error = bed.engine.create(me(), ns(), git("https://git.test/broken")).await.unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::Invalid, "source_unavailable"));
    assert!(error.message.contains("https://git.test/broken"), "{error}");
    bed.check().await;
    assert!(bed.sim.session_ids().is_empty());
    assert_eq!(bed.get("box").await.unwrap_err().kind, ErrorKind::NotFound);
    bed.create("box").await;

    let login = Some(Secret::new("Basic canary7f3a".to_owned()));
    let spec = CreateSandbox { source_login: login, ..git("http://git.test/r.git") };
    let error = bed.engine.create(me(), ns(), spec).await.unwrap_err();
    assert!(error.message.starts_with("Invalid source.password"), "{error}");
}
