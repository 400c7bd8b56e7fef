//! Policies as a whole: read, replace, edit, explain, learn, audit lines.

use std::time::Duration;

use super::*;
use bivouac_types::id::SessionId;

const PLACE: &str = "/api/bivouac/v1/sandboxes/box";

fn at(tail: &str) -> String {
    let sign = if tail.contains('?') { '&' } else { '?' };
    format!("{PLACE}/{tail}{sign}teamId=t&projectId=p")
}

#[tokio::test]
async fn a_policy_is_shown_and_changed_as_a_whole() {
    let bed = Bed::new().await;
    bed.create("box").await;
    let shown = bed.ok(Method::GET, &at("policy"), None).await;
    assert_eq!(
        (&shown["mode"], &shown["policy"]),
        (&json!("allow-all"), &json!({"mode": "allow-all"}))
    );
    assert_eq!((&shown["generation"], &shown["learning"]), (&json!(1), &json!(false)));
    assert!(shown["session"].is_string() && shown.get("next").is_none());

    let headers = json!({"headers": {"authorization": "Bearer canary7f3a"}});
    let policy = json!({"allow": {"a.test": [{"transform": [headers]}]}});
    let set = bed.ok(Method::PUT, &at("policy"), Some(policy)).await;
    assert_eq!((&set["mode"], &set["changed"]), (&json!("custom"), &json!(true)));
    assert!(!set.to_string().contains("canary7f3a"));
    let edited = json!({"allow": ["b.test", "192.0.2.0/24"], "deny": ["198.51.100.0/24"]});
    let set = bed.ok(Method::PATCH, &at("policy"), Some(edited)).await;
    assert_eq!(
        set["policy"]["subnets"],
        json!({"allow": ["192.0.2.0/24"], "deny": ["198.51.100.0/24"]})
    );
    assert_eq!(set["policy"]["allow"]["b.test"], json!([]));
    assert!(set["policy"]["allow"]["a.test"][0]["transform"].is_array(), "the rule stays");
    let view = bed.ok(Method::GET, "/api/v2/sandboxes/box?teamId=t&projectId=p", None).await;
    assert_eq!(view["session"]["networkPolicy"], view["sandbox"]["networkPolicy"]);
    assert_eq!(view["session"]["networkPolicy"]["allowedDomains"], json!(["a.test", "b.test"]));
    // What the session alone is told is not the sandbox's.
    let session = view["session"]["id"].as_str().unwrap();
    let path = format!("/api/v2/sandboxes/sessions/{session}/network-policy?teamId=t");
    bed.ok(Method::POST, &path, Some(json!({"mode": "deny-all"}))).await;
    let shown = bed.ok(Method::GET, &at("policy"), None).await;
    assert_eq!((&shown["mode"], &shown["next"]), (&json!("deny-all"), &set["policy"]));
}

#[tokio::test]
async fn bad_changes_name_the_field() {
    let bed = Bed::new().await;
    bed.create("box").await;
    for (method, body, field) in [
        (Method::PUT, json!({"allow": ["foo*.com"]}), "policy.allow[0]"),
        (Method::PUT, json!({"mode": "some"}), "policy.mode"),
        (Method::PATCH, json!({"allow": ["a b"]}), "allow[0]"),
        (Method::PATCH, json!({"deny": ["10.0.0.1/8"]}), "deny[0]"),
    ] {
        let (status, answer) = bed.call(method, &at("policy"), Some(body)).await;
        let message = answer["error"]["message"].as_str().unwrap().to_owned();
        assert!(status == 400 && message.starts_with(&format!("Invalid {field}: ")), "{message}");
    }
    let (status, _) = bed.call(Method::PATCH, &at("policy"), Some(json!({"alow": []}))).await;
    assert_eq!(status, 400);
    assert_eq!(bed.ok(Method::GET, &at("policy"), None).await["generation"], 1);
    let nobody = "/api/bivouac/v1/sandboxes/nobody/policy?teamId=t&projectId=p";
    assert_eq!(code(&bed.get(nobody).await), (404, "not_found"));
}

#[tokio::test]
async fn audit_lines_are_records() {
    let bed = Bed::new().await;
    let session = SessionId::parse(&bed.create("box").await).unwrap();
    bed.sim.audit_append(&session, "{\"kind\":\"dns\",\"host\":\"é.test\"}\n".as_bytes());
    bed.sim.audit_append(&session, b"{\"kind\":\"http\"}\n");
    let read = async |tail: &str| {
        let request = with_token(Method::GET, &at(tail)).body(Body::empty()).unwrap();
        let response = bed.send(request).await;
        assert_eq!(response.headers()["content-type"], "application/x-ndjson");
        lines(response).await
    };
    let all = read("egress-log").await;
    assert_eq!(all.len(), 2);
    assert_eq!(all[0]["host"], "é.test");
    let rest = read(&format!("egress-log?since={}", all[0]["next"])).await;
    assert_eq!(rest, all[1..]);
    assert_eq!(bed.get(&at("egress-log?since=x")).await.0, 400);
    assert_eq!(bed.get(&at("egress-log?session=nonsense")).await.0, 404);
}

#[tokio::test]
async fn a_session_is_open_while_its_stream_is_read() {
    let bed = Bed::new().await;
    bed.create("box").await;
    bed.ok(Method::PUT, &at("policy"), Some(json!({"mode": "deny-all"}))).await;
    let request = with_token(Method::POST, &at("policy/learn")).body(Body::from("{}")).unwrap();
    let mut body = bed.send(request).await.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let first: Value = serde_json::from_slice(&first).unwrap();
    assert_eq!((&first["learning"], &first["since"]), (&json!(true), &json!(0)));
    let open = bed.ok(Method::GET, &at("policy"), None).await;
    assert_eq!((&open["learning"], &open["policy"]["allow"]), (&json!(true), &json!(["*"])));
    let second = bed.post(&at("policy/learn"), json!({})).await;
    assert_eq!(code(&second), (409, "policy_learning"));
    let learned = bed.ok(Method::DELETE, &at("policy/learn?since=0"), None).await;
    assert_eq!(learned["policy"], json!({"mode": "deny-all"}));
    assert_eq!(bed.ok(Method::GET, &at("policy"), None).await["mode"], "deny-all");
    drop(body);

    let request = with_token(Method::POST, &at("policy/learn")).body(Body::from("{}")).unwrap();
    let mut body = bed.send(request).await.into_body();
    body.frame().await.unwrap().unwrap();
    drop(body);
    let closed = async {
        while bed.ok(Method::GET, &at("policy"), None).await["mode"] != "deny-all" {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), closed).await.expect("closed in time");
}

#[tokio::test]
async fn what_brokers_count_is_measured() {
    let bed = Bed::new().await;
    let session = SessionId::parse(&bed.create("box").await).unwrap();
    let counted = json!({"type": "counted", "counts": [
        {"name": "decisions", "added": 3, "labels": [["kind", "connect"], ["verdict", "deny"],
            ["reason", "domain_not_listed"]]},
        {"name": "bytes", "added": 7, "labels": [["direction", "down"]]}]});
    bed.sim.egress_event(&session, counted.to_string().into());
    let wanted = [
        r#"bivouac_egress_decisions_total{kind="connect",verdict="deny",reason="domain_not_listed"} 3"#,
        r#"bivouac_egress_bytes_total{direction="down"} 7"#,
    ];
    let seen = async {
        loop {
            let (_, page) = bed.get("/metrics").await;
            let page = page.as_str().unwrap_or_default().to_owned();
            if wanted.iter().all(|line| page.contains(line)) {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), seen).await.expect("counted in time");
}
