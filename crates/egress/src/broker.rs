//! The broker of one session: takes what the gate brings, judges it by the policy in force, carries
//! what may pass, and answers serve.
//!
//! Owns: the policy in force and its replacement ([`Broker::deliver`]), the accept loops (`accept`), the life
//! of a connection (`flow`: `judge`, `hear`, `relay`, `teach`), the values and tokens that serve
//! resolves (`values`), audit lines and counters (`desk`). Invariant: a policy is replaced as a whole or
//! not at all, and when the replacement is answered, no flow lives that the new policy forbids or would
//! handle otherwise. Everything runs in the shim's one thread, inside its `LocalSet`; a panic ends one
//! connection, never the broker.
//!
//! Called by `bivouac::role::shim`.

mod accept;
pub mod denial;
mod desk;
mod explain;
mod flow;
mod force;
mod gate;
mod hear;
mod judge;
mod relay;
mod teach;
#[cfg(test)]
mod tests;
mod values;

use std::fmt;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use bivouac_types::policy::NetworkPolicy;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use self::desk::Desk;
use self::flow::Works;
use self::force::{Asked, Force, Reach};
use self::values::Held;
use crate::address::Fence;
use crate::audit::{Kind, Line, Sink, Writer, now_ms};
use crate::dial::{Dial, Dialer, System};
use crate::dns::{self, Resolver, Rules, Stub};
use crate::flows::{Facts, Flows, Ongoing};
use crate::intercept::{Interception, Setup};
use crate::message::{Config, FromBroker, PolicySet, Reply, ToBroker};
use crate::policy::{Compiled, Mode, PolicyError};
use crate::reason::{Reason, Verdict};
use crate::trust::{Authority, Roots};
use crate::udp;

pub use accept::MOST_FLOWS;
pub use explain::explain;
pub(crate) use gate::receive;
pub use gate::{Datagrams, Gate, Received, Receiving, Steer};

/// Longest wait for cut flows to be gone. They close in the same turn of the loop; more is a fault.
const SWEEP: Duration = Duration::from_secs(5);
/// How long a session without flows waits before it gives back what can be made again.
const REST: Duration = Duration::from_secs(60);
/// Longest sleep until a rule ends: the host's clock may be set meanwhile.
const LOOK_AT_CLOCK: Duration = Duration::from_secs(60);

/// What a broker is made of.
pub struct Parts {
    /// The session's configuration, its first policy among it.
    pub config: Config,
    /// The session's certificate authority.
    pub authority: Rc<Authority>,
    /// What destinations are checked against.
    pub roots: Rc<Roots>,
    /// Where connections and datagrams come from.
    pub gate: Gate,
    /// Takes messages for serve. Never waits.
    pub out: Rc<dyn Fn(FromBroker)>,
    /// Takes audit lines.
    pub sink: Rc<dyn Sink>,
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts")
            .field("config", &self.config)
            .field("gate", &self.gate)
            .finish_non_exhaustive()
    }
}

/// What tests set otherwise.
struct Tuning {
    most: usize,
    deadlines: flow::Deadlines,
    patience: relay::Patience,
    dialer: Rc<dyn Dialer>,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            most: accept::most_flows(),
            deadlines: flow::Deadlines::default(),
            patience: relay::Patience::default(),
            dialer: Rc::new(System),
        }
    }
}

/// Why a broker did not start. Nothing passes the gate then.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The first policy cannot be compiled.
    #[error("the policy of session {session} cannot be used: {error}")]
    Policy {
        /// The session.
        session: String,
        /// Why.
        error: PolicyError,
    },
    /// The gate cannot be used.
    #[error("the gate of session {session} cannot be used: {error}")]
    Gate {
        /// The session.
        session: String,
        /// Why.
        error: io::Error,
    },
}

/// The broker of a session.
pub struct Broker {
    works: Rc<Works>,
    flows: Flows,
    held: Rc<Held>,
    steer: Rc<dyn Steer>,
    relay: Rc<udp::Relay>,
    resolver: Rc<Resolver>,
    loops: std::cell::RefCell<Vec<JoinHandle<()>>>,
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Broker")
            .field("works", &self.works)
            .field("flows", &self.flows.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        for task in self.loops.borrow().iter() {
            task.abort();
        }
    }
}

impl Broker {
    /// Starts to serve a gate. Must be called inside a `LocalSet`.
    ///
    /// # Errors
    /// [`StartError`]; the gate then lets nothing through.
    pub fn start(parts: Parts) -> Result<Rc<Self>, StartError> {
        Self::start_with(parts, Tuning::default())
    }

