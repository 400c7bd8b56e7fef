//! Looks at the raw bytes of an HTTP/1 connection before the parser does.
//!
//! Owns the checks that cannot be made on a parsed message because the parser has already forgiven or
//! removed what is wrong: bare line feeds, a length beside a transfer coding, two lengths, two hosts,
//! fragments. Invariant: no byte of a head reaches the parser before the whole head was found good, and
//! where a message ends is decided here by the strictest reading only; a connection on which anything
//! else was seen is answered once and closed.
//!
//! A wrapper around the guest's stream; made by [`super::connection`] for each HTTP/1 connection.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::budget::{Budget, FRAME, Room};
use crate::reason::Reason;

/// Longest head, bytes.
pub(super) const MAX_HEAD: usize = 64 * 1024;
/// Most headers of a message.
pub(super) const MAX_HEADERS: usize = 100;
/// Longest line that frames a chunk, and all trailers together.
const MAX_CHUNK_LINE: usize = 256;
const MAX_TRAILERS: usize = 8 * 1024;
/// How long a head may take from its first byte on, and how long a connection may rest between two.
const HEAD_TIME: Duration = Duration::from_secs(10);
const IDLE_TIME: Duration = Duration::from_secs(90);
/// What a head that is longer than what is read at once may take: here, in the parser, and parsed.
const LARGE_HEAD: usize = 3 * MAX_HEAD;

/// What is wrong with the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fault {
    /// Status of the answer.
    pub(super) status: u16,
    /// The word for it.
    pub(super) reason: Reason,
    /// A sentence.
    pub(super) message: &'static str,
}

const fn bad(message: &'static str) -> Fault {
    Fault { status: 400, reason: Reason::HttpInvalid, message }
}

const fn large(message: &'static str) -> Fault {
    Fault { status: 431, reason: Reason::HeadersTooLarge, message }
}

/// What scanner and connection tell each other.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Requests whose answer is not complete.
    busy: Cell<usize>,
    fault: Cell<Option<Fault>>,
    waker: RefCell<Option<Waker>>,
}

impl Watch {
    /// What was wrong with the bytes, if anything was.
    pub(super) fn fault(&self) -> Option<Fault> {
        self.fault.get()
    }

    /// Whether no request is under way.
    pub(super) fn idle(&self) -> bool {
        self.busy.get() == 0
    }
}

/// One request is under way, until this is dropped.
#[derive(Debug)]
pub(super) struct Busy(Rc<Watch>);

impl Busy {
    /// A request of a connection without scanner.
    pub(super) fn new(watch: &Rc<Watch>) -> Self {
        watch.busy.set(watch.busy.get() + 1);
        Self(Rc::clone(watch))
    }

    /// A request that the scanner has counted when it released its head: before the parser knew of it.
    pub(super) fn counted(watch: &Rc<Watch>) -> Self {
        Self(Rc::clone(watch))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.set(self.0.busy.get() - 1);
        if let Some(waker) = self.0.waker.borrow_mut().take() {
            waker.wake();
        }
    }
}

/// Where in a message the released bytes end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// In front of or inside a head.
    Head,
    /// In a body of which so much is still to come.
    Length(u64),
    /// In front of the line with a chunk's size.
    Size,
    /// In a chunk.
    Chunk(u64),
    /// Behind a chunk.
    ChunkEnd,
    /// In the trailers, of which so much was seen.
    Trailers(usize),
    /// Whatever follows is not HTTP/1 any more, or will not be read.
    Opaque,
}

/// The guest's stream, checked.
#[derive(Debug)]
pub(super) struct Scan<S> {
    inner: S,
    raw: BytesMut,
    /// So much of `raw` may be given to the parser.
    ready: usize,
    /// So much behind that was looked at without finding the end of a head.
    looked: usize,
    at: At,
    watch: Rc<Watch>,
    timer: Option<(Waiting, Pin<Box<Sleep>>)>,
    budget: Budget,
    /// Room of a long head.
    room: Option<Room>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiting {
    Idle,
    Head,
}

impl<S> Scan<S> {
    pub(super) fn new(inner: S, watch: Rc<Watch>, budget: &Budget) -> Self {
        Self {
            inner,
            raw: BytesMut::new(),
            ready: 0,
            looked: 0,
            at: At::Head,
            watch,
            timer: None,
            budget: budget.clone(),
            room: None,
        }
    }

