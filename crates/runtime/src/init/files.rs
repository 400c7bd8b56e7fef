//! File operations, each in a child of init: inside the sandbox's namespaces, limits and filter.
//!
//! Paths are resolved where they belong, by a process whose root is the sandbox's root, so no link of
//! a guest can lead anywhere else; links of /proc are refused. The host never opens a guest's path.
//! Invariant: a result line is always written, and success only after everything is done. Called by
//! init's loop.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;

use super::{DEFAULT_USER, drives, sftp};
use crate::proto::{FileOp, FileReply};
use crate::sys::{self, Fork};
use crate::{FileError, FileErrorKind};

/// Starts the operation. `fds` are its data and its result descriptor.
pub(super) fn start(op: &FileOp, fds: Vec<OwnedFd>) {
    let Ok([data, result]) = <[OwnedFd; 2]>::try_from(fds) else { return };
    let result = std::fs::File::from(result);
    match sys::fork_single_threaded() {
        Ok(Fork::Parent(_)) => {}
        Ok(Fork::Child) => {
            // A client that goes away ends this as an error, not as a signal.
            sys::reset_signals_of_role();
            if let FileOp::Sftp { root, cwd } = op {
                become_sftp(data, result, *root, cwd);
            }
            let outcome = run(op, data, &result);
            reply(&result, &outcome.map_or_else(FileReply::Failed, |()| FileReply::Done));
            sys::exit_now(0)
        }
        Err(e) => {
            let error = fail("start", Path::new(""), &e);
            reply(&result, &FileReply::Failed(error));
        }
    }
}

/// Turns a child into a server of SFTP.
fn become_sftp(data: OwnedFd, result: std::fs::File, root: bool, cwd: &str) -> ! {
    let ready =
        sftp::prepare(data, root, cwd).map_err(|e| fail("start SFTP in", Path::new(cwd), &e));
    let is_ready = ready.is_ok();
    reply(&result, &ready.map_or_else(FileReply::Failed, |()| FileReply::Done));
    drop(result);
    // What init has open is not for a process that does what a client says.
    if is_ready
        && sys::close_from(3).is_ok()
        && let Ok(socket) = sys::take_fd(0)
    {
        sftp::serve(socket, root);
    }
    sys::exit_now(0)
}

fn reply(mut result: &std::fs::File, reply: &FileReply) {
    if let Ok(mut line) = serde_json::to_vec(reply) {
        line.push(b'\n');
        let _ = result.write_all(&line);
    }
}

fn run(op: &FileOp, data: OwnedFd, result: &std::fs::File) -> Result<(), FileError> {
    match op {
        FileOp::Read { path } => read(Path::new(path), &data, result),
        FileOp::Write { cwd } => write(Path::new(cwd), data),
        FileOp::Mkdir { path, recursive } => mkdir(Path::new(path), *recursive),
        FileOp::Mount { at, folders } => {
            drives::mount(at, &data, folders).map_err(|e| drives::refusal(at, &e))
        }
        FileOp::Unmount { at, dev, ino, force } => drives::unmount(at, *dev, *ino, *force)
            .map(drop)
            .map_err(|e| fail("take the drive away from", Path::new(at), &e)),
        FileOp::Sftp { .. } => Err(invalid("SFTP is served by a process of its own".to_owned())),
    }
}

fn kind_of(errno: Option<i32>) -> FileErrorKind {
    match errno {
        Some(libc::ENOENT) => FileErrorKind::NotFound,
        Some(libc::EEXIST | libc::ENOTEMPTY) => FileErrorKind::Exists,
        Some(libc::ENOTDIR | libc::EISDIR) => FileErrorKind::WrongType,
        Some(libc::EDQUOT | libc::ENOSPC) => FileErrorKind::NoSpace,
        Some(libc::EBUSY) => FileErrorKind::Busy,
        Some(libc::ENAMETOOLONG | libc::EINVAL | libc::ELOOP | libc::EXDEV) => {
            FileErrorKind::Invalid
        }
        _ => FileErrorKind::Other,
    }
}

fn fail(what: &str, path: &Path, error: &io::Error) -> FileError {
    let kind = kind_of(error.raw_os_error());
    // The standard library's text without its "(os error 2)".
    let text = match error.raw_os_error() {
        Some(libc::EDQUOT) => "the sandbox's disk limit is reached".to_owned(),
        _ => error.to_string().split(" (os error").next().unwrap_or_default().to_owned(),
    };
    FileError { kind, message: format!("cannot {what} '{}': {text}", path.display()) }
}

fn invalid(message: String) -> FileError {
    FileError { kind: FileErrorKind::Invalid, message }
}

/// How often a path is resolved again that others disturb.
const TRIES: u32 = 10_000;

