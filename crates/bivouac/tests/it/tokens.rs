//! Principals through the front door: scoped tokens at the command line and the API, their end while something is
//! open, and what is written about their use.

use bivouac_testkit::{Client, SHORT, TestSandbox, TestServer, eventually, shared};
use reqwest::Method;
use serde_json::{Value, json};

use crate::secrets::holding;
use crate::server;

/// Makes a token with the engine's own; answers the whole of it and its id.
async fn token(
    server: &TestServer,
    name: &str,
    namespaces: &[&str],
    verbs: &[&str],
) -> (String, String) {
    until(server, name, namespaces, verbs, None).await
}

async fn until(
    server: &TestServer,
    name: &str,
    namespaces: &[&str],
    verbs: &[&str],
    expires_at: Option<i64>,
) -> (String, String) {
    let body =
        json!({ "name": name, "namespaces": namespaces, "verbs": verbs, "expiresAt": expires_at });
    let made = server.client("x").unwrap().post("/api/bivouac/v1/tokens", &body).await;
    assert_eq!(made.status, 201, "{made}");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    (text(&made.json["secret"]), text(&made.json["token"]["id"]))
}

fn now_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    i64::try_from(since.as_millis()).unwrap()
}

/// Exit code and standard error.
fn said(output: &std::process::Output) -> (Option<i32>, String) {
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_works_with_a_scoped_token_and_nothing_else() {
    let server = server().await;
    let cli = |args: &[&str]| server.cli(args);
    let secret = cli(&[
        "token",
        "create",
        "cli-one",
        "-n",
        "tok-cli/web",
        "-n",
        "tok-cli/api",
        "--expires",
        "1h",
    ]);
    let secret = secret.good().trim().to_owned();
    assert!(
        secret.starts_with("bvt_") && !secret.contains(char::is_whitespace),
        "one word on stdout"
    );
    let scoped = |args: &[&str]| server.cli(args).env("BIVOUAC_TOKEN", &secret);
    let who = scoped(&["token", "whoami", "--json"]).json();
    assert_eq!(who["name"], "cli-one");
    assert_eq!(who["namespaces"], json!(["tok-cli/api", "tok-cli/web"]));
    assert_eq!(who["verbs"], json!(["read", "exec", "preview", "write"]));
    // The first one, as nobody names any.
    let made = scoped(&["create", "box", "--ephemeral", "--json"]).json();
    assert_eq!(made["sandbox"]["name"], "box");
    assert_eq!(scoped(&["exec", "box", "--", "echo", "hello"]).good(), "hello\n");
    assert_eq!(cli(&["-n", "tok-cli/api", "ls", "-q"]).good(), "box\n");
    let _ = cli(&["-n", "tok-cli/other", "create", "hidden", "--ephemeral"]).good();
    assert_eq!(scoped(&["ls", "-A", "-q"]).good(), "box\n");
    assert_eq!(scoped(&["-n", "tok-cli/web", "run", "--", "echo", "there"]).good(), "there\n");
    // What lies outside is not there, and the hint says why.
    let (code, err) = said(&scoped(&["-n", "tok-cli/other", "exec", "hidden", "--", "true"]).run());
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("was not found") && err.contains("token whoami"), "{err}");
    let (code, err) = said(&scoped(&["secret", "rm", "S"]).run());
    assert_eq!(code, Some(1));
    assert!(err.contains("'policy'") && err.contains("--allow policy"), "{err}");
    let (_, err) = said(&scoped(&["gc", "--dry-run"]).run());
    assert!(err.contains("'admin'"), "{err}");
    // What points other clients at the engine points them there as this token.
    let printed = scoped(&["env", "--json"]).json();
    assert_eq!(printed["BIVOUAC_TOKEN"], json!(secret));
    assert_eq!(
        (&printed["VERCEL_TEAM_ID"], &printed["VERCEL_PROJECT_ID"]),
        (&json!("tok-cli"), &json!("api"))
    );
    let jwt = printed["VERCEL_OIDC_TOKEN"].as_str().unwrap();
    let client = Client::new(&server.url, jwt, "tok-cli", "api").unwrap();
    assert_eq!(client.get("/v2/sandboxes/box").await.ok()["sandbox"]["name"], "box");
    // It hands on what it has, and its own goes with it.
    let child = scoped(&["token", "create", "child", "--allow", "read"]).good().trim().to_owned();
    let refused = scoped(&["token", "create", "more", "--allow", "policy"]).run();
    assert!(said(&refused).1.contains("cannot hand on"), "{refused:?}");
    let listed = scoped(&["token", "ls", "--json"]).json();
    let names: Vec<&str> =
        listed.as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["cli-one", "cli-one/child"]);
    let child_ls = || server.cli(&["ls", "-q"]).env("BIVOUAC_TOKEN", &child);
    assert_eq!(child_ls().good(), "box\n");
    let _ = scoped(&["rm", "box"]).good();
    let gone = cli(&["token", "revoke", "cli-one", "--json"]).json();
    assert_eq!(gone[0]["tokens"].as_array().unwrap().len(), 2, "{gone}");
    for output in [child_ls().run(), scoped(&["ls"]).run()] {
        let (code, err) = said(&output);
        assert_eq!(code, Some(1));
        assert!(err.contains("expired or was revoked"), "{err}");
    }
    let _ = cli(&["-n", "tok-cli/other", "rm", "hidden"]).good();
}

