//! More of the cases 42 and 109 to 119, and of rules: what a credential is bound to.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bivouac_testkit::TestSandbox;
use serde_json::{Value, json};

use crate::lifecycle::says;
use crate::tools::{PLAYED, attack, raw_https, status};
use crate::{Bed, fresh};

const OK: &str = "198.51.100.10";

fn named(bed: &Bed) -> String {
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    name
}

fn get(name: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n")
}

fn inject(value: &str) -> Value {
    json!([{"headers": {"authorization": value}}])
}

/// Values of `authorization` with which requests for a path arrived.
fn arrived(bed: &Bed, name: &str, path: &str) -> Vec<String> {
    let mut seen = bed.seen_with(path);
    seen.retain(|s| s.sni.as_deref() == Some(name));
    seen.iter().map(|s| s.header("authorization").join(",")).collect()
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(now.as_millis()).unwrap()
}

#[tokio::test]
async fn case_42_a_query_is_read_as_forms_are() {
    let bed = Bed::new().await;
    let name = named(&bed);
    let matcher =
        json!({"queryString": [{"key": {"exact": "scope"}, "value": {"exact": "read only"}}]});
    let rule = json!([{"match": matcher, "transform": inject("canary-query")}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule}})).await;
    let forms = [
        ("scope=read+only", true),
        ("scope=read%20only", true),
        ("s%63ope=read%20only", true),
        // Any value of a key counts.
        ("scope=write&scope=read%20only", true),
        ("&&scope=read+only&", true),
        ("x=1;scope=read%20only", false),
        ("Scope=read%20only", false),
        ("scope=read%2520only", false),
        ("scope=read%2Bonly", false),
        ("scope[]=read%20only", false),
        ("scope=read%20only%00", false),
        ("scope%3Dread%20only", false),
    ];
    for (i, (form, wanted)) in forms.into_iter().enumerate() {
        let path = format!("/query-{i}-end?{form}");
        let answer = raw_https(&sandbox, &name, &get(&name, &path)).await;
        let with = arrived(&bed, &name, &format!("/query-{i}-end"));
        assert_eq!(with.iter().any(|v| v == "canary-query"), wanted, "{form}: {answer}");
        // What was judged is what was sent.
        for seen in bed.seen_with(&format!("/query-{i}-end")) {
            assert_eq!(seen.target, path);
        }
    }
}

#[tokio::test]
async fn case_109_a_value_that_would_end_its_line_is_never_sent() {
    let bed = Bed::new().await;
    let name = named(&bed);
    let literal = json!({"allow": {name.as_str(): [{"transform": inject("canary\r\nx-evil: 1")}]}});
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let answer = sandbox.post("/network-policy", &literal).await;
    assert_eq!(answer.status, 400, "{answer}");
    for (i, value) in
        ["canary\r\nx-evil: 1", "canary\nx-evil: 1", "canary\u{0}x-evil", "canary-\u{e4}"]
            .into_iter()
            .enumerate()
    {
        let secret = format!("BROKEN_{i}");
        let put =
            bed.client.put(&format!("/v2/secrets/{secret}"), &json!({ "value": value })).await;
        if put.status == 400 {
            continue;
        }
        let policy = json!({"allow": {name.as_str(): [{"transform": inject(&format!("Bearer ${{secret:{secret}}}"))}]}});
        bed.set(&sandbox, &policy).await;
        let path = format!("/broken-{i}-end");
        let answer = raw_https(&sandbox, &name, &get(&name, &path)).await;
        assert_eq!(status(&answer), Some(502), "{value:?}: {answer}");
        let got = answer["got"].as_str().unwrap();
        assert!(got.contains("credential_unavailable") && !got.contains("canary"), "{answer}");
        assert!(bed.seen_with(&path).is_empty(), "{value:?} went out");
    }
    // The control: the same way with a sound value.
    let _ = bed.client.put("/v2/secrets/SOUND", &json!({"value": "sound"})).await.ok();
    let policy =
        json!({"allow": {name.as_str(): [{"transform": inject("Bearer ${secret:SOUND}")}]}});
    bed.set(&sandbox, &policy).await;
    let _ = raw_https(&sandbox, &name, &get(&name, "/sound")).await;
    assert_eq!(arrived(&bed, &name, "/sound"), ["Bearer sound"]);
}

