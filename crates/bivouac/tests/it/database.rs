//! The engine's records on a PostgreSQL server: what a wrong address, a second engine and a server that
//! goes away do. Needs `BIVOUAC_TEST_POSTGRES` (script/test sets it), except where it says otherwise.

use std::time::Duration;

use anyhow::Result;
use bivouac_testkit::{Cli, Client, LONG, TestDatabase, TestServer, eventually, shared};
use serde_json::json;

const PASSWORD: &str = "hunter2-secret";

/// No server is needed to say that there is none.
#[test]
fn a_database_that_cannot_be_had_is_told_without_the_password() {
    let _lock = shared();
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let url = format!("postgres://u:{PASSWORD}@127.0.0.1:1/records");
    let serve = |args: &[&str]| {
        Cli::new(args).env("BIVOUAC_DATA_DIR", &data).env("BIVOUAC_DATABASE", &url).run()
    };
    let output = serve(&["serve", "--listen", "127.0.0.1:0"]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(text.contains("postgres://127.0.0.1:1/records"), "{text}");
    assert!(!text.contains(PASSWORD), "{text}");
    // As an argument everybody could read it.
    let output = serve(&["serve", "--listen", "127.0.0.1:0", "--database", &url]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(text.contains("BIVOUAC_DATABASE") && text.contains("PGPASSFILE"), "{text}");
    assert!(!text.contains(PASSWORD), "{text}");
}

/// A server with its records in a database of its own, whatever the run is for.
async fn on_postgres() -> Result<Option<(TestServer, TestDatabase)>> {
    let Some(database) = TestDatabase::new()? else {
        eprintln!("not run: BIVOUAC_TEST_POSTGRES is not set");
        return Ok(None);
    };
    let server = TestServer::builder().arg("--database").arg(database.url()).start().await?;
    Ok(Some((server, database)))
}

async fn create(client: &Client, name: &str) -> u16 {
    let body = json!({ "name": name, "projectId": client.project() });
    client.post("/v3/sandboxes", &body).await.status
}

#[tokio::test]
async fn a_second_engine_on_a_database_is_refused() -> Result<()> {
    let _lock = shared();
    let Some((_server, database)) = on_postgres().await? else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let output = Cli::new(&["serve", "--listen", "127.0.0.1:0", "--database", database.url()])
        .env("BIVOUAC_DATA_DIR", folder.path().join("data"))
        .run();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("another engine uses the database"), "{text}");
    Ok(())
}

/// What was acknowledged is there, nothing is invented, and work goes on by itself.
#[tokio::test]
async fn a_server_that_goes_away_in_the_middle_of_work_loses_nothing() -> Result<()> {
    let _lock = shared();
    let Some((server, database)) = on_postgres().await? else { return Ok(()) };
    let client = server.client("team_test")?;
    assert_eq!(create(&client, "before").await, 200);
    // A cut, as of a restart: nobody hears of it.
    database.cut()?;
    assert_eq!(create(&client, "after-a-cut").await, 200);
    // Away for longer than anybody waits: said as what it is, and when to come back.
    database.accept(false)?;
    database.cut()?;
    let body = json!({ "name": "never", "projectId": client.project() });
    let answer = client.post("/v3/sandboxes", &body).await;
    answer.refused(503, "database_unavailable");
    assert!(answer.headers.contains_key("retry-after"), "{:?}", answer.headers);
    database.accept(true)?;
    eventually("the engine has its database again", LONG, async || {
        let path = format!("/v2/sandboxes/before?projectId={}", client.project());
        match client.get(&path).await.status {
            200 => Ok(()),
            other => Err(other),
        }
    })
    .await;
    // The name of what was refused is free.
    assert_eq!(create(&client, "never").await, 200);
    for name in ["before", "after-a-cut", "never"] {
        let path = format!("/v2/sandboxes/{name}?projectId={}", client.project());
        let answer = client.delete(&path).await;
        assert_eq!(answer.status, 200, "{name}: {:?}", answer.json);
    }
    let rows = database.query("SELECT count(*) FROM sandboxes")?;
    assert_eq!(rows.trim(), "0");
    assert!(server.stop().await?.success());
    // Its connections ended with it.
    let count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()";
    eventually("all connections are closed", Duration::from_secs(10), async || {
        match database.query(count).map_err(|e| e.to_string())?.trim() {
            "1" => Ok(()),
            other => Err(other.to_owned()),
        }
    })
    .await;
    Ok(())
}
