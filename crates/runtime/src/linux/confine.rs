//! What a sandbox may not do whatever its user ids say: the capability bound and the system call
//! filter of init, inherited by every command.
//!
//! Reasons: DESIGN.md, *Confinement*. `no_new_privs` stays off, so `sudo` works inside; root there
//! is an unprivileged id outside.

use std::io;

use rustix::thread::CapabilitySet;

use crate::sys::notify::FOR_THE_KERNEL;
use crate::sys::{self, Instruction};

/// Capabilities that have no use inside of a user namespace, or only widen the kernel's surface.
const DROPPED: &[CapabilitySet] = &[
    CapabilitySet::AUDIT_CONTROL,
    CapabilitySet::AUDIT_READ,
    CapabilitySet::BLOCK_SUSPEND,
    CapabilitySet::BPF,
    CapabilitySet::CHECKPOINT_RESTORE,
    CapabilitySet::IPC_LOCK,
    CapabilitySet::LINUX_IMMUTABLE,
    CapabilitySet::MAC_ADMIN,
    CapabilitySet::MAC_OVERRIDE,
    CapabilitySet::PERFMON,
    CapabilitySet::SYSLOG,
    CapabilitySet::SYS_BOOT,
    CapabilitySet::SYS_MODULE,
    CapabilitySet::SYS_PACCT,
    CapabilitySet::SYS_RAWIO,
    CapabilitySet::SYS_TIME,
    CapabilitySet::WAKE_ALARM,
];

/// System calls that answer ENOSYS: attack surface that agents' programs do without, and io_uring,
/// which CRIU cannot dump and the egress rules cannot see.
const ABSENT: &[libc::c_long] = &[
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_open_by_handle_at,
];

/// Socket families that a program can have; every other one answers EAFNOSUPPORT.
const FAMILIES: &[i32] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
/// Netlink protocols that are refused: netfilter's parsers are a frequent way out of namespaces.
const NO_NETLINK: &[i32] = &[libc::NETLINK_NETFILTER];

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xC000_00B7;
/// The kind of requests that are btrfs's own, in bits 8 to 15 of an ioctl's number. Drives lie on btrfs, and a
/// subvolume made in one would be outside of its size and its copies.
const BTRFS: u32 = 0x94 << 8;
const KIND_OF_REQUEST: u32 = 0xff << 8;
/// Those of them that are every file system's: clone, clone a range, share equal ranges.
const SHARING: [u32; 3] = [0x4004_9409, 0x4020_940d, 0xc018_9436];
/// Set in the numbers of x86's x32 calls, which would pass by a filter on the plain numbers.
const X32_BIT: u32 = 0x4000_0000;

// Offsets in struct seccomp_data; arguments are little endian, so the low half comes first.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const ARGUMENT_0: u32 = 16;
const ARGUMENT_1: u32 = 24;
const ARGUMENT_2: u32 = 32;

const ALLOW: u32 = 0x7fff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const ERRNO: u32 = 0x0005_0000;
const USER_NOTIF: u32 = 0x7fc0_0000;

/// Who answers `statfs` and `fstatfs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Statfs {
    /// The kernel.
    Plain,
    /// The filter's listener (see `init::disk`), but for calls that are marked as meant for the kernel.
    Handed,
}

fn statement(code: u32, k: u32) -> Instruction {
    Instruction { code: code as u16, jt: 0, jf: 0, k }
}

fn load(offset: u32) -> Instruction {
    statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset)
}

fn answer(value: u32) -> Instruction {
    statement(libc::BPF_RET | libc::BPF_K, value)
}

/// Skips `jt` instructions when the loaded word equals `k`, else `jf`.
fn equals(k: u32, jt: u8, jf: u8) -> Instruction {
    Instruction { code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt, jf, k }
}

