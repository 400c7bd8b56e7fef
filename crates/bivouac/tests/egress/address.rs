//! Cases 77 to 94 and 95 to 102: addresses, protocols, and the host around.

use serde_json::json;

use crate::tools::attack;
use crate::{Bed, fresh};

const GET: &str = "GET /MARK HTTP/1.0\\r\\n\\r\\n";

#[tokio::test]
async fn cases_77_and_78_addresses_are_judged_by_ranges_however_they_are_written() {
    let bed = Bed::new().await;
    let allowed = "203.0.113.177";
    let policy = json!({"allow": [fresh("ok.test")], "subnets": {"allow": ["203.0.113.177/32"]}});
    let sandbox = bed.sandbox(policy).await;
    let ran = sandbox.sh(&format!("curl -sS -m 5 http://{allowed}/by-address")).await;
    assert!(ran.good().contains("/by-address"));
    for written in [
        "203.0.113.178",
        "3405803954",
        "0313.0.0161.0262",
        "0xcb.0x0.0x71.0xb2",
        "[::ffff:203.0.113.178]",
    ] {
        for scheme in ["http", "https"] {
            let ran = sandbox
                .sh(&format!(
                    "curl -gksS -m 5 -o /dev/null -w '%{{http_code}}' {scheme}://{written}/"
                ))
                .await;
            assert!(
                ["000", "403"].contains(&ran.out().as_str()),
                "{scheme}://{written}: {}",
                ran.out()
            );
        }
    }
    assert!(bed.wire().to("203.0.113.178").is_empty());
}

#[tokio::test]
async fn cases_79_to_81_private_and_special_addresses_are_denied_in_every_mode() {
    let bed = Bed::new().await;
    let special = [
        "169.254.169.254",
        "10.9.9.9",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.2",
        "0.0.0.0",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::1",
        "fd00:ec2::254",
        "fe80::1",
        "fc00::1",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
    ];
    let policies = [
        json!({"mode": "allow-all"}),
        json!({"allow": {"*": []}}),
        json!({"subnets": {"allow": ["0.0.0.0/0", "::/0"]}}),
        json!({"subnets": {"allow": ["169.254.169.254/32", "10.0.0.0/8", "fd00::/8"]}}),
    ];
    for policy in policies {
        let sandbox = bed.sandbox(policy.clone()).await;
        for address in special {
            if ["127.0.0.2", "::1", "0.0.0.0"].contains(&address) {
                continue; // These stay inside the sandbox: its own loopback.
            }
            let answer = attack(&sandbox, &["tcp", address, "80", GET, "2"]).await;
            let got = answer["got"].as_str().unwrap_or_default();
            assert!(
                got.is_empty() || got.starts_with("HTTP/1.1 403"),
                "{policy} {address}: {answer}"
            );
        }
    }
    for address in special {
        let plain = address.strip_prefix("::ffff:").unwrap_or(address);
        assert!(bed.wire().to(plain).is_empty(), "{address}");
    }
}

#[tokio::test]
async fn case_82_the_host_itself_cannot_be_reached() {
    let bed = Bed::new().await;
    let sandbox = bed.sandbox(json!({"mode": "allow-all"})).await;
    let port = bed.server().url.rsplit(':').next().unwrap().to_owned();
    // The engine's own API listens on loopback; the world's side of the host has an address too.
    for address in ["198.51.100.1", "2001:db8:51::1", "10.254.0.1"] {
        let answer =
            attack(&sandbox, &["tcp", address, &port, "GET /health HTTP/1.0\\r\\n\\r\\n", "2"])
                .await;
        let got = answer["got"].as_str().unwrap_or_default();
        assert!(!got.contains("200"), "{address}: {answer}");
    }
}

#[tokio::test]
async fn case_83_the_gate_itself_is_no_destination() {
    let bed = Bed::new().await;
    let sandbox = bed.sandbox(json!({"mode": "allow-all"})).await;
    for port in ["1", "80", "443", "7070", "15001"] {
        let answer = attack(&sandbox, &["tcp", "10.254.0.1", port, GET, "2"]).await;
        let got = answer["got"].as_str().unwrap_or_default();
        assert!(got.is_empty() || got.starts_with("HTTP/1.1 403"), "{port}: {answer}");
    }
}

#[tokio::test]
async fn case_84_another_sandbox_cannot_be_reached() {
    let bed = Bed::new().await;
    let one = bed.sandbox(json!({"mode": "allow-all"})).await;
    let two = bed.sandbox(json!({"mode": "allow-all"})).await;
    let _ =
        two.start(&["python3", "-m", "http.server", "8080", "--bind", "0.0.0.0"], json!({})).await;
    let up = two.sh("for i in $(seq 100); do curl -sf -m 2 http://127.0.0.1:8080/ >/dev/null && exit 0; sleep 0.05; done; exit 1").await;
    assert_eq!(up.exit, Some(0), "{}", up.err());
    // Both have the same address: what is dialled from one is itself, where nothing listens.
    let answer = attack(&one, &["tcp", "10.254.0.2", "8080", GET, "2"]).await;
    assert_eq!(answer["connected"], false, "{answer}");
}

