//! A name server whose answers the test decides. Written by hand: it shares nothing with the engine's.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{NAME_SERVER, Names};

/// What a name answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// These addresses, by family.
    Addresses(Vec<IpAddr>),
    /// The first addresses to the first query of each type, the second ones from then on.
    Flip(Vec<IpAddr>, Vec<IpAddr>),
    /// Another name; its own answer follows in the same message.
    Alias(String),
    /// No answer at all.
    Silent,
    /// SERVFAIL.
    Broken,
}

/// A query that came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Query {
    /// The name, lower case, no dot at the end.
    pub name: String,
    /// Number of its type.
    pub kind: u16,
    /// Whether it came by TCP.
    pub tcp: bool,
}

/// Names and the record.
#[derive(Debug, Default)]
pub(super) struct Zones {
    names: Mutex<Names>,
    queries: Mutex<Vec<Query>>,
}

impl Zones {
    pub(super) fn set(&self, name: &str, answer: Answer) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.insert(name.to_ascii_lowercase(), answer);
    }

    pub(super) fn queries(&self) -> Vec<Query> {
        self.queries.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The exact name, else the nearest `*.` above it.
    fn find(&self, name: &str) -> Option<Answer> {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = names.get(name) {
            return Some(answer.clone());
        }
        let mut rest = name;
        while let Some((_, above)) = rest.split_once('.') {
            if let Some(answer) = names.get(&format!("*.{above}")) {
                return Some(answer.clone());
            }
            rest = above;
        }
        None
    }

    fn reply(&self, message: &[u8], tcp: bool) -> Option<Vec<u8>> {
        let (name, end) = read_name(message, 12)?;
        let kind = u16::from_be_bytes(message.get(end..end + 2)?.try_into().ok()?);
        let before = {
            let mut queries = self.queries.lock().unwrap_or_else(PoisonError::into_inner);
            let before = queries.iter().filter(|q| q.name == name && q.kind == kind).count();
            queries.push(Query { name: name.clone(), kind, tcp });
            before
        };
        let (mut records, mut code, mut owner) = (Vec::new(), 0u8, name);
        // A chain of aliases ends: the test's zones are finite, its loops are cut here.
        for _ in 0..8 {
            let addresses = match self.find(&owner) {
                None => {
                    code = 3;
                    break;
                }
                Some(Answer::Silent) => return None,
                Some(Answer::Broken) => {
                    code = 2;
                    break;
                }
                Some(Answer::Addresses(all)) => all,
                Some(Answer::Flip(first, later)) => {
                    if before == 0 {
                        first
                    } else {
                        later
                    }
                }
                Some(Answer::Alias(target)) => {
                    records.push((owner, 5u16, write_name(&target)));
                    owner = target.to_ascii_lowercase();
                    continue;
                }
            };
            for address in addresses {
                match (address, kind) {
                    (IpAddr::V4(v4), 1) => records.push((owner.clone(), 1, v4.octets().to_vec())),
                    (IpAddr::V6(v6), 28) => records.push((owner.clone(), 28, v6.octets().to_vec())),
                    _ => {}
                }
            }
            break;
        }
        let mut out = message.get(..2)?.to_vec();
        out.extend([0x85, 0x80 | code]);
        out.extend([0, 1]);
        out.extend(u16::try_from(records.len()).ok()?.to_be_bytes());
        out.extend([0, 0, 0, 0]);
        out.extend(message.get(12..end + 4)?);
        for (owner, kind, data) in records {
            out.extend(write_name(&owner));
            out.extend(kind.to_be_bytes());
            out.extend([0, 1, 0, 0, 0, 5]); // class IN, five seconds
            out.extend(u16::try_from(data.len()).ok()?.to_be_bytes());
            out.extend(data);
        }
        Some(out)
    }
}

fn read_name(message: &[u8], mut at: usize) -> Option<(String, usize)> {
    let mut labels = Vec::new();
    loop {
        let length = usize::from(*message.get(at)?);
        at += 1;
        if length == 0 {
            return Some((labels.join("."), at));
        }
        let label = message.get(at..at + length)?;
        labels.push(String::from_utf8_lossy(label).to_ascii_lowercase());
        at += length;
    }
}

fn write_name(name: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        out.push(u8::try_from(label.len()).unwrap_or(63));
        out.extend(label.as_bytes());
    }
    out.push(0);
    out
}

/// Opens its sockets and serves.
///
/// # Errors
/// When they cannot be opened.
pub(super) fn serve(zones: Arc<Zones>) -> Result<impl Future<Output = ()>> {
    let udp = std::net::UdpSocket::bind((NAME_SERVER, 53))?;
    udp.set_nonblocking(true)?;
    let udp = tokio::net::UdpSocket::from_std(udp)?;
    let tcp = std::net::TcpListener::bind((NAME_SERVER, 53))?;
    tcp.set_nonblocking(true)?;
    let tcp = tokio::net::TcpListener::from_std(tcp)?;
    Ok(async move {
        let datagrams = async {
            let mut buffer = [0u8; 4096];
            while let Ok((n, from)) = udp.recv_from(&mut buffer).await {
                if let Some(reply) = zones.reply(&buffer[..n], false) {
                    let _ = udp.send_to(&reply, from).await;
                }
            }
        };
        let streams = async {
            while let Ok((mut stream, _)) = tcp.accept().await {
                let zones = zones.clone();
                tokio::spawn(async move {
                    while let Ok(length) = stream.read_u16().await {
                        let mut message = vec![0; usize::from(length)];
                        if stream.read_exact(&mut message).await.is_err() {
                            return;
                        }
                        let Some(reply) = zones.reply(&message, true) else { return };
                        let length = u16::try_from(reply.len()).unwrap_or(u16::MAX);
                        let whole = [&length.to_be_bytes()[..], &reply].concat();
                        if stream.write_all(&whole).await.is_err() {
                            return;
                        }
                    }
                });
            }
        };
        tokio::join!(datagrams, streams);
    })
}
