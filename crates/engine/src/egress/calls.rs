//! What callers ask about a sandbox's policy as a whole: read, replace, change, explain.
//!
//! Invariant: these calls change the sandbox (what its next session starts with) and its running
//! session in one transaction, and answer when the running one's broker has it. A sandbox that is
//! stopped is changed and not started.

use std::sync::Arc;

use bivouac_egress::address::Fence;
use bivouac_egress::broker::explain;
use bivouac_egress::message::{Explained, Reply, ToBroker};
use bivouac_store::{Durability, SessionRow};
use bivouac_types::access::Verb;
use bivouac_types::id::SessionId;
use bivouac_types::name::Namespace;
use bivouac_types::policy::{Draft, NetworkPolicy};
use bivouac_types::session::SessionStatus;

use crate::Engine;
use crate::api::Principal;
use crate::egress::edit::{self, PolicyEdit};
use crate::egress::{check_policy, refused};
use crate::error::Error;
use crate::inner::{Inner, busy};

/// How often a change is tried again when another one was quicker.
const ATTEMPTS: u32 = 50;
/// Longest URL that is explained.
const MAX_URL: usize = 8192;

/// A sandbox's policy as it is.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyState {
    /// In force in the running session, else what the next session starts with.
    pub policy: NetworkPolicy,
    /// What the next session starts with.
    pub next: NetworkPolicy,
    /// The running session and the generation of its policy.
    pub running: Option<(SessionId, u64)>,
    /// The session is open because somebody learns what it needs.
    pub learning: bool,
    /// Flows that the change cut.
    pub cut: u64,
    /// The call changed something.
    pub changed: bool,
}

impl Inner {
    async fn policy_state(&self, ns: &Namespace, name: &str) -> Result<PolicyState, Error> {
        let next = self.named(ns, name).await?.sandbox;
        let session = self.known_session(&next.current_session_id).await?.session;
        let running = session.status == SessionStatus::Running;
        Ok(PolicyState {
            policy: if running { session.policy } else { next.policy.clone() },
            next: next.policy,
            running: running.then_some((session.id, session.policy_generation)),
            learning: running && session.policy_before.is_some(),
            cut: 0,
            changed: false,
        })
    }

    /// Lets `make` say the new policy from the present one, writes it to the sandbox and its running
    /// session, and puts it in force.
    pub(crate) async fn change_policy(
        &self,
        ns: &Namespace,
        name: &str,
        mut make: impl FnMut(&NetworkPolicy) -> Result<Option<NetworkPolicy>, Error>,
    ) -> Result<PolicyState, Error> {
        for _ in 0..ATTEMPTS {
            let mut sandbox = self.named(ns, name).await?;
            let mut session = self.known_session(&sandbox.sandbox.current_session_id).await?;
            let running = session.session.status == SessionStatus::Running;
            let present = match (&session.session.policy_before, running) {
                // Somebody is learning: the change is for what comes back.
                (Some(before), true) => before,
                (None, true) => &session.session.policy,
                (_, false) => &sandbox.sandbox.policy,
            };
            let Some(policy) = make(present)? else { return self.policy_state(ns, name).await };
            check_policy("policy", &policy)?;
            let before = (session.session.policy.clone(), session.session.policy_before.clone());
            let now = self.now();
            let old = std::mem::replace(&mut sandbox.sandbox.policy, policy.clone());
            sandbox.sandbox.updated_at = now;
            let mut tx = self.db.begin(Durability::Process).await?;
            let mut written = tx.update_sandbox(&mut sandbox).await;
            if running && written.is_ok() {
                session.session.policy = policy;
                session.session.policy_before = None;
                session.session.policy_generation += 1;
                session.session.updated_at = now;
                written = tx.update_session(SessionStatus::Running, &mut session).await;
            }
            match written {
                Ok(()) => tx.commit().await?,
                Err(error) if error.is_changed() => continue,
                Err(error) => return Err(error.into()),
            }
            let cut = if running {
                self.note(&session);
                self.force_or_undo(ns, name, &session, before, old).await?
            } else {
                0
            };
            return Ok(PolicyState { cut, changed: true, ..self.policy_state(ns, name).await? });
        }
        Err(busy(&format!("sandbox '{name}'")))
    }