/// Opens below the sandbox's root; links of /proc are refused.
fn open(path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let root = rustix::fs::open("/", OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?;
    // openat2 refuses a path descriptor with flags that only an open file can have.
    let careful = OFlags::NOCTTY | OFlags::NONBLOCK;
    let careful = if flags.contains(OFlags::PATH) { OFlags::empty() } else { careful };
    let flags = flags | OFlags::CLOEXEC | careful;
    // With `..` on the way the kernel gives up when anything on the host was renamed or mounted
    // meanwhile, and asks to try again (openat2(2), EAGAIN). It may do so for as long as the guest
    // keeps renaming.
    for _ in 0..TRIES {
        match rustix::fs::openat2(&root, path, flags, Mode::empty(), resolve) {
            Err(rustix::io::Errno::AGAIN) => std::thread::yield_now(),
            other => return Ok(other?),
        }
    }
    let message = "other processes rename files without a pause";
    Err(io::Error::new(io::ErrorKind::ResourceBusy, message))
}

fn read(path: &Path, data: &OwnedFd, result: &std::fs::File) -> Result<(), FileError> {
    let wrong = |what: &str| FileError {
        kind: FileErrorKind::WrongType,
        message: format!("cannot read '{}': it is {what}, not a regular file", path.display()),
    };
    // Looking first keeps a device or FIFO from being opened at all.
    let look = open(path, OFlags::PATH).map_err(|e| fail("read", path, &e))?;
    let stat = rustix::fs::fstat(&look).map_err(|e| fail("read", path, &e.into()))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::Directory => return Err(wrong("a directory")),
        _ => return Err(wrong("a special file")),
    }
    let file = open(path, OFlags::RDONLY).map_err(|e| fail("read", path, &e))?;
    let stat = rustix::fs::fstat(&file).map_err(|e| fail("read", path, &e.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(wrong("a special file"));
    }
    reply(result, &FileReply::Opened { size: stat.st_size.max(0) as u64 });
    let (mut from, mut to) = (std::fs::File::from(file), data.as_fd());
    let mut buffer = vec![0u8; 256 << 10];
    loop {
        let got = from.read(&mut buffer).map_err(|e| fail("read", path, &e))?;
        if got == 0 {
            return Ok(());
        }
        write_all(&mut to, &buffer[..got]).map_err(|e| fail("send", path, &e))?;
    }
}

fn write_all(to: &mut BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(*to, bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn mkdir(path: &Path, recursive: bool) -> Result<(), FileError> {
    if recursive {
        return make_folders(path, 0o755).map_err(|e| fail("create directory", path, &e));
    }
    let error = |e: io::Error| fail("create directory", path, &e);
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(error(io::Error::from_raw_os_error(libc::EEXIST)));
    };
    let parent = open(parent, OFlags::PATH | OFlags::DIRECTORY).map_err(error)?;
    rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o755))
        .and_then(|()| own(&parent, name))
        .map_err(|e| error(e.into()))
}

/// Gives an entry of a folder to the default user.
fn own(folder: &OwnedFd, name: &std::ffi::OsStr) -> rustix::io::Result<()> {
    let (uid, gid) = (Uid::from_raw(DEFAULT_USER), Gid::from_raw(DEFAULT_USER));
    rustix::fs::chownat(folder, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
}

/// Makes a folder and its parents; those made belong to the default user.
fn make_folders(path: &Path, mode: u32) -> io::Result<()> {
    match open(path, OFlags::PATH | OFlags::DIRECTORY) {
        Ok(_) => return Ok(()),
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {}
        Err(e) => return Err(e),
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from_raw_os_error(libc::ENOENT));
    };
    make_folders(parent, 0o755)?;
    let parent = open(parent, OFlags::PATH | OFlags::DIRECTORY)?;
    match rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(mode)) {
        Ok(()) => Ok(own(&parent, name)?),
        Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Longest path of an archive's entry; also bounds the depth of [`make_folders`].
const MAX_PATH: usize = 4096;

/// Unpacks the gzip tar entry by entry. A broken or hostile archive is refused at the entry that
/// shows it; entries before that are kept, as the live service does.
fn write(cwd: &Path, data: OwnedFd) -> Result<(), FileError> {
    make_folders(cwd, 0o755).map_err(|e| fail("create directory", cwd, &e))?;
    let broken = |e: &io::Error| invalid(format!("the archive is not a whole gzip tar: {e}"));
    let stream = flate2::read::MultiGzDecoder::new(std::fs::File::from(data));
    let mut archive = tar::Archive::new(stream);
    archive.set_ignore_zeros(false);
    for entry in archive.entries().map_err(|e| broken(&e))? {
        let mut entry = entry.map_err(|e| broken(&e))?;
        check_extensions(&mut entry)?;
        let name = entry.path().map_err(|e| broken(&e))?.into_owned();
        let path = entry_path(cwd, &name)?;
        let mode = entry.header().mode().unwrap_or(0o644) & 0o7777;
        match entry.header().entry_type() {
            tar::EntryType::Regular | tar::EntryType::Continuous | tar::EntryType::GNUSparse => {
                write_file(&path, mode, &mut entry)?;
            }
            tar::EntryType::Directory => {
                make_folders(&path, mode).map_err(|e| fail("create directory", &path, &e))?;
            }
            tar::EntryType::Symlink => {
                let target = entry.link_name().map_err(|e| broken(&e))?;
                let target = target.ok_or_else(|| invalid("a link without a target".into()))?;
                write_link(&path, &target)?;
            }
            tar::EntryType::XGlobalHeader => {}
            other => {
                let text = format!("'{}': entries of type {other:?} are refused", name.display());
                return Err(invalid(text));
            }
        }
    }
    // The rest of the stream is padding; reading it checks the gzip trailer and keeps a client that
    // still sends from being cut off.
    let mut rest = archive.into_inner();
    io::copy(&mut rest, &mut io::sink()).map_err(|e| broken(&e))?;
    Ok(())
}

/// Refuses records of a PAX header that the archive's reader would pass over: what one program skips
/// and another obeys is how files are smuggled.
fn check_extensions(entry: &mut tar::Entry<'_, impl Read>) -> Result<(), FileError> {
    let broken = || invalid("the archive has a damaged PAX header".into());
    let size = entry.size();
    let Some(records) = entry.pax_extensions().map_err(|_| broken())? else { return Ok(()) };
    for record in records {
        let record = record.map_err(|_| broken())?;
        if record.key_bytes() == b"size" {
            let told = record.value().ok().and_then(|text| text.parse::<u64>().ok());
            if told != Some(size) {
                return Err(broken());
            }
        }
    }
    Ok(())
}

/// The place of an entry: below `cwd`, never up.
fn entry_path(cwd: &Path, name: &Path) -> Result<PathBuf, FileError> {
    let mut out = cwd.to_owned();
    for part in name.components() {
        match part {
            Component::Normal(part) => out.push(part),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                let text = format!("entry name '{}' leads out of the folder", name.display());
                return Err(invalid(text));
            }
        }
    }
    if out.as_os_str().len() > MAX_PATH {
        return Err(invalid("an entry's name is too long".into()));
    }
    Ok(out)
}

