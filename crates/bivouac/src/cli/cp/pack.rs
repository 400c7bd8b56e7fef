//! Local files as a gzip tar that is made while it is sent.
//!
//! Invariant: an archive that could not be completed ends the upload with an error, so the engine
//! never takes half of one for the whole. Runs on a blocking thread; what is sent waits in a short
//! channel, so a file of any size needs little memory.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Seek as _, SeekFrom, Write};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::Stream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::{Total, local_name};
use crate::cli::failure::{Explain as _, Failure, Outcome};
use crate::cli::output;

/// Bytes per piece of the body.
const PIECE: usize = 64 << 10;
/// Permissions of what has none of its own.
const PIPED_MODE: u32 = 0o644;

/// What to copy.
#[derive(Debug)]
pub(super) enum Source {
    /// A folder with what is in it.
    Folder(PathBuf),
    /// An open file.
    File {
        /// Positioned at its start.
        file: File,
        /// Its bytes.
        size: u64,
        /// Its permissions.
        mode: u32,
        /// What a copy in a folder is called.
        name: Option<String>,
    },
}

impl Source {
    /// A path of this machine. A link is followed; a pipe is read to its end first.
    pub(super) fn local(path: &Path) -> Outcome<Self> {
        let shown = path.display();
        let found = fs::metadata(path).explain(|| format!("could not look at {shown}"))?;
        if found.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        let file = File::open(path).explain(|| format!("could not open {shown}"))?;
        let name = local_name(path).map(|name| name.to_string_lossy().into_owned());
        // Files of /proc have a size of 0 and content all the same.
        if found.is_file() && found.len() > 0 {
            return Ok(Self::File { file, size: found.len(), mode: mode_of(&found), name });
        }
        let kind = found.file_type();
        if kind.is_file() || kind.is_fifo() || kind.is_char_device() {
            let mode = if kind.is_file() { mode_of(&found) } else { PIPED_MODE };
            return Self::spooled(file, mode, name).explain(|| format!("could not read {shown}"));
        }
        Err(Failure::new(format!("{shown} is neither a file nor a folder")))
    }

    /// Standard input, to its end.
    pub(super) fn stdin() -> Outcome<Self> {
        Self::spooled(io::stdin().lock(), PIPED_MODE, None)
            .explain(|| "could not read standard input".to_owned())
    }

    /// The size stands before the content in an archive, so it has to be known.
    fn spooled(mut from: impl Read, mode: u32, name: Option<String>) -> io::Result<Self> {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let folder = std::env::temp_dir();
        let mut file = File::from(rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR)?);
        let size = io::copy(&mut from, &mut file)?;
        file.seek(SeekFrom::Start(0))?;
        Ok(Self::File { file, size, mode, name })
    }

    /// What a copy in a folder is called; none: it has no name of its own.
    pub(super) fn name(&self) -> Option<String> {
        match self {
            Self::Folder(path) => local_name(path).map(|name| name.to_string_lossy().into_owned()),
            Self::File { name, .. } => name.clone(),
        }
    }

    /// How many bytes it has, if that is known without a look at each of its files.
    pub(super) fn size(&self) -> Option<u64> {
        match self {
            Self::Folder(_) => None,
            Self::File { size, .. } => Some(*size),
        }
    }

    /// Whether it is a folder.
    pub(super) fn is_folder(&self) -> bool {
        matches!(self, Self::Folder(_))
    }
}

/// Begins to pack `source` as the entry `at`. Answers the packing, and the body that it fills.
pub(super) fn stream(
    source: Source,
    at: String,
    passed: impl Fn(u64) + Send + 'static,
) -> (JoinHandle<io::Result<Total>>, impl Stream<Item = io::Result<Bytes>> + Send + 'static) {
    let (sender, receiver) = mpsc::channel(4);
    let packing = tokio::task::spawn_blocking(move || {
        let packed = pack(source, &at, Pipe { sender: sender.clone(), piece: Vec::new() }, &passed);
        if let Err(error) = &packed {
            // The body must not end as if it were whole.
            let _ = sender.blocking_send(Err(io::Error::new(error.kind(), error.to_string())));
        }
        packed
    });
    let body = futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|piece| (piece, receiver))
    });
    (packing, body)
}

