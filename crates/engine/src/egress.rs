//! Policies on their way into force: checked, kept, carried to the broker of a session, and made one
//! with the records again after a crash.
//!
//! Owns: what a broker is launched with, the order of a change (check, keep the values, write the row
//! with the next policy generation, tell the broker, answer), and the tasks that answer brokers
//! ([`desk`]). Invariants: a policy that does not compile changes nothing; the record is written before
//! the broker is told, and a broker never goes back to an older generation, so the record wins whatever
//! a crash cuts off; a broker is given only values and tokens that its own session's policy names.
//! Called by `sessions`, `sandboxes`, `lifecycle`, `adopt` and the vault.

pub(crate) mod calls;
pub(crate) mod desk;
pub(crate) mod edit;
pub(crate) mod learn;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bivouac_egress::message::{Config, Identity, PolicySet, Reply, ToBroker, Value};
use bivouac_egress::policy::Compiled;
use bivouac_runtime::{Handle, RuntimeError};
use bivouac_store::SessionRow;
use bivouac_types::access::Verb;
use bivouac_types::id::{SessionId, ValueId};
use bivouac_types::name::Namespace;
use bivouac_types::policy::{Action, Cidr, Draft, NetworkPolicy};
use bivouac_types::secret::Secret;
use bivouac_types::session::{Session, SessionStatus};
use bytes::Bytes;
use futures_util::StreamExt;

use crate::Engine;
use crate::api::Principal;
use crate::error::{Error, ErrorKind};
use crate::inner::{Change, Inner, Live};
use crate::lifecycle::chain;

/// How long a broker may take to answer. It only compiles, swaps and cuts.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a launch or an update waits for values. What comes later follows by itself.
const VALUES_PATIENCE: Duration = Duration::from_millis(500);
/// Values that are resolved at the same time: a provider may be a program or a server.
const PARALLEL: usize = 8;
/// How often values are resolved anew because secrets changed meanwhile.
const ROUNDS: usize = 16;

/// What brokers of this engine are told about the world.
#[derive(Debug, Clone, Default)]
pub struct EgressConfig {
    /// Name servers to ask.
    pub resolvers: Resolvers,
    /// Ranges that policies may allow although they are private.
    pub allow_private: Vec<Cidr>,
    /// File of root certificates (PEM) for upstream TLS.
    pub roots: String,
    /// PEM of certificates that sandboxes trust besides their own.
    pub extra_ca: String,
}

/// Where the name servers of a launch come from: they may change while the engine runs.
#[derive(Clone)]
pub struct Resolvers(Arc<dyn Fn() -> Vec<SocketAddr> + Send + Sync>);

impl Resolvers {
    /// Asked at each launch.
    pub fn new(read: impl Fn() -> Vec<SocketAddr> + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    fn now(&self) -> Vec<SocketAddr> {
        (self.0)()
    }
}

impl Default for Resolvers {
    fn default() -> Self {
        Self::new(Vec::new)
    }
}

impl fmt::Debug for Resolvers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resolvers")
    }
}

/// Compiles a policy as a broker would.
pub(crate) fn check_policy(field: &str, policy: &NetworkPolicy) -> Result<Compiled, Error> {
    Compiled::new(policy).map_err(|error| {
        let field = match &error.field {
            Some(below) => format!("{field}.{below}"),
            None => field.to_owned(),
        };
        Error::invalid(format!("Invalid {field}: {}", error.message))
    })
}

/// Every value that a policy names, with the secrets that are in it.
pub(crate) fn values_of(policy: &NetworkPolicy) -> Vec<(&ValueId, &[String])> {
    let NetworkPolicy::Custom(custom) = policy else { return Vec::new() };
    let rules = custom.domains.iter().flat_map(|domain| &domain.rules);
    rules
        .flat_map(|rule| match &rule.action {
            Action::Transform { headers } => {
                headers.iter().map(|set| (&set.value, set.secrets.as_slice())).collect()
            }
            Action::Sign(sign) => vec![(&sign.value, sign.secrets.as_slice())],
            Action::Forward { .. } | Action::Respond(_) => Vec::new(),
        })
        .collect()
}

