//! Credentials of sandboxes on a simulated host.

use bivouac_types::policy::NetworkPolicy;
use bivouac_types::secret::Secret;

use super::{Bed, me, named, ns};
use crate::{CredentialSpec, NewSecret, Principal};

fn spec(kind: &str) -> CredentialSpec {
    CredentialSpec { kind: kind.to_owned(), ..CredentialSpec::default() }
}

fn entries(policy: &NetworkPolicy) -> Vec<String> {
    let NetworkPolicy::Custom(custom) = policy else { return vec![format!("{policy:?}")] };
    custom.domains.iter().map(|domain| domain.entry()).collect()
}

async fn give(bed: &Bed, name: &str) {
    let value = Some(Secret::new("hunter2".to_owned()));
    let new = NewSecret { from: None, value };
    bed.engine.set_secret(me(), ns(), name, new).await.unwrap();
}

#[tokio::test]
async fn a_create_with_a_credential_needs_its_secret() {
    let bed = Bed::new().await;
    let mut new = named("box");
    new.credentials = vec![spec("github"), spec("anthropic")];
    let missing = bed.engine.create(me(), ns(), new.clone()).await.unwrap_err();
    assert!(missing.message.contains("bivouac secret set GITHUB_TOKEN"), "{missing}");
    give(&bed, "GITHUB_TOKEN").await;
    give(&bed, "ANTHROPIC_API_KEY").await;
    let view = bed.engine.create(me(), ns(), new).await.unwrap();
    for name in ["GH_TOKEN", "ANTHROPIC_API_KEY"] {
        assert!(view.session.env[name].contains("bivouac-placeholder-"), "{name}");
    }
    let all = bed.engine.credentials(me(), ns(), "box").await.unwrap();
    let names: Vec<&str> = all.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["anthropic", "github"]);
    assert_eq!(all[1].secrets, ["GITHUB_TOKEN"]);
    assert_eq!(entries(&view.sandbox.policy)[0], "*");
    assert!(!format!("{view:?}").contains("hunter2"));
}

#[tokio::test]
async fn a_running_sandbox_gets_and_loses_one() {
    let bed = Bed::new().await;
    give(&bed, "OPENAI_API_KEY").await;
    bed.create("box").await;
    let mut wanted = spec("openai");
    wanted.expires_at = Some(u64::MAX);
    let added = bed.engine.add_credential(me(), ns(), "box", wanted).await.unwrap();
    assert_eq!(added.credential.hosts, ["api.openai.com"]);
    assert_eq!(added.env, ["OPENAI_API_KEY"]);
    let view = bed.engine.get(me(), ns(), "box", false).await.unwrap();
    assert!(view.session.env["OPENAI_API_KEY"].contains("placeholder"));
    assert_eq!(entries(&view.session.policy), entries(&view.sandbox.policy));
    let removed = bed.engine.remove_credential(me(), ns(), "box", "openai").await.unwrap();
    assert_eq!(removed.credential.expires_at, Some(u64::MAX));
    // What was only there for it is gone too.
    assert!(removed.env.contains(&"OPENAI_API_KEY".to_owned()), "{:?}", removed.env);
    let view = bed.engine.get(me(), ns(), "box", false).await.unwrap();
    assert!(!view.session.env.contains_key("OPENAI_API_KEY"));
    assert!(!view.sandbox.env.contains_key("OPENAI_API_KEY"));
    assert!(bed.engine.credentials(me(), ns(), "box").await.unwrap().is_empty());
    let gone = bed.engine.remove_credential(me(), ns(), "box", "openai").await.unwrap_err();
    assert!(gone.message.contains("bivouac credential ls box"), "{gone}");
    let mut late = spec("openai");
    late.expires_at = Some(1);
    assert!(bed.engine.add_credential(me(), ns(), "box", late).await.is_err());
}

#[tokio::test]
async fn a_fork_by_somebody_else_loses_what_is_somebody_s() {
    let bed = Bed::new().await;
    give(&bed, "GITHUB_TOKEN").await;
    give(&bed, "OPENAI_API_KEY").await;
    let mut new = named("box");
    let mut mine = spec("github");
    mine.actor = Some(me().name.clone());
    new.credentials = vec![mine, spec("openai")];
    bed.engine.create(me(), ns(), new).await.unwrap();
    let other = Principal { name: "other".to_owned(), ..Principal::local() };
    for (who, fork, left) in [(me(), "a", &["github", "openai"][..]), (&other, "b", &["openai"])] {
        let spec = crate::ForkSandbox { name: Some(fork.to_owned()), ..Default::default() };
        bed.engine.fork(who, ns(), "box", spec).await.unwrap();
        let all = bed.engine.credentials(me(), ns(), fork).await.unwrap();
        let names: Vec<&str> = all.iter().map(|c| c.name.as_str()).collect();
        assert_eq!(names, left, "{fork}");
    }
}
