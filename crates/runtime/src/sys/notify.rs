//! Seccomp user notification: the calls that a filter hands to somebody else, and the memory of who
//! made them. Numbers and layouts are those of the kernel's `linux/seccomp.h`.
//!
//! A call is received into a page that is shared with the process that supervises the receiver
//! ([`Slot`]): so it can be answered by somebody when the receiver dies or hangs with it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use super::{Instruction, check};

const MAGIC: u64 = b'!' as u64;
const fn number(direction: u64, index: u64, size: usize) -> libc::c_ulong {
    (direction << 30 | (size as u64) << 16 | MAGIC << 8 | index) as libc::c_ulong
}
const RECV: libc::c_ulong = number(3, 0, size_of::<libc::seccomp_notif>());
const SEND: libc::c_ulong = number(3, 1, size_of::<libc::seccomp_notif_resp>());
const ID_VALID: libc::c_ulong = number(1, 2, size_of::<u64>());
const SET_FLAGS: libc::c_ulong = number(1, 4, size_of::<u64>());
/// The answer wakes who asked on the CPU of who answers: half the time of a call.
const SYNC_WAKE_UP: libc::c_ulong = 1;

/// Third argument of a `statfs` or `fstatfs` that is meant for the kernel. It takes only two.
pub(crate) const FOR_THE_KERNEL: u64 = 0x6269_766f_7561_6321;

/// Installs a seccomp program that hands calls over, and answers the descriptor to receive them by.
///
/// Signals interrupt who waits for an answer, and freezing does: a wait that only a kill ends would keep a
/// control group from standing still whose helper was frozen before it could answer.
///
/// # Errors
/// As seccomp(2); EBUSY when this process has such a program already.
pub(crate) fn install(program: &[Instruction]) -> io::Result<OwnedFd> {
    let len = u16::try_from(program.len()).map_err(|_| io::Error::other("program too long"))?;
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    let fprog = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: `fprog` and the program that it points to outlive the call; the kernel copies them.
    let fd = check(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const fprog)
    })?;
    // SAFETY: a new descriptor that nobody else owns.
    let listener = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // SAFETY: takes a number, no pointer. Kernels before 6.6 refuse: slower, not wrong.
    let _ = unsafe { libc::ioctl(listener.as_raw_fd(), SET_FLAGS as _, SYNC_WAKE_UP) };
    Ok(listener)
}

/// A call that waits for an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    /// Names it.
    pub id: u64,
    /// Thread that made it, in the receiver's namespace.
    pub pid: u32,
    /// Its number.
    pub call: libc::c_long,
    /// Its first two arguments.
    pub args: [u64; 2],
}

/// Memory for one call, shared with the processes that are forked from here on.
#[derive(Debug)]
pub(crate) struct Slot(NonNull<libc::seccomp_notif>);

impl Slot {
    /// An empty one.
    ///
    /// # Errors
    /// As mmap(2).
    pub(crate) fn new() -> io::Result<Self> {
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        let length = size_of::<libc::seccomp_notif>();
        // SAFETY: a new mapping at an address of the kernel's choice touches no other.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(at.cast()).map(Self).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
    }

    /// Waits for a call. Its id is seen by all who share the slot before this returns.
    ///
    /// # Errors
    /// As the ioctl; `NotFound` when who made it is gone.
    pub(crate) fn receive(&mut self, listener: BorrowedFd<'_>) -> io::Result<Call> {
        self.clear();
        // SAFETY: the slot is a mapping of that struct's size and lives as long as `self`; the kernel
        // writes nothing beyond it.
        check(libc::c_long::from(unsafe {
            libc::ioctl(listener.as_raw_fd(), RECV as _, self.0.as_ptr())
        }))?;
        // SAFETY: as above; any bits are a valid struct of integers. The others that share the slot
        // only read `id`, and write after this process is dead.
        let notice = unsafe { self.0.as_ptr().read_volatile() };
        let [first, second, ..] = notice.data.args;
        let call = libc::c_long::from(notice.data.nr);
        Ok(Call { id: notice.id, pid: notice.pid, call, args: [first, second] })
    }

    /// Id of the call that was received and not cleared; 0 for none.
    pub(crate) fn pending(&self) -> u64 {
        // SAFETY: within the mapping and aligned. Another process may write it: volatile, and any value
        // is valid.
        unsafe { (&raw const (*self.0.as_ptr()).id).read_volatile() }
    }

    /// Says that the call has been answered.
    pub(crate) fn clear(&mut self) {
        // SAFETY: within the mapping; all zeroes is a valid struct of integers.
        unsafe { self.0.as_ptr().write_volatile(std::mem::zeroed()) };
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `new` and nothing refers to it any more. Other processes
        // have mappings of their own.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<libc::seccomp_notif>()) };
    }
}

/// Whether who made the call still waits: what was read of its process was its own.
pub(crate) fn waits(listener: BorrowedFd<'_>, id: u64) -> bool {
    // SAFETY: the ioctl reads one u64, which outlives the call.
    let valid = unsafe { libc::ioctl(listener.as_raw_fd(), ID_VALID as _, &raw const id) };
    valid == 0
}

/// Answers a call with success: the kernel does not do it.
///
/// # Errors
/// As the ioctl; `NotFound` when it was answered already or who made it is gone.
pub(crate) fn succeed(listener: BorrowedFd<'_>, id: u64) -> io::Result<()> {
    send(listener, id, 0)
}

/// Has the kernel do a call as if there were no filter.
///
/// # Errors
/// As [`succeed`].
pub(crate) fn let_through(listener: BorrowedFd<'_>, id: u64) -> io::Result<()> {
    send(listener, id, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32)
}

