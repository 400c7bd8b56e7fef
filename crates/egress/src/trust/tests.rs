//! What the authority and its leaves are good for: cases 129 to 131 and 133 of reference/egress.md §2.

use std::cell::Cell;
use std::rc::Rc;

use proptest::prelude::*;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::{ServerName, UnixTime};

use super::*;
use crate::canonical::{Host, host};

fn name(text: &str) -> Name {
    match host(text.as_bytes()) {
        Ok(Host::Name(name)) => name,
        other => panic!("{text}: {other:?}"),
    }
}

fn authority(n: u8) -> Authority {
    Authority::new(&SessionId::new(1, [n; 10]), Authority::UNKNOWN_LIFE).expect("an authority")
}

fn verifier(pem: &str) -> Arc<WebPkiServerVerifier> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(pem.as_bytes()).expect("PEM")).expect("a root");
    let provider = Arc::new(aws_lc_rs::default_provider());
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().expect("good")
}

/// The leaf that a guest gets for this name.
fn leaf(authority: &Authority, of: &Name) -> CertificateDer<'static> {
    let config = authority.server_config_for(of).expect("a leaf");
    let roots = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_webpki_verifier(verifier(authority.pem()))
        .with_no_client_auth();
    let server_name = ServerName::try_from(of.to_string()).expect("a name");
    let mut client = rustls::ClientConnection::new(Arc::new(roots), server_name).expect("a client");
    let mut server = rustls::ServerConnection::new(config).expect("a server");
    for _ in 0..4 {
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).expect("written");
        server.read_tls(&mut &bytes[..]).expect("read");
        server.process_new_packets().expect("good");
        bytes.clear();
        server.write_tls(&mut bytes).expect("written");
        client.read_tls(&mut &bytes[..]).expect("read");
        client.process_new_packets().expect("a leaf that verifies for its name");
    }
    let chain = client.peer_certificates().expect("a chain");
    assert_eq!(chain.len(), 1);
    chain[0].clone().into_owned()
}

fn holds(der: &[u8], part: &[u8]) -> usize {
    der.windows(part.len()).filter(|w| *w == part).count()
}

#[test]
fn case_130_the_authority_signs_leaves_and_nothing_else() {
    let authority = authority(1);
    let der = CertificateDer::from_pem_slice(authority.pem().as_bytes()).expect("PEM");
    // Basic constraints: critical, an authority, no authority below it.
    let below = [6, 3, 0x55, 0x1d, 0x13, 1, 1, 0xff, 4, 8, 0x30, 6, 1, 1, 0xff, 2, 1, 0];
    assert_eq!(holds(&der, &below), 1);
    // Key usage: critical, keyCertSign alone.
    let usage = [6, 3, 0x55, 0x1d, 0x0f, 1, 1, 0xff, 4, 4, 3, 2, 2, 4];
    assert_eq!(holds(&der, &usage), 1);
    let subject = format!("Bivouac sandbox CA {}", SessionId::new(1, [1; 10]));
    assert_eq!(holds(&der, subject.as_bytes()), 2, "subject and issuer");
    assert!(!authority.pem().contains("PRIVATE") && !format!("{authority:?}").contains("PRIVATE"));
}

#[test]
fn case_130_a_leaf_serves_one_name() {
    let authority = authority(1);
    let der = leaf(&authority, &name("api.example.test"));
    // Extended key usage: serverAuth alone.
    let serve = [6, 3, 0x55, 0x1d, 0x25, 4, 0x0c, 0x30, 0x0a, 6, 8, 0x2b, 6, 1, 5, 5, 7, 3, 1];
    assert_eq!(holds(&der, &serve), 1);
    // One alternative name, the host.
    let mut only = vec![6, 3, 0x55, 0x1d, 0x11, 4, 20, 0x30, 18, 0x82, 16];
    only.extend(b"api.example.test");
    assert_eq!(holds(&der, &only), 1);
    // No authority: basic constraints, if there, say nothing.
    assert_eq!(holds(&der, &[1, 1, 0xff, 2, 1, 0]), 0);
}

#[test]
fn case_129_a_leaf_of_one_session_means_nothing_in_another() {
    let (one, two) = (authority(1), authority(2));
    let der = leaf(&one, &name("ok.test"));
    let check = |pem: &str| {
        let server = ServerName::try_from("ok.test").expect("a name");
        verifier(pem).verify_server_cert(&der, &[], &server, &[], UnixTime::now())
    };
    assert!(check(one.pem()).is_ok());
    assert!(check(two.pem()).is_err());
}

