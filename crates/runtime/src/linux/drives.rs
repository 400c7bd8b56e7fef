//! Drives on this host: volumes of the pool, their mounts, and the files of those that nobody has mounted.
//!
//! A drive is a volume with a folder `data`, which belongs to the default user and is what sandboxes get: they
//! own that folder and not the volume. Its ids on disk are those inside, mapped by the mount. Invariants: no
//! path below `data` is resolved through a link or out of it (`openat2`), whoever made the tree; a file that is
//! written from here is in place whole or not at all. Called by the engine through [`Drives`], by
//! `handle` for running sessions and by the shim at a launch.

use std::io::{self, BufRead, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Uid};
use rustix::io::Errno;

use super::handle::LinuxHandle;
use super::idmap::{self, IdRange};
use super::rootfs::{Mounts, at as step_of, clone_tree};
use super::{LinuxRuntime, blocking};
use crate::init::DEFAULT_USER;
use crate::pool::{Kind, Pool};
use crate::proto::{self, FileOp, FileReply, LaunchError, LaunchPlan, PlannedDrive, ToInit};
use crate::{
    Completion, DriveEntry, DriveMount, DriveUsage, Drives, EntryKind, FileError, FileErrorKind,
    FileReader, FileWriter, RuntimeError, sys,
};

/// The folder of a volume that sandboxes get.
const DATA: &str = "data";
/// Behind the name of a drive whose copy is about to take its place.
const NEXT: &str = ".next";
/// A file on its way into a drive, beside [`DATA`].
const ARRIVING: &str = "arriving";
/// How long a sandbox may take to attach or let go of a mount. It may make that wait for ever.
const PATIENCE: Duration = Duration::from_secs(20);
/// One piece of a file.
const PIECE: usize = 256 << 10;
/// Longest answer about a mount: it comes from inside the sandbox.
const MAX_REPLY: u64 = 64 << 10;

fn folder_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

/// A volume's own folder.
fn open_volume(pool: &Pool, kind: Kind, name: &str) -> io::Result<OwnedFd> {
    let path = pool.volume(kind, name);
    rustix::fs::open(&path, folder_flags(), Mode::empty())
        .map_err(|e| step_of(&path.to_string_lossy(), &e.into()))
}

fn open_data(pool: &Pool, kind: Kind, name: &str) -> io::Result<OwnedFd> {
    let volume = open_volume(pool, kind, name)?;
    Ok(rustix::fs::openat(&volume, DATA, folder_flags(), Mode::empty())?)
}

/// What a mount shows.
fn volume_of(mount: &DriveMount) -> (Kind, &str) {
    match &mount.view {
        Some(view) => (Kind::View, view),
        None => (Kind::Drive, &mount.drive),
    }
}

/// Makes a drive's volume. What a crash left of an earlier attempt goes first.
fn make(pool: &Pool, drive: &str, from: Option<&str>, max_bytes: u64) -> io::Result<()> {
    remove(pool, drive)?;
    let made = match from {
        Some(source) => copy(pool, source, (Kind::Drive, drive), max_bytes),
        None => empty(pool, drive, max_bytes),
    };
    // The record says that it is there as soon as this answers.
    made.and_then(|()| pool.flush()).inspect_err(|_| {
        let _ = remove(pool, drive);
    })
}

fn empty(pool: &Pool, drive: &str, max_bytes: u64) -> io::Result<()> {
    pool.make_volume(Kind::Drive, drive)?;
    let volume = open_volume(pool, Kind::Drive, drive)?;
    rustix::fs::mkdirat(&volume, DATA, Mode::from_raw_mode(0o755))?;
    own(&volume, DATA)?;
    pool.limit_volume(Kind::Drive, drive, max_bytes)?;
    Ok(())
}

/// A copy of a drive at this moment. One that is being fenced is in two places for an instant: looked for
/// again.
fn copy(pool: &Pool, drive: &str, to: (Kind, &str), max_bytes: u64) -> io::Result<()> {
    let held = held(pool, drive, max_bytes)?;
    let mut tries = 0;
    loop {
        match pool.copy_volume((Kind::Drive, drive), to, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound && tries < 3 => tries += 1,
            other => break other?,
        }
    }
    pool.set_limit(to.0, to.1, max_bytes, held)
}

