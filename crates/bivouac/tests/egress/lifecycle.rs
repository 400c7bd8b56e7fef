//! Cases 121 to 131 and the switch of modes under a running command.

use std::time::Duration;

use bivouac_testkit::{LONG, TestSandbox, eventually};
use serde_json::{Value, json};

use crate::tools::{PLAYED, attack, begin, raw_https, status};
use crate::{Bed, fresh};

const OK: &str = "198.51.100.10";

/// Waits until a command's output holds a text.
pub(crate) async fn says(sandbox: &TestSandbox, command: &str, text: &str) {
    let mut lines = sandbox.logs(command).await;
    let mut all = String::new();
    while let Some(line) = lines.next(Duration::from_secs(30)).await.unwrap() {
        if let Some(data) = line["data"].as_str() {
            use base64_lite::decode;
            all.push_str(&decode(data));
        }
        if all.contains(text) {
            return;
        }
    }
    panic!("{text:?} did not come: {all}");
}

mod base64_lite {
    /// Text of a base64 log record.
    pub(super) fn decode(data: &str) -> String {
        let digit = |b: u8| match b {
            b'A'..=b'Z' => b - b'A',
            b'a'..=b'z' => b - b'a' + 26,
            b'0'..=b'9' => b - b'0' + 52,
            b'+' => 62,
            _ => 63,
        };
        let digits: Vec<u8> = data.bytes().filter(|b| *b != b'=').map(digit).collect();
        let mut out = Vec::new();
        for four in digits.chunks(4) {
            let mut bits = 0u32;
            for d in four {
                bits = bits << 6 | u32::from(*d);
            }
            bits <<= 6 * (4 - four.len());
            out.extend(&bits.to_be_bytes()[1..four.len()]);
        }
        String::from_utf8_lossy(&out).into_owned()
    }
}

#[tokio::test]
async fn case_121_flows_that_a_policy_forbids_are_cut_before_the_call_answers() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let first = format!("GET /held HTTP/1.1\\r\\nHost: {name}\\r\\n\\r\\n");
    let kinds = [
        (json!({"allow": [name]}), "443", name.clone()),
        (json!({"mode": "allow-all"}), "9000", "-".to_owned()),
        (json!({"subnets": {"allow": ["203.0.113.0/24"]}}), "9000", "-".to_owned()),
        (
            json!({"allow": {name.as_str(): [{"transform": [{"headers": {"x-a": "b"}}]}]}}),
            "443",
            name.clone(),
        ),
    ];
    for (policy, port, sni) in kinds {
        let sandbox = bed.sandbox(policy.clone()).await;
        let held = begin(&sandbox, &["hold", PLAYED, port, &sni, &first]).await;
        says(&sandbox, &held, "alive").await;
        bed.set(&sandbox, &json!({"mode": "deny-all"})).await;
        let record = tokio::time::timeout(Duration::from_secs(10), sandbox.wait(&held)).await;
        assert!(record.is_ok(), "{policy}: the flow was not cut");
        let out = sandbox.output(&held).await.out();
        assert!(out.ends_with("closed") || out.contains("broken"), "{policy}: {out}");
    }
}

#[tokio::test]
async fn case_122_a_connection_that_stays_is_judged_by_the_new_policy() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let rule = |value: &str| json!({"allow": {name.as_str(): [{"transform": [{"headers": {"x-who": value}}]}]}});
    let sandbox = bed.sandbox(rule("first-value")).await;
    let first = format!("GET /kept HTTP/1.1\\r\\nHost: {name}\\r\\n\\r\\n");
    let held = begin(&sandbox, &["hold", PLAYED, "443", &name, &first]).await;
    says(&sandbox, &held, "alive").await;
    bed.set(&sandbox, &rule("second-value")).await;
    let before = bed.seen_with(&name).len();
    // Either the connection goes on with the new value, or it was cut: the old value is never used again.
    let go_on = bed.seen_with(&name).len();
    assert!(go_on >= before);
    let answer = raw_https(
        &sandbox,
        &name,
        &format!("GET /new HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n"),
    )
    .await;
    assert_eq!(status(&answer), Some(200), "{answer}");
    let seen = bed.seen_with(&name);
    let after = &seen[before..];
    assert!(!after.is_empty());
    for seen in after {
        assert_eq!(seen.header("x-who"), ["second-value"], "{seen:?}");
    }
}

#[tokio::test]
async fn modes_switch_live_under_a_command_that_goes_on() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let sandbox = bed.sandbox(json!({"mode": "allow-all"})).await;
    // One line per round: when it began, and how each destination answered.
    let line = format!(
        "while :; do date +%s%N | tr '\\n' ' '; for u in https://{name}/listed https://203.0.113.150/address; do \
         curl -ksS -m 2 -o /dev/null -w '%{{http_code}} ' $u 2>/dev/null || true; done; echo; sleep 0.05; done"
    );
    let loops = sandbox.start(&["sh", "-c", &line], json!({})).await;
    let mut log = sandbox.logs(&loops).await;
    let steps = [
        (json!({"mode": "allow-all"}), "200 200"),
        (json!({"allow": [name]}), "200 000"),
        (json!({"mode": "deny-all"}), "000 000"),
        (json!({"mode": "allow-all"}), "200 200"),
    ];
    for (policy, wanted) in steps {
        bed.set(&sandbox, &policy).await;
        let since =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
        // Rounds that began after the call had answered must all agree with it.
        let (mut text, mut checked) = (String::new(), 0);
        while checked < 5 {
            let record =
                log.next(Duration::from_secs(60)).await.unwrap().expect("the loop goes on");
            text.push_str(&base64_lite::decode(record["data"].as_str().unwrap_or_default()));
            while let Some((line, rest)) = text.split_once('\n') {
                let (began, answers) = line.split_once(' ').unwrap();
                if began.parse::<u128>().unwrap() > since {
                    assert_eq!(answers.trim(), wanted, "{policy}");
                    checked += 1;
                }
                text = rest.to_owned();
            }
        }
    }
    assert!(
        sandbox.command(&loops).await.ok()["command"]["exitCode"].is_null(),
        "it was restarted"
    );
    let _ = sandbox.kill(&loops, 9).await;
}

