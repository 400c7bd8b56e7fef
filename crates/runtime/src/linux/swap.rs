//! Moving a session's memory to swap, for a long pause.
//!
//! Invariant: a host without swap is told so before anything is done; the limit of swap is what it was when
//! this answers, so what comes back stays in memory. Called by [`super::handle`].
//!
//! Not seen at work: the machine of its tests has no swap. There the refusal is tested, and that reclaiming
//! a frozen session's clean pages does no harm; how much goes to swap is the kernel's word.

use std::io;
use std::path::Path;

use super::cgroup::SessionGroups;
use crate::{FileError, FileErrorKind, RuntimeError};

/// Bytes of swap in a text as /proc/swaps: a head, then one line for each place.
fn size(swaps: &str) -> u64 {
    let kib = |line: &str| line.split_whitespace().nth(2).and_then(|word| word.parse::<u64>().ok());
    swaps.lines().skip(1).filter_map(kib).fold(0, u64::saturating_add).saturating_mul(1024)
}

/// Does it; answers how many bytes are not in memory any more.
///
/// # Errors
/// [`FileErrorKind::Invalid`] where the host has no swap; as writing to the group's files.
pub(super) fn page_out(groups: &SessionGroups) -> Result<u64, RuntimeError> {
    page_out_to(groups, Path::new("/proc/swaps"))
}

fn page_out_to(groups: &SessionGroups, swaps: &Path) -> Result<u64, RuntimeError> {
    let io = |source: io::Error| RuntimeError::Io { what: "move memory to swap".into(), source };
    // A kernel without swap has no such file.
    let swaps = match std::fs::read_to_string(swaps) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        other => other.map_err(io)?,
    };
    if size(&swaps) == 0 {
        let message =
            "this host has no swap, so memory cannot be moved out of a paused sandbox: add swap \
                       to the host, or pause without it"
                .to_owned();
        return Err(FileError { kind: FileErrorKind::Invalid, message }.into());
    }
    groups.page_out().map_err(io)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_is_counted() {
        let head = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert_eq!((size(""), size(head)), (0, 0));
        let two = format!(
            "{head}/swap file 4 1 -2\n/dev/zram0 partition 100 0 5\n/dev/sda2 partition 20 0 -3\n"
        );
        // A name with a space is another word there: the kernel writes it as \040.
        assert_eq!(size(&two.replace("/swap file", "/swap\\040f file")), 124 << 10);
    }
}
