//! Who gets in, what is not there, and what every answer carries.

use super::*;

fn operations() -> Vec<(Method, String)> {
    let document = openapi::document(&api().into_openapi());
    let mut out = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            // A value that is no fixed segment of another path.
            let path = path.replace('{', "").replace('}', "-1");
            out.push((method.to_uppercase().parse().unwrap(), path));
        }
    }
    out
}

#[tokio::test]
async fn every_described_path_needs_the_token_and_is_served() {
    let bed = Bed::new().await;
    let operations = operations();
    assert!(operations.len() > 50);
    for (method, path) in operations {
        let request = Request::builder().method(method.clone()).uri(&path);
        let response = bed.send(request.body(Body::empty()).unwrap()).await;
        assert_eq!(response.status(), 401, "{method} {path}");
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        let (status, body) = bed.call(method.clone(), &path, None).await;
        assert_ne!(status, 405, "{method} {path}");
        let message = body["error"]["message"].as_str().unwrap_or_default();
        assert!(!message.starts_with("There is no path"), "{method} {path}");
        assert!(!status.is_server_error(), "{method} {path}: {status} {body}");
    }
}

#[tokio::test]
async fn paths_outside_of_the_api_need_none() {
    let bed = Bed::new().await;
    let plain = |path: &str| Request::builder().uri(path).body(Body::empty()).unwrap();
    let health = bed.send(plain("/health")).await;
    assert_eq!(health.status(), 200);
    for path in ["/.well-known/openid-configuration", "/team/.well-known/jwks"] {
        assert_eq!(bed.send(plain(path)).await.status(), 200, "{path}");
    }
    for path in ["/.well-known/other", "/a/b/.well-known/jwks", "/a%2Fb/.well-known/jwks"] {
        assert!(bed.send(plain(path)).await.status().is_client_error(), "{path}");
    }
    // What only looks as if it were outside does need it.
    for path in ["/api", "/api/", "/api/nothing", "/api/v2/sandboxes/../../health"] {
        assert_eq!(bed.send(plain(path)).await.status(), 401, "{path}");
    }
    for path in ["//api/v2/user", "/API/v2/user", "/%61pi/v2/user"] {
        assert_eq!(bed.send(plain(path)).await.status(), 404, "{path}");
    }
}

#[tokio::test]
async fn what_is_not_there_is_said_in_json() {
    let bed = Bed::new().await;
    assert_eq!(code(&bed.get("/api/v2/nothing").await), (404, "not_found"));
    let wrong = bed.call(Method::PUT, "/api/v2/sandboxes", None).await;
    assert_eq!(code(&wrong), (405, "method_not_allowed"));
    for path in [
        "/api/v2/sandboxes/no%20such%2Fname?teamId=t&projectId=p",
        "/api/v2/sandboxes/sessions/sbx_unknown",
        "/api/v2/sandboxes/sessions/sbx_00000000000000000000000000",
        "/api/v2/sandboxes/snapshots/snap_unknown",
        "/api/v2/sandboxes/snapshots/tree?snapshotId=snap_00000000000000000000000000",
        "/api/v1/sandboxes/sbx_00000000000000000000000000",
    ] {
        assert_eq!(code(&bed.get(path).await), (404, "not_found"), "{path}");
    }
    assert_eq!(code(&bed.get("/api/v2/sandboxes/%ff").await), (400, "bad_request"));
}

#[tokio::test]
async fn an_unsigned_jwt_with_the_token_gets_in() {
    let bed = Bed::new().await;
    let settings = crate::env::Settings {
        url: "http://127.0.0.1:7070".to_owned(),
        token: TOKEN.to_owned(),
        team: "t".to_owned(),
        project: "p".to_owned(),
    };
    let path = std::path::Path::new("/shim.mjs");
    let printed =
        crate::env::render(&settings, crate::env::Format::Json, None, crate::env::Way::Shim(path));
    let printed: Value = serde_json::from_str(&printed).unwrap();
    let jwt = printed["VERCEL_OIDC_TOKEN"].as_str().unwrap();
    let request = Request::builder().uri("/api/v2/user");
    let request = request.header("authorization", format!("Bearer {jwt}"));
    assert_eq!(bed.send(request.body(Body::empty()).unwrap()).await.status(), 200);
}

