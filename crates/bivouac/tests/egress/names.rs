//! Cases 1 to 24: names, server names and TLS.

use bivouac_testkit::{BadCertificate, TestSandbox};
use serde_json::{Value, json};

use crate::tools::{PLAYED, attack, raw_https, status};
use crate::{Bed, fresh};

const OK: &str = "198.51.100.10";
const EVIL: &str = "203.0.113.66";
const GET: &str = "GET /MARK HTTP/1.1\\r\\nHost: NAME\\r\\nConnection: close\\r\\n\\r\\n";

/// A request whose path is `mark`.
fn get(name: &str, mark: &str) -> String {
    GET.replace("MARK", mark).replace("NAME", name)
}

fn with_secret(name: &str, canary: &str) -> Value {
    json!({"allow": { name: [{"transform": [{"headers": {"authorization": canary}}]}] }})
}

/// A name at [`OK`], a canary, and a sandbox whose policy is made of both.
async fn brokered(bed: &Bed) -> (String, String, TestSandbox) {
    let name = fresh("ok.test");
    let canary = format!("canary-{name}");
    bed.name(&name, &[OK]);
    let sandbox = bed.sandbox(with_secret(&name, &canary)).await;
    (name, canary, sandbox)
}

/// The canary went to [`OK`] and nowhere else, and the sandbox has not seen it.
fn only_ok_saw(bed: &Bed, canary: &str, received: &Value) {
    for seen in bed.seen_with(canary) {
        assert_eq!(seen.at.ip().to_string(), OK, "{seen:?}");
    }
    // The origin's echo of headers holds it by nature: what is judged is everything else.
    assert!(!received["error"].to_string().contains(canary), "{received}");
}

#[tokio::test]
async fn case_1_an_allowed_server_name_does_not_open_the_way_to_another_address() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let evil = "203.0.113.101";
    let answer = attack(&sandbox, &["tls", evil, "443", &name, &get(&name, "one")]).await;
    assert_eq!(answer["issuer"], "world", "{answer}");
    assert!(bed.wire().to(evil).is_empty(), "the guest's address was dialled");
    assert_eq!(bed.seen_with(&name)[0].at.ip().to_string(), OK);
}

#[tokio::test]
async fn case_2_a_credential_goes_to_the_real_server_of_the_name_only() {
    let bed = Bed::new().await;
    let (name, canary, sandbox) = brokered(&bed).await;
    let evil = "203.0.113.102";
    let answer = attack(&sandbox, &["tls", evil, "443", &name, &get(&name, "two")]).await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    assert_eq!(answer["issuer"], "sandbox");
    assert!(bed.wire().to(evil).is_empty());
    assert_eq!(bed.seen_with(&canary).len(), 1);
    only_ok_saw(&bed, &canary, &answer);
}

#[tokio::test]
async fn case_3_fronting_on_a_name_without_rules_passes_and_is_documented() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let answer = raw_https(&sandbox, &name, &get("other.test", "front")).await;
    // Not decrypted, so the other vhost of the same server answers: a limit of the semantics.
    assert_eq!((status(&answer), answer["issuer"].as_str()), (Some(200), Some("world")));
}

#[tokio::test]
async fn case_4_fronting_on_an_intercepted_name_is_refused() {
    let bed = Bed::new().await;
    let (name, canary, sandbox) = brokered(&bed).await;
    let answer = raw_https(&sandbox, &name, &get("other.test", "front4")).await;
    assert_eq!(status(&answer), Some(421), "{answer}");
    assert!(bed.seen_with(&canary).is_empty());
    assert!(bed.seen_with("/front4").is_empty());
}

#[tokio::test]
async fn cases_5_and_6_http2_authorities_must_be_the_server_name() {
    let bed = Bed::new().await;
    let (name, canary, sandbox) = brokered(&bed).await;
    let head = |authority: &str, path: &str| json!({"headers": [[":method", "GET"], [":scheme", "https"], [":authority", authority], [":path", path]]});
    let mut both = head(&name, "/five-b");
    both["headers"].as_array_mut().unwrap().push(json!(["host", "other.test"]));
    let requests = json!([head("other.test", "/five-a"), both, head(&name, "/five-c")]).to_string();
    let answer = attack(&sandbox, &["h2", PLAYED, &name, &requests]).await;
    let streams = answer["streams"].as_array().unwrap();
    assert_eq!(streams[0]["status"], 421, "{answer}");
    assert_ne!(streams[1]["status"], 200, "{answer}");
    for path in ["/five-a", "/five-b"] {
        assert!(bed.seen_with(path).is_empty(), "{path} went out");
    }
    // The connection is good for what it is for: a control.
    assert_eq!(streams[2]["status"], 200, "{answer}");
    assert_eq!(bed.seen_with("/five-c").len(), 1);
    only_ok_saw(&bed, &canary, &answer);
}