/// What a drive holds at most, without a walk: what its limit does not leave it. A walk looks closer when that
/// leaves little.
fn held(pool: &Pool, drive: &str, max_bytes: u64) -> io::Result<u64> {
    let Some(level) = pool.level(Kind::Drive, drive)? else { return Ok(0) };
    let left = level.limit.saturating_sub(level.charged);
    if left >= max_bytes / 10 {
        return Ok(max_bytes.saturating_sub(left));
    }
    let fitted = pool.fit_limit(Kind::Drive, drive, max_bytes)?;
    Ok(fitted.map_or(0, |(written, _)| written))
}

fn remove(pool: &Pool, drive: &str) -> io::Result<()> {
    pool.remove_volume(Kind::Drive, &format!("{drive}{NEXT}"))?;
    pool.remove_volume(Kind::Drive, drive)
}

/// See [`Drives::fence_drive`]. Can be done again from any of its steps.
fn fence(pool: &Pool, drive: &str, max_bytes: u64) -> io::Result<()> {
    let next = format!("{drive}{NEXT}");
    pool.remove_volume(Kind::Drive, &next)?;
    copy(pool, drive, (Kind::Drive, &next), max_bytes)?;
    let (old, new) = (pool.volume(Kind::Drive, drive), pool.volume(Kind::Drive, &next));
    rustix::fs::renameat_with(CWD, &new, CWD, &old, RenameFlags::EXCHANGE)?;
    // What the next writer syncs must be found under the drive's name after a power cut.
    pool.flush()?;
    pool.remove_volume(Kind::Drive, &next)
}

/// Makes a session's private copies and says what the shim is to mount.
///
/// # Errors
/// `NotFound` when a drive has no data.
pub(super) fn prepare(pool: &Pool, mounts: &[DriveMount]) -> io::Result<()> {
    for mount in mounts {
        match &mount.view {
            Some(view) => {
                pool.remove_volume(Kind::View, view)?;
                copy(pool, &mount.drive, (Kind::View, view), mount.max_bytes)?;
            }
            // What was deleted since it was copied is given back here.
            None => drop(held(pool, &mount.drive, mount.max_bytes)?),
        }
    }
    Ok(())
}

/// Where the shim finds them.
pub(super) fn planned(pool: &Pool, mounts: &[DriveMount]) -> Vec<PlannedDrive> {
    let plan = |mount: &DriveMount| {
        let (kind, name) = volume_of(mount);
        let data = pool.volume(kind, name).join(DATA).to_string_lossy().into_owned();
        PlannedDrive { data, at: mount.at.clone() }
    };
    mounts.iter().map(plan).collect()
}

/// Names of a session's private copies begin so.
pub(super) fn is_view_of(name: &str, session: &str) -> bool {
    name.strip_prefix(session).is_some_and(|rest| rest.starts_with('.'))
}

/// Removes a session's private copies.
pub(super) fn remove_views(pool: &Pool, session: &str) -> io::Result<()> {
    for name in pool.names(Kind::View)?.iter().filter(|name| is_view_of(name, session)) {
        pool.remove_volume(Kind::View, name)?;
    }
    Ok(())
}

/// A detached mount of a drive's files, its ids mapped. Set-id programs work, as on the root; devices do not.
fn tree(data: &str, userns: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let tree = clone_tree(data)?;
    sys::idmap_mount(tree.as_fd(), userns).map_err(|e| step_of("map its ids", &e))?;
    sys::restrict_mount(tree.as_fd(), libc::MOUNT_ATTR_NODEV)?;
    sys::relax_mount(tree.as_fd(), libc::MOUNT_ATTR_NOSUID)?;
    Ok(tree)
}

