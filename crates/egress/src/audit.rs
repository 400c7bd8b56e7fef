//! One JSON line per decision and per end of a flow.
//!
//! Invariant: a line holds no header value, no query value, no body and no secret. Lines go to an
//! [`Sink`], which is bounded; denials have a reserve of their own, and what was dropped is counted and
//! itself written down.
//!
//! Written by every part of the broker through its one [`Writer`].

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bivouac_types::id::SessionId;
use serde::{Deserialize, Serialize};

use crate::reason::{Reason, Verdict};

/// What a line is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A DNS query.
    Dns,
    /// A TCP connection: one line when it is decided, one when it ends (`bytes_*`, `duration_ms`).
    Connect,
    /// The end of a TCP connection or datagram flow.
    End,
    /// A request that the broker saw.
    Http,
    /// A datagram flow.
    Udp,
    /// The policy was replaced.
    Policy,
    /// Lines were dropped.
    Dropped,
}

/// A line. Absent fields do not apply.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// When, ms since the epoch.
    pub at: u64,
    /// The session.
    pub session: SessionId,
    /// What the line is about.
    pub kind: Kind,
    /// Number of the flow in this session; the same in all its lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flow: Option<u64>,
    /// Generation of the policy that decided.
    pub generation: u64,
    /// What happened.
    pub verdict: Verdict,
    /// Why.
    pub reason: Reason,
    /// Host name, canonical.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Where the name comes from: `sni`, `host`, `dns`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_from: Option<String>,
    /// Address that the guest asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// Address that was dialled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dialled: Option<String>,
    /// `tls`, `http`, `postgres`, `raw`, `udp`, the query type of DNS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// Whether the broker decrypts it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub intercepted: bool,
    /// Entry of the policy that decided, as the user wrote it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<String>,
    /// Number of the rule in that entry, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<usize>,
    /// Name of the credential that was used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<String>,
    /// Method of a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Canonical path of a request, without the query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Status that the guest saw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Bytes from the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_up: Option<u64>,
    /// Bytes to the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_down: Option<u64>,
    /// How long, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    /// Lines that were dropped before this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped: Option<u64>,
    /// What went wrong, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Line {
    /// A line in which only what every line has is filled.
    #[must_use]
    pub fn new(session: SessionId, kind: Kind, verdict: Verdict, reason: Reason) -> Self {
        Self {
            at: 0,
            session,
            kind,
            flow: None,
            generation: 0,
            verdict,
            reason,
            host: None,
            host_from: None,
            asked: None,
            dialled: None,
            protocol: None,
            intercepted: false,
            entry: None,
            rule: None,
            credential: None,
            method: None,
            path: None,
            status: None,
            bytes_up: None,
            bytes_down: None,
            duration_ms: None,
            dropped: None,
            error: None,
        }
    }
}

/// Where lines are kept. The shim's is a pair of files beside the command logs.
pub trait Sink {
    /// Appends one line, with its line end. Never waits for long, never fails: what cannot be kept is
    /// counted by the sink.
    fn append(&self, line: &[u8]);
}

/// Milliseconds since the epoch.
#[must_use]
pub fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

/// Longest text of one field: a path may be long, and whoever reads lines bounds them too.
const LONGEST_FIELD: usize = 2048;

/// How many lines may be written: a burst, and then so many a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// At once.
    pub burst: f64,
    /// Each second.
    pub per_second: f64,
}

/// Lines of any kind.
const ALL: Rate = Rate { burst: 5000.0, per_second: 500.0 };
/// Denials, when the others have used up what there is.
const DENIALS: Rate = Rate { burst: 1000.0, per_second: 100.0 };

#[derive(Debug)]
struct Bucket {
    rate: Rate,
    left: Cell<f64>,
    at: Cell<Instant>,
}

impl Bucket {
    fn new(rate: Rate, now: Instant) -> Self {
        Self { rate, left: Cell::new(rate.burst), at: Cell::new(now) }
    }

    fn take(&self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at.get()).as_secs_f64();
        self.at.set(now);
        let left = (self.left.get() + passed * self.rate.per_second).min(self.rate.burst);
        let enough = left >= 1.0;
        self.left.set(if enough { left - 1.0 } else { left });
        enough
    }
}

/// Writes lines: fills in the time, bounds their number and length, owns up to what it dropped.
///
/// A flood of allowed connections cannot hide a denial: those have a reserve. A flood of denials is cut
/// too, because a log that the sandbox can fill is a log that it can empty.
pub struct Writer {
    sink: Rc<dyn Sink>,
    session: SessionId,
    all: Bucket,
    denials: Bucket,
    dropped: Cell<u64>,
    buffer: RefCell<Vec<u8>>,
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer").field("session", &self.session).finish_non_exhaustive()
    }
}

impl Writer {
    /// Writes to `sink`.
    #[must_use]
    pub fn new(sink: Rc<dyn Sink>, session: SessionId) -> Self {
        Self::with_rates(sink, session, ALL, DENIALS)
    }

