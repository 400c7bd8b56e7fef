//! The life of tokens: made, used, expired, revoked with all that came of them.

use std::collections::BTreeSet;

use bivouac_types::access::{Grant, Reach, Verb};
use bivouac_types::secret::Secret;
use futures_util::FutureExt as _;

use super::*;
use crate::{ErrorKind, MadeToken, NewToken, Use};

fn grant(namespaces: &[&str], verbs: &[Verb]) -> Grant {
    Grant {
        namespaces: namespaces.iter().map(|text| Reach::parse(text).unwrap()).collect(),
        verbs: verbs.iter().copied().collect(),
    }
}

fn new(name: &str, grant: Grant, expires_at: Option<i64>) -> NewToken {
    NewToken { name: name.to_owned(), grant, expires_at }
}

impl Bed {
    async fn token(&self, who: &Principal, name: &str, of: Grant, until: Option<i64>) -> MadeToken {
        self.engine.create_token(who, new(name, of, until)).await.unwrap()
    }

    fn who(&self, made: &MadeToken) -> Result<Principal, Error> {
        self.engine.authenticate(made.secret.expose())
    }
}

/// The holder of the engine's own token; `me` has another name.
fn local() -> Principal {
    Principal::local()
}

#[tokio::test]
async fn a_token_has_what_it_was_given_and_outlives_a_restart() {
    let bed = Bed::new().await;
    let wanted = grant(&["team/project"], &[Verb::Read, Verb::Exec]);
    let made = bed.token(&local(), "ci", wanted.clone(), None).await;
    let (_, secret) = made.secret.expose().rsplit_once('_').unwrap();
    assert!(made.secret.expose().starts_with(&format!("bvt_{}_", made.token.id)));
    assert_eq!(secret.len(), 64, "256 bits");
    let who = bed.who(&made).unwrap();
    assert_eq!((who.name.as_str(), who.token.as_deref()), ("ci", Some(made.token.id.as_str())));
    assert_eq!(who.grant, wanted);
    assert_eq!(bed.engine.principal_of(Some(&made.token.id)).unwrap(), who);
    let bed = bed.restart().await;
    assert_eq!(bed.who(&made).unwrap(), who);
    let rows = bed.db.tokens().await.unwrap();
    assert!(!format!("{rows:?}").contains(secret), "the secret half is in the database");
    let again = bed.token(&local(), "other", wanted, None).await;
    assert_ne!(again.secret, made.secret);
    let twice = bed.engine.create_token(&local(), new("ci", made.token.grant.clone(), None)).await;
    assert_eq!(twice.unwrap_err().kind, ErrorKind::Conflict);
}

#[tokio::test]
async fn a_token_that_ended_is_refused_with_the_words_for_an_unknown_one() {
    let bed = Bed::new().await;
    let of = || grant(&["*"], &[Verb::Read]);
    let short = bed.token(&local(), "short", of(), Some(START + 1000)).await;
    let long = bed.token(&local(), "long", of(), None).await;
    let who = bed.who(&short).unwrap();
    let mut ended = Box::pin(bed.engine.ended(&who));
    assert!((&mut ended).now_or_never().is_none());
    bed.clock.advance(1000);
    ended.await;
    bed.engine.revoke_token(&local(), "long").await.unwrap();
    let unknown = bed.engine.authenticate("bvt_0123456789abcdef_00").unwrap_err();
    assert_eq!(unknown.kind, ErrorKind::Unauthorized);
    for made in [&short, &long] {
        let error = bed.who(made).unwrap_err();
        assert_eq!((error.kind, error.message), (unknown.kind, unknown.message.clone()));
    }
    assert!(bed.engine.principal_of(Some(&short.token.id)).is_err());
    // Both names are free again.
    bed.token(&local(), "short", of(), None).await;
    bed.token(&local(), "long", of(), None).await;
    let bed = bed.restart().await;
    assert!(bed.who(&long).is_err() && bed.who(&short).is_err());
}

