//! Audit lines of a session's egress on their way to whoever reads them.
//!
//! Invariant: lines come from the file that the session's shim writes, in its order, each once; what
//! the file has dropped for room is told by a line of its own, never passed over. A reader costs
//! nothing but its own reading.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bivouac_types::access::Verb;
use bivouac_types::id::SessionId;
use bivouac_types::name::Namespace;
use serde_json::{Map, Value, json};

use crate::Engine;
use crate::api::Principal;
use crate::error::Error;
use crate::inner::Inner;

/// How often a follower looks for more.
const LOOK: Duration = Duration::from_millis(250);
/// Longest line that is passed on, bytes: a shim that was taken over writes these.
const MAX_LINE: usize = 64 * 1024;

/// What to read.
#[derive(Debug, Clone, Default)]
pub struct AuditQuery {
    /// Of this session; absent is the newest.
    pub session: Option<SessionId>,
    /// `next` of the last line that was read.
    pub since: Option<u64>,
    /// Wait for more until the session has ended.
    pub follow: bool,
}

/// A reader of audit lines.
#[derive(Debug)]
pub struct AuditLog {
    inner: Arc<Inner>,
    session: SessionId,
    from: u64,
    follow: bool,
    /// Nothing more is going to be written.
    last: bool,
    ready: VecDeque<Map<String, Value>>,
}

impl AuditLog {
    /// The session that it is about.
    #[must_use]
    pub fn session(&self) -> &SessionId {
        &self.session
    }

    /// The next line, with `next`: where to go on reading. `None` at the end.
    pub async fn next(&mut self) -> Option<Result<Map<String, Value>, Error>> {
        loop {
            if let Some(line) = self.ready.pop_front() {
                return Some(Ok(line));
            }
            match self.read().await {
                Ok(true) => {}
                Ok(false) if !self.follow || self.last => return None,
                Ok(false) => {
                    // Looked at before the last reading, so that reading has all of it.
                    self.last = !self.inner.runs(&self.session);
                    if !self.last {
                        tokio::time::sleep(LOOK).await;
                    }
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// Reads a piece. `false`: there is no more for now.
    async fn read(&mut self) -> Result<bool, Error> {
        let (bytes, next) = self.inner.runtime.read_audit(&self.session, self.from).await?;
        if next <= self.from {
            return Ok(false);
        }
        self.ready.extend(pieces(&bytes, self.from, next));
        self.from = next;
        Ok(true)
    }
}

/// The lines of a piece that ends at `next`; `from` is where it should have begun.
fn pieces(bytes: &[u8], from: u64, next: u64) -> Vec<Map<String, Value>> {
    let mut at = next.saturating_sub(bytes.len() as u64);
    let mut out = Vec::new();
    if at > from {
        // The rest of the place that the reader knew has made room for newer lines.
        let lost = json!({ "kind": "dropped", "lostBytes": at - from, "next": at });
        out.extend(lost.as_object().cloned());
    }
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        at = at.saturating_add(line.len() as u64);
        if line.len() > MAX_LINE {
            continue;
        }
        if let Ok(Value::Object(mut line)) = serde_json::from_slice(line) {
            line.insert("next".to_owned(), at.into());
            out.push(line);
        }
    }
    out
}

impl Engine {
    /// Reads what a sandbox's egress broker decided.
    ///
    /// # Errors
    /// 404 for the sandbox, or a session that is not its.
    pub async fn egress_log(
        &self,
        who: &Principal,
        ns: &Namespace,
        name: &str,
        query: AuditQuery,
    ) -> Result<AuditLog, Error> {
        who.may(Verb::Read, ns)?;
        let sandbox = self.inner.named(ns, name).await?.sandbox;
        let session = match query.session {
            Some(id) => {
                let row = self.inner.session_row(&ns.team, &id).await?;
                if row.session.sandbox_id != sandbox.id {
                    return Err(Error::no_session(&id));
                }
                id
            }
            None => sandbox.current_session_id,
        };
        let (inner, from) = (Arc::clone(&self.inner), query.since.unwrap_or(0));
        let ready = VecDeque::new();
        Ok(AuditLog { inner, session, from, follow: query.follow, last: false, ready })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_know_where_they_end() {
        let bytes = b"{\"a\":1}\nno json\n{\"b\":2}\n";
        let read = pieces(bytes, 100, 100 + bytes.len() as u64);
        assert_eq!(read.len(), 2);
        assert_eq!((read[0]["a"].as_u64(), read[0]["next"].as_u64()), (Some(1), Some(108)));
        assert_eq!(read[1]["next"].as_u64(), Some(100 + bytes.len() as u64));
    }

    #[test]
    fn what_was_dropped_is_told() {
        let bytes = b"{\"a\":1}\n";
        let read = pieces(bytes, 100, 200);
        assert_eq!(read[0]["kind"], "dropped");
        assert_eq!(
            (read[0]["lostBytes"].as_u64(), read[0]["next"].as_u64()),
            (Some(92), Some(192))
        );
        assert_eq!(read[1]["next"].as_u64(), Some(200));
    }
}
