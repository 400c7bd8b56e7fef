//! What a session's shim holds of the gate: the sockets at which everything arrives that the sandbox
//! sends, and the switch that opens and closes them.
//!
//! The sockets live in the gate's network namespace wherever their holder is; nothing of this needs
//! privilege. Invariant: as long as a kind is closed, and when [`Switch`] is gone, the kernel refuses it
//! at once: a reset for TCP, an ICMP error for UDP. A gate is born closed. Made by `linux::steer`, used
//! by the egress broker through the composition root.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use crate::linux::netns;
use crate::linux::steer::Way;
use crate::sys::{self, bpf::Word, net::Control};

/// Bits of what is open, as the kernel's side knows them.
pub(crate) const TCP: u32 = 1;
/// UDP to port 53; TCP to port 53 is open with either.
pub(crate) const DNS: u32 = 2;
/// Every other UDP.
pub(crate) const UDP: u32 = 4;

/// A session's gate. Each list has the socket of IPv4, then that of IPv6 if the host has IPv6. All are
/// non-blocking.
#[derive(Debug)]
pub struct Gate {
    /// Every TCP port of every address arrives here. The original destination is the accepted socket's
    /// `local_addr`; what was sent to `::ffff:1.2.3.4` is IPv4. The broker judges the gate's own
    /// addresses like any others.
    pub tcp: Vec<TcpListener>,
    /// UDP to port 53 of any address: [`receive`], [`answer`]. TCP to port 53 arrives at `tcp`.
    pub dns: Vec<UdpSocket>,
    /// All other UDP: [`receive`]; its answers go through `raw`, since they may come from any port.
    pub udp: Vec<UdpSocket>,
    /// [`answer_as`] sends through these. Nothing arrives here.
    pub raw: Vec<OwnedFd>,
    /// Addresses of the gate itself: name server and router of the sandbox.
    pub own: Vec<IpAddr>,
    /// What is open. When it is dropped, nothing is any more.
    pub switch: Switch,
}

/// Opens and closes the kinds of traffic, also when its holder has no privilege any more.
#[derive(Debug)]
pub struct Switch(Means);

#[derive(Debug)]
enum Means {
    /// A word that the program reads, and the program's link to the gate.
    Word { word: Word, _link: OwnedFd },
    /// A socket in the gate: the gate's rules watch for what it sends on the loopback.
    Knock(UdpSocket),
}

/// Where a knock goes to open a kind, in the gate's loopback.
pub(crate) const KNOCK_OPEN: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
/// The same, to close it.
pub(crate) const KNOCK_CLOSE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

impl Switch {
    /// Opens exactly these kinds. What was established stays: cutting is the broker's.
    ///
    /// # Errors
    /// Only where BPF is forbidden, when the gate's loopback takes no packet for want of memory. The
    /// kinds may then be partly changed; closing is done first.
    pub fn set(&self, tcp: bool, dns: bool, udp: bool) -> io::Result<()> {
        let kinds = [(TCP, tcp), (DNS, dns), (UDP, udp)];
        match &self.0 {
            Means::Word { word, .. } => {
                word.set(kinds.iter().filter(|(_, open)| *open).map(|(bit, _)| bit).sum());
                Ok(())
            }
            Means::Knock(socket) => {
                let (open, close): (Vec<_>, Vec<_>) = kinds.into_iter().partition(|(_, on)| *on);
                let close = close.iter().map(|(bit, _)| (KNOCK_CLOSE, *bit));
                let open = open.iter().map(|(bit, _)| (KNOCK_OPEN, *bit));
                for (address, bit) in close.chain(open) {
                    // The rule acts on the way out, before this call returns, and swallows the packet.
                    match socket.send_to(&[], (address, bit as u16)) {
                        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {}
                        Err(e) => return Err(e),
                        Ok(_) => return Err(io::Error::other("the gate's switch did not turn")),
                    }
                }
                Ok(())
            }
        }
    }

    /// By a mapped word and its program.
    pub(crate) fn of_word(map: BorrowedFd<'_>, link: OwnedFd) -> io::Result<Self> {
        Ok(Self(Means::Word { word: Word::map(map)?, _link: link }))
    }

    /// Number of the program's link.
    #[cfg(test)]
    pub(crate) fn link_id(&self) -> Option<u32> {
        use std::os::fd::AsRawFd;
        let Means::Word { _link: link, .. } = &self.0 else { return None };
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", link.as_raw_fd()));
        let info = info.ok()?;
        let line = info.lines().find_map(|line| line.strip_prefix("link_id:"))?;
        line.trim().parse().ok()
    }

