//! The audit lines of a session: a pair of files beside its command logs, written by the shim, read by
//! serve.
//!
//! Each file begins with a line that says how many bytes of lines were written before it; when one is
//! full, the other is begun anew. Invariant: an offset means the same line for ever; at most two files
//! of [`CAP`] bytes are kept; a reader gets whole lines, and sees in the offsets what it has missed.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use tokio::sync::Notify;

use crate::keeper::AuditFile;

/// Names of the two files.
const NAMES: [&str; 2] = ["audit.jsonl", "audit.1.jsonl"];
/// Most bytes of one file.
const CAP: u64 = 8 << 20;
/// Length of the first line.
const HEADER: usize = 32;
/// About how many bytes one read answers.
const READ_BUDGET: usize = 256 << 10;
/// Lines wait so long for others, so that a busy session writes many at once.
const PATIENCE: Duration = Duration::from_millis(20);
/// With so many bytes they wait no longer.
const ENOUGH: usize = 32 << 10;

/// `{"base":123                    }` and a line end, always as long.
fn header(base: u64) -> [u8; HEADER] {
    let mut line = [b' '; HEADER];
    let text = format!("{{\"base\":{base}");
    line[..text.len()].copy_from_slice(text.as_bytes());
    line[HEADER - 2] = b'}';
    line[HEADER - 1] = b'\n';
    line
}

fn base_of(line: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(line.get(..HEADER - 2)?).ok()?;
    text.strip_prefix("{\"base\":")?.trim_end().parse().ok()
}

/// The shim's side.
pub(crate) struct AuditLog {
    /// The folder, opened before the shim was confined.
    logs: OwnedFd,
    /// Of the current file, once it is made.
    file: RefCell<Option<OwnedFd>>,
    current: Cell<usize>,
    /// Bytes of lines before the current file, and in it.
    base: Cell<u64>,
    length: Cell<u64>,
    cap: u64,
    waiting: RefCell<Vec<u8>>,
    wake: Notify,
}

impl AuditLog {
    /// Lines go into this folder.
    pub(crate) fn new(logs: OwnedFd) -> Rc<Self> {
        Self::with_cap(logs, CAP)
    }

    fn with_cap(logs: OwnedFd, cap: u64) -> Rc<Self> {
        Rc::new(Self {
            logs,
            file: RefCell::default(),
            current: Cell::new(NAMES.len() - 1),
            base: Cell::new(0),
            length: Cell::new(0),
            cap,
            waiting: RefCell::default(),
            wake: Notify::new(),
        })
    }

    /// Writes what waits, for as long as the session lives.
    pub(crate) async fn work(self: Rc<Self>) {
        loop {
            self.wake.notified().await;
            if self.waiting.borrow().len() < ENOUGH {
                tokio::time::sleep(PATIENCE).await;
            }
            self.flush();
        }
    }

    /// Writes what waits.
    pub(crate) fn flush(&self) {
        let lines = std::mem::take(&mut *self.waiting.borrow_mut());
        if !lines.is_empty() {
            // No room in the pool: these lines are lost; the next ones may fit.
            let _ = self.write(&lines);
        }
    }

    fn write(&self, mut lines: &[u8]) -> io::Result<()> {
        while !lines.is_empty() {
            let room = self.cap.saturating_sub(self.length.get());
            let fits = whole_lines(lines, usize::try_from(room).unwrap_or(usize::MAX));
            // A file takes at least one, however long.
            let first =
                lines.iter().position(|byte| *byte == b'\n').map_or(lines.len(), |at| at + 1);
            let fits = if fits == 0 && self.length.get() == 0 { first } else { fits };
            if self.file.borrow().is_none() || fits == 0 {
                self.turn()?;
                continue;
            }
            let (now, later) = lines.split_at(fits);
            let at = HEADER as u64 + self.length.get();
            if let Some(file) = self.file.borrow().as_ref() {
                write_at(file, now, at)?;
            }
            self.length.set(self.length.get() + now.len() as u64);
            lines = later;
        }
        Ok(())
    }

    /// Goes on in the other file.
    fn turn(&self) -> io::Result<()> {
        let next = (self.current.get() + 1) % NAMES.len();
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW;
        let mode = Mode::from_raw_mode(0o600);
        let file = rustix::fs::openat(&self.logs, NAMES[next], flags | OFlags::CLOEXEC, mode)?;
        let base = self.base.get() + self.length.get();
        write_at(&file, &header(base), 0)?;
        self.base.set(base);
        self.length.set(0);
        self.current.set(next);
        *self.file.borrow_mut() = Some(file);
        Ok(())
    }
}

/// How many bytes of whole lines there are in the first `room` bytes.
fn whole_lines(lines: &[u8], room: usize) -> usize {
    let within = &lines[..room.min(lines.len())];
    within.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1)
}

