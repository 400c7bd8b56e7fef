//! A server of SFTP version 3 inside a sandbox: a child of init that has become the wanted user.
//!
//! It speaks the protocol itself instead of by a library: names are bytes there as they are in the kernel, and a
//! child of init has one thread and no async runtime. It resolves every path where it belongs, with the rights of
//! its user, so it can do what a program of that user can and no more; of init it keeps no descriptor. Invariants:
//! one answer to each request, in order; at most [`MAX_HANDLES`] open handles and one packet in memory; it ends
//! when its socket does. Started by `files`; its peer is whoever holds the other end, and is not trusted.

mod list;
mod wire;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, Gid, Mode, OFlags, RenameFlags, Stat, Timespec, Timestamps, Uid,
};
use rustix::io::Errno;

use super::{DEFAULT_USER, exec};
use crate::sys;
use wire::{Ask, Attrs, Code, Extended, Malformed, Packet, Reply};

/// Most handles that are open at a time.
const MAX_HANDLES: usize = 256;
/// Bytes of one answer to a reading of a folder.
const FOLDER_REPLY: usize = 64 << 10;
/// Longest path.
const MAX_PATH: usize = libc::PATH_MAX as usize;

/// Becomes the user, in its folder, and gives up everything of init but the socket, which is 0 then. For a child
/// of init.
///
/// # Errors
/// What was refused; the child must not go on then.
pub(super) fn prepare(socket: OwnedFd, root: bool, cwd: &str) -> io::Result<()> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let null = rustix::fs::open("/dev/null", flags, Mode::empty())?;
    sys::dup_to(socket.as_fd(), 0)?;
    // A message of a panic must not go to a file of the guest's.
    sys::dup_to(null.as_fd(), 1)?;
    sys::dup_to(null.as_fd(), 2)?;
    drop((socket, null));
    rustix::process::setsid()?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    if !root {
        exec::become_user(DEFAULT_USER)?;
    }
    rustix::process::chdir(cwd).or_else(|_| rustix::process::chdir("/"))?;
    Ok(())
}

/// Serves until the client goes.
pub(super) fn serve(socket: OwnedFd, root: bool) {
    let socket = std::fs::File::from(socket);
    let home = if root { "/root" } else { "/home/vercel-sandbox" };
    let mut server = Server { home: home.as_bytes(), handles: HashMap::new(), next: 0 };
    // An error is the client's end, or its fault: there is nobody to tell.
    let _ = server.work(&socket, &socket);
}

enum Handle {
    File(OwnedFd),
    Folder { list: Dir, ended: bool },
}

struct Server<'a> {
    home: &'a [u8],
    handles: HashMap<u32, Handle>,
    next: u32,
}

/// Why a request was not done.
enum Refusal {
    Errno(Errno),
    Code(Code, &'static str),
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl From<Malformed> for Refusal {
    fn from(_: Malformed) -> Self {
        Self::Code(Code::BadMessage, "The packet is malformed.")
    }
}

const NO_HANDLE: Refusal = Refusal::Code(Code::Failure, "There is no such handle.");
const END: Refusal = Refusal::Code(Code::Eof, "End of file");

impl Refusal {
    fn reply(&self, id: u32) -> Reply {
        match self {
            Self::Code(code, text) => Reply::status(id, *code, text),
            Self::Errno(errno) => {
                let code = match *errno {
                    Errno::NOENT | Errno::NOTDIR | Errno::BADF | Errno::LOOP => Code::NoSuchFile,
                    Errno::PERM | Errno::ACCESS | Errno::FAULT => Code::PermissionDenied,
                    Errno::NOSYS | Errno::OPNOTSUPP => Code::Unsupported,
                    Errno::NAMETOOLONG | Errno::INVAL => Code::BadMessage,
                    _ => Code::Failure,
                };
                let text = match *errno {
                    Errno::DQUOT => "The sandbox's disk limit is reached".to_owned(),
                    other => {
                        let text = io::Error::from(other).to_string();
                        text.split(" (os error").next().unwrap_or_default().to_owned()
                    }
                };
                Reply::status(id, code, &text)
            }
        }
    }
}

fn bounded(path: &[u8]) -> Result<&[u8], Refusal> {
    match path.len() {
        // As OpenSSH: no name is the folder that the client is in.
        0 => Ok(b"."),
        n if n < MAX_PATH => Ok(path),
        _ => Err(Errno::NAMETOOLONG.into()),
    }
}

fn attrs_of(stat: &Stat) -> Attrs {
    let time = |seconds: i64| u32::try_from(seconds.max(0)).unwrap_or(u32::MAX);
    Attrs {
        size: Some(u64::try_from(stat.st_size).unwrap_or(0)),
        owner: Some((stat.st_uid, stat.st_gid)),
        mode: Some(stat.st_mode),
        times: Some((time(stat.st_atime), time(stat.st_mtime))),
    }
}

fn times_of((access, change): (u32, u32)) -> Timestamps {
    let at = |seconds: u32| Timespec { tv_sec: seconds.into(), tv_nsec: 0 };
    Timestamps { last_access: at(access), last_modification: at(change) }
}

fn rights(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & 0o7777)
}

impl Server<'_> {
    fn work(&mut self, mut from: impl Read, mut to: impl Write) -> io::Result<()> {
        let mut packet = Vec::new();
        loop {
            let mut length = [0u8; 4];
            from.read_exact(&mut length)?;
            let length = u32::from_be_bytes(length) as usize;
            if length == 0 || length > wire::MAX_PACKET {
                return Err(io::ErrorKind::InvalidData.into());
            }
            packet.resize(length, 0);
            from.read_exact(&mut packet)?;
            let reply = match wire::read(&packet) {
                Ok(Packet::Init(_)) => Reply::version(),
                Ok(Packet::Request(id, ask)) => ask
                    .map_err(Refusal::from)
                    .and_then(|ask| self.answer(id, &ask))
                    .unwrap_or_else(|refusal| refusal.reply(id)),
                Err(Malformed) => return Err(io::ErrorKind::InvalidData.into()),
            };
            to.write_all(&reply.finish())?;
        }
    }

