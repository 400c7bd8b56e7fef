//! The master of a command's terminal: what the shim reads from it, writes to it and tells it.
//!
//! It comes from init, which could keep a copy of it and have every read and write on it wait. Invariant:
//! only the kernel's master of pseudo terminals is taken; reads and writes are done by threads of their own,
//! one of each at a time, so the shim's loop never waits; what is kept is one piece. Used by
//! [`super::command`].

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bivouac_types::terminal::TtySize;
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::termios::Winsize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::Shim;
use super::command::Running;
use crate::log::ring;
use crate::sys;

/// Most bytes that are read at once.
const PIECE: usize = 16 << 10;
/// Most bytes that are written at once: as many as a line can have.
const WRITE: usize = 4096;
/// Most bytes that are read when the process is gone: more than the kernel keeps of what it can have
/// written. A background child may go on writing for ever.
const REST: usize = 64 << 10;
/// How long that may take.
const REST_TIME: Duration = Duration::from_secs(5);
/// After this a terminal that took nothing is tried again: not each of its ways to get room tells so.
const TRY_AGAIN: Duration = Duration::from_millis(20);
/// `/dev/ptmx` and its like, major and minor.
const MASTER: (u32, u32) = (5, 2);

/// A master.
#[derive(Clone)]
pub(super) struct Master(Arc<AsyncFd<OwnedFd>>);

/// How a read came out.
enum Read {
    /// There may be more.
    More,
    /// All that there was.
    Empty,
    /// Nobody has the terminal any more.
    End,
}

