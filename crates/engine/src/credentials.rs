//! Ready-made credentials: one word instead of a policy's rules.
//!
//! Owns: adding them to a sandbox, listing and removing them. Invariants: a credential is nothing but
//! entries and rules of the policy that carry its name, so what can be done with it is what the policy
//! says; it names a secret of the project and never holds one; what it puts into the environment is a dummy
//! that counts only in the header that its rule names. Called by HTTP and by creates and forks.

mod presets;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use bivouac_types::access::Verb;
use bivouac_types::id::ValueId;
use bivouac_types::name::Namespace;
use bivouac_types::policy::{
    Action, CustomPolicy, Domain, Draft, HostPattern, MAX_DOMAINS, MAX_RULES, NetworkPolicy, Rule,
};
use bivouac_types::secret::Secret;

use crate::Engine;
use crate::api::{Principal, UpdateSandbox};
use crate::error::Error;
use crate::inner::{Change, Inner};

/// Longest name of a credential and of an actor.
const MAX_NAME: usize = 100;
/// Most credentials of one create.
const MAX_SPECS: usize = 32;

/// A credential that a sandbox shall have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CredentialSpec {
    /// `github`, `npm`, `anthropic`, `openai`, `aws`, `basic` or `bearer`.
    pub kind: String,
    /// What it is called in policies and lists; absent is the kind.
    pub name: Option<String>,
    /// The secret that it uses; absent is the kind's own, for example `GITHUB_TOKEN`.
    pub secret: Option<String>,
    /// What else the kind takes: hosts, repositories, what is allowed.
    pub options: BTreeMap<String, String>,
    /// Whose it is: a fork by somebody else does not get it.
    pub actor: Option<String>,
    /// From when on it counts no more, ms since the epoch.
    pub expires_at: Option<u64>,
}

/// A credential that a sandbox has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Credential {
    /// Its name.
    pub name: String,
    /// Entries of the policy with rules of it.
    pub hosts: Vec<String>,
    /// Secrets that those rules name.
    pub secrets: Vec<String>,
    /// Whose it is.
    pub actor: Option<String>,
    /// From when on it counts no more, ms since the epoch.
    pub expires_at: Option<u64>,
}

/// A credential that was added or removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialChange {
    /// The credential.
    pub credential: Credential,
    /// Variables that commands get from now on, by name: dummies.
    pub env: Vec<String>,
    /// Hosts that stay reachable although they were only listed for the credential, after a removal.
    pub still_allowed: Vec<String>,
}

/// What a credential is made of.
pub(crate) struct Made {
    name: String,
    entries: Vec<Domain>,
    env: BTreeMap<String, String>,
}

impl Inner {
    /// Checks credentials, and seals their values.
    ///
    /// # Errors
    /// 400 for what a kind does not take, 404 for a secret that does not exist: both say what to do.
    pub(crate) async fn make_credentials(
        &self,
        ns: &Namespace,
        specs: &[CredentialSpec],
    ) -> Result<Vec<Made>, Error> {
        if specs.len() > MAX_SPECS {
            return Err(Error::invalid(format!("Invalid credentials: at most {MAX_SPECS}")));
        }
        let mut made: Vec<Made> = Vec::new();
        for spec in specs {
            let one = self.make_credential(ns, spec).await?;
            if made.iter().any(|other| other.name == one.name) {
                let name = &one.name;
                return Err(Error::invalid(format!(
                    "Invalid credentials: '{name}' is there twice; give one of them another name"
                )));
            }
            made.push(one);
        }
        Ok(made)
    }