fn pack(source: Source, at: &str, pipe: Pipe, passed: &dyn Fn(u64)) -> io::Result<Total> {
    let mut packer = Packer {
        tar: tar::Builder::new(GzEncoder::new(pipe, Compression::fast())),
        total: Total::default(),
        skipped: 0,
        passed,
    };
    match source {
        Source::Folder(path) => packer.folder(&path, Path::new(at))?,
        Source::File { file, size, mode, .. } => packer.content(file, size, mode, Path::new(at))?,
    }
    if packer.skipped > 0 {
        let count = packer.skipped;
        output::warning(&format!("{count} devices, pipes or sockets were left out"));
    }
    let total = packer.total;
    packer.tar.into_inner()?.finish()?.finish()?;
    Ok(total)
}

struct Packer<'p> {
    tar: tar::Builder<GzEncoder<Pipe>>,
    total: Total,
    skipped: u64,
    /// Hears of bytes as they are read.
    passed: &'p dyn Fn(u64),
}

impl Packer<'_> {
    fn folder(&mut self, path: &Path, at: &Path) -> io::Result<()> {
        // The root and the working folder exist in every sandbox; an entry without a name does not.
        if at.components().next().is_some() {
            let mut header =
                header(tar::EntryType::Directory, mode_of(&named(path, fs::metadata(path))?));
            self.tar.append_data(&mut header, at, io::empty())?;
        }
        let mut entries: Vec<_> = named(path, fs::read_dir(path))?
            .collect::<io::Result<_>>()
            .map_err(|e| at_path(path, &e))?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let (path, at) = (entry.path(), at.join(entry.file_name()));
            let kind = named(&path, entry.file_type())?;
            if kind.is_dir() {
                self.folder(&path, &at)?;
            } else if kind.is_symlink() {
                let target = named(&path, fs::read_link(&path))?;
                let mut header = header(tar::EntryType::Symlink, 0o777);
                self.tar.append_link(&mut header, &at, &target)?;
            } else if kind.is_file() {
                self.file(&path, &at)?;
            } else {
                self.skipped += 1;
            }
        }
        Ok(())
    }

    fn file(&mut self, path: &Path, at: &Path) -> io::Result<()> {
        let file = named(path, File::open(path))?;
        let found = named(path, file.metadata())?;
        self.content(file, found.len(), mode_of(&found), at)
    }

    fn content(&mut self, file: impl Read, size: u64, mode: u32, at: &Path) -> io::Result<()> {
        let mut header = header(tar::EntryType::Regular, mode);
        header.set_size(size);
        let exact = Exact { from: file.take(size), left: size, at, passed: self.passed };
        self.tar.append_data(&mut header, at, exact)?;
        self.total.files += 1;
        self.total.bytes += size;
        Ok(())
    }
}

fn header(kind: tar::EntryType, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(0);
    header
}

fn mode_of(found: &Metadata) -> u32 {
    found.mode() & 0o777
}

fn named<T>(path: &Path, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| at_path(path, &error))
}

fn at_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Exactly the announced bytes: a file that shrinks while it is read would shift all that follows.
struct Exact<'a, R> {
    from: io::Take<R>,
    left: u64,
    at: &'a Path,
    passed: &'a dyn Fn(u64),
}

impl<R: Read> Read for Exact<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buffer)?;
        self.left -= count as u64;
        (self.passed)(count as u64);
        if count == 0 && self.left > 0 && !buffer.is_empty() {
            let message = format!("{} became shorter while it was read", self.at.display());
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
        }
        Ok(count)
    }
}

/// Hands pieces to the body.
struct Pipe {
    sender: mpsc::Sender<io::Result<Bytes>>,
    piece: Vec<u8>,
}

impl Pipe {
    fn send(&mut self) -> io::Result<()> {
        if self.piece.is_empty() {
            return Ok(());
        }
        let piece = std::mem::take(&mut self.piece);
        let gone = |_| io::Error::new(io::ErrorKind::BrokenPipe, "the engine takes no more");
        self.sender.blocking_send(Ok(piece.into())).map_err(gone)
    }

