//! Cases 103 to 120: what happens to a secret. A search for it has its positive control.

use bivouac_testkit::{LONG, TestSandbox, eventually};
use serde_json::{Value, json};

use crate::tools::{attack, raw_https, status};
use crate::{Bed, fresh};

const OK: &str = "198.51.100.10";

async fn named(bed: &Bed) -> String {
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    name
}

fn get(name: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n")
}

/// Files below the engine's data folder and the machine's process lists that hold a text. The pool is
/// searched where it is mounted, not as one file of many gigabytes.
fn on_the_host(bed: &Bed, text: &str) -> Vec<String> {
    let data = bed.server().data.display().to_string();
    let log = bed.server().log.display().to_string();
    let script = format!(
        "grep -rlaF --exclude=pool.btrfs -- {text} {data} {log} 2>/dev/null; \
         for p in /proc/[0-9]*; do grep -qaF -- {text} $p/environ $p/cmdline 2>/dev/null && echo $p $(cat $p/comm); done; true"
    );
    let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    // The search itself has the text in its arguments.
    lines
        .lines()
        .filter(|l| !l.ends_with(" sh") && !l.ends_with(" grep"))
        .map(str::to_owned)
        .collect()
}

/// Where a text is found inside a sandbox, by root: files, environments, arguments. What the image
/// brings (/usr) is the same in every sandbox and not searched.
async fn inside(sandbox: &TestSandbox, text: &str) -> String {
    // The text comes by standard input in two halves, so that the search does not find itself.
    let (left, right) = text.split_at(text.len() / 2);
    let line = format!(
        "t=$(printf '%s%s' '{left}' '{right}'); printf '%s' \"$t\" > /run/needle; \
         grep -rlaFs -f /run/needle / /usr/local --exclude-dir=usr --exclude-dir=proc --exclude-dir=sys --exclude=needle; \
         grep -laFs -f /run/needle /proc/[0-9]*/environ /proc/[0-9]*/cmdline; rm /run/needle; true"
    );
    sandbox.sudo(&line).await.out()
}

#[tokio::test]
async fn cases_113_and_114_a_secret_is_found_nowhere_but_at_its_origin() {
    let bed = Bed::new().await;
    let name = named(&bed).await;
    let canary = format!("c4n4ry{}", name.replace('.', "-"));
    let rule = json!([{"transform": [{"headers": {"x-secret": canary}}]}]);
    let policy = json!({"allow": {name.as_str(): rule}});
    let sandbox = TestSandbox::create(&bed.client, json!({"networkPolicy": policy})).await;
    let answer = raw_https(&sandbox, &name, &get(&name, "/status/204")).await;
    assert_eq!(status(&answer), Some(204), "{answer}");
    assert_eq!(bed.seen_with(&canary).len(), 1);
    assert_eq!(inside(&sandbox, &canary).await, "");
    let view = sandbox.get(false).await.ok();
    assert!(!view.to_string().contains(&canary));
    assert!(view.to_string().contains("x-secret"), "{view}");
    let snapshot = sandbox.post("/snapshot", &json!({})).await.ok();
    assert!(!snapshot.to_string().contains(&canary));
    assert_eq!(on_the_host(&bed, &canary), Vec::<String>::new());
    // The control: the same searches find what was planted.
    let mut sandbox = sandbox;
    assert!(sandbox.resume().await);
    let planted = format!("pl4nted{}", name.replace('.', "-"));
    let line = format!(
        "printf '%s' {planted} > /vercel/sandbox/planted; PLANTED={planted} sleep 60 & sleep 0.2"
    );
    let _ = sandbox.start(&["sh", "-c", &format!("{line}; wait")], json!({})).await;
    eventually("the planted text", LONG, async || {
        let found = inside(&sandbox, &planted).await;
        let both = found.contains("/vercel/sandbox/planted") && found.contains("environ");
        if both { Ok(()) } else { Err(found) }
    })
    .await;
    std::fs::write(bed.server().data.join("planted"), &planted).unwrap();
    assert!(on_the_host(&bed, &planted).iter().any(|l| l.contains("/data/planted")));
    std::fs::remove_file(bed.server().data.join("planted")).unwrap();
    let _ = sandbox.delete().await;
}

#[tokio::test]
async fn case_103_an_origin_that_answers_with_the_header_does_not_hand_it_over_in_headers() {
    let bed = Bed::new().await;
    let name = named(&bed).await;
    let canary = format!("canary-{name}");
    let rule = json!([{"transform": [{"headers": {"authorization": canary}}]}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule}})).await;
    let answer = raw_https(&sandbox, &name, &get(&name, &format!("/header/x-echo/{canary}"))).await;
    let got = answer["got"].as_str().unwrap();
    let head = got.split("\r\n\r\n").next().unwrap();
    assert!(!head.contains(&canary), "{head}");
}

