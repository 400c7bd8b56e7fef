//! The ioctls of btrfs: subvolumes, snapshots, simple quotas. Numbers and layouts are those of the
//! kernel's `linux/btrfs.h`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;

const MAGIC: u64 = 0x94;
const WRITE: u64 = 1;
const READ: u64 = 2;

const fn number(direction: u64, index: u64, size: usize) -> libc::c_ulong {
    (direction << 30 | (size as u64) << 16 | MAGIC << 8 | index) as libc::c_ulong
}

#[repr(C)]
struct VolArgs {
    fd: i64,
    name: [u8; 4088],
}

#[repr(C)]
struct VolArgsV2 {
    fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}

#[repr(C)]
struct QuotaCtl {
    cmd: u64,
    status: u64,
}

#[repr(C)]
struct QgroupLimit {
    qgroupid: u64,
    flags: u64,
    max_rfer: u64,
    max_excl: u64,
    rsv_rfer: u64,
    rsv_excl: u64,
}

#[repr(C)]
struct InoLookup {
    treeid: u64,
    objectid: u64,
    name: [u8; 4080],
}

#[repr(C)]
struct FsInfo {
    max_id: u64,
    num_devices: u64,
    fsid: [u8; 16],
    rest: [u8; 992],
}

#[repr(C)]
struct ScrubArgs {
    device: u64,
    start: u64,
    end: u64,
    flags: u64,
    progress: [u64; 15],
    unused: [u64; 109],
}

#[repr(C)]
struct DevStats {
    device: u64,
    items: u64,
    flags: u64,
    values: [u64; 5],
    unused: [u64; 121],
}

const SUBVOL_CREATE: libc::c_ulong = number(WRITE, 14, size_of::<VolArgs>());
const SNAP_DESTROY: libc::c_ulong = number(WRITE, 15, size_of::<VolArgs>());
const SNAP_CREATE_V2: libc::c_ulong = number(WRITE, 23, size_of::<VolArgsV2>());
const QUOTA_CTL: libc::c_ulong = number(READ | WRITE, 40, size_of::<QuotaCtl>());
const QGROUP_LIMIT: libc::c_ulong = number(READ, 43, size_of::<QgroupLimit>());
const INO_LOOKUP: libc::c_ulong = number(READ | WRITE, 18, size_of::<InoLookup>());
const FS_INFO: libc::c_ulong = number(READ, 31, size_of::<FsInfo>());
const RESIZE: libc::c_ulong = number(WRITE, 3, size_of::<VolArgs>());
const SCRUB: libc::c_ulong = number(READ | WRITE, 27, size_of::<ScrubArgs>());
const SCRUB_CANCEL: libc::c_ulong = number(0, 28, 0);
const SUBVOL_GETFLAGS: libc::c_ulong = number(READ, 25, size_of::<u64>());
const SUBVOL_SETFLAGS: libc::c_ulong = number(WRITE, 26, size_of::<u64>());
const DEV_STATS: libc::c_ulong = number(READ | WRITE, 52, size_of::<DevStats>());
/// Inode of a subvolume's root folder.
const FIRST_FREE_OBJECT: u64 = 256;
const SNAPSHOT_READ_ONLY: u64 = 1 << 1;
const LIMIT_MAX_RFER: u64 = 1;
const ENABLE_SIMPLE_QUOTA: u64 = 4;

/// Copies a name into a fixed field, zero-terminated; refuses what is no plain name.
fn put_name(field: &mut [u8], name: &str) -> io::Result<()> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() > 255 || bytes.iter().any(|b| matches!(b, 0 | b'/')) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a subvolume name"));
    }
    field[..bytes.len()].copy_from_slice(bytes);
    Ok(())
}

fn ioctl<T>(fd: BorrowedFd<'_>, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    // SAFETY: each caller passes the struct whose size is part of the request number, so the
    // kernel reads and writes inside of it only.
    check(libc::c_long::from(unsafe {
        libc::ioctl(fd.as_raw_fd(), request as _, std::ptr::from_mut(argument))
    }))?;
    Ok(())
}