    /// Sends what is left.
    fn finish(mut self) -> io::Result<()> {
        self.send()
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= PIECE {
            self.send()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use flate2::read::GzDecoder;
    use futures_util::StreamExt as _;
    use tempfile::tempdir;

    use super::*;

    async fn packed(source: Source, at: &str) -> io::Result<(Total, Vec<u8>)> {
        let (packing, body) = stream(source, at.to_owned(), |_| {});
        let pieces: Vec<io::Result<Bytes>> = body.collect().await;
        let total = packing.await.unwrap()?;
        let bytes = pieces.into_iter().collect::<io::Result<Vec<_>>>()?.concat();
        Ok((total, bytes))
    }

    fn entries(bytes: &[u8]) -> Vec<(String, char, u32, Vec<u8>)> {
        let mut archive = tar::Archive::new(GzDecoder::new(bytes));
        let read = |entry: io::Result<tar::Entry<'_, _>>| {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            if let Some(target) = entry.link_name_bytes() {
                content = target.into_owned();
            }
            let kind = char::from(entry.header().entry_type().as_byte());
            let path = entry.path().unwrap().display().to_string();
            (path, kind, entry.header().mode().unwrap(), content)
        };
        archive.entries().unwrap().map(read).collect()
    }

    #[tokio::test]
    async fn a_folder_goes_with_all_that_is_in_it() {
        let folder = tempdir().unwrap();
        let long = "n".repeat(180);
        fs::create_dir(folder.path().join("sub")).unwrap();
        fs::write(folder.path().join("sub").join(&long), b"deep").unwrap();
        fs::write(folder.path().join("tool"), b"#!").unwrap();
        fs::set_permissions(folder.path().join("tool"), fs::Permissions::from_mode(0o4755))
            .unwrap();
        symlink("/etc/passwd", folder.path().join("link")).unwrap();
        let source = Source::local(folder.path()).unwrap();
        let (total, bytes) = packed(source, "x/y").await.unwrap();
        assert_eq!(total, Total { files: 2, bytes: 6 });
        let found = entries(&bytes);
        let names: Vec<&str> = found.iter().map(|(name, ..)| name.trim_end_matches('/')).collect();
        let deep = format!("x/y/sub/{long}");
        assert_eq!(names, ["x/y", "x/y/link", "x/y/sub", deep.as_str(), "x/y/tool"]);
        assert_eq!(found[1].1, '2');
        assert_eq!(found[1].3, b"/etc/passwd");
        assert_eq!(found[3].3, b"deep");
        assert_eq!(found[4].2, 0o755, "no set-uid bit goes in");
    }

    #[tokio::test]
    async fn a_file_that_shrinks_is_an_error() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("f");
        fs::write(&path, vec![7u8; 1000]).unwrap();
        let Source::File { file, mode, name, .. } = Source::local(&path).unwrap() else {
            panic!("not a file")
        };
        let source = Source::File { file, size: 2000, mode, name };
        let error = packed(source, "f").await.unwrap_err();
        assert!(error.to_string().contains("shorter"), "{error}");
    }

    #[tokio::test]
    async fn an_engine_that_hangs_up_ends_the_packing() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("f");
        fs::write(&path, (0..4_000_000u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
            .unwrap();
        let (packing, body) = stream(Source::local(&path).unwrap(), "f".to_owned(), |_| {});
        drop(body);
        let error = packing.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn sources_are_looked_at_first() {
        let folder = tempdir().unwrap();
        assert!(Source::local(&folder.path().join("missing")).is_err());
        let version = Source::local(Path::new("/proc/version")).unwrap();
        assert!(matches!(version, Source::File { size: 1.., .. }), "{version:?}");
        let source = Source::spooled(&b"hello"[..], PIPED_MODE, None).unwrap();
        assert!(matches!(source, Source::File { size: 5, .. }));
        assert_eq!(source.name(), None);
    }
}
