//! Loop devices: attach a file, ask which file a device backs.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;

const CTL_GET_FREE: libc::c_ulong = 0x4C82;
const CONFIGURE: libc::c_ulong = 0x4C0A;
const CLR_FD: libc::c_ulong = 0x4C01;
const GET_STATUS64: libc::c_ulong = 0x4C05;
const SET_CAPACITY: libc::c_ulong = 0x4C07;
const AUTOCLEAR: u32 = 4;
const DIRECT_IO: u32 = 16;

#[repr(C)]
#[derive(Clone, Copy)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

/// The number of a loop device that is free now.
///
/// # Errors
/// As the ioctl.
pub(crate) fn free_number(control: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: the request takes no argument.
    let number =
        check(libc::c_long::from(unsafe { libc::ioctl(control.as_raw_fd(), CTL_GET_FREE as _) }))?;
    Ok(number as u32)
}

/// Attaches `file` to the device. The device lets go of it by itself at its last close or unmount.
///
/// # Errors
/// `ResourceBusy` when another process was faster; `InvalidInput` when direct I/O is not possible.
pub(crate) fn attach(
    device: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    name: &str,
    direct_io: bool,
) -> io::Result<()> {
    // SAFETY: all zeroes is a valid Config.
    let mut config: Config = unsafe { std::mem::zeroed() };
    config.fd = file.as_raw_fd() as u32;
    config.info.flags = AUTOCLEAR | if direct_io { DIRECT_IO } else { 0 };
    let shown = name.as_bytes();
    let len = shown.len().min(63);
    config.info.file_name[..len].copy_from_slice(&shown[..len]);
    // SAFETY: LOOP_CONFIGURE reads one Config.
    check(libc::c_long::from(unsafe {
        libc::ioctl(device.as_raw_fd(), CONFIGURE as _, &raw const config)
    }))?;
    Ok(())
}

/// Lets go of the file, at the latest when nobody uses the device any more.
///
/// # Errors
/// As the ioctl.
pub(crate) fn detach(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the request takes no argument.
    check(libc::c_long::from(unsafe { libc::ioctl(device.as_raw_fd(), CLR_FD as _) }))?;
    Ok(())
}

/// Makes the device as big as its file has become.
///
/// # Errors
/// As the ioctl.
pub(crate) fn follow_size(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the request takes no argument.
    check(libc::c_long::from(unsafe { libc::ioctl(device.as_raw_fd(), SET_CAPACITY as _) }))?;
    Ok(())
}

/// Device and inode of the file behind the loop device.
///
/// # Errors
/// `ENXIO` when nothing is attached.
pub(crate) fn backing(device: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    // SAFETY: all zeroes is a valid Info, and the request stores one.
    let info = unsafe {
        let mut info: Info = std::mem::zeroed();
        let got = libc::ioctl(device.as_raw_fd(), GET_STATUS64 as _, &raw mut info);
        check(libc::c_long::from(got))?;
        info
    };
    Ok((info.device, info.inode))
}
