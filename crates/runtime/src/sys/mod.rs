//! Every system call that no safe wrapper of `rustix` covers, and all `unsafe` of the workspace.
//!
//! Invariant: each function checks what it is given, so that no caller can break memory safety
//! through it; each block says why it is sound. Called by the modules of this crate only.
#![allow(unsafe_code)]

pub(crate) mod bpf;
pub(crate) mod btrfs;
pub(crate) mod fiemap;
pub(crate) mod loopdev;
pub(crate) mod net;
pub(crate) mod notify;

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use tokio::io::unix::AsyncFd;

/// From linux/sched.h; libc's own constant is too narrow for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Turns the -1 convention into a `Result`.
fn check(value: libc::c_long) -> io::Result<libc::c_long> {
    if value < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// Which side of a fork the caller is on.
#[derive(Debug)]
pub(crate) enum Fork {
    /// The new process.
    Child,
    /// The old one; the pid of the new.
    Parent(i32),
}

/// Threads of this process.
fn thread_count() -> io::Result<usize> {
    // The link count of the task folder is two more than the number of threads.
    let stat = rustix::fs::stat("/proc/self/task")?;
    Ok((stat.st_nlink as usize).saturating_sub(2))
}

/// Copies the process. For PID 1 of a sandbox, which never starts a thread: nothing checks that,
/// since its /proc is the guest's.
///
/// # Errors
/// As fork(2).
pub(crate) fn fork_single_threaded() -> io::Result<Fork> {
    // SAFETY: called by init alone, which never starts a thread, so the child is a full copy whose
    // allocator and standard library locks are free.
    let pid = check(libc::c_long::from(unsafe { libc::fork() }))?;
    Ok(if pid == 0 { Fork::Child } else { Fork::Parent(pid as i32) })
}

/// The new process of [`clone_into`].
#[derive(Debug)]
pub(crate) enum Cloned {
    /// The new process.
    Child,
    /// The old one.
    Parent {
        /// Pid of the new process, in the caller's namespace.
        pid: i32,
        /// A descriptor for it.
        pidfd: OwnedFd,
    },
}

/// clone3 without shared memory: a fork into new namespaces and a cgroup v2 folder.
///
/// # Errors
/// As clone3(2); also when the process has more than one thread, since the child could then find
/// locks that nobody will ever release.
pub(crate) fn clone_into(namespaces: u64, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Cloned> {
    if thread_count()? != 1 {
        return Err(io::Error::other("clone from a process with several threads"));
    }
    clone_single_threaded(namespaces, cgroup)
}

/// As [`clone_into`], for PID 1 of a sandbox: see [`fork_single_threaded`].
///
/// # Errors
/// As clone3(2).
pub(crate) fn clone_single_threaded(
    namespaces: u64,
    cgroup: Option<BorrowedFd<'_>>,
) -> io::Result<Cloned> {
    let mut pidfd: RawFd = -1;
    // SAFETY: all zeroes is a valid clone_args: no stack, no TLS, no pointers.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = namespaces | libc::CLONE_PIDFD as u64;
    args.pidfd = &raw mut pidfd as u64;
    // A sibling takes over what its sender has: the kernel wants none here.
    let sibling = namespaces & libc::CLONE_PARENT as u64 != 0;
    args.exit_signal = if sibling { 0 } else { libc::SIGCHLD as u64 };
    if let Some(fd) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = fd.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM and with no stack given, the child continues on a copy of this
    // stack exactly like after fork; `args` and `pidfd` outlive the call. One thread: the callers'.
    let pid = check(unsafe {
        libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>())
    })?;
    if pid == 0 {
        return Ok(Cloned::Child);
    }
    // SAFETY: the kernel has just stored a new descriptor there, which nobody else owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Cloned::Parent { pid: pid as i32, pidfd })
}

/// A process that does nothing, in namespaces of its own. It shares this process's memory, so that
/// making it copies nothing.
pub(crate) struct Parked {
    pub pid: i32,
    pidfd: OwnedFd,
    /// Under the parked process's feet.
    _stack: Vec<u8>,
}

impl Parked {
    /// Starts one in these namespaces.
    ///
    /// # Errors
    /// As clone(2).
    pub(crate) fn start(namespaces: i32) -> io::Result<Self> {
        extern "C" fn park(_: *mut libc::c_void) -> i32 {
            // It must not outlive a maker that is killed: it would keep that one's memory.
            // SAFETY: takes no pointers.
            unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            loop {
                // SAFETY: takes no pointers. It does not come back: the process has no signal
                // handler, and is ended by SIGKILL.
                unsafe { libc::syscall(libc::SYS_pause) };
            }
        }
        let mut stack = vec![0u8; 16 << 10];
        let mut pidfd: RawFd = -1;
        let flags = namespaces | libc::CLONE_VM | libc::CLONE_PIDFD | libc::SIGCHLD;
        // SAFETY: the stack grows down from its end, aligned below; it lives in `Parked`, whose drop
        // waits for the process's end. The process shares this memory and touches nothing of it but
        // that stack. The kernel stores the new descriptor in `pidfd`, which outlives the call.
        let pid = check(libc::c_long::from(unsafe {
            let top = stack.as_mut_ptr().add(stack.len()) as usize & !15;
            libc::clone(park, top as *mut _, flags, std::ptr::null_mut(), &raw mut pidfd)
        }))?;
        // SAFETY: the kernel has just stored a new descriptor there, which nobody else owns.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        Ok(Self { pid: pid as i32, pidfd, _stack: stack })
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
        let id = rustix::process::WaitId::PidFd(std::os::fd::AsFd::as_fd(&self.pidfd));
        let _ = rustix::process::waitid(id, rustix::process::WaitIdOptions::EXITED);
    }
}

/// Moves this process into new namespaces.
///
/// # Errors
/// As unshare(2).
pub(crate) fn unshare(namespaces: rustix::thread::UnshareFlags) -> io::Result<()> {
    // SAFETY: unsafe because of flags that unshare file descriptors or memory, which owners in this
    // process rely on; namespaces are not among them.
    Ok(unsafe { rustix::thread::unshare_unsafe(namespaces) }?)
}

/// Ends the process at once: no destructors, no exit handlers. For forked children.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: _exit takes no pointers and does not return.
    unsafe { libc::_exit(code) }
}

