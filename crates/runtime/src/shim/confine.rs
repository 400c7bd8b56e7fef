//! What a shim may still do after the launch: serve what it holds, dial, and write its session's logs.
//!
//! It holds a session's secrets and reads bytes of the guest and of strangers. Whoever takes it over has
//! no capability and no way to one, no name for anything in the host's file system but the session's
//! logs, no program to start, no process to look into, and sockets of IP alone. Invariant: all of that
//! is set before the first byte from inside is read, and none of it can be taken back. What is not
//! listed is answered EPERM and told to the kernel's log: a call that a library makes on a rare path
//! shall cost that path, not the session. Called by the shim, single-threaded.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::OnceLock;

use landlock::{
    ABI, Access, AccessFs, AccessNet, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreatedAttr, Scope,
};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use seccompiler::{
    SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Is, SeccompCondition as Argument,
    SeccompFilter, SeccompRule,
};

use crate::linux::confine;
use crate::sys::{self, Instruction};

/// Most memory of a shim, bytes: its own control group's limit where that is version 2's, and the limit
/// of its data everywhere. Ten thousand idle flows fit.
pub(crate) const MEMORY: u64 = 512 << 20;
/// Descriptors that a shim may have: ten thousand flows have two sockets each, and some have pipes.
const FILES: u64 = 65_536;
/// Landlock of the oldest kernel that sessions run on.
const LANDLOCK: ABI = ABI::V6;

/// The kind in the second argument of socket(2); flags are beside it.
const SOCKET_KIND: u64 = 0xf;

/// Calls that are allowed whatever their arguments.
const CALLS: &[libc::c_long] = &[
    // descriptors
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_ftruncate,
    libc::SYS_fchmod,
    libc::SYS_pipe2,
    libc::SYS_splice,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    // files: of the session's logs alone, see `landlock`
    libc::SYS_openat,
    libc::SYS_unlinkat,
    // sockets
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    // memory, threads, time
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_membarrier,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_restart_syscall,
    // signals to itself: a panic ends the process with one
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Older forms of some of them.
#[cfg(target_arch = "x86_64")]
const OLDER: &[libc::c_long] = &[libc::SYS_epoll_wait, libc::SYS_poll, libc::SYS_time];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[libc::c_long] = &[];

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: seccompiler::TargetArch = seccompiler::TargetArch::x86_64;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: seccompiler::TargetArch = seccompiler::TargetArch::aarch64;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn one(index: u8, is: Is, value: u64) -> Result<Argument, seccompiler::BackendError> {
    Argument::new(index, Length::Dword, is, value)
}

/// Calls that are allowed with some arguments.
fn with_arguments(rules: &mut Rules) -> Result<(), seccompiler::BackendError> {
    let mut allow = |call: libc::c_long, arguments: Vec<Argument>| {
        rules.entry(call).or_default().push(SeccompRule::new(arguments)?);
        Ok(())
    };
    let bits = |value: i32| u64::from(value.cast_unsigned());
    let of_kind = |kind: i32| one(1, Is::MaskedEq(SOCKET_KIND), bits(kind));
    for family in [libc::AF_INET, libc::AF_INET6] {
        let plain = [
            (libc::SOCK_STREAM, 0),
            (libc::SOCK_STREAM, libc::IPPROTO_TCP),
            (libc::SOCK_DGRAM, 0),
            (libc::SOCK_DGRAM, libc::IPPROTO_UDP),
        ];
        for (kind, protocol) in plain {
            let family = one(0, Is::Eq, bits(family))?;
            let protocol = one(2, Is::Eq, bits(protocol))?;
            allow(libc::SYS_socket, vec![family, of_kind(kind)?, protocol])?;
        }
    }
    // A pair that is connected, as tokio's; no name in the file system can be reached with one.
    let unix = one(0, Is::Eq, bits(libc::AF_UNIX))?;
    allow(libc::SYS_socketpair, vec![unix, of_kind(libc::SOCK_STREAM)?])?;
    // The last is a terminal's size: its master comes from init.
    for request in [libc::FIONREAD, libc::FIONBIO, libc::FIOCLEX, libc::TIOCSWINSZ] {
        allow(libc::SYS_ioctl, vec![one(1, Is::Eq, request)?])?;
    }
    // Memory never becomes code.
    let no_code = || one(2, Is::MaskedEq(bits(libc::PROT_EXEC)), 0);
    allow(libc::SYS_mmap, vec![no_code()?])?;
    allow(libc::SYS_mprotect, vec![no_code()?])?;
    // Threads of this process; clone3 hides its flags, glibc goes on with clone.
    let thread = bits(libc::CLONE_THREAD | libc::CLONE_VM);
    allow(libc::SYS_clone, vec![one(0, Is::MaskedEq(thread), thread)?])?;
    allow(libc::SYS_prctl, vec![one(0, Is::Eq, bits(libc::PR_SET_NAME))?])?;
    // Asked, never set: the new limits are a null pointer.
    allow(libc::SYS_prlimit64, vec![Argument::new(2, Length::Qword, Is::Eq, 0)?])
}

/// The filter, made once: in the zygote, for all its shims.
pub(crate) fn program() -> io::Result<&'static [Instruction]> {
    static PROGRAM: OnceLock<Vec<Instruction>> = OnceLock::new();
    if let Some(program) = PROGRAM.get() {
        return Ok(program);
    }
    let mut rules: Rules = CALLS.iter().chain(OLDER).map(|call| (*call, Vec::new())).collect();
    let filter = with_arguments(&mut rules).and_then(|()| {
        let refused = SeccompAction::Errno(libc::EPERM.cast_unsigned());
        SeccompFilter::new(rules, refused, SeccompAction::Allow, ARCHITECTURE)
    });
    let made = filter.and_then(seccompiler::BpfProgram::try_from).map_err(io::Error::other)?;
    // Its flags are in memory, where a filter cannot look. "Not there" has glibc take clone(2).
    let mut program = confine::absent(libc::SYS_clone3);
    program.extend(made.iter().map(|i| Instruction { code: i.code, jt: i.jt, jf: i.jf, k: i.k }));
    Ok(PROGRAM.get_or_init(|| program))
}