#[tokio::test]
async fn case_110_what_steers_a_server_does_not_go_with_a_credential() {
    let bed = Bed::new().await;
    let name = named(&bed);
    let rule = json!([{"match": {"method": ["GET"]}, "transform": inject("canary-steer")}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule}})).await;
    let steering = [
        ("X-HTTP-Method-Override", "DELETE"),
        ("X-Method-Override", "DELETE"),
        ("X-Original-URL", "/admin"),
        ("X-Rewrite-URL", "/admin"),
        ("X-Forwarded-Host", "evil.test"),
        ("X-Forwarded-For", "203.0.113.9"),
        ("Forwarded", "host=evil.test"),
    ];
    let lines: String = steering.iter().map(|(n, v)| format!("{n}: {v}\\r\\n")).collect();
    let bytes = get(&name, "/steered").replace("Connection", &format!("{lines}Connection"));
    let answer = raw_https(&sandbox, &name, &bytes).await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    assert_eq!(arrived(&bed, &name, "/steered"), ["canary-steer"]);
    let seen = &bed.seen_with("/steered")[0];
    for (header, _) in steering {
        assert!(seen.header(&header.to_lowercase()).is_empty(), "{header}: {seen:?}");
    }
    // A method that only claims to be a GET is what it is, and gets nothing.
    let bytes = get(&name, "/claimed")
        .replace("GET ", "DELETE ")
        .replace("Connection", "X-HTTP-Method-Override: GET\\r\\nConnection");
    let _ = raw_https(&sandbox, &name, &bytes).await;
    assert_eq!(arrived(&bed, &name, "/claimed"), [""]);
}

#[tokio::test]
async fn case_117_requests_for_aws_are_signed_anew() {
    let bed = Bed::new().await;
    let name = named(&bed);
    let keys = json!({"accessKeyId": "AKIDREAL", "secretAccessKey": "canary-secret-key", "service": "s3", "region": "eu-west-1"});
    let policy = json!({"allow": {name.as_str(): [{"sign": {"aws": keys}}]}});
    let sandbox = bed.sandbox(policy).await;
    let put = |path: &str, hash: &str| {
        format!(
            "PUT {path} HTTP/1.1\\r\\nHost: {name}\\r\\nContent-Length: 4\\r\\nx-amz-date: 20200101T000000Z\\r\\n\
             x-amz-content-sha256: {hash}\\r\\nAuthorization: AWS4-HMAC-SHA256 Credential=DUMMY/20200101/eu-west-1/s3/aws4_request, \
             SignedHeaders=host, Signature=0\\r\\nConnection: close\\r\\n\\r\\nbody"
        )
    };
    let answer = raw_https(&sandbox, &name, &put("/object", "UNSIGNED-PAYLOAD")).await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    let with = arrived(&bed, &name, "/object");
    assert!(with[0].starts_with("AWS4-HMAC-SHA256 Credential=AKIDREAL/"), "{with:?}");
    assert!(
        with[0].contains("/eu-west-1/s3/aws4_request") && !with[0].contains("DUMMY"),
        "{with:?}"
    );
    let seen = &bed.seen_with("/object")[0];
    assert_eq!(seen.body, b"body");
    assert_ne!(seen.header("x-amz-date"), ["20200101T000000Z"]);
    assert!(bed.seen_with("canary-secret-key").is_empty());
    let answer =
        raw_https(&sandbox, &name, &put("/chunked", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD")).await;
    assert_eq!(status(&answer), Some(400), "{answer}");
    assert!(bed.seen_with("/chunked").is_empty());
}

#[tokio::test]
async fn case_119_a_credential_stays_at_its_host_and_path() {
    let bed = Bed::new().await;
    let (registry, files) = (named(&bed), named(&bed));
    let rule = json!([{"match": {"path": {"startsWith": "/npm/"}}, "transform": inject("canary-registry")}]);
    let sandbox =
        bed.sandbox(json!({"allow": {registry.as_str(): rule, files.as_str(): []}})).await;
    // Followed by the client, with and without what it thinks it knows.
    let line = format!(
        "curl -sS -L -m 10 -o /dev/null -w '%{{http_code}} %{{num_redirects}}' -H 'npm-auth-type: web' \
         'https://{registry}/redirect?to=https://{files}/tarball.tgz'; \
         curl -sS -m 10 -o /dev/null https://{registry}/npm/inside"
    );
    assert_eq!(sandbox.sh(&line).await.good(), "200 1");
    assert_eq!(arrived(&bed, &registry, "/redirect?to="), [""]);
    assert_eq!(arrived(&bed, &files, "/tarball.tgz"), [""]);
    assert_eq!(arrived(&bed, &registry, "/npm/inside"), ["canary-registry"]);
}

#[tokio::test]
async fn a_rule_that_expires_cuts_what_uses_it_and_injects_no_more() {
    let bed = Bed::new().await;
    let name = named(&bed);
    let rule = json!([{"transform": inject("canary-expiring"), "expiresAt": now_ms() + 12_000}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule}})).await;
    let line = format!("curl -sSN -m 100 https://{name}/sse/4000; echo ended with $?");
    let stream = sandbox.start(&["sh", "-c", &line], json!({})).await;
    says(&sandbox, &stream, "data: 3").await;
    assert_eq!(arrived(&bed, &name, "/sse/4000"), ["canary-expiring"]);
    let ended = tokio::time::timeout(Duration::from_secs(60), sandbox.wait(&stream)).await;
    assert!(ended.is_ok(), "the stream was not cut");
    let out = sandbox.output(&stream).await.out();
    assert!(!out.contains("data: 3999") && !out.ends_with("with 0"), "{out}");
    let answer = raw_https(&sandbox, &name, &get(&name, "/expired")).await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    // As a request that no rule matches.
    assert_eq!(arrived(&bed, &name, "/expired"), [""]);
}

