//! Tokens: kept without their secret, revoked for good, on SQLite and (with `BIVOUAC_TEST_POSTGRES`) on PostgreSQL.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

mod common;

use std::collections::BTreeSet;

use bivouac_store::{Address, Db, StoreError, TokenRow, Unique};
use bivouac_testkit::TestDatabase;
use bivouac_types::access::{Grant, Reach, Verb};

fn token(id: &str, name: &str, made_by: &str, expires_at: Option<i64>) -> TokenRow {
    let namespaces = ["t/p", "u/*"].map(|text| Reach::parse(text).unwrap());
    TokenRow {
        id: id.to_owned(),
        name: name.to_owned(),
        hash: "00ff".to_owned(),
        grant: Grant { namespaces: namespaces.into(), verbs: [Verb::Read, Verb::Policy].into() },
        made_by: made_by.to_owned(),
        created_at: 10,
        expires_at,
        revoked_at: None,
        last_used_at: None,
    }
}

async fn a_life(db: &Db) {
    let (a, b) = (token("a", "ci", "", None), token("b", "Ci", "a", Some(50)));
    db.put_token(&a).await.unwrap();
    db.put_token(&b).await.unwrap();
    assert_eq!(db.tokens().await.unwrap(), [a.clone(), b.clone()]);
    let taken = db.put_token(&token("c", "ci", "", None)).await.unwrap_err();
    assert!(matches!(taken, StoreError::Taken(Unique::TokenName)), "{taken:?}");
    db.note_token_used("b", 30).await.unwrap();
    db.note_token_used("b", 20).await.unwrap();
    assert_eq!(db.tokens().await.unwrap()[1].last_used_at, Some(30), "never back");
    // The name of one that has expired is free.
    let later = TokenRow { created_at: 50, ..token("d", "Ci", "", None) };
    db.put_token(&later).await.unwrap();
    let both: BTreeSet<String> = ["a", "d"].map(str::to_owned).into();
    assert_eq!(db.revoke_tokens(&both, 60).await.unwrap(), 0);
    db.revoke_tokens(&both, 70).await.unwrap();
    let ends: Vec<_> = db.tokens().await.unwrap().into_iter().map(|row| row.revoked_at).collect();
    assert_eq!(ends, [Some(60), Some(50), Some(60)], "once and for all");
    db.put_token(&TokenRow { created_at: 61, ..token("e", "ci", "", None) }).await.unwrap();
    db.forget_tokens(60).await.unwrap();
    let ids: Vec<_> = db.tokens().await.unwrap().into_iter().map(|row| row.id).collect();
    assert_eq!(ids, ["a", "d", "e"]);
}

#[tokio::test]
async fn a_life_on_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open_file(&dir.path().join("bivouac.db")).await.unwrap();
    a_life(&db).await;
}

#[tokio::test]
async fn a_life_on_postgres() {
    let Some(database) = TestDatabase::new().unwrap() else { return };
    let db = Db::open(&Address::parse(database.url()).unwrap()).await.unwrap();
    a_life(&db).await;
    db.close().await;
}
