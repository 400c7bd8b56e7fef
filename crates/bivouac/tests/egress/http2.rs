//! Cases 54 to 63: HTTP/2, gRPC and WebSocket on an intercepted name.

use bivouac_testkit::{Seen, TestSandbox};
use serde_json::{Value, json};

use crate::tools::{PLAYED, attack, status};
use crate::{Bed, fresh};

const OK: &str = "198.51.100.10";

async fn brokered() -> (Bed, String, String, TestSandbox) {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    let canary = format!("canary-{name}");
    bed.name(&name, &[OK]);
    let rule = json!([{"transform": [{"headers": {"authorization": canary}}]}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule}})).await;
    (bed, name, canary, sandbox)
}

/// One stream per connection: what is refused may end the connection.
async fn one(sandbox: &TestSandbox, name: &str, request: &Value) -> Value {
    let requests = json!([request]).to_string();
    attack(sandbox, &["h2", PLAYED, name, &requests]).await
}

#[tokio::test]
async fn cases_54_to_57_odd_streams_are_refused() {
    let (bed, name, canary, sandbox) = brokered().await;
    let base = |path: &str| {
        vec![
            json!([":method", "GET"]),
            json!([":scheme", "https"]),
            json!([":authority", name]),
            json!([":path", path]),
        ]
    };
    let with = |more: Value| {
        let mut headers = base("/smuggled");
        headers.push(more);
        json!({ "headers": headers })
    };
    let cases = [
        (
            "54 two authorities",
            json!({"headers": [[":method", "GET"], [":scheme", "https"], [":authority", name], [":authority", "evil.test"], [":path", "/smuggled"]]}),
        ),
        (
            "54 absolute path",
            json!({"headers": [[":method", "GET"], [":scheme", "https"], [":authority", name], [":path", "https://evil.test/smuggled"]]}),
        ),
        ("54 CRLF in a value", with(json!(["x-a", "b\\r\\nx-b: c"]))),
        ("54 colon in a name", with(json!(["x:a", "b"]))),
        ("54 upper case", with(json!(["X-A", "b"]))),
        ("54 transfer-encoding", with(json!(["transfer-encoding", "chunked"]))),
        ("54 connection", with(json!(["connection", "close"]))),
        (
            "54 content length",
            json!({"headers": [[":method", "POST"], [":scheme", "https"], [":authority", name], [":path", "/smuggled"], ["content-length", "1"]], "data": "abcdef"}),
        ),
        (
            "55 userinfo",
            json!({"headers": [[":method", "GET"], [":scheme", "https"], [":authority", format!("x@{name}")], [":path", "/smuggled"]]}),
        ),
        (
            "55 other port",
            json!({"headers": [[":method", "GET"], [":scheme", "https"], [":authority", format!("{name}:444")], [":path", "/smuggled"]]}),
        ),
        (
            "56 path *",
            json!({"headers": [[":method", "OPTIONS"], [":scheme", "https"], [":authority", name], [":path", "*"], ["x-smuggled", "/smuggled"]]}),
        ),
        (
            "56 scheme http",
            json!({"headers": [[":method", "GET"], [":scheme", "http"], [":authority", name], [":path", "/smuggled"]]}),
        ),
        (
            "57 CONNECT",
            json!({"headers": [[":method", "CONNECT"], [":authority", "evil.test:443"]], "data": "/smuggled"}),
        ),
        (
            "57 extended CONNECT",
            json!({"headers": [[":method", "CONNECT"], [":protocol", "websocket"], [":scheme", "https"], [":authority", name], [":path", "/smuggled"]]}),
        ),
        (
            "104 TRACE",
            json!({"headers": [[":method", "TRACE"], [":scheme", "https"], [":authority", name], [":path", "/smuggled"]]}),
        ),
    ];
    for (what, request) in cases {
        let answer = one(&sandbox, &name, &request).await;
        assert_ne!(answer["streams"][0]["status"], 200, "{what}: {answer}");
        // A body may still arrive in part before its length is seen to be wrong: what must not be is
        // a request that the origin takes for whole.
        let own = |s: &Seen| s.text().contains(&name) || s.sni.as_deref() == Some(&name);
        assert!(!bed.seen_with("/smuggled").iter().any(own), "{what}: it went out");
    }
    assert!(bed.seen_with(&canary).is_empty());
    let answer = one(&sandbox, &name, &json!({"headers": base("/good")})).await;
    assert_eq!(answer["streams"][0]["status"], 200, "{answer}");
    let good = bed.seen_with(&canary);
    assert_eq!((good.len(), good[0].target.as_str()), (1, "/good"));
}

