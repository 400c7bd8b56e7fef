//! The log of a terminal: its latest output only, so that it never ends at the log's limit.
//!
//! Two files in turn, whatever the file system can do: when one is full, the other is taken away and begun
//! anew. Each begins with a line that says how many bytes of records were written before it; then come
//! records as in every log. Invariant: an offset means the same record for ever; at least one file's worth
//! of output is kept, at most two; a file that has a name has all of its head, or is none. Written by the
//! shim, read by serve through [`super::read_terminal`]. Frozen format: docs/COMPATIBILITY.md.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use bivouac_types::command::{CommandEnd, Stream};
use bivouac_types::id::CommandId;
use rustix::fs::{AtFlags, Mode, OFlags};

use super::{CUT, LogWriter, STDOUT};
use crate::{LogRecord, Progress};

/// The first bytes of a file; behind them the count, little endian.
const MAGIC: [u8; 8] = *b"bvk.tty\n";
/// Length of both.
const HEAD: u64 = 16;
/// How often a reader looks again when the writer has turned meanwhile.
const LOOKS: u32 = 8;

/// Names of a terminal's two files.
pub(crate) fn names(command: &CommandId) -> [String; 2] {
    [format!("{command}.tty"), format!("{command}.1.tty")]
}

/// The writing side.
#[derive(Debug)]
pub(crate) struct RingLog {
    folder: OwnedFd,
    names: [String; 2],
    current: usize,
    writer: LogWriter,
    /// Bytes of records before the current file, and before the older one.
    base: u64,
    older: u64,
    /// Bytes of one file.
    each: u64,
    /// Output is missing that no record tells of yet.
    lost: bool,
}

impl RingLog {
    /// Begins the log of a command in the folder of logs; files are turned at `each` bytes.
    ///
    /// # Errors
    /// As open(2); the names must be free.
    pub(crate) fn create(folder: OwnedFd, command: &CommandId, each: u64) -> io::Result<Self> {
        let names = names(command);
        let writer = LogWriter::at(begin(&folder, &names[0], 0)?, HEAD, 0);
        Ok(Self { folder, names, current: 0, writer, base: 0, older: 0, each, lost: false })
    }

    /// Where the first record begins that is kept.
    pub(crate) fn start(&self) -> u64 {
        self.older
    }

    /// Where the next record goes.
    pub(crate) fn len(&self) -> u64 {
        self.base + self.writer.len() - HEAD
    }

    /// Bytes that its files take.
    pub(crate) fn kept(&self) -> u64 {
        self.len() - self.older
    }

    /// Appends output. Where the disk is full a piece is lost, and the next one that fits says so.
    pub(crate) fn data(&mut self, bytes: &[u8]) {
        let written = self.turn_when_full().and_then(|()| {
            if self.lost {
                self.writer.record(CUT, &[])?;
                self.lost = false;
            }
            self.writer.record(STDOUT, bytes)
        });
        self.lost |= written.is_err();
    }

    /// Appends the last record.
    ///
    /// # Errors
    /// As pwrite(2).
    pub(crate) fn end(&mut self, end: &CommandEnd) -> io::Result<()> {
        self.writer.end(end)
    }

    fn turn_when_full(&mut self) -> io::Result<()> {
        if self.writer.len() - HEAD < self.each {
            return Ok(());
        }
        let (next, base) = (1 - self.current, self.len());
        let name = &self.names[next];
        match rustix::fs::unlinkat(&self.folder, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
        }
        // What was in it is gone, whatever comes of the new one.
        self.older = self.base;
        let file = begin(&self.folder, name, base)?;
        self.writer = LogWriter::at(file, HEAD, self.writer.sequence);
        (self.current, self.base) = (next, base);
        Ok(())
    }
}

/// Makes a file with its head.
fn begin(folder: &OwnedFd, name: &str, base: u64) -> io::Result<OwnedFd> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(folder.as_fd(), name, flags, Mode::from_raw_mode(0o600))?;
    let mut head = [0u8; HEAD as usize];
    head[..8].copy_from_slice(&MAGIC);
    head[8..].copy_from_slice(&base.to_le_bytes());
    match rustix::io::pwrite(&file, &head, 0) {
        Ok(n) if n == head.len() => Ok(file),
        other => {
            let _ = rustix::fs::unlinkat(folder, name, AtFlags::empty());
            Err(other.map_or_else(Into::into, |_| super::full()))
        }
    }
}

/// A file of a terminal's log, and how many bytes of records came before it.
struct Part {
    file: OwnedFd,
    base: u64,
}

/// The parts that are there, the older first.
fn parts(open: &impl Fn(usize) -> io::Result<OwnedFd>) -> io::Result<Vec<Part>> {
    let mut parts = Vec::new();
    for index in 0..2 {
        let file = match open(index) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        let mut head = [0u8; HEAD as usize];
        // One that has been made this moment has no head yet.
        if rustix::io::pread(&file, &mut head, 0)? == head.len() && head[..8] == MAGIC {
            let mut base = [0u8; 8];
            base.copy_from_slice(&head[8..]);
            parts.push(Part { file, base: u64::from_le_bytes(base) });
        }
    }
    parts.sort_by_key(|part| part.base);
    if parts.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(parts) }
}

