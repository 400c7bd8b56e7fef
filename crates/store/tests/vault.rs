//! Secrets at rest: what lies on disk, what another key can do, what is written lazily.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use bivouac_store::{Address, Db, StoreError};
use bivouac_testkit::TestDatabase;
use bivouac_types::id::ValueId;
use bivouac_types::name::Namespace;
use bivouac_types::secret::Secret;
use common::{insert, ns, rows, unlocked, write_key};

const CANARY: &str = "canary-5e1f-hunter2";
/// Planted in clear text on purpose: a search that does not find it proves nothing.
const CONTROL: &str = "control-77aa-visible";

fn secret(text: &str) -> Secret {
    Secret::new(text.to_owned())
}

/// How many files of a folder hold a text.
fn holding(folder: &Path, text: &str) -> usize {
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let holds = |path: &std::path::PathBuf| {
        std::fs::read(path).unwrap().windows(text.len()).any(|w| w == text.as_bytes())
    };
    files.filter(holds).count()
}

#[tokio::test]
async fn nothing_secret_is_on_disk_in_clear_text() {
    let dir = tempfile::tempdir().unwrap();
    let db = Db::open_file(&dir.path().join("x.db")).await.unwrap();
    let db = unlocked(db).await;
    let (mut sandbox, mut session) = rows(1, "box");
    sandbox.sandbox.env.insert("PASSWORD".to_owned(), CANARY.to_owned());
    sandbox.sandbox.tags.insert("control".to_owned(), CONTROL.to_owned());
    session.session.env.clone_from(&sandbox.sandbox.env);
    insert(&db, &sandbox, &session).await.unwrap();
    db.put_secret(&ns(), "S", "literal", &secret(CANARY), 1).await.unwrap();
    let id = ValueId::new(1, [1; 10]);
    db.put_values("t", [(&id, &secret(CANARY))], 1).await.unwrap();
    db.put_issuer_key("k", &secret(CANARY), 1).await.unwrap();
    // In the log, and then in the file itself.
    assert!(holding(dir.path(), CONTROL) > 0, "the search finds nothing");
    assert_eq!(holding(dir.path(), CANARY), 0);
    let read = db.sandbox(&sandbox.sandbox.id).await.unwrap().unwrap();
    assert_eq!(read.sandbox.env["PASSWORD"], CANARY);
    db.close().await;
    assert!(holding(dir.path(), CONTROL) > 0, "the search finds nothing");
    assert_eq!(holding(dir.path(), CANARY), 0);
}

/// A fresh database of the kind that the run is for, and its address.
async fn fresh() -> (tempfile::TempDir, Option<TestDatabase>, Address) {
    let dir = tempfile::tempdir().unwrap();
    let server = TestDatabase::chosen().unwrap();
    let address = match &server {
        Some(server) => Address::parse(server.url()).unwrap(),
        None => Address::file(&dir.path().join("x.db")),
    };
    (dir, server, address)
}

#[tokio::test]
async fn secrets_are_written_over_and_removed() {
    let (_dir, _server, address) = fresh().await;
    let db = unlocked(Db::open(&address).await.unwrap()).await;
    let other = Namespace { project: "other".to_owned(), ..ns() };
    let put = |ns: Namespace, text: &'static str, now| {
        let db = db.clone();
        async move { db.put_secret(&ns, "S", "literal", &secret(text), now).await.unwrap() }
    };
    put(ns(), "one", 1).await;
    put(other.clone(), "elsewhere", 2).await;
    let row = put(ns(), "two", 3).await;
    assert_eq!((row.version, row.created_at, row.updated_at), (2, 1, 3));
    let (read, text) = db.secret(&ns(), "S").await.unwrap().unwrap();
    assert_eq!((read, text.expose()), (row.clone(), "two"));
    assert_eq!(db.secrets(&ns()).await.unwrap(), [row]);
    assert_eq!(db.secret(&other, "S").await.unwrap().unwrap().1.expose(), "elsewhere");
    assert!(db.secret_is_there(&ns(), "S").await.unwrap());
    assert!(db.remove_secret(&ns(), "S").await.unwrap());
    assert!(!db.remove_secret(&ns(), "S").await.unwrap());
    assert!(!db.secret_is_there(&ns(), "S").await.unwrap());
    assert!(db.secret(&ns(), "S").await.unwrap().is_none());
    assert!(db.secret_is_there(&other, "S").await.unwrap());
}

