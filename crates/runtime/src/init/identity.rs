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

use rustix::fs::{CWD, Mode, OFlags};

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

/// The making of the first new host key.
pub(super) struct Making {
    pid: i32,
    until: Instant,
}

impl Making {
    /// Whether this is its process.
    pub(super) fn is(&self, pid: i32) -> bool {
        self.pid == pid
    }

    /// How long it may still take.
    pub(super) fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// It has taken longer than it may.
    pub(super) fn is_late(&self) -> bool {
        self.left().is_zero()
    }

    /// Ends it. Its process was not reaped yet.
    pub(super) fn kill(self) {
        let _ = sys::kill(self.pid, libc::SIGKILL);
    }
}

/// Removes what is another machine's, and has new host keys made where there were some. Answers the making
/// of the quickest one: the sandbox is ready when that is done. The others come by themselves.
pub(super) fn renew() -> Option<Making> {
    for path in SEEDS {
        let _ = std::fs::remove_file(path);
    }
    if std::fs::symlink_metadata(MACHINE_ID).is_ok_and(|found| found.is_file()) {
        let _ = std::fs::remove_file(MACHINE_ID);
    }
    let kinds = remove_host_keys();
    let wanted = KINDS.iter().filter(|kind| kinds.contains(kind));
    let made: Vec<i32> = wanted.filter_map(|kind| make_key(kind).ok()).collect();
    made.first().map(|&pid| Making { pid, until: Instant::now() + LIMIT })
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