#[tokio::test]
async fn cases_105_and_107_a_placeholder_counts_only_in_its_header_and_at_its_host() {
    let bed = Bed::new().await;
    let (name, other) = (named(&bed).await, named(&bed).await);
    let canary = format!("canary-{name}");
    let dummy = "placeholder-0123456789";
    let matcher = json!({"headers": [{"key": {"exact": "x-api-key"}, "value": {"exact": dummy}}]});
    let rule = json!([{"match": matcher, "transform": [{"headers": {"x-api-key": canary}}]}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule, other.as_str(): []}})).await;
    let send = |name: &str, path: &str, header: &str, body: &str| {
        format!(
            "POST {path} HTTP/1.1\\r\\nHost: {name}\\r\\n{header}Content-Length: {}\\r\\nConnection: close\\r\\n\\r\\n{body}",
            body.len()
        )
    };
    let key = format!("X-Api-Key: {dummy}\\r\\n");
    let _ = raw_https(&sandbox, &name, &send(&name, "/right", &key, "")).await;
    assert_eq!(bed.seen_with("/right")[0].header("x-api-key"), [canary.as_str()]);
    for (path, header, body) in [
        ("/body", String::new(), dummy),
        ("/other-header", format!("X-Other: {dummy}\\r\\n"), ""),
        ("/wrong", "X-Api-Key: guess\\r\\n".to_owned(), ""),
    ] {
        let _ = raw_https(&sandbox, &name, &send(&name, path, &header, body)).await;
        for seen in bed.seen_with(path) {
            assert!(!seen.text().contains(&canary), "{seen:?}");
        }
    }
    let _ = raw_https(&sandbox, &other, &send(&other, "/elsewhere", &key, "")).await;
    assert!(!bed.seen_with("/elsewhere")[0].text().contains(&canary));
}

#[tokio::test]
async fn case_108_the_first_matching_rule_alone_acts() {
    let bed = Bed::new().await;
    let name = named(&bed).await;
    let rules = json!([
        {"match": {"path": {"startsWith": "/v1/"}, "method": ["GET"]}, "transform": [{"headers": {"x-a": "first"}}]},
        {"match": {"queryString": [{"key": {"exact": "k"}, "value": {"regex": "^v[0-9]+$"}}]}, "transform": [{"headers": {"x-a": "second", "x-b": "second"}}]},
        {"match": {"path": {"exact": "/answered"}}, "response": {"statusCode": 418, "headers": {"x-made": "here"}, "body": "ready", "contentType": "text/plain"}},
    ]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rules}})).await;
    for path in ["/v1/x?k=v1", "/v2/x?k=v22", "/v2/x?k=w", "/v3/none"] {
        let answer = raw_https(&sandbox, &name, &get(&name, path)).await;
        assert_eq!(status(&answer), Some(200), "{path}: {answer}");
    }
    let header = |path: &str, name: &str| {
        let seen = bed.seen_with(path);
        seen[0].header(name).first().map(|v| (*v).to_owned())
    };
    assert_eq!(
        (header("/v1/x?k=v1", "x-a"), header("/v1/x?k=v1", "x-b")),
        (Some("first".into()), None)
    );
    assert_eq!(header("/v2/x?k=v22", "x-a"), Some("second".into()));
    assert_eq!((header("/v2/x?k=w", "x-a"), header("/v3/none", "x-a")), (None, None));
    let answer = raw_https(&sandbox, &name, &get(&name, "/answered")).await;
    let got = answer["got"].as_str().unwrap();
    assert!(
        got.starts_with("HTTP/1.1 418") && got.contains("x-made: here") && got.ends_with("ready"),
        "{got}"
    );
    assert!(bed.seen_with("/answered").is_empty());
}

#[tokio::test]
async fn case_111_headers_that_speak_for_the_broker_are_taken_off() {
    let bed = Bed::new().await;
    let name = named(&bed).await;
    let rule = json!([{"transform": [{"headers": {"x-a": "b"}}]}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule}})).await;
    let bytes = get(&name, "/spoof").replace(
        "Connection: close",
        "vercel-forwarded-host: evil.test\\r\\nvercel-sandbox-oidc-token: forged-token\\r\\nConnection: close",
    );
    let _ = raw_https(&sandbox, &name, &bytes).await;
    let seen = bed.seen_with("/spoof");
    assert!(
        !seen[0].text().contains("forged-token")
            && seen[0].header("vercel-forwarded-host").is_empty(),
        "{seen:?}"
    );
}