#[tokio::test]
async fn nobody_hands_on_what_he_has_not() {
    let bed = Bed::new().await;
    let own = grant(&["team/*"], &[Verb::Read, Verb::Write]);
    let made = bed.token(&local(), "maker", own, Some(START + 5000)).await;
    let who = bed.who(&made).unwrap();
    for (namespaces, verbs) in [
        (vec!["*"], vec![Verb::Read]),
        (vec!["other/project"], vec![Verb::Read]),
        (vec!["team/project"], vec![Verb::Read, Verb::Exec]),
    ] {
        let refused =
            bed.engine.create_token(&who, new("x", grant(&namespaces, &verbs), None)).await;
        assert_eq!(refused.unwrap_err().kind, ErrorKind::Forbidden, "{namespaces:?} {verbs:?}");
    }
    let one = || grant(&["team/project"], &[Verb::Read]);
    for bad in [
        new("x", one(), Some(START + 5001)),
        new("x", one(), Some(START)),
        new("a/b", one(), None),
        new("local", one(), None),
        new("x", grant(&[], &[Verb::Read]), None),
        new("x", grant(&["team/project"], &[]), None),
    ] {
        let refused = bed.engine.create_token(&who, bad.clone()).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Invalid, "{bad:?}");
    }
    let narrow = new("x", grant(&["team/*"], &[Verb::Admin]), None);
    let refused = bed.engine.create_token(&local(), narrow).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Invalid, "an administrator of a part");
    let child = bed.token(&who, "child", one(), None).await;
    assert_eq!(
        (child.token.name.as_str(), child.token.expires_at),
        ("maker/child", Some(START + 5000))
    );
    assert_eq!(child.token.made_by, who.token);
    assert_eq!(bed.engine.tokens(&local()).await.unwrap().len(), 2);
}

#[tokio::test]
async fn what_a_token_made_goes_with_it() {
    let bed = Bed::new().await;
    let of = |project: &str| grant(&[&format!("team/{project}")], &[Verb::Read]);
    let a = bed.token(&local(), "a", of("project"), None).await;
    let b = bed.token(&bed.who(&a).unwrap(), "b", of("project"), None).await;
    let c = bed.token(&bed.who(&b).unwrap(), "c", of("project"), None).await;
    let other = bed.token(&local(), "other", of("other"), None).await;
    let names = async |made: &MadeToken| {
        let seen = bed.engine.tokens(&bed.who(made).unwrap()).await.unwrap();
        seen.into_iter().map(|token| token.name).collect::<BTreeSet<_>>()
    };
    assert_eq!(names(&b).await, ["a/b", "a/b/c"].map(str::to_owned).into());
    assert_eq!(names(&other).await, ["other".to_owned()].into());
    for (who, name) in [(&b, "a"), (&other, "a"), (&other, "a/b"), (&other, &b.token.id)] {
        let refused = bed.engine.revoke_token(&bed.who(who).unwrap(), name).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::NotFound, "{name}");
    }
    let made_by_c = bed.who(&c).unwrap();
    let ended = bed.engine.ended(&made_by_c);
    let mut revoked = bed.engine.revoked();
    revoked.mark_unchanged();
    // By the short name, which is its own.
    let gone = bed.engine.revoke_token(&bed.who(&a).unwrap(), "b").await.unwrap();
    let gone: Vec<String> = gone.tokens.into_iter().map(|token| token.name).collect();
    assert_eq!(gone, ["a/b", "a/b/c"]);
    ended.await;
    assert!(revoked.has_changed().unwrap());
    assert!(bed.who(&a).is_ok() && bed.who(&b).is_err() && bed.who(&c).is_err());
    assert!(!bed.engine.counts(&made_by_c));
    let late = bed.engine.create_token(&made_by_c, new("late", of("project"), None)).await;
    assert_eq!(late.unwrap_err().kind, ErrorKind::Unauthorized, "it was revoked meanwhile");
    bed.engine.revoke_token(&bed.who(&a).unwrap(), "a").await.unwrap();
    assert!(bed.who(&a).is_err(), "somebody may take his own back");
    assert!(bed.who(&other).is_ok());
}

