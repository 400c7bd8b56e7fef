//! What is compared: host names, authorities and paths in one form each (reference/egress.md §3.5).
//!
//! Owns the reading of authorities and paths; names and addresses are read by
//! [`bivouac_types::host`], which policies use as well. Invariant: what was matched is what is
//! forwarded, reading a result again changes nothing, and bytes with two readings have none. Called by
//! `classify`, `dns`, `intercept` and by whoever else meets a name from the guest or from upstream.

pub use bivouac_types::host::{Host, Name, NameError};

/// Reads a host as it stands on the wire.
///
/// # Errors
/// [`NameError`] that says which rule the bytes break.
pub fn host(bytes: &[u8]) -> Result<Host, NameError> {
    Host::parse(bytes)
}

/// Reads `HOST` or `HOST:PORT`: the `Host` header, `:authority`, the authority of a URL. A user name
/// is never accepted: what stands before `@` is there to deceive.
///
/// # Errors
/// [`NameError`] that says which rule the bytes break.
pub fn authority(bytes: &[u8]) -> Result<(Host, Option<u16>), NameError> {
    if bytes.contains(&b'@') {
        return Err(NameError("must not hold a user name"));
    }
    // The colons of an address in brackets do not begin a port.
    let after = bytes.iter().rposition(|b| *b == b']').unwrap_or(0);
    match bytes[after..].iter().position(|b| *b == b':') {
        None => Ok((host(bytes)?, None)),
        Some(colon) => {
            let (name, digits) = (&bytes[..after + colon], &bytes[after + colon + 1..]);
            Ok((host(name)?, Some(port(digits)?)))
        }
    }
}

fn port(digits: &[u8]) -> Result<u16, NameError> {
    let plain = digits.first().is_some_and(|b| *b != b'0') && digits.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(digits)
        .ok()
        .filter(|_| plain)
        .and_then(|text| text.parse().ok())
        .ok_or(NameError("has a port that is not 1 to 65535"))
}

/// Why a path is refused: a clause that follows "the path".
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the path {0}")]
pub struct PathError(pub &'static str);

/// Reads the path of a request, without its query, and answers the form to match and to forward:
/// unreserved characters decoded, hexadecimal digits in upper case, dot segments resolved. A percent
/// sign that escapes nothing is itself escaped, so that nobody decodes it a second time.
///
/// `strict` is for requests that rules judge by their path. Then what a server may read in another way
/// is refused: encoded slashes, backslashes and control characters, double encoding, and dot segments
/// that carry parameters (`..;x`); empty segments are removed, because most servers do so.
///
/// # Errors
/// [`PathError`] that says what is wrong.
pub fn path(raw: &str, strict: bool) -> Result<String, PathError> {
    check_bytes(raw)?;
    resolve(&decode(raw, strict, false)?, strict)
}

/// Reads a path strictly, as [`path`] does, but for encoded slashes: they stay. The second answer is
/// then the path in which they are slashes. Whoever can show that both mean the same to him may use the
/// first; package names and branches are written so (`/@scope%2fname`).
///
/// # Errors
/// [`PathError`] as for [`path`], and when the slashes would hide dot segments or empty ones.
pub fn readings(raw: &str) -> Result<(String, Option<String>), PathError> {
    check_bytes(raw)?;
    let kept = resolve(&decode(raw, true, true)?, true)?;
    if !kept.contains("%2F") {
        return Ok((kept, None));
    }
    let other = kept.replace("%2F", "/");
    if resolve(&other, true).as_ref() != Ok(&other) {
        return Err(PathError("hides dot segments or empty ones behind encoded slashes"));
    }
    Ok((kept, Some(other)))
}

fn check_bytes(raw: &str) -> Result<(), PathError> {
    if !raw.starts_with('/') {
        return Err(PathError("must begin with a slash"));
    }
    if raw.bytes().any(|b| !b.is_ascii_graphic() || matches!(b, b'\\' | b'#' | b'?')) {
        return Err(PathError("holds a character that must be percent-encoded"));
    }
    Ok(())
}

/// Decodes what needs no encoding, and only that. `slashes`: an encoded slash is no fault.
fn decode(raw: &str, strict: bool, slashes: bool) -> Result<String, PathError> {
    let mut out = String::with_capacity(raw.len());
    let mut rest = raw;
    while let Some((before, after)) = rest.split_once('%') {
        out.push_str(before);
        let Some(byte) = hex(after) else {
            if strict {
                return Err(PathError("holds a percent sign that encodes nothing"));
            }
            out.push_str("%25");
            rest = after;
            continue;
        };
        rest = &after[2..];
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            out.push(char::from(byte));
            continue;
        }
        let slash = byte == b'/' && !slashes;
        if byte == 0 || (strict && (byte.is_ascii_control() || slash || byte == b'\\')) {
            return Err(PathError("holds an encoded slash, backslash or control character"));
        }
        out.push('%');
        for digit in [byte >> 4, byte & 15] {
            out.push(char::from(b"0123456789ABCDEF"[usize::from(digit)]));
        }
    }
    out.push_str(rest);
    // Asked of the result: what follows an encoded percent sign may itself have been encoded.
    let twice = |(at, _): (usize, &str)| hex(&out[at + 3..]).is_some_and(misleads);
    if strict && out.match_indices("%25").any(twice) {
        return Err(PathError("is encoded twice"));
    }
    Ok(out)
}

