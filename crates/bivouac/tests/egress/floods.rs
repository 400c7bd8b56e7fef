//! Cases 58, 76, 94, 123, 133, 134: too much at once. What is judged is that it is bounded, and that
//! everybody else is served.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bivouac_testkit::{LONG, TestSandbox, eventually};
use serde_json::{Value, json};

use crate::lifecycle::says;
use crate::tools::{PLAYED, attack, begin, raw_https, status};
use crate::{Bed, fresh};

const OK: &str = "198.51.100.10";
const GATE: &str = "10.254.0.1";

async fn brokered(bed: &Bed) -> (String, TestSandbox) {
    let name = fresh("ok.test");
    bed.name(&name, &[OK]);
    let rule = json!([{"transform": [{"headers": {"authorization": "canary-flood"}}]}]);
    let sandbox = bed.sandbox(json!({"allow": {name.as_str(): rule}})).await;
    (name, sandbox)
}

async fn served(sandbox: &TestSandbox, name: &str, path: &str) -> Result<(), Value> {
    let bytes = format!("GET {path} HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n");
    let answer = raw_https(sandbox, name, &bytes).await;
    if status(&answer) == Some(200) { Ok(()) } else { Err(answer) }
}

#[tokio::test]
async fn case_58_floods_of_http2_end_their_connection() {
    let bed = Bed::new().await;
    let (name, sandbox) = brokered(&bed).await;
    for kind in ["reset", "continuation", "bomb"] {
        let answer = attack(&sandbox, &["h2flood", PLAYED, &name, kind]).await;
        let over = answer["ended"] != "silent" && answer["ended"] != "open";
        let stopped =
            over || answer["goaway"] == true || (kind == "bomb" && answer["reset"] == true);
        assert!(stopped, "{kind}: {answer}");
        served(&sandbox, &name, "/after-flood").await.unwrap();
    }
    // Cheap frames are answered or ended, and hold nobody up.
    for kind in ["ping", "settings"] {
        let _ = attack(&sandbox, &["h2flood", PLAYED, &name, kind]).await;
        served(&sandbox, &name, "/after-flood").await.unwrap();
    }
    let flooded = bed.seen_with("/flooded").into_iter().filter(|s| s.sni.as_deref() == Some(&name));
    assert!(flooded.count() < 2000, "most of 4000 reset streams were carried out");
}

#[tokio::test]
async fn case_76_answers_are_small_and_long_questions_end_the_connection() {
    let bed = Bed::new().await;
    let name = fresh("many.test");
    let many: Vec<String> = (1..=60).map(|n| format!("2001:db8:7::{n:x}")).collect();
    bed.name(&name, &many.iter().map(String::as_str).collect::<Vec<_>>());
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let answer = attack(&sandbox, &["dns", GATE, &name, "AAAA"]).await;
    assert!(answer["size"].as_u64().is_some_and(|size| size <= 1232), "{answer}");
    assert_ne!(answer["answers"].as_array().unwrap().len(), 0, "{answer}");
    // By TCP: a message of the largest length, then nothing is answered on that connection.
    let script = format!(
        "import socket\n\
        s=socket.create_connection(('{GATE}',53)); s.settimeout(20); end='open'\n\
        try:\n\
        \x20s.sendall(b'\\xff\\xff'+b'x'*65535)\n\
        \x20end='answered' if s.recv(10) else 'closed'\n\
        except socket.timeout: pass\n\
        except OSError: end='closed'\n\
        print(end)"
    );
    assert_eq!(sandbox.run(&["python3", "-c", &script]).await.good(), "closed");
    let answer = attack(&sandbox, &["dns", GATE, &name, "AAAA", "tcp"]).await;
    assert_eq!(answer["code"], 0, "{answer}");
}