/// As [`super::read`], of a terminal; from before the first record that is kept it goes on at that. `open`
/// opens one of the two files.
///
/// # Errors
/// `NotFound` without a file; as [`super::read`].
pub(crate) fn read(
    open: impl Fn(usize) -> io::Result<OwnedFd>,
    from: u64,
    until: u64,
    budget: usize,
) -> io::Result<(Vec<LogRecord>, u64)> {
    let mut looks = 0;
    loop {
        looks += 1;
        let parts = parts(&open)?;
        let last = parts.len() - 1;
        let at = parts.iter().rposition(|part| part.base <= from).unwrap_or(0);
        for (index, part) in parts.iter().enumerate().skip(at) {
            let from = from.max(part.base);
            let in_file = |offset: u64| HEAD.saturating_add(offset.saturating_sub(part.base));
            let (records, next) = super::read(&part.file, in_file(from), in_file(until), budget)?;
            let next = part.base.saturating_add(next - HEAD);
            // The end of the older file is where the newer one begins.
            if next > from || (index == last && (looks == LOOKS || from >= until)) {
                return Ok((records, next));
            }
        }
        if looks == LOOKS {
            return Ok((Vec::new(), from));
        }
    }
}

/// As [`super::progress`], of a terminal.
///
/// # Errors
/// As [`read`].
pub(crate) fn progress(open: impl Fn(usize) -> io::Result<OwnedFd>) -> io::Result<Progress> {
    let parts = parts(&open)?;
    let mut all = Progress::default();
    for (index, part) in parts.iter().enumerate() {
        let one = super::progress_from(&part.file, HEAD)?;
        if index == 0 {
            all.log_start = part.base;
        }
        all.log_bytes = part.base.saturating_add(one.log_bytes - HEAD);
        all.end = one.end;
    }
    Ok(all)
}

/// What a terminal writes is one stream.
pub(crate) const STREAM: Stream = Stream::Stdout;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tests::end;

    const EACH: u64 = 600;

    fn command() -> CommandId {
        CommandId::new(7, [3; 10])
    }

    fn folder(at: &std::path::Path) -> OwnedFd {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(at, flags, Mode::empty()).unwrap()
    }

    fn opener(at: &std::path::Path) -> impl Fn(usize) -> io::Result<OwnedFd> {
        let at = at.to_owned();
        move |index| Ok(std::fs::File::open(at.join(&names(&command())[index]))?.into())
    }

    fn text(records: &[LogRecord]) -> Vec<u8> {
        let bytes = records.iter().map(|record| match record {
            LogRecord::Data { stream: STREAM, bytes } => bytes.to_vec(),
            _ => Vec::new(),
        });
        bytes.collect::<Vec<_>>().concat()
    }

    proptest::proptest! {
        /// A reader that keeps up gets every byte; one that comes late gets the last ones, at least one
        /// file's worth of records and at most two; a dead session's log tells the same as a living one's.
        #[test]
        fn the_end_is_kept(pieces in proptest::collection::vec(proptest::collection::vec(0u8..=255, 1..120), 1..80),
                           budget in 1usize..300) {
            let dir = tempfile::tempdir().unwrap();
            let open = opener(dir.path());
            let mut log = RingLog::create(folder(dir.path()), &command(), EACH).unwrap();
            let (mut at, mut followed) = (0, Vec::new());
            for piece in &pieces {
                log.data(piece);
                while at < log.len() {
                    let (records, next) = read(&open, at, log.len(), budget).unwrap();
                    assert!(next > at);
                    followed.extend(text(&records));
                    at = next;
                }
                assert!(log.kept() < 2 * EACH + 400, "{}", log.kept());
                assert!(log.start() == 0 || log.kept() >= EACH, "{}", log.kept());
            }
            let all = pieces.concat();
            assert_eq!(followed, all);
            log.end(&end(3)).unwrap();
            let told = progress(&open).unwrap();
            assert_eq!((told.log_start, told.log_bytes), (log.start(), log.len()));
            assert_eq!(told.end, Some(end(3)));
            let (mut at, mut late) = (0, Vec::new());
            while at < told.log_bytes {
                let (records, next) = read(&open, at, told.log_bytes, budget).unwrap();
                assert!(next > at && next > told.log_start);
                late.extend(records);
                at = next;
            }
            assert_eq!(late.last(), Some(&LogRecord::End(end(3))));
            assert!(all.ends_with(&text(&late)));
            if told.log_start == 0 {
                assert_eq!(text(&late), all);
            }
        }

        /// Garbage in the files is an error or nothing.
        #[test]
        fn garbage_is_no_panic(a: Vec<u8>, b: Vec<u8>, from: u64, until: u64) {
            let dir = tempfile::tempdir().unwrap();
            for (name, bytes) in names(&command()).iter().zip([a, b]) {
                std::fs::write(dir.path().join(name), [&MAGIC[..], &bytes].concat()).unwrap();
            }
            let _ = progress(opener(dir.path()));
            let _ = read(opener(dir.path()), from, until, 100);
        }
    }
}
