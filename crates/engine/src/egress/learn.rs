//! What a run needs: a session is opened for a while, and its audit lines say what it reached.
//!
//! Invariant: an opened session gets its policy back, whoever goes away: the policy is in its record
//! while it is open, and comes back when the asker says so, when his connection is gone, and when an
//! engine adopts the session. Rules stay in force while it is open, so credentials work; ranges that
//! are denied stay denied.

use std::collections::BTreeSet;
use std::sync::Arc;

use bivouac_egress::audit::{Kind, Line};
use bivouac_egress::reason::Verdict;
use bivouac_types::access::Verb;
use bivouac_types::id::SessionId;
use bivouac_types::name::Namespace;
use bivouac_types::policy::{Cidr, CustomPolicy, Domain, HostPattern, NetworkPolicy};
use bivouac_types::session::Session;

use crate::Engine;
use crate::api::Principal;
use crate::egress::edit::everything;
use crate::error::{Error, ErrorKind};
use crate::inner::{Inner, Live};
use crate::lifecycle::chain;

/// Most lines that are looked at: a run that reaches more has no small policy.
const MAX_LINES: usize = 100_000;

/// Keeps a session open until it is dropped.
#[derive(Debug)]
pub struct Learning {
    inner: Arc<Inner>,
    session: SessionId,
    since: u64,
}

/// What a run reached.
#[derive(Debug, Clone, PartialEq)]
pub struct Learned {
    /// The smallest policy that allows it.
    pub policy: NetworkPolicy,
    /// What that policy cannot say, or what should be looked at.
    pub notes: Vec<String>,
}

impl Learning {
    /// The session that is open.
    #[must_use]
    pub fn session(&self) -> &SessionId {
        &self.session
    }

    /// Where its audit lines begin.
    #[must_use]
    pub fn since(&self) -> u64 {
        self.since
    }
}

impl Drop for Learning {
    fn drop(&mut self) {
        // A session of an engine that ends is closed again by whoever adopts it.
        if self.inner.is_closing() || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let (inner, session) = (Arc::clone(&self.inner), self.session.clone());
        self.inner.spawn(async move {
            if let Err(error) = inner.close_again(&session).await {
                tracing::warn!(%session, cause = %chain(&error), "the policy of a session could not be put back");
            }
        });
    }
}

/// The policy of a session that learns: a list, because a broker asks connections for the name of their
/// host only where names are listed.
fn opened(policy: &NetworkPolicy) -> Result<NetworkPolicy, Error> {
    let mut open = match policy {
        NetworkPolicy::Custom(custom) => custom.clone(),
        NetworkPolicy::AllowAll | NetworkPolicy::DenyAll => CustomPolicy::default(),
    };
    for domain in everything()?.domains {
        if !open.domains.iter().any(|known| known.host == domain.host && known.port.is_none()) {
            open.domains.push(domain);
        }
    }
    open.plain_http = true;
    Ok(NetworkPolicy::Custom(open))
}

/// The smallest policy that lets the same lines through again. Rules of `before` stay with their hosts.
fn smallest<'a>(before: &NetworkPolicy, lines: impl Iterator<Item = &'a Line>) -> Learned {
    let (mut hosts, mut ranges) = (BTreeSet::new(), Vec::new());
    let mut looked_up = BTreeSet::new();
    let (mut plain, mut datagrams) = (false, false);
    for line in lines {
        // Datagrams are refused also in a session that learns, and a run that has sent some needs them.
        datagrams |= line.kind == Kind::Udp;
        if line.verdict == Verdict::Deny {
            continue;
        }
        match (line.kind, &line.host, &line.asked) {
            (Kind::Connect | Kind::Http, Some(host), _) => {
                plain |= line.host_from.as_deref() == Some("host") && !line.intercepted;
                hosts.insert(host.clone());
            }
            (Kind::Connect, None, Some(asked)) => {
                let range = address(asked).and_then(|ip| Cidr::parse(&ip.to_string()).ok());
                ranges.extend(range.filter(|range| !ranges.contains(range)).iter());
            }
            (Kind::Dns, Some(host), _) => {
                looked_up.insert(host.clone());
            }
            _ => {}
        }
    }
    if !ranges.is_empty() {
        // Which of them led to an address that names no host is not known, and without its name a run
        // does not find it.
        hosts.append(&mut looked_up);
    }
    let known = match before {
        NetworkPolicy::Custom(custom) => custom.clone(),
        _ => CustomPolicy::default(),
    };
    let mut notes = Vec::new();
    let domains = hosts.iter().filter_map(|host| HostPattern::parse(host).ok()).map(|host| {
        let same = known.domains.iter().find(|d| d.host == host);
        let rules = same.map(|d| d.rules.clone()).unwrap_or_default();
        Domain { host, port: None, rules }
    });
    let mut policy = CustomPolicy {
        domains: domains.collect(),
        allow_cidrs: ranges,
        deny_cidrs: known.deny_cidrs,
        ..CustomPolicy::default()
    };
    if plain {
        policy.plain_http = true;
        notes.push("it used plain HTTP, which anybody on the way can read and change".to_owned());
    }
    if !policy.allow_cidrs.is_empty() {
        notes.push(
            "addresses are connections that name no host (SSH, databases, plain HTTP): they may \
             change; for plain HTTP on port 80, \"plainHttp\": true with the name does as well"
                .to_owned(),
        );
    }
    if datagrams {
        notes.push("it sent UDP, which only allow-all lets through".to_owned());
    }
    if policy.domains.is_empty() && policy.allow_cidrs.is_empty() {
        notes.push("it reached nothing".to_owned());
        return Learned { policy: NetworkPolicy::DenyAll, notes };
    }
    Learned { policy: NetworkPolicy::Custom(policy), notes }
}

