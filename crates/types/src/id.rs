//! Identifiers: typed, prefixed, sortable by time of creation.
//!
//! Invariant: an id that exists was either built by [`encode`] or checked by `parse`, so it is
//! always safe as a file name, a cgroup name and a path segment.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Crockford's alphabet in lower case: no letter that is read as a digit.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// Characters behind the prefix: 48 bits of time and 80 random bits, five bits each.
const TAIL: usize = 26;

/// Writes time and randomness as 26 characters that sort by time.
#[must_use]
pub fn encode(millis: u64, random: [u8; 10]) -> String {
    let mut value = u128::from(millis & 0xffff_ffff_ffff) << 80;
    for (i, byte) in random.iter().enumerate() {
        value |= u128::from(*byte) << (72 - 8 * i);
    }
    let mut out = vec![0u8; TAIL];
    for slot in out.iter_mut().rev() {
        *slot = ALPHABET[(value & 31) as usize];
        value >>= 5;
    }
    out.into_iter().map(char::from).collect()
}

/// When an id was made, by the text of any kind of id; what stands behind a dot does not count. `None`: it
/// is none.
#[must_use]
pub fn made_at(text: &str) -> Option<i64> {
    let text = text.split('.').next()?;
    let (_, tail) = text.rsplit_once('_').unwrap_or(("", text));
    let time = tail.get(..10).filter(|_| tail.len() == TAIL)?;
    let value = time.bytes().try_fold(0i64, |value, byte| {
        let digit = ALPHABET.iter().position(|known| *known == byte)?;
        Some(value << 5 | i64::try_from(digit).ok()?)
    })?;
    // 26 characters are 130 bits, two more than there are.
    Some(value & 0xffff_ffff_ffff)
}

/// Why a text is not an identifier of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not a {kind} id: expected {prefix} followed by 26 lower-case characters")]
pub struct InvalidId {
    kind: &'static str,
    prefix: &'static str,
    text: String,
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The text that every id of this kind begins with.
            pub const PREFIX: &'static str = $prefix;

            /// A new id of the given time and randomness.
            #[must_use]
            pub fn new(millis: u64, random: [u8; 10]) -> Self {
                Self(format!("{}{}", $prefix, encode(millis, random)))
            }

            /// Checks a text that came from outside.
            ///
            /// # Errors
            /// [`InvalidId`] when prefix, length or alphabet differ.
            pub fn parse(text: &str) -> Result<Self, InvalidId> {
                let tail = text.strip_prefix($prefix).unwrap_or("");
                if tail.len() == TAIL && tail.bytes().all(|b| ALPHABET.contains(&b)) {
                    Ok(Self(text.to_owned()))
                } else {
                    let text = text.chars().take(80).collect();
                    Err(InvalidId { kind: $kind, prefix: $prefix, text })
                }
            }

            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(text: String) -> Result<Self, InvalidId> {
                Self::parse(&text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
    };
}

id!(
    /// A sandbox, the named thing. Internal: clients use its name.
    SandboxId, "sandbox", "box_"
);
id!(
    /// One run of a sandbox; new at each resume.
    SessionId, "session", "sbx_"
);
id!(
    /// One process tree in a session.
    CommandId, "command", "cmd_"
);
id!(
    /// An immutable filesystem state.
    SnapshotId, "snapshot", "snap_"
);
id!(
    /// A volume that outlives sandboxes.
    DriveId, "drive", "drive_"
);
id!(
    /// A header value of a policy, kept in the vault.
    ValueId, "value", "val_"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_by_time_and_parse_back() {
        let early = SessionId::new(1_000, [255; 10]);
        let late = SessionId::new(1_001, [0; 10]);
        assert!(early < late);
        assert_eq!(SessionId::parse(late.as_str()), Ok(late));
    }

    #[test]
    fn foreign_text_is_refused() {
        for text in [
            "",
            "sbx_",
            "cmd_00000000000000000000000000",
            "sbx_../../../../../../../../../x",
            "sbx_0000000000000000000000000",
            "sbx_000000000000000000000000000",
            "sbx_0000000000000000000000000U",
        ] {
            assert!(SessionId::parse(text).is_err(), "{text}");
        }
    }
}