/// The mounts of a launch, detached.
///
/// # Errors
/// With the place.
pub(super) fn trees(plan: &LaunchPlan, userns: BorrowedFd<'_>) -> io::Result<Mounts> {
    let one = |drive: &PlannedDrive| {
        let tree = tree(&drive.data, userns).map_err(|e| step_of(&drive.at, &e))?;
        Ok((drive.at.clone(), tree))
    };
    plan.drives.iter().map(one).collect()
}

/// Has a ready init put the mounts in place. The folder that commands start in stays there.
pub(super) fn place(init: &OwnedFd, drives: &Mounts, cwd: &str) -> Result<(), LaunchError> {
    for (at, tree) in drives {
        place_one(init, at, tree, cwd).map_err(|e| LaunchError {
            step: crate::MOUNT_STEP.to_owned(),
            message: e.to_string(),
        })?;
    }
    Ok(())
}

fn place_one(init: &OwnedFd, at: &str, tree: &OwnedFd, cwd: &str) -> io::Result<()> {
    let covers = cwd.strip_prefix(at).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let folders = if covers { vec![cwd.to_owned()] } else { Vec::new() };
    let op = FileOp::Mount { at: at.to_owned(), folders };
    let (ours, theirs) = proto::pair()?;
    proto::send(init, &ToInit::File(op), &[tree.as_fd(), theirs.as_fd()])?;
    drop(theirs);
    let late = || io::Error::new(io::ErrorKind::TimedOut, format!("{at}: no answer"));
    let timeout = rustix::time::Timespec { tv_sec: PATIENCE.as_secs().cast_signed(), tv_nsec: 0 };
    let mut polled = [PollFd::new(&ours, PollFlags::IN)];
    if rustix::event::poll(&mut polled, Some(&timeout))? == 0 {
        return Err(late());
    }
    let mut line = String::new();
    io::BufReader::new(std::fs::File::from(ours).take(MAX_REPLY)).read_line(&mut line)?;
    match serde_json::from_str(&line) {
        Ok(FileReply::Done) => Ok(()),
        Ok(FileReply::Failed(error)) => Err(io::Error::other(error.message)),
        Ok(FileReply::Opened { .. }) | Err(_) => Err(late()),
    }
}

/// See [`crate::Handle::attach_drive`].
pub(super) async fn attach(
    handle: &LinuxHandle,
    mount: &DriveMount,
    id_range: u32,
) -> Result<(), RuntimeError> {
    handle.needs(1, "take a drive")?;
    let (pool, wanted) = (handle.pool(), mount.clone());
    let tree = blocking(format!("mount drive {}", mount.drive), move || {
        prepare(&pool, std::slice::from_ref(&wanted))?;
        let userns = idmap::mount_namespace(IdRange::of(id_range)?)?;
        let (kind, name) = volume_of(&wanted);
        tree(&pool.volume(kind, name).join(DATA).to_string_lossy(), userns.as_fd())
    })
    .await?;
    let op = FileOp::Mount { at: mount.at.clone(), folders: Vec::new() };
    answered(handle, op, &tree, &mount.at).await
}

/// See [`crate::Handle::detach_drive`].
pub(super) async fn detach(
    handle: &LinuxHandle,
    mount: &DriveMount,
    force: bool,
) -> Result<(), RuntimeError> {
    handle.needs(1, "let go of a drive")?;
    let (pool, wanted) = (handle.pool(), mount.clone());
    let found = blocking(format!("flush drive {}", mount.drive), move || {
        let (kind, name) = volume_of(&wanted);
        let data = match open_data(&pool, kind, name) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        if kind == Kind::Drive {
            rustix::fs::syncfs(&data)?;
        }
        let stat = rustix::fs::fstat(&data)?;
        Ok(Some((stat.st_dev, stat.st_ino)))
    })
    .await?;
    let Some((dev, ino)) = found else { return Ok(()) };
    let op = FileOp::Unmount { at: mount.at.clone(), dev, ino, force };
    let (nothing, _) = super::handle::pipe()?;
    answered(handle, op, &nothing, &mount.at).await
}

