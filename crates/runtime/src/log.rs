//! The log of a command's output: the only place where output is kept.
//!
//! Written by the shim, append only; read by serve from the file alone, so it survives both.
//! A record is a kind (1 byte), a length (4), a sequence number (8), all little endian, and that many
//! bytes. Invariant: a reader that stops in front of an incomplete record can go on from there later;
//! after an `End` record nothing follows. Frozen format: docs/COMPATIBILITY.md.

pub(crate) mod ring;

use std::io;
use std::os::fd::OwnedFd;

use bivouac_types::command::{CommandEnd, Stream};

use crate::{LogRecord, Progress};

const HEADER: usize = 13;
/// Longest payload of a record.
pub(crate) const MAX_PAYLOAD: usize = 64 << 10;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const CUT: u8 = 3;
const END: u8 = 4;

/// The writing side.
#[derive(Debug)]
pub(crate) struct LogWriter {
    file: OwnedFd,
    offset: u64,
    sequence: u64,
    cut: bool,
}

impl LogWriter {
    /// Takes an empty file.
    pub(crate) fn new(file: OwnedFd) -> Self {
        Self::at(file, 0, 0)
    }

    /// Goes on in a file at this offset.
    fn at(file: OwnedFd, offset: u64, sequence: u64) -> Self {
        Self { file, offset, sequence, cut: false }
    }

    /// Bytes written.
    pub(crate) fn len(&self) -> u64 {
        self.offset
    }

    /// Appends output, as long as the session has `room` bytes of log space. Output that does not
    /// fit is dropped, and a record marks the place once. Answers the bytes used.
    pub(crate) fn data(&mut self, stream: Stream, bytes: &[u8], room: u64) -> io::Result<u64> {
        if self.cut {
            return Ok(0);
        }
        let before = self.offset;
        let kind = if stream == Stream::Stdout { STDOUT } else { STDERR };
        let needed = (HEADER + bytes.len()) as u64;
        let written = if needed <= room { self.record(kind, bytes) } else { Err(full()) };
        if written.is_err() {
            // No log space, in the session's share or in the pool: say so where it happened.
            self.cut = true;
            self.record(CUT, &[])?;
        }
        Ok(self.offset - before)
    }

    /// Appends the last record.
    pub(crate) fn end(&mut self, end: &CommandEnd) -> io::Result<()> {
        let json = serde_json::to_vec(end)?;
        self.record(END, &json)
    }

