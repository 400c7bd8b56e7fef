//! Where decisions are written down: audit lines, and counters for serve.
//!
//! Invariant: every decision is counted once, also when its line is dropped; counters are told at most
//! once a second, and a session that rests tells nothing and wakes nobody.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;

use crate::audit::{Kind, Line, OWN_UP_EVERY, Writer};
use crate::flows::Flows;
use crate::message::{Count, FromBroker};
use crate::reason::{Reason, Verdict};

/// How often the bytes of flows that go on are told.
const WHILE_FLOWS_LIVE: Duration = Duration::from_secs(10);

/// Takes decisions down.
pub(super) struct Desk {
    writer: Writer,
    flows: Flows,
    decisions: RefCell<BTreeMap<(Kind, Verdict, Reason), u64>>,
    cut: Cell<u64>,
    datagram_bytes: Cell<(u64, u64)>,
    told: Cell<(u64, u64)>,
    news: Notify,
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").field("writer", &self.writer).finish_non_exhaustive()
    }
}

impl Desk {
    /// An empty desk.
    #[must_use]
    pub(super) fn new(writer: Writer, flows: Flows) -> Rc<Self> {
        Rc::new(Self {
            writer,
            flows,
            decisions: RefCell::default(),
            cut: Cell::new(0),
            datagram_bytes: Cell::new((0, 0)),
            told: Cell::new((0, 0)),
            news: Notify::new(),
        })
    }

    /// Writes a line that says nothing about a generation yet.
    pub(super) fn note_now(&self, mut line: Line) {
        line.generation = self.flows.generation();
        self.note(line);
    }

    /// Writes a line down and counts it.
    pub(super) fn note(&self, line: Line) {
        match line.kind {
            Kind::Dns | Kind::Connect | Kind::Http | Kind::Udp => {
                let key = (line.kind, line.verdict, line.reason);
                *self.decisions.borrow_mut().entry(key).or_default() += 1;
            }
            Kind::End if line.protocol.as_deref() == Some("udp") => {
                let (up, down) = self.datagram_bytes.get();
                self.datagram_bytes.set((
                    up + line.bytes_up.unwrap_or_default(),
                    down + line.bytes_down.unwrap_or_default(),
                ));
            }
            Kind::End | Kind::Policy | Kind::Dropped => {}
        }
        self.writer.write(line);
        self.news.notify_one();
    }

    /// Counts flows that an update cut.
    pub(super) fn cut(&self, flows: u64) {
        self.cut.set(self.cut.get() + flows);
        self.news.notify_one();
    }

    /// What was added since the last call.
    pub(super) fn take(&self) -> Vec<Count> {
        let mut counts = Vec::new();
        for ((kind, verdict, reason), added) in std::mem::take(&mut *self.decisions.borrow_mut()) {
            let labels =
                [("kind", word(&kind)), ("verdict", word(&verdict)), ("reason", reason.as_str())];
            counts.push(Count {
                name: "decisions".to_owned(),
                labels: labels.map(|(k, v)| (k.to_owned(), v)).to_vec(),
                added,
            });
        }
        let (up, down) = self.flows.bytes();
        let (more_up, more_down) = self.datagram_bytes.get();
        let now = (up + more_up, down + more_down);
        let before = self.told.replace(now);
        for (direction, added) in [("up", now.0 - before.0), ("down", now.1 - before.1)] {
            if added > 0 {
                counts.push(Count {
                    name: "bytes".to_owned(),
                    labels: vec![("direction".to_owned(), direction.to_owned())],
                    added,
                });
            }
        }
        let cut = self.cut.replace(0);
        if cut > 0 {
            counts.push(Count { name: "cut".to_owned(), labels: Vec::new(), added: cut });
        }
        counts
    }

    /// Tells counters for ever.
    pub(super) async fn tell(self: Rc<Self>, out: Rc<dyn Fn(FromBroker)>) {
        loop {
            if self.flows.is_empty() {
                self.news.notified().await;
            } else {
                // News or not: bytes of long flows are told as they go.
                let _ = tokio::time::timeout(WHILE_FLOWS_LIVE, self.news.notified()).await;
            }
            self.writer.own_up();
            let counts = self.take();
            if !counts.is_empty() {
                out(FromBroker::Counted { counts });
            }
            tokio::time::sleep(OWN_UP_EVERY).await;
        }
    }
}

/// The word that serde has for it.
fn word<T: serde::Serialize>(of: &T) -> String {
    serde_json::to_value(of).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}