    /// Whether there is room for what was read: a long head needs some of its own.
    fn fits(&mut self) -> Result<(), Fault> {
        if self.raw.len() <= FRAME || self.room.is_some() {
            return Ok(());
        }
        self.room = self.budget.room(LARGE_HEAD);
        match self.room {
            Some(_) => Ok(()),
            None => Err(Fault {
                status: 503,
                reason: Reason::Limit,
                message: "the session's connections use all the memory there is for long heads",
            }),
        }
    }

    /// Releases as much of what was read as is good.
    fn advance(&mut self) -> Result<(), Fault> {
        loop {
            let rest = &self.raw[self.ready..];
            let (released, next) = match self.at {
                At::Opaque => (rest.len(), At::Opaque),
                At::Length(left) => take(rest, left, At::Length, At::Head),
                At::Chunk(left) => take(rest, left, At::Chunk, At::ChunkEnd),
                At::Head => {
                    // A guest that sends byte by byte must not have all of it read again each time.
                    let fresh = &rest[self.looked.min(rest.len())..];
                    if rest.len() <= MAX_HEAD && !fresh.contains(&b'\n') {
                        self.looked = rest.len();
                        return Ok(());
                    }
                    match head(rest)? {
                        Some(found) => {
                            self.looked = 0;
                            self.watch.busy.set(self.watch.busy.get() + 1);
                            found
                        }
                        None => {
                            self.looked = rest.len();
                            return Ok(());
                        }
                    }
                }
                At::Size => match line(rest, MAX_CHUNK_LINE)? {
                    Some(text) => (text.len() + 2, chunk_size(text)?),
                    None => return Ok(()),
                },
                At::ChunkEnd => match rest {
                    [b'\r', b'\n', ..] => (2, At::Size),
                    [] | [b'\r'] => return Ok(()),
                    _ => return Err(bad("a chunk is longer than it says")),
                },
                At::Trailers(seen) => match line(rest, MAX_TRAILERS)? {
                    Some([]) => (2, At::Head),
                    Some(text) if seen + text.len() > MAX_TRAILERS => {
                        return Err(large("the trailers are too long"));
                    }
                    Some(text) => {
                        field(text)?;
                        (text.len() + 2, At::Trailers(seen + text.len() + 2))
                    }
                    None => return Ok(()),
                },
            };
            self.ready += released;
            let stays = next == self.at;
            self.at = next;
            // Only the states that take everything they are given can stay as they are.
            if self.ready == self.raw.len() || (released == 0 && stays) {
                return Ok(());
            }
        }
    }

