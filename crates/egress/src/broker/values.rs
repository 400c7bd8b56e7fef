//! Header values and identity tokens that serve resolves and the broker keeps.
//!
//! Invariant: what is kept is in memory only, only for ids that the policy in force names, and no
//! longer than it is good for. One request to serve is under way per id, however many wait for it, and
//! nobody waits longer than [`LONGEST_WAIT`]. Called by interception (get) and by
//! [`super::Broker::deliver`] (put).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use bivouac_types::id::ValueId;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::audit::now_ms;
use crate::intercept::{Local, Tokens, Values};
use crate::message::Value;

/// Longest wait for a value or token.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// How long "it cannot be had" is believed: a loop of requests must not become one of questions.
const BELIEVE_FAILURE: Duration = Duration::from_secs(1);
/// A token that ends sooner is as good as ended: the request still has to arrive.
const TOKEN_MARGIN_MS: u64 = 5_000;
/// Most audiences whose token is kept.
const MOST_TOKENS: usize = 64;

#[derive(Default)]
struct Slot {
    value: Option<Value>,
    failed: Option<(Instant, String)>,
    asked: Option<Instant>,
    came: Rc<Notify>,
}

/// Values by key, asked for when they are missing.
struct Wanted<K> {
    slots: RefCell<BTreeMap<K, Slot>>,
    ask: Box<dyn Fn(&K)>,
    margin: u64,
    wait: Duration,
    what: &'static str,
    /// Whether something may still be asked for, and the sentence for what may not.
    named: Box<dyn Fn(&K) -> bool>,
}

/// For who asks for a value of an older policy.
const NAMED_NO_MORE: &str = "the policy names this value no more";

impl<K: Ord + Clone> Wanted<K> {
    fn good(&self, value: &Value) -> bool {
        value.expires_at.is_none_or(|end| end > now_ms().saturating_add(self.margin))
    }

    async fn get(&self, key: &K) -> Result<Value, String> {
        let end = Instant::now() + self.wait;
        loop {
            // Again after each wait: a slot that was forgotten must not come back.
            if !(self.named)(key) {
                return Err(NAMED_NO_MORE.to_owned());
            }
            let came = {
                let mut slots = self.slots.borrow_mut();
                let slot = slots.entry(key.clone()).or_default();
                if let Some(value) = slot.value.as_ref().filter(|v| self.good(v)) {
                    return Ok(value.clone());
                }
                // Ended: forgotten, not only unused.
                slot.value = None;
                let now = Instant::now();
                if let Some((at, why)) = &slot.failed
                    && now < *at + BELIEVE_FAILURE
                {
                    return Err(why.clone());
                }
                if slot.asked.is_none_or(|at| now >= at + self.wait) {
                    slot.asked = Some(now);
                    (self.ask)(key);
                }
                Rc::clone(&slot.came)
            };
            if timeout_at(end, came.notified()).await.is_err() {
                return Err(format!(
                    "{} did not come within {} s: is `bivouac serve` running?",
                    self.what,
                    self.wait.as_secs()
                ));
            }
        }
    }

    fn put(&self, key: K, value: Result<Value, String>) {
        let mut slots = self.slots.borrow_mut();
        let slot = slots.entry(key).or_default();
        slot.asked = None;
        match value {
            // Already ended: believing it would ask again at once, for ever.
            Ok(value) if !self.good(&value) => {
                slot.failed = Some((Instant::now(), format!("{} has ended", self.what)));
            }
            Ok(value) => {
                slot.value = Some(value);
                slot.failed = None;
            }
            Err(why) => {
                slot.value = None;
                slot.failed = Some((Instant::now(), why));
            }
        }
        slot.came.notify_waiters();
    }
}

/// What the broker holds of secrets.
pub(super) struct Held {
    values: Wanted<ValueId>,
    tokens: Wanted<String>,
    named: Rc<RefCell<BTreeSet<ValueId>>>,
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("named", &self.named.borrow().len()).finish_non_exhaustive()
    }
}