#[tokio::test]
async fn each_answer_carries_a_request_id() {
    let bed = Bed::new().await;
    let request = Request::builder().uri("/health").header("x-request-id", "mine-1");
    let response = bed.send(request.body(Body::empty()).unwrap()).await;
    assert_eq!(response.headers()["x-request-id"], "mine-1");
    let response = bed.send(Request::builder().uri("/no").body(Body::empty()).unwrap()).await;
    assert!(response.headers()["x-request-id"].to_str().unwrap().starts_with("req_"));
}

#[tokio::test]
async fn a_route_into_a_sandbox_is_never_the_api() {
    let bed = Bed::new().await;
    for host in ["abc.localhost:7070", "ABC.LOCALHOST", "a.b.localhost"] {
        let request = with_token(Method::GET, "/api/v2/user").header("host", host);
        let response = bed.send(request.body(Body::empty()).unwrap()).await;
        assert_eq!(response.status(), 404, "{host}");
        assert!(response.headers().get("x-request-id").is_none(), "{host}");
    }
    for host in ["localhost:7070", "127.0.0.1:7070", "vercel.com"] {
        let request = with_token(Method::GET, "/api/v2/user").header("host", host);
        let response = bed.send(request.body(Body::empty()).unwrap()).await;
        assert_eq!(response.status(), 200, "{host}");
    }
}

#[tokio::test]
async fn bodies_have_a_limit() {
    let bed = Bed::new().await;
    let body = json!({"name": "x".repeat(body::MAX_JSON)});
    assert_eq!(code(&bed.post("/api/v3/sandboxes", body).await), (413, "payload_too_large"));
    let request = with_token(Method::POST, "/api/v3/sandboxes").body(Body::from("{")).unwrap();
    assert_eq!(bed.send(request).await.status(), 400);
}

#[tokio::test]
async fn account_calls() {
    let bed = Bed::new().await;
    let user = bed.ok(Method::GET, "/api/v2/user", None).await;
    let team = user["user"]["defaultTeamId"].as_str().unwrap().to_owned();
    let team = bed.ok(Method::GET, &format!("/api/v2/teams/{team}"), None).await;
    assert!(team["slug"].is_string());
    let teams = bed.ok(Method::GET, "/api/v2/teams?limit=20", None).await;
    assert_eq!(teams["pagination"], json!({"count": 1, "next": null}));
    let path = "/api/v2/projects/vercel-sandbox-default-project?teamId=team_x";
    assert_eq!(bed.ok(Method::GET, path, None).await["accountId"], "team_x");
    let made = Some(json!({"name": "vercel-sandbox-default-project"}));
    bed.ok(Method::POST, "/api/v11/projects?teamId=team_x", made).await;
    assert_eq!(code(&bed.get("/api/v2/teams/a%20b").await), (400, "bad_request"));
    let engine = bed.ok(Method::GET, "/api/bivouac/v1/engine", None).await;
    assert_eq!((&engine["sessions"], &engine["images"]), (&json!(0), &json!(["host", "other"])));
}

#[tokio::test]
async fn a_terminal_s_ticket_is_shown_where_it_says() {
    let bed = Bed::new().await;
    let session = bed.create("box").await;
    let terminal = format!("/api/v2/sandboxes/sessions/{session}/interactive?teamId=t");
    let answer = bed.ok(Method::POST, &terminal, Some(json!({}))).await;
    assert_eq!(answer["url"], format!("ws://127.0.0.1:7070/interactive/{session}"));
    assert_eq!(answer["token"].as_str().unwrap().len(), 43);
    let elsewhere = format!("/api/v2/sandboxes/sessions/{session}/interactive?teamId=other");
    assert_eq!(bed.post(&elsewhere, json!({})).await.0, 404);
    let connect = format!("/interactive/{session}");
    assert_eq!(bed.get(&format!("{connect}?token=x")).await.0, 426);
    bed.ok(Method::POST, &format!("/api/v2/sandboxes/sessions/{session}/stop?teamId=t"), None)
        .await;
    assert_eq!(code(&bed.post(&terminal, json!({})).await), (410, "sandbox_stopped"));
}
