//! A stored policy in the form of a request, for people who want to read or change it.
//!
//! Invariant: what it shows of a header's value is the secrets that the value names, never a text of
//! it. Read by the command line; sent back, a hidden value is the one that is there (`keep`).

use serde_json::{Map, Value, json};

use super::{Action, AwsSign, CustomPolicy, Domain, NetworkPolicy, Rule};

/// Stands for a value that is not shown.
pub const REDACTED: &str = "<redacted>";

impl NetworkPolicy {
    /// The request that would make this policy, values hidden.
    #[must_use]
    pub fn request_form(&self) -> Value {
        match self {
            Self::AllowAll => json!({ "mode": "allow-all" }),
            Self::DenyAll => json!({ "mode": "deny-all" }),
            Self::Custom(custom) => show_custom(custom),
        }
    }
}

fn show_custom(policy: &CustomPolicy) -> Value {
    let mut out = Map::new();
    let plain = policy.domains.iter().all(|domain| domain.rules.is_empty());
    let allow = if plain {
        policy.domains.iter().map(|domain| Value::from(domain.entry())).collect()
    } else {
        let rules = |domain: &Domain| domain.rules.iter().map(show_rule).collect::<Vec<_>>();
        let record = policy.domains.iter().map(|domain| (domain.entry(), json!(rules(domain))));
        Value::Object(record.collect())
    };
    out.insert("allow".to_owned(), allow);
    let mut subnets = Map::new();
    for (name, ranges) in [("allow", &policy.allow_cidrs), ("deny", &policy.deny_cidrs)] {
        if !ranges.is_empty() {
            subnets.insert(name.to_owned(), json!(ranges));
        }
    }
    if !subnets.is_empty() {
        out.insert("subnets".to_owned(), subnets.into());
    }
    if policy.plain_http {
        out.insert("plainHttp".to_owned(), true.into());
    }
    if policy.open_dns {
        out.insert("dns".to_owned(), "open".into());
    }
    Value::Object(out)
}

fn show_rule(rule: &Rule) -> Value {
    let mut out = Map::new();
    if let Some(matcher) = &rule.matcher {
        out.insert("match".to_owned(), json!(matcher));
    }
    let (name, action) = match &rule.action {
        Action::Transform { headers } => {
            let shown = headers.iter().map(|set| (set.name.clone(), hidden(&set.secrets).into()));
            ("transform", json!([{ "headers": Value::Object(shown.collect()) }]))
        }
        Action::Sign(sign) => ("sign", show_sign(sign)),
        Action::Forward { url } => ("forwardURL", json!(url)),
        Action::Respond(response) => ("response", json!(response)),
    };
    out.insert(name.to_owned(), action);
    if let Some(credential) = &rule.credential {
        out.insert("credential".to_owned(), credential.as_str().into());
    }
    if let Some(actor) = &rule.actor {
        out.insert("actor".to_owned(), actor.as_str().into());
    }
    if let Some(at) = rule.expires_at {
        out.insert("expiresAt".to_owned(), at.into());
    }
    Value::Object(out)
}

fn show_sign(sign: &AwsSign) -> Value {
    let mut out = Map::new();
    out.insert("credentials".to_owned(), hidden(&sign.secrets).into());
    for (name, value) in [("service", &sign.service), ("region", &sign.region)] {
        if let Some(value) = value {
            out.insert(name.to_owned(), value.as_str().into());
        }
    }
    json!({ "aws": out })
}

/// What is told of a value: its secrets by name, and that there is text around them.
fn hidden(secrets: &[String]) -> String {
    if secrets.is_empty() {
        return REDACTED.to_owned();
    }
    let named: Vec<String> = secrets.iter().map(|name| format!("${{secret:{name}}}")).collect();
    format!("{REDACTED} with {}", named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ValueId;

    fn parse(value: &Value) -> NetworkPolicy {
        let mut n = 0;
        let mut mint = || {
            n += 1;
            ValueId::new(1, [n; 10])
        };
        NetworkPolicy::parse("policy", value, &mut mint).unwrap().policy
    }

    #[test]
    fn what_holds_no_value_is_the_request_itself() {
        for request in [
            json!({ "mode": "allow-all" }),
            json!({ "mode": "deny-all" }),
            json!({ "allow": [] }),
            json!({ "allow": ["a.test", "*.b.test"], "subnets": { "deny": ["192.0.2.0/24"] } }),
            json!({ "allow": { "a.test": [
                { "match": { "path": { "startsWith": "/v1" }, "method": ["GET"] },
                  "forwardURL": "https://proxy.test/in" },
                { "response": { "statusCode": 403, "body": "no", "contentType": "text/plain" } },
            ], "b.test": [] } }),
        ] {
            let policy = parse(&request);
            assert_eq!(policy.request_form(), request);
            assert_eq!(parse(&policy.request_form()), policy);
        }
    }

    #[test]
    fn values_are_hidden_and_their_secrets_named() {
        let headers = json!({ "authorization": "Bearer canary7f3a", "x-key": "canary7f3a" });
        let mut policy = parse(&json!({ "allow": { "a.test": [
            { "transform": [{ "headers": headers }] } ] } }));
        let NetworkPolicy::Custom(custom) = &mut policy else { panic!("not custom") };
        if let Action::Transform { headers } = &mut custom.domains[0].rules[0].action {
            headers[0].secrets = vec!["gh".to_owned()];
        }
        let shown = policy.request_form();
        assert!(!shown.to_string().contains("canary7f3a"));
        let headers = &shown["allow"]["a.test"][0]["transform"][0]["headers"];
        assert_eq!(headers["authorization"], "<redacted> with ${secret:gh}");
        assert_eq!(headers["x-key"], REDACTED);
    }
}