    fn answer(&mut self, id: u32, ask: &Ask<'_>) -> Result<Reply, Refusal> {
        match ask {
            Ask::Open { path, flags, attrs } => return self.open(id, path, *flags, attrs),
            Ask::Close { handle } => {
                let number = number(handle)?;
                self.handles.remove(&number).ok_or(NO_HANDLE)?;
            }
            Ask::Read { handle, offset, length } => {
                return read(id, self.file(handle)?, *offset, *length);
            }
            Ask::Write { handle, offset, data } => write(self.file(handle)?, *offset, data)?,
            Ask::Lstat { path } => return stat(id, path, AtFlags::SYMLINK_NOFOLLOW),
            Ask::Stat { path } => return stat(id, path, AtFlags::empty()),
            Ask::Fstat { handle } => {
                let stat = rustix::fs::fstat(self.any(handle)?)?;
                return Ok(Reply::attrs(id, &attrs_of(&stat)));
            }
            Ask::Setstat { path, attrs } => set(bounded(path)?, attrs, AtFlags::empty())?,
            Ask::Fsetstat { handle, attrs } => fset(self.any(handle)?, attrs)?,
            Ask::Opendir { path } => return self.opendir(id, path),
            Ask::Readdir { handle } => return self.readdir(id, handle),
            Ask::Remove { path } => rustix::fs::unlinkat(CWD, bounded(path)?, AtFlags::empty())?,
            Ask::Mkdir { path, attrs } => {
                let mode = rights(attrs.mode.unwrap_or(0o777) & 0o777);
                rustix::fs::mkdirat(CWD, bounded(path)?, mode)?;
            }
            Ask::Rmdir { path } => rustix::fs::unlinkat(CWD, bounded(path)?, AtFlags::REMOVEDIR)?,
            Ask::Realpath { path } => return real_path(id, bounded(path)?),
            Ask::Rename { from, to } => rename_new(bounded(from)?, bounded(to)?)?,
            Ask::Readlink { path } => {
                let target = rustix::fs::readlinkat(CWD, bounded(path)?, Vec::new())?;
                return Ok(one_name(id, target.as_bytes()));
            }
            Ask::Symlink { target, link } => rustix::fs::symlinkat(*target, CWD, bounded(link)?)?,
            Ask::Extended(extended) => return self.extended(id, extended),
            Ask::Unknown => {
                return Err(Refusal::Code(Code::Unsupported, "There is no such request."));
            }
        }
        Ok(Reply::status(id, Code::Ok, "Success"))
    }

