//! What can go wrong, as a caller sees it.
//!
//! Owns: [`Error`], its kinds and its stable wire codes. Invariant: `message` is for the client and
//! holds no secret and no host path of ours; the cause is kept for the log. A semantic error is
//! never `Internal`. Called by every module of this crate; HTTP maps kinds to statuses.

use std::sync::Arc;

use bivouac_runtime::{FileErrorKind, RuntimeError, StdinErrorKind};
use bivouac_types::command::ExecFailure;
use bivouac_types::name::Invalid;
use bivouac_types::session::{Session, SessionStatus};

/// What kind of error, and with it the HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// 400: the request is wrong; nothing changed.
    Invalid,
    /// 401.
    Unauthorized,
    /// 403.
    Forbidden,
    /// 404.
    NotFound,
    /// 409: it contradicts the present state.
    Conflict,
    /// 410: it was there and is not any more.
    Gone,
    /// 422: it is on its way from one state to another.
    Transition,
    /// 429: there is no room now.
    TooMany,
    /// 504: the sandbox did not take part in time.
    Timeout,
    /// 503: the engine is starting or stopping.
    Unavailable,
    /// 500: our fault.
    Internal,
}

/// An error with its wire code and the sentence for the client.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What kind.
    pub kind: ErrorKind,
    /// Stable code for programs.
    pub code: &'static str,
    /// For the client: what happened, to which object, what next.
    pub message: String,
    /// Extra fields of the wire error, for example `bytesWritten`.
    pub detail: serde_json::Map<String, serde_json::Value>,
    /// For the log.
    #[source]
    pub source: Option<Cause>,
}

/// The cause of an [`Error`], shared because parallel callers get the same one.
#[derive(Debug, Clone, thiserror::Error)]
#[error(transparent)]
pub struct Cause(Arc<dyn std::error::Error + Send + Sync>);

impl Error {
    /// An error without a cause.
    pub fn new(kind: ErrorKind, code: &'static str, message: impl Into<String>) -> Self {
        Self { kind, code, message: message.into(), detail: serde_json::Map::new(), source: None }
    }

    /// 400 `bad_request`.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, "bad_request", message)
    }

    /// 404 `not_found`.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, "not_found", message)
    }

    /// 500 `internal_error`: the client learns what could not be done, the log why.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, "internal_error", message)
    }

    /// Adds the cause, for the log.
    #[must_use]
    pub fn because(mut self, cause: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.source = Some(Cause(Arc::new(cause)));
        self
    }

    /// Adds an extra wire field.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<serde_json::Value>) -> Self {
        self.detail.insert(key.to_owned(), value.into());
        self
    }

    /// 410: a snapshot that is deleted, expired or unknown.
    pub(crate) fn no_snapshot(id: &str) -> Self {
        let message =
            format!("Snapshot {id} was not found: it was deleted, has expired or never existed.");
        Self::new(ErrorKind::Gone, "snapshot_not_found", message)
    }

    /// 404: a session that does not exist, or belongs to another team.
    pub(crate) fn no_session(id: &impl std::fmt::Display) -> Self {
        Self::not_found(format!("Sandbox session {id} was not found."))
    }

    /// 404: a name that is not taken.
    pub(crate) fn no_sandbox(name: &str) -> Self {
        Self::not_found(format!("Sandbox '{name}' was not found in this project."))
    }

    /// 404: a command that does not exist in that session.
    pub(crate) fn no_command(id: &impl std::fmt::Display) -> Self {
        Self::not_found(format!("Command {id} was not found in this session."))
    }

    /// Why a session that is not running takes no work. Clients look at status, code and words
    /// (reference/junior-and-boxes.md §1.3), so all three say the same.
    pub(crate) fn not_running(session: &Session) -> Self {
        let id = &session.id;
        match session.status {
            SessionStatus::Stopping => Self::new(
                ErrorKind::Transition,
                "sandbox_stopping",
                format!(
                    "Sandbox session {id} is stopping and will be stopped shortly; resume the sandbox and try again."
                ),
            ),
            SessionStatus::Snapshotting => Self::new(
                ErrorKind::Transition,
                "sandbox_snapshotting",
                format!(
                    "Sandbox session {id} is creating a snapshot and will be stopped shortly; resume the sandbox and try again."
                ),
            ),
            SessionStatus::Running => Self::stopped(id, "the engine has lost sight of it"),
            _ => {
                let why = session.reason.as_deref().unwrap_or("it was stopped");
                Self::stopped(id, why)
            }
        }
    }

    /// 410 `sandbox_stopped`.
    pub(crate) fn stopped(id: &impl std::fmt::Display, why: &str) -> Self {
        let message = format!("Sandbox session {id} is no longer available: {why}.");
        Self::new(ErrorKind::Gone, "sandbox_stopped", message)
    }
}