/// Sends an operation into the sandbox and waits for its answer, a while.
async fn answered(
    handle: &LinuxHandle,
    op: FileOp,
    data: &OwnedFd,
    at: &str,
) -> Result<(), RuntimeError> {
    let replies = handle.file(op, data).await?;
    match tokio::time::timeout(PATIENCE, replies.done()).await {
        Ok(done) => done,
        Err(_) => {
            let message = format!("the sandbox did not answer about '{at}' in {PATIENCE:?}");
            Err(FileError { kind: FileErrorKind::Busy, message }.into())
        }
    }
}

/// A path of a drive as a client writes it, without its slashes at both ends: `.` for the root.
fn relative(path: &str) -> Result<String, FileError> {
    let mut parts = Vec::new();
    for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
        if part == ".." || part.contains('\0') {
            let message = format!("'{}' leads out of the drive", path.escape_debug());
            return Err(FileError { kind: FileErrorKind::Invalid, message });
        }
        parts.push(part);
    }
    Ok(if parts.is_empty() { ".".to_owned() } else { parts.join("/") })
}

fn beneath(folder: BorrowedFd<'_>, path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    rustix::fs::openat2(folder, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
}

fn refused(what: &str, path: &str, error: &io::Error) -> FileError {
    let (kind, text) = match error.raw_os_error() {
        Some(libc::ENOENT) => (FileErrorKind::NotFound, "there is no such file or folder"),
        Some(libc::ELOOP) => {
            (FileErrorKind::Invalid, "a link is on the way, and links of a drive are not followed")
        }
        Some(libc::ENOTDIR) => {
            (FileErrorKind::WrongType, "it is, or lies in, something else than a folder")
        }
        Some(libc::EISDIR) => (FileErrorKind::WrongType, "it is a folder"),
        Some(libc::EXDEV) => (FileErrorKind::Invalid, "it leads out of the drive"),
        Some(libc::EDQUOT | libc::ENOSPC) => (FileErrorKind::NoSpace, "the drive is full"),
        Some(libc::ENAMETOOLONG) => (FileErrorKind::Invalid, "the name is too long"),
        _ => {
            let message = format!("cannot {what} '{}': {error}", path.escape_debug());
            return FileError { kind: FileErrorKind::Other, message };
        }
    };
    FileError { kind, message: format!("cannot {what} '{}': {text}", path.escape_debug()) }
}

/// Gives an entry of a folder to the default user.
fn own(folder: &OwnedFd, name: &str) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(DEFAULT_USER), Gid::from_raw(DEFAULT_USER));
    Ok(rustix::fs::chownat(folder, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?)
}

fn list(data: &OwnedFd, path: &str, most: usize) -> Result<(Vec<DriveEntry>, bool), FileError> {
    let error = |e: io::Error| refused("list", path, &e);
    let folder = beneath(data.as_fd(), &relative(path)?, OFlags::RDONLY | OFlags::DIRECTORY)
        .map_err(|e| error(e.into()))?;
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(&folder).map_err(|e| error(e.into()))? {
        let entry = entry.map_err(|e| error(e.into()))?;
        let name = entry.file_name().to_owned();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push(name);
        }
    }
    names.sort();
    let more = names.len() > most;
    names.truncate(most);
    let mut out = Vec::with_capacity(names.len());
    for name in names {
        // Gone in between, when a sandbox writes.
        let Ok(stat) = rustix::fs::statat(&folder, &name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => EntryKind::File,
            FileType::Directory => EntryKind::Folder,
            FileType::Symlink => EntryKind::Link,
            _ => EntryKind::Other,
        };
        let target = (kind == EntryKind::Link)
            .then(|| rustix::fs::readlinkat(&folder, &name, Vec::new()).ok())
            .flatten()
            .map(|target| target.to_string_lossy().into_owned());
        out.push(DriveEntry {
            name: name.to_string_lossy().into_owned(),
            kind,
            size: if kind == EntryKind::File { stat.st_size.max(0).cast_unsigned() } else { 0 },
            mode: stat.st_mode & 0o7777,
            owner: (stat.st_uid, stat.st_gid),
            modified_at: stat.st_mtime.saturating_mul(1000),
            target,
        });
    }
    Ok((out, more))
}

