//! Steering by a BPF program of the kind `sk_lookup`, which the kernel asks whenever it looks for the
//! socket of a new connection or a datagram in the gate.
//!
//! The program is written here instruction by instruction, so that building needs no compiler for BPF.
//! It reads the switch's word, and chooses a socket of the map by protocol, port and family, or refuses.
//! Invariant: it never lets the ordinary search go on, so nothing in the gate is reachable but by it.
//! Program and maps live as long as the link, whose one descriptor the shim holds.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::super::netns::{VETH, at};
use crate::gate::{DNS, TCP, UDP};
use crate::sys::bpf::{self, Instruction};

/// Places of the sockets in the map: IPv4's; IPv6's is the next.
const TCP_PLACE: i32 = 0;
const DNS_PLACE: i32 = 2;
const UDP_PLACE: i32 = 4;

/// Makes maps and program, and attaches it to the namespace. Answers the switch: word and link.
pub(super) fn steer(
    namespace: BorrowedFd<'_>,
    sockets: [&[OwnedFd]; 3],
) -> io::Result<Vec<OwnedFd>> {
    let map = bpf::socket_map(6).map_err(|e| at("BPF map of sockets", e))?;
    for (base, family) in [TCP_PLACE, DNS_PLACE, UDP_PLACE].into_iter().zip(sockets) {
        for (place, socket) in (base.cast_unsigned()..).zip(family) {
            let put = bpf::put_socket(map.as_fd(), place, socket.as_fd());
            put.map_err(|e| at("socket into the BPF map", e))?;
        }
    }
    let word = bpf::word_map().map_err(|e| at("BPF map of the switch", e))?;
    let program = program(word.as_raw_fd(), map.as_raw_fd());
    let program = bpf::load_sk_lookup(&program).map_err(|e| at("BPF program", e))?;
    let link = bpf::link_sk_lookup(program.as_fd(), namespace);
    Ok(vec![word, link.map_err(|e| at("link of the BPF program", e))?])
}

// linux/bpf_common.h, linux/bpf.h: class, size or operation, mode or kind of source.
const LOAD_WORD: u8 = 0x61;
const STORE_WORD: u8 = 0x63;
const LOAD_ADDRESS: u8 = 0x18;
const MOVE: u8 = 0xb7;
const COPY: u8 = 0xbf;
const ADD: u8 = 0x07;
const AND: u8 = 0x57;
const ALWAYS: u8 = 0x05;
const IF_EQUAL: u8 = 0x15;
const IF_NOT_EQUAL: u8 = 0x55;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// The address is that of a map, or of the first value of one.
const OF_MAP: u8 = 1;
const OF_VALUE: u8 = 2;
// Functions of the kernel.
const MAP_LOOKUP: i32 = 1;
const SK_RELEASE: i32 = 86;
const SK_ASSIGN: i32 = 124;
// struct bpf_sk_lookup
const FAMILY: i16 = 8;
const PROTOCOL: i16 = 12;
const LOCAL_PORT: i16 = 60;
const INTERFACE: i16 = 64;
const FRAME: u8 = 10;

/// Where a jump goes: known when all is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Label {
    Tcp,
    Dns,
    Judge,
    Choose,
    Refuse,
}

/// A program being written.
#[derive(Default)]
struct Assembly {
    out: Vec<Instruction>,
    jumps: Vec<(usize, Label)>,
    labels: Vec<(Label, usize)>,
}

impl Assembly {
    fn put(&mut self, code: u8, to: u8, from: u8, offset: i16, immediate: i32) {
        self.out.push(Instruction { code, registers: from << 4 | to, offset, immediate });
    }

    /// The address of a map, or of its value: two instructions long.
    fn address(&mut self, to: u8, of: u8, map: i32) {
        self.put(LOAD_ADDRESS, to, of, 0, map);
        self.put(0, 0, 0, 0, 0);
    }

    fn jump(&mut self, code: u8, register: u8, value: i32, label: Label) {
        self.jumps.push((self.out.len(), label));
        self.put(code, register, 0, 0, value);
    }

