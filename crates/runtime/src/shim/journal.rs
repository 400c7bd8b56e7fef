//! What a shim says: JSON lines on standard error, which is the engine's `shims.log`.
//!
//! The lines have the shape of the engine's own JSON log, so that one search for a request's id finds
//! both. Invariant: a line is one write, holds no argument, variable or output of a command, and never
//! blocks the session: one that cannot be written is dropped. Used by the shim's tasks.

use std::fmt::Write as _;

use bivouac_types::id::{CommandId, SessionId};
use serde_json::json;

use crate::proto::ShimStart;

/// A log of more is begun anew: many shims write it for as long as the host runs.
const LIMIT: i64 = 32 << 20;

/// How grave a line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// For those who follow one request.
    Debug,
    /// Something went wrong.
    Warn,
}

/// One shim's voice.
#[derive(Debug)]
pub(super) struct Journal {
    session: SessionId,
    debug: bool,
}

/// What a line is about.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct About<'a> {
    /// Id of the request that caused it.
    pub(super) request: Option<&'a str>,
    /// The command.
    pub(super) command: Option<&'a CommandId>,
    /// The exit code of a command that ended.
    pub(super) code: Option<i32>,
    /// How long it took, µs.
    pub(super) took_us: Option<u64>,
}

impl Journal {
    pub(super) fn new(session: SessionId, debug: bool) -> Self {
        Self { session, debug }
    }

    /// The voice of the session that is being started.
    pub(super) fn of(start: &ShimStart) -> Self {
        Self::new(start.spec.session.clone(), start.plan.log_debug)
    }

    /// Writes a line, if lines of its level are wanted.
    pub(super) fn say(&self, level: Level, message: &str, about: About<'_>) {
        if level == Level::Debug && !self.debug {
            return;
        }
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        let line = self.line(level, message, about, (now.tv_sec, now.tv_nsec));
        let stderr = std::io::stderr();
        if rustix::fs::fstat(&stderr).is_ok_and(|file| file.st_size > LIMIT) {
            let _ = rustix::fs::ftruncate(&stderr, 0);
        }
        let _ = rustix::io::write(&stderr, line.as_bytes());
    }

    fn line(
        &self,
        level: Level,
        message: &str,
        about: About<'_>,
        (seconds, nanos): (i64, i64),
    ) -> String {
        let mut fields = json!({ "message": message, "session": self.session });
        let mut put = |key: &str, value: Option<serde_json::Value>| {
            if let Some(value) = value {
                fields[key] = value;
            }
        };
        put("request", about.request.map(Into::into));
        put("command", about.command.map(|id| id.as_str().into()));
        put("code", about.code.map(Into::into));
        put("took_us", about.took_us.map(Into::into));
        let level = match level {
            Level::Debug => "DEBUG",
            Level::Warn => "WARN",
        };
        let mut line = json!({
            "timestamp": timestamp(seconds, nanos),
            "level": level,
            "target": "bivouac_shim",
            "fields": fields,
        })
        .to_string();
        line.push('\n');
        line
    }
}

/// `2026-11-30T07:17:07.123456Z`. The days are counted in eras of 400 years that begin in March, so
/// that the leap day is the last one.
fn timestamp(seconds: i64, nanos: i64) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let shifted = days + 719_468;
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + i64::from(month <= 2);
    let mut out = String::with_capacity(27);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let _ = write!(
        out,
        "{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}.{:06}Z",
        nanos / 1000
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(timestamp(0, 0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(timestamp(951_782_400, 1_999), "2000-02-29T00:00:00.000001Z");
        assert_eq!(timestamp(1_796_023_027, 123_456_789), "2026-11-30T07:17:07.123456Z");
        assert_eq!(timestamp(4_107_542_399, 0), "2100-02-28T23:59:59.000000Z");
        assert_eq!(timestamp(4_107_542_400, 0), "2100-03-01T00:00:00.000000Z");
    }

    #[test]
    fn a_line_has_what_a_search_needs() {
        let session = SessionId::new(1, [0; 10]);
        let journal = Journal::new(session.clone(), true);
        let command = CommandId::new(1, [0; 10]);
        let about = About {
            request: Some("req_1"),
            command: Some(&command),
            code: Some(3),
            ..About::default()
        };
        let line = journal.line(Level::Debug, "command ended", about, (0, 0));
        assert!(line.ends_with("}\n") && line.matches('\n').count() == 1);
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["fields"]["request"], "req_1");
        assert_eq!(value["fields"]["session"], session.as_str());
        assert_eq!(value["fields"]["command"], command.as_str());
        assert_eq!(value["fields"]["code"], 3);
        assert!(value["fields"].get("took_us").is_none());
    }
}
