//! Sockets that came from inside a sandbox, for those who carry bytes.
//!
//! Init made them and could keep a copy, and what one holder says of a socket's waiting counts for all: a
//! call that only trusts `O_NONBLOCK` could be made to hold a thread of serve's for ever. Invariant: no call
//! on the runtime's own threads waits, whatever others do to the socket. Made of what [`crate::Handle::dial`]
//! and [`crate::Handle::listen`] answer.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::task::JoinHandle;

use crate::sys;

/// A connected stream socket, TCP or Unix.
#[derive(Debug)]
pub struct GuestStream(AsyncFd<OwnedFd>);

impl GuestStream {
    /// Takes a connected socket.
    ///
    /// # Errors
    /// Outside of a tokio runtime.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self(sys::watch(socket, Interest::READABLE | Interest::WRITABLE)?))
    }
}

impl AsFd for GuestStream {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

impl AsyncRead for GuestStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.0.poll_read_ready(cx))?;
            let room = buf.initialize_unfilled();
            match rustix::net::recv(self.0.get_ref(), room, RecvFlags::DONTWAIT) {
                Ok((got, _)) => {
                    buf.advance(got);
                    return Poll::Ready(Ok(()));
                }
                Err(Errno::AGAIN) => guard.clear_ready(),
                Err(Errno::INTR) => {}
                Err(e) => return Poll::Ready(Err(e.into())),
            }
        }
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.0.poll_write_ready(cx))?;
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(self.0.get_ref(), bytes, flags) {
                Err(Errno::AGAIN) => guard.clear_ready(),
                Err(Errno::INTR) => {}
                other => return Poll::Ready(Ok(other?)),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match rustix::net::shutdown(self.0.get_ref(), Shutdown::Write) {
            // The other side was first.
            Ok(()) | Err(Errno::NOTCONN) => Poll::Ready(Ok(())),
            Err(e) => Poll::Ready(Err(e.into())),
        }
    }
}

/// A socket that listens, TCP or Unix. Nothing is accepted by it any more when it is dropped.
#[derive(Debug)]
pub struct GuestListener {
    socket: Arc<AsyncFd<OwnedFd>>,
    /// There is no accept that never waits, so a thread does it.
    accepting: Option<JoinHandle<Result<OwnedFd, Errno>>>,
}

impl GuestListener {
    /// Takes a socket that listens.
    ///
    /// # Errors
    /// Outside of a tokio runtime.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        Ok(Self { socket: Arc::new(sys::watch(socket, Interest::READABLE)?), accepting: None })
    }

    /// Waits for a connection. Nothing is lost when this is given up in the middle.
    ///
    /// # Errors
    /// As accept(2), but for those of a connection that is gone already.
    pub async fn accept(&mut self) -> io::Result<GuestStream> {
        loop {
            let mut guard = None;
            let accepting = match &mut self.accepting {
                Some(accepting) => accepting,
                None => {
                    guard = Some(self.socket.readable().await?);
                    let socket = self.socket.clone();
                    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
                    let accept = move || rustix::net::accept_with(socket.get_ref(), flags);
                    self.accepting.insert(tokio::task::spawn_blocking(accept))
                }
            };
            let accepted = accepting.await.map_err(io::Error::other);
            self.accepting = None;
            match accepted? {
                Ok(socket) => return GuestStream::new(socket),
                Err(Errno::AGAIN) => guard.iter_mut().for_each(|guard| guard.clear_ready()),
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PERM | Errno::PROTO) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

impl Drop for GuestListener {
    fn drop(&mut self) {
        // Wakes a thread that was made to wait.
        let _ = rustix::net::shutdown(self.socket.get_ref(), Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// Long enough for what must come, if it comes at all.
    const SOON: Duration = Duration::from_secs(20);

    /// As whoever holds a copy could do it.
    fn make_wait(socket: &impl AsFd) {
        rustix::io::ioctl_fionbio(socket, false).unwrap();
    }

    #[tokio::test]
    async fn a_stream_that_is_made_to_wait_does_not_hold_the_thread() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        let mut stream = GuestStream::new(near.into()).unwrap();
        make_wait(&stream);
        // One thread: a read that waits in the kernel would let nothing else run.
        let mut buffer = [0; 9];
        let nothing =
            tokio::time::timeout(Duration::from_millis(50), stream.read(&mut buffer)).await;
        assert!(nothing.is_err());
        // The same of a write that nobody reads.
        let filled = async { while stream.write(&[0; 64 << 10]).await.unwrap() > 0 {} };
        assert!(tokio::time::timeout(Duration::from_millis(300), filled).await.is_err());
        std::io::Write::write_all(&mut far, b"hello").unwrap();
        let got = tokio::time::timeout(SOON, stream.read(&mut buffer)).await.unwrap().unwrap();
        assert_eq!(&buffer[..got], b"hello");
        drop(far);
        let end = tokio::time::timeout(SOON, stream.read(&mut buffer)).await.unwrap();
        assert!(matches!(end, Ok(0) | Err(_)));
    }

    #[tokio::test]
    async fn bytes_go_both_ways_to_their_end() {
        let (near, far) = std::os::unix::net::UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let mut far = tokio::net::UnixStream::from_std(far).unwrap();
        let mut near = GuestStream::new(near.into()).unwrap();
        let sent: Vec<u8> = (0..1_000_000u32).map(|n| n as u8).collect();
        let send = async {
            near.write_all(&sent).await.unwrap();
            near.shutdown().await.unwrap();
            let mut back = Vec::new();
            near.read_to_end(&mut back).await.unwrap();
            back
        };
        let receive = async {
            let mut got = Vec::new();
            far.read_to_end(&mut got).await.unwrap();
            far.write_all(&got).await.unwrap();
            far.shutdown().await.unwrap();
        };
        let (back, ()) = tokio::join!(send, receive);
        assert!(back == sent);
    }

    #[tokio::test]
    async fn a_listener_that_is_made_to_wait_ends_when_it_is_dropped() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let mut listener = GuestListener::new(listener.into()).unwrap();
        make_wait(&listener.socket.get_ref());
        let _one = TcpStream::connect(at).unwrap();
        let _stream = tokio::time::timeout(SOON, listener.accept()).await.unwrap().unwrap();
        // Nobody comes: whether the thread waits for that or the loop does, others run.
        let nobody = tokio::time::timeout(Duration::from_millis(50), listener.accept()).await;
        assert!(nobody.is_err());
        // Given up in the middle, and nothing is lost.
        let _two = TcpStream::connect(at).unwrap();
        let _stream = tokio::time::timeout(SOON, listener.accept()).await.unwrap().unwrap();
        let thread = listener.accepting.take();
        drop(listener);
        if let Some(thread) = thread {
            assert!(tokio::time::timeout(SOON, thread).await.unwrap().unwrap().is_err());
        }
    }
}
