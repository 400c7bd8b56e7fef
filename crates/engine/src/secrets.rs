//! Secrets: set, list and remove them, and put them into header values when those are needed.
//!
//! Owns: the namespace's secrets, the sealed values of policies, and the cache of what providers said.
//! Invariants: a secret is never read back, only its name, kind, version and dates; a value is resolved as
//! late as possible and in the namespace of the session that needs it; an error names secrets and never
//! shows one. Called by HTTP (secrets), by `egress` (values) and by `credentials`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use bivouac_egress::message::Value;
use bivouac_store::SecretRow;
use bivouac_types::Millis;
use bivouac_types::access::Verb;
use bivouac_types::id::ValueId;
use bivouac_types::name::Namespace;
use bivouac_types::policy::{Action, Draft, NetworkPolicy, is_redacted};
use bivouac_types::secret::Secret;
use tokio::sync::Mutex as AsyncMutex;

use crate::Engine;
use crate::api::Principal;
use crate::error::{Error, ErrorKind};
use crate::inner::{Inner, locked};
use crate::lifecycle::chain;
use crate::providers::Source;
use crate::resolve::check_namespace;
use crate::template::{Form, Part, Template, check_name};

/// Kinds of references that read the engine's host.
pub const HOST_SOURCES: [&str; 4] = ["env", "file", "exec", "vault"];
/// Largest secret, bytes.
pub const MAX_SECRET: usize = 64 * 1024;
/// How long a provider's answer is used, ms.
const TTL_MS: Millis = 60_000;
/// How long a provider that failed is left alone, ms: many requests wait for one.
const RETRY_MS: Millis = 1_000;
/// How long an unused value is kept, ms: one that is sealed belongs to a policy that is written a moment
/// later.
const UNUSED_MS: Millis = 3_600_000;

/// What a provider said, and until when it counts.
struct Said {
    outcome: Result<(Secret, Option<Millis>), String>,
    until: Millis,
}

/// A secret's cell: who holds its lock asks the provider, everybody else waits for the answer.
type Cell = Arc<AsyncMutex<Option<Said>>>;

/// Team, project and name.
type Key = (String, String, String);

/// Answers of providers, and the version of the secret that they are of.
#[derive(Default)]
pub(crate) struct Cache(Mutex<HashMap<Key, (i64, Cell)>>);

impl Cache {
    fn cell(&self, row: &SecretRow) -> Cell {
        let key = (row.namespace.team.clone(), row.namespace.project.clone(), row.name.clone());
        let mut cells = locked(&self.0);
        let (version, cell) = cells.entry(key).or_default();
        if *version != row.version {
            *version = row.version;
            *cell = Cell::default();
        }
        Arc::clone(cell)
    }

    fn forget(&self, ns: &Namespace, name: &str) {
        locked(&self.0).remove(&(ns.team.clone(), ns.project.clone(), name.to_owned()));
    }
}

/// What a secret is set to.
#[derive(Debug, Clone)]
pub struct NewSecret {
    /// Where it comes from: `env:NAME`, `file:/path`, `exec:…`, `vault:path#field`,
    /// `github-app:APP/INSTALLATION`. Absent: `value` is the secret.
    pub from: Option<String>,
    /// The secret itself, or (for a GitHub App) its private key.
    pub value: Option<Secret>,
}

/// Whether a principal may use providers that read this host: `local`, the holder of the engine's own token. A made
/// token may not, whatever its rights: it is a right on the host, and not one in the engine.
fn is_operator(who: &Principal) -> bool {
    who.token.is_none() && who.name == "local"
}

impl Engine {
    /// Sets a secret, new or not. Sessions whose policy names it get the new one at once.
    ///
    /// # Errors
    /// 400 for a bad name, value or reference; 403 for a reference that reads the host, from anybody but
    /// the operator.
    pub async fn set_secret(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        new: NewSecret,
    ) -> Result<SecretRow, Error> {
        who.may(Verb::Policy, ns)?;
        check_namespace(ns)?;
        check_name(name).map_err(|why| Error::invalid(format!("Invalid name: it {why}")))?;
        let source =
            Source::new(new).map_err(|why| Error::invalid(format!("Invalid secret: {why}")))?;
        if source.reads_host() && !is_operator(who) {
            let message = "Only the operator of the engine may take secrets from its host.";
            return Err(Error::new(ErrorKind::Forbidden, "forbidden", message));
        }
        if source.calls_elsewhere() && !is_operator(who) {
            let message = "Only the operator of the engine may have it call other places than GitHub's own API.";
            return Err(Error::new(ErrorKind::Forbidden, "forbidden", message));
        }
        let kind = source.kind();
        if source.reads_host() && !self.inner.config.secret_sources.iter().any(|k| k == kind) {
            let message = format!(
                "The operator of this engine takes no secrets from {kind}: (see --secret-sources of serve)."
            );
            return Err(Error::new(ErrorKind::Forbidden, "forbidden", message));
        }
        tracing::info!(by = %who.name, team = %ns.team, project = %ns.project, name, kind, "set secret");
        let now = self.inner.now();
        let row = self.inner.db.put_secret(ns, name, kind, &source.to_sealed(), now).await?;
        self.inner.cache.forget(ns, name);
        self.inner.secret_changed(ns, name).await;
        Ok(row)
    }

