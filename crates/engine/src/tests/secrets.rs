//! Secrets, values and identity tokens, without a broker.

use std::collections::BTreeMap;
use std::sync::Arc;

use bivouac_types::id::ValueId;
use bivouac_types::name::Namespace;
use bivouac_types::policy::{Action, Draft, NetworkPolicy};
use bivouac_types::secret::Secret;
use serde_json::{Value, json};

use super::{Bed, START, me, named, ns};
use crate::{ErrorKind, NewSecret, Principal};

fn literal(text: &str) -> NewSecret {
    NewSecret { from: None, value: Some(Secret::new(text.to_owned())) }
}

fn from(reference: &str) -> NewSecret {
    NewSecret { from: Some(reference.to_owned()), value: None }
}

fn local() -> Principal {
    Principal::local()
}

/// A policy with one header value, as a client sends it.
fn draft(value: &str) -> Draft {
    let body =
        json!({"allow": {"a.test": [{"transform": [{"headers": {"authorization": value}}]}]}});
    let id = ValueId::new(1, [1; 10]);
    NetworkPolicy::parse("networkPolicy", &body, &mut || id.clone()).unwrap()
}

/// The id of that value, and the names of the secrets in it.
fn kept(policy: &NetworkPolicy) -> (ValueId, Vec<String>) {
    let NetworkPolicy::Custom(custom) = policy else { panic!("not custom") };
    match &custom.domains[0].rules[0].action {
        Action::Transform { headers } => (headers[0].value.clone(), headers[0].secrets.clone()),
        Action::Sign(sign) => (sign.value.clone(), sign.secrets.clone()),
        other => panic!("no value in {other:?}"),
    }
}

/// Another engine on the same records, without its reconcilers.
fn other_engine(bed: &Bed, config: crate::EngineConfig) -> crate::Engine {
    let (sim, clock) = (Arc::new(bed.sim.clone()), Arc::clone(&bed.clock));
    crate::Engine { inner: Arc::new(crate::inner::Inner::new(config, bed.db.clone(), sim, clock)) }
}

/// Keeps a policy with one header value and answers the value's id.
async fn keep(bed: &Bed, value: &str) -> ValueId {
    kept(&bed.engine.inner.keep_values(ns(), draft(value)).await.unwrap()).0
}

#[tokio::test]
async fn a_value_is_resolved_late_and_follows_its_secret() {
    let bed = Bed::new().await;
    let (engine, inner) = (&bed.engine, &bed.engine.inner);
    let wanted = draft("Bearer ${secret:GH}!");
    let missing = inner.keep_values(ns(), wanted.clone()).await.unwrap_err();
    assert_eq!(missing.kind, ErrorKind::NotFound);
    assert!(missing.message.contains("bivouac secret set GH"), "{}", missing.message);

    let row = engine.set_secret(me(), ns(), "GH", literal("one")).await.unwrap();
    assert_eq!((row.version, row.kind.as_str()), (1, "literal"));
    let policy = inner.keep_values(ns(), wanted.clone()).await.unwrap();
    let (id, secrets) = kept(&policy);
    assert_eq!(secrets, ["GH"]);
    assert_eq!(inner.keep_values(ns(), wanted).await.unwrap(), policy, "the same ids again");
    assert_ne!(keep(&bed, "Bearer ${secret:GH}?").await, id);
    let first = inner.resolve_value(ns(), &id).await.unwrap();
    assert_eq!(first.text.expose(), "Bearer one!");
    assert_eq!(first.expires_at, None);

    bed.clock.advance(1000);
    let row = engine.set_secret(me(), ns(), "GH", literal("two")).await.unwrap();
    assert_eq!((row.version, row.created_at, row.updated_at), (2, START, START + 1000));
    let second = inner.resolve_value(ns(), &id).await.unwrap();
    assert_eq!(second.text.expose(), "Bearer two!");
    assert_ne!(first.version, second.version);
    assert_eq!(second.version, inner.resolve_value(ns(), &id).await.unwrap().version);

    engine.remove_secret(me(), ns(), "GH").await.unwrap();
    let gone = inner.resolve_value(ns(), &id).await.unwrap_err();
    assert!(gone.contains("no secret 'GH'"), "{gone}");
    let again = engine.remove_secret(me(), ns(), "GH").await.unwrap_err();
    assert_eq!(again.kind, ErrorKind::NotFound);
}

