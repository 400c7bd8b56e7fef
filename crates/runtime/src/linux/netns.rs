//! The two network namespaces of a session.
//!
//! The *gate* belongs to the host's user namespace: every destination is local in it, so whatever the
//! sandbox sends ends here, at the sockets that [`steer`] makes. It lives as long as they do; no process
//! stays in it. The sandbox's *own* namespace has `lo`, `eth0` (veth into the gate, the same private
//! addresses in every sandbox) and a default route. Invariant: no interface of either leads anywhere but
//! to the other.
//!
//! Netlink is written by hand: some messages of a few kinds, sent once, need no library.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use super::steer::{self, Way};
use crate::gate::Parts;
use crate::sys;

/// Address of the gate's end and of `eth0`, IPv4, /30.
const V4: [[u8; 4]; 2] = [[10, 254, 0, 1], [10, 254, 0, 2]];
/// The same, IPv6, /64.
const V6: [[u8; 16]; 2] = [
    [0xfd, 0xb1, 0x0b, 0xac, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    [0xfd, 0xb1, 0x0b, 0xac, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2],
];

/// Hardware addresses of the gate's end and of `eth0`: locally administered, and the same everywhere.
const MACS: [[u8; 6]; 2] = [[0x02, 0xb1, 0x0b, 0xac, 0, 1], [0x02, 0xb1, 0x0b, 0xac, 0, 2]];

// linux/if_link.h, linux/veth.h
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
// linux/neighbour.h
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_PERMANENT: u16 = 0x80;
// linux/rtnetlink.h
const RTNH_F_ONLINK: u32 = 4;
/// Index of either end of the pair: ours to choose, in a namespace that has only `lo`.
pub(super) const VETH: u32 = 2;

/// Settings of a gate. Those of `default` are for the veth, which does not exist yet.
const SETTINGS: &[(&str, &str)] = &[
    // Pings to anything would be answered by the gate itself: a lie.
    ("ipv4/icmp_echo_ignore_all", "1"),
    ("ipv6/icmp/echo_ignore_all", "1"),
    // Every refusal is told, not some of them each second: the type in the mask is none of UDP's.
    ("ipv4/icmp_ratemask", "0"),
    ("ipv6/icmp/ratemask", "0"),
    // Nobody else can have its addresses: it need not wait for objections.
    ("ipv6/conf/default/accept_dad", "0"),
    // The sandbox is no router for its gate.
    ("ipv4/conf/default/accept_redirects", "0"),
    ("ipv6/conf/default/accept_ra", "0"),
    ("ipv6/conf/default/accept_redirects", "0"),
];

/// Moves this process (this thread, of several) into a new gate namespace and readies it. Answers a
/// descriptor of it, and its sockets.
///
/// # Errors
/// With the step.
pub(crate) fn new_gate(way: Way) -> io::Result<(OwnedFd, Parts)> {
    bare_gate()?;
    let namespace = current()?;
    let parts = steer::make(way, namespace.as_fd())?;
    Ok((namespace, parts))
}

/// The namespace of a gate: everything that arrives is for it, and nobody takes it.
pub(super) fn bare_gate() -> io::Result<()> {
    sys::unshare(UnshareFlags::NEWNET).map_err(|e| at("new gate namespace", e))?;
    let mut batch = Batch::default();
    batch.up(1);
    for family in families() {
        batch.local_default(family);
    }
    batch.send()?;
    for (name, value) in SETTINGS {
        // Missing where the host has no IPv6.
        let _ = std::fs::write(format!("/proc/sys/net/{name}"), value);
    }
    Ok(())
}

/// Moves this process into a network namespace that is ready.
///
/// # Errors
/// As setns(2).
pub(crate) fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?)
}

