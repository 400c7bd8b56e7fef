//! Commands: what to run, how it ended, why it could not start.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Millis;
use crate::id::{CommandId, SessionId};
use crate::terminal::TtySize;

/// What to run. No shell is involved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSpec {
    /// Executable, looked up in the environment's PATH when it has no slash.
    pub program: String,
    /// Arguments after the program.
    pub args: Vec<String>,
    /// Absolute, or relative to the session's working folder; absent is that folder.
    pub cwd: Option<String>,
    /// Merged over the sandbox's environment.
    pub env: BTreeMap<String, String>,
    /// Run as root of the sandbox instead of its default user.
    pub sudo: bool,
    /// SIGKILL for the whole tree after so many ms.
    pub timeout_ms: Option<u64>,
    /// Keep standard input open for [`CommandSpec`]'s `stdin` calls; else it is empty.
    pub attach_stdin: bool,
    /// On a terminal of this size: one stream of output, and standard input that stays open.
    pub tty: Option<TtySize>,
    /// Name of the terminal session that it is; needs `tty`.
    pub terminal: Option<String>,
}

/// A command's record. It outlives the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Its id.
    pub id: CommandId,
    /// The session that it runs in.
    pub session_id: SessionId,
    /// Executable as asked for.
    pub name: String,
    /// Arguments.
    pub args: Vec<String>,
    /// Absolute working folder.
    pub cwd: String,
    /// Whether standard input can be written.
    pub attach_stdin: bool,
    /// It has a terminal.
    pub tty: bool,
    /// Name of the terminal session that it is.
    pub terminal: Option<String>,
    /// When it was started.
    pub started_at: Millis,
    /// How it ended; absent while it runs.
    pub end: Option<CommandEnd>,
}

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandEnd {
    /// Exit code, 128+n after signal n. Absent only when it is not known: see `reason`.
    pub exit_code: Option<i32>,
    /// Wall time from start to end, ms.
    pub duration_ms: i64,
    /// What ended it, or a part of it, if not the program itself: the shell of a pipeline may say 0
    /// when one of its programs was killed.
    pub reason: Option<EndReason>,
}

/// Why a command ended, when the program did not end by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// Its timeout passed.
    Timeout,
    /// The sandbox's memory limit was hit while it ran and the kernel killed a process.
    OutOfMemory,
    /// The sandbox's process limit was hit while it ran.
    ProcessLimit,
    /// The session was stopped.
    SandboxStopped,
    /// The session's shim died: how the command ended cannot be known.
    Lost,
}

/// Why a command could not start. Typed, so that every door can hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecFailure {
    /// No such executable in PATH, or no file at that path.
    NotFound,
    /// The file is there and may not be executed.
    NotExecutable,
    /// The file is executable and not in a format that the kernel runs.
    BadFormat,
    /// The working folder is missing or not a folder.
    BadCwd,
    /// Arguments and environment are too long together.
    TooLong,
    /// The sandbox's process limit is reached.
    ProcessLimit,
    /// The sandbox's memory limit is reached.
    OutOfMemory,
    /// Anything else; the errno tells.
    Other,
}

/// Which of a command's outputs a piece belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}
