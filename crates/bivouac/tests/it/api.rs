//! The HTTP surface itself: who may call, shapes, lists, limits, bad input, `/v1`.

use std::collections::BTreeSet;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use bivouac_testkit::TestSandbox;
use reqwest::Method;
use serde_json::{Value, json};

use crate::server;

fn jwt(payload: &Value) -> String {
    let part = |v: &Value| BASE64_URL_SAFE_NO_PAD.encode(v.to_string());
    format!("{}.{}.x", part(&json!({ "alg": "none", "typ": "JWT" })), part(payload))
}

/// No `null` but the two that clients allow.
fn assert_no_null(value: &Value, at: &str) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let at = format!("{at}.{key}");
                assert!(
                    !value.is_null() || ["exitCode", "next", "prev"].contains(&key.as_str()),
                    "{at} is null"
                );
                assert_no_null(value, &at);
            }
        }
        Value::Array(items) => items.iter().for_each(|v| assert_no_null(v, at)),
        _ => {}
    }
}

#[tokio::test]
async fn who_may_call() {
    let server = server().await;
    let client = server.team("auth");
    let health = client.with_token("").get("/health").await;
    assert_eq!(health.status, 200, "{health}");
    let list = "/v2/sandboxes";
    let _ = client.get(list).await.ok();
    let good = jwt(&json!({ "owner_id": "auth", "project_id": "prj_test", "token": server.token }));
    let _ = client.with_token(&good).get(list).await.ok();
    let bad = [
        String::new(),
        "wrong".into(),
        format!("{}x", server.token),
        server.token[..server.token.len() - 1].to_owned(),
        jwt(&json!({ "owner_id": "auth", "project_id": "prj_test" })),
        jwt(&json!({ "owner_id": "auth", "project_id": "prj_test", "token": "wrong" })),
        jwt(&json!({ "owner_id": "auth", "project_id": "prj_test", "token": null })),
        "a.b.c".into(),
        "..".into(),
    ];
    for token in bad {
        for path in
            [list, "/v2/sandboxes/x", "/v1/sandboxes", "/api/bivouac/v1/engine", "/api/nope"]
        {
            client.with_token(&token).get(path).await.refused(401, "");
        }
    }
    let bare = reqwest::Client::new()
        .get(format!("{}/api/v2/sandboxes?teamId=auth&project=p", client.url()));
    assert_eq!(bare.send().await.unwrap().status(), 401);
    let bare = reqwest::Client::new()
        .get(format!("{}/api/v2/sandboxes?teamId=auth&project=p", client.url()))
        .header("authorization", format!("Basic {}", server.token));
    assert_eq!(bare.send().await.unwrap().status(), 401);
    // The token is nowhere in the log.
    let log = std::fs::read_to_string(&server.log).unwrap();
    assert!(!log.contains(&server.token), "the token is in the log");
}