    /// With other bounds.
    #[must_use]
    pub fn with_rates(sink: Rc<dyn Sink>, session: SessionId, all: Rate, denials: Rate) -> Self {
        let now = Instant::now();
        Self {
            sink,
            session,
            all: Bucket::new(all, now),
            denials: Bucket::new(denials, now),
            dropped: Cell::new(0),
            buffer: RefCell::default(),
        }
    }

    /// Writes a line, or counts it as dropped.
    pub fn write(&self, line: Line) {
        self.write_at(line, Instant::now());
    }

    fn write_at(&self, mut line: Line, now: Instant) {
        let denial = line.verdict != Verdict::Allow && line.kind != Kind::End;
        let room = self.all.take(now) || (denial && self.denials.take(now));
        if !room {
            self.dropped.set(self.dropped.get() + 1);
            return;
        }
        self.own_up();
        line.at = now_ms();
        line.session = self.session.clone();
        let from_guests = [&mut line.path, &mut line.error, &mut line.host, &mut line.method];
        from_guests.into_iter().flatten().for_each(shorten);
        self.append(&line);
    }

    /// Writes down how many lines were dropped since the last line, when there are some. Called before
    /// each line and now and then, so that a drop is known even if no line follows.
    pub fn own_up(&self) {
        let dropped = self.dropped.replace(0);
        if dropped == 0 {
            return;
        }
        let mut line =
            Line::new(self.session.clone(), Kind::Dropped, Verdict::Error, Reason::Limit);
        line.at = now_ms();
        line.dropped = Some(dropped);
        self.append(&line);
    }

    /// Lines that were dropped and not yet owned up to.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.get()
    }

    fn append(&self, line: &Line) {
        let mut buffer = self.buffer.borrow_mut();
        buffer.clear();
        // Writing a line into memory cannot fail; JSON escapes every line end inside.
        if serde_json::to_writer(&mut *buffer, line).is_ok() {
            buffer.push(b'\n');
            self.sink.append(&buffer);
        }
    }
}

fn shorten(text: &mut String) {
    if text.len() > LONGEST_FIELD {
        let mut end = LONGEST_FIELD;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
}

/// How long a drop may go without being written down.
pub const OWN_UP_EVERY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Kept(RefCell<Vec<Line>>);

    impl Sink for Kept {
        fn append(&self, line: &[u8]) {
            assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1);
            assert!(line.ends_with(b"\n"));
            self.0.borrow_mut().push(serde_json::from_slice(line).unwrap());
        }
    }

    fn writer(kept: &Rc<Kept>, all: Rate, denials: Rate) -> Writer {
        Writer::with_rates(
            Rc::clone(kept) as Rc<dyn Sink>,
            SessionId::new(1, [0; 10]),
            all,
            denials,
        )
    }

    fn line(verdict: Verdict) -> Line {
        let reason = if verdict == Verdict::Allow { Reason::AllowAll } else { Reason::NotTls };
        Line::new(SessionId::new(1, [0; 10]), Kind::Connect, verdict, reason)
    }

    #[test]
    fn case_134_a_flood_leaves_room_for_denials_and_is_owned_up_to() {
        let kept = Rc::new(Kept::default());
        let rate = |burst| Rate { burst, per_second: 1.0 };
        let writer = writer(&kept, rate(10.0), rate(5.0));
        let now = Instant::now();
        for _ in 0..100 {
            writer.write_at(line(Verdict::Allow), now);
        }
        for _ in 0..8 {
            writer.write_at(line(Verdict::Deny), now);
        }
        let count = |verdict, kind| {
            let kept = kept.0.borrow();
            kept.iter().filter(|l| l.verdict == verdict && l.kind == kind).count()
        };
        assert_eq!(count(Verdict::Allow, Kind::Connect), 10);
        assert_eq!(count(Verdict::Deny, Kind::Connect), 5);
        writer.own_up();
        let told: u64 = kept.0.borrow().iter().filter_map(|l| l.dropped).sum();
        assert_eq!(told, 90 + 3);
        writer.write_at(line(Verdict::Allow), now + Duration::from_secs(3));
        assert_eq!(count(Verdict::Allow, Kind::Connect), 11);
    }

    #[test]
    fn a_line_is_one_line_and_bounded() {
        let kept = Rc::new(Kept::default());
        let writer = Writer::new(Rc::clone(&kept) as Rc<dyn Sink>, SessionId::new(1, [0; 10]));
        let mut odd = line(Verdict::Deny);
        odd.path = Some("/a\r\nfake \u{2028}".repeat(1000));
        odd.method = Some("G\nET".to_owned());
        writer.write(odd);
        let kept = kept.0.borrow();
        assert_eq!(kept[0].method.as_deref(), Some("G\nET"));
        assert!(kept[0].path.as_ref().unwrap().len() <= LONGEST_FIELD + 4);
        assert!(kept[0].at > 0);
    }
}