#[tokio::test]
async fn case_124_a_bad_policy_is_refused_and_changes_nothing() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let bad: [(Value, &str); 4] = [
        (
            json!({"allow": {"a.test": [{"match": {"path": {"regex": "("}}, "response": {"statusCode": 200}}]}}),
            "regex",
        ),
        (json!({"allow": ["http://x"]}), "allow"),
        (json!({"subnets": {"allow": ["10.0.0.0/33"]}}), "subnets.allow"),
        (
            json!({"allow": {"a.test": [{"transform": [{"headers": {"authorization": "${secret:NOT_THERE}"}}]}]}}),
            "NOT_THERE",
        ),
    ];
    for (policy, field) in bad {
        let answer = sandbox.post("/network-policy", &policy).await;
        assert!((400..=404).contains(&answer.status), "{policy}: {answer}");
        assert!(answer.json.to_string().contains(field), "{policy}: {answer}");
        let answer = attack(&sandbox, &["hello", PLAYED, &name, "whole"]).await;
        assert_eq!(answer["answered"], true, "{policy}: {answer}");
    }
}

#[tokio::test]
async fn case_126_the_policy_holds_from_the_first_program_on() {
    let bed = Bed::new().await;
    for _ in 0..5 {
        let sandbox = bed.sandbox(json!({"allow": [fresh("ok.test")]})).await;
        let answer =
            attack(&sandbox, &["tcp", "203.0.113.126", "80", "GET / HTTP/1.0\\r\\n\\r\\n", "2"])
                .await;
        let got = answer["got"].as_str().unwrap_or_default();
        assert!(got.is_empty() || got.starts_with("HTTP/1.1 403"), "{answer}");
    }
    assert!(bed.wire().to("203.0.113.126").is_empty());
}

#[tokio::test]
async fn cases_127_to_129_each_session_has_a_ca_of_its_own() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let policy = json!({"allow": {name.as_str(): [{"transform": [{"headers": {"x-a": "b"}}]}]}});
    let pem = "cat /usr/local/share/ca-certificates/vercel-proxy-ca.pem";
    let mut one = TestSandbox::create(&bed.client, json!({"networkPolicy": policy})).await;
    let two = bed.sandbox(policy).await;
    let (first, other) = (one.sh(pem).await.good(), two.sh(pem).await.good());
    assert!(first.contains("BEGIN CERTIFICATE"));
    assert_ne!(first, other);
    // The other's CA does not vouch for this one's broker.
    let _ = one.sh(&format!("cat > /tmp/other.pem <<'X'\n{other}\nX")).await.good();
    let line = format!("curl -sS -m 5 --cacert /tmp/other.pem https://{name}/x");
    assert_eq!(one.sh(&line).await.exit, Some(60));
    let own = format!("curl -sS -m 5 https://{name}/own");
    assert!(one.sh(&own).await.good().contains("/own"));
    // No private key is anywhere inside.
    let keys = "grep -rlsI 'PRIVATE KEY' /etc /usr/local/share /run /tmp /vercel 2>/dev/null | grep -v -e ssl-cert -e /usr/share | head";
    assert_eq!(one.sudo(keys).await.out(), "");
    let _ = one.stop().await.ok();
    assert!(one.resume().await);
    let second = one.sh(pem).await.good();
    assert!(second.contains("BEGIN CERTIFICATE") && second != first);
    assert!(one.sh(&own).await.good().contains("/own"));
    let _ = one.delete().await;
}

#[tokio::test]
async fn case_125_a_broker_that_is_killed_leaves_nothing_open() {
    let bed = Bed::new().await;
    let sandbox = bed.sandbox(json!({"mode": "allow-all"})).await;
    let held = begin(&sandbox, &["hold", "203.0.113.125", "9000", "-", "x"]).await;
    says(&sandbox, &held, "alive").await;
    let folder = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let shim = folder
        .filter_map(|entry| entry.file_name().to_string_lossy().parse::<i32>().ok())
        .find(|pid| {
            let group = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            group.contains(&sandbox.session) && name.trim() == "bivouac-shim"
        })
        .expect("the session's shim");
    let kill = std::process::Command::new("kill").args(["-9", &shim.to_string()]).status().unwrap();
    assert!(kill.success());
    eventually("the session's end", LONG, async || {
        let view = sandbox.get(false).await;
        let status = view.json["session"]["status"].clone();
        if status == "running" { Err(status) } else { Ok(()) }
    })
    .await;
}
