//! Java's key stores, in the one form that every Java reads without a password: JKS.
//!
//! Owns the format: a header (magic number, version, count), entries (kind, alias, time in ms, type,
//! certificate) and a SHA-1 over a fixed text, a password and everything before. Java checks the digest only
//! for those who name a password; everybody names `changeit`. Invariant: what [`read`] gets is the
//! guest's or the image's and is believed in nothing: lengths are checked, what is odd ends the reading.
//! Pure. Called by [`super`].

use std::collections::BTreeSet;

use aws_lc_rs::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

const MAGIC: u32 = 0xfeed_feed;
const VERSION: u32 = 2;
/// Kinds of entries.
const KEY: u32 = 1;
const CERTIFICATE: u32 = 2;
const TYPE: &str = "X.509";
/// The password of every such store.
const PASSWORD: &str = "changeit";
/// What the digest begins with, after the password.
const SALT: &[u8] = b"Mighty Aphrodite";
/// Most certificates of a store: no host trusts so many.
const MOST: usize = 4096;

/// A certificate and the name that `keytool` shows for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) alias: String,
    pub(super) der: Vec<u8>,
}

/// The store of these certificates; one that is there twice is written once, and no two have one alias: for
/// Java the later would be the only one. `at` is their time, ms since the epoch.
pub(super) fn write(entries: &[Entry], at: u64) -> Vec<u8> {
    let mut seen = BTreeSet::new();
    let entries: Vec<_> =
        entries.iter().filter(|e| seen.insert(e.der.as_slice())).take(MOST).collect();
    let size: usize = entries.iter().map(|e| e.alias.len() + e.der.len() + 32).sum();
    let mut out = Vec::with_capacity(size + 32);
    number(&mut out, MAGIC);
    number(&mut out, VERSION);
    number(&mut out, entries.len() as u32);
    let mut aliases = BTreeSet::new();
    for (index, entry) in entries.into_iter().enumerate() {
        number(&mut out, CERTIFICATE);
        let mut alias = entry.alias.clone();
        while !aliases.insert(alias.clone()) {
            alias = format!("{alias}-{index}");
        }
        text(&mut out, &alias);
        out.extend_from_slice(&at.to_be_bytes());
        text(&mut out, TYPE);
        number(&mut out, entry.der.len() as u32);
        out.extend_from_slice(&entry.der);
    }
    let mut digest = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    for unit in PASSWORD.encode_utf16() {
        digest.update(&unit.to_be_bytes());
    }
    digest.update(SALT);
    digest.update(&out);
    out.extend_from_slice(digest.finish().as_ref());
    out
}

fn number(out: &mut Vec<u8>, n: u32) {
    out.extend_from_slice(&n.to_be_bytes());
}

/// Java's `writeUTF`; aliases are ASCII here, for which that is the text itself.
fn text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u16).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// The certificates of a store that somebody else wrote; none when it is no JKS, or a broken one. The
/// digest is not looked at: it proves nothing, and the password may be another one.
pub(super) fn read(bytes: &[u8]) -> Option<Vec<Entry>> {
    let mut rest = Rest(bytes);
    if rest.number()? != MAGIC || rest.number()? != VERSION {
        return None;
    }
    let count = rest.number()?;
    let mut entries = Vec::new();
    for _ in 0..count {
        let kind = rest.number()?;
        let alias = rest.text()?;
        rest.take(8)?;
        match kind {
            CERTIFICATE => {
                let (kind, der) = (rest.text()?, rest.bytes()?);
                if kind == TYPE && is_whole(der) && entries.len() < MOST {
                    entries.push(Entry { alias: plain(&alias), der: der.to_vec() });
                }
            }
            // Keys have no business in a store of authorities.
            KEY => {
                rest.bytes()?;
                for _ in 0..rest.number()? {
                    rest.text()?;
                    rest.bytes()?;
                }
            }
            _ => return None,
        }
    }
    Some(entries)
}

/// An alias as [`write`] can write it: short, lower case as Java has it, ASCII.
fn plain(alias: &str) -> String {
    let good = |c: char| if c.is_ascii_graphic() { c.to_ascii_lowercase() } else { '_' };
    alias.chars().take(200).map(good).collect()
}

struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_be_bytes)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let n = self.number()?;
        self.take(usize::try_from(n).ok()?)
    }

    fn text(&mut self) -> Option<String> {
        let n = u16::from_be_bytes(self.take(2)?.try_into().ok()?);
        self.take(n.into()).map(|text| String::from_utf8_lossy(text).into_owned())
    }
}

/// The certificates in a PEM text, with aliases that begin with `prefix`. What is none is skipped.
pub(super) fn of_pem(pem: &[u8], prefix: &str) -> Vec<Entry> {
    const BEGIN: &[u8] = b"-----BEGIN CERTIFICATE-----";
    const END: &[u8] = b"-----END CERTIFICATE-----";
    let find = |text: &[u8], what: &[u8]| text.windows(what.len()).position(|w| w == what);
    let (mut out, mut rest) = (Vec::new(), pem);
    while let Some(start) = find(rest, BEGIN) {
        rest = &rest[start + BEGIN.len()..];
        let Some(end) = find(rest, END) else { break };
        let text: Vec<u8> =
            rest[..end].iter().copied().filter(|b| !b.is_ascii_whitespace()).collect();
        rest = &rest[end + END.len()..];
        if let Ok(der) = STANDARD.decode(text)
            && is_whole(&der)
        {
            out.push(Entry { alias: format!("{prefix}{}", out.len() + 1), der });
        }
    }
    out
}

