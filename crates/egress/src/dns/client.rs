//! Asks the configured name servers one question.
//!
//! Invariant: each question goes out from a socket of its own, connected to one server, with a random
//! id, a source port of the kernel's choice and a random spelling; only an answer that repeats all of
//! it counts. What does not is ignored, and after a few such datagrams the question is asked by TCP.
//! An exchange ends within [`DEADLINE`], whatever the servers do.
//!
//! Called by `resolver`.

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout_at};

use super::Family;
use super::wire::{self, NoReply, Reply};
use crate::canonical::Name;

/// How long a question may take in all.
pub(super) const DEADLINE: Duration = Duration::from_secs(5);
/// How long one server gets for one attempt, at most.
const ATTEMPT: Duration = Duration::from_millis(1600);
/// Datagrams that are not the answer before the question is asked by TCP: somebody is guessing.
const STRAYS: u32 = 8;
/// How long a later server that answered stays the first to be asked.
const LEAD: Duration = Duration::from_secs(60);
/// Room for a datagram: servers may send more than they were asked to.
const DATAGRAM: usize = 4096;

/// See the module.
pub(super) struct Client {
    servers: Vec<SocketAddr>,
    /// Which server is asked first, and until when.
    lead: Cell<Option<(usize, Instant)>>,
}

impl Client {
    pub(super) fn new(servers: Vec<SocketAddr>) -> Self {
        Self { servers, lead: Cell::new(None) }
    }

    /// Asks the servers in order, each several times if there is time, until one answers.
    ///
    /// # Errors
    /// What the last of them did, in words.
    pub(super) async fn ask(&self, name: &Name, family: Family) -> Result<Reply, String> {
        if self.servers.is_empty() {
            return Err("no name server is configured".to_owned());
        }
        let start = Instant::now();
        let first = match self.lead.get() {
            Some((server, until)) if until > start => server,
            _ => 0,
        };
        let rounds = if self.servers.len() == 1 { 3 } else { 2 };
        let attempts = rounds * self.servers.len();
        let slot = (DEADLINE / u32::try_from(attempts).unwrap_or(u32::MAX)).min(ATTEMPT);
        let mut why = String::new();
        for attempt in 0..attempts {
            let begun = Instant::now();
            let end = (begun + slot).min(start + DEADLINE);
            if begun >= end {
                break;
            }
            let index = (first + attempt) % self.servers.len();
            let server = self.servers[index];
            match self.exchange(server, name, family, end).await {
                Ok(Reply::Failed(code)) => why = format!("{server} answered with code {code}"),
                Ok(reply) => {
                    let lead = (index != 0).then(|| (index, Instant::now() + LEAD));
                    if index == 0 || self.lead.get().is_none_or(|(now, _)| now != index) {
                        self.lead.set(lead);
                    }
                    return Ok(reply);
                }
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    why = format!("{server} does not answer");
                }
                Err(error) => why = format!("{server}: {error}"),
            }
        }
        self.lead.set(None);
        Err(why)
    }

    async fn exchange(
        &self,
        server: SocketAddr,
        name: &Name,
        family: Family,
        end: Instant,
    ) -> io::Result<Reply> {
        let question = Asking::new(name, family, true)?;
        match question.by_datagram(server, end).await? {
            Reply::Truncated => question.by_stream(server, end).await,
            // A server from before EDNS. Some only drop such questions; those count as silent.
            Reply::NoEdns => {
                let question = Asking::new(name, family, false)?;
                match question.by_datagram(server, end).await? {
                    Reply::Truncated => question.by_stream(server, end).await,
                    Reply::NoEdns => Ok(Reply::Failed(1)),
                    reply => Ok(reply),
                }
            }
            reply => Ok(reply),
        }
    }
}

/// One question as it goes out.
struct Asking {
    id: u16,
    spelling: String,
    family: Family,
    message: Vec<u8>,
}

impl Asking {
    fn new(name: &Name, family: Family, edns: bool) -> io::Result<Self> {
        let mut random = [0; 34];
        aws_lc_rs::rand::fill(&mut random)
            .map_err(|_| io::Error::other("no random bytes for a DNS question"))?;
        let id = u16::from_be_bytes([random[0], random[1]]);
        let spelling = wire::spell(name, &random[2..]);
        let message = wire::ask(id, &spelling, family, edns);
        Ok(Self { id, spelling, family, message })
    }

    fn read(&self, bytes: &[u8], exact: bool) -> Result<Reply, NoReply> {
        wire::reply(bytes, self.id, &self.spelling, self.family, exact)
    }

    async fn by_datagram(&self, server: SocketAddr, end: Instant) -> io::Result<Reply> {
        let any: IpAddr = match server {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0)).await?;
        // Connected: the kernel drops what comes from elsewhere, and tells of refusals.
        socket.connect(server).await?;
        socket.send(&self.message).await?;
        let mut buffer = [0; DATAGRAM];
        for _ in 0..STRAYS {
            let length = timeout_at(end, socket.recv(&mut buffer)).await.map_err(late)??;
            match self.read(&buffer[..length], true) {
                Ok(reply) => return Ok(reply),
                Err(NoReply::Stray) => {}
                Err(NoReply::Respelled) => break,
                Err(NoReply::Broken) => return Err(broken()),
            }
        }
        self.by_stream(server, end).await
    }

    async fn by_stream(&self, server: SocketAddr, end: Instant) -> io::Result<Reply> {
        let exchange = async {
            let mut stream = TcpStream::connect(server).await?;
            let length = u16::try_from(self.message.len()).map_err(io::Error::other)?;
            let mut message = length.to_be_bytes().to_vec();
            message.extend(&self.message);
            stream.write_all(&message).await?;
            let length = stream.read_u16().await?;
            let mut answer = vec![0; length.into()];
            stream.read_exact(&mut answer).await?;
            // Here nobody but the server can have written it: one that does not repeat the spelling
            // is only old.
            match self.read(&answer, false) {
                Ok(Reply::Truncated) | Err(_) => Err(broken()),
                Ok(reply) => Ok(reply),
            }
        };
        timeout_at(end, exchange).await.map_err(late)?
    }
}

fn late(_: tokio::time::error::Elapsed) -> io::Error {
    io::ErrorKind::TimedOut.into()
}

fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "its answer is malformed")
}