impl Master {
    /// Takes what init sent.
    ///
    /// # Errors
    /// When it is anything but one master of a pseudo terminal.
    pub(super) fn take(mut fds: Vec<OwnedFd>) -> io::Result<Self> {
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, "no terminal");
        let (Some(fd), true) = (fds.pop(), fds.is_empty()) else { return Err(wrong()) };
        let stat = rustix::fs::fstat(&fd)?;
        let device = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice || device != MASTER {
            return Err(wrong());
        }
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self(Arc::new(sys::watch(fd, Interest::READABLE | Interest::WRITABLE)?)))
    }

    /// Tells its size; the kernel tells the programs.
    pub(super) fn resize(&self, size: TtySize) -> io::Result<()> {
        let size = Winsize { ws_col: size.cols, ws_row: size.rows, ws_xpixel: 0, ws_ypixel: 0 };
        Ok(rustix::termios::tcsetwinsize(self.0.get_ref(), size)?)
    }

    /// Reads up to `most` bytes of what is there.
    async fn read(&self, most: usize) -> (Vec<u8>, Read) {
        let fd = self.0.clone();
        let read = move || {
            let (mut bytes, mut got) = (vec![0u8; most], 0);
            let how = loop {
                if got == most {
                    break Read::More;
                }
                match rustix::io::read(fd.get_ref().as_fd(), &mut bytes[got..]) {
                    Ok(n) if n > 0 => got += n,
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break Read::Empty,
                    // EIO: nobody has it open.
                    Ok(_) | Err(_) => break Read::End,
                }
            };
            bytes.truncate(got);
            (bytes, how)
        };
        tokio::task::spawn_blocking(read).await.unwrap_or((Vec::new(), Read::End))
    }

    /// Writes some of the bytes; answers how many. For as long as it takes none, this waits.
    ///
    /// # Errors
    /// When nobody has the terminal any more.
    pub(super) async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let piece = bytes::Bytes::copy_from_slice(&bytes[..bytes.len().min(WRITE)]);
        loop {
            let ready = tokio::time::timeout(TRY_AGAIN, self.0.writable()).await;
            let (fd, piece) = (self.0.clone(), piece.clone());
            let write = move || rustix::io::write(fd.get_ref().as_fd(), &piece);
            match tokio::task::spawn_blocking(write).await.map_err(io::Error::other)? {
                Err(Errno::AGAIN) => {
                    if let Ok(Ok(mut guard)) = ready {
                        guard.clear_ready();
                    }
                }
                Err(Errno::INTR) | Ok(0) => {}
                other => return Ok(other?),
            }
        }
    }

    /// Reads output into the log until nobody has the terminal any more, or until the process is gone and
    /// the terminal is empty. Answers whether others still have it.
    pub(super) async fn pump(&self, shim: &Rc<Shim>, running: &Rc<Running>) -> bool {
        let mut exit = running.subscribe_exit();
        loop {
            let ready = tokio::select! {
                ready = self.0.readable() => ready,
                _ = exit.wait_for(Option::is_some) => break,
            };
            let Ok(mut guard) = ready else { return false };
            let (bytes, how) = self.read(PIECE).await;
            if !bytes.is_empty() {
                running.output(shim, ring::STREAM, &bytes);
            }
            match how {
                Read::More => {}
                Read::Empty => guard.clear_ready(),
                Read::End => return false,
            }
        }
        // A read hands over first what is still on its way through the kernel.
        let rest = async {
            let mut left = REST;
            while left > 0 {
                let (bytes, how) = self.read(left.min(PIECE)).await;
                left -= bytes.len();
                if !bytes.is_empty() {
                    running.output(shim, ring::STREAM, &bytes);
                }
                match how {
                    Read::More => {}
                    Read::Empty => return true,
                    Read::End => return false,
                }
            }
            true
        };
        tokio::time::timeout(REST_TIME, rest).await.unwrap_or(true)
    }

    /// Keeps a terminal open and empty for the background children that write to it.
    pub(super) async fn drain(self) {
        while let Ok(mut guard) = self.0.readable().await {
            match self.read(PIECE).await.1 {
                Read::More => {}
                Read::Empty => guard.clear_ready(),
                Read::End => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::pty::{OpenptFlags, openpt};

    use super::*;

    fn master() -> OwnedFd {
        let fd = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        rustix::pty::unlockpt(&fd).unwrap();
        fd
    }

    fn slave(master: &impl AsFd) -> std::fs::File {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        rustix::pty::ioctl_tiocgptpeer(master, flags).unwrap().into()
    }

    fn device(path: &str) -> OwnedFd {
        std::fs::File::options().read(true).write(true).open(path).unwrap().into()
    }

    /// What init could send instead, so that the shim reads what it should not, or waits.
    #[tokio::test]
    async fn nothing_but_one_master_is_taken() {
        let other = master();
        let others: Vec<(&str, Vec<OwnedFd>)> = vec![
            ("nothing", vec![]),
            ("two", vec![master(), master()]),
            ("a slave", vec![slave(&other).into()]),
            ("a pipe", vec![rustix::pipe::pipe().unwrap().0]),
            ("a socket", vec![crate::proto::pair().unwrap().0]),
            ("a file", vec![tempfile::tempfile().unwrap().into()]),
            ("a folder", vec![std::fs::File::open("/").unwrap().into()]),
            ("/dev/null", vec![device("/dev/null")]),
            ("/dev/zero", vec![device("/dev/zero")]),
        ];
        for (what, fds) in others {
            assert!(Master::take(fds).is_err(), "{what}");
        }
        assert!(Master::take(vec![master()]).is_ok());
    }

    /// A copy of the master says that calls on it shall wait. One thread: if the loop did, nothing would run.
    #[test]
    fn a_master_that_is_made_to_wait_does_not_hold_the_loop() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(made_to_wait());
        // As a shim ends: the kernel does not wake every write when the other side of a terminal goes.
        runtime.shutdown_background();
    }

    async fn made_to_wait() {
        let fd = master();
        let copy = fd.try_clone().unwrap();
        let terminal = slave(&fd);
        let master = Master::take(vec![fd]).unwrap();
        rustix::io::ioctl_fionbio(&copy, false).unwrap();
        let read = tokio::time::timeout(Duration::from_millis(50), master.read(PIECE)).await;
        assert!(read.is_err(), "nothing is there");
        // Nobody reads this either; in raw mode the kernel keeps what was typed, and then takes no more.
        let mut modes = rustix::termios::tcgetattr(&terminal).unwrap();
        modes.make_raw();
        rustix::termios::tcsetattr(&terminal, rustix::termios::OptionalActions::Now, &modes)
            .unwrap();
        let typed = async { while master.write(&[b'x'; WRITE]).await.is_ok() {} };
        assert!(tokio::time::timeout(Duration::from_millis(300), typed).await.is_err());
    }
}