    /// By a socket whose packets the gate's rules watch for.
    pub(crate) fn of_knock(socket: UdpSocket) -> Self {
        Self(Means::Knock(socket))
    }
}

/// Descriptors of a gate on their way from who made it to the shim, in the order of `Gate`'s fields.
#[derive(Debug)]
pub(crate) struct Parts {
    pub shape: Shape,
    pub fds: Vec<OwnedFd>,
}

/// What the descriptors of [`Parts`] are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    pub way: Way,
    /// Address families: 1 or 2.
    pub families: usize,
}

impl Parts {
    pub(crate) fn borrow(&self) -> Vec<BorrowedFd<'_>> {
        self.fds.iter().map(AsFd::as_fd).collect()
    }

    /// Puts the gate together, in the process that will hold it.
    ///
    /// # Errors
    /// When descriptors are missing, or the switch cannot be mapped.
    pub(crate) fn assemble(self) -> io::Result<Gate> {
        let Self { shape: Shape { way, families }, fds } = self;
        let mut fds = fds.into_iter();
        let mut take = |count: usize| -> Vec<OwnedFd> { fds.by_ref().take(count).collect() };
        let mut four = [(); 4].map(|()| take(families));
        let mut switch = take(2).into_iter();
        let missing = || io::Error::other("a gate without all of its sockets");
        if four.iter().any(|list| list.len() != families) {
            return Err(missing());
        }
        let first = switch.next().ok_or_else(missing)?;
        let switch = match way {
            Way::Lookup => Switch::of_word(first.as_fd(), switch.next().ok_or_else(missing)?)?,
            Way::Tproxy => Switch::of_knock(first.into()),
        };
        let [tcp, dns, udp, raw] = four.each_mut().map(std::mem::take);
        Ok(Gate {
            tcp: tcp.into_iter().map(Into::into).collect(),
            dns: dns.into_iter().map(Into::into).collect(),
            udp: udp.into_iter().map(Into::into).collect(),
            raw,
            own: netns::gate_addresses().into(),
            switch,
        })
    }
}

/// A datagram that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Bytes of it in the buffer.
    pub len: usize,
    /// It was longer than the buffer; the rest is lost.
    pub cut: bool,
    /// Who sent it.
    pub from: SocketAddr,
    /// Whom it was for.
    pub to: SocketAddr,
}

/// Takes one datagram from a socket of [`Gate::dns`] or [`Gate::udp`].
///
/// # Errors
/// As recvmsg(2); `WouldBlock` when there is none.
pub fn receive(socket: impl AsFd, buffer: &mut [u8]) -> io::Result<Received> {
    let (mut name, mut control) = ([0; 32], Control([0; 128]));
    let got = sys::net::receive(socket.as_fd(), buffer, &mut name, &mut control)?;
    let odd = || io::Error::new(io::ErrorKind::InvalidData, "a datagram without its addresses");
    let from = address(&name[..got.name]).ok_or_else(odd)?;
    let to = original(&control.0[..got.control]).ok_or_else(odd)?;
    Ok(Received { len: got.data, cut: got.flags & libc::MSG_TRUNC != 0, from, to })
}

/// Sends an answer from a socket of [`Gate::dns`]: from port 53 of `from`, which is any address.
///
/// # Errors
/// As sendmsg(2).
pub fn answer(socket: impl AsFd, data: &[u8], to: SocketAddr, from: IpAddr) -> io::Result<()> {
    let (control, length) = source(from);
    let (name, name_length) = socket_address(to);
    sys::net::send(socket.as_fd(), [data, &[]], &name[..name_length], (&control, length))
}

/// Sends a datagram through a socket of [`Gate::raw`], of the family of both addresses: from any address
/// and port.
///
/// # Errors
/// As sendmsg(2); `InvalidInput` for addresses of two families and for more than a datagram holds.
pub fn answer_as(raw: impl AsFd, data: &[u8], to: SocketAddr, from: SocketAddr) -> io::Result<()> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what.to_owned());
    if to.is_ipv4() != from.is_ipv4() {
        return Err(invalid("source and destination are of two families"));
    }
    let length = u16::try_from(UDP_HEADER + data.len()).ok().filter(|n| *n <= u16::MAX - 20);
    let length = length.ok_or_else(|| invalid("longer than a datagram"))?;
    let mut header = [0u8; UDP_HEADER];
    header[0..2].copy_from_slice(&from.port().to_be_bytes());
    header[2..4].copy_from_slice(&to.port().to_be_bytes());
    header[4..6].copy_from_slice(&length.to_be_bytes());
    let sum = checksum(from.ip(), to.ip(), &header, data);
    header[6..8].copy_from_slice(&sum.to_be_bytes());
    let (control, control_length) = source(from.ip());
    // The port of a raw socket is its protocol: none here.
    let mut bare = to;
    bare.set_port(0);
    let (name, name_length) = socket_address(bare);
    let control = (&control, control_length);
    sys::net::send(raw.as_fd(), [&header, data], &name[..name_length], control)
}