    fn label(&mut self, label: Label) {
        self.labels.push((label, self.out.len()));
    }

    fn finish(mut self) -> Vec<Instruction> {
        for (from, label) in self.jumps {
            let to = self.labels.iter().find(|(l, _)| *l == label).map_or(from, |(_, to)| *to);
            // Some dozens of instructions: no jump is longer than an i16.
            self.out[from].offset = (to as i16) - (from as i16) - 1;
        }
        self.out
    }
}

/// The program, for these two maps.
fn program(word: i32, map: i32) -> Vec<Instruction> {
    let mut a = Assembly::default();
    let (context, open, place, socket) = (6, 7, 8, 9);
    a.put(COPY, context, 1, 0, 0);
    // What comes by the loopback is the gate's own answer to an address that the sandbox made up.
    a.put(LOAD_WORD, 2, context, INTERFACE, 0);
    a.jump(IF_NOT_EQUAL, 2, VETH.cast_signed(), Label::Refuse);
    a.address(1, OF_VALUE, word);
    a.put(LOAD_WORD, open, 1, 0, 0);
    a.put(LOAD_WORD, 3, context, LOCAL_PORT, 0);
    a.put(LOAD_WORD, 2, context, PROTOCOL, 0);
    a.jump(IF_EQUAL, 2, libc::IPPROTO_TCP, Label::Tcp);
    a.jump(IF_NOT_EQUAL, 2, libc::IPPROTO_UDP, Label::Refuse);
    a.jump(IF_EQUAL, 3, 53, Label::Dns);
    a.put(MOVE, place, 0, 0, UDP_PLACE);
    a.put(AND, open, 0, 0, UDP.cast_signed());
    a.jump(ALWAYS, 0, 0, Label::Judge);
    a.label(Label::Dns);
    a.put(MOVE, place, 0, 0, DNS_PLACE);
    a.put(AND, open, 0, 0, DNS.cast_signed());
    a.jump(ALWAYS, 0, 0, Label::Judge);
    a.label(Label::Tcp);
    a.put(MOVE, place, 0, 0, TCP_PLACE);
    a.put(AND, open, 0, 0, (TCP | DNS).cast_signed());
    a.jump(IF_EQUAL, 3, 53, Label::Judge);
    a.put(AND, open, 0, 0, TCP.cast_signed());
    a.label(Label::Judge);
    a.jump(IF_EQUAL, open, 0, Label::Refuse);
    a.put(LOAD_WORD, 2, context, FAMILY, 0);
    a.jump(IF_EQUAL, 2, libc::AF_INET, Label::Choose);
    a.jump(IF_NOT_EQUAL, 2, libc::AF_INET6, Label::Refuse);
    a.put(ADD, place, 0, 0, 1);
    a.label(Label::Choose);
    a.put(STORE_WORD, FRAME, place, -4, 0);
    a.address(1, OF_MAP, map);
    a.put(COPY, 2, FRAME, 0, 0);
    a.put(ADD, 2, 0, 0, -4);
    a.put(CALL, 0, 0, 0, MAP_LOOKUP);
    a.jump(IF_EQUAL, 0, 0, Label::Refuse);
    a.put(COPY, socket, 0, 0, 0);
    a.put(COPY, 1, context, 0, 0);
    a.put(COPY, 2, socket, 0, 0);
    a.put(MOVE, 3, 0, 0, 0);
    a.put(CALL, 0, 0, 0, SK_ASSIGN);
    a.put(COPY, place, 0, 0, 0);
    a.put(COPY, 1, socket, 0, 0);
    a.put(CALL, 0, 0, 0, SK_RELEASE);
    a.jump(IF_NOT_EQUAL, place, 0, Label::Refuse);
    a.put(MOVE, 0, 0, 0, 1);
    a.put(EXIT, 0, 0, 0, 0);
    a.label(Label::Refuse);
    a.put(MOVE, 0, 0, 0, 0);
    a.put(EXIT, 0, 0, 0, 0);
    a.finish()
}
