//! Gates in namespaces of the test's own, both ways. The thread that runs a test is the guest: it sits in
//! the sandbox's end, and holds the gate's sockets as a shim does. Needs root.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::thread::{CapabilitySet, CapabilitySets, UnshareFlags, set_capabilities};

use super::*;
use crate::gate::{self, Gate};

const PATIENCE: Duration = Duration::from_secs(10);
const WAYS: [Way; 2] = [Way::Lookup, Way::Tproxy];

/// What a test gets.
struct World {
    gate: Gate,
    namespace: OwnedFd,
}

/// Runs the test once for each way, as the guest.
fn in_each_world(test: fn(World)) {
    for way in WAYS {
        let run = move || {
            sys::unshare(UnshareFlags::NEWNET).unwrap();
            let own = netns::current().unwrap();
            let (namespace, parts) = netns::new_gate(way).unwrap();
            let gate = parts.assemble().unwrap();
            netns::connect_own(namespace.as_fd(), own.as_fd()).unwrap();
            netns::enter(own.as_fd()).unwrap();
            test(World { gate, namespace });
        };
        // Its namespaces end with it.
        let done = std::thread::Builder::new().name(format!("{way:?}")).spawn(run).unwrap().join();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

/// Every capability of this thread is gone, as a shim's is.
fn drop_capabilities() {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).unwrap();
    let refused = netns::new_gate(Way::Lookup).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
}

fn until<T>(what: &str, mut attempt: impl FnMut() -> io::Result<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Ok(done) => return done,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < end => {
                std::thread::yield_now();
            }
            Err(e) => panic!("{what}: {e}"),
        }
    }
}

fn connect(to: &str) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&to.parse().unwrap(), PATIENCE)
}

fn index(to: &SocketAddr) -> usize {
    usize::from(to.is_ipv6())
}

/// A guest's UDP socket that hears only from `to`.
fn datagrams_to(to: SocketAddr) -> UdpSocket {
    let any: IpAddr =
        if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.connect(to).unwrap();
    socket
}

/// What comes back to a datagram: bytes, or the kernel's refusal.
fn ask(to: &str) -> io::Result<Vec<u8>> {
    let socket = datagrams_to(to.parse().unwrap());
    socket.send(b"?")?;
    let mut answer = [0; 16];
    let len = socket.recv(&mut answer)?;
    Ok(answer[..len].to_vec())
}

fn is_refused<T: std::fmt::Debug>(result: io::Result<T>, what: &str) {
    let error = result.expect_err(what);
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{what}");
}

#[test]
fn every_tcp_port_of_every_address_arrives_with_its_destination() {
    in_each_world(|World { gate, .. }| {
        gate.switch.set(true, false, false).unwrap();
        let asked = [
            ("203.0.113.7:1", "203.0.113.7:1"),
            ("203.0.113.7:22", "203.0.113.7:22"),
            ("8.8.8.8:53", "8.8.8.8:53"),
            ("203.0.113.7:443", "203.0.113.7:443"),
            ("203.0.113.7:65535", "203.0.113.7:65535"),
            ("169.254.169.254:80", "169.254.169.254:80"),
            ("192.168.1.1:8080", "192.168.1.1:8080"),
            // The gate itself; the broker refuses that.
            ("10.254.0.1:1", "10.254.0.1:1"),
            ("[fdb1:bac::1]:1", "[fdb1:bac::1]:1"),
            ("[2001:db8::7]:443", "[2001:db8::7]:443"),
            ("[fd00:ec2::254]:80", "[fd00:ec2::254]:80"),
            // On the wire this is IPv4.
            ("[::ffff:203.0.113.7]:443", "203.0.113.7:443"),
        ];
        for (to, destination) in asked {
            let mut guest = connect(to).unwrap_or_else(|e| panic!("{to}: {e}"));
            let destination: SocketAddr = destination.parse().unwrap();
            let listener = &gate.tcp[index(&destination)];
            let (mut broker, from) = until(to, || listener.accept());
            assert_eq!(broker.local_addr().unwrap(), destination, "{to}");
            let guest_end = guest.local_addr().unwrap();
            assert_eq!(from.port(), guest_end.port());
            broker.set_nonblocking(false).unwrap();
            guest.write_all(b"hello").unwrap();
            let mut heard = [0; 5];
            broker.read_exact(&mut heard).unwrap();
            broker.write_all(b"world").unwrap();
            guest.read_exact(&mut heard).unwrap();
            assert_eq!(&heard, b"world");
        }
    });
}

