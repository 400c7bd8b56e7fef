//! DNS messages as bytes: what the guest asks, what it is told, what is asked upstream, what came back.
//!
//! Owns every look at bytes of the wire; both directions are untrusted. Invariant: an address is taken
//! from an answer only when its record belongs to the name that was asked, or to the chain of aliases
//! that begins there; nothing else of a message is ever kept. An answer is never longer than its
//! receiver said it would take.
//!
//! Called by `stub` (guest's side), `client` (upstream's side) and the fuzz targets.

use std::net::IpAddr;

use hickory_proto::op::{Header, Message, MessageType, OpCode, Query};
use hickory_proto::rr::{DNSClass, Name as WireName, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};

use super::Family;
use crate::canonical::Name;

/// What we say we take and what we send at most by datagram: fits every path unfragmented.
pub const DATAGRAM: usize = 1232;
/// What a client without EDNS takes.
const PLAIN: usize = 512;
/// Most aliases that are followed.
const CHAIN: usize = 16;
/// Most addresses that are taken from one answer.
const ADDRESSES: usize = 64;
/// Most addresses that are told to the guest at once.
const TOLD: usize = 16;
/// Longest explanation, bytes.
const EXPLAINED: usize = 220;

/// Codes of a DNS answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rcode {
    /// Answered.
    NoError = 0,
    /// The query is malformed.
    FormErr = 1,
    /// The name servers failed.
    ServFail = 2,
    /// The name does not exist (or may not be known).
    NxDomain = 3,
    /// An operation that is not done here.
    NotImp = 4,
    /// Not answered for you.
    Refused = 5,
    /// EDNS of a version that is not spoken here.
    BadVers = 16,
}

/// The one question of a guest's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Goes back as it came.
    pub id: u16,
    /// The name, label by label as on the wire, in the guest's spelling: goes back as it came.
    name: Vec<u8>,
    /// The name with dots, unchecked. None if a label holds a dot or the name is the root.
    pub dotted: Option<Vec<u8>>,
    /// The type.
    pub kind: u16,
    /// The class.
    pub class: u16,
    recursion_desired: bool,
    checking_disabled: bool,
    /// What the guest takes, if it speaks EDNS.
    edns: Option<u16>,
}

/// A guest's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// Not a query: an answer to it could only start a loop.
    Noise,
    /// Answered without looking at what is asked: the ready bytes.
    Unserved(Vec<u8>),
    /// A question.
    Question(Question),
}

/// Reads a guest's message.
#[must_use]
pub fn hear(bytes: &[u8]) -> Heard {
    let Ok(header) = Header::read(&mut BinDecoder::new(bytes)) else { return Heard::Noise };
    if header.message_type != MessageType::Query {
        return Heard::Noise;
    }
    if header.op_code != OpCode::Query {
        return Heard::Unserved(bare(bytes, Rcode::NotImp));
    }
    let Ok(message) = Message::from_vec(bytes) else {
        return Heard::Unserved(bare(bytes, Rcode::FormErr));
    };
    let [query] = message.queries.as_slice() else {
        return Heard::Unserved(bare(bytes, Rcode::FormErr));
    };
    let question = Question {
        id: header.id,
        name: labels(query.name()),
        dotted: dotted(query.name()),
        kind: query.query_type().into(),
        class: query.query_class().into(),
        recursion_desired: header.recursion_desired,
        checking_disabled: header.checking_disabled,
        edns: message.edns.as_ref().map(|edns| edns.max_payload()),
    };
    if message.edns.as_ref().is_some_and(|edns| edns.version() != 0) {
        return Heard::Unserved(question.answer(&Told::just(Rcode::BadVers), DATAGRAM));
    }
    Heard::Question(question)
}

/// A header alone: for messages of which nothing else could be read.
fn bare(bytes: &[u8], rcode: Rcode) -> Vec<u8> {
    let mut out = vec![0; 12];
    if let (Some(id), Some(flags)) = (bytes.get(..2), bytes.get(2)) {
        out[..2].copy_from_slice(id);
        // It is an answer; operation and "recursion desired" go back as they came.
        out[2] = 0x80 | (flags & 0x79);
    }
    out[3] = 0x80 | (rcode as u8 & 0x0f);
    out
}

/// What a guest is told.
#[derive(Debug, Clone)]
pub struct Told<'a> {
    /// The code.
    pub rcode: Rcode,
    /// Addresses of the asked family.
    pub addresses: &'a [IpAddr],
    /// For how long, seconds.
    pub ttl: u32,
    /// Why, for clients that speak EDNS: the code of RFC 8914 and a sentence.
    pub why: Option<(u16, String)>,
}

impl Told<'_> {
    /// A code and nothing else.
    #[must_use]
    pub fn just(rcode: Rcode) -> Self {
        Self { rcode, addresses: &[], ttl: 0, why: None }
    }
}

impl Question {
    /// Whether it asks for the addresses of a name, and of which family.
    #[must_use]
    pub fn family(&self) -> Option<Family> {
        match RecordType::from(self.kind) {
            RecordType::A => Some(Family::V4),
            RecordType::AAAA => Some(Family::V6),
            _ => None,
        }
    }