    async fn make_credential(&self, ns: &Namespace, spec: &CredentialSpec) -> Result<Made, Error> {
        let kind: String = spec.kind.chars().take(MAX_NAME).collect();
        let name = spec.name.clone().unwrap_or_else(|| spec.kind.clone());
        let bad = |why: String| Error::invalid(format!("Invalid credential '{kind}': {why}"));
        for (what, text) in [("name", Some(&name)), ("actor", spec.actor.as_ref())] {
            let Some(text) = text else { continue };
            let plain = text.bytes().all(|b| b.is_ascii_graphic());
            if text.is_empty() || text.len() > MAX_NAME || !plain {
                return Err(bad(format!(
                    "its {what} must have 1 to {MAX_NAME} visible characters"
                )));
            }
        }
        let now = u64::try_from(self.now()).unwrap_or(0);
        if spec.expires_at.is_some_and(|at| at <= now) {
            return Err(bad("it would have expired already".to_owned()));
        }
        let preset = presets::expand(spec).map_err(bad)?;
        let mut values = BTreeMap::new();
        let mut entries: Vec<Domain> = Vec::new();
        for wanted in preset.rules {
            let host = HostPattern::parse(&wanted.host)
                .map_err(|why| bad(format!("'{}' {why}", wanted.host)))?;
            let id = self.ids.value(self.now())?;
            values.insert(id.clone(), Secret::new(wanted.value));
            let rule = Rule {
                credential: Some(name.clone()),
                actor: spec.actor.clone(),
                expires_at: spec.expires_at,
                ..Rule::new(Some(wanted.matcher), (wanted.action)(id))
            };
            match entries.iter_mut().find(|d| d.host == host && d.port == wanted.port) {
                Some(domain) => domain.rules.push(rule),
                None => entries.push(Domain { host, port: wanted.port, rules: vec![rule] }),
            }
        }
        let domains = CustomPolicy { domains: entries, ..CustomPolicy::default() };
        let draft = Draft { policy: NetworkPolicy::Custom(domains), values };
        let NetworkPolicy::Custom(kept) = self.keep_values(ns, draft).await? else {
            return Err(Error::internal("A credential's rules were lost."));
        };
        Ok(Made { name, entries: kept.domains, env: preset.env })
    }