#[test]
fn the_switch_refuses_at_once_what_is_closed_and_needs_no_privilege() {
    in_each_world(|World { gate, .. }| {
        drop_capabilities();
        let open = |to: &str| connect(to).map(drop);
        // As it is born.
        is_refused(open("203.0.113.7:443"), "born closed");
        is_refused(ask("203.0.113.7:53"), "born closed");
        is_refused(ask("203.0.113.7:443"), "born closed");
        // Each step opens something and closes something else.
        for bits in [1u32, 2, 4, 3, 6, 5, 7, 0, 7, 0, 1] {
            let (tcp, dns, udp) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
            gate.switch.set(tcp, dns, udp).unwrap();
            for host in ["203.0.113.7", "[2001:db8::7]", "10.254.0.1", "[fdb1:bac::1]"] {
                let said = |what: &str| format!("{what} to {host} with {bits:03b}");
                for (port, is_open) in [(443, tcp), (53, tcp || dns)] {
                    let to = format!("{host}:{port}");
                    let result = open(&to);
                    if is_open {
                        result.unwrap_or_else(|e| panic!("{}: {e}", said("TCP")));
                        let listener = &gate.tcp[usize::from(host.starts_with('['))];
                        until("accept", || listener.accept());
                    } else {
                        is_refused(result, &said("TCP"));
                    }
                }
                let sockets = [(53, dns, &gate.dns), (443, udp, &gate.udp)];
                for (port, is_open, sockets) in sockets {
                    let to = format!("{host}:{port}");
                    if !is_open {
                        is_refused(ask(&to), &said("UDP"));
                        continue;
                    }
                    let to: SocketAddr = to.parse().unwrap();
                    let guest = datagrams_to(to);
                    guest.send(b"x").unwrap();
                    let mut buffer = [0; 16];
                    let got = until("UDP", || gate::receive(&sockets[index(&to)], &mut buffer));
                    assert_eq!((got.to, got.len), (to, 1), "{}", said("UDP"));
                }
            }
        }
        // Nothing was steered to the wrong socket.
        let mut buffer = [0; 16];
        for socket in gate.dns.iter().chain(&gate.udp) {
            let more = gate::receive(socket, &mut buffer).unwrap_err();
            assert_eq!(more.kind(), io::ErrorKind::WouldBlock);
        }
    });
}

#[test]
fn an_established_flow_outlives_the_switch() {
    in_each_world(|World { gate, .. }| {
        gate.switch.set(true, false, false).unwrap();
        let mut guest = connect("203.0.113.7:443").unwrap();
        let (mut broker, _) = until("accept", || gate.tcp[0].accept());
        gate.switch.set(false, false, false).unwrap();
        broker.write_all(b"x").unwrap();
        guest.read_exact(&mut [0]).unwrap();
        // Cutting it is the broker's; the guest sees that.
        rustix::net::sockopt::set_socket_linger(&broker, Some(Duration::ZERO)).unwrap();
        drop(broker);
        assert_eq!(guest.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    });
}

#[test]
fn name_servers_at_any_address_answer_from_where_they_were_asked() {
    in_each_world(|World { gate, .. }| {
        gate.switch.set(false, true, false).unwrap();
        drop_capabilities();
        let servers =
            ["10.254.0.1", "8.8.8.8", "169.254.169.253", "[fdb1:bac::1]", "[2001:4860:4860::8888]"];
        for server in servers {
            let to: SocketAddr = format!("{server}:53").parse().unwrap();
            let guest = datagrams_to(to);
            guest.send(b"question").unwrap();
            let mut buffer = [0; 512];
            let socket = &gate.dns[index(&to)];
            let got = until(server, || gate::receive(socket, &mut buffer));
            assert_eq!((got.to, &buffer[..got.len], got.cut), (to, &b"question"[..], false));
            assert_eq!(got.from.port(), guest.local_addr().unwrap().port());
            gate::answer(socket, b"answer", got.from, got.to.ip()).unwrap();
            // A connected socket takes nothing from elsewhere.
            let len = guest.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..len], b"answer");
        }
    });
}