const UDP_HEADER: usize = 8;

/// UDP's checksum over the addresses, the header (its own field 0) and the data.
fn checksum(from: IpAddr, to: IpAddr, header: &[u8; UDP_HEADER], data: &[u8]) -> u16 {
    let mut sum = u64::from(libc::IPPROTO_UDP.cast_unsigned());
    let mut add = |bytes: &[u8]| {
        for pair in bytes.chunks(2) {
            let low = pair.get(1).copied().unwrap_or(0);
            sum += u64::from(u16::from_be_bytes([pair[0], low]));
        }
    };
    for ip in [from, to] {
        match ip {
            IpAddr::V4(ip) => add(&ip.octets()),
            IpAddr::V6(ip) => add(&ip.octets()),
        }
    }
    // The length counts twice: once in the pseudo header.
    add(&header[4..6]);
    add(header);
    add(data);
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    // 0 would say "no checksum".
    match !(sum as u16) {
        0 => 0xffff,
        sum => sum,
    }
}

// Control messages: struct cmsghdr is a length (with itself), a level and a type.
const CONTROL_HEADER: usize = size_of::<usize>() + 8;

/// The control message that chooses a source address, and its length.
fn source(from: IpAddr) -> (Control, usize) {
    let (level, kind) = match from {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_PKTINFO),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO),
    };
    let mut body = [0u8; 20];
    let body = match from {
        // struct in_pktinfo: interface, source, destination of a received one
        IpAddr::V4(ip) => {
            body[4..8].copy_from_slice(&ip.octets());
            &body[..12]
        }
        // struct in6_pktinfo: source, interface
        IpAddr::V6(ip) => {
            body[..16].copy_from_slice(&ip.octets());
            &body[..20]
        }
    };
    let mut control = Control([0; 128]);
    let length = CONTROL_HEADER + body.len();
    let bytes = &mut control.0;
    bytes[..8].copy_from_slice(&length.to_ne_bytes());
    bytes[8..12].copy_from_slice(&level.to_ne_bytes());
    bytes[12..16].copy_from_slice(&kind.to_ne_bytes());
    bytes[CONTROL_HEADER..length].copy_from_slice(body);
    (control, length.next_multiple_of(align_of::<usize>()))
}

/// The original destination among the control messages.
fn original(mut control: &[u8]) -> Option<SocketAddr> {
    loop {
        let length = usize::from_ne_bytes(control.get(..8)?.try_into().ok()?);
        let word = |at: usize| Some(i32::from_ne_bytes(control.get(at..at + 4)?.try_into().ok()?));
        let (level, kind) = (word(8)?, word(12)?);
        let body = control.get(CONTROL_HEADER..length)?;
        if matches!(
            (level, kind),
            (libc::IPPROTO_IP, libc::IP_ORIGDSTADDR) | (libc::IPPROTO_IPV6, libc::IPV6_ORIGDSTADDR)
        ) {
            return address(body);
        }
        control = control.get(length.next_multiple_of(align_of::<usize>())..)?;
    }
}

/// Reads a `sockaddr_in` or `sockaddr_in6`.
fn address(bytes: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?);
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    match i32::from(family) {
        libc::AF_INET => {
            let ip: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
            Some(SocketAddrV4::new(Ipv4Addr::from(ip), port).into())
        }
        libc::AF_INET6 => {
            let flow = u32::from_be_bytes(bytes.get(4..8)?.try_into().ok()?);
            let ip: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
            let scope = u32::from_ne_bytes(bytes.get(24..28)?.try_into().ok()?);
            Some(SocketAddrV6::new(Ipv6Addr::from(ip), port, flow, scope).into())
        }
        _ => None,
    }
}

/// Writes one; answers its length.
fn socket_address(address: SocketAddr) -> ([u8; 28], usize) {
    let mut out = [0u8; 28];
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    out[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    out[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            out[4..8].copy_from_slice(&v4.ip().octets());
            (out, 16)
        }
        SocketAddr::V6(v6) => {
            out[8..24].copy_from_slice(&v6.ip().octets());
            out[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
            (out, 28)
        }
    }
}