fn open_file(data: &OwnedFd, path: &str) -> Result<(std::fs::File, u64), FileError> {
    // A pipe must not make this wait; devices do not open in the pool at all.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = beneath(data.as_fd(), &relative(path)?, flags)
        .map_err(|e| refused("read", path, &e.into()))?;
    let stat = rustix::fs::fstat(&file).map_err(|e| refused("read", path, &e.into()))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok((file.into(), stat.st_size.max(0).cast_unsigned())),
        FileType::Directory => {
            Err(refused("read", path, &io::Error::from_raw_os_error(libc::EISDIR)))
        }
        _ => {
            let message = format!("cannot read '{}': it is a special file", path.escape_debug());
            Err(FileError { kind: FileErrorKind::WrongType, message })
        }
    }
}

/// The folder that a file goes into, made when missing, and the file's name.
fn target(data: &OwnedFd, path: &str) -> Result<(OwnedFd, String), FileError> {
    let error = |e: io::Error| refused("write", path, &e);
    let path = relative(path)?;
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", &path));
    if name == "." {
        return Err(error(io::Error::from_raw_os_error(libc::EISDIR)));
    }
    let mut folder = data.try_clone().map_err(error)?;
    for part in folders.split('/').filter(|part| !part.is_empty()) {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        folder = match beneath(folder.as_fd(), part, flags) {
            Err(Errno::NOENT) => {
                match rustix::fs::mkdirat(&folder, part, Mode::from_raw_mode(0o755)) {
                    Ok(()) => own(&folder, part).map_err(error)?,
                    Err(Errno::EXIST) => {}
                    Err(e) => return Err(error(e.into())),
                }
                beneath(folder.as_fd(), part, flags)
            }
            other => other,
        }
        .map_err(|e| error(e.into()))?;
    }
    Ok((folder, name.to_owned()))
}

/// Only one file at a time gets its name: [`ARRIVING`] is one.
static NAMING: Mutex<()> = Mutex::new(());

/// Writes a file without a name, then gives it its own: what is there before is there until then.
fn write(
    volume: &OwnedFd,
    path: &str,
    size: u64,
    mode: u32,
    mut content: impl Read,
) -> Result<(), FileError> {
    let error = |e: io::Error| refused("write", path, &e);
    let data = rustix::fs::openat(volume, DATA, folder_flags(), Mode::empty())
        .map_err(|e| error(e.into()))?;
    let (folder, name) = target(&data, path)?;
    let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file = rustix::fs::openat(volume, ".", flags, Mode::from_raw_mode(0o600))
        .map_err(|e| error(e.into()))?;
    let mut file = std::fs::File::from(file);
    let (mut buffer, mut got) = (vec![0u8; PIECE], 0u64);
    loop {
        let piece = content.read(&mut buffer).map_err(error)?;
        if piece == 0 {
            break;
        }
        got += piece as u64;
        file.write_all(&buffer[..piece]).map_err(error)?;
    }
    if got != size {
        let message = format!(
            "'{}' arrived with {got} of {size} bytes: nothing was written",
            path.escape_debug()
        );
        return Err(FileError { kind: FileErrorKind::Invalid, message });
    }
    let finish = || -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(DEFAULT_USER), Gid::from_raw(DEFAULT_USER));
        rustix::fs::fchown(&file, Some(uid), Some(gid))?;
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & 0o777))?;
        // The bytes first: a name that is on disk must not stand for less.
        file.sync_all()?;
        {
            let _turn = NAMING.lock().unwrap_or_else(PoisonError::into_inner);
            // Left by a crash between the next two.
            let _ = rustix::fs::unlinkat(volume, ARRIVING, AtFlags::empty());
            let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
            rustix::fs::linkat(CWD, own, volume, ARRIVING, AtFlags::SYMLINK_FOLLOW)?;
            rustix::fs::renameat(volume, ARRIVING, &folder, &name).inspect_err(|_| {
                let _ = rustix::fs::unlinkat(volume, ARRIVING, AtFlags::empty());
            })?;
        }
        file.sync_all()?;
        rustix::fs::fsync(&folder)?;
        Ok(())
    };
    finish().map_err(error)
}

