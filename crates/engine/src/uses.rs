//! Who used what: a line for each use of a door, until somebody writes it down.
//!
//! Owns: the queue between the doors and the file (which is `serve`'s: no I/O here). Invariants: a use is queued
//! without waiting; the queue is bounded, and what did not fit is counted and told; a line holds no secret, no
//! body, no value of a query and no environment, because nothing of that is ever put into it.
//!
//! What a call checked (a right, in a namespace) is noted by [`Principal::may`] for the task that asks, so the
//! line names the namespace that the engine saw and not the one that a client wrote.

use std::cell::RefCell;
use std::sync::Mutex;

use bivouac_types::Millis;
use bivouac_types::access::Verb;
use bivouac_types::name::Namespace;
use serde::Serialize;
use tokio::sync::Notify;

use crate::Engine;
use crate::api::Principal;
use crate::inner::locked;

/// Most lines that wait.
const MAX_WAITING: usize = 16_384;
/// Longest text of a field, characters.
const MAX_TEXT: usize = 300;

/// A use of a door.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Use {
    /// When; set by [`Engine::audit`] if it is 0.
    pub at: Millis,
    /// Name of who asked; absent: nobody who is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub principal: Option<String>,
    /// Id of the token; absent is the engine's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// `http`, `ssh`, `preview`.
    pub door: &'static str,
    /// What was asked for: an operation, `shell`, `exec`, `sftp`, `forward`.
    pub what: String,
    /// The right that was needed, as far as it came to that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verb: Option<Verb>,
    /// Where.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_path")]
    pub namespace: Option<Namespace>,
    /// On what: a name or an id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// How it came out, in HTTP's statuses: 200 is done, 403 refused.
    pub outcome: u16,
    /// Id of the request, as in the engine's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// Where the caller is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}

fn as_path<S: serde::Serializer>(ns: &Option<Namespace>, to: S) -> Result<S::Ok, S::Error> {
    match ns {
        Some(Namespace { team, project }) => to.serialize_str(&format!("{team}/{project}")),
        None => to.serialize_none(),
    }
}

impl Use {
    /// A use that went well; `door` is `http`, `ssh` or `preview`.
    #[must_use]
    pub fn new(who: &Principal, door: &'static str, what: impl Into<String>) -> Self {
        Self {
            principal: Some(who.name.clone()),
            token: who.token.clone(),
            ..Self::of_nobody(door, what)
        }
    }

    /// A try by somebody who is not known.
    #[must_use]
    pub fn of_nobody(door: &'static str, what: impl Into<String>) -> Self {
        Self {
            at: 0,
            principal: None,
            token: None,
            door,
            what: what.into(),
            verb: None,
            namespace: None,
            object: None,
            outcome: 200,
            request: None,
            address: None,
        }
    }

    /// With what it was done to.
    #[must_use]
    pub fn on(mut self, ns: &Namespace, object: impl Into<String>) -> Self {
        self.namespace = Some(ns.clone());
        self.object = Some(object.into());
        self
    }

    /// With how it came out: a status of HTTP.
    #[must_use]
    pub fn outcome(mut self, status: u16) -> Self {
        self.outcome = status;
        self
    }

    /// With where the caller is.
    #[must_use]
    pub fn from(mut self, address: &(impl ToString + ?Sized)) -> Self {
        self.address = Some(address.to_string());
        self
    }

    /// Its line, without an end.
    #[must_use]
    pub fn line(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// What the task that asks has been checked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checked {
    /// The first right that was needed.
    pub verb: Option<Verb>,
    /// Where.
    pub namespace: Option<Namespace>,
}

tokio::task_local! {
    static CHECKED: RefCell<Checked>;
}

/// Does `work` and answers what it was checked for besides.
pub async fn checked<T>(work: impl Future<Output = T>) -> (T, Checked) {
    CHECKED
        .scope(RefCell::default(), async {
            let out = work.await;
            (out, CHECKED.with(RefCell::take))
        })
        .await
}

/// Notes a check, if somebody wants to know.
pub(crate) fn note_check(verb: Verb, ns: Option<&Namespace>) {
    let _ = CHECKED.try_with(|checked| {
        let mut checked = checked.borrow_mut();
        if checked.verb.is_none() {
            checked.verb = Some(verb);
            checked.namespace = ns.cloned();
        }
    });
}

/// Lines that wait to be written.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    waiting: Mutex<Waiting>,
    come: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    uses: Vec<Use>,
    dropped: u64,
}

impl Uses {
    fn put(&self, one: Use) {
        let mut waiting = locked(&self.waiting);
        if waiting.uses.len() >= MAX_WAITING {
            waiting.dropped += 1;
            return;
        }
        waiting.uses.push(one);
        let first = waiting.uses.len() == 1;
        drop(waiting);
        if first {
            self.come.notify_one();
        }
    }
}

fn bounded(text: &mut String) {
    if let Some((at, _)) = text.char_indices().nth(MAX_TEXT) {
        text.truncate(at);
    }
}

impl Engine {
    /// Takes a use down. Never waits.
    pub fn audit(&self, mut one: Use) {
        if one.at == 0 {
            one.at = self.inner.now();
        }
        if one.request.is_none() {
            one.request = crate::request::current();
        }
        bounded(&mut one.what);
        if let Some(object) = &mut one.object {
            bounded(object);
        }
        self.inner.uses.put(one);
    }

    /// Answers when there is a use to write.
    pub async fn uses_come(&self) {
        self.inner.uses.come.notified().await;
    }

    /// The uses that wait to be written, and how many did not fit.
    #[must_use]
    pub fn take_uses(&self) -> (Vec<Use>, u64) {
        let mut waiting = locked(&self.inner.uses.waiting);
        let waiting = std::mem::take(&mut *waiting);
        (waiting.uses, waiting.dropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ns() -> Namespace {
        Namespace { team: "t".to_owned(), project: "p".to_owned() }
    }

    #[test]
    fn a_line_says_who_did_what_to_what() {
        let who = Principal { token: Some("0a".to_owned()), ..Principal::local() };
        let mut one = Use::new(&who, "ssh", "shell").on(&ns(), "box").outcome(403).from("::1");
        one.at = 5;
        one.verb = Some(Verb::Exec);
        let wanted = r#"{"at":5,"principal":"local","token":"0a","door":"ssh","what":"shell","verb":"exec","namespace":"t/p","object":"box","outcome":403,"address":"::1"}"#;
        assert_eq!(one.line(), wanted);
        let nobody = Use::of_nobody("http", "GET /api").outcome(401);
        assert_eq!(nobody.line(), r#"{"at":0,"door":"http","what":"GET /api","outcome":401}"#);
    }

    #[test]
    fn the_queue_has_an_end_and_says_what_it_lost() {
        let uses = Uses::default();
        for _ in 0..MAX_WAITING + 3 {
            uses.put(Use::of_nobody("http", "x"));
        }
        let waiting = std::mem::take(&mut *locked(&uses.waiting));
        assert_eq!((waiting.uses.len(), waiting.dropped), (MAX_WAITING, 3));
    }

    #[tokio::test]
    async fn the_first_check_is_told() {
        note_check(Verb::Read, None);
        let work = async {
            note_check(Verb::Write, Some(&ns()));
            note_check(Verb::Policy, None);
            7
        };
        let (out, checked) = checked(work).await;
        assert_eq!((out, checked.verb, checked.namespace), (7, Some(Verb::Write), Some(ns())));
    }
}