#[tokio::test]
async fn secrets_and_values_stay_in_their_namespace() {
    let bed = Bed::new().await;
    let inner = &bed.engine.inner;
    bed.engine.set_secret(me(), ns(), "GH", literal("one")).await.unwrap();
    let id = keep(&bed, "${secret:GH}").await;
    let project = Namespace { project: "other".to_owned(), ..ns().clone() };
    let team = Namespace { team: "other".to_owned(), ..ns().clone() };
    for other in [&project, &team] {
        assert!(inner.resolve_value(other, &id).await.is_err(), "{other:?}");
        assert!(bed.engine.secrets(me(), other).await.unwrap().is_empty());
        assert!(inner.keep_values(other, draft("${secret:GH}")).await.is_err());
    }
    let listed = bed.engine.secrets(me(), ns()).await.unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].name, "GH");
}

#[tokio::test]
async fn what_cannot_be_a_header_is_an_error_that_does_not_show_it() {
    let bed = Bed::new().await;
    let inner = &bed.engine.inner;
    bed.engine.set_secret(me(), ns(), "GH", literal("hunter2\nx: y")).await.unwrap();
    let id = keep(&bed, "${secret:GH}").await;
    let why = inner.resolve_value(ns(), &id).await.unwrap_err();
    assert!(why.contains("header") && !why.contains("hunter2"), "{why}");
    let why = inner.keep_values(ns(), draft("hunter2 ${base64:GH")).await.unwrap_err();
    assert_eq!(why.kind, ErrorKind::Invalid);
    assert!(why.message.contains("authorization") && !why.message.contains("hunter2"), "{why}");
}

#[tokio::test]
async fn aws_credentials_have_the_form_that_signing_takes() {
    let bed = Bed::new().await;
    let inner = &bed.engine.inner;
    let printed = r#"{"Version":1,"AccessKeyId":"A","SecretAccessKey":"K","Expiration":"2100-01-01T00:00:00Z"}"#;
    bed.engine.set_secret(me(), ns(), "AWS", literal(printed)).await.unwrap();
    let id = ValueId::new(1, [3; 10]);
    let sign = json!({"aws": {"credentials": "${secret:AWS}"}});
    let body = json!({"allow": {"*.amazonaws.com": [{"sign": sign}]}});
    let draft = NetworkPolicy::parse("networkPolicy", &body, &mut || id.clone()).unwrap();
    let (id, _) = kept(&inner.keep_values(ns(), draft).await.unwrap());
    let value = inner.resolve_value(ns(), &id).await.unwrap();
    let read: Value = serde_json::from_str(value.text.expose()).unwrap();
    assert_eq!(read, json!({"accessKeyId": "A", "secretAccessKey": "K"}));
    assert_eq!(value.expires_at, Some(4_102_444_800_000));
}