#[tokio::test]
async fn create_answers_with_the_shapes_that_clients_check() {
    let server = server().await;
    let client = server.team("shapes");
    let body = json!({ "name": "shape", "ports": [3000, 3001], "timeout": 600_000, "env": { "SECRET": "s3cr3t" } });
    let sandbox = TestSandbox::create(&client, body).await;
    let view = &sandbox.view;
    assert_no_null(view, "create");
    for field in ["id", "region", "status", "cwd", "runtime"] {
        assert!(view["session"][field].is_string(), "session.{field}: {view}");
    }
    for field in ["memory", "vcpus", "timeout", "requestedAt", "createdAt", "updatedAt"] {
        assert!(view["session"][field].is_i64(), "session.{field}: {view}");
    }
    for field in ["name", "currentSessionId", "status"] {
        assert!(view["sandbox"][field].is_string(), "sandbox.{field}: {view}");
    }
    assert_eq!(view["sandbox"]["currentSessionId"], view["session"]["id"]);
    assert_eq!((&view["session"]["vcpus"], &view["session"]["memory"]), (&json!(2), &json!(4096)));
    assert_eq!(view["session"]["cwd"], "/vercel/sandbox");
    assert_eq!(view["session"]["timeout"], 600_000);
    let routes = view["routes"].as_array().unwrap();
    assert_eq!(routes.len(), 2);
    let labels: BTreeSet<&str> = routes.iter().map(|r| r["subdomain"].as_str().unwrap()).collect();
    assert_eq!(labels.len(), 2, "subdomains are unique: {view}");
    for label in labels {
        let good = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        assert!(label.len() <= 63 && label.bytes().all(good) && !label.starts_with('-'), "{label}");
    }
    assert!(
        !view.to_string().contains("s3cr3t"),
        "values of the environment are not read back: {view}"
    );
    let mode = &view["session"]["networkPolicy"]["mode"];
    assert!(mode == "allow-all" || mode == "deny-all" || mode == "custom", "{view}");
    // The generated name is a name.
    let unnamed = TestSandbox::create(&client, json!({})).await;
    assert!(
        unnamed.name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_'),
        "{}",
        unnamed.name
    );
    // Every version of the create answers alike.
    for version in ["v2", "v4"] {
        let answer = client
            .post(&format!("/{version}/sandboxes"), &json!({ "projectId": client.project() }))
            .await
            .ok();
        assert!(
            answer["session"]["runtime"].is_string() && answer["routes"] == json!([]),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn bad_creates_change_nothing() {
    let server = server().await;
    let client = server.team("bad-creates");
    let sixteen: Vec<u32> = (3000..3016).collect();
    let cases = [
        json!({ "name": "a/b" }),
        json!({ "name": "x".repeat(129) }),
        json!({ "name": "" }),
        json!({ "name": "sessions" }),
        json!({ "name": 7 }),
        json!({ "timeout": 999 }),
        json!({ "timeout": 86_400_001 }),
        json!({ "timeout": "5m" }),
        json!({ "timeout": 1e300 }),
        json!({ "resources": { "vcpus": 3 } }),
        json!({ "resources": { "vcpus": 0 } }),
        json!({ "resources": { "vcpus": 2, "memory": 1 } }),
        json!({ "ports": sixteen }),
        json!({ "ports": [80] }),
        json!({ "ports": [3000, 3000] }),
        json!({ "ports": ["3000"] }),
        json!({ "tags": { "k": "v".repeat(257) } }),
        json!({ "env": { "A": "x\u{0}" } }),
        json!({ "env": [] }),
        json!({ "keepLastSnapshots": { "count": 0 } }),
        json!({ "region": "iad1", "failoverRegions": ["iad1"] }),
        json!({ "source": { "type": "magic" } }),
        json!({ "networkPolicy": { "mode": "sometimes" } }),
        json!({ "runtime": "node22", "image": "x" }),
    ];
    for case in cases {
        let answer = TestSandbox::try_create(&client, case.clone()).await;
        let answer = answer.err().unwrap_or_else(|| panic!("accepted: {case}"));
        assert!(answer.status == 400 || answer.status == 422, "{case}: {answer}");
        answer.refused(answer.status, "");
    }
    let image =
        TestSandbox::try_create(&client, json!({ "image": "no/such:image" })).await.unwrap_err();
    image.refused(404, "not_found");
    let from = json!({ "source": { "type": "snapshot", "snapshotId": "snap_00000000000000000000000000" } });
    let missing = TestSandbox::try_create(&client, from).await.unwrap_err();
    missing.refused(410, "snapshot_not_found");
    let raw = async |body: &str| {
        let request = client.request(Method::POST, "/v3/sandboxes");
        client.send(request.header("content-type", "application/json").body(body.to_owned())).await
    };
    for body in ["{", "[]", "null", "{\"projectId\":\"p\"", "\u{feff}{}"] {
        let answer = raw(body).await;
        assert!(answer.status == 400 || answer.status == 422, "{body:?}: {answer}");
    }
    let huge =
        format!("{{\"projectId\":\"prj_test\",\"env\":{{\"A\":\"{}\"}}}}", "x".repeat(20 << 20));
    let request = client.request(Method::POST, "/v3/sandboxes");
    let request = request.header("content-type", "application/json").body(huge);
    // Refused, or cut off while it is being sent; never taken.
    if let Ok(answer) = client.try_send(request).await {
        assert!(answer.status == 413 || answer.status == 400, "{}", answer.status);
    }
    let nested = format!("{{\"projectId\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let answer = raw(&nested).await;
    assert!((400..500).contains(&answer.status), "{}", answer.status);
    let list = client.get("/v2/sandboxes").await.ok();
    assert_eq!(list["sandboxes"], json!([]), "a refused create left a sandbox");
    assert_eq!(list["pagination"], json!({ "count": 0, "next": null }));
}

#[tokio::test]
async fn what_is_not_there() {
    let server = server().await;
    let client = server.team("missing");
    client.get("/v2/sandboxes/nope").await.refused(404, "not_found");
    client
        .get("/v2/sandboxes/sessions/sbx_00000000000000000000000000")
        .await
        .refused(404, "not_found");
    client.get("/v2/sandboxes/sessions/..%2f..%2fx").await.refused(404, "");
    client.get("/v2/sandboxes/a%2Fb").await.refused(404, "");
    client.get("/v2/nope").await.refused(404, "");
    client.get("/api/v9/sandboxes").await.refused(404, "");
    client.send(client.request(Method::PUT, "/v2/sandboxes/x")).await.refused(405, "");
    let document = client.get("/api/openapi.json").await.ok();
    assert!(document["openapi"].as_str().unwrap().starts_with("3."), "no OpenAPI document");
    for path in ["/v3/sandboxes", "/v2/sandboxes/sessions/{"] {
        let paths = document["paths"].as_object().unwrap();
        assert!(paths.keys().any(|k| k.contains(path)), "{path} is not in the document");
    }
    let engine = client.get("/api/bivouac/v1/engine").await.ok();
    assert_eq!(engine["pid"], json!(server.pid()));
    assert!(
        engine["images"].as_array().unwrap().iter().any(|i| i.to_string().contains("host")),
        "{engine}"
    );
}

#[tokio::test]
async fn lists_page_sort_and_filter() {
    let server = server().await;
    let client = server.team("lists");
    for i in 0..5 {
        let tags = if i % 2 == 0 { json!({ "env": "x" }) } else { json!({ "env": "y" }) };
        let name = format!("{}-{i}", if i < 3 { "apple" } else { "pear" });
        let _ = TestSandbox::create(
            &client,
            json!({ "name": name, "tags": tags, "persistent": false }),
        )
        .await;
    }
    let names = |v: &Value| -> Vec<String> {
        v["sandboxes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|s| s["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    for _ in 0..5 {
        let page = client.get(&format!("/v2/sandboxes?limit=2{cursor}")).await.ok();
        assert_no_null(&page, "list");
        seen.extend(names(&page));
        match page["pagination"]["next"].as_str() {
            Some(next) => cursor = format!("&cursor={}", urlencode(next)),
            None => break,
        }
    }
    assert_eq!(
        seen,
        ["pear-4", "pear-3", "apple-2", "apple-1", "apple-0"],
        "newest first, none twice"
    );
    let page = async |query: &str| names(&client.get(&format!("/v2/sandboxes?{query}")).await.ok());
    assert_eq!(page("sortBy=name&sortOrder=asc&namePrefix=pear").await, ["pear-3", "pear-4"]);
    assert_eq!(page("sortBy=name&sortOrder=desc").await[0], "pear-4");
    assert_eq!(page("sortBy=createdAt&sortOrder=asc").await[0], "apple-0");
    assert_eq!(page("tags=env:y").await, ["pear-3", "apple-1"]);
    assert!(page("tags=env:z").await.is_empty());
    for bad in [
        "limit=0",
        "limit=51",
        "limit=x",
        "sortBy=color",
        "sortOrder=up",
        "cursor=nonsense",
        "tags=plain",
    ] {
        client.get(&format!("/v2/sandboxes?{bad}")).await.refused(400, "");
    }
    let sessions = client.get("/v2/sandboxes/sessions?name=pear-3").await.ok();
    assert_eq!(sessions["sessions"].as_array().unwrap().len(), 1, "{sessions}");
    assert_no_null(&sessions, "sessions");
    let own = client.get("/api/bivouac/v1/sandboxes?all=true&limit=50").await.ok();
    let mine = own["sandboxes"].as_array().unwrap().iter().find(|s| s["name"] == "pear-3").unwrap();
    assert_eq!((&mine["team"], &mine["project"]), (&json!("lists"), &json!("prj_test")));
}

fn urlencode(text: &str) -> String {
    text.bytes()
        .map(|b| {
            if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") }
        })
        .collect()
}

#[tokio::test]
async fn policies_are_stored_and_read_back_without_secrets() {
    let server = server().await;
    let client = server.team("policies");
    let sandbox =
        TestSandbox::create(&client, json!({ "networkPolicy": { "mode": "deny-all" } })).await;
    assert_eq!(sandbox.view["session"]["networkPolicy"], json!({ "mode": "deny-all" }));
    let policy = json!({ "allow": { "api.example.com": [
        { "transform": [{ "headers": { "authorization": "Bearer s3cr3t-value" } }] } ], "*.example.org": [] } });
    let set = sandbox.post("/network-policy", &policy).await.ok();
    let read = &set["session"]["networkPolicy"];
    assert_eq!(read["mode"], "custom", "{set}");
    assert!(!set.to_string().contains("s3cr3t"), "{set}");
    assert_eq!(read["injectionRules"][0]["headerNames"], json!(["authorization"]), "{set}");
    for bad in [
        json!({ "allow": 5 }),
        json!({ "mode": "x" }),
        json!({ "allow": ["a b"] }),
        json!({ "subnets": { "allow": ["1.2.3"] } }),
    ] {
        sandbox.post("/network-policy", &bad).await.refused(400, "");
    }
    let kept = sandbox.get(false).await.ok();
    assert_eq!(&kept["session"]["networkPolicy"], read, "a refusal changes nothing");
    let files = std::process::Command::new("grep")
        .args(["-rl", "s3cr3t-value", "--exclude-dir=pool"])
        .arg(&server.data)
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&files.stdout),
        "",
        "the secret is on the disk in clear text"
    );
}

#[tokio::test]
async fn the_first_version_still_works() {
    let server = server().await;
    let client = server.team("v1");
    let made = client
        .post(
            "/v1/sandboxes",
            &json!({ "projectId": client.project(), "ports": [3000], "timeout": 60_000 }),
        )
        .await
        .ok();
    assert_no_null(&made, "v1");
    let id = made["sandbox"]["id"].as_str().unwrap().to_owned();
    assert!(id.starts_with("sbx_") && made["sandbox"]["runtime"].is_string(), "{made}");
    assert_eq!(made["sandbox"]["status"], "running");
    let path = |tail: &str| format!("/v1/sandboxes/{id}{tail}");
    let answer = client
        .post(
            &path("/cmd"),
            &json!({ "command": "sh", "args": ["-c", "echo v1; exit 3"], "env": {} }),
        )
        .await
        .ok();
    assert_eq!(answer["command"]["sandboxId"], json!(id), "{answer}");
    let cmd = answer["command"]["id"].as_str().unwrap().to_owned();
    let waited = client.get(&path(&format!("/cmd/{cmd}?wait=true"))).await.ok();
    assert_eq!(waited["command"]["exitCode"], 3);
    let mut lines = client
        .stream(client.request(Method::GET, &path(&format!("/cmd/{cmd}/logs"))))
        .await
        .unwrap();
    let line = lines.next(bivouac_testkit::SHORT).await.unwrap().unwrap();
    assert_eq!(line, json!({ "stream": "stdout", "data": "v1\n" }));
    let body = json!({ "command": "true", "args": [], "env": {}, "wait": true });
    let mut lines =
        client.stream(client.request(Method::POST, &path("/cmd")).json(&body)).await.unwrap();
    let mut records = 0;
    while let Some(line) = lines.next(bivouac_testkit::SHORT).await.unwrap() {
        assert!(line["command"].is_object(), "only command records: {line}");
        records += 1;
    }
    assert_eq!(records, 2);
    let sleep = client
        .post(&path("/cmd"), &json!({ "command": "sleep", "args": ["86060"], "env": {} }))
        .await
        .ok();
    let sleep = sleep["command"]["id"].as_str().unwrap();
    let _ = client.post(&path(&format!("/{sleep}/kill")), &json!({ "signal": 15 })).await.ok();
    let _ = client.post(&path("/fs/mkdir"), &json!({ "path": "made" })).await.ok();
    let _ = client.post(&path("/extend-timeout"), &json!({ "duration": 5000 })).await.ok();
    let list = client.get("/v1/sandboxes?limit=10").await.ok();
    assert!(list["pagination"].as_object().unwrap().contains_key("prev"), "{list}");
    assert_eq!(list["sandboxes"][0]["id"], json!(id), "{list}");
    let taken = client.post(&path("/snapshot"), &json!({})).await.ok();
    assert_eq!(taken["snapshot"]["sourceSandboxId"], json!(id), "{taken}");
    let stopped = client.post(&path("/stop"), &json!({})).await.ok();
    assert!(stopped["sandbox"]["status"].is_string(), "{stopped}");
    client.get("/v1/sandboxes/sbx_00000000000000000000000000").await.refused(404, "");
}
