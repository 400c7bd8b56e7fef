//! New identifiers, names and labels.
//!
//! Invariant: ids of one process grow strictly, also within a millisecond and when the clock goes
//! backwards, so "newest first, ties by id" is the order in which things were made.

use std::sync::{Mutex, PoisonError};

use bivouac_types::Millis;
use bivouac_types::id::{CommandId, DriveId, SandboxId, SessionId, SnapshotId, ValueId};

use crate::error::Error;

const LETTERS: &[u8; 32] = b"abcdefghijkmnopqrstuvwxyz2345678";

const FIRST: [&str; 32] = [
    "amber", "brave", "brisk", "calm", "clear", "cosy", "crisp", "early", "fair", "fleet", "fresh",
    "gentle", "golden", "green", "hardy", "keen", "light", "lucky", "merry", "mild", "nimble",
    "noble", "plain", "proud", "quick", "quiet", "ready", "sharp", "silver", "steady", "swift",
    "warm",
];
const SECOND: [&str; 32] = [
    "alder", "aspen", "badger", "beacon", "birch", "brook", "camp", "cedar", "cliff", "comet",
    "crane", "ember", "falcon", "fern", "finch", "fjord", "glade", "harbor", "heron", "lantern",
    "larch", "lynx", "marten", "meadow", "otter", "pine", "ridge", "river", "rowan", "summit",
    "tarn", "willow",
];

/// The source of new ids.
#[derive(Debug, Default)]
pub(crate) struct Ids {
    last: Mutex<(u64, u128)>,
}

impl Ids {
    fn next(&self, now: Millis) -> Result<(u64, [u8; 10]), Error> {
        let millis = u64::try_from(now).unwrap_or(0);
        let mut bytes = [0; 16];
        random(&mut bytes[6..])?;
        // The top bit stays free: room to count up within the millisecond.
        bytes[6] &= 0x7f;
        let fresh = u128::from_be_bytes(bytes);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = if millis > last.0 { (millis, fresh) } else { (last.0, last.1 + 1) };
        let tail = last.1.to_be_bytes();
        let mut out = [0; 10];
        out.copy_from_slice(&tail[6..]);
        Ok((last.0, out))
    }

    pub(crate) fn sandbox(&self, now: Millis) -> Result<SandboxId, Error> {
        self.next(now).map(|(millis, tail)| SandboxId::new(millis, tail))
    }

    pub(crate) fn session(&self, now: Millis) -> Result<SessionId, Error> {
        self.next(now).map(|(millis, tail)| SessionId::new(millis, tail))
    }

    pub(crate) fn command(&self, now: Millis) -> Result<CommandId, Error> {
        self.next(now).map(|(millis, tail)| CommandId::new(millis, tail))
    }

    pub(crate) fn value(&self, now: Millis) -> Result<ValueId, Error> {
        self.next(now).map(|(millis, tail)| ValueId::new(millis, tail))
    }

    pub(crate) fn drive(&self, now: Millis) -> Result<DriveId, Error> {
        self.next(now).map(|(millis, tail)| DriveId::new(millis, tail))
    }

    pub(crate) fn snapshot(&self, now: Millis) -> Result<SnapshotId, Error> {
        self.next(now).map(|(millis, tail)| SnapshotId::new(millis, tail))
    }
}

fn random(bytes: &mut [u8]) -> Result<(), Error> {
    getrandom::fill(bytes).map_err(|e| {
        Error::internal("The host gave no random numbers.")
            .because(std::io::Error::other(e.to_string()))
    })
}

fn letters<const N: usize>() -> Result<String, Error> {
    let mut bytes = [0; N];
    random(&mut bytes)?;
    Ok(bytes.iter().map(|b| char::from(LETTERS[usize::from(b % 32)])).collect())
}

/// A name for a sandbox that was given none: readable, and all but surely free.
pub(crate) fn sandbox_name() -> Result<String, Error> {
    let mut pick = [0; 2];
    random(&mut pick)?;
    let (first, second) = (FIRST[usize::from(pick[0] % 32)], SECOND[usize::from(pick[1] % 32)]);
    Ok(format!("{first}-{second}-{}", letters::<6>()?))
}

/// A DNS label that cannot be guessed: whoever knows it reaches the port.
pub(crate) fn subdomain() -> Result<String, Error> {
    Ok(format!("sb-{}", letters::<20>()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_grow_within_a_millisecond_and_against_the_clock() {
        let ids = Ids::default();
        let mut last = ids.session(5_000).unwrap();
        for now in std::iter::repeat_n(5_000, 500).chain([4_000, 5_001, 5_001, 1]) {
            let next = ids.session(now).unwrap();
            assert!(next > last, "{next} after {last}");
            assert_eq!(SessionId::parse(next.as_str()).as_ref(), Ok(&next));
            last = next;
        }
    }

    #[test]
    fn generated_names_and_labels_are_valid_and_differ() {
        let mut seen = std::collections::HashSet::new();
        for _ in 0..200 {
            let name = sandbox_name().unwrap();
            bivouac_types::name::check_sandbox_name(&name).unwrap();
            assert_eq!(bivouac_types::name::hostname(&name), name);
            let label = subdomain().unwrap();
            assert!(label.len() <= 63 && label.starts_with("sb-"));
            assert!(
                label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            );
            assert!(seen.insert(name) && seen.insert(label));
        }
    }
}