#[tokio::test]
async fn only_the_operator_names_things_of_the_host() {
    let bed = Bed::new().await;
    for reference in ["env:PATH", "file:/etc/shadow", "exec:id", "vault:a/b#c"] {
        let refused = bed.engine.set_secret(me(), ns(), "X", from(reference)).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Forbidden, "{reference}");
        let row = bed.engine.set_secret(&local(), ns(), "X", from(reference)).await.unwrap();
        assert_eq!(Some(row.kind.as_str()), reference.split(':').next());
    }
    // Nor may others choose whom the engine itself calls.
    let key = crate::jwt::Key::generate().unwrap().to_sealed().unwrap();
    let pem = format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", key.expose());
    let app = |options: &str| NewSecret {
        from: Some(format!("github-app:1/2{options}")),
        value: Some(Secret::new(pem.clone())),
    };
    bed.engine.set_secret(me(), ns(), "X", app("")).await.unwrap();
    let inside = "?api=http://127.0.0.1:2375";
    let refused = bed.engine.set_secret(me(), ns(), "X", app(inside)).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Forbidden);
    bed.engine.set_secret(&local(), ns(), "X", app(inside)).await.unwrap();
    let mut narrow = crate::EngineConfig::new("n", "host", "http://127.0.0.1:7070");
    narrow.secret_sources = vec!["env".to_owned()];
    let narrow = other_engine(&bed, narrow);
    narrow.set_secret(&local(), ns(), "X", from("env:PATH")).await.unwrap();
    let refused = narrow.set_secret(&local(), ns(), "X", from("exec:id")).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Forbidden);
    assert!(refused.message.contains("--secret-sources"), "{refused}");
    let empty = NewSecret { from: None, value: None };
    for bad in [literal(""), empty, from("http://x")] {
        let refused = bed.engine.set_secret(&local(), ns(), "X", bad).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Invalid);
    }
    for name in ["", "a b", "a.b", "a/b", "${x}", &"x".repeat(129)] {
        let refused = bed.engine.set_secret(&local(), ns(), name, literal("x")).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Invalid, "{name}");
    }
}

#[tokio::test]
async fn a_provider_is_asked_once_a_minute_however_many_wait() {
    let bed = Bed::new().await;
    let inner = &bed.engine.inner;
    let folder = tempfile::tempdir().unwrap();
    let tally = folder.path().join("tally");
    // Each run adds a line, and prints how many there are.
    let script = format!("echo >> {0}; wc -l < {0}", tally.display());
    let reference = format!("exec:{}", json!(["sh", "-c", script]));
    bed.engine.set_secret(&local(), ns(), "N", from(&reference)).await.unwrap();
    let id = keep(&bed, "run ${secret:N}").await;
    let both = futures_util::future::join_all((0..8).map(|_| inner.resolve_value(ns(), &id))).await;
    for value in both {
        let value = value.unwrap();
        assert_eq!(value.text.expose(), "run 1");
        assert_eq!(value.expires_at, u64::try_from(START + 60_000).ok());
    }
    bed.clock.advance(59_999);
    assert_eq!(inner.resolve_value(ns(), &id).await.unwrap().text.expose(), "run 1");
    bed.clock.advance(1);
    assert_eq!(inner.resolve_value(ns(), &id).await.unwrap().text.expose(), "run 2");
    // A secret that is set anew is asked anew.
    bed.engine.set_secret(&local(), ns(), "N", from(&reference)).await.unwrap();
    assert_eq!(inner.resolve_value(ns(), &id).await.unwrap().text.expose(), "run 3");
}

#[tokio::test]
async fn values_that_no_policy_names_are_removed_after_an_hour() {
    let bed = Bed::new().await;
    let inner = &bed.engine.inner;
    let mut new = named("box");
    let policy = inner.keep_values(ns(), draft("kept")).await.unwrap();
    let (kept_id, _) = kept(&policy);
    new.policy = Some(Draft { policy, values: BTreeMap::new() });
    bed.engine.create(me(), ns(), new).await.unwrap();
    let unused_id = keep(&bed, "unused").await;
    bed.clock.advance(3_600_000);
    inner.sweep_values().await.unwrap();
    assert!(inner.resolve_value(ns(), &unused_id).await.is_ok(), "younger than an hour");
    bed.clock.advance(1);
    // The engine's own sweep may be quicker.
    inner.sweep_values().await.unwrap();
    assert_eq!(inner.resolve_value(ns(), &kept_id).await.unwrap().text.expose(), "kept");
    assert!(inner.resolve_value(ns(), &unused_id).await.is_err());
}