    /// The secrets of a namespace, by name, without what they hold.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn secrets(&self, who: &Principal, ns: &Namespace) -> Result<Vec<SecretRow>, Error> {
        who.may_any(&[Verb::Read, Verb::Policy], ns)?;
        check_namespace(ns)?;
        Ok(self.inner.db.secrets(ns).await?)
    }

    /// Removes a secret. Requests that need it are refused from now on.
    ///
    /// # Errors
    /// 404.
    pub async fn remove_secret(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
    ) -> Result<(), Error> {
        who.may(Verb::Policy, ns)?;
        check_namespace(ns)?;
        if check_name(name).is_err() || !self.inner.db.remove_secret(ns, name).await? {
            return Err(no_secret(name));
        }
        tracing::info!(by = %who.name, team = %ns.team, project = %ns.project, name, "remove secret");
        self.inner.cache.forget(ns, name);
        self.inner.secret_changed(ns, name).await;
        Ok(())
    }
}

/// 404, with the command that sets it.
pub(crate) fn no_secret(name: &str) -> Error {
    let shown: String = name.chars().take(100).collect();
    let message = format!(
        "There is no secret '{shown}' in this project; set it with: bivouac secret set {shown}",
        shown = shown.escape_debug()
    );
    Error::not_found(message)
}

impl Inner {
    /// Seals the values of a draft, before the row that names them is written, and answers the policy with
    /// the names of the secrets in it. The same value has the same id each time: what is in flight by an
    /// equal rule goes on when a policy is sent again. A value that no row names is removed after an hour.
    ///
    /// # Errors
    /// 400 for a reference that is misspelled, 404 for a secret that does not exist.
    pub(crate) async fn keep_values(
        &self,
        ns: &Namespace,
        draft: Draft,
    ) -> Result<NetworkPolicy, Error> {
        let Draft { mut policy, mut values } = draft;
        if values.is_empty() {
            return Ok(policy);
        }
        // Whoever calls this has put the values that a client only saw hidden back; nothing else may pass.
        if values.values().any(|value| is_redacted(value.expose())) {
            return Err(Error::invalid(
                "Invalid networkPolicy: it has a hidden value, and there is none to keep",
            ));
        }
        sign_by_any_form(&policy, &mut values);
        // By the id in the draft: the one that the value is kept under, and the secrets in it.
        let mut known = HashMap::new();
        for (id, text) in &values {
            let names = Template::parse(text.expose()).map(|template| template.names());
            known.insert(id.clone(), (self.db.value_id(&ns.team, text)?, names));
        }
        let mut there: HashMap<String, bool> = HashMap::new();
        let domains = match &mut policy {
            NetworkPolicy::Custom(custom) => custom.domains.as_mut_slice(),
            NetworkPolicy::AllowAll | NetworkPolicy::DenyAll => &mut [],
        };
        for domain in domains {
            let host = domain.entry();
            for (index, rule) in domain.rules.iter_mut().enumerate() {
                for (what, id, secrets) in slots(&mut rule.action) {
                    let Some((kept, found)) = known.get(id) else { continue };
                    let found = found.as_ref().map_err(|why| {
                        Error::invalid(format!(
                            "Invalid networkPolicy.allow[\"{host}\"][{index}]: {what} {why}"
                        ))
                    })?;
                    for name in found {
                        if !there.contains_key(name) {
                            let found = self.db.secret_is_there(ns, name).await?;
                            there.insert(name.clone(), found);
                        }
                        if there.get(name) != Some(&true) {
                            return Err(no_secret(name));
                        }
                    }
                    secrets.clone_from(found);
                    id.clone_from(kept);
                }
            }
        }
        let kept: Vec<(&ValueId, &Secret)> = values
            .iter()
            .filter_map(|(id, text)| known.get(id).map(|(kept, _)| (kept, text)))
            .collect();
        self.db.put_values(&ns.team, kept, self.now()).await?;
        Ok(policy)
    }

