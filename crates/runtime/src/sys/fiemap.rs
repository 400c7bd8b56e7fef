//! Which bytes of a file it shares with others: the FIEMAP ioctl. Layouts are those of the kernel's
//! `linux/fiemap.h`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;

/// `_IOWR('f', 11, struct fiemap)`; the struct without its extents is 32 bytes long.
const FIEMAP: libc::c_ulong = 0xC020_660B;
const EXTENT_LAST: u32 = 0x1;
const EXTENT_SHARED: u32 = 0x2000;
/// Extents of one call.
const BATCH: usize = 128;

#[repr(C)]
#[derive(Clone, Copy)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

#[repr(C)]
struct Map {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    extent_count: u32,
    reserved: u32,
    extents: [Extent; BATCH],
}

/// Bytes of the file that lie where another file's bytes lie, too. `None`: this file system cannot tell.
///
/// # Errors
/// As the ioctl.
pub(crate) fn shared_bytes(file: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    // SAFETY: all zeroes is a valid Map.
    let mut map: Box<Map> = Box::new(unsafe { std::mem::zeroed() });
    let mut shared = 0;
    loop {
        map.length = u64::MAX - map.start;
        map.extent_count = BATCH as u32;
        // SAFETY: the kernel reads the header and stores at most `extent_count` extents behind it, which
        // is how many the struct has.
        let done = check(libc::c_long::from(unsafe {
            libc::ioctl(file.as_raw_fd(), FIEMAP as _, std::ptr::from_mut(map.as_mut()))
        }));
        match done {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOTTY)) => {
                return Ok(None);
            }
            other => other?,
        };
        let found = &map.extents[..(map.mapped as usize).min(BATCH)];
        let Some(last) = found.last().copied() else { return Ok(Some(shared)) };
        shared += found
            .iter()
            .filter(|extent| extent.flags & EXTENT_SHARED != 0)
            .map(|extent| extent.length)
            .sum::<u64>();
        if last.flags & EXTENT_LAST != 0 || found.len() < BATCH {
            return Ok(Some(shared));
        }
        map.start = last.logical.saturating_add(last.length);
    }
}