/// Whether it is one DER sequence, neither cut nor followed by something: Java refuses a whole store for
/// one certificate that it cannot read.
fn is_whole(der: &[u8]) -> bool {
    let long = |n: usize| {
        let length = der.get(2..2 + n)?;
        let length = length.iter().fold(0usize, |sum, b| (sum << 8) | usize::from(*b));
        Some(2 + n + length)
    };
    let total = match (der.first(), der.get(1)) {
        (Some(0x30), Some(n @ 0..=0x7f)) => Some(2 + usize::from(*n)),
        (Some(0x30), Some(0x81)) => long(1),
        (Some(0x30), Some(0x82)) => long(2),
        (Some(0x30), Some(0x83)) => long(3),
        _ => None,
    };
    total == Some(der.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(alias: &str, size: usize) -> Entry {
        let mut der = vec![0x30, 0x82];
        der.extend_from_slice(&(size as u16).to_be_bytes());
        der.resize(size + 4, alias.len() as u8);
        Entry { alias: alias.to_owned(), der }
    }

    #[test]
    fn a_store_is_read_back_and_its_digest_is_right() {
        let entries = [entry("one", 700), entry("session", 300), entry("one", 700)];
        let store = write(&entries, 1_700_000_000_000);
        assert_eq!(store[..12], [0xfe, 0xed, 0xfe, 0xed, 0, 0, 0, 2, 0, 0, 0, 2]);
        assert_eq!(read(&store).unwrap(), entries[..2]);
        let (body, digest) = store.split_at(store.len() - 20);
        let salted = [b"\0c\0h\0a\0n\0g\0e\0i\0tMighty Aphrodite", body].concat();
        let want = aws_lc_rs::digest::digest(&SHA1_FOR_LEGACY_USE_ONLY, &salted);
        assert_eq!(digest, want.as_ref());
        let store = write(&[entry("one", 7), entry("one", 8), entry("two", 7)], 0);
        let aliases: Vec<_> = read(&store).unwrap().into_iter().map(|e| e.alias).collect();
        assert_eq!(aliases, ["one", "one-1"]);
        // An empty one is one, too.
        assert_eq!(read(&write(&[], 0)).unwrap(), []);
    }

    #[test]
    fn a_broken_or_strange_store_gives_nothing_and_never_panics() {
        let store = write(&[entry("one", 700), entry("two", 3)], 0);
        for cut in 0..store.len() - 20 {
            assert_eq!(read(&store[..cut]), None, "{cut}");
        }
        for at in 0..12 {
            let mut odd = store.clone();
            odd[at] ^= 0xff;
            assert_eq!(read(&odd), None, "{at}");
        }
        assert_eq!(read(b"0\x82\x01\x02 PKCS#12 begins like a certificate"), None);
        // A key, and a certificate that is cut, are passed over.
        let mut mixed = Vec::new();
        for n in [MAGIC, VERSION, 3] {
            number(&mut mixed, n);
        }
        number(&mut mixed, KEY);
        text(&mut mixed, "mine");
        mixed.extend_from_slice(&[0; 8]);
        number(&mut mixed, 3);
        mixed.extend_from_slice(b"key");
        number(&mut mixed, 1);
        text(&mut mixed, TYPE);
        number(&mut mixed, 2);
        mixed.extend_from_slice(b"of");
        for (alias, der) in [("Cut", &entry("x", 40).der[..20]), ("Über Ä", &entry("x", 40).der)]
        {
            number(&mut mixed, CERTIFICATE);
            text(&mut mixed, alias);
            mixed.extend_from_slice(&[0; 8]);
            text(&mut mixed, TYPE);
            number(&mut mixed, der.len() as u32);
            mixed.extend_from_slice(der);
        }
        let found = read(&mixed).unwrap();
        assert_eq!(found, [Entry { alias: "_ber__".to_owned(), ..entry("x", 40) }]);
    }

    #[test]
    fn certificates_are_found_in_a_bundle() {
        let (one, two) = (entry("1", 90), entry("22", 20));
        let pem = |entry: &Entry| {
            let text = STANDARD.encode(&entry.der);
            let lines: Vec<_> = text.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
            format!(
                "-----BEGIN CERTIFICATE-----\r\n{}\r\n-----END CERTIFICATE-----\n",
                lines.join("\r\n")
            )
        };
        let bad = "-----BEGIN CERTIFICATE-----\n%%%\n-----END CERTIFICATE-----\n";
        let cut = pem(&Entry { alias: String::new(), der: one.der[..40].to_vec() });
        let text = format!(
            "# words\n{}{bad}{cut}{}-----BEGIN CERTIFICATE-----\nrest",
            pem(&one),
            pem(&two)
        );
        let found = of_pem(text.as_bytes(), "system-");
        let want = |n: u32, entry: &Entry| Entry { alias: format!("system-{n}"), ..entry.clone() };
        assert_eq!(found, [want(1, &one), want(2, &two)]);
    }
}
