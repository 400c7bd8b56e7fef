//! A command's terminal: a pair of the sandbox's own devpts.
//!
//! The pair comes from the mount that init made, whatever a guest has put at /dev/pts. Invariant: the command
//! gets the slave, the shim the master; init keeps a copy of the master for as long as the command runs, to
//! ask who is in the foreground, and gets no controlling terminal itself. Called by `exec` and init's loop.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use bivouac_types::terminal::TtySize;
use rustix::fs::{Mode, OFlags, Uid};
use rustix::pty::OpenptFlags;
use rustix::termios::Winsize;

use crate::sys;

/// Master and slave.
pub(super) struct Pair {
    pub master: OwnedFd,
    pub slave: OwnedFd,
}

/// Opens a pair whose slave belongs to a user.
///
/// # Errors
/// As openat(2): the sandbox has as many terminals as the kernel gives it.
pub(super) fn open(pts: &OwnedFd, user: u32, size: TtySize) -> io::Result<Pair> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let master = rustix::fs::openat(pts.as_fd(), "ptmx", flags, Mode::empty())?;
    rustix::pty::unlockpt(&master)?;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    // The group is devpts's own: `tty`.
    rustix::fs::fchown(&slave, Some(Uid::from_raw(user)), None)?;
    rustix::fs::fchmod(&slave, Mode::from_raw_mode(0o620))?;
    let size = Winsize { ws_col: size.cols, ws_row: size.rows, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(&slave, size)?;
    Ok(Pair { master, slave })
}

/// Signals a command on a terminal: its own process group, and the one in the foreground. A hang-up wakes
/// what was stopped, as the kernel's does.
pub(super) fn signal(pid: i32, master: &OwnedFd, signal: i32) {
    let foreground = rustix::termios::tcgetpgrp(master).ok();
    let foreground = foreground.map(|group| group.as_raw_nonzero().get());
    let others = foreground.filter(|group| *group > 1 && *group != pid);
    // Its own first: a shell whose child has ended would go on with its next line, or be gone, before it is told.
    for group in std::iter::once(pid).chain(others) {
        let _ = sys::kill(-group, signal);
        if signal == libc::SIGHUP {
            let _ = sys::kill(-group, libc::SIGCONT);
        }
    }
}