/// The result of work on a thread, as a completion.
fn completion(work: tokio::task::JoinHandle<Result<(), FileError>>) -> Completion {
    Completion::new(async move {
        match work.await {
            Ok(result) => result.map_err(RuntimeError::from),
            Err(e) => Err(RuntimeError::Io {
                what: "copy a file of a drive".to_owned(),
                source: io::Error::other(e),
            }),
        }
    })
}

impl LinuxRuntime {
    /// Does something with a drive's files on a thread.
    async fn on_drive<T: Send + 'static>(
        &self,
        drive: &str,
        work: impl FnOnce(OwnedFd) -> Result<T, FileError> + Send + 'static,
    ) -> Result<T, RuntimeError> {
        let (pool, name) = (self.pool.clone(), drive.to_owned());
        let done = blocking(format!("open drive {drive}"), move || {
            Ok(work(open_data(&pool, Kind::Drive, &name)?))
        });
        Ok(done.await??)
    }

    async fn on_pool<T: Send + 'static>(
        &self,
        what: String,
        work: impl FnOnce(&Pool) -> io::Result<T> + Send + 'static,
    ) -> Result<T, RuntimeError> {
        let pool = Arc::clone(&self.pool);
        blocking(what, move || work(&pool)).await
    }
}

#[async_trait]
impl Drives for LinuxRuntime {
    async fn make_drive(
        &self,
        drive: &str,
        from: Option<&str>,
        max_bytes: u64,
    ) -> Result<(), RuntimeError> {
        let (name, from) = (drive.to_owned(), from.map(str::to_owned));
        let work = move |pool: &Pool| make(pool, &name, from.as_deref(), max_bytes);
        self.on_pool(format!("make drive {drive}"), work).await
    }

    async fn remove_drive(&self, drive: &str) -> Result<(), RuntimeError> {
        let name = drive.to_owned();
        self.on_pool(format!("remove drive {drive}"), move |pool| remove(pool, &name)).await
    }

    async fn drives(&self) -> Result<Vec<String>, RuntimeError> {
        let mut names =
            self.on_pool("list drives".to_owned(), |pool| pool.names(Kind::Drive)).await?;
        for name in &mut names {
            if let Some(drive) = name.strip_suffix(NEXT) {
                *name = drive.to_owned();
            }
        }
        names.sort();
        names.dedup();
        Ok(names)
    }

    async fn drive_usage(&self, drive: &str) -> Result<DriveUsage, RuntimeError> {
        let name = drive.to_owned();
        let usage = self
            .on_pool(format!("measure drive {drive}"), move |pool| pool.usage(Kind::Drive, &name))
            .await?;
        Ok(DriveUsage { bytes: usage.bytes, unique_bytes: usage.unique_bytes })
    }

    async fn fence_drive(&self, drive: &str, max_bytes: u64) -> Result<(), RuntimeError> {
        let name = drive.to_owned();
        self.on_pool(format!("fence drive {drive}"), move |pool| fence(pool, &name, max_bytes))
            .await
    }

    async fn remove_view(&self, view: &str) -> Result<(), RuntimeError> {
        let name = view.to_owned();
        self.on_pool(format!("remove view {view}"), move |pool| {
            pool.remove_volume(Kind::View, &name)
        })
        .await
    }

    async fn list_drive(
        &self,
        drive: &str,
        path: &str,
        most: usize,
    ) -> Result<(Vec<DriveEntry>, bool), RuntimeError> {
        let path = path.to_owned();
        self.on_drive(drive, move |data| list(&data, &path, most)).await
    }