/// The byte that two hexadecimal digits at the front encode.
fn hex(text: &str) -> Option<u8> {
    let digits = text.get(..2).filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()))?;
    u8::from_str_radix(digits, 16).ok()
}

/// Whether a second decoding to this byte would change how a path is cut, or allow a third one.
fn misleads(byte: u8) -> bool {
    byte.is_ascii_control() || matches!(byte, b'.' | b'/' | b'\\' | b'%' | b'?' | b'#')
}

/// Resolves `.` and `..`; the first segment is what stands behind the first slash.
fn resolve(path: &str, strict: bool) -> Result<String, PathError> {
    let mut kept: Vec<&str> = Vec::new();
    let mut segments = path[1..].split('/').peekable();
    while let Some(segment) = segments.next() {
        let last = segments.peek().is_none();
        let bare = segment.split(';').next().unwrap_or(segment);
        if strict && bare.len() != segment.len() && matches!(bare, "." | "..") {
            return Err(PathError("has a dot segment with parameters"));
        }
        match segment {
            "" if strict && !last => {}
            "." | ".." => {
                if segment == ".." {
                    kept.pop();
                }
                // What is left is a folder.
                if last {
                    kept.push("");
                }
            }
            _ => kept.push(segment),
        }
    }
    Ok(format!("/{}", kept.join("/")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn authorities() {
        for (text, want) in [
            ("Example.com", "example.com None"),
            ("example.com.:8443", "example.com Some(8443)"),
            ("127.1:80", "127.0.0.1 Some(80)"),
            ("[::1]:443", "[::1] Some(443)"),
            ("[::1]", "[::1] None"),
        ] {
            let (host, port) = authority(text.as_bytes()).unwrap();
            assert_eq!(format!("{host} {port:?}"), want);
        }
        for bad in [
            "",
            ":80",
            "a.com:",
            "a.com:0",
            "a.com:080",
            "a.com:65536",
            "a.com:+80",
            "a.com:80:80",
            "ok.com@evil.com",
            "ok.com:80@evil.com",
            "@a.com",
            "::1",
            "[::1]x:80",
            "[::1]x",
            "a.com:443 ",
            "a.com/",
            "https://a.com",
            "a.com,b.com",
            "a[::1]",
        ] {
            assert!(authority(bad.as_bytes()).is_err(), "{bad:?} {:?}", authority(bad.as_bytes()));
        }
    }

    #[test]
    fn a_user_is_named_as_the_fault() {
        for text in ["ok.com@evil.com", "a:b@evil.com:443", "evil.com@"] {
            let error = authority(text.as_bytes()).unwrap_err();
            assert_eq!(error.to_string(), "must not hold a user name", "{text}");
        }
    }

    #[test]
    fn paths_of_both_kinds() {
        for (raw, want) in [
            ("/", "/"),
            ("/a/b", "/a/b"),
            ("/a/./b/", "/a/b/"),
            ("/public/../secret", "/secret"),
            ("/public/%2e%2E/secret", "/secret"),
            ("/a/..", "/"),
            ("/a/b/..", "/a/"),
            ("/a/.", "/a/"),
            ("/../../x", "/x"),
            ("/%7euser/%41%2d", "/~user/A-"),
            ("/a%20b%c3%a9", "/a%20b%C3%A9"),
            ("/a;v=1/b", "/a;v=1/b"),
            ("/...", "/..."),
            ("/100%25", "/100%25"),
            ("/100%25zz", "/100%25zz"),
        ] {
            assert_eq!(path(raw, true).as_deref(), Ok(want), "{raw}");
            assert_eq!(path(raw, false).as_deref(), Ok(want), "{raw}");
        }
        for bad in
            ["", "a", "*", "/a b", "/\u{7f}", "/é", "/a\\b", "/a#b", "/a?b", "/a%00", "http://a/"]
        {
            assert!(path(bad, true).is_err() && path(bad, false).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_only_a_path_rule_refuses() {
        for (raw, loose) in [
            ("/@scope%2fname", "/@scope%2Fname"),
            ("/a%5cb", "/a%5Cb"),
            ("/a%0d%0ab", "/a%0D%0Ab"),
            ("/%252e%252e/x", "/%252e%252e/x"),
            ("/a%252fb", "/a%252fb"),
            ("/a%25252e", "/a%25252e"),
            ("/%25%32e%25%32%65/x", "/%252e%252e/x"),
            ("/%252%352e", "/%25252e"),
            ("/100%", "/100%25"),
            ("/%%41", "/%25A"),
            ("/%%34%31", "/%2541"),
            ("/public/..;x/secret", "/public/..;x/secret"),
            ("/public/.;/secret", "/public/.;/secret"),
        ] {
            assert!(path(raw, true).is_err(), "{raw}");
            assert_eq!(path(raw, false).as_deref(), Ok(loose), "{raw}");
        }
        assert_eq!(path("//a///b//", true).as_deref(), Ok("/a/b/"));
        assert_eq!(path("//a///b//", false).as_deref(), Ok("//a///b//"));
    }

    #[test]
    fn encoded_slashes_have_two_readings() {
        for (raw, kept, other) in [
            ("/a/b", "/a/b", None),
            ("/@scope%2fname", "/@scope%2Fname", Some("/@scope/name")),
            ("/a/../b%2Fc%2f", "/b%2Fc%2F", Some("/b/c/")),
        ] {
            assert_eq!(readings(raw), Ok((kept.to_owned(), other.map(str::to_owned))), "{raw}");
        }
        for bad in [
            "/a%2f..%2fb",
            "/a%2f..",
            "/a%2f%2e",
            "/%2fa",
            "/a%2f/b",
            "/a%2f%2fb",
            "/a%2f..;x",
            "/a%252fb",
            "/a%5cb",
            "/a%2fb%00",
            "/a%2f%",
        ] {
            assert!(readings(bad).is_err(), "{bad} {:?}", readings(bad));
        }
    }

    /// Paths out of the pieces that matter.
    fn any_path() -> impl Strategy<Value = String> {
        let piece = proptest::sample::select(vec![
            "/", "/", ".", "..", "%2e", "%2E", "%2f", "%5C", "%25", "%", "a", "b", ";", "%41",
            "%00", "2e", "2f", "%7E", "é", "~",
        ]);
        proptest::collection::vec(piece, 0..16).prop_map(|p| format!("/{}", p.concat()))
    }

    proptest! {
        #[test]
        fn reading_a_path_twice_changes_nothing(raw in any_path(), strict: bool) {
            if let Ok(once) = path(&raw, strict) {
                prop_assert_eq!(path(&once, strict), Ok(once.clone()), "{}", raw);
                prop_assert!(once.split('/').all(|s| s != "." && s != ".."), "{} of {}", once, raw);
            }
        }

        #[test]
        fn readings_are_the_strict_path_but_for_slashes(raw in any_path()) {
            match (path(&raw, true), readings(&raw)) {
                (Ok(strict), both) => prop_assert_eq!(both, Ok((strict, None))),
                (Err(_), Err(_)) => {}
                (Err(_), Ok((kept, other))) => {
                    prop_assert_eq!(readings(&kept), Ok((kept.clone(), other.clone())));
                    // None: the slash stood in a segment that a later one took back.
                    let other = other.unwrap_or_else(|| kept.clone());
                    prop_assert_eq!(path(&other, true), Ok(other.clone()), "{}", kept);
                    prop_assert_eq!(path(&kept, false), Ok(kept));
                }
            }
        }

        #[test]
        fn a_server_that_decodes_twice_sees_the_strict_path(raw in any_path()) {
            if let Ok(once) = path(&raw, true) {
                // Decodes all there is, as careless servers do, and cuts into segments.
                let careless = |text: &str| {
                    let mut out = Vec::new();
                    let bytes = text.as_bytes();
                    let mut i = 0;
                    while i < bytes.len() {
                        let digits = text.get(i + 1..i + 3).filter(|_| bytes[i] == b'%');
                        match digits.and_then(|d| u8::from_str_radix(d, 16).ok()) {
                            Some(byte) => { out.push(byte); i += 3; }
                            None => { out.push(bytes[i]); i += 1; }
                        }
                    }
                    String::from_utf8_lossy(&out).into_owned()
                };
                let twice = careless(&careless(&once));
                prop_assert_eq!(twice.matches('/').count(), once.matches('/').count(), "{}", once);
                prop_assert!(twice.split('/').all(|s| s != ".."), "{}", once);
            }
        }

        #[test]
        fn no_authority_makes_it_panic(bytes: Vec<u8>) {
            if let Ok((host, port)) = authority(&bytes) {
                let again = match port {
                    Some(port) => format!("{host}:{port}"),
                    None => host.to_string(),
                };
                prop_assert_eq!(authority(again.as_bytes()), Ok((host, port)));
            }
        }
    }
}