    /// A broker that refuses what this engine compiled takes the sandbox's policy back as well.
    async fn force_or_undo(
        &self,
        ns: &Namespace,
        name: &str,
        session: &SessionRow,
        before: (NetworkPolicy, Option<NetworkPolicy>),
        old: NetworkPolicy,
    ) -> Result<u64, Error> {
        let error = match self.put_in_force(session, Some(before)).await {
            Ok(cut) => return Ok(cut),
            Err(error) => error,
        };
        if error.kind == crate::ErrorKind::Invalid {
            let id = self.named(ns, name).await?.sandbox.id;
            let undo = |row: &mut bivouac_store::SandboxRow| {
                let ours = row.sandbox.policy == session.session.policy;
                if ours {
                    row.sandbox.policy.clone_from(&old);
                }
                Ok(ours)
            };
            self.change_sandbox(&id, undo).await?;
        }
        Err(error)
    }
}

impl Engine {
    /// A sandbox's policy, values hidden behind their ids.
    ///
    /// # Errors
    /// 404.
    pub async fn policy(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
    ) -> Result<PolicyState, Error> {
        who.may_any(&[Verb::Read, Verb::Policy], ns)?;
        self.inner.policy_state(ns, name).await
    }

    /// Replaces a sandbox's policy, in the running session and for the ones to come.
    ///
    /// # Errors
    /// 400 that names the field, when nothing has changed; 404.
    pub async fn replace_policy(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        draft: Draft,
    ) -> Result<PolicyState, Error> {
        who.may(Verb::Policy, ns)?;
        self.inner.check_open()?;
        check_policy("policy", &draft.policy)?;
        self.inner.named(ns, name).await?;
        tracing::info!(by = %who.name, sandbox = %name, "replace policy");
        let (inner, ns, name) = (Arc::clone(&self.inner), ns.clone(), name.to_owned());
        let work = async move {
            let mut draft = draft;
            // What somebody learns is not what its hidden values are from.
            let row = inner.named(&ns, &name).await?;
            let session = inner.known_session(&row.sandbox.current_session_id).await?.session;
            let running = session.status == SessionStatus::Running;
            let present = session.policy_before.as_ref().unwrap_or(&session.policy);
            draft.keep_hidden("policy", if running { present } else { &row.sandbox.policy })?;
            let policy = inner.keep_values(&ns, draft).await?;
            inner.change_policy(&ns, &name, |_| Ok(Some(policy.clone()))).await
        };
        self.inner.run(work).await
    }

    /// Changes a sandbox's policy by some entries; its rules and their values stay.
    ///
    /// # Errors
    /// 400 when the change cannot be expressed, 404.
    pub async fn edit_policy(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        change: PolicyEdit,
    ) -> Result<PolicyState, Error> {
        who.may(Verb::Policy, ns)?;
        self.inner.check_open()?;
        tracing::info!(by = %who.name, sandbox = %name, "edit policy");
        let (inner, ns, name) = (Arc::clone(&self.inner), ns.clone(), name.to_owned());
        let work = async move {
            inner.change_policy(&ns, &name, |present| edit::apply(present, &change)).await
        };
        self.inner.run(work).await
    }

    /// What would happen to a request. A running session's broker says it; for a stopped sandbox the
    /// engine does, with the same rules.
    ///
    /// # Errors
    /// 400 for what is no URL, 404.
    pub async fn explain_policy(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        url: &str,
        method: &str,
    ) -> Result<Explained, Error> {
        who.may_any(&[Verb::Read, Verb::Policy], ns)?;
        if url.len() > MAX_URL || method.len() > MAX_URL {
            return Err(Error::invalid(format!("Invalid url: at most {MAX_URL} bytes")));
        }
        let state = self.inner.policy_state(ns, name).await?;
        let live = state.running.as_ref().and_then(|(id, _)| self.inner.live(id));
        if let Some(live) = live {
            let (url, method) = (url.to_owned(), method.to_owned());
            return match self.inner.tell(&live.handle, &ToBroker::Explain { url, method }).await? {
                Reply::Explained(explained) => Ok(explained),
                Reply::Refused { field, message } => Err(match field {
                    Some(field) => refused(Some(&field), &message),
                    None => Error::invalid(message),
                }),
                Reply::Done { .. } => Err(Error::internal("The broker did not explain.")),
            };
        }
        let compiled = check_policy("policy", &state.next)?;
        let fence = Fence::new(self.inner.config.egress.allow_private.clone());
        let now = u64::try_from(self.inner.now()).unwrap_or(0);
        explain(&compiled, &fence, url, method, now).map_err(Error::invalid)
    }
}
