//! The targets: each gives bytes to a parser and checks what the parser promises.

use bivouac_egress::canonical;
use bivouac_egress::dns::Family;
use bivouac_egress::dns::wire::{self, Heard, Rcode, Told};
use bivouac_egress::policy::{Address, Compiled, Mode, Named};
use bivouac_types::host::{Host, Name};
use bivouac_types::id::ValueId;
use bivouac_types::policy::{HostPattern, NetworkPolicy};
use bivouac_types::secret;
use serde_json::Value;

/// A parser under test.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// Panics when a promise is broken.
    pub run: fn(&[u8]),
    /// Pieces that inputs are made of.
    pub words: &'static [&'static str],
    corpus: Corpus,
}

#[derive(Debug, Clone, Copy)]
enum Corpus {
    /// An input per line.
    Lines(&'static str),
    /// An input per line, in hexadecimal.
    Hex(&'static str),
}

impl Target {
    /// Inputs to begin with.
    #[must_use]
    pub fn corpus(&self) -> Vec<Vec<u8>> {
        match self.corpus {
            Corpus::Lines(text) => text.lines().map(|line| line.as_bytes().to_vec()).collect(),
            Corpus::Hex(text) => text.lines().map(unhex).collect(),
        }
    }
}

/// All of them.
pub const TARGETS: [Target; 8] = [
    Target {
        name: "host",
        run: host,
        words: &[
            "xn--", "0x", "255", ".", "..", "*.", "[::", "]", "ffff:", "%", "_", "\u{3002}",
            "\u{ad}",
        ],
        corpus: Corpus::Lines(include_str!("../corpus/host.txt")),
    },
    Target {
        name: "authority",
        run: authority,
        words: &["@", ":443", ":0", ":65536", "[", "]", "::", ".", "%40", "\0"],
        corpus: Corpus::Lines(include_str!("../corpus/authority.txt")),
    },
    Target {
        name: "path",
        run: path,
        words: &["/", "/../", "%2e", "%2F", "%25", "%5c", "%00", "..;", "//", "\\", "%", "%c3%a9"],
        corpus: Corpus::Lines(include_str!("../corpus/path.txt")),
    },
    Target {
        name: "policy",
        run: policy,
        words: &[
            "\"allow\":",
            "\"subnets\":",
            "\"deny\":",
            "\"match\":",
            "\"regex\":",
            "\"transform\":",
            "\"headers\":",
            "\"sign\":",
            "\"expiresAt\":",
            "{",
            "}",
            "[",
            "]",
            ",",
            "\"",
            "${secret:",
            "\"*\"",
            "null",
            "1e400",
            "\\u0000",
        ],
        corpus: Corpus::Lines(include_str!("../corpus/policy.txt")),
    },
    Target {
        name: "secret",
        run: secrets,
        words: &["${secret:", "}", "$", "{", "a", "-"],
        corpus: Corpus::Lines(include_str!("../corpus/secret.txt")),
    },
    Target {
        name: "hello",
        run: bivouac_egress::classify::fuzz,
        words: &[
            "\u{16}\u{3}\u{1}",
            "\u{3}\u{3}",
            "\0\0",
            "GET / HTTP/1.1\r\nHost: ",
            "\r\n\r\n",
            "example.com",
        ],
        corpus: Corpus::Hex(include_str!("../corpus/hello.hex")),
    },
    Target {
        name: "dns",
        run: dns,
        words: &["\0\0\u{1}\0\u{1}", "\0\0)", "\u{7}example\u{3}com\0", "\u{c0}\u{c}"],
        corpus: Corpus::Hex(include_str!("../corpus/dns.hex")),
    },
    Target {
        name: "archive",
        run: bivouac_runtime::archive::fuzz,
        words: &[
            "../",
            "/",
            "\0",
            "path=",
            "11 size=1\n",
            "9 path=\n",
            "SCHILY.xattr.user.a=",
            "GNU.sparse.map=",
            "ustar\0",
            "ustar  \0",
            ".wh.",
            "77777777777\0",
            "\u{80}",
            "1\n0\n",
        ],
        corpus: Corpus::Hex(include_str!("../corpus/archive.hex")),
    },
];

fn unhex(line: &str) -> Vec<u8> {
    let pairs = line.as_bytes().chunks(2).filter_map(|pair| std::str::from_utf8(pair).ok());
    pairs.filter_map(|pair| u8::from_str_radix(pair, 16).ok()).collect()
}

/// Reading a host again changes nothing, and policies read it alike.
fn host(bytes: &[u8]) {
    let wire = Host::parse(bytes);
    if let Ok(host) = &wire {
        assert_eq!(Host::parse(host.to_string().as_bytes()).as_ref(), Ok(host), "read again");
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return assert!(wire.is_err(), "not UTF-8") };
    match HostPattern::parse(text) {
        Ok(pattern) => {
            assert_eq!(
                HostPattern::parse(pattern.as_str()).as_ref(),
                Ok(&pattern),
                "pattern again"
            );
            assert!(pattern.as_str().is_ascii(), "{pattern}");
            let name = Name::parse(pattern.as_str().as_bytes());
            if pattern.is_wildcard() {
                assert!(name.is_err(), "a wildcard is a name");
            } else {
                assert_eq!(name.map(|n| n.to_string()), Ok(pattern.to_string()), "as on the wire");
            }
        }
        Err(_) => assert!(!matches!(wire, Ok(Host::Name(_))), "policies refuse {wire:?}"),
    }
}

/// Reading an authority again changes nothing; none has a user.
fn authority(bytes: &[u8]) {
    let Ok((host, port)) = canonical::authority(bytes) else { return };
    assert!(!bytes.contains(&b'@'), "a user");
    assert_ne!(port, Some(0), "port 0");
    let again = port.map_or(host.to_string(), |port| format!("{host}:{port}"));
    assert_eq!(canonical::authority(again.as_bytes()), Ok((host, port)), "read again");
}

/// Reading a path again changes nothing; no dot segment is left; what the strict reading accepts, the
/// other accepts.
fn path(bytes: &[u8]) {
    let Ok(raw) = std::str::from_utf8(bytes) else { return };
    let (strict, loose) = (canonical::path(raw, true), canonical::path(raw, false));
    assert!(strict.is_err() || loose.is_ok(), "only strictly");
    if let Ok((kept, other)) = canonical::readings(raw) {
        assert_eq!(canonical::readings(&kept), Ok((kept.clone(), other.clone())), "readings again");
        let other = other.unwrap_or(kept);
        assert_eq!(
            canonical::path(&other, true).as_ref(),
            Ok(&other),
            "the other reading is plain"
        );
    }
    for (path, strict) in [(strict, true), (loose, false)] {
        let Ok(path) = path else { continue };
        assert!(path.starts_with('/') && path.bytes().all(|b| b.is_ascii_graphic()), "{path}");
        assert!(path.split('/').all(|segment| segment != "." && segment != ".."), "{path}");
        assert_eq!(canonical::path(&path, strict).as_ref(), Ok(&path), "read again");
    }
}

/// A policy that is accepted is stored, compiled and read back; no header value is in it; one that
/// lists nothing allows nothing.
fn policy(bytes: &[u8]) {
    let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return };
    let mut minted = 0;
    let mut mint = || {
        minted += 1;
        ValueId::new(minted, [0; 10])
    };
    let Ok(draft) = NetworkPolicy::parse("networkPolicy", &value, &mut mint) else { return };
    let policy = draft.policy;
    let stored = serde_json::to_string(&policy).expect("a policy is JSON");
    // A mutation may put the word elsewhere, too, where it is no secret.
    let count = |text: &str| text.matches("CANARY").count();
    let hidden: usize = draft.values.values().map(|value| count(value.expose())).sum();
    if hidden == count(&value.to_string()) {
        assert_eq!(count(&stored), 0, "a header value is stored");
        assert_eq!(count(&policy.read_back().to_string()), 0, "a header value is read back");
        assert_eq!(count(&policy.request_form().to_string()), 0, "a header value is shown");
    }
    let again: NetworkPolicy = serde_json::from_str(&stored).expect("what was stored is read");
    assert_eq!(again, policy, "stored");
    let Ok(compiled) = Compiled::new(&policy) else { return };
    let ip = std::net::IpAddr::from([203, 0, 113, 7]);
    for text in ["example.com", "a.b.example.com", "xn--bcher-kva.example", "org"] {
        let name = Name::parse(text.as_bytes()).expect("a name");
        let reached = !matches!(compiled.named(&name, 443), Named::Deny(_));
        assert!(!reached || compiled.resolves(&name).allowed, "{text} is reached and not resolved");
        if compiled.mode() == Mode::DenyAll {
            assert!(!reached && !compiled.resolves(&name).allowed, "{text} in deny-all");
            assert!(matches!(compiled.address(ip), Address::Denied { .. }), "{ip} in deny-all");
        }
    }
}

/// The parts of a value are the value.
fn secrets(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(parts) = secret::parts(text) else { return };
    let joined: String = parts
        .iter()
        .map(|part| match part {
            secret::Part::Text(text) => (*text).to_owned(),
            secret::Part::Named(name) => format!("${{secret:{name}}}"),
        })
        .collect();
    assert_eq!(joined, text, "joined again");
}

/// What the guest asks and what name servers answer: an answer has the query's id, fits, and is no
/// query.
fn dns(bytes: &[u8]) {
    match wire::hear(bytes) {
        Heard::Noise => {}
        Heard::Unserved(answer) => {
            assert!(answer.len() >= 12 && answer[2] & 0x80 != 0, "{answer:?}");
            assert_eq!(wire::hear(&answer), Heard::Noise, "an answer is a query");
        }
        Heard::Question(question) => {
            let addresses = [std::net::IpAddr::from([203, 0, 113, 7]); 40];
            for told in [
                Told::just(Rcode::NxDomain),
                Told { addresses: &addresses, ttl: 5, ..Told::just(Rcode::NoError) },
            ] {
                let limit = question.datagram_limit();
                let answer = question.answer(&told, limit);
                assert!(answer.len() <= limit, "{} bytes of {limit}", answer.len());
                assert_eq!(&answer[..2], &bytes[..2], "id");
                assert_eq!(wire::hear(&answer), Heard::Noise, "an answer is a query");
            }
            if let Some(dotted) = &question.dotted {
                let _ = canonical::host(dotted);
            }
        }
    }
    if let [high, low, ..] = *bytes {
        let id = u16::from_be_bytes([high, low]);
        for family in [Family::V4, Family::V6] {
            let found = wire::reply(bytes, id, "example.com", family, false);
            if let Ok(wire::Reply::Found { addresses, .. }) = found {
                let right = |ip: &std::net::IpAddr| ip.is_ipv4() == (family == Family::V4);
                assert!(!addresses.is_empty() && addresses.iter().all(right), "{addresses:?}");
            }
        }
    }
}
