//! Rules of nf_tables in the gate's own packet filter, written over netlink: no program is needed for it.
//! They refuse pings at once, and where BPF is forbidden they steer.
//!
//! To steer, they hand packets that came in by the veth to the sockets (TPROXY), if the set `open` has the
//! kind. Only the gate's own socket can change that set: rules of the output hook watch for its packets
//! from the loopback to the loopback, act on the set, and swallow them. Invariant: nothing from outside
//! can look like such a packet, since the kernel takes no packet from the veth that says it is from
//! 127.0.0.1, and so sends no answer there.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::OwnedFd;

use super::super::netns::{Batch, Message, VETH, at};
use super::{DNS_PORT, PORT};
use crate::gate::{DNS, KNOCK_CLOSE, KNOCK_OPEN, TCP, UDP};

/// Writes the rules that refuse pings: "prohibited", where the kernel alone would leave the asker waiting.
pub(super) fn refuse_pings() -> io::Result<()> {
    let mut batch = begin();
    add_refusals(&mut batch);
    batch.add("batch of rules", begin_or_end(libc::NFNL_MSG_BATCH_END));
    batch.send()
}

fn begin() -> Batch {
    let mut batch = Batch::filter();
    batch.add("batch of rules", begin_or_end(libc::NFNL_MSG_BATCH_BEGIN));
    batch.add("table of rules", table());
    batch
}

/// Pings are all of ICMP that the kernel would answer as if the world were here. Errors must pass.
fn add_refusals(batch: &mut Batch) {
    batch.add("chain of rules", chain(LOCAL, LOCAL_IN, 0));
    for (protocol, echo) in [(libc::IPPROTO_ICMP, 8), (libc::IPPROTO_ICMPV6, 128)] {
        let rule = rule(LOCAL, |m| {
            m.meta_is(META_L4PROTO, &[protocol as u8]).load(TRANSPORT, 0, 1).is(&[echo]);
            m.expression(b"reject\0", |m| {
                m.number(1, REJECT_ICMPX).attribute(2, &[ADMIN_PROHIBITED]);
            });
        });
        batch.add("rule against pings", rule);
    }
}

/// Writes the rules, those against pings among them. Answers the switch: the socket that knocks.
pub(super) fn steer(families: usize) -> io::Result<Vec<OwnedFd>> {
    let mut batch = begin();
    add_refusals(&mut batch);
    batch.add("set of open kinds", open_set());
    batch.add("chain of rules", chain(IN, PREROUTING, MANGLE));
    batch.add("chain of rules", chain(OUT, LOCAL_OUT, 0));
    for operation in [ADD, DELETE] {
        batch.add("rule of the switch", knock(operation));
    }
    for family in [NFPROTO_IPV4, NFPROTO_IPV6].into_iter().take(families) {
        for rule in steering(family) {
            batch.add("rule that steers (TPROXY)", rule);
        }
    }
    batch.add("batch of rules", begin_or_end(libc::NFNL_MSG_BATCH_END));
    batch.send()?;
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|e| at("switch's socket", e))?;
    Ok(vec![socket.into()])
}

// linux/netfilter.h, linux/netfilter/nf_tables.h
const NFPROTO_INET: u8 = 1;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;
const PREROUTING: u32 = 0;
const LOCAL_IN: u32 = 1;
const LOCAL_OUT: u32 = 3;
const MANGLE: i32 = -150;
const TABLE: &[u8] = b"gate\0";
const SET: &[u8] = b"open\0";
const IN: &[u8] = b"in\0";
const OUT: &[u8] = b"out\0";
const LOCAL: &[u8] = b"local\0";
const NEWTABLE: u16 = 0;
const NEWCHAIN: u16 = 3;
const NEWRULE: u16 = 6;
const NEWSET: u16 = 9;
const SET_EVAL: u32 = 0x20;
const ADD: u32 = 0;
const DELETE: u32 = 2;
const META_IIF: u32 = 4;
const META_NFPROTO: u32 = 15;
const META_L4PROTO: u32 = 16;
const NETWORK: u32 = 1;
const TRANSPORT: u32 = 2;
/// A register of 16 bytes, then one that does not overlap with it.
const R1: u32 = 1;
const R2: u32 = 2;
const VERDICT: u32 = 0;
const REJECT_ICMPX: u32 = 2;
const ADMIN_PROHIBITED: u8 = 3;
const DROP: u32 = 0;
const ACCEPT: u32 = 1;

fn message(kind: u16, flags: i32) -> Message {
    let kind = (libc::NFNL_SUBSYS_NFTABLES as u16) << 8 | kind;
    Message::new(kind, flags | libc::NLM_F_CREATE, &[NFPROTO_INET, 0, 0, 0])
}

fn begin_or_end(kind: i32) -> Message {
    let subsystem = (libc::NFNL_SUBSYS_NFTABLES as u16).to_be_bytes();
    Message::unanswered(kind as u16, &[0, 0, subsystem[0], subsystem[1]])
}

fn table() -> Message {
    let mut m = message(NEWTABLE, 0);
    m.attribute(1, TABLE);
    m
}

/// Keys are kinds: two bytes, as the port of a knock.
fn open_set() -> Message {
    let mut m = message(NEWSET, 0);
    m.attribute(1, TABLE).attribute(2, SET);
    // flags, type of key, its length, number within the batch
    for (attribute, value) in [(3, SET_EVAL), (4, 13), (5, 2), (10, 1)] {
        m.number(attribute, value);
    }
    m
}