    /// Takes the rules out of a policy that are somebody else's, for a fork. Answers the names of the
    /// credentials.
    pub(crate) fn drop_foreign(&self, who: &Principal, policy: &mut NetworkPolicy) -> Vec<String> {
        let foreign = |rule: &Rule| rule.actor.as_ref().is_some_and(|actor| *actor != who.name);
        let mut names = Vec::new();
        for rule in domains(policy).iter_mut().flat_map(|domain| {
            let (dropped, kept) = std::mem::take(&mut domain.rules).into_iter().partition(foreign);
            domain.rules = kept;
            let dropped: Vec<Rule> = dropped;
            dropped
        }) {
            let name = rule.credential.unwrap_or_else(|| "a rule without a name".to_owned());
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }
}

fn domains(policy: &mut NetworkPolicy) -> &mut [Domain] {
    match policy {
        NetworkPolicy::Custom(custom) => &mut custom.domains,
        NetworkPolicy::AllowAll | NetworkPolicy::DenyAll => &mut [],
    }
}

/// Adds credentials to a policy and dummies to an environment, where a variable that is there stays.
///
/// # Errors
/// 400: the policy would have too many entries.
pub(crate) fn add(
    made: &[Made],
    policy: &NetworkPolicy,
    env: &mut BTreeMap<String, String>,
) -> Result<NetworkPolicy, Error> {
    let mut policy = policy.clone();
    for one in made {
        policy = with(policy, one)?;
        for (name, dummy) in &one.env {
            env.entry(name.clone()).or_insert_with(|| dummy.clone());
        }
    }
    Ok(policy)
}

/// Adds credentials to what a create asks for.
///
/// # Errors
/// As [`add`].
pub(crate) fn add_to(made: &[Made], config: &mut UpdateSandbox) -> Result<(), Error> {
    if made.is_empty() {
        return Ok(());
    }
    let mut env = config.env.take().unwrap_or_default();
    let present = config.policy.take().map(|draft| draft.policy).unwrap_or_default();
    let policy = add(made, &present, &mut env)?;
    config.env = Some(env);
    config.policy = Some(Draft { policy, values: BTreeMap::new() });
    Ok(())
}

/// A policy with one more credential; an earlier one of that name gives way. `allow-all` becomes a list
/// with `*`, `deny-all` one with nothing else.
fn with(policy: NetworkPolicy, made: &Made) -> Result<NetworkPolicy, Error> {
    let (policy, _) = without(policy, &made.name);
    let mut custom = match policy {
        NetworkPolicy::Custom(custom) => custom,
        NetworkPolicy::DenyAll => CustomPolicy::default(),
        NetworkPolicy::AllowAll => {
            let everything = HostPattern::parse("*")
                .map_err(|why| Error::internal(format!("A catch-all entry {why}.")))?;
            let domains = vec![Domain { host: everything, port: None, rules: Vec::new() }];
            CustomPolicy { domains, ..CustomPolicy::default() }
        }
    };
    for entry in &made.entries {
        let found =
            custom.domains.iter_mut().find(|d| d.host == entry.host && d.port == entry.port);
        let Some(domain) = found else {
            custom.domains.push(entry.clone());
            continue;
        };
        // Ahead of a rule that takes every request: nothing behind it acts.
        let at = domain.rules.iter().position(|rule| rule.matcher.is_none());
        let at = at.unwrap_or(domain.rules.len());
        domain.rules.splice(at..at, entry.rules.iter().cloned());
        if domain.rules.len() > MAX_RULES {
            return Err(Error::invalid(format!(
                "Invalid credential '{}': {} would have more than {MAX_RULES} rules",
                made.name,
                domain.entry()
            )));
        }
    }
    if custom.domains.len() > MAX_DOMAINS {
        return Err(Error::invalid(format!(
            "Invalid credential '{}': the policy would have more than {MAX_DOMAINS} entries",
            made.name
        )));
    }
    Ok(NetworkPolicy::Custom(custom))
}

/// A policy without a credential. An entry that had rules of it and no others is left out when a `*` lets
/// its host through anyway, and stays without rules when not: what was listed on purpose is not closed by
/// this. Answers those that stay.
fn without(policy: NetworkPolicy, name: &str) -> (NetworkPolicy, Vec<String>) {
    let NetworkPolicy::Custom(mut custom) = policy else { return (policy, Vec::new()) };
    let everything = custom.domains.iter().any(|d| d.host.as_str() == "*" && d.port.is_none());
    let mut stay = Vec::new();
    custom.domains.retain_mut(|domain| {
        let before = domain.rules.len();
        domain.rules.retain(|rule| rule.credential.as_deref() != Some(name));
        let emptied = domain.rules.is_empty() && before > 0;
        let drop = emptied && everything && domain.host.as_str() != "*";
        if emptied && !drop {
            stay.push(domain.entry());
        }
        !drop
    });
    (NetworkPolicy::Custom(custom), stay)
}

/// The credentials of a policy.
fn listed(policy: &NetworkPolicy) -> Vec<Credential> {
    let NetworkPolicy::Custom(custom) = policy else { return Vec::new() };
    let mut found: BTreeMap<&str, Credential> = BTreeMap::new();
    for domain in &custom.domains {
        for rule in &domain.rules {
            let Some(name) = &rule.credential else { continue };
            let one = found.entry(name).or_insert_with(|| Credential {
                name: name.clone(),
                actor: rule.actor.clone(),
                expires_at: rule.expires_at,
                ..Credential::default()
            });
            let host = domain.entry();
            if !one.hosts.contains(&host) {
                one.hosts.push(host);
            }
            for secret in secrets(&rule.action) {
                if !one.secrets.contains(secret) {
                    one.secrets.push(secret.clone());
                }
            }
        }
    }
    found.into_values().collect()
}

fn secrets(action: &Action) -> Vec<&String> {
    match action {
        Action::Transform { headers } => headers.iter().flat_map(|set| &set.secrets).collect(),
        Action::Sign(sign) => sign.secrets.iter().collect(),
        Action::Forward { .. } | Action::Respond(_) => Vec::new(),
    }
}

fn find(policy: &NetworkPolicy, name: &str, sandbox: &str) -> Result<Credential, Error> {
    let found = listed(policy).into_iter().find(|one| one.name == name);
    found.ok_or_else(|| {
        let shown: String = name.chars().take(MAX_NAME).collect();
        Error::not_found(format!(
            "Sandbox '{sandbox}' has no credential '{}'; list them with: bivouac credential ls {sandbox}",
            shown.escape_debug()
        ))
    })
}

impl Engine {
    /// The credentials of a sandbox, by name.
    ///
    /// # Errors
    /// 404.
    pub async fn credentials(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
    ) -> Result<Vec<Credential>, Error> {
        who.may_any(&[Verb::Read, Verb::Policy], ns)?;
        Ok(listed(&self.policy(who, ns, sandbox).await?.policy))
    }

    /// Gives a sandbox a credential, now and for sessions to come. One of the same name gives way.
    ///
    /// # Errors
    /// 400 for what its kind does not take, 404 for the sandbox or the secret.
    pub async fn add_credential(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        spec: CredentialSpec,
    ) -> Result<CredentialChange, Error> {
        who.may(Verb::Policy, ns)?;
        self.inner.check_open()?;
        self.inner.named(ns, sandbox).await?;
        tracing::info!(by = %who.name, sandbox, kind = %spec.kind, "add credential");
        let (inner, ns, sandbox) = (Arc::clone(&self.inner), ns.clone(), sandbox.to_owned());
        let work = async move {
            let made = inner.make_credentials(&ns, std::slice::from_ref(&spec)).await?;
            let state = inner
                .change_policy(&ns, &sandbox, |present| {
                    add(&made, present, &mut BTreeMap::new()).map(Some)
                })
                .await?;
            let env: BTreeMap<_, _> = made.iter().flat_map(|one| one.env.clone()).collect();
            inner.add_dummies(&ns, &sandbox, &env).await?;
            let name = made.first().map_or("", |one| one.name.as_str());
            let credential = find(&state.policy, name, &sandbox)?;
            let env = env.into_keys().collect();
            Ok(CredentialChange { credential, env, still_allowed: Vec::new() })
        };
        self.inner.run(work).await
    }