/// No right in the file system but those of a writer of logs, below one folder; no TCP port to listen at;
/// no signal and no abstract socket beyond this process.
fn landlock(logs: BorrowedFd<'_>) -> Result<(), landlock::RulesetError> {
    let writer = AccessFs::MakeReg
        | AccessFs::WriteFile
        | AccessFs::RemoveFile
        | AccessFs::Truncate
        | AccessFs::ReadFile;
    Ruleset::default()
        .set_compatibility(landlock::CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::AbstractUnixSocket | Scope::Signal)?
        .create()?
        .add_rule(PathBeneath::new(logs, writer))?
        .restrict_self()?;
    Ok(())
}

/// Gives up everything that the shim does not need from now on. `id` is the session's owner id: it has
/// no process but this one and owns nothing but its logs.
///
/// # Errors
/// With the step. The process must then end.
pub(crate) fn confine(id: u32, logs: BorrowedFd<'_>) -> io::Result<()> {
    let at =
        |step: &'static str| move |e: io::Error| io::Error::new(e.kind(), format!("{step}: {e}"));
    limits().map_err(at("limits"))?;
    let (uid, gid) = (rustix::fs::Uid::from_raw(id), rustix::fs::Gid::from_raw(id));
    drop_capabilities_for_good().map_err(at("capabilities"))?;
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    let none = CapabilitySet::empty();
    let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, none)?;
    rustix::thread::set_no_new_privs(true)?;
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    landlock(logs).map_err(|e| at("landlock")(io::Error::other(e)))?;
    sys::install_seccomp(program()?, sys::Refusals::Logged).map_err(at("seccomp"))
}

