//! A policy that was read and is sent back: its hidden values are the ones that are there.
//!
//! Clients see `<redacted>` where a value is, and some send a whole policy back with one thing changed.
//! Invariant: that text is never taken for a value. It means "as it is", for the same header of the same
//! host, and where nothing is there it is refused. Called by `engine` before values go into the vault.

use super::show::REDACTED;
use super::{Action, Domain, Draft, NetworkPolicy, Rule};
use crate::id::ValueId;
use crate::name::Invalid;

/// Whether a text stands for a value that was not shown: alone, or with the names of its secrets as
/// [`NetworkPolicy::request_form`] writes it.
#[must_use]
pub fn is_redacted(text: &str) -> bool {
    text == REDACTED || text.strip_prefix(REDACTED).is_some_and(|rest| rest.starts_with(" with ${"))
}

impl Draft {
    /// Puts the values of `present` where this draft has hidden ones. `field` is how errors call the
    /// policy.
    ///
    /// # Errors
    /// [`Invalid`] with the rule whose value is not there.
    pub fn keep_hidden(&mut self, field: &str, present: &NetworkPolicy) -> Result<(), Invalid> {
        let Self { policy: NetworkPolicy::Custom(policy), values } = self else { return Ok(()) };
        let none = Vec::new();
        let there = match present {
            NetworkPolicy::Custom(present) => &present.domains,
            _ => &none,
        };
        for domain in &mut policy.domains {
            let entry = domain.entry();
            let old = there.iter().find(|old| old.host == domain.host && old.port == domain.port);
            for (index, rule) in domain.rules.iter_mut().enumerate() {
                let hidden: Vec<_> = slots(&rule.action)
                    .filter(|(_, id)| values.get(id).is_some_and(|v| is_redacted(v.expose())))
                    .map(|(name, id)| (name.map(str::to_owned), id.clone()))
                    .collect();
                for (name, id) in hidden {
                    let found = old.and_then(|old| find(old, index, rule, name.as_deref()));
                    let Some(found) = found else {
                        let what = name.as_deref().unwrap_or("sign");
                        return Err(Invalid {
                            field: format!("{field}.allow[\"{entry}\"][{index}]"),
                            reason: format!(
                                "has a hidden value for '{what}', and there is none to keep: send the \
                                 value itself, or ${{secret:NAME}}"
                            ),
                        });
                    };
                    values.remove(&id);
                    take(rule, name.as_deref(), found);
                }
            }
        }
        Ok(())
    }
}

/// Values of an action: header and id; a signature has no header.
fn slots(action: &Action) -> Box<dyn Iterator<Item = (Option<&str>, &ValueId)> + '_> {
    match action {
        Action::Transform { headers } => {
            Box::new(headers.iter().map(|set| (Some(set.name.as_str()), &set.value)))
        }
        Action::Sign(sign) => Box::new(std::iter::once((None, &sign.value))),
        Action::Forward { .. } | Action::Respond(_) => Box::new(std::iter::empty()),
    }
}

fn same(a: Option<&str>, b: Option<&str>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.eq_ignore_ascii_case(b),
        (a, b) => a.is_none() && b.is_none(),
    }
}

/// The rule whose value is meant: for the same requests, and at the same place if there are several. A
/// value that its reader never saw does not follow a rule to other requests.
fn find<'a>(old: &'a Domain, index: usize, rule: &Rule, name: Option<&str>) -> Option<&'a Rule> {
    let sets = |old: &&Rule| slots(&old.action).any(|(header, _)| same(header, name));
    let matching = |old: &&Rule| sets(old) && old.matcher == rule.matcher;
    old.rules.get(index).filter(matching).or_else(|| old.rules.iter().find(matching))
}