fn send(listener: BorrowedFd<'_>, id: u64, flags: u32) -> io::Result<()> {
    let mut answer = libc::seccomp_notif_resp { id, val: 0, error: 0, flags };
    // SAFETY: the struct whose size is part of the number; it outlives the call.
    check(libc::c_long::from(unsafe {
        libc::ioctl(listener.as_raw_fd(), SEND as _, &raw mut answer)
    }))?;
    Ok(())
}

/// Copies memory of another process; answers how many bytes could be read.
///
/// # Errors
/// As process_vm_readv(2).
pub(crate) fn read_memory(pid: u32, at: u64, into: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: the local buffer is borrowed for the call. The remote address is of another process: the
    // kernel checks it there, and this process's memory is not touched through it.
    let read = check(unsafe {
        libc::process_vm_readv(pid as i32, &raw const local, 1, &raw const remote, 1, 0)
            as libc::c_long
    })?;
    Ok(read as usize)
}

/// Writes memory of another process, where that process may write itself.
///
/// # Errors
/// As process_vm_writev(2); `WriteZero` when not all could be written.
pub(crate) fn write_memory(pid: u32, at: u64, bytes: &[u8]) -> io::Result<()> {
    if pid == 0 || pid == std::process::id() {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: bytes.len() };
    // SAFETY: the local buffer is only read. The remote address is of another process (checked: not of
    // this one), so no memory of this one is written.
    let written = check(unsafe {
        libc::process_vm_writev(pid as i32, &raw const local, 1, &raw const remote, 1, 0)
            as libc::c_long
    })?;
    if written as usize == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// What `fstatfs` answers, in the kernel's own layout.
#[derive(Clone, Copy)]
pub(crate) struct FileSystem(libc::statfs);

impl std::fmt::Debug for FileSystem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileSystem").field("kind", &self.0.f_type).finish_non_exhaustive()
    }
}

impl FileSystem {
    /// The kernel's own answer, past a filter that hands such calls over.
    ///
    /// # Errors
    /// As fstatfs(2).
    pub(crate) fn of(file: BorrowedFd<'_>) -> io::Result<Self> {
        // SAFETY: all zeroes is a valid struct of integers.
        let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is that call's struct and outlives the call; the third argument is not looked
        // at by the kernel.
        check(unsafe {
            libc::syscall(libc::SYS_fstatfs, file.as_raw_fd(), &raw mut stat, FOR_THE_KERNEL)
        })?;
        Ok(Self(stat))
    }

    /// Type and id: the same file system has the same.
    pub(crate) fn identity(&self) -> (i64, [u8; 8]) {
        // SAFETY: both are eight bytes without padding (two ints), and any bits are a valid array.
        let id = unsafe { std::mem::transmute::<libc::fsid_t, [u8; 8]>(self.0.f_fsid) };
        #[allow(clippy::unnecessary_cast, reason = "not so with another C library")]
        (self.0.f_type as i64, id)
    }

    /// The same with other numbers, in bytes: size, what is free, what may be used.
    pub(crate) fn with(mut self, size: u64, free: u64, available: u64) -> Self {
        let block = u64::try_from(self.0.f_bsize).unwrap_or(0).max(1);
        self.0.f_frsize = self.0.f_bsize;
        self.0.f_blocks = size / block;
        self.0.f_bfree = free / block;
        self.0.f_bavail = available / block;
        self
    }

    /// As the program that asks expects it.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: a struct of integers without padding on these architectures (eleven longs and two
        // ints), borrowed for as long as the slice.
        unsafe { std::slice::from_raw_parts((&raw const self.0).cast(), size_of::<libc::statfs>()) }
    }
}

/// Looks at files as another user would, from now on; keeps what root may do besides.
pub(crate) fn look_as(user: u32, group: u32) {
    // SAFETY: take numbers, touch no memory. They cannot tell of failure; who has no right to change
    // them stays what it is.
    unsafe {
        libc::syscall(libc::SYS_setfsgid, group);
        libc::syscall(libc::SYS_setfsuid, user);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_the_kernel_s() {
        assert_eq!(RECV, 0xc050_2100);
        assert_eq!(SEND, 0xc018_2101);
        assert_eq!(ID_VALID, 0x4008_2102);
        assert_eq!(size_of::<libc::statfs>(), 120);
    }

    #[test]
    fn the_kernel_s_own_numbers() {
        let root = std::fs::File::open("/").unwrap();
        let own = FileSystem::of(std::os::fd::AsFd::as_fd(&root)).unwrap();
        let other = rustix::fs::fstatfs(&root).unwrap();
        assert_eq!(own.identity().0, other.f_type as i64);
        assert_eq!(own.0.f_blocks, other.f_blocks);
        let changed = own.with(8 << 20, 4 << 20, 2 << 20);
        let block = changed.0.f_bsize as u64;
        assert_eq!(changed.0.f_blocks * block, 8 << 20);
        assert_eq!(changed.0.f_bavail * block, 2 << 20);
        assert_eq!(changed.identity(), own.identity());
    }

    #[test]
    fn memory_of_others() {
        let mut buffer = [0u8; 8];
        let text = *b"hellohel";
        let at = text.as_ptr() as u64;
        // Reading one's own is harmless.
        assert_eq!(read_memory(std::process::id(), at, &mut buffer).unwrap(), 8);
        assert_eq!(buffer, text);
        assert!(read_memory(std::process::id(), 8, &mut buffer).is_err());
        assert!(write_memory(std::process::id(), at, b"x").is_err());
        assert!(write_memory(0, at, b"x").is_err());
    }

    #[test]
    fn a_slot_is_empty_until_something_is_received() {
        let mut slot = Slot::new().unwrap();
        assert_eq!(slot.pending(), 0);
        slot.clear();
        assert_eq!(slot.pending(), 0);
    }
}