    /// Whether it asks in the class of the Internet.
    #[must_use]
    pub fn is_internet(&self) -> bool {
        DNSClass::from(self.class) == DNSClass::IN
    }

    /// The type in words, for audit lines.
    #[must_use]
    pub fn kind_name(&self) -> String {
        RecordType::from(self.kind).to_string()
    }

    /// How long an answer by datagram may be.
    #[must_use]
    pub fn datagram_limit(&self) -> usize {
        usize::from(self.edns.unwrap_or(0)).clamp(PLAIN, DATAGRAM)
    }

    /// The answer, not longer than `limit`. What does not fit is left out and marked so.
    #[must_use]
    pub fn answer(&self, told: &Told<'_>, limit: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(128);
        let rcode = told.rcode as u8;
        out.extend(self.id.to_be_bytes());
        out.push(0x80 | u8::from(self.recursion_desired));
        out.push(0x80 | (u8::from(self.checking_disabled) << 4) | (rcode & 0x0f));
        // One question; the other counts are put in at the end.
        out.extend([0, 1, 0, 0, 0, 0, 0, 0]);
        out.extend(&self.name);
        out.extend(self.kind.to_be_bytes());
        out.extend(self.class.to_be_bytes());

        let options = self.options(told, limit.saturating_sub(out.len()));
        let mut answers = 0u16;
        for address in told.addresses.iter().take(TOLD) {
            let mut record = Vec::with_capacity(28);
            // The owner is the name of the question, which begins right after the header.
            record.extend([0xc0, 12]);
            let data: &[u8] = match address {
                IpAddr::V4(v4) => {
                    record.extend([0, 1]);
                    &v4.octets()
                }
                IpAddr::V6(v6) => {
                    record.extend([0, 28]);
                    &v6.octets()
                }
            };
            record.extend([0, 1]);
            record.extend(told.ttl.to_be_bytes());
            record.extend(length(data.len()));
            record.extend(data);
            if out.len() + record.len() + options.len() > limit {
                out[2] |= 0x02;
                break;
            }
            out.extend(record);
            answers += 1;
        }
        out[6..8].copy_from_slice(&answers.to_be_bytes());
        out[11] = u8::from(!options.is_empty());
        out.extend(options);
        out
    }

    /// The OPT record, for who sent one.
    fn options(&self, told: &Told<'_>, room: usize) -> Vec<u8> {
        const FIXED: usize = 11;
        if self.edns.is_none() || room < FIXED {
            return Vec::new();
        }
        let mut out = vec![0, 0, 41];
        out.extend(length(DATAGRAM));
        out.extend([told.rcode as u8 >> 4, 0, 0, 0]);
        let mut data = Vec::new();
        if let Some((code, text)) = &told.why {
            // Text of ours over canonical names: ASCII, so that a cut never splits a character.
            let text = text.as_bytes();
            let text = &text[..text.len().min(EXPLAINED)];
            if FIXED + 6 + text.len() <= room {
                data.extend([0, 15]);
                data.extend(length(2 + text.len()));
                data.extend(code.to_be_bytes());
                data.extend(text);
            }
        }
        out.extend(length(data.len()));
        out.extend(data);
        out
    }
}

/// Lengths here are below the limits above.
fn length(of: usize) -> [u8; 2] {
    u16::try_from(of).unwrap_or(u16::MAX).to_be_bytes()
}

/// A name as it stands on the wire, without compression.
fn labels(name: &WireName) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len() + 1);
    for label in name.iter() {
        // A label has at most 63 bytes, or the decoder had refused it.
        out.push(u8::try_from(label.len()).unwrap_or(0));
        out.extend(label);
    }
    out.push(0);
    out
}

/// A name with dots. A dot *inside* a label would change its meaning, so there is none then.
fn dotted(name: &WireName) -> Option<Vec<u8>> {
    let labels: Vec<&[u8]> = name.iter().collect();
    if labels.is_empty() || labels.iter().any(|label| label.contains(&b'.')) {
        return None;
    }
    Some(labels.join(&b'.'))
}

/// A question for a name server.
///
/// `spelling` is the name, in the random mix of upper and lower case that the answer has to repeat.
#[must_use]
pub fn ask(id: u16, spelling: &str, family: Family, edns: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    out.extend(id.to_be_bytes());
    // Recursion desired; one question; perhaps one additional record.
    out.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(edns)]);
    for label in spelling.split('.') {
        out.push(u8::try_from(label.len()).unwrap_or(0));
        out.extend(label.as_bytes());
    }
    out.push(0);
    out.extend(u16::from(record_type(family)).to_be_bytes());
    out.extend([0, 1]);
    if edns {
        out.extend([0, 0, 41]);
        out.extend(length(DATAGRAM));
        out.extend([0; 6]);
    }
    out
}

fn record_type(family: Family) -> RecordType {
    match family {
        Family::V4 => RecordType::A,
        Family::V6 => RecordType::AAAA,
    }
}

