//! Named places at which a test can make a launch fail or die.
//!
//! Invariant: in a run without `BIVOUAC_TEST_FAULT` a point costs one branch. The variable is
//! `<point>:<fail|kill>:<file>`: when the point is reached its name is appended to the file, then
//! the step fails, or the process that runs it kills itself with SIGKILL. Read once by `serve`;
//! shims get theirs with the launch.

use std::io::Write;

use serde::{Deserialize, Serialize};

/// Variable that arms one point of the engine or the runtime.
pub const VARIABLE: &str = "BIVOUAC_TEST_FAULT";

/// Variable that leaves one kind of flush out (`pool` here, `records` in the store), with which a test
/// sees that its search for what a power cut loses can find something.
const LOSE: &str = "BIVOUAC_TEST_LOSE";

/// Whether a test wants this kind of flush left out.
pub(crate) fn loses(what: &str) -> bool {
    std::env::var(LOSE).is_ok_and(|told| told == what)
}

/// Every point of a launch, in order. Each comes after the named thing has been done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Point {
    /// serve has made the upper's subvolume.
    Upper,
    /// serve has made the folder of the logs.
    Logs,
    /// The shim exists and has done nothing yet.
    Shim,
    /// Control groups exist.
    Reserved,
    /// The overlay and /dev are mounted, detached.
    Rooted,
    /// The gate namespace stands.
    Gate,
    /// Init has been cloned and waits.
    Cloned,
    /// Init is in its control groups and has its network.
    Isolated,
    /// Init is ready.
    Started,
    /// The shim listens for a restarted serve.
    Listening,
    /// serve has heard of it.
    Launched,
}

impl Point {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Upper,
        Self::Logs,
        Self::Shim,
        Self::Reserved,
        Self::Rooted,
        Self::Gate,
        Self::Cloned,
        Self::Isolated,
        Self::Started,
        Self::Listening,
        Self::Launched,
    ];

    /// The name that tests use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Upper => "launch.upper",
            Self::Logs => "launch.logs",
            Self::Shim => "launch.shim",
            Self::Reserved => "launch.reserved",
            Self::Rooted => "launch.rooted",
            Self::Gate => "launch.gate",
            Self::Cloned => "launch.cloned",
            Self::Isolated => "launch.isolated",
            Self::Started => "launch.started",
            Self::Listening => "launch.listening",
            Self::Launched => "launch.launched",
        }
    }
}

/// A point that a test has armed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Armed {
    point: String,
    kill: bool,
    file: String,
}

impl Armed {
    /// Reads the variable. `None`: nothing is armed, or it names a point of another crate.
    #[must_use]
    pub fn from_env() -> Option<Self> {
        let text = std::env::var(VARIABLE).ok()?;
        let mut parts = text.splitn(3, ':');
        let (point, mode, file) = (parts.next()?, parts.next()?, parts.next()?);
        Point::ALL.iter().any(|p| p.name() == point).then(|| Self {
            point: point.to_owned(),
            kill: mode == "kill",
            file: file.to_owned(),
        })
    }

    /// Acts when `point` is the armed one.
    ///
    /// # Errors
    /// The fault that the test asked for.
    pub fn reach(armed: Option<&Self>, point: Point) -> std::io::Result<()> {
        match armed {
            Some(armed) if armed.point == point.name() => armed.strike(),
            _ => Ok(()),
        }
    }

    fn strike(&self) -> std::io::Result<()> {
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(&self.file)?;
        writeln!(file, "{}", self.point)?;
        if self.kill {
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::KILL)?;
        }
        Err(std::io::Error::other(format!("fault injected at {}", self.point)))
    }
}