    fn start_with(parts: Parts, tuning: Tuning) -> Result<Rc<Self>, StartError> {
        let Parts { config, authority, roots, gate, out, sink } = parts;
        let session = config.identity.session.clone();
        let named = session.to_string();
        let set = config.policy;
        let policy = Compiled::new(&set.policy)
            .map_err(|error| StartError::Policy { session: named.clone(), error })?;
        let flows = Flows::new(tuning.most);
        flows.set_generation(set.generation);
        let desk = Desk::new(Writer::new(sink, session.clone()), flows.clone());
        let held = {
            let (values, tokens) = (Rc::clone(&out), Rc::clone(&out));
            Held::new(
                move |id| values(FromBroker::WantValue { value: id.clone() }),
                move |audience| tokens(FromBroker::WantToken { audience: audience.clone() }),
                values::LONGEST_WAIT,
            )
        };
        held.keep_only(policy.values().cloned().collect());
        for (id, value) in set.values {
            held.put_value(id, Ok(value));
        }
        let force = Force::new(policy, set.generation);
        let fence = Fence::new(config.allow_private);
        let resolver = Resolver::new(config.resolvers);
        let dial = Rc::new(Dial::with(fence.clone(), Rc::clone(&resolver), tuning.dialer));
        let asked: Rc<dyn Rules> =
            Rc::new(Asked { force: Rc::clone(&force), desk: Rc::clone(&desk) });
        let reach = Rc::new(Reach { force: Rc::clone(&force), dial: Rc::clone(&dial) });
        let stub =
            Stub::new(Rc::clone(&resolver), fence.clone(), Rc::clone(&asked), session.clone());
        let relay = {
            let numbers = flows.clone();
            udp::Relay::new(dial, asked, session.clone(), Rc::new(move || numbers.number()))
        };
        let interception = Interception::new(Setup {
            session: session.clone(),
            authority,
            roots,
            current: {
                let force = Rc::clone(&force);
                Box::new(move || force.current())
            },
            values: Rc::clone(&held) as _,
            tokens: Rc::clone(&held) as _,
            connect: Rc::clone(&reach) as _,
            record: {
                let desk = Rc::clone(&desk);
                Box::new(move |line| desk.note(line))
            },
        });
        let works = Rc::new(Works {
            session,
            sandbox: config.identity.sandbox,
            force,
            fence,
            own: gate.own,
            desk,
            reach,
            stub,
            interception,
            buffers: Rc::default(),
            mouthful: Rc::default(),
            patience: tuning.patience,
            deadlines: tuning.deadlines,
        });
        let broker = Rc::new(Self {
            works,
            flows,
            held,
            steer: gate.steer,
            relay,
            resolver,
            loops: std::cell::RefCell::default(),
        });
        broker
            .run(gate.tcp, gate.dns, gate.udp, out)
            .map_err(|error| StartError::Gate { session: named, error })?;
        Ok(broker)
    }

    /// Starts the loops, then opens the gate.
    fn run(
        self: &Rc<Self>,
        tcp: Vec<std::net::TcpListener>,
        dns: Vec<Rc<dyn Datagrams>>,
        udp: Vec<Rc<dyn Datagrams>>,
        out: Rc<dyn Fn(FromBroker)>,
    ) -> io::Result<()> {
        let mut loops = self.loops.borrow_mut();
        for listener in tcp {
            listener.set_nonblocking(true)?;
            let listener = TcpListener::from_std(listener)?;
            let accepting = accept::accept(Rc::clone(&self.works), self.flows.clone(), listener);
            loops.push(tokio::task::spawn_local(accepting));
        }
        for datagrams in dns {
            let serving = dns::serve_udp(Rc::clone(&self.works.stub), datagrams);
            loops.push(tokio::task::spawn_local(watched("DNS", serving)));
        }
        for datagrams in udp {
            let relaying = Rc::clone(&self.relay).run(datagrams);
            loops.push(tokio::task::spawn_local(watched("datagram", relaying)));
        }
        loops.push(tokio::task::spawn_local(Rc::clone(&self.works.desk).tell(out)));
        loops.push(tokio::task::spawn_local(expire(Rc::downgrade(self))));
        loops.push(tokio::task::spawn_local(rest(self.flows.clone(), Rc::clone(&self.works))));
        let (tcp, dns, udp) = kinds(&self.works.force.current().policy);
        self.steer.set(tcp, dns, udp)
    }