    fn extended(&self, id: u32, ask: &Extended<'_>) -> Result<Reply, Refusal> {
        match ask {
            Extended::PosixRename { from, to } => {
                rustix::fs::renameat(CWD, bounded(from)?, CWD, bounded(to)?)?;
            }
            Extended::Hardlink { from, to } => {
                rustix::fs::linkat(CWD, bounded(from)?, CWD, bounded(to)?, AtFlags::empty())?;
            }
            Extended::Fsync { handle } => rustix::fs::fsync(self.file(handle)?)?,
            Extended::Statvfs { path } => {
                let path = bounded(path)?;
                let flags = OFlags::PATH | OFlags::CLOEXEC;
                let at = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
                return Ok(space(id, &rustix::fs::fstatvfs(&at)?));
            }
            Extended::Fstatvfs { handle } => {
                return Ok(space(id, &rustix::fs::fstatvfs(self.any(handle)?)?));
            }
            Extended::Lsetstat { path, attrs } => {
                set(bounded(path)?, attrs, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Extended::ExpandPath { path } => {
                let path = match path.strip_prefix(b"~") {
                    Some([]) => self.home.to_vec(),
                    Some(rest) if rest.starts_with(b"/") => [self.home, rest].concat(),
                    _ => path.to_vec(),
                };
                return real_path(id, bounded(&path)?);
            }
            Extended::Limits => {
                let (packet, data) = (wire::MAX_PACKET as u64, wire::MAX_DATA as u64);
                return Ok(Reply::extended(id, &[packet, data, data, MAX_HANDLES as u64]));
            }
        }
        Ok(Reply::status(id, Code::Ok, "Success"))
    }

    fn keep(&mut self, id: u32, handle: Handle) -> Result<Reply, Refusal> {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        self.handles.insert(number, handle);
        Ok(Reply::handle(id, &number.to_be_bytes()))
    }

    fn room(&self) -> Result<(), Refusal> {
        let full = Refusal::Code(Code::Failure, "Too many handles are open.");
        if self.handles.len() >= MAX_HANDLES { Err(full) } else { Ok(()) }
    }

    fn open(&mut self, id: u32, path: &[u8], how: u32, attrs: &Attrs) -> Result<Reply, Refusal> {
        self.room()?;
        let mut flags = match (how & wire::READ != 0, how & wire::WRITE != 0) {
            (true, true) => OFlags::RDWR,
            (false, true) => OFlags::WRONLY,
            _ => OFlags::RDONLY,
        };
        let pairs = [
            (wire::APPEND, OFlags::APPEND),
            (wire::CREAT, OFlags::CREATE),
            (wire::TRUNC, OFlags::TRUNC),
            (wire::EXCL, OFlags::EXCL),
        ];
        flags.extend(pairs.into_iter().filter(|(bit, _)| how & bit != 0).map(|(_, flag)| flag));
        // A FIFO that nobody else has open would hold up everything.
        flags |= OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        let mode = rights(attrs.mode.unwrap_or(0o666));
        let file = rustix::fs::openat(CWD, bounded(path)?, flags, mode)?;
        if rustix::fs::fstat(&file)?.st_mode & libc::S_IFMT == libc::S_IFDIR {
            return Err(Errno::ISDIR.into());
        }
        self.keep(id, Handle::File(file))
    }

    fn opendir(&mut self, id: u32, path: &[u8]) -> Result<Reply, Refusal> {
        self.room()?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(CWD, bounded(path)?, flags, Mode::empty())?;
        self.keep(id, Handle::Folder { list: Dir::new(folder)?, ended: false })
    }

    fn readdir(&mut self, id: u32, handle: &[u8]) -> Result<Reply, Refusal> {
        let Some(Handle::Folder { list, ended }) = self.handles.get_mut(&number(handle)?) else {
            return Err(NO_HANDLE);
        };
        let mut reply = Reply::names(id);
        let mut any = false;
        while !*ended && reply.len() < FOLDER_REPLY {
            let Some(entry) = list.read() else {
                *ended = true;
                break;
            };
            let entry = entry?;
            let name = entry.file_name();
            let looked = rustix::fs::statat(list.fd()?, name, AtFlags::SYMLINK_NOFOLLOW);
            // One that has gone meanwhile is not listed.
            let Ok(stat) = looked else { continue };
            let attrs = attrs_of(&stat);
            let name = name.to_bytes();
            reply.name(name, &list::line(name, &attrs, stat.st_nlink), &attrs);
            any = true;
        }
        if any { Ok(reply) } else { Err(END) }
    }

    fn file(&self, handle: &[u8]) -> Result<BorrowedFd<'_>, Refusal> {
        match self.handles.get(&number(handle)?) {
            Some(Handle::File(file)) => Ok(file.as_fd()),
            _ => Err(NO_HANDLE),
        }
    }

    fn any(&self, handle: &[u8]) -> Result<BorrowedFd<'_>, Refusal> {
        match self.handles.get(&number(handle)?) {
            Some(Handle::File(file)) => Ok(file.as_fd()),
            Some(Handle::Folder { list, .. }) => Ok(list.fd()?),
            None => Err(NO_HANDLE),
        }
    }
}

fn number(handle: &[u8]) -> Result<u32, Refusal> {
    handle.try_into().map(u32::from_be_bytes).map_err(|_| NO_HANDLE)
}

