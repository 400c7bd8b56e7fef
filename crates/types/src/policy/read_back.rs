//! The form in which clients read a policy: other field names than a request, and no secret.
//!
//! Invariant: optional lists are absent when they are empty, never null; clients refuse null. Additions of
//! ours are there only when they are in use: a policy of the original reads back as the original does.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::{Action, Cidr, CustomPolicy, Match, NetworkPolicy, Rule};

impl NetworkPolicy {
    /// What clients see of it: `mode`, the lists, and per rule the domain and what is not secret.
    #[must_use]
    pub fn read_back(&self) -> Value {
        match self {
            Self::AllowAll => json!({"mode": "allow-all"}),
            Self::DenyAll => json!({"mode": "deny-all"}),
            Self::Custom(custom) => read_custom(custom),
        }
    }
}

fn read_custom(policy: &CustomPolicy) -> Value {
    let (mut injections, mut forwards, mut responses) = (Vec::new(), Vec::new(), Vec::new());
    for domain in &policy.domains {
        for rule in &domain.rules {
            let mut item = Map::new();
            item.insert("domain".to_owned(), domain.entry().into());
            let list = match &rule.action {
                Action::Transform { headers } => {
                    let names: Vec<_> = headers.iter().map(|set| set.name.as_str()).collect();
                    item.insert("headerNames".to_owned(), json!(names));
                    insert_secrets(&mut item, headers.iter().flat_map(|set| &set.secrets));
                    &mut injections
                }
                Action::Sign(sign) => {
                    item.insert("headerNames".to_owned(), json!(["authorization"]));
                    item.insert("sign".to_owned(), json!("aws"));
                    insert_secrets(&mut item, sign.secrets.iter());
                    &mut injections
                }
                Action::Forward { url } => {
                    item.insert("forwardURL".to_owned(), json!(url));
                    &mut forwards
                }
                Action::Respond(response) => {
                    item.insert("statusCode".to_owned(), json!(response.status_code));
                    &mut responses
                }
            };
            if let Some(matcher) = &rule.matcher {
                let matcher = read_match(matcher);
                // JavaScript clients read the matcher, Python ones only what it looks at.
                let dimensions = matcher.as_object().map(|m| m.keys().cloned().collect());
                item.insert("matchDimensions".to_owned(), dimensions.unwrap_or_default());
                item.insert("match".to_owned(), matcher);
            }
            insert_additions(&mut item, rule);
            list.push(Value::Object(item));
        }
    }
    let domains = policy.domains.iter().map(|d| json!(d.entry())).collect();
    let ranges = |list: &[Cidr]| list.iter().map(|c| json!(c.to_string())).collect::<Vec<_>>();
    let mut out = Map::new();
    out.insert("mode".to_owned(), json!("custom"));
    for (name, list) in [
        ("allowedDomains", domains),
        ("allowedCIDRs", ranges(&policy.allow_cidrs)),
        ("deniedCIDRs", ranges(&policy.deny_cidrs)),
        ("injectionRules", injections),
        ("forwardRules", forwards),
        ("responseRules", responses),
    ] {
        if !list.is_empty() {
            out.insert(name.to_owned(), Value::Array(list));
        }
    }
    if policy.plain_http {
        out.insert("plainHttp".to_owned(), true.into());
    }
    if policy.open_dns {
        out.insert("dns".to_owned(), "open".into());
    }
    Value::Object(out)
}

/// Names of secrets, not their values.
fn insert_secrets<'a>(item: &mut Map<String, Value>, secrets: impl Iterator<Item = &'a String>) {
    let names: BTreeSet<&String> = secrets.collect();
    if !names.is_empty() {
        item.insert("secrets".to_owned(), json!(names));
    }
}

fn insert_additions(item: &mut Map<String, Value>, rule: &Rule) {
    if let Some(credential) = &rule.credential {
        item.insert("credential".to_owned(), credential.as_str().into());
    }
    if let Some(actor) = &rule.actor {
        item.insert("actor".to_owned(), actor.as_str().into());
    }
    if let Some(end) = rule.expires_at {
        item.insert("expiresAt".to_owned(), end.into());
    }
}

/// Matchers are read back as they were sent: they hold no secret by the API's definition.
fn read_match(matcher: &Match) -> Value {
    serde_json::to_value(matcher).unwrap_or_else(|_| json!({}))
}