#[test]
fn relayed_datagrams_of_any_size_are_answered_from_any_address_and_port() {
    in_each_world(|World { gate, .. }| {
        gate.switch.set(false, false, true).unwrap();
        drop_capabilities();
        for host in ["203.0.113.7:443", "[2001:db8::7]:443", "203.0.113.7:1", "10.254.0.1:9999"] {
            let to: SocketAddr = host.parse().unwrap();
            let guest = datagrams_to(to);
            // Odd and even, empty, over the link's size, and the most that UDP takes.
            for length in [0usize, 1, 2, 1471, 1472, 4001, 65_507 - 20] {
                let sent: Vec<u8> = (0..length).map(|n| (n % 251) as u8).collect();
                guest.send(&sent).unwrap();
                let mut buffer = vec![0; 65_536];
                let socket = &gate.udp[index(&to)];
                let got = until(host, || gate::receive(socket, &mut buffer));
                assert_eq!((got.to, got.cut), (to, false));
                assert_eq!(&buffer[..got.len], sent);
                gate::answer_as(&gate.raw[index(&to)], &sent, got.from, got.to).unwrap();
                let len = guest.recv(&mut buffer).unwrap();
                assert_eq!(&buffer[..len], sent, "{host} {length}");
            }
        }
        // From a port that the guest did not ask: only an unconnected socket hears that.
        let guest = UdpSocket::bind("0.0.0.0:0").unwrap();
        guest.set_read_timeout(Some(PATIENCE)).unwrap();
        let there = SocketAddr::new(
            Ipv4Addr::new(10, 254, 0, 2).into(),
            guest.local_addr().unwrap().port(),
        );
        let from: SocketAddr = "198.51.100.1:7".parse().unwrap();
        gate::answer_as(&gate.raw[0], b"x", there, from).unwrap();
        assert_eq!(guest.recv_from(&mut [0; 4]).unwrap(), (1, from));
        let mixed = gate::answer_as(&gate.raw[0], b"x", there, "[2001:db8::1]:7".parse().unwrap());
        assert_eq!(mixed.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    });
}

#[test]
fn a_datagram_that_does_not_fit_says_so() {
    in_each_world(|World { gate, .. }| {
        gate.switch.set(false, true, false).unwrap();
        datagrams_to("8.8.8.8:53".parse().unwrap()).send(&[7; 100]).unwrap();
        let mut buffer = [0; 10];
        let got = until("receive", || gate::receive(&gate.dns[0], &mut buffer));
        assert_eq!((got.len, got.cut), (10, true));
    });
}

#[test]
fn servers_inside_keep_their_ports_and_take_none_of_the_worlds() {
    in_each_world(|World { gate, .. }| {
        gate.switch.set(true, false, false).unwrap();
        for port in [8080, 443, 1] {
            let server = TcpListener::bind(("0.0.0.0", port)).unwrap();
            drop(connect(&format!("127.0.0.1:{port}")).unwrap());
            let (inside, _) = server.accept().unwrap();
            assert_eq!(inside.local_addr().unwrap(), format!("127.0.0.1:{port}").parse().unwrap());
            let _guest = connect(&format!("203.0.113.7:{port}")).unwrap();
            let (outside, _) = until("accept", || gate.tcp[0].accept());
            let asked = format!("203.0.113.7:{port}").parse().unwrap();
            assert_eq!(outside.local_addr().unwrap(), asked);
            server.set_nonblocking(true).unwrap();
            assert_eq!(server.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        }
    });
}

/// Also what comes from an address that the guest made up must not be answered into the gate itself.
#[test]
fn made_up_sources_reach_nobody_and_turn_no_switch() {
    in_each_world(|World { gate, .. }| {
        gate.switch.set(false, true, true).unwrap();
        // The kernel asks for its neighbour from an address that is its own, not from a made-up one.
        is_refused(connect("[fdb1:bac::1]:443"), "closed");
        let made_up = rustix::net::socket(AddressFamily::INET6, SocketType::DGRAM, None).unwrap();
        sys::net::set_option(made_up.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT, 1)
            .unwrap();
        let source: SocketAddr = "[2001:db8::5]:1".parse().unwrap();
        rustix::net::bind(&made_up, &SocketAddrAny::from(source)).unwrap();
        let made_up = UdpSocket::from(made_up);
        made_up.send_to(b"?", "[2001:db8::53]:53").unwrap();
        let mut buffer = [0; 16];
        let got = until("receive", || gate::receive(&gate.dns[1], &mut buffer));
        assert_eq!(got.from, source);
        gate::answer(&gate.dns[1], b"!", got.from, got.to.ip()).unwrap();
        // The answer ends in the gate: no socket there takes it.
        datagrams_to("[2001:db8::7]:9".parse().unwrap()).send(b"next").unwrap();
        let got = until("receive", || gate::receive(&gate.udp[1], &mut buffer));
        assert_eq!((&buffer[..got.len], got.to.port()), (&b"next"[..], 9));
        gate.switch.set(false, false, false).unwrap();
        is_refused(connect("203.0.113.7:443"), "still closed");
    });
}

/// What the kernel has been told of what the socket sent.
fn told(raw: &OwnedFd) -> rustix::io::Result<()> {
    let mut polled = [rustix::event::PollFd::new(raw, rustix::event::PollFlags::empty())];
    let limit = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&limit)).unwrap();
    rustix::net::sockopt::socket_error(raw).unwrap()
}