#[test]
fn case_131_a_clock_that_is_a_day_off_does_not_matter() {
    let authority = authority(1);
    let der = leaf(&authority, &name("ok.test"));
    let now = UnixTime::now().as_secs();
    let at = |seconds: i64| {
        let time =
            UnixTime::since_unix_epoch(Duration::from_secs(now.saturating_add_signed(seconds)));
        let server = ServerName::try_from("ok.test").expect("a name");
        verifier(authority.pem()).verify_server_cert(&der, &[], &server, &[], time).is_ok()
    };
    assert!(at(-23 * 3600) && at(0) && at(24 * 3600) && at(6 * 24 * 3600));
    assert!(!at(-25 * 3600) && !at(8 * 24 * 3600));
}

#[test]
fn case_133_names_are_minted_once_and_not_without_end() {
    let authority = authority(1);
    let first = authority.server_config_for(&name("ok.test")).expect("a leaf");
    let again = authority.server_config_for(&name("ok.test")).expect("a leaf");
    assert!(Arc::ptr_eq(&first, &again));
    let mut refused = 0;
    for n in 0..400 {
        match authority.server_config_for(&name(&format!("h{n}.ok.test"))) {
            Ok(_) => {}
            Err(TrustError::TooMany(what)) => {
                refused += 1;
                assert!(what.contains("ok.test"));
            }
            Err(other) => panic!("{other}"),
        }
    }
    // Some were earned anew while the loop ran.
    assert!(refused > 0, "a flood of names is not held back");
    assert!(authority.server_config_for(&name("ok.test")).is_ok(), "known names go on");
    let kept = authority.leaves.borrow().as_ref().map_or(0, |l| l.made.len());
    assert!(kept <= MOST_LEAVES);
}

#[test]
fn leaves_share_a_key_but_no_serial() {
    let authority = authority(1);
    let serial = |der: &CertificateDer<'_>| {
        let at = der.windows(2).position(|w| w == [2, 10]).expect("a serial of ten bytes");
        der[at + 2..at + 12].to_vec()
    };
    let one = serial(&leaf(&authority, &name("a.test")));
    let two = serial(&leaf(&authority, &name("b.test")));
    assert_ne!(one, two);
}

#[test]
fn an_authority_that_was_trimmed_makes_leaves_again() {
    let authority = authority(1);
    let before = authority.server_config_for(&name("ok.test")).expect("a leaf");
    authority.trim();
    assert!(authority.leaves.borrow().is_none());
    let after = authority.server_config_for(&name("ok.test")).expect("a leaf");
    assert!(!Arc::ptr_eq(&before, &after));
    assert_eq!(after.max_early_data_size, 0);
    assert_eq!(after.alpn_protocols, [b"h2".to_vec(), b"http/1.1".to_vec()]);
}

#[test]
fn roots_are_read_late_and_again() {
    let reads = Rc::new(Cell::new(0));
    let count = Rc::clone(&reads);
    let pem = authority(1).pem().to_owned();
    let roots = Roots::new(Box::new(move || {
        count.set(count.get() + 1);
        Ok(pem.clone().into_bytes())
    }));
    assert_eq!(reads.get(), 0);
    let any = roots.client_config(false).expect("roots");
    let http1 = roots.client_config(true).expect("roots");
    assert_eq!((reads.get(), any.alpn_protocols.len(), http1.alpn_protocols.len()), (1, 2, 1));
    assert!(!any.enable_early_data && !http1.enable_early_data);
    roots.trim();
    roots.client_config(false).expect("roots");
    assert_eq!(reads.get(), 2);
}

#[test]
fn without_roots_nothing_is_trusted() {
    for text in ["", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "x"] {
        let roots = Roots::new(Box::new(move || Ok(text.as_bytes().to_vec())));
        assert!(matches!(roots.client_config(false), Err(TrustError::NoRoots(_))), "{text}");
    }
    let roots = Roots::new(Box::new(|| Err(io::Error::other("gone"))));
    assert!(matches!(roots.client_config(false), Err(TrustError::Roots(_))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever a name looks like, its leaf is good for it and for no other.
    #[test]
    fn any_name_gets_a_leaf_of_its_own(text in "[a-z0-9]([a-z0-9_-]{0,20}[a-z0-9])?(\\.[a-z]([a-z0-9-]{0,60}[a-z0-9])?){1,3}") {
        let Ok(Host::Name(name)) = host(text.as_bytes()) else { return Ok(()) };
        let authority = authority(1);
        let der = leaf(&authority, &name);
        let other = ServerName::try_from("other.invalid").expect("a name");
        let verified = verifier(authority.pem()).verify_server_cert(&der, &[], &other, &[], UnixTime::now());
        prop_assert!(verified.is_err());
    }
}