fn read(id: u32, file: BorrowedFd<'_>, offset: u64, length: u32) -> Result<Reply, Refusal> {
    let mut reply = Reply::data(id);
    let length = (length as usize).min(wire::MAX_DATA);
    let got = reply.room(length, |room| {
        loop {
            match rustix::io::pread(file, &mut *room, offset) {
                Err(Errno::INTR) => {}
                other => return other,
            }
        }
    })?;
    if got == 0 && length > 0 { Err(END) } else { Ok(reply) }
}

fn write(file: BorrowedFd<'_>, mut offset: u64, mut data: &[u8]) -> Result<(), Refusal> {
    while !data.is_empty() {
        match rustix::io::pwrite(file, data, offset) {
            Ok(0) => return Err(Errno::IO.into()),
            Ok(n) => {
                data = &data[n..];
                offset = offset.saturating_add(n as u64);
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn stat(id: u32, path: &[u8], flags: AtFlags) -> Result<Reply, Refusal> {
    let stat = rustix::fs::statat(CWD, bounded(path)?, flags)?;
    Ok(Reply::attrs(id, &attrs_of(&stat)))
}

fn set(path: &[u8], attrs: &Attrs, flags: AtFlags) -> Result<(), Refusal> {
    let link = flags.contains(AtFlags::SYMLINK_NOFOLLOW);
    if let Some(size) = attrs.size {
        if link {
            return Err(Refusal::Code(Code::Unsupported, "A link has no size to be set."));
        }
        let how = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        rustix::fs::ftruncate(rustix::fs::openat(CWD, path, how, Mode::empty())?, size)?;
    }
    if let Some(times) = attrs.times {
        rustix::fs::utimensat(CWD, path, &times_of(times), flags)?;
    }
    if let Some((user, group)) = attrs.owner {
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        rustix::fs::chownat(CWD, path, Some(user), Some(group), flags)?;
    }
    // After the owner, whose change takes the bits of setuid away. A link has no mode.
    if let (Some(mode), false) = (attrs.mode, link) {
        rustix::fs::chmodat(CWD, path, rights(mode), AtFlags::empty())?;
    }
    Ok(())
}

fn fset(file: BorrowedFd<'_>, attrs: &Attrs) -> Result<(), Refusal> {
    if let Some(size) = attrs.size {
        rustix::fs::ftruncate(file, size)?;
    }
    if let Some((user, group)) = attrs.owner {
        rustix::fs::fchown(file, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?;
    }
    if let Some(mode) = attrs.mode {
        rustix::fs::fchmod(file, rights(mode))?;
    }
    if let Some(times) = attrs.times {
        rustix::fs::futimens(file, &times_of(times))?;
    }
    Ok(())
}

/// A rename that replaces nothing: that is what version 3 says.
fn rename_new(from: &[u8], to: &[u8]) -> Result<(), Refusal> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // A file system that does not know the flag.
        Err(Errno::INVAL | Errno::NOSYS) => {
            if rustix::fs::statat(CWD, to, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
                return Err(Errno::EXIST.into());
            }
            Ok(rustix::fs::renameat(CWD, from, CWD, to)?)
        }
        other => Ok(other?),
    }
}

fn one_name(id: u32, name: &[u8]) -> Reply {
    let mut reply = Reply::names(id);
    reply.name(name, name, &Attrs::default());
    reply
}

/// The path without links and dots. Its last part need not be there.
fn real_path(id: u32, path: &[u8]) -> Result<Reply, Refusal> {
    let errno = |e: io::Error| Errno::from_io_error(&e).unwrap_or(Errno::IO);
    let path = Path::new(OsStr::from_bytes(path));
    let whole = match std::fs::canonicalize(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => match (path.parent(), path.file_name()) {
            (Some(parent), Some(name)) => {
                let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
                std::fs::canonicalize(parent).map_err(errno)?.join(name)
            }
            _ => return Err(errno(e).into()),
        },
        other => other.map_err(errno)?,
    };
    Ok(one_name(id, &whole.into_os_string().into_vec()))
}

fn space(id: u32, of: &rustix::fs::StatVfs) -> Reply {
    // Read-only and nosuid have the numbers here that the protocol wants.
    let flags = of.f_flag.bits() & 3;
    Reply::extended(
        id,
        &[
            of.f_bsize,
            of.f_frsize,
            of.f_blocks,
            of.f_bfree,
            of.f_bavail,
            of.f_files,
            of.f_ffree,
            of.f_favail,
            of.f_fsid,
            flags,
            of.f_namemax,
        ],
    )
}

#[cfg(test)]
mod tests;