/// Connects the sandbox's own namespace with the gate, which this process is in.
///
/// # Errors
/// With the step. The process may then be left in the sandbox's namespace: it must end.
pub(crate) fn connect_own(gate: BorrowedFd<'_>, own: BorrowedFd<'_>) -> io::Result<()> {
    let mut batch = Batch::default();
    batch.veth("gate0", "eth0", own);
    addresses(&mut batch, 0);
    batch.send()?;
    enter(own).map_err(|e| at("enter the sandbox's network namespace", e))?;
    let mut batch = Batch::default();
    batch.up(1);
    batch.up(VETH);
    addresses(&mut batch, 1);
    for family in families() {
        batch.gateway(family);
    }
    batch.notice_carrier();
    batch.send()?;
    enter(gate).map_err(|e| at("return to the gate namespace", e))?;
    let mut batch = Batch::default();
    batch.notice_carrier();
    batch.send()
}

/// A descriptor of this thread's network namespace.
///
/// # Errors
/// As open(2).
pub(crate) fn current() -> io::Result<OwnedFd> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    Ok(rustix::fs::open("/proc/thread-self/ns/net", flags, rustix::fs::Mode::empty())?)
}

/// The gate's own addresses.
pub(crate) fn gate_addresses() -> [IpAddr; 2] {
    [V4[0].into(), V6[0].into()]
}

fn addresses(batch: &mut Batch, side: usize) {
    for family in families() {
        match family {
            libc::AF_INET => batch.address(family, &V4[side], 30),
            _ => batch.address(family, &V6[side], 64),
        }
        // Both ends know each other: to ask first would cost time, and for IPv6 a whole second when the
        // asked one is new and has not yet joined the group that is asked.
        let other = 1 - side;
        match family {
            libc::AF_INET => batch.neighbour(family, &V4[other], MACS[other]),
            _ => {
                batch.neighbour(family, &V6[other], MACS[other]);
                // The kernel does so too, some time later, and drops until then what comes for it.
                batch.own_route(&V6[side]);
            }
        }
    }
}

/// IPv6 may be switched off for the whole host.
pub(super) fn families() -> impl Iterator<Item = i32> {
    let v6 = rustix::fs::stat("/proc/sys/net/ipv6").is_ok();
    [Some(libc::AF_INET), v6.then_some(libc::AF_INET6)].into_iter().flatten()
}

pub(super) fn at(step: &str, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    io::Error::new(error.kind(), format!("{step}: {error}"))
}

/// A request being written: header, then attributes.
pub(super) struct Message {
    bytes: Vec<u8>,
}

impl Message {
    pub(super) fn new(kind: u16, flags: i32, body: &[u8]) -> Self {
        Self::with_flags(kind, flags | libc::NLM_F_ACK, body)
    }

    /// One that the kernel answers only when it refuses it.
    pub(super) fn unanswered(kind: u16, body: &[u8]) -> Self {
        Self::with_flags(kind, 0, body)
    }

    fn with_flags(kind: u16, flags: i32, body: &[u8]) -> Self {
        let flags = (flags | libc::NLM_F_REQUEST) as u16;
        let mut bytes = Vec::with_capacity(128);
        bytes.extend(0u32.to_ne_bytes()); // length: set when sent
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(0u32.to_ne_bytes()); // sequence: set when sent
        bytes.extend(0u32.to_ne_bytes()); // port: the kernel's choice
        bytes.extend(body);
        Self { bytes }
    }

    /// Whether the kernel answers it in any case.
    fn answered(&self) -> bool {
        let flags = u16::from_ne_bytes([self.bytes[6], self.bytes[7]]);
        i32::from(flags) & libc::NLM_F_ACK != 0
    }

    pub(super) fn attribute(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        self.nest(kind, |m| m.bytes.extend(value))
    }

    pub(super) fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) -> &mut Self {
        let start = self.bytes.len();
        self.bytes.extend([0; 2]);
        self.bytes.extend(kind.to_ne_bytes());
        fill(self);
        let length = (self.bytes.len() - start) as u16;
        self.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }
}

/// Body of a link message: family, type, index, flags, mask of flags.
fn link(index: u32, up: bool) -> [u8; 16] {
    let mut body = [0u8; 16];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    let flags = if up { libc::IFF_UP as u32 } else { 0 };
    body[8..12].copy_from_slice(&flags.to_ne_bytes());
    body[12..16].copy_from_slice(&flags.to_ne_bytes());
    body
}

