//! The desk of a session's broker: what it asks is answered, what it counts is added up.
//!
//! Invariant: a broker gets only what the policy of its own session names now. It sits in a process
//! that reads hostile bytes, so its questions are checked like a stranger's: a value has to be one of
//! its policy's, an audience has to be one of its forward URLs, and so many at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use bivouac_egress::audit::Kind;
use bivouac_egress::intercept::audience;
use bivouac_egress::message::{Count, FromBroker, ToBroker};
use bivouac_egress::reason::{Reason, Verdict};
use bivouac_types::policy::{Action, NetworkPolicy};
use serde::de::DeserializeOwned;

use crate::egress::values_of;
use crate::inner::{Inner, Live, locked};
use crate::lifecycle::chain;

/// Questions of one broker that are worked on at the same time.
const OPEN_QUESTIONS: usize = 64;

/// What is being found out for a broker.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Question {
    Value(bivouac_types::id::ValueId),
    Token(String),
}

/// The questions of one broker.
#[derive(Debug, Default)]
pub(crate) struct Desk(Mutex<BTreeSet<Question>>);

impl Desk {
    /// Whether this is new and there is room for it.
    fn begin(&self, question: &Question) -> bool {
        let mut open = locked(&self.0);
        open.len() < OPEN_QUESTIONS && open.insert(question.clone())
    }

    fn end(&self, question: &Question) {
        locked(&self.0).remove(question);
    }
}

/// A name and its labels.
type Series = (&'static str, Vec<(String, String)>);

/// What brokers counted since the engine started.
#[derive(Debug, Default)]
pub(crate) struct EgressCounters(Mutex<BTreeMap<Series, u64>>);

/// One series of what brokers counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EgressCount {
    /// `decisions`, `bytes` or `cut`.
    pub name: &'static str,
    /// Labels, all of known words.
    pub labels: Vec<(String, String)>,
    /// How many.
    pub total: u64,
}

/// Whether `word` is one that serde knows for `T`: brokers cannot make series by inventing words.
fn is_word<T: DeserializeOwned>(word: &str) -> bool {
    serde_json::from_value::<T>(serde_json::Value::String(word.to_owned())).is_ok()
}

fn known_label(name: &str, value: &str) -> bool {
    match name {
        "kind" => is_word::<Kind>(value),
        "verdict" => is_word::<Verdict>(value),
        "reason" => is_word::<Reason>(value),
        "direction" => matches!(value, "up" | "down"),
        _ => false,
    }
}

impl EgressCounters {
    fn add(&self, counts: Vec<Count>) {
        let mut all = locked(&self.0);
        for count in counts {
            let (name, wanted): (_, &[&str]) = match count.name.as_str() {
                "decisions" => ("decisions", &["kind", "verdict", "reason"]),
                "bytes" => ("bytes", &["direction"]),
                "cut" => ("cut", &[]),
                _ => continue,
            };
            let known =
                count.labels.iter().map(|(label, _)| label.as_str()).eq(wanted.iter().copied())
                    && count.labels.iter().all(|(label, value)| known_label(label, value));
            if known {
                let total = all.entry((name, count.labels)).or_default();
                *total = total.saturating_add(count.added);
            }
        }
    }

    pub(crate) fn read(&self) -> Vec<EgressCount> {
        let all = locked(&self.0);
        let count = |((name, labels), total): (&Series, &u64)| EgressCount {
            name,
            labels: labels.clone(),
            total: *total,
        };
        all.iter().map(count).collect()
    }
}

/// Whether one of the policy's forward rules is for this audience, in whatever spelling.
fn forwards_to(policy: &NetworkPolicy, wanted: &str) -> bool {
    let NetworkPolicy::Custom(custom) = policy else { return false };
    let mut rules = custom.domains.iter().flat_map(|domain| &domain.rules);
    rules.any(|rule| match &rule.action {
        Action::Forward { url } => audience(url).as_deref() == Some(wanted),
        _ => false,
    })
}

impl Inner {
    /// Answers a broker for as long as its session is there.
    pub(crate) fn attend(self: &Arc<Self>, live: &Arc<Live>) {
        let mut events = live.handle.egress_events();
        let (inner, live) = (Arc::clone(self), Arc::clone(live));
        self.spawn(async move {
            while let Some(event) = events.recv().await {
                match serde_json::from_slice(&event) {
                    Ok(event) => inner.heard(&live, event),
                    Err(error) => {
                        let session = live.row().session.id;
                        tracing::warn!(%session, %error, "a broker said something that is not understood");
                    }
                }
            }
        });
    }