impl Held {
    /// Nothing is held yet; what is missing is asked for.
    #[must_use]
    pub(super) fn new(
        ask_value: impl Fn(&ValueId) + 'static,
        ask_token: impl Fn(&String) + 'static,
        wait: Duration,
    ) -> Rc<Self> {
        let named: Rc<RefCell<BTreeSet<ValueId>>> = Rc::default();
        let known = Rc::clone(&named);
        Rc::new(Self {
            values: Wanted {
                named: Box::new(move |id| known.borrow().contains(id)),
                slots: RefCell::default(),
                ask: Box::new(ask_value),
                margin: 0,
                wait,
                what: "the credential's value",
            },
            tokens: Wanted {
                named: Box::new(|_| true),
                slots: RefCell::default(),
                ask: Box::new(ask_token),
                margin: TOKEN_MARGIN_MS,
                wait,
                what: "the identity token",
            },
            named,
        })
    }

    /// A policy was put in force that names these: forgets all others.
    pub(super) fn keep_only(&self, named: BTreeSet<ValueId>) {
        // Before the waiters are woken: they look.
        *self.named.borrow_mut() = named;
        let named = self.named.borrow();
        let mut slots = self.values.slots.borrow_mut();
        slots.retain(|id, slot| {
            let keep = named.contains(id);
            if !keep {
                slot.came.notify_waiters();
            }
            keep
        });
    }

    /// Takes a value over; the next request uses it.
    pub(super) fn put_value(&self, id: ValueId, value: Result<Value, String>) {
        if self.named.borrow().contains(&id) {
            self.values.put(id, value);
        }
    }

    /// Takes a token over.
    pub(super) fn put_token(&self, audience: String, token: Result<Value, String>) {
        let mut slots = self.tokens.slots.borrow_mut();
        if !slots.contains_key(&audience) {
            // Nobody asked.
            return;
        }
        if slots.len() > MOST_TOKENS {
            // Waiters keep theirs; what is kept only to be used again goes.
            slots.retain(|key, slot| *key == audience || slot.asked.is_some());
        }
        drop(slots);
        self.tokens.put(audience, token);
    }
}

impl Values for Held {
    fn get<'a>(&'a self, id: &'a ValueId) -> Local<'a, Result<Value, String>> {
        Box::pin(async move {
            let value = self.values.get(id).await?;
            // The policy may have changed during the wait.
            if self.named.borrow().contains(id) { Ok(value) } else { Err(NAMED_NO_MORE.to_owned()) }
        })
    }
}