/// Makes an empty subvolume `name` in the folder.
///
/// # Errors
/// As the ioctl; `AlreadyExists` when the name is taken.
pub(crate) fn create_subvolume(parent: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let mut args = VolArgs { fd: 0, name: [0; 4088] };
    put_name(&mut args.name, name)?;
    ioctl(parent, SUBVOL_CREATE, &mut args)
}

/// Makes `name` in the folder a snapshot of the subvolume `source`. Commits a transaction, so it is
/// on disk when this returns.
///
/// # Errors
/// As the ioctl.
pub(crate) fn snapshot_subvolume(
    source: BorrowedFd<'_>,
    parent: BorrowedFd<'_>,
    name: &str,
    read_only: bool,
) -> io::Result<()> {
    let mut args = VolArgsV2 {
        fd: i64::from(source.as_raw_fd()),
        transid: 0,
        flags: if read_only { SNAPSHOT_READ_ONLY } else { 0 },
        unused: [0; 4],
        name: [0; 4040],
    };
    put_name(&mut args.name, name)?;
    ioctl(parent, SNAP_CREATE_V2, &mut args)
}

/// Deletes subvolume `name` of the folder; its space comes back in the background.
///
/// # Errors
/// As the ioctl; `NotFound` when there is none.
pub(crate) fn delete_subvolume(parent: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let mut args = VolArgs { fd: 0, name: [0; 4088] };
    put_name(&mut args.name, name)?;
    ioctl(parent, SNAP_DESTROY, &mut args)
}

/// Turns simple quotas on for the whole file system.
///
/// # Errors
/// As the ioctl; `EEXIST` when quotas are on already.
pub(crate) fn enable_simple_quota(root: BorrowedFd<'_>) -> io::Result<()> {
    ioctl(root, QUOTA_CTL, &mut QuotaCtl { cmd: ENABLE_SIMPLE_QUOTA, status: 0 })
}

/// Limits the bytes that the subvolume may allocate.
///
/// # Errors
/// As the ioctl.
pub(crate) fn limit_subvolume(subvolume: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    // Group 0 is the group of the subvolume that the descriptor belongs to.
    let mut args = QgroupLimit {
        qgroupid: 0,
        flags: LIMIT_MAX_RFER,
        max_rfer: bytes,
        max_excl: 0,
        rsv_rfer: 0,
        rsv_excl: 0,
    };
    ioctl(subvolume, QGROUP_LIMIT, &mut args)
}

/// The quota group of the subvolume that the descriptor belongs to, as the path below
/// `/sys/fs/btrfs`: `<file system>/qgroups/0_<subvolume>`.
///
/// # Errors
/// As the ioctls.
pub(crate) fn quota_group(subvolume: BorrowedFd<'_>) -> io::Result<String> {
    // Tree 0 asks for the tree of the descriptor itself.
    let mut lookup = InoLookup { treeid: 0, objectid: FIRST_FREE_OBJECT, name: [0; 4080] };
    ioctl(subvolume, INO_LOOKUP, &mut lookup)?;
    Ok(format!("{}/qgroups/0_{}", file_system(subvolume)?, lookup.treeid))
}

/// What a scrub has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Scrubbed {
    /// Bytes that were read and compared with their checksums.
    pub bytes: u64,
    /// Errors of reading and of checksums, in data, metadata and super blocks.
    pub errors: u64,
}

/// Grows the file system to the end of its device.
///
/// # Errors
/// As the ioctl.
pub(crate) fn resize_to_device(root: BorrowedFd<'_>) -> io::Result<()> {
    let mut args = VolArgs { fd: 0, name: [0; 4088] };
    put_name(&mut args.name, "1:max")?;
    ioctl(root, RESIZE, &mut args)
}