    /// Whether the time for what is awaited is over.
    fn overdue(&mut self, cx: &mut Context<'_>) -> Option<Waiting> {
        let waiting = match (self.at, self.raw.is_empty(), self.watch.busy.get()) {
            (At::Head, false, _) => Waiting::Head,
            (At::Head, true, 0) => Waiting::Idle,
            _ => {
                self.timer = None;
                return None;
            }
        };
        let same = self.timer.as_ref().is_some_and(|(before, _)| *before == waiting);
        if !same {
            let limit = if waiting == Waiting::Head { HEAD_TIME } else { IDLE_TIME };
            let until = Instant::now() + limit;
            match &mut self.timer {
                Some((before, sleep)) => {
                    *before = waiting;
                    sleep.as_mut().reset(until);
                }
                None => self.timer = Some((waiting, Box::pin(tokio::time::sleep_until(until)))),
            }
        }
        let (_, sleep) = self.timer.as_mut()?;
        std::future::Future::poll(sleep.as_mut(), cx).is_ready().then_some(waiting)
    }
}

fn take(rest: &[u8], left: u64, stay: fn(u64) -> At, next: At) -> (usize, At) {
    let n = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
    let left = left - n as u64;
    (n, if left == 0 { next } else { stay(left) })
}

/// A line without its end, once it is complete.
fn line(rest: &[u8], most: usize) -> Result<Option<&[u8]>, Fault> {
    let Some(end) = rest.iter().position(|b| *b == b'\n') else {
        return if rest.len() > most {
            Err(large("a line of the body is too long"))
        } else {
            Ok(None)
        };
    };
    if end > most {
        return Err(large("a line of the body is too long"));
    }
    match &rest[..end] {
        [text @ .., b'\r'] if !text.contains(&b'\r') => Ok(Some(text)),
        _ => Err(bad("a line does not end as lines of HTTP do")),
    }
}

fn chunk_size(text: &[u8]) -> Result<At, Fault> {
    let end = text.iter().position(|b| *b == b';').unwrap_or(text.len());
    let digits = &text[..end];
    let readable = text.iter().all(|b| *b == b'\t' || (*b >= b' ' && *b != 0x7f));
    if digits.is_empty() || digits.len() > 15 || !readable {
        return Err(bad("a chunk's size is no number"));
    }
    let mut size = 0u64;
    for digit in digits {
        let value = char::from(*digit).to_digit(16).ok_or(bad("a chunk's size is no number"))?;
        size = size << 4 | u64::from(value);
    }
    Ok(if size == 0 { At::Trailers(0) } else { At::Chunk(size) })
}

/// The length of a complete head and what follows it.
fn head(rest: &[u8]) -> Result<Option<(usize, At)>, Fault> {
    let mut begin = 0;
    let mut framing = Framing::default();
    loop {
        let Some(end) = rest[begin..].iter().position(|b| *b == b'\n').map(|n| begin + n) else {
            if rest.len() > MAX_HEAD {
                return Err(large("the headers are too long"));
            }
            return Ok(None);
        };
        if end > MAX_HEAD {
            return Err(large("the headers are too long"));
        }
        let text = match &rest[begin..end] {
            [text @ .., b'\r'] if !text.contains(&b'\r') => text,
            _ => return Err(bad("a line of the headers does not end with CR LF")),
        };
        if begin == 0 {
            framing.request_line(text)?;
        } else if text.is_empty() {
            return Ok(Some((end + 1, framing.next()?)));
        } else {
            framing.header(text)?;
        }
        begin = end + 1;
    }
}

/// What a head says about where its message ends.
#[derive(Debug, Default)]
struct Framing {
    old: bool,
    opaque: bool,
    headers: usize,
    hosts: usize,
    length: Option<u64>,
    chunked: bool,
}

impl Framing {
    fn request_line(&mut self, text: &[u8]) -> Result<(), Fault> {
        let mut words = text.split(|b| *b == b' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(bad("the request line is not METHOD, target and version"));
        };
        if method.is_empty() || !method.iter().copied().all(token) {
            return Err(bad("the method is no word"));
        }
        if target.is_empty() || !target.iter().all(u8::is_ascii_graphic) || target.contains(&b'#') {
            return Err(bad("the target holds a character that has no place in it"));
        }
        self.old = match version {
            b"HTTP/1.1" => false,
            b"HTTP/1.0" => true,
            _ => return Err(bad("the version of HTTP is neither 1.1 nor 1.0")),
        };
        // Never accepted, so what follows is never read as a request.
        self.opaque = method == b"CONNECT";
        Ok(())
    }

    fn header(&mut self, text: &[u8]) -> Result<(), Fault> {
        self.headers += 1;
        if self.headers > MAX_HEADERS {
            return Err(large("there are too many headers"));
        }
        let (name, value) = field(text)?;
        if name.eq_ignore_ascii_case(b"host") {
            self.hosts += 1;
        } else if name.eq_ignore_ascii_case(b"content-length") {
            let digits =
                !value.is_empty() && value.len() <= 18 && value.iter().all(u8::is_ascii_digit);
            let parsed = std::str::from_utf8(value).ok().filter(|_| digits);
            let length = parsed.and_then(|t| t.parse().ok());
            if self.length.is_some() || length.is_none() {
                return Err(bad("Content-Length is not one number"));
            }
            self.length = length;
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if self.chunked || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(bad("Transfer-Encoding is not just 'chunked'"));
            }
            self.chunked = true;
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            self.opaque = true;
        }
        Ok(())
    }