/// The bounding set, so that no file gives a capability; the ambient set is emptied with the ids.
fn drop_capabilities_for_good() -> io::Result<()> {
    for capability in CapabilitySet::all().iter() {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // The kernel does not know it: nothing to drop.
            Err(rustix::io::Errno::INVAL) => {}
            other => other?,
        }
    }
    Ok(())
}

fn limits() -> io::Result<()> {
    let files = rustix::process::getrlimit(Resource::Nofile);
    let most = files.maximum.unwrap_or(u64::MAX).max(FILES);
    let wanted = Rlimit { current: Some(most.min(2 * FILES)), maximum: Some(most.min(2 * FILES)) };
    // A host that forbids more than it gave says so; what it gave is used whole.
    if rustix::process::setrlimit(Resource::Nofile, wanted).is_err() {
        let all = Rlimit { current: files.maximum, maximum: files.maximum };
        rustix::process::setrlimit(Resource::Nofile, all)?;
    }
    let data = Rlimit { current: Some(MEMORY), maximum: Some(MEMORY) };
    rustix::process::setrlimit(Resource::Data, data)?;
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsFd;
    use std::path::Path;

    use rustix::fs::{CWD, Mode, OFlags};
    use rustix::net::{AddressFamily, SocketType};
    use rustix::pty::OpenptFlags;

    use super::*;
    use crate::sys::Fork;

    /// An id that owns nothing.
    const ID: u32 = 1_900_000_000;

    /// What a confined process can do, tried in one: each failure is a line.
    fn attempts(
        logs: &Path,
        elsewhere: &Path,
        port: u16,
        parent: i32,
        terminal: BorrowedFd<'_>,
    ) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut want = |what: &str, done: bool, wanted: bool| {
            if done != wanted {
                wrong.push(format!("{what}: {}", if done { "done" } else { "refused" }));
            }
        };
        // With arguments that are all zero, a call that is let through says something else.
        for (call, name) in [
            (libc::SYS_execve, "execve"),
            (libc::SYS_execveat, "execveat"),
            (libc::SYS_ptrace, "ptrace"),
            (libc::SYS_process_vm_readv, "process_vm_readv"),
            (libc::SYS_pidfd_getfd, "pidfd_getfd"),
            (libc::SYS_setns, "setns"),
            (libc::SYS_unshare, "unshare"),
            (libc::SYS_mount, "mount"),
            (libc::SYS_open_tree, "open_tree"),
            (libc::SYS_bpf, "bpf"),
            (libc::SYS_capset, "capset"),
            (libc::SYS_setuid, "setuid"),
            (libc::SYS_keyctl, "keyctl"),
            (libc::SYS_io_uring_setup, "io_uring_setup"),
            (libc::SYS_userfaultfd, "userfaultfd"),
            (libc::SYS_perf_event_open, "perf_event_open"),
            (libc::SYS_memfd_create, "memfd_create"),
            (libc::SYS_listen, "listen"),
            (libc::SYS_kill, "kill"),
            (libc::SYS_renameat2, "renameat2"),
            (libc::SYS_fchmodat, "fchmodat"),
            (libc::SYS_clone, "a process"),
            (libc::SYS_ioctl, "any ioctl"),
        ] {
            want(name, sys::probe(call) != Some(libc::EPERM), false);
        }
        want("clone3 without ENOSYS", sys::probe(libc::SYS_clone3) != Some(libc::ENOSYS), false);
        let read = |path: &Path| std::fs::read(path).is_ok();
        want("read of a file that all may read", read(Path::new("/etc/passwd")), false);
        want("read of /proc", read(Path::new("/proc/self/status")), false);
        want("list of a folder", std::fs::read_dir("/").is_ok(), false);
        want("read beside the logs", read(&elsewhere.join("open")), false);
        want("write beside the logs", std::fs::write(elsewhere.join("new"), "x").is_ok(), false);
        let up = logs.join("../elsewhere/new");
        want("write above the logs", std::fs::write(up, "x").is_ok(), false);
        want("a folder in the logs", std::fs::create_dir(logs.join("folder")).is_ok(), false);
        let link = rustix::fs::symlinkat("/etc/passwd", CWD, logs.join("link"));
        want("a link in the logs", link.is_ok(), false);
        let log = logs.join("a.log");
        want("write of a log", std::fs::write(&log, "x").is_ok(), true);
        want("cut of a log", std::fs::write(&log, "").is_ok(), true);
        want("end of a log", rustix::fs::unlink(&log).is_ok(), true);
        let socket = |family, kind| rustix::net::socket(family, kind, None).is_ok();
        want("unix socket", socket(AddressFamily::UNIX, SocketType::STREAM), false);
        want("netlink socket", socket(AddressFamily::NETLINK, SocketType::RAW), false);
        want("packet socket", socket(AddressFamily::PACKET, SocketType::RAW), false);
        want("raw socket", socket(AddressFamily::INET, SocketType::RAW), false);
        want("listen", TcpListener::bind("127.0.0.1:0").is_ok(), false);
        want("connect", TcpStream::connect(("127.0.0.1", port)).is_ok(), true);
        want("datagrams", UdpSocket::bind("0.0.0.0:0").is_ok(), true);
        // Init sends terminals: their size can be told, and nothing else of them changed.
        let size = rustix::termios::Winsize { ws_row: 9, ws_col: 9, ws_xpixel: 0, ws_ypixel: 0 };
        want("size of a terminal", rustix::termios::tcsetwinsize(terminal, size).is_ok(), true);
        want("modes of a terminal", rustix::termios::tcgetattr(terminal).is_ok(), false);
        let peer = rustix::pty::ioctl_tiocgptpeer(terminal, OpenptFlags::RDWR);
        want("the other end of a terminal", peer.is_ok(), false);
        let code = sys::probe_executable_memory();
        want("memory for code", code, false);
        want("a thread", std::thread::Builder::new().spawn(|| {}).is_ok(), true);
        want("a signal to the parent", sys::kill(parent, 0).is_ok(), false);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        want("a runtime", runtime.is_ok(), true);
        wrong
    }

    /// The test's own id: root. A child is confined as a shim is, and tries.
    #[test]
    fn a_shim_can_do_its_work_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let (logs, elsewhere) = (folder.path().join("logs"), folder.path().join("elsewhere"));
        for path in [&logs, &elsewhere] {
            std::fs::create_dir(path).unwrap();
            rustix::fs::chmod(path, Mode::from_raw_mode(0o777)).unwrap();
        }
        rustix::fs::chmod(folder.path(), Mode::from_raw_mode(0o755)).unwrap();
        std::fs::write(elsewhere.join("open"), "x").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&logs, flags, Mode::empty()).unwrap();
        let (told, tell) = rustix::pipe::pipe().unwrap();
        let terminal = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        rustix::pty::unlockpt(&terminal).unwrap();
        program().unwrap();
        let parent = rustix::process::getpid().as_raw_nonzero().get();
        let Fork::Parent(pid) = sys::fork_single_threaded().unwrap() else {
            let text = match confine(ID, opened.as_fd()) {
                Ok(()) => attempts(&logs, &elsewhere, port, parent, terminal.as_fd()).join("\n"),
                Err(e) => e.to_string(),
            };
            let _ = rustix::io::write(&tell, format!("{text}\nend").as_bytes());
            sys::exit_now(0);
        };
        drop(tell);
        let text = std::io::read_to_string(std::fs::File::from(told)).unwrap();
        let pid = rustix::process::Pid::from_raw(pid);
        rustix::process::waitpid(pid, rustix::process::WaitOptions::empty()).unwrap();
        assert_eq!(text, "\nend", "a child that died says nothing");
    }
}