fn chain(name: &[u8], hook: u32, priority: i32) -> Message {
    let mut m = message(NEWCHAIN, 0);
    m.attribute(1, TABLE).attribute(3, name);
    m.nest(NESTED | 4, |m| {
        m.number(1, hook).number(2, priority.cast_unsigned());
    });
    m.number(5, ACCEPT).attribute(7, b"filter\0");
    m
}

const NESTED: u16 = libc::NLA_F_NESTED as u16;

fn rule(chain: &[u8], fill: impl FnOnce(&mut Message)) -> Message {
    let mut m = message(NEWRULE, libc::NLM_F_APPEND);
    m.attribute(1, TABLE).attribute(2, chain).nest(NESTED | 4, fill);
    m
}

/// Expressions of rules, one after the other.
impl Message {
    /// A 32-bit attribute in network order, as nf_tables wants them.
    fn number(&mut self, kind: u16, value: u32) -> &mut Self {
        self.attribute(kind, &value.to_be_bytes())
    }

    fn expression(&mut self, name: &[u8], fill: impl FnOnce(&mut Self)) -> &mut Self {
        self.nest(NESTED | 1, |m| {
            m.attribute(1, name).nest(NESTED | 2, fill);
        })
    }

    fn is(&mut self, value: &[u8]) -> &mut Self {
        self.expression(b"cmp\0", |m| {
            m.number(1, R1).number(2, 0).nest(NESTED | 3, |m| {
                m.attribute(1, value);
            });
        })
    }

    fn meta_is(&mut self, key: u32, value: &[u8]) -> &mut Self {
        self.expression(b"meta\0", |m| {
            m.number(1, R1).number(2, key);
        })
        .is(value)
    }

    fn load(&mut self, base: u32, offset: u32, length: u32) -> &mut Self {
        self.expression(b"payload\0", |m| {
            m.number(1, R1).number(2, base).number(3, offset).number(4, length);
        })
    }

    fn constant(&mut self, register: u32, value: &[u8]) -> &mut Self {
        self.expression(b"immediate\0", |m| {
            m.number(1, register).nest(NESTED | 2, |m| {
                m.attribute(1, value);
            });
        })
    }

    fn verdict(&mut self, code: u32) -> &mut Self {
        self.expression(b"immediate\0", |m| {
            m.number(1, VERDICT).nest(NESTED | 2, |m| {
                m.nest(NESTED | 2, |m| {
                    m.number(1, code);
                });
            });
        })
    }

    fn if_open(&mut self, kind: u32) -> &mut Self {
        self.constant(R1, &(kind as u16).to_be_bytes()).expression(b"lookup\0", |m| {
            m.attribute(1, SET).number(2, R1).number(5, 0);
        })
    }
}

/// Changes the set by the port of a packet from the loopback, and swallows the packet.
fn knock(operation: u32) -> Message {
    let to = if operation == ADD { KNOCK_OPEN } else { KNOCK_CLOSE };
    rule(OUT, |m| {
        m.meta_is(META_NFPROTO, &[NFPROTO_IPV4]).meta_is(META_L4PROTO, &[libc::IPPROTO_UDP as u8]);
        m.load(NETWORK, 12, 4).is(&Ipv4Addr::LOCALHOST.octets());
        m.load(NETWORK, 16, 4).is(&to.octets());
        m.load(TRANSPORT, 2, 2).expression(b"dynset\0", |m| {
            m.attribute(1, SET).number(3, operation).number(4, R1);
        });
        m.verdict(DROP);
    })
}

/// The rules for packets of one family.
fn steering(family: u8) -> Vec<Message> {
    let local: Vec<u8> = if family == NFPROTO_IPV4 {
        Ipv4Addr::LOCALHOST.octets().to_vec()
    } else {
        Ipv6Addr::LOCALHOST.octets().to_vec()
    };
    let start = |m: &mut Message, protocol: i32| {
        m.meta_is(META_IIF, &VETH.to_ne_bytes()).meta_is(META_NFPROTO, &[family]);
        m.meta_is(META_L4PROTO, &[protocol as u8]);
    };
    let to_dns = |m: &mut Message| {
        m.load(TRANSPORT, 2, 2).is(&DNS_PORT.to_be_bytes());
    };
    let hand_over = |m: &mut Message, port: u16| {
        m.constant(R1, &local).constant(R2, &port.to_be_bytes()).expression(b"tproxy\0", |m| {
            m.number(1, u32::from(family)).number(2, R1).number(3, R2);
        });
        m.verdict(ACCEPT);
    };
    let (tcp, udp) = (libc::IPPROTO_TCP, libc::IPPROTO_UDP);
    vec![
        rule(IN, |m| {
            start(m, tcp);
            m.if_open(TCP);
            hand_over(m, PORT);
        }),
        rule(IN, |m| {
            start(m, tcp);
            to_dns(m);
            m.if_open(DNS);
            hand_over(m, PORT);
        }),
        rule(IN, |m| {
            start(m, udp);
            to_dns(m);
            m.if_open(DNS);
            hand_over(m, DNS_PORT);
        }),
        // Closed DNS is refused; it is not for the relay.
        rule(IN, |m| {
            start(m, udp);
            to_dns(m);
            m.verdict(ACCEPT);
        }),
        rule(IN, |m| {
            start(m, udp);
            m.if_open(UDP);
            hand_over(m, PORT);
        }),
    ]
}