    /// Takes a credential away; requests in flight that use it are cut.
    ///
    /// # Errors
    /// 404.
    pub async fn remove_credential(
        &self,
        who: &Principal,
        ns: &Namespace,
        sandbox: &str,
        name: &str,
    ) -> Result<CredentialChange, Error> {
        who.may(Verb::Policy, ns)?;
        self.inner.check_open()?;
        let credential = find(&self.policy(who, ns, sandbox).await?.policy, name, sandbox)?;
        tracing::info!(by = %who.name, sandbox, name, "remove credential");
        let (inner, ns) = (Arc::clone(&self.inner), ns.clone());
        let (sandbox, name) = (sandbox.to_owned(), name.to_owned());
        let work = async move {
            let mut before = String::new();
            let state = inner
                .change_policy(&ns, &sandbox, |present| {
                    before = present.request_form().to_string();
                    Ok(Some(without(present.clone(), &name).0))
                })
                .await?;
            let after = state.policy.request_form().to_string();
            let env = inner.remove_dummies(&ns, &sandbox, &before, &after).await?;
            let mut still_allowed = credential.hosts.clone();
            let left = match &state.policy {
                NetworkPolicy::Custom(custom) => custom.domains.as_slice(),
                NetworkPolicy::AllowAll | NetworkPolicy::DenyAll => &[],
            };
            let bare =
                |host: &String| left.iter().any(|d| d.entry() == *host && d.rules.is_empty());
            still_allowed.retain(bare);
            Ok(CredentialChange { credential, env, still_allowed })
        };
        self.inner.run(work).await
    }
}

impl Inner {
    /// Puts dummies into the environment of a sandbox and its running session; variables that are there
    /// stay.
    async fn add_dummies(
        &self,
        ns: &Namespace,
        name: &str,
        dummies: &BTreeMap<String, String>,
    ) -> Result<(), Error> {
        let missing = |env: &mut BTreeMap<String, String>| {
            let before = env.len();
            for (name, dummy) in dummies {
                env.entry(name.clone()).or_insert_with(|| dummy.clone());
            }
            env.len() > before
        };
        let sandbox = self.named(ns, name).await?.sandbox;
        self.change_sandbox(&sandbox.id, |row| Ok(missing(&mut row.sandbox.env))).await?;
        self.change_session(&sandbox.current_session_id, |row| {
            Ok(if missing(&mut row.session.env) { Change::Write } else { Change::Leave })
        })
        .await?;
        Ok(())
    }
}

impl Inner {
    /// Takes the dummies out of the environments of a sandbox and its session that rules asked for `before`
    /// and no rule asks for `after`. Answers the variables.
    async fn remove_dummies(
        &self,
        ns: &Namespace,
        name: &str,
        before: &str,
        after: &str,
    ) -> Result<Vec<String>, Error> {
        let sandbox = self.named(ns, name).await?.sandbox;
        let mut gone = Vec::new();
        self.change_sandbox(&sandbox.id, |row| {
            gone = take_dummies(&mut row.sandbox.env, before, after);
            Ok(!gone.is_empty())
        })
        .await?;
        self.change_session(&sandbox.current_session_id, |row| {
            let taken = take_dummies(&mut row.session.env, before, after);
            Ok(if taken.is_empty() { Change::Leave } else { Change::Write })
        })
        .await?;
        Ok(gone)
    }
}

/// A variable with any other value is the user's own and stays.
fn take_dummies(env: &mut BTreeMap<String, String>, before: &str, after: &str) -> Vec<String> {
    let unasked =
        |value: &String| before.contains(value.as_str()) && !after.contains(value.as_str());
    let mut gone: Vec<String> = env
        .iter()
        .filter(|(_, value)| presets::is_dummy(value) && unasked(value))
        .map(|(name, _)| name.clone())
        .collect();
    // Of the pair that AWS demands, only the id is in a rule.
    let pair = [presets::AWS_ID, presets::AWS_KEY].map(str::to_owned);
    if gone.contains(&pair[0]) && env.get(&pair[1]).is_some_and(|key| presets::is_dummy(key)) {
        gone.push(pair[1].clone());
    }
    for name in &gone {
        env.remove(name);
    }
    gone
}

/// How a rule acts with a value.
pub(crate) type Act = Box<dyn FnOnce(ValueId) -> Action + Send>;