/// Has the kernel end this process after so many seconds: SIGALRM, which nothing here catches.
pub(crate) fn end_after(seconds: u32) {
    // SAFETY: takes no pointers.
    unsafe { libc::alarm(seconds) };
}

/// Replaces the process image. Returns only on failure.
pub(crate) fn exec(path: &CStr, argv: &[CString], env: &[CString]) -> io::Error {
    let pointers = |list: &[CString]| -> Vec<*const libc::c_char> {
        list.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: both arrays end with a null pointer and their strings live until the call returns.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), env.as_ptr()) };
    io::Error::last_os_error()
}

/// Closes every descriptor from `first` on.
///
/// # Errors
/// As close_range(2).
pub(crate) fn close_from(first: u32) -> io::Result<()> {
    // SAFETY: only used in processes that are about to exec, or right after a fork, where no
    // owner of a higher descriptor runs again.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0u32) })?;
    Ok(())
}

/// Marks all descriptors from `first` on as close-on-exec: nothing that is started later inherits what
/// this process was started with.
///
/// # Errors
/// As close_range(2).
pub(crate) fn close_on_exec_from(first: u32) -> io::Result<()> {
    const CLOEXEC: libc::c_uint = 1 << 2;
    // SAFETY: no descriptor is closed here, and close-on-exec takes none from an owner in this process.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, CLOEXEC) })?;
    Ok(())
}

/// Puts `fd` at the number `target`, without close-on-exec.
///
/// # Errors
/// As dup2(2).
pub(crate) fn dup_to(fd: BorrowedFd<'_>, target: RawFd) -> io::Result<()> {
    if fd.as_raw_fd() == target {
        // dup2 would do nothing and leave close-on-exec set.
        // SAFETY: fcntl with these arguments touches no memory.
        check(libc::c_long::from(unsafe { libc::fcntl(target, libc::F_SETFD, 0) }))?;
        return Ok(());
    }
    // SAFETY: used by forked children for descriptors 0 to 2, which no Rust object owns there.
    check(libc::c_long::from(unsafe { libc::dup2(fd.as_raw_fd(), target) }))?;
    Ok(())
}

/// Takes over a descriptor that the parent of an exec left at a known number.
///
/// # Errors
/// When the number is not open.
pub(crate) fn take_fd(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl touches no memory; F_GETFD fails on a number that is not open.
    check(libc::c_long::from(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) }))?;
    // SAFETY: open (checked); called once for each number at the start of a role, before any
    // other owner can exist.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Sends a signal by number: `pid` > 0 to a process, < 0 to a group.
///
/// # Errors
/// As kill(2).
pub(crate) fn kill(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: touches no memory.
    check(libc::c_long::from(unsafe { libc::kill(pid, signal) }))?;
    Ok(())
}