/// Takes a value over, and whose it is: clients do not send that back.
fn take(rule: &mut Rule, name: Option<&str>, old: &Rule) {
    match (&mut rule.action, &old.action) {
        (Action::Transform { headers }, Action::Transform { headers: kept }) => {
            let to = headers.iter_mut().find(|set| same(Some(&set.name), name));
            let from = kept.iter().find(|set| same(Some(&set.name), name));
            if let (Some(to), Some(from)) = (to, from) {
                to.value.clone_from(&from.value);
                to.secrets.clone_from(&from.secrets);
            }
        }
        (Action::Sign(to), Action::Sign(from)) => {
            to.value.clone_from(&from.value);
            to.secrets.clone_from(&from.secrets);
        }
        _ => {}
    }
    // Not for whoever sends it to say: a session of credentials stays with its actor, and ends when it
    // was to end.
    rule.credential.clone_from(&old.credential);
    rule.actor.clone_from(&old.actor);
    rule.expires_at = match (rule.expires_at, old.expires_at) {
        (Some(new), Some(old)) => Some(new.min(old)),
        (new, old) => new.or(old),
    };
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn draft(value: &Value, from: u8) -> Draft {
        let mut n = from;
        let mut mint = || {
            n += 1;
            ValueId::new(1, [n; 10])
        };
        NetworkPolicy::parse("networkPolicy", value, &mut mint).unwrap()
    }

    fn rule(path: &str, value: &str) -> Value {
        json!({ "match": { "path": { "exact": path } },
            "transform": [{ "headers": { "Authorization": value } }] })
    }

    #[test]
    fn what_was_shown_can_be_sent_back() {
        let request = json!({ "allow": {
            "a.test": [rule("/1", "one"), rule("/2", "Bearer ${secret:two}")],
            "b.test": [{ "sign": { "aws": { "credentials": "${secret:aws}" } } }],
        } });
        let mut present = draft(&request, 0).policy;
        if let NetworkPolicy::Custom(policy) = &mut present {
            policy.domains[0].rules[0].actor = Some("me".to_owned());
        }
        let mut again = draft(&present.request_form(), 100);
        again.keep_hidden("networkPolicy", &present).unwrap();
        assert_eq!(again.policy, present);
        assert!(again.values.is_empty());
    }

    #[test]
    fn a_client_that_sends_back_what_it_read_keeps_the_values() {
        let present =
            draft(&json!({ "allow": { "a.test": [rule("/1", "one"), rule("/2", "two")] } }), 0);
        let wanted = json!({ "allow": { "new.test": [],
            "a.test": [rule("/2", "<redacted>"), rule("/1", "<redacted>"), rule("/3", "three")] } });
        let mut again = draft(&wanted, 100);
        again.keep_hidden("networkPolicy", &present.policy).unwrap();
        let NetworkPolicy::Custom(policy) = &again.policy else { panic!("not custom") };
        let rules = &policy.domains.iter().find(|d| d.host.as_str() == "a.test").unwrap().rules;
        let ids: Vec<_> =
            rules.iter().flat_map(|r| slots(&r.action).map(|(_, id)| id.clone())).collect();
        assert_eq!(ids[..2], [ValueId::new(1, [2; 10]), ValueId::new(1, [1; 10])]);
        assert_eq!(again.values.keys().collect::<Vec<_>>(), [&ids[2]]);
    }

    #[test]
    fn a_hidden_value_stays_whose_it_is_and_for_as_long() {
        let mut present = draft(&json!({ "allow": { "a.test": [rule("/1", "one")] } }), 0).policy;
        if let NetworkPolicy::Custom(policy) = &mut present {
            policy.domains[0].rules[0].actor = Some("them".to_owned());
            policy.domains[0].rules[0].expires_at = Some(1000);
        }
        for (sent, kept) in [(5000, 1000), (500, 500)] {
            let mut mine = rule("/1", "<redacted>");
            mine["actor"] = "me".into();
            mine["expiresAt"] = sent.into();
            let mut again = draft(&json!({ "allow": { "a.test": [mine] } }), 100);
            again.keep_hidden("networkPolicy", &present).unwrap();
            let NetworkPolicy::Custom(policy) = &again.policy else { panic!("not custom") };
            let rule = &policy.domains[0].rules[0];
            assert_eq!((rule.actor.as_deref(), rule.expires_at), (Some("them"), Some(kept)));
        }
    }

    #[test]
    fn a_hidden_value_that_is_not_there_is_refused() {
        let present = draft(&json!({ "allow": { "a.test": [rule("/1", "one")] } }), 0).policy;
        for (wanted, by) in [
            (json!({ "allow": { "other.test": [rule("/1", "<redacted>")] } }), &present),
            (json!({ "allow": { "a.test": [rule("/wider", "<redacted>")] } }), &present),
            (json!({ "allow": { "a.test:8443": [rule("/1", "<redacted>")] } }), &present),
            (
                json!({ "allow": { "a.test": [{ "transform": [{ "headers": { "x-key": "<redacted>" } }] }] } }),
                &present,
            ),
            (
                json!({ "allow": { "a.test": [rule("/1", "<redacted> with ${secret:x}")] } }),
                &NetworkPolicy::AllowAll,
            ),
        ] {
            let refused = draft(&wanted, 100).keep_hidden("networkPolicy", by).unwrap_err();
            assert!(refused.reason.contains("hidden value"), "{wanted}: {refused:?}");
            assert!(refused.field.starts_with("networkPolicy.allow[\""), "{refused:?}");
        }
    }
}
