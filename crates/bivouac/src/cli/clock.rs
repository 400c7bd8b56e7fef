//! The client's own clock, for ages in tables. The engine's times come from its `Clock`; a client
//! process has none, so this is the one place here that asks the system.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since the epoch.
pub(crate) fn now_ms() -> i64 {
    #[expect(
        clippy::disallowed_methods,
        reason = "a client has no engine Clock; only ages in tables use it"
    )]
    let now = SystemTime::now();
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// A span of time as people say it: `12s`, `5m`, `3h`, `2d`.
pub(crate) fn span(ms: i64) -> String {
    let seconds = ms.max(0) / 1000;
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7_199 => format!("{}m", seconds / 60),
        7_200..=172_799 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// The time of day of a moment, UTC: `10:59:25`.
pub(crate) fn time_of_day(ms: i64) -> String {
    let seconds = ms.div_euclid(1_000).rem_euclid(86_400);
    format!("{:02}:{:02}:{:02}", seconds / 3_600, seconds / 60 % 60, seconds % 60)
}

/// A duration of a command: milliseconds count.
pub(crate) fn duration(ms: i64) -> String {
    if ms < 1_000 {
        format!("{}ms", ms.max(0))
    } else if ms < 10_000 {
        format!("{}.{}s", ms / 1_000, ms % 1_000 / 100)
    } else {
        span(ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_short() {
        let cases =
            [(-5, "0s"), (90_000, "90s"), (300_000, "5m"), (7_200_000, "2h"), (172_800_000, "2d")];
        for (ms, text) in cases {
            assert_eq!(span(ms), text);
        }
        assert_eq!(time_of_day(1_700_000_000_999), "22:13:20");
        assert_eq!(time_of_day(-1), "23:59:59");
        assert_eq!(duration(7), "7ms");
        assert_eq!(duration(1_550), "1.5s");
        assert_eq!(duration(61_000), "61s");
    }
}