/// Requests that go to the kernel together: each round trip is two changes of context, and under load
/// a queue at the lock of all network namespaces.
#[derive(Default)]
pub(super) struct Batch {
    /// None: routes, protocol 0 of this family.
    protocol: Option<Protocol>,
    /// With what each does; its place is its sequence number.
    messages: Vec<(&'static str, Message)>,
}

impl Batch {
    /// One for the packet filter.
    pub(super) fn filter() -> Self {
        Self { protocol: Some(rustix::net::netlink::NETFILTER), messages: Vec::new() }
    }

    pub(super) fn add(&mut self, step: &'static str, message: Message) {
        self.messages.push((step, message));
    }

    /// Sends them, to the namespace that this process is in, and reads their acknowledgements.
    pub(super) fn send(self) -> io::Result<()> {
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, self.protocol)
            .map_err(|e| at("netlink socket", e))?;
        let mut request = Vec::with_capacity(1024);
        for (sequence, (_, message)) in (0u32..).zip(&self.messages) {
            let mut bytes = message.bytes.clone();
            let length = bytes.len() as u32;
            bytes[0..4].copy_from_slice(&length.to_ne_bytes());
            bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
            request.extend(bytes);
        }
        let all = "change the network";
        rustix::net::send(&socket, &request, SendFlags::empty()).map_err(|e| at(all, e))?;
        let mut open = self.messages.iter().filter(|(_, message)| message.answered()).count();
        let mut answer = [0u8; 8192];
        while open > 0 {
            let (got, _) = rustix::net::recv(&socket, &mut answer, RecvFlags::empty())
                .map_err(|e| at(all, e))?;
            let mut rest = &answer[..got];
            while let Some((length, kind, sequence, code)) = acknowledgement(rest) {
                let step = self.messages.get(sequence as usize).map_or(all, |(step, _)| step);
                match (i32::from(kind), code) {
                    (libc::NLMSG_ERROR, 0) => open = open.saturating_sub(1),
                    (libc::NLMSG_ERROR, code) => {
                        return Err(at(step, io::Error::from_raw_os_error(-code)));
                    }
                    // What a question is answered with, before its acknowledgement.
                    (kind, _) if kind == i32::from(libc::RTM_NEWLINK) => {}
                    _ => return Err(at(step, io::Error::other("no acknowledgement"))),
                }
                rest = &rest[length.next_multiple_of(4).min(rest.len())..];
            }
            if !rest.is_empty() {
                return Err(at(all, io::Error::other("no acknowledgement")));
            }
        }
        Ok(())
    }

    fn up(&mut self, index: u32) {
        let message = Message::new(libc::RTM_NEWLINK, 0, &link(index, true));
        self.messages.push(("bring the interface up", message));
    }

    /// The kernel gets round to a new carrier up to a second later; before, an end that came up before its
    /// peer sends nothing, and the answer to the sandbox's first packet would be lost. It looks at once
    /// when somebody asks for the link's state.
    fn notice_carrier(&mut self) {
        self.add("look at the veth", Message::new(libc::RTM_GETLINK, 0, &link(VETH, false)));
    }

    /// A pair, this end up: the kernel refuses that for the other one before the two are tied. It is
    /// the first interface beside `lo` on both sides.
    fn veth(&mut self, here: &str, there: &str, namespace: BorrowedFd<'_>) {
        let name = |n: &str| [n.as_bytes(), &[0]].concat();
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        let mut message = Message::new(libc::RTM_NEWLINK, flags, &link(VETH, true));
        message.attribute(IFLA_IFNAME, &name(here)).attribute(IFLA_ADDRESS, &MACS[0]);
        message.nest(IFLA_LINKINFO, |m| {
            m.attribute(IFLA_INFO_KIND, b"veth").nest(IFLA_INFO_DATA, |m| {
                m.nest(VETH_INFO_PEER, |m| {
                    m.bytes.extend(link(VETH, false));
                    m.attribute(IFLA_IFNAME, &name(there))
                        .attribute(IFLA_ADDRESS, &MACS[1])
                        .attribute(IFLA_NET_NS_FD, &namespace.as_fd().as_raw_fd().to_ne_bytes());
                });
            });
        });
        self.messages.push(("make the veth pair", message));
    }