#[test]
fn other_protocols_leave_nothing() {
    in_each_world(|World { gate, namespace }| {
        gate.switch.set(true, true, true).unwrap();
        // Positive control: a raw socket does send, and its UDP arrives.
        for (protocol, arrives) in [(17, true), (1, false), (47, false), (132, false), (4, false)] {
            let number = std::num::NonZeroU32::new(protocol).map(Protocol::from_raw);
            let raw = rustix::net::socket(AddressFamily::INET, SocketType::RAW, number).unwrap();
            sys::net::set_option(raw.as_fd(), libc::IPPROTO_IP, libc::IP_RECVERR, 1).unwrap();
            // As UDP: port 9 to port 9, 9 bytes, no checksum. As ICMP: an echo request, roughly.
            let packet = [8, 0, 0, 9, 0, 9, 0, 0, b'x'];
            let to: SocketAddr = "203.0.113.7:0".parse().unwrap();
            rustix::net::connect(&raw, &SocketAddrAny::from(to)).unwrap();
            rustix::net::send(&raw, &packet, rustix::net::SendFlags::empty()).unwrap();
            let mut buffer = [0; 16];
            if arrives {
                let got = until("receive", || gate::receive(&gate.udp[0], &mut buffer));
                assert_eq!(got.to, "203.0.113.7:9".parse().unwrap());
            } else {
                // What is sent later has arrived: so would the packet have.
                datagrams_to("203.0.113.7:10".parse().unwrap()).send(b"y").unwrap();
                let got = until("receive", || gate::receive(&gate.udp[0], &mut buffer));
                assert_eq!(got.to.port(), 10, "protocol {protocol}");
                // And it was refused at once. (What pings are told is another test.)
                if protocol != 1 {
                    let told = told(&raw);
                    assert_eq!(told, Err(rustix::io::Errno::NOPROTOOPT), "protocol {protocol}");
                }
            }
        }
        // There is nowhere to go from the gate.
        netns::enter(namespace.as_fd()).unwrap();
        let devices = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        let mut names: Vec<_> =
            devices.lines().skip(2).filter_map(|l| l.split(':').next()).map(str::trim).collect();
        names.sort_unstable();
        // Tunnel devices of the kernel's that every new namespace has lead nowhere: they are down.
        names.retain(|name| !name.ends_with('0') || *name == "gate0");
        assert_eq!(names, ["gate0", "lo"]);
    });
}

#[test]
fn pings_are_refused_at_once() {
    in_each_world(|World { gate, .. }| {
        gate.switch.set(true, true, true).unwrap();
        let pings = [
            (AddressFamily::INET, ipproto::ICMP, 8, "203.0.113.7:0"),
            (AddressFamily::INET, ipproto::ICMP, 8, "10.254.0.1:0"),
            (AddressFamily::INET6, ipproto::ICMPV6, 128, "[2001:db8::7]:0"),
        ];
        for (family, protocol, echo, to) in pings {
            let raw = rustix::net::socket(family, SocketType::RAW, Some(protocol)).unwrap();
            let (level, option) = if family == AddressFamily::INET {
                (libc::IPPROTO_IP, libc::IP_RECVERR)
            } else {
                (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)
            };
            sys::net::set_option(raw.as_fd(), level, option, 1).unwrap();
            let to: SocketAddr = to.parse().unwrap();
            rustix::net::connect(&raw, &SocketAddrAny::from(to)).unwrap();
            // ICMPv6's checksum is the kernel's; this one of IPv4's is right.
            let packet = [echo, 0, 0xf7, 0xff, 0, 0, 0, 0];
            rustix::net::send(&raw, &packet, rustix::net::SendFlags::empty()).unwrap();
            let told = told(&raw);
            let prohibited = [rustix::io::Errno::HOSTUNREACH, rustix::io::Errno::ACCESS];
            assert!(told.is_err_and(|e| prohibited.contains(&e)), "{to}: {told:?}");
        }
    });
}

#[test]
fn nothing_outlives_the_gate() {
    in_each_world(|World { gate, .. }| {
        gate.switch.set(true, true, true).unwrap();
        let Gate { tcp, switch, .. } = gate;
        drop(connect("203.0.113.7:443").unwrap());
        until("accept", || tcp[0].accept());
        if let Some(link) = switch.link_id() {
            assert!(sys::bpf::link_exists(link).unwrap());
            drop(switch);
            let end = Instant::now() + PATIENCE;
            while sys::bpf::link_exists(link).unwrap() {
                assert!(Instant::now() < end, "the link is still there");
                std::thread::yield_now();
            }
        } else {
            drop(tcp);
        }
        // The sandbox's end still stands; whatever it sends is refused.
        is_refused(connect("203.0.113.7:443"), "after the gate");
    });
}