#[tokio::test]
async fn a_row_that_names_a_value_makes_it_young_again() {
    let bed = Bed::new().await;
    let inner = &bed.engine.inner;
    let policy = inner.keep_values(ns(), draft("kept")).await.unwrap();
    let (id, _) = kept(&policy);
    let unused = keep(&bed, "unused").await;
    bed.clock.advance(3_600_000);
    // As a copy of a policy does: it names the value and does not bring it along.
    let mut new = named("box");
    new.policy = Some(Draft { policy, values: BTreeMap::new() });
    bed.engine.create(me(), ns(), new).await.unwrap();
    bed.engine.delete(me(), ns(), "box", true).await.unwrap();
    // A removal that looked before the row was there, or after it was gone, finds the value young.
    bed.clock.advance(1);
    inner.sweep_values().await.unwrap();
    assert_eq!(inner.resolve_value(ns(), &id).await.unwrap().text.expose(), "kept");
    assert!(inner.resolve_value(ns(), &unused).await.is_err(), "the control");
}

#[tokio::test]
async fn tokens_are_verified_by_the_keys_that_are_served() {
    let bed = Bed::new().await;
    let view = bed.create("box").await;
    let row = bed.db.session(&view.session.id).await.unwrap().unwrap();
    let token = bed.engine.inner.identity_token(&row, "https://proxy.test/in").await.unwrap();
    let claims = verify(&bed.engine.jwks().await.unwrap(), token.text.expose());
    let now = START / 1000;
    for (name, value) in [
        ("iss", json!("http://127.0.0.1:7070")),
        ("aud", json!("https://proxy.test/in")),
        ("iat", json!(now)),
        ("exp", json!(now + 60)),
        ("team_id", json!("team")),
        ("project_id", json!("project")),
        ("sandbox_id", json!(view.session.id)),
        ("sandbox_name", json!("box")),
    ] {
        assert_eq!(claims[name], value, "{name}");
    }
    assert_eq!(token.expires_at, u64::try_from((now + 60) * 1000).ok());
    let other = bed.engine.inner.identity_token(&row, "https://proxy.test/in").await.unwrap();
    assert_ne!(
        verify(&bed.engine.jwks().await.unwrap(), other.text.expose())["jti"],
        claims["jti"]
    );
    assert!(bed.engine.inner.identity_token(&row, "http://proxy.test").await.is_err());

    // The key is kept: a token from before a restart is verified after it.
    let before = token.text.expose().to_owned();
    let bed = bed.restart().await;
    verify(&bed.engine.jwks().await.unwrap(), &before);
    let discovery = bed.engine.openid_configuration(None);
    assert_eq!(discovery["jwks_uri"], "http://127.0.0.1:7070/.well-known/jwks");
}

/// Verifies a token by a key set as another implementation does, and answers its claims.
fn verify(keys: &Value, token: &str) -> Value {
    use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
    let header = decode_header(token).unwrap();
    let all: BTreeMap<&str, &Value> = keys["keys"]
        .as_array()
        .unwrap()
        .iter()
        .map(|key| (key["kid"].as_str().unwrap(), key))
        .collect();
    let key = all[header.kid.as_deref().unwrap()];
    let part = |name: &str| key[name].as_str().unwrap();
    let key = DecodingKey::from_rsa_components(part("n"), part("e")).unwrap();
    let mut rules = Validation::new(Algorithm::RS256);
    // The clock of the test is not the host's.
    rules.validate_exp = false;
    rules.validate_aud = false;
    decode::<Value>(token, &key, &rules).unwrap().claims
}

#[tokio::test]
async fn another_issuer_is_said_as_it_was_told() {
    let bed = Bed::new().await;
    let issuer = |issuer: Option<&str>| {
        let mut config = crate::EngineConfig::new("n", "host", "http://127.0.0.1:7070");
        config.issuer = issuer.map(str::to_owned);
        other_engine(&bed, config)
    };
    for (told, team, said) in [
        (Some("https://id.example/"), Some("t"), "https://id.example"),
        (Some("https://oidc.vercel.com"), Some("t"), "https://oidc.vercel.com/t"),
        (Some("https://oidc.vercel.com"), None, "https://oidc.vercel.com"),
        (Some("https://oidc.vercel.com/x"), Some("t"), "https://oidc.vercel.com/x"),
    ] {
        let document = issuer(told).openid_configuration(team);
        assert_eq!(document["issuer"], said);
        assert_eq!(document["jwks_uri"], format!("{said}/.well-known/jwks"));
    }
}