/// The address of `ADDRESS:PORT` or `ADDRESS`.
fn address(text: &str) -> Option<std::net::IpAddr> {
    let with_port = text.parse::<std::net::SocketAddr>().map(|at| at.ip());
    with_port.or_else(|_| text.parse()).ok()
}

impl Inner {
    /// Gives a session that learns its policy back. Nothing to do for any other.
    pub(crate) async fn close_again(&self, id: &SessionId) -> Result<(), Error> {
        let give_back = |session: &mut Session| {
            let Some(before) = session.policy_before.take() else { return Ok(false) };
            session.policy = before;
            Ok(true)
        };
        match self.replace_policy(id, give_back).await {
            // It has ended, and its next session starts with the sandbox's own.
            Err(error) if matches!(error.kind, ErrorKind::Gone | ErrorKind::Transition) => Ok(()),
            other => other.map(drop),
        }
    }

    /// As [`Inner::close_again`], for a session that was just adopted.
    pub(crate) async fn close_adopted(&self, live: &Live) {
        let session = live.row().session;
        if session.policy_before.is_none() {
            return;
        }
        if let Err(error) = self.close_again(&session.id).await {
            tracing::error!(session = %session.id, cause = %chain(&error), "the policy of a session could not be put back");
        }
    }

    async fn lines_since(&self, id: &SessionId, since: u64) -> Result<Vec<Line>, Error> {
        let (mut lines, mut from) = (Vec::new(), since);
        while lines.len() < MAX_LINES {
            let (bytes, next) = self.runtime.read_audit(id, from).await?;
            if next <= from {
                break;
            }
            let read = bytes.split(|byte| *byte == b'\n');
            lines.extend(read.filter_map(|line| serde_json::from_slice::<Line>(line).ok()));
            from = next;
        }
        Ok(lines)
    }

    async fn audit_end(&self, id: &SessionId) -> Result<u64, Error> {
        let mut from = 0;
        loop {
            let (_, next) = self.runtime.read_audit(id, from).await?;
            if next <= from {
                return Ok(from);
            }
            from = next;
        }
    }
}

impl Engine {
    /// Opens a running session until the answer is dropped, or [`Engine::learned`] is called.
    ///
    /// # Errors
    /// 404; 409 when it is open already; 410 or 422 when it does not run.
    pub async fn learn(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
    ) -> Result<Learning, Error> {
        who.may(Verb::Policy, ns)?;
        let id = self.inner.named(ns, name).await?.sandbox.current_session_id;
        self.inner.present(&ns.team, &id).await?;
        tracing::info!(by = %who.name, sandbox = %name, session = %id, "learn: the session is open");
        let since = self.inner.audit_end(&id).await?;
        let inner = Arc::clone(&self.inner);
        let work = async move {
            let open = |session: &mut Session| {
                if session.policy_before.is_some() {
                    let message = format!(
                        "Somebody is learning what session {} needs; wait for the end of that.",
                        session.id
                    );
                    return Err(Error::new(ErrorKind::Conflict, "policy_learning", message));
                }
                let wide = opened(&session.policy)?;
                session.policy_before = Some(std::mem::replace(&mut session.policy, wide));
                Ok(true)
            };
            match inner.replace_policy(&id, open).await {
                Ok(_) => Ok(Learning { inner, session: id, since }),
                Err(error) => {
                    if error.kind != ErrorKind::Conflict {
                        let _ = inner.close_again(&id).await;
                    }
                    Err(error)
                }
            }
        };
        self.inner.run(work).await
    }

    /// Ends the learning: the session has its policy back when this answers what was learned.
    ///
    /// # Errors
    /// 404; 409 when the session is not open.
    pub async fn learned(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        since: u64,
    ) -> Result<Learned, Error> {
        who.may(Verb::Policy, ns)?;
        let id = self.inner.named(ns, name).await?.sandbox.current_session_id;
        let row = self.inner.session_row(&ns.team, &id).await?;
        let Some(before) = row.session.policy_before else {
            let message = format!("Nobody is learning what session {id} needs.");
            return Err(Error::new(ErrorKind::Conflict, "policy_not_learning", message));
        };
        tracing::info!(by = %who.name, sandbox = %name, session = %id, "learn: the session is closed again");
        let inner = Arc::clone(&self.inner);
        let work = async move {
            inner.close_again(&id).await?;
            let lines = inner.lines_since(&id, since).await?;
            Ok(smallest(&before, lines.iter()))
        };
        self.inner.run(work).await
    }
}

