//! The audit line of one request, written when the last of it is over.
//!
//! Invariant: one line for each request that was judged, however it ends; no query, no header value, no
//! body in it. Held by whatever lives as long as the request does.

use std::rc::Rc;
use std::time::Instant;

use super::Interception;
use super::body::Meter;
use super::refuse::Refusal;
use crate::audit::{Kind, Line};
use crate::flows::{FlowGuard, InFlight};
use crate::reason::{Reason, Verdict};

/// One request's line.
pub(super) struct Ledger {
    context: Rc<Interception>,
    flow: FlowGuard,
    /// The flow's note of this request, for sweeps.
    in_flight: Option<InFlight>,
    line: Option<Box<Line>>,
    meter: Rc<Meter>,
    began: Instant,
    complete: bool,
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger").field("complete", &self.complete).finish_non_exhaustive()
    }
}

impl Ledger {
    pub(super) fn new(context: &Rc<Interception>, flow: &FlowGuard, generation: u64) -> Self {
        let session = context.setup.session.clone();
        let mut line = Line::new(session, Kind::Http, Verdict::Allow, Reason::DomainListed);
        line.flow = Some(flow.id());
        line.generation = generation;
        Self {
            context: Rc::clone(context),
            flow: flow.clone(),
            in_flight: None,
            line: Some(Box::new(line)),
            meter: Rc::new(Meter::default()),
            began: Instant::now(),
            complete: false,
        }
    }

    /// Changes the line.
    pub(super) fn note(&mut self, change: impl FnOnce(&mut Line)) {
        if let Some(line) = &mut self.line {
            change(line);
        }
    }

    pub(super) fn meter(&self) -> &Rc<Meter> {
        &self.meter
    }

    pub(super) fn began(&mut self, in_flight: InFlight) {
        self.in_flight = Some(in_flight);
    }

    pub(super) fn in_flight(&self) -> Option<&InFlight> {
        self.in_flight.as_ref()
    }

    /// The answer was given in full.
    pub(super) fn complete(&mut self) {
        self.complete = true;
    }

    /// Whether the flow was left to end by itself.
    pub(super) fn flow_is_whole(&self) -> bool {
        self.flow.is_cut().is_none()
    }

    /// Another one writes the line.
    pub(super) fn forget(&mut self) {
        self.line = None;
    }

    /// The request was answered here.
    pub(super) fn refused(&mut self, refusal: &Refusal) {
        self.complete = true;
        self.note(|line| {
            line.verdict = refusal.verdict();
            line.reason = refusal.reason;
            line.status = Some(refusal.status.as_u16());
            line.error = Some(refusal.message.clone());
        });
    }

    /// The destination broke off.
    pub(super) fn broke(&mut self, error: &hyper::Error) {
        self.complete = true;
        let error = describe(error);
        self.note(|line| {
            line.verdict = Verdict::Error;
            line.reason = Reason::UpstreamProtocol;
            line.error = Some(format!("the answer broke off: {error}"));
        });
    }
}

/// An error and what caused it, in one line.
pub(super) fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

impl Drop for Ledger {
    fn drop(&mut self) {
        let Some(mut line) = self.line.take() else { return };
        if !self.complete {
            if let Some(reason) = self.flow.is_cut() {
                line.verdict = Verdict::Cut;
                line.reason = reason;
            } else {
                line.error.get_or_insert_with(|| "the guest did not wait for the end".to_owned());
            }
        }
        line.bytes_up = Some(self.meter.up.get());
        line.bytes_down = Some(self.meter.down.get());
        line.duration_ms = u64::try_from(self.began.elapsed().as_millis()).ok();
        (self.context.setup.record)(*line);
    }
}
