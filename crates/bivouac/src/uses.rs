//! The file of uses: who asked for what, at which door, and how it came out.
//!
//! Owns `access.jsonl` in the data folder and its older parts. Invariants: only appended to, 0600, bounded (the
//! oldest part goes when the newest is full); a line is written whole; written off the path of requests, and all
//! of it before an orderly end is over. What could not be written is counted, and told by a line when writing
//! works again. Fed by `serve` out of [`Engine::take_uses`], read by `http::own_tokens`.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bivouac_engine::{Engine, Use};
use tokio::sync::broadcast;

/// How large a part becomes, bytes.
const MAX_PART: u64 = 8 << 20;
/// How many older parts are kept.
const OLD_PARTS: usize = 4;
/// How long lines gather before they are written.
const GATHER: Duration = Duration::from_millis(20);
/// How many lines a follower may be behind.
const BEHIND: usize = 2_048;

/// The log.
#[derive(Debug)]
pub struct UseLog {
    folder: PathBuf,
    part: Mutex<Part>,
    lines: broadcast::Sender<Arc<str>>,
}

#[derive(Debug)]
struct Part {
    file: File,
    size: u64,
    /// Lines that could not be written.
    lost: u64,
}

/// Older lines, and those to come.
#[derive(Debug)]
pub(crate) struct Reading {
    /// Oldest first, whole parts.
    parts: Vec<(File, u64)>,
    /// What is written from now on.
    pub(crate) next: broadcast::Receiver<Arc<str>>,
}

fn name(number: usize) -> String {
    match number {
        0 => "access.jsonl".to_owned(),
        n => format!("access.{n}.jsonl"),
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)
}

impl Part {
    fn open(folder: &Path) -> io::Result<Self> {
        let mut file = append(&folder.join(name(0)))?;
        let size = file.seek(SeekFrom::End(0))?;
        let mut part = Self { file, size, lost: 0 };
        if size > 0 {
            part.file.seek(SeekFrom::End(-1))?;
            let mut last = [0];
            part.file.read_exact(&mut last)?;
            // A crash cut a line: the next one begins anew.
            if last != *b"\n" {
                part.write(b"\n")?;
            }
        }
        Ok(part)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let written = self.file.write_all(bytes);
        self.size = self.file.metadata().map_or(self.size, |meta| meta.len());
        written
    }

    fn turn(&mut self, folder: &Path) -> io::Result<()> {
        self.file.sync_data()?;
        for number in (0..OLD_PARTS).rev() {
            match std::fs::rename(folder.join(name(number)), folder.join(name(number + 1))) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        let lost = self.lost;
        *self = Self { lost, ..Self::open(folder)? };
        Ok(())
    }
}

impl UseLog {
    /// Opens the log of a data folder.
    ///
    /// # Errors
    /// The file system's.
    pub fn open(folder: &Path) -> io::Result<Arc<Self>> {
        let part = Mutex::new(Part::open(folder)?);
        let lines = broadcast::Sender::new(BEHIND);
        Ok(Arc::new(Self { folder: folder.to_owned(), part, lines }))
    }

    fn part(&self) -> MutexGuard<'_, Part> {
        self.part.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends lines; `dropped` is how many did not come this far.
    fn write(&self, uses: &[Use], dropped: u64) {
        let mut part = self.part();
        part.lost = part.lost.saturating_add(dropped);
        let mut lines: Vec<Arc<str>> = Vec::with_capacity(uses.len() + 1);
        if part.lost > 0 {
            lines.push(format!("{{\"dropped\":{}}}", part.lost).into());
        }
        lines.extend(uses.iter().map(|one| Arc::from(one.line())));
        if lines.is_empty() {
            return;
        }
        let mut bytes = Vec::new();
        for line in &lines {
            bytes.extend_from_slice(line.as_bytes());
            bytes.push(b'\n');
        }
        let written = match part.size.saturating_add(bytes.len() as u64) > MAX_PART && part.size > 0
        {
            true => part.turn(&self.folder).and_then(|()| part.write(&bytes)),
            false => part.write(&bytes),
        };
        match written {
            Ok(()) => part.lost = 0,
            Err(error) => {
                if part.lost == 0 {
                    tracing::error!(%error, "uses cannot be written to access.jsonl");
                }
                part.lost = part.lost.saturating_add(uses.len() as u64).max(1);
            }
        }
        for line in lines {
            // Nobody follows.
            let _ = self.lines.send(line);
        }
    }