    /// Puts secrets into a value. The error is a sentence for the one who asked, and holds no secret.
    pub(crate) async fn resolve_value(
        &self,
        ns: &Namespace,
        id: &ValueId,
    ) -> Result<Value, String> {
        let unread = |error: bivouac_store::StoreError| {
            tracing::error!(value = %id, cause = %chain(&error), "cannot read a header value");
            "the engine could not read it; see the engine's log".to_owned()
        };
        let text = self.db.value(&ns.team, id).await.map_err(unread)?;
        let text = text.ok_or("its value is not kept any more: set the policy again")?;
        let mut out = String::with_capacity(text.expose().len());
        let mut until: Option<Millis> = None;
        for part in Template::parse(text.expose())?.0 {
            match part {
                Part::Text(text) => out.push_str(text.expose()),
                Part::Secret(form, name) => {
                    let (secret, first) = self.secret(ns, &name).await?;
                    let (written, second) =
                        form.write(&secret).map_err(|why| format!("the secret '{name}' {why}"))?;
                    out.push_str(written.expose());
                    until = [until, first, second].into_iter().flatten().min();
                }
            }
        }
        let text = Secret::new(out);
        if text.expose().chars().any(|c| c.is_control() && c != '\t') {
            return Err("a secret in it holds a line end or another character that no header may \
                        hold"
                .to_owned());
        }
        let version = self.db.fingerprint(&text).map_err(unread)?;
        let expires_at = until.map(|at| u64::try_from(at).unwrap_or(0));
        Ok(Value { text, version, expires_at })
    }

    /// What a secret is now, for the engine itself. The error is a sentence that holds no secret.
    pub(crate) async fn secret_now(&self, ns: &Namespace, name: &str) -> Result<Secret, String> {
        check_name(name).map_err(|why| format!("a name of one {why}"))?;
        self.secret(ns, name).await.map(|(secret, _)| secret)
    }

    /// What a secret is now, and until when that counts.
    async fn secret(&self, ns: &Namespace, name: &str) -> Result<(Secret, Option<Millis>), String> {
        let found = self.db.secret(ns, name).await.map_err(|error| {
            tracing::error!(name, cause = %chain(&error), "cannot read a secret");
            format!("the engine could not read the secret '{name}'; see the engine's log")
        })?;
        let Some((row, sealed)) = found else {
            return Err(format!("there is no secret '{name}' any more: bivouac secret set {name}"));
        };
        let source = Source::from_sealed(&sealed).ok_or_else(|| {
            format!("the secret '{name}' was set by another version: set it again")
        })?;
        if let Source::Literal { value } = source {
            return Ok((Secret::new(value), None));
        }
        let cell = self.cache.cell(&row);
        let mut said = cell.lock().await;
        let now = self.now();
        if let Some(said) = said.as_ref().filter(|said| now < said.until) {
            return said.outcome.clone();
        }
        let outcome = source.fetch(&self.outcalls, now).await;
        let fresh = match outcome {
            Ok(found) => {
                let until = found.until.unwrap_or_else(|| now.saturating_add(TTL_MS));
                Said { outcome: Ok((found.text, Some(until))), until }
            }
            Err(why) => {
                tracing::warn!(name, kind = source.kind(), why, "a secret cannot be had");
                let why = format!("the secret '{name}' ({}) cannot be had: {why}", source.kind());
                Said { outcome: Err(why), until: now.saturating_add(RETRY_MS) }
            }
        };
        let outcome = fresh.outcome.clone();
        *said = Some(fresh);
        outcome
    }

    /// Removes values that nothing names any more.
    pub(crate) async fn sweep_values(&self) -> Result<u64, Error> {
        let before = self.now().saturating_sub(UNUSED_MS);
        Ok(self.db.remove_unused_values(before).await?)
    }
}

/// A secret that is a whole set of AWS credentials may have any of the forms that AWS's tools print.
fn sign_by_any_form(policy: &NetworkPolicy, values: &mut BTreeMap<ValueId, Secret>) {
    let NetworkPolicy::Custom(custom) = policy else { return };
    for rule in custom.domains.iter().flat_map(|domain| &domain.rules) {
        let Action::Sign(sign) = &rule.action else { continue };
        let Some(text) = values.get_mut(&sign.value) else { continue };
        if let Ok(Template(parts)) = Template::parse(text.expose())
            && let [Part::Secret(Form::Plain, name)] = parts.as_slice()
        {
            *text = Secret::new(format!("${{aws:{name}}}"));
        }
    }
}

/// Where an action keeps values: what they are called, their id and the names of secrets in them.
fn slots(action: &mut Action) -> Vec<(String, &mut ValueId, &mut Vec<String>)> {
    match action {
        Action::Transform { headers } => headers
            .iter_mut()
            .map(|set| {
                (format!("the value of header '{}'", set.name), &mut set.value, &mut set.secrets)
            })
            .collect(),
        Action::Sign(sign) => vec![("sign".to_owned(), &mut sign.value, &mut sign.secrets)],
        Action::Forward { .. } | Action::Respond(_) => Vec::new(),
    }
}
