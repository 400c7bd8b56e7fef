//! The policy in force, compiled: what may be resolved, reached and seen (reference/egress.md §1).
//!
//! Owns every decision that follows from what the user listed. Invariants: a policy that lists nothing
//! allows nothing; `subnets.deny` beats all else; the order of the lists never matters; a value of this
//! type never changes, it is replaced as a whole. What is denied above all policies is [`crate::address`].
//!
//! Which entry decides about a name: an exact name before wildcards; among wildcards the one with more
//! literal labels, then fewer `*`, then the one that does not begin with `*`, then the lower text. Of
//! two entries for the same name the one with the port. Only entries that cover the port take part.
//!
//! Called by `broker`, `dns` and `intercept` in the shim, and by the engine, which compiles each policy
//! that a client sends: [`PolicyError`] becomes the client's 400.

mod hint;
mod matcher;
mod names;
mod ranges;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use bivouac_types::id::ValueId;
use bivouac_types::policy::{Action, CustomPolicy, Domain, Match, NetworkPolicy, Rule};

use self::matcher::{Compiler, Matcher};
use self::names::Names;
use self::ranges::Ranges;
use crate::address::{embedded, unmap};
use crate::canonical::{self, Name, PathError};
use crate::reason::Reason;

pub use self::hint::Hint;
pub use self::matcher::{MAX_REGEXES, RequestView};

/// Port of intercepted requests when the entry names none: credentials go nowhere else.
const HTTPS: u16 = 443;

/// Why a policy cannot be compiled. It is a policy that [`NetworkPolicy::parse`] accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PolicyError {
    /// Path of the field, in the words of the parser: `networkPolicy.allow["a.com"][0].match.path.regex`.
    pub field: Option<String>,
    /// What is wrong and what is accepted.
    pub message: String,
}

/// What a policy amounts to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Everything that is not denied above all policies.
    AllowAll,
    /// Nothing, DNS included: also a custom policy that allows nothing.
    DenyAll,
    /// What it lists.
    Custom,
}

/// Whether the guest may resolve a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// It may.
    pub allowed: bool,
    /// Why, or why not; [`Reason::DenyAll`] means that nothing is resolved at all.
    pub reason: Reason,
    /// Entry of the policy that decided.
    pub entry: Option<Arc<str>>,
}

/// What is done with a connection to a name.
#[derive(Debug, Clone)]
pub enum Named {
    /// It is refused.
    Deny(Reason),
    /// It passes unseen.
    Pass {
        /// Why.
        reason: Reason,
        /// Entry that allows it.
        entry: Arc<str>,
    },
    /// Its requests are shown to rules.
    Intercept(Arc<Site>),
}

/// What the lists of ranges say about an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// `subnets.deny` has it, or nothing is allowed.
    Denied {
        /// The range, or `deny-all`.
        entry: Arc<str>,
    },
    /// `subnets.allow` has it, or everything is allowed: whatever the name, nothing is looked at.
    Allowed {
        /// The range, or `allow-all`.
        entry: Arc<str>,
    },
    /// Names decide.
    Unlisted,
}

/// A policy, ready to decide.
#[derive(Debug)]
pub struct Compiled {
    mode: Mode,
    names: Names<Entry>,
    allow: Ranges,
    deny: Ranges,
    plain_http: bool,
    open_dns: bool,
    /// `allow-all` or `deny-all`, for decisions that no entry of a list made.
    whole: Arc<str>,
    open_entry: Arc<str>,
    values: BTreeSet<ValueId>,
}

/// What the policy says about a pattern.
#[derive(Debug, Clone)]
struct Entry {
    text: Arc<str>,
    port: Option<u16>,
    site: Option<Arc<Site>>,
}

impl Compiled {
    /// Compiles a policy.
    ///
    /// # Errors
    /// [`PolicyError`] for a regular expression that is malformed or too large, and for too many.
    pub fn new(policy: &NetworkPolicy) -> Result<Self, PolicyError> {
        let nothing = CustomPolicy::default();
        let (mode, custom) = match policy {
            NetworkPolicy::AllowAll => (Mode::AllowAll, &nothing),
            NetworkPolicy::DenyAll => (Mode::DenyAll, &nothing),
            NetworkPolicy::Custom(c) if c.domains.is_empty() && c.allow_cidrs.is_empty() => {
                (Mode::DenyAll, &nothing)
            }
            NetworkPolicy::Custom(custom) => (Mode::Custom, custom),
        };
        let mut compiler = Compiler::default();
        let mut names = Names::default();
        let mut values = BTreeSet::new();
        for domain in &custom.domains {
            let entry = compile_domain(domain, &mut compiler)?;
            if let Some(site) = &entry.site {
                values.extend(site.values().cloned());
            }
            names.insert(&domain.host, domain.port, entry);
        }
        Ok(Self {
            mode,
            names,
            allow: Ranges::new(&custom.allow_cidrs),
            deny: Ranges::new(&custom.deny_cidrs),
            plain_http: custom.plain_http,
            open_dns: custom.open_dns,
            whole: if mode == Mode::AllowAll { "allow-all" } else { "deny-all" }.into(),
            open_entry: "dns: open".into(),
            values,
        })
    }

