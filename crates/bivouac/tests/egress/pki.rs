//! Cases 15 to 17, 19 and 128 to 131: certificates, as clients and attackers meet them. Looked at with
//! `openssl`, which knows nothing of the broker.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use bivouac_testkit::{LONG, TestSandbox, eventually};
use serde_json::json;

use crate::tools::{PLAYED, attack, raw_https, status};
use crate::{Bed, fresh};

const OK: &str = "198.51.100.10";

async fn brokered(bed: &Bed) -> (String, TestSandbox) {
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let rule = json!([{"transform": [{"headers": {"authorization": "canary-pki"}}]}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule}})).await;
    (name, sandbox)
}

fn get(name: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n")
}

/// `openssl x509 ARGS` of a PEM text.
fn x509(pem: &str, args: &[&str]) -> String {
    let mut child = Command::new("openssl")
        .args(["x509", "-noout"])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(pem.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{pem}");
    String::from_utf8(output.stdout).unwrap()
}

/// Seconds since 1970 of a line `notBefore=…` or `notAfter=…`.
fn seconds(line: &str) -> i64 {
    let date = line.trim().split_once('=').unwrap().1;
    let output = Command::new("date").args(["-u", "+%s", "-d", date]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

#[tokio::test]
async fn cases_130_and_131_certificates_say_no_more_than_they_must() {
    let bed = Bed::new().await;
    let (name, sandbox) = brokered(&bed).await;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let now = i64::try_from(now.as_secs()).unwrap();
    let day = 24 * 3600;
    let ca = sandbox.sh("cat /usr/local/share/ca-certificates/vercel-proxy-ca.pem").await.good();
    let text = x509(&ca, &["-ext", "basicConstraints,keyUsage"]);
    assert!(text.contains("CA:TRUE, pathlen:0") && text.contains("Certificate Sign"), "{text}");
    for more in ["Digital Signature", "CRL Sign", "Encipherment", "Agreement"] {
        assert!(!text.contains(more), "{text}");
    }
    assert!(seconds(&x509(&ca, &["-startdate"])) <= now - 2 * day + 600);
    let answer = attack(&sandbox, &["leaf", PLAYED, &name]).await;
    let leaf = answer["pem"].as_str().unwrap().to_owned();
    let text = x509(&leaf, &["-text"]);
    assert!(text.contains("CA:FALSE") || !text.contains("CA:TRUE"), "{text}");
    let after = |what: &str| {
        let mut lines = text.lines().skip_while(|l| !l.contains(what)).skip(1);
        lines.next().unwrap_or_default().trim().to_owned()
    };
    assert_eq!(after("X509v3 Extended Key Usage"), "TLS Web Server Authentication", "{text}");
    assert_eq!(after("X509v3 Subject Alternative Name"), format!("DNS:{name}"), "{text}");
    // A clock that is a day behind or ahead changes nothing.
    let (begin, end) = (x509(&leaf, &["-startdate"]), x509(&leaf, &["-enddate"]));
    assert!(seconds(&begin) <= now - day + 600 && seconds(&end) >= now + day, "{begin} {end}");
}

#[tokio::test]
async fn case_17_a_client_that_trusts_only_the_real_certificate_fails_closed() {
    let bed = Bed::new().await;
    let (name, sandbox) = brokered(&bed).await;
    let roots = std::fs::read_to_string(bed.roots()).unwrap();
    let _ = sandbox.sh(&format!("cat > /tmp/real.pem <<'X'\n{roots}\nX")).await.good();
    let line = format!("curl -sS -m 10 --cacert /tmp/real.pem https://{name}/pinned");
    assert_eq!(sandbox.sh(&line).await.exit, Some(60));
    // Not even the next time: nothing falls back to passing the connection through.
    assert_eq!(sandbox.sh(&line).await.exit, Some(60));
    assert!(bed.seen().iter().all(|s| s.sni.as_deref() != Some(&name)));
    let path = format!("/api/bivouac/v1/sandboxes/{}/egress-log", sandbox.name);
    eventually("its line in the log", LONG, async || {
        let request = bed.client.request(reqwest::Method::GET, &path);
        let mut lines = bed.client.stream(request).await.unwrap();
        while let Some(line) = lines.next(Duration::from_secs(10)).await.unwrap() {
            if line["reason"] == "tls_client_rejected_ca" {
                return Ok(());
            }
        }
        Err("not there")
    })
    .await;
    // The control: the client that trusts the sandbox's own store is served.
    let line = format!("curl -sS -m 10 -o /dev/null -w '%{{http_code}}' https://{name}/trusting");
    assert_eq!(sandbox.sh(&line).await.good(), "200");
}

#[tokio::test]
async fn cases_15_and_16_no_early_data_and_no_ticket_for_another_name() {
    let bed = Bed::new().await;
    let (name, other) = (fresh("ok.test"), fresh("ok.test"));
    let rule = json!([{"transform": [{"headers": {"authorization": "canary-pki"}}]}]);
    for name in [&name, &other] {
        bed.name(name, &[OK]);
    }
    let policy = json!({"allow": {name.as_str(): rule, other.as_str(): rule}});
    let sandbox = bed.sandbox(policy.clone()).await;
    let neighbour = bed.sandbox(policy).await;
    let client = |name: &str, more: &str, path: &str| {
        format!(
            "printf 'GET {path} HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n' | \
             timeout 20 openssl s_client -connect {PLAYED}:443 -servername {name} -ign_eof {more} 2>&1"
        )
    };
    let first = sandbox.sh(&client(&name, "-sess_out /tmp/ticket", "/first")).await.out();
    assert!(first.contains("HTTP/1.1 200"), "{first}");
    let ticket = sandbox.sh("openssl sess_id -in /tmp/ticket -noout -text").await.good();
    assert!(!ticket.contains("Max Early Data") || ticket.contains("Max Early Data: 0"), "{ticket}");
    // The control of case 16: the ticket is good for its own name.
    let again = sandbox.sh(&client(&name, "-sess_in /tmp/ticket", "/again")).await.out();
    assert!(again.contains("Reused, TLSv1.3") && again.contains("HTTP/1.1 200"), "{again}");
    let crossed = sandbox.sh(&client(&other, "-sess_in /tmp/ticket", "/crossed")).await.out();
    assert!(crossed.contains("New, TLSv1.3") && crossed.contains("HTTP/1.1 200"), "{crossed}");
    let pem = sandbox.sh("cat /tmp/ticket").await.good();
    let _ = neighbour.sh(&format!("cat > /tmp/ticket <<'X'\n{pem}\nX")).await.good();
    let there = neighbour.sh(&client(&name, "-sess_in /tmp/ticket", "/there")).await.out();
    assert!(there.contains("New, TLSv1.3") && there.contains("HTTP/1.1 200"), "{there}");
    // Case 15: a client that sends early data whatever the ticket says gets it refused.
    let early = "printf 'GET /early-data HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' > /tmp/early";
    let _ = sandbox.sh(early).await.good();
    let line = client(&name, "-sess_in /tmp/ticket -early_data /tmp/early", "/late");
    let out = sandbox.sh(&line).await.out();
    assert!(!out.contains("Early data was accepted"), "{out}");
    assert!(bed.seen_with("/early-data").is_empty());
    let seen = |path: &str| bed.seen_with(path).iter().any(|s| s.sni.as_deref() == Some(&name));
    assert!(seen("/first") && seen("/again") && seen("/there"));
}

#[tokio::test]
async fn case_19_where_the_ca_cannot_be_put_nothing_passes_unseen() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let rule = json!([{"transform": [{"headers": {"authorization": "canary-pki"}}]}]);
    let policy = json!({"allow": {name.as_str(): rule}});
    let mut sandbox = TestSandbox::create(&bed.client, json!({"networkPolicy": policy})).await;
    // Files where folders should be: no place is left for the next session's authority.
    let line = "rm -rf /etc/pki /etc/ssl /usr/local/share/ca-certificates && \
        touch /etc/pki /etc/ssl /usr/local/share/ca-certificates";
    let _ = sandbox.sudo(line).await;
    let _ = sandbox.stop().await.ok();
    let view = sandbox.get(true).await;
    if view.status == 200 {
        sandbox = TestSandbox::of(&bed.client, view.json);
        // A client that checks is refused by itself; one that does not is still not let through.
        let line = format!("curl -sS -m 10 https://{name}/checking");
        assert_ne!(sandbox.sh(&line).await.exit, Some(0));
        let answer = raw_https(&sandbox, &name, &get(&name, "/not-checking")).await;
        assert_eq!(
            (status(&answer), answer["issuer"].as_str()),
            (Some(200), Some("sandbox")),
            "{answer}"
        );
    }
    assert!(bed.seen_with("/checking").iter().all(|s| s.target != "/checking"));
    let _ = sandbox.delete().await;
}
