//! What may leave, by name and by address: cases of reference/egress.md §2.1 and §2.5.

use super::*;
use crate::broker::denial::ACCESS_DENIED;
use crate::classify::tests::{encrypted, named, old};

const ATTACKER: &str = "203.0.113.66:443";

fn listed() -> Json {
    json!({ "allow": ["ok.test", "priv.test", "six.test"] })
}

#[test]
fn case_01_the_broker_dials_its_own_resolution() {
    run(async {
        let world = World::new(&listed()).await;
        let origin = world.listen("203.0.113.10:443").await;
        let _attacker = world.listen(ATTACKER).await;
        let line = world.passes(ATTACKER, &hello("ok.test", true), &origin).await;
        assert_eq!(line.asked.as_deref(), Some(ATTACKER));
        assert_eq!(line.dialled.as_deref(), Some("203.0.113.10:443"));
        assert_eq!((line.reason, line.intercepted), (Reason::DomainListed, false));
        assert_eq!(
            (line.host.as_deref(), line.host_from.as_deref()),
            (Some("ok.test"), Some("sni"))
        );
        assert_eq!(world.dialled(), ["203.0.113.10:443"]);
    });
}

#[test]
fn case_07_tls_without_a_name_is_refused_unless_everything_may_pass() {
    run(async {
        let world = World::new(&listed()).await;
        let nameless = hello("ok.test", false);
        let got = world.refuses("203.0.113.10:443", &nameless, Reason::NoServerName).await;
        assert_eq!(got, ACCESS_DENIED);
        world.set(&json!({ "allow": ["*"] })).await;
        let origin = world.listen("203.0.113.10:443").await;
        let line = world.passes("203.0.113.10:443", &nameless, &origin).await;
        assert_eq!(line.reason, Reason::CatchAll);
    });
}

#[test]
fn case_08_a_hello_in_pieces_is_judged_as_the_whole() {
    run(async {
        let world = World::new(&listed()).await;
        let origin = world.listen("203.0.113.10:443").await;
        let hello = hello("ok.test", true);
        let mut guest = world.ask(ATTACKER).await;
        guest.set_nodelay(true).unwrap();
        for byte in &hello {
            guest.write_all(&[*byte]).await.unwrap();
        }
        let (mut at, _) = origin.accept().await.unwrap();
        let mut got = vec![0; hello.len()];
        at.read_exact(&mut got).await.unwrap();
        assert_eq!(got, hello);
        let mut evil = world.ask(ATTACKER).await;
        for piece in super::hello("evil.test", true).chunks(3) {
            let _ = evil.write_all(piece).await;
        }
        assert_eq!(drain(&mut evil).await, ACCESS_DENIED);
    });
}

#[test]
fn case_09_12_14_what_is_no_sound_hello_is_refused() {
    run(async {
        let mut tuning = patient();
        tuning.deadlines.hello = Duration::from_millis(300);
        let world = World::with(&listed(), tuning).await;
        let at = "203.0.113.10:443";
        world.refuses(at, &named(b"evil.test\0.ok.test"), Reason::HelloInvalid).await;
        world.refuses(at, &named(b"203.0.113.10"), Reason::HelloInvalid).await;
        world.refuses(at, &old(), Reason::HelloInvalid).await;
        world.refuses(at, b"SSH-2.0-client\r\n", Reason::NotTls).await;
        world.refuses(at, &[0x16, 3, 1, 0x40, 0, 1, 0, 0x7f, 0xff], Reason::HelloInvalid).await;
        // A slow one, and one that never comes.
        world.refuses(at, &hello("ok.test", true)[..40], Reason::HelloTimeout).await;
        world.refuses(at, b"", Reason::HelloTimeout).await;
    });
}

#[test]
fn case_10_an_encrypted_hello_goes_where_its_outer_name_leads() {
    run(async {
        let world = World::new(&listed()).await;
        let origin = world.listen("203.0.113.10:443").await;
        world.passes(ATTACKER, &encrypted("ok.test"), &origin).await;
        world.refuses(ATTACKER, &encrypted("evil.test"), Reason::DomainNotListed).await;
        assert_eq!(world.dialled(), ["203.0.113.10:443"]);
    });
}

#[test]
fn case_11_names_pass_on_any_port_and_rules_act_on_443() {
    run(async {
        let rules = json!({ "allow": { "api.test": [
            { "response": { "statusCode": 418 } },
        ] } });
        let world = World::new(&rules).await;
        let origin = world.listen("203.0.113.12:8443").await;
        let line = world.passes("203.0.113.66:8443", &hello("api.test", true), &origin).await;
        assert!(!line.intercepted);
        let mut guest = world.ask(ATTACKER).await;
        guest.write_all(&hello("api.test", true)).await.unwrap();
        let line = until(|| world.lines().into_iter().find(|l| l.intercepted)).await;
        assert_eq!((line.verdict, line.host.as_deref()), (Verdict::Allow, Some("api.test")));
        // The broker speaks TLS itself.
        let mut kind = [0];
        guest.read_exact(&mut kind).await.unwrap();
        assert_eq!(kind, [0x16]);
    });
}

