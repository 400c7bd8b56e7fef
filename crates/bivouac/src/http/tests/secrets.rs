//! Secrets and credentials over HTTP, and the issuer's documents.

use super::*;

const SCOPE: &str = "teamId=t&projectId=p";

#[tokio::test]
async fn a_secret_goes_in_and_never_comes_out() {
    let bed = Bed::new().await;
    let path = |name: &str| format!("/api/v2/secrets/{name}?{SCOPE}");
    let list = format!("/api/v2/secrets?{SCOPE}");
    let set = bed.ok(Method::PUT, &path("GH"), Some(json!({"value": "hunter2"}))).await;
    assert_eq!(set["secret"]["name"], "GH");
    assert_eq!(set["secret"]["kind"], "literal");
    let again = bed.ok(Method::PUT, &path("GH"), Some(json!({"from": "env:HOME"}))).await;
    assert_eq!((&again["secret"]["kind"], &again["secret"]["version"]), (&json!("env"), &json!(2)));
    bed.ok(Method::PUT, &path("A"), Some(json!({"value": "hunter2"}))).await;
    let listed = bed.ok(Method::GET, &list, None).await;
    let names: Vec<&str> =
        listed["secrets"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["A", "GH"]);
    for answer in [&set, &again, &listed] {
        assert!(!answer.to_string().contains("hunter2"), "{answer}");
    }
    // There is no way to ask for one.
    let (status, _) = bed.get(&path("A")).await;
    assert_eq!(status, 405);
    let other = bed.ok(Method::GET, "/api/v2/secrets?teamId=t&projectId=q", None).await;
    assert_eq!(other["secrets"], json!([]));
    assert_eq!(bed.ok(Method::DELETE, &path("A"), None).await["name"], "A");
    assert_eq!(code(&bed.call(Method::DELETE, &path("A"), None).await), (404, "not_found"));
}

#[tokio::test]
async fn a_bad_secret_is_refused_without_repeating_it() {
    let bed = Bed::new().await;
    for (name, body) in [
        ("S", json!({})),
        ("S", json!({"value": ""})),
        ("S", json!({"value": 7})),
        ("S", json!({"value": "hunter2", "from": "env:X"})),
        ("S", json!({"valeu": "hunter2"})),
        ("S", json!({"from": "hunter2"})),
        ("S", json!({"from": "github-app:1/2", "value": "hunter2"})),
        ("a.b", json!({"value": "hunter2"})),
        ("S", json!({"value": "x".repeat(65_537)})),
    ] {
        let path = format!("/api/v2/secrets/{name}?{SCOPE}");
        let answer = bed.call(Method::PUT, &path, Some(body)).await;
        assert_eq!(code(&answer), (400, "bad_request"), "{}", answer.1);
        assert!(!answer.1.to_string().contains("hunter2"), "{}", answer.1);
    }
}

#[tokio::test]
async fn a_sandbox_is_given_credentials_by_name() {
    let bed = Bed::new().await;
    let body = json!({"name": "box", "projectId": "p", "ports": [],
        "credentials": [{"type": "github", "options": {"push": "true"}}]});
    let missing = bed.post("/api/v3/sandboxes?teamId=t", body.clone()).await;
    assert_eq!(code(&missing), (404, "not_found"));
    let said = missing.1["error"]["message"].as_str().unwrap().to_owned();
    assert!(said.contains("bivouac secret set GITHUB_TOKEN"), "{said}");
    for name in ["GITHUB_TOKEN", "API"] {
        let path = format!("/api/v2/secrets/{name}?{SCOPE}");
        bed.ok(Method::PUT, &path, Some(json!({"value": "hunter2"}))).await;
    }
    let made = bed.ok(Method::POST, "/api/v3/sandboxes?teamId=t", Some(body)).await;
    assert!(!made.to_string().contains("hunter2"), "{made}");

    let path = format!("/api/v2/sandboxes/box/credentials?{SCOPE}");
    let bearer = json!({"type": "bearer", "secret": "API", "name": "api",
        "options": {"host": "api.example.com", "env": "API_KEY"}, "expiresAt": 4_102_444_800_000_u64});
    let added = bed.ok(Method::POST, &path, Some(bearer)).await;
    assert_eq!(added["credential"]["hosts"], json!(["api.example.com"]));
    assert_eq!(added["env"], json!(["API_KEY"]));
    let listed = bed.ok(Method::GET, &path, None).await;
    assert_eq!(listed["credentials"][0]["name"], "api");
    assert_eq!(listed["credentials"][0]["secrets"], json!(["API"]));
    assert_eq!(listed["credentials"][0]["expiresAt"], 4_102_444_800_000_u64);
    assert_eq!(listed["credentials"][1]["name"], "github");
    for (bad, wanted) in [
        (json!({"type": "gitlab"}), 400),
        (json!({"type": "github", "options": {"psuh": "true"}}), 400),
        (json!({"type": "github", "token": "hunter2"}), 400),
        (json!({"type": "openai"}), 404),
        (json!({}), 400),
    ] {
        let answer = bed.post(&path, bad).await;
        assert_eq!(answer.0.as_u16(), wanted, "{}", answer.1);
        assert!(!answer.1.to_string().contains("hunter2"), "{}", answer.1);
    }
    let one = |name: &str| format!("/api/v2/sandboxes/box/credentials/{name}?{SCOPE}");
    let removed = bed.ok(Method::DELETE, &one("api"), None).await;
    assert_eq!(removed["credential"]["name"], "api");
    assert_eq!(code(&bed.call(Method::DELETE, &one("api"), None).await), (404, "not_found"));
}

#[tokio::test]
async fn the_issuer_s_documents_are_public() {
    let bed = Bed::new().await;
    let get = async |path: &str| {
        let answer = bed.send(Request::builder().uri(path).body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status(), 200, "{path}");
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        serde_json::from_slice::<Value>(&bytes).unwrap()
    };
    let discovery = get("/.well-known/openid-configuration").await;
    assert_eq!(discovery["issuer"], "http://127.0.0.1:7070");
    assert_eq!(discovery["jwks_uri"], "http://127.0.0.1:7070/.well-known/jwks");
    let keys = get("/.well-known/jwks").await;
    assert_eq!(keys["keys"][0]["alg"], "RS256");
    assert!(keys["keys"][0]["d"].is_null(), "the public half only");
    assert_eq!(get("/team/.well-known/jwks").await, keys);
}