#[tokio::test]
async fn a_key_is_made_once_and_never_another() {
    let (dir, _server, address) = fresh().await;
    let key = dir.path().join("deep.key");
    let db = Db::open(&address).await.unwrap();
    let locked = db.put_secret(&ns(), "S", "literal", &secret("x"), 1).await.unwrap_err();
    assert!(matches!(locked, StoreError::Vault(_)), "{locked:?}");
    db.unlock(&key).await.unwrap();
    let made = std::fs::read(&key).unwrap();
    assert_eq!(made.len(), 32);
    assert_eq!(std::fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    db.put_secret(&ns(), "S", "literal", &secret("x"), 1).await.unwrap();
    db.close().await;

    // The same key opens it again, and is not written over.
    let db = Db::open(&address).await.unwrap();
    db.unlock(&key).await.unwrap();
    assert_eq!(db.secret(&ns(), "S").await.unwrap().unwrap().1.expose(), "x");
    assert_eq!(std::fs::read(&key).unwrap(), made);
    db.close().await;

    let db = Db::open(&address).await.unwrap();
    let refused = async |what: &str| {
        let error = db.unlock(&key).await.unwrap_err().to_string();
        assert!(error.contains(what) && error.contains("deep.key"), "{what}: {error}");
    };
    std::fs::remove_file(&key).unwrap();
    refused("is missing").await;
    assert!(!key.exists(), "a new key would lock the secrets away");
    write_key(&key, 9);
    refused("is not the key").await;
    std::fs::write(&key, [1; 31]).unwrap();
    refused("31 bytes").await;
    std::fs::write(&key, &made).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o640)).unwrap();
    refused("chmod 600").await;
    std::fs::remove_file(&key).unwrap();
    std::fs::create_dir(&key).unwrap();
    refused("is not a file").await;
    std::fs::remove_dir(&key).unwrap();
    std::fs::write(&key, &made).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    db.unlock(&key).await.unwrap();
}

#[tokio::test]
async fn a_sealed_text_is_of_its_row() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.db");
    let db = unlocked(Db::open_file(&path).await.unwrap()).await;
    for (name, text) in [("A", "of a"), ("B", "of b")] {
        db.put_secret(&ns(), name, "literal", &secret(text), 1).await.unwrap();
    }
    db.close().await;
    change(&path, "UPDATE secrets SET sealed = (SELECT sealed FROM secrets WHERE name = 'A')")
        .await;
    let db = unlocked(Db::open_file(&path).await.unwrap()).await;
    assert_eq!(db.secret(&ns(), "A").await.unwrap().unwrap().1.expose(), "of a");
    let moved = db.secret(&ns(), "B").await.unwrap_err().to_string();
    assert!(moved.contains("another row") && !moved.contains("of a"), "{moved}");
}

#[tokio::test]
async fn environments_of_before_are_read_and_sealed_at_the_next_write() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.db");
    let db = unlocked(Db::open_file(&path).await.unwrap()).await;
    let (mut sandbox, session) = rows(1, "box");
    sandbox.sandbox.env.clear();
    insert(&db, &sandbox, &session).await.unwrap();
    db.close().await;
    // As a version without a vault wrote it.
    change(
        &path,
        "UPDATE sandboxes SET config = replace(config, '\"tags\"', '\"env\":{\"OLD\":\"clear-91\"},\"tags\"')",
    )
    .await;
    let config = || async { text(&path, "SELECT config FROM sandboxes").await };
    assert!(config().await.contains("clear-91"));
    let db = unlocked(Db::open_file(&path).await.unwrap()).await;
    let mut row = db.sandbox(&sandbox.sandbox.id).await.unwrap().unwrap();
    assert_eq!(row.sandbox.env["OLD"], "clear-91");
    let mut tx = db.begin(bivouac_store::Durability::Process).await.unwrap();
    tx.update_sandbox(&mut row).await.unwrap();
    tx.commit().await.unwrap();
    let read = db.sandbox(&sandbox.sandbox.id).await.unwrap().unwrap();
    assert_eq!(read.sandbox.env["OLD"], "clear-91");
    db.close().await;
    assert!(!config().await.contains("clear-91"), "{}", config().await);
}

async fn change(path: &Path, sql: &'static str) {
    sqlx::any::install_default_drivers();
    let pool = sqlx::AnyPool::connect(&format!("sqlite://{}", path.display())).await.unwrap();
    let done = sqlx::query(sql).execute(&pool).await.unwrap();
    assert!(done.rows_affected() > 0);
    pool.close().await;
}

async fn text(path: &Path, sql: &'static str) -> String {
    use sqlx::Row as _;
    sqlx::any::install_default_drivers();
    let pool = sqlx::AnyPool::connect(&format!("sqlite://{}", path.display())).await.unwrap();
    let row = sqlx::query(sql).fetch_one(&pool).await.unwrap();
    pool.close().await;
    row.get(0)
}
