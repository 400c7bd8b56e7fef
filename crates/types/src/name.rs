//! Names and small limits that clients send: one place, so that HTTP, the command line and the
//! machine file agree. Sources: CONTRACT and reference/vercel-api.md §2.0, §2.2.

use serde::{Deserialize, Serialize};

/// A namespace: everything that a team's project owns. Created on first use.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Namespace {
    /// Team id or slug.
    pub team: String,
    /// Project id or slug.
    pub project: String,
}

/// What is wrong with a value that a client sent: which field, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Invalid {field}: {reason}")]
pub struct Invalid {
    /// The field as the client wrote it, for example `resources.vcpus`.
    pub field: String,
    /// What is wrong and what is accepted.
    pub reason: String,
}

impl Invalid {
    /// A refusal of one field.
    pub fn new(field: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { field: field.into(), reason: reason.into() }
    }
}

/// Names that are fixed path segments of the API and so cannot name a sandbox.
const RESERVED: [&str; 3] = ["sessions", "snapshots", "drives"];

/// Checks a sandbox name: `^[a-zA-Z0-9_-]+$`, 128 characters at most, not a path segment of ours.
///
/// # Errors
/// [`Invalid`] that says which rule was broken.
pub fn check_sandbox_name(name: &str) -> Result<(), Invalid> {
    let fail = |reason: &str| Err(Invalid::new("name", reason));
    if name.is_empty() || name.len() > 128 {
        return fail("must have 1 to 128 characters");
    }
    if !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
        return fail("only letters, digits, '_' and '-' are allowed");
    }
    if RESERVED.contains(&name) {
        return fail("'sessions', 'snapshots' and 'drives' are reserved");
    }
    Ok(())
}

/// Checks one half of a namespace (team or project): 1 to 128 printable characters, no slash.
///
/// # Errors
/// [`Invalid`] naming `field`.
pub fn check_scope(field: &str, text: &str) -> Result<(), Invalid> {
    let good = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
    if text.is_empty() || text.len() > 128 || !text.bytes().all(good) {
        let reason = "must have 1 to 128 characters out of letters, digits, '_', '-' and '.'";
        return Err(Invalid::new(field, reason));
    }
    Ok(())
}

/// The host name of a sandbox: its name as one DNS label (63 bytes at most, lower case).
#[must_use]
pub fn hostname(name: &str) -> String {
    let mut label: String = name
        .chars()
        .take(63)
        .map(|c| if c == '_' { '-' } else { c.to_ascii_lowercase() })
        .collect();
    while label.ends_with('-') {
        label.pop();
    }
    let label = label.trim_start_matches('-');
    if label.is_empty() { "sandbox".to_owned() } else { label.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandbox_names() {
        for good in ["a", "A_b-9", &"x".repeat(128)] {
            assert!(check_sandbox_name(good).is_ok(), "{good}");
        }
        for bad in ["", "a/b", "a.b", "é", "sessions", "snapshots", "drives", &"x".repeat(129)] {
            assert!(check_sandbox_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn host_names_are_dns_labels() {
        assert_eq!(hostname("My_Box"), "my-box");
        assert_eq!(hostname("___"), "sandbox");
        assert_eq!(hostname(&"a".repeat(128)).len(), 63);
        assert_eq!(hostname(&format!("{}_{}", "a".repeat(62), "b")), "a".repeat(62));
    }
}
