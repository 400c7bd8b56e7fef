//! How long a box lives, and what ends and wakes it.
//!
//! Invariant: the default is what a sandbox of the API has: a time limit, no idle rule, nobody wakes it but
//! its callers, and a lost run stays lost.

use serde::{Deserialize, Serialize};

use crate::Millis;
use crate::name::Invalid;

/// Shortest and longest idle rule, ms: ten seconds and thirty days.
pub const IDLE_STOP_MS: std::ops::RangeInclusive<i64> = 10_000..=30 * 86_400_000;
/// Longest time that a hook may take, ms.
pub const MAX_HOOK_MS: u64 = 600_000;
/// Time that a hook has when none is told, ms.
pub const DEFAULT_HOOK_MS: u64 = 30_000;

/// What is done about a run that ended though nobody asked: its host restarted, or its shim died.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    /// Nothing, until somebody starts it.
    #[default]
    No,
    /// It is started again from what was kept.
    UnlessStopped,
}

/// A command that the engine runs by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// For `sh -c`.
    pub command: String,
    /// How long it may take, ms; what runs then is killed, and what the hook was for goes on.
    #[serde(default = "default_hook_ms")]
    pub timeout_ms: u64,
}

fn default_hook_ms() -> u64 {
    DEFAULT_HOOK_MS
}

/// The rules of one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Life {
    /// Stopped after so long without activity, ms. With it the time limit of a session does not cut it: it is
    /// extended for as long as there is activity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_stop_ms: Option<i64>,
    /// Paused, not stopped, when the idle rule says so.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub idle_pause: bool,
    /// What is done about a run that was lost.
    pub restart: Restart,
    /// Whether a request to one of its ports, or an SSH connection, starts it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub wake: bool,
    /// Runs inside before a stop, whoever asked for that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pre_stop: Option<Hook>,
}

impl Life {
    /// Checks what a client asked for.
    ///
    /// # Errors
    /// [`Invalid`] that names the field.
    pub fn check(&self) -> Result<(), Invalid> {
        if let Some(ms) = self.idle_stop_ms
            && !IDLE_STOP_MS.contains(&ms)
        {
            let (from, to) = (IDLE_STOP_MS.start(), IDLE_STOP_MS.end());
            return Err(Invalid::new("idleStopMs", format!("must be {from} to {to} ms, got {ms}")));
        }
        if self.idle_pause && self.idle_stop_ms.is_none() {
            return Err(Invalid::new("idlePause", "needs idleStopMs"));
        }
        let Some(hook) = &self.pre_stop else { return Ok(()) };
        if hook.command.is_empty() || hook.command.contains('\0') || hook.command.len() > 64 << 10 {
            return Err(Invalid::new("preStop.command", "must have 1 to 65536 bytes, and no NUL"));
        }
        if !(100..=MAX_HOOK_MS).contains(&hook.timeout_ms) {
            let reason = format!("must be 100 to {MAX_HOOK_MS} ms, got {}", hook.timeout_ms);
            return Err(Invalid::new("preStop.timeoutMs", reason));
        }
        Ok(())
    }
}

/// What is to differ in the rules of a sandbox. `None`: as it is. Inner `None`: cleared.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LifeChange {
    /// See [`Life::idle_stop_ms`]. Without an idle rule nothing is paused by it either.
    pub idle_stop_ms: Option<Option<i64>>,
    /// See [`Life::idle_pause`].
    pub idle_pause: Option<bool>,
    /// See [`Life::restart`].
    pub restart: Option<Restart>,
    /// See [`Life::wake`].
    pub wake: Option<bool>,
    /// See [`Life::pre_stop`].
    pub pre_stop: Option<Option<Hook>>,
}

impl LifeChange {
    /// The change that makes any rules these.
    #[must_use]
    pub fn to(life: &Life) -> Self {
        Self {
            idle_stop_ms: Some(life.idle_stop_ms),
            idle_pause: Some(life.idle_pause),
            restart: Some(life.restart),
            wake: Some(life.wake),
            pre_stop: Some(life.pre_stop.clone()),
        }
    }

    /// Lays it over rules. What comes of that is to be checked by [`Life::check`].
    pub fn apply(&self, life: &mut Life) {
        if let Some(idle) = self.idle_stop_ms {
            life.idle_stop_ms = idle;
            life.idle_pause &= idle.is_some();
        }
        if let Some(pause) = self.idle_pause {
            life.idle_pause = pause;
        }
        if let Some(restart) = self.restart {
            life.restart = restart;
        }
        if let Some(wake) = self.wake {
            life.wake = wake;
        }
        if let Some(hook) = &self.pre_stop {
            life.pre_stop.clone_from(hook);
        }
    }
}

/// Most attempts in a row to start a lost sandbox again.
pub const MAX_RESTARTS: u32 = 12;

/// What the restart policy of a sandbox has done.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Restarts {
    /// How often it was started again.
    pub total: u64,
    /// Of those, the last ones in a row that did not last.
    pub in_a_row: u32,
    /// When the last one was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_at: Option<Millis>,
}

impl Restarts {
    /// There were too many in a row.
    #[must_use]
    pub fn gave_up(&self) -> bool {
        self.in_a_row >= MAX_RESTARTS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_has_no_rules() {
        let life: Life = serde_json::from_str("{}").unwrap();
        assert_eq!(life, Life::default());
        assert_eq!(life.check(), Ok(()));
    }

    #[test]
    fn a_change_touches_what_it_names() {
        let hook = Hook { command: "sync".to_owned(), timeout_ms: 1000 };
        let whole = Life {
            idle_stop_ms: Some(60_000),
            idle_pause: true,
            restart: Restart::UnlessStopped,
            wake: true,
            pre_stop: Some(hook),
        };
        let mut life = Life::default();
        LifeChange::to(&whole).apply(&mut life);
        assert_eq!(life, whole);
        LifeChange::default().apply(&mut life);
        assert_eq!(life, whole);
        let change = LifeChange { idle_stop_ms: Some(None), ..LifeChange::default() };
        change.apply(&mut life);
        assert_eq!((life.idle_stop_ms, life.idle_pause, life.wake), (None, false, true));
        assert_eq!(life.check(), Ok(()));
    }

    #[test]
    fn bounds_are_told_by_field() {
        let hook = |command: &str, timeout_ms| {
            let pre_stop = Some(Hook { command: command.to_owned(), timeout_ms });
            Life { pre_stop, ..Life::default() }
        };
        for (life, field) in [
            (Life { idle_stop_ms: Some(9_999), ..Life::default() }, "idleStopMs"),
            (Life { idle_pause: true, ..Life::default() }, "idlePause"),
            (hook("", 1000), "preStop.command"),
            (hook("true", 99), "preStop.timeoutMs"),
            (hook("true", MAX_HOOK_MS + 1), "preStop.timeoutMs"),
        ] {
            let error = life.check().unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}