    /// What the policy amounts to.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// May the guest resolve this name? A name that is listed for one port may be resolved.
    #[must_use]
    pub fn resolves(&self, name: &Name) -> Decision {
        let allow = |reason, entry: &Arc<str>| Decision {
            allowed: true,
            reason,
            entry: Some(Arc::clone(entry)),
        };
        match self.mode {
            Mode::AllowAll => allow(Reason::AllowAll, &self.whole),
            Mode::DenyAll => Decision {
                allowed: false,
                reason: Reason::DenyAll,
                entry: Some(Arc::clone(&self.whole)),
            },
            Mode::Custom => match self.names.find(name.as_str(), None) {
                Some(entry) => allow(Reason::DomainListed, &entry.text),
                None if self.open_dns => allow(Reason::CatchAll, &self.open_entry),
                None => Decision { allowed: false, reason: Reason::DomainNotListed, entry: None },
            },
        }
    }

    /// What is done with a TLS connection to this name and port, as far as names go: `subnets.deny`
    /// still has to be asked about each address.
    #[must_use]
    pub fn named(&self, name: &Name, port: u16) -> Named {
        match self.mode {
            Mode::AllowAll => {
                Named::Pass { reason: Reason::AllowAll, entry: Arc::clone(&self.whole) }
            }
            Mode::DenyAll => Named::Deny(Reason::DenyAll),
            Mode::Custom => match self.names.find(name.as_str(), Some(port)) {
                None => Named::Deny(Reason::DomainNotListed),
                Some(Entry { site: Some(site), port: only, .. })
                    if port == only.unwrap_or(HTTPS) =>
                {
                    Named::Intercept(Arc::clone(site))
                }
                Some(entry) => {
                    Named::Pass { reason: Reason::DomainListed, entry: Arc::clone(&entry.text) }
                }
            },
        }
    }

    /// What the ranges say about this address, in whatever form it is written. An address that leads
    /// to a denied one (6to4, Teredo) is denied as well.
    #[must_use]
    pub fn address(&self, ip: IpAddr) -> Address {
        match self.mode {
            Mode::AllowAll => Address::Allowed { entry: Arc::clone(&self.whole) },
            Mode::DenyAll => Address::Denied { entry: Arc::clone(&self.whole) },
            Mode::Custom => {
                let ip = unmap(ip);
                let denied = self
                    .deny
                    .find(ip)
                    .or_else(|| embedded(ip).find_map(|inner| self.deny.find(inner)));
                match (denied, self.allow.find(ip)) {
                    (Some(entry), _) => Address::Denied { entry: Arc::clone(entry) },
                    (None, Some(entry)) => Address::Allowed { entry: Arc::clone(entry) },
                    (None, None) => Address::Unlisted,
                }
            }
        }
    }

    /// The entry `*`, or its like for this port: it lets through what names no host, unseen and
    /// without credentials.
    #[must_use]
    pub fn catch_all(&self, port: u16) -> Option<Arc<str>> {
        match self.mode {
            Mode::AllowAll => Some(Arc::clone(&self.whole)),
            Mode::DenyAll => None,
            Mode::Custom => self.names.any(port).map(|entry| Arc::clone(&entry.text)),
        }
    }

    /// Whether plain HTTP on port 80 is judged by its `Host`.
    #[must_use]
    pub fn plain_http(&self) -> bool {
        self.mode == Mode::Custom && self.plain_http
    }

    /// Whether any name can be resolved at all.
    #[must_use]
    pub fn dns_on(&self) -> bool {
        match self.mode {
            Mode::AllowAll => true,
            Mode::DenyAll => false,
            Mode::Custom => self.open_dns || self.names.iter().next().is_some(),
        }
    }

    /// Values that its rules need.
    pub fn values(&self) -> impl Iterator<Item = &ValueId> {
        self.values.iter()
    }

    /// The first moment after `now_ms` at which a rule ends: flows are to be judged again then.
    #[must_use]
    pub fn next_expiry(&self, now_ms: u64) -> Option<u64> {
        let sites = self.names.iter().filter_map(|entry| entry.site.as_ref());
        let ends = sites.flat_map(|site| site.rules.iter().filter_map(|rule| rule.expires_at));
        ends.filter(|end| *end > now_ms).min()
    }
}

/// A domain whose requests are shown to rules. Two are equal when they do the same to every request.
#[derive(Debug, PartialEq)]
pub struct Site {
    /// Its entry in the policy.
    pub entry: Arc<str>,
    /// Its rules, in order.
    pub rules: Vec<CompiledRule>,
}