    fn heard(self: &Arc<Self>, live: &Arc<Live>, event: FromBroker) {
        let question = match event {
            FromBroker::Counted { counts } => return self.egress_counters.add(counts),
            FromBroker::WantValue { value } => Question::Value(value),
            FromBroker::WantToken { audience } => Question::Token(audience),
        };
        if !live.desk.begin(&question) {
            return;
        }
        let (inner, live) = (Arc::clone(self), Arc::clone(live));
        self.spawn(async move {
            inner.answer(&live, &question).await;
            live.desk.end(&question);
        });
    }

    async fn answer(&self, live: &Live, question: &Question) {
        let row = live.row();
        match question {
            Question::Value(id) => {
                if values_of(&row.session.policy).iter().any(|(known, _)| *known == id) {
                    return self.push_values(live, vec![id.clone()]).await;
                }
                // An update is on its way to the broker, or it is not a broker of ours any more.
                let why = Err("the policy in force does not name it".to_owned());
                let values = BTreeMap::from([(id.clone(), why)]);
                self.hand(live, &ToBroker::Values { values }).await;
            }
            Question::Token(audience) => {
                let token = if forwards_to(&row.session.policy, audience) {
                    self.identity_token(&row, audience).await
                } else {
                    Err("the policy in force forwards nothing there".to_owned())
                };
                let audience = audience.clone();
                self.hand(live, &ToBroker::Token { audience, token }).await;
            }
        }
    }

    async fn hand(&self, live: &Live, message: &ToBroker) {
        if let Err(error) = self.tell(&live.handle, message).await {
            let session = live.row().session.id;
            tracing::warn!(%session, cause = %chain(&error), "could not answer a broker");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(name: &str, labels: &[(&str, &str)]) -> Count {
        let labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Count { name: name.to_owned(), labels, added: 2 }
    }

    #[test]
    fn a_broker_cannot_make_series() {
        let counters = EgressCounters::default();
        let good = [("kind", "connect"), ("verdict", "deny"), ("reason", "domain_not_listed")];
        counters.add(vec![
            count("decisions", &good),
            count("decisions", &good),
            count("decisions", &[("kind", "x1"), ("verdict", "deny"), ("reason", "deny_all")]),
            count("decisions", &[("kind", "dns")]),
            count("bytes", &[("direction", "up")]),
            count("bytes", &[("direction", "sideways")]),
            count("anything", &[]),
        ]);
        let read = counters.read();
        let shown: Vec<_> = read.iter().map(|c| (c.name, c.total)).collect();
        assert_eq!(shown, [("bytes", 2), ("decisions", 4)]);
    }

    #[test]
    fn a_forward_url_is_known_in_every_spelling() {
        for url in [
            "https://p.test/in",
            "https://P.Test/in/",
            "https://p.test:443/in",
            "https://p.test./in",
        ] {
            let rule = serde_json::json!({"allow": {"a.test": [{"forwardURL": url}]}});
            let mint = || bivouac_types::id::ValueId::new(1, [1; 10]);
            let policy =
                NetworkPolicy::parse("networkPolicy", &rule, &mut { mint }).unwrap().policy;
            assert!(forwards_to(&policy, "https://p.test/in"), "{url}");
            for other in
                ["https://p.test", "https://p.test/in/x", "https://p.test:8443/in", "", "x"]
            {
                assert!(!forwards_to(&policy, other), "{url} {other}");
            }
        }
    }

    #[test]
    fn a_broker_asks_a_question_once_at_a_time() {
        let desk = Desk::default();
        let question = Question::Token("https://proxy.test/in".to_owned());
        assert!(desk.begin(&question));
        assert!(!desk.begin(&question));
        desk.end(&question);
        assert!(desk.begin(&question));
        let many = |n: usize| Question::Token(n.to_string());
        let taken = (0..2 * OPEN_QUESTIONS).filter(|n| desk.begin(&many(*n))).count();
        assert_eq!(taken, OPEN_QUESTIONS - 1);
    }
}