/// The folder of an entry, made when missing, and the entry's name in it.
fn place(path: &Path) -> io::Result<(OwnedFd, &std::ffi::OsStr)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    };
    make_folders(parent, 0o755)?;
    Ok((open(parent, OFlags::PATH | OFlags::DIRECTORY)?, name))
}

/// Writes beside the target and renames over it: a reader sees the old or the new file, a running
/// program can be replaced, and a link at that place is replaced and never followed.
fn write_file(path: &Path, mode: u32, content: &mut impl Read) -> Result<(), FileError> {
    let error = |e: io::Error| fail("write", path, &e);
    let (folder, name) = place(path).map_err(error)?;
    let beside = format!(".bivouac-{}", rustix::process::getpid().as_raw_nonzero());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let private = Mode::from_raw_mode(0o600);
    let file = match rustix::fs::openat(&folder, &beside, flags, private) {
        // Left by an operation that was killed.
        Err(Errno::EXIST) => rustix::fs::unlinkat(&folder, &beside, AtFlags::empty())
            .and_then(|()| rustix::fs::openat(&folder, &beside, flags, private)),
        other => other,
    }
    .map_err(|e| error(e.into()))?;
    let fill = || -> Result<(), FileError> {
        let mut file = std::fs::File::from(file);
        let mut buffer = vec![0u8; 256 << 10];
        loop {
            let got = content.read(&mut buffer).map_err(|e| {
                invalid(format!("the archive ends inside '{}': {e}", path.display()))
            })?;
            if got == 0 {
                break;
            }
            file.write_all(&buffer[..got]).map_err(error)?;
        }
        let (uid, gid) = (Uid::from_raw(DEFAULT_USER), Gid::from_raw(DEFAULT_USER));
        rustix::fs::fchown(&file, Some(uid), Some(gid)).map_err(|e| error(e.into()))?;
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)).map_err(|e| error(e.into()))?;
        rustix::fs::renameat(&folder, &beside, &folder, name).map_err(|e| error(e.into()))
    };
    fill().inspect_err(|_| {
        let _ = rustix::fs::unlinkat(&folder, &beside, AtFlags::empty());
    })
}

fn write_link(path: &Path, target: &Path) -> Result<(), FileError> {
    let error = |e: io::Error| fail("link", path, &e);
    let (folder, name) = place(path).map_err(error)?;
    match rustix::fs::symlinkat(target, &folder, name) {
        Err(Errno::EXIST) => rustix::fs::unlinkat(&folder, name, AtFlags::empty())
            .and_then(|()| rustix::fs::symlinkat(target, &folder, name)),
        other => other,
    }
    .and_then(|()| own(&folder, name))
    .map_err(|e| error(e.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_stay_below_their_folder() {
        let cwd = Path::new("/vercel/sandbox");
        let good = |name: &str| entry_path(cwd, Path::new(name)).unwrap();
        assert_eq!(good("a/./b"), Path::new("/vercel/sandbox/a/b"));
        assert_eq!(good("."), cwd);
        for bad in ["../x", "a/../../x", "/etc/passwd", "a/..", &"x/".repeat(3000)] {
            assert!(entry_path(cwd, Path::new(bad)).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_name_leads_out(name in "[a./\\\\-]{0,60}") {
            if let Ok(path) = entry_path(Path::new("/w"), Path::new(&name)) {
                assert!(path.starts_with("/w"));
                assert!(!path.components().any(|c| c == Component::ParentDir));
            }
        }
    }
}
