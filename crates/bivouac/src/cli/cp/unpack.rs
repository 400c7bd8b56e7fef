//! A tar out of a sandbox, written below a local folder.
//!
//! The archive is a stranger's. Invariant: every path is resolved by the kernel below the target
//! (`openat2`, no links on the way), so no entry, link or order of entries reaches outside; only
//! regular files, folders and links are made, without set-id bits, owned by the caller. Runs on a
//! thread of its own.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use bytes::{Buf as _, Bytes};
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::sync::mpsc;
use tar::EntryType;

use super::Total;
use crate::cli::failure::{Explain as _, Failure, Outcome};
use crate::cli::output;

/// Pieces that may wait for the disk.
const WAITING: usize = 16;

/// An unpacking in progress.
pub(super) struct Unpacking {
    pieces: Option<mpsc::SyncSender<Bytes>>,
    work: tokio::task::JoinHandle<io::Result<Total>>,
}

impl Unpacking {
    /// Begins to unpack into `target`, which is made if it is missing (its parent is not).
    pub(super) fn start(target: &Path) -> Outcome<Self> {
        let shown = target.display();
        match std::fs::create_dir(target) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).explain(|| format!("could not make {shown}"));
            }
            _ => {}
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // The user's own word for the target may be a link.
        let root = rustix::fs::open(target, flags, Mode::empty())
            .explain(|| format!("could not open the folder {shown}"))?;
        let (sender, receiver) = mpsc::sync_channel(WAITING);
        let work = tokio::task::spawn_blocking(move || {
            unpack(&root, Pieces { receiver, piece: Bytes::new() })
        });
        Ok(Self { pieces: Some(sender), work })
    }

    /// The next bytes of the archive.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Outcome<()> {
        // A writer that stopped early has its own reason, told by `finish`.
        let gone = || Failure::new("the copy stopped");
        let pieces = self.pieces.as_ref().ok_or_else(gone)?;
        pieces.send(Bytes::copy_from_slice(bytes)).map_err(|_| gone())
    }

    /// The archive is complete: waits until everything is written.
    pub(super) async fn finish(mut self) -> Outcome<Total> {
        self.pieces = None;
        self.work.await?.explain(|| "could not write the copy".to_owned())
    }
}

/// The pieces as one stream.
struct Pieces {
    receiver: mpsc::Receiver<Bytes>,
    piece: Bytes,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.receiver.recv() {
                Ok(piece) => self.piece = piece,
                Err(_) => return Ok(0),
            }
        }
        let count = buffer.len().min(self.piece.len());
        self.piece.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

fn unpack(root: &OwnedFd, from: impl Read) -> io::Result<Total> {
    let mut total = Total::default();
    let mut skipped = 0u64;
    // Folders get their modes last: one that is closed for writing is still to be filled.
    let mut modes: Vec<(PathBuf, Mode)> = Vec::new();
    let mut archive = tar::Archive::new(from);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = inside(&entry.path()?)?;
        let mode = Mode::from_raw_mode(entry.header().mode()? & 0o777);
        let at =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        match entry.header().entry_type() {
            EntryType::Directory => {
                folder(root, &path).map_err(at)?;
                modes.push((path, mode));
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                total.bytes += file(root, &path, mode, &mut entry).map_err(at)?;
                total.files += 1;
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                link(root, &path, &target).map_err(at)?;
            }
            EntryType::XGlobalHeader => {}
            _ => skipped += 1,
        }
    }
    for (path, mode) in modes.into_iter().rev() {
        let folder = open(root, &path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        rustix::fs::fchmod(&folder, mode)?;
    }
    if skipped > 0 {
        output::warning(&format!("{skipped} devices, pipes or hard links were left out"));
    }
    Ok(total)
}

/// A path of an entry, below the target.
fn inside(path: &Path) -> io::Result<PathBuf> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                let message = format!("the sandbox sent the path '{}'", path.display());
                return Err(io::Error::new(io::ErrorKind::InvalidData, message));
            }
        }
    }
    Ok(clean)
}

/// Opens what is there, below the root and through no link.
fn open(root: &OwnedFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let opened = rustix::fs::openat2(root, path, flags, Mode::empty(), resolve);
    opened.map_err(|errno| match errno {
        Errno::LOOP => io::Error::new(io::ErrorKind::InvalidData, "a link is in the way"),
        errno => errno.into(),
    })
}

/// Makes a folder and those on the way to it; one that is there stays.
fn folder(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    let mut sofar = PathBuf::new();
    for part in path.components() {
        let parent = open(root, &sofar, OFlags::PATH | OFlags::DIRECTORY)?;
        match rustix::fs::mkdirat(&parent, part.as_os_str(), Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        sofar.push(part);
    }
    open(root, &sofar, OFlags::PATH | OFlags::DIRECTORY)
}

/// The folder that an entry goes into, with the entry's own name, free to be made.
fn place<'a>(root: &OwnedFd, path: &'a Path) -> io::Result<(OwnedFd, &'a Path)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "an entry without a name"));
    };
    let parent = folder(root, parent)?;
    match rustix::fs::unlinkat(&parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok((parent, Path::new(name))),
        Err(errno) => Err(errno.into()),
    }
}