#[tokio::test]
async fn a_use_is_noted_once_a_minute() {
    let bed = Bed::new().await;
    let made = bed.token(&local(), "ci", grant(&["*"], &[Verb::Read]), None).await;
    let used = async || bed.db.tokens().await.unwrap()[0].last_used_at;
    let until = async |wanted: i64| {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
        while used().await != Some(wanted) {
            assert!(tokio::time::Instant::now() < deadline, "{:?} is not {wanted}", used().await);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert_eq!(used().await, None);
    bed.who(&made).unwrap();
    until(START).await;
    bed.clock.advance(59_999);
    bed.who(&made).unwrap();
    bed.clock.advance(1);
    bed.who(&made).unwrap();
    until(START + 60_000).await;
}

#[tokio::test]
async fn the_engine_s_own_token_is_known_by_every_door() {
    let bed = Bed::new().await;
    let mut config = EngineConfig::new("node-a", "host", "http://127.0.0.1:7070");
    config.token = Some(Secret::new("bvk_own".to_owned()));
    let engine = Engine::open(
        config,
        bed.db.clone(),
        Arc::new(bed.sim.clone()),
        Arc::clone(&bed.clock) as _,
    );
    let engine = engine.await.unwrap();
    assert_eq!(engine.authenticate("bvk_own").unwrap(), local());
    assert!(engine.ended(&local()).now_or_never().is_none());
    // A made token may have every right and is not the operator of the host.
    let made = engine.create_token(&local(), new("root", Grant::all(), None)).await.unwrap();
    let root = engine.authenticate(made.secret.expose()).unwrap();
    assert!(root.grant.rules());
    let from = crate::NewSecret { from: Some("env:HOME".to_owned()), value: None };
    let refused = engine.set_secret(&root, ns(), "S", from.clone()).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Forbidden);
    engine.set_secret(&local(), ns(), "S", from).await.unwrap();
}

#[tokio::test]
async fn what_is_kept_open_takes_the_right_to_work_inside() {
    let bed = Bed::new().await;
    let view = bed.create("box").await;
    let session = view.session.id.clone();
    let command = bed.start(&session, &["sleep"]).await.unwrap().id;
    let of = |namespace: &str, verbs: &[Verb]| Principal {
        name: "one".to_owned(),
        token: Some("00".to_owned()),
        grant: grant(&[namespace], verbs),
    };
    let every = [Verb::Read, Verb::Exec, Verb::Preview, Verb::Write, Verb::Policy];
    // The same team.
    let stranger = of("team/other", &every);
    let reader = of("team/project", &[Verb::Read, Verb::Preview, Verb::Write, Verb::Policy]);
    let engine = &bed.engine;
    let unknown = SessionId::new(1, [1; 10]);
    for (who, wanted) in [(&stranger, ErrorKind::NotFound), (&reader, ErrorKind::Forbidden)] {
        let new = terminal;
        let port = crate::DialTo::Port(80);
        let at = crate::ListenAt::Tcp { host: String::new(), port: 80 };
        let refused = [
            engine.open_terminal(who, ns(), "box", new()).await.map(drop).unwrap_err(),
            engine.open_terminal_in(who, "team", &session, new()).await.map(drop).unwrap_err(),
            engine.may_open_terminal(who, "team", &session).await.unwrap_err(),
            engine.attach_terminal(who, ns(), "box", "main", 0).await.map(drop).unwrap_err(),
            engine
                .attach_again(who, ns(), &session, &command, crate::Since::Last(0))
                .await
                .map(drop)
                .unwrap_err(),
            engine.hang_up(who, ns(), "box", "main").await.map(drop).unwrap_err(),
            engine.dial(who, ns(), "box", &port, true).await.map(drop).unwrap_err(),
            engine.listen_inside(who, ns(), "box", &at).await.map(drop).unwrap_err(),
        ];
        for (index, error) in refused.into_iter().enumerate() {
            assert_eq!(error.kind, wanted, "{index}: {error}");
        }
        let told = engine.may_open_terminal(&stranger, "team", &session).await.unwrap_err();
        let other = engine.may_open_terminal(&stranger, "team", &unknown).await.unwrap_err();
        let told = told.message.replace(session.as_str(), unknown.as_str());
        assert_eq!(told, other.message);
    }
    let worker = of("team/project", &[Verb::Exec]);
    engine.may_open_terminal(&worker, "team", &session).await.unwrap();
}

fn terminal() -> crate::NewTerminal {
    crate::NewTerminal {
        name: None,
        program: String::new(),
        args: Vec::new(),
        cwd: None,
        env: std::collections::BTreeMap::new(),
        sudo: false,
        size: bivouac_types::terminal::TtySize::default(),
    }
}

#[tokio::test]
async fn uses_wait_to_be_written() {
    let bed = Bed::new().await;
    bed.engine.audit(Use::new(&local(), "ssh", "shell").on(ns(), "box"));
    bed.engine.uses_come().await;
    let (uses, dropped) = bed.engine.take_uses();
    assert_eq!((uses.len(), dropped, uses[0].at), (1, 0, START));
    assert!(bed.engine.take_uses().0.is_empty());
    // What was checked is told to the door.
    let one = Principal { grant: grant(&["team/project"], &[Verb::Read]), ..local() };
    let (listed, checked) =
        crate::checked(bed.engine.drives(&one, ns(), crate::ListDrives::default())).await;
    assert!(listed.is_ok());
    assert_eq!((checked.verb, checked.namespace.as_ref()), (Some(Verb::Read), Some(ns())));
}