    fn next(&self) -> Result<At, Fault> {
        if self.chunked && self.length.is_some() {
            return Err(bad("both Content-Length and Transfer-Encoding are given"));
        }
        if self.chunked && self.old {
            return Err(bad("HTTP/1.0 has no Transfer-Encoding"));
        }
        if self.hosts != 1 {
            return Err(bad("there is not exactly one Host header"));
        }
        let body = self.chunked || self.length.unwrap_or(0) > 0;
        match (self.opaque, body) {
            (true, true) => Err(bad("a request for an upgrade has a body")),
            (true, false) => Ok(At::Opaque),
            (false, _) if self.chunked => Ok(At::Size),
            (false, true) => Ok(At::Length(self.length.unwrap_or(0))),
            (false, false) => Ok(At::Head),
        }
    }
}

/// Name and value of a header line.
fn field(text: &[u8]) -> Result<(&[u8], &[u8]), Fault> {
    let Some(colon) = text.iter().position(|b| *b == b':') else {
        return Err(bad("a header has no colon"));
    };
    let (name, value) = (&text[..colon], &text[colon + 1..]);
    if name.is_empty() || !name.iter().copied().all(token) {
        return Err(bad("a header's name holds a character that has no place in it"));
    }
    let value = value.trim_ascii();
    if value.iter().any(|b| (*b < b' ' && *b != b'\t') || *b == 0x7f) {
        return Err(bad("a header's value holds a control character"));
    }
    Ok((name, value))
}

fn token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

impl<S: AsyncRead + Unpin> AsyncRead for Scan<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.ready > 0 {
                let n = this.ready.min(into.remaining());
                into.put_slice(&this.raw[..n]);
                this.raw.advance(n);
                this.ready -= n;
                if this.raw.is_empty() {
                    // A connection that rests keeps no buffer.
                    this.raw = BytesMut::new();
                    this.room = None;
                }
                return Poll::Ready(Ok(()));
            }
            if let Some(fault) = this.watch.fault.get() {
                // In the middle of a body there is nobody to answer: what is under way fails.
                if this.at != At::Head {
                    return Poll::Ready(Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        fault.message,
                    )));
                }
                // Answers that are under way are finished first; then it looks as if the guest had closed.
                if this.watch.busy.get() > 0 {
                    *this.watch.waker.borrow_mut() = Some(cx.waker().clone());
                    return Poll::Pending;
                }
                return Poll::Ready(Ok(()));
            }
            if this.raw.is_empty() && this.at == At::Opaque {
                return Pin::new(&mut this.inner).poll_read(cx, into);
            }
            let before = this.raw.len();
            let n = match read(&mut this.inner, &mut this.raw, cx) {
                Poll::Pending => {
                    if this.raw.is_empty() {
                        this.raw = BytesMut::new();
                    }
                    return match this.overdue(cx) {
                        None => Poll::Pending,
                        Some(Waiting::Idle) => Poll::Ready(Ok(())),
                        Some(Waiting::Head) => {
                            this.watch.fault.set(Some(Fault {
                                status: 408,
                                reason: Reason::HeadersTooLarge,
                                message: "the headers did not come in time",
                            }));
                            continue;
                        }
                    };
                }
                Poll::Ready(read) => read?,
            };
            debug_assert_eq!(this.raw.len(), before + n);
            if n == 0 {
                return Poll::Ready(Ok(()));
            }
            if let Err(fault) = this.fits().and_then(|()| this.advance()) {
                this.watch.fault.set(Some(fault));
            }
        }
    }
}

fn read<S: AsyncRead + Unpin>(
    from: &mut S,
    raw: &mut BytesMut,
    cx: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    raw.reserve(FRAME);
    let mut future = std::pin::pin!(tokio::io::AsyncReadExt::read_buf(from, raw));
    std::future::Future::poll(future.as_mut(), cx)
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Scan<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
