//! What the first bytes of a connection are.
//!
//! Owns the look at a client's first bytes: TLS hello, HTTP/1 request line, Postgres' request for TLS,
//! or none of these. Invariant: it is a pure function of the bytes; however they are cut into segments
//! and records, the answer is the one for the whole, and no more than [`MOST`] bytes are ever asked for.
//! A hello counts only when rustls and the look of our own agree about the name in it. All bytes are
//! the guest's: nothing here trusts a length.
//!
//! Called by [`crate::broker`] for each connection, and by the fuzzer.

use rustls::server::Acceptor;

/// Most bytes that are looked at: a longer hello or request line is refused.
pub const MOST: usize = 16 * 1024;

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Look {
    /// Cannot be told before this many bytes are there.
    More(usize),
    /// It is this.
    Is(First),
}

/// What begins a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum First {
    /// A sound TLS hello.
    Tls(Hello),
    /// It begins like TLS and is not sound, or is too old; why, in words.
    Odd(&'static str),
    /// A request line of HTTP/1.
    Http,
    /// HTTP/2 without TLS.
    Http2,
    /// Postgres: the client asks whether the server speaks TLS.
    Postgres,
    /// Postgres: the client asks for GSS encryption.
    PostgresGss,
    /// Something else.
    Unknown,
}

/// A TLS hello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The server name, lower-case, without a dot at the end.
    pub name: Option<String>,
    /// Whether it has the extension for encrypted hellos. A browser sends it as grease too, and
    /// nobody can tell which.
    pub encrypted: bool,
    /// Whether TLS 1.3 is offered.
    pub tls13: bool,
}

/// Looks at the first bytes of a connection.
#[must_use]
pub fn look(bytes: &[u8]) -> Look {
    match bytes.first() {
        None => Look::More(1),
        Some(0x16) => tls(bytes),
        Some(0x00) => postgres(bytes),
        Some(b'A'..=b'Z') => http(bytes),
        Some(_) => Look::Is(First::Unknown),
    }
}

fn postgres(bytes: &[u8]) -> Look {
    const TLS: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];
    const GSS: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x30];
    let have = &bytes[..bytes.len().min(8)];
    if have == TLS {
        Look::Is(First::Postgres)
    } else if have == GSS {
        Look::Is(First::PostgresGss)
    } else if have.len() < 8 && (TLS.starts_with(have) || GSS.starts_with(have)) {
        Look::More(8)
    } else {
        Look::Is(First::Unknown)
    }
}

/// `METHOD target HTTP/1.x` up to its line end: less would take other protocols of words for HTTP.
fn http(bytes: &[u8]) -> Look {
    const LONGEST_METHOD: usize = 20;
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n";
    let end = bytes.iter().position(|b| !b.is_ascii_uppercase() && *b != b'-');
    match end {
        None if bytes.len() <= LONGEST_METHOD => return Look::More(bytes.len() + 1),
        Some(n) if n <= LONGEST_METHOD && bytes[n] == b' ' => {}
        _ => return Look::Is(First::Unknown),
    }
    if bytes.starts_with(PREFACE) {
        return Look::Is(First::Http2);
    }
    let seen = &bytes[..bytes.len().min(MOST)];
    let line_end = seen.iter().position(|b| *b == b'\n');
    // A byte below space never stands in a request line but at its end, whether that is here or not.
    let line = &seen[..line_end.unwrap_or(seen.len())];
    if line.iter().any(|b| *b < b' ' && *b != b'\r') {
        return Look::Is(First::Unknown);
    }
    if line_end.is_none() {
        let full = bytes.len() >= MOST;
        return if full { Look::Is(First::Unknown) } else { Look::More(bytes.len() + 1) };
    }
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let version = line.rsplit(|b| *b == b' ').next().unwrap_or_default();
    if version == b"HTTP/1.1" || version == b"HTTP/1.0" {
        Look::Is(First::Http)
    } else {
        Look::Is(First::Unknown)
    }
}

fn tls(bytes: &[u8]) -> Look {
    match hello_bytes(bytes) {
        Err(look) => look,
        Ok(message) => Look::Is(match sound(&message, bytes) {
            Ok(hello) => First::Tls(hello),
            Err(why) => First::Odd(why),
        }),
    }
}

/// Puts the handshake message together from its records.
fn hello_bytes(bytes: &[u8]) -> Result<Vec<u8>, Look> {
    const HEADER: usize = 5;
    let odd = |why| Err(Look::Is(First::Odd(why)));
    let more = |at_least: usize| {
        if at_least > MOST { odd("the hello is too long") } else { Err(Look::More(at_least)) }
    };
    let mut message = Vec::new();
    let mut at = 0;
    loop {
        let rest = &bytes[at..];
        // What is there of a header is judged before more is waited for.
        if rest.first().is_some_and(|kind| *kind != 0x16) {
            return odd("another record stands before the hello's end");
        }
        if rest.get(1).is_some_and(|major| *major != 3) {
            return odd("the record's version is none of TLS");
        }
        let Some(header) = rest.first_chunk::<HEADER>() else {
            return more(at + HEADER);
        };
        let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if len == 0 || len > MOST {
            return odd("a record of the hello has an impossible length");
        }
        // Before its bytes are looked at, so that the answer does not depend on how many are there.
        if at + HEADER + len > MOST {
            return odd("the hello is too long");
        }
        let body = &rest[HEADER..rest.len().min(HEADER + len)];
        message.extend_from_slice(body);
        if message.first().is_some_and(|kind| *kind != 1) {
            return odd("the first message is no client hello");
        }
        if let Some(&[_, a, b, c]) = message.first_chunk::<4>() {
            let whole = 4 + (usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c));
            if whole > MOST {
                return odd("the hello is too long");
            }
            if message.len() > whole {
                return odd("something follows the hello in its record");
            }
            if message.len() == whole && body.len() == len {
                return Ok(message);
            }
        }
        at += HEADER + len;
        if body.len() < len {
            return more(at);
        }
    }
}