impl Tokens for Held {
    fn get<'a>(&'a self, audience: &'a str) -> Local<'a, Result<Value, String>> {
        Box::pin(async move { self.tokens.get(&audience.to_owned()).await })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use bivouac_types::secret::Secret;

    use super::*;

    fn id(n: u8) -> ValueId {
        ValueId::new(1, [n; 10])
    }

    fn value(text: &str, version: u64, expires_at: Option<u64>) -> Value {
        Value { text: Secret::new(text.to_owned()), version, expires_at }
    }

    fn held() -> (Rc<Held>, Rc<Cell<usize>>) {
        let asked = Rc::new(Cell::new(0));
        let (a, b) = (Rc::clone(&asked), Rc::clone(&asked));
        let count = |asked: Rc<Cell<usize>>| asked.set(asked.get() + 1);
        let held = Held::new(
            move |_| count(Rc::clone(&a)),
            move |_| count(Rc::clone(&b)),
            Duration::from_millis(300),
        );
        held.keep_only(BTreeSet::from([id(1)]));
        (held, asked)
    }

    fn run<T>(work: impl Future<Output = T>) -> T {
        let rt = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        rt.block_on(tokio::task::LocalSet::new().run_until(work))
    }

    #[test]
    fn many_wait_for_one_question_and_a_rotated_value_is_used_at_once() {
        run(async {
            let (held, asked) = held();
            let waiting: Vec<_> = (0..20)
                .map(|_| {
                    let held = Rc::clone(&held);
                    tokio::task::spawn_local(async move { Values::get(&*held, &id(1)).await })
                })
                .collect();
            tokio::task::yield_now().await;
            assert_eq!(asked.get(), 1);
            held.put_value(id(1), Ok(value("one", 1, None)));
            for w in waiting {
                assert_eq!(w.await.unwrap().unwrap().text.expose(), "one");
            }
            held.put_value(id(1), Ok(value("two", 2, None)));
            assert_eq!(Values::get(&*held, &id(1)).await.unwrap().version, 2);
            assert_eq!(asked.get(), 1);
        });
    }

    #[test]
    fn what_does_not_come_or_is_refused_ends_in_a_sentence() {
        run(async {
            let (held, asked) = held();
            let late = Values::get(&*held, &id(1)).await.unwrap_err();
            assert!(late.contains("did not come"), "{late}");
            held.put_value(id(1), Err("secret GH does not exist".to_owned()));
            for _ in 0..5 {
                assert_eq!(
                    Values::get(&*held, &id(1)).await.unwrap_err(),
                    "secret GH does not exist"
                );
            }
            assert_eq!(asked.get(), 1, "a failure is believed for a moment");
            assert!(Values::get(&*held, &id(2)).await.unwrap_err().contains("no more"));
        });
    }

    #[test]
    fn ended_values_are_asked_for_again_and_unnamed_ones_forgotten() {
        run(async {
            let (held, asked) = held();
            held.put_value(id(1), Ok(value("old", 1, Some(now_ms() - 1))));
            assert!(Values::get(&*held, &id(1)).await.unwrap_err().contains("ended"));
            held.put_value(id(1), Ok(value("new", 2, Some(now_ms() + 60_000))));
            assert_eq!(Values::get(&*held, &id(1)).await.unwrap().version, 2);
            assert_eq!(asked.get(), 0);
            held.keep_only(BTreeSet::new());
            held.put_value(id(1), Ok(value("late", 3, None)));
            assert!(Values::get(&*held, &id(1)).await.is_err());
            assert!(held.values.slots.borrow().is_empty());
        });
    }

    #[test]
    fn who_waits_for_a_value_that_is_named_no_more_leaves_nothing_behind() {
        run(async {
            let (held, asked) = held();
            let waiting = {
                let held = Rc::clone(&held);
                tokio::task::spawn_local(async move { Values::get(&*held, &id(1)).await })
            };
            tokio::task::yield_now().await;
            assert_eq!(asked.get(), 1);
            held.keep_only(BTreeSet::new());
            let began = Instant::now();
            assert!(waiting.await.unwrap().unwrap_err().contains("no more"));
            assert_eq!(asked.get(), 1, "serve was asked for what no policy names");
            assert!(held.values.slots.borrow().is_empty() && began.elapsed() < held.values.wait);
        });
    }

    #[test]
    fn tokens_are_kept_until_shortly_before_their_end() {
        run(async {
            let (held, asked) = held();
            held.put_token("https://p.test".to_owned(), Ok(value("unasked", 1, None)));
            let get = || {
                let held = Rc::clone(&held);
                tokio::task::spawn_local(async move {
                    Tokens::get(&*held, "https://p.test").await.map(|v| v.text.expose().to_owned())
                })
            };
            let first = get();
            tokio::task::yield_now().await;
            held.put_token(
                "https://p.test".to_owned(),
                Ok(value("t1", 1, Some(now_ms() + 60_000))),
            );
            assert_eq!(first.await.unwrap().unwrap(), "t1");
            assert_eq!(get().await.unwrap().unwrap(), "t1");
            assert_eq!(asked.get(), 1);
        });
    }
}