impl Inner {
    /// What the broker of a session starts with.
    pub(crate) async fn egress_of(&self, row: &SessionRow) -> Result<Secret, Error> {
        let egress = &self.config.egress;
        let config = Config {
            identity: Identity {
                team: row.namespace.team.clone(),
                project: row.namespace.project.clone(),
                sandbox: row.session.sandbox_name.clone(),
                session: row.session.id.clone(),
            },
            resolvers: egress.resolvers.now(),
            allow_private: egress.allow_private.clone(),
            roots: egress.roots.clone(),
            extra_ca: egress.extra_ca.clone(),
            policy: self.policy_set(row).await,
        };
        encode(&config).map(Secret::new)
    }

    /// The policy of a session with the values that are at hand; the broker asks for the others.
    async fn policy_set(&self, row: &SessionRow) -> PolicySet {
        let policy = row.session.policy.clone();
        let ids = ids_of(&policy);
        let found = self.values_in_time(&row.namespace, ids, VALUES_PATIENCE).await;
        let values = found.into_iter().filter_map(|(id, value)| Some((id, value.ok()?))).collect();
        PolicySet { generation: row.session.policy_generation, policy, values }
    }

    /// Values as far as they can be had in time. What cannot be had at all is told; what is late is
    /// left out.
    async fn values_in_time(
        &self,
        ns: &Namespace,
        ids: Vec<ValueId>,
        patience: Duration,
    ) -> BTreeMap<ValueId, Result<Value, String>> {
        let ask = |id: ValueId| async move {
            let found = tokio::time::timeout(patience, self.resolve_value(ns, &id)).await;
            Some((id, found.ok()?))
        };
        let asked = futures_util::stream::iter(ids).map(ask).buffer_unordered(PARALLEL);
        asked.filter_map(std::future::ready).collect().await
    }

    /// Says something to a broker and waits for its answer.
    pub(crate) async fn tell(
        &self,
        handle: &Arc<dyn Handle>,
        message: &ToBroker,
    ) -> Result<Reply, Error> {
        let bytes = Bytes::from(encode(message)?);
        let session = handle.session();
        let late = |_| RuntimeError::Io {
            what: format!("ask the egress broker of session {session}"),
            source: std::io::Error::from(std::io::ErrorKind::TimedOut),
        };
        let answer = tokio::time::timeout(PATIENCE, handle.egress(bytes)).await;
        let answer = match answer.map_err(late).and_then(|answer| answer) {
            Ok(answer) => answer,
            Err(error @ RuntimeError::Gone(_)) => return Err(self.refine(session, error).await),
            Err(error) => return Err(not_told(session).because(error)),
        };
        serde_json::from_slice(&answer).map_err(|error| not_told(session).because(error))
    }

    /// Brings the broker of a running session to what its record says. The broker ignores what it has.
    pub(crate) async fn agree(&self, live: &Live) -> Result<u64, Error> {
        self.put_policy(&live.handle, &live.row()).await
    }

    /// Tells a broker the policy of a row.
    pub(crate) async fn put_policy(
        &self,
        handle: &Arc<dyn Handle>,
        row: &SessionRow,
    ) -> Result<u64, Error> {
        let changes = self.secret_changes();
        let set = ToBroker::Policy(self.policy_set(row).await);
        match self.tell(handle, &set).await? {
            Reply::Done { cut } => {
                self.follow_secrets(handle, row, changes).await;
                Ok(cut)
            }
            Reply::Refused { field, message } => Err(refused(field.as_deref(), &message)),
            Reply::Explained(_) => Err(not_told(&row.session.id)),
        }
    }

    /// As [`Inner::agree`] for a session that was just adopted. What its broker cannot do (a newer
    /// engine wrote the policy) is not left half in force: then it is closed.
    pub(crate) async fn agree_again(&self, live: &Live) {
        let session = live.row().session;
        let Err(error) = self.agree(live).await else { return };
        tracing::error!(session = %session.id, cause = %chain(&error), "the policy of an adopted session could not be told");
        if error.kind != ErrorKind::Invalid {
            return;
        }
        let closed = PolicySet {
            generation: session.policy_generation,
            policy: NetworkPolicy::DenyAll,
            values: BTreeMap::new(),
        };
        if let Err(error) = self.tell(&live.handle, &ToBroker::Policy(closed)).await {
            tracing::error!(session = %session.id, cause = %chain(&error), "nor could it be closed");
        }
    }