    fn address(&mut self, family: i32, address: &[u8], prefix: u8) {
        // Nobody else can have the address: duplicate detection would only delay it.
        let flags = if family == libc::AF_INET6 { libc::IFA_F_NODAD as u8 } else { 0 };
        let mut body = [family as u8, prefix, flags, 0, 0, 0, 0, 0];
        body[4..8].copy_from_slice(&VETH.to_ne_bytes());
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        let mut message = Message::new(libc::RTM_NEWADDR, flags, &body);
        message.attribute(libc::IFA_LOCAL, address).attribute(libc::IFA_ADDRESS, address);
        self.messages.push(("set the address", message));
    }

    fn neighbour(&mut self, family: i32, address: &[u8], mac: [u8; 6]) {
        let mut body = [0u8; 12];
        body[0] = family as u8;
        body[4..8].copy_from_slice(&VETH.to_ne_bytes());
        body[8..10].copy_from_slice(&NUD_PERMANENT.to_ne_bytes());
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        let mut message = Message::new(libc::RTM_NEWNEIGH, flags, &body);
        message.attribute(NDA_DST, address).attribute(NDA_LLADDR, &mac);
        self.add("set the neighbour", message);
    }

    /// The IPv6 address is this host.
    fn own_route(&mut self, address: &[u8; 16]) {
        let kind = [libc::RTN_LOCAL, libc::RT_SCOPE_HOST];
        self.route(["route its own address here"; 2], libc::AF_INET6, kind, 0, |m| {
            m.attribute(libc::RTA_DST, address).attribute(libc::RTA_OIF, &VETH.to_ne_bytes());
            m.bytes[ROUTE_PREFIX] = 128;
            m.bytes[ROUTE_TABLE] = libc::RT_TABLE_LOCAL;
        });
    }

    /// Every destination that has no better route is this host. In the main table, so that the
    /// sandbox's own addresses still have a route back.
    fn local_default(&mut self, family: i32) {
        let step = ["route everything here", "route everything here (IPv6)"];
        self.route(step, family, [libc::RTN_LOCAL, libc::RT_SCOPE_HOST], 0, |m| {
            m.attribute(libc::RTA_OIF, &1u32.to_ne_bytes());
        });
    }

    fn gateway(&mut self, family: i32) {
        let gate: &[u8] = if family == libc::AF_INET { &V4[0] } else { &V6[0] };
        // The gate is on the link, whether or not the kernel has already seen the link's carrier.
        let on_link = RTNH_F_ONLINK;
        let kind = [libc::RTN_UNICAST, libc::RT_SCOPE_UNIVERSE];
        let step = ["set the default route", "set the default route (IPv6)"];
        self.route(step, family, kind, on_link, |m| {
            m.attribute(libc::RTA_GATEWAY, gate).attribute(libc::RTA_OIF, &VETH.to_ne_bytes());
        });
    }

    fn route(
        &mut self,
        step: [&'static str; 2],
        family: i32,
        [kind, scope]: [u8; 2],
        flags: u32,
        fill: impl FnOnce(&mut Message),
    ) {
        let table = libc::RT_TABLE_MAIN;
        // family, two prefix lengths, tos, table, protocol, scope, type, flags
        let mut body = [family as u8, 0, 0, 0, table, libc::RTPROT_BOOT, scope, kind, 0, 0, 0, 0];
        body[8..].copy_from_slice(&flags.to_ne_bytes());
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        let mut message = Message::new(libc::RTM_NEWROUTE, flags, &body);
        fill(&mut message);
        self.messages.push((step[usize::from(family != libc::AF_INET)], message));
    }
}

/// Places in a message about a route: behind 16 bytes of header, the second and the fifth.
const ROUTE_PREFIX: usize = 17;
const ROUTE_TABLE: usize = 20;

/// Length, type, sequence number and error code of the first message.
fn acknowledgement(bytes: &[u8]) -> Option<(usize, u16, u32, i32)> {
    let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let kind = u16::from_ne_bytes(bytes.get(4..6)?.try_into().ok()?);
    let length = usize::try_from(word(0)?).ok().filter(|length| *length >= 20)?;
    Some((length, kind, word(8)?, word(16)?.cast_signed()))
}