/// Reads a hello; `raw` are its records, for rustls.
fn sound(message: &[u8], raw: &[u8]) -> Result<Hello, &'static str> {
    let seen = Seen::read(message).ok_or("the hello is malformed")?;
    if seen.duplicate {
        return Err("the hello has an extension twice");
    }
    if seen.newest < 0x0303 {
        return Err("the hello offers nothing newer than TLS 1.1");
    }
    let ours = match seen.name {
        None => None,
        Some(list) => Some(one_name(list).ok_or("the server name is malformed")?),
    };
    let mut acceptor = Acceptor::default();
    let mut rest = raw;
    let accepted = loop {
        match acceptor.accept() {
            Ok(Some(accepted)) => break accepted,
            Ok(None) => {}
            Err(_) => return Err("the hello is malformed"),
        }
        match acceptor.read_tls(&mut rest) {
            Ok(0) | Err(_) => return Err("the hello is malformed"),
            Ok(_) => {}
        }
    };
    let theirs = accepted.client_hello().server_name().map(str::to_owned);
    if ours != theirs {
        return Err("the server name is no host name");
    }
    Ok(Hello { name: theirs, encrypted: seen.encrypted, tls13: seen.newest >= 0x0304 })
}

/// The only name of a `server_name` extension, lower-case, without a dot at the end.
fn one_name(list: &[u8]) -> Option<String> {
    let mut outer = Reader(list);
    let mut names = Reader(outer.short_vec()?);
    if !outer.0.is_empty() || names.u8()? != 0 {
        return None;
    }
    let name = names.short_vec()?;
    if !names.0.is_empty() {
        return None;
    }
    let name = std::str::from_utf8(name).ok()?.to_ascii_lowercase();
    Some(name.strip_suffix('.').unwrap_or(&name).to_owned())
}

/// What our own look finds.
#[derive(Default)]
struct Seen<'a> {
    name: Option<&'a [u8]>,
    encrypted: bool,
    duplicate: bool,
    newest: u16,
}

impl<'a> Seen<'a> {
    fn read(message: &'a [u8]) -> Option<Self> {
        const SERVER_NAME: u16 = 0;
        const VERSIONS: u16 = 43;
        const ENCRYPTED_HELLO: u16 = 0xfe0d;
        let mut r = Reader(message.get(4..)?);
        let mut seen = Self { newest: r.u16()?, ..Self::default() };
        r.take(32)?;
        r.byte_vec()?;
        r.short_vec()?;
        r.byte_vec()?;
        if r.0.is_empty() {
            return Some(seen);
        }
        let mut extensions = Reader(r.short_vec()?);
        if !r.0.is_empty() {
            return None;
        }
        let mut kinds = Vec::new();
        while !extensions.0.is_empty() {
            let kind = extensions.u16()?;
            let body = extensions.short_vec()?;
            kinds.push(kind);
            match kind {
                SERVER_NAME => seen.name = Some(body),
                ENCRYPTED_HELLO => seen.encrypted = true,
                VERSIONS => {
                    let mut list = Reader(body);
                    let mut versions = Reader(list.byte_vec()?);
                    seen.newest = 0;
                    while !versions.0.is_empty() {
                        let version = versions.u16()?;
                        // Grease looks like 0x?a?a and is no version.
                        if version & 0x0f0f != 0x0a0a && version >> 8 == 3 {
                            seen.newest = seen.newest.max(version);
                        }
                    }
                }
                _ => {}
            }
        }
        kinds.sort_unstable();
        seen.duplicate = kinds.windows(2).any(|pair| pair[0] == pair[1]);
        Some(seen)
    }
}

/// Takes fields off the front; `None` when they are not there.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }
    fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }
    fn u16(&mut self) -> Option<u16> {
        self.take(2).map(|b| u16::from_be_bytes([b[0], b[1]]))
    }
    fn byte_vec(&mut self) -> Option<&'a [u8]> {
        let n = self.u8()?;
        self.take(usize::from(n))
    }
    fn short_vec(&mut self) -> Option<&'a [u8]> {
        let n = self.u16()?;
        self.take(usize::from(n))
    }
}

/// The fuzzer's way in: looks at every beginning of `bytes` and checks what the module promises.
///
/// # Panics
/// When a promise is broken.
pub fn fuzz(bytes: &[u8]) {
    let whole = look(bytes);
    if let Look::More(n) = whole {
        assert!(n > bytes.len(), "asked for {n} bytes and has {}", bytes.len());
        assert!(n <= MOST.max(bytes.len() + 1));
    }
    // Few lengths, or long inputs take for ever.
    let step = (bytes.len() / 64).max(1);
    let mut decided = None;
    for n in (0..=bytes.len()).step_by(step) {
        if let Look::Is(first) = look(&bytes[..n]) {
            if let Some(before) = &decided {
                assert_eq!(before, &first, "the answer changed at {n}");
            }
            decided = Some(first);
        } else {
            assert!(decided.is_none(), "an answer was taken back at {n}");
        }
    }
    if let Some(decided) = decided {
        assert_eq!(whole, Look::Is(decided), "the answer changed at the end");
    }
}

#[cfg(test)]
pub(crate) mod tests;