#[cfg(test)]
mod tests {
    use bivouac_egress::reason::Reason;
    use bivouac_types::policy::{Action, Rule};

    use super::*;

    fn line(kind: Kind, verdict: Verdict, host: Option<&str>, asked: &str) -> Line {
        let session = SessionId::new(1, [1; 10]);
        let mut line = Line::new(session, kind, verdict, Reason::CatchAll);
        line.host = host.map(str::to_owned);
        line.host_from = host.map(|_| "sni".to_owned());
        line.asked = Some(asked.to_owned());
        line
    }

    #[test]
    fn the_smallest_policy_names_what_was_reached() {
        let lines = [
            line(Kind::Dns, Verdict::Allow, Some("asked-only.test"), ""),
            line(Kind::Connect, Verdict::Allow, Some("b.test"), "192.0.2.1:443"),
            line(Kind::Connect, Verdict::Allow, Some("a.test"), "192.0.2.1:443"),
            line(Kind::End, Verdict::Allow, Some("a.test"), "192.0.2.1:443"),
            line(Kind::Connect, Verdict::Deny, Some("denied.test"), "192.0.2.1:443"),
            line(Kind::Connect, Verdict::Allow, None, "[2001:db8::1]:22"),
            line(Kind::Udp, Verdict::Allow, None, "192.0.2.1:123"),
        ];
        let forward = Action::Forward { url: "https://proxy.test".to_owned() };
        let before = CustomPolicy {
            domains: vec![
                Domain {
                    host: HostPattern::parse("a.test").unwrap(),
                    port: None,
                    rules: vec![Rule::new(None, forward)],
                },
                Domain {
                    host: HostPattern::parse("unused.test").unwrap(),
                    port: None,
                    rules: vec![],
                },
            ],
            deny_cidrs: vec![Cidr::parse("198.51.100.0/24").unwrap()],
            ..CustomPolicy::default()
        };
        let learned = smallest(&NetworkPolicy::Custom(before.clone()), lines.iter());
        let NetworkPolicy::Custom(policy) = learned.policy else { panic!("not custom") };
        let hosts: Vec<_> =
            policy.domains.iter().map(|d| (d.host.as_str(), d.rules.len())).collect();
        assert_eq!(hosts, [("a.test", 1), ("asked-only.test", 0), ("b.test", 0)]);
        assert_eq!(policy.allow_cidrs, [Cidr::parse("2001:db8::1").unwrap()]);
        assert_eq!(policy.deny_cidrs, before.deny_cidrs);
        assert!(!policy.plain_http);
        assert_eq!(learned.notes.len(), 2, "{:?}", learned.notes);
    }

    #[test]
    fn names_without_a_connection_are_needed_for_addresses_alone() {
        let dns = line(Kind::Dns, Verdict::Allow, Some("asked.test"), "");
        let connect = line(Kind::Connect, Verdict::Allow, Some("a.test"), "192.0.2.1:443");
        let hosts = |lines: &[Line]| match smallest(&NetworkPolicy::AllowAll, lines.iter()).policy {
            NetworkPolicy::Custom(policy) => {
                policy.domains.iter().map(|d| d.host.as_str().to_owned()).collect()
            }
            _ => Vec::new(),
        };
        assert_eq!(hosts(&[dns.clone(), connect.clone()]), ["a.test"]);
        let nameless = line(Kind::Connect, Verdict::Allow, None, "192.0.2.2:80");
        assert_eq!(hosts(&[dns, connect, nameless]), ["a.test", "asked.test"]);
    }

    #[test]
    fn a_run_that_reached_nothing_needs_nothing() {
        let learned = smallest(&NetworkPolicy::AllowAll, std::iter::empty());
        assert_eq!(learned.policy, NetworkPolicy::DenyAll);
    }

    #[test]
    fn an_opened_policy_keeps_rules_and_denials() {
        let NetworkPolicy::Custom(open) = opened(&NetworkPolicy::DenyAll).unwrap() else {
            panic!("not custom")
        };
        assert_eq!(open.domains[0].host.as_str(), "*");
        let narrow = CustomPolicy {
            domains: vec![Domain {
                host: HostPattern::parse("a.test").unwrap(),
                port: None,
                rules: vec![],
            }],
            deny_cidrs: vec![Cidr::parse("198.51.100.0/24").unwrap()],
            ..CustomPolicy::default()
        };
        let NetworkPolicy::Custom(open) = opened(&NetworkPolicy::Custom(narrow)).unwrap() else {
            panic!("not custom")
        };
        let hosts: Vec<_> = open.domains.iter().map(|d| d.host.as_str()).collect();
        assert_eq!(hosts, ["a.test", "*"]);
        assert_eq!(open.deny_cidrs.len(), 1);
    }
}