#[tokio::test]
async fn case_112_a_forward_url_gets_the_request_and_a_token_for_itself_alone() {
    let bed = Bed::new().await;
    let (name, proxy) = (named(&bed).await, named(&bed).await);
    let rule = json!([{"match": {"path": {"startsWith": "/some"}}, "forwardURL": format!("https://{proxy}/proxy")}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule}})).await;
    let answer = raw_https(&sandbox, &name, &get(&name, "/some/path?foo=bar")).await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    let seen = bed.seen_with("/proxy/some/path?foo=bar");
    assert_eq!(seen.len(), 1);
    let seen = &seen[0];
    assert_eq!(seen.sni.as_deref(), Some(proxy.as_str()));
    assert_eq!(seen.header("vercel-forwarded-host"), [name.as_str()]);
    assert_eq!(seen.header("vercel-forwarded-scheme"), ["https"]);
    assert_eq!(seen.header("vercel-forwarded-port"), ["443"]);
    assert_eq!(seen.header("vercel-forwarded-path"), ["/some/path?foo=bar"]);
    let token = seen.header("vercel-sandbox-oidc-token");
    assert_eq!(token[0].split('.').count(), 3, "{token:?}");
    // An origin that repeats the request shows it in its body; the guest's own answer has no such header.
    let head = answer["got"].as_str().unwrap().split("\r\n\r\n").next().unwrap().to_owned();
    assert!(!head.contains(token[0]));
}

#[tokio::test]
async fn cases_106_and_116_a_rotated_secret_counts_at_once() {
    let bed = Bed::new().await;
    let name = named(&bed).await;
    let path = "/v2/secrets/ROTATED";
    let put = async |value: &str| bed.client.put(path, &json!({ "value": value })).await.ok();
    let _ = put("value-one").await;
    let rule = json!([{"transform": [{"headers": {"authorization": "Bearer ${secret:ROTATED}"}}]}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule}})).await;
    let _ = raw_https(&sandbox, &name, &get(&name, "/before")).await;
    let _ = put("value-two").await;
    let _ = raw_https(&sandbox, &name, &get(&name, "/after")).await;
    assert_eq!(bed.seen_with("/before")[0].header("authorization"), ["Bearer value-one"]);
    assert_eq!(bed.seen_with("/after")[0].header("authorization"), ["Bearer value-two"]);
    let listed = bed.client.get("/v2/secrets").await.ok();
    assert!(
        listed.to_string().contains("ROTATED") && !listed.to_string().contains("value-two"),
        "{listed}"
    );
}

#[tokio::test]
async fn an_unmatched_request_of_an_allowed_name_passes_without_the_credential() {
    let bed = Bed::new().await;
    let name = named(&bed).await;
    let canary = format!("canary-{name}");
    let rule = json!([{"match": {"method": ["GET"]}, "transform": [{"headers": {"authorization": canary}}]}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule}})).await;
    let bytes = get(&name, "/unmatched").replace("GET ", "DELETE ");
    let answer = raw_https(&sandbox, &name, &bytes).await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    let seen = bed.seen_with("/unmatched");
    assert_eq!((seen[0].method.as_str(), seen[0].header("authorization").len()), ("DELETE", 0));
    // Its own authorization, if it has one, is its own.
    let own = get(&name, "/mine-own")
        .replace("GET ", "DELETE ")
        .replace("Connection", "Authorization: mine\\r\\nConnection");
    let _ = raw_https(&sandbox, &name, &own).await;
    assert_eq!(bed.seen_with("/mine-own")[0].header("authorization"), ["mine"]);
}

#[tokio::test]
async fn case_102_what_one_sandbox_resolved_another_does_not_see() {
    let bed = Bed::new().await;
    let name = named(&bed).await;
    let one = bed.sandbox(json!({"allow": [name]})).await;
    let two = bed.sandbox(json!({"allow": [name]})).await;
    for sandbox in [&one, &two] {
        let answer: Value = attack(sandbox, &["dns", "10.254.0.1", &name, "A"]).await;
        assert_eq!(answer["code"], 0);
    }
    let asked = bed.queries().iter().filter(|q| q.name == name && q.kind == 1).count();
    assert_eq!(asked, 2, "a cache is shared");
}

#[tokio::test]
async fn a_policy_that_was_read_can_be_written_back() {
    let bed = Bed::new().await;
    let name = named(&bed).await;
    let canary = format!("canary-{name}");
    let rule = |value: &str| json!([{"transform": [{"headers": {"authorization": value}}]}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule(&canary)}})).await;
    // What the SDK makes of the answer when it reads a policy and adds a name to it.
    let again = json!({"allow": {name.as_str(): rule("<redacted>"), "more.test": []}});
    bed.set(&sandbox, &again).await;
    let _ = raw_https(&sandbox, &name, &get(&name, "/written-back")).await;
    assert_eq!(bed.seen_with("/written-back")[0].header("authorization"), [canary.as_str()]);
    let other = json!({"allow": {"other.test": rule("<redacted>")}});
    let refused = sandbox.post("/network-policy", &other).await;
    assert_eq!(refused.status, 400, "{refused}");
    assert!(refused.json.to_string().contains("other.test"), "{refused}");
    let _ = raw_https(&sandbox, &name, &get(&name, "/still-there")).await;
    assert_eq!(bed.seen_with("/still-there")[0].header("authorization"), [canary.as_str()]);
}
