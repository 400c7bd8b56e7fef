//! What tells one machine from another in its files, made anew when a sandbox starts from another's state:
//! SSH host keys, seeds of random generators, a machine id that is a file of its own.
//!
//! Runs inside, after the root was entered: the tree may be hostile, and whatever it does, only its own
//! files are touched and the start is held up for [`LIMIT`] at most. Invariant: no such file of the other
//! sandbox is there when the first command starts. (Host name, hosts, machine id and name servers are the
//! session's own files: see `root`.) Called by init.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::sys::{self, Fork};

/// How long the first new host key may take.
const LIMIT: Duration = Duration::from_secs(5);
/// Entries of /etc/ssh that are looked at: nobody has more, but for a tree that wants to hold us up.
const MOST: usize = 4096;
/// Seeds that a program reads at its start and that two machines must not share.
const SEEDS: &[&str] = &[
    "/var/lib/systemd/random-seed",
    "/var/lib/urandom/random-seed",
    "/var/lib/misc/random-seed",
    "/var/lib/random-seed",
    "/root/.rnd",
    "/home/vercel-sandbox/.rnd",
];
/// A copy of /etc/machine-id where it is no link to it.
const MACHINE_ID: &str = "/var/lib/dbus/machine-id";
const SSH: &str = "/etc/ssh";
const KEYGEN: &str = "/usr/bin/ssh-keygen";
/// Kinds of host keys, the quickest to make first.
const KINDS: [&str; 3] = ["ed25519", "ecdsa", "rsa"];

/// Removes what is another machine's, and has new host keys made where there were some: the first one is
/// there when this answers, the others follow.
pub(super) fn renew() {
    for path in SEEDS {
        let _ = std::fs::remove_file(path);
    }
    if std::fs::symlink_metadata(MACHINE_ID).is_ok_and(|found| found.is_file()) {
        let _ = std::fs::remove_file(MACHINE_ID);
    }
    let kinds = remove_host_keys();
    let mut made = KINDS.iter().filter(|kind| kinds.contains(kind)).map(|kind| make_key(kind));
    if let Some(Ok(first)) = made.next() {
        wait(first);
    }
    // Each of the others starts; init reaps it like any other process.
    made.for_each(drop);
}

/// Removes host keys. Answers the kinds that there were.
fn remove_host_keys() -> Vec<&'static str> {
    let mut kinds = Vec::new();
    let Ok(entries) = std::fs::read_dir(SSH) else { return kinds };
    for entry in entries.take(MOST).flatten() {
        let name = entry.file_name();
        let Some(rest) = name.as_bytes().strip_prefix(b"ssh_host_") else { continue };
        if std::fs::remove_file(entry.path()).is_err() {
            continue;
        }
        let whole = |kind: &&&str| rest == format!("{kind}_key").as_bytes();
        kinds.extend(KINDS.iter().find(whole).copied());
    }
    kinds
}

/// Starts the making of a host key.
fn make_key(kind: &str) -> io::Result<i32> {
    let path = OsStr::new(SSH).as_bytes();
    let file = [path, format!("/ssh_host_{kind}_key").as_bytes()].concat();
    let text = |bytes: &[u8]| CString::new(bytes).map_err(io::Error::other);
    let argv = [b"ssh-keygen", &b"-q"[..], b"-t", kind.as_bytes(), b"-N", b"", b"-f", &file];
    let argv = argv.into_iter().map(text).collect::<io::Result<Vec<_>>>()?;
    let env = [text(b"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")?];
    let program = text(KEYGEN.as_bytes())?;
    if !std::path::Path::new(KEYGEN).exists() {
        return Err(io::Error::from(io::ErrorKind::NotFound));
    }
    match sys::fork_single_threaded()? {
        Fork::Parent(pid) => Ok(pid),
        Fork::Child => {
            let _ = become_it(&program, &argv, &env);
            sys::exit_now(127)
        }
    }
}

/// The child's way to the program. Returns only with what stopped it.
fn become_it(program: &CString, argv: &[CString], env: &[CString]) -> io::Error {
    let prepared = || {
        rustix::process::setsid()?;
        let null = rustix::fs::openat(CWD, "/dev/null", OFlags::RDWR, Mode::empty())?;
        for number in 0..3 {
            sys::dup_to(std::os::fd::AsFd::as_fd(&null), number)?;
        }
        sys::reset_signals();
        Ok::<_, io::Error>(())
    };
    match prepared() {
        // Everything else is close-on-exec.
        Ok(()) => sys::exec(program, argv, env),
        Err(error) => error,
    }
}

/// Waits for the end of a process, and kills it when it takes too long.
fn wait(pid: i32) {
    let Some(id) = Pid::from_raw(pid) else { return };
    let Ok(process) = pidfd_open(id, PidfdFlags::empty()) else { return };
    let deadline = Instant::now() + LIMIT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = rustix::time::Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(0),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let mut polled = [PollFd::new(&process, PollFlags::IN)];
        match rustix::event::poll(&mut polled, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(0) | Err(_) => {
                let _ = sys::kill(pid, libc::SIGKILL);
                return;
            }
            Ok(_) => return,
        }
    }
}
