//! The look at first bytes, case by case. Hellos are rustls' own, patched.

use std::sync::Arc;

use proptest::prelude::*;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use super::*;

/// A hello as a client sends it, in one record.
pub(crate) fn hello(name: &str, sni: bool) -> Vec<u8> {
    let mut config = ClientConfig::builder()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.enable_sni = sni;
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut out = Vec::new();
    client.write_tls(&mut out).unwrap();
    out
}

/// Splits a hello into (start of the extensions' length, extensions).
fn extensions(record: &[u8]) -> (usize, Vec<(u16, Vec<u8>)>) {
    let mut at = 5 + 4 + 2 + 32;
    at += 1 + usize::from(record[at]);
    at += 2 + usize::from(u16::from_be_bytes([record[at], record[at + 1]]));
    at += 1 + usize::from(record[at]);
    let start = at;
    at += 2;
    let mut found = Vec::new();
    while at < record.len() {
        let kind = u16::from_be_bytes([record[at], record[at + 1]]);
        let len = usize::from(u16::from_be_bytes([record[at + 2], record[at + 3]]));
        found.push((kind, record[at + 4..at + 4 + len].to_vec()));
        at += 4 + len;
    }
    (start, found)
}

/// Builds the record again with other extensions.
fn with(record: &[u8], change: impl FnOnce(&mut Vec<(u16, Vec<u8>)>)) -> Vec<u8> {
    let (start, mut list) = extensions(record);
    change(&mut list);
    let mut body = record[9..start].to_vec();
    let total: usize = list.iter().map(|(_, b)| 4 + b.len()).sum();
    body.extend(u16::try_from(total).unwrap().to_be_bytes());
    for (kind, bytes) in list {
        body.extend(kind.to_be_bytes());
        body.extend(u16::try_from(bytes.len()).unwrap().to_be_bytes());
        body.extend(bytes);
    }
    record_of(&body, usize::MAX)
}

/// A handshake message in records of `piece` bytes.
fn record_of(body: &[u8], piece: usize) -> Vec<u8> {
    let mut message = vec![1];
    message.extend(&u32::try_from(body.len()).unwrap().to_be_bytes()[1..]);
    message.extend(body);
    let mut out = Vec::new();
    for part in message.chunks(piece.min(16_384)) {
        out.extend([0x16, 3, 1]);
        out.extend(u16::try_from(part.len()).unwrap().to_be_bytes());
        out.extend(part);
    }
    out
}

fn sni(entries: &[(u8, &[u8])]) -> Vec<u8> {
    let mut list = Vec::new();
    for (kind, name) in entries {
        list.push(*kind);
        list.extend(u16::try_from(name.len()).unwrap().to_be_bytes());
        list.extend(*name);
    }
    let mut out = u16::try_from(list.len()).unwrap().to_be_bytes().to_vec();
    out.extend(list);
    out
}

fn told(name: Option<&str>) -> Look {
    Look::Is(First::Tls(Hello { name: name.map(str::to_owned), encrypted: false, tls13: true }))
}

fn odd(look: &Look) -> bool {
    matches!(look, Look::Is(First::Odd(_)))
}

#[test]
fn a_hello_is_read() {
    assert_eq!(look(&hello("ok.test", true)), told(Some("ok.test")));
    let upper = with(&hello("ok.test", true), |list| {
        list.iter_mut().find(|(k, _)| *k == 0).unwrap().1 = sni(&[(0, b"OK.Test")]);
    });
    assert_eq!(look(&upper), told(Some("ok.test")));
}

#[test]
fn case_07_a_hello_without_a_name_is_told() {
    assert_eq!(look(&hello("ok.test", false)), told(None));
}

#[test]
fn case_08_fragments_change_nothing() {
    let whole = hello("ok.test", true);
    for piece in [1, 2, 3, 7, 64, 500] {
        let cut = record_of(&whole[9..], piece);
        assert_eq!(look(&cut), told(Some("ok.test")), "records of {piece}");
        for n in 0..cut.len() {
            match look(&cut[..n]) {
                Look::More(want) => assert!(want > n && want <= cut.len(), "{want} at {n}"),
                Look::Is(first) => panic!("{first:?} at {n} of {} ({piece})", cut.len()),
            }
        }
    }
}

#[test]
fn case_09_odd_names_are_refused() {
    let good = hello("ok.test", true);
    let patched = |body: Vec<u8>| {
        with(&good, |list| list.iter_mut().find(|(k, _)| *k == 0).unwrap().1 = body)
    };
    for name in [
        &b"evil\0.ok.test"[..],
        b"ok.test evil",
        "\u{fc}.test".as_bytes(),
        b"192.0.2.1",
        b"::1",
        b"",
        b".",
        b"-ok.test",
    ] {
        assert!(odd(&look(&patched(sni(&[(0, name)])))), "{name:?}");
    }
    assert!(odd(&look(&patched(sni(&[(0, b"ok.test"), (0, b"evil.test")])))));
    assert!(odd(&look(&patched(sni(&[(7, b"ok.test")])))));
    assert!(odd(&look(&patched(sni(&[])))));
    assert!(odd(&look(&patched([sni(&[(0, b"ok.test")]), vec![0]].concat()))));
    let twice = with(&good, |list| list.push((0, sni(&[(0, b"evil.test")]))));
    assert!(odd(&look(&twice)));
}