#[tokio::test]
async fn an_entry_with_a_port_is_for_that_port_alone() {
    let bed = Bed::new().await;
    let name = named(&bed);
    let entry = format!("{name}:8443");
    let sandbox =
        bed.sandbox(json!({"allow": {entry: [{"transform": inject("canary-port")}]}})).await;
    let bytes =
        get(&name, "/by-port").replace(&format!("Host: {name}"), &format!("Host: {name}:8443"));
    let send = async |sandbox: &TestSandbox, port: &str| {
        attack(sandbox, &["tls", PLAYED, port, &name, &bytes, "http/1.1"]).await
    };
    let answer = send(&sandbox, "8443").await;
    assert_eq!(
        (status(&answer), answer["issuer"].as_str()),
        (Some(200), Some("sandbox")),
        "{answer}"
    );
    let seen = bed.seen_with("/by-port");
    assert_eq!((seen[0].at.port(), seen[0].header("authorization")), (8443, vec!["canary-port"]));
    let answer = send(&sandbox, "443").await;
    assert_eq!(answer["handshake"], false, "{answer}");
    assert_eq!(bed.seen_with("/by-port").len(), 1);
}

#[tokio::test]
async fn case_135_odd_characters_in_a_policy_are_data_or_refused() {
    let bed = Bed::new().await;
    let sandbox = bed.sandbox(json!({"allow": ["listed.test"]})).await;
    for odd in [
        "a.test\nevil.test",
        "a.test\r\n",
        "a\".test",
        "a'.test",
        "$(id).test",
        "`id`.test",
        "a.test;b.test",
        "a.test b.test",
        "a.test,b.test",
        "a\u{0}.test",
        "{a}.test",
        "a.test/..",
        "a\\.test",
        "a.test#",
        "(a|b).test",
    ] {
        let answer = sandbox.post("/network-policy", &json!({"allow": [odd]})).await;
        assert_eq!(answer.status, 400, "{odd:?}: {answer}");
        assert!(answer.json.to_string().contains("allow"), "{odd:?}: {answer}");
    }
    for odd in ["10.0.0.0/8\n0.0.0.0/0", "10.0.0.0/8 0.0.0.0/0", "10.0.0.0/8;", "any", "0.0.0.0/-1"]
    {
        let answer = sandbox.post("/network-policy", &json!({"subnets": {"allow": [odd]}})).await;
        assert_eq!(answer.status, 400, "{odd:?}: {answer}");
    }
    // Where such characters may stand, they stand for themselves: they come back as they were written.
    let name = named(&bed);
    let odd = "quote\" apostrophe' $(id) `id` \\ {} | ; #";
    let rules = json!([{"match": {"path": {"exact": "/answer"}}, "response": {"statusCode": 200, "body": odd, "contentType": "text/plain"}},
        {"transform": inject(odd)}]);
    bed.set(&sandbox, &json!({"allow": {name.as_str(): rules}})).await;
    let answer = raw_https(&sandbox, &name, &get(&name, "/answer")).await;
    assert!(answer["got"].as_str().unwrap().ends_with(odd), "{answer}");
    let _ = raw_https(&sandbox, &name, &get(&name, "/odd-value")).await;
    assert_eq!(arrived(&bed, &name, "/odd-value"), [odd]);
    let answer = attack(&sandbox, &["hello", PLAYED, "listed.test", "whole"]).await;
    assert_eq!(answer["answered"], false, "the policy was replaced: {answer}");
}