#[tokio::test]
async fn case_60_a_websocket_passes_after_one_judged_handshake() {
    let (bed, name, canary, sandbox) = brokered().await;
    let ask = format!(
        "GET /socket HTTP/1.1\\r\\nHost: {name}\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\\r\\nSec-WebSocket-Version: 13\\r\\n\\r\\nafter-upgrade"
    );
    let args = ["tls", PLAYED, "443", &name, &ask, "http/1.1", "after-upgrade"];
    let answer = attack(&sandbox, &args).await;
    assert_eq!(status(&answer), Some(101), "{answer}");
    assert!(answer["got"].as_str().unwrap().ends_with("after-upgrade"), "{answer}");
    assert_eq!(bed.seen_with(&canary)[0].target, "/socket");
}

#[tokio::test]
async fn case_62_trailers_of_grpc_pass() {
    let (_bed, name, _, sandbox) = brokered().await;
    let request = json!({"headers": [[":method", "POST"], [":scheme", "https"], [":authority", name], [":path", "/trailers"], ["te", "trailers"], ["content-type", "application/grpc"]], "data": "x"});
    let answer = one(&sandbox, &name, &request).await;
    let stream = &answer["streams"][0];
    assert_eq!(
        (stream["status"].as_u64(), stream["data"].as_str()),
        (Some(200), Some("body")),
        "{answer}"
    );
    assert_eq!(stream["end"], "end", "{answer}");
}

#[tokio::test]
async fn case_63_http2_without_tls_is_refused() {
    let (bed, _, _, sandbox) = brokered().await;
    let preface =
        "PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n\\x00\\x00\\x00\\x04\\x00\\x00\\x00\\x00\\x00";
    let answer = attack(&sandbox, &["tcp", "203.0.113.163", "80", preface]).await;
    let got = answer["got"].as_str().unwrap_or_default();
    assert!(got.is_empty() || got.starts_with("HTTP/1.1 4"), "{answer}");
    assert!(bed.wire().to("203.0.113.163").is_empty());
}

#[tokio::test]
async fn streams_of_any_size_pass_and_events_are_not_held_back() {
    let (bed, name, _, sandbox) = brokered().await;
    let get = |path: &str| {
        format!(
            "curl -sS -m 60 -o /dev/null -w '%{{http_code}} %{{size_download}}' https://{name}{path}"
        )
    };
    let ran = sandbox.sh(&get("/bytes/104857600")).await;
    assert_eq!(ran.good(), "200 104857600");
    let up = format!(
        "head -c 52428800 /dev/zero | curl -sS -m 60 -T - -o /tmp/up https://{name}/upload && grep -o '\"bodyBytes\":[0-9]*' /tmp/up"
    );
    assert_eq!(sandbox.sh(&up).await.good(), "\"bodyBytes\":52428800");
    // Ten events, 20 ms apart: the first is there long before the last.
    let script = format!(
        "import subprocess,time\n\
        p=subprocess.Popen(['curl','-sSN','-m','20','https://{name}/sse/40'],stdout=subprocess.PIPE)\n\
        p.stdout.readline(); first=time.monotonic(); p.stdout.read(); print(time.monotonic()-first > 0.3)"
    );
    assert_eq!(sandbox.run(&["python3", "-c", &script]).await.good(), "True");
    let expect = format!(
        "printf 'body' | curl -sS -m 10 -H 'Expect: 100-continue' --http1.1 --data-binary @- -o /dev/null -w '%{{http_code}}' https://{name}/expect"
    );
    assert_eq!(sandbox.sh(&expect).await.good(), "200");
    let seen = bed.seen_with(&name);
    assert_eq!(seen.iter().find(|s| s.target == "/expect").unwrap().body, b"body");
}