#[tokio::test]
async fn cases_94_and_134_thousands_of_silent_connections_hold_nobody_up() {
    let bed = Bed::new().await;
    let (name, flooder) = brokered(&bed).await;
    let (other, neighbour) = brokered(&bed).await;
    let flood = begin(&flooder, &["flood", "203.0.113.194", "443", "9800", "60"]).await;
    says(&flooder, &flood, "refused").await;
    served(&neighbour, &other, "/beside").await.unwrap();
    served(&flooder, &name, "/amid").await.unwrap();
    // Nobody may hold a place without saying anything: all are closed long before the script ends.
    let _ = flooder.wait(&flood).await;
    let out = flooder.output(&flood).await.out();
    let lines: Vec<Value> = out.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert!(lines[0]["open"].as_u64().unwrap() >= 9_700, "{out}");
    assert_eq!(lines[1]["left"], 0, "{out}");
    assert!(bed.wire().to("203.0.113.194").is_empty());
    // A denial is written down, however much there was before it.
    let denied = fresh("denied.test");
    let answer = attack(&flooder, &["hello", PLAYED, &denied, "whole"]).await;
    assert_eq!(answer["answered"], false);
    let path = format!("/api/bivouac/v1/sandboxes/{}/egress-log", flooder.name);
    eventually("the denial in the log", LONG, async || {
        let request = bed.client.request(reqwest::Method::GET, &path);
        let mut lines = bed.client.stream(request).await.unwrap();
        while let Some(line) = lines.next(Duration::from_secs(10)).await.unwrap() {
            if line.to_string().contains(&denied) {
                assert_eq!(line["verdict"], "deny", "{line}");
                return Ok(());
            }
        }
        Err("not there")
    })
    .await;
}

#[tokio::test]
async fn case_133_certificates_are_not_made_without_end() {
    let bed = Bed::new().await;
    let base = fresh("minted.test");
    bed.name(&format!("*.{base}"), &[OK]);
    let rule = json!([{"transform": [{"headers": {"authorization": "canary-flood"}}]}]);
    let flooder = bed.sandbox(json!({"allow": {format!("*.{base}"): rule}})).await;
    let (other, neighbour) = brokered(&bed).await;
    let answer = attack(&flooder, &["mint", PLAYED, &base, "900"]).await;
    let (made, seconds) = (answer["made"].as_f64().unwrap(), answer["seconds"].as_f64().unwrap());
    // A burst of 200 and 50 a second, as long as it took.
    assert!(made <= 50.0f64.mul_add(seconds, 205.0) && made >= 100.0, "{answer}");
    served(&neighbour, &other, "/beside-mint").await.unwrap();
    eventually("the flooder's own turn", LONG, async || {
        served(&flooder, &format!("later.{base}"), "/later").await
    })
    .await;
}

#[tokio::test]
async fn case_123_no_byte_passes_between_a_denial_and_the_next_permission() {
    let bed = Bed::new().await;
    let address = "203.0.113.123";
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
    let sandbox = bed.sandbox(json!({"mode": "allow-all"})).await;
    let work = begin(&sandbox, &["echoes", address, "9000", "100", "/tmp/echoes"]).await;
    says(&sandbox, &work, "going").await;
    let policies = [json!({"mode": "deny-all"}), json!({"allow": ["only.test"]})];
    let mut closed = Vec::new();
    for round in 0..16 {
        bed.set(&sandbox, &policies[round % 2]).await;
        let since = now();
        // Some time in which something could pass; what is asserted does not depend on it.
        tokio::time::sleep(Duration::from_millis(40)).await;
        closed.push((since, now()));
        bed.set(&sandbox, &json!({"mode": "allow-all"})).await;
        let before = bed.wire().to(address).len();
        eventually("traffic while all is open", LONG, async || {
            if bed.wire().to(address).len() > before + 60 { Ok(()) } else { Err("none") }
        })
        .await;
    }
    let _ = sandbox.sh("touch /tmp/echoes.stop").await.good();
    let _ = sandbox.wait(&work).await;
    let text = sandbox.sh("cat /tmp/echoes").await.good();
    let echoes: Vec<(u128, u128)> = serde_json::from_str(&text).unwrap();
    let open = closed
        .windows(2)
        .filter(|w| echoes.iter().any(|(asked, came)| *asked > w[0].1 && *came < w[1].0));
    assert!(open.count() >= 8, "the control: echoes came while all was open");
    for (since, until) in closed {
        let passed: Vec<_> =
            echoes.iter().filter(|(asked, came)| *asked > since && *came < until).collect();
        assert!(passed.is_empty(), "{} echoes in a closed time", passed.len());
    }
}
