//! bpf(2), as far as the gate's steering needs it: two kinds of maps, one kind of program, its link to
//! a network namespace, and a map's word in this process's memory.
//!
//! Invariant: what the kernel is handed are copies that it makes before the call returns; the one
//! mapping lives as long as its owner. Called by `linux::steer`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use super::check;

// linux/bpf.h
const MAP_CREATE: u32 = 0;
const MAP_UPDATE_ELEM: u32 = 2;
const PROG_LOAD: u32 = 5;
const LINK_CREATE: u32 = 28;
const MAP_ARRAY: u32 = 2;
const MAP_SOCKMAP: u32 = 15;
const MMAPABLE: u32 = 1 << 10;
const PROG_SK_LOOKUP: u32 = 30;
const ATTACH_SK_LOOKUP: u32 = 36;

/// One instruction, as in the kernel's `struct bpf_insn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Instruction {
    pub code: u8,
    /// Destination in the lower half, source in the upper.
    pub registers: u8,
    pub offset: i16,
    pub immediate: i32,
}

fn bpf<T>(command: u32, attributes: &T) -> io::Result<libc::c_long> {
    // SAFETY: private; each caller hands a `repr(C)` prefix of `union bpf_attr` without padding, whose
    // pointers are to live memory of the length that the same attributes name. The kernel reads only.
    check(unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>())
    })
}

fn descriptor(number: libc::c_long) -> OwnedFd {
    // SAFETY: a new descriptor (close-on-exec, as all of bpf's) that nobody else owns.
    unsafe { OwnedFd::from_raw_fd(number as i32) }
}

/// type, size of a key, size of a value, entries, flags
fn create(attributes: [u32; 5]) -> io::Result<OwnedFd> {
    Ok(descriptor(bpf(MAP_CREATE, &attributes)?))
}

/// A map that holds sockets by number.
///
/// # Errors
/// As bpf(2): EPERM without privilege, ENOSYS where there is no BPF.
pub(crate) fn socket_map(entries: u32) -> io::Result<OwnedFd> {
    create([MAP_SOCKMAP, 4, 4, entries, 0])
}

/// A map of one 32-bit word that can be mapped into memory.
///
/// # Errors
/// As bpf(2).
pub(crate) fn word_map() -> io::Result<OwnedFd> {
    create([MAP_ARRAY, 4, 4, 1, MMAPABLE])
}

/// Puts a socket into a map.
///
/// # Errors
/// As bpf(2).
pub(crate) fn put_socket(
    map: BorrowedFd<'_>,
    index: u32,
    socket: BorrowedFd<'_>,
) -> io::Result<()> {
    #[repr(C)]
    struct Attributes {
        map: u32,
        zero: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let value = socket.as_raw_fd().cast_unsigned();
    let attributes = Attributes {
        map: map.as_raw_fd().cast_unsigned(),
        zero: 0,
        key: &raw const index as u64,
        value: &raw const value as u64,
        flags: 0,
    };
    // Key and value are four bytes, as `socket_map` says, and live until the call returns.
    bpf(MAP_UPDATE_ELEM, &attributes).map(drop)
}

/// Loads a program that chooses sockets.
///
/// # Errors
/// As bpf(2).
pub(crate) fn load_sk_lookup(program: &[Instruction]) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attributes {
        kind: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log: u64,
        kernel_version: u32,
        flags: u32,
        name: [u8; 16],
        interface: u32,
        attach: u32,
    }
    let attributes = Attributes {
        kind: PROG_SK_LOOKUP,
        count: u32::try_from(program.len()).map_err(io::Error::other)?,
        instructions: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
        name: *b"bivouac_gate\0\0\0\0",
        interface: 0,
        attach: ATTACH_SK_LOOKUP,
    };
    Ok(descriptor(bpf(PROG_LOAD, &attributes)?))
}

/// Attaches the program to a network namespace, for as long as the link is open.
///
/// # Errors
/// As bpf(2).
pub(crate) fn link_sk_lookup(
    program: BorrowedFd<'_>,
    namespace: BorrowedFd<'_>,
) -> io::Result<OwnedFd> {
    let number = |fd: BorrowedFd<'_>| fd.as_raw_fd().cast_unsigned();
    let attributes = [number(program), number(namespace), ATTACH_SK_LOOKUP, 0];
    Ok(descriptor(bpf(LINK_CREATE, &attributes)?))
}

/// The word of a [`word_map`], mapped: changing it takes neither a system call nor privilege.
#[derive(Debug)]
pub(crate) struct Word(NonNull<AtomicU32>);

/// What a mapping takes.
const PAGE: usize = 4096;

impl Word {
    /// Maps it.
    ///
    /// # Errors
    /// As mmap(2).
    pub(crate) fn map(map: BorrowedFd<'_>) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping where the kernel likes it replaces nothing. The kernel refuses a
        // descriptor that is no map, and a length over the map's own.
        let place = unsafe {
            let flags = libc::MAP_SHARED;
            libc::mmap(std::ptr::null_mut(), PAGE, protection, flags, map.as_raw_fd(), 0)
        };
        if place == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let place = NonNull::new(place.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Self(place))
    }

    /// Stores the word; programs of the kernel see it at once.
    pub(crate) fn set(&self, value: u32) {
        // SAFETY: mapped readable and writable, page-aligned, until drop; shared with the kernel, hence
        // atomic.
        unsafe { self.0.as_ref() }.store(value, Ordering::SeqCst);
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        // SAFETY: the mapping that `map` made, unmapped once; no reference into it outlives a call.
        unsafe { libc::munmap(self.0.as_ptr().cast(), PAGE) };
    }
}

// SAFETY: nothing but an address of an atomic, valid in every thread.
unsafe impl Send for Word {}
// SAFETY: as above; every access is atomic.
unsafe impl Sync for Word {}

/// Whether there is a link of this number.
#[cfg(test)]
pub(crate) fn link_exists(id: u32) -> io::Result<bool> {
    const LINK_GET_FD_BY_ID: u32 = 30;
    match bpf(LINK_GET_FD_BY_ID, &[id, 0, 0]) {
        Ok(number) => {
            drop(descriptor(number));
            Ok(true)
        }
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(e) => Err(e),
    }
}