    fn record(&mut self, kind: u8, payload: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        bytes.push(kind);
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(self.sequence.to_le_bytes());
        bytes.extend(payload);
        let mut done = 0;
        while done < bytes.len() {
            // At a fixed offset, so that a record cut short by a full disk is overwritten.
            match rustix::io::pwrite(&self.file, &bytes[done..], self.offset + done as u64) {
                Ok(0) => return Err(full()),
                Ok(n) => done += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        self.offset += bytes.len() as u64;
        self.sequence += 1;
        Ok(())
    }
}

fn full() -> io::Error {
    io::Error::from(io::ErrorKind::StorageFull)
}

fn header(bytes: &[u8]) -> Option<(u8, usize)> {
    let head = bytes.get(..HEADER)?;
    let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
    Some((head[0], length))
}

fn bad() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the command's log is damaged")
}

/// Reads whole records from `from`, about `budget` bytes of them, not beyond `until`. Answers them
/// and the offset behind the last.
///
/// # Errors
/// As pread(2); `InvalidData` for bytes that are no record.
pub(crate) fn read(
    file: &OwnedFd,
    from: u64,
    until: u64,
    budget: usize,
) -> io::Result<(Vec<LogRecord>, u64)> {
    // Always room for one whole record.
    let want = (until.saturating_sub(from)).min(budget.max(HEADER + MAX_PAYLOAD) as u64) as usize;
    let mut buffer = vec![0u8; want];
    let mut got = 0;
    while got < want {
        match rustix::io::pread(file, &mut buffer[got..], from + got as u64) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    buffer.truncate(got);
    let bytes = bytes::Bytes::from(buffer);
    let (mut records, mut at) = (Vec::new(), 0);
    while let Some((kind, length)) = header(&bytes[at..]) {
        if length > MAX_PAYLOAD {
            return Err(bad());
        }
        let end = at + HEADER + length;
        if end > bytes.len() {
            break;
        }
        let payload = bytes.slice(at + HEADER..end);
        records.push(match kind {
            STDOUT => LogRecord::Data { stream: Stream::Stdout, bytes: payload },
            STDERR => LogRecord::Data { stream: Stream::Stderr, bytes: payload },
            CUT => LogRecord::Cut,
            END => LogRecord::End(serde_json::from_slice(&payload).map_err(|_| bad())?),
            _ => return Err(bad()),
        });
        at = end;
    }
    Ok((records, from + at as u64))
}

/// How far a log has come, by walking its headers.
///
/// # Errors
/// As [`read`].
pub(crate) fn progress(file: &OwnedFd) -> io::Result<Progress> {
    progress_from(file, 0)
}

/// The same of a file whose records begin further on.
fn progress_from(file: &OwnedFd, start: u64) -> io::Result<Progress> {
    let mut progress = Progress { log_bytes: start, ..Progress::default() };
    loop {
        let (records, next) = read(file, progress.log_bytes, u64::MAX, 1 << 20)?;
        for record in &records {
            if let LogRecord::End(end) = record {
                progress.end = Some(end.clone());
            }
        }
        if next == progress.log_bytes {
            return Ok(progress);
        }
        progress.log_bytes = next;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn temp() -> (OwnedFd, OwnedFd) {
        let file = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        (file.try_clone().unwrap(), file)
    }

    pub(in crate::log) fn end(code: i32) -> CommandEnd {
        CommandEnd { exit_code: Some(code), duration_ms: 5, reason: None }
    }

    proptest::proptest! {
        /// What was written comes back byte by byte, however the reader cuts it.
        #[test]
        fn written_is_read(
            pieces in proptest::collection::vec((proptest::bool::ANY, proptest::collection::vec(0u8..=255, 0..300)), 0..40),
            budget in 1usize..2000,
        ) {
            let (write, read_side) = temp();
            let mut log = LogWriter::new(write);
            for (out, bytes) in &pieces {
                let stream = if *out { Stream::Stdout } else { Stream::Stderr };
                log.data(stream, bytes, u64::MAX).unwrap();
            }
            log.end(&end(3)).unwrap();
            let (mut at, mut seen) = (0, Vec::new());
            loop {
                let (records, next) = read(&read_side, at, log.len(), budget).unwrap();
                seen.extend(records);
                if next == at { break }
                at = next;
            }
            assert_eq!(seen.pop(), Some(LogRecord::End(end(3))));
            let wrote: Vec<_> = pieces.iter().map(|(out, bytes)| LogRecord::Data {
                stream: if *out { Stream::Stdout } else { Stream::Stderr },
                bytes: bytes.clone().into(),
            }).collect();
            assert_eq!(seen, wrote);
            assert_eq!(progress(&read_side).unwrap().end, Some(end(3)));
        }

        /// A log that the shim left half-written, or garbage, is never a panic.
        #[test]
        fn garbage_is_an_error_or_nothing(bytes: Vec<u8>) {
            let (write, read_side) = temp();
            rustix::io::pwrite(&write, &bytes, 0).unwrap();
            let _ = progress(&read_side);
        }
    }

    #[test]
    fn a_full_log_says_so_once_and_still_ends() {
        let (write, read_side) = temp();
        let mut log = LogWriter::new(write);
        log.data(Stream::Stdout, b"fits", 100).unwrap();
        log.data(Stream::Stdout, &[0; 200], 83).unwrap();
        log.data(Stream::Stdout, b"x", 83).unwrap();
        log.end(&end(0)).unwrap();
        let (records, _) = read(&read_side, 0, u64::MAX, 4096).unwrap();
        assert_eq!(records.len(), 3);
        assert_eq!(records[1], LogRecord::Cut);
    }
}
