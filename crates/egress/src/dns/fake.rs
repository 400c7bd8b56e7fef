//! For tests: name servers on loopback that answer what the test says and remember what they heard,
//! and a policy made of closures.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use bivouac_types::id::SessionId;
use bivouac_types::policy::Cidr;
use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name as WireName, RData, Record, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::{Resolver, Rules, Ruling, Stub};
use crate::address::Fence;
use crate::audit::Line;
use crate::canonical::{self, Host, Name};
use crate::reason::Reason;

/// Runs a test in a thread of its own kind: one thread, local tasks.
pub(crate) fn run<F: Future>(test: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test)
}

pub(crate) fn name(text: &str) -> Name {
    match canonical::host(text.as_bytes()) {
        Ok(Host::Name(name)) => name,
        other => panic!("{text} is no name: {other:?}"),
    }
}

pub(crate) fn fence(gaps: &[&str]) -> Fence {
    Fence::new(gaps.iter().map(|gap| Cidr::parse(gap).unwrap()).collect())
}

/// A question as a server heard it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    /// Lower case, without the dot at the end.
    pub(crate) name: String,
    pub(crate) kind: RecordType,
    pub(crate) by_stream: bool,
    pub(crate) edns: bool,
}

type Respond = Rc<dyn Fn(&Message, &Asked) -> Vec<Vec<u8>>>;

/// A name server.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) heard: Rc<RefCell<Vec<Asked>>>,
}

impl Server {
    /// Answers each question with what `respond` says: any number of messages, in order; by stream
    /// only the last of them.
    pub(crate) async fn new(respond: impl Fn(&Message, &Asked) -> Vec<Vec<u8>> + 'static) -> Self {
        let respond: Respond = Rc::new(respond);
        let heard = Rc::new(RefCell::new(Vec::new()));
        // One port for both, as name servers have it.
        let (datagrams, streams) = loop {
            let datagrams = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            if let Ok(streams) = TcpListener::bind(datagrams.local_addr().unwrap()).await {
                break (datagrams, streams);
            }
        };
        let address = datagrams.local_addr().unwrap();
        let (answer, log) = (Rc::clone(&respond), Rc::clone(&heard));
        tokio::task::spawn_local(async move {
            let mut buffer = [0; 4096];
            loop {
                let Ok((length, from)) = datagrams.recv_from(&mut buffer).await else { break };
                for message in serve(&buffer[..length], false, &answer, &log) {
                    datagrams.send_to(&message, from).await.unwrap();
                }
            }
        });
        let log = Rc::clone(&heard);
        tokio::task::spawn_local(async move {
            loop {
                let Ok((stream, _)) = streams.accept().await else { break };
                tokio::task::spawn_local(connection(stream, Rc::clone(&respond), Rc::clone(&log)));
            }
        });
        Self { address, heard }
    }

    /// A zone: names to records `(owner, ttl, data)`; a name that is not in it does not exist.
    pub(crate) async fn zone(records: &[(&str, u32, RData)]) -> Self {
        let mut zone: HashMap<String, Vec<Record>> = HashMap::new();
        for (owner, ttl, data) in records {
            let record = record(owner, *ttl, data.clone());
            zone.entry((*owner).to_owned()).or_default().push(record);
        }
        Self::new(move |query, asked| vec![from_zone(&zone, query, asked)]).await
    }

    pub(crate) fn heard(&self) -> Vec<Asked> {
        self.heard.borrow().clone()
    }
}

async fn connection(mut stream: TcpStream, respond: Respond, log: Rc<RefCell<Vec<Asked>>>) {
    while let Ok(length) = stream.read_u16().await {
        let mut message = vec![0; length.into()];
        if stream.read_exact(&mut message).await.is_err() {
            return;
        }
        if let Some(answer) = serve(&message, true, &respond, &log).pop() {
            let mut bytes = u16::try_from(answer.len()).unwrap().to_be_bytes().to_vec();
            bytes.extend(answer);
            if stream.write_all(&bytes).await.is_err() {
                return;
            }
        }
    }
}

fn serve(
    bytes: &[u8],
    by_stream: bool,
    respond: &Respond,
    log: &RefCell<Vec<Asked>>,
) -> Vec<Vec<u8>> {
    let query = Message::from_vec(bytes).expect("the broker asks in good form");
    assert_eq!(query.queries.len(), 1, "one question at a time");
    let question = &query.queries[0];
    let asked = Asked {
        name: question.name().to_ascii().to_ascii_lowercase().trim_end_matches('.').to_owned(),
        kind: question.query_type(),
        by_stream,
        edns: query.edns.is_some(),
    };
    log.borrow_mut().push(asked.clone());
    respond(&query, &asked)
}