/// The filter: short, branch by branch, so that it can be read.
pub(crate) fn filter(statfs: Statfs) -> Vec<Instruction> {
    let errno = |e: i32| answer(ERRNO | e as u32);
    let mut program = vec![
        load(ARCH),
        equals(ARCHITECTURE, 1, 0),
        answer(KILL_PROCESS),
        load(NUMBER),
        Instruction {
            code: (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: X32_BIT,
        },
        errno(libc::ENOSYS),
    ];
    for &call in ABSENT {
        program.push(equals(call as u32, 0, 1));
        program.push(errno(libc::ENOSYS));
    }
    if statfs == Statfs::Handed {
        let (low, high) = (FOR_THE_KERNEL as u32, (FOR_THE_KERNEL >> 32) as u32);
        program.extend([
            equals(libc::SYS_statfs as u32, 1, 0),
            equals(libc::SYS_fstatfs as u32, 0, 6),
            load(ARGUMENT_2),
            equals(low, 0, 3),
            load(ARGUMENT_2 + 4),
            equals(high, 0, 1),
            answer(ALLOW),
            answer(USER_NOTIF),
        ]);
    }
    program.extend(no_requests_of_btrfs());
    // socket(family, type, protocol): anything else is allowed.
    program.push(equals(libc::SYS_socket as u32, 1, 0));
    program.push(answer(ALLOW));
    program.push(load(ARGUMENT_0));
    for &family in FAMILIES {
        let netlink = family == libc::AF_NETLINK;
        program.push(equals(
            family as u32,
            0,
            1 + u8::from(netlink) * (2 * NO_NETLINK.len() as u8 + 1),
        ));
        if netlink {
            program.push(load(ARGUMENT_2));
            for &protocol in NO_NETLINK {
                program.push(equals(protocol as u32, 0, 1));
                program.push(errno(libc::EPROTONOSUPPORT));
            }
        }
        program.push(answer(ALLOW));
    }
    program.push(errno(libc::EAFNOSUPPORT));
    program
}

/// ioctl(fd, request): all but btrfs's own, which it says it does not know, as other file systems do. Goes on
/// behind its end with the call's number for every other call.
fn no_requests_of_btrfs() -> Vec<Instruction> {
    let own = SHARING.len() as u8;
    let mut program = vec![
        equals(libc::SYS_ioctl as u32, 0, 6 + own),
        load(ARGUMENT_1),
        statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, KIND_OF_REQUEST),
        equals(BTRFS, 0, 2 + own),
        load(ARGUMENT_1),
    ];
    for (index, &request) in SHARING.iter().enumerate() {
        program.push(equals(request, own - index as u8, 0));
    }
    program.push(answer(ERRNO | libc::ENOTTY as u32));
    program.push(answer(ALLOW));
    program
}

/// The beginning of a filter: this call is not there. Goes on behind its end.
pub(crate) fn absent(call: libc::c_long) -> Vec<Instruction> {
    vec![load(NUMBER), equals(call as u32, 0, 1), answer(ERRNO | libc::ENOSYS as u32)]
}

/// A filter that answers EPERM to everything but these calls: for a process of ours that has little to do.
pub(crate) fn only(calls: &[libc::c_long]) -> Vec<Instruction> {
    let mut program =
        vec![load(ARCH), equals(ARCHITECTURE, 1, 0), answer(KILL_PROCESS), load(NUMBER)];
    for &call in calls {
        program.push(equals(call as u32, 0, 1));
        program.push(answer(ALLOW));
    }
    program.push(answer(ERRNO | libc::EPERM as u32));
    program
}

/// Installs the filter for this process and all its children.
///
/// # Errors
/// As seccomp(2).
pub(crate) fn install(program: &[Instruction]) -> io::Result<()> {
    sys::install_seccomp(program, sys::Refusals::Silent)
}

