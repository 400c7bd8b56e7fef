//! The policy in force, and how the other parts see it.
//!
//! Invariant: policy and generation change together, in one step of one thread; whoever decides takes
//! both at once ([`Force::current`]).

use std::cell::RefCell;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;

use tokio::net::TcpStream;

use super::desk::Desk;
use crate::audit::Line;
use crate::canonical::{Host, Name};
use crate::dial::Dial;
use crate::dns::{Rules, Ruling};
use crate::intercept::{Connect, Current, Local};
use crate::policy::{Address, Compiled, Mode};
use crate::reason::Reason;

/// The policy in force.
pub(super) struct Force(RefCell<Current>);

impl fmt::Debug for Force {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Force")
            .field("generation", &self.0.borrow().generation)
            .finish_non_exhaustive()
    }
}

impl Force {
    /// Begins with this one.
    #[must_use]
    pub(super) fn new(policy: Compiled, generation: u64) -> Rc<Self> {
        Rc::new(Self(RefCell::new(Current { policy: Rc::new(policy), generation })))
    }

    /// Policy and generation.
    #[must_use]
    pub(super) fn current(&self) -> Current {
        self.0.borrow().clone()
    }

    /// Puts another one in force.
    pub(super) fn set(&self, policy: Rc<Compiled>, generation: u64) {
        *self.0.borrow_mut() = Current { policy, generation };
    }

    fn denies(&self, ip: IpAddr) -> bool {
        let current = self.current();
        current.policy.mode() == Mode::DenyAll
            || matches!(current.policy.address(ip), Address::Denied { .. })
    }
}

/// What DNS and datagrams ask.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) force: Rc<Force>,
    pub(super) desk: Rc<Desk>,
}

impl Rules for Asked {
    fn resolves(&self, name: &Name) -> Ruling {
        self.force.current().policy.resolves(name)
    }

    fn denies(&self, ip: IpAddr) -> bool {
        self.force.denies(ip)
    }

    fn relays(&self) -> bool {
        self.force.current().policy.mode() == Mode::AllowAll
    }

    fn note(&self, line: Line) {
        self.desk.note_now(line);
    }
}

/// How interception reaches destinations.
#[derive(Debug)]
pub(super) struct Reach {
    pub(super) force: Rc<Force>,
    pub(super) dial: Rc<Dial>,
}

impl Reach {
    /// Connects to a judged name.
    pub(super) async fn name(
        &self,
        name: &Name,
        port: u16,
        asked: Option<IpAddr>,
    ) -> Result<(TcpStream, SocketAddr), (Reason, String)> {
        let deny = |ip| self.force.denies(ip);
        let found = self.dial.to_name(name, port, &deny, asked).await;
        let (stream, to) = found.map_err(|error| (error.reason(), error.to_string()))?;
        // A policy that came during the dial has swept flows without knowing where this one would lead.
        self.still_allowed(to.ip())?;
        Ok((stream, to))
    }

    /// Whether the policy in force lets bytes to this address.
    fn still_allowed(&self, ip: IpAddr) -> Result<(), (Reason, String)> {
        if self.force.denies(ip) {
            return Err((Reason::SubnetDenied, format!("{ip} is in subnets.deny")));
        }
        Ok(())
    }

    /// Connects to a judged address.
    pub(super) async fn address(&self, to: SocketAddr) -> Result<TcpStream, (Reason, String)> {
        self.dial.to_address(to).await.map_err(|error| (error.reason(), error.to_string()))
    }
}

impl Connect for Reach {
    fn to<'a>(
        &'a self,
        host: &'a Host,
        port: u16,
    ) -> Local<'a, Result<(TcpStream, SocketAddr), (Reason, String)>> {
        Box::pin(async move {
            match host {
                Host::Name(name) => self.name(name, port, None).await,
                Host::Ip(ip) => {
                    self.still_allowed(*ip)?;
                    let to = SocketAddr::new(*ip, port);
                    let stream = self.address(to).await?;
                    self.still_allowed(*ip)?;
                    Ok((stream, to))
                }
            }
        })
    }
}