    /// Writes what comes, for as long as it is polled.
    pub async fn keep(self: Arc<Self>, engine: Arc<Engine>) {
        loop {
            engine.uses_come().await;
            tokio::time::sleep(GATHER).await;
            let (log, engine) = (Arc::clone(&self), Arc::clone(&engine));
            let write = tokio::task::spawn_blocking(move || {
                let (uses, dropped) = engine.take_uses();
                log.write(&uses, dropped);
            });
            if write.await.is_err() {
                tracing::error!("some uses were not written to access.jsonl");
            }
        }
    }

    /// Writes what is left, and makes it last: at an orderly end.
    pub fn finish(&self, engine: &Engine) {
        let (uses, dropped) = engine.take_uses();
        self.write(&uses, dropped);
        if let Err(error) = self.part().file.sync_data() {
            tracing::warn!(%error, "the last uses may not outlive a power cut");
        }
    }

    /// Opens it for reading, so that no line is missed or told twice between the old and the new.
    pub(crate) fn read(&self) -> io::Result<Reading> {
        let part = self.part();
        let next = self.lines.subscribe();
        let mut parts = Vec::new();
        for number in (1..=OLD_PARTS).rev() {
            match File::open(self.folder.join(name(number))) {
                Ok(file) => {
                    let size = file.metadata()?.len();
                    parts.push((file, size));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        parts.push((File::open(self.folder.join(name(0)))?, part.size));
        Ok(Reading { parts, next })
    }
}

impl Reading {
    /// The last `count` lines that are wanted, oldest first. Reads files: not for a thread that has others to serve.
    pub(crate) fn last(
        &mut self,
        count: usize,
        wanted: impl Fn(&str) -> bool,
    ) -> io::Result<Vec<String>> {
        let mut found = std::collections::VecDeque::new();
        while let Some((file, size)) = self.parts.pop() {
            if found.len() >= count {
                continue;
            }
            let mut bytes = Vec::new();
            file.take(size).read_to_end(&mut bytes)?;
            for line in bytes.rsplit(|byte| *byte == b'\n') {
                let Ok(line) = std::str::from_utf8(line) else { continue };
                if !line.is_empty() && wanted(line) {
                    found.push_front(line.to_owned());
                }
                if found.len() >= count {
                    break;
                }
            }
        }
        Ok(found.into())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use bivouac_engine::Principal;

    use super::*;

    fn one(what: &str) -> Use {
        Use::new(&Principal::local(), "http", what)
    }

    fn all(log: &UseLog, count: usize) -> Vec<String> {
        log.read().unwrap().last(count, |_| true).unwrap()
    }

    #[test]
    fn lines_are_private_appended_and_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let log = UseLog::open(folder.path()).unwrap();
        let mut reading = log.read().unwrap();
        log.write(&[one("a"), one("b")], 0);
        log.write(&[], 0);
        assert!(reading.last(10, |_| true).unwrap().is_empty(), "they came later");
        assert!(reading.next.try_recv().unwrap().contains("\"a\""));
        let mode = std::fs::metadata(folder.path().join("access.jsonl")).unwrap().permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        drop(log);
        // Cut in the middle of a line.
        append(&folder.path().join("access.jsonl")).unwrap().write_all(b"{\"at\":1").unwrap();
        let log = UseLog::open(folder.path()).unwrap();
        log.write(&[one("c")], 3);
        let lines = all(&log, 10);
        assert_eq!(lines.len(), 5, "{lines:?}");
        assert_eq!(lines[3], "{\"dropped\":3}");
        assert_eq!(lines[4], one("c").line());
        assert_eq!(all(&log, 1), [one("c").line()]);
        let named = log.read().unwrap().last(10, |line| line.contains("\"b\"")).unwrap();
        assert_eq!(named, [one("b").line()]);
    }

    #[test]
    fn what_it_takes_has_an_end() {
        let folder = tempfile::tempdir().unwrap();
        let log = UseLog::open(folder.path()).unwrap();
        let large: Vec<Use> =
            (0..1000).map(|n| one(&format!("{n} {}", "x".repeat(4000)))).collect();
        for _ in 0..14 {
            log.write(&large, 0);
        }
        let sizes: Vec<u64> = std::fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().len())
            .collect();
        assert_eq!(sizes.len(), OLD_PARTS + 1);
        assert!(sizes.iter().all(|size| *size <= MAX_PART), "{sizes:?}");
        let lines = all(&log, 2500);
        assert_eq!(lines.len(), 2500, "over the ends of parts");
        assert!(lines[0].contains("\"500 x") && lines[2499].contains("\"999 x"));
    }
}