#[test]
fn case_13_postgres_is_asked_for_tls_first() {
    run(async {
        let request = [0, 0, 0, 8, 4, 0xd2, 0x16, 0x2f];
        let world = World::new(&listed()).await;
        let origin = world.listen("203.0.113.10:5432").await;
        let hello = hello("ok.test", true);
        for answer in [b'S', b'N'] {
            let before = world.lines().len();
            let mut guest = world.ask("203.0.113.66:5432").await;
            // First for GSS, as clients with a ticket do.
            guest.write_all(&[0, 0, 0, 8, 4, 0xd2, 0x16, 0x30]).await.unwrap();
            assert_eq!(guest.read_u8().await.unwrap(), b'N');
            guest.write_all(&request).await.unwrap();
            assert_eq!(guest.read_u8().await.unwrap(), b'S');
            guest.write_all(&hello).await.unwrap();
            let (mut at, _) = origin.accept().await.unwrap();
            let mut asked = [0; 8];
            at.read_exact(&mut asked).await.unwrap();
            assert_eq!(asked, request);
            at.write_all(&[answer]).await.unwrap();
            if answer == b'S' {
                let mut got = vec![0; hello.len()];
                at.read_exact(&mut got).await.unwrap();
                assert_eq!(got, hello);
                assert_eq!(world.line(before).await.protocol.as_deref(), Some("postgres"));
                drop((at, guest));
                world.line(before + 1).await;
            } else {
                assert_eq!(drain(&mut at).await, b"", "nothing follows a no");
                assert_eq!(drain(&mut guest).await, b"");
                let line = world.line(before).await;
                assert_eq!((line.verdict, line.reason), (Verdict::Error, Reason::UpstreamProtocol));
            }
        }
        let both = [&request[..], &hello].concat();
        world.refuses("203.0.113.66:5432", &both, Reason::NotTls).await;
    });
}

#[test]
fn case_20_other_names_are_refused() {
    run(async {
        let world = World::new(&json!({ "allow": ["*.ok.test"] })).await;
        for name in ["evil-ok.test", "ok.test.evil.test", "xok.test", "ok.test"] {
            let got = world.refuses(ATTACKER, &hello(name, true), Reason::DomainNotListed).await;
            assert_eq!(got, ACCESS_DENIED);
        }
    });
}

#[test]
fn case_69_a_name_with_forbidden_addresses_is_not_dialled() {
    run(async {
        let world = World::new(&listed()).await;
        let mut guest = world.ask(ATTACKER).await;
        guest.write_all(&hello("priv.test", true)).await.unwrap();
        assert_reset(&mut guest).await;
        let line = world.line(0).await;
        assert_eq!((line.verdict, line.reason), (Verdict::Deny, Reason::NameResolvesForbidden));
        assert!(world.dialled().is_empty());
    });
}

#[test]
fn case_77_addresses_are_for_ranges_alone_and_deny_wins() {
    run(async {
        let world = World::new(&listed()).await;
        let at = "203.0.113.10:443";
        world.refuses(at, &named(b"203.0.113.10"), Reason::HelloInvalid).await;
        world
            .set(&json!({
                "allow": ["ok.test"],
                "subnets": { "allow": ["203.0.113.0/24"], "deny": ["203.0.113.66/32"] },
            }))
            .await;
        let origin = world.listen(at).await;
        let line = world.passes(at, b"anything", &origin).await;
        assert_eq!(line.reason, Reason::SubnetAllowed);
        assert_eq!(line.entry.as_deref(), Some("203.0.113.0/24"));
        world.refuses(ATTACKER, &hello("ok.test", true), Reason::SubnetDenied).await;
        // A name that leads into a denied range is not dialled either.
        world
            .set(&json!({ "allow": ["ok.test"], "subnets": { "deny": ["203.0.113.10/32"] } }))
            .await;
        let before = (world.lines().len(), world.dialled().len());
        let mut guest = world.ask(ATTACKER).await;
        guest.write_all(&hello("ok.test", true)).await.unwrap();
        assert_reset(&mut guest).await;
        assert_eq!(world.line(before.0).await.reason, Reason::NameResolvesForbidden);
        assert_eq!(world.dialled().len(), before.1);
    });
}

#[test]
fn case_79_80_81_82_83_forbidden_addresses_are_so_in_every_mode() {
    run(async {
        let world = World::new(&allow_all()).await;
        let everything = json!({ "allow": ["*"], "subnets": { "allow": ["0.0.0.0/0", "::/0"] } });
        for policy in [allow_all(), everything] {
            world.set(&policy).await;
            for asked in [
                "127.0.0.1:80",
                "10.1.2.3:443",
                "192.168.0.1:22",
                "172.16.0.1:1",
                "100.64.0.1:443",
                "100.100.100.200:80",
                "169.254.169.254:80",
                "198.18.0.1:443",
                "0.0.0.0:443",
                "224.0.0.1:443",
                "255.255.255.255:443",
                "[::1]:443",
                "[::ffff:10.0.0.1]:443",
                "[64:ff9b::10.0.0.1]:443",
                "[2002:0a00:0001::]:443",
                "[fd00:ec2::254]:80",
                "[fe80::1]:443",
                "192.0.2.1:443",
            ] {
                world.refuses(asked, &hello("ok.test", true), Reason::AddressForbidden).await;
            }
        }
    });
}

#[test]
fn case_89_ipv6_is_judged_and_dialled_like_ipv4() {
    run(async {
        let world = World::new(&listed()).await;
        let origin = world.listen("[2001:db8::10]:443").await;
        let line = world.passes("[2001:db8::66]:443", &hello("six.test", true), &origin).await;
        assert_eq!(line.dialled.as_deref(), Some("[2001:db8::10]:443"));
        world.refuses("[2001:db8::66]:443", b"SSH-2.0-x\r\n", Reason::NotTls).await;
    });
}