#[tokio::test]
async fn case_7_without_a_server_name_only_a_catch_all_lets_through() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let strict = bed.sandbox(json!({"allow": [name]})).await;
    let evil = "203.0.113.107";
    let answer = attack(&strict, &["tls", evil, "443", "-", &get("x", "seven")]).await;
    assert_eq!(answer["handshake"], false, "{answer}");
    assert!(bed.wire().to(evil).is_empty());
    let open = bed.sandbox(json!({"allow": {"*": []}})).await;
    let answer = attack(&open, &["tls", evil, "443", "-", &get("x", "seven-b")]).await;
    assert_eq!(
        (status(&answer), answer["issuer"].as_str()),
        (Some(200), Some("world")),
        "{answer}"
    );
}

#[tokio::test]
async fn case_8_a_hello_in_pieces_gets_the_same_verdict() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    for variant in ["whole", "bytes", "records"] {
        let evil = "203.0.113.108";
        let good = attack(&sandbox, &["hello", evil, &name, variant]).await;
        assert_eq!(good["answered"], true, "{variant}: {good}");
        let bad = attack(&sandbox, &["hello", evil, "not-listed.test", variant]).await;
        assert_eq!(bad["answered"], false, "{variant}: {bad}");
        assert!(bed.wire().to(evil).is_empty());
    }
    assert!(bed.queries().iter().all(|q| q.name != "not-listed.test"));
}

#[tokio::test]
async fn case_9_odd_server_names_are_refused() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let evil_name = format!("evil.test\\0.{name}");
    let sandbox = bed.sandbox(json!({"allow": [name, "*.ok.test"]})).await;
    for (variant, argument) in [
        ("two-names", "evil.test".to_owned()),
        ("two-extensions", "evil.test".to_owned()),
        ("name", evil_name),
        ("name", format!("evil.test {name}")),
        ("name", format!("\\xc3\\xa9.{name}")),
        ("name", "198.51.100.10".to_owned()),
        ("name", format!("-x.{name}")),
        ("name", String::new()),
        ("name", format!("{}.ok.test", "a".repeat(64))),
    ] {
        let answer = attack(&sandbox, &["hello", EVIL, &name, variant, &argument]).await;
        assert_eq!(answer["answered"], false, "{variant} {argument}: {answer}");
    }
    // A control: the same machinery with a good name is answered.
    let answer = attack(&sandbox, &["hello", PLAYED, &name, "name", &name]).await;
    assert_eq!(answer["answered"], true, "{answer}");
    let seen = |text: &str| bed.seen().into_iter().any(|s| s.sni.as_deref() == Some(text));
    assert!(!seen("evil.test"));
}

#[tokio::test]
async fn case_10_a_hidden_name_does_not_choose_the_destination() {
    let bed = Bed::new().await;
    let (name, canary, sandbox) = brokered(&bed).await;
    let plain = fresh("ok.test");
    bed.name(&plain, &["198.51.100.11"]);
    bed.set(&sandbox, &json!({"allow": {name.as_str(): [{"transform": [{"headers": {"authorization": canary}}]}], plain.as_str(): []}}))
        .await;
    let evil = "203.0.113.110";
    for name in [&name, &plain] {
        let _ = attack(&sandbox, &["hello", evil, name, "ech"]).await;
    }
    assert!(bed.wire().to(evil).is_empty());
    // Clients are not even offered the keys: no HTTPS record is answered.
    let answer = attack(&sandbox, &["dns", "10.254.0.1", &plain, "HTTPS"]).await;
    assert_eq!(
        (answer["code"].as_u64(), answer["answers"].as_array().unwrap().len()),
        (Some(0), 0)
    );
}

#[tokio::test]
async fn case_11_another_port_passes_by_name_and_gets_no_credential() {
    let bed = Bed::new().await;
    let (name, canary, sandbox) = brokered(&bed).await;
    let args = ["tls", PLAYED, "8443", &name, &get(&name, "eleven"), "http/1.1"];
    let answer = attack(&sandbox, &args).await;
    assert_eq!(
        (status(&answer), answer["issuer"].as_str()),
        (Some(200), Some("world")),
        "{answer}"
    );
    assert!(bed.seen_with(&canary).is_empty());
}

#[tokio::test]
async fn case_12_bytes_that_name_no_host_are_refused_on_443() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let evil = "203.0.113.112";
    for data in
        ["SSH-2.0-x\\r\\n", "\\x00\\x01\\x02\\x03", "GET / HTTP/1.1\\r\\nHost: ok.test\\r\\n\\r\\n"]
    {
        let answer = attack(&sandbox, &["tcp", evil, "443", data]).await;
        let got = answer["got"].as_str().unwrap_or_default();
        assert!(got.is_empty() || got.starts_with("HTTP/1.1 403"), "{data}: {answer}");
    }
    assert!(bed.wire().to(evil).is_empty());
}