/// What a name server answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Addresses of the name, as they came: not filtered yet.
    Found {
        /// At least one.
        addresses: Vec<IpAddr>,
        /// The smallest TTL of the chain, seconds.
        ttl: u32,
    },
    /// The name has none.
    None {
        /// Whether the name exists at all.
        exists: bool,
        /// For how long that is so, seconds; 0 if the zone does not say.
        ttl: u32,
    },
    /// The rest has to be asked for by TCP.
    Truncated,
    /// The server does not understand EDNS.
    NoEdns,
    /// The server refuses or fails, with this code.
    Failed(u16),
}

/// Why bytes are no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoReply {
    /// Not an answer to our question: another id, another question, not an answer. Wait on.
    Stray,
    /// An answer to our question but for the spelling: the server (or who plays one) did not repeat
    /// the mix of cases. Ask by TCP.
    Respelled,
    /// It is ours, and malformed.
    Broken,
}

/// Reads an answer to `ask(id, spelling, family, …)`; `exact` wants the spelling repeated.
///
/// # Errors
/// When it is none.
pub fn reply(
    bytes: &[u8],
    id: u16,
    spelling: &str,
    family: Family,
    exact: bool,
) -> Result<Reply, NoReply> {
    let mut decoder = BinDecoder::new(bytes);
    let header = Header::read(&mut decoder).map_err(|_| NoReply::Stray)?;
    if header.id != id
        || header.message_type != MessageType::Response
        || header.op_code != OpCode::Query
        || header.counts.queries != 1
    {
        return Err(NoReply::Stray);
    }
    let query = Query::read(&mut decoder).map_err(|_| NoReply::Stray)?;
    if query.query_type() != record_type(family) || query.query_class() != DNSClass::IN {
        return Err(NoReply::Stray);
    }
    let repeated = dotted(query.name()).ok_or(NoReply::Stray)?;
    if !repeated.eq_ignore_ascii_case(spelling.as_bytes()) {
        return Err(NoReply::Stray);
    }
    if exact && repeated != spelling.as_bytes() {
        return Err(NoReply::Respelled);
    }
    if header.truncation {
        return Ok(Reply::Truncated);
    }
    let code = u16::from(header.response_code);
    match code {
        0 | 3 => {}
        1 | 4 => return Ok(Reply::NoEdns),
        code => return Ok(Reply::Failed(code)),
    }
    let mut records = |count: u16| {
        Message::read_records(&mut decoder, count.into(), false, OpCode::Query)
            .map(|(records, _, _)| records)
            .map_err(|_| NoReply::Broken)
    };
    let answers = records(header.counts.answers)?;
    let (end, addresses, ttl) = follow(&answers, query.name(), family);
    if !addresses.is_empty() {
        return Ok(Reply::Found { addresses, ttl });
    }
    // A malformed authority section costs only the hint for how long.
    let authorities = records(header.counts.authorities).unwrap_or_default();
    Ok(Reply::None { exists: code == 0, ttl: negative_ttl(&authorities, &end) })
}

/// Walks from the asked name along its aliases; gives where it ends, what stands there, and the
/// smallest TTL on the way.
fn follow(answers: &[Record], from: &WireName, family: Family) -> (WireName, Vec<IpAddr>, u32) {
    let mut at = from.clone();
    let mut ttl = u32::MAX;
    for _ in 0..CHAIN {
        let mut addresses = Vec::new();
        let mut alias = None;
        let mine = |r: &&Record| r.dns_class == DNSClass::IN && r.name.eq_ignore_root(&at);
        for record in answers.iter().filter(mine) {
            let address = match (&record.data, family) {
                (RData::A(a), Family::V4) => IpAddr::V4(a.0),
                (RData::AAAA(aaaa), Family::V6) => IpAddr::V6(aaaa.0),
                (RData::CNAME(to), _) => {
                    alias.get_or_insert((&to.0, record.ttl));
                    continue;
                }
                _ => continue,
            };
            ttl = ttl.min(record.ttl);
            if addresses.len() < ADDRESSES && !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        if !addresses.is_empty() {
            return (at, addresses, ttl);
        }
        let Some((to, alias_ttl)) = alias else { break };
        ttl = ttl.min(alias_ttl);
        at = to.clone();
    }
    (at, Vec::new(), ttl)
}

/// RFC 2308: the smaller of the SOA's own TTL and its minimum, if the SOA is of a zone above the name.
fn negative_ttl(authorities: &[Record], end: &WireName) -> u32 {
    authorities
        .iter()
        .find_map(|record| match &record.data {
            RData::SOA(soa) if record.name.zone_of(end) => Some(record.ttl.min(soa.minimum)),
            _ => None,
        })
        .unwrap_or(0)
}

/// The canonical name in a random mix of upper and lower case: bits of `random` decide. An answer that
/// does not repeat it was made by somebody who did not see the question.
#[must_use]
pub fn spell(name: &Name, random: &[u8]) -> String {
    let mut bits = random.iter().flat_map(|byte| (0..8).map(move |n| byte >> n & 1 == 1));
    name.as_str()
        .chars()
        .map(|c| if bits.next().unwrap_or(false) { c.to_ascii_uppercase() } else { c })
        .collect()
}