    /// Replaces the policy of a running session and answers when it is in force. `make` sees the
    /// present one; `None` leaves it.
    pub(crate) async fn replace_policy(
        &self,
        id: &SessionId,
        mut make: impl FnMut(&mut Session) -> Result<bool, Error>,
    ) -> Result<(Session, u64), Error> {
        let mut before = None;
        let (row, written) = self
            .change_session(id, |row| {
                if row.session.status != SessionStatus::Running {
                    return Err(Error::not_running(&row.session));
                }
                before = Some((row.session.policy.clone(), row.session.policy_before.clone()));
                if !make(&mut row.session)? {
                    return Ok(Change::Leave);
                }
                row.session.policy_generation += 1;
                Ok(Change::Write)
            })
            .await?;
        if !written {
            return Ok((row.session, 0));
        }
        let cut = self.put_in_force(&row, before).await?;
        Ok((row.session, cut))
    }

    /// Tells the broker of a policy that is written. A refusal takes the record back: nothing has
    /// changed then.
    pub(crate) async fn put_in_force(
        &self,
        row: &SessionRow,
        before: Option<(NetworkPolicy, Option<NetworkPolicy>)>,
    ) -> Result<u64, Error> {
        let Some(live) = self.live(&row.session.id) else {
            return Err(Error::not_running(&row.session));
        };
        let error = match self.agree(&live).await {
            Ok(cut) => return Ok(cut),
            Err(error) => error,
        };
        if error.kind == ErrorKind::Invalid
            && let Some((policy, policy_before)) = before
        {
            let generation = row.session.policy_generation;
            let undo = self.change_session(&row.session.id, |now| {
                // Somebody else's newer policy stays.
                if now.session.policy_generation != generation {
                    return Ok(Change::Leave);
                }
                now.session.policy.clone_from(&policy);
                now.session.policy_before.clone_from(&policy_before);
                now.session.policy_generation += 1;
                Ok(Change::Write)
            });
            undo.await?;
        }
        Err(error)
    }

    /// How often secrets have changed so far.
    pub(crate) fn secret_changes(&self) -> u64 {
        self.secret_changes.load(Ordering::SeqCst)
    }

    /// A secret has another value now, or none: every running session that uses it hears of it. Who has
    /// resolved it before and hands it over later sees by the count that it has to look again.
    pub(crate) async fn secret_changed(&self, ns: &Namespace, name: &str) {
        self.secret_changes.fetch_add(1, Ordering::SeqCst);
        for id in self.live_ids() {
            let Some(live) = self.live(&id) else { continue };
            let row = live.row();
            if row.namespace != *ns || row.session.status != SessionStatus::Running {
                continue;
            }
            let used = values_of(&row.session.policy).into_iter();
            let ids: Vec<_> = used
                .filter(|(_, secrets)| secrets.iter().any(|secret| secret == name))
                .map(|(id, _)| id.clone())
                .collect();
            if !ids.is_empty() {
                self.push_values(&live, ids).await;
            }
        }
    }

    /// Hands the values of a policy over once more when secrets have changed since `changes` was read: a
    /// revoked one that was resolved a moment before would count for as long as the session runs.
    pub(crate) async fn follow_secrets(
        &self,
        handle: &Arc<dyn Handle>,
        row: &SessionRow,
        changes: u64,
    ) {
        if self.secret_changes() != changes {
            self.hand_values(handle, row, ids_of(&row.session.policy)).await;
        }
    }

    /// Has the broker of an adopted session use the secrets as they are now: the engine before this one may
    /// have ended between the change of one and its word to the broker.
    pub(crate) fn refresh_values(self: &Arc<Self>, live: &Arc<Live>) {
        let ids = ids_of(&live.row().session.policy);
        if ids.is_empty() {
            return;
        }
        let (inner, live) = (Arc::clone(self), Arc::clone(live));
        self.spawn(async move { inner.push_values(&live, ids).await });
    }

    /// Resolves values and hands them to the broker of a session.
    pub(crate) async fn push_values(&self, live: &Live, ids: Vec<ValueId>) {
        self.hand_values(&live.handle, &live.row(), ids).await;
    }

