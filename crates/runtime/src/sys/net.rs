//! Socket calls that carry what `rustix` does not know: options of transparent sockets, and datagrams
//! with their addresses in control messages.
//!
//! Invariant: the kernel gets each buffer with its own length. What it wrote is read as bytes by
//! [`crate::gate`]. Called by that and by `linux::steer`.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;

/// Room for the control messages of one datagram, aligned as the kernel wants them.
#[derive(Debug)]
#[repr(C, align(8))]
pub(crate) struct Control(pub [u8; 128]);

/// What came with a datagram: lengths of what was filled.
#[derive(Debug)]
pub(crate) struct Lengths {
    pub data: usize,
    pub name: usize,
    pub control: usize,
    /// `MSG_*`
    pub flags: i32,
}

/// Sets an option whose value is an int.
///
/// # Errors
/// As setsockopt(2).
pub(crate) fn set_option(
    socket: BorrowedFd<'_>,
    level: i32,
    option: i32,
    value: i32,
) -> io::Result<()> {
    let length = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the kernel reads four bytes at most, of an int that outlives the call. Options that want
    // more refuse the length.
    check(libc::c_long::from(unsafe {
        let value = (&raw const value).cast();
        libc::setsockopt(socket.as_raw_fd(), level, option, value, length)
    }))?;
    Ok(())
}

/// The IPv4 address of an interface of this namespace.
///
/// # Errors
/// As ioctl(SIOCGIFADDR): no such interface, or none of its addresses.
pub(crate) fn interface_address(
    socket: BorrowedFd<'_>,
    name: &std::ffi::CStr,
) -> io::Result<std::net::Ipv4Addr> {
    // SAFETY: all zeroes is a valid ifreq: an empty name and an address without a family.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero: it ends the name.
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(name.to_bytes()) {
        *to = *from as libc::c_char;
    }
    // SAFETY: SIOCGIFADDR reads the name and stores a socket address in the request, which outlives the call.
    check(i64::from(unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFADDR as _, &raw mut request)
    }))?;
    // SAFETY: the kernel has stored an address there; every bit pattern of its bytes is valid.
    let address = unsafe { request.ifr_ifru.ifru_addr };
    if i32::from(address.sa_family) != libc::AF_INET {
        return Err(io::Error::from_raw_os_error(libc::EADDRNOTAVAIL));
    }
    // Behind the port, in the order of the network.
    let [_, _, a, b, c, d, ..] = address.sa_data.map(|byte| byte as u8);
    Ok(std::net::Ipv4Addr::new(a, b, c, d))
}

/// Receives one datagram, its source's address and its control messages. A descriptor that came along
/// would be lost: not for Unix sockets.
///
/// # Errors
/// As recvmsg(2).
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    data: &mut [u8],
    name: &mut [u8; 32],
    control: &mut Control,
) -> io::Result<Lengths> {
    let mut piece = libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: data.len() };
    // SAFETY: all zeroes is a valid msghdr: no name, no pieces, no control.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = name.as_mut_ptr().cast();
    message.msg_namelen = name.len() as libc::socklen_t;
    message.msg_iov = &raw mut piece;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len();
    // SAFETY: every pointer is to a live, exclusively borrowed buffer of the length beside it.
    let got = check(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) as i64 })?;
    Ok(Lengths {
        data: (got as usize).min(data.len()),
        name: (message.msg_namelen as usize).min(name.len()),
        control: message.msg_controllen.min(control.0.len()),
        flags: message.msg_flags,
    })
}

/// Sends one datagram to the address in `name`, with the first `control` bytes of control messages.
///
/// # Errors
/// As sendmsg(2).
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    pieces: [&[u8]; 2],
    name: &[u8],
    control: (&Control, usize),
) -> io::Result<()> {
    let mut pieces = pieces.map(|piece| libc::iovec {
        iov_base: piece.as_ptr().cast_mut().cast(),
        iov_len: piece.len(),
    });
    // SAFETY: all zeroes is a valid msghdr: no name, no pieces, no control.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = name.as_ptr().cast_mut().cast();
    message.msg_namelen = name.len() as libc::socklen_t;
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len();
    message.msg_control = control.0.0.as_ptr().cast_mut().cast();
    message.msg_controllen = control.1.min(control.0.0.len());
    // SAFETY: every pointer is to a live buffer of the length beside it; sendmsg reads only.
    check(unsafe {
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) as i64
    })?;
    Ok(())
}