impl From<Invalid> for Error {
    fn from(invalid: Invalid) -> Self {
        Self::invalid(invalid.to_string())
    }
}

impl From<bivouac_store::StoreError> for Error {
    fn from(error: bivouac_store::StoreError) -> Self {
        use bivouac_store::StoreError;
        match &error {
            StoreError::BadText => {
                return Self::invalid("Invalid request: a text must not hold a NUL");
            }
            StoreError::Changed { .. } => {
                let message = "What this request is about was changed at the same time; try again.";
                return Self::new(ErrorKind::TooMany, "busy", message).because(error);
            }
            away if away.is_away() => {
                let message = "The engine's database is away; look at what has become of this, then try again.";
                return Self::new(ErrorKind::Unavailable, "database_unavailable", message)
                    .because(error);
            }
            _ => {}
        }
        Self::internal("The engine's database did not answer; see the engine's log.").because(error)
    }
}

impl From<RuntimeError> for Error {
    fn from(error: RuntimeError) -> Self {
        match &error {
            RuntimeError::Exec { failure, message } => {
                // The word lets the command line choose its exit code.
                let word = serde_json::to_value(failure).unwrap_or_default();
                let code = match failure {
                    // The Python client's own tests ask for this one by name.
                    ExecFailure::NotFound => "executable_not_found",
                    _ => "bad_request",
                };
                Self::new(ErrorKind::Invalid, code, message.clone()).with("failure", word)
            }
            RuntimeError::File(file) => {
                let (kind, code) = match file.kind {
                    FileErrorKind::NotFound => (ErrorKind::NotFound, "not_found"),
                    FileErrorKind::NoSpace => (ErrorKind::Invalid, "disk_full"),
                    FileErrorKind::Busy => (ErrorKind::Conflict, "conflict"),
                    FileErrorKind::Exists
                    | FileErrorKind::WrongType
                    | FileErrorKind::Invalid
                    | FileErrorKind::Other => (ErrorKind::Invalid, "bad_request"),
                };
                Self::new(kind, code, file.message.clone())
            }
            RuntimeError::Gone(session) => Self::stopped(session, "it has ended"),
            RuntimeError::NoCommand(command) => Self::no_command(command),
            RuntimeError::Stdin { kind, written, message } => {
                let (kind, code) = match kind {
                    StdinErrorKind::NotAttached => {
                        (ErrorKind::Invalid, "command_stdin_unavailable")
                    }
                    StdinErrorKind::Closed => (ErrorKind::NotFound, "not_found"),
                    StdinErrorKind::Gap => (ErrorKind::Conflict, "conflict"),
                    StdinErrorKind::Stuck => (ErrorKind::Timeout, "timeout"),
                };
                Self::new(kind, code, message.clone()).with("bytesWritten", *written)
            }
            RuntimeError::NoImage(message) => Self::not_found(message.clone()),
            RuntimeError::NoSnapshot(name) => Self::no_snapshot(name),
            RuntimeError::Launch { session, step, .. } => {
                let message = format!(
                    "Sandbox session {session} could not be started (step {step}); see the engine's log."
                );
                Self::new(ErrorKind::Internal, "launch_failed", message).because(error)
            }
            RuntimeError::Io { .. } => {
                let message = "The host could not do this; see the engine's log.";
                Self::internal(message).because(error)
            }
        }
    }
}