    async fn hand_values(&self, handle: &Arc<dyn Handle>, row: &SessionRow, ids: Vec<ValueId>) {
        // Two changes at the same time may overtake each other on their way: the last word has to be one
        // that was resolved after the last change.
        for _ in 0..ROUNDS {
            let changes = self.secret_changes();
            let mut values = self.values_in_time(&row.namespace, ids.clone(), PATIENCE).await;
            for id in &ids {
                let late = || Err("its provider did not answer in time".to_owned());
                values.entry(id.clone()).or_insert_with(late);
            }
            if let Err(error) = self.tell(handle, &ToBroker::Values { values }).await {
                tracing::warn!(session = %row.session.id, cause = %chain(&error), "could not hand values to a broker");
                return;
            }
            if self.secret_changes() == changes {
                return;
            }
        }
    }
}

fn ids_of(policy: &NetworkPolicy) -> Vec<ValueId> {
    values_of(policy).into_iter().map(|(id, _)| id.clone()).collect()
}

fn encode(message: &impl serde::Serialize) -> Result<String, Error> {
    serde_json::to_string(message).map_err(|error| {
        Error::internal("A message for an egress broker could not be written.").because(error)
    })
}

fn not_told(session: &SessionId) -> Error {
    let message = format!(
        "The egress broker of session {session} does not answer. The policy is recorded and will be \
         in force as soon as it does; ask again, or stop the sandbox."
    );
    Error::new(ErrorKind::Unavailable, "broker_unavailable", message)
}

fn refused(field: Option<&str>, message: &str) -> Error {
    let field = field.map_or_else(|| "networkPolicy".to_owned(), |f| format!("networkPolicy.{f}"));
    Error::invalid(format!("Invalid {field}: {message}"))
}

impl Engine {
    /// Replaces a running session's policy; answers when it is in force and every flow that it forbids
    /// is cut.
    ///
    /// # Errors
    /// 400 that names the field, when nothing has changed; 410 or 422 when the session does not run.
    pub async fn set_policy(
        &self,
        who: &Principal,
        team: &str,
        id: &SessionId,
        draft: Draft,
    ) -> Result<Session, Error> {
        self.inner.check_session(who, &[Verb::Policy], team, id).await?;
        check_policy("networkPolicy", &draft.policy)?;
        let (_, row) = self.inner.present(team, id).await?;
        tracing::info!(by = %who.name, session = %id, "set policy");
        let (inner, id) = (Arc::clone(&self.inner), id.clone());
        let work = async move {
            let mut draft = draft;
            let present = row.session.policy_before.as_ref().unwrap_or(&row.session.policy);
            draft.keep_hidden("networkPolicy", present)?;
            let policy = inner.keep_values(&row.namespace, draft).await?;
            let set = |session: &mut Session| {
                session.policy.clone_from(&policy);
                session.policy_before = None;
                Ok(true)
            };
            Ok(inner.replace_policy(&id, set).await?.0)
        };
        self.inner.run(work).await
    }
}

#[cfg(test)]
mod tests {
    use bivouac_types::policy::{CustomPolicy, Domain, HeaderSet, HostPattern, Rule};

    use super::*;

    #[test]
    fn values_are_found() {
        let set = |n: u8| HeaderSet {
            name: "authorization".to_owned(),
            value: ValueId::new(1, [n; 10]),
            secrets: vec![format!("s{n}")],
        };
        let sets = Action::Transform { headers: vec![set(1), set(2)] };
        let forward = Action::Forward { url: "https://proxy.test".to_owned() };
        let rules = vec![Rule::new(None, sets), Rule::new(None, forward)];
        let host = HostPattern::parse("api.example.com").unwrap();
        let domains = vec![Domain { host, port: None, rules }];
        let policy = NetworkPolicy::Custom(CustomPolicy { domains, ..CustomPolicy::default() });
        let found = values_of(&policy);
        assert_eq!(found.len(), 2);
        assert_eq!(found[1], (&ValueId::new(1, [2; 10]), &["s2".to_owned()][..]));
        assert!(values_of(&NetworkPolicy::AllowAll).is_empty());
    }
}