fn write_at(file: &OwnedFd, bytes: &[u8], at: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(file, &bytes[done..], at + done as u64) {
            Ok(0) => return Err(io::ErrorKind::StorageFull.into()),
            Ok(n) => done += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// What a keeper writes to.
pub(crate) struct AuditEnd(pub(crate) Rc<AuditLog>);

impl AuditFile for AuditEnd {
    fn append(&self, line: &[u8]) {
        self.0.waiting.borrow_mut().extend_from_slice(line);
        if self.0.waiting.borrow().len() >= 2 * ENOUGH {
            // The writing task has had no turn for long.
            self.0.flush();
        }
        self.0.wake.notify_one();
    }
}

/// Reads lines from an offset on: see [`crate::Runtime::read_audit`]. A folder without the files has no
/// lines.
///
/// # Errors
/// As openat(2) and pread(2).
pub(crate) fn read(logs: &Path, from: u64) -> io::Result<(Vec<u8>, u64)> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = match rustix::fs::open(logs, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok((Vec::new(), from)),
        other => other?,
    };
    // The shim may begin a file anew in the middle of this: then what was read is another line.
    for _ in 0..16 {
        if let Some(read) = attempt(&folder, from)? {
            return Ok(read);
        }
    }
    Err(io::Error::other("the audit lines change faster than they can be read"))
}

fn attempt(folder: &OwnedFd, from: u64) -> io::Result<Option<(Vec<u8>, u64)>> {
    let mut files = Vec::new();
    for name in NAMES {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(folder, name, flags, Mode::empty()) {
            Err(rustix::io::Errno::NOENT) => {}
            Err(e) => return Err(e.into()),
            Ok(file) => {
                if let Some(base) = read_base(&file)? {
                    files.push((base, file));
                }
            }
        }
    }
    files.sort_by_key(|(base, _)| *base);
    for (base, file) in files {
        let at = from.max(base);
        let mut bytes = vec![0; READ_BUDGET];
        let got = read_at(&file, &mut bytes, HEADER as u64 + (at - base))?;
        bytes.truncate(whole_lines(&bytes, got));
        if read_base(&file)? != Some(base) {
            return Ok(None);
        }
        if !bytes.is_empty() {
            let next = at + bytes.len() as u64;
            return Ok(Some((bytes, next)));
        }
    }
    Ok(Some((Vec::new(), from)))
}

fn read_base(file: &OwnedFd) -> io::Result<Option<u64>> {
    let mut line = [0; HEADER];
    let got = read_at(file, &mut line, 0)?;
    Ok(base_of(&line[..got]))
}

fn read_at(file: &OwnedFd, into: &mut [u8], at: u64) -> io::Result<usize> {
    let mut got = 0;
    while got < into.len() {
        match rustix::io::pread(file.as_fd(), &mut into[got..], at + got as u64) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(folder: &Path, cap: u64) -> Rc<AuditLog> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        AuditLog::with_cap(rustix::fs::open(folder, flags, Mode::empty()).unwrap(), cap)
    }

    proptest::proptest! {
        /// A reader that keeps up sees every line once and in order, whatever the cap; one that comes
        /// late sees the end of them, and the offsets tell how much is missing.
        #[test]
        fn written_is_read(
            lines in proptest::collection::vec("[a-z]{0,40}", 1..200),
            cap in 64u64..400,
            batch in 1usize..12,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let log = log(folder.path(), cap);
            let end = AuditEnd(log.clone());
            let all: Vec<u8> = lines.iter().flat_map(|l| format!("{l}\n").into_bytes()).collect();
            let (mut seen, mut at, mut skipped) = (Vec::new(), 0, 0);
            let mut written = 0;
            for some in lines.chunks(batch) {
                for line in some {
                    end.append(format!("{line}\n").as_bytes());
                    written += line.len() as u64 + 1;
                }
                log.flush();
                loop {
                    let (bytes, next) = read(folder.path(), at).unwrap();
                    if bytes.is_empty() { break }
                    skipped += next - at - bytes.len() as u64;
                    at = next;
                    seen.extend(bytes);
                }
                assert_eq!(at, written);
            }
            assert_eq!(seen.len() as u64 + skipped, all.len() as u64);
            if skipped == 0 {
                assert_eq!(seen, all);
            } else {
                assert!(all.ends_with(&seen[seen.len().saturating_sub(1)..]));
            }
            // From the beginning: a tail of all lines, at its right place.
            let (bytes, next) = read(folder.path(), 0).unwrap();
            let start = usize::try_from(next).unwrap() - bytes.len();
            assert_eq!(&all[start..start + bytes.len()], &bytes[..]);
            assert!(bytes.ends_with(b"\n"));
            for name in NAMES {
                let length = std::fs::metadata(folder.path().join(name)).map_or(0, |m| m.len());
                assert!(length <= cap.max(41) + HEADER as u64, "{length} > {cap}");
            }
        }

        #[test]
        fn headers_are_read_back(base: u64) {
            assert_eq!(base_of(&header(base)), Some(base));
        }
    }

    #[test]
    fn what_is_not_there_has_no_lines() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(&folder.path().join("none"), 7).unwrap(), (Vec::new(), 7));
        assert_eq!(read(folder.path(), 7).unwrap(), (Vec::new(), 7));
        // A file that was just truncated.
        std::fs::write(folder.path().join(NAMES[0]), b"{\"ba").unwrap();
        assert_eq!(read(folder.path(), 7).unwrap(), (Vec::new(), 7));
    }

    #[test]
    fn half_a_line_waits_for_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let log = log(folder.path(), 1000);
        let end = AuditEnd(log.clone());
        end.append(b"one\ntw");
        log.flush();
        // `append` takes whole lines; a crash in the middle of a write does not.
        assert_eq!(read(folder.path(), 0).unwrap(), (b"one\n".to_vec(), 4));
    }
}