fn file(root: &OwnedFd, path: &Path, mode: Mode, content: &mut impl Read) -> io::Result<u64> {
    let (parent, name) = place(root, path)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(parent.as_fd(), name, flags, Mode::RUSR | Mode::WUSR)?;
    let mut file = File::from(file);
    let bytes = io::copy(content, &mut file)?;
    rustix::fs::fchmod(&file, mode)?;
    Ok(bytes)
}

fn link(root: &OwnedFd, path: &Path, target: &[u8]) -> io::Result<()> {
    let (parent, name) = place(root, path)?;
    Ok(rustix::fs::symlinkat(target, &parent, name)?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use tempfile::{TempDir, tempdir};

    use super::*;

    fn archive(fill: impl FnOnce(&mut tar::Builder<Vec<u8>>)) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        fill(&mut builder);
        builder.into_inner().unwrap()
    }

    /// Adds an entry whose name the tar crate itself would refuse.
    fn raw(
        builder: &mut tar::Builder<Vec<u8>>,
        name: &str,
        kind: EntryType,
        link: &str,
        content: &[u8],
    ) {
        let mut header = tar::Header::new_gnu();
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_gnu_mut().unwrap().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o4755);
        header.set_size(content.len() as u64);
        header.set_cksum();
        builder.append(&header, content).unwrap();
    }

    fn run(target: &Path, bytes: &[u8]) -> io::Result<Total> {
        let root = rustix::fs::open(target, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?;
        unpack(&root, bytes)
    }

    /// A target and a neighbour that must stay as it is.
    fn scene() -> (TempDir, PathBuf, PathBuf) {
        let folder = tempdir().unwrap();
        let (target, outside) = (folder.path().join("target"), folder.path().join("outside"));
        fs::create_dir(&target).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "mine").unwrap();
        (folder, target, outside)
    }

    #[test]
    fn a_tree_comes_out_as_it_was() {
        let (_keep, target, _) = scene();
        let bytes = archive(|tar| {
            raw(tar, "./", EntryType::Directory, "", b"");
            raw(tar, "./sub/", EntryType::Directory, "", b"");
            raw(tar, "./sub/tool", EntryType::Regular, "", b"#!");
            raw(tar, "./sub/link", EntryType::Symlink, "tool", b"");
            raw(tar, "no/parents/yet", EntryType::Regular, "", b"x");
            raw(tar, "pipe", EntryType::Fifo, "", b"");
            raw(tar, "disk", EntryType::Block, "", b"");
        });
        assert_eq!(run(&target, &bytes).unwrap(), Total { files: 2, bytes: 3 });
        // A second time over what is there.
        assert_eq!(run(&target, &bytes).unwrap(), Total { files: 2, bytes: 3 });
        assert_eq!(fs::read(target.join("sub/link")).unwrap(), b"#!");
        let mode = fs::metadata(target.join("sub/tool")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o755, "no set-uid bit comes out");
        assert!(!target.join("pipe").exists() && !target.join("disk").exists());
    }

    #[test]
    fn nothing_gets_out_of_the_target() {
        let cases: [&[(&str, EntryType, &str)]; 6] = [
            &[("../outside/file", EntryType::Regular, "")],
            &[("/tmp/../outside", EntryType::Directory, "")],
            &[("a/../../outside/file", EntryType::Regular, "")],
            &[("way", EntryType::Symlink, "../outside"), ("way/file", EntryType::Regular, "")],
            &[("way", EntryType::Symlink, "../outside"), ("way", EntryType::Directory, "")],
            &[("way", EntryType::Symlink, ".."), ("way/outside/new/", EntryType::Directory, "")],
        ];
        for case in cases {
            let (_keep, target, outside) = scene();
            let bytes = archive(|tar| {
                for (name, kind, link) in case {
                    let content: &[u8] = if *kind == EntryType::Regular { b"evil" } else { b"" };
                    raw(tar, name, *kind, link, content);
                }
            });
            assert!(run(&target, &bytes).is_err(), "{case:?}");
            assert_eq!(fs::read(outside.join("file")).unwrap(), b"mine", "{case:?}");
            assert_eq!(fs::read_dir(&outside).unwrap().count(), 1, "{case:?}");
        }
    }

    #[test]
    fn a_link_in_the_place_of_a_file_is_replaced_not_followed() {
        let (_keep, target, outside) = scene();
        symlink(outside.join("file"), target.join("f")).unwrap();
        let bytes = archive(|tar| raw(tar, "f", EntryType::Regular, "", b"new"));
        run(&target, &bytes).unwrap();
        assert_eq!(fs::read(outside.join("file")).unwrap(), b"mine");
        assert_eq!(fs::read(target.join("f")).unwrap(), b"new");
    }

    #[tokio::test]
    async fn an_archive_that_ends_early_is_an_error() {
        let (_keep, target, _) = scene();
        let bytes = archive(|tar| raw(tar, "f", EntryType::Regular, "", &[7u8; 3000]));
        let mut unpacking = Unpacking::start(&target).unwrap();
        unpacking.push(&bytes[..1000]).unwrap();
        assert!(unpacking.finish().await.is_err());
    }
}