/// Takes from this process and all its children, for ever, what [`DROPPED`] lists. Called by init when its
/// root stands.
///
/// # Errors
/// As prctl(2).
pub(crate) fn drop_capabilities() -> io::Result<()> {
    for &capability in DROPPED {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // The kernel does not know it: nothing to drop.
            Err(rustix::io::Errno::INVAL) => {}
            other => other?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small interpreter of the instructions that `filter` uses: what does the kernel answer?
    fn run(program: &[Instruction], arch: u32, number: u32, args: [u64; 3]) -> u32 {
        let (mut at, mut word) = (0usize, 0u32);
        loop {
            let i = program[at];
            at += 1;
            match u32::from(i.code) {
                c if c == libc::BPF_LD | libc::BPF_W | libc::BPF_ABS => {
                    word = match i.k {
                        NUMBER => number,
                        ARCH => arch,
                        ARGUMENT_0 => args[0] as u32,
                        ARGUMENT_1 => args[1] as u32,
                        ARGUMENT_2 => args[2] as u32,
                        x if x == ARGUMENT_2 + 4 => (args[2] >> 32) as u32,
                        other => panic!("offset {other}"),
                    };
                }
                c if c == libc::BPF_RET | libc::BPF_K => return i.k,
                c if c == libc::BPF_ALU | libc::BPF_AND | libc::BPF_K => word &= i.k,
                c => {
                    let hit = if c == libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K {
                        word == i.k
                    } else {
                        word >= i.k
                    };
                    at += usize::from(if hit { i.jt } else { i.jf });
                }
            }
        }
    }

    #[test]
    fn only_what_is_listed() {
        let program = only(&[libc::SYS_read, libc::SYS_openat]);
        let call = |n: libc::c_long| run(&program, ARCHITECTURE, n as u32, [0; 3]);
        assert_eq!((call(libc::SYS_read), call(libc::SYS_openat)), (ALLOW, ALLOW));
        for refused in [libc::SYS_execve, libc::SYS_socket, libc::SYS_kill, libc::SYS_mount] {
            assert_eq!(call(refused), ERRNO | libc::EPERM as u32);
        }
        assert_eq!(run(&program, 0x4000_0003, 1, [0; 3]), KILL_PROCESS);
    }

    #[test]
    fn the_filter_answers_as_documented() {
        answers_as_documented(&filter(Statfs::Plain));
        answers_as_documented(&filter(Statfs::Handed));
    }

    #[test]
    fn the_two_calls_are_handed_over() {
        let handed = filter(Statfs::Handed);
        for call in [libc::SYS_statfs, libc::SYS_fstatfs] {
            let ask = |program: &[Instruction], third: u64| {
                run(program, ARCHITECTURE, call as u32, [0, 0, third])
            };
            assert_eq!(ask(&filter(Statfs::Plain), 0), ALLOW);
            assert_eq!(ask(&handed, FOR_THE_KERNEL), ALLOW);
            for other in [0, 1, FOR_THE_KERNEL ^ 1, FOR_THE_KERNEL ^ 1 << 32, u64::MAX] {
                assert_eq!(ask(&handed, other), USER_NOTIF);
            }
        }
    }

    fn answers_as_documented(program: &[Instruction]) {
        let call = |n: libc::c_long| run(program, ARCHITECTURE, n as u32, [0; 3]);
        for &absent in ABSENT {
            assert_eq!(call(absent), ERRNO | libc::ENOSYS as u32);
        }
        for allowed in [libc::SYS_read, libc::SYS_execve, libc::SYS_unshare, libc::SYS_mount] {
            assert_eq!(call(allowed), ALLOW);
        }
        let socket = |family: i32, protocol: i32| {
            let args = [family as u64, 0, protocol as u64];
            run(program, ARCHITECTURE, libc::SYS_socket as u32, args)
        };
        for family in [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6] {
            assert_eq!(socket(family, 0), ALLOW);
        }
        assert_eq!(socket(libc::AF_NETLINK, libc::NETLINK_ROUTE), ALLOW);
        let refused = socket(libc::AF_NETLINK, libc::NETLINK_NETFILTER);
        assert_eq!(refused, ERRNO | libc::EPROTONOSUPPORT as u32);
        for family in [libc::AF_VSOCK, libc::AF_PACKET, libc::AF_ALG, libc::AF_BLUETOOTH, 0, 99] {
            assert_eq!(socket(family, 0), ERRNO | libc::EAFNOSUPPORT as u32, "{family}");
        }
        assert_eq!(run(program, 0x4000_0003, 1, [0; 3]), KILL_PROCESS);
        let ioctl = |request: u32| {
            let args = [3, u64::from(request), 0];
            run(program, ARCHITECTURE, libc::SYS_ioctl as u32, args)
        };
        // Make a subvolume, make a snapshot, both ways; take one away; ask about the file system.
        for own in [0x5000_940e, 0x5000_9401, 0x5000_9418, 0x5000_9417, 0x5000_940f, 0x8400_941f] {
            assert_eq!(ioctl(own), ERRNO | libc::ENOTTY as u32, "{own:x}");
        }
        for usual in SHARING.into_iter().chain([libc::TIOCGWINSZ as u32, 0x8008_6601, 0]) {
            assert_eq!(ioctl(usual), ALLOW, "{usual:x}");
        }
        let x32 = run(program, ARCHITECTURE, X32_BIT | 1, [0; 3]);
        assert_eq!(x32, ERRNO | libc::ENOSYS as u32);
    }
}