pub(crate) fn record(owner: &str, ttl: u32, data: RData) -> Record {
    Record::from_rdata(WireName::from_ascii(format!("{owner}.")).unwrap(), ttl, data)
}

pub(crate) fn ip(address: &str) -> RData {
    match address.parse().unwrap() {
        IpAddr::V4(v4) => RData::A(v4.into()),
        IpAddr::V6(v6) => RData::AAAA(v6.into()),
    }
}

pub(crate) fn alias(to: &str) -> RData {
    RData::CNAME(hickory_proto::rr::rdata::CNAME(WireName::from_ascii(format!("{to}.")).unwrap()))
}

/// An answer to `query` with these records.
pub(crate) fn answer(query: &Message, code: ResponseCode, records: Vec<Record>) -> Message {
    let mut message = Message::response(query.metadata.id, query.metadata.op_code);
    message.metadata.recursion_available = true;
    message.metadata.response_code = code;
    message.add_queries(query.queries.clone());
    message.insert_answers(records);
    message
}

fn from_zone(zone: &HashMap<String, Vec<Record>>, query: &Message, asked: &Asked) -> Vec<u8> {
    let mut records = Vec::new();
    let mut at = asked.name.clone();
    let mut code = ResponseCode::NXDomain;
    while let Some(here) = zone.get(&at) {
        code = ResponseCode::NoError;
        records.extend(here.iter().filter(|r| r.record_type() == asked.kind).cloned());
        let next = here.iter().find_map(|record| match &record.data {
            RData::CNAME(to) => Some((record.clone(), to.0.to_ascii())),
            _ => None,
        });
        let Some((record, to)) = next else { break };
        records.push(record);
        at = to.trim_end_matches('.').to_owned();
    }
    answer(query, code, records).to_vec().unwrap()
}

/// A policy.
pub(crate) struct Policy {
    /// Names that resolve: these and everything below.
    pub(crate) zones: RefCell<Vec<String>>,
    pub(crate) denies: RefCell<Vec<IpAddr>>,
    pub(crate) deny_all: Cell<bool>,
    pub(crate) relays: Cell<bool>,
    pub(crate) lines: RefCell<Vec<Line>>,
}

impl Policy {
    pub(crate) fn new(zones: &[&str]) -> Rc<Self> {
        Rc::new(Self {
            zones: RefCell::new(zones.iter().map(|zone| (*zone).to_owned()).collect()),
            denies: RefCell::default(),
            deny_all: Cell::new(false),
            relays: Cell::new(true),
            lines: RefCell::default(),
        })
    }

    pub(crate) fn take_lines(&self) -> Vec<Line> {
        self.lines.take()
    }
}

impl Rules for Policy {
    fn resolves(&self, name: &Name) -> Ruling {
        if self.deny_all.get() {
            return Ruling { allowed: false, reason: Reason::DenyAll, entry: None };
        }
        let zones = self.zones.borrow();
        let entry = zones.iter().find(|zone| {
            let rest = name.as_str().strip_suffix(zone.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        });
        let reason = if entry.is_some() { Reason::DomainListed } else { Reason::DomainNotListed };
        Ruling { allowed: entry.is_some(), reason, entry: entry.map(|zone| zone.as_str().into()) }
    }

    fn denies(&self, ip: IpAddr) -> bool {
        self.denies.borrow().contains(&ip)
    }

    fn relays(&self) -> bool {
        self.relays.get()
    }

    fn note(&self, line: Line) {
        self.lines.borrow_mut().push(line);
    }
}

/// A resolver with a large budget on a host that has IPv6.
pub(crate) fn resolver(servers: Vec<SocketAddr>) -> Rc<Resolver> {
    Resolver::with(servers, 1000, 1000, || true)
}

/// A stub over one server.
pub(crate) fn stub(server: &Server, fence: Fence, policy: &Rc<Policy>) -> (Rc<Stub>, Rc<Resolver>) {
    let resolver = resolver(vec![server.address]);
    let rules: Rc<dyn Rules> = Rc::<Policy>::clone(policy);
    (Stub::new(Rc::clone(&resolver), fence, rules, SessionId::new(0, [7; 10])), resolver)
}