/// A hello with this in the place of its name.
pub(crate) fn named(name: &[u8]) -> Vec<u8> {
    with(&hello("ok.test", true), |list| {
        list.iter_mut().find(|(k, _)| *k == 0).unwrap().1 = sni(&[(0, name)]);
    })
}

/// A hello that offers TLS 1.1 at most.
pub(crate) fn old() -> Vec<u8> {
    with(&hello("ok.test", true), |list| {
        list.iter_mut().find(|(k, _)| *k == 43).unwrap().1 = vec![4, 3, 2, 3, 1];
    })
}

/// A hello with the extension for encrypted hellos, as a browser greases it.
pub(crate) fn encrypted(name: &str) -> Vec<u8> {
    with(&hello(name, true), |list| {
        // Outer, HKDF-SHA256, AES-128-GCM, some key, some payload.
        let mut grease = vec![0, 0, 1, 0, 1, 7, 0, 32];
        grease.extend([1; 32]);
        grease.extend([0, 144]);
        grease.extend([2; 144]);
        list.insert(0, (0xfe0d, grease));
    })
}

#[test]
fn case_10_an_encrypted_hello_is_seen() {
    let seen = look(&encrypted("ok.test"));
    let Look::Is(First::Tls(hello)) = seen else { panic!("{seen:?}") };
    assert!(hello.encrypted);
    assert_eq!(hello.name.as_deref(), Some("ok.test"));
}

#[test]
fn case_12_other_bytes_are_unknown() {
    for bytes in [&b"SSH-2.0-x\r\n"[..], b"\x80\x2e\x01\x03\x01", b"ehlo x\r\n", b"\xff", b"*1\r\n"]
    {
        assert_eq!(look(bytes), Look::Is(First::Unknown), "{bytes:?}");
    }
    assert_eq!(look(b"SET a b\r\n"), Look::Is(First::Unknown));
    assert_eq!(look(b"MAIL FROM:<a@b>\r\n"), Look::Is(First::Unknown));
}

#[test]
fn case_13_postgres_is_told_apart() {
    let tls = [0, 0, 0, 8, 4, 0xd2, 0x16, 0x2f];
    assert_eq!(look(&tls), Look::Is(First::Postgres));
    assert_eq!(look(&[0, 0, 0, 8, 4, 0xd2, 0x16, 0x30]), Look::Is(First::PostgresGss));
    assert_eq!(look(&[0, 0, 0, 0x29, 0, 3, 0, 0]), Look::Is(First::Unknown));
    for n in 1..8 {
        assert_eq!(look(&tls[..n]), Look::More(8));
    }
}

#[test]
fn case_14_old_huge_and_false_hellos_are_refused() {
    let good = hello("ok.test", true);
    assert!(odd(&look(&old())));
    let mut ancient = with(&good, |list| list.retain(|(k, _)| *k != 43));
    ancient[10] = 2;
    assert!(odd(&look(&ancient)));
    let huge = with(&good, |list| list.insert(0, (21, vec![0; 17_000])));
    assert!(odd(&look(&huge)));
    assert!(odd(&look(&huge[..20])), "the announced length is enough");
    assert!(odd(&look(&[0x16, 3, 1, 0, 0])), "an empty record");
    assert!(odd(&look(&[0x16, 3, 1, 0, 4, 2, 0, 0, 0])), "no client hello");
    assert!(odd(&look(&[0x16, 9])), "no version of TLS");
    let mut trailing = good.clone();
    trailing.extend([0]);
    let len = u16::from_be_bytes([trailing[3], trailing[4]]) + 1;
    trailing[3..5].copy_from_slice(&len.to_be_bytes());
    assert!(odd(&look(&trailing)));
}

#[test]
fn http_is_a_whole_request_line() {
    assert_eq!(look(b"GET / HTTP/1.1\r\n"), Look::Is(First::Http));
    assert_eq!(look(b"M-SEARCH * HTTP/1.0\n"), Look::Is(First::Http));
    assert_eq!(look(b"PRI * HTTP/2.0\r\n\r\nSM"), Look::Is(First::Http2));
    assert_eq!(look(b"GET / HTTP/1.1"), Look::More(15));
    assert_eq!(look(b"GET /\r\n"), Look::Is(First::Unknown));
    // However it is cut.
    fuzz(b"GGET /x\0\0 /x HTTP/1.1\r\n");
    assert_eq!(look(b"GET /\0 HTTP/1.1\r\n"), Look::Is(First::Unknown));
    fuzz(b"GET /\r HTTP/1.1\r\n");
    assert_eq!(look(&[b'A'; 30]), Look::Is(First::Unknown));
    let mut long = b"GET /".to_vec();
    long.resize(MOST, b'a');
    assert_eq!(look(&long), Look::Is(First::Unknown));
}

proptest! {
    #[test]
    fn any_bytes_keep_the_promises(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        fuzz(&bytes);
    }

    #[test]
    fn patched_hellos_keep_the_promises(at in 0usize..500, to in any::<u8>(), piece in 1usize..600) {
        let mut bytes = hello("ok.test", true);
        let n = bytes.len();
        bytes[at % n] = to;
        fuzz(&bytes);
        fuzz(&record_of(&bytes[9..], piece));
    }

    #[test]
    fn words_keep_the_promises(text in "[A-Z]{1,6} [ -~]{0,30}(\r\n|\n|)") {
        fuzz(text.as_bytes());
    }
}
