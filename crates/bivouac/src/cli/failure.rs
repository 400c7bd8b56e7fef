//! How a verb ends: the exit status, and how an error is shown.
//!
//! Invariant: an error goes to stderr as `error:`, its causes as `  caused by:`, what to do next as
//! `hint:`; the exit status is one of the table in `bivouac help exit-codes`. Every verb returns
//! [`Outcome`]; `cli::main` prints and turns it into the process's code.

use std::process::ExitCode;

use super::client::CallError;
use super::output;

/// How the process ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExitStatus {
    /// What was asked for was done.
    Success,
    /// It could not be done.
    Failure,
    /// The command line was wrong; nothing was tried.
    Usage,
    /// The code of a command in a sandbox, passed through.
    External(u8),
}

impl ExitStatus {
    /// The status of a command that ended with `code`. Codes over 255 do not exist on Linux.
    pub(crate) fn of_command(code: i64) -> Self {
        match u8::try_from(code) {
            Ok(0) => Self::Success,
            Ok(code) => Self::External(code),
            Err(_) => Self::Failure,
        }
    }

    /// The status of a process that signal `number` would have killed.
    pub(crate) fn of_signal(number: u8) -> Self {
        Self::External(128u8.saturating_add(number))
    }

    /// The number.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::Failure => 1,
            Self::Usage => 2,
            Self::External(code) => code,
        }
    }
}

impl From<ExitStatus> for ExitCode {
    fn from(status: ExitStatus) -> Self {
        Self::from(status.code())
    }
}

/// An error on its way to the user.
#[derive(Debug)]
pub(crate) struct Failure {
    error: anyhow::Error,
    hints: Vec<String>,
    status: ExitStatus,
}

/// What a verb returns.
pub(crate) type Outcome<T = ExitStatus> = Result<T, Failure>;

impl Failure {
    /// A failure with a message of its own.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self::from(anyhow::Error::msg(message.into()))
    }

    /// A mistake in the command line.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(message).status(ExitStatus::Usage)
    }

    /// Adds what the user can do next.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// Takes better hints in the place of those that there are.
    pub(crate) fn instead(mut self, hints: Vec<String>) -> Self {
        self.hints = hints;
        self
    }

    /// Ends the process with another status.
    pub(crate) fn status(mut self, status: ExitStatus) -> Self {
        self.status = status;
        self
    }

    /// Shows the error and answers the status to end with.
    pub(crate) fn report(&self) -> ExitStatus {
        let mut said = self.error.to_string();
        output::error_line(&said);
        for cause in self.error.chain().skip(1).map(ToString::to_string) {
            // Some causes only pass on what the next one says.
            if cause != said {
                output::cause_line(&cause);
            }
            said = cause;
        }
        for hint in &self.hints {
            output::hint(hint);
        }
        self.status
    }

    /// Whether the error is an `E`.
    pub(crate) fn is<E: std::error::Error + Send + Sync + 'static>(&self) -> bool {
        self.error.is::<E>()
    }

    /// The error as an `E`, if it is one.
    pub(crate) fn cause<E: std::error::Error + Send + Sync + 'static>(&self) -> Option<&E> {
        self.error.downcast_ref()
    }

    /// The call that failed, if one did.
    pub(crate) fn call(&self) -> Option<&CallError> {
        self.cause()
    }

    /// Says what had happened before.
    pub(crate) fn after(self, earlier: &dyn std::error::Error) -> Self {
        let Self { error, hints, status } = self;
        Self { error: error.context(earlier.to_string()), hints, status }
    }

    /// The first line, for messages that list several failures.
    pub(crate) fn summary(&self) -> String {
        self.error.to_string()
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let hints = error.downcast_ref::<CallError>().map(CallError::hints).unwrap_or_default();
        Self { error, hints, status: ExitStatus::Failure }
    }
}

/// Says what was being done when an error came up.
pub(crate) trait Explain<T> {
    /// Puts `what` in front of the cause.
    fn explain(self, what: impl FnOnce() -> String) -> Outcome<T>;
}

impl<T, E: Into<anyhow::Error>> Explain<T> for Result<T, E> {
    fn explain(self, what: impl FnOnce() -> String) -> Outcome<T> {
        self.map_err(|error| Failure::from(error.into().context(what())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_pass_through() {
        assert_eq!(ExitStatus::of_command(0).code(), 0);
        assert_eq!(ExitStatus::of_command(42).code(), 42);
        assert_eq!(ExitStatus::of_command(255).code(), 255);
        assert_eq!(ExitStatus::of_command(256).code(), 1, "never a success by truncation");
        assert_eq!(ExitStatus::of_command(-1).code(), 1);
        assert_eq!(ExitStatus::of_signal(2).code(), 130);
    }
}