    async fn read_drive(&self, drive: &str, path: &str) -> Result<FileReader, RuntimeError> {
        let wanted = path.to_owned();
        let (mut file, size) = self.on_drive(drive, move |data| open_file(&data, &wanted)).await?;
        let (read, pipe) = super::handle::pipe()?;
        let path = path.to_owned();
        let work = tokio::task::spawn_blocking(move || {
            let copied = io::copy(&mut file, &mut std::fs::File::from(pipe));
            copied.map(drop).map_err(|e| refused("read", &path, &e))
        });
        Ok(FileReader { size, data: read, done: completion(work) })
    }

    async fn write_drive(
        &self,
        drive: &str,
        path: &str,
        size: u64,
        mode: u32,
    ) -> Result<FileWriter, RuntimeError> {
        let name = drive.to_owned();
        let open = move |pool: &Pool| open_volume(pool, Kind::Drive, &name);
        let volume = self.on_pool(format!("open drive {drive}"), open).await?;
        let (pipe, ours) = super::handle::pipe()?;
        let path = path.to_owned();
        let work = tokio::task::spawn_blocking(move || {
            write(&volume, &path, size, mode, std::fs::File::from(pipe))
        });
        Ok(FileWriter { data: ours, done: completion(work) })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn volume() -> (tempfile::TempDir, OwnedFd) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join(DATA)).unwrap();
        let volume = rustix::fs::open(dir.path(), folder_flags(), Mode::empty()).unwrap();
        (dir, volume)
    }

    fn data(dir: &Path) -> OwnedFd {
        rustix::fs::open(dir.join(DATA), folder_flags(), Mode::empty()).unwrap()
    }

    /// Needs root, as everything here: files are given to another user.
    #[test]
    fn files_go_in_whole_and_come_out_without_a_link_being_followed() {
        let (dir, volume) = volume();
        std::fs::write(dir.path().join("outside"), "secret").unwrap();
        let inside = dir.path().join(DATA);
        std::os::unix::fs::symlink(dir.path(), inside.join("up")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", inside.join("link")).unwrap();
        rustix::fs::mknodat(
            CWD,
            inside.join("pipe"),
            FileType::Fifo,
            Mode::from_raw_mode(0o666),
            0,
        )
        .unwrap();
        write(&volume, "/a/b/f", 5, 0o640, &b"hello"[..]).unwrap();
        let top = data(dir.path());
        let (mut file, size) = open_file(&top, "a/b/f").unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), size), ("hello", 5));
        // Too short leaves what was there.
        assert!(write(&volume, "a/b/f", 9, 0o640, &b"bye"[..]).is_err());
        assert_eq!(std::fs::read_to_string(inside.join("a/b/f")).unwrap(), "hello");
        for bad in ["up/outside", "link", "pipe", "a", "../outside", "a/../../outside", "", "/"] {
            let error = open_file(&top, bad).expect_err(bad);
            assert!(!error.message.contains("secret"), "{error:?}");
        }
        for bad in ["up/new", "../new", "", "a", "pipe/x"] {
            assert!(write(&volume, bad, 1, 0o600, &b"x"[..]).is_err(), "{bad}");
        }
        assert!(list(&top, "up", 10).is_err() && list(&top, "..", 10).is_err());
        // A link is replaced, never followed.
        write(&volume, "link", 1, 0o600, &b"x"[..]).unwrap();
        let (all, more) = list(&top, "/", 3).unwrap();
        let names: Vec<_> = all.iter().map(|e| (e.name.as_str(), e.kind)).collect();
        use EntryKind::{File, Folder, Other};
        assert_eq!(names, [("a", Folder), ("link", File), ("pipe", Other)]);
        assert!(more);
        assert_eq!(all[1].owner, (DEFAULT_USER, DEFAULT_USER));
        let left: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "{left:?}");
        assert_eq!(std::fs::read_to_string(dir.path().join("outside")).unwrap(), "secret");
    }

    #[test]
    fn names_of_views() {
        assert!(is_view_of("sbx_1.0", "sbx_1"));
        assert!(!is_view_of("sbx_1", "sbx_1") && !is_view_of("sbx_10.0", "sbx_1"));
    }
}