/// A rule, ready to be tried.
#[derive(Debug)]
pub struct CompiledRule {
    matcher: Option<Matcher>,
    /// What the matcher was made of: for comparisons.
    source: Option<Match>,
    /// What it does.
    pub action: Action,
    /// Name of the credential that made it.
    pub credential: Option<String>,
    /// Whose credential session it is.
    pub actor: Option<String>,
    /// From when on it acts no more, ms since the epoch.
    pub expires_at: Option<u64>,
}

impl PartialEq for CompiledRule {
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source
            && self.action == other.action
            && self.credential == other.credential
            && self.actor == other.actor
            && self.expires_at == other.expires_at
    }
}

impl CompiledRule {
    /// Whether it is over.
    #[must_use]
    pub fn expired(&self, now_ms: u64) -> bool {
        self.expires_at.is_some_and(|end| end <= now_ms)
    }

    /// Whether the request is one of those that it is for.
    #[must_use]
    pub fn matches(&self, request: &RequestView<'_>) -> bool {
        self.matcher.as_ref().is_none_or(|matcher| matcher.matches(request))
    }

    /// Values that its action needs.
    pub fn values(&self) -> impl Iterator<Item = &ValueId> {
        let (headers, sign) = match &self.action {
            Action::Transform { headers } => (headers.as_slice(), None),
            Action::Sign(sign) => (&[][..], Some(&sign.value)),
            Action::Forward { .. } | Action::Respond(_) => (&[][..], None),
        };
        headers.iter().map(|set| &set.value).chain(sign)
    }
}

impl Site {
    /// The rule that acts on a request, and its place: the first that matches and has not expired.
    #[must_use]
    pub fn first_match(
        &self,
        request: &RequestView<'_>,
        now_ms: u64,
    ) -> Option<(usize, &CompiledRule)> {
        let mut rules = self.rules.iter().enumerate();
        rules.find(|(_, rule)| !rule.expired(now_ms) && rule.matches(request))
    }

    /// Reads the path of a request for these rules: strictly where one of them looks at it
    /// ([`crate::canonical::path`]). An encoded slash is accepted where every rule judges it as it
    /// judges a slash: then it does not matter which of them the destination sees.
    ///
    /// # Errors
    /// [`PathError`]: the path has two readings.
    pub fn path(&self, raw: &str) -> Result<String, PathError> {
        if !self.looks_at_paths() {
            return canonical::path(raw, false);
        }
        let (path, other) = canonical::readings(raw)?;
        let matchers = || self.rules.iter().filter_map(|rule| rule.matcher.as_ref());
        if let Some(other) = other
            && matchers().any(|m| m.path_fits(&path) != m.path_fits(&other))
        {
            return Err(PathError("means two things to the rules: a slash in it is encoded"));
        }
        Ok(path)
    }

    /// Whether a path with two readings could change which rule acts.
    #[must_use]
    pub fn looks_at_paths(&self) -> bool {
        self.rules.iter().any(|rule| rule.matcher.as_ref().is_some_and(Matcher::looks_at_path))
    }

    /// Values that its rules need.
    pub fn values(&self) -> impl Iterator<Item = &ValueId> {
        self.rules.iter().flat_map(CompiledRule::values)
    }

    /// Whether one of its rules needs this value.
    #[must_use]
    pub fn sees_value(&self, value: &ValueId) -> bool {
        self.values().any(|v| v == value)
    }
}

fn compile_domain(domain: &Domain, compiler: &mut Compiler) -> Result<Entry, PolicyError> {
    let text: Arc<str> = match domain.port {
        Some(port) => format!("{}:{port}", domain.host).into(),
        None => domain.host.as_str().into(),
    };
    let mut rules = Vec::with_capacity(domain.rules.len());
    for (i, rule) in domain.rules.iter().enumerate() {
        let field = || format!("networkPolicy.allow[\"{text}\"][{i}].match");
        rules.push(compile_rule(rule, compiler).map_err(|e| e.below(&field()))?);
    }
    let site = (!rules.is_empty()).then(|| Arc::new(Site { entry: Arc::clone(&text), rules }));
    Ok(Entry { text, port: domain.port, site })
}

fn compile_rule(rule: &Rule, compiler: &mut Compiler) -> Result<CompiledRule, PolicyError> {
    Ok(CompiledRule {
        matcher: rule.matcher.as_ref().map(|m| compiler.matcher(m)).transpose()?,
        source: rule.matcher.clone(),
        action: rule.action.clone(),
        credential: rule.credential.clone(),
        actor: rule.actor.clone(),
        expires_at: rule.expires_at,
    })
}

impl PolicyError {
    /// Puts a path in front of the field.
    fn below(self, path: &str) -> Self {
        let field = self.field.map(|field| format!("{path}.{field}"));
        Self { field, ..self }
    }
}