/// A stream that was cut: neither ended in order nor went on.
#[track_caller]
fn broke_off(next: anyhow::Result<Option<Value>>) {
    let error = format!("{:#}", next.expect_err("the stream has ended in order, or goes on"));
    assert!(!error.contains("no line within"), "the stream goes on: {error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_open_ends_with_its_token_and_the_work_goes_on() {
    let server = server().await;
    let owner = server.team("tok-open");
    let sandbox = TestSandbox::create(&owner, json!({ "persistent": false })).await;
    let argv = ["sh", "-c", "echo begun; exec sleep 1000"];
    let command = sandbox.start(&argv, json!({})).await;
    let name = "tok-open";
    let (revoked, _) = token(&server, name, &["tok-open/prj_test"], &["read", "exec"]).await;
    let (short, _) =
        until(&server, "tok-short", &["tok-open/prj_test"], &["read"], Some(now_ms() + 3_000))
            .await;
    let logs = format!("/v2/sandboxes/sessions/{}/cmd/{command}/logs", sandbox.session);
    let wait = format!("/v2/sandboxes/sessions/{}/cmd/{command}?wait=true", sandbox.session);
    let open = async |secret: &str| {
        let client = Client::new(&server.url, secret, "tok-open", "prj_test").unwrap();
        let mut lines = client.stream(client.request(Method::GET, &logs)).await.unwrap();
        assert_eq!(lines.next(SHORT).await.unwrap().unwrap()["data"], "begun\n");
        (client, lines)
    };
    let (client, mut lines) = open(&revoked).await;
    let (short_client, mut short_lines) = open(&short).await;
    let waiting = {
        let (client, wait) = (client.clone(), wait.clone());
        tokio::spawn(async move { client.try_send(client.request(Method::GET, &wait)).await })
    };
    // Its answer breaks off: nobody takes it for the end of the command.
    broke_off(short_lines.next(SHORT).await);
    assert_eq!(owner.delete(&format!("/api/bivouac/v1/tokens/{name}")).await.status, 200);
    broke_off(lines.next(SHORT).await);
    // Its answer had begun, with blanks: it is never whole.
    assert!(waiting.await.unwrap().is_err(), "a wait has outlived its token");
    // Unknown, expired and revoked are told in the same words.
    let nobody = format!("bvt_{}_{}", "0".repeat(16), "0".repeat(64));
    let unknown = Client::new(&server.url, &nobody, "tok-open", "prj_test").unwrap();
    let unknown = unknown.get(&wait).await;
    for client in [client, short_client] {
        let answer = client.get(&wait).await;
        answer.refused(401, "unauthorized");
        assert_eq!(answer.bytes, unknown.bytes);
    }
    let now = sandbox.command(&command).await.ok();
    assert_eq!(now["command"]["exitCode"], Value::Null, "the command goes on: {now}");
    let _ = sandbox.delete().await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_use_is_written_down_and_no_secret_is() {
    let _lock = shared().unwrap();
    let mut server = TestServer::builder().embedded_database().start().await.unwrap();
    let (secret, id) =
        token(&server, "used", &["tok-log/prj_test"], &["read", "exec", "write"]).await;
    let client = Client::new(&server.url, &secret, "tok-log", "prj_test").unwrap();
    let sandbox = TestSandbox::create(&client, json!({ "persistent": false })).await;
    let ran = sandbox
        .run_with(&["echo", "canary-in-argv"], json!({ "env": { "K": "canary-in-env" } }))
        .await;
    assert_eq!(ran.good(), "canary-in-argv");
    let _ = client.get("/v2/secrets?namePrefix=canary-in-query").await.ok();
    client
        .put("/v2/secrets/S", &json!({ "value": "canary-in-body" }))
        .await
        .refused(403, "forbidden");
    client.get("/api/bivouac/v1/sandboxes/none/policy").await.refused(404, "not_found");
    let stranger = Client::new(&server.url, "canary-in-token", "tok-log", "prj_test").unwrap();
    stranger.get("/v2/sandboxes").await.refused(401, "unauthorized");
    let read = |args: &[&str]| -> Vec<Value> {
        let text = server.cli(&[&["token", "log", "--json"], args].concat()).good();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let of = |what: &str, lines: &[Value]| -> Option<Value> {
        lines.iter().find(|line| line["what"] == what).cloned()
    };
    let put = "PUT /api/v2/secrets/{name}";
    eventually("the uses are written", SHORT, async || {
        of(put, &read(&["--token", "used"])).ok_or("not yet")
    })
    .await;
    let lines = read(&["--token", "used"]);
    assert!(lines.iter().all(|line| line["token"] == json!(id)), "only its own: {lines:?}");
    let started = of("POST /api/v2/sandboxes/sessions/{id}/cmd", &lines).unwrap();
    assert_eq!(
        (&started["principal"], &started["door"], &started["verb"], &started["namespace"]),
        (&json!("used"), &json!("http"), &json!("exec"), &json!("tok-log/prj_test"))
    );
    assert_eq!((&started["outcome"], &started["object"]), (&json!(200), &json!(sandbox.session)));
    assert!(started["address"].is_string() && started["request"].is_string(), "{started}");
    assert_eq!(of(put, &lines).unwrap()["outcome"], 403);
    let policy = of("GET /api/bivouac/v1/sandboxes/{name}/policy", &lines).unwrap();
    assert_eq!((&policy["outcome"], &policy["object"]), (&json!(404), &json!("none")));
    let all = read(&[]);
    let refused = all.iter().find(|line| line["outcome"] == 401).unwrap();
    assert!(refused.get("principal").is_none(), "{refused}");
    let shown = server.cli(&["token", "log"]).good();
    assert!(shown.contains(" used http 403 PUT "), "{shown}");
    // Only for who rules.
    client.get("/api/bivouac/v1/access-log").await.refused(403, "forbidden");
    let _ = sandbox.delete().await.ok();
    // What was written last is there after an orderly end, and no secret is, anywhere.
    let _ = client.get("/v2/sandboxes/drives?limit=7").await.ok();
    assert!(server.stop().await.unwrap().success());
    let file = std::fs::read_to_string(server.data.join("access.jsonl")).unwrap();
    assert!(file.contains("GET /api/v2/sandboxes/drives"), "{file}");
    for canary in
        ["canary-in-env", "canary-in-query", "canary-in-body", "canary-in-token", "canary-in-argv"]
    {
        assert!(!file.contains(canary), "{canary}");
    }
    assert!(!holding(&server.data, &id).is_empty(), "positive control: its id is");
    let half = secret.rsplit_once('_').unwrap().1;
    assert_eq!(holding(&server.data, half), Vec::<String>::new());
    let log = std::fs::read_to_string(&server.log).unwrap();
    assert!(!log.contains(half) && log.contains(&id), "{log}");
    server.restart().await.unwrap();
    let client = Client::new(&server.url, &secret, "tok-log", "prj_test").unwrap();
    let _ = client.get("/v2/sandboxes").await.ok();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_is_followed() {
    let server = server().await;
    let (secret, _) = token(&server, "tok-follow", &["tok-follow/prj_test"], &["read"]).await;
    let own = server.team("tok-follow");
    let path = "/api/bivouac/v1/access-log?follow=true&token=tok-follow";
    let mut lines = own.stream(own.request(Method::GET, path)).await.unwrap();
    let client = Client::new(&server.url, &secret, "tok-follow", "prj_test").unwrap();
    let _ = client.get("/v2/sandboxes").await.ok();
    let line = lines.next(SHORT).await.unwrap().unwrap();
    assert_eq!((&line["what"], &line["outcome"]), (&json!("GET /api/v2/sandboxes"), &json!(200)));
}