/// Reads all of a device and compares it with its checksums. Takes as long as that takes.
///
/// # Errors
/// As the ioctl; `Interrupted` after [`cancel_scrub`], `ENODEV` when no device has this number.
pub(crate) fn scrub(root: BorrowedFd<'_>, device: u64) -> io::Result<Scrubbed> {
    let mut args = ScrubArgs {
        device,
        start: 0,
        end: u64::MAX,
        // Repairs what a second copy allows.
        flags: 0,
        progress: [0; 15],
        unused: [0; 109],
    };
    match ioctl(root, SCRUB, &mut args) {
        Err(e) if e.raw_os_error() == Some(libc::ECANCELED) => {
            return Err(io::ErrorKind::Interrupted.into());
        }
        other => other?,
    }
    let [_, _, data, tree, read, csum, verify, _, _, superblocks, ..] = args.progress;
    Ok(Scrubbed { bytes: data + tree, errors: read + csum + verify + superblocks })
}

/// Ends a running scrub. None running is no error.
///
/// # Errors
/// As the ioctl.
pub(crate) fn cancel_scrub(root: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the request takes no argument.
    let done = check(libc::c_long::from(unsafe {
        libc::ioctl(root.as_raw_fd(), SCRUB_CANCEL as _, std::ptr::null_mut::<u8>())
    }));
    match done {
        Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => Ok(()),
        other => other.map(drop),
    }
}

/// Errors that the file system has met on a device so far: of writing, reading, flushing, and blocks
/// that were not what was written.
///
/// # Errors
/// As the ioctl.
pub(crate) fn device_errors(root: BorrowedFd<'_>, device: u64) -> io::Result<u64> {
    let mut stats = DevStats { device, items: 5, flags: 0, values: [0; 5], unused: [0; 121] };
    ioctl(root, DEV_STATS, &mut stats)?;
    Ok(stats.values.iter().sum())
}

/// Whether the subvolume is read-only.
///
/// # Errors
/// As the ioctl.
pub(crate) fn is_read_only(subvolume: BorrowedFd<'_>) -> io::Result<bool> {
    let mut flags = 0u64;
    ioctl(subvolume, SUBVOL_GETFLAGS, &mut flags)?;
    Ok(flags & SNAPSHOT_READ_ONLY != 0)
}

/// Makes the subvolume read-only.
///
/// # Errors
/// As the ioctl.
pub(crate) fn make_read_only(subvolume: BorrowedFd<'_>) -> io::Result<()> {
    let mut flags = SNAPSHOT_READ_ONLY;
    ioctl(subvolume, SUBVOL_SETFLAGS, &mut flags)
}

/// The limit of a subvolume's quota group. `None`: it has none.
///
/// # Errors
/// As the ioctls, and when the kernel does not show it.
pub(crate) fn limit(subvolume: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    let path = format!("/sys/fs/btrfs/{}/max_referenced", quota_group(subvolume)?);
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text.trim().parse().ok().filter(|limit| *limit > 0)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// The highest number of a device of the file system; the lowest is 1.
///
/// # Errors
/// As the ioctl.
pub(crate) fn last_device(root: BorrowedFd<'_>) -> io::Result<u64> {
    let mut info = FsInfo { max_id: 0, num_devices: 0, fsid: [0; 16], rest: [0; 992] };
    ioctl(root, FS_INFO, &mut info)?;
    Ok(info.max_id)
}

/// The file system that the descriptor belongs to, as its folder below `/sys/fs/btrfs`.
///
/// # Errors
/// As the ioctl.
pub(crate) fn file_system(root: BorrowedFd<'_>) -> io::Result<String> {
    let mut info = FsInfo { max_id: 0, num_devices: 0, fsid: [0; 16], rest: [0; 992] };
    ioctl(root, FS_INFO, &mut info)?;
    let mut path = String::with_capacity(36);
    for (index, byte) in info.fsid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            path.push('-');
        }
        path.push_str(&format!("{byte:02x}"));
    }
    Ok(path)
}