#[tokio::test]
async fn cases_85_and_86_datagrams_are_refused_at_once_under_a_policy_and_relayed_in_allow_all() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &["198.51.100.10"]);
    let strict = bed.sandbox(json!({"allow": [name]})).await;
    for port in ["443", "123", "9001", "4433"] {
        let answer = attack(&strict, &["udp", "203.0.113.185", port, "hello-udp"]).await;
        assert_eq!(answer["answered"], false, "{port}: {answer}");
        assert_eq!(answer["error"], "ConnectionRefusedError", "{port}: {answer}");
    }
    assert!(bed.wire().to("203.0.113.185").is_empty());
    let open = bed.sandbox(json!({"mode": "allow-all"})).await;
    let answer = attack(&open, &["udp", "203.0.113.186", "9001", "hello-relay", "5"]).await;
    assert_eq!(answer["got"], "hello-relay", "{answer}");
    let answer = attack(&open, &["udp", "169.254.169.254", "9001", "hello-imds"]).await;
    assert_eq!(answer["answered"], false, "{answer}");
    assert!(bed.wire().holding("hello-imds").is_empty());
}

#[tokio::test]
async fn cases_87_and_88_no_other_protocol_leaves() {
    let bed = Bed::new().await;
    let sandbox = bed.sandbox(json!({"mode": "allow-all"})).await;
    let script = "import socket,struct\n\
        made=[]\n\
        for proto in (1,2,4,33,41,47,50,132,136,255):\n\
        \x20try:\n\
        \x20 s=socket.socket(socket.AF_INET,socket.SOCK_RAW,proto); s.settimeout(1)\n\
        \x20 s.sendto(b'raw-canary'*4,('203.0.113.187',0)); made.append(proto)\n\
        \x20except OSError as e: pass\n\
        try:\n\
        \x20s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM,1); s.sendto(b'\\x08\\0\\0\\0\\0\\1\\0\\1raw-canary',('203.0.113.187',0)); made.append('ping')\n\
        except OSError: pass\n\
        print(made)";
    let ran = sandbox.run_with(&["python3", "-c", script], json!({"sudo": true})).await;
    assert!(ran.good().contains('['), "{}", ran.err());
    assert!(bed.wire().to("203.0.113.187").is_empty());
    assert!(bed.wire().holding("raw-canary").is_empty());
}

#[tokio::test]
async fn case_89_ipv6_is_judged_as_ipv4() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &["2001:db8:7::10"]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let get = format!("GET /six HTTP/1.1\\r\\nHost: {name}\\r\\nConnection: close\\r\\n\\r\\n");
    let answer = attack(&sandbox, &["tls", "2001:db8:7::66", "443", &name, &get, "http/1.1"]).await;
    assert_eq!(answer["issuer"], "world", "{answer}");
    assert_eq!(bed.seen_with(&name)[0].at.ip().to_string(), "2001:db8:7::10");
    let answer = attack(&sandbox, &["tls", "2001:db8:7::66", "443", "not.test", &get]).await;
    assert_eq!(answer["handshake"], false, "{answer}");
    assert!(bed.wire().to("2001:db8:7::66").is_empty());
}

#[tokio::test]
async fn case_90_root_may_change_its_own_network_and_still_reaches_only_the_gate() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &["198.51.100.10"]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let spoil = "ip route flush table main; ip addr add 198.51.100.77/24 dev eth0; ip route add default dev eth0; \
        ip link add t0 type dummy; nft flush ruleset; ip rule add pref 1 table main; echo done";
    let ran = sandbox.sudo(spoil).await;
    assert!(ran.out().ends_with("done"));
    let answer = attack(&sandbox, &["tcp", "203.0.113.190", "80", GET, "3"]).await;
    let got = answer["got"].as_str().unwrap_or_default();
    assert!(got.is_empty() || got.starts_with("HTTP/1.1 403"), "{answer}");
    assert!(bed.wire().to("203.0.113.190").is_empty());
}

#[tokio::test]
async fn case_92_the_sandbox_s_own_servers_stay_its_own() {
    let bed = Bed::new().await;
    let sandbox = bed.sandbox(json!({"mode": "allow-all"})).await;
    let _ = sandbox
        .start(&["python3", "-m", "http.server", "8080", "--bind", "0.0.0.0"], json!({}))
        .await;
    let line = "for i in $(seq 100); do curl -sf -m 2 http://127.0.0.1:8080/ | grep -q Directory && break; sleep 0.05; done; \
        curl -sf -m 5 http://localhost:8080/ | grep -q Directory && echo own; curl -sf -m 5 http://203.0.113.192:8080/outside";
    let ran = sandbox.sh(line).await;
    let out = ran.good();
    assert!(out.starts_with("own") && out.contains("/outside"), "{out}");
}

#[tokio::test]
async fn case_93_a_scan_learns_nothing_of_what_is_denied() {
    let bed = Bed::new().await;
    let sandbox = bed.sandbox(json!({"allow": [fresh("ok.test")]})).await;
    let mut answers = Vec::new();
    // Something listens on 80 there, nothing on 81.
    for port in ["22", "23", "8080", "8081"] {
        let mut answer = attack(&sandbox, &["tcp", "203.0.113.193", port, "x\\r\\n", "7"]).await;
        answer["got"] = json!(answer["got"].as_str().unwrap_or_default().len());
        answers.push(answer);
    }
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{answers:?}");
    assert!(bed.wire().to("203.0.113.193").is_empty());
}

#[tokio::test]
async fn case_101_proxy_variables_change_nothing() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &["198.51.100.10"]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let line = format!("curl -sS -m 5 -o /dev/null -w '%{{http_code}}' https://{name}/proxied");
    let env = json!({"env": {"HTTPS_PROXY": "http://203.0.113.201:8080", "https_proxy": "http://203.0.113.201:8080"}});
    let ran = sandbox.run_with(&["sh", "-c", &line], env).await;
    assert_ne!(ran.out(), "200");
    assert!(bed.wire().to("203.0.113.201").is_empty());
}