    /// Takes a message of serve. What has to take effect before the answer has taken effect when the
    /// future resolves.
    pub async fn deliver(self: &Rc<Self>, message: ToBroker) -> Reply {
        match message {
            ToBroker::Policy(set) => self.replace(set).await,
            ToBroker::Values { values } => {
                for (id, value) in values {
                    self.held.put_value(id, value);
                }
                Reply::Done { cut: 0 }
            }
            ToBroker::Token { audience, token } => {
                self.held.put_token(audience, token);
                Reply::Done { cut: 0 }
            }
            ToBroker::Explain { url, method } => {
                let current = self.works.force.current();
                match explain(&current.policy, &self.works.fence, &url, &method, now_ms()) {
                    Ok(explained) => Reply::Explained(explained),
                    Err(message) => Reply::Refused { field: None, message },
                }
            }
        }
    }

    async fn replace(&self, set: PolicySet) -> Reply {
        if set.generation <= self.flows.generation() {
            return Reply::Done { cut: 0 };
        }
        let policy = match Compiled::new(&set.policy) {
            Ok(policy) => Rc::new(policy),
            Err(error) => return Reply::Refused { field: error.field, message: error.message },
        };
        let (tcp, dns, udp) = kinds(&policy);
        if let Err(error) = self.steer.set(tcp, dns, udp) {
            let message = format!("the gate could not be set, so the policy is as it was: {error}");
            return Reply::Refused { field: None, message };
        }
        // One step: nothing runs in between.
        self.held.keep_only(policy.values().cloned().collect());
        for (id, value) in set.values {
            self.held.put_value(id, Ok(value));
        }
        self.works.force.set(Rc::clone(&policy), set.generation);
        self.flows.set_generation(set.generation);
        self.resolver.retain(&|name| policy.resolves(name).allowed);
        self.works.interception.forget();
        let datagrams = self.relay.sweep(&|_| policy.mode() == Mode::AllowAll);
        let cut = self.sweep(&policy, Reason::PolicyChanged).await + datagrams;
        self.works.desk.cut(cut);
        let mut line = Line::new(
            self.works.session.clone(),
            Kind::Policy,
            Verdict::Allow,
            Reason::PolicyChanged,
        );
        line.generation = set.generation;
        line.entry = Some(mode(&set.policy).to_owned());
        self.works.desk.note(line);
        Reply::Done { cut }
    }

    /// Cuts what the policy does not let go on, and returns when it is gone.
    async fn sweep(&self, policy: &Compiled, reason: Reason) -> u64 {
        let now = now_ms();
        let keep = |facts: &Facts, ongoing: &[Ongoing]| {
            judge::keeps(policy, &self.works.fence, &self.works.own, facts, ongoing)
                && ongoing.iter().all(|o| o.expires_at.is_none_or(|end| end > now))
        };
        let sweep = self.flows.sweep(reason, &keep);
        let cut = sweep.cut;
        if let Err(left) = sweep.over(SWEEP).await {
            tracing::error!(left, "flows that were cut still hold their sockets");
        }
        cut
    }
}

/// Which kinds of traffic the gate lets in under a policy: TCP, DNS, other datagrams.
fn kinds(policy: &Compiled) -> (bool, bool, bool) {
    match policy.mode() {
        Mode::AllowAll => (true, true, true),
        Mode::DenyAll => (false, false, false),
        Mode::Custom => (true, policy.dns_on(), false),
    }
}

fn mode(policy: &NetworkPolicy) -> &'static str {
    match policy {
        NetworkPolicy::AllowAll => "allow-all",
        NetworkPolicy::DenyAll => "deny-all",
        NetworkPolicy::Custom(_) => "custom",
    }
}

/// A loop that should not end.
async fn watched(what: &'static str, serving: impl Future<Output = io::Result<()>>) {
    if let Err(error) = serving.await {
        tracing::error!(%error, "the gate's {what} socket failed: nothing of that kind passes any more");
    }
}

/// Cuts requests whose rule ends while they are under way.
async fn expire(broker: std::rc::Weak<Broker>) {
    loop {
        let Some(alive) = broker.upgrade() else { return };
        let current = alive.works.force.current();
        let now = now_ms();
        let next = alive.flows.next_expiry();
        if next.is_some_and(|end| end <= now) {
            let cut = alive.sweep(&current.policy, Reason::CredentialExpired).await;
            alive.works.desk.cut(cut);
            continue;
        }
        let wait = next.map(|end| Duration::from_millis(end - now).min(LOOK_AT_CLOCK));
        let flows = alive.flows.clone();
        drop(alive);
        match wait {
            Some(wait) => tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = flows.earlier_expiry() => {}
            },
            None => flows.earlier_expiry().await,
        }
    }
}

/// Gives back what can be made again when nothing happens.
async fn rest(flows: Flows, works: Rc<Works>) {
    loop {
        flows.emptied().await;
        tokio::time::sleep(REST).await;
        if flows.is_empty() {
            works.interception.trim();
            works.buffers.trim();
        }
    }
}