#[tokio::test]
async fn case_13_protocols_that_upgrade_to_tls_do_not_hide_the_name() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let evil = "203.0.113.113";
    // Postgres' SSLRequest is answered; without TLS after it nothing goes on.
    let request = "\\x00\\x00\\x00\\x08\\x04\\xd2\\x16\\x2f";
    let answer = attack(&sandbox, &["tcp", evil, "5432", request]).await;
    let got = answer["got"].as_str().unwrap_or_default();
    assert!(["S", ""].contains(&got), "{answer}");
    let smtp = attack(&sandbox, &["tcp", evil, "25", "EHLO x\\r\\n"]).await;
    assert_eq!(smtp["got"].as_str().unwrap_or_default(), "", "{smtp}");
    assert!(bed.wire().to(evil).is_empty());
}

#[tokio::test]
async fn case_14_old_huge_and_slow_hellos_are_refused() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let answer = attack(&sandbox, &["hello", PLAYED, &name, "huge"]).await;
    assert_eq!(answer["answered"], false, "{answer}");
    for old in ["1.0", "1.1"] {
        let answer = attack(&sandbox, &["versions", PLAYED, &name, old]).await;
        assert_eq!(answer["handshake"], false, "{old}: {answer}");
    }
    let answer = attack(&sandbox, &["hello", PLAYED, &name, "slow"]).await;
    assert_ne!(answer["end"], "open", "{answer}");
    assert!(bed.seen().iter().all(|s| s.sni.as_deref() != Some(&name)));
}

#[tokio::test]
async fn case_18_a_client_certificate_does_not_pass_an_intercepted_name() {
    // The broker asks for none, so a client that has one is not served by the origin as itself: it
    // gets an answer that the origin gives to strangers, with the rule's header.
    let bed = Bed::new().await;
    let (name, canary, sandbox) = brokered(&bed).await;
    let answer = raw_https(&sandbox, &name, &get(&name, "eighteen")).await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    only_ok_saw(&bed, &canary, &answer);
}

#[tokio::test]
async fn cases_20_to_23_only_the_listed_names_match() {
    let bed = Bed::new().await;
    let base = fresh("names.test");
    let listed = [format!("*.{base}"), format!("www.*.{base}.com"), format!("bücher.{base}")];
    let sandbox = bed.sandbox(json!({"allow": listed})).await;
    let good = [
        format!("a.{base}"),
        format!("a.b.{base}"),
        format!("A.{}", base.to_uppercase()),
        format!("www.x.{base}.com"),
        format!("xn--bcher-kva.{base}"),
        format!("_svc.{base}"),
    ];
    let bad = [
        base.clone(),
        format!("evil-{base}"),
        format!("x{base}"),
        format!("a.{base}.evil.test"),
        format!("www.x.y.{base}.com"),
        format!("www.{base}.com"),
        format!("buecher{base}"),
    ];
    for name in good.iter().chain(&bad) {
        bed.name(&name.to_lowercase(), &[OK]);
    }
    for name in &good {
        let answer = attack(&sandbox, &["hello", PLAYED, name, "name", name]).await;
        assert_eq!(answer["answered"], true, "{name}: {answer}");
        let answer = attack(&sandbox, &["dns", "10.254.0.1", name, "A"]).await;
        assert_eq!(answer["code"], 0, "{name}: {answer}");
    }
    for name in &bad {
        let answer = attack(&sandbox, &["hello", PLAYED, name, "name", name]).await;
        assert_eq!(answer["answered"], false, "{name}: {answer}");
        let answer = attack(&sandbox, &["dns", "10.254.0.1", name, "A"]).await;
        assert_eq!(answer["code"], 3, "{name}: {answer}");
        assert!(bed.queries().iter().all(|q| q.name != *name), "{name} was asked for");
    }
}

#[tokio::test]
async fn case_24_names_without_dots_have_no_special_meaning() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    for bare in ["metadata", "localhost", "printer.local", "kubernetes.default.svc"] {
        let answer = attack(&sandbox, &["hello", PLAYED, bare, "name", bare]).await;
        assert_eq!(answer["answered"], false, "{bare}: {answer}");
        assert!(bed.queries().iter().all(|q| q.name != bare));
    }
}

#[tokio::test]
async fn case_132_a_bad_certificate_of_the_destination_is_never_overlooked() {
    let bed = Bed::new().await;
    for how in [BadCertificate::Expired, BadCertificate::WrongName, BadCertificate::SelfSigned] {
        let (name, canary, sandbox) = brokered(&bed).await;
        bed.spoil(&name, how);
        let answer = raw_https(&sandbox, &name, &get(&name, "bad")).await;
        assert_eq!(status(&answer), Some(502), "{how:?}: {answer}");
        let got = answer["got"].as_str().unwrap();
        assert!(got.contains("upstream_tls"), "{how:?}: {got}");
        assert!(bed.seen_with(&canary).is_empty());
    }
}
