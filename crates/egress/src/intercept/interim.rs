//! Counts the heads that a destination sends on each stream of HTTP/2.
//!
//! The library drops interim answers (1xx) without telling anybody, so a destination that sends nothing else
//! would keep a request waiting and the thread busy for as long as it likes. What is read of a frame here is its
//! header: kind, flags, stream. Invariant: of more than [`MOST_HEADS`] heads on one stream that none ends,
//! nothing more is read, and the connection fails.
//!
//! Made by [`super::upstream`] for each connection of HTTP/2.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::upstream::Stream;

/// Interim answers, and the final one.
const MOST_HEADS: u8 = 9;
/// Most streams with an unfinished answer that are remembered.
const MOST_STREAMS: usize = 1024;
/// Length of a frame's header.
const HEADER: usize = 9;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const END_STREAM: u8 = 1;

/// What was seen of the frames so far.
#[derive(Debug, Default)]
struct Frames {
    header: [u8; HEADER],
    got: usize,
    /// Bytes of the frame that are still to come.
    left: usize,
    heads: BTreeMap<u32, u8>,
}

impl Frames {
    fn look(&mut self, mut bytes: &[u8]) -> Result<(), &'static str> {
        while !bytes.is_empty() {
            if self.left > 0 {
                let n = self.left.min(bytes.len());
                self.left -= n;
                bytes = &bytes[n..];
                continue;
            }
            let n = (HEADER - self.got).min(bytes.len());
            self.header[self.got..self.got + n].copy_from_slice(&bytes[..n]);
            self.got += n;
            bytes = &bytes[n..];
            if self.got == HEADER {
                self.got = 0;
                self.frame()?;
            }
        }
        Ok(())
    }

    fn frame(&mut self) -> Result<(), &'static str> {
        let [a, b, c, kind, flags, stream @ ..] = self.header;
        self.left = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
        let stream = u32::from_be_bytes(stream) & 0x7fff_ffff;
        let ends = flags & END_STREAM != 0 && (kind == HEADERS || kind == 0) || kind == RESET;
        if ends {
            self.heads.remove(&stream);
        } else if kind == HEADERS {
            let heads = self.heads.entry(stream).or_default();
            *heads = heads.saturating_add(1);
            if *heads > MOST_HEADS {
                return Err("the destination sends interim answers without end");
            }
            if self.heads.len() > MOST_STREAMS {
                // Most likely one that was given up here, of which nothing more comes.
                self.heads.pop_first();
            }
        }
        Ok(())
    }
}

/// A destination's stream that speaks HTTP/2.
pub(super) struct Interim {
    inner: Box<dyn Stream>,
    frames: Frames,
}

impl Interim {
    pub(super) fn new(inner: Box<dyn Stream>) -> Self {
        Self { inner, frames: Frames::default() }
    }
}

impl AsyncRead for Interim {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        match Pin::new(&mut self.inner).poll_read(cx, into) {
            Poll::Ready(Ok(())) => {
                let seen = self.frames.look(&into.filled()[before..]);
                Poll::Ready(seen.map_err(io::Error::other))
            }
            other => other,
        }
    }
}

impl AsyncWrite for Interim {
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
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
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
mod tests {
    use super::*;

    fn frame(length: usize, kind: u8, flags: u8, stream: u32) -> Vec<u8> {
        let mut out = vec![(length >> 16) as u8, (length >> 8) as u8, length as u8, kind, flags];
        out.extend_from_slice(&stream.to_be_bytes());
        // What looks like the head of another frame inside changes nothing.
        out.extend(std::iter::repeat_n(1, length));
        out
    }

    #[test]
    fn heads_without_end_are_noticed_however_they_are_cut() {
        for size in [1, 7, 4096] {
            let mut frames = Frames::default();
            let mut bytes = frame(18, 4, 0, 0);
            for stream in [1, 3] {
                bytes.extend(frame(30, HEADERS, 4, stream));
                bytes.extend(frame(70_000, 0, 0, stream));
            }
            for _ in 1..MOST_HEADS {
                bytes.extend(frame(5, HEADERS, 4, 1));
                bytes.extend(frame(0, 9, 4, 1));
            }
            for chunk in bytes.chunks(size) {
                frames.look(chunk).unwrap();
            }
            assert_eq!(frames.heads.len(), 2);
            let more: Vec<_> = frame(5, HEADERS, 4, 1);
            let seen: Result<Vec<()>, _> = more.chunks(size).map(|c| frames.look(c)).collect();
            assert!(seen.unwrap_err().contains("interim"), "{size}");
        }
    }

    #[test]
    fn streams_that_end_are_forgotten() {
        let mut frames = Frames::default();
        for stream in 0..5000 {
            for _ in 0..4 {
                frames.look(&frame(3, HEADERS, 4, stream)).unwrap();
            }
            let end = match stream % 3 {
                0 => frame(3, HEADERS, 5, stream),
                1 => frame(3, 0, END_STREAM, stream),
                _ => frame(4, RESET, 0, stream),
            };
            frames.look(&end).unwrap();
        }
        assert!(frames.heads.is_empty());
        // Those that are given up on this side never end.
        for stream in 0..5000 {
            frames.look(&frame(3, HEADERS, 4, stream)).unwrap();
        }
        assert_eq!(frames.heads.len(), MOST_STREAMS);
    }
}