/// As [`reset_signals`], for a role of ours: a peer that closes its end of a pipe or socket is an error
/// to be handled, never a signal that ends the process.
pub(crate) fn reset_signals_of_role() {
    reset_signals();
    // SAFETY: SIG_IGN installs no code.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// All signals to their defaults and none blocked, as a program expects to be started.
pub(crate) fn reset_signals() {
    for signal in 1..=64 {
        // SAFETY: SIG_DFL installs no code; failures (KILL, STOP, reserved ones) do not matter.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: `set` is initialised by sigemptyset before use.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
    }
}

/// Blocks the signals and returns a descriptor that tells when one is pending.
///
/// # Errors
/// As signalfd(2).
pub(crate) fn signal_fd(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: `set` is initialised by sigemptyset before use and outlives the calls.
    let fd = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    check(libc::c_long::from(fd))?;
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Maps the ids of a detached mount by a user namespace.
///
/// # Errors
/// As mount_setattr(2).
pub(crate) fn idmap_mount(mount: BorrowedFd<'_>, userns: BorrowedFd<'_>) -> io::Result<()> {
    set_mount(mount, libc::MOUNT_ATTR_IDMAP, 0, userns.as_raw_fd() as u64)
}

/// Sets attributes (`MOUNT_ATTR_*`) of a mount.
///
/// # Errors
/// As mount_setattr(2).
pub(crate) fn restrict_mount(mount: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    set_mount(mount, attributes, 0, 0)
}

/// No devices, no set-id programs and no times of reading on a mount.
///
/// # Errors
/// As mount_setattr(2).
pub(crate) fn careful_mount(mount: BorrowedFd<'_>) -> io::Result<()> {
    let set = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOATIME;
    // Times of reading are a choice of several, which has to be taken away first.
    set_mount(mount, set, libc::MOUNT_ATTR__ATIME, 0)
}

/// Takes attributes (`MOUNT_ATTR_*`) of a mount away.
///
/// # Errors
/// As mount_setattr(2).
pub(crate) fn relax_mount(mount: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    set_mount(mount, 0, attributes, 0)
}

fn set_mount(
    mount: BorrowedFd<'_>,
    attr_set: u64,
    attr_clr: u64,
    userns_fd: u64,
) -> io::Result<()> {
    let attr = libc::mount_attr { attr_set, attr_clr, propagation: 0, userns_fd };
    // SAFETY: the path is a valid empty C string, `attr` outlives the call, the size is its own.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    })?;
    Ok(())
}

/// One instruction of a seccomp program.
pub(crate) type Instruction = libc::sock_filter;

/// Whether the kernel's log tells of refused calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusals {
    /// It does not: they are expected.
    Silent,
    /// It does, when the host's list of logged actions has errors.
    Logged,
}

/// Installs a seccomp program on this thread. Needs `no_new_privs` or CAP_SYS_ADMIN in its user
/// namespace: for a sandbox the former would break `sudo` inside.
///
/// # Errors
/// As seccomp(2).
pub(crate) fn install_seccomp(program: &[Instruction], refusals: Refusals) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::Error::other("program too long"))?;
    let flags = match refusals {
        Refusals::Silent => 0,
        Refusals::Logged => libc::SECCOMP_FILTER_FLAG_LOG,
    };
    let fprog = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    // SAFETY: `fprog` and the program that it points to outlive the call; the kernel copies them.
    check(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const fprog)
    })?;
    Ok(())
}

/// Tries a system call with arguments that are all zero; answers its error. For tests of filters.
#[cfg(test)]
pub(crate) fn probe(call: libc::c_long) -> Option<i32> {
    // SAFETY: called in a forked child that tests a filter and then ends. No pointer is given, so the
    // kernel writes nowhere; what the call does to the process is the child's own loss.
    let answer = unsafe { libc::syscall(call, 0, 0, 0, 0, 0, 0) };
    check(answer).err().and_then(|e| e.raw_os_error())
}

/// Whether this process can have memory for code. For tests of filters.
#[cfg(test)]
pub(crate) fn probe_executable_memory() -> bool {
    let (read, code) = (libc::PROT_READ, libc::PROT_EXEC);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice touches no other.
    let mapped = unsafe { libc::mmap(std::ptr::null_mut(), 4096, read | code, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}

/// Has the allocator map every buffer of at least so many bytes by itself: one that is not used costs
/// nothing, and one that is freed is gone.
pub(crate) fn map_buffers_from(bytes: i32) {
    // SAFETY: a setting of the allocator; takes no pointers.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, bytes)
    };
    #[cfg(not(target_env = "gnu"))]
    let _ = bytes;
}

/// Gives memory that was used and freed back to the system.
pub(crate) fn give_back_memory() {
    // SAFETY: touches nothing but the allocator's own free memory, under its locks.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0)
    };
}

/// Bytes waiting in a pipe.
///
/// # Errors
/// As ioctl(FIONREAD).
pub(crate) fn pending_bytes(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD stores one int.
    check(libc::c_long::from(unsafe {
        libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &raw mut count)
    }))?;
    Ok(count.max(0) as usize)
}

/// Registers a descriptor with tokio's reactor.
///
/// # Errors
/// Outside of a tokio runtime, or when the descriptor cannot be polled.
pub(crate) fn watch(fd: OwnedFd, interest: tokio::io::Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd answers the same open descriptor for as long as it lives, and AsyncFd
    // deregisters before it drops it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// Lets this thread read and write only when nobody else wants to.
///
/// # Errors
/// As ioprio_set(2).
pub(crate) fn idle_io() -> io::Result<()> {
    const WHO_PROCESS: libc::c_int = 1;
    const CLASS_IDLE: libc::c_int = 3 << 13;
    // SAFETY: plain numbers; 0 is the calling thread.
    check(unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, CLASS_IDLE) })?;
    Ok(())
}
